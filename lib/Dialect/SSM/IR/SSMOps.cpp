//===- SSMOps.cpp - Operations of the ssm dialect -------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Dialect/SSM/IR/SSMOps.h"
#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/Arith/Utils/Utils.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include "mlir/IR/Matchers.h"
#include "mlir/IR/OpImplementation.h"
#include "mlir/IR/PatternMatch.h"
#include "mlir/IR/TypeUtilities.h"
#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace corey::ssm;

#define GET_OP_CLASSES
#include "corey/Dialect/SSM/IR/SSMOps.cpp.inc"

//===----------------------------------------------------------------------===//
// Helpers
//===----------------------------------------------------------------------===//

static int64_t countElements(Type type, int64_t dynamicDim) {
  int64_t count = 1;
  if (auto shaped = dyn_cast<ShapedType>(type))
    for (int64_t size : shaped.getShape())
      count *= ShapedType::isDynamic(size) ? dynamicDim : size;
  return count;
}

static int64_t countElements(Value value, int64_t dynamicDim) {
  return value ? countElements(value.getType(), dynamicDim) : 0;
}

static int64_t countBytes(ValueRange values, int64_t dynamicDim) {
  int64_t bytes = 0;
  for (Value value : values)
    if (auto type = dyn_cast<ShapedType>(value.getType()))
      bytes += countElements(type, dynamicDim) *
               llvm::divideCeil(type.getElementTypeBitWidth(), 8);
  return bytes;
}

/// A cost with the bytes of all operands and results filled in.
static OpCost trafficOf(Operation *op, int64_t dynamicDim) {
  OpCost cost;
  cost.bytesRead = countBytes(op->getOperands(), dynamicDim);
  cost.bytesWritten = countBytes(op->getResults(), dynamicDim);
  return cost;
}

/// Of an op whose states lie in `pool` and are named by `slots`: no other
/// states than those are read, and, where the pool is a result, written.
static OpCost pagedTrafficOf(Operation *op, Value pool, Value slots,
                             int64_t dynamicDim) {
  OpCost cost = trafficOf(op, dynamicDim);
  if (!slots)
    return cost;
  auto type = cast<RankedTensorType>(pool.getType());
  int64_t whole = countBytes(pool, dynamicDim);
  int64_t state =
      whole / std::max<int64_t>(
                  type.isDynamicDim(0) ? dynamicDim : type.getDimSize(0), 1);
  int64_t difference = state * countElements(slots, dynamicDim) - whole;
  cost.bytesRead += difference;
  if (op->getNumResults() > 1)
    cost.bytesWritten += difference;
  return cost;
}

/// With `slots` there is a pool `initial`, and `last`, null if the op has no
/// such result, is that pool again.
static LogicalResult verifySlots(Operation *op, StringRef initialName,
                                 StringRef lastName, Value slots, Value initial,
                                 Value last) {
  if (!slots)
    return success();
  if (!initial)
    return op->emitOpError() << "expected '" << initialName
                             << "' to be the pool that 'slots' name states of, "
                                "got none";
  Type expected = getElementTypeOrSelf(initial);
  if (last && getElementTypeOrSelf(last) != expected)
    return op->emitOpError()
           << "expected result '" << lastName << "' to have element type "
           << expected << " of the pool '" << initialName << "', got "
           << getElementTypeOrSelf(last);
  return success();
}

static LogicalResult verifyChunk(Operation *op, ChunkAttr attr, Value value) {
  if (attr && value)
    return op->emitOpError("expected at most one of attribute 'chunk' and "
                           "operand 'chunk_size', got both");
  return success();
}

static LogicalResult verifyGroups(Operation *op, StringRef symbol,
                                  int64_t channels, int64_t groups) {
  if (channels % groups != 0)
    return op->emitOpError()
           << "expected " << symbol << " to be a multiple of G = " << groups
           << ", got " << symbol << " = " << channels;
  return success();
}

static int64_t lastDim(Value value) {
  return cast<ShapedType>(value.getType()).getShape().back();
}

/// Rebuilds `op` without its last result, an optional one that is unused.
template <typename OpTy>
struct DropUnusedLastResult : public OpRewritePattern<OpTy> {
  using OpRewritePattern<OpTy>::OpRewritePattern;
  LogicalResult matchAndRewrite(OpTy op,
                                PatternRewriter &rewriter) const override {
    Operation *old = op;
    if (old->getNumResults() < 2 || !old->getResults().back().use_empty())
      return failure();
    SmallVector<Type> types(old->getResultTypes());
    types.pop_back();
    OperationState state(op.getLoc(), op->getName(), op->getOperands(), types,
                         {});
    state.propertiesAttr = op->getPropertiesAsAttribute();
    state.addAttributes(old->getDiscardableAttrDictionary().getValue());
    Operation *replacement = rewriter.create(state);
    rewriter.replaceAllUsesWith(old->getResult(0), replacement->getResult(0));
    rewriter.eraseOp(op);
    return success();
  }
};

