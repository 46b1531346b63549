//===- Simulator.cpp - Policies over a trace of calls ---------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Scheduler/Simulator.h"
#include "corey/Scheduler/Estimator.h"
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <map>
#include <unordered_map>

using namespace corey;
using namespace corey::scheduler;

namespace {
/// splitmix64: the same numbers everywhere.
class Generator {
public:
  explicit Generator(uint64_t seed) : state(seed) {}
  uint64_t next() {
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  uint64_t below(uint64_t bound) { return next() % bound; }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  double normal() {
    double u = std::max(uniform(), 1e-300), v = uniform();
    return std::sqrt(-2 * std::log(u)) * std::cos(6.283185307179586 * v);
  }

private:
  uint64_t state;
};

template <typename T> void shuffle(std::vector<T> &list, Generator &generator) {
  for (size_t i = list.size(); i > 1; --i)
    std::swap(list[i - 1], list[generator.below(i)]);
}
} // namespace

//===----------------------------------------------------------------------===//
// Texts
//===----------------------------------------------------------------------===//

static const char *const kNouns[] = {
    "ledger", "harbor", "filter", "garden", "signal", "engine",  "archive",
    "bridge", "market", "sensor", "window", "permit", "freight", "orchard",
    "cache",  "vendor", "kernel", "letter", "museum", "turbine"};
static const char *const kVerbs[] = {"tracks",  "replaces", "reviews",
                                     "repairs", "confirms", "delays",
                                     "merges",  "exports",  "inspects"};
static const char *const kAdjectives[] = {"quiet",  "northern", "spare",
                                          "annual", "faulty",   "copper",
                                          "remote", "narrow"};

template <size_t N>
static const char *pick(const char *const (&list)[N], Generator &g) {
  return list[g.below(N)];
}

static std::string sentence(Generator &g) {
  return std::string("The ") + pick(kAdjectives, g) + " " + pick(kNouns, g) +
         " " + pick(kVerbs, g) + " the " + pick(kNouns, g) + " near the " +
         pick(kNouns, g) + ". ";
}

static std::string hexDigits(Generator &g, int count) {
  std::string text;
  for (int i = 0; i < count; ++i)
    text += "0123456789abcdef"[g.below(16)];
  return text;
}

/// Pieces as a subword tokenizer might make them: up to six letters, up to
/// three digits, single marks; a space belongs to the piece behind it.
static std::vector<uint32_t> cut(const std::string &text) {
  std::vector<uint32_t> tokens;
  auto isLetter = [](unsigned char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c >= 0x80;
  };
  auto isDigit = [](unsigned char c) { return c >= '0' && c <= '9'; };
  for (size_t i = 0; i < text.size();) {
    size_t begin = i;
    if (text[i] == ' ' && i + 1 < text.size())
      ++i;
    size_t word = i;
    if (isLetter(text[i]))
      while (i < text.size() && isLetter(text[i]) && i - word < 6)
        ++i;
    else if (isDigit(text[i]))
      while (i < text.size() && isDigit(text[i]) && i - word < 3)
        ++i;
    else
      ++i;
    uint32_t hash = 2166136261u;
    for (size_t j = begin; j < i; ++j)
      hash = (hash ^ static_cast<unsigned char>(text[j])) * 16777619u;
    tokens.push_back(hash);
  }
  return tokens;
}

static std::string makeText(const std::string &regime, int i, Generator &g) {
  std::string text;
  if (regime == "short_chat") {
    text = std::string("Could you tell me how the ") + pick(kNouns, g) + " " +
           pick(kVerbs, g) + " a " + pick(kAdjectives, g) + " " +
           pick(kNouns, g) + "? I would like a short answer, please.";
  } else if (regime == "long_doc_qa") {
    // A memo of 900 to 1280 words.
    int words = 900 + 20 * i % 400;
    while (words > 0) {
      text += sentence(g);
      words -= 11;
    }
    text += "Question: which part was reviewed first?";
  } else if (regime == "code_repo") {
    for (int n = 24 + i % 4; n > 0; --n) {
      std::string name = pick(kNouns, g);
      std::string other = pick(kVerbs, g);
      text += "def " + other + "_" + name + "(items, limit):\n    total = 0\n" +
              "    for item in items[:limit]:\n        total += item." + name +
              " * " + std::to_string(g.below(97)) +
              "\n    if total > limit:\n" + "        raise ValueError(\"" +
              name + "\")\n    return total\n\n";
    }
  } else if (regime == "logs_uuid") {
    for (int n = 60 + i % 20; n > 0; --n)
      text += "2031-04-" + std::to_string(10 + g.below(20)) + "T" +
              std::to_string(10 + g.below(14)) + ":" +
              std::to_string(10 + g.below(50)) + " WARN " + pick(kNouns, g) +
              " id=" + hexDigits(g, 32) + " retry\n";
  } else if (regime == "tables_csv") {
    text = "region,part,count,price\n";
    for (int n = 120 + i % 30; n > 0; --n)
      text += std::string(pick(kAdjectives, g)) + "," + pick(kNouns, g) + "," +
              std::to_string(g.below(900)) + "," + std::to_string(g.below(90)) +
              "." + std::to_string(10 + g.below(90)) + "\n";
  } else if (regime == "repetition_policy") {
    int words = 1000 + 10 * i % 70;
    for (; words > 0; words -= 9)
      text += "Access is granted to members who sign the form. ";
  } else if (regime == "mixed_zh_en") {
    static const char *const phrases[] = {
        "\xe8\xaf\xb7\xe6\xa3\x80\xe6\x9f\xa5",
        "\xe6\x95\xb0\xe6\x8d\xae",
        "\xe6\xb8\xa9\xe5\xba\xa6",
        "\xe6\x8a\xa5\xe5\x91\x8a",
        "\xe6\x98\x8e\xe5\xa4\xa9",
        "\xe5\xb7\xa5\xe5\x8e\x82"};
    int words = 650 + 15 * i % 75;
    for (; words > 0; words -= 4)
      text += std::string(phrases[g.below(6)]) + " " + pick(kNouns, g) + " " +
              phrases[g.below(6)] + " " + pick(kVerbs, g) + " ";
  } else if (regime == "ocr_forms") {
    for (int n = 90 + i % 15; n > 0; --n)
      text += "F" + std::to_string(n) + " | " + pick(kNouns, g) + " : [" +
              std::to_string(g.below(100000)) + "] _ _ " +
              (g.below(2) ? "x" : "o") + "\n";
  }
  return text;
}

std::vector<TracePrompt> scheduler::makeTrace(const TraceOptions &options) {
  Generator g(options.seed);
  std::vector<TracePrompt> trace;
  for (const char *regime :
       {"short_chat", "long_doc_qa", "code_repo", "logs_uuid", "tables_csv",
        "repetition_policy", "mixed_zh_en", "ocr_forms"})
    for (int i = 0; i < options.perRegime; ++i)
      trace.push_back({regime, cut(makeText(regime, i, g))});
  if (options.longLength > 0)
    for (int i = 0; i < options.longCalls; ++i) {
      TracePrompt prompt{"long", {}};
      auto length = static_cast<size_t>(options.longLength);
      while (prompt.tokens.size() < length)
        for (uint32_t token : cut(sentence(g)))
          prompt.tokens.push_back(token);
      prompt.tokens.resize(length);
      trace.push_back(std::move(prompt));
    }
  shuffle(trace, g);
  return trace;
}

std::vector<float> scheduler::traceActivation(const TracePrompt &prompt,
                                              int64_t channels, uint64_t seed) {
  auto length = static_cast<int64_t>(prompt.tokens.size());
  std::unordered_map<uint32_t, std::vector<float>> embedding;
  std::vector<float> weights(4 * channels), result(length * channels);
  Generator g(seed);
  for (float &w : weights)
    w = static_cast<float>(0.5 * g.normal());
  std::vector<const float *> rows(length);
  for (int64_t t = 0; t < length; ++t) {
    std::vector<float> &row = embedding[prompt.tokens[t]];
    if (row.empty()) {
      Generator own(seed ^ (uint64_t(prompt.tokens[t]) << 20));
      for (int64_t d = 0; d < channels; ++d)
        row.push_back(static_cast<float>(own.normal()));
    }
    rows[t] = row.data();
  }
  for (int64_t t = 0; t < length; ++t)
    for (int64_t d = 0; d < channels; ++d) {
      float sum = 0;
      for (int64_t w = 0; w < 4 && w <= t; ++w)
        sum += weights[w * channels + d] * rows[t - w][d];
      result[t * channels + d] = sum / (1 + std::exp(-sum));
    }
  return result;
}

//===----------------------------------------------------------------------===//
// Replay
//===----------------------------------------------------------------------===//

namespace {
using Clock = std::chrono::steady_clock;
double millisecondsSince(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start)
      .count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  size_t n = values.size();
  return n % 2 ? values[n / 2] : 0.5 * (values[n / 2 - 1] + values[n / 2]);
}

/// A decision in the terms of a measurement: a chunk that covers the sequence
/// is unsplit.
Candidate candidateOf(const Decision &decision, int64_t length) {
  return {decision.chunk >= length ? 0 : decision.chunk, decision.variant};
}

Status
checkArguments(const std::vector<std::shared_ptr<const Policy>> &policies,
               const SimulatorOptions &options) {
  if (policies.empty())
    return Status::invalidArgument("expected policies, got none");
  if (options.rounds < 4)
    return Status::invalidArgument("expected at least 4 rounds, got " +
                                   std::to_string(options.rounds));
  return Status::ok();
}

struct Timed {
  Candidate candidate;
  std::vector<double> even, odd;
  double chosenBy = 0, reported = 0;
};

/// The one of `list` that is `candidate`, or null.
Timed *find(std::vector<Timed> &list, const Candidate &candidate) {
  for (Timed &timed : list)
    if (timed.candidate.chunk == candidate.chunk &&
        timed.candidate.variant == candidate.variant)
      return &timed;
  return nullptr;
}

void addCandidate(std::vector<Timed> &list, const Candidate &candidate) {
  if (find(list, candidate))
    return;
  Timed timed;
  timed.candidate = candidate;
  list.push_back(std::move(timed));
}

const Timed &bestOf(const std::vector<Timed> &list) {
  return *std::min_element(
      list.begin(), list.end(),
      [](const Timed &a, const Timed &b) { return a.chosenBy < b.chosenBy; });
}

Status measureShape(const Problem &problem, std::vector<Timed> &candidates,
                    const MeasureProblem &measure,
                    const SimulatorOptions &options, Generator &g) {
  std::vector<size_t> order(candidates.size());
  for (size_t i = 0; i < order.size(); ++i)
    order[i] = i;
  Clock::time_point start = Clock::now();
  // Round -1 warms up.
  for (int round = -1; round < options.rounds; ++round) {
    if (round >= options.minRounds &&
        millisecondsSince(start) > options.budgetMsPerShape)
      break;
    shuffle(order, g);
    for (size_t i : order) {
      Expected<double> ms = measure(problem, candidates[i].candidate);
      if (!ms)
        return ms.takeStatus();
      if (!(*ms > 0) || !std::isfinite(*ms))
        return Status::invalidArgument(
            "expected a measured time above 0, got " + std::to_string(*ms));
      if (round >= 0)
        (round % 2 ? candidates[i].odd : candidates[i].even).push_back(*ms);
    }
  }
  for (Timed &timed : candidates) {
    timed.chosenBy = median(timed.even);
    timed.reported = median(timed.odd);
  }
  return Status::ok();
}
} // namespace

