//===- Reference.h - Every ssm op as plain loops in f64 ---------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
///
/// \file
/// What the ops of the ssm dialect mean, as the shortest loops that say it. The
/// code shares nothing with the compiler, not even a header, so that the two
/// agree only if both are right.
///
/// Shapes and names are those of the dialect's documentation; absent operands
/// are null. Packed sequences are given by `seqStarts`: sequence s covers the
/// tokens from `seqStarts[s]` to the next start, the last one up to L.
///
//===----------------------------------------------------------------------===//

#ifndef COREY_TEST_REFERENCE_H
#define COREY_TEST_REFERENCE_H

#include <array>
#include <cstdint>
#include <initializer_list>
#include <vector>

namespace corey::reference {

/// A row-major tensor.
struct Array {
  Array() = default;
  /// A tensor of zeros.
  explicit Array(std::vector<int64_t> shape);

  /// The element at the given indices.
  double &at(std::initializer_list<int64_t> indices);
  double at(std::initializer_list<int64_t> indices) const;
  /// The number of elements.
  int64_t size() const { return static_cast<int64_t>(data.size()); }

  std::vector<int64_t> shape;
  std::vector<double> data;
  /// Of a result that sums terms of either sign: the sum of their magnitudes,
  /// which is what a rounding error scales with. Else empty, and the magnitude
  /// is that of the data.
  std::vector<double> magnitude;
};

/// The starts of packed sequences, null for a batch of equally long ones.
using Starts = const std::vector<int64_t> *;

/// A scan's output and the state after its last token.
struct ScanResult {
  Array y, state;
};

struct SelectiveScan {
  const Array *u = nullptr, *delta = nullptr, *A = nullptr, *B = nullptr,
              *C = nullptr;
  const Array *D = nullptr, *z = nullptr, *deltaBias = nullptr,
              *initialState = nullptr;
  Starts seqStarts = nullptr;
  bool deltaSoftplus = false;
};
ScanResult selectiveScan(const SelectiveScan &op);

/// Takes either `dt` and `A` or `decay`.
struct SSD {
  const Array *x = nullptr, *dt = nullptr, *A = nullptr, *decay = nullptr,
              *B = nullptr, *C = nullptr;
  const Array *D = nullptr, *z = nullptr, *dtBias = nullptr,
              *initialStates = nullptr;
  Starts seqStarts = nullptr;
  bool dtSoftplus = false, hasLimit = false;
  double limitLow = 0, limitHigh = 0;
};
ScanResult ssd(const SSD &op);

struct CausalConv {
  const Array *x = nullptr, *weight = nullptr, *bias = nullptr,
              *initialState = nullptr;
  Starts seqStarts = nullptr;
  bool silu = false;
};
ScanResult causalConv(const CausalConv &op);

Array projection(const Array &x, const Array &weight,
                 const Array *bias = nullptr, const Array *residual = nullptr,
                 const Array *weightScale = nullptr);

struct RMSNorm {
  const Array *x = nullptr, *weight = nullptr, *residual = nullptr,
              *z = nullptr;
  double eps = 1e-5;
  /// 0: the whole axis.
  int64_t groupSize = 0;
  bool normBeforeGate = false;
};
struct RMSNormResult {
  Array y, residualOut;
};
RMSNormResult rmsNorm(const RMSNorm &op);

/// By the definition: a product with the dense matrix.
Array hadamard(const Array &x, int64_t block);

double softplus(double x);
double sigmoid(double x);
double silu(double x);
double gelu(double x);

Array neg(const Array &x);
Array exp(const Array &x);
Array silu(const Array &x);
Array sigmoid(const Array &x);
Array softplus(const Array &x);
Array gelu(const Array &x);
Array scale(const Array &x, double factor);
/// `rhs` has the shape of the trailing axes of `lhs`.
Array add(const Array &lhs, const Array &rhs);
Array sub(const Array &lhs, const Array &rhs);
Array mul(const Array &lhs, const Array &rhs);

Array embedding(const Array &ids, const Array &table);
Array argmax(const Array &x);

/// The four words of Philox4x32-10 for a counter and a key (see Papers.md).
std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter,
                               std::array<uint32_t, 2> key);
/// What is drawn from every row, and the lowest and highest index that may come
/// of probabilities and sums that are off by 1e-5.
struct Draws {
  Array ids, lowest, highest, nextRandom;
};
Draws sample(const Array &logits, const Array &temperature, const Array &topK,
             const Array &topP, const Array &random);
/// The probability of every index of a row, by the same definition.
std::vector<double> probabilities(const std::vector<double> &logits,
                                  double temperature, int64_t topK,
                                  double topP);

enum class Granularity { Tensor, Token, Channel };
enum class QuantizedType { I8, F8E4M3FN };
/// The largest magnitude of a quantized type.
double largest(QuantizedType type);
/// `x` rounded to the quantized type, to nearest even; f8E4M3FN becomes NaN
/// beyond 448.
double roundTo(QuantizedType type, double x);
struct Quantized {
  Array q, scale;
};
Quantized quantize(const Array &x, QuantizedType type, Granularity granularity);
Array dequantize(const Array &q, const Array &scale, Granularity granularity);
/// The position in the scales of element `i` of a tensor of shape `shape`.
int64_t scaleIndex(const std::vector<int64_t> &shape, int64_t i,
                   Granularity granularity);

} // namespace corey::reference

#endif // COREY_TEST_REFERENCE_H
