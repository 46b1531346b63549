//===- FusionTest.cpp - Fused programs against unfused ones ---------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// Every draw builds a program of one or two ops that kernels are made around,
// with random pointwise ops before and behind them, fuses it in every way there
// is, and compares what it computes with the unfused program and with the same
// ops in f64. Values between fused ops are not rounded: the narrow types agree
// less well.
//
//   COREY_TEST_SEED   seed of the first draw; draw i uses seed + i.
//   COREY_TEST_DRAWS  draws, in place of the usual number.
//
//===----------------------------------------------------------------------===//

#include "../reference/Reference.h"

#include "corey/Analysis/FusionPlan.h"
#include "corey/Dialect/SSM/IR/SSMOps.h"
#include "corey/Dialect/SSM/Transforms/Passes.h"
#include "corey/Executable.h"
#include "corey/InitAll.h"
#include "corey/Pipelines/Pipelines.h"
#include "mlir/Bytecode/BytecodeWriter.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/IR/Verifier.h"
#include "mlir/Parser/Parser.h"
#include "mlir/Pass/PassManager.h"
#include "mlir/Transforms/Passes.h"

#include "gtest/gtest.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <set>

using corey::Context;
using corey::DType;
using corey::Executable;
using corey::Tensor;
using corey::reference::Array;
namespace ref = corey::reference;

namespace {
using Shape = std::vector<int64_t>;
using Generator = std::function<double()>;

//===----------------------------------------------------------------------===//
// Randomness
//===----------------------------------------------------------------------===//

uint64_t firstSeed() {
  const char *text = std::getenv("COREY_TEST_SEED");
  return text ? std::strtoull(text, nullptr, 10) : 20240229;
}

class Random {
public:
  explicit Random(uint64_t seed) : engine(seed) {}
  /// Uniform in [low, high].
  int64_t integer(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(engine() %
                                      static_cast<uint64_t>(high - low + 1));
  }
  double uniform(double low, double high) {
    return low + (high - low) * static_cast<double>(engine() >> 11) * 0x1p-53;
  }
  bool chance(double probability) { return uniform(0, 1) < probability; }
  double normal() {
    return std::sqrt(-2 * std::log(1 - uniform(0, 1))) *
           std::cos(6.283185307179586 * uniform(0, 1));
  }
  template <typename T> T pick(const std::vector<T> &list) {
    return list[integer(0, static_cast<int64_t>(list.size()) - 1)];
  }

private:
  std::mt19937_64 engine;
};

template <class T> T take(corey::Expected<T> value) {
  if (!value) {
    ADD_FAILURE() << value.status().toString();
    std::abort();
  }
  return *std::move(value);
}

//===----------------------------------------------------------------------===//
// Random programs
//===----------------------------------------------------------------------===//

/// Sizes that a call decides on.
constexpr int64_t Batch = -1, Length = -2, Rows = -3;

struct Call {
  int64_t batch = 1, length = 1;
  std::vector<int64_t> starts;
  int64_t rows() const {
    return starts.empty() ? batch : static_cast<int64_t>(starts.size());
  }
  Shape of(Shape shape) const {
    for (int64_t &size : shape)
      size = size == Batch    ? batch
             : size == Length ? length
             : size == Rows   ? rows()
                              : size;
    return shape;
  }
};

/// A program as text, and as functions in f64.
class Program {
public:
  explicit Program(Random &random) : random(random) {
    narrow = random.chance(0.4);
    packed = random.chance(0.2);
    isStatic = random.chance(0.2);
    sizes = anyCall();
    build();
  }

  Call anyCall() {
    Call call;
    call.batch = packed ? 1 : random.pick<int64_t>({0, 1, 1, 2, 3});
    call.length = random.pick<int64_t>({0, 1, 2, 3, 5, 7, 33, 40, 70});
    if (packed) {
      call.starts.resize(random.integer(1, 4));
      for (int64_t &start : call.starts)
        start = random.integer(0, call.length);
      std::sort(call.starts.begin(), call.starts.end());
      call.starts[0] = 0;
    }
    return call;
  }

  std::string module() const {
    std::string parameters, names, types;
    for (int arg : arguments)
      parameters +=
          (parameters.empty() ? "" : ", ") + nameOf(arg) + ": " + typeOf(arg);
    for (int result : results) {
      names += (names.empty() ? "" : ", ") + nameOf(result);
      types += (types.empty() ? "" : ", ") + typeOf(result);
    }
    return "func.func @main(" + parameters + ") -> (" + types + ") {\n" + body +
           "  return " + names + " : " + types + "\n}\n";
  }

  /// Inputs of a call, some of them strided.
  std::vector<Tensor> inputs(const Call &call) {
    std::vector<Tensor> tensors;
    for (int arg : arguments) {
      Shape shape = call.of(values[arg].shape), extent = shape;
      bool padded = random.chance(0.4);
      for (int64_t &size : extent)
        size += padded ? random.integer(0, 2) : 0;
      Tensor tensor = take(Tensor::empty(values[arg].type, extent, true));
      for (size_t i = 0; i < shape.size(); ++i) {
        int64_t start = random.integer(0, extent[i] - shape[i]);
        tensor =
            take(tensor.slice(static_cast<int>(i), start, start + shape[i]));
      }
      Tensor plain = take(Tensor::empty(values[arg].type, shape));
      for (int64_t i = 0; i < plain.numElements(); ++i)
        corey::storeScalar(
            plain.dtype(),
            static_cast<char *>(plain.data()) +
                i * static_cast<int64_t>(dtypeSize(plain.dtype())),
            values[arg].generator
                ? values[arg].generator()
                : static_cast<double>(call.starts[static_cast<size_t>(i)]));
      EXPECT_TRUE(tensor.copyFrom(plain).isOk());
      tensors.push_back(tensor);
    }
    return tensors;
  }

