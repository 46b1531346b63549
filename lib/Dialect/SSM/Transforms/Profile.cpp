//===- Profile.cpp - Measured statistics of values ------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Dialect/SSM/Transforms/Profile.h"
#include "corey/Dialect/SSM/IR/SSMOps.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "llvm/ADT/StringMap.h"

using namespace mlir;
using namespace corey::ssm;

//===----------------------------------------------------------------------===//
// Statistics as attributes
//===----------------------------------------------------------------------===//

StatsAttr corey::ssm::getStats(Value value) {
  if (auto argument = dyn_cast<BlockArgument>(value)) {
    Operation *parent = argument.getOwner()->getParentOp();
    if (auto fused = dyn_cast_or_null<FusedOp>(parent))
      return getStats(fused.getInputs()[argument.getArgNumber()]);
    auto function = dyn_cast_or_null<func::FuncOp>(parent);
    return function && argument.getOwner()->isEntryBlock()
               ? function.getArgAttrOfType<StatsAttr>(argument.getArgNumber(),
                                                      kStatsAttr)
               : StatsAttr();
  }
  auto result = cast<OpResult>(value);
  Attribute attr = result.getOwner()->getDiscardableAttr(kStatsAttr);
  // An op whose last result was dropped keeps its array.
  if (auto array = dyn_cast_or_null<ArrayAttr>(attr))
    attr = result.getResultNumber() < array.size()
               ? array[result.getResultNumber()]
               : Attribute();
  if (auto stats = dyn_cast_or_null<StatsAttr>(attr))
    return stats;
  if (auto observe = dyn_cast<ObserveOp>(result.getOwner()))
    return getStats(observe.getX());
  return {};
}

void corey::ssm::setStats(Value value, StatsAttr stats) {
  if (auto argument = dyn_cast<BlockArgument>(value)) {
    auto function = cast<func::FuncOp>(argument.getOwner()->getParentOp());
    function.setArgAttr(argument.getArgNumber(), kStatsAttr, stats);
    return;
  }
  auto result = cast<OpResult>(value);
  Operation *op = result.getOwner();
  if (op->getNumResults() == 1) {
    op->setDiscardableAttr(kStatsAttr, stats);
    return;
  }
  SmallVector<Attribute> list(op->getNumResults(),
                              UnitAttr::get(op->getContext()));
  if (auto old =
          dyn_cast_or_null<ArrayAttr>(op->getDiscardableAttr(kStatsAttr)))
    for (auto [i, attr] :
         llvm::enumerate(old.getValue().take_front(list.size())))
      list[i] = attr;
  list[result.getResultNumber()] = stats;
  op->setDiscardableAttr(kStatsAttr, ArrayAttr::get(op->getContext(), list));
}

//===----------------------------------------------------------------------===//
// Names
//===----------------------------------------------------------------------===//

/// Whether an `ssm.observe` can take the type.
static bool isProfiled(Type type) {
  auto tensor = dyn_cast<RankedTensorType>(type);
  return tensor &&
         isa<Float16Type, BFloat16Type, Float32Type>(tensor.getElementType());
}

void corey::ssm::forEachProfiledValue(
    func::FuncOp function, function_ref<void(Value, StringRef)> callback) {
  if (function.isExternal())
    return;
  // Collected first: the callback may insert ops.
  SmallVector<std::pair<Value, std::string>> values;
  auto add = [&](Value value, const Twine &name) {
    if (!isProfiled(value.getType()))
      return;
    for (Operation *user : value.getUsers())
      if (auto observe = dyn_cast<ObserveOp>(user)) {
        values.push_back({value, observe.getSite().str()});
        return;
      }
    values.push_back({value, name.str()});
  };
  StringRef prefix = function.getSymName();
  for (BlockArgument argument : function.getArguments())
    add(argument, prefix + ".arg#" + Twine(argument.getArgNumber()));
  llvm::StringMap<unsigned> count;
  function.walk<WalkOrder::PreOrder>([&](Operation *op) {
    if (op == function)
      return WalkResult::advance();
    // Observations must not change the names of anything.
    if (isa<ObserveOp>(op))
      return WalkResult::advance();
    StringRef name = op->getName().getStringRef();
    name.consume_front("ssm.");
    unsigned number = count[name]++;
    if (!op->hasTrait<OpTrait::ConstantLike>() && !isa<tensor::EmptyOp>(op))
      for (OpResult result : op->getResults()) {
        std::string site = (prefix + "." + name + "#" + Twine(number)).str();
        if (result.getResultNumber())
          site += ":" + std::to_string(result.getResultNumber());
        add(result, site);
      }
    return isa<FusedOp>(op) ? WalkResult::skip() : WalkResult::advance();
  });
  for (auto &[value, name] : values)
    callback(value, name);
}
