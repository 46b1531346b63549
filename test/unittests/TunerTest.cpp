//===- TunerTest.cpp - Tests of measuring chunks --------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Scheduler/Tuner.h"

#include "gtest/gtest.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <thread>

using namespace corey;
using namespace corey::scheduler;

namespace {
constexpr double Inf = std::numeric_limits<double>::infinity();

//===----------------------------------------------------------------------===//
// Helpers
//===----------------------------------------------------------------------===//

template <class T> T take(Expected<T> value) {
  if (!value) {
    ADD_FAILURE() << value.status().toString();
    std::abort();
  }
  return *std::move(value);
}

/// A generator that is the same everywhere.
class Noise {
public:
  explicit Noise(uint64_t seed = 1) : state(seed) {}
  /// Evenly from [0, 1).
  double uniform() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return static_cast<double>(state >> 11) / 9007199254740992.0;
  }
  /// Normal, by the sum of twelve.
  double normal() {
    double sum = -6;
    for (int i = 0; i < 12; ++i)
      sum += uniform();
    return sum;
  }

private:
  uint64_t state;
};

Device makeDevice() {
  Device device;
  device.name = "cpu-znver1";
  device.units = 2;
  return device;
}

Problem makeProblem(int64_t length = 512) {
  Problem problem;
  problem.batch = 3;
  problem.length = length;
  problem.channels = 256;
  problem.states = 16;
  return problem;
}

Variant makeVariant(const std::string &name, int64_t granularity = 1) {
  Variant variant;
  variant.name = name;
  variant.granularity = granularity;
  return variant;
}

const std::vector<Variant> OneVariant = {makeVariant("default")};

TunerOptions makeOptions() {
  TunerOptions options;
  // Tests must not depend on how fast the machine is.
  options.budgetMs = Inf;
  return options;
}

using Call = std::pair<int, int64_t>;

/// A scan whose times are known, and the calls it got.
struct Machine {
  std::function<double(const Candidate &)> time;
  double noise = 0;
  Noise random;
  std::vector<Call> calls;

  Measure measure() {
    return [this](const Candidate &candidate) -> Expected<double> {
      calls.push_back({candidate.variant, candidate.chunk});
      return time(candidate) * (1 + noise * random.uniform());
    };
  }
};

/// The usual curve: overhead of many chunks, and of big ones. Best at 64.
double curve(const Candidate &candidate) {
  double chunk = candidate.chunk ? static_cast<double>(candidate.chunk) : 512.0;
  double steps = std::log2(chunk / 64);
  return 1 + 0.1 * steps * steps;
}

void expectRefused(const Expected<TableEntry> &entry,
                   const std::string &message) {
  ASSERT_FALSE(entry);
  EXPECT_EQ(entry.status().code(), StatusCode::InvalidArgument);
  EXPECT_EQ(entry.status().message(), message);
}

std::vector<Call> asCalls(const std::vector<Candidate> &candidates) {
  std::vector<Call> calls;
  for (const Candidate &candidate : candidates)
    calls.push_back({candidate.variant, candidate.chunk});
  return calls;
}

const MeasuredCandidate &find(const TableEntry &entry, int64_t chunk) {
  for (const MeasuredCandidate &candidate : entry.candidates)
    if (candidate.chunk == chunk)
      return candidate;
  ADD_FAILURE() << "no chunk " << chunk;
  std::abort();
}

//===----------------------------------------------------------------------===//
// Candidates
//===----------------------------------------------------------------------===//

