//===- Rows.cpp - CPU lowering of ops along the last axis -----------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "LoweringUtils.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include "mlir/Dialect/Vector/IR/VectorOps.h"

using namespace mlir;
using namespace corey;
using namespace corey::ssm;

static int64_t rankOf(Value memref) {
  return cast<MemRefType>(memref.getType()).getRank();
}

//===----------------------------------------------------------------------===//
// Stages of a Hadamard transform
//===----------------------------------------------------------------------===//

/// One stage of butterflies between lanes `half` apart: lane i becomes
/// v[i] + v[i ^ half] where bit `half` of i is clear, else v[i ^ half] - v[i].
static Value butterflyWithin(OpLowering &e, Value v, int64_t half) {
  int64_t lanes = cast<VectorType>(v.getType()).getDimSize(0);
  SmallVector<int64_t> partner;
  SmallVector<float> sign;
  for (int64_t i = 0; i < lanes; ++i) {
    partner.push_back(i ^ half);
    sign.push_back(i & half ? -1.0f : 1.0f);
  }
  Value swapped = vector::ShuffleOp::create(e.b, e.loc, v, v, partner);
  Value signs = arith::ConstantOp::create(
      e.b, e.loc, DenseElementsAttr::get(e.vectorType(lanes), ArrayRef(sign)));
  return e.fma(v, signs, swapped);
}

/// The stages within a vector, which has whole blocks, or a part of one and a
/// power of two of lanes.
static Value stagesWithin(OpLowering &e, Value v, int64_t block) {
  int64_t lanes = cast<VectorType>(v.getType()).getDimSize(0);
  for (int64_t half = 1; half < std::min(block, lanes); half *= 2)
    v = butterflyWithin(e, v, half);
  return v;
}

/// The stages between the vectors of `lanes` of a block, from `base` of
/// `scratch` on.
static void stagesBetween(OpLowering &e, Value scratch, Value base,
                          int64_t block, int64_t lanes) {
  for (int64_t half = lanes; half < block; half *= 2)
    e.forLoop(0, block, 2 * half, [&](Value low) {
      e.forLoop(e.index(0), e.index(half), e.index(lanes), [&](Value j) {
        Value first = e.add(e.add(low, j), base), second = e.add(first, half);
        Value a = e.load(scratch, first, lanes);
        Value b = e.load(scratch, second, lanes);
        e.store(e.addf(a, b), scratch, first);
        e.store(e.subf(a, b), scratch, second);
      });
    });
}

static double rotationScale(int64_t block) {
  return 1.0 / std::sqrt(static_cast<double>(block));
}

namespace {
//===----------------------------------------------------------------------===//
// rms_norm
//===----------------------------------------------------------------------===//

struct RMSNormLowering : public SSMLowering<RMSNormOp> {
  using SSMLowering::SSMLowering;

