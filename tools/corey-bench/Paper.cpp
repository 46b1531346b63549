//===- Paper.cpp - Published tables, computed again -----------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What arXiv 2604.10597 prints and does not need its machines for: entropies,
// chunk choices, fusion decisions and their modelled costs, and what its theory
// says. docs/Papers.md discusses the results.
//
//===----------------------------------------------------------------------===//

#include "Tier1.h"
#include "Workload.h"
#include "corey/SafeTensors.h"
#include "corey/Scheduler/ChunkRule.h"
#include "corey/Scheduler/Estimator.h"
#include "corey/ToolUtils.h"
#include "llvm/ADT/STLExtras.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/ADT/StringMap.h"
#include "llvm/Support/CommandLine.h"
#include "llvm/Support/Format.h"
#include "llvm/Support/JSON.h"
#include "llvm/Support/MathExtras.h"
#include "llvm/Support/MemoryBuffer.h"
#include "llvm/Support/Path.h"
#include "llvm/Support/raw_ostream.h"
#include <optional>

using namespace corey;
namespace cl = llvm::cl;
namespace json = llvm::json;
namespace sched = corey::scheduler;

static constexpr const char *kTool = "corey-bench";

//===----------------------------------------------------------------------===//
// Rows
//===----------------------------------------------------------------------===//

namespace {
/// A printed number and ours.
struct Row {
  std::string row, quantity;
  /// What the paper prints, with so many decimals; nothing if it prints none.
  std::optional<double> paper;
  double ours = 0;
  int digits = 0;
  /// How far numbers of a random sample may be apart.
  double tolerance = 0;
  /// Whether a difference is a failure. It is none where the paper contradicts
  /// itself, and the row is there to show it.
  bool mustMatch = false;
  std::string note;

  bool matches() const;
};

struct Table {
  std::string id, title;
  std::vector<Row> rows;

  /// A row that must come out as printed.
  void exact(std::string row, std::string quantity, double paper, double ours,
             int digits = 0, std::string note = "") {
    rows.push_back({std::move(row), std::move(quantity), paper, ours, digits, 0,
                    true, std::move(note)});
  }
  /// A row that need not.
  void compare(std::string row, std::string quantity,
               std::optional<double> paper, double ours, int digits,
               std::string note = "", double tolerance = 0) {
    rows.push_back({std::move(row), std::move(quantity), paper, ours, digits,
                    tolerance, false, std::move(note)});
  }
};
} // namespace

static std::string text(double value, int digits) {
  std::string result =
      llvm::formatv(("{0:F" + std::to_string(digits) + "}").c_str(), value)
          .str();
  // No negative zeros.
  if (result[0] == '-' &&
      result.find_first_not_of("0.", 1) == std::string::npos)
    result.erase(0, 1);
  return result;
}

bool Row::matches() const {
  if (!paper)
    return true;
  if (tolerance > 0)
    return std::abs(ours - *paper) <= tolerance + 0.5 * std::pow(10.0, -digits);
  return text(ours, digits) == text(*paper, digits);
}

static void print(llvm::raw_ostream &os, const Table &table) {
  size_t wide = 3, middle = 8;
  for (const Row &row : table.rows) {
    wide = std::max(wide, row.row.size());
    middle = std::max(middle, row.quantity.size());
  }
  os << "table " << table.id << ": " << table.title << "\n  "
     << llvm::left_justify("row", wide + 2)
     << llvm::left_justify("quantity", middle)
     << "        paper         ours   difference\n";
  for (const Row &row : table.rows) {
    os << "  " << llvm::left_justify(row.row, wide + 2)
       << llvm::left_justify(row.quantity, middle)
       << llvm::right_justify(row.paper ? text(*row.paper, row.digits) : "-",
                              13)
       << llvm::right_justify(text(row.ours, row.digits), 13)
       << llvm::right_justify(
              row.paper ? text(row.ours - *row.paper, row.digits) : "-", 13);
    if (!row.matches())
      os << (row.mustMatch ? "  FAIL" : "  differs");
    if (!row.note.empty())
      os << "  " << row.note;
    os << "\n";
  }
  os << "\n";
}

static json::Value toJSON(const Table &table) {
  json::Array rows;
  for (const Row &row : table.rows) {
    json::Object object{
        {"row", row.row}, {"quantity", row.quantity}, {"ours", row.ours}};
    if (row.paper) {
      object["paper"] = *row.paper;
      object["difference"] = row.ours - *row.paper;
      object["matches"] = row.matches();
      object["must_match"] = row.mustMatch;
    }
    if (row.tolerance > 0)
      object["tolerance"] = row.tolerance;
    if (!row.note.empty())
      object["note"] = row.note;
    rows.push_back(std::move(object));
  }
  return rows;
}

//===----------------------------------------------------------------------===//
// Samples
//===----------------------------------------------------------------------===//

