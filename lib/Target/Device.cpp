//===- Device.cpp - Machine code of a program's kernels -------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Target/Device.h"
#include "corey/Conversion/SSMToGPU/SSMToGPU.h"
#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/LLVMIR/NVVMDialect.h"
#include "mlir/Target/LLVMIR/Export.h"
#include "llvm/IR/InstIterator.h"
#include "llvm/IR/IntrinsicInst.h"
#include "llvm/IR/IntrinsicsNVPTX.h"
#include "llvm/IR/LegacyPassManager.h"
#include "llvm/IR/Module.h"
#include "llvm/MC/TargetRegistry.h"
#include "llvm/Passes/PassBuilder.h"
#include "llvm/Support/FileSystem.h"
#include "llvm/Support/FileUtilities.h"
#include "llvm/Support/MemoryBuffer.h"
#include "llvm/Support/Path.h"
#include "llvm/Support/Process.h"
#include "llvm/Support/Program.h"
#include "llvm/Support/TargetSelect.h"
#include "llvm/Target/TargetMachine.h"
#include "llvm/TargetParser/Triple.h"
#include "llvm/Transforms/Utils/BasicBlockUtils.h"
#include <atomic>
#include <thread>

using namespace corey;

extern "C" void LLVMInitializeNVPTXTargetInfo();
extern "C" void LLVMInitializeNVPTXTarget();
extern "C" void LLVMInitializeNVPTXTargetMC();
extern "C" void LLVMInitializeNVPTXAsmPrinter();

static llvm::Error failure(const llvm::Twine &message) {
  return llvm::createStringError(message);
}

llvm::Expected<std::string> corey::parseChip(llvm::StringRef text) {
  llvm::StringRef rest = text;
  unsigned number = 0;
  bool ok = rest.consume_front("sm_") && !rest.consumeInteger(10, number) &&
            (rest.empty() || rest == "a" || rest == "f");
  if (!ok || number < 80)
    return failure("expected a chip of at least sm_80, such as sm_90a, got '" +
                   text + "'");
  return text.str();
}

static llvm::Expected<std::unique_ptr<llvm::TargetMachine>>
createDeviceTargetMachine(llvm::StringRef chip) {
  static const bool initialized = [] {
    LLVMInitializeNVPTXTargetInfo();
    LLVMInitializeNVPTXTarget();
    LLVMInitializeNVPTXTargetMC();
    LLVMInitializeNVPTXAsmPrinter();
    return true;
  }();
  (void)initialized;
  llvm::Triple triple("nvptx64-nvidia-cuda");
  std::string error;
  const llvm::Target *target =
      llvm::TargetRegistry::lookupTarget(triple, error);
  if (!target)
    return failure("no NVPTX back end: " + error);
  // No features: the oldest PTX that knows the chip, which most drivers take.
  // The next level up runs GVN twice more, for a third of the compile time, and
  // writes the same PTX but for a few comparisons: optimizeKernels() has run
  // it.
  return std::unique_ptr<llvm::TargetMachine>(target->createTargetMachine(
      triple, chip, "", llvm::TargetOptions(), std::nullopt, std::nullopt,
      llvm::CodeGenOptLevel::Default));
}

static void optimizeKernels(llvm::Module &module, llvm::TargetMachine &machine,
                            unsigned level) {
  llvm::LoopAnalysisManager loops;
  llvm::FunctionAnalysisManager functions;
  llvm::CGSCCAnalysisManager sccs;
  llvm::ModuleAnalysisManager modules;
  llvm::PipelineTuningOptions tuning;
  // Emitters unroll what they want unrolled.
  tuning.LoopUnrolling = false;
  tuning.LoopVectorization = false;
  tuning.SLPVectorization = false;
  llvm::PassBuilder builder(&machine, tuning);
  builder.registerModuleAnalyses(modules);
  builder.registerCGSCCAnalyses(sccs);
  builder.registerFunctionAnalyses(functions);
  builder.registerLoopAnalyses(loops);
  builder.crossRegisterProxies(loops, functions, sccs, modules);
  static constexpr const llvm::OptimizationLevel *levels[] = {
      &llvm::OptimizationLevel::O0, &llvm::OptimizationLevel::O1,
      &llvm::OptimizationLevel::O2, &llvm::OptimizationLevel::O3};
  const llvm::OptimizationLevel &chosen = *levels[std::min(level, 3u)];
  llvm::ModulePassManager passes =
      level == 0 ? builder.buildO0DefaultPipeline(chosen)
                 : builder.buildPerModuleDefaultPipeline(chosen);
  passes.run(module, modules);
}

