//===- OpBuffers.cpp - Tensors of an op as memrefs ------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "OpBuffers.h"
#include "corey/Dialect/SSM/Transforms/Passes.h"
#include "mlir/Dialect/Arith/Utils/Utils.h"
#include "mlir/Dialect/Bufferization/IR/Bufferization.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "llvm/ADT/SetVector.h"

using namespace mlir;
using namespace corey;

MemRefType corey::stridedMemRefType(RankedTensorType type) {
  SmallVector<int64_t> strides(type.getRank(), ShapedType::kDynamic);
  if (!strides.empty())
    strides.back() = 1;
  return MemRefType::get(
      type.getShape(), type.getElementType(),
      StridedLayoutAttr::get(type.getContext(), ShapedType::kDynamic, strides));
}

OpBuffers::OpBuffers(PatternRewriter &rewriter, Operation *op)
    : op(op), rewriter(rewriter), where(op->getLoc()) {
  if (!isa_and_nonnull<ssm::FusedOp>(op->getParentOp()))
    return;
  FailureOr<FusionPlan> found = planFusedRegion(op->getParentOp());
  if (succeeded(found) &&
      (found->anchor ? found->anchor : found->result.getDefiningOp()) == op)
    plan = std::move(*found);
}

/// Whether `tensor` is an argument of a function that has the attribute `name`,
/// seen through the regions of kernels.
static bool isArgumentWith(Value tensor, StringRef name) {
  auto argument = dyn_cast<BlockArgument>(tensor);
  if (!argument || !argument.getOwner()->isEntryBlock())
    return false;
  Operation *parent = argument.getOwner()->getParentOp();
  if (auto fused = dyn_cast<ssm::FusedOp>(parent))
    return isArgumentWith(fused.getInputs()[argument.getArgNumber()], name);
  auto function = dyn_cast<func::FuncOp>(parent);
  return function && function.getArgAttr(argument.getArgNumber(), name);
}

bool OpBuffers::hasAnyStrides(Value tensor) {
  return isArgumentWith(tensor, ssm::kAnyStridesAttr);
}

void OpBuffers::readByElement(Value tensor) {
  if (tensor)
    byElement.insert(tensor);
}

bool OpBuffers::isAnyStridesResult(Value value) {
  for (;;) {
    OpOperand *only = nullptr;
    for (OpOperand &use : value.getUses()) {
      // Sizes, and what keeps track of a value while it is lowered.
      if (isa<tensor::DimOp, UnrealizedConversionCastOp>(use.getOwner()))
        continue;
      if (only)
        return false;
      only = &use;
    }
    if (!only)
      return false;
    Operation *user = only->getOwner();
    if (isa<ssm::YieldOp>(user)) {
      value = user->getParentOp()->getResult(only->getOperandNumber());
      continue;
    }
    auto function = dyn_cast<func::FuncOp>(user->getParentOp());
    return isa<func::ReturnOp>(user) && function &&
           function.getResultAttr(only->getOperandNumber(),
                                  ssm::kAnyStridesAttr);
  }
}

bool OpBuffers::isWeight(Value tensor) {
  while (isa_and_nonnull<tensor::CastOp, tensor::ExtractSliceOp,
                         tensor::ExpandShapeOp, tensor::CollapseShapeOp>(
      tensor.getDefiningOp()))
    tensor = tensor.getDefiningOp()->getOperand(0);
  return isArgumentWith(tensor, ssm::kWeightArgAttr);
}

Value OpBuffers::view(Value tensor) {
  if (!tensor)
    return {};
  auto type = cast<RankedTensorType>(tensor.getType());
  // An innermost stride of 1 would cost a copy where there is another.
  return bufferization::ToBufferOp::create(
      rewriter, where,
      isReadByElement(tensor)
          ? cast<MemRefType>(
                bufferization::getMemRefTypeWithFullyDynamicLayout(type))
          : stridedMemRefType(type),
      tensor,
      /*read_only=*/true);
}

ssm::HadamardOp OpBuffers::rotation() const {
  return plan ? dyn_cast_or_null<ssm::HadamardOp>(plan->rotation)
              : ssm::HadamardOp();
}

bool OpBuffers::isComputed(Value tensor) const {
  return plan && plan->contains(tensor.getDefiningOp());
}

RankedTensorType OpBuffers::outputType(unsigned index) const {
  auto type = cast<RankedTensorType>(op->getResult(index).getType());
  if (index == 0 && hasEpilogue())
    return type.clone(
        cast<RankedTensorType>(plan->result.getType()).getElementType());
  return type;
}

Value OpBuffers::allocate(unsigned index) {
  if (resultShapes.empty())
    (void)cast<ReifyRankedShapedTypeOpInterface>(op).reifyResultShapes(
        rewriter, resultShapes);
  RankedTensorType type = outputType(index);
  SmallVector<Value> sizes;
  for (int64_t dim = 0; dim < type.getRank(); ++dim)
    if (type.isDynamicDim(dim))
      sizes.push_back(getValueOrCreateConstantIndexOp(
          rewriter, where, resultShapes[index][dim]));
  return memref::AllocOp::create(
      rewriter, where, MemRefType::get(type.getShape(), type.getElementType()),
      sizes, rewriter.getI64IntegerAttr(64));
}

