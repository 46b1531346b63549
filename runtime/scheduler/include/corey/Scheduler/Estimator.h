//===- Estimator.h - Entropy and its companions -----------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_SCHEDULER_ESTIMATOR_H
#define COREY_SCHEDULER_ESTIMATOR_H

#include "corey/Scheduler/Statistics.h"
#include "corey/Status.h"
#include <memory>
#include <vector>

namespace corey::scheduler {

/// Where the bins of a histogram lie.
enum class RangeMode {
  /// [min, max] of the data: index trunc(K (x - min) / (max - min + 1e-8)), at
  /// most K - 1; p = count / (n + 1e-10), H = -sum p ln(p + 1e-10) over
  /// p > 1e-10. Constant if max - min < 1e-8. The estimator of the papers'
  /// chunk experiments; f16, bf16 and f32 are binned in f32. Two passes.
  MinMax,
  /// [min - m, max + m], m = max(0.05 (max - min), 1e-6), bins as numpy's
  /// histogram makes them in f64; H = -sum p ln(p + 1e-12). Constant if
  /// |max - min| <= 1e-8 + 1e-5 |max|. The estimator of the papers' fusion
  /// experiments. Two passes.
  PaddedMinMax,
  /// The given [low, high]. One pass. Constant if min = max.
  Fixed,
  /// Between the quantiles q and 1 - q of what was seen before, which follow
  /// the
  /// data as a moving average: one far outlier does not move the bins. One
  /// pass, but for the first tensor, which takes at least three.
  RunningQuantile
};

/// Which elements are looked at.
enum class Sampling {
  /// All of them, in one histogram.
  Full,
  /// Every `stride`-th position along the time axis, in one histogram.
  Strided,
  /// Every `stride`-th position along the time axis, each token (its channels)
  /// with a histogram and a range of its own; the entropy is the mean over
  /// tokens. With RangeMode::MinMax only, and f64 is rounded to f32.
  Token
};

struct EstimatorOptions {
  /// K, from 2 to 65536.
  int bins = 256;
  RangeMode range = RangeMode::MinMax;
  /// The range of RangeMode::Fixed, low < high, both finite.
  double low = 0, high = 1;
  /// q of RangeMode::RunningQuantile, in (0, 0.5).
  double quantile = 0.001;
  /// Decay of the running quantiles, in [0, 1).
  double decay = 0.85;
  Sampling sampling = Sampling::Full;
  /// At least 1.
  int64_t stride = 1;
  /// Axis of time; -1 is axis 1 of tensors of rank 3 and more ([B, L, D],
  /// [B, L, H, P]) and axis 0 of others.
  int timeAxis = -1;
  /// Layers that are looked at: those whose number is a multiple of this.
  int64_t layerStride = 1;
  /// Threads of a call; results do not depend on it. 0 takes every processor.
  int threads = 1;
};

/// What to count of a tensor that the host cannot read, on a device say: the
/// elements to look at, and the bins to put them in. Everything that is rounded
/// is rounded as Estimator::estimate() does it: in the order of operations
/// given, without contraction, and divided where it says so.
struct CountPlan {
  /// Bins of the histogram. K is `bins`, x the element in f32; of what lies
  /// outside, the indices are the first and the last one's.
  enum class Rule {
    /// No histogram, as for tokens, which have one each.
    None,
    /// trunc((x - min) / (max - min + 1e-8) K) in f32; none if max - min < 1e-8
    /// there; in f64 if the divisor overflows f32.
    MinMax,
    /// i = trunc((x - low) / width K) in f64, less one if x < edge(i), else one
    /// more if x >= edge(i + 1), edge(i) = i (width / K) + low and edge(K) =
    /// low
    /// + width; low = min - m, width = (max + m) - low, m = max(0.05 (max -
    /// min),
    /// 1e-6); none if max - min <= 1e-8 + 1e-5 |max|.
    PaddedMinMax,
    /// trunc((x - low) / width K) in f32 and in f64.
    GivenF32,
    GivenF64
  };
  /// False if one count is not enough, or the axes are more than can be said
  /// here: the host must have the elements of `sample` then.
  bool isCountable = true;
  /// The elements that are looked at, with the axes of the tensor.
  TensorView sample;
  int timeAxis = 0;
  /// The same as `columns` elements a stride apart for each position of `rows`
  /// (which has no rank where there is but one), in any order; of tokens, a row
  /// each.
  TensorView rows;
  int64_t columns = 1, columnStride = 1;
  /// Sampling::Token: every row has a histogram of its own by Rule::MinMax.
  bool tokens = false;
  Rule rule = Rule::None;
  int bins = 0;
  /// Of the given rules.
  double low = 0, width = 1;
};

/// What was counted by a plan, of finite elements but for the first three.
struct CountedTensor {
  uint64_t nan = 0, positiveInfinity = 0, negativeInfinity = 0;
  uint64_t count = 0;
  double min = 0, max = 0;
  /// Sums of (x - pivot)^1..4, the pivot being near the mean, and of |x|.
  double pivot = 0, s1 = 0, s2 = 0, s3 = 0, s4 = 0, absolute = 0;
  /// (x - low) / width < 0 and > 1.
  uint64_t below = 0, above = 0;
  /// |x| > 6 sigma.
  uint64_t outliers = 0;
  /// Tokens with a histogram, and tokens dropped as their max - min < 1e-8 in
  /// f32. A token that has elements that are not finite may be left out.
  uint64_t tokens = 0, tokensDropped = 0;
  /// Elements of each bin; of tokens, how many bins of them all have 0, 1, ...,
  /// `columns` elements.
  const uint64_t *counts = nullptr;
};

/// Measures tensors. Keeps its histograms, so that calls of known shapes
/// allocate nothing with one thread, and the running quantiles. Not
/// thread-safe: one estimator per caller.
class Estimator {
public:
  /// Errors: InvalidArgument naming the option.
  static Expected<Estimator> create(const EstimatorOptions &options = {});
  Estimator(Estimator &&);
  Estimator &operator=(Estimator &&);
  ~Estimator();

