//===- SelectiveScanStep.cpp - GPU kernel of one token of a scan ----------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// Decode: sequences of one token, from states to states. Bound by the memory
// that the states take, so neighbouring lanes have neighbouring states of a
// channel, as many as are loaded at once, and a thread goes through several
// sequences with the rates of its states in registers.
//
// Where delta comes from a projection of few columns, lanes of a channel have
// its row of the weight as well, some columns each.
//
//===----------------------------------------------------------------------===//

#include "GPULowering.h"
#include <numeric>

using namespace mlir;
using namespace corey;
using namespace corey::ssm;

static constexpr int64_t kThreads = 128;
/// Blocks that a multiprocessor runs at a time.
static constexpr int64_t kMinBlocks = 8;
/// With a row of a projection in registers.
static constexpr int64_t kMinBlocksProjecting = 4;

namespace {
/// The projection that makes delta, of a channel to some lanes.
class DeltaProjection {
public:
  DeltaProjection() = default;
  DeltaProjection(GPULowering &e, KernelBuilder &k, ProjectionOp op,
                  int64_t lanes, Val q)
      : k(&k), lanes(lanes), q(q), x(e, k, e.buffer(op.getX())),
        weight(e, k, e.buffer(op.getWeight())),
        bias(e, k, e.buffer(op.getBias())) {
    int64_t columns = cast<ShapedType>(op.getX().getType()).getShape().back();
    width = std::gcd(rowAlignment(op.getX()), rowAlignment(op.getWeight()));
    pieces = columns / width;
    ofLane = llvm::divideCeil(pieces, lanes);
  }
  explicit operator bool() const { return k; }
  size_t numLoaded() const { return ofLane; }

  /// What the lane needs of channel `c`, once.
  void loadWeights(Val c) {
    weights = load(weight, {c});
    if (bias)
      shift = bias.loadScalar({}, c);
  }
  Vals load(ArrayRef<Val> leading) const { return load(x, leading); }
  /// Delta, in all lanes, from what load() returned.
  Val value(ArrayRef<Val> loaded) const {
    Val sum = k->f32(0);
    for (int64_t i = 0; i < ofLane; ++i) {
      Val own = sum;
      for (auto [v, w] :
           llvm::zip_equal(k->unpack(loaded[i], x.element, width),
                           k->unpack(weights[i], weight.element, width)))
        own = k->fma(v, w, own);
      sum = isRagged(i) ? k->select(number(i) < double(pieces), own, sum) : own;
    }
    for (int64_t mask = lanes / 2; mask; mask /= 2)
      sum = sum + k->shuffleXor(sum, mask);
    return bias ? sum + shift : sum;
  }

private:
  Val number(int64_t i) const { return q + double(i * lanes); }
  bool isRagged(int64_t i) const { return (i + 1) * lanes > pieces; }
  Vals load(const DeviceTensor &tensor, ArrayRef<Val> leading) const {
    Vals loaded;
    for (int64_t i = 0; i < ofLane; ++i) {
      Val piece = number(i);
      if (isRagged(i))
        piece = k->min(piece, k->i32(pieces - 1));
      loaded.push_back(k->loadInPlace(tensor.at(leading, piece * double(width)),
                                      k->packedType(tensor.element, width)));
    }
    return loaded;
  }

  KernelBuilder *k = nullptr;
  int64_t lanes = 1;
  Val q;
  DeviceTensor x, weight, bias;
  int64_t width = 1, pieces = 0, ofLane = 0;
  Vals weights;
  Val shift;
};
} // namespace

