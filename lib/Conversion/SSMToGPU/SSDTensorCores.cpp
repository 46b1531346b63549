//===- SSDTensorCores.cpp - GPU kernels of ssd on tensor cores ------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// A block of threads walks a segment of a sequence, in tiles of 64 tokens, for
// one or two slices of 64 channels: two heads of a group, or one head's. The
// state of a slice, S [p, n], stays in the registers of a warp group from tile
// to tile. With cs the running sum of a tile's exponents (of 2), and l its last
// token, a tile is
//
//   Y^T[p, i] = 2^cs_i (S C^T)[p, i] + (X^T M^T)[p, i],
//   M[i, j] = (C B^T)[i, j] 2^(cs_i - cs_j) dt_j for j <= i, plus D at j = i,
//   S[p, n] <- 2^cs_l S[p, n] + sum_j x[j, p] 2^(cs_l - cs_j) dt_j B[j, n],
//
// four products on the tensor cores, transposed so that S and X^T are operands
// from registers. Where the chip has products of warp groups (wgmma), groups of
// four warps have roles, and hand tiles on through barriers:
//
//   - the first groups, one a slice, keep the states and finish the outputs;
//   - the next computes C B^T, which all heads of a group share, and from it M;
//   - of the last, some warps copy tiles of x, B and C to shared memory, and
//     one a head makes the factors of a tile's decays, for all others.
//
// Elsewhere products are those of a warp (mma.sync), and all warps are alike:
// four have a slice, and each its share of copies and of squares of 16 x 16 of
// C B^T. Two barriers of the block a tile, when its copies are there and when M
// is, are all there is between them.
//
// The weights of M are powers of differences, so that nothing overflows: for
// two tokens of the same 16 computed for each pair, else by two factors that
// meet at the first of the later token's 16.
//
// Cut into segments, a first kernel computes each segment's own state at its
// end, the first one's from the initial state; the second starts each from the
// sum of what its predecessors leave, as far back as their decays are not 0.
// The first walks backwards, as then the decay to the segment's end is known
// for every token.
//
//===----------------------------------------------------------------------===//

#include "GPULowering.h"
#include "WarpGroup.h"
#include "corey/Conversion/SSMToGPU/SSMToGPU.h"

using namespace mlir;
using namespace corey;
using namespace corey::ssm;

namespace {
/// Tokens of a tile, channels of a slice, lanes.
constexpr int64_t kTokens = 64, kSlice = 64, kWarp = 32, kGroup = 128;
/// Squares of 16 x 16 of M that are not all above the diagonal.
constexpr int64_t kSquare = 16, kSquares = 10;
/// The axis of tokens of x, z and y, counted from the end.
constexpr int64_t kTokenAxis = 3;

/// Where a tile's rows of C, and with them the rows of M and the columns of
/// Y^T, lie: in eights, one from the start and one from the end by turns. A
/// warp has two eights of M, which below the diagonal has as much of any such
/// pair.
constexpr int64_t tokensAt(int64_t eight) {
  return eight % 2 ? 7 - eight / 2 : eight / 2;
}
constexpr int64_t eightOf(int64_t tokens) {
  return tokens < 4 ? 2 * tokens : 15 - 2 * tokens;
}

/// Offsets, in 4-byte words, into what a tile's decays come to.
struct Factors {
  static constexpr int64_t
      // cs, 2^(cs - cs of the first of its 16 tokens), 2^cs, dt.
      kSum = 0,
      kRow = 64, kPower = 128, kStep = 192,
      // For the tokens from 16, 32 and 48: 2^(cs of that - cs) dt.
      kColumn = 256,
      // 2^(cs_l - cs) dt, two tokens a word in the type of x; 2^cs_l.
      kState = 448, kDecay = 480, kBytes = 2048;
};

struct SSDTensorTiling {
  int64_t channels, states;
  /// Warp groups have roles, for products of groups.
  bool hasRoles;
  /// Groups of four warps with states, and slices of a head.
  int64_t units, slices;
  int64_t stages, statesStages;
  /// Registers of a thread: as the kernel starts, and of each role.
  int64_t entryRegisters = 0, unitRegisters = 0, weightRegisters = 0,
          helperRegisters = 0;

  SSDTensorTiling(const ChipFeatures &chip, int64_t headsOfGroup,
                  int64_t channels, int64_t states)
      : channels(channels), states(states), hasRoles(chip.hasWarpGroups),
        units(states <= 128 ? 2 : 1),
        slices(llvm::divideCeil(channels, kSlice)) {
    constexpr int64_t kReserve = 2 << 10;
    int64_t room = chip.sharedBytes - kReserve;
    if (hasRoles)
      fitRoles(room);
    else
      fitAlike(room, headsOfGroup);
  }

  /// Whether it fits a multiprocessor at all.
  bool fits() const { return stages >= 2; }

private:
  static constexpr int64_t kFile = 64 << 10;

  void fitRoles(int64_t room) {
    room -= units * outputBytes();
    stages = std::min<int64_t>(
        room / (stageBytes() + heads() * (weightBytes() + Factors::kBytes)), 4);
    statesStages = std::min<int64_t>(
        room / (statesStageBytes() + heads() * Factors::kBytes), 6);
    // The file of 64 K registers is dealt out in eights to a block's threads;
    // roles trade within that.
    constexpr int64_t kMost = 240;
    entryRegisters = kFile / threads() / 8 * 8;
    weightRegisters = units == 2 ? 88 : 120;
    helperRegisters = units == 2 ? 56 : 104;
    int64_t left =
        entryRegisters * (units + 2) - weightRegisters - helperRegisters;
    unitRegisters = std::min(left / units / 8 * 8, kMost);
    // What a unit holds at a time: states, outputs, operands of one product,
    // and what addresses and loops need.
    constexpr int64_t kOther = 48;
    int64_t needed =
        states / 2 + kTokens / 2 + std::min<int64_t>(states, 128) / 4 + kOther;
    if (needed > unitRegisters)
      stages = 0;
  }

  /// Units of a block share B, C and C B^T, and have the tensor cores work
  /// while one of them waits; there should be none without a head.
  void fitAlike(int64_t room, int64_t headsOfGroup) {
    // States, outputs, operands of one product and addresses.
    constexpr int64_t kOther = 48, kMost = 255;
    int64_t needed = states / 2 + kTokens / 2 + kOther;
    int64_t best = 0, leastWork = 0;
    auto setStages = [&] {
      stages = std::min<int64_t>((room - heads() * weightBytes()) /
                                     (stageBytes() + heads() * Factors::kBytes),
                                 3);
      statesStages = std::min<int64_t>(
          room / (statesStageBytes() + heads() * Factors::kBytes), 4);
    };
    for (units = 4; units >= 1; --units) {
      setStages();
      if (!fits() || units % std::min(units, slices) ||
          needed > std::min(kFile / threads() / 8 * 8, kMost))
        continue;
      // What a tile takes besides its units is about what one of them takes.
      int64_t work =
          llvm::divideCeil(headsOfGroup * slices, units) * (units + 1);
      if (!best || work < leastWork) {
        best = units;
        leastWork = work;
      }
    }
    units = best ? best : 1;
    setStages();
  }

public:
  /// Whether one block has several heads; else it has slices of one.
  int64_t heads() const { return std::max<int64_t>(units / slices, 1); }
  /// Blocks that share a head.
  int64_t blocksPerHead() const { return std::max<int64_t>(slices / units, 1); }
  int64_t panels() const { return llvm::divideCeil(states, Tile::kColumns); }
  /// Bytes of a tile of B or C.
  int64_t stateBytes() const { return panels() * Tile::bytes(kTokens); }
  int64_t inputBytes() const { return Tile::bytes(kTokens); }
  int64_t weightBytes() const { return Tile::bytes(kTokens); }
  int64_t outputBytes() const { return Tile::bytes(kTokens); }
  int64_t stageBytes() const { return 2 * stateBytes() + units * inputBytes(); }
  int64_t statesStageBytes() const {
    return stateBytes() + units * inputBytes();
  }
  int64_t threads() const { return (units + (hasRoles ? 2 : 0)) * kGroup; }
  int64_t statesThreads() const {
    return (units + (hasRoles ? 1 : 0)) * kGroup;
  }
  /// Warps of the last group that copy.
  int64_t copiers() const { return 4 - heads(); }
  /// Products of S: columns of each.
  SmallVector<int64_t> pieces() const {
    SmallVector<int64_t> list;
    for (int64_t n = 0; n < states; n += 128)
      list.push_back(std::min<int64_t>(states - n, 128));
    return list;
  }
};

/// A stage of a ring, and the parity of its phase.
struct Turn {
  Turn(ArrayRef<Val> values)
      : stage(values[0]), phase(values[1]), number(values[2]) {}
  Vals values() const { return {stage, phase, number}; }
  /// The last counts turns.
  Val stage, phase, number;
};

class SSDTensorKernels {
public:
  SSDTensorKernels(GPULowering &e, SSDOp op, const DeviceSequences &sequences,
                   Value y, const StateBuffers &buffers)
      : e(e), op(op),
        heads(cast<RankedTensorType>(op.getX().getType()).getDimSize(2)),
        groups(cast<RankedTensorType>(op.getB().getType()).getDimSize(2)),
        t(e.target.chip, heads / groups,
          cast<RankedTensorType>(op.getX().getType()).getDimSize(3),
          cast<RankedTensorType>(op.getB().getType()).getDimSize(3)),
        element(cast<RankedTensorType>(op.getX().getType()).getElementType()),
        sequences(sequences), y(y), buffers(buffers) {}

