//===- Gemv.cpp - GPU kernels of projections of few rows ------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// Bound by the memory that the weight takes, of which every element is loaded
// once. Products are those of tensor cores, which cost the same for one row and
// for eight: rows of x are those of the first operand, of which some are not
// there, eight rows of the weight the columns of the second.
//
// A step of a warp takes 32 columns, eight of each lane of four, which it loads
// at once. Which column stands where in an operand is the same for both, so no
// element has to change its lane. Warps that share outputs have some of the
// columns each, and add up their sums in shared memory, in order.
//
// A warp loads all it has of the weight before it needs the first of it. Where
// weights do not change while the program runs it does so before predecessors
// have ended; what is left of the time after that is that of x.
//
// Where x is made in the kernel, by a norm or by pointwise ops, every block has
// all of it in shared memory: to make it again costs less than another kernel.
//
//===----------------------------------------------------------------------===//

#include "GPULowering.h"
#include <numeric>

using namespace mlir;
using namespace corey;
using namespace corey::ssm;

/// Words of eight columns, and pieces of as many that a lane loads of x at
/// once.
static constexpr int64_t kWords = 4;
static constexpr size_t kPieces = 8;
/// Elements of x that a thread has in registers while it makes x.
static constexpr int64_t kHeld = 32;

namespace {
struct GemvTiling {
  /// Columns of a step, those of a lane in it, and outputs of a tile.
  static constexpr int64_t kDepth = 32, kOfLane = 8, kOutputs = 8;
  /// Loads of the weight that a lane has on the way at a time.
  static constexpr int64_t kWanted = 8, kMostLoads = 12;
  static constexpr int64_t kMaxSplits = 16, kWarps = 8;
  /// Threads of a multiprocessor, of all its blocks.
  static constexpr int64_t kResident = 512;

  GemvTiling(int64_t outputs, int64_t inputs, const GPUTarget &target) {
    int64_t steps = llvm::divideCeil(inputs, kDepth);
    int64_t wide = llvm::divideCeil(outputs, 2 * kOutputs);
    // Two tiles share what is loaded of x, if that leaves enough blocks.
    if (2 * wide >= 3 * target.multiprocessors && steps >= kWanted &&
        steps <= kMaxSplits * kMostLoads / 2)
      tiles = 2;
    int64_t alone = llvm::divideCeil(outputs, tiles * kOutputs);
    auto isShort = [&] {
      return llvm::divideCeil(steps, splits) * tiles <= kWanted &&
             (2 * alone >= target.multiprocessors || steps <= 4 * splits);
    };
    while (splits < kMaxSplits && !isShort())
      splits *= 2;
    int64_t ofWarp = llvm::divideCeil(steps, splits);
    held = std::min(ofWarp, kMostLoads / tiles);
    rounds = llvm::divideCeil(ofWarp, held);
    while (2 * groups * splits <= kWarps &&
           int64_t(4 * llvm::divideCeil(alone, 2 * groups)) >=
               3 * target.multiprocessors)
      groups *= 2;
    // Blocks that run at a time go on to further outputs: as many each.
    items = llvm::divideCeil(alone, groups);
    int64_t atOnce =
        target.multiprocessors * std::max<int64_t>(kResident / threads(), 1);
    iterations = std::max<int64_t>(llvm::divideCeil(items, atOnce), 1);
    blocks = llvm::divideCeil(items, iterations);
    isRagged = rounds * held * splits * kDepth != inputs;
  }
  int64_t threads() const { return 32 * splits * groups; }
  int64_t warps() const { return splits * groups; }

  /// Tiles of a warp at a time; warps that share them; groups of such warps in
  /// a block.
  int64_t tiles = 1, splits = 1, groups = 1;
  /// Steps of a warp whose weights are loaded together, and how often.
  int64_t held, rounds;
  /// What blocks have to do: items of `groups` times `tiles` tiles.
  int64_t items, iterations, blocks;
  /// There are steps beyond the last column.
  bool isRagged;
};

class Gemv {
public:
  Gemv(GPULowering &e, ProjectionOp op, Value from, Value y, Value rows,
       int64_t rowsAtOnce)
      : e(e), op(op), y(y), rowsOfCall(rows), rowsAtOnce(rowsAtOnce),
        inputs(cast<ShapedType>(op.getX().getType()).getShape().back()),
        outputs(cast<ShapedType>(op.getWeight().getType()).getDimSize(0)),
        t(outputs, inputs, e.target),
        k(e.host, e.loc, e.kernels, "gemv_" + std::to_string(rowsAtOnce),
          {t.threads(), 0}),
        x(e, k, from), w(e, k, e.buffer(op.getWeight())),
        bias(e, k, e.buffer(op.getBias())),
        residual(e, k, e.buffer(op.getResidual())),
        scale(e, k, e.buffer(op.getWeightScale())), out(e, k, y) {}

