//===- corey-bench.cpp - Benchmarks ---------------------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "Workload.h"
#include "corey/ToolUtils.h"
#include "corey/Tools.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/Support/CommandLine.h"
#include "llvm/Support/Format.h"
#include "llvm/Support/JSON.h"
#include "llvm/Support/raw_ostream.h"

using namespace corey;
namespace cl = llvm::cl;

static constexpr const char *kTool = "corey-bench";

int corey::coreyBenchMain(int argc, char **argv) {
  // Those with options of their own.
  static constexpr std::pair<llvm::StringLiteral, int (*)(int, char **)>
      subcommands[] = {{"rules", runRules},   {"tune", runTune},
                       {"fit", runFit},       {"schedule", runSchedule},
                       {"fusion", runFusion}, {"entropy", runEntropy},
                       {"paper", runPaper}};
  for (auto [name, run] : subcommands)
    if (argc > 1 && name == argv[1])
      return run(argc - 1, argv + 1);
  cl::OptionCategory category("corey-bench options");
  cl::opt<std::string> what(
      cl::Positional,
      cl::desc("<scan|ssd|rules|tune|fit|schedule|fusion|entropy|paper>"),
      cl::Required, cl::cat(category));
  cl::opt<std::string> target("target",
                              cl::desc("Device to run on: cpu (default); for "
                                       "scan also cuda or cuda:<n>, where "
                                       "every kernel is measured"),
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
  cl::opt<std::string> allChunks(
      "chunks", cl::desc("all: every power of two, on a CUDA device"),
      cl::value_desc("all"), cl::cat(category));
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
                   "expected a benchmark of scan, ssd, rules, tune, fit, "
                   "schedule, fusion, entropy, paper, got '" +
                   what + "'"));
  if (shapes.empty())
    shapes.push_back(isScan ? "1,512,2048,16" : "1,512,80,64,128,1");
  if (dtypes.empty())
    dtypes.push_back("f32");
  Expected<Device> device = Device::parse(target.getValue());
  if (!device)
    return reportError(kTool, device.status());
  bool onDevice = device->kind == Device::CUDA;
  if (onDevice && !isScan)
    return reportError(
        kTool, Status::unsupported("--target: expected cpu for ssd, got " +
                                   device->name()));
  if (onDevice && (!threads.empty() || vectorBits))
    return reportError(kTool,
                       Status::invalidArgument("expected neither --threads nor "
                                               "--vector-bits on " +
                                               device->name() + ", got one"));
  if (allChunks.getNumOccurrences() &&
      (allChunks != "all" || !onDevice || !chunks.empty()))
    return reportError(
        kTool, Status::invalidArgument("--chunks: expected 'all', on a CUDA "
                                       "device and without --chunk, got '" +
                                       allChunks.getValue() + "' on " +
                                       device->name()));
  // Unsplit only, where nothing else is asked for.
  std::vector<int64_t> deviceChunks(chunks.begin(), chunks.end());
  if (deviceChunks.empty() && allChunks.empty())
    deviceChunks.push_back(0);
  if (threads.empty())
    threads.push_back(0);
  if (chunks.empty())
    chunks.push_back(0);

  llvm::json::Array results;
  bool toStdout = json == "-";
  if (!toStdout && onDevice)
    llvm::outs() << "shape                     dtype variant        chunk     "
                    "cold us    warm us  rel l2 error\n";
  else if (!toStdout)
    llvm::outs() << "shape                     dtype threads chunk   median ms "
                    "     min      max  rel l2 error  GB/s  GFLOP/s\n";
  for (const std::string &text : shapes) {
    WorkloadOptions options;
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
      if (onDevice) {
        ContextOptions contextOptions;
        contextOptions.device = target;
        Expected<std::shared_ptr<Context>> context =
            Context::create(contextOptions);
        if (!context)
          return reportError(kTool, context.status());
        Expected<std::vector<DeviceScanResult>> measured =
            measureScanOnDevice(**context, options, deviceChunks, budget);
        if (!measured)
          return reportError(kTool, measured.status());
        for (const DeviceScanResult &each : *measured) {
          if (!toStdout)
            llvm::outs() << llvm::left_justify(text, 25) << " "
                         << llvm::left_justify(dtypeText, 5) << " "
                         << llvm::left_justify(each.variant, 12)
                         << llvm::format(" %7lld %11.2f %10.2f  %12.3g\n",
                                         static_cast<long long>(each.chunk),
                                         each.coldUs, each.warmUs,
                                         each.relativeL2);
          llvm::json::Array shapeArray;
          for (int64_t size : options.shape)
            shapeArray.push_back(size);
          results.push_back(
              llvm::json::Object{{"benchmark", what.getValue()},
                                 {"shape", std::move(shapeArray)},
                                 {"dtype", dtypeText},
                                 {"device", (*context)->schedulerDevice().name},
                                 {"variant", each.variant},
                                 {"chunk", each.chunk},
                                 {"cold_us", each.coldUs},
                                 {"warm_us", each.warmUs},
                                 {"rel_l2_error", each.relativeL2}});
        }
        continue;
      }
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
    llvm::json::Value document = describeRun(target);
    (*document.getAsObject())["results"] = std::move(results);
    // One result: its fields are at the top as well, for scripts.
    llvm::json::Array *list = document.getAsObject()->getArray("results");
    if (list->size() == 1) {
      llvm::json::Object only = *list->front().getAsObject();
      for (auto &[key, value] : only)
        (*document.getAsObject())[key] = value;
    }
    return writeJSON(json, std::move(document));
  }
  return 0;
}
