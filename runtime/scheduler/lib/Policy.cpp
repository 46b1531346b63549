//===- Policy.cpp - Who chooses a chunk -----------------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Scheduler/Policy.h"
#include "Json.h"
#include "Shipped.h"
#include "Splits.h"
#include "corey/Scheduler/ChunkRule.h"
#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <numeric>

using namespace corey;
using namespace corey::scheduler;

const char *const scheduler::kDefaultPolicy = "measured";

static std::string joined(const std::vector<std::string> &names) {
  std::string text;
  for (const std::string &name : names)
    text += (text.empty() ? "" : ", ") + name;
  return text;
}

static std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4g", value);
  return text;
}

std::string Decision::explain() const {
  auto tokens = std::to_string(other);
  switch (reason) {
  case Reason::Unsplit:
    return "unsplit";
  case Reason::Static:
    return "constant";
  case Reason::Entropy:
    return "entropy " + number(value) + " nats";
  case Reason::Proxy:
    return "proxy " + number(value) + " nats";
  case Reason::Midpoint:
    return "middle of the entropies";
  case Reason::Random:
    return "drawn";
  case Reason::TableRule:
    return "rule " + tokens + " of the table";
  case Reason::TableDefault:
    return "default of the table";
  case Reason::GuardPassed:
    return "guard passed, " + number(value) + " powers of two from " + tokens;
  case Reason::GuardHeld:
    return "guard kept to the fallback in place of " + tokens;
  case Reason::GuardGain:
    return "guard passed, predicted to save " + number(value) + " ms over " +
           tokens;
  case Reason::GuardNoGain:
    return "guard kept to the fallback, " + tokens + " predicted to save " +
           number(value) + " ms";
  case Reason::Model:
    return "predicted " + number(value) + " ms";
  case Reason::Measured:
    return "measured " + number(value) + " ms at length " + tokens;
  case Reason::Filled:
    return "no cost model for the device, which " + tokens + " segments fill";
  case Reason::NoStatistics:
    return "no statistics yet";
  case Reason::NotFinite:
    return "statistics not finite";
  case Reason::EmptyStatistics:
    return "statistics of no elements";
  case Reason::TooShort:
    return "shorter than " + tokens + " tokens";
  case Reason::NoModel:
    return "no cost model for the device";
  case Reason::Requested:
    return "set by the caller";
  }
  return "unknown";
}

Policy::~Policy() = default;
std::optional<EstimatorOptions> Policy::statistics() const {
  return std::nullopt;
}

static int64_t unitsOf(const Query &query) {
  return query.units > 0 ? query.units : query.device->units;
}

static int64_t wholeLength(const Query &query) {
  return std::max<int64_t>(query.problem.length, 1);
}

static Decision unsplit(const Query &query, Reason reason, int64_t other = 0) {
  Decision decision;
  decision.chunk = wholeLength(query);
  decision.reason = reason;
  decision.other = other;
  return decision;
}

Decision Policy::decide(const Query &query) const {
  Decision decision = choose(query);
  // Kernels take whole tiles; a chunk that covers the sequence needs none.
  int64_t granularity = query.variants[decision.variant].granularity;
  if (granularity > 1 && decision.chunk < query.problem.length)
    decision.chunk =
        (decision.chunk + granularity - 1) / granularity * granularity;
  return decision;
}

//===----------------------------------------------------------------------===//
// Rules of statistics
//===----------------------------------------------------------------------===//

namespace corey::scheduler {
namespace {
class UnsplitPolicy : public Policy {
  Decision choose(const Query &query) const override {
    return unsplit(query, Reason::Unsplit);
  }
};

class StaticPolicy : public Policy {
public:
  explicit StaticPolicy(int64_t chunk) : chunk(chunk) {}

private:
  Decision choose(const Query &) const override {
    Decision decision;
    decision.chunk = chunk;
    decision.reason = Reason::Static;
    return decision;
  }
  int64_t chunk;
};

/// What policies with a rule share.
struct RuleOptions {
  ChunkRule rule = *ChunkRule::named("unified");
  int bins = 256;
  int64_t minLength = 16;
  bool smooth = false;
};

class RulePolicy : public Policy {
protected:
  explicit RulePolicy(const RuleOptions &options) : options(options) {}

