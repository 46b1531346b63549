//===- CUDARuntime.cpp - Functions that compiled code calls on CUDA -------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Device/CPU.h"
#include "corey/Device/CUDA.h"
#include "corey/Device/RuntimeABI.h"
#include <chrono>
#include <cstring>
#include <iterator>

using namespace corey;
using namespace corey::cuda;
using device::CallState;

void Program::add(std::string name, std::string image) {
  auto kernel = std::make_unique<Kernel>();
  kernel->name = std::move(name);
  kernel->image = std::move(image);
  kernels.push_back(std::move(kernel));
}

Expected<const Function *> Program::kernel(size_t number) const {
  Kernel &kernel = *kernels[number];
  if (const Function *known = kernel.function.load(std::memory_order_acquire))
    return known;
  std::lock_guard<std::mutex> lock(kernel.mutex);
  if (const Function *known = kernel.function.load(std::memory_order_relaxed))
    return known;
  Expected<std::shared_ptr<Module>> module =
      device->loadModule(kernel.image, options);
  if (!module)
    return module.takeStatus();
  Expected<const Function *> function = (*module)->function(kernel.name);
  if (!function)
    return function.takeStatus();
  kernel.module = std::move(*module);
  kernel.image.clear();
  kernel.image.shrink_to_fit();
  kernel.function.store(*function, std::memory_order_release);
  return *function;
}

Status Program::loadAll() const {
  for (size_t i = 0; i < kernels.size(); ++i)
    if (Expected<const Function *> function = kernel(i); !function)
      return function.takeStatus();
  return Status::ok();
}

std::vector<const Function *> Program::loaded() const {
  std::vector<const Function *> list;
  for (const std::unique_ptr<Kernel> &kernel : kernels)
    if (const Function *function = kernel->function.load())
      list.push_back(function);
  return list;
}

/// The device's part of the call in progress; null, with the call failed, where
/// there is none, and null once it has failed.
static cuda::Call *deviceCall() {
  CallState &state = device::callOrDefault();
  if (!state.error)
    return nullptr;
  if (!state.cuda)
    device::failCall(Status::internal(
        "expected a call on a CUDA device, got compiled code without one"));
  return state.cuda;
}

static bool check(Status status) {
  if (status)
    return true;
  device::failCall(std::move(status));
  return false;
}

template <class T> static T *toPointer(int64_t address) {
  return reinterpret_cast<T *>(address);
}

//===----------------------------------------------------------------------===//
// ABI
//===----------------------------------------------------------------------===//

/// Memory of the call, or null; `outOfMemory` says whether that is why.
static void *allocate(cuda::Call &call, size_t size, bool &outOfMemory) {
  Status status;
  void *pointer = call.arena.allocate(size, &status);
  outOfMemory = status.code() == StatusCode::OutOfMemory;
  if (!outOfMemory)
    check(status);
  return pointer;
}

void *corey_rt_device_malloc(size_t size) {
  cuda::Call *call = deviceCall();
  if (!call)
    return nullptr;
  bool outOfMemory;
  void *pointer = allocate(*call, size, outOfMemory);
  // Nothing here is left to be destroyed.
  if (outOfMemory)
    device::leaveOutOfMemory(size);
  return pointer;
}

void corey_rt_device_free(void *pointer) {
  // Also after a failure: the blocks are the call's.
  if (cuda::Call *call = device::callOrDefault().cuda)
    call->arena.release(pointer);
}

void corey_rt_launch(int64_t kernel, int64_t gridX, int64_t gridY,
                     int64_t gridZ, int64_t blockX, int64_t blockY,
                     int64_t blockZ, int64_t clusterX, int64_t isDependent,
                     int64_t dynamicSharedBytes, int64_t arguments) {
  cuda::Call *call = deviceCall();
  if (!call)
    return;
  size_t count = call->program ? call->program->size() : 0;
  if (kernel < 0 || static_cast<size_t>(kernel) >= count) {
    check(Status::internal("expected a kernel from 0 to " +
                           std::to_string(static_cast<int64_t>(count) - 1) +
                           ", got " + std::to_string(kernel)));
    return;
  }
  LaunchConfig config;
  config.grid = {gridX, gridY, gridZ};
  config.block = {blockX, blockY, blockZ};
  config.clusterX = clusterX;
  config.programmaticDependent = isDependent != 0;
  config.dynamicSharedBytes = dynamicSharedBytes;
  // Of an empty grid nothing is launched, nor loaded.
  if (gridX == 0 || gridY == 0 || gridZ == 0)
    return;
  Expected<const Function *> function =
      call->program->kernel(static_cast<size_t>(kernel));
  if (!function) {
    check(function.takeStatus());
    return;
  }
  check(launch(*call->device, **function, config, call->stream,
               toPointer<void *>(arguments)));
}

