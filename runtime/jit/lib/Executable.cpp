//===- Executable.cpp - Compiling and running ssm programs ----------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Executable.h"
#include "Backend.h"
#include "Program.h"
#include "ProgramCache.h"
#include "corey/Analysis/FusionScore.h"
#include "corey/Analysis/RegionCost.h"
#include "corey/Device/CPU.h"
#include "corey/Device/CUDA.h"
#include "corey/Device/DiskCache.h"
#include "corey/Device/RuntimeABI.h"
#include "corey/Dialect/SSM/IR/SSMOps.h"
#include "corey/Dialect/SSM/Transforms/Passes.h"
#include "corey/InitAll.h"
#include "corey/Pipelines/Pipelines.h"
#include "corey/Scheduler/Policy.h"
#include "corey/Scheduler/Site.h"
#include "corey/Target/Device.h"
#include "corey/Target/Host.h"
#include "mlir/Bytecode/BytecodeReader.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/IR/Diagnostics.h"
#include "mlir/IR/MLIRContext.h"
#include "mlir/Parser/Parser.h"
#include "mlir/Pass/PassManager.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/ADT/StringSet.h"
#include "llvm/ADT/TypeSwitch.h"
#include "llvm/ExecutionEngine/JITSymbol.h"
#include "llvm/ExecutionEngine/Orc/ExecutionUtils.h"
#include "llvm/ExecutionEngine/Orc/LLJIT.h"
#include "llvm/ExecutionEngine/Orc/MapperJITLinkMemoryManager.h"
#include "llvm/ExecutionEngine/Orc/MemoryMapper.h"
#include "llvm/ExecutionEngine/Orc/ObjectLinkingLayer.h"
#include "llvm/IR/Module.h"
#include "llvm/Support/DynamicLibrary.h"
#include "llvm/Support/FileSystem.h"
#include "llvm/Support/Format.h"
#include "llvm/Support/FormatVariadic.h"
#include "llvm/Support/MemoryBuffer.h"
#include "llvm/Support/SourceMgr.h"
#include "llvm/Target/TargetMachine.h"
#include "llvm/TargetParser/Host.h"
#include <chrono>
#include <dlfcn.h>
#include <map>
#include <mutex>
#include <optional>

using namespace corey;
using mlir::ModuleOp;

//===----------------------------------------------------------------------===//
// Context
//===----------------------------------------------------------------------===//

struct Context::Impl {
  Impl(const mlir::DialectRegistry &registry)
      : mlir(registry, mlir::MLIRContext::Threading::DISABLED) {}
  mlir::MLIRContext mlir;
  std::mutex mutex;
  std::shared_ptr<Backend> backend;
  /// Shared with the executables, which outlive the context.
  std::shared_ptr<std::atomic<int>> threads =
      std::make_shared<std::atomic<int>>(1);
};

Context::Context() = default;
Context::~Context() = default;

Expected<std::shared_ptr<Context>> Context::create(ContextOptions options) {
  Expected<Device> device = Device::parse(options.device);
  if (!device)
    return device.takeStatus();
  Expected<std::shared_ptr<Backend>> backend = Backend::create(*device);
  if (!backend)
    return backend.takeStatus();
  mlir::DialectRegistry registry;
  registerAllDialects(registry);
  std::shared_ptr<Context> context(new Context);
  context->impl = std::make_unique<Impl>(registry);
  context->impl->backend = std::move(*backend);
  if (Status status = context->setThreads(options.threads); !status)
    return status;
  return context;
}

Device Context::getDevice() const { return impl->backend->device(); }
int Context::getThreads() const { return *impl->threads; }
/// More than any machine has, fewer than the OpenMP library breaks at.
static constexpr int kMaxThreads = 1024;

Status Context::setThreads(int threads) {
  if (threads < 0)
    return Status::invalidArgument(
        "expected a thread count of at least 0, got " +
        std::to_string(threads));
  if (threads > kMaxThreads)
    return Status::invalidArgument("expected a thread count of at most " +
                                   std::to_string(kMaxThreads) + ", got " +
                                   std::to_string(threads));
  *impl->threads = threads ? threads : device::hardwareThreads();
  return Status::ok();
}

namespace {
/// Collects diagnostics as lines of text.
class DiagnosticCollector {
public:
  explicit DiagnosticCollector(mlir::MLIRContext *context)
      : handler(context, [this](mlir::Diagnostic &diagnostic) {
          if (diagnostic.getSeverity() != mlir::DiagnosticSeverity::Error)
            return mlir::success();
          if (!text.empty())
            text += "\n";
          llvm::raw_string_ostream os(text);
          if (auto loc = diagnostic.getLocation()
                             ->findInstanceOf<mlir::FileLineColLoc>())
            os << loc.getFilename().getValue() << ":" << loc.getLine() << ":"
               << loc.getColumn() << ": ";
          os << diagnostic.str();
          return mlir::success();
        }) {}
  Status status(const char *fallback) const {
    return Status::compileError(text.empty() ? fallback : text);
  }

private:
  std::string text;
  mlir::ScopedDiagnosticHandler handler;
};

/// The SSA name at `loc` in `source`: what follows '%'.
std::string nameAt(llvm::StringRef source, mlir::Location loc, bool isResult,
                   unsigned resultNumber) {
  auto position = loc->findInstanceOf<mlir::FileLineColLoc>();
  if (!position)
    return "";
  llvm::StringRef line = source;
  for (unsigned i = 1; i < position.getLine(); ++i)
    line = line.split('\n').second;
  line = line.split('\n').first;
  unsigned column = position.getColumn();
  if (column == 0 || column > line.size())
    return "";
  llvm::StringRef text = line.substr(column - 1);
  if (isResult) {
    // `%a, %b = op`: the location is that of the op, or of the first result.
    text = text.starts_with("%") ? text : line.take_front(column - 1);
    llvm::SmallVector<llvm::StringRef> names;
    text.split('=').first.split(names, ',');
    if (resultNumber >= names.size())
      return "";
    text = names[resultNumber].trim();
  }
  if (!text.consume_front("%"))
    return "";
  return text
      .take_while([](char c) {
        return llvm::isAlnum(c) || c == '_' || c == '.' || c == '$';
      })
      .str();
}

/// The only use of a value; null if there are others, or none.
mlir::OpOperand *onlyUse(mlir::Value value) {
  return value.hasOneUse() ? &*value.use_begin() : nullptr;
}

/// The argument that result `index` of a function is with some slots replaced,
/// if nothing else reads it; else -1.
int findUpdatedArgument(mlir::func::FuncOp function, unsigned index) {
  mlir::Block &entry = function.getBody().front();
  mlir::Value result = entry.getTerminator()->getOperand(index);
  auto fused = result.getDefiningOp<ssm::FusedOp>();
  if (fused)
    result = fused.getBody().front().getTerminator()->getOperand(
        llvm::cast<mlir::OpResult>(result).getResultNumber());
  if (!result.getDefiningOp())
    return -1;
  mlir::Value pool =
      llvm::TypeSwitch<mlir::Operation *, mlir::Value>(result.getDefiningOp())
          .Case<ssm::SelectiveScanOp, ssm::CausalConvOp>([&](auto op) {
            return op.getStateSlots() && result == op->getResult(1)
                       ? op.getInitialState()
                       : mlir::Value();
          })
          .Case<ssm::SSDOp>([&](auto op) {
            return op.getStateSlots() && result == op->getResult(1)
                       ? op.getInitialStates()
                       : mlir::Value();
          })
          .Default(mlir::Value());
  if (!pool || !onlyUse(pool))
    return -1;
  if (fused) {
    auto inner = llvm::dyn_cast<mlir::BlockArgument>(pool);
    if (!inner || inner.getOwner() != &fused.getBody().front())
      return -1;
    pool = fused.getInputs()[inner.getArgNumber()];
  }
  auto argument = llvm::dyn_cast<mlir::BlockArgument>(pool);
  mlir::OpOperand *use = onlyUse(pool);
  if (!argument || argument.getOwner() != &entry || !use ||
      use->getOwner()->getBlock() != &entry)
    return -1;
  return static_cast<int>(argument.getArgNumber());
}

/// Records the SSA names of arguments and returned values, so that users can
/// call tensors what the file calls them.
void recordNames(ModuleOp module, llvm::StringRef source) {
  auto string = [&](const std::string &text) {
    return mlir::StringAttr::get(module.getContext(), text);
  };
  for (auto function : module.getOps<mlir::func::FuncOp>()) {
    if (function.isExternal() || function.isPrivate())
      continue;
    for (mlir::BlockArgument arg : function.getArguments()) {
      unsigned i = arg.getArgNumber();
      std::string name = nameAt(source, arg.getLoc(), false, 0);
      if (!name.empty() && !function.getArgAttr(i, ssm::kNameAttr))
        function.setArgAttr(i, ssm::kNameAttr, string(name));
    }
    auto terminator = llvm::dyn_cast<mlir::func::ReturnOp>(
        function.getBody().front().getTerminator());
    for (unsigned i = 0; terminator && i < function.getNumResults(); ++i) {
      auto result = llvm::dyn_cast<mlir::OpResult>(terminator.getOperand(i));
      if (!result || function.getResultAttr(i, ssm::kNameAttr))
        continue;
      std::string name = nameAt(source, result.getOwner()->getLoc(), true,
                                result.getResultNumber());
      // A number says nothing about a result, and a value returned twice has
      // one name for the first of its results.
      for (unsigned j = 0; j < i; ++j)
        if (auto taken = function.getResultAttrOfType<mlir::StringAttr>(
                j, ssm::kNameAttr))
          if (taken.getValue() == name)
            name.clear();
      if (!name.empty() && !llvm::isDigit(name[0]))
        function.setResultAttr(i, ssm::kNameAttr, string(name));
    }
  }
}

Expected<mlir::OwningOpRef<ModuleOp>> parse(mlir::MLIRContext &context,
                                            std::string_view source,
                                            std::string_view name) {
  DiagnosticCollector diagnostics(&context);
  llvm::SourceMgr manager;
  manager.AddNewSourceBuffer(llvm::MemoryBuffer::getMemBufferCopy(
                                 llvm::StringRef(source.data(), source.size()),
                                 llvm::StringRef(name.data(), name.size())),
                             llvm::SMLoc());
  auto module = mlir::parseSourceFile<ModuleOp>(manager, &context);
  if (!module)
    return diagnostics.status("parsing failed");
  llvm::MemoryBufferRef buffer = manager.getMemoryBuffer(1)->getMemBufferRef();
  if (!mlir::isBytecode(buffer))
    recordNames(*module, buffer.getBuffer());
  return module;
}

Status runPasses(ModuleOp module,
                 llvm::function_ref<void(mlir::OpPassManager &)> addPasses) {
  DiagnosticCollector diagnostics(module.getContext());
  mlir::PassManager manager(module.getContext());
  manager.enableVerifier(false);
  addPasses(manager);
  if (failed(manager.run(module)))
    return diagnostics.status("lowering failed");
  return Status::ok();
}

/// What policies decide with: the shipped table under the user's, and the
/// shipped cost models.
Expected<scheduler::PolicyContext> policyContext() {
  Expected<scheduler::ChunkTable> table =
      scheduler::ChunkTable::shippedAndCached();
  if (!table)
    return table.takeStatus();
  scheduler::PolicyContext context;
  context.table = std::make_shared<scheduler::ChunkTable>(std::move(*table));
  return context;
}

Status checkOptions(const CompileOptions &options) {
  if (options.vectorBits != 0 && options.vectorBits != 256 &&
      options.vectorBits != 512)
    return Status::invalidArgument(
        "expected vectorBits to be 0, 256 or 512, got " +
        std::to_string(options.vectorBits));
  if (options.optLevel < 0 || options.optLevel > 3)
    return Status::invalidArgument("expected optLevel to be from 0 to 3, got " +
                                   std::to_string(options.optLevel));
  FusionStrategy strategy;
  if (!parseFusionStrategy(options.fusion, strategy))
    return Status::invalidArgument("expected fusion to be dp, entropy, "
                                   "arithmetic, static or none, got '" +
                                   options.fusion + "'");
  return Status::ok();
}

Status toStatus(llvm::Error error) {
  return error ? Status::compileError(llvm::toString(std::move(error)))
               : Status::ok();
}

DType toDType(mlir::Type type) {
  if (type.isF64())
    return DType::F64;
  if (type.isF32())
    return DType::F32;
  if (type.isF16())
    return DType::F16;
  if (type.isBF16())
    return DType::BF16;
  if (llvm::isa<mlir::Float8E4M3FNType>(type))
    return DType::F8E4M3FN;
  if (type.isInteger(64))
    return DType::I64;
  if (type.isInteger(32))
    return DType::I32;
  if (type.isInteger(16))
    return DType::I16;
  return DType::I8;
}

bool isSupported(mlir::Type type) {
  return type.isF64() || type.isF32() || type.isF16() || type.isBF16() ||
         llvm::isa<mlir::Float8E4M3FNType>(type) ||
         type.isSignlessInteger(64) || type.isSignlessInteger(32) ||
         type.isSignlessInteger(16) || type.isSignlessInteger(8);
}

std::string shapeText(const int64_t *sizes, size_t rank) {
  std::string text = "[";
  for (size_t i = 0; i < rank; ++i)
    text += (i ? ", " : "") +
            (sizes[i] < 0 ? std::string("?") : std::to_string(sizes[i]));
  return text + "]";
}
std::string shapeText(const std::vector<int64_t> &shape) {
  return shapeText(shape.data(), shape.size());
}

class Stopwatch {
public:
  double lap() {
    auto now = std::chrono::steady_clock::now();
    double elapsed =
        std::chrono::duration<double, std::milli>(now - start).count();
    start = now;
    return elapsed;
  }

private:
  std::chrono::steady_clock::time_point start =
      std::chrono::steady_clock::now();
};
} // namespace