  /// Whether to decide on statistics at all; fills `refusal` if not.
  bool mayDecide(const Query &query, Decision &refusal) const {
    Reason reason;
    if (!query.statistics)
      reason = Reason::NoStatistics;
    else if (query.statistics->validity == Validity::NonFinite)
      reason = Reason::NotFinite;
    else if (query.statistics->validity == Validity::Empty)
      reason = Reason::EmptyStatistics;
    else
      return true;
    refusal = unsplit(query, reason);
    refusal.usedData = query.statistics != nullptr;
    return false;
  }
  Decision fromEntropy(const Query &query, double entropy, Reason reason,
                       bool usedData) const {
    std::optional<int64_t> chunk =
        options.rule.chunk(Nats(entropy), options.bins);
    Decision decision;
    if (!chunk) {
      decision = unsplit(query, Reason::NotFinite);
      decision.usedData = usedData;
      return decision;
    }
    decision.chunk = *chunk;
    decision.reason = reason;
    decision.value = entropy;
    decision.usedData = usedData;
    return decision;
  }
  bool tooShort(const Query &query, Decision &decision) const {
    if (query.problem.length >= options.minLength)
      return false;
    decision = unsplit(query, Reason::TooShort, options.minLength);
    return true;
  }
  const RuleOptions options;
};

/// `entropy`, `sampled`, `token`.
class EntropyPolicy : public RulePolicy {
public:
  EntropyPolicy(const RuleOptions &options, Sampling sampling, int64_t stride,
                int64_t layerStride)
      : RulePolicy(options) {
    estimator.layerStride = layerStride;
    estimator.bins = options.bins;
    estimator.sampling = sampling;
    estimator.stride = stride;
  }
  std::optional<EstimatorOptions> statistics() const override {
    return estimator;
  }

private:
  Decision choose(const Query &query) const override {
    Decision decision;
    if (tooShort(query, decision) || !mayDecide(query, decision))
      return decision;
    double entropy = query.statistics->entropy.value();
    if (options.smooth && query.averageEntropy == query.averageEntropy)
      entropy = query.averageEntropy;
    return fromEntropy(query, entropy, Reason::Entropy, true);
  }
  EstimatorOptions estimator;
};

/// `cheap`, `variance`, `kurtosis`: numbers that are easier to have than an
/// entropy, put in its place.
class ProxyPolicy : public RulePolicy {
public:
  enum class Proxy { Cheap, Variance, Kurtosis };
  ProxyPolicy(const RuleOptions &options, Proxy proxy)
      : RulePolicy(options), proxy(proxy) {}
  std::optional<EstimatorOptions> statistics() const override {
    EstimatorOptions estimator;
    estimator.bins = options.bins;
    return estimator;
  }

private:
  Decision choose(const Query &query) const override {
    Decision decision;
    if (tooShort(query, decision) || !mayDecide(query, decision))
      return decision;
    const Statistics &s = *query.statistics;
    double ratio = 0;
    switch (proxy) {
    case Proxy::Cheap:
      ratio = std::clamp(
          // sqrt(rms^2 + 1e-8), where the square may overflow.
          s.meanAbsolute / (std::hypot(s.rms, 1e-4) + 1e-8), 0.0, 1.0);
      break;
    case Proxy::Variance: {
      double sigma = std::sqrt(s.variance + 1e-8);
      ratio = std::clamp(sigma / (s.meanAbsolute + sigma + 1e-8), 0.0, 1.0);
      break;
    }
    case Proxy::Kurtosis: {
      double var = s.variance + 1e-8;
      double excess =
          std::max(s.kurtosis * s.variance / var * (s.variance / var) - 3, 0.0);
      ratio = 1 - std::exp(-excess / 8);
      break;
    }
    }
    return fromEntropy(query, ratio * Nats::ceiling(options.bins).value(),
                       Reason::Proxy, true);
  }
  Proxy proxy;
};

class MidpointPolicy : public RulePolicy {
public:
  explicit MidpointPolicy(const RuleOptions &options) : RulePolicy(options) {}

private:
  Decision choose(const Query &query) const override {
    Decision decision;
    if (tooShort(query, decision))
      return decision;
    return fromEntropy(query, 0.5 * Nats::ceiling(options.bins).value(),
                       Reason::Midpoint, false);
  }
};

/// A power of two of the rule's range, by the seed and the number of the call.
class RandomPolicy : public RulePolicy {
public:
  RandomPolicy(const RuleOptions &options, uint64_t seed)
      : RulePolicy(options), seed(seed) {
    for (int64_t c = 1; c <= options.rule.maximum(); c *= 2)
      if (c >= options.rule.minimum())
        chunks.push_back(c);
    if (chunks.empty())
      chunks.push_back(options.rule.minimum());
  }

private:
  Decision choose(const Query &query) const override {
    Decision decision;
    if (tooShort(query, decision))
      return decision;
    // splitmix64.
    uint64_t z =
        seed * 0x9e3779b97f4a7c15 + (query.call + 1) * 0xd1342543de82ef95;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    z ^= z >> 31;
    decision.chunk = chunks[z % chunks.size()];
    decision.reason = Reason::Random;
    return decision;
  }
  uint64_t seed;
  std::vector<int64_t> chunks;
};

//===----------------------------------------------------------------------===//
// Ordered rules
//===----------------------------------------------------------------------===//

/// Bounds are inclusive; one on a feature that is missing matches nothing.
struct OrderedRule {
  std::optional<int64_t> minLayer, maxLayer, minLength, maxLength;
  std::optional<double> minEntropy, maxEntropy;
  int64_t chunk = 0;
};

class TablePolicy : public Policy {
public:
  TablePolicy(std::vector<OrderedRule> rules, int64_t defaultChunk)
      : rules(std::move(rules)), defaultChunk(defaultChunk) {}

