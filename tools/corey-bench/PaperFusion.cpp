//===- PaperFusion.cpp - Fusion decisions, modelled and measured ----------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "Paper.h"
#include "corey/Scheduler/Statistics.h"
#include "llvm/ADT/STLExtras.h"
#include "llvm/Support/MemoryBuffer.h"

using namespace corey;
using namespace corey::paper;
namespace json = llvm::json;
namespace sched = corey::scheduler;

//===----------------------------------------------------------------------===//
// Reference results
//===----------------------------------------------------------------------===//

namespace {
/// The operators of the synthetic block.
constexpr struct {
  double registers, shared, occupancy;
} kBlock[] = {{20, 8, .94},  {36, 12, .91}, {72, 28, .79}, {54, 22, .83},
              {48, 18, .87}, {24, 8, .96},  {18, 6, .97}};
constexpr size_t kBlockSize = std::size(kBlock);
} // namespace

// Found by the types of their results.
namespace corey::paper {

static bool fromJSON(const json::Value &value, PolicyResult &result,
                     json::Path path) {
  json::ObjectMapper map(value, path);
  if (!map || !map.map("depths", result.depths) ||
      !map.map("metrics", result.metrics) || !map.map("tau", result.tau))
    return false;
  if (result.metrics.size() != 3 ||
      llvm::any_of(result.metrics,
                   [](const auto &list) { return list.size() != 3; })) {
    path.field("metrics").report("expected 3 lists of 3 numbers");
    return false;
  }
  return true;
}

static bool fromJSON(const json::Value &value, GridResult &result,
                     json::Path path) {
  json::ObjectMapper map(value, path);
  if (!map || !map.map("depths", result.depths) ||
      !map.map("metrics", result.metrics))
    return false;
  if (result.metrics.size() != 2) {
    path.field("metrics").report("expected 2 numbers");
    return false;
  }
  return true;
}

static bool fromJSON(const json::Value &value, ReferenceCase &result,
                     json::Path path) {
  json::ObjectMapper map(value, path);
  tier1::Case &data = result.data;
  std::vector<double> entropy, intensity, memory;
  if (!map || !map.map("sequence_length", data.length) ||
      !map.map("repeat", data.repeat) ||
      !map.map("H_norm_raw_before", data.rawBefore) ||
      !map.map("H_norm_raw_after", data.rawAfter) ||
      !map.map("ema_before", data.emaBefore) ||
      !map.map("ema_after", data.emaAfter) ||
      !map.map("entropy_gain", data.gain) ||
      !map.map("outlier6_before", data.outliersBefore) ||
      !map.map("outlier6_after", data.outliersAfter) ||
      !map.map("operator_entropy", entropy) ||
      !map.map("operator_arithmetic", intensity) ||
      !map.map("operator_memory", memory) ||
      !map.map("max_registers", data.limits.registers) ||
      !map.map("max_shared_memory", data.limits.shared) ||
      !map.map("min_occupancy", data.limits.minOccupancy) ||
      !map.map("policies", result.policies) || !map.map("grid", result.grid))
    return false;
  if (data.length < 2) {
    path.field("sequence_length").report("expected at least 2");
    return false;
  }
  for (auto [field, list] : {std::pair("operator_entropy", &entropy),
                             std::pair("operator_arithmetic", &intensity),
                             std::pair("operator_memory", &memory)})
    if (list->size() != kBlockSize) {
      path.field(field).report("expected 7 numbers");
      return false;
    }
  for (size_t i = 0; i < kBlockSize; ++i)
    data.chain.push_back({entropy[i], intensity[i], memory[i],
                          kBlock[i].registers, kBlock[i].shared,
                          kBlock[i].occupancy});
  return true;
}

static bool fromJSON(const json::Value &value, PrintedRow &row,
                     json::Path path) {
  json::ObjectMapper map(value, path);
  return map && map.map("depth", row.depth) &&
         map.map("latency_ms", row.latency) && map.map("dram", row.dram) &&
         map.map("proxy", row.proxy);
}

static bool fromJSON(const json::Value &value, SweepRow &row, json::Path path) {
  json::ObjectMapper map(value, path);
  if (!map || !map.map("n", row.n) || !map.map("regime", row.regime) ||
      !map.map("launches", row.launches) || !map.map("depths", row.depths) ||
      !map.map("tau", row.tau))
    return false;
  if (row.n < 1 || row.n > 4096) {
    path.field("n").report("expected 1 to 4096");
    return false;
  }
  if (row.launches.size() != 3) {
    path.field("launches").report("expected 3 numbers");
    return false;
  }
  return true;
}

static bool fromJSON(const json::Value &value, Reference &reference,
                     json::Path path) {
  json::ObjectMapper map(value, path);
  return map && map.map("cases", reference.cases) &&
         map.map("table11", reference.table11) &&
         map.map("table33", reference.table33);
}
} // namespace corey::paper