void corey_rt_device_copy(int64_t target, int64_t source, int64_t layout,
                          int64_t rank, int64_t elementBytes) {
  cuda::Call *call = deviceCall();
  if (!call)
    return;
  const int64_t *sizes = toPointer<const int64_t>(layout);
  check(call->device->copyStrided(
      toPointer<void>(target), sizes + rank, toPointer<const void>(source),
      sizes + 2 * rank, sizes, static_cast<size_t>(rank),
      static_cast<size_t>(elementBytes), call->stream));
}

static bool toType(int64_t width, ElementType &type) {
  type = width == 32   ? ElementType::F32
         : width == 16 ? ElementType::F16
                       : ElementType::BF16;
  return width == 32 || width == 16 || width == -16;
}

int64_t corey_rt_device_gemm(int64_t x, int64_t w, int64_t y, int64_t bias,
                             int64_t residual, int64_t batch, int64_t rows,
                             int64_t outputs, int64_t inputs,
                             int64_t xBatchStride, int64_t xRowStride,
                             int64_t wRowStride, int64_t yBatchStride,
                             int64_t yRowStride, int64_t residualBatchStride,
                             int64_t residualRowStride, int64_t inputType,
                             int64_t outputType, int64_t biasType) {
  cuda::Call *call = deviceCall();
  // A failed call needs no kernel in its place.
  if (!call)
    return 1;
  GemmProblem problem;
  problem.x = toPointer<const void>(x);
  problem.w = toPointer<const void>(w);
  problem.y = toPointer<void>(y);
  problem.bias = toPointer<const void>(bias);
  problem.residual = toPointer<const void>(residual);
  problem.batch = batch;
  problem.rows = rows;
  problem.outputs = outputs;
  problem.inputs = inputs;
  problem.xBatchStride = xBatchStride;
  problem.xRowStride = xRowStride;
  problem.wRowStride = wRowStride;
  problem.yBatchStride = yBatchStride;
  problem.yRowStride = yRowStride;
  problem.residualBatchStride = residualBatchStride;
  problem.residualRowStride = residualRowStride;
  if (!toType(inputType, problem.inputType) ||
      !toType(outputType, problem.outputType) ||
      (bias && !toType(biasType, problem.biasType)))
    return 0;
  Expected<bool> done = call->gemm.run(problem, call->stream);
  if (done)
    return *done;
  check(done.takeStatus());
  return 1;
}

//===----------------------------------------------------------------------===//
// Errors that kernels find
//===----------------------------------------------------------------------===//

int64_t corey_rt_device_error_slot(void) {
  cuda::Call *call = deviceCall();
  if (!call)
    return 0;
  if (!call->errors.data()) {
    Expected<PinnedBuffer> buffer = PinnedBuffer::allocate(
        call->device, sizeof(struct corey_rt_device_error));
    if (!buffer) {
      check(buffer.takeStatus());
      return 0;
    }
    std::memset(buffer->data(), 0, sizeof(struct corey_rt_device_error));
    call->errors = std::move(*buffer);
  }
  // Addresses are unified: the device's is the host's.
  return static_cast<int64_t>(reinterpret_cast<intptr_t>(call->errors.data()));
}

Status cuda::takeDeviceError(Call &call) {
  auto *shared =
      static_cast<volatile struct corey_rt_device_error *>(call.errors.data());
  if (!shared || shared->kind == 0)
    return Status::ok();
  int32_t kind = shared->kind;
  int64_t value = shared->value, limit = shared->limit,
          position = shared->position, previous = shared->previous;
  shared->kind = 0;
  if (kind == 1)
    return device::indexError(value, limit);
  Status status = device::sequenceStartError(position, value, previous, limit);
  return status ? Status::internal("expected a kernel to record an error, got "
                                   "kind " +
                                   std::to_string(kind))
                : status;
}

//===----------------------------------------------------------------------===//
// Observations
//===----------------------------------------------------------------------===//

