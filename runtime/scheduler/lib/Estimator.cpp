//===- Estimator.cpp - Entropy and its companions -------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Scheduler/Estimator.h"
#include "EstimatorKernels.h"
#include "Parallel.h"
#include "TensorReader.h"
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

using namespace corey;
using namespace corey::scheduler;

const char *scheduler::validityName(Validity validity) {
  switch (validity) {
  case Validity::Ok:
    return "ok";
  case Validity::Constant:
    return "constant";
  case Validity::Empty:
    return "empty";
  case Validity::NonFinite:
    return "not finite";
  }
  return "unknown";
}

//===----------------------------------------------------------------------===//
// Parts
//===----------------------------------------------------------------------===//

namespace {
/// Elements that are reduced on their own before they meet the others: the cut
/// is the same for any number of threads, and so are the results.
constexpr int64_t kSegment = int64_t(1) << 18;
/// From this many elements on, 16-bit types are counted by their bits: one pass
/// that converts nothing finds all there is to know. Below it, going through
/// the 65536 values costs more than it saves. The many values that f16 takes
/// make the counters larger than a first-level cache; a long stream of data
/// then pushes them out again and again, and two passes are faster.
constexpr int64_t kCountBits = int64_t(1) << 17;
constexpr int64_t kCountBitsF16 = int64_t(1) << 22;
/// Up to this many bins a thread keeps four histograms.
constexpr int kFourfoldBins = 4096;

/// What the first pass finds in a segment.
struct Segment {
  uint64_t count = 0, nan = 0, positive = 0, negative = 0;
  /// Powers of (x - pivot) / unit.
  double s1 = 0, s2 = 0, s3 = 0, s4 = 0, absolute = 0;
  double min = 0, max = 0;
  uint64_t below = 0, above = 0, beyond = 0;
  // Token mode.
  double entropies = 0;
  uint64_t tokens = 0, dropped = 0;

  void add(const Segment &other) {
    if (other.count)
      extend(other.min, other.max, count == 0);
    count += other.count;
    nan += other.nan;
    positive += other.positive;
    negative += other.negative;
    s1 += other.s1;
    s2 += other.s2;
    s3 += other.s3;
    s4 += other.s4;
    absolute += other.absolute;
    below += other.below;
    above += other.above;
    beyond += other.beyond;
    entropies += other.entropies;
    tokens += other.tokens;
    dropped += other.dropped;
  }
  uint64_t nonFinite() const { return nan + positive + negative; }
  void countNonFinite(double x) {
    if (x != x)
      ++nan;
    else
      ++(x > 0 ? positive : negative);
  }
  /// `x` is finite and the segment's (first, if `first`).
  void extend(double low, double high, bool first) {
    min = first ? low : std::min(min, low);
    max = first ? high : std::max(max, high);
  }
};

/// Bins in f64.
struct BinningF64 {
  double low = 0, width = 1;
  int64_t bins = 0;
  /// numpy's bins: the index is corrected by comparing with the edges.
  bool edges = false;
  /// x and the range are halved first, where the range overflows.
  bool halved = false;

  double edge(int64_t i) const {
    return i == bins
               ? low + width
               : static_cast<double>(i) * (width / static_cast<double>(bins)) +
                     low;
  }
  int64_t index(double x, uint64_t &below, uint64_t &above) const {
    double t = halved ? (x * 0.5 - low * 0.5) / width : (x - low) / width;
    below += t < 0;
    above += t > 1;
    double at = t * static_cast<double>(bins);
    int64_t i = at <= 0 ? 0 : static_cast<int64_t>(std::min(at, 1e15));
    i = std::min(i, bins - 1);
    if (edges) {
      if (i > 0 && x < edge(i))
        --i;
      else if (i < bins - 1 && x >= edge(i + 1))
        ++i;
    }
    return i;
  }
};

/// The largest f32 that is not above `x`.
float floorToF32(double x) {
  float f = static_cast<float>(x);
  return static_cast<double>(f) > x
             ? std::nextafter(f, -std::numeric_limits<float>::infinity())
             : f;
}

/// An entropy as -sum p ln(p + inside) over p > least, p = count / (total +
/// inSum).
struct EntropyRule {
  double inSum = 0, inside = 0, least = 0;

  /// What a bin adds.
  double term(uint64_t count, double total) const {
    double p = static_cast<double>(count) / (total + inSum);
    return p > least ? -p * std::log(p + inside) : 0;
  }
  double of(const uint64_t *counts, size_t bins, double total) const {
    double h = 0;
    for (size_t i = 0; i < bins; ++i)
      if (counts[i])
        h += term(counts[i], total);
    // The epsilons make a full bin negative by as much.
    return h < 0 ? 0 : h;
  }
};
EntropyRule entropyRule(RangeMode mode) {
  switch (mode) {
  case RangeMode::MinMax:
    return {1e-10, 1e-10, 1e-10};
  case RangeMode::PaddedMinMax:
    return {0, 1e-12, 0};
  case RangeMode::Fixed:
  case RangeMode::RunningQuantile:
    break;
  }
  return {};
}

/// The range of a histogram, and whether the mode takes the data for constant.
struct HistogramRange {
  double low = 0, high = 0;
  bool constant = false;
};
} // namespace

Nats scheduler::histogramEntropy(const std::vector<uint64_t> &counts) {
  double total = 0;
  for (uint64_t count : counts)
    total += static_cast<double>(count);
  if (total == 0)
    return Nats(0);
  return Nats(EntropyRule().of(counts.data(), counts.size(), total));
}

