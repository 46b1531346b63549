//===- SelectiveScan.cpp - CPU lowering of selective_scan and causal_conv -*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

//
// Channels stand across the lanes of a vector, one independent recurrence per
// lane; tokens run in a loop. A work item is one block of channels of one
// sequence. It walks its tokens chunk by chunk and hands its state, f32, from
// one chunk to the next through scratch memory.
//
//===----------------------------------------------------------------------===//

#include "LoweringUtils.h"

using namespace mlir;
using namespace corey;
using namespace corey::ssm;

static constexpr double kLog2E = 1.44269504088896340736;

/// Channels of a work item: a cache line of f32. With AVX2 that is two vectors,
/// which share the broadcasts of B and C.
static constexpr int64_t kBlock = 16;
/// Tokens ahead of which rows are prefetched. Consecutive tokens of a channel
/// are a row apart, too far for the hardware to guess.
static constexpr int64_t kPrefetch = 12;

namespace {
//===----------------------------------------------------------------------===//
// selective_scan
//===----------------------------------------------------------------------===//

/// The operands of a scan as memrefs, null where absent.
struct ScanBuffers {
  Value u, delta, A, B, C, D, z, bias, initial, y, last;
  int64_t channels, groups, states;
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
    s.initial = e.buffer(op.getInitialState());
    s.y = e.output(0);
    s.last = op.getLastState() ? e.output(1) : Value();
    s.channels = cast<ShapedType>(op.getU().getType()).getDimSize(2);
    s.groups = cast<ShapedType>(op.getB().getType()).getDimSize(2);
    s.states = cast<ShapedType>(op.getA().getType()).getDimSize(1);

