//===- SchedulerOps.cpp - Lowering of what the scheduler serves -----------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "SchedulerOps.h"
#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Interfaces/FunctionInterfaces.h"

using namespace mlir;
using namespace corey;
using namespace corey::ssm;

/// Axes of a tensor that the run-time library observes.
static constexpr int64_t kMaxObservedRank = 8;

namespace {
struct BindChunkLowering : public OpRewritePattern<BindChunkOp> {
  using OpRewritePattern::OpRewritePattern;
  LogicalResult matchAndRewrite(BindChunkOp op,
                                PatternRewriter &rewriter) const override {
    // Who runs the program asks the site's policy. A constant also serves where
    // there is nobody to ask.
    int64_t fallback = 0;
    StringRef policy = op.getPolicy().value_or("");
    if (policy.consume_front("static:") &&
        (policy.getAsInteger(10, fallback) || fallback < 1))
      return op.emitOpError("expected a policy 'static:<tokens>', got '")
             << *op.getPolicy() << "'";
    OpBuffers e(rewriter, op);
    Value otherwise =
        arith::ConstantIndexOp::create(rewriter, op.getLoc(), fallback);
    Value chunk =
        e.callRuntime("corey_rt_chunk",
                      {e.siteAddress(op.getSiteAttr()), e.toI64(op.getBatch()),
                       e.toI64(op.getLength()), e.toI64(otherwise)},
                      rewriter.getI64Type());
    rewriter.replaceOpWithNewOp<arith::IndexCastOp>(op, rewriter.getIndexType(),
                                                    chunk);
    return success();
  }
};

/// Statistics are gathered by the run-time library, of the whole tensor at
/// once.
struct ObserveLowering : public OpRewritePattern<ObserveOp> {
  using OpRewritePattern::OpRewritePattern;
  LogicalResult matchAndRewrite(ObserveOp op,
                                PatternRewriter &rewriter) const override {
    OpBuffers e(rewriter, op);
    FailureOr<ObservedBuffer> x = describeObserved(e, op, rewriter);
    if (failed(x))
      return failure();
    e.callRuntime("corey_rt_observe", x->operands);
    rewriter.replaceOp(op, op.getX());
    return success();
  }
};
} // namespace

Value corey::allocateOnStack(Operation *op, OpBuilder &builder, int64_t count) {
  OpBuilder::InsertionGuard guard(builder);
  builder.setInsertionPointToStart(
      &op->getParentOfType<FunctionOpInterface>().getFunctionBody().front());
  return memref::AllocaOp::create(
      builder, op->getLoc(), MemRefType::get({count}, builder.getI64Type()));
}

FailureOr<ObservedBuffer> corey::describeObserved(OpBuffers &e, ObserveOp op,
                                                  OpBuilder &builder) {
  auto type = cast<RankedTensorType>(op.getX().getType());
  int64_t rank = type.getRank();
  if (rank > kMaxObservedRank)
    return op.emitOpError("expected a tensor of rank at most ")
           << kMaxObservedRank << ", got rank " << rank;
  Location loc = op.getLoc();
  auto index = [&](int64_t value) -> Value {
    return arith::ConstantIndexOp::create(builder, loc, value);
  };
  Value x = e.view(op.getX());
  Value layout = allocateOnStack(op, builder, 2 * rank);
  auto metadata = memref::ExtractStridedMetadataOp::create(builder, loc, x);
  for (int64_t i = 0; i < rank; ++i) {
    Value size = builder.createOrFold<memref::DimOp>(loc, x, i);
    memref::StoreOp::create(builder, loc, e.toI64(size), layout,
                            ValueRange{index(i)});
    memref::StoreOp::create(builder, loc, e.toI64(metadata.getStrides()[i]),
                            layout, ValueRange{index(rank + i)});
  }
  // An element type as its width; bf16 is told from f16 by a negative width.
  int64_t width = type.getElementTypeBitWidth();
  Value code =
      e.toI64(index(isa<BFloat16Type>(type.getElementType()) ? -width : width));
  return ObservedBuffer{{e.siteAddress(op.getSiteAttr()), e.address(x),
                         e.address(layout), e.toI64(index(rank)), code}};
}

void corey::populateChunkLowerings(RewritePatternSet &patterns) {
  patterns.add<BindChunkLowering>(patterns.getContext());
}
void corey::populateObserveLowerings(RewritePatternSet &patterns) {
  patterns.add<ObserveLowering>(patterns.getContext());
}
