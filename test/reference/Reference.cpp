//===- Reference.cpp - Every ssm op as plain loops in f64 -----------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "Reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

using namespace corey::reference;

//===----------------------------------------------------------------------===//
// Arrays
//===----------------------------------------------------------------------===//

static int64_t product(const std::vector<int64_t> &shape) {
  int64_t count = 1;
  for (int64_t size : shape)
    count *= size;
  return count;
}

Array::Array(std::vector<int64_t> shape)
    : shape(std::move(shape)), data(product(this->shape), 0.0) {}

static int64_t offsetOf(const std::vector<int64_t> &shape,
                        std::initializer_list<int64_t> indices) {
  int64_t offset = 0;
  auto size = shape.begin();
  for (int64_t index : indices)
    offset = offset * *size++ + index;
  return offset;
}

double &Array::at(std::initializer_list<int64_t> indices) {
  return data[offsetOf(shape, indices)];
}
double Array::at(std::initializer_list<int64_t> indices) const {
  return data[offsetOf(shape, indices)];
}

static double &magnitudeAt(Array &array,
                           std::initializer_list<int64_t> indices) {
  return array.magnitude[offsetOf(array.shape, indices)];
}

//===----------------------------------------------------------------------===//
// Functions
//===----------------------------------------------------------------------===//

double corey::reference::softplus(double x) {
  return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x));
}
double corey::reference::sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double corey::reference::silu(double x) { return x / (1 + std::exp(-x)); }
double corey::reference::gelu(double x) {
  // erfc keeps the digits that 1 + erf loses for negative x.
  return x * std::erfc(-x / std::sqrt(2.0)) / 2;
}

//===----------------------------------------------------------------------===//
// Sequences
//===----------------------------------------------------------------------===//

namespace {
/// Tokens [begin, end) of row `batch`.
struct Sequence {
  int64_t batch, begin, end;
};
} // namespace

static std::vector<Sequence> sequencesOf(const Array &input, Starts starts) {
  std::vector<Sequence> list;
  int64_t length = input.shape[1];
  if (!starts) {
    for (int64_t b = 0; b < input.shape[0]; ++b)
      list.push_back({b, 0, length});
    return list;
  }
  for (size_t s = 0; s < starts->size(); ++s)
    list.push_back(
        {0, (*starts)[s], s + 1 < starts->size() ? (*starts)[s + 1] : length});
  return list;
}

//===----------------------------------------------------------------------===//
// Scans
//===----------------------------------------------------------------------===//

ScanResult corey::reference::selectiveScan(const SelectiveScan &op) {
  std::vector<Sequence> sequences = sequencesOf(*op.u, op.seqStarts);
  int64_t rows = sequences.size();
  int64_t channels = op.A->shape[0], states = op.A->shape[1],
          groups = op.B->shape[2];
  ScanResult result{Array(op.u->shape), Array({rows, channels, states})};
  result.y.magnitude = result.y.data;
  result.state.magnitude = result.state.data;
  for (int64_t r = 0; r < rows; ++r) {
    auto [b, begin, end] = sequences[r];
    for (int64_t d = 0; d < channels; ++d) {
      int64_t g = d / (channels / groups);
      std::vector<double> h(states, 0.0), m(states, 0.0);
      for (int64_t n = 0; n < states && op.initialState; ++n) {
        h[n] = op.initialState->at({r, d, n});
        m[n] = std::abs(h[n]);
      }
      for (int64_t t = begin; t < end; ++t) {
        double u = op.u->at({b, t, d});
        double dt = op.delta->at({b, t, d});
        if (op.deltaBias)
          dt += op.deltaBias->at({d});
        if (op.deltaSoftplus)
          dt = softplus(dt);
        double y = 0, magnitude = 0;
        for (int64_t n = 0; n < states; ++n) {
          double decay = std::exp(dt * op.A->at({d, n}));
          double input = dt * op.B->at({b, t, g, n}) * u;
          double c = op.C->at({b, t, g, n});
          h[n] = decay * h[n] + input;
          m[n] = decay * m[n] + std::abs(input);
          y += c * h[n];
          magnitude += std::abs(c) * m[n];
        }
        if (op.D) {
          y += op.D->at({d}) * u;
          magnitude += std::abs(op.D->at({d}) * u);
        }
        if (op.z) {
          double gate = silu(op.z->at({b, t, d}));
          y *= gate;
          magnitude *= std::abs(gate);
        }
        result.y.at({b, t, d}) = y;
        magnitudeAt(result.y, {b, t, d}) = magnitude;
      }
      for (int64_t n = 0; n < states; ++n) {
        result.state.at({r, d, n}) = h[n];
        magnitudeAt(result.state, {r, d, n}) = m[n];
      }
    }
  }
  return result;
}

