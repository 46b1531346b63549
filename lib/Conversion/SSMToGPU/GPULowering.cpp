//===- GPULowering.cpp - Shared pieces of the GPU lowerings ---------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "GPULowering.h"
#include "corey/Conversion/SSMToGPU/SSMToGPU.h"
#include "mlir/Dialect/Bufferization/IR/Bufferization.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include <limits>
#include <numeric>

using namespace mlir;
using namespace corey;

/// Blocks that the second axis of a grid takes.
static constexpr int64_t kMaxGridY = 65535;
/// Bytes that one instruction loads.
static constexpr int64_t kMaxLoadBytes = 16;

//===----------------------------------------------------------------------===//
// Host
//===----------------------------------------------------------------------===//

static gpu::GPUModuleOp getKernelModule(OpBuilder &builder, Operation *op) {
  auto module = op->getParentOfType<ModuleOp>();
  if (auto found = module.lookupSymbol<gpu::GPUModuleOp>(kKernelModule))
    return found;
  OpBuilder::InsertionGuard guard(builder);
  builder.setInsertionPointToStart(module.getBody());
  module->setAttr(gpu::GPUDialect::getContainerModuleAttrName(),
                  builder.getUnitAttr());
  return gpu::GPUModuleOp::create(builder, module.getLoc(), kKernelModule);
}

GPULowering::GPULowering(PatternRewriter &rewriter, Operation *op,
                         GPUTarget target)
    : OpBuffers(rewriter, op), host(rewriter), loc(op->getLoc()),
      target(target), kernels(getKernelModule(rewriter, op)) {}

Value GPULowering::index(int64_t value) {
  return arith::ConstantIndexOp::create(host, loc, value);
}
Value GPULowering::add(Value lhs, Value rhs) {
  return host.createOrFold<arith::AddIOp>(loc, lhs, rhs);
}
Value GPULowering::mul(Value lhs, Value rhs) {
  return host.createOrFold<arith::MulIOp>(loc, lhs, rhs);
}
Value GPULowering::mul(Value lhs, int64_t rhs) { return mul(lhs, index(rhs)); }
Value GPULowering::ceilDiv(Value lhs, Value rhs) {
  Value one = index(1);
  Value sum = host.createOrFold<arith::SubIOp>(loc, add(lhs, rhs), one);
  return host.createOrFold<arith::DivUIOp>(loc, sum, rhs);
}
Value GPULowering::min(Value lhs, Value rhs) {
  return host.createOrFold<arith::MinSIOp>(loc, lhs, rhs);
}
Value GPULowering::max(Value lhs, Value rhs) {
  return host.createOrFold<arith::MaxSIOp>(loc, lhs, rhs);
}
Value GPULowering::dim(Value memref, int64_t dim) {
  return host.createOrFold<memref::DimOp>(loc, memref, dim);
}
Value GPULowering::cmp(arith::CmpIPredicate predicate, Value lhs, Value rhs) {
  return host.createOrFold<arith::CmpIOp>(loc, predicate, lhs, rhs);
}

void GPULowering::ifThen(Value condition, llvm::function_ref<void()> then,
                         llvm::function_ref<void()> otherwise) {
  auto branch =
      scf::IfOp::create(host, loc, condition, static_cast<bool>(otherwise));
  OpBuilder::InsertionGuard guard(host);
  host.setInsertionPoint(branch.thenBlock()->getTerminator());
  then();
  if (!otherwise)
    return;
  host.setInsertionPoint(branch.elseBlock()->getTerminator());
  otherwise();
}

Value GPULowering::rowCount(Value memref, int64_t inner) {
  Value rows = index(1);
  int64_t rank = cast<MemRefType>(memref.getType()).getRank();
  for (int64_t axis = 0; axis + inner < rank; ++axis)
    rows = mul(rows, dim(memref, axis));
  return rows;
}

Value GPULowering::workspace(ArrayRef<Value> sizes, Type element) {
  SmallVector<int64_t> shape(sizes.size(), ShapedType::kDynamic);
  return memref::AllocOp::create(host, loc, MemRefType::get(shape, element),
                                 sizes, host.getI64IntegerAttr(64));
}

