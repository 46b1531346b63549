//===- EstimatorTest.cpp - Tests of the statistics of tensors -------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Scheduler/Estimator.h"

#include "EstimatorKernels.h"

#include "gtest/gtest.h"

#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <new>
#include <vector>

using namespace corey;
using namespace corey::scheduler;

//===----------------------------------------------------------------------===//
// Counting allocations
//===----------------------------------------------------------------------===//

static std::atomic<size_t> allocations{0};
static std::atomic<bool> counting{false};

void *operator new(size_t size) {
  if (counting.load(std::memory_order_relaxed))
    allocations.fetch_add(1, std::memory_order_relaxed);
  void *pointer = std::malloc(size ? size : 1);
  if (!pointer)
    std::abort();
  return pointer;
}
void operator delete(void *pointer) noexcept { std::free(pointer); }
void operator delete(void *pointer, size_t) noexcept { std::free(pointer); }

namespace {
constexpr double Inf = std::numeric_limits<double>::infinity();
constexpr double NotANumber = std::numeric_limits<double>::quiet_NaN();
constexpr ElementType kTypes[] = {ElementType::F64, ElementType::F32,
                                  ElementType::F16, ElementType::BF16};

//===----------------------------------------------------------------------===//
// Data
//===----------------------------------------------------------------------===//

/// splitmix64 and Box-Muller: the same numbers everywhere.
class Random {
public:
  explicit Random(uint64_t seed) : state(seed) {}
  uint64_t next() {
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  int64_t below(int64_t bound) {
    return static_cast<int64_t>(next() % static_cast<uint64_t>(bound));
  }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  double normal() {
    double u = std::max(uniform(), 1e-300), v = uniform();
    return std::sqrt(-2 * std::log(u)) * std::cos(6.283185307179586 * v);
  }

private:
  uint64_t state;
};

uint16_t encodeF16(double x) {
  uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  double a = std::fabs(x);
  if (x != x)
    return sign | 0x7e00;
  if (a >= 65520)
    return sign | 0x7c00;
  if (a == 0)
    return sign;
  int e = std::max(std::ilogb(a), -14);
  auto m = static_cast<int>(std::nearbyint(std::ldexp(a, 10 - e)));
  if (m == 2048) {
    m = 1024;
    ++e;
  }
  return static_cast<uint16_t>(sign |
                               (m < 1024 ? m : ((e + 15) << 10) + m - 1024));
}
double decodeF16(uint16_t h) {
  int e = h >> 10 & 31, m = h & 1023;
  double a = e == 31 ? (m ? NotANumber : Inf)
             : e     ? std::ldexp(1024 + m, e - 25)
                     : std::ldexp(m, -24);
  return h & 0x8000 ? -a : a;
}
uint16_t encodeBF16(double x) {
  auto f = static_cast<float>(x);
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if (f != f)
    return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
double decodeBF16(uint16_t b) {
  int e = b >> 7 & 255, m = b & 127;
  double a = e == 255 ? (m ? NotANumber : Inf)
             : e      ? std::ldexp(128 + m, e - 134)
                      : std::ldexp(m, -133);
  return b & 0x8000 ? -a : a;
}

/// Numbers as a type holds them.
struct Data {
  ElementType type;
  std::vector<double> f64;
  std::vector<float> f32;
  std::vector<uint16_t> bits;

  Data(ElementType type, size_t size) : type(type) {
    if (type == ElementType::F64)
      f64.resize(size);
    else if (type == ElementType::F32)
      f32.resize(size);
    else
      bits.resize(size);
  }
  void set(size_t i, double x) {
    switch (type) {
    case ElementType::F64:
      f64[i] = x;
      break;
    case ElementType::F32:
      f32[i] = static_cast<float>(x);
      break;
    case ElementType::F16:
      bits[i] = encodeF16(x);
      break;
    case ElementType::BF16:
      bits[i] = encodeBF16(x);
      break;
    }
  }
  double get(size_t i) const {
    switch (type) {
    case ElementType::F64:
      return f64[i];
    case ElementType::F32:
      return f32[i];
    case ElementType::F16:
      return decodeF16(bits[i]);
    case ElementType::BF16:
      return decodeBF16(bits[i]);
    }
    return 0;
  }
  const void *at(size_t i) const {
    return type == ElementType::F64   ? static_cast<const void *>(&f64[0] + i)
           : type == ElementType::F32 ? static_cast<const void *>(&f32[0] + i)
                                      : static_cast<const void *>(&bits[0] + i);
  }
  size_t size() const { return f64.size() + f32.size() + bits.size(); }
  TensorView view(std::initializer_list<int64_t> shape) const {
    return TensorView::contiguous(size() ? at(0) : nullptr, type, shape);
  }
};

Data normals(ElementType type, size_t size, uint64_t seed, double mean = 0,
             double sigma = 1) {
  Data data(type, size);
  Random random(seed);
  for (size_t i = 0; i < size; ++i)
    data.set(i, mean + sigma * random.normal());
  return data;
}

/// The elements of a view whose data is element `origin` of `data`, naively.
std::vector<double> elements(const Data &data, int64_t origin,
                             const TensorView &view) {
  std::vector<double> result;
  int64_t index[TensorView::kMaxRank] = {};
  for (int i = 0; i < view.rank; ++i)
    if (view.shape[i] == 0)
      return result;
  for (;;) {
    int64_t offset = origin;
    for (int i = 0; i < view.rank; ++i)
      offset += index[i] * view.strides[i];
    result.push_back(data.get(static_cast<size_t>(offset)));
    int axis = view.rank - 1;
    while (axis >= 0 && ++index[axis] == view.shape[axis])
      index[axis--] = 0;
    if (axis < 0)
      return result;
  }
}

//===----------------------------------------------------------------------===//
// The same, naively
//===----------------------------------------------------------------------===//

struct Reference {
  uint64_t count = 0, nan = 0, positive = 0, negative = 0, outliers = 0;
  double min = 0, max = 0, mean = 0, variance = 0, kurtosis = 0, absolute = 0,
         rms = 0;
  bool constant = false;
  std::vector<uint64_t> histogram;
  uint64_t below = 0, above = 0;
  double entropy = 0;
};

double naiveEntropy(const std::vector<uint64_t> &histogram, double total,
                    RangeMode range) {
  double h = 0;
  for (uint64_t count : histogram) {
    auto c = static_cast<double>(count);
    if (range == RangeMode::MinMax) {
      double p = c / (total + 1e-10);
      if (p > 1e-10)
        h -= p * std::log(p + 1e-10);
    } else if (count) {
      double p = c / total;
      h -= p * std::log(p + (range == RangeMode::PaddedMinMax ? 1e-12 : 0));
    }
  }
  return std::max(h, 0.0);
}

/// numpy.histogram's bins by their edges alone.
size_t binByEdges(double x, double low, double high, int bins) {
  double step = (high - low) / bins;
  auto edge = [&](int i) { return i * step + low; };
  int begin = 0, end = bins;
  // The last edge that is not above x.
  while (end - begin > 1) {
    int middle = (begin + end) / 2;
    (edge(middle) <= x ? begin : end) = middle;
  }
  return static_cast<size_t>(begin);
}

Reference naive(const std::vector<double> &all, ElementType type,
                const EstimatorOptions &options) {
  Reference r;
  std::vector<double> x;
  for (double value : all) {
    if (value != value)
      ++r.nan;
    else if (value == Inf)
      ++r.positive;
    else if (value == -Inf)
      ++r.negative;
    else
      x.push_back(value);
  }
  r.count = x.size();
  auto bins = static_cast<size_t>(options.bins);
  r.histogram.assign(bins, 0);
  if (x.empty())
    return r;
  long double sum = 0, absolute = 0, square = 0;
  r.min = r.max = x[0];
  for (double v : x) {
    r.min = std::min(r.min, v);
    r.max = std::max(r.max, v);
    sum += v;
    absolute += std::fabs(v);
    square += static_cast<long double>(v) * v;
  }
  auto n = static_cast<long double>(x.size());
  long double mean = sum / n, m2 = 0, m4 = 0;
  for (double v : x) {
    long double d = v - mean;
    m2 += d * d;
    m4 += d * d * d * d;
  }
  m2 /= n;
  m4 /= n;
  r.mean = static_cast<double>(mean);
  r.variance = static_cast<double>(m2);
  r.kurtosis = r.min < r.max ? static_cast<double>(m4 / (m2 * m2)) : 0;
  r.absolute = static_cast<double>(absolute / n);
  r.rms = static_cast<double>(std::sqrt(square / n));
  if (r.min < r.max)
    for (double v : x)
      r.outliers += std::fabs(v) > 6 * std::sqrt(m2);

  bool isF64 = type == ElementType::F64;
  double low = options.low, high = options.high;
  switch (options.range) {
  case RangeMode::MinMax: {
    if (isF64) {
      r.constant = r.max - r.min < 1e-8;
    } else {
      r.constant =
          static_cast<float>(r.max) - static_cast<float>(r.min) < 1e-8f;
    }
    auto lowF = static_cast<float>(r.min);
    float widthF = (static_cast<float>(r.max) - lowF) + 1e-8f;
    for (double v : x) {
      double t = (v - r.min) / (r.max - r.min + 1e-8);
      auto at = static_cast<int64_t>(t * options.bins);
      if (!isF64 && std::isfinite(widthF)) {
        float tF = (static_cast<float>(v) - lowF) / widthF;
        at = static_cast<int64_t>(tF * static_cast<float>(options.bins));
      }
      at = std::min<int64_t>(at, options.bins - 1);
      if (!r.constant)
        ++r.histogram[static_cast<size_t>(at)];
    }
    break;
  }
  case RangeMode::PaddedMinMax: {
    r.constant = std::fabs(r.max - r.min) <= 1e-8 + 1e-5 * std::fabs(r.max);
    double margin = std::max(0.05 * (r.max - r.min), 1e-6);
    for (double v : x)
      if (!r.constant)
        ++r.histogram[binByEdges(v, r.min - margin, r.max + margin,
                                 options.bins)];
    break;
  }
  case RangeMode::Fixed:
  case RangeMode::RunningQuantile:
    r.constant = r.min == r.max;
    for (double v : x) {
      // What f32 holds is binned in f32, or in f64 where that cannot hold the
      // range.
      auto lowF = static_cast<float>(low),
           widthF = static_cast<float>(high - low);
      double t = (v - low) / (high - low);
      if (!isF64 && static_cast<double>(lowF) == low && widthF >= 1e-30f &&
          std::isfinite(widthF))
        t = (static_cast<float>(v) - lowF) / widthF;
      r.below += t < 0;
      r.above += t > 1;
      ++r.histogram[static_cast<size_t>(
          std::min<double>(std::max(t * options.bins, 0.0), options.bins - 1))];
    }
    break;
  }
  if (!r.constant)
    r.entropy =
        naiveEntropy(r.histogram, static_cast<double>(n), options.range);
  else if (options.range != RangeMode::Fixed)
    r.histogram[0] = r.count;
  return r;
}

void expectNear(double expected, double got, double relative,
                const char *what) {
  if (expected == got)
    return;
  EXPECT_LE(std::fabs(expected - got),
            relative * std::max(std::fabs(expected), 1e-30))
      << what << ": expected " << expected << ", got " << got;
}

/// Moments in units of the spread: an offset leaves none of f64's digits.
void expectMatches(const Reference &r, const Statistics &s,
                   const std::vector<uint64_t> &histogram) {
  EXPECT_EQ(r.count, s.count);
  EXPECT_EQ(r.nan, s.nan);
  EXPECT_EQ(r.positive, s.positiveInfinity);
  EXPECT_EQ(r.negative, s.negativeInfinity);
  Validity validity = r.nan + r.positive + r.negative ? Validity::NonFinite
                      : r.count == 0                  ? Validity::Empty
                      : r.constant                    ? Validity::Constant
                                                      : Validity::Ok;
  EXPECT_STREQ(validityName(validity), validityName(s.validity));
  EXPECT_EQ(r.min, s.min);
  EXPECT_EQ(r.max, s.max);
  double sigma = std::sqrt(r.variance);
  EXPECT_LE(std::fabs(r.mean - s.mean),
            1e-9 * sigma + 4e-16 * std::fabs(r.mean))
      << r.mean << " " << s.mean;
  // Where the naive sums have no digits left either, nothing is compared.
  if (sigma > 1e-12 * std::fabs(r.mean)) {
    expectNear(r.variance, s.variance, 1e-8, "variance");
    expectNear(r.kurtosis, s.kurtosis, 1e-7, "kurtosis");
  }
  expectNear(r.absolute, s.meanAbsolute, 1e-5, "mean |x|");
  expectNear(r.rms, s.rms, 1e-9, "rms");
  double peak = std::max(std::fabs(r.min), std::fabs(r.max));
  expectNear(r.rms > 0 ? peak / r.rms : 0, s.peakToRms, 1e-9, "peak to rms");
  expectNear(r.count ? static_cast<double>(r.outliers) /
                           static_cast<double>(r.count)
                     : 0,
             s.outlierFraction, 1e-12, "outliers");
  EXPECT_EQ(r.histogram, histogram);
  EXPECT_EQ(r.below, s.below);
  EXPECT_EQ(r.above, s.above);
  EXPECT_NEAR(r.entropy, s.entropy.value(), 1e-9);
}

Estimator make(const EstimatorOptions &options) {
  Expected<Estimator> made = Estimator::create(options);
  EXPECT_TRUE(made) << made.status().toString();
  return std::move(*made);
}

Statistics run(Estimator &estimator, const TensorView &view) {
  Expected<Statistics> result = estimator.estimate(view);
  EXPECT_TRUE(result) << result.status().toString();
  return result ? *result : Statistics();
}

void check(const Data &data, int64_t origin, const TensorView &view,
           const EstimatorOptions &options) {
  Estimator estimator = make(options);
  Statistics s = run(estimator, view);
  expectMatches(naive(elements(data, origin, view), data.type, options), s,
                estimator.histogram());
}
void check(const Data &data, const EstimatorOptions &options) {
  check(data, 0, data.view({static_cast<int64_t>(data.size())}), options);
}

EstimatorOptions withRange(RangeMode range, int bins = 256) {
  EstimatorOptions options;
  options.range = range;
  options.bins = bins;
  // Powers of two: f32 and f64 agree about the bins of a power of two.
  options.low = -2;
  options.high = 2;
  return options;
}
constexpr RangeMode kExactRanges[] = {
    RangeMode::MinMax, RangeMode::PaddedMinMax, RangeMode::Fixed};

/// Whether two statistics are the same to the last bit.
bool identical(const Statistics &a, const Statistics &b) {
  auto bits = [](double x) {
    uint64_t result;
    std::memcpy(&result, &x, 8);
    return result;
  };
  double left[] = {a.min,       a.max,
                   a.mean,      a.variance,
                   a.kurtosis,  a.meanAbsolute,
                   a.rms,       a.outlierFraction,
                   a.peakToRms, a.entropy.value(),
                   a.low,       a.high};
  double right[] = {b.min,       b.max,
                    b.mean,      b.variance,
                    b.kurtosis,  b.meanAbsolute,
                    b.rms,       b.outlierFraction,
                    b.peakToRms, b.entropy.value(),
                    b.low,       b.high};
  for (size_t i = 0; i < std::size(left); ++i)
    if (bits(left[i]) != bits(right[i])) {
      ADD_FAILURE() << "field " << i << ": " << left[i] << " " << right[i];
      return false;
    }
  return a.validity == b.validity && a.count == b.count && a.nan == b.nan &&
         a.positiveInfinity == b.positiveInfinity &&
         a.negativeInfinity == b.negativeInfinity && a.bins == b.bins &&
         a.below == b.below && a.above == b.above && a.tokens == b.tokens &&
         a.tokensDropped == b.tokensDropped;
}

std::string describe(ElementType type, RangeMode range, int bins,
                     int64_t size) {
  return std::string(elementTypeName(type)) + " range " +
         std::to_string(static_cast<int>(range)) + " K " +
         std::to_string(bins) + " n " + std::to_string(size);
}
} // namespace

//===----------------------------------------------------------------------===//
// Numbers
//===----------------------------------------------------------------------===//

TEST(EstimatorTest, EverySizeTypeRangeAndNumberOfBins) {
  for (ElementType type : kTypes)
    for (int64_t size : {0, 1, 7, 8, 9, 2047, 2048, 2049, 5000}) {
      Data data = normals(type, static_cast<size_t>(size),
                          static_cast<uint64_t>(size) + 1);
      for (RangeMode range : kExactRanges)
        for (int bins : {2, 3, 64, 256, 4096, 65536}) {
          SCOPED_TRACE(describe(type, range, bins, size));
          EstimatorOptions options = withRange(range, bins);
          // Thirds are not exact: no data at their edges.
          if (bins == 3 && range == RangeMode::Fixed)
            options.low = -3.00048828125, options.high = 3.00048828125;
          check(data, options);
        }
    }
}

TEST(EstimatorTest, SegmentsAndCountedBits) {
  struct Case {
    ElementType type;
    int64_t size;
  };
  const Case cases[] = {
      {ElementType::F32, 262144},  {ElementType::F32, 262145},
      {ElementType::F32, 600001},  {ElementType::F64, 262147},
      {ElementType::BF16, 131071}, {ElementType::BF16, 131072},
      {ElementType::BF16, 300001}, {ElementType::F16, 131071},
      {ElementType::F16, 131072},  {ElementType::F16, 300001},
      {ElementType::F16, 4194304}, {ElementType::F16, 4194305}};
  for (const Case &c : cases) {
    Data data = normals(c.type, static_cast<size_t>(c.size), 5, 0.25);
    for (size_t i = 0; i < data.size(); i += 100000)
      data.set(i, 20);
    for (RangeMode range : kExactRanges) {
      if (c.size > 1000000 && range != RangeMode::MinMax)
        continue;
      SCOPED_TRACE(describe(c.type, range, 256, c.size));
      check(data, withRange(range));
    }
  }
}

/// The path that counts bits and the one that does not see one and the same
/// data: a tensor and itself four times over, by an axis that repeats.
TEST(EstimatorTest, CountedBitsAgreeWithElements) {
  for (ElementType type : {ElementType::F16, ElementType::BF16})
    for (int bins : {2, 3, 100, 256, 65536})
      for (RangeMode range : {RangeMode::MinMax, RangeMode::PaddedMinMax,
                              RangeMode::Fixed, RangeMode::RunningQuantile}) {
        SCOPED_TRACE(describe(type, range, bins, 0));
        Data data = normals(type, 65536, 77, 0.1, 3);
        data.set(5, 65000);
        data.set(6, NotANumber);
        data.set(7, -Inf);
        Estimator few = make(withRange(range, bins));
        Estimator many = make(withRange(range, bins));
        for (int call = 0; call < 3; ++call) {
          Statistics a = run(few, data.view({65536}));
          TensorView times = data.view({4, 65536});
          times.strides[0] = 0;
          Statistics b = run(many, times);
          ASSERT_EQ(4 * a.count, b.count);
          EXPECT_EQ(4 * a.nan, b.nan);
          EXPECT_EQ(4 * a.negativeInfinity, b.negativeInfinity);
          EXPECT_EQ(4 * a.below, b.below);
          EXPECT_EQ(4 * a.above, b.above);
          EXPECT_EQ(a.min, b.min);
          EXPECT_EQ(a.max, b.max);
          expectNear(a.low, b.low, 1e-12, "low");
          expectNear(a.high, b.high, 1e-12, "high");
          expectNear(a.mean, b.mean, 1e-9, "mean");
          expectNear(a.variance, b.variance, 1e-9, "variance");
          expectNear(a.kurtosis, b.kurtosis, 1e-9, "kurtosis");
          expectNear(a.meanAbsolute, b.meanAbsolute, 1e-5, "mean |x|");
          expectNear(a.outlierFraction, b.outlierFraction, 1e-12, "outliers");
          EXPECT_NEAR(a.entropy.value(), b.entropy.value(), 1e-9);
          for (size_t i = 0; i < few.histogram().size(); ++i)
            ASSERT_EQ(4 * few.histogram()[i], many.histogram()[i]) << i;
        }
      }
}

TEST(EstimatorTest, EveryBitPatternOf16Bits) {
  // All codes once (few), and four times over (counted by bits).
  for (ElementType type : {ElementType::F16, ElementType::BF16})
    for (int64_t times : {1, 4}) {
      SCOPED_TRACE(elementTypeName(type));
      Data data(type, 65536);
      for (size_t i = 0; i < 65536; ++i)
        data.bits[i] = static_cast<uint16_t>(i);
      TensorView view = data.view({times, 65536});
      view.strides[0] = 0;
      check(data, 0, view, withRange(RangeMode::MinMax));
    }
}

TEST(EstimatorTest, AnyStrides) {
  Random random(3);
  for (int round = 0; round < 600; ++round) {
    ElementType type = kTypes[random.below(4)];
    Data data = normals(type, 4096, static_cast<uint64_t>(round));
    TensorView view;
    view.type = type;
    view.rank = static_cast<int>(random.below(9));
    int64_t least = 0, most = 0, stride = 1, order[8];
    for (int i = 0; i < view.rank; ++i)
      order[i] = i;
    for (int i = view.rank; i > 1; --i)
      std::swap(order[i - 1], order[random.below(i)]);
    // Axes in a random order of memory, with gaps, some backwards, some that
    // repeat.
    for (int k = 0; k < view.rank; ++k) {
      int64_t i = order[k];
      int64_t room = std::max<int64_t>(4000 / (stride * 2), 1);
      view.shape[i] = random.below(40) == 0
                          ? 0
                          : 1 + random.below(std::min<int64_t>(room, 5));
      int64_t kind = random.below(6);
      view.strides[i] = kind == 0 ? 0 : kind == 1 ? -stride : stride;
      int64_t reach = std::max<int64_t>(view.shape[i] - 1, 0) * view.strides[i];
      (reach < 0 ? least : most) += reach;
      if (kind != 0)
        stride *= view.shape[i] == 0 ? 1 : view.shape[i];
      if (random.below(4) == 0)
        ++stride;
    }
    int64_t origin = -least;
    ASSERT_LT(origin + most, 4096);
    view.data = data.at(static_cast<size_t>(origin));
    SCOPED_TRACE("round " + std::to_string(round));
    check(data, origin, view, withRange(kExactRanges[random.below(3)], 64));
  }
}

TEST(EstimatorTest, TransposedAndReversedLargeTensors) {
  for (ElementType type : kTypes) {
    SCOPED_TRACE(elementTypeName(type));
    Data data = normals(type, 700 * 451, 9);
    TensorView view = data.view({700, 451});
    std::swap(view.shape[0], view.shape[1]);
    std::swap(view.strides[0], view.strides[1]);
    check(data, 0, view, withRange(RangeMode::MinMax));
    // Every second column, rows backwards.
    TensorView gaps = data.view({700, 451});
    gaps.data = data.at(699 * 451);
    gaps.strides[0] = -451;
    gaps.strides[1] = 2;
    gaps.shape[1] = 226;
    check(data, 699 * 451, gaps, withRange(RangeMode::PaddedMinMax));
  }
}

TEST(EstimatorTest, ScalarsAndOnes) {
  for (ElementType type : kTypes) {
    Data data(type, 1);
    data.set(0, -2.5);
    TensorView scalar = data.view({});
    Estimator estimator = make(withRange(RangeMode::MinMax));
    Statistics s = run(estimator, scalar);
    EXPECT_EQ(Validity::Constant, s.validity);
    EXPECT_EQ(1u, s.count);
    EXPECT_EQ(-2.5, s.mean);
    EXPECT_EQ(2.5, s.meanAbsolute);
    EXPECT_EQ(2.5, s.rms);
    EXPECT_EQ(1, s.peakToRms);
    EXPECT_EQ(0, s.variance);
    EXPECT_EQ(0, s.entropy.value());
    TensorView ones = data.view({1, 1, 1, 1, 1, 1, 1, 1});
    // Strides of axes of one element mean nothing.
    for (int64_t &stride : ones.strides)
      stride = INT64_MAX;
    EXPECT_TRUE(identical(s, run(estimator, ones)));
  }
}

//===----------------------------------------------------------------------===//
// Not finite, constant, empty, extreme
//===----------------------------------------------------------------------===//

TEST(EstimatorTest, NonFiniteAnywhere) {
  constexpr size_t kSizes[] = {1, 8, 9, 2049, 4100, 140000};
  for (ElementType type : kTypes)
    for (size_t size : kSizes)
      for (size_t at : {size_t(0), size_t(1), size_t(7), size_t(8),
                        size_t(2047), size_t(2048), size - 1}) {
        if (at >= size || (size > 100000 && at != 8))
          continue;
        for (double bad : {NotANumber, Inf, -Inf}) {
          Data data = normals(type, size, size);
          data.set(at, bad);
          for (RangeMode range : kExactRanges) {
            SCOPED_TRACE(describe(type, range, 64, static_cast<int64_t>(size)) +
                         " at " + std::to_string(at));
            check(data, withRange(range, 64));
          }
        }
      }
}

TEST(EstimatorTest, NothingButNonFinite) {
  for (ElementType type : kTypes)
    for (size_t size : {3, 2048, 4096, 200000})
      for (RangeMode range : {RangeMode::MinMax, RangeMode::PaddedMinMax,
                              RangeMode::Fixed, RangeMode::RunningQuantile}) {
        SCOPED_TRACE(describe(type, range, 64, static_cast<int64_t>(size)));
        Data data(type, size);
        uint64_t kinds[3] = {};
        for (size_t i = 0; i < size; ++i) {
          data.set(i, i % 3 == 0 ? NotANumber : i % 3 == 1 ? Inf : -Inf);
          ++kinds[i % 3];
        }
        Estimator estimator = make(withRange(range, 64));
        Statistics s = run(estimator, data.view({int64_t(size)}));
        EXPECT_EQ(Validity::NonFinite, s.validity);
        EXPECT_FALSE(s.usable());
        EXPECT_EQ(0u, s.count);
        EXPECT_EQ(kinds[0], s.nan);
        EXPECT_EQ(kinds[1], s.positiveInfinity);
        EXPECT_EQ(kinds[2], s.negativeInfinity);
        EXPECT_EQ(0, s.entropy.value());
        EXPECT_EQ(0, s.mean);
        EXPECT_EQ(0, s.rms);
        EXPECT_TRUE(std::isfinite(s.kurtosis));
        // It says nothing about a range: the next tensor is the first.
        Data good = normals(type, 5000, 4);
        Statistics after = run(estimator, good.view({5000}));
        Estimator fresh = make(withRange(range, 64));
        EXPECT_TRUE(identical(run(fresh, good.view({5000})), after));
      }
}

/// The first block holds nothing to take a pivot from.
TEST(EstimatorTest, OffsetBehindABlockOfNaNs) {
  for (ElementType type : {ElementType::F64, ElementType::F32}) {
    SCOPED_TRACE(elementTypeName(type));
    Data data = normals(type, 20000, 8, 1e6, 1);
    for (size_t i = 0; i < 2048; ++i)
      data.set(i, NotANumber);
    check(data, withRange(RangeMode::MinMax));
  }
}

TEST(EstimatorTest, BigOffsets) {
  // f32 has no digits for a sigma of 1e-3 at 1e6; f64 has.
  check(normals(ElementType::F64, 300000, 1, 1e6, 1e-3),
        withRange(RangeMode::MinMax));
  check(normals(ElementType::F64, 3000, 1, -1e9, 1e-2),
        withRange(RangeMode::MinMax));
  check(normals(ElementType::F32, 300000, 1, 1e4, 0.1),
        withRange(RangeMode::MinMax));
  check(normals(ElementType::F32, 300000, 1, -1e6, 10),
        withRange(RangeMode::MinMax));
  check(normals(ElementType::BF16, 200000, 1, 300, 10),
        withRange(RangeMode::MinMax));
  // Where the padded range's criterion calls it constant, the other does not.
  Data data = normals(ElementType::F64, 1000, 2, 1e6, 1e-3);
  check(data, withRange(RangeMode::PaddedMinMax));
  Estimator padded = make(withRange(RangeMode::PaddedMinMax));
  EXPECT_EQ(Validity::Constant, run(padded, data.view({1000})).validity);
}

/// A pivot that lies far from what follows costs no digits that matter.
TEST(EstimatorTest, FirstBlockUnlikeTheRest) {
  for (ElementType type : {ElementType::F64, ElementType::F32})
    for (double first : {0.0, 1e4, -1e7}) {
      SCOPED_TRACE(first);
      Data data = normals(type, 100000, 6, 100, 0.5);
      for (size_t i = 0; i < 2048; ++i)
        data.set(i, first);
      check(data, withRange(RangeMode::MinMax));
    }
}

TEST(EstimatorTest, ConstantByEachCriterion) {
  for (ElementType type : kTypes)
    for (int64_t size : {2, 100, 3000, 200000})
      for (double value : {0.0, -0.0, 1.0, -3.5, 1024.0}) {
        Data data(type, static_cast<size_t>(size));
        for (int64_t i = 0; i < size; ++i)
          data.set(static_cast<size_t>(i), value);
        for (RangeMode range : kExactRanges) {
          SCOPED_TRACE(describe(type, range, 256, size));
          Estimator estimator = make(withRange(range));
          Statistics s = run(estimator, data.view({size}));
          EXPECT_EQ(Validity::Constant, s.validity);
          EXPECT_TRUE(s.usable());
          EXPECT_EQ(value, s.mean);
          EXPECT_EQ(0, s.variance);
          EXPECT_EQ(0, s.kurtosis);
          EXPECT_EQ(0, s.outlierFraction);
          EXPECT_EQ(std::fabs(value), s.rms);
          EXPECT_EQ(value == 0 ? 0 : 1, s.peakToRms);
          EXPECT_EQ(0, s.entropy.value());
          EXPECT_EQ(0, s.normalizedEntropy());
          uint64_t total = 0;
          for (uint64_t count : estimator.histogram())
            total += count;
          EXPECT_EQ(static_cast<uint64_t>(size), total);
        }
      }
  // Spreads on either side of the criteria.
  struct Case {
    double low, high;
    ElementType type;
    RangeMode range;
    bool constant;
  };
  const Case cases[] = {
      {0, 0.99e-8, ElementType::F64, RangeMode::MinMax, true},
      {0, 1.01e-8, ElementType::F64, RangeMode::MinMax, false},
      {0, 0.99e-8, ElementType::F32, RangeMode::MinMax, true},
      {0, 1.01e-8, ElementType::F32, RangeMode::MinMax, false},
      {0, 1e-8, ElementType::F64, RangeMode::PaddedMinMax, true},
      {0, 1.1e-8, ElementType::F64, RangeMode::PaddedMinMax, false},
      {1000, 1000.009, ElementType::F64, RangeMode::PaddedMinMax, true},
      {1000, 1000.011, ElementType::F64, RangeMode::PaddedMinMax, false},
      // |max|, not the larger of the two magnitudes.
      {-1000, -999.991, ElementType::F64, RangeMode::PaddedMinMax, true},
      {0, 5e-324, ElementType::F64, RangeMode::Fixed, false},
      {0, 1e-45, ElementType::F32, RangeMode::Fixed, false},
      {0, 6e-8, ElementType::F16, RangeMode::MinMax, false}};
  for (const Case &c : cases) {
    Data data(c.type, 10);
    for (size_t i = 0; i < 10; ++i)
      data.set(i, i % 2 ? c.high : c.low);
    Estimator estimator = make(withRange(c.range));
    EXPECT_EQ(c.constant ? Validity::Constant : Validity::Ok,
              run(estimator, data.view({10})).validity)
        << c.low << " " << c.high;
  }
}

TEST(EstimatorTest, Empty) {
  for (RangeMode range : {RangeMode::MinMax, RangeMode::PaddedMinMax,
                          RangeMode::Fixed, RangeMode::RunningQuantile}) {
    Estimator estimator = make(withRange(range));
    // No data is needed for no elements, whatever the other sizes are.
    TensorView view = TensorView::contiguous(nullptr, ElementType::F32,
                                             {INT64_MAX, 0, INT64_MAX});
    Statistics s = run(estimator, view);
    EXPECT_EQ(Validity::Empty, s.validity);
    EXPECT_FALSE(s.usable());
    EXPECT_EQ(0u, s.count);
    EXPECT_EQ(0, s.entropy.value());
    EXPECT_EQ(0, s.normalizedEntropy());
    EXPECT_EQ(256, s.bins);
  }
}

TEST(EstimatorTest, HugeMagnitudes) {
  struct Case {
    ElementType type;
    double largest;
  };
  for (const Case &c : {Case{ElementType::F32, FLT_MAX},
                        Case{ElementType::BF16, decodeBF16(0x7f7f)},
                        Case{ElementType::F16, 65504}})
    for (size_t size : {64, 5000, 200000})
      for (RangeMode range : kExactRanges) {
        SCOPED_TRACE(describe(c.type, range, 64, static_cast<int64_t>(size)));
        Data data(c.type, size);
        Random random(1);
        for (size_t i = 0; i < size; ++i)
          data.set(i, c.largest * (2 * random.uniform() - 1));
        data.set(3, c.largest);
        data.set(4, -c.largest);
        check(data, withRange(range, 64));
      }
  // The powers of f64 overflow in the naive sums as well: literals.
  for (double x : {DBL_MAX, 1e300, 1e-300}) {
    Data data(ElementType::F64, 4);
    for (size_t i = 0; i < 4; ++i)
      data.set(i, i % 2 ? x : -x);
    for (RangeMode range : {RangeMode::MinMax, RangeMode::PaddedMinMax}) {
      SCOPED_TRACE(x);
      Estimator estimator = make(withRange(range, 64));
      Statistics s = run(estimator, data.view({4}));
      EXPECT_EQ(-x, s.min);
      EXPECT_EQ(x, s.max);
      EXPECT_EQ(0, s.mean);
      EXPECT_EQ(x, s.rms);
      EXPECT_EQ(x, s.meanAbsolute);
      EXPECT_EQ(1, s.peakToRms);
      EXPECT_EQ(1, s.kurtosis);
      EXPECT_EQ(0, s.outlierFraction);
      EXPECT_EQ(x > 1 ? Inf : 0, s.variance);
      if (x > 1) {
        EXPECT_EQ(Validity::Ok, s.validity);
        EXPECT_NEAR(std::log(2), s.entropy.value(), 1e-9);
      } else {
        EXPECT_EQ(Validity::Constant, s.validity);
      }
    }
  }
  // A mean of large numbers is one of them.
  Data same(ElementType::F64, 5000);
  for (size_t i = 0; i < 5000; ++i)
    same.set(i, DBL_MAX);
  Estimator estimator = make(withRange(RangeMode::MinMax));
  Statistics s = run(estimator, same.view({5000}));
  EXPECT_EQ(DBL_MAX, s.mean);
  EXPECT_DOUBLE_EQ(DBL_MAX, s.meanAbsolute);
  EXPECT_LE(s.meanAbsolute, DBL_MAX);
  EXPECT_EQ(DBL_MAX, s.rms);
  EXPECT_EQ(Validity::Constant, s.validity);
}

TEST(EstimatorTest, Denormals) {
  Data f32(ElementType::F32, 1000), f64(ElementType::F64, 1000),
      f16(ElementType::F16, 1000);
  for (size_t i = 0; i < 1000; ++i) {
    f32.set(i, std::ldexp(static_cast<double>(i), -149));
    f64.set(i, std::ldexp(static_cast<double>(i), -1074));
    f16.set(i, std::ldexp(static_cast<double>(i), -24));
  }
  check(f16, withRange(RangeMode::MinMax));
  Estimator fixed = make(withRange(RangeMode::Fixed));
  Statistics s = run(fixed, f32.view({1000}));
  EXPECT_EQ(Validity::Ok, s.validity);
  expectNear(std::ldexp(499.5, -149), s.mean, 1e-9, "mean");
  // (n^2 - 1) / 12 of 0 ... n - 1.
  expectNear(std::ldexp(83333.25, -298), s.variance, 1e-9, "variance");
  EXPECT_NEAR(1.8, s.kurtosis, 1e-4);
  EXPECT_EQ(1000u, fixed.histogram()[128]);
  s = run(fixed, f64.view({1000}));
  EXPECT_EQ(Validity::Ok, s.validity);
  EXPECT_NEAR(1.8, s.kurtosis, 1e-4);
  EXPECT_EQ(std::ldexp(999, -1074), s.max);
  EXPECT_GT(s.rms, 0);
}

TEST(EstimatorTest, Outliers) {
  // 6 sigma, not centred. Of 10000 numbers of +-1, ten become +-100:
  // variance = 0.999 + 0.001 * 1e4 = 10.999, 6 sigma = 19.9.
  for (ElementType type : kTypes)
    for (int64_t size : {10000, 200000}) {
      Data data(type, static_cast<size_t>(size));
      for (int64_t i = 0; i < size; ++i)
        data.set(static_cast<size_t>(i),
                 (i % 2 ? 1 : -1) * (i % 1000 < 1 ? 100.0 : 1.0));
      for (RangeMode range : {RangeMode::MinMax, RangeMode::PaddedMinMax,
                              RangeMode::Fixed, RangeMode::RunningQuantile}) {
        SCOPED_TRACE(describe(type, range, 256, size));
        Estimator estimator = make(withRange(range));
        Statistics s = run(estimator, data.view({size}));
        EXPECT_EQ(0.001, s.outlierFraction);
        // The spikes are all negative, 100 more than their fellows.
        EXPECT_NEAR(10.999 - 0.099 * 0.099, s.variance, 1e-9);
        EXPECT_NEAR(1.099, s.meanAbsolute, 1e-4);
        EXPECT_NEAR(100 / std::sqrt(10.999), s.peakToRms, 1e-9);
      }
    }
  // A mean counts: 100 +- 1 is beyond 6 sigma everywhere.
  Data offset(ElementType::F32, 100);
  for (size_t i = 0; i < 100; ++i)
    offset.set(i, i % 2 ? 99 : 101);
  Estimator estimator = make(withRange(RangeMode::MinMax));
  EXPECT_EQ(1, run(estimator, offset.view({100})).outlierFraction);
  // Exactly 6 sigma is not beyond: eight of 0 and one each of +-s have a
  // variance of s^2 / 5; the largest is sqrt(5) sigma.
  Data none(ElementType::F32, 10);
  none.set(0, 4);
  none.set(1, -4);
  EXPECT_EQ(0, run(estimator, none.view({10})).outlierFraction);
  // 36 = 6 * 6: 71 zeros and one of +-36 have a variance of 36.
  Data edge(ElementType::F32, 72);
  edge.set(0, 36);
  edge.set(1, -36);
  Statistics s = run(estimator, edge.view({72}));
  EXPECT_EQ(36, s.variance);
  EXPECT_EQ(0, s.outlierFraction);
}

/// No counter is of f32, nor of 32 bits for long.
TEST(EstimatorTest, CountersBeyond24Bits) {
  for (ElementType type : kTypes) {
    if (type == ElementType::F64)
      continue;
    SCOPED_TRACE(elementTypeName(type));
    Data data(type, 4);
    for (size_t i = 0; i < 4; ++i)
      data.set(i, i == 3 ? 5 : 1);
    TensorView view = data.view({(int64_t(1) << 23) + 1, 4});
    view.strides[0] = 0;
    Estimator estimator = make(withRange(RangeMode::MinMax));
    Statistics s = run(estimator, view);
    EXPECT_EQ((uint64_t(1) << 25) + 4, s.count);
    EXPECT_EQ(3 * ((uint64_t(1) << 23) + 1), estimator.histogram()[0]);
    EXPECT_EQ((uint64_t(1) << 23) + 1, estimator.histogram()[255]);
    EXPECT_NEAR(2, s.mean, 1e-12);
    EXPECT_NEAR(3, s.variance, 1e-11);
    // -0.75 ln 0.75 - 0.25 ln 0.25
    EXPECT_NEAR(0.5623351446188083, s.entropy.value(), 1e-9);
  }
}

//===----------------------------------------------------------------------===//
// Sampling
//===----------------------------------------------------------------------===//

TEST(EstimatorTest, Strided) {
  for (ElementType type : kTypes)
    for (int64_t stride : {1, 2, 3, 8, 1000}) {
      constexpr int64_t B = 3, L = 61, D = 17;
      Data data = normals(type, B * L * D, 12);
      EstimatorOptions options = withRange(RangeMode::MinMax);
      options.sampling = Sampling::Strided;
      options.stride = stride;
      for (int axis : {-1, 0, 1, 2}) {
        int time = axis < 0 ? 1 : axis;
        SCOPED_TRACE("axis " + std::to_string(axis) + " stride " +
                     std::to_string(stride));
        options.timeAxis = axis;
        std::vector<double> sampled;
        for (int64_t b = 0; b < B; ++b)
          for (int64_t t = 0; t < L; ++t)
            for (int64_t d = 0; d < D; ++d) {
              int64_t index[] = {b, t, d};
              if (index[time] % stride == 0)
                sampled.push_back(
                    data.get(static_cast<size_t>((b * L + t) * D + d)));
            }
        Estimator estimator = make(options);
        Statistics s = run(estimator, data.view({B, L, D}));
        expectMatches(naive(sampled, type, options), s, estimator.histogram());
      }
      // A matrix has its time in axis 0.
      std::vector<double> rows;
      for (int64_t t = 0; t < B * L; t += stride)
        for (int64_t d = 0; d < D; ++d)
          rows.push_back(data.get(static_cast<size_t>(t * D + d)));
      options.timeAxis = -1;
      Estimator estimator = make(options);
      Statistics s = run(estimator, data.view({B * L, D}));
      expectMatches(naive(rows, type, options), s, estimator.histogram());
    }
}

TEST(EstimatorTest, StridesBeyondEverySize) {
  Data data = normals(ElementType::F32, 60, 12);
  for (Sampling sampling : {Sampling::Strided, Sampling::Token}) {
    EstimatorOptions options;
    options.sampling = sampling;
    options.stride = INT64_MAX;
    Estimator estimator = make(options);
    Statistics s = run(estimator, data.view({2, 6, 5}));
    EXPECT_EQ(10u, s.count);
    s = run(estimator,
            TensorView::contiguous(nullptr, ElementType::F32, {2, 0, 5}));
    EXPECT_EQ(Validity::Empty, s.validity);
  }
}

TEST(EstimatorTest, Tokens) {
  constexpr int64_t B = 2, L = 29;
  for (ElementType type : kTypes)
    for (int64_t D : {1, 2, 8, 300, 5000})
      for (int64_t stride : {1, 4}) {
        SCOPED_TRACE("channels " + std::to_string(D));
        Data data = normals(type, static_cast<size_t>(B * L * D), 13);
        // One token is constant, one has a NaN, one nothing but.
        for (int64_t d = 0; d < D; ++d) {
          data.set(static_cast<size_t>(4 * D + d), 2);
          data.set(static_cast<size_t>(12 * D + d), NotANumber);
        }
        data.set(static_cast<size_t>(8 * D), Inf);
        EstimatorOptions options;
        options.bins = 64;
        options.sampling = Sampling::Token;
        options.stride = stride;
        double entropies = 0;
        uint64_t tokens = 0, dropped = 0;
        std::vector<double> all;
        for (int64_t b = 0; b < B; ++b)
          for (int64_t t = 0; t < L; t += stride) {
            std::vector<double> token;
            for (int64_t d = 0; d < D; ++d)
              token.push_back(static_cast<float>(
                  data.get(static_cast<size_t>((b * L + t) * D + d))));
            all.insert(all.end(), token.begin(), token.end());
            Reference r = naive(token, ElementType::F32, options);
            if (!r.count)
              continue;
            if (r.constant) {
              ++dropped;
              continue;
            }
            ++tokens;
            entropies += r.entropy;
          }
        Estimator estimator = make(options);
        Statistics s = run(estimator, data.view({B, L, D}));
        EXPECT_EQ(tokens, s.tokens);
        EXPECT_EQ(dropped, s.tokensDropped);
        EXPECT_NEAR(tokens ? entropies / static_cast<double>(tokens) : 0,
                    s.entropy.value(), 1e-9);
        Reference r = naive(all, ElementType::F32, options);
        EXPECT_EQ(r.count, s.count);
        EXPECT_EQ(r.nan, s.nan);
        EXPECT_EQ(r.positive, s.positiveInfinity);
        EXPECT_EQ(Validity::NonFinite, s.validity);
        EXPECT_EQ(r.min, s.min);
        EXPECT_EQ(r.max, s.max);
        expectNear(r.mean, s.mean, 1e-6, "mean");
        expectNear(r.variance, s.variance, 1e-9, "variance");
        expectNear(r.kurtosis, s.kurtosis, 1e-9, "kurtosis");
      }
}

TEST(EstimatorTest, TokensOfOtherLayouts) {
  // [B, L, H, P] with time strided, and [B, D, L] by the axis: a token is what
  // lies behind time.
  Data data = normals(ElementType::F32, 2 * 10 * 3 * 8, 14);
  EstimatorOptions options;
  options.sampling = Sampling::Token;
  options.bins = 16;
  Estimator estimator = make(options);
  Statistics heads = run(estimator, data.view({2, 10, 3, 8}));
  Statistics flat = run(estimator, data.view({2, 10, 24}));
  EXPECT_TRUE(identical(flat, heads));
  EXPECT_EQ(20u, flat.tokens);
  // Channels that lie apart.
  Data apart(ElementType::F32, 2 * 10 * 24);
  for (size_t t = 0; t < 20; ++t)
    for (size_t d = 0; d < 24; ++d)
      apart.set((t / 10 * 24 + d) * 10 + t % 10, data.get(t * 24 + d));
  TensorView view = apart.view({2, 24, 10});
  std::swap(view.shape[1], view.shape[2]);
  std::swap(view.strides[1], view.strides[2]);
  EXPECT_TRUE(identical(flat, run(estimator, view)));
  // All constant: no token, no entropy.
  Data same(ElementType::F32, 12);
  Statistics s = run(estimator, same.view({1, 3, 4}));
  EXPECT_EQ(0u, s.tokens);
  EXPECT_EQ(3u, s.tokensDropped);
  EXPECT_EQ(0, s.entropy.value());
  EXPECT_EQ(Validity::Constant, s.validity);
  // Scales that are far apart: each token has a range of its own.
  Data scales(ElementType::F32, 2 * 256);
  for (size_t i = 0; i < 256; ++i) {
    scales.set(i, 1e-3 * static_cast<double>(i));
    scales.set(256 + i, 1e3 * static_cast<double>(i));
  }
  s = run(estimator, scales.view({1, 2, 256}));
  EXPECT_NEAR(std::log(16), s.entropy.value(), 1e-2);
}

//===----------------------------------------------------------------------===//
// Ranges
//===----------------------------------------------------------------------===//

TEST(EstimatorTest, FixedRangeEdges) {
  for (ElementType type : kTypes)
    for (int64_t size : {8, 9, 200000}) {
      SCOPED_TRACE(describe(type, RangeMode::Fixed, 4, size));
      Data data(type, static_cast<size_t>(size));
      // Low and high themselves are inside.
      const double values[] = {0, 1, -1, 0.25, 0.5, 0.75, 100, -0.0};
      uint64_t times[8] = {};
      for (int64_t i = 0; i < size; ++i) {
        data.set(static_cast<size_t>(i), values[i % 8]);
        ++times[i % 8];
      }
      EstimatorOptions options = withRange(RangeMode::Fixed, 4);
      options.low = 0;
      options.high = 1;
      Estimator estimator = make(options);
      Statistics s = run(estimator, data.view({size}));
      EXPECT_EQ(times[2], s.below);
      EXPECT_EQ(times[6], s.above);
      EXPECT_EQ(0, s.low);
      EXPECT_EQ(1, s.high);
      std::vector<uint64_t> expected = {times[0] + times[2] + times[7],
                                        times[3], times[4],
                                        times[1] + times[5] + times[6]};
      EXPECT_EQ(expected, estimator.histogram());
    }
}

TEST(EstimatorTest, FixedRangesThatF32CannotHold) {
  // Ranges narrow on an offset, wider than f32, and below its numbers.
  struct Case {
    double low, high;
  };
  for (const Case &c :
       {Case{1e6, 1e6 + 1}, Case{-1e300, 1e300}, Case{0.1, 0.1000001},
        Case{0, 1e-40}, Case{-DBL_MAX / 4, DBL_MAX / 4}})
    for (ElementType type : {ElementType::F32, ElementType::F64}) {
      SCOPED_TRACE(c.low);
      Data data(type, 4000);
      Random random(2);
      for (size_t i = 0; i < 4000; ++i)
        data.set(i, c.low + (c.high - c.low) * random.uniform());
      if (type == ElementType::F32 && c.high > FLT_MAX)
        for (size_t i = 0; i < 4000; ++i)
          data.set(i, random.normal());
      EstimatorOptions options = withRange(RangeMode::Fixed, 8);
      options.low = c.low;
      options.high = c.high;
      check(data, options);
    }
}

TEST(EstimatorTest, RunningQuantileIsNotMovedByAnOutlier) {
  for (ElementType type : kTypes)
    for (int64_t size : {20000, 300000}) {
      SCOPED_TRACE(describe(type, RangeMode::RunningQuantile, 256, size));
      EstimatorOptions options = withRange(RangeMode::RunningQuantile);
      options.quantile = 0.01;
      Estimator estimator = make(options);
      Data data = normals(type, static_cast<size_t>(size), 21);
      Statistics first = run(estimator, data.view({size}));
      // The quantiles of a normal distribution at 0.01, within the bins that
      // they come from.
      double bin = (first.max - first.min) / 256;
      EXPECT_NEAR(-2.326, first.low, bin + 0.06);
      EXPECT_NEAR(2.326, first.high, bin + 0.06);
      EXPECT_NEAR(0.01, static_cast<double>(first.below) / size, 0.004);
      EXPECT_NEAR(0.01, static_cast<double>(first.above) / size, 0.004);
      data.set(77, 60000);
      Statistics second = run(estimator, data.view({size}));
      // Binned where the first call left the range.
      EXPECT_EQ(first.low, second.low);
      EXPECT_EQ(first.high, second.high);
      EXPECT_NEAR(first.entropy.value(), second.entropy.value(), 1e-2);
      EXPECT_NEAR(60000, second.max, 100);
      Statistics third = run(estimator, data.view({size}));
      EXPECT_NEAR(second.high, third.high, 0.1);
      EXPECT_NEAR(second.low, third.low, 0.1);
      EXPECT_NEAR(first.entropy.value(), third.entropy.value(), 5e-2);
      // The other mode is moved by two nats.
      Estimator minmax = make(withRange(RangeMode::MinMax));
      EXPECT_LT(run(minmax, data.view({size})).entropy.value(), 0.2);
      // Nothing of it is left after reset().
      estimator.reset();
      Data other = normals(type, 1000, 22, 50);
      Statistics fresh = run(estimator, other.view({1000}));
      EXPECT_GT(fresh.low, 45);
    }
}

TEST(EstimatorTest, RunningQuantileFollowsWithItsDecay) {
  EstimatorOptions options = withRange(RangeMode::RunningQuantile, 1024);
  options.quantile = 0.01;
  options.decay = 0.5;
  Estimator estimator = make(options);
  Data a(ElementType::F64, 100001), b(ElementType::F64, 100001);
  for (size_t i = 0; i <= 100000; ++i) {
    a.set(i, static_cast<double>(i) / 100000);
    b.set(i, 0.25 + static_cast<double>(i) / 200000);
  }
  Statistics s = run(estimator, a.view({100001}));
  EXPECT_NEAR(0.01, s.low, 1e-3);
  EXPECT_NEAR(0.99, s.high, 1e-3);
  // Quantiles of b: 0.255 and 0.745; half of the way at each call.
  double low = s.low, high = s.high;
  for (int call = 0; call < 12; ++call) {
    s = run(estimator, b.view({100001}));
    EXPECT_NEAR(low, s.low, 2e-3) << call;
    EXPECT_NEAR(high, s.high, 2e-3) << call;
    low = 0.5 * s.low + 0.5 * 0.255;
    high = 0.5 * s.high + 0.5 * 0.745;
  }
  EXPECT_NEAR(0.255, s.low, 2e-3);
  EXPECT_NEAR(0.745, s.high, 2e-3);
  // And out again: the range grows past its ends.
  for (int call = 0; call < 40; ++call)
    s = run(estimator, a.view({100001}));
  EXPECT_NEAR(0.01, s.low, 1e-2);
  EXPECT_NEAR(0.99, s.high, 1e-2);
}

TEST(EstimatorTest, RunningQuantileOfTheHardestData) {
  // One ulp, denormals, the largest numbers, one value among another: entropies
  // are finite and every element is in one bin.
  struct Case {
    double low, high;
  };
  for (const Case &c :
       {Case{1, std::nextafter(1, 2)}, Case{0, 5e-324}, Case{-DBL_MAX, DBL_MAX},
        Case{1e300, std::nextafter(1e300, Inf)}, Case{-1e-310, 1e-310},
        Case{0, 1}})
    for (int every : {2, 3, 2000})
      for (ElementType type : {ElementType::F64, ElementType::F32}) {
        SCOPED_TRACE(c.low);
        SCOPED_TRACE(c.high);
        Data data(type, 5001);
        for (size_t i = 0; i < 5001; ++i)
          data.set(i, i % static_cast<size_t>(every) ? c.low : c.high);
        Estimator estimator = make(withRange(RangeMode::RunningQuantile));
        for (int call = 0; call < 20; ++call) {
          Statistics s = run(estimator, data.view({5001}));
          ASSERT_TRUE(std::isfinite(s.entropy.value()));
          ASSERT_GE(s.entropy.value(), 0);
          ASSERT_LE(s.entropy.value(), std::log(256) + 1e-9);
          ASSERT_LE(s.low, s.high);
          uint64_t total = 0;
          for (uint64_t count : estimator.histogram())
            total += count;
          ASSERT_EQ(s.count, total) << call;
        }
      }
}

//===----------------------------------------------------------------------===//
// numpy
//===----------------------------------------------------------------------===//

/// numpy.histogram of x_i = ((7919 i) mod m - o) / q for i < n with K bins over
/// [min - p, max + p], p = max(0.05 (max - min), 1e-6), and
/// -sum(p * log(p + 1e-12)), as numpy 2.4.6 gives them: many of the numbers lie
/// at edges of bins.
TEST(EstimatorTest, PaddedBinsAreThoseOfNumpy) {
  struct Case {
    int64_t n, m, o;
    double q;
    double entropy;
    std::vector<uint64_t> counts;
  };
  const Case cases[] = {
      {1000,
       220,
       110,
       1,
       4.0698781258276826,
       {0,  0,  5,  16, 12, 16, 16, 16, 12, 16, 16, 16, 12, 16, 16, 16,
        16, 12, 16, 16, 16, 12, 16, 16, 16, 12, 16, 16, 16, 13, 20, 20,
        20, 20, 15, 20, 20, 20, 15, 20, 20, 20, 15, 20, 20, 20, 15, 20,
        20, 20, 20, 15, 20, 20, 20, 15, 20, 20, 20, 15, 20, 5,  0,  0}},
      {1000,
       221,
       0,
       4,
       4.0715539289485383,
       {0,  0,  5,  16, 12, 16, 16, 18, 20, 15, 20, 20, 18, 12, 16, 16,
        16, 19, 15, 20, 20, 20, 13, 16, 16, 16, 16, 15, 20, 20, 20, 15,
        17, 16, 16, 16, 12, 20, 20, 20, 20, 15, 16, 16, 16, 12, 18, 20,
        20, 20, 15, 19, 16, 16, 12, 16, 19, 20, 20, 15, 20, 5,  0,  0}},
      {777,
       177,
       1000,
       3,
       2.7348268143198875,
       {18, 52, 53, 53, 52, 52, 54, 53, 56, 53, 53, 53, 51, 54, 53, 17}},
      {5000,
       1280,
       640,
       10,
       4.0711872978354959,
       {0,  0,  8,  86, 86, 86, 86, 86, 85, 87, 86, 85, 86, 87, 86, 85,
        87, 86, 85, 86, 87, 86, 84, 87, 87, 85, 86, 87, 86, 84, 87, 87,
        85, 85, 87, 87, 84, 86, 87, 85, 85, 87, 87, 84, 86, 87, 86, 85,
        86, 87, 84, 86, 87, 86, 85, 86, 87, 85, 86, 86, 86, 8,  0,  0}},
      {300,
       2,
       0,
       7,
       0.69314718055794533,
       {150, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 150}},
      {2000, 1001, 500, 1000, 3.0005792757872749, {0,   100, 99,  100, 99,  100,
                                                   100, 100, 100, 100, 100, 102,
                                                   98,  102, 98,  100, 102, 98,
                                                   100, 100, 100, 2}},
  };
  for (const Case &c : cases) {
    SCOPED_TRACE(c.m);
    Data data(ElementType::F64, static_cast<size_t>(c.n));
    for (int64_t i = 0; i < c.n; ++i)
      data.set(static_cast<size_t>(i),
               static_cast<double>(7919 * i % c.m - c.o) / c.q);
    Estimator estimator = make(
        withRange(RangeMode::PaddedMinMax, static_cast<int>(c.counts.size())));
    Statistics s = run(estimator, data.view({c.n}));
    EXPECT_EQ(c.counts, estimator.histogram());
    EXPECT_NEAR(c.entropy, s.entropy.value(), 1e-12);
    double margin = std::max(0.05 * (s.max - s.min), 1e-6);
    EXPECT_EQ(s.min - margin, s.low);
    EXPECT_EQ(s.max + margin, s.high);
    EXPECT_EQ(0u, s.below + s.above);
  }
}

/// The published estimator of the chunk experiments, step by step in numpy's
/// float32, for x_i = f32(((7919 i) mod m - o) / q).
TEST(EstimatorTest, MinMaxIsThePublishedEstimator) {
  struct Case {
    int64_t n, m, o;
    double q, entropy;
    int bins;
    /// Of count * (index + 1).
    uint64_t checksum;
  };
  const Case cases[] = {
      {1000, 220, 110, 1, 5.3875747650732837, 256, 135396},
      {1000, 221, 0, 4, 4.1427202569504544, 64, 32801},
      {777, 177, 1000, 3, 2.770014824433078, 16, 6606},
      {5000, 1280, 640, 10, 5.5448506345028781, 256, 642380},
      {300, 2, 0, 7, 0.69314718036004752, 16, 2550},
      {2000, 1001, 500, 1000, 3.0909658839652456, 22, 23018},
      {4000, 3001, 1, 10000000, 5.5436867783894357, 256, 514152},
  };
  for (const Case &c : cases) {
    SCOPED_TRACE(c.m);
    Data data(ElementType::F32, static_cast<size_t>(c.n));
    for (int64_t i = 0; i < c.n; ++i)
      data.set(static_cast<size_t>(i),
               static_cast<double>(7919 * i % c.m - c.o) / c.q);
    Estimator estimator = make(withRange(RangeMode::MinMax, c.bins));
    Statistics s = run(estimator, data.view({c.n}));
    EXPECT_NEAR(c.entropy, s.entropy.value(), 1e-12);
    uint64_t checksum = 0;
    for (size_t i = 0; i < estimator.histogram().size(); ++i)
      checksum += estimator.histogram()[i] * (i + 1);
    EXPECT_EQ(c.checksum, checksum);
  }
}

//===----------------------------------------------------------------------===//
// What the entropy is
//===----------------------------------------------------------------------===//

TEST(EstimatorTest, EntropiesOfKnownDistributions) {
  constexpr int64_t n = 1000000;
  Data normal = normals(ElementType::F32, n, 20260417),
       uniform(ElementType::F32, n);
  Random random(1);
  for (size_t i = 0; i < n; ++i)
    uniform.set(i, random.uniform());
  // The publication's table of a million normals.
  const double published[] = {2.644, 3.334, 4.027, 4.720, 5.413, 6.106};
  for (int k = 0; k < 6; ++k) {
    int bins = 32 << k;
    Estimator estimator = make(withRange(RangeMode::MinMax, bins));
    Statistics s = run(estimator, normal.view({n}));
    double range = s.max - s.min;
    double theory =
        0.5 * std::log(2 * M_PI * std::exp(1)) + std::log(bins / range);
    EXPECT_NEAR(theory, s.entropy.value(), 5e-3);
    EXPECT_NEAR(published[k], s.entropy.value(), 0.1);
    EXPECT_NEAR(3, s.kurtosis, 0.05);
    s = run(estimator, uniform.view({n}));
    EXPECT_NEAR(std::log(bins), s.entropy.value(), 2e-3);
    EXPECT_NEAR(1, s.normalizedEntropy(), 1e-3);
    EXPECT_LE(s.normalizedEntropy(), 1);
  }
  // One outlier of 100 sigma takes two nats away.
  Estimator estimator = make(withRange(RangeMode::MinMax));
  double before = run(estimator, normal.view({n})).entropy.value();
  normal.set(500, 100);
  double after = run(estimator, normal.view({n})).entropy.value();
  EXPECT_NEAR(4.605, before, 0.15);
  EXPECT_NEAR(2.311, after, 0.02);
}

TEST(EstimatorTest, HistogramEntropy) {
  EXPECT_EQ(0, histogramEntropy({}).value());
  EXPECT_EQ(0, histogramEntropy({0, 0}).value());
  EXPECT_EQ(0, histogramEntropy({0, 7}).value());
  EXPECT_NEAR(std::log(2), histogramEntropy({5, 5}).value(), 1e-15);
  EXPECT_NEAR(std::log(4), histogramEntropy({1, 1, 1, 1}).value(), 1e-15);
  EXPECT_NEAR(0.5623351446188083,
              histogramEntropy({uint64_t(3) << 40, uint64_t(1) << 40}).value(),
              1e-12);
}

TEST(EstimatorTest, MovingAverage) {
  MovingAverage average;
  EXPECT_TRUE(average.empty());
  EXPECT_EQ(4, average.update(4));
  EXPECT_FALSE(average.empty());
  EXPECT_DOUBLE_EQ(0.85 * 4 + 0.15 * 2, average.update(2));
  EXPECT_DOUBLE_EQ(0.85 * 3.7 + 0.15 * 10, average.update(10));
  EXPECT_DOUBLE_EQ(4.645, average.value());
}

TEST(EstimatorTest, Units) {
  EXPECT_DOUBLE_EQ(8, Bits(Nats::ceiling(256)).value());
  EXPECT_DOUBLE_EQ(5.545177444479562, Nats(Bits(8)).value());
  Statistics s;
  s.entropy = Nats(100);
  EXPECT_EQ(0, s.normalizedEntropy());
  s.bins = 256;
  EXPECT_EQ(1, s.normalizedEntropy());
  s.entropy = Nats(-1e-12);
  EXPECT_EQ(0, s.normalizedEntropy());
  s.entropy = Nats(0.5 * std::log(256));
  EXPECT_DOUBLE_EQ(0.5, s.normalizedEntropy());
}

//===----------------------------------------------------------------------===//
// Threads, kernels, memory
//===----------------------------------------------------------------------===//

TEST(EstimatorTest, ThreadsDoNotMatter) {
  constexpr int64_t L = 1400, D = 1024;
  for (ElementType type : kTypes) {
    Data data = normals(type, L * D, 31, 0.3, 2);
    data.set(12345, 500);
    data.set(999999, NotANumber);
    struct Mode {
      RangeMode range;
      Sampling sampling;
    };
    for (const Mode &mode : {Mode{RangeMode::MinMax, Sampling::Full},
                             Mode{RangeMode::PaddedMinMax, Sampling::Full},
                             Mode{RangeMode::Fixed, Sampling::Full},
                             Mode{RangeMode::RunningQuantile, Sampling::Full},
                             Mode{RangeMode::MinMax, Sampling::Strided},
                             Mode{RangeMode::MinMax, Sampling::Token}}) {
      SCOPED_TRACE(describe(type, mode.range, 256, L * D) + " sampling " +
                   std::to_string(static_cast<int>(mode.sampling)));
      std::vector<Statistics> one;
      std::vector<uint64_t> histogram;
      for (int threads : {1, 2, 5}) {
        EstimatorOptions options = withRange(mode.range);
        options.sampling = mode.sampling;
        options.stride = mode.sampling == Sampling::Strided ? 2 : 1;
        options.threads = threads;
        Estimator estimator = make(options);
        // Only running quantiles remember an earlier call.
        size_t calls = mode.range == RangeMode::RunningQuantile ? 2 : 1;
        for (size_t call = 0; call < calls; ++call) {
          Statistics s = run(estimator, data.view({1, L, D}));
          if (threads == 1) {
            one.push_back(s);
            histogram = estimator.histogram();
          } else {
            EXPECT_TRUE(identical(one[call], s)) << threads << " threads";
          }
        }
        EXPECT_EQ(histogram, estimator.histogram()) << threads << " threads";
      }
    }
  }
}

TEST(EstimatorTest, KernelsOfAllProcessorsAgree) {
  const EstimatorKernels &wide = estimatorKernels(),
                         &portable = kPortableKernels;
  // Every 16-bit pattern; the payload of a NaN is free.
  std::vector<uint16_t> codes(65536);
  for (size_t i = 0; i < codes.size(); ++i)
    codes[i] = static_cast<uint16_t>(i);
  auto same = [](float a, float b) {
    return std::memcmp(&a, &b, 4) == 0 || (a != a && b != b);
  };
  for (size_t first = 0; first < 65536; first += 2047) {
    auto count = static_cast<int64_t>(std::min<size_t>(2047, 65536 - first));
    float a[2047], b[2047];
    wide.widenF16(&codes[first], a, count);
    portable.widenF16(&codes[first], b, count);
    for (int64_t i = 0; i < count; ++i) {
      ASSERT_TRUE(same(a[i], b[i])) << first + static_cast<size_t>(i);
      ASSERT_TRUE(same(a[i], static_cast<float>(decodeF16(
                                 codes[first + static_cast<size_t>(i)]))));
    }
    wide.widenBF16(&codes[first], a, count);
    portable.widenBF16(&codes[first], b, count);
    for (int64_t i = 0; i < count; ++i) {
      ASSERT_TRUE(same(a[i], b[i]));
      ASSERT_TRUE(same(a[i], static_cast<float>(decodeBF16(
                                 codes[first + static_cast<size_t>(i)]))));
    }
  }
  Random random(4);
  std::vector<float> x(2048);
  for (int round = 0; round < 300; ++round) {
    int64_t count = round < 40 ? round : 1 + random.below(2048);
    double scale = std::ldexp(1, static_cast<int>(random.below(200)) - 100);
    for (float &v : x)
      v = static_cast<float>(scale * (random.normal() + 0.5));
    if (count && round % 3 == 0)
      x[static_cast<size_t>(random.below(count))] =
          static_cast<float>(round % 2         ? NotANumber
                             : random.below(2) ? Inf
                                               : -Inf);
    bool finite = true;
    for (int64_t i = 0; i < count; ++i)
      finite &= std::isfinite(x[static_cast<size_t>(i)]);
    EXPECT_EQ(finite, wide.allFinite(x.data(), count));
    EXPECT_EQ(finite, portable.allFinite(x.data(), count));
    if (!finite)
      continue;
    EXPECT_EQ(wide.sum(x.data(), count), portable.sum(x.data(), count));
    MomentSums a, b;
    a.min = a.max = b.min = b.max = x[0];
    a.s3 = b.s3 = 1;
    wide.moments(x.data(), count, 0.3 * scale, a);
    portable.moments(x.data(), count, 0.3 * scale, b);
    EXPECT_EQ(a.s1, b.s1);
    EXPECT_EQ(a.s2, b.s2);
    EXPECT_EQ(a.s3, b.s3);
    EXPECT_EQ(a.s4, b.s4);
    EXPECT_EQ(a.absolute, b.absolute);
    EXPECT_EQ(a.min, b.min);
    EXPECT_EQ(a.max, b.max);
    float bound = static_cast<float>(scale);
    int64_t beyond = 0;
    for (int64_t i = 0; i < count; ++i)
      beyond += std::fabs(x[static_cast<size_t>(i)]) > bound;
    EXPECT_EQ(beyond, wide.countBeyond(x.data(), count, bound));
    EXPECT_EQ(beyond, portable.countBeyond(x.data(), count, bound));
    for (int64_t bins : {2, 3, 256, 4096, 65536}) {
      BinningF32 binning;
      binning.low = static_cast<float>(-scale);
      binning.width = static_cast<float>(2.5 * scale);
      binning.scale = static_cast<float>(bins);
      binning.last = static_cast<int32_t>(bins - 1);
      if (round % 2) {
        binning.inside = true;
        binning.low = a.min;
        binning.width = a.max - a.min;
      }
      if (!(binning.width > 0))
        continue;
      int64_t stride = bins <= 4096 ? bins : 0;
      auto slots = static_cast<size_t>(stride ? 4 * bins : bins);
      std::vector<uint32_t> left(slots), right(slots);
      uint64_t leftOut[2] = {1, 2}, rightOut[2] = {1, 2};
      wide.histogram(x.data(), count, binning, left.data(), stride, leftOut[0],
                     leftOut[1]);
      portable.histogram(x.data(), count, binning, right.data(), stride,
                         rightOut[0], rightOut[1]);
      EXPECT_EQ(left, right);
      EXPECT_EQ(leftOut[0], rightOut[0]);
      EXPECT_EQ(leftOut[1], rightOut[1]);
      uint64_t total = 0;
      for (uint32_t c : left)
        total += c;
      EXPECT_EQ(static_cast<uint64_t>(count), total);
    }
  }
}

TEST(EstimatorTest, WarmCallsAllocateNothing) {
  for (ElementType type : kTypes)
    for (int64_t L : {3, 100, 700}) {
      Data data = normals(type, static_cast<size_t>(L) * 512, 41);
      data.set(1, NotANumber);
      data.set(2, 200);
      for (RangeMode range : {RangeMode::MinMax, RangeMode::PaddedMinMax,
                              RangeMode::Fixed, RangeMode::RunningQuantile})
        for (Sampling sampling :
             {Sampling::Full, Sampling::Strided, Sampling::Token}) {
          if (sampling == Sampling::Token && range != RangeMode::MinMax)
            continue;
          EstimatorOptions options = withRange(range);
          options.sampling = sampling;
          options.stride = sampling == Sampling::Full ? 1 : 2;
          Estimator estimator = make(options);
          TensorView view = data.view({1, L, 512});
          for (int call = 0; call < 2; ++call)
            run(estimator, view);
          allocations = 0;
          counting = true;
          Expected<Statistics> result = estimator.estimate(view);
          counting = false;
          EXPECT_TRUE(result);
          EXPECT_EQ(0u, allocations.load())
              << describe(type, range, 256, L * 512) << " sampling "
              << static_cast<int>(sampling);
        }
    }
}

//===----------------------------------------------------------------------===//
// Counts from elsewhere
//===----------------------------------------------------------------------===//

namespace {
/// What a device counts by a plan, element by element.
class Counter {
public:
  Counter(const Data &data, const CountPlan &plan) : plan(plan) {
    counts.assign(
        static_cast<size_t>(plan.tokens ? plan.columns + 1 : plan.bins), 0);
    TensorView rows = plan.rows;
    for (double origin : origins(rows)) {
      std::vector<float> row;
      for (int64_t i = 0; i < plan.columns; ++i)
        row.push_back(static_cast<float>(data.get(static_cast<size_t>(
            static_cast<int64_t>(origin) + i * plan.columnStride))));
      all.insert(all.end(), row.begin(), row.end());
      if (plan.tokens)
        countToken(row);
    }
    moments();
    if (!plan.tokens)
      countBins();
    c.counts = counts.data();
  }

