//===- Fuse.cpp - Regions that become one kernel --------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Analysis/FusionPlan.h"
#include "corey/Analysis/FusionScore.h"
#include "corey/Analysis/RegionCost.h"
#include "corey/Dialect/SSM/IR/SSMOps.h"
#include "corey/Dialect/SSM/Transforms/Passes.h"
#include "mlir/Analysis/TopologicalSortUtils.h"
#include "mlir/Dialect/Arith/Utils/Utils.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/IR/Remarks.h"
#include "mlir/Interfaces/SideEffectInterfaces.h"
#include "llvm/ADT/SetVector.h"

namespace corey::ssm {
#define GEN_PASS_DEF_SSMFUSE
#include "corey/Dialect/SSM/Transforms/Passes.h.inc"
} // namespace corey::ssm

using namespace mlir;
using namespace corey;
using namespace corey::ssm;

/// Ops of a region, at most. Between two ops that take no others in there are a
/// few in any model; of a longer chain every part would be looked at as a
/// whole.
static constexpr size_t kMaxOps = 32;

/// Replaces sizes of results by what they are computed from, wherever they are
/// asked for: a size must not keep a value in memory.
static void resolveSizes(func::FuncOp function) {
  SmallVector<tensor::DimOp> worklist;
  function.walk([&](tensor::DimOp dim) { worklist.push_back(dim); });
  while (!worklist.empty()) {
    tensor::DimOp dim = worklist.pop_back_val();
    if (dim.use_empty()) {
      dim.erase();
      continue;
    }
    std::optional<int64_t> index = dim.getConstantIndex();
    auto result = dyn_cast<OpResult>(dim.getSource());
    if (!index || !result || !isa<FusableOpInterface>(result.getOwner()) ||
        isa<FusedOp>(result.getOwner()))
      continue;
    auto shaped = dyn_cast<ReifyRankedShapedTypeOpInterface>(result.getOwner());
    OpBuilder builder(dim);
    Operation *before = dim->getPrevNode();
    ReifiedRankedShapedTypeDims shapes;
    bool known = shaped && succeeded(shaped.reifyResultShapes(builder, shapes));
    if (known)
      dim.replaceAllUsesWith(getValueOrCreateConstantIndexOp(
          builder, dim.getLoc(), shapes[result.getResultNumber()][*index]));
    // All sizes were made, and one was wanted. That may be a size of a result
    // in turn.
    for (Operation *op = dim->getPrevNode(); op != before;) {
      Operation *previous = op->getPrevNode();
      if (isOpTriviallyDead(op))
        op->erase();
      else if (auto inner = dyn_cast<tensor::DimOp>(op))
        worklist.push_back(inner);
      op = previous;
    }
    if (known)
      dim.erase();
  }
}

/// Adds to a projection become its residual: a product starts from it for
/// nothing.
static void absorbResiduals(Block &block) {
  for (Operation &op : llvm::make_early_inc_range(block)) {
    auto add = dyn_cast<AddOp>(op);
    if (!add)
      continue;
    for (unsigned side : {0u, 1u}) {
      Value other = add->getOperand(1 - side);
      auto projection = add->getOperand(side).getDefiningOp<ProjectionOp>();
      if (!projection || projection->getBlock() != &block ||
          !projection->hasOneUse() || projection.getResidual() ||
          other.getType() != projection.getType() ||
          add.getType() != projection.getType())
        continue;
      Operation *producer = other.getDefiningOp();
      if (producer && producer->getBlock() == &block &&
          !producer->isBeforeInBlock(projection))
        continue;
      projection.getResidualMutable().assign(other);
      add.replaceAllUsesWith(projection.getResult());
      add.erase();
      break;
    }
  }
}

/// Whether a kernel of `user` could compute the value of `operand` where it
/// reads it.
static bool couldTakeIn(Operation *user, OpOperand &operand) {
  auto fusable = dyn_cast<FusableOpInterface>(user);
  if (!fusable)
    return false;
  return fusable.isPointwise() ||
         llvm::is_contained(streamedOperandsOf(user), &operand);
}

