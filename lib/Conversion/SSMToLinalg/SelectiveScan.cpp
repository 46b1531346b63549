//===- SelectiveScan.cpp - CPU lowering of selective_scan -----------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// A work item is one block of channels, a cache line of them, of one sequence.
// It walks its tokens chunk by chunk and hands its state, f32, from one chunk
// to the next through scratch memory. Within a chunk it takes tiles of tokens
// in three passes:
//
//   1. per token: dt, dt u and D u, for all channels of the block;
//   2. per state: the recurrence over the tile's tokens, channels across the
//      lanes, h and A in registers, sums of C h added up in scratch;
//   3. per token: the gate, and the store.
//
// The second pass is where the time goes. Its loop over tokens is short enough
// that every constant of the exponential stays in a register, and successive
// tokens are independent but for one fused multiply-add.
//
//===----------------------------------------------------------------------===//

#include "LoweringUtils.h"
#include "corey/Conversion/SSMToLinalg/SSMToLinalg.h"

using namespace mlir;
using namespace corey;
using namespace corey::ssm;

static constexpr double kLog2E = 1.44269504088896340736;

/// Channels of a work item: a cache line of f32.
static constexpr int64_t kBlock = 16;
/// Tokens of a tile: its scratch and its rows of B and C fit in L1.
static constexpr int64_t kTile = 32;
/// Tokens ahead of which rows are prefetched. Consecutive tokens of a channel
/// are a row apart, too far for the hardware to guess.
static constexpr int64_t kPrefetch = 12;

CPUWorkItem corey::getScanWorkItem(int64_t channels, int64_t groups) {
  return {std::min(kBlock, std::max<int64_t>(channels / groups, 1)), kTile};
}

namespace {
//===----------------------------------------------------------------------===//
// selective_scan
//===----------------------------------------------------------------------===//

/// The operands of a scan as memrefs, null where absent.
struct ScanBuffers {
  Value u, delta, A, B, C, D, z, bias, y;
  int64_t channels, groups, states;
};

/// Scratch of a work item: [kTile, lanes] for what tokens have, [states, lanes]
/// for what states have.
struct ScanTile {
  Value dt, dtu, sum, rate, state;
  int64_t lanes;
};

struct SelectiveScanLowering : public SSMLowering<SelectiveScanOp> {
  using SSMLowering::SSMLowering;

  LogicalResult matchAndRewrite(SelectiveScanOp op,
                                PatternRewriter &rewriter) const override {
    OpLowering e(rewriter, op, target);
    ScanBuffers s;
    s.u = e.buffer(op.getU());
    s.delta = e.buffer(op.getDelta());
    s.A = e.buffer(op.getA());
    s.B = e.buffer(op.getB());
    s.C = e.buffer(op.getC());
    s.D = e.buffer(op.getD());
    s.z = e.buffer(op.getZ());
    s.bias = e.buffer(op.getDeltaBias());
    s.y = e.output(0);
    s.channels = cast<ShapedType>(op.getU().getType()).getDimSize(2);
    s.groups = cast<ShapedType>(op.getB().getType()).getDimSize(2);
    s.states = cast<ShapedType>(op.getA().getType()).getDimSize(1);

    Sequences sequences(e, e, s.u, e.buffer(op.getSeqStarts()));
    StateRows rows(e, op.getInitialState(), op.getStateSlots(), sequences);
    FailureOr<Value> bound = getChunk(e, op, s.u);
    if (failed(bound))
      return failure();
    Value chunk = *bound;

    int64_t perGroup = s.channels / s.groups;
    int64_t blocks = perGroup / kBlock;
    if (blocks)
      e.parallel({sequences.count, e.index(s.groups), e.index(blocks)},
                 [&](ValueRange ivs) {
                   Value offset =
                       e.add(e.mul(ivs[1], perGroup), e.mul(ivs[2], kBlock));
                   emitBlock(e, op, s, sequences, rows, chunk, ivs[0], ivs[1],
                             offset, kBlock);
                 });
    if (int64_t rest = perGroup % kBlock)
      e.parallel({sequences.count, e.index(s.groups)}, [&](ValueRange ivs) {
        Value offset = e.add(e.mul(ivs[1], perGroup), blocks * kBlock);
        emitBlock(e, op, s, sequences, rows, chunk, ivs[0], ivs[1], offset,
                  rest);
      });
    SmallVector<Value> results{s.y};
    if (rows.last)
      results.push_back(rows.last);
    e.replace(rewriter, results);
    return success();
  }

