//===- Sampling.cpp - Draws from logits on the CPU ------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// Compiled without contraction: every operation on f32 rounds by itself, as in
// the kernels of GPUs.
//
//===----------------------------------------------------------------------===//

#include "corey/Device/Sampling.h"
#include "corey/Device/RuntimeABI.h"
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

using namespace corey::sampling;

namespace {
/// A logit that may be drawn.
struct Candidate {
  float logit;
  int32_t index;
  uint64_t weight;
};
} // namespace

/// Whether `a` is kept before `b`.
static bool isBefore(const Candidate &a, const Candidate &b) {
  return a.logit != b.logit ? a.logit > b.logit : a.index < b.index;
}

static uint64_t weightOf(float exponent, int bits) {
  exponent = std::max(exponent, kLeastExponent);
  float biased = exponent + kRounding;
  float rest = exponent - (biased - kRounding);
  float power = kPower[0];
  for (size_t i = 1; i < std::size(kPower); ++i)
    power = power * rest + kPower[i];
  uint64_t mantissa = static_cast<uint32_t>(power * 0x1p24f);
  return mantissa << (bits - 24) >> static_cast<int>(kRounding - biased);
}

/// The first two words of Philox4x32-10.
static uint64_t randomBits(uint64_t seed, uint64_t sequence, uint64_t draws) {
  uint32_t key[] = {static_cast<uint32_t>(seed),
                    static_cast<uint32_t>(seed >> 32)};
  uint32_t words[] = {
      static_cast<uint32_t>(draws), static_cast<uint32_t>(draws >> 32),
      static_cast<uint32_t>(sequence), static_cast<uint32_t>(sequence >> 32)};
  for (int round = 0; round < kRounds; ++round) {
    uint64_t first = uint64_t(kMultipliers[0]) * words[0],
             second = uint64_t(kMultipliers[1]) * words[2];
    words[0] = static_cast<uint32_t>(second >> 32) ^ words[1] ^ key[0];
    words[1] = static_cast<uint32_t>(second);
    words[2] = static_cast<uint32_t>(first >> 32) ^ words[3] ^ key[1];
    words[3] = static_cast<uint32_t>(first);
    for (int i : {0, 1})
      key[i] += kKeySteps[i];
  }
  return words[0] | static_cast<uint64_t>(words[1]) << 32;
}

/// floor(a b / 2^64), of which b is below 2^63.
static uint64_t multiplyHigh(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
}

/// The shortest prefix, in the order of isBefore(), whose weights sum up to
/// `target` or more, which is at least 1 and no more than the sum of all. The
/// prefix is in front then, in any order.
static size_t selectMass(std::vector<Candidate> &candidates, uint64_t target) {
  size_t begin = 0, end = candidates.size();
  uint64_t before = 0;
  // The prefix ends behind one of [begin, end).
  while (end - begin > 1) {
    size_t middle = begin + (end - begin) / 2;
    auto at = [&](size_t i) {
      return candidates.begin() + static_cast<std::ptrdiff_t>(i);
    };
    std::nth_element(at(begin), at(middle), at(end), isBefore);
    uint64_t sum = before;
    for (size_t i = begin; i < middle; ++i)
      sum += candidates[i].weight;
    if (sum >= target) {
      end = middle;
    } else {
      before = sum;
      begin = middle;
    }
  }
  return end;
}

int64_t corey_rt_sample(int64_t logits, int64_t size, float temperature,
                        int32_t topK, float topP, int64_t seed,
                        int64_t sequence, int64_t draws) {
  auto *x = reinterpret_cast<const float *>(logits);
  int64_t best = 0;
  for (int64_t i = 0; i < size; ++i) {
    if (std::isnan(x[i])) {
      best = i;
      break;
    }
    if (x[i] > x[best])
      best = i;
  }
  if (!(temperature > 0) || !std::isfinite(x[best]))
    return best;

  int bits = weightBits(size);
  float scale =
      std::min(kLog2E / temperature, std::numeric_limits<float>::max());
  // What has no weight is never drawn, and makes room for nothing either.
  static thread_local std::vector<Candidate> all, kept;
  all.clear();
  for (int64_t i = 0; i < size; ++i) {
    // An infinite distance times a scale of 0 is as far.
    float exponent = (x[i] - x[best]) * scale;
    if (!(exponent > -static_cast<float>(bits + 2)))
      continue;
    if (uint64_t weight = weightOf(exponent, bits))
      all.push_back({x[i], static_cast<int32_t>(i), weight});
  }
  kept = all;
  if (topK > 0 && static_cast<size_t>(topK) < kept.size()) {
    std::nth_element(kept.begin(), kept.begin() + topK - 1, kept.end(),
                     isBefore);
    kept.resize(static_cast<size_t>(topK));
  }
  uint64_t total = 0;
  for (const Candidate &each : kept)
    total += each.weight;
  if (topP < 1) {
    uint64_t share = topP > 0 ? static_cast<uint64_t>(topP * 0x1p32f) : 0;
    uint64_t low = (total & 0xFFFFFFFF) * share;
    uint64_t target =
        (total >> 32) * share + (low >> 32) + ((low & 0xFFFFFFFF) != 0 ? 1 : 0);
    kept.resize(selectMass(kept, std::max<uint64_t>(target, 1)));
    total = 0;
    for (const Candidate &each : kept)
      total += each.weight;
  }
  uint64_t left = multiplyHigh(randomBits(static_cast<uint64_t>(seed),
                                          static_cast<uint64_t>(sequence),
                                          static_cast<uint64_t>(draws)),
                               total);
  const Candidate last = *std::max_element(kept.begin(), kept.end(), isBefore);
  for (const Candidate &each : all) {
    if (isBefore(last, each))
      continue;
    if (left < each.weight)
      return each.index;
    left -= each.weight;
  }
  // Not reached: `left` is below the sum of all weights.
  return last.index;
}
