//===- Scheduling.cpp - Rules, tuning and policies ------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "JsonOption.h"
#include "Workload.h"
#include "corey/Executable.h"
#include "corey/Scheduler/ChunkRule.h"
#include "corey/Scheduler/CostModel.h"
#include "corey/Scheduler/Policy.h"
#include "corey/Scheduler/Simulator.h"
#include "corey/Scheduler/Tuner.h"
#include "corey/ToolUtils.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/Support/CommandLine.h"
#include "llvm/Support/Format.h"
#include "llvm/Support/MemoryBuffer.h"
#include "llvm/Support/raw_ostream.h"
#include <chrono>
#include <map>

using namespace corey;
namespace cl = llvm::cl;
namespace sched = corey::scheduler;

static constexpr const char *kTool = "corey-bench";

static void parseOptions(cl::OptionCategory &category, int argc, char **argv,
                         const char *overview) {
  cl::HideUnrelatedOptions(category);
  cl::ParseCommandLineOptions(argc, argv, overview);
}

//===----------------------------------------------------------------------===//
// rules
//===----------------------------------------------------------------------===//

namespace {
/// One printed choice of a paper, and what we choose.
struct RuleCase {
  std::string name;
  Expected<int64_t> expected = Status::internal("unset"),
                    got = Status::internal("unset");
};

Status fieldError(const std::string &where, llvm::StringRef field,
                  const char *expected) {
  return Status::invalidArgument(where + "." + field.str() + ": expected " +
                                 expected);
}

Expected<int64_t> chunkOf(const llvm::json::Object &object,
                          const std::string &where) {
  auto rule = object.getString("rule");
  auto entropy = object.getNumber("entropy");
  auto unit = object.getString("unit");
  if (!rule)
    return fieldError(where, "rule", "a string");
  if (!entropy)
    return fieldError(where, "entropy", "a number");
  if (!unit || (*unit != "nats" && *unit != "bits"))
    return fieldError(where, "unit", "\"nats\" or \"bits\"");
  sched::Nats nats = *unit == "bits" ? sched::Nats(sched::Bits(*entropy))
                                     : sched::Nats(*entropy);
  int64_t bins = object.getInteger("bins").value_or(256);
  Expected<sched::ChunkRule> found = Status::internal("unset");
  if (*rule == "explicit") {
    auto least = object.getInteger("c_min"), most = object.getInteger("c_max");
    auto reference = object.getNumber("h_ref");
    if (!least || !most || !reference)
      return fieldError(where, "c_min", "c_min, c_max and h_ref");
    found = sched::ChunkRule::powerOfTwo(*least, *most, *reference);
  } else {
    found = sched::ChunkRule::named(rule->str());
  }
  if (!found)
    return found.takeStatus();
  std::optional<int64_t> chunk = found->chunk(nats, bins);
  if (!chunk)
    return fieldError(where, "entropy", "a finite number");
  return *chunk;
}

/// The choice of the guard: an inner policy that is a constant.
Expected<int64_t> guardedChunk(const llvm::json::Object &object,
                               const std::string &where) {
  auto selected = object.getInteger("selected"),
       fallback = object.getInteger("fallback"),
       delta = object.getInteger("delta");
  if (!selected || !fallback || !delta)
    return fieldError(where, "selected", "selected, fallback and delta");
  auto policy =
      sched::parsePolicy("guarded:inner=[static:" + std::to_string(*selected) +
                         "],fallback=" + std::to_string(*fallback) +
                         ",delta=" + std::to_string(*delta));
  if (!policy)
    return policy.takeStatus();
  sched::Device device;
  sched::Variant variant;
  sched::Query query;
  query.device = &device;
  query.variants = &variant;
  query.numVariants = 1;
  query.problem.length = int64_t(1) << 20;
  return (*policy)->decide(query).chunk;
}
} // namespace

int corey::runRules(int argc, char **argv) {
  cl::OptionCategory category("corey-bench rules options");
  cl::opt<std::string> path(
      "cases", cl::desc("JSON file of printed chunk choices"), cl::Required,
      cl::value_desc("file"), cl::cat(category));
  parseOptions(category, argc, argv,
               "COREY: chunk rules against the choices papers print\n");
  auto buffer = llvm::MemoryBuffer::getFile(path);
  if (!buffer)
    return reportError(
        kTool, Status::ioError(path + ": " + buffer.getError().message()));
  llvm::Expected<llvm::json::Value> parsed =
      llvm::json::parse((*buffer)->getBuffer());
  if (!parsed)
    return reportError(
        kTool, Status::invalidArgument(path + ": expected JSON, got " +
                                       llvm::toString(parsed.takeError())));
  const llvm::json::Object *root = parsed->getAsObject();
  if (!root || !root->getArray("cases"))
    return reportError(kTool, Status::invalidArgument(
                                  path + ": expected an object with an array "
                                         "\"cases\", got none"));
  std::vector<RuleCase> cases;
  auto collect = [&](const char *list, const char *field,
                     auto choose) -> Status {
    const llvm::json::Array *array = root->getArray(list);
    for (size_t i = 0; array && i < array->size(); ++i) {
      std::string where = path + ": " + list + "[" + std::to_string(i) + "]";
      const llvm::json::Object *object = (*array)[i].getAsObject();
      if (!object)
        return Status::invalidArgument(where + ": expected an object");
      RuleCase result;
      if (auto table = object->getString("table"))
        result.name = "table " + table->str() + " " +
                      object->getString("row").value_or("").str() + " (" +
                      object->getString("rule").value_or("").str() + ")";
      else
        result.name =
            "guard " +
            std::to_string(object->getInteger("selected").value_or(0));
      auto expected = object->getInteger(field);
      if (!expected)
        return fieldError(where, field, "an integer");
      result.expected = *expected;
      result.got = choose(*object, where);
      if (!result.got)
        return result.got.status();
      cases.push_back(std::move(result));
    }
    return Status::ok();
  };
  for (Status status : {collect("cases", "chunk", chunkOf),
                        collect("tile_cases", "tile", chunkOf),
                        collect("guard_cases", "chunk", guardedChunk)})
    if (!status)
      return reportError(kTool, status);
  size_t failed = 0;
  for (const RuleCase &each : cases) {
    bool passed = *each.expected == *each.got;
    failed += !passed;
    llvm::outs() << (passed ? "PASS " : "FAIL ") << each.name << ": "
                 << *each.got;
    if (!passed)
      llvm::outs() << ", expected " << *each.expected;
    llvm::outs() << "\n";
  }
  llvm::outs() << cases.size() - failed << " passed, " << failed << " failed\n";
  return failed != 0;
}