TEST(Tuner, DefaultCandidatesArePowersOfTwoBelowTheLength) {
  auto candidates = [](int64_t length, int64_t granularity, int64_t least) {
    std::vector<int64_t> chunks;
    for (const Candidate &candidate : defaultCandidates(
             makeProblem(length), {makeVariant("default", granularity)}, least))
      chunks.push_back(candidate.chunk);
    return chunks;
  };
  using Chunks = std::vector<int64_t>;
  EXPECT_EQ(candidates(512, 1, 16), Chunks({0, 16, 32, 64, 128, 256}));
  EXPECT_EQ(candidates(513, 1, 16), Chunks({0, 16, 32, 64, 128, 256, 512}));
  EXPECT_EQ(candidates(16, 1, 16), Chunks({0}));
  EXPECT_EQ(candidates(17, 1, 16), Chunks({0, 16}));
  EXPECT_EQ(candidates(1, 1, 1), Chunks({0}));
  EXPECT_EQ(candidates(8, 1, 1), Chunks({0, 1, 2, 4}));
  EXPECT_EQ(candidates(8, 1, -5), Chunks({0, 1, 2, 4}));
  EXPECT_EQ(candidates(100, 1, 20), Chunks({0, 32, 64}));
  EXPECT_EQ(candidates(512, 64, 16), Chunks({0, 64, 128, 256}));
  EXPECT_EQ(candidates(100, 24, 16), Chunks({0, 24, 48, 72}));
  EXPECT_EQ(candidates(72, 24, 16), Chunks({0, 24, 48}));
  EXPECT_EQ(candidates(64, 64, 16), Chunks({0}));
  EXPECT_EQ(candidates(std::numeric_limits<int64_t>::max(), 1, 1).size(), 64u);
  EXPECT_EQ(candidates(std::numeric_limits<int64_t>::max(),
                       std::numeric_limits<int64_t>::max(), 1),
            Chunks({0}));
}

TEST(Tuner, DefaultCandidatesAreThoseOfEveryVariant) {
  EXPECT_EQ(asCalls(defaultCandidates(
                makeProblem(64), {makeVariant("a"), makeVariant("b", 32)}, 16)),
            std::vector<Call>({{0, 0}, {0, 16}, {0, 32}, {1, 0}, {1, 32}}));
  EXPECT_TRUE(defaultCandidates(makeProblem(), {}).empty());
}

TEST(Tuner, DefaultCandidatesOfAnSSDAreNumbersOfSegments) {
  using Chunks = std::vector<int64_t>;
  Problem problem = makeProblem(4096);
  problem.op = OpKind::SSD;
  problem.batch = 1;
  problem.channels = 80;
  problem.states = 128;
  Variant variant = makeVariant("tensor_core", 64);
  variant.itemChannels = 2;
  variant.tile = 64;
  variant.segmented = true;
  auto candidates = [&](int64_t units, int64_t least = 16) {
    Chunks chunks;
    for (const Candidate &candidate :
         defaultCandidates(problem, {variant}, least, units))
      chunks.push_back(candidate.chunk);
    return chunks;
  };
  // 64 tiles in 2, 3, 4, 6, 8, 12, 16 and 24 segments of 40 blocks: up to eight
  // times 132.
  EXPECT_EQ(candidates(132),
            Chunks({0, 2048, 1408, 1024, 704, 512, 384, 256, 192}));
  EXPECT_EQ(candidates(132, 500), Chunks({0, 2048, 1408, 1024, 704, 512}));
  // Of any device: down to one tile.
  EXPECT_EQ(candidates(0),
            Chunks({0, 2048, 1408, 1024, 704, 512, 384, 256, 192, 128, 64}));
  // 26 blocks: five segments fill the device, ten twice.
  problem.channels = 52;
  EXPECT_EQ(candidates(132), Chunks({0, 2048, 1408, 1024, 832, 704, 512, 448,
                                     384, 256, 192, 128}));
  // Ragged, and fewer tiles than segments.
  problem.length = 293;
  EXPECT_EQ(candidates(132), Chunks({0, 192, 128, 64}));
  problem.length = 64;
  EXPECT_EQ(candidates(132), Chunks({0}));
  problem.length = 65;
  EXPECT_EQ(candidates(132), Chunks({0, 64}));
  problem.length = 0;
  EXPECT_EQ(candidates(132), Chunks({0}));
  // Of two groups of 13 heads: 14 blocks rather than 13.
  problem.length = 1 << 20;
  problem.channels = 26;
  problem.groups = 2;
  Chunks ofGroups = candidates(132);
  EXPECT_EQ(1,
            std::count(ofGroups.begin(), ofGroups.end(), (16384 + 8) / 9 * 64));
  EXPECT_EQ(
      0, std::count(ofGroups.begin(), ofGroups.end(), (16384 + 9) / 10 * 64));
  // A kernel that walks chunks in order has powers of two.
  variant.segmented = false;
  problem.length = 300;
  EXPECT_EQ(candidates(132), Chunks({0, 64, 128, 256}));
}

//===----------------------------------------------------------------------===//
// Intervals
//===----------------------------------------------------------------------===//

