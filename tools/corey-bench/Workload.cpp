//===- Workload.cpp - Programs to measure ---------------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "Workload.h"
#include "corey/Device/CUDA.h"
#include "corey/ToolUtils.h"
#include "llvm/ADT/StringMap.h"
#include "llvm/Support/FormatVariadic.h"
#include "llvm/Support/MemoryBuffer.h"
#include "llvm/Support/Parallel.h"
#include "llvm/Support/raw_ostream.h"
#include "llvm/TargetParser/Host.h"
#include <cmath>
#include <cstring>
#include <ctime>

using namespace corey;

std::string corey::tensorType(const std::vector<int64_t> &shape,
                              unsigned dynamic, const char *element) {
  std::string text = "tensor<";
  for (size_t i = 0; i < shape.size(); ++i)
    text += (i < dynamic ? "?" : std::to_string(shape[i])) + "x";
  return text + element + ">";
}

namespace {
const char *elementName(DType dtype) { return dtypeName(dtype); }

/// `tensor` as a vector of doubles.
std::vector<double> widen(const Tensor &tensor) {
  Expected<Tensor> wide = tensor.to(DType::F64);
  return std::vector<double>(wide->dataAs<double>(),
                             wide->dataAs<double>() + wide->numElements());
}

Tensor fromDoubles(const std::vector<double> &values,
                   const std::vector<int64_t> &shape) {
  Tensor tensor = *Tensor::empty(DType::F64, shape);
  std::copy(values.begin(), values.end(), tensor.dataAs<double>());
  return tensor;
}

/// A tensor whose element i is `f(i)`.
template <typename F>
Tensor filled(DType dtype, const std::vector<int64_t> &shape, F f) {
  Tensor tensor = *Tensor::empty(dtype, shape);
  char *data = static_cast<char *>(tensor.data());
  for (int64_t i = 0; i < tensor.numElements(); ++i)
    storeScalar(dtype, data + i * dtypeSize(dtype), f(i));
  return tensor;
}

double softplus(double x) {
  return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x));
}
double silu(double x) { return x / (1 + std::exp(-x)); }
double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

} // namespace

Tensor corey::makeActivation(const WorkloadOptions &options,
                             const std::vector<int64_t> &shape, uint64_t seed,
                             double mean, double deviation) {
  // Drawing more than that takes longer than all else.
  constexpr int64_t kMostDrawn = int64_t(1) << 24;
  constexpr int64_t period = 65521;
  int64_t count = 1;
  for (int64_t size : shape)
    count *= size;
  if (count <= (options.reference ? kMostDrawn : period))
    return *randomTensor(options.dtype, shape, seed, mean, deviation);
  Tensor tile = *randomTensor(options.dtype, {period}, seed, mean, deviation);
  Tensor tensor = *Tensor::empty(options.dtype, shape);
  size_t size = dtypeSize(options.dtype);
  for (int64_t i = 0; i < count; i += period)
    std::memcpy(static_cast<char *>(tensor.data()) + i * size, tile.data(),
                std::min(period, count - i) * size);
  return tensor;
}

std::vector<Tensor> corey::scanReference(const ScanOperands &operands) {
  int64_t B = operands.u.dim(0), L = operands.u.dim(1), D = operands.u.dim(2),
          N = operands.A.dim(1);
  auto wide = [](const std::optional<Tensor> &tensor) {
    return tensor ? widen(*tensor) : std::vector<double>();
  };
  std::vector<double> u = wide(operands.u), delta = wide(operands.delta),
                      A = wide(operands.A), b = wide(operands.B),
                      c = wide(operands.C), skip = wide(operands.D),
                      z = wide(operands.z), bias = wide(operands.bias),
                      h = wide(operands.initialState), y(B * L * D);
  h.resize(B * D * N, 0.0);
  // A cache line of channels.
  constexpr int64_t kBlock = 8;
  int64_t blocks = (D + kBlock - 1) / kBlock;
  llvm::parallelFor(0, size_t(B * blocks), [&](size_t item) {
    int64_t batch = int64_t(item) / blocks, block = int64_t(item) % blocks;
    for (int64_t t = 0; t < L; ++t)
      for (int64_t d = block * kBlock; d < std::min(D, (block + 1) * kBlock);
           ++d) {
        int64_t i = (batch * L + t) * D + d;
        double step = softplus(delta[i] + (bias.empty() ? 0 : bias[d])),
               sum = skip.empty() ? 0 : skip[d] * u[i];
        for (int64_t n = 0; n < N; ++n) {
          double &state = h[(batch * D + d) * N + n];
          state = std::exp(step * A[d * N + n]) * state +
                  step * u[i] * b[(batch * L + t) * N + n];
          sum += c[(batch * L + t) * N + n] * state;
        }
        y[i] = z.empty() ? sum : sum * silu(z[i]);
      }
  });
  return {fromDoubles(y, {B, L, D}), fromDoubles(h, {B, D, N})};
}