//===----------------------------------------------------------------------===//
// Executable
//===----------------------------------------------------------------------===//

struct Executable::Impl : ProgramInfo {
  std::shared_ptr<Backend> backend;
  std::unique_ptr<llvm::orc::LLJIT> jit;
  std::vector<FunctionInfo> infos;
  std::vector<ArgumentInfo> weightInfos;
  /// Whether the prepared weights are those of the weights that are bound.
  std::atomic<bool> ready{true};
  std::mutex prepareMutex;
  double prepareMs = 0;
  std::string name, policy;
  /// What the policies of the sites decide with.
  scheduler::PolicyContext policies;
  /// The context's.
  std::shared_ptr<std::atomic<int>> threads;
  std::vector<PhaseTime> times;
  CacheInfo cache;
  device::ProgramState program;
  /// What the device holds of the program, and the calls, which use `program`.
  std::unique_ptr<Image> image;
  /// Count what changes the kernels that a call launches, and what may, by the
  /// chunks and variants of sites.
  std::atomic<uint64_t> changes{0}, choices{0};

  Status describe(ModuleOp module);
  Status findSites(ModuleOp module);
  Expected<std::shared_ptr<const scheduler::Policy>>
  policyOf(const ChunkSite &site) const;
  Expected<ProgramCode> compile(ModuleOp module, const CompileOptions &options,
                                Stopwatch &watch);
  Status addSites(const scheduler::EstimatorOptions &observation);
  Status load(ProgramCode code);

  const Function *find(std::string_view name) const {
    for (const Function &function : functions)
      if (function.info.name == name)
        return &function;
    return nullptr;
  }
  Status notFound(std::string_view name) const {
    std::string known;
    for (const FunctionInfo &info : infos)
      known += (known.empty() ? "" : ", ") + info.name;
    return Status::notFound("expected a function of " + this->name + " (" +
                            known + "), got '" + std::string(name) + "'");
  }

  Expected<std::unique_ptr<Call>> acquire(void *stream) {
    Expected<std::unique_ptr<Call>> call = image->acquire(stream);
    if (call)
      (*call)->state.program = &program;
    return call;
  }

  bool usesPrepared(const Function &function) const;
  Status checkWeights(const Function &function, std::string_view user) const;
  Status checkInputs(const Function &function, const Tensor *inputs,
                     size_t count) const;
  Status prepareWeights();
  Status computeShapes(const Function &function, const Tensor *inputs,
                       Call &call) const;
  Status checkOutputs(const Function &function, const Tensor *inputs,
                      size_t numInputs, const Tensor *outputs,
                      size_t numOutputs, Call &call) const;
  Status prepareCall(const Function &function, const Tensor *inputs,
                     size_t numInputs, const Tensor *outputs, size_t numOutputs,
                     Call &call);
  Status execute(const Function &function, const Tensor *inputs,
                 const Tensor *outputs, Call &call);
  Status describeArguments(const Function &function, const Tensor *inputs,
                           const Tensor *outputs, Call &call);
};

Executable::Executable() : impl(std::make_unique<Impl>()) {}
Executable::~Executable() = default;

/// Reads functions, weights and sites off a module after the Bound phase.
Status Executable::Impl::describe(ModuleOp module) {
  if (auto attr = module->getAttrOfType<mlir::StringAttr>(
          ssm::WeightOp::getPrefixAttrName()))
    prefix = attr.str();
  llvm::StringMap<size_t> weightIndex;
  for (auto op : module.getOps<ssm::WeightOp>()) {
    auto type = llvm::cast<mlir::RankedTensorType>(op.getType());
    Weight weight;
    weight.info = {
        op.getSymName().str(), toDType(type.getElementType()),
        std::vector<int64_t>(type.getShape().begin(), type.getShape().end())};
    weight.key = op.getFileKey().str();
    weight.prepared = op.isPrepared();
    weightIndex[op.getSymName()] = weights.size();
    weights.push_back(std::move(weight));
  }
  mlir::SymbolTable symbols(module);
  for (auto op : module.getOps<mlir::func::FuncOp>()) {
    if (op.isPrivate() || op.isExternal() ||
        op.getSymName().ends_with(ssm::kShapesSuffix))
      continue;
    Function function;
    function.info.name = op.getSymName().str();
    auto toInfo = [&](mlir::Type type, std::string name,
                      std::vector<ArgumentInfo> &list) -> Status {
      auto tensor = llvm::dyn_cast<mlir::RankedTensorType>(type);
      for (const ArgumentInfo &other : list)
        if (other.name == name)
          return Status::compileError("expected the names of @" +
                                      function.info.name + " to differ, got '" +
                                      name + "' twice");
      if (!tensor || tensor.getEncoding() ||
          !isSupported(tensor.getElementType())) {
        std::string text;
        llvm::raw_string_ostream(text) << type;
        return Status::compileError(
            "expected '" + name + "' of @" + function.info.name +
            " to be a ranked tensor of a float or integer type, got " + text);
      }
      std::vector<int64_t> shape;
      for (int64_t size : tensor.getShape())
        shape.push_back(mlir::ShapedType::isDynamic(size) ? -1 : size);
      list.push_back(
          {std::move(name), toDType(tensor.getElementType()), shape});
      return Status::ok();
    };
    for (unsigned i = 0; i < op.getNumArguments(); ++i) {
      if (auto attr =
              op.getArgAttrOfType<mlir::StringAttr>(i, ssm::kWeightArgAttr)) {
        auto it = weightIndex.find(attr.getValue());
        if (it == weightIndex.end())
          return Status::compileError("expected argument " + std::to_string(i) +
                                      " of @" + function.info.name +
                                      " to name a weight of the module, got '" +
                                      attr.str() + "'");
        function.weights.push_back(it->second);
      } else {
        if (!function.weights.empty())
          return Status::compileError(
              "expected weights to be the last arguments of @" +
              function.info.name + ", got input " + std::to_string(i) +
              " after one");
        std::string name = "arg" + std::to_string(i);
        if (auto attr =
                op.getArgAttrOfType<mlir::StringAttr>(i, ssm::kNameAttr))
          name = attr.str();
        if (Status status =
                toInfo(op.getArgumentTypes()[i], name, function.info.inputs);
            !status)
          return status;
        function.anyStrides.push_back(
            static_cast<bool>(op.getArgAttr(i, ssm::kAnyStridesAttr)));
      }
      function.numDims +=
          llvm::cast<mlir::RankedTensorType>(op.getArgumentTypes()[i])
              .getRank();
    }
    for (unsigned i = 0; i < op.getNumResults(); ++i) {
      std::string name = "result" + std::to_string(i);
      if (auto attr =
              op.getResultAttrOfType<mlir::StringAttr>(i, ssm::kNameAttr))
        name = attr.str();
      if (Status status =
              toInfo(op.getResultTypes()[i], name, function.info.outputs);
          !status)
        return status;
      function.outputAnyStrides.push_back(
          static_cast<bool>(op.getResultAttr(i, ssm::kAnyStridesAttr)));
      function.numResultDims += function.info.outputs.back().shape.size();
    }
    for (auto [i, info] : llvm::enumerate(function.info.outputs)) {
      int argument = findUpdatedArgument(op, i);
      if (argument < static_cast<int>(function.info.inputs.size()))
        info.updatedInput = argument;
    }
    auto shapes = symbols.lookup<mlir::func::FuncOp>(function.info.name +
                                                     ssm::kShapesSuffix.str());
    if (auto list =
            shapes->getAttrOfType<mlir::ArrayAttr>(ssm::kConstraintsAttr))
      for (mlir::Attribute attr : list) {
        auto entry = llvm::cast<mlir::ArrayAttr>(attr).getValue();
        auto integer = [&](unsigned i) {
          return llvm::cast<mlir::IntegerAttr>(entry[i]).getInt();
        };
        function.constraints.push_back(
            {integer(0), integer(1), integer(2), integer(3),
             llvm::cast<mlir::StringAttr>(entry[4]).str()});
      }
    if (function.info.name == ssm::kPrepareFunction) {
      for (unsigned i = 0; i < op.getNumResults(); ++i) {
        auto symbol =
            op.getResultAttrOfType<mlir::StringAttr>(i, ssm::kPreparesAttr);
        auto it =
            symbol ? weightIndex.find(symbol.getValue()) : weightIndex.end();
        if (it == weightIndex.end() || !weights[it->second].prepared ||
            weights[it->second].info.dtype != function.info.outputs[i].dtype ||
            weights[it->second].info.shape != function.info.outputs[i].shape)
          return Status::compileError("expected result " + std::to_string(i) +
                                      " of @" + function.info.name +
                                      " to be a prepared weight, got '" +
                                      (symbol ? symbol.str() : "") + "'");
        preparedWeights.push_back(it->second);
      }
      if (!function.info.inputs.empty())
        return Status::compileError("expected @" + function.info.name +
                                    " to take weights only, got input '" +
                                    function.info.inputs[0].name + "'");
      prepare = std::make_unique<Function>(std::move(function));
      continue;
    }
    functions.push_back(std::move(function));
  }
  for (size_t i = 0; i < weights.size(); ++i)
    if (weights[i].prepared && !llvm::is_contained(preparedWeights, i))
      return Status::compileError("expected @" + ssm::kPrepareFunction.str() +
                                  " to give prepared weight '" +
                                  weights[i].info.name + "', got none");
  if (functions.empty())
    return Status::compileError(
        name + ": expected at least one public function with a body, got none");
  return Status::ok();
}

