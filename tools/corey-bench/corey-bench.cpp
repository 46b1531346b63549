//===- corey-bench.cpp - Benchmarks ---------------------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "JsonOption.h"
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

namespace {
/// An op that can be measured alone.
struct MeasuredOp {
  llvm::StringLiteral name;
  /// Its sizes, as --shape takes them.
  llvm::StringLiteral sizes;
  llvm::StringLiteral defaultShape;
  Workload (*make)(const WorkloadOptions &);
  /// Whether it has the chunk site "scan".
  bool hasChunks = false;
  /// As --model takes it, where a benchmark has several; the first is the
  /// default.
  llvm::StringLiteral model = "";
};
constexpr MeasuredOp kOps[] = {
    {"scan", "B,L,D,N", "1,512,2048,16", makeScan, true},
    {"ssd", "B,L,H,P,N,G", "1,512,80,64,128,1", makeSSD, true},
    {"step", "B,D,N", "1,2048,16", makeStep, false, "selective_scan"},
    {"step", "B,H,P,N,G", "1,80,64,128,1", makeSSDStep, false, "ssd"},
    {"conv", "B,L,D", "1,512,2048", makeConv},
    {"hadamard", "rows,n", "512,2048", makeHadamard},
    {"norm", "rows,D", "512,2048", makeNorm},
    {"projection", "B,M,K", "1,2048,1024", makeProjection}};

constexpr std::pair<llvm::StringLiteral, int (*)(int, char **)> kSubcommands[] =
    {{"rules", runRules},       {"tune", runTune},     {"fit", runFit},
     {"schedule", runSchedule}, {"fusion", runFusion}, {"entropy", runEntropy},
     {"paper", runPaper},       {"sol", runSol},       {"lm", runLM}};

/// The models of a benchmark; none if it has only one.
llvm::SmallVector<llvm::StringRef> modelsOf(llvm::StringRef name) {
  llvm::SmallVector<llvm::StringRef> models;
  for (const MeasuredOp &op : kOps)
    if (op.name == name && !op.model.empty())
      models.push_back(op.model);
  return models;
}

std::string namesOfBenchmarks(llvm::StringRef separator) {
  llvm::SmallVector<llvm::StringRef> names;
  for (const MeasuredOp &op : kOps)
    if (names.empty() || names.back() != op.name)
      names.push_back(op.name);
  for (auto [name, run] : kSubcommands)
    names.push_back(name);
  return llvm::join(names, separator);
}

/// The sizes of `text` for `op`. Errors: InvalidArgument.
Expected<std::vector<int64_t>> parseShape(const MeasuredOp &op,
                                          const std::string &text) {
  auto expected = [&](const std::string &what) {
    return Status::invalidArgument("--shape: expected " + what + ", got '" +
                                   text + "'");
  };
  llvm::SmallVector<llvm::StringRef> parts;
  llvm::StringRef(text).split(parts, ',');
  std::vector<int64_t> shape;
  for (llvm::StringRef part : parts) {
    int64_t size;
    if (part.getAsInteger(10, size) || size < 1)
      return expected("positive sizes");
    shape.push_back(size);
  }
  size_t rank = op.sizes.count(',') + 1;
  if (shape.size() != rank)
    return expected(std::to_string(rank) + " sizes (" + op.sizes.str() + ")");
  bool isSSDStep = op.name == "step" && op.model == "ssd";
  if ((op.name == "ssd" && shape[2] % shape[5]) ||
      (isSSDStep && shape[1] % shape[4]))
    return expected("H to be a multiple of G");
  if (op.name == "hadamard" && (shape[1] & (shape[1] - 1)))
    return expected("n to be a power of two");
  return shape;
}

/// One shape and type of an op.
struct Case {
  const MeasuredOp &op;
  std::string shapeText;
  WorkloadOptions options;