Workload corey::makeScan(const WorkloadOptions &options) {
  int64_t B = options.shape[0], L = options.shape[1], D = options.shape[2],
          N = options.shape[3];
  DType dt = options.dtype;
  Workload w;
  w.inputs = {
      makeActivation(options, {B, L, D}, 1),
      makeActivation(options, {B, L, D}, 2, 0.0, 0.5),
      filled(DType::F32, {D, N}, [&](int64_t i) { return -double(i % N + 1); }),
      makeActivation(options, {B, L, 1, N}, 3),
      makeActivation(options, {B, L, 1, N}, 4),
      *randomTensor(DType::F32, {D}, 5),
      makeActivation(options, {B, L, D}, 6),
      *randomTensor(DType::F32, {D}, 7, -2.0, 0.5)};
  std::string act = tensorType({B, L, D}, 2, elementName(dt));
  std::string bc = tensorType({B, L, 1, N}, 2, elementName(dt));
  std::string A = tensorType({D, N}, 0, "f32"), vec = tensorType({D}, 0, "f32");
  std::string state = tensorType({B, D, N}, 1, "f32");
  w.program =
      "func.func @main(%u: " + act + ", %delta: " + act + ", %A: " + A +
      ", %B: " + bc + ", %C: " + bc + ", %D: " + vec + ", %z: " + act +
      ", %bias: " + vec + ") -> (" + act + ", " + state + ") {\n" +
      "  %y, %h = ssm.selective_scan %u, %delta, %A, %B, %C D(%D : " + vec +
      ") z(%z : " + act + ") delta_bias(%bias : " + vec +
      ") {delta_softplus, chunk = #ssm.chunk<runtime = @scan>} : " + act +
      ", " + act + ", " + A + ", " + bc + ", " + bc + " -> " + act + ", " +
      state + "\n  return %y, %h : " + act + ", " + state + "\n}\n";
  double tokens = double(B) * L, size = dtypeSize(dt);
  w.bytes = size * tokens * (4.0 * D + 2.0 * N) + 4.0 * B * D * N;
  w.flops = tokens * D * N * 7.0;
  w.exponentials = tokens * D * (N + 3.0);
  if (!options.reference)
    return w;
  w.expected = scanReference({w.inputs[0],
                              w.inputs[1],
                              w.inputs[2],
                              w.inputs[3],
                              w.inputs[4],
                              w.inputs[5],
                              w.inputs[6],
                              w.inputs[7],
                              {}});
  return w;
}