  void emit();

private:
  /// Makes x from what the plan has before the op, in shared memory.
  void gather();
  /// Bytes from one row of x there to the next: two rows of four pieces lie in
  /// different banks.
  int64_t pitch() const { return llvm::alignTo(2 * inputs, 128) + 64; }

  Vals leadingOf(Val row) { return rowIndices(e, k, y, row); }
  /// Whether the lane has columns in step `step` of its warp; null if it is
  /// known to.
  Val isInside(Val step) const {
    return t.isRagged
               ? column + step * double(GemvTiling::kDepth) < double(inputs)
               : Val();
  }
  /// Bytes from the lane's first columns to those of `step`, or none if it has
  /// no columns there.
  Val offsetOf(Val step) {
    constexpr int64_t bytes = GemvTiling::kDepth * 2;
    Val offset = step * double(bytes);
    return t.isRagged ? k.select(isInside(step), offset, k.i32(0)) : offset;
  }
  /// Eight columns at `pointer`, as words, zeros where there are none.
  Vals columnsAt(Val pointer, Val step);

  Val firstOutput(Val item) {
    return (item * double(t.groups) + group) *
           double(t.tiles * GemvTiling::kOutputs);
  }
  /// Where the lane's columns start in its rows of the weight.
  Vals weightsOf(Val item) {
    Vals pointers;
    for (int64_t j = 0; j < t.tiles; ++j) {
      Val m = firstOutput(item) + double(j * GemvTiling::kOutputs) + place;
      pointers.push_back(w.at({k.min(m, k.i32(outputs - 1))}, firstColumn));
    }
    return pointers;
  }
  Vals loadWeights(ArrayRef<Val> pointers, Val round) {
    Vals loaded;
    for (int64_t i = 0; i < t.held; ++i)
      for (Val pointer : pointers)
        llvm::append_range(
            loaded, columnsAt(pointer, round * double(t.held) + double(i)));
    return loaded;
  }

  /// What an output starts with: loaded long before it is needed.
  struct Addend {
    Val row, m, there, scale, bias, residual;
  };
  Addend addendOf(Val item, Val number);
  /// The products of an item whose first weights are `loaded`.
  Vals multiply(Val item, ArrayRef<Val> loaded);
  void addProducts(Val round, ArrayRef<Val> loaded, SmallVector<Vals> &sums);
  void finish(ArrayRef<Val> sums, Val buffer, ArrayRef<Addend> addends,
              Val item);
  int64_t results() const {
    return t.groups * rowsAtOnce * t.tiles * GemvTiling::kOutputs;
  }

  GPULowering &e;
  ProjectionOp op;
  Value y, rowsOfCall;
  int64_t rowsAtOnce, inputs, outputs;
  GemvTiling t;
  KernelBuilder k;
  DeviceTensor x, w, bias, residual, scale, out;
  Val rows, shared, gathered;
  /// The lane's row in a tile, its first column, and the same, but within the
  /// tensor in any case.
  Val place, column, firstColumn;
  /// Which of the block's outputs the warp has a part of.
  Val group;
  /// Where x starts in the lane's rows.
  Vals xRows;
};
} // namespace

Vals Gemv::columnsAt(Val pointer, Val step) {
  Val at = k.offset(pointer, offsetOf(step));
  Type type = k.packedType(w.element, GemvTiling::kOfLane);
  // Those of global memory stay on their side of the wait for predecessors.
  Val packed =
      at.type() == shared.type() ? k.load(at, type) : k.loadInPlace(at, type);
  Vals words;
  for (int64_t i = 0; i < kWords; ++i)
    words.push_back(k.extract(packed, i));
  if (Val inside = isInside(step))
    for (Val &word : words)
      word = k.select(inside, word, k.i32(0));
  return words;
}