scheduler::Device Context::schedulerDevice() const {
  return impl->backend->schedulerDevice(*impl->threads);
}

std::vector<scheduler::Variant>
corey::scanVariants(Device::Kind kind, const scheduler::Problem &problem) {
  if (kind != Device::CUDA)
    return scanVariantsOnCPU(problem);
  // Of the first device, if there is one.
  Expected<std::shared_ptr<cuda::Device>> first = cuda::Device::get(0);
  return scanVariantsOnCUDA(problem, first ? (*first)->chip() : "sm_90a");
}

/// The sizes of a scan and the kernels there are for it.
static void describeScan(mlir::Operation *op, const Backend &backend,
                         ChunkSite &site) {
  auto shapeOf = [](mlir::Value value) {
    return llvm::cast<mlir::RankedTensorType>(value.getType()).getShape();
  };
  auto sizeOf = [](int64_t size) {
    return mlir::ShapedType::isDynamic(size) ? -1 : size;
  };
  scheduler::Problem &problem = site.problem;
  mlir::Type element;
  if (auto scan = llvm::dyn_cast<ssm::SelectiveScanOp>(op)) {
    problem.op = scheduler::OpKind::SelectiveScan;
    problem.channels = sizeOf(shapeOf(scan.getU())[2]);
    problem.states = sizeOf(shapeOf(scan.getA())[1]);
    problem.groups = sizeOf(shapeOf(scan.getB())[2]);
    element = scan.getU().getType().getElementType();
  } else if (auto ssd = llvm::dyn_cast<ssm::SSDOp>(op)) {
    problem.op = scheduler::OpKind::SSD;
    problem.channels = sizeOf(shapeOf(ssd.getX())[2]);
    problem.headDim = sizeOf(shapeOf(ssd.getX())[3]);
    problem.states = sizeOf(shapeOf(ssd.getB())[3]);
    problem.groups = sizeOf(shapeOf(ssd.getB())[2]);
    element = ssd.getX().getType().getElementType();
  } else {
    return;
  }
  problem.type = element.isF16()    ? scheduler::ElementType::F16
                 : element.isBF16() ? scheduler::ElementType::BF16
                                    : scheduler::ElementType::F32;
  if (problem.channels > 0 && problem.groups > 0)
    site.variants = backend.variantsOf(op, problem);
}

/// Reads the sites off a module after the Bound phase, and has the input of a
/// scan observed where its policy decides on it.
Status Executable::Impl::findSites(ModuleOp module) {
  llvm::SmallVector<ssm::ScanOpInterface> scans;
  llvm::SmallVector<ssm::BindChunkOp> binds;
  module.walk([&](mlir::Operation *op) {
    if (auto bind = llvm::dyn_cast<ssm::BindChunkOp>(op))
      binds.push_back(bind);
    if (auto scan = llvm::dyn_cast<ssm::ScanOpInterface>(op))
      scans.push_back(scan);
  });
  llvm::StringMap<llvm::SmallVector<ssm::ScanOpInterface, 2>> scansOfSite;
  for (ssm::ScanOpInterface scan : scans) {
    mlir::Value chunk = scan.getScanChunk();
    if (auto bind = chunk ? chunk.getDefiningOp<ssm::BindChunkOp>() : nullptr)
      scansOfSite[bind.getSite()].push_back(scan);
  }
  llvm::StringSet<> known;
  for (ssm::BindChunkOp bind : binds) {
    if (!known.insert(bind.getSite()).second)
      continue;
    ChunkSite site;
    site.name = bind.getSite().str();
    site.variants.emplace_back();
    if (bind.getPolicy())
      site.policy = bind.getPolicy()->str();
    auto parsed = policyOf(site);
    if (!parsed)
      return parsed.takeStatus();
    for (ssm::ScanOpInterface scan : scansOfSite[site.name]) {
      describeScan(scan, *backend, site);
      if ((*parsed)->statistics())
        ssm::observeScanInput(scan);
    }
    chunkSites.push_back(std::move(site));
  }
  known.clear();
  module.walk([&](ssm::ObserveOp op) {
    if (known.insert(op.getSite()).second)
      observationSites.push_back(op.getSite().str());
  });
  return Status::ok();
}

Expected<std::shared_ptr<const scheduler::Policy>>
Executable::Impl::policyOf(const ChunkSite &site) const {
  auto parsed = scheduler::parsePolicy(
      site.policy.empty() ? policy : site.policy, policies);
  if (!parsed && !site.policy.empty())
    return Status::compileError("site '" + site.name +
                                "': " + parsed.status().message());
  return parsed;
}

/// Makes the sites that calls of the program go by.
Status
Executable::Impl::addSites(const scheduler::EstimatorOptions &observation) {
  for (const ChunkSite &site : chunkSites) {
    auto parsed = policyOf(site);
    if (!parsed)
      return parsed.takeStatus();
    scheduler::SiteInfo info;
    info.name = site.name;
    info.problem = site.problem;
    info.variants = site.variants;
    info.device = backend->schedulerDevice(*threads);
    info.layer = scheduler::layerOf(site.name);
    program.addChunk(
        std::make_unique<scheduler::Site>(std::move(info), std::move(*parsed)));
  }
  for (const std::string &name : observationSites) {
    scheduler::Site *target = program.findChunk(name);
    scheduler::EstimatorOptions options = observation;
    if (target)
      options = target->policy()->statistics().value_or(options);
    program.addObservation(
        std::make_unique<device::ObservationSite>(name, options, target));
  }
  return Status::ok();
}

/// What compiled code calls, by address: the executable may be linked without a
/// dynamic symbol table.
static llvm::orc::SymbolMap
runtimeSymbols(llvm::orc::MangleAndInterner mangle) {
  llvm::orc::SymbolMap symbols;
  auto add = [&](const char *name, auto *function) {
    symbols[mangle(name)] = {llvm::orc::ExecutorAddr::fromPtr(function),
                             llvm::JITSymbolFlags::Exported |
                                 llvm::JITSymbolFlags::Callable};
  };
  add("corey_rt_malloc", corey_rt_malloc);
  add("corey_rt_free", corey_rt_free);
  add("corey_rt_chunk", corey_rt_chunk);
  add("corey_rt_variant", corey_rt_variant);
  add("corey_rt_gemm", corey_rt_gemm);
  add("corey_rt_sample", corey_rt_sample);
  add("corey_rt_observe", corey_rt_observe);
  add("corey_rt_bad_index", corey_rt_bad_index);
  add("corey_rt_bad_slot", corey_rt_bad_slot);
  add("corey_rt_check_sequence_count", corey_rt_check_sequence_count);
  add("corey_rt_check_sequence_start", corey_rt_check_sequence_start);
  add("corey_rt_device_malloc", corey_rt_device_malloc);
  add("corey_rt_device_free", corey_rt_device_free);
  add("corey_rt_launch", corey_rt_launch);
  add("corey_rt_device_copy", corey_rt_device_copy);
  add("corey_rt_device_gemm", corey_rt_device_gemm);
  add("corey_rt_device_observe", corey_rt_device_observe);
  add("corey_rt_device_observed", corey_rt_device_observed);
  add("corey_rt_device_error_slot", corey_rt_device_error_slot);
  return symbols;
}

/// What this library is linked with, whose names the process as a whole need
/// not see: an extension of Python is loaded apart from others. Nothing where
/// it is part of the executable.
static void addOwnLibraries(llvm::orc::JITDylib &library, char prefix) {
  Dl_info info;
  if (!dladdr(reinterpret_cast<void *>(&getVersion), &info) || !info.dli_fname)
    return;
  if (void *self = dlopen(info.dli_fname, RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD))
    library.addGenerator(
        std::make_unique<llvm::orc::DynamicLibrarySearchGenerator>(
            llvm::sys::DynamicLibrary(self), prefix));
}

/// Address space, not memory, that is set aside at a time for machine code.
static constexpr size_t kJITReservation = size_t(64) << 20;

/// Code of a module after the LLVM phase.
Expected<ProgramCode> Executable::Impl::compile(ModuleOp module,
                                                const CompileOptions &options,
                                                Stopwatch &watch) {
  DiagnosticCollector diagnostics(module.getContext());
  ProgramCode code;
  Expected<DeviceImage> taken = backend->takeCode(module, options);
  if (!taken)
    return taken.status().code() == StatusCode::CompileError
               ? diagnostics.status(taken.status().message().c_str())
               : taken.takeStatus();
  code.image = std::move(*taken);
  if (!code.image.kernels.empty())
    times.push_back({"ptx", watch.lap()});
  auto machine = createHostTargetMachine();
  if (!machine)
    return toStatus(machine.takeError());
  llvm::LLVMContext llvmContext;
  auto translated = translateToLLVMIR(module, llvmContext, **machine);
  if (!translated) {
    llvm::consumeError(translated.takeError());
    return diagnostics.status("translation to LLVM IR failed");
  }
  times.push_back({"translate", watch.lap()});
  // Host code around kernels is long, runs once a call, and only launches them.
  if (backend->device().kind != Device::CPU)
    (*machine)->setOptLevel(llvm::CodeGenOptLevel::None);
  auto objects = compileObjects(**translated, **machine, options.optLevel,
                                std::min(device::hardwareThreads(), 4));
  if (!objects)
    return toStatus(objects.takeError());
  for (const std::unique_ptr<llvm::MemoryBuffer> &object : *objects)
    code.objects.push_back(object->getBuffer().str());
  times.push_back({"codegen", watch.lap()});
  return code;
}