Value GPULowering::errorRecord() {
  return callRuntime("corey_rt_device_error_slot", {}, host.getI64Type());
}

StateBuffers GPULowering::stateBuffers(Value initial, Value slots) {
  StateBuffers states{buffer(initial), {}, buffer(slots)};
  if (op->getNumResults() > 1)
    states.last = allocate(1);
  if (!slots || !states.last)
    return states;
  // The caller may have given one memory for both: the slots are all that
  // changes there.
  Value isElsewhere = cmp(arith::CmpIPredicate::ne, address(states.initial),
                          address(states.last));
  ifThen(isElsewhere, [&] {
    memref::CopyOp::create(host, loc, states.initial, states.last);
  });
  states.initial = states.last;
  return states;
}

Grid GPULowering::gridOf(Value x, Value rows) {
  Value y = min(rows, index(kMaxGridY));
  return {x, y, ceilDiv(rows, max(y, index(1)))};
}

Value GPULowering::buffer(Value tensor) {
  if (!tensor)
    return {};
  Value &known = buffers[tensor];
  if (!known)
    known = view(tensor);
  return known;
}

Val corey::rowOfBlock(KernelBuilder &k) {
  return k.blockIdx('y') + k.blockIdx('z') * k.gridDim('y');
}

Val corey::orderOf(KernelBuilder &k, Val value) {
  // Adding 0 makes 0 of -0.
  Val bits = k.bitcast(value + 0.0, k.i32Type());
  // Larger magnitudes of negative numbers come first.
  Val order = k.select(bits < 0, bits ^ 0x7FFFFFFF, bits);
  return k.select(value == value, order, k.i32(0x7FFFFFFF));
}

Vals corey::indicesOf(KernelBuilder &k, Val number, ArrayRef<Value> sizes) {
  Vals indices(sizes.size());
  // From the last axis to the first.
  for (size_t axis = sizes.size(); axis-- > 0;) {
    if (axis == 0) {
      indices[0] = number;
      break;
    }
    Val size = number.type().isInteger(64) ? k.i64Argument(sizes[axis])
                                           : k.i32Argument(sizes[axis]);
    Val quotient = number / size;
    if (auto constant = size.constant())
      quotient = number / double(*constant);
    indices[axis] = number - quotient * size;
    number = quotient;
  }
  return indices;
}

Vals corey::rowIndices(GPULowering &lowering, KernelBuilder &k, Value memref,
                       Val row, int64_t inner) {
  SmallVector<Value> sizes;
  for (int64_t axis = 0,
               axes = cast<MemRefType>(memref.getType()).getRank() - inner;
       axis < axes; ++axis)
    sizes.push_back(lowering.dim(memref, axis));
  return indicesOf(k, row, sizes);
}

int64_t corey::rowAlignment(Value tensor) {
  auto type = cast<RankedTensorType>(tensor.getType());
  int64_t widest =
      kMaxLoadBytes * 8 / std::max(type.getElementTypeBitWidth(), 8u);
  if (type.getRank() == 0)
    return 1;
  int64_t last = type.getShape().back();
  if (ShapedType::isDynamic(last))
    return 1;
  int64_t own = OpBuffers::hasAnyStrides(tensor) ? 1 : std::gcd(last, widest);
  Operation *producer = tensor.getDefiningOp();
  if (auto slice = dyn_cast_or_null<tensor::ExtractSliceOp>(producer)) {
    int64_t offset = slice.getStaticOffsets().back();
    if (ShapedType::isDynamic(offset) || slice.getStaticStrides().back() != 1)
      return 1;
    return std::gcd(std::gcd(own, offset), rowAlignment(slice.getSource()));
  }
  if (auto cast = dyn_cast_or_null<tensor::CastOp>(producer))
    return std::gcd(own, rowAlignment(cast.getSource()));
  if (auto expand = dyn_cast_or_null<tensor::ExpandShapeOp>(producer))
    return std::gcd(own, rowAlignment(expand.getSrc()));
  if (auto collapse = dyn_cast_or_null<tensor::CollapseShapeOp>(producer))
    return std::gcd(own, rowAlignment(collapse.getSrc()));
  // Arguments are aligned by the run-time library, results by allocation; an
  // op of another dialect that is not known to copy may be a view.
  if (!producer || isa<ssm::SSMDialect>(producer->getDialect()) ||
      isa<bufferization::BufferizationDialect>(producer->getDialect()) ||
      isa<tensor::EmptyOp>(producer))
    return own;
  return 1;
}

