//===- Sample.cpp - GPU kernel that draws from logits ---------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// A block for each row, or a cluster of blocks that each have a part of it and
// read what the others have in shared memory. Weights are integers, so that
// sums do not depend on their order, and what is kept is a threshold: all
// logits above it, and the first few of those equal to it. The threshold of
// top_k, of logits that are counted, and that of top_p, of their weights, are
// found in one way:
//
//  1. The distance to the largest logit of what is left is a number of three
//     digits. The measure of each first digit is summed up, and the one with
//     the threshold is left; then of each second digit, when what is left goes
//     to lists of the threads, if they have room for all, and third. Once more
//     if logits that are not equal are left, as where one is far from others.
//  2. Bisection of those, between logits that there are.
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

/// Threads of a block and blocks of a row at most, and elements that a thread
/// loads at once.
static constexpr int64_t kMaxThreads = 512, kMaxBlocks = 8, kTogether = 16;
/// Blocks per multiprocessor up to which a row has more than one.
static constexpr int64_t kWaves = 4;
/// Values of a digit at most, of which each has a thread.
static constexpr int64_t kMaxBins = 256, kDigits = 3;
/// Of lists that have room for all logits of a block, at most.
static constexpr int64_t kListBytes = 64 << 10;
/// How often the range is cut before all that is left is bisected.
static constexpr int64_t kCuts = 2;
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

/// The blocks that have a row, along x: a cluster if there are several.
class Team {
public:
  Team(KernelBuilder &k, int64_t blocks) : k(k), blocks(blocks) {}

  void sync() const { blocks > 1 ? k.syncCluster() : k.syncBlock(); }
  /// What a block has at an address of its shared memory.
  Val load(Val pointer, Val block, Type type) const {
    return blocks > 1 ? k.loadOfBlock(pointer, block, type)
                      : k.load(pointer, type);
  }
  /// KernelBuilder::reduceBlock() of all threads of the team, which
  /// synchronizes them; in a loop they must be once more before it comes again.
  Vals
  reduce(Vals values,
         llvm::function_ref<Vals(ArrayRef<Val>, ArrayRef<Val>)> combine) const {
    values = k.reduceBlock(values, combine);
    if (blocks == 1)
      return values;
    Val memory = k.shared(8 * values.size(), 8);
    k.ifThen(k.threadIdx() == 0, [&] {
      for (auto [i, value] : llvm::enumerate(values))
        k.store(value, k.offset(memory, 8 * i));
    });
    sync();
    Val block = k.lane() & (blocks - 1);
    for (auto [i, value] : llvm::enumerate(values))
      value = load(k.offset(memory, 8 * i), block, value.type());
    for (int64_t mask = blocks / 2; mask >= 1; mask /= 2) {
      Vals other;
      for (Val value : values)
        other.push_back(k.shuffleXor(value, mask));
      values = combine(values, other);
    }
    return values;
  }

  KernelBuilder &k;
  const int64_t blocks;
};

/// The logits of a row, as all threads of a block go over their part of them.
class Row {
public:
  Row(const Team &team, const DeviceTensor &x, ArrayRef<Val> leading,
      int64_t size, int64_t width)
      : team(team), k(team.k), x(x), start(x.at(leading, k.i32(0))), size(size),
        width(width), together(std::max(kTogether, width)),
        rounds(
            llvm::divideCeil(size, team.blocks * k.bounds.threads * together)) {
    begin = k.blockIdx('x') * double(partOfBlock());
    end = k.min(begin + double(partOfBlock()), k.i32(size));
  }

  int64_t partOfBlock() const { return rounds * k.bounds.threads * together; }

  using Body = llvm::function_ref<Vals(Val value, Val key, Val index,
                                       Val inside, ArrayRef<Val>)>;

  /// Calls body(value, key, index, inside, carried) for every logit of the
  /// block, some again, not `inside`, where threads have nothing to do.
  Vals forAll(ArrayRef<Val> inits, Body body) const {
    int64_t step = k.bounds.threads * width;
    int64_t perRound = k.bounds.threads * together;
    Val first = begin + k.threadIdx() * double(width);
    return k.forLoop(
        k.i32(0), k.i32(rounds), 1, inits, [&](Val round, ArrayRef<Val> in) {
          return forEach(first + round * double(perRound), step, end, in, body);
        });
  }
  /// The same for `together` logits, of which `width` follow one another, from
  /// `first` on and every `step` logits, for those before `last`.
  Vals forEach(Val first, int64_t step, Val last, ArrayRef<Val> inits,
               Body body) const {
    Vals at, values;
    for (int64_t i = 0; i < together; i += width) {
      Val position = first + double(i / width * step);
      Val offset = k.toI64(k.min(position, k.i32(size - width)));
      // Every pass loads them anew, from L1: there are not enough registers for
      // all that would be made of them once.
      Val packed = k.loadInPlace(k.offset(start, offset * double(x.bytes())),
                                 k.packedType(x.element, width));
      llvm::append_range(values, k.unpack(packed, x.element, width));
      for (int64_t j = 0; j < width; ++j)
        at.push_back(position + double(j));
    }
    Vals carried(inits);
    for (auto [value, index] : llvm::zip_equal(values, at))
      carried = body(value, orderOf(k, value), index, index < last, carried);
    return carried;
  }