/// Links code into this process, for a program whose description is there.
Status Executable::Impl::load(ProgramCode code) {
  for (const Function &function : functions)
    infos.push_back(function.info);
  for (const Weight &weight : weights)
    if (!weight.prepared)
      weightInfos.push_back(weight.info);
  ready = !prepare;
  auto loaded = backend->load(std::move(code.image));
  if (!loaded)
    return loaded.takeStatus();
  image = std::move(*loaded);
  auto machine = createHostTargetMachine();
  if (!machine)
    return toStatus(machine.takeError());
  auto jitOrError =
      llvm::orc::LLJITBuilder()
          .setJITTargetMachineBuilder(
              llvm::orc::JITTargetMachineBuilder((*machine)->getTargetTriple()))
          .setDataLayout((*machine)->createDataLayout())
          // Objects of a program refer to one another by 32-bit distances, so
          // that they must lie together.
          .setObjectLinkingLayerCreator(
              [](llvm::orc::ExecutionSession &session)
                  -> llvm::Expected<std::unique_ptr<llvm::orc::ObjectLayer>> {
                auto memory =
                    llvm::orc::MapperJITLinkMemoryManager::CreateWithMapper<
                        llvm::orc::InProcessMemoryMapper>(kJITReservation);
                if (!memory)
                  return memory.takeError();
                return std::make_unique<llvm::orc::ObjectLinkingLayer>(
                    session, std::move(*memory));
              })
          .create();
  if (!jitOrError)
    return toStatus(jitOrError.takeError());
  jit = std::move(*jitOrError);
  llvm::orc::JITDylib &library = jit->getMainJITDylib();
  llvm::orc::MangleAndInterner mangle(jit->getExecutionSession(),
                                      jit->getDataLayout());
  if (auto error =
          library.define(llvm::orc::absoluteSymbols(runtimeSymbols(mangle))))
    return toStatus(std::move(error));
  addOwnLibraries(library, jit->getDataLayout().getGlobalPrefix());
  auto process = llvm::orc::DynamicLibrarySearchGenerator::GetForCurrentProcess(
      jit->getDataLayout().getGlobalPrefix());
  if (!process)
    return toStatus(process.takeError());
  library.addGenerator(std::move(*process));
  for (const std::string &object : code.objects)
    if (auto error = jit->addObjectFile(
            llvm::MemoryBuffer::getMemBufferCopy(object, "corey")))
      return toStatus(std::move(error));
  std::vector<Function *> all;
  for (Function &function : functions)
    all.push_back(&function);
  if (prepare)
    all.push_back(prepare.get());
  for (Function *function : all)
    for (auto [suffix, slot] :
         {std::pair<llvm::StringRef, void (**)(void **)>{"", &function->invoke},
          {ssm::kShapesSuffix, &function->shapes}}) {
      auto symbol =
          jit->lookup(getInvokeSymbol(function->info.name + suffix.str()));
      if (!symbol)
        return toStatus(symbol.takeError());
      *slot = symbol->toPtr<void (*)(void **)>();
    }
  return Status::ok();
}

/// What the kernels of a module after the Bound phase move.
static TrafficInfo measureTraffic(ModuleOp module, const char *machine) {
  TrafficInfo traffic;
  module.walk<mlir::WalkOrder::PreOrder>([&](mlir::Operation *op) {
    auto fusable = llvm::dyn_cast<ssm::FusableOpInterface>(op);
    if (!fusable)
      return mlir::WalkResult::advance();
    llvm::SmallVector<mlir::Operation *> ops{op};
    if (auto fused = llvm::dyn_cast<ssm::FusedOp>(op)) {
      ops.clear();
      for (mlir::Operation &inner :
           fused.getBody().front().without_terminator())
        ops.push_back(&inner);
    }
    RegionCost cost = regionCost(ops, /*dynamicDim=*/1024);
    ++traffic.kernels;
    traffic.bytesRead += cost.bytesRead;
    traffic.bytesWritten += cost.bytesWritten;
    traffic.bytesKept += cost.bytesKept;
    traffic.predictedMs += cost.seconds(*findMachine(machine)) * 1e3;
    return mlir::WalkResult::skip();
  });
  return traffic;
}

//===----------------------------------------------------------------------===//
// Compiling
//===----------------------------------------------------------------------===//

static const device::DiskCache &programCache() {
  static const device::DiskCache cache("programs", "program");
  return cache;
}

/// The key of a program in the cache; empty where programs are not kept.
static std::string keyOf(const Backend &backend, const CompileOptions &options,
                         std::string_view source) {
  std::string compiler = compilerIdentity();
  auto machine = createHostTargetMachine();
  if (compiler.empty() || !machine) {
    llvm::consumeError(machine.takeError());
    return "";
  }
  std::string host =
      ((*machine)->getTargetTriple().str() + " " + (*machine)->getTargetCPU() +
       " " + (*machine)->getTargetFeatureString())
          .str();
  return programKey(compiler, host, backend.target(), options,
                    llvm::StringRef(source.data(), source.size()));
}

/// Takes a program from the cache.
static CacheInfo lookUp(const std::string &key, ProgramInfo &info,
                        ProgramCode &code) {
  CacheInfo cache;
  if (!key.empty())
    cache.path = programCache().path(key);
  if (cache.path.empty())
    return cache;
  cache.outcome = CacheInfo::Missing;
  Expected<std::string> entry = programCache().read(key);
  if (!entry) {
    if (entry.status().code() != StatusCode::NotFound)
      cache.problem = entry.status().message();
    return cache;
  }
  if (readProgram(*entry, info, code)) {
    cache.outcome = CacheInfo::Loaded;
    return cache;
  }
  info = ProgramInfo();
  code = ProgramCode();
  cache.problem = cache.path + ": expected a program, got other bytes";
  return cache;
}

/// Puts a program into the cache. Without it the next process compiles again.
static void keep(const std::string &key, ProgramInfo &info, ProgramCode &code,
                 CacheInfo &cache) {
  if (cache.outcome == CacheInfo::Off)
    return;
  Status status = programCache().write(key, writeProgram(info, code));
  if (status)
    cache.outcome = CacheInfo::Stored;
  else
    cache.problem += (cache.problem.empty() ? "" : "; ") + status.message();
}

Expected<std::shared_ptr<Executable>>
Context::compile(std::string_view source, const CompileOptions &options,
                 std::string_view name) {
  if (Status status = checkOptions(options); !status)
    return status;
  if (Status status = impl->backend->check(options); !status)
    return status;
  if (auto estimator = scheduler::Estimator::create(options.observation);
      !estimator)
    return estimator.takeStatus();
  std::lock_guard<std::mutex> lock(impl->mutex);
  Stopwatch watch;
  std::shared_ptr<Executable> executable(new Executable);
  Executable::Impl &program = *executable->impl;
  program.name = std::string(name);
  program.policy = options.policy;
  program.threads = impl->threads;
  program.backend = impl->backend;
  Expected<scheduler::PolicyContext> policies = policyContext();
  if (!policies)
    return policies.takeStatus();
  program.policies = std::move(*policies);
  // Also where no site uses it.
  if (auto policy = scheduler::parsePolicy(options.policy, program.policies);
      !policy)
    return policy.takeStatus();

  ProgramCode code;
  std::string key = keyOf(*impl->backend, options, source);
  program.cache = lookUp(key, program, code);
  if (program.cache.outcome == CacheInfo::Loaded) {
    program.times.push_back({"cache", watch.lap()});
  } else {
    auto module = parse(impl->mlir, source, name);
    if (!module)
      return module.takeStatus();
    program.times.push_back({"parse", watch.lap()});
    ModuleOp op = **module;
    auto lower = [&](Phase first, Phase last) {
      return runPasses(op, [&](mlir::OpPassManager &manager) {
        impl->backend->addPasses(manager, options, /*observe=*/false, first,
                                 last);
      });
    };
    if (Status status = lower(Phase::Captured, Phase::Bound); !status)
      return status;
    if (Status status = program.describe(op); !status)
      return status;
    if (Status status = program.findSites(op); !status)
      return status;
    // What a policy has observed may have been kept from memory before.
    program.traffic = measureTraffic(op, impl->backend->machine());
    if (Status status = lower(Phase::Lowered, Phase::LLVM); !status)
      return status;
    program.times.push_back({"lower", watch.lap()});
    Expected<ProgramCode> compiled = program.compile(op, options, watch);
    if (!compiled)
      return compiled.takeStatus();
    code = std::move(*compiled);
    keep(key, program, code, program.cache);
    if (program.cache.outcome == CacheInfo::Stored)
      program.times.push_back({"cache", watch.lap()});
  }
  if (Status status = program.addSites(options.observation); !status)
    return status;
  if (Status status = program.load(std::move(code)); !status)
    return status;
  program.times.push_back({"link", watch.lap()});
  return executable;
}

static Expected<std::string> readFile(const std::string &path) {
  if (llvm::sys::fs::is_directory(path))
    return Status::ioError(path + ": expected a file, got a directory");
  auto buffer = llvm::MemoryBuffer::getFile(path, /*IsText=*/false,
                                            /*RequiresNullTerminator=*/false);
  if (!buffer) {
    std::string message = path + ": " + buffer.getError().message();
    return buffer.getError() == std::errc::no_such_file_or_directory
               ? Status::notFound(message)
               : Status::ioError(message);
  }
  return (*buffer)->getBuffer().str();
}

Expected<std::shared_ptr<Executable>>
Context::compileFile(const std::string &path, const CompileOptions &options) {
  Expected<std::string> source = readFile(path);
  if (!source)
    return source.takeStatus();
  return compile(*source, options, path);
}

//===----------------------------------------------------------------------===//
// Ahead of time
//===----------------------------------------------------------------------===//

Expected<std::string> Context::emit(std::string_view source,
                                    std::string_view phase,
                                    const CompileOptions &options,
                                    std::string_view name) {
  if (Status status = checkOptions(options); !status)
    return status;
  static constexpr std::pair<std::string_view, Phase> phases[] = {
      {"captured", Phase::Captured}, {"fused", Phase::Fused},
      {"bound", Phase::Bound},       {"lowered", Phase::Lowered},
      {"buffers", Phase::Buffers},   {"llvm", Phase::LLVM},
      {"llvmir", Phase::LLVM},       {"llvmir-opt", Phase::LLVM},
      {"ptx", Phase::LLVM}};
  auto it =
      llvm::find_if(phases, [&](auto &entry) { return entry.first == phase; });
  if (it == std::end(phases))
    return Status::invalidArgument("expected a phase of captured, fused, "
                                   "bound, lowered, buffers, llvm, llvmir, "
                                   "llvmir-opt and ptx, got '" +
                                   std::string(phase) + "'");
  Expected<scheduler::PolicyContext> policies = policyContext();
  if (!policies)
    return policies.takeStatus();
  auto policy = scheduler::parsePolicy(options.policy, *policies);
  if (!policy)
    return policy.takeStatus();
  std::lock_guard<std::mutex> lock(impl->mutex);
  auto module = parse(impl->mlir, source, name);
  if (!module)
    return module.takeStatus();
  ModuleOp op = **module;
  bool onGPU =
      !options.chip.empty() || impl->backend->device().kind == Device::CUDA;
  if (!onGPU && phase == "ptx")
    return Status::invalidArgument(
        "expected a chip, such as sm_90a, for phase 'ptx', got none");
  if (!options.chip.empty())
    if (auto chip = parseChip(options.chip); !chip)
      return Status::invalidArgument(llvm::toString(chip.takeError()));
  bool observe = (*policy)->statistics().has_value();
  if (Status status =
          runPasses(op,
                    [&](mlir::OpPassManager &manager) {
                      if (options.chip.empty())
                        impl->backend->addPasses(manager, options, observe,
                                                 Phase::Captured, it->second);
                      else
                        addGPUPasses(manager, options, options.chip,
                                     /*multiprocessors=*/0, observe,
                                     Phase::Captured, it->second);
                    });
      !status)
    return status;
  std::string text;
  llvm::raw_string_ostream os(text);
  if (onGPU && it->second == Phase::LLVM && phase != "llvm") {
    DiagnosticCollector diagnostics(&impl->mlir);
    auto ptx = takePTX(op, options.optLevel);
    if (!ptx) {
      std::string message = llvm::toString(ptx.takeError());
      return diagnostics.status(message.c_str());
    }
    if (phase == "ptx")
      return *ptx;
  }
  if (!llvm::StringRef(phase.data(), phase.size()).starts_with("llvmir")) {
    op.print(os);
    os << "\n";
    return text;
  }
  auto machine = createHostTargetMachine();
  if (!machine)
    return toStatus(machine.takeError());
  llvm::LLVMContext llvmContext;
  auto translated = translateToLLVMIR(op, llvmContext, **machine);
  if (!translated)
    return toStatus(translated.takeError());
  if (phase == "llvmir-opt")
    optimize(**translated, **machine, options.optLevel);
  (*translated)->print(os, nullptr);
  return text;
}

