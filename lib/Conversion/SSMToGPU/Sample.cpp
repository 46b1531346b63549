//===- Sample.cpp - GPU kernel that draws from logits ---------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// A block for each row. Weights are integers, so that sums do not depend on
// their order, and what is kept is a threshold: all logits above it, and the
// first few of those equal to it. The threshold of top_k, of logits that are
// counted, and that of top_p, of their weights, are found in one way:
//
//  1. The range of what is left is cut into kBins of equal width, the measure
//     of each is summed up, and the one with the threshold is left; its logits
//     go to lists of the threads. Again if there are too many for these.
//  2. Bisection of the lists, between logits that there are.
//
// Then every warp sums up what is kept of its own part of the row, and the one
// with the drawn number looks for it there.
//
//===----------------------------------------------------------------------===//

#include "GPULowering.h"
#include "corey/Device/Sampling.h"
#include <limits>
#include <numeric>

using namespace mlir;
using namespace corey;
using namespace corey::ssm;

/// Threads of a block at most; elements that each loads at once, and at most
/// puts on its list.
static constexpr int64_t kMaxThreads = 512, kTogether = 16, kListed = 16;
static constexpr int64_t kBins = 8;
/// How often the range is cut before all is bisected, lists or not.
static constexpr int64_t kCuts = 3;
/// orderOf() infinity, and its negative.
static constexpr int64_t kInfinite = 0x7F800000, kNegative = -0x7F800001;
static constexpr int64_t kNoKey = std::numeric_limits<int32_t>::min(),
                         kLastKey = std::numeric_limits<int32_t>::max();
static constexpr int64_t kMask = 0xFFFFFFFF;

namespace {
/// Of i64, i32 or f32.
Val shiftRight(Val a, Val by) {
  return a.k->wrap(arith::ShRUIOp::create(a.k->b, a.k->loc, a.value, by.value));
}
Val half(Val a) {
  Val one = a.k->constantLike(a, 1);
  return a.k->wrap(
      arith::ShRSIOp::create(a.k->b, a.k->loc, a.value, one.value));
}
Val truncated(Val a) {
  return a.k->wrap(
      arith::FPToSIOp::create(a.k->b, a.k->loc, a.k->i32Type(), a.value));
}
Val isNot(Val condition) { return condition ^ condition.k->boolean(true); }

/// floor(a b / 2^64) of unsigned numbers, b below 2^63.
Val multiplyHigh(Val a, Val b) {
  Val a1 = a >> 32, a0 = a & kMask, b1 = b >> 32, b0 = b & kMask;
  Val cross = a0 * b1, other = a1 * b0;
  Val middle = ((a0 * b0) >> 32) + (cross & kMask) + (other & kMask);
  return a1 * b1 + (cross >> 32) + (other >> 32) + (middle >> 32);
}

/// The first two words of Philox4x32-10, all of i64.
Val randomBits(Val seed, Val sequence, Val draws) {
  Vals key{seed & kMask, seed >> 32};
  Vals words{draws & kMask, draws >> 32, sequence & kMask, sequence >> 32};
  for (int round = 0; round < sampling::kRounds; ++round) {
    Val first = words[0] * double(sampling::kMultipliers[0]),
        second = words[2] * double(sampling::kMultipliers[1]);
    words = {(second >> 32) ^ words[1] ^ key[0], second & kMask,
             (first >> 32) ^ words[3] ^ key[1], first & kMask};
    for (int i : {0, 1})
      key[i] = (key[i] + double(sampling::kKeySteps[i])) & kMask;
  }
  return words[0] | (words[1] << 32);
}

/// The logits of a row, as all threads of its block go over them.
class Row {
public:
  Row(KernelBuilder &k, const DeviceTensor &x, ArrayRef<Val> leading,
      int64_t size, int64_t width)
      : k(k), x(x), start(x.at(leading, k.i32(0))), size(size), width(width),
        together(std::max(kTogether, width)) {}

