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
    GPUTarget target{multiprocessors};
    MLIRContext *context = &getContext();
    numLoweredOps += countLoweredOps(getOperation());
    RewritePatternSet patterns(context);
    populateGPUConvLowerings(patterns, target);
    populateGPUHadamardLowerings(patterns, target);
    populateGPUNormLowerings(patterns, target);
    populateGPUPointwiseLowerings(patterns, target);
    populateGPULookupLowerings(patterns, target);
    populateGPUProjectionLowerings(patterns, target);
    populateGPUQuantizationLowerings(patterns, target);
    populateGPUScanLowerings(patterns, target);
    populateGPUSSDLowerings(patterns, target);
    // The lowering of a scan must see its site: it asks for the kernel that was
    // chosen with the chunk.
    RewritePatternSet schedulerPatterns(context);
    populateSchedulerLowerings(schedulerPatterns, "corey_rt_device_observe");
    if (failed(lowerProgram(getOperation(), std::move(patterns),
                            std::move(schedulerPatterns), "GPU")))
      return signalPassFailure();
    auto kernels = getOperation().lookupSymbol<gpu::GPUModuleOp>(kKernelModule);
    if (!kernels)
      return;
    kernels.setTargetsAttr(ArrayAttr::get(
        context, NVVM::NVVMTargetAttr::get(context, /*optLevel=*/2,
                                           "nvptx64-nvidia-cuda", chip)));
    numKernels += llvm::range_size(kernels.getOps<gpu::GPUFuncOp>());
  }
};
} // namespace
