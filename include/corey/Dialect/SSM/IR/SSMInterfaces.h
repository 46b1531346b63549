//===- SSMInterfaces.h - Interfaces of the ssm dialect ----------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_DIALECT_SSM_IR_SSMINTERFACES_H
#define COREY_DIALECT_SSM_IR_SSMINTERFACES_H

#include "corey/Dialect/SSM/IR/DimSpec.h"
#include "corey/Dialect/SSM/IR/SSMAttrs.h"
#include "mlir/IR/Builders.h"
#include "mlir/IR/OpDefinition.h"

namespace corey::ssm {

/// Arithmetic of one op by the unit that carries it out, and the bytes of its
/// operands and results.
struct OpCost {
  /// Additions, multiplications and fused multiply-adds, outside matrices.
  int64_t fma = 0;
  /// Exponentials, logarithms, reciprocals and square roots.
  int64_t transcendental = 0;
  /// Multiply-adds that a matrix unit can take.
  int64_t matrix = 0;
  int64_t bytesRead = 0;
  int64_t bytesWritten = 0;
};

} // namespace corey::ssm

#include "corey/Dialect/SSM/IR/SSMInterfaces.h.inc"

#endif // COREY_DIALECT_SSM_IR_SSMINTERFACES_H
