//===- Sampling.h - The arithmetic of ssm.sample ----------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
///
/// \file
/// What the run-time library and the kernels of GPUs must have in common for
/// equal logits to give equal indices. Standard C++ without anything else.
///
/// A weight is 2^x for x = (logit - largest) log2(e) / temperature, at least
/// kLeastExponent, all in f32 and each operation rounded by itself: with n the
/// integer nearest to x, which adding and subtracting kRounding leaves, and
/// p(x - n) the power of the rest, it is p 2^24, truncated, shifted to the left
/// by weightBits() - 24 and to the right by -n.
///
//===----------------------------------------------------------------------===//

#ifndef COREY_DEVICE_SAMPLING_H
#define COREY_DEVICE_SAMPLING_H

#include <cstdint>

namespace corey::sampling {

inline constexpr float kLog2E = 1.44269504f;
inline constexpr float kLeastExponent = -63;
inline constexpr float kRounding = 0x1.8p23f;
/// 2^f for |f| <= 1/2, from the highest power down to 1: interpolated at the
/// Chebyshev nodes, within 1e-8 before rounding, and exact at 0.
inline constexpr float kPower[] = {0.000154531634f,
                                   0.00133908633f,
                                   0.00961808302f,
                                   0.0555035695f,
                                   0.240226507f,
                                   0.693147182f,
                                   1.0f};

/// Fractional bits of the weights of `size` logits, so that 63 hold their sum.
constexpr int weightBits(int64_t size) {
  int bits = 61;
  for (int64_t power = 1; power < size; power *= 2)
    --bits;
  return bits;
}

/// Philox4x32-10: multipliers of words 0 and 2, and what a round adds to the
/// key.
inline constexpr int kRounds = 10;
inline constexpr uint32_t kMultipliers[] = {0xD2511F53, 0xCD9E8D57};
inline constexpr uint32_t kKeySteps[] = {0x9E3779B9, 0xBB67AE85};

} // namespace corey::sampling

#endif // COREY_DEVICE_SAMPLING_H