struct Estimator::Impl {
  EstimatorOptions options;
  const EstimatorKernels &kernels = estimatorKernels();
  std::vector<uint64_t> counts;
  std::vector<Segment> segments;
  struct Thread {
    std::vector<uint32_t> counters;
    std::vector<uint64_t> counts;
    /// Elements in `counters` that are not in `counts` yet.
    uint64_t pending = 0;
    std::vector<float> token;
    std::vector<uint32_t> bits;
  };
  std::vector<Thread> threads;
  /// The finite values of a 16-bit tensor, and how often each occurs.
  std::vector<float> values;
  std::vector<uint64_t> occurrences;
  bool hasRange = false;
  double runningLow = 0, runningHigh = 0;

  int64_t stride() const {
    return options.bins <= kFourfoldBins ? options.bins : 0;
  }
  void clearCounts(int used) {
    counts.assign(options.bins, 0);
    threads.resize(std::max<size_t>(threads.size(), used));
    for (int t = 0; t < used; ++t) {
      threads[t].counters.assign(stride() ? 4 * options.bins : options.bins, 0);
      threads[t].counts.assign(options.bins, 0);
      threads[t].pending = 0;
    }
  }
  void flush(Thread &thread) {
    size_t bins = options.bins;
    for (size_t i = 0; i < thread.counters.size(); ++i)
      thread.counts[i % bins] += thread.counters[i];
    std::fill(thread.counters.begin(), thread.counters.end(), 0);
    thread.pending = 0;
  }
  void gatherCounts(int used) {
    for (int t = 0; t < used; ++t) {
      flush(threads[t]);
      for (int i = 0; i < options.bins; ++i)
        counts[i] += threads[t].counts[i];
    }
  }

  /// Runs body(segment, thread, begin, end) over the segments of `size` items.
  template <typename Body>
  void overSegments(int64_t size, int64_t length, int used, Body body) {
    int64_t count = (size + length - 1) / length;
    segments.resize(std::max<size_t>(segments.size(), count));
    if (used == 1) {
      for (int64_t s = 0; s < count; ++s)
        body(segments[s], threads[0], s * length,
             std::min(size, (s + 1) * length));
      return;
    }
    parallelFor(count, used, [&](int64_t s, int t) {
      body(segments[s], threads[t], s * length,
           std::min(size, (s + 1) * length));
    });
  }

  template <typename T, typename Use>
  void forEachFinite(const TensorReader &reader, int64_t begin, int64_t end,
                     bool clean, Use use);
  double findPivot(const TensorReader &reader, bool wide);
  void binPass(const TensorReader &reader, int used, const BinningF32 *narrow,
               const BinningF64 *wide, float beyond, bool countBeyond);
  Statistics measure(const TensorView &tensor);
  Segment countBits(const TensorReader &reader, ElementType type, int used,
                    double &pivot);
  Statistics measureTokens(const TensorView &tensor, int timeAxis);
  bool momentsOf(Segment &segment, const float *x, int64_t n, double pivot);
  Segment allSegments(int64_t numSegments) const;
  Statistics summarize(const Segment &all, double pivot, double unit) const;
  HistogramRange rangeOf(const Statistics &found, bool isF64) const;
  void followQuantiles(const Statistics &found, double from, double to,
                       uint64_t below, uint64_t above);
  void concludeTensor(Statistics &result, const HistogramRange &range,
                      const Segment &all);
  void concludeTokens(Statistics &result, const Segment &all) const;
  Expected<TensorView> sampleOf(const TensorView &tensor, int &timeAxis) const;
  /// Whether the range does not depend on the tensor.
  bool knowsRange() const {
    return options.range == RangeMode::Fixed ||
           (options.range == RangeMode::RunningQuantile && hasRange);
  }
  bool fitsF32(double low, double width) const;
  double quantile(double share, double low, double high, double min, double max,
                  uint64_t below, uint64_t above) const;
};

Estimator::Estimator() : impl(std::make_unique<Impl>()) {}
Estimator::Estimator(Estimator &&) = default;
Estimator &Estimator::operator=(Estimator &&) = default;
Estimator::~Estimator() = default;

Expected<Estimator> Estimator::create(const EstimatorOptions &o) {
  auto bad = [](const char *option, const std::string &expected,
                const std::string &got) {
    return Status::invalidArgument(std::string("estimator option '") + option +
                                   "': expected " + expected + ", got " + got);
  };
  if (o.bins < 2 || o.bins > 65536)
    return bad("bins", "2 to 65536", std::to_string(o.bins));
  if (o.range == RangeMode::Fixed &&
      !(std::isfinite(o.low) && std::isfinite(o.high) && o.low < o.high &&
        std::isfinite(o.high - o.low)))
    return bad("low", "a finite range with low < high",
               "[" + std::to_string(o.low) + ", " + std::to_string(o.high) +
                   "]");
  if (o.range == RangeMode::RunningQuantile &&
      !(o.quantile > 0 && o.quantile < 0.5))
    return bad("quantile", "a number in (0, 0.5)", std::to_string(o.quantile));
  if (!(o.decay >= 0 && o.decay < 1))
    return bad("decay", "a number in [0, 1)", std::to_string(o.decay));
  if (o.stride < 1)
    return bad("stride", "at least 1", std::to_string(o.stride));
  if (o.sampling == Sampling::Full && o.stride != 1)
    return bad("stride", "1 where every element is looked at",
               std::to_string(o.stride));
  if (o.sampling == Sampling::Token && o.range != RangeMode::MinMax)
    return bad("range", "the range mode MinMax in token mode", "another");
  if (o.timeAxis < -1 || o.timeAxis >= TensorView::kMaxRank)
    return bad("timeAxis", "-1 to 7", std::to_string(o.timeAxis));
  if (o.layerStride < 1)
    return bad("layerStride", "at least 1", std::to_string(o.layerStride));
  if (o.threads < 0 || o.threads > 1024)
    return bad("threads", "0 to 1024", std::to_string(o.threads));
  Estimator estimator;
  estimator.impl->options = o;
  return estimator;
}

