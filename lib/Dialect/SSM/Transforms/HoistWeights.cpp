//===- HoistWeights.cpp - Work on weights, done once ----------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Dialect/SSM/IR/SSMOps.h"
#include "corey/Dialect/SSM/Transforms/Passes.h"
#include "corey/Dialect/SSM/Transforms/Profile.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/IR/Dominance.h"
#include "mlir/IR/IRMapping.h"
#include "mlir/IR/PatternMatch.h"
#include "mlir/Transforms/CSE.h"
#include "mlir/Transforms/RegionUtils.h"
#include "llvm/ADT/StringSet.h"

namespace corey::ssm {
#define GEN_PASS_DEF_SSMHOISTWEIGHTS
#include "corey/Dialect/SSM/Transforms/Passes.h.inc"
} // namespace corey::ssm

using namespace mlir;
using namespace corey::ssm;

namespace {
/// Ops that look at their source another way and move nothing.
bool isView(Operation *op) {
  return isa<tensor::CastOp, tensor::CollapseShapeOp, tensor::ExpandShapeOp,
             tensor::ExtractSliceOp>(op);
}

/// What a function computes from weights and constants alone.
class KnownOps {
public:
  explicit KnownOps(func::FuncOp function) {
    function.walk<WalkOrder::PreOrder>([&](Operation *op) {
      if (op == function)
        return WalkResult::advance();
      if (!isPure(op) || op->hasTrait<OpTrait::IsTerminator>() ||
          op->getNumResults() == 0)
        return WalkResult::advance();
      SetVector<Value> captured;
      getUsedValuesDefinedAbove(op->getRegions(), captured);
      auto isKnownValue = [&](Value value) {
        return known.contains(value.getDefiningOp());
      };
      if (!llvm::all_of(op->getOperands(), isKnownValue) ||
          !llvm::all_of(captured, isKnownValue))
        return WalkResult::advance();
      known.insert(op);
      auto isWeight = [&](Value value) {
        return onWeights.contains(value.getDefiningOp());
      };
      if (isa<GetWeightOp>(op) || llvm::any_of(op->getOperands(), isWeight) ||
          llvm::any_of(captured, isWeight))
        onWeights.insert(op);
      // What is inside goes where the op goes.
      return WalkResult::skip();
    });
  }

  /// Whether a known op is not worth a weight of its own: it costs nothing
  /// where it is, or is a constant that was never called a weight.
  bool isFree(Operation *op) const {
    return isView(op) || isa<GetWeightOp, tensor::EmptyOp>(op) ||
           op->hasTrait<OpTrait::ConstantLike>() ||
           (!onWeights.contains(op) && !isa<SSMDialect>(op->getDialect()));
  }

  /// Whether `op` is in the function afterwards: it is not known, or it is free
  /// and something that stays uses it.
  bool stays(Operation *op) {
    for (Operation *parent = op; parent; parent = parent->getParentOp())
      if (known.contains(parent))
        op = parent;
    if (!known.contains(op))
      return true;
    if (auto it = memo.find(op); it != memo.end())
      return it->second;
    bool result = false;
    for (Value value : op->getResults())
      if (isFree(op) || !WeightOp::isWeightType(value.getType()))
        result |= llvm::any_of(value.getUsers(),
                               [&](Operation *user) { return stays(user); });
    memo[op] = result;
    return result;
  }

  ArrayRef<Operation *> getOps() const { return known.getArrayRef(); }

private:
  /// In program order.
  SetVector<Operation *> known;
  DenseSet<Operation *> onWeights;
  DenseMap<Operation *, bool> memo;
};

/// A value of a function that becomes a prepared weight.
struct Candidate {
  Value value;
  SmallVector<OpOperand *> uses;
};

class Hoister {
public:
  explicit Hoister(ModuleOp module) : module(module) {}

