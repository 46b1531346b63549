//===- LanguageModel.cpp - Prefill and decode of whole models -------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "JsonOption.h"
#include "Workload.h"
#include "corey/Analysis/RegionCost.h"
#include "corey/Model.h"
#include "corey/Scheduler/Policy.h"
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
/// In front of another policy: the chunks that it bound, held.
constexpr llvm::StringLiteral kHeld = "held:";

/// What is bound at every site: chunks and variants.
using Bound = std::vector<std::pair<int64_t, std::string>>;

/// One configuration of a model: a prompt, and whom the chunks are left to.
struct Setting {
  int64_t prompt = 0, batch = 1;
  /// A policy of the scheduler for every site, or what another one bound.
  std::string policy;
  /// Whether it decides on statistics.
  bool observes = false;
  /// What the first layer's scan was bound to in the prompt, of a prompt in
  /// segments in the last one; 0 if nothing chooses there.
  int64_t chunk = 0;
  std::vector<double> prefillMs, decodeMs, totalMs;
  /// Of `prefillMs`, the prompts that had a launch that observed, and others.
  std::vector<double> observingMs, plainMs;
  CapturedRun::Launches launches;
  /// By round: the mean of its prompts, and what was bound when they began.
  struct Turn {
    double meanMs;
    Bound bound;
  };
  std::vector<Turn> turns;
  Bound bound;
};

double mean(const std::vector<double> &values) {
  return std::accumulate(values.begin(), values.end(), 0.0) /
         static_cast<double>(values.size());
}
/// NaN of none.
double medianOrNaN(std::vector<double> values) {
  return values.empty() ? NAN : median(values);
}

/// How much longer than another setting one takes in the mean, as a part, from
/// the rounds in which both had the same chunks.
struct Overhead {
  const Setting *over = nullptr;
  double value = NAN, low = NAN, high = NAN;
  int64_t rounds = 0;
};

/// What t with `degrees` of freedom is below at 97.5 %: the normal
/// distribution's, by the expansion of Cornish and Fisher (0.5 % too little for
/// 4, and ever closer).
double studentQuantile(double degrees) {
  double z = 1.959964, z2 = z * z;
  return z + z * (z2 + 1) / (4 * degrees) +
         z * ((5 * z2 + 16) * z2 + 3) / (96 * degrees * degrees) +
         z * (((3 * z2 + 19) * z2 + 17) * z2 - 15) /
             (384 * degrees * degrees * degrees);
}

Overhead overheadOf(const Setting &setting, const Setting &over) {
  std::vector<std::pair<double, double>> pairs;
  double sum = 0, sumOver = 0;
  for (auto [own, other] : llvm::zip_equal(setting.turns, over.turns))
    if (own.bound == other.bound) {
      pairs.emplace_back(own.meanMs, other.meanMs);
      sum += own.meanMs;
      sumOver += other.meanMs;
    }
  Overhead overhead;
  overhead.over = &over;
  overhead.rounds = static_cast<int64_t>(pairs.size());
  if (pairs.empty())
    return overhead;
  // Of a ratio of means: a round's distance is what it adds to the ratio. A
  // device that gets slower does so for both.
  double ratio = sum / sumOver, squares = 0;
  for (auto [own, other] : pairs)
    squares += (own - ratio * other) * (own - ratio * other);
  overhead.value = ratio - 1;
  // The quantile is for no less.
  if (pairs.size() < 5)
    return overhead;
  double n = static_cast<double>(pairs.size());
  double reach =
      studentQuantile(n - 1) * std::sqrt(squares / (n - 1) * n) / sumOver;
  overhead.low = overhead.value - reach;
  overhead.high = overhead.value + reach;
  return overhead;
}

