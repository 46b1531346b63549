//===- LoweringUtils.cpp - Shared pieces of the ssm lowerings -------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "LoweringUtils.h"
#include "mlir/Dialect/Bufferization/IR/Bufferization.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"

using namespace mlir;
using namespace corey;

/// A memref type with dynamic strides but for the innermost one.
static MemRefType stridedType(RankedTensorType type) {
  SmallVector<int64_t> strides(type.getRank(), ShapedType::kDynamic);
  if (!strides.empty())
    strides.back() = 1;
  return MemRefType::get(
      type.getShape(), type.getElementType(),
      StridedLayoutAttr::get(type.getContext(), ShapedType::kDynamic, strides));
}

OpLowering::OpLowering(PatternRewriter &rewriter, Operation *op,
                       VectorTarget target)
    : LoopEmitter(rewriter, op->getLoc(), target), op(op) {
  if (!isa_and_nonnull<ssm::FusedOp>(op->getParentOp()))
    return;
  FailureOr<FusionPlan> found = planFusedRegion(op->getParentOp());
  if (succeeded(found) &&
      (found->anchor ? found->anchor : found->result.getDefiningOp()) == op)
    plan = std::move(*found);
}

LoopEmitter::Compute OpLowering::regionResult() {
  for (Value operand : op->getOperands())
    openLeaves(operand);
  return [this](ValueRange indices, int64_t lanes) {
    DenseMap<Value, Value> known;
    return evaluate(plan->result, indices, lanes, known);
  };
}

Value OpLowering::plainBuffer(Value tensor) {
  return bufferization::ToBufferOp::create(
      b, loc, stridedType(cast<RankedTensorType>(tensor.getType())), tensor,
      /*read_only=*/true);
}

void OpLowering::openLeaves(Value value) {
  if (leaves.contains(value) || value.getDefiningOp() == op)
    return;
  bool inside = plan->contains(value.getDefiningOp());
  leaves[value] = inside ? Value() : plainBuffer(value);
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
  if (!tensor)
    return {};
  if (!plan || !plan->contains(tensor.getDefiningOp()))
    return plainBuffer(tensor);
  openLeaves(tensor);
  // The first operand of an elementwise op has all its axes. The view is one of
  // its own: the same value may also be read as it is.
  Value source = tensor;
  while (plan->contains(source.getDefiningOp()))
    source = source.getDefiningOp()->getOperand(0);
  Value sizes = leaves.lookup(source);
  Value view = memref::CastOp::create(
      b, loc,
      stridedType(
          cast<RankedTensorType>(tensor.getType())
              .clone(cast<MemRefType>(sizes.getType()).getElementType())),
      sizes);
  computeOnLoad(view, [this, tensor](ValueRange indices, int64_t lanes) {
    DenseMap<Value, Value> known;
    return evaluate(tensor, indices, lanes, known);
  });
  return view;
}

Value OpLowering::output(unsigned i) {
  if (resultShapes.empty())
    (void)cast<ReifyRankedShapedTypeOpInterface>(op).reifyResultShapes(
        b, resultShapes);
  auto type = cast<RankedTensorType>(op->getResult(i).getType());
  bool hasEpilogue = i == 0 && plan && !plan->epilogue.empty();
  Type element =
      hasEpilogue ? getElementTypeOrSelf(plan->result) : type.getElementType();
  Values sizes;
  for (int64_t dim = 0; dim < type.getRank(); ++dim)
    if (type.isDynamicDim(dim))
      sizes.push_back(
          getValueOrCreateConstantIndexOp(b, loc, resultShapes[i][dim]));
  Value memref =
      memref::AllocOp::create(b, loc, MemRefType::get(type.getShape(), element),
                              sizes, b.getI64IntegerAttr(64));
  if (hasEpilogue) {
    openLeaves(plan->result);
    transformOnStore(memref,
                     [this](Value value, ValueRange indices, int64_t lanes) {
                       DenseMap<Value, Value> known{{op->getResult(0), value}};
                       return evaluate(plan->result, indices, lanes, known);
                     });
  }
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

void OpLowering::replace(PatternRewriter &rewriter, ValueRange buffers) {
  Values tensors;
  for (auto [i, result, buffer] : llvm::enumerate(op->getResults(), buffers)) {
    Value replaced = i == 0 && plan && !plan->epilogue.empty() ? plan->result
                                                               : Value(result);
    auto memref = cast<MemRefType>(buffer.getType());
    // Not writable: readers of the tensor fold to readers of the buffer, of
    // which those who would write to it in place do not know.
    Value tensor = bufferization::ToTensorOp::create(
        b, loc,
        RankedTensorType::get(memref.getShape(), memref.getElementType()),
        buffer, /*restrict=*/true, /*writable=*/false);
    if (tensor.getType() != replaced.getType())
      tensor = tensor::CastOp::create(b, loc, replaced.getType(), tensor);
    if (replaced != result) {
      rewriter.replaceAllUsesWith(replaced, tensor);
      // What the epilogue was is dead now and goes away with the next clean-up;
      // until then it reads a tensor of no content.
      Values sizes;
      auto type = cast<RankedTensorType>(result.getType());
      for (int64_t dim = 0; dim < type.getRank(); ++dim)
        if (type.isDynamicDim(dim))
          sizes.push_back(
              getValueOrCreateConstantIndexOp(b, loc, resultShapes[0][dim]));
      tensor = tensor::EmptyOp::create(b, loc, type.getShape(),
                                       type.getElementType(), sizes);
    }
    tensors.push_back(tensor);
  }
  rewriter.replaceOp(op, tensors);
}

Value OpLowering::callRuntime(StringRef name, ValueRange arguments,
                              Type result) {
  auto module = op->getParentOfType<ModuleOp>();
  TypeRange results = result ? TypeRange(result) : TypeRange();
  if (!module.lookupSymbol<func::FuncOp>(name)) {
    OpBuilder::InsertionGuard guard(b);
    b.setInsertionPointToStart(module.getBody());
    func::FuncOp::create(b, module.getLoc(), name,
                         b.getFunctionType(arguments.getTypes(), results))
        .setPrivate();
  }
  auto call = func::CallOp::create(b, loc, name, results, arguments);
  return result ? call.getResult(0) : Value();
}

Value OpLowering::address(Value memref) {
  Value base = memref::ExtractAlignedPointerAsIndexOp::create(b, loc, memref);
  auto metadata = memref::ExtractStridedMetadataOp::create(b, loc, memref);
  int64_t bytes =
      cast<MemRefType>(memref.getType()).getElementTypeBitWidth() / 8;
  return toI64(add(base, mul(metadata.getOffset(), bytes)));
}

Value OpLowering::toI64(Value index) {
  return arith::IndexCastOp::create(b, loc, b.getI64Type(), index);
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