bool Estimator::wantsLayer(int64_t layer) const {
  return layer < 0 || layer % impl->options.layerStride == 0;
}
const std::vector<uint64_t> &Estimator::histogram() const {
  return impl->counts;
}
const EstimatorOptions &Estimator::options() const { return impl->options; }
void Estimator::reset() { impl->hasRange = false; }

//===----------------------------------------------------------------------===//
// Passes
//===----------------------------------------------------------------------===//

/// Calls use(x, n) with the finite elements of x, and counts the others in
/// `found` if it is given.
template <typename T, typename Use>
static void useFinite(const T *x, int64_t n, Segment *found, Use use) {
  T kept[kBlock];
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (std::isfinite(x[i]))
      kept[count++] = x[i];
    else if (found)
      found->countNonFinite(x[i]);
  }
  if (count)
    use(static_cast<const T *>(kept), count);
}

/// Calls use(x, n) with the finite elements of [begin, end). `clean`: all are.
template <typename T, typename Use>
void Estimator::Impl::forEachFinite(const TensorReader &reader, int64_t begin,
                                    int64_t end, bool clean, Use use) {
  if (clean)
    return reader.forEach<T>(begin, end, use);
  reader.forEach<T>(begin, end, [&](const T *x, int64_t n) {
    useFinite(x, n, nullptr, use);
  });
}

/// The mean of the finite elements of the first block that has some.
double Estimator::Impl::findPivot(const TensorReader &reader, bool wide) {
  double sum = 0;
  int64_t count = 0;
  for (int64_t begin = 0; begin < reader.size() && !count; begin += kBlock) {
    int64_t end = std::min(reader.size(), begin + kBlock);
    if (wide)
      forEachFinite<double>(
          reader, begin, end, false, [&](const double *x, int64_t n) {
            // Means of parts: a sum could overflow.
            for (int64_t i = 0; i < n; ++i)
              sum += (x[i] - sum) / static_cast<double>(++count);
          });
    else
      forEachFinite<float>(reader, begin, end, false,
                           [&](const float *x, int64_t n) {
                             sum += kernels.sum(x, n);
                             count += n;
                           });
  }
  if (!count)
    return 0;
  double mean = wide ? sum : sum / static_cast<double>(count);
  return std::isfinite(mean) ? mean : 0;
}

/// Adds a block to the sums of a segment; false, and nothing added, if an
/// element is not finite.
bool Estimator::Impl::momentsOf(Segment &segment, const float *x, int64_t n,
                                double pivot) {
  MomentSums sums;
  sums.min = sums.max = x[0];
  kernels.moments(x, n, pivot, sums);
  if (!std::isfinite(sums.s4))
    return false;
  if (!std::isfinite(sums.absolute)) {
    sums.absolute = 0;
    for (int64_t i = 0; i < n; ++i)
      sums.absolute += std::fabs(static_cast<double>(x[i]));
  }
  segment.extend(sums.min, sums.max, segment.count == 0);
  segment.count += n;
  segment.s1 += sums.s1;
  segment.s2 += sums.s2;
  segment.s3 += sums.s3;
  segment.s4 += sums.s4;
  segment.absolute += sums.absolute;
  return true;
}

/// Fills the histogram; `beyond` bounds |x| for the outliers.
void Estimator::Impl::binPass(const TensorReader &reader, int used,
                              const BinningF32 *narrow, const BinningF64 *wide,
                              float beyond, bool countBeyond) {
  clearCounts(used);
  overSegments(
      reader.size(), kSegment, used,
      [&](Segment &segment, Thread &thread, int64_t begin, int64_t end) {
        segment.below = segment.above = segment.beyond = 0;
        bool clean = segment.nonFinite() == 0;
        if (narrow) {
          forEachFinite<float>(
              reader, begin, end, clean, [&](const float *x, int64_t n) {
                kernels.histogram(x, n, *narrow, thread.counters.data(),
                                  stride(), segment.below, segment.above);
                if (countBeyond)
                  segment.beyond += kernels.countBeyond(x, n, beyond);
              });
        } else {
          forEachFinite<double>(reader, begin, end, clean,
                                [&](const double *x, int64_t n) {
                                  for (int64_t i = 0; i < n; ++i)
                                    ++thread.counters[wide->index(
                                        x[i], segment.below, segment.above)];
                                });
        }
        // 32-bit counters are emptied long before they could overflow.
        thread.pending += end - begin;
        if (thread.pending >= (uint64_t(1) << 31))
          flush(thread);
      });
  gatherCounts(used);
}