//===----------------------------------------------------------------------===//
// Tensors of a kernel
//===----------------------------------------------------------------------===//

DeviceTensor::DeviceTensor(GPULowering &lowering, KernelBuilder &k,
                           Value memref, bool isReadOnly)
    : isReadOnly(isReadOnly), k(&k) {
  if (!memref)
    return;
  auto type = cast<MemRefType>(memref.getType());
  element = type.getElementType();
  auto metadata = memref::ExtractStridedMetadataOp::create(
      lowering.host, lowering.loc, memref);
  // One argument for what is read and written: no other may point there.
  base = k.pointer(lowering.address(memref), memref);
  // The innermost stride is 1, but for what is read element by element.
  dense = type.getRank() == 0 || type.getStridesAndOffset().first.back() == 1;
  for (int64_t axis = 0; axis < type.getRank(); ++axis) {
    if (dense && axis + 1 == type.getRank())
      strides.push_back(k.i64(bytes()));
    else
      strides.push_back(k.i64Argument(metadata.getStrides()[axis]) * bytes());
  }
}

Val DeviceTensor::at(ArrayRef<Val> leading, Val last) const {
  Val pointer = base;
  for (auto [axis, i] : llvm::enumerate(leading))
    pointer = k->offset(pointer, k->toI64(i) * strides[axis]);
  if (rank() == 0)
    return base;
  return k->offset(pointer, k->toI64(last) * strides.back());
}

Val DeviceTensor::loadScalar(ArrayRef<Val> leading, Val last) const {
  return k->unpack(
      k->load(at(leading, last), k->packedType(element, 1), isReadOnly),
      element, 1)[0];
}

Val DeviceTensor::packed(Val pointer, int64_t count, bool readOnly,
                         bool inPlace) const {
  auto load = [&](Val from, int64_t width) {
    Type type = k->packedType(element, width);
    return inPlace ? k->loadInPlace(from, type) : k->load(from, type, readOnly);
  };
  if (dense || count == 1)
    return load(pointer, count);
  Vals list;
  for (int64_t i = 0; i < count; ++i)
    list.push_back(
        load(i ? k->offset(pointer, strides.back() * double(i)) : pointer, 1));
  return k->join(list, element);
}

Vals DeviceTensor::elements(ArrayRef<Val> leading, Val last, int64_t count,
                            int64_t alignment, bool inPlace) const {
  Val pointer = at(leading, last);
  int64_t width =
      dense ? std::gcd(std::gcd(count, alignment), kMaxLoadBytes / bytes()) : 1;
  Vals values;
  for (int64_t i = 0; i < count; i += width) {
    Val from = dense ? k->offset(pointer, i * bytes())
                     : k->offset(pointer, strides.back() * double(i));
    llvm::append_range(
        values,
        k->unpack(packed(from, width, isReadOnly, inPlace), element, width));
  }
  return values;
}

Vals DeviceTensor::elements(ArrayRef<Val> leading, Val last, int64_t count,
                            int64_t alignment) const {
  return elements(leading, last, count, alignment, /*inPlace=*/false);
}

Vals DeviceTensor::elementsInPlace(ArrayRef<Val> leading, Val last,
                                   int64_t count, int64_t alignment) const {
  return elements(leading, last, count, alignment, /*inPlace=*/true);
}

Val DeviceTensor::areTogether(Val pointer, int64_t count) const {
  Val address = k->wrap(
      LLVM::PtrToIntOp::create(k->b, k->loc, k->i64Type(), pointer.value));
  return (strides[rank() - 2] == double(bytes())) &
         ((address & (bytes() * count - 1)) == 0.0);
}

Val DeviceTensor::stride(int64_t axis) const { return strides[axis]; }

