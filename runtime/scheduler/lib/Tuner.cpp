//===- Tuner.cpp - Measuring chunks ---------------------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Scheduler/Tuner.h"
#include "Splits.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>
#include <tuple>

using namespace corey;
using namespace corey::scheduler;

//===----------------------------------------------------------------------===//
// Candidates
//===----------------------------------------------------------------------===//

std::vector<Candidate>
corey::scheduler::defaultCandidates(const Problem &problem,
                                    const std::vector<Variant> &variants,
                                    int64_t least, int64_t units) {
  std::vector<Candidate> result;
  for (size_t i = 0; i < variants.size(); ++i) {
    // It is one of the others.
    if (variants[i].byRule && variants.size() > 1)
      continue;
    int variant = static_cast<int>(i);
    int64_t granularity = std::max<int64_t>(variants[i].granularity, 1);
    result.push_back({0, variant});
    if (problem.op == OpKind::SSD && variants[i].segmented) {
      // Segments that fill the device more often than that only carry more, and
      // take memory.
      constexpr int64_t kMostWaves = 8;
      Splits splits(problem, variants[i], units);
      int64_t most = splits.tiles;
      if (units > 0)
        most = std::min(
            most,
            std::max<int64_t>(kMostWaves * splits.slots / splits.blocks, 3));
      splits.forEachChunk(most, [&](int64_t chunk) {
        if (chunk >= least)
          result.push_back({chunk, variant});
      });
      continue;
    }
    int64_t last = 0;
    for (int64_t power = 1; power < problem.length; power *= 2) {
      if (power >= least) {
        int64_t missing = (granularity - power % granularity) % granularity;
        if (missing >= problem.length - power)
          break;
        // Small powers may be rounded up to the same.
        if (power + missing != last)
          result.push_back({last = power + missing, variant});
      }
      if (power > std::numeric_limits<int64_t>::max() / 2)
        break;
    }
  }
  return result;
}

//===----------------------------------------------------------------------===//
// Intervals
//===----------------------------------------------------------------------===//

/// The largest k such that the k-th smallest and the k-th largest of `count`
/// samples enclose the true median with at least `confidence`; 0 if none do.
/// They miss it on one side if fewer than k of the samples lie there: the
/// number that does is binomial with one half.
static size_t medianRank(size_t count, double confidence) {
  // Relative to the middle, so that nothing overflows, and what underflows does
  // not count.
  std::vector<double> weight(count + 1);
  size_t middle = count / 2;
  weight[middle] = 1;
  for (size_t i = middle; i > 0; --i)
    weight[i - 1] = weight[i] * double(i) / double(count - i + 1);
  for (size_t i = middle + 1; i <= count; ++i)
    weight[i] = weight[count - i];
  double total = std::accumulate(weight.begin(), weight.end(), 0.0);

  // Levels that are hit exactly must not be missed by a rounding error.
  double allowed = (1 - confidence) / 2 * (1 + 1e-12) + 1e-15;
  double tail = 0;
  size_t rank = 0;
  while (rank < (count + 1) / 2) {
    tail += weight[rank] / total;
    if (tail > allowed)
      break;
    ++rank;
  }
  return rank;
}

MedianInterval corey::scheduler::medianInterval(std::vector<double> &samples,
                                                double confidence) {
  if (samples.empty())
    return {};
  std::sort(samples.begin(), samples.end());
  size_t count = samples.size();
  double below = samples[(count - 1) / 2], above = samples[count / 2];
  size_t rank = std::max<size_t>(medianRank(count, confidence), 1);
  return {below + (above - below) / 2, samples[rank - 1],
          samples[count - rank]};
}

//===----------------------------------------------------------------------===//
// Tuning
//===----------------------------------------------------------------------===//

namespace {
/// SplitMix64: the orders are the same everywhere, which std::shuffle's are
/// not.
class Random {
public:
  explicit Random(uint64_t seed) : state(seed) {}