/// sums + a b, of 16 rows, eight columns and a depth of 16.
static Vals multiplyTile(KernelBuilder &k, ArrayRef<Val> a, ArrayRef<Val> b,
                         ArrayRef<Val> sums, Type element) {
  Vals arguments;
  for (ArrayRef<Val> operand : {a, b})
    for (Val word : operand)
      arguments.push_back(element.isBF16()
                              ? word
                              : k.bitcast(word, VectorType::get({2}, element)));
  llvm::append_range(arguments, sums);
  auto type = LLVM::LLVMStructType::getLiteral(
      k.b.getContext(), SmallVector<Type>(4, k.f32Type()));
  Val made =
      k.intrinsic(element.isBF16() ? "llvm.nvvm.mma.m16n8k16.row.col.bf16"
                                   : "llvm.nvvm.mma.m16n8k16.row.col.f32.f32",
                  type, arguments);
  Vals results;
  for (int64_t i = 0; i < 4; ++i)
    results.push_back(
        k.wrap(LLVM::ExtractValueOp::create(k.b, k.loc, made.value, i)));
  return results;
}

void Gemv::addProducts(Val round, ArrayRef<Val> loaded,
                       SmallVector<Vals> &sums) {
  size_t chain = 0;
  Val none = k.i32(0);
  // All of x that registers have room for is asked for at once.
  auto ahead = static_cast<int64_t>(kPieces / xRows.size());
  for (int64_t begin = 0; begin < t.held; begin += ahead) {
    int64_t end = std::min(begin + ahead, t.held);
    SmallVector<SmallVector<Vals, 2>> pieces;
    for (int64_t i = begin; i < end; ++i) {
      Val step = round * double(t.held) + double(i);
      auto &own = pieces.emplace_back();
      for (Val row : xRows)
        own.push_back(columnsAt(row, step));
    }
    for (int64_t i = begin; i < end; ++i)
      for (int64_t half = 0; half < 2; ++half)
        for (int64_t j = 0; j < t.tiles; ++j) {
          ArrayRef<Vals> own = pieces[i - begin];
          Vals a;
          for (int64_t word = 2 * half; word < 2 * half + 2; ++word) {
            a.push_back(own[0][word]);
            a.push_back(own.size() > 1 ? own[1][word] : none);
          }
          // Products that follow one another wait for one another.
          Vals &sum = sums[chain++ % sums.size()];
          sum = multiplyTile(
              k, a, loaded.slice((i * t.tiles + j) * kWords + 2 * half, 2), sum,
              w.element);
        }
  }
}

Vals Gemv::multiply(Val item, ArrayRef<Val> loaded) {
  // Sums of the tiles, several each.
  SmallVector<Vals> sums(4, Vals(4, k.f32(0)));
  if (t.rounds == 1) {
    addProducts(k.i32(0), loaded, sums);
  } else {
    Vals pointers = weightsOf(item), carried(loaded);
    for (const Vals &sum : sums)
      llvm::append_range(carried, sum);
    Vals end =
        k.forLoop(k.i32(0), k.i32(t.rounds), 1, carried,
                  [&](Val round, ArrayRef<Val> in) -> Vals {
                    SmallVector<Vals> own;
                    for (size_t i = 0; i < sums.size(); ++i)
                      own.push_back(Vals(in.slice(loaded.size() + 4 * i, 4)));
                    addProducts(round, in.take_front(loaded.size()), own);
                    Vals next = k.loadIf(round + 1.0 < double(t.rounds), [&] {
                      return loadWeights(pointers, round + 1.0);
                    });
                    for (const Vals &sum : own)
                      llvm::append_range(next, sum);
                    return next;
                  });
    for (size_t i = 0; i < sums.size(); ++i)
      sums[i] = Vals(ArrayRef(end).slice(loaded.size() + 4 * i, 4));
  }
  Vals results;
  for (int64_t j = 0; j < t.tiles; ++j)
    for (int64_t i = 0; i < 4; ++i) {
      Val sum = sums[j][i];
      for (size_t chain = j + t.tiles; chain < sums.size(); chain += t.tiles)
        sum = sum + sums[chain][i];
      results.push_back(sum);
    }
  return results;
}

