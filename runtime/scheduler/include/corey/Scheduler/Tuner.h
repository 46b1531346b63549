//===- Tuner.h - Measuring chunks -------------------------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_SCHEDULER_TUNER_H
#define COREY_SCHEDULER_TUNER_H

#include "corey/Scheduler/ChunkTable.h"
#include "corey/Scheduler/Problem.h"
#include <functional>
#include <vector>

namespace corey::scheduler {

struct TunerOptions {
  /// Rounds after one that warms up; a round runs every candidate that is still
  /// in the race once, in a random order. 1 <= minRounds <= maxRounds.
  int minRounds = 5, maxRounds = 60;
  /// No round begins once this many milliseconds have passed, but for the first
  /// measured one: a short budget means fewer runs than minRounds.
  double budgetMs = 2000;
  /// Level of the intervals, in (0, 1).
  double confidence = 0.95;
  /// Candidates whose interval lies this share above the best's leave the race;
  /// the race ends when one is left or all others are within the share.
  double margin = 0.01;
  /// Of the orders.
  uint64_t seed = 0;
};

/// A chunk (0: unsplit) and an index into the variants.
struct Candidate {
  int64_t chunk = 0;
  int variant = 0;
};

/// Runs the scan once with a candidate and returns milliseconds; a failure ends
/// the tuning.
using Measure = std::function<Expected<double>(const Candidate &)>;

/// Powers of two from `least` (rounded up to the variant's granularity) to
/// below the length, and unsplit, of every variant. Where segments of an SSD
/// are work items of their own, in place of powers of two the chunks of at
/// least `least` that give 2, 3, 4, 6, 8, 12, ... segments, or as many as just
/// fill the units of the device once or twice, and no more than fill them eight
/// times; 0 stands for any number of units.
std::vector<Candidate> defaultCandidates(const Problem &problem,
                                         const std::vector<Variant> &variants,
                                         int64_t least = 16, int64_t units = 0);

/// Measures the candidates of `problem` against one another. The unsplit case
/// of every variant that occurs is added if it is missing. Batches of the entry
/// are the measured one; lengths reach to the geometric middle between a factor
/// of two on either side, unless the caller widens them. Errors:
/// InvalidArgument for options, candidates or variants that make no sense, or a
/// measured time that is not a positive number; those of `measure`.
Expected<TableEntry> tune(const Device &device, const Problem &problem,
                          const std::vector<Variant> &variants,
                          std::vector<Candidate> candidates,
                          const Measure &measure,
                          const TunerOptions &options = {});

/// Median of `samples` (sorted by the call) and the interval of order
/// statistics around it that covers the true median with at least `confidence`,
/// or the whole range if there are too few.
struct MedianInterval {
  double median = 0, low = 0, high = 0;
};
MedianInterval medianInterval(std::vector<double> &samples, double confidence);

} // namespace corey::scheduler

#endif // COREY_SCHEDULER_TUNER_H
