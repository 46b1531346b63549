//===- Pipelines.cpp - Named pipelines ------------------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Pipelines/Pipelines.h"
#include "corey/Conversion/SSMToGPU/SSMToGPU.h"
#include "corey/Conversion/SSMToLinalg/SSMToLinalg.h"
#include "corey/Dialect/SSM/Transforms/Passes.h"
#include "mlir/Conversion/AffineToStandard/AffineToStandard.h"
#include "mlir/Conversion/ConvertToLLVM/ToLLVMPass.h"
#include "mlir/Conversion/GPUToNVVM/GPUToNVVMPass.h"
#include "mlir/Conversion/ReconcileUnrealizedCasts/ReconcileUnrealizedCasts.h"
#include "mlir/Conversion/SCFToControlFlow/SCFToControlFlow.h"
#include "mlir/Conversion/SCFToOpenMP/SCFToOpenMP.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/Linalg/Passes.h"
#include "mlir/Dialect/MemRef/Transforms/Passes.h"
#include "mlir/Pass/PassRegistry.h"
#include "mlir/Transforms/Passes.h"

using namespace mlir;
using namespace corey;

/// The phases that are the same for every target, up to Bound.
template <typename Options>
static void addProgramPhase(OpPassManager &pm, const Options &options,
                            StringRef machine, Phase phase) {
  switch (phase) {
  case Phase::Captured:
    pm.addPass(createInlinerPass());
    pm.addPass(createSymbolDCEPass());
    pm.addPass(createCanonicalizerPass());
    pm.addPass(createCSEPass());
    return;
  case Phase::Fused: {
    if (options.observeValues)
      pm.addNestedPass<func::FuncOp>(ssm::createSSMObserveValues());
    // Work on weights first: it is no neighbour of anything that runs per call.
    if (options.hoistWeights)
      pm.addPass(ssm::createSSMHoistWeights());
    ssm::SSMFuseOptions fuse;
    fuse.strategy = options.fusion;
    fuse.score = options.fusion == "dp" ? "physical" : "paper";
    fuse.machine = machine.str();
    pm.addNestedPass<func::FuncOp>(ssm::createSSMFuse(fuse));
    return;
  }
  case Phase::Bound: {
    ssm::SSMBindChunksOptions bind;
    bind.policy = options.policy;
    bind.observe = options.observe;
    pm.addPass(ssm::createSSMBindChunks(bind));
    pm.addPass(ssm::createSSMWeightsToArguments());
    pm.addPass(ssm::createSSMAnyStrides());
    pm.addPass(ssm::createSSMShapeFunctions());
    return;
  }
  default:
    llvm_unreachable("expected a phase before lowering");
  }
}

/// Host code on memrefs to the LLVM dialect.
static void addHostToLLVM(OpPassManager &pm, bool onDevice) {
  pm.addNestedPass<func::FuncOp>(memref::createExpandStridedMetadataPass());
  pm.addNestedPass<func::FuncOp>(createLowerAffinePass());
  pm.addNestedPass<func::FuncOp>(createSCFToControlFlowPass());
  pm.addPass(createConvertToLLVMPass());
  pm.addPass(createReconcileUnrealizedCastsPass());
  RuntimeAllocationOptions allocation;
  allocation.onDevice = onDevice;
  pm.addPass(createRuntimeAllocation(allocation));
}

