//===- LanguageModel.cpp - Prefill and decode of whole models -------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "JsonOption.h"
#include "Workload.h"
#include "corey/Analysis/RegionCost.h"
#include "corey/Model.h"
#include "corey/ToolUtils.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/Support/CommandLine.h"
#include "llvm/Support/FileSystem.h"
#include "llvm/Support/Format.h"
#include "llvm/Support/raw_ostream.h"
#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <random>

using namespace corey;
namespace cl = llvm::cl;

static constexpr const char *kTool = "corey-bench";

namespace {
/// One configuration of a model: a prompt, and whom the chunks are left to.
struct Setting {
  int64_t prompt = 0, batch = 1;
  /// A policy of the scheduler for every site.
  std::string policy;
  /// What the first layer's scan was bound to in the prompt, of a prompt in
  /// segments in the last one; 0 if nothing chooses there.
  int64_t chunk = 0;
  std::vector<double> prefillMs, decodeMs, totalMs;
};

/// Of a sample, for a median: its middle half.
std::pair<double, double> quartiles(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  size_t n = values.size();
  return {values[n / 4], values[std::min(n - 1, (3 * n) / 4)]};
}

/// What the median lies between at a confidence of 95 %, by the order of the
/// sample alone: n / 2 -+ 1.96 sqrt(n) / 2.
std::pair<double, double> confidence(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  double n = static_cast<double>(values.size()), reach = 0.98 * std::sqrt(n);
  auto low = static_cast<size_t>(std::max(0.0, std::floor(n / 2 - reach)));
  auto high = static_cast<size_t>(std::min(n - 1, std::ceil(n / 2 + reach)));
  return {values[low], values[high]};
}

/// The least median prefill of constant chunks; NaN if there is none.
double bestStaticPrefill(std::vector<Setting> settings) {
  double best = NAN;
  for (Setting &each : settings)
    if (llvm::StringRef(each.policy).starts_with("static") ||
        each.policy == "unsplit")
      best = std::fmin(best, median(each.prefillMs));
  return best;
}

class LanguageModelBenchmark {
public:
  LanguageModelBenchmark(Model &model, int64_t generate, double budgetMs)
      : model(model), generate(generate), budgetMs(budgetMs) {}

  /// Measures settings of one prompt and batch in turn, in another order each
  /// round: a device's clock depends on what it did before.
  Status measure(std::vector<Setting> &settings) {
    const Setting &first = settings.front();
    std::mt19937 random(static_cast<unsigned>(first.prompt));
    TokenSequences prompts(static_cast<size_t>(first.batch));
    for (std::vector<int32_t> &prompt : prompts)
      for (int64_t i = 0; i < first.prompt; ++i)
        prompt.push_back(static_cast<int32_t>(
            random() % static_cast<unsigned>(model.info().vocabSize)));
    std::vector<Setting *> order;
    for (Setting &each : settings)
      order.push_back(&each);
    auto start = std::chrono::steady_clock::now();
    for (int round = -2; round < kMaxRounds; ++round) {
      double spent = std::chrono::duration<double, std::milli>(
                         std::chrono::steady_clock::now() - start)
                         .count();
      if (round == 0)
        start = std::chrono::steady_clock::now();
      if (round >= kMinRounds &&
          spent > budgetMs * static_cast<double>(settings.size()))
        break;
      for (size_t i = order.size(); i > 1; --i)
        std::swap(order[i - 1], order[random() % i]);
      for (Setting *each : order)
        if (Status status = takeTurn(*each, prompts, /*record=*/round >= 0);
            !status)
          return status;
    }
    return Status::ok();
  }

private:
  static constexpr int kMinRounds = 5, kMaxRounds = 1000;
  /// Runs of a setting before it is the next one's turn, where there are
  /// several. The first after another policy captures graphs anew and is not
  /// counted.
  static constexpr int kRunsOfTurn = 4;

  Status takeTurn(Setting &setting, const TokenSequences &prompts,
                  bool record) {
    bool isNew = setting.policy != current;
    if (isNew) {
      if (Status status = model.executable().setPolicy("", setting.policy);
          !status)
        return status;
      current = setting.policy;
      // A token takes the prompt alone.
      for (int64_t tokens : {int64_t(1), generate}) {
        if (Status status = runOnce(setting, prompts, tokens, /*record=*/false);
            !status)
          return status;
        if (std::vector<ChunkInfo> chunks = model.executable().chunks();
            tokens == 1 && !chunks.empty())
          setting.chunk = chunks.front().chunk;
      }
    }
    for (int i = 0; i < (isNew ? kRunsOfTurn : 1); ++i)
      if (Status status = runOnce(setting, prompts, generate, record); !status)
        return status;
    return Status::ok();
  }