  using Body = llvm::function_ref<Vals(Val value, Val key, Val index,
                                       Val inside, ArrayRef<Val>)>;

  /// Calls body(value, key, index, inside, carried) for every logit, some of
  /// them again, not `inside`, where threads have nothing to do.
  Vals forAll(ArrayRef<Val> inits, Body body) const {
    int64_t step = k.bounds.threads * width;
    int64_t perRound = k.bounds.threads * together;
    Val first = k.threadIdx() * double(width);
    return k.forLoop(k.i32(0), k.i32(llvm::divideCeil(size, perRound)), 1,
                     inits, [&](Val round, ArrayRef<Val> in) {
                       return forEach(first + round * double(perRound), step,
                                      k.i32(size), in, body);
                     });
  }
  /// The same for `together` logits, of which `width` follow one another, from
  /// `first` on and every `step` logits, for those before `end`.
  Vals forEach(Val first, int64_t step, Val end, ArrayRef<Val> inits,
               Body body) const {
    Vals at, values;
    for (int64_t i = 0; i < together; i += width) {
      Val position = first + double(i / width * step);
      Val offset = k.toI64(k.min(position, k.i32(size - width)));
      Val packed = k.load(k.offset(start, offset * double(x.bytes())),
                          k.packedType(x.element, width), true);
      llvm::append_range(values, k.unpack(packed, x.element, width));
      for (int64_t j = 0; j < width; ++j)
        at.push_back(position + double(j));
    }
    Vals carried(inits);
    for (auto [value, index] : llvm::zip_equal(values, at))
      carried = body(value, orderOf(k, value), index, index < end, carried);
    return carried;
  }

  KernelBuilder &k;
  const DeviceTensor &x;
  Val start;
  int64_t size, width, together;
};

/// Draws from a row that has a finite largest logit, at a temperature above 0.
class Draw {
public:
  Draw(const Row &row, Val largestKey, Val smallestKey, Val temperature)
      : row(row), k(row.k), bits(sampling::weightBits(row.size)),
        largestKey(largestKey), largest(valueOf(largestKey)),
        scale(k.min(k.f32(sampling::kLog2E) / temperature,
                    k.f32(std::numeric_limits<float>::max()))) {
    // Logits further away have no weight.
    Val bound = exactSub(largest, k.f32(bits + 1) / scale);
    low = k.max(orderOf(k, bound), smallestKey);
    ties = k.i64(row.size);
    excess = k.i64(0);
  }

  /// Applies top_k and top_p.
  void keep(Val topK, Val topP) {
    Val list = k.shared(kListed * k.bounds.threads * 4, 8);
    static_assert(8 * kBins <= 4 * kListed);
    ownList = k.offset(list, k.threadIdx() * 4);
    ownSums = k.offset(list, k.threadIdx() * 8);
    Val wantsCount = (topK > 0) & (topK < double(row.size));
    Val wantsMass = topP < 1;
    Vals kept =
        k.forLoop(k.i32(0), k.i32(2), 1, {low, ties, excess},
                  [&](Val round, ArrayRef<Val> in) {
                    Val isMass = round == 1;
                    return k.ifValues(
                        k.select(isMass, wantsMass, wantsCount),
                        [&] { return threshold(isMass, topK, topP, in); },
                        [&] { return Vals(in); });
                  });
    low = kept[0];
    ties = kept[1];
  }

