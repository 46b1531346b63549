//===- LowerProgram.cpp - Applying a target's lowerings -------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "LowerProgram.h"
#include "OpBuffers.h"
#include "corey/Analysis/FusionPlan.h"
#include "corey/Dialect/SSM/IR/SSMOps.h"
#include "corey/Dialect/SSM/Transforms/Passes.h"
#include "mlir/Dialect/Bufferization/IR/Bufferization.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/IR/IRMapping.h"
#include "mlir/Interfaces/FunctionInterfaces.h"
#include "mlir/Rewrite/PatternApplicator.h"
#include "mlir/Transforms/WalkPatternRewriteDriver.h"
#include <map>

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

namespace {
/// All that a lowering of an op may depend on: the op with its regions, and
/// what its operands are computed from, up to arguments of the function and to
/// what other ops have in memory. Ops of equal keys differ in `externals`,
/// which correspond to one another, and in the names of `sites`.
struct Signature {
  explicit Signature(Operation *op) { addOp(op); }

  std::vector<uintptr_t> key;
  SmallVector<Value> externals;
  SmallVector<FlatSymbolRefAttr> sites;

private:
  void add(const void *pointer) {
    key.push_back(reinterpret_cast<uintptr_t>(pointer));
  }

  void addName(Operation *op) {
    add(op->getName().getAsOpaquePointer());
    DictionaryAttr attributes = op->getAttrDictionary();
    if (auto bind = dyn_cast<BindChunkOp>(op)) {
      // Layers have sites of their own.
      sites.push_back(bind.getSiteAttr());
      NamedAttrList list(attributes);
      list.erase(bind.getSiteAttrName());
      attributes = list.getDictionary(op->getContext());
    }
    add(attributes.getAsOpaquePointer());
  }

  void addOp(Operation *op) {
    addName(op);
    key.push_back(op->getNumOperands());
    for (Value operand : op->getOperands())
      addUse(operand);
    key.push_back(op->getNumResults());
    for (Value result : op->getResults()) {
      numbers.try_emplace(result, numbers.size());
      add(result.getType().getAsOpaquePointer());
      key.push_back(result.use_empty());
      key.push_back(OpBuffers::isAnyStridesResult(result));
    }
    key.push_back(op->getNumRegions());
    for (Region &region : op->getRegions()) {
      key.push_back(llvm::range_size(region));
      for (Block &block : region) {
        key.push_back(block.getNumArguments());
        for (Value argument : block.getArguments()) {
          numbers.try_emplace(argument, numbers.size());
          add(argument.getType().getAsOpaquePointer());
        }
        key.push_back(block.getOperations().size());
        for (Operation &inner : block)
          addOp(&inner);
      }
    }
  }

  void addUse(Value value) {
    auto [it, isNew] = numbers.try_emplace(value, numbers.size());
    key.push_back(it->second);
    if (!isNew)
      return;
    externals.push_back(value);
    add(value.getType().getAsOpaquePointer());
    Operation *producer = value.getDefiningOp();
    if (!producer) {
      auto argument = cast<BlockArgument>(value);
      Operation *parent = argument.getOwner()->getParentOp();
      auto function = dyn_cast<FunctionOpInterface>(parent);
      if (!function || !argument.getOwner()->isEntryBlock())
        return add(parent);
      for (StringRef name : {kWeightArgAttr, kAnyStridesAttr})
        key.push_back(static_cast<bool>(
            function.getArgAttr(argument.getArgNumber(), name)));
      return;
    }
    addName(producer);
    key.push_back(cast<OpResult>(value).getResultNumber());
    // Lowerings look through views and sizes, but not at what made a tensor.
    if (producer->getNumRegions() == 0 &&
        isa_and_nonnull<tensor::TensorDialect, arith::ArithDialect>(
            producer->getDialect())) {
      key.push_back(producer->getNumOperands());
      for (Value operand : producer->getOperands())
        addUse(operand);
    }
  }

  DenseMap<Value, uintptr_t> numbers;
};

/// Lowers the ops of a module by patterns, one after another. Layers of a model
/// repeat: for an op that is equal to an earlier one what that became is
/// copied, which is a fraction of the work where it includes kernels. What of
/// it works on memory becomes a function that all of them call, so that
/// whatever comes after has as much to do for many layers as for a few.
class ProgramLowering : private RewriterBase::Listener {
public:
  ProgramLowering(MLIRContext *context, const FrozenRewritePatternSet &patterns,
                  bool copies)
      : rewriter(context), applicator(patterns), copies(copies) {
    applicator.applyDefaultCostModel();
    rewriter.setListener(this);
  }