/// Moves pointwise ops next to their first use if that could take them in, so
/// that what belongs together stands together and nothing else in between.
static void sinkPointwise(Block &block) {
  // What stands in front of an op because of it. A later find goes before all
  // of it: ops that stand right already stay in their order.
  DenseMap<Operation *, Operation *> sunk;
  for (Operation &op : llvm::make_early_inc_range(llvm::reverse(block))) {
    auto fusable = dyn_cast<FusableOpInterface>(op);
    if (!fusable || !fusable.isPointwise() || op.use_empty())
      continue;
    Operation *first = nullptr;
    bool taken = false;
    for (OpOperand &use : op.getUses()) {
      // Other blocks come later.
      Operation *ancestor = block.findAncestorOpInBlock(*use.getOwner());
      if (ancestor && (!first || ancestor->isBeforeInBlock(first))) {
        first = ancestor;
        taken = couldTakeIn(use.getOwner(), use);
      }
    }
    if (!taken)
      continue;
    while (Operation *before = sunk.lookup(first))
      first = before;
    sunk[first] = &op;
    op.moveBefore(first);
  }
}

/// The number of the norm of which `chain[index]` reads a result, or what
/// pointwise ops make of one; `index` if there is none.
static size_t anchorBefore(ArrayRef<Operation *> chain, size_t index) {
  llvm::SmallPtrSet<Value, 8> read(llvm::from_range,
                                   chain[index]->getOperands());
  for (size_t i = index; i-- > 0 && index - i < kMaxOps;) {
    if (llvm::none_of(chain[i]->getResults(),
                      [&](Value result) { return read.contains(result); }))
      continue;
    if (isa<RMSNormOp>(chain[i]))
      return i;
    if (!cast<FusableOpInterface>(chain[i]).isPointwise())
      continue;
    read.insert_range(chain[i]->getOperands());
  }
  return index;
}

namespace {
struct SSMFuse : public corey::ssm::impl::SSMFuseBase<SSMFuse> {
  using Base::Base;

  LogicalResult initialize(MLIRContext *context) override {
    auto fail = [&](const Twine &message) {
      return emitError(UnknownLoc::get(context), "ssm-fuse: ") << message;
    };
    if (!parseFusionStrategy(strategy.getValue(), how))
      return fail("expected strategy none, static, arithmetic, entropy or dp, "
                  "got '" +
                  strategy + "'");
    if (score != "paper" && score != "physical")
      return fail("expected score paper or physical, got '" + score + "'");
    rates = findMachine(machine);
    if (!rates)
      return fail("expected machine cpu or h200, got '" + machine + "'");
    if (dynamicSize < 1)
      return fail("expected dynamic-size of at least 1, got " +
                  Twine(dynamicSize));
    for (auto [name, value] :
         {std::pair<const char *, double>{"max-registers", maxRegisters},
          {"max-shared", maxShared}})
      if (!(value >= 0))
        return fail(Twine("expected ") + name + " of at least 0, got " +
                    std::to_string(value));
    return success();
  }

  void runOnOperation() override {
    keepRegions();
    if (how == FusionStrategy::None)
      return;
    SmallVector<Block *> blocks;
    getOperation()->walk<WalkOrder::PreOrder>([&](Operation *op) {
      if (isa<FusedOp>(op))
        return WalkResult::skip();
      for (Region &region : op->getRegions())
        for (Block &block : region)
          blocks.push_back(&block);
      return WalkResult::advance();
    });
    resolveSizes(getOperation());
    for (Block *block : blocks)
      fuseBlock(*block);
  }

private:
  void keepRegions();
  void fuseBlock(Block &block);
  double seconds(ArrayRef<Operation *> ops) const {
    return regionCost(ops, dynamicSize).seconds(*rates);
  }
  void report(ArrayRef<Operation *> ops, const FusionCandidate &candidate);
  void form(const FusionPlan &plan, const FusionTerms &terms);

  FusionStrategy how = FusionStrategy::Entropy;
  const MachineRates *rates = nullptr;
};
} // namespace