TEST(Tuner, MedianIntervalsAreThoseOfTheTables) {
  // The ranks that tables of the sign test give for 95 % and 99 %.
  struct Row {
    size_t count, rank95, rank99;
  };
  for (Row row :
       {Row{6, 1, 0}, Row{7, 1, 0}, Row{8, 1, 1}, Row{9, 2, 1}, Row{10, 2, 1},
        Row{12, 3, 2}, Row{15, 4, 3}, Row{20, 6, 4}, Row{25, 8, 6},
        Row{30, 10, 8}, Row{40, 14, 12}, Row{50, 18, 16}, Row{100, 40, 37}}) {
    for (auto [confidence, rank] :
         {std::make_pair(0.95, row.rank95), std::make_pair(0.99, row.rank99)}) {
      std::vector<double> samples(row.count);
      std::iota(samples.begin(), samples.end(), 1.0);
      std::reverse(samples.begin(), samples.end());
      MedianInterval interval = medianInterval(samples, confidence);
      double count = static_cast<double>(row.count);
      double low = std::max<double>(static_cast<double>(rank), 1);
      EXPECT_EQ(interval.low, low) << row.count;
      EXPECT_EQ(interval.high, count + 1 - low) << row.count;
      EXPECT_EQ(interval.median, (count + 1) / 2) << row.count;
      EXPECT_TRUE(std::is_sorted(samples.begin(), samples.end()));
    }
  }
}

TEST(Tuner, MedianIntervalsOfFewAreTheWholeRange) {
  for (size_t count = 1; count < 6; ++count) {
    std::vector<double> samples(count);
    std::iota(samples.begin(), samples.end(), 1.0);
    MedianInterval interval = medianInterval(samples, 0.95);
    EXPECT_EQ(interval.low, 1);
    EXPECT_EQ(interval.high, static_cast<double>(count));
  }
  std::vector<double> none;
  EXPECT_EQ(medianInterval(none, 0.95).median, 0);
  // 1 - 2 / 2^5 and 1 - 2 / 2^6 are met exactly.
  std::vector<double> samples = {1, 2, 3, 4, 5, 6};
  EXPECT_EQ(medianInterval(samples, 1 - 14.0 / 64).low, 2);
  EXPECT_EQ(medianInterval(samples, 1 - 13.9 / 64).low, 1);
  // Very low levels leave what lies next to the middle.
  EXPECT_EQ(medianInterval(samples, 1e-9).low, 3);
  EXPECT_EQ(medianInterval(samples, 1e-9).high, 4);
  samples = {1, 2, 3, 4, 5};
  EXPECT_EQ(medianInterval(samples, 1e-9).low, 2);
  EXPECT_EQ(medianInterval(samples, 1e-9).high, 4);
  samples = {2, 2, 2, 2, 2, 2, 2};
  EXPECT_EQ(medianInterval(samples, 0.95).low, 2);
  EXPECT_EQ(medianInterval(samples, 0.95).high, 2);
}

TEST(Tuner, MedianIntervalsOfManyAreTheNormalOnes) {
  size_t count = 100000;
  std::vector<double> samples(count);
  std::iota(samples.begin(), samples.end(), 0.0);
  MedianInterval interval = medianInterval(samples, 0.95);
  double half = 1.959964 * std::sqrt(static_cast<double>(count)) / 2;
  EXPECT_NEAR(interval.low, interval.median - half, 2);
  EXPECT_NEAR(interval.high, interval.median + half, 2);
}

TEST(Tuner, MedianIntervalsCoverAsOftenAsTheySay) {
  Noise noise(7);
  for (double confidence : {0.8, 0.95})
    for (size_t count : {6, 11, 20, 57}) {
      int covered = 0, trials = 4000;
      double width = 0;
      for (int trial = 0; trial < trials; ++trial) {
        // Skewed, as times are; the median is ln 2.
        std::vector<double> samples(count);
        for (double &sample : samples)
          sample = -std::log(1 - noise.uniform());
        MedianInterval interval = medianInterval(samples, confidence);
        covered +=
            interval.low <= std::log(2.0) && std::log(2.0) <= interval.high;
        width += interval.high - interval.low;
        ASSERT_LE(interval.low, interval.median);
        ASSERT_LE(interval.median, interval.high);
      }
      double share = static_cast<double>(covered) / trials;
      // At least the level, but for chance, and not much more of many.
      EXPECT_GE(share, confidence - 0.015) << count;
      if (count > 20) {
        EXPECT_LE(share, confidence + 0.09) << count;
      }
      EXPECT_GT(width, 0);
    }
}

