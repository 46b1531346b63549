//===- VectorMath.cpp - Elementary functions on f32 -----------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// Polynomials are minimax fits of the relative error on the reduced interval
// (computed by iteratively reweighted least squares in f64, constant term held
// at its exact value so that arguments near zero are not biased, which matters
// when thousands of decays are multiplied).
//
//===----------------------------------------------------------------------===//

#include "LoopEmitter.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include <limits>

using namespace mlir;
using namespace corey;

/// c[0] + c[1] x + ... in Horner form.
static Value horner(LoopEmitter &e, Value x, ArrayRef<double> coefficients) {
  Value sum = e.constantLike(x, coefficients.back());
  for (double c : llvm::reverse(coefficients.drop_back()))
    sum = e.fma(sum, x, e.constantLike(x, c));
  return sum;
}

static Type withElement(Value like, Type element) {
  if (auto shaped = dyn_cast<VectorType>(like.getType()))
    return shaped.clone(element);
  return element;
}

static Value integerLike(LoopEmitter &e, Type type, int64_t value) {
  TypedAttr attr = e.b.getI32IntegerAttr(value);
  if (auto shaped = dyn_cast<ShapedType>(type))
    attr = DenseElementsAttr::get(shaped, attr);
  return arith::ConstantOp::create(e.b, e.loc, attr);
}

/// Splits x into an integer n (as the low bits of the returned i32) and a
/// remainder in [-0.5, 0.5]: adding 1.5 * 2^23 leaves the rounded integer in
/// the low mantissa bits. Needs |x| < 2^22.
static std::pair<Value, Value> roundToInteger(LoopEmitter &e, Value x,
                                              Value &rounded) {
  Value magic = e.constantLike(x, 12582912.0);
  Value shifted = arith::AddFOp::create(e.b, e.loc, x, magic);
  rounded = arith::SubFOp::create(e.b, e.loc, shifted, magic);
  Value bits = arith::BitcastOp::create(
      e.b, e.loc, withElement(x, e.b.getI32Type()), shifted);
  return {bits, arith::SubFOp::create(e.b, e.loc, x, rounded)};
}

/// value * 2^n, n being the low bits of `bits`; value in [0.5, 2).
static Value scaleByBits(LoopEmitter &e, Value value, Value bits) {
  Type integer = bits.getType();
  Value shift =
      arith::ShLIOp::create(e.b, e.loc, bits, integerLike(e, integer, 23));
  Value asBits = arith::BitcastOp::create(e.b, e.loc, integer, value);
  Value sum = arith::AddIOp::create(e.b, e.loc, asBits, shift);
  return arith::BitcastOp::create(e.b, e.loc, value.getType(), sum);
}

/// x, but not below `low`; NaN is kept.
static Value clampLow(LoopEmitter &e, Value x, double low) {
  Value lowest = e.constantLike(x, low);
  Value below =
      arith::CmpFOp::create(e.b, e.loc, arith::CmpFPredicate::OLT, x, lowest);
  return arith::SelectOp::create(e.b, e.loc, below, lowest, x);
}

/// x limited to [low, high]; NaN is kept.
static Value clamp(LoopEmitter &e, Value x, double low, double high) {
  x = clampLow(e, x, low);
  Value highest = e.constantLike(x, high);
  Value above =
      arith::CmpFOp::create(e.b, e.loc, arith::CmpFPredicate::OGT, x, highest);
  return arith::SelectOp::create(e.b, e.loc, above, highest, x);
}

// 2^x on [-0.5, 0.5], relative error 9.2e-8.
static constexpr double kExp2[] = {1.0,         0.693147,    0.24022242,
                                   0.055507336, 0.009671513, 0.0013264727};
// e^x on [-ln2/2, ln2/2], relative error 3.1e-9.
static constexpr double kExp[] = {
    1.0, 1.0, 0.49999994, 0.16666521, 0.04166839, 0.00836871, 0.0013814613};

Value LoopEmitter::canonicalNaN(Value x) {
  Value isNumber =
      arith::CmpFOp::create(b, loc, arith::CmpFPredicate::ORD, x, x);
  Value nan = constantLike(x, std::numeric_limits<double>::quiet_NaN());
  return arith::SelectOp::create(b, loc, isNumber, x, nan);
}

