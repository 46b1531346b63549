//===- SchedulerCAPI.cpp - C API ------------------------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Scheduler/ChunkRule.h"
#include "corey/Scheduler/Estimator.h"
#include "corey/Scheduler/Site.h"
#include "corey/Scheduler/Tuner.h"
#include "corey/scheduler.h"
#include <algorithm>
#include <cstring>

using namespace corey;
using namespace corey::scheduler;

struct corey_sched_estimator {
  Estimator impl;
};
struct corey_sched_site {
  corey_sched_site(SiteInfo info, std::shared_ptr<const Policy> policy)
      : impl(std::move(info), std::move(policy)) {}
  Site impl;
};

static thread_local std::string lastError;

static_assert(static_cast<int>(ElementType::BF16) == COREY_SCHED_BF16 &&
                  static_cast<int>(RangeMode::RunningQuantile) ==
                      COREY_SCHED_RANGE_QUANTILE &&
                  static_cast<int>(Sampling::Token) ==
                      COREY_SCHED_SAMPLE_TOKEN &&
                  static_cast<int>(Validity::NonFinite) ==
                      COREY_SCHED_NOT_FINITE &&
                  static_cast<int>(OpKind::SSD) == COREY_SCHED_SSD,
              "the C enumerations mirror the C++ ones");

static corey_sched_status record(const Status &status) {
  if (status)
    return COREY_SCHED_OK;
  lastError = status.message();
  switch (status.code()) {
  case StatusCode::InvalidArgument:
    return COREY_SCHED_INVALID_ARGUMENT;
  case StatusCode::NotFound:
    return COREY_SCHED_NOT_FOUND;
  case StatusCode::IOError:
    return COREY_SCHED_IO_ERROR;
  default:
    return COREY_SCHED_FAILED;
  }
}

static corey_sched_status missing(const char *what) {
  return record(
      Status::invalidArgument(std::string("expected ") + what + ", got null"));
}

/// The number behind an enumerator that came from C. C allows any number there;
/// in C++ even reading one that is no enumerator is undefined.
template <typename Enum> static int numberOf(const Enum &value) {
  int number;
  static_assert(sizeof number == sizeof value, "C enumerations are integers");
  std::memcpy(&number, &value, sizeof number);
  return number;
}

/// Whether the C enumerator `value` is one of the first `count`.
template <typename Enum> static bool known(const Enum &value, int count) {
  int number = numberOf(value);
  return number >= 0 && number < count;
}

static corey_sched_status unknown(const char *what, int value) {
  return record(Status::invalidArgument(std::string("expected ") + what +
                                        ", got " + std::to_string(value)));
}

const char *corey_sched_last_error(void) { return lastError.c_str(); }

//===----------------------------------------------------------------------===//
// Statistics
//===----------------------------------------------------------------------===//

static corey_sched_estimator_options convert(const EstimatorOptions &o) {
  return {o.bins,
          static_cast<corey_sched_range>(o.range),
          o.low,
          o.high,
          o.quantile,
          o.decay,
          static_cast<corey_sched_sampling>(o.sampling),
          o.stride,
          o.timeAxis,
          o.layerStride,
          o.threads};
}

void corey_sched_estimator_defaults(corey_sched_estimator_options *options) {
  if (options)
    *options = convert(EstimatorOptions());
}

corey_sched_status
corey_sched_estimator_create(const corey_sched_estimator_options *options,
                             corey_sched_estimator **estimator) {
  if (!estimator)
    return missing("a place for the estimator");
  EstimatorOptions converted;
  if (options) {
    if (!known(options->range, 4))
      return unknown("a range mode", numberOf(options->range));
    if (!known(options->sampling, 3))
      return unknown("a sampling", numberOf(options->sampling));
    converted.bins = options->bins;
    converted.range = static_cast<RangeMode>(options->range);
    converted.low = options->low;
    converted.high = options->high;
    converted.quantile = options->quantile;
    converted.decay = options->decay;
    converted.sampling = static_cast<Sampling>(options->sampling);
    converted.stride = options->stride;
    converted.timeAxis = options->time_axis;
    converted.layerStride = options->layer_stride;
    converted.threads = options->threads;
  }
  Expected<Estimator> made = Estimator::create(converted);
  if (!made)
    return record(made.status());
  *estimator = new corey_sched_estimator{std::move(*made)};
  return COREY_SCHED_OK;
}

void corey_sched_estimator_destroy(corey_sched_estimator *estimator) {
  delete estimator;
}