//===----------------------------------------------------------------------===//
// The race
//===----------------------------------------------------------------------===//

TEST(Tuner, FindsTheWinner) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Machine machine{curve, 0.05, Noise(seed * 977), {}};
    TunerOptions options = makeOptions();
    options.seed = seed;
    TableEntry entry = take(tune(makeDevice(), makeProblem(), OneVariant,
                                 defaultCandidates(makeProblem(), OneVariant),
                                 machine.measure(), options));
    EXPECT_EQ(entry.best().chunk, 64);
    EXPECT_NEAR(entry.best().medianMs, 1.025, 0.02);
    ASSERT_EQ(entry.candidates.size(), 6u);
    for (const MeasuredCandidate &candidate : entry.candidates) {
      double true_ = curve({candidate.chunk, 0});
      EXPECT_LE(true_, candidate.lowMs);
      EXPECT_LE(candidate.lowMs, candidate.medianMs);
      EXPECT_LE(candidate.medianMs, candidate.highMs);
      EXPECT_LE(candidate.highMs, true_ * 1.05);
      EXPECT_GE(candidate.runs, options.minRounds);
      EXPECT_LE(candidate.runs, options.maxRounds);
      EXPECT_EQ(candidate.variant, "default");
    }
  }
}

TEST(Tuner, FindsTheWinnerAmongVariants) {
  Machine machine{[](const Candidate &candidate) {
                    return curve(candidate) *
                           (candidate.variant == 1 ? 0.5 : 1);
                  },
                  0.05,
                  Noise(),
                  {}};
  std::vector<Variant> variants = {makeVariant("a"), makeVariant("b", 16),
                                   makeVariant("c")};
  TableEntry entry =
      take(tune(makeDevice(), makeProblem(), variants,
                {{64, 0}, {64, 1}, {32, 1}}, machine.measure(), makeOptions()));
  EXPECT_EQ(entry.best().chunk, 64);
  EXPECT_EQ(entry.best().variant, "b");
  // Unsplit of the variants that occur were added, and none of the third.
  std::set<std::pair<std::string, int64_t>> measured;
  for (const MeasuredCandidate &candidate : entry.candidates)
    measured.insert({candidate.variant, candidate.chunk});
  EXPECT_EQ(measured,
            (std::set<std::pair<std::string, int64_t>>{
                {"a", 0}, {"a", 64}, {"b", 0}, {"b", 32}, {"b", 64}}));
}

TEST(Tuner, PrefersUnsplitIfNothingIsGained) {
  Machine machine{[](const Candidate &candidate) {
                    return candidate.chunk == 64 ? 0.999 : 1.0;
                  },
                  0.1,
                  Noise(),
                  {}};
  TableEntry entry = take(tune(makeDevice(), makeProblem(), OneVariant,
                               {{64, 0}}, machine.measure(), makeOptions()));
  EXPECT_EQ(entry.best().chunk, 0);
}

TEST(Tuner, EntrySpeaksForLengthsAround) {
  Machine machine{curve, 0, Noise(), {}};
  auto range = [&](int64_t length) {
    TableEntry entry = take(tune(makeDevice(), makeProblem(length), OneVariant,
                                 {{0, 0}}, machine.measure(), makeOptions()));
    EXPECT_EQ(entry.device, "cpu-znver1");
    EXPECT_EQ(entry.units, 2);
    EXPECT_EQ(entry.problem.length, length);
    EXPECT_EQ(entry.problem.channels, 256);
    EXPECT_EQ(entry.batch.low, 3);
    EXPECT_EQ(entry.batch.high, 3);
    EXPECT_TRUE(ChunkTable().add(entry).isOk());
    return std::make_pair(entry.length.low, entry.length.high);
  };
  using Pair = std::pair<int64_t, int64_t>;
  EXPECT_EQ(range(512), Pair(363, 724));
  EXPECT_EQ(range(1024), Pair(725, 1448));
  EXPECT_EQ(range(1), Pair(1, 1));
  EXPECT_EQ(range(2), Pair(2, 2));
  EXPECT_EQ(range(3), Pair(3, 4));
  int64_t most = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(range(most).second, most);
}

