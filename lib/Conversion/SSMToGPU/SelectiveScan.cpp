//===- SelectiveScan.cpp - GPU kernels of selective_scan ------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// Two kernels, for many channels and for few.
//
// The warp-autonomous kernel. Lanes of a warp split the states of a channel:
// lane (r, q) of the 32 / G rows of G lanes owns `statesPerLane` states of one
// or two neighbouring channels. A warp walks its tokens in blocks of eight and
// needs no barrier of its thread block:
//
//   1. every lane prepares a share of the block's (token, channel) pairs, dt
//      and dt u, in shared memory of the warp, and rows of B and C;
//   2. the recurrence over the eight tokens, all states in registers, one
//      exponential and two fused multiply-adds each;
//   3. partial sums over states meet by reduce-scatter, which returns the
//      output of a pair to the lane that holds its u and z.
//
// What the next block needs is loaded before the second step.
//
// Cut into chunks, the same kernel runs twice: once for the state at the end of
// each chunk (from zero) and the sum of its dt, and, after a kernel that
// carries states across chunks, once for the outputs.
//
//===----------------------------------------------------------------------===//

#include "GPULowering.h"
#include "corey/Conversion/SSMToGPU/SSMToGPU.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include <functional>

using namespace mlir;
using namespace corey;
using namespace corey::ssm;

namespace {
/// How the warp-autonomous kernel cuts its work.
struct WarpTiling {
  /// Tokens of a block.
  static constexpr int64_t kSteps = 8;

  int64_t statesPerLane, lanes, channelsPerLane, warps;

  WarpTiling(int64_t states, int64_t channelsPerLane)
      : channelsPerLane(channelsPerLane) {
    lanes =
        std::min<int64_t>(llvm::PowerOf2Ceil(llvm::divideCeil(states, 4)), 32);
    statesPerLane = llvm::divideCeil(states, lanes);
    warps = 4;
    while (warps > 1 && warps * sharedBytes() > (48 << 10))
      warps /= 2;
  }
  int64_t paddedStates() const { return statesPerLane * lanes; }
  int64_t rows() const { return 32 / lanes; }
  int64_t channels() const { return rows() * channelsPerLane; }
  /// Blocks that registers are to be had for: for five, with a quarter more
  /// warps to hide latency, some would spill, and that costs more. For three
  /// where a lane has many pairs.
  int64_t minBlocks() const { return stepsPerLane() > 2 ? 3 : 4; }
  /// Tokens of a block that a lane prepares and finishes.
  int64_t stepsPerLane() const { return std::max<int64_t>(kSteps / lanes, 1); }
  /// dt and dt u of a channel, padded so that rows fall into other banks.
  int64_t pairRow() const { return 2 * kSteps + 4; }
  int64_t pairFloats() const { return channels() * pairRow(); }
  int64_t stateFloats() const { return kSteps * paddedStates(); }
  /// Shared memory of a warp: two of everything, so that one is filled while
  /// the other is read.
  int64_t sharedBytes() const {
    return 2 * 4 * (pairFloats() + 2 * stateFloats());
  }
};

/// How the state-split kernel cuts its work.
struct SplitTiling {
  /// Tokens whose data a scan lane holds at a time.
  static constexpr int64_t kSteps = 8;
  /// Tiles in shared memory: one that is read, two ahead.
  static constexpr int64_t kRing = 3;

  /// States of a lane, lanes of a channel, channels and tokens of a tile.
  int64_t statesPerLane, lanes, channels, tokens;

  SplitTiling(int64_t states, int64_t statesPerLane, int64_t channels,
              int64_t tokens)
      : statesPerLane(statesPerLane),
        lanes(llvm::PowerOf2Ceil(llvm::divideCeil(states, statesPerLane))),
        channels(channels), tokens(tokens) {}

  int64_t paddedStates() const { return statesPerLane * lanes; }
  int64_t channelsPerWarp() const { return 32 / lanes; }
  int64_t scanWarps() const { return channels / channelsPerWarp(); }
  /// An auxiliary lane has two channels and two tokens of every tile.
  int64_t auxWarps() const { return tokens * channels / 128; }
  int64_t auxThreads() const { return auxWarps() * 32; }
  int64_t threads() const { return (scanWarps() + auxWarps()) * 32; }
  /// Lanes of an auxiliary warp that share a pair of channels.
  int64_t lanesPerPair() const { return 64 / channels; }
  // Words; rows are padded to fall into other banks.
  int64_t pairRow() const { return 2 * tokens + 8; }
  int64_t pairWords() const { return channels * pairRow(); }
  int64_t partialRow() const { return tokens + 4; }
  int64_t partialChannel() const {
    return lanes * partialRow() + (lanesPerPair() == 8 ? 8 : 4);
  }
  int64_t partialWords() const { return channels * partialChannel(); }
};

/// The variants with states on more lanes, in the order of their numbers.
constexpr ScanVariant kSplitVariants[] = {
    ScanVariant::Split, ScanVariant::SplitShort, ScanVariant::SplitNarrow};
constexpr int64_t kMaxSplitStates = 64;
/// Tokens of B and C that are loaded at once where those are the neighbours.
constexpr int64_t kRowTokens = 4;

/// States of a lane, channels of a block and tokens of a tile; `SplitNarrow`
/// has twice the lanes for a channel and half the channels of a block.
SplitTiling splitTiling(int64_t states, ScanVariant variant) {
  int64_t statesPerLane =
      states > 8 ? llvm::PowerOf2Ceil(llvm::divideCeil(states, 8)) : 1;
  if (variant == ScanVariant::SplitNarrow)
    statesPerLane = std::max<int64_t>(statesPerLane / 2, 1);
  SplitTiling t(states, statesPerLane, 8,
                variant == ScanVariant::SplitShort ? 32 : 64);
  t.channels = std::clamp<int64_t>(4 * t.channelsPerWarp(), 8, 32);
  return t;
}

/// How rows of B and C of one type lie in shared memory, by state, so that a
/// lane reads the tokens of its states in vectors.
struct StateLayout {
  /// Values of a word: two states of a token, two tokens of a state, or one
  /// f32.
  enum Kind { StatePair, TokenPair, Single } kind;
  /// Words of a row, padded; rows of the tile.
  int64_t row, rows;

  StateLayout(Type element, const SplitTiling &t) {
    kind = element.isF32()       ? Single
           : t.statesPerLane > 1 ? StatePair
                                 : TokenPair;
    row = (kind == TokenPair ? t.tokens / 2 : t.tokens) + 4;
    rows = kind == StatePair ? t.paddedStates() / 2 : t.paddedStates();
  }
  int64_t words() const { return row * rows; }
  /// Words of eight tokens of a row.
  int64_t wordsPerGroup() const {
    return kind == TokenPair ? SplitTiling::kSteps / 2 : SplitTiling::kSteps;
  }
  /// Rows of a lane.
  int64_t rowsPerLane(const SplitTiling &t) const {
    return kind == StatePair ? t.statesPerLane / 2 : t.statesPerLane;
  }
};

/// What a kernel computes of a scan.
enum class ScanPass {
  /// Everything.
  Whole,
  /// The state at the end of a chunk, from zero, and the sum of its dt.
  States,
  /// The outputs of a chunk, from the state at its start.
  Outputs
};

/// Whether neighbours on the last axis are known to be neighbours in memory.
bool isDense(Value memref) {
  return cast<MemRefType>(memref.getType())
             .getStridesAndOffset()
             .first.back() == 1;
}

/// The operands of a scan on the host; null where absent.
struct ScanOperands {
  Value chunk, chunkCount;
  /// Whether tensors that are not dense have tokens as neighbours: those of a
  /// lane are loaded and stored together.
  bool areTokensTogether = false;
  /// f32, [sequences, chunks, D, N] and [sequences, chunks, D]: states at the
  /// ends of chunks, later at their starts, and sums of dt.
  Value chunkStates, chunkSteps;
  Value y;
  StateBuffers states;
};

/// Writes `count` states from `n` of a token to a tile at `to`.
void storeStates(KernelBuilder &k, const StateLayout &layout, Type element,
                 int64_t count, Val packed, Val token, Val n, Val to) {
  auto at = [&](Val row, Val word, int64_t bytes) {
    return k.offset(to, row * double(4 * layout.row) + word * double(bytes));
  };
  switch (layout.kind) {
  case StateLayout::Single: {
    Vals values = k.unpack(packed, element, count);
    for (int64_t i = 0; i < count; ++i)
      k.store(values[i], at(n + double(i), token, 4));
    return;
  }
  case StateLayout::StatePair:
    if (count == 1) {
      // The half of a word.
      k.store(packed, k.offset(at(n / 2.0, token, 4), (n & 1) * 2.0));
      return;
    }
    for (int64_t i = 0; i < count; i += 2)
      k.store(count == 2 ? packed : k.extract(packed, i / 2),
              at(n / 2.0 + double(i / 2), token, 4));
    return;
  case StateLayout::TokenPair:
    for (int64_t i = 0; i < count; ++i) {
      Val half = packed;
      if (count > 1) {
        Val word = count == 2 ? packed : k.extract(packed, i / 2);
        half = k.wrap(arith::TruncIOp::create(
            k.b, k.loc, k.i16Type(), (i % 2 ? word >> 16 : word).value));
      }
      k.store(half, at(n + double(i), token, 2));
    }
    return;
  }
}

class SelectiveScanKernels {
public:
  SelectiveScanKernels(GPULowering &e, SelectiveScanOp op)
      : e(e), op(op),
        channels(cast<RankedTensorType>(op.getU().getType()).getDimSize(2)),
        states(cast<RankedTensorType>(op.getA().getType()).getDimSize(1)),
        groups(cast<RankedTensorType>(op.getB().getType()).getDimSize(2)),
        // Of the sizes of u, which may be nowhere in memory.
        y(e.allocateOutput(0)), sequences(e, y, e.buffer(op.getSeqStarts())) {
    for (Value tensor : {Value(op.getU()), Value(op.getDelta()),
                         Value(op.getZ()), Value(op.getB()), Value(op.getC())})
      e.readByElement(tensor);
  }