  llvm::json::Object toJSON() const {
    llvm::json::Object object{{"benchmark", op.name},
                              {"shape", llvm::json::Array(options.shape)},
                              {"dtype", dtypeName(options.dtype)}};
    if (!op.model.empty())
      object["model"] = op.model;
    return object;
  }
  /// The form of an SSD, and how many of its heads were compared with what is
  /// expected.
  void describeSSD(const Workload &workload, llvm::json::Object &result) const {
    result["form"] = options.discretized ? "decay" : "dt";
    int64_t heads = options.shape[0] * options.shape[2];
    result["checked_heads"] =
        workload.checkedHeads.empty()
            ? heads
            : static_cast<int64_t>(workload.checkedHeads.size());
    result["heads"] = heads;
  }
  /// Columns that both tables begin with.
  void print() const {
    llvm::outs() << llvm::left_justify(shapeText, 25) << " "
                 << llvm::left_justify(dtypeName(options.dtype), 5) << " ";
  }
};

Status benchmarkOnDevice(const Case &c, const std::string &target,
                         const std::optional<std::vector<int64_t>> &chunks,
                         const std::string &variant, double budgetMs,
                         bool print, llvm::json::Array &results) {
  ContextOptions contextOptions;
  contextOptions.device = target;
  Expected<std::shared_ptr<Context>> context = Context::create(contextOptions);
  if (!context)
    return context.takeStatus();
  Workload workload = c.op.make(c.options);
  scheduler::Problem scan;
  const std::vector<int64_t> &shape = c.options.shape;
  if (c.op.hasChunks) {
    scan.type = c.options.dtype == DType::F16    ? scheduler::ElementType::F16
                : c.options.dtype == DType::BF16 ? scheduler::ElementType::BF16
                                                 : scheduler::ElementType::F32;
    scan.batch = shape[0];
    scan.length = shape[1];
    scan.channels = shape[2];
  }
  bool isSSD = c.op.name == "ssd";
  if (isSSD) {
    scan.op = scheduler::OpKind::SSD;
    scan.headDim = shape[3];
    scan.states = shape[4];
    scan.groups = shape[5];
  } else if (c.op.hasChunks) {
    scan.states = shape[3];
  }
  Expected<DeviceMeasurements> measured =
      measureOnDevice(**context, workload, c.op.hasChunks ? &scan : nullptr,
                      chunks, variant, budgetMs);
  if (!measured)
    return measured.takeStatus();
  for (const DeviceResult &each : measured->results) {
    if (print) {
      c.print();
      llvm::outs() << llvm::left_justify(each.variant, 12)
                   << llvm::format(" %7lld %11.2f %10.2f %11.2f %10.2f  "
                                   "%12.3g\n",
                                   static_cast<long long>(each.chunk),
                                   each.coldUs, each.warmUs,
                                   measured->copy.coldUs, measured->copy.warmUs,
                                   each.relativeL2);
      llvm::outs().flush();
    }
    llvm::json::Object result = c.toJSON();
    result["device"] = (*context)->schedulerDevice().name;
    result["variant"] = each.variant;
    result["chunk"] = each.chunk;
    result["cold_us"] = each.coldUs;
    result["warm_us"] = each.warmUs;
    result["copy_cold_us"] = measured->copy.coldUs;
    result["copy_warm_us"] = measured->copy.warmUs;
    result["rel_l2_error"] = jsonNumber(each.relativeL2);
    if (c.op.hasChunks) {
      result["y_rel_l2_error"] = jsonNumber(each.errors[0]);
      result["state_rel_l2_error"] = jsonNumber(each.errors[1]);
    }
    if (isSSD)
      c.describeSSD(workload, result);
    result["bytes"] = workload.bytes;
    result["flops"] = workload.flops;
    result["exponentials"] = workload.exponentials;
    results.push_back(std::move(result));
  }
  return Status::ok();
}

/// A scan with statistics of its input and without.
Status benchmarkObserved(const Case &c, const std::string &target,
                         const std::string &policy, double budgetMs, bool print,
                         llvm::json::Array &results) {
  ContextOptions contextOptions;
  contextOptions.device = target;
  Expected<std::shared_ptr<Context>> context = Context::create(contextOptions);
  if (!context)
    return context.takeStatus();
  WorkloadOptions options = c.options;
  options.reference = false;
  Expected<ObservedScan> measured = measureObserved(
      **context, c.op.make(options), policy, c.options.shape[1], budgetMs);
  if (!measured)
    return measured.takeStatus();
  double share = measured->observedUs / measured->plainUs - 1;
  if (print) {
    c.print();
    llvm::outs() << llvm::left_justify(policy, 20)
                 << llvm::format(
                        " %9.2f %11.2f %7.2f %9llu %9llu %8.1f\n",
                        measured->plainUs, measured->observedUs, 100 * share,
                        static_cast<unsigned long long>(measured->runs),
                        static_cast<unsigned long long>(measured->observations),
                        measured->hostUs);
    llvm::outs().flush();
  }
  llvm::json::Object result = c.toJSON();
  result["device"] = (*context)->schedulerDevice().name;
  result["policy"] = policy;
  result["plain_us"] = measured->plainUs;
  result["observed_us"] = measured->observedUs;
  result["share"] = share;
  result["runs"] = static_cast<int64_t>(measured->runs);
  result["observations"] = static_cast<int64_t>(measured->observations);
  result["host_us"] = measured->hostUs;
  results.push_back(std::move(result));
  return Status::ok();
}

Status benchmarkOnHost(const Case &c, const std::string &target,
                       llvm::ArrayRef<int> threads, llvm::ArrayRef<int> chunks,
                       int vectorBits, double budgetMs, bool print,
                       llvm::json::Array &results) {
  Workload workload = c.op.make(c.options);
  for (int count : threads) {
    ContextOptions contextOptions;
    contextOptions.device = target;
    contextOptions.threads = count;
    Expected<std::shared_ptr<Context>> context =
        Context::create(contextOptions);
    if (!context)
      return context.takeStatus();
    CompileOptions compileOptions;
    compileOptions.vectorBits = vectorBits;
    Expected<std::shared_ptr<Executable>> executable = (*context)->compile(
        workload.program, compileOptions, "<" + c.op.name.str() + ">");
    if (!executable)
      return executable.takeStatus();
    for (int chunk : chunks) {
      if (c.op.hasChunks)
        if (Status status = (*executable)->setChunk("scan", chunk); !status)
          return status;
      std::vector<Tensor> outputs;
      if (Status status = (*executable)->run("main", workload.inputs, outputs);
          !status)
        return status;
      Expected<std::vector<Difference>> differences =
          compareOutputs(workload, outputs);
      if (!differences)
        return differences.takeStatus();
      double error = 0;
      for (const Difference &each : *differences)
        error = std::max(error, each.relativeL2);
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
          5, budgetMs, &samples);
      if (!status)
        return status;
      std::sort(samples.begin(), samples.end());
      double compileMs = 0;
      for (const PhaseTime &phase : (*executable)->compileTimes())
        compileMs += phase.milliseconds;
      if (print) {
        c.print();
        llvm::outs() << llvm::format(
            "%7d %5d  %10.3f %8.3f %8.3f  %12.3g %5.1f %8.1f\n",
            (*context)->getThreads(), chunk, ms, samples.front(),
            samples.back(), error, workload.bytes / ms * 1e-6,
            workload.flops / ms * 1e-6);
        llvm::outs().flush();
      }
      llvm::json::Object result = c.toJSON();
      result["threads"] = (*context)->getThreads();
      result["chunk"] = chunk;
      result["median_ms"] = ms;
      result["min_ms"] = samples.front();
      result["max_ms"] = samples.back();
      result["runs"] = static_cast<int64_t>(samples.size());
      result["rel_l2_error"] = jsonNumber(error);
      if (c.op.hasChunks) {
        result["y_rel_l2_error"] = jsonNumber((*differences)[0].relativeL2);
        result["state_rel_l2_error"] = jsonNumber((*differences)[1].relativeL2);
      }
      if (c.op.name == "ssd")
        c.describeSSD(workload, result);
      result["compile_ms"] = compileMs;
      result["compile_cached"] =
          (*executable)->cache().outcome == CacheInfo::Loaded;
      result["bytes"] = workload.bytes;
      result["flops"] = workload.flops;
      result["exponentials"] = workload.exponentials;
      results.push_back(std::move(result));
    }
  }
  return Status::ok();
}
} // namespace