  FailureOr<HoistedWeights> run() {
    if (failed(findPrepare()))
      return failure();
    for (auto function : module.getOps<func::FuncOp>())
      if (function != prepare && !function.isExternal() &&
          !function.isPrivate() &&
          !function.getSymName().ends_with(kShapesSuffix))
        hoistFrom(function);
    if (!prepare)
      return counts;
    finish();
    return counts;
  }

private:
  /// Finds the function of an earlier run and what it returns.
  LogicalResult findPrepare() {
    Operation *symbol = module.lookupSymbol(kPrepareFunction);
    if (!symbol)
      return success();
    prepare = dyn_cast<func::FuncOp>(symbol);
    if (!prepare || prepare.isExternal() ||
        !llvm::hasSingleElement(prepare.getBody()))
      return symbol->emitOpError()
             << "expected @" << kPrepareFunction
             << " to be a function with a body of one block";
    auto terminator =
        cast<func::ReturnOp>(prepare.getBody().front().getTerminator());
    for (auto [i, value] : llvm::enumerate(terminator.getOperands())) {
      auto weight = prepare.getResultAttrOfType<StringAttr>(i, kPreparesAttr);
      if (!weight || !module.lookupSymbol<WeightOp>(weight))
        return prepare.emitOpError()
               << "expected '" << kPreparesAttr << "' of result " << i
               << " to name a weight";
      prepared[weight] = value;
      results.push_back({weight, {}});
    }
    numOld = results.size();
    return success();
  }

  void makePrepare() {
    OpBuilder builder(module.getContext());
    // Behind the weights, before the functions.
    Operation *first = nullptr;
    for (Operation &op : *module.getBody())
      if (isa<func::FuncOp>(op)) {
        first = &op;
        break;
      }
    builder.setInsertionPoint(first);
    prepare = func::FuncOp::create(builder, module.getLoc(), kPrepareFunction,
                                   builder.getFunctionType({}, {}));
    builder.setInsertionPointToStart(prepare.addEntryBlock());
    func::ReturnOp::create(builder, module.getLoc());
  }

  void hoistFrom(func::FuncOp function) {
    KnownOps known(function);
    SmallVector<Candidate> candidates;
    for (Operation *op : known.getOps()) {
      if (known.isFree(op) || known.stays(op))
        continue;
      for (Value value : op->getResults()) {
        Candidate candidate{value, {}};
        for (OpOperand &use : value.getUses())
          if (known.stays(use.getOwner()))
            candidate.uses.push_back(&use);
        if (!candidate.uses.empty())
          candidates.push_back(std::move(candidate));
      }
    }
    if (candidates.empty())
      return;
    if (!prepare)
      makePrepare();
    IRMapping mapping;
    for (Candidate &candidate : candidates) {
      Value computed = moveToPrepare(candidate.value, mapping);
      // The name is a placeholder until equal values are found.
      results.push_back({nullptr, {}});
      auto terminator = prepare.getBody().front().getTerminator();
      terminator->insertOperands(terminator->getNumOperands(), computed);
      OpBuilder builder(candidate.value.getDefiningOp());
      auto symbol = FlatSymbolRefAttr::get(builder.getContext(), "unnamed");
      auto get = GetWeightOp::create(builder, candidate.value.getLoc(),
                                     candidate.value.getType(), symbol);
      for (OpOperand *use : candidate.uses)
        use->set(get);
      results.back().users.push_back(get);
    }
    // What nothing uses any more was moved.
    for (Operation *op : llvm::reverse(known.getOps()))
      if (op->use_empty()) {
        counts.ops += !known.isFree(op);
        op->erase();
      }
  }

  /// `value` as `@ssm.prepare` computes it.
  Value moveToPrepare(Value value, IRMapping &mapping) {
    if (Value there = mapping.lookupOrNull(value))
      return there;
    Operation *op = value.getDefiningOp();
    if (auto get = dyn_cast<GetWeightOp>(op))
      if (Value there = prepared.lookup(get.getWeightAttr().getAttr())) {
        mapping.map(value, there);
        return there;
      }
    for (Value operand : op->getOperands())
      moveToPrepare(operand, mapping);
    SetVector<Value> captured;
    getUsedValuesDefinedAbove(op->getRegions(), captured);
    for (Value operand : captured)
      moveToPrepare(operand, mapping);
    OpBuilder builder(prepare.getBody().front().getTerminator());
    Operation *clone = builder.clone(*op, mapping);
    // They would tell equal values apart.
    clone->removeDiscardableAttr(kStatsAttr);
    return mapping.lookup(value);
  }