  /// What the results are, and how large values of their shape get on the way.
  std::vector<std::pair<Array, double>>
  evaluate(const Call &call, const std::vector<Tensor> &tensors) {
    current.assign(values.size(), Array());
    for (size_t i = 0; i < arguments.size(); ++i)
      current[arguments[i]] = toArray(tensors[i]);
    for (auto &step : steps)
      step(call);
    std::vector<std::pair<Array, double>> wanted;
    for (int result : results) {
      double largest = 0;
      for (const Array &array : current)
        if (array.shape == current[result].shape)
          largest = std::max(largest, norm(array));
      wanted.push_back({current[result], largest});
    }
    return wanted;
  }

  static Array toArray(const Tensor &tensor) {
    Array array(tensor.shape());
    Tensor wide = take(tensor.to(DType::F64));
    std::copy_n(wide.dataAs<double>(), array.size(), array.data.begin());
    return array;
  }
  static double norm(const Array &array) {
    double sum = 0;
    for (double x : array.data)
      sum += x * x;
    return std::sqrt(sum);
  }

  /// Whether a 16-bit type is used, and whether all sizes are in the program.
  bool narrow, isStatic;
  Call sizes;

private:
  struct Value {
    DType type;
    Shape shape;
    /// About the largest magnitude.
    double bound;
    Generator generator;
  };

  DType anyType() {
    return narrow && random.chance(0.5)
               ? random.pick<DType>({DType::F16, DType::BF16})
               : DType::F32;
  }
  std::string nameOf(int value) const { return "%v" + std::to_string(value); }
  std::string typeOf(int value) const {
    std::string text = "tensor<";
    for (int64_t size :
         isStatic ? sizes.of(values[value].shape) : values[value].shape)
      text += (size < 0 ? "?" : std::to_string(size)) + "x";
    return text + dtypeName(values[value].type) + ">";
  }
  std::string keyword(const char *name, int value) const {
    return std::string(" ") + name + "(" + nameOf(value) + " : " +
           typeOf(value) + ")";
  }

  int define(DType type, const Shape &shape, double bound) {
    values.push_back({type, shape, bound, nullptr});
    return static_cast<int>(values.size()) - 1;
  }
  int argument(DType type, const Shape &shape, Generator generator = nullptr,
               double bound = 4) {
    int value = define(type, shape, bound);
    values[value].generator =
        generator ? std::move(generator) : [this] { return random.normal(); };
    arguments.push_back(value);
    return value;
  }
  void line(const std::string &text) { body += "  " + text + "\n"; }

  int unary(int x, const char *name, Array (*apply)(const Array &),
            double bound) {
    int y = define(values[x].type, values[x].shape, bound);
    line(nameOf(y) + " = ssm." + name + " " + nameOf(x) + " : " + typeOf(x));
    steps.push_back(
        [this, x, y, apply](const Call &) { current[y] = apply(current[x]); });
    return y;
  }
  int binary(int x, int other, const char *name,
             Array (*apply)(const Array &, const Array &), double bound) {
    int y = define(values[x].type, values[x].shape, bound);
    line(nameOf(y) + " = ssm." + name + " " + nameOf(x) + ", " + nameOf(other) +
         " : " + typeOf(x) + ", " + typeOf(other));
    steps.push_back([this, x, other, y, apply](const Call &) {
      current[y] = apply(current[x], current[other]);
    });
    return y;
  }

  /// A second operand for an op on `x`: a vector for the trailing axes, a new
  /// tensor, or something that there is.
  int partner(int x) {
    Shape shape = values[x].shape;
    double kind = random.uniform(0, 1);
    if (kind < 0.3)
      shape.erase(shape.begin(),
                  shape.begin() +
                      random.integer(0, static_cast<int64_t>(shape.size())));
    std::vector<int> alike;
    for (size_t i = 0; i < values.size(); ++i)
      if (values[i].shape == shape && values[i].bound < 30 &&
          values[i].type != DType::I32)
        alike.push_back(static_cast<int>(i));
    int other = kind > 0.6 && !alike.empty() ? random.pick(alike)
                                             : argument(anyType(), shape);
    return random.chance(0.3) ? pointwise(other, /*deep=*/false) : other;
  }

