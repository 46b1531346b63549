//===- SSD.cpp - CPU lowering of ssd --------------------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// The matrix form, tile by tile. With a[t] the logarithm of the decay of token
// t, c its running sum in the tile and Q tokens to a tile, per head:
//
//   Y = exp(c) (C S^T) + (C B^T o exp(c_t - c_s) d_s, s <= t) X
//   S = exp(c_Q) S + (exp(c_Q - c_t) d_t x_t)^T B
//
// The state S is kept transposed, [N, P], so that the P channels of a head lie
// across the lanes in every product, and stays in f32 scratch from tile to tile
// and from chunk to chunk. C B^T is shared by the heads of a work item. Sums c
// are kept as a pair of f32 (high and low part): their differences must be
// accurate where the sums themselves are large.
//
// A sequence of a few tokens (decode) takes the recurrence instead, with the
// states across the lanes and no transposition.
//
//===----------------------------------------------------------------------===//

#include "LoweringUtils.h"
#include "corey/Conversion/SSMToLinalg/SSMToLinalg.h"
#include "mlir/Dialect/Vector/IR/VectorOps.h"
#include <numeric>

using namespace mlir;
using namespace corey;
using namespace corey::ssm;

static constexpr double kLog2E = 1.44269504088896340736;

/// Tokens of a tile.
static constexpr int64_t kTile = 64;

CPUWorkItem corey::getSSDWorkItem(int64_t heads, int64_t groups) {
  // Heads of one group that share C B^T: enough to make it cheap, few enough to
  // leave work for every thread.
  int64_t perGroup = heads / groups, block = 1;
  for (int64_t i = 1; i <= std::min<int64_t>(10, llvm::divideCeil(perGroup, 4));
       ++i)
    if (perGroup % i == 0)
      block = i;
  return {block, kTile};
}

namespace {
/// Rows of a register block of the products.
constexpr int64_t kRows = 4;
/// Up to this many tokens the recurrence is cheaper than one tile.
constexpr int64_t kFewTokens = 4;

class SSDEmitter {
public:
  SSDEmitter(OpLowering &e, SSDOp op) : e(e), op(op) {
    x = e.buffer(op.getX());
    // Loaded one element at a time: ssm-any-strides counts on it.
    e.readByElement(op.getDecay() ? op.getDecay() : op.getDt());
    dt = e.buffer(op.getDecay() ? op.getDecay() : op.getDt());
    A = e.buffer(op.getA());
    B = e.buffer(op.getB());
    C = e.buffer(op.getC());
    D = e.buffer(op.getD());
    z = e.buffer(op.getZ());
    bias = e.buffer(op.getDtBias());
    y = e.output(0);
    auto xType = cast<ShapedType>(op.getX().getType());
    heads = xType.getDimSize(2);
    channels = xType.getDimSize(3);
    groups = cast<ShapedType>(op.getB().getType()).getDimSize(2);
    states = cast<ShapedType>(op.getB().getType()).getDimSize(3);
    lanes = e.target.lanes;
    paddedStates = llvm::alignTo(states, kRows);
  }

  void emit(const Sequences &sequences, const StateRows &rows, Value chunk) {
    stateRows = &rows;
    int64_t perGroup = heads / groups;
    int64_t block = getSSDWorkItem(heads, groups).channels;
    e.parallel(
        {sequences.count, e.index(groups), e.index(perGroup / block)},
        [&](ValueRange ivs) {
          place = stateRows->of(e, ivs[0]);
          group = ivs[1];
          firstHead = e.add(e.mul(ivs[1], perGroup), e.mul(ivs[2], block));
          headBlock = block;
          Sequences::Range range = sequences.range(e, ivs[0]);
          batch = range.batch;
          Value tokens = e.sub(range.end, range.begin);
          Value few =
              e.cmp(arith::CmpIPredicate::sle, tokens, e.index(kFewTokens));
          e.ifThen(
              few,
              [&] {
                e.forLoop(0, headBlock, 1, [&](Value i) {
                  emitRecurrence(e.add(firstHead, i), range.begin, range.end);
                });
              },
              [&] { emitTiles(range.begin, range.end, chunk); });
        });
  }

  Value y;

private:
  //===--------------------------------------------------------------------===//
  // Time steps
  //===--------------------------------------------------------------------===//

