//===- Backend.h - What differs from device to device -----------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_JIT_BACKEND_H
#define COREY_JIT_BACKEND_H

#include "corey/Device/CPU.h"
#include "corey/Executable.h"
#include "corey/Pipelines/Pipelines.h"
#include "corey/Target/Device.h"
#include "mlir/IR/BuiltinOps.h"
#include "llvm/ADT/STLFunctionalExtras.h"
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace corey {

/// A call: its state, and the memory beside its arena, which is kept with it so
/// that a warm call allocates nothing.
class Call {
public:
  virtual ~Call();

  /// Whether the program can use `tensor` where it lies.
  virtual bool takes(const Tensor &tensor, bool isOutput) const = 0;
  /// Memory of the call for a tensor of `bytes`; null, with `status`, if there
  /// is none.
  virtual void *stage(size_t bytes, Status &status) = 0;
  /// Copies elements of `size` bytes between tensors of one shape on the
  /// call's device, with any strides in elements.
  virtual Status copy(void *to, const int64_t *toStrides, const void *from,
                      const int64_t *fromStrides, const int64_t *shape,
                      size_t rank, size_t size) = 0;
  /// Before the program's work, and after all of it was put on its way: gives
  /// the memory back, and waits if nobody else will.
  virtual Status begin() = 0;
  virtual Status finish() = 0;

  /// Whether a caller captures what is put on the call's stream.
  virtual bool isCaptured() const { return false; }
  /// Keeps `owner` while a graph of the caller uses its memory.
  virtual void keep(std::shared_ptr<void> owner) { (void)owner; }
  /// Captures what `body` does with the call, anew if it has captured before;
  /// with what it observes if `observes`.
  virtual Status capture(llvm::function_ref<Status()> body, bool observes);
  /// Launches what was captured on a stream, or on the call's own, and waits,
  /// for null.
  virtual Status launch(void *stream);
  /// Hands on what the last launch has observed. False if there is nothing, or
  /// nothing yet; does not wait.
  virtual bool publish() { return false; }
  virtual size_t numNodes() const { return 0; }
  virtual uint64_t instantiations() const { return 0; }

  /// Bytes of intermediates, and how often there was a request for some.
  virtual std::pair<size_t, size_t> memoryUse() const = 0;

  device::CallState state;
  std::vector<int64_t> dims, sizes, descriptors, strides;
  /// Bytes that the tensors of the call take, first to last.
  std::vector<std::pair<uintptr_t, uintptr_t>> places;
  std::vector<void *> pointers;
  std::vector<std::pair<const Tensor *, void *>> stagedOutputs;
};

/// The part of a program that its device holds, and the calls that are idle.
/// Thread-safe.
class Image {
public:
  virtual ~Image();

  /// A call of its own, on no caller's stream.
  virtual Expected<std::unique_ptr<Call>> create() = 0;
  /// A call for work on `stream`; null for no caller's.
  virtual Expected<std::unique_ptr<Call>> acquire(void *stream) = 0;
  virtual void release(std::unique_ptr<Call> call) = 0;
  /// Over the calls that are idle.
  virtual std::pair<size_t, size_t> memoryUse() const = 0;
  /// Lines about kernels.
  virtual std::string explain() const { return ""; }
};

/// A device and how programs are compiled for it. Thread-safe.
class Backend {
public:
  static Expected<std::shared_ptr<Backend>> create(Device device);
  virtual ~Backend();

  virtual Device device() const = 0;
  /// What code is made for, for people to read.
  virtual std::string description() const = 0;
  /// The name of its rates (see findMachine()).
  virtual const char *machine() const = 0;
  virtual scheduler::Device schedulerDevice(int threads) const = 0;
  /// The kernels there are for a scan op of the ssm dialect.
  virtual std::vector<scheduler::Variant>
  variantsOf(mlir::Operation *scan, const scheduler::Problem &problem) const {
    return scanVariants(device().kind, problem);
  }

  /// Refuses options that mean nothing on the device, or more than it has.
  virtual Status check(const CompileOptions &options) const = 0;
  virtual void addPasses(mlir::OpPassManager &manager,
                         const CompileOptions &options, bool observe,
                         Phase first, Phase last) const = 0;
  /// What code for the device depends on, as text.
  virtual std::string target() const = 0;
  /// Takes the code of the device out of a module after the LLVM phase; what is
  /// left is for the host. Errors are the module's diagnostics, or else in the
  /// result.
  virtual Expected<DeviceImage>
  takeCode(mlir::ModuleOp module, const CompileOptions &options) const = 0;
  /// What takeCode() took, loaded.
  virtual Expected<std::unique_ptr<Image>> load(DeviceImage code) const = 0;

  /// `tensor` in memory of the device, where programs can use it as it is:
  /// itself, or a copy. Errors: InvalidArgument for one on another device.
  virtual Expected<Tensor> place(const Tensor &tensor) const = 0;
};

/// Passes for `chip`, a device of `multiprocessors`; 0 takes the default.
void addGPUPasses(mlir::OpPassManager &manager, const CompileOptions &options,
                  const std::string &chip, int64_t multiprocessors,
                  bool observe, Phase first, Phase last);
template <typename Options>
void setPipelineOptions(Options &pipeline, const CompileOptions &options,
                        bool observe) {
  pipeline.fusion = options.fusion;
  pipeline.hoistWeights = options.hoistWeights;
  pipeline.observeValues = options.observeValues;
  pipeline.observe = observe;
}

/// What scanVariants() knows of each kind.
std::vector<scheduler::Variant>
scanVariantsOnCPU(const scheduler::Problem &problem);
/// With code for `chip`. `isForTensorCores` is false for an op that is not,
/// whatever its sizes.
std::vector<scheduler::Variant>
scanVariantsOnCUDA(const scheduler::Problem &problem, llvm::StringRef chip,
                   bool isForTensorCores = true);

std::shared_ptr<Backend> createCPUBackend();
Expected<std::shared_ptr<Backend>> createCUDABackend(int ordinal);

} // namespace corey

#endif // COREY_JIT_BACKEND_H
