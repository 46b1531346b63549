//===- SSD.cpp - GPU kernels of ssd ---------------------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// A block of threads walks the tokens of one head of one sequence, or of a
// slice of the head's channels. Lane (r, q) of a warp holds states of up to
// four neighbouring channels, by r, in registers: vectors of four states, the
// lanes of other q having those between. Per block of tokens:
//
//   1. rows of B and C go to shared memory of the block, the inputs times dt to
//      that of the warp that has their channels; every warp computes the decays
//      for itself, one lane a token;
//   2. the recurrence over the tokens;
//   3. partial sums over states meet by reduce-scatter, which returns an output
//      to the lane that holds its x and z.
//
// A state and token cost two fused multiply-adds rather than three products: as
// one decay is shared by all states, they are kept divided by the product of
// the decays since the start of the block, which its tokens' inputs are divided
// by and its outputs multiplied with. Where the decays of a block are too
// strong for that the plain recurrence is computed.
//
// Cut into chunks, the same kernel runs twice: once for the state at the end of
// each chunk (from zero) and the sum of its decays' exponents, and, after a
// kernel that carries states across chunks, once for the outputs.
//
//===----------------------------------------------------------------------===//

#include "GPULowering.h"
#include "corey/Conversion/SSMToGPU/SSMToGPU.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include <numeric>

using namespace mlir;
using namespace corey;
using namespace corey::ssm;

/// Decays of a block of tokens, as exponents of 2, that states may be divided
/// by: running sums up to here are exact enough in f32.
static constexpr double kMaxExponent = 20;
/// Tokens of a block.
static constexpr int64_t kSteps = 8;
/// Tokens up to which a scan is not for tensor cores, with their tiles of 64.
static constexpr int64_t kFewTokens = 16;
/// The axis of tokens of x, z and y, counted from the end.
static constexpr int64_t kTokenAxis = 3;

namespace {
/// How a kernel cuts its work.
struct SSDTiling {
  /// States of a lane come in vectors.
  static constexpr int64_t kVector = 4;

  int64_t steps, channelsPerLane, stateLanes, statesPerLane, warps, slices;

