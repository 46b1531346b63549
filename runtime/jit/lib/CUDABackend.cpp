//===- CUDABackend.cpp - Programs on CUDA devices -------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "Backend.h"
#include "corey/Conversion/SSMToGPU/SSMToGPU.h"
#include "corey/Device/CUDACalls.h"
#include "corey/Target/Device.h"
#include "llvm/Support/raw_ostream.h"
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

static bool isAligned(const Tensor &tensor) {
  return cuda::isAligned(tensor.data(), tensor.shape().data(),
                         tensor.strides().data(), tensor.rank(),
                         dtypeSize(tensor.dtype()));
}

//===----------------------------------------------------------------------===//
// Calls
//===----------------------------------------------------------------------===//

namespace {
class CUDACall final : public Call, public cuda::PooledCall {
public:
  CUDACall(std::shared_ptr<cuda::Device> device,
           std::shared_ptr<const cuda::Program> program)
      : PooledCall(std::move(device), std::move(program), state) {}
  ~CUDACall() override {
    // The graph writes to memory of the host.
    if (isObserving)
      (void)observed.synchronize();
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

  Status begin() override { return PooledCall::begin(); }
  Status finish() override { return PooledCall::finish(); }
  bool isCaptured() const override { return PooledCall::isCaptured(); }
  void keep(std::shared_ptr<void> owner) override {
    PooledCall::keep(std::move(owner));
  }

  Status capture(llvm::function_ref<Status()> body, bool observes) override {
    // Nothing may be loaded while a stream is captured.
    if (Status status = program->loadAll(); !status)
      return status;
    cuda.arena.keepBlocks();
    cuda.capturing = true;
    cuda.capturesObservations = observes;
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
    Status status = graph.launch(stream ? stream : own.handle());
    if (status && cuda.capturesObservations)
      status = markObserved(stream ? stream : own.handle());
    if (stream || !status)
      return status;
    status = own.synchronize();
    return status ? cuda::takeDeviceError(cuda) : status;
  }
  bool publish() override {
    if (!isObserving)
      return false;
    Expected<bool> done = observed.isDone();
    if (!done || !*done)
      return false;
    isObserving = false;
    cuda::publishCapturedObservations(state);
    return true;
  }
  size_t numNodes() const override { return graph.numNodes(); }
  uint64_t instantiations() const override { return graph.instantiations(); }

  std::pair<size_t, size_t> memoryUse() const override {
    return {cuda.arena.bytesReserved(), cuda.arena.driverAllocations()};
  }

private:
  Status markObserved(void *stream) {
    if (!observed) {
      Expected<cuda::Event> event = cuda::Event::create(cuda.device);
      if (!event)
        return event.takeStatus();
      observed = std::move(*event);
    }
    isObserving = true;
    return observed.record(stream);
  }

  /// Recorded behind a launch that observes, and whether there was one whose
  /// statistics nobody has yet.
  cuda::Event observed;
  bool isObserving = false;
  /// What capture() made; destroyed before the memory that it uses.
  cuda::Graph graph;
};

class CUDAImage final : public Image {
public:
  CUDAImage(std::shared_ptr<cuda::Device> device,
            std::shared_ptr<const cuda::Program> program)
      : program(program), pool(device, [device, program] {
          return std::make_unique<CUDACall>(device, program);
        }) {}

  Expected<std::unique_ptr<Call>> create() override {
    return convert(pool.create());
  }
  Expected<std::unique_ptr<Call>> acquire(void *stream) override {
    return convert(pool.acquire(stream));
  }
  void release(std::unique_ptr<Call> call) override {
    pool.release(std::unique_ptr<cuda::PooledCall>(
        static_cast<CUDACall *>(call.release())));
  }
  std::pair<size_t, size_t> memoryUse() const override {
    return pool.memoryUse();
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
  static Expected<std::unique_ptr<Call>>
  convert(Expected<std::unique_ptr<cuda::PooledCall>> call) {
    if (!call)
      return call.takeStatus();
    return std::unique_ptr<Call>(static_cast<CUDACall *>(call->release()));
  }

  std::shared_ptr<const cuda::Program> program;
  cuda::CallPool pool;
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
  variantsOf(mlir::Operation *scan,
             const scheduler::Problem &problem) const override {
    return scanVariantsOnCUDA(problem, gpu->chip(),
                              problem.op != scheduler::OpKind::SSD ||
                                  isForTensorCores(scan));
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
  std::string target() const override {
    return "cuda " + gpu->chip() + " " +
           std::to_string(gpu->properties().multiprocessors);
  }
  Expected<DeviceImage> takeCode(mlir::ModuleOp module,
                                 const CompileOptions &options) const override {
    llvm::Expected<DeviceImage> image =
        takeDeviceImage(module, static_cast<unsigned>(options.optLevel),
                        std::thread::hardware_concurrency());
    if (!image)
      return Status::compileError(llvm::toString(image.takeError()));
    return std::move(*image);
  }
  Expected<std::unique_ptr<Image>> load(DeviceImage code) const override {
    auto program = std::make_shared<cuda::Program>(gpu);
    for (DeviceImage::Kernel &kernel : code.kernels)
      program->add(std::move(kernel.name), std::move(kernel.code));
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

std::vector<scheduler::Variant>
corey::scanVariantsOnCUDA(const scheduler::Problem &problem,
                          llvm::StringRef chip, bool isForTensorCores) {
  // A multiple of this is no chunk, but the whole of any sequence.
  constexpr int64_t kNoChunk = int64_t(1) << 40;
  if (problem.op == scheduler::OpKind::SSD) {
    scheduler::Variant variant;
    variant.segmented = true;
    bool is16Bit =
        isForTensorCores && (problem.type == scheduler::ElementType::F16 ||
                             problem.type == scheduler::ElementType::BF16);
    if (auto info = getSSDTensorVariant(
            getChipFeatures(chip), is16Bit,
            problem.channels / std::max<int64_t>(problem.groups, 1),
            problem.headDim, problem.states)) {
      variant.name = info->name.str();
      variant.itemChannels = info->channels;
      variant.tile = variant.granularity = info->tile;
      variant.resident = info->resident;
      return {variant};
    }
    // A block has one head, or a part of its channels.
    variant.name = "generic";
    variant.tile = 8;
    variant.resident = 2;
    return {variant};
  }
  if (problem.states < 1)
    return {scheduler::Variant()};
  std::vector<scheduler::Variant> list;
  for (const ScanVariantInfo &info :
       getScanVariants(problem.channels, problem.groups, problem.states)) {
    scheduler::Variant variant;
    variant.name = info.name.str();
    variant.itemChannels = info.channels;
    variant.tile = info.tile;
    variant.resident = info.resident;
    variant.segmented = info.chunkable;
    variant.byRule = list.empty();
    variant.granularity = info.chunkable ? 1 : kNoChunk;
    list.push_back(std::move(variant));
  }
  return list;
}
