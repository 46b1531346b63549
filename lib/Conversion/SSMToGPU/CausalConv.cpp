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
// memory, another kernel has neighbouring threads work on neighbouring tokens
// of a channel: on as many as are loaded at once, several times over, so that a
// thread has as many bytes on their way as in the first kernel.
//
//===----------------------------------------------------------------------===//

#include "GPULowering.h"
#include <numeric>
#include <vector>

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
/// Runs of tokens of a thread where those are the neighbours, and tokens before
/// a run that are loaded with it.
static constexpr int64_t kRuns = 4, kBefore = 4;
/// Blocks whose registers suffice for that.
static constexpr int64_t kMinBlocksTokens = 5;

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
  void emitAlongChannels();
  /// For whole runs that lie together, or for any.
  void emitAlongTokens(bool areTogether);

  /// Where a thread works: tokens from `start` of a sequence on.
  struct Place {
    Val sequence, start;
    Val batch, begin, tokens;
  };
  /// `slot` counts runs of the grid's row or, packed, of all sequences.
  Place placeOf(KernelBuilder &k, Val slot, Val run) const;

  /// What the kernel reads and writes.
  struct Operands {
    Operands(CausalConvKernel &conv, KernelBuilder &k)
        : k(k), x(conv.e, k, conv.op.getX()), output(conv.e, k, conv.y),
          weight(conv.e, k, conv.e.buffer(conv.op.getWeight())),
          bias(conv.e, k, conv.e.buffer(conv.op.getBias())),
          initial(conv.e, k, conv.states.initial, !conv.states.isInPlace()),
          state(conv.e, k, conv.states.last), pool(conv.e, k, conv.states) {}
    KernelBuilder &k;
    InputStream x;
    OutputStream output;
    DeviceTensor weight, bias, initial, state;
    DeviceSlots pool;
  };
  /// A run of a thread: the first of its `count` channels, and whether it is
  /// one.
  struct Run {
    Place place;
    Val channel, active;
    DeviceSlots::Place home;
  };
  /// The values of an input before the first token of the sequence, `j`
  /// counting from the oldest.
  Vals older(const Operands &t, const Run &run, Val j);
  /// Taps of a channel after another, and what is added.
  std::pair<SmallVector<Vals>, Vals> loadTaps(const Operands &t, Val channel);
  /// Of the values of W tokens, channels innermost.
  Vals sumsOf(const Operands &t, const std::pair<SmallVector<Vals>, Vals> &taps,
              ArrayRef<Val> inputs);
  /// The state behind the last token is the first run's to write: it alone has
  /// read what may lie in the same memory.
  void writeState(const Operands &t, const Run &run);
  void replaceOp();

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

Vals CausalConvKernel::older(const Operands &t, const Run &run, Val j) {
  if (!t.initial)
    return Vals(count, t.k.f32(0));
  return DeviceSlots::ifThere(t.k, run.home, [&] {
    return t.initial.elements({run.home.row, j}, run.channel, count,
                              rowAlignment(op.getInitialState()));
  });
}

std::pair<SmallVector<Vals>, Vals> CausalConvKernel::loadTaps(const Operands &t,
                                                              Val channel) {
  SmallVector<Vals> taps;
  for (int64_t c = 0; c < count; ++c)
    taps.push_back(t.weight.elements({channel + double(c)}, t.k.i32(0), width,
                                     rowAlignment(op.getWeight())));
  Vals shift(count, t.k.f32(0));
  if (t.bias)
    shift = t.bias.elements({}, channel, count, rowAlignment(op.getBias()));
  return {taps, shift};
}

Vals CausalConvKernel::sumsOf(const Operands &t,
                              const std::pair<SmallVector<Vals>, Vals> &taps,
                              ArrayRef<Val> inputs) {
  Vals sums;
  for (int64_t c = 0; c < count; ++c) {
    Val sum = taps.second[c];
    for (int64_t j = 0; j < width; ++j)
      sum = t.k.fma(taps.first[c][j], inputs[j * count + c], sum);
    sums.push_back(op.getSilu() ? t.k.silu(sum) : sum);
  }
  return sums;
}