ScanResult corey::reference::ssd(const SSD &op) {
  std::vector<Sequence> sequences = sequencesOf(*op.x, op.seqStarts);
  int64_t rows = sequences.size();
  int64_t heads = op.x->shape[2], channels = op.x->shape[3];
  int64_t groups = op.B->shape[2], states = op.B->shape[3];
  ScanResult result{Array(op.x->shape), Array({rows, heads, channels, states})};
  result.y.magnitude = result.y.data;
  result.state.magnitude = result.state.data;
  for (int64_t r = 0; r < rows; ++r) {
    auto [b, begin, end] = sequences[r];
    for (int64_t h = 0; h < heads; ++h) {
      int64_t g = h / (heads / groups);
      std::vector<double> s(channels * states, 0.0), m(channels * states, 0.0);
      for (int64_t p = 0; p < channels && op.initialStates; ++p)
        for (int64_t n = 0; n < states; ++n) {
          s[p * states + n] = op.initialStates->at({r, h, p, n});
          m[p * states + n] = std::abs(s[p * states + n]);
        }
      for (int64_t t = begin; t < end; ++t) {
        double step = 1, decay;
        if (op.decay) {
          decay = std::exp(op.decay->at({b, t, h}));
        } else {
          step = op.dt->at({b, t, h});
          if (op.dtBias)
            step += op.dtBias->at({h});
          if (op.dtSoftplus)
            step = softplus(step);
          if (op.hasLimit)
            step = std::min(std::max(step, op.limitLow), op.limitHigh);
          decay = std::exp(step * op.A->at({h}));
        }
        for (int64_t p = 0; p < channels; ++p) {
          double x = op.x->at({b, t, h, p});
          double y = 0, magnitude = 0;
          for (int64_t n = 0; n < states; ++n) {
            double input = step * x * op.B->at({b, t, g, n});
            double c = op.C->at({b, t, g, n});
            double &value = s[p * states + n], &size = m[p * states + n];
            value = decay * value + input;
            size = decay * size + std::abs(input);
            y += c * value;
            magnitude += std::abs(c) * size;
          }
          if (op.D) {
            double skip =
                op.D->shape.size() == 2 ? op.D->at({h, p}) : op.D->at({h});
            y += skip * x;
            magnitude += std::abs(skip * x);
          }
          if (op.z) {
            double gate = silu(op.z->at({b, t, h, p}));
            y *= gate;
            magnitude *= std::abs(gate);
          }
          result.y.at({b, t, h, p}) = y;
          magnitudeAt(result.y, {b, t, h, p}) = magnitude;
        }
      }
      for (int64_t p = 0; p < channels; ++p)
        for (int64_t n = 0; n < states; ++n) {
          result.state.at({r, h, p, n}) = s[p * states + n];
          magnitudeAt(result.state, {r, h, p, n}) = m[p * states + n];
        }
    }
  }
  return result;
}

