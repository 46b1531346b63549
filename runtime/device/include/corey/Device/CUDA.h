//===- CUDA.h - CUDA devices through the driver API -------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// Devices, memory, modules, launches, graphs and matrix products on NVIDIA
// GPUs. No toolkit is needed, neither to build nor to run: libcuda.so.1 and
// libcublasLt.so are loaded when they are first needed.
//
//   COREY_CUDA_DRIVER  path of the driver's library (default libcuda.so.1)
//   COREY_CUBLASLT     path of cuBLASLt's library (default libcublasLt.so.13,
//                      then .12, then without a number); "off" for none
//   COREY_CUDA_CHIP    chip to make code for in place of the device's own, such
//                      as sm_80: one whose code the device runs, to test it
//   COREY_CACHE_DIR    folder of compiled kernels, see loadModule()
//
// Addresses in device memory are void *, sizes are bytes unless stated, and a
// stream is the driver's CUstream as void *. A null stream is the driver's
// default stream. Errors of the driver are DeviceError, OutOfMemory or
// Unsupported with its name and description of the error in the text. Nothing
// here changes which context is current for the caller.
//
//===----------------------------------------------------------------------===//

#ifndef COREY_DEVICE_CUDA_H
#define COREY_DEVICE_CUDA_H

#include "corey/Device/CPU.h"
#include "corey/Scheduler/Estimator.h"
#include "corey/Status.h"
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace corey::cuda {

namespace driver {
struct Driver;
}

class Module;
class Program;
class Gemm;

//===----------------------------------------------------------------------===//
// Devices
//===----------------------------------------------------------------------===//

struct DeviceProperties {
  std::string name;
  /// Compute capability.
  int major = 0, minor = 0;
  int multiprocessors = 0;
  /// Per block, with opt-in; per multiprocessor.
  size_t sharedPerBlock = 0, sharedPerMultiprocessor = 0;
  int registersPerMultiprocessor = 0, threadsPerMultiprocessor = 0;
  size_t l2Bytes = 0, memoryBytes = 0;
  /// 0 where the driver does not tell.
  int clockKHz = 0, memoryClockKHz = 0, memoryBusBits = 0;
  /// 1000 * major + 10 * minor of the CUDA version the driver is for.
  int driverVersion = 0;
};

/// Number of devices; NotFound "expected a CUDA device, got none: <why>" when
/// there is no driver or no device.
Expected<int> deviceCount();

/// Where loadModule() takes an image from, over all devices of the process.
struct ModuleCacheCounts {
  uint64_t memory = 0, disk = 0, compiled = 0;
};

struct ModuleOptions {
  /// Of the driver's compiler, 0 to 4.
  int optLevel = 4;
  /// Keeps source lines for profilers.
  bool lineInfo = false;
};

/// A device with its primary context. One per ordinal and process, kept until
/// the process ends. Thread-safe.
class Device : public std::enable_shared_from_this<Device> {
public:
  /// Errors: NotFound without a driver or device, InvalidArgument for an
  /// ordinal there is not, DeviceError.
  static Expected<std::shared_ptr<Device>> get(int ordinal);

  int ordinal() const { return number; }
  const DeviceProperties &properties() const { return props; }
  /// As PTX and LLVM name the target: "sm_90a", "sm_100a", "sm_80"; what
  /// COREY_CUDA_CHIP says, if it is set.
  const std::string &chip() const { return target; }
  Expected<size_t> freeMemory() const;
  /// Waits for everything on the device.
  Status synchronize() const;

  /// Loads an image, PTX text or a cubin. The module is shared with every
  /// caller that loads the same image. PTX is compiled by the driver once and
  /// the cubin kept in <folder>/cuda, the folder being the scheduler's
  /// cacheDirectory(); an entry that is damaged is compiled again. Of kernels
  /// whose warps trade registers (setmaxnreg) the driver hands out no cubin:
  /// they are left to the driver's own cache. Errors:
  /// CompileError with the compiler's log, DeviceError.
  Expected<std::shared_ptr<Module>>
  loadModule(std::string_view image, const ModuleOptions &options = {});
  static ModuleCacheCounts moduleCacheCounts();

  /// Asynchronous on `stream`, except that pageable host memory makes a copy
  /// from the host wait until it was read, and one to the host until it is
  /// there. Copies of 0 bytes do nothing.
  Status copyToDevice(void *to, const void *from, size_t bytes,
                      void *stream) const;
  Status copyToHost(void *to, const void *from, size_t bytes,
                    void *stream) const;
  Status copyOnDevice(void *to, const void *from, size_t bytes,
                      void *stream) const;
  /// From the memory of `source` to that of this device.
  Status copyFromPeer(void *to, const Device &source, const void *from,
                      size_t bytes, void *stream) const;
  Status memset(void *to, unsigned char value, size_t bytes,
                void *stream) const;
  /// Copies `rank` dimensions, at most 32, of elements of 1, 2, 4 or 8 bytes,
  /// with sizes and strides in elements, of any sign. `to` and `from` are the
  /// addresses of element 0. One operation: a plain copy where all of it is one
  /// run in both, else a kernel, which a device loads when it first needs it
  /// (more than one where over 5 axes or 2^30 elements are left after axes that
  /// follow one another are merged). Elements of `to` must differ from one
  /// another and from those of `from`. `toHost` says that `to` is pinned host
  /// memory. Errors: InvalidArgument, Unsupported for more dimensions, those of
  /// loadModule().
  Status copyStrided(void *to, const int64_t *toStrides, const void *from,
                     const int64_t *fromStrides, const int64_t *sizes,
                     size_t rank, size_t elementBytes, void *stream,
                     bool toHost = false) const;

  /// Memory from the driver, aligned to at least 256. deallocate() of null does
  /// nothing. Not for a warm call: both may wait for the device.
  Expected<void *> allocate(size_t bytes) const;
  void deallocate(void *pointer) const;

  /// The device that holds `pointer`, or -1 for host memory.
  static int ordinalOf(const void *pointer);

  /// Whether work on `stream` is being captured into a graph.
  Expected<bool> isCapturing(void *stream) const;
  /// Calls `release(data)`, once, when the graph that `stream` captures and all
  /// that was instantiated from it are gone. It may not call the driver.
  /// InvalidArgument if nothing is being captured.
  Status onGraphDestroyed(void *stream, void (*release)(void *),
                          void *data) const;

  /// The driver and the context, for the other classes of this header.
  const driver::Driver &driver() const { return *api; }
  void *context() const { return ctx; }

private:
  friend class Gemm;
  Device() = default;
  Status initialize(int ordinal);
  struct GemmLibrary;
  /// The kernels of copyStrided().
  static std::shared_ptr<Program> makeCopies(std::shared_ptr<Device> device);

  const driver::Driver *api = nullptr;
  int number = 0;
  void *ctx = nullptr;
  DeviceProperties props;
  std::string target;
  std::mutex mutex;
  /// By hash of image and options.
  std::unordered_map<std::string, std::weak_ptr<Module>> modules;
  std::shared_ptr<GemmLibrary> gemm;
  /// Keeps the device, which is kept anyway.
  std::shared_ptr<const Program> copies;
};

//===----------------------------------------------------------------------===//
// Modules and launches
//===----------------------------------------------------------------------===//

struct FunctionAttributes {
  int registers = 0, maxThreadsPerBlock = 0;
  /// Per thread; and per block, not counting dynamic shared memory.
  size_t localBytes = 0, sharedBytes = 0;
};

/// A kernel of a module, which keeps it.
class Function {
public:
  const std::string &name() const { return symbol; }
  const FunctionAttributes &attributes() const { return attrs; }

private:
  friend class Module;
  friend Status launch(const Device &, const Function &,
                       const struct LaunchConfig &, void *, void **);
  std::string symbol;
  FunctionAttributes attrs;
  void *handle = nullptr;
  /// What the driver was told to allow.
  mutable std::atomic<int64_t> dynamicSharedLimit{48 << 10};
  mutable std::atomic<bool> largeClusters{false};
};

class Module {
public:
  Module(const Module &) = delete;
  Module &operator=(const Module &) = delete;
  ~Module();

  /// The kernel called `name`, which lives as long as the module. Errors:
  /// NotFound.
  Expected<const Function *> function(const std::string &name);
  const Device &device() const { return *owner; }

private:
  friend class Device;
  explicit Module(std::shared_ptr<Device> owner) : owner(std::move(owner)) {}
  std::shared_ptr<Device> owner;
  void *handle = nullptr;
  std::mutex mutex;
  std::unordered_map<std::string, std::unique_ptr<Function>> functions;
};

struct LaunchConfig {
  /// Blocks of the grid and threads of a block.
  std::array<int64_t, 3> grid{1, 1, 1}, block{1, 1, 1};
  /// Blocks of a cluster along x, which divides grid x; 1 for no clusters.
  int64_t clusterX = 1;
  int64_t dynamicSharedBytes = 0;
  /// The kernel may start before its predecessor on the stream has ended (it
  /// waits for it itself, with griddepcontrol.wait).
  bool programmaticDependent = false;
};

/// Launches a kernel; `arguments` holds the address of each argument's value. A
/// grid without blocks does nothing. Allocates nothing and does not wait.
/// Errors: InvalidArgument for what the device cannot launch, DeviceError.
Status launch(const Device &device, const Function &function,
              const LaunchConfig &config, void *stream, void **arguments);

//===----------------------------------------------------------------------===//
// Streams, events and graphs
//===----------------------------------------------------------------------===//

/// A stream: its own, or another one's that it does not destroy.
class Stream {
public:
  Stream() = default;
  /// A new stream, which does not wait for the default stream.
  static Expected<Stream> create(std::shared_ptr<Device> device);
  /// The caller's stream. Errors: InvalidArgument if it belongs to another
  /// device's context.
  static Expected<Stream> borrow(std::shared_ptr<Device> device, void *handle);
  Stream(Stream &&other) noexcept { *this = std::move(other); }
  Stream &operator=(Stream &&other) noexcept;
  ~Stream();

  void *handle() const { return stream; }
  Status synchronize() const;

private:
  std::shared_ptr<Device> device;
  void *stream = nullptr;
  bool owned = false;
};

/// A point in a stream's work.
class Event {
public:
  Event() = default;
  static Expected<Event> create(std::shared_ptr<Device> device,
                                bool timing = false);
  Event(Event &&other) noexcept { *this = std::move(other); }
  Event &operator=(Event &&other) noexcept;
  ~Event();
  explicit operator bool() const { return event; }

  Status record(void *stream) const;
  /// Whether the work before it is done; true before it is first recorded.
  Expected<bool> isDone() const;
  Status synchronize() const;
  /// Has later work on `stream` wait for this event. The host does not wait.
  Status block(void *stream) const;
  /// Between two events with timing that are done.
  static Expected<double> milliseconds(const Event &start, const Event &end);

private:
  std::shared_ptr<Device> device;
  void *event = nullptr;
};

/// Work captured from a stream, to be launched again as a whole.
class Graph {
public:
  Graph() = default;
  /// Captures what `body` puts on `stream`, which may not be the default
  /// stream, and instantiates it. Nothing of it runs. An error of `body` is
  /// returned, and the stream is as before.
  static Expected<Graph> capture(std::shared_ptr<Device> device, void *stream,
                                 const std::function<Status()> &body);
  /// Captures anew and takes over what has changed: parameters are updated in
  /// place, other changes instantiate the graph again.
  Status recapture(void *stream, const std::function<Status()> &body);
  Graph(Graph &&other) noexcept { *this = std::move(other); }
  Graph &operator=(Graph &&other) noexcept;
  ~Graph();

  Status launch(void *stream) const;
  size_t numNodes() const { return nodes; }
  /// How often recapture() had to instantiate.
  uint64_t instantiations() const { return instances; }

private:
  static Expected<void *> record(const Device &device, void *stream,
                                 const std::function<Status()> &body,
                                 size_t &nodes);
  Status instantiate(void *graph);
  std::shared_ptr<Device> device;
  void *exec = nullptr;
  size_t nodes = 0;
  uint64_t instances = 0;
};

//===----------------------------------------------------------------------===//
// Memory
//===----------------------------------------------------------------------===//

/// Host memory that copies reach asynchronously.
class PinnedBuffer {
public:
  PinnedBuffer() = default;
  static Expected<PinnedBuffer> allocate(std::shared_ptr<Device> device,
                                         size_t bytes);
  PinnedBuffer(PinnedBuffer &&other) noexcept { *this = std::move(other); }
  PinnedBuffer &operator=(PinnedBuffer &&other) noexcept;
  ~PinnedBuffer();

  void *data() const { return pointer; }
  size_t size() const { return bytes; }

private:
  std::shared_ptr<Device> device;
  void *pointer = nullptr;
  size_t bytes = 0;
};

/// Device memory for the intermediates of calls that follow one another on one
/// stream. A block that is released is handed out again at once: what uses it
/// next comes later on the stream. A call of known shapes takes nothing from
/// the driver and nothing from the heap. Not thread-safe.
class Arena {
public:
  explicit Arena(std::shared_ptr<Device> device) : device(std::move(device)) {}
  Arena(const Arena &) = delete;
  Arena &operator=(const Arena &) = delete;
  /// The driver waits for work that uses the blocks.
  ~Arena();

  /// At least `bytes` bytes aligned to 256; null, with `status` if given, when
  /// there is no memory, after free blocks of other sizes were given back.
  void *allocate(size_t bytes, Status *status = nullptr);
  void release(void *pointer);
  /// Whether `address` lies in the block at `pointer`.
  bool contains(void *pointer, const void *address) const;
  /// Takes back every block that is still in use. Returns whether any was asked
  /// for since the last time.
  bool releaseAll();
  /// Gives no blocks back to the driver any more: a graph uses them.
  void keepBlocks() { keeps = true; }

  size_t bytesReserved() const { return reserved; }
  size_t driverAllocations() const { return requests; }

private:
  struct Block {
    void *pointer;
    Block *next;
    size_t bytes;
    unsigned sizeClass;
    bool inUse;
  };
  /// Gives the free blocks back to the driver; returns whether there were any.
  bool trim();
  static constexpr unsigned kClasses = 4 * 48;
  std::shared_ptr<Device> device;
  Block *lists[kClasses] = {};
  std::unordered_map<void *, std::unique_ptr<Block>> blocks;
  size_t reserved = 0, requests = 0;
  bool keeps = false, used = false;
};

//===----------------------------------------------------------------------===//
// Matrix products
//===----------------------------------------------------------------------===//

using scheduler::ElementType;

/// y = x w^T (+ bias) (+ residual), row-major, accumulated in f32: x is
/// [batch, rows, inputs], w is [outputs, inputs], y and residual are
/// [batch, rows, outputs], bias is [outputs]. Strides in elements, the
/// innermost ones are 1. `bias` and `residual` may be null; the residual has
/// y's type and may be y.
struct GemmProblem {
  const void *x = nullptr, *w = nullptr, *bias = nullptr, *residual = nullptr;
  void *y = nullptr;
  int64_t batch = 1, rows = 0, outputs = 0, inputs = 0;
  int64_t xBatchStride = 0, xRowStride = 0, wRowStride = 0;
  int64_t yBatchStride = 0, yRowStride = 0;
  int64_t residualBatchStride = 0, residualRowStride = 0;
  /// F32, F16 or BF16: of x and w, of y and the residual (x's or F32), and of
  /// the bias.
  ElementType inputType = ElementType::F32, outputType = ElementType::F32,
              biasType = ElementType::F32;
};

/// Matrix products through cuBLASLt with a workspace of its own, for calls that
/// follow one another on one stream. What was chosen for a kind of product is
/// shared by all of a device, so that a warm call asks for nothing and
/// allocates nothing. Not thread-safe.
class Gemm {
public:
  static constexpr size_t kWorkspaceBytes = size_t(32) << 20;

  explicit Gemm(std::shared_ptr<Device> device) : device(std::move(device)) {}
  Gemm(const Gemm &) = delete;
  Gemm &operator=(const Gemm &) = delete;
  ~Gemm();

  /// Enqueues the product. False if no library can do it: it is absent, or has
  /// nothing for these types, strides and addresses. f32 is computed in f32,
  /// not TF32.
  Expected<bool> run(const GemmProblem &problem, void *stream);

private:
  std::shared_ptr<Device> device;
  void *workspace = nullptr;
};

//===----------------------------------------------------------------------===//
// Calls
//===----------------------------------------------------------------------===//

/// What all calls of one program share on a device: its kernels, each a module
/// that is loaded when it is first launched, since most programs hold kernels
/// for shapes that they never see. Thread-safe once all are added.
class Program {
public:
  explicit Program(std::shared_ptr<Device> device, ModuleOptions options = {})
      : device(std::move(device)), options(options) {}

  /// Adds the kernel `name` of `image`, PTX or a cubin; the next number is its.
  void add(std::string name, std::string image);
  size_t size() const { return kernels.size(); }

  /// Kernel `number`, below size(), loaded if it is not. Errors: those of
  /// Device::loadModule(); NotFound if the image has no such kernel.
  Expected<const Function *> kernel(size_t number) const;
  /// Loads what is not loaded yet.
  Status loadAll() const;
  /// Those that are.
  std::vector<const Function *> loaded() const;

private:
  struct Kernel {
    std::string name, image;
    std::mutex mutex;
    std::shared_ptr<Module> module;
    std::atomic<const Function *> function{nullptr};
  };
  std::shared_ptr<Device> device;
  ModuleOptions options;
  std::vector<std::unique_ptr<Kernel>> kernels;
};

/// What a call has counted at an observation site, on its way to the host.
struct PendingObservation {
  scheduler::CountPlan plan;
  /// Whether the buffer holds counts, a corey_rt_observed, or the elements of
  /// the plan's sample.
  bool isCounted = false;
  /// In device memory, of the call.
  void *counts = nullptr;
  size_t bytes = 0;
  PinnedBuffer buffer;
  /// Recorded when the buffer is filled.
  Event done;
  bool pending = false;
};

/// What a call has on its device; kept with the call, so that a warm one
/// allocates nothing.
struct Call {
  explicit Call(std::shared_ptr<Device> device)
      : device(device), arena(device), gemm(device) {}

  std::shared_ptr<Device> device;
  const Program *program = nullptr;
  /// Of the call in progress.
  void *stream = nullptr;
  bool capturing = false;
  /// Whether a capture takes what counts observed tensors into the graph. Every
  /// site that it passed is `pending` from then on.
  bool capturesObservations = false;
  Arena arena;
  Gemm gemm;
  /// By the program's observation sites.
  std::vector<PendingObservation> observations;
  /// Where observed tensors are counted, beside the call's stream; made when it
  /// is first needed.
  Stream side;
  Event fork;
  /// The call's stream while kernels that count are launched.
  void *forkedFrom = nullptr;
  /// Sites whose tensors may still be read on the side stream, in its order,
  /// and the tensors.
  std::vector<std::pair<size_t, const void *>> unjoined;
  /// A corey_rt_device_error, once a kernel has asked for one.
  PinnedBuffer errors;
};

/// What kernels have found wrong since this was last asked, as far as they have
/// run; clears it.
Status takeDeviceError(Call &call);

/// Has the call's stream wait for what is counted beside it; to be called when
/// a call ends. The host does not wait.
Status joinObservations(Call &call);

/// Hands on what earlier calls on `state` have seen and is there by now. To be
/// called before a call, with its `capturing` set; does not wait.
void publishObservations(device::CallState &state);

/// Hands on what a launch of the graph that `state` was captured into has seen,
/// once the launch is done.
void publishCapturedObservations(device::CallState &state);

} // namespace corey::cuda

#endif // COREY_DEVICE_CUDA_H
