//===- LowerProgram.cpp - Applying a target's lowerings -------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "LowerProgram.h"
#include "corey/Analysis/FusionPlan.h"
#include "corey/Dialect/SSM/IR/SSMOps.h"
#include "mlir/Transforms/WalkPatternRewriteDriver.h"

using namespace mlir;
using namespace corey;
using namespace corey::ssm;

/// Every ssm op but those of weights, which are the program's, and terminators.
static bool isLowered(Operation *op) {
  return isa_and_nonnull<SSMDialect>(op->getDialect()) &&
         !isa<WeightOp, GetWeightOp, YieldOp>(op);
}

int64_t corey::countLoweredOps(ModuleOp module) {
  int64_t count = 0;
  module.walk([&](Operation *op) { count += isLowered(op); });
  return count;
}

/// Takes regions with a projection apart: no kernel of a CPU makes what is
/// before its own loops for itself.
static void splitProjections(ModuleOp module) {
  SmallVector<FusedOp> regions;
  module.walk([&](FusedOp fused) {
    FailureOr<FusionPlan> plan = planFusedRegion(fused);
    if (succeeded(plan) && plan->ops.size() > 1 &&
        llvm::any_of(plan->ops, llvm::IsaPred<ProjectionOp>))
      regions.push_back(fused);
  });
  IRRewriter rewriter(module.getContext());
  for (FusedOp fused : regions) {
    Block &block = fused.getBody().front();
    auto yield = cast<YieldOp>(block.getTerminator());
    rewriter.inlineBlockBefore(&block, fused, fused.getInputs());
    rewriter.replaceOp(fused, yield.getValues());
    rewriter.eraseOp(yield);
  }
}

LogicalResult corey::lowerProgram(ModuleOp module, RewritePatternSet patterns,
                                  RewritePatternSet last, StringRef target) {
  FrozenRewritePatternSet frozen(std::move(patterns));
  // A lowering that refuses an op says why; nothing is to be added to that.
  bool explained = false;
  ScopedDiagnosticHandler handler(
      module.getContext(), [&](Diagnostic &diagnostic) {
        explained |= diagnostic.getSeverity() == DiagnosticSeverity::Error;
        return failure();
      });
  if (target == "CPU")
    splitProjections(module);
  // Fused regions nest; each round inlines one level.
  bool hadFused;
  do {
    hadFused = false;
    module.walk([&](FusedOp) { hadFused = true; });
    walkAndApplyPatterns(module, frozen);
  } while (hadFused);
  walkAndApplyPatterns(module, std::move(last));
  WalkResult result = module.walk([&](Operation *op) {
    if (!isLowered(op))
      return WalkResult::advance();
    if (!explained)
      op->emitError() << "expected every ssm op to have a " << target
                      << " lowering";
    return WalkResult::interrupt();
  });
  return failure(result.wasInterrupted());
}
