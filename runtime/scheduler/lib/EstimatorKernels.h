//===- EstimatorKernels.h - Vector loops of the estimator -------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_SCHEDULER_LIB_ESTIMATORKERNELS_H
#define COREY_SCHEDULER_LIB_ESTIMATORKERNELS_H

#include <cstdint>

namespace corey::scheduler {

/// Elements of a block: f32 blocks stay in the first-level cache.
constexpr int64_t kBlock = 2048;

/// Sums over elements; the sums of powers of finite f32 are finite in f64, so
/// that the last tells whether all elements were. Powers are of x - pivot, with
/// one pivot for a whole tensor: as the first block, whose mean it is, is part
/// of the tensor, the variance bounds how far it can lie from the tensor's
/// mean, and f64 has digits to spare for that.
struct MomentSums {
  double s1 = 0, s2 = 0, s3 = 0, s4 = 0, absolute = 0;
  float min = 0, max = 0;
};

/// Bins of a histogram over [low, low + width] in f32.
struct BinningF32 {
  float low = 0, width = 1;
  /// Bins, as a number and as an index.
  float scale = 0;
  int32_t last = 0;
  /// Whether every element is known to lie in the range.
  bool inside = false;
};

/// The loops, for one instruction set. `count` is at most kBlock.
struct EstimatorKernels {
  void (*widenF16)(const uint16_t *from, float *to, int64_t count);
  void (*widenBF16)(const uint16_t *from, float *to, int64_t count);
  bool (*allFinite)(const float *x, int64_t count);
  double (*sum)(const float *x, int64_t count);
  /// Adds to `sums` (its min and max must hold values already). The sum of
  /// magnitudes is rounded to f32 on the way, and may overflow there.
  void (*moments)(const float *x, int64_t count, double pivot,
                  MomentSums &sums);
  /// Adds to `counters`, four histograms of `stride` counters one behind the
  /// other, or one if `stride` is 0. Counts elements outside the range.
  void (*histogram)(const float *x, int64_t count, const BinningF32 &binning,
                    uint32_t *counters, int64_t stride, uint64_t &below,
                    uint64_t &above);
  /// Elements with |x| > bound.
  int64_t (*countBeyond)(const float *x, int64_t count, float bound);
};

extern const EstimatorKernels kPortableKernels;
/// The widest kernels this processor runs.
const EstimatorKernels &estimatorKernels();

} // namespace corey::scheduler

#endif // COREY_SCHEDULER_LIB_ESTIMATORKERNELS_H