/// Adds what `value` is computed from in memory to `leaves`.
static void collectLeaves(const GPULowering &lowering, Value value,
                          DenseSet<Value> &seen, SmallVector<Value> &leaves) {
  if (!seen.insert(value).second || lowering.isMadeByLoops(value))
    return;
  if (!lowering.isComputed(value)) {
    leaves.push_back(value);
    return;
  }
  for (Value operand : value.getDefiningOp()->getOperands())
    collectLeaves(lowering, operand, seen, leaves);
}

SmallVector<Value> GPULowering::leavesOf(Value tensor) const {
  DenseSet<Value> seen;
  SmallVector<Value> leaves;
  if (tensor)
    collectLeaves(*this, tensor, seen, leaves);
  return leaves;
}

void GPULowering::readByElement(Value tensor) {
  for (Value leaf : leavesOf(tensor))
    OpBuffers::readByElement(leaf);
}

Value GPULowering::allocateOutput(unsigned index) {
  Value memref = allocate(index);
  if (!isAnyStridesResult(index == 0 && hasEpilogue() ? plan->result
                                                      : op->getResult(index)))
    return memref;
  // An allocation with strides that nobody can see in its type: corey-bufferize
  // puts the argument of the caller in its place.
  auto plain = memref.getDefiningOp<memref::AllocOp>();
  auto type = cast<MemRefType>(
      bufferization::getMemRefTypeWithFullyDynamicLayout(RankedTensorType::get(
          plain.getType().getShape(), plain.getType().getElementType())));
  SmallVector<Value> layout(type.getRank() + 1);
  layout[0] = this->index(0);
  Value stride = this->index(1);
  for (int64_t axis = type.getRank(); axis-- > 0;) {
    layout[axis + 1] = stride;
    stride = mul(stride, dim(memref, axis));
  }
  return memref::AllocOp::create(host, loc, type, plain.getDynamicSizes(),
                                 layout, plain.getAlignmentAttr());
}

Value GPULowering::haveRowsTogether(Value memref, int64_t axis, int64_t rows) {
  auto type = cast<MemRefType>(memref.getType());
  auto metadata = memref::ExtractStridedMetadataOp::create(host, loc, memref);
  using Predicate = arith::CmpIPredicate;
  int64_t bytes = type.getElementTypeBitWidth() / 8;
  auto isMultiple = [&](Value number, int64_t of) {
    Value rest = host.createOrFold<arith::AndIOp>(loc, number, index(of - 1));
    return cmp(Predicate::eq, rest, index(0));
  };
  Value together = cmp(Predicate::eq, metadata.getStrides()[axis], index(1));
  for (int64_t other = 0; other < type.getRank(); ++other)
    if (other != axis)
      together = host.createOrFold<arith::AndIOp>(
          loc, together, isMultiple(metadata.getStrides()[other], rows));
  Value start = host.createOrFold<arith::IndexCastOp>(loc, host.getIndexType(),
                                                      address(memref));
  return host.createOrFold<arith::AndIOp>(loc, together,
                                          isMultiple(start, rows * bytes));
}

void GPULowering::makeBuffers() {
  SmallVector<Value> read(op->getOperands());
  if (hasEpilogue())
    read.push_back(plan->result);
  for (Value value : read)
    if (isa<TensorType>(value.getType()))
      for (Value leaf : leavesOf(value))
        buffer(leaf);
}

int64_t GPULowering::streamAlignment(Value tensor) const {
  int64_t least = 8;
  for (Value leaf : leavesOf(tensor))
    if (cast<RankedTensorType>(leaf.getType()).getRank() &&
        !isReadByElement(leaf))
      least = std::gcd(least, rowAlignment(leaf));
  return least;
}

int64_t GPULowering::outputAlignment(Value memref) const {
  auto type = cast<MemRefType>(memref.getType());
  if (type.getRank() == 0 || ShapedType::isDynamic(type.getShape().back()))
    return 1;
  int64_t own =
      std::gcd<int64_t>(type.getShape().back(),
                        kMaxLoadBytes * 8 / type.getElementTypeBitWidth());
  return hasEpilogue() ? std::gcd(own, streamAlignment(plan->result)) : own;
}

InputStream::InputStream(GPULowering &lowering, KernelBuilder &k, Value tensor)
    : lowering(&lowering), k(&k), tensor(tensor) {
  for (Value leaf : lowering.leavesOf(tensor))
    leaves.push_back({leaf, DeviceTensor(lowering, k, lowering.buffer(leaf))});
}