  uint64_t next() {
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }

  /// Any of 0 to bound - 1, equally likely.
  uint64_t below(uint64_t bound) {
    // The rest of 2^64 by the bound would come too often.
    uint64_t rest = (0 - bound) % bound;
    uint64_t number;
    do
      number = next();
    while (number < rest);
    return number % bound;
  }

  void shuffle(std::vector<size_t> &list) {
    for (size_t i = list.size(); i > 1; --i)
      std::swap(list[i - 1], list[below(i)]);
  }

private:
  uint64_t state;
};

/// A candidate and what was measured of it.
struct Runner {
  Candidate candidate;
  std::vector<double> times;
  MedianInterval interval;
};
} // namespace

static Status expected(const std::string &what, const std::string &got) {
  return Status::invalidArgument("expected " + what + ", got " + got);
}

static Status checkOptions(const TunerOptions &options) {
  if (options.minRounds < 1)
    return expected("minRounds of at least 1",
                    std::to_string(options.minRounds));
  if (options.maxRounds < options.minRounds)
    return expected("maxRounds of at least minRounds, " +
                        std::to_string(options.minRounds),
                    std::to_string(options.maxRounds));
  if (!(options.budgetMs >= 0))
    return expected("budgetMs of at least 0", std::to_string(options.budgetMs));
  if (!(options.confidence > 0 && options.confidence < 1))
    return expected("confidence between 0 and 1",
                    std::to_string(options.confidence));
  if (!(options.margin >= 0 && std::isfinite(options.margin)))
    return expected("a finite margin of at least 0",
                    std::to_string(options.margin));
  return Status::ok();
}

static Status checkVariants(const std::vector<Variant> &variants) {
  std::set<std::string> names;
  for (const Variant &variant : variants) {
    if (variant.granularity < 1)
      return expected("a granularity of at least 1 of variant '" +
                          variant.name + "'",
                      std::to_string(variant.granularity));
    if (!names.insert(variant.name).second)
      return expected("variants of different names",
                      "'" + variant.name + "' twice");
  }
  return Status::ok();
}

/// For messages.
static std::string nameOf(const Candidate &candidate,
                          const std::vector<Variant> &variants) {
  return "chunk " + std::to_string(candidate.chunk) + " of variant '" +
         variants[static_cast<size_t>(candidate.variant)].name + "'";
}

/// Checks the candidates and adds the unsplit ones that are missing.
static Status completeCandidates(std::vector<Candidate> &candidates,
                                 const std::vector<Variant> &variants) {
  if (candidates.empty())
    return expected("at least one candidate", "none");
  std::set<std::pair<int, int64_t>> seen;
  for (const Candidate &candidate : candidates) {
    if (candidate.variant < 0 ||
        static_cast<size_t>(candidate.variant) >= variants.size())
      return expected("a candidate's variant below " +
                          std::to_string(variants.size()),
                      std::to_string(candidate.variant));
    int64_t granularity =
        variants[static_cast<size_t>(candidate.variant)].granularity;
    if (candidate.chunk < 0 || candidate.chunk % granularity)
      return expected("0 or a positive multiple of " +
                          std::to_string(granularity),
                      nameOf(candidate, variants));
    if (!seen.insert({candidate.variant, candidate.chunk}).second)
      return expected("every candidate once",
                      nameOf(candidate, variants) + " twice");
  }
  for (size_t i = 0; i < variants.size(); ++i) {
    int variant = static_cast<int>(i);
    auto first = seen.lower_bound({variant, 0});
    if (first != seen.end() && first->first == variant && first->second != 0)
      candidates.push_back({0, variant});
  }
  return Status::ok();
}

