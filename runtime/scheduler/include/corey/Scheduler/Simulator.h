//===- Simulator.h - Policies over a trace of calls -------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_SCHEDULER_SIMULATOR_H
#define COREY_SCHEDULER_SIMULATOR_H

#include "corey/Scheduler/Site.h"
#include "corey/Scheduler/Tuner.h"
#include <functional>
#include <string>
#include <vector>

namespace corey::scheduler {

struct TraceOptions {
  /// Prompts of each regime.
  int perRegime = 20;
  /// Prompts of the long regime, and their length in tokens; 0 leaves it out.
  int longCalls = 2;
  int64_t longLength = 65536;
  uint64_t seed = 1234;
};

/// A prompt of a mixed load.
struct TracePrompt {
  std::string regime;
  /// Pieces of the text, as a subword tokenizer might cut it, by hash.
  std::vector<uint32_t> tokens;
};

/// Generated prompts of nine regimes in a random order: short_chat (about 25
/// tokens), long_doc_qa (900 to 1500), code_repo, logs_uuid, tables_csv,
/// repetition_policy, mixed_zh_en, ocr_forms, and long (longLength). The texts
/// are templates filled by a generator; their lengths and their variety are
/// what matters here.
std::vector<TracePrompt> makeTrace(const TraceOptions &options = {});

/// A stand-in for the activation that enters a scan, [tokens, channels]: an
/// embedding drawn per token from a normal distribution, a causal convolution
/// of width 4 with drawn weights, and SiLU.
std::vector<float> traceActivation(const TracePrompt &prompt, int64_t channels,
                                   uint64_t seed = 7);

/// Milliseconds of one run of a problem with a candidate.
using MeasureProblem =
    std::function<Expected<double>(const Problem &, const Candidate &)>;

struct SimulatorOptions {
  /// Timed rounds per shape, at least 4, and the milliseconds after which no
  /// further round begins once there are `minRounds`: medians of fewer say
  /// little.
  int rounds = 21;
  int minRounds = 8;
  double budgetMsPerShape = 400;
  /// Least chunk of the oracle's candidates.
  int64_t leastChunk = 8;
  uint64_t seed = 0;
};

struct RegimeReport {
  std::string regime;
  int64_t calls = 0;
  double meanMs = 0, gapToOracle = 0;
};

struct PolicyReport {
  std::string policy;
  /// Mean time of the scan over the calls, and how much longer that is than
  /// with the best chunk of every call, as a share.
  double meanMs = 0, gapToOracle = 0;
  /// Time of a decision that has its statistics, and of gathering those.
  double decisionNs = 0, statisticsMs = 0;
  /// Calls whose chunk or variant differs from that of the call before.
  int64_t switches = 0;
  /// Calls that were decided with data.
  int64_t usedData = 0;
  std::vector<RegimeReport> regimes;
};

struct SimulationReport {
  double oracleMeanMs = 0;
  int64_t calls = 0, shapes = 0;
  std::vector<PolicyReport> policies;
};

/// Replays `trace` against each policy: every call gets the decision of the
/// policy, which has the statistics of the calls before it. The times of every
/// chunk that is chosen or that the oracle may choose are measured first, shape
/// by shape, interleaved and in random order; the oracle chooses by the medians
/// of the even rounds, and every time that is reported comes from the odd ones,
/// so that the oracle gains nothing from noise. Errors: InvalidArgument for an
/// empty trace or no policies; those of `measure`.
Expected<SimulationReport>
simulate(const SiteInfo &site, const std::vector<TracePrompt> &trace,
         const std::vector<std::shared_ptr<const Policy>> &policies,
         const MeasureProblem &measure, const SimulatorOptions &options = {});

/// What a policy's decisions cost over problems of many sizes.
struct SizesReport {
  std::string policy;
  /// How much longer a call takes with the policy's decision than with the best
  /// candidate of its problem, as a share: over the problems, and over their
  /// total time.
  double meanLoss = 0, worstLoss = 0, totalLoss = 0;
  /// By problem, in their order.
  std::vector<Decision> decisions;
  std::vector<double> ms, losses;
};
struct SizesSimulation {
  std::vector<Problem> problems;
  /// Of each problem, and the best candidate.
  std::vector<double> oracleMs;
  std::vector<Candidate> oracle;
  std::vector<SizesReport> policies;
};

/// Lets each policy decide once on every problem, without statistics, and
/// measures as simulate() does. Problems are of the site's op, type and
/// channels. Errors: as simulate().
Expected<SizesSimulation>
simulateSizes(const SiteInfo &site, const std::vector<Problem> &problems,
              const std::vector<std::shared_ptr<const Policy>> &policies,
              const MeasureProblem &measure,
              const SimulatorOptions &options = {});

} // namespace corey::scheduler

#endif // COREY_SCHEDULER_SIMULATOR_H