/// Turns a constant chunk value into the attribute.
template <typename OpTy>
struct FoldConstantChunk : public OpRewritePattern<OpTy> {
  using OpRewritePattern<OpTy>::OpRewritePattern;
  LogicalResult matchAndRewrite(OpTy op,
                                PatternRewriter &rewriter) const override {
    APInt chunk;
    if (!op.getChunkSize() ||
        !matchPattern(op.getChunkSize(), m_ConstantInt(&chunk)) ||
        chunk.getSExtValue() < 1)
      return failure();
    rewriter.modifyOpInPlace(op, [&] {
      op.getChunkSizeMutable().clear();
      op.setChunkAttr(ChunkAttr::get(op.getContext(), chunk.getSExtValue()));
    });
    return success();
  }
};

/// The operands that `ranges` hold; optional ones may be empty.
template <typename... Ranges>
static SmallVector<OpOperand *> operandsOf(Ranges &&...ranges) {
  SmallVector<OpOperand *> operands;
  auto add = [&](auto &&range) {
    if constexpr (std::is_same_v<std::decay_t<decltype(range)>, OpOperand>)
      operands.push_back(&range);
    else
      for (OpOperand &operand : range)
        operands.push_back(&operand);
  };
  (add(ranges), ...);
  return operands;
}

SmallVector<OpOperand *> SelectiveScanOp::getStreamedOperands() {
  return operandsOf(getUMutable(), getDeltaMutable(), getZMutable());
}
SmallVector<OpOperand *> SSDOp::getStreamedOperands() {
  return operandsOf(getXMutable(), getDtMutable(), getDecayMutable(),
                    getZMutable());
}
SmallVector<OpOperand *> CausalConvOp::getStreamedOperands() {
  return operandsOf(getXMutable());
}
SmallVector<OpOperand *> RMSNormOp::getStreamedOperands() {
  return operandsOf(getXMutable(), getResidualMutable(), getZMutable());
}
SmallVector<OpOperand *> HadamardOp::getStreamedOperands() {
  return operandsOf(getXMutable());
}

//===----------------------------------------------------------------------===//
// SelectiveScanOp
//===----------------------------------------------------------------------===//

LogicalResult SelectiveScanOp::verify() {
  if (failed(detail::verifyDimSpec(*this)))
    return failure();
  if (failed(verifySlots(*this, "initial_state", "last_state", getStateSlots(),
                         getInitialState(), getLastState())))
    return failure();
  int64_t groups = cast<ShapedType>(getB().getType()).getDimSize(2);
  if (failed(verifyGroups(*this, "D", lastDim(getU()), groups)))
    return failure();
  return verifyChunk(*this, getChunkAttr(), getChunkSize());
}

void SelectiveScanOp::getCanonicalizationPatterns(RewritePatternSet &patterns,
                                                  MLIRContext *context) {
  patterns.add<DropUnusedLastResult<SelectiveScanOp>,
               FoldConstantChunk<SelectiveScanOp>>(context);
}

OpCost SelectiveScanOp::getCost(int64_t dynamicDim) {
  OpCost cost =
      pagedTrafficOf(*this, getInitialState(), getStateSlots(), dynamicDim);
  int64_t tokens = countElements(getU(), dynamicDim);
  int64_t states = tokens * lastDim(getA());
  // A product for the exponent, the update and the output sum; dt B u.
  cost.fma =
      3 * states + states + tokens * (2 + (getD() ? 1 : 0) + (getZ() ? 1 : 0));
  cost.transcendental =
      states + tokens * ((getDeltaSoftplus() ? 2 : 0) + (getZ() ? 2 : 0));
  return cost;
}

//===----------------------------------------------------------------------===//
// SSDOp
//===----------------------------------------------------------------------===//

LogicalResult SSDOp::verify() {
  if (getDecay()) {
    for (auto [name, present] :
         {std::pair<StringRef, bool>{"dt", static_cast<bool>(getDt())},
          {"A", static_cast<bool>(getA())},
          {"dt_bias", static_cast<bool>(getDtBias())},
          {"dt_softplus", getDtSoftplus()},
          {"dt_limit", getDtLimit().has_value()}})
      if (present)
        return emitOpError()
               << "expected no '" << name
               << "' in the discretized form, which takes 'decay'";
  } else if (!getDt() || !getA()) {
    return emitOpError() << "expected '" << (getDt() ? "A" : "dt")
                         << "', or 'decay' for the discretized form";
  }
  if (failed(detail::verifyDimSpec(*this)))
    return failure();
  if (failed(verifySlots(*this, "initial_states", "final_states",
                         getStateSlots(), getInitialStates(),
                         getFinalStates())))
    return failure();
  auto x = cast<ShapedType>(getX().getType());
  int64_t groups = cast<ShapedType>(getB().getType()).getDimSize(2);
  if (failed(verifyGroups(*this, "H", x.getDimSize(2), groups)))
    return failure();
  if (auto limit = getDtLimit()) {
    if (limit->size() != 2 || !((*limit)[0] <= (*limit)[1]))
      return emitOpError()
             << "expected 'dt_limit' to be [lo, hi] with lo <= hi, got ["
             << *limit << "]";
  }
  if (getTile() && static_cast<int64_t>(*getTile()) < 1)
    return emitOpError() << "expected 'tile' to be at least 1, got "
                         << static_cast<int64_t>(*getTile());
  return verifyChunk(*this, getChunkAttr(), getChunkSize());
}