  /// Statistics are gathered only if a rule asks for them.
  std::optional<EstimatorOptions> statistics() const override {
    for (const OrderedRule &rule : rules)
      if (rule.minEntropy || rule.maxEntropy) {
        EstimatorOptions estimator;
        estimator.sampling = Sampling::Strided;
        estimator.stride = 8;
        return estimator;
      }
    return std::nullopt;
  }

private:
  template <typename T>
  static bool within(std::optional<T> low, std::optional<T> high, bool known,
                     T value) {
    if (!low && !high)
      return true;
    return known && (!low || *low <= value) && (!high || value <= *high);
  }

  Decision choose(const Query &query) const override {
    bool hasEntropy = query.statistics && query.statistics->usable();
    double entropy = hasEntropy ? query.statistics->entropy.value() : 0;
    Decision decision;
    for (size_t i = 0; i < rules.size(); ++i) {
      const OrderedRule &rule = rules[i];
      if (!within<int64_t>(rule.minLayer, rule.maxLayer, query.layer >= 0,
                           query.layer) ||
          !within<int64_t>(rule.minLength, rule.maxLength, true,
                           query.problem.length) ||
          !within<double>(rule.minEntropy, rule.maxEntropy, hasEntropy,
                          entropy))
        continue;
      decision.chunk = rule.chunk;
      decision.reason = Reason::TableRule;
      decision.other = static_cast<int64_t>(i);
      decision.usedData = rule.minEntropy || rule.maxEntropy;
      return decision;
    }
    decision.chunk = defaultChunk;
    decision.reason = Reason::TableDefault;
    return decision;
  }
  std::vector<OrderedRule> rules;
  int64_t defaultChunk;
};

//===----------------------------------------------------------------------===//
// Times
//===----------------------------------------------------------------------===//

/// What is mostly best where nothing is known but the sizes: segments of an SSD
/// that just fill the device once, as one more would start another wave, and
/// none where it is filled more than half anyway. As measured on an H200 with a
/// kernel that goes twice over what it splits.
static Decision fillDevice(const Query &query) {
  // Two tiles at least, as the second pass costs more than half of the first;
  // and eight of the sequence, unless most of the device would idle.
  constexpr int64_t kLeastTokens = 2 * 64, kShort = 8 * 64;
  Decision decision = unsplit(query, Reason::NoModel);
  const Problem &p = query.problem;
  if (p.op != OpKind::SSD)
    return decision;
  // The first stands for what is to run; one by rule, for the next.
  int v = query.numVariants > 1 && query.variants[0].byRule ? 1 : 0;
  const Variant &variant = query.variants[v];
  if (!variant.segmented)
    return decision;
  Splits splits(p, variant, unitsOf(query));
  int64_t segments = splits.slots / splits.blocks;
  if (segments < 2 || (p.length < kShort && splits.blocks > splits.slots / 4))
    return decision;
  int64_t chunk =
      std::max(splits.chunkOf(segments),
               Splits::divide(kLeastTokens, splits.unit) * splits.unit);
  if (chunk >= p.length)
    return decision;
  decision.chunk = chunk;
  decision.variant = v;
  decision.reason = Reason::Filled;
  decision.other = Splits::divide(p.length, chunk);
  return decision;
}

/// The least predicted time over the chunks that can be best.
class CostModelPolicy : public Policy {
public:
  CostModelPolicy(std::shared_ptr<const CostModel> model, double margin)
      : model(std::move(model)), margin(margin) {}

private:
  Decision choose(const Query &query) const override {
    const Problem &p = query.problem;
    Decision best = unsplit(query, Reason::NoModel);
    if (p.channels < 1 || p.states < 1)
      return best;
    double bestMs = NAN, unsplitMs = NAN;
    Decision whole = best;
    for (int v = 0; v < query.numVariants; ++v) {
      const Variant &variant = query.variants[v];
      if (variant.byRule && query.numVariants > 1)
        continue;
      const ModelEntry *entry =
          model->find(*query.device, p.op, p.type, variant.name);
      if (!entry)
        continue;
      CostModel::Curve curve(*entry, p, variant, unitsOf(query));
      auto consider = [&](int64_t chunk) {
        double ms = curve.predict(chunk);
        // Comparisons with NaN are false: the first is taken.
        if (bestMs <= ms)
          return;
        bestMs = ms;
        best.chunk = chunk ? chunk : wholeLength(query);
        best.variant = v;
      };
      double ms = curve.predict(0);
      if (!(unsplitMs <= ms)) {
        unsplitMs = ms;
        whole.variant = v;
      }
      consider(0);
      if (variant.segmented && p.op == OpKind::SSD) {
        // More than fill the device twice only carry more, but where the last
        // wave of many is not full, a few may.
        Splits splits(p, variant, unitsOf(query));
        splits.forEachChunk(
            std::max<int64_t>(2 * splits.slots / splits.blocks, 3), consider);
        continue;
      }
      // Where one item walks all chunks, a chunk of a tile or more only adds
      // pieces.
      int64_t end =
          variant.segmented ? p.length : std::min(p.length, variant.tile);
      int64_t step = std::max<int64_t>(variant.granularity, 1);
      auto roundTo = [](int64_t unit, int64_t chunk) {
        return (chunk + unit - 1) / unit * unit;
      };
      for (int64_t chunk = std::max<int64_t>(8, step); chunk < end; chunk *= 2)
        consider(roundTo(step, chunk));
      if (!variant.segmented)
        continue;
      // And those that just fill one wave, or two: one more segment would start
      // another. In whole tiles, where a part of one costs as much and is no
      // great part of the chunk.
      int64_t tiles = step * variant.tile /
                      std::gcd(step, std::max<int64_t>(variant.tile, 1));
      int64_t perSegment = p.batch * ((p.channels + variant.itemChannels - 1) /
                                      variant.itemChannels);
      for (int64_t waves : {1, 2}) {
        int64_t segments = waves * unitsOf(query) * variant.resident /
                           std::max<int64_t>(perSegment, 1);
        if (segments < 2)
          continue;
        int64_t least =
            std::max<int64_t>((p.length + segments - 1) / segments, 8);
        int64_t chunk = roundTo(4 * tiles <= least ? tiles : step, least);
        if (chunk < p.length)
          consider(chunk);
      }
    }
    if (bestMs != bestMs)
      return fillDevice(query);
    if (!(bestMs < unsplitMs * (1 - margin))) {
      best = whole;
      bestMs = unsplitMs;
    }
    best.reason = Reason::Model;
    best.predictedMs = best.value = bestMs;
    return best;
  }
  std::shared_ptr<const CostModel> model;
  double margin;
};

class MeasuredPolicy : public Policy {
public:
  MeasuredPolicy(std::shared_ptr<const ChunkTable> table,
                 std::shared_ptr<const Policy> inner)
      : table(std::move(table)), inner(std::move(inner)) {}
  std::optional<EstimatorOptions> statistics() const override {
    return inner->statistics();
  }

private:
  Decision choose(const Query &query) const override {
    if (const TableEntry *entry =
            table->find(*query.device, query.problem, query.units)) {
      const MeasuredCandidate &best = entry->best();
      for (int v = 0; v < query.numVariants; ++v) {
        if (query.variants[v].name != best.variant)
          continue;
        Decision decision;
        decision.chunk = best.chunk ? best.chunk : wholeLength(query);
        decision.variant = v;
        // Times grow with the work that is not in the sizes of the entry.
        double scale =
            static_cast<double>(query.problem.batch * wholeLength(query)) /
            static_cast<double>(std::max<int64_t>(
                entry->problem.batch * entry->problem.length, 1));
        decision.predictedMs = best.medianMs * scale;
        decision.reason = Reason::Measured;
        decision.value = best.medianMs;
        decision.other = entry->problem.length;
        return decision;
      }
    }
    return inner->decide(query);
  }
  std::shared_ptr<const ChunkTable> table;
  std::shared_ptr<const Policy> inner;
};
} // namespace

//===----------------------------------------------------------------------===//
// The guard
//===----------------------------------------------------------------------===//

class GuardedPolicy : public Policy {
public:
  GuardedPolicy(std::shared_ptr<const Policy> inner, int64_t fallback,
                int64_t delta, bool byGain, double margin,
                std::optional<double> costMs,
                std::shared_ptr<const CostModel> model)
      : inner(std::move(inner)), fallback(fallback), delta(delta),
        byGain(byGain), margin(margin), costMs(costMs),
        model(std::move(model)) {}
  std::optional<EstimatorOptions> statistics() const override {
    return inner->statistics();
  }

private:
  static bool decidedNothing(Reason reason) {
    return reason == Reason::NoStatistics || reason == Reason::NotFinite ||
           reason == Reason::EmptyStatistics || reason == Reason::NoModel;
  }