  CountedTensor c;
  std::vector<uint64_t> counts;

private:
  static std::vector<double> origins(const TensorView &rows) {
    std::vector<double> list{0};
    for (int axis = 0; axis < rows.rank; ++axis) {
      std::vector<double> next;
      for (double origin : list)
        for (int64_t i = 0; i < rows.shape[axis]; ++i)
          next.push_back(origin + static_cast<double>(i * rows.strides[axis]));
      list = next;
    }
    return list;
  }
  void countToken(const std::vector<float> &row) {
    float low = INFINITY, high = -INFINITY;
    bool clean = true;
    for (float x : row) {
      if (!std::isfinite(x)) {
        clean = false;
        continue;
      }
      low = std::min(low, x);
      high = std::max(high, x);
    }
    if (low <= high && high - low < 1e-8f)
      ++c.tokensDropped;
    if (!clean || !(high - low >= 1e-8f))
      return;
    ++c.tokens;
    std::vector<size_t> histogram(static_cast<size_t>(plan.bins));
    for (float x : row)
      ++histogram[std::min(
          static_cast<size_t>((x - low) / (high - low + 1e-8f) *
                              static_cast<float>(plan.bins)),
          histogram.size() - 1)];
    for (size_t count : histogram)
      if (count)
        ++counts[count];
  }
  void moments() {
    c.min = Inf;
    c.max = -Inf;
    // Not the mean, but near it.
    c.pivot =
        std::isfinite(all.empty() ? 0 : all[0]) && !all.empty() ? all[0] : 0;
    for (float x : all) {
      if (!std::isfinite(x)) {
        ++(x != x ? c.nan : x > 0 ? c.positiveInfinity : c.negativeInfinity);
        continue;
      }
      ++c.count;
      c.min = std::min<double>(c.min, x);
      c.max = std::max<double>(c.max, x);
      double d = x - c.pivot;
      c.s1 += d;
      c.s2 += d * d;
      c.s3 += d * d * d;
      c.s4 += d * d * d * d;
      c.absolute += std::fabs(static_cast<double>(x));
    }
    if (!c.count || c.min == c.max)
      return;
    double n = static_cast<double>(c.count), d = c.s1 / n;
    double sigma = std::sqrt(std::max(c.s2 / n - d * d, 0.0));
    for (float x : all)
      c.outliers += std::isfinite(x) && std::fabs(x) > 6 * sigma;
  }
  void countBins() {
    if (!c.count)
      return;
    auto low = static_cast<float>(plan.low),
         width = static_cast<float>(plan.width);
    double wideLow = plan.low, wideWidth = plan.width;
    bool narrow = plan.rule == CountPlan::Rule::GivenF32;
    bool edges = plan.rule == CountPlan::Rule::PaddedMinMax;
    if (plan.rule == CountPlan::Rule::MinMax) {
      low = static_cast<float>(c.min);
      width = static_cast<float>(c.max) - low;
      if (width < 1e-8f)
        return;
      width += 1e-8f;
      narrow = std::isfinite(width);
      wideLow = c.min;
      wideWidth = c.max - c.min + 1e-8;
    } else if (edges) {
      double spread = c.max - c.min, margin = std::max(0.05 * spread, 1e-6);
      if (spread <= 1e-8 + 1e-5 * std::fabs(c.max))
        return;
      wideLow = c.min - margin;
      wideWidth = c.max + margin - wideLow;
    }
    for (float x : all) {
      if (!std::isfinite(x))
        continue;
      double t = narrow ? static_cast<double>((x - low) / width)
                        : (x - wideLow) / wideWidth;
      double at = narrow ? static_cast<double>(static_cast<float>(t) *
                                               static_cast<float>(plan.bins))
                         : t * plan.bins;
      c.below += t < 0;
      c.above += t > 1;
      auto i = static_cast<int>(std::clamp(at, 0.0, plan.bins - 1.0));
      auto edge = [&](int i) { return i * (wideWidth / plan.bins) + wideLow; };
      if (edges && i > 0 && x < edge(i))
        --i;
      else if (edges && i < plan.bins - 1 && x >= edge(i + 1))
        ++i;
      ++counts[static_cast<size_t>(i)];
    }
  }