/// Without a scheduler a policy can only be a constant.
static bool isConstantPolicy(llvm::StringRef policy) {
  return policy == "unsplit" || policy.starts_with("static:");
}

static Status writeFile(const std::string &path, llvm::StringRef data) {
  std::error_code code;
  llvm::raw_fd_ostream os(path, code);
  if (code)
    return Status::ioError(path + ": " + code.message());
  os << data;
  os.close();
  if (!os.has_error())
    return Status::ok();
  code = os.error();
  os.clear_error();
  return Status::ioError(path + ": " + code.message());
}

Status Context::exportProgram(std::string_view source, const std::string &path,
                              const ExportOptions &what,
                              const CompileOptions &options,
                              std::string_view name) {
  if (Status status = checkOptions(options); !status)
    return status;
  if (impl->backend->device().kind != Device::CPU)
    return Status::unsupported(
        "expected a context on cpu to export from, got " +
        impl->backend->device().name());
  if (Status status = impl->backend->check(options); !status)
    return status;
  if (what.format != "o" && what.format != "so" && what.format != "cubin")
    return Status::invalidArgument(
        "expected format 'o', 'so' or 'cubin', got '" + what.format + "'");
  if (what.kernels != "ptx" && what.kernels != "cubin")
    return Status::invalidArgument("expected kernels as 'ptx' or 'cubin', got "
                                   "'" +
                                   what.kernels + "'");
  bool onDevice = !options.chip.empty();
  if (onDevice) {
    if (auto chip = parseChip(options.chip); !chip)
      return Status::invalidArgument(llvm::toString(chip.takeError()));
    if (options.vectorBits)
      return Status::invalidArgument("expected vectorBits to be 0 for " +
                                     options.chip + ", got " +
                                     std::to_string(options.vectorBits));
  } else if (what.format == "cubin" || what.kernels == "cubin") {
    return Status::invalidArgument(
        "expected a chip, such as sm_90a, for machine code of kernels, got "
        "none");
  }
  if (what.format != "cubin" && llvm::StringRef(path).ends_with(".h"))
    return Status::invalidArgument(
        "expected an output file that does not end in "
        ".h, which the header takes, got '" +
        path + "'");
  if (options.policy != scheduler::kDefaultPolicy &&
      !isConstantPolicy(options.policy))
    return Status::unsupported("expected policy 'unsplit' or 'static:<tokens>' "
                               "for an exported program, got '" +
                               options.policy + "'");
  if (auto policy = scheduler::parsePolicy(options.policy); !policy)
    return policy.takeStatus();
  std::lock_guard<std::mutex> lock(impl->mutex);
  auto module = parse(impl->mlir, source, name);
  if (!module)
    return module.takeStatus();
  // The caller holds the weights, and would have to hold prepared ones as well.
  CompileOptions chosen = options;
  chosen.hoistWeights = false;
  ModuleOp op = **module;
  auto configure = [&](auto &pipeline) {
    setPipelineOptions(pipeline, chosen, /*observe=*/false);
    if (isConstantPolicy(options.policy))
      pipeline.policy = options.policy;
  };
  auto lower = [&](Phase first, Phase last) {
    return runPasses(op, [&](mlir::OpPassManager &manager) {
      if (onDevice) {
        GPUPipelineOptions pipeline;
        configure(pipeline);
        pipeline.chip = options.chip;
        buildGPUPipeline(manager, pipeline, first, last);
      } else {
        CPUPipelineOptions pipeline;
        configure(pipeline);
        pipeline.vectorBits = options.vectorBits;
        buildCPUPipeline(manager, pipeline, first, last);
      }
    });
  };
  if (Status status = lower(Phase::Captured, Phase::Bound); !status)
    return status;
  Status unsupported;
  op.walk([&](ssm::BindChunkOp bind) {
    if (bind.getPolicy() && !isConstantPolicy(*bind.getPolicy()))
      unsupported = Status::unsupported(
          "site '" + bind.getSite().str() +
          "': expected policy 'unsplit' or 'static:<tokens>' for an exported "
          "program, got '" +
          bind.getPolicy()->str() + "'");
  });
  if (!unsupported)
    return unsupported;
  std::vector<ExportedFunction> functions = listFunctions(op);
  if (Status status = lower(Phase::Lowered, Phase::LLVM); !status)
    return status;
  DiagnosticCollector diagnostics(&impl->mlir);
  auto failed = [&](llvm::Error error) {
    std::string message = llvm::toString(std::move(error));
    return diagnostics.status(message.c_str());
  };
  if (what.format == "cubin") {
    auto ptx = takePTX(op, options.optLevel);
    if (!ptx)
      return failed(ptx.takeError());
    if (ptx->empty())
      return Status::compileError(std::string(name) +
                                  ": expected kernels, got a program without");
    auto cubin = assemble(*ptx, options.chip, what.ptxas);
    if (!cubin)
      return failed(cubin.takeError());
    return writeFile(path, *cubin);
  }
  DeviceImage image;
  if (onDevice) {
    auto taken = takeDeviceImage(op, options.optLevel,
                                 std::thread::hardware_concurrency());
    if (!taken)
      return failed(taken.takeError());
    image = std::move(*taken);
    for (DeviceImage::Kernel &kernel : image.kernels)
      if (what.kernels == "cubin") {
        auto cubin = assemble(kernel.code, image.chip, what.ptxas);
        if (!cubin)
          return failed(cubin.takeError());
        kernel.code = std::move(*cubin);
      }
  }
  auto machine = createHostTargetMachine();
  if (!machine)
    return toStatus(machine.takeError());
  llvm::LLVMContext llvmContext;
  auto translated = translateToLLVMIR(op, llvmContext, **machine);
  if (!translated)
    return failed(translated.takeError());
  if (onDevice)
    embedKernels(**translated, image, functions);
  optimize(**translated, **machine, options.optLevel);
  std::string object = what.format == "o" ? path : path + ".o";
  if (Status status = toStatus(emitObject(**translated, **machine, object));
      !status)
    return status;
  if (what.format == "so") {
    Status status =
        toStatus(linkSharedLibrary(object, what.runtimeArchive, path));
    llvm::sys::fs::remove(object);
    if (!status)
      return status;
  }
  llvm::StringRef stem(path);
  size_t dot = stem.rfind('.');
  if (dot != llvm::StringRef::npos &&
      stem.find('/', dot) == llvm::StringRef::npos)
    stem = stem.take_front(dot);
  llvm::StringRef base = stem.substr(stem.rfind('/') + 1);
  return writeFile(stem.str() + ".h", emitCHeader(functions, base, onDevice));
}

//===----------------------------------------------------------------------===//
// Weights
//===----------------------------------------------------------------------===//

const std::vector<FunctionInfo> &Executable::functions() const {
  return impl->infos;
}
const std::vector<ArgumentInfo> &Executable::weights() const {
  return impl->weightInfos;
}
const FunctionInfo *Executable::findFunction(std::string_view name) const {
  const Function *function = impl->find(name);
  return function ? &function->info : nullptr;
}

/// `tensor` viewed with `shape` if they differ by axes of size 1 only.
static Expected<Tensor> viewAs(const Tensor &tensor,
                               const std::vector<int64_t> &shape) {
  if (tensor.shape() == shape)
    return tensor;
  if (squeezeShape(tensor.shape()) != squeezeShape(shape))
    return Status::invalidArgument("");
  return tensor.reshape(shape);
}

static Status bindTensor(const Backend &backend, Weight &weight,
                         const Tensor &tensor, const std::string &what) {
  std::string subject = "weight '" + weight.info.name + "' (" + what + "): ";
  if (tensor.dtype() != weight.info.dtype)
    return Status::invalidArgument(subject + "expected dtype " +
                                   dtypeName(weight.info.dtype) + ", got " +
                                   dtypeName(tensor.dtype()));
  Expected<Tensor> placed = viewAs(tensor, weight.info.shape);
  if (!placed)
    return Status::invalidArgument(subject + "expected shape " +
                                   shapeText(weight.info.shape) + ", got " +
                                   shapeText(tensor.shape()));
  placed = backend.place(*placed);
  if (!placed)
    return Status(placed.status().code(), subject + placed.status().message());
  weight.tensor = *placed;
  weight.bound = true;
  return Status::ok();
}

/// Binds every weight to what `find` returns for its key, behind `prefix`; the
/// tensors come from `where`.
static Status
bindAll(const Backend &backend, std::vector<Weight> &weights,
        const std::string &prefix, const std::string &where,
        const std::function<Expected<Tensor>(const std::string &key,
                                             const Weight &weight)> &find) {
  for (Weight &weight : weights) {
    if (weight.prepared)
      continue;
    std::string key = prefix + weight.key;
    Expected<Tensor> tensor = find(key, weight);
    if (!tensor)
      return tensor.takeStatus();
    if (Status status = bindTensor(backend, weight, *tensor, where + key);
        !status)
      return status;
  }
  return Status::ok();
}

Status Executable::bindWeights(const SafeTensors &file,
                               const std::string *prefix) {
  // Also where only some of them are bound before an error.
  impl->ready = !impl->prepare;
  ++impl->changes;
  return bindAll(
      *impl->backend, impl->weights, prefix ? *prefix : impl->prefix,
      file.path() + ":",
      [&](const std::string &key, const Weight &weight) -> Expected<Tensor> {
        if (!file.contains(key))
          return Status::notFound(file.path() + ": expected tensor '" + key +
                                  "' for weight '" + weight.info.name +
                                  "', got a file without it");
        return file.get(key);
      });
}

Status Executable::bindWeights(
    const std::function<Expected<Tensor>(const std::string &)> &find) {
  impl->ready = !impl->prepare;
  ++impl->changes;
  return bindAll(
      *impl->backend, impl->weights, impl->prefix, "",
      [&](const std::string &key, const Weight &) { return find(key); });
}

Status Executable::bindWeight(std::string_view symbol, const Tensor &tensor) {
  for (Weight &weight : impl->weights)
    if (weight.info.name == symbol && !weight.prepared) {
      impl->ready = !impl->prepare;
      ++impl->changes;
      return bindTensor(*impl->backend, weight, tensor, "bound by name");
    }
  return Status::notFound("expected a weight of " + impl->name + ", got '" +
                          std::string(symbol) + "'");
}

Expected<Tensor> Executable::boundWeight(std::string_view symbol) const {
  for (const Weight &weight : impl->weights)
    if (weight.info.name == symbol && weight.bound && !weight.prepared)
      return weight.tensor;
  return Status::notFound("expected a bound weight of " + impl->name +
                          ", got '" + std::string(symbol) + "'");
}

//===----------------------------------------------------------------------===//
// Checks
//===----------------------------------------------------------------------===//

