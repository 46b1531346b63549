//===- Elementwise.cpp - Elementwise ops to linalg.generic ----------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "LoweringUtils.h"
#include "corey/Analysis/FusionPlan.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/IR/AffineExpr.h"

using namespace mlir;
using namespace corey;
using namespace corey::ssm;

static Value toElement(OpBuilder &b, Location loc, Value value, Type type) {
  if (value.getType() == type)
    return value;
  if (type.getIntOrFloatBitWidth() > value.getType().getIntOrFloatBitWidth())
    return arith::ExtFOp::create(b, loc, type, value);
  return arith::TruncFOp::create(b, loc, type, value);
}

namespace {
/// What a kernel over elements computes: `result` of pointwise ops in `set`.
struct ElementwiseKernel {
  Value result;
  llvm::function_ref<bool(Operation *)> contains;
  /// Values from outside, each once.
  SmallVector<Value> leaves;
  /// What has been looked at: there are many more paths than values.
  DenseSet<Value> seen;

  void collect(Value value) {
    if (!seen.insert(value).second)
      return;
    Operation *producer = value.getDefiningOp();
    if (!producer || !contains(producer)) {
      leaves.push_back(value);
      return;
    }
    for (Value operand : producer->getOperands())
      collect(operand);
  }

  Value emit(OpBuilder &b, Location loc, Value value, ValueRange args,
             DenseMap<Value, Value> &done) {
    if (Value known = done.lookup(value))
      return known;
    Value made;
    auto leaf = llvm::find(leaves, value);
    if (leaf != leaves.end()) {
      made = toElement(b, loc, args[leaf - leaves.begin()], b.getF32Type());
    } else {
      SmallVector<Value> operands;
      for (Value operand : value.getDefiningOp()->getOperands())
        operands.push_back(emit(b, loc, operand, args, done));
      made = cast<FusableOpInterface>(value.getDefiningOp())
                 .emitScalar(b, loc, operands);
    }
    return done[value] = made;
  }
};

/// One generic that widens to f32, applies the scalar functions and rounds.
/// Operands of lower rank stand on trailing axes.
Value buildGeneric(OpBuilder &builder, Location loc, Value result,
                   llvm::function_ref<bool(Operation *)> contains) {
  ElementwiseKernel kernel{result, contains, {}, {}};
  kernel.collect(result);
  auto type = cast<RankedTensorType>(result.getType());
  int64_t rank = type.getRank();
  // A size may be known of one tensor only.
  SmallVector<OpFoldResult> sizes(rank);
  for (int64_t i = 0; i < rank; ++i)
    if (!type.isDynamicDim(i))
      sizes[i] = builder.getIndexAttr(type.getDimSize(i));
  for (Value leaf : kernel.leaves) {
    auto leafType = cast<RankedTensorType>(leaf.getType());
    int64_t offset = rank - leafType.getRank();
    for (int64_t i = 0; i < leafType.getRank(); ++i)
      if (!sizes[offset + i])
        sizes[offset + i] = tensor::getMixedSize(builder, loc, leaf, i);
  }
  Value init =
      tensor::EmptyOp::create(builder, loc, sizes, type.getElementType());
  AffineMap identity = builder.getMultiDimIdentityMap(rank);
  SmallVector<AffineMap> maps;
  for (Value leaf : kernel.leaves)
    maps.push_back(identity.getMinorIdentityMap(
        rank, cast<ShapedType>(leaf.getType()).getRank(),
        builder.getContext()));
  maps.push_back(identity);
  SmallVector<utils::IteratorType> iterators(rank,
                                             utils::IteratorType::parallel);
  auto generic = linalg::GenericOp::create(
      builder, loc, init.getType(), kernel.leaves, init, maps, iterators,
      [&](OpBuilder &b, Location loc, ValueRange args) {
        DenseMap<Value, Value> done;
        Value value = kernel.emit(b, loc, result, args, done);
        linalg::YieldOp::create(
            b, loc, toElement(b, loc, value, type.getElementType()));
      });
  Value made = generic.getResult(0);
  if (made.getType() != type)
    made = tensor::CastOp::create(builder, loc, type, made);
  return made;
}

/// Any pointwise op on its own. Those around an anchor that is still to be
/// lowered wait for it.
struct ElementwiseLowering
    : public OpInterfaceRewritePattern<FusableOpInterface> {
  using OpInterfaceRewritePattern::OpInterfaceRewritePattern;

  LogicalResult matchAndRewrite(FusableOpInterface fusable,
                                PatternRewriter &rewriter) const override {
    if (!fusable.isPointwise())
      return failure();
    Operation *op = fusable;
    if (isa_and_nonnull<FusedOp>(op->getParentOp()) &&
        succeeded(planFusedRegion(op->getParentOp())))
      return failure();
    rewriter.replaceOp(op,
                       buildGeneric(rewriter, op->getLoc(), op->getResult(0),
                                    [&](Operation *o) { return o == op; }));
    return success();
  }
};

/// A region of pointwise ops becomes a loop over vectors. Any other region is
/// inlined: its anchor has been lowered, with the pointwise ops around it, or
/// no kernel can be made of it.
struct LowerFused : public OpRewritePattern<FusedOp> {
  LowerFused(MLIRContext *context, VectorTarget target)
      : OpRewritePattern(context), target(target) {}

  /// Vectors that are worked on together. The ops of a long region are one
  /// chain: only other elements can fill the time that each of them takes.
  static constexpr int64_t kTogether = 4;

  LogicalResult matchAndRewrite(FusedOp op,
                                PatternRewriter &rewriter) const override {
    Block &block = op.getBody().front();
    auto yield = cast<YieldOp>(block.getTerminator());
    FailureOr<FusionPlan> plan = planFusedRegion(op);
    if (succeeded(plan) && !plan->anchor && plan->ops.size() > 1) {
      Operation *last = plan->result.getDefiningOp();
      rewriter.setInsertionPoint(last);
      auto type = cast<RankedTensorType>(plan->result.getType());
      if (type.getRank() && !type.isDynamicDim(type.getRank() - 1)) {
        OpLowering e(rewriter, last, target);
        auto compute = e.regionResult();
        Value out = e.output(0);
        e.parallelOver(out, type.getRank() - 1, [&](ValueRange row) {
          e.forLanes(type.getShape().back(), kTogether * target.lanes,
                     [&](Value i, int64_t lanes) {
                       SmallVector<Value> at = append(row, i);
                       e.store(compute(at, lanes), out, at);
                     });
        });
        e.replace(rewriter, out);
      } else {
        rewriter.replaceAllUsesWith(
            plan->result,
            buildGeneric(rewriter, op.getLoc(), plan->result,
                         [&](Operation *o) { return plan->contains(o); }));
      }
    }
    rewriter.inlineBlockBefore(&block, op, op.getInputs());
    rewriter.replaceOp(op, yield.getValues());
    rewriter.eraseOp(yield);
    return success();
  }

  VectorTarget target;
};
} // namespace

void corey::populateElementwiseLowerings(RewritePatternSet &patterns,
                                         VectorTarget target) {
  patterns.add<ElementwiseLowering>(patterns.getContext());
  patterns.add<LowerFused>(patterns.getContext(), target);
}