  Decision choose(const Query &query) const override {
    Decision choice = inner->decide(query);
    if (choice.reason == Reason::TooShort)
      return choice;
    Decision held = choice;
    held.chunk = fallback ? fallback : wholeLength(query);
    held.variant = 0;
    held.predictedMs = NAN;
    // An inner policy without anything to decide on says why itself.
    if (decidedNothing(choice.reason))
      return held;
    if (!byGain) {
      double distance = std::fabs(
          std::nearbyint(std::log2(static_cast<double>(choice.chunk))) -
          std::nearbyint(std::log2(static_cast<double>(held.chunk))));
      if (distance < static_cast<double>(delta)) {
        held.reason = Reason::GuardHeld;
        held.other = choice.chunk;
        return held;
      }
      choice.reason = Reason::GuardPassed;
      choice.value = distance;
      choice.other = held.chunk;
      return choice;
    }
    const Problem &p = query.problem;
    auto entryOf = [&](const Variant &variant) {
      return p.channels < 1 || p.states < 1
                 ? nullptr
                 : model->find(*query.device, p.op, p.type, variant.name);
    };
    auto predict = [&](const ModelEntry *entry, const Decision &d) -> double {
      if (entry)
        return CostModel::Curve(*entry, p, query.variants[d.variant],
                                unitsOf(query))
            .predict(d.chunk);
      if (!query.variants[d.variant].byRule)
        return NAN;
      // The rule is taken to choose well.
      double best = NAN;
      for (int v = 0; v < query.numVariants; ++v) {
        const ModelEntry *other = entryOf(query.variants[v]);
        if (query.variants[v].byRule || !other)
          continue;
        double ms =
            CostModel::Curve(*other, p, query.variants[v], unitsOf(query))
                .predict(query.variants[v].segmented ? d.chunk : 0);
        // Only where the chunk means something to it.
        if (query.variants[v].segmented || d.chunk >= p.length)
          best = best <= ms ? best : ms;
      }
      return best;
    };
    // Mostly both run the same kernel.
    const ModelEntry *entry = entryOf(query.variants[held.variant]);
    double heldMs = predict(entry, held);
    double chosenMs = predict(choice.variant == held.variant
                                  ? entry
                                  : entryOf(query.variants[choice.variant]),
                              choice);
    if (chosenMs != chosenMs || heldMs != heldMs) {
      held.reason = Reason::NoModel;
      return held;
    }
    double gain = heldMs - chosenMs, cost = costMs ? *costMs
                                            : choice.usedData
                                                ? query.statisticsMs
                                                : 0;
    if (gain > cost + margin * heldMs) {
      choice.reason = Reason::GuardGain;
      choice.other = held.chunk;
      choice.value = gain;
      choice.predictedMs = chosenMs;
      return choice;
    }
    held.reason = Reason::GuardNoGain;
    held.other = choice.chunk;
    held.value = gain;
    held.predictedMs = heldMs;
    return held;
  }