  /// The step d of a token from its raw dt, scalar or vector.
  Value stepOf(Value raw, Value head) {
    int64_t width = 0;
    if (auto type = dyn_cast<VectorType>(raw.getType()))
      width = type.getDimSize(0);
    if (bias) {
      Value b = e.loadScalar(bias, head);
      raw = e.addf(raw, width ? e.splat(b, width) : b);
    }
    if (op.getDtSoftplus())
      raw = e.softplus(raw);
    if (auto limit = op.getDtLimit()) {
      raw = e.maxf(raw, e.constantLike(raw, (*limit)[0]));
      Value high = e.constantLike(raw, (*limit)[1]);
      Value above = arith::CmpFOp::create(e.b, e.loc, arith::CmpFPredicate::OGT,
                                          raw, high);
      raw = arith::SelectOp::create(e.b, e.loc, above, high, raw);
    }
    return raw;
  }

  /// An exponent of 2 that sums of a tile hold to the last digit: below -256
  /// the decay is zero in f32 whatever the exponent, minus infinity, which has
  /// no difference to itself, included.
  Value limitExponent(Value exponent) {
    return e.maxf(e.canonicalNaN(exponent), e.constantLike(exponent, -256.0));
  }

  /// A log2(e) of a head.
  Value rateOf(Value head) {
    return e.mulf(e.loadScalar(A, head), e.scalar(kLog2E));
  }

  //===--------------------------------------------------------------------===//
  // Recurrence, for a few tokens
  //===--------------------------------------------------------------------===//

  void emitRecurrence(Value head, Value begin, Value end) {
    Value decays = e.scratch({kFewTokens}), steps = e.scratch({kFewTokens});
    Value one = e.index(1);
    e.forLoop(begin, end, one, [&](Value t) {
      Value i = e.sub(t, begin);
      Value raw = e.loadScalar(dt, {batch, t, head});
      Value exponent, step;
      if (op.getDecay()) {
        exponent = e.mulf(raw, e.scalar(kLog2E));
        step = e.scalar(1.0);
      } else {
        step = stepOf(raw, head);
        exponent = e.mulf(step, rateOf(head));
      }
      e.storeScalar(e.exp2(limitExponent(exponent)), decays, i);
      e.storeScalar(step, steps, i);
    });
    Value state = e.scratch({states});
    e.forLoop(0, channels, 1, [&](Value p) {
      e.forLanes(states, lanes, [&](Value n, int64_t width) {
        e.store(stateRows->load(e, place, {head, p, n}, width), state, n);
      });
      e.forLoop(begin, end, one, [&](Value t) {
        Value i = e.sub(t, begin);
        Value decay = e.loadScalar(decays, i);
        Value input = e.loadScalar(x, {batch, t, head, p});
        Value scaled = e.mulf(input, e.loadScalar(steps, i));
        Value total = e.scalar(0.0);
        auto update = [&](Value n, int64_t width, Value sum) {
          Value s = e.load(state, n, width);
          Value b = e.load(B, {batch, t, group, n}, width);
          s = e.fma(e.splat(decay, width), s,
                    e.mulf(e.splat(scaled, width), b));
          e.store(s, state, n);
          return e.fma(e.load(C, {batch, t, group, n}, width), s, sum);
        };
        int64_t full = states / lanes * lanes;
        if (full)
          total = e.sumLanes(e.forLoop(
              e.index(0), e.index(full), e.index(lanes), e.constant(0.0, lanes),
              [&](Value n, ValueRange sum) -> LoopEmitter::Values {
                return {update(n, lanes, sum[0])};
              })[0]);
        if (full < states)
          total =
              e.addf(total, e.sumLanes(update(e.index(full), states - full,
                                              e.constant(0.0, states - full))));
        if (D)
          total = e.fma(loadSkip(head, p), input, total);
        if (z)
          total = e.mulf(total, e.silu(e.loadScalar(z, {batch, t, head, p})));
        e.storeScalar(total, y, {batch, t, head, p});
      });
      if (stateRows->last)
        stateRows->store(e, place, [&] {
          e.forLanes(states, lanes, [&](Value n, int64_t width) {
            e.store(e.load(state, n, width), stateRows->last,
                    {place.row, head, p, n});
          });
        });
    });
  }

  Value loadSkip(Value head, Value p) {
    bool perChannel = cast<MemRefType>(D.getType()).getRank() == 2;
    return e.loadScalar(D, perChannel ? ValueRange{head, p} : ValueRange{head});
  }

  //===--------------------------------------------------------------------===//
  // Tiles
  //===--------------------------------------------------------------------===//