//===----------------------------------------------------------------------===//
// Scans to measure
//===----------------------------------------------------------------------===//

namespace {
/// A compiled scan of fixed channels, run for any batch and length.
class ScanRunner {
public:
  static Expected<std::unique_ptr<ScanRunner>>
  create(Context &context, const sched::Problem &problem) {
    std::unique_ptr<ScanRunner> runner(new ScanRunner);
    runner->problem = problem;
    Workload small = runner->workload(1, 1, false);
    CompileOptions options;
    options.policy = "unsplit";
    auto executable = context.compile(small.program, options, "<scan>");
    if (!executable)
      return executable.takeStatus();
    runner->executable = *executable;
    runner->device = context.getDevice();
    runner->variants = scanVariants(runner->device.kind, problem);
    return runner;
  }

  /// Milliseconds of one run: on a CUDA device of the device's time, in a
  /// graph. Very short ones are repeated, so that the clock does not decide.
  Expected<double> measure(const sched::Problem &at,
                           const sched::Candidate &candidate) {
    if (at.batch != batch || at.length != length) {
      Workload made = workload(at.batch, at.length, false);
      Expected<std::vector<Tensor>> moved = moveTo(made.inputs, device);
      if (!moved)
        return moved.takeStatus();
      graphs.clear();
      inputs = std::move(*moved);
      outputs.clear();
      batch = at.batch;
      length = at.length;
      if (Status status = executable->run("main", inputs, outputs); !status)
        return status;
      repeats = 1;
    }
    if (device.kind == Device::CUDA)
      return measureGraph(candidate);
    if (Status status = fix(candidate); !status)
      return status;
    while (true) {
      auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < repeats; ++i)
        if (Status status =
                executable->run("main", inputs.data(), inputs.size(),
                                outputs.data(), outputs.size());
            !status)
          return status;
      double ms = std::chrono::duration<double, std::milli>(
                      std::chrono::steady_clock::now() - start)
                      .count();
      if (ms >= 0.2 || repeats >= 64)
        return ms / repeats;
      repeats *= 2;
    }
  }

  /// The largest error of any output against float64.
  Expected<double> error(const sched::Candidate &candidate) {
    Workload made = workload(1, 300, true);
    std::vector<Tensor> results;
    if (Status status = fix(candidate); !status)
      return status;
    if (Status status =
            runFromHost(*executable, device, "main", made.inputs, results);
        !status)
      return status;
    Expected<std::vector<Difference>> differences =
        compareOutputs(made, results);
    if (!differences)
      return differences.takeStatus();
    double worst = 0;
    for (const Difference &each : *differences)
      worst = std::max(worst, each.relativeL2);
    return worst;
  }

private:
  /// A run of a candidate as a graph, so often that a launch takes a while.
  struct Graph {
    std::shared_ptr<CapturedRun> run;
    int repeats = 1;
  };

  Expected<double> measureGraph(const sched::Candidate &candidate) {
    constexpr double kLeastMs = 0.25;
    constexpr int kMostRepeats = 32;
    Graph &graph = graphs[{candidate.variant, candidate.chunk}];
    auto time = [&]() -> Expected<double> {
      Expected<double> ms = timeOnDevice(
          device, [&](void *stream) { return graph.run->launch(stream); }, 1,
          0);
      if (!ms)
        return ms;
      return *ms / graph.repeats;
    };
    auto capture = [&](int count) -> Status {
      Expected<std::shared_ptr<CapturedRun>> made =
          executable->capture("main", inputs, outputs, count);
      if (!made)
        return made.takeStatus();
      graph = {*made, count};
      return Status::ok();
    };
    // A captured run follows its sites, at its next launch.
    if (Status status = fix(candidate); !status)
      return status;
    if (graph.run)
      return time();
    if (Status status = capture(1); !status)
      return status;
    Expected<double> once = time();
    if (!once || *once >= kLeastMs)
      return once;
    if (Status status = capture(std::min(
            kMostRepeats, static_cast<int>(std::ceil(kLeastMs / *once))));
        !status)
      return status;
    return time();
  }