/// Of a setting that observes, over the one that does not and had the same
/// chunks most often; none if there is no such.
Overhead findOverhead(const Setting &setting,
                      const std::vector<Setting> &settings) {
  Overhead best;
  if (setting.observes)
    for (const Setting &other : settings) {
      if (other.observes)
        continue;
      Overhead overhead = overheadOf(setting, other);
      if (overhead.rounds > best.rounds)
        best = overhead;
    }
  return best;
}

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
  /// Of `turns` rounds, or as many as there is time for if that is 0.
  LanguageModelBenchmark(Model &model, int64_t generate, double budgetMs,
                         int turns)
      : model(model), generate(generate), budgetMs(budgetMs), turns(turns) {}
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
    for (int round = -2; round < (turns ? turns : kMaxRounds); ++round) {
      double spent = std::chrono::duration<double, std::milli>(
                         std::chrono::steady_clock::now() - start)
                         .count();
      if (round == 0)
        start = std::chrono::steady_clock::now();
      if (!turns && round >= kMinRounds &&
          spent > budgetMs * static_cast<double>(settings.size()))
        break;
      // What is held must have been bound before.
      for (size_t i = order.size(); round >= 0 && i > 1; --i)
        std::swap(order[i - 1], order[random() % i]);
      for (Setting *each : order)
        if (Status status = takeTurn(*each, settings, prompts, round); !status)
          return status;
    }
    return release();
  }