Gemv::Addend Gemv::addendOf(Val item, Val number) {
  constexpr int64_t kOutputs = GemvTiling::kOutputs;
  Addend addend;
  Val tile = number / double(kOutputs);
  Val block = tile / double(t.tiles);
  addend.row = block % rowsAtOnce;
  addend.m = ((item * double(t.groups) + block / double(rowsAtOnce)) *
                  double(t.tiles) +
              tile % t.tiles) *
                 double(kOutputs) +
             number % kOutputs;
  addend.there = (number < double(results())) & (addend.row < rows) &
                 (addend.m < double(outputs));
  Val m = k.min(addend.m, k.i32(outputs - 1));
  if (scale)
    addend.scale = scale.elementsInPlace({}, m, 1)[0];
  if (bias)
    addend.bias = bias.elementsInPlace({}, m, 1)[0];
  if (residual)
    addend.residual = residual.elementsInPlace(
        leadingOf(k.min(addend.row, rows - 1.0)), m, 1)[0];
  return addend;
}

void Gemv::finish(ArrayRef<Val> sums, Val buffer, ArrayRef<Addend> addends,
                  Val item) {
  constexpr int64_t kOutputs = GemvTiling::kOutputs;
  // Tiles of f32 by warp, of as many rows as there may be.
  int64_t tileBytes = 4 * rowsAtOnce * kOutputs;
  int64_t warpBytes = t.tiles * tileBytes;
  Val memory = k.offset(shared, buffer * double(t.warps() * warpBytes));
  auto write = [&](int64_t first) {
    Val row = place + double(first / 2 * 8);
    Val at = k.offset(
        memory, k.warp() * double(warpBytes) +
                    (row * double(kOutputs) + (k.lane() & 3) * 2.0) * 4.0);
    for (int64_t j = 0; j < t.tiles; ++j)
      k.store(k.vector(sums.slice(4 * j + first, 2)),
              k.offset(at, j * tileBytes));
  };
  if (rowsAtOnce < 8)
    k.ifThen(place < double(rowsAtOnce), [&] { write(0); });
  else
    write(0);
  if (rowsAtOnce > 8)
    write(2);
  k.syncBlock();
  for (int64_t first = 0; first < results(); first += t.threads()) {
    Val number = k.threadIdx() + double(first);
    Addend addend =
        addends.empty() ? addendOf(item, number) : addends[first / t.threads()];
    k.ifThen(addend.there, [&] {
      Val tile = number / double(kOutputs);
      Val block = tile / double(t.tiles);
      Val from = k.offset(
          memory,
          block / double(rowsAtOnce) * double(t.splits * warpBytes) +
              (tile % t.tiles) * double(tileBytes) +
              (addend.row * double(kOutputs) + number % kOutputs) * 4.0);
      Val v = k.load(from, k.f32Type());
      for (int64_t s = 1; s < t.splits; ++s)
        v = v + k.load(k.offset(from, s * warpBytes), k.f32Type());
      if (scale)
        v = v * addend.scale;
      if (bias)
        v = v + addend.bias;
      if (residual)
        v = v + addend.residual;
      k.store(k.pack({v}, out.element),
              out.at(leadingOf(addend.row), addend.m));
    });
  }
}

