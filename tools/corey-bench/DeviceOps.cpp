//===- DeviceOps.cpp - Kernels on CUDA devices ----------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "DeviceOps.h"
#include "Workload.h"
#include "corey/Device/CUDA.h"
#include "corey/Scheduler/Tuner.h"
#include "corey/ToolUtils.h"
#include "llvm/Support/raw_ostream.h"
#include <algorithm>
#include <cmath>

using namespace corey;

Expected<Flush> Flush::create(std::shared_ptr<cuda::Device> device) {
  Flush flush;
  Expected<void *> memory = device->allocate(kBytes);
  if (!memory)
    return memory.takeStatus();
  flush.memory = std::shared_ptr<void>(
      *memory, [device](void *data) { device->deallocate(data); });
  flush.device = std::move(device);
  return flush;
}

Status corey::poison(const cuda::Device &device, const Tensor &tensor) {
  // All ones are no number, in whatever type. The copies and runs that follow
  // are on other streams.
  if (Status status = device.memset(
          tensor.data(), 0xff, static_cast<size_t>(tensor.numBytes()), nullptr);
      !status)
    return status;
  return device.synchronize();
}

/// Runs of one launch of a graph, and of a copy.
static constexpr int kRepeats = 20;
static constexpr unsigned kMinSamples = 11;

static Expected<DeviceCopy> measureCopy(std::shared_ptr<cuda::Device> gpu,
                                        Device device, Flush &flush,
                                        size_t bytes, double budgetMs) {
  // Every byte that is copied is read and written.
  bytes = std::max<size_t>(bytes / 2, 1);
  std::shared_ptr<void> memory[2];
  for (std::shared_ptr<void> &each : memory) {
    Expected<void *> got = gpu->allocate(bytes);
    if (!got)
      return got.takeStatus();
    each = std::shared_ptr<void>(*got,
                                 [gpu](void *data) { gpu->deallocate(data); });
  }
  auto copy = [&](void *stream) {
    return gpu->copyOnDevice(memory[0].get(), memory[1].get(), bytes, stream);
  };
  Expected<double> cold =
      timeOnDevice(device, copy, kMinSamples, budgetMs, nullptr,
                   [&](void *stream) { return flush(stream); });
  if (!cold)
    return cold.takeStatus();
  Expected<double> warm = timeOnDevice(
      device,
      [&](void *stream) {
        for (int i = 0; i < kRepeats; ++i)
          if (Status status = copy(stream); !status)
            return status;
        return Status::ok();
      },
      kMinSamples, budgetMs);
  if (!warm)
    return warm.takeStatus();
  return DeviceCopy{*cold * 1e3, *warm * 1e3 / kRepeats};
}