void SSDOp::getCanonicalizationPatterns(RewritePatternSet &patterns,
                                        MLIRContext *context) {
  patterns.add<DropUnusedLastResult<SSDOp>, FoldConstantChunk<SSDOp>>(context);
}

OpCost SSDOp::getCost(int64_t dynamicDim) {
  OpCost cost =
      pagedTrafficOf(*this, getInitialStates(), getStateSlots(), dynamicDim);
  auto x = cast<ShapedType>(getX().getType());
  int64_t tokens = countElements(getX(), dynamicDim);
  int64_t heads = tokens / x.getDimSize(3);
  int64_t states = lastDim(getB());
  int64_t tile = getTile().value_or(64);
  // State read and update, and the causal half of the tile's square.
  cost.matrix = tokens * (2 * states + tile / 2);
  cost.fma =
      tokens * ((getD() ? 1 : 0) + (getZ() ? 1 : 0)) + heads * (tile / 2);
  cost.transcendental = heads * (tile / 2 + (getDtSoftplus() ? 2 : 0)) +
                        (getZ() ? 2 * tokens : 0);
  return cost;
}

//===----------------------------------------------------------------------===//
// CausalConvOp
//===----------------------------------------------------------------------===//

LogicalResult CausalConvOp::verify() {
  if (failed(detail::verifyDimSpec(*this)))
    return failure();
  if (failed(verifySlots(*this, "initial_state", "final_state", getStateSlots(),
                         getInitialState(), getFinalState())))
    return failure();
  int64_t width = lastDim(getWeight());
  if (width < 2 || width > 4)
    return emitOpError() << "expected a width W from 2 to 4, got " << width;
  return success();
}

void CausalConvOp::getCanonicalizationPatterns(RewritePatternSet &patterns,
                                               MLIRContext *context) {
  patterns.add<DropUnusedLastResult<CausalConvOp>>(context);
}

OpCost CausalConvOp::getCost(int64_t dynamicDim) {
  OpCost cost =
      pagedTrafficOf(*this, getInitialState(), getStateSlots(), dynamicDim);
  int64_t count = countElements(getX(), dynamicDim);
  cost.fma = count * (lastDim(getWeight()) + (getBias() ? 1 : 0));
  cost.transcendental = getSilu() ? 2 * count : 0;
  return cost;
}

//===----------------------------------------------------------------------===//
// ProjectionOp, RMSNormOp, HadamardOp
//===----------------------------------------------------------------------===//

LogicalResult ProjectionOp::verify() {
  if (failed(detail::verifyDimSpec(*this)))
    return failure();
  bool quantized = !isa<Float16Type, BFloat16Type, Float32Type>(
      getElementTypeOrSelf(getWeight()));
  if (quantized && !getWeightScale())
    return emitOpError() << "expected 'weight_scale' for a weight of type "
                         << getElementTypeOrSelf(getWeight());
  if (!quantized && getWeightScale())
    return emitOpError() << "expected no 'weight_scale' for a weight of type "
                         << getElementTypeOrSelf(getWeight());
  return success();
}

OpCost ProjectionOp::getCost(int64_t dynamicDim) {
  OpCost cost = trafficOf(*this, dynamicDim);
  int64_t outputs = countElements(getY(), dynamicDim);
  cost.matrix = outputs * lastDim(getX());
  cost.fma = outputs * ((getBias() ? 1 : 0) + (getResidual() ? 1 : 0) +
                        (getWeightScale() ? 1 : 0));
  return cost;
}

LogicalResult RMSNormOp::verify() {
  if (failed(detail::verifyDimSpec(*this)))
    return failure();
  if (!(getEps().convertToFloat() >= 0))
    return emitOpError() << "expected 'eps' to be at least 0, got "
                         << getEps().convertToFloat();
  int64_t size = lastDim(getX());
  if (auto group = getGroupSize()) {
    int64_t groupSize = static_cast<int64_t>(*group);
    if (groupSize < 1 || size % groupSize != 0)
      return emitOpError() << "expected 'group_size' to divide D = " << size
                           << ", got " << groupSize;
  }
  if (getNormBeforeGate() && !getZ())
    return emitOpError("expected a gate 'z' for 'norm_before_gate'");
  if (getResidualOut() && !getResidual())
    return emitOpError("expected a 'residual' for result 'residual_out'");
  return success();
}

