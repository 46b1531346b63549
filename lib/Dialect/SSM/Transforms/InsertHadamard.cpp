//===- InsertHadamard.cpp - Rotated inputs of projections -----------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Dialect/SSM/IR/SSMOps.h"
#include "corey/Dialect/SSM/Transforms/Passes.h"
#include "corey/Dialect/SSM/Transforms/Profile.h"
#include "mlir/IR/Remarks.h"
#include "llvm/Support/FormatVariadic.h"
#include "llvm/Support/MathExtras.h"
#include <cmath>

namespace corey::ssm {
#define GEN_PASS_DEF_SSMINSERTHADAMARD
#include "corey/Dialect/SSM/Transforms/Passes.h.inc"
} // namespace corey::ssm

using namespace mlir;
using namespace corey::ssm;

namespace {
/// A peak of as many standard deviations is what a normal distribution has
/// among the hundred thousand to a million values of an activation.
constexpr double kNormalPeak = 4.5;

/// What statistics say about a rotation in blocks of `block`.
struct Estimate {
  double peakToRms, kurtosis, entropy, entropyAfter;

  Estimate(StatsAttr stats, int64_t block) {
    double min = stats.getMin().convertToDouble();
    double max = stats.getMax().convertToDouble();
    double mean = stats.getMean().convertToDouble();
    double variance = stats.getVariance().convertToDouble();
    auto bins = static_cast<double>(stats.getBins());
    double rms = std::sqrt(variance + mean * mean);
    peakToRms = rms > 0 ? std::max(std::abs(min), std::abs(max)) / rms : 0;
    kurtosis = stats.getKurtosis().convertToDouble();
    entropy = stats.getEntropy().convertToDouble();
    // Nearly normal, but for one coordinate per block that gathers the mean.
    double deviation = std::sqrt(variance);
    double range = 2 * kNormalPeak * deviation +
                   std::sqrt(static_cast<double>(block)) * std::abs(mean);
    double normal = 0.5 * std::log(2 * M_PI * M_E);
    entropyAfter =
        deviation > 0
            ? std::min(
                  std::log(bins),
                  std::max(0.0, normal + std::log(deviation * bins / range)))
            : 0;
  }
  double gain() const { return entropyAfter - entropy; }
};

struct SSMInsertHadamard
    : public corey::ssm::impl::SSMInsertHadamardBase<SSMInsertHadamard> {
  using Base::Base;

  void runOnOperation() override {
    if (block < 0 || (block && !llvm::isPowerOf2_64(block))) {
      getOperation().emitError()
          << "ssm-insert-hadamard: expected 'block' to be 0 or a power of two, "
             "got "
          << int64_t(block);
      return signalPassFailure();
    }
    if (maxBlock < 2) {
      getOperation().emitError()
          << "ssm-insert-hadamard: expected 'max-block' to be at least 2, got "
          << int64_t(maxBlock);
      return signalPassFailure();
    }
    // Of another function.
    transforms.clear();
    casts.clear();
    SmallVector<ProjectionOp> projections;
    getOperation().walk([&](ProjectionOp op) { projections.push_back(op); });
    for (ProjectionOp op : projections)
      visit(op);
  }

private:
  void visit(ProjectionOp op) {
    bool asked = op->hasAttr(kRotateAttr);
    if (mode == HadamardMode::None && !asked)
      return;
    int64_t size = cast<ShapedType>(op.getWeight().getType()).getDimSize(1);
    int64_t chosen = chooseBlock(size);
    if (!isa<FloatType>(getElementTypeOrSelf(op.getWeight())) ||
        op.getWeightScale())
      return reject(op, "the weight is quantized");
    if (ShapedType::isDynamic(size))
      return reject(op, "the size of the axis is not known");
    if (chosen < 2)
      return reject(op, block ? llvm::formatv("{0} is no multiple of block {1}",
                                              size, int64_t(block))
                                    .str()
                              : llvm::formatv("{0} is odd", size).str());
    if (isRotated(op.getX()))
      return reject(op, "the input is rotated already");
    if (asked)
      return rotate(op, chosen, "asked for", std::nullopt);
    if (mode == HadamardMode::All)
      return rotate(op, chosen, "mode=all", std::nullopt);
    StatsAttr stats = getStats(op.getX());
    if (!stats)
      return reject(op, "there are no statistics of the input");
    Estimate estimate(stats, chosen);
    bool peaks = estimate.peakToRms >= minPeakToRms;
    if (!peaks && !(estimate.kurtosis >= minKurtosis))
      return reject(op,
                    llvm::formatv("no outliers: peak to rms {0:f2} below {1:f2}"
                                  ", kurtosis {2:f2} below {3:f2}",
                                  estimate.peakToRms, double(minPeakToRms),
                                  estimate.kurtosis, double(minKurtosis)),
                    estimate);
    if (!(estimate.gain() >= minEntropyGain))
      return reject(op,
                    llvm::formatv("estimated gain of entropy {0:f3} nats below "
                                  "{1:f3}",
                                  estimate.gain(), double(minEntropyGain)),
                    estimate);
    rotate(op, chosen,
           peaks ? llvm::formatv("peak to rms {0:f2} at least {1:f2}",
                                 estimate.peakToRms, double(minPeakToRms))
                 : llvm::formatv("kurtosis {0:f2} at least {1:f2}",
                                 estimate.kurtosis, double(minKurtosis)),
           estimate);
  }

  int64_t chooseBlock(int64_t size) const {
    if (ShapedType::isDynamic(size) || size == 0)
      return 0;
    if (block)
      return size % block == 0 ? int64_t(block) : 0;
    int64_t chosen = 1;
    while (size % (2 * chosen) == 0 && 2 * chosen <= maxBlock)
      chosen *= 2;
    return chosen;
  }

  static bool isRotated(Value x) {
    while (auto observe = x.getDefiningOp<ObserveOp>())
      x = observe.getX();
    return x.getDefiningOp<HadamardOp>() != nullptr;
  }

  /// H of `value`, made once per block of ops.
  Value transform(OpBuilder &builder, Location loc, Value value, int64_t size) {
    Value &made = transforms[{value, {builder.getBlock(), size}}];
    if (!made)
      made = HadamardOp::create(builder, loc, value.getType(), value, size);
    return made;
  }

  void rotate(ProjectionOp op, int64_t size, std::string reason,
              std::optional<Estimate> estimate) {
    OpBuilder builder(op);
    Location loc = op.getLoc();
    auto weightType = cast<RankedTensorType>(op.getWeight().getType());
    Value weight = op.getWeight();
    if (!keepWeightType && !weightType.getElementType().isF32()) {
      Value &wide = casts[{weight, builder.getBlock()}];
      if (!wide)
        wide = CastOp::create(builder, loc,
                              weightType.clone(builder.getF32Type()), weight);
      weight = wide;
    }
    Value input = transform(builder, loc, op.getX(), size);
    Value rotated = transform(builder, loc, weight, size);
    op.getXMutable().assign(input);
    op.getWeightMutable().assign(rotated);
    op->removeAttr(kRotateAttr);
    ++numPairsInserted;
    auto remark = remark::passed(loc, options("Rotated"));
    remark << remark::reason("{0}", reason) << remark::metric("block", size);
    describe(remark, estimate);
  }

  void reject(ProjectionOp op, std::string reason,
              std::optional<Estimate> estimate = std::nullopt) {
    ++numPairsRejected;
    auto remark = remark::missed(op.getLoc(), options("NotRotated"));
    remark << remark::reason("{0}", reason);
    describe(remark, estimate);
  }

  remark::RemarkOpts options(StringRef name) {
    return remark::RemarkOpts::name(name)
        .category("ssm-insert-hadamard")
        .function(getOperation().getSymName());
  }

  static void describe(remark::detail::InFlightRemark &remark,
                       const std::optional<Estimate> &estimate) {
    if (!estimate)
      return;
    remark << remark::metric("peak-to-rms", estimate->peakToRms)
           << remark::metric("kurtosis", estimate->kurtosis)
           << remark::metric("entropy", estimate->entropy)
           << remark::metric("entropy-after", estimate->entropyAfter);
  }

  DenseMap<std::pair<Value, std::pair<Block *, int64_t>>, Value> transforms;
  DenseMap<std::pair<Value, Block *>, Value> casts;
};
} // namespace
