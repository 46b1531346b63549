//===- CausalConv.cpp - GPU kernel of causal_conv -------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// A thread has a run of tokens of neighbouring channels, as many as are loaded
// at once; neighbouring threads have neighbouring channels, then further runs.
// It reads the W - 1 inputs before its run again, keeps the last inputs in
// registers, and loads the next tokens while it computes with the present ones.
//
// How long a run is the host decides. Short ones read more inputs twice, which
// the cache has; but what the device works on at a time then lies together in
// memory, as of a copy, where every long run is a stream of its own.
//
// Of an input of any strides, whose tokens are likely to be the neighbours in
// memory, a thread has a channel and as many tokens as are loaded at once, and
// neighbouring threads have neighbouring tokens.
//
//===----------------------------------------------------------------------===//

#include "GPULowering.h"
#include <numeric>

using namespace mlir;
using namespace corey;
using namespace corey::ssm;

static constexpr int64_t kThreads = 128;
/// Blocks of a multiprocessor at a time, by the registers that four channels a
/// thread need. Eight channels, in half the threads, keep as many bytes on
/// their way, but leave too few warps to compute meanwhile.
static constexpr int64_t kMinBlocks = 8, kMaxCount = 4;
/// Inputs of 32 bits take more.
static constexpr int64_t kMinBlocks32 = 6;
/// How often the threads that run at a time follow each other, if runs are not
/// bounded by `kMaxRun`.
static constexpr int64_t kWaves = 32;
/// Tokens that are loaded together, where sequences may be that long: as many
/// bytes of either width.
static constexpr int64_t kMaxSteps = 8, kMaxSteps32 = 4;
static constexpr int64_t kMaxRun = 32;

namespace {
class CausalConvKernel {
public:
  CausalConvKernel(GPULowering &e, CausalConvOp op)
      : e(e), op(op), y(e.allocateOutput(0)),
        states(e.stateBuffers(op.getInitialState(), op.getStateSlots())),
        sequences(e, y, e.buffer(op.getSeqStarts())),
        isPacked(static_cast<bool>(op.getSeqStarts())) {
    auto weight = cast<RankedTensorType>(op.getWeight().getType());
    channels = weight.getDimSize(0);
    width = weight.getDimSize(1);
    auto x = cast<RankedTensorType>(op.getX().getType());
    is32Bit = x.getElementTypeBitWidth() > 16;
    steps = is32Bit ? kMaxSteps32 : kMaxSteps;
    if (int64_t length = x.getDimSize(1);
        !ShapedType::isDynamic(length) && length < steps)
      steps = length > 1 ? llvm::bit_floor<uint64_t>(length) : 1;
    e.readByElement(op.getX());
    isByElement = llvm::any_of(e.leavesOf(op.getX()), [&](Value leaf) {
      return e.isReadByElement(leaf);
    });
    count = std::gcd(kMaxCount, std::gcd(e.streamAlignment(op.getX()),
                                         e.outputAlignment(y)));
    if (isByElement)
      count = 1;
    if (states.last)
      count = std::gcd(count, rowAlignment(op.getFinalState()));
  }

  void emit();

private:
  /// Where a thread works: tokens from `start` of a sequence on.
  struct Place {
    Val sequence, start;
    Val batch, begin, tokens;
  };
  /// `slot` counts runs of the grid's row or, packed, of all sequences.
  Place placeOf(KernelBuilder &k, Val slot, Val run) const;

  GPULowering &e;
  CausalConvOp op;
  Value y;
  StateBuffers states;
  DeviceSequences sequences;
  bool isPacked, is32Bit, isByElement = false;
  int64_t channels, width, count, steps;
};
} // namespace

CausalConvKernel::Place CausalConvKernel::placeOf(KernelBuilder &k, Val slot,
                                                  Val run) const {
  Val sequence = rowOfBlock(k), local = slot;
  if (isPacked) {
    // Sequence i has the slots from begin(i) / run + i on, rounded down: enough
    // for all of its tokens, and none of them another's. The last sequence that
    // starts at or before the slot has it.
    Val rounds = k.i32(32) - k.intrinsic("llvm.ctlz.i32", k.i32Type(),
                                         {k.i32Argument(sequences.count),
                                          k.boolean(false)});
    Val run64 = k.toI64(run);
    Vals found = k.forLoop(
        k.i32(0), rounds, 1, {k.i32(0), k.i32Argument(sequences.count)},
        [&](Val, ArrayRef<Val> in) -> Vals {
          Val middle = (in[0] + in[1]) >> 1;
          Val begin = k.toI64(sequences.range(k, middle).begin);
          Val isBefore = begin < (k.toI64(slot - middle) + 1) * run64;
          return {k.select(isBefore, middle, in[0]),
                  k.select(isBefore, in[1], middle)};
        });
    sequence = found[0];
    local = slot - sequence - sequences.range(k, sequence).begin / run;
  } else {
    // Rows beyond the last are read nowhere.
    sequence = k.min(sequence, k.i32Argument(sequences.count) - 1);
  }
  auto [batch, begin, tokens] = sequences.range(k, sequence);
  return {sequence, k.toI64(local) * k.toI64(run), k.toI64(batch),
          k.toI64(begin), tokens};
}