  Status fix(const sched::Candidate &candidate) {
    if (Status status = executable->setVariant(
            "scan", variants[static_cast<size_t>(candidate.variant)].name);
        !status)
      return status;
    return executable->setChunk("scan", candidate.chunk);
  }

  Workload workload(int64_t batch, int64_t length, bool reference) const {
    WorkloadOptions options;
    options.reference = reference;
    options.dtype = problem.type == sched::ElementType::F16    ? DType::F16
                    : problem.type == sched::ElementType::BF16 ? DType::BF16
                                                               : DType::F32;
    if (problem.op == sched::OpKind::SelectiveScan) {
      options.shape = {batch, length, problem.channels, problem.states};
      return makeScan(options);
    }
    options.shape = {batch,           length,         problem.channels,
                     problem.headDim, problem.states, problem.groups};
    return makeSSD(options);
  }

  sched::Problem problem;
  std::shared_ptr<Executable> executable;
  Device device;
  std::vector<sched::Variant> variants;
  std::vector<Tensor> inputs, outputs;
  int64_t batch = -1, length = -1;
  int repeats = 1;
  /// By variant and chunk, of the present inputs.
  std::map<std::pair<int, int64_t>, Graph> graphs;
};

/// The kernel that a table has measured.
Expected<sched::Variant> variantOf(const sched::TableEntry &entry,
                                   std::string_view name) {
  // Devices are named by their kind, then their architecture.
  Device::Kind kind = llvm::StringRef(entry.device).starts_with("cuda")
                          ? Device::CUDA
                          : Device::CPU;
  for (sched::Variant &variant : scanVariants(kind, entry.problem))
    if (variant.name == name)
      return std::move(variant);
  return Status::invalidArgument("expected a kernel of this build on " +
                                 entry.device + " for " +
                                 sched::opKindName(entry.problem.op) +
                                 ", got '" + std::string(name) + "'");
}

/// Options that name scans: --op, --shape, --dtype.
struct ScanOptions {
  explicit ScanOptions(cl::OptionCategory &category)
      : target("target",
               cl::desc("Device to run on: cpu (default), cuda or cuda:<n>"),
               cl::init("cpu"), cl::cat(category)),
        op("op", cl::desc("scan (default) or ssd"), cl::init("scan"),
           cl::cat(category)),
        shapes("shape",
               cl::desc("scan: D,N; ssd: H,P,N,G. May be given several times"),
               cl::value_desc("n,n,..."), cl::cat(category)),
        dtypes(
            "dtype",
            cl::desc("f32 (default), f16 or bf16. May be given several times"),
            cl::cat(category)) {}

  Expected<std::vector<sched::Problem>> problems() {
    bool isScan = op == "scan";
    if (!isScan && op != "ssd")
      return Status::invalidArgument("--op: expected scan or ssd, got '" + op +
                                     "'");
    std::vector<std::string> texts(shapes.begin(), shapes.end());
    if (texts.empty())
      texts = {isScan ? "512,16" : "8,64,64,1"};
    std::vector<std::string> types(dtypes.begin(), dtypes.end());
    if (types.empty())
      types = {"f32"};
    std::vector<sched::Problem> list;
    for (const std::string &text : texts)
      for (const std::string &type : types) {
        llvm::SmallVector<llvm::StringRef> parts;
        llvm::StringRef(text).split(parts, ',');
        std::vector<int64_t> sizes;
        for (llvm::StringRef part : parts) {
          int64_t size = 0;
          if (part.getAsInteger(10, size) || size < 1)
            return Status::invalidArgument(
                "--shape: expected positive sizes, got '" + text + "'");
          sizes.push_back(size);
        }
        if (sizes.size() != (isScan ? 2u : 4u))
          return Status::invalidArgument(
              std::string("--shape: expected ") +
              (isScan ? "2 sizes (D,N)" : "4 sizes (H,P,N,G)") + ", got '" +
              text + "'");
        if (Expected<DType> named = parseFloatType("--dtype", type); !named)
          return named.takeStatus();
        Expected<sched::ElementType> element = sched::parseElementType(type);
        sched::Problem problem;
        problem.op = isScan ? sched::OpKind::SelectiveScan : sched::OpKind::SSD;
        problem.type = *element;
        problem.channels = sizes[0];
        if (isScan) {
          problem.states = sizes[1];
        } else {
          problem.headDim = sizes[1];
          problem.states = sizes[2];
          problem.groups = sizes[3];
          if (sizes[0] % sizes[3])
            return Status::invalidArgument(
                "--shape: expected H to be a multiple of G, got '" + text +
                "'");
        }
        list.push_back(problem);
      }
    return list;
  }

  cl::opt<std::string> target, op;
  cl::list<std::string> shapes, dtypes;
};

Expected<std::shared_ptr<Context>> makeContext(const std::string &target,
                                               int threads) {
  ContextOptions options;
  options.device = target;
  options.threads = threads;
  return Context::create(options);
}

std::string describe(const sched::Problem &p) {
  std::string text = std::to_string(p.batch) + "," + std::to_string(p.length) +
                     "," + std::to_string(p.channels);
  if (p.op == sched::OpKind::SSD)
    text += "," + std::to_string(p.headDim);
  text += "," + std::to_string(p.states);
  if (p.op == sched::OpKind::SSD)
    text += "," + std::to_string(p.groups);
  return text;
}