  void emitTiles(Value begin, Value end, Value chunk) {
    state = e.scratch({headBlock, paddedStates, channels});
    Bt = e.scratch({paddedStates, kTile});
    Bs = e.scratch({kTile, paddedStates});
    Cs = e.scratch({kTile, paddedStates});
    scores = e.scratch({kTile, kTile});
    weights = e.scratch({kTile, kTile});
    inputs = e.scratch({kTile, channels});
    scaled = e.scratch({kTile, channels});
    steps = e.scratch({kTile});
    sums = e.scratch({kTile});
    sumsLow = e.scratch({kTile});
    growth = e.scratch({kTile});

    e.forLoop(0, headBlock, 1, [&](Value i) {
      Value head = e.add(firstHead, i);
      e.forLoop(0, channels, 1, [&](Value p) {
        e.forLoop(0, states, 1, [&](Value n) {
          e.storeScalar(stateRows->load(e, place, {head, p, n}, 0), state,
                        {i, n, p});
        });
        // Padding keeps the products free of special cases; it stays zero.
        for (int64_t n = states; n < paddedStates; ++n)
          e.storeScalar(e.scalar(0.0), state, {i, e.index(n), p});
      });
    });
    Value tile = e.index(kTile);
    e.forLoop(begin, end, chunk, [&](Value chunkBegin) {
      Value chunkEnd = e.min(end, e.add(chunkBegin, chunk));
      e.forLoop(chunkBegin, chunkEnd, tile, [&](Value first) {
        emitTile(first, e.min(tile, e.sub(chunkEnd, first)));
      });
    });
    if (!stateRows->last)
      return;
    stateRows->store(e, place, [&] {
      e.forLoop(0, headBlock, 1, [&](Value i) {
        e.forLoop(0, channels, 1, [&](Value p) {
          e.forLoop(0, states, 1, [&](Value n) {
            e.storeScalar(e.loadScalar(state, {i, n, p}), stateRows->last,
                          {place.row, e.add(firstHead, i), p, n});
          });
        });
      });
    });
  }

  void emitTile(Value first, Value count) {
    Value zero = e.index(0), one = e.index(1), rows = e.index(kRows);
    Value padded = e.mul(e.div(e.add(count, kRows - 1), kRows), kRows);
    // B and C of the tile as f32, rows past the end zero.
    e.forLoop(zero, padded, one, [&](Value t) {
      Value valid = e.cmp(arith::CmpIPredicate::slt, t, count);
      Value token = e.min(e.add(first, t), e.sub(e.add(first, count), one));
      e.forLanes(states, lanes, [&](Value n, int64_t width) {
        auto masked = [&](Value memref) -> Value {
          Value v = e.load(memref, {batch, token, group, n}, width);
          return arith::SelectOp::create(e.b, e.loc, valid, v,
                                         e.constant(0.0, width));
        };
        e.store(masked(B), Bs, {t, n});
        e.store(masked(C), Cs, {t, n});
      });
      for (int64_t n = states; n < paddedStates; ++n) {
        e.storeScalar(e.scalar(0.0), Bs, {t, e.index(n)});
        e.storeScalar(e.scalar(0.0), Cs, {t, e.index(n)});
      }
    });
    e.forLoop(0, states, 1, [&](Value n) {
      e.forLoop(zero, padded, one, [&](Value t) {
        e.storeScalar(e.loadScalar(Bs, {t, n}), Bt, {n, t});
      });
    });
    // scores[t, s] = C[t] . B[s], over the columns that the causal rows need.
    int64_t scoreVectors = std::min<int64_t>(kTile / lanes, maxVectors());
    e.forLoop(zero, padded, rows, [&](Value t) {
      Value bound = e.add(t, kRows);
      e.forLoop(zero, bound, e.index(scoreVectors * lanes), [&](Value s) {
        Accumulators sum = zeros(scoreVectors, lanes);
        sum = product(
            sum, zero, e.index(states), scoreVectors, lanes,
            [&](Value k, int64_t i) {
              return e.loadScalar(Cs, {e.add(t, i), k});
            },
            [&](Value k, int64_t j) {
              return e.load(Bt, {k, e.add(s, j * lanes)}, lanes);
            });
        for (int64_t i = 0; i < kRows; ++i)
          for (int64_t j = 0; j < scoreVectors; ++j)
            e.store(sum[i * scoreVectors + j], scores,
                    {e.add(t, i), e.add(s, j * lanes)});
      });
    });
    e.forLoop(0, headBlock, 1,
              [&](Value i) { emitHead(i, first, count, padded); });
  }