void CausalConvKernel::emit() {
  int64_t minBlocks = is32Bit ? kMinBlocks32 : kMinBlocks;
  KernelBuilder k(e.host, e.loc, e.kernels, "causal_conv",
                  {kThreads, minBlocks});
  InputStream x(e, k, op.getX());
  OutputStream output(e, k, y);
  DeviceTensor weight(e, k, e.buffer(op.getWeight()));
  DeviceTensor bias(e, k, e.buffer(op.getBias()));
  DeviceTensor initial(e, k, states.initial, !states.isInPlace()),
      state(e, k, states.last);
  DeviceSlots pool(e, k, states);
  int64_t pieces = channels / count;

  // Runs of a multiple of steps tokens.
  Value tokensOfAll =
      isPacked ? sequences.length : e.mul(sequences.count, sequences.length);
  Value wanted = e.ceilDiv(e.mul(tokensOfAll, pieces),
                           e.index(e.target.multiprocessors * minBlocks *
                                   kThreads * kWaves * steps));
  Value runLength =
      e.mul(e.min(e.max(wanted, e.index(1)), e.index(kMaxRun / steps)), steps);
  if (isByElement)
    runLength = e.index(steps);
  // A sequence without tokens still has a state.
  Value slots = e.max(e.ceilDiv(sequences.length, runLength), e.index(1));
  if (isPacked)
    slots = e.add(slots, sequences.count);
  Value blocks = e.ceilDiv(e.mul(slots, pieces), e.index(kThreads));

  Val run = k.i32Argument(runLength);
  Val thread = k.toI64(k.blockIdx('x')) * kThreads + k.toI64(k.threadIdx());
  Val slot, channel;
  if (isByElement) {
    Val perChannel = k.i64Argument(slots), piece = thread / perChannel;
    slot = k.toI32(thread - piece * perChannel);
    channel = k.min(piece, k.i64(pieces - 1));
  } else {
    slot = k.toI32(thread / double(pieces));
    channel = (thread % pieces) * double(count);
  }
  Place place = placeOf(k, slot, run);
  Val limit = k.toI64(k.max(place.tokens, k.i32(1)));
  Val active = (place.start >= 0) & (place.start < limit);
  if (isByElement)
    active = active & (thread < k.i64Argument(slots) * double(pieces));
  if (!isPacked)
    active = active & (rowOfBlock(k) < k.i32Argument(sequences.count));

  // A token each is a step of decoding, which waits for memory more than for
  // anything else. To bring to the last cache what predecessors do not make is
  // no read: the states may be written to yet.
  bool isStep = !isPacked &&
                cast<RankedTensorType>(op.getX().getType()).getDimSize(1) == 1;
  if (isStep && e.target.chip.hasDependentLaunches) {
    k.launchDependents();
    k.prefetchL2(weight.at({channel}, k.i32(0)));
    if (bias)
      k.prefetchL2(bias.at({}, channel));
    if (initial && !states.slots)
      for (int64_t j = 0; j + 1 < width; ++j)
        k.prefetchL2(initial.at({place.sequence, k.i32(j)}, channel));
    k.waitForPredecessors();
  }

  // The value of an input before the first token of the sequence, `j` counting
  // from the oldest.
  DeviceSlots::Place home = pool.of(k, place.sequence);
  auto older = [&](Val j) {
    if (!initial)
      return Vals(count, k.f32(0));
    return DeviceSlots::ifThere(k, home, [&] {
      return initial.elements({home.row, j}, channel, count,
                              rowAlignment(op.getInitialState()));
    });
  };

  k.ifThen(active & (place.start < k.toI64(place.tokens)), [&] {
    Val start = k.toI32(place.start);
    Val todo = k.min(place.tokens - start, run);
    Val row = place.begin + place.start;
    Cursor from = x.at({place.batch, row}, channel);
    Cursor to = output.at({place.batch, row}, channel);

    // Tokens from t0 on; those beyond the run are its last again.
    auto load = [&](Val t0) {
      if (isByElement)
        return x.loadRows(from, t0, todo, steps);
      Vals loaded;
      for (int64_t i = 0; i < steps; ++i)
        llvm::append_range(
            loaded,
            x.load(x.moved(from, k.min(t0 + double(i), todo - 1)), count));
      return loaded;
    };
    // All that the first tokens need is asked for before any of it is used.
    Val isFirst = start == 0;
    SmallVector<Vals> before;
    for (int64_t j = 1 - width; j < 0; ++j)
      before.push_back(
          x.load(x.moved(from, k.select(isFirst, k.i32(0), k.i32(j))), count));
    Vals loaded = load(k.i32(0));
    SmallVector<Vals> taps;
    for (int64_t c = 0; c < count; ++c)
      taps.push_back(weight.elements({channel + double(c)}, k.i32(0), width,
                                     rowAlignment(op.getWeight())));
    Vals shift(count, k.f32(0));
    if (bias)
      shift = bias.elements({}, channel, count, rowAlignment(op.getBias()));

    Vals window;
    auto haloValues = [&] {
      Vals values;
      for (const Vals &raw : before)
        llvm::append_range(values, x.values(raw, count));
      return values;
    };
    if (initial)
      window = k.ifValues(
          isFirst,
          [&] {
            Vals values;
            for (int64_t j = 0; j + 1 < width; ++j)
              llvm::append_range(values, older(k.i32(j)));
            return values;
          },
          haloValues);
    else
      for (Val value : haloValues())
        window.push_back(k.select(isFirst, k.f32(0), value));

    // Of the values of W tokens, channels innermost.
    auto sumsOf = [&](ArrayRef<Val> inputs) {
      Vals sums;
      for (int64_t c = 0; c < count; ++c) {
        Val sum = shift[c];
        for (int64_t j = 0; j < width; ++j)
          sum = k.fma(taps[c][j], inputs[j * count + c], sum);
        sums.push_back(op.getSilu() ? k.silu(sum) : sum);
      }
      return sums;
    };
    auto finish = [&](ArrayRef<Val> inputs, Val t) {
      output.store(output.moved(to, t), sumsOf(inputs));
    };
    auto inputsOf = [&](ArrayRef<Val> window, ArrayRef<Val> loaded,
                        int64_t steps) {
      Vals inputs(window);
      for (int64_t i = 0; i < steps; ++i)
        llvm::append_range(
            inputs,
            x.values(loaded.slice(i * x.numLoaded(), x.numLoaded()), count));
      return inputs;
    };

    size_t kept = window.size();
    Val full = todo - (todo & (steps - 1));
    Vals carried(window);
    llvm::append_range(carried, loaded);
    Vals end = k.forLoop(
        k.i32(0), full, steps, carried, [&](Val t0, ArrayRef<Val> in) -> Vals {
          Val following = t0 + double(steps);
          // A run is no longer than this.
          Vals next = isByElement ? Vals(in.drop_front(kept)) : load(following);
          Vals inputs =
              inputsOf(in.take_front(kept), in.drop_front(kept), steps);
          Vals results;
          for (int64_t i = 0; i < steps; ++i) {
            ArrayRef<Val> own =
                ArrayRef(inputs).slice(i * count, width * count);
            if (isByElement)
              llvm::append_range(results, sumsOf(own));
            else
              finish(own, t0 + double(i));
          }
          if (isByElement)
            output.storeRows(to, t0, results);
          Vals yielded(ArrayRef(inputs).take_back(kept));
          llvm::append_range(yielded, next);
          return yielded;
        });
    k.ifThen(full < todo, [&] {
      Vals inputs = inputsOf(ArrayRef(end).take_front(kept),
                             ArrayRef(end).drop_front(kept), steps - 1);
      for (int64_t i = 0; i + 1 < steps; ++i)
        k.ifThen(full + double(i) < todo, [&] {
          finish(ArrayRef(inputs).slice(i * count, width * count),
                 full + double(i));
        });
    });
  });

  // The state behind the last token is the first run's to write: it alone has
  // read what may lie in the same memory.
  if (state)
    k.ifThen(active & (place.start == 0) & home.writes(k), [&] {
      for (int64_t j = 0; j + 1 < width; ++j) {
        Val token = place.tokens - double(width - 1 - j);
        Vals values = k.ifValues(
            token >= 0,
            [&] {
              Cursor at =
                  x.at({place.batch, place.begin + k.toI64(token)}, channel);
              return x.values(x.load(at, count), count);
            },
            [&] { return older(place.tokens + double(j)); });
        k.store(k.pack(values, state.element),
                state.at({home.row, k.i32(j)}, channel));
      }
    });
  k.ifThen(active & (place.start == 0), [&] { pool.check(k, home); });
  Value rows = isPacked ? e.min(sequences.count, e.index(1)) : sequences.count;
  k.launch(e.gridOf(blocks, rows));
  SmallVector<Value> results{y};
  if (states.last)
    results.push_back(states.last);
  e.replaceWith(results);
}

namespace {
struct CausalConvLowering : public GPULoweringPattern<CausalConvOp> {
  using GPULoweringPattern::GPULoweringPattern;
  LogicalResult matchAndRewrite(CausalConvOp op,
                                PatternRewriter &rewriter) const override {
    GPULowering e(rewriter, op, target);
    CausalConvKernel(e, op).emit();
    return success();
  }
};
} // namespace

void corey::populateGPUConvLowerings(RewritePatternSet &patterns,
                                     GPUTarget target) {
  patterns.add<CausalConvLowering>(patterns.getContext(), target);
}