TEST(Tuner, RoundsArePermutations) {
  std::vector<Candidate> candidates =
      defaultCandidates(makeProblem(), OneVariant);
  size_t count = candidates.size();
  Machine machine{curve, 1, Noise(), {}};
  TunerOptions options = makeOptions();
  // Nobody leaves.
  options.margin = 100;
  options.minRounds = 30;
  TableEntry entry = take(tune(makeDevice(), makeProblem(), OneVariant,
                               candidates, machine.measure(), options));
  // One round warms up; all others are within the margin as soon as they may.
  ASSERT_EQ(machine.calls.size(), 31 * count);
  std::vector<Call> all = asCalls(candidates);
  std::sort(all.begin(), all.end());
  std::set<std::vector<Call>> orders;
  std::map<Call, int> firsts;
  for (size_t round = 0; round <= 30; ++round) {
    std::vector<Call> calls(machine.calls.begin() + round * count,
                            machine.calls.begin() + (round + 1) * count);
    orders.insert(calls);
    ++firsts[calls[0]];
    std::sort(calls.begin(), calls.end());
    EXPECT_EQ(calls, all);
  }
  EXPECT_GT(orders.size(), 25u);
  EXPECT_GE(firsts.size(), 5u);
  for (const MeasuredCandidate &candidate : entry.candidates)
    EXPECT_EQ(candidate.runs, 30);
}

TEST(Tuner, OrdersFollowTheSeed) {
  auto calls = [](uint64_t seed) {
    Machine machine{curve, 0.05, Noise(), {}};
    TunerOptions options = makeOptions();
    options.seed = seed;
    take(tune(makeDevice(), makeProblem(), OneVariant,
              defaultCandidates(makeProblem(), OneVariant), machine.measure(),
              options));
    return machine.calls;
  };
  EXPECT_EQ(calls(1), calls(1));
  EXPECT_NE(calls(1), calls(2));
  EXPECT_NE(calls(0), calls(1));
}

TEST(Tuner, WarmUpDoesNotCount) {
  std::set<int64_t> seen;
  Measure measure = [&](const Candidate &candidate) -> Expected<double> {
    return seen.insert(candidate.chunk).second ? 1000.0 : curve(candidate);
  };
  TableEntry entry = take(tune(makeDevice(), makeProblem(), OneVariant,
                               {{64, 0}, {16, 0}}, measure, makeOptions()));
  for (const MeasuredCandidate &candidate : entry.candidates)
    EXPECT_LT(candidate.highMs, 10);
}

TEST(Tuner, LosersLeaveEarly) {
  Machine machine{
      [](const Candidate &candidate) {
        return candidate.chunk == 64 ? 1.0 : candidate.chunk == 32 ? 1.03 : 2.0;
      },
      0.05,
      Noise(),
      {}};
  TunerOptions options = makeOptions();
  TableEntry entry = take(tune(makeDevice(), makeProblem(), OneVariant,
                               {{16, 0}, {32, 0}, {64, 0}, {128, 0}},
                               machine.measure(), options));
  EXPECT_EQ(entry.best().chunk, 64);
  for (int64_t chunk : {0, 16, 128})
    EXPECT_EQ(find(entry, chunk).runs, options.minRounds);
  EXPECT_GT(find(entry, 64).runs, options.minRounds);
  EXPECT_EQ(find(entry, 64).runs, find(entry, 32).runs);
}

TEST(Tuner, EndsWhenTheWinnerIsClear) {
  Machine machine{curve, 0.02, Noise(), {}};
  TunerOptions options = makeOptions();
  options.minRounds = 6;
  take(tune(makeDevice(), makeProblem(), OneVariant,
            defaultCandidates(makeProblem(), OneVariant), machine.measure(),
            options));
  EXPECT_EQ(machine.calls.size(), 7u * 6);
}

TEST(Tuner, EndsWhenTheChoiceDoesNotMatter) {
  Machine machine{[](const Candidate &) { return 1.0; }, 0.005, Noise(), {}};
  take(tune(makeDevice(), makeProblem(), OneVariant,
            defaultCandidates(makeProblem(), OneVariant), machine.measure(),
            makeOptions()));
  EXPECT_EQ(machine.calls.size(), 6u * 6);
}

