//===- SSMToLinalg.cpp - CPU lowering of the ssm dialect ------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Conversion/SSMToLinalg/SSMToLinalg.h"
#include "../Common/SchedulerOps.h"
#include "LoweringUtils.h"
#include "mlir/Dialect/Bufferization/IR/Bufferization.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include "mlir/Dialect/Vector/IR/VectorOps.h"
#include "mlir/Transforms/WalkPatternRewriteDriver.h"
#include "llvm/ADT/StringMap.h"
#include "llvm/TargetParser/Host.h"

namespace corey {
#define GEN_PASS_DEF_CONVERTSSMTOLINALG
#include "corey/Conversion/SSMToLinalg/Passes.h.inc"
} // namespace corey

using namespace mlir;
using namespace corey;
using namespace corey::ssm;

namespace {
struct ConvertSSMToLinalg
    : public corey::impl::ConvertSSMToLinalgBase<ConvertSSMToLinalg> {
  using Base::Base;

  void runOnOperation() override {
    FailureOr<VectorTarget> target =
        getVectorTarget(getOperation(), vectorBits);
    if (failed(target))
      return signalPassFailure();
    MLIRContext *context = &getContext();
    // Regions first: what they hold is lowered with the rest.
    auto isLowered = [](Operation *op) {
      return isa_and_nonnull<SSMDialect>(op->getDialect()) &&
             !isa<WeightOp, GetWeightOp, YieldOp>(op);
    };
    getOperation().walk([&](Operation *op) {
      if (isLowered(op))
        ++numLoweredOps;
    });
    RewritePatternSet patterns(context);
    populateElementwiseLowerings(patterns, *target);
    populateScanLowerings(patterns, *target);
    populateSSDLowerings(patterns, *target);
    populateRowLowerings(patterns, *target);
    populateQuantizationLowerings(patterns, *target);
    populateSchedulerLowerings(patterns, "corey_rt_observe");
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
    WalkResult result = getOperation().walk([&](Operation *op) {
      if (!isLowered(op))
        return WalkResult::advance();
      if (!explained)
        op->emitError("expected every ssm op to have a CPU lowering");
      return WalkResult::interrupt();
    });
    if (result.wasInterrupted())
      signalPassFailure();
  }
};
} // namespace

FailureOr<VectorTarget> corey::getVectorTarget(Operation *op,
                                               int64_t vectorBits) {
  if (vectorBits == 0) {
    llvm::StringMap<bool> features = llvm::sys::getHostCPUFeatures();
    vectorBits = features.lookup("avx512f") ? 512 : 256;
  }
  if (vectorBits == 512)
    return VectorTarget{16, 32};
  if (vectorBits == 256)
    return VectorTarget{8, 16};
  op->emitError() << "expected vector-bits to be 0, 256 or 512, got "
                  << vectorBits;
  return failure();
}