Workload corey::makeStep(const WorkloadOptions &options) {
  int64_t B = options.shape[0], D = options.shape[1], N = options.shape[2];
  DType dt = options.dtype;
  Workload w;
  w.inputs = {
      *randomTensor(dt, {B, 1, D}, 1),
      *randomTensor(dt, {B, 1, D}, 2, 0.0, 0.5),
      filled(DType::F32, {D, N}, [&](int64_t i) { return -double(i % N + 1); }),
      *randomTensor(dt, {B, 1, 1, N}, 3),
      *randomTensor(dt, {B, 1, 1, N}, 4),
      *randomTensor(DType::F32, {D}, 5),
      *randomTensor(dt, {B, 1, D}, 6),
      *randomTensor(DType::F32, {D}, 7, -2.0, 0.5),
      *randomTensor(DType::F32, {B, D, N}, 8)};
  std::string element = elementName(dt),
              act = "tensor<?x1x" + std::to_string(D) + "x" + element + ">",
              bc = "tensor<?x1x1x" + std::to_string(N) + "x" + element + ">";
  std::string A = tensorType({D, N}, 0, "f32"), vec = tensorType({D}, 0, "f32");
  std::string state = tensorType({B, D, N}, 1, "f32");
  w.program =
      "func.func @main(%u: " + act + ", %delta: " + act + ", %A: " + A +
      ", %B: " + bc + ", %C: " + bc + ", %D: " + vec + ", %z: " + act +
      ", %bias: " + vec + ", %h0: " + state + ") -> (" + act + ", " + state +
      ") {\n  %y, %h = ssm.selective_scan %u, %delta, %A, %B, %C D(%D : " +
      vec + ") z(%z : " + act + ") delta_bias(%bias : " + vec +
      ") initial_state(%h0 : " + state + ") {delta_softplus} : " + act + ", " +
      act + ", " + A + ", " + bc + ", " + bc + " -> " + act + ", " + state +
      "\n  return %y, %h : " + act + ", " + state + "\n}\n";
  double sequences = double(B), size = dtypeSize(dt);
  w.bytes = sequences * (size * (4.0 * D + 2.0 * N) + 8.0 * D * N) +
            4.0 * (D * N + 2.0 * D);
  w.flops = sequences * D * N * 7.0;
  w.exponentials = sequences * D * (N + 3.0);
  if (!options.reference)
    return w;
  w.expected = scanReference({w.inputs[0], w.inputs[1], w.inputs[2],
                              w.inputs[3], w.inputs[4], w.inputs[5],
                              w.inputs[6], w.inputs[7], w.inputs[8]});
  return w;
}

Workload corey::makeSSDStep(const WorkloadOptions &options) {
  int64_t B = options.shape[0], H = options.shape[1], P = options.shape[2],
          N = options.shape[3], G = options.shape[4];
  DType dt = options.dtype;
  Workload w;
  w.inputs = {
      *randomTensor(dt, {B, 1, H, P}, 1),
      *randomTensor(dt, {B, 1, H}, 2, 0.0, 0.5),
      filled(DType::F32, {H},
             [&](int64_t i) { return -(1.0 + double(i) * 15.0 / double(H)); }),
      *randomTensor(dt, {B, 1, G, N}, 3),
      *randomTensor(dt, {B, 1, G, N}, 4),
      *randomTensor(DType::F32, {H}, 5),
      *randomTensor(DType::F32, {H}, 7, -4.0, 0.5),
      *randomTensor(dt, {B, 1, H, P}, 6),
      *randomTensor(DType::F32, {B, H, P, N}, 8)};
  std::string element = elementName(dt), rest = "x" + element + ">";
  std::string x = "tensor<?x1x" + std::to_string(H) + "x" + std::to_string(P) +
                  rest,
              dts = "tensor<?x1x" + std::to_string(H) + rest,
              bc = "tensor<?x1x" + std::to_string(G) + "x" + std::to_string(N) +
                   rest,
              vec = tensorType({H}, 0, "f32"),
              state = tensorType({B, H, P, N}, 1, "f32");
  w.program = "func.func @main(%x: " + x + ", %dt: " + dts + ", %A: " + vec +
              ", %B: " + bc + ", %C: " + bc + ", %D: " + vec +
              ", %bias: " + vec + ", %z: " + x + ", %s0: " + state + ") -> (" +
              x + ", " + state + ") {\n  %y, %s = ssm.ssd %x dt(%dt : " + dts +
              ") A(%A : " + vec + ") B(%B) C(%C) D(%D : " + vec +
              ") z(%z : " + x + ") dt_bias(%bias : " + vec +
              ") initial_states(%s0 : " + state + ") {dt_softplus} : " + x +
              ", " + bc + ", " + bc + " -> " + x + ", " + state +
              "\n  return %y, %s : " + x + ", " + state + "\n}\n";
  double sequences = double(B), size = dtypeSize(dt);
  w.bytes =
      sequences * (size * (3.0 * H * P + H + 2.0 * G * N) + 8.0 * H * P * N) +
      12.0 * H;
  w.flops = sequences * H * P * (5.0 * N + 4.0);
  w.exponentials = sequences * H * (P + 2.0);
  if (!options.reference)
    return w;
  SSDOperands o;
  o.x = w.inputs[0];
  o.dt = w.inputs[1];
  o.A = w.inputs[2];
  o.B = w.inputs[3];
  o.C = w.inputs[4];
  o.D = w.inputs[5];
  o.bias = w.inputs[6];
  o.initialStates = w.inputs[8];
  w.expected = ssdReference(o);
  std::vector<double> gates = widen(w.inputs[7]);
  auto *y = w.expected[0].dataAs<double>();
  for (size_t i = 0; i < gates.size(); ++i)
    y[i] *= silu(gates[i]);
  return w;
}