static Expected<scheduler::Estimator *> estimatorOf(CallState &state,
                                                    size_t site) {
  state.estimators.resize(state.program->observations.size());
  std::unique_ptr<scheduler::Estimator> &estimator = state.estimators[site];
  if (!estimator) {
    Expected<scheduler::Estimator> made = scheduler::Estimator::create(
        state.program->observations[site]->options);
    if (!made)
      return made.takeStatus();
    estimator = std::make_unique<scheduler::Estimator>(std::move(*made));
  }
  return estimator.get();
}

/// Estimates what has arrived at a site and hands it on.
static Status publish(CallState &state, PendingObservation &seen) {
  seen.pending = false;
  Expected<scheduler::Estimator *> estimator = estimatorOf(state, seen.site);
  if (!estimator)
    return estimator.takeStatus();
  auto start = std::chrono::steady_clock::now();
  Expected<scheduler::Statistics> statistics =
      (*estimator)->estimate(seen.view);
  if (!statistics)
    return statistics.takeStatus();
  state.program->observations[seen.site]->publish(
      *statistics, std::chrono::duration<double, std::milli>(
                       std::chrono::steady_clock::now() - start)
                       .count());
  return Status::ok();
}

void cuda::publishObservations(CallState &state) {
  // Asking for an event would end the capture.
  if (state.cuda->capturing)
    return;
  for (PendingObservation &seen : state.cuda->observations) {
    if (!seen.pending)
      continue;
    Expected<bool> done = seen.copied.isDone();
    // An error of the device shows where its work is waited for.
    if (done && *done)
      (void)publish(state, seen);
  }
}

static Status observe(CallState &state, size_t index, const void *address,
                      const int64_t *layout, size_t rank, int64_t width) {
  cuda::Call &call = *state.cuda;
  const device::ObservationSite &site = *state.program->observations[index];
  Expected<scheduler::Estimator *> estimator = estimatorOf(state, index);
  if (!estimator)
    return estimator.takeStatus();
  if (site.target && !(*estimator)->wantsLayer(site.target->info().layer))
    return Status::ok();
  call.observations.resize(state.program->observations.size());
  PendingObservation &seen = call.observations[index];
  if (seen.pending) {
    Expected<bool> done = seen.copied.isDone();
    if (!done)
      return done.takeStatus();
    if (!*done)
      return Status::ok();
    if (Status status = publish(state, seen); !status)
      return status;
  }
  if (rank > std::size(seen.view.shape))
    return Status::unsupported("expected a tensor of at most " +
                               std::to_string(std::size(seen.view.shape)) +
                               " dimensions, got " + std::to_string(rank));
  int64_t count = 1;
  for (size_t i = rank; i-- > 0;) {
    seen.view.shape[i] = layout[i];
    seen.view.strides[i] = count;
    count *= layout[i];
  }
  size_t elementBytes = width == 32 ? 4 : 2;
  size_t bytes = static_cast<size_t>(count) * elementBytes;
  if (seen.buffer.size() < bytes) {
    Expected<PinnedBuffer> buffer = PinnedBuffer::allocate(call.device, bytes);
    if (!buffer)
      return buffer.takeStatus();
    seen.buffer = std::move(*buffer);
  }
  if (!seen.copied) {
    Expected<Event> event = Event::create(call.device);
    if (!event)
      return event.takeStatus();
    seen.copied = std::move(*event);
  }
  if (Status status = call.device->copyStrided(
          seen.buffer.data(), seen.view.strides, address, layout + rank, layout,
          rank, elementBytes, call.stream, /*toHost=*/true);
      !status)
    return status;
  if (Status status = seen.copied.record(call.stream); !status)
    return status;
  seen.site = index;
  seen.view.data = seen.buffer.data();
  seen.view.rank = static_cast<int>(rank);
  seen.view.type = width == 32   ? ElementType::F32
                   : width == 16 ? ElementType::F16
                                 : ElementType::BF16;
  seen.pending = true;
  return Status::ok();
}

void corey_rt_device_observe(int64_t site, int64_t address, int64_t layout,
                             int64_t rank, int64_t width) {
  CallState &state = device::callOrDefault();
  cuda::Call *call = deviceCall();
  if (!call || call->capturing || !state.program)
    return;
  auto it = state.program->observationIndex.find(toPointer<const char>(site));
  if (it == state.program->observationIndex.end())
    return;
  Status status = observe(state, it->second, toPointer<const void>(address),
                          toPointer<const int64_t>(layout),
                          static_cast<size_t>(rank), width);
  if (!status)
    device::failCall(Status(status.code(), "site '" + std::string(it->first) +
                                               "': " + status.message()));
}
