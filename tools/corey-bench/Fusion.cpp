//===- Fusion.cpp - Fusion strategies on whole blocks ---------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "JsonOption.h"
#include "Workload.h"
#include "corey/Dialect/SSM/IR/SSMOps.h"
#include "corey/Dialect/SSM/Transforms/Passes.h"
#include "corey/Executable.h"
#include "corey/InitAll.h"
#include "corey/ToolUtils.h"
#include "mlir/IR/BuiltinOps.h"
#include "mlir/Parser/Parser.h"
#include "mlir/Pass/PassManager.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/Support/CommandLine.h"
#include "llvm/Support/FileSystem.h"
#include "llvm/Support/FileUtilities.h"
#include "llvm/Support/Format.h"
#include "llvm/Support/MemoryBuffer.h"
#include "llvm/Support/raw_ostream.h"
#include <optional>

using namespace corey;
namespace cl = llvm::cl;

static constexpr const char *kTool = "corey-bench";

Expected<std::vector<FusionResult>>
corey::measureFusion(Context &context, const Workload &workload,
                     double budgetMs) {
  /// Runs of one launch of a graph.
  constexpr int kRepeats = 5;
  Device device = context.getDevice();
  Expected<std::vector<Tensor>> inputs = moveTo(workload.inputs, device);
  if (!inputs)
    return inputs.takeStatus();
  std::vector<TimedWork> work;
  std::vector<FusionResult> results;
  // The first output without fusion.
  std::optional<Tensor> unfused;
  for (const std::string *program : {&workload.program, &workload.annotated})
    for (const char *strategy :
         {"none", "static", "arithmetic", "entropy", "dp"}) {
      if (program->empty())
        continue;
      CompileOptions options;
      options.fusion = strategy;
      auto compiled = context.compile(*program, options, "<program>");
      if (!compiled)
        return compiled.takeStatus();
      Executable &executable = **compiled;
      std::vector<Tensor> outputs;
      if (Status status = executable.run("main", *inputs, outputs); !status)
        return status;
      Expected<std::vector<Tensor>> got =
          moveTo({outputs.front()}, Device::cpu());
      if (!got)
        return got.takeStatus();
      FusionResult result;
      result.strategy = strategy;
      result.annotated = program == &workload.annotated;
      const TrafficInfo &traffic = executable.traffic();
      result.kernels = traffic.kernels;
      result.bytesMoved = traffic.bytes();
      result.bytesKept = traffic.bytesKept;
      result.predictedMs = traffic.predictedMs;
      if (unfused) {
        Expected<Difference> difference = compare(got->front(), *unfused);
        if (!difference)
          return difference.takeStatus();
        result.relativeL2 = difference->relativeL2;
      } else {
        unfused = got->front();
      }
      if (!workload.expected.empty()) {
        Expected<Difference> difference =
            compare(got->front(), workload.expected[0]);
        if (!difference)
          return difference.takeStatus();
        result.error = difference->relativeL2;
      }
      results.push_back(result);
      Expected<TimedWork> runs =
          workOf(executable, device, "main", *inputs, outputs, kRepeats);
      if (!runs)
        return runs.takeStatus();
      work.push_back(std::move(*runs));
    }
  Expected<std::vector<Timing>> timings =
      timeInTurn(device, work, /*minRounds=*/5, budgetMs);
  if (!timings)
    return timings.takeStatus();
  for (size_t i = 0; i < results.size(); ++i)
    results[i].time = (*timings)[i];
  return results;
}

//===----------------------------------------------------------------------===//
// Blocks of trained models
//===----------------------------------------------------------------------===//