static Status checkTensor(const char *kind, const ArgumentInfo &info,
                          const Tensor &tensor, Device device) {
  auto subject = [&] {
    return std::string(kind) + " '" + info.name + "': expected ";
  };
  if (tensor.dtype() != info.dtype)
    return Status::invalidArgument(subject() + "dtype " +
                                   dtypeName(info.dtype) + ", got " +
                                   dtypeName(tensor.dtype()));
  if (tensor.device() != device)
    return Status::invalidArgument(subject() + "device " + device.name() +
                                   ", got " + tensor.device().name());
  bool matches = tensor.shape().size() == info.shape.size();
  for (size_t i = 0; matches && i < info.shape.size(); ++i)
    matches = info.shape[i] < 0 || info.shape[i] == tensor.shape()[i];
  if (!matches)
    return Status::invalidArgument(subject() + "shape " +
                                   shapeText(info.shape) + ", got " +
                                   shapeText(tensor.shape()));
  if (!tensor.data() && tensor.numElements())
    return Status::invalidArgument(subject() + "data, got a null pointer");
  return Status::ok();
}

bool Executable::Impl::usesPrepared(const Function &function) const {
  return llvm::any_of(function.weights,
                      [&](size_t i) { return weights[i].prepared; });
}

Status Executable::Impl::checkWeights(const Function &function,
                                      std::string_view user) const {
  for (size_t i : function.weights)
    if (!weights[i].bound && !weights[i].prepared)
      return Status::invalidArgument("weight '" + weights[i].info.name +
                                     "': expected it to be bound before @" +
                                     std::string(user) +
                                     " runs, got no tensor");
  return Status::ok();
}

Status Executable::Impl::checkInputs(const Function &function,
                                     const Tensor *inputs, size_t count) const {
  if (count != function.info.inputs.size())
    return Status::invalidArgument("@" + function.info.name + ": expected " +
                                   std::to_string(function.info.inputs.size()) +
                                   " inputs, got " + std::to_string(count));
  for (size_t i = 0; i < count; ++i)
    if (Status status = checkTensor("input", function.info.inputs[i], inputs[i],
                                    backend->device());
        !status)
      return status;
  if (usesPrepared(function))
    if (Status status = checkWeights(*prepare, function.info.name); !status)
      return status;
  return checkWeights(function, function.info.name);
}

static void appendDescriptor(std::vector<int64_t> &words, const void *data,
                             const int64_t *sizes, const int64_t *strides,
                             size_t rank) {
  auto address = static_cast<int64_t>(reinterpret_cast<intptr_t>(data));
  words.insert(words.end(), {address, address, 0});
  words.insert(words.end(), sizes, sizes + rank);
  words.insert(words.end(), strides, strides + rank);
}

/// Whether different indices surely mean different elements: every stride
/// leaves room for all smaller ones.
static bool hasDistinctElements(const Tensor &tensor) {
  const std::vector<int64_t> &shape = tensor.shape(),
                             &strides = tensor.strides();
  int64_t reach = 0, previous = 0;
  for (size_t done = 0; done < shape.size(); ++done) {
    // The next larger stride; ranks are small.
    int64_t stride = 0, extent = 0;
    for (size_t d = 0; d < shape.size(); ++d) {
      int64_t s = std::abs(strides[d]);
      if (shape[d] > 1 && s > previous && (stride == 0 || s < stride)) {
        stride = s;
        extent = shape[d];
      }
    }
    if (stride == 0)
      break;
    for (size_t d = 0, same = 0; d < shape.size(); ++d)
      if (shape[d] > 1 && std::abs(strides[d]) == stride && ++same > 1)
        return false;
    if (stride <= reach)
      return false;
    reach += stride * (extent - 1);
    previous = stride;
  }
  for (size_t d = 0; d < shape.size(); ++d)
    if (shape[d] > 1 && strides[d] == 0)
      return false;
  return true;
}

/// Fills call.sizes with the result shapes and checks every constraint.
Status Executable::Impl::computeShapes(const Function &function,
                                       const Tensor *inputs, Call &call) const {
  call.dims.clear();
  for (size_t i = 0; i < function.info.inputs.size(); ++i)
    call.dims.insert(call.dims.end(), inputs[i].shape().begin(),
                     inputs[i].shape().end());
  for (size_t i : function.weights)
    call.dims.insert(call.dims.end(), weights[i].info.shape.begin(),
                     weights[i].info.shape.end());
  call.sizes.assign(function.numResultDims + 2 * function.constraints.size(),
                    0);
  call.descriptors.clear();
  int64_t one = 1;
  int64_t counts[2] = {static_cast<int64_t>(call.dims.size()),
                       static_cast<int64_t>(call.sizes.size())};
  appendDescriptor(call.descriptors, call.dims.data(), &counts[0], &one, 1);
  appendDescriptor(call.descriptors, call.sizes.data(), &counts[1], &one, 1);
  void *pointers[2] = {call.descriptors.data(), call.descriptors.data() + 5};
  function.shapes(pointers);
  for (size_t i = 0; i < function.constraints.size(); ++i) {
    int64_t lhs = call.sizes[function.numResultDims + 2 * i];
    int64_t rhs = call.sizes[function.numResultDims + 2 * i + 1];
    if (lhs == rhs)
      continue;
    const Constraint &c = function.constraints[i];
    auto side = [&](int64_t arg, int64_t dim) -> std::string {
      if (arg < 0)
        return "";
      size_t index = static_cast<size_t>(arg);
      const std::string &name =
          index < function.info.inputs.size()
              ? function.info.inputs[index].name
              : weights[function.weights[index - function.info.inputs.size()]]
                    .info.name;
      return "dimension " + std::to_string(dim) + " of '" + name + "'";
    };
    std::string left = side(c.lhsArg, c.lhsDim),
                right = side(c.rhsArg, c.rhsDim);
    std::string subject = "@" + function.info.name + ": expected ";
    if (c.symbol == ssm::kAtLeast)
      return Status::invalidArgument(
          subject + (left.empty() ? "a dimension" : left) + " to be at least " +
          std::to_string(rhs) + ", got " + std::to_string(lhs));
    if (left.empty()) {
      std::swap(left, right);
      std::swap(lhs, rhs);
    }
    std::string symbol = c.symbol.empty() ? "" : " (" + c.symbol + ")";
    if (left.empty())
      left = "a dimension" + symbol;
    if (right.empty())
      return Status::invalidArgument(subject + left + " to be " +
                                     std::to_string(rhs) + ", got " +
                                     std::to_string(lhs));
    return Status::invalidArgument(subject + left + " to equal " + right +
                                   symbol + ", " + std::to_string(rhs) +
                                   ", got " + std::to_string(lhs));
  }
  return Status::ok();
}

Status Executable::Impl::checkOutputs(const Function &function,
                                      const Tensor *inputs, size_t numInputs,
                                      const Tensor *outputs, size_t numOutputs,
                                      Call &call) const {
  if (numOutputs != function.info.outputs.size())
    return Status::invalidArgument(
        "@" + function.info.name + ": expected " +
        std::to_string(function.info.outputs.size()) + " outputs, got " +
        std::to_string(numOutputs));
  const int64_t *sizes = call.sizes.data();
  // Where everything lies, once: a model has hundreds of tensors, and each
  // output is held against all.
  const Function *users[] = {&function,
                             usesPrepared(function) ? prepare.get() : nullptr};
  auto place = [&](const Tensor &tensor) {
    call.places.push_back(tensor.numElements()
                              ? tensor.byteRange()
                              : std::pair<uintptr_t, uintptr_t>());
  };
  call.places.clear();
  for (size_t i = 0; i < numInputs; ++i)
    place(inputs[i]);
  for (size_t i = 0; i < numOutputs; ++i)
    place(outputs[i]);
  // Those that prepared weights come from are read again when one is bound.
  for (const Function *user : users)
    for (size_t j = 0; user && j < user->weights.size(); ++j)
      place(weights[user->weights[j]].tensor);
  for (size_t i = 0; i < numOutputs; ++i) {
    const ArgumentInfo &info = function.info.outputs[i];
    const std::pair<uintptr_t, uintptr_t> own = call.places[numInputs + i];
    auto meets = [&](size_t other) {
      return own.first < call.places[other].second &&
             call.places[other].first < own.second;
    };
    if (Status status =
            checkTensor("output", info, outputs[i], backend->device());
        !status)
      return status;
    size_t rank = info.shape.size();
    if (!std::equal(sizes, sizes + rank, outputs[i].shape().begin()))
      return Status::invalidArgument(
          "output '" + info.name + "': expected shape " +
          shapeText(sizes, rank) + ", got " + shapeText(outputs[i].shape()));
    sizes += rank;
    if (outputs[i].numElements() && !hasDistinctElements(outputs[i]))
      return Status::invalidArgument(
          "output '" + info.name +
          "': expected strides that keep elements apart, got " +
          outputs[i].describe());
    auto overlap = [&](const Tensor &other, const char *kind,
                       const std::string &name) {
      return Status::invalidArgument(
          "output '" + info.name +
          "': expected memory of its own, got an overlap with " + kind + " '" +
          name + "'");
    };
    for (size_t j = 0; j < numInputs; ++j) {
      if (!meets(j))
        continue;
      if (info.updatedInput != static_cast<int>(j))
        return overlap(inputs[j], "input", function.info.inputs[j].name);
      // Nothing may be copied on the way there or back.
      if (outputs[i].data() != inputs[j].data() || !outputs[i].isContiguous() ||
          !inputs[j].isContiguous() ||
          !call.takes(outputs[i], /*isOutput=*/true) ||
          !call.takes(inputs[j], /*isOutput=*/false))
        return Status::invalidArgument(
            "output '" + info.name + "': expected all of input '" +
            function.info.inputs[j].name +
            "', contiguous and aligned, to be updated in place, or memory of "
            "its own, got " +
            outputs[i].describe() + " over " + inputs[j].describe());
    }
    size_t at = numInputs + numOutputs;
    for (const Function *user : users)
      for (size_t j = 0; user && j < user->weights.size(); ++j, ++at)
        if (meets(at))
          return overlap(weights[user->weights[j]].tensor, "weight",
                         weights[user->weights[j]].info.name);
    for (size_t j = 0; j < i; ++j)
      if (meets(numInputs + j))
        return overlap(outputs[j], "output", function.info.outputs[j].name);
  }
  return Status::ok();
}

//===----------------------------------------------------------------------===//
// Running
//===----------------------------------------------------------------------===//

/// The strides of a contiguous tensor, in the call's memory.
static const int64_t *contiguous(const std::vector<int64_t> &shape,
                                 Call &call) {
  call.strides.assign(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;)
    call.strides[i - 1] = call.strides[i] * std::max<int64_t>(shape[i], 1);
  return call.strides.data();
}