Workload corey::makeConv(const WorkloadOptions &options) {
  constexpr int64_t taps = 4;
  int64_t B = options.shape[0], L = options.shape[1], D = options.shape[2];
  DType dt = options.dtype;
  Workload w;
  w.inputs = {*randomTensor(dt, {B, L, D}, 1),
              *randomTensor(dt, {D, taps}, 2, 0, 0.5),
              *randomTensor(dt, {D}, 3, 0, 0.1)};
  std::string act = tensorType({B, L, D}, 2, elementName(dt)),
              weight = tensorType({D, taps}, 0, elementName(dt)),
              bias = tensorType({D}, 0, elementName(dt));
  w.program = "func.func @main(%x: " + act + ", %w: " + weight +
              ", %b: " + bias + ") -> " + act +
              " {\n  %y = ssm.causal_conv %x, %w bias(%b : " + bias +
              ") {silu} : " + act + ", " + weight + " -> " + act +
              "\n  return %y : " + act + "\n}\n";
  double elements = double(B) * L * D;
  w.bytes = dtypeSize(dt) * (2 * elements + (taps + 1.0) * D);
  w.flops = elements * taps;
  w.exponentials = elements;
  if (!options.reference)
    return w;
  std::vector<double> x = widen(w.inputs[0]), weights = widen(w.inputs[1]),
                      shift = widen(w.inputs[2]), y(x.size());
  for (int64_t b = 0; b < B; ++b)
    for (int64_t t = 0; t < L; ++t)
      for (int64_t d = 0; d < D; ++d) {
        double sum = shift[d];
        for (int64_t j = 0; j < taps; ++j)
          if (int64_t from = t + j - (taps - 1); from >= 0)
            sum += weights[d * taps + j] * x[(b * L + from) * D + d];
        y[(b * L + t) * D + d] = silu(sum);
      }
  w.expected = {fromDoubles(y, {B, L, D})};
  return w;
}

Workload corey::makeHadamard(const WorkloadOptions &options) {
  int64_t rows = options.shape[0], n = options.shape[1];
  DType dt = options.dtype;
  Workload w;
  w.inputs = {*randomTensor(dt, {rows, n}, 1)};
  std::string type = tensorType({rows, n}, 1, elementName(dt));
  w.program = "func.func @main(%x: " + type + ") -> " + type +
              " {\n  %y = ssm.hadamard %x {block = " + std::to_string(n) +
              " : i64} : " + type + " -> " + type + "\n  return %y : " + type +
              "\n}\n";
  double elements = double(rows) * n;
  w.bytes = 2.0 * dtypeSize(dt) * elements;
  w.flops = elements * std::log2(double(n)) / 2;
  if (!options.reference)
    return w;
  std::vector<double> y = widen(w.inputs[0]);
  for (int64_t row = 0; row < rows; ++row) {
    double *v = &y[row * n];
    for (int64_t h = 1; h < n; h *= 2)
      for (int64_t i = 0; i < n; i += 2 * h)
        for (int64_t j = i; j < i + h; ++j) {
          double a = v[j], b = v[j + h];
          v[j] = a + b;
          v[j + h] = a - b;
        }
    for (int64_t i = 0; i < n; ++i)
      v[i] /= std::sqrt(double(n));
  }
  w.expected = {fromDoubles(y, {rows, n})};
  return w;
}

