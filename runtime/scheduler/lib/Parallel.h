//===- Parallel.h - A loop over threads -------------------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_SCHEDULER_LIB_PARALLEL_H
#define COREY_SCHEDULER_LIB_PARALLEL_H

#include <cstdint>
#include <functional>

namespace corey::scheduler {

/// Threads to use where `asked` were asked for; 0 asks for every processor.
int threadCount(int asked);

/// Calls body(item, thread) for the items [0, count), thread t of T taking
/// items t, t + T, ... Thread 0 is the caller; with one thread no other is
/// started. Where the system has no more threads the caller does their share.
void parallelFor(int64_t count, int threads,
                 const std::function<void(int64_t, int)> &body);

} // namespace corey::scheduler

#endif // COREY_SCHEDULER_LIB_PARALLEL_H