  LogicalResult matchAndRewrite(RMSNormOp op,
                                PatternRewriter &rewriter) const override {
    OpLowering e(rewriter, op, target);
    Value x = e.buffer(op.getX()), weight = e.buffer(op.getWeight());
    Value residual = e.buffer(op.getResidual()), z = e.buffer(op.getZ());
    Value y = e.output(0);
    Value residualOut = op.getResidualOut() ? e.output(1) : Value();
    int64_t size = cast<ShapedType>(op.getX().getType()).getShape().back();
    int64_t group =
        op.getGroupSize() ? static_cast<int64_t>(*op.getGroupSize()) : size;
    double eps = op.getEps().convertToFloat();
    bool gateFirst = z && !op.getNormBeforeGate();
    // Blocks of the rotation; blocks that fit into a vector need no more than
    // that.
    int64_t block =
        e.rotation() ? static_cast<int64_t>(e.rotation().getBlock()) : 0;
    bool inVector = block <= target.lanes;
    LoopEmitter::Transform toRotation = block ? e.toRotation() : nullptr;

    e.parallelOver(x, rankOf(x) - 1, [&](ValueRange row) {
      Value scratch = e.scratch({group});
      e.forLoop(0, size, group, [&](Value base) {
        // Pass 1: the value to normalise, and its sum of squares.
        Value total;
        auto squares = [&](Value i, int64_t lanes, Value sum) {
          SmallVector<Value> at = append(row, e.add(base, i));
          Value r = e.load(x, at, lanes);
          if (residual)
            r = e.addf(r, e.load(residual, at, lanes));
          if (residualOut)
            e.store(r, residualOut, at);
          if (gateFirst)
            r = e.mulf(r, e.silu(e.load(z, at, lanes)));
          e.store(r, scratch, i);
          return e.fma(r, r, sum);
        };
        int64_t full = group / target.lanes * target.lanes;
        if (full) {
          auto sums =
              e.forLoop(e.index(0), e.index(full), e.index(target.lanes),
                        e.constant(0.0, target.lanes),
                        [&](Value i, ValueRange sum) -> LoopEmitter::Values {
                          return {squares(i, target.lanes, sum[0])};
                        });
          total = e.sumLanes(sums[0]);
        }
        if (full < group) {
          Value rest = e.sumLanes(squares(e.index(full), group - full,
                                          e.constant(0.0, group - full)));
          total = total ? e.addf(total, rest) : rest;
        }
        Value mean = e.divf(total, e.scalar(group));
        Value root =
            math::SqrtOp::create(e.b, e.loc, e.addf(mean, e.scalar(eps)));
        Value inverse = e.divf(e.scalar(1.0), root);
        // Pass 2: scale, and begin to rotate.
        e.forLanes(group, target.lanes, [&](Value i, int64_t lanes) {
          SmallVector<Value> at = append(row, e.add(base, i));
          Value r = e.mulf(e.load(scratch, i, lanes), e.splat(inverse, lanes));
          r = e.mulf(r, e.load(weight, at.back(), lanes));
          if (z && !gateFirst)
            r = e.mulf(r, e.silu(e.load(z, at, lanes)));
          if (block)
            r = stagesWithin(e, toRotation(r, at, lanes), block);
          if (block && inVector)
            r = e.mulf(r, e.constant(rotationScale(block), lanes));
          if (inVector)
            e.store(r, y, at);
          else
            e.store(r, scratch, i);
        });
        if (inVector)
          return;
        // Pass 3: the rest of the rotation. Vectors divide blocks, and those
        // the group.
        int64_t lanes = target.lanes;
        e.forLoop(0, group, block, [&](Value start) {
          stagesBetween(e, scratch, start, block, lanes);
          e.forLoop(0, block, lanes, [&](Value i) {
            Value at = e.add(start, i);
            Value v = e.mulf(e.load(scratch, at, lanes),
                             e.constant(rotationScale(block), lanes));
            e.store(v, y, append(row, e.add(base, at)));
          });
        });
      });
    });
    SmallVector<Value> results{y};
    if (residualOut)
      results.push_back(residualOut);
    e.replace(rewriter, results);
    return success();
  }
};

//===----------------------------------------------------------------------===//
// hadamard
//===----------------------------------------------------------------------===//

struct HadamardLowering : public SSMLowering<HadamardOp> {
  using SSMLowering::SSMLowering;

  LogicalResult matchAndRewrite(HadamardOp op,
                                PatternRewriter &rewriter) const override {
    if (replaceUnneeded(rewriter, op))
      return success();
    OpLowering e(rewriter, op, target);
    Value x = e.buffer(op.getX()), y = e.output(0);
    int64_t size = cast<ShapedType>(op.getX().getType()).getShape().back();
    int64_t block = op.getBlock();
    int64_t lanes = std::min<int64_t>(block, target.lanes);

    e.parallelOver(x, rankOf(x) - 1, [&](ValueRange row) {
      Value scratch = e.scratch({block});
      e.forLoop(0, size, block, [&](Value base) {
        // The stages within a vector, on the way in.
        e.forLoop(0, block, lanes, [&](Value i) {
          Value v = e.load(x, append(row, e.add(base, i)), lanes);
          e.store(stagesWithin(e, v, block), scratch, i);
        });
        stagesBetween(e, scratch, e.index(0), block, lanes);
        e.forLoop(0, block, lanes, [&](Value i) {
          Value v = e.mulf(e.load(scratch, i, lanes),
                           e.constant(rotationScale(block), lanes));
          e.store(v, y, append(row, e.add(base, i)));
        });
      });
    });
    e.replace(rewriter, y);
    return success();
  }
};

//===----------------------------------------------------------------------===//
// projection
//===----------------------------------------------------------------------===//

struct ProjectionLowering : public SSMLowering<ProjectionOp> {
  using SSMLowering::SSMLowering;

