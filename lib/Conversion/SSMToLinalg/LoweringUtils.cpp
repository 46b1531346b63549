//===- LoweringUtils.cpp - Shared pieces of the ssm lowerings -------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "LoweringUtils.h"

using namespace mlir;
using namespace corey;

OpLowering::OpLowering(PatternRewriter &rewriter, Operation *op,
                       VectorTarget target)
    : LoopEmitter(rewriter, op->getLoc(), target), OpBuffers(rewriter, op) {}

LoopEmitter::Compute OpLowering::regionResult() {
  for (Value operand : op->getOperands())
    openLeaves(operand);
  return [this](ValueRange indices, int64_t lanes) {
    DenseMap<Value, Value> known;
    return evaluate(plan->result, indices, lanes, known);
  };
}

void OpLowering::openLeaves(Value value) {
  if (leaves.contains(value) || isMadeByLoops(value))
    return;
  bool inside = plan->contains(value.getDefiningOp());
  leaves[value] = inside ? Value() : view(value);
  if (inside)
    for (Value operand : value.getDefiningOp()->getOperands())
      openLeaves(operand);
}

Value OpLowering::evaluate(Value value, ValueRange indices, int64_t lanes,
                           DenseMap<Value, Value> &known) {
  if (Value made = known.lookup(value))
    return made;
  Value made;
  if (Value leaf = leaves.lookup(value)) {
    // Lower ranks stand on the trailing axes.
    ValueRange own =
        indices.take_back(cast<MemRefType>(leaf.getType()).getRank());
    made =
        lanes && !own.empty() ? load(leaf, own, lanes) : loadScalar(leaf, own);
    if (lanes && own.empty())
      made = splat(made, lanes);
  } else {
    Values operands;
    for (Value operand : value.getDefiningOp()->getOperands())
      operands.push_back(evaluate(operand, indices, lanes, known));
    made = cast<ssm::FusableOpInterface>(value.getDefiningOp())
               .emitScalar(b, loc, operands);
  }
  return known[value] = made;
}

Value OpLowering::buffer(Value tensor) {
  if (!tensor || !isComputed(tensor))
    return view(tensor);
  openLeaves(tensor);
  // The first operand of an elementwise op has all its axes. The view is one of
  // its own: the same value may also be read as it is.
  Value source = tensor;
  while (plan->contains(source.getDefiningOp()))
    source = source.getDefiningOp()->getOperand(0);
  Value sizes = leaves.lookup(source);
  Value computed = memref::CastOp::create(
      b, loc,
      stridedMemRefType(
          cast<RankedTensorType>(tensor.getType())
              .clone(cast<MemRefType>(sizes.getType()).getElementType())),
      sizes);
  computeOnLoad(computed, [this, tensor](ValueRange indices, int64_t lanes) {
    DenseMap<Value, Value> known;
    return evaluate(tensor, indices, lanes, known);
  });
  return computed;
}

LoopEmitter::Transform OpLowering::transformOf(Value from, Value value) {
  openLeaves(value);
  return [this, from, value](Value made, ValueRange indices, int64_t lanes) {
    DenseMap<Value, Value> known{{from, made}};
    return evaluate(value, indices, lanes, known);
  };
}

LoopEmitter::Transform OpLowering::toRotation() {
  return transformOf(op->getResult(0), rotation().getX());
}

Value OpLowering::output(unsigned i) {
  Value memref = allocate(i);
  if (i == 0 && hasEpilogue())
    transformOnStore(memref, transformOf(lastOfLoops(), plan->result));
  return memref;
}

Value OpLowering::f32Like(Value memref) {
  auto type = cast<MemRefType>(memref.getType());
  Values sizes;
  for (int64_t i = 0; i < type.getRank(); ++i)
    if (type.isDynamicDim(i))
      sizes.push_back(dim(memref, i));
  return memref::AllocOp::create(
      b, loc, MemRefType::get(type.getShape(), b.getF32Type()), sizes,
      b.getI64IntegerAttr(64));
}

void OpLowering::parallelOver(Value memref, int64_t rank,
                              llvm::function_ref<void(ValueRange)> body) {
  Values uppers;
  for (int64_t i = 0; i < rank; ++i)
    uppers.push_back(dim(memref, i));
  if (uppers.empty())
    return body({});
  parallel(uppers, body);
}

void OpLowering::serialOver(Value memref, int64_t rank,
                            llvm::function_ref<void(ValueRange)> body) {
  std::function<void(Values)> nest = [&](Values ivs) {
    int64_t axis = ivs.size();
    if (axis == rank)
      return body(ivs);
    forLoop(index(0), dim(memref, axis), index(1),
            [&](Value iv) { nest(append(ivs, iv)); });
  };
  nest({});
}

SmallVector<Value> corey::append(ValueRange ivs, Value last) {
  SmallVector<Value> indices(ivs);
  indices.push_back(last);
  return indices;
}

//===----------------------------------------------------------------------===//
// Sequences
//===----------------------------------------------------------------------===//