namespace {
// Made by the build.
constexpr struct {
  const char *name, *text;
} kEmbedded[] = {
#include "PaperData.inc"
};
} // namespace

Expected<Reference> paper::readReference(const std::string &path) {
  std::string contents = kEmbedded[0].text, name = kEmbedded[0].name;
  if (!path.empty()) {
    auto buffer = llvm::MemoryBuffer::getFile(path);
    if (!buffer)
      return Status::ioError(path + ": " + buffer.getError().message());
    contents = (*buffer)->getBuffer().str();
    name = path;
  }
  llvm::Expected<json::Value> parsed = json::parse(contents);
  if (!parsed)
    return Status::invalidArgument(name + ": expected JSON, got " +
                                   llvm::toString(parsed.takeError()));
  Reference reference;
  json::Path::Root root(name);
  if (!fromJSON(*parsed, reference, root))
    return Status::invalidArgument(llvm::toString(root.getError()));
  return reference;
}

//===----------------------------------------------------------------------===//
// Fusion: the 735 comparisons, table 11, table 33
//===----------------------------------------------------------------------===//

namespace {
/// A policy of the fusion experiments.
struct FusionRun {
  std::vector<FusionRegion> regions;
  tier1::Metrics metrics[3];
};
} // namespace

static FusionRun runStrategy(const tier1::Case &data, FusionStrategy strategy,
                             tier1::Method method, FusionWeights weights = {}) {
  FusionRun run;
  run.regions =
      FusionScorer(data.chain, weights, data.limits).partition(strategy);
  for (size_t i = 0; i < 3; ++i)
    run.metrics[i] =
        tier1::cost(data, run.regions, method, tier1::kPrecisions[i]);
  return run;
}

FusionWeights paper::withTau(double tau) {
  FusionWeights weights;
  weights.tau = tau;
  return weights;
}

static FusionRun runMatched(const tier1::Case &data) {
  FusionWeights weights;
  double depth = tier1::meanDepth(FusionScorer(data.chain, weights, data.limits)
                                      .partition(FusionStrategy::Entropy));
  weights.tau = tier1::matchedThreshold(data, weights, depth);
  return runStrategy(data, FusionStrategy::Arithmetic,
                     tier1::Method::Arithmetic, weights);
}

static bool sameDepths(const std::vector<FusionRegion> &regions,
                       const std::vector<int64_t> &depths) {
  return regions.size() == depths.size() &&
         llvm::all_of(llvm::zip(regions, depths), [](auto pair) {
           return int64_t(std::get<0>(pair).size()) == std::get<1>(pair);
         });
}

static bool same4(double a, double b) {
  return std::llround(a * 1e4) == std::llround(b * 1e4);
}

