//===- CPU.h - State of a call on the CPU -----------------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_DEVICE_CPU_H
#define COREY_DEVICE_CPU_H

#include <atomic>
#include <csetjmp>
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
  /// Takes back every block that is still in use.
  void releaseAll();

  /// Bytes taken from the system, and how often it was asked.
  size_t bytesReserved() const { return reserved; }
  size_t systemAllocations() const { return requests; }

private:
  struct Header;
  /// Four classes per power of two.
  static constexpr unsigned kClasses = 4 * 48;
  Header *lists[kClasses] = {};
  Header *blocks = nullptr;
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
  /// Whether the caller had set the chunk of the last call.
  std::atomic<bool> lastRequested{false};
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
  /// Bytes the system did not have; 0 while it has had them all.
  size_t missingBytes = 0;
  /// Where run() goes on when there is no memory for an intermediate.
  std::jmp_buf outOfMemory;
};

/// Calls `function` with `arguments` on behalf of `state`, with `threads`
/// threads. Returns false, with missingBytes set, if memory ran out: the call
/// was left where it stood and its blocks were taken back.
bool invoke(CallState &state, int threads, void (*function)(void **),
            void **arguments);

/// Processors this process may run on.
int hardwareThreads();

} // namespace corey::device

#endif // COREY_DEVICE_CPU_H