/// Counts a tensor of a 16-bit type by its bits, into `values` and
/// `occurrences`, and sums up what it holds.
Segment Estimator::Impl::countBits(const TensorReader &reader, ElementType type,
                                   int used, double &pivot) {
  for (int t = 0; t < used; ++t)
    threads[t].bits.assign(65536, 0);
  occurrences.assign(65536, 0);
  values.resize(65536);
  auto drain = [&](Thread &thread) {
    for (size_t i = 0; i < 65536; ++i)
      occurrences[i] += thread.bits[i];
  };
  // No counter of 32 bits sees more than this many elements.
  constexpr int64_t kMost = int64_t(1) << 31;
  for (int64_t first = 0; first < reader.size(); first += kMost) {
    int64_t size = std::min(kMost, reader.size() - first);
    int64_t parts = (size + kSegment - 1) / kSegment;
    auto part = [&](int64_t s, int t) {
      uint32_t *bits = threads[t].bits.data();
      reader.forEach<uint16_t>(first + s * kSegment,
                               first + std::min(size, (s + 1) * kSegment),
                               [&](const uint16_t *x, int64_t n) {
                                 for (int64_t i = 0; i < n; ++i)
                                   ++bits[x[i]];
                               });
    };
    if (used == 1) {
      // Without a std::function, which allocates.
      for (int64_t s = 0; s < parts; ++s)
        part(s, 0);
    } else {
      parallelFor(parts, used, part);
    }
    for (int t = 0; t < used; ++t) {
      drain(threads[t]);
      std::fill(threads[t].bits.begin(), threads[t].bits.end(), 0);
    }
  }
  Segment all;
  size_t kept = 0;
  double sum = 0;
  uint16_t codes[kBlock];
  float widened[kBlock];
  for (int64_t first = 0; first < 65536; first += kBlock) {
    for (int64_t i = 0; i < kBlock; ++i)
      codes[i] = static_cast<uint16_t>(first + i);
    (type == ElementType::F16 ? kernels.widenF16
                              : kernels.widenBF16)(codes, widened, kBlock);
    for (int64_t i = 0; i < kBlock; ++i) {
      uint64_t n = occurrences[first + i];
      float x = widened[i];
      if (!n)
        continue;
      if (!std::isfinite(x)) {
        (x != x ? all.nan : x > 0 ? all.positive : all.negative) += n;
        continue;
      }
      values[kept] = x;
      occurrences[kept++] = n;
      all.extend(x, x, all.count == 0);
      all.count += n;
      sum += static_cast<double>(n) * x;
    }
  }
  values.resize(kept);
  occurrences.resize(kept);
  pivot = all.count ? sum / static_cast<double>(all.count) : 0;
  for (size_t i = 0; i < kept; ++i) {
    double x = values[i], n = static_cast<double>(occurrences[i]);
    double d = x - pivot, d2 = d * d;
    all.s1 += n * d;
    all.s2 += n * d2;
    all.s3 += n * d2 * d;
    all.s4 += n * d2 * d2;
    all.absolute += n * std::fabs(x);
  }
  return all;
}

Segment Estimator::Impl::allSegments(int64_t numSegments) const {
  Segment all;
  for (int64_t i = 0; i < numSegments; ++i)
    all.add(segments[i]);
  return all;
}

Statistics Estimator::Impl::summarize(const Segment &all, double pivot,
                                      double unit) const {
  Statistics result;
  result.bins = options.bins;
  result.count = all.count;
  result.nan = all.nan;
  result.positiveInfinity = all.positive;
  result.negativeInfinity = all.negative;
  result.validity = result.nonFinite() ? Validity::NonFinite
                    : all.count        ? Validity::Ok
                                       : Validity::Empty;
  if (!all.count)
    return result;
  double n = static_cast<double>(all.count);
  double d = all.s1 / n, e2 = all.s2 / n, e3 = all.s3 / n, e4 = all.s4 / n;
  double m2 = std::max(e2 - d * d, 0.0);
  double m4 =
      std::max(e4 - 4 * d * e3 + 6 * d * d * e2 - 3 * d * d * d * d, 0.0);
  result.min = all.min;
  result.max = all.max;
  result.mean = std::clamp((pivot / unit + d) * unit, all.min, all.max);
  if (all.min == all.max)
    m2 = m4 = 0;
  result.variance = m2 * unit * unit;
  result.kurtosis = m2 > 0 ? m4 / (m2 * m2) : 0;
  double scaledMean = result.mean / unit;
  result.rms = std::sqrt(m2 + scaledMean * scaledMean) * unit;
  double peak = std::max(std::fabs(all.min), std::fabs(all.max));
  // Rounding must not carry them past the largest, nor past what f64 holds.
  result.rms = std::min(result.rms, peak);
  result.meanAbsolute = std::min(all.absolute / n * unit, peak);
  result.peakToRms = result.rms > 0 ? peak / result.rms : 0;
  return result;
}

/// The value below which `share` of the histogram over [low, high] lies.
double Estimator::Impl::quantile(double share, double low, double high,
                                 double min, double max, uint64_t below,
                                 uint64_t above) const {
  double total = 0;
  for (uint64_t count : counts)
    total += static_cast<double>(count);
  double target = share * total, seen = 0;
  double width = (high - low) / static_cast<double>(counts.size());
  for (size_t i = 0; i < counts.size(); ++i) {
    double count = static_cast<double>(counts[i]);
    if (count > 0 && seen + count >= target) {
      // Elements outside the range stand in the end bins. Where they lie is not
      // known but for the extreme: a range grows by its own width at most, so
      // that a far outlier does not drag it along.
      double under = i == 0 ? static_cast<double>(below) : 0,
             over = i + 1 == counts.size() ? static_cast<double>(above) : 0;
      double left = low + static_cast<double>(i) * width, right = left + width,
             rest = std::max(target - seen, 0.0),
             inside = std::max(count - under - over, 0.0);
      if (rest < under) {
        double far = std::max(min, low - (high - low));
        return far + (left - far) * rest / under;
      }
      rest -= under;
      if (rest <= inside && inside > 0)
        return left + width * rest / inside;
      if (over == 0)
        return right;
      double far = std::min(max, high + (high - low));
      return right + (far - right) * std::min((rest - inside) / over, 1.0);
    }
    seen += count;
  }
  return high;
}

