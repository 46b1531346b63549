//===- Norm.cpp - GPU kernel of rms_norm ----------------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// The group of elements that is normalised together is held in registers from
// its sum of squares to its result: by some or all lanes of a warp if it is
// short, else by a block. A group that does not fit is read twice by its block,
// the second time most likely from L2.
//
//===----------------------------------------------------------------------===//

#include "GPULowering.h"
#include <numeric>

using namespace mlir;
using namespace corey;
using namespace corey::ssm;

namespace {
/// How threads share a group. Pieces are elements that are loaded at once.
struct NormTiling {
  /// Elements up to which a warp has a group, and up to which registers do.
  static constexpr int64_t kMaxOfWarp = 1024, kMaxOfRegisters = 16384;
  /// Elements that a thread of a block holds.
  static constexpr int64_t kHeld = 16;

  NormTiling(int64_t group, int64_t count)
      : count(count), pieces(group / count) {
    if (group <= kMaxOfWarp) {
      lanes = std::min<int64_t>(llvm::PowerOf2Ceil(pieces), 32);
      threads = 128;
    } else if (group <= kMaxOfRegisters) {
      int64_t wanted = std::max<int64_t>(kHeld / count, 1);
      threads = lanes = llvm::alignTo(llvm::divideCeil(pieces, wanted), 32);
    } else {
      threads = lanes = 1024;
      inRegisters = false;
    }
    perThread = inRegisters ? llvm::divideCeil(pieces, lanes)
                            : std::max<int64_t>(kHeld / 2 / count, 1);
  }
  bool ofBlock() const { return lanes > 32 || !inRegisters; }
  int64_t groupsOfBlock() const { return threads / lanes; }

  int64_t count, pieces;
  /// Threads of a block, and those of them that share a group.
  int64_t threads, lanes;
  /// Pieces of a thread: all of them, or those that it loads at a time.
  int64_t perThread;
  bool inRegisters = true;
};

class RMSNormKernel {
public:
  RMSNormKernel(GPULowering &e, RMSNormOp op)
      : e(e), op(op), y(e.allocate(0)),
        residualOut(op.getResidualOut() ? e.allocate(1) : Value()) {
    size = cast<MemRefType>(y.getType()).getShape().back();
    group = op.getGroupSize() ? static_cast<int64_t>(*op.getGroupSize()) : size;
  }

  void emit();

private:
  /// Elements that are loaded, and written, at once.
  int64_t alignment() {
    int64_t count = std::gcd(group, e.outputAlignment(y));
    for (Value tensor :
         {Value(op.getX()), Value(op.getResidual()), Value(op.getZ())})
      if (tensor)
        count = std::gcd(count, e.streamAlignment(tensor));
    if (residualOut)
      count = std::gcd(count, rowAlignment(op.getResidualOut()));
    return count;
  }

  GPULowering &e;
  RMSNormOp op;
  Value y, residualOut;
  int64_t size, group;
};
} // namespace

