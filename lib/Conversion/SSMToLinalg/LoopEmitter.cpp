//===- LoopEmitter.cpp - Loops over vectors of channels -------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "LoopEmitter.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include "mlir/Dialect/Vector/IR/VectorOps.h"
#include "mlir/IR/TypeUtilities.h"

using namespace mlir;
using namespace corey;

//===----------------------------------------------------------------------===//
// Index arithmetic
//===----------------------------------------------------------------------===//

Value LoopEmitter::index(int64_t value) {
  return arith::ConstantIndexOp::create(b, loc, value);
}
Value LoopEmitter::add(Value lhs, Value rhs) {
  return b.createOrFold<arith::AddIOp>(loc, lhs, rhs);
}
Value LoopEmitter::add(Value lhs, int64_t rhs) {
  return rhs ? add(lhs, index(rhs)) : lhs;
}
Value LoopEmitter::sub(Value lhs, Value rhs) {
  return b.createOrFold<arith::SubIOp>(loc, lhs, rhs);
}
Value LoopEmitter::mul(Value lhs, Value rhs) {
  return b.createOrFold<arith::MulIOp>(loc, lhs, rhs);
}
Value LoopEmitter::mul(Value lhs, int64_t rhs) {
  return rhs == 1 ? lhs : mul(lhs, index(rhs));
}
Value LoopEmitter::div(Value lhs, int64_t rhs) {
  return rhs == 1 ? lhs : b.createOrFold<arith::DivUIOp>(loc, lhs, index(rhs));
}
Value LoopEmitter::rem(Value lhs, int64_t rhs) {
  return b.createOrFold<arith::RemUIOp>(loc, lhs, index(rhs));
}
Value LoopEmitter::min(Value lhs, Value rhs) {
  return b.createOrFold<arith::MinSIOp>(loc, lhs, rhs);
}
Value LoopEmitter::max(Value lhs, Value rhs) {
  return b.createOrFold<arith::MaxSIOp>(loc, lhs, rhs);
}
Value LoopEmitter::dim(Value memref, int64_t dim) {
  return b.createOrFold<memref::DimOp>(loc, memref, dim);
}

//===----------------------------------------------------------------------===//
// f32 arithmetic
//===----------------------------------------------------------------------===//

/// `contract` lets the back end form fused multiply-adds; nothing may be
/// reassociated, so that a result does not depend on how it was vectorised.
static constexpr auto kContract = arith::FastMathFlags::contract;

VectorType LoopEmitter::vectorType(int64_t lanes) {
  return VectorType::get({lanes}, b.getF32Type());
}
Value LoopEmitter::constantLike(Value like, double value) {
  Type type = like.getType();
  TypedAttr attr = b.getFloatAttr(getElementTypeOrSelf(type), value);
  if (auto shaped = dyn_cast<ShapedType>(type))
    attr = DenseElementsAttr::get(shaped, attr);
  return arith::ConstantOp::create(b, loc, attr);
}
Value LoopEmitter::constant(double value, int64_t lanes) {
  VectorType type = vectorType(lanes);
  return arith::ConstantOp::create(
      b, loc, DenseElementsAttr::get(type, b.getF32FloatAttr(value)));
}
Value LoopEmitter::scalar(double value) {
  return arith::ConstantOp::create(b, loc, b.getF32FloatAttr(value));
}
Value LoopEmitter::addf(Value lhs, Value rhs) {
  return arith::AddFOp::create(b, loc, lhs, rhs, kContract);
}
Value LoopEmitter::subf(Value lhs, Value rhs) {
  return arith::SubFOp::create(b, loc, lhs, rhs, kContract);
}
Value LoopEmitter::mulf(Value lhs, Value rhs) {
  return arith::MulFOp::create(b, loc, lhs, rhs, kContract);
}
Value LoopEmitter::divf(Value lhs, Value rhs) {
  return arith::DivFOp::create(b, loc, lhs, rhs);
}
Value LoopEmitter::maxf(Value lhs, Value rhs) {
  // NaN in `lhs` is kept; the form maps to one instruction.
  Value less =
      arith::CmpFOp::create(b, loc, arith::CmpFPredicate::OLT, lhs, rhs);
  return arith::SelectOp::create(b, loc, less, rhs, lhs);
}
Value LoopEmitter::fma(Value x, Value y, Value z) {
  return math::FmaOp::create(b, loc, x, y, z);
}
Value LoopEmitter::negf(Value value) {
  return arith::NegFOp::create(b, loc, value);
}
Value LoopEmitter::splat(Value scalar, int64_t lanes) {
  return vector::BroadcastOp::create(b, loc, vectorType(lanes), scalar);
}
Value LoopEmitter::sumLanes(Value vector) {
  int64_t lanes = cast<VectorType>(vector.getType()).getDimSize(0);
  while (lanes > 1 && lanes % 2 == 0) {
    lanes /= 2;
    SmallVector<int64_t> low, high;
    for (int64_t i = 0; i < lanes; ++i) {
      low.push_back(i);
      high.push_back(i + lanes);
    }
    vector = addf(vector::ShuffleOp::create(b, loc, vector, vector, low),
                  vector::ShuffleOp::create(b, loc, vector, vector, high));
  }
  Value sum = vector::ExtractOp::create(b, loc, vector, 0);
  for (int64_t i = 1; i < lanes; ++i)
    sum = addf(sum, vector::ExtractOp::create(b, loc, vector, i));
  return sum;
}

//===----------------------------------------------------------------------===//
// Memory
//===----------------------------------------------------------------------===//

