//===- corey-run.cpp - Compiles and runs a program ------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "Golden.h"
#include "RunModel.h"
#include "corey/ToolUtils.h"
#include "corey/Tools.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/Support/CommandLine.h"
#include "llvm/Support/FileSystem.h"
#include "llvm/Support/Format.h"
#include "llvm/Support/MemoryBuffer.h"
#include "llvm/Support/raw_ostream.h"
#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <memory>

using namespace corey;
namespace cl = llvm::cl;

static constexpr const char *kTool = "corey-run";

static Expected<std::pair<std::string, std::string>>
splitAssignment(const std::string &option, const std::string &text) {
  size_t equals = text.find('=');
  if (equals == std::string::npos || equals == 0)
    return Status::invalidArgument("--" + option +
                                   ": expected name=value, got '" + text + "'");
  return std::make_pair(text.substr(0, equals), text.substr(equals + 1));
}

static Expected<std::pair<std::string, int64_t>>
parseChunk(const std::string &text) {
  auto assignment = splitAssignment("chunk", text);
  if (!assignment)
    return assignment.takeStatus();
  int64_t tokens;
  if (llvm::StringRef(assignment->second).getAsInteger(10, tokens) ||
      tokens < 1)
    return Status::invalidArgument(
        "--chunk: expected a number of tokens of at least 1 for site '" +
        assignment->first + "', got '" + assignment->second + "'");
  return std::make_pair(assignment->first, tokens);
}

/// The first of the options that was given, or null.
template <typename... Options>
static const cl::Option *firstGiven(const Options &...options) {
  const cl::Option *found = nullptr;
  // Lists have an address-of operator of their own.
  ((found = found || !options.getNumOccurrences() ? found
                                                  : std::addressof(options)),
   ...);
  return found;
}

namespace {
/// The options for the folder of a model.
struct ModelFlags {
  cl::OptionCategory category{"corey-run options for the folder of a model"};
  cl::list<std::string> prompts{
      "prompt", cl::desc("Text to continue; several are one batch"),
      cl::value_desc("text"), cl::cat(category)};
  cl::list<std::string> promptFiles{"prompt-file",
                                    cl::desc("File of a text to continue"),
                                    cl::value_desc("file"), cl::cat(category)};
  cl::list<std::string> ids{
      "ids",
      cl::desc("Prompt as numbers of tokens, separated by commas or spaces; "
               "for models whose tokens are not bytes"),
      cl::value_desc("n,n,..."), cl::cat(category)};
  cl::opt<int> count{"generate", cl::desc("Tokens to generate (default 64)"),
                     cl::init(64), cl::cat(category)};
  cl::opt<int> batch{"batch", cl::desc("Run every prompt so often at a time"),
                     cl::init(1), cl::cat(category)};
  cl::opt<double> temperature{
      "temperature",
      cl::desc("Sample, with logits divided by this; 0 (default) takes the "
               "most likely token"),
      cl::init(0), cl::cat(category)};
  cl::opt<int> topK{"top-k",
                    cl::desc("Sample among so many; 0 (default) is all"),
                    cl::init(0), cl::cat(category)};
  cl::opt<double> topP{
      "top-p",
      cl::desc("Sample among the fewest whose probabilities add up to this"),
      cl::init(1), cl::cat(category)};
  cl::opt<unsigned long long> seed{"seed", cl::desc("Of the sampling"),
                                   cl::init(0), cl::cat(category)};
  cl::list<int> stop{
      "stop-token",
      cl::desc("Token that ends a text, in place of the checkpoint's; -1 for "
               "none"),
      cl::value_desc("n"), cl::cat(category)};
  cl::opt<std::string> dtype{
      "dtype",
      cl::desc("Type of activations: f32, f16 or bf16; default f32 on the CPU, "
               "that of the weights on a GPU"),
      cl::cat(category)};
  cl::opt<std::string> stateType{
      "state-dtype", cl::desc("Type of the scans' states (default f32)"),
      cl::init("f32"), cl::cat(category)};
  cl::opt<int> segment{
      "segment",
      cl::desc("Tokens of a prompt that are prefilled at a time (default "
               "8192)"),
      cl::init(8192), cl::cat(category)};
  cl::list<std::string> eval{
      "eval",
      cl::desc("Files whose perplexity is wanted; each token is judged from "
               "all before it, or see --window"),
      cl::value_desc("file ..."), cl::cat(category)};
  cl::list<std::string> evalIds{
      "eval-ids",
      cl::desc("The same for files of numbers of tokens, separated by commas, "
               "spaces or lines; for models whose tokens are not bytes"),
      cl::value_desc("file ..."), cl::cat(category)};
  cl::list<std::string> more{cl::Positional, cl::desc("[more files to judge]"),
                             cl::cat(category)};
  cl::opt<int> window{
      "window", cl::desc("Judge each token from a sliding window of so many"),
      cl::init(0), cl::cat(category)};
  cl::opt<int> stride{
      "stride", cl::desc("Tokens between windows (default half a window)"),
      cl::init(0), cl::cat(category)};
  cl::opt<std::string> golden{
      "golden-model",
      cl::desc("Compare with reference logits, greedy tokens and likelihoods"),
      cl::value_desc("file"), cl::cat(category)};
  cl::opt<std::string> loadStates{"load-states",
                                  cl::desc("Continue what --save-states left"),
                                  cl::value_desc("file"), cl::cat(category)};
  cl::opt<std::string> saveStates{
      "save-states", cl::desc("Write the states behind what was generated"),
      cl::value_desc("file"), cl::cat(category)};
  cl::opt<std::string> stats{
      "stats", cl::desc("Write times and the chunks of every site as JSON"),
      cl::value_desc("file"), cl::cat(category)};