  void emitHead(Value i, Value first, Value count, Value padded) {
    Value zero = e.index(0), one = e.index(1), rows = e.index(kRows);
    Value head = e.add(firstHead, i);
    emitDecays(head, first, count);

    Value lastIndex = e.sub(count, one);
    Value lastSum = e.loadScalar(sums, lastIndex);
    Value lastLow = e.loadScalar(sumsLow, lastIndex);
    // Inputs as f32, plain and weighted for the state; rows past the end zero.
    e.forLoop(zero, padded, one, [&](Value t) {
      Value valid = e.cmp(arith::CmpIPredicate::slt, t, count);
      Value token = e.min(e.add(first, t), e.sub(e.add(first, count), one));
      Value left = e.addf(e.subf(lastSum, e.loadScalar(sums, t)),
                          e.subf(lastLow, e.loadScalar(sumsLow, t)));
      Value weight = e.mulf(e.exp2(left), e.loadScalar(steps, t));
      e.forLanes(channels, lanes, [&](Value p, int64_t width) {
        Value v = e.load(x, {batch, token, head, p}, width);
        v = arith::SelectOp::create(e.b, e.loc, valid, v,
                                    e.constant(0.0, width));
        e.store(v, inputs, {t, p});
        e.store(e.mulf(v, e.splat(weight, width)), scaled, {t, p});
      });
    });
    // weights[t, s] = scores[t, s] exp(c_t - c_s) d_s for s <= t, else 0.
    Type i32 = e.b.getI32Type();
    SmallVector<int32_t> lane(lanes);
    std::iota(lane.begin(), lane.end(), 0);
    Value iota = arith::ConstantOp::create(
        e.b, e.loc,
        DenseElementsAttr::get(VectorType::get({lanes}, i32), ArrayRef(lane)));
    e.forLoop(zero, padded, one, [&](Value t) {
      Value sum = e.loadScalar(sums, t), low = e.loadScalar(sumsLow, t);
      // As far as the rows of this row's register block read.
      Value bound = e.mul(e.add(e.div(t, kRows), 1), kRows);
      e.forLoop(zero, bound, e.index(lanes), [&](Value s) {
        Value difference =
            e.addf(e.subf(e.splat(sum, lanes), e.load(sums, s, lanes)),
                   e.subf(e.splat(low, lanes), e.load(sumsLow, s, lanes)));
        Value w = e.mulf(e.exp2(difference), e.load(steps, s, lanes));
        w = e.mulf(w, e.load(scores, {t, s}, lanes));
        Value distance =
            arith::IndexCastOp::create(e.b, e.loc, i32, e.sub(t, s));
        Value visible = e.cmp(
            arith::CmpIPredicate::sle, iota,
            vector::BroadcastOp::create(e.b, e.loc, iota.getType(), distance));
        w = arith::SelectOp::create(e.b, e.loc, visible, w,
                                    e.constant(0.0, lanes));
        e.store(w, weights, {t, s});
      });
    });
    // The outputs.
    e.forLoop(zero, padded, rows, [&](Value t) {
      overColumns([&](Value p, int64_t vectors, int64_t width) {
        Accumulators sum = zeros(vectors, width);
        sum = product(
            sum, zero, e.index(states), vectors, width,
            [&](Value k, int64_t r) {
              return e.loadScalar(Cs, {e.add(t, r), k});
            },
            [&](Value k, int64_t j) {
              return e.load(state, {i, k, e.add(p, j * width)}, width);
            });
        for (int64_t r = 0; r < kRows; ++r) {
          Value grown = e.splat(e.loadScalar(growth, e.add(t, r)), width);
          for (int64_t j = 0; j < vectors; ++j)
            sum[r * vectors + j] = e.mulf(sum[r * vectors + j], grown);
        }
        sum = product(
            sum, zero, t, vectors, width,
            [&](Value k, int64_t r) {
              return e.loadScalar(weights, {e.add(t, r), k});
            },
            [&](Value k, int64_t j) {
              return e.load(inputs, {k, e.add(p, j * width)}, width);
            });
        // The square on the diagonal, row by row: a later input must not reach
        // an earlier row even with weight zero, which keeps NaN and infinity.
        for (int64_t k = 0; k < kRows; ++k) {
          Value token = e.add(t, k);
          for (int64_t j = 0; j < vectors; ++j) {
            Value column = e.load(inputs, {token, e.add(p, j * width)}, width);
            for (int64_t r = k; r < kRows; ++r) {
              Value weight =
                  e.splat(e.loadScalar(weights, {e.add(t, r), token}), width);
              sum[r * vectors + j] =
                  e.fma(weight, column, sum[r * vectors + j]);
            }
          }
        }
        for (int64_t r = 0; r < kRows; ++r) {
          Value token = e.add(t, r);
          e.ifThen(e.cmp(arith::CmpIPredicate::slt, token, count), [&] {
            for (int64_t j = 0; j < vectors; ++j)
              emitOutput(sum[r * vectors + j], head, e.add(first, token), token,
                         e.add(p, j * width), width);
          });
        }
      });
    });
    // The state.
    Value decay = e.loadScalar(growth, lastIndex);
    e.forLoop(0, paddedStates, kRows, [&](Value n) {
      overColumns([&](Value p, int64_t vectors, int64_t width) {
        Accumulators sum;
        for (int64_t r = 0; r < kRows; ++r)
          for (int64_t j = 0; j < vectors; ++j)
            sum.push_back(e.mulf(
                e.load(state, {i, e.add(n, r), e.add(p, j * width)}, width),
                e.splat(decay, width)));
        sum = product(
            sum, zero, count, vectors, width,
            [&](Value k, int64_t r) {
              return e.loadScalar(Bs, {k, e.add(n, r)});
            },
            [&](Value k, int64_t j) {
              return e.load(scaled, {k, e.add(p, j * width)}, width);
            });
        for (int64_t r = 0; r < kRows; ++r)
          for (int64_t j = 0; j < vectors; ++j)
            e.store(sum[r * vectors + j], state,
                    {i, e.add(n, r), e.add(p, j * width)});
      });
    });
  }

