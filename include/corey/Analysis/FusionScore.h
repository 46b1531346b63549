//===- FusionScore.h - Which neighbours to fuse -----------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_ANALYSIS_FUSIONSCORE_H
#define COREY_ANALYSIS_FUSIONSCORE_H

#include <cmath>
#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace corey {

/// What the score knows of one operator of a chain. Plain numbers: compilers
/// take them from IR, experiments from wherever they like.
struct FusionFeatures {
  /// Entropy of what it works on, in any one unit; NaN, or anything else that
  /// is not finite, where it is not known.
  double entropy = NAN;
  /// Arithmetic intensity and memory traffic.
  double intensity = 0, memory = 0;
  /// What it holds on chip, and the occupancy it allows, in [0, 1].
  double registers = 0, shared = 0, occupancy = 1;
};

/// S(R) = alpha H^ + beta AI^ - gamma M^ (+ min(0.18 (n - 1), 0.36)), with the
/// terms of n neighbours
///
///   H^  = clamp01(mean H_i)         over those whose entropy is known
///   AI^ = clamp01(sum AI_i / sqrt(n))
///   M^  = clamp01(sum M_i / n^1.15)
///
/// where clamp01 scales by the least and the largest value that single
/// operators of the chain have, and gives 0.5 where those are equal. H^ is 0.5
/// where no entropy of the region, or of the chain, is known. The last summand
/// is not part of the published formula, but of the published program.
struct FusionWeights {
  double alpha = 0.45, beta = 0.35, gamma = 0.20;
  /// A candidate is taken if its score is greater.
  double tau = 0.52;
  bool depthBonus = true;
};

/// Registers and shared memory of a region are the sums of its operators', its
/// occupancy their least.
struct FusionLimits {
  double registers = INFINITY, shared = INFINITY, minOccupancy = 0;
};

struct FusionTerms {
  double entropy = 0, intensity = 0, memory = 0, bonus = 0, score = 0;
  double registers = 0, shared = 0, occupancy = 1;
};

enum class FusionStrategy {
  /// Every operator alone.
  None,
  /// Three at a time in order, cut at the tail until feasible.
  Static,
  /// The greedy pass without the entropy term.
  Arithmetic,
  /// One pass from left to right: an operator joins the region so far if the
  /// result scores above tau and is feasible, else it begins the next; a single
  /// operator needs neither.
  Entropy,
  /// Of all partitions whose regions of more than one operator are feasible and
  /// score above tau, one with the largest sum of scores weighted by size; of
  /// equal ones that with fewer regions. O(n^2).
  Dp
};
/// "none", "static", "arithmetic", "entropy", "dp".
const char *fusionStrategyName(FusionStrategy strategy);
/// False if there is no such strategy.
bool parseFusionStrategy(std::string_view name, FusionStrategy &strategy);

/// Operators [begin, end) of a chain.
struct FusionRegion {
  size_t begin = 0, end = 0;
  size_t size() const { return end - begin; }
  bool operator==(const FusionRegion &o) const {
    return begin == o.begin && end == o.end;
  }
};

/// A region that was considered, and what became of it.
struct FusionCandidate {
  FusionRegion region;
  FusionTerms terms;
  bool legal = true, feasible = true, accepted = false;
};

/// Scores regions of one chain.
class FusionScorer {
public:
  FusionScorer(std::vector<FusionFeatures> chain, FusionWeights weights = {},
               FusionLimits limits = {});
  /// All 0 for an empty region.
  FusionTerms terms(FusionRegion region) const;
  bool feasible(const FusionTerms &terms) const;

  /// Cuts the chain into regions, in order and without gaps. `legal` says
  /// whether a region of two or more operators can be made into a kernel at
  /// all; null: every one can. Candidates of two or more operators are appended
  /// to `considered` if it is given, in the order in which they were looked at;
  /// for Dp only those that score above tau, and of infeasible ones those that
  /// end the growth of a region.
  std::vector<FusionRegion>
  partition(FusionStrategy strategy,
            const std::function<bool(FusionRegion)> &legal = nullptr,
            std::vector<FusionCandidate> *considered = nullptr) const;

  /// The partition with the least sum of `cost` whose regions of more than one
  /// operator are legal and feasible and of finite cost; of equal ones that
  /// with fewer regions. A single operator whose cost is not finite is used
  /// only where nothing else is left. O(n^2) calls, fewer where legal regions
  /// are short: growing a region to the right stops at the first that is not
  /// legal if `monotone`, and at the first that is not feasible.
  std::vector<FusionRegion>
  cheapest(const std::function<double(FusionRegion)> &cost,
           const std::function<bool(FusionRegion)> &legal = nullptr,
           bool monotone = false) const;

  const std::vector<FusionFeatures> &chain() const { return features; }
  const FusionWeights &weights() const { return w; }
  const FusionLimits &limits() const { return bounds; }

private:
  /// Sums over a region, which grows by one operator at a time.
  struct Region;
  struct Range {
    double low = INFINITY, high = -INFINITY;
    void add(double value);
    double scale(double value) const;
  };
  FusionTerms score(const Region &region, double alpha) const;

  std::vector<FusionFeatures> features;
  FusionWeights w;
  FusionLimits bounds;
  /// What single operators of the chain have.
  Range entropies, intensities, memories;
  /// sqrt(n) and n^1.15 for regions of n operators.
  std::vector<double> roots, powers;
  /// Whether a region that is not feasible stays so when it grows.
  bool resourcesGrow = true;
};

/// The most operators of `perOperator` units each that fit into `capacity`:
/// F <= M_shared / C_tile, and the same of registers.
size_t fusionDepthBound(double capacity, double perOperator);

} // namespace corey

#endif // COREY_ANALYSIS_FUSIONSCORE_H
