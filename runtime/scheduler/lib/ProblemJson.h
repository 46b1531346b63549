//===- ProblemJson.h - Ops and element types in files -----------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_SCHEDULER_LIB_PROBLEMJSON_H
#define COREY_SCHEDULER_LIB_PROBLEMJSON_H

#include "Json.h"
#include "corey/Scheduler/Problem.h"

namespace corey::scheduler {

/// Reads the fields "op" and "dtype".
inline void readKernelKind(json::Object &object, OpKind &op,
                           ElementType &type) {
  json::Value word = object["op"];
  if (Expected<OpKind> parsed = parseOpKind(word.string()))
    op = *parsed;
  else
    word.fail("\"selective_scan\" or \"ssd\"");
  word = object["dtype"];
  if (Expected<ElementType> parsed = parseElementType(word.string()))
    type = *parsed;
  else
    word.fail("\"f64\", \"f32\", \"f16\" or \"bf16\"");
}

} // namespace corey::scheduler

#endif // COREY_SCHEDULER_LIB_PROBLEMJSON_H
