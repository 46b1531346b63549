//===- Elementwise.cpp - Elementwise ops to linalg.generic ----------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "LoweringUtils.h"
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
/// Any pointwise op becomes one generic that widens to f32, applies the op's
/// scalar function and rounds. Operands of lower rank stand on trailing axes.
struct ElementwiseLowering
    : public OpInterfaceRewritePattern<FusableOpInterface> {
  using OpInterfaceRewritePattern::OpInterfaceRewritePattern;

  LogicalResult matchAndRewrite(FusableOpInterface fusable,
                                PatternRewriter &rewriter) const override {
    if (!fusable.isPointwise())
      return failure();
    Operation *op = fusable;
    Location loc = op->getLoc();
    auto type = cast<RankedTensorType>(op->getResult(0).getType());
    int64_t rank = type.getRank();
    // A size may be known of the operand or of the result only.
    SmallVector<OpFoldResult> sizes =
        tensor::getMixedSizes(rewriter, loc, op->getOperand(0));
    for (int64_t i = 0; i < rank; ++i)
      if (!type.isDynamicDim(i))
        sizes[i] = rewriter.getIndexAttr(type.getDimSize(i));
    Value init =
        tensor::EmptyOp::create(rewriter, loc, sizes, type.getElementType());
    AffineMap identity = rewriter.getMultiDimIdentityMap(rank);
    SmallVector<AffineMap> maps;
    for (Value operand : op->getOperands())
      maps.push_back(identity.getMinorIdentityMap(
          rank, cast<ShapedType>(operand.getType()).getRank(),
          rewriter.getContext()));
    maps.push_back(identity);
    SmallVector<utils::IteratorType> iterators(rank,
                                               utils::IteratorType::parallel);
    auto generic = linalg::GenericOp::create(
        rewriter, loc, init.getType(), op->getOperands(), init, maps, iterators,
        [&](OpBuilder &b, Location loc, ValueRange args) {
          SmallVector<Value> widened;
          for (Value arg : args.drop_back())
            widened.push_back(toElement(b, loc, arg, b.getF32Type()));
          Value result = fusable.emitScalar(b, loc, widened);
          linalg::YieldOp::create(
              b, loc, toElement(b, loc, result, type.getElementType()));
        });
    Value result = generic.getResult(0);
    if (result.getType() != type)
      result = tensor::CastOp::create(rewriter, loc, type, result);
    rewriter.replaceOp(op, result);
    return success();
  }
};

/// A fused region is inlined: on the CPU the loops of its members are fused by
/// the linalg passes.
struct InlineFused : public OpRewritePattern<FusedOp> {
  using OpRewritePattern::OpRewritePattern;
  LogicalResult matchAndRewrite(FusedOp op,
                                PatternRewriter &rewriter) const override {
    Block &block = op.getBody().front();
    auto yield = cast<YieldOp>(block.getTerminator());
    rewriter.inlineBlockBefore(&block, op, op.getInputs());
    rewriter.replaceOp(op, yield.getValues());
    rewriter.eraseOp(yield);
    return success();
  }
};
} // namespace

void corey::populateElementwiseLowerings(RewritePatternSet &patterns) {
  patterns.add<ElementwiseLowering, InlineFused>(patterns.getContext());
}
