//===- SSMToGPU.cpp - GPU lowering of the ssm dialect ---------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Conversion/SSMToGPU/SSMToGPU.h"
#include "../Common/LowerProgram.h"
#include "../Common/SchedulerOps.h"
#include "GPULowering.h"
#include "mlir/Dialect/Bufferization/IR/Bufferization.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"

namespace corey {
#define GEN_PASS_DEF_CONVERTSSMTOGPU
#include "corey/Conversion/SSMToGPU/Passes.h.inc"
} // namespace corey

using namespace mlir;
using namespace corey;
using namespace corey::ssm;

ChipFeatures corey::getChipFeatures(StringRef chip) {
  ChipFeatures features;
  unsigned version = 0;
  if (chip.trim("smaf_").getAsInteger(10, version))
    return features;
  features.hasWarpGroups = chip == "sm_90a";
  features.hasDependentLaunches = version >= 90;
  features.hasClusters = version >= 90;
  // Of the generations' large chips; their small ones have what any chip has.
  if (version == 80 || version == 87)
    features.sharedBytes = 163 << 10;
  else if (version >= 90 && version < 120)
    features.sharedBytes = 227 << 10;
  return features;
}

/// Lets a kernel be launched while its predecessor on the stream still runs:
/// its blocks come up meanwhile, and touch no memory before what it may depend
/// on has ended. It gives way to its own successor in the same way at once.
static void allowOverlap(gpu::GPUFuncOp kernel) {
  // It does so itself.
  if (!kernel.getOps<NVVM::GriddepcontrolOp>().empty())
    return;
  OpBuilder b = OpBuilder::atBlockBegin(&kernel.getBody().front());
  NVVM::GriddepcontrolOp::create(b, kernel.getLoc(),
                                 NVVM::GridDepActionKind::launch_dependents);
  if (!kernel->hasAttr(kInOrderAttr))
    NVVM::GriddepcontrolOp::create(b, kernel.getLoc(),
                                   NVVM::GridDepActionKind::wait);
}

namespace {
struct ConvertSSMToGPU
    : public corey::impl::ConvertSSMToGPUBase<ConvertSSMToGPU> {
  using Base::Base;

  void runOnOperation() override {
    if (multiprocessors < 1) {
      getOperation().emitError(
          "expected multiprocessors to be at least 1, got ")
          << multiprocessors;
      return signalPassFailure();
    }
    GPUTarget target{multiprocessors, getChipFeatures(chip)};
    MLIRContext *context = &getContext();
    numLoweredOps += countLoweredOps(getOperation());
    RewritePatternSet patterns(context);
    populateGPUConvLowerings(patterns, target);
    populateGPUHadamardLowerings(patterns, target);
    populateGPUNormLowerings(patterns, target);
    populateGPUPointwiseLowerings(patterns, target);
    populateGPULookupLowerings(patterns, target);
    populateGPUSampleLowerings(patterns, target);
    populateGPUProjectionLowerings(patterns, target);
    populateGPUQuantizationLowerings(patterns, target);
    populateGPUScanLowerings(patterns, target);
    populateGPUSSDLowerings(patterns, target);
    // The lowering of a scan must see its site: it asks for the kernel that was
    // chosen with the chunk.
    RewritePatternSet schedulerPatterns(context);
    populateChunkLowerings(schedulerPatterns);
    populateGPUObserveLowerings(schedulerPatterns, target);
    if (failed(lowerProgram(getOperation(), std::move(patterns),
                            std::move(schedulerPatterns), "GPU")))
      return signalPassFailure();
    auto kernels = getOperation().lookupSymbol<gpu::GPUModuleOp>(kKernelModule);
    if (!kernels)
      return;
    kernels.setTargetsAttr(ArrayAttr::get(
        context, NVVM::NVVMTargetAttr::get(context, /*optLevel=*/2,
                                           "nvptx64-nvidia-cuda", chip)));
    for (auto kernel : kernels.getOps<gpu::GPUFuncOp>()) {
      ++numKernels;
      if (target.chip.hasDependentLaunches)
        allowOverlap(kernel);
    }
  }
};
} // namespace