  LogicalResult emit() {
    FailureOr<Value> chunk = getDeviceChunk(e, op, sequences.length);
    if (failed(chunk))
      return failure();
    ScanOperands s;
    s.y = y;
    s.states = e.stateBuffers(op.getInitialState(), op.getStateSlots());
    e.makeBuffers();
    // Packed sequences and long ones are never a token each.
    int64_t length = cast<RankedTensorType>(op.getU().getType()).getDimSize(1);
    bool canStep =
        !op.getSeqStarts() && (length == 1 || ShapedType::isDynamic(length));
    auto step = [&] { emitSelectiveScanStep(e, op, sequences, y, s.states); };
    if (length == 1 && canStep)
      step();
    else if (canStep)
      e.ifThen(e.cmp(arith::CmpIPredicate::eq, sequences.length, e.index(1)),
               step, [&] { emitTokens(s, *chunk); });
    else
      emitTokens(s, *chunk);
    SmallVector<Value> results{s.y};
    if (s.states.last)
      results.push_back(s.states.last);
    e.replaceWith(results);
    return success();
  }

private:
  /// Whether two neighbouring channels can be loaded and stored together.
  bool hasPairs(const ScanOperands &s);
  /// Whether B and C have kRowTokens tokens as neighbours.
  bool areRowsTogether(const ScanOperands &s) {
    return s.areTokensTogether && e.isReadByElement(op.getB()) &&
           e.isReadByElement(op.getC());
  }
  WarpTiling warpTiling(const ScanOperands &s) {
    return WarpTiling(states, hasPairs(s) ? 2 : 1);
  }
  void emitTokens(ScanOperands &s, Value chunk);
  void emitUnsplit(const ScanOperands &s);
  /// Calls `emit` for the kernels of tensors as they may lie, where one that
  /// has `own` tokens of a channel to a lane could have them together.
  void emitByLayout(const ScanOperands &s, int64_t own,
                    llvm::function_ref<void(const ScanOperands &)> emit);
  void emitWarpKernel(const ScanOperands &s, ScanPass pass);
  void emitSplitKernel(const ScanOperands &s, const SplitTiling &t);
  void emitCarryKernel(const ScanOperands &s);

  GPULowering &e;
  SelectiveScanOp op;
  int64_t channels, states, groups;
  Value y;
  DeviceSequences sequences;
};
} // namespace

bool SelectiveScanKernels::hasPairs(const ScanOperands &s) {
  int64_t alignment = std::gcd(channels / groups, e.outputAlignment(s.y));
  for (Value tensor :
       {Value(op.getU()), Value(op.getDelta()), Value(op.getZ())})
    if (tensor)
      alignment = std::gcd(alignment, e.streamAlignment(tensor));
  return alignment % 2 == 0;
}

void SelectiveScanKernels::emitByLayout(
    const ScanOperands &s, int64_t own,
    llvm::function_ref<void(const ScanOperands &)> emit) {
  SmallVector<Value> memrefs;
  int64_t tokens = own;
  for (Value tensor :
       {Value(op.getU()), Value(op.getDelta()), Value(op.getZ())})
    for (Value leaf : e.leavesOf(tensor))
      if (e.isReadByElement(leaf))
        memrefs.push_back(e.buffer(leaf));
  if (!isDense(s.y))
    memrefs.push_back(s.y);
  SmallVector<Value> rows;
  if (e.isReadByElement(op.getB()) && e.isReadByElement(op.getC())) {
    rows = {e.buffer(op.getB()), e.buffer(op.getC())};
    tokens = std::max(tokens, kRowTokens);
  }
  // Where sequences start nobody knows.
  if ((memrefs.empty() && rows.empty()) || op.getSeqStarts() || tokens < 2)
    return emit(s);
  auto isMultiple = [&](Value number) {
    Value rest =
        e.host.createOrFold<arith::AndIOp>(e.loc, number, e.index(tokens - 1));
    return e.cmp(arith::CmpIPredicate::eq, rest, e.index(0));
  };
  Value together = isMultiple(sequences.length);
  if (s.chunkStates)
    together = e.host.createOrFold<arith::AndIOp>(e.loc, together,
                                                  isMultiple(s.chunk));
  auto require = [&](Value memref, int64_t run) {
    together = e.host.createOrFold<arith::AndIOp>(
        e.loc, together, e.haveRowsTogether(memref, /*axis=*/1, run));
  };
  for (Value memref : memrefs)
    require(memref, own);
  for (Value memref : rows)
    require(memref, kRowTokens);
  ScanOperands with = s;
  with.areTokensTogether = true;
  e.ifThen(together, [&] { emit(with); }, [&] { emit(s); });
}

/// Any number of tokens, whole or in chunks.
void SelectiveScanKernels::emitTokens(ScanOperands &s, Value chunk) {
  s.chunk = chunk;
  s.chunkCount = e.max(e.ceilDiv(sequences.length, s.chunk), e.index(1));
  Value unsplit = e.cmp(arith::CmpIPredicate::sle, s.chunkCount, e.index(1));
  e.ifThen(
      unsplit, [&] { emitUnsplit(s); },
      [&] {
        s.chunkStates = e.workspace(
            {sequences.count, s.chunkCount, e.index(channels), e.index(states)},
            e.host.getF32Type());
        s.chunkSteps =
            e.workspace({sequences.count, s.chunkCount, e.index(channels)},
                        e.host.getF32Type());
        int64_t tokens = warpTiling(s).stepsPerLane();
        emitByLayout(s, tokens, [&](const ScanOperands &s) {
          emitWarpKernel(s, ScanPass::States);
          emitCarryKernel(s);
          emitWarpKernel(s, ScanPass::Outputs);
        });
      });
}

