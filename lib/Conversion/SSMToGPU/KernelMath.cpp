//===- KernelMath.cpp - Elementary functions of kernels -------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "KernelBuilder.h"
#include "corey/Conversion/SSMToGPU/SSMToGPU.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include "mlir/Dialect/Math/Transforms/Passes.h"
#include "mlir/Transforms/GreedyPatternRewriteDriver.h"

namespace corey {
#define GEN_PASS_DEF_EXPANDKERNELMATH
#include "corey/Conversion/SSMToGPU/Passes.h.inc"
} // namespace corey

using namespace mlir;
using namespace corey;

namespace {
struct ExpandExp : public OpRewritePattern<math::ExpOp> {
  using OpRewritePattern::OpRewritePattern;
  LogicalResult matchAndRewrite(math::ExpOp op,
                                PatternRewriter &rewriter) const override {
    if (!op.getType().isF32())
      return failure();
    KernelBuilder k(rewriter, op.getLoc());
    rewriter.replaceOp(op, k.exp(k.wrap(op.getOperand())).value);
    return success();
  }
};

/// An op that is an instruction, through the intrinsic that stands for it: the
/// conversion to NVVM would call a device library.
template <typename OpTy> struct ToIntrinsic : public OpRewritePattern<OpTy> {
  ToIntrinsic(MLIRContext *context, StringRef name)
      : OpRewritePattern<OpTy>(context), name(name) {}
  LogicalResult matchAndRewrite(OpTy op,
                                PatternRewriter &rewriter) const override {
    if (!op.getType().isF32())
      return failure();
    auto made = LLVM::CallIntrinsicOp::create(
        rewriter, op.getLoc(), op.getType(), rewriter.getStringAttr(name),
        op->getOperands());
    rewriter.replaceOp(op, made->getResult(0));
    return success();
  }
  StringRef name;
};

struct ExpandKernelMath
    : public corey::impl::ExpandKernelMathBase<ExpandKernelMath> {
  void runOnOperation() override {
    MLIRContext *context = &getContext();
    RewritePatternSet patterns(context);
    patterns.add<ExpandExp>(context);
    patterns.add<ToIntrinsic<math::AbsFOp>>(context, "llvm.fabs.f32");
    patterns.add<ToIntrinsic<math::SqrtOp>>(context, "llvm.sqrt.f32");
    patterns.add<ToIntrinsic<math::FloorOp>>(context, "llvm.floor.f32");
    patterns.add<ToIntrinsic<math::CopySignOp>>(context, "llvm.copysign.f32");
    patterns.add<ToIntrinsic<math::FmaOp>>(context, "llvm.fma.f32");
    patterns.add<ToIntrinsic<arith::MaxNumFOp>>(context, "llvm.maxnum.f32");
    patterns.add<ToIntrinsic<arith::MinNumFOp>>(context, "llvm.minnum.f32");
    patterns.add<ToIntrinsic<arith::MaximumFOp>>(context, "llvm.maximum.f32");
    patterns.add<ToIntrinsic<arith::MinimumFOp>>(context, "llvm.minimum.f32");
    populateMathPolynomialApproximationPatterns(patterns, [](StringRef name) {
      return name == "math.log1p" || name == "math.log" || name == "math.erf";
    });
    if (failed(applyPatternsGreedily(getOperation(), std::move(patterns))))
      signalPassFailure();
  }
};
} // namespace
