//===- ObserveValues.cpp - A site for every value -------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Dialect/SSM/IR/SSMOps.h"
#include "corey/Dialect/SSM/Transforms/Passes.h"
#include "corey/Dialect/SSM/Transforms/Profile.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"

namespace corey::ssm {
#define GEN_PASS_DEF_SSMOBSERVEVALUES
#include "corey/Dialect/SSM/Transforms/Passes.h.inc"
} // namespace corey::ssm

using namespace mlir;
using namespace corey::ssm;

namespace {
struct SSMObserveValues
    : public corey::ssm::impl::SSMObserveValuesBase<SSMObserveValues> {
  using Base::Base;

  void runOnOperation() override {
    OpBuilder builder(&getContext());
    auto isObservation = [](Operation *op) { return isa<ObserveOp>(op); };
    forEachProfiledValue(getOperation(), [&](Value value, StringRef site) {
      if (llvm::any_of(value.getUsers(), isObservation))
        return;
      builder.setInsertionPointAfterValue(value);
      auto observe =
          ObserveOp::create(builder, value.getLoc(), value.getType(),
                            FlatSymbolRefAttr::get(&getContext(), site), value);
      // Sizes need no observed tensor.
      value.replaceUsesWithIf(observe.getY(), [&](OpOperand &use) {
        return use.getOwner() != observe && !isa<tensor::DimOp>(use.getOwner());
      });
      ++numObserved;
    });
  }
};
} // namespace
