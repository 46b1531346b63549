//===- ObserveValues.cpp - Where observations stand -----------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Dialect/SSM/IR/SSMOps.h"
#include "corey/Dialect/SSM/Transforms/Passes.h"
#include "corey/Dialect/SSM/Transforms/Profile.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/IR/IRMapping.h"
#include "mlir/IR/Remarks.h"
#include "mlir/Interfaces/FunctionInterfaces.h"
#include "mlir/Interfaces/SideEffectInterfaces.h"
#include "llvm/ADT/SetVector.h"

namespace corey::ssm {
#define GEN_PASS_DEF_SSMOBSERVEVALUES
#include "corey/Dialect/SSM/Transforms/Passes.h.inc"
} // namespace corey::ssm

using namespace mlir;
using namespace corey::ssm;

/// What `value`, made in the region of `fused`, is made of in it, in order.
static SmallVector<Operation *> opsBehind(FusedOp fused, Value value) {
  Block &body = fused.getBody().front();
  llvm::SmallPtrSet<Operation *, 8> needed;
  SmallVector<Operation *> worklist{value.getDefiningOp()};
  while (!worklist.empty()) {
    Operation *op = worklist.pop_back_val();
    if (!op || !needed.insert(op).second)
      continue;
    op->walk([&](Operation *inner) {
      for (Value operand : inner->getOperands())
        if (Operation *producer = operand.getDefiningOp())
          worklist.push_back(body.findAncestorOpInBlock(*producer));
    });
  }
  SmallVector<Operation *> ops;
  for (Operation &op : body)
    if (needed.contains(&op))
      ops.push_back(&op);
  return ops;
}

/// Has the ops that compute `value` in the region of `fused` run before it.
/// Returns the argument that `value` is in the region now.
static BlockArgument computeBefore(FusedOp fused, Value value) {
  Block &body = fused.getBody().front();
  SmallVector<Operation *> ops = opsBehind(fused, value);
  // From the last on: an op is needed in the rest where its user stays there.
  llvm::SmallPtrSet<Operation *, 8> leaving(ops.begin(), ops.end()), both;
  SmallVector<Value> shared{value};
  for (Operation *op : llvm::reverse(ops)) {
    auto isNeeded = [&](Value result) {
      return result != value &&
             llvm::any_of(result.getUsers(), [&](Operation *user) {
               Operation *ancestor = body.findAncestorOpInBlock(*user);
               return !leaving.contains(ancestor) || both.contains(ancestor);
             });
    };
    if (llvm::none_of(op->getResults(), isNeeded))
      continue;
    auto fusable = dyn_cast<FusableOpInterface>(op);
    if (fusable ? fusable.isPointwise() : isPure(op)) {
      both.insert(op);
      continue;
    }
    for (Value result : op->getResults())
      if (isNeeded(result))
        shared.push_back(result);
  }

  auto isKernel = [](Operation *op) { return isa<FusableOpInterface>(op); };
  OpBuilder builder(fused);
  IRMapping inside;
  FusedOp before;
  if (llvm::count_if(ops, isKernel) > 1) {
    llvm::SetVector<Value> arguments;
    for (Operation *op : ops)
      op->walk([&](Operation *inner) {
        for (Value operand : inner->getOperands())
          if (auto argument = dyn_cast<BlockArgument>(operand);
              argument && argument.getOwner() == &body)
            arguments.insert(argument);
      });
    SmallVector<Value> inputs;
    for (Value argument : arguments)
      inputs.push_back(
          fused.getInputs()[cast<BlockArgument>(argument).getArgNumber()]);
    before = FusedOp::create(builder, fused.getLoc(),
                             TypeRange(ValueRange(shared)), inputs,
                             /*score=*/ScoreAttr());
    Block *block = builder.createBlock(&before.getBody());
    for (Value argument : arguments)
      inside.map(argument,
                 block->addArgument(argument.getType(), argument.getLoc()));
  } else {
    inside.map(body.getArguments(), fused.getInputs());
  }

  // What moves is used in the rest as an argument of it.
  unsigned number = body.getNumArguments();
  for (Value result : shared) {
    Value argument = body.addArgument(result.getType(), result.getLoc());
    result.replaceUsesWithIf(argument, [&](OpOperand &use) {
      Operation *user = body.findAncestorOpInBlock(*use.getOwner());
      return !leaving.contains(user) || both.contains(user);
    });
  }
  for (Operation *op : ops) {
    if (both.contains(op)) {
      builder.clone(*op, inside);
      continue;
    }
    op->remove();
    builder.insert(op);
    op->walk([&](Operation *inner) {
      for (OpOperand &operand : inner->getOpOperands())
        operand.set(inside.lookupOrDefault(operand.get()));
    });
  }
  SmallVector<Value> made;
  for (Value result : shared)
    made.push_back(inside.lookupOrDefault(result));
  if (before) {
    YieldOp::create(builder, before.getLoc(), made);
    made.assign(before.getResults().begin(), before.getResults().end());
  }
  fused.getInputsMutable().append(made);
  return body.getArgument(number);
}

void corey::ssm::moveObservationOut(ObserveOp observe) {
  while (auto fused = dyn_cast_or_null<FusedOp>(observe->getParentOp())) {
    Block &body = fused.getBody().front();
    // What is observed on the way to this value goes first.
    auto isObservation = [](Operation *op) { return isa<ObserveOp>(op); };
    for (;;) {
      SmallVector<Operation *> ops = opsBehind(fused, observe.getX());
      auto other = llvm::find_if(ops, isObservation);
      if (other == ops.end())
        break;
      moveObservationOut(cast<ObserveOp>(*other));
    }
    Value seen = observe.getX();
    Location loc = observe.getLoc();
    FlatSymbolRefAttr site = observe.getSiteAttr();
    DictionaryAttr others = observe->getDiscardableAttrDictionary();
    observe.getY().replaceAllUsesWith(seen);
    observe.erase();
    auto argument = dyn_cast<BlockArgument>(seen);
    if (!argument) {
      argument = computeBefore(fused, seen);
      auto options = remark::RemarkOpts::name("split").category("ssm-fuse");
      if (auto function = fused->getParentOfType<FunctionOpInterface>())
        options = options.function(function.getName());
      // A result of the region is in memory anyway.
      if (llvm::any_of(body, llvm::IsaPred<FusableOpInterface>))
        remark::missed(loc, options)
            << remark::metric("site", site.getValue())
            << remark::reason("{0}", "what is observed between the ops of a "
                                     "region has to be in memory");
    }
    OpOperand &input = fused->getOpOperand(argument.getArgNumber());
    OpBuilder builder(fused);
    observe = ObserveOp::create(builder, loc, input.get().getType(), site,
                                input.get());
    observe->setDiscardableAttrs(others);
    input.set(observe.getY());
    // All that there was may be before it now.
    if (&body.front() == body.getTerminator()) {
      IRMapping outer;
      outer.map(body.getArguments(), fused.getInputs());
      SmallVector<Value> results;
      for (Value value : body.getTerminator()->getOperands())
        results.push_back(outer.lookup(value));
      fused.replaceAllUsesWith(results);
      fused.erase();
    }
  }
}

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