int corey::coreyBenchMain(int argc, char **argv) {
  // Those with options of their own.
  for (auto [name, run] : kSubcommands)
    if (argc > 1 && name == argv[1])
      return run(argc - 1, argv + 1);
  std::string names = "<" + namesOfBenchmarks("|") + ">", shapesHelp;
  for (const MeasuredOp &op : kOps)
    shapesHelp += op.name.str() +
                  (op.model.empty() ? "" : " of " + op.model.str()) + ": " +
                  op.sizes.str() + "; ";
  shapesHelp += "may be given several times";
  cl::OptionCategory category("corey-bench options");
  cl::opt<std::string> what(cl::Positional, cl::desc(names), cl::Required,
                            cl::cat(category));
  cl::opt<std::string> target(
      "target",
      cl::desc("Device to run on: cpu (default), cuda or cuda:<n>, where every "
               "kernel of a scan is measured"),
      cl::init("cpu"), cl::cat(category));
  cl::list<std::string> shapes("shape", cl::desc(shapesHelp),
                               cl::value_desc("n,n,..."), cl::cat(category));
  cl::opt<std::string> model(
      "model",
      cl::desc("What takes a step: selective_scan (default) or ssd, whose "
               "states are f32"),
      cl::cat(category));
  cl::list<std::string> dtypes(
      "dtype",
      cl::desc("f32 (default), f16 or bf16. May be given several times"),
      cl::cat(category));
  cl::list<int> threads("threads",
                        cl::desc("Threads; 0 (default) takes every processor. "
                                 "May be given several times"),
                        cl::cat(category));
  cl::list<int> chunks("chunk",
                       cl::desc("Chunk of a scan in tokens; 0 is unsplit. May "
                                "be given several times. Default: unsplit on "
                                "the CPU, what the default policy binds on a "
                                "CUDA device"),
                       cl::cat(category));
  cl::opt<std::string> allChunks(
      "chunks",
      cl::desc("all: every one that corey-bench tune tries, on a CUDA device"),
      cl::value_desc("all"), cl::cat(category));
  cl::opt<std::string> variant(
      "variant",
      cl::desc("The only kernel of a scan to measure on a CUDA device"),
      cl::value_desc("name"), cl::cat(category));
  cl::opt<std::string> form(
      "form",
      cl::desc("Of an SSD: dt (default), with A, dt_bias and softplus, or "
               "decay, that of each token, with initial states"),
      cl::value_desc("dt|decay"), cl::init("dt"), cl::cat(category));
  cl::opt<std::string> observe(
      "observe",
      cl::desc(
          "What a scan takes on a CUDA device with the statistics of its "
          "input that this policy decides on, and without: sampled:8, ..."),
      cl::value_desc("policy"), cl::cat(category));
  cl::opt<int> vectorBits(
      "vector-bits",
      cl::desc(
          "Width of a vector register: 256, 512; 0 (default) takes the host's"),
      cl::init(0), cl::cat(category));
  cl::opt<double> budget("budget-ms",
                         cl::desc("Time to spend on each measurement"),
                         cl::init(1000), cl::cat(category));
  JsonOption json(category);
  cl::HideUnrelatedOptions(category);
  cl::ParseCommandLineOptions(
      argc, argv,
      "COREY: benchmarks, always with the error against a float64 reference\n");

  auto refuse = [](const std::string &message) {
    return reportError(kTool, Status::invalidArgument(message));
  };
  const MeasuredOp *op = llvm::find_if(
      kOps, [&](const MeasuredOp &each) { return each.name == what; });
  if (op == std::end(kOps))
    return refuse("expected a benchmark of " + namesOfBenchmarks(", ") +
                  ", got '" + what + "'");
  llvm::SmallVector<llvm::StringRef> models = modelsOf(op->name);
  if (model.getNumOccurrences() && models.empty())
    return refuse("expected no --model for " + op->name.str() + ", got '" +
                  model + "'");
  if (!model.empty())
    op = llvm::find_if(kOps, [&](const MeasuredOp &each) {
      return each.name == what && each.model == model;
    });
  if (op == std::end(kOps))
    return refuse("--model: expected " + llvm::join(models, " or ") +
                  ", got '" + model + "'");
  if (shapes.empty())
    shapes.push_back(op->defaultShape.str());
  if (dtypes.empty())
    dtypes.push_back("f32");
  Expected<Device> device = Device::parse(target.getValue());
  if (!device)
    return reportError(kTool, device.status());
  bool onDevice = device->kind == Device::CUDA;
  if (onDevice && (!threads.empty() || vectorBits))
    return refuse("expected neither --threads nor --vector-bits on " +
                  device->name() + ", got one");
  if (!op->hasChunks && (!chunks.empty() || allChunks.getNumOccurrences()))
    return refuse("expected neither --chunk nor --chunks for " +
                  op->name.str() + ", got one");
  if (allChunks.getNumOccurrences() &&
      (allChunks != "all" || !onDevice || !chunks.empty()))
    return refuse("--chunks: expected 'all', on a CUDA device and without "
                  "--chunk, got '" +
                  allChunks.getValue() + "' on " + device->name());
  if (!observe.empty() && (!onDevice || op->name != "scan" || !chunks.empty() ||
                           !allChunks.empty()))
    return refuse("--observe: expected a scan on a CUDA device and neither "
                  "--chunk nor --chunks, got " +
                  op->name.str() + " on " + device->name());
  if (variant.getNumOccurrences() && (!onDevice || !op->hasChunks))
    return refuse("--variant: expected a scan on a CUDA device, got " +
                  op->name.str() + " on " + device->name());
  if (form.getNumOccurrences() && op->name != "ssd")
    return refuse("--form: expected ssd, got " + op->name.str());
  if (form != "dt" && form != "decay")
    return refuse("--form: expected dt or decay, got '" + form + "'");
  for (int chunk : chunks)
    if (chunk < 0)
      return refuse("--chunk: expected at least 0, got " +
                    std::to_string(chunk));
  if (!(budget > 0))
    return refuse("--budget-ms: expected more than 0, got " +
                  std::to_string(budget));
  // What the default policy binds, where nothing else is asked for.
  std::optional<std::vector<int64_t>> deviceChunks;
  if (!chunks.empty() || !allChunks.empty())
    deviceChunks.emplace(chunks.begin(), chunks.end());
  if (threads.empty())
    threads.push_back(0);
  if (chunks.empty())
    chunks.push_back(0);

  llvm::json::Array results;
  bool print = json != "-";
  if (print && !observe.empty())
    llvm::outs()
        << "shape                     dtype policy                  "
           "plain us observed us share %      runs  observed  host us\n";
  else if (print && onDevice)
    llvm::outs() << "shape                     dtype variant        chunk     "
                    "cold us    warm us   copy cold  copy warm  rel l2 error\n";
  else if (print)
    llvm::outs() << "shape                     dtype threads chunk   median ms "
                    "     min      max  rel l2 error  GB/s  GFLOP/s\n";
  for (const std::string &text : shapes) {
    Expected<std::vector<int64_t>> shape = parseShape(*op, text);
    if (!shape)
      return reportError(kTool, shape.status());
    for (const std::string &dtypeText : dtypes) {
      Expected<DType> dtype = parseFloatType("--dtype", dtypeText);
      if (!dtype)
        return reportError(kTool, dtype.status());
      Case c{*op, text, {}};
      c.options.dtype = *dtype;
      c.options.shape = *shape;
      c.options.discretized = form == "decay";
      Status status =
          !observe.empty()
              ? benchmarkObserved(c, target, observe, budget, print, results)
          : onDevice
              ? benchmarkOnDevice(c, target, deviceChunks, variant, budget,
                                  print, results)
              : benchmarkOnHost(
                    c, target, std::vector<int>(threads.begin(), threads.end()),
                    std::vector<int>(chunks.begin(), chunks.end()), vectorBits,
                    budget, print, results);
      if (!status)
        return reportError(kTool, status);
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
