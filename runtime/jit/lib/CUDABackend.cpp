//===- CUDABackend.cpp - Programs on CUDA devices -------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "Backend.h"
#include "corey/Conversion/SSMToGPU/SSMToGPU.h"
#include "corey/Device/CUDA.h"
#include "corey/Target/Device.h"
#include "llvm/Support/raw_ostream.h"
#include <cstdint>
#include <mutex>
#include <numeric>
#include <thread>

using namespace corey;

void corey::addGPUPasses(mlir::OpPassManager &manager,
                         const CompileOptions &options, const std::string &chip,
                         int64_t multiprocessors, bool observe, Phase first,
                         Phase last) {
  GPUPipelineOptions pipeline;
  pipeline.chip = chip;
  if (multiprocessors)
    pipeline.multiprocessors = multiprocessors;
  setPipelineOptions(pipeline, options, observe);
  buildGPUPipeline(manager, pipeline, first, last);
}

/// Whether kernels can read `tensor` where it lies: they load up to 16 bytes at
/// once from the start of any row.
static bool isAligned(const Tensor &tensor) {
  if (tensor.numElements() == 0)
    return true;
  if (reinterpret_cast<uintptr_t>(tensor.data()) % 16)
    return false;
  size_t rank = tensor.shape().size();
  if (rank == 0)
    return true;
  auto size = static_cast<int64_t>(dtypeSize(tensor.dtype()));
  int64_t last = tensor.shape()[rank - 1];
  if (last > 1 && tensor.strides()[rank - 1] != 1)
    return false;
  int64_t step = std::gcd(last * size, int64_t(16));
  for (size_t i = 0; i + 1 < rank; ++i)
    if (tensor.shape()[i] > 1 && tensor.strides()[i] * size % step)
      return false;
  return true;
}

//===----------------------------------------------------------------------===//
// Calls
//===----------------------------------------------------------------------===//

namespace {
class CUDACall final : public Call {
public:
  CUDACall(std::shared_ptr<cuda::Device> device,
           std::shared_ptr<const cuda::Program> program)
      : cuda(device), program(std::move(program)) {
    cuda.program = this->program.get();
    state.cuda = &cuda;
  }

  bool takes(const Tensor &tensor, bool isOutput) const override {
    return isAligned(tensor) && (!isOutput || tensor.isContiguous());
  }
  void *stage(size_t bytes, Status &status) override {
    return cuda.arena.allocate(bytes, &status);
  }
  Status copy(void *to, const int64_t *toStrides, const void *from,
              const int64_t *fromStrides, const int64_t *shape, size_t rank,
              size_t size) override {
    return cuda.device->copyStrided(to, toStrides, from, fromStrides, shape,
                                    rank, size, cuda.stream);
  }

  Status begin() override {
    begun = true;
    cuda::publishObservations(state);
    return cuda.capturing ? Status::ok() : earlierError();
  }
  Status finish() override {
    Status joined = cuda::joinObservations(cuda);
    cuda.arena.releaseAll();
    if (!joined || cuda.capturing)
      return joined;
    if (isOwn()) {
      Status status = own.synchronize();
      cuda::publishObservations(state);
      return status ? cuda::takeDeviceError(cuda) : status;
    }
    if (!done) {
      Expected<cuda::Event> event = cuda::Event::create(cuda.device);
      if (!event)
        return event.takeStatus();
      done = std::move(*event);
    }
    pending = true;
    return done.record(cuda.stream);
  }