  void lower(ModuleOp module) {
    SmallVector<Operation *> ops;
    module.walk<WalkOrder::PreOrder>([&](Operation *op) {
      if (!isLowered(op))
        return WalkResult::advance();
      ops.push_back(op);
      return WalkResult::skip();
    });
    for (Operation *op : ops) {
      if (!copies) {
        lower(op);
        continue;
      }
      Signature signature(op);
      auto it = known.find(signature.key);
      if (it == known.end())
        lowerAndKeep(op, std::move(signature));
      else
        copy(it->second, op, signature);
    }
  }

private:
  /// What an op became.
  struct Lowered {
    SmallVector<Operation *> ops;
    SmallVector<Value> results;
    SmallVector<Value> externals;
    SmallVector<FlatSymbolRefAttr> sites;
    SmallVector<StringAttr> siteSymbols;
    bool isCopied = false;
  };

  void notifyOperationErased(Operation *op) override { erased.insert(op); }

  /// Fused regions nest; each round inlines one level.
  void lower(Operation *op) {
    Block *block = op->getBlock();
    Operation *before = op->getPrevNode(), *behind = op->getNextNode();
    bool hadFused;
    do {
      hadFused = false;
      SmallVector<Operation *> visited;
      Block::iterator first =
          before ? std::next(before->getIterator()) : block->begin();
      for (auto it = first; it != block->end() && &*it != behind; ++it)
        it->walk([&](Operation *inner) {
          hadFused |= isa<FusedOp>(inner);
          visited.push_back(inner);
        });
      erased.clear();
      for (Operation *inner : visited)
        if (!erased.contains(inner))
          (void)applicator.matchAndRewrite(inner, rewriter);
    } while (hadFused);
  }

  /// The name of the constant that is the address of a site.
  StringAttr siteSymbol(Operation *op, FlatSymbolRefAttr site) {
    rewriter.setInsertionPoint(op);
    auto number = OpBuffers(rewriter, op)
                      .siteAddress(site)
                      .getDefiningOp<LLVM::PtrToIntOp>();
    auto address = number.getArg().getDefiningOp<LLVM::AddressOfOp>();
    StringAttr name = address.getGlobalNameAttr().getAttr();
    rewriter.eraseOp(number);
    rewriter.eraseOp(address);
    return name;
  }

  void lowerAndKeep(Operation *op, Signature signature) {
    Lowered lowered;
    lowered.externals = std::move(signature.externals);
    lowered.sites = std::move(signature.sites);
    for (FlatSymbolRefAttr site : lowered.sites)
      lowered.siteSymbols.push_back(siteSymbol(op, site));
    // Keeps track of the results, and of where they are made.
    Block *block = op->getBlock();
    Operation *before = op->getPrevNode();
    OperationState state(op->getLoc(),
                         UnrealizedConversionCastOp::getOperationName());
    SmallVector<unsigned> used;
    for (OpResult result : op->getResults())
      if (!result.use_empty()) {
        used.push_back(result.getResultNumber());
        state.addOperands(result);
      }
    lowered.results.resize(op->getNumResults());
    Operation *end = Operation::create(state);
    block->getOperations().insertAfter(op->getIterator(), end);
    lower(op);
    for (auto [number, value] : llvm::zip_equal(used, end->getOperands()))
      lowered.results[number] = value;
    Block::iterator first =
        before ? std::next(before->getIterator()) : block->begin();
    for (auto it = first; &*it != end; ++it)
      lowered.ops.push_back(&*it);
    end->erase();
    if (mayBeCopied(lowered))
      known.emplace(std::move(signature.key), std::move(lowered));
  }

  /// Whether all is lowered but for chunks, which are last, and made of what
  /// corresponds to something of an equal op.
  static bool mayBeCopied(const Lowered &lowered) {
    DenseSet<Value> external(lowered.externals.begin(),
                             lowered.externals.end());
    llvm::SmallPtrSet<Operation *, 32> own(lowered.ops.begin(),
                                           lowered.ops.end());
    auto isKnown = [&](Value value) {
      if (external.contains(value))
        return true;
      for (Operation *op = value.getParentBlock()->getParentOp(),
                     *maker = value.getDefiningOp();
           op; maker = op, op = op->getParentOp())
        if (maker && own.contains(maker))
          return true;
      return false;
    };
    for (Operation *op : lowered.ops) {
      WalkResult result = op->walk([&](Operation *inner) {
        return (!isLowered(inner) || isa<BindChunkOp>(inner)) &&
                       llvm::all_of(inner->getOperands(), isKnown)
                   ? WalkResult::advance()
                   : WalkResult::interrupt();
      });
      if (result.wasInterrupted())
        return false;
    }
    return llvm::all_of(lowered.results,
                        [&](Value value) { return !value || isKnown(value); });
  }