  /// Why there may be nothing but one program or folder.
  Status refuseMore() const {
    if (more.empty())
      return Status::ok();
    return Status::invalidArgument("expected one program or folder, got '" +
                                   more.front() + "' too");
  }

  /// The first of them that was given, or null.
  const cl::Option *given() const {
    return firstGiven(prompts, promptFiles, ids, count, batch, temperature,
                      topK, topP, seed, stop, dtype, stateType, segment, eval,
                      evalIds, window, stride, golden, loadStates, saveStates,
                      stats);
  }

  Expected<ModelRun> parse() const {
    ModelRun run;
    if (!ids.empty() && !(prompts.empty() && promptFiles.empty()))
      return Status::invalidArgument("expected --ids or texts, got both");
    run.promptsAreIds = !ids.empty();
    run.prompts.assign(prompts.begin(), prompts.end());
    for (const std::string &path : promptFiles) {
      auto buffer = llvm::MemoryBuffer::getFile(path);
      if (!buffer)
        return Status::ioError("--prompt-file: " + path + ": " +
                               buffer.getError().message());
      run.prompts.push_back((*buffer)->getBuffer().str());
    }
    run.prompts.insert(run.prompts.end(), ids.begin(), ids.end());
    for (const std::string &prompt : run.prompts)
      if (prompt.empty())
        return Status::invalidArgument(
            "--prompt: expected a text, got an empty one");
    if (!eval.empty() && !evalIds.empty())
      return Status::invalidArgument("expected --eval or --eval-ids, got both");
    run.evalFilesAreIds = !evalIds.empty();
    run.evalFiles.assign(eval.begin(), eval.end());
    run.evalFiles.insert(run.evalFiles.end(), evalIds.begin(), evalIds.end());
    if (!run.evalFiles.empty())
      run.evalFiles.insert(run.evalFiles.end(), more.begin(), more.end());
    else if (Status status = refuseMore(); !status)
      return status;
    if (run.prompts.empty() && run.evalFiles.empty() && golden.empty())
      return Status::invalidArgument(
          "expected --prompt, --prompt-file, --ids, --eval, --eval-ids or "
          "--golden-model for the folder of a model, got none");
    if (run.prompts.empty())
      if (const cl::Option *given =
              firstGiven(count, batch, temperature, topK, topP, seed, stop,
                         loadStates, saveStates))
        return Status::invalidArgument(
            "--" + given->ArgStr.str() +
            ": expected --prompt, --prompt-file or --ids, got none");
    for (auto [name, value, least] :
         {std::tuple<const char *, int64_t, int64_t>{"generate", count, 0},
          {"batch", batch, 1},
          {"segment", segment, 1},
          {"window", window, 0},
          {"stride", stride, 0}})
      if (value < least)
        return Status::invalidArgument(
            "--" + std::string(name) + ": expected at least " +
            std::to_string(least) + ", got " + std::to_string(value));
    if (stride.getNumOccurrences() && window == 0)
      return Status::invalidArgument("--stride: expected --window, got none");
    if (window.getNumOccurrences() && run.evalFiles.empty())
      return Status::invalidArgument(
          "--window: expected --eval or --eval-ids, got none");
    run.batch = batch;
    run.generate.maxTokens = count;
    run.generate.sampling = {temperature, topK, topP, seed};
    if (Status status = run.generate.sampling.check(); !status) {
      // The name of the option is that of the field.
      std::string message = "--" + status.message();
      std::replace(message.begin(), message.begin() + message.find(':'), '_',
                   '-');
      return Status(status.code(), message);
    }
    if (!stop.empty()) {
      run.generate.stopTokens.emplace();
      for (int token : stop)
        if (token >= 0)
          run.generate.stopTokens->push_back(token);
    }
    for (auto [name, text, to] :
         {std::tuple<const char *, std::string, bool>{"dtype", dtype, true},
          {"state-dtype", stateType, false}}) {
      if (text.empty())
        continue;
      Expected<DType> type = parseFloatType("--" + std::string(name), text);
      if (!type)
        return type.takeStatus();
      if (to)
        run.model.computeType = *type;
      else
        run.model.stateType = *type;
    }
    run.model.segment = segment;
    run.window = window;
    run.stride = stride.getNumOccurrences() ? stride : window / 2;
    run.golden = golden;
    run.loadStates = loadStates;
    run.saveStates = saveStates;
    run.stats = stats;
    return run;
  }
};
} // namespace

