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
// With a rotation behind the norm the same registers hold the elements of a
// group in the layout of the transform (see HadamardStages.h), to which the sum
// of squares is indifferent.
//
//===----------------------------------------------------------------------===//

#include "GPULowering.h"
#include "HadamardStages.h"
#include <numeric>

using namespace mlir;
using namespace corey;
using namespace corey::ssm;

namespace {
/// How threads share a group. Pieces are elements that are loaded at once. A
/// run is what a transform spans, of which each of its threads has some pieces;
/// without a rotation it is a piece.
struct NormTiling {
  /// Elements up to which a warp has a group, and up to which registers do.
  static constexpr int64_t kMaxOfWarp = 1024, kMaxOfRegisters = 16384;
  /// Elements that a thread of a block holds.
  static constexpr int64_t kHeld = 16;
  /// Threads of a block at most that rotates: a thread has more elements than
  /// that if it must, and registers for them.
  static constexpr int64_t kMaxRotating = 512;

  NormTiling(int64_t group, int64_t count,
             const std::optional<HadamardTiling> &rotation)
      : count(count) {
    if (rotation) {
      threadsOfRun = int64_t(1) << rotation->threads;
      piecesOfRun = rotation->pieces();
    }
    int64_t ofThread = piecesOfRun * count;
    runs = group / (threadsOfRun * ofThread);
    if (group <= kMaxOfWarp) {
      lanes = std::min<int64_t>(llvm::PowerOf2Ceil(runs * threadsOfRun), 32);
    } else if (rotation || group <= kMaxOfRegisters) {
      int64_t wanted = std::max<int64_t>(kHeld / ofThread, 1);
      auto lanesFor = [&](int64_t runsOfThread) {
        return llvm::alignTo(
            llvm::divideCeil(runs, runsOfThread) * threadsOfRun, 32);
      };
      while (rotation && lanesFor(wanted) > kMaxRotating)
        wanted *= 2;
      lanes = lanesFor(wanted);
    } else {
      lanes = 1024;
      inRegisters = false;
    }
    threads = lanes > 32 ? lanes : 128;
    runsOfThread = inRegisters ? llvm::divideCeil(runs, runsAtOnce())
                               : std::max<int64_t>(kHeld / 2 / count, 1);
  }
  bool ofBlock() const { return lanes > 32; }
  int64_t groupsOfBlock() const { return threads / lanes; }
  int64_t runsAtOnce() const { return lanes / threadsOfRun; }
  int64_t elementsOfRun() const { return threadsOfRun * piecesOfRun * count; }
  int64_t elementsOfThread() const {
    return runsOfThread * piecesOfRun * count;
  }

  int64_t count;
  int64_t threadsOfRun = 1, piecesOfRun = 1, runs;
  /// Threads of a block, and those of them that share a group.
  int64_t threads, lanes;
  /// Runs that a thread has a part of: of all, or of those that are loaded at a
  /// time.
  int64_t runsOfThread;
  bool inRegisters = true;
};

class RMSNormKernel {
public:
  RMSNormKernel(GPULowering &e, RMSNormOp op)
      : y(e.allocate(0)),
        residualOut(op.getResidualOut() ? e.allocate(1) : Value()), e(e),
        op(op) {
    size = cast<MemRefType>(y.getType()).getShape().back();
    group = op.getGroupSize() ? static_cast<int64_t>(*op.getGroupSize()) : size;
  }

  void emit();

  /// What it writes; null where there is no further result.
  const Value y, residualOut;

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
    if (e.rotation())
      count = std::gcd(count, e.streamAlignment(e.rotation().getX()));
    return count;
  }

  GPULowering &e;
  RMSNormOp op;
  int64_t size, group;
};
} // namespace

