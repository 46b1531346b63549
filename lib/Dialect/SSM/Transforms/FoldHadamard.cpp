//===- FoldHadamard.cpp - Rotations over linear ops -----------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Dialect/SSM/IR/SSMOps.h"
#include "corey/Dialect/SSM/Transforms/Passes.h"
#include "corey/Dialect/SSM/Transforms/Profile.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/IR/PatternMatch.h"

namespace corey::ssm {
#define GEN_PASS_DEF_SSMFOLDHADAMARD
#include "corey/Dialect/SSM/Transforms/Passes.h.inc"
} // namespace corey::ssm

using namespace mlir;
using namespace corey::ssm;

namespace {
/// The transform that makes `value`, if nothing else sees its result.
HadamardOp soleTransform(Value value) {
  auto op = value.getDefiningOp<HadamardOp>();
  return op && value.hasOneUse() ? op : HadamardOp();
}

/// Whether `value` follows from weights and constants alone.
bool isOfWeights(Value value) {
  Operation *op = value.getDefiningOp();
  return op && isPure(op) && llvm::all_of(op->getOperands(), [](Value operand) {
           return isOfWeights(operand);
         });
}

struct SSMFoldHadamard
    : public corey::ssm::impl::SSMFoldHadamardBase<SSMFoldHadamard> {
  using Base::Base;

  void runOnOperation() override {
    bool hoisted = getOperation().lookupSymbol(kPrepareFunction) != nullptr;
    size_t folded = 0;
    for (auto function : getOperation().getOps<func::FuncOp>())
      while (step(function, folded)) {
      }
    numFolded += folded;
    if (hoisted && folded && failed(hoistWeights(getOperation())))
      signalPassFailure();
  }

private:
  /// Makes one change, if there is one to make.
  bool step(func::FuncOp function, size_t &folded) {
    IRRewriter rewriter(function.getContext());
    WalkResult walk = function.walk([&](Operation *op) {
      rewriter.setInsertionPoint(op);
      if (auto hadamard = dyn_cast<HadamardOp>(op)) {
        if (cancel(rewriter, hadamard)) {
          ++numCancelled;
          return WalkResult::interrupt();
        }
        if (foldIntoProjection(rewriter, hadamard)) {
          ++folded;
          return WalkResult::interrupt();
        }
      } else if (moveOver(rewriter, op)) {
        ++numMerged;
        return WalkResult::interrupt();
      }
      return WalkResult::advance();
    });
    return walk.wasInterrupted();
  }

  /// H (H x) = x.
  static bool cancel(RewriterBase &rewriter, HadamardOp op) {
    auto inner = op.getX().getDefiningOp<HadamardOp>();
    if (!inner || inner.getBlock() != op.getBlock() ||
        inner.getX().getType() != op.getType())
      return false;
    rewriter.replaceOp(op, inner.getX());
    if (inner->use_empty())
      rewriter.eraseOp(inner);
    return true;
  }

  /// H (x W^T + b + r) = x (H W)^T + H b + H r.
  static bool foldIntoProjection(RewriterBase &rewriter, HadamardOp op) {
    auto projection = op.getX().getDefiningOp<ProjectionOp>();
    if (!projection || !projection.getY().hasOneUse() ||
        projection.getWeightScale() || !isOfWeights(projection.getWeight()) ||
        (projection.getBias() && !isOfWeights(projection.getBias())) ||
        projection.getType() != op.getType())
      return false;
    auto weightType = cast<RankedTensorType>(projection.getWeight().getType());
    if (!weightType.hasStaticShape())
      return false;
    auto isTransform = [&](Value value) {
      auto inner = value.getDefiningOp<HadamardOp>();
      return inner && inner.getBlock() == op.getBlock() &&
             inner.getX().getType() == value.getType();
    };
    if (projection.getResidual() && !isTransform(projection.getResidual()))
      return false;
    Location loc = op.getLoc();
    // What is behind the projection on the weight side must come before it.
    rewriter.setInsertionPoint(projection);
    auto wide = [&](Value value) -> Value {
      auto type = cast<RankedTensorType>(value.getType());
      if (type.getElementType().isF32())
        return value;
      return CastOp::create(rewriter, loc, type.clone(rewriter.getF32Type()),
                            value);
    };
    auto transpose = [&](Value value) -> Value {
      auto type = cast<RankedTensorType>(value.getType());
      Value empty = tensor::EmptyOp::create(
          rewriter, loc,
          ArrayRef<int64_t>{type.getDimSize(1), type.getDimSize(0)},
          type.getElementType());
      return linalg::TransposeOp::create(rewriter, loc, value, empty,
                                         ArrayRef<int64_t>{1, 0})
          ->getResult(0);
    };
    auto transform = [&](Value value) -> Value {
      return HadamardOp::create(rewriter, loc, value.getType(), value,
                                op.getBlock());
    };
    Value weight =
        transpose(transform(transpose(wide(projection.getWeight()))));
    Value bias = projection.getBias();
    if (bias)
      bias = transform(wide(bias));
    Value residual = projection.getResidual();
    if (residual)
      residual = residual.getDefiningOp<HadamardOp>().getX();
    auto moved = ProjectionOp::create(rewriter, loc, op.getType(),
                                      projection.getX(), weight, bias, residual,
                                      /*weight_scale=*/Value());
    moved->setDiscardableAttrs(projection->getDiscardableAttrDictionary());
    // Its statistics were those of what is no longer computed.
    moved->removeDiscardableAttr(kStatsAttr);
    if (Attribute stats = op->getDiscardableAttr(kStatsAttr))
      moved->setDiscardableAttr(kStatsAttr, stats);
    Value old = projection.getResidual();
    rewriter.replaceOp(op, moved.getY());
    rewriter.eraseOp(projection);
    if (old && old.use_empty())
      rewriter.eraseOp(old.getDefiningOp());
    return true;
  }

  /// f(H a, H b) = H f(a, b) for linear f.
  static bool moveOver(RewriterBase &rewriter, Operation *op) {
    if (!isa<AddOp, SubOp, NegOp, ScaleOp>(op))
      return false;
    HadamardOp first = soleTransform(op->getOperand(0));
    if (!first || first.getX().getType() != op->getResult(0).getType())
      return false;
    SmallVector<Value> operands;
    SmallVector<HadamardOp> inner;
    for (Value operand : op->getOperands()) {
      HadamardOp transform = soleTransform(operand);
      if (!transform || transform.getBlock() != first.getBlock() ||
          transform.getX().getType() != operand.getType())
        return false;
      inner.push_back(transform);
      operands.push_back(transform.getX());
    }
    rewriter.modifyOpInPlace(op, [&] { op->setOperands(operands); });
    rewriter.setInsertionPointAfter(op);
    Value result = op->getResult(0);
    auto outer = HadamardOp::create(rewriter, op->getLoc(), result.getType(),
                                    result, first.getBlock());
    if (Attribute stats = op->removeDiscardableAttr(kStatsAttr))
      outer->setDiscardableAttr(kStatsAttr, stats);
    rewriter.replaceAllUsesExcept(result, outer.getY(), outer);
    for (HadamardOp transform : inner)
      rewriter.eraseOp(transform);
    return true;
  }
};
} // namespace