  /// Up to this many rows the weights are streamed once, in their own type,
  /// and reduced on the fly; beyond, a matrix product pays.
  static constexpr int64_t kFewRows = 4;
  /// Outputs that are summed up at a time then.
  static constexpr int64_t kSideBySide = 4;
  static constexpr int64_t kLineBytes = 64;
  /// Weights that a thread goes through at least.
  static constexpr int64_t kLeastWeights = 16384;

  LogicalResult matchAndRewrite(ProjectionOp op,
                                PatternRewriter &rewriter) const override {
    OpLowering e(rewriter, op, target);
    Value x = e.buffer(op.getX()), weight = e.buffer(op.getWeight());
    Value bias = e.buffer(op.getBias()), residual = e.buffer(op.getResidual());
    Value scale = e.buffer(op.getWeightScale());
    Value y = e.output(0);
    int64_t rank = rankOf(x);
    Value rows = e.index(1);
    for (int64_t i = 0; i + 1 < rank; ++i)
      rows = e.mul(rows, e.dim(x, i));

    /// The value a sum starts from.
    auto initial = [&](ValueRange row, Value m) {
      Value sum = bias ? e.loadScalar(bias, m) : e.scalar(0.0);
      return residual ? e.addf(sum, e.loadScalar(residual, append(row, m)))
                      : sum;
    };
    auto scaleOf = [&](Value m) -> Value {
      if (!scale)
        return {};
      return e.loadScalar(scale, rankOf(scale) ? ValueRange(m) : ValueRange());
    };
    int64_t inputs = cast<ShapedType>(op.getX().getType()).getShape().back();
    int64_t outputs = cast<ShapedType>(op.getWeight().getType()).getDimSize(0);

    // `count` outputs from `m` on, side by side: sums that wait for nobody, and
    // elements of x that are loaded once.
    auto outputsFrom = [&](Value m, int64_t count) {
      e.serialOver(x, rank - 1, [&](ValueRange row) {
        auto addProducts = [&](Value k, int64_t lanes, ValueRange sums) {
          Value elements = e.load(x, append(row, k), lanes);
          LoopEmitter::Values next;
          for (int64_t i = 0; i < count; ++i)
            next.push_back(e.fma(
                elements, e.load(weight, {e.add(m, i), k}, lanes), sums[i]));
          return next;
        };
        int64_t full = inputs / target.lanes * target.lanes;
        LoopEmitter::Values totals(count, e.scalar(0.0));
        if (full) {
          // A line of the cache at a time; those of the next outputs are on
          // their way meanwhile, as rows are too short for the hardware to
          // see them coming.
          int64_t line =
              std::max<int64_t>(kLineBytes * 8 /
                                    getElementTypeOrSelf(weight.getType())
                                        .getIntOrFloatBitWidth(),
                                target.lanes);
          int64_t step = full % line == 0 ? line : target.lanes;
          LoopEmitter::Values sums = e.forLoop(
              e.index(0), e.index(full), e.index(step),
              LoopEmitter::Values(count, e.constant(0.0, target.lanes)),
              [&](Value k, ValueRange sums) {
                if (step == line)
                  for (int64_t i = 0; i < count; ++i)
                    e.prefetch(weight, {e.add(m, count + i), k},
                               /*write=*/false);
                LoopEmitter::Values next(sums.begin(), sums.end());
                for (int64_t i = 0; i < step; i += target.lanes)
                  next = addProducts(e.add(k, i), target.lanes, next);
                return next;
              });
          for (int64_t i = 0; i < count; ++i)
            totals[i] = e.sumLanes(sums[i]);
        }
        if (full < inputs) {
          LoopEmitter::Values sums = addProducts(
              e.index(full), inputs - full,
              LoopEmitter::Values(count, e.constant(0.0, inputs - full)));
          for (int64_t i = 0; i < count; ++i)
            totals[i] = e.addf(totals[i], e.sumLanes(sums[i]));
        }
        for (int64_t i = 0; i < count; ++i) {
          Value at = e.add(m, i), total = totals[i];
          if (Value factor = scaleOf(at))
            total = e.mulf(total, factor);
          e.storeScalar(e.addf(total, initial(row, at)), y, append(row, at));
        }
      });
    };
    auto streamed = [&] {
      int64_t together = outputs / kSideBySide * kSideBySide;
      // What a thread is given at least is worth waking it.
      int64_t block = llvm::alignTo(
          std::clamp<int64_t>(kLeastWeights / std::max<int64_t>(inputs, 1),
                              kSideBySide, std::max(together, kSideBySide)),
          kSideBySide);
      if (together)
        e.parallel({e.index(llvm::divideCeil(together, block))},
                   [&](ValueRange ivs) {
                     Value from = e.mul(ivs[0], block);
                     Value to = e.min(e.add(from, block), e.index(together));
                     e.forLoop(from, to, e.index(kSideBySide),
                               [&](Value m) { outputsFrom(m, kSideBySide); });
                   });
      if (together < outputs)
        outputsFrom(e.index(together), outputs - together);
    };

    auto product = [&] {
      // The product runs in f32; operands of other types are widened first.
      LoopEmitter::Values owned;
      Value x32 = x, w32 = weight, y32 = y;
      if (!isF32(x)) {
        owned.push_back(x32 = e.f32Like(x));
        e.parallelOver(x, rank - 1, [&](ValueRange row) {
          e.forLanes(inputs, target.lanes, [&](Value k, int64_t lanes) {
            e.store(e.load(x, append(row, k), lanes), x32, append(row, k));
          });
        });
      }
      if (!isF32(weight)) {
        owned.push_back(w32 = e.f32Like(weight));
        e.parallel({e.index(outputs)}, [&](ValueRange m) {
          Value factor = scaleOf(m[0]);
          e.forLanes(inputs, target.lanes, [&](Value k, int64_t lanes) {
            Value w = e.load(weight, {m[0], k}, lanes);
            if (factor)
              w = e.mulf(w, e.splat(factor, lanes));
            e.store(w, w32, {m[0], k});
          });
        });
      }
      if (!isF32(y))
        owned.push_back(y32 = e.f32Like(y));
      if (bias || residual)
        e.parallelOver(y, rank - 1, [&](ValueRange row) {
          e.forLanes(outputs, target.lanes, [&](Value m, int64_t lanes) {
            Value v = bias ? e.load(bias, m, lanes) : Value();
            if (residual) {
              Value r = e.load(residual, append(row, m), lanes);
              v = v ? e.addf(v, r) : r;
            }
            e.store(v, y32, append(row, m));
          });
        });
      emitGemm(e, x32, w32, y32, rank, outputs, inputs, bias || residual);
      if (y32 != y)
        e.parallelOver(y, rank - 1, [&](ValueRange row) {
          e.forLanes(outputs, target.lanes, [&](Value m, int64_t lanes) {
            e.store(e.load(y32, append(row, m), lanes), y, append(row, m));
          });
        });
      for (Value buffer : owned)
        memref::DeallocOp::create(e.b, e.loc, buffer);
    };

    Value few = e.cmp(arith::CmpIPredicate::sle, rows, e.index(kFewRows));
    e.ifThen(few, streamed, product);
    e.replace(rewriter, y);
    return success();
  }