Value LoopEmitter::exp2(Value x, bool nonPositive) {
  auto vector = dyn_cast<VectorType>(x.getType());
  if (target.hasAVX512() && vector && vector.getDimSize(0) == 16) {
    // VSCALEFPS takes care of overflow, underflow and infinities by itself.
    Value rounded = math::RoundEvenOp::create(b, loc, x);
    Value remainder = arith::SubFOp::create(b, loc, x, rounded);
    Value p = horner(*this, remainder, kExp2);
    Value mask = arith::ConstantOp::create(b, loc, b.getI16IntegerAttr(-1));
    Value current = arith::ConstantOp::create(b, loc, b.getI32IntegerAttr(4));
    return LLVM::CallIntrinsicOp::create(
               b, loc, x.getType(),
               b.getStringAttr("llvm.x86.avx512.mask.scalef.ps.512"),
               ValueRange{p, rounded, p, mask, current})
        .getResults();
  }
  // Below -126 the result would be denormal: it is taken as 2^-126, which no
  // state distinguishes from zero. At 128 the exponent field reads infinity.
  x = nonPositive ? clampLow(*this, x, -126.0) : clamp(*this, x, -126.0, 128.0);
  Value rounded;
  auto [bits, remainder] = roundToInteger(*this, x, rounded);
  return scaleByBits(*this, horner(*this, remainder, kExp2), bits);
}

/// e^x = 2^n e^r with n = round(x / ln 2) and r = x - n ln 2, taken off in two
/// steps. Returns e^r; `bits` gets n as roundToInteger() gives it.
static Value reducedExp(LoopEmitter &e, Value x, Value &bits) {
  Value scaled = arith::MulFOp::create(e.b, e.loc, x,
                                       e.constantLike(x, 1.44269504088896341));
  Value rounded;
  bits = roundToInteger(e, scaled, rounded).first;
  Value r = e.fma(rounded, e.constantLike(x, -0.693359375), x);
  r = e.fma(rounded, e.constantLike(x, 2.12194440e-4), r);
  return horner(e, r, kExp);
}

Value LoopEmitter::exp(Value x) {
  // The scale is applied in two halves so that denormal results round once,
  // correctly, and overflow gives infinity.
  Value original = x;
  x = clamp(*this, x, -104.0, 89.0);
  Value bits;
  Value p = reducedExp(*this, x, bits);
  Type integer = bits.getType();
  // The sign-extended integer, then its halves.
  Value n = arith::SubIOp::create(b, loc, bits,
                                  integerLike(*this, integer, 0x4B400000));
  Value half =
      arith::ShRSIOp::create(b, loc, n, integerLike(*this, integer, 1));
  Value rest = arith::SubIOp::create(b, loc, n, half);
  auto powerOfTwo = [&](Value exponent) -> Value {
    Value biased = arith::AddIOp::create(b, loc, exponent,
                                         integerLike(*this, integer, 127));
    Value shifted =
        arith::ShLIOp::create(b, loc, biased, integerLike(*this, integer, 23));
    return arith::BitcastOp::create(b, loc, x.getType(), shifted);
  };
  Value result = arith::MulFOp::create(b, loc, p, powerOfTwo(half));
  result = arith::MulFOp::create(b, loc, result, powerOfTwo(rest));
  Value isNaN = arith::CmpFOp::create(b, loc, arith::CmpFPredicate::UNO,
                                      original, original);
  return arith::SelectOp::create(b, loc, isNaN, original, result);
}

Value LoopEmitter::expNonPositive(Value x) {
  Value bits;
  Value p = reducedExp(*this, clampLow(*this, x, -87.0), bits);
  return scaleByBits(*this, p, bits);
}

Value LoopEmitter::softplus(Value x) {
  // max(x, 0) + log1p(e), e = exp(-|x|) in (0, 1]. log1p(e) = 2 atanh(s) with
  // s = e / (2 + e) in (0, 1/3]: s (2 + s^2 P(s^2)), relative error 4.6e-9.
  Value e = expNonPositive(negf(math::AbsFOp::create(b, loc, x)));
  Value s = divf(e, addf(e, constantLike(x, 2.0)));
  Value s2 = mulf(s, s);
  Value p = horner(*this, s2, {0.6666641, 0.400217, 0.27999142, 0.2802446});
  Value tail = mulf(s, fma(s2, p, constantLike(x, 2.0)));
  return addf(maxf(x, constantLike(x, 0.0)), tail);
}

Value LoopEmitter::silu(Value x) {
  Value one = constantLike(x, 1.0);
  return divf(x, addf(one, exp(negf(x))));
}