Expected<TableEntry>
corey::scheduler::tune(const Device &device, const Problem &problem,
                       const std::vector<Variant> &variants,
                       std::vector<Candidate> candidates,
                       const Measure &measure, const TunerOptions &options) {
  auto begin = std::chrono::steady_clock::now();
  if (Status status = checkOptions(options); !status)
    return status;
  if (Status status = checkVariants(variants); !status)
    return status;
  if (Status status = completeCandidates(candidates, variants); !status)
    return status;
  if (!measure)
    return expected("a function that measures", "none");

  TableEntry entry;
  entry.device = device.name;
  entry.units = device.units;
  entry.problem = problem;
  entry.batch = {problem.batch, problem.batch};
  double length = static_cast<double>(problem.length), root = std::sqrt(2.0);
  entry.length.low = static_cast<int64_t>(std::ceil(length / root));
  // A double that large is no length.
  entry.length.high = length * root < 9e18
                          ? static_cast<int64_t>(std::floor(length * root))
                          : std::numeric_limits<int64_t>::max();
  // What no table could hold is not worth the time.
  entry.candidates.resize(candidates.size());
  for (size_t i = 0; i < candidates.size(); ++i) {
    const Variant &variant =
        variants[static_cast<size_t>(candidates[i].variant)];
    entry.candidates[i] = {candidates[i].chunk, variant.name, 1, 1, 1, 1};
  }
  if (Status status = ChunkTable().add(entry); !status)
    return status;

  std::vector<Runner> runners;
  for (const Candidate &candidate : candidates)
    runners.push_back({candidate, {}, {}});
  Random random(options.seed);

  /// Runs each of `alive` once in a random order.
  auto runRound = [&](std::vector<size_t> alive, bool record) -> Status {
    random.shuffle(alive);
    for (size_t index : alive) {
      Runner &runner = runners[index];
      Expected<double> time = measure(runner.candidate);
      if (!time)
        return time.takeStatus();
      if (!(std::isfinite(*time) && *time > 0))
        return expected("a time that is finite and above 0 for " +
                            nameOf(runner.candidate, variants),
                        std::to_string(*time));
      if (record)
        runner.times.push_back(*time);
    }
    return Status::ok();
  };
  /// Computes the intervals and returns the index of the fastest.
  auto evaluate = [&] {
    size_t best = 0;
    for (size_t i = 0; i < runners.size(); ++i) {
      std::vector<double> sorted = runners[i].times;
      runners[i].interval = medianInterval(sorted, options.confidence);
      if (runners[i].interval.median < runners[best].interval.median)
        best = i;
    }
    return best;
  };

  std::vector<size_t> alive(runners.size());
  std::iota(alive.begin(), alive.end(), size_t(0));
  if (Status status = runRound(alive, /*record=*/false); !status)
    return status;
  for (int round = 1; round <= options.maxRounds; ++round) {
    std::chrono::duration<double, std::milli> spent =
        std::chrono::steady_clock::now() - begin;
    if (round > 1 && spent.count() >= options.budgetMs)
      break;
    if (Status status = runRound(alive, /*record=*/true); !status)
      return status;
    if (round < options.minRounds)
      continue;
    // Who has left is looked at again: if the machine has become slower since,
    // the times of then would win against those of now.
    size_t fastest = evaluate();
    const MedianInterval &best = runners[fastest].interval;
    bool settled = true;
    alive.clear();
    for (size_t i = 0; i < runners.size(); ++i) {
      const MedianInterval &interval = runners[i].interval;
      if (interval.low > best.high * (1 + options.margin))
        continue;
      alive.push_back(i);
      settled &=
          i == fastest || interval.high <= best.low * (1 + options.margin);
    }
    // One that is alone has settled too.
    if (settled)
      break;
  }

  evaluate();
  for (size_t i = 0; i < runners.size(); ++i) {
    MeasuredCandidate &result = entry.candidates[i];
    const MedianInterval &interval = runners[i].interval;
    result.medianMs = interval.median;
    result.lowMs = interval.low;
    result.highMs = interval.high;
    result.runs = static_cast<int64_t>(runners[i].times.size());
  }
  return entry;
}