Status checkSizes(const std::vector<int64_t> &batches,
                  const std::vector<int64_t> &lengths) {
  for (auto [name, list] :
       {std::pair<const char *, const std::vector<int64_t> *>{"batch",
                                                              &batches},
        {"length", &lengths}})
    for (int64_t size : *list)
      if (size < 1)
        return Status::invalidArgument(std::string("--") + name +
                                       ": expected sizes of at least 1, got " +
                                       std::to_string(size));
  return Status::ok();
}

/// Lengths that stand for all: each speaks for half an octave on either side,
/// the first and the last for everything beyond. On a GPU, where times go in
/// steps as multiprocessors fill up, it speaks for what is within an eighth,
/// and the cost model for the rest.
Expected<sched::ChunkTable>
tuneLengths(Context &context, ScanRunner &runner, sched::Problem problem,
            std::vector<int64_t> batches, std::vector<int64_t> lengths,
            int64_t mostElements, const sched::TunerOptions &options,
            bool print) {
  sched::ChunkTable table;
  std::sort(lengths.begin(), lengths.end());
  lengths.erase(std::unique(lengths.begin(), lengths.end()), lengths.end());
  std::sort(batches.begin(), batches.end());
  batches.erase(std::unique(batches.begin(), batches.end()), batches.end());
  std::vector<sched::Variant> variants =
      scanVariants(context.getDevice().kind, problem);
  // The range that the i-th of sorted sizes speaks for.
  auto rangeOf = [](const std::vector<int64_t> &sizes, size_t i) {
    auto middle = [](int64_t a, int64_t b) {
      return static_cast<int64_t>(
          std::sqrt(static_cast<double>(a) * static_cast<double>(b)));
    };
    sched::SizeRange range;
    range.low = i ? middle(sizes[i - 1], sizes[i]) + 1 : 1;
    range.high = i + 1 < sizes.size() ? middle(sizes[i], sizes[i + 1])
                                      : int64_t(1) << 40;
    range.low = std::min(range.low, sizes[i]);
    range.high = std::max(range.high, sizes[i]);
    return range;
  };
  for (size_t b = 0; b < batches.size(); ++b)
    for (size_t i = 0; i < lengths.size(); ++i) {
      problem.batch = batches[b];
      problem.length = lengths[i];
      if (problem.batch * problem.length * problem.channels * problem.headDim >
          mostElements)
        continue;
      // One run of a long sequence may take a whole budget, and a choice by one
      // run is none.
      sched::TunerOptions own = options;
      own.budgetMs *=
          std::max(1.0, static_cast<double>(problem.batch) *
                            static_cast<double>(problem.length) / 2048);
      Expected<sched::TableEntry> entry = sched::tune(
          context.schedulerDevice(), problem, variants,
          sched::defaultCandidates(problem, variants, 8,
                                   context.schedulerDevice().units),
          [&](const sched::Candidate &candidate) {
            return runner.measure(problem, candidate);
          },
          own);
      if (!entry)
        return entry.takeStatus();
      if (context.getDevice().kind == Device::CUDA) {
        entry->batch = {problem.batch, problem.batch};
        entry->length = {problem.length - problem.length / 8,
                         problem.length + problem.length / 8};
      } else {
        entry->batch = rangeOf(batches, b);
        entry->length = rangeOf(lengths, i);
      }
      if (print) {
        const sched::MeasuredCandidate &best = entry->best();
        double unsplitMs = 0;
        for (const sched::MeasuredCandidate &each : entry->candidates)
          if (each.chunk == 0 && each.variant == best.variant)
            unsplitMs = each.medianMs;
        llvm::outs()
            << llvm::left_justify(describe(problem), 24)
            << llvm::format(
                   " %8lld %-12s %10.4f [%.4f, %.4f]  unsplit %10.4f\n",
                   static_cast<long long>(best.chunk), best.variant.c_str(),
                   best.medianMs, best.lowMs, best.highMs, unsplitMs);
        llvm::outs().flush();
      }
      if (Status status = table.add(std::move(*entry)); !status)
        return status;
    }
  return table;
}
} // namespace

//===----------------------------------------------------------------------===//
// tune
//===----------------------------------------------------------------------===//