void RMSNormOp::getCanonicalizationPatterns(RewritePatternSet &patterns,
                                            MLIRContext *context) {
  patterns.add<DropUnusedLastResult<RMSNormOp>>(context);
}

OpCost RMSNormOp::getCost(int64_t dynamicDim) {
  OpCost cost = trafficOf(*this, dynamicDim);
  int64_t count = countElements(getX(), dynamicDim);
  int64_t group =
      getGroupSize() ? static_cast<int64_t>(*getGroupSize()) : lastDim(getX());
  cost.fma = count * (3 + (getResidual() ? 1 : 0) + (getZ() ? 1 : 0));
  cost.transcendental =
      count / std::max<int64_t>(group, 1) + (getZ() ? 2 * count : 0);
  return cost;
}

LogicalResult HadamardOp::verify() {
  if (failed(detail::verifyDimSpec(*this)))
    return failure();
  int64_t block = getBlock(), size = lastDim(getX());
  if (block < 1 || !llvm::isPowerOf2_64(block) || size % block != 0)
    return emitOpError()
           << "expected 'block' to be a power of two that divides D = " << size
           << ", got " << block;
  return success();
}

/// `value` as the replacement of a result of type `type`: a fold may not make a
/// dimension static or dynamic that the op left otherwise.
static OpFoldResult foldTo(Value value, Type type) {
  return value.getType() == type ? OpFoldResult(value) : OpFoldResult();
}

OpFoldResult HadamardOp::fold(FoldAdaptor) {
  if (getBlock() == 1)
    return foldTo(getX(), getType());
  auto inner = getX().getDefiningOp<HadamardOp>();
  if (inner && inner.getBlock() == getBlock())
    return foldTo(inner.getX(), getType());
  return {};
}

OpCost HadamardOp::getCost(int64_t dynamicDim) {
  OpCost cost = trafficOf(*this, dynamicDim);
  cost.fma = countElements(getX(), dynamicDim) *
             (llvm::Log2_64(std::max<int64_t>(getBlock(), 1)) + 1);
  return cost;
}

//===----------------------------------------------------------------------===//
// Elementwise
//===----------------------------------------------------------------------===//

LogicalResult corey::ssm::detail::verifyTrailingBroadcast(Operation *op) {
  auto lhs = cast<ShapedType>(op->getOperand(0).getType());
  auto rhs = cast<ShapedType>(op->getOperand(1).getType());
  if (op->getResult(0).getType() != lhs)
    return op->emitOpError()
           << "expected result 'y' to have type " << lhs << " like 'lhs', got "
           << op->getResult(0).getType();
  int64_t shift = lhs.getRank() - rhs.getRank();
  bool matches = shift >= 0;
  for (int64_t i = 0; matches && i < rhs.getRank(); ++i) {
    int64_t a = lhs.getDimSize(i + shift), b = rhs.getDimSize(i);
    matches = ShapedType::isDynamic(a) || ShapedType::isDynamic(b) || a == b;
  }
  if (!matches)
    return op->emitOpError()
           << "expected 'rhs' to have the trailing axes of 'lhs' " << lhs
           << ", got " << rhs;
  return success();
}

OpCost corey::ssm::detail::elementwiseCost(Operation *op, int64_t dynamicDim) {
  OpCost cost = trafficOf(op, dynamicDim);
  int64_t count = countElements(op->getResult(0), dynamicDim);
  bool transcendental = isa<ExpOp, SiluOp, SigmoidOp, SoftplusOp, GeluOp>(op);
  cost.fma = isa<CastOp>(op) ? 0 : count;
  cost.transcendental = transcendental ? count * (isa<ExpOp>(op) ? 1 : 2) : 0;
  return cost;
}

static Value constantLike(OpBuilder &builder, Location loc, Value like,
                          double value) {
  Type type = like.getType();
  TypedAttr attr = builder.getFloatAttr(getElementTypeOrSelf(type), value);
  if (auto shaped = dyn_cast<ShapedType>(type))
    attr = DenseElementsAttr::get(shaped, attr);
  return arith::ConstantOp::create(builder, loc, attr);
}

/// 1 / (1 + exp(-x)).
static Value emitSigmoid(OpBuilder &builder, Location loc, Value x) {
  Value one = constantLike(builder, loc, x, 1.0);
  Value negated = arith::NegFOp::create(builder, loc, x);
  Value e = math::ExpOp::create(builder, loc, negated);
  Value sum = arith::AddFOp::create(builder, loc, one, e);
  return arith::DivFOp::create(builder, loc, one, sum);
}

