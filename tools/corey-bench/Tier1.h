//===- Tier1.h - The cost model of the fusion experiments -------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_TOOLS_COREY_BENCH_TIER1_H
#define COREY_TOOLS_COREY_BENCH_TIER1_H

#include "corey/Analysis/FusionScore.h"
#include <cstdint>
#include <string_view>
#include <vector>

namespace corey::tier1 {

/// The synthetic block of the fusion experiments of arXiv 2604.10597 at one
/// length: what its seven operators cost, and statistics of its data. The costs
/// are surrogates in Python there; nothing is compiled or run.
struct Case {
  int64_t length = 0, repeat = 0;
  /// Normalised entropy of the data before and after the rotation, and the
  /// moving average that the experiments keep of both.
  double rawBefore = 0, rawAfter = 0, emaBefore = 0, emaAfter = 0;
  double gain = 0, outliersBefore = 0, outliersAfter = 0;
  std::vector<FusionFeatures> chain;
  FusionLimits limits;
};

/// Whose branch of the cost function is taken. It asks for the name of the
/// method, not only for its partition.
enum class Method { NoFusion, Static, Entropy, Arithmetic };
enum class Precision { F16, W8A8, W4A8 };
constexpr Precision kPrecisions[] = {Precision::F16, Precision::W8A8,
                                     Precision::W4A8};

/// To four decimals, as the experiments keep them.
struct Metrics {
  double latencyMs = 0, dramPerToken = 0, quality = 0, depth = 0;
};

Metrics cost(const Case &data, const std::vector<FusionRegion> &regions,
             Method method, Precision precision);

/// The threshold, of 21 from -0.2 to 0.8, at which the greedy pass without
/// entropy comes closest to a mean depth; of equal ones the nearest to 0.52.
double matchedThreshold(const Case &data, const FusionWeights &weights,
                        double depth);

double meanDepth(const std::vector<FusionRegion> &regions);
double round4(double value);

/// The chain of one of the synthetic sweeps over chain length (table 33):
/// "low", "mixed" or "high".
std::vector<FusionFeatures> sweepChain(std::string_view regime, size_t n);

} // namespace corey::tier1

#endif // COREY_TOOLS_COREY_BENCH_TIER1_H
