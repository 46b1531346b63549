//===- Site.h - A place where a chunk is chosen -----------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_SCHEDULER_SITE_H
#define COREY_SCHEDULER_SITE_H

#include "corey/Scheduler/Policy.h"
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace corey::scheduler {

/// What a site is, fixed when it is made.
struct SiteInfo {
  std::string name;
  /// Sizes of the scan; batch and length come with every call.
  Problem problem;
  /// At least one.
  std::vector<Variant> variants{Variant()};
  Device device;
  /// Number of the layer, -1 if it has none.
  int64_t layer = -1;
};

/// The number behind "layer" or "layers" in a site's name ("layer3.scan",
/// "layers.3.mixer"), or -1.
int64_t layerOf(std::string_view siteName);

/// A chunk site of a program: asks a policy, with the statistics of earlier
/// calls. Thread-safe. decide() and publish() allocate nothing and never wait
/// for data: a decision takes whatever statistics there are.
class Site {
public:
  Site(SiteInfo info, std::shared_ptr<const Policy> policy);

  const SiteInfo &info() const { return description; }

  /// The chunk for a call of `batch` sequences of `length` tokens. `units`, if
  /// not 0, stands for the device's in this call.
  Decision decide(int64_t batch, int64_t length, int64_t units = 0);
  /// Statistics that an earlier call gathered in `milliseconds`.
  void publish(const Statistics &statistics, double milliseconds);

  void setPolicy(std::shared_ptr<const Policy> policy);
  std::shared_ptr<const Policy> policy() const;
  /// Fixes the chunk; 0 gives it back to the policy.
  void setChunk(int64_t chunk);
  /// Fixes the kernel, an index into the variants; -1 gives it back to the
  /// policy.
  void setVariant(int variant);

  struct Report {
    /// The chunk that was fixed, or 0.
    int64_t requested = 0;
    /// Of the last decision; zeros and an undefined decision before the first.
    int64_t batch = 0, length = 0;
    Decision decision;
    uint64_t decisions = 0, publications = 0;
    /// Decisions that differ from the one before in chunk or variant.
    uint64_t switches = 0;
    Statistics statistics;
    double averageEntropy = NAN, statisticsMs = 0;
    std::string policy;
  };
  Report report() const;

private:
  const SiteInfo description;
  mutable std::mutex mutex;
  std::shared_ptr<const Policy> current;
  int64_t requested = 0;
  int requestedVariant = -1;
  int64_t lastBatch = 0, lastLength = 0;
  Decision last;
  uint64_t decisions = 0, publications = 0, switches = 0;
  Statistics statistics;
  MovingAverage average;
  double statisticsMs = 0;
};

} // namespace corey::scheduler

#endif // COREY_SCHEDULER_SITE_H