Expected<SimulationReport>
scheduler::simulate(const SiteInfo &info, const std::vector<TracePrompt> &trace,
                    const std::vector<std::shared_ptr<const Policy>> &policies,
                    const MeasureProblem &measure,
                    const SimulatorOptions &options) {
  if (trace.empty())
    return Status::invalidArgument("expected a trace of calls, got none");
  if (Status status = checkArguments(policies, options); !status)
    return status;
  Generator g(options.seed);
  // The statistics each policy wants, gathered once per kind and call.
  auto sameRequest = [](const EstimatorOptions &a, const EstimatorOptions &b) {
    return a.sampling == b.sampling && a.stride == b.stride &&
           a.bins == b.bins && a.range == b.range;
  };
  std::vector<EstimatorOptions> requests;
  std::vector<int> requestOf;
  for (const auto &policy : policies) {
    std::optional<EstimatorOptions> request = policy->statistics();
    int index = -1;
    if (request) {
      index = 0;
      while (index < static_cast<int>(requests.size()) &&
             !sameRequest(requests[index], *request))
        ++index;
      if (index == static_cast<int>(requests.size()))
        requests.push_back(*request);
    }
    requestOf.push_back(index);
  }
  struct Gathered {
    Statistics statistics;
    double ms;
  };
  std::vector<std::vector<Gathered>> gathered(requests.size());
  if (!requests.empty()) {
    if (info.problem.channels < 1)
      return Status::invalidArgument(
          "expected the channels of the site to be known, got " +
          std::to_string(info.problem.channels));
    std::vector<Estimator> estimators;
    for (const EstimatorOptions &request : requests) {
      Expected<Estimator> made = Estimator::create(request);
      if (!made)
        return made.takeStatus();
      estimators.push_back(std::move(*made));
    }
    int64_t channels = info.problem.channels * info.problem.headDim;
    for (const TracePrompt &prompt : trace) {
      std::vector<float> activation = traceActivation(prompt, channels);
      TensorView view = TensorView::contiguous(
          activation.data(), ElementType::F32,
          {1, static_cast<int64_t>(prompt.tokens.size()), channels});
      for (size_t r = 0; r < requests.size(); ++r) {
        Clock::time_point start = Clock::now();
        Expected<Statistics> statistics = estimators[r].estimate(view);
        double ms = millisecondsSince(start);
        if (!statistics)
          return statistics.takeStatus();
        gathered[r].push_back({*statistics, ms});
      }
    }
  }

  // What every policy decides, call by call.
  struct Run {
    std::vector<Decision> decisions;
    PolicyReport report;
  };
  std::vector<Run> runs(policies.size());
  std::map<int64_t, std::vector<Timed>> shapes;
  for (const TracePrompt &prompt : trace)
    shapes[static_cast<int64_t>(prompt.tokens.size())];
  auto want = [&](int64_t length, const Candidate &candidate) {
    addCandidate(shapes[length], candidate);
  };
  for (size_t p = 0; p < policies.size(); ++p) {
    Site site(info, policies[p]);
    Run &run = runs[p];
    run.report.policy = policies[p]->spec();
    double statisticsMs = 0;
    for (size_t t = 0; t < trace.size(); ++t) {
      auto length = static_cast<int64_t>(trace[t].tokens.size());
      Decision decision = site.decide(1, length);
      run.report.usedData += decision.usedData;
      run.decisions.push_back(decision);
      want(length, candidateOf(decision, length));
      if (requestOf[p] >= 0) {
        const Gathered &own = gathered[requestOf[p]][t];
        site.publish(own.statistics, own.ms);
        statisticsMs += own.ms;
      }
    }
    run.report.switches = static_cast<int64_t>(site.report().switches);
    run.report.statisticsMs = statisticsMs / static_cast<double>(trace.size());
    // The cost of a decision, with everything there that it needs: the middle
    // of several measurements, each over the whole trace.
    std::vector<double> costs;
    for (int repeat = 0; repeat < 9; ++repeat) {
      int rounds = std::max<int>(1, 2000 / static_cast<int>(trace.size()));
      Clock::time_point start = Clock::now();
      for (int i = 0; i < rounds; ++i)
        for (const TracePrompt &prompt : trace)
          site.decide(1, static_cast<int64_t>(prompt.tokens.size()));
      costs.push_back(millisecondsSince(start) * 1e6 /
                      (rounds * static_cast<double>(trace.size())));
    }
    run.report.decisionNs = median(costs);
  }

  // The oracle may take any chunk that a tuner tries.
  for (auto &[length, candidates] : shapes) {
    Problem problem = info.problem;
    problem.batch = 1;
    problem.length = length;
    for (const Candidate &candidate : defaultCandidates(
             problem, info.variants, options.leastChunk, info.device.units))
      want(length, candidate);
    if (Status status = measureShape(problem, candidates, measure, options, g);
        !status)
      return status;
  }

  SimulationReport report;
  report.calls = static_cast<int64_t>(trace.size());
  report.shapes = static_cast<int64_t>(shapes.size());
  std::vector<double> oracle;
  for (const TracePrompt &prompt : trace) {
    const std::vector<Timed> &candidates =
        shapes[static_cast<int64_t>(prompt.tokens.size())];
    const Timed &best = bestOf(candidates);
    oracle.push_back(best.reported);
    report.oracleMeanMs += best.reported;
  }
  report.oracleMeanMs /= static_cast<double>(trace.size());
  for (Run &run : runs) {
    std::map<std::string, std::pair<RegimeReport, double>> regimes;
    double total = 0, oracleTotal = 0;
    for (size_t t = 0; t < trace.size(); ++t) {
      auto length = static_cast<int64_t>(trace[t].tokens.size());
      double ms =
          find(shapes[length], candidateOf(run.decisions[t], length))->reported;
      auto &[regime, oracleSum] = regimes[trace[t].regime];
      regime.regime = trace[t].regime;
      ++regime.calls;
      regime.meanMs += ms;
      oracleSum += oracle[t];
      total += ms;
      oracleTotal += oracle[t];
    }
    run.report.meanMs = total / static_cast<double>(trace.size());
    run.report.gapToOracle = total / oracleTotal - 1;
    for (auto &[name, entry] : regimes) {
      auto &[regime, oracleSum] = entry;
      regime.gapToOracle = regime.meanMs / oracleSum - 1;
      regime.meanMs /= static_cast<double>(regime.calls);
      run.report.regimes.push_back(regime);
    }
    report.policies.push_back(std::move(run.report));
  }
  return report;
}