  const CountPlan &plan;
  std::vector<float> all;
};

void expectSame(const Statistics &expected, const Statistics &got) {
  EXPECT_EQ(validityName(expected.validity), validityName(got.validity));
  EXPECT_EQ(expected.count, got.count);
  EXPECT_EQ(expected.nan, got.nan);
  EXPECT_EQ(expected.positiveInfinity, got.positiveInfinity);
  EXPECT_EQ(expected.negativeInfinity, got.negativeInfinity);
  EXPECT_EQ(expected.min, got.min);
  EXPECT_EQ(expected.max, got.max);
  EXPECT_EQ(expected.low, got.low);
  EXPECT_EQ(expected.high, got.high);
  EXPECT_EQ(expected.bins, got.bins);
  EXPECT_EQ(expected.below, got.below);
  EXPECT_EQ(expected.above, got.above);
  EXPECT_EQ(expected.tokens, got.tokens);
  EXPECT_EQ(expected.tokensDropped, got.tokensDropped);
  EXPECT_EQ(expected.outlierFraction, got.outlierFraction);
  EXPECT_NEAR(expected.entropy.value(), got.entropy.value(), 1e-9);
  expectNear(expected.mean, got.mean, 1e-6, "mean");
  expectNear(expected.variance, got.variance, 1e-9, "variance");
  expectNear(expected.kurtosis, got.kurtosis, 1e-7, "kurtosis");
  expectNear(expected.meanAbsolute, got.meanAbsolute, 1e-6, "mean |x|");
  expectNear(expected.rms, got.rms, 1e-9, "rms");
  expectNear(expected.peakToRms, got.peakToRms, 1e-9, "peak to rms");
}
} // namespace

TEST(EstimatorTest, CountsFromElsewhereAreEstimates) {
  for (ElementType type :
       {ElementType::F32, ElementType::F16, ElementType::BF16})
    for (RangeMode range : {RangeMode::MinMax, RangeMode::PaddedMinMax,
                            RangeMode::Fixed, RangeMode::RunningQuantile})
      for (Sampling sampling :
           {Sampling::Full, Sampling::Strided, Sampling::Token})
        for (int bins : {2, 77, 256, 65536})
          for (int data = 0; data < 4; ++data) {
            if (sampling == Sampling::Token && range != RangeMode::MinMax)
              continue;
            SCOPED_TRACE(describe(type, range, bins, 0) + " sampling " +
                         std::to_string(static_cast<int>(sampling)) + " data " +
                         std::to_string(data));
            EstimatorOptions options = withRange(range, bins);
            options.sampling = sampling;
            options.stride = sampling == Sampling::Full ? 1 : 3;
            Estimator estimator = make(options), other = make(options);
            for (uint64_t call = 0; call < 3; ++call) {
              Data x = normals(type, 2 * 31 * 20, 51 + call, 0.1);
              // Outliers; a NaN and infinities; one value.
              for (size_t i = 0; data == 1 && i < x.size(); i += 300)
                x.set(i, 60);
              if (data == 2 && sampling != Sampling::Token) {
                x.set(5, NotANumber);
                x.set(200, Inf);
                x.set(480, -Inf);
              }
              for (size_t i = 0; data == 3 && i < x.size(); ++i)
                x.set(i, 1.5);
              TensorView view = x.view({2, 31, 20});
              // Of tokens that do not follow one another.
              view.shape[2] = call == 1 ? 13 : 20;
              Expected<CountPlan> plan = other.plan(view);
              ASSERT_TRUE(plan);
              Statistics expected = run(estimator, view), got;
              if (plan->isCountable) {
                EXPECT_TRUE(range != RangeMode::RunningQuantile || call ||
                            data == 3);
                got = other.finish(*plan, Counter(x, *plan).c);
              } else {
                // The first tensor, and those behind one without a range.
                EXPECT_TRUE(range == RangeMode::RunningQuantile &&
                            (!call || data == 3));
                std::vector<float> wide;
                for (double v : elements(x, 0, plan->sample))
                  wide.push_back(static_cast<float>(v));
                plan->sample.type = ElementType::F32;
                got = other.finish(*plan, wide.data());
              }
              expectSame(expected, got);
              if (sampling != Sampling::Token)
                EXPECT_EQ(estimator.histogram(), other.histogram());
            }
          }
}

TEST(EstimatorTest, PlansNameRowsAndColumns) {
  EstimatorOptions options;
  auto planOf = [&](const TensorView &view) {
    Expected<CountPlan> plan = make(options).plan(view);
    EXPECT_TRUE(plan);
    return *plan;
  };
  float x[1];
  TensorView view =
      TensorView::contiguous(x, ElementType::F32, {1, 4096, 2048});
  CountPlan plan = planOf(view);
  EXPECT_EQ(0, plan.rows.rank);
  EXPECT_EQ(4096 * 2048, plan.columns);
  // Of every eighth token the channels, and nothing else.
  options.sampling = Sampling::Strided;
  options.stride = 8;
  plan = planOf(view);
  ASSERT_EQ(1, plan.rows.rank);
  EXPECT_EQ(512, plan.rows.shape[0]);
  EXPECT_EQ(8 * 2048, plan.rows.strides[0]);
  EXPECT_EQ(2048, plan.columns);
  EXPECT_EQ(1, plan.columnStride);
  options.sampling = Sampling::Token;
  plan = planOf(view);
  EXPECT_TRUE(plan.tokens && plan.isCountable);
  EXPECT_EQ(2048, plan.columns);
  // Tokens whose channels cannot be said with one stride; f64.
  view = TensorView::contiguous(x, ElementType::F32, {1, 16, 4, 8});
  view.strides[2] = 9;
  EXPECT_FALSE(planOf(view).isCountable);
  options = {};
  view = TensorView::contiguous(x, ElementType::F64, {4});
  EXPECT_FALSE(planOf(view).isCountable);
  view.rank = 9;
  EXPECT_EQ("tensor: expected a rank from 0 to 8, got 9",
            make(options).plan(view).status().message());
}

//===----------------------------------------------------------------------===//
// Errors
//===----------------------------------------------------------------------===//

TEST(EstimatorTest, OptionsThatMakeNoSense) {
  struct Case {
    std::function<void(EstimatorOptions &)> change;
    const char *message;
  };
  const Case cases[] = {
      {[](EstimatorOptions &o) { o.bins = 1; },
       "estimator option 'bins': expected 2 to 65536, got 1"},
      {[](EstimatorOptions &o) { o.bins = 65537; },
       "estimator option 'bins': expected 2 to 65536, got 65537"},
      {[](EstimatorOptions &o) { o.bins = -1; },
       "estimator option 'bins': expected 2 to 65536, got -1"},
      {[](EstimatorOptions &o) {
         o.range = RangeMode::Fixed;
         o.low = o.high = 1;
       },
       "estimator option 'low': expected a finite range with low < high, got "
       "[1.000000, 1.000000]"},
      {[](EstimatorOptions &o) {
         o.range = RangeMode::Fixed;
         o.high = Inf;
       },
       "estimator option 'low': expected a finite range with low < high, got "
       "[0.000000, inf]"},
      {[](EstimatorOptions &o) {
         o.range = RangeMode::Fixed;
         o.low = NotANumber;
       },
       "estimator option 'low': expected a finite range with low < high, got "
       "[nan, 1.000000]"},
      {[](EstimatorOptions &o) {
         o.range = RangeMode::RunningQuantile;
         o.quantile = 0;
       },
       "estimator option 'quantile': expected a number in (0, 0.5), got "
       "0.000000"},
      {[](EstimatorOptions &o) {
         o.range = RangeMode::RunningQuantile;
         o.quantile = 0.5;
       },
       "estimator option 'quantile': expected a number in (0, 0.5), got "
       "0.500000"},
      {[](EstimatorOptions &o) { o.decay = 1; },
       "estimator option 'decay': expected a number in [0, 1), got 1.000000"},
      {[](EstimatorOptions &o) { o.decay = NotANumber; },
       "estimator option 'decay': expected a number in [0, 1), got nan"},
      {[](EstimatorOptions &o) { o.stride = 0; },
       "estimator option 'stride': expected at least 1, got 0"},
      {[](EstimatorOptions &o) { o.stride = 2; },
       "estimator option 'stride': expected 1 where every element is looked "
       "at, got 2"},
      {[](EstimatorOptions &o) {
         o.sampling = Sampling::Token;
         o.range = RangeMode::Fixed;
       },
       "estimator option 'range': expected the range mode MinMax in token "
       "mode, got another"},
      {[](EstimatorOptions &o) { o.timeAxis = -2; },
       "estimator option 'timeAxis': expected -1 to 7, got -2"},
      {[](EstimatorOptions &o) { o.timeAxis = 8; },
       "estimator option 'timeAxis': expected -1 to 7, got 8"},
      {[](EstimatorOptions &o) { o.layerStride = 0; },
       "estimator option 'layerStride': expected at least 1, got 0"},
      {[](EstimatorOptions &o) { o.threads = -1; },
       "estimator option 'threads': expected 0 to 1024, got -1"},
      {[](EstimatorOptions &o) { o.threads = 1025; },
       "estimator option 'threads': expected 0 to 1024, got 1025"}};
  for (const Case &c : cases) {
    EstimatorOptions options;
    c.change(options);
    Expected<Estimator> made = Estimator::create(options);
    ASSERT_FALSE(made) << c.message;
    EXPECT_EQ(StatusCode::InvalidArgument, made.status().code());
    EXPECT_EQ(c.message, made.status().message());
  }
}

TEST(EstimatorTest, TensorsThatAreNone) {
  float x[4] = {};
  auto message = [&](TensorView view, EstimatorOptions options = {}) {
    Estimator estimator = make(options);
    Expected<Statistics> result = estimator.estimate(view);
    EXPECT_FALSE(result);
    EXPECT_EQ(StatusCode::InvalidArgument, result.status().code());
    return result.status().message();
  };
  TensorView view = TensorView::contiguous(x, ElementType::F32, {2, 2});
  view.rank = 9;
  EXPECT_EQ("tensor: expected a rank from 0 to 8, got 9", message(view));
  view.rank = -1;
  EXPECT_EQ("tensor: expected a rank from 0 to 8, got -1", message(view));
  view.rank = 2;
  view.shape[1] = -3;
  EXPECT_EQ("tensor: expected sizes of at least 0, got -3 for axis 1",
            message(view));
  view.shape[0] = view.shape[1] = int64_t(1) << 32;
  EXPECT_EQ("tensor: expected fewer than 2^63 elements, got more",
            message(view));
  view = TensorView::contiguous(nullptr, ElementType::F32, {2, 2});
  EXPECT_EQ("tensor: expected data, got a null pointer", message(view));
  EXPECT_EQ("tensor: expected data, got a null pointer",
            message(TensorView::contiguous(nullptr, ElementType::F32, {})));
  EstimatorOptions strided;
  strided.sampling = Sampling::Strided;
  strided.timeAxis = 2;
  view = TensorView::contiguous(x, ElementType::F32, {2, 2});
  EXPECT_EQ("tensor: expected a time axis below the rank 2, got axis 2",
            message(view, strided));
  strided.timeAxis = -1;
  EXPECT_EQ("tensor: expected a time axis below the rank 0, got axis 0",
            message(TensorView::contiguous(x, ElementType::F32, {}), strided));
}

TEST(EstimatorTest, Layers) {
  EstimatorOptions options;
  options.layerStride = 4;
  Estimator estimator = make(options);
  EXPECT_TRUE(estimator.wantsLayer(-1));
  EXPECT_TRUE(estimator.wantsLayer(0));
  EXPECT_FALSE(estimator.wantsLayer(1));
  EXPECT_FALSE(estimator.wantsLayer(3));
  EXPECT_TRUE(estimator.wantsLayer(44));
  EXPECT_EQ(4, estimator.options().layerStride);
}

/// An estimator serves tensors of any kind one after the other.
TEST(EstimatorTest, NothingIsLeftOfEarlierCalls) {
  EstimatorOptions options = withRange(RangeMode::MinMax);
  Estimator used = make(options);
  Random random(6);
  for (int round = 0; round < 40; ++round) {
    ElementType type = kTypes[random.below(4)];
    int64_t size =
        random.below(3) ? random.below(5000) : 100000 + random.below(300000);
    Data data = normals(type, static_cast<size_t>(size),
                        static_cast<uint64_t>(round), 0, 4);
    if (size > 10 && round % 3 == 0)
      data.set(7, Inf);
    Estimator fresh = make(options);
    EXPECT_TRUE(
        identical(run(fresh, data.view({size})), run(used, data.view({size}))))
        << round;
    EXPECT_EQ(fresh.histogram(), used.histogram());
  }
  // And may be moved.
  Estimator moved = std::move(used);
  Data data = normals(ElementType::F32, 100, 1);
  EXPECT_EQ(100u, run(moved, data.view({100})).count);
}

//===----------------------------------------------------------------------===//
// Decay mass
//===----------------------------------------------------------------------===//

namespace {
struct DecayCase {
  int64_t B, L, D, N;
  int rankA;
  DecayOptions options;
};

void checkDecay(const DecayCase &c, const Data &delta, const Data &A,
                const TensorView &deltaView, const TensorView &viewA) {
  Expected<std::vector<DecayMass>> result =
      computeDecayMass(deltaView, viewA, c.options);
  ASSERT_TRUE(result) << result.status().toString();
  int64_t chunk = c.options.chunk ? c.options.chunk : c.L, at = 0;
  auto deltaAt = [&](int64_t b, int64_t t, int64_t d) {
    return delta.get(static_cast<size_t>(b * deltaView.strides[0] +
                                         t * deltaView.strides[1] +
                                         d * deltaView.strides[2]));
  };
  for (int64_t b = 0; b < c.B; ++b)
    for (int64_t begin = 0; begin < c.L; begin += chunk) {
      ASSERT_LT(at, static_cast<int64_t>(result->size()));
      const DecayMass &mass = (*result)[static_cast<size_t>(at++)];
      int64_t end = std::min(begin + chunk, c.L);
      EXPECT_EQ(b, mass.batch);
      EXPECT_EQ(begin, mass.begin);
      EXPECT_EQ(end, mass.end);
      double slowest = -Inf, fastest = Inf, sum = 0;
      int64_t pairs = 0, small = 0;
      uint64_t bad = 0;
      for (int64_t d = 0; d < c.D; ++d) {
        double steps = 0;
        for (int64_t t = begin; t < end; ++t) {
          double dt = deltaAt(b, t, d);
          if (c.options.bias)
            dt += c.options.bias[d];
          if (c.options.softplus)
            dt = dt > 20 ? dt : std::log(1 + std::exp(dt));
          if (!std::isfinite(dt)) {
            ++bad;
            continue;
          }
          dt = dt < c.options.dtMin ? c.options.dtMin : dt;
          dt = dt > c.options.dtMax ? c.options.dtMax : dt;
          steps += dt;
        }
        for (int64_t n = 0; n < c.N; ++n) {
          double a = A.get(
              static_cast<size_t>(d * viewA.strides[0] +
                                  (c.rankA == 2 ? n * viewA.strides[1] : 0)));
          if (!std::isfinite(a)) {
            ++bad;
            continue;
          }
          double m = steps * a;
          slowest = std::max(slowest, m);
          fastest = std::min(fastest, m);
          sum += m;
          ++pairs;
          small += std::exp(m) < c.options.epsilon;
        }
      }
      EXPECT_EQ(bad, mass.nonFinite);
      EXPECT_NEAR(slowest, mass.slowest, 1e-9 * std::fabs(slowest));
      EXPECT_NEAR(fastest, mass.fastest, 1e-9 * std::fabs(fastest));
      EXPECT_NEAR(sum / static_cast<double>(pairs), mass.mean,
                  1e-9 * std::fabs(fastest));
      EXPECT_EQ(static_cast<double>(small) / static_cast<double>(pairs),
                mass.negligible);
      EXPECT_EQ(small == pairs && bad == 0, mass.independent);
    }
  EXPECT_EQ(at, static_cast<int64_t>(result->size()));
}
} // namespace

TEST(DecayMassTest, MatchesTheNaiveSums) {
  Random random(51);
  int independent = 0;
  for (int round = 0; round < 200; ++round) {
    DecayCase c;
    c.B = 1 + random.below(3);
    c.L = 1 + random.below(70);
    c.D = 1 + random.below(7);
    c.rankA = 1 + static_cast<int>(random.below(2));
    c.N = c.rankA == 2 ? 1 + random.below(5) : 1;
    c.options.chunk = random.below(4) ? 1 + random.below(80) : 0;
    c.options.softplus = random.below(3) != 0;
    c.options.epsilon = random.below(2) ? 1e-7 : 0.3;
    if (random.below(3) == 0) {
      c.options.dtMin = 0.01;
      c.options.dtMax = 0.9;
    } else if (!c.options.softplus) {
      c.options.dtMin = -Inf;
    }
    std::vector<float> bias(static_cast<size_t>(c.D));
    for (float &x : bias)
      x = static_cast<float>(random.normal());
    if (random.below(2))
      c.options.bias = bias.data();
    ElementType type = kTypes[random.below(4)], typeA = kTypes[random.below(2)];
    Data delta = normals(type, static_cast<size_t>(c.B * c.L * c.D),
                         static_cast<uint64_t>(round), 0, 2);
    Data A(typeA, static_cast<size_t>(c.D * c.N));
    for (size_t i = 0; i < A.size(); ++i)
      A.set(i, -std::exp(random.normal()));
    if (random.below(4) == 0)
      delta.set(
          static_cast<size_t>(random.below(static_cast<int64_t>(delta.size()))),
          random.below(2) ? NotANumber : Inf);
    if (random.below(6) == 0 && A.size() > 1)
      A.set(0, NotANumber);
    TensorView deltaView = delta.view({c.B, c.L, c.D}),
               viewA = c.rankA == 2 ? A.view({c.D, c.N}) : A.view({c.D});
    if (random.below(2)) {
      // [B, D, L] in memory.
      deltaView.strides[1] = 1;
      deltaView.strides[2] = c.L;
    }
    if (c.rankA == 2 && random.below(2)) {
      viewA.strides[0] = 1;
      viewA.strides[1] = c.D;
    }
    SCOPED_TRACE("round " + std::to_string(round));
    checkDecay(c, delta, A, deltaView, viewA);
    auto masses = computeDecayMass(deltaView, viewA, c.options);
    for (const DecayMass &mass : *masses)
      independent += mass.independent;
  }
  EXPECT_GT(independent, 20);
}

TEST(DecayMassTest, ByHand) {
  // dt = softplus(0) = ln 2 at each of 3 tokens; A = -1, -2.
  float delta[3] = {0, 0, 0}, A[2] = {-1, -2};
  TensorView d = TensorView::contiguous(delta, ElementType::F32, {1, 3, 1}),
             a = TensorView::contiguous(A, ElementType::F32, {1, 2});
  auto masses = computeDecayMass(d, a);
  ASSERT_TRUE(masses);
  ASSERT_EQ(1u, masses->size());
  EXPECT_NEAR(-3 * std::log(2), (*masses)[0].slowest, 1e-12);
  EXPECT_NEAR(-6 * std::log(2), (*masses)[0].fastest, 1e-12);
  EXPECT_NEAR(-4.5 * std::log(2), (*masses)[0].mean, 1e-12);
  EXPECT_EQ(0, (*masses)[0].negligible);
  // exp of those are 1/8 and 1/64.
  DecayOptions options;
  options.epsilon = 1.0 / 60;
  masses = computeDecayMass(d, a, options);
  EXPECT_EQ(0.5, (*masses)[0].negligible);
  EXPECT_FALSE((*masses)[0].independent);
  options.epsilon = 0.13;
  masses = computeDecayMass(d, a, options);
  EXPECT_TRUE((*masses)[0].independent);
  // Above 20 softplus is the identity.
  float large[1] = {1000};
  masses = computeDecayMass(
      TensorView::contiguous(large, ElementType::F32, {1, 1, 1}), a);
  EXPECT_EQ(-1000, (*masses)[0].slowest);
  EXPECT_EQ(0u, (*masses)[0].nonFinite);
  // Nothing to walk.
  EXPECT_TRUE(
      computeDecayMass(
          TensorView::contiguous(nullptr, ElementType::F32, {2, 0, 1}), a)
          ->empty());
  EXPECT_TRUE(
      computeDecayMass(
          TensorView::contiguous(nullptr, ElementType::F32, {0, 3, 1}), a)
          ->empty());
  options.chunk = INT64_MAX;
  EXPECT_EQ(1u, computeDecayMass(d, a, options)->size());
}

TEST(DecayMassTest, Errors) {
  float x[8] = {};
  auto view = [&](std::initializer_list<int64_t> shape) {
    return TensorView::contiguous(x, ElementType::F32, shape);
  };
  auto message = [&](const TensorView &delta, const TensorView &A,
                     const DecayOptions &options = {}) {
    auto result = computeDecayMass(delta, A, options);
    EXPECT_FALSE(result);
    EXPECT_EQ(StatusCode::InvalidArgument, result.status().code());
    return result.status().message();
  };
  EXPECT_EQ("delta: expected rank 3 [B, L, D], got rank 2",
            message(view({2, 2}), view({2})));
  EXPECT_EQ("A: expected rank 2 [D, N] or rank 1 [D], got rank 3",
            message(view({1, 2, 2}), view({2, 2, 1})));
  EXPECT_EQ("A: expected 2 channels as delta has, got 3",
            message(view({1, 2, 2}), view({3})));
  TensorView null = view({1, 2, 2});
  null.data = nullptr;
  EXPECT_EQ("delta: expected data, got a null pointer",
            message(null, view({2})));
  DecayOptions options;
  options.chunk = -1;
  EXPECT_EQ(
      "chunk: expected at least 1 token, or 0 for the whole length, got -1",
      message(view({1, 2, 2}), view({2}), options));
  options = DecayOptions();
  options.epsilon = 0;
  EXPECT_EQ("epsilon: expected a number in (0, 1), got 0.000000",
            message(view({1, 2, 2}), view({2}), options));
  options = DecayOptions();
  options.dtMin = 1;
  options.dtMax = 0;
  EXPECT_EQ("dtMin: expected at most dtMax, got 1.000000 and 0.000000",
            message(view({1, 2, 2}), view({2}), options));
}
