//===- SSMToLinalg.cpp - CPU lowering of the ssm dialect ------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Conversion/SSMToLinalg/SSMToLinalg.h"
#include "LoweringUtils.h"
#include "mlir/Dialect/Bufferization/IR/Bufferization.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include "mlir/Dialect/Vector/IR/VectorOps.h"
#include "mlir/Transforms/WalkPatternRewriteDriver.h"
#include "llvm/ADT/StringMap.h"
#include "llvm/TargetParser/Host.h"

namespace corey {
#define GEN_PASS_DEF_CONVERTSSMTOLINALG
#include "corey/Conversion/SSMToLinalg/Passes.h.inc"
} // namespace corey

using namespace mlir;
using namespace corey;
using namespace corey::ssm;

/// What corey_rt_observe takes.
static constexpr int64_t kMaxObservedRank = 8;

namespace {
struct BindChunkLowering : public SSMLowering<BindChunkOp> {
  using SSMLowering::SSMLowering;
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
    OpLowering e(rewriter, op, target);
    Value chunk =
        e.callRuntime("corey_rt_chunk",
                      {e.siteAddress(op.getSiteAttr()), e.toI64(op.getBatch()),
                       e.toI64(op.getLength()), e.toI64(e.index(fallback))},
                      e.b.getI64Type());
    rewriter.replaceOpWithNewOp<arith::IndexCastOp>(op, e.b.getIndexType(),
                                                    chunk);
    return success();
  }
};

/// Statistics are gathered by the run-time library, of the whole tensor at
/// once.
struct ObserveLowering : public SSMLowering<ObserveOp> {
  using SSMLowering::SSMLowering;
  LogicalResult matchAndRewrite(ObserveOp op,
                                PatternRewriter &rewriter) const override {
    auto type = cast<RankedTensorType>(op.getX().getType());
    int64_t rank = type.getRank();
    if (rank > kMaxObservedRank)
      return op.emitOpError("expected a tensor of rank at most ")
             << kMaxObservedRank << ", got rank " << rank;
    OpLowering e(rewriter, op, target);
    Value x = e.buffer(op.getX());
    // Sizes and strides lie on the stack of the function, once per op: the op
    // may be in a loop.
    Value layout;
    {
      OpBuilder::InsertionGuard guard(e.b);
      e.b.setInsertionPointToStart(&op->getParentOfType<FunctionOpInterface>()
                                        .getFunctionBody()
                                        .front());
      layout = memref::AllocaOp::create(
          e.b, e.loc, MemRefType::get({2 * rank}, e.b.getI64Type()));
    }
    auto metadata = memref::ExtractStridedMetadataOp::create(e.b, e.loc, x);
    for (int64_t i = 0; i < rank; ++i) {
      memref::StoreOp::create(e.b, e.loc, e.toI64(e.dim(x, i)), layout,
                              ValueRange{e.index(i)});
      memref::StoreOp::create(e.b, e.loc, e.toI64(metadata.getStrides()[i]),
                              layout, ValueRange{e.index(rank + i)});
    }
    // An element type as its width; bf16 is told from f16 by a negative width.
    int64_t width = type.getElementTypeBitWidth();
    Value code = e.toI64(
        e.index(isa<BFloat16Type>(type.getElementType()) ? -width : width));
    e.callRuntime("corey_rt_observe",
                  {e.siteAddress(op.getSiteAttr()), e.address(x),
                   e.address(layout), e.toI64(e.index(rank)), code});
    rewriter.replaceOp(op, op.getX());
    return success();
  }
};

struct ConvertSSMToLinalg
    : public corey::impl::ConvertSSMToLinalgBase<ConvertSSMToLinalg> {
  using Base::Base;

  void runOnOperation() override {
    FailureOr<VectorTarget> target =
        getVectorTarget(getOperation(), vectorBits);
    if (failed(target))
      return signalPassFailure();
    MLIRContext *context = &getContext();
    // Regions first: what they hold is lowered with the rest.
    auto isLowered = [](Operation *op) {
      return isa_and_nonnull<SSMDialect>(op->getDialect()) &&
             !isa<WeightOp, GetWeightOp, YieldOp>(op);
    };
    getOperation().walk([&](Operation *op) {
      if (isLowered(op))
        ++numLoweredOps;
    });
    RewritePatternSet patterns(context);
    populateElementwiseLowerings(patterns, *target);
    populateScanLowerings(patterns, *target);
    populateSSDLowerings(patterns, *target);
    populateRowLowerings(patterns, *target);
    populateQuantizationLowerings(patterns, *target);
    patterns.add<BindChunkLowering, ObserveLowering>(context, *target);
    FrozenRewritePatternSet frozen(std::move(patterns));
    // A lowering that refuses an op says why; nothing is to be added to that.
    bool explained = false;
    ScopedDiagnosticHandler handler(context, [&](Diagnostic &diagnostic) {
      explained |= diagnostic.getSeverity() == DiagnosticSeverity::Error;
      return failure();
    });
    // Fused regions nest; each round inlines one level.
    bool hadFused;
    do {
      hadFused = false;
      getOperation().walk([&](FusedOp) { hadFused = true; });
      walkAndApplyPatterns(getOperation(), frozen);
    } while (hadFused);
    WalkResult result = getOperation().walk([&](Operation *op) {
      if (!isLowered(op))
        return WalkResult::advance();
      if (!explained)
        op->emitError("expected every ssm op to have a CPU lowering");
      return WalkResult::interrupt();
    });
    if (result.wasInterrupted())
      signalPassFailure();
  }
};
} // namespace

FailureOr<VectorTarget> corey::getVectorTarget(Operation *op,
                                               int64_t vectorBits) {
  if (vectorBits == 0) {
    llvm::StringMap<bool> features = llvm::sys::getHostCPUFeatures();
    vectorBits = features.lookup("avx512f") ? 512 : 256;
  }
  if (vectorBits == 512)
    return VectorTarget{16, 32};
  if (vectorBits == 256)
    return VectorTarget{8, 16};
  op->emitError() << "expected vector-bits to be 0, 256 or 512, got "
                  << vectorBits;
  return failure();
}