/// One kernel over whole sequences: the one that was bound with the chunk, or
/// that of a rule from measurements on one chip, by channels per
/// multiprocessor.
void SelectiveScanKernels::emitUnsplit(const ScanOperands &s) {
  // Below: few channels a multiprocessor, where the latency of a step counts.
  constexpr int64_t kWarpChannels = 64, kNarrowChannels = 8;
  // Where filling the ring of tiles is most of the time.
  constexpr int64_t kShortLength = 128;
  // Rows of many states leave no registers for long tiles.
  constexpr int64_t kLongRowBits = 512;
  bool isLong =
      states *
          getElementTypeOrSelf(op.getB().getType()).getIntOrFloatBitWidth() >
      kLongRowBits;
  bool canSplit = hasPairs(s) && states <= kMaxSplitStates;
  auto emitWarp = [&] {
    emitByLayout(s, warpTiling(s).stepsPerLane(), [&](const ScanOperands &s) {
      emitWarpKernel(s, ScanPass::Whole);
    });
  };
  if (!canSplit)
    return emitWarp();
  auto constant = [&](int64_t value) { return e.index(value); };
  using Predicate = arith::CmpIPredicate;
  auto pick = [&](Value condition, ScanVariant then, Value otherwise) {
    return e.host.createOrFold<arith::SelectOp>(
        e.loc, condition, constant(static_cast<int64_t>(then)), otherwise);
  };
  Value work = e.mul(sequences.count, channels);
  Value variant = pick(
      e.cmp(Predicate::sle, work,
            constant(kNarrowChannels * e.target.multiprocessors)),
      ScanVariant::SplitNarrow,
      pick(e.cmp(Predicate::sgt, work,
                 constant(kWarpChannels * e.target.multiprocessors)),
           ScanVariant::Warp,
           pick(e.cmp(Predicate::sle, sequences.length, constant(kShortLength)),
                ScanVariant::SplitShort,
                constant(int64_t(ScanVariant::Split)))));
  auto bind = op.getChunkSize() ? op.getChunkSize().getDefiningOp<BindChunkOp>()
                                : BindChunkOp();
  if (bind) {
    Value bound =
        e.callRuntime("corey_rt_variant", {e.siteAddress(bind.getSiteAttr())},
                      e.host.getI64Type());
    bound = e.host.createOrFold<arith::IndexCastOp>(
        e.loc, e.host.getIndexType(), bound);
    Value byRule = e.cmp(Predicate::eq, bound,
                         constant(static_cast<int64_t>(ScanVariant::Rule)));
    variant =
        e.host.createOrFold<arith::SelectOp>(e.loc, byRule, variant, bound);
  }
  auto is = [&](ScanVariant which) {
    return e.cmp(Predicate::eq, variant, constant(static_cast<int64_t>(which)));
  };
  // One behind the other's failing; the last needs no test.
  std::function<void(ArrayRef<ScanVariant>)> emitOneOf =
      [&](ArrayRef<ScanVariant> variants) {
        if (variants.empty())
          return emitWarp();
        e.ifThen(
            is(variants.front()),
            [&] {
              ScanVariant variant = variants.front();
              if (isLong && variant == ScanVariant::Split)
                variant = ScanVariant::SplitShort;
              emitByLayout(s, 2, [&](const ScanOperands &s) {
                emitSplitKernel(s, splitTiling(states, variant));
              });
            },
            [&] { emitOneOf(variants.drop_front()); });
      };
  emitOneOf(kSplitVariants);
}

std::vector<ScanVariantInfo>
corey::getScanVariants(int64_t channels, int64_t groups, int64_t states) {
  bool hasPairs = channels / groups % 2 == 0;
  WarpTiling warp(states, hasPairs ? 2 : 1);
  ScanVariantInfo info = {"rule", warp.warps * warp.channels(),
                          WarpTiling::kSteps, warp.minBlocks(), true};
  std::vector<ScanVariantInfo> list = {info};
  info.name = "warp";
  list.push_back(info);
  if (hasPairs && states <= kMaxSplitStates)
    for (ScanVariant variant : kSplitVariants) {
      SplitTiling t = splitTiling(states, variant);
      llvm::StringLiteral name = variant == ScanVariant::Split
                                     ? llvm::StringLiteral("split")
                                 : variant == ScanVariant::SplitShort
                                     ? llvm::StringLiteral("split-short")
                                     : llvm::StringLiteral("split-narrow");
      list.push_back({name, t.channels, t.tokens, 1, false});
    }
  return list;
}

