//===- FusionPlan.cpp - How ops become one kernel -------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Analysis/FusionPlan.h"
#include "corey/Dialect/SSM/IR/SSMOps.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"

using namespace mlir;
using namespace corey;
using namespace corey::ssm;

/// Whether two shapes can be the same at run time.
static bool mayHaveSameShape(Value a, Value b) {
  auto left = cast<ShapedType>(a.getType()),
       right = cast<ShapedType>(b.getType());
  return succeeded(verifyCompatibleShape(left, right));
}

Operation *FusionPlan::prologue() const {
  for (Operation *op : ops)
    if (op != anchor && op != rotation &&
        !cast<FusableOpInterface>(op).isPointwise())
      return op;
  return nullptr;
}

bool corey::mayRotate(Operation *op) { return isa<HadamardOp>(op); }

/// Why `rotation` cannot stand in the kernel of `anchor`; empty if it can.
static std::string whyNotRotated(Operation *anchor, Operation *rotation) {
  auto nameOf = [](Operation *op) { return op->getName().getStringRef(); };
  auto norm = dyn_cast<RMSNormOp>(anchor);
  auto hadamard = dyn_cast<HadamardOp>(rotation);
  if (!norm || !hadamard)
    return (nameOf(rotation) + " and " + nameOf(anchor) +
            " cannot share a kernel")
        .str();
  auto size = cast<ShapedType>(norm.getX().getType()).getShape().back();
  int64_t group =
      norm.getGroupSize() ? static_cast<int64_t>(*norm.getGroupSize()) : size;
  auto block = static_cast<int64_t>(hadamard.getBlock());
  if (group > kMaxRotatedGroup)
    return (nameOf(anchor) + " has groups of " + Twine(group) +
            " elements, of which a kernel rotates " + Twine(kMaxRotatedGroup) +
            " at most")
        .str();
  if (group % block)
    return ("blocks of " + Twine(block) + " of " + nameOf(rotation) +
            " do not divide the groups of " + Twine(group) + " of " +
            nameOf(anchor))
        .str();
  return {};
}

/// Columns of a projection that a block of threads can have all of x of.
static constexpr int64_t kMaxGathered = 8192;
/// Columns of a projection that lanes of a channel's states can have a row of
/// the weight of.
static constexpr int64_t kMaxLowRank = 256;

SmallVector<OpOperand *> corey::streamedOperandsOf(Operation *op) {
  auto projection = dyn_cast<ProjectionOp>(op);
  if (!projection)
    return cast<FusableOpInterface>(op).getStreamedOperands();
  ArrayRef<int64_t> shape =
      cast<ShapedType>(projection.getX().getType()).getShape();
  if (shape.size() < 2 || shape[shape.size() - 2] != 1 ||
      shape.back() > kMaxGathered)
    return {};
  return {&projection.getXMutable()};
}

/// Why a token of the scan cannot make delta for itself; empty if it can.
static std::string whyNotLowRank(ProjectionOp projection,
                                 SelectiveScanOp scan) {
  auto columns = cast<ShapedType>(projection.getX().getType()).getShape();
  if (scan.getDelta() != projection.getY())
    return "the projection does not make delta of the scan";
  if (cast<ShapedType>(scan.getU().getType()).getDimSize(1) != 1 ||
      scan.getSeqStarts())
    return "the scan is not known to have one token of each sequence";
  if (columns.back() > kMaxLowRank)
    return "delta comes from " + std::to_string(columns.back()) +
           " columns, of which a scan takes " + std::to_string(kMaxLowRank) +
           " at most";
  if (projection.getResidual() || projection.getWeightScale())
    return "the projection has more operands than weight and bias";
  return {};
}

/// Why `anchor` cannot make what `before` does for itself; empty if it can.
static std::string whyNotPrologue(Operation *before, Operation *anchor) {
  auto projection = dyn_cast<ProjectionOp>(before);
  auto scan = dyn_cast<SelectiveScanOp>(anchor);
  if (projection && scan)
    return whyNotLowRank(projection, scan);
  auto norm = dyn_cast<RMSNormOp>(before);
  projection = dyn_cast<ProjectionOp>(anchor);
  if (!norm || !projection)
    return (anchor->getName().getStringRef() + " and " +
            before->getName().getStringRef() + " cannot share a kernel")
        .str();
  auto shape = cast<ShapedType>(norm.getX().getType()).getShape();
  if (norm.getResidualOut())
    return "blocks of " + projection->getName().getStringRef().str() +
           " would each write the residual of the norm before it";
  if (norm.getGroupSize() &&
      static_cast<int64_t>(*norm.getGroupSize()) != shape.back())
    return "a norm before a projection has groups of " +
           std::to_string(*norm.getGroupSize()) + " elements, of rows of " +
           std::to_string(shape.back());
  return {};
}