/// Fills call.pointers with descriptors of all arguments, in memory that the
/// program can use.
Status Executable::Impl::describeArguments(const Function &function,
                                           const Tensor *inputs,
                                           const Tensor *outputs, Call &call) {
  call.descriptors.clear();
  call.stagedOutputs.clear();
  Status status;
  auto append = [&](const Tensor &tensor, bool isOutput, bool anyStrides) {
    const std::vector<int64_t> &shape = tensor.shape();
    if (!status || anyStrides || call.takes(tensor, isOutput)) {
      appendDescriptor(call.descriptors, tensor.data(), shape.data(),
                       isOutput && !anyStrides ? contiguous(shape, call)
                                               : tensor.strides().data(),
                       shape.size());
      return;
    }
    void *memory = call.stage(static_cast<size_t>(tensor.numBytes()), status);
    const int64_t *strides = contiguous(shape, call);
    if (!memory)
      return;
    if (isOutput)
      call.stagedOutputs.push_back({&tensor, memory});
    else
      status =
          call.copy(memory, strides, tensor.data(), tensor.strides().data(),
                    shape.data(), shape.size(), dtypeSize(tensor.dtype()));
    appendDescriptor(call.descriptors, memory, shape.data(), strides,
                     shape.size());
  };
  for (size_t i = 0; i < function.info.inputs.size(); ++i)
    append(inputs[i], false, function.anyStrides[i]);
  for (size_t i : function.weights)
    append(weights[i].tensor, false, false);
  for (size_t i = 0; i < function.info.outputs.size(); ++i)
    append(outputs[i], true, function.outputAnyStrides[i]);
  if (!status)
    return status;
  // The descriptors no longer move: point to them.
  call.pointers.clear();
  int64_t *word = call.descriptors.data();
  auto point = [&](size_t rank) {
    call.pointers.push_back(word);
    word += 3 + 2 * rank;
  };
  for (const ArgumentInfo &info : function.info.inputs)
    point(info.shape.size());
  for (size_t i : function.weights)
    point(weights[i].info.shape.size());
  for (const ArgumentInfo &info : function.info.outputs)
    point(info.shape.size());
  return status;
}

Status Executable::Impl::execute(const Function &function, const Tensor *inputs,
                                 const Tensor *outputs, Call &call) {
  call.state.error = Status::ok();
  Status status = call.begin();
  if (status)
    status = describeArguments(function, inputs, outputs, call);
  if (status) {
    if (!device::invoke(call.state, *threads, function.invoke,
                        call.pointers.data()))
      status = Status::outOfMemory("@" + function.info.name + ": expected " +
                                   std::to_string(call.state.missingBytes) +
                                   " bytes for an intermediate, got none");
    else if (!call.state.error)
      status = Status(call.state.error.code(), "@" + function.info.name + ": " +
                                                   call.state.error.message());
  }
  for (size_t i = 0; status && i < call.stagedOutputs.size(); ++i) {
    auto [tensor, memory] = call.stagedOutputs[i];
    status =
        call.copy(tensor->data(), tensor->strides().data(), memory,
                  contiguous(tensor->shape(), call), tensor->shape().data(),
                  tensor->rank(), dtypeSize(tensor->dtype()));
  }
  Status finished = call.finish();
  if (status && !finished)
    status = Status(finished.code(),
                    "@" + function.info.name + ": " + finished.message());
  return status;
}

/// Computes the prepared weights unless they are there.
Status Executable::Impl::prepareWeights() {
  if (ready.load(std::memory_order_acquire))
    return Status::ok();
  std::lock_guard<std::mutex> lock(prepareMutex);
  if (ready.load(std::memory_order_relaxed))
    return Status::ok();
  Stopwatch watch;
  std::vector<Tensor> made;
  for (const ArgumentInfo &info : prepare->info.outputs) {
    Expected<Tensor> tensor =
        Tensor::empty(info.dtype, info.shape, backend->device());
    if (!tensor)
      return tensor.takeStatus();
    made.push_back(std::move(*tensor));
  }
  // Not kept: its intermediates may be as large as the weights.
  Expected<std::unique_ptr<Call>> call = image->create();
  if (!call)
    return call.takeStatus();
  (*call)->state.program = &program;
  if (Status status = computeShapes(*prepare, nullptr, **call); !status)
    return status;
  if (Status status = execute(*prepare, nullptr, made.data(), **call); !status)
    return status;
  for (size_t i = 0; i < made.size(); ++i) {
    weights[preparedWeights[i]].tensor = std::move(made[i]);
    weights[preparedWeights[i]].bound = true;
  }
  prepareMs = watch.lap();
  ready.store(true, std::memory_order_release);
  return Status::ok();
}

/// What a call needs before it can run, after checkInputs().
Status Executable::Impl::prepareCall(const Function &function,
                                     const Tensor *inputs, size_t numInputs,
                                     const Tensor *outputs, size_t numOutputs,
                                     Call &call) {
  if (Status status = computeShapes(function, inputs, call); !status)
    return status;
  if (usesPrepared(function)) {
    if (call.isCaptured() && !ready.load(std::memory_order_acquire))
      return Status::invalidArgument(
          "@" + function.info.name +
          ": expected prepared weights before a stream is captured, got none; "
          "run the function once before");
    if (Status status = prepareWeights(); !status)
      return status;
  }
  return checkOutputs(function, inputs, numInputs, outputs, numOutputs, call);
}

Status Executable::run(std::string_view name, const Tensor *inputs,
                       size_t numInputs, Tensor *outputs, size_t numOutputs,
                       void *stream) {
  const Function *function = impl->find(name);
  if (!function)
    return impl->notFound(name);
  if (Status status = impl->checkInputs(*function, inputs, numInputs); !status)
    return status;
  Expected<std::unique_ptr<Call>> call = impl->acquire(stream);
  if (!call)
    return call.takeStatus();
  Status status = impl->prepareCall(*function, inputs, numInputs, outputs,
                                    numOutputs, **call);
  if (status) {
    // A graph may be launched after the program is gone.
    if ((*call)->isCaptured())
      for (size_t i : function->weights)
        (*call)->keep(impl->weights[i].tensor.storage());
    status = impl->execute(*function, inputs, outputs, **call);
  }
  impl->image->release(std::move(*call));
  return status;
}

Status Executable::run(std::string_view name, const std::vector<Tensor> &inputs,
                       std::vector<Tensor> &outputs, void *stream) {
  if (!outputs.empty())
    return run(name, inputs.data(), inputs.size(), outputs.data(),
               outputs.size(), stream);
  Expected<std::vector<Tensor>> made = makeOutputs(name, inputs);
  if (!made)
    return made.takeStatus();
  if (Status status = run(name, inputs.data(), inputs.size(), made->data(),
                          made->size(), stream);
      !status)
    return status;
  outputs = std::move(*made);
  return Status::ok();
}

Expected<std::vector<std::vector<int64_t>>>
Executable::outputShapes(std::string_view name,
                         const std::vector<Tensor> &inputs) {
  const Function *function = impl->find(name);
  if (!function)
    return impl->notFound(name);
  if (Status status =
          impl->checkInputs(*function, inputs.data(), inputs.size());
      !status)
    return status;
  Expected<std::unique_ptr<Call>> call = impl->acquire(nullptr);
  if (!call)
    return call.takeStatus();
  Status status = impl->computeShapes(*function, inputs.data(), **call);
  std::vector<std::vector<int64_t>> shapes;
  const int64_t *sizes = (*call)->sizes.data();
  for (const ArgumentInfo &info : function->info.outputs) {
    shapes.emplace_back(sizes, sizes + info.shape.size());
    sizes += info.shape.size();
  }
  impl->image->release(std::move(*call));
  if (!status)
    return status;
  return shapes;
}

Expected<std::vector<Tensor>>
Executable::makeOutputs(std::string_view name,
                        const std::vector<Tensor> &inputs) {
  Expected<std::vector<std::vector<int64_t>>> shapes =
      outputShapes(name, inputs);
  if (!shapes)
    return shapes.takeStatus();
  const Function *function = impl->find(name);
  std::vector<Tensor> made;
  for (size_t i = 0; i < shapes->size(); ++i) {
    Expected<Tensor> tensor = Tensor::empty(
        function->info.outputs[i].dtype, (*shapes)[i], impl->backend->device());
    if (!tensor)
      return tensor.takeStatus();
    made.push_back(std::move(*tensor));
  }
  return made;
}

//===----------------------------------------------------------------------===//
// Captured runs
//===----------------------------------------------------------------------===//

struct CapturedRun::Impl {
  /// The run as a graph.
  struct Recording {
    std::unique_ptr<Call> call;
    /// Of Executable::Impl, when the call was captured, or found to be as
    /// choices have it.
    uint64_t changes = 0, choices = 0;
    /// Whether it is to be captured, the first time or again.
    bool isDue = true;
    /// What was bound then.
    std::vector<device::CallState::Decided> decided;
  };
  std::shared_ptr<Executable> executable;
  const Function *function = nullptr;
  std::vector<Tensor> inputs, outputs;
  Recording plain, observing;
  int repeats = 1;
  Launches launches;
  /// Launches by what observes. A policy that takes turns with others has its
  /// share of launches that observe, whatever the turns are.
  std::map<std::string, uint64_t> launchesOf;
  /// The one that counts for the choices `countedFor`; null while nothing asks
  /// for statistics.
  uint64_t *counted = nullptr;
  std::optional<uint64_t> countedFor;
  mutable std::mutex mutex;

  Status capture(Recording &recording);
  static bool isOutdated(const Recording &recording);
  Status refresh(Recording &recording);
  bool nextObserves();
  void takeStatistics();
};

CapturedRun::CapturedRun() : impl(std::make_unique<Impl>()) {}
CapturedRun::~CapturedRun() = default;

Status CapturedRun::Impl::capture(Recording &recording) {
  Executable::Impl &program = *executable->impl;
  if (!recording.call) {
    Expected<std::unique_ptr<Call>> made = program.image->create();
    if (!made)
      return made.takeStatus();
    recording.call = std::move(*made);
    recording.call->state.program = &program.program;
  }
  Call &call = *recording.call;
  uint64_t changes = program.changes, choices = program.choices;
  if (Status status =
          program.prepareCall(*function, inputs.data(), inputs.size(),
                              outputs.data(), outputs.size(), call);
      !status)
    return status;
  recording.decided.clear();
  call.state.decided = &recording.decided;
  auto body = [&] {
    Status status;
    for (int i = 0; status && i < repeats; ++i)
      status = program.execute(*function, inputs.data(), outputs.data(), call);
    return status;
  };
  if (Status status = call.capture(body, &recording == &observing); !status)
    return status;
  recording.changes = changes;
  recording.choices = choices;
  recording.isDue = false;
  return Status::ok();
}

/// Whether sites now decide otherwise.
bool CapturedRun::Impl::isOutdated(const Recording &recording) {
  return llvm::any_of(
      recording.decided, [](const device::CallState::Decided &each) {
        scheduler::Decision now =
            each.site->decide(each.batch, each.length, each.units);
        return now.chunk != each.decision.chunk ||
               now.variant != each.decision.variant;
      });
}

/// Captures it if there is reason to.
Status CapturedRun::Impl::refresh(Recording &recording) {
  const Executable::Impl &program = *executable->impl;
  uint64_t choices = program.choices;
  if (recording.isDue || recording.changes != program.changes ||
      (recording.choices != choices && isOutdated(recording)))
    return capture(recording);
  recording.choices = choices;
  return Status::ok();
}

/// Counts a launch, and says whether it observes: in its turn, if a policy
/// decides on what it sees or the program looks at its values anyway.
bool CapturedRun::Impl::nextObserves() {
  const Executable::Impl &program = *executable->impl;
  uint64_t choices = program.choices;
  if (countedFor != choices) {
    bool isAsked = false;
    std::string observers;
    for (const auto &each : program.program.observations) {
      std::shared_ptr<const scheduler::Policy> policy =
          each->target ? each->target->policy() : nullptr;
      isAsked |= !policy || policy->statistics();
      if (policy && policy->statistics())
        observers += each->name + '=' + policy->spec() + '\n';
    }
    counted = isAsked ? &launchesOf[observers] : nullptr;
    countedFor = choices;
  }
  ++launches.all;
  bool observes = counted && (*counted)++ % kLaunchesPerObservation == 0;
  launches.observing += observes;
  return observes;
}

