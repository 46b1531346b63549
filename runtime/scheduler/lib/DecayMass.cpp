//===- DecayMass.cpp - What a chunk leaves of a state ---------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "TensorReader.h"
#include "corey/Scheduler/Estimator.h"
#include <cmath>

using namespace corey;
using namespace corey::scheduler;

/// softplus as the scans compute it.
static double softplus(double x) {
  return x > 20 ? x : std::log1p(std::exp(x));
}

Expected<std::vector<DecayMass>>
scheduler::computeDecayMass(const TensorView &delta, const TensorView &A,
                            const DecayOptions &options) {
  if (Status status = checkTensorView("delta", delta); !status)
    return status;
  if (Status status = checkTensorView("A", A); !status)
    return status;
  if (delta.rank != 3)
    return Status::invalidArgument(
        "delta: expected rank 3 [B, L, D], got rank " +
        std::to_string(delta.rank));
  if (A.rank != 1 && A.rank != 2)
    return Status::invalidArgument(
        "A: expected rank 2 [D, N] or rank 1 [D], got rank " +
        std::to_string(A.rank));
  int64_t batch = delta.shape[0], length = delta.shape[1],
          channels = delta.shape[2], states = A.rank == 2 ? A.shape[1] : 1;
  if (A.shape[0] != channels)
    return Status::invalidArgument("A: expected " + std::to_string(channels) +
                                   " channels as delta has, got " +
                                   std::to_string(A.shape[0]));
  if (options.chunk < 0)
    return Status::invalidArgument(
        "chunk: expected at least 1 token, or 0 for the whole length, got " +
        std::to_string(options.chunk));
  if (!(options.epsilon > 0 && options.epsilon < 1))
    return Status::invalidArgument(
        "epsilon: expected a number in (0, 1), got " +
        std::to_string(options.epsilon));
  if (!(options.dtMin <= options.dtMax))
    return Status::invalidArgument("dtMin: expected at most dtMax, got " +
                                   std::to_string(options.dtMin) + " and " +
                                   std::to_string(options.dtMax));
  int64_t chunk = options.chunk ? options.chunk : std::max<int64_t>(length, 1);
  double limit = std::log(options.epsilon);

  // The extreme and the summed rates of a channel, and their number, do for
  // every chunk but the share of negligible pairs, which asks each rate.
  std::vector<double> rates(channels * states);
  for (int64_t d = 0; d < channels; ++d)
    for (int64_t n = 0; n < states; ++n)
      rates[d * states + n] =
          loadElement(A.data, A.type,
                      d * A.strides[0] + (A.rank == 2 ? n * A.strides[1] : 0));
  std::vector<DecayMass> result;
  std::vector<double> steps(channels);
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t begin = 0; begin < length; begin += chunk) {
      DecayMass mass;
      mass.batch = b;
      mass.begin = begin;
      mass.end = std::min(begin + std::min(chunk, length), length);
      std::fill(steps.begin(), steps.end(), 0.0);
      for (int64_t t = mass.begin; t < mass.end; ++t)
        for (int64_t d = 0; d < channels; ++d) {
          double dt = loadElement(delta.data, delta.type,
                                  b * delta.strides[0] + t * delta.strides[1] +
                                      d * delta.strides[2]);
          if (options.bias)
            dt += options.bias[d];
          // Also what softplus would make a 0 of.
          bool finite = std::isfinite(dt);
          if (finite && options.softplus)
            dt = softplus(dt);
          if (!finite || !std::isfinite(dt)) {
            ++mass.nonFinite;
            continue;
          }
          steps[d] += std::min(std::max(dt, options.dtMin), options.dtMax);
        }
      double sum = 0;
      int64_t pairs = 0, small = 0;
      for (int64_t d = 0; d < channels; ++d)
        for (int64_t n = 0; n < states; ++n) {
          double rate = rates[d * states + n];
          if (!std::isfinite(rate)) {
            ++mass.nonFinite;
            continue;
          }
          double m = steps[d] * rate;
          mass.slowest = pairs ? std::max(mass.slowest, m) : m;
          mass.fastest = pairs ? std::min(mass.fastest, m) : m;
          sum += m;
          small += m < limit;
          ++pairs;
        }
      if (pairs) {
        mass.mean = sum / static_cast<double>(pairs);
        mass.negligible =
            static_cast<double>(small) / static_cast<double>(pairs);
        mass.independent = small == pairs && mass.nonFinite == 0;
      }
      result.push_back(mass);
    }
  return result;
}
