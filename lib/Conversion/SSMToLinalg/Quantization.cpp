//===- Quantization.cpp - CPU lowering of quantization --------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "LoweringUtils.h"
#include "mlir/Dialect/Math/IR/Math.h"

using namespace mlir;
using namespace corey;
using namespace corey::ssm;

/// Indices into the scales for the element at `row`, `d`.
static SmallVector<Value> scaleIndex(Granularity granularity, ValueRange row,
                                     Value d) {
  switch (granularity) {
  case Granularity::Tensor:
    return {};
  case Granularity::Token:
    return SmallVector<Value>(row);
  case Granularity::Channel:
    return {d};
  }
  llvm_unreachable("granularity has three values");
}

namespace {
struct QuantizeLowering : public SSMLowering<QuantizeOp> {
  using SSMLowering::SSMLowering;

  LogicalResult matchAndRewrite(QuantizeOp op,
                                PatternRewriter &rewriter) const override {
    OpLowering e(rewriter, op, target);
    Value x = e.buffer(op.getX()), q = e.output(0), scale = e.output(1);
    Granularity granularity = op.getGranularity();
    int64_t rank = cast<ShapedType>(op.getX().getType()).getRank();
    Value size = e.dim(x, rank - 1);
    bool integer = getElementTypeOrSelf(op.getQ().getType()).isInteger(8);
    double largest = integer ? 127.0 : 448.0;
    Value zero = e.index(0), one = e.index(1);

    // NaN is left out of the maximum: the comparison with it is false.
    auto larger = [&](ValueRange at, Value best) -> Value {
      Value v = math::AbsFOp::create(e.b, e.loc, e.loadScalar(x, at));
      Value greater =
          arith::CmpFOp::create(e.b, e.loc, arith::CmpFPredicate::OGT, v, best);
      return arith::SelectOp::create(e.b, e.loc, greater, v, best);
    };
    auto toScale = [&](Value best) -> Value {
      Value isZero = arith::CmpFOp::create(
          e.b, e.loc, arith::CmpFPredicate::OEQ, best, e.scalar(0.0));
      return arith::SelectOp::create(e.b, e.loc, isZero, e.scalar(1.0),
                                     e.divf(best, e.scalar(largest)));
    };
    auto maxOfRow = [&](ValueRange row, Value best) {
      return e.forLoop(zero, size, one, best,
                       [&](Value d, ValueRange running) -> LoopEmitter::Values {
                         return {larger(append(row, d), running[0])};
                       })[0];
    };
    switch (granularity) {
    case Granularity::Token:
      e.parallelOver(x, rank - 1, [&](ValueRange row) {
        e.storeScalar(toScale(maxOfRow(row, e.scalar(0.0))), scale, row);
      });
      break;
    case Granularity::Tensor:
    case Granularity::Channel: {
      // The scales hold the running maxima until they are converted.
      bool channel = granularity == Granularity::Channel;
      Value count = channel ? size : one;
      auto slot = [&](Value d) {
        return channel ? SmallVector<Value>{d} : SmallVector<Value>{};
      };
      e.forLoop(zero, count, one,
                [&](Value d) { e.storeScalar(e.scalar(0.0), scale, slot(d)); });
      e.serialOver(x, rank - 1, [&](ValueRange row) {
        if (!channel) {
          e.storeScalar(maxOfRow(row, e.loadScalar(scale, ValueRange())), scale,
                        ValueRange());
          return;
        }
        e.forLoop(zero, size, one, [&](Value d) {
          e.storeScalar(larger(append(row, d), e.loadScalar(scale, d)), scale,
                        d);
        });
      });
      e.forLoop(zero, count, one, [&](Value d) {
        e.storeScalar(toScale(e.loadScalar(scale, slot(d))), scale, slot(d));
      });
      break;
    }
    }
    e.parallelOver(x, rank - 1, [&](ValueRange row) {
      e.forLoop(zero, size, one, [&](Value d) {
        SmallVector<Value> at = append(row, d);
        Value factor = e.loadScalar(scale, scaleIndex(granularity, row, d));
        Value v = e.divf(e.loadScalar(x, at), factor);
        Value low = e.scalar(-largest), high = e.scalar(largest);
        Value below = arith::CmpFOp::create(e.b, e.loc,
                                            arith::CmpFPredicate::OLT, v, low);
        v = arith::SelectOp::create(e.b, e.loc, below, low, v);
        Value above = arith::CmpFOp::create(e.b, e.loc,
                                            arith::CmpFPredicate::OGT, v, high);
        v = arith::SelectOp::create(e.b, e.loc, above, high, v);
        if (!integer) {
          e.storeScalar(v, q, at);
          return;
        }
        Value isNumber =
            arith::CmpFOp::create(e.b, e.loc, arith::CmpFPredicate::ORD, v, v);
        v = arith::SelectOp::create(e.b, e.loc, isNumber, v, e.scalar(0.0));
        v = math::RoundEvenOp::create(e.b, e.loc, v);
        Value i = arith::FPToSIOp::create(e.b, e.loc, e.b.getI8Type(), v);
        memref::StoreOp::create(e.b, e.loc, i, q, at);
      });
    });
    e.replace(rewriter, {q, scale});
    return success();
  }
};

struct DequantizeLowering : public SSMLowering<DequantizeOp> {
  using SSMLowering::SSMLowering;

  LogicalResult matchAndRewrite(DequantizeOp op,
                                PatternRewriter &rewriter) const override {
    OpLowering e(rewriter, op, target);
    Value q = e.buffer(op.getQ()), scale = e.buffer(op.getScale());
    Value x = e.output(0);
    int64_t rank = cast<ShapedType>(op.getQ().getType()).getRank();
    e.parallelOver(q, rank - 1, [&](ValueRange row) {
      e.forLoop(e.index(0), e.dim(q, rank - 1), e.index(1), [&](Value d) {
        SmallVector<Value> at = append(row, d);
        Value factor =
            e.loadScalar(scale, scaleIndex(op.getGranularity(), row, d));
        e.storeScalar(e.mulf(e.loadScalar(q, at), factor), x, at);
      });
    });
    e.replace(rewriter, x);
    return success();
  }
};
} // namespace

void corey::populateQuantizationLowerings(RewritePatternSet &patterns,
                                          VectorTarget target) {
  patterns.add<QuantizeLowering, DequantizeLowering>(patterns.getContext(),
                                                     target);
}