TEST(Tuner, EndsAfterMaxRounds) {
  Machine machine{[](const Candidate &) { return 1.0; }, 3, Noise(), {}};
  TunerOptions options = makeOptions();
  options.maxRounds = 17;
  TableEntry entry = take(tune(makeDevice(), makeProblem(), OneVariant,
                               {{64, 0}}, machine.measure(), options));
  EXPECT_EQ(machine.calls.size(), 18u * 2);
  for (const MeasuredCandidate &candidate : entry.candidates)
    EXPECT_EQ(candidate.runs, 17);
}

TEST(Tuner, EndsWithOneCandidate) {
  Machine machine{curve, 3, Noise(), {}};
  TableEntry entry = take(tune(makeDevice(), makeProblem(), OneVariant,
                               {{0, 0}}, machine.measure(), makeOptions()));
  EXPECT_EQ(machine.calls.size(), 6u);
  EXPECT_EQ(entry.best().chunk, 0);
}

TEST(Tuner, NobodyWinsByHavingLeftBeforeTheMachineSlowedDown) {
  // Twice as slow after the losers have left: their old times are better than
  // the winner's new ones, and they are measured again.
  int calls = 0;
  Noise noise;
  Measure measure = [&](const Candidate &candidate) -> Expected<double> {
    double slow = ++calls > 40 ? 2 : 1;
    double time = candidate.chunk == 64   ? 1.0
                  : candidate.chunk == 32 ? 1.005
                                          : 1.2;
    return time * slow * (1 + 0.1 * noise.uniform());
  };
  TableEntry entry =
      take(tune(makeDevice(), makeProblem(), OneVariant,
                {{16, 0}, {32, 0}, {64, 0}}, measure, makeOptions()));
  EXPECT_GT(find(entry, 16).runs, 10);
  EXPECT_GT(find(entry, 16).medianMs, find(entry, 64).medianMs);
  EXPECT_NE(entry.best().chunk, 0);
  EXPECT_NE(entry.best().chunk, 16);
}

TEST(Tuner, KeepsTheBudget) {
  auto rounds = [](double budget) {
    int calls = 0;
    TunerOptions options;
    options.budgetMs = budget;
    Noise noise;
    auto begin = std::chrono::steady_clock::now();
    TableEntry entry = take(tune(
        makeDevice(), makeProblem(), OneVariant, {{64, 0}},
        [&](const Candidate &) -> Expected<double> {
          ++calls;
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
          return 1 + 10 * noise.uniform();
        },
        options));
    std::chrono::duration<double, std::milli> spent =
        std::chrono::steady_clock::now() - begin;
    // The round that had begun, on a busy machine.
    if (budget > 0) {
      EXPECT_LT(spent.count(), budget + 2000);
    }
    EXPECT_EQ(calls, 2 * (entry.best().runs + 1));
    return entry.best().runs;
  };
  EXPECT_EQ(rounds(0), 1);
  EXPECT_EQ(rounds(15), 1);
  int64_t some = rounds(65);
  EXPECT_GE(some, 1);
  EXPECT_LE(some, 6);
}

//===----------------------------------------------------------------------===//
// Errors
//===----------------------------------------------------------------------===//

TEST(Tuner, HandsFailuresOn) {
  int calls = 0;
  for (int last : {1, 3, 7}) {
    calls = 0;
    Expected<TableEntry> entry = tune(
        makeDevice(), makeProblem(), OneVariant, {{64, 0}},
        [&](const Candidate &) -> Expected<double> {
          if (++calls == last)
            return Status::outOfMemory("expected memory, got none");
          return 1.0;
        },
        makeOptions());
    ASSERT_FALSE(entry);
    EXPECT_EQ(entry.status().code(), StatusCode::OutOfMemory);
    EXPECT_EQ(entry.status().message(), "expected memory, got none");
    EXPECT_EQ(calls, last);
  }
}

TEST(Tuner, RefusesTimesThatAreNone) {
  for (auto [time, text] :
       {std::make_pair(0.0, "0.000000"), std::make_pair(-1.0, "-1.000000"),
        std::make_pair(std::nan(""), "nan"), std::make_pair(Inf, "inf")})
    for (int bad : {1, 2}) {
      int calls = 0;
      double value = time;
      expectRefused(tune(
                        makeDevice(), makeProblem(), OneVariant, {{0, 0}},
                        [&](const Candidate &) -> Expected<double> {
                          return ++calls == bad ? value : 1.0;
                        },
                        makeOptions()),
                    std::string("expected a time that is finite and above 0 "
                                "for chunk 0 of variant 'default', got ") +
                        text);
      EXPECT_EQ(calls, bad);
    }
}