void OpBuffers::replaceWith(ValueRange buffers) {
  SmallVector<Value> tensors;
  for (auto [i, result, buffer] : llvm::enumerate(op->getResults(), buffers)) {
    Value replaced =
        i == 0 && hasEpilogue() ? plan->result : static_cast<Value>(result);
    auto memref = cast<MemRefType>(buffer.getType());
    // Not writable: readers of the tensor fold to readers of the buffer, of
    // which those who would write to it in place do not know.
    Value tensor = bufferization::ToTensorOp::create(
        rewriter, where,
        RankedTensorType::get(memref.getShape(), memref.getElementType()),
        buffer, /*restrict=*/true, /*writable=*/false);
    if (tensor.getType() != replaced.getType())
      tensor =
          tensor::CastOp::create(rewriter, where, replaced.getType(), tensor);
    if (replaced != result) {
      rewriter.replaceAllUsesWith(replaced, tensor);
      // What the epilogue was is dead now and goes away with the next clean-up;
      // until then it reads a tensor of no content.
      SmallVector<Value> sizes;
      auto type = cast<RankedTensorType>(result.getType());
      for (int64_t dim = 0; dim < type.getRank(); ++dim)
        if (type.isDynamicDim(dim))
          sizes.push_back(getValueOrCreateConstantIndexOp(
              rewriter, where, resultShapes[0][dim]));
      tensor = tensor::EmptyOp::create(rewriter, where, type.getShape(),
                                       type.getElementType(), sizes);
    }
    tensors.push_back(tensor);
  }
  rewriter.replaceOp(op, tensors);
}

bool corey::replaceUnneeded(PatternRewriter &rewriter, Operation *op) {
  auto mayBeUnneeded = [](Operation *op) {
    auto fusable = dyn_cast<ssm::FusableOpInterface>(op);
    return fusable && (fusable.isPointwise() || mayRotate(op) ||
                       (isa<ssm::RMSNormOp>(op) && op->getNumResults() == 1));
  };
  llvm::SetVector<Operation *> unneeded;
  unneeded.insert(op);
  for (size_t i = 0; i < unneeded.size(); ++i) {
    if (!mayBeUnneeded(unneeded[i]))
      return false;
    for (Operation *user : unneeded[i]->getUsers())
      if (!isa<tensor::DimOp>(user))
        unneeded.insert(user);
  }
  // Its users, still to be visited, find a tensor of no content.
  Location loc = op->getLoc();
  Type type = op->getResult(0).getType();
  Value empty = tensor::EmptyOp::create(
      rewriter, loc, tensor::getMixedSizes(rewriter, loc, op->getOperand(0)),
      getElementTypeOrSelf(type));
  if (empty.getType() != type)
    empty = tensor::CastOp::create(rewriter, loc, type, empty);
  rewriter.replaceOp(op, empty);
  return true;
}

Value OpBuffers::callRuntime(StringRef name, ValueRange arguments,
                             Type result) {
  auto module = op->getParentOfType<ModuleOp>();
  TypeRange results = result ? TypeRange(result) : TypeRange();
  if (!module.lookupSymbol<func::FuncOp>(name)) {
    OpBuilder::InsertionGuard guard(rewriter);
    rewriter.setInsertionPointToStart(module.getBody());
    func::FuncOp::create(
        rewriter, module.getLoc(), name,
        rewriter.getFunctionType(arguments.getTypes(), results))
        .setPrivate();
  }
  auto call = func::CallOp::create(rewriter, where, name, results, arguments);
  return result ? call.getResult(0) : Value();
}

Value OpBuffers::address(Value memref) {
  Value base =
      memref::ExtractAlignedPointerAsIndexOp::create(rewriter, where, memref);
  auto metadata =
      memref::ExtractStridedMetadataOp::create(rewriter, where, memref);
  Value bytes = arith::ConstantIndexOp::create(
      rewriter, where,
      cast<MemRefType>(memref.getType()).getElementTypeBitWidth() / 8);
  Value offset =
      rewriter.createOrFold<arith::MulIOp>(where, metadata.getOffset(), bytes);
  return toI64(rewriter.createOrFold<arith::AddIOp>(where, base, offset));
}

Value OpBuffers::toI64(Value index) {
  return arith::IndexCastOp::create(rewriter, where, rewriter.getI64Type(),
                                    index);
}

Value OpBuffers::siteAddress(FlatSymbolRefAttr site) {
  auto module = op->getParentOfType<ModuleOp>();
  std::string name = "corey_site_" + site.getValue().str();
  if (!module.lookupSymbol(name)) {
    OpBuilder::InsertionGuard guard(rewriter);
    rewriter.setInsertionPointToStart(module.getBody());
    std::string text = site.getValue().str();
    text.push_back('\0');
    auto type = LLVM::LLVMArrayType::get(rewriter.getI8Type(), text.size());
    LLVM::GlobalOp::create(rewriter, module.getLoc(), type, /*isConstant=*/true,
                           LLVM::Linkage::Internal, name,
                           rewriter.getStringAttr(text));
  }
  Value address = LLVM::AddressOfOp::create(
      rewriter, where, LLVM::LLVMPointerType::get(rewriter.getContext()), name);
  return LLVM::PtrToIntOp::create(rewriter, where, rewriter.getI64Type(),
                                  address);
}
