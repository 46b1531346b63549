//===- Parallel.cpp - A loop over threads ---------------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "Parallel.h"
#include <algorithm>
#include <system_error>
#include <thread>
#include <vector>

using namespace corey;

int scheduler::threadCount(int asked) {
  if (asked > 0)
    return asked;
  return std::max(1u, std::thread::hardware_concurrency());
}

void scheduler::parallelFor(int64_t count, int threads,
                            const std::function<void(int64_t, int)> &body) {
  int64_t used = std::clamp<int64_t>(threads, 1, std::max<int64_t>(count, 1));
  auto share = [&](int64_t thread) {
    for (int64_t item = thread; item < count; item += used)
      body(item, static_cast<int>(thread));
  };
  if (used == 1)
    return share(0);
  std::vector<std::thread> workers;
  int64_t started = 1;
  try {
    for (; started < used; ++started)
      workers.emplace_back(share, started);
  } catch (const std::system_error &) {
    // No more threads: the rest is done here.
  }
  share(0);
  for (int64_t thread = started; thread < used; ++thread)
    share(thread);
  for (std::thread &worker : workers)
    worker.join();
}
