//===- StatusTest.h - What tests of statuses share --------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_TEST_UNITTESTS_STATUSTEST_H
#define COREY_TEST_UNITTESTS_STATUSTEST_H

#include "corey/Status.h"
#include <cstdlib>
#include <gtest/gtest.h>
#include <utility>

/// Checks that a Status is a failure with the given code and message.
#define EXPECT_STATUS(Expression, Code, Message)                               \
  do {                                                                         \
    corey::Status Result = (Expression);                                       \
    EXPECT_EQ(Result.code(), corey::StatusCode::Code);                         \
    EXPECT_EQ(Result.message(), Message);                                      \
  } while (false)

/// Checks that an Expected failed with the given code and message.
#define EXPECT_FAILS(Expression, Code, Message)                                \
  do {                                                                         \
    auto Outcome = (Expression);                                               \
    ASSERT_FALSE(static_cast<bool>(Outcome));                                  \
    EXPECT_STATUS(Outcome.status(), Code, Message);                            \
  } while (false)

#define ASSERT_OK(Expression)                                                  \
  do {                                                                         \
    corey::Status Result = (Expression);                                       \
    ASSERT_TRUE(Result.isOk()) << Result.toString();                           \
  } while (false)

namespace corey {

/// The value; ends the process where there is none.
template <class T> T take(Expected<T> value) {
  if (!value) {
    ADD_FAILURE() << value.status().toString();
    std::abort();
  }
  return *std::move(value);
}

} // namespace corey

#endif // COREY_TEST_UNITTESTS_STATUSTEST_H
