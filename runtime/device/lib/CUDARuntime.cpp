//===- CUDARuntime.cpp - Functions that compiled code calls on CUDA -------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Device/CPU.h"
#include "corey/Device/CUDA.h"
#include "corey/Device/RuntimeABI.h"
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <utility>

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
  cuda::Call *call = device::callOrDefault().cuda;
  if (!call)
    return;
  // What is observed there must have been counted before others write to it.
  for (auto [site, tensor] : call->unjoined)
    if (call->arena.contains(pointer, tensor)) {
      check(joinObservations(*call));
      break;
    }
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
  // The target may be a tensor that was observed before.
  if (!check(joinObservations(*call)))
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
  if (kind == 3)
    return device::slotError(value, limit);
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

/// Statistics of what has arrived.
static scheduler::Statistics statisticsOf(scheduler::Estimator &estimator,
                                          const PendingObservation &seen) {
  if (!seen.isCounted)
    return estimator.finish(seen.plan, seen.buffer.data());
  const auto *found =
      static_cast<const struct corey_rt_observed *>(seen.buffer.data());
  scheduler::CountedTensor counted;
  counted.count = static_cast<uint64_t>(found->count);
  counted.nan = static_cast<uint64_t>(found->nan);
  counted.positiveInfinity = static_cast<uint64_t>(found->positiveInfinity);
  counted.negativeInfinity = static_cast<uint64_t>(found->negativeInfinity);
  counted.min = found->min;
  counted.max = found->max;
  counted.pivot = found->pivot;
  counted.s1 = found->s1;
  counted.s2 = found->s2;
  counted.s3 = found->s3;
  counted.s4 = found->s4;
  counted.absolute = found->absolute;
  counted.below = static_cast<uint64_t>(found->below);
  counted.above = static_cast<uint64_t>(found->above);
  counted.outliers = static_cast<uint64_t>(found->outliers);
  counted.tokens = static_cast<uint64_t>(found->tokens);
  counted.tokensDropped = static_cast<uint64_t>(found->tokensDropped);
  counted.counts = reinterpret_cast<const uint64_t *>(found + 1);
  return estimator.finish(seen.plan, counted);
}

/// Hands on what has arrived at a site.
static Status publish(CallState &state, size_t site) {
  const PendingObservation &seen = state.cuda->observations[site];
  Expected<scheduler::Estimator *> estimator = estimatorOf(state, site);
  if (!estimator)
    return estimator.takeStatus();
  auto start = std::chrono::steady_clock::now();
  scheduler::Statistics statistics = statisticsOf(**estimator, seen);
  state.program->observations[site]->publish(
      statistics, std::chrono::duration<double, std::milli>(
                      std::chrono::steady_clock::now() - start)
                      .count());
  return Status::ok();
}

void cuda::publishObservations(CallState &state) {
  // Asking for an event would end the capture.
  if (state.cuda->capturing)
    return;
  for (size_t site = 0; site < state.cuda->observations.size(); ++site) {
    PendingObservation &seen = state.cuda->observations[site];
    if (!seen.pending)
      continue;
    Expected<bool> done = seen.done.isDone();
    // An error of the device shows where its work is waited for.
    if (!done || !*done)
      continue;
    seen.pending = false;
    (void)publish(state, site);
  }
}

void cuda::publishCapturedObservations(CallState &state) {
  for (size_t site = 0; site < state.cuda->observations.size(); ++site)
    if (state.cuda->observations[site].pending)
      (void)publish(state, site);
}

/// Has what comes next on the side stream follow the call's work so far.
static Status forkSide(cuda::Call &call) {
  if (!call.side.handle()) {
    // Of no higher priority than any other: it fills what the call leaves idle.
    Expected<Stream> stream = Stream::create(call.device);
    if (!stream)
      return stream.takeStatus();
    Expected<Event> event = Event::create(call.device);
    if (!event)
      return event.takeStatus();
    call.side = std::move(*stream);
    call.fork = std::move(*event);
  }
  if (Status status = call.fork.record(call.stream); !status)
    return status;
  return call.fork.block(call.side.handle());
}

Status cuda::joinObservations(Call &call) {
  if (call.unjoined.empty())
    return Status::ok();
  // The last one comes after all others.
  size_t site = call.unjoined.back().first;
  call.unjoined.clear();
  return call.observations[site].done.block(call.stream);
}

