//===- Buffers.cpp - Steps of the pipelines on buffers --------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Dialect/SSM/Transforms/Passes.h"
#include "corey/Pipelines/Pipelines.h"
#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/Bufferization/IR/Bufferization.h"
#include "mlir/Dialect/Bufferization/Transforms/OneShotAnalysis.h"
#include "mlir/Dialect/Bufferization/Transforms/OneShotModuleBufferize.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/Linalg/Utils/Utils.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/OpenMP/OpenMPDialect.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/IR/PatternMatch.h"
#include "mlir/Interfaces/ViewLikeInterface.h"

namespace corey {
#define GEN_PASS_DEF_BUFFERIZE
#define GEN_PASS_DEF_GUARDPARALLELREGIONS
#define GEN_PASS_DEF_INSERTDEALLOCATIONS
#define GEN_PASS_DEF_RUNTIMEALLOCATION
#define GEN_PASS_DEF_SERIALIZEINNERLOOPS
#include "corey/Pipelines/Passes.h.inc"
} // namespace corey

using namespace mlir;

//===----------------------------------------------------------------------===//
// corey-bufferize
//===----------------------------------------------------------------------===//

/// The memref that `value` is, seen through casts that change only the type.
static Value stripCasts(Value value) {
  while (auto cast = value.getDefiningOp<memref::CastOp>())
    value = cast.getSource();
  return value;
}

static MemRefType anyStridesType(ShapedType type) {
  return cast<MemRefType>(bufferization::getMemRefTypeWithFullyDynamicLayout(
      RankedTensorType::get(type.getShape(), type.getElementType())));
}

/// Turns results into trailing arguments; fresh allocations are replaced.
static void resultsToArguments(func::FuncOp function) {
  if (function.isExternal() || function.getNumResults() == 0)
    return;
  auto terminator =
      cast<func::ReturnOp>(function.getBody().front().getTerminator());
  OpBuilder builder(terminator);
  Location loc = terminator.getLoc();
  SmallVector<Value> plain;
  SmallVector<Type> plainTypes;
  for (auto [i, value] : llvm::enumerate(terminator.getOperands())) {
    auto type = dyn_cast<MemRefType>(value.getType());
    if (!type) {
      plain.push_back(value);
      plainTypes.push_back(value.getType());
      continue;
    }
    auto outType = MemRefType::get(type.getShape(), type.getElementType());
    unsigned index = function.getNumArguments();
    DictionaryAttr attrs = function.getResultAttrDict(i);
    if (attrs && attrs.contains(corey::ssm::kAnyStridesAttr))
      outType = anyStridesType(type);
    (void)function.insertArgument(index, outType,
                                  attrs ? attrs : DictionaryAttr(), loc);
    Value out = function.getArgument(index);
    Value source = stripCasts(value);
    auto alloc = source.getDefiningOp<memref::AllocOp>();
    if (alloc && alloc->getBlock() == terminator->getBlock() &&
        alloc.getType() == outType) {
      alloc.replaceAllUsesWith(out);
      alloc.erase();
    } else {
      memref::CopyOp::create(builder, loc, value, out);
    }
  }
  terminator->setOperands(plain);
  SmallVector<Attribute> none(plainTypes.size(),
                              DictionaryAttr::get(function.getContext()));
  function.setAllResultAttrs(ArrayRef<Attribute>());
  function.setType(FunctionType::get(function.getContext(),
                                     function.getBody().getArgumentTypes(),
                                     plainTypes));
}

