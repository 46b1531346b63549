//===- Device.cpp - PTX of a program's kernels ----------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Target/Device.h"
#include "corey/Conversion/SSMToGPU/SSMToGPU.h"
#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/LLVMIR/NVVMDialect.h"
#include "mlir/Target/LLVMIR/Export.h"
#include "llvm/IR/LegacyPassManager.h"
#include "llvm/IR/Module.h"
#include "llvm/MC/TargetRegistry.h"
#include "llvm/Passes/PassBuilder.h"
#include "llvm/Support/TargetSelect.h"
#include "llvm/Target/TargetMachine.h"
#include "llvm/TargetParser/Triple.h"

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
  return std::unique_ptr<llvm::TargetMachine>(target->createTargetMachine(
      triple, chip, "", llvm::TargetOptions(), std::nullopt, std::nullopt,
      llvm::CodeGenOptLevel::Aggressive));
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

llvm::Expected<DeviceImage> corey::takeDeviceImage(mlir::ModuleOp module,
                                                   unsigned optLevel) {
  DeviceImage image;
  if (auto names = module->getAttrOfType<mlir::ArrayAttr>(kKernelsAttr))
    for (mlir::Attribute name : names)
      image.kernels.push_back(llvm::cast<mlir::StringAttr>(name).str());
  module->removeAttr(kKernelsAttr);
  module->removeAttr(mlir::gpu::GPUDialect::getContainerModuleAttrName());
  auto kernels = module.lookupSymbol<mlir::gpu::GPUModuleOp>(kKernelModule);
  if (!kernels)
    return image;
  image.chip = "sm_90a";
  if (mlir::ArrayAttr targets = kernels.getTargetsAttr())
    for (mlir::Attribute target : targets)
      if (auto nvvm = llvm::dyn_cast<mlir::NVVM::NVVMTargetAttr>(target))
        image.chip = nvvm.getChip().str();
  llvm::Expected<std::string> chip = parseChip(image.chip);
  if (!chip)
    return chip.takeError();
  auto machine = createDeviceTargetMachine(*chip);
  if (!machine)
    return machine.takeError();
  llvm::LLVMContext context;
  std::unique_ptr<llvm::Module> device =
      mlir::translateModuleToLLVMIR(kernels, context, "kernels");
  if (!device)
    return failure("translation of kernels to LLVM IR failed");
  kernels.erase();
  device->setTargetTriple((*machine)->getTargetTriple());
  device->setDataLayout((*machine)->createDataLayout());
  optimizeKernels(*device, **machine, optLevel);
  llvm::SmallString<0> text;
  llvm::raw_svector_ostream os(text);
  llvm::legacy::PassManager codegen;
  if ((*machine)->addPassesToEmitFile(codegen, os, nullptr,
                                      llvm::CodeGenFileType::AssemblyFile))
    return failure("the NVPTX back end cannot write assembly");
  codegen.run(*device);
  image.ptx = text.str().str();
  return image;
}