namespace {
/// splitmix64, and what is made of it: the same numbers with every standard
/// library.
class Random {
public:
  explicit Random(uint64_t seed) : state(seed) {
    // Far from the streams of other seeds.
    state = next();
  }
  uint64_t next() {
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  /// In (0, 1).
  double uniform() { return (double(next() >> 11) + 0.5) * 0x1p-53; }
  double normal() {
    if (spare) {
      double value = *spare;
      spare.reset();
      return value;
    }
    double radius = std::sqrt(-2 * std::log(uniform()));
    double angle = 6.283185307179586477 * uniform();
    spare = radius * std::sin(angle);
    return radius * std::cos(angle);
  }
  double laplace() {
    double u = uniform() - 0.5;
    return (u < 0 ? 1 : -1) * std::log1p(-2 * std::abs(u));
  }
  double student3() {
    double z = normal(), a = normal(), b = normal(), c = normal();
    return z / std::sqrt((a * a + b * b + c * c) / 3);
  }
  double sparse(double share) {
    double value = normal();
    return uniform() < share ? value : 0;
  }

private:
  uint64_t state;
  std::optional<double> spare;
};
} // namespace

static sched::Statistics measure(const std::vector<double> &values, int bins,
                                 sched::RangeMode range) {
  sched::EstimatorOptions options;
  options.bins = bins;
  options.range = range;
  // Neither the options nor a contiguous view can be refused.
  auto estimator = sched::Estimator::create(options);
  return *estimator->estimate(sched::TensorView::contiguous(
      values.data(), sched::ElementType::F64, {int64_t(values.size())}));
}

namespace {
struct Spread {
  double mean = 0, deviation = 0;
};
} // namespace

static Spread spreadOf(llvm::ArrayRef<double> values) {
  Spread spread;
  for (double value : values)
    spread.mean += value / double(values.size());
  for (double value : values)
    spread.deviation += (value - spread.mean) * (value - spread.mean);
  spread.deviation =
      values.size() > 1
          ? std::sqrt(spread.deviation / double(values.size() - 1))
          : 0;
  return spread;
}

static int64_t choose(llvm::StringRef rule, double nats, int64_t bins = 256) {
  auto found =
      sched::ChunkRule::named(std::string_view(rule.data(), rule.size()));
  return *found->chunk(sched::Nats(nats), bins);
}

//===----------------------------------------------------------------------===//
// Entropies and chunks: tables 1, 3, 14, 20, 21, 22, 29
//===----------------------------------------------------------------------===//

namespace {
struct BinsCase {
  const char *distribution;
  int bins;
  double entropy;
  int64_t calibrated, legacy;
};
} // namespace

/// Entropies of a million samples over the number of bins. Those of normal
/// samples move with the most extreme sample, so several are drawn.
static Table binsTable(llvm::StringRef id, llvm::ArrayRef<BinsCase> cases) {
  constexpr size_t kSamples = 1000000;
  constexpr uint64_t kSeeds = 9;
  Table table{id.str(),
              "entropy (nats) over the number of bins K, 1e6 samples; ours: "
              "bins over [min, max] in f64, mean of 9 seeds",
              {}};
  std::vector<std::vector<double>> entropies(cases.size());
  std::vector<double> values(kSamples);
  for (const char *name : {"normal", "uniform"}) {
    if (llvm::none_of(cases, [&](const BinsCase &each) {
          return llvm::StringRef(each.distribution) == name;
        }))
      continue;
    for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
      Random random(seed);
      for (double &value : values)
        value = name[0] == 'n' ? random.normal() : random.uniform();
      for (size_t i = 0; i < cases.size(); ++i)
        if (llvm::StringRef(cases[i].distribution) == name)
          entropies[i].push_back(
              measure(values, cases[i].bins, sched::RangeMode::MinMax)
                  .entropy.value());
    }
  }
  for (size_t i = 0; i < cases.size(); ++i) {
    const BinsCase &each = cases[i];
    std::string row =
        std::string(each.distribution) + " K=" + std::to_string(each.bins);
    Spread spread = spreadOf(entropies[i]);
    table.compare(row, "entropy", each.entropy, spread.mean, 3,
                  "s.d. over seeds " + text(spread.deviation, 4),
                  3 * spread.deviation);
    table.exact(row, "chunk, H_ref ln K", double(each.calibrated),
                double(choose("calibrated", spread.mean, each.bins)));
    table.exact(row, "chunk, H_ref 8.0", double(each.legacy),
                double(choose("legacy", spread.mean, each.bins)));
  }
  return table;
}

static Table table1() {
  return binsTable("1", {{"normal", 32, 2.644, 512, 256},
                         {"normal", 128, 4.027, 512, 256},
                         {"normal", 512, 5.413, 512, 256},
                         {"normal", 1024, 6.106, 512, 512},
                         {"uniform", 32, 3.466, 512, 256},
                         {"uniform", 128, 4.852, 512, 256}});
}

static Table table21() {
  return binsTable("21", {{"normal", 32, 2.644, 512, 256},
                          {"normal", 64, 3.334, 512, 256},
                          {"normal", 128, 4.027, 512, 256},
                          {"normal", 256, 4.720, 512, 256},
                          {"normal", 512, 5.413, 512, 256},
                          {"normal", 1024, 6.106, 512, 512}});
}

static Table table3() {
  // The tensors of the paper: [1, 4096, 1024] in f16.
  constexpr int64_t kLength = 4096, kChannels = 1024;
  constexpr uint64_t kSeeds = 3;
  Table table{"3",
              "chunks for five distributions, f16 [1, 4096, 1024], K = 256; "
              "the paper says calibrated and prints legacy",
              {}};
  const struct {
    const char *name;
    double entropy;
    int64_t chunk;
    double (*draw)(Random &);
  } cases[] = {
      {"uniform", 5.545, 512, [](Random &r) { return r.uniform(); }},
      {"normal", 4.612, 256, [](Random &r) { return r.normal(); }},
      {"laplace", 3.892, 256, [](Random &r) { return r.laplace(); }},
      {"sparse 10%", 0.789, 64, [](Random &r) { return 5 * r.sparse(0.1); }},
      {"sparse 2%", 0.192, 32, [](Random &r) { return 5 * r.sparse(0.02); }}};
  auto estimator = sched::Estimator::create();
  std::vector<uint16_t> values(kLength * kChannels);
  for (const auto &each : cases) {
    std::vector<double> entropies;
    for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
      Random random(seed);
      for (uint16_t &value : values)
        value = floatToF16(float(each.draw(random)));
      entropies.push_back(estimator
                              ->estimate(sched::TensorView::contiguous(
                                  values.data(), sched::ElementType::F16,
                                  {1, kLength, kChannels}))
                              ->entropy.value());
    }
    Spread spread = spreadOf(entropies);
    table.compare(each.name, "entropy", each.entropy, spread.mean, 3,
                  "s.d. over seeds " + text(spread.deviation, 4),
                  3 * spread.deviation);
    table.exact(each.name, "chunk, legacy", double(each.chunk),
                double(choose("legacy", spread.mean)));
    table.compare(each.name, "chunk, calibrated", double(each.chunk),
                  double(choose("calibrated", each.entropy)), 0,
                  "of the printed entropy");
  }
  return table;
}