TEST(Tuner, RefusesArguments) {
  Machine machine{curve, 0, Noise(), {}};
  auto withOptions = [&](auto change) {
    TunerOptions options = makeOptions();
    change(options);
    return tune(makeDevice(), makeProblem(), OneVariant, {{64, 0}},
                machine.measure(), options);
  };
  expectRefused(withOptions([](TunerOptions &o) { o.minRounds = 0; }),
                "expected minRounds of at least 1, got 0");
  expectRefused(withOptions([](TunerOptions &o) { o.maxRounds = 4; }),
                "expected maxRounds of at least minRounds, 5, got 4");
  expectRefused(withOptions([](TunerOptions &o) { o.budgetMs = -1; }),
                "expected budgetMs of at least 0, got -1.000000");
  expectRefused(withOptions([](TunerOptions &o) { o.budgetMs = std::nan(""); }),
                "expected budgetMs of at least 0, got nan");
  for (double confidence : {0.0, 1.0, -1.0})
    expectRefused(
        withOptions([&](TunerOptions &o) { o.confidence = confidence; }),
        "expected confidence between 0 and 1, got " +
            std::to_string(confidence));
  expectRefused(withOptions([](TunerOptions &o) { o.margin = -0.5; }),
                "expected a finite margin of at least 0, got -0.500000");
  expectRefused(withOptions([](TunerOptions &o) { o.margin = Inf; }),
                "expected a finite margin of at least 0, got inf");

  auto withCandidates =
      [&](std::vector<Candidate> candidates,
          std::vector<Variant> variants = {makeVariant("default", 16)}) {
        return tune(makeDevice(), makeProblem(), variants,
                    std::move(candidates), machine.measure(), makeOptions());
      };
  expectRefused(withCandidates({}),
                "expected at least one candidate, got none");
  expectRefused(withCandidates({{64, 1}}),
                "expected a candidate's variant below 1, got 1");
  expectRefused(withCandidates({{64, -1}}),
                "expected a candidate's variant below 1, got -1");
  expectRefused(withCandidates({{64, 0}}, {}),
                "expected a candidate's variant below 0, got 0");
  expectRefused(withCandidates({{24, 0}}),
                "expected 0 or a positive multiple of 16, got chunk 24 of "
                "variant 'default'");
  expectRefused(withCandidates({{-16, 0}}),
                "expected 0 or a positive multiple of 16, got chunk -16 of "
                "variant 'default'");
  expectRefused(withCandidates({{64, 0}, {0, 0}, {64, 0}}),
                "expected every candidate once, got chunk 64 of variant "
                "'default' twice");
  expectRefused(withCandidates({{64, 0}}, {makeVariant("a", 0)}),
                "expected a granularity of at least 1 of variant 'a', got 0");
  expectRefused(withCandidates({{64, 0}}, {makeVariant("a"), makeVariant("a")}),
                "expected variants of different names, got 'a' twice");
  expectRefused(withCandidates({{64, 0}}, {makeVariant("")}),
                "candidates[0].variant: expected a string that is not empty, "
                "got \"\"");

  expectRefused(tune(makeDevice(), makeProblem(), OneVariant, {{64, 0}},
                     Measure(), makeOptions()),
                "expected a function that measures, got none");
  Problem problem = makeProblem();
  problem.states = -1;
  expectRefused(tune(makeDevice(), problem, OneVariant, {{64, 0}},
                     machine.measure(), makeOptions()),
                "states: expected an integer of at least 1, got -1");
  problem = makeProblem(0);
  expectRefused(tune(makeDevice(), problem, OneVariant, {{64, 0}},
                     machine.measure(), makeOptions()),
                "length.measured: expected an integer of at least 1, got 0");
  Device device = makeDevice();
  device.units = 0;
  expectRefused(tune(device, makeProblem(), OneVariant, {{64, 0}},
                     machine.measure(), makeOptions()),
                "units: expected an integer of at least 1, got 0");
  // Nothing was run for any of them.
  EXPECT_TRUE(machine.calls.empty());
}
} // namespace