  /// Has one thread call `store` with the index that is drawn.
  void choose(Val seed, Val sequence, Val draws,
              llvm::function_ref<void(Val index)> store) {
    int64_t warps = k.bounds.threads / 32, tile = 32 * row.together;
    int64_t tilesPerWarp =
        llvm::divideCeil(llvm::divideCeil(row.size, tile), warps);
    Val begin = k.warp() * double(tilesPerWarp * tile);
    Val end = k.min(begin + double(tilesPerWarp * tile), k.i32(row.size));
    Val tieWeight = weightOf(valueOf(low));

    // Of each warp: what is above the threshold, and how many are equal to it.
    Val sums = k.shared(8 * warps, 8), counts = k.shared(4 * warps, 4);
    Val random = k.shared(8, 8);
    // The last warp has the least to do.
    k.ifThen(k.threadIdx() == double(k.bounds.threads - 1),
             [&] { k.store(randomBits(seed, sequence, draws), random); });
    Vals own =
        k.forLoop(k.i32(0), k.i32(tilesPerWarp), 1, {k.i64(0), k.i32(0)},
                  [&](Val number, ArrayRef<Val> in) {
                    Val first = begin + number * double(tile) +
                                k.lane() * double(row.width);
                    return row.forEach(
                        first, 32 * row.width, end, in,
                        [&](Val value, Val key, Val, Val inside,
                            ArrayRef<Val> in) -> Vals {
                          Val weight = weightIf(inside & (key > low), value);
                          Val isTie = inside & (key == low);
                          return {in[0] + weight,
                                  in[1] + k.select(isTie, k.i32(1), k.i32(0))};
                        });
                  });
    for (Val &each : own)
      each = k.warpSum(each);
    k.ifThen(k.lane() == 0, [&] {
      k.store(own[0], k.offset(sums, k.warp() * 8));
      k.store(own[1], k.offset(counts, k.warp() * 4));
    });
    k.syncBlock();

    // Lane i has warp i's.
    Val isWarp = k.lane() < double(warps),
        at = k.min(k.lane(), k.i32(warps - 1));
    Val sum =
        k.select(isWarp, k.load(k.offset(sums, at * 8), k.i64Type()), k.i64(0));
    Val count = k.select(isWarp, k.load(k.offset(counts, at * 4), k.i32Type()),
                         k.i32(0));
    Val tiesBefore = runningSum(count) - count;
    sum = sum + keptTies(tiesBefore, count) * tieWeight;
    Val until = runningSum(sum), before = until - sum;
    Val number = multiplyHigh(k.load(random, k.i64Type()),
                              k.shuffleIndex(until, k.i32(31)));
    Val left = number - k.shuffleIndex(before, k.warp());
    Val isHere = (left >= 0) & (number < k.shuffleIndex(until, k.warp()));
    k.ifThen(isHere, [&] {
      search(begin, end, tilesPerWarp, left,
             k.shuffleIndex(tiesBefore, k.warp()), tieWeight, store);
    });
  }

private:
  /// What a key stands for.
  Val valueOf(Val key) {
    return k.bitcast(k.select(key < 0, key ^ 0x7FFFFFFF, key), k.f32Type());
  }
  /// See corey/Device/Sampling.h.
  Val weightOf(Val value) {
    Val exponent = exactMul(exactSub(value, largest), scale);
    // NaN, an infinite distance at an infinite temperature, has none either.
    exponent = k.max(exponent, k.f32(sampling::kLeastExponent));
    Val rounding = k.f32(sampling::kRounding);
    Val biased = exactAdd(exponent, rounding);
    Val rest = exactSub(exponent, exactSub(biased, rounding));
    Val power = k.f32(sampling::kPower[0]);
    for (float coefficient : llvm::drop_begin(sampling::kPower))
      power = exactAdd(exactMul(power, rest), k.f32(coefficient));
    Val mantissa = k.toI64(truncated(exactMul(power, k.f32(0x1p24))));
    Val shift =
        k.bitcast(rounding, k.i32Type()) - k.bitcast(biased, k.i32Type());
    return shiftRight(mantissa << (bits - 24), k.toI64(shift));
  }
  Val weightIf(Val condition, Val value) {
    return k.ifValues(
        condition, [&] { return Vals{weightOf(value)}; },
        [&] { return Vals{k.i64(0)}; })[0];
  }
  /// How many of `count` logits equal to the threshold are kept, if there are
  /// `before` of them before.
  Val keptTies(Val before, Val count) {
    return k.max(k.min(ties - k.toI64(before), k.toI64(count)), k.i64(0));
  }
  /// Sums over the lanes up to each.
  Val runningSum(Val value) {
    for (int64_t delta = 1; delta < 32; delta *= 2) {
      Val other = k.shuffleUp(value, delta);
      value = value + k.select(k.lane() >= double(delta), other,
                               k.constantLike(other, 0));
    }
    return value;
  }