/// Regions that are there already stay kernels: what is observed in them moves
/// out. Of others that no emitter can make a kernel of a remark says so, as
/// their ops become kernels of their own.
void SSMFuse::keepRegions() {
  SmallVector<ObserveOp> observed;
  getOperation()->walk([&](ObserveOp op) {
    if (isa<FusedOp>(op->getParentOp()))
      observed.push_back(op);
  });
  for (ObserveOp op : observed)
    moveObservationOut(op);
  getOperation()->walk([&](FusedOp fused) {
    std::string reason;
    if (succeeded(planFusedRegion(fused, &reason)))
      return;
    remark::missed(fused.getLoc(), remark::RemarkOpts::name("region")
                                       .category("ssm-fuse")
                                       .function(getOperation().getSymName()))
        << remark::reason("{0}", reason);
  });
}

void SSMFuse::fuseBlock(Block &block) {
  for (Operation &op : block)
    if (auto fused = dyn_cast<FusedOp>(op); fused && fused.getScoreAttr())
      return;
  absorbResiduals(block);
  sinkPointwise(block);
  SmallVector<Operation *> chain;
  for (Operation &op : block)
    if (isa<FusableOpInterface>(op) && !isa<FusedOp>(op))
      chain.push_back(&op);
  if (chain.size() < 2)
    return;

  // Sums over the chain rule most regions out at once: an op that takes no
  // other in, two anchors, two rotations or two projections. A core of a CPU
  // has so much of a projection that what is before it is not made twice.
  bool gathers = std::isfinite(rates->registers);
  SmallVector<unsigned> barriers{0}, anchors{0}, rotations{0}, projections{0};
  std::vector<FusionFeatures> features;
  std::vector<double> alone;
  for (Operation *op : chain) {
    auto fusable = cast<FusableOpInterface>(op);
    bool anchor = !fusable.isPointwise();
    bool projects = isa<ProjectionOp>(op);
    anchors.push_back(anchors.back() + (anchor && !mayRotate(op) && !projects));
    rotations.push_back(rotations.back() + mayRotate(op));
    projections.push_back(projections.back() + projects);
    barriers.push_back(
        barriers.back() +
        (anchor && (streamedOperandsOf(op).empty() || (projects && !gathers))));
    features.push_back(fusionFeatures(op, dynamicSize, *rates));
    alone.push_back(seconds(op));
  }
  auto opsOf = [&](FusionRegion region) {
    return ArrayRef(chain).slice(region.begin, region.size());
  };
  auto hopeless = [&](FusionRegion region) {
    return region.size() > kMaxOps ||
           barriers[region.end] > barriers[region.begin] ||
           anchors[region.end] > anchors[region.begin] + 1 ||
           rotations[region.end] > rotations[region.begin] + 1 ||
           projections[region.end] > projections[region.begin] + 1;
  };
  auto legal = [&](FusionRegion region) {
    return !hopeless(region) && succeeded(planFusion(opsOf(region)));
  };
  // What a greedy pass has so far may become legal with what comes next.
  auto mayGrow = [&](FusionRegion region) {
    return !hopeless(region) && mayGrowIntoPlan(opsOf(region));
  };

  FusionWeights weights{alpha, beta, gamma, tau, depthBonus};
  FusionLimits limits;
  limits.registers = maxRegisters > 0 ? maxRegisters : rates->registers;
  limits.shared = maxShared > 0 ? maxShared : rates->shared;
  if (how == FusionStrategy::Arithmetic)
    weights.alpha = 0;
  FusionScorer scorer(features, weights, limits);
  bool physical = score == "physical";
  auto termsOf = [&](FusionRegion region) {
    FusionTerms terms = scorer.terms(region);
    if (physical) {
      double apart = 0;
      for (size_t i = region.begin; i < region.end; ++i)
        apart += alone[i];
      terms.bonus = 0;
      terms.score = apart > 0 ? 1 - seconds(opsOf(region)) / apart : 0;
    }
    return terms;
  };

  std::vector<FusionRegion> regions;
  std::vector<FusionCandidate> considered;
  switch (how) {
  case FusionStrategy::None:
    return;
  case FusionStrategy::Static:
    regions = scorer.partition(how, legal, &considered);
    break;
  case FusionStrategy::Arithmetic:
  case FusionStrategy::Entropy:
    if (!physical) {
      regions = scorer.partition(how, mayGrow, &considered);
      break;
    }
    // The same pass with the other score.
    for (size_t begin = 0, end = 1; begin < chain.size(); ++end) {
      FusionCandidate candidate;
      candidate.region = {begin, end + 1};
      if (end < chain.size()) {
        candidate.legal = mayGrow(candidate.region);
        candidate.terms = termsOf(candidate.region);
        candidate.feasible = scorer.feasible(candidate.terms);
        candidate.accepted =
            candidate.legal && candidate.feasible && candidate.terms.score > 0;
        considered.push_back(candidate);
      }
      if (candidate.accepted)
        continue;
      regions.push_back({begin, end});
      begin = end;
    }
    break;
  case FusionStrategy::Dp:
    if (!physical)
      regions = scorer.partition(how, legal, &considered);
    else
      regions = scorer.cheapest(
          [&](FusionRegion region) {
            return region.size() == 1 ? alone[region.begin]
                                      : seconds(opsOf(region));
          },
          legal);
    break;
  }

  // A greedy region may end before it is a kernel: its tail is cut until it is,
  // and what is cut is looked at again.
  std::vector<FusionRegion> chosen;
  std::vector<size_t> endOf(chain.size());
  for (FusionRegion region : regions)
    while (region.begin < region.end) {
      FusionRegion head = region;
      while (head.size() > 1 && !legal(head))
        --head.end;
      chosen.push_back(head);
      endOf[head.begin] = head.end;
      region.begin = head.end;
    }
  auto isChosen = [&](FusionRegion region) {
    return endOf[region.begin] == region.end;
  };
  if (physical && how == FusionStrategy::Dp)
    for (FusionRegion region : chosen)
      if (region.size() > 1) {
        FusionCandidate candidate;
        candidate.region = region;
        candidate.terms = termsOf(region);
        candidate.accepted = true;
        considered.push_back(candidate);
      }
  // That strategy looks at every region there can be, too many to name. Of a
  // norm and the rotation of what it makes a remark says why they are apart.
  if (physical && how == FusionStrategy::Dp)
    for (size_t i = 0; i < chain.size(); ++i) {
      size_t begin = mayRotate(chain[i]) ? anchorBefore(chain, i) : i;
      auto isTogether = [&](FusionRegion region) {
        return region.begin <= begin && i < region.end;
      };
      if (begin == i || llvm::any_of(chosen, isTogether))
        continue;
      FusionCandidate candidate;
      candidate.region = {begin, i + 1};
      candidate.terms = termsOf(candidate.region);
      candidate.legal = legal(candidate.region);
      candidate.feasible = scorer.feasible(candidate.terms);
      considered.push_back(candidate);
    }
  for (FusionCandidate &candidate : considered) {
    // A step of the greedy pass that went on is neither.
    bool step = candidate.accepted && !isChosen(candidate.region);
    if (!candidate.accepted)
      ++numRejected;
    if (candidate.region.size() <= kMaxOps &&
        (!step || !legal(candidate.region)))
      report(opsOf(candidate.region), candidate);
  }
  // Ops move when regions are formed: first all plans, then all regions.
  std::vector<std::pair<FusionPlan, FusionTerms>> plans;
  for (FusionRegion region : chosen)
    if (region.size() > 1)
      plans.push_back({*planFusion(opsOf(region)), termsOf(region)});
  if (plans.empty())
    return;
  for (auto &[plan, terms] : plans)
    form(plan, terms);
  sortTopologically(&block);
}