int corey::runTune(int argc, char **argv) {
  cl::OptionCategory category("corey-bench tune options");
  ScanOptions scans(category);
  cl::list<int64_t> batches("batch", cl::desc("Batches; default 1"),
                            cl::CommaSeparated, cl::cat(category));
  cl::list<int64_t> lengths("length",
                            cl::desc("Lengths; default 32,128,512,2048,8192"),
                            cl::CommaSeparated, cl::cat(category));
  cl::opt<int> threads("threads",
                       cl::desc("Threads; 0 (default) takes every processor"),
                       cl::init(0), cl::cat(category));
  cl::opt<double> budget("budget-ms",
                         cl::desc("Time to spend on each problem of up to 2048 "
                                  "tokens, and more in proportion"),
                         cl::init(1000), cl::cat(category));
  cl::opt<int64_t> mostElements(
      "most-elements",
      cl::desc("Leave out batches and lengths with more elements of a tensor"),
      cl::init(int64_t(1) << 28), cl::cat(category));
  cl::opt<std::string> save(
      "save",
      cl::desc("Merge what is found into this table; 'cache' is the user's, "
               "which compiled programs consult"),
      cl::value_desc("file"), cl::cat(category));
  parseOptions(category, argc, argv,
               "COREY: measure the chunks of a scan and keep what is found\n");
  Expected<std::vector<sched::Problem>> problems = scans.problems();
  if (!problems)
    return reportError(kTool, problems.status());
  auto context = makeContext(scans.target, threads);
  if (!context)
    return reportError(kTool, context.status());
  std::vector<int64_t> batchList(batches.begin(), batches.end()),
      lengthList(lengths.begin(), lengths.end());
  if (batchList.empty())
    batchList = {1};
  if (lengthList.empty())
    lengthList = {32, 128, 512, 2048, 8192};
  if (Status status = checkSizes(batchList, lengthList); !status)
    return reportError(kTool, status);
  std::string path = save;
  if (path == "cache") {
    path = sched::cachePath();
    if (path.empty())
      return reportError(
          kTool, Status::invalidArgument("--save=cache: expected "
                                         "COREY_CACHE_DIR or HOME to be set, "
                                         "got neither"));
  }
  sched::TunerOptions options;
  options.budgetMs = budget;
  llvm::outs() << "problem                     chunk variant       median ms\n";
  sched::ChunkTable table;
  for (const sched::Problem &problem : *problems) {
    auto runner = ScanRunner::create(**context, problem);
    if (!runner)
      return reportError(kTool, runner.status());
    Expected<sched::ChunkTable> part =
        tuneLengths(**context, **runner, problem, batchList, lengthList,
                    mostElements, options, true);
    if (!part)
      return reportError(kTool, part.status());
    table.merge(*part);
    // Kept as it comes: an interrupted run loses little.
    if (!path.empty())
      if (Status status = part->mergeInto(path); !status)
        return reportError(kTool, status);
  }
  llvm::outs() << table.entries().size() << " problems measured"
               << (path.empty() ? "" : ", merged into " + path) << "\n";
  return 0;
}

//===----------------------------------------------------------------------===//
// fit
//===----------------------------------------------------------------------===//

int corey::runFit(int argc, char **argv) {
  cl::OptionCategory category("corey-bench fit options");
  cl::list<std::string> tables(
      "table", cl::desc("Measurements, as corey-bench tune saves them"),
      cl::value_desc("file"), cl::OneOrMore, cl::cat(category));
  cl::opt<std::string> output("o", cl::desc("Write the model to a file"),
                              cl::value_desc("file"), cl::cat(category));
  parseOptions(category, argc, argv,
               "COREY: fit the cost model of a device to measurements\n");
  sched::ChunkTable table;
  for (const std::string &path : tables) {
    Expected<sched::ChunkTable> part = sched::ChunkTable::load(path);
    if (!part)
      return reportError(kTool, part.status());
    table.merge(*part);
  }
  Expected<sched::CostModel> model = sched::CostModel::fit(table, variantOf);
  if (!model)
    return reportError(kTool, model.status());
  llvm::outs() << "device            op              dtype  variant  problems "
                  "measured  median err  worst err  mean loss  worst loss\n";
  for (const sched::ModelEntry &entry : model->models())
    llvm::outs() << llvm::left_justify(entry.device, 17) << " "
                 << llvm::left_justify(sched::opKindName(entry.op), 15) << " "
                 << llvm::left_justify(sched::elementTypeName(entry.type), 6)
                 << " " << llvm::left_justify(entry.variant, 8)
                 << llvm::format(
                        " %8lld %8lld %10.2f%% %9.2f%% %9.2f%% "
                        "%10.2f%%\n",
                        static_cast<long long>(entry.error.problems),
                        static_cast<long long>(entry.error.measurements),
                        entry.error.median * 100, entry.error.worst * 100,
                        entry.error.meanLoss * 100,
                        entry.error.worstLoss * 100);
  // Every kernel is predicted on its own; the choice is among all of them.
  double losses = 0, worst = 0;
  int64_t problems = 0;
  for (const sched::TableEntry &entry : table.entries()) {
    double best = INFINITY, predictedBest = INFINITY, chosen = INFINITY;
    for (const sched::MeasuredCandidate &each : entry.candidates) {
      Expected<sched::Variant> variant = variantOf(entry, each.variant);
      const sched::ModelEntry *constants =
          model->find({entry.device, entry.units}, entry.problem.op,
                      entry.problem.type, each.variant);
      if (!variant || !constants)
        continue;
      double ms = sched::CostModel::Curve(*constants, entry.problem, *variant,
                                          entry.units)
                      .predict(each.chunk);
      best = std::min(best, each.medianMs);
      if (ms < predictedBest) {
        predictedBest = ms;
        chosen = each.medianMs;
      }
    }
    if (!(chosen < INFINITY))
      continue;
    ++problems;
    losses += chosen / best - 1;
    worst = std::max(worst, chosen / best - 1);
  }
  llvm::outs() << llvm::format(
      "among all kernels of a problem: mean loss %.2f%%, worst %.2f%% of %lld "
      "problems\n",
      losses / static_cast<double>(std::max<int64_t>(problems, 1)) * 100,
      worst * 100, static_cast<long long>(problems));
  if (output.empty())
    return 0;
  std::error_code code;
  llvm::raw_fd_ostream os(output, code);
  if (code)
    return reportError(kTool, Status::ioError(output + ": " + code.message()));
  os << model->toJSON();
  return 0;
}

//===----------------------------------------------------------------------===//
// schedule
//===----------------------------------------------------------------------===//