/// Marks that all of an observation is on the side stream.
static Status finishObservation(cuda::Call &call, size_t site) {
  PendingObservation &seen = call.observations[site];
  // Also after a failure: what was put there may still read the tensor.
  Status status = seen.done.record(call.side.handle());
  if (status)
    call.unjoined.push_back({site, seen.plan.sample.data});
  return status;
}

/// Most blocks that count a tensor, for each multiprocessor: one, for which the
/// kernels beside them leave room.
static constexpr int64_t kBlocksPerMultiprocessor = 1;
static constexpr int64_t kThreadsOfBlock = 128;
/// Most bins, and elements, of tokens that kernels count.
static constexpr int64_t kMostTokenBins = 4096, kMostColumns = 65536;

/// What kernels are to do, but for where the results go; false if they cannot.
static bool describe(const scheduler::CountPlan &plan, size_t rank,
                     int64_t elementBytes, int64_t multiprocessors,
                     struct corey_rt_observation &o) {
  rank = std::max<size_t>(rank, 1);
  auto used = static_cast<size_t>(plan.rows.rank);
  if (!plan.isCountable || plan.sample.numElements() == 0 || used > rank ||
      (plan.tokens &&
       (plan.bins > kMostTokenBins || plan.columns > kMostColumns)))
    return false;
  o.tokens = plan.tokens;
  o.rule = static_cast<int64_t>(plan.rule);
  o.bins = plan.bins;
  o.low = plan.low;
  o.width = plan.width;
  o.rows = plan.rows.numElements();
  o.columns = plan.columns;
  o.columnStride = plan.columnStride * elementBytes;
  bool isAligned = plan.columnStride == 1 &&
                   reinterpret_cast<uintptr_t>(plan.sample.data) % 16 == 0;
  for (size_t axis = 0; axis < rank; ++axis) {
    bool isUsed = axis + used >= rank;
    size_t from = isUsed ? axis + used - rank : 0;
    o.sizes[axis] = isUsed ? plan.rows.shape[from] : 1;
    o.strides[axis] = isUsed ? plan.rows.strides[from] * elementBytes : 0;
    isAligned &= o.sizes[axis] == 1 || o.strides[axis] % 16 == 0;
  }
  o.isAligned = isAligned;
  int64_t most = kBlocksPerMultiprocessor * multiprocessors,
          pieces = (o.columns * elementBytes + 15) / 16,
          threads = o.rows * pieces,
          wanted = plan.tokens
                       ? o.rows
                       : (threads + kThreadsOfBlock - 1) / kThreadsOfBlock;
  o.blocks = std::max<int64_t>(std::min(most, wanted), 1);
  return true;
}