  SSDTiling(int64_t channels, int64_t states, int64_t steps) : steps(steps) {
    // Four channels of 16 states: enough work for what is loaded, and no more
    // than fits in registers.
    constexpr int64_t kChannels = 4, kStates = 16, kMaxWarps = 4;
    int64_t padded = llvm::PowerOf2Ceil(channels);
    channelsPerLane = std::min(kChannels, padded);
    stateLanes = std::min<int64_t>(
        llvm::PowerOf2Ceil(llvm::divideCeil(states, kStates)), 32);
    // No lanes for channels that are not there.
    while (stateLanes < 32 && stateLanes * kVector < states &&
           channelsPerWarp() > padded)
      stateLanes *= 2;
    statesPerLane = kVector * llvm::divideCeil(states, kVector * stateLanes);
    while (channelsPerLane > 1 &&
           channelsPerLane * statesPerLane > kChannels * kStates)
      channelsPerLane /= 2;
    int64_t all = llvm::divideCeil(channels, channelsPerWarp());
    slices = llvm::divideCeil(all, kMaxWarps);
    warps = llvm::divideCeil(all, slices);
  }
  int64_t paddedStates() const { return stateLanes * statesPerLane; }
  int64_t channelsPerWarp() const { return 32 / stateLanes * channelsPerLane; }
  int64_t channelsPerBlock() const { return warps * channelsPerWarp(); }
  int64_t threads() const { return warps * 32; }
  int64_t heldStates() const { return channelsPerLane * statesPerLane; }
  /// Tokens whose outputs are summed over lanes at a time: all of a block would
  /// take too many registers.
  int64_t groupSteps() const { return std::min<int64_t>(steps, 4); }
  /// Outputs of these tokens that lanes of the same channels sum, and how many
  /// of them a lane has in the end.
  int64_t items() const { return groupSteps() * channelsPerLane; }
  int64_t itemsPerLane() const {
    return std::max<int64_t>(items() / stateLanes, 1);
  }
  /// The same as neighbouring channels of so many tokens.
  int64_t run() const { return std::min(itemsPerLane(), channelsPerLane); }
  int64_t tokensPerGroup() const { return itemsPerLane() / run(); }
  int64_t tokensPerLane() const {
    return tokensPerGroup() * (steps / groupSteps());
  }
  /// From the first token of a lane to another of its tokens.
  int64_t tokenOffset(int64_t i) const {
    return i / tokensPerGroup() * groupSteps() + i % tokensPerGroup();
  }
  // Bytes of shared memory, of one of two.
  int64_t rowBytes() const { return 4 * paddedStates(); }
  int64_t tileBytes() const { return steps * rowBytes(); }
  int64_t inputBytes() const { return 4 * steps * channelsPerWarp(); }
  /// Blocks that should fit on a multiprocessor. More of them would have too
  /// few registers for a block of tokens.
  int64_t minBlocks(bool hasOutput) const {
    return (hasOutput ? 8 : 12) / warps;
  }
};

/// What a kernel computes of a scan.
enum class SSDPass {
  /// Everything.
  Whole,
  /// The state at the end of a chunk, from zero, and the sum of its exponents.
  States,
  /// The outputs of a chunk, from the state at its start.
  Outputs
};

/// The operands of a scan on the host; null where absent.
struct SSDOperands {
  Value chunk, chunkCount;
  /// f32, [sequences, chunks, H, P, N] and [sequences, chunks, H]: states at
  /// the ends of chunks, later at their starts, and the exponents of 2 that
  /// chunks decay by.
  Value chunkStates, chunkSums;
  Value y;
  StateBuffers states;
};

class SSDKernels {
public:
  SSDKernels(GPULowering &e, SSDOp op)
      : e(e), op(op),
        heads(cast<RankedTensorType>(op.getX().getType()).getDimSize(2)),
        channels(cast<RankedTensorType>(op.getX().getType()).getDimSize(3)),
        groups(cast<RankedTensorType>(op.getB().getType()).getDimSize(2)),
        states(cast<RankedTensorType>(op.getB().getType()).getDimSize(3)),
        // Of the sizes of x, which may be nowhere in memory.
        y(e.allocate(0)), sequences(e, y, e.buffer(op.getSeqStarts())) {
    // ssm-any-strides counts on it.
    e.OpBuffers::readByElement(op.getDecay() ? op.getDecay() : op.getDt());
  }

  LogicalResult emit() {
    FailureOr<Value> chunk = getDeviceChunk(e, op, sequences.length);
    if (failed(chunk))
      return failure();
    SSDOperands s;
    s.y = y;
    s.states = e.stateBuffers(op.getInitialStates(), op.getStateSlots());
    e.makeBuffers();
    bool isChunked = op.getChunkSize() || op.getScanChunkAttr();
    if (!isStep() && isForTensorCores(op) && fitsTensorCores(e.target, op)) {
      // What tiles would be mostly empty for.
      e.ifThen(
          e.cmp(arith::CmpIPredicate::sle, sequences.length,
                e.index(kFewTokens)),
          [&] { emitUnsplit(s); },
          [&] {
            emitSSDOnTensorCores(e, op, sequences, isChunked ? *chunk : Value(),
                                 s.y, s.states);
          });
    } else if (isStep() || !isChunked) {
      emitUnsplit(s);
    } else {
      s.chunk = *chunk;
      s.chunkCount = e.max(e.ceilDiv(sequences.length, s.chunk), e.index(1));
      e.ifThen(
          e.cmp(arith::CmpIPredicate::sle, s.chunkCount, e.index(1)),
          [&] { emitUnsplit(s); }, [&] { emitChunked(s); });
    }
    SmallVector<Value> results{s.y};
    if (s.states.last)
      results.push_back(s.states.last);
    e.replaceWith(results);
    return success();
  }

private:
  int64_t length() {
    return cast<RankedTensorType>(op.getX().getType()).getDimSize(1);
  }
  /// Whether all sequences are known to be of one token.
  bool isStep() { return !op.getSeqStarts() && length() == 1; }
  void emitUnsplit(const SSDOperands &s);
  void emitChunked(SSDOperands s);
  void emitScan(const SSDOperands &s, SSDPass pass);
  void emitCarry(const SSDOperands &s);

