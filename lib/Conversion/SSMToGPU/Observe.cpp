//===- Observe.cpp - Kernels that count what an observed tensor holds -----===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// What is to be counted is known when the program runs (scheduler::CountPlan):
// which elements, and in which bins. The run-time library puts it into a
// corey_rt_observation, whose fields become arguments of two kernels: one for
// moments and the range, which the other needs for the bins and outliers. Of
// tokens, which have a range and a histogram each, the first makes those too.
//
//===----------------------------------------------------------------------===//

#include "../Common/SchedulerOps.h"
#include "GPULowering.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include <limits>

using namespace mlir;
using namespace corey;
using namespace corey::ssm;

/// Threads of a block, and blocks whose registers a multiprocessor could hold:
/// what the largest kernels of a scan leave over is enough for one, so that the
/// scan that follows an observation need not wait for it.
static constexpr int64_t kThreads = 128, kMinBlocks = 6;
/// Most bins of a histogram in shared memory.
static constexpr int64_t kSharedBins = 4096;
static constexpr double kInfinity = std::numeric_limits<double>::infinity();

namespace {
/// Words of corey_rt_observation.
enum Field : int64_t {
  Blocks,
  Records,
  Counted,
  Tokens,
  RuleOfBins,
  Bins,
  Low,
  Width,
  Rows,
  Columns,
  ColumnStride,
  IsAligned,
  Sizes,
  Strides = Sizes + 8,
  NumFields = Strides + 8
};
/// scheduler::CountPlan::Rule.
enum Rule : int64_t { None, MinMax, PaddedMinMax, GivenF32, GivenF64 };
/// Words of corey_rt_observed; the first, up to the pivot, are also those of a
/// block's record.
enum Word : int64_t {
  FirstSum = 6,
  Pivot = 11,
  RecordWords = 12,
  Below = 12,
  Above,
  Outliers,
  TokenCount,
  TokensDropped,
  SummaryWords = 18
};

Val toF32(Val a) {
  return a.k->wrap(
      arith::TruncFOp::create(a.k->b, a.k->loc, a.k->f32Type(), a.value));
}
/// An integer as f32 or f64.
Val toFloat(Val a, Type type) {
  return a.k->wrap(arith::SIToFPOp::create(a.k->b, a.k->loc, type, a.value));
}
Val truncated(Val a) {
  return a.k->wrap(
      arith::FPToSIOp::create(a.k->b, a.k->loc, a.k->i32Type(), a.value));
}
/// One if a condition holds.
Val ones(Val condition) {
  return condition.k->select(condition, condition.k->i32(1),
                             condition.k->i32(0));
}

/// Elements that a thread looks at together.
struct Piece {
  Vals x;
  /// Whether there is such an element.
  Vals inside;
  /// Whether it is finite, too.
  Vals isFinite;
};

/// The tensor as one of the kernels sees it.
class Observed {
public:
  Observed(KernelBuilder &k, Type element, Value address,
           ArrayRef<Value> fields, int64_t rank)
      : k(k), element(element), bytes(element.getIntOrFloatBitWidth() / 8),
        width(16 / bytes), base(k.pointer(address)),
        columns(k.i64Argument(fields[Columns])),
        columnStride(k.i64Argument(fields[ColumnStride])),
        rows(k.i64Argument(fields[Rows])),
        isAligned(k.i64Argument(fields[IsAligned]) != 0),
        sizes(fields.slice(Sizes, rank)) {
    for (int64_t axis = 0; axis < rank; ++axis)
      strides.push_back(k.i64Argument(fields[Strides + axis]));
    pieces = (columns + double(width - 1)) / double(width);
  }