  /// Fills `steps`, the running sums of log-decays and `growth` = exp(c_t).
  /// Entries past `count` are zero.
  void emitDecays(Value head, Value first, Value count) {
    Value zero = e.index(0), one = e.index(1);
    e.forLoop(zero, e.index(kTile), one, [&](Value t) {
      Value token = e.min(e.add(first, t), e.sub(e.add(first, count), one));
      Value raw = e.loadScalar(dt, {batch, token, head});
      Value valid = e.cmp(arith::CmpIPredicate::slt, t, count);
      e.storeScalar(
          arith::SelectOp::create(e.b, e.loc, valid, raw, e.scalar(0.0)), steps,
          t);
    });
    // Logarithms of the decays, in `growth` for the moment.
    e.forLoop(zero, e.index(kTile), e.index(lanes), [&](Value t) {
      Value raw = e.load(steps, t, lanes);
      if (op.getDecay()) {
        e.store(limitExponent(e.mulf(raw, e.constant(kLog2E, lanes))), growth,
                t);
        e.store(e.constant(1.0, lanes), steps, t);
        return;
      }
      Value step = stepOf(raw, head);
      e.store(step, steps, t);
      e.store(limitExponent(e.mulf(step, e.splat(rateOf(head), lanes))), growth,
              t);
    });
    Type f64 = e.b.getF64Type();
    Value none =
        arith::ConstantOp::create(e.b, e.loc, e.b.getF64FloatAttr(0.0));
    e.forLoop(zero, e.index(kTile), one, none,
              [&](Value t, ValueRange running) -> LoopEmitter::Values {
                Value valid = e.cmp(arith::CmpIPredicate::slt, t, count);
                Value a = arith::ExtFOp::create(e.b, e.loc, f64,
                                                e.loadScalar(growth, t));
                a = arith::SelectOp::create(e.b, e.loc, valid, a, none);
                Value sum = arith::AddFOp::create(e.b, e.loc, running[0], a);
                Value high =
                    arith::TruncFOp::create(e.b, e.loc, e.b.getF32Type(), sum);
                Value back = arith::ExtFOp::create(e.b, e.loc, f64, high);
                Value low = arith::TruncFOp::create(
                    e.b, e.loc, e.b.getF32Type(),
                    arith::SubFOp::create(e.b, e.loc, sum, back));
                e.storeScalar(high, sums, t);
                e.storeScalar(low, sumsLow, t);
                return {sum};
              });
    e.forLoop(zero, e.index(kTile), e.index(lanes), [&](Value t) {
      e.store(e.exp2(e.addf(e.load(sums, t, lanes), e.load(sumsLow, t, lanes))),
              growth, t);
    });
  }