/// Loads of memory that a kernel does not write are ordered with nothing in a
/// block of code, not even with the wait for the kernels that write it. So the
/// wait ends its block.
static void endBlocksAtWaits(llvm::Module &module) {
  for (llvm::Function &function : module) {
    llvm::SmallVector<llvm::Instruction *> waits;
    for (llvm::Instruction &instruction : llvm::instructions(function))
      if (auto *call = llvm::dyn_cast<llvm::IntrinsicInst>(&instruction))
        if (call->getIntrinsicID() == llvm::Intrinsic::nvvm_griddepcontrol_wait)
          waits.push_back(call);
    for (llvm::Instruction *wait : waits)
      llvm::SplitBlock(wait->getParent(), wait->getNextNode());
  }
}

/// Inline PTX speaks for all threads of a warp or more: it must not move to
/// where some of them do not come.
static void keepInlineCodeConvergent(llvm::Module &module) {
  for (llvm::Function &function : module)
    for (llvm::Instruction &instruction : llvm::instructions(function))
      if (auto *call = llvm::dyn_cast<llvm::CallInst>(&instruction))
        if (call->isInlineAsm() && !call->onlyReadsMemory())
          call->setConvergent();
}

/// A module of kernels, alone in its context, and what compiles it.
namespace {
struct DeviceModule {
  std::unique_ptr<llvm::LLVMContext> context;
  std::unique_ptr<llvm::Module> module;
  std::unique_ptr<llvm::TargetMachine> machine;

  /// Optimized PTX, or an empty string if the back end refuses.
  std::string compile(unsigned level) {
    keepInlineCodeConvergent(*module);
    optimizeKernels(*module, *machine, level);
    endBlocksAtWaits(*module);
    llvm::SmallString<0> text;
    llvm::raw_svector_ostream os(text);
    llvm::legacy::PassManager codegen;
    if (machine->addPassesToEmitFile(codegen, os, nullptr,
                                     llvm::CodeGenFileType::AssemblyFile))
      return "";
    codegen.run(*module);
    return text.str().str();
  }
};
} // namespace

static llvm::Error cannotEmit() {
  return failure("the NVPTX back end cannot write assembly");
}

static llvm::Expected<DeviceModule> translate(mlir::Operation *kernels,
                                              llvm::StringRef chip) {
  DeviceModule device;
  auto machine = createDeviceTargetMachine(chip);
  if (!machine)
    return machine.takeError();
  device.machine = std::move(*machine);
  device.context = std::make_unique<llvm::LLVMContext>();
  device.module =
      mlir::translateModuleToLLVMIR(kernels, *device.context, "kernels");
  if (!device.module)
    return failure("translation of kernels to LLVM IR failed");
  device.module->setTargetTriple(device.machine->getTargetTriple());
  device.module->setDataLayout(device.machine->createDataLayout());
  return device;
}

/// The kernels of `module`, no longer in it, with their chip; null if it has
/// none.
static llvm::Expected<mlir::OwningOpRef<mlir::gpu::GPUModuleOp>>
takeKernels(mlir::ModuleOp module, std::string &chip) {
  module->removeAttr(mlir::gpu::GPUDialect::getContainerModuleAttrName());
  auto kernels = module.lookupSymbol<mlir::gpu::GPUModuleOp>(kKernelModule);
  if (!kernels)
    return mlir::OwningOpRef<mlir::gpu::GPUModuleOp>();
  chip = "sm_90a";
  if (mlir::ArrayAttr targets = kernels.getTargetsAttr())
    for (mlir::Attribute target : targets)
      if (auto nvvm = llvm::dyn_cast<mlir::NVVM::NVVMTargetAttr>(target))
        chip = nvvm.getChip().str();
  llvm::Expected<std::string> parsed = parseChip(chip);
  if (!parsed)
    return parsed.takeError();
  kernels->remove();
  return mlir::OwningOpRef<mlir::gpu::GPUModuleOp>(kernels);
}

llvm::Expected<std::string> corey::takePTX(mlir::ModuleOp module,
                                           unsigned optLevel) {
  module->removeAttr(kKernelsAttr);
  std::string chip;
  auto kernels = takeKernels(module, chip);
  if (!kernels)
    return kernels.takeError();
  if (!*kernels)
    return std::string();
  auto device = translate(kernels->get(), chip);
  if (!device)
    return device.takeError();
  std::string ptx = device->compile(optLevel);
  if (ptx.empty())
    return cannotEmit();
  return ptx;
}