  Val rowPointer(Val row) {
    Val pointer = base;
    for (auto [index, stride] :
         llvm::zip_equal(indicesOf(k, row, sizes), strides))
      pointer = k.offset(pointer, index * stride);
    return pointer;
  }
  Piece load(Val rowPointer, Val number) {
    Val first = number * double(width), left = columns - first;
    Val pointer = k.offset(rowPointer, first * columnStride);
    Piece piece;
    piece.x = k.ifValues(
        isAligned & (left >= double(width)),
        [&] {
          return k.unpack(k.load(pointer, k.packedType(element, width), true),
                          element, width);
        },
        [&] {
          Vals x;
          for (int64_t i = 0; i < width; ++i)
            x.push_back(loadOne(
                k.offset(pointer, k.min(k.i64(i), left - 1.0) * columnStride)));
          return x;
        });
    for (auto [i, x] : llvm::enumerate(piece.x)) {
      piece.inside.push_back(left > double(i));
      piece.isFinite.push_back(piece.inside.back() & (k.abs(x) < kInfinity));
    }
    return piece;
  }
  /// The mean of the first elements of the first row: all blocks find the
  /// same.
  Val findPivot() {
    Val at = k.min(k.toI64(k.threadIdx()), columns - 1.0);
    Val x = loadOne(k.offset(base, at * columnStride));
    Val isFinite = k.abs(x) < kInfinity;
    Vals sum = k.reduceBlock(
        {k.select(isFinite, k.toF64(x), k.f64(0)), ones(isFinite)}, add);
    return k.select(sum[1] > 0,
                    sum[0] / toFloat(k.max(sum[1], k.i32(1)), k.f64Type()),
                    k.f64(0));
  }
  static Vals add(ArrayRef<Val> a, ArrayRef<Val> b) {
    Vals sums;
    for (auto [x, y] : llvm::zip_equal(a, b))
      sums.push_back(x + y);
    return sums;
  }

  KernelBuilder &k;
  Type element;
  int64_t bytes, width;
  Val base, columns, columnStride, rows, isAligned, pieces;

private:
  Val loadOne(Val pointer) {
    return k.unpack(k.load(pointer, k.packedType(element, 1), true), element,
                    1)[0];
  }
  ArrayRef<Value> sizes;
  Vals strides;
};

/// What every thread sums up: how many elements are finite, NaN, infinite and
/// negative infinite, the range, powers of x - pivot, and |x|.
struct Moments {
  static Vals none(KernelBuilder &k) {
    Vals values(4, k.i32(0));
    values.push_back(k.f32(kInfinity));
    values.push_back(k.f32(-kInfinity));
    values.append(5, k.f64(0));
    return values;
  }
  static Vals add(KernelBuilder &k, ArrayRef<Val> so, const Piece &piece,
                  Val pivot) {
    Vals sums(so);
    Val anyOther = k.boolean(false);
    for (auto [x, inside, isFinite] :
         llvm::zip_equal(piece.x, piece.inside, piece.isFinite)) {
      anyOther = anyOther | (inside ^ isFinite);
      sums[0] = sums[0] + ones(isFinite);
      sums[4] = k.min(sums[4], k.select(isFinite, x, k.f32(kInfinity)));
      sums[5] = k.max(sums[5], k.select(isFinite, x, k.f32(-kInfinity)));
      Val wide = k.select(isFinite, k.toF64(x), pivot);
      Val power = wide - pivot;
      for (int64_t i = FirstSum; i < FirstSum + 4; ++i) {
        sums[i] = sums[i] + power;
        if (i < FirstSum + 3)
          power = power * (wide - pivot);
      }
      sums[10] = sums[10] + k.select(isFinite, k.abs(wide), k.f64(0));
    }
    Vals others = k.ifValues(
        anyOther,
        [&] {
          Vals counts{sums[1], sums[2], sums[3]};
          for (auto [x, inside] : llvm::zip_equal(piece.x, piece.inside)) {
            Val is[] = {x != x, x == kInfinity, x == -kInfinity};
            for (auto [count, condition] : llvm::zip_equal(counts, is))
              count = count + ones(inside & condition);
          }
          return counts;
        },
        [&] {
          return Vals{sums[1], sums[2], sums[3]};
        });
    std::copy(others.begin(), others.end(), sums.begin() + 1);
    return sums;
  }
  static Vals combine(KernelBuilder &k, ArrayRef<Val> a, ArrayRef<Val> b) {
    Vals sums = Observed::add(a, b);
    sums[4] = k.min(a[4], b[4]);
    sums[5] = k.max(a[5], b[5]);
    return sums;
  }
  /// Writes the block's record, which the thread that writes has all of.
  static void store(KernelBuilder &k, ArrayRef<Val> sums, Val pivot,
                    Val record) {
    for (auto [i, value] : llvm::enumerate(sums)) {
      Val wide = value.isFloat() ? k.toF64(value) : k.toI64(value);
      k.store(wide, k.offset(record, 8 * static_cast<int64_t>(i)));
    }
    k.store(pivot, k.offset(record, 8 * Pivot));
  }
};

/// Bins of a histogram: see scheduler::CountPlan.
struct Binning {
  /// Whether indices are computed in f32.
  Val inF32;
  Val low32, width32;
  Val low, width;
  /// Whether f64's are corrected by the edges.
  Val byEdges;
  /// i32.
  Val bins;