void corey::emitSelectiveScanStep(GPULowering &e, SelectiveScanOp op,
                                  const DeviceSequences &sequences, Value y,
                                  const StateBuffers &buffers) {
  int64_t channels = cast<RankedTensorType>(op.getU().getType()).getDimSize(2);
  int64_t states = cast<RankedTensorType>(op.getA().getType()).getDimSize(1);
  int64_t groups = cast<RankedTensorType>(op.getB().getType()).getDimSize(2);
  int64_t lanes =
      std::min<int64_t>(llvm::PowerOf2Ceil(llvm::divideCeil(states, 4)), 32);
  int64_t own = llvm::divideCeil(states, lanes);
  bool isWhole = own * lanes == states;
  int64_t channelsPerBlock = kThreads / lanes;
  int64_t tiles = llvm::divideCeil(channels, channelsPerBlock);

  auto projection = e.plan ? dyn_cast_or_null<ProjectionOp>(e.plan->prologue())
                           : ProjectionOp();
  int64_t minBlocks = projection ? kMinBlocksProjecting : kMinBlocks;
  // What belongs to the model is asked for before predecessors have ended; all
  // else after that, by loads that stay there.
  bool isEarly = projection && e.target.chip.hasDependentLaunches;
  for (Value tensor :
       {Value(op.getA()), Value(op.getD()), Value(op.getDeltaBias()),
        projection ? Value(projection.getWeight()) : Value(),
        projection ? Value(projection.getBias()) : Value()})
    isEarly &= !tensor || OpBuffers::isWeight(tensor);

  KernelBuilder k(e.host, e.loc, e.kernels,
                  projection ? "selective_scan_project_step"
                             : "selective_scan_step",
                  {kThreads, minBlocks});
  InputStream u(e, k, op.getU()), delta(e, k, op.getDelta());
  InputStream z(e, k, op.getZ());
  DeviceTensor A(e, k, e.buffer(op.getA())), B(e, k, e.buffer(op.getB()));
  DeviceTensor C(e, k, e.buffer(op.getC())), D(e, k, e.buffer(op.getD()));
  DeviceTensor bias(e, k, e.buffer(op.getDeltaBias()));
  DeviceTensor initial(e, k, buffers.initial, !buffers.isInPlace()),
      state(e, k, buffers.last);
  DeviceSlots slots(e, k, buffers);
  OutputStream output(e, k, y);

  // So many sequences a block that all blocks run at once, if there are more.
  Value perBlock =
      e.max(e.ceilDiv(e.mul(sequences.count, tiles),
                      e.index(e.target.multiprocessors * minBlocks)),
            e.index(1));

  Val thread = k.threadIdx();
  Val q = thread % lanes;
  Val channel =
      k.blockIdx('x') * double(channelsPerBlock) + thread / double(lanes);
  Val inside = channel < double(channels);
  // Lanes beyond the last channel work on it again, and write nothing.
  Val c = k.min(channel, k.i32(channels - 1));
  Val group = c / double(channels / groups);
  Val n0 = q * double(own);

  /// The lane's states of a row of `tensor`; zero beyond the last.
  auto statesOf = [&](const DeviceTensor &tensor, Value of,
                      ArrayRef<Val> leading) {
    auto load = [&](Val n, int64_t count, int64_t alignment) {
      return isEarly ? tensor.elementsInPlace(leading, n, count, alignment)
                     : tensor.elements(leading, n, count, alignment);
    };
    if (isWhole)
      return load(n0, own, std::gcd(own, rowAlignment(of)));
    Vals values;
    for (int64_t i = 0; i < own; ++i) {
      Val n = n0 + double(i);
      values.push_back(k.select(n < double(states),
                                load(k.min(n, k.i32(states - 1)), 1, 1)[0],
                                k.f32(0)));
    }
    return values;
  };

  Val each = k.i32Argument(perBlock), count = k.i32Argument(sequences.count);
  Val first = k.min(rowOfBlock(k), count) * each;
  Val end = k.min(first + each, count);
  Val start = k.min(first, count - 1.0);
  if (isEarly) {
    k.launchDependents();
    // To be in the last cache is no read: the states may be written to yet.
    Val n = k.min(n0, k.i32(states - 1));
    k.prefetchL2(A.at({c}, n));
    if (D)
      k.prefetchL2(D.at({}, c));
    if (bias)
      k.prefetchL2(bias.at({}, c));
    if (initial && !buffers.slots)
      k.prefetchL2(initial.at({k.toI64(start), k.toI64(c)}, n));
  }
  DeltaProjection deltaOf;
  if (projection) {
    deltaOf = DeltaProjection(e, k, projection, lanes, q);
    deltaOf.loadWeights(c);
  }
  if (isEarly)
    k.waitForPredecessors();
  Vals rates;
  for (Val rate : statesOf(A, op.getA(), {c}))
    rates.push_back(rate * kLog2E);
  Val skip = D ? D.loadScalar({}, c) : Val();
  Val shift = bias ? bias.loadScalar({}, c) : Val();
  Val row = k.i64(0);
  /// What a sequence has: u, delta, z; B, C and the states before. A slot was
  /// asked for one sequence earlier.
  auto load = [&](Val sequence, const DeviceSlots::Place &place) {
    Val batch = k.toI64(sequence);
    Vals loaded;
    for (const InputStream *stream : {&u, &delta, &z}) {
      if (!*stream)
        continue;
      Cursor at = stream->at({batch, row}, c);
      llvm::append_range(loaded, isEarly ? stream->loadInPlace(at, 1)
                                         : stream->load(at, 1));
    }
    if (deltaOf)
      llvm::append_range(loaded, deltaOf.load({batch, row}));
    llvm::append_range(loaded,
                       statesOf(B, op.getB(), {batch, row, k.toI64(group)}));
    llvm::append_range(loaded,
                       statesOf(C, op.getC(), {batch, row, k.toI64(group)}));
    if (initial)
      llvm::append_range(loaded, slots.ifThere(k, place, [&] {
        return statesOf(initial, op.getInitialState(),
                        {k.toI64(place.row), k.toI64(c)});
      }));
    return loaded;
  };
  bool hasSlots = static_cast<bool>(buffers.slots);
  auto placeOf = [&](Val sequence) {
    return slots.of(k, k.max(k.min(sequence, end - 1.0), k.i32(0)));
  };
  // Each is on its way while the one before is worked on.
  DeviceSlots::Place place = slots.of(k, start);
  Vals loaded = load(start, place);
  if (hasSlots) {
    DeviceSlots::Place following = placeOf(first + 1.0);
    loaded.append({place.row, place.there, following.row, following.there});
  }
  k.forLoop(first, end, 1, loaded, [&](Val sequence, ArrayRef<Val> in) -> Vals {
    Val after = k.min(sequence + 1.0, end - 1.0);
    DeviceSlots::Place place{sequence, Val()}, following{after, Val()};
    if (hasSlots) {
      ArrayRef<Val> places = in.take_back(4);
      place = {places[0], places[1]};
      following = {places[2], places[3]};
    }
    Vals next = load(after, following);
    if (hasSlots) {
      DeviceSlots::Place third = placeOf(sequence + 2.0);
      next.append({following.row, following.there, third.row, third.there});
    }
    Val batch = k.toI64(sequence);
    auto take = [&](size_t size) {
      ArrayRef<Val> taken = in.take_front(size);
      in = in.drop_front(size);
      return taken;
    };
    auto value = [&](const InputStream &stream) {
      return stream.values(take(stream.numLoaded()), 1)[0];
    };
    Val input = value(u), dt, gate;
    ArrayRef<Val> ofDelta = take(delta.numLoaded());
    if (z)
      gate = value(z);
    if (deltaOf)
      dt = deltaOf.value(take(deltaOf.numLoaded()));
    dt = delta.values(ofDelta, 1, deltaOf ? projection.getY() : Value(),
                      deltaOf ? ArrayRef(dt) : ArrayRef<Val>())[0];
    Vals b(take(own)), o(take(own)), h;
    if (initial)
      h = Vals(take(own));
    if (bias)
      dt = dt + shift;
    if (op.getDeltaSoftplus())
      dt = k.softplus(dt);
    Val scaled = dt * input, sum = k.f32(0);
    for (int64_t i = 0; i < own; ++i) {
      b[i] = scaled * b[i];
      if (initial)
        b[i] = k.fma(k.ex2(dt * rates[i]), h[i], b[i]);
      sum = k.fma(o[i], b[i], sum);
    }
    for (int64_t mask = lanes / 2; mask; mask /= 2)
      sum = sum + k.shuffleXor(sum, mask);
    k.ifThen(inside & (q == 0.0), [&] {
      Val result = skip ? k.fma(skip, input, sum) : sum;
      if (z)
        result = result * k.silu(gate);
      output.store(output.at({batch, row}, c), {result});
    });
    slots.check(k, place);
    if (!state)
      return next;
    k.ifThen(place.there ? inside & place.there : inside, [&] {
      int64_t width =
          isWhole ? std::gcd(own, rowAlignment(op.getLastState())) : 1;
      for (int64_t i = 0; i < own; i += width) {
        Val n = n0 + double(i);
        auto store = [&] {
          k.store(k.pack(ArrayRef(b).slice(i, width), state.element),
                  state.at({k.toI64(place.row), k.toI64(c)}, n));
        };
        if (isWhole)
          store();
        else
          k.ifThen(n < double(states), store);
      }
    });
    return next;
  });
  k.launch(e.gridOf(e.index(tiles), e.ceilDiv(sequences.count, perBlock)));
}