llvm::Expected<DeviceImage> corey::takeDeviceImage(mlir::ModuleOp module,
                                                   unsigned optLevel,
                                                   unsigned threads) {
  DeviceImage image;
  if (auto names = module->getAttrOfType<mlir::ArrayAttr>(kKernelsAttr))
    for (mlir::Attribute name : names)
      image.kernels.push_back({llvm::cast<mlir::StringAttr>(name).str(), ""});
  module->removeAttr(kKernelsAttr);
  auto kernels = takeKernels(module, image.chip);
  if (!kernels)
    return kernels.takeError();
  if (!*kernels)
    return image;
  // Translation reads the MLIR context and takes turns; the rest does not.
  std::vector<DeviceModule> devices;
  for (DeviceImage::Kernel &kernel : image.kernels) {
    mlir::OpBuilder builder(module.getContext());
    mlir::OwningOpRef<mlir::gpu::GPUModuleOp> alone(
        mlir::gpu::GPUModuleOp::create(builder, (*kernels)->getLoc(),
                                       kKernelModule));
    builder.setInsertionPointToStart(alone->getBody());
    auto function =
        (*kernels)->lookupSymbol<mlir::LLVM::LLVMFuncOp>(kernel.name);
    if (!function)
      return failure("expected a kernel called '" + kernel.name +
                     "', got none");
    // With what it refers to: its shared memory.
    function.walk([&](mlir::LLVM::AddressOfOp op) {
      if (!alone->lookupSymbol(op.getGlobalName()))
        builder.clone(*(*kernels)->lookupSymbol(op.getGlobalName()));
    });
    builder.clone(*function);
    auto device = translate(alone.get(), image.chip);
    if (!device)
      return device.takeError();
    devices.push_back(std::move(*device));
  }
  std::atomic<size_t> next{0};
  auto work = [&] {
    for (size_t i; (i = next++) < devices.size();) {
      image.kernels[i].code = devices[i].compile(optLevel);
      // Early, as they are large; a module before its context.
      devices[i].module.reset();
      devices[i].context.reset();
    }
  };
  std::vector<std::thread> pool;
  for (size_t i = 1; i < std::min<size_t>(threads, devices.size()); ++i)
    pool.emplace_back(work);
  work();
  for (std::thread &thread : pool)
    thread.join();
  for (const DeviceImage::Kernel &kernel : image.kernels)
    if (kernel.code.empty())
      return cannotEmit();
  return image;
}

//===----------------------------------------------------------------------===//
// Machine code
//===----------------------------------------------------------------------===//

static llvm::Expected<std::string> findAssembler(llvm::StringRef assembler) {
  std::string given = assembler.str();
  if (given.empty())
    given = llvm::sys::Process::GetEnv("PTXAS").value_or("");
  if (!given.empty()) {
    // A path comes back as it is.
    if (auto program = llvm::sys::findProgramByName(given);
        program && llvm::sys::fs::can_execute(*program))
      return *program;
    return failure("expected ptxas at '" + given + "', got no such program");
  }
  std::vector<std::string> folders;
  if (auto home = llvm::sys::Process::GetEnv("CUDA_HOME"))
    folders.push_back(*home + "/bin");
  folders.push_back("/usr/local/cuda/bin");
  if (auto program = llvm::sys::findProgramByName("ptxas"))
    return *program;
  std::string places = "on PATH";
  for (const std::string &folder : folders) {
    if (auto program = llvm::sys::findProgramByName("ptxas", {folder}))
      return *program;
    places += ", in " + folder;
  }
  return failure("expected NVIDIA's ptxas for machine code, got none " +
                 places + "; PTXAS may name it");
}

llvm::Expected<std::string> corey::assemble(llvm::StringRef ptx,
                                            llvm::StringRef chip,
                                            llvm::StringRef assembler) {
  llvm::Expected<std::string> program = findAssembler(assembler);
  if (!program)
    return program.takeError();
  llvm::SmallString<128> input, output, log;
  for (auto [path, suffix] :
       {std::pair<llvm::SmallString<128> *, const char *>{&input, "ptx"},
        {&output, "cubin"},
        {&log, "log"}})
    if (std::error_code code =
            llvm::sys::fs::createTemporaryFile("corey", suffix, *path))
      return failure("expected a temporary file for ptxas, got none: " +
                     code.message());
  llvm::FileRemover removers[] = {llvm::FileRemover(input),
                                  llvm::FileRemover(output),
                                  llvm::FileRemover(log)};
  std::error_code code;
  {
    llvm::raw_fd_ostream os(input, code);
    if (!code)
      os << ptx;
    os.close();
    if (os.has_error())
      code = os.error();
  }
  if (code)
    return failure(input + ": " + code.message());
  std::string arch = ("-arch=" + chip).str(), message;
  std::optional<llvm::StringRef> redirects[] = {std::nullopt, log.str(),
                                                log.str()};
  int result = llvm::sys::ExecuteAndWait(
      *program, {*program, arch, "-O3", input, "-o", output}, std::nullopt,
      redirects, 0, 0, &message);
  if (result) {
    if (auto text = llvm::MemoryBuffer::getFile(log); message.empty() && text)
      message = (*text)->getBuffer().trim().str();
    return failure(*program + " failed" +
                   (message.empty() ? "" : ": " + message));
  }
  auto cubin = llvm::MemoryBuffer::getFile(output, /*IsText=*/false,
                                           /*RequiresNullTerminator=*/false);
  if (!cubin)
    return failure(output + ": " + cubin.getError().message());
  if (!(*cubin)->getBuffer().starts_with("\x7f"
                                         "ELF"))
    return failure("expected a cubin from " + *program + ", got " +
                   llvm::Twine((*cubin)->getBufferSize()) + " other bytes");
  return (*cubin)->getBuffer().str();
}
