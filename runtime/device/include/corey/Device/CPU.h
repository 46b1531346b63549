//===- CPU.h - State of a call on the CPU -----------------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_DEVICE_CPU_H
#define COREY_DEVICE_CPU_H

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace corey::device {

/// Memory for intermediates. Freed blocks are kept in lists by size class and
/// handed out again, so that a call of known shapes takes nothing from the
/// system. Not thread-safe: a call allocates from its own thread only.
class Arena {
public:
  Arena() = default;
  Arena(const Arena &) = delete;
  Arena &operator=(const Arena &) = delete;
  ~Arena();

  /// At least `size` bytes aligned to 64; null when the system has no more.
  void *allocate(size_t size);
  void release(void *pointer);

  /// Bytes taken from the system, and how often it was asked.
  size_t bytesReserved() const { return reserved; }
  size_t systemAllocations() const { return requests; }

private:
  struct Header;
  /// Four classes per power of two.
  static constexpr unsigned kClasses = 4 * 48;
  Header *lists[kClasses] = {};
  size_t reserved = 0, requests = 0;
};

/// A chunk site: what was asked for, and what the last call used.
struct ChunkSite {
  ChunkSite(std::string name, std::string policy)
      : name(std::move(name)), policy(std::move(policy)) {}
  const std::string name;
  /// Who chooses where nobody sets a chunk, for people.
  const std::string policy;
  /// 0: by the policy; otherwise the chunk to use.
  std::atomic<int64_t> requested{0};
  std::atomic<int64_t> lastBatch{0}, lastLength{0}, lastChunk{0};
};

/// Running statistics of an observed value (Welford's update, in f64).
struct SiteStatistics {
  std::string name;
  uint64_t count = 0, nonFinite = 0;
  double min = 0, max = 0, mean = 0, m2 = 0;

  void add(double value);
  /// Population variance.
  double variance() const {
    return count ? m2 / static_cast<double>(count) : 0;
  }
};

/// What all calls of one program share.
struct ProgramState {
  std::vector<std::unique_ptr<ChunkSite>> chunks;
  std::mutex statisticsMutex;
  std::vector<SiteStatistics> statistics;
  /// The chunk of the policy for sites without a request: 0 means unsplit.
  int64_t defaultChunk = 0;
};

/// State of one call in progress.
struct CallState {
  Arena arena;
  ProgramState *program = nullptr;
  /// The first error of the call; empty while there is none.
  std::string error;
};

/// Makes a CallState the current one of this thread, and sets the number of
/// threads of the parallel loops it runs.
class CallScope {
public:
  CallScope(CallState &state, int threads);
  ~CallScope();
  CallScope(const CallScope &) = delete;
  CallScope &operator=(const CallScope &) = delete;

private:
  CallState *previous;
  int previousThreads;
};

/// Processors this process may run on.
int hardwareThreads();

} // namespace corey::device

#endif // COREY_DEVICE_CPU_H