void SSMFuse::report(ArrayRef<Operation *> ops,
                     const FusionCandidate &candidate) {
  if (!ops.front()->getContext()->getRemarkEngine())
    return;
  std::string names;
  for (Operation *op : ops)
    names += (names.empty() ? "" : " ") + op->getName().stripDialect().str();
  auto options = remark::RemarkOpts::name("fuse")
                     .category("ssm-fuse")
                     .subCategory(fusionStrategyName(how))
                     .function(getOperation().getSymName());
  const FusionTerms &terms = candidate.terms;
  double threshold = score == "physical" ? 0 : tau.getValue();
  std::string reason;
  bool legal = succeeded(planFusion(ops, &reason));
  if (candidate.accepted && legal)
    reason = "the score is above the threshold";
  else if (!candidate.legal || (candidate.accepted && !legal))
    ;
  else if (!candidate.feasible)
    reason = "it needs more registers or shared memory than there are";
  else if (!(terms.score > threshold))
    reason = "the score is not above the threshold";
  else
    reason = "another partition is better";
  RegionCost cost = regionCost(ops, dynamicSize);
  // How deep a region of ops like these could be: F <= capacity / use, for
  // shared memory and for registers.
  auto bound = [&](double asked, double capacity, double used) {
    size_t depth =
        fusionDepthBound(asked > 0 ? asked : capacity,
                         std::max(used / static_cast<double>(ops.size()), 1.0));
    return static_cast<int64_t>(std::min(depth, size_t(1) << 20));
  };
  int64_t sharedBound = bound(maxShared, rates->shared, terms.shared);
  int64_t registerBound =
      bound(maxRegisters, rates->registers, terms.registers);
  auto fill = [&](auto &&remark) {
    remark << remark::metric("ops", names) << remark::metric("H", terms.entropy)
           << remark::metric("AI", terms.intensity)
           << remark::metric("M", terms.memory)
           << remark::metric("bonus", terms.bonus)
           << remark::metric("S", terms.score)
           << remark::metric("tau", threshold)
           << remark::metric("bytes", cost.bytes())
           << remark::metric("bytes_kept", cost.bytesKept)
           << remark::metric("depth_bound_shared", sharedBound)
           << remark::metric("depth_bound_registers", registerBound)
           << remark::reason("{0}", reason);
  };
  if (candidate.accepted && legal)
    fill(remark::passed(ops.back()->getLoc(), options));
  else
    fill(remark::missed(ops.back()->getLoc(), options));
}

