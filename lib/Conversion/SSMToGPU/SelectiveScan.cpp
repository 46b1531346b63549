//===- SelectiveScan.cpp - GPU kernels of selective_scan ------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
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
#include "mlir/Dialect/SCF/IR/SCF.h"

using namespace mlir;
using namespace corey;
using namespace corey::ssm;

static constexpr double kLog2E = 1.44269504088896340736;

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

/// What a kernel computes of a scan.
enum class ScanPass {
  /// Everything.
  Whole,
  /// The state at the end of a chunk, from zero, and the sum of its dt.
  States,
  /// The outputs of a chunk, from the state at its start.
  Outputs
};

/// The operands of a scan on the host; null where absent.
struct ScanOperands {
  Value chunk, chunkCount;
  /// f32, [sequences, chunks, D, N] and [sequences, chunks, D]: states at the
  /// ends of chunks, later at their starts, and sums of dt.
  Value chunkStates, chunkSteps;
  Value y, last;
};

class SelectiveScanKernels {
public:
  SelectiveScanKernels(GPULowering &e, SelectiveScanOp op)
      : e(e), op(op), u(cast<RankedTensorType>(op.getU().getType())),
        channels(u.getDimSize(2)),
        states(cast<RankedTensorType>(op.getA().getType()).getDimSize(1)),
        groups(cast<RankedTensorType>(op.getB().getType()).getDimSize(2)),
        sequences(e, e.buffer(op.getU()), e.buffer(op.getSeqStarts())) {}

  LogicalResult emit() {
    FailureOr<Value> chunk = getDeviceChunk(e, op, sequences.length);
    if (failed(chunk))
      return failure();
    ScanOperands s;
    s.y = e.allocate(0);
    s.last = op.getLastState() ? e.allocate(1) : Value();
    // Views are made before the branches that use them.
    for (Value tensor : op.getOperands())
      if (isa<TensorType>(tensor.getType()) && !e.isComputed(tensor))
        e.buffer(tensor);
    s.chunk = *chunk;
    s.chunkCount = e.max(e.ceilDiv(sequences.length, s.chunk), e.index(1));
    Value unsplit = e.cmp(arith::CmpIPredicate::sle, s.chunkCount, e.index(1));
    e.ifThen(
        unsplit, [&] { emitWarpKernel(s, ScanPass::Whole); },
        [&] {
          s.chunkStates = e.workspace({sequences.count, s.chunkCount,
                                       e.index(channels), e.index(states)},
                                      e.host.getF32Type());
          s.chunkSteps =
              e.workspace({sequences.count, s.chunkCount, e.index(channels)},
                          e.host.getF32Type());
          emitWarpKernel(s, ScanPass::States);
          emitCarryKernel(s);
          emitWarpKernel(s, ScanPass::Outputs);
        });
    SmallVector<Value> results{s.y};
    if (s.last)
      results.push_back(s.last);
    e.replaceWith(results);
    return success();
  }

private:
  /// What a stream gives a lane of the tokens that it prepares.
  struct Prepared {
    Vals u, delta, z;
  };

  void emitWarpKernel(const ScanOperands &s, ScanPass pass);
  void emitCarryKernel(const ScanOperands &s);

  GPULowering &e;
  SelectiveScanOp op;
  RankedTensorType u;
  int64_t channels, states, groups;
  DeviceSequences sequences;
};
} // namespace