Value NegOp::emitScalar(OpBuilder &builder, Location loc, ValueRange operands) {
  return arith::NegFOp::create(builder, loc, operands[0]);
}
Value ExpOp::emitScalar(OpBuilder &builder, Location loc, ValueRange operands) {
  return math::ExpOp::create(builder, loc, operands[0]);
}
Value SiluOp::emitScalar(OpBuilder &builder, Location loc,
                         ValueRange operands) {
  // x / (1 + exp(-x)): no overflow of the product for large negative x.
  Value x = operands[0];
  Value one = constantLike(builder, loc, x, 1.0);
  Value negated = arith::NegFOp::create(builder, loc, x);
  Value e = math::ExpOp::create(builder, loc, negated);
  Value sum = arith::AddFOp::create(builder, loc, one, e);
  return arith::DivFOp::create(builder, loc, x, sum);
}
Value SigmoidOp::emitScalar(OpBuilder &builder, Location loc,
                            ValueRange operands) {
  return emitSigmoid(builder, loc, operands[0]);
}
Value SoftplusOp::emitScalar(OpBuilder &builder, Location loc,
                             ValueRange operands) {
  // max(x, 0) + log1p(exp(-|x|)): exact in both tails.
  Value x = operands[0];
  Value zero = constantLike(builder, loc, x, 0.0);
  Value positive = arith::MaximumFOp::create(builder, loc, x, zero);
  Value magnitude = math::AbsFOp::create(builder, loc, x);
  Value negated = arith::NegFOp::create(builder, loc, magnitude);
  Value e = math::ExpOp::create(builder, loc, negated);
  Value tail = math::Log1pOp::create(builder, loc, e);
  return arith::AddFOp::create(builder, loc, positive, tail);
}
Value GeluOp::emitScalar(OpBuilder &builder, Location loc,
                         ValueRange operands) {
  Value x = operands[0];
  Value half = constantLike(builder, loc, x, 0.5);
  Value one = constantLike(builder, loc, x, 1.0);
  Value root = constantLike(builder, loc, x, 0.70710678118654752440);
  Value scaled = arith::MulFOp::create(builder, loc, x, root);
  Value erf = math::ErfOp::create(builder, loc, scaled);
  Value sum = arith::AddFOp::create(builder, loc, one, erf);
  Value product = arith::MulFOp::create(builder, loc, half, x);
  return arith::MulFOp::create(builder, loc, product, sum);
}
Value AddOp::emitScalar(OpBuilder &builder, Location loc, ValueRange operands) {
  return arith::AddFOp::create(builder, loc, operands[0], operands[1]);
}
Value SubOp::emitScalar(OpBuilder &builder, Location loc, ValueRange operands) {
  return arith::SubFOp::create(builder, loc, operands[0], operands[1]);
}
Value MulOp::emitScalar(OpBuilder &builder, Location loc, ValueRange operands) {
  return arith::MulFOp::create(builder, loc, operands[0], operands[1]);
}
Value CastOp::emitScalar(OpBuilder &, Location, ValueRange operands) {
  return operands[0];
}
Value ScaleOp::emitScalar(OpBuilder &builder, Location loc,
                          ValueRange operands) {
  Value factor =
      constantLike(builder, loc, operands[0], getFactor().convertToDouble());
  return arith::MulFOp::create(builder, loc, operands[0], factor);
}

OpFoldResult NegOp::fold(FoldAdaptor) {
  if (auto inner = getX().getDefiningOp<NegOp>())
    return inner.getX();
  return {};
}

OpFoldResult CastOp::fold(FoldAdaptor) {
  if (getX().getType() == getY().getType())
    return getX();
  // Only a widening first cast loses nothing.
  auto inner = getX().getDefiningOp<CastOp>();
  if (inner && inner.getX().getType() == getY().getType() &&
      getElementTypeOrSelf(inner.getY()).isF32())
    return inner.getX();
  return {};
}

OpFoldResult ScaleOp::fold(FoldAdaptor) {
  if (getFactor().convertToDouble() == 1.0)
    return getX();
  return {};
}

namespace {
/// scale(scale(x, a), b) -> scale(x, a b), in f32 where nothing is rounded
/// between the two.
struct MergeScales : public OpRewritePattern<ScaleOp> {
  using OpRewritePattern::OpRewritePattern;
  LogicalResult matchAndRewrite(ScaleOp op,
                                PatternRewriter &rewriter) const override {
    auto inner = op.getX().getDefiningOp<ScaleOp>();
    if (!inner || !getElementTypeOrSelf(op.getX()).isF32())
      return failure();
    double factor =
        op.getFactor().convertToDouble() * inner.getFactor().convertToDouble();
    rewriter.replaceOpWithNewOp<ScaleOp>(op, op.getType(), inner.getX(),
                                         rewriter.getF64FloatAttr(factor));
    return success();
  }
};
} // namespace

void ScaleOp::getCanonicalizationPatterns(RewritePatternSet &patterns,
                                          MLIRContext *context) {
  patterns.add<MergeScales>(context);
}

//===----------------------------------------------------------------------===//
// EmbeddingOp, ArgmaxOp, SampleOp
//===----------------------------------------------------------------------===//

LogicalResult EmbeddingOp::verify() { return detail::verifyDimSpec(*this); }

