//===- DeviceScan.cpp - Scans on CUDA devices -----------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "Workload.h"
#include "corey/Device/CUDA.h"
#include "corey/ToolUtils.h"
#include <algorithm>
#include <cmath>

using namespace corey;

namespace {
/// Device memory that is written so that nothing else stays in a cache.
class Flush {
public:
  static Expected<Flush> create(std::shared_ptr<cuda::Device> device) {
    Flush flush;
    Expected<void *> memory = device->allocate(kBytes);
    if (!memory)
      return memory.takeStatus();
    flush.memory = std::shared_ptr<void>(
        *memory, [device](void *data) { device->deallocate(data); });
    flush.device = std::move(device);
    return flush;
  }
  Status operator()(void *stream) {
    return device->memset(memory.get(), ++value, kBytes, stream);
  }

private:
  static constexpr size_t kBytes = size_t(256) << 20;
  std::shared_ptr<cuda::Device> device;
  std::shared_ptr<void> memory;
  unsigned char value = 0;
};
} // namespace

Expected<std::vector<DeviceScanResult>>
corey::measureScanOnDevice(Context &context, const WorkloadOptions &options,
                           std::vector<int64_t> chunks, double budgetMs) {
  /// Runs of one launch of a graph.
  constexpr int kRepeats = 20;
  constexpr unsigned kMinSamples = 11;
  Workload workload = makeScan(options);
  CompileOptions compileOptions;
  compileOptions.policy = "unsplit";
  Expected<std::shared_ptr<Executable>> compiled =
      context.compile(workload.program, compileOptions, "<scan>");
  if (!compiled)
    return compiled.takeStatus();
  Executable &executable = **compiled;
  Device device = context.getDevice();
  Expected<std::shared_ptr<cuda::Device>> gpu = cuda::Device::get(device.index);
  if (!gpu)
    return gpu.takeStatus();
  Expected<Flush> flush = Flush::create(*gpu);
  if (!flush)
    return flush.takeStatus();
  Expected<std::vector<Tensor>> inputs = moveTo(workload.inputs, device);
  if (!inputs)
    return inputs.takeStatus();
  Expected<std::vector<Tensor>> outputs =
      executable.makeOutputs("main", *inputs);
  if (!outputs)
    return outputs.takeStatus();
  int64_t length = options.shape[1];
  if (chunks.empty())
    for (int64_t chunk = 16; chunk < length; chunk *= 2)
      chunks.push_back(chunk);
  scheduler::Problem problem;
  problem.channels = options.shape[2];
  problem.states = options.shape[3];
  std::vector<DeviceScanResult> results;

  auto measure = [&](DeviceScanResult result) -> Status {
    if (Status status = executable.setVariant("scan", result.variant); !status)
      return status;
    if (Status status = executable.setChunk("scan", result.chunk); !status)
      return status;
    if (Status status = executable.run("main", *inputs, *outputs); !status)
      return status;
    Expected<std::vector<Tensor>> got = moveTo(*outputs, Device::cpu());
    if (!got)
      return got.takeStatus();
    for (size_t i = 0; i < got->size(); ++i) {
      Expected<Difference> difference =
          compare((*got)[i], workload.expected[i]);
      if (!difference)
        return difference.takeStatus();
      result.relativeL2 = std::max(result.relativeL2, difference->relativeL2);
    }
    Expected<double> cold = timeOnDevice(
        device,
        [&](void *stream) {
          return executable.run("main", inputs->data(), inputs->size(),
                                outputs->data(), outputs->size(), stream);
        },
        kMinSamples, budgetMs / 2, nullptr,
        [&](void *stream) { return (*flush)(stream); });
    if (!cold)
      return cold.takeStatus();
    result.coldUs = *cold * 1e3;
    Expected<std::shared_ptr<CapturedRun>> captured =
        executable.capture("main", *inputs, *outputs, kRepeats);
    if (!captured)
      return captured.takeStatus();
    Expected<double> warm = timeOnDevice(
        device, [&](void *stream) { return (*captured)->launch(stream); },
        kMinSamples, budgetMs / 2);
    if (!warm)
      return warm.takeStatus();
    result.warmUs = *warm * 1e3 / kRepeats;
    results.push_back(std::move(result));
    return Status::ok();
  };

  for (const scheduler::Variant &variant : context.variants(problem)) {
    DeviceScanResult result;
    result.variant = variant.name;
    if (Status status = measure(result); !status)
      return status;
    // By rule it is the same kernel.
    if (!variant.segmented || variant.name == "rule")
      continue;
    for (int64_t chunk : chunks) {
      if (chunk < 1 || chunk >= length)
        continue;
      result.chunk = chunk;
      if (Status status = measure(result); !status)
        return status;
    }
  }
  return results;
}