Workload corey::makeNorm(const WorkloadOptions &options) {
  constexpr double eps = 1e-5;
  int64_t rows = options.shape[0], D = options.shape[1];
  DType dt = options.dtype;
  Workload w;
  w.inputs = {*randomTensor(dt, {rows, D}, 1),
              *randomTensor(dt, {D}, 2, 1, 0.1)};
  std::string type = tensorType({rows, D}, 1, elementName(dt)),
              weight = tensorType({D}, 0, elementName(dt));
  w.program =
      "func.func @main(%x: " + type + ", %w: " + weight + ") -> " + type +
      " {\n  %y = ssm.rms_norm %x, %w {eps = 1.0e-5 : f32} : " + type + ", " +
      weight + " -> " + type + "\n  return %y : " + type + "\n}\n";
  double elements = double(rows) * D;
  w.bytes = dtypeSize(dt) * (2 * elements + D);
  w.flops = elements * 2;
  if (!options.reference)
    return w;
  std::vector<double> x = widen(w.inputs[0]), scale = widen(w.inputs[1]);
  for (int64_t row = 0; row < rows; ++row) {
    double squares = 0;
    for (int64_t d = 0; d < D; ++d)
      squares += x[row * D + d] * x[row * D + d];
    double factor = 1 / std::sqrt(squares / double(D) + eps);
    for (int64_t d = 0; d < D; ++d)
      x[row * D + d] *= factor * scale[d];
  }
  w.expected = {fromDoubles(x, {rows, D})};
  return w;
}

Workload corey::makeProjection(const WorkloadOptions &options) {
  int64_t B = options.shape[0], M = options.shape[1], K = options.shape[2];
  DType dt = options.dtype;
  Workload w;
  w.inputs = {*randomTensor(dt, {B, 1, K}, 1),
              *randomTensor(dt, {M, K}, 2, 0, 1 / std::sqrt(double(K)))};
  std::string in = tensorType({B, 1, K}, 1, elementName(dt)),
              weight = tensorType({M, K}, 0, elementName(dt)),
              out = tensorType({B, 1, M}, 1, elementName(dt));
  w.program = "func.func @main(%x: " + in + ", %w: " + weight + ") -> " + out +
              " {\n  %y = ssm.projection %x, %w : " + in + ", " + weight +
              " -> " + out + "\n  return %y : " + out + "\n}\n";
  w.bytes = dtypeSize(dt) * (double(M) * K + double(B) * (M + K));
  w.flops = double(B) * M * K;
  if (!options.reference)
    return w;
  std::vector<double> x = widen(w.inputs[0]), weights = widen(w.inputs[1]),
                      y(B * M);
  for (int64_t b = 0; b < B; ++b)
    for (int64_t m = 0; m < M; ++m) {
      double sum = 0;
      for (int64_t k = 0; k < K; ++k)
        sum += x[b * K + k] * weights[m * K + k];
      y[b * M + m] = sum;
    }
  w.expected = {fromDoubles(y, {B, 1, M})};
  return w;
}