/// `tensor` with axes of size 1 put in front until it has the rank of `info`.
static Expected<Tensor> withLeadingAxes(Tensor tensor,
                                        const ArgumentInfo &info) {
  while (tensor.shape().size() < info.shape.size()) {
    Expected<Tensor> next = tensor.unsqueeze(0);
    if (!next)
      return next;
    tensor = *next;
  }
  return tensor;
}

int corey::coreyRunMain(int argc, char **argv) {
  cl::OptionCategory category("corey-run options");
  cl::opt<std::string> file(
      cl::Positional, cl::desc("<program.mlir or folder of a checkpoint>"),
      cl::cat(category));
  cl::opt<std::string> target("target",
                              cl::desc("Device to run on: cpu (default), cuda "
                                       "or cuda:<n>"),
                              cl::init("cpu"), cl::cat(category));
  cl::opt<int> threads("threads",
                       cl::desc("Threads; 0 (default) takes every processor"),
                       cl::init(0), cl::cat(category));
  cl::opt<std::string> function(
      "function", cl::desc("Function to run; default main, or the only one"),
      cl::cat(category));
  cl::opt<std::string> weights(
      "weights", cl::desc("Safetensors file that holds the program's weights"),
      cl::value_desc("file"), cl::cat(category));
  cl::opt<std::string> prefix(
      "weight-prefix",
      cl::desc("Prefix of weight keys, in place of the module's"),
      cl::value_desc("text"), cl::cat(category));
  cl::list<std::string> inputs(
      "input",
      cl::desc("Input tensor: name=file.safetensors:key, or "
               "name=random:<shape>[:seed]"),
      cl::value_desc("name=tensor"), cl::cat(category));
  cl::list<std::string> checks(
      "check", cl::desc("Expected output: name=file.safetensors:key"),
      cl::value_desc("name=tensor"), cl::cat(category));
  cl::opt<std::string> save("save",
                            cl::desc("Write the outputs to a safetensors file"),
                            cl::value_desc("file"), cl::cat(category));
  cl::opt<double> rtol("rtol",
                       cl::desc("Bound on the relative L2 error of a check"),
                       cl::init(-1), cl::cat(category));
  cl::opt<double> atol(
      "atol", cl::desc("Bound on the largest absolute error of a check"),
      cl::init(-1), cl::cat(category));
  cl::list<std::string> chunk("chunk",
                              cl::desc("Chunk of a site, in tokens: site=n"),
                              cl::value_desc("site=n"), cl::cat(category));
  cl::list<std::string> variant(
      "variant",
      cl::desc("Kernel of a scan site: site=name, such as scan=split on a GPU"),
      cl::value_desc("site=name"), cl::cat(category));
  cl::opt<std::string> policy(
      "policy",
      cl::desc("Who chooses chunks: measured (default), cost-model, unsplit, "
               "static:<n>, entropy, sampled, token, guarded[:inner=[...]], "
               "table[:<file>], midpoint, random, cheap, variance, kurtosis; "
               "options follow as name:key=value,..."),
      cl::value_desc("policy"), cl::init("measured"), cl::cat(category));
  cl::opt<std::string> fusion(
      "fusion",
      cl::desc("Which ops become one kernel: dp (default) by predicted time; "
               "entropy, arithmetic, static by the published score; none"),
      cl::init("dp"), cl::cat(category));
  cl::opt<int> vectorBits(
      "vector-bits",
      cl::desc(
          "Width of a vector register: 256, 512; 0 (default) takes the host's"),
      cl::init(0), cl::cat(category));
  cl::opt<bool> timeRuns("time",
                         cl::desc("Print compile time, time to first result "
                                  "and the median time of a run"),
                         cl::cat(category));
  cl::opt<bool> explain(
      "explain",
      cl::desc("Print what was compiled and which chunks were chosen, and why"),
      cl::cat(category));
  cl::opt<std::string> profile(
      "profile",
      cl::desc("Gather statistics of every tensor of the program and write "
               "them as JSON, for ssm-annotate-stats"),
      cl::value_desc("file"), cl::cat(category));
  cl::opt<std::string> emit(
      "emit",
      cl::desc("Print the program after a phase and stop: captured, fused, "
               "bound, lowered, buffers, llvm, llvmir, llvmir-opt, ptx"),
      cl::value_desc("phase"), cl::cat(category));
  cl::opt<std::string> golden(
      "golden",
      cl::desc("Run every case of a folder with a cases.json. Bounds on the "
               "relative L2 error, unless --rtol is given: 2e-6 for an op on "
               "the CPU, 5e-6 on a GPU, 1e-5 for a program"),
      cl::value_desc("folder"), cl::cat(category));
  // LLVM prints statistics of its own for an option of this name.
  if (auto known = cl::getRegisteredOptions().find("stats");
      known != cl::getRegisteredOptions().end())
    known->second->removeArgument();
  ModelFlags flags;
  cl::HideUnrelatedOptions({&category, &flags.category});
  cl::ParseCommandLineOptions(argc, argv,
                              "COREY: compile and run a state-space model "
                              "program, or the language model of a folder\n");

  auto start = std::chrono::steady_clock::now();
  for (auto [name, bound] :
       {std::pair<const char *, cl::opt<double> *>{"rtol", &rtol},
        {"atol", &atol}})
    if (bound->getNumOccurrences() && !(*bound >= 0))
      return reportError(kTool, Status::invalidArgument(
                                    std::string("--") + name +
                                    ": expected a bound of at least 0, got " +
                                    std::to_string(*bound)));
  ContextOptions contextOptions;
  contextOptions.device = target;
  contextOptions.threads = threads;
  Expected<std::shared_ptr<Context>> context = Context::create(contextOptions);
  if (!context)
    return reportError(kTool, context.status());
  CompileOptions options;
  options.policy = policy;
  options.fusion = fusion;
  options.vectorBits = vectorBits;
  options.observeValues = !profile.empty();

  if (!golden.empty()) {
    if (const cl::Option *given = flags.given())
      return reportError(kTool, Status::invalidArgument(
                                    "--" + given->ArgStr.str() +
                                    ": expected the folder of a model, got "
                                    "--golden"));
    return runGolden(**context, golden, options, rtol, atol);
  }
  if (file.empty())
    return reportError(
        kTool, Status::invalidArgument(
                   "expected a program or --golden, got neither; see --help"));
  if (llvm::sys::fs::is_directory(file)) {
    if (const cl::Option *given =
            firstGiven(function, weights, prefix, inputs, checks, save, rtol,
                       atol, variant, timeRuns, profile, emit))
      return reportError(kTool, Status::invalidArgument(
                                    "--" + given->ArgStr.str() +
                                    ": expected a program, got the folder of "
                                    "a model, " +
                                    file));
    Expected<ModelRun> run = flags.parse();
    if (!run)
      return reportError(kTool, run.status());
    run->folder = file;
    run->model.compile = options;
    run->explain = explain;
    for (const std::string &text : chunk) {
      Expected<std::pair<std::string, int64_t>> parsed = parseChunk(text);
      if (!parsed)
        return reportError(kTool, parsed.status());
      run->chunks.push_back(*parsed);
    }
    return runModel(*context, *run);
  }
  if (const cl::Option *given = flags.given())
    return reportError(kTool,
                       Status::invalidArgument(
                           "--" + given->ArgStr.str() +
                           ": expected the folder of a model, got " + file));
  if (Status status = flags.refuseMore(); !status)
    return reportError(kTool, status);
  if (!emit.empty()) {
    auto buffer = llvm::MemoryBuffer::getFile(file);
    if (!buffer)
      return reportError(
          kTool, Status::ioError(file + ": " + buffer.getError().message()));
    llvm::StringRef text = (*buffer)->getBuffer();
    Expected<std::string> result = (*context)->emit(
        {text.data(), text.size()}, emit.getValue(), options, file.getValue());
    if (!result)
      return reportError(kTool, result.status());
    llvm::outs() << *result;
    return 0;
  }

  Expected<std::shared_ptr<Executable>> compiled =
      (*context)->compileFile(file, options);
  if (!compiled)
    return reportError(kTool, compiled.status());
  Executable &executable = **compiled;
  const FunctionInfo *info =
      executable.findFunction(function.empty() ? "main" : function.getValue());
  if (!info && function.empty() && executable.functions().size() == 1)
    info = &executable.functions().front();
  if (!info) {
    std::string known;
    for (const FunctionInfo &f : executable.functions())
      known += (known.empty() ? "" : ", ") + f.name;
    return reportError(
        kTool, Status::notFound(
                   "--function: expected one of " + known + ", got '" +
                   (function.empty() ? "main" : function.getValue()) + "'"));
  }
  if (!weights.empty()) {
    Expected<SafeTensors> weightFile = SafeTensors::open(weights);
    if (!weightFile)
      return reportError(kTool, weightFile.status());
    std::string given = prefix;
    if (Status status = executable.bindWeights(
            *weightFile, prefix.getNumOccurrences() ? &given : nullptr);
        !status)
      return reportError(kTool, status);
  } else if (!executable.weights().empty()) {
    return reportError(kTool, Status::invalidArgument(
                                  "expected --weights for the " +
                                  std::to_string(executable.weights().size()) +
                                  " weights of " + file + ", got none"));
  }
  for (const std::string &text : chunk) {
    Expected<std::pair<std::string, int64_t>> parsed = parseChunk(text);
    if (!parsed)
      return reportError(kTool, parsed.status());
    if (Status status = executable.setChunk(parsed->first, parsed->second);
        !status)
      return reportError(kTool, status);
  }
  for (const std::string &text : variant) {
    auto assignment = splitAssignment("variant", text);
    if (!assignment)
      return reportError(kTool, assignment.status());
    if (assignment->second.empty())
      return reportError(
          kTool, Status::invalidArgument(
                     "--variant: expected the name of a kernel for site '" +
                     assignment->first + "', got none"));
    if (Status status =
            executable.setVariant(assignment->first, assignment->second);
        !status)
      return reportError(
          kTool, Status(status.code(), "--variant: " + status.message()));
  }

  // Inputs by name, each exactly once.
  std::map<std::string, std::string> given;
  for (const std::string &text : inputs) {
    auto assignment = splitAssignment("input", text);
    if (!assignment)
      return reportError(kTool, assignment.status());
    bool known = false;
    for (const ArgumentInfo &argument : info->inputs)
      known |= argument.name == assignment->first;
    if (!known) {
      std::string names;
      for (const ArgumentInfo &argument : info->inputs)
        names += (names.empty() ? "" : ", ") + argument.name;
      return reportError(
          kTool, Status::notFound("--input: expected an input of @" +
                                  info->name + " (" + names + "), got '" +
                                  assignment->first + "'"));
    }
    if (!given.insert(*assignment).second)
      return reportError(kTool, Status::invalidArgument(
                                    "--input: expected '" + assignment->first +
                                    "' once, got it again"));
  }
  std::vector<Tensor> tensors;
  for (const ArgumentInfo &argument : info->inputs) {
    auto it = given.find(argument.name);
    if (it == given.end())
      return reportError(kTool, Status::invalidArgument("expected --input " +
                                                        argument.name +
                                                        "=..., got none"));
    llvm::StringRef ref(it->second);
    Expected<Tensor> tensor = Status::internal("unset");
    if (ref.consume_front("random:")) {
      auto [shapeText, seedText] = ref.split(':');
      std::vector<int64_t> shape;
      llvm::SmallVector<llvm::StringRef> sizes;
      shapeText.split(sizes, 'x');
      uint64_t seed = 0;
      bool bad = !seedText.empty() && seedText.getAsInteger(10, seed);
      for (llvm::StringRef size : sizes) {
        int64_t value = 0;
        bad |= size.getAsInteger(10, value) || value < 0;
        shape.push_back(value);
      }
      if (bad)
        return reportError(kTool,
                           Status::invalidArgument(
                               "--input " + argument.name +
                               ": expected random:<n>x<n>...[:seed], got '" +
                               it->second + "'"));
      tensor = randomTensor(argument.dtype, shape, seed);
    } else {
      tensor = readTensorRef(it->second);
    }
    if (!tensor)
      return reportError(
          kTool, Status::invalidArgument("--input " + argument.name + ": " +
                                         tensor.status().message()));
    tensor = withLeadingAxes(*tensor, argument);
    if (!tensor)
      return reportError(kTool, tensor.status());
    tensors.push_back(*tensor);
  }

  Device device = (*context)->getDevice();
  Expected<std::vector<Tensor>> moved = moveTo(tensors, device);
  if (!moved)
    return reportError(kTool, moved.status());
  tensors = std::move(*moved);
  std::vector<Tensor> results;
  if (Status status = executable.run(info->name, tensors, results); !status)
    return reportError(kTool, status);
  moved = moveTo(results, Device::cpu());
  if (!moved)
    return reportError(kTool, moved.status());
  std::vector<Tensor> outputs = std::move(*moved);
  double firstMs = std::chrono::duration<double, std::milli>(
                       std::chrono::steady_clock::now() - start)
                       .count();

  for (size_t i = 0; i < outputs.size(); ++i) {
    double sum = 0;
    Expected<Tensor> wide = outputs[i].to(DType::F64);
    if (!wide)
      return reportError(kTool, wide.status());
    for (int64_t j = 0; j < wide->numElements(); ++j)
      sum += wide->dataAs<double>()[j] * wide->dataAs<double>()[j];
    llvm::outs() << info->outputs[i].name << ": " << outputs[i].describe()
                 << llvm::format(", l2 norm %.6g\n", std::sqrt(sum));
  }
  bool failed = false;
  for (const std::string &text : checks) {
    auto assignment = splitAssignment("check", text);
    if (!assignment)
      return reportError(kTool, assignment.status());
    size_t index = 0;
    while (index < outputs.size() &&
           info->outputs[index].name != assignment->first)
      ++index;
    if (index == outputs.size()) {
      std::string names;
      for (const ArgumentInfo &argument : info->outputs)
        names += (names.empty() ? "" : ", ") + argument.name;
      return reportError(
          kTool, Status::notFound("--check: expected an output of @" +
                                  info->name + " (" + names + "), got '" +
                                  assignment->first + "'"));
    }
    Expected<Tensor> expected = readTensorRef(assignment->second);
    if (!expected)
      return reportError(
          kTool, Status::invalidArgument("--check " + assignment->first + ": " +
                                         expected.status().message()));
    Expected<Difference> difference = compare(outputs[index], *expected);
    if (!difference)
      return reportError(
          kTool, Status::invalidArgument("--check " + assignment->first + ": " +
                                         difference.status().message()));
    // Without a bound the default one applies.
    double bound =
        rtol.getNumOccurrences() || atol.getNumOccurrences() ? rtol : 1e-5;
    bool passed = !(bound >= 0 && !(difference->relativeL2 <= bound)) &&
                  !(atol >= 0 && !(difference->maxAbsolute <= atol));
    failed |= !passed;
    llvm::outs() << "check " << assignment->first << ": "
                 << llvm::format(
                        "relative l2 error %.3g, max absolute error %.3g: ",
                        difference->relativeL2, difference->maxAbsolute)
                 << (passed ? "PASS" : "FAIL") << "\n";
  }
  if (timeRuns) {
    double compileMs = 0;
    for (const PhaseTime &phase : executable.compileTimes())
      compileMs += phase.milliseconds;
    auto run = [&](void *stream) {
      return executable.run(info->name, tensors, results, stream);
    };
    std::vector<double> samples;
    Expected<double> ms = 0.0;
    double graphMs = 0;
    if (device.kind == Device::CUDA) {
      ms = timeOnDevice(device, run, 5, 500, &samples);
      // Of many short kernels most of a run is the host's.
      Expected<TimedWork> work =
          workOf(executable, device, info->name, tensors, results, 1);
      if (!work)
        return reportError(kTool, work.status());
      Expected<double> captured = timeOnDevice(device, work->call, 5, 500);
      if (!captured)
        return reportError(kTool, captured.status());
      graphMs = *captured;
    } else {
      Status status;
      double median = timeCall(
          [&] {
            Status s = run(nullptr);
            if (!s)
              status = s;
          },
          5, 500, &samples);
      if (status)
        ms = median;
      else
        ms = status;
    }
    if (!ms)
      return reportError(kTool, ms.status());
    llvm::outs() << llvm::format("time: compile %.1f ms, parse to first result "
                                 "%.1f ms, run %.3f ms (median of %zu)",
                                 compileMs, firstMs, *ms, samples.size());
    if (device.kind == Device::CUDA)
      llvm::outs() << llvm::format(", in a CUDA graph %.3f ms", graphMs);
    llvm::outs() << "\n";
  }
  if (explain)
    llvm::outs() << executable.explain();
  if (!profile.empty())
    if (Status status = writeProfile(profile, executable); !status)
      return reportError(kTool,
                         Status::ioError("--profile: " + status.message()));
  if (!save.empty()) {
    std::vector<std::pair<std::string, Tensor>> named;
    for (size_t i = 0; i < outputs.size(); ++i)
      named.push_back({info->outputs[i].name, outputs[i]});
    if (Status status = writeSafeTensors(save, named); !status)
      return reportError(kTool, status);
  }
  return failed;
}