  bool isCaptured() const override { return cuda.capturing; }
  void keep(std::shared_ptr<void> owner) override {
    kept.push_back(std::move(owner));
  }
  Status capture(llvm::function_ref<Status()> body) override {
    // Nothing may be loaded while a stream is captured.
    if (Status status = program->loadAll(); !status)
      return status;
    cuda.arena.keepBlocks();
    cuda.capturing = true;
    Status status = Status::ok();
    if (graph.instantiations()) {
      status = graph.recapture(own.handle(), body);
    } else {
      Expected<cuda::Graph> made =
          cuda::Graph::capture(cuda.device, own.handle(), body);
      if (made)
        graph = std::move(*made);
      else
        status = made.takeStatus();
    }
    cuda.capturing = false;
    return status;
  }
  Status launch(void *stream) override {
    if (Status status = earlierError(); !status)
      return status;
    if (stream)
      return graph.launch(stream);
    Status status = graph.launch(own.handle());
    if (status)
      status = own.synchronize();
    return status ? cuda::takeDeviceError(cuda) : status;
  }
  size_t numNodes() const override { return graph.numNodes(); }
  uint64_t instantiations() const override { return graph.instantiations(); }

  std::pair<size_t, size_t> memoryUse() const override {
    return {cuda.arena.bytesReserved(), cuda.arena.driverAllocations()};
  }

  /// What work that nobody waited for has found wrong.
  Status earlierError() {
    Status status = cuda::takeDeviceError(cuda);
    return status
               ? status
               : Status(status.code(), "an earlier run: " + status.message());
  }

  /// Puts the call's work on a stream; null for its own.
  Status setStream(void *stream, bool capturing) {
    begun = false;
    cuda.capturing = capturing;
    cuda.stream = stream;
    if (stream)
      return Status::ok();
    if (!own.handle()) {
      Expected<cuda::Stream> made = cuda::Stream::create(cuda.device);
      if (!made)
        return made.takeStatus();
      own = std::move(*made);
    }
    cuda.stream = own.handle();
    return Status::ok();
  }
  bool isOwn() const { return cuda.stream == own.handle(); }
  /// Whether work on `stream` comes after what the call has done.
  bool precedes(void *stream) const {
    // Every thread has a default stream of its own by this name.
    auto *perThread = reinterpret_cast<void *>(uintptr_t(2));
    return pending && cuda.stream == stream && stream != perThread;
  }
  /// Whether nothing uses its memory any more.
  bool isDone() {
    if (pending) {
      Expected<bool> past = done.isDone();
      pending = !past || !*past;
    }
    return !pending;
  }

  cuda::Call cuda;
  std::shared_ptr<const cuda::Program> program;
  cuda::Stream own;
  /// Recorded behind the last work on a caller's stream.
  cuda::Event done;
  bool pending = false;
  /// Whether anything was put on the stream.
  bool begun = false;
  /// What a graph of the caller uses.
  std::vector<std::shared_ptr<void>> kept;
  /// What capture() made; destroyed before the memory that it uses.
  cuda::Graph graph;
};

using Calls = std::vector<std::unique_ptr<CUDACall>>;

/// Calls that wait for work. Shared with the graphs that callers capture: the
/// call of one comes back when the graph is gone, at a time when nothing may be
/// asked of the driver.
struct CallPool {
  std::mutex mutex;
  Calls idle;
  /// Those whose capture could not be watched: kept to the end.
  Calls lost;
  /// Whether the program is gone.
  bool closed = false;
};

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

/// A call that a graph of the caller uses.
struct CapturedCall {
  std::shared_ptr<CallPool> pool;
  std::unique_ptr<CUDACall> call;

  static void release(void *data) {
    std::unique_ptr<CapturedCall> self(static_cast<CapturedCall *>(data));
    std::lock_guard<std::mutex> lock(self->pool->mutex);
    if (!self->pool->closed) {
      self->pool->idle.push_back(std::move(self->call));
      return;
    }
    std::lock_guard<std::mutex> lateLock(lateCalls().mutex);
    lateCalls().list.push_back(std::move(self->call));
  }
};

class CUDAImage final : public Image {
public:
  CUDAImage(std::shared_ptr<cuda::Device> device,
            std::shared_ptr<const cuda::Program> program)
      : device(std::move(device)), program(std::move(program)) {}
  ~CUDAImage() override {
    Calls idle, lost;
    {
      std::lock_guard<std::mutex> lock(pool->mutex);
      pool->closed = true;
      idle.swap(pool->idle);
      lost.swap(pool->lost);
    }
    lateCalls().clear();
  }