/// Makes memrefs of the arguments and results of any strides, which no type
/// conversion could tell from others of their type. What wants a unit stride of
/// an argument after all gets a copy.
static void convertStridedTensors(func::FuncOp function) {
  if (function.isExternal())
    return;
  OpBuilder builder(function.getBody());
  for (BlockArgument argument : function.getArguments()) {
    auto type = dyn_cast<RankedTensorType>(argument.getType());
    if (!type || !function.getArgAttr(argument.getArgNumber(),
                                      corey::ssm::kAnyStridesAttr))
      continue;
    argument.setType(anyStridesType(type));
    auto tensor = bufferization::ToTensorOp::create(
        builder, argument.getLoc(), type, argument, /*restrict=*/true,
        /*writable=*/false);
    argument.replaceAllUsesExcept(tensor, tensor);
  }
  SmallVector<Type> results(function.getResultTypes());
  for (unsigned i = 0; i < results.size(); ++i) {
    auto type = dyn_cast<RankedTensorType>(results[i]);
    if (!type || !function.getResultAttr(i, corey::ssm::kAnyStridesAttr))
      continue;
    results[i] = anyStridesType(type);
    // Branches of a function each have an end of their own.
    for (auto end : function.getOps<func::ReturnOp>()) {
      builder.setInsertionPoint(end);
      OpOperand &result = end->getOpOperand(i);
      result.set(bufferization::ToBufferOp::create(
          builder, end.getLoc(), anyStridesType(type), result.get(),
          /*read_only=*/true));
    }
  }
  function.setType(FunctionType::get(
      function.getContext(), function.getBody().getArgumentTypes(), results));
}

namespace {
struct Bufferize : public corey::impl::BufferizeBase<Bufferize> {
  using Base::Base;
  void runOnOperation() override {
    bufferization::OneShotBufferizationOptions options;
    options.bufferizeFunctionBoundaries = true;
    // What a loop carries may be a new buffer in every iteration; the arena
    // takes all of them back when the call ends.
    options.allowReturnAllocsFromLoops = true;
    options.setFunctionBoundaryTypeConversion(
        bufferization::LayoutMapOption::InferLayoutMap);
    options.functionArgTypeConverterFn =
        [](bufferization::TensorLikeType type, Attribute memorySpace,
           func::FuncOp, const bufferization::BufferizationOptions &) {
          auto tensor = cast<RankedTensorType>(type);
          SmallVector<int64_t> strides(tensor.getRank(), ShapedType::kDynamic);
          if (!strides.empty())
            strides.back() = 1;
          auto layout = StridedLayoutAttr::get(tensor.getContext(),
                                               ShapedType::kDynamic, strides);
          return cast<bufferization::BufferLikeType>(MemRefType::get(
              tensor.getShape(), tensor.getElementType(), layout, memorySpace));
        };
    for (auto function : getOperation().getOps<func::FuncOp>())
      convertStridedTensors(function);
    bufferization::BufferizationState state;
    // Inputs belong to the caller and are never written.
    for (auto function : getOperation().getOps<func::FuncOp>())
      if (!function.isExternal())
        for (unsigned i = 0; i < function.getNumArguments(); ++i)
          if (isa<TensorType>(function.getArgumentTypes()[i]))
            function.setArgAttr(
                i, bufferization::BufferizationDialect::kWritableAttrName,
                BoolAttr::get(&getContext(), false));
    if (failed(bufferization::runOneShotModuleBufferize(getOperation(), options,
                                                        state)))
      return signalPassFailure();
    bufferization::removeBufferizationAttributesInModule(getOperation());
    // Where branches differ in layout the new buffer was given the looser one.
    allocatePlainly(/*outputs=*/false);
    for (auto function : getOperation().getOps<func::FuncOp>())
      if (!function.isPrivate()) {
        resultsToArguments(function);
        function->setAttr("llvm.emit_c_interface",
                          UnitAttr::get(&getContext()));
      }
    // What was to be an output of any strides, and is none.
    allocatePlainly(/*outputs=*/true);
    if (keepCopies)
      return;
    // Copies become loops like everything else.
    SmallVector<memref::CopyOp> copies;
    getOperation().walk([&](memref::CopyOp op) { copies.push_back(op); });
    for (memref::CopyOp op : copies) {
      OpBuilder builder(op);
      linalg::makeMemRefCopyOp(builder, op.getLoc(), op.getSource(),
                               op.getTarget());
      op.erase();
    }
  }