void RMSNormKernel::emit() {
  int64_t count = alignment();
  std::optional<HadamardTiling> rotation;
  if (e.rotation())
    rotation.emplace(e.rotation().getBlock(), count);
  NormTiling t(group, count, rotation);
  bool gateFirst = op.getZ() && !op.getNormBeforeGate();
  bool gateLast = op.getZ() && op.getNormBeforeGate();

  KernelBuilder k(e.host, e.loc, e.kernels,
                  rotation ? "rms_norm_hadamard" : "rms_norm", {t.threads, 0});
  InputStream x(e, k, op.getX()), residual(e, k, op.getResidual());
  InputStream z(e, k, op.getZ());
  InputStream rotated;
  if (rotation)
    rotated = InputStream(e, k, e.rotation().getX());
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

  // The thread's number among those of a run, and the first run that it has.
  Val threadOfRun, firstRun = lane;
  if (rotation) {
    threadOfRun = lane & (t.threadsOfRun - 1);
    firstRun = lane >> rotation->threads;
    first = first + k.toI64(threadOfRun << rotation->count);
  }

  /// A piece of the group, and whether it is there and the thread's to write;
  /// null if that is known.
  struct Piece {
    Val at, isInside, writes;
  };
  using Pieces = SmallVector<Piece>;
  // The pieces that the thread has of a run.
  auto piecesOf = [&](Val run, bool mayBeOutside) {
    Piece piece;
    if (mayBeOutside) {
      piece.isInside = run < t.runs;
      run = k.min(run, k.i32(t.runs - 1));
    }
    piece.writes = piece.isInside;
    if (active)
      piece.writes = piece.writes ? piece.writes & active : active;
    Val begin = first + k.toI64(run) * double(t.elementsOfRun());
    Pieces pieces(t.piecesOfRun, piece);
    for (auto [i, each] : llvm::enumerate(pieces))
      each.at =
          i ? begin + double(int64_t(i) << rotation->firstOfPiece()) : begin;
    return pieces;
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
  auto normalised = [&](Vals values, Val factor, ArrayRef<Val> weights,
                        ArrayRef<Val> gate) {
    for (auto [value, w] : llvm::zip_equal(values, weights))
      value = value * factor * w;
    if (gateLast)
      for (auto [value, g] : llvm::zip_equal(values, z.values(gate, count)))
        value = value * k.silu(g);
    return values;
  };
  auto write = [&](const Piece &piece, ArrayRef<Val> values) {
    output.store(output.at(leading, piece.at), values);
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
    Pieces pieces;
    for (int64_t i = 0; i < t.runsOfThread; ++i)
      pieces.append(piecesOf(firstRun + double(i * t.runsAtOnce()),
                             (i + 1) * t.runsAtOnce() > t.runs));
    SmallVector<Loaded> loaded;
    SmallVector<Vals> values, weights;
    // Everything is asked for at once. Where registers are few, because there
    // are many threads or because a transform wants many elements of a thread,
    // weights, which come from L2, wait until the norm is known; in the latter
    // case what is asked for before is limited, and the gate waits as well.
    bool holdsMuch = rotation && t.elementsOfThread() > NormTiling::kHeld;
    bool weightsFirst = t.threads <= 512 && !holdsMuch;
    bool gateEarly = gateFirst || !holdsMuch;
    size_t ahead = pieces.size();
    if (holdsMuch)
      ahead = std::max<size_t>(
          32 / (count * std::max<size_t>(x.numLoaded() + residual.numLoaded() +
                                             (gateFirst ? z.numLoaded() : 0),
                                         1)),
          1);
    for (size_t begin = 0; begin < pieces.size(); begin += ahead) {
      size_t end = std::min(begin + ahead, pieces.size());
      for (size_t i = begin; i < end; ++i)
        loaded.push_back(loadPiece(pieces[i], gateEarly));
      for (size_t i = begin; i < end && weightsFirst; ++i)
        weights.push_back(weightsOf(pieces[i]));
      for (size_t i = begin; i < end; ++i) {
        values.push_back(valuesOf(pieces[i], loaded[i], /*writesSums=*/true));
        sum = addSquares(sum, pieces[i], values[i]);
      }
    }
    Val factor = factorOf(sum);
    auto normalisedAt = [&](size_t i) {
      return normalised(values[i], factor,
                        weightsFirst ? weights[i] : weightsOf(pieces[i]),
                        gateEarly ? loaded[i].z : load(z, pieces[i]));
    };
    for (size_t begin = 0; begin < pieces.size(); begin += t.piecesOfRun) {
      if (!rotation) {
        Vals made = normalisedAt(begin);
        ifWrites(pieces[begin], [&] { write(pieces[begin], made); });
        continue;
      }
      Vals made;
      for (int64_t i = 0; i < t.piecesOfRun; ++i) {
        const Piece &piece = pieces[begin + i];
        llvm::append_range(made,
                           rotated.values(load(rotated, piece), count,
                                          op.getY(), normalisedAt(begin + i)));
      }
      emitHadamardStages(k, *rotation, threadOfRun,
                         k.threadIdx() >> rotation->threads,
                         t.threads / t.threadsOfRun, made);
      ifWrites(pieces[begin], [&] {
        for (int64_t i = 0; i < t.piecesOfRun; ++i)
          write(pieces[begin + i], ArrayRef<Val>(made).slice(i * count, count));
      });
    }
  } else {
    int64_t step = t.lanes * t.runsOfThread;
    auto forPieces =
        [&](Val base, bool withGate,
            llvm::function_ref<void(const Piece &, const Loaded &)> use) {
          Pieces pieces;
          SmallVector<Loaded> loaded;
          for (int64_t i = 0; i < t.runsOfThread; ++i) {
            pieces.append(piecesOf(base + lane + double(i * t.lanes), true));
            loaded.push_back(loadPiece(pieces[i], withGate));
          }
          for (auto [piece, values] : llvm::zip_equal(pieces, loaded))
            use(piece, values);
        };
    sum = k.forLoop(
        k.i32(0), k.i32(t.runs), step, {sum},
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
    k.forLoop(k.i32(0), k.i32(t.runs), step, [&](Val base) {
      forPieces(base, /*withGate=*/true,
                [&](const Piece &piece, const Loaded &loaded) {
                  Vals made =
                      normalised(valuesOf(piece, loaded, /*writesSums=*/false),
                                 factor, weightsOf(piece), loaded.z);
                  ifWrites(piece, [&] { write(piece, made); });
                });
    });
  }
  k.launch({e.ceilDiv(total, e.index(t.groupsOfBlock())), {}, {}});
}

std::pair<Value, Value> corey::emitRMSNorm(GPULowering &e, RMSNormOp op) {
  RMSNormKernel kernel(e, op);
  kernel.emit();
  return {kernel.y, kernel.residualOut};
}

namespace {
struct RMSNormLowering : public GPULoweringPattern<RMSNormOp> {
  using GPULoweringPattern::GPULoweringPattern;
  LogicalResult matchAndRewrite(RMSNormOp op,
                                PatternRewriter &rewriter) const override {
    // What a projection behind it has made for itself.
    if (replaceUnneeded(rewriter, op))
      return success();
    if (isa_and_nonnull<FusedOp>(op->getParentOp())) {
      FailureOr<FusionPlan> plan = planFusedRegion(op->getParentOp());
      if (succeeded(plan) && plan->prologue() == op)
        return failure();
    }
    GPULowering e(rewriter, op, target);
    auto [y, residualOut] = emitRMSNorm(e, op);
    SmallVector<Value> results{y};
    if (residualOut)
      results.push_back(residualOut);
    e.replaceWith(results);
    return success();
  }
};
} // namespace

void corey::populateGPUNormLowerings(RewritePatternSet &patterns,
                                     GPUTarget target) {
  patterns.add<RMSNormLowering>(patterns.getContext(), target);
}
