//===- Fusion.cpp - Fusion strategies on whole blocks ---------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "Workload.h"
#include "corey/Executable.h"
#include "corey/ToolUtils.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/Support/CommandLine.h"
#include "llvm/Support/Format.h"
#include "llvm/Support/raw_ostream.h"
#include <chrono>
#include <random>

using namespace corey;
namespace cl = llvm::cl;

static constexpr const char *kTool = "corey-bench";

int corey::runFusion(int argc, char **argv) {
  cl::OptionCategory category("corey-bench fusion options");
  cl::opt<std::string> target("target", cl::desc("Device to run on: cpu"),
                              cl::init("cpu"), cl::cat(category));
  cl::list<int64_t> lengths("length", cl::desc("Lengths; default 2048"),
                            cl::CommaSeparated, cl::cat(category));
  cl::list<std::string> dtypes(
      "dtype",
      cl::desc("f32, f16 or bf16 of activations; default f32 and bf16"),
      cl::CommaSeparated, cl::cat(category));
  cl::opt<int> threads("threads",
                       cl::desc("Threads; 0 (default) takes every processor"),
                       cl::init(0), cl::cat(category));
  cl::opt<double> budget("budget-ms",
                         cl::desc("Time to spend on each block"),
                         cl::init(5000), cl::cat(category));
  cl::opt<std::string> json(
      "json",
      cl::desc("Write the results as JSON to a file, - for standard output in "
               "place of the table"),
      cl::value_desc("file"), cl::cat(category));
  cl::HideUnrelatedOptions(category);
  cl::ParseCommandLineOptions(
      argc, argv,
      "COREY: fusion strategies on blocks with every operation on its own\n");
  std::vector<int64_t> lengthList(lengths.begin(), lengths.end());
  if (lengthList.empty())
    lengthList = {2048};
  std::vector<std::string> typeList(dtypes.begin(), dtypes.end());
  if (typeList.empty())
    typeList = {"f32", "bf16"};
  for (int64_t length : lengthList)
    if (length < 1)
      return reportError(kTool, Status::invalidArgument(
                                    "--length: expected at least 1, got " +
                                    std::to_string(length)));
  ContextOptions contextOptions;
  contextOptions.device = target;
  contextOptions.threads = threads;
  auto context = Context::create(contextOptions);
  if (!context)
    return reportError(kTool, context.status());
  bool toStdout = json == "-";
  if (!toStdout)
    llvm::outs() << "block    dtype length  strategy    kernels   MB moved  "
                    "share   median ms      min      max  speed-up  rel l2 "
                    "difference\n";
  llvm::json::Array results;
  for (bool mamba2 : {false, true})
    for (const std::string &typeText : typeList)
      for (int64_t length : lengthList) {
        Expected<DType> dtype = dtypeFromName(typeText);
        if (!dtype || (*dtype != DType::F32 && *dtype != DType::F16 &&
                       *dtype != DType::BF16))
          return reportError(
              kTool,
              Status::invalidArgument(
                  "--dtype: expected f32, f16 or bf16, got '" + typeText +
                  "'"));
        Workload workload = makeBlock(mamba2, length, *dtype);
        struct Variant {
          const char *strategy;
          std::shared_ptr<Executable> executable;
          std::vector<Tensor> outputs;
          std::vector<double> samples;
          double difference = 0;
        };
        std::vector<Variant> variants;
        for (const char *strategy :
             {"none", "static", "arithmetic", "entropy", "dp"}) {
          CompileOptions options;
          options.fusion = strategy;
          auto compiled =
              (*context)->compile(workload.program, options, "<block>");
          if (!compiled)
            return reportError(kTool, compiled.status());
          Variant variant{strategy, *compiled, {}, {}};
          if (Status status = variant.executable->run("main", workload.inputs,
                                                      variant.outputs);
              !status)
            return reportError(kTool, status);
          if (!variants.empty()) {
            Expected<Difference> difference =
                compare(variant.outputs[0], variants.front().outputs[0]);
            if (!difference)
              return reportError(kTool, difference.status());
            variant.difference = difference->relativeL2;
          }
          variants.push_back(std::move(variant));
        }
        // In turn, in a new order every round.
        std::mt19937 generator(1);
        auto start = std::chrono::steady_clock::now();
        auto elapsed = [&](auto since) {
          return std::chrono::duration<double, std::milli>(
                     std::chrono::steady_clock::now() - since)
              .count();
        };
        std::vector<size_t> order = {0, 1, 2, 3, 4};
        for (int round = 0; round < 5 || elapsed(start) < budget; ++round) {
          for (size_t i = order.size(); i > 1; --i)
            std::swap(order[i - 1], order[generator() % i]);
          for (size_t i : order) {
            Variant &v = variants[i];
            auto begin = std::chrono::steady_clock::now();
            if (Status status = v.executable->run(
                    "main", workload.inputs.data(), workload.inputs.size(),
                    v.outputs.data(), v.outputs.size());
                !status)
              return reportError(kTool, status);
            v.samples.push_back(elapsed(begin));
          }
        }
        double baseMs = 0, baseBytes = 0;
        for (Variant &v : variants) {
          double ms = median(v.samples);
          const TrafficInfo &traffic = v.executable->traffic();
          if (&v == &variants.front()) {
            baseMs = ms;
            baseBytes = traffic.bytes();
          }
          const char *block = mamba2 ? "mamba2" : "mamba1";
          if (!toStdout) {
            llvm::outs() << llvm::left_justify(block, 8) << " "
                         << llvm::left_justify(typeText, 5)
                         << llvm::format(
                                " %6lld  %-10s %8lld %10.2f  %4.0f%%  %10.3f "
                                "%8.3f %8.3f  %8.3f  %12.3g\n",
                                static_cast<long long>(length), v.strategy,
                                static_cast<long long>(traffic.kernels),
                                traffic.bytes() * 1e-6,
                                100 * traffic.bytes() / baseBytes, ms,
                                v.samples.front(), v.samples.back(),
                                baseMs / ms, v.difference);
            llvm::outs().flush();
          }
          results.push_back(llvm::json::Object{
              {"block", block},
              {"dtype", typeText},
              {"length", length},
              {"threads", (*context)->getThreads()},
              {"strategy", v.strategy},
              {"kernels", traffic.kernels},
              {"bytes_moved", traffic.bytes()},
              {"bytes_kept", traffic.bytesKept},
              {"median_ms", ms},
              {"min_ms", v.samples.front()},
              {"max_ms", v.samples.back()},
              {"runs", static_cast<int64_t>(v.samples.size())},
              {"speedup", baseMs / ms},
              {"rel_l2_difference", v.difference}});
        }
      }
  if (json.empty())
    return 0;
  llvm::json::Value document = describeRun(target);
  (*document.getAsObject())["benchmark"] = "fusion";
  (*document.getAsObject())["results"] = std::move(results);
  return writeJSON(json, std::move(document));
}
