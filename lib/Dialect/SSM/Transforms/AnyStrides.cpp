//===- AnyStrides.cpp - Arguments that are read as they lie ---------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Dialect/SSM/IR/SSMOps.h"
#include "corey/Dialect/SSM/Transforms/Passes.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"

namespace corey::ssm {
#define GEN_PASS_DEF_SSMANYSTRIDES
#include "corey/Dialect/SSM/Transforms/Passes.h.inc"
} // namespace corey::ssm

using namespace mlir;
using namespace corey::ssm;

/// Whether all uses of `value` that read elements read one at a time; counts
/// those.
static bool isReadByElement(Value value, unsigned &reads) {
  return llvm::all_of(value.getUses(), [&](OpOperand &use) {
    Operation *user = use.getOwner();
    if (auto fused = dyn_cast<FusedOp>(user))
      return isReadByElement(
          fused.getBody().front().getArgument(use.getOperandNumber()), reads);
    if (isa<tensor::DimOp>(user))
      return true;
    // The lowerings for every target load these so.
    auto ssd = dyn_cast<SSDOp>(user);
    ++reads;
    return ssd && (value == ssd.getDt() || value == ssd.getDecay());
  });
}

namespace {
struct SSMAnyStrides
    : public corey::ssm::impl::SSMAnyStridesBase<SSMAnyStrides> {
  void runOnOperation() override {
    for (auto function : getOperation().getOps<func::FuncOp>()) {
      // Callers in the module know nothing of the mark.
      if (function.isExternal() || function.isPrivate() ||
          !SymbolTable::symbolKnownUseEmpty(function, getOperation()))
        continue;
      for (BlockArgument argument : function.getArguments()) {
        unsigned reads = 0;
        if (!isReadByElement(argument, reads) || !reads)
          continue;
        function.setArgAttr(argument.getArgNumber(), kAnyStridesAttr,
                            UnitAttr::get(&getContext()));
        ++numMarked;
      }
    }
  }
};
} // namespace
