//===- Projection.cpp - GPU kernels of projection -------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// Three ways, of which the host takes one by the number of rows:
//
//   few rows     a kernel that streams the weights once: on tensor cores (see
//                Gemv.cpp) or, of types that differ or rows that cannot be
//                loaded 16 bytes at once, on ordinary ones, where a team of
//                threads has a few outputs of all rows;
//   many rows    the run-time library's matrix product, where types are uniform
//                and it has one;
//   otherwise    a tiled product in f32 on the ordinary cores, of any types.
//
//===----------------------------------------------------------------------===//

#include "GPULowering.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/IR/Matchers.h"
#include <numeric>

using namespace mlir;
using namespace corey;
using namespace corey::ssm;

/// Rows for which there is a kernel that streams weights, each for as many and
/// fewer: on ordinary cores and on tensor cores.
static constexpr int64_t kFewRows[] = {1, 4, 8}, kFewGemvRows[] = {8, 16};
/// The same for what makes x in the kernel, and for the rest of its calls.
static constexpr int64_t kGatheredRows[] = {1, 8}, kAlsoFewRows[] = {16};

namespace {
/// How the tiled product cuts its work. A block of four warps has a tile of
/// rows and outputs, a warp a quarter of it, a thread eight by eight of that:
/// two runs of four rows and two of four outputs, so that lanes read what is
/// next to each other.
struct ProductTiling {
  static constexpr int64_t kThreads = 128;
  static constexpr int64_t kRows = 64, kOutputs = 128, kDepth = 16;
  static constexpr int64_t kWarpRows = 32, kWarpOutputs = 64;
  /// Floats from one k to the next in shared memory: a multiple of four, off
  /// the number of banks.
  static constexpr int64_t kRowPitch = kRows + 4;
  static constexpr int64_t kOutputPitch = kOutputs + 4;
};

/// How the streaming kernel cuts its work, for weights that are loaded in
/// `chunks` pieces a row.
struct StreamTiling {
  static constexpr int64_t kThreads = 128;

  /// Threads that share a row of the weight, and rows of the weight that they
  /// work on at a time.
  int64_t team = 1, outputs = 4;
  /// Pieces of each row that a thread loads before it needs the first.
  int64_t ahead;

  StreamTiling(int64_t chunks, int64_t rows, const GPUTarget &target) {
    while (team < kThreads && chunks > 4 * team)
      team *= 2;
    // Outputs share what is loaded of x, but the device must be filled.
    while (outputs > 1 && rows / outputs * team < 256 * target.multiprocessors)
      outputs /= 2;
    ahead = 4 / outputs;
  }
  int64_t teams() const { return kThreads / team; }
};

/// Brings the tiles of one operand to shared memory, transposed: k by row.
class TileLoader {
public:
  /// `pointerOf(row)`: the start of a row, of `tileRows` in a tile.
  TileLoader(KernelBuilder &k, const DeviceTensor &tensor, int64_t width,
             int64_t tileRows, int64_t pitch, int64_t inputs,
             llvm::function_ref<Val(Val row)> pointerOf)
      : k(k), element(tensor.element), bytes(tensor.bytes()), width(width),
        pitch(pitch), inputs(inputs) {
    int64_t perRow = ProductTiling::kDepth / width;
    int64_t rowsAtOnce = ProductTiling::kThreads / perRow;
    Val thread = k.threadIdx();
    first = (thread % perRow) * double(width);
    for (int64_t i = 0; i < tileRows / rowsAtOnce; ++i) {
      rows.push_back(thread / double(perRow) + double(i * rowsAtOnce));
      pointers.push_back(pointerOf(rows.back()));
    }
  }

  /// Loads the thread's share of the columns from `k0`; what lies beyond the
  /// last is read before it.
  Vals load(Val k0) const {
    Val at = k0 + first;
    if (isRagged())
      at = k.min(at, k.i32(inputs - width));
    Val offset = k.toI64(at) * double(bytes);
    Vals loaded;
    for (Val pointer : pointers)
      loaded.push_back(k.load(k.offset(pointer, offset),
                              k.packedType(element, width), true));
    return loaded;
  }

  /// Stores what load() returned for `k0`, zeros beyond the last column.
  void store(Val memory, Val k0, ArrayRef<Val> loaded) const {
    Val there = isRagged() ? k0 + first < double(inputs) : Val();
    for (auto [packed, row] : llvm::zip_equal(loaded, rows)) {
      Val at = k.offset(memory, (first * double(pitch) + row) * 4.0);
      for (auto [j, v] : llvm::enumerate(k.unpack(packed, element, width)))
        k.store(there ? k.select(there, v, k.f32(0)) : v,
                k.offset(at, static_cast<int64_t>(j) * pitch * 4));
    }
  }

private:
  bool isRagged() const { return inputs % ProductTiling::kDepth != 0; }