HistogramRange Estimator::Impl::rangeOf(const Statistics &found,
                                        bool isF64) const {
  double low = found.min, high = found.max, spread = high - low;
  switch (options.range) {
  case RangeMode::MinMax:
    return {low, high,
            isF64 ? spread < 1e-8
                  : static_cast<float>(high) - static_cast<float>(low) < 1e-8f};
  case RangeMode::PaddedMinMax: {
    double margin = std::max(0.05 * spread, 1e-6);
    constexpr double kLargest = std::numeric_limits<double>::max();
    return {std::max(low - margin, -kLargest),
            std::min(high + margin, kLargest),
            spread <= 1e-8 + 1e-5 * std::fabs(high)};
  }
  case RangeMode::Fixed:
    return {options.low, options.high, spread == 0};
  case RangeMode::RunningQuantile:
    break;
  }
  if (hasRange)
    return {runningLow, runningHigh, spread == 0};
  return {low, high, spread == 0};
}

/// f32 cannot hold every range: data are binned in f64 where the width
/// overflows, or where rounding the low end would move the bins.
bool Estimator::Impl::fitsF32(double low, double width) const {
  float l = static_cast<float>(low), w = static_cast<float>(width);
  return std::isfinite(l) && std::isfinite(w) && w >= 1e-30f &&
         (static_cast<double>(l) == low || w > std::fabs(l) * 1e-3f);
}

/// Moves the running quantiles by a histogram over [from, to].
void Estimator::Impl::followQuantiles(const Statistics &found, double from,
                                      double to, uint64_t below,
                                      uint64_t above) {
  double q = options.quantile;
  double l = quantile(q, from, to, found.min, found.max, below, above);
  double h = quantile(1 - q, from, to, found.min, found.max, below, above);
  if (!(l < h)) {
    l = found.min;
    h = found.max;
  }
  runningLow =
      hasRange ? options.decay * runningLow + (1 - options.decay) * l : l;
  runningHigh =
      hasRange ? options.decay * runningHigh + (1 - options.decay) * h : h;
  hasRange = true;
}

/// What the histogram says, `counts` over `range`, of a tensor with elements.
void Estimator::Impl::concludeTensor(Statistics &result,
                                     const HistogramRange &range,
                                     const Segment &all) {
  result.low = range.low;
  result.high = range.high;
  result.below = all.below;
  result.above = all.above;
  double n = static_cast<double>(result.count);
  result.outlierFraction = static_cast<double>(all.beyond) / n;
  if (!range.constant) {
    result.entropy =
        Nats(entropyRule(options.range).of(counts.data(), counts.size(), n));
    return;
  }
  if (result.validity == Validity::Ok)
    result.validity = Validity::Constant;
  if (!knowsRange()) {
    // All of them in one bin, as the estimators would have it.
    counts.assign(options.bins, 0);
    counts[0] = result.count;
  }
}

void Estimator::Impl::concludeTokens(Statistics &result,
                                     const Segment &all) const {
  result.tokens = all.tokens;
  result.tokensDropped = all.dropped;
  if (result.tokens)
    result.entropy = Nats(all.entropies / static_cast<double>(all.tokens));
  else if (result.validity == Validity::Ok)
    result.validity = Validity::Constant;
  result.low = result.min;
  result.high = result.max;
  if (result.count)
    result.outlierFraction =
        static_cast<double>(all.beyond) / static_cast<double>(result.count);
}

