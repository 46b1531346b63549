//===- SSDWorkload.cpp - Mamba-2 scans to measure -------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "Workload.h"
#include "llvm/Support/Parallel.h"
#include <cmath>
#include <numeric>

using namespace corey;

std::vector<Tensor> SSDOperands::inputs() const {
  std::vector<Tensor> list = {x};
  for (const std::optional<Tensor> *each : {&dt, &A, &decay})
    if (*each)
      list.push_back(**each);
  list.push_back(B);
  list.push_back(C);
  for (const std::optional<Tensor> *each : {&D, &bias, &initialStates})
    if (*each)
      list.push_back(**each);
  return list;
}

std::string SSDOperands::program() const {
  auto type = [](const Tensor &tensor, unsigned dynamic) {
    return tensorType(tensor.shape(), dynamic, dtypeName(tensor.dtype()));
  };
  std::string arguments, clauses;
  auto argument = [&](const char *name, const std::string &type) {
    arguments +=
        (arguments.empty() ? "%" : ", %") + std::string(name) + ": " + type;
  };
  auto operand = [&](const char *clause, const char *name,
                     const std::optional<Tensor> &tensor, unsigned dynamic) {
    if (!tensor)
      return;
    argument(name, type(*tensor, dynamic));
    clauses += std::string(" ") + clause + "(%" + name + " : " +
               type(*tensor, dynamic) + ")";
  };
  std::string act = type(x, 2), bc = type(B, 2),
              state = tensorType(
                  {x.dim(0), x.dim(2), x.dim(3), B.dim(3)}, 1,
                  initialStates ? dtypeName(initialStates->dtype()) : "f32");
  argument("x", act);
  operand("dt", "dt", dt, 2);
  operand("A", "A", A, 0);
  operand("decay", "decay", decay, 2);
  argument("B", bc);
  argument("C", bc);
  clauses += " B(%B) C(%C)";
  operand("D", "D", D, 0);
  operand("dt_bias", "bias", bias, 0);
  operand("initial_states", "initial", initialStates, 1);
  return "func.func @main(" + arguments + ") -> (" + act + ", " + state +
         ") {\n  %y, %s = ssm.ssd %x" + clauses + " {" +
         (dt ? "dt_softplus, " : "") +
         "chunk = #ssm.chunk<runtime = @scan>} : " + act + ", " + bc + ", " +
         bc + " -> " + act + ", " + state + "\n  return %y, %s : " + act +
         ", " + state + "\n}\n";
}

double corey::ssdFlops(int64_t B, int64_t L, int64_t H, int64_t P, int64_t N,
                       int64_t G) {
  constexpr double tile = 64;
  double perToken =
      double(G) * N * (tile + 1) + double(H) * P * (tile + 1) + 4.0 * H * P * N;
  return double(B) * L * perToken;
}

//===----------------------------------------------------------------------===//
// Reference
//===----------------------------------------------------------------------===//

namespace {
/// Channels that are worked on side by side, so that the sum over states of
/// each is a vector's lane.
constexpr int64_t kLanes = 8;
} // namespace

static double elementAt(const Tensor &tensor,
                        std::initializer_list<int64_t> index) {
  int64_t offset = 0;
  int axis = 0;
  for (int64_t i : index)
    offset += i * tensor.stride(axis++);
  return loadScalar(tensor.dtype(),
                    static_cast<const char *>(tensor.data()) +
                        offset * int64_t(dtypeSize(tensor.dtype())));
}

/// The recurrence of `kLanes` channels of a head: `states` and `inputs` are
/// lanes of channels, rows of B and C are `stride` elements apart. `outputs`
/// are added to.
[[gnu::always_inline]] static inline void
walkAll(int64_t length, int64_t numStates, const double *decays,
        const double *inputs, const float *B, const float *C, int64_t stride,
        double *states, double *outputs) {
  // Of the alignment of a double: the memory is a vector's.
  using Lanes [[gnu::vector_size(kLanes * sizeof(double)), gnu::aligned(8)]] =
      double;
  auto *state = reinterpret_cast<Lanes *>(states);
  for (int64_t t = 0; t < length; ++t) {
    const float *b = B + t * stride, *c = C + t * stride;
    Lanes input = *reinterpret_cast<const Lanes *>(inputs + t * kLanes);
    Lanes sum = {};
    double decay = decays[t];
    for (int64_t n = 0; n < numStates; ++n) {
      Lanes next = decay * state[n] + input * double(b[n]);
      state[n] = next;
      sum += next * double(c[n]);
    }
    *reinterpret_cast<Lanes *>(outputs + t * kLanes) += sum;
  }
}