OpCost EmbeddingOp::getCost(int64_t dynamicDim) {
  OpCost cost;
  cost.bytesWritten = countBytes(getY(), dynamicDim);
  cost.bytesRead = cost.bytesWritten + countBytes(getIds(), dynamicDim);
  return cost;
}

LogicalResult ArgmaxOp::verify() { return detail::verifyDimSpec(*this); }

OpCost ArgmaxOp::getCost(int64_t dynamicDim) {
  OpCost cost = trafficOf(*this, dynamicDim);
  cost.fma = countElements(getX(), dynamicDim);
  return cost;
}

LogicalResult SampleOp::verify() {
  if (failed(detail::verifyDimSpec(*this)))
    return failure();
  // Indices of a row, and what the lowerings add to them, are of 32 bits.
  constexpr int64_t most = int64_t(1) << 30;
  if (int64_t size = getLogits().getType().getShape().back(); size > most)
    return emitOpError() << "expected at most " << most
                         << " logits in a row, got " << size;
  return success();
}

OpCost SampleOp::getCost(int64_t dynamicDim) {
  OpCost cost = trafficOf(*this, dynamicDim);
  // The largest, the weights and their running sum; choosing what is kept goes
  // over the row a few more times.
  cost.fma = 16 * countElements(getLogits(), dynamicDim);
  return cost;
}

namespace {
/// A draw at a temperature of 0, whose random numbers nobody goes on with, is
/// the largest.
struct SampleAtZero : public OpRewritePattern<SampleOp> {
  using OpRewritePattern::OpRewritePattern;
  LogicalResult matchAndRewrite(SampleOp op,
                                PatternRewriter &rewriter) const override {
    DenseElementsAttr temperature;
    if (!op.getNextRandom().use_empty() ||
        !matchPattern(op.getTemperature(), m_Constant(&temperature)) ||
        !llvm::all_of(temperature.getValues<APFloat>(), [](const APFloat &t) {
          return t.isNaN() || t.isZero() || t.isNegative();
        }))
      return failure();
    Value best = ArgmaxOp::create(rewriter, op.getLoc(), op.getIds().getType(),
                                  op.getLogits());
    rewriter.replaceOp(op, {best, op.getRandom()});
    return success();
  }
};
} // namespace

void SampleOp::getCanonicalizationPatterns(RewritePatternSet &patterns,
                                           MLIRContext *context) {
  patterns.add<SampleAtZero>(context);
}

//===----------------------------------------------------------------------===//
// QuantizeOp, DequantizeOp
//===----------------------------------------------------------------------===//

/// Shape of the scales of a tensor of `type`.
static SmallVector<int64_t> scaleShape(ShapedType type,
                                       Granularity granularity) {
  switch (granularity) {
  case Granularity::Tensor:
    return {};
  case Granularity::Token:
    return llvm::to_vector(type.getShape().drop_back());
  case Granularity::Channel:
    return {type.getShape().back()};
  }
  llvm_unreachable("granularity has three values");
}

static LogicalResult verifyScale(Operation *op, ShapedType x, ShapedType q,
                                 ShapedType scale, Granularity granularity) {
  if (x.getRank() < 1)
    return op->emitOpError() << "expected at least one axis, got " << x;
  if (failed(verifyCompatibleShape(x, q)))
    return op->emitOpError() << "expected 'q' and 'x' to have one shape, got "
                             << q << " and " << x;
  SmallVector<int64_t> expected = scaleShape(x, granularity);
  if (failed(verifyCompatibleShape(expected, scale.getShape())))
    return op->emitOpError()
           << "expected 'scale' to have type "
           << RankedTensorType::get(expected, scale.getElementType())
           << " for granularity '" << stringifyGranularity(granularity)
           << "', got " << scale;
  return success();
}

LogicalResult QuantizeOp::verify() {
  return verifyScale(*this, getX().getType(), getQ().getType(),
                     getScale().getType(), getGranularity());
}

LogicalResult DequantizeOp::verify() {
  return verifyScale(*this, getX().getType(), getQ().getType(),
                     getScale().getType(), getGranularity());
}

LogicalResult
QuantizeOp::reifyResultShapes(OpBuilder &builder,
                              ReifiedRankedShapedTypeDims &shapes) {
  SmallVector<OpFoldResult> sizes =
      tensor::getMixedSizes(builder, getLoc(), getX());
  shapes.push_back(sizes);
  switch (getGranularity()) {
  case Granularity::Tensor:
    shapes.emplace_back();
    break;
  case Granularity::Token:
    shapes.push_back(llvm::to_vector(ArrayRef(sizes).drop_back()));
    break;
  case Granularity::Channel:
    shapes.push_back({sizes.back()});
    break;
  }
  return success();
}

LogicalResult
DequantizeOp::reifyResultShapes(OpBuilder &builder,
                                ReifiedRankedShapedTypeDims &shapes) {
  shapes.push_back(tensor::getMixedSizes(builder, getLoc(), getQ()));
  return success();
}