void Gemv::gather() {
  auto norm = dyn_cast_or_null<RMSNormOp>(e.plan->prologue());
  InputStream made(e, k, op.getX()), input, added, gate;
  DeviceTensor weight;
  int64_t count = e.streamAlignment(op.getX());
  if (norm) {
    input = InputStream(e, k, norm.getX());
    added = InputStream(e, k, norm.getResidual());
    gate = InputStream(e, k, norm.getZ());
    weight = DeviceTensor(e, k, e.buffer(norm.getWeight()));
    for (Value tensor :
         {Value(norm.getX()), Value(norm.getResidual()), Value(norm.getZ())})
      if (tensor)
        count = std::gcd(count, e.streamAlignment(tensor));
  }
  // As many threads for each row.
  int64_t lanes = t.threads() / rowsAtOnce;
  int64_t pieces = inputs / count, ofThread = llvm::divideCeil(pieces, lanes);
  int64_t held = std::min(ofThread, kHeld / count);
  Val member = k.threadIdx() % lanes, row = k.threadIdx() / double(lanes);
  Vals leading = leadingOf(k.min(row, rows - 1.0));
  Val to = k.offset(gathered, row * double(pitch()));

  /// What a thread has of a piece; `inside` is null where that is known.
  struct Piece {
    Val at, inside;
    Vals input, added, gate, made, weights;
  };
  auto load = [&](const InputStream &stream, Val at) {
    return stream ? stream.loadInPlace(stream.at(leading, at), count) : Vals();
  };
  auto loadPieces = [&](Val round, bool inLoop) {
    std::vector<Piece> loaded(held);
    for (auto [i, piece] : llvm::enumerate(loaded)) {
      Val number = (round + double(i)) * double(lanes) + member;
      if (inLoop || static_cast<int64_t>(i + 1) * lanes > pieces) {
        piece.inside = number < double(pieces);
        number = k.min(number, k.i32(pieces - 1));
      }
      piece.at = number * double(count);
      piece.made = load(made, piece.at);
      if (!norm)
        continue;
      piece.input = load(input, piece.at);
      piece.added = load(added, piece.at);
      piece.gate = load(gate, piece.at);
      piece.weights = weight.elementsInPlace({}, piece.at, count,
                                             rowAlignment(norm.getWeight()));
    }
    return loaded;
  };
  auto gateOf = [&](const Piece &piece) {
    Vals factors;
    for (Val value : gate.values(piece.gate, count))
      factors.push_back(k.silu(value));
    return factors;
  };
  bool gateFirst = norm && gate && !norm.getNormBeforeGate();
  bool gateLast = norm && gate && norm.getNormBeforeGate();
  auto valuesOf = [&](const Piece &piece) {
    Vals values = input.values(piece.input, count);
    if (added)
      for (auto [v, a] :
           llvm::zip_equal(values, added.values(piece.added, count)))
        v = v + a;
    if (gateFirst)
      for (auto [v, g] : llvm::zip_equal(values, gateOf(piece)))
        v = v * g;
    return values;
  };
  auto addSquares = [&](Val sum, const Piece &piece, ArrayRef<Val> values) {
    Val own = sum;
    for (Val value : values)
      own = k.fma(value, value, own);
    return piece.inside ? k.select(piece.inside, own, sum) : own;
  };
  // The factor of the thread's row, from the squares of all of its threads.
  auto factorOf = [&](Val sum) {
    sum = k.warpSum(sum, std::min<int64_t>(lanes, 32));
    if (int64_t warps = lanes / 32; warps > 1) {
      Val memory = k.shared(4 * t.warps());
      k.ifThen(k.lane() == 0,
               [&] { k.store(sum, k.offset(memory, k.warp() * 4.0)); });
      k.syncBlock();
      Val from = k.offset(memory, row * double(4 * warps));
      sum = k.load(from, k.f32Type());
      for (int64_t i = 1; i < warps; ++i)
        sum = sum + k.load(k.offset(from, 4 * i), k.f32Type());
    }
    Val mean = k.fma(sum, k.f32(1.0 / static_cast<double>(inputs)),
                     k.f32(norm.getEps().convertToFloat()));
    // Without flushing denormals: eps may be zero.
    return k.intrinsic("llvm.nvvm.rsqrt.approx.f", k.f32Type(), {mean});
  };
  auto store = [&](const Piece &piece, Vals values, Val factor) {
    if (norm) {
      for (auto [v, w] : llvm::zip_equal(values, piece.weights))
        v = v * factor * w;
      if (gateLast)
        for (auto [v, g] : llvm::zip_equal(values, gateOf(piece)))
          v = v * g;
    }
    values =
        made.values(piece.made, count, norm ? norm.getY() : Value(), values);
    auto write = [&] {
      k.store(k.pack(values, w.element), k.offset(to, piece.at * 2.0));
    };
    if (piece.inside)
      k.ifThen(piece.inside, write);
    else
      write();
  };

  if (held == ofThread) {
    std::vector<Piece> loaded = loadPieces(k.i32(0), /*inLoop=*/false);
    SmallVector<Vals> values(held);
    Val factor;
    if (norm) {
      Val sum = k.f32(0);
      for (auto [piece, own] : llvm::zip_equal(loaded, values)) {
        own = valuesOf(piece);
        sum = addSquares(sum, piece, own);
      }
      factor = factorOf(sum);
    }
    for (auto [piece, own] : llvm::zip_equal(loaded, values))
      store(piece, own, factor);
  } else {
    // Read twice, the second time from the caches.
    Val factor;
    if (norm)
      factor =
          factorOf(k.forLoop(k.i32(0), k.i32(ofThread), held, {k.f32(0)},
                             [&](Val round, ArrayRef<Val> in) -> Vals {
                               Val sum = in[0];
                               for (const Piece &piece :
                                    loadPieces(round, /*inLoop=*/true))
                                 sum = addSquares(sum, piece, valuesOf(piece));
                               return {sum};
                             })[0]);
    k.forLoop(k.i32(0), k.i32(ofThread), held, [&](Val round) {
      for (const Piece &piece : loadPieces(round, /*inLoop=*/true))
        store(piece, norm ? valuesOf(piece) : Vals(), factor);
    });
  }
  k.syncBlock();
}