  std::shared_ptr<const Policy> inner;
  int64_t fallback, delta;
  bool byGain;
  double margin;
  std::optional<double> costMs;
  std::shared_ptr<const CostModel> model;
};
} // namespace corey::scheduler

//===----------------------------------------------------------------------===//
// Specifications
//===----------------------------------------------------------------------===//

const std::vector<std::string> &scheduler::policyNames() {
  static const std::vector<std::string> names = {
      "unsplit",  "static", "entropy",    "sampled",  "token",
      "midpoint", "random", "cheap",      "variance", "kurtosis",
      "guarded",  "table",  "cost-model", "measured"};
  return names;
}

static Expected<std::shared_ptr<Policy>> readRules(std::string_view text,
                                                   std::string_view name) {
  Expected<json::Document> document = json::Document::parse(text, name);
  if (!document)
    return document.takeStatus();
  json::Object root = document->root().object();
  json::checkHeader(root, "corey-chunk-rules", 1);
  json::Array list = root.array("rules");
  std::vector<OrderedRule> rules;
  for (size_t i = 0; i < list.size() && document->isOk(); ++i) {
    json::Object object = list[i].object();
    OrderedRule rule;
    auto integer = [&](const char *field, std::optional<int64_t> &bound) {
      if (object.has(field))
        bound = object.integer(field, 0);
    };
    auto real = [&](const char *field, std::optional<double> &bound) {
      if (object.has(field))
        bound = object.number(field, 0);
    };
    integer("min_layer", rule.minLayer);
    integer("max_layer", rule.maxLayer);
    integer("min_length", rule.minLength);
    integer("max_length", rule.maxLength);
    real("min_entropy", rule.minEntropy);
    real("max_entropy", rule.maxEntropy);
    rule.chunk = object.integer("chunk", 1, int64_t(1) << 40);
    object.finish();
    rules.push_back(rule);
  }
  int64_t defaultChunk =
      root.integerOr("default_chunk", 512, 1, int64_t(1) << 40);
  root.finish();
  if (!document->isOk())
    return document->status();
  return std::shared_ptr<Policy>(
      std::make_shared<TablePolicy>(std::move(rules), defaultChunk));
}