  void emitOutput(Value sum, Value head, Value token, Value local, Value p,
                  int64_t width) {
    if (D) {
      bool perChannel = cast<MemRefType>(D.getType()).getRank() == 2;
      Value skip = perChannel ? e.load(D, {head, p}, width)
                              : e.splat(e.loadScalar(D, head), width);
      sum = e.fma(skip, e.load(inputs, {local, p}, width), sum);
    }
    if (z)
      sum = e.mulf(sum, e.silu(e.load(z, {batch, token, head, p}, width)));
    e.store(sum, y, {batch, token, head, p});
  }

  //===--------------------------------------------------------------------===//
  // Register-blocked products
  //===--------------------------------------------------------------------===//

  using Accumulators = LoopEmitter::Values;

  /// Vectors of a register block's row: as many as leave registers for the
  /// operands.
  int64_t maxVectors() const { return e.target.registers >= 32 ? 4 : 2; }

  Accumulators zeros(int64_t vectors, int64_t width) {
    return Accumulators(kRows * vectors, e.constant(0.0, width));
  }

  /// sum[i, j] += over k in [lower, upper) of left(k, i) * right(k, j).
  Accumulators product(ValueRange sum, Value lower, Value upper,
                       int64_t vectors, int64_t width,
                       llvm::function_ref<Value(Value k, int64_t i)> left,
                       llvm::function_ref<Value(Value k, int64_t j)> right) {
    return e.forLoop(lower, upper, e.index(1), sum,
                     [&](Value k, ValueRange running) -> LoopEmitter::Values {
                       LoopEmitter::Values columns, next;
                       for (int64_t j = 0; j < vectors; ++j)
                         columns.push_back(right(k, j));
                       for (int64_t i = 0; i < kRows; ++i) {
                         Value factor = e.splat(left(k, i), width);
                         for (int64_t j = 0; j < vectors; ++j)
                           next.push_back(e.fma(factor, columns[j],
                                                running[i * vectors + j]));
                       }
                       return next;
                     });
  }

  /// Calls `body` for every block of columns of a head: blocks of several full
  /// vectors, then single vectors, then the narrower rest.
  void overColumns(
      llvm::function_ref<void(Value p, int64_t vectors, int64_t width)> body) {
    int64_t wide = maxVectors() * lanes;
    int64_t offset = channels / wide * wide;
    if (offset == wide)
      body(e.index(0), maxVectors(), lanes);
    else if (offset)
      e.forLoop(0, offset, wide,
                [&](Value p) { body(p, maxVectors(), lanes); });
    if (int64_t vectors = (channels - offset) / lanes) {
      body(e.index(offset), vectors, lanes);
      offset += vectors * lanes;
    }
    if (offset < channels)
      body(e.index(offset), 1, channels - offset);
  }

  OpLowering &e;
  SSDOp op;
  Value x, dt, A, B, C, D, z, bias;
  const StateRows *stateRows = nullptr;
  int64_t heads, channels, groups, states, lanes, paddedStates;
  int64_t headBlock = 1;
  // Of the work item being emitted.
  StateRows::Place place;
  Value batch, group, firstHead;
  Value state, Bt, Bs, Cs, scores, weights, inputs, scaled;
  Value steps, sums, sumsLow, growth;
};

struct SSDLowering : public SSMLowering<SSDOp> {
  using SSMLowering::SSMLowering;

  LogicalResult matchAndRewrite(SSDOp op,
                                PatternRewriter &rewriter) const override {
    OpLowering e(rewriter, op, target);
    SSDEmitter emitter(e, op);
    Value x = e.buffer(op.getX());
    Sequences sequences(e, e, x, e.buffer(op.getSeqStarts()));
    FailureOr<Value> chunk = getChunk(e, op, x);
    if (failed(chunk))
      return failure();
    StateRows rows(e, op.getInitialStates(), op.getStateSlots(), sequences);
    emitter.emit(sequences, rows, *chunk);
    SmallVector<Value> results{emitter.y};
    if (rows.last)
      results.push_back(rows.last);
    e.replace(rewriter, results);
    return success();
  }
};
} // namespace

void corey::populateSSDLowerings(RewritePatternSet &patterns,
                                 VectorTarget target) {
  patterns.add<SSDLowering>(patterns.getContext(), target);
}