static void addPhase(OpPassManager &pm, const CPUPipelineOptions &options,
                     Phase phase) {
  switch (phase) {
  case Phase::Captured:
  case Phase::Fused:
  case Phase::Bound:
    return addProgramPhase(pm, options, "cpu", phase);
  case Phase::Lowered: {
    ConvertSSMToLinalgOptions convert;
    convert.vectorBits = options.vectorBits;
    pm.addPass(createConvertSSMToLinalg(convert));
    // What fused kernels have computed is dead. Equal ops must stay apart: the
    // memref that one kernel reads a tensor from is no longer that tensor for a
    // later one, if what is between them writes to it in place.
    pm.addPass(createCanonicalizerPass());
    return;
  }
  case Phase::Buffers:
    pm.addPass(createBufferize());
    pm.addNestedPass<func::FuncOp>(createInsertDeallocations());
    pm.addNestedPass<func::FuncOp>(createConvertLinalgToParallelLoopsPass());
    pm.addNestedPass<func::FuncOp>(createSerializeInnerLoops());
    pm.addPass(createCanonicalizerPass());
    pm.addPass(createCSEPass());
    return;
  case Phase::LLVM: {
    pm.addPass(createOutlineRepeats());
    pm.addPass(createOutlineEqualLoops());
    ExpandScalarMathOptions expand;
    expand.vectorBits = options.vectorBits;
    pm.addPass(createExpandScalarMath(expand));
    pm.addPass(createConvertSCFToOpenMPPass());
    pm.addPass(createGuardParallelRegions());
    addHostToLLVM(pm, /*onDevice=*/false);
    return;
  }
  }
}

static void addGPUPhase(OpPassManager &pm, const GPUPipelineOptions &options,
                        Phase phase) {
  switch (phase) {
  case Phase::Captured:
  case Phase::Fused:
  case Phase::Bound:
    return addProgramPhase(pm, options, "h200", phase);
  case Phase::Lowered: {
    ConvertSSMToGPUOptions convert;
    convert.chip = options.chip;
    convert.multiprocessors = options.multiprocessors;
    pm.addPass(createConvertSSMToGPU(convert));
    // As on the CPU: what fused kernels have computed is dead, equal ops stay.
    // Kernels have many more ops than the host, and are cleaned up once.
    pm.addNestedPass<func::FuncOp>(createCanonicalizerPass());
    return;
  }
  case Phase::Buffers: {
    BufferizeOptions bufferize;
    bufferize.keepCopies = true;
    pm.addPass(createBufferize(bufferize));
    pm.addNestedPass<func::FuncOp>(createInsertDeallocations());
    pm.addNestedPass<func::FuncOp>(createCanonicalizerPass());
    pm.addNestedPass<func::FuncOp>(createCSEPass());
    return;
  }
  case Phase::LLVM: {
    pm.addPass(createOutlineRepeats());
    pm.addPass(createLowerLaunches());
    OpPassManager &kernels = pm.nest<gpu::GPUModuleOp>();
    kernels.addPass(createExpandKernelMath());
    kernels.addPass(createCanonicalizerPass());
    kernels.addPass(createCSEPass());
    kernels.addPass(createSCFToControlFlowPass());
    kernels.addPass(createConvertGpuOpsToNVVMOps());
    kernels.addPass(createReconcileUnrealizedCastsPass());
    addHostToLLVM(pm, /*onDevice=*/true);
    return;
  }
  }
}

void corey::buildCPUPipeline(OpPassManager &pm,
                             const CPUPipelineOptions &options, Phase first,
                             Phase last) {
  for (int phase = static_cast<int>(first); phase <= static_cast<int>(last);
       ++phase)
    addPhase(pm, options, static_cast<Phase>(phase));
}

void corey::buildGPUPipeline(OpPassManager &pm,
                             const GPUPipelineOptions &options, Phase first,
                             Phase last) {
  for (int phase = static_cast<int>(first); phase <= static_cast<int>(last);
       ++phase)
    addGPUPhase(pm, options, static_cast<Phase>(phase));
}

void corey::registerPipelines() {
  PassPipelineRegistration<CPUPipelineOptions>(
      "corey-cpu-pipeline",
      "Lower ssm functions to the LLVM dialect for the CPU: bind chunks, pass "
      "weights as arguments, add shape functions, lower to loops over vectors, "
      "bufferize, run outer loops through OpenMP",
      [](OpPassManager &pm, const CPUPipelineOptions &options) {
        buildCPUPipeline(pm, options);
      });
  PassPipelineRegistration<GPUPipelineOptions>(
      "corey-gpu-pipeline",
      "Lower ssm functions to the LLVM and NVVM dialects for a GPU: bind "
      "chunks, "
      "pass weights as arguments, add shape functions, make kernels, "
      "bufferize, "
      "launch through the run-time library",
      [](OpPassManager &pm, const GPUPipelineOptions &options) {
        buildGPUPipeline(pm, options);
      });
}