OpCost QuantizeOp::getCost(int64_t dynamicDim) {
  OpCost cost = trafficOf(*this, dynamicDim);
  cost.fma = 3 * countElements(getX(), dynamicDim);
  return cost;
}

OpCost DequantizeOp::getCost(int64_t dynamicDim) {
  OpCost cost = trafficOf(*this, dynamicDim);
  cost.fma = countElements(getX(), dynamicDim);
  return cost;
}

//===----------------------------------------------------------------------===//
// ObserveOp, WeightOp, GetWeightOp
//===----------------------------------------------------------------------===//

LogicalResult
ObserveOp::reifyResultShapes(OpBuilder &builder,
                             ReifiedRankedShapedTypeDims &shapes) {
  shapes.push_back(tensor::getMixedSizes(builder, getLoc(), getX()));
  return success();
}

static bool isWeightElement(Type element) {
  return isa<Float16Type, BFloat16Type, Float32Type, Float8E4M3FNType>(
             element) ||
         element.isInteger(8) || element.isInteger(32) || element.isInteger(64);
}

bool WeightOp::isWeightType(Type type) {
  auto tensor = dyn_cast<RankedTensorType>(type);
  return tensor && tensor.hasStaticShape() && !tensor.getEncoding() &&
         isWeightElement(tensor.getElementType());
}

LogicalResult WeightOp::verify() {
  auto type = cast<RankedTensorType>(getType());
  if (!type.hasStaticShape())
    return emitOpError() << "expected a static shape, got " << type;
  Type element = type.getElementType();
  if (!isWeightElement(element))
    return emitOpError() << "expected an element type of f32, f16, bf16, "
                            "f8E4M3FN, i8, i32 or i64, got "
                         << element;
  if (isPrepared() && getKey())
    return emitOpError() << "expected no key for a prepared weight, got "
                         << getKeyAttr();
  return success();
}

LogicalResult GetWeightOp::verifySymbolUses(SymbolTableCollection &tables) {
  auto weight =
      tables.lookupNearestSymbolFrom<WeightOp>(*this, getWeightAttr());
  if (!weight)
    return emitOpError() << "expected " << getWeightAttr()
                         << " to name an ssm.weight";
  if (weight.getType() != getType()) {
    InFlightDiagnostic diag = emitOpError()
                              << "expected type " << weight.getType()
                              << " like the weight, got " << getType();
    diag.attachNote(weight.getLoc()) << "weight declared here";
    return diag;
  }
  return success();
}

//===----------------------------------------------------------------------===//
// FusedOp
//===----------------------------------------------------------------------===//

LogicalResult FusedOp::verifyRegions() {
  Block &block = getBody().front();
  if (block.getArgumentTypes() != getInputs().getTypes())
    return emitOpError() << "expected region arguments of types ("
                         << getInputs().getTypes() << "), got ("
                         << block.getArgumentTypes() << ")";
  auto yield = cast<YieldOp>(block.getTerminator());
  if (yield.getValues().getTypes() != getOutputs().getTypes())
    return emitOpError() << "expected the region to yield ("
                         << getOutputs().getTypes() << "), got ("
                         << yield.getValues().getTypes() << ")";
  return success();
}

OpCost FusedOp::getCost(int64_t dynamicDim) {
  OpCost cost = trafficOf(*this, dynamicDim);
  for (Operation &op : getBody().front())
    if (auto fusable = dyn_cast<FusableOpInterface>(&op)) {
      OpCost inner = fusable.getCost(dynamicDim);
      cost.fma += inner.fma;
      cost.transcendental += inner.transcendental;
      cost.matrix += inner.matrix;
    }
  return cost;
}