  StringAttr makeWeight(Type type, Location loc) {
    if (symbols.empty())
      for (Operation &op : *module.getBody())
        if (auto symbol = dyn_cast<SymbolOpInterface>(op))
          symbols.insert(symbol.getName());
    std::string name;
    do
      name = "prepared" + std::to_string(next++);
    while (!symbols.insert(name).second);
    OpBuilder builder(prepare);
    auto weight = WeightOp::create(builder, loc, builder.getStringAttr(name),
                                   StringAttr(), TypeAttr::get(type));
    weight->setAttr(WeightOp::getPreparedAttrName(), builder.getUnitAttr());
    ++counts.weights;
    return weight.getSymNameAttr();
  }

  /// Shares equal values, names the new ones, and drops the unused.
  void finish() {
    IRRewriter rewriter(module.getContext());
    DominanceInfo dominance(prepare);
    eliminateCommonSubExpressions(rewriter, dominance, prepare);
    Operation *terminator = prepare.getBody().front().getTerminator();
    DenseMap<Value, StringAttr> names;
    SmallVector<Value> values;
    SmallVector<StringAttr> kept;
    for (size_t i = 0; i < results.size(); ++i) {
      const Result &result = results[i];
      Value value = terminator->getOperand(i);
      if (i < numOld) {
        bool used = false;
        module.walk([&](GetWeightOp get) {
          used |= get.getWeightAttr().getAttr() == result.symbol;
        });
        if (!used) {
          module.lookupSymbol(result.symbol)->erase();
          continue;
        }
        names.try_emplace(value, result.symbol);
      } else {
        auto [it, isNew] = names.try_emplace(value);
        if (isNew)
          it->second = makeWeight(value.getType(), value.getLoc());
        for (GetWeightOp get : result.users)
          get.setWeightAttr(FlatSymbolRefAttr::get(it->second));
        if (!isNew)
          continue;
      }
      values.push_back(value);
      kept.push_back(names.lookup(value));
    }
    terminator->setOperands(values);
    for (Operation &op :
         llvm::make_early_inc_range(llvm::reverse(prepare.getBody().front())))
      if (isOpTriviallyDead(&op))
        op.erase();
    if (values.empty()) {
      prepare.erase();
      return;
    }
    prepare.setType(rewriter.getFunctionType(prepare.getArgumentTypes(),
                                             TypeRange(ValueRange(values))));
    SmallVector<DictionaryAttr> attrs;
    for (StringAttr symbol : kept)
      attrs.push_back(rewriter.getDictionaryAttr(
          rewriter.getNamedAttr(kPreparesAttr, symbol)));
    prepare.setAllResultAttrs(attrs);
  }

  struct Result {
    StringAttr symbol;
    SmallVector<GetWeightOp> users;
  };

  ModuleOp module;
  func::FuncOp prepare;
  HoistedWeights counts;
  /// The results of `@ssm.prepare`, in order; the first `numOld` were there.
  SmallVector<Result> results;
  size_t numOld = 0;
  /// Values of `@ssm.prepare` by the symbol of their weight.
  DenseMap<StringAttr, Value> prepared;
  llvm::StringSet<> symbols;
  unsigned next = 0;
};

struct SSMHoistWeights
    : public corey::ssm::impl::SSMHoistWeightsBase<SSMHoistWeights> {
  using Base::Base;

  void runOnOperation() override {
    FailureOr<HoistedWeights> counts = hoistWeights(getOperation());
    if (failed(counts))
      return signalPassFailure();
    numHoisted += counts->ops;
    numPrepared += counts->weights;
  }
};
} // namespace

FailureOr<HoistedWeights> corey::ssm::hoistWeights(ModuleOp module) {
  return Hoister(module).run();
}