/// Begins an observation. True if kernels are to be launched.
static Expected<bool> observe(CallState &state, size_t index,
                              const void *address, const int64_t *layout,
                              size_t rank, int64_t width,
                              struct corey_rt_observation &o) {
  cuda::Call &call = *state.cuda;
  const device::ObservationSite &site = *state.program->observations[index];
  Expected<scheduler::Estimator *> estimator = estimatorOf(state, index);
  if (!estimator)
    return estimator.takeStatus();
  if (site.target && !(*estimator)->wantsLayer(site.target->info().layer))
    return false;
  call.observations.resize(state.program->observations.size());
  PendingObservation &seen = call.observations[index];
  // The last count of a site that is captured again is done, or is the graph's.
  if (seen.pending && !call.capturing) {
    Expected<bool> done = seen.done.isDone();
    if (!done)
      return done.takeStatus();
    if (!*done)
      return false;
    seen.pending = false;
    if (Status status = publish(state, index); !status)
      return status;
  }
  scheduler::TensorView view;
  if (rank > std::size(view.shape))
    return Status::unsupported("expected a tensor of at most " +
                               std::to_string(std::size(view.shape)) +
                               " dimensions, got " + std::to_string(rank));
  view.data = address;
  if (!toType(width, view.type))
    return Status::internal("expected an element of 32, 16 or -16 bits, got " +
                            std::to_string(width));
  view.rank = static_cast<int>(rank);
  std::copy_n(layout, rank, view.shape);
  std::copy_n(layout + rank, rank, view.strides);
  Expected<scheduler::CountPlan> plan = (*estimator)->plan(view);
  if (!plan)
    return plan.takeStatus();
  seen.plan = *plan;
  int64_t elementBytes = scheduler::elementTypeSize(view.type);
  seen.isCounted = describe(seen.plan, rank, elementBytes,
                            call.device->properties().multiprocessors, o);
  int64_t numCounts =
      seen.plan.tokens ? seen.plan.columns + 1 : int64_t(seen.plan.bins);
  seen.bytes = static_cast<size_t>(
      seen.isCounted ? int64_t(sizeof(struct corey_rt_observed)) + 8 * numCounts
                     : seen.plan.sample.numElements() * elementBytes);
  if (seen.buffer.size() < seen.bytes) {
    Expected<PinnedBuffer> buffer =
        PinnedBuffer::allocate(call.device, seen.bytes);
    if (!buffer)
      return buffer.takeStatus();
    seen.buffer = std::move(*buffer);
  }
  if (!seen.done) {
    Expected<Event> event = Event::create(call.device);
    if (!event)
      return event.takeStatus();
    seen.done = std::move(*event);
  }
  if (seen.isCounted) {
    // The call's until it ends, as it has waited for the side stream then.
    Status status;
    size_t recordBytes = offsetof(struct corey_rt_observed, below) *
                         static_cast<size_t>(o.blocks);
    void *records = call.arena.allocate(recordBytes, &status);
    if (records)
      seen.counts = call.arena.allocate(seen.bytes, &status);
    if (!records || !seen.counts)
      return status;
    o.records = reinterpret_cast<int64_t>(records);
    o.counted = reinterpret_cast<int64_t>(seen.counts);
  }
  if (Status status = forkSide(call); !status)
    return status;
  if (seen.isCounted) {
    if (Status status =
            call.device->memset(seen.counts, 0, seen.bytes, call.side.handle());
        !status)
      return status;
    call.forkedFrom = call.stream;
    call.stream = call.side.handle();
    return true;
  }
  int64_t strides[scheduler::TensorView::kMaxRank], stride = 1;
  const scheduler::TensorView &sample = seen.plan.sample;
  for (size_t i = rank; i-- > 0; stride *= sample.shape[i])
    strides[i] = stride;
  Status status = call.device->copyStrided(
      seen.buffer.data(), strides, sample.data, sample.strides, sample.shape,
      rank, static_cast<size_t>(elementBytes), call.side.handle(),
      /*toHost=*/true);
  Status finished = finishObservation(call, index);
  if (!status || !finished)
    return status ? finished : status;
  seen.pending = true;
  return false;
}

/// Index of a site of the call's program, or -1.
static int64_t findSite(const CallState &state, int64_t site) {
  if (!state.program)
    return -1;
  auto it = state.program->observationIndex.find(toPointer<const char>(site));
  return it == state.program->observationIndex.end()
             ? -1
             : static_cast<int64_t>(it->second);
}

static void failAtSite(int64_t site, const Status &status) {
  device::failCall(Status(status.code(),
                          "site '" + std::string(toPointer<const char>(site)) +
                              "': " + status.message()));
}

int64_t corey_rt_device_observe(int64_t site, int64_t address, int64_t layout,
                                int64_t rank, int64_t width,
                                int64_t observation) {
  CallState &state = device::callOrDefault();
  cuda::Call *call = deviceCall();
  int64_t index = findSite(state, site);
  if (!call || index < 0 || (call->capturing && !call->capturesObservations))
    return 0;
  Expected<bool> isCounted =
      observe(state, static_cast<size_t>(index), toPointer<const void>(address),
              toPointer<const int64_t>(layout), static_cast<size_t>(rank),
              width, *toPointer<struct corey_rt_observation>(observation));
  if (isCounted)
    return *isCounted;
  failAtSite(site, isCounted.status());
  return 0;
}

void corey_rt_device_observed(int64_t site) {
  CallState &state = device::callOrDefault();
  cuda::Call *call = state.cuda;
  int64_t index = findSite(state, site);
  if (!call || !call->forkedFrom || index < 0)
    return;
  call->stream = std::exchange(call->forkedFrom, nullptr);
  PendingObservation &seen = call->observations[static_cast<size_t>(index)];
  Status status = Status::ok();
  if (state.error)
    status = call->device->copyToHost(seen.buffer.data(), seen.counts,
                                      seen.bytes, call->side.handle());
  Status finished = finishObservation(*call, static_cast<size_t>(index));
  if (!status || !finished)
    return failAtSite(site, status ? finished : status);
  seen.pending = state.error.isOk();
}