using Walk = void (*)(int64_t, int64_t, const double *, const double *,
                      const float *, const float *, int64_t, double *,
                      double *);
static void walkAnywhere(int64_t length, int64_t numStates,
                         const double *decays, const double *inputs,
                         const float *B, const float *C, int64_t stride,
                         double *states, double *outputs) {
  walkAll(length, numStates, decays, inputs, B, C, stride, states, outputs);
}
#ifdef __x86_64__
// The reference is what a run of a large shape waits for.
[[gnu::target("avx2,fma")]] static void
walkAVX2(int64_t length, int64_t numStates, const double *decays,
         const double *inputs, const float *B, const float *C, int64_t stride,
         double *states, double *outputs) {
  walkAll(length, numStates, decays, inputs, B, C, stride, states, outputs);
}
#endif
static Walk walkOfHost() {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return walkAVX2;
#endif
  return walkAnywhere;
}

std::vector<Tensor>
corey::ssdReference(const SSDOperands &o,
                    const std::vector<std::pair<int64_t, int64_t>> &heads) {
  int64_t batch = o.x.dim(0), L = o.x.dim(1), H = o.x.dim(2), P = o.x.dim(3),
          G = o.B.dim(2), N = o.B.dim(3);
  auto softplus = [](double x) {
    return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x));
  };
  bool all = heads.empty();
  std::vector<std::pair<int64_t, int64_t>> list = heads;
  for (int64_t b = 0; all && b < batch; ++b)
    for (int64_t h = 0; h < H; ++h)
      list.push_back({b, h});
  auto count = static_cast<int64_t>(list.size());
  // What 16-bit and 32-bit numbers are, f32 holds.
  Tensor B = *o.B.to(DType::F32), C = *o.C.to(DType::F32);

  // The step and the decay of every token of a head.
  std::vector<double> steps(count * L), decays(count * L);
  llvm::parallelFor(0, size_t(count), [&](size_t item) {
    auto [b, h] = list[item];
    double rate = o.A ? elementAt(*o.A, {h}) : 0,
           shift = o.bias ? elementAt(*o.bias, {h}) : 0;
    for (int64_t t = 0; t < L; ++t) {
      int64_t at = int64_t(item) * L + t;
      steps[at] = o.decay ? 1.0 : softplus(elementAt(*o.dt, {b, t, h}) + shift);
      decays[at] =
          std::exp(o.decay ? elementAt(*o.decay, {b, t, h}) : steps[at] * rate);
    }
  });

  Tensor y =
      *Tensor::empty(DType::F64, all ? std::vector<int64_t>{batch, L, H, P}
                                     : std::vector<int64_t>{count, L, P});
  Tensor last =
      *Tensor::empty(DType::F64, all ? std::vector<int64_t>{batch, H, P, N}
                                     : std::vector<int64_t>{count, P, N});
  int64_t blocks = (P + kLanes - 1) / kLanes;
  Walk walk = walkOfHost();
  llvm::parallelFor(0, size_t(count * blocks), [&](size_t item) {
    int64_t index = int64_t(item) / blocks,
            first = int64_t(item) % blocks * kLanes,
            lanes = std::min(kLanes, P - first);
    auto [b, h] = list[index];
    int64_t group = h / (H / G);
    std::vector<double> states(N * kLanes), inputs(L * kLanes),
        outputs(L * kLanes);
    for (int64_t t = 0; t < L; ++t)
      for (int64_t i = 0; i < lanes; ++i) {
        double x = elementAt(o.x, {b, t, h, first + i});
        inputs[t * kLanes + i] = steps[index * L + t] * x;
        if (o.D)
          outputs[t * kLanes + i] = elementAt(*o.D, {h}) * x;
      }
    for (int64_t i = 0; o.initialStates && i < lanes; ++i)
      for (int64_t n = 0; n < N; ++n)
        states[n * kLanes + i] =
            elementAt(*o.initialStates, {b, h, first + i, n});
    int64_t row = (b * L * G + group) * N;
    walk(L, N, &decays[index * L], inputs.data(), B.dataAs<float>() + row,
         C.dataAs<float>() + row, G * N, states.data(), outputs.data());
    double *to = y.dataAs<double>() +
                 (all ? (b * L * H + h) * P : index * L * P) + first;
    for (int64_t t = 0; t < L; ++t, to += all ? H * P : P)
      std::copy_n(&outputs[t * kLanes], lanes, to);
    for (int64_t i = 0; i < lanes; ++i)
      for (int64_t n = 0; n < N; ++n)
        last.dataAs<double>()[(index * P + first + i) * N + n] =
            states[n * kLanes + i];
  });
  return {y, last};
}