namespace {
/// Options of a specification, taken one by one; what is left is unknown.
class SpecOptions {
public:
  static Expected<SpecOptions> parse(std::string_view spec) {
    SpecOptions result;
    size_t colon = spec.find(':');
    result.name = std::string(spec.substr(0, colon));
    if (colon == std::string_view::npos)
      return result;
    std::string_view rest = spec.substr(colon + 1);
    std::string item;
    int depth = 0;
    auto finish = [&]() -> Status {
      size_t equals = std::string::npos;
      int level = 0;
      for (size_t i = 0; i < item.size(); ++i) {
        level += item[i] == '[' ? 1 : item[i] == ']' ? -1 : 0;
        if (item[i] == '=' && level == 0) {
          equals = i;
          break;
        }
      }
      std::string key, value = item;
      if (equals != std::string::npos) {
        key = item.substr(0, equals);
        value = item.substr(equals + 1);
        if (key.empty())
          return result.error("a name for every option", "'" + item + "'");
      } else if (!result.items.empty()) {
        return result.error("options as key=value", "'" + item + "'");
      }
      if (value.size() >= 2 && value.front() == '[' && value.back() == ']')
        value = value.substr(1, value.size() - 2);
      if (value.empty())
        return result.error("a value for every option", "'" + item + "'");
      for (const Item &other : result.items)
        if (other.key == key)
          return result.error("option '" + key + "' once", "it again");
      result.items.push_back({key, value});
      item.clear();
      return Status::ok();
    };
    for (char c : rest) {
      depth += c == '[' ? 1 : c == ']' ? -1 : 0;
      if (depth < 0)
        break;
      if (c == ',' && depth == 0) {
        if (Status status = finish(); !status)
          return status;
        continue;
      }
      item += c;
    }
    if (depth != 0)
      return result.error("brackets in pairs", "'" + std::string(rest) + "'");
    if (Status status = finish(); !status)
      return status;
    return result;
  }

  Status error(const std::string &expected, const std::string &got) const {
    return Status::invalidArgument("policy '" + name + "': expected " +
                                   expected + ", got " + got);
  }

  /// The value of `key`; an item without a key stands for `positional`.
  std::optional<std::string> take(const char *key, bool positional = false) {
    known += (known.empty() ? "" : ", ") + std::string(key);
    for (size_t i = 0; i < items.size(); ++i)
      if (items[i].key == key || (positional && items[i].key.empty())) {
        std::string value = items[i].value;
        items.erase(items.begin() + static_cast<ptrdiff_t>(i));
        return value;
      }
    return std::nullopt;
  }
  Status takeInteger(const char *key, int64_t least, int64_t most,
                     int64_t &value, bool positional = false) {
    std::optional<std::string> text = take(key, positional);
    if (!text)
      return Status::ok();
    int64_t parsed = 0;
    auto [end, code] =
        std::from_chars(text->data(), text->data() + text->size(), parsed);
    if (code != std::errc() || end != text->data() + text->size() ||
        parsed < least || parsed > most)
      return error(std::string(key) + " to be an integer from " +
                       std::to_string(least) + " to " + std::to_string(most),
                   "'" + *text + "'");
    value = parsed;
    return Status::ok();
  }
  Status takeNumber(const char *key, double least, double &value) {
    std::optional<std::string> text = take(key);
    if (!text)
      return Status::ok();
    // Whatever the locale of the process is.
    double parsed = 0;
    auto [end, code] =
        std::from_chars(text->data(), text->data() + text->size(), parsed);
    if (code != std::errc() || end != text->data() + text->size() ||
        !std::isfinite(parsed) || parsed < least)
      return error(std::string(key) + " to be a number of at least " +
                       number(least),
                   "'" + *text + "'");
    value = parsed;
    return Status::ok();
  }
  Status done() const {
    if (items.empty())
      return Status::ok();
    return error(known.empty() ? "no options" : "an option of " + known,
                 items.front().key.empty() ? "'" + items.front().value + "'"
                                           : "'" + items.front().key + "'");
  }

