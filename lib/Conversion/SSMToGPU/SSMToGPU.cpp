//===- SSMToGPU.cpp - GPU lowering of the ssm dialect ---------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Conversion/SSMToGPU/SSMToGPU.h"
#include "../Common/SchedulerOps.h"
#include "GPULowering.h"
#include "mlir/Dialect/Bufferization/IR/Bufferization.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/Transforms/WalkPatternRewriteDriver.h"

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
    auto isLowered = [](Operation *op) {
      return isa_and_nonnull<SSMDialect>(op->getDialect()) &&
             !isa<WeightOp, GetWeightOp, YieldOp>(op);
    };
    getOperation().walk([&](Operation *op) {
      if (isLowered(op))
        ++numLoweredOps;
    });
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
    FrozenRewritePatternSet frozen(std::move(patterns));
    // A lowering that refuses an op says why; nothing is to be added to that.
    bool explained = false;
    ScopedDiagnosticHandler handler(context, [&](Diagnostic &diagnostic) {
      explained |= diagnostic.getSeverity() == DiagnosticSeverity::Error;
      return failure();
    });
    // Fused regions nest; each round inlines one level.
    bool hadFused;
    do {
      hadFused = false;
      getOperation().walk([&](FusedOp) { hadFused = true; });
      walkAndApplyPatterns(getOperation(), frozen);
    } while (hadFused);
    // The lowering of a scan must see its site: it asks for the kernel that was
    // chosen with the chunk.
    RewritePatternSet schedulerPatterns(context);
    populateSchedulerLowerings(schedulerPatterns, "corey_rt_device_observe");
    walkAndApplyPatterns(getOperation(), std::move(schedulerPatterns));
    WalkResult result = getOperation().walk([&](Operation *op) {
      if (!isLowered(op))
        return WalkResult::advance();
      if (!explained)
        op->emitError("expected every ssm op to have a GPU lowering");
      return WalkResult::interrupt();
    });
    if (result.wasInterrupted())
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