  GPULowering &e;
  SSDOp op;
  int64_t heads, channels, groups, states;
  Value y;
  DeviceSequences sequences;
};
} // namespace

void SSDKernels::emitUnsplit(const SSDOperands &s) {
  // Decode: a block of tokens would be computed for one.
  auto step = [&] { emitSSDStep(e, op, sequences, s.y, s.states); };
  auto scan = [&] { emitScan(s, SSDPass::Whole); };
  if (isStep())
    step();
  else if (!op.getSeqStarts() && ShapedType::isDynamic(length()))
    e.ifThen(e.cmp(arith::CmpIPredicate::eq, sequences.length, e.index(1)),
             step, scan);
  else
    scan();
}

void SSDKernels::emitChunked(SSDOperands s) {
  Type f32 = e.host.getF32Type();
  s.chunkStates = e.workspace({sequences.count, s.chunkCount, e.index(heads),
                               e.index(channels), e.index(states)},
                              f32);
  s.chunkSums =
      e.workspace({sequences.count, s.chunkCount, e.index(heads)}, f32);
  emitScan(s, SSDPass::States);
  emitCarry(s);
  emitScan(s, SSDPass::Outputs);
}

void SSDKernels::emitScan(const SSDOperands &s, SSDPass pass) {
  constexpr int64_t steps = kSteps;
  bool hasOutput = pass != SSDPass::States;
  bool isDecay = static_cast<bool>(op.getDecay());
  StringRef name = pass == SSDPass::States    ? "ssd_states"
                   : pass == SSDPass::Outputs ? "ssd_outputs"
                                              : "ssd";
  SSDTiling t(channels, states, steps);
  KernelBuilder k(e.host, e.loc, e.kernels, name,
                  {t.threads(), t.minBlocks(hasOutput)});
  k.startInOrder();
  InputStream x(e, k, op.getX());
  // Loaded one element at a time.
  InputStream dt(e, k, isDecay ? op.getDecay() : op.getDt());
  InputStream z(e, k, hasOutput ? op.getZ() : Value());
  DeviceTensor A(e, k, e.buffer(op.getA())), B(e, k, e.buffer(op.getB()));
  DeviceTensor bias(e, k, isDecay ? Value() : e.buffer(op.getDtBias()));
  DeviceTensor C, D, initial, last, chunkStates, chunkSums;
  OutputStream y;
  if (hasOutput) {
    C = DeviceTensor(e, k, e.buffer(op.getC()));
    D = DeviceTensor(e, k, e.buffer(op.getD()));
    y = OutputStream(e, k, s.y);
  }
  if (pass == SSDPass::Whole) {
    initial = DeviceTensor(e, k, s.states.initial, !s.states.isInPlace());
    last = DeviceTensor(e, k, s.states.last);
  } else {
    chunkStates = DeviceTensor(e, k, s.chunkStates);
    if (pass == SSDPass::States)
      chunkSums = DeviceTensor(e, k, s.chunkSums);
  }

  // Which head, which channels, which tokens.
  int64_t perSequence = heads * t.slices;
  Val lane = k.lane(), warp = k.warp();
  Val q = lane % t.stateLanes, r = lane / double(t.stateLanes);
  Val block = k.blockIdx('x');
  Val chunkIndex;
  if (pass != SSDPass::Whole) {
    chunkIndex = block / double(perSequence);
    block = block % perSequence;
  }
  Val head = block / double(t.slices);
  Val group = head / double(heads / groups);
  Val sequence = rowOfBlock(k);
  DeviceSlots slots(e, k, pass == SSDPass::Whole ? s.states : StateBuffers());
  auto walk = [&] {
    auto [batch, begin, tokens] = sequences.range(k, sequence);
    DeviceSlots::Place place = slots.of(k, sequence);
    slots.check(k, place);
    Val first = k.i32(0), length = tokens;
    if (pass != SSDPass::Whole) {
      // In 64 bits: chunks may be as long as they like.
      Val chunk = k.i64Argument(s.chunk);
      Val start = k.toI64(chunkIndex) * chunk;
      Val left = k.toI64(tokens) - start;
      first = k.toI32(k.min(start, k.toI64(tokens)));
      length = k.toI32(k.max(k.min(left, chunk), k.i64(0)));
    }
    Val lastRow = length - 1.0;
    Val batch64 = k.toI64(batch);
    Val row0 = k.toI64(begin) + k.toI64(first);

    // The lane's states: channels from `laneChannel`, by q.
    Val warpChannel = (block % t.slices) * double(t.channelsPerBlock()) +
                      warp * double(t.channelsPerWarp());
    Val laneChannel = warpChannel + r * double(t.channelsPerLane);
    constexpr int64_t kVector = SSDTiling::kVector;
    int64_t vectors = t.statesPerLane / kVector;
    auto stateOf = [&](int64_t v) {
      return q * double(kVector) + double(v * kVector * t.stateLanes);
    };
    /// The leading indices of the states of channel `j` of the lane, which may
    /// lie beyond the last.
    auto leading = [&](const DeviceTensor &tensor, int64_t j) {
      Val channel = k.min(laneChannel + double(j), k.i32(channels - 1));
      if (tensor.rank() == 5)
        return Vals{sequence, chunkIndex, head, channel};
      return Vals{place.row, head, channel};
    };
    auto loadStates = [&](const DeviceTensor &tensor, int64_t alignment) {
      int64_t width = std::gcd(alignment, kVector);
      Vals h;
      for (int64_t j = 0; j < t.channelsPerLane; ++j)
        for (int64_t v = 0; v < vectors; ++v)
          for (int64_t i = 0; i < kVector; i += width) {
            Val n = stateOf(v) + double(i);
            Val at = n;
            // States divide by the width: a vector is there or it is not.
            if (t.paddedStates() != states)
              at = k.min(n, k.i32(states - width));
            Vals values = k.unpack(k.load(tensor.at(leading(tensor, j), at),
                                          k.packedType(tensor.element, width)),
                                   tensor.element, width);
            for (Val value : values)
              h.push_back(t.paddedStates() == states
                              ? value
                              : k.select(n < double(states), value, k.f32(0)));
          }
      return h;
    };
    auto storeStates = [&](const DeviceTensor &tensor, ArrayRef<Val> h) {
      int64_t width = std::gcd(states, kVector);
      for (int64_t j = 0; j < t.channelsPerLane; ++j)
        k.ifThen(laneChannel + double(j) < double(channels), [&] {
          for (int64_t v = 0; v < vectors; ++v)
            for (int64_t i = 0; i < kVector; i += width) {
              Val n = stateOf(v) + double(i);
              auto write = [&] {
                k.store(k.pack(h.slice((j * vectors + v) * kVector + i, width),
                               tensor.element),
                        tensor.at(leading(tensor, j), n));
              };
              if (t.paddedStates() == states)
                write();
              else
                k.ifThen(n < double(states), write);
            }
        });
    };
    Vals state(t.heldStates(), k.f32(0));
    if (initial)
      state = slots.ifThere(k, place, [&] {
        return loadStates(
            initial, std::gcd(states, rowAlignment(op.getInitialStates())));
      });
    else if (pass == SSDPass::Outputs)
      state = loadStates(chunkStates, states);

    // What the lane prepares and finishes: `tokensPerLane` tokens of a block
    // from `ownToken`, a run of channels in pieces of `width`.
    Val item =
        (q % std::min(t.items(), t.stateLanes)) * double(t.itemsPerLane());
    Val ownToken = item / double(t.channelsPerLane);
    Val ownLocal = r * double(t.channelsPerLane) + item % t.channelsPerLane;
    Val ownChannel = warpChannel + ownLocal;
    // Some lanes repeat what others have.
    bool repeats = t.stateLanes > t.items();
    int64_t width = std::gcd(t.run(), channels);
    for (Value tensor : {Value(op.getX()), Value(op.getZ())})
      if (tensor)
        width = std::gcd(width, e.streamAlignment(tensor));
    width = std::gcd(width, e.outputAlignment(s.y));
    int64_t pieces = t.run() / width;
    SmallVector<Cursor> xRows, zRows, yRows;
    for (int64_t j = 0; j < pieces; ++j) {
      // Beyond the last channel others are read, and nothing is written.
      Val c = k.min(ownChannel + double(j * width), k.i32(channels - width));
      xRows.push_back(x.at({batch64, row0, head}, c));
      if (z)
        zRows.push_back(z.at({batch64, row0, head}, c));
      if (hasOutput)
        yRows.push_back(y.at({batch64, row0, head}, c));
    }
    // A lane computes the decay of one token.
    Val decayStep = lane % steps;
    Cursor dtRow = dt.at({batch64, row0}, head);
    Val rate = A ? A.loadScalar({}, head) * kLog2E : Val();
    Val shift = bias ? bias.loadScalar({}, head) : Val();
    Vals skip;
    for (int64_t j = 0; D && j < t.run(); ++j)
      skip.push_back(D.rank() == 1
                         ? D.loadScalar({}, head)
                         : D.loadScalar({head}, k.min(ownChannel + double(j),
                                                      k.i32(channels - 1))));

    // Pieces of rows of B and C that a thread brings to shared memory.
    int64_t piece = std::gcd(states, SSDTiling::kVector);
    for (Value tensor : {Value(op.getB()), Value(op.getC())})
      piece = std::gcd(piece, rowAlignment(tensor));
    int64_t perRow = states / piece, allPieces = steps * perRow;
    int64_t rounds = llvm::divideCeil(allPieces, t.threads());
    Val thread = k.threadIdx();
    auto pieceOf = [&](int64_t round) {
      return thread + double(round * t.threads());
    };
    // Two tiles of B and C, and of inputs of each warp: one is filled while the
    // other is read.
    int64_t stageBytes = (hasOutput ? 2 : 1) * t.tileBytes();
    Val stages = k.shared(2 * stageBytes);
    Val inputs = k.offset(k.shared(2 * t.warps * t.inputBytes()),
                          warp * double(2 * t.inputBytes()));
    if (t.paddedStates() != states) {
      // Padding stays zero: nothing else is written there.
      k.forLoop(thread, k.i32(2 * stageBytes / 4), t.threads(),
                [&](Val i) { k.store(k.f32(0), k.offset(stages, i * 4.0)); });
      k.syncBlock();
    }

    /// Loads what the tokens from `t0` need. Rows beyond the last are read as
    /// that.
    auto load = [&](Val t0) {
      auto rowOf = [&](Val step) { return k.min(t0 + step, lastRow); };
      Vals loaded = dt.load(dt.moved(dtRow, rowOf(decayStep)), 1);
      for (int64_t i = 0; i < t.tokensPerLane(); ++i) {
        Val row = rowOf(ownToken + double(t.tokenOffset(i)));
        for (int64_t j = 0; j < pieces; ++j) {
          llvm::append_range(loaded,
                             x.load(x.moved(xRows[j], row, kTokenAxis), width));
          if (z)
            llvm::append_range(
                loaded, z.load(z.moved(zRows[j], row, kTokenAxis), width));
        }
      }
      for (int64_t i = 0; i < rounds; ++i) {
        Val index = pieceOf(i);
        if (allPieces % t.threads())
          index = k.min(index, k.i32(allPieces - 1));
        Val row = row0 + k.toI64(rowOf(index / double(perRow)));
        Val n = (index % perRow) * double(piece);
        for (const DeviceTensor *tensor : {&B, &C})
          if (*tensor)
            loaded.push_back(k.load(tensor->at({batch64, row, group}, n),
                                    k.packedType(tensor->element, piece),
                                    true));
      }
      return loaded;
    };

    /// The tokens from `t0`. `next` is called where what comes next should be
    /// loaded.
    auto runBlock = [&](Val t0, ArrayRef<Val> loaded, Vals &h, Val &total,
                        llvm::function_ref<Vals()> next) {
      Val parity = (t0 / double(steps)) & 1;
      Val stage = k.offset(stages, parity * double(stageBytes));
      Val input = k.offset(inputs, parity * double(t.inputBytes()));
      auto take = [&](const InputStream &stream, int64_t count) {
        Vals values =
            stream.values(loaded.take_front(stream.numLoaded()), count);
        loaded = loaded.drop_front(stream.numLoaded());
        return values;
      };
      // 1. Decays, inputs, rows of B and C.
      SSDDecay own = ssdDecay(k, op, take(dt, 1)[0], rate, shift);
      Val step = own.step, exponent = own.exponent;
      // A token that is not there leaves the state as it is.
      Val there = t0 + decayStep < length;
      exponent = k.select(there, exponent, k.f32(0));
      step = k.select(there, step, k.f32(0));
      Val sum = exponent;
      for (int64_t delta = 1; delta < steps; delta *= 2)
        sum = k.select(decayStep >= double(delta),
                       sum + k.shuffleUp(sum, delta), sum);
      // False if there is a NaN.
      Val isMild = k.warpSum(k.abs(exponent), steps) <= kMaxExponent;
      Val inputScale = k.select(isMild, step * k.ex2(-sum), step);
      Val outputScale = k.select(isMild, k.ex2(sum), k.f32(1));
      if (pass == SSDPass::States)
        total = total + k.shuffleIndex(sum, k.i32(steps - 1));
      // What gates is unpacked when it is needed.
      SmallVector<Vals> xs, zs;
      for (int64_t i = 0; i < t.tokensPerLane(); ++i) {
        Vals values, gates;
        for (int64_t j = 0; j < pieces; ++j) {
          llvm::append_range(values, take(x, width));
          llvm::append_range(gates, loaded.take_front(z.numLoaded()));
          loaded = loaded.drop_front(z.numLoaded());
        }
        Val scale =
            k.shuffleIndex(inputScale, ownToken + double(t.tokenOffset(i)));
        Val isToken = t0 + ownToken + double(t.tokenOffset(i)) < length;
        Vals scaled;
        for (Val value : values)
          scaled.push_back(k.select(isToken, value * scale, k.f32(0)));
        auto store = [&] {
          k.store(k.vector(scaled),
                  k.offset(input, ((ownToken + double(t.tokenOffset(i))) *
                                       double(t.channelsPerWarp()) +
                                   ownLocal) *
                                      4.0));
        };
        if (repeats)
          k.ifThen(q < double(t.items()), store);
        else
          store();
        xs.push_back(values);
        zs.push_back(gates);
      }
      for (int64_t i = 0; i < rounds; ++i) {
        Val index = pieceOf(i);
        Vals rows[2];
        const DeviceTensor *tensors[] = {&B, &C};
        for (auto [m, tensor] : llvm::enumerate(tensors))
          if (*tensor) {
            rows[m] = k.unpack(loaded.front(), tensor->element, piece);
            loaded = loaded.drop_front();
          }
        auto store = [&] {
          Val at =
              k.offset(stage, (index / double(perRow)) * double(t.rowBytes()) +
                                  (index % perRow) * double(4 * piece));
          for (int64_t m = 0; m < 2; ++m)
            if (!rows[m].empty())
              k.store(k.vector(rows[m]), k.offset(at, m * t.tileBytes()));
        };
        if (allPieces % t.threads())
          k.ifThen(index < double(allPieces), store);
        else
          store();
      }
      Vals following = next();
      // Also the end of the tokens before the last, whose memory is next.
      k.syncBlock();

      // 2. The recurrence.
      Val stateRow = k.offset(stage, q * double(4 * kVector));
      Val inputRow = k.offset(input, r * double(4 * t.channelsPerLane));
      auto rowVector = [&](Val from, int64_t i, int64_t v) {
        int64_t at = i * t.rowBytes() + v * 4 * kVector * t.stateLanes;
        return k.unpack(
            k.load(k.offset(from, at), k.packedType(k.f32Type(), kVector)),
            k.f32Type(), kVector);
      };
      /// The next states, and the sums that are the lane's.
      auto recur = [&](bool isScaled) {
        Vals partial, sums, now(h);
        for (int64_t i = 0; i < steps; ++i) {
          Vals in =
              k.unpack(k.load(k.offset(inputRow, i * 4 * t.channelsPerWarp()),
                              k.packedType(k.f32Type(), t.channelsPerLane)),
                       k.f32Type(), t.channelsPerLane);
          Val decay;
          if (!isScaled)
            decay = k.ex2(k.shuffleIndex(exponent, k.i32(i)));
          Vals out(t.channelsPerLane);
          for (int64_t v = 0; v < vectors; ++v) {
            Vals b = rowVector(stateRow, i, v), c;
            if (hasOutput)
              c = rowVector(k.offset(stateRow, t.tileBytes()), i, v);
            for (int64_t n = 0; n < kVector; ++n)
              for (int64_t j = 0; j < t.channelsPerLane; ++j) {
                Val &s = now[j * t.statesPerLane + v * kVector + n];
                s = isScaled ? k.fma(in[j], b[n], s)
                             : k.fma(decay, s, in[j] * b[n]);
                if (hasOutput)
                  out[j] = out[j] ? k.fma(s, c[n], out[j]) : s * c[n];
              }
          }
          if (hasOutput)
            llvm::append_range(partial, out);
          if (hasOutput && (i + 1) % t.groupSteps() == 0) {
            llvm::append_range(sums, k.reduceScatter(partial, t.stateLanes, q));
            partial.clear();
          }
        }
        if (isScaled) {
          Val decay = k.shuffleIndex(outputScale, k.i32(steps - 1));
          for (Val &s : now)
            s = s * decay;
        }
        llvm::append_range(now, sums);
        return now;
      };
      Vals results = k.ifValues(
          isMild, [&] { return recur(true); }, [&] { return recur(false); });
      h.assign(results.begin(), results.begin() + h.size());
      if (!hasOutput)
        return following;

      // 3. The outputs of the lane's own tokens.
      Vals outputs(ArrayRef(results).drop_front(h.size()));
      for (int64_t i = 0; i < t.tokensPerLane(); ++i) {
        Val scale =
            k.shuffleIndex(outputScale, ownToken + double(t.tokenOffset(i)));
        Vals out, gates;
        for (int64_t j = 0; z && j < pieces; ++j)
          llvm::append_range(
              gates,
              z.values(ArrayRef(zs[i]).slice(j * z.numLoaded(), z.numLoaded()),
                       width));
        for (int64_t j = 0; j < t.run(); ++j) {
          Val value = outputs[i * t.run() + j] * scale;
          if (D)
            value = k.fma(skip[j], xs[i][j], value);
          if (z)
            value = value * k.silu(gates[j]);
          out.push_back(value);
        }
        Val row = t0 + ownToken + double(t.tokenOffset(i));
        for (int64_t j = 0; j < pieces; ++j) {
          Val writes = (row < length) &
                       (ownChannel + double(j * width) < double(channels));
          if (repeats)
            writes = writes & (q < double(t.items()));
          k.ifThen(writes, [&] {
            y.store(y.moved(yRows[j], row, kTokenAxis),
                    ArrayRef(out).slice(j * width, width));
          });
        }
      }
      return following;
    };

    bool hasTotal = pass == SSDPass::States;
    Vals carried(state);
    if (hasTotal)
      carried.push_back(k.f32(0));
    Vals end = k.ifValues(
        length > 0.0,
        [&]() -> Vals {
          Vals inits(carried);
          llvm::append_range(inits, load(k.i32(0)));
          Vals out = k.forLoop(
              k.i32(0), length, steps, inits,
              [&](Val t0, ArrayRef<Val> in) -> Vals {
                Vals h(in.take_front(state.size()));
                Val total = hasTotal ? in[state.size()] : Val();
                Vals next =
                    runBlock(t0, in.drop_front(carried.size()), h, total, [&] {
                      Val following = t0 + double(steps);
                      return k.loadIf(following < length,
                                      [&] { return load(following); });
                    });
                if (hasTotal)
                  h.push_back(total);
                llvm::append_range(h, next);
                return h;
              });
          out.resize(carried.size());
          return out;
        },
        [&]() -> Vals { return carried; });
    ArrayRef<Val> states = ArrayRef(end).take_front(state.size());
    if (last)
      k.ifThen(place.writes(k), [&] { storeStates(last, states); });
    if (hasTotal) {
      // A chunk that the sequence does not have is not read.
      storeStates(chunkStates, states);
      k.ifThen((thread == 0.0) & (block % t.slices == 0.0), [&] {
        k.store(end[state.size()], chunkSums.at({sequence, chunkIndex}, head));
      });
    }
  };
  k.ifThen(sequence < k.i32Argument(sequences.count), walk);
  Value blocks = e.index(perSequence);
  if (pass != SSDPass::Whole)
    blocks = e.mul(s.chunkCount, blocks);
  k.launch(e.gridOf(blocks, sequences.count));
}