  Expected<std::unique_ptr<Call>> create() override {
    return set(std::make_unique<CUDACall>(device, program), nullptr, false);
  }

  Expected<std::unique_ptr<Call>> acquire(void *stream) override {
    bool capturing = false;
    if (stream) {
      Expected<bool> asked = device->isCapturing(stream);
      if (!asked)
        return asked.takeStatus();
      capturing = *asked;
    }
    std::unique_ptr<CUDACall> call = takeIdle(stream, capturing);
    if (call && call->precedes(stream)) {
      call->begun = false;
      return std::unique_ptr<Call>(std::move(call));
    }
    if (stream)
      if (Expected<cuda::Stream> known = cuda::Stream::borrow(device, stream);
          !known) {
        if (call)
          release(std::move(call));
        return known.takeStatus();
      }
    if (!call)
      call = std::make_unique<CUDACall>(device, program);
    if (!capturing)
      call->kept.clear();
    return set(std::move(call), stream, capturing);
  }

  void release(std::unique_ptr<Call> released) override {
    std::unique_ptr<CUDACall> call(static_cast<CUDACall *>(released.release()));
    if (!call->cuda.capturing || !call->begun) {
      std::lock_guard<std::mutex> lock(pool->mutex);
      pool->idle.push_back(std::move(call));
      return;
    }
    // The graph uses the call's memory as long as it can be launched.
    call->cuda.arena.keepBlocks();
    void *stream = call->cuda.stream;
    auto captured =
        std::make_unique<CapturedCall>(CapturedCall{pool, std::move(call)});
    if (device->onGraphDestroyed(stream, CapturedCall::release,
                                 captured.get())) {
      (void)captured.release();
      return;
    }
    std::lock_guard<std::mutex> lock(pool->mutex);
    pool->lost.push_back(std::move(captured->call));
  }

  std::pair<size_t, size_t> memoryUse() const override {
    std::lock_guard<std::mutex> lock(pool->mutex);
    std::pair<size_t, size_t> total;
    for (const std::unique_ptr<CUDACall> &call : pool->idle) {
      auto [bytes, requests] = call->memoryUse();
      total.first += bytes;
      total.second += requests;
    }
    return total;
  }

  std::string explain() const override {
    std::string text;
    llvm::raw_string_ostream os(text);
    for (const cuda::Function *kernel : program->loaded()) {
      const cuda::FunctionAttributes &a = kernel->attributes();
      os << "kernel " << kernel->name() << ": " << a.registers << " registers, "
         << a.sharedBytes << " bytes of shared memory, " << a.localBytes
         << " bytes spilled by a thread\n";
    }
    return text;
  }

private:
  static Expected<std::unique_ptr<Call>> set(std::unique_ptr<CUDACall> call,
                                             void *stream, bool capturing) {
    if (Status status = call->setStream(stream, capturing); !status)
      return status;
    return std::unique_ptr<Call>(std::move(call));
  }

  /// An idle call whose memory work on `stream` may use: the last one on that
  /// stream, or one whose work is done.
  std::unique_ptr<CUDACall> takeIdle(void *stream, bool capturing) {
    std::lock_guard<std::mutex> lock(pool->mutex);
    Calls &idle = pool->idle;
    size_t found = idle.size();
    for (size_t i = idle.size(); i-- > 0;)
      if (!capturing && idle[i]->precedes(stream)) {
        found = i;
        break;
      } else if (found == idle.size() && !idle[i]->pending) {
        found = i;
      }
    // Asking would end a capture.
    for (size_t i = 0; found == idle.size() && !capturing && i < idle.size();
         ++i)
      if (idle[i]->isDone()) {
        found = i;
        break;
      }
    if (found == idle.size())
      return nullptr;
    std::swap(idle[found], idle.back());
    std::unique_ptr<CUDACall> call = std::move(idle.back());
    idle.pop_back();
    return call;
  }

