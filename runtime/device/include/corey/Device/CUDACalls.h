//===- CUDACalls.h - Calls that are kept for the next one -------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// The memory of a call belongs to the stream that its work is on until that
// work is done, so a program keeps calls and hands out one whose memory is
// free: for compiled programs and for those that were exported ahead of time.
//
//===----------------------------------------------------------------------===//

#ifndef COREY_DEVICE_CUDACALLS_H
#define COREY_DEVICE_CUDACALLS_H

#include "corey/Device/CUDA.h"

namespace corey::cuda {

/// Whether kernels can read the tensor at `data` where it lies: they load up to
/// 16 bytes at once from the start of any row. Strides are in elements of
/// `elementBytes` bytes.
bool isAligned(const void *data, const int64_t *sizes, const int64_t *strides,
               size_t rank, size_t elementBytes);

/// A call on a device, on a stream of its own or of the caller.
class PooledCall {
public:
  /// `state` is the call's, and outlives it.
  PooledCall(std::shared_ptr<Device> device,
             std::shared_ptr<const Program> program, device::CallState &state);
  virtual ~PooledCall();

  /// Before the call's work, and after all of it was put on its way: gives the
  /// memory back, and waits if the stream is the call's own.
  Status begin();
  Status finish();

  /// Whether a caller captures what is put on the call's stream.
  bool isCaptured() const { return cuda.capturing; }
  /// Keeps `owner` while a graph of the caller uses its memory.
  void keep(std::shared_ptr<void> owner) { kept.push_back(std::move(owner)); }
  /// What work that nobody waited for has found wrong.
  Status earlierError();

  Call cuda;

protected:
  std::shared_ptr<const Program> program;
  Stream own;

private:
  friend class CallPool;
  /// Puts the call's work on a stream; null for its own.
  Status setStream(void *stream, bool capturing);
  bool isOwn() const { return cuda.stream == own.handle(); }
  /// Whether the call's last work was on `stream`, a caller's.
  bool wasOn(void *stream) const;
  /// Whether work on `stream` comes after what the call has done.
  bool precedes(void *stream) const { return pending && wasOn(stream); }
  /// Whether nothing uses its memory any more.
  bool isDone();

  device::CallState &callState;
  /// Recorded behind the last work on a caller's stream that used memory of
  /// the call.
  Event done;
  bool pending = false;
  /// Whether anything was put on the stream.
  bool begun = false;
  /// What a graph of the caller uses.
  std::vector<std::shared_ptr<void>> kept;
};

/// The calls of a program that are idle. Thread-safe.
class CallPool {
public:
  using Factory = std::function<std::unique_ptr<PooledCall>()>;

  CallPool(std::shared_ptr<Device> device, Factory make);
  CallPool(const CallPool &) = delete;
  CallPool &operator=(const CallPool &) = delete;
  ~CallPool();

  /// A new call on a stream of its own.
  Expected<std::unique_ptr<PooledCall>> create();
  /// A call for work on `stream`; null for no caller's. Errors:
  /// InvalidArgument for a stream of another device.
  Expected<std::unique_ptr<PooledCall>> acquire(void *stream);
  void release(std::unique_ptr<PooledCall> call);

  /// Bytes of intermediates of the calls that are idle, and how often the
  /// driver was asked for some.
  std::pair<size_t, size_t> memoryUse() const;

private:
  struct Shared;
  std::unique_ptr<PooledCall> takeIdle(void *stream, bool capturing);

  std::shared_ptr<Device> device;
  Factory make;
  /// Shared with the graphs that callers capture: the call of one comes back
  /// when the graph is gone, at a time when nothing may be asked of the driver.
  std::shared_ptr<Shared> shared;
};

} // namespace corey::cuda

#endif // COREY_DEVICE_CUDACALLS_H
