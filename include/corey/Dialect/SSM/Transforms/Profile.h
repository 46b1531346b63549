//===- Profile.h - Measured statistics of values ----------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_DIALECT_SSM_TRANSFORMS_PROFILE_H
#define COREY_DIALECT_SSM_TRANSFORMS_PROFILE_H

#include "corey/Dialect/SSM/IR/SSMAttrs.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"

namespace corey::ssm {

/// Where the statistics of a value are kept: on the op whose result it is, the
/// `#ssm.stats` itself if the op has one result, else an array with one entry
/// per result, `unit` where nothing is known; on the argument if it is one of a
/// function.
inline constexpr llvm::StringLiteral kStatsAttr = "ssm.stats";

/// The statistics of a value, or null. An `ssm.observe` has those of its
/// operand, an argument of an `ssm.fused` those of the input.
StatsAttr getStats(mlir::Value value);
/// `value` is a result, or an argument of a function.
void setStats(mlir::Value value, StatsAttr stats);

/// Calls `callback` for every floating-point tensor value of `function` that a
/// run computes or gets, arguments first and then results in program order,
/// with the name of the site its statistics are kept under:
///
///   * the site of an `ssm.observe` of the value, if there is one;
///   * `<function>.arg#<i>` for argument i;
///   * `<function>.<op>#<k>` for the k-th op of its name, counted from 0, and
///     `:<i>` behind it for result i > 0; ops of this dialect go without
///     `ssm.`.
///
/// The names depend on the order of ops: whoever writes a profile and whoever
/// reads it must look at the same program, which is the captured one after
/// canonicalization. Constants, `tensor.empty`, results of `ssm.observe`, and
/// what is inside an `ssm.fused` are passed over.
void forEachProfiledValue(
    mlir::func::FuncOp function,
    llvm::function_ref<void(mlir::Value, llvm::StringRef)> callback);

} // namespace corey::ssm

#endif // COREY_DIALECT_SSM_TRANSFORMS_PROFILE_H