InputStream InputStream::ofResult(GPULowering &lowering, KernelBuilder &k) {
  InputStream stream;
  stream.lowering = &lowering;
  stream.k = &k;
  stream.tensor = lowering.op->getResult(0);
  DenseSet<Value> seen;
  SmallVector<Value> leaves;
  for (Value operand : lowering.op->getOperands())
    collectLeaves(lowering, operand, seen, leaves);
  for (Value leaf : leaves)
    stream.leaves.push_back(
        {leaf, DeviceTensor(lowering, k, lowering.buffer(leaf))});
  return stream;
}

Cursor InputStream::at(ArrayRef<Val> leading, Val last) const {
  Cursor cursor;
  for (const Leaf &leaf : leaves)
    cursor.pointers.push_back(leaf.memory.at(
        leading.take_back(std::max<int64_t>(leaf.memory.rank() - 1, 0)), last));
  return cursor;
}

Cursor InputStream::moved(const Cursor &cursor, Val count,
                          int64_t fromEnd) const {
  Cursor moved;
  for (auto [leaf, pointer] : llvm::zip_equal(leaves, cursor.pointers))
    moved.pointers.push_back(
        leaf.memory.rank() < fromEnd
            ? pointer
            : k->offset(pointer,
                        k->toI64(count) *
                            leaf.memory.stride(leaf.memory.rank() - fromEnd)));
  return moved;
}

Vals InputStream::load(const Cursor &cursor, int64_t count,
                       bool isReadOnly) const {
  Vals loaded;
  for (auto [leaf, pointer] : llvm::zip_equal(leaves, cursor.pointers)) {
    int64_t own = leaf.memory.rank() ? count : 1;
    loaded.push_back(
        leaf.memory.packed(pointer, own, isReadOnly, /*inPlace=*/false));
  }
  return loaded;
}

Vals InputStream::loadInPlace(const Cursor &cursor, int64_t count) const {
  Vals loaded;
  for (auto [leaf, pointer] : llvm::zip_equal(leaves, cursor.pointers)) {
    int64_t own = leaf.memory.rank() ? count : 1;
    loaded.push_back(leaf.memory.packed(pointer, own, /*readOnly=*/false,
                                        /*inPlace=*/true));
  }
  return loaded;
}

Vals InputStream::loadTile(const Cursor &cursor, int64_t rows,
                           int64_t count) const {
  SmallVector<Vals> loaded(rows);
  for (auto [leaf, pointer] : llvm::zip_equal(leaves, cursor.pointers)) {
    const DeviceTensor &memory = leaf.memory;
    int64_t own = memory.rank() ? count : 1;
    SmallVector<Vals> elements;
    if (!memory.isDense()) {
      Type type = k->packedType(memory.element, rows);
      for (int64_t i = 0; i < own; ++i) {
        Val from = k->offset(pointer, memory.stride(memory.rank() - 1) *
                                          static_cast<double>(i));
        elements.push_back(k->split(k->load(from, type, /*isReadOnly=*/true),
                                    memory.element, rows));
      }
    }
    for (int64_t row = 0; row < rows; ++row) {
      Vals parts;
      for (const Vals &list : elements)
        parts.push_back(list[row]);
      if (memory.isDense()) {
        Val from = pointer;
        if (memory.rank() > 1)
          from = k->offset(pointer, memory.stride(memory.rank() - 2) *
                                        static_cast<double>(row));
        loaded[row].push_back(memory.packed(from, own, /*readOnly=*/true,
                                            /*inPlace=*/false));
      } else {
        loaded[row].push_back(k->join(parts, memory.element));
      }
    }
  }
  Vals all;
  for (const Vals &row : loaded)
    llvm::append_range(all, row);
  return all;
}

