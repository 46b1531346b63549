//===- CPU.h - State of a call ----------------------------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_DEVICE_CPU_H
#define COREY_DEVICE_CPU_H

#include "corey/Scheduler/Estimator.h"
#include "corey/Scheduler/Site.h"
#include "corey/Status.h"
#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace corey::cuda {
struct Call;
}

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

/// An `ssm.observe` site: what its calls have seen.
struct ObservationSite {
  ObservationSite(std::string name, scheduler::EstimatorOptions options,
                  scheduler::Site *target)
      : name(std::move(name)), options(options), target(target) {}

  /// Adds what a call has seen in `milliseconds`, and hands it on.
  void publish(const scheduler::Statistics &statistics, double milliseconds);

  const std::string name;
  const scheduler::EstimatorOptions options;
  /// The chunk site that the statistics serve; null if there is none.
  scheduler::Site *const target;

  /// Guards what follows.
  mutable std::mutex mutex;
  uint64_t calls = 0;
  scheduler::Statistics last;
  scheduler::MovingAverage entropy;
  double lastMs = 0;
  /// Over all calls: counts, range, mean, and sum of squares about the mean.
  uint64_t count = 0, nonFinite = 0;
  double min = 0, max = 0, mean = 0, m2 = 0;
};

/// What all calls of one program share.
struct ProgramState {
  std::vector<std::unique_ptr<scheduler::Site>> chunks;
  std::vector<std::unique_ptr<ObservationSite>> observations;
  /// By name: indices into `chunks` and `observations`.
  std::unordered_map<std::string_view, size_t> chunkIndex, observationIndex;

  void addChunk(std::unique_ptr<scheduler::Site> site);
  void addObservation(std::unique_ptr<ObservationSite> site);
  scheduler::Site *findChunk(std::string_view name) const;
  /// Index into `chunks`, or -1.
  int64_t findChunkIndex(std::string_view name) const;
};

/// State of one call in progress.
struct CallState {
  Arena arena;
  ProgramState *program = nullptr;
  /// What the call has on a CUDA device; null on the CPU.
  cuda::Call *cuda = nullptr;
  /// Threads of the call.
  int threads = 1;
  /// An estimator for each observation site that the call has passed.
  std::vector<std::unique_ptr<scheduler::Estimator>> estimators;
  /// What the call has seen; published when it ends, so that a call decides on
  /// earlier ones only.
  struct Seen {
    size_t observation;
    scheduler::Statistics statistics;
    double milliseconds;
  };
  std::vector<Seen> seen;
  /// The variant that each chunk site's last decision in this call chose.
  std::vector<int> variants;
  /// What sites decide in a call is added here unless it is null.
  struct Decided {
    scheduler::Site *site;
    int64_t batch, length, units;
    scheduler::Decision decision;
  };
  std::vector<Decided> *decided = nullptr;
  /// The first error of the call. Functions that compiled code calls do nothing
  /// more on a device once there is one.
  Status error;
  /// Bytes the system did not have; 0 while it has had them all.
  size_t missingBytes = 0;
  /// Where run() goes on when there is no memory for an intermediate.
  std::jmp_buf outOfMemory;
};

/// The call in progress on this thread, or null.
CallState *currentCall();
/// The call in progress; without one, state of the thread for programs that
/// were compiled ahead of time.
CallState &callOrDefault();
/// Fails the call in progress. Without one the error is printed.
void failCall(Status error);
/// What is wrong with an id of an embedding, and with the start of a sequence
/// (see RuntimeABI.h); ok if nothing is.
Status indexError(int64_t index, int64_t limit);
Status slotError(int64_t slot, int64_t limit);
Status sequenceStartError(int64_t sequence, int64_t start, int64_t previous,
                          int64_t length);
/// Leaves the call in progress, which needs `size` bytes that there are not.
/// Inside a parallel loop, or without a call, the process ends.
[[noreturn]] void leaveOutOfMemory(size_t size);

/// Calls `function` with `arguments` on behalf of `state`, with `threads`
/// threads. Returns false, with missingBytes set, if memory ran out: the call
/// was left where it stood and its blocks were taken back.
bool invoke(CallState &state, int threads, void (*function)(void **),
            void **arguments);

/// Processors this process may run on.
int hardwareThreads();

} // namespace corey::device

#endif // COREY_DEVICE_CPU_H
