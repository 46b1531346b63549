//===- EstimatorKernels.cpp - Kernels for any processor -------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "EstimatorKernels.h"

// Vectors wider than the registers pass through functions that are all inlined.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace corey::scheduler {
namespace portable {
#include "EstimatorKernels.inc"
} // namespace portable

const EstimatorKernels kPortableKernels = portable::kernels;

#if defined(__x86_64__)
extern const EstimatorKernels kAVX2Kernels;
#endif

const EstimatorKernels &estimatorKernels() {
#if defined(__x86_64__)
  static const bool wide =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  if (wide)
    return kAVX2Kernels;
#endif
  return kPortableKernels;
}
} // namespace corey::scheduler
