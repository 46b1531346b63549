//===- CUDACalls.cpp - Calls that are kept for the next one ---------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Device/CUDACalls.h"
#include <cstdint>
#include <numeric>

using namespace corey;
using namespace corey::cuda;

bool cuda::isAligned(const void *data, const int64_t *sizes,
                     const int64_t *strides, size_t rank, size_t elementBytes) {
  for (size_t i = 0; i < rank; ++i)
    if (sizes[i] == 0)
      return true;
  if (reinterpret_cast<uintptr_t>(data) % 16)
    return false;
  if (rank == 0)
    return true;
  auto bytes = static_cast<int64_t>(elementBytes);
  int64_t last = sizes[rank - 1];
  if (last > 1 && strides[rank - 1] != 1)
    return false;
  int64_t step = std::gcd(last * bytes, int64_t(16));
  for (size_t i = 0; i + 1 < rank; ++i)
    if (sizes[i] > 1 && strides[i] * bytes % step)
      return false;
  return true;
}

//===----------------------------------------------------------------------===//
// Calls
//===----------------------------------------------------------------------===//

PooledCall::PooledCall(std::shared_ptr<Device> device,
                       std::shared_ptr<const Program> program,
                       device::CallState &state)
    : cuda(std::move(device)), program(std::move(program)), callState(state) {
  cuda.program = this->program.get();
  state.cuda = &cuda;
}

PooledCall::~PooledCall() = default;

Status PooledCall::begin() {
  begun = true;
  publishObservations(callState);
  return cuda.capturing ? Status::ok() : earlierError();
}

Status PooledCall::finish() {
  Status joined = joinObservations(cuda);
  bool usedMemory = cuda.arena.releaseAll();
  if (!joined || cuda.capturing)
    return joined;
  if (isOwn()) {
    Status status = own.synchronize();
    publishObservations(callState);
    return status ? takeDeviceError(cuda) : status;
  }
  // Others may have the call at once: what it put on the stream is not its own.
  if (!usedMemory && !cuda.errors.data())
    return Status::ok();
  if (!done) {
    Expected<Event> event = Event::create(cuda.device);
    if (!event)
      return event.takeStatus();
    done = std::move(*event);
  }
  pending = true;
  return done.record(cuda.stream);
}

Status PooledCall::earlierError() {
  Status status = takeDeviceError(cuda);
  return status ? status
                : Status(status.code(), "an earlier run: " + status.message());
}

Status PooledCall::setStream(void *stream, bool capturing) {
  begun = false;
  cuda.capturing = capturing;
  cuda.stream = stream;
  if (stream)
    return Status::ok();
  if (!own.handle()) {
    Expected<Stream> made = Stream::create(cuda.device);
    if (!made)
      return made.takeStatus();
    own = std::move(*made);
  }
  cuda.stream = own.handle();
  return Status::ok();
}

bool PooledCall::wasOn(void *stream) const {
  // Every thread has a default stream of its own by this name.
  auto *perThread = reinterpret_cast<void *>(uintptr_t(2));
  return !cuda.capturing && stream && cuda.stream == stream && !isOwn() &&
         stream != perThread;
}

bool PooledCall::isDone() {
  if (pending) {
    Expected<bool> past = done.isDone();
    pending = !past || !*past;
  }
  return !pending;
}

//===----------------------------------------------------------------------===//
// Pools
//===----------------------------------------------------------------------===//

using Calls = std::vector<std::unique_ptr<PooledCall>>;

struct CallPool::Shared {
  std::mutex mutex;
  Calls idle;
  /// Those whose capture could not be watched: kept to the end.
  Calls lost;
  /// Whether the program is gone.
  bool closed = false;

  /// A call that a graph of the caller uses.
  struct Captured {
    std::shared_ptr<Shared> pool;
    std::unique_ptr<PooledCall> call;
  };
  static void takeBack(void *data);
};

namespace {
/// Calls that came back too late, to be destroyed where the driver may be
/// called.
struct LateCalls {
  std::mutex mutex;
  Calls list;
  void clear() {
    Calls taken;
    std::lock_guard<std::mutex> lock(mutex);
    taken.swap(list);
  }
};
LateCalls &lateCalls() {
  // Outlives every graph.
  static auto &calls = *new LateCalls;
  return calls;
}
} // namespace

