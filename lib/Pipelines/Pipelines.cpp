//===- Pipelines.cpp - Named pipelines ------------------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Pipelines/Pipelines.h"
#include "corey/Conversion/SSMToLinalg/SSMToLinalg.h"
#include "corey/Dialect/SSM/Transforms/Passes.h"
#include "mlir/Conversion/AffineToStandard/AffineToStandard.h"
#include "mlir/Conversion/ConvertToLLVM/ToLLVMPass.h"
#include "mlir/Conversion/ReconcileUnrealizedCasts/ReconcileUnrealizedCasts.h"
#include "mlir/Conversion/SCFToControlFlow/SCFToControlFlow.h"
#include "mlir/Conversion/SCFToOpenMP/SCFToOpenMP.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/Linalg/Passes.h"
#include "mlir/Dialect/MemRef/Transforms/Passes.h"
#include "mlir/Pass/PassRegistry.h"
#include "mlir/Transforms/Passes.h"

using namespace mlir;
using namespace corey;

static void addPhase(OpPassManager &pm, const CPUPipelineOptions &options,
                     CPUPhase phase) {
  switch (phase) {
  case CPUPhase::Captured:
    pm.addPass(createInlinerPass());
    pm.addPass(createSymbolDCEPass());
    pm.addPass(createCanonicalizerPass());
    pm.addPass(createCSEPass());
    return;
  case CPUPhase::Fused: {
    if (options.observeValues)
      pm.addNestedPass<func::FuncOp>(ssm::createSSMObserveValues());
    // Work on weights first: it is no neighbour of anything that runs per call.
    if (options.hoistWeights)
      pm.addPass(ssm::createSSMHoistWeights());
    ssm::SSMFuseOptions fuse;
    fuse.strategy = options.fusion;
    fuse.score = options.fusion == "dp" ? "physical" : "paper";
    fuse.machine = "cpu";
    pm.addNestedPass<func::FuncOp>(ssm::createSSMFuse(fuse));
    return;
  }
  case CPUPhase::Bound: {
    ssm::SSMBindChunksOptions bind;
    bind.policy = options.policy;
    bind.observe = options.observe;
    pm.addPass(ssm::createSSMBindChunks(bind));
    pm.addPass(ssm::createSSMWeightsToArguments());
    pm.addPass(ssm::createSSMShapeFunctions());
    return;
  }
  case CPUPhase::Lowered: {
    ConvertSSMToLinalgOptions convert;
    convert.vectorBits = options.vectorBits;
    pm.addPass(createConvertSSMToLinalg(convert));
    // What fused kernels have computed is dead. Equal ops must stay apart: the
    // memref that one kernel reads a tensor from is no longer that tensor for a
    // later one, if what is between them writes to it in place.
    pm.addPass(createCanonicalizerPass());
    return;
  }
  case CPUPhase::Buffers:
    pm.addPass(createBufferize());
    pm.addNestedPass<func::FuncOp>(createInsertDeallocations());
    pm.addNestedPass<func::FuncOp>(createConvertLinalgToParallelLoopsPass());
    pm.addNestedPass<func::FuncOp>(createSerializeInnerLoops());
    pm.addPass(createCanonicalizerPass());
    pm.addPass(createCSEPass());
    return;
  case CPUPhase::LLVM: {
    ExpandScalarMathOptions expand;
    expand.vectorBits = options.vectorBits;
    pm.addPass(createExpandScalarMath(expand));
    pm.addPass(createConvertSCFToOpenMPPass());
    pm.addPass(createGuardParallelRegions());
    pm.addPass(memref::createExpandStridedMetadataPass());
    pm.addPass(createLowerAffinePass());
    pm.addPass(createSCFToControlFlowPass());
    pm.addPass(createConvertToLLVMPass());
    pm.addPass(createReconcileUnrealizedCastsPass());
    pm.addPass(createRuntimeAllocation());
    return;
  }
  }
}

void corey::buildCPUPipeline(OpPassManager &pm,
                             const CPUPipelineOptions &options, CPUPhase first,
                             CPUPhase last) {
  for (int phase = static_cast<int>(first); phase <= static_cast<int>(last);
       ++phase)
    addPhase(pm, options, static_cast<CPUPhase>(phase));
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
}