  static bool isF32(Value memref) {
    return getElementTypeOrSelf(memref.getType()).isF32();
  }

  /// corey_rt_gemm over the last two axes, looping over those before them but
  /// one, which the run-time library folds into the rows where strides allow.
  static void emitGemm(OpLowering &e, Value x, Value w, Value y, int64_t rank,
                       int64_t outputs, int64_t inputs, bool accumulate) {
    auto stride = [&](memref::ExtractStridedMetadataOp metadata, int64_t axis) {
      return axis < 0 ? e.toI64(e.index(0))
                      : e.toI64(metadata.getStrides()[axis]);
    };
    int64_t outer = std::max<int64_t>(rank - 3, 0);
    e.serialOver(x, outer, [&](ValueRange ivs) {
      auto xm = memref::ExtractStridedMetadataOp::create(e.b, e.loc, x);
      auto ym = memref::ExtractStridedMetadataOp::create(e.b, e.loc, y);
      auto wm = memref::ExtractStridedMetadataOp::create(e.b, e.loc, w);
      auto base = [&](Value memref, memref::ExtractStridedMetadataOp metadata) {
        Value offset = e.index(0);
        for (auto [axis, iv] : llvm::enumerate(ivs))
          offset = e.add(offset, e.mul(iv, metadata.getStrides()[axis]));
        return arith::AddIOp::create(e.b, e.loc, e.address(memref),
                                     e.toI64(e.mul(offset, 4)))
            .getResult();
      };
      auto size = [&](int64_t axis) {
        return e.toI64(axis < 0 ? e.index(1) : e.dim(x, axis));
      };
      e.callRuntime("corey_rt_gemm",
                    {base(x, xm), e.address(w), base(y, ym), size(rank - 3),
                     size(rank - 2), e.toI64(e.index(outputs)),
                     e.toI64(e.index(inputs)), stride(xm, rank - 3),
                     stride(xm, rank - 2), stride(wm, 0), stride(ym, rank - 3),
                     stride(ym, rank - 2), e.toI64(e.index(accumulate))});
    });
  }
};

//===----------------------------------------------------------------------===//
// embedding, argmax, sample
//===----------------------------------------------------------------------===//

struct EmbeddingLowering : public SSMLowering<EmbeddingOp> {
  using SSMLowering::SSMLowering;

