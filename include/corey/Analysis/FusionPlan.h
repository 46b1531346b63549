//===- FusionPlan.h - How ops become one kernel -----------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_ANALYSIS_FUSIONPLAN_H
#define COREY_ANALYSIS_FUSIONPLAN_H

#include "mlir/IR/Operation.h"
#include "llvm/ADT/SmallPtrSet.h"

namespace corey {

/// The largest group of elements of a norm that a rotation can follow in its
/// kernel: a GPU has it in the registers of one block of threads, and what the
/// rotation exchanges in half of the shared memory that a block can have.
inline constexpr int64_t kMaxRotatedGroup = 32768;

/// A set of ops of one block that an emitter can make one kernel of. There is
/// one op at most, the anchor, whose loops are the kernel's. Pointwise ops
/// before it are computed where it reads its streamed operands, those behind it
/// before it writes its first result; what lies between is never in memory.
/// Without an anchor the kernel is a loop over elements.
///
/// An anchor that has a whole group of the last axis at hand when it makes its
/// result, a norm, can have a Hadamard transform behind it, the rotation.
///
/// A projection of one token of each sequence, of few rows therefore, can have
/// a norm before it, the prologue: every block of threads of its kernel makes
/// all of x for itself. Where there are many sequences nevertheless, what is
/// before the projection becomes a kernel of its own. In the same way a
/// selective scan of one token can have the projection before it that makes
/// its delta from a few columns.
struct FusionPlan {
  /// In the order of the block.
  llvm::SmallVector<mlir::Operation *> ops;
  llvm::SmallPtrSet<mlir::Operation *, 8> set;
  /// Null if all ops are pointwise.
  mlir::Operation *anchor = nullptr;
  /// The transform of the anchor's first result, or of what pointwise ops make
  /// of that; null if there is none. Its blocks divide the anchor's groups.
  mlir::Operation *rotation = nullptr;
  /// Pointwise ops that depend on the anchor's first result, in order; those
  /// that depend on the rotation's result if there is a rotation.
  llvm::SmallVector<mlir::Operation *> epilogue;
  /// What the kernel writes: the last value of the epilogue, else the result of
  /// the rotation, the anchor's first result or that of the last pointwise op.
  /// Further results of the anchor (states) are written as well.
  mlir::Value result;

  bool contains(mlir::Operation *op) const { return op && set.contains(op); }
  /// The norm that makes what the anchor, a projection, reads, or from which
  /// pointwise ops make that, or the projection that makes delta of the anchor,
  /// a scan; null if there is none.
  mlir::Operation *prologue() const;
};

/// Whether `ops` break no rule that more ops could mend: the same checks, but
/// for values that leave and ops that do not depend on one another yet.
bool mayGrowIntoPlan(llvm::ArrayRef<mlir::Operation *> ops,
                     std::string *reason = nullptr);

/// Whether `op` may be the rotation of a kernel, behind another op's anchor.
bool mayRotate(mlir::Operation *op);

/// Operands whose producers can be computed in the kernel of `op`, where it
/// reads them: those that it streams, and x of a projection of one token of
/// each sequence.
llvm::SmallVector<mlir::OpOperand *> streamedOperandsOf(mlir::Operation *op);

/// The plan for `ops`, given in the order of their block. Fails with a reason,
/// for people, if no emitter can make one kernel of them: more than one anchor,
/// a rotation that does not fit, a value between them that is used elsewhere, a
/// path that leaves the set and comes back, shapes that differ, an operand that
/// the anchor reads more than once.
mlir::FailureOr<FusionPlan> planFusion(llvm::ArrayRef<mlir::Operation *> ops,
                                       std::string *reason = nullptr);

/// The plan for all ops of the region of an `ssm.fused`.
mlir::FailureOr<FusionPlan> planFusedRegion(mlir::Operation *fused,
                                            std::string *reason = nullptr);

} // namespace corey

#endif // COREY_ANALYSIS_FUSIONPLAN_H
