//===- SSDStep.cpp - GPU kernel of one token of ssd -----------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// Decode: sequences of one token, from states to states. Bound by the memory
// that the states take, each of which is read once and written once. A warp has
// some channels of a head of a sequence. Neighbouring lanes have neighbouring
// states of a channel, as many as are loaded at once, and a lane has so many
// vectors of states that, with the warps a multiprocessor holds, enough bytes
// are on their way; it asks for all of them before it uses any. No warp waits
// for another.
//
//===----------------------------------------------------------------------===//

#include "GPULowering.h"
#include <numeric>

using namespace mlir;
using namespace corey;
using namespace corey::ssm;

static constexpr int64_t kThreads = 128, kWarps = kThreads / 32;
/// Blocks that a multiprocessor runs at a time, by the registers of a thread:
/// inputs of 32 bits take more.
static constexpr int64_t kMinBlocks = 8, kMinBlocks32 = 6;
/// States of a lane: with these threads, 128 KB of a multiprocessor in f32.
static constexpr int64_t kStates = 32;
/// Bytes of a vector.
static constexpr int64_t kVectorBytes = 16;

SSDDecay corey::ssdDecay(KernelBuilder &k, SSDOp op, Val raw, Val rate,
                         Val shift) {
  if (op.getDecay())
    return {k.f32(1), raw * kLog2E};
  Val step = raw;
  if (shift)
    step = step + shift;
  if (op.getDtSoftplus())
    step = k.softplus(step);
  if (auto limit = op.getDtLimit()) {
    // Keeps NaN.
    step = k.select(step < (*limit)[0], k.f32((*limit)[0]), step);
    step = k.select(step > (*limit)[1], k.f32((*limit)[1]), step);
  }
  return {step, step * rate};
}

namespace {
/// How a kernel cuts its work.
struct StepTiling {
  /// States of a vector; lanes of a channel, and vectors that each has of it.
  int64_t vector, lanes, vectors;
  /// Channels of a lane, neighbours, and warps of a head.
  int64_t rows, warps;

  /// `bytes`: of the widest state.
  StepTiling(int64_t channels, int64_t states, int64_t bytes) {
    vector =
        std::min<int64_t>(kVectorBytes / bytes, llvm::PowerOf2Ceil(states));
    lanes = std::min<int64_t>(
        llvm::PowerOf2Ceil(llvm::divideCeil(states, vector)), 32);
    vectors = llvm::divideCeil(states, vector * lanes);
    rows = llvm::bit_floor<uint64_t>(
        std::max<int64_t>(kStates / (vector * vectors), 1));
    // No lanes for channels that are not there, if those that are have more.
    while (rows > 1 && rowsPerWarp() / 2 >= channels)
      rows /= 2;
    warps = llvm::divideCeil(channels, rowsPerWarp());
  }
  int64_t rowsPerWarp() const { return rows * (32 / lanes); }
  /// Outputs that a lane has once they are summed.
  int64_t outputs() const { return std::max<int64_t>(rows / lanes, 1); }
};
} // namespace

