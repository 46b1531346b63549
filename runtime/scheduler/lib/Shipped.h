//===- Shipped.h - Data that is part of the library -------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_SCHEDULER_LIB_SHIPPED_H
#define COREY_SCHEDULER_LIB_SHIPPED_H

#include <string_view>
#include <vector>

namespace corey::scheduler {

/// The text of the shipped file `name`, for example "chunk-table.json"; null if
/// there is none.
const char *shippedFile(std::string_view name);
/// The names there are, sorted.
std::vector<std::string_view> shippedFiles();

} // namespace corey::scheduler

#endif // COREY_SCHEDULER_LIB_SHIPPED_H