  LogicalResult matchAndRewrite(EmbeddingOp op,
                                PatternRewriter &rewriter) const override {
    OpLowering e(rewriter, op, target);
    Value ids = e.buffer(op.getIds()), table = e.buffer(op.getTable());
    Value y = e.output(0);
    auto type = cast<ShapedType>(op.getTable().getType());
    int64_t size = type.getDimSize(1);
    Value numRows = e.dim(table, 0);
    Value limit =
        type.isDynamicDim(0)
            ? e.toI64(numRows)
            : arith::ConstantOp::create(
                  e.b, e.loc, e.b.getI64IntegerAttr(type.getDimSize(0)))
                  .getResult();
    auto idAt = [&](ValueRange at) -> Value {
      Value id = memref::LoadOp::create(e.b, e.loc, ids, at);
      return id.getType().isInteger(64)
                 ? id
                 : arith::ExtSIOp::create(e.b, e.loc, e.b.getI64Type(), id)
                       .getResult();
    };
    // Ids are checked before any row is copied; the copy clamps.
    e.serialOver(ids, rankOf(ids), [&](ValueRange at) {
      Value id = idAt(at);
      Value bad = e.cmp(arith::CmpIPredicate::uge, id, limit);
      e.ifThen(bad, [&] { e.callRuntime("corey_rt_bad_index", {id, limit}); });
    });
    auto copy = [&] {
      Value last = e.sub(numRows, e.index(1));
      e.parallelOver(ids, rankOf(ids), [&](ValueRange at) {
        Value id = arith::IndexCastOp::create(e.b, e.loc, e.b.getIndexType(),
                                              idAt(at));
        id = e.max(e.min(id, last), e.index(0));
        e.forLanes(size, target.lanes, [&](Value d, int64_t lanes) {
          e.store(e.load(table, {id, d}, lanes), y, append(at, d));
        });
      });
    };
    // An empty table has no row to clamp to.
    if (type.isDynamicDim(0))
      e.ifThen(e.cmp(arith::CmpIPredicate::ne, numRows, e.index(0)), copy);
    else
      copy();
    e.replace(rewriter, y);
    return success();
  }
};

struct ArgmaxLowering : public SSMLowering<ArgmaxOp> {
  using SSMLowering::SSMLowering;

