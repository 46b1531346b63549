//===- ExpandScalarMath.cpp - Elementary functions and narrow types -------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "LoweringUtils.h"
#include "corey/Conversion/SSMToLinalg/SSMToLinalg.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include "mlir/Dialect/Math/Transforms/Passes.h"
#include "mlir/Dialect/Vector/IR/VectorOps.h"
#include "mlir/Transforms/GreedyPatternRewriteDriver.h"

namespace corey {
#define GEN_PASS_DEF_EXPANDSCALARMATH
#include "corey/Conversion/SSMToLinalg/Passes.h.inc"
} // namespace corey

using namespace mlir;
using namespace corey;

namespace {
struct ExpandExp : public OpRewritePattern<math::ExpOp> {
  ExpandExp(MLIRContext *context, VectorTarget target)
      : OpRewritePattern(context), target(target) {}
  LogicalResult matchAndRewrite(math::ExpOp op,
                                PatternRewriter &rewriter) const override {
    if (!getElementTypeOrSelf(op.getType()).isF32())
      return failure();
    LoopEmitter e(rewriter, op.getLoc(), target);
    rewriter.replaceOp(op, e.exp(op.getOperand()));
    return success();
  }
  VectorTarget target;
};

static Value integerConstant(OpBuilder &b, Location loc, Type type,
                             int64_t value) {
  TypedAttr attr = b.getIntegerAttr(getElementTypeOrSelf(type), value);
  if (auto shaped = dyn_cast<ShapedType>(type))
    attr = DenseElementsAttr::get(shaped, attr);
  return arith::ConstantOp::create(b, loc, attr);
}

static Type cloneWith(Type like, Type element) {
  if (auto shaped = dyn_cast<ShapedType>(like))
    return shaped.clone(element);
  return element;
}

/// bf16 to f32: its bits are the upper half of f32's.
struct ExpandBF16Ext : public OpRewritePattern<arith::ExtFOp> {
  using OpRewritePattern::OpRewritePattern;
  LogicalResult matchAndRewrite(arith::ExtFOp op,
                                PatternRewriter &b) const override {
    Type type = op.getType();
    if (!getElementTypeOrSelf(op.getIn()).isBF16() ||
        !getElementTypeOrSelf(type).isF32())
      return failure();
    Location loc = op.getLoc();
    Type i32 = cloneWith(type, b.getI32Type());
    Value bits = arith::BitcastOp::create(
        b, loc, cloneWith(type, b.getI16Type()), op.getIn());
    bits = arith::ExtUIOp::create(b, loc, i32, bits);
    bits =
        arith::ShLIOp::create(b, loc, bits, integerConstant(b, loc, i32, 16));
    b.replaceOpWithNewOp<arith::BitcastOp>(op, type, bits);
    return success();
  }
};

/// f32 to bf16, to nearest even. Integers to the last step: the back end turns
/// what it does with values of type bf16 into library calls.
struct ExpandBF16Trunc : public OpRewritePattern<arith::TruncFOp> {
  using OpRewritePattern::OpRewritePattern;
  LogicalResult matchAndRewrite(arith::TruncFOp op,
                                PatternRewriter &b) const override {
    Type from = op.getIn().getType();
    if (!getElementTypeOrSelf(op.getType()).isBF16() ||
        !getElementTypeOrSelf(from).isF32())
      return failure();
    Location loc = op.getLoc();
    Type i32 = cloneWith(from, b.getI32Type());
    auto constant = [&](int64_t v) { return integerConstant(b, loc, i32, v); };
    Value bits = arith::BitcastOp::create(b, loc, i32, op.getIn());
    Value upper = arith::ShRUIOp::create(b, loc, bits, constant(16));
    Value odd = arith::AndIOp::create(b, loc, upper, constant(1));
    Value rounded = arith::AddIOp::create(
        b, loc, bits, arith::AddIOp::create(b, loc, odd, constant(0x7FFF)));
    rounded = arith::ShRUIOp::create(b, loc, rounded, constant(16));
    Value quiet = arith::OrIOp::create(b, loc, upper, constant(0x40));
    Value isNaN = arith::CmpFOp::create(b, loc, arith::CmpFPredicate::UNO,
                                        op.getIn(), op.getIn());
    Value result = arith::SelectOp::create(b, loc, isNaN, quiet, rounded);
    result = arith::TruncIOp::create(b, loc, cloneWith(from, b.getI16Type()),
                                     result);
    b.replaceOpWithNewOp<arith::BitcastOp>(op, op.getType(), result);
    return success();
  }
};

/// f8E4M3FN to f32: sign, 4 bits of exponent (bias 7), 3 of mantissa; no
/// infinities, all ones is NaN. Shifting the 7 low bits under f32's exponent
/// gives the value times 2^-120, denormals included.
struct ExpandF8Ext : public OpRewritePattern<arith::ExtFOp> {
  using OpRewritePattern::OpRewritePattern;
  LogicalResult matchAndRewrite(arith::ExtFOp op,
                                PatternRewriter &b) const override {
    Type type = op.getType();
    if (!isa<Float8E4M3FNType>(getElementTypeOrSelf(op.getIn())) ||
        !getElementTypeOrSelf(type).isF32())
      return failure();
    Location loc = op.getLoc();
    Type i32 = cloneWith(type, b.getI32Type());
    Value bits = arith::BitcastOp::create(
        b, loc, cloneWith(type, b.getI8Type()), op.getIn());
    bits = arith::ExtUIOp::create(b, loc, i32, bits);
    auto constant = [&](int64_t v) { return integerConstant(b, loc, i32, v); };
    Value magnitude = arith::AndIOp::create(b, loc, bits, constant(0x7F));
    Value sign = arith::ShLIOp::create(
        b, loc, arith::AndIOp::create(b, loc, bits, constant(0x80)),
        constant(24));
    Value shifted = arith::ShLIOp::create(b, loc, magnitude, constant(20));
    Value small = arith::BitcastOp::create(b, loc, type, shifted);
    TypedAttr factor = b.getF32FloatAttr(0x1p120f);
    if (auto shaped = dyn_cast<ShapedType>(type))
      factor = DenseElementsAttr::get(shaped, factor);
    Value value = arith::MulFOp::create(
        b, loc, small, arith::ConstantOp::create(b, loc, factor));
    Value valueBits = arith::BitcastOp::create(b, loc, i32, value);
    Value isNaN = arith::CmpIOp::create(b, loc, arith::CmpIPredicate::eq,
                                        magnitude, constant(0x7F));
    valueBits =
        arith::SelectOp::create(b, loc, isNaN, constant(0x7FC00000), valueBits);
    b.replaceOpWithNewOp<arith::BitcastOp>(
        op, type, arith::OrIOp::create(b, loc, valueBits, sign));
    return success();
  }
};

/// f32 to f8E4M3FN, to nearest even; what exceeds 448 after rounding is NaN.
struct ExpandF8Trunc : public OpRewritePattern<arith::TruncFOp> {
  using OpRewritePattern::OpRewritePattern;
  LogicalResult matchAndRewrite(arith::TruncFOp op,
                                PatternRewriter &b) const override {
    Type from = op.getIn().getType();
    if (!isa<Float8E4M3FNType>(getElementTypeOrSelf(op.getType())) ||
        !getElementTypeOrSelf(from).isF32())
      return failure();
    Location loc = op.getLoc();
    Type i32 = cloneWith(from, b.getI32Type());
    auto constant = [&](int64_t v) { return integerConstant(b, loc, i32, v); };
    auto floatConstant = [&](float v) -> Value {
      TypedAttr attr = b.getF32FloatAttr(v);
      if (auto shaped = dyn_cast<ShapedType>(from))
        attr = DenseElementsAttr::get(shaped, attr);
      return arith::ConstantOp::create(b, loc, attr);
    };
    Value bits = arith::BitcastOp::create(b, loc, i32, op.getIn());
    Value sign = arith::AndIOp::create(
        b, loc, arith::ShRUIOp::create(b, loc, bits, constant(24)),
        constant(0x80));
    Value magnitude = arith::AndIOp::create(b, loc, bits, constant(0x7FFFFFFF));
    // Normal results: round the 20 dropped bits to even, rebias 127 to 7.
    Value odd = arith::AndIOp::create(
        b, loc, arith::ShRUIOp::create(b, loc, magnitude, constant(20)),
        constant(1));
    Value rounded = arith::AddIOp::create(
        b, loc, magnitude,
        arith::AddIOp::create(b, loc, odd, constant(0x7FFFF)));
    Value normal = arith::SubIOp::create(
        b, loc, arith::ShRUIOp::create(b, loc, rounded, constant(20)),
        constant(120 << 3));
    // Denormal results, below 2^-6: adding 2^14 leaves multiples of 2^-9 in the
    // low bits, rounded to even by the addition itself.
    Value absolute = arith::BitcastOp::create(b, loc, from, magnitude);
    Value sum = arith::AddFOp::create(b, loc, absolute, floatConstant(0x1p14f));
    Value denormal = arith::SubIOp::create(
        b, loc, arith::BitcastOp::create(b, loc, i32, sum),
        constant(0x46800000));
    Value isSmall = arith::CmpFOp::create(b, loc, arith::CmpFPredicate::OLT,
                                          absolute, floatConstant(0x1p-6f));
    Value result = arith::SelectOp::create(b, loc, isSmall, denormal, normal);
    // 464 is halfway between 448 and the value whose code is NaN; ties to even
    // go to 448. NaN compares false.
    Value fits = arith::CmpFOp::create(b, loc, arith::CmpFPredicate::OLE,
                                       absolute, floatConstant(464.0f));
    result = arith::SelectOp::create(b, loc, fits, result, constant(0x7F));
    result = arith::OrIOp::create(b, loc, result, sign);
    Value narrow =
        arith::TruncIOp::create(b, loc, cloneWith(from, b.getI8Type()), result);
    b.replaceOpWithNewOp<arith::BitcastOp>(op, op.getType(), narrow);
    return success();
  }
};

struct ExpandScalarMath
    : public corey::impl::ExpandScalarMathBase<ExpandScalarMath> {
  using Base::Base;

  void runOnOperation() override {
    FailureOr<VectorTarget> target =
        getVectorTarget(getOperation(), vectorBits);
    if (failed(target))
      return signalPassFailure();
    RewritePatternSet patterns(&getContext());
    patterns.add<ExpandExp>(&getContext(), *target);
    patterns.add<ExpandBF16Ext, ExpandBF16Trunc, ExpandF8Ext, ExpandF8Trunc>(
        &getContext());
    populateMathPolynomialApproximationPatterns(patterns, [](StringRef name) {
      return name == "math.log1p" || name == "math.erf";
    });
    if (failed(applyPatternsGreedily(getOperation(), std::move(patterns))))
      signalPassFailure();
  }
};
} // namespace