void SelectiveScanKernels::emitWarpKernel(const ScanOperands &s,
                                          ScanPass pass) {
  bool hasOutput = pass != ScanPass::States;
  int64_t perGroup = channels / groups;
  std::string name = pass == ScanPass::Whole    ? "selective_scan_warp"
                     : pass == ScanPass::States ? "selective_scan_warp_states"
                                                : "selective_scan_warp_outputs";
  if (s.areTokensTogether)
    name += "_tokens";
  WarpTiling t = warpTiling(s);
  int64_t steps = WarpTiling::kSteps;
  int64_t count = t.channelsPerLane;

  // Fewer blocks where a lane holds many states of rows in f32.
  int64_t rowBits = 0;
  for (Value rows : {Value(op.getB()), Value(op.getC())})
    rowBits += getElementTypeOrSelf(rows.getType()).getIntOrFloatBitWidth() *
               t.stateFloats() / 32;
  int64_t resident = !hasOutput ? 4 : rowBits >= 32 * 32 ? 3 : t.minBlocks();
  KernelBuilder k(e.host, e.loc, e.kernels, name,
                  {t.warps * 32, t.warps == 4 ? resident : 0});
  k.startInOrder();
  InputStream u(e, k, op.getU()), delta(e, k, op.getDelta());
  InputStream z(e, k, hasOutput ? op.getZ() : Value());
  DeviceTensor A(e, k, e.buffer(op.getA())), B(e, k, e.buffer(op.getB()));
  DeviceTensor C, D, last;
  OutputStream y;
  if (hasOutput) {
    C = DeviceTensor(e, k, e.buffer(op.getC()));
    D = DeviceTensor(e, k, e.buffer(op.getD()));
    y = OutputStream(e, k, s.y);
  }
  DeviceTensor bias(e, k, e.buffer(op.getDeltaBias()));
  DeviceTensor initial, chunkStates, chunkSteps;
  if (pass == ScanPass::Whole) {
    initial = DeviceTensor(e, k, s.states.initial, !s.states.isInPlace());
    last = DeviceTensor(e, k, s.states.last);
  } else {
    chunkStates = DeviceTensor(e, k, s.chunkStates);
    if (pass == ScanPass::States)
      chunkSteps = DeviceTensor(e, k, s.chunkSteps);
  }

  DeviceSlots slots(e, k, pass == ScanPass::Whole ? s.states : StateBuffers());

  // Which channels, which tokens.
  int64_t tilesPerGroup = llvm::divideCeil(perGroup, t.channels());
  int64_t tiles = tilesPerGroup * groups;
  int64_t tileBlocks = llvm::divideCeil(tiles, t.warps);
  Val lane = k.lane(), warp = k.warp();
  Val r = lane / t.lanes, q = lane % t.lanes;
  Val block = k.blockIdx('x');
  Val chunkIndex = pass == ScanPass::Whole ? k.i32(0) : block / tileBlocks;
  Val tile =
      (pass == ScanPass::Whole ? block : block % tileBlocks) * t.warps + warp;
  Val sequence = rowOfBlock(k);
  Val active = (tile < tiles) & (sequence < k.i32Argument(sequences.count));
  k.ifThen(active, [&] {
    auto [batch, begin, tokens] = sequences.range(k, sequence);
    DeviceSlots::Place place = slots.of(k, sequence);
    slots.check(k, place);
    Val first = k.i32(0), length = tokens;
    if (pass != ScanPass::Whole) {
      // In 64 bits: chunks may be as long as they like.
      Val chunk = k.i64Argument(s.chunk);
      Val start = k.toI64(chunkIndex) * chunk;
      Val left = k.toI64(tokens) - start;
      first = k.toI32(k.min(start, k.toI64(tokens)));
      length = k.toI32(k.max(k.min(left, chunk), k.i64(0)));
    }
    Val group = tile / tilesPerGroup;
    Val limit = (group + 1) * perGroup;
    Val channel =
        group * perGroup + (tile % tilesPerGroup) * t.channels() + r * count;
    Val inside = channel < limit;
    // Lanes beyond the last channel work on it again, and write nothing.
    Val c = k.min(channel, limit - double(count));

    Val full = length - (length % steps);
    Val batch64 = k.toI64(batch);
    Val row0 = k.toI64(begin) + k.toI64(first);
    auto channelAt = [&](int64_t j) { return c + double(j); };

    // A log2(e), states, and what channels have once.
    SmallVector<Vals> rate(count);
    Vals state, skip, shift;
    auto stateIndex = [&](int64_t i) {
      return q * t.statesPerLane + double(i);
    };
    auto ifState = [&](int64_t i, llvm::function_ref<Val(Val n)> get) {
      // Only padding can lie beyond the last state.
      if (t.paddedStates() == states)
        return get(stateIndex(i));
      Val n = stateIndex(i);
      return k.select(n < states, get(k.min(n, k.i32(states - 1))), k.f32(0));
    };
    auto scalar = [&](const DeviceTensor &tensor, ArrayRef<Val> leading,
                      Val at) { return tensor.loadScalar(leading, at); };
    for (int64_t j = 0; j < count; ++j) {
      for (int64_t i = 0; i < t.statesPerLane; ++i) {
        rate[j].push_back(ifState(
            i, [&](Val n) { return scalar(A, {channelAt(j)}, n) * kLog2E; }));
        if (initial)
          continue;
        state.push_back(ifState(i, [&](Val n) {
          if (pass == ScanPass::Outputs)
            return k.load(
                chunkStates.at({sequence, chunkIndex, channelAt(j)}, n),
                k.f32Type());
          return k.f32(0);
        }));
      }
      skip.push_back(D ? scalar(D, {}, channelAt(j)) : Val());
      shift.push_back(bias ? scalar(bias, {}, channelAt(j)) : Val());
    }
    if (initial)
      state = slots.ifThere(k, place, [&] {
        Vals loaded;
        for (int64_t j = 0; j < count; ++j)
          for (int64_t i = 0; i < t.statesPerLane; ++i)
            loaded.push_back(ifState(i, [&](Val n) {
              return scalar(initial, {place.row, channelAt(j)}, n);
            }));
        return loaded;
      });

    // The warp's shared memory: [2][pairs | B | C].
    Val memory =
        k.offset(k.shared(t.warps * t.sharedBytes()), warp * t.sharedBytes());
    int64_t bufferBytes = t.sharedBytes() / 2;
    int64_t bOffset = 4 * t.pairFloats();
    int64_t cOffset = bOffset + 4 * t.stateFloats();
    if (t.paddedStates() != states) {
      // Padding stays zero: nothing else is written there.
      int64_t words = t.sharedBytes() / 4;
      k.forLoop(lane, k.i32(words), 32,
                [&](Val i) { k.store(k.f32(0), k.offset(memory, i * 4)); });
      k.syncWarp();
    }

    // The lane's own tokens of a block: from `ownStep`.
    Val owner = t.lanes > steps ? q % steps : q;
    Val ownStep = owner * t.stepsPerLane();
    Val ownRow = row0 + k.toI64(ownStep);
    Cursor uRow = u.at({batch64, ownRow}, c);
    Cursor deltaRow = delta.at({batch64, ownRow}, c);
    Cursor zRow = z ? z.at({batch64, ownRow}, c) : Cursor();
    Cursor yRow = hasOutput ? y.at({batch64, ownRow}, c) : Cursor();
    // Pieces of rows of B and C that a lane brings to shared memory.
    int64_t piece = 4;
    for (Value tensor : {Value(op.getB()), Value(op.getC())})
      piece = std::gcd(piece, rowAlignment(tensor));
    // Neighbouring lanes have neighbours in memory: of what is not dense, it is
    // tokens that are likely to be.
    bool areDense = B.isDense() && (!C || C.isDense());
    int64_t pieceTokens = areRowsTogether(s) ? kRowTokens : 1;
    int64_t piecesPerRow = states / piece, runs = steps / pieceTokens;
    int64_t pieces = runs * piecesPerRow;
    int64_t rounds = llvm::divideCeil(pieces, 32);
    auto stepOf = [&](Val index) {
      return areDense ? index / double(piecesPerRow)
                      : (index % runs) * double(pieceTokens);
    };
    auto stateOf = [&](Val index) {
      return (areDense ? index % piecesPerRow : index / double(runs)) *
             double(piece);
    };

    /// Loads what block `t0` needs; rows from `clampTo` on are read as the last
    /// before it, if it is given.
    auto load = [&](Val t0, Val clampTo) {
      Vals loaded;
      auto rowOf = [&](Val step) {
        Val row = t0 + step;
        return clampTo ? k.min(row, clampTo - 1.0) : row;
      };
      if (s.areTokensTogether) {
        int64_t own = t.stepsPerLane();
        // There are as many tokens, or a multiple.
        Val move =
            clampTo ? k.min(t0 + ownStep, clampTo - double(own)) - ownStep : t0;
        SmallVector<Vals> tiles;
        for (const InputStream *stream : {&u, &delta, &z})
          if (*stream)
            tiles.push_back(
                stream->loadTile(stream->moved(stream == &u       ? uRow
                                               : stream == &delta ? deltaRow
                                                                  : zRow,
                                               move),
                                 own, count));
        for (int64_t i = 0; i < own; ++i)
          for (const Vals &tile : tiles) {
            size_t size = tile.size() / own;
            llvm::append_range(loaded, ArrayRef(tile).slice(i * size, size));
          }
      }
      for (int64_t i = 0; i < t.stepsPerLane() && !s.areTokensTogether; ++i) {
        Val move =
            clampTo ? rowOf(ownStep + double(i)) - ownStep : t0 + double(i);
        llvm::append_range(loaded, u.load(u.moved(uRow, move), count, false));
        llvm::append_range(
            loaded, delta.load(delta.moved(deltaRow, move), count, false));
        if (z)
          llvm::append_range(loaded, z.load(z.moved(zRow, move), count, false));
      }
      for (int64_t i = 0; i < rounds; ++i) {
        Val index = lane + double(32 * i);
        if (pieces % 32)
          index = k.min(index, k.i32(pieces - 1));
        Val row = rowOf(stepOf(index));
        if (pieceTokens > 1 && clampTo)
          row = k.min(row, clampTo - double(pieceTokens));
        row = row0 + k.toI64(row);
        Val n = stateOf(index);
        for (const DeviceTensor *tensor : {&B, &C})
          if (*tensor)
            loaded.push_back(k.load(
                tensor->at({batch64, row, group}, n),
                k.packedType(tensor->element, piece * pieceTokens), true));
      }
      return loaded;
    };

    // Lanes ask for the rows of a block each, a few blocks ahead: L2 is far
    // from where most rows come from.
    Val rowPointer, rowStride;
    int64_t askingLanes = 0;
    {
      SmallVector<std::pair<Val, Val>> rows;
      Val tileChannel =
          k.min(channel - r * double(count), limit - double(count));
      for (const InputStream *stream : {&u, &delta, &z})
        if (*stream)
          llvm::append_range(
              rows, stream->rowsAt({batch64, row0 + k.toI64(lane % steps)},
                                   tileChannel));
      for (auto [i, row] : llvm::enumerate(rows)) {
        if (askingLanes + steps > 32)
          break;
        Val mine = lane >= double(askingLanes);
        rowPointer = i ? k.select(mine, row.first, rowPointer) : row.first;
        rowStride = i ? k.select(mine, row.second, rowStride) : row.second;
        askingLanes += steps;
      }
    }
    auto prefetch = [&](Val t0) {
      constexpr int64_t kAhead = 4;
      if (askingLanes == 0)
        return;
      Val row = t0 + double(kAhead * steps);
      Val asks = row + double(steps) <= full;
      if (askingLanes < 32)
        asks = asks & (lane < double(askingLanes));
      k.ifThen(asks, [&] {
        k.prefetchL2(k.offset(rowPointer, k.toI64(row) * rowStride));
      });
    };

    /// One block of tokens from `t0`; `left` of them, or all if it is null.
    /// `next` is called where what comes next should be loaded.
    auto runBlock = [&](Val t0, Val left, ArrayRef<Val> loaded,
                        MutableArrayRef<Val> h, MutableArrayRef<Val> sums,
                        llvm::function_ref<Vals()> next) {
      Val buffer =
          k.offset(memory, ((t0 / double(steps)) & 1) * double(bufferBytes));
      const Val *from = loaded.begin();
      auto take = [&](const InputStream &stream) {
        Vals values =
            stream.values(ArrayRef<Val>(from, stream.numLoaded()), count);
        from += stream.numLoaded();
        return values;
      };
      // 1. dt, dt u, rows of B and C.
      SmallVector<Vals> uValues, zValues;
      SmallVector<Vals> pairs(count);
      for (int64_t i = 0; i < t.stepsPerLane(); ++i) {
        Vals us = take(u), deltas = take(delta);
        for (int64_t j = 0; j < count; ++j) {
          Val dt = deltas[j];
          if (bias)
            dt = dt + shift[j];
          if (op.getDeltaSoftplus())
            dt = k.softplus(dt);
          Val dtu = dt * us[j];
          if (left) {
            // A token that is not there leaves the state as it is.
            Val there = ownStep + double(i) < left;
            dt = k.select(there, dt, k.f32(0));
            dtu = k.select(there, dtu, k.f32(0));
          }
          pairs[j].push_back(dt);
          pairs[j].push_back(dtu);
          if (pass == ScanPass::States)
            sums[j] = sums[j] + dt;
        }
        uValues.push_back(us);
        if (z)
          zValues.push_back(take(z));
      }
      auto storePairs = [&] {
        for (int64_t j = 0; j < count; ++j)
          for (size_t i = 0; i < pairs[j].size(); i += 4) {
            size_t width = std::min<size_t>(4, pairs[j].size() - i);
            k.store(k.vector(ArrayRef(pairs[j]).slice(i, width)),
                    k.offset(buffer, ((r + double(j * t.rows())) * t.pairRow() +
                                      ownStep * 2 + double(i)) *
                                         4));
          }
      };
      if (t.lanes > steps)
        k.ifThen(q < steps, storePairs);
      else
        storePairs();
      for (int64_t i = 0; i < rounds; ++i) {
        Val index = lane + double(32 * i);
        Vals values[2];
        const DeviceTensor *tensors[] = {&B, &C};
        for (auto [m, tensor] : llvm::enumerate(tensors))
          if (*tensor)
            values[m] = k.unpack(*from++, tensor->element, piece * pieceTokens);
        auto storeRows = [&] {
          Val at = (stepOf(index) * t.paddedStates() + stateOf(index)) * 4;
          for (int64_t m = 0; m < 2; ++m)
            if (!values[m].empty()) {
              // Aligned to 16 bytes only where rows are.
              int64_t width = t.paddedStates() % piece ? 1 : piece;
              auto to = [&](int64_t floats) {
                return k.offset(k.offset(buffer, at),
                                (m ? cOffset : bOffset) + 4 * floats);
              };
              if (pieceTokens > 1)
                for (int64_t i = 0; i < pieceTokens; ++i)
                  k.store(values[m][i], to(i * t.paddedStates()));
              else
                for (int64_t p = 0; p < piece; p += width)
                  k.store(k.vector(ArrayRef(values[m]).slice(p, width)), to(p));
            }
        };
        if (pieces % 32)
          k.ifThen(index < double(pieces), storeRows);
        else
          storeRows();
      }
      Vals following = next();
      k.syncWarp();
      // 2. The recurrence.
      SmallVector<Vals> partial(count);
      Val pairRow = k.offset(buffer, r * double(4 * t.pairRow()));
      Val stateRow = k.offset(buffer, q * double(4 * t.statesPerLane));
      for (int64_t step = 0; step < steps; ++step) {
        auto row = [&](int64_t offset) {
          // Vectors of a lane's states, as wide as they are aligned.
          Vals list;
          int64_t width = std::gcd<int64_t>(t.statesPerLane, 4);
          for (int64_t i = 0; i < t.statesPerLane; i += width) {
            Val v = k.load(
                k.offset(stateRow, offset + 4 * (step * t.paddedStates() + i)),
                k.packedType(k.f32Type(), width));
            llvm::append_range(list, k.unpack(v, k.f32Type(), width));
          }
          return list;
        };
        Vals b = row(bOffset), cs;
        if (hasOutput)
          cs = row(cOffset);
        for (int64_t j = 0; j < count; ++j) {
          Vals pair = k.unpack(
              k.load(k.offset(pairRow,
                              4 * (j * t.rows() * t.pairRow() + 2 * step)),
                     k.packedType(k.f32Type(), 2)),
              k.f32Type(), 2);
          Val sum;
          for (int64_t i = 0; i < t.statesPerLane; ++i) {
            Val &state = h[j * t.statesPerLane + i];
            state = k.fma(k.ex2(pair[0] * rate[j][i]), state, pair[1] * b[i]);
            if (hasOutput)
              sum = sum ? k.fma(state, cs[i], sum) : state * cs[i];
          }
          if (hasOutput)
            partial[j].push_back(sum);
        }
      }
      // 3. The outputs of the lane's own tokens.
      if (hasOutput) {
        SmallVector<Vals> outputs(t.stepsPerLane());
        for (int64_t j = 0; j < count; ++j) {
          Vals sums = k.reduceScatter(partial[j], t.lanes, q);
          for (int64_t i = 0; i < t.stepsPerLane(); ++i) {
            Val out = sums[i];
            if (D)
              out = k.fma(skip[j], uValues[i][j], out);
            if (z)
              out = out * k.silu(zValues[i][j]);
            outputs[i].push_back(out);
          }
        }
        if (s.areTokensTogether) {
          Val writes = inside;
          if (left)
            writes = writes & (ownStep < left);
          if (t.lanes > steps)
            writes = writes & (q < steps);
          k.ifThen(writes, [&] { y.storeTile(y.moved(yRow, t0), outputs); });
        }
        for (int64_t i = 0; i < t.stepsPerLane() && !s.areTokensTogether; ++i) {
          Val writes = inside;
          if (left)
            writes = writes & (ownStep + double(i) < left);
          if (t.lanes > steps)
            writes = writes & (q < steps);
          k.ifThen(writes,
                   [&] { y.store(y.moved(yRow, t0 + double(i)), outputs[i]); });
        }
      }
      return following;
    };

    Vals sums(pass == ScanPass::States ? count : 0, k.f32(0));
    Vals carried(state);
    llvm::append_range(carried, sums);
    // Full blocks, each loading for the next.
    Vals results = k.ifValues(
        full > 0,
        [&]() -> Vals {
          Vals inits(carried);
          llvm::append_range(inits, load(k.i32(0), Val()));
          Vals out = k.forLoop(
              k.i32(0), full, steps, inits,
              [&](Val t0, ArrayRef<Val> in) -> Vals {
                Vals h(in.take_front(state.size()));
                Vals totals(in.slice(state.size(), sums.size()));
                Vals loaded(in.drop_front(carried.size()));
                Vals next = runBlock(t0, Val(), loaded, h, totals, [&] {
                  Val following = t0 + double(steps);
                  prefetch(t0);
                  return k.loadIf(following < full,
                                  [&] { return load(following, Val()); });
                });
                Vals yielded(h);
                llvm::append_range(yielded, totals);
                llvm::append_range(yielded, next);
                return yielded;
              });
          out.resize(carried.size());
          return out;
        },
        [&]() -> Vals { return carried; });
    Vals end = k.ifValues(
        full < length,
        [&]() -> Vals {
          Vals h(ArrayRef(results).take_front(state.size()));
          Vals totals(ArrayRef(results).drop_front(state.size()));
          runBlock(full, length - full, load(full, length), h, totals,
                   []() -> Vals { return {}; });
          llvm::append_range(h, totals);
          return h;
        },
        [&]() -> Vals { return results; });

    if (!last && pass != ScanPass::States)
      return;
    k.ifThen(place.there ? inside & place.there : inside, [&] {
      for (int64_t j = 0; j < count; ++j)
        for (int64_t i = 0; i < t.statesPerLane; ++i) {
          auto write = [&] {
            Val h = end[j * t.statesPerLane + i];
            if (last)
              k.store(k.pack({h}, last.element),
                      last.at({place.row, channelAt(j)}, stateIndex(i)));
            else
              k.store(h, chunkStates.at({sequence, chunkIndex, channelAt(j)},
                                        stateIndex(i)));
          };
          if (t.paddedStates() == states)
            write();
          else
            k.ifThen(stateIndex(i) < states, write);
        }
    });
    if (pass != ScanPass::States)
      return;
    for (int64_t j = 0; j < count; ++j) {
      // Lanes beyond the tokens of a block have prepared what others have, too.
      Val sum = end[state.size() + j];
      if (t.lanes > steps)
        sum = k.select(q < steps, sum, k.f32(0));
      Val total = k.warpSum(sum, t.lanes);
      k.ifThen(inside & (q == 0), [&] {
        k.store(total, chunkSteps.at({sequence, chunkIndex}, channelAt(j)));
      });
    }
  });
  Value blocks = e.index(tileBlocks);
  if (pass != ScanPass::Whole)
    blocks = e.mul(s.chunkCount, tileBlocks);
  k.launch(e.gridOf(blocks, sequences.count));
}

