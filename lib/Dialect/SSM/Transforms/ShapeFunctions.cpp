//===- ShapeFunctions.cpp - Shapes and checks as functions ----------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Dialect/SSM/IR/SSMOps.h"
#include "corey/Dialect/SSM/Transforms/Passes.h"
#include "mlir/Dialect/Arith/Utils/Utils.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/MemRef/Transforms/Transforms.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/IR/IRMapping.h"
#include "mlir/IR/Matchers.h"
#include "mlir/IR/PatternMatch.h"
#include "mlir/Transforms/GreedyPatternRewriteDriver.h"

namespace corey::ssm {
#define GEN_PASS_DEF_SSMSHAPEFUNCTIONS
#include "corey/Dialect/SSM/Transforms/Passes.h.inc"
} // namespace corey::ssm

using namespace mlir;
using namespace corey::ssm;

namespace {
struct SSMShapeFunctions
    : public corey::ssm::impl::SSMShapeFunctionsBase<SSMShapeFunctions> {
  using Base::Base;

  void runOnOperation() override {
    SmallVector<func::FuncOp> functions;
    for (auto function : getOperation().getOps<func::FuncOp>())
      if (!function.isExternal() && !function.isPrivate() &&
          !function.getSymName().ends_with(kShapesSuffix))
        functions.push_back(function);
    for (func::FuncOp function : functions)
      if (failed(checkFunction(function)) || failed(addShapeFunction(function)))
        return signalPassFailure();
  }

  /// Names the lowering needs for itself, and calls, which the inliner leaves
  /// only where a function calls itself.
  static LogicalResult checkFunction(func::FuncOp function) {
    StringRef name = function.getSymName();
    for (StringRef prefix : {"corey_rt_", "corey.", "_mlir_ciface_", "llvm."})
      if (name.starts_with(prefix))
        return function.emitOpError()
               << "expected a name that does not start with '" << prefix
               << "', got '" << name << "'";
    if (name == "malloc" || name == "free")
      return function.emitOpError() << "expected a name other than that of an "
                                       "allocation function, got '"
                                    << name << "'";
    WalkResult result = function.walk([](func::CallOp call) {
      call.emitOpError() << "expected calls that can be inlined, got one of @"
                         << call.getCallee();
      return WalkResult::interrupt();
    });
    return failure(result.wasInterrupted());
  }

  LogicalResult addShapeFunction(func::FuncOp function) {
    MLIRContext *context = &getContext();
    if (!llvm::hasSingleElement(function.getBody()))
      return function.emitOpError("expected a body of one block");
    std::string name = (function.getSymName() + kShapesSuffix).str();
    // The shape function of an earlier run is replaced.
    if (Operation *old = SymbolTable::lookupSymbolIn(getOperation(), name)) {
      if (!old->hasAttr(kConstraintsAttr))
        return function.emitOpError(
                   "expected the name of its shape function to be "
                   "free, got another symbol @")
               << name;
      old->erase();
    }
    // A copy that ends in the sizes of interest; everything else dies.
    OpBuilder builder(function);
    func::FuncOp work = function.clone();
    builder.insert(work);
    work.setName(name);
    inlineFusedRegions(work);
    auto terminator =
        cast<func::ReturnOp>(work.getBody().front().getTerminator());
    builder.setInsertionPoint(terminator);
    Location loc = function.getLoc();

    SmallVector<Value> sizes;
    for (auto [i, value] : llvm::enumerate(terminator.getOperands())) {
      auto type = dyn_cast<RankedTensorType>(value.getType());
      if (!type)
        return function.emitOpError()
               << "expected result " << i << " to be a ranked tensor, got "
               << value.getType();
      for (int64_t dim = 0; dim < type.getRank(); ++dim)
        sizes.push_back(builder.createOrFold<tensor::DimOp>(loc, value, dim));
    }
    size_t numSizes = sizes.size();
    SmallVector<DimConstraint> constraints;
    SmallVector<Location> locations;
    // Sizes of values made inside control flow cannot be had at the end.
    auto isKnown = [&](Value value) {
      return !value || value.getParentBlock() == &work.getBody().front();
    };
    WalkResult walk = work.walk([&](Operation *op) {
      size_t first = constraints.size();
      collectDimConstraints(op, constraints);
      for (size_t i = first; i < constraints.size(); ++i)
        if (!isKnown(constraints[i].lhs) || !isKnown(constraints[i].rhs)) {
          op->emitOpError("expected operands of static shape inside control "
                          "flow, got sizes that only a run would tell");
          return WalkResult::interrupt();
        }
      return WalkResult::advance();
    });
    if (walk.wasInterrupted()) {
      work.erase();
      return failure();
    }
    collectSliceBounds(work, builder, constraints);
    for (const DimConstraint &c : constraints) {
      Value lhs = builder.createOrFold<tensor::DimOp>(loc, c.lhs, c.lhsDim);
      sizes.push_back(lhs);
      // A bound is an equality with the larger of the two.
      if (c.symbol == kAtLeast) {
        sizes.push_back(builder.createOrFold<arith::MaxSIOp>(loc, lhs, c.rhs));
        continue;
      }
      Value rhs =
          c.rhs ? builder.createOrFold<tensor::DimOp>(loc, c.rhs, c.rhsDim)
                : Value();
      Value offset = arith::ConstantIndexOp::create(builder, loc, c.offset);
      if (!rhs)
        rhs = offset;
      else if (c.offset)
        rhs = arith::AddIOp::create(builder, loc, rhs, offset);
      sizes.push_back(rhs);
    }
    func::ReturnOp::create(builder, loc, sizes);
    terminator.erase();
    work.setType(builder.getFunctionType(work.getArgumentTypes(),
                                         TypeRange(ValueRange(sizes))));
    work.setAllResultAttrs(ArrayRef<DictionaryAttr>());
    // Statistics are no business of a shape function and would keep ops alive.
    work.walk([](ObserveOp op) {
      op.replaceAllUsesWith(op.getX());
      op.erase();
    });
    RewritePatternSet patterns(context);
    memref::populateResolveRankedShapedTypeResultDimsPatterns(patterns);
    for (RegisteredOperationName op : context->getRegisteredOperations())
      if (op.getDialectNamespace() == "tensor" ||
          op.getDialectNamespace() == "arith")
        op.getCanonicalizationPatterns(patterns, context);
    (void)applyPatternsGreedily(work, std::move(patterns));

    // What is left must be index arithmetic over dimensions of arguments.
    auto isScalar = [](Type type) { return type.isIntOrIndex(); };
    auto isArgument = [&](Value value) {
      auto arg = dyn_cast<BlockArgument>(value);
      return arg && arg.getOwner() == &work.getBody().front();
    };
    for (Operation &op : work.getBody().front()) {
      bool plain =
          isa<func::ReturnOp>(op) || op.hasTrait<OpTrait::ConstantLike>() ||
          (isPure(&op) && llvm::all_of(op.getOperandTypes(), isScalar) &&
           llvm::all_of(op.getResultTypes(), isScalar));
      if (auto dim = dyn_cast<tensor::DimOp>(op))
        plain = isArgument(dim.getSource()) && dim.getConstantIndex();
      // Scalars among the arguments are not at hand in the shape function.
      for (Value operand : op.getOperands())
        if (auto arg = dyn_cast<BlockArgument>(operand);
            arg && isScalar(arg.getType())) {
          function.emitOpError()
              << "expected result shapes to follow from argument "
                 "shapes, got a shape that depends on the value of argument "
              << arg.getArgNumber();
          work.erase();
          return failure();
        }
      if (!plain) {
        function.emitOpError()
            << "expected result shapes to follow from argument "
               "shapes, got a shape that depends on '"
            << op.getName() << "'";
        work.erase();
        return failure();
      }
    }

    auto finalReturn =
        cast<func::ReturnOp>(work.getBody().front().getTerminator());
    auto original = [](Value value) -> std::pair<int64_t, int64_t> {
      auto dim = value.getDefiningOp<tensor::DimOp>();
      if (!dim)
        return {-1, -1};
      return {cast<BlockArgument>(dim.getSource()).getArgNumber(),
              *dim.getConstantIndex()};
    };
    // Drop constraints that hold by construction, and repetitions.
    SmallVector<Value> kept(finalReturn.getOperands().take_front(numSizes));
    SmallVector<Attribute> described;
    llvm::DenseSet<std::pair<Value, Value>> seen;
    DenseMap<std::pair<int64_t, int64_t>, Value> unique;
    auto canonical = [&](Value value) {
      auto key = original(value);
      return key.first < 0 ? value
                           : unique.try_emplace(key, value).first->second;
    };
    for (auto [i, constraint] : llvm::enumerate(constraints)) {
      Value lhs = canonical(finalReturn.getOperand(numSizes + 2 * i));
      Value rhs = canonical(finalReturn.getOperand(numSizes + 2 * i + 1));
      APInt a, b;
      if (lhs == rhs || !seen.insert({lhs, rhs}).second ||
          (matchPattern(lhs, m_ConstantInt(&a)) &&
           matchPattern(rhs, m_ConstantInt(&b)) && a == b))
        continue;
      kept.push_back(lhs);
      kept.push_back(rhs);
      auto [lhsArg, lhsDim] = original(lhs);
      auto [rhsArg, rhsDim] = original(rhs);
      auto integer = [&](int64_t v) { return builder.getI64IntegerAttr(v); };
      described.push_back(builder.getArrayAttr(
          {integer(lhsArg), integer(lhsDim), integer(rhsArg), integer(rhsDim),
           builder.getStringAttr(constraint.symbol)}));
      ++numConstraints;
    }

    // The final form reads and writes flat arrays of sizes.
    SmallVector<int64_t> firstDim;
    int64_t total = 0;
    for (Type type : function.getArgumentTypes()) {
      firstDim.push_back(total);
      if (auto shaped = dyn_cast<RankedTensorType>(type))
        total += shaped.getRank();
    }
    auto sizesType =
        MemRefType::get({ShapedType::kDynamic}, builder.getIndexType());
    builder.setInsertionPoint(work);
    auto shapes = func::FuncOp::create(
        builder, loc, name,
        builder.getFunctionType({sizesType, sizesType}, {}));
    Block *block = shapes.addEntryBlock();
    builder.setInsertionPointToStart(block);
    IRMapping mapping;
    for (Operation &op : work.getBody().front().without_terminator()) {
      auto dim = dyn_cast<tensor::DimOp>(op);
      if (!dim) {
        builder.clone(op, mapping);
        continue;
      }
      auto [arg, index] = original(dim.getResult());
      Value slot =
          arith::ConstantIndexOp::create(builder, loc, firstDim[arg] + index);
      mapping.map(
          dim.getResult(),
          memref::LoadOp::create(builder, loc, block->getArgument(0), slot));
    }
    for (auto [i, value] : llvm::enumerate(kept)) {
      Value slot = arith::ConstantIndexOp::create(builder, loc, i);
      memref::StoreOp::create(builder, loc, mapping.lookup(value),
                              block->getArgument(1), slot);
    }
    func::ReturnOp::create(builder, loc);
    shapes->setAttr(kConstraintsAttr, builder.getArrayAttr(described));
    work.erase();
    return success();
  }

  /// Appends that every slice with constant offsets lies in its source: what
  /// `c.rhs` computes is the least size the source's dimension must have.
  static void collectSliceBounds(func::FuncOp function, OpBuilder &builder,
                                 SmallVectorImpl<DimConstraint> &constraints) {
    for (auto slice :
         function.getBody().front().getOps<tensor::ExtractSliceOp>()) {
      Location loc = slice.getLoc();
      auto offsets = slice.getStaticOffsets(),
           strides = slice.getStaticStrides();
      for (auto [dim, size] : llvm::enumerate(slice.getMixedSizes())) {
        if (ShapedType::isDynamic(offsets[dim]) ||
            ShapedType::isDynamic(strides[dim]) ||
            (!slice.getSourceType().isDynamicDim(dim) && isa<Attribute>(size)))
          continue;
        auto constant = [&](int64_t value) -> Value {
          return arith::ConstantIndexOp::create(builder, loc, value);
        };
        // offset + (size - 1) stride + 1
        Value count = getValueOrCreateConstantIndexOp(builder, loc, size);
        Value last =
            builder.createOrFold<arith::AddIOp>(loc, count, constant(-1));
        if (strides[dim] != 1)
          last = builder.createOrFold<arith::MulIOp>(loc, last,
                                                     constant(strides[dim]));
        Value end = builder.createOrFold<arith::AddIOp>(
            loc, last, constant(offsets[dim] + 1));
        constraints.push_back({slice.getSource(), static_cast<int64_t>(dim),
                               end, 0, 0, kAtLeast.str()});
      }
    }
  }

  static void inlineFusedRegions(func::FuncOp function) {
    SmallVector<FusedOp> regions;
    function.walk<WalkOrder::PreOrder>(
        [&](FusedOp op) { regions.push_back(op); });
    IRRewriter rewriter(function.getContext());
    for (FusedOp op : regions) {
      Block &block = op.getBody().front();
      auto yield = cast<YieldOp>(block.getTerminator());
      rewriter.inlineBlockBefore(&block, op, op.getInputs());
      SmallVector<Value> results(yield.getValues());
      rewriter.replaceOp(op, results);
      rewriter.eraseOp(yield);
    }
  }
};
} // namespace