namespace {
/// A block to measure.
struct Block {
  /// The case of a folder, or empty for random weights.
  std::string name;
  bool mamba2 = false;
  DType dtype = DType::F32;
  int64_t length = 0;
  std::map<std::string, Tensor> given;
  std::vector<Tensor> expected;
};

/// What a program of a block says of itself.
mlir::OwningOpRef<mlir::ModuleOp> parseProgram(mlir::MLIRContext &context,
                                               const std::string &source) {
  return mlir::parseSourceString<mlir::ModuleOp>(source, &context);
}

/// A case of a folder with a cases.json, as `corey-run --golden` takes it: its
/// weights by the names of its program, its hidden states, and its result.
Expected<Block> readCase(mlir::MLIRContext &context, const std::string &folder,
                         const llvm::json::Object &object) {
  auto path = [&](const std::string &text) { return pathFrom(folder, text); };
  auto text = [](const llvm::json::Object *in,
                 llvm::StringRef key) -> Expected<std::string> {
    auto value = in ? in->getString(key) : std::nullopt;
    if (!value)
      return Status::invalidArgument("expected a string '" + key.str() +
                                     "', got none");
    return value->str();
  };
  Block block;
  Expected<std::string> name = text(&object, "name"),
                        program = text(&object, "program"),
                        weights = text(&object, "weights"),
                        x = text(object.getObject("inputs"), "x"),
                        y = text(object.getObject("outputs"), "y");
  for (Expected<std::string> *field : {&name, &program, &weights, &x, &y})
    if (!*field)
      return field->takeStatus();
  block.name = *name;
  auto buffer = llvm::MemoryBuffer::getFile(path(*program));
  if (!buffer)
    return Status::ioError(path(*program) + ": " + buffer.getError().message());
  auto module = parseProgram(context, (*buffer)->getBuffer().str());
  if (!module)
    return Status::compileError(path(*program) + ": expected a program");
  Expected<SafeTensors> file = SafeTensors::open(path(*weights));
  if (!file)
    return file.takeStatus();
  std::string prefix;
  if (auto attr = (*module)->getAttrOfType<mlir::StringAttr>(
          ssm::WeightOp::getPrefixAttrName()))
    prefix = attr.str();
  if (auto given = object.getString("weight_prefix"))
    prefix = given->str();
  for (auto weight : module->getOps<ssm::WeightOp>()) {
    std::string key = weight.getKey().value_or(weight.getSymName()).str();
    Expected<Tensor> tensor = file->get(prefix + key);
    if (!tensor)
      return tensor.takeStatus();
    block.given.insert({weight.getSymName().str(), *tensor});
  }
  Status status;
  module->walk([&](ssm::SSDOp ssd) {
    block.mamba2 = true;
    // The skip connection of a head, one number, on each of its channels.
    auto it = block.given.find("D");
    if (it == block.given.end())
      return;
    Expected<Tensor> narrow = it->second.to(DType::F32);
    int64_t channels = ssd.getX().getType().getShape()[3];
    Expected<Tensor> wide =
        Tensor::empty(DType::F32, {it->second.numElements(), channels});
    for (const Expected<Tensor> *tensor : {&narrow, &wide})
      if (!*tensor) {
        status = tensor->status();
        return;
      }
    for (int64_t i = 0; i < wide->numElements(); ++i)
      wide->dataAs<float>()[i] = narrow->dataAs<float>()[i / channels];
    it->second = *wide;
  });
  if (!status)
    return status;
  Expected<Tensor> in = readTensorRef(path(*x)), out = readTensorRef(path(*y));
  if (!in)
    return in.takeStatus();
  if (!out)
    return out.takeStatus();
  if (in->rank() < 2)
    return Status::invalidArgument("'x': expected [length, channels], got " +
                                   in->describe());
  block.dtype = in->dtype();
  block.length = in->dim(-2);
  block.given.insert({"x", *in});
  block.expected = {*out};
  return block;
}

Expected<std::vector<Block>> readFolder(mlir::MLIRContext &context,
                                        const std::string &folder,
                                        llvm::ArrayRef<std::string> only) {
  std::string path = folder + "/cases.json";
  auto buffer = llvm::MemoryBuffer::getFile(path);
  if (!buffer)
    return Status::ioError(path + ": " + buffer.getError().message());
  auto document = llvm::json::parse((*buffer)->getBuffer());
  if (!document)
    return Status::invalidArgument(path + ": " +
                                   llvm::toString(document.takeError()));
  const llvm::json::Object *top = document->getAsObject();
  const llvm::json::Array *cases = top ? top->getArray("cases") : nullptr;
  if (!cases)
    return Status::invalidArgument(path + ": expected an array 'cases'");
  std::vector<Block> blocks;
  std::string known;
  for (const llvm::json::Value &value : *cases) {
    const llvm::json::Object *object = value.getAsObject();
    if (!object || object->getString("op") != llvm::StringRef("program"))
      continue;
    std::string name = object->getString("name").value_or("").str();
    known += (known.empty() ? "" : ", ") + name;
    if (!only.empty() && !llvm::is_contained(only, name))
      continue;
    Expected<Block> block = readCase(context, folder, *object);
    if (!block)
      return Status::invalidArgument(path + ": case '" + name +
                                     "': " + block.status().message());
    blocks.push_back(std::move(*block));
  }
  for (const std::string &name : only)
    if (llvm::none_of(blocks, [&](const Block &b) { return b.name == name; }))
      return Status::notFound("--case: expected one of " + known + ", got '" +
                              name + "'");
  if (blocks.empty())
    return Status::invalidArgument(path +
                                   ": expected a case of op 'program', got "
                                   "none");
  return blocks;
}

/// The program with the statistics of every value on the workload's inputs, as
/// `corey-run --profile` and `ssm-annotate-stats` make it.
Expected<std::string> annotate(Context &context, mlir::MLIRContext &mlir,
                               const Workload &workload) {
  CompileOptions options;
  options.observeValues = true;
  auto executable = context.compile(workload.program, options, "<program>");
  if (!executable)
    return executable.takeStatus();
  std::vector<Tensor> outputs;
  if (Status status = runFromHost(**executable, context.getDevice(), "main",
                                  workload.inputs, outputs);
      !status)
    return status;
  llvm::SmallString<128> path;
  if (std::error_code code =
          llvm::sys::fs::createTemporaryFile("corey-profile", "json", path))
    return Status::ioError("the profile: " + code.message());
  llvm::FileRemover remover(path);
  if (Status status = writeProfile(path.str().str(), **executable); !status)
    return status;
  Expected<std::string> captured = context.emit(workload.program, "captured");
  if (!captured)
    return captured;
  auto module = parseProgram(mlir, *captured);
  mlir::PassManager manager(&mlir);
  ssm::SSMAnnotateStatsOptions profile;
  profile.profile = path.str().str();
  manager.addPass(ssm::createSSMAnnotateStats(profile));
  if (!module || failed(manager.run(*module)))
    return Status::internal("expected a program that takes its statistics");
  std::string text;
  llvm::raw_string_ostream os(text);
  module->print(os);
  return text;
}
} // namespace