Statistics Estimator::Impl::measure(const TensorView &tensor) {
  TensorReader reader(tensor, kernels);
  int64_t size = reader.size();
  int64_t numSegments = (size + kSegment - 1) / kSegment;
  int used = static_cast<int>(std::clamp<int64_t>(
      threadCount(options.threads), 1, std::max<int64_t>(numSegments, 1)));
  clearCounts(used);
  bool isF64 = tensor.type == ElementType::F64;

  // Where the range is known the histogram is made in the same pass.
  bool known = knowsRange();
  double low = options.low, high = options.high;
  if (options.range == RangeMode::RunningQuantile) {
    low = runningLow;
    high = runningHigh;
  }
  auto narrowBinning = [&](double low, double width) {
    BinningF32 binning;
    binning.low = static_cast<float>(low);
    binning.width = static_cast<float>(width);
    binning.scale = static_cast<float>(options.bins);
    binning.last = options.bins - 1;
    return binning;
  };
  auto wideBinning = [&](double low, double high, double epsilon) {
    BinningF64 binning;
    binning.low = low;
    binning.bins = options.bins;
    binning.edges = options.range == RangeMode::PaddedMinMax;
    binning.width = high - low + epsilon;
    if (!std::isfinite(binning.width)) {
      binning.halved = true;
      binning.edges = false;
      binning.width = high * 0.5 - low * 0.5;
    }
    return binning;
  };
  BinningF32 narrow = narrowBinning(low, high - low);
  BinningF64 wide = wideBinning(low, high, 0);
  bool inF32 = !isF64 && fitsF32(low, high - low);

  double pivot = 0, unit = 1;
  bool byValue = size >= kCountBits &&
                 (tensor.type == ElementType::BF16 ||
                  (tensor.type == ElementType::F16 && size <= kCountBitsF16));
  // Bins of distinct values, for tensors that are counted by them.
  auto binValues = [&] {
    Segment &all = segments[0];
    all.below = all.above = 0;
    counts.assign(options.bins, 0);
    for (size_t i = 0; i < values.size(); ++i) {
      uint64_t under = 0, over = 0, n = occurrences[i];
      int64_t index;
      if (inF32) {
        // As the kernels do it.
        float t = (values[i] - narrow.low) / narrow.width;
        under = t < 0;
        over = t > 1;
        float at = std::max(t * narrow.scale, 0.0f);
        index =
            static_cast<int64_t>(std::min(at, static_cast<float>(narrow.last)));
      } else {
        index = wide.index(values[i], under, over);
      }
      counts[index] += n;
      all.below += under * n;
      all.above += over * n;
    }
  };
  if (byValue) {
    segments.resize(std::max<size_t>(segments.size(), numSegments));
    for (int64_t i = 0; i < numSegments; ++i)
      segments[i] = Segment();
    segments[0] = countBits(reader, tensor.type, used, pivot);
    if (known)
      binValues();
  } else {
    pivot = findPivot(reader, isF64);
  }
  if (isF64) {
    // Powers of f64 overflow: they are taken in units of the largest |x|.
    double peak = 0;
    reader.forEach<double>(0, size, [&](const double *x, int64_t n) {
      for (int64_t i = 0; i < n; ++i)
        if (std::isfinite(x[i]))
          peak = std::max(peak, std::fabs(x[i]));
    });
    unit = peak > 0 ? std::ldexp(1.0, std::clamp(std::ilogb(peak), -1022, 1023))
                    : 1;
  }
  auto firstPass = [&](Segment &segment, Thread &thread, int64_t begin,
                       int64_t end) {
    segment = Segment();
    auto bin = [&](const auto *x, int64_t n) {
      for (int64_t i = 0; i < n; ++i)
        ++thread.counters[wide.index(x[i], segment.below, segment.above)];
    };
    auto useF32 = [&](const float *x, int64_t n) {
      if (!momentsOf(segment, x, n, pivot))
        return false;
      if (known && inF32)
        kernels.histogram(x, n, narrow, thread.counters.data(), stride(),
                          segment.below, segment.above);
      else if (known)
        bin(x, n);
      return true;
    };
    auto useF64 = [&](const double *x, int64_t n) {
      double least = x[0], most = x[0];
      for (int64_t i = 0; i < n; ++i) {
        least = std::min(least, x[i]);
        most = std::max(most, x[i]);
        double d = x[i] / unit - pivot / unit, d2 = d * d;
        segment.s1 += d;
        segment.s2 += d2;
        segment.s3 += d2 * d;
        segment.s4 += d2 * d2;
        segment.absolute += std::fabs(x[i]) / unit;
      }
      segment.extend(least, most, segment.count == 0);
      segment.count += n;
      if (known)
        bin(x, n);
    };
    if (isF64)
      reader.forEach<double>(begin, end, [&](const double *x, int64_t n) {
        useFinite(x, n, &segment, useF64);
      });
    else
      reader.forEach<float>(begin, end, [&](const float *x, int64_t n) {
        if (!useF32(x, n))
          useFinite(x, n, &segment, useF32);
      });
    thread.pending += end - begin;
    if (thread.pending >= (uint64_t(1) << 31))
      flush(thread);
  };
  if (!byValue) {
    overSegments(size, kSegment, used, firstPass);
    gatherCounts(used);
  }

  Statistics result = summarize(allSegments(numSegments), pivot, unit);
  if (!result.count) {
    result.low = low;
    result.high = high;
    return result;
  }
  HistogramRange range = rangeOf(result, isF64);

  // The second pass, where there is one, also counts outliers; they can only
  // exist if the peak is one.
  double sigma = std::sqrt(result.variance), bound = 6 * sigma;
  double peak = std::max(std::fabs(result.min), std::fabs(result.max));
  bool mayHaveOutliers = sigma > 0 && peak > bound;
  float beyond = floorToF32(bound);
  bool counted = false;
  auto secondPass = [&](double low, double width, double high, double epsilon) {
    narrow = narrowBinning(low, width);
    narrow.inside = low == result.min && high == result.max;
    inF32 = !isF64 && fitsF32(low, width);
    wide = wideBinning(low, high, epsilon);
    if (byValue)
      return binValues();
    binPass(reader, used, inF32 ? &narrow : nullptr, &wide, beyond,
            inF32 && mayHaveOutliers);
    counted = inF32;
  };
  switch (options.range) {
  case RangeMode::MinMax:
    if (!range.constant)
      // The sum is taken in f32 first, as the published estimator does.
      secondPass(range.low,
                 static_cast<double>((static_cast<float>(range.high) -
                                      static_cast<float>(range.low)) +
                                     1e-8f),
                 range.high, 1e-8);
    break;
  case RangeMode::PaddedMinMax:
    if (!range.constant) {
      inF32 = false;
      wide = wideBinning(range.low, range.high, 0);
      if (byValue)
        binValues();
      else
        binPass(reader, used, nullptr, &wide, 0, false);
    }
    break;
  case RangeMode::Fixed:
    break;
  case RangeMode::RunningQuantile: {
    // One value says nothing about a range.
    if (range.constant)
      break;
    auto follow = [&] {
      Segment all = allSegments(numSegments);
      followQuantiles(result, range.low, range.high, all.below, all.above);
    };
    if (known) {
      follow();
      break;
    }
    // An outlier in the first tensor puts nearly all of it into one bin, which
    // says little about quantiles: look closer until they span enough bins.
    for (int look = 0; look < 4; ++look) {
      secondPass(range.low, range.high - range.low, range.high, 0);
      double width = (range.high - range.low) / options.bins;
      hasRange = false;
      follow();
      range.low = runningLow;
      range.high = runningHigh;
      if (range.high - range.low > std::min(16, options.bins / 2) * width)
        break;
    }
    secondPass(range.low, range.high - range.low, range.high, 0);
    break;
  }
  }

  if (mayHaveOutliers && byValue) {
    for (size_t i = 0; i < values.size(); ++i)
      if (std::fabs(values[i]) > beyond)
        segments[0].beyond += occurrences[i];
  } else if (mayHaveOutliers && !counted) {
    overSegments(
        size, kSegment, used,
        [&](Segment &segment, Thread &, int64_t begin, int64_t end) {
          segment.beyond = 0;
          bool clean = segment.nonFinite() == 0;
          if (!isF64)
            forEachFinite<float>(
                reader, begin, end, clean, [&](const float *x, int64_t n) {
                  segment.beyond += kernels.countBeyond(x, n, beyond);
                });
          else
            forEachFinite<double>(reader, begin, end, clean,
                                  [&](const double *x, int64_t n) {
                                    for (int64_t i = 0; i < n; ++i)
                                      segment.beyond += std::fabs(x[i]) > bound;
                                  });
        });
  }
  concludeTensor(result, range, allSegments(numSegments));
  return result;
}

