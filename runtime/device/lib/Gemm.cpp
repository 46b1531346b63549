//===- Gemm.cpp - Matrix products through a BLAS -*- C++ -*-===//
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
#include <omp.h>

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
  } else if (xBatchStride == rows * xRowStride && yBatchStride == rows * yRowStride) {
    rows *= batch;
    batch = 1;
  }
  // Slices of rows or of outputs, whichever is longer, one to a thread. The
  // library, in its OpenMP build, stays on the thread that calls it.
  static const bool single = (openblas_set_num_threads(1), true);
  (void)single;
  bool byRows = rows >= outputs;
  int64_t extent = byRows ? rows : outputs;
  double work = static_cast<double>(rows) * outputs * inputs;
  int64_t threads = std::min<int64_t>(omp_get_max_threads(), (extent + 31) / 32);
  if (work < 1e6)
    threads = 1;
  for (int64_t b = 0; b < batch; ++b) {
    const float *xb = xp + b * xBatchStride;
    float *yb = yp + b * yBatchStride;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t i = 0; i < threads; ++i) {
      // Multiples of 8 keep the micro-kernels whole.
      int64_t begin = extent * i / threads / 8 * 8;
      int64_t end = i + 1 == threads ? extent : extent * (i + 1) / threads / 8 * 8;
      if (begin >= end)
        continue;
      int64_t m = byRows ? end - begin : rows;
      int64_t n = byRows ? outputs : end - begin;
      const float *xs = byRows ? xb + begin * xRowStride : xb;
      const float *ws = byRows ? wp : wp + begin * wRowStride;
      float *ys = byRows ? yb + begin * yRowStride : yb + begin;
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, m, n, inputs, 1.0f, xs,
                  std::max(xRowStride, inputs), ws, std::max(wRowStride, inputs),
                  accumulate ? 1.0f : 0.0f, ys, std::max(yRowStride, n));
    }
  }
}