  LogicalResult matchAndRewrite(ArgmaxOp op,
                                PatternRewriter &rewriter) const override {
    OpLowering e(rewriter, op, target);
    Value x = e.buffer(op.getX()), ids = e.output(0);
    int64_t size = cast<ShapedType>(op.getX().getType()).getShape().back();
    Type idType = getElementTypeOrSelf(op.getIds().getType());
    e.parallelOver(x, rankOf(x) - 1, [&](ValueRange row) {
      Value first = e.loadScalar(x, append(row, e.index(0)));
      auto best = e.forLoop(
          e.index(1), e.index(size), e.index(1), {first, e.index(0)},
          [&](Value i, ValueRange carried) -> LoopEmitter::Values {
            Value v = e.loadScalar(x, append(row, i));
            // v > best, or v is NaN and best is not.
            Value greater = arith::CmpFOp::create(
                e.b, e.loc, arith::CmpFPredicate::UGT, v, carried[0]);
            Value bestIsNumber = arith::CmpFOp::create(
                e.b, e.loc, arith::CmpFPredicate::ORD, carried[0], carried[0]);
            Value take =
                arith::AndIOp::create(e.b, e.loc, greater, bestIsNumber);
            return {arith::SelectOp::create(e.b, e.loc, take, v, carried[0]),
                    arith::SelectOp::create(e.b, e.loc, take, i, carried[1])};
          });
      Value id = arith::IndexCastOp::create(e.b, e.loc, idType, best[1]);
      memref::StoreOp::create(e.b, e.loc, id, ids, row);
    });
    e.replace(rewriter, ids);
    return success();
  }
};

/// The draw of a row is a function of the run-time library.
struct SampleLowering : public SSMLowering<SampleOp> {
  using SSMLowering::SSMLowering;

  LogicalResult matchAndRewrite(SampleOp op,
                                PatternRewriter &rewriter) const override {
    OpLowering e(rewriter, op, target);
    Value logits = e.buffer(op.getLogits()), random = e.buffer(op.getRandom());
    Value settings[] = {e.buffer(op.getTemperature()), e.buffer(op.getTopK()),
                        e.buffer(op.getTopP())};
    Value ids = e.output(0), next = e.output(1);
    int64_t rank = rankOf(logits), size = op.getLogits().getType().getDimSize(
                                       op.getLogits().getType().getRank() - 1);
    Value x = logits;
    if (!getElementTypeOrSelf(logits.getType()).isF32()) {
      x = e.f32Like(logits);
      e.parallelOver(logits, rank - 1, [&](ValueRange row) {
        e.forLanes(size, target.lanes, [&](Value v, int64_t lanes) {
          e.store(e.load(logits, append(row, v), lanes), x, append(row, v));
        });
      });
    }
    e.parallelOver(x, rank - 1, [&](ValueRange row) {
      auto metadata = memref::ExtractStridedMetadataOp::create(e.b, e.loc, x);
      Value offset = e.index(0);
      for (auto [axis, i] : llvm::enumerate(row))
        offset = e.add(offset, e.mul(i, metadata.getStrides()[axis]));
      LoopEmitter::Values operands{
          arith::AddIOp::create(e.b, e.loc, e.address(x),
                                e.toI64(e.mul(offset, 4))),
          e.toI64(e.index(size))};
      for (Value each : settings)
        operands.push_back(memref::LoadOp::create(e.b, e.loc, each, row));
      // The seed, the sequence and its draws.
      for (int64_t i = 0; i < 3; ++i)
        operands.push_back(memref::LoadOp::create(e.b, e.loc, random,
                                                  append(row, e.index(i))));
      Value drawn =
          e.callRuntime("corey_rt_sample", operands, e.b.getI64Type());
      Type idType = getElementTypeOrSelf(op.getIds().getType());
      if (idType != drawn.getType())
        drawn = arith::TruncIOp::create(e.b, e.loc, idType, drawn);
      memref::StoreOp::create(e.b, e.loc, drawn, ids, row);
      Value one =
          arith::ConstantOp::create(e.b, e.loc, e.b.getI64IntegerAttr(1));
      Value after[] = {operands[5], operands[6],
                       arith::AddIOp::create(e.b, e.loc, operands[7], one)};
      for (auto [i, value] : llvm::enumerate(after))
        memref::StoreOp::create(e.b, e.loc, value, next,
                                append(row, e.index(i)));
    });
    if (x != logits)
      memref::DeallocOp::create(e.b, e.loc, x);
    e.replace(rewriter, {ids, next});
    return success();
  }
};
} // namespace

void corey::populateRowLowerings(RewritePatternSet &patterns,
                                 VectorTarget target) {
  patterns.add<RMSNormLowering, HadamardLowering, ProjectionLowering,
               EmbeddingLowering, ArgmaxLowering, SampleLowering>(
      patterns.getContext(), target);
}