  KernelBuilder &k;
  Type element;
  int64_t bytes, width, pitch, inputs;
  /// The thread's first column in a tile, and its rows.
  Val first;
  Vals rows, pointers;
};

class ProjectionKernels {
public:
  ProjectionKernels(GPULowering &e, ProjectionOp op)
      : e(e), op(op),
        inputs(cast<ShapedType>(op.getX().getType()).getShape().back()),
        outputs(cast<ShapedType>(op.getWeight().getType()).getDimSize(0)) {}

  void emit() {
    y = e.allocate(0);
    // Views are made before the branches that use them.
    bool isGemv = isForGemv(op);
    ArrayRef<int64_t> few = isGemv ? ArrayRef(kFewGemvRows) : kFewRows;
    auto emitFew = [&](int64_t rowsAtOnce) { emitFewRows(rowsAtOnce); };
    auto emitMany = [&] { emitManyRows(); };
    if (!e.isComputed(op.getX())) {
      for (Value tensor : op.getOperands())
        e.buffer(tensor);
      x = e.buffer(op.getX());
      rows = e.rowCount(x);
      emitByRows(few, emitFew, emitMany);
    } else {
      for (Operation *each : e.plan->ops)
        for (Value tensor : each->getOperands())
          if (!e.isComputed(tensor))
            e.buffer(tensor);
      rows = e.rowCount(y);
      // Of many rows, x is made once, and then multiplied as any other.
      auto emitApart = [&] {
        x = emitBefore();
        emitByRows(isGemv ? ArrayRef(kAlsoFewRows) : few, emitFew, emitMany);
        x = Value();
      };
      if (isGemv)
        emitByRows(kGatheredRows, emitFew, emitApart);
      else
        emitApart();
    }
    e.replaceWith(y);
  }

private:
  /// Branches to the kernels for few rows, from the fewest on, or else to that
  /// for many.
  void emitByRows(ArrayRef<int64_t> few,
                  llvm::function_ref<void(int64_t rowsAtOnce)> emitFew,
                  llvm::function_ref<void()> emitMany) {
    APInt known;
    bool isKnown = matchPattern(rows, m_ConstantInt(&known));
    if (few.empty())
      return emitMany();
    auto emitRest = [&] { emitByRows(few.drop_front(), emitFew, emitMany); };
    if (isKnown)
      return known.getSExtValue() <= few[0] ? emitFew(few[0]) : emitRest();
    e.ifThen(
        e.cmp(arith::CmpIPredicate::sle, rows, e.index(few[0])),
        [&] { emitFew(few[0]); }, emitRest);
  }

  /// The kernel of what the plan has before the op; what it makes.
  Value emitBefore() {
    SmallVector<Operation *> before;
    for (Operation *each : e.plan->ops)
      if (each != op)
        before.push_back(each);
    FailureOr<FusionPlan> plan = planFusion(before);
    assert(succeeded(plan) && "expected a part of a plan to be one");
    Operation *last =
        e.plan->prologue() ? e.plan->prologue() : plan->result.getDefiningOp();
    GPULowering lowering(e.host, last, e.target);
    lowering.plan = std::move(*plan);
    if (auto norm = dyn_cast<RMSNormOp>(last))
      return emitRMSNorm(lowering, norm).first;
    return emitPointwise(lowering);
  }

  void emitManyRows() {
    Value done = emitLibraryCall();
    if (!done)
      return emitProduct();
    Value zero =
        arith::ConstantOp::create(e.host, e.loc, e.host.getI64IntegerAttr(0));
    e.ifThen(e.cmp(arith::CmpIPredicate::eq, done, zero),
             [&] { emitProduct(); });
  }

  Value emitLibraryCall();
  void emitProduct();
  void emitFewRows(int64_t rowsAtOnce);

  /// The factor of output `m`; null where there is none.
  Val scaleAt(const DeviceTensor &scale, Val m) const {
    return scale ? scale.loadScalar({}, m) : Val();
  }

  GPULowering &e;
  ProjectionOp op;
  int64_t inputs, outputs;
  Value x, y, rows;
};
} // namespace