  int pointwise(int x, bool deep = true) {
    double bound = values[x].bound;
    switch (random.integer(0, deep ? 11 : 6)) {
    case 0:
      return unary(x, "neg", ref::neg, bound);
    case 1:
      return unary(x, "sigmoid", ref::sigmoid, 1);
    case 2:
      return unary(x, "silu", ref::silu, bound);
    case 3:
      return unary(x, "softplus", ref::softplus, bound + 1);
    case 4:
      return unary(x, "gelu", ref::gelu, bound);
    case 5:
      if (bound > 3)
        return unary(x, "sigmoid", ref::sigmoid, 1);
      return unary(x, "exp", ref::exp, std::exp(bound));
    case 6: {
      if (random.chance(0.5) && narrow) {
        int y = define(anyType(), values[x].shape, bound);
        line(nameOf(y) + " = ssm.cast " + nameOf(x) + " : " + typeOf(x) +
             " to " + typeOf(y));
        steps.push_back(
            [this, x, y](const Call &) { current[y] = current[x]; });
        return y;
      }
      double factor = random.pick<double>({0.5, -1.25});
      int y = define(values[x].type, values[x].shape, 1.25 * bound);
      line(nameOf(y) + " = ssm.scale " + nameOf(x) + " by " +
           std::to_string(factor) + " : " + typeOf(x));
      steps.push_back([this, x, y, factor](const Call &) {
        current[y] = ref::scale(current[x], factor);
      });
      return y;
    }
    case 7: {
      // x sigmoid(x), the long way.
      if (bound > 30)
        return unary(x, "sigmoid", ref::sigmoid, 1);
      int s = unary(x, "sigmoid", ref::sigmoid, 1);
      return binary(x, s, "mul", ref::mul, bound);
    }
    default: {
      int other = partner(x);
      double second = values[other].bound;
      if (values[other].shape == values[x].shape && random.chance(0.3))
        std::swap(x, other);
      if (bound * second < 40 && random.chance(0.5))
        return binary(x, other, "mul", ref::mul, bound * second);
      if (bound + second > 60)
        return unary(x, "sigmoid", ref::sigmoid, 1);
      return random.chance(0.5)
                 ? binary(x, other, "add", ref::add, bound + second)
                 : binary(x, other, "sub", ref::sub, bound + second);
    }
    }
  }

  int chain(int x, int64_t most) {
    for (int64_t i = random.integer(0, most); i > 0; --i)
      x = pointwise(x);
    return x;
  }
  /// Something to stream: computed on the way, as often as not.
  int stream(const Shape &shape, DType type) {
    std::vector<int> alike;
    for (size_t i = 0; i < values.size(); ++i)
      if (values[i].shape == shape && values[i].bound < 30)
        alike.push_back(static_cast<int>(i));
    int x = !alike.empty() && random.chance(0.3) ? random.pick(alike)
                                                 : argument(type, shape);
    return chain(x, 3);
  }
  /// Something that is read more than once.
  int parameter(const Shape &shape) {
    int x = argument(anyType(), shape);
    return random.chance(0.3) ? pointwise(x, /*deep=*/false) : x;
  }
  int rates(const Shape &shape) {
    if (random.chance(0.5))
      return argument(DType::F32, shape,
                      [this] { return random.uniform(-2, -0.1); });
    int log = argument(
        DType::F32, shape, [this] { return random.uniform(-2, 0.5); }, 2);
    return unary(unary(log, "exp", ref::exp, 2), "neg", ref::neg, 2);
  }
  int startsOfSequences() {
    if (starts < 0) {
      starts = argument(DType::I32, {Rows});
      values[starts].generator = nullptr;
    }
    return starts;
  }
  int64_t anyGroups(int64_t size) {
    int64_t groups = random.pick<int64_t>({1, 1, 2, size});
    return size % groups ? 1 : groups;
  }
  std::string anyChunk() {
    switch (random.integer(0, 3)) {
    case 0:
      return "chunk = #ssm.chunk<static = 3>";
    case 1:
      return "chunk = #ssm.chunk<runtime = @site" + std::to_string(sites++) +
             ">";
    default:
      return "";
    }
  }
  /// The line of an anchor, with its first result and the state it may have.
  std::pair<int, int> anchor(const std::string &text,
                             const std::vector<std::string> &attributes,
                             const std::vector<int> &types, DType type,
                             const Shape &shape, DType stateType,
                             const Shape &stateShape) {
    int y = define(type, shape, 15), state = -1;
    std::string left = nameOf(y), right = typeOf(y), list;
    if (!stateShape.empty() && random.chance(0.5)) {
      state = define(stateType, stateShape, 15);
      left += ", " + nameOf(state);
      right += ", " + typeOf(state);
      if (random.chance(0.8))
        results.push_back(state);
    }
    for (const std::string &attribute : attributes)
      if (!attribute.empty())
        list += (list.empty() ? "" : ", ") + attribute;
    std::string operands;
    for (int operand : types)
      operands += (operands.empty() ? "" : ", ") + typeOf(operand);
    line(left + " = ssm." + text + (list.empty() ? "" : " {" + list + "}") +
         " : " + operands + " -> " + right);
    return {y, state};
  }
  const Array *at(int value) { return value < 0 ? nullptr : &current[value]; }
  ref::Starts startsOf(const Call &call) {
    return packed ? &call.starts : nullptr;
  }

