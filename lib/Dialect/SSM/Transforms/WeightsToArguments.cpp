//===- WeightsToArguments.cpp - Weights as function arguments -------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Dialect/SSM/IR/SSMOps.h"
#include "corey/Dialect/SSM/Transforms/Passes.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "llvm/ADT/MapVector.h"

namespace corey::ssm {
#define GEN_PASS_DEF_SSMWEIGHTSTOARGUMENTS
#include "corey/Dialect/SSM/Transforms/Passes.h.inc"
} // namespace corey::ssm

using namespace mlir;
using namespace corey::ssm;

namespace {
struct SSMWeightsToArguments
    : public corey::ssm::impl::SSMWeightsToArgumentsBase<
          SSMWeightsToArguments> {
  using Base::Base;

  void runOnOperation() override {
    for (auto function : getOperation().getOps<func::FuncOp>()) {
      llvm::MapVector<StringAttr, SmallVector<GetWeightOp>> uses;
      function.walk([&](GetWeightOp op) {
        uses[op.getWeightAttr().getAttr()].push_back(op);
      });
      if (uses.empty())
        continue;
      // A private function is called from within, where an added argument
      // would have to be threaded through every caller.
      if (function.isPrivate()) {
        uses.front().second.front().emitOpError(
            "expected weights to be used in public functions only, got private "
            "function @")
            << function.getSymName();
        return signalPassFailure();
      }
      if (function.isExternal())
        continue;
      WalkResult calls = getOperation().walk([&](func::CallOp call) {
        if (call.getCallee() != function.getSymName())
          return WalkResult::advance();
        call.emitOpError(
            "expected functions that use weights to be called from "
            "outside only, got a call of @")
            << function.getSymName();
        return WalkResult::interrupt();
      });
      if (calls.wasInterrupted())
        return signalPassFailure();
      for (auto &[symbol, ops] : uses) {
        unsigned index = function.getNumArguments();
        DictionaryAttr attrs = DictionaryAttr::get(
            &getContext(),
            NamedAttribute(StringAttr::get(&getContext(), kWeightArgAttr),
                           symbol));
        if (failed(function.insertArgument(index, ops.front().getType(), attrs,
                                           ops.front().getLoc())))
          return signalPassFailure();
        for (GetWeightOp op : ops) {
          // Fused regions take values only through their inputs; the op inside
          // one is replaced by a new region argument.
          Value value = function.getArgument(index);
          SmallVector<FusedOp> regions;
          for (Operation *parent = op->getParentOp(); parent != function;
               parent = parent->getParentOp())
            if (auto fused = dyn_cast<FusedOp>(parent))
              regions.push_back(fused);
          for (FusedOp fused : llvm::reverse(regions)) {
            fused.getInputsMutable().append(value);
            value = fused.getBody().front().addArgument(value.getType(),
                                                        op.getLoc());
          }
          op.replaceAllUsesWith(value);
          op.erase();
        }
        ++numArguments;
      }
    }
  }
};
} // namespace