ScanResult corey::reference::causalConv(const CausalConv &op) {
  std::vector<Sequence> sequences = sequencesOf(*op.x, op.seqStarts);
  int64_t rows = sequences.size();
  int64_t channels = op.weight->shape[0], width = op.weight->shape[1];
  ScanResult result{Array(op.x->shape), Array({rows, width - 1, channels})};
  result.y.magnitude = result.y.data;
  for (int64_t r = 0; r < rows; ++r) {
    auto [b, begin, end] = sequences[r];
    for (int64_t d = 0; d < channels; ++d) {
      // The input at token t, counted from the start of the sequence.
      auto inputAt = [&, b = b, begin = begin](int64_t t) {
        if (t >= 0)
          return op.x->at({b, begin + t, d});
        return op.initialState ? op.initialState->at({r, width - 1 + t, d})
                               : 0.0;
      };
      int64_t length = end - begin;
      for (int64_t t = 0; t < length; ++t) {
        double y = op.bias ? op.bias->at({d}) : 0.0, magnitude = std::abs(y);
        for (int64_t k = 0; k < width; ++k) {
          double term = op.weight->at({d, k}) * inputAt(t - (width - 1) + k);
          y += term;
          magnitude += std::abs(term);
        }
        // The slope of silu is at most 1.1: the magnitude stands.
        if (op.silu)
          y = silu(y);
        result.y.at({b, begin + t, d}) = y;
        magnitudeAt(result.y, {b, begin + t, d}) = magnitude;
      }
      for (int64_t k = 0; k + 1 < width; ++k)
        result.state.at({r, k, d}) = inputAt(length - (width - 1) + k);
    }
  }
  return result;
}

//===----------------------------------------------------------------------===//
// The last axis
//===----------------------------------------------------------------------===//

/// The shape of `array` with another last axis.
static std::vector<int64_t> withLast(const Array &array, int64_t size) {
  std::vector<int64_t> shape = array.shape;
  shape.back() = size;
  return shape;
}

/// Rows of the last axis.
static int64_t rowsOf(const Array &array) {
  return product({array.shape.begin(), array.shape.end() - 1});
}

Array corey::reference::projection(const Array &x, const Array &weight,
                                   const Array *bias, const Array *residual,
                                   const Array *weightScale) {
  int64_t outputs = weight.shape[0], inputs = weight.shape[1];
  Array y(withLast(x, outputs));
  y.magnitude = y.data;
  for (int64_t r = 0; r < rowsOf(x); ++r)
    for (int64_t m = 0; m < outputs; ++m) {
      double sum = 0, magnitude = 0;
      for (int64_t k = 0; k < inputs; ++k) {
        double w = weight.data[m * inputs + k];
        if (weightScale)
          w *= weightScale->data[weightScale->shape.empty() ? 0 : m];
        sum += x.data[r * inputs + k] * w;
        magnitude += std::abs(x.data[r * inputs + k] * w);
      }
      if (bias) {
        sum += bias->data[m];
        magnitude += std::abs(bias->data[m]);
      }
      if (residual) {
        sum += residual->data[r * outputs + m];
        magnitude += std::abs(residual->data[r * outputs + m]);
      }
      y.data[r * outputs + m] = sum;
      y.magnitude[r * outputs + m] = magnitude;
    }
  return y;
}

RMSNormResult corey::reference::rmsNorm(const RMSNorm &op) {
  const Array &x = *op.x;
  int64_t size = x.shape.back(), group = op.groupSize ? op.groupSize : size;
  RMSNormResult result{Array(x.shape), Array(x.shape)};
  for (int64_t first = 0; first < x.size(); first += group) {
    std::vector<double> r(group);
    double squares = 0;
    for (int64_t i = 0; i < group; ++i) {
      r[i] = x.data[first + i] +
             (op.residual ? op.residual->data[first + i] : 0.0);
      result.residualOut.data[first + i] = r[i];
      if (op.z && !op.normBeforeGate)
        r[i] *= silu(op.z->data[first + i]);
      squares += r[i] * r[i];
    }
    double root = std::sqrt(squares / static_cast<double>(group) + op.eps);
    for (int64_t i = 0; i < group; ++i) {
      double y = r[i] / root * op.weight->data[(first + i) % size];
      if (op.z && op.normBeforeGate)
        y *= silu(op.z->data[first + i]);
      result.y.data[first + i] = y;
    }
  }
  return result;
}