void CausalConvKernel::writeState(const Operands &t, const Run &run) {
  KernelBuilder &k = t.k;
  const Place &place = run.place;
  Val isFirst = run.active & (place.start == 0);
  if (t.state)
    k.ifThen(isFirst & run.home.writes(k), [&] {
      for (int64_t j = 0; j + 1 < width; ++j) {
        Val token = place.tokens - double(width - 1 - j);
        Vals values = k.ifValues(
            token >= 0,
            [&] {
              Cursor at = t.x.at({place.batch, place.begin + k.toI64(token)},
                                 run.channel);
              return t.x.values(t.x.load(at, count), count);
            },
            [&] { return older(t, run, place.tokens + double(j)); });
        k.store(k.pack(values, t.state.element),
                t.state.at({run.home.row, k.i32(j)}, run.channel));
      }
    });
  k.ifThen(isFirst, [&] { t.pool.check(k, run.home); });
}

void CausalConvKernel::replaceOp() {
  SmallVector<Value> results{y};
  if (states.last)
    results.push_back(states.last);
  e.replaceWith(results);
}

void CausalConvKernel::emitAlongChannels() {
  int64_t minBlocks = is32Bit ? kMinBlocks32 : kMinBlocks;
  KernelBuilder k(e.host, e.loc, e.kernels, "causal_conv",
                  {kThreads, minBlocks});
  Operands t(*this, k);
  int64_t pieces = channels / count;

  // Runs of a multiple of steps tokens.
  Value tokensOfAll =
      isPacked ? sequences.length : e.mul(sequences.count, sequences.length);
  Value wanted = e.ceilDiv(e.mul(tokensOfAll, pieces),
                           e.index(e.target.multiprocessors * minBlocks *
                                   kThreads * kWaves * steps));
  Value runLength =
      e.mul(e.min(e.max(wanted, e.index(1)), e.index(kMaxRun / steps)), steps);
  // A sequence without tokens still has a state.
  Value slots = e.max(e.ceilDiv(sequences.length, runLength), e.index(1));
  if (isPacked)
    slots = e.add(slots, sequences.count);
  Value blocks = e.ceilDiv(e.mul(slots, pieces), e.index(kThreads));

  Val tokens = k.i32Argument(runLength);
  Val thread = k.toI64(k.blockIdx('x')) * kThreads + k.toI64(k.threadIdx());
  Run run;
  run.channel = (thread % pieces) * double(count);
  run.place = placeOf(k, k.toI32(thread / double(pieces)), tokens);
  const Place &place = run.place;
  Val limit = k.toI64(k.max(place.tokens, k.i32(1)));
  run.active = (place.start >= 0) & (place.start < limit);
  if (!isPacked)
    run.active = run.active & (rowOfBlock(k) < k.i32Argument(sequences.count));

  // A token each is a step of decoding, which waits for memory more than for
  // anything else. To bring to the last cache what predecessors do not make is
  // no read: the states may be written to yet.
  bool isStep = !isPacked &&
                cast<RankedTensorType>(op.getX().getType()).getDimSize(1) == 1;
  if (isStep && e.target.chip.hasDependentLaunches) {
    k.launchDependents();
    k.prefetchL2(t.weight.at({run.channel}, k.i32(0)));
    if (t.bias)
      k.prefetchL2(t.bias.at({}, run.channel));
    if (t.initial && !states.slots)
      for (int64_t j = 0; j + 1 < width; ++j)
        k.prefetchL2(t.initial.at({place.sequence, k.i32(j)}, run.channel));
    k.waitForPredecessors();
  }
  run.home = t.pool.of(k, place.sequence);

  k.ifThen(run.active & (place.start < k.toI64(place.tokens)), [&] {
    Val start = k.toI32(place.start);
    Val todo = k.min(place.tokens - start, tokens);
    Val row = place.begin + place.start;
    Cursor from = t.x.at({place.batch, row}, run.channel);
    Cursor to = t.output.at({place.batch, row}, run.channel);

    // Tokens from t0 on; those beyond the run are its last again.
    auto load = [&](Val t0) {
      Vals loaded;
      for (int64_t i = 0; i < steps; ++i)
        llvm::append_range(
            loaded,
            t.x.load(t.x.moved(from, k.min(t0 + double(i), todo - 1)), count));
      return loaded;
    };
    // All that the first tokens need is asked for before any of it is used.
    Val isFirst = start == 0;
    SmallVector<Vals> before;
    for (int64_t j = 1 - width; j < 0; ++j)
      before.push_back(t.x.load(
          t.x.moved(from, k.select(isFirst, k.i32(0), k.i32(j))), count));
    Vals loaded = load(k.i32(0));
    auto taps = loadTaps(t, run.channel);

    Vals window;
    auto haloValues = [&] {
      Vals values;
      for (const Vals &raw : before)
        llvm::append_range(values, t.x.values(raw, count));
      return values;
    };
    if (t.initial)
      window = k.ifValues(
          isFirst,
          [&] {
            Vals values;
            for (int64_t j = 0; j + 1 < width; ++j)
              llvm::append_range(values, older(t, run, k.i32(j)));
            return values;
          },
          haloValues);
    else
      for (Val value : haloValues())
        window.push_back(k.select(isFirst, k.f32(0), value));

    auto finish = [&](ArrayRef<Val> inputs, Val at) {
      t.output.store(t.output.moved(to, at), sumsOf(t, taps, inputs));
    };
    auto inputsOf = [&](ArrayRef<Val> window, ArrayRef<Val> loaded,
                        int64_t steps) {
      Vals inputs(window);
      for (int64_t i = 0; i < steps; ++i)
        llvm::append_range(inputs, t.x.values(loaded.slice(i * t.x.numLoaded(),
                                                           t.x.numLoaded()),
                                              count));
      return inputs;
    };

    size_t kept = window.size();
    Val full = todo - (todo & (steps - 1));
    Vals carried(window);
    llvm::append_range(carried, loaded);
    Vals end = k.forLoop(
        k.i32(0), full, steps, carried, [&](Val t0, ArrayRef<Val> in) -> Vals {
          Vals next = load(t0 + double(steps));
          Vals inputs =
              inputsOf(in.take_front(kept), in.drop_front(kept), steps);
          for (int64_t i = 0; i < steps; ++i)
            finish(ArrayRef(inputs).slice(i * count, width * count),
                   t0 + double(i));
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
  writeState(t, run);
  Value rows = isPacked ? e.min(sequences.count, e.index(1)) : sequences.count;
  k.launch(e.gridOf(blocks, rows));
}

void CausalConvKernel::emit() {
  if (!isByElement) {
    emitAlongChannels();
    return replaceOp();
  }
  SmallVector<Value> memrefs{y};
  for (Value leaf : e.leavesOf(op.getX()))
    if (e.isReadByElement(leaf))
      memrefs.push_back(e.buffer(leaf));
  bool isDense =
      cast<MemRefType>(y.getType()).getStridesAndOffset().first.back() == 1;
  // Where sequences start nobody knows.
  if (isPacked || isDense) {
    emitAlongTokens(/*areTogether=*/false);
    return replaceOp();
  }
  Value rest = e.host.createOrFold<arith::RemUIOp>(e.loc, sequences.length,
                                                   e.index(steps));
  Value together = e.cmp(arith::CmpIPredicate::eq, rest, e.index(0));
  for (Value memref : memrefs)
    together = e.host.createOrFold<arith::AndIOp>(
        e.loc, together, e.haveRowsTogether(memref, /*axis=*/1, steps));
  // Before branches that use them.
  e.makeBuffers();
  e.ifThen(
      together, [&] { emitAlongTokens(/*areTogether=*/true); },
      [&] { emitAlongTokens(/*areTogether=*/false); });
  replaceOp();
}

void CausalConvKernel::emitAlongTokens(bool areTogether) {
  KernelBuilder k(e.host, e.loc, e.kernels,
                  areTogether ? "causal_conv_tokens" : "causal_conv_strided",
                  {kThreads, kMinBlocksTokens});
  Operands t(*this, k);
  // A sequence without tokens still has a state.
  Value slots = e.max(e.ceilDiv(sequences.length, e.index(steps)), e.index(1));
  if (isPacked)
    slots = e.add(slots, sequences.count);
  // A warp has neighbouring runs of one channel: as many for each of its lanes.
  constexpr int64_t kWarps = kThreads / 32;
  Value perChannel = e.ceilDiv(slots, e.index(32 * kRuns));
  Val warps = k.i32Argument(perChannel);
  Val warp = k.blockIdx('x') * double(kWarps) + k.warp();
  Val channel = warp / warps;
  Val firstSlot = (warp - channel * warps) * double(32 * kRuns) + k.lane();
  Val isChannel = channel < double(channels);
  if (!isPacked)
    isChannel = isChannel & (rowOfBlock(k) < k.i32Argument(sequences.count));
  channel = k.toI64(k.min(channel, k.i32(channels - 1)));

  // What all runs load before any of it is used, then the rest.
  struct Begun {
    Run run;
    Val start, todo, isFirst, works;
    Cursor to;
    Vals loaded;
  };
  std::vector<Begun> list(kRuns);
  size_t before = kBefore * t.x.numLoaded();
  // Of a first run, too, where that is no shorter.
  bool canLoadBefore = areTogether && steps >= kBefore;
  Cursor from, to;
  for (auto [i, b] : llvm::enumerate(list)) {
    Val slot = firstSlot + static_cast<double>(32 * i);
    b.run.channel = channel;
    b.run.place = placeOf(k, slot, k.i32(steps));
    const Place &place = b.run.place;
    b.run.active = isChannel & (slot < k.i32Argument(slots)) &
                   (place.start >= 0) &
                   (place.start < k.toI64(k.max(place.tokens, k.i32(1))));
    b.run.home = t.pool.of(k, place.sequence);
    b.works = b.run.active & (place.start < k.toI64(place.tokens));
    b.start = k.toI32(place.start);
    b.todo = k.min(place.tokens - b.start, k.i32(steps));
    b.isFirst = b.start == 0;
    if (i == 0) {
      from = t.x.at({place.batch, k.i64(0)}, channel);
      to = t.output.at({place.batch, k.i64(0)}, channel);
    }
    Val row = place.begin + place.start;
    Cursor own = t.x.moved(from, row);
    b.to = t.output.moved(to, row);
    b.loaded = k.loadIf(b.works, [&] {
      // Nothing lies before a sequence: its first tokens, which are not used.
      Vals loaded =
          t.x.loadRows(own, k.select(b.isFirst, k.i32(0), k.i32(-kBefore)),
                       b.todo, kBefore, canLoadBefore);
      llvm::append_range(
          loaded, t.x.loadRows(own, k.i32(0), b.todo, steps, areTogether));
      return loaded;
    });
  }
  auto taps = loadTaps(t, channel);
  for (Begun &b : list)
    k.ifThen(b.works, [&] {
      size_t each = t.x.numLoaded();
      auto valuesOf = [&](size_t from, size_t number) {
        Vals values;
        for (size_t i = from; i < from + number; ++i)
          values.push_back(
              t.x.values(ArrayRef(b.loaded).slice(i * each, each), 1)[0]);
        return values;
      };
      size_t halo = width - 1;
      Vals inputs;
      if (t.initial)
        inputs = k.ifValues(
            b.isFirst,
            [&] {
              Vals values;
              for (int64_t j = 0; j + 1 < width; ++j)
                values.push_back(older(t, b.run, k.i32(j))[0]);
              return values;
            },
            [&] { return valuesOf(kBefore - halo, halo); });
      else
        for (Val value : valuesOf(kBefore - halo, halo))
          inputs.push_back(k.select(b.isFirst, k.f32(0), value));
      llvm::append_range(inputs, valuesOf(before / each, steps));
      Vals results;
      for (int64_t i = 0; i < steps; ++i)
        results.push_back(sumsOf(t, taps, ArrayRef(inputs).slice(i, width))[0]);
      if (areTogether)
        return t.output.storeRows(b.to, k.i32(0), results, true);
      k.ifElse(
          b.todo == double(steps),
          [&] { t.output.storeRows(b.to, k.i32(0), results, false); },
          [&] {
            for (int64_t i = 0; i + 1 < steps; ++i)
              k.ifThen(b.todo > double(i), [&] {
                t.output.store(t.output.moved(b.to, k.i32(i)), {results[i]});
              });
          });
    });
  for (const Begun &b : list)
    writeState(t, b.run);
  Value rows = isPacked ? e.min(sequences.count, e.index(1)) : sequences.count;
  k.launch(
      e.gridOf(e.ceilDiv(e.mul(perChannel, channels), e.index(kWarps)), rows));
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