  struct Place {
    Vals index, isBelow, isAbove;
  };
  Place of(KernelBuilder &k, const Piece &piece) const {
    size_t n = piece.x.size();
    Vals all = k.ifValues(
        inF32, [&] { return places(k, piece, low32, width32, false); },
        [&] { return places(k, piece, low, width, true); });
    ArrayRef<Val> list(all);
    return {Vals(list.take_front(n)), Vals(list.slice(n, n)),
            Vals(list.take_back(n))};
  }

private:
  Vals places(KernelBuilder &k, const Piece &piece, Val low, Val width,
              bool isWide) const {
    Type type = low.type();
    Val scale = toFloat(bins, type), last = toFloat(bins - 1.0, type);
    Val step = width / scale;
    Vals index, below, above;
    for (auto [narrow, isFinite] : llvm::zip_equal(piece.x, piece.isFinite)) {
      Val x = k.select(isFinite, isWide ? k.toF64(narrow) : narrow, low);
      Val t = exactSub(x, low) / width;
      below.push_back(isFinite & (t < 0));
      above.push_back(isFinite & (t > 1));
      Val at = exactMul(t, scale);
      Val i = truncated(k.min(k.max(at, k.constantLike(at, 0)), last));
      if (isWide) {
        auto edge = [&](Val i) {
          return exactAdd(exactMul(toFloat(i, type), step), low);
        };
        Val isLess = (i > 0) & (x < edge(i));
        Val isMore = (i < bins - 1.0) & (x >= edge(i + 1.0));
        Val moved = k.select(isLess, i - 1.0, k.select(isMore, i + 1.0, i));
        i = k.select(byEdges, moved, i);
      }
      index.push_back(i);
    }
    Vals all = index;
    all.append(below);
    all.append(above);
    return all;
  }
};

/// Calls body(first, second) for the threads' numbers below `count`, i64, of
/// the whole grid, one after another.
Vals forGrid(KernelBuilder &k, Val count, ArrayRef<Val> inits,
             llvm::function_ref<Vals(Val number, ArrayRef<Val>)> body) {
  Val first =
      k.toI64(k.blockIdx('x')) * double(kThreads) + k.toI64(k.threadIdx());
  Val step = k.toI64(k.gridDim('x')) * double(kThreads);
  Val rounds = (count - first + step - 1.0) / step;
  return k.forLoop(k.i64(0), rounds, 1, inits, [&](Val i, ArrayRef<Val> so) {
    return body(first + i * step, so);
  });
}

class ObserveKernels {
public:
  ObserveKernels(GPULowering &e, Type element, int64_t rank, Value address,
                 ArrayRef<Value> fields)
      : e(e), element(element), rank(rank), address(address), fields(fields) {}

  /// Moments of every block.
  void emitMoments();
  /// The same, and histograms of tokens.
  void emitTokens();
  /// Histogram and outliers of the tensor, and the sum of the records.
  void emitHistogram();

private:
  Grid grid() const {
    return {arith::IndexCastOp::create(e.host, e.loc, e.host.getIndexType(),
                                       fields[Blocks]),
            {},
            {}};
  }
  Val recordOfBlock(KernelBuilder &k) {
    return k.offset(k.pointer(fields[Records]),
                    k.toI64(k.blockIdx('x')) * double(8 * RecordWords));
  }
  /// Clears counters in shared memory, for `count` bins.
  static void clear(KernelBuilder &k, Val counters, Val count) {
    k.forLoop(k.threadIdx(), count, kThreads,
              [&](Val bin) { k.store(k.i32(0), k.offset(counters, bin * 4)); });
    k.syncBlock();
  }
  static void countInto(KernelBuilder &k, const Piece &piece,
                        const Binning::Place &place,
                        llvm::function_ref<void(Val bin)> count) {
    for (auto [bin, isFinite] : llvm::zip_equal(place.index, piece.isFinite))
      k.ifThen(isFinite, [&, bin = bin] { count(bin); });
  }