Expected<Workload>
corey::makeBlock(bool mamba2, int64_t length, DType dtype,
                 const std::map<std::string, Tensor> &given) {
  Workload w;
  std::string element = elementName(dtype), arguments;
  std::map<std::string, std::string> types;
  Status status;
  uint64_t seed = 1;
  auto type = [&](const std::vector<int64_t> &shape, const std::string &of) {
    return tensorType(shape, 0, of.c_str());
  };
  auto input = [&](const std::string &name, const std::vector<int64_t> &shape,
                   DType of, double mean, double deviation) {
    Expected<Tensor> tensor = randomTensor(of, shape, seed++, mean, deviation);
    if (auto it = given.find(name); it != given.end()) {
      tensor = it->second;
      if (squeezeShape(tensor->shape()) != squeezeShape(shape))
        status = Status::invalidArgument(
            "'" + name + "': expected " + tensorType(shape, 0, "f32") +
            " up to its element type, got " + tensor->describe());
      else
        tensor = tensor->reshape(shape);
    }
    if (!tensor) {
      status = tensor.takeStatus();
      return;
    }
    types[name] = type(shape, elementName(tensor->dtype()));
    arguments += (arguments.empty() ? "%" : ", %") + name + ": " + types[name];
    w.inputs.push_back(*tensor);
  };
  auto act = [&](int64_t channels) {
    return type({1, length, channels}, element);
  };
  auto slice = [&](const std::string &from, int64_t width, int64_t begin,
                   int64_t count) {
    return "tensor.extract_slice %" + from + "[0, 0, " + std::to_string(begin) +
           "] [1, " + std::to_string(length) + ", " + std::to_string(count) +
           "] [1, 1, 1] : " + act(width) + " to " + act(count) + "\n";
  };
  auto expand = [&](const std::string &from, int64_t width, int64_t a,
                    int64_t b) {
    return "tensor.expand_shape %" + from +
           " [[0], [1], [2, 3]] output_shape [1, " + std::to_string(length) +
           ", " + std::to_string(a) + ", " + std::to_string(b) +
           "] : " + act(width) + " into " + type({1, length, a, b}, element) +
           "\n";
  };
  auto unary = [&](const char *op, const std::string &x, const std::string &t) {
    return std::string("ssm.") + op + " %" + x + " : " + t + "\n";
  };
  auto binary = [&](const char *op, const std::string &x, const std::string &y,
                    const std::string &t, const std::string &u) {
    return std::string("ssm.") + op + " %" + x + ", %" + y + " : " + t + ", " +
           u + "\n";
  };
  auto project = [&](const std::string &x, const std::string &weight,
                     int64_t from, int64_t to) {
    return "ssm.projection %" + x + ", %" + weight + " : " + act(from) + ", " +
           types[weight] + " -> " + act(to) + "\n";
  };
  constexpr int64_t hidden = 256, inner = 512;
  std::string body;
  input("x", {1, length, hidden}, dtype, 0, 1);
  input("norm", {hidden}, DType::F32, 1, 0.1);
  body += "%h = ssm.rms_norm %x, %norm : " + act(hidden) + ", " +
          type({hidden}, "f32") + " -> " + act(hidden) + "\n";
  std::string vec = type({inner}, "f32");
  if (!mamba2) {
    constexpr int64_t states = 16, rank = 16;
    input("in_proj", {2 * inner, hidden}, DType::F32, 0, 0.06);
    input("conv_weight", {inner, 4}, DType::F32, 0, 0.5);
    input("conv_bias", {inner}, DType::F32, 0, 0.1);
    input("x_proj", {rank + 2 * states, inner}, DType::F32, 0, 0.05);
    input("dt_proj", {inner, rank}, DType::F32, 0, 0.2);
    input("dt_bias", {inner}, DType::F32, -4, 0.5);
    input("A_log", {inner, states}, DType::F32, 1, 0.7);
    input("D", {inner}, DType::F32, 1, 0.1);
    input("out_proj", {hidden, inner}, DType::F32, 0, 0.05);
    std::string rates = type({inner, states}, "f32");
    std::string bc = type({1, length, 1, states}, element);
    int64_t low = rank + 2 * states;
    body +=
        "%both = " + project("h", "in_proj", hidden, 2 * inner) +
        "%xi = " + slice("both", 2 * inner, 0, inner) +
        "%z = " + slice("both", 2 * inner, inner, inner) +
        "%conv = ssm.causal_conv %xi, %conv_weight bias(%conv_bias : " + vec +
        ") : " + act(inner) + ", " + type({inner, 4}, "f32") + " -> " +
        act(inner) + "\n%u = " + unary("silu", "conv", act(inner)) +
        "%sel = " + project("u", "x_proj", inner, low) +
        "%lowdt = " + slice("sel", low, 0, rank) +
        "%B3 = " + slice("sel", low, rank, states) +
        "%C3 = " + slice("sel", low, rank + states, states) +
        "%B = " + expand("B3", states, 1, states) +
        "%C = " + expand("C3", states, 1, states) +
        "%delta = " + project("lowdt", "dt_proj", rank, inner) +
        "%shifted = " + binary("add", "delta", "dt_bias", act(inner), vec) +
        "%dt = " + unary("softplus", "shifted", act(inner)) +
        "%A_exp = " + unary("exp", "A_log", rates) +
        "%A = " + unary("neg", "A_exp", rates) +
        "%y = ssm.selective_scan %u, %dt, %A, %B, %C : " + act(inner) + ", " +
        act(inner) + ", " + rates + ", " + bc + ", " + bc + " -> " +
        act(inner) + "\n%skip = " + binary("mul", "u", "D", act(inner), vec) +
        "%sum = " + binary("add", "y", "skip", act(inner), act(inner)) +
        "%gate = " + unary("silu", "z", act(inner)) +
        "%gated = " + binary("mul", "sum", "gate", act(inner), act(inner));
  } else {
    constexpr int64_t heads = 8, headDim = 64, states = 64;
    constexpr int64_t conv = inner + 2 * states, all = inner + conv + heads;
    input("in_proj", {all, hidden}, DType::F32, 0, 0.06);
    input("conv_weight", {conv, 4}, DType::F32, 0, 0.5);
    input("conv_bias", {conv}, DType::F32, 0, 0.1);
    input("dt_bias", {heads}, DType::F32, -4, 0.5);
    input("A_log", {heads}, DType::F32, 1, 0.7);
    input("D", {heads, headDim}, DType::F32, 1, 0.1);
    input("gated_norm", {inner}, DType::F32, 1, 0.1);
    input("out_proj", {hidden, inner}, DType::F32, 0, 0.05);
    std::string rates = type({heads}, "f32");
    std::string x4 = type({1, length, heads, headDim}, element);
    std::string bc = type({1, length, 1, states}, element);
    body +=
        "%both = " + project("h", "in_proj", hidden, all) +
        "%z = " + slice("both", all, 0, inner) +
        "%xbc = " + slice("both", all, inner, conv) +
        "%dtr = " + slice("both", all, inner + conv, heads) +
        "%conv = ssm.causal_conv %xbc, %conv_weight bias(%conv_bias : " +
        type({conv}, "f32") + ") : " + act(conv) + ", " +
        type({conv, 4}, "f32") + " -> " + act(conv) +
        "\n%act = " + unary("silu", "conv", act(conv)) +
        "%x3 = " + slice("act", conv, 0, inner) +
        "%B3 = " + slice("act", conv, inner, states) +
        "%C3 = " + slice("act", conv, inner + states, states) +
        "%x4 = " + expand("x3", inner, heads, headDim) +
        "%B = " + expand("B3", states, 1, states) +
        "%C = " + expand("C3", states, 1, states) +
        "%shifted = " + binary("add", "dtr", "dt_bias", act(heads), rates) +
        "%dt = " + unary("softplus", "shifted", act(heads)) +
        "%A_exp = " + unary("exp", "A_log", rates) +
        "%A = " + unary("neg", "A_exp", rates) +
        "%y4 = ssm.ssd %x4 dt(%dt : " + act(heads) + ") A(%A : " + rates +
        ") B(%B) C(%C) : " + x4 + ", " + bc + ", " + bc + " -> " + x4 +
        "\n%skip = " + binary("mul", "x4", "D", x4, types["D"]) +
        "%sum = " + binary("add", "y4", "skip", x4, x4) +
        "%ssd = tensor.collapse_shape %sum [[0], [1], [2, 3]] : " + x4 +
        " into " + act(inner) + "\n%gate = " + unary("silu", "z", act(inner)) +
        "%scaled = " + binary("mul", "ssd", "gate", act(inner), act(inner)) +
        "%gated = ssm.rms_norm %scaled, %gated_norm : " + act(inner) + ", " +
        vec + " -> " + act(inner) + "\n";
  }
  if (!status)
    return status;
  body += "%out = " + project("gated", "out_proj", inner, hidden) +
          "%result = " + binary("add", "out", "x", act(hidden), act(hidden));
  w.program = "func.func @main(" + arguments + ") -> " + act(hidden) + " {\n" +
              body + "return %result : " + act(hidden) + "\n}\n";
  return w;
}

