//===- Gemm.cpp - Matrix products through a BLAS --------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// Alone in a file, so that programs without large projections do not link a
// BLAS.
//
//===----------------------------------------------------------------------===//

#include "corey/Device/RuntimeABI.h"
#include <algorithm>
#include <cblas.h>
#include <cstring>
#include <omp.h>

namespace {
/// Rows as a BLAS takes them. Rows that overlap, coincide or run backwards are
/// copied; others are used where they are.
class Rows {
public:
  Rows(const float *data, int64_t rows, int64_t columns, int64_t &stride)
      : data(data) {
    if (rows <= 1 || stride >= columns)
      return;
    copy = static_cast<float *>(
        corey_rt_malloc(std::max<int64_t>(rows * columns, 1) * sizeof(float)));
    for (int64_t i = 0; i < rows; ++i)
      std::memcpy(copy + i * columns, data + i * stride,
                  columns * sizeof(float));
    this->data = copy;
    stride = columns;
  }
  Rows(const Rows &) = delete;
  Rows &operator=(const Rows &) = delete;
  ~Rows() {
    if (copy)
      corey_rt_free(copy);
  }
  const float *data;

private:
  float *copy = nullptr;
};
} // namespace

void corey_rt_gemm(int64_t x, int64_t w, int64_t y, int64_t batch, int64_t rows,
                   int64_t outputs, int64_t inputs, int64_t xBatchStride,
                   int64_t xRowStride, int64_t wRowStride, int64_t yBatchStride,
                   int64_t yRowStride, int64_t accumulate) {
  auto *xp = reinterpret_cast<const float *>(x);
  auto *wp = reinterpret_cast<const float *>(w);
  auto *yp = reinterpret_cast<float *>(y);
  if (batch <= 0 || rows <= 0 || outputs <= 0)
    return;
  // Blocks that follow one another are one product; so are single rows.
  if (batch > 1 && rows == 1) {
    rows = batch;
    batch = 1;
    xRowStride = xBatchStride;
    yRowStride = yBatchStride;
  } else if (xBatchStride == rows * xRowStride &&
             yBatchStride == rows * yRowStride) {
    rows *= batch;
    batch = 1;
  }
  // Slices of rows or of outputs, whichever is longer, one to a thread. The
  // library, in its OpenMP build, stays on the thread that calls it.
  static const bool single = [] {
    // It also sets the threads of OpenMP, which are the call's.
    int threads = omp_get_max_threads();
    openblas_set_num_threads(1);
    omp_set_num_threads(threads);
    return true;
  }();
  (void)single;
  bool byRows = rows >= outputs;
  int64_t extent = byRows ? rows : outputs;
  double work = static_cast<double>(rows) * outputs * inputs;
  int64_t threads =
      std::min<int64_t>(omp_get_max_threads(), (extent + 31) / 32);
  if (work < 1e6)
    threads = 1;
  Rows weights(wp, outputs, inputs, wRowStride);
  wp = weights.data;
  for (int64_t b = 0; b < batch; ++b) {
    int64_t xStride = xRowStride;
    Rows block(xp + b * xBatchStride, rows, inputs, xStride);
    const float *xb = block.data;
    float *yb = yp + b * yBatchStride;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t i = 0; i < threads; ++i) {
      // Multiples of 8 keep the micro-kernels whole.
      int64_t begin = extent * i / threads / 8 * 8;
      int64_t end =
          i + 1 == threads ? extent : extent * (i + 1) / threads / 8 * 8;
      if (begin >= end)
        continue;
      int64_t m = byRows ? end - begin : rows;
      int64_t n = byRows ? outputs : end - begin;
      const float *xs = byRows ? xb + begin * xStride : xb;
      const float *ws = byRows ? wp : wp + begin * wRowStride;
      float *ys = byRows ? yb + begin * yRowStride : yb + begin;
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, m, n, inputs, 1.0f,
                  xs, std::max(xStride, inputs), ws,
                  std::max(wRowStride, inputs), accumulate ? 1.0f : 0.0f, ys,
                  std::max(yRowStride, n));
    }
  }
}