    Sequences sequences(e, e, s.u, e.buffer(op.getSeqStarts()));
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
                   emitBlock(e, op, s, sequences, chunk, ivs[0], ivs[1], offset,
                             kBlock);
                 });
    if (int64_t rest = perGroup % kBlock)
      e.parallel({sequences.count, e.index(s.groups)}, [&](ValueRange ivs) {
        Value offset = e.add(e.mul(ivs[1], perGroup), blocks * kBlock);
        emitBlock(e, op, s, sequences, chunk, ivs[0], ivs[1], offset, rest);
      });
    SmallVector<Value> results{s.y};
    if (s.last)
      results.push_back(s.last);
    e.replace(rewriter, results);
    return success();
  }

  void emitBlock(OpLowering &e, SelectiveScanOp op, const ScanBuffers &s,
                 const Sequences &sequences, Value chunk, Value row, Value group,
                 Value offset, int64_t lanes) const {
    // A log2(e), and the state, with the channels of the block innermost.
    Value rate = e.scratch({s.states, lanes});
    Value state = e.scratch({s.states, lanes});
    Value one = e.index(1);
    e.forLoop(0, lanes, 1, [&](Value lane) {
      Value channel = e.add(offset, lane);
      e.forLoop(0, s.states, 1, [&](Value n) {
        Value a = e.mulf(e.loadScalar(s.A, {channel, n}), e.scalar(kLog2E));
        e.storeScalar(a, rate, {n, lane});
        Value h = s.initial ? e.loadScalar(s.initial, {row, channel, n})
                            : e.scalar(0.0);
        e.storeScalar(h, state, {n, lane});
      });
    });
    Value skip = s.D ? e.load(s.D, offset, lanes) : Value();
    Value bias = s.bias ? e.load(s.bias, offset, lanes) : Value();

    auto [batch, begin, end] = sequences.range(e, row);
    Value last = end;
    e.forLoop(begin, end, chunk, [&, batch = batch](Value chunkBegin) {
      Value chunkEnd = e.min(last, e.add(chunkBegin, chunk));
      // States live in registers across the tokens of a chunk while they fit
      // beside the temporaries, else they stay in the scratch (L1).
      bool inRegisters =
          s.states * llvm::divideCeil(lanes, target.lanes) <= target.registers / 2;
      LoopEmitter::Values carried;
      if (inRegisters)
        for (int64_t n = 0; n < s.states; ++n)
          carried.push_back(e.load(state, {e.index(n), e.index(0)}, lanes));
      carried = e.forLoop(
          chunkBegin, chunkEnd, one, carried,
          [&](Value t, ValueRange states) -> LoopEmitter::Values {
            Value ahead = e.min(e.add(t, kPrefetch), e.sub(last, one));
            for (Value row : {s.u, s.delta, s.z})
              if (row)
                e.prefetch(row, {batch, ahead, offset}, /*write=*/false);
            e.prefetch(s.y, {batch, ahead, offset}, /*write=*/true);
            Value u = e.load(s.u, {batch, t, offset}, lanes);
            Value dt = e.load(s.delta, {batch, t, offset}, lanes);
            if (bias)
              dt = e.addf(dt, bias);
            if (op.getDeltaSoftplus())
              dt = e.softplus(dt);
            Value dtu = e.mulf(dt, u);
            LoopEmitter::Values next;
            Value sum = emitStates(e, s, {batch, t, group}, rate, state, dt, dtu,
                                   states, next, lanes);
            if (skip)
              sum = e.fma(skip, u, sum);
            if (s.z)
              sum = e.mulf(sum, e.silu(e.load(s.z, {batch, t, offset}, lanes)));
            e.store(sum, s.y, {batch, t, offset});
            return next;
          });
      if (inRegisters)
        for (int64_t n = 0; n < s.states; ++n)
          e.store(carried[n], state, {e.index(n), e.index(0)});
    });
    if (!s.last)
      return;
    e.forLoop(0, lanes, 1, [&](Value lane) {
      e.forLoop(0, s.states, 1, [&](Value n) {
        e.storeScalar(e.loadScalar(state, {n, lane}), s.last,
                      {row, e.add(offset, lane), n});
      });
    });
  }

  /// Updates every state by one token and returns sum_n C[n] h[n].
  Value emitStates(OpLowering &e, const ScanBuffers &s, ArrayRef<Value> token,
                   Value rate, Value state, Value dt, Value dtu,
                   ValueRange states, LoopEmitter::Values &next,
                   int64_t lanes) const {
    Value zero = e.index(0);
    // Two accumulators halve the chain of dependent additions.
    Value sums[2] = {e.constant(0.0, lanes), e.constant(0.0, lanes)};
    auto update = [&](Value n, Value h, Value &sum) {
      Value decay = e.exp2(e.mulf(dt, e.load(rate, {n, zero}, lanes)));
      Value B = e.splat(e.loadScalar(s.B, {token[0], token[1], token[2], n}), lanes);
      Value C = e.splat(e.loadScalar(s.C, {token[0], token[1], token[2], n}), lanes);
      h = e.fma(decay, h, e.mulf(dtu, B));
      sum = e.fma(C, h, sum);
      return h;
    };
    if (!states.empty()) {
      for (int64_t n = 0; n < s.states; ++n)
        next.push_back(update(e.index(n), states[n], sums[n % 2]));
      return e.addf(sums[0], sums[1]);
    }
    auto updateInMemory = [&](Value n, Value &sum) {
      Value h = update(n, e.load(state, {n, zero}, lanes), sum);
      e.store(h, state, {n, zero});
    };
    // Up to 32 states straight, more in a loop of eight.
    constexpr int64_t unroll = 8;
    int64_t looped = s.states > 32 ? s.states / unroll * unroll : 0;
    if (looped) {
      LoopEmitter::Values results = e.forLoop(
          e.index(0), e.index(looped), e.index(unroll), {sums[0], sums[1]},
          [&](Value base, ValueRange running) -> LoopEmitter::Values {
            Value local[2] = {running[0], running[1]};
            for (int64_t i = 0; i < unroll; ++i)
              updateInMemory(e.add(base, i), local[i % 2]);
            return {local[0], local[1]};
          });
      sums[0] = results[0];
      sums[1] = results[1];
    }
    for (int64_t n = looped; n < s.states; ++n)
      updateInMemory(e.index(n), sums[n % 2]);
    return e.addf(sums[0], sums[1]);
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
    Value initial = e.buffer(op.getInitialState());
    Value y = e.output(0);
    Value last = op.getFinalState() ? e.output(1) : Value();
    int64_t channels = cast<ShapedType>(op.getX().getType()).getDimSize(2);
    int64_t width = cast<ShapedType>(op.getWeight().getType()).getDimSize(1);
    Sequences sequences(e, e, x, e.buffer(op.getSeqStarts()));

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
      for (int64_t k = 0; k < width; ++k)
        taps.push_back(e.load(scratch, {e.index(k), e.index(0)}, lanes));
      Value start = bias ? e.load(bias, offset, lanes) : e.constant(0.0, lanes);
      for (int64_t k = 0; k + 1 < width; ++k)
        window.push_back(initial ? e.load(initial, {row, e.index(k), offset}, lanes)
                                 : e.constant(0.0, lanes));
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
      if (last)
        for (int64_t k = 0; k + 1 < width; ++k)
          e.store(window[k], last, {row, e.index(k), offset});
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
    if (last)
      results.push_back(last);
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