Array corey::reference::hadamard(const Array &x, int64_t block) {
  Array y(x.shape);
  y.magnitude = y.data;
  double root = std::sqrt(static_cast<double>(block));
  for (int64_t first = 0; first < x.size(); first += block)
    for (int64_t i = 0; i < block; ++i)
      for (int64_t j = 0; j < block; ++j) {
        // Sylvester's H[i, j]: -1 to the number of ones that i and j share.
        bool negative = false;
        for (int64_t common = i & j; common; common &= common - 1)
          negative = !negative;
        double v = x.data[first + j] / root;
        y.data[first + i] += negative ? -v : v;
        y.magnitude[first + i] += std::abs(v);
      }
  return y;
}

Array corey::reference::argmax(const Array &x) {
  int64_t size = x.shape.back();
  Array ids(std::vector<int64_t>(x.shape.begin(), x.shape.end() - 1));
  for (int64_t r = 0; r < rowsOf(x); ++r) {
    const double *row = x.data.data() + r * size;
    int64_t best = 0;
    for (int64_t i = 1; i < size; ++i) {
      if (std::isnan(row[best]))
        break;
      if (std::isnan(row[i]) || row[i] > row[best])
        best = i;
    }
    ids.data[r] = static_cast<double>(best);
  }
  return ids;
}

std::array<uint32_t, 4>
corey::reference::philox(std::array<uint32_t, 4> counter,
                         std::array<uint32_t, 2> key) {
  for (int round = 1; round <= 10; ++round) {
    uint64_t a = 0xD2511F53ull * counter[0], b = 0xCD9E8D57ull * counter[2];
    counter = {static_cast<uint32_t>(b / 0x100000000) ^ counter[1] ^ key[0],
               static_cast<uint32_t>(b % 0x100000000),
               static_cast<uint32_t>(a / 0x100000000) ^ counter[3] ^ key[1],
               static_cast<uint32_t>(a % 0x100000000)};
    key = {key[0] + 0x9E3779B9u, key[1] + 0xBB67AE85u};
  }
  return counter;
}

/// Indices of a row in the order in which they are kept, with their weights:
/// those among which `topP` chooses.
static std::vector<std::pair<int64_t, double>>
candidates(const double *row, int64_t size, double temperature, int64_t topK) {
  std::vector<std::pair<int64_t, double>> list;
  double largest = *std::max_element(row, row + size);
  for (int64_t i = 0; i < size; ++i) {
    double weight = std::exp((row[i] - largest) / temperature);
    list.push_back({i, std::isnan(weight) ? 0 : weight});
  }
  std::sort(list.begin(), list.end(), [&](auto &a, auto &b) {
    double x = row[a.first], y = row[b.first];
    return x != y ? x > y : a.first < b.first;
  });
  if (topK > 0 && topK < size)
    list.resize(static_cast<size_t>(topK));
  return list;
}

static double sumOf(const std::vector<std::pair<int64_t, double>> &list) {
  double sum = 0;
  for (auto &each : list)
    sum += each.second;
  return sum;
}

/// The first few of `list` that have the part `topP` of the sum.
static std::vector<std::pair<int64_t, double>>
nucleus(std::vector<std::pair<int64_t, double>> list, double topP) {
  double wanted = topP * sumOf(list), sum = 0;
  size_t count = 0;
  do
    sum += list[count++].second;
  while (count < list.size() && sum < wanted);
  list.resize(count);
  std::sort(list.begin(), list.end());
  return list;
}