Vals InputStream::loadRows(const Cursor &cursor, Val first, Val limit,
                           int64_t count, bool areTogether) const {
  SmallVector<Vals> rows(count);
  auto rowOf = [&](int64_t i) {
    return k->min(first + double(i), limit - 1.0);
  };
  for (auto [leaf, pointer] : llvm::zip_equal(leaves, cursor.pointers)) {
    const DeviceTensor &memory = leaf.memory;
    auto each = [&, pointer = pointer] {
      Vals values;
      for (int64_t i = 0; i < count; ++i)
        values.push_back(memory.packed(
            memory.rank() < 2
                ? pointer
                : k->offset(pointer, k->toI64(rowOf(i)) *
                                         memory.stride(memory.rank() - 2)),
            1, /*readOnly=*/true, /*inPlace=*/false));
      return values;
    };
    Vals values;
    if (memory.isDense()) {
      values = each();
    } else {
      Val start = k->offset(pointer,
                            k->toI64(first) * memory.stride(memory.rank() - 2));
      auto together = [&] {
        Type type = k->packedType(memory.element, count);
        // LLVM would load the elements of a vector each for itself.
        return k->split(k->loadInPlace(start, type), memory.element, count);
      };
      values = areTogether ? together()
                           : k->ifValues(memory.areTogether(start, count) &
                                             (first + double(count) <= limit),
                                         together, each);
    }
    for (auto [row, value] : llvm::zip_equal(rows, values))
      row.push_back(value);
  }
  Vals loaded;
  for (const Vals &row : rows)
    llvm::append_range(loaded, row);
  return loaded;
}

SmallVector<std::pair<Val, Val>> InputStream::rowsAt(ArrayRef<Val> leading,
                                                     Val last) const {
  SmallVector<std::pair<Val, Val>> rows;
  for (const Leaf &leaf : leaves)
    if (leaf.memory.rank() >= 2 && leaf.memory.isDense())
      rows.push_back(
          {leaf.memory.at(leading.take_back(leaf.memory.rank() - 1), last),
           leaf.memory.stride(leaf.memory.rank() - 2)});
  return rows;
}

Val InputStream::evaluate(Value value, DenseMap<Value, Value> &known) const {
  if (Value made = known.lookup(value))
    return k->wrap(made);
  SmallVector<Value> arguments;
  for (Value operand : value.getDefiningOp()->getOperands())
    arguments.push_back(evaluate(operand, known));
  Value made = cast<ssm::FusableOpInterface>(value.getDefiningOp())
                   .emitScalar(k->b, k->loc, arguments);
  known[value] = made;
  return k->wrap(made);
}

Vals InputStream::values(ArrayRef<Val> loaded, int64_t count, Value made,
                         ArrayRef<Val> elementsMade) const {
  SmallVector<Vals> elements;
  for (auto [leaf, packed] : llvm::zip_equal(leaves, loaded))
    elements.push_back(
        k->unpack(packed, leaf.memory.element, leaf.memory.rank() ? count : 1));
  Vals result;
  for (int64_t i = 0; i < count; ++i) {
    DenseMap<Value, Value> known;
    if (made)
      known[made] = elementsMade[i].value;
    for (auto [leaf, values] : llvm::zip_equal(leaves, elements))
      known[leaf.tensor] = values[values.size() == 1 ? 0 : i].value;
    result.push_back(evaluate(tensor, known));
  }
  return result;
}

OutputStream::OutputStream(GPULowering &lowering, KernelBuilder &k,
                           Value memref)
    : lowering(&lowering), k(&k), memory(lowering, k, memref) {
  if (lowering.hasEpilogue())
    operands = InputStream(lowering, k, lowering.plan->result);
}

Cursor OutputStream::at(ArrayRef<Val> leading, Val last) const {
  Cursor cursor;
  if (operands)
    cursor = operands.at(leading, last);
  cursor.pointers.push_back(memory.at(leading, last));
  return cursor;
}

Cursor OutputStream::moved(const Cursor &cursor, Val count,
                           int64_t fromEnd) const {
  Cursor own, moved;
  own.pointers = cursor.pointers;
  Val pointer = own.pointers.pop_back_val();
  if (operands)
    moved = operands.moved(own, count, fromEnd);
  moved.pointers.push_back(
      memory.rank() < fromEnd
          ? pointer
          : k->offset(pointer, k->toI64(count) *
                                   memory.stride(memory.rank() - fromEnd)));
  return moved;
}