Sequences::Sequences(LoopEmitter &e, OpLowering &lowering, Value input,
                     Value starts)
    : starts(starts), length(e.dim(input, 1)) {
  if (!starts) {
    count = e.dim(input, 0);
    return;
  }
  count = e.dim(starts, 0);
  // What the kernels rely on is enforced by range(); this reports the mistake.
  Value i64Length = lowering.toI64(length);
  lowering.callRuntime("corey_rt_check_sequence_count",
                       {lowering.toI64(count), i64Length});
  e.forLoop(e.index(0), count, e.index(1), [&](Value s) {
    auto at = [&](Value i) {
      return arith::ExtSIOp::create(
                 e.b, e.loc, e.b.getI64Type(),
                 memref::LoadOp::create(e.b, e.loc, starts, i))
          .getResult();
    };
    Value previous = e.max(e.sub(s, e.index(1)), e.index(0));
    lowering.callRuntime("corey_rt_check_sequence_start",
                         {lowering.toI64(s), at(s), at(previous), i64Length});
  });
}

Sequences::Range Sequences::range(LoopEmitter &e, Value row) const {
  if (!starts)
    return {row, e.index(0), length};
  auto at = [&](Value i) -> Value {
    Value start = memref::LoadOp::create(e.b, e.loc, starts, i);
    start = arith::IndexCastOp::create(e.b, e.loc, e.b.getIndexType(), start);
    return e.max(e.min(start, length), e.index(0));
  };
  Value next = e.add(row, 1);
  Value last = e.sub(count, e.index(1));
  Value isLast = e.cmp(arith::CmpIPredicate::sge, next, count);
  Value begin = at(row);
  Value end = arith::SelectOp::create(e.b, e.loc, isLast, length,
                                      at(e.min(next, last)));
  return {e.index(0), begin, e.max(begin, end)};
}

//===----------------------------------------------------------------------===//
// States
//===----------------------------------------------------------------------===//

StateRows::StateRows(OpLowering &e, Value initialTensor, Value slotsTensor,
                     const Sequences &sequences)
    : initial(e.buffer(initialTensor)), slots(e.buffer(slotsTensor)) {
  if (e.op->getNumResults() > 1)
    last = e.output(1);
  if (!slots)
    return;
  Value limit = e.toI64(e.dim(initial, 0));
  e.forLoop(e.index(0), sequences.count, e.index(1), [&](Value s) {
    Value slot = memref::LoadOp::create(e.b, e.loc, slots, s);
    slot = arith::ExtSIOp::create(e.b, e.loc, e.b.getI64Type(), slot);
    e.ifThen(e.cmp(arith::CmpIPredicate::sge, slot, limit),
             [&] { e.callRuntime("corey_rt_bad_slot", {slot, limit}); });
  });
  if (!last)
    return;
  // The caller may have given one memory for both: the slots are all that
  // changes there.
  Value isElsewhere =
      e.cmp(arith::CmpIPredicate::ne, e.address(initial), e.address(last));
  e.ifThen(isElsewhere,
           [&] { memref::CopyOp::create(e.b, e.loc, initial, last); });
  initial = last;
}

StateRows::Place StateRows::of(LoopEmitter &e, Value sequence) const {
  if (!slots)
    return {sequence, Value()};
  Value slot = memref::LoadOp::create(e.b, e.loc, slots, sequence);
  slot = arith::IndexCastOp::create(e.b, e.loc, e.b.getIndexType(), slot);
  // As unsigned numbers, negative slots lie beyond the last as well.
  return {slot, e.cmp(arith::CmpIPredicate::ult, slot, e.dim(initial, 0))};
}

Value StateRows::load(LoopEmitter &e, const Place &place, ValueRange indices,
                      int64_t lanes) const {
  auto zero = [&] { return lanes ? e.constant(0.0, lanes) : e.scalar(0.0); };
  if (!initial)
    return zero();
  SmallVector<Value> at{place.row};
  llvm::append_range(at, indices);
  auto loaded = [&] {
    return lanes ? e.load(initial, at, lanes) : e.loadScalar(initial, at);
  };
  if (!place.there)
    return loaded();
  Type type = e.b.getF32Type();
  if (lanes)
    type = e.vectorType(lanes);
  auto branch = scf::IfOp::create(e.b, e.loc, type, place.there,
                                  /*withElseRegion=*/true);
  OpBuilder::InsertionGuard guard(e.b);
  e.b.setInsertionPointToStart(branch.thenBlock());
  scf::YieldOp::create(e.b, e.loc, loaded());
  e.b.setInsertionPointToStart(branch.elseBlock());
  scf::YieldOp::create(e.b, e.loc, zero());
  return branch.getResult(0);
}

void StateRows::store(LoopEmitter &e, const Place &place,
                      llvm::function_ref<void()> store) const {
  if (place.there)
    e.ifThen(place.there, store);
  else
    store();
}

FailureOr<Value> corey::getChunk(LoopEmitter &e, ssm::ScanOpInterface op,
                                 Value input) {
  if (ssm::ChunkAttr attr = op.getScanChunkAttr()) {
    if (!attr.isStatic())
      return op->emitOpError("expected a bound chunk, got run-time site ")
             << attr.getSite() << "; run ssm-bind-chunks first";
    return e.index(attr.getSize());
  }
  Value chunk = op.getScanChunk();
  return e.max(chunk ? chunk : e.dim(input, 1), e.index(1));
}
