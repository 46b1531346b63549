//===- BindChunks.cpp - Chunks as run-time values -------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Dialect/SSM/IR/SSMOps.h"
#include "corey/Dialect/SSM/Transforms/Passes.h"
#include "mlir/Dialect/Arith/Utils/Utils.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/IR/BuiltinOps.h"
#include "llvm/ADT/StringSet.h"

namespace corey::ssm {
#define GEN_PASS_DEF_SSMBINDCHUNKS
#include "corey/Dialect/SSM/Transforms/Passes.h.inc"
} // namespace corey::ssm

using namespace mlir;
using namespace corey::ssm;

bool corey::ssm::observeScanInput(ScanOpInterface scan) {
  Value chunk = scan.getScanChunk();
  auto bind = chunk ? chunk.getDefiningOp<BindChunkOp>() : BindChunkOp();
  if (!bind)
    return false;
  Value input = scan.getScanInput();
  auto feedsSite = [&](Operation *op) {
    auto observe = dyn_cast_or_null<ObserveOp>(op);
    return observe && observe.getSite() == bind.getSite();
  };
  // Around a region its argument is another value.
  for (Value same = input; same;) {
    if (feedsSite(same.getDefiningOp()) ||
        llvm::any_of(same.getUsers(), feedsSite))
      return false;
    auto argument = dyn_cast<BlockArgument>(same);
    auto fused =
        argument ? dyn_cast_or_null<FusedOp>(argument.getOwner()->getParentOp())
                 : FusedOp();
    same = fused ? fused.getInputs()[argument.getArgNumber()] : Value();
  }
  OpBuilder builder(scan);
  auto observe = ObserveOp::create(builder, scan.getLoc(), input.getType(),
                                   bind.getSiteAttr(), input);
  for (OpOperand &operand : scan->getOpOperands())
    if (operand.get() == input) {
      // The first is the input; others may be the same value.
      operand.set(observe.getY());
      break;
    }
  moveObservationOut(observe);
  return true;
}

namespace {
struct SSMBindChunks
    : public corey::ssm::impl::SSMBindChunksBase<SSMBindChunks> {
  using Base::Base;

  void runOnOperation() override {
    llvm::StringSet<> taken;
    getOperation().walk([&](Operation *op) {
      if (auto bind = dyn_cast<BindChunkOp>(op))
        taken.insert(bind.getSite());
      if (auto scan = dyn_cast<ScanOpInterface>(op))
        if (ChunkAttr chunk = scan.getScanChunkAttr())
          if (!chunk.isStatic())
            taken.insert(chunk.getSite().getValue());
    });
    unsigned next = 0;
    getOperation().walk([&](ScanOpInterface scan) {
      if (scan.getScanChunk())
        return;
      FlatSymbolRefAttr site;
      if (ChunkAttr chunk = scan.getScanChunkAttr()) {
        if (chunk.isStatic()) {
          ++numStaticChunks;
          return;
        }
        site = chunk.getSite();
      } else {
        std::string name;
        do
          name = "scan" + std::to_string(next++);
        while (!taken.insert(name).second);
        site = FlatSymbolRefAttr::get(&getContext(), name);
      }
      OpBuilder builder(scan);
      Location loc = scan.getLoc();
      Value input = scan.getScanInput();
      auto sizeOf = [&](int64_t axis) {
        return getValueOrCreateConstantIndexOp(
            builder, loc, tensor::getMixedSize(builder, loc, input, axis));
      };
      Value batch = sizeOf(0), length = sizeOf(1);
      scan.bindScanChunk(BindChunkOp::create(
          builder, loc, builder.getIndexType(), site, batch, length,
          policy.empty() ? StringAttr() : builder.getStringAttr(policy)));
      ++numBoundSites;
      if (observe && observeScanInput(scan))
        ++numObserved;
    });
  }
};
} // namespace