void Gemv::emit() {
  bool isBound = e.isWeight(op.getWeight());
  rows = k.i32Argument(rowsOfCall);
  Val lane = k.lane(), warp = k.warp();
  place = lane >> 2;
  column = (warp % t.splits) * double(t.rounds * t.held * GemvTiling::kDepth) +
           (lane & 3) * double(GemvTiling::kOfLane);
  firstColumn =
      t.isRagged ? k.min(column, k.i32(inputs - GemvTiling::kOfLane)) : column;
  group = warp / double(t.splits);
  shared = k.shared((t.iterations > 1 ? 2 : 1) * t.warps() * t.tiles *
                    rowsAtOnce * GemvTiling::kOutputs * 4);
  Val item = k.blockIdx('x');

  Vals loaded;
  auto loadFirst = [&] { loaded = loadWeights(weightsOf(item), k.i32(0)); };
  if (e.target.chip.hasDependentLaunches) {
    k.launchDependents();
    if (isBound) {
      loadFirst();
    } else {
      // Where it is written matters to nobody's caches but the last, which all
      // share.
      for (Val pointer : weightsOf(item))
        for (int64_t i = 0; i < t.held; ++i)
          k.prefetchL2(k.offset(pointer, offsetOf(k.i32(i))));
    }
    k.waitForPredecessors();
  }
  if (loaded.empty())
    loadFirst();
  if (!x) {
    gathered = k.shared(rowsAtOnce * pitch());
    gather();
  }
  // Rows beyond the last are the last again, and not written.
  for (int64_t first = 0; first < rowsAtOnce; first += 8) {
    Val row = k.min(place + double(first), rows - 1.0);
    xRows.push_back(
        x ? x.at(leadingOf(row), firstColumn)
          : k.offset(gathered, row * double(pitch()) + firstColumn * 2.0));
  }

  auto work = [&](Val item, ArrayRef<Val> loaded, Val buffer,
                  llvm::function_ref<void()> loadNext) {
    SmallVector<Addend> addends;
    if (results() <= t.threads())
      addends.push_back(addendOf(item, k.threadIdx()));
    Vals sums = multiply(item, loaded);
    loadNext();
    finish(sums, buffer, addends, item);
  };
  if (t.iterations == 1) {
    work(item, loaded, k.i32(0), [] {});
  } else {
    Vals carried(loaded);
    carried.push_back(k.i32(0));
    k.forLoop(item, k.i32(t.items), t.blocks, carried,
              [&](Val item, ArrayRef<Val> in) -> Vals {
                Vals next;
                Val following = item + double(t.blocks);
                // Weights of the next are on their way while this one's sums
                // are added up.
                work(item, in.drop_back(), in.back(), [&] {
                  next = k.loadIf(following < double(t.items), [&] {
                    return loadWeights(weightsOf(following), k.i32(0));
                  });
                });
                next.push_back(in.back() ^ 1);
                return next;
              });
  }
  // No rows, no blocks.
  k.launch({e.index(t.blocks), e.min(rowsOfCall, e.index(1)), {}});
}

bool corey::isForGemv(ProjectionOp op) {
  auto x = cast<RankedTensorType>(op.getX().getType());
  Type element = x.getElementType();
  return (element.isF16() || element.isBF16()) &&
         getElementTypeOrSelf(op.getWeight()) == element &&
         rowAlignment(op.getX()) == GemvTiling::kOfLane &&
         rowAlignment(op.getWeight()) == GemvTiling::kOfLane;
}

void corey::emitGemv(GPULowering &e, ProjectionOp op, Value x, Value y,
                     Value rows, int64_t rowsAtOnce) {
  Gemv(e, op, x, y, rows, rowsAtOnce).emit();
}