  void emitBlock(OpLowering &e, SelectiveScanOp op, const ScanBuffers &s,
                 const Sequences &sequences, const StateRows &rows, Value chunk,
                 Value row, Value group, Value offset, int64_t lanes) const {
    // A log2(e), and the state, with the channels of the block innermost.
    Value rate = e.scratch({s.states, lanes});
    Value state = e.scratch({s.states, lanes});
    Value zero = e.index(0), one = e.index(1);
    StateRows::Place place = rows.of(e, row);
    auto largest = e.forLoop(
        zero, e.index(lanes), one, e.scalar(0.0),
        [&](Value lane, ValueRange outer) -> LoopEmitter::Values {
          Value channel = e.add(offset, lane);
          return e.forLoop(
              zero, e.index(s.states), one, outer[0],
              [&](Value n, ValueRange inner) -> LoopEmitter::Values {
                Value a = e.canonicalNaN(
                    e.mulf(e.loadScalar(s.A, {channel, n}), e.scalar(kLog2E)));
                e.storeScalar(a, rate, {n, lane});
                e.storeScalar(rows.load(e, place, {channel, n}, 0), state,
                              {n, lane});
                return {e.maxf(inner[0], a)};
              });
        });
    ScanTile tile{e.scratch({kTile, lanes}),
                  e.scratch({kTile, lanes}),
                  e.scratch({kTile, lanes}),
                  rate,
                  state,
                  lanes};
    // dt is not negative after softplus, A hardly ever is positive: exponents
    // then need no upper bound.
    Value bounded = arith::CmpFOp::create(e.b, e.loc, arith::CmpFPredicate::OLE,
                                          largest[0], e.scalar(0.0));
    Value skip = s.D ? e.load(s.D, offset, lanes) : Value();
    Value bias = s.bias ? e.load(s.bias, offset, lanes) : Value();

    auto [batch, begin, end] = sequences.range(e, row);
    Value last = end;
    e.forLoop(begin, end, chunk, [&, batch = batch](Value chunkBegin) {
      Value chunkEnd = e.min(last, e.add(chunkBegin, chunk));
      e.forLoop(chunkBegin, chunkEnd, e.index(kTile), [&](Value first) {
        Value count = e.min(e.index(kTile), e.sub(chunkEnd, first));
        e.forLoop(zero, count, one, [&](Value i) {
          Value t = e.add(first, i);
          Value ahead = e.min(e.add(t, kPrefetch), e.sub(last, one));
          for (Value memref : {s.u, s.delta, s.z})
            if (memref)
              e.prefetch(memref, {batch, ahead, offset}, /*write=*/false);
          Value u = e.load(s.u, {batch, t, offset}, lanes);
          Value dt = e.load(s.delta, {batch, t, offset}, lanes);
          if (bias)
            dt = e.addf(dt, bias);
          if (op.getDeltaSoftplus())
            dt = e.softplus(dt);
          dt = e.canonicalNaN(dt);
          e.store(dt, tile.dt, {i, zero});
          e.store(e.mulf(dt, u), tile.dtu, {i, zero});
          e.store(skip ? e.mulf(skip, u) : e.constant(0.0, lanes), tile.sum,
                  {i, zero});
        });
        auto recurrence = [&](bool nonPositive) {
          emitStates(e, s, tile, batch, group, first, count, nonPositive);
        };
        if (op.getDeltaSoftplus() && !e.target.hasAVX512())
          e.ifThen(
              bounded, [&] { recurrence(true); }, [&] { recurrence(false); });
        else
          recurrence(false);
        e.forLoop(zero, count, one, [&](Value i) {
          Value t = e.add(first, i);
          Value sum = e.load(tile.sum, {i, zero}, lanes);
          if (s.z)
            sum = e.mulf(sum, e.silu(e.load(s.z, {batch, t, offset}, lanes)));
          e.store(sum, s.y, {batch, t, offset});
        });
      });
    });
    if (!rows.last)
      return;
    rows.store(e, place, [&] {
      e.forLoop(0, lanes, 1, [&](Value lane) {
        e.forLoop(0, s.states, 1, [&](Value n) {
          e.storeScalar(e.loadScalar(state, {n, lane}), rows.last,
                        {place.row, e.add(offset, lane), n});
        });
      });
    });
  }