corey_sched_status corey_sched_estimate(corey_sched_estimator *estimator,
                                        const corey_sched_tensor *tensor,
                                        corey_sched_statistics *statistics) {
  if (!estimator)
    return missing("an estimator");
  if (!tensor)
    return missing("a tensor");
  if (!statistics)
    return missing("a place for the statistics");
  if (!known(tensor->type, 4))
    return unknown("an element type", numberOf(tensor->type));
  if (tensor->rank < 0 || tensor->rank > TensorView::kMaxRank)
    return unknown("a rank from 0 to 8", tensor->rank);
  if (tensor->rank > 0 && !tensor->shape)
    return missing("a shape");
  TensorView view;
  view.data = tensor->data;
  view.type = static_cast<ElementType>(tensor->type);
  view.rank = tensor->rank;
  int64_t stride = 1;
  for (int i = tensor->rank; i-- > 0;) {
    view.shape[i] = tensor->shape[i];
    view.strides[i] = tensor->strides ? tensor->strides[i] : stride;
    // What overflows is found out below, by the shape.
    stride = static_cast<int64_t>(static_cast<uint64_t>(stride) *
                                  static_cast<uint64_t>(tensor->shape[i]));
  }
  Expected<Statistics> result = estimator->impl.estimate(view);
  if (!result)
    return record(result.status());
  const Statistics &s = *result;
  *statistics = {static_cast<corey_sched_validity>(s.validity),
                 s.count,
                 s.nan,
                 s.positiveInfinity,
                 s.negativeInfinity,
                 s.min,
                 s.max,
                 s.mean,
                 s.variance,
                 s.kurtosis,
                 s.meanAbsolute,
                 s.rms,
                 s.outlierFraction,
                 s.peakToRms,
                 s.entropy.value(),
                 s.bins,
                 s.low,
                 s.high,
                 s.below,
                 s.above,
                 s.tokens,
                 s.tokensDropped};
  return COREY_SCHED_OK;
}

corey_sched_status corey_sched_rule(const char *rule, double entropy_nats,
                                    int64_t bins, int64_t *chunk) {
  if (!rule)
    return missing("a rule");
  if (!chunk)
    return missing("a place for the chunk");
  if (bins < 2 || bins > 65536)
    return record(Status::invalidArgument("expected 2 to 65536 bins, got " +
                                          std::to_string(bins)));
  Expected<ChunkRule> found = ChunkRule::named(rule);
  if (!found)
    return record(found.status());
  std::optional<int64_t> result = found->chunk(Nats(entropy_nats), bins);
  if (!result)
    return record(Status::invalidArgument("expected a finite entropy, got " +
                                          std::to_string(entropy_nats)));
  *chunk = *result;
  return COREY_SCHED_OK;
}

//===----------------------------------------------------------------------===//
// Sites
//===----------------------------------------------------------------------===//

corey_sched_status corey_sched_site_create(const corey_sched_site_info *info,
                                           const char *policy,
                                           corey_sched_site **site) {
  if (!info)
    return missing("a description of the site");
  if (!site)
    return missing("a place for the site");
  if (!known(info->op, 2))
    return unknown("an op", numberOf(info->op));
  if (!known(info->type, 4))
    return unknown("an element type", numberOf(info->type));
  SiteInfo converted;
  converted.name = info->name ? info->name : "scan";
  converted.layer = layerOf(converted.name);
  converted.problem.op = static_cast<OpKind>(info->op);
  converted.problem.type = static_cast<ElementType>(info->type);
  for (int64_t size : {info->channels, info->head_dim, info->states,
                       info->groups, info->units})
    if (size < 0)
      return record(Status::invalidArgument(
          "expected sizes of a site of at least 0, got " +
          std::to_string(size)));
  converted.problem.channels = info->channels ? info->channels : -1;
  converted.problem.states = info->states ? info->states : -1;
  converted.problem.headDim = std::max<int64_t>(info->head_dim, 1);
  converted.problem.groups = std::max<int64_t>(info->groups, 1);
  if (info->device)
    converted.device.name = info->device;
  converted.device.units = std::max<int64_t>(info->units, 1);
  if (info->num_variants && !info->variants)
    return missing("variants");
  if (info->num_variants)
    converted.variants.clear();
  for (size_t i = 0; i < info->num_variants; ++i) {
    const corey_sched_variant &v = info->variants[i];
    if (!v.name)
      return missing("a name of every variant");
    for (int64_t size : {v.item_channels, v.tile, v.resident, v.granularity})
      if (size < 0)
        return record(Status::invalidArgument(
            "variant '" + std::string(v.name) +
            "': expected sizes of at least 0, got " + std::to_string(size)));
    Variant variant;
    variant.name = v.name;
    variant.itemChannels = std::max<int64_t>(v.item_channels, 1);
    variant.tile = std::max<int64_t>(v.tile, 1);
    variant.resident = std::max<int64_t>(v.resident, 1);
    variant.granularity = std::max<int64_t>(v.granularity, 1);
    variant.segmented = v.segmented;
    variant.byRule = v.by_rule;
    converted.variants.push_back(variant);
  }
  Expected<ChunkTable> table = ChunkTable::shippedAndCached();
  if (!table)
    return record(table.status());
  PolicyContext context;
  context.table = std::make_shared<ChunkTable>(std::move(*table));
  auto parsed = parsePolicy(policy ? policy : kDefaultPolicy, context);
  if (!parsed)
    return record(parsed.status());
  *site = new corey_sched_site(std::move(converted), std::move(*parsed));
  return COREY_SCHED_OK;
}

void corey_sched_site_destroy(corey_sched_site *site) { delete site; }

static corey_sched_decision convert(const Decision &d) {
  return {d.chunk, d.variant, d.predictedMs, d.usedData};
}

