//===- Passes.h - Transformations of the ssm dialect ------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_DIALECT_SSM_TRANSFORMS_PASSES_H
#define COREY_DIALECT_SSM_TRANSFORMS_PASSES_H

#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/IR/BuiltinOps.h"
#include "mlir/Pass/Pass.h"

namespace corey::ssm {
class ObserveOp;
class ScanOpInterface;

/// Feeds the statistics of the input of a scan to the site its chunk is bound
/// to, by an `ssm.observe` before it, outside of all `ssm.fused`. Returns
/// false, having done nothing, if the chunk is not bound to a site or its input
/// is observed for it already.
bool observeScanInput(ScanOpInterface scan);

/// Moves an observation out of the `ssm.fused` around it: no kernel can have
/// one inside. What is an argument of the region is observed before it. What
/// is computed in the region is computed before it, in a region of its own if
/// it takes several ops, and comes back as an argument; a remark of the
/// category `ssm-fuse` says that it is in memory now. Pointwise ops that the
/// rest needs as well are computed in both.
void moveObservationOut(ObserveOp observe);

/// Which projections `ssm-insert-hadamard` rotates besides those that ask.
enum class HadamardMode { None, All, Stats };

/// On a projection: its input is to be rotated.
inline constexpr llvm::StringLiteral kRotateAttr = "ssm.rotate";

/// What `ssm-hoist-weights` did.
struct HoistedWeights {
  /// Ops moved out of functions, and prepared weights made for them.
  unsigned ops = 0, weights = 0;
};

/// Moves what depends on weights alone into `@ssm.prepare`; see the pass
/// `ssm-hoist-weights`. Fails, with a diagnostic, if the module has something
/// else of that name.
llvm::FailureOr<HoistedWeights> hoistWeights(mlir::ModuleOp module);

/// Names of the attributes that tie compiled functions to their module.
/// @{
/// On a function argument: the symbol of the weight it receives.
inline constexpr llvm::StringLiteral kWeightArgAttr = "ssm.weight";
/// On a function argument or result: its name for users.
inline constexpr llvm::StringLiteral kNameAttr = "ssm.name";
/// On a function argument or result: it may have any strides. Kernels that can
/// read or write it where it lies do, for others it is copied.
inline constexpr llvm::StringLiteral kAnyStridesAttr = "ssm.any_strides";
/// On a shape function: what its constraints stand for.
inline constexpr llvm::StringLiteral kConstraintsAttr = "ssm.constraints";
/// In place of the symbol of a constraint: the first size is at least the
/// second, which is never less than it.
inline constexpr llvm::StringLiteral kAtLeast = ">=";
/// The function that computes prepared weights from the others.
inline constexpr llvm::StringLiteral kPrepareFunction = "ssm.prepare";
/// On a result of that function: the symbol of the prepared weight it is.
inline constexpr llvm::StringLiteral kPreparesAttr = "ssm.prepares";
/// Suffix of a shape function's name.
inline constexpr llvm::StringLiteral kShapesSuffix = ".shapes";
/// @}

#define GEN_PASS_DECL
#include "corey/Dialect/SSM/Transforms/Passes.h.inc"

#define GEN_PASS_REGISTRATION
#include "corey/Dialect/SSM/Transforms/Passes.h.inc"

} // namespace corey::ssm

#endif // COREY_DIALECT_SSM_TRANSFORMS_PASSES_H
