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