/// Policies over given sizes of a site.
static Status
scheduleSizes(const sched::SiteInfo &site,
              const std::vector<sched::Problem> &sizes,
              const std::vector<std::shared_ptr<const sched::Policy>> &policies,
              const sched::MeasureProblem &measure,
              const sched::SimulatorOptions &options, bool print,
              llvm::json::Array &results) {
  Expected<sched::SizesSimulation> simulation =
      sched::simulateSizes(site, sizes, policies, measure, options);
  if (!simulation)
    return simulation.takeStatus();
  const sched::SizesSimulation &s = *simulation;
  auto nameOf = [&](int variant) {
    return site.variants[static_cast<size_t>(variant)].name;
  };
  if (print)
    llvm::outs() << sched::opKindName(site.problem.op) << " "
                 << sched::elementTypeName(site.problem.type) << " on "
                 << site.device.name
                 << "\nproblem                  policy                variant "
                    "        chunk     time us  loss\n";
  auto row = [&](const sched::Problem &problem, const std::string &policy,
                 int variant, int64_t chunk, double ms, double loss) {
    if (print)
      llvm::outs() << llvm::left_justify(describe(problem), 24) << " "
                   << llvm::left_justify(policy, 21) << " "
                   << llvm::left_justify(nameOf(variant), 13)
                   << llvm::format(" %7lld %11.2f %5.1f%%\n",
                                   static_cast<long long>(chunk), ms * 1e3,
                                   loss * 100);
  };
  llvm::json::Array problems;
  for (size_t i = 0; i < s.problems.size(); ++i) {
    const sched::Problem &problem = s.problems[i];
    row(problem, "oracle", s.oracle[i].variant, s.oracle[i].chunk,
        s.oracleMs[i], 0);
    llvm::json::Array list;
    for (const sched::SizesReport &p : s.policies) {
      const sched::Decision &d = p.decisions[i];
      int64_t chunk = d.chunk >= problem.length ? 0 : d.chunk;
      row(problem, p.policy, d.variant, chunk, p.ms[i], p.losses[i]);
      list.push_back(llvm::json::Object{
          {"policy", p.policy},
          {"variant", nameOf(d.variant)},
          {"chunk", chunk},
          {"ms", p.ms[i]},
          {"predicted_ms", std::isnan(d.predictedMs)
                               ? llvm::json::Value(nullptr)
                               : llvm::json::Value(d.predictedMs)},
          {"loss", p.losses[i]}});
    }
    problems.push_back(
        llvm::json::Object{{"batch", problem.batch},
                           {"length", problem.length},
                           {"oracle_variant", nameOf(s.oracle[i].variant)},
                           {"oracle_chunk", s.oracle[i].chunk},
                           {"oracle_ms", s.oracleMs[i]},
                           {"policies", std::move(list)}});
  }
  llvm::json::Array totals;
  if (print)
    llvm::outs()
        << "policy                mean loss  worst loss  loss of total "
           "time\n";
  for (const sched::SizesReport &p : s.policies) {
    if (print)
      llvm::outs() << llvm::left_justify(p.policy, 21)
                   << llvm::format(" %9.2f%% %10.2f%% %18.2f%%\n",
                                   p.meanLoss * 100, p.worstLoss * 100,
                                   p.totalLoss * 100);
    totals.push_back(llvm::json::Object{{"policy", p.policy},
                                        {"mean_loss", p.meanLoss},
                                        {"worst_loss", p.worstLoss},
                                        {"total_loss", p.totalLoss}});
  }
  if (print)
    llvm::outs().flush();
  results.push_back(
      llvm::json::Object{{"op", sched::opKindName(site.problem.op)},
                         {"dtype", sched::elementTypeName(site.problem.type)},
                         {"channels", site.problem.channels},
                         {"head_dim", site.problem.headDim},
                         {"states", site.problem.states},
                         {"groups", site.problem.groups},
                         {"device", site.device.name},
                         {"problems", std::move(problems)},
                         {"policies", std::move(totals)}});
  return Status::ok();
}