void RMSNormKernel::emit() {
  NormTiling t(group, alignment());
  int64_t count = t.count;
  bool gateFirst = op.getZ() && !op.getNormBeforeGate();
  bool gateLast = op.getZ() && op.getNormBeforeGate();

  KernelBuilder k(e.host, e.loc, e.kernels, "rms_norm", {t.threads, 0});
  InputStream x(e, k, op.getX()), residual(e, k, op.getResidual());
  InputStream z(e, k, op.getZ());
  OutputStream output(e, k, y);
  DeviceTensor weight(e, k, e.buffer(op.getWeight()));
  DeviceTensor sums(e, k, residualOut);

  // Groups in the order of rows, and the axes that rows are numbered by.
  SmallVector<Value> sizes;
  Value total = e.index(size / group);
  for (int64_t axis = 0; axis + 1 < cast<MemRefType>(y.getType()).getRank();
       ++axis) {
    sizes.push_back(e.dim(y, axis));
    total = e.mul(total, sizes.back());
  }
  Val lane = t.ofBlock() ? k.threadIdx() : k.threadIdx() & (t.lanes - 1);
  Val index = k.toI64(k.blockIdx('x'));
  Val active;
  if (!t.ofBlock()) {
    // Lanes behind the last group work on it again, and write nothing: their
    // warp needs them.
    index = index * double(t.groupsOfBlock()) +
            k.toI64(k.threadIdx() / double(t.lanes));
    active = index < k.i64Argument(total);
    index = k.min(index, k.i64Argument(total) - 1);
  }
  Val row = index, first = k.i64(0);
  if (group != size) {
    row = index / double(size / group);
    first = (index - row * double(size / group)) * double(group);
  }
  Vals leading = indicesOf(k, row, sizes);

  /// A piece of the group, and whether it is there and the thread's to write;
  /// null if that is known.
  struct Piece {
    Val at, isInside, writes;
  };
  auto pieceAt = [&](Val number, bool mayBeOutside) {
    Piece piece;
    if (mayBeOutside) {
      piece.isInside = number < t.pieces;
      number = k.min(number, k.i32(t.pieces - 1));
    }
    piece.at = first + k.toI64(number) * double(count);
    piece.writes = piece.isInside;
    if (active)
      piece.writes = piece.writes ? piece.writes & active : active;
    return piece;
  };
  auto ifWrites = [&](const Piece &piece, llvm::function_ref<void()> write) {
    if (piece.writes)
      k.ifThen(piece.writes, write);
    else
      write();
  };
  auto load = [&](const InputStream &stream, const Piece &piece) {
    return stream ? stream.load(stream.at(leading, piece.at), count) : Vals();
  };

  /// What a thread has loaded of a piece.
  struct Loaded {
    Vals x, residual, z;
  };
  auto loadPiece = [&](const Piece &piece, bool withGate) {
    return Loaded{load(x, piece), load(residual, piece),
                  withGate ? load(z, piece) : Vals()};
  };
  // What is to be normalised; `writesSums` on the way to its squares.
  auto valuesOf = [&](const Piece &piece, const Loaded &loaded,
                      bool writesSums) {
    Vals values = x.values(loaded.x, count);
    if (residual)
      for (auto [value, added] :
           llvm::zip_equal(values, residual.values(loaded.residual, count)))
        value = value + added;
    if (sums && writesSums)
      ifWrites(piece, [&] {
        k.store(k.pack(values, sums.element), sums.at(leading, piece.at));
      });
    if (gateFirst)
      for (auto [value, gate] :
           llvm::zip_equal(values, z.values(loaded.z, count)))
        value = value * k.silu(gate);
    return values;
  };
  auto addSquares = [&](Val sum, const Piece &piece, ArrayRef<Val> values) {
    Val own = sum;
    for (Val value : values)
      own = k.fma(value, value, own);
    return piece.isInside ? k.select(piece.isInside, own, sum) : own;
  };
  auto weightsOf = [&](const Piece &piece) {
    return weight.elements({}, piece.at, count, rowAlignment(op.getWeight()));
  };
  auto finish = [&](const Piece &piece, Vals values, Val factor,
                    ArrayRef<Val> weights, ArrayRef<Val> gate) {
    for (auto [value, w] : llvm::zip_equal(values, weights))
      value = value * factor * w;
    if (gateLast)
      for (auto [value, g] : llvm::zip_equal(values, z.values(gate, count)))
        value = value * k.silu(g);
    ifWrites(piece,
             [&] { output.store(output.at(leading, piece.at), values); });
  };
  // The sum of all threads of the group, and what it makes of elements.
  auto factorOf = [&](Val sum) {
    if (t.ofBlock()) {
      int64_t warps = t.threads / 32;
      int64_t width = llvm::PowerOf2Ceil(warps);
      Val total = k.warpSum(sum);
      Val memory = k.shared(4 * warps);
      k.ifThen(k.lane() == 0,
               [&] { k.store(total, k.offset(memory, k.warp() * 4)); });
      k.syncBlock();
      Val from = k.lane() & (width - 1);
      Val other = k.load(k.offset(memory, k.min(from, k.i32(warps - 1)) * 4),
                         k.f32Type());
      if (width != warps)
        other = k.select(from < warps, other, k.f32(0));
      sum = k.warpSum(other, width);
    } else {
      sum = k.warpSum(sum, t.lanes);
    }
    Val mean = k.fma(sum, k.f32(1.0 / static_cast<double>(group)),
                     k.f32(op.getEps().convertToFloat()));
    // Without flushing denormals: eps may be zero.
    return k.intrinsic("llvm.nvvm.rsqrt.approx.f", k.f32Type(), {mean});
  };

  Val sum = k.f32(0);
  if (t.inRegisters) {
    SmallVector<Piece> pieces;
    SmallVector<Loaded> loaded;
    SmallVector<Vals> values, weights;
    // Everything is asked for at once; but weights, which come from L2, wait
    // where registers are few.
    bool weightsFirst = t.threads <= 512;
    for (int64_t i = 0; i < t.perThread; ++i) {
      pieces.push_back(
          pieceAt(lane + double(i * t.lanes), (i + 1) * t.lanes > t.pieces));
      loaded.push_back(loadPiece(pieces[i], /*withGate=*/true));
    }
    for (int64_t i = 0; i < t.perThread && weightsFirst; ++i)
      weights.push_back(weightsOf(pieces[i]));
    for (int64_t i = 0; i < t.perThread; ++i) {
      values.push_back(valuesOf(pieces[i], loaded[i], /*writesSums=*/true));
      sum = addSquares(sum, pieces[i], values[i]);
    }
    Val factor = factorOf(sum);
    for (int64_t i = 0; i < t.perThread; ++i)
      finish(pieces[i], values[i], factor,
             weightsFirst ? weights[i] : weightsOf(pieces[i]), loaded[i].z);
  } else {
    int64_t step = t.lanes * t.perThread;
    auto forPieces =
        [&](Val base, bool withGate,
            llvm::function_ref<void(const Piece &, const Loaded &)> use) {
          SmallVector<Piece> pieces;
          SmallVector<Loaded> loaded;
          for (int64_t i = 0; i < t.perThread; ++i) {
            pieces.push_back(pieceAt(base + lane + double(i * t.lanes), true));
            loaded.push_back(loadPiece(pieces[i], withGate));
          }
          for (auto [piece, values] : llvm::zip_equal(pieces, loaded))
            use(piece, values);
        };
    sum = k.forLoop(
        k.i32(0), k.i32(t.pieces), step, {sum},
        [&](Val base, ArrayRef<Val> in) -> Vals {
          Val sum = in[0];
          forPieces(
              base, gateFirst, [&](const Piece &piece, const Loaded &loaded) {
                sum = addSquares(sum, piece,
                                 valuesOf(piece, loaded, /*writesSums=*/true));
              });
          return {sum};
        })[0];
    Val factor = factorOf(sum);
    k.forLoop(k.i32(0), k.i32(t.pieces), step, [&](Val base) {
      forPieces(base, /*withGate=*/true,
                [&](const Piece &piece, const Loaded &loaded) {
                  finish(piece, valuesOf(piece, loaded, /*writesSums=*/false),
                         factor, weightsOf(piece), loaded.z);
                });
    });
  }
  k.launch({e.ceilDiv(total, e.index(t.groupsOfBlock())), {}, {}});
  SmallVector<Value> results{y};
  if (residualOut)
    results.push_back(residualOut);
  e.replaceWith(results);
}

namespace {
struct RMSNormLowering : public GPULoweringPattern<RMSNormOp> {
  using GPULoweringPattern::GPULoweringPattern;
  LogicalResult matchAndRewrite(RMSNormOp op,
                                PatternRewriter &rewriter) const override {
    GPULowering e(rewriter, op, target);
    RMSNormKernel(e, op).emit();
    return success();
  }
};
} // namespace

void corey::populateGPUNormLowerings(RewritePatternSet &patterns,
                                     GPUTarget target) {
  patterns.add<RMSNormLowering>(patterns.getContext(), target);
}
