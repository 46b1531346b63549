//===- LowerLaunches.cpp - Launches through the run-time library ----------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Conversion/SSMToGPU/SSMToGPU.h"
#include "corey/Dialect/SSM/Transforms/Passes.h"
#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/LLVMIR/NVVMDialect.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "llvm/ADT/MapVector.h"

namespace corey {
#define GEN_PASS_DEF_LOWERLAUNCHES
#include "corey/Conversion/SSMToGPU/Passes.h.inc"
} // namespace corey

using namespace mlir;
using namespace corey;

/// Whether a kernel waits for its predecessors itself, so that it may be
/// launched before they end.
static bool waitsForPredecessors(Operation *kernel) {
  return kernel
      ->walk([](NVVM::GriddepcontrolOp op) {
        return op.getKind() == NVVM::GridDepActionKind::wait
                   ? WalkResult::interrupt()
                   : WalkResult::advance();
      })
      .wasInterrupted();
}

namespace {
/// Builds host code around one op.
struct HostCode {
  HostCode(Operation *op)
      : b(op), loc(op->getLoc()), module(op->getParentOfType<ModuleOp>()),
        entry(&op->getParentOfType<func::FuncOp>().getBody().front()) {}

  OpBuilder b;
  Location loc;
  ModuleOp module;
  Block *entry;

  Value toI64(Value value) {
    if (value.getType().isIndex())
      return b.createOrFold<arith::IndexCastOp>(loc, b.getI64Type(), value);
    if (value.getType().isInteger(64))
      return value;
    return b.createOrFold<arith::ExtSIOp>(loc, b.getI64Type(), value);
  }
  Value constant(int64_t value) {
    return arith::ConstantOp::create(b, loc, b.getI64IntegerAttr(value));
  }
  /// Stack memory of the function: the op may be in a loop.
  Value onStack(Type type, int64_t count) {
    OpBuilder::InsertionGuard guard(b);
    b.setInsertionPointToStart(entry);
    return LLVM::AllocaOp::create(
        b, loc, LLVM::LLVMPointerType::get(b.getContext()), type,
        LLVM::ConstantOp::create(b, loc, b.getI64IntegerAttr(count)));
  }
  void store(Value value, Value array, Type type, int64_t index) {
    Value slot = LLVM::GEPOp::create(
        b, loc, array.getType(), type, array,
        ArrayRef<LLVM::GEPArg>{static_cast<int32_t>(index)});
    LLVM::StoreOp::create(b, loc, value, slot);
  }
  Value addressOf(Value pointer) {
    return LLVM::PtrToIntOp::create(b, loc, b.getI64Type(), pointer);
  }
  void call(StringRef name, ValueRange arguments) {
    if (!module.lookupSymbol(name)) {
      OpBuilder::InsertionGuard guard(b);
      b.setInsertionPointToStart(module.getBody());
      func::FuncOp::create(b, module.getLoc(), name,
                           b.getFunctionType(arguments.getTypes(), {}))
          .setPrivate();
    }
    func::CallOp::create(b, loc, name, TypeRange(), arguments);
  }
};

struct LowerLaunches : public corey::impl::LowerLaunchesBase<LowerLaunches> {
  void runOnOperation() override {
    ModuleOp module = getOperation();
    llvm::MapVector<StringAttr, int64_t> numbers;
    DenseMap<StringAttr, bool> isDependent;
    SymbolTableCollection symbols;
    SmallVector<gpu::LaunchFuncOp> launches;
    SmallVector<memref::CopyOp> copies;
    module.walk([&](gpu::LaunchFuncOp op) { launches.push_back(op); });
    module.walk([&](memref::CopyOp op) { copies.push_back(op); });
    for (gpu::LaunchFuncOp launch : launches) {
      auto [it, isNew] =
          numbers.insert({launch.getKernelName(), numbers.size()});
      auto [known, isFirst] =
          isDependent.try_emplace(launch.getKernelName(), false);
      if (isFirst)
        known->second = waitsForPredecessors(
            symbols.lookupNearestSymbolFrom(launch, launch.getKernel()));
      lower(launch, it->second, known->second);
    }
    for (memref::CopyOp copy : copies)
      lower(copy);
    SmallVector<Attribute> names;
    for (auto &[name, number] : numbers)
      names.push_back(name);
    module->setAttr(kKernelsAttr, ArrayAttr::get(&getContext(), names));
    // What is left and touches memory touches the host's.
    WalkResult result = module.walk<WalkOrder::PreOrder>([&](Operation *op) {
      if (isa<gpu::GPUModuleOp>(op))
        return WalkResult::skip();
      // Shapes are computed on the host, from sizes in its memory.
      if (auto function = dyn_cast<func::FuncOp>(op))
        if (function.getSymName().ends_with(ssm::kShapesSuffix))
          return WalkResult::skip();
      Value memref;
      if (auto load = dyn_cast<memref::LoadOp>(op))
        memref = load.getMemRef();
      else if (auto store = dyn_cast<memref::StoreOp>(op))
        memref = store.getMemRef();
      bool touches =
          isa_and_present<memref::AllocaOp>(memref ? memref.getDefiningOp()
                                                   : nullptr)
              ? false
              : memref || (op->getDialect() &&
                           op->getDialect()->getNamespace() == "linalg");
      if (!touches)
        return WalkResult::advance();
      op->emitError("expected every op on tensors to have a GPU lowering, got "
                    "one that the host would run on device memory");
      return WalkResult::interrupt();
    });
    if (result.wasInterrupted())
      signalPassFailure();
  }