//===----------------------------------------------------------------------===//
// Tokens
//===----------------------------------------------------------------------===//

Statistics Estimator::Impl::measureTokens(const TensorView &tensor,
                                          int timeAxis) {
  // The axes up to time number the tokens, those behind it are a token.
  TensorView token = tensor;
  token.rank = 0;
  int64_t tokens = 1;
  for (int i = 0; i < tensor.rank; ++i) {
    if (i <= timeAxis) {
      tokens *= tensor.shape[i];
      continue;
    }
    token.shape[token.rank] = tensor.shape[i];
    token.strides[token.rank] = tensor.strides[i];
    ++token.rank;
  }
  int64_t channels = token.numElements();
  if (channels == 0)
    tokens = 0;
  // Cut into tokens as the tensor is cut into elements elsewhere.
  int64_t perSegment =
      std::max<int64_t>(1, kSegment / std::max<int64_t>(channels, 1));
  int64_t numSegments = (tokens + perSegment - 1) / perSegment;
  int used = static_cast<int>(std::clamp<int64_t>(
      threadCount(options.threads), 1, std::max<int64_t>(numSegments, 1)));
  clearCounts(used);
  auto tokenView = [&](int64_t index) {
    TensorView view = token;
    int64_t offset = 0;
    for (int i = timeAxis; i >= 0; --i) {
      offset += index % tensor.shape[i] * tensor.strides[i];
      index /= tensor.shape[i];
    }
    view.data = static_cast<const char *>(tensor.data) +
                offset * elementTypeSize(tensor.type);
    return view;
  };
  double pivot =
      tokens ? findPivot(TensorReader(tokenView(0), kernels), false) : 0;
  overSegments(
      tokens, perSegment, used,
      [&](Segment &segment, Thread &thread, int64_t begin, int64_t end) {
        segment = Segment();
        for (int64_t index = begin; index < end; ++index) {
          TensorReader reader(tokenView(index), kernels);
          thread.token.clear();
          reader.forEach<float>(0, channels, [&](const float *x, int64_t n) {
            if (kernels.allFinite(x, n)) {
              thread.token.insert(thread.token.end(), x, x + n);
              return;
            }
            for (int64_t i = 0; i < n; ++i) {
              if (std::isfinite(x[i]))
                thread.token.push_back(x[i]);
              else
                segment.countNonFinite(x[i]);
            }
          });
          int64_t n = static_cast<int64_t>(thread.token.size());
          const float *x = thread.token.data();
          if (!n)
            continue;
          Segment own;
          for (int64_t i = 0; i < n; i += kBlock)
            momentsOf(own, x + i, std::min(kBlock, n - i), pivot);
          segment.extend(own.min, own.max, segment.count == 0);
          segment.count += own.count;
          segment.s1 += own.s1;
          segment.s2 += own.s2;
          segment.s3 += own.s3;
          segment.s4 += own.s4;
          segment.absolute += own.absolute;
          float low = static_cast<float>(own.min),
                spread = static_cast<float>(own.max) - low;
          if (spread < 1e-8f) {
            ++segment.dropped;
            continue;
          }
          std::fill(thread.counters.begin(), thread.counters.end(), 0);
          uint64_t below = 0, above = 0;
          BinningF32 binning;
          binning.low = low;
          binning.width = spread + 1e-8f;
          binning.scale = static_cast<float>(options.bins);
          binning.last = options.bins - 1;
          if (std::isfinite(binning.width)) {
            for (int64_t i = 0; i < n; i += kBlock)
              kernels.histogram(x + i, std::min(kBlock, n - i), binning,
                                thread.counters.data(), stride(), below, above);
          } else {
            BinningF64 wide;
            wide.low = own.min;
            wide.width = own.max - own.min;
            wide.bins = options.bins;
            for (int64_t i = 0; i < n; ++i)
              ++thread.counters[wide.index(x[i], below, above)];
          }
          std::fill(thread.counts.begin(), thread.counts.end(), 0);
          flush(thread);
          segment.entropies +=
              entropyRule(RangeMode::MinMax)
                  .of(thread.counts.data(), thread.counts.size(),
                      static_cast<double>(n));
          ++segment.tokens;
        }
      });
  Segment all = allSegments(numSegments);
  Statistics result = summarize(all, pivot, 1);
  if (tokens)
    counts = threads[(numSegments - 1) % used].counts;
  double bound = 6 * std::sqrt(result.variance);
  if (bound > 0 &&
      std::max(std::fabs(result.min), std::fabs(result.max)) > bound) {
    TensorReader reader(tensor, kernels);
    float limit = floorToF32(bound);
    forEachFinite<float>(reader, 0, reader.size(), result.nonFinite() == 0,
                         [&](const float *x, int64_t n) {
                           all.beyond += kernels.countBeyond(x, n, limit);
                         });
  }
  concludeTokens(result, all);
  return result;
}

//===----------------------------------------------------------------------===//
// Sampling
//===----------------------------------------------------------------------===//