  /// The threshold of logits whose measure, a count or their weights, is the
  /// least that reaches what is wanted: {low, ties, excess}, from those before.
  Vals threshold(Val isMass, Val topK, Val topP, ArrayRef<Val> before) {
    auto measureOf = [&](Val condition, Val value) {
      return k.ifValues(
          condition & isMass, [&] { return Vals{weightOf(value)}; },
          [&] { return Vals{k.select(condition, k.i64(1), k.i64(0))}; })[0];
    };
    enum { Low, High, Above, Inside, Target, Listed, IsOpen };
    Vals cut = k.forLoop(
        k.i32(0), k.i32(kCuts), 1,
        {before[0], largestKey, k.i64(0), k.i64(0), k.i64(0), k.i32(-1),
         k.boolean(true)},
        [&](Val number, ArrayRef<Val> in) {
          return k.ifValues(
              in[IsOpen],
              [&]() -> Vals {
                Val low = in[Low], high = in[High];
                Val top = valueOf(high);
                Val steps = k.f32(kBins) / exactSub(top, valueOf(low));
                auto isLeft = [&](Val key, Val inside) {
                  return inside & (key >= low) & (key <= high);
                };
                // Not a number where all are equal, or far beyond others.
                auto binOf = [&](Val value) {
                  return truncated(k.min(exactMul(exactSub(top, value), steps),
                                         k.f32(kBins - 1)));
                };
                // A thread sums up in shared memory: choosing among eight
                // registers takes more than all the rest.
                k.syncBlock();
                for (int64_t i = 0; i < kBins; ++i)
                  k.store(k.i64(0), sumAt(k.i32(i)));
                row.forAll({},
                           [&](Val value, Val key, Val, Val inside,
                               ArrayRef<Val>) -> Vals {
                             k.ifThen(isLeft(key, inside), [&] {
                               Val at = sumAt(binOf(value));
                               Val measure = measureOf(k.boolean(true), value);
                               k.store(k.load(at, k.i64Type()) + measure, at);
                             });
                             return {};
                           });
                Vals sums;
                for (int64_t i = 0; i < kBins; ++i)
                  sums.push_back(k.load(sumAt(k.i32(i)), k.i64Type()));
                // The lists are where the sums were.
                k.syncBlock();
                sums =
                    k.reduceBlock(sums, [&](ArrayRef<Val> a, ArrayRef<Val> b) {
                      Vals both;
                      for (auto [x, y] : llvm::zip_equal(a, b))
                        both.push_back(x + y);
                      return both;
                    });
                Val total = sums[0];
                for (Val sum : llvm::drop_begin(sums))
                  total = total + sum;
                Val wanted = k.select(isMass, shareOf(total - before[2], topP),
                                      k.toI64(topK));
                Val target = k.select(number == 0, wanted, in[Target]);
                // The bin in which it is reached; none if there are too few.
                Val above = in[Above], until = above, inside = k.i64(0);
                Val chosen = k.i32(kBins);
                for (auto [i, sum] : llvm::enumerate(sums)) {
                  Val isHere = (until < target) & (until + sum >= target);
                  chosen = k.select(isHere, k.i32(i), chosen);
                  above = k.select(isHere, until, above);
                  inside = k.select(isHere, sum, inside);
                  until = until + sum;
                }
                Vals found = row.forAll(
                    {k.i32(kLastKey), k.i32(kNoKey), k.i32(0)},
                    [&](Val value, Val key, Val, Val inside,
                        ArrayRef<Val> so) -> Vals {
                      return k.ifValues(
                          isLeft(key, inside) & (binOf(value) == chosen),
                          [&]() -> Vals {
                            k.ifThen(so[2] < double(kListed),
                                     [&] { k.store(key, listAt(so[2])); });
                            return {k.min(so[0], key), k.max(so[1], key),
                                    so[2] + 1.0};
                          },
                          [&] { return Vals(so); });
                    });
                Val own = found[2];
                found = k.reduceBlock(
                    found, [&](ArrayRef<Val> a, ArrayRef<Val> b) -> Vals {
                      return {k.min(a[0], b[0]), k.max(a[1], b[1]),
                              k.max(a[2], b[2])};
                    });
                Val fits = found[2] <= double(kListed);
                Val isNone = chosen == double(kBins);
                return {found[0],
                        found[1],
                        above,
                        inside,
                        target,
                        k.select(fits, own, k.i32(-1)),
                        isNot(fits | isNone) & (found[0] < found[1])};
              },
              [&] { return Vals(in); });
        });
    Val target = cut[Target], listed = cut[Listed];
    Val isNone = cut[Low] > cut[High];

    Vals range = k.forLoop(
        k.i32(0), k.i32(32), 1, ArrayRef(cut).take_front(4),
        [&](Val, ArrayRef<Val> in) {
          return k.ifValues(
              in[Low] < in[High],
              [&]() -> Vals {
                Val low = in[Low], high = in[High];
                // Rounded down, without overflow.
                Val middle = (low & high) + half(low ^ high);
                auto take = [&](Val value, Val key, Val inside,
                                ArrayRef<Val> so) -> Vals {
                  Val isUpper = inside & (key > middle) & (key <= high);
                  Val isLower = inside & (key <= middle) & (key >= low);
                  return {so[0] + measureOf(isUpper, value),
                          k.select(isUpper, k.min(so[1], key), so[1]),
                          k.select(isLower, k.max(so[2], key), so[2])};
                };
                Vals inits{k.i64(0), k.i32(kLastKey), k.i32(kNoKey)};
                Vals halves = k.ifValues(
                    listed >= 0,
                    [&] {
                      return k.forLoop(
                          k.i32(0), listed, 1, inits,
                          [&](Val i, ArrayRef<Val> so) {
                            Val key = k.load(listAt(i), k.i32Type());
                            return take(valueOf(key), key, k.boolean(true), so);
                          });
                    },
                    [&] {
                      return row.forAll(inits,
                                        [&](Val value, Val key, Val, Val inside,
                                            ArrayRef<Val> so) {
                                          return take(value, key, inside, so);
                                        });
                    });
                halves = k.reduceBlock(
                    halves, [&](ArrayRef<Val> a, ArrayRef<Val> b) -> Vals {
                      return {a[0] + b[0], k.min(a[1], b[1]),
                              k.max(a[2], b[2])};
                    });
                k.syncBlock();
                Val until = in[Above] + halves[0];
                Val isUpper = until >= target;
                return {k.select(isUpper, halves[1], low),
                        k.select(isUpper, high, halves[2]),
                        k.select(isUpper, in[Above], until),
                        k.select(isUpper, halves[0], in[Inside] - halves[0])};
              },
              [&] { return Vals(in); });
        });

    // Of those that are equal to it, as many as are needed.
    return k.ifValues(
        isNone, [&] { return Vals(before); },
        [&]() -> Vals {
          Val weight = weightOf(valueOf(range[Low]));
          Val each = k.max(k.select(isMass, weight, k.i64(1)), k.i64(1));
          Val needed = (target - range[Above] + each - 1.0) / each;
          return {range[Low], needed, (range[Inside] / each - needed) * weight};
        });
  }
  /// The part `topP` of a sum, rounded up to what weights can be, at least 1.
  Val shareOf(Val total, Val topP) {
    Val share = exactMul(k.min(k.max(topP, k.f32(0)), k.f32(1)), k.f32(0x1p32));
    Val factor =
        k.wrap(arith::FPToSIOp::create(k.b, k.loc, k.i64Type(), share.value));
    Val lower = (total & kMask) * factor;
    Val rounded = k.select((lower & kMask) == 0, k.i64(0), k.i64(1));
    return k.max((total >> 32) * factor + (lower >> 32) + rounded, k.i64(1));
  }
  Val sumAt(Val bin) {
    return k.offset(ownSums, bin * double(8 * k.bounds.threads));
  }
  Val listAt(Val slot) {
    return k.offset(ownList, slot * double(4 * k.bounds.threads));
  }