  void lower(gpu::LaunchFuncOp launch, int64_t number, bool isDependent) {
    HostCode h(launch);
    auto pointer = LLVM::LLVMPointerType::get(&getContext());
    ValueRange operands = launch.getKernelOperands();
    Value array = h.onStack(pointer, std::max<int64_t>(operands.size(), 1));
    for (auto [i, operand] : llvm::enumerate(operands)) {
      Value slot = h.onStack(operand.getType(), 1);
      LLVM::StoreOp::create(h.b, h.loc, operand, slot);
      h.store(slot, array, pointer, i);
    }
    gpu::KernelDim3 grid = launch.getGridSizeOperandValues();
    gpu::KernelDim3 block = launch.getBlockSizeOperandValues();
    Value cluster = launch.hasClusterSize() ? h.toI64(launch.getClusterSizeX())
                                            : h.constant(1);
    Value dynamic = launch.getDynamicSharedMemorySize();
    h.call("corey_rt_launch",
           {h.constant(number), h.toI64(grid.x), h.toI64(grid.y),
            h.toI64(grid.z), h.toI64(block.x), h.toI64(block.y),
            h.toI64(block.z), cluster, h.constant(isDependent),
            dynamic ? h.toI64(dynamic) : h.constant(0), h.addressOf(array)});
    launch.erase();
  }

  void lower(memref::CopyOp copy) {
    HostCode h(copy);
    auto type = cast<MemRefType>(copy.getTarget().getType());
    int64_t rank = type.getRank();
    int64_t bytes = type.getElementTypeBitWidth() / 8;
    Type i64 = h.b.getI64Type();
    Value layout = h.onStack(i64, std::max<int64_t>(3 * rank, 1));
    SmallVector<Value> addresses;
    const Value sides[] = {copy.getTarget(), copy.getSource()};
    for (auto [m, memref] : llvm::enumerate(sides)) {
      auto metadata =
          memref::ExtractStridedMetadataOp::create(h.b, h.loc, memref);
      for (int64_t axis = 0; axis < rank; ++axis) {
        if (m == 0)
          h.store(h.toI64(metadata.getSizes()[axis]), layout, i64, axis);
        h.store(h.toI64(metadata.getStrides()[axis]), layout, i64,
                rank * (1 + static_cast<int64_t>(m)) + axis);
      }
      Value base =
          memref::ExtractAlignedPointerAsIndexOp::create(h.b, h.loc, memref);
      Value offset = arith::MulIOp::create(
          h.b, h.loc, metadata.getOffset(),
          arith::ConstantIndexOp::create(h.b, h.loc, bytes));
      addresses.push_back(
          h.toI64(arith::AddIOp::create(h.b, h.loc, base, offset)));
    }
    h.call("corey_rt_device_copy",
           {addresses[0], addresses[1], h.addressOf(layout), h.constant(rank),
            h.constant(bytes)});
    copy.erase();
  }
};
} // namespace