  int selectiveScan(int u) {
    Shape shape = values[u].shape;
    int64_t D = shape.back(), N = random.integer(1, 20), G = anyGroups(D);
    bool softplus = random.chance(0.5);
    int delta = stream(shape, anyType());
    if (!softplus)
      delta = unary(delta, "softplus", ref::softplus, 10);
    int A = rates({D, N});
    int B = parameter({Batch, Length, G, N}),
        C = parameter({Batch, Length, G, N});
    std::string text = "selective_scan " + nameOf(u) + ", " + nameOf(delta) +
                       ", " + nameOf(A) + ", " + nameOf(B) + ", " + nameOf(C);
    int skip = -1, z = -1, bias = -1, initial = -1;
    if (random.chance(0.5))
      text += keyword("D", skip = parameter({D}));
    if (random.chance(0.5))
      text += keyword("z", z = stream(shape, anyType()));
    if (softplus && random.chance(0.5))
      text += keyword("delta_bias", bias = parameter({D}));
    if (random.chance(0.4))
      text += keyword("initial_state", initial = parameter({Rows, D, N}));
    if (packed)
      text += keyword("seq_starts", startsOfSequences());
    auto [y, state] = anchor(
        text, {softplus ? "delta_softplus" : "", anyChunk()},
        {u, delta, A, B, C}, values[u].type, shape, anyType(), {Rows, D, N});
    steps.push_back([=, y = y, state = state](const Call &call) {
      ref::SelectiveScan op;
      op.u = at(u), op.delta = at(delta), op.A = at(A), op.B = at(B),
      op.C = at(C), op.D = at(skip), op.z = at(z), op.deltaBias = at(bias),
      op.initialState = at(initial), op.seqStarts = startsOf(call),
      op.deltaSoftplus = softplus;
      ref::ScanResult made = ref::selectiveScan(op);
      current[y] = made.y;
      if (state >= 0)
        current[state] = made.state;
    });
    return y;
  }

  int ssd(int x) {
    Shape shape = values[x].shape;
    int64_t H = shape[2], P = shape[3], N = random.integer(1, 20),
            G = anyGroups(H);
    bool discrete = random.chance(0.3),
         softplus = !discrete && random.chance(0.5);
    int dt = stream({Batch, Length, H}, anyType()), A = -1;
    std::string text = "ssd " + nameOf(x);
    if (discrete) {
      dt = unary(unary(dt, "softplus", ref::softplus, 10), "neg", ref::neg, 10);
      text += keyword("decay", dt);
    } else {
      if (!softplus)
        dt = unary(dt, "sigmoid", ref::sigmoid, 1);
      A = rates({H});
      text += keyword("dt", dt) + keyword("A", A);
    }
    int B = parameter({Batch, Length, G, N}),
        C = parameter({Batch, Length, G, N});
    text += " B(" + nameOf(B) + ") C(" + nameOf(C) + ")";
    int skip = -1, z = -1, bias = -1, initial = -1;
    if (random.chance(0.5))
      text += keyword(
          "D", skip = parameter(random.chance(0.5) ? Shape{H, P} : Shape{H}));
    if (random.chance(0.5))
      text += keyword("z", z = stream(shape, anyType()));
    if (softplus && random.chance(0.5))
      text += keyword("dt_bias", bias = parameter({H}));
    if (random.chance(0.4))
      text += keyword("initial_states", initial = parameter({Rows, H, P, N}));
    if (packed)
      text += keyword("seq_starts", startsOfSequences());
    auto [y, state] =
        anchor(text, {softplus ? "dt_softplus" : "", anyChunk()}, {x, B, C},
               values[x].type, shape, anyType(), {Rows, H, P, N});
    steps.push_back([=, y = y, state = state](const Call &call) {
      ref::SSD op;
      (discrete ? op.decay : op.dt) = at(dt);
      op.x = at(x), op.A = at(A), op.B = at(B), op.C = at(C), op.D = at(skip),
      op.z = at(z), op.dtBias = at(bias), op.initialStates = at(initial),
      op.seqStarts = startsOf(call), op.dtSoftplus = softplus;
      ref::ScanResult made = ref::ssd(op);
      current[y] = made.y;
      if (state >= 0)
        current[state] = made.state;
    });
    return y;
  }

  int causalConv(int x) {
    Shape shape = values[x].shape;
    int64_t D = shape.back(), W = random.integer(2, 4);
    int weight = parameter({D, W}), bias = -1, initial = -1;
    bool silu = random.chance(0.5);
    std::string text = "causal_conv " + nameOf(x) + ", " + nameOf(weight);
    if (random.chance(0.5))
      text += keyword("bias", bias = parameter({D}));
    if (random.chance(0.4))
      text += keyword("initial_state", initial = parameter({Rows, W - 1, D}));
    if (packed)
      text += keyword("seq_starts", startsOfSequences());
    auto [y, state] =
        anchor(text, {silu ? "silu" : ""}, {x, weight}, values[x].type, shape,
               values[x].type, {Rows, W - 1, D});
    steps.push_back([=, y = y, state = state](const Call &call) {
      ref::CausalConv op;
      op.x = at(x), op.weight = at(weight), op.bias = at(bias),
      op.initialState = at(initial), op.seqStarts = startsOf(call),
      op.silu = silu;
      ref::ScanResult made = ref::causalConv(op);
      current[y] = made.y;
      if (state >= 0)
        current[state] = made.state;
    });
    return y;
  }

