//===- Tier1.cpp - The cost model of the fusion experiments ---------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "Tier1.h"
#include <algorithm>

using namespace corey;
using namespace corey::tier1;

double tier1::round4(double value) { return std::round(value * 1e4) / 1e4; }

double tier1::meanDepth(const std::vector<FusionRegion> &regions) {
  if (regions.empty())
    return 0;
  return double(regions.back().end) / double(regions.size());
}

Metrics tier1::cost(const Case &data, const std::vector<FusionRegion> &regions,
                    Method method, Precision precision) {
  double scale = std::log2(double(data.length));
  double speed = precision == Precision::F16    ? 1.0
                 : precision == Precision::W8A8 ? 1.12
                                                : 1.22;
  double sensitivity = precision == Precision::F16    ? 0.0
                       : precision == Precision::W8A8 ? 0.7
                                                      : 1.3;
  double gain = std::max(data.gain, 0.0);
  bool guided = method == Method::Entropy;
  double latency = 0, traffic = 0;
  for (FusionRegion region : regions) {
    double depth = double(region.size()), entropy = 0, intensity = 0,
           memory = 0;
    for (size_t i = region.begin; i < region.end; ++i) {
      entropy += data.chain[i].entropy;
      intensity += data.chain[i].intensity;
      memory += data.chain[i].memory;
    }
    entropy /= depth;
    double reuse = 1 - 0.09 * (depth - 1) - 0.08 * entropy;
    if (method == Method::Static)
      reuse += 0.04 * std::max(0.0, 0.62 - entropy);
    if (guided)
      reuse -= 0.06 * gain;
    reuse = std::clamp(reuse, 0.42, 1.1);
    double launch = method == Method::NoFusion ? 0.28 : 0.16;
    launch += 0.03 * std::max(depth - 3, 0.0);
    if (guided)
      launch -= 0.02 * std::min(depth - 1, 2.0);
    double moved = memory * scale * reuse;
    latency += 0.012 * moved + 0.007 * intensity * scale / speed + launch;
    traffic += moved;
  }
  Metrics metrics;
  double depth = meanDepth(regions);
  double over = std::max(0.0, depth - 2) * std::max(0.0, 0.63 - data.emaAfter);
  if (method == Method::NoFusion)
    over = 0;
  double bonus = 0;
  if (guided) {
    over *= 0.35;
    bonus = 0.45 * gain +
            5 * std::max(data.outliersBefore - data.outliersAfter, 0.0);
  }
  metrics.latencyMs = round4(latency);
  metrics.dramPerToken = round4(1024 * traffic / double(data.length));
  metrics.quality = round4(std::max(
      0.0, sensitivity * (0.12 + 10 * data.outliersBefore) + over - bonus));
  metrics.depth = round4(depth);
  return metrics;
}

double tier1::matchedThreshold(const Case &data, const FusionWeights &weights,
                               double depth) {
  constexpr double kDefault = 0.52;
  auto distance = [&](double tau) {
    FusionWeights at = weights;
    at.tau = tau;
    return std::abs(meanDepth(FusionScorer(data.chain, at, data.limits)
                                  .partition(FusionStrategy::Arithmetic)) -
                    depth);
  };
  double best = kDefault, least = distance(kDefault);
  for (int i = 0; i <= 20; ++i) {
    double tau = (5 * i - 20) / 100.0, found = distance(tau);
    if (found < least || (found == least && std::abs(tau - kDefault) <
                                                std::abs(best - kDefault))) {
      best = tau;
      least = found;
    }
  }
  return best;
}

std::vector<FusionFeatures> tier1::sweepChain(std::string_view regime,
                                              size_t n) {
  std::vector<FusionFeatures> chain(n);
  for (size_t k = 0; k < n; ++k) {
    double i = double(k);
    if (regime == "low")
      chain[k] = {1.5 + .05 * i, .8 + .1 * i, .6 + .04 * i, 14, 28, .75};
    else if (regime == "mixed")
      chain[k] = {2 + .1 * i, 1 + .2 * i, .5 + .05 * i, 16, 32, .80};
    else
      chain[k] = {3.5 + .15 * i, 1.8 + .25 * i, .4 + .03 * i, 18, 36, .82};
  }
  return chain;
}