  static bool isTensor(Value value) { return isa<TensorType>(value.getType()); }

  /// Whether `op` is for copies to have each: it names a site, in which they
  /// differ, or works on tensors of theirs, whose memory is not known yet.
  static bool staysOutside(Operation *op) {
    if (isa<LLVM::AddressOfOp>(op) || llvm::any_of(op->getResults(), isTensor))
      return true;
    return op
        ->walk([&](Operation *inner) {
          return isa<BindChunkOp>(inner) ||
                         llvm::any_of(inner->getOperands(),
                                      [&](Value operand) {
                                        return isTensor(operand) &&
                                               isFromOutside(operand, op);
                                      })
                     ? WalkResult::interrupt()
                     : WalkResult::advance();
        })
        .wasInterrupted();
  }

  static bool isFromOutside(Value value, Operation *op) {
    return !op->isAncestor(value.getParentBlock()->getParentOp());
  }

  /// Takes out of the regions of ops what is for copies to have each: addresses
  /// of sites, and memory and sizes of tensors.
  static void hoist(Lowered &lowered) {
    SmallVector<Operation *> ops;
    for (Operation *op : lowered.ops) {
      SmallVector<Operation *> hoisted;
      op->walk([&](Operation *inner) {
        auto address = dyn_cast<LLVM::AddressOfOp>(inner);
        bool isSite = address &&
                      llvm::is_contained(lowered.siteSymbols,
                                         address.getGlobalNameAttr().getAttr());
        bool isOfOutside =
            isa<bufferization::ToBufferOp, tensor::DimOp>(inner) &&
            isFromOutside(inner->getOperand(0), op);
        if (inner == op || !(isSite || isOfOutside))
          return;
        if (auto dim = dyn_cast<tensor::DimOp>(inner)) {
          auto axis = dim.getIndex().getDefiningOp<arith::ConstantOp>();
          if (!axis)
            return;
          if (!isFromOutside(axis, op) && !llvm::is_contained(hoisted, axis))
            hoisted.push_back(axis);
        }
        hoisted.push_back(inner);
      });
      for (Operation *inner : hoisted) {
        inner->moveBefore(op);
        ops.push_back(inner);
      }
      ops.push_back(op);
    }
    lowered.ops = std::move(ops);
  }