void SelectiveScanKernels::emitWarpKernel(const ScanOperands &s,
                                          ScanPass pass) {
  bool hasOutput = pass != ScanPass::States;
  int64_t perGroup = channels / groups;
  StringRef name = pass == ScanPass::Whole    ? "selective_scan_warp"
                   : pass == ScanPass::States ? "selective_scan_warp_states"
                                              : "selective_scan_warp_outputs";
  // Two neighbouring channels a lane where their elements are loaded together.
  // The streams tell whether they can be, and belong to the kernel.
  int64_t pairAlignment = perGroup;
  for (Value tensor : {Value(op.getU()), Value(op.getDelta()), Value(op.getZ())})
    if (tensor)
      pairAlignment = std::gcd(pairAlignment, e.streamAlignment(tensor));
  pairAlignment = std::gcd(pairAlignment, e.outputAlignment(s.y));
  WarpTiling t(states, pairAlignment % 2 == 0 ? 2 : 1);
  int64_t steps = WarpTiling::kSteps;
  int64_t count = t.channelsPerLane;

  KernelBuilder k(e.host, e.loc, e.kernels, name, {t.warps * 32, 0});
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
    initial = DeviceTensor(e, k, e.buffer(op.getInitialState()));
    last = DeviceTensor(e, k, s.last);
  } else {
    chunkStates = DeviceTensor(e, k, s.chunkStates);
    if (pass == ScanPass::States)
      chunkSteps = DeviceTensor(e, k, s.chunkSteps);
  }

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
                      Val at) {
      return k.unpack(
          k.load(tensor.at(leading, at), k.packedType(tensor.element, 1), true),
          tensor.element, 1)[0];
    };
    for (int64_t j = 0; j < count; ++j) {
      for (int64_t i = 0; i < t.statesPerLane; ++i) {
        rate[j].push_back(ifState(
            i, [&](Val n) { return scalar(A, {channelAt(j)}, n) * kLog2E; }));
        state.push_back(ifState(i, [&](Val n) {
          if (initial)
            return scalar(initial, {sequence, channelAt(j)}, n);
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
    int64_t piecesPerRow = states / piece;
    int64_t pieces = steps * piecesPerRow;
    int64_t rounds = llvm::divideCeil(pieces, 32);

    /// Loads what block `t0` needs; rows from `clampTo` on are read as the last
    /// before it, if it is given.
    auto load = [&](Val t0, Val clampTo) {
      Vals loaded;
      auto rowOf = [&](Val step) {
        Val row = t0 + step;
        return clampTo ? k.min(row, clampTo - 1.0) : row;
      };
      for (int64_t i = 0; i < t.stepsPerLane(); ++i) {
        Val move =
            clampTo ? rowOf(ownStep + double(i)) - ownStep : t0 + double(i);
        llvm::append_range(loaded, u.load(u.moved(uRow, move), count));
        llvm::append_range(loaded,
                           delta.load(delta.moved(deltaRow, move), count));
        if (z)
          llvm::append_range(loaded, z.load(z.moved(zRow, move), count));
      }
      for (int64_t i = 0; i < rounds; ++i) {
        Val index = lane + double(32 * i);
        if (pieces % 32)
          index = k.min(index, k.i32(pieces - 1));
        Val row = row0 + k.toI64(rowOf(index / double(piecesPerRow)));
        Val n = (index % piecesPerRow) * double(piece);
        for (const DeviceTensor *tensor : {&B, &C})
          if (*tensor)
            loaded.push_back(k.load(tensor->at({batch64, row, group}, n),
                                    k.packedType(tensor->element, piece),
                                    true));
      }
      return loaded;
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
        for (auto [m, tensor] : llvm::enumerate(ArrayRef{&B, &C}))
          if (*tensor)
            values[m] = k.unpack(*from++, tensor->element, piece);
        auto storeRows = [&] {
          Val at = ((index / double(piecesPerRow)) * t.paddedStates() +
                    (index % piecesPerRow) * double(piece)) *
                   4;
          for (int64_t m = 0; m < 2; ++m)
            if (!values[m].empty()) {
              // Aligned to 16 bytes only where rows are.
              int64_t width = t.paddedStates() % piece ? 1 : piece;
              for (int64_t p = 0; p < piece; p += width)
                k.store(k.vector(ArrayRef(values[m]).slice(p, width)),
                        k.offset(k.offset(buffer, at),
                                 (m ? cOffset : bOffset) + 4 * p));
            }
        };
        if (pieces % 32)
          k.ifThen(index < double(pieces), storeRows);
        else
          storeRows();
      }
      k.syncWarp();
      Vals following = next();
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
        for (int64_t i = 0; i < t.stepsPerLane(); ++i) {
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
    Val full = length - (length % steps);
    Vals carried(state);
    llvm::append_range(carried, sums);
    // Full blocks, each loading for the next: the last loads its own again.
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
                  return load(k.min(t0 + double(steps), full - double(steps)),
                              Val());
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
    k.ifThen(inside, [&] {
      for (int64_t j = 0; j < count; ++j)
        for (int64_t i = 0; i < t.statesPerLane; ++i) {
          auto write = [&] {
            Val h = end[j * t.statesPerLane + i];
            if (last)
              k.store(k.pack({h}, last.element),
                      last.at({sequence, channelAt(j)}, stateIndex(i)));
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

/// One thread per state: the state at the end of every chunk becomes that at
/// its start, from the first chunk on.
void SelectiveScanKernels::emitCarryKernel(const ScanOperands &s) {
  constexpr int64_t kThreads = 128, kAhead = 8;
  KernelBuilder k(e.host, e.loc, e.kernels, "selective_scan_carry",
                  {kThreads, 0});
  DeviceTensor A(e, k, e.buffer(op.getA()));
  DeviceTensor initial(e, k, e.buffer(op.getInitialState()));
  DeviceTensor chunkStates(e, k, s.chunkStates);
  DeviceTensor chunkSteps(e, k, s.chunkSteps);
  DeviceTensor last(e, k, s.last);
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
    Val h = k.f32(0);
    if (initial)
      h = k.unpack(k.load(initial.at({sequence, channel}, n),
                          k.packedType(initial.element, 1), true),
                   initial.element, 1)[0];
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
      k.store(k.pack({end[0]}, last.element), last.at({sequence, channel}, n));
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
