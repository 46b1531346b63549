//===- CPUBackend.cpp - Programs on the host ------------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "Backend.h"
#include "corey/Conversion/SSMToLinalg/SSMToLinalg.h"
#include "llvm/TargetParser/Host.h"
#include <cstring>
#include <mutex>

using namespace corey;

Call::~Call() = default;
Image::~Image() = default;
Backend::~Backend() = default;

Status Call::capture(llvm::function_ref<Status()>, bool) {
  return Status::unsupported("expected a CUDA device to capture on, got cpu");
}
Status Call::launch(void *) {
  return Status::unsupported("expected a CUDA device to launch on, got cpu");
}

Expected<std::shared_ptr<Backend>> Backend::create(Device device) {
  if (device.kind == Device::CUDA)
    return createCUDABackend(device.index);
  return createCPUBackend();
}

/// Copies without allocating.
static void copyStrided(char *to, const int64_t *toStrides, const char *from,
                        const int64_t *fromStrides, const int64_t *shape,
                        size_t rank, size_t size) {
  if (rank == 0) {
    std::memcpy(to, from, size);
    return;
  }
  auto step = static_cast<int64_t>(size);
  if (rank == 1 && toStrides[0] == 1 && fromStrides[0] == 1) {
    std::memcpy(to, from, shape[0] * size);
    return;
  }
  for (int64_t i = 0; i < shape[0]; ++i)
    copyStrided(to + i * toStrides[0] * step, toStrides + 1,
                from + i * fromStrides[0] * step, fromStrides + 1, shape + 1,
                rank - 1, size);
}

namespace {
class CPUCall final : public Call {
public:
  bool takes(const Tensor &tensor, bool isOutput) const override {
    if (isOutput)
      return tensor.isContiguous();
    size_t rank = tensor.shape().size();
    return rank == 0 || tensor.shape()[rank - 1] <= 1 ||
           tensor.strides()[rank - 1] == 1;
  }
  void *stage(size_t bytes, Status &status) override {
    void *memory = state.arena.allocate(std::max<size_t>(bytes, 1));
    if (!memory)
      status = Status::outOfMemory("expected " + std::to_string(bytes) +
                                   " bytes to stage a tensor, got none");
    return memory;
  }
  Status copy(void *to, const int64_t *toStrides, const void *from,
              const int64_t *fromStrides, const int64_t *shape, size_t rank,
              size_t size) override {
    copyStrided(static_cast<char *>(to), toStrides,
                static_cast<const char *>(from), fromStrides, shape, rank,
                size);
    return Status::ok();
  }
  Status begin() override { return Status::ok(); }
  Status finish() override {
    state.arena.releaseAll();
    return Status::ok();
  }
  std::pair<size_t, size_t> memoryUse() const override {
    return {state.arena.bytesReserved(), state.arena.systemAllocations()};
  }
};

class CPUImage final : public Image {
public:
  Expected<std::unique_ptr<Call>> create() override {
    return std::unique_ptr<Call>(std::make_unique<CPUCall>());
  }
  Expected<std::unique_ptr<Call>> acquire(void *stream) override {
    if (stream)
      return Status::invalidArgument("expected no stream on cpu, got one");
    std::lock_guard<std::mutex> lock(mutex);
    if (idle.empty())
      return create();
    std::unique_ptr<Call> call = std::move(idle.back());
    idle.pop_back();
    return call;
  }
  void release(std::unique_ptr<Call> call) override {
    std::lock_guard<std::mutex> lock(mutex);
    idle.push_back(std::move(call));
  }
  std::pair<size_t, size_t> memoryUse() const override {
    std::lock_guard<std::mutex> lock(mutex);
    std::pair<size_t, size_t> total;
    for (const std::unique_ptr<Call> &call : idle) {
      auto [bytes, requests] = call->memoryUse();
      total.first += bytes;
      total.second += requests;
    }
    return total;
  }

private:
  mutable std::mutex mutex;
  std::vector<std::unique_ptr<Call>> idle;
};

class CPUBackend final : public Backend {
public:
  Device device() const override { return Device::cpu(); }
  std::string description() const override {
    return llvm::sys::getHostCPUName().str();
  }
  const char *machine() const override { return "cpu"; }
  scheduler::Device schedulerDevice(int threads) const override {
    return {"cpu-" + llvm::sys::getHostCPUName().str(), threads};
  }
  /// One.

  /// The host must have the registers.
  Status check(const CompileOptions &options) const override {
    if (options.vectorBits == 512 &&
        !llvm::sys::getHostCPUFeatures().lookup("avx512f"))
      return Status::invalidArgument("expected vectorBits to be 0 or 256 on a "
                                     "processor without AVX-512, got 512");
    return Status::ok();
  }
  void addPasses(mlir::OpPassManager &manager, const CompileOptions &options,
                 bool observe, Phase first, Phase last) const override {
    CPUPipelineOptions pipeline;
    pipeline.vectorBits = options.vectorBits;
    setPipelineOptions(pipeline, options, observe);
    buildCPUPipeline(manager, pipeline, first, last);
  }
  std::string target() const override { return "cpu"; }
  Expected<DeviceImage> takeCode(mlir::ModuleOp,
                                 const CompileOptions &) const override {
    return DeviceImage();
  }
  Expected<std::unique_ptr<Image>> load(DeviceImage) const override {
    return std::unique_ptr<Image>(std::make_unique<CPUImage>());
  }

  Expected<Tensor> place(const Tensor &tensor) const override {
    if (tensor.device() != device())
      return Status::invalidArgument("expected device cpu, got " +
                                     tensor.device().name());
    return tensor.isContiguous() ? tensor : tensor.to(tensor.dtype());
  }
};
} // namespace

std::shared_ptr<Backend> corey::createCPUBackend() {
  return std::make_shared<CPUBackend>();
}

std::vector<scheduler::Variant>
corey::scanVariantsOnCPU(const scheduler::Problem &problem) {
  CPUWorkItem item = problem.op == scheduler::OpKind::SSD
                         ? getSSDWorkItem(problem.channels, problem.groups)
                         : getScanWorkItem(problem.channels, problem.groups);
  scheduler::Variant variant;
  variant.itemChannels = item.channels;
  variant.tile = item.tile;
  return {variant};
}