  /// Moves what of a lowered op works on memory to a function, and calls that.
  void outline(Lowered &lowered, Operation *original) {
    hoist(lowered);
    llvm::SmallPtrSet<Operation *, 32> own(lowered.ops.begin(),
                                           lowered.ops.end());
    // What stays, with what it is computed from.
    llvm::SmallPtrSet<Operation *, 32> stay;
    SmallVector<Operation *> worklist;
    auto keep = [&](Operation *op) {
      if (op && own.contains(op) && stay.insert(op).second)
        worklist.push_back(op);
    };
    for (Operation *op : lowered.ops)
      if (staysOutside(op))
        keep(op);
    for (Value result : lowered.results)
      if (result)
        keep(result.getDefiningOp());
    while (!worklist.empty())
      worklist.pop_back_val()->walk([&](Operation *inner) {
        for (Value operand : inner->getOperands())
          keep(operand.getDefiningOp());
      });
    SmallVector<Operation *> moved, kept;
    int64_t size = 0;
    for (Operation *op : lowered.ops) {
      if (stay.contains(op)) {
        kept.push_back(op);
        continue;
      }
      moved.push_back(op);
      op->walk([&](Operation *) { ++size; });
    }
    if (size < kWorthOutlining)
      return;
    // The work is put off until its last op: nothing between may be seen by it,
    // nor see it.
    for (Operation *op : kept) {
      bool isBetween = moved.front()->isBeforeInBlock(op) &&
                       op->isBeforeInBlock(moved.back());
      if (isBetween &&
          (isa<bufferization::ToTensorOp>(op) ||
           !(isMemoryEffectFree(op) ||
             isa<memref::AllocOp, bufferization::ToBufferOp, BindChunkOp>(op))))
        return;
    }

    MLIRContext *context = original->getContext();
    auto module = original->getParentOfType<ModuleOp>();
    OpBuilder builder(context);
    Location loc = moved.front()->getLoc();
    auto function = func::FuncOp::create(
        loc, (original->getName().stripDialect() + "_launches").str(),
        FunctionType::get(context, {}, {}));
    function.setPrivate();
    SymbolTable(module).insert(function);
    Block *body = function.addEntryBlock();
    builder.setInsertionPointAfter(moved.back());
    OpBuilder inside = OpBuilder::atBlockEnd(body);
    SmallVector<Value> passed;
    DenseMap<Value, Value> known;
    llvm::SmallPtrSet<Operation *, 32> inner(moved.begin(), moved.end());
    auto valueOf = [&](Value value) {
      Value &there = known[value];
      if (there)
        return there;
      Operation *producer = value.getDefiningOp();
      if (producer && isa<arith::ConstantOp>(producer)) {
        there = inside.clone(*producer)->getResult(0);
      } else {
        there = body->addArgument(value.getType(), loc);
        passed.push_back(value);
      }
      return there;
    };
    auto isInside = [&](Value value) {
      for (Operation *op = value.getParentBlock()->getParentOp(),
                     *maker = value.getDefiningOp();
           op; maker = op, op = op->getParentOp())
        if (maker && inner.contains(maker))
          return true;
      return false;
    };
    for (Operation *op : moved)
      op->walk([&](Operation *each) {
        for (OpOperand &operand : each->getOpOperands())
          if (!isInside(operand.get()))
            operand.set(valueOf(operand.get()));
      });
    auto call = func::CallOp::create(builder, loc, function.getSymName(),
                                     TypeRange(), passed);
    for (Operation *op : moved)
      op->moveBefore(body, body->end());
    inside.setInsertionPointToEnd(body);
    func::ReturnOp::create(inside, loc);
    function.setType(FunctionType::get(context, body->getArgumentTypes(), {}));
    // In the order of the block.
    SmallVector<Operation *> ops;
    bool isCalled = false;
    for (Operation *op : kept) {
      if (!isCalled && call->isBeforeInBlock(op)) {
        ops.push_back(call);
        isCalled = true;
      }
      ops.push_back(op);
    }
    if (!isCalled)
      ops.push_back(call);
    lowered.ops = std::move(ops);
  }

  void copy(Lowered &lowered, Operation *op, const Signature &signature) {
    if (!lowered.isCopied)
      outline(lowered, op);
    lowered.isCopied = true;
    DenseMap<Attribute, StringAttr> symbols;
    DenseMap<Attribute, FlatSymbolRefAttr> sites;
    for (auto [from, symbol, site] :
         llvm::zip_equal(lowered.sites, lowered.siteSymbols, signature.sites)) {
      sites[from] = site;
      symbols[symbol] = siteSymbol(op, site);
    }
    IRMapping mapping;
    for (auto [from, to] :
         llvm::zip_equal(lowered.externals, signature.externals))
      mapping.map(from, to);
    OpBuilder builder(op);
    for (Operation *from : lowered.ops) {
      Operation *made = builder.clone(*from, mapping);
      made->walk([&](Operation *inner) {
        inner->setLoc(op->getLoc());
        if (auto bind = dyn_cast<BindChunkOp>(inner))
          bind.setSiteAttr(sites.lookup(bind.getSiteAttr()));
        auto address = dyn_cast<LLVM::AddressOfOp>(inner);
        if (!address)
          return;
        if (StringAttr name =
                symbols.lookup(address.getGlobalNameAttr().getAttr()))
          address.setGlobalNameAttr(FlatSymbolRefAttr::get(name));
      });
    }
    for (auto [result, value] :
         llvm::zip_equal(op->getResults(), lowered.results))
      if (value)
        result.replaceAllUsesWith(mapping.lookupOrDefault(value));
    op->erase();
  }

  /// Below this many ops a function saves less than the calls of it take.
  static constexpr int64_t kWorthOutlining = 32;

  PatternRewriter rewriter;
  PatternApplicator applicator;
  const bool copies;
  DenseSet<Operation *> erased;
  std::map<std::vector<uintptr_t>, Lowered> known;
};
} // namespace

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
  // Code of a CPU is for each op to have.
  ProgramLowering(module.getContext(), frozen, /*copies=*/target != "CPU")
      .lower(module);
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