Expected<Tally> paper::checkPolicies(const Reference &reference) {
  static constexpr struct {
    const char *name;
    FusionStrategy strategy;
    tier1::Method method;
    double tau;
  } policies[] = {
      {"no_fusion", FusionStrategy::None, tier1::Method::NoFusion, 0.52},
      {"static_fusion_3", FusionStrategy::Static, tier1::Method::Static, 0.52},
      {"entropy_guided_tau0.52", FusionStrategy::Entropy,
       tier1::Method::Entropy, 0.52},
      {"entropy_guided_tau0.45", FusionStrategy::Entropy,
       tier1::Method::Entropy, 0.45},
      {"entropy_guided_tau0.60", FusionStrategy::Entropy,
       tier1::Method::Entropy, 0.60},
      {"arithmetic_only_alpha0", FusionStrategy::Arithmetic,
       tier1::Method::Arithmetic, 0.52},
      {"arithmetic_only_matched", FusionStrategy::Arithmetic,
       tier1::Method::Arithmetic, NAN}};
  static constexpr const char *precisions[] = {"fp16", "w8a8", "w4a8"};
  Tally tally;
  for (const ReferenceCase &each : reference.cases)
    for (const auto &policy : policies) {
      auto found = each.policies.find(policy.name);
      if (found == each.policies.end())
        return Status::invalidArgument("reference: expected policy " +
                                       std::string(policy.name) +
                                       " in every case, got none at length " +
                                       std::to_string(each.data.length));
      FusionRun run = std::isnan(policy.tau)
                          ? runMatched(each.data)
                          : runStrategy(each.data, policy.strategy,
                                        policy.method, withTau(policy.tau));
      for (size_t i = 0; i < 3; ++i) {
        const std::vector<double> &expected = found->second.metrics[i];
        const tier1::Metrics &got = run.metrics[i];
        tally.add(sameDepths(run.regions, found->second.depths) &&
                      same4(got.latencyMs, expected[0]) &&
                      same4(got.dramPerToken, expected[1]) &&
                      same4(got.quality, expected[2]),
                  [&] {
                    return "length " + std::to_string(each.data.length) +
                           ", repeat " + std::to_string(each.data.repeat) +
                           ", " + policy.name + ", " + precisions[i];
                  });
      }
    }
  return tally;
}

static FusionWeights gridWeights(double alpha, double beta) {
  FusionWeights weights;
  weights.alpha = alpha;
  weights.beta = beta;
  return weights;
}

Tally paper::checkGrid(const Reference &reference) {
  const std::pair<const char *, FusionWeights> points[] = {
      {"a0.0_b0.0_g0.2", gridWeights(0, 0)},
      {"a0.0_b0.7_g0.2", gridWeights(0, 0.7)},
      {"a0.45_b0.0_g0.2", gridWeights(0.45, 0)}};
  Tally tally;
  for (const ReferenceCase &each : reference.cases)
    for (const auto &[name, weights] : points) {
      auto found = each.grid.find(name);
      if (found == each.grid.end())
        continue;
      FusionRun run = runStrategy(each.data, FusionStrategy::Entropy,
                                  tier1::Method::Entropy, weights);
      tally.add(
          sameDepths(run.regions, found->second.depths) &&
              same4(run.metrics[0].latencyMs, found->second.metrics[0]) &&
              same4(run.metrics[0].dramPerToken, found->second.metrics[1]),
          [&] {
            return "length " + std::to_string(each.data.length) + ", repeat " +
                   std::to_string(each.data.repeat) + ", " + found->first;
          });
    }
  return tally;
}