  GPULowering &e;
  Type element;
  int64_t rank;
  Value address;
  ArrayRef<Value> fields;
};

void ObserveKernels::emitMoments() {
  KernelBuilder k(e.host, e.loc, e.kernels, "observe_moments",
                  {kThreads, kMinBlocks});
  Observed x(k, element, address, fields, rank);
  Val pivot = x.findPivot();
  Vals sums = forGrid(k, x.rows * x.pieces, Moments::none(k),
                      [&](Val number, ArrayRef<Val> so) {
                        Val row = number / x.pieces;
                        Piece piece =
                            x.load(x.rowPointer(row), number - row * x.pieces);
                        return Moments::add(k, so, piece, pivot);
                      });
  sums = k.reduceBlock(sums, [&](ArrayRef<Val> a, ArrayRef<Val> b) {
    return Moments::combine(k, a, b);
  });
  Val record = recordOfBlock(k);
  k.ifThen(k.threadIdx() == 0, [&] { Moments::store(k, sums, pivot, record); });
  k.launch(grid());
}

void ObserveKernels::emitTokens() {
  KernelBuilder k(e.host, e.loc, e.kernels, "observe_tokens", {kThreads, 0});
  Observed x(k, element, address, fields, rank);
  Val counted = k.pointer(fields[Counted]), record = recordOfBlock(k);
  Val bins = k.toI32(k.i64Argument(fields[Bins]));
  Val counters = k.shared(4 * kSharedBins);
  Val pivot = x.findPivot();
  Val pieces = k.toI32(x.pieces), columns = k.toI32(x.columns);
  auto forPieces = [&](ArrayRef<Val> inits,
                       llvm::function_ref<Vals(Val, ArrayRef<Val>)> body) {
    return k.forLoop(k.threadIdx(), pieces, kThreads, inits, body);
  };
  // A token to each block, in turn. Its count and range are of all threads,
  // everything else is the thread's own until the end.
  Val blocks = k.toI64(k.gridDim('x')), block = k.toI64(k.blockIdx('x'));
  Val rounds = (x.rows - block + blocks - 1.0) / blocks;
  Vals inits = Moments::none(k);
  inits.append({k.i32(0), k.i32(0)});
  Vals sums = k.forLoop(
      k.i64(0), rounds, 1, inits, [&](Val round, ArrayRef<Val> so) -> Vals {
        Val row = x.rowPointer(block + round * blocks);
        Vals own = Moments::none(k);
        std::copy(so.begin() + 1, so.begin() + 4, own.begin() + 1);
        std::copy(so.begin() + FirstSum, so.begin() + Pivot,
                  own.begin() + FirstSum);
        own = forPieces(own, [&](Val i, ArrayRef<Val> in) {
          return Moments::add(k, in, x.load(row, k.toI64(i)), pivot);
        });
        Vals token = k.reduceBlock(
            {own[0], own[4], own[5]},
            [&](ArrayRef<Val> a, ArrayRef<Val> b) -> Vals {
              return {a[0] + b[0], k.min(a[1], b[1]), k.max(a[2], b[2])};
            });
        Val spread = token[2] - token[1], width = spread + 1e-8;
        // Of a token with others than finite elements the counts alone do not
        // say an entropy.
        Val isSpread = spread >= 1e-8, isSame = spread < 1e-8;
        Val isBinned = isSpread & (token[0] == columns);
        Binning binning;
        binning.inF32 = width < kInfinity;
        binning.low32 = token[1];
        binning.width32 = width;
        binning.low = k.toF64(token[1]);
        binning.width =
            exactAdd(exactSub(k.toF64(token[2]), binning.low), k.f64(1e-8));
        binning.byEdges = k.boolean(false);
        binning.bins = bins;
        clear(k, counters, bins);
        k.ifThen(isBinned, [&] {
          forPieces({}, [&](Val i, ArrayRef<Val>) -> Vals {
            Piece piece = x.load(row, k.toI64(i));
            countInto(k, piece, binning.of(k, piece), [&](Val bin) {
              k.atomicAdd(k.i32(1), k.offset(counters, bin * 4));
            });
            return {};
          });
          k.syncBlock();
          k.forLoop(k.threadIdx(), bins, kThreads, [&](Val bin) {
            Val count = k.load(k.offset(counters, bin * 4), k.i32Type());
            k.ifThen(count > 0, [&] {
              k.atomicAdd(k.i64(1),
                          k.offset(counted, k.toI64(count) * 8 +
                                                double(8 * SummaryWords)));
            });
          });
        });
        own[0] = so[0] + own[0];
        own[4] = k.min(so[4], own[4]);
        own[5] = k.max(so[5], own[5]);
        own.push_back(so[11] + ones(isBinned));
        own.push_back(so[12] + ones((token[0] > 0) & isSame));
        return own;
      });
  Val tokens = sums[11], dropped = sums[12];
  sums = k.reduceBlock(Vals(ArrayRef<Val>(sums).take_front(11)),
                       [&](ArrayRef<Val> a, ArrayRef<Val> b) {
                         return Moments::combine(k, a, b);
                       });
  k.ifThen(k.threadIdx() == 0, [&] {
    Moments::store(k, sums, pivot, record);
    k.atomicAdd(k.toI64(tokens), k.offset(counted, 8 * TokenCount));
    k.atomicAdd(k.toI64(dropped), k.offset(counted, 8 * TokensDropped));
  });
  k.launch(grid());
}

void ObserveKernels::emitHistogram() {
  KernelBuilder k(e.host, e.loc, e.kernels, "observe_histogram",
                  {kThreads, kMinBlocks});
  Observed x(k, element, address, fields, rank);
  Val records = k.pointer(fields[Records]),
      counted = k.pointer(fields[Counted]);
  Val counters = k.shared(4 * kSharedBins);

  // Every block adds up the records, in the same order.
  auto isReal = [](int64_t word) { return word >= 4; };
  Vals none(4, k.i64(0));
  none.append({k.f64(kInfinity), k.f64(-kInfinity)});
  none.append(5, k.f64(0));
  auto combine = [&](ArrayRef<Val> a, ArrayRef<Val> b) {
    return Moments::combine(k, a, b);
  };
  Vals all = k.forLoop(
      k.threadIdx(), k.gridDim('x'), kThreads, none,
      [&](Val number, ArrayRef<Val> so) {
        Val record =
            k.offset(records, k.toI64(number) * double(8 * RecordWords));
        Vals own;
        for (int64_t i = 0; i < Pivot; ++i)
          own.push_back(k.load(k.offset(record, 8 * i),
                               isReal(i) ? k.f64Type() : k.i64Type(), true));
        return combine(so, own);
      });
  all = k.reduceBlock(all, combine);
  Val isFirst = k.threadIdx() == 0;
  k.ifThen(isFirst & (k.blockIdx('x') == 0), [&] {
    Moments::store(k, all,
                   k.load(k.offset(records, 8 * Pivot), k.f64Type(), true),
                   counted);
  });

  // The variance as the host finds it.
  Val count = all[0], min = all[4], max = all[5];
  Val n = toFloat(k.max(count, k.i64(1)), k.f64Type());
  Val mean = all[FirstSum] / n;
  Val variance = exactSub(all[FirstSum + 1] / n, exactMul(mean, mean));
  Val sigma =
      k.intrinsic("llvm.sqrt.f64", k.f64Type(), {k.max(variance, k.f64(0))});
  Val bound = exactMul(k.f64(6), sigma);
  Val mayHaveOutliers =
      (min < max) & (sigma > 0) & (k.max(k.abs(min), k.abs(max)) > bound);

  Val rule = k.toI32(k.i64Argument(fields[RuleOfBins]));
  Val low = k.bitcast(k.i64Argument(fields[Low]), k.f64Type()),
      width = k.bitcast(k.i64Argument(fields[Width]), k.f64Type());
  Val isMinMax = rule == double(Rule::MinMax),
      isPadded = rule == double(Rule::PaddedMinMax);
  Val min32 = toF32(min), spread32 = toF32(max) - min32;
  Val spread = exactSub(max, min);
  Val margin = k.max(exactMul(spread, k.f64(0.05)), k.f64(1e-6));
  Val paddedLow = exactSub(min, margin);
  Val isConstant =
      (isMinMax & (spread32 < 1e-8)) |
      (isPadded &
       (spread <= exactAdd(exactMul(k.abs(max), k.f64(1e-5)), k.f64(1e-8))));
  Val isBinned = (rule != double(Rule::None)) & (count > 0) &
                 (isConstant ^ k.boolean(true));
  Binning binning;
  binning.low32 = k.select(isMinMax, min32, toF32(low));
  binning.width32 = k.select(isMinMax, spread32 + 1e-8, toF32(width));
  binning.inF32 = (rule == double(Rule::GivenF32)) |
                  (isMinMax & (binning.width32 < kInfinity));
  binning.low = k.select(isPadded, paddedLow, k.select(isMinMax, min, low));
  binning.width =
      k.select(isPadded, exactSub(exactAdd(max, margin), paddedLow),
               k.select(isMinMax, exactAdd(spread, k.f64(1e-8)), width));
  binning.byEdges = isPadded;
  binning.bins = k.toI32(k.i64Argument(fields[Bins]));

  Val bins = binning.bins, isShared = bins <= double(kSharedBins);
  Val sharedBins = k.select(isShared & isBinned, bins, k.i32(0));
  auto globalCount = [&](Val bin) {
    return k.offset(counted, k.toI64(bin) * 8 + double(8 * SummaryWords));
  };
  clear(k, counters, sharedBins);
  Val pieces =
      k.select(isBinned | mayHaveOutliers, x.rows * x.pieces, k.i64(0));
  Vals sums = forGrid(
      k, pieces, {k.i32(0), k.i32(0), k.i32(0)},
      [&](Val number, ArrayRef<Val> so) -> Vals {
        Val row = number / x.pieces;
        Piece piece = x.load(x.rowPointer(row), number - row * x.pieces);
        Vals outside = k.ifValues(
            isBinned,
            [&]() -> Vals {
              Binning::Place place = binning.of(k, piece);
              k.ifElse(
                  isShared,
                  [&] {
                    countInto(k, piece, place, [&](Val bin) {
                      k.atomicAdd(k.i32(1), k.offset(counters, bin * 4));
                    });
                  },
                  [&] {
                    countInto(k, piece, place, [&](Val bin) {
                      k.atomicAdd(k.i64(1), globalCount(bin));
                    });
                  });
              Val below = so[0], above = so[1];
              for (auto [isBelow, isAbove] :
                   llvm::zip_equal(place.isBelow, place.isAbove)) {
                below = below + ones(isBelow);
                above = above + ones(isAbove);
              }
              return {below, above};
            },
            [&]() -> Vals {
              return {so[0], so[1]};
            });
        Val beyond = so[2];
        for (auto [value, isFinite] : llvm::zip_equal(piece.x, piece.isFinite))
          beyond = beyond + ones(isFinite & (k.abs(k.toF64(value)) > bound));
        return {outside[0], outside[1], beyond};
      });
  sums = k.reduceBlock(sums, Observed::add);
  // Behind a barrier: all have counted.
  k.forLoop(k.threadIdx(), sharedBins, kThreads, [&](Val bin) {
    Val own = k.load(k.offset(counters, bin * 4), k.i32Type());
    k.ifThen(own > 0, [&] { k.atomicAdd(k.toI64(own), globalCount(bin)); });
  });
  sums[2] = k.select(mayHaveOutliers, sums[2], k.i32(0));
  k.ifThen(isFirst, [&] {
    for (auto [i, sum] : llvm::enumerate(sums))
      k.ifThen(sum > 0, [&, i = i, sum = sum] {
        k.atomicAdd(k.toI64(sum),
                    k.offset(counted, 8 * (Below + static_cast<int64_t>(i))));
      });
  });
  k.launch(grid());
}

struct ObserveLowering : public GPULoweringPattern<ObserveOp> {
  using GPULoweringPattern::GPULoweringPattern;
  LogicalResult matchAndRewrite(ObserveOp op,
                                PatternRewriter &rewriter) const override {
    GPULowering e(rewriter, op, target);
    FailureOr<ObservedBuffer> x = describeObserved(e, op, rewriter);
    if (failed(x))
      return failure();
    Value plan = allocateOnStack(op, rewriter, NumFields);
    SmallVector<Value> operands = x->operands;
    operands.push_back(e.address(plan));
    Value isCounted = e.callRuntime("corey_rt_device_observe", operands,
                                    rewriter.getI64Type());
    Value zero = e.toI64(e.index(0));
    e.ifThen(e.cmp(arith::CmpIPredicate::ne, isCounted, zero), [&] {
      SmallVector<Value> fields;
      for (int64_t i = 0; i < NumFields; ++i)
        fields.push_back(memref::LoadOp::create(rewriter, e.loc, plan,
                                                ValueRange{e.index(i)}));
      auto type = cast<RankedTensorType>(op.getX().getType());
      ObserveKernels kernels(e, type.getElementType(),
                             std::max<int64_t>(type.getRank(), 1), x->address(),
                             fields);
      e.ifThen(
          e.cmp(arith::CmpIPredicate::ne, fields[Tokens], zero),
          [&] { kernels.emitTokens(); }, [&] { kernels.emitMoments(); });
      kernels.emitHistogram();
      e.callRuntime("corey_rt_device_observed", {x->site()});
    });
    rewriter.replaceOp(op, op.getX());
    return success();
  }
};
} // namespace

void corey::populateGPUObserveLowerings(RewritePatternSet &patterns,
                                        GPUTarget target) {
  patterns.add<ObserveLowering>(patterns.getContext(), target);
}
