//===- Policy.h - Who chooses a chunk ---------------------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_SCHEDULER_POLICY_H
#define COREY_SCHEDULER_POLICY_H

#include "corey/Scheduler/ChunkTable.h"
#include "corey/Scheduler/CostModel.h"
#include "corey/Scheduler/Estimator.h"
#include "corey/Scheduler/Problem.h"
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace corey::scheduler {

/// What a decision is made on.
struct Query {
  Problem problem;
  /// What runs it: at least one variant, valid during the call.
  const Variant *variants = nullptr;
  int numVariants = 0;
  const Device *device = nullptr;
  /// Units of the device that this call has; 0 is all of them.
  int64_t units = 0;
  /// Number of the layer, -1 if it has none.
  int64_t layer = -1;
  /// Statistics of an earlier call of the site; null before there are any.
  const Statistics *statistics = nullptr;
  /// Moving average of the entropy of earlier calls; NaN before there are any.
  double averageEntropy = NAN;
  /// What gathering those statistics took, in milliseconds.
  double statisticsMs = 0;
  /// How many decisions the site has asked for before.
  uint64_t call = 0;
};

/// Why a chunk was chosen.
enum class Reason : uint8_t {
  Unsplit,
  Static,
  /// Rule P or another rule of the entropy.
  Entropy,
  Proxy,
  Midpoint,
  Random,
  /// A rule of a table, or its default.
  TableRule,
  TableDefault,
  /// The guard let the inner policy's choice pass, or kept to the fallback.
  GuardPassed,
  GuardHeld,
  GuardGain,
  GuardNoGain,
  Model,
  Measured,
  /// No model of a kernel whose segments are work items: as many as fill the
  /// device.
  Filled,
  /// Nothing to decide on.
  NoStatistics,
  NotFinite,
  EmptyStatistics,
  TooShort,
  NoModel,
  /// The caller set it.
  Requested
};

struct Decision {
  /// Tokens, at least 1; at least the length where unsplit.
  int64_t chunk = 1;
  /// Index into the query's variants.
  int variant = 0;
  /// Milliseconds; NaN if the policy predicts none.
  double predictedMs = NAN;
  /// Whether statistics of data had a part in it.
  bool usedData = false;
  Reason reason = Reason::Unsplit;
  /// What the reason speaks of: an entropy, a chunk, a gain, an index.
  double value = 0;
  int64_t other = 0;

  /// The reason in words.
  std::string explain() const;
};

struct PolicyContext;

/// Chooses chunks. Deterministic: equal queries get equal decisions. Immutable
/// and therefore thread-safe; decide() allocates nothing and takes at most a
/// few hundred nanoseconds.
class Policy {
public:
  virtual ~Policy();
  /// `query` has a device, at least one variant, a batch of at least 1 and a
  /// length of at least 0. The chunk is a multiple of the variant's granularity
  /// unless it covers the length.
  Decision decide(const Query &query) const;
  /// How the statistics it decides on are gathered, if it decides on any.
  virtual std::optional<EstimatorOptions> statistics() const;
  /// As parsePolicy() reads it.
  const std::string &spec() const { return text; }

protected:
  virtual Decision choose(const Query &query) const = 0;
  std::string text;
  friend Expected<std::shared_ptr<const Policy>>
  parsePolicy(std::string_view spec, const PolicyContext &context);
  friend Expected<std::shared_ptr<const Policy>>
  parseRules(std::string_view text, std::string_view name);
};

/// What policies that need more than a query decide with.
struct PolicyContext {
  /// Of `measured`; null is ChunkTable::shipped().
  std::shared_ptr<const ChunkTable> table;
  /// Of `cost-model` and the gain guard; null is CostModel::shipped().
  std::shared_ptr<const CostModel> model;
};

/// The policy of a specification
///
///   name[:option,...]     option: key=value; a value may stand in [brackets]
///
///   unsplit               one chunk per sequence
///   static:256            a constant
///   entropy               a rule of the entropy of the activation, all of it
///   sampled               of every 8th token; stride=
///   token                 of the mean entropy of a token; stride=8
///                         (of these three, layers=4 looks at every 4th layer
///                         only; the others are not split)
///   midpoint              a rule at half of ln K
///   random                a power of two of the rule's range; seed=0
///   cheap, variance, kurtosis   a rule of a proxy of the entropy
///   guarded               inner=[sampled] if its choice is at least delta=2
///                         powers of two away from fallback=512;
///                         mode=gain: if the model predicts that it is faster
///                         than the fallback by more than margin=0.02 of the
///                         time and cost_us= (the measured cost of the
///                         statistics unless given)
///   table                 ordered rules of a file (file=, else the papers':
///                         up to 50 tokens 128, else 512)
///   cost-model            the least predicted time; unsplit unless another is
///                         predicted to be margin=0.05 faster. Without a model
///                         of the device, an SSD that segments can be work
///                         items of is cut into as many as just fill the device
///                         once, of two tiles of 64 tokens or more
///   measured              the chunk table; where it has no entry, inner=
///                         [cost-model]; file= in place of the default table
///
/// Options of policies with a rule: rule=unified (a name of
/// ChunkRule::names()), or c_min=, c_max=, h_ref= (0: ln K); bins=256;
/// min_length=16, below which nothing is split; smooth=1 decides on the moving
/// average.
///
/// Errors: InvalidArgument naming what was expected and what came; those of a
/// file.
Expected<std::shared_ptr<const Policy>>
parsePolicy(std::string_view spec, const PolicyContext &context = {});

/// The policy `table` with the rules of a JSON text; `name` stands for it in
/// messages:
///
///   {"schema": "corey-chunk-rules", "version": 1,
///    "rules": [{"max_length": 50, "chunk": 128}], "default_chunk": 512}
///
/// The first rule that matches wins. Its bounds are optional and inclusive:
/// min_layer, max_layer, min_length, max_length, min_entropy, max_entropy
/// (nats); a bound on what a query lacks matches nothing. Errors:
/// InvalidArgument.
Expected<std::shared_ptr<const Policy>> parseRules(std::string_view text,
                                                   std::string_view name);

/// Names of the policies, as in a specification.
const std::vector<std::string> &policyNames();

/// The specification of the policy used where none is given: "measured".
extern const char *const kDefaultPolicy;

} // namespace corey::scheduler

#endif // COREY_SCHEDULER_POLICY_H