std::vector<double>
corey::reference::probabilities(const std::vector<double> &logits,
                                double temperature, int64_t topK, double topP) {
  std::vector<double> result(logits.size(), 0);
  auto list = candidates(logits.data(), static_cast<int64_t>(logits.size()),
                         temperature, topK);
  if (topP < 1)
    list = nucleus(list, topP);
  double sum = sumOf(list);
  for (auto &each : list)
    result[static_cast<size_t>(each.first)] = each.second / sum;
  return result;
}

Draws corey::reference::sample(const Array &logits, const Array &temperature,
                               const Array &topK, const Array &topP,
                               const Array &random) {
  Draws draws;
  draws.ids = argmax(logits);
  draws.lowest = draws.highest = draws.ids;
  draws.nextRandom = random;
  int64_t size = logits.shape.back();
  for (int64_t r = 0; r < draws.ids.size(); ++r) {
    const double *row = logits.data.data() + r * size;
    draws.nextRandom.data[3 * r + 2] += 1;
    if (!(temperature.data[r] > 0) ||
        !std::isfinite(row[static_cast<int64_t>(draws.ids.data[r])]))
      continue;
    uint64_t words[3];
    for (int i = 0; i < 3; ++i)
      words[i] =
          static_cast<uint64_t>(static_cast<int64_t>(random.data[3 * r + i]));
    auto low = [](uint64_t word) { return static_cast<uint32_t>(word); };
    auto high = [](uint64_t word) { return static_cast<uint32_t>(word >> 32); };
    std::array<uint32_t, 4> bits =
        philox({low(words[2]), high(words[2]), low(words[1]), high(words[1])},
               {low(words[0]), high(words[0])});
    double u = bits[1] * 0x1p-32 + bits[0] * 0x1p-64;
    auto list = candidates(row, size, temperature.data[r],
                           static_cast<int64_t>(topK.data[r]));
    auto draw = [&](double topPError, double uError) {
      auto kept = list;
      if (topP.data[r] < 1)
        kept = nucleus(list, topP.data[r] + topPError);
      else
        std::sort(kept.begin(), kept.end());
      double wanted = std::min(std::max(u + uError, 0.0), 1.0) * sumOf(kept);
      double sum = 0, last = 0;
      for (auto &each : kept) {
        sum += each.second;
        if (each.second > 0)
          last = static_cast<double>(each.first);
        if (sum > wanted)
          break;
      }
      return last;
    };
    draws.ids.data[r] = draws.lowest.data[r] = draws.highest.data[r] =
        draw(0, 0);
    for (double topPError : {-1e-5, 1e-5})
      for (double uError : {-1e-5, 1e-5}) {
        double id = draw(topPError, uError);
        draws.lowest.data[r] = std::min(draws.lowest.data[r], id);
        draws.highest.data[r] = std::max(draws.highest.data[r], id);
      }
  }
  return draws;
}

Array corey::reference::embedding(const Array &ids, const Array &table) {
  int64_t size = table.shape[1];
  std::vector<int64_t> shape = ids.shape;
  shape.push_back(size);
  Array y(shape);
  for (int64_t i = 0; i < ids.size(); ++i)
    for (int64_t d = 0; d < size; ++d)
      y.data[i * size + d] =
          table.data[static_cast<int64_t>(ids.data[i]) * size + d];
  return y;
}

//===----------------------------------------------------------------------===//
// Elementwise
//===----------------------------------------------------------------------===//

template <typename Function>
static Array map(const Array &x, Function function) {
  Array y(x.shape);
  for (int64_t i = 0; i < x.size(); ++i)
    y.data[i] = function(x.data[i]);
  return y;
}

