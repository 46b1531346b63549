//===- Pointwise.cpp - GPU kernels of pointwise ops -----------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "GPULowering.h"

using namespace mlir;
using namespace corey;
using namespace corey::ssm;

/// Threads of a block.
static constexpr int64_t kThreads = 256;

/// One thread per run of elements of the last axis that are loaded at once.
Value corey::emitPointwise(GPULowering &e) {
  Value out = e.allocate(0);
  auto type = cast<MemRefType>(out.getType());
  int64_t rank = type.getRank();
  int64_t count = e.outputAlignment(out);
  for (Value operand : e.op->getOperands())
    count = std::gcd(count, e.streamAlignment(operand));
  KernelBuilder k(e.host, e.loc, e.kernels, "pointwise", {kThreads, 0});
  InputStream input = InputStream::ofResult(e, k);
  OutputStream output(e, k, out);
  Value total = e.index(1);
  for (int64_t axis = 0; axis < rank; ++axis)
    total = e.mul(total, e.dim(out, axis));
  if (count > 1)
    total = e.ceilDiv(total, e.index(count));
  Val index = k.toI64(k.blockIdx('x')) * kThreads + k.toI64(k.threadIdx());
  k.ifThen(index < k.i64Argument(total), [&] {
    // From the last axis to the first.
    Vals at(rank);
    Val rest = index;
    for (int64_t axis = rank; axis-- > 0;) {
      int64_t width = axis + 1 == rank ? count : 1;
      if (axis == 0) {
        at[axis] = rest * double(width);
        break;
      }
      Val size = k.i64Argument(e.dim(out, axis));
      if (auto constant = size.constant()) {
        at[axis] = (rest % (*constant / width)) * double(width);
        rest = rest / double(*constant / width);
      } else {
        Val quotient = rest / size;
        at[axis] = rest - quotient * size;
        rest = quotient;
      }
    }
    ArrayRef<Val> leading = ArrayRef(at).drop_back(rank ? 1 : 0);
    Val last = rank ? at.back() : k.i64(0);
    Vals values =
        input.values(input.load(input.at(leading, last), count), count);
    output.store(output.at(leading, last), values);
  });
  k.launch({e.ceilDiv(total, e.index(kThreads)), {}, {}});
  return out;
}

namespace {
/// Any pointwise op on its own. Those around an anchor that is still to be
/// lowered wait for it.
struct PointwiseLowering
    : public OpInterfaceRewritePattern<FusableOpInterface> {
  PointwiseLowering(MLIRContext *context, GPUTarget target)
      : OpInterfaceRewritePattern(context), target(target) {}

  LogicalResult matchAndRewrite(FusableOpInterface fusable,
                                PatternRewriter &rewriter) const override {
    if (!fusable.isPointwise())
      return failure();
    if (isa_and_nonnull<FusedOp>(fusable->getParentOp()) &&
        succeeded(planFusedRegion(fusable->getParentOp())))
      return failure();
    if (replaceUnneeded(rewriter, fusable))
      return success();
    GPULowering e(rewriter, fusable, target);
    e.replaceWith(emitPointwise(e));
    return success();
  }
  GPUTarget target;
};

/// A region of pointwise ops becomes one kernel. Any other region is inlined:
/// its anchor has been lowered, with the pointwise ops around it, or no kernel
/// can be made of it.
struct LowerFused : public GPULoweringPattern<FusedOp> {
  using GPULoweringPattern::GPULoweringPattern;

  LogicalResult matchAndRewrite(FusedOp op,
                                PatternRewriter &rewriter) const override {
    Block &block = op.getBody().front();
    auto yield = cast<YieldOp>(block.getTerminator());
    FailureOr<FusionPlan> plan = planFusedRegion(op);
    if (succeeded(plan) && !plan->anchor) {
      Operation *last = plan->result.getDefiningOp();
      rewriter.setInsertionPoint(last);
      GPULowering e(rewriter, last, target);
      e.replaceWith(emitPointwise(e));
    }
    rewriter.inlineBlockBefore(&block, op, op.getInputs());
    rewriter.replaceOp(op, yield.getValues());
    rewriter.eraseOp(yield);
    return success();
  }
};
} // namespace

void corey::populateGPUPointwiseLowerings(RewritePatternSet &patterns,
                                          GPUTarget target) {
  patterns.add<PointwiseLowering, LowerFused>(patterns.getContext(), target);
}
