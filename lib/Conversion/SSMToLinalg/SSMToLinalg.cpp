//===- SSMToLinalg.cpp - CPU lowering of the ssm dialect ------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Conversion/SSMToLinalg/SSMToLinalg.h"
#include "../Common/LowerProgram.h"
#include "../Common/SchedulerOps.h"
#include "LoweringUtils.h"
#include "mlir/Dialect/Bufferization/IR/Bufferization.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include "mlir/Dialect/Vector/IR/VectorOps.h"
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
    numLoweredOps += countLoweredOps(getOperation());
    RewritePatternSet patterns(context);
    populateElementwiseLowerings(patterns, *target);
    populateScanLowerings(patterns, *target);
    populateSSDLowerings(patterns, *target);
    populateRowLowerings(patterns, *target);
    populateQuantizationLowerings(patterns, *target);
    RewritePatternSet schedulerPatterns(context);
    populateChunkLowerings(schedulerPatterns);
    populateObserveLowerings(schedulerPatterns);
    if (failed(lowerProgram(getOperation(), std::move(patterns),
                            std::move(schedulerPatterns), "CPU")))
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