  void emit(Value chunk) {
    most = e.max(e.ceilDiv(sequences.length, e.index(kTokens)), e.index(1));
    tiles = most;
    segments = e.index(1);
    if (chunk) {
      tiles =
          e.min(e.max(e.ceilDiv(chunk, e.index(kTokens)), e.index(1)), most);
      segments = e.ceilDiv(most, tiles);
    }
    Value isSplit = e.cmp(arith::CmpIPredicate::sgt, segments, e.index(1));
    auto select = [&](Value condition, Value then, Value otherwise) {
      return e.host.createOrFold<arith::SelectOp>(e.loc, condition, then,
                                                  otherwise);
    };
    // Where the last of several waves of blocks would leave much of the device
    // idle all tiles are dealt out evenly; what that costs takes as long as
    // some tiles do.
    constexpr int64_t kDealTiles = 8;
    Value blocks = e.mul(sequences.count, blocksPerSegment());
    Value units = e.index(e.target.multiprocessors);
    Value inWaves = e.mul(e.ceilDiv(blocks, units), most);
    Value dealt =
        e.add(e.ceilDiv(e.mul(blocks, most), units), e.index(kDealTiles));
    Value deals = e.host.createOrFold<arith::AndIOp>(
        e.loc, e.cmp(arith::CmpIPredicate::sgt, blocks, units),
        e.cmp(arith::CmpIPredicate::sgt, inWaves, dealt));
    workers = select(isSplit, e.index(0), select(deals, units, e.index(0)));
    // Of all segments but the last, and what the first starts from; or what
    // workers hand on.
    Value kept =
        e.host.createOrFold<arith::SubIOp>(e.loc, segments, e.index(1));
    Type f32 = e.host.getF32Type();
    Value rooms = buffers.slots ? select(isSplit, segments, kept) : kept;
    segmentStates =
        e.workspace({sequences.count, rooms, e.index(heads * t.slices),
                     e.index(t.states * kSlice)},
                    f32);
    segmentSums = e.workspace({sequences.count, kept, e.index(heads)}, f32);
    handedStates = e.workspace(
        {workers, e.index(t.units), e.index(t.states * kSlice)}, f32);
    handedFlags = e.workspace({workers, e.index(t.units)}, e.host.getI32Type());
    if (chunk)
      e.ifThen(isSplit, [&] { emitKernel(/*isStates=*/true, kept); });
    e.ifThen(e.cmp(arith::CmpIPredicate::sgt, workers, e.index(0)),
             [&] { emitReset(); });
    emitKernel(/*isStates=*/false, segments);
  }

private:
  void emitKernel(bool isStates, Value segmentCount);
  void emitReset();
  /// Blocks of threads for all heads.
  int64_t blocksPerSegment() const {
    return groups * blocksPerGroup() * t.blocksPerHead();
  }
  int64_t blocksPerGroup() const {
    return llvm::divideCeil(heads / groups, t.heads());
  }

  GPULowering &e;
  SSDOp op;
  int64_t heads, groups;
  SSDTensorTiling t;
  Type element;
  const DeviceSequences &sequences;
  Value y;
  StateBuffers buffers;
  /// Tiles of a segment, segments, and what the first kernel leaves: f32,
  /// [sequences, segments - 1, slices of heads, states x 64] in the order of
  /// the registers, and [sequences, segments - 1, heads], exponents. One more
  /// of the former has the initial states if the second kernel may write over
  /// them.
  Value tiles, segments, segmentStates, segmentSums;
  /// Tiles of the longest sequence that there can be. Blocks of threads that
  /// all tiles are dealt out to, 0 where each has its segment; what each hands
  /// to the next, in the order of the registers, and whether it is there.
  Value most, workers, handedStates, handedFlags;
};
} // namespace

/// Nothing is handed on yet.
void SSDTensorKernels::emitReset() {
  KernelBuilder k(e.host, e.loc, e.kernels, "ssd_reset", {kGroup, 0});
  DeviceTensor flags(e, k, handedFlags);
  Val index = k.blockIdx('x') * double(kGroup) + k.threadIdx();
  Value count = e.mul(workers, t.units);
  k.ifThen(index < k.i32Argument(count),
           [&] { k.store(k.i32(0), flags.at({k.i32(0)}, index)); });
  k.launch({e.ceilDiv(count, e.index(kGroup)), {}, {}});
}