/// One thread per state: the state at the end of every chunk becomes that at
/// its start, from the first chunk on.
void SSDKernels::emitCarry(const SSDOperands &s) {
  constexpr int64_t kThreads = 128, kAhead = 8;
  KernelBuilder k(e.host, e.loc, e.kernels, "ssd_carry", {kThreads, 0});
  DeviceTensor initial(e, k, s.states.initial, !s.states.isInPlace()),
      last(e, k, s.states.last);
  DeviceTensor chunkStates(e, k, s.chunkStates);
  DeviceTensor chunkSums(e, k, s.chunkSums);
  DeviceSlots slots(e, k, s.states);
  int64_t count = heads * channels * states;
  Val index = k.blockIdx('x') * double(kThreads) + k.threadIdx();
  Val sequence = rowOfBlock(k);
  Val active =
      (index < double(count)) & (sequence < k.i32Argument(sequences.count));
  k.ifThen(active, [&] {
    Val n = index % states, p = index / double(states) % channels;
    Val head = index / double(states * channels);
    auto range = sequences.range(k, sequence);
    Val chunk = k.i64Argument(s.chunk);
    // Those of this sequence: shorter ones have fewer.
    Val chunks = k.toI32((k.toI64(range.length) + chunk - 1.0) / chunk);
    DeviceSlots::Place place = slots.of(k, sequence);
    slots.check(k, place);
    Val h = k.f32(0);
    if (initial)
      h = slots.ifThere(k, place, [&]() -> Vals {
        return {initial.loadScalar({place.row, head, p}, n)};
      })[0];
    Val state = chunkStates.at({sequence, k.i32(0), head, p}, n);
    Val sum = chunkSums.at({sequence, k.i32(0)}, head);
    auto stateAt = [&](Val i) {
      return k.offset(state, k.toI64(i) * chunkStates.stride(1));
    };
    auto sumAt = [&](Val i) {
      return k.offset(sum, k.toI64(i) * chunkSums.stride(1));
    };
    // Several chunks are loaded before the first is needed.
    Vals end = k.forLoop(
        k.i32(0), chunks, kAhead, {h},
        [&](Val first, ArrayRef<Val> in) -> Vals {
          Vals values, sums;
          for (int64_t i = 0; i < kAhead; ++i) {
            Val at = k.min(first + double(i), chunks - 1.0);
            values.push_back(k.load(stateAt(at), k.f32Type()));
            sums.push_back(k.load(sumAt(at), k.f32Type(), true));
          }
          Val h = in[0];
          for (int64_t i = 0; i < kAhead; ++i) {
            Val there = first + double(i) < chunks;
            k.ifThen(there, [&] { k.store(h, stateAt(first + double(i))); });
            h = k.select(there, k.fma(k.ex2(sums[i]), h, values[i]), h);
          }
          return {h};
        });
    if (last)
      k.ifThen(place.writes(k), [&] {
        k.store(k.pack({end[0]}, last.element),
                last.at({place.row, head, p}, n));
      });
  });
  k.launch(
      e.gridOf(e.index(llvm::divideCeil(count, kThreads)), sequences.count));
}

namespace {
struct SSDLowering : public GPULoweringPattern<SSDOp> {
  using GPULoweringPattern::GPULoweringPattern;
  LogicalResult matchAndRewrite(SSDOp op,
                                PatternRewriter &rewriter) const override {
    GPULowering e(rewriter, op, target);
    return SSDKernels(e, op).emit();
  }
};
} // namespace

void corey::populateGPUSSDLowerings(RewritePatternSet &patterns,
                                    GPUTarget target) {
  patterns.add<SSDLowering>(patterns.getContext(), target);
}