  /// Looks through the tiles of a warp for the logit at which the running sum
  /// of weights is above `left`. A lane has neighbours.
  void search(Val begin, Val end, int64_t tiles, Val left, Val tiesBefore,
              Val tieWeight, llvm::function_ref<void(Val index)> store) {
    int64_t tile = 32 * row.together;
    k.forLoop(
        k.i32(0), k.i32(tiles), 1, {left, tiesBefore},
        [&](Val number, ArrayRef<Val> in) {
          return k.ifValues(
              in[0] >= 0,
              [&]() -> Vals {
                Val first = begin + number * double(tile) +
                            k.lane() * double(row.together);
                Vals weights, areTies, indices;
                Val count = k.i32(0);
                row.forEach(
                    first, row.width, end, {},
                    [&](Val value, Val key, Val index, Val inside,
                        ArrayRef<Val>) -> Vals {
                      weights.push_back(weightIf(inside & (key > low), value));
                      areTies.push_back(inside & (key == low));
                      indices.push_back(index);
                      count =
                          count + k.select(areTies.back(), k.i32(1), k.i32(0));
                      return {};
                    });
                Val countUntil = runningSum(count);
                Val rank = k.toI64(in[1] + countUntil - count);
                Val sum = k.i64(0);
                Vals sums;
                for (auto [weight, isTie] : llvm::zip_equal(weights, areTies)) {
                  Val isKept = isTie & (rank < ties);
                  sum = sum + weight + k.select(isKept, tieWeight, k.i64(0));
                  rank = rank + k.select(isTie, k.i64(1), k.i64(0));
                  sums.push_back(sum);
                }
                Val until = runningSum(sum), own = in[0] - (until - sum);
                k.ifThen((own >= 0) & (own < sum), [&] {
                  // The last of the sums that are above, from behind.
                  Val index = indices.back();
                  for (size_t i = sums.size() - 1; i-- > 0;)
                    index = k.select(own < sums[i], indices[i], index);
                  store(index);
                });
                // Negative once it is found.
                return {in[0] - k.shuffleIndex(until, k.i32(31)),
                        in[1] + k.shuffleIndex(countUntil, k.i32(31))};
              },
              [&] { return Vals(in); });
        });
  }