  /// Replaces allocations of a layout by plain ones that are viewed so: those
  /// of outputs have their strides given.
  void allocatePlainly(bool outputs) {
    SmallVector<memref::AllocOp> allocs;
    getOperation().walk([&](memref::AllocOp op) {
      if (!op.getType().getLayout().isIdentity() &&
          op.getSymbolOperands().empty() != outputs)
        allocs.push_back(op);
    });
    for (memref::AllocOp op : allocs) {
      OpBuilder builder(op);
      MemRefType type = op.getType();
      Value plain = memref::AllocOp::create(
          builder, op.getLoc(),
          MemRefType::get(type.getShape(), type.getElementType()),
          op.getDynamicSizes(), op.getAlignmentAttr());
      Value view = memref::CastOp::create(builder, op.getLoc(), type, plain);
      op.replaceAllUsesWith(view);
      op.erase();
    }
  }
};

//===----------------------------------------------------------------------===//
// corey-insert-deallocations
//===----------------------------------------------------------------------===//

struct InsertDeallocations
    : public corey::impl::InsertDeallocationsBase<InsertDeallocations> {
  void runOnOperation() override {
    SmallVector<memref::AllocOp> allocs;
    getOperation().walk([&](memref::AllocOp op) { allocs.push_back(op); });
    for (memref::AllocOp alloc : allocs) {
      // The allocation and everything that may alias it.
      SmallVector<Value> worklist{alloc.getResult()};
      llvm::SmallDenseSet<Value> aliases;
      Operation *last = alloc;
      bool freed = false, escapes = false;
      while (!worklist.empty()) {
        Value value = worklist.pop_back_val();
        if (!aliases.insert(value).second)
          continue;
        for (Operation *user : value.getUsers()) {
          freed |= isa<memref::DeallocOp>(user);
          // Memref results of any user may be views of it, numbers made from
          // its address still point to it; what a region yields may be a
          // result of its parent.
          bool address = !isa<BaseMemRefType>(value.getType()) ||
                         isa<memref::ExtractAlignedPointerAsIndexOp>(user);
          for (Value result : user->getResults())
            if (isa<BaseMemRefType>(result.getType()) || address)
              worklist.push_back(result);
          // What leaves its block lives on, how long only a run would tell.
          escapes |= user->hasTrait<OpTrait::IsTerminator>() &&
                     user->getBlock() == alloc->getBlock();
          if (user->hasTrait<OpTrait::IsTerminator>() && user->getParentOp())
            for (Value result : user->getParentOp()->getResults())
              if (isa<BaseMemRefType>(result.getType()) || address)
                worklist.push_back(result);
          Operation *ancestor = alloc->getBlock()->findAncestorOpInBlock(*user);
          if (ancestor && last->isBeforeInBlock(ancestor))
            last = ancestor;
        }
      }
      if (freed || escapes)
        continue;
      OpBuilder builder(alloc->getContext());
      if (last->hasTrait<OpTrait::IsTerminator>())
        builder.setInsertionPoint(last);
      else
        builder.setInsertionPointAfter(last);
      memref::DeallocOp::create(builder, alloc.getLoc(), alloc.getResult());
      ++numDeallocations;
    }
  }
};

//===----------------------------------------------------------------------===//
// corey-serialize-inner-loops
//===----------------------------------------------------------------------===//

struct SerializeInnerLoops
    : public corey::impl::SerializeInnerLoopsBase<SerializeInnerLoops> {
  void runOnOperation() override {
    SmallVector<scf::ParallelOp> loops;
    getOperation().walk([&](scf::ParallelOp op) { loops.push_back(op); });
    for (scf::ParallelOp loop : loops) {
      // Loops that stand around vectors are already what they should be.
      bool holdsLoops = llvm::any_of(*loop.getBody(), [](Operation &op) {
        return op.getNumRegions() > 0 ||
               isa<memref::AllocaOp, memref::AllocOp>(op);
      });
      if (holdsLoops || loop.getNumReductions())
        continue;
      IRRewriter builder(loop);
      Location loc = loop.getLoc();
      unsigned outer = loop.getNumLoops() - 1;
      Value lower = loop.getLowerBound()[outer],
            upper = loop.getUpperBound()[outer];
      Value step = loop.getStep()[outer];
      SmallVector<Value> ivs;
      if (outer) {
        auto split = scf::ParallelOp::create(
            builder, loc, loop.getLowerBound().take_front(outer),
            loop.getUpperBound().take_front(outer),
            loop.getStep().take_front(outer));
        llvm::append_range(ivs, split.getInductionVars());
        builder.setInsertionPoint(split.getBody()->getTerminator());
      }
      auto inner = scf::ForOp::create(builder, loc, lower, upper, step);
      ivs.push_back(inner.getInductionVar());
      Block *body = loop.getBody();
      builder.eraseOp(body->getTerminator());
      builder.inlineBlockBefore(body, inner.getBody()->getTerminator(), ivs);
      builder.eraseOp(loop);
    }
  }
};

//===----------------------------------------------------------------------===//
// corey-guard-parallel-regions
//===----------------------------------------------------------------------===//

struct GuardParallelRegions
    : public corey::impl::GuardParallelRegionsBase<GuardParallelRegions> {
  void runOnOperation() override {
    // A scope around an iteration frees its stack memory. It must become calls
    // before structured loops inside it turn into blocks.
    SmallVector<memref::AllocaScopeOp> scopes;
    getOperation().walk(
        [&](memref::AllocaScopeOp op) { scopes.push_back(op); });
    for (memref::AllocaScopeOp scope : scopes) {
      IRRewriter rewriter(scope);
      Location loc = scope.getLoc();
      Block *body = &scope.getBodyRegion().front();
      bool needed = llvm::any_of(*body, [](Operation &op) {
        return op.walk([](memref::AllocaOp) { return WalkResult::interrupt(); })
            .wasInterrupted();
      });
      Value stack;
      if (needed)
        stack = LLVM::StackSaveOp::create(
            rewriter, loc, LLVM::LLVMPointerType::get(&getContext()));
      Operation *terminator = body->getTerminator();
      SmallVector<Value> results(terminator->getOperands());
      rewriter.inlineBlockBefore(body, scope);
      rewriter.eraseOp(terminator);
      if (needed)
        LLVM::StackRestoreOp::create(rewriter, loc, stack);
      rewriter.replaceOp(scope, results);
    }
    getOperation().walk([&](omp::LoopNestOp nest) {
      auto region = nest->getParentOfType<omp::ParallelOp>();
      if (!region || region.getIfExpr() ||
          !llvm::all_of(nest.getLoopUpperBounds(), [&](Value v) {
            return !region->isAncestor(v.getParentBlock()->getParentOp());
          }))
        return;
      OpBuilder builder(region);
      Location loc = region.getLoc();
      // Bounds start at 0 with step 1 by construction of the loops.
      Value product = nest.getLoopUpperBounds().front();
      for (Value upper : nest.getLoopUpperBounds().drop_front())
        product = builder.createOrFold<arith::MulIOp>(loc, product, upper);
      Value one = arith::ConstantIndexOp::create(builder, loc, 1);
      Value several = builder.createOrFold<arith::CmpIOp>(
          loc, arith::CmpIPredicate::sgt, product, one);
      region.getIfExprMutable().assign(several);
    });
  }
};

//===----------------------------------------------------------------------===//
// corey-runtime-allocation
//===----------------------------------------------------------------------===//

struct RuntimeAllocation
    : public corey::impl::RuntimeAllocationBase<RuntimeAllocation> {
  using Base::Base;

  void runOnOperation() override {
    SymbolTable symbols(getOperation());
    for (auto [from, to] :
         {std::pair<StringRef, StringRef>{"malloc",
                                          onDevice ? "corey_rt_device_malloc"
                                                   : "corey_rt_malloc"},
          {"free", onDevice ? "corey_rt_device_free" : "corey_rt_free"}})
      if (auto function = symbols.lookup<LLVM::LLVMFuncOp>(from)) {
        if (failed(symbols.rename(function, to)))
          return signalPassFailure();
      }
  }
};
} // namespace