static Table table14() {
  Table table{"14/22",
              "tiles of real prompts; the printed entropies are in bits, "
              "although they are called nats",
              {}};
  const struct {
    const char *row;
    double bits;
    int64_t tile;
  } cases[] = {{"mean", 4.022, 288}, {"p5", 3.871, 288},
               {"p95", 4.139, 288},  {"MultiFieldQA p95", 4.224, 288},
               {"370M", 4.18, 288},  {"1.4B", 5.17, 352}};
  for (const auto &each : cases) {
    sched::Nats nats(sched::Bits(each.bits));
    table.exact(each.row, "tile", double(each.tile),
                double(choose("tile32", nats.value())));
    table.compare(each.row, "tile, if it were nats", double(each.tile),
                  double(choose("tile32", each.bits)), 0);
    table.compare(each.row, "nearest bucket", std::nullopt,
                  double(choose("coarse", nats.value())), 0);
  }
  return table;
}

static Table table20() {
  Table table{"20",
              "chunks over H_ref; 4.604 is in nats, 4.02 in bits (2.786 nats)",
              {}};
  const struct {
    const char *row;
    double reference;
    int64_t synthetic, checkpoint;
  } cases[] = {{"H_ref ln 64", std::log(64.0), 512, 512},
               {"H_ref 5.0", 5, 512, 512},
               {"H_ref 6.0", 6, 512, 256},
               {"H_ref 8.0", 8, 256, 256}};
  for (const auto &each : cases) {
    auto rule = sched::ChunkRule::powerOfTwo(32, 512, each.reference);
    auto at = [&](sched::Nats nats) { return double(*rule->chunk(nats, 256)); };
    table.exact(each.row, "chunk, H 4.604", double(each.synthetic),
                at(sched::Nats(4.604287)));
    table.exact(each.row, "chunk, H 4.02", double(each.checkpoint),
                at(sched::Nats(4.02)), 0, "bits taken for nats");
    table.compare(each.row, "chunk, 4.02 bits", double(each.checkpoint),
                  at(sched::Bits(4.02)), 0);
  }
  return table;
}

static Table table29() {
  Table table{"29",
              "chunks of layers of a 370M checkpoint; the caption says "
              "calibrated",
              {}};
  const struct {
    int layer;
    double nats;
    int64_t chunk;
  } cases[] = {{0, 2.27, 128},  {8, 2.91, 256},  {16, 3.22, 256},
               {24, 3.29, 256}, {32, 3.61, 256}, {40, 3.54, 256}};
  for (const auto &each : cases) {
    std::string row = "layer " + std::to_string(each.layer);
    for (const char *rule : {"legacy", "calibrated", "routed"}) {
      double ours = double(choose(rule, each.nats));
      std::string quantity = std::string("chunk, ") + rule;
      if (rule[0] == 'l')
        table.exact(row, quantity, double(each.chunk), ours);
      else
        table.compare(row, quantity, double(each.chunk), ours, 0);
    }
  }
  return table;
}

//===----------------------------------------------------------------------===//
// Reference results
//===----------------------------------------------------------------------===//