int corey::runSchedule(int argc, char **argv) {
  cl::OptionCategory category("corey-bench schedule options");
  ScanOptions scans(category);
  cl::list<std::string> policySpecs(
      "policy", cl::desc("Policy; may be given several times. Default: all"),
      cl::cat(category));
  cl::opt<int> threads("threads",
                       cl::desc("Threads; 0 (default) takes every processor"),
                       cl::init(0), cl::cat(category));
  cl::opt<int> perRegime("per-regime", cl::desc("Prompts of each regime"),
                         cl::init(20), cl::cat(category));
  cl::list<int64_t> batches(
      "batch",
      cl::desc(
          "Decide once on every batch and length in place of a mixed load"),
      cl::CommaSeparated, cl::cat(category));
  cl::list<int64_t> lengths("length", cl::desc("Lengths to go with --batch"),
                            cl::CommaSeparated, cl::cat(category));
  cl::opt<int64_t> mostElements(
      "most-elements",
      cl::desc("Leave out batches and lengths with more elements of a tensor"),
      cl::init(int64_t(1) << 28), cl::cat(category));
  cl::opt<int64_t> longLength(
      "long-length", cl::desc("Tokens of the long prompts; 0 leaves them out"),
      cl::init(65536), cl::cat(category));
  cl::opt<double> budget("budget-ms",
                         cl::desc("Time to spend on the curve of a length"),
                         cl::init(400), cl::cat(category));
  cl::opt<std::string> tablePath(
      "table",
      cl::desc("Chunk table of the measured policy; shipped: what programs "
               "consult, the default with --batch; else the default is one "
               "measured first"),
      cl::value_desc("file"), cl::cat(category));
  cl::opt<std::string> modelPath(
      "model",
      cl::desc("Cost model; default: the shipped one of this device, "
               "or one fitted first"),
      cl::value_desc("file"), cl::cat(category));
  JsonOption json(category);
  parseOptions(category, argc, argv,
               "COREY: chunk policies over a mixed load, beside the best chunk "
               "of every call\n");
  Expected<std::vector<sched::Problem>> problems = scans.problems();
  if (!problems)
    return reportError(kTool, problems.status());
  if (perRegime < 1 || longLength < 0 || !(budget > 0))
    return reportError(
        kTool,
        Status::invalidArgument(
            "expected --per-regime of at least 1, --long-length of at "
            "least 0 and --budget-ms above 0, got " +
            std::to_string(perRegime) + ", " + std::to_string(longLength) +
            " and " + std::to_string(budget)));
  if (batches.empty() != lengths.empty())
    return reportError(
        kTool, Status::invalidArgument(
                   "expected --batch and --length together, got one of them"));
  std::vector<int64_t> batchList(batches.begin(), batches.end()),
      lengthList(lengths.begin(), lengths.end());
  if (Status status = checkSizes(batchList, lengthList); !status)
    return reportError(kTool, status);
  // Before anything is measured.
  for (const std::string &spec : policySpecs)
    if (auto policy = sched::parsePolicy(spec, sched::PolicyContext()); !policy)
      return reportError(kTool, policy.status());
  auto context = makeContext(scans.target, threads);
  if (!context)
    return reportError(kTool, context.status());
  bool toStdout = json == "-";
  sched::TraceOptions traceOptions;
  traceOptions.perRegime = perRegime;
  traceOptions.longLength = longLength;
  std::vector<sched::TracePrompt> trace = sched::makeTrace(traceOptions);

  llvm::json::Array results;
  for (const sched::Problem &problem : *problems) {
    auto runner = ScanRunner::create(**context, problem);
    if (!runner)
      return reportError(kTool, runner.status());
    sched::Device device = (*context)->schedulerDevice();
    sched::SiteInfo site;
    site.name = "scan";
    site.problem = problem;
    site.variants = scanVariants((*context)->getDevice().kind, problem);
    site.device = device;

    // What the policies know beforehand.
    sched::PolicyContext knowledge;
    std::string tableSource = tablePath, modelSource = modelPath;
    // What programs know, a table of the sizes to come being the oracle's.
    bool isShipped =
        tablePath == "shipped" || (tablePath.empty() && !batchList.empty());
    if (!isShipped && !tablePath.empty()) {
      Expected<sched::ChunkTable> loaded = sched::ChunkTable::load(tablePath);
      if (!loaded)
        return reportError(kTool, loaded.status());
      knowledge.table = std::make_shared<sched::ChunkTable>(std::move(*loaded));
    } else if (isShipped) {
      Expected<sched::ChunkTable> known = sched::ChunkTable::shippedAndCached();
      if (!known)
        return reportError(kTool, known.status());
      knowledge.table = std::make_shared<sched::ChunkTable>(std::move(*known));
      tableSource = "shipped and cached";
    } else {
      std::vector<int64_t> lengths = {8, 32, 128, 512, 1024, 2048, 8192};
      if (longLength > 8192)
        lengths.push_back(longLength);
      sched::TunerOptions options;
      options.budgetMs = 1.5 * budget;
      Expected<sched::ChunkTable> tuned =
          tuneLengths(**context, **runner, problem, {1}, lengths, mostElements,
                      options, false);
      if (!tuned)
        return reportError(kTool, tuned.status());
      knowledge.table = std::make_shared<sched::ChunkTable>(std::move(*tuned));
      tableSource = "measured before the replay";
    }
    if (!modelPath.empty()) {
      Expected<sched::CostModel> loaded = sched::CostModel::load(modelPath);
      if (!loaded)
        return reportError(kTool, loaded.status());
      knowledge.model = std::make_shared<sched::CostModel>(std::move(*loaded));
    } else {
      const sched::ModelEntry *shipped = sched::CostModel::shipped().find(
          device, problem.op, problem.type, site.variants.back().name);
      if (shipped && shipped->device == device.name) {
        modelSource = "shipped for " + shipped->device;
      } else if (isShipped) {
        modelSource = "none";
      } else {
        Expected<sched::CostModel> fitted =
            sched::CostModel::fit(*knowledge.table, variantOf);
        if (!fitted)
          return reportError(kTool, fitted.status());
        knowledge.model =
            std::make_shared<sched::CostModel>(std::move(*fitted));
        modelSource = "fitted before the replay";
      }
    }

    std::vector<std::string> specs(policySpecs.begin(), policySpecs.end());
    if (specs.empty())
      specs = {"unsplit",
               "static:256",
               "entropy",
               "sampled",
               "token",
               "guarded",
               "guarded:mode=gain,fallback=unsplit",
               "table",
               "midpoint",
               "random",
               "cheap",
               "variance",
               "kurtosis",
               "cost-model",
               "measured"};
    std::vector<std::shared_ptr<const sched::Policy>> policies;
    for (const std::string &spec : specs) {
      auto policy = sched::parsePolicy(spec, knowledge);
      if (!policy)
        return reportError(kTool, policy.status());
      policies.push_back(*policy);
    }
    sched::SimulatorOptions options;
    options.budgetMsPerShape = budget;
    if (!batchList.empty()) {
      std::vector<sched::Problem> sizes;
      for (int64_t batch : batchList)
        for (int64_t length : lengthList) {
          sched::Problem &each = sizes.emplace_back(problem);
          each.batch = batch;
          each.length = length;
          if (batch * length * each.channels * each.headDim > mostElements)
            sizes.pop_back();
        }
      Status status = scheduleSizes(
          site, sizes, policies,
          [&](const sched::Problem &at, const sched::Candidate &candidate) {
            return (*runner)->measure(at, candidate);
          },
          options, !toStdout, results);
      if (!status)
        return reportError(kTool, status);
      continue;
    }
    Expected<sched::SimulationReport> report = sched::simulate(
        site, trace, policies,
        [&](const sched::Problem &at, const sched::Candidate &candidate) {
          return (*runner)->measure(at, candidate);
        },
        options);
    if (!report)
      return reportError(kTool, report.status());
    // The chunk must not matter to the result.
    double error = 0;
    for (size_t v = 0; v < site.variants.size(); ++v) {
      const sched::Variant &variant = site.variants[v];
      for (int64_t chunk : {0, 8, 64, 100, 256}) {
        // One that cannot be cut has no multiple of its granularity below.
        if (chunk && variant.granularity > 256)
          break;
        int64_t unit = std::max<int64_t>(variant.granularity, 1);
        Expected<double> own = (*runner)->error(
            {(chunk + unit - 1) / unit * unit, static_cast<int>(v)});
        if (!own)
          return reportError(kTool, own.status());
        error = std::max(error, *own);
      }
    }

    // The constant that is best over all calls, of those that were asked for.
    const sched::PolicyReport *bestStatic = nullptr;
    for (const sched::PolicyReport &p : report->policies)
      if (llvm::StringRef(p.policy).starts_with("static") &&
          (!bestStatic || p.meanMs < bestStatic->meanMs))
        bestStatic = &p;
    auto gain = [&](const sched::PolicyReport &p) {
      return 1 - p.meanMs / bestStatic->meanMs;
    };
    std::string op = sched::opKindName(problem.op);
    if (!toStdout) {
      llvm::outs() << op << " " << sched::elementTypeName(problem.type) << " "
                   << describe(problem) << " on " << device.name << ", "
                   << device.units << " threads: " << report->calls
                   << " calls of " << report->shapes << " lengths, oracle "
                   << llvm::format("%.4f ms, rel l2 error %.3g\n",
                                   report->oracleMeanMs, error)
                   << "table: " << tableSource
                   << "; cost model: " << modelSource << "\n"
                   << "policy                                mean ms  gap to "
                      "oracle  decision ns  statistics ms  switches\n";
      for (const sched::PolicyReport &p : report->policies)
        llvm::outs() << llvm::left_justify(p.policy, 36)
                     << llvm::format(" %8.4f %13.2f%% %12.0f %14.4f %9lld\n",
                                     p.meanMs, p.gapToOracle * 100,
                                     p.decisionNs, p.statisticsMs,
                                     static_cast<long long>(p.switches));
      if (bestStatic)
        for (const sched::PolicyReport &p : report->policies)
          if (!llvm::StringRef(p.policy).starts_with("static"))
            llvm::outs() << p.policy << " takes "
                         << llvm::format("%.2f%%", gain(p) * 100)
                         << " less time than " << bestStatic->policy
                         << ", the best constant\n";
      llvm::outs().flush();
    }
    llvm::json::Array list;
    for (const sched::PolicyReport &p : report->policies) {
      llvm::json::Array regimes;
      for (const sched::RegimeReport &r : p.regimes)
        regimes.push_back(llvm::json::Object{{"regime", r.regime},
                                             {"calls", r.calls},
                                             {"mean_ms", r.meanMs},
                                             {"gap_to_oracle", r.gapToOracle}});
      list.push_back(llvm::json::Object{
          {"policy", p.policy},
          {"mean_ms", p.meanMs},
          {"gap_to_oracle", p.gapToOracle},
          {"gain_over_best_static", bestStatic ? llvm::json::Value(gain(p))
                                               : llvm::json::Value(nullptr)},
          {"decision_ns", p.decisionNs},
          {"statistics_ms", p.statisticsMs},
          {"switches", p.switches},
          {"used_data", p.usedData},
          {"regimes", std::move(regimes)}});
    }
    results.push_back(llvm::json::Object{
        {"op", op},
        {"dtype", sched::elementTypeName(problem.type)},
        {"channels", problem.channels},
        {"head_dim", problem.headDim},
        {"states", problem.states},
        {"groups", problem.groups},
        {"device", device.name},
        {"threads", device.units},
        {"calls", report->calls},
        {"lengths", report->shapes},
        {"oracle_mean_ms", report->oracleMeanMs},
        {"rel_l2_error", error},
        {"table", tableSource},
        {"cost_model", modelSource},
        {"best_static", bestStatic ? llvm::json::Value(bestStatic->policy)
                                   : llvm::json::Value(nullptr)},
        {"policies", std::move(list)}});
  }
  if (json.empty())
    return 0;
  llvm::json::Value document = describeRun(scans.target);
  (*document.getAsObject())["benchmark"] = "schedule";
  (*document.getAsObject())["results"] = std::move(results);
  return writeJSON(json, std::move(document));
}