/// Hands on what the last launch that observed has seen, if it is there, and
/// has everything captured again if policies now choose otherwise.
void CapturedRun::Impl::takeStatistics() {
  if (observing.call && observing.call->publish() && isOutdated(plain))
    plain.isDue = observing.isDue = true;
}

Status CapturedRun::launch(void *stream) {
  std::lock_guard<std::mutex> lock(impl->mutex);
  impl->takeStatistics();
  Impl::Recording &recording =
      impl->nextObserves() ? impl->observing : impl->plain;
  if (Status status = impl->refresh(recording); !status)
    return status;
  return recording.call->launch(stream);
}

Status CapturedRun::update() {
  std::lock_guard<std::mutex> lock(impl->mutex);
  impl->observing.isDue = true;
  return impl->capture(impl->plain);
}

size_t CapturedRun::numNodes() const { return impl->plain.call->numNodes(); }
uint64_t CapturedRun::instantiations() const {
  return impl->plain.call->instantiations();
}
CapturedRun::Launches CapturedRun::launches() const {
  std::lock_guard<std::mutex> lock(impl->mutex);
  return impl->launches;
}
const std::vector<Tensor> &CapturedRun::outputs() const {
  return impl->outputs;
}

Expected<std::shared_ptr<CapturedRun>>
Executable::capture(std::string_view name, const std::vector<Tensor> &inputs,
                    const std::vector<Tensor> &outputs, int repeats) {
  if (repeats < 1)
    return Status::invalidArgument("expected at least 1 run to capture, got " +
                                   std::to_string(repeats));
  const Function *function = impl->find(name);
  if (!function)
    return impl->notFound(name);
  if (Status status =
          impl->checkInputs(*function, inputs.data(), inputs.size());
      !status)
    return status;
  std::shared_ptr<CapturedRun> run(new CapturedRun);
  run->impl->executable = shared_from_this();
  run->impl->function = function;
  run->impl->inputs = inputs;
  run->impl->repeats = repeats;
  run->impl->outputs = outputs;
  if (outputs.empty()) {
    Expected<std::vector<Tensor>> made = makeOutputs(name, inputs);
    if (!made)
      return made.takeStatus();
    run->impl->outputs = std::move(*made);
  }
  if (Status status = run->impl->capture(run->impl->plain); !status)
    return status;
  return run;
}

//===----------------------------------------------------------------------===//
// Chunks and explanations
//===----------------------------------------------------------------------===//

static Status noSite(const device::ProgramState &program,
                     const std::string &name, std::string_view got) {
  std::string known;
  for (auto &site : program.chunks)
    known += (known.empty() ? "" : ", ") + site->info().name;
  return Status::notFound("expected a chunk site of " + name + " (" +
                          (known.empty() ? "it has none" : known) + "), got '" +
                          std::string(got) + "'");
}

Status Executable::setChunk(std::string_view name, int64_t chunk) {
  if (chunk < 0)
    return Status::invalidArgument(
        "site '" + std::string(name) +
        "': expected a chunk of at least 1 token, or 0 for the policy's, got " +
        std::to_string(chunk));
  scheduler::Site *site = impl->program.findChunk(name);
  if (!site)
    return noSite(impl->program, impl->name, name);
  site->setChunk(chunk);
  ++impl->choices;
  return Status::ok();
}

Status Executable::setVariant(std::string_view name, std::string_view variant) {
  scheduler::Site *site = impl->program.findChunk(name);
  if (!site)
    return noSite(impl->program, impl->name, name);
  std::string known;
  const std::vector<scheduler::Variant> &variants = site->info().variants;
  int found = variant.empty() ? -1 : static_cast<int>(variants.size());
  for (size_t i = 0; i < variants.size(); ++i) {
    known += (known.empty() ? "" : ", ") + variants[i].name;
    if (variants[i].name == variant)
      found = static_cast<int>(i);
  }
  if (found == static_cast<int>(variants.size()))
    return Status::notFound("site '" + std::string(name) +
                            "': expected a variant of " + known + ", got '" +
                            std::string(variant) + "'");
  site->setVariant(found);
  ++impl->choices;
  return Status::ok();
}

Status Executable::setPolicy(std::string_view name, std::string_view spec) {
  auto policy = scheduler::parsePolicy(spec, impl->policies);
  if (!policy)
    return policy.takeStatus();
  std::vector<scheduler::Site *> sites;
  if (name.empty())
    for (auto &site : impl->program.chunks)
      sites.push_back(site.get());
  else if (scheduler::Site *site = impl->program.findChunk(name))
    sites.push_back(site);
  else
    return noSite(impl->program, impl->name, name);
  if (std::optional<scheduler::EstimatorOptions> wanted =
          (*policy)->statistics())
    for (scheduler::Site *site : sites) {
      auto it = impl->program.observationIndex.find(site->info().name);
      if (it == impl->program.observationIndex.end())
        return Status::invalidArgument(
            "site '" + site->info().name +
            "': expected a policy without "
            "statistics, as the program gathers none there, got '" +
            std::string(spec) + "'; compile with it");
      const scheduler::EstimatorOptions &has =
          impl->program.observations[it->second]->options;
      if (has.sampling != wanted->sampling || has.stride != wanted->stride ||
          has.bins != wanted->bins || has.layerStride != wanted->layerStride)
        return Status::invalidArgument(
            "site '" + site->info().name +
            "': expected a policy on the "
            "statistics that the program gathers there, got '" +
            std::string(spec) + "', which wants others; compile with it");
    }
  for (scheduler::Site *site : sites)
    site->setPolicy(*policy);
  ++impl->choices;
  return Status::ok();
}

std::vector<ChunkInfo> Executable::chunks() const {
  std::vector<ChunkInfo> list;
  for (auto &site : impl->program.chunks) {
    scheduler::Site::Report report = site->report();
    ChunkInfo info;
    info.site = site->info().name;
    info.requested = report.requested;
    info.batch = report.batch;
    info.length = report.length;
    info.policy = report.policy;
    std::string by = "policy " + report.policy;
    if (!report.decisions) {
      info.reason = report.requested > 0 ? "set by the caller" : by;
      list.push_back(info);
      continue;
    }
    const scheduler::Decision &decision = report.decision;
    info.chunk = decision.chunk;
    info.variant = site->info().variants[decision.variant].name;
    info.predictedMs = decision.predictedMs;
    info.usedData = decision.usedData;
    switch (decision.reason) {
    case scheduler::Reason::Requested:
      info.reason = decision.explain();
      break;
    case scheduler::Reason::Unsplit:
    case scheduler::Reason::Static:
      info.reason = by;
      break;
    default:
      info.reason = by + ": " + decision.explain();
    }
    list.push_back(info);
  }
  return list;
}

std::vector<ObservationInfo> Executable::observations() const {
  std::vector<ObservationInfo> list;
  for (const auto &site : impl->program.observations) {
    std::lock_guard<std::mutex> lock(site->mutex);
    if (!site->calls)
      continue;
    const scheduler::Statistics &last = site->last;
    ObservationInfo info;
    info.site = site->name;
    info.calls = site->calls;
    info.count = site->count;
    info.nonFinite = site->nonFinite;
    info.min = site->min;
    info.max = site->max;
    info.mean = site->mean;
    info.variance =
        site->count ? site->m2 / static_cast<double>(site->count) : 0;
    info.validity = scheduler::validityName(last.validity);
    if (last.count)
      info.entropy = last.entropy.value();
    if (!site->entropy.empty())
      info.averageEntropy = site->entropy.value();
    info.bins = last.bins;
    info.kurtosis = last.kurtosis;
    info.outlierFraction = last.outlierFraction;
    info.peakToRms = last.peakToRms;
    info.milliseconds = site->lastMs;
    list.push_back(info);
  }
  return list;
}

const std::vector<PhaseTime> &Executable::compileTimes() const {
  return impl->times;
}

const CacheInfo &Executable::cache() const { return impl->cache; }

const TrafficInfo &Executable::traffic() const { return impl->traffic; }

std::pair<size_t, size_t> Executable::memoryUse() const {
  return impl->image->memoryUse();
}

std::string Executable::explain() const {
  std::string text;
  llvm::raw_string_ostream os(text);
  os << impl->name << ": compiled for " << impl->backend->description() << ", "
     << *impl->threads << (*impl->threads == 1 ? " thread\n" : " threads\n")
     << "compile:";
  double total = 0;
  for (const PhaseTime &time : impl->times) {
    os << llvm::formatv(" {0} {1:f1} ms,", time.phase, time.milliseconds);
    total += time.milliseconds;
  }
  os << llvm::formatv(" total {0:f1} ms\n", total);
  switch (const CacheInfo &cache = impl->cache; cache.outcome) {
  case CacheInfo::Off:
    os << "cache: off\n";
    break;
  case CacheInfo::Missing:
    os << "cache: not stored\n";
    break;
  case CacheInfo::Stored:
    os << "cache: stored as " << cache.path << "\n";
    break;
  case CacheInfo::Loaded:
    os << "cache: loaded from " << cache.path << "\n";
    break;
  }
  if (!impl->cache.problem.empty())
    os << "cache: " << impl->cache.problem << "\n";
  const TrafficInfo &traffic = impl->traffic;
  os << llvm::formatv(
      "kernels: {0}, moving {1:f1} MB and keeping {2:f1} MB from "
      "memory (a dynamic size counts as 1024)\n",
      traffic.kernels, traffic.bytes() * 1e-6, traffic.bytesKept * 1e-6);
  os << impl->image->explain();
  if (impl->prepare) {
    std::lock_guard<std::mutex> lock(impl->prepareMutex);
    size_t count = impl->preparedWeights.size();
    os << "prepared " << count << (count == 1 ? " weight" : " weights");
    if (impl->ready)
      os << llvm::formatv(" in {0:f1} ms\n", impl->prepareMs);
    else
      os << ": not run yet\n";
  }
  for (const ChunkInfo &info : chunks()) {
    os << "chunk " << info.site << ": ";
    if (info.chunk)
      os << info.chunk << " tokens for batch " << info.batch << ", length "
         << info.length
         << (info.variant == scheduler::Variant().name
                 ? ""
                 : ", variant " + info.variant)
         << " (" << info.reason << ")\n";
    else
      os << "not run yet (" << info.reason << ")\n";
  }
  for (const ObservationInfo &o : observations())
    os << llvm::formatv("observed {0}: {1} values, {2} not finite, min {3:g}, "
                        "max {4:g}, mean {5:g}, "
                        "variance {6:g}; last call: {7}, entropy {8:f4} nats "
                        "of {9} bins in {10:f3} ms\n",
                        o.site, o.count, o.nonFinite, o.min, o.max, o.mean,
                        o.variance, o.validity, o.entropy, o.bins,
                        o.milliseconds);
  auto [bytes, requests] = memoryUse();
  os << "memory: " << bytes << " bytes of intermediates in " << requests
     << " blocks\n";
  return text;
}
