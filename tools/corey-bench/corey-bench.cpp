//===- corey-bench.cpp - Benchmarks ---------------------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/ToolUtils.h"
#include "corey/Tools.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/ADT/StringMap.h"
#include "llvm/Support/CommandLine.h"
#include "llvm/Support/Format.h"
#include "llvm/Support/FormatVariadic.h"
#include "llvm/Support/JSON.h"
#include "llvm/Support/raw_ostream.h"
#include "llvm/TargetParser/Host.h"
#include <cmath>
#include <ctime>

using namespace corey;
namespace cl = llvm::cl;

static constexpr const char *kTool = "corey-bench";

namespace {
/// Inputs, program and float64 reference of one benchmark.
struct Workload {
  std::string program;
  std::vector<Tensor> inputs;
  /// What each output should be, computed from the (rounded) inputs.
  std::vector<Tensor> expected;
  /// Least bytes moved, multiply-adds and exponentials, for the floor.
  double bytes = 0, flops = 0, exponentials = 0;
};

struct Options {
  DType dtype;
  std::vector<int64_t> shape;
};

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

/// Mamba-1 scan with D, z, delta_bias and softplus: shape B,L,D,N.
Workload makeScan(const Options &options) {
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
  double tokens = double(B) * L, size = dtypeSize(dt);
  w.bytes = size * tokens * (4.0 * D + 2.0 * N) + 4.0 * B * D * N;
  w.flops = tokens * D * N * 7.0;
  w.exponentials = tokens * D * (N + 3.0);
  return w;
}

/// Mamba-2 with D, dt_bias and softplus: shape B,L,H,P,N,G.
Workload makeSSD(const Options &options) {
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
  double tokens = double(B) * L, size = dtypeSize(dt);
  w.bytes =
      size * tokens * (2.0 * H * P + H + 2.0 * G * N) + 4.0 * B * H * P * N;
  w.flops = tokens * H * P * (4.0 * N + 64.0) + tokens * G * 64.0 * N;
  w.exponentials = tokens * H * 32.0;
  return w;
}
} // namespace