void SSDTensorKernels::emitKernel(bool isStates, Value segmentCount) {
  bool isDecay = static_cast<bool>(op.getDecay());
  int64_t stages = isStates ? t.statesStages : t.stages;
  int64_t stageBytes = isStates ? t.statesStageBytes() : t.stageBytes();
  KernelBuilder k(e.host, e.loc, e.kernels,
                  isStates ? "ssd_segment_states" : "ssd_tensor",
                  {isStates ? t.statesThreads() : t.threads(), 1});
  // Loaded one element at a time.
  InputStream dt(e, k, isDecay ? op.getDecay() : op.getDt());
  DeviceTensor x(e, k, e.buffer(op.getX())), B(e, k, e.buffer(op.getB()));
  DeviceTensor A(e, k, e.buffer(op.getA()));
  DeviceTensor bias(e, k, isDecay ? Value() : e.buffer(op.getDtBias()));
  DeviceTensor states(e, k, segmentStates), sums(e, k, segmentSums);
  DeviceTensor initial(e, k, buffers.initial);
  DeviceSlots slots(e, k, buffers);
  DeviceTensor C, D, final, plainOutput, handed, flags;
  InputStream z;
  OutputStream output;
  if (!isStates) {
    C = DeviceTensor(e, k, e.buffer(op.getC()));
    D = DeviceTensor(e, k, e.buffer(op.getD()));
    final = DeviceTensor(e, k, buffers.last);
    handed = DeviceTensor(e, k, handedStates);
    flags = DeviceTensor(e, k, handedFlags);
    z = InputStream(e, k, op.getZ());
    output = OutputStream(e, k, y);
    plainOutput = DeviceTensor(e, k, y);
  }
  // A pool of states is updated where it lies.
  bool mayOverwrite = static_cast<bool>(buffers.slots);
  // What is left to do when the outputs come out of the tensor cores.
  bool hasChannelSkip = D && D.rank() == 2;
  bool isPlain = !isStates && !op.getZ() && !hasChannelSkip &&
                 !e.hasEpilogue() && plainOutput.element == element;

  // Shared memory.
  constexpr int64_t kAlign = Tile::kAlignment;
  Val ring = k.shared(stages * stageBytes, kAlign);
  Val weightsMemory, outputsMemory;
  if (!isStates) {
    weightsMemory = k.shared(
        (t.hasRoles ? stages : 1) * t.heads() * t.weightBytes(), kAlign);
    if (t.hasRoles)
      outputsMemory = k.shared(t.units * t.outputBytes(), kAlign);
  }
  Val factorsMemory = k.shared(stages * t.heads() * Factors::kBytes);
  Val barriers;
  if (t.hasRoles)
    barriers = sharedAddress(k, k.shared(4 * stages * kBarrierBytes));
  Val ringAddress = sharedAddress(k, ring);
  auto barrier = [&](int64_t kind, Val stage) {
    return barriers + (stage + double(kind * stages)) * double(kBarrierBytes);
  };
  // Of a stage: tiles are there, factors are, M is, all have been read.
  auto full = [&](Val stage) { return barrier(0, stage); };
  auto factored = [&](Val stage) { return barrier(1, stage); };
  auto weighted = [&](Val stage) { return barrier(2, stage); };
  auto empty = [&](Val stage) { return barrier(3, stage); };
  auto stageAt = [&](Val stage) {
    return ringAddress + stage * double(stageBytes);
  };
  auto factorsAt = [&](Val stage, Val head) {
    return k.offset(factorsMemory, (stage * double(t.heads()) + head) *
                                       double(Factors::kBytes));
  };
  int64_t inputsOffset = (isStates ? 1 : 2) * t.stateBytes();

  Val thread = k.threadIdx(), lane = k.lane();
  Val group = k.warp() >> 2, warp = k.warp() & 3;
  Val g8 = lane >> 2, t4 = lane & 3;
  if (t.hasRoles) {
    k.ifThen(thread == 0.0, [&] {
      for (int64_t s = 0; s < stages; ++s) {
        Val stage = k.i32(s);
        initBarrier(k, full(stage), kWarp * t.copiers());
        initBarrier(k, factored(stage), kWarp * t.heads());
        initBarrier(k, weighted(stage), 4);
        initBarrier(k, empty(stage), 4 * t.units);
      }
      fenceBarriers(k);
    });
    k.syncBlock();
  }
  // The second kernel needs of the first only what units start from, and what
  // came before the first has ended when any block of the second comes up.
  bool overlaps = e.target.chip.hasDependentLaunches;
  auto waitForStates = [&] {
    if (overlaps && !isStates)
      k.ifThen(k.i32Argument(segments) > 1.0, [&] { k.waitForPredecessors(); });
  };
  if (overlaps && isStates) {
    k.waitForPredecessors();
    k.launchDependents();
  } else if (overlaps) {
    k.launchDependents();
    k.ifThen(k.i32Argument(segments) == 1.0, [&] { k.waitForPredecessors(); });
  }

  // A block of threads has a segment, or its share of all tiles: from some way
  // into what one would walk to some way into another. It starts with the last,
  // whose end it hands on, and ends with the first, which the one before it has
  // begun with: nobody waits.
  struct Item {
    Val sequence, block, segment, begin, end;
  };
  int64_t perSegment = blocksPerSegment(), perGroup = blocksPerGroup();
  Val worker = k.blockIdx('x');
  Val isShared = isStates ? k.boolean(false) : k.i32Argument(workers) > 0.0;
  Vals share{k.i64(0), k.i64(0), k.i32(1)};
  if (!isStates)
    share = k.ifValues(
        isShared,
        [&]() -> Vals {
          Val n = k.i64Argument(most);
          Val all = k.i64Argument(sequences.count) * double(perSegment) * n;
          auto start = [&](Val of) {
            return k.toI64(of) * all / k.i64Argument(workers);
          };
          Val low = start(worker), high = start(worker + 1.0);
          return {low, high, k.toI32((high - 1.0) / n - low / n) + 1.0};
        },
        [&]() -> Vals { return share; });
  auto itemAt = [&](Val number) {
    auto own = [&]() -> Vals {
      Val segment = worker / double(perSegment);
      Val begin = segment * k.i32Argument(tiles);
      return {rowOfBlock(k), worker % perSegment, segment, begin,
              begin + k.i32Argument(tiles)};
    };
    if (isStates) {
      Vals v = own();
      return Item{v[0], v[1], v[2], v[3], v[4]};
    }
    Vals v = k.ifValues(
        isShared,
        [&]() -> Vals {
          Val n = k.i64Argument(most);
          Val place = (share[1] - 1.0) / n - k.toI64(number);
          Val first = place * n;
          Val begin = k.max(share[0] - first, k.i64(0));
          Val end = k.min(share[1] - first, n);
          Val place32 = k.toI32(place);
          return {place32 / double(perSegment), place32 % perSegment, k.i32(0),
                  k.toI32(begin), k.toI32(end)};
        },
        own);
    return Item{v[0], v[1], v[2], v[3], v[4]};
  };

  enum class Role { Copy, Factor, Weigh, Keep };
  /// What `role` does of an item; `index` tells the copiers, heads and units of
  /// a block apart.
  auto walk = [&](Role role, const Item &item, int64_t copier, Val index,
                  Turn &current) {
    Val sequence = item.sequence, block = item.block, segment = item.segment;
    Val headBlock = block / double(t.blocksPerHead());
    Val groupIndex = headBlock / double(perGroup);
    Val firstHead = groupIndex * double(heads / groups) +
                    (headBlock % perGroup) * double(t.heads());
    Val headEnd = (groupIndex + 1.0) * double(heads / groups);
    auto headOf = [&](Val index) {
      return k.min(firstHead + index, headEnd - 1.0);
    };
    /// The head of the block that a unit works on, and the slice of it.
    auto indexOfUnit = [&](Val unit) {
      if (t.slices == 1)
        return unit;
      return t.heads() == 1 ? k.i32(0) : unit / double(t.slices);
    };
    auto sliceOfUnit = [&](Val unit) {
      if (t.slices == 1)
        return k.i32(0);
      if (t.heads() > 1)
        return unit % t.slices;
      return (block % t.blocksPerHead()) * double(t.units) + unit;
    };
    DeviceSequences::Range range = sequences.range(k, sequence);
    Val batch64 = k.toI64(range.batch), row0 = k.toI64(range.begin);
    Val length = range.length;
    Val tileCount = (length + double(kTokens - 1)) / double(kTokens);
    Val firstTile = k.min(item.begin, tileCount);
    Val endTile = k.min(item.end, tileCount);
    // Of the last segment no state is needed; nothing of those that a shorter
    // sequence does not have.
    Val count = endTile - firstTile;
    if (isStates)
      count = k.select(item.end < tileCount, count, k.i32(0));
    /// The tile that is walked at step `i`.
    auto tileAt = [&](Val i) {
      return isStates ? endTile - 1.0 - i : firstTile + i;
    };
    /// Runs `body` for every tile; stages and phases go round.
    auto forTiles =
        [&](ArrayRef<Val> inits,
            llvm::function_ref<Vals(Val, Turn, ArrayRef<Val>)> body) {
          Vals all(inits);
          llvm::append_range(all, current.values());
          Vals out = k.forLoop(
              k.i32(0), count, 1, all, [&](Val i, ArrayRef<Val> in) -> Vals {
                Turn turn(in.drop_front(inits.size()));
                Vals next = body(i, turn, in.take_front(inits.size()));
                Val wraps = turn.stage == double(stages - 1);
                next.push_back(k.select(wraps, k.i32(0), turn.stage + 1.0));
                next.push_back(k.select(wraps, turn.phase ^ 1, turn.phase));
                next.push_back(turn.number + 1.0);
                return next;
              });
          current = Turn(ArrayRef(out).drop_front(inits.size()));
          out.resize(inits.size());
          return out;
        };
    /// Waits until a stage may be written again.
    auto waitForRoom = [&](Turn turn) {
      k.ifThen(turn.number >= double(stages),
               [&] { waitBarrier(k, empty(turn.stage), turn.phase ^ 1); });
    };

    //===--- Copies
    //-----------------------------------------------------------===//

    // Lanes take a piece each of four rows at a time.
    Val piece = lane & 7, row = lane >> 3;
    struct Source {
      Val pointer, rowStride;
      int64_t offset = 0;
      // Pieces that a row has: others are left as they are, or zero.
      Val isThere;
      bool fills = false, isReordered = false;
    };
    /// All there is to copy of a tile, by tiles of 64 columns.
    auto forSources =
        [&](llvm::function_ref<void(llvm::function_ref<Source()>)> add) {
          auto addStates = [&](const DeviceTensor &tensor, int64_t offset,
                               bool isReordered) {
            for (int64_t panel = 0; panel < t.panels(); ++panel)
              add([&] {
                int64_t first = panel * Tile::kColumns;
                int64_t columns = std::min(t.states - first, Tile::kColumns);
                Val at = k.min(piece * 8.0, k.i32(columns - 8)) + double(first);
                Source source;
                source.pointer =
                    tensor.at({batch64, row0 + k.toI64(row), groupIndex}, at);
                source.rowStride = tensor.stride(1);
                source.offset = offset + panel * Tile::bytes(kTokens);
                source.isReordered = isReordered;
                if (columns < Tile::kColumns)
                  source.isThere = piece < double(columns / 8);
                return source;
              });
          };
          addStates(B, 0, false);
          for (int64_t unit = 0; unit < t.units; ++unit)
            add([&] {
              Val channel =
                  sliceOfUnit(k.i32(unit)) * double(kSlice) + piece * 8.0;
              Source source;
              source.pointer = x.at({batch64, row0 + k.toI64(row),
                                     headOf(indexOfUnit(k.i32(unit)))},
                                    k.min(channel, k.i32(t.channels - 8)));
              source.rowStride = x.stride(1);
              source.offset = inputsOffset + unit * t.inputBytes();
              source.fills = true;
              if (t.channels % kSlice)
                source.isThere = channel < double(t.channels);
              return source;
            });
          if (!isStates)
            addStates(C, t.stateBytes(), t.hasRoles);
        };
    // Where a row's piece goes: rows are four apart, and so every second has
    // the same permutation.
    Val within = row * double(Tile::kRowBytes);
    Val even = within + ((piece ^ row) << 4);
    Val odd = within + ((piece ^ (row + 4.0)) << 4);
    auto copyRows = [&](const Source &source, Val stage, Val token, Val row,
                        int64_t count, bool isWhole) {
      Val pointer = k.offset(source.pointer, k.toI64(token) * source.rowStride);
      auto rows = [&] {
        Val next = pointer;
        for (int64_t r = 0; r < count; r += 4) {
          // One after another: all at once take registers.
          Val bytes, there, from = next;
          next = k.offset(next, source.rowStride * 4.0);
          if (!isWhole)
            there = token + row + double(r) < length;
          if (source.fills && source.isThere)
            there = there ? there & source.isThere : source.isThere;
          if (there) {
            bytes = k.select(there, k.i32(16), k.i32(0));
            from = k.select(there, from, source.pointer);
          }
          int64_t at = r;
          if (source.isReordered)
            at = 8 * eightOf(r / 8) + r % 8;
          copyAsync16(k, stage + (r % 8 ? odd : even),
                      source.offset + at * Tile::kRowBytes, from, bytes);
        }
      };
      if (source.isThere && !source.fills)
        k.ifThen(source.isThere, rows);
      else
        rows();
    };
    auto copy = [&](int64_t copier) {
      SmallVector<Source> sources;
      int64_t number = 0;
      forSources([&](llvm::function_ref<Source()> make) {
        if (number++ % t.copiers() == copier)
          sources.push_back(make());
      });
      forTiles({}, [&](Val i, Turn turn, ArrayRef<Val>) -> Vals {
        waitForRoom(turn);
        Val stage = stageAt(turn.stage);
        Val token = tileAt(i) * double(kTokens);
        auto copyAll = [&](bool isWhole) {
          for (const Source &source : sources)
            copyRows(source, stage, token, row, kTokens, isWhole);
        };
        k.ifElse(
            token + double(kTokens) <= length, [&] { copyAll(true); },
            [&] { copyAll(false); });
        arriveWithCopies(k, full(turn.stage));
        return {};
      });
    };
    /// What a warp copies where all are alike: rows from `row`, to `to` bytes
    /// into the stage.
    struct Share {
      Source source;
      Val to, row, isAny;
    };
    int64_t warps = 4 * t.units, rowsOfShare = kTokens;
    auto sharesOfWarp = [&] {
      SmallVector<Source> sources;
      forSources([&](llvm::function_ref<Source()> make) {
        sources.push_back(make());
      });
      auto number = static_cast<int64_t>(sources.size());
      int64_t parts = 2 * number <= warps ? 2 : 1;
      rowsOfShare = kTokens / parts;
      bool isPartial = llvm::any_of(
          sources, [](const Source &s) { return bool(s.isThere); });
      SmallVector<Share> shares;
      for (int64_t first = 0; first < parts * number; first += warps) {
        Val part = k.warp() + double(first), index = part / double(parts);
        Share share{{}, {}, row, {}};
        Source &own = share.source;
        auto pick = [&](Val &chosen, Val other, int64_t i) {
          chosen = i ? k.select(index == double(i), other, chosen) : other;
        };
        for (int64_t i = 0; i < number; ++i) {
          const Source &other = sources[i];
          pick(own.pointer, other.pointer, i);
          pick(own.rowStride, other.rowStride, i);
          pick(share.to, k.i32(other.offset), i);
          if (isPartial)
            pick(own.isThere, other.isThere ? other.isThere : k.boolean(true),
                 i);
        }
        own.fills = true;
        if (parts > 1) {
          Val rows = (part % parts) * double(rowsOfShare);
          own.pointer = k.offset(own.pointer, k.toI64(rows) * own.rowStride);
          share.to = share.to + rows * double(Tile::kRowBytes);
          share.row = row + rows;
        }
        if (first + warps > parts * number)
          share.isAny = part < double(parts * number);
        shares.push_back(share);
      }
      return shares;
    };
    /// Starts a warp's copies for step `i`, if there is one: a group of them in
    /// any case.
    auto startCopies = [&](ArrayRef<Share> shares, Val i, Val to) {
      k.ifThen(i < count, [&] {
        Val stage = stageAt(to);
        Val token = tileAt(i) * double(kTokens);
        auto copyAll = [&](bool isWhole) {
          for (const Share &share : shares) {
            auto rows = [&] {
              copyRows(share.source, stage + share.to, token, share.row,
                       rowsOfShare, isWhole);
            };
            if (share.isAny)
              k.ifThen(share.isAny, rows);
            else
              rows();
          }
        };
        k.ifElse(
            token + double(kTokens) <= length, [&] { copyAll(true); },
            [&] { copyAll(false); });
      });
      commitCopies(k);
    };

    //===--- Factors
    //----------------------------------------------------------===//

    /// What makes a head's factors, tile by tile.
    struct HeadDecays {
      Val index, head;
      Cursor dtRow;
      Val rate, shift;
    };
    auto decaysOf = [&](Val headIndex) {
      Val head = headOf(headIndex);
      Cursor dtRow = dt.at({batch64, row0}, head);
      Val rate = A ? A.loadScalar({}, head) * kLog2E : Val();
      Val shift = bias ? bias.loadScalar({}, head) : Val();
      return HeadDecays{headIndex, head, dtRow, rate, shift};
    };
    /// Loads what the tile of step `i` needs, if there is one. A lane has two
    /// tokens.
    auto loadSteps = [&](const HeadDecays &h, Val i) {
      return k.loadIf(i < count, [&] {
        Val token = tileAt(i) * double(kTokens) + lane * 2.0;
        Vals loaded;
        for (int64_t j = 0; j < 2; ++j)
          llvm::append_range(
              loaded,
              dt.load(dt.moved(h.dtRow, k.min(token + double(j), length - 1.0)),
                      1));
        return loaded;
      });
    };
    /// Writes the factors of that tile, when `makeRoom` returns; `total` has
    /// the exponents of tiles before, and those after are returned.
    auto makeFactors = [&](const HeadDecays &h, Val i, ArrayRef<Val> loaded,
                           Val total, llvm::function_ref<Val()> makeRoom) {
      Val steps[2], exponents[2];
      for (int64_t j = 0; j < 2; ++j) {
        Val raw = dt.values(loaded.take_front(dt.numLoaded()), 1)[0];
        loaded = loaded.drop_front(dt.numLoaded());
        SSDDecay decay = ssdDecay(k, op, raw, h.rate, h.shift);
        // A token that is not there leaves the state as it is.
        Val there =
            tileAt(i) * double(kTokens) + lane * 2.0 + double(j) < length;
        steps[j] = k.select(there, decay.step, k.f32(0));
        exponents[j] = k.select(there, decay.exponent, k.f32(0));
      }
      Val sum = exponents[0] + exponents[1];
      for (int64_t delta = 1; delta < kWarp; delta *= 2)
        sum =
            k.select(lane >= double(delta), sum + k.shuffleUp(sum, delta), sum);
      Val before = k.shuffleUp(sum, 1);
      Val cs[2] = {k.select(lane == 0.0, k.f32(0), before) + exponents[0], sum};
      Val last = k.shuffleIndex(sum, k.i32(kWarp - 1));
      Val to = makeRoom();
      auto put = [&](int64_t offset, llvm::function_ref<Val(int64_t)> make) {
        k.store(k.vector({make(0), make(1)}),
                k.offset(k.offset(to, 4 * offset), lane * 8.0));
      };
      auto putState = [&](Val toEnd) {
        Vals weights;
        for (int64_t j = 0; j < 2; ++j)
          weights.push_back(k.ex2(toEnd - cs[j]) * steps[j]);
        k.store(k.pack(weights, element),
                k.offset(k.offset(to, 4 * Factors::kState), lane * 4.0));
      };
      if (isStates) {
        // To the end of the segment; the last is of all of it.
        putState(total + last);
        k.ifThen(lane == 0.0, [&] {
          k.store(k.ex2(total + last), k.offset(to, 4 * Factors::kDecay));
        });
      } else {
        // The first token of the square of 16.
        Val anchor = k.shuffleIndex(cs[0], lane & 24);
        put(Factors::kSum, [&](int64_t j) { return cs[j]; });
        put(Factors::kRow, [&](int64_t j) { return k.ex2(cs[j] - anchor); });
        put(Factors::kPower, [&](int64_t j) { return k.ex2(cs[j]); });
        put(Factors::kStep, [&](int64_t j) { return steps[j]; });
        for (int64_t square = 1; square < 4; ++square) {
          Val start = k.shuffleIndex(cs[0], k.i32(8 * square));
          put(Factors::kColumn + 64 * (square - 1),
              [&](int64_t j) { return k.ex2(start - cs[j]) * steps[j]; });
        }
        putState(last);
        k.ifThen(lane == 0.0, [&] {
          k.store(k.ex2(last), k.offset(to, 4 * Factors::kDecay));
        });
      }
      return total + last;
    };
    /// Of a segment's state the second kernel needs how far it decays.
    auto storeSum = [&](const HeadDecays &h, Val total) {
      if (isStates)
        k.ifThen((lane == 0.0) & (count > 0.0) &
                     (firstHead + h.index < headEnd),
                 [&] { k.store(total, sums.at({sequence, segment}, h.head)); });
    };
    auto factor = [&](Val headIndex) {
      HeadDecays decays = decaysOf(headIndex);
      Vals inits{k.f32(0)};
      llvm::append_range(inits, loadSteps(decays, k.i32(0)));
      Vals end =
          forTiles(inits, [&](Val i, Turn turn, ArrayRef<Val> in) -> Vals {
            Vals next = loadSteps(decays, i + 1.0);
            Vals out{makeFactors(decays, i, in.drop_front(), in[0], [&] {
              waitForRoom(turn);
              return factorsAt(turn.stage, headIndex);
            })};
            // Every lane arrives for what it wrote. One lane for its warp,
            // behind a __syncwarp, would be as right and is no faster; but
            // compute-sanitizer's racecheck follows only the lane that arrives,
            // and reports what the other 31 wrote.
            arrive(k, factored(turn.stage));
            llvm::append_range(out, next);
            return out;
          });
      storeSum(decays, end[0]);
    };

    //===--- Weights
    //----------------------------------------------------------===//

    auto loadSkips = [&] {
      Vals skips;
      for (int64_t h = 0; D && !hasChannelSkip && h < t.heads(); ++h)
        skips.push_back(D.loadScalar({}, headOf(k.i32(h))));
      return skips;
    };
    /// A pair of numbers of what a tile's decays come to.
    auto loadPair = [&](Val from, int64_t words) {
      return k.unpack(
          k.load(k.offset(from, 4 * words), k.packedType(k.f32Type(), 2)),
          k.f32Type(), 2);
    };
    /// Two products of an eight on the diagonal with their weights.
    auto weighDiagonal = [&](Vals &values, const Vals &skips, int64_t h) {
      for (int64_t c = 0; c < 2; ++c) {
        Val column = t4 * 2.0 + double(c);
        values[c] = k.select(column <= g8, values[c], k.f32(0));
        if (!skips.empty())
          values[c] = k.select(column == g8, values[c] + skips[h], values[c]);
      }
    };
    auto weigh = [&] {
      Val memory = sharedAddress(k, weightsMemory);
      Vals skips = loadSkips();
      /// The rows of warp `w`, eights of tokens w and 7 - w, of M for all
      /// heads.
      auto weighRows = [&](Turn turn, ArrayRef<Val> products, int64_t w) {
        for (int64_t h = 0; h < t.heads(); ++h) {
          Val f = factorsAt(turn.stage, k.i32(h));
          Val rowsFrom = k.offset(f, g8 * 4.0),
              columnsFrom = k.offset(f, t4 * 8.0);
          // Everything is loaded before anything is stored: stores keep loads
          // from moving up.
          struct Eight {
            int64_t half, rows, columns;
            Vals values;
          };
          SmallVector<Eight> eights;
          for (int64_t half = 0; half < 2; ++half) {
            int64_t rows = tokensAt(2 * w + half);
            Val sum = k.load(k.offset(rowsFrom, 4 * (Factors::kSum + 8 * rows)),
                             k.f32Type());
            Val factor;
            if (rows >= 2)
              factor =
                  k.load(k.offset(rowsFrom, 4 * (Factors::kRow + 8 * rows)),
                         k.f32Type());
            for (int64_t columns = 0; columns <= rows; ++columns) {
              ArrayRef<Val> own = products.slice(4 * columns + 2 * half, 2);
              Eight eight{half, rows, columns, {}};
              if (columns / 2 < rows / 2) {
                Vals pair = loadPair(columnsFrom, Factors::kColumn +
                                                      64 * (rows / 2 - 1) +
                                                      8 * columns);
                for (int64_t c = 0; c < 2; ++c)
                  eight.values.push_back(own[c] * (factor * pair[c]));
              } else {
                Vals from = loadPair(columnsFrom, Factors::kSum + 8 * columns);
                Vals steps =
                    loadPair(columnsFrom, Factors::kStep + 8 * columns);
                for (int64_t c = 0; c < 2; ++c)
                  eight.values.push_back(own[c] *
                                         (k.ex2(sum - from[c]) * steps[c]));
                if (columns == rows)
                  weighDiagonal(eight.values, skips, h);
              }
              eights.push_back(std::move(eight));
            }
          }
          // Nine eights: the last twelve slots' rest repeat the last one.
          Val tile = memory + (turn.stage * double(t.heads()) + double(h)) *
                                  double(t.weightBytes());
          Val which = lane >> 3;
          for (size_t first = 0; first < eights.size(); first += 4) {
            Vals words;
            Val row, piece;
            for (size_t j = 0; j < 4; ++j) {
              const Eight &eight =
                  eights[std::min(first + j, eights.size() - 1)];
              words.push_back(k.pack(eight.values, element));
              Val ownRow = k.i32(8 * (2 * w + eight.half));
              Val ownPiece = k.i32(eight.columns);
              row = j ? k.select(which == double(j), ownRow, row) : ownRow;
              piece =
                  j ? k.select(which == double(j), ownPiece, piece) : ownPiece;
            }
            storeMatrices(k, tilePiece(k, tile, row + (lane & 7), piece), words,
                          false);
          }
        }
      };
      forTiles({}, [&](Val, Turn turn, ArrayRef<Val>) -> Vals {
        Val stage = stageAt(turn.stage);
        waitBarrier(k, full(turn.stage), turn.phase);
        fenceForProducts(k);
        Val c = tileDescriptor(k, stage + double(t.stateBytes()), false);
        Val b = tileDescriptor(k, stage, false);
        SmallVector<ProductStep> steps;
        for (int64_t n = 0; n < t.states; n += 16) {
          int64_t offset = n / Tile::kColumns * Tile::bytes(kTokens) +
                           n % Tile::kColumns * 2;
          steps.push_back({{}, {c, offset}, {b, offset}});
        }
        Vals products = startProducts(k, kTokens, steps, {}, element);
        waitBarrier(k, factored(turn.stage), turn.phase);
        products = waitProducts(k, 0, products);
        for (int64_t w = 0; w < 4; ++w)
          k.ifThen(warp == double(w), [&] { weighRows(turn, products, w); });
        fenceForProducts(k);
        k.syncWarp();
        k.ifThen(lane == 0.0, [&] { arrive(k, weighted(turn.stage)); });
        k.syncWarp();
        return {};
      });
    };

    /// The same where warps are alike: their shares of the squares of 16 x 16
    /// that are not all above the diagonal.
    Val rightOf = tilePart(k, k.i32(0), false),
        below = tilePart(k, k.i32(0), true);
    auto weighSquares = [&](Turn turn, const Vals &skips) {
      Val stage = stageAt(turn.stage);
      auto weighSquare = [&](Val number) {
        auto least = [&](int64_t n, int64_t then, Val otherwise) {
          return k.select(number >= double(n), k.i32(then), otherwise);
        };
        Val r = least(6, 3, least(3, 2, least(1, 1, k.i32(0))));
        Val c = number - ((r * (r + 1.0)) >> 1);
        Val rows = stage + double(t.stateBytes()) + below +
                   r * double(Tile::bytes(kSquare));
        Val columns = stage + rightOf + c * double(Tile::bytes(kSquare));
        Vals products(8, k.f32(0));
        for (int64_t n = 0; n < t.states; n += 16)
          addProduct(k, loadPart(k, rows, n, 0, kTokens, false),
                     loadPart(k, columns, n, 0, kTokens, false), products,
                     element);
        for (int64_t h = 0; h < t.heads(); ++h) {
          Val f = factorsAt(turn.stage, k.i32(h));
          Val rowsFrom = k.offset(f, r * double(4 * kSquare) + g8 * 4.0);
          Val columnsFrom = k.offset(f, c * double(4 * kSquare) + t4 * 8.0);
          auto loadOfRow = [&](int64_t words) {
            return k.load(k.offset(rowsFrom, 4 * words), k.f32Type());
          };
          auto own = [&](int64_t half, int64_t eight) {
            return Vals(ArrayRef(products).slice(4 * eight + 2 * half, 2));
          };
          Vals weighed = k.ifValues(
              r == c,
              [&] {
                Vals all;
                for (int64_t half = 0; half < 2; ++half) {
                  Val sum = loadOfRow(Factors::kSum + 8 * half);
                  for (int64_t eight = 0; eight < 2; ++eight) {
                    Vals values(2, k.f32(0));
                    if (eight <= half) {
                      Vals from =
                          loadPair(columnsFrom, Factors::kSum + 8 * eight);
                      Vals steps =
                          loadPair(columnsFrom, Factors::kStep + 8 * eight);
                      values = own(half, eight);
                      for (int64_t i = 0; i < 2; ++i)
                        values[i] =
                            values[i] * (k.ex2(sum - from[i]) * steps[i]);
                    }
                    if (eight == half)
                      weighDiagonal(values, skips, h);
                    llvm::append_range(all, values);
                  }
                }
                return all;
              },
              [&] {
                Vals all;
                Val byRow = k.offset(columnsFrom, (r - 1.0) * double(4 * 64));
                for (int64_t half = 0; half < 2; ++half) {
                  Val factor = loadOfRow(Factors::kRow + 8 * half);
                  for (int64_t eight = 0; eight < 2; ++eight) {
                    Vals pair = loadPair(byRow, Factors::kColumn + 8 * eight);
                    Vals values = own(half, eight);
                    for (int64_t i = 0; i < 2; ++i)
                      values[i] = values[i] * (factor * pair[i]);
                    llvm::append_range(all, values);
                  }
                }
                return all;
              });
          for (int64_t half = 0; half < 2; ++half)
            for (int64_t eight = 0; eight < 2; ++eight) {
              Val at = tilePiece(k, t4 * 4.0,
                                 r * double(kSquare) + g8 + double(8 * half),
                                 c * 2.0 + double(eight));
              k.store(
                  k.pack(ArrayRef(weighed).slice(4 * half + 2 * eight, 2),
                         element),
                  k.offset(k.offset(weightsMemory, h * t.weightBytes()), at));
            }
        }
      };
      for (int64_t first = 0; first < kSquares; first += warps) {
        Val number = k.warp() + double(first);
        if (first + warps <= kSquares)
          weighSquare(number);
        else
          k.ifThen(number < double(kSquares), [&] { weighSquare(number); });
      }
    };

    //===--- States and outputs
    //-----------------------------------------------===//

    auto keep = [&](Val unit) {
      DeviceSlots::Place place = slots.of(k, sequence);
      if (!isStates)
        slots.check(k, place);
      Val headIndex = indexOfUnit(unit);
      Val head = headOf(headIndex);
      Val slice = sliceOfUnit(unit);
      Val isLive = firstHead + headIndex < headEnd;
      Val threadOfGroup = thread & (kGroup - 1);
      SmallVector<int64_t> pieces = t.pieces();
      int64_t held = t.states / 2;
      Vals state(held, k.f32(0));
      // Of the warp's rows.
      Val channel = slice * double(kSlice) + warp * 16.0 + g8;
      auto leading = [&](int64_t half) {
        return Vals{place.row, head,
                    k.min(channel + double(8 * half), k.i32(t.channels - 1))};
      };
      // Where warps are alike they make factors, one a head, and start copies
      // ahead of the tile that they work on.
      SmallVector<Share> shares;
      HeadDecays decays;
      Val makes;
      Vals ahead;
      auto makeAhead = [&](Val i, Val stage, ArrayRef<Val> in) {
        return k.ifValues(
            makes & (i < count),
            [&] {
              Vals out{makeFactors(decays, i, in.drop_front(), in[0], [&] {
                return factorsAt(stage, decays.index);
              })};
              llvm::append_range(out, loadSteps(decays, i + 1.0));
              return out;
            },
            [&] { return Vals(in); });
      };
      /// Waits for a tile; what makeAhead() returns of the next.
      auto beginTile = [&](Val i, Turn turn, ArrayRef<Val> in) {
        waitCopies(k, stages - 2);
        k.syncBlock();
        auto stageAfter = [&](int64_t steps) {
          Val sum = turn.stage + double(steps);
          return k.select(sum >= double(stages), sum - double(stages), sum);
        };
        startCopies(shares, i + double(stages - 1), stageAfter(stages - 1));
        return makeAhead(i + 1.0, stageAfter(1), in);
      };
      if (!t.hasRoles) {
        // What came before is read.
        k.syncBlock();
        current = Turn({k.i32(0), k.i32(0), k.i32(0)});
        shares = sharesOfWarp();
        for (int64_t s = 0; s < stages - 1; ++s)
          startCopies(shares, k.i32(s), k.i32(s));
        // The last warps, as the first have the more squares of M.
        Val fromEnd = double(warps - 1) - k.warp();
        makes = fromEnd < double(t.heads());
        decays = decaysOf(k.min(fromEnd, k.i32(t.heads() - 1)));
        ahead = {k.f32(0)};
        llvm::append_range(ahead, loadSteps(decays, k.i32(0)));
        ahead = makeAhead(k.i32(0), k.i32(0), ahead);
        waitForStates();
      }
      Val own = states.at({sequence, k.i32(0), head * double(t.slices) + slice},
                          threadOfGroup * 4.0);
      auto kept = [&](Val of) {
        return k.offset(own, k.toI64(of) * states.stride(1));
      };
      Val ownHanded;
      if (!isStates)
        ownHanded = handed.at({k.i32(0), unit}, threadOfGroup * 4.0);
      auto handedAt = [&](Val of) {
        return k.offset(ownHanded, k.toI64(of) * handed.stride(0));
      };
      // The registers of all threads, four of each at a time.
      auto loadState = [&](Val from) {
        Vals out;
        for (int64_t r = 0; r < held; r += 4)
          llvm::append_range(out,
                             k.unpack(k.load(k.offset(from, r * 4 * kGroup),
                                             k.packedType(k.f32Type(), 4)),
                                      k.f32Type(), 4));
        return out;
      };
      auto storeState = [&](ArrayRef<Val> values, Val to) {
        for (int64_t r = 0; r < held; r += 4)
          k.store(k.vector(values.slice(r, 4)), k.offset(to, r * 4 * kGroup));
      };
      auto loadInitial = [&] {
        return DeviceSlots::ifThere(k, place, [&] {
          Vals out;
          for (int64_t r = 0; r < held; r += 4)
            for (int64_t half = 0; half < 2; ++half)
              llvm::append_range(
                  out, k.unpack(k.load(initial.at(leading(half),
                                                  t4 * 2.0 + double(2 * r)),
                                       k.packedType(initial.element, 2)),
                                initial.element, 2));
          return out;
        });
      };
      if (!isStates) {
        Val start = segment - 1.0;
        // Beyond a sequence's end nobody has left any, and none is wanted.
        Val before = k.select(count > 0.0, segment, k.i32(0));
        Vals carried(state);
        carried.push_back(k.f32(1));
        carried = k.forLoop(k.i32(0), before, 1, carried,
                            [&](Val i, ArrayRef<Val> in) -> Vals {
                              // What has decayed to nothing brings nothing.
                              return k.ifValues(
                                  in[held] != 0.0,
                                  [&]() -> Vals {
                                    Val of = start - i;
                                    Val scale = in[held];
                                    Vals out = loadState(kept(of));
                                    for (int64_t r = 0; r < held; ++r)
                                      out[r] = k.fma(scale, out[r], in[r]);
                                    Val sum =
                                        k.load(sums.at({sequence, of}, head),
                                               k.f32Type());
                                    out.push_back(scale * k.ex2(sum));
                                    return out;
                                  },
                                  [&]() -> Vals { return Vals(in); });
                            });
        Val scale = carried[held];
        carried.resize(held);
        state = carried;
        if (initial && mayOverwrite) {
          state = k.ifValues(
              (segment == 0.0) & (item.begin == 0.0),
              [&] {
                return k.ifValues(
                    k.i32Argument(segments) == 1.0, loadInitial, [&] {
                      return loadState(kept(k.i32Argument(segments) - 1.0));
                    });
              },
              [&]() -> Vals { return state; });
        } else if (initial) {
          state = k.ifValues((scale != 0.0) &
                                 ((item.begin == 0.0) | (segment > 0.0)),
                             [&] {
                               Vals out = loadInitial();
                               for (int64_t r = 0; r < held; ++r)
                                 out[r] = k.fma(scale, out[r], state[r]);
                               return out;
                             },
                             [&]() -> Vals { return state; });
        }
        // What the worker before this one has begun.
        state = k.ifValues(
            isShared & (item.begin > 0.0) & (count > 0.0),
            [&]() -> Vals {
              Val from = worker - 1.0;
              waitForFlag(k, flags.at({from}, unit), handedAt(from));
              return loadState(handedAt(from));
            },
            [&]() -> Vals { return state; });
      }

      Val staging, stagingMemory;
      if (!isStates && t.hasRoles) {
        stagingMemory = k.offset(outputsMemory, unit * double(t.outputBytes()));
        staging = sharedAddress(k, stagingMemory);
      }
      /// x^T of the warp's channels and 16 tokens as an operand.
      auto loadInputs = [&](Val tile, int64_t token) {
        Val row = ((lane >> 4) << 3) + (lane & 7);
        Val piece = warp * 2.0 + ((lane >> 3) & 1);
        return loadMatrices(k, tilePiece(k, tile, row, piece), true,
                            Tile::bytes(token));
      };
      /// All of a tile times the weights of its tokens in the state.
      auto weighInputs = [&](Val tile, Val f) {
        Vals words;
        for (int64_t j = 0; j < kTokens; j += 16)
          llvm::append_range(words, loadInputs(tile, j));
        Val from = k.offset(k.offset(f, 4 * Factors::kState), t4 * 4.0);
        for (int64_t i = 0; i < 16; i += 2) {
          Val weight = k.load(k.offset(from, 4 * 4 * (i / 2)), k.i32Type());
          for (int64_t j = 0; j < 2; ++j)
            words[i + j] = multiplyPairs(k, words[i + j], weight, element,
                                         /*isFused=*/!t.hasRoles);
        }
        return words;
      };
      /// Starts S += x^T B.
      auto updateState = [&](ArrayRef<Val> inputs, Val stage, ArrayRef<Val> s) {
        Vals out;
        if (!t.hasRoles) {
          llvm::append_range(out, s);
          for (int64_t j = 0; j < kTokens; j += 16)
            for (int64_t n = 0; n < t.states; n += 16)
              addProduct(
                  k, inputs.slice(j / 4, 4),
                  loadPart(k, stage + below, n, Tile::bytes(j), kTokens, true),
                  MutableArrayRef(out).slice(n / 2, 8), element);
          return out;
        }
        Val b = tileDescriptor(k, stage, true);
        int64_t first = 0;
        for (int64_t columns : pieces) {
          SmallVector<ProductStep> steps;
          for (int64_t j = 0; j < kTokens; j += 16)
            steps.push_back({Vals(inputs.slice(j / 4, 4)),
                             {},
                             {b,
                              first / Tile::kColumns * Tile::bytes(kTokens) +
                                  Tile::bytes(j),
                              true}});
          llvm::append_range(out, startProducts(k, columns, steps,
                                                s.slice(first / 2, columns / 2),
                                                element));
          first += columns;
        }
        return out;
      };
      auto release = [&](Turn turn) {
        if (!t.hasRoles)
          return;
        k.syncWarp();
        k.ifThen(lane == 0.0, [&] { arrive(k, empty(turn.stage)); });
      };

      if (isStates) {
        Vals carried(state);
        carried.push_back(k.f32(1));
        llvm::append_range(carried, ahead);
        Vals end =
            forTiles(carried, [&](Val i, Turn turn, ArrayRef<Val> in) -> Vals {
              Val stage = stageAt(turn.stage);
              Val tile =
                  stage + double(inputsOffset) + unit * double(t.inputBytes());
              Vals following;
              if (t.hasRoles) {
                waitBarrier(k, factored(turn.stage), turn.phase);
                waitBarrier(k, full(turn.stage), turn.phase);
                fenceForProducts(k);
              } else {
                following = beginTile(i, turn, in.drop_front(held + 1));
              }
              Val f = factorsAt(turn.stage, headIndex);
              Vals inputs = weighInputs(tile, f);
              Val decay = k.load(k.offset(f, 4 * Factors::kDecay), k.f32Type());
              Vals out = updateState(inputs, stage, in.take_front(held));
              if (t.hasRoles)
                out = waitProducts(k, 0, out);
              release(turn);
              out.push_back(decay);
              llvm::append_range(out, following);
              return out;
            });
        if (!t.hasRoles)
          k.ifThen(makes, [&] { storeSum(decays, end[held + 1]); });
        // Of a sequence of one segment the second kernel still wants what it
        // starts from.
        Val leaves = count > 0.0;
        if (initial && mayOverwrite)
          leaves = leaves | (segment == 0.0);
        k.ifThen(isLive & leaves, [&] {
          Vals left(ArrayRef(end).take_front(held));
          if (initial && mayOverwrite)
            left = k.ifValues(
                segment == 0.0,
                [&] {
                  Vals first = loadInitial(), out;
                  storeState(first, kept(k.i32Argument(segments) - 1.0));
                  for (int64_t r = 0; r < held; ++r)
                    out.push_back(k.fma(end[held], first[r], left[r]));
                  return out;
                },
                [&] { return left; });
          storeState(left, kept(segment));
        });
        return;
      }

      // Where outputs are written: a warp has 16 tokens of all channels, four
      // at a time, so that whole lines go out.
      constexpr int64_t kRows = 4, kWidth = 8;
      Val outputRow = warp * 16.0 + (lane >> 3);
      Val outputChannel = slice * double(kSlice) + (lane & 7) * double(kWidth);
      Val safeChannel = k.min(outputChannel, k.i32(t.channels - kWidth));
      Val writes = isLive;
      if (t.channels % kSlice)
        writes = writes & (outputChannel < double(t.channels));
      Val outputPointer = plainOutput.at(
          {batch64, row0 + k.toI64(outputRow), head}, safeChannel);
      Cursor outputAt = output.at({batch64, row0, head}, safeChannel);
      Cursor gateAt;
      if (z)
        gateAt = z.at({batch64, row0, head}, safeChannel);
      Vals channelSkips;
      if (hasChannelSkip)
        channelSkips = D.elements({head}, safeChannel, kWidth, 1);

      // Barriers of the block have the first numbers.
      auto syncGroup = [&] {
        for (int64_t u = 0; u < t.units; ++u)
          k.ifThen(unit == double(u), [&] { k.syncNamed(2 + u, kGroup); });
      };
      /// Outputs of a tile in its type, two tokens a word.
      auto packOutputs = [&](ArrayRef<Val> sumsOfTile) {
        Vals words;
        for (int64_t j = 0; j < kTokens / 2; j += 2)
          words.push_back(k.pack(sumsOfTile.slice(j, 2), element));
        return words;
      };
      /// Puts them where inputs of the tile were, all of which have been read.
      auto stageWords = [&](ArrayRef<Val> words) {
        syncGroup();
        for (int64_t j = 0; j < 4; ++j) {
          Val first = k.offset(stagingMemory,
                               tilePiece(k, g8 * 2.0, t4 * 2.0 + double(j % 2),
                                         warp * 2.0 + double(j / 2)));
          for (int64_t q = 0; q < 8; ++q) {
            Val word = words[2 * q + j / 2];
            if (j % 2)
              word = word >> 16;
            k.store(k.wrap(arith::TruncIOp::create(k.b, k.loc, k.i16Type(),
                                                   word.value)),
                    k.offset(first, Tile::bytes(8 * q)));
          }
        }
        syncGroup();
      };
      /// Turns outputs of a tile round in shared memory.
      auto stageOutputs = [&](ArrayRef<Val> sumsOfTile) {
        syncGroup();
        for (int64_t q = 0; q < 4; ++q) {
          Vals words;
          for (int64_t j = 0; j < 4; ++j)
            words.push_back(
                k.pack(sumsOfTile.slice(8 * q + 2 * j, 2), element));
          Val eight = k.select(lane < 16.0, k.i32(tokensAt(2 * q)),
                               k.i32(tokensAt(2 * q + 1)));
          Val row = (eight << 3) + (lane & 7);
          Val piece = warp * 2.0 + ((lane >> 3) & 1);
          storeMatrices(k, tilePiece(k, staging, row, piece), words, true);
        }
        syncGroup();
      };
      /// Writes them, a tile later: meanwhile products are under way.
      auto writeOutputs = [&](Val tileIndex) {
        Val token = tileIndex * double(kTokens);
        Vals packed;
        for (int64_t r = 0; r < kRows; ++r)
          packed.push_back(
              k.load(k.offset(stagingMemory,
                              tilePiece(k, k.i32(0), outputRow + double(4 * r),
                                        lane & 7)),
                     k.packedType(element, kWidth)));
        if (isPlain) {
          Val first =
              k.offset(outputPointer, k.toI64(token) * plainOutput.stride(1));
          auto rowsFrom = [&](bool isWhole) {
            Val pointer = first;
            for (int64_t r = 0; r < kRows; ++r) {
              if (isWhole)
                k.store(packed[r], pointer);
              else
                k.ifThen(token + outputRow + double(4 * r) < length,
                         [&] { k.store(packed[r], pointer); });
              pointer = k.offset(pointer, plainOutput.stride(1) * 4.0);
            }
          };
          k.ifThen(writes, [&] {
            k.ifElse(
                token + double(kTokens) <= length, [&] { rowsFrom(true); },
                [&] { rowsFrom(false); });
          });
          return;
        }
        for (int64_t r = 0; r < kRows; ++r) {
          Val row = token + outputRow + double(4 * r);
          k.ifThen(writes & (row < length), [&] {
            Vals values = k.unpack(packed[r], element, kWidth);
            Val row64 = row0 + k.toI64(row);
            if (hasChannelSkip) {
              Vals in =
                  x.elements({batch64, row64, head}, safeChannel, kWidth, 8);
              for (int64_t j = 0; j < kWidth; ++j)
                values[j] = k.fma(channelSkips[j], in[j], values[j]);
            }
            if (z) {
              Vals gates;
              Cursor at = z.moved(gateAt, row, kTokenAxis);
              int64_t width =
                  std::min<int64_t>(kWidth, e.streamAlignment(op.getZ()));
              for (int64_t j = 0; j < kWidth; j += width) {
                Cursor from = at;
                if (j)
                  from = z.moved(
                      z.at({batch64, row0, head}, safeChannel + double(j)), row,
                      kTokenAxis);
                llvm::append_range(gates, z.values(z.load(from, width), width));
              }
              for (int64_t j = 0; j < kWidth; ++j)
                values[j] = values[j] * k.silu(gates[j]);
            }
            int64_t width = std::min<int64_t>(kWidth, e.outputAlignment(y));
            for (int64_t j = 0; j < kWidth; j += width) {
              Cursor to = output.moved(outputAt, row, kTokenAxis);
              if (j)
                to = output.moved(
                    output.at({batch64, row0, head}, safeChannel + double(j)),
                    row, kTokenAxis);
              output.store(to, ArrayRef(values).slice(j, width));
            }
          });
        }
      };

      auto scaleBy = [&](Vals &sumsOfTile, Val f) {
        Val from = k.offset(f, t4 * 8.0);
        for (int64_t q = 0; q < 8; ++q) {
          int64_t eight = t.hasRoles ? tokensAt(q) : q;
          Vals power = loadPair(from, Factors::kPower + 8 * eight);
          for (int64_t j = 0; j < 4; ++j)
            sumsOfTile[4 * q + j] = sumsOfTile[4 * q + j] * power[j & 1];
        }
      };
      Vals skips;
      if (!t.hasRoles) {
        skips = loadSkips();
        llvm::append_range(state, ahead);
      }
      /// A tile of warps that are alike.
      auto walkTile = [&](Val i, Turn turn, ArrayRef<Val> in) -> Vals {
        Vals following = beginTile(i, turn, in.drop_front(held));
        Val stage = stageAt(turn.stage);
        Val offset = unit * double(t.inputBytes()) + double(inputsOffset);
        Val tile = stage + offset;
        Val f = factorsAt(turn.stage, headIndex);
        weighSquares(turn, skips);
        Vals sumsOfTile(kTokens / 2, k.f32(0)), next;
        auto sumsAt = [&](int64_t token) {
          return MutableArrayRef(sumsOfTile).slice(token / 2, 8);
        };
        Val c = stage + double(t.stateBytes()) + rightOf;
        for (int64_t n = 0; n < t.states; n += 16) {
          Vals words;
          for (int64_t j = 0; j < 4; ++j)
            words.push_back(k.pack(in.slice(n / 2 + 2 * j, 2), element));
          for (int64_t token = 0; token < kTokens; token += 16)
            addProduct(k, words,
                       loadPart(k, c, n, Tile::bytes(token), kTokens, false),
                       sumsAt(token), element);
        }
        scaleBy(sumsOfTile, f);
        // M is there.
        k.syncBlock();
        Val weights = sharedAddress(k, weightsMemory) +
                      headIndex * double(t.weightBytes()) + rightOf;
        for (int64_t j = 0; j < kTokens; j += 16) {
          Vals words = loadInputs(tile, j);
          for (int64_t token = j; token < kTokens; token += 16)
            addProduct(
                k, words,
                loadPart(k, weights, j, Tile::bytes(token), kTokens, false),
                sumsAt(token), element);
        }
        Vals packed = packOutputs(sumsOfTile);
        Val decay = k.load(k.offset(f, 4 * Factors::kDecay), k.f32Type());
        for (Val s : in.take_front(held))
          next.push_back(s * decay);
        next = updateState(weighInputs(tile, f), stage, next);
        stagingMemory =
            k.offset(ring, turn.stage * double(stageBytes) + offset);
        stageWords(packed);
        writeOutputs(tileAt(i));
        llvm::append_range(next, following);
        return next;
      };
      Vals end =
          forTiles(state, [&](Val i, Turn turn, ArrayRef<Val> in) -> Vals {
            if (!t.hasRoles)
              return walkTile(i, turn, in);
            Val stage = stageAt(turn.stage);
            Val tile =
                stage + double(inputsOffset) + unit * double(t.inputBytes());
            Val f = factorsAt(turn.stage, headIndex);
            Val c = tileDescriptor(k, stage + double(t.stateBytes()), false);
            Val weights = tileDescriptor(
                k,
                sharedAddress(k, weightsMemory) +
                    (turn.stage * double(t.heads()) + headIndex) *
                        double(t.weightBytes()),
                false);
            Val inputs = tileDescriptor(k, tile, true);
            waitBarrier(k, full(turn.stage), turn.phase);
            fenceForProducts(k);
            // S C^T; at most 128 states at a time, for the registers' sake.
            bool isWide = t.states > 128;
            int64_t most = isWide ? 64 : 128;
            Vals sumsOfTile;
            waitBarrier(k, factored(turn.stage), turn.phase);
            Val decay = k.load(k.offset(f, 4 * Factors::kDecay), k.f32Type());
            Vals scaled;
            auto scaleState = [&] {
              for (Val s : in)
                scaled.push_back(s * decay);
            };
            if (!isWide)
              scaleState();
            SmallVector<SmallVector<ProductStep>> parts;
            auto packPart = [&](int64_t first) {
              if (first >= t.states)
                return;
              SmallVector<ProductStep> &steps = parts.emplace_back();
              for (int64_t n = first; n < std::min(first + most, t.states);
                   n += 16) {
                Vals words;
                for (int64_t j = 0; j < 4; ++j)
                  words.push_back(k.pack(in.slice(n / 2 + 2 * j, 2), element));
                steps.push_back({words,
                                 {},
                                 {c, n / Tile::kColumns * Tile::bytes(kTokens) +
                                         n % Tile::kColumns * 2}});
              }
            };
            // S is not even read while a product is under way: the assembler
            // would wait for that.
            packPart(0);
            packPart(most);
            for (int64_t first = 0; first < t.states; first += most) {
              if (first) {
                sumsOfTile = waitProducts(k, 0, sumsOfTile);
                packPart(first + most);
              }
              sumsOfTile = startProducts(k, kTokens, parts[first / most],
                                         sumsOfTile, element);
            }
            auto writeBefore = [&] {
              k.ifThen(i > 0.0, [&] { writeOutputs(tileAt(i - 1.0)); });
            };
            auto scaleOutputs = [&] { scaleBy(sumsOfTile, f); };
            auto startInner = [&] {
              waitBarrier(k, weighted(turn.stage), turn.phase);
              SmallVector<ProductStep> steps;
              for (int64_t j = 0; j < kTokens; j += 16)
                steps.push_back(
                    {{}, {inputs, Tile::bytes(j), true}, {weights, 2 * j}});
              sumsOfTile =
                  startProducts(k, kTokens, steps, sumsOfTile, element);
            };
            Vals next;
            auto startState = [&] {
              Vals words = weighInputs(tile, f);
              next = updateState(words, stage, scaled);
            };
            if (isWide) {
              // Few registers are left: outputs first.
              writeBefore();
              sumsOfTile = waitProducts(k, 0, sumsOfTile);
              scaleOutputs();
              scaleState();
              startInner();
              startState();
              sumsOfTile = waitProducts(k, static_cast<int64_t>(pieces.size()),
                                        sumsOfTile);
              stageOutputs(sumsOfTile);
              next = waitProducts(k, 0, next);
              release(turn);
              return next;
            }
            startState();
            writeBefore();
            sumsOfTile = waitProducts(k, static_cast<int64_t>(pieces.size()),
                                      sumsOfTile);
            scaleOutputs();
            startInner();
            Vals all(sumsOfTile);
            llvm::append_range(all, next);
            all = waitProducts(k, 0, all);
            release(turn);
            stageOutputs(ArrayRef(all).take_front(kTokens / 2));
            return Vals(ArrayRef(all).drop_front(kTokens / 2));
          });
      end.resize(held);
      if (t.hasRoles)
        k.ifThen(count > 0.0, [&] { writeOutputs(endTile - 1.0); });

      // What the next worker goes on from.
      k.ifThen(isShared & (item.end < tileCount), [&] {
        storeState(end, handedAt(worker));
        raiseFlag(
            k, flags.at({worker}, unit), handedAt(worker), [&] { syncGroup(); },
            threadOfGroup == 0.0);
      });
      if (final) {
        // The item that has the last tile, or should have it.
        Val isLast = (item.end >= tileCount) &
                     ((item.begin < tileCount) | (item.begin == 0.0));
        k.ifThen(isLive & isLast & place.writes(k), [&] {
          for (int64_t half = 0; half < 2; ++half)
            k.ifThen(channel + double(8 * half) < double(t.channels), [&] {
              for (int64_t r = 0; r < held; r += 4)
                k.store(
                    k.pack(ArrayRef(end).slice(r + 2 * half, 2), final.element),
                    final.at(leading(half), t4 * 2.0 + double(2 * r)));
            });
        });
      }
    };

    switch (role) {
    case Role::Copy:
      return copy(copier);
    case Role::Factor:
      return factor(index);
    case Role::Weigh:
      return weigh();
    case Role::Keep:
      return keep(index);
    }
  };

  auto work = [&](Role role, int64_t copier, Val index) {
    k.forLoop(k.i32(0), share[2], 1, {k.i32(0), k.i32(0), k.i32(0)},
              [&](Val number, ArrayRef<Val> in) -> Vals {
                Turn current(in);
                walk(role, itemAt(number), copier, index, current);
                return current.values();
              });
  };
  auto help = [&] {
    if (!isStates)
      setRegisters(k, t.helperRegisters, false);
    for (int64_t copier = 0; copier < t.copiers(); ++copier)
      k.ifThen(warp == double(t.heads() + copier),
               [&] { work(Role::Copy, copier, Val()); });
    k.ifThen(warp < double(t.heads()), [&] { work(Role::Factor, 0, warp); });
  };
  auto keepStates = [&] {
    if (!isStates) {
      setRegisters(k, t.unitRegisters, true);
      waitForStates();
    }
    work(Role::Keep, 0, group);
  };
  auto weighTiles = [&] {
    setRegisters(k, t.weightRegisters, false);
    // Above the diagonal M stays zero.
    Val threadOfGroup = thread & (kGroup - 1);
    Val zero = k.i32(0);
    k.forLoop(threadOfGroup, k.i32(stages * t.heads() * t.weightBytes() / 16),
              kGroup, [&](Val i) {
                k.store(k.vector({zero, zero, zero, zero}),
                        k.offset(weightsMemory, i * 16.0));
              });
    k.syncNamed(1, kGroup);
    work(Role::Weigh, 0, Val());
  };
  // Blocks beyond the last sequence have nothing to do.
  k.ifThen(isShared | (rowOfBlock(k) < k.i32Argument(sequences.count)), [&] {
    if (!t.hasRoles) {
      work(Role::Keep, 0, group);
      return;
    }
    k.ifElse(group == double(t.units + (isStates ? 0 : 1)), help, [&] {
      if (isStates)
        keepStates();
      else
        k.ifElse(group == double(t.units), weighTiles, keepStates);
    });
  });
  if (isStates) {
    k.launch(e.gridOf(e.mul(segmentCount, perSegment), sequences.count));
    return;
  }
  Grid grid = e.gridOf(e.mul(segmentCount, perSegment), sequences.count);
  Value shares = e.cmp(arith::CmpIPredicate::sgt, workers, e.index(0));
  auto pick = [&](Value then, Value otherwise) {
    return e.host.createOrFold<arith::SelectOp>(e.loc, shares, then, otherwise);
  };
  Value one = e.index(1);
  k.launch({pick(workers, grid.x), pick(one, grid.y), pick(one, grid.z)});
}