Expected<SizesSimulation> scheduler::simulateSizes(
    const SiteInfo &info, const std::vector<Problem> &problems,
    const std::vector<std::shared_ptr<const Policy>> &policies,
    const MeasureProblem &measure, const SimulatorOptions &options) {
  if (problems.empty())
    return Status::invalidArgument("expected problems, got none");
  if (Status status = checkArguments(policies, options); !status)
    return status;
  Generator g(options.seed);
  SizesSimulation result;
  result.problems = problems;
  std::vector<std::unique_ptr<Site>> sites;
  for (const auto &policy : policies) {
    sites.push_back(std::make_unique<Site>(info, policy));
    result.policies.emplace_back().policy = policy->spec();
  }
  double oracleTotal = 0;
  for (const Problem &problem : problems) {
    std::vector<Timed> candidates;
    for (size_t p = 0; p < sites.size(); ++p) {
      Decision decision = sites[p]->decide(problem.batch, problem.length);
      addCandidate(candidates, candidateOf(decision, problem.length));
      result.policies[p].decisions.push_back(decision);
    }
    for (const Candidate &candidate : defaultCandidates(
             problem, info.variants, options.leastChunk, info.device.units))
      addCandidate(candidates, candidate);
    if (Status status = measureShape(problem, candidates, measure, options, g);
        !status)
      return status;
    const Timed &best = bestOf(candidates);
    result.oracle.push_back(best.candidate);
    result.oracleMs.push_back(best.reported);
    oracleTotal += best.reported;
    for (SizesReport &report : result.policies) {
      double ms =
          find(candidates, candidateOf(report.decisions.back(), problem.length))
              ->reported;
      report.ms.push_back(ms);
      report.losses.push_back(ms / best.reported - 1);
    }
  }
  for (SizesReport &report : result.policies) {
    for (size_t i = 0; i < problems.size(); ++i) {
      report.meanLoss +=
          report.losses[i] / static_cast<double>(problems.size());
      report.totalLoss += report.ms[i];
    }
    report.worstLoss =
        *std::max_element(report.losses.begin(), report.losses.end());
    report.totalLoss = report.totalLoss / oracleTotal - 1;
  }
  return result;
}