void corey::emitSSDStep(GPULowering &e, SSDOp op,
                        const DeviceSequences &sequences, Value y,
                        const StateBuffers &states) {
  auto xType = cast<RankedTensorType>(op.getX().getType());
  auto bType = cast<RankedTensorType>(op.getB().getType());
  int64_t heads = xType.getDimSize(2), channels = xType.getDimSize(3);
  int64_t groups = bType.getDimSize(2), count = bType.getDimSize(3);
  int64_t bytes = 0;
  for (Value memref : {states.initial, states.last})
    if (memref)
      bytes = std::max<int64_t>(
          bytes,
          cast<MemRefType>(memref.getType()).getElementTypeBitWidth() / 8);
  StepTiling t(channels, count, bytes ? bytes : 4);
  bool isWhole = t.vector * t.lanes * t.vectors == count;
  bool isDecay = static_cast<bool>(op.getDecay());

  bool isWide = xType.getElementTypeBitWidth() > 16 ||
                bType.getElementTypeBitWidth() > 16;
  KernelBuilder k(e.host, e.loc, e.kernels, "ssd_step",
                  {kThreads, isWide ? kMinBlocks32 : kMinBlocks});
  InputStream x(e, k, op.getX()), z(e, k, op.getZ());
  InputStream dt(e, k, isDecay ? op.getDecay() : op.getDt());
  DeviceTensor A(e, k, e.buffer(op.getA())), D(e, k, e.buffer(op.getD()));
  DeviceTensor B(e, k, e.buffer(op.getB())), C(e, k, e.buffer(op.getC()));
  DeviceTensor bias(e, k, isDecay ? Value() : e.buffer(op.getDtBias()));
  DeviceTensor initial(e, k, states.initial, !states.isInPlace()),
      last(e, k, states.last);
  DeviceSlots slots(e, k, states);
  OutputStream output(e, k, y);

  // Which sequence, head and channels.
  Val lane = k.lane();
  Val q = lane % t.lanes, r = lane / double(t.lanes);
  Val unit = k.blockIdx('x') * double(kWarps) + k.warp();
  Val head = unit / double(t.warps);
  Val sequences32 = k.i32Argument(sequences.count);
  Val row32 = rowOfBlock(k);
  Val active = (unit < double(heads * t.warps)) & (row32 < sequences32);
  // Warps without work read what another one has.
  Val sequence = k.min(row32, sequences32 - 1.0);
  head = k.min(head, k.i32(heads - 1));
  Val group = head / double(heads / groups);
  Val channel = (unit % t.warps) * double(t.rowsPerWarp()) + r * double(t.rows);
  DeviceSlots::Place place = slots.of(k, sequence);
  Val batch = k.toI64(sequence), token = k.i64(0);
  auto channelAt = [&](int64_t j) {
    Val c = channel + double(j);
    // Beyond the last channel that is worked on again, and nothing is written.
    return t.rowsPerWarp() * t.warps == channels
               ? c
               : k.min(c, k.i32(channels - 1));
  };

  /// Calls `body` for each piece of `width` of the lane's states.
  auto forPieces = [&](int64_t width, llvm::function_ref<void(Val n)> body) {
    for (int64_t v = 0; v < t.vectors; ++v)
      for (int64_t i = 0; i < t.vector; i += width)
        body(q * double(t.vector) + double(v * t.vector * t.lanes + i));
  };
  /// Loads the lane's states of a row of `tensor`, and unpacks them, zero
  /// beyond the last.
  auto load = [&](const DeviceTensor &tensor, int64_t width,
                  ArrayRef<Val> leading, bool isReadOnly) {
    Vals loaded;
    forPieces(width, [&](Val n) {
      Val at = isWhole ? n : k.min(n, k.i32(count - width));
      loaded.push_back(k.load(tensor.at(leading, at),
                              k.packedType(tensor.element, width), isReadOnly));
    });
    return loaded;
  };
  auto unpack = [&](const DeviceTensor &tensor, int64_t width,
                    ArrayRef<Val> &loaded) {
    Vals values;
    forPieces(width, [&](Val n) {
      for (Val value : k.unpack(loaded.front(), tensor.element, width))
        values.push_back(
            isWhole ? value : k.select(n < double(count), value, k.f32(0)));
      loaded = loaded.drop_front();
    });
    return values;
  };
  auto widthOf = [&](Value tensor) {
    return std::gcd(t.vector, rowAlignment(tensor));
  };
  int64_t bWidth = widthOf(op.getB()), cWidth = widthOf(op.getC());
  int64_t initialWidth = initial ? widthOf(op.getInitialStates()) : 1;

  // The inputs of the lane's channels, and of the outputs it has in the end.
  int64_t xWidth =
      std::gcd(std::gcd(t.rows, channels), e.streamAlignment(op.getX()));
  int64_t outputs = t.outputs();
  int64_t ownWidth =
      std::gcd(std::gcd(outputs, channels),
               std::gcd(e.streamAlignment(op.getX()), e.outputAlignment(y)));
  if (z)
    ownWidth = std::gcd(ownWidth, e.streamAlignment(op.getZ()));
  Val item = (q % t.rows) * double(outputs);
  auto ownAt = [&](int64_t j) {
    return k.min(channel + item + double(j), k.i32(channels - ownWidth));
  };
  auto loadInputs = [&] {
    Vals loaded = dt.load(dt.at({batch, token}, head), 1);
    if (A)
      loaded.push_back(k.load(A.at({}, head), k.f32Type(), true));
    if (bias)
      loaded.push_back(
          k.load(bias.at({}, head), k.packedType(bias.element, 1), true));
    for (int64_t j = 0; j < t.rows; j += xWidth)
      llvm::append_range(loaded, x.load(x.at({batch, token, head},
                                             k.min(channel + double(j),
                                                   k.i32(channels - xWidth))),
                                        xWidth));
    llvm::append_range(loaded,
                       load(B, bWidth, {batch, token, k.toI64(group)}, true));
    llvm::append_range(loaded,
                       load(C, cWidth, {batch, token, k.toI64(group)}, true));
    for (int64_t j = 0; j < outputs; j += ownWidth) {
      if (D)
        llvm::append_range(
            loaded, x.load(x.at({batch, token, head}, ownAt(j)), ownWidth));
      if (z)
        llvm::append_range(
            loaded, z.load(z.at({batch, token, head}, ownAt(j)), ownWidth));
    }
    for (int64_t j = 0; D && j < (D.rank() == 1 ? 1 : outputs); ++j)
      loaded.push_back(
          k.load(D.rank() == 1 ? D.at({}, head)
                               : D.at({head}, k.min(channel + item + double(j),
                                                    k.i32(channels - 1))),
                 k.packedType(D.element, 1), true));
    return loaded;
  };
  Val row64 = k.toI64(place.row);
  auto loadStates = [&] {
    Vals loaded;
    for (int64_t j = 0; initial && j < t.rows; ++j)
      llvm::append_range(loaded, load(initial, initialWidth,
                                      {row64, k.toI64(head), channelAt(j)},
                                      initial.isReadOnly));
    return loaded;
  };
  // The states of a slot have to wait until it is known which it is; others are
  // asked for first.
  Vals inputs, before;
  if (place.there) {
    inputs = k.loadIf(active, loadInputs);
    place.there = place.there & active;
    before = slots.ifThere(k, place, loadStates);
  } else {
    Vals all = k.loadIf(active, [&] {
      Vals loaded = loadStates();
      before.resize(loaded.size());
      llvm::append_range(loaded, loadInputs());
      return loaded;
    });
    inputs.assign(all.begin() + before.size(), all.end());
    all.resize(before.size());
    before = all;
  }

  ArrayRef<Val> in = inputs;
  auto take = [&] {
    Val value = in.front();
    in = in.drop_front();
    return value;
  };
  auto takeStream = [&](const InputStream &stream, int64_t width) {
    Vals values = stream.values(in.take_front(stream.numLoaded()), width);
    in = in.drop_front(stream.numLoaded());
    return values;
  };
  Val raw = takeStream(dt, 1)[0];
  Val rate = A ? take() * kLog2E : Val();
  Val shift = bias ? k.unpack(take(), bias.element, 1)[0] : Val();
  SSDDecay own = ssdDecay(k, op, raw, rate, shift);
  Val decay = k.ex2(own.exponent);
  Vals scaled;
  for (int64_t j = 0; j < t.rows; j += xWidth)
    for (Val value : takeStream(x, xWidth))
      scaled.push_back(isDecay ? value : value * own.step);
  Vals b = unpack(B, bWidth, in), c = unpack(C, cWidth, in);

  // The recurrence, channel by channel. New states take the registers of those
  // before, packed as they are written.
  Val writes = place.there ? place.there : active;
  int64_t lastWidth =
      last ? std::gcd(t.vector, std::gcd(count, kVectorBytes / last.bytes()))
           : 1;
  ArrayRef<Val> old = before;
  Vals sums;
  SmallVector<Vals> after;
  for (int64_t j = 0; j < t.rows; ++j) {
    Vals h = initial ? unpack(initial, initialWidth, old) : Vals(b.size());
    Val sum;
    for (size_t i = 0; i < b.size(); ++i) {
      Val input = scaled[j] * b[i];
      h[i] = initial ? k.fma(decay, h[i], input) : input;
      sum = sum ? k.fma(c[i], h[i], sum) : c[i] * h[i];
    }
    sums.push_back(sum);
    Vals packed;
    for (size_t i = 0; last && i < h.size(); i += lastWidth)
      packed.push_back(k.pack(ArrayRef(h).slice(i, lastWidth), last.element));
    after.push_back(packed);
  }
  if (last)
    k.ifThen(writes, [&] {
      for (int64_t j = 0; j < t.rows; ++j) {
        auto writeRow = [&] {
          const Val *piece = after[j].begin();
          forPieces(lastWidth, [&](Val n) {
            Val packed = *piece++;
            auto write = [&] {
              k.store(packed, last.at({row64, k.toI64(head), channelAt(j)}, n));
            };
            if (isWhole)
              write();
            else
              k.ifThen(n < double(count), write);
          });
        };
        if (t.rowsPerWarp() * t.warps == channels)
          writeRow();
        else
          k.ifThen(channel + double(j) < double(channels), writeRow);
      }
    });

  // Outputs: a lane gets the sums of some of its channels.
  Vals totals = k.reduceScatter(sums, t.lanes, q);
  SmallVector<Vals> ownInputs, gates;
  for (int64_t j = 0; j < outputs; j += ownWidth) {
    ownInputs.push_back(D ? takeStream(x, ownWidth) : Vals());
    gates.push_back(z ? takeStream(z, ownWidth) : Vals());
  }
  Vals skips;
  while (!in.empty())
    skips.push_back(k.unpack(take(), D.element, 1)[0]);
  Val isOwner = active;
  if (t.lanes > t.rows)
    isOwner = isOwner & (q < double(t.rows));
  for (int64_t j = 0; j < outputs; j += ownWidth) {
    Vals results;
    for (int64_t i = 0; i < ownWidth; ++i) {
      Val result = totals[j + i];
      if (D)
        result = k.fma(skips[D.rank() == 1 ? 0 : j + i],
                       ownInputs[j / ownWidth][i], result);
      if (z)
        result = result * k.silu(gates[j / ownWidth][i]);
      results.push_back(result);
    }
    k.ifThen(isOwner & (channel + item + double(j) < double(channels)), [&] {
      output.store(output.at({batch, token, head}, ownAt(j)), results);
    });
  }
  slots.check(k, place);
  k.launch(e.gridOf(e.index(llvm::divideCeil(heads * t.warps, kWarps)),
                    sequences.count));
}