  int rmsNorm(int x) {
    Shape shape = values[x].shape;
    int64_t D = shape.back(), group = anyGroups(D) > 1 ? D / 2 : 0;
    int weight = parameter({D}), residual = -1, z = -1;
    bool first = false;
    std::string text = "rms_norm " + nameOf(x) + ", " + nameOf(weight);
    if (random.chance(0.5))
      text += keyword("residual", residual = stream(shape, anyType()));
    if (random.chance(0.5)) {
      text += keyword("z", z = stream(shape, anyType()));
      first = random.chance(0.5);
    }
    if (group && D % group)
      group = 0;
    auto [y, out] = anchor(
        text,
        {"eps = 0.125 : f32", first ? "norm_before_gate" : "",
         group ? "group_size = " + std::to_string(group) + " : i64" : ""},
        {x, weight}, values[x].type, shape,
        residual < 0 ? DType::F32 : values[residual].type,
        residual < 0 ? Shape{} : shape);
    steps.push_back([=, y = y, out = out](const Call &) {
      ref::RMSNorm op;
      op.x = at(x), op.weight = at(weight), op.residual = at(residual),
      op.z = at(z), op.eps = 0.125, op.groupSize = group,
      op.normBeforeGate = first;
      ref::RMSNormResult made = ref::rmsNorm(op);
      current[y] = made.y;
      if (out >= 0)
        current[out] = made.residualOut;
    });
    return y;
  }

  int hadamard(int x) {
    Shape shape = values[x].shape;
    int64_t block = 1;
    while (shape.back() % (2 * block) == 0 && random.chance(0.9))
      block *= 2;
    int y = anchor("hadamard " + nameOf(x),
                   {"block = " + std::to_string(block) + " : i64"}, {x},
                   values[x].type, shape, DType::F32, {})
                .first;
    steps.push_back(
        [=](const Call &) { current[y] = ref::hadamard(current[x], block); });
    return y;
  }

  void build() {
    int64_t D = random.pick<int64_t>({1, 3, 8, 16, 17, 20, 24, 33}),
            rank = random.pick<int64_t>({1, 2, 3, 3, 3, 3, 4, 4});
    Shape shape = rank == 1   ? Shape{D}
                  : rank == 2 ? Shape{Length, D}
                  : rank == 3 ? Shape{Batch, Length, D}
                              : Shape{Batch, Length, random.integer(1, 4), D};
    if (rank < 3)
      packed = false;
    if (!packed)
      sizes.starts.clear();
    int x = stream(shape, anyType());
    for (int64_t i = random.pick<int64_t>({1, 1, 2}); i > 0; --i) {
      if (values[x].bound > 16)
        x = unary(x, "sigmoid", ref::sigmoid, 1);
      switch (random.integer(0, 6)) {
      case 0:
        x = rmsNorm(x);
        // A kernel can have both, and pointwise ops between them.
        if (random.chance(0.7))
          x = hadamard(random.chance(0.5) ? chain(x, 2) : x);
        break;
      case 1:
        x = hadamard(x);
        break;
      case 2:
        break;
      case 3:
        x = rank == 3 ? causalConv(x) : x;
        break;
      default:
        x = rank == 3 ? selectiveScan(x) : rank == 4 ? ssd(x) : rmsNorm(x);
      }
      x = chain(pointwise(x), 3);
    }
    results.push_back(x);
    // Values that are used in the program and outside of it.
    for (size_t i = 0; i < values.size(); ++i)
      if (values[i].type != DType::I32 && !values[i].generator &&
          std::find(results.begin(), results.end(), i) == results.end() &&
          random.chance(0.06))
        results.push_back(static_cast<int>(i));
  }

  Random &random;
  bool packed;
  int starts = -1, sites = 0;
  std::string body;
  std::vector<Value> values;
  std::vector<int> arguments, results;
  std::vector<std::function<void(const Call &)>> steps;
  /// Of the evaluation at hand.
  std::vector<Array> current;
};

//===----------------------------------------------------------------------===//
// Fusion
//===----------------------------------------------------------------------===//

std::string print(mlir::ModuleOp module) {
  std::string text;
  llvm::raw_string_ostream stream(text);
  module.print(stream);
  return text;
}

class Fuser {
public:
  Fuser() {
    mlir::DialectRegistry registry;
    corey::registerAllDialects(registry);
    context.appendDialectRegistry(registry);
    context.disableMultithreading();
  }

  mlir::OwningOpRef<mlir::ModuleOp> parse(const std::string &text) {
    return mlir::parseSourceString<mlir::ModuleOp>(text, &context);
  }
  static corey::ssm::SSMFuseOptions options(const char *strategy,
                                            const char *score, double tau,
                                            const char *machine = "cpu") {
    corey::ssm::SSMFuseOptions options;
    options.strategy = strategy;
    options.score = score;
    options.tau = tau;
    options.machine = machine;
    return options;
  }
  void fuse(mlir::ModuleOp module, const corey::ssm::SSMFuseOptions &options) {
    mlir::PassManager pm(&context);
    pm.addNestedPass<mlir::func::FuncOp>(corey::ssm::createSSMFuse(options));
    ASSERT_TRUE(mlir::succeeded(pm.run(module)));
  }
  void canonicalize(mlir::ModuleOp module) {
    mlir::PassManager pm(&context);
    pm.addPass(mlir::createCanonicalizerPass());
    pm.addPass(mlir::createCSEPass());
    ASSERT_TRUE(mlir::succeeded(pm.run(module)));
  }