Workload corey::makeChain(int64_t ops, int64_t length) {
  Workload w;
  constexpr int64_t channels = 512;
  std::string type = tensorType({1, length, channels}, 0, "f32");
  std::string vec = tensorType({channels}, 0, "f32");
  w.inputs = {*randomTensor(DType::F32, {1, length, channels}, 1),
              *randomTensor(DType::F32, {channels}, 2, 1, 0.1)};
  std::string body, value = "x";
  for (int64_t i = 0; i < ops; ++i) {
    std::string next = "v" + std::to_string(i);
    switch (i % 4) {
    case 0:
      body += "%" + next + " = ssm.mul %" + value + ", %g : " + type + ", " +
              vec + "\n";
      break;
    case 1:
      body += "%" + next + " = ssm.silu %" + value + " : " + type + "\n";
      break;
    case 2:
      body += "%" + next + " = ssm.add %" + value + ", %x : " + type + ", " +
              type + "\n";
      break;
    default:
      body += "%" + next + " = ssm.sigmoid %" + value + " : " + type + "\n";
    }
    value = next;
  }
  w.program = "func.func @main(%x: " + type + ", %g: " + vec + ") -> " + type +
              " {\n" + body + "return %" + value + " : " + type + "\n}\n";
  std::vector<double> y = widen(w.inputs[0]), g = widen(w.inputs[1]);
  llvm::parallelFor(0, size_t(length), [&](size_t token) {
    for (int64_t c = 0; c < channels; ++c) {
      double &out = y[int64_t(token) * channels + c], in = out;
      for (int64_t i = 0; i < ops; ++i)
        out = i % 4 == 0   ? out * g[c]
              : i % 4 == 1 ? silu(out)
              : i % 4 == 2 ? out + in
                           : sigmoid(out);
    }
  });
  w.expected = {fromDoubles(y, {1, length, channels})};
  return w;
}