/// An element type as the run-time library takes it: its width, that of bf16
/// negative.
static int64_t typeCode(Type type) {
  int64_t width = type.getIntOrFloatBitWidth();
  return type.isBF16() ? -width : width;
}

/// Calls the library's product; the result, i64, is 0 if it has none for these
/// operands. Null if it could not have any.
Value ProjectionKernels::emitLibraryCall() {
  Value w = e.buffer(op.getWeight());
  Value bias = e.buffer(op.getBias()), residual = e.buffer(op.getResidual());
  auto elementOf = [](Value memref) {
    return cast<MemRefType>(memref.getType()).getElementType();
  };
  Type type = elementOf(x), outputType = elementOf(y);
  if (elementOf(w) != type || (outputType != type && !outputType.isF32()))
    return {};
  OpBuilder &b = e.host;
  int64_t rank = cast<MemRefType>(x.getType()).getRank();
  auto i64 = [&](int64_t value) -> Value {
    return arith::ConstantOp::create(b, e.loc, b.getI64IntegerAttr(value));
  };
  auto stridesOf = [&](Value memref) -> SmallVector<Value> {
    if (!memref)
      return {};
    return memref::ExtractStridedMetadataOp::create(b, e.loc, memref)
        .getStrides();
  };
  SmallVector<Value> xStrides = stridesOf(x), yStrides = stridesOf(y);
  SmallVector<Value> residualStrides = stridesOf(residual);
  // Axes before the last three are one with the third where each is as long as
  // its neighbour's stride says. The output is dense.
  Value folds;
  for (int64_t axis = 0; axis + 3 < rank; ++axis)
    for (ArrayRef<Value> strides :
         {ArrayRef(xStrides), ArrayRef(residualStrides)}) {
      if (strides.empty())
        continue;
      Value isNext = e.cmp(arith::CmpIPredicate::eq, strides[axis],
                           e.mul(strides[axis + 1], e.dim(x, axis + 1)));
      folds =
          folds ? b.createOrFold<arith::AndIOp>(e.loc, folds, isNext) : isNext;
    }
  auto call = [&]() -> Value {
    auto stride = [&](ArrayRef<Value> strides, int64_t axis) -> Value {
      return axis < 0 || strides.empty() ? i64(0) : e.toI64(strides[axis]);
    };
    Value batch = e.rowCount(x, /*inner=*/2);
    Value perBatch = rank >= 2 ? e.dim(x, rank - 2) : e.index(1);
    return e.callRuntime(
        "corey_rt_device_gemm",
        {e.address(x), e.address(w), e.address(y),
         bias ? e.address(bias) : i64(0),
         residual ? e.address(residual) : i64(0), e.toI64(batch),
         e.toI64(perBatch), i64(outputs), i64(inputs),
         stride(xStrides, rank - 3), stride(xStrides, rank - 2),
         e.toI64(stridesOf(w)[0]), stride(yStrides, rank - 3),
         stride(yStrides, rank - 2), stride(residualStrides, rank - 3),
         stride(residualStrides, rank - 2), i64(typeCode(type)),
         i64(typeCode(outputType)), i64(bias ? typeCode(elementOf(bias)) : 0)},
        b.getI64Type());
  };
  if (!folds)
    return call();
  auto branch = scf::IfOp::create(b, e.loc, TypeRange(b.getI64Type()), folds,
                                  /*withElseRegion=*/true);
  OpBuilder::InsertionGuard guard(b);
  b.setInsertionPointToStart(branch.thenBlock());
  scf::YieldOp::create(b, e.loc, call());
  b.setInsertionPointToStart(branch.elseBlock());
  scf::YieldOp::create(b, e.loc, i64(0));
  return branch.getResult(0);
}

