//===- Hadamard.cpp - GPU kernel of hadamard ------------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// How threads share a transform is in HadamardStages.h, for the norms that end
// with one as well.
//
//===----------------------------------------------------------------------===//

#include "GPULowering.h"
#include "HadamardStages.h"
#include <cmath>
#include <numeric>

using namespace mlir;
using namespace corey;
using namespace corey::ssm;

/// The largest transform: its elements fill half of the shared memory that a
/// block can have.
static constexpr int64_t kMaxBlock = 32768;

namespace {
/// Addresses of elements of a transform in shared memory: what depends on the
/// thread, plus what is known.
class SharedElements {
public:
  /// `fixed` are the bits of an element's number that the thread tells.
  SharedElements(KernelBuilder &k, const HadamardTiling &t, Val memory,
                 Val fixed)
      : t(t) {
    Val word = fixed;
    if (t.swapsHalves())
      word = word ^ (((fixed >> 5) & 1) << 2);
    Val padding = (fixed >> t.firstOfPiece()) * double(t.padding());
    bases[0] = k.offset(memory, (word + padding) * 4);
    if (t.swapsHalves())
      bases[1] = k.offset(memory, ((word ^ int64_t(4)) + padding) * 4);
  }
  Val at(KernelBuilder &k, int64_t known) const {
    int64_t word = known;
    if (t.swapsHalves())
      word ^= ((known >> 5) & 1) << 2;
    int64_t half = t.swapsHalves() ? word & 4 : 0;
    word = (word ^ half) + (known >> t.firstOfPiece()) * t.padding();
    return k.offset(bases[half ? 1 : 0], word * 4);
  }

private:
  const HadamardTiling &t;
  Val bases[2];
};
} // namespace

/// One stage between registers, `distance` apart.
static void transform(MutableArrayRef<Val> values, int64_t distance) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (i & distance)
      continue;
    Val a = values[i], b = values[i + distance];
    values[i] = a + b;
    values[i + distance] = a - b;
  }
}

/// Does the stages of the exchanged bits.
static void exchange(KernelBuilder &k, const HadamardTiling &t, Val thread,
                     Val span, int64_t spans, MutableArrayRef<Val> values) {
  auto sync = [&] {
    if (t.threads > 5)
      k.syncBlock();
    else
      k.syncWarp();
  };
  int64_t spanBytes = 4 * t.sharedWords();
  Val memory = k.shared(spanBytes * spans);
  if (spans > 1)
    memory = k.offset(memory, span * double(spanBytes));

  // The first layout: register (piece, element).
  int64_t count = int64_t(1) << t.count;
  int64_t width = std::min<int64_t>(count, 4);
  SharedElements first(k, t, memory, thread << t.count);
  auto knownOfFirst = [&](int64_t i) {
    return ((i >> t.count) << t.firstOfPiece()) | (i & (count - 1));
  };
  for (size_t i = 0; i < values.size(); i += width)
    k.store(k.vector(ArrayRef<Val>(values).slice(i, width)),
            first.at(k, knownOfFirst(i)));
  sync();

  // The second, neighbouring bits of the thread's number at once.
  Val fixed;
  for (size_t i = 0; i < t.threadBits.size();) {
    size_t end = i + 1;
    while (end < t.threadBits.size() &&
           t.threadBits[end] == t.threadBits[end - 1] + 1)
      ++end;
    Val part = ((thread >> i) & ((int64_t(1) << (end - i)) - 1))
               << t.threadBits[i];
    fixed = fixed ? fixed | part : part;
    i = end;
  }
  SharedElements second(k, t, memory, fixed);
  auto knownOfSecond = [&](int64_t i) {
    int64_t known = 0;
    for (auto [position, bit] : llvm::enumerate(t.registerBits))
      known |= ((i >> position) & 1) << bit;
    return known;
  };
  // Registers that lie next to each other are read at once.
  int64_t spare = t.held - t.exchanged, adjacent = 1;
  while (adjacent < 4 && adjacent < (int64_t(1) << spare) &&
         t.registerBits[llvm::Log2_64(adjacent)] ==
             static_cast<int64_t>(llvm::Log2_64(adjacent)))
    adjacent *= 2;
  for (size_t i = 0; i < values.size(); i += adjacent)
    llvm::copy(k.unpack(k.load(second.at(k, knownOfSecond(i)),
                               k.packedType(k.f32Type(), adjacent)),
                        k.f32Type(), adjacent),
               values.begin() + i);
  for (int64_t bit = spare; bit < t.held; ++bit)
    transform(values, int64_t(1) << bit);
  // What a thread writes only itself has read.
  for (size_t i = 0; i < values.size(); i += adjacent)
    k.store(k.vector(ArrayRef<Val>(values).slice(i, adjacent)),
            second.at(k, knownOfSecond(i)));
  sync();
  for (size_t i = 0; i < values.size(); i += width)
    llvm::copy(k.unpack(k.load(first.at(k, knownOfFirst(i)),
                               k.packedType(k.f32Type(), width)),
                        k.f32Type(), width),
               values.begin() + i);
}