Table paper::table11(const Reference &reference) {
  Table table{
      "11",
      "modelled costs of fusion at 65536 tokens, fp16, means of 5 cases",
      {}};
  auto mean = [&](llvm::function_ref<FusionRun(const tier1::Case &)> run) {
    tier1::Metrics sum;
    double count = 0;
    for (const ReferenceCase &each : reference.cases) {
      if (each.data.length < 65536)
        continue;
      const tier1::Metrics metrics = run(each.data).metrics[0];
      sum.latencyMs += metrics.latencyMs;
      sum.dramPerToken += metrics.dramPerToken;
      sum.quality += metrics.quality;
      sum.depth += metrics.depth;
      ++count;
    }
    for (double *field :
         {&sum.latencyMs, &sum.dramPerToken, &sum.quality, &sum.depth})
      *field = tier1::round4(*field / std::max(count, 1.0));
    return sum;
  };
  auto add = [&](const char *key, const char *row, tier1::Metrics got,
                 std::string note = "") {
    PrintedRow printed;
    if (auto found = reference.table11.find(key);
        found != reference.table11.end())
      printed = found->second;
    auto line = [&](const char *quantity, std::optional<double> paper,
                    double ours, int digits) {
      if (paper)
        table.exact(row, quantity, *paper, ours, digits, note);
      else
        table.compare(row, quantity, paper, ours, digits, note);
    };
    line("depth", printed.depth, got.depth, 2);
    line("latency ms", printed.latency, got.latencyMs, 2);
    line("DRAM B/token", printed.dram, got.dramPerToken, 2);
    line("quality proxy", printed.proxy, got.quality, 4);
  };
  using tier1::Method;
  auto greedy = [](FusionWeights weights) {
    return [weights](const tier1::Case &data) {
      return runStrategy(data, FusionStrategy::Entropy, Method::Entropy,
                         weights);
    };
  };
  tier1::Metrics none = mean([](const tier1::Case &data) {
    return runStrategy(data, FusionStrategy::None, Method::NoFusion);
  });
  tier1::Metrics noSignal = mean(greedy(gridWeights(0, 0)));
  // The printed row takes its latency from one experiment and the rest from
  // another.
  tier1::Metrics mixed = none;
  mixed.latencyMs = noSignal.latencyMs;
  add("no_signal", "no signal", mixed,
      "latency of weights (0, 0, .20), the rest of no fusion");
  add("", "no fusion, its own latency", none);
  add("static_fusion", "static", mean([](const tier1::Case &data) {
        return runStrategy(data, FusionStrategy::Static, Method::Static);
      }));
  add("arithmetic_only_beta0.70", "arithmetic only, beta .70",
      mean(greedy(gridWeights(0, 0.7))), "costed as the entropy method");
  add("entropy_only", "entropy only", mean(greedy(gridWeights(0.45, 0))));
  add("corey_default", "entropy", mean(greedy({})));
  add("", "arithmetic, same depth", mean(runMatched),
      "the partitions of the entropy row");
  add("", "entropy, tau .60", mean(greedy(withTau(0.6))));
  add("", "dp", mean([](const tier1::Case &data) {
        return runStrategy(data, FusionStrategy::Dp, Method::Entropy);
      }),
      "costed as the entropy method");
  return table;
}

Table paper::table33(const Reference &reference) {
  // The published surrogate: milliseconds of one of 64 launches.
  constexpr double kMsPerLaunch = 3.2992 / 64;
  Table table{"33",
              "launches of synthetic chains, and the latency surrogate of "
              "0.05155 ms per launch",
              {}};
  for (const SweepRow &each : reference.table33) {
    std::string row = std::to_string(each.n) + " " + each.regime;
    FusionScorer scorer(tier1::sweepChain(each.regime, size_t(each.n)),
                        withTau(each.tau), {256, 512, 0.5});
    auto launches = [&](FusionStrategy strategy) {
      return scorer.partition(strategy);
    };
    std::vector<FusionRegion> greedy = launches(FusionStrategy::Entropy);
    table.exact(row, "launches, no fusion", double(each.launches[0]),
                double(launches(FusionStrategy::None).size()));
    table.exact(row, "launches, static", double(each.launches[1]),
                double(launches(FusionStrategy::Static).size()));
    table.exact(row, "launches, entropy", double(each.launches[2]),
                double(greedy.size()), 0,
                sameDepths(greedy, each.depths) ? ""
                                                : "depths differ from the "
                                                  "reference");
    table.exact(row, "surrogate ms, entropy",
                kMsPerLaunch * double(each.launches[2]),
                kMsPerLaunch * double(greedy.size()), 4);
    table.compare(row, "launches, dp", std::nullopt,
                  double(launches(FusionStrategy::Dp).size()), 0);
    table.compare(
        row, "launches, fewest feasible", std::nullopt,
        double(scorer.cheapest([](FusionRegion) { return 1.0; }).size()), 0);
  }
  return table;
}

//===----------------------------------------------------------------------===//
// Figure 1
//===----------------------------------------------------------------------===//