  /// Runs the recurrence of every state over a tile, a few states at a time.
  void emitStates(OpLowering &e, const ScanBuffers &s, const ScanTile &tile,
                  Value batch, Value group, Value first, Value count,
                  bool nonPositive) const {
    Value lane = e.index(0);
    int64_t width = tile.lanes;
    // States that share a pass over the sums; with 16 registers one state of
    // two vectors and the constants fill them.
    int64_t together =
        std::min<int64_t>(e.target.registers >= 32 ? 4 : 1, s.states);
    auto emitGroup = [&](Value n0, int64_t size) {
      LoopEmitter::Values rates, h;
      for (int64_t i = 0; i < size; ++i) {
        rates.push_back(e.load(tile.rate, {e.add(n0, i), lane}, width));
        h.push_back(e.load(tile.state, {e.add(n0, i), lane}, width));
      }
      h = e.forLoop(
          e.index(0), count, e.index(1), h,
          [&](Value i, ValueRange states) -> LoopEmitter::Values {
            Value t = e.add(first, i);
            Value dt = e.load(tile.dt, {i, lane}, width);
            Value dtu = e.load(tile.dtu, {i, lane}, width);
            Value sum = e.load(tile.sum, {i, lane}, width);
            LoopEmitter::Values next;
            for (int64_t j = 0; j < size; ++j) {
              Value n = e.add(n0, j);
              Value decay = e.exp2(e.mulf(dt, rates[j]), nonPositive);
              Value B = e.splat(e.loadScalar(s.B, {batch, t, group, n}), width);
              Value C = e.splat(e.loadScalar(s.C, {batch, t, group, n}), width);
              next.push_back(e.fma(decay, states[j], e.mulf(dtu, B)));
              sum = e.fma(C, next.back(), sum);
            }
            e.store(sum, tile.sum, {i, lane});
            return next;
          });
      for (int64_t i = 0; i < size; ++i)
        e.store(h[i], tile.state, {e.add(n0, i), lane});
    };
    e.forLoop(0, s.states / together * together, together,
              [&](Value n0) { emitGroup(n0, together); });
    if (int64_t rest = s.states % together)
      emitGroup(e.index(s.states - rest), rest);
  }
};

//===----------------------------------------------------------------------===//
// causal_conv
//===----------------------------------------------------------------------===//

struct CausalConvLowering : public SSMLowering<CausalConvOp> {
  using SSMLowering::SSMLowering;

  LogicalResult matchAndRewrite(CausalConvOp op,
                                PatternRewriter &rewriter) const override {
    OpLowering e(rewriter, op, target);
    Value x = e.buffer(op.getX()), weight = e.buffer(op.getWeight());
    Value bias = e.buffer(op.getBias());
    Value y = e.output(0);
    int64_t channels = cast<ShapedType>(op.getX().getType()).getDimSize(2);
    int64_t width = cast<ShapedType>(op.getWeight().getType()).getDimSize(1);
    Sequences sequences(e, e, x, e.buffer(op.getSeqStarts()));
    StateRows rows(e, op.getInitialState(), op.getStateSlots(), sequences);

    auto emitBlock = [&](Value row, Value offset, int64_t lanes) {
      // Taps with the channels of the block innermost.
      Value scratch = e.scratch({width, lanes});
      e.forLoop(0, lanes, 1, [&](Value lane) {
        e.forLoop(0, width, 1, [&](Value k) {
          e.storeScalar(e.loadScalar(weight, {e.add(offset, lane), k}), scratch,
                        {k, lane});
        });
      });
      LoopEmitter::Values taps, window;
      StateRows::Place place = rows.of(e, row);
      for (int64_t k = 0; k < width; ++k)
        taps.push_back(e.load(scratch, {e.index(k), e.index(0)}, lanes));
      Value start = bias ? e.load(bias, offset, lanes) : e.constant(0.0, lanes);
      for (int64_t k = 0; k + 1 < width; ++k)
        window.push_back(rows.load(e, place, {e.index(k), offset}, lanes));
      auto [batch, begin, end] = sequences.range(e, row);
      window = e.forLoop(
          begin, end, e.index(1), window,
          [&, batch = batch](Value t, ValueRange seen) -> LoopEmitter::Values {
            LoopEmitter::Values inputs(seen);
            inputs.push_back(e.load(x, {batch, t, offset}, lanes));
            Value sum = start;
            for (int64_t k = 0; k < width; ++k)
              sum = e.fma(taps[k], inputs[k], sum);
            if (op.getSilu())
              sum = e.silu(sum);
            e.store(sum, y, {batch, t, offset});
            return LoopEmitter::Values(llvm::drop_begin(inputs));
          });
      if (rows.last)
        rows.store(e, place, [&] {
          for (int64_t k = 0; k + 1 < width; ++k)
            e.store(window[k], rows.last, {place.row, e.index(k), offset});
        });
    };
    int64_t blocks = channels / target.lanes;
    if (blocks)
      e.parallel({sequences.count, e.index(blocks)}, [&](ValueRange ivs) {
        emitBlock(ivs[0], e.mul(ivs[1], target.lanes), target.lanes);
      });
    if (int64_t rest = channels % target.lanes)
      e.parallel({sequences.count}, [&](ValueRange ivs) {
        emitBlock(ivs[0], e.index(blocks * target.lanes), rest);
      });
    SmallVector<Value> results{y};
    if (rows.last)
      results.push_back(rows.last);
    e.replace(rewriter, results);
    return success();
  }
};
} // namespace

void corey::populateScanLowerings(RewritePatternSet &patterns,
                                  VectorTarget target) {
  patterns.add<SelectiveScanLowering, CausalConvLowering>(patterns.getContext(),
                                                          target);
}
