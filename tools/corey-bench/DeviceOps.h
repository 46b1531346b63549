//===- DeviceOps.h - What measurements on CUDA devices share ----*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_TOOLS_COREY_BENCH_DEVICEOPS_H
#define COREY_TOOLS_COREY_BENCH_DEVICEOPS_H

#include "corey/Device/CUDA.h"
#include "corey/Tensor.h"
#include <memory>

namespace corey {

/// Device memory that is written so that nothing else stays in a cache.
class Flush {
public:
  static Expected<Flush> create(std::shared_ptr<cuda::Device> device);
  Status operator()(void *stream) {
    return device->memset(memory.get(), ++value, kBytes, stream);
  }

private:
  static constexpr size_t kBytes = size_t(256) << 20;
  std::shared_ptr<cuda::Device> device;
  std::shared_ptr<void> memory;
  unsigned char value = 0;
};

/// Fills a contiguous tensor of `device` with NaN, and waits for that.
Status poison(const cuda::Device &device, const Tensor &tensor);

} // namespace corey

#endif // COREY_TOOLS_COREY_BENCH_DEVICEOPS_H
