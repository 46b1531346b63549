//===- Statistics.h - What the scheduler knows about data -------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_SCHEDULER_STATISTICS_H
#define COREY_SCHEDULER_STATISTICS_H

#include <cmath>
#include <cstdint>
#include <initializer_list>

namespace corey::scheduler {

class Bits;

/// An entropy in nats. The unit is part of the type because the rules of the
/// literature differ in it: a ceiling of log2 256 = 8 taken for nats moves
/// every choice by a bucket.
class Nats {
public:
  constexpr Nats() = default;
  constexpr explicit Nats(double value) : amount(value) {}
  constexpr Nats(Bits bits);
  constexpr double value() const { return amount; }
  /// The largest entropy of a histogram of `bins` bins, ln(bins).
  static Nats ceiling(int64_t bins) {
    return Nats(std::log(static_cast<double>(bins)));
  }

private:
  double amount = 0;
};

/// An entropy in bits.
class Bits {
public:
  constexpr Bits() = default;
  constexpr explicit Bits(double value) : amount(value) {}
  constexpr Bits(Nats nats);
  constexpr double value() const { return amount; }

private:
  double amount = 0;
};

constexpr double kNatsPerBit = 0.693147180559945309417;
constexpr Nats::Nats(Bits bits) : amount(bits.value() * kNatsPerBit) {}
constexpr Bits::Bits(Nats nats) : amount(nats.value() / kNatsPerBit) {}

/// Element types the library reads.
enum class ElementType { F64, F32, F16, BF16 };

/// "f64", "f32", "f16" or "bf16".
const char *elementTypeName(ElementType type);
/// Bytes of an element.
int64_t elementTypeSize(ElementType type);

/// Memory of the caller seen as a tensor.
struct TensorView {
  static constexpr int kMaxRank = 8;

  /// Element 0 of every axis.
  const void *data = nullptr;
  ElementType type = ElementType::F32;
  int rank = 0;
  int64_t shape[kMaxRank] = {};
  /// In elements; any sign, 0 for an axis that repeats.
  int64_t strides[kMaxRank] = {};

  /// A row-major tensor of at most kMaxRank axes.
  static TensorView contiguous(const void *data, ElementType type,
                               std::initializer_list<int64_t> shape);
  int64_t numElements() const;
};

/// Whether statistics may be decided upon, and if not, why.
enum class Validity {
  Ok,
  /// All finite elements are equal (by the range mode's own criterion): an
  /// entropy of 0 that is a fact.
  Constant,
  /// There was no element.
  Empty,
  /// There were NaNs or infinities. The numbers are those of the finite
  /// elements, but nothing should be decided on them.
  NonFinite
};

/// "ok", "constant", "empty" or "not finite".
const char *validityName(Validity validity);

/// Statistics of a tensor, or of the part of it that was sampled. All but the
/// counts of non-finite elements describe the finite elements.
struct Statistics {
  Validity validity = Validity::Empty;
  /// Finite elements, and the others by kind.
  uint64_t count = 0, nan = 0, positiveInfinity = 0, negativeInfinity = 0;
  double min = 0, max = 0, mean = 0;
  /// Population variance.
  double variance = 0;
  /// m4 / m2^2: 3 for a normal distribution; 0 if the variance is 0.
  double kurtosis = 0;
  /// Mean of |x| and root of the mean of x^2.
  double meanAbsolute = 0, rms = 0;
  /// Share of elements with |x| > 6 sigma, not centred; 0 for constant data.
  double outlierFraction = 0;
  /// max |x| / rms; 0 if the rms is 0.
  double peakToRms = 0;

  /// Entropy of the histogram: 0 for empty and constant data. In token mode the
  /// mean over tokens.
  Nats entropy;
  /// Bins of the histogram, and its range.
  int32_t bins = 0;
  double low = 0, high = 0;
  /// Elements outside the range; they count in the first and the last bin.
  uint64_t below = 0, above = 0;
  /// Token mode: tokens with an entropy, and tokens dropped for being constant.
  uint64_t tokens = 0, tokensDropped = 0;

  uint64_t nonFinite() const {
    return nan + positiveInfinity + negativeInfinity;
  }
  /// Whether a policy may decide on the numbers.
  bool usable() const {
    return validity == Validity::Ok || validity == Validity::Constant;
  }
  /// entropy / ln(bins), in [0, 1]; 0 without bins.
  double normalizedEntropy() const {
    if (bins < 2)
      return 0;
    double ratio = entropy.value() / Nats::ceiling(bins).value();
    return ratio < 0 ? 0 : ratio > 1 ? 1 : ratio;
  }
};

/// Exponential moving average: v <- decay v + (1 - decay) x, v0 the first x.
class MovingAverage {
public:
  explicit MovingAverage(double decay = 0.85) : decay(decay) {}
  double update(double x) {
    current = hasValue ? decay * current + (1 - decay) * x : x;
    hasValue = true;
    return current;
  }
  bool empty() const { return !hasValue; }
  double value() const { return current; }

private:
  double decay, current = 0;
  bool hasValue = false;
};

} // namespace corey::scheduler

#endif // COREY_SCHEDULER_STATISTICS_H