/// Of the NVIDIA driver, such as "580.159.04"; empty where the kernel does not
/// say.
static std::string driverVersion() {
  auto buffer =
      llvm::MemoryBuffer::getFileAsStream("/proc/driver/nvidia/version");
  if (!buffer)
    return "";
  // NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Release ...
  llvm::SmallVector<llvm::StringRef> words;
  (*buffer)->getBuffer().split('\n').first.split(words, ' ', -1, false);
  for (llvm::StringRef word : words)
    if (word.count('.') >= 1 &&
        word.find_first_not_of("0123456789.") == llvm::StringRef::npos)
      return word.str();
  return "";
}

llvm::json::Value corey::jsonNumber(double value) {
  return std::isfinite(value) ? llvm::json::Value(value)
                              : llvm::json::Value(nullptr);
}

llvm::json::Object corey::describeRun(const std::string &target) {
  char date[32];
  std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  llvm::StringMap<bool> features = llvm::sys::getHostCPUFeatures();
  llvm::json::Object run{{"tool", "corey-bench"},
                         {"version", getVersion()},
                         {"date", std::string(date)},
                         {"target", target},
                         {"cpu", llvm::sys::getHostCPUName()},
                         {"avx512", features.lookup("avx512f")}};
  Expected<Device> device = Device::parse(target);
  if (!device || device->kind != Device::CUDA)
    return run;
  if (auto gpu = cuda::Device::get(device->index)) {
    const cuda::DeviceProperties &p = (*gpu)->properties();
    run["gpu"] = p.name;
    run["multiprocessors"] = p.multiprocessors;
    run["clock_khz"] = p.clockKHz;
    // Of the CUDA version that the driver is for.
    if (std::string driver = driverVersion(); !driver.empty())
      run["driver"] = driver;
    run["driver_cuda"] = llvm::formatv("{0}.{1}", p.driverVersion / 1000,
                                       p.driverVersion % 1000 / 10)
                             .str();
  }
  return run;
}

int corey::writeJSON(const std::string &path, llvm::json::Value document) {
  std::string text;
  llvm::raw_string_ostream(text) << llvm::formatv("{0:2}", document) << "\n";
  if (path == "-") {
    llvm::outs() << text;
    return 0;
  }
  std::error_code code;
  llvm::raw_fd_ostream os(path, code);
  if (code)
    return reportError("corey-bench",
                       Status::ioError(path + ": " + code.message()));
  os << text;
  return 0;
}