int corey::coreyBenchMain(int argc, char **argv) {
  cl::OptionCategory category("corey-bench options");
  cl::opt<std::string> what(cl::Positional, cl::desc("<scan|ssd>"),
                            cl::Required, cl::cat(category));
  cl::opt<std::string> target("target", cl::desc("Device to run on: cpu"),
                              cl::init("cpu"), cl::cat(category));
  cl::list<std::string> shapes(
      "shape",
      cl::desc("scan: B,L,D,N; ssd: B,L,H,P,N,G. May be given several times"),
      cl::value_desc("n,n,..."), cl::cat(category));
  cl::list<std::string> dtypes(
      "dtype",
      cl::desc("f32 (default), f16 or bf16. May be given several times"),
      cl::cat(category));
  cl::list<int> threads("threads",
                        cl::desc("Threads; 0 (default) takes every processor. "
                                 "May be given several times"),
                        cl::cat(category));
  cl::list<int> chunks("chunk",
                       cl::desc("Chunk in tokens; 0 (default) is unsplit. May "
                                "be given several times"),
                       cl::cat(category));
  cl::opt<int> vectorBits(
      "vector-bits",
      cl::desc(
          "Width of a vector register: 256, 512; 0 (default) takes the host's"),
      cl::init(0), cl::cat(category));
  cl::opt<double> budget("budget-ms",
                         cl::desc("Time to spend on each measurement"),
                         cl::init(1000), cl::cat(category));
  cl::opt<std::string> json(
      "json",
      cl::desc("Write the results as JSON to a file, - for standard output in "
               "place of the table"),
      cl::value_desc("file"), cl::cat(category));
  cl::HideUnrelatedOptions(category);
  cl::ParseCommandLineOptions(
      argc, argv,
      "COREY: benchmarks, always with the error against a float64 reference\n");

  bool isScan = what == "scan";
  if (!isScan && what != "ssd")
    return reportError(
        kTool, Status::invalidArgument(
                   "expected a benchmark of scan, ssd, got '" + what + "'"));
  if (shapes.empty())
    shapes.push_back(isScan ? "1,512,2048,16" : "1,512,80,64,128,1");
  if (dtypes.empty())
    dtypes.push_back("f32");
  if (threads.empty())
    threads.push_back(0);
  if (chunks.empty())
    chunks.push_back(0);

  llvm::json::Array results;
  bool toStdout = json == "-";
  if (!toStdout)
    llvm::outs() << "shape                     dtype threads chunk   median ms "
                    "     min      max  rel l2 error  GB/s  GFLOP/s\n";
  for (const std::string &text : shapes) {
    Options options;
    llvm::SmallVector<llvm::StringRef> parts;
    llvm::StringRef(text).split(parts, ',');
    for (llvm::StringRef part : parts) {
      int64_t size;
      if (part.getAsInteger(10, size) || size < 1)
        return reportError(
            kTool, Status::invalidArgument(
                       "--shape: expected positive sizes, got '" + text + "'"));
      options.shape.push_back(size);
    }
    size_t rank = isScan ? 4 : 6;
    if (options.shape.size() != rank)
      return reportError(
          kTool, Status::invalidArgument("--shape: expected " +
                                         std::to_string(rank) + " sizes (" +
                                         (isScan ? "B,L,D,N" : "B,L,H,P,N,G") +
                                         "), got '" + text + "'"));
    if (!isScan && options.shape[2] % options.shape[5])
      return reportError(
          kTool,
          Status::invalidArgument(
              "--shape: expected H to be a multiple of G, got '" + text + "'"));
    for (const std::string &dtypeText : dtypes) {
      Expected<DType> dtype = dtypeFromName(dtypeText);
      if (!dtype || (*dtype != DType::F32 && *dtype != DType::F16 &&
                     *dtype != DType::BF16))
        return reportError(
            kTool,
            Status::invalidArgument(
                "--dtype: expected f32, f16 or bf16, got '" + dtypeText + "'"));
      options.dtype = *dtype;
      Workload workload = isScan ? makeScan(options) : makeSSD(options);
      for (int count : threads) {
        ContextOptions contextOptions;
        contextOptions.device = target;
        contextOptions.threads = count;
        Expected<std::shared_ptr<Context>> context =
            Context::create(contextOptions);
        if (!context)
          return reportError(kTool, context.status());
        CompileOptions compileOptions;
        compileOptions.vectorBits = vectorBits;
        Expected<std::shared_ptr<Executable>> executable = (*context)->compile(
            workload.program, compileOptions, "<" + what + ">");
        if (!executable)
          return reportError(kTool, executable.status());
        for (int chunk : chunks) {
          if (Status status = (*executable)->setChunk("scan", chunk); !status)
            return reportError(kTool, status);
          std::vector<Tensor> outputs;
          if (Status status =
                  (*executable)->run("main", workload.inputs, outputs);
              !status)
            return reportError(kTool, status);
          double error = 0;
          for (size_t i = 0; i < outputs.size(); ++i) {
            Expected<Difference> difference =
                compare(outputs[i], workload.expected[i]);
            if (!difference)
              return reportError(kTool, difference.status());
            error = std::max(error, difference->relativeL2);
          }
          std::vector<double> samples;
          Status status;
          double ms = timeCall(
              [&] {
                Status s = (*executable)
                               ->run("main", workload.inputs.data(),
                                     workload.inputs.size(), outputs.data(),
                                     outputs.size());
                if (!s)
                  status = s;
              },
              5, budget, &samples);
          if (!status)
            return reportError(kTool, status);
          std::sort(samples.begin(), samples.end());
          double compileMs = 0;
          for (const PhaseTime &phase : (*executable)->compileTimes())
            compileMs += phase.milliseconds;
          if (!toStdout) {
            llvm::outs()
                << llvm::left_justify(text, 25) << " "
                << llvm::left_justify(dtypeText, 5)
                << llvm::format(
                       " %7d %5d  %10.3f %8.3f %8.3f  %12.3g %5.1f %8.1f\n",
                       (*context)->getThreads(), chunk, ms, samples.front(),
                       samples.back(), error, workload.bytes / ms * 1e-6,
                       workload.flops / ms * 1e-6);
            llvm::outs().flush();
          }
          llvm::json::Array shapeArray;
          for (int64_t size : options.shape)
            shapeArray.push_back(size);
          results.push_back(
              llvm::json::Object{{"benchmark", what.getValue()},
                                 {"shape", std::move(shapeArray)},
                                 {"dtype", dtypeText},
                                 {"threads", (*context)->getThreads()},
                                 {"chunk", chunk},
                                 {"median_ms", ms},
                                 {"min_ms", samples.front()},
                                 {"max_ms", samples.back()},
                                 {"runs", static_cast<int64_t>(samples.size())},
                                 {"rel_l2_error", error},
                                 {"compile_ms", compileMs},
                                 {"bytes", workload.bytes},
                                 {"flops", workload.flops},
                                 {"exponentials", workload.exponentials}});
        }
      }
    }
  }
  if (!json.empty()) {
    char date[32];
    std::time_t now = std::time(nullptr);
    std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
    llvm::StringMap<bool> features = llvm::sys::getHostCPUFeatures();
    llvm::json::Value document =
        llvm::json::Object{{"tool", "corey-bench"},
                           {"version", getVersion()},
                           {"date", date},
                           {"target", target.getValue()},
                           {"cpu", llvm::sys::getHostCPUName()},
                           {"avx512", features.lookup("avx512f")},
                           {"results", std::move(results)}};
    // One result: its fields are at the top as well, for scripts.
    llvm::json::Array *list = document.getAsObject()->getArray("results");
    if (list->size() == 1) {
      llvm::json::Object only = *list->front().getAsObject();
      for (auto &[key, value] : only)
        (*document.getAsObject())[key] = value;
    }
    std::string text;
    llvm::raw_string_ostream(text) << llvm::formatv("{0:2}", document) << "\n";
    if (toStdout) {
      llvm::outs() << text;
    } else {
      std::error_code code;
      llvm::raw_fd_ostream os(json, code);
      if (code)
        return reportError(kTool,
                           Status::ioError(json + ": " + code.message()));
      os << text;
    }
  }
  return 0;
}