  Status runOnce(Setting &setting, const TokenSequences &prompts,
                 int64_t tokens, bool record) {
    GenerateOptions options;
    options.maxTokens = tokens;
    options.stopTokens.emplace();
    auto start = std::chrono::steady_clock::now();
    Expected<Generation> result = model.generate(prompts, options);
    if (!result)
      return result.takeStatus();
    if (!record)
      return Status::ok();
    setting.totalMs.push_back(std::chrono::duration<double, std::milli>(
                                  std::chrono::steady_clock::now() - start)
                                  .count());
    setting.prefillMs.push_back(result->prefillMs);
    setting.decodeMs.push_back(result->decodeMs);
    return Status::ok();
  }

  Model &model;
  int64_t generate;
  double budgetMs;
  std::string current;
};
} // namespace

int corey::runLM(int argc, char **argv) {
  cl::OptionCategory category("corey-bench lm options");
  cl::opt<std::string> target("target",
                              cl::desc("Device to run on: cpu (default), cuda "
                                       "or cuda:<n>"),
                              cl::init("cpu"), cl::cat(category));
  cl::list<std::string> models(
      "model",
      cl::desc("A published shape, with random weights: mamba-130m, -370m, "
               "-790m, -1.4b, -2.8b, mamba2-130m, -370m, -780m, -1.3b, -2.7b; "
               "or the folder of a checkpoint. May be given several times"),
      cl::cat(category));
  cl::opt<std::string> dtype(
      "dtype",
      cl::desc("Of random weights, and of activations: f32, f16 or bf16 "
               "(default f32 on the CPU, f16 on a GPU)"),
      cl::cat(category));
  cl::list<long> prompts("prompt",
                         cl::desc("Tokens of a prompt (default 976). May be "
                                  "given several times"),
                         cl::cat(category));
  cl::opt<int> generate("generate", cl::desc("Tokens to generate (default 32)"),
                        cl::init(32), cl::cat(category));
  cl::list<long> batches("batch",
                         cl::desc("Sequences at a time (default 1). May be "
                                  "given several times"),
                         cl::cat(category));
  cl::list<std::string> policies(
      "policy",
      cl::desc("Who chooses chunks, as corey-run takes it (default measured). "
               "Several are measured in turn and compared"),
      cl::cat(category));
  cl::opt<std::string> fusion("fusion", cl::desc("As corey-run takes it"),
                              cl::init("dp"), cl::cat(category));
  cl::opt<int> threads("threads",
                       cl::desc("Threads; 0 (default) takes every processor"),
                       cl::init(0), cl::cat(category));
  cl::opt<double> budget("budget-ms",
                         cl::desc("Time to spend on each policy (default "
                                  "1000)"),
                         cl::init(1000), cl::cat(category));
  JsonOption json(category);
  cl::HideUnrelatedOptions(category);
  cl::ParseCommandLineOptions(
      argc, argv, "COREY: prefill and decode of whole language models\n");
  auto refuse = [](const std::string &message) {
    return reportError(kTool, Status::invalidArgument(message));
  };

  for (auto [name, values, least] :
       {std::tuple<const char *, std::vector<long>, long>{
            "prompt", {prompts.begin(), prompts.end()}, 1},
        {"batch", {batches.begin(), batches.end()}, 1},
        {"generate", {generate.getValue()}, 1}})
    for (long value : values)
      if (value < least)
        return refuse("--" + std::string(name) + ": expected at least " +
                      std::to_string(least) + ", got " + std::to_string(value));
  if (!(budget > 0))
    return refuse("--budget-ms: expected more than 0, got " +
                  std::to_string(budget));
  if (models.empty())
    return refuse("expected --model, got none");
  if (prompts.empty())
    prompts.push_back(976);
  if (batches.empty())
    batches.push_back(1);
  if (policies.empty())
    policies.push_back("measured");

  ContextOptions contextOptions;
  contextOptions.device = target;
  contextOptions.threads = threads;
  Expected<std::shared_ptr<Context>> context = Context::create(contextOptions);
  if (!context)
    return reportError(kTool, context.status());
  bool onDevice = (*context)->getDevice().kind == Device::CUDA;
  DType type = onDevice ? DType::F16 : DType::F32;
  if (!dtype.empty()) {
    Expected<DType> given = parseFloatType("--dtype", dtype);
    if (!given)
      return reportError(kTool, given.status());
    type = *given;
  }

  llvm::json::Object document = describeRun(target);
  // What the device can do at most, where it was measured.
  const MachineRates *machine = nullptr;
  if (auto name = document.getString("gpu"); name && name->contains("H200"))
    machine = findMachine("h200");
  bool print = json != "-";
  if (print)
    llvm::outs() << "model          dtype prompt batch policy        prefill "
                    "ms  token ms  total ms    floors: prefill  token"
                 << (policies.size() > 1 ? "  prefill over best constant" : "")
                 << "\n";
  llvm::json::Array results;
  for (const std::string &name : models) {
    ModelOptions options;
    options.computeType = type;
    options.compile.fusion = fusion;
    // Those that decide on statistics need them gathered.
    options.compile.policy = policies.front();
    auto start = std::chrono::steady_clock::now();
    bool isFolder = llvm::sys::fs::is_directory(name);
    Expected<std::shared_ptr<Model>> model =
        isFolder ? Model::load(*context, name, options)
                 : Model::random(*context, name, type, options);
    if (!model)
      return reportError(kTool, model.status());
    double loadMs = std::chrono::duration<double, std::milli>(
                        std::chrono::steady_clock::now() - start)
                        .count();
    double compileMs = 0;
    llvm::json::Object phases;
    for (const PhaseTime &phase : (*model)->executable().compileTimes()) {
      compileMs += phase.milliseconds;
      phases[phase.phase] = phase.milliseconds;
    }
    const ModelInfo &info = (*model)->info();
    // The table of embeddings is the head, or beside one.
    double matrices = static_cast<double>(info.parameters);
    for (long prompt : prompts)
      for (long batch : batches) {
        std::vector<Setting> settings;
        for (const std::string &policy : policies) {
          Setting setting;
          setting.prompt = prompt;
          setting.batch = batch;
          setting.policy = policy;
          settings.push_back(std::move(setting));
        }
        LanguageModelBenchmark benchmark(**model, generate, budget);
        if (Status status = benchmark.measure(settings); !status)
          return reportError(kTool, status);
        double head = static_cast<double>(info.vocabSize * info.hiddenSize);
        double flops =
            2 * ((matrices - head) * static_cast<double>(prompt) + head) *
            static_cast<double>(batch);
        double bytes = static_cast<double>(info.weightBytes);
        double bestStatic = bestStaticPrefill(settings);
        for (Setting &each : settings) {
          double prefillMs = median(each.prefillMs),
                 decodeMs = median(each.decodeMs),
                 totalMs = median(each.totalMs);
          double tokenMs = generate > 1 ? decodeMs / (generate - 1) : NAN;
          double prefillFloor = machine
                                    ? std::max(flops / (2 * machine->matrix),
                                               bytes / machine->bytes) *
                                          1e3
                                    : NAN,
                 tokenFloor = machine ? bytes / machine->bytes * 1e3 : NAN;
          if (print)
            llvm::outs() << llvm::left_justify(name, 14) << " "
                         << llvm::left_justify(dtypeName(type), 5)
                         << llvm::format(" %6ld %5ld ", prompt, batch)
                         << llvm::left_justify(each.policy, 13)
                         << llvm::format("%10.3f %9.4f %9.3f  %15.3f %6.4f",
                                         prefillMs, tokenMs, totalMs,
                                         prefillFloor, tokenFloor);
          if (print && !std::isnan(bestStatic))
            llvm::outs() << llvm::format("  %+.2f%%",
                                         (prefillMs / bestStatic - 1) * 100);
          if (print)
            llvm::outs() << "\n";
          llvm::outs().flush();
          auto [prefillLow, prefillHigh] = quartiles(each.prefillMs);
          auto [totalLow, totalHigh] = quartiles(each.totalMs);
          auto [prefillLeast, prefillMost] = confidence(each.prefillMs);
          auto [decodeLeast, decodeMost] = confidence(each.decodeMs);
          double steps = generate > 1 ? generate - 1 : NAN;
          results.push_back(llvm::json::Object{
              {"benchmark", "lm"},
              {"model", name},
              {"model_type", info.type},
              {"dtype", dtypeName(type)},
              {"parameters", info.parameters},
              {"weight_bytes", info.weightBytes},
              {"prompt", static_cast<int64_t>(prompt)},
              {"batch", static_cast<int64_t>(batch)},
              {"generate", generate.getValue()},
              {"policy", each.policy},
              {"chunk", each.chunk},
              {"prefill_ms", prefillMs},
              {"prefill_quartiles_ms", {prefillLow, prefillHigh}},
              {"prefill_ci95_ms", {prefillLeast, prefillMost}},
              {"prefill_over_best_static",
               jsonNumber(prefillMs / bestStatic - 1)},
              {"per_token_ms", jsonNumber(tokenMs)},
              {"per_token_ci95_ms",
               {jsonNumber(decodeLeast / steps),
                jsonNumber(decodeMost / steps)}},
              {"total_ms", totalMs},
              {"total_quartiles_ms", {totalLow, totalHigh}},
              {"rounds", static_cast<int64_t>(each.totalMs.size())},
              {"prefill_floor_ms", jsonNumber(prefillFloor)},
              {"per_token_floor_ms", jsonNumber(tokenFloor)},
              {"load_ms", loadMs},
              {"compile_ms", compileMs},
              {"compile_phases_ms", llvm::json::Object(phases)},
              {"compile_cached",
               (*model)->executable().cache().outcome == CacheInfo::Loaded},
          });
        }
      }
  }
  if (!json.empty()) {
    if (results.size() == 1)
      for (auto &[key, value] : *results.front().getAsObject())
        document[key] = value;
    document["benchmark"] = "lm";
    document["results"] = std::move(results);
    return writeJSON(json, std::move(document));
  }
  return 0;
}