Value LoopEmitter::convert(Value value, Type elementType) {
  Type from = getElementTypeOrSelf(value.getType());
  if (from == elementType)
    return value;
  Type type = elementType;
  if (auto vector = dyn_cast<VectorType>(value.getType()))
    type = vector.clone(elementType);
  if (isa<IntegerType>(from))
    return arith::SIToFPOp::create(b, loc, type, value);
  if (elementType.getIntOrFloatBitWidth() > from.getIntOrFloatBitWidth())
    return arith::ExtFOp::create(b, loc, type, value);
  return arith::TruncFOp::create(b, loc, type, value);
}
void LoopEmitter::computeOnLoad(Value memref, Compute compute) {
  computed[memref] = std::move(compute);
}
void LoopEmitter::transformOnStore(Value memref, Transform transform) {
  transformed[memref] = std::move(transform);
}

Value LoopEmitter::load(Value memref, ValueRange indices, int64_t lanes) {
  if (auto it = computed.find(memref); it != computed.end())
    return it->second(indices, lanes);
  auto type = cast<MemRefType>(memref.getType());
  Value loaded = vector::LoadOp::create(
      b, loc, VectorType::get({lanes}, type.getElementType()), memref, indices);
  return convert(loaded, b.getF32Type());
}
Value LoopEmitter::loadScalar(Value memref, ValueRange indices) {
  if (auto it = computed.find(memref); it != computed.end())
    return it->second(indices, /*lanes=*/0);
  return convert(memref::LoadOp::create(b, loc, memref, indices),
                 b.getF32Type());
}
void LoopEmitter::store(Value vector, Value memref, ValueRange indices) {
  if (auto it = transformed.find(memref); it != transformed.end())
    vector = it->second(vector, indices,
                        cast<VectorType>(vector.getType()).getDimSize(0));
  auto type = cast<MemRefType>(memref.getType());
  vector::StoreOp::create(b, loc, convert(vector, type.getElementType()),
                          memref, indices);
}
void LoopEmitter::storeScalar(Value scalar, Value memref, ValueRange indices) {
  if (auto it = transformed.find(memref); it != transformed.end())
    scalar = it->second(scalar, indices, /*lanes=*/0);
  auto type = cast<MemRefType>(memref.getType());
  memref::StoreOp::create(b, loc, convert(scalar, type.getElementType()),
                          memref, indices);
}
void LoopEmitter::prefetch(Value memref, ValueRange indices, bool write) {
  memref::PrefetchOp::create(b, loc, memref, indices, write,
                             /*localityHint=*/3, /*isDataCache=*/true);
}
Value LoopEmitter::scratch(ArrayRef<int64_t> shape) {
  // Stacks of threads are small: what is large comes from the run-time library.
  constexpr int64_t kStackBytes = 128 << 10;
  auto type = MemRefType::get(shape, b.getF32Type());
  IntegerAttr alignment = b.getI64IntegerAttr(64);
  if (type.getNumElements() * 4 > kStackBytes)
    return memref::AllocOp::create(b, loc, type, alignment);
  return memref::AllocaOp::create(b, loc, type, alignment);
}

//===----------------------------------------------------------------------===//
// Control flow
//===----------------------------------------------------------------------===//

void LoopEmitter::forLoop(Value lower, Value upper, Value step, Body body) {
  auto loop = scf::ForOp::create(b, loc, lower, upper, step);
  OpBuilder::InsertionGuard guard(b);
  b.setInsertionPoint(loop.getBody()->getTerminator());
  body(loop.getInductionVar());
}
void LoopEmitter::forLoop(int64_t lower, int64_t upper, int64_t step,
                          Body body) {
  forLoop(index(lower), index(upper), index(step), body);
}
LoopEmitter::Values
LoopEmitter::forLoop(Value lower, Value upper, Value step, ValueRange inits,
                     llvm::function_ref<Values(Value, ValueRange)> body) {
  auto loop = scf::ForOp::create(b, loc, lower, upper, step, inits);
  OpBuilder::InsertionGuard guard(b);
  if (inits.empty()) {
    b.setInsertionPoint(loop.getBody()->getTerminator());
    (void)body(loop.getInductionVar(), {});
    return {};
  }
  b.setInsertionPointToEnd(loop.getBody());
  Values results = body(loop.getInductionVar(), loop.getRegionIterArgs());
  scf::YieldOp::create(b, loc, results);
  return Values(loop.getResults());
}
void LoopEmitter::parallel(ValueRange uppers,
                           llvm::function_ref<void(ValueRange)> body) {
  Values zeros(uppers.size(), index(0)), ones(uppers.size(), index(1));
  auto loop = scf::ParallelOp::create(b, loc, zeros, uppers, ones);
  OpBuilder::InsertionGuard guard(b);
  b.setInsertionPoint(loop.getBody()->getTerminator());
  body(loop.getInductionVars());
}
void LoopEmitter::ifThen(Value condition, llvm::function_ref<void()> then,
                         llvm::function_ref<void()> otherwise) {
  auto op = scf::IfOp::create(b, loc, condition, static_cast<bool>(otherwise));
  OpBuilder::InsertionGuard guard(b);
  b.setInsertionPoint(op.thenBlock()->getTerminator());
  then();
  if (otherwise) {
    b.setInsertionPoint(op.elseBlock()->getTerminator());
    otherwise();
  }
}
Value LoopEmitter::cmp(arith::CmpIPredicate predicate, Value lhs, Value rhs) {
  return arith::CmpIOp::create(b, loc, predicate, lhs, rhs);
}
void LoopEmitter::forLanes(
    int64_t extent, int64_t lanes,
    llvm::function_ref<void(Value offset, int64_t lanes)> body) {
  int64_t full = extent / lanes * lanes;
  if (full == lanes)
    body(index(0), lanes);
  else if (full)
    forLoop(0, full, lanes, [&](Value offset) { body(offset, lanes); });
  if (full < extent)
    body(index(full), extent - full);
}
