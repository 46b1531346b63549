//===- OutlineEqualLoops.cpp - One function for loop nests that are equal -===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Pipelines/Pipelines.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/IR/Matchers.h"
#include "mlir/IR/SymbolTable.h"
#include "mlir/Transforms/RegionUtils.h"
#include "llvm/ADT/MapVector.h"
#include "llvm/ADT/SetVector.h"

namespace corey {
#define GEN_PASS_DEF_OUTLINEEQUALLOOPS
#include "corey/Pipelines/Passes.h.inc"
} // namespace corey

using namespace mlir;

namespace {
/// A nest and the function that it could be a call of.
struct Nest {
  Operation *op;
  SmallVector<Value> arguments;
};

struct OutlineEqualLoops
    : public corey::impl::OutlineEqualLoopsBase<OutlineEqualLoops> {
  using Base::Base;

  void runOnOperation() override {
    ModuleOp module = getOperation();
    // In the order of the program, so that equal programs become equal modules.
    llvm::MapVector<StringAttr, SmallVector<Nest>> groups;
    for (auto function : module.getOps<func::FuncOp>()) {
      if (function.isExternal())
        continue;
      for (Operation &op : function.getBody().front()) {
        if (!isCandidate(op))
          continue;
        Nest nest{&op, {}};
        OwningOpRef<func::FuncOp> outlined = outline(nest);
        std::string text;
        llvm::raw_string_ostream os(text);
        outlined->print(os, OpPrintingFlags().useLocalScope());
        groups[StringAttr::get(&getContext(), text)].push_back(std::move(nest));
      }
    }
    SymbolTable symbols(module);
    for (auto &[text, nests] : groups) {
      if (nests.size() < 2)
        continue;
      func::FuncOp function = outline(nests.front()).release();
      symbols.insert(function);
      ++numFunctions;
      for (Nest &nest : nests) {
        OpBuilder builder(nest.op);
        func::CallOp::create(builder, nest.op->getLoc(), function,
                             nest.arguments);
        nest.op->erase();
        ++numOutlined;
      }
    }
  }

private:
  bool isCandidate(Operation &op) const {
    if (!isa<scf::ParallelOp, scf::ForOp, scf::IfOp>(op) ||
        op.getNumResults() > 0)
      return false;
    int64_t count = 0;
    op.walk([&](Operation *) { ++count; });
    return count > minOps;
  }

  /// A function with the nest as its body. Its arguments are what the nest uses
  /// from outside, in the order in which it does, but for constants.
  OwningOpRef<func::FuncOp> outline(Nest &nest) {
    llvm::SetVector<Value> used(nest.op->operand_begin(),
                                nest.op->operand_end());
    getUsedValuesDefinedAbove(nest.op->getRegions(), used);
    nest.arguments.clear();
    SmallVector<Operation *> constants;
    Attribute constant;
    // Addresses of symbols, in which layers differ, are passed.
    for (Value value : used)
      if (matchPattern(value, m_Constant(&constant)) &&
          !isa<SymbolRefAttr>(constant))
        constants.push_back(value.getDefiningOp());
      else
        nest.arguments.push_back(value);

    MLIRContext *context = &getContext();
    OpBuilder builder(context);
    Location loc = nest.op->getLoc();
    auto function = func::FuncOp::create(
        loc, "kernel",
        FunctionType::get(context, TypeRange(ValueRange(nest.arguments)), {}));
    function.setPrivate();
    Block *body = function.addEntryBlock();
    builder.setInsertionPointToStart(body);
    IRMapping mapping;
    mapping.map(nest.arguments, body->getArguments());
    for (Operation *constant : constants)
      builder.clone(*constant, mapping);
    builder.clone(*nest.op, mapping);
    func::ReturnOp::create(builder, loc);
    return function;
  }
};
} // namespace