  const Row &row;
  KernelBuilder &k;
  int bits;
  Val largestKey, largest, scale;
  /// In shared memory: the thread's list, and its sums while there is none.
  Val ownList, ownSums;
  /// What is kept: keys above `low`, and the first `ties` of those equal to it.
  Val low, ties;
  /// The weights of those equal to it that are not.
  Val excess;
};

struct SampleLowering : public GPULoweringPattern<SampleOp> {
  using GPULoweringPattern::GPULoweringPattern;

  LogicalResult matchAndRewrite(SampleOp op,
                                PatternRewriter &rewriter) const override {
    GPULowering e(rewriter, op, target);
    Value logits = e.buffer(op.getLogits()), random = e.buffer(op.getRandom());
    Value temperatures = e.buffer(op.getTemperature()),
          topKs = e.buffer(op.getTopK()), topPs = e.buffer(op.getTopP());
    Value out = e.allocate(0), next = e.allocate(1);
    int64_t size = op.getLogits().getType().getShape().back();
    int64_t threads = 32;
    while (threads < kMaxThreads && size > kTogether * threads)
      threads *= 2;
    Value rows = e.rowCount(logits);

    KernelBuilder k(e.host, e.loc, e.kernels, "sample", {threads, 0});
    DeviceTensor x(e, k, logits), ids(e, k, out), randoms(e, k, random),
        nextRandoms(e, k, next), temperature(e, k, temperatures),
        topK(e, k, topKs), topP(e, k, topPs);
    Val number = rowOfBlock(k);
    // The same for all threads of a block.
    k.ifThen(number < k.i32Argument(rows), [&] {
      Vals leading = rowIndices(e, k, logits, number);
      auto ofRow = [&](const DeviceTensor &tensor) {
        return tensor.at(ArrayRef(leading).drop_back(leading.empty() ? 0 : 1),
                         leading.empty() ? k.i32(0) : leading.back());
      };
      auto setting = [&](const DeviceTensor &tensor) {
        return k.load(ofRow(tensor), tensor.element, true);
      };
      auto store = [&](Val index) {
        k.store(ids.element.isInteger(64) ? k.toI64(index) : index, ofRow(ids));
      };
      // The seed, the number of the sequence and that of its draws.
      Vals counter;
      for (int64_t i = 0; i < 3; ++i)
        counter.push_back(
            k.load(randoms.at(leading, k.i32(i)), k.i64Type(), true));
      Row row(k, x, leading, size, rowAlignment(op.getLogits()));
      // The largest, the first of equal ones, and the smallest finite one.
      Vals ends = row.forAll(
          {k.i32(kNoKey), k.i32(kLastKey), k.i32(kLastKey)},
          [&](Val, Val key, Val index, Val inside, ArrayRef<Val> in) -> Vals {
            Val isLarger = inside & (key > in[0]);
            Val isSmaller = inside & (key > double(kNegative)) & (key < in[2]);
            return {k.select(isLarger, key, in[0]),
                    k.select(isLarger, index, in[1]),
                    k.select(isSmaller, key, in[2])};
          });
      ends = k.reduceBlock(ends, [&](ArrayRef<Val> a, ArrayRef<Val> b) -> Vals {
        Val takes = (b[0] > a[0]) | ((b[0] == a[0]) & (b[1] < a[1]));
        return {k.select(takes, b[0], a[0]), k.select(takes, b[1], a[1]),
                k.min(a[2], b[2])};
      });
      Val hot = setting(temperature);
      Val isDrawn = (hot > 0.0) & (ends[0] < double(kInfinite)) &
                    (ends[0] > double(kNegative));
      k.ifElse(
          isDrawn,
          [&] {
            Draw draw(row, ends[0], ends[2], hot);
            draw.keep(setting(topK), setting(topP));
            draw.choose(counter[0], counter[1], counter[2], store);
          },
          [&] { k.ifThen(k.threadIdx() == 0, [&] { store(ends[1]); }); });
      k.ifThen(k.threadIdx() == 0, [&] {
        counter[2] = k.wrap(arith::AddIOp::create(k.b, k.loc, counter[2].value,
                                                  k.i64(1).value));
        for (auto [i, value] : llvm::enumerate(counter))
          k.store(value, nextRandoms.at(leading, k.i32(i)));
      });
    });
    k.launch(e.gridOf(e.index(1), rows));
    e.replaceWith({out, next});
    return success();
  }
};
} // namespace

void corey::populateGPUSampleLowerings(RewritePatternSet &patterns,
                                       GPUTarget target) {
  patterns.add<SampleLowering>(patterns.getContext(), target);
}
