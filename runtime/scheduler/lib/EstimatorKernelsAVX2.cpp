//===- EstimatorKernelsAVX2.cpp - Kernels for AVX2 and F16C ---------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "EstimatorKernels.h"
#include <immintrin.h>

namespace corey::scheduler {
namespace avx2 {
#include "EstimatorKernels.inc"
} // namespace avx2

extern const EstimatorKernels kAVX2Kernels;
const EstimatorKernels kAVX2Kernels = avx2::kernels;
} // namespace corey::scheduler