Expected<DeviceMeasurements>
corey::measureOnDevice(Context &context, const Workload &workload,
                       const scheduler::Problem *scan,
                       const std::optional<std::vector<int64_t>> &chunks,
                       const std::string &onlyVariant, double budgetMs) {
  Device device = context.getDevice();
  // Refused before anything is compiled.
  std::vector<scheduler::Variant> variants;
  if (scan) {
    std::string known;
    for (scheduler::Variant &each : scanVariants(device.kind, *scan)) {
      known += (known.empty() ? "" : ", ") + each.name;
      if (onlyVariant.empty() || each.name == onlyVariant)
        variants.push_back(std::move(each));
    }
    if (variants.empty())
      return Status::notFound("--variant: expected one of " + known +
                              ", got '" + onlyVariant + "'");
    for (const scheduler::Variant &each : variants)
      for (int64_t chunk : chunks.value_or(std::vector<int64_t>()))
        if (each.segmented && chunk % each.granularity)
          return Status::invalidArgument("--chunk: expected a multiple of " +
                                         std::to_string(each.granularity) +
                                         " for '" + each.name + "', got " +
                                         std::to_string(chunk));
  }
  CompileOptions compileOptions;
  if (chunks)
    compileOptions.policy = "unsplit";
  Expected<std::shared_ptr<Executable>> compiled =
      context.compile(workload.program, compileOptions, "<benchmark>");
  if (!compiled)
    return compiled.takeStatus();
  Executable &executable = **compiled;
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
  DeviceMeasurements measurements;
  Expected<DeviceCopy> copy = measureCopy(
      *gpu, device, *flush, static_cast<size_t>(workload.bytes), budgetMs / 4);
  if (!copy)
    return copy.takeStatus();
  measurements.copy = *copy;

  auto measure = [&](DeviceResult result) -> Status {
    if (scan) {
      if (Status status = executable.setVariant("scan", result.variant);
          !status)
        return status;
      if (Status status = executable.setChunk("scan", result.chunk); !status)
        return status;
    }
    // What an earlier kernel left must not pass for a result.
    for (Tensor &output : *outputs)
      if (Status status = poison(**gpu, output); !status)
        return status;
    if (Status status = executable.run("main", *inputs, *outputs); !status)
      return status;
    if (scan && !chunks) {
      ChunkInfo ran = executable.chunks().front();
      result.variant = ran.variant;
      result.chunk = ran.chunk;
    }
    Expected<std::vector<Tensor>> got = moveTo(*outputs, Device::cpu());
    if (!got)
      return got.takeStatus();
    Expected<std::vector<Difference>> differences =
        compareOutputs(workload, *got);
    if (!differences)
      return differences.takeStatus();
    for (const Difference &each : *differences) {
      result.errors.push_back(each.relativeL2);
      result.relativeL2 = std::max(result.relativeL2, each.relativeL2);
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
    measurements.results.push_back(std::move(result));
    return Status::ok();
  };

  if (!scan || !chunks) {
    DeviceResult result;
    result.variant = onlyVariant;
    if (Status status = measure(result); !status)
      return status;
    return measurements;
  }
  for (const scheduler::Variant &variant : variants) {
    std::vector<int64_t> own = *chunks;
    if (own.empty())
      for (const scheduler::Candidate &each : scheduler::defaultCandidates(
               *scan, {variant}, 16, context.schedulerDevice().units))
        own.push_back(each.chunk);
    DeviceResult result;
    result.variant = variant.name;
    if (Status status = measure(result); !status)
      return status;
    // By rule it is the same kernel.
    if (!variant.segmented || (variant.byRule && variants.size() > 1))
      continue;
    for (int64_t chunk : own) {
      if (chunk < 1 || chunk >= scan->length)
        continue;
      result.chunk = chunk;
      Status status = measure(result);
      // The others can still be measured.
      if (status.code() == StatusCode::OutOfMemory) {
        llvm::errs() << "corey-bench: warning: chunk " << chunk << " of '"
                     << variant.name << "' left out: " << status.message()
                     << "\n";
        continue;
      }
      if (!status)
        return status;
    }
  }
  return measurements;
}

Expected<ObservedScan> corey::measureObserved(Context &context,
                                              const Workload &workload,
                                              const std::string &policy,
                                              int64_t length, double budgetMs) {
  Device device = context.getDevice();
  Expected<std::shared_ptr<cuda::Device>> gpu = cuda::Device::get(device.index);
  if (!gpu)
    return gpu.takeStatus();
  Expected<Flush> flush = Flush::create(*gpu);
  if (!flush)
    return flush.takeStatus();
  Expected<cuda::Stream> stream = cuda::Stream::create(*gpu);
  if (!stream)
    return stream.takeStatus();
  Expected<std::vector<Tensor>> inputs = moveTo(workload.inputs, device);
  if (!inputs)
    return inputs.takeStatus();
  Expected<cuda::Event> start = cuda::Event::create(*gpu, /*timing=*/true),
                        end = cuda::Event::create(*gpu, /*timing=*/true);
  for (Expected<cuda::Event> *event : {&start, &end})
    if (!*event)
      return event->takeStatus();

  struct Side {
    std::shared_ptr<Executable> executable;
    std::vector<Tensor> outputs;
    std::vector<double> times;
  };
  Side sides[2];
  const std::string policies[] = {"unsplit", policy};
  for (int i = 0; i < 2; ++i) {
    CompileOptions options;
    options.policy = policies[i];
    Expected<std::shared_ptr<Executable>> compiled =
        context.compile(workload.program, options, "<benchmark>");
    if (!compiled)
      return compiled.takeStatus();
    sides[i].executable = *compiled;
    // The same kernels, whatever the policy would choose.
    if (Status status = (*compiled)->setChunk("scan", length); !status)
      return status;
    Expected<std::vector<Tensor>> outputs =
        (*compiled)->makeOutputs("main", *inputs);
    if (!outputs)
      return outputs.takeStatus();
    sides[i].outputs = std::move(*outputs);
  }
  auto once = [&](Side &side) -> Expected<double> {
    // Also hides what the host takes to put the work on the stream.
    Status status = (*flush)(stream->handle());
    if (status)
      status = start->record(stream->handle());
    if (status)
      status = side.executable->run("main", inputs->data(), inputs->size(),
                                    side.outputs.data(), side.outputs.size(),
                                    stream->handle());
    if (status)
      status = end->record(stream->handle());
    if (status)
      status = end->synchronize();
    if (!status)
      return status;
    return cuda::Event::milliseconds(*start, *end);
  };
  double total = 0;
  for (int round = -2; round < int(kMinSamples) || total < budgetMs; ++round)
    for (int i = 0; i < 2; ++i) {
      Side &side = sides[(round + i) & 1];
      Expected<double> ms = once(side);
      if (!ms)
        return ms.takeStatus();
      if (round < 0)
        continue;
      side.times.push_back(*ms * 1e3);
      total += std::max(*ms, 1e-3);
    }
  ObservedScan result;
  std::vector<ObservationInfo> seen = sides[1].executable->observations();
  if (seen.empty())
    return Status::invalidArgument(
        "--observe: expected a policy that decides on statistics, got '" +
        policy + "'");
  for (Side &side : sides)
    std::sort(side.times.begin(), side.times.end());
  result.plainUs = sides[0].times[sides[0].times.size() / 2];
  result.observedUs = sides[1].times[sides[1].times.size() / 2];
  // The two before that are not timed, too.
  result.runs = sides[1].times.size() + 2;
  result.observations = seen[0].calls;
  result.hostUs = seen[0].milliseconds * 1e3;
  return result;
}