std::pair<Vals, Val> OutputStream::finish(const Cursor &cursor,
                                          ArrayRef<Val> values) const {
  Cursor own;
  own.pointers = cursor.pointers;
  Val pointer = own.pointers.pop_back_val();
  Vals results(values);
  if (operands) {
    int64_t count = values.size();
    results = operands.values(operands.load(own, count), count,
                              lowering->lastOfLoops(), values);
  }
  return {results, pointer};
}

void OutputStream::store(const Cursor &cursor, ArrayRef<Val> values) const {
  auto [results, pointer] = finish(cursor, values);
  if (memory.isDense())
    return k->store(k->pack(results, memory.element), pointer);
  for (auto [i, result] : llvm::enumerate(results))
    k->store(k->pack({result}, memory.element),
             k->offset(pointer, memory.stride(memory.rank() - 1) *
                                    static_cast<double>(i)));
}

void OutputStream::storeTile(const Cursor &cursor, ArrayRef<Vals> rows) const {
  SmallVector<Vals> results;
  Val first;
  for (auto [i, values] : llvm::enumerate(rows)) {
    auto [result, pointer] = finish(
        i ? moved(cursor, k->i64(static_cast<int64_t>(i))) : cursor, values);
    results.push_back(result);
    if (i == 0)
      first = pointer;
    if (memory.isDense())
      k->store(k->pack(result, memory.element), pointer);
  }
  if (memory.isDense())
    return;
  for (size_t c = 0; c < results[0].size(); ++c) {
    Vals column;
    for (const Vals &row : results)
      column.push_back(row[c]);
    k->store(k->pack(column, memory.element),
             k->offset(first, memory.stride(memory.rank() - 1) *
                                  static_cast<double>(c)));
  }
}

void OutputStream::storeRows(const Cursor &cursor, Val first,
                             ArrayRef<Val> values, bool areTogether) const {
  Val start = moved(cursor, first).pointers.back();
  Vals results(values);
  if (operands)
    for (auto [i, result] : llvm::enumerate(results))
      result = finish(moved(cursor, first + static_cast<double>(i)), {result})
                   .first[0];
  auto each = [&] {
    for (auto [i, result] : llvm::enumerate(results))
      k->store(k->pack({result}, memory.element),
               k->offset(start, memory.stride(memory.rank() - 2) *
                                    static_cast<double>(i)));
  };
  auto together = [&] { k->store(k->pack(results, memory.element), start); };
  if (memory.isDense())
    each();
  else if (areTogether)
    together();
  else
    k->ifElse(memory.areTogether(start, results.size()), together, each);
}

//===----------------------------------------------------------------------===//
// Errors
//===----------------------------------------------------------------------===//

void corey::recordError(KernelBuilder &k, Val record,
                        const DeviceError &error) {
  // Kernels of a call run one after another, so that the first error stays.
  // Reading is slow, the record being in the host's memory, but rare.
  k.ifThen(k.load(record, k.i32Type()) == 0, [&] {
    k.store(k.i32(error.kind), record);
    // The layout of corey_rt_device_error.
    Val fields[] = {error.value, error.limit, error.position, error.previous};
    for (auto [i, field] : llvm::enumerate(fields))
      if (field)
        k.store(field, k.offset(record, 8 + 8 * static_cast<int64_t>(i)));
  });
}

//===----------------------------------------------------------------------===//
// Sequences, chunks
//===----------------------------------------------------------------------===//

DeviceSequences::DeviceSequences(GPULowering &lowering, Value input,
                                 Value starts)
    : lowering(lowering), starts(starts) {
  length = lowering.dim(input, 1);
  count = lowering.dim(starts ? starts : input, 0);
  if (starts)
    emitCheck();
}