int corey::runFusion(int argc, char **argv) {
  cl::OptionCategory category("corey-bench fusion options");
  cl::opt<std::string> target(
      "target", cl::desc("Device to run on: cpu (default), cuda or cuda:<n>"),
      cl::init("cpu"), cl::cat(category));
  cl::list<int64_t> lengths("length", cl::desc("Lengths; default 2048"),
                            cl::CommaSeparated, cl::cat(category));
  cl::list<std::string> dtypes(
      "dtype",
      cl::desc("f32, f16 or bf16 of activations; default f32 and bf16"),
      cl::CommaSeparated, cl::cat(category));
  cl::opt<std::string> golden(
      "golden",
      cl::desc("In place of random weights and inputs the blocks of a folder "
               "with a cases.json, with and without a profile"),
      cl::value_desc("folder"), cl::cat(category));
  cl::list<std::string> only("case", cl::desc("Cases of --golden; default all"),
                             cl::CommaSeparated, cl::cat(category));
  cl::opt<int> threads("threads",
                       cl::desc("Threads; 0 (default) takes every processor"),
                       cl::init(0), cl::cat(category));
  cl::opt<double> budget("budget-ms", cl::desc("Time to spend on each block"),
                         cl::init(5000), cl::cat(category));
  JsonOption json(category);
  cl::HideUnrelatedOptions(category);
  cl::ParseCommandLineOptions(
      argc, argv,
      "COREY: fusion strategies on blocks with every operation on its own\n");
  for (auto [name, given] :
       {std::pair<const char *, bool>{"length", !lengths.empty()},
        {"dtype", !dtypes.empty()}})
    if (given && !golden.empty())
      return reportError(
          kTool, Status::invalidArgument(std::string("--") + name +
                                         ": expected no such option with "
                                         "--golden, whose cases have theirs"));
  if (golden.empty() && !only.empty())
    return reportError(
        kTool, Status::invalidArgument("--case: expected --golden, got none"));
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
  mlir::DialectRegistry registry;
  registerAllDialects(registry);
  mlir::MLIRContext mlir(registry, mlir::MLIRContext::Threading::DISABLED);
  std::vector<Block> blocks;
  if (!golden.empty()) {
    std::vector<std::string> names(only.begin(), only.end());
    auto read = readFolder(mlir, golden, names);
    if (!read)
      return reportError(kTool, read.status());
    blocks = std::move(*read);
  } else {
    for (bool mamba2 : {false, true})
      for (const std::string &typeText : typeList)
        for (int64_t length : lengthList) {
          Expected<DType> dtype = parseFloatType("--dtype", typeText);
          if (!dtype)
            return reportError(kTool, dtype.status());
          Block block;
          block.mamba2 = mamba2;
          block.dtype = *dtype;
          block.length = length;
          blocks.push_back(std::move(block));
        }
  }
  bool toStdout = json == "-";
  if (!toStdout)
    llvm::outs() << "block             dtype length  strategy   profile "
                    "kernels   MB moved  share  predicted   median ms      min "
                    "     max  speed-up  rel l2 difference  error\n";
  llvm::json::Array results;
  for (Block &block : blocks) {
    Expected<Workload> workload =
        makeBlock(block.mamba2, block.length, block.dtype, block.given);
    if (workload && !block.name.empty()) {
      workload->expected = block.expected;
      Expected<std::string> annotated = annotate(**context, mlir, *workload);
      if (!annotated)
        return reportError(kTool, annotated.status());
      workload->annotated = *annotated;
    }
    Expected<std::vector<FusionResult>> measured = Status::internal("unset");
    if (workload)
      measured = measureFusion(**context, *workload, budget);
    else
      measured = workload.takeStatus();
    if (!measured)
      return reportError(kTool, block.name.empty()
                                    ? measured.status()
                                    : Status::invalidArgument(
                                          "case '" + block.name +
                                          "': " + measured.status().message()));
    const FusionResult &base = measured->front();
    std::string kind = block.mamba2 ? "mamba2" : "mamba1";
    for (const FusionResult &r : *measured) {
      if (!toStdout) {
        llvm::outs()
            << llvm::left_justify(block.name.empty() ? kind : block.name, 17)
            << " " << llvm::left_justify(dtypeName(block.dtype), 5)
            << llvm::format(" %6lld  %-10s %7s %7lld %10.2f  %4.0f%% %10.3f "
                            "%11.3f %8.3f %8.3f  %8.3f  %17.3g",
                            static_cast<long long>(block.length),
                            r.strategy.c_str(), r.annotated ? "yes" : "no",
                            static_cast<long long>(r.kernels),
                            r.bytesMoved * 1e-6,
                            100 * r.bytesMoved / base.bytesMoved, r.predictedMs,
                            r.time.median, r.time.min, r.time.max,
                            base.time.median / r.time.median, r.relativeL2);
        if (!std::isnan(r.error))
          llvm::outs() << llvm::format("  %.3g", r.error);
        llvm::outs() << "\n";
        llvm::outs().flush();
      }
      llvm::json::Object row{{"block", kind},
                             {"dtype", dtypeName(block.dtype)},
                             {"length", block.length},
                             {"threads", (*context)->getThreads()},
                             {"strategy", r.strategy},
                             {"kernels", r.kernels},
                             {"bytes_moved", r.bytesMoved},
                             {"bytes_kept", r.bytesKept},
                             {"predicted_ms", r.predictedMs},
                             {"median_ms", r.time.median},
                             {"min_ms", r.time.min},
                             {"max_ms", r.time.max},
                             {"runs", r.time.runs},
                             {"speedup", base.time.median / r.time.median},
                             {"rel_l2_difference", r.relativeL2}};
      if (!block.name.empty()) {
        row["case"] = block.name;
        row["profile"] = r.annotated;
        row["rel_l2_error"] = r.error;
      }
      results.push_back(std::move(row));
    }
  }
  if (json.empty())
    return 0;
  llvm::json::Value document = describeRun(target);
  (*document.getAsObject())["benchmark"] = "fusion";
  (*document.getAsObject())["results"] = std::move(results);
  return writeJSON(json, std::move(document));
}