/// The scan of the states of a channel by several lanes; see above.
void SelectiveScanKernels::emitSplitKernel(const ScanOperands &s,
                                           const SplitTiling &t) {
  constexpr int64_t kSteps = SplitTiling::kSteps, kRing = SplitTiling::kRing;
  int64_t perGroup = channels / groups;
  int64_t states = this->states, groupsPerTile = t.tokens / kSteps;
  std::string name = "selective_scan_split" + std::to_string(t.statesPerLane) +
                     "x" + std::to_string(t.channels) + "x" +
                     std::to_string(t.tokens);
  if (s.areTokensTogether)
    name += "_tokens";
  KernelBuilder k(e.host, e.loc, e.kernels, name, {t.threads(), 1});
  InputStream u(e, k, op.getU()), delta(e, k, op.getDelta());
  InputStream z(e, k, op.getZ());
  DeviceTensor A(e, k, e.buffer(op.getA())), B(e, k, e.buffer(op.getB()));
  DeviceTensor C(e, k, e.buffer(op.getC())), D(e, k, e.buffer(op.getD()));
  OutputStream y(e, k, s.y);
  DeviceTensor bias(e, k, e.buffer(op.getDeltaBias()));
  DeviceTensor initial(e, k, s.states.initial, !s.states.isInPlace()),
      last(e, k, s.states.last);
  DeviceSlots slots(e, k, s.states);
  StateLayout layouts[2] = {StateLayout(B.element, t),
                            StateLayout(C.element, t)};

  // Shared memory: rings of (dt, dt u) by channel, of B and of C by state, and
  // two tiles of partial outputs by channel and lane.
  Val pairs = k.shared(4 * kRing * t.pairWords());
  Val rows[2] = {k.shared(4 * kRing * layouts[0].words()),
                 k.shared(4 * kRing * layouts[1].words())};
  Val partials = k.shared(4 * 2 * t.partialWords());

  auto scalar = [&](const DeviceTensor &tensor, ArrayRef<Val> leading, Val at) {
    return tensor.loadScalar(leading, at);
  };
  int64_t tilesPerGroup = llvm::divideCeil(perGroup, t.channels);
  Val block = k.blockIdx('x'), sequence = rowOfBlock(k);
  Val lane = k.lane(), warp = k.warp();
  // Blocks of no sequence leave together: no barrier waits for them.
  k.ifThen(sequence < k.i32Argument(sequences.count), [&] {
    DeviceSequences::Range range = sequences.range(k, sequence);
    Val batch = range.batch, begin = range.begin, length = range.length;
    Val group = block / double(tilesPerGroup);
    Val limit = (group + 1.0) * double(perGroup);
    Val channel0 =
        group * double(perGroup) + (block % tilesPerGroup) * double(t.channels);
    Val tiles = (length + double(t.tokens - 1)) / double(t.tokens);
    // Auxiliary warps go round the ring in whole turns.
    Val turns = (tiles + double(kRing - 1)) / double(kRing);

    auto scan = [&] {
      Val local = warp * double(t.channelsPerWarp()) + lane / double(t.lanes);
      Val g = lane % t.lanes;
      Val channel = channel0 + local;
      Val inside = channel < limit;
      Val c = k.min(channel, limit - 1.0);
      Vals rate, h;
      auto stateIndex = [&](int64_t i) {
        return g * double(t.statesPerLane) + double(i);
      };
      auto ifState = [&](int64_t i, llvm::function_ref<Val(Val n)> get) {
        Val n = stateIndex(i);
        if (t.paddedStates() == states)
          return get(n);
        return k.select(n < double(states), get(k.min(n, k.i32(states - 1))),
                        k.f32(0));
      };
      for (int64_t i = 0; i < t.statesPerLane; ++i)
        rate.push_back(
            ifState(i, [&](Val n) { return scalar(A, {c}, n) * kLog2E; }));
      DeviceSlots::Place place = slots.of(k, sequence);
      slots.check(k, place);
      h.assign(t.statesPerLane, k.f32(0));
      if (initial)
        h = slots.ifThere(k, place, [&] {
          Vals loaded;
          for (int64_t i = 0; i < t.statesPerLane; ++i)
            loaded.push_back(ifState(
                i, [&](Val n) { return scalar(initial, {place.row, c}, n); }));
          return loaded;
        });
      // Where the lane reads and writes.
      Val pairBase = k.offset(pairs, local * double(4 * t.pairRow()));
      Val rowBase[2];
      for (int64_t m = 0; m < 2; ++m)
        rowBase[m] =
            k.offset(rows[m], g * double(4 * layouts[m].rowsPerLane(t) *
                                         layouts[m].row));
      Val partialBase =
          k.offset(partials, local * double(4 * t.partialChannel()) +
                                 g * double(4 * t.partialRow()));

      /// Everything of eight tokens that is loaded ahead.
      auto loadPairs = [&](Val slot, int64_t group, Vals &dt, Vals &dtu) {
        Val from = k.offset(pairBase, slot * double(4 * t.pairWords()));
        dt.clear(), dtu.clear();
        for (int64_t i = 0; i < kSteps; i += 2) {
          Vals v = k.unpack(k.load(k.offset(from, 8 * (group * kSteps + i)),
                                   k.packedType(k.f32Type(), 4)),
                            k.f32Type(), 4);
          dt.push_back(v[0]), dtu.push_back(v[1]);
          dt.push_back(v[2]), dtu.push_back(v[3]);
        }
      };
      auto loadRows = [&](int64_t m, Val slot, int64_t group) {
        const StateLayout &layout = layouts[m];
        Val from = k.offset(rowBase[m], slot * double(4 * layout.words()));
        Vals words;
        for (int64_t r = 0; r < layout.rowsPerLane(t); ++r)
          for (int64_t i = 0; i < layout.wordsPerGroup(); i += 4) {
            Val v =
                k.load(k.offset(from, 4 * (r * layout.row +
                                           group * layout.wordsPerGroup() + i)),
                       VectorType::get({4}, layout.kind == StateLayout::Single
                                                ? k.f32Type()
                                                : k.i32Type()));
            for (int64_t j = 0; j < 4; ++j)
              words.push_back(k.extract(v, j));
          }
        return words;
      };
      /// The value of the lane's state i at token `step` of loaded words.
      auto valueOf = [&](int64_t m, ArrayRef<Val> words, int64_t step,
                         int64_t i) {
        const StateLayout &layout = layouts[m];
        Type element = m ? C.element : B.element;
        int64_t perRow = layout.wordsPerGroup();
        switch (layout.kind) {
        case StateLayout::Single:
          return words[i * perRow + step];
        case StateLayout::StatePair:
          return k.unpack(words[i / 2 * perRow + step], element, 2)[i % 2];
        case StateLayout::TokenPair:
          return k.unpack(words[i * perRow + step / 2], element, 2)[step % 2];
        }
        llvm_unreachable("unknown layout");
      };

      k.syncBlock();
      // One group's exponentials are computed while the one before is scanned.
      Val first = k.i32(0);
      Vals dt, dtu, decay, dtNext, dtuNext;
      loadPairs(first, 0, dt, dtu);
      for (int64_t i = 0; i < kSteps; ++i)
        for (Val a : rate)
          decay.push_back(k.ex2(dt[i] * a));
      Vals b = loadRows(0, first, 0), cs = loadRows(1, first, 0);
      loadPairs(first, 1, dtNext, dtuNext);

      SmallVector<Vals *> carried{&h, &decay, &dtu, &dtNext, &dtuNext, &b, &cs};
      auto flatten = [&] {
        Vals all;
        for (Vals *part : carried)
          llvm::append_range(all, *part);
        return all;
      };
      auto unflatten = [&](ArrayRef<Val> all) {
        for (Vals *part : carried) {
          size_t size = part->size();
          part->assign(all.begin(), all.begin() + size);
          all = all.drop_front(size);
        }
      };
      Vals inits = flatten();
      inits.push_back(first);
      Vals end = k.forLoop(
          k.i32(0), tiles, 1, inits, [&](Val tile, ArrayRef<Val> in) -> Vals {
            unflatten(in.drop_back());
            Val slot = in.back();
            Val nextSlot =
                k.select(slot == double(kRing - 1), k.i32(0), slot + 1.0);
            Val out = k.offset(partialBase,
                               (tile & 1) * double(4 * t.partialWords()));
            for (int64_t j = 0; j < groupsPerTile; ++j) {
              bool isLast = j + 1 == groupsPerTile;
              Val from = isLast ? nextSlot : slot;
              int64_t at = isLast ? 0 : j + 1;
              Vals bNext = loadRows(0, from, at), cNext = loadRows(1, from, at);
              Vals dt2, dtu2;
              bool wraps = j + 2 >= groupsPerTile;
              loadPairs(wraps ? nextSlot : slot,
                        wraps ? j + 2 - groupsPerTile : j + 2, dt2, dtu2);
              Vals decayNext, outputs;
              for (int64_t i = 0; i < kSteps; ++i) {
                for (Val a : rate)
                  decayNext.push_back(k.ex2(dtNext[i] * a));
                Val sum;
                for (int64_t n = 0; n < t.statesPerLane; ++n) {
                  h[n] = k.fma(decay[i * t.statesPerLane + n], h[n],
                               dtu[i] * valueOf(0, b, i, n));
                  Val cn = valueOf(1, cs, i, n);
                  sum = sum ? k.fma(h[n], cn, sum) : h[n] * cn;
                }
                outputs.push_back(sum);
              }
              for (int64_t i = 0; i < kSteps; i += 4)
                k.store(k.vector(ArrayRef(outputs).slice(i, 4)),
                        k.offset(out, 4 * (j * kSteps + i)));
              decay = decayNext;
              dtu = dtuNext;
              dtNext = dt2;
              dtuNext = dtu2;
              b = bNext;
              cs = cNext;
            }
            k.syncBlock();
            Vals next = flatten();
            next.push_back(nextSlot);
            return next;
          });
      unflatten(ArrayRef(end).drop_back());
      // Tiles that only fill up the last turn.
      k.forLoop(tiles, turns * double(kRing), 1, [&](Val) { k.syncBlock(); });
      if (!last)
        return;
      Val writes = place.there ? inside & place.there : inside;
      for (int64_t i = 0; i < t.statesPerLane; ++i)
        k.ifThen(writes & (stateIndex(i) < double(states)), [&] {
          k.store(k.pack({h[i]}, last.element),
                  last.at({place.row, c}, stateIndex(i)));
        });
    };

    auto prepare = [&] {
      // Two channels, two tokens of every tile.
      Val thread = k.threadIdx() - double(32 * t.scanWarps());
      Val auxWarp = warp - double(t.scanWarps());
      Val pairIndex = lane / double(t.lanesPerPair());
      Val local = pairIndex * 2.0;
      Val step =
          (auxWarp * double(t.lanesPerPair()) + lane % t.lanesPerPair()) * 2.0;
      Val channel = channel0 + local;
      Val inside = channel < limit;
      Val c = k.min(channel, limit - 2.0);
      Val batch64 = k.toI64(batch), row0 = k.toI64(begin);
      Val lastRow = length - 1.0;
      Cursor uRow = u.at({batch64, row0}, c);
      Cursor deltaRow = delta.at({batch64, row0}, c);
      Cursor zRow = z ? z.at({batch64, row0}, c) : Cursor();
      Cursor yRow = y.at({batch64, row0}, c);
      Vals shift, skip;
      for (int64_t j = 0; j < 2; ++j) {
        if (bias)
          shift.push_back(scalar(bias, {}, c + double(j)));
        if (D)
          skip.push_back(scalar(D, {}, c + double(j)));
      }
      Val pairTo =
          k.offset(pairs, local * double(4 * t.pairRow()) + step * 8.0);
      Val partialFrom = k.offset(
          partials, local * double(4 * t.partialChannel()) + step * 4.0);

      // Pieces of B and C of a thread.
      struct Piece {
        int64_t elements, perRow, count, rounds;
        /// Neighbouring threads have neighbours in memory: of what is not
        /// dense, it is tokens that are likely to be.
        bool isDense;
        /// Tokens of a piece, and pieces along tokens.
        int64_t tokens, runs;
        Val tokenOf(Val index) const {
          return isDense ? index / double(perRow)
                         : (index % runs) * double(tokens);
        }
        Val stateOf(Val index) const {
          return (isDense ? index % perRow : index / double(runs)) *
                 double(elements);
        }
      };
      Piece pieces[2];
      for (int64_t m = 0; m < 2; ++m) {
        Value tensor = m ? op.getC() : op.getB();
        Piece &p = pieces[m];
        p.elements = std::gcd(states, rowAlignment(tensor));
        p.perRow = states / p.elements;
        p.isDense = (m ? C : B).isDense();
        p.tokens = areRowsTogether(s) ? kRowTokens : 1;
        p.runs = t.tokens / p.tokens;
        p.count = p.runs * p.perRow;
        p.rounds = llvm::divideCeil(p.count, t.auxThreads());
      }
      if (t.paddedStates() != states) {
        // Padding stays zero: nothing else is written there.
        for (int64_t m = 0; m < 2; ++m)
          k.forLoop(
              thread, k.i32(kRing * layouts[m].words()), t.auxThreads(),
              [&](Val i) { k.store(k.i32(0), k.offset(rows[m], i * 4.0)); });
        k.syncNamed(1, t.auxThreads());
      }

      /// Loads what the thread prepares of a tile. Rows beyond the sequence are
      /// read as its last.
      auto load = [&](Val tile) {
        Vals loaded;
        Val t0 = tile * double(t.tokens);
        if (s.areTokensTogether) {
          // There are two, or a multiple.
          Val row = k.max(k.min(t0 + step, length - 2.0), k.i32(0));
          Vals us = u.loadTile(u.moved(uRow, row), 2, 2),
               deltas = delta.loadTile(delta.moved(deltaRow, row), 2, 2), zs;
          if (z)
            zs = z.loadTile(z.moved(zRow, row), 2, 2);
          for (int64_t i = 0; i < 2; ++i)
            for (const Vals *list : {&us, &deltas, &zs})
              llvm::append_range(loaded,
                                 ArrayRef(*list).slice(i * (list->size() / 2),
                                                       list->size() / 2));
        }
        for (int64_t i = 0; i < 2 && !s.areTokensTogether; ++i) {
          Val row = k.max(k.min(t0 + step + double(i), lastRow), k.i32(0));
          llvm::append_range(loaded, u.load(u.moved(uRow, row), 2));
          llvm::append_range(loaded, delta.load(delta.moved(deltaRow, row), 2));
          if (z)
            llvm::append_range(loaded, z.load(z.moved(zRow, row), 2));
        }
        for (int64_t m = 0; m < 2; ++m) {
          const DeviceTensor &tensor = m ? C : B;
          const Piece &p = pieces[m];
          for (int64_t i = 0; i < p.rounds; ++i) {
            Val index = thread + double(i * t.auxThreads());
            if (p.count % t.auxThreads())
              index = k.min(index, k.i32(p.count - 1));
            Val row = k.max(k.min(t0 + p.tokenOf(index),
                                  length - static_cast<double>(p.tokens)),
                            k.i32(0));
            loaded.push_back(k.load(
                tensor.at({batch64, row0 + k.toI64(row), group},
                          p.stateOf(index)),
                k.packedType(tensor.element, p.elements * p.tokens), true));
          }
        }
        return loaded;
      };
      size_t perToken = u.numLoaded() + delta.numLoaded() + z.numLoaded();
      /// What the end of a tile needs of its beginning.
      size_t keptPerToken = u.numLoaded() + z.numLoaded();
      auto keep = [&](ArrayRef<Val> loaded) {
        Vals kept;
        for (int64_t i = 0; i < 2; ++i) {
          ArrayRef<Val> token = loaded.slice(i * perToken, perToken);
          llvm::append_range(kept, token.take_front(u.numLoaded()));
          llvm::append_range(kept, token.take_back(z.numLoaded()));
        }
        return kept;
      };

      /// Prepares a tile in a slot of the ring.
      auto fill = [&](Val tile, int64_t slot, ArrayRef<Val> loaded) {
        Val t0 = tile * double(t.tokens);
        Vals values[2];
        for (int64_t i = 0; i < 2; ++i) {
          ArrayRef<Val> token = loaded.slice(i * perToken, perToken);
          Vals us = u.values(token.take_front(u.numLoaded()), 2);
          Vals deltas =
              delta.values(token.slice(u.numLoaded(), delta.numLoaded()), 2);
          // A token that is not there leaves the state as it is.
          Val there = t0 + step + double(i) < length;
          for (int64_t j = 0; j < 2; ++j) {
            Val dt = deltas[j];
            if (bias)
              dt = dt + shift[j];
            if (op.getDeltaSoftplus())
              dt = k.softplus(dt);
            values[j].push_back(k.select(there, dt, k.f32(0)));
            values[j].push_back(k.select(there, dt * us[j], k.f32(0)));
          }
        }
        for (int64_t j = 0; j < 2; ++j)
          k.store(
              k.vector(values[j]),
              k.offset(pairTo, 4 * (slot * t.pairWords() + j * t.pairRow())));
        const Val *from = loaded.begin() + 2 * perToken;
        for (int64_t m = 0; m < 2; ++m) {
          const Piece &p = pieces[m];
          const StateLayout &layout = layouts[m];
          Type element = m ? C.element : B.element;
          for (int64_t i = 0; i < p.rounds; ++i) {
            Val index = thread + double(i * t.auxThreads());
            Val packed = *from++;
            auto store = [&] {
              Val token = p.tokenOf(index), n = p.stateOf(index);
              Val to = k.offset(rows[m], 4 * slot * layout.words());
              if (p.tokens == 1)
                return storeStates(k, layout, element, p.elements, packed,
                                   token, n, to);
              for (auto [i, one] :
                   llvm::enumerate(k.split(packed, element, p.tokens)))
                storeStates(k, layout, element, 1, one,
                            token + static_cast<double>(i), n, to);
            };
            if (p.count % t.auxThreads())
              k.ifThen(index < double(p.count), store);
            else
              store();
          }
        }
      };

      /// Sums and finishes the outputs of a tile.
      auto finish = [&](Val tile, ArrayRef<Val> kept) {
        Val from =
            k.offset(partialFrom, (tile & 1) * double(4 * t.partialWords()));
        Val sums[2][2];
        for (int64_t j = 0; j < 2; ++j)
          for (int64_t g = 0; g < t.lanes; ++g) {
            Vals v =
                k.unpack(k.load(k.offset(from, 4 * (j * t.partialChannel() +
                                                    g * t.partialRow())),
                                k.packedType(k.f32Type(), 2)),
                         k.f32Type(), 2);
            for (int64_t i = 0; i < 2; ++i)
              sums[i][j] = g ? sums[i][j] + v[i] : v[i];
          }
        auto outputsOf = [&](int64_t i) {
          ArrayRef<Val> token = kept.slice(i * keptPerToken, keptPerToken);
          Vals outputs{sums[i][0], sums[i][1]};
          if (D) {
            Vals us = u.values(token.take_front(u.numLoaded()), 2);
            for (int64_t j = 0; j < 2; ++j)
              outputs[j] = k.fma(skip[j], us[j], outputs[j]);
          }
          if (z) {
            Vals gate = z.values(token.take_back(z.numLoaded()), 2);
            for (int64_t j = 0; j < 2; ++j)
              outputs[j] = outputs[j] * k.silu(gate[j]);
          }
          return outputs;
        };
        Val first = tile * double(t.tokens) + step;
        if (s.areTokensTogether) {
          k.ifThen(inside & (first < length), [&] {
            Vals rows[] = {outputsOf(0), outputsOf(1)};
            y.storeTile(y.moved(yRow, first), rows);
          });
          return;
        }
        for (int64_t i = 0; i < 2; ++i) {
          Val row = first + double(i);
          k.ifThen(inside & (row < length),
                   [&] { y.store(y.moved(yRow, row), outputsOf(i)); });
        }
      };

      // The ring's slots are named, not moved: what has just been asked for is
      // not touched until it is needed.
      Vals ring[kRing], kept[kRing];
      for (int64_t i = 0; i < kRing; ++i)
        ring[i] = load(k.i32(i));
      for (int64_t i = 0; i + 1 < kRing; ++i) {
        fill(k.i32(i), i, ring[i]);
        kept[i] = keep(ring[i]);
        ring[i] = load(k.i32(kRing + i));
      }
      kept[kRing - 1] = kept[0];
      k.syncBlock();
      auto flatten = [&] {
        Vals all;
        for (int64_t i = 0; i < kRing; ++i)
          llvm::append_range(all, ring[i]);
        for (int64_t i = 0; i < kRing; ++i)
          llvm::append_range(all, kept[i]);
        return all;
      };
      auto unflatten = [&](ArrayRef<Val> all) {
        for (Vals *list :
             {&ring[0], &ring[1], &ring[2], &kept[0], &kept[1], &kept[2]}) {
          size_t size = list->size();
          list->assign(all.begin(), all.begin() + size);
          all = all.drop_front(size);
        }
      };
      Vals end = k.forLoop(
          k.i32(0), turns, 1, flatten(),
          [&](Val turn, ArrayRef<Val> in) -> Vals {
            unflatten(in);
            for (int64_t j = 0; j < kRing; ++j) {
              Val tile = turn * double(kRing) + double(j);
              int64_t slot = (j + kRing - 1) % kRing;
              // The tile before, which the scan warps are through with.
              k.ifThen((tile > 0.0) & (tile <= tiles),
                       [&] { finish(tile - 1.0, kept[slot]); });
              // The one after the next.
              Val ahead = tile + double(kRing - 1);
              k.ifThen(ahead < tiles, [&] { fill(ahead, slot, ring[slot]); });
              kept[slot] = keep(ring[slot]);
              Val furthest = tile + double(2 * kRing - 1);
              ring[slot] =
                  k.loadIf(furthest < tiles, [&] { return load(furthest); });
              k.syncBlock();
            }
            return flatten();
          });
      unflatten(end);
      // The last tile of the last turn.
      k.ifThen(turns > 0.0,
               [&] { finish(turns * double(kRing) - 1.0, kept[kRing - 1]); });
    };
    k.ifElse(warp < double(t.scanWarps()), scan, [&] {
      // A sequence without tokens has nothing to load, only a state.
      k.ifElse(length > 0.0, prepare, [&] { k.syncBlock(); });
    });
  });
  k.launch(e.gridOf(e.index(tilesPerGroup * groups), sequences.count));
}