  std::string name;

private:
  struct Item {
    std::string key, value;
  };
  std::vector<Item> items;
  std::string known;
};

Status takeRule(SpecOptions &spec, RuleOptions &options, bool drawsRange) {
  std::optional<std::string> named = spec.take("rule");
  if (named) {
    Expected<ChunkRule> rule = ChunkRule::named(*named);
    if (!rule)
      return spec.error("a rule of " + joined(ChunkRule::names()),
                        "'" + *named + "'");
    options.rule = *rule;
  }
  constexpr int64_t kLargest = int64_t(1) << 40;
  int64_t least = 0, most = 0, bins = options.bins, smooth = 0;
  double reference = -1;
  if (Status s = spec.takeInteger("c_min", 1, kLargest, least); !s)
    return s;
  if (Status s = spec.takeInteger("c_max", 1, kLargest, most); !s)
    return s;
  if (!drawsRange)
    if (Status s = spec.takeNumber("h_ref", 0, reference); !s)
      return s;
  if (least || most || reference >= 0) {
    if (options.rule.kind() != ChunkRule::Kind::PowerOfTwo)
      return spec.error("c_min, c_max and h_ref with a power-of-two rule only",
                        "rule '" + options.rule.name() + "'");
    Expected<ChunkRule> rule = ChunkRule::powerOfTwo(
        least ? least : options.rule.minimum(),
        most ? most : options.rule.maximum(),
        reference >= 0 ? reference : options.rule.reference());
    if (!rule)
      return Status::invalidArgument("policy '" + spec.name +
                                     "': " + rule.status().message());
    options.rule = *rule;
  }
  if (!drawsRange) {
    if (Status s = spec.takeInteger("bins", 2, 65536, bins); !s)
      return s;
  }
  options.bins = static_cast<int>(bins);
  if (Status s = spec.takeInteger("min_length", 0, kLargest, options.minLength);
      !s)
    return s;
  if (spec.name == "entropy" || spec.name == "sampled" || spec.name == "token")
    if (Status s = spec.takeInteger("smooth", 0, 1, smooth); !s)
      return s;
  options.smooth = smooth;
  return Status::ok();
}

Expected<std::shared_ptr<Policy>> build(SpecOptions &spec,
                                        const PolicyContext &context) {
  auto inner = [&](const std::string &text) {
    return parsePolicy(text, context);
  };
  const std::string &name = spec.name;
  auto model = [&]() -> std::shared_ptr<const CostModel> {
    if (context.model)
      return context.model;
    return std::shared_ptr<const CostModel>(std::shared_ptr<void>(),
                                            &CostModel::shipped());
  };
  constexpr int64_t kLargest = int64_t(1) << 40;
  if (name == "unsplit")
    return std::shared_ptr<Policy>(std::make_shared<UnsplitPolicy>());
  if (name == "static") {
    int64_t chunk = 0;
    if (Status s = spec.takeInteger("chunk", 1, kLargest, chunk, true); !s)
      return s;
    if (!chunk)
      return spec.error("a number of tokens, as in 'static:256'", "none");
    return std::shared_ptr<Policy>(std::make_shared<StaticPolicy>(chunk));
  }
  if (name == "entropy" || name == "sampled" || name == "token") {
    RuleOptions options;
    int64_t stride = name == "entropy" ? 1 : 8;
    if (name != "entropy")
      if (Status s = spec.takeInteger("stride", 1, kLargest, stride, true); !s)
        return s;
    int64_t layerStride = 1;
    if (Status s = spec.takeInteger("layers", 1, kLargest, layerStride); !s)
      return s;
    if (Status s = takeRule(spec, options, false); !s)
      return s;
    Sampling sampling = name == "entropy" ? Sampling::Full
                        : name == "token" ? Sampling::Token
                                          : Sampling::Strided;
    return std::shared_ptr<Policy>(std::make_shared<EntropyPolicy>(
        options, sampling, stride, layerStride));
  }
  if (name == "cheap" || name == "variance" || name == "kurtosis") {
    RuleOptions options;
    if (Status s = takeRule(spec, options, false); !s)
      return s;
    auto proxy = name == "cheap"      ? ProxyPolicy::Proxy::Cheap
                 : name == "variance" ? ProxyPolicy::Proxy::Variance
                                      : ProxyPolicy::Proxy::Kurtosis;
    return std::shared_ptr<Policy>(
        std::make_shared<ProxyPolicy>(options, proxy));
  }
  if (name == "midpoint") {
    RuleOptions options;
    if (Status s = takeRule(spec, options, false); !s)
      return s;
    return std::shared_ptr<Policy>(std::make_shared<MidpointPolicy>(options));
  }
  if (name == "random") {
    RuleOptions options;
    int64_t seed = 0;
    if (Status s = spec.takeInteger("seed", 0, INT64_MAX, seed, true); !s)
      return s;
    if (Status s = takeRule(spec, options, true); !s)
      return s;
    return std::shared_ptr<Policy>(
        std::make_shared<RandomPolicy>(options, static_cast<uint64_t>(seed)));
  }
  if (name == "guarded") {
    std::string innerSpec = spec.take("inner", true).value_or("sampled");
    std::string mode = spec.take("mode").value_or("buckets");
    if (mode != "buckets" && mode != "gain")
      return spec.error("mode to be 'buckets' or 'gain'", "'" + mode + "'");
    int64_t fallback = 512, delta = 2;
    double margin = 0.02, cost = -1;
    std::optional<std::string> text = spec.take("fallback");
    if (text && *text == "unsplit") {
      fallback = 0;
    } else if (text) {
      auto [end, code] =
          std::from_chars(text->data(), text->data() + text->size(), fallback);
      if (code != std::errc() || end != text->data() + text->size() ||
          fallback < 1 || fallback > kLargest)
        return spec.error(
            "fallback to be 'unsplit' or a number of tokens of at least 1",
            "'" + *text + "'");
    }
    if (mode == "buckets") {
      if (Status s = spec.takeInteger("delta", 0, 64, delta); !s)
        return s;
    } else {
      if (Status s = spec.takeNumber("margin", 0, margin); !s)
        return s;
      if (Status s = spec.takeNumber("cost_us", 0, cost); !s)
        return s;
    }
    auto policy = inner(innerSpec);
    if (!policy)
      return policy.takeStatus();
    return std::shared_ptr<Policy>(std::make_shared<GuardedPolicy>(
        *policy, fallback, delta, mode == "gain", margin,
        cost >= 0 ? std::optional<double>(cost * 1e-3) : std::nullopt,
        model()));
  }
  if (name == "table") {
    std::optional<std::string> path = spec.take("file", true);
    if (!path) {
      const char *shipped = shippedFile("chunk-rules-paper.json");
      return readRules(shipped ? shipped : "", "chunk-rules-paper.json");
    }
    Expected<std::string> text = json::readFile(*path);
    if (!text)
      return text.takeStatus();
    return readRules(*text, *path);
  }
  if (name == "cost-model") {
    double margin = 0.05;
    if (Status s = spec.takeNumber("margin", 0, margin); !s)
      return s;
    std::shared_ptr<const CostModel> costs = model();
    if (std::optional<std::string> path = spec.take("file", true)) {
      Expected<CostModel> loaded = CostModel::load(*path);
      if (!loaded)
        return loaded.takeStatus();
      costs = std::make_shared<CostModel>(std::move(*loaded));
    }
    return std::shared_ptr<Policy>(
        std::make_shared<CostModelPolicy>(std::move(costs), margin));
  }
  if (name == "measured") {
    std::shared_ptr<const ChunkTable> table = context.table;
    if (std::optional<std::string> path = spec.take("file", true)) {
      Expected<ChunkTable> loaded = ChunkTable::load(*path);
      if (!loaded)
        return loaded.takeStatus();
      table = std::make_shared<ChunkTable>(std::move(*loaded));
    }
    if (!table)
      table = std::shared_ptr<const ChunkTable>(std::shared_ptr<void>(),
                                                &ChunkTable::shipped());
    auto policy = inner(spec.take("inner").value_or("cost-model"));
    if (!policy)
      return policy.takeStatus();
    return std::shared_ptr<Policy>(
        std::make_shared<MeasuredPolicy>(std::move(table), *policy));
  }
  return Status::invalidArgument(
      "expected a policy of " + joined(policyNames()) + ", got '" + name + "'");
}
} // namespace

Expected<std::shared_ptr<const Policy>>
scheduler::parsePolicy(std::string_view text, const PolicyContext &context) {
  // Brackets nest policies; nobody means more than a few.
  if (std::count(text.begin(), text.end(), '[') > 16)
    return Status::invalidArgument(
        "expected a policy of at most 16 brackets, got more");
  Expected<SpecOptions> spec = SpecOptions::parse(text);
  if (!spec)
    return spec.takeStatus();
  Expected<std::shared_ptr<Policy>> policy = build(*spec, context);
  if (!policy)
    return policy.takeStatus();
  if (Status status = spec->done(); !status)
    return status;
  (*policy)->text = std::string(text);
  return std::shared_ptr<const Policy>(std::move(*policy));
}

Expected<std::shared_ptr<const Policy>>
scheduler::parseRules(std::string_view text, std::string_view name) {
  Expected<std::shared_ptr<Policy>> policy = readRules(text, name);
  if (!policy)
    return policy.takeStatus();
  (*policy)->text = "table";
  return std::shared_ptr<const Policy>(std::move(*policy));
}