void CallPool::Shared::takeBack(void *data) {
  std::unique_ptr<Captured> self(static_cast<Captured *>(data));
  std::lock_guard<std::mutex> lock(self->pool->mutex);
  if (!self->pool->closed) {
    self->pool->idle.push_back(std::move(self->call));
    return;
  }
  std::lock_guard<std::mutex> lateLock(lateCalls().mutex);
  lateCalls().list.push_back(std::move(self->call));
}

CallPool::CallPool(std::shared_ptr<Device> device, Factory make)
    : device(std::move(device)), make(std::move(make)),
      shared(std::make_shared<Shared>()) {}

CallPool::~CallPool() {
  Calls idle, lost;
  {
    std::lock_guard<std::mutex> lock(shared->mutex);
    shared->closed = true;
    idle.swap(shared->idle);
    lost.swap(shared->lost);
  }
  lateCalls().clear();
}

Expected<std::unique_ptr<PooledCall>> CallPool::create() {
  std::unique_ptr<PooledCall> call = make();
  if (Status status = call->setStream(nullptr, false); !status)
    return status;
  return call;
}

Expected<std::unique_ptr<PooledCall>> CallPool::acquire(void *stream) {
  bool capturing = false;
  if (stream) {
    Expected<bool> asked = device->isCapturing(stream);
    if (!asked)
      return asked.takeStatus();
    capturing = *asked;
  }
  std::unique_ptr<PooledCall> call = takeIdle(stream, capturing);
  if (call && !capturing && call->wasOn(stream)) {
    call->begun = false;
    return call;
  }
  if (stream)
    if (Expected<Stream> known = Stream::borrow(device, stream); !known) {
      if (call)
        release(std::move(call));
      return known.takeStatus();
    }
  if (!call)
    call = make();
  if (!capturing)
    call->kept.clear();
  if (Status status = call->setStream(stream, capturing); !status)
    return status;
  return call;
}

void CallPool::release(std::unique_ptr<PooledCall> call) {
  if (!call->cuda.capturing || !call->begun) {
    std::lock_guard<std::mutex> lock(shared->mutex);
    shared->idle.push_back(std::move(call));
    return;
  }
  // The graph uses the call's memory as long as it can be launched.
  call->cuda.arena.keepBlocks();
  void *stream = call->cuda.stream;
  auto captured = std::make_unique<Shared::Captured>(
      Shared::Captured{shared, std::move(call)});
  if (device->onGraphDestroyed(stream, Shared::takeBack, captured.get())) {
    (void)captured.release();
    return;
  }
  std::lock_guard<std::mutex> lock(shared->mutex);
  shared->lost.push_back(std::move(captured->call));
}

std::pair<size_t, size_t> CallPool::memoryUse() const {
  std::lock_guard<std::mutex> lock(shared->mutex);
  std::pair<size_t, size_t> total;
  for (const std::unique_ptr<PooledCall> &call : shared->idle) {
    total.first += call->cuda.arena.bytesReserved();
    total.second += call->cuda.arena.driverAllocations();
  }
  return total;
}

/// An idle call whose memory work on `stream` may use: the last one on that
/// stream, or one whose work is done.
std::unique_ptr<PooledCall> CallPool::takeIdle(void *stream, bool capturing) {
  std::lock_guard<std::mutex> lock(shared->mutex);
  Calls &idle = shared->idle;
  size_t found = idle.size();
  for (size_t i = idle.size(); i-- > 0;)
    if (!capturing && idle[i]->wasOn(stream)) {
      found = i;
      break;
    } else if (found == idle.size() && !idle[i]->pending) {
      found = i;
    }
  // Asking would end a capture.
  for (size_t i = 0; found == idle.size() && !capturing && i < idle.size(); ++i)
    if (idle[i]->isDone()) {
      found = i;
      break;
    }
  if (found == idle.size())
    return nullptr;
  std::swap(idle[found], idle.back());
  std::unique_ptr<PooledCall> call = std::move(idle.back());
  idle.pop_back();
  return call;
}