/// One thread per state: the state at the end of every chunk becomes that at
/// its start, from the first chunk on.
void SelectiveScanKernels::emitCarryKernel(const ScanOperands &s) {
  constexpr int64_t kThreads = 128, kAhead = 8;
  KernelBuilder k(e.host, e.loc, e.kernels, "selective_scan_carry",
                  {kThreads, 0});
  DeviceTensor A(e, k, e.buffer(op.getA()));
  DeviceTensor initial(e, k, s.states.initial, !s.states.isInPlace()),
      last(e, k, s.states.last);
  DeviceTensor chunkStates(e, k, s.chunkStates);
  DeviceTensor chunkSteps(e, k, s.chunkSteps);
  DeviceSlots slots(e, k, s.states);
  Val index = k.blockIdx('x') * double(kThreads) + k.threadIdx();
  Val sequence = rowOfBlock(k);
  Val active = (index < double(channels * states)) &
               (sequence < k.i32Argument(sequences.count));
  k.ifThen(active, [&] {
    Val channel = index / double(states), n = index % states;
    auto range = sequences.range(k, sequence);
    Val chunk = k.i64Argument(s.chunk);
    // Those of this sequence: shorter ones have fewer.
    Val count = k.toI32((k.toI64(range.length) + chunk - 1.0) / chunk);
    Val rate = k.load(A.at({channel}, n), k.f32Type(), true) * kLog2E;
    DeviceSlots::Place place = slots.of(k, sequence);
    slots.check(k, place);
    Val h = k.f32(0);
    if (initial)
      h = slots.ifThere(k, place, [&]() -> Vals {
        return {initial.loadScalar({place.row, channel}, n)};
      })[0];
    Val state = chunkStates.at({sequence, k.i32(0), channel}, n);
    Val steps = chunkSteps.at({sequence, k.i32(0)}, channel);
    auto stateAt = [&](Val i) {
      return k.offset(state, k.toI64(i) * chunkStates.stride(1));
    };
    auto stepsAt = [&](Val i) {
      return k.offset(steps, k.toI64(i) * chunkSteps.stride(1));
    };
    // Several chunks are loaded before the first is needed.
    Vals end = k.forLoop(
        k.i32(0), count, kAhead, {h}, [&](Val first, ArrayRef<Val> in) -> Vals {
          Vals values, sums;
          for (int64_t i = 0; i < kAhead; ++i) {
            Val at = k.min(first + double(i), count - 1.0);
            values.push_back(k.load(stateAt(at), k.f32Type()));
            sums.push_back(k.load(stepsAt(at), k.f32Type()));
          }
          Val h = in[0];
          for (int64_t i = 0; i < kAhead; ++i) {
            Val there = first + double(i) < count;
            k.ifThen(there, [&] { k.store(h, stateAt(first + double(i))); });
            h = k.select(there, k.fma(k.ex2(rate * sums[i]), h, values[i]), h);
          }
          return {h};
        });
    if (last)
      k.ifThen(place.writes(k), [&] {
        k.store(k.pack({end[0]}, last.element),
                last.at({place.row, channel}, n));
      });
  });
  k.launch(e.gridOf(e.index(llvm::divideCeil(channels * states, kThreads)),
                    sequences.count));
}

namespace {
struct SelectiveScanLowering : public GPULoweringPattern<SelectiveScanOp> {
  using GPULoweringPattern::GPULoweringPattern;
  LogicalResult matchAndRewrite(SelectiveScanOp op,
                                PatternRewriter &rewriter) const override {
    GPULowering e(rewriter, op, target);
    return SelectiveScanKernels(e, op).emit();
  }
};
} // namespace

void corey::populateGPUScanLowerings(RewritePatternSet &patterns,
                                     GPUTarget target) {
  patterns.add<SelectiveScanLowering>(patterns.getContext(), target);
}
