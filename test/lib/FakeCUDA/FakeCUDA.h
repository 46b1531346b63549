//===- FakeCUDA.h - Control of the fake CUDA driver -------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// libcorey_fake_cuda.so stands in for libcuda.so.1 in tests: device memory is
// host memory, what is put on a stream happens at once, or becomes a node of
// the graph that the stream captures. PTX "compiles" to itself behind a mark
// unless it says "syntax error". Kernels are recorded, and run if a test has
// registered a function for them; the run-time library's own run always. Like
// the driver, it refuses to work without a current context, on addresses that
// are not in device memory, and to allocate or wait in a thread that captures.
//
// COREY_FAKE_CUDA_FAIL=<function>:<CUresult> has every call of a function fail.
//
//===----------------------------------------------------------------------===//

#ifndef COREY_TEST_FAKECUDA_H
#define COREY_TEST_FAKECUDA_H

#include <cstdint>
#include <string>
#include <vector>

namespace corey::fake {

struct Launch {
  std::string kernel;
  unsigned grid[3], block[3], cluster, sharedBytes;
  bool programmatic;
  void *stream;
  /// The value of each argument in its low bytes.
  std::vector<uint64_t> arguments;
};
using Kernel = void (*)(const Launch &launch);

/// What was launched since the last call of this.
std::vector<Launch> takeLaunches();

} // namespace corey::fake

extern "C" {
/// Calls of a function of the driver, by the name it is called by ("cuMemAlloc"
/// for cuMemAlloc_v2), or of all of them for null.
uint64_t corey_fake_calls(const char *function);
void corey_fake_reset_calls();
/// Has the call after `skip` more of `function` fail with `result`; 0 for
/// never.
void corey_fake_fail(const char *function, int result, int skip);
/// 2 at first.
void corey_fake_set_devices(int count);
/// Bytes of device memory; 1 GiB at first.
void corey_fake_set_memory(uint64_t bytes);
uint64_t corey_fake_memory_in_use();
/// While held, no event is done.
void corey_fake_hold_events(int hold);
void corey_fake_register(const char *kernel, corey::fake::Kernel function);
/// Forgets what was registered.
void corey_fake_reset_kernels();
}

#endif // COREY_TEST_FAKECUDA_H
