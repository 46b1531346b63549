//===- ChunkRule.cpp - Entropy to chunk -----------------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Scheduler/ChunkRule.h"
#include <algorithm>
#include <cmath>

using namespace corey;
using namespace corey::scheduler;

/// Half to even whatever the rounding mode of the process is.
static double roundHalfEven(double x) {
  double down = std::floor(x), rest = x - down;
  if (rest != 0.5)
    return rest < 0.5 ? down : down + 1;
  return std::fmod(down, 2) == 0 ? down : down + 1;
}

static int64_t tileFromRatio(double ratio) {
  double raw = 64 + 448 * std::clamp(ratio, 0.0, 1.0);
  return 32 * static_cast<int64_t>(roundHalfEven(raw / 32));
}

int64_t scheduler::tile32(Bits entropy) {
  return tileFromRatio(entropy.value() / 8);
}
int64_t scheduler::tile32FromNormalized(double normalized) {
  return tileFromRatio(normalized);
}

const std::vector<ChunkRule> &ChunkRule::all() {
  static const std::vector<ChunkRule> rules = {
      {Kind::PowerOfTwo, "legacy", 32, 512, 8.0},
      {Kind::PowerOfTwo, "calibrated", 32, 512, 0},
      {Kind::PowerOfTwo, "routed", 128, 512, 0},
      {Kind::PowerOfTwo, "confirm", 128, 1024, 0},
      {Kind::PowerOfTwo, "unified", 128, 2048, 0},
      {Kind::Tile32, "tile32", 64, 512, 0},
      {Kind::Coarse, "coarse", 32, 512, 0},
      {Kind::Profile, "profile", 32, 512, 0}};
  return rules;
}

Expected<ChunkRule> ChunkRule::named(std::string_view name) {
  std::string known;
  for (const ChunkRule &rule : all()) {
    if (rule.ruleName == name)
      return rule;
    known += (known.empty() ? "" : ", ") + rule.ruleName;
  }
  return Status::notFound("expected a chunk rule of " + known + ", got '" +
                          std::string(name) + "'");
}

const std::vector<std::string> &ChunkRule::names() {
  static const std::vector<std::string> list = [] {
    std::vector<std::string> names;
    for (const ChunkRule &rule : all())
      names.push_back(rule.ruleName);
    return names;
  }();
  return list;
}

Expected<ChunkRule> ChunkRule::powerOfTwo(int64_t minimum, int64_t maximum,
                                          double reference) {
  constexpr int64_t kLargest = int64_t(1) << 40;
  if (minimum < 1 || minimum > kLargest)
    return Status::invalidArgument(
        "expected the least chunk of a rule to be from 1 to 2^40, got " +
        std::to_string(minimum));
  if (maximum < minimum || maximum > kLargest)
    return Status::invalidArgument(
        "expected the largest chunk of a rule to be from " +
        std::to_string(minimum) + " to 2^40, got " + std::to_string(maximum));
  if (!std::isfinite(reference) || reference < 0)
    return Status::invalidArgument(
        "expected the reference entropy of a rule to be finite and at least 0, "
        "got " +
        std::to_string(reference));
  return ChunkRule(Kind::PowerOfTwo, "explicit", minimum, maximum, reference);
}

std::optional<int64_t> ChunkRule::chunk(Nats entropy, int64_t bins) const {
  if (!std::isfinite(entropy.value()))
    return std::nullopt;
  switch (ruleKind) {
  case Kind::PowerOfTwo: {
    double reference = hRef > 0 ? hRef : Nats::ceiling(bins).value();
    double r = reference > 0 ? std::min(entropy.value() / reference, 1.0) : 0;
    double raw =
        static_cast<double>(lowest) + r * static_cast<double>(highest - lowest);
    double exponent = roundHalfEven(std::log2(std::max(raw, 1.0)));
    return std::clamp(int64_t(1) << static_cast<int>(exponent), lowest,
                      highest);
  }
  case Kind::Tile32:
    return tile32(Bits(entropy));
  case Kind::Coarse: {
    int64_t tile = tile32(Bits(entropy)), best = 0;
    for (int64_t bucket : {32, 64, 128, 256, 512})
      if (best == 0 || std::abs(tile - bucket) < std::abs(tile - best))
        best = bucket;
    return best;
  }
  case Kind::Profile: {
    double ceiling = Nats::ceiling(bins).value();
    double h =
        ceiling > 0 ? std::clamp(entropy.value() / ceiling, 0.0, 1.0) : 0;
    int64_t c =
        std::clamp<int64_t>(32 + static_cast<int64_t>(480 * h), 32, 512);
    return 32 * ((c + 15) / 32);
  }
  }
  return std::nullopt;
}