Table paper::figure1(const Reference &reference) {
  Table table{"figure1",
              "normalised entropy before and after the Hadamard transform, "
              "means of 5 repeats; the figure plots moving averages",
              {}};
  std::map<int64_t, std::vector<const tier1::Case *>> byLength;
  for (const ReferenceCase &each : reference.cases)
    byLength[each.data.length].push_back(&each.data);
  std::vector<double> movingGains, rawGains;
  for (auto &[length, cases] : byLength) {
    // One average runs over the repeats of a length, and takes both tensors.
    sched::MovingAverage average(0.85);
    double before = 0, after = 0, rawBefore = 0, rawAfter = 0;
    double printedBefore = 0, printedAfter = 0;
    for (const tier1::Case *data : cases) {
      double first = average.update(data->rawBefore);
      double second = average.update(data->rawAfter);
      before += first;
      after += second;
      rawBefore += data->rawBefore;
      rawAfter += data->rawAfter;
      printedBefore += data->emaBefore;
      printedAfter += data->emaAfter;
      movingGains.push_back(second - first);
      rawGains.push_back(data->rawAfter - data->rawBefore);
    }
    std::string row = "L=" + std::to_string(length);
    double count = double(cases.size());
    table.exact(row, "moving average, before", printedBefore / count,
                before / count, 6);
    table.exact(row, "moving average, after", printedAfter / count,
                after / count, 6);
    table.compare(row, "entropy, before", std::nullopt, rawBefore / count, 3);
    table.compare(row, "entropy, after", std::nullopt, rawAfter / count, 3);
  }
  Spread moving = spreadOf(movingGains), raw = spreadOf(rawGains);
  table.compare("all", "gain, moving average", 0.051, moving.mean, 3,
                "s.d. " + text(moving.deviation, 3));
  table.compare("all", "gain, entropy", std::nullopt, raw.mean, 3,
                "s.d. " + text(raw.deviation, 3));
  return table;
}

//===----------------------------------------------------------------------===//
// Tables 11 and 33, measured
//===----------------------------------------------------------------------===//

/// The rows of one program.
static Status addMeasured(Table &table, Context &context,
                          const std::string &name, const Workload &workload,
                          double budgetMs) {
  Expected<std::vector<FusionResult>> results =
      measureFusion(context, workload, budgetMs);
  if (!results)
    return results.takeStatus();
  for (const FusionResult &r : *results) {
    std::string row = name + " " + r.strategy;
    auto add = [&](const char *quantity, double value, int digits,
                   std::string note = "") {
      table.compare(row, quantity, std::nullopt, value, digits,
                    std::move(note));
    };
    add("kernels", static_cast<double>(r.kernels), 0);
    add("MB moved", r.bytesMoved * 1e-6, 2);
    add("ms", r.time.median, 4,
        "95 %: " + text(r.time.low, 4) + " to " + text(r.time.high, 4));
    add("rel l2 difference", r.relativeL2, 9);
    if (!std::isnan(r.error))
      add("rel l2 error", r.error, 9);
  }
  return Status::ok();
}

Expected<Table> paper::measuredTable11(Context &context, int64_t length,
                                       double budgetMs) {
  Table table{"11m",
              "fusion strategies on blocks of two models, measured (f32, " +
                  std::to_string(length) + " tokens)",
              {}};
  for (bool mamba2 : {false, true}) {
    Expected<Workload> block = makeBlock(mamba2, length, DType::F32);
    if (!block)
      return block.takeStatus();
    if (context.getDevice().kind != Device::CPU) {
      Expected<std::shared_ptr<Context>> cpu = Context::create();
      if (!cpu)
        return cpu.takeStatus();
      CompileOptions options;
      options.fusion = "none";
      auto reference = (*cpu)->compile(block->program, options, "<program>");
      if (!reference)
        return reference.takeStatus();
      if (Status status =
              (*reference)->run("main", block->inputs, block->expected);
          !status)
        return status;
    }
    if (Status status = addMeasured(
            table, context, mamba2 ? "mamba2" : "mamba1", *block, budgetMs);
        !status)
      return status;
  }
  return table;
}

Expected<Table> paper::measuredTable33(Context &context, int64_t length,
                                       double budgetMs) {
  Table table{"33m",
              "fusion strategies on chains of pointwise operators, measured "
              "(f32, " +
                  std::to_string(length) + " x 512)",
              {}};
  for (int64_t n : {4, 8, 16, 32, 64})
    if (Status status = addMeasured(table, context, "n=" + std::to_string(n),
                                    makeChain(n, length), budgetMs);
        !status)
      return status;
  return table;
}
