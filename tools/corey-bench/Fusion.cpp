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

Expected<std::vector<FusionResult>>
corey::measureFusion(Context &context, const Workload &workload,
                     double budgetMs) {
  struct Variant {
    std::shared_ptr<Executable> executable;
    std::vector<Tensor> outputs;
    std::vector<double> samples;
  };
  std::vector<Variant> variants;
  std::vector<FusionResult> results;
  for (const char *strategy :
       {"none", "static", "arithmetic", "entropy", "dp"}) {
    CompileOptions options;
    options.fusion = strategy;
    auto compiled = context.compile(workload.program, options, "<program>");
    if (!compiled)
      return compiled.takeStatus();
    Variant variant{*compiled, {}, {}};
    if (Status status =
            variant.executable->run("main", workload.inputs, variant.outputs);
        !status)
      return status;
    FusionResult result;
    result.strategy = strategy;
    const TrafficInfo &traffic = variant.executable->traffic();
    result.kernels = traffic.kernels;
    result.bytesMoved = traffic.bytes();
    result.bytesKept = traffic.bytesKept;
    result.predictedMs = traffic.predictedMs;
    if (!variants.empty()) {
      Expected<Difference> difference =
          compare(variant.outputs[0], variants.front().outputs[0]);
      if (!difference)
        return difference.takeStatus();
      result.relativeL2 = difference->relativeL2;
    }
    results.push_back(result);
    variants.push_back(std::move(variant));
  }
  std::mt19937 generator(1);
  auto elapsed = [&](auto since) {
    return std::chrono::duration<double, std::milli>(
               std::chrono::steady_clock::now() - since)
        .count();
  };
  auto start = std::chrono::steady_clock::now();
  std::vector<size_t> order;
  for (size_t i = 0; i < variants.size(); ++i)
    order.push_back(i);
  for (int round = 0; round < 5 || elapsed(start) < budgetMs; ++round) {
    for (size_t i = order.size(); i > 1; --i)
      std::swap(order[i - 1], order[generator() % i]);
    for (size_t i : order) {
      Variant &v = variants[i];
      auto begin = std::chrono::steady_clock::now();
      if (Status status = v.executable->run("main", workload.inputs.data(),
                                            workload.inputs.size(),
                                            v.outputs.data(), v.outputs.size());
          !status)
        return status;
      v.samples.push_back(elapsed(begin));
    }
  }
  for (size_t i = 0; i < variants.size(); ++i) {
    results[i].medianMs = median(variants[i].samples);
    results[i].minMs = variants[i].samples.front();
    results[i].maxMs = variants[i].samples.back();
    results[i].runs = static_cast<int64_t>(variants[i].samples.size());
  }
  return results;
}

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
  cl::opt<double> budget("budget-ms", cl::desc("Time to spend on each block"),
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
      return reportError(
          kTool, Status::invalidArgument("--length: expected at least 1, got " +
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
                    "share  predicted   median ms      min      max  speed-up  "
                    "rel l2 difference\n";
  llvm::json::Array results;
  for (bool mamba2 : {false, true})
    for (const std::string &typeText : typeList)
      for (int64_t length : lengthList) {
        Expected<DType> dtype = dtypeFromName(typeText);
        if (!dtype || (*dtype != DType::F32 && *dtype != DType::F16 &&
                       *dtype != DType::BF16))
          return reportError(kTool,
                             Status::invalidArgument(
                                 "--dtype: expected f32, f16 or bf16, got '" +
                                 typeText + "'"));
        Workload workload = makeBlock(mamba2, length, *dtype);
        Expected<std::vector<FusionResult>> measured =
            measureFusion(**context, workload, budget);
        if (!measured)
          return reportError(kTool, measured.status());
        const FusionResult &base = measured->front();
        for (const FusionResult &r : *measured) {
          const char *block = mamba2 ? "mamba2" : "mamba1";
          if (!toStdout) {
            llvm::outs() << llvm::left_justify(block, 8) << " "
                         << llvm::left_justify(typeText, 5)
                         << llvm::format(
                                " %6lld  %-10s %8lld %10.2f  %4.0f%% %11.3f "
                                "%11.3f %8.3f %8.3f  %8.3f  %12.3g\n",
                                static_cast<long long>(length),
                                r.strategy.c_str(),
                                static_cast<long long>(r.kernels),
                                r.bytesMoved * 1e-6,
                                100 * r.bytesMoved / base.bytesMoved,
                                r.predictedMs, r.medianMs, r.minMs, r.maxMs,
                                base.medianMs / r.medianMs, r.relativeL2);
            llvm::outs().flush();
          }
          results.push_back(
              llvm::json::Object{{"block", block},
                                 {"dtype", typeText},
                                 {"length", length},
                                 {"threads", (*context)->getThreads()},
                                 {"strategy", r.strategy},
                                 {"kernels", r.kernels},
                                 {"bytes_moved", r.bytesMoved},
                                 {"bytes_kept", r.bytesKept},
                                 {"predicted_ms", r.predictedMs},
                                 {"median_ms", r.medianMs},
                                 {"min_ms", r.minMs},
                                 {"max_ms", r.maxMs},
                                 {"runs", r.runs},
                                 {"speedup", base.medianMs / r.medianMs},
                                 {"rel_l2_difference", r.relativeL2}});
        }
      }
  if (json.empty())
    return 0;
  llvm::json::Value document = describeRun(target);
  (*document.getAsObject())["benchmark"] = "fusion";
  (*document.getAsObject())["results"] = std::move(results);
  return writeJSON(json, std::move(document));
}