namespace {
struct PolicyResult {
  std::vector<int64_t> depths;
  /// Latency, traffic and quality per precision.
  std::vector<std::vector<double>> metrics;
  std::optional<double> tau;
};
struct GridResult {
  std::vector<int64_t> depths;
  /// Latency and traffic.
  std::vector<double> metrics;
};
struct ReferenceCase {
  tier1::Case data;
  std::map<std::string, PolicyResult> policies;
  std::map<std::string, GridResult> grid;
};
struct PrintedRow {
  std::optional<double> depth, latency, dram, proxy;
};
struct SweepRow {
  int64_t n = 0;
  std::string regime;
  std::vector<int64_t> launches, depths;
  double tau = 0;
};
struct Reference {
  std::vector<ReferenceCase> cases;
  std::map<std::string, PrintedRow> table11;
  std::vector<SweepRow> table33;
};

/// The operators of the synthetic block.
constexpr struct {
  double registers, shared, occupancy;
} kBlock[] = {{20, 8, .94},  {36, 12, .91}, {72, 28, .79}, {54, 22, .83},
              {48, 18, .87}, {24, 8, .96},  {18, 6, .97}};
constexpr size_t kBlockSize = std::size(kBlock);

bool fromJSON(const json::Value &value, PolicyResult &result, json::Path path) {
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

bool fromJSON(const json::Value &value, GridResult &result, json::Path path) {
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

bool fromJSON(const json::Value &value, ReferenceCase &result,
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

bool fromJSON(const json::Value &value, PrintedRow &row, json::Path path) {
  json::ObjectMapper map(value, path);
  return map && map.map("depth", row.depth) &&
         map.map("latency_ms", row.latency) && map.map("dram", row.dram) &&
         map.map("proxy", row.proxy);
}

bool fromJSON(const json::Value &value, SweepRow &row, json::Path path) {
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

bool fromJSON(const json::Value &value, Reference &reference, json::Path path) {
  json::ObjectMapper map(value, path);
  return map && map.map("cases", reference.cases) &&
         map.map("table11", reference.table11) &&
         map.map("table33", reference.table33);
}

// Made by the build.
constexpr struct {
  const char *name, *text;
} kEmbedded[] = {
#include "PaperData.inc"
};
} // namespace

static Expected<Reference> readReference(const std::string &path) {
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

static FusionRun runFusion(const tier1::Case &data, FusionStrategy strategy,
                           tier1::Method method, FusionWeights weights = {}) {
  FusionRun run;
  run.regions =
      FusionScorer(data.chain, weights, data.limits).partition(strategy);
  for (size_t i = 0; i < 3; ++i)
    run.metrics[i] =
        tier1::cost(data, run.regions, method, tier1::kPrecisions[i]);
  return run;
}

static FusionWeights withTau(double tau) {
  FusionWeights weights;
  weights.tau = tau;
  return weights;
}

static FusionRun runMatched(const tier1::Case &data) {
  FusionWeights weights;
  double depth = tier1::meanDepth(FusionScorer(data.chain, weights, data.limits)
                                      .partition(FusionStrategy::Entropy));
  weights.tau = tier1::matchedThreshold(data, weights, depth);
  return runFusion(data, FusionStrategy::Arithmetic, tier1::Method::Arithmetic,
                   weights);
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

namespace {
struct Tally {
  int64_t passed = 0, failed = 0;
  std::vector<std::string> failures;
  void add(bool good, llvm::function_ref<std::string()> name) {
    ++(good ? passed : failed);
    if (!good)
      failures.push_back(name());
  }
};
} // namespace

/// Every case, policy and precision: group depths, latency, traffic and
/// quality.
static Expected<Tally> checkPolicies(const Reference &reference) {
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
                          : runFusion(each.data, policy.strategy, policy.method,
                                      withTau(policy.tau));
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

static Tally checkGrid(const Reference &reference) {
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
      FusionRun run = runFusion(each.data, FusionStrategy::Entropy,
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

static Table table11(const Reference &reference) {
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
      return runFusion(data, FusionStrategy::Entropy, Method::Entropy, weights);
    };
  };
  tier1::Metrics none = mean([](const tier1::Case &data) {
    return runFusion(data, FusionStrategy::None, Method::NoFusion);
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
        return runFusion(data, FusionStrategy::Static, Method::Static);
      }));
  add("arithmetic_only_beta0.70", "arithmetic only, beta .70",
      mean(greedy(gridWeights(0, 0.7))), "costed as the entropy method");
  add("entropy_only", "entropy only", mean(greedy(gridWeights(0.45, 0))));
  add("corey_default", "entropy", mean(greedy({})));
  add("", "arithmetic, same depth", mean(runMatched),
      "the partitions of the entropy row");
  add("", "entropy, tau .60", mean(greedy(withTau(0.6))));
  add("", "dp", mean([](const tier1::Case &data) {
        return runFusion(data, FusionStrategy::Dp, Method::Entropy);
      }),
      "costed as the entropy method");
  return table;
}

static Table table33(const Reference &reference) {
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

static Table figure1(const Reference &reference) {
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
// Theory
//===----------------------------------------------------------------------===//

/// Orthonormal Walsh-Hadamard transform in natural order; the size is a power
/// of two. `aliased` is what the published evaluation of real activations
/// computes: its differences read the sums, which have overwritten the first
/// operand.
static void hadamard(double *x, size_t n, bool aliased = false) {
  const double scale = std::sqrt(0.5);
  for (size_t h = 1; h < n; h *= 2)
    for (size_t i = 0; i < n; ++i)
      if (!(i & h)) {
        double a = x[i], b = x[i + h];
        x[i] = scale * (a + b);
        x[i + h] = scale * ((aliased ? x[i] : a) - b);
      }
}

static double entropyOf(llvm::ArrayRef<double> masses) {
  double entropy = 0;
  for (double p : masses)
    if (p > 0)
      entropy -= p * std::log(p);
  return entropy;
}

/// Makes a positive matrix doubly stochastic.
static void sinkhorn(std::vector<double> &matrix, size_t n) {
  std::vector<double> sums(n);
  for (int round = 0; round < 20000; ++round) {
    std::fill(sums.begin(), sums.end(), 0.0);
    for (size_t i = 0; i < n; ++i)
      for (size_t j = 0; j < n; ++j)
        sums[j] += matrix[i * n + j];
    double worst = 0;
    for (double sum : sums)
      worst = std::max(worst, std::abs(sum - 1));
    for (size_t i = 0; i < n; ++i) {
      double row = 0;
      for (size_t j = 0; j < n; ++j)
        row += matrix[i * n + j] /= sums[j];
      for (size_t j = 0; j < n; ++j)
        matrix[i * n + j] /= row;
    }
    if (worst < 1e-13)
      break;
  }
}

static void mixingRows(Table &table) {
  constexpr size_t kBins = 64;
  constexpr int kMatrices = 60;
  Random random(11);
  // Histograms of several kinds of data.
  double (*draws[])(Random &) = {[](Random &r) { return r.uniform(); },
                                 [](Random &r) { return r.normal(); },
                                 [](Random &r) { return r.laplace(); },
                                 [](Random &r) { return r.student3(); },
                                 [](Random &r) { return r.sparse(0.05); }};
  std::vector<std::vector<double>> histograms;
  sched::EstimatorOptions options;
  options.bins = kBins;
  auto estimator = sched::Estimator::create(options);
  for (auto draw : draws) {
    std::vector<double> values(50000), masses;
    for (double &value : values)
      value = draw(random);
    (void)estimator->estimate(sched::TensorView::contiguous(
        values.data(), sched::ElementType::F64, {int64_t(values.size())}));
    for (uint64_t count : estimator->histogram())
      masses.push_back(double(count) / double(values.size()));
    histograms.push_back(std::move(masses));
  }
  auto gain = [&](const std::vector<double> &matrix,
                  const std::vector<double> &masses) {
    std::vector<double> mixed(kBins, 0.0);
    for (size_t i = 0; i < kBins; ++i)
      for (size_t j = 0; j < kBins; ++j)
        mixed[i] += matrix[i * kBins + j] * masses[j];
    return entropyOf(mixed) - entropyOf(masses);
  };
  std::vector<double> mixing, permuting;
  for (int m = 0; m < kMatrices; ++m) {
    // From nearly uniform to nearly a permutation.
    double sharpness = 0.25 * std::pow(2.0, m % 6);
    std::vector<double> matrix(kBins * kBins);
    for (double &entry : matrix)
      entry = std::exp(sharpness * random.normal());
    sinkhorn(matrix, kBins);
    std::vector<size_t> order(kBins);
    for (size_t i = 0; i < kBins; ++i) {
      size_t j = random.next() % (i + 1);
      order[i] = order[j];
      order[j] = i;
    }
    std::vector<double> permutation(kBins * kBins, 0.0);
    for (size_t i = 0; i < kBins; ++i)
      permutation[i * kBins + order[i]] = 1;
    for (const std::vector<double> &masses : histograms) {
      mixing.push_back(gain(matrix, masses));
      permuting.push_back(std::abs(gain(permutation, masses)));
    }
  }
  double least = *llvm::min_element(mixing);
  table.exact(
      "doubly stochastic mixing", "shrinking entropies", 0,
      double(llvm::count_if(mixing, [](double g) { return g < -1e-9; })), 0,
      "of " + std::to_string(mixing.size()) +
          " histograms, mixed by "
          "matrices of Sinkhorn's iteration");
  table.compare("doubly stochastic mixing", "least gain, nats", std::nullopt,
                least, 4);
  table.compare("doubly stochastic mixing", "mean gain, nats", std::nullopt,
                spreadOf(mixing).mean, 4);
  table.exact("permutation of bins", "largest |gain|, nats", 0,
              *llvm::max_element(permuting), 9);
}

static void peakRows(Table &table) {
  Random random(12);
  double worst = 0;
  for (size_t d : {size_t(16), size_t(256), size_t(4096)}) {
    std::string row = "Hadamard, d=" + std::to_string(d);
    auto ratio = [&](std::vector<double> x) {
      double peak = 0, norm = 0, newPeak = 0, newNorm = 0;
      for (double value : x) {
        peak = std::max(peak, std::abs(value));
        norm += value * value;
      }
      hadamard(x.data(), d);
      for (double value : x) {
        newPeak = std::max(newPeak, std::abs(value));
        newNorm += value * value;
      }
      worst = std::max(worst, std::abs(std::sqrt(newNorm / norm) - 1));
      return peak / newPeak;
    };
    std::vector<double> spike(d, 0.0), constant(d, 1.0), normal(d);
    spike[d / 3] = 7;
    table.exact(row, "peak shrinks, one spike", std::sqrt(double(d)),
                ratio(spike), 3, "sqrt(d), the most there is");
    table.compare(row, "peak shrinks, constant", std::nullopt, ratio(constant),
                  4, "below 1: it grows");
    std::vector<double> ratios;
    for (int i = 0; i < 20; ++i) {
      for (double &value : normal)
        value = random.normal();
      ratios.push_back(ratio(normal));
    }
    table.compare(row, "peak shrinks, normal", std::nullopt,
                  spreadOf(ratios).mean, 3);
  }
  table.exact("Hadamard", "error of the l2 norm", 0, worst, 9);
}

/// What the transform does to the entropy of values: mixing values is not
/// mixing the masses of bins, and the first theorem says nothing of it.
static void valueRows(Table &table) {
  // The channels of the checkpoint of the paper, and fewer.
  constexpr size_t kValues = 1 << 20, kSizes[] = {256, 2048};
  const struct {
    const char *name;
    double (*draw)(Random &);
  } cases[] = {{"normal", [](Random &r) { return r.normal(); }},
               {"laplace", [](Random &r) { return r.laplace(); }},
               {"student t3", [](Random &r) { return r.student3(); }},
               {"silu(normal)", [](Random &r) {
                  double x = r.normal();
                  return x / (1 + std::exp(-x));
                }}};
  auto entropy = [](const std::vector<double> &v) {
    return measure(v, 64, sched::RangeMode::MinMax).entropy.value();
  };
  for (const auto &each : cases) {
    Random random(13);
    std::vector<double> values(kValues);
    for (double &value : values)
      value = each.draw(random);
    double before = entropy(values);
    for (size_t size : kSizes)
      for (bool aliased : {false, true}) {
        std::vector<double> rotated = values;
        for (size_t i = 0; i < kValues; i += size)
          hadamard(&rotated[i], size, aliased);
        table.compare(std::string(each.name) + ", d=" + std::to_string(size),
                      aliased ? "entropy gain, aliased" : "entropy gain, nats",
                      std::nullopt, entropy(rotated) - before, 2);
      }
  }
  // The aliased transform is not orthogonal.
  constexpr size_t kSmall = 8;
  double matrix[kSmall][kSmall], worst = 0;
  for (size_t j = 0; j < kSmall; ++j) {
    double unit[kSmall] = {};
    unit[j] = 1;
    hadamard(unit, kSmall, /*aliased=*/true);
    for (size_t i = 0; i < kSmall; ++i)
      matrix[i][j] = unit[i];
  }
  for (size_t i = 0; i < kSmall; ++i)
    for (size_t j = 0; j < kSmall; ++j) {
      double product = i == j ? -1 : 0;
      for (size_t k = 0; k < kSmall; ++k)
        product += matrix[k][i] * matrix[k][j];
      worst = std::max(worst, std::abs(product));
    }
  table.compare("aliased transform, d=8", "max |M^T M - I|", std::nullopt,
                worst, 2, "0 for an orthogonal one");
}

/// What the bins do with the least and the largest value of a sample.
static void rangeRows(Table &table) {
  Random random(14);
  auto rows = [&](const std::string &row, const std::vector<double> &values) {
    double nats =
        measure(values, 256, sched::RangeMode::MinMax).entropy.value();
    table.compare(row, "entropy K=256, nats", std::nullopt, nats, 2);
    table.compare(row, "chunk, calibrated", std::nullopt,
                  double(choose("calibrated", nats)), 0);
  };
  for (size_t n : {size_t(1000), size_t(1000000)}) {
    std::vector<double> values(n);
    for (double &value : values)
      value = random.normal();
    rows(std::to_string(n) + " normal values", values);
    values[n / 2] = 100;
    rows(std::to_string(n) + " and one of 100 sigma", values);
  }
}

static void depthRows(Table &table, const Reference &reference) {
  for (double room : {64.0, 96.0, 512.0}) {
    constexpr double kTile = 28;
    FusionFeatures op;
    op.shared = kTile;
    // Equal operators are halfway in every term; at the default threshold the
    // first pair of them would not score enough.
    FusionScorer scorer(std::vector<FusionFeatures>(64, op), withTau(0.4),
                        {INFINITY, room, 0});
    size_t deepest = 0;
    for (FusionRegion region : scorer.partition(FusionStrategy::Entropy))
      deepest = std::max(deepest, region.size());
    table.exact("depth, " + text(room, 0) + " / " + text(kTile, 0),
                "deepest region", double(fusionDepthBound(room, kTile)),
                double(deepest), 0, "64 equal operators");
  }
  // Operators of the block differ: the bound of the smallest holds for all.
  double beyond = 0, regions = 0;
  for (const ReferenceCase &each : reference.cases)
    for (FusionStrategy strategy :
         {FusionStrategy::Entropy, FusionStrategy::Dp}) {
      double tile = INFINITY;
      for (const FusionFeatures &op : each.data.chain)
        tile = std::min(tile, op.shared);
      for (FusionRegion region :
           FusionScorer(each.data.chain, {}, each.data.limits)
               .partition(strategy)) {
        ++regions;
        beyond +=
            region.size() > fusionDepthBound(each.data.limits.shared, tile);
      }
    }
  table.exact("depth, synthetic block", "regions beyond", 0, beyond, 0,
              "of " + text(regions, 0));
}

static Table theory(const Reference &reference) {
  Table table{"theory", "what the theorems say, measured", {}};
  mixingRows(table);
  peakRows(table);
  depthRows(table, reference);
  valueRows(table);
  rangeRows(table);
  return table;
}

//===----------------------------------------------------------------------===//
// Hadamard on activations
//===----------------------------------------------------------------------===//

namespace {
/// What is measured of a tensor; entropies in nats.
struct Shape {
  double entropy256 = 0, entropy64 = 0, normalized64 = 0, peakToRms = 0,
         outliers = 0, kurtosis = 0;
  static constexpr double Shape::*kFields[] = {
      &Shape::entropy256, &Shape::entropy64, &Shape::normalized64,
      &Shape::peakToRms,  &Shape::outliers,  &Shape::kurtosis};
};

/// One tensor before the transform, after it, and after the aliased one.
struct Rotation {
  std::string name;
  int64_t tokens = 0, channels = 0, block = 0;
  Shape before, after, aliased;
  double gain() const { return after.entropy64 - before.entropy64; }
  double aliasedGain() const { return aliased.entropy64 - before.entropy64; }
};
} // namespace

static Shape shapeOf(const std::vector<double> &values) {
  sched::Statistics fine = measure(values, 256, sched::RangeMode::MinMax);
  return {
      fine.entropy.value(),
      measure(values, 64, sched::RangeMode::MinMax).entropy.value(),
      measure(values, 64, sched::RangeMode::PaddedMinMax).normalizedEntropy(),
      fine.peakToRms,
      fine.outlierFraction,
      fine.kurtosis};
}

static Expected<Rotation> rotate(const std::string &path,
                                 const std::string &name, const Tensor &tensor,
                                 int64_t channels) {
  Rotation rotation;
  rotation.name = name;
  rotation.tokens = tensor.dim(0);
  rotation.channels = channels ? channels : tensor.dim(1);
  if (rotation.channels > tensor.dim(1) || tensor.numElements() == 0)
    return Status::invalidArgument(
        path + ": " + name + ": expected a token and at least " +
        std::to_string(std::max<int64_t>(channels, 1)) + " channels, got " +
        tensor.describe());
  // The largest power of two that divides the channels.
  rotation.block = rotation.channels & -rotation.channels;
  Expected<Tensor> wide = tensor.to(DType::F64);
  if (!wide)
    return wide.takeStatus();
  std::vector<double> before;
  for (int64_t t = 0; t < rotation.tokens; ++t) {
    const double *row = wide->dataAs<double>() + t * tensor.dim(1);
    before.insert(before.end(), row, row + rotation.channels);
  }
  for (double value : before)
    if (!std::isfinite(value))
      return Status::invalidArgument(path + ": " + name +
                                     ": expected finite numbers, got " +
                                     std::to_string(value));
  std::vector<double> after = before, aliased = before;
  for (size_t i = 0; i < before.size(); i += size_t(rotation.block)) {
    hadamard(&after[i], size_t(rotation.block));
    hadamard(&aliased[i], size_t(rotation.block), /*aliased=*/true);
  }
  rotation.before = shapeOf(before);
  rotation.after = shapeOf(after);
  rotation.aliased = shapeOf(aliased);
  return rotation;
}

static json::Object toJSON(const Shape &shape) {
  // Digits that mean something.
  auto rounded = [](double value) { return std::round(value * 1e9) / 1e9; };
  return json::Object{{"entropy_k256_nats", rounded(shape.entropy256)},
                      {"entropy_k64_nats", rounded(shape.entropy64)},
                      {"normalized_padded_k64", rounded(shape.normalized64)},
                      {"peak_to_rms", rounded(shape.peakToRms)},
                      {"outlier_fraction", rounded(shape.outliers)},
                      {"kurtosis", rounded(shape.kurtosis)}};
}

static json::Object toJSON(const Rotation &rotation) {
  return json::Object{{"tensor", rotation.name},
                      {"tokens", rotation.tokens},
                      {"channels", rotation.channels},
                      {"block", rotation.block},
                      {"before", toJSON(rotation.before)},
                      {"after", toJSON(rotation.after)},
                      {"after_aliased", toJSON(rotation.aliased)}};
}

static void print(llvm::raw_ostream &os, const Rotation &r) {
  os << "  " << llvm::left_justify(r.name, 22)
     << llvm::format("%6.3f %6.3f  %6.3f %6.3f  %6.3f %7.3f  %6.1f %6.1f  "
                     "%6.0f %6.0f\n",
                     r.before.entropy256, r.after.entropy256,
                     r.before.normalized64, r.after.normalized64, r.gain(),
                     r.aliasedGain(), r.before.peakToRms, r.after.peakToRms,
                     1e6 * r.before.outliers, 1e6 * r.after.outliers);
}

/// One file: prints its table, if wanted, and returns its JSON.
static Expected<json::Object> rotateFile(const std::string &path,
                                         int64_t channels, bool toPrint) {
  Expected<SafeTensors> file = SafeTensors::open(path);
  if (!file)
    return file.takeStatus();
  std::vector<Rotation> rotations;
  for (const std::string &name : file->names()) {
    Expected<Tensor> tensor = file->get(name);
    if (!tensor)
      return tensor.takeStatus();
    if (tensor->rank() != 2 || !isFloat(tensor->dtype()))
      continue;
    Expected<Rotation> rotation = rotate(path, name, *tensor, channels);
    if (!rotation)
      return rotation.takeStatus();
    rotations.push_back(std::move(*rotation));
  }
  if (rotations.empty())
    return Status::invalidArgument(
        path + ": expected a float tensor [tokens, channels], got none");

  Rotation mean;
  mean.name = "mean";
  json::Array rows;
  std::vector<double> gains, aliasedGains;
  for (const Rotation &each : rotations) {
    for (Shape Rotation::*shape :
         {&Rotation::before, &Rotation::after, &Rotation::aliased})
      for (double Shape::*field : Shape::kFields)
        mean.*shape.*field += each.*shape.*field / double(rotations.size());
    gains.push_back(each.gain());
    aliasedGains.push_back(each.aliasedGain());
    rows.push_back(toJSON(each));
  }
  auto positive = [](double gain) { return gain > 0; };
  int64_t gaining = llvm::count_if(gains, positive);
  int64_t aliasedGaining = llvm::count_if(aliasedGains, positive);
  std::string stem = llvm::sys::path::stem(path).str();
  if (toPrint) {
    llvm::raw_ostream &os = llvm::outs();
    os << "hadamard: " << stem << ", orthonormal over channels in blocks of "
       << rotations[0].block << "\n  " << llvm::left_justify("", 22)
       << "H, K=256 nats  normalised K=64  gain K=64 nats   peak/rms       "
          "> 6 sigma, ppm\n  "
       << llvm::left_justify("tensor", 22)
       << "before  after  before  after   right aliased  before  after  "
          "before  after\n";
    for (const Rotation &each : rotations)
      print(os, each);
    print(os, mean);
    os << "  entropy grows in " << gaining << " of " << rotations.size()
       << " tensors (aliased transform: " << aliasedGaining << ")\n\n";
  }
  return json::Object{
      {"file", stem},
      {"tensors", std::move(rows)},
      {"mean", json::Object{{"before", toJSON(mean.before)},
                            {"after", toJSON(mean.after)},
                            {"after_aliased", toJSON(mean.aliased)}}},
      {"gain_k64_nats", mean.gain()},
      {"gain_k64_nats_deviation", spreadOf(gains).deviation},
      {"tensors_gaining", gaining},
      {"gain_k64_nats_aliased", mean.aliasedGain()},
      {"gain_k64_nats_aliased_deviation", spreadOf(aliasedGains).deviation},
      {"tensors_gaining_aliased", aliasedGaining}};
}

//===----------------------------------------------------------------------===//
// paper
//===----------------------------------------------------------------------===//

/// Tables 11 and 33 with kernels that were compiled and run: whole blocks, and
/// chains of n operators.
static Expected<Table> measuredTable(llvm::StringRef id, Context &context) {
  Table table{id.str(),
              id == "11m"
                  ? "Fusion strategies on blocks of two models, measured "
                    "(f32, 2048 tokens)"
                  : "Fusion strategies on chains of pointwise operators, "
                    "measured (f32, 2048 x 512)",
              {}};
  auto add = [&](const std::string &name, const Workload &workload) -> Status {
    Expected<std::vector<FusionResult>> results =
        measureFusion(context, workload, /*budgetMs=*/400);
    if (!results)
      return results.takeStatus();
    for (const FusionResult &r : *results) {
      auto row = [&](const char *quantity, double value, int digits) {
        Row made;
        made.row = name + " " + r.strategy;
        made.quantity = quantity;
        made.ours = value;
        made.digits = digits;
        table.rows.push_back(made);
      };
      row("kernels", static_cast<double>(r.kernels), 0);
      row("MB moved", r.bytesMoved * 1e-6, 2);
      row("ms", r.medianMs, 3);
      row("rel l2 difference", r.relativeL2, 9);
    }
    return Status::ok();
  };
  if (id == "11m") {
    for (bool mamba2 : {false, true})
      if (Status status = add(mamba2 ? "mamba2" : "mamba1",
                              *makeBlock(mamba2, 2048, DType::F32));
          !status)
        return status;
    return table;
  }
  for (int64_t n : {4, 8, 16, 32, 64})
    if (Status status = add("n=" + std::to_string(n), makeChain(n, 2048));
        !status)
      return status;
  return table;
}

int corey::runPaper(int argc, char **argv) {
  cl::OptionCategory category("corey-bench paper options");
  cl::opt<std::string> target("target", cl::desc("Device to run on: cpu"),
                              cl::init("cpu"), cl::cat(category));
  cl::list<std::string> names(
      "table",
      cl::desc("1, 3, 11, 14, 20, 21, 22, 29, 33, figure1, theory, 11m and 33m "
               "(11 and 33 with kernels that run) or hadamard. May be "
               "given several times; default: all, hadamard if there "
               "are activations"),
      cl::value_desc("table"), cl::cat(category));
  cl::opt<std::string> referencePath(
      "reference",
      cl::desc("Reference results of the fusion experiments; default: those "
               "that are built in"),
      cl::value_desc("file"), cl::cat(category));
  cl::list<std::string> activations(
      "activations",
      cl::desc("Tensors [tokens, channels] for hadamard, a safetensors file. "
               "May be given several times"),
      cl::value_desc("file"), cl::cat(category));
  cl::opt<int64_t> channels(
      "channels",
      cl::desc("Transform the first so many channels; 0 (default) is all"),
      cl::init(0), cl::cat(category));
  cl::opt<std::string> jsonPath(
      "json",
      cl::desc("Write the results as JSON to a file, - for standard output in "
               "place of the tables"),
      cl::value_desc("file"), cl::cat(category));
  cl::HideUnrelatedOptions(category);
  cl::ParseCommandLineOptions(argc, argv,
                              "COREY: what the papers print, computed again\n");
  auto fail = [](std::string message) {
    return reportError(kTool, Status::invalidArgument(std::move(message)));
  };
  if (target != "cpu")
    return fail("--target: expected cpu, got '" + target + "'");
  if (channels < 0)
    return fail("--channels: expected at least 0, got " +
                std::to_string(channels));

  Expected<Reference> reference = readReference(referencePath);
  if (!reference)
    return reportError(kTool, reference.status());
  const std::pair<llvm::StringRef, std::function<Table()>> makers[] = {
      {"1", table1},
      {"3", table3},
      {"11", [&] { return table11(*reference); }},
      {"14", table14},
      {"20", table20},
      {"21", table21},
      {"29", table29},
      {"33", [&] { return table33(*reference); }},
      {"figure1", [&] { return figure1(*reference); }},
      {"theory", [&] { return theory(*reference); }}};
  llvm::StringMap<bool> wanted;
  for (const std::string &name : names) {
    // 14 and 22 print the same rule.
    llvm::StringRef canonical =
        name == "22" || name == "14/22" ? "14" : llvm::StringRef(name);
    if (canonical != "hadamard" && canonical != "11m" && canonical != "33m" &&
        llvm::none_of(
            makers, [&](const auto &each) { return each.first == canonical; }))
      return fail("--table: expected 1, 3, 11, 14, 20, 21, 22, 29, 33, "
                  "figure1, theory, 11m, 33m or hadamard, got '" +
                  name + "'");
    wanted[canonical] = true;
  }
  bool all = names.empty();
  bool rotating = wanted.contains("hadamard") || (all && !activations.empty());
  if (rotating && activations.empty())
    return fail("--table=hadamard: expected --activations, got none");
  if (!rotating && !activations.empty())
    return fail("--activations: expected --table=hadamard, got other tables");

  bool toStdout = jsonPath == "-", failed = false;
  json::Value document = describeRun(target);
  json::Object &root = *document.getAsObject();
  bool anyTable = all || wanted.size() > wanted.count("hadamard");
  if (anyTable) {
    Expected<Tally> policies = checkPolicies(*reference);
    if (!policies)
      return reportError(kTool, policies.status());
    Tally grid = checkGrid(*reference);
    for (const auto &[tally, what] :
         {std::pair(&*policies, "policies"), std::pair(&grid, "weightings")}) {
      failed |= tally->failed != 0;
      if (!toStdout) {
        for (const std::string &name : tally->failures)
          llvm::outs() << "FAIL " << name << "\n";
        llvm::outs() << "fusion " << what << ": " << tally->passed
                     << " passed, " << tally->failed << " failed\n";
      }
    }
    if (!toStdout)
      llvm::outs() << "\n";
    root["tier1"] = json::Object{{"passed", policies->passed},
                                 {"failed", policies->failed},
                                 {"grid_passed", grid.passed},
                                 {"grid_failed", grid.failed}};
    json::Object tables;
    for (const auto &[name, make] : makers) {
      if (!all && !wanted.contains(name))
        continue;
      Table table = make();
      failed |= llvm::any_of(table.rows, [](const Row &row) {
        return row.mustMatch && !row.matches();
      });
      if (!toStdout)
        print(llvm::outs(), table);
      tables[table.id] = toJSON(table);
    }
    std::shared_ptr<Context> context;
    for (llvm::StringRef name : {"11m", "33m"}) {
      if (!all && !wanted.contains(name))
        continue;
      if (!context) {
        auto made = Context::create();
        if (!made)
          return reportError(kTool, made.status());
        context = *made;
      }
      Expected<Table> table = measuredTable(name, *context);
      if (!table)
        return reportError(kTool, table.status());
      if (!toStdout)
        print(llvm::outs(), *table);
      tables[table->id] = toJSON(*table);
    }
    root["tables"] = std::move(tables);
  }
  if (rotating) {
    json::Array files;
    for (const std::string &path : activations) {
      Expected<json::Object> result = rotateFile(path, channels, !toStdout);
      if (!result)
        return reportError(kTool, result.status());
      files.push_back(std::move(*result));
    }
    root["hadamard"] = std::move(files);
  }
  if (!jsonPath.empty())
    if (int status = writeJSON(jsonPath, std::move(document)))
      return status;
  return failed;
}