/// `open`: leaves out what further ops could still change.
static FailureOr<FusionPlan> makePlan(ArrayRef<Operation *> ops, bool open,
                                      std::string *reason) {
  auto fail = [&](const Twine &why) -> FailureOr<FusionPlan> {
    if (reason)
      *reason = why.str();
    return failure();
  };
  FusionPlan plan;
  plan.ops.assign(ops.begin(), ops.end());
  plan.set.insert(ops.begin(), ops.end());
  if (ops.empty())
    return fail("there is no op");
  Block *block = ops.front()->getBlock();
  bool hasPrologue = false;
  for (Operation *op : ops) {
    auto fusable = dyn_cast<FusableOpInterface>(op);
    if (!fusable)
      return fail(Twine(op->getName().getStringRef()) + " cannot be fused");
    if (op->getBlock() != block)
      return fail("the ops are in different blocks");
    if (fusable.isPointwise())
      continue;
    if (ops.size() > 1 && streamedOperandsOf(op).empty())
      return fail(Twine(op->getName().getStringRef()) +
                  " takes no other op into its kernel");
    if (!plan.anchor) {
      plan.anchor = op;
      continue;
    }
    if (!plan.rotation && !hasPrologue &&
        (isa<ProjectionOp>(op) || isa<ProjectionOp>(plan.anchor))) {
      if (std::string why = whyNotPrologue(plan.anchor, op); !why.empty())
        return fail(why);
      plan.anchor = op;
      hasPrologue = true;
      continue;
    }
    if (std::string why =
            whyNotRotated(plan.rotation ? plan.rotation : plan.anchor, op);
        !why.empty())
      return fail(why);
    plan.rotation = op;
  }
  if (ops.size() == 1) {
    plan.result = ops.front()->getResult(0);
    return plan;
  }

  // What depends on the anchor must be elementwise on its result, or on the
  // rotation's.
  llvm::SmallPtrSet<Operation *, 8> behind, unrotated;
  if (plan.anchor) {
    Value y = plan.anchor->getResult(0);
    llvm::SmallPtrSet<Operation *, 8> rotated;
    if (plan.rotation)
      unrotated.insert(plan.anchor);
    for (Operation *op : ops) {
      if (op == plan.anchor)
        continue;
      bool depends = false, ofRotation = op == plan.rotation, ofOthers = false;
      for (Value operand : op->getOperands()) {
        Operation *producer = operand.getDefiningOp();
        if (producer == plan.anchor && operand != y)
          return fail("a further result of the anchor is used in the region");
        depends |= operand == y || (producer && behind.contains(producer));
        ofRotation |= producer && rotated.contains(producer);
        ofOthers |= producer && unrotated.contains(producer);
      }
      if (!depends) {
        if (op == plan.rotation)
          return fail(Twine(op->getName().getStringRef()) +
                      " does not depend on " +
                      plan.anchor->getName().getStringRef());
        continue;
      }
      if (isa<ProjectionOp>(plan.anchor))
        return fail(Twine(plan.anchor->getName().getStringRef()) +
                    " takes no op behind it into its kernel");
      if (!mayHaveSameShape(op->getResult(0), y))
        return fail(Twine(op->getName().getStringRef()) +
                    " has another shape than the anchor");
      // Registers and buffers hold a value before the rotation or after it.
      if (op != plan.rotation && ofRotation && ofOthers)
        return fail(Twine(op->getName().getStringRef()) +
                    " uses values from before and behind " +
                    plan.rotation->getName().getStringRef());
      behind.insert(op);
      if (plan.rotation)
        (ofRotation ? rotated : unrotated).insert(op);
      if (op != plan.rotation && (ofRotation || !plan.rotation))
        plan.epilogue.push_back(op);
    }
  }

  // One value leaves the region, beside the anchor's further results. Sizes
  // that are asked for in the region are no use of a tensor: they can be had
  // from what it is made of. Outside of it there is nothing to have them from.
  bool inFused = isa_and_nonnull<FusedOp>(block->getParentOp());
  auto isSize = [&](Operation *op) {
    return inFused && isa<tensor::DimOp>(op);
  };
  auto staysInside = [&](Value value) {
    return llvm::all_of(value.getUsers(), [&](Operation *user) {
      return plan.contains(user) || isSize(user);
    });
  };
  SmallVector<Value> leaving;
  for (Operation *op : ops) {
    Value value = op->getResult(0);
    if (staysInside(value) && !value.use_empty())
      continue;
    // No op to come can stand before the rotation.
    if (unrotated.contains(op) ||
        (!open && plan.anchor && op != plan.anchor && !behind.contains(op)))
      return fail(Twine("the result of ") + op->getName().getStringRef() +
                  " is also used outside of the region");
    leaving.push_back(value);
  }
  if (!open && leaving.size() != 1)
    return fail("expected one result to leave the region, got " +
                Twine(leaving.size()));
  plan.result = leaving.empty() ? ops.back()->getResult(0) : leaving.front();
  if (!open && !plan.anchor &&
      !mayHaveSameShape(plan.result, ops.back()->getResult(0)))
    return fail("the shapes differ");

  // Producers feed streamed operands only, and have the shape that is read
  // there: the indices of the reader are theirs.
  for (Operation *op : ops) {
    if (op == plan.anchor)
      continue;
    for (OpOperand &operand : op->getOpOperands()) {
      Operation *producer = operand.get().getDefiningOp();
      if (!plan.contains(producer))
        continue;
      auto inner = cast<ShapedType>(operand.get().getType());
      auto outer = cast<ShapedType>(op->getResult(0).getType());
      if (inner.getRank() == outer.getRank() &&
          !mayHaveSameShape(operand.get(), op->getResult(0)))
        return fail("the shapes differ");
    }
  }
  for (Operation *op : {plan.anchor, plan.rotation, plan.prologue()}) {
    if (!op)
      continue;
    SmallVector<OpOperand *> streamed;
    if (op == plan.anchor || !isa<ProjectionOp>(op))
      streamed = streamedOperandsOf(op);
    for (OpOperand &operand : op->getOpOperands())
      if (plan.contains(operand.get().getDefiningOp()) &&
          !llvm::is_contained(streamed, &operand))
        return fail(Twine("the anchor reads operand ") +
                    Twine(operand.getOperandNumber()) + " more than once");
  }

  if (open)
    return plan;
  // Everything belongs together: from the result every op can be reached.
  llvm::SmallPtrSet<Operation *, 8> reached;
  SmallVector<Operation *> worklist{plan.result.getDefiningOp()};
  while (!worklist.empty()) {
    Operation *op = worklist.pop_back_val();
    if (!plan.contains(op) || !reached.insert(op).second)
      continue;
    for (Value operand : op->getOperands())
      if (Operation *producer = operand.getDefiningOp())
        worklist.push_back(producer);
  }
  if (reached.size() != ops.size())
    return fail("the ops do not depend on one another");

  // No path leaves and comes back: an op between the first and the last that
  // the region needs must not need the region.
  llvm::SmallPtrSet<Operation *, 16> seen;
  auto needsRegion = [&](auto &self, Operation *op) -> bool {
    if (plan.contains(op))
      return true;
    if (!op || isSize(op) || op->getBlock() != block ||
        op->isBeforeInBlock(ops.front()) || !seen.insert(op).second)
      return false;
    bool found = false;
    op->walk([&](Operation *inner) {
      for (Value operand : inner->getOperands())
        if (Operation *producer = operand.getDefiningOp())
          found |= self(self, block->findAncestorOpInBlock(*producer));
    });
    return found;
  };
  for (Operation *op : ops)
    for (Value operand : op->getOperands()) {
      Operation *producer = operand.getDefiningOp();
      if (producer && !plan.contains(producer) &&
          needsRegion(needsRegion, producer))
        return fail("a value leaves the region and comes back");
    }
  return plan;
}

FailureOr<FusionPlan> corey::planFusion(ArrayRef<Operation *> ops,
                                        std::string *reason) {
  return makePlan(ops, /*open=*/false, reason);
}

bool corey::mayGrowIntoPlan(ArrayRef<Operation *> ops, std::string *reason) {
  return succeeded(makePlan(ops, /*open=*/true, reason));
}

FailureOr<FusionPlan> corey::planFusedRegion(Operation *fused,
                                             std::string *reason) {
  // Beside the ops there may be sizes and what they bind: no tensors.
  SmallVector<Operation *> ops;
  for (Operation &op :
       cast<FusedOp>(fused).getBody().front().without_terminator()) {
    if (isa<FusableOpInterface>(op))
      ops.push_back(&op);
    else if (llvm::any_of(op.getResultTypes(), llvm::IsaPred<TensorType>) ||
             op.getNumRegions()) {
      if (reason)
        *reason = op.getName().getStringRef().str() + " cannot be fused";
      return failure();
    }
  }
  return planFusion(ops, reason);
}