/// One warp looks for the first start that is wrong.
void DeviceSequences::emitCheck() {
  constexpr int64_t threads = 32;
  lowering.callRuntime("corey_rt_check_sequence_count",
                       {lowering.toI64(count), lowering.toI64(length)});
  Value error = lowering.errorRecord();
  KernelBuilder k(lowering.host, lowering.loc, lowering.kernels,
                  "check_sequences", {threads, 0});
  DeviceTensor memory(lowering, k, starts);
  Val record = k.pointer(error);
  Val tokens = k.i64Argument(length);
  Val none = k.i32(std::numeric_limits<int32_t>::max());
  auto startOf = [&](Val sequence) {
    return k.toI64(k.load(memory.at({}, sequence), k.i32Type(), true));
  };
  auto previousOf = [&](Val sequence) {
    return startOf(k.max(sequence - 1.0, k.i32(0)));
  };
  Vals first =
      k.forLoop(k.threadIdx(), k.i32Argument(count), threads, {none},
                [&](Val sequence, ArrayRef<Val> in) -> Vals {
                  Val start = startOf(sequence);
                  Val isBad = ((sequence == 0) & (start != 0)) |
                              (start < previousOf(sequence)) | (start > tokens);
                  return {k.select(isBad, k.min(in[0], sequence), in[0])};
                });
  first = k.reduceBlock(first, [&](ArrayRef<Val> a, ArrayRef<Val> c) -> Vals {
    return {k.min(a[0], c[0])};
  });
  k.ifThen((k.threadIdx() == 0) & (first[0] != none), [&] {
    recordError(k, record,
                {DeviceError::SequenceStart, startOf(first[0]), tokens,
                 k.toI64(first[0]), previousOf(first[0])});
  });
  k.launch({lowering.min(count, lowering.index(1)), {}, {}});
}

DeviceSequences::Range DeviceSequences::range(KernelBuilder &k,
                                              Val sequence) const {
  Val tokens = k.i32Argument(length);
  if (!starts)
    return {sequence, k.i32(0), tokens};
  // Whatever the starts hold, no access leaves the tensors.
  DeviceTensor memory(lowering, k, starts);
  auto at = [&](Val i) {
    return k.max(k.min(k.load(memory.at({}, i), k.i32Type(), true), tokens),
                 k.i32(0));
  };
  Val begin = at(sequence);
  Val last = k.i32Argument(count) - 1.0;
  Val end = k.select(sequence < last, at(k.min(sequence + 1.0, last)), tokens);
  return {k.i32(0), begin, k.max(end - begin, k.i32(0))};
}

//===----------------------------------------------------------------------===//
// Slots of states
//===----------------------------------------------------------------------===//

DeviceSlots::DeviceSlots(GPULowering &lowering, KernelBuilder &k,
                         const StateBuffers &states) {
  if (!states.slots)
    return;
  slots = DeviceTensor(lowering, k, states.slots);
  limit = k.i64Argument(lowering.dim(states.initial, 0));
  record = k.pointer(lowering.errorRecord());
}

DeviceSlots::Place DeviceSlots::of(KernelBuilder &k, Val sequence) const {
  if (!slots)
    return {sequence, Val()};
  Val slot = k.loadInPlace(slots.at({}, sequence), k.i32Type());
  return {slot, (slot >= 0.0) & (k.toI64(slot) < limit)};
}

Vals DeviceSlots::ifThere(KernelBuilder &k, const Place &place,
                          llvm::function_ref<Vals()> load) {
  if (!place.there)
    return load();
  SmallVector<Type> types;
  return k.ifValues(
      place.there,
      [&] {
        Vals loaded = load();
        for (Val value : loaded)
          types.push_back(value.type());
        return loaded;
      },
      [&] {
        Vals zeros;
        for (Type type : types)
          zeros.push_back(k.wrap(arith::ConstantOp::create(
              k.b, k.loc, type, cast<TypedAttr>(k.b.getZeroAttr(type)))));
        return zeros;
      });
}

void DeviceSlots::check(KernelBuilder &k, const Place &place) const {
  if (!slots)
    return;
  Val slot = k.toI64(place.row);
  k.ifThen(slot >= limit, [&] {
    recordError(k, record, {DeviceError::StateSlot, slot, limit});
  });
}

FailureOr<Value> corey::getDeviceChunk(GPULowering &lowering,
                                       ssm::ScanOpInterface op, Value length) {
  if (ssm::ChunkAttr attr = op.getScanChunkAttr()) {
    if (!attr.isStatic())
      return op->emitOpError("expected a bound chunk, got run-time site ")
             << attr.getSite() << "; run ssm-bind-chunks first";
    return lowering.index(attr.getSize());
  }
  Value chunk = op.getScanChunk();
  return lowering.max(chunk ? chunk : length, lowering.index(1));
}