  /// The number of regions, all of which are kernels.
  int countKernels(mlir::ModuleOp module) {
    int count = 0;
    module.walk([&](corey::ssm::FusedOp fused) {
      ++count;
      std::string reason;
      EXPECT_TRUE(mlir::succeeded(corey::planFusedRegion(fused, &reason)))
          << reason;
      std::set<void *> inputs;
      for (mlir::Value input : fused.getInputs())
        EXPECT_TRUE(inputs.insert(input.getAsOpaquePointer()).second)
            << "captured twice";
    });
    return count;
  }

  /// Fuses a program and holds it to what is true of every fused one.
  std::string fuseAndCheck(const std::string &source,
                           const corey::ssm::SSMFuseOptions &options) {
    auto module = parse(source);
    EXPECT_TRUE(module);
    canonicalize(*module);
    fuse(*module, options);
    EXPECT_TRUE(mlir::succeeded(mlir::verify(*module)));
    std::string text = print(*module);
    SCOPED_TRACE(text);
    int kernels = countKernels(*module);

    std::string bytes;
    llvm::raw_string_ostream stream(bytes);
    EXPECT_TRUE(mlir::succeeded(mlir::writeBytecodeToFile(*module, stream)));
    auto again = parse(bytes);
    EXPECT_TRUE(again);
    EXPECT_EQ(print(*again), text);

    fuse(*module, options);
    EXPECT_EQ(print(*module), text) << "fusing twice";
    canonicalize(*module);
    EXPECT_EQ(countKernels(*module), kernels);
    return text;
  }