private:
  static constexpr int kMinRounds = 5, kMaxRounds = 1000;
  /// Runs of a setting before it is the next one's turn, where there are
  /// several, after two that may capture graphs anew and are not counted. That
  /// is an odd number in all: of 512 launches one observes, and it comes to
  /// each run of a turn equally often.
  static constexpr int kRunsOfTurn = 5;

  /// Leaves chunks that are held to policies again.
  Status release() {
    Executable &program = model.executable();
    for (const ChunkInfo &each : program.chunks()) {
      Status status = program.setChunk(each.site, 0);
      if (status)
        status = program.setVariant(each.site, "");
      if (!status)
        return status;
    }
    return Status::ok();
  }
  Status choose(const Setting &setting, const std::vector<Setting> &settings) {
    Executable &program = model.executable();
    if (!llvm::StringRef(setting.policy).starts_with(kHeld)) {
      if (llvm::StringRef(current).starts_with(kHeld))
        if (Status status = release(); !status)
          return status;
      return program.setPolicy("", setting.policy);
    }
    const Bound &bound = llvm::find_if(settings, [&](const Setting &each) {
                           return kHeld.str() + each.policy == setting.policy;
                         })->bound;
    Status status = program.setPolicy("", "unsplit");
    for (auto [site, held] : llvm::zip_equal(program.chunks(), bound)) {
      if (status)
        status = program.setChunk(site.site, held.first);
      if (status)
        status = program.setVariant(site.site, held.second);
    }
    return status;
  }
  /// Those before round 0 are not counted.
  Status takeTurn(Setting &setting, const std::vector<Setting> &settings,
                  const TokenSequences &prompts, int round) {
    bool isAlone = settings.size() == 1;
    if (!isAlone || current.empty()) {
      if (Status status = choose(setting, settings); !status)
        return status;
      current = setting.policy;
      // A token takes the prompt alone.
      if (Status status = runOnce(setting, prompts, 1, /*record=*/false);
          !status)
        return status;
      setting.bound.clear();
      for (const ChunkInfo &each : model.executable().chunks())
        setting.bound.emplace_back(each.chunk, each.variant);
      if (!setting.bound.empty())
        setting.chunk = setting.bound.front().first;
      if (Status status = runOnce(setting, prompts, generate, /*record=*/false);
          !status)
        return status;
    }
    bool record = round >= 0;
    size_t before = setting.prefillMs.size();
    for (int i = 0; i < (isAlone ? 1 : kRunsOfTurn); ++i)
      if (Status status = runOnce(setting, prompts, generate, record); !status)
        return status;
    if (record)
      setting.turns.push_back(
          {mean({setting.prefillMs.begin() + static_cast<ptrdiff_t>(before),
                 setting.prefillMs.end()}),
           setting.bound});
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
    setting.launches.all += result->prefillLaunches.all;
    setting.launches.observing += result->prefillLaunches.observing;
    (result->prefillLaunches.observing ? setting.observingMs : setting.plainMs)
        .push_back(result->prefillMs);
    return Status::ok();
  }

  Model &model;
  int64_t generate;
  double budgetMs;
  int turns;
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
      cl::desc("Who chooses chunks, as corey-run takes it (default measured); "
               "held:<policy> for the chunks that another one bound, held "
               "fixed. Several are measured in turn and compared"),
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
  cl::opt<int> turns(
      "turns",
      cl::desc("Turns that each policy has, of 5 prompts where there are "
               "several policies and 1 else; 0 (default) for as many as "
               "--budget-ms allows, 5 to 1000. Of a policy that decides on "
               "statistics every 512th prompt gathers them: some hundred turns "
               "show what that takes in the mean"),
      cl::init(0), cl::cat(category));
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
        {"generate", {generate.getValue()}, 1},
        {"turns", {turns.getValue()}, 0}})
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
  std::vector<bool> observes;
  for (const std::string &policy : policies) {
    llvm::StringRef held = policy;
    bool isHeld = held.consume_front(kHeld);
    if (isHeld &&
        !llvm::is_contained(llvm::ArrayRef(&*policies.begin(), observes.size()),
                            held))
      return refuse("--policy=" + policy +
                    ": expected a --policy before it that is held, got none "
                    "of '" +
                    held.str() + "'");
    // What is none is refused by those who know them all.
    auto parsed = scheduler::parsePolicy(policy, {});
    observes.push_back(parsed && (*parsed)->statistics());
  }

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
    auto asking = llvm::find(observes, true);
    options.compile.policy =
        asking == observes.end()
            ? policies.front()
            : policies[static_cast<unsigned>(asking - observes.begin())];
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
        for (auto [policy, isObserving] : llvm::zip_equal(policies, observes)) {
          Setting setting;
          setting.prompt = prompt;
          setting.batch = batch;
          setting.policy = policy;
          setting.observes = isObserving;
          settings.push_back(std::move(setting));
        }
        LanguageModelBenchmark benchmark(**model, generate, budget, turns);
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
          Overhead overhead = findOverhead(each, settings);
          double meanMs = mean(each.prefillMs),
                 plainMs = medianOrNaN(each.plainMs),
                 observingMs = medianOrNaN(each.observingMs);
          // How many prompts observe in the long run, each once.
          double share =
              static_cast<double>(each.launches.all) /
              static_cast<double>(each.prefillMs.size()) /
              static_cast<double>(CapturedRun::kLaunchesPerObservation);
          double byObserving = share * (observingMs / plainMs - 1);
          if (print && overhead.over)
            llvm::outs() << llvm::format(
                "  mean prefill %.4f ms, %+.3f%% (%+.3f%% to %+.3f%%) over %s "
                "in %lld rounds; %llu of %llu launches observed, %.4f ms "
                "where others take %.4f\n",
                meanMs, overhead.value * 100, overhead.low * 100,
                overhead.high * 100, overhead.over->policy.c_str(),
                static_cast<long long>(overhead.rounds),
                static_cast<unsigned long long>(each.launches.observing),
                static_cast<unsigned long long>(each.launches.all), observingMs,
                plainMs);
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
              {"prefill_mean_ms", meanMs},
              {"prefill_launches", each.launches.all},
              {"prefill_observing_launches", each.launches.observing},
              {"prefill_plain_ms", jsonNumber(plainMs)},
              {"prefill_observing_ms", jsonNumber(observingMs)},
              {"prefill_overhead", jsonNumber(overhead.value)},
              {"prefill_overhead_ci95",
               {jsonNumber(overhead.low), jsonNumber(overhead.high)}},
              {"prefill_overhead_over",
               overhead.over ? llvm::json::Value(overhead.over->policy)
                             : llvm::json::Value(nullptr)},
              {"prefill_overhead_rounds", overhead.rounds},
              {"prefill_overhead_by_observing", jsonNumber(byObserving)},
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