void SSMFuse::form(const FusionPlan &plan, const FusionTerms &terms) {
  llvm::SetVector<Value> inputs;
  for (Operation *op : plan.ops)
    for (Value operand : op->getOperands())
      if (!plan.contains(operand.getDefiningOp()))
        inputs.insert(operand);
  SmallVector<Value> outputs{plan.result};
  if (plan.anchor)
    for (Value result : llvm::drop_begin(plan.anchor->getResults()))
      if (!result.use_empty())
        outputs.push_back(result);

  Operation *last = plan.ops.back();
  OpBuilder builder(last);
  auto number = [](double value) { return llvm::APFloat(value); };
  double threshold = score == "physical" ? 0 : tau.getValue();
  auto attr = ScoreAttr::get(&getContext(), number(terms.entropy),
                             number(terms.intensity), number(terms.memory),
                             number(terms.score), number(threshold));
  auto fused =
      FusedOp::create(builder, last->getLoc(), TypeRange(ValueRange(outputs)),
                      inputs.getArrayRef(), attr);
  Block *body = builder.createBlock(&fused.getBody());
  IRMapping toArgument;
  for (Value input : inputs)
    toArgument.map(input, body->addArgument(input.getType(), input.getLoc()));
  // Users outside see the results, users inside the ops.
  for (auto [output, result] : llvm::zip_equal(outputs, fused.getResults()))
    output.replaceUsesWithIf(
        result, [&](OpOperand &use) { return !plan.contains(use.getOwner()); });
  for (Operation *op : plan.ops) {
    op->moveBefore(body, body->end());
    for (OpOperand &operand : op->getOpOperands())
      if (Value argument = toArgument.lookupOrNull(operand.get()))
        operand.set(argument);
  }
  builder.setInsertionPointToEnd(body);
  YieldOp::create(builder, fused.getLoc(), outputs);
  ++numRegions;
  numFusedOps += plan.ops.size();
}
