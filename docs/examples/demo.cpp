//===- demo.cpp - Mamba blocks on real hidden states ----------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// Compiles a Mamba-1 and a Mamba-2 block once each, binds them to layer 4 of a
// trained checkpoint and runs them on the hidden states of five texts of
// different lengths, through the public API alone.
//
//   corey-demo <folder of mamba_block.mlir> <folder of test inputs>
//
//===----------------------------------------------------------------------===//

#include "corey/Executable.h"
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>

using namespace corey;

static int fail(const Status &status) {
  std::fprintf(stderr, "corey-demo: error: %s\n", status.message().c_str());
  return 1;
}

/// Largest absolute difference of two contiguous f32 tensors of one size.
static double maxError(const Tensor &result, const Tensor &expected) {
  double worst = 0;
  for (int64_t i = 0; i < result.numElements(); ++i)
    worst = std::max(worst, std::abs(double(result.dataAs<float>()[i]) -
                                     expected.dataAs<float>()[i]));
  return worst;
}

static int runBlock(Context &context, const std::string &program,
                    const std::string &weights, const std::string &states,
                    bool &allClose) {
  auto executable = context.compileFile(program);
  if (!executable)
    return fail(executable.status());
  auto weightFile = SafeTensors::open(weights);
  if (!weightFile)
    return fail(weightFile.status());
  if (Status status = (*executable)->bindWeights(*weightFile); !status)
    return fail(status);
  auto stateFile = SafeTensors::open(states);
  if (!stateFile)
    return fail(stateFile.status());

  double compileMs = 0;
  for (const PhaseTime &phase : (*executable)->compileTimes())
    compileMs += phase.milliseconds;
  bool isCached = (*executable)->cache().outcome == CacheInfo::Loaded;
  std::printf("\n%s\n%s in %.0f ms for any batch and length, %d threads\n",
              program.c_str(),
              isCached ? "compiled before, loaded" : "compiled once", compileMs,
              context.getThreads());
  std::printf("  %-10s %-15s %6s %9s %12s %11s\n", "text", "shape", "chunk",
              "time", "tokens/s", "max error");
  for (const char *text : {"prose", "code", "logs", "tables", "templated"}) {
    auto x = stateFile->get(std::string(text) + ".layer4.x");
    auto expected = stateFile->get(std::string(text) + ".layer4.y");
    if (!x || !expected)
      return fail(x ? expected.status() : x.status());
    auto batched = x->unsqueeze(0);
    if (!batched)
      return fail(batched.status());
    std::vector<Tensor> inputs{*batched}, outputs;
    if (Status status = (*executable)->run("main", inputs, outputs); !status)
      return fail(status);
    // The median of further runs into the same outputs.
    std::vector<double> times;
    for (int i = 0; i < 20; ++i) {
      auto start = std::chrono::steady_clock::now();
      if (Status status = (*executable)->run("main", inputs, outputs); !status)
        return fail(status);
      times.push_back(std::chrono::duration<double, std::milli>(
                          std::chrono::steady_clock::now() - start)
                          .count());
    }
    std::sort(times.begin(), times.end());
    double ms = times[times.size() / 2],
           error = maxError(outputs[0], *expected);
    allClose &= error < 1e-3;
    int64_t length = outputs[0].dim(1);
    char shape[32];
    std::snprintf(shape, sizeof shape, "[1, %lld, %lld]",
                  static_cast<long long>(length),
                  static_cast<long long>(outputs[0].dim(2)));
    std::printf("  %-10s %-15s %6lld %6.2f ms %12.0f %11.2e\n", text, shape,
                static_cast<long long>((*executable)->chunks()[0].chunk), ms,
                length / ms * 1e3, error);
  }
  return 0;
}

int main(int argc, char **argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: corey-demo <folder of mamba_block.mlir> "
                         "<folder of test inputs>\n");
    return 1;
  }
  std::string programs = argv[1], data = argv[2];
  auto context = Context::create({});
  if (!context)
    return fail(context.status());
  std::printf("COREY %s on %s: one block (norm, projections, convolution, "
              "scan, residual)\n"
              "on the hidden states of five texts; errors against a float64 "
              "reference.\n",
              getVersion(), (*context)->getDevice().name().c_str());
  bool allClose = true;
  for (auto [name, model] : {std::pair<const char *, const char *>{
                                 "mamba_block.mlir", "mamba1-tiny"},
                             {"mamba2_block.mlir", "mamba2-tiny"}})
    if (int code = runBlock(
            **context, programs + "/" + name,
            data + "/checkpoints/" + model + "/model.safetensors",
            data + "/golden/blocks/" + model + ".safetensors", allClose))
      return code;
  if (!allClose)
    std::fprintf(stderr,
                 "corey-demo: error: expected errors below 1e-3, got more\n");
  return !allClose;
}