/// Expresses dimension `dim` of `value`, defined in the region, by values
/// outside of it. Clones the reified index arithmetic through `mapping`.
static FailureOr<OpFoldResult> hoistDim(OpBuilder &builder, FusedOp fused,
                                        Value value, int64_t dim) {
  auto type = cast<RankedTensorType>(value.getType());
  if (!type.isDynamicDim(dim))
    return OpFoldResult(builder.getIndexAttr(type.getDimSize(dim)));
  if (auto arg = dyn_cast<BlockArgument>(value))
    return tensor::getMixedSize(builder, fused.getLoc(),
                                fused.getInputs()[arg.getArgNumber()], dim);
  auto reifiable =
      dyn_cast<ReifyRankedShapedTypeOpInterface>(value.getDefiningOp());
  if (!reifiable)
    return failure();
  // Reify inside the region, express the result outside, erase what is left.
  OpBuilder inner(value.getDefiningOp());
  ReifiedRankedShapedTypeDims shapes;
  Operation *before = value.getDefiningOp()->getPrevNode();
  if (failed(reifiable.reifyResultShapes(inner, shapes)))
    return failure();
  OpFoldResult size = shapes[cast<OpResult>(value).getResultNumber()][dim];
  std::function<FailureOr<OpFoldResult>(OpFoldResult)> express =
      [&](OpFoldResult ofr) -> FailureOr<OpFoldResult> {
    auto v = dyn_cast<Value>(ofr);
    if (!v)
      return ofr;
    Operation *def = v.getDefiningOp();
    if (auto dimOp = dyn_cast_or_null<tensor::DimOp>(def))
      if (auto index = dimOp.getConstantIndex())
        return hoistDim(builder, fused, dimOp.getSource(), *index);
    if (!def || !isMemoryEffectFree(def) || def->getNumRegions())
      return failure();
    SmallVector<Value> operands;
    for (Value operand : def->getOperands()) {
      FailureOr<OpFoldResult> outer = express(operand);
      if (failed(outer))
        return failure();
      operands.push_back(
          getValueOrCreateConstantIndexOp(builder, fused.getLoc(), *outer));
    }
    Operation *clone = builder.clone(*def);
    clone->setOperands(operands);
    return OpFoldResult(clone->getResult(cast<OpResult>(v).getResultNumber()));
  };
  FailureOr<OpFoldResult> result = express(size);
  Operation *first =
      before ? before->getNextNode() : &value.getParentBlock()->front();
  SmallVector<Operation *> created;
  for (Operation *op = first; op != value.getDefiningOp();
       op = op->getNextNode())
    created.push_back(op);
  for (Operation *op : llvm::reverse(created))
    if (op->use_empty())
      op->erase();
  return result;
}

LogicalResult FusedOp::reifyResultShapes(OpBuilder &builder,
                                         ReifiedRankedShapedTypeDims &shapes) {
  auto yield = cast<YieldOp>(getBody().front().getTerminator());
  for (Value value : yield.getValues()) {
    SmallVector<OpFoldResult> shape;
    auto type = dyn_cast<RankedTensorType>(value.getType());
    for (int64_t i = 0; type && i < type.getRank(); ++i) {
      FailureOr<OpFoldResult> size = hoistDim(builder, *this, value, i);
      if (failed(size))
        return failure();
      shape.push_back(*size);
    }
    shapes.push_back(std::move(shape));
  }
  return success();
}

namespace {
/// Drops results nobody uses, inputs the region does not use, and inputs given
/// twice.
struct TrimFused : public OpRewritePattern<FusedOp> {
  using OpRewritePattern::OpRewritePattern;
  LogicalResult matchAndRewrite(FusedOp op,
                                PatternRewriter &rewriter) const override {
    Block &block = op.getBody().front();
    auto yield = cast<YieldOp>(block.getTerminator());
    SmallVector<Value> yielded;
    SmallVector<unsigned> keptResults;
    for (auto [i, result] : llvm::enumerate(op.getOutputs()))
      if (!result.use_empty()) {
        keptResults.push_back(i);
        yielded.push_back(yield.getValues()[i]);
      }
    SmallVector<Value> inputs;
    llvm::BitVector dropped(block.getNumArguments());
    DenseMap<Value, BlockArgument> seen;
    for (BlockArgument arg : block.getArguments()) {
      Value input = op.getInputs()[arg.getArgNumber()];
      bool used = llvm::any_of(arg.getUsers(), [&](Operation *user) {
        return user != yield || llvm::is_contained(yielded, arg);
      });
      auto [it, inserted] = seen.try_emplace(input, arg);
      if (!used || !inserted)
        dropped.set(arg.getArgNumber());
      else
        inputs.push_back(input);
      if (!used && inserted)
        seen.erase(input);
    }
    if (keptResults.size() == op.getNumResults() && dropped.none())
      return failure();
    rewriter.modifyOpInPlace(yield,
                             [&] { yield.getValuesMutable().assign(yielded); });
    for (auto [input, arg] :
         llvm::zip_equal(op.getInputs(), block.getArguments()))
      if (dropped.test(arg.getArgNumber()) && !arg.use_empty())
        rewriter.replaceAllUsesWith(arg, seen.lookup(input));
    block.eraseArguments(dropped);
    SmallVector<Type> types;
    for (unsigned i : keptResults)
      types.push_back(op.getOutputs()[i].getType());
    auto replacement = FusedOp::create(rewriter, op.getLoc(), types, inputs,
                                       op.getScoreAttr());
    replacement->setDiscardableAttrs(op->getDiscardableAttrDictionary());
    rewriter.inlineRegionBefore(op.getBody(), replacement.getBody(),
                                replacement.getBody().end());
    for (auto [i, kept] : llvm::enumerate(keptResults))
      rewriter.replaceAllUsesWith(op.getOutputs()[kept],
                                  replacement.getOutputs()[i]);
    rewriter.eraseOp(op);
    return success();
  }
};
} // namespace

void FusedOp::getCanonicalizationPatterns(RewritePatternSet &patterns,
                                          MLIRContext *context) {
  patterns.add<TrimFused>(context);
}