/// The elements that are looked at, and where their time is.
Expected<TensorView> Estimator::Impl::sampleOf(const TensorView &tensor,
                                               int &time) const {
  if (Status status = checkTensorView("tensor", tensor); !status)
    return status;
  TensorView sampled = tensor;
  time = options.timeAxis >= 0 ? options.timeAxis : tensor.rank >= 3 ? 1 : 0;
  if (options.sampling == Sampling::Full)
    return sampled;
  if (time >= tensor.rank)
    return Status::invalidArgument(
        "tensor: expected a time axis below the rank " +
        std::to_string(tensor.rank) + ", got axis " + std::to_string(time));
  // Of a stride beyond the size the first position is left, and the product
  // could overflow.
  int64_t size = tensor.shape[time];
  sampled.shape[time] = size ? (size - 1) / options.stride + 1 : 0;
  if (sampled.shape[time] > 1)
    sampled.strides[time] *= options.stride;
  return sampled;
}

Expected<Statistics> Estimator::estimate(const TensorView &tensor) {
  int time = 0;
  Expected<TensorView> sampled = impl->sampleOf(tensor, time);
  if (!sampled)
    return sampled.takeStatus();
  return impl->options.sampling == Sampling::Token
             ? impl->measureTokens(*sampled, time)
             : impl->measure(*sampled);
}

//===----------------------------------------------------------------------===//
// Counts from elsewhere
//===----------------------------------------------------------------------===//

Expected<CountPlan> Estimator::plan(const TensorView &tensor) const {
  const EstimatorOptions &o = impl->options;
  int time = 0;
  Expected<TensorView> sampled = impl->sampleOf(tensor, time);
  if (!sampled)
    return sampled.takeStatus();
  CountPlan plan;
  plan.sample = *sampled;
  plan.timeAxis = time;
  // Axes that a token has, or all of them.
  TensorView inner = *sampled;
  if (o.sampling == Sampling::Token) {
    plan.rows = *sampled;
    plan.rows.rank = time + 1;
    inner.rank = 0;
    for (int i = time + 1; i < sampled->rank; ++i) {
      inner.shape[inner.rank] = sampled->shape[i];
      inner.strides[inner.rank++] = sampled->strides[i];
    }
    inner = mergeAxes(inner);
    plan.tokens = true;
    plan.isCountable = inner.rank <= 1;
  } else {
    inner = plan.rows = mergeAxes(inner);
    plan.rows.rank = std::max(inner.rank - 1, 0);
  }
  if (inner.rank) {
    plan.columns = inner.shape[inner.rank - 1];
    plan.columnStride = inner.strides[inner.rank - 1];
  }
  plan.isCountable &= tensor.type != ElementType::F64;
  plan.bins = o.bins;
  switch (o.range) {
  case RangeMode::MinMax:
    plan.rule = plan.tokens ? CountPlan::Rule::None : CountPlan::Rule::MinMax;
    break;
  case RangeMode::PaddedMinMax:
    plan.rule = CountPlan::Rule::PaddedMinMax;
    break;
  case RangeMode::RunningQuantile:
    // The first tensor is looked at several times.
    plan.isCountable &= impl->hasRange;
    [[fallthrough]];
  case RangeMode::Fixed:
    plan.low = o.range == RangeMode::Fixed ? o.low : impl->runningLow;
    plan.width =
        (o.range == RangeMode::Fixed ? o.high : impl->runningHigh) - plan.low;
    plan.rule = impl->fitsF32(plan.low, plan.width) ? CountPlan::Rule::GivenF32
                                                    : CountPlan::Rule::GivenF64;
    break;
  }
  return plan;
}

Statistics Estimator::finish(const CountPlan &plan, const CountedTensor &c) {
  Impl &e = *impl;
  Segment all;
  all.count = c.count;
  all.nan = c.nan;
  all.positive = c.positiveInfinity;
  all.negative = c.negativeInfinity;
  all.min = c.min;
  all.max = c.max;
  all.s1 = c.s1;
  all.s2 = c.s2;
  all.s3 = c.s3;
  all.s4 = c.s4;
  all.absolute = c.absolute;
  all.below = c.below;
  all.above = c.above;
  all.beyond = c.outliers;
  all.tokens = c.tokens;
  all.dropped = c.tokensDropped;
  Statistics result = e.summarize(all, c.pivot, 1);
  if (plan.tokens) {
    // Bins of all tokens by how many elements they have.
    EntropyRule rule = entropyRule(RangeMode::MinMax);
    for (int64_t count = 1; count <= plan.columns; ++count)
      if (uint64_t bins = c.counts[count])
        all.entropies += static_cast<double>(bins) *
                         rule.term(static_cast<uint64_t>(count),
                                   static_cast<double>(plan.columns));
    all.entropies = std::max(all.entropies, 0.0);
    e.concludeTokens(result, all);
    return result;
  }
  e.counts.assign(c.counts, c.counts + e.options.bins);
  HistogramRange range = e.rangeOf(result, /*isF64=*/false);
  if (!result.count) {
    result.low = e.knowsRange() ? range.low : e.options.low;
    result.high = e.knowsRange() ? range.high : e.options.high;
    return result;
  }
  if (e.options.range == RangeMode::RunningQuantile && !range.constant)
    e.followQuantiles(result, range.low, range.high, all.below, all.above);
  e.concludeTensor(result, range, all);
  return result;
}

Statistics Estimator::finish(const CountPlan &plan, const void *elements) {
  TensorView copy = plan.sample;
  copy.data = elements;
  int64_t stride = 1;
  for (int i = copy.rank; i-- > 0; stride *= copy.shape[i])
    copy.strides[i] = stride;
  return plan.tokens ? impl->measureTokens(copy, plan.timeAxis)
                     : impl->measure(copy);
}