Array corey::reference::neg(const Array &x) {
  return map(x, [](double v) { return -v; });
}
Array corey::reference::exp(const Array &x) {
  return map(x, [](double v) { return std::exp(v); });
}
Array corey::reference::silu(const Array &x) {
  return map(x, [](double v) { return silu(v); });
}
Array corey::reference::sigmoid(const Array &x) {
  return map(x, [](double v) { return sigmoid(v); });
}
Array corey::reference::softplus(const Array &x) {
  return map(x, [](double v) { return softplus(v); });
}
Array corey::reference::gelu(const Array &x) {
  Array y = map(x, [](double v) { return gelu(v); });
  // The factor 1 + erf(...) is a sum of terms of either sign.
  y.magnitude = map(x, [](double v) { return std::abs(v); }).data;
  return y;
}
Array corey::reference::scale(const Array &x, double factor) {
  return map(x, [&](double v) { return factor * v; });
}

template <typename Function>
static Array zip(const Array &lhs, const Array &rhs, Function function) {
  Array y(lhs.shape);
  for (int64_t i = 0; i < lhs.size(); ++i)
    y.data[i] = function(lhs.data[i], rhs.data[i % rhs.size()]);
  return y;
}

Array corey::reference::add(const Array &lhs, const Array &rhs) {
  return zip(lhs, rhs, [](double a, double b) { return a + b; });
}
Array corey::reference::sub(const Array &lhs, const Array &rhs) {
  return zip(lhs, rhs, [](double a, double b) { return a - b; });
}
Array corey::reference::mul(const Array &lhs, const Array &rhs) {
  return zip(lhs, rhs, [](double a, double b) { return a * b; });
}

//===----------------------------------------------------------------------===//
// Quantization
//===----------------------------------------------------------------------===//

double corey::reference::largest(QuantizedType type) {
  return type == QuantizedType::I8 ? 127.0 : 448.0;
}

double corey::reference::roundTo(QuantizedType type, double x) {
  if (std::isnan(x))
    return type == QuantizedType::I8 ? 0.0 : x;
  if (type == QuantizedType::I8)
    return std::nearbyint(x);
  if (x == 0)
    return x;
  // Three bits behind the leading one; the smallest exponent is -6.
  int exponent = std::max(std::ilogb(x), -6) - 3;
  double rounded =
      std::ldexp(std::nearbyint(std::ldexp(x, -exponent)), exponent);
  return std::abs(rounded) > 448 ? std::numeric_limits<double>::quiet_NaN()
                                 : rounded;
}

int64_t corey::reference::scaleIndex(const std::vector<int64_t> &shape,
                                     int64_t i, Granularity granularity) {
  switch (granularity) {
  case Granularity::Tensor:
    return 0;
  case Granularity::Token:
    return i / shape.back();
  case Granularity::Channel:
    return i % shape.back();
  }
  return 0;
}

Quantized corey::reference::quantize(const Array &x, QuantizedType type,
                                     Granularity granularity) {
  std::vector<int64_t> shape;
  if (granularity == Granularity::Token)
    shape.assign(x.shape.begin(), x.shape.end() - 1);
  if (granularity == Granularity::Channel)
    shape = {x.shape.back()};
  Quantized result{Array(x.shape), Array(shape)};
  for (int64_t i = 0; i < x.size(); ++i) {
    double &best = result.scale.data[scaleIndex(x.shape, i, granularity)];
    if (std::abs(x.data[i]) > best)
      best = std::abs(x.data[i]);
  }
  double limit = largest(type);
  for (double &scale : result.scale.data)
    scale = scale == 0 ? 1.0 : scale / limit;
  for (int64_t i = 0; i < x.size(); ++i) {
    double v =
        x.data[i] / result.scale.data[scaleIndex(x.shape, i, granularity)];
    if (!std::isnan(v))
      v = std::min(std::max(v, -limit), limit);
    result.q.data[i] = roundTo(type, v);
  }
  return result;
}

Array corey::reference::dequantize(const Array &q, const Array &scale,
                                   Granularity granularity) {
  Array x(q.shape);
  for (int64_t i = 0; i < q.size(); ++i)
    x.data[i] = q.data[i] * scale.data[scaleIndex(q.shape, i, granularity)];
  return x;
}