/// The heads to check, where all of them would take more than a few seconds on
/// two cores: spread over sequences, heads and groups. None for all.
static std::vector<std::pair<int64_t, int64_t>>
pickHeads(int64_t B, int64_t L, int64_t H, int64_t P, int64_t N) {
  constexpr double kMostStates = 0x1p33, kMostOutputs = 0x1p26;
  double outputs = double(L) * P,
         share = std::min(kMostStates / (outputs * N), kMostOutputs / outputs);
  int64_t all = B * H;
  if (share >= double(all))
    return {};
  auto count = std::max<int64_t>(int64_t(share), 1);
  // Multiples of a step without common factors meet every head once, and one
  // near the golden section spreads the first of them evenly.
  auto step = std::max<int64_t>(int64_t(double(all) * 0.618), 1);
  while (std::gcd(step, all) != 1)
    ++step;
  std::vector<std::pair<int64_t, int64_t>> heads;
  for (int64_t i = 0; i < count; ++i) {
    int64_t index = (i + 1) * step % all;
    heads.push_back({index / H, index % H});
  }
  return heads;
}

Expected<std::vector<Difference>>
corey::compareOutputs(const Workload &workload,
                      const std::vector<Tensor> &outputs) {
  std::vector<Difference> differences;
  for (size_t i = 0; i < outputs.size(); ++i) {
    Tensor got = outputs[i];
    if (!workload.checkedHeads.empty()) {
      // The axis of heads is the one before the last of states, and follows
      // that of tokens of y.
      int axis = i == 0 ? 2 : 1;
      const Tensor &expected = workload.expected[i];
      got = *Tensor::empty(DType::F64, expected.shape());
      for (size_t k = 0; k < workload.checkedHeads.size(); ++k) {
        auto [b, h] = workload.checkedHeads[k];
        Tensor from = *outputs[i].slice(0, b, b + 1)->slice(axis, h, h + 1);
        Tensor to =
            *got.slice(0, int64_t(k), int64_t(k) + 1)->reshape(from.shape());
        if (Status status = to.copyFrom(from); !status)
          return status;
      }
    }
    Expected<Difference> difference = compare(got, workload.expected[i]);
    if (!difference)
      return difference.takeStatus();
    differences.push_back(*difference);
  }
  return differences;
}

//===----------------------------------------------------------------------===//
// Workload
//===----------------------------------------------------------------------===//

Workload corey::makeSSD(const WorkloadOptions &options) {
  int64_t B = options.shape[0], L = options.shape[1], H = options.shape[2],
          P = options.shape[3], N = options.shape[4], G = options.shape[5];
  SSDOperands o;
  o.x = makeActivation(options, {B, L, H, P}, 1);
  if (options.discretized) {
    o.decay = makeActivation(options, {B, L, H}, 2, -0.6, 0.1);
    o.initialStates = makeActivation(options, {B, H, P, N}, 8);
  } else {
    o.dt = makeActivation(options, {B, L, H}, 2, 0.0, 0.5);
    o.A = *Tensor::empty(DType::F32, {H});
    for (int64_t h = 0; h < H; ++h)
      o.A->dataAs<float>()[h] = float(-(1.0 + double(h) * 15.0 / double(H)));
    o.bias = *randomTensor(DType::F32, {H}, 7, -4.0, 0.5);
  }
  o.B = makeActivation(options, {B, L, G, N}, 3);
  o.C = makeActivation(options, {B, L, G, N}, 4);
  o.D = *randomTensor(DType::F32, {H}, 5);

  Workload w;
  w.inputs = o.inputs();
  w.program = o.program();
  double tokens = double(B) * L, size = dtypeSize(options.dtype),
         states = double(B) * H * P * N;
  w.bytes = size * tokens * (2.0 * H * P + H + 2.0 * G * N) +
            (options.discretized ? 2 * size : 4.0) * states;
  w.flops = ssdFlops(B, L, H, P, N, G);
  w.exponentials = tokens * H * 32.0;
  if (!options.reference)
    return w;
  w.checkedHeads = pickHeads(B, L, H, P, N);
  w.expected = ssdReference(o, w.checkedHeads);
  return w;
}