/// Whether a head has sizes that the tiles are made for.
static bool areForTiles(int64_t channels, int64_t states) {
  return channels > 0 && channels % 8 == 0 && channels <= 2 * kSlice &&
         states > 0 && states % 16 == 0 && states <= 256;
}

std::optional<ScanVariantInfo>
corey::getSSDTensorVariant(const ChipFeatures &chip, bool is16Bit,
                           int64_t headsOfGroup, int64_t channels,
                           int64_t states) {
  if (!is16Bit || !areForTiles(channels, states))
    return std::nullopt;
  SSDTensorTiling tiling(chip, headsOfGroup, channels, states);
  if (!tiling.fits())
    return std::nullopt;
  return ScanVariantInfo{chip.hasWarpGroups ? llvm::StringLiteral("tensor_core")
                                            : llvm::StringLiteral("mma_sync"),
                         tiling.heads(), kTokens, 1, true};
}

bool corey::isForTensorCores(Operation *operation) {
  auto op = cast<SSDOp>(operation);
  auto x = cast<RankedTensorType>(op.getX().getType());
  if (!x.getElementType().isF16() && !x.getElementType().isBF16())
    return false;
  for (Value tensor : {op.getX(), op.getB(), op.getC()}) {
    // What a fused region computes of its arguments is nowhere in memory.
    Operation *producer = tensor.getDefiningOp();
    bool isComputed = producer && isa<FusedOp>(op->getParentOp()) &&
                      producer->getBlock() == op->getBlock();
    if (cast<RankedTensorType>(tensor.getType()).getElementType() !=
            x.getElementType() ||
        isComputed || rowAlignment(tensor) < 8)
      return false;
  }
  return areForTiles(x.getDimSize(3),
                     cast<RankedTensorType>(op.getB().getType()).getDimSize(3));
}

bool corey::fitsTensorCores(const GPUTarget &target, SSDOp op) {
  auto x = cast<RankedTensorType>(op.getX().getType());
  auto B = cast<RankedTensorType>(op.getB().getType());
  return SSDTensorTiling(target.chip, x.getDimSize(2) / B.getDimSize(2),
                         x.getDimSize(3), B.getDimSize(3))
      .fits();
}

void corey::emitSSDOnTensorCores(GPULowering &lowering, SSDOp op,
                                 const DeviceSequences &sequences, Value chunk,
                                 Value y, const StateBuffers &states) {
  SSDTensorKernels(lowering, op, sequences, y, states).emit(chunk);
}
