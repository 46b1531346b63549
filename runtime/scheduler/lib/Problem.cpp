//===- Problem.cpp - Names of ops and element types -----------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Scheduler/Problem.h"

using namespace corey;
using namespace corey::scheduler;

const char *scheduler::opKindName(OpKind op) {
  switch (op) {
  case OpKind::SelectiveScan:
    return "selective_scan";
  case OpKind::SSD:
    return "ssd";
  }
  return "unknown";
}

Expected<OpKind> scheduler::parseOpKind(std::string_view text) {
  for (OpKind op : {OpKind::SelectiveScan, OpKind::SSD})
    if (text == opKindName(op))
      return op;
  return Status::invalidArgument(
      "expected an op of selective_scan and ssd, got '" + std::string(text) +
      "'");
}

const char *scheduler::elementTypeName(ElementType type) {
  switch (type) {
  case ElementType::F64:
    return "f64";
  case ElementType::F32:
    return "f32";
  case ElementType::F16:
    return "f16";
  case ElementType::BF16:
    return "bf16";
  }
  return "unknown";
}

int64_t scheduler::elementTypeSize(ElementType type) {
  switch (type) {
  case ElementType::F64:
    return 8;
  case ElementType::F32:
    return 4;
  case ElementType::F16:
  case ElementType::BF16:
    return 2;
  }
  return 0;
}

Expected<ElementType> scheduler::parseElementType(std::string_view text) {
  for (ElementType type : {ElementType::F64, ElementType::F32, ElementType::F16,
                           ElementType::BF16})
    if (text == elementTypeName(type))
      return type;
  return Status::invalidArgument(
      "expected a dtype of f64, f32, f16 and bf16, got '" + std::string(text) +
      "'");
}

int64_t scheduler::unsplitItems(const Problem &problem,
                                const Variant &variant) {
  // Items of an SSD share what is of a group.
  int64_t groups = problem.op == OpKind::SSD && problem.groups > 1 &&
                           problem.channels % problem.groups == 0
                       ? problem.groups
                       : 1;
  return problem.batch * groups *
         ((problem.channels / groups + variant.itemChannels - 1) /
          variant.itemChannels);
}
