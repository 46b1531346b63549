//===- Hadamard.cpp - GPU kernel of hadamard ------------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// A transform of n = 2^m elements is m stages of butterflies, one for each bit
// of an element's number, in any order. A stage takes place within a thread
// where the bit tells its registers apart, by a shuffle where it tells lanes
// apart. Threads load and store pieces of consecutive elements; in that layout
// the bits of an element's number are, from low to high,
//
//   within a piece | number of the thread | number of the piece
//
// A shuffle moves as many bytes as a load from shared memory. Up to four bits
// of the thread's number are done by shuffles. Of more, as many as registers
// can tell apart are done in a second layout, in which each thread has the
// elements that differ in these bits; the way there and back is through shared
// memory. Only bits beyond those are shuffled.
//
//===----------------------------------------------------------------------===//

#include "GPULowering.h"
#include <cmath>
#include <numeric>

using namespace mlir;
using namespace corey;
using namespace corey::ssm;

/// The largest transform: its elements fill half of the shared memory that a
/// block can have.
static constexpr int64_t kMaxBlock = 32768;

namespace {
/// How threads share a transform. All numbers are powers of two, by logarithm.
struct HadamardTiling {
  /// Elements of a thread at most.
  static constexpr int64_t kMaxHeld = 6;
  /// Bits of a thread's number that shuffles do where registers are few.
  static constexpr int64_t kMaxShuffled = 4;

  HadamardTiling(int64_t block, int64_t count)
      : bits(llvm::Log2_64(block)), count(llvm::Log2_64(count)) {
    // A piece can hold several transforms. Else eight threads share one, more
    // if their pieces are too narrow to fill a cache line, or are too many.
    int64_t shared = this->count >= 2 ? 3 : 5;
    held = std::min(std::max(this->count, bits - shared), kMaxHeld);
    threads = std::max<int64_t>(bits - held, 0);
    exchanged = threads > kMaxShuffled && held == kMaxHeld
                    ? std::min(threads, held)
                    : 0;
    shuffled = threads - exchanged;
    blockThreads = std::max<int64_t>(int64_t(1) << threads, kMinThreads);
    // The second layout: its registers tell the lowest bits apart as far as
    // there are more of them than bits to be done.
    SmallVector<int64_t> rest;
    for (int64_t bit = 0; bit < bits; ++bit)
      if (bit < firstExchanged() || bit >= firstExchanged() + exchanged)
        rest.push_back(bit);
    int64_t spare = held - exchanged;
    if (!exchanged)
      return;
    registerBits.assign(rest.begin(), rest.begin() + spare);
    for (int64_t i = 0; i < exchanged; ++i)
      registerBits.push_back(firstExchanged() + i);
    threadBits.assign(rest.begin() + spare, rest.end());
  }

  int64_t pieces() const { return int64_t(1) << (held - count); }
  int64_t firstExchanged() const { return count + shuffled; }
  /// Whether all threads of a block, and no others, share a transform.
  bool fillsBlock() const { return (int64_t(1) << threads) == blockThreads; }
  int64_t transformsOfBlock() const { return blockThreads >> threads; }
  /// The lowest bit of the number of a piece.
  int64_t firstOfPiece() const { return bits - (held - count); }
  /// Words between what two pieces of a thread hold, beyond the elements: lanes
  /// that differ in the number of a piece in the second layout, after those
  /// that differ in the lowest bits, fall into other banks.
  int64_t padding() const {
    return firstExchanged() < 5 ? int64_t(1) << firstExchanged() : 0;
  }
  int64_t sharedWords() const {
    return exchanged ? (int64_t(1) << bits) + pieces() * padding() : 0;
  }
  /// Of the elements of an 8-element piece, the two halves are swapped in every
  /// other group of four pieces: eight lanes that write halves at once cover
  /// all banks.
  bool swapsHalves() const { return count == 3; }

  /// Threads of a block of small transforms.
  static constexpr int64_t kMinThreads = 64;

  /// Bits of an element's number, elements of a piece and of a thread, threads
  /// of a transform.
  int64_t bits, count, held, threads;
  /// Bits of a thread's number: the lowest, and those above.
  int64_t shuffled, exchanged;
  /// What registers and threads tell apart in the second layout.
  SmallVector<int64_t> registerBits, threadBits;
  /// Not a logarithm.
  int64_t blockThreads;
};

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

class HadamardKernel {
public:
  HadamardKernel(GPULowering &e, HadamardOp op)
      : e(e), op(op), y(e.allocate(0)),
        size(cast<MemRefType>(y.getType()).getShape().back()),
        t(op.getBlock(),
          std::gcd(e.streamAlignment(op.getX()), e.outputAlignment(y))) {}

  void emit();

private:
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
  void exchange(KernelBuilder &k, Val transformOfBlock, Val thread,
                MutableArrayRef<Val> values) const;

  GPULowering &e;
  HadamardOp op;
  Value y;
  int64_t size;
  HadamardTiling t;
};
} // namespace

/// Does the stages of the exchanged bits.
void HadamardKernel::exchange(KernelBuilder &k, Val transformOfBlock,
                              Val thread, MutableArrayRef<Val> values) const {
  auto sync = [&] {
    if (t.threads > 5)
      k.syncBlock();
    else
      k.syncWarp();
  };
  int64_t transformBytes = 4 * t.sharedWords();
  Val memory = k.shared(transformBytes * t.transformsOfBlock());
  if (t.transformsOfBlock() > 1)
    memory = k.offset(memory, transformOfBlock * double(transformBytes));

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

void HadamardKernel::emit() {
  int64_t block = op.getBlock();
  // A piece may hold several transforms: then it is what a thread has.
  int64_t span = std::max(block, int64_t(1) << t.count);
  int64_t count = int64_t(1) << t.count;
  KernelBuilder k(e.host, e.loc, e.kernels, "hadamard", {t.blockThreads, 0});
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
  Val thread = k.threadIdx(), transformOfBlock = k.i32(0), active;
  if (!t.fillsBlock()) {
    // Threads behind the last transform work on it again, and write nothing:
    // their warp needs them.
    transformOfBlock = thread >> t.threads;
    thread = thread & ((int64_t(1) << t.threads) - 1);
    index = index * double(t.transformsOfBlock()) + k.toI64(transformOfBlock);
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
    exchange(k, transformOfBlock, thread, values);

  double factor = 1.0 / std::sqrt(static_cast<double>(block));
  for (Val &value : values)
    value = value * factor;
  auto write = [&] {
    for (int64_t i = 0; i < t.pieces(); ++i)
      output.store(output.at(leading, pieceAt(i)),
                   ArrayRef<Val>(values).slice(i * count, count));
  };
  if (active)
    k.ifThen(active, write);
  else
    write();
  k.launch({e.ceilDiv(total, e.index(t.transformsOfBlock())), {}, {}});
  e.replaceWith(y);
}

namespace {
struct HadamardLowering : public GPULoweringPattern<HadamardOp> {
  using GPULoweringPattern::GPULoweringPattern;
  LogicalResult matchAndRewrite(HadamardOp op,
                                PatternRewriter &rewriter) const override {
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