void corey::emitHadamardStages(KernelBuilder &k, const HadamardTiling &t,
                               Val thread, Val span, int64_t spans,
                               MutableArrayRef<Val> values) {
  // Registers: elements of a piece, as far as one transform goes, and pieces.
  for (int64_t bit = 0; bit < std::min(t.held, t.bits); ++bit)
    transform(values, int64_t(1) << bit);
  for (int64_t bit = 0; bit < t.shuffled; ++bit) {
    Val sign =
        k.select((thread & (int64_t(1) << bit)) != 0, k.f32(-1), k.f32(1));
    for (Val &value : values)
      value = k.fma(value, sign, k.shuffleXor(value, int64_t(1) << bit));
  }
  if (t.exchanged)
    exchange(k, t, thread, span, spans, values);

  double factor = 1.0 / std::sqrt(static_cast<double>(int64_t(1) << t.bits));
  for (Val &value : values)
    value = value * factor;
}

namespace {
class HadamardKernel {
public:
  HadamardKernel(GPULowering &e, HadamardOp op)
      : e(e), op(op), y(e.allocate(0)),
        size(cast<MemRefType>(y.getType()).getShape().back()),
        t(op.getBlock(),
          std::gcd(e.streamAlignment(op.getX()), e.outputAlignment(y))),
        blockThreads(std::max(int64_t(1) << t.threads, kMinThreads)),
        spansOfBlock(blockThreads >> t.threads) {}

  void emit();

private:
  /// Threads of a block of small transforms.
  static constexpr int64_t kMinThreads = 64;
  /// Whether all threads of a block, and no others, share a span.
  bool fillsBlock() const { return spansOfBlock == 1; }

  GPULowering &e;
  HadamardOp op;
  Value y;
  int64_t size;
  HadamardTiling t;
  int64_t blockThreads, spansOfBlock;
};
} // namespace

void HadamardKernel::emit() {
  int64_t span = t.span();
  int64_t count = int64_t(1) << t.count;
  KernelBuilder k(e.host, e.loc, e.kernels, "hadamard", {blockThreads, 0});
  InputStream x(e, k, op.getX());
  OutputStream output(e, k, y);

  SmallVector<Value> sizes;
  Value total = e.index(size / span);
  for (int64_t axis = 0; axis + 1 < cast<MemRefType>(y.getType()).getRank();
       ++axis) {
    sizes.push_back(e.dim(y, axis));
    total = e.mul(total, sizes.back());
  }
  Val index = k.toI64(k.blockIdx('x'));
  Val thread = k.threadIdx(), spanOfBlock = k.i32(0), active;
  if (!fillsBlock()) {
    // Threads behind the last span work on it again, and write nothing:
    // their warp needs them.
    spanOfBlock = thread >> t.threads;
    thread = thread & ((int64_t(1) << t.threads) - 1);
    index = index * double(spansOfBlock) + k.toI64(spanOfBlock);
    active = index < k.i64Argument(total);
    index = k.min(index, k.i64Argument(total) - 1);
  }
  Val row = index, first = k.i64(0);
  if (span != size) {
    row = index / double(size / span);
    first = (index - row * double(size / span)) * double(span);
  }
  Vals leading = indicesOf(k, row, sizes);
  first = first + k.toI64(thread << t.count);
  auto pieceAt = [&](int64_t i) {
    return first + double(i << t.firstOfPiece());
  };

  // Pieces that are loaded before the first is used; a computed input is loaded
  // as several tensors.
  int64_t ahead = std::max<int64_t>(
      8 / static_cast<int64_t>(std::max<size_t>(x.numLoaded(), 1)), 1);
  ahead = std::max<int64_t>(ahead, 32 >> t.count);
  Vals values;
  for (int64_t i = 0; i < t.pieces(); i += ahead) {
    int64_t end = std::min(i + ahead, t.pieces());
    SmallVector<Vals> loaded;
    for (int64_t j = i; j < end; ++j)
      loaded.push_back(x.load(x.at(leading, pieceAt(j)), count));
    for (const Vals &piece : loaded)
      llvm::append_range(values, x.values(piece, count));
  }

  emitHadamardStages(k, t, thread, spanOfBlock, spansOfBlock, values);
  auto write = [&] {
    for (int64_t i = 0; i < t.pieces(); ++i)
      output.store(output.at(leading, pieceAt(i)),
                   ArrayRef<Val>(values).slice(i * count, count));
  };
  if (active)
    k.ifThen(active, write);
  else
    write();
  k.launch({e.ceilDiv(total, e.index(spansOfBlock)), {}, {}});
  e.replaceWith(y);
}

namespace {
struct HadamardLowering : public GPULoweringPattern<HadamardOp> {
  using GPULoweringPattern::GPULoweringPattern;
  LogicalResult matchAndRewrite(HadamardOp op,
                                PatternRewriter &rewriter) const override {
    if (replaceUnneeded(rewriter, op))
      return success();
    if (static_cast<int64_t>(op.getBlock()) > kMaxBlock)
      return op.emitOpError("expected 'block' to be at most ")
             << kMaxBlock << " on a GPU, got " << op.getBlock();
    GPULowering e(rewriter, op, target);
    HadamardKernel(e, op).emit();
    return success();
  }
};
} // namespace

void corey::populateGPUHadamardLowerings(RewritePatternSet &patterns,
                                         GPUTarget target) {
  patterns.add<HadamardLowering>(patterns.getContext(), target);
}