  std::shared_ptr<cuda::Device> device;
  std::shared_ptr<const cuda::Program> program;
  std::shared_ptr<CallPool> pool = std::make_shared<CallPool>();
};

//===----------------------------------------------------------------------===//
// The back end
//===----------------------------------------------------------------------===//

class CUDABackend final : public Backend {
public:
  explicit CUDABackend(std::shared_ptr<cuda::Device> gpu)
      : gpu(std::move(gpu)) {}

  Device device() const override { return Device::cuda(gpu->ordinal()); }
  std::string description() const override {
    return gpu->chip() + " on " + device().name() + " (" +
           gpu->properties().name + ", " +
           std::to_string(gpu->properties().multiprocessors) +
           " multiprocessors)";
  }
  const char *machine() const override { return "h200"; }
  scheduler::Device schedulerDevice(int) const override {
    const cuda::DeviceProperties &p = gpu->properties();
    return {"cuda-sm_" + std::to_string(p.major) + std::to_string(p.minor),
            p.multiprocessors};
  }
  std::vector<scheduler::Variant>
  variants(const scheduler::Problem &problem) const override {
    // A multiple of this is no chunk, but the whole of any sequence.
    constexpr int64_t kNoChunk = int64_t(1) << 40;
    if (problem.op != scheduler::OpKind::SelectiveScan || problem.states < 1)
      return {scheduler::Variant()};
    std::vector<scheduler::Variant> list;
    for (const ScanVariantInfo &info :
         getScanVariants(problem.channels, problem.groups, problem.states)) {
      scheduler::Variant variant;
      variant.name = info.name.str();
      variant.itemChannels = info.channels;
      variant.tile = info.tile;
      variant.segmented = info.chunkable;
      variant.granularity = info.chunkable ? 1 : kNoChunk;
      list.push_back(std::move(variant));
    }
    return list;
  }

  Status check(const CompileOptions &options) const override {
    if (options.vectorBits)
      return Status::invalidArgument("expected vectorBits to be 0 on " +
                                     device().name() + ", got " +
                                     std::to_string(options.vectorBits));
    return Status::ok();
  }
  void addPasses(mlir::OpPassManager &manager, const CompileOptions &options,
                 bool observe, Phase first, Phase last) const override {
    addGPUPasses(manager, options, gpu->chip(),
                 gpu->properties().multiprocessors, observe, first, last);
  }
  Expected<std::unique_ptr<Image>>
  takeImage(mlir::ModuleOp module, const CompileOptions &options,
            llvm::function_ref<void(const char *)> lap) const override {
    llvm::Expected<DeviceImage> image =
        takeDeviceImage(module, static_cast<unsigned>(options.optLevel),
                        std::thread::hardware_concurrency());
    if (!image)
      return Status::compileError(llvm::toString(image.takeError()));
    lap("ptx");
    auto program = std::make_shared<cuda::Program>(gpu);
    for (DeviceImage::Kernel &kernel : image->kernels)
      program->add(std::move(kernel.name), std::move(kernel.ptx));
    return std::unique_ptr<Image>(
        std::make_unique<CUDAImage>(gpu, std::move(program)));
  }

  Expected<Tensor> place(const Tensor &tensor) const override {
    if (tensor.device() == device())
      return isAligned(tensor) && tensor.isContiguous() ? tensor
                                                        : tensor.to(device());
    if (tensor.device().kind == Device::CPU)
      return tensor.to(device());
    return Status::invalidArgument("expected device " + device().name() +
                                   " or cpu, got " + tensor.device().name());
  }

private:
  std::shared_ptr<cuda::Device> gpu;
};
} // namespace

Expected<std::shared_ptr<Backend>> corey::createCUDABackend(int ordinal) {
  Expected<std::shared_ptr<cuda::Device>> device = cuda::Device::get(ordinal);
  if (!device)
    return device.takeStatus();
  if (llvm::Expected<std::string> chip = parseChip((*device)->chip()); !chip)
    return Status::unsupported(Device::cuda(ordinal).name() + ": " +
                               llvm::toString(chip.takeError()));
  return std::shared_ptr<Backend>(std::make_shared<CUDABackend>(*device));
}