  /// Statistics of `tensor`. Errors: InvalidArgument for a rank, shape, time
  /// axis or null pointer that makes no tensor; never for its values.
  Expected<Statistics> estimate(const TensorView &tensor);

  /// How the next tensor is to be counted, whose data are not looked at, and
  /// statistics of what was counted by that plan before any other tensor was
  /// measured; together they are estimate(), sums rounded otherwise apart.
  /// Errors: as of estimate().
  Expected<CountPlan> plan(const TensorView &tensor) const;
  Statistics finish(const CountPlan &plan, const CountedTensor &counted);
  /// The same from the elements of the plan's sample, copied to the host in
  /// row-major order.
  Statistics finish(const CountPlan &plan, const void *elements);

  /// Whether layer number `layer` is to be looked at; what is unnumbered
  /// (negative) is.
  bool wantsLayer(int64_t layer) const;

  /// Counts of the last histogram (of the last token in token mode).
  const std::vector<uint64_t> &histogram() const;
  const EstimatorOptions &options() const;
  /// Forgets the running quantiles.
  void reset();

private:
  Estimator();
  struct Impl;
  std::unique_ptr<Impl> impl;
};

/// Entropy of a histogram, -sum p ln p.
Nats histogramEntropy(const std::vector<uint64_t> &counts);

//===----------------------------------------------------------------------===//
// Decay mass
//===----------------------------------------------------------------------===//

struct DecayOptions {
  /// Tokens of a chunk, at least 1; 0 takes the whole length.
  int64_t chunk = 0;
  /// dt = softplus(delta + bias), identity above 20, as the scan takes it.
  bool softplus = true;
  /// f32, one per channel; may be null.
  const float *bias = nullptr;
  /// dt is clamped to [dtMin, dtMax] after softplus.
  double dtMin = 0, dtMax = INFINITY;
  /// The carry of a chunk counts as negligible where exp(sum dt A) < epsilon.
  double epsilon = 1e-7;
};

/// sum dt A over one chunk of one sequence, over its channels and states: the
/// logarithm of what is left at the end of the chunk of the state it began
/// with.
struct DecayMass {
  int64_t batch = 0, begin = 0, end = 0;
  /// The slowest decay (largest sum), the mean, and the fastest.
  double slowest = 0, mean = 0, fastest = 0;
  /// Share of channel-state pairs whose carry is negligible.
  double negligible = 0;
  /// Whether every pair's carry is: the chunk can start from zero with a
  /// relative error of at most epsilon in what is carried.
  bool independent = false;
  /// Values of dt or A that are not finite; they are left out.
  uint64_t nonFinite = 0;
};

/// Decay mass per chunk of a scan with steps `delta` [B, L, D] and rates `A`
/// [D, N] (selective scan) or [D] (SSD, D heads), one entry per sequence and
/// chunk in order. Errors: InvalidArgument for shapes that do not fit or a
/// negative chunk.
Expected<std::vector<DecayMass>>
computeDecayMass(const TensorView &delta, const TensorView &A,
                 const DecayOptions &options = {});

} // namespace corey::scheduler

#endif // COREY_SCHEDULER_ESTIMATOR_H
