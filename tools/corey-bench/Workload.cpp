//===- Workload.cpp - Programs to measure ---------------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "Workload.h"
#include "corey/ToolUtils.h"
#include "llvm/ADT/StringMap.h"
#include "llvm/Support/FormatVariadic.h"
#include "llvm/Support/raw_ostream.h"
#include "llvm/TargetParser/Host.h"
#include <cmath>
#include <ctime>

using namespace corey;

namespace {
const char *elementName(DType dtype) { return dtypeName(dtype); }

std::string tensorType(const std::vector<int64_t> &shape, unsigned dynamic,
                       const char *element) {
  std::string text = "tensor<";
  for (size_t i = 0; i < shape.size(); ++i)
    text += (i < dynamic ? "?" : std::to_string(shape[i])) + "x";
  return text + element + ">";
}

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

} // namespace

Workload corey::makeScan(const WorkloadOptions &options) {
  int64_t B = options.shape[0], L = options.shape[1], D = options.shape[2],
          N = options.shape[3];
  DType dt = options.dtype;
  Workload w;
  w.inputs = {
      *randomTensor(dt, {B, L, D}, 1),
      *randomTensor(dt, {B, L, D}, 2, 0.0, 0.5),
      filled(DType::F32, {D, N}, [&](int64_t i) { return -double(i % N + 1); }),
      *randomTensor(dt, {B, L, 1, N}, 3),
      *randomTensor(dt, {B, L, 1, N}, 4),
      *randomTensor(DType::F32, {D}, 5),
      *randomTensor(dt, {B, L, D}, 6),
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
  std::vector<std::vector<double>> in;
  for (const Tensor &t : w.inputs)
    in.push_back(widen(t));
  std::vector<double> y(B * L * D), h(B * D * N, 0.0);
  for (int64_t b = 0; b < B; ++b)
    for (int64_t t = 0; t < L; ++t)
      for (int64_t d = 0; d < D; ++d) {
        int64_t i = (b * L + t) * D + d;
        double u = in[0][i], step = softplus(in[1][i] + in[7][d]),
               sum = in[5][d] * u;
        for (int64_t n = 0; n < N; ++n) {
          double &state = h[(b * D + d) * N + n];
          state = std::exp(step * in[2][d * N + n]) * state +
                  step * u * in[3][(b * L + t) * N + n];
          sum += in[4][(b * L + t) * N + n] * state;
        }
        y[i] = sum * silu(in[6][i]);
      }
  w.expected = {fromDoubles(y, {B, L, D}), fromDoubles(h, {B, D, N})};
  return w;
}

Workload corey::makeSSD(const WorkloadOptions &options) {
  int64_t B = options.shape[0], L = options.shape[1], H = options.shape[2],
          P = options.shape[3], N = options.shape[4], G = options.shape[5];
  DType dt = options.dtype;
  Workload w;
  w.inputs = {
      *randomTensor(dt, {B, L, H, P}, 1),
      *randomTensor(dt, {B, L, H}, 2, 0.0, 0.5),
      filled(DType::F32, {H},
             [&](int64_t i) { return -(1.0 + double(i) * 15.0 / double(H)); }),
      *randomTensor(dt, {B, L, G, N}, 3),
      *randomTensor(dt, {B, L, G, N}, 4),
      *randomTensor(DType::F32, {H}, 5),
      *randomTensor(DType::F32, {H}, 7, -4.0, 0.5)};
  std::string x = tensorType({B, L, H, P}, 2, elementName(dt)),
              dts = tensorType({B, L, H}, 2, elementName(dt));
  std::string bc = tensorType({B, L, G, N}, 2, elementName(dt)),
              vec = tensorType({H}, 0, "f32");
  std::string state = tensorType({B, H, P, N}, 1, "f32");
  w.program = "func.func @main(%x: " + x + ", %dt: " + dts + ", %A: " + vec +
              ", %B: " + bc + ", %C: " + bc + ", %D: " + vec +
              ", %bias: " + vec + ") -> (" + x + ", " + state + ") {\n" +
              "  %y, %s = ssm.ssd %x dt(%dt : " + dts + ") A(%A : " + vec +
              ") B(%B) C(%C) D(%D : " + vec + ") dt_bias(%bias : " + vec +
              ") {dt_softplus, chunk = #ssm.chunk<runtime = @scan>} : " + x +
              ", " + bc + ", " + bc + " -> " + x + ", " + state +
              "\n  return %y, %s : " + x + ", " + state + "\n}\n";
  double tokens = double(B) * L, size = dtypeSize(dt);
  w.bytes =
      size * tokens * (2.0 * H * P + H + 2.0 * G * N) + 4.0 * B * H * P * N;
  w.flops = tokens * H * P * (4.0 * N + 64.0) + tokens * G * 64.0 * N;
  w.exponentials = tokens * H * 32.0;
  if (!options.reference)
    return w;
  std::vector<std::vector<double>> in;
  for (const Tensor &t : w.inputs)
    in.push_back(widen(t));
  std::vector<double> y(B * L * H * P), S(B * H * P * N, 0.0);
  for (int64_t b = 0; b < B; ++b)
    for (int64_t t = 0; t < L; ++t)
      for (int64_t h = 0; h < H; ++h) {
        double step = softplus(in[1][(b * L + t) * H + h] + in[6][h]);
        double decay = std::exp(step * in[2][h]);
        const double *Bt = &in[3][((b * L + t) * G + h / (H / G)) * N];
        const double *Ct = &in[4][((b * L + t) * G + h / (H / G)) * N];
        for (int64_t p = 0; p < P; ++p) {
          int64_t i = ((b * L + t) * H + h) * P + p;
          double *s = &S[((b * H + h) * P + p) * N], sum = in[5][h] * in[0][i];
          for (int64_t n = 0; n < N; ++n) {
            s[n] = decay * s[n] + step * in[0][i] * Bt[n];
            sum += s[n] * Ct[n];
          }
          y[i] = sum;
        }
      }
  w.expected = {fromDoubles(y, {B, L, H, P}), fromDoubles(S, {B, H, P, N})};
  return w;
}

llvm::json::Object corey::describeRun(const std::string &target) {
  char date[32];
  std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  llvm::StringMap<bool> features = llvm::sys::getHostCPUFeatures();
  return llvm::json::Object{{"tool", "corey-bench"},
                            {"version", getVersion()},
                            {"date", std::string(date)},
                            {"target", target},
                            {"cpu", llvm::sys::getHostCPUName()},
                            {"avx512", features.lookup("avx512f")}};
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