  mlir::MLIRContext context;
};

testing::AssertionResult isClose(const Array &got, const Array &want,
                                 double largest, double tolerance) {
  if (got.shape != want.shape)
    return testing::AssertionFailure() << "shapes differ";
  double error = 0;
  int64_t worst = 0;
  for (int64_t i = 0; i < got.size(); ++i) {
    double d = got.data[i] - want.data[i];
    if (!std::isfinite(d))
      return testing::AssertionFailure()
             << "element " << i << " is " << got.data[i];
    if (std::abs(d) > std::abs(got.data[worst] - want.data[worst]))
      worst = i;
    error += d * d;
  }
  // What cancels keeps the error of what it was.
  double scale = std::max(Program::norm(want), 0.05 * largest);
  if (std::sqrt(error) <= tolerance * scale)
    return testing::AssertionSuccess();
  return testing::AssertionFailure()
         << "relative error " << std::sqrt(error) / scale << " beyond "
         << tolerance << "; element " << worst << ": expected "
         << want.data[worst] << ", got " << got.data[worst];
}

std::shared_ptr<Executable> compile(Context &context, const std::string &source,
                                    const std::string &fusion) {
  corey::CompileOptions options;
  options.fusion = fusion;
  options.optLevel = 1;
  auto executable = context.compile(source, options);
  if (!executable)
    ADD_FAILURE() << executable.status().toString() << "\n" << source;
  return executable ? *executable : nullptr;
}

TEST(Fusion, RandomPrograms) {
  const char *text = std::getenv("COREY_TEST_DRAWS");
  int64_t draws = text ? std::strtoll(text, nullptr, 10) : 40;
  std::printf("COREY_TEST_SEED=%llu\n",
              static_cast<unsigned long long>(firstSeed()));
  std::shared_ptr<Context> context = take(Context::create());
  Fuser fuser;
  struct Way {
    const char *strategy, *score;
    double tau;
    const char *machine;
  };
  // What CompileOptions::fusion stands for, and ways that fuse more.
  const Way ways[] = {
      {"dp", "physical", 0, "cpu"},     {"entropy", "paper", 0.52, "cpu"},
      {"entropy", "paper", -9, "cpu"},  {"arithmetic", "paper", 0.52, "cpu"},
      {"static", "paper", 0.52, "cpu"}, {"dp", "paper", -9, "cpu"},
      {"dp", "physical", 0, "h200"},    {"entropy", "physical", 0, "h200"}};
  int64_t compiled = 0, kernels = 0;
  for (int64_t draw = 0; draw < draws; ++draw) {
    uint64_t seed = firstSeed() + static_cast<uint64_t>(draw);
    SCOPED_TRACE("COREY_TEST_SEED=" + std::to_string(seed) +
                 " COREY_TEST_DRAWS=1");
    Random random(seed);
    Program program(random);
    std::string source = program.module();
    SCOPED_TRACE(source);
    auto plain = compile(*context, source, "none");
    ASSERT_TRUE(plain);
    ++compiled;
    std::vector<std::string> names;
    std::vector<std::shared_ptr<Executable>> fused;
    std::set<std::string> known;
    for (const Way &way : ways) {
      std::string name = std::string(way.strategy) + " " + way.score + " " +
                         std::to_string(way.tau) + " " + way.machine;
      SCOPED_TRACE(name);
      std::string text =
          fuser.fuseAndCheck(source, Fuser::options(way.strategy, way.score,
                                                    way.tau, way.machine));
      if (testing::Test::HasFailure())
        return;
      // Ways differ in their scores more often than in what they make.
      std::string shape = text;
      for (size_t at; (at = shape.find("score(<")) != std::string::npos;)
        shape.erase(at, shape.find(">)", at) + 2 - at);
      if (text.find("ssm.fused") == std::string::npos ||
          !known.insert(shape).second)
        continue;
      bool isPublic = &way == ways;
      auto executable =
          compile(*context, isPublic ? source : text, isPublic ? "dp" : "none");
      ASSERT_TRUE(executable);
      ++compiled;
      kernels += executable->traffic().kernels;
      names.push_back(name);
      fused.push_back(executable);
    }
    for (int call = 0; call < (program.isStatic ? 1 : 3); ++call) {
      Call sizes = call ? program.anyCall() : program.sizes;
      std::vector<Tensor> inputs = program.inputs(sizes);
      std::string described;
      for (const Tensor &input : inputs)
        described += input.describe() + "\n";
      SCOPED_TRACE(described);
      auto wanted = program.evaluate(sizes, inputs);
      std::vector<Tensor> outputs;
      auto status = plain->run("main", inputs, outputs);
      ASSERT_TRUE(status.isOk()) << status.toString();
      std::vector<Array> unfused;
      for (size_t i = 0; i < wanted.size(); ++i) {
        unfused.push_back(Program::toArray(outputs[i]));
        EXPECT_TRUE(isClose(unfused[i], wanted[i].first, wanted[i].second,
                            program.narrow ? 2e-2 : 5e-6))
            << "result " << i << " without fusion";
      }
      for (size_t k = 0; k < fused.size(); ++k) {
        outputs.clear();
        status = fused[k]->run("main", inputs, outputs);
        ASSERT_TRUE(status.isOk()) << status.toString();
        for (size_t i = 0; i < wanted.size(); ++i) {
          Array got = Program::toArray(outputs[i]);
          EXPECT_TRUE(isClose(got, wanted[i].first, wanted[i].second,
                              program.narrow ? 2e-2 : 5e-6))
              << "result " << i << " with " << names[k];
          EXPECT_TRUE(isClose(got, unfused[i], wanted[i].second,
                              program.narrow ? 2e-2 : 1e-6))
              << "result " << i << " against no fusion with " << names[k];
        }
      }
    }
  }
  std::printf("%lld programs, %lld kernels in the fused ones\n",
              static_cast<long long>(compiled),
              static_cast<long long>(kernels));
}

//===----------------------------------------------------------------------===//
// Time
//===----------------------------------------------------------------------===//

/// Layers of Mamba-1, every operation on its own.
std::string largeModel(int layers) {
  const std::string X = "tensor<?x?x256xf32>", T = "tensor<?x?x512xf32>",
                    V = "tensor<512xf32>", A = "tensor<512x16xf32>",
                    S = "tensor<?x?x16xf32>", G = "tensor<?x?x1x16xf32>",
                    W = "tensor<?x?x1024xf32>", K = "tensor<?x?x48xf32>";
  std::string text =
      "func.func @main(%x: " + X +
      ", %n: tensor<256xf32>, %wi: tensor<1024x256xf32>, %wc: "
      "tensor<512x4xf32>, %v: " +
      V + ", %wx: tensor<48x512xf32>, %wd: " + A + ", %a: " + A +
      ", %wo: tensor<256x512xf32>) -> " + X +
      " {\n%c0 = arith.constant 0 : index\n%c1 = arith.constant 1 : index\n"
      "%b = tensor.dim %x, %c0 : " +
      X + "\n%l = tensor.dim %x, %c1 : " + X + "\n";
  auto slice = [&](const std::string &from, int offset, int size,
                   const std::string &type, const std::string &result) {
    return " = tensor.extract_slice " + from + "[0, 0, " +
           std::to_string(offset) + "] [%b, %l, " + std::to_string(size) +
           "] [1, 1, 1] : " + type + " to " + result + "\n";
  };
  std::string x = "%x";
  for (int i = 0; i < layers; ++i) {
    auto v = [&](const char *name) {
      return "%" + std::string(name) + "_" + std::to_string(i);
    };
    auto unary = [&](const char *y, const char *op, const std::string &from,
                     const std::string &type) {
      text += v(y) + " = ssm." + op + " " + from + " : " + type + "\n";
    };
    auto binary = [&](const char *y, const char *op, const std::string &lhs,
                      const std::string &rhs, const std::string &type,
                      const std::string &other) {
      text += v(y) + " = ssm." + op + " " + lhs + ", " + rhs + " : " + type +
              ", " + other + "\n";
    };
    auto apply = [&](const char *y, const char *op, const std::string &lhs,
                     const std::string &rhs, const std::string &type,
                     const std::string &other, const std::string &result) {
      text += v(y) + " = ssm." + op + " " + lhs + ", " + rhs + " : " + type +
              ", " + other + " -> " + result + "\n";
    };
    auto expand = [&](const char *y, const char *from) {
      text += v(y) + " = tensor.expand_shape " + v(from) +
              " [[0], [1], [2, 3]] output_shape [%b, %l, 1, 16] : " + S +
              " into " + G + "\n";
    };
    apply("n", "rms_norm", x, "%n", X, "tensor<256xf32>", X);
    apply("i", "projection", v("n"), "%wi", X, "tensor<1024x256xf32>", W);
    text += v("p") + slice(v("i"), 0, 512, W, T);
    text += v("z") + slice(v("i"), 512, 512, W, T);
    apply("c", "causal_conv", v("p"), "%wc", T, "tensor<512x4xf32>", T);
    binary("k", "add", v("c"), "%v", T, V);
    unary("u", "silu", v("k"), T);
    apply("s", "projection", v("u"), "%wx", T, "tensor<48x512xf32>", K);
    text += v("d") + slice(v("s"), 0, 16, K, S);
    text += v("B") + slice(v("s"), 16, 16, K, S);
    text += v("C") + slice(v("s"), 32, 16, K, S);
    expand("Bx", "B");
    expand("Cx", "C");
    apply("e", "projection", v("d"), "%wd", S, A, T);
    unary("f", "exp", "%a", A);
    unary("A", "neg", v("f"), A);
    binary("h", "add", v("e"), "%v", T, V);
    unary("t", "softplus", v("h"), T);
    text += v("y") + " = ssm.selective_scan " + v("u") + ", " + v("t") + ", " +
            v("A") + ", " + v("Bx") + ", " + v("Cx") + " : " + T + ", " + T +
            ", " + A + ", " + G + ", " + G + " -> " + T + "\n";
    binary("D", "mul", v("u"), "%v", T, V);
    binary("q", "add", v("y"), v("D"), T, T);
    unary("g", "silu", v("z"), T);
    binary("m", "mul", v("q"), v("g"), T, T);
    apply("o", "projection", v("m"), "%wo", T, "tensor<256x512xf32>", X);
    binary("r", "add", v("o"), x, X, X);
    x = v("r");
  }
  return text + "return " + x + " : " + X + "\n}\n";
}

TEST(Fusion, TimeOfALargeModel) {
  Fuser fuser;
  std::string source = largeModel(64);
  auto parsed = fuser.parse(source);
  ASSERT_TRUE(parsed);
  for (auto [strategy, score, tau, least] :
       {std::tuple<const char *, const char *, double, int>{"entropy", "paper",
                                                            0.52, 0},
        {"entropy", "paper", -9, 192},
        {"entropy", "physical", 0, 192},
        {"dp", "paper", 0.52, 0},
        {"dp", "paper", -9, 192},
        {"dp", "physical", 0, 192}}) {
    SCOPED_TRACE(std::string(strategy) + " " + score);
    double best = INFINITY;
    int kernels = 0;
    for (int i = 0; i < 3; ++i) {
      mlir::OwningOpRef<mlir::ModuleOp> module = parsed->clone();
      auto begin = std::chrono::steady_clock::now();
      fuser.fuse(*module, Fuser::options(strategy, score, tau));
      std::chrono::duration<double, std::milli> time =
          std::chrono::steady_clock::now() - begin;
      best = std::min(best, time.count());
      kernels = fuser.countKernels(*module);
    }
    std::printf("%s %s, tau %g: %.1f ms, %d regions\n", strategy, score, tau,
                best, kernels);
    EXPECT_GE(kernels, least);
    // With sanitizers and without optimization everything is slower.
#if defined(NDEBUG) && !__has_feature(address_sanitizer)
    EXPECT_LE(best, 100);
#endif
  }
}

/// Squares of squares: there are as many paths as the result has factors.
TEST(Fusion, ManyPaths) {
  std::string type = "tensor<?x?x8xf32>", last = "%y", body;
  for (int i = 0; i < 60; ++i) {
    std::string next = "%s" + std::to_string(i);
    body += next + " = ssm.add " + last + ", " + last + " : " + type + ", " +
            type + "\n" + next + "h = ssm.scale " + next + " by 0.5 : " + type +
            "\n";
    last = next + "h";
  }
  std::shared_ptr<Context> context = take(Context::create());
  for (bool hasAnchor : {false, true}) {
    std::string taps = "tensor<8x4xf32>",
                region = "ssm.fused ins(%x, %w : " + type + ", " + taps +
                         ") -> " + type + " {\n^bb0(%a: " + type +
                         ", %b: " + taps + "):\n" +
                         (hasAnchor ? "%y = ssm.causal_conv %a, %b : " + type +
                                          ", " + taps + " -> " + type + "\n"
                                    : "%y = ssm.neg %a : " + type + "\n") +
                         body + "ssm.yield " + last + " : " + type + "\n}\n",
                source = "func.func @main(%x: " + type + ", %w: " + taps +
                         ") -> " + type + " {\n%r = " + region +
                         "return %r : " + type + "\n}\n";
    auto executable = compile(*context, source, "dp");
    ASSERT_TRUE(executable);
    EXPECT_EQ(executable->traffic().kernels, 1);
    Tensor x = take(Tensor::empty(DType::F32, {1, 2, 8})),
           w = take(Tensor::empty(DType::F32, {8, 4}));
    std::fill_n(x.dataAs<float>(), 16, 3.0f);
    std::fill_n(w.dataAs<float>(), 32, 1.0f);
    std::vector<Tensor> outputs;
    ASSERT_TRUE(executable->run("main", {x, w}, outputs).isOk());
    EXPECT_EQ(outputs[0].dataAs<float>()[0], hasAnchor ? 3.0f : -3.0f);
    EXPECT_EQ(outputs[0].dataAs<float>()[15], hasAnchor ? 6.0f : -3.0f);
  }
}

} // namespace