corey_sched_status corey_sched_decide(corey_sched_site *site, int64_t batch,
                                      int64_t length,
                                      corey_sched_decision *decision) {
  if (!site)
    return missing("a site");
  if (!decision)
    return missing("a place for the decision");
  if (batch < 0 || length < 0)
    return record(Status::invalidArgument(
        "expected a batch and a length of at least 0, got " +
        std::to_string(batch) + " and " + std::to_string(length)));
  *decision = convert(site->impl.decide(batch, length));
  return COREY_SCHED_OK;
}

corey_sched_status corey_sched_publish(corey_sched_site *site,
                                       const corey_sched_statistics *s,
                                       double milliseconds) {
  if (!site)
    return missing("a site");
  if (!s)
    return missing("statistics");
  if (!known(s->validity, 4))
    return unknown("a validity", numberOf(s->validity));
  Statistics converted;
  converted.validity = static_cast<Validity>(s->validity);
  converted.count = s->count;
  converted.nan = s->nan;
  converted.positiveInfinity = s->positive_infinity;
  converted.negativeInfinity = s->negative_infinity;
  converted.min = s->min;
  converted.max = s->max;
  converted.mean = s->mean;
  converted.variance = s->variance;
  converted.kurtosis = s->kurtosis;
  converted.meanAbsolute = s->mean_absolute;
  converted.rms = s->rms;
  converted.outlierFraction = s->outlier_fraction;
  converted.peakToRms = s->peak_to_rms;
  converted.entropy = Nats(s->entropy_nats);
  converted.bins = s->bins;
  converted.low = s->low;
  converted.high = s->high;
  converted.below = s->below;
  converted.above = s->above;
  converted.tokens = s->tokens;
  converted.tokensDropped = s->tokens_dropped;
  site->impl.publish(converted, milliseconds);
  return COREY_SCHED_OK;
}

corey_sched_status corey_sched_set_chunk(corey_sched_site *site,
                                         int64_t chunk) {
  if (!site)
    return missing("a site");
  if (chunk < 0)
    return record(Status::invalidArgument(
        "expected a chunk of at least 1 token, or 0 for the policy's, got " +
        std::to_string(chunk)));
  site->impl.setChunk(chunk);
  return COREY_SCHED_OK;
}

size_t corey_sched_explain(const corey_sched_site *site, char *text,
                           size_t size) {
  std::string whole;
  if (site) {
    Site::Report report = site->impl.report();
    whole = report.decisions ? report.decision.explain() : "not asked yet";
    whole += " (policy " + report.policy + ")";
  }
  if (text && size) {
    size_t count = std::min(size - 1, whole.size());
    std::memcpy(text, whole.data(), count);
    text[count] = '\0';
  }
  return whole.size();
}

corey_sched_status corey_sched_wanted(const corey_sched_site *site,
                                      int32_t *wanted,
                                      corey_sched_estimator_options *options) {
  if (!site)
    return missing("a site");
  if (!wanted || !options)
    return missing("a place for the options");
  std::optional<EstimatorOptions> request = site->impl.policy()->statistics();
  *wanted = request.has_value();
  *options = convert(request.value_or(EstimatorOptions()));
  return COREY_SCHED_OK;
}

//===----------------------------------------------------------------------===//
// Tuning
//===----------------------------------------------------------------------===//

corey_sched_status corey_sched_tune(const corey_sched_site *site, int64_t batch,
                                    int64_t length, double budget_ms,
                                    corey_sched_measure measure, void *user,
                                    const char *path,
                                    corey_sched_decision *decision) {
  if (!site)
    return missing("a site");
  if (!measure)
    return missing("a function that measures");
  const SiteInfo &info = site->impl.info();
  Problem problem = info.problem;
  problem.batch = batch;
  problem.length = length;
  TunerOptions options;
  options.budgetMs = budget_ms;
  Expected<TableEntry> entry = tune(
      info.device, problem, info.variants,
      defaultCandidates(problem, info.variants, 16, info.device.units),
      [&](const Candidate &candidate) -> Expected<double> {
        double ms = measure(user, candidate.chunk, candidate.variant);
        if (!(ms >= 0))
          return Status(StatusCode::Internal,
                        "measuring chunk " + std::to_string(candidate.chunk) +
                            " failed");
        return ms;
      },
      options);
  if (!entry)
    return record(entry.status());
  ChunkTable table;
  if (Status status = table.add(*entry); !status)
    return record(status);
  std::string target = path ? path : cachePath();
  if (target.empty())
    return record(Status::invalidArgument(
        "expected a path, or COREY_CACHE_DIR to be set, got neither"));
  if (Status status = table.mergeInto(target); !status)
    return record(status);
  if (decision) {
    const MeasuredCandidate &best = entry->best();
    *decision = {best.chunk ? best.chunk : std::max<int64_t>(length, 1), 0,
                 best.medianMs, 0};
    for (size_t v = 0; v < info.variants.size(); ++v)
      if (info.variants[v].name == best.variant)
        decision->variant = static_cast<int32_t>(v);
  }
  return COREY_SCHED_OK;
}