  const Team &team;
  KernelBuilder &k;
  const DeviceTensor &x;
  Val start, begin, end;
  int64_t size, width, together, rounds;
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
    bins = std::min(k.bounds.threads, kMaxBins);
    binBits = llvm::Log2_64(bins);
    // A block's logits may all have one digit.
    limbBits = 32 - llvm::Log2_64_Ceil(row.partOfBlock());
    numLimbs = llvm::divideCeil(bits + 1, limbBits);
    counters = k.shared(2 * 4 * numLimbs * bins, 8);
    sumsOfWarps = k.shared(8 * (bins / 32), 8);
    chosen = k.shared(3 * 8, 8);
    if (int64_t bytes = 4 * row.partOfBlock(); bytes <= kListBytes)
      list = k.offset(k.shared(bytes), k.threadIdx() * 4);
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
    Val begin = row.begin + k.warp() * double(row.rounds * tile);
    Val end = k.min(begin + double(row.rounds * tile), k.i32(row.size));
    Val tieWeight = weightOf(valueOf(low));

    // Of each warp: what is above the threshold, and how many are equal to it.
    Val sums = k.shared(8 * warps, 8), counts = k.shared(4 * warps, 4);
    Val random = k.shared(8, 8);
    // The last warp has the least to do.
    k.ifThen(k.threadIdx() == double(k.bounds.threads - 1),
             [&] { k.store(randomBits(seed, sequence, draws), random); });
    Vals own =
        k.forLoop(k.i32(0), k.i32(row.rounds), 1, {k.i64(0), k.i32(0)},
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
    // Of the logits that are kept: what is before the block's, ties among them,
    // and whether the number is not behind them.
    Val number, before = k.i64(0), tiesBefore = k.i32(0), isHere;
    auto draw = [&](Val total) {
      number = multiplyHigh(k.load(random, k.i64Type()), total);
    };
    int64_t blocks = row.team.blocks;
    if (blocks > 1) {
      Val sumOfBlock = k.shared(8, 8), countOfBlock = k.shared(4, 4);
      Val all = k.warpSum(sum), allTies = k.warpSum(count);
      k.ifThen(k.threadIdx() == 0, [&] {
        k.store(all, sumOfBlock);
        k.store(allTies, countOfBlock);
      });
      row.team.sync();
      // Lane i has block i's.
      Val isBlock = k.lane() < double(blocks),
          block = k.min(k.lane(), k.i32(blocks - 1));
      Part part = partOf(
          k.select(isBlock, row.team.load(sumOfBlock, block, k.i64Type()),
                   k.i64(0)),
          k.select(isBlock, row.team.load(countOfBlock, block, k.i32Type()),
                   k.i32(0)),
          k.i32(0), tieWeight);
      draw(k.shuffleIndex(part.until, k.i32(31)));
      Val self = k.blockIdx('x');
      before = k.shuffleIndex(part.before, self);
      tiesBefore = k.shuffleIndex(part.tiesBefore, self);
      isHere = number < k.shuffleIndex(part.until, self);
    }
    Part part = partOf(sum, count, tiesBefore, tieWeight);
    if (blocks == 1) {
      draw(k.shuffleIndex(part.until, k.i32(31)));
      isHere = k.boolean(true);
    }
    Val left = number - before;
    isHere = isHere & (left < k.shuffleIndex(part.until, k.warp()));
    left = left - k.shuffleIndex(part.before, k.warp());
    k.ifThen(isHere & (left >= 0), [&] {
      search(begin, end, row.rounds, left,
             k.shuffleIndex(part.tiesBefore, k.warp()), tieWeight, store);
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

  /// Of parts of what is kept, which lanes have in their order.
  struct Part {
    Val before, until, tiesBefore;
  };
  /// From what is above the threshold and how many are equal to it, `ties` of
  /// them before all.
  Part partOf(Val sum, Val count, Val ties, Val tieWeight) {
    Part part;
    part.tiesBefore = ties + runningSum(count) - count;
    sum = sum + keptTies(part.tiesBefore, count) * tieWeight;
    part.until = runningSum(sum);
    part.before = part.until - sum;
    return part;
  }

  Val counterAt(Val buffer, Val bin, int64_t limb) {
    return k.offset(buffer, bin * 4 + double(4 * bins * limb));
  }

  /// The threshold of logits whose measure, a count or their weights, is the
  /// least that reaches what is wanted: {low, ties, excess}, from those before.
  Vals threshold(Val isMass, Val topK, Val topP, ArrayRef<Val> before) {
    auto measureOf = [&](Val condition, Val value) {
      return k.ifValues(
          condition & isMass, [&] { return Vals{weightOf(value)}; },
          [&] { return Vals{k.select(condition, k.i64(1), k.i64(0))}; })[0];
    };
    enum { Low, High, Above, Inside, Target, IsOpen, Listed };
    Vals cut = k.forLoop(
        k.i32(0), k.i32(kCuts), 1,
        {before[0], largestKey, k.i64(0), k.i64(0), k.i64(0), k.boolean(true),
         k.i32(0)},
        [&](Val number, ArrayRef<Val> in) {
          return k.ifValues(
              in[IsOpen],
              [&]() -> Vals {
                Val low = in[Low], high = in[High];
                Val top = valueOf(high);
                Val steps = k.f32(int64_t(1) << kDigits * binBits) /
                            exactSub(top, valueOf(low));
                auto isLeft = [&](Val key, Val inside) {
                  return inside & (key >= low) & (key <= high);
                };
                // Not a number where all are equal, or far beyond others.
                auto digitsOf = [&](Val value) {
                  return truncated(
                      k.min(exactMul(exactSub(top, value), steps),
                            k.f32((int64_t(1) << kDigits * binBits) - 1)));
                };
                enum { Prefix, UpTo, Of, Wanted, Kept };
                // Of the last one and its prefix there are few, on lists.
                Vals found = k.forLoop(
                    k.i32(0), k.i32(kDigits - 1), 1,
                    {k.i32(0), in[Above], k.i64(0), in[Target], k.i32(0)},
                    [&](Val digit, ArrayRef<Val> so) {
                      Val below =
                          (double(kDigits - 1) - digit) * double(binBits);
                      Val isListed = digit == double(kDigits - 2);
                      Val listed;
                      Vals sums = sumDigit(
                          digit, (number == 0) & (digit == 0), so, isMass, topK,
                          topP, before[2], [&](AddTo add) {
                            listed =
                                row.forAll({k.i32(0)}, [&](Val value, Val key,
                                                           Val, Val inside,
                                                           ArrayRef<Val> slot) {
                                  Val digits =
                                      shiftRight(digitsOf(value), below);
                                  return k.ifValues(
                                      isLeft(key, inside) &
                                          ((digits >> binBits) == so[Prefix]),
                                      [&]() -> Vals {
                                        add(value, digits & (bins - 1));
                                        if (!list)
                                          return Vals(slot);
                                        k.ifThen(isListed, [&] {
                                          k.store(key, listAt(slot[0]));
                                        });
                                        return {slot[0] + k.select(isListed,
                                                                   k.i32(1),
                                                                   k.i32(0))};
                                      },
                                      [&] { return Vals(slot); });
                                })[0];
                          });
                      sums.push_back(listed);
                      return sums;
                    });
                Val listed = found[Kept], prefix = found[Prefix];
                found = sumDigit(
                    k.i32(kDigits - 1), k.boolean(false), found, isMass, topK,
                    topP, before[2], [&](AddTo add) {
                      forListed(listed, {},
                                [&](Val value, Val key, Val inside,
                                    ArrayRef<Val>) -> Vals {
                                  Val digits = digitsOf(value);
                                  k.ifThen(
                                      isLeft(key, inside) &
                                          ((digits >> binBits) == prefix),
                                      [&] { add(value, digits & (bins - 1)); });
                                  return {};
                                });
                    });
                Val isNone = found[Prefix] < 0;
                Vals ends = forListed(
                    listed, {k.i32(kLastKey), k.i32(kNoKey)},
                    [&](Val value, Val key, Val inside,
                        ArrayRef<Val> so) -> Vals {
                      Val isHere = isLeft(key, inside) &
                                   (digitsOf(value) == found[Prefix]);
                      return {k.select(isHere, k.min(so[0], key), so[0]),
                              k.select(isHere, k.max(so[1], key), so[1])};
                    });
                ends = row.team.reduce(
                    ends, [&](ArrayRef<Val> a, ArrayRef<Val> b) -> Vals {
                      return {k.min(a[0], b[0]), k.max(a[1], b[1])};
                    });
                return {ends[0],       ends[1],
                        found[UpTo],   found[Of],
                        found[Wanted], isNot(isNone) & (ends[0] < ends[1]),
                        listed};
              },
              [&] { return Vals(in); });
        });
    Val target = cut[Target];
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
                Vals halves = forListed(
                    cut[Listed], {k.i64(0), k.i32(kLastKey), k.i32(kNoKey)},
                    [&](Val value, Val key, Val inside,
                        ArrayRef<Val> so) -> Vals {
                      Val isUpper = inside & (key > middle) & (key <= high);
                      Val isLower = inside & (key <= middle) & (key >= low);
                      return {so[0] + measureOf(isUpper, value),
                              k.select(isUpper, k.min(so[1], key), so[1]),
                              k.select(isLower, k.max(so[2], key), so[2])};
                    });
                halves = row.team.reduce(
                    halves, [&](ArrayRef<Val> a, ArrayRef<Val> b) -> Vals {
                      return {a[0] + b[0], k.min(a[1], b[1]),
                              k.max(a[2], b[2])};
                    });
                row.team.sync();
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
  /// Calls body(value, key, inside, carried) for all that is on the lists, or
  /// for all logits where there are too many for lists.
  Vals forListed(Val listed, ArrayRef<Val> inits,
                 llvm::function_ref<Vals(Val value, Val key, Val inside,
                                         ArrayRef<Val> carried)>
                     body) {
    if (!list)
      return row.forAll(
          inits, [&](Val value, Val key, Val, Val inside, ArrayRef<Val> in) {
            return body(value, key, inside, in);
          });
    return k.forLoop(k.i32(0), listed, 1, inits, [&](Val i, ArrayRef<Val> in) {
      Val key = k.load(listAt(i), k.i32Type());
      return body(valueOf(key), key, k.boolean(true), in);
    });
  }
  Val listAt(Val slot) {
    return k.offset(list, slot * double(4 * k.bounds.threads));
  }

  using AddTo = llvm::function_ref<void(Val value, Val bin)>;
  /// Sums up the measures of logits by a digit, those that `forAll` calls its
  /// argument for with their digit, and finds the digit with the threshold.
  /// From and to {prefix of digits, measure above it, measure of it, target}.
  /// The prefix is -1 if all is less than the target, which is what is wanted
  /// of all at the `first` time.
  Vals sumDigit(Val digit, Val isFirst, ArrayRef<Val> before, Val isMass,
                Val topK, Val topP, Val excess,
                llvm::function_ref<void(AddTo)> forAll) {
    Val prefix = before[0], above = before[1], target = before[3];
    // The other one may still be read.
    Val buffer = k.offset(counters, (digit & 1) * double(4 * numLimbs * bins));
    Val thread = k.threadIdx();
    k.forLoop(thread, k.i32(numLimbs * bins), k.bounds.threads,
              [&](Val i) { k.store(k.i32(0), k.offset(buffer, i * 4)); });
    k.syncBlock();
    // Shared memory adds 32 bits at once.
    forAll([&](Val value, Val bin) {
      k.ifElse(
          isMass,
          [&] {
            Val weight = weightOf(value);
            for (int64_t i = 0; i < numLimbs; ++i) {
              Val limb = (weight >> limbBits * i) & ((1 << limbBits) - 1);
              k.atomicAdd(k.toI32(limb), counterAt(buffer, bin, i));
            }
          },
          [&] { k.atomicAdd(k.i32(1), counterAt(buffer, bin, 0)); });
    });
    row.team.sync();
    Val isBin = thread < double(bins);
    auto sumOf = [&](int64_t from, int64_t to) {
      Val sum = k.i64(0);
      for (int64_t i = from; i < to; ++i)
        for (int64_t block = 0; block < row.team.blocks; ++block) {
          Val part = row.team.load(counterAt(buffer, thread, i), k.i32(block),
                                   k.i32Type());
          sum = sum + ((k.toI64(part) & kMask) << limbBits * i);
        }
      return sum;
    };
    Val sum = k.ifValues(
        isBin,
        [&] {
          Val lowest = sumOf(0, 1);
          return k.ifValues(
              isMass, [&] { return Vals{lowest + sumOf(1, numLimbs)}; },
              [&] { return Vals{lowest}; });
        },
        [&] { return Vals{k.i64(0)}; })[0];
    Val until = runningSum(sum);
    k.ifThen(isBin & (k.lane() == 31),
             [&] { k.store(until, k.offset(sumsOfWarps, k.warp() * 8)); });
    k.ifThen(thread == 0, [&] {
      k.store(k.i64(-1), chosen);
      k.store(above, k.offset(chosen, 8));
      k.store(k.i64(0), k.offset(chosen, 16));
    });
    k.syncBlock();
    Val total = k.i64(0);
    until = until + above;
    for (int64_t i = 0; i < bins / 32; ++i) {
      Val each = k.load(k.offset(sumsOfWarps, 8 * i), k.i64Type());
      until = until + k.select(k.warp() > double(i), each, k.i64(0));
      total = total + each;
    }
    Val wanted = k.select(isMass, shareOf(total - excess, topP), k.toI64(topK));
    target = k.select(isFirst, wanted, target);
    k.ifThen(isBin & (until - sum < target) & (until >= target), [&] {
      k.store(k.toI64(thread), chosen);
      k.store(until - sum, k.offset(chosen, 8));
      k.store(sum, k.offset(chosen, 16));
    });
    k.syncBlock();
    Val bin = k.toI32(k.load(chosen, k.i64Type()));
    return {k.select(bin < 0, bin, prefix * double(bins) + bin),
            k.load(k.offset(chosen, 8), k.i64Type()),
            k.load(k.offset(chosen, 16), k.i64Type()), target};
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
  /// Values of a digit, and the limbs in which their weights are summed up in
  /// shared memory: bits of each, and how many.
  int64_t bins = 0, binBits = 0, limbBits = 0, numLimbs = 0;
  /// In shared memory: two buffers of counters by digit, their sums by warp,
  /// and what is chosen; and where a thread may list its logits, or null.
  Val counters, sumsOfWarps, chosen, list;
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
    int64_t blocks = 1;
    if (target.chip.hasClusters)
      while (blocks < kMaxBlocks && size > kTogether * threads * blocks)
        blocks *= 2;
    Value rows = e.rowCount(logits);
    auto emit = [&](int64_t blocks) {
      emitSample(e, op, {logits, random, temperatures, topKs, topPs, out, next},
                 rows, threads, blocks);
    };
    // Many rows have all multiprocessors at work by themselves, and less to
    // tell each other.
    if (blocks == 1)
      emit(1);
    else
      e.ifThen(
          e.cmp(arith::CmpIPredicate::sle, e.mul(rows, blocks),
                e.index(kWaves * target.multiprocessors)),
          [&] { emit(blocks); }, [&] { emit(1); });
    e.replaceWith({out, next});
    return success();
  }

private:
  struct Buffers {
    Value logits, random, temperature, topK, topP, out, next;
  };
  void emitSample(GPULowering &e, SampleOp op, const Buffers &buffers,
                  Value rows, int64_t threads, int64_t blocks) const {
    int64_t size = op.getLogits().getType().getShape().back();
    Value logits = buffers.logits;
    KernelBuilder k(e.host, e.loc, e.kernels, "sample", {threads, 0});
    DeviceTensor x(e, k, logits), ids(e, k, buffers.out),
        randoms(e, k, buffers.random), nextRandoms(e, k, buffers.next),
        temperature(e, k, buffers.temperature), topK(e, k, buffers.topK),
        topP(e, k, buffers.topP);
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
      Team team(k, blocks);
      Row row(team, x, leading, size, rowAlignment(op.getLogits()));
      Val isLeader = (k.threadIdx() == 0) & (k.blockIdx('x') == 0);
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
      ends = team.reduce(ends, [&](ArrayRef<Val> a, ArrayRef<Val> b) -> Vals {
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
          [&] { k.ifThen(isLeader, [&] { store(ends[1]); }); });
      k.ifThen(isLeader, [&] {
        counter[2] = k.wrap(arith::AddIOp::create(k.b, k.loc, counter[2].value,
                                                  k.i64(1).value));
        for (auto [i, value] : llvm::enumerate(counter))
          k.store(value, nextRandoms.at(leading, k.i32(i)));
      });
      // A block that has ended has no memory that others could read.
      if (blocks > 1)
        team.sync();
    });
    k.launch(e.gridOf(e.index(blocks), rows), blocks);
  }
};
} // namespace

void corey::populateGPUSampleLowerings(RewritePatternSet &patterns,
                                       GPUTarget target) {
  patterns.add<SampleLowering>(patterns.getContext(), target);
}