/// Any number of rows. Tiles of both operands pass through shared memory, two
/// of each: while one is multiplied the next is on its way.
void ProjectionKernels::emitProduct() {
  using T = ProductTiling;
  KernelBuilder k(e.host, e.loc, e.kernels, "projection", {T::kThreads, 0});
  Value xBuffer = x;
  auto indicesAt = [&](Val row) { return rowIndices(e, k, xBuffer, row); };
  DeviceTensor x(e, k, xBuffer), w(e, k, e.buffer(op.getWeight()));
  DeviceTensor bias(e, k, e.buffer(op.getBias()));
  DeviceTensor residual(e, k, e.buffer(op.getResidual()));
  DeviceTensor scale(e, k, e.buffer(op.getWeightScale()));
  DeviceTensor out(e, k, y);
  Val rowCount = k.i32Argument(rows);
  Val rowTile = rowOfBlock(k) * double(T::kRows);
  Val outputTile = k.blockIdx('x') * double(T::kOutputs);

  // The same for all threads of a block: barriers may lie within.
  k.ifThen(rowTile < rowCount, [&] {
    auto xWidth = std::gcd<int64_t>(rowAlignment(op.getX()), 4);
    auto wWidth = std::gcd<int64_t>(rowAlignment(op.getWeight()), 4);
    TileLoader xTile(k, x, xWidth, T::kRows, T::kRowPitch, inputs, [&](Val i) {
      // Rows beyond the last are the last again, and not written.
      Val row = k.min(rowTile + i, rowCount - 1.0);
      return x.at(indicesAt(row), k.i32(0));
    });
    TileLoader wTile(k, w, wWidth, T::kOutputs, T::kOutputPitch, inputs,
                     [&](Val i) {
                       Val m = k.min(outputTile + i, k.i32(outputs - 1));
                       return w.at({m}, k.i32(0));
                     });
    constexpr int64_t xBytes = 4 * T::kDepth * T::kRowPitch;
    constexpr int64_t wBytes = 4 * T::kDepth * T::kOutputPitch;
    Val xShared = k.shared(2 * xBytes), wShared = k.shared(2 * wBytes);

    Val lane = k.lane(), warp = k.warp();
    constexpr int64_t warpsAcross = T::kOutputs / T::kWarpOutputs;
    Val myRow = (warp / double(warpsAcross)) * double(T::kWarpRows) +
                (lane / 8.0) * 4.0;
    Val myOutput =
        (warp % warpsAcross) * double(T::kWarpOutputs) + (lane % 8) * 4.0;

    /// Adds the products of `depth` columns of the tiles in `buffer`.
    auto multiply = [&](Val buffer, int64_t depth, Vals sum) {
      Val xNow = k.offset(xShared, buffer * double(xBytes) + myRow * 4.0);
      Val wNow = k.offset(wShared, buffer * double(wBytes) + myOutput * 4.0);
      auto eight = [&](Val memory, int64_t first, int64_t second) {
        Vals values;
        for (int64_t at : {first, second})
          llvm::append_range(values,
                             k.unpack(k.load(k.offset(memory, 4 * at),
                                             k.packedType(k.f32Type(), 4)),
                                      k.f32Type(), 4));
        return values;
      };
      for (int64_t d = 0; d < depth; ++d) {
        int64_t xAt = d * T::kRowPitch, wAt = d * T::kOutputPitch;
        Vals a = eight(xNow, xAt, xAt + T::kWarpRows / 2);
        Vals c = eight(wNow, wAt, wAt + T::kWarpOutputs / 2);
        for (int64_t i = 0; i < 8; ++i)
          for (int64_t j = 0; j < 8; ++j)
            sum[8 * i + j] = k.fma(a[i], c[j], sum[8 * i + j]);
      }
      return sum;
    };
    xTile.store(xShared, k.i32(0), xTile.load(k.i32(0)));
    wTile.store(wShared, k.i32(0), wTile.load(k.i32(0)));
    k.syncBlock();
    Vals sums(64, k.f32(0));
    int64_t steps = llvm::divideCeil(inputs, T::kDepth);
    if (steps == 1)
      sums = multiply(k.i32(0), inputs, sums);
    else
      sums = k.forLoop(
          k.i32(0), k.i32(steps * T::kDepth), T::kDepth, sums,
          [&](Val k0, ArrayRef<Val> in) -> Vals {
            Val buffer = (k0 / double(T::kDepth)) & 1;
            // The last step loads its own tiles once more.
            Val next =
                k.min(k0 + double(T::kDepth), k.i32((steps - 1) * T::kDepth));
            Vals xNext = xTile.load(next), wNext = wTile.load(next);
            Vals sum = multiply(buffer, T::kDepth, Vals(in));
            // Nobody reads the other buffers since the last barrier.
            Val other = buffer ^ 1;
            xTile.store(k.offset(xShared, other * double(xBytes)), next, xNext);
            wTile.store(k.offset(wShared, other * double(wBytes)), next, wNext);
            k.syncBlock();
            return sum;
          });

    // The thread's outputs, in runs as long as can be written at once.
    int64_t width = std::gcd<int64_t>(e.outputAlignment(y), 4);
    if (residual)
      width = std::gcd(width, rowAlignment(op.getResidual()));
    Vals at, factors, shifts;
    for (int64_t j = 0; j < 8; ++j) {
      at.push_back(outputTile + myOutput +
                   double(j / 4 * (T::kWarpOutputs / 2) + j % 4));
      Val m = k.min(at[j], k.i32(outputs - 1));
      factors.push_back(scaleAt(scale, m));
      shifts.push_back(bias ? bias.loadScalar({}, m) : Val());
    }
    for (int64_t i = 0; i < 8; ++i) {
      Val row = rowTile + myRow + double(i / 4 * (T::kWarpRows / 2) + i % 4);
      k.ifThen(row < rowCount, [&] {
        Vals leading = indicesAt(row);
        for (int64_t first = 0; first < 8; first += width) {
          auto write = [&] {
            Vals values;
            for (int64_t j = first; j < first + width; ++j) {
              Val v = sums[8 * i + j];
              if (scale)
                v = v * factors[j];
              if (bias)
                v = v + shifts[j];
              values.push_back(v);
            }
            if (residual) {
              Vals added =
                  k.unpack(k.load(residual.at(leading, at[first]),
                                  k.packedType(residual.element, width), true),
                           residual.element, width);
              for (auto [v, r] : llvm::zip_equal(values, added))
                v = v + r;
            }
            k.store(k.pack(values, out.element), out.at(leading, at[first]));
          };
          // A run lies within the outputs or beyond them.
          if (outputs % T::kOutputs)
            k.ifThen(at[first] < double(outputs), write);
          else
            write();
        }
      });
    }
  });
  k.launch(e.gridOf(e.index(llvm::divideCeil(outputs, T::kOutputs)),
                    e.ceilDiv(rows, e.index(T::kRows))));
}

/// Up to `rowsAtOnce` rows: every weight is loaded once, in its own type, and
/// meets all rows of x, which stay in the first cache. The threads of a team
/// add up their sums at the end.
void ProjectionKernels::emitFewRows(int64_t rowsAtOnce) {
  if (isForGemv(op))
    return emitGemv(e, op, x, y, rows, rowsAtOnce);
  int64_t width = rowAlignment(op.getWeight());
  int64_t xWidth = std::gcd(width, rowAlignment(op.getX()));
  int64_t chunks = inputs / width;
  StreamTiling t(chunks, outputs, e.target);
  KernelBuilder k(e.host, e.loc, e.kernels,
                  "projection_stream_" + std::to_string(rowsAtOnce),
                  {StreamTiling::kThreads, 0});
  Value xBuffer = x;
  auto indicesAt = [&](Val row) { return rowIndices(e, k, xBuffer, row); };
  DeviceTensor x(e, k, xBuffer), w(e, k, e.buffer(op.getWeight()));
  DeviceTensor bias(e, k, e.buffer(op.getBias()));
  DeviceTensor residual(e, k, e.buffer(op.getResidual()));
  DeviceTensor scale(e, k, e.buffer(op.getWeightScale()));
  DeviceTensor out(e, k, y);
  Val rowCount = k.i32Argument(rows);
  Val thread = k.threadIdx();
  Val member = thread % t.team;
  Val firstOutput =
      (k.blockIdx('x') * double(t.teams()) + thread / double(t.team)) *
      double(t.outputs);

  // Outputs and rows beyond the last are the last again, and not written.
  Vals xRows, wRows;
  for (int64_t r = 0; r < rowsAtOnce; ++r)
    xRows.push_back(x.at(indicesAt(k.min(k.i32(r), rowCount - 1.0)), k.i32(0)));
  for (int64_t o = 0; o < t.outputs; ++o)
    wRows.push_back(
        w.at({k.min(firstOutput + double(o), k.i32(outputs - 1))}, k.i32(0)));

  auto loadWeights = [&](Val chunk) {
    Val offset = k.toI64(chunk) * double(width * w.bytes());
    Vals loaded;
    for (Val row : wRows)
      loaded.push_back(
          k.load(k.offset(row, offset), k.packedType(w.element, width), true));
    return loaded;
  };
  /// The sums, output by output for each row, after one chunk.
  auto multiply = [&](Val chunk, ArrayRef<Val> loaded, Vals sums) {
    SmallVector<Vals> weights;
    for (Val packed : loaded)
      weights.push_back(k.unpack(packed, w.element, width));
    Val offset = k.toI64(chunk) * double(width * x.bytes());
    for (int64_t piece = 0; piece < width; piece += xWidth)
      for (int64_t r = 0; r < rowsAtOnce; ++r) {
        Val pointer = k.offset(k.offset(xRows[r], offset), piece * x.bytes());
        Vals values =
            k.unpack(k.load(pointer, k.packedType(x.element, xWidth), true),
                     x.element, xWidth);
        for (int64_t o = 0; o < t.outputs; ++o) {
          Val &sum = sums[r * t.outputs + o];
          for (int64_t i = 0; i < xWidth; ++i)
            sum = k.fma(values[i], weights[o][piece + i], sum);
        }
      }
    return sums;
  };
  /// `count` chunks of every thread from round `round` on.
  auto rounds = [&](Val round, int64_t count, Vals sums) {
    SmallVector<Vals> loaded;
    Vals at;
    for (int64_t i = 0; i < count; ++i) {
      at.push_back((round + double(i)) * double(t.team) + member);
      loaded.push_back(loadWeights(at[i]));
    }
    for (int64_t i = 0; i < count; ++i)
      sums = multiply(at[i], loaded[i], sums);
    return sums;
  };

  Vals sums(rowsAtOnce * t.outputs, k.f32(0));
  int64_t full = chunks / t.team, rest = full % t.ahead;
  if (full - rest)
    sums = k.forLoop(k.i32(0), k.i32(full - rest), t.ahead, sums,
                     [&](Val round, ArrayRef<Val> in) -> Vals {
                       return rounds(round, t.ahead, Vals(in));
                     });
  if (rest)
    sums = rounds(k.i32(full - rest), rest, sums);
  if (chunks % t.team)
    sums = k.ifValues(
        member < double(chunks % t.team),
        [&]() -> Vals { return rounds(k.i32(full), 1, sums); },
        [&]() -> Vals { return sums; });

  // Lane q of its group has the sums from (q mod items) * count on.
  int64_t items = sums.size(), lanes = std::min<int64_t>(t.team, 32);
  Val q = member % lanes;
  sums = k.reduceScatter(sums, lanes, q);
  int64_t count = sums.size();
  Val writer = q % items;
  Val writes = member < double(items);
  if (int64_t warps = t.team / 32; warps > 1) {
    // As many lanes as items, at least: each has one.
    Val memory = k.shared(4 * items * (StreamTiling::kThreads / 32));
    k.ifThen(k.lane() < double(items), [&] {
      k.store(sums[0],
              k.offset(memory, (k.warp() * double(items) + k.lane()) * 4.0));
    });
    k.syncBlock();
    writer = k.min(member, k.i32(items - 1));
    Val from = k.offset(
        memory,
        ((thread / double(t.team)) * double(warps * items) + writer) * 4.0);
    sums[0] = k.load(from, k.f32Type());
    for (int64_t i = 1; i < warps; ++i)
      sums[0] = sums[0] + k.load(k.offset(from, 4 * i * items), k.f32Type());
  }
  for (int64_t i = 0; i < count; ++i) {
    Val item = writer * double(count) + double(i);
    Val row = item / double(t.outputs);
    Val m = firstOutput + item % t.outputs;
    Val there = writes & (row < rowCount) & (m < double(outputs));
    k.ifThen(there, [&] {
      Val v = sums[i];
      if (scale)
        v = v * scaleAt(scale, m);
      if (bias)
        v = v + bias.loadScalar({}, m);
      Vals leading = indicesAt(row);
      if (residual)
        v = v + residual.loadScalar(leading, m);
      k.store(k.pack({v}, out.element), out.at(leading, m));
    });
  }
  // No rows, no blocks.
  k.launch({e.index(llvm::divideCeil(llvm::divideCeil(outputs, t.outputs),
                                     t.teams())),
            e.min(rows, e.index(1)),
            {}});
}

namespace {
struct ProjectionLowering : public GPULoweringPattern<ProjectionOp> {
  using GPULoweringPattern::GPULoweringPattern;
  LogicalResult matchAndRewrite(ProjectionOp op,
                                PatternRewriter &rewriter) const override {
    // What a scan behind it has made for itself.
    if (op->use_empty()) {
      rewriter.eraseOp(op);
      return success();
    }
    if (isa_and_nonnull<FusedOp>(op->getParentOp())) {
      FailureOr<FusionPlan> plan = planFusedRegion(op->getParentOp());
      if (succeeded(plan) && plan->prologue() == op)
        return failure();
    }
    GPULowering e(rewriter, op, target);
    ProjectionKernels(e, op).emit();
    return success();
  }
};
} // namespace

void corey::populateGPUProjectionLowerings(RewritePatternSet &patterns,
                                           GPUTarget target) {
  patterns.add<ProjectionLowering>(patterns.getContext(), target);
}
