/*===- scheduler.h - C API of the chunk scheduler -----------------*- C -*-===*\
|*
|* SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
|*
\*===----------------------------------------------------------------------===*/

#ifndef COREY_SCHEDULER_H
#define COREY_SCHEDULER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Chooses the chunk of a scan (the tokens that one work item processes before
 * it hands its state on) at run time. Every function that can fail returns a
 * status; corey_sched_last_error() gives the message of the last failure on the
 * calling thread. Handles are released by their destroy function; null is
 * allowed there, and nowhere else unless said so. Handles but estimators and
 * sites are immutable; sites are thread-safe; an estimator serves one thread at
 * a time. */
typedef enum corey_sched_status {
  COREY_SCHED_OK = 0,
  COREY_SCHED_INVALID_ARGUMENT,
  COREY_SCHED_NOT_FOUND,
  COREY_SCHED_IO_ERROR,
  COREY_SCHED_FAILED
} corey_sched_status;

const char *corey_sched_last_error(void);

typedef enum corey_sched_type {
  COREY_SCHED_F64 = 0,
  COREY_SCHED_F32,
  COREY_SCHED_F16,
  COREY_SCHED_BF16
} corey_sched_type;

/* Memory of the caller; strides in elements, null for row-major. Rank <= 8. */
typedef struct corey_sched_tensor {
  const void *data;
  corey_sched_type type;
  int32_t rank;
  const int64_t *shape;
  const int64_t *strides;
} corey_sched_tensor;

/*===-- Statistics --------------------------------------------------------===*/

typedef enum corey_sched_range {
  COREY_SCHED_RANGE_MIN_MAX = 0,
  COREY_SCHED_RANGE_PADDED,
  COREY_SCHED_RANGE_FIXED,
  COREY_SCHED_RANGE_QUANTILE
} corey_sched_range;

typedef enum corey_sched_sampling {
  COREY_SCHED_SAMPLE_FULL = 0,
  COREY_SCHED_SAMPLE_STRIDED,
  COREY_SCHED_SAMPLE_TOKEN
} corey_sched_sampling;

/* See corey/Scheduler/Estimator.h. Fill it by corey_sched_estimator_defaults.
 */
typedef struct corey_sched_estimator_options {
  int32_t bins;
  corey_sched_range range;
  double low, high;
  double quantile, decay;
  corey_sched_sampling sampling;
  int64_t stride;
  int32_t time_axis;
  int64_t layer_stride;
  int32_t threads;
} corey_sched_estimator_options;

typedef enum corey_sched_validity {
  COREY_SCHED_VALID = 0,
  COREY_SCHED_CONSTANT,
  COREY_SCHED_EMPTY,
  COREY_SCHED_NOT_FINITE
} corey_sched_validity;

/* Of the finite elements. The entropy is in nats. */
typedef struct corey_sched_statistics {
  corey_sched_validity validity;
  uint64_t count, nan, positive_infinity, negative_infinity;
  double min, max, mean, variance, kurtosis, mean_absolute, rms;
  double outlier_fraction, peak_to_rms;
  double entropy_nats;
  int32_t bins;
  double low, high;
  uint64_t below, above;
  uint64_t tokens, tokens_dropped;
} corey_sched_statistics;

typedef struct corey_sched_estimator corey_sched_estimator;

void corey_sched_estimator_defaults(corey_sched_estimator_options *options);
/* `options` may be null for the defaults. */
corey_sched_status
corey_sched_estimator_create(const corey_sched_estimator_options *options,
                             corey_sched_estimator **estimator);
void corey_sched_estimator_destroy(corey_sched_estimator *estimator);
corey_sched_status corey_sched_estimate(corey_sched_estimator *estimator,
                                        const corey_sched_tensor *tensor,
                                        corey_sched_statistics *statistics);

/*===-- Rules -------------------------------------------------------------===*/

/* The chunk of a named rule (legacy, calibrated, routed, confirm, unified,
 * tile32, coarse, profile) for an entropy in nats of a histogram of `bins`. */
corey_sched_status corey_sched_rule(const char *rule, double entropy_nats,
                                    int64_t bins, int64_t *chunk);

/*===-- Sites and decisions -----------------------------------------------===*/

typedef enum corey_sched_op {
  COREY_SCHED_SELECTIVE_SCAN = 0,
  COREY_SCHED_SSD
} corey_sched_op;

/* A kernel; see corey/Scheduler/Problem.h. */
typedef struct corey_sched_variant {
  const char *name;
  int64_t item_channels, tile, resident, granularity;
  int32_t segmented, by_rule;
} corey_sched_variant;

/* A scan of a program. Zeros and nulls stand for: op selective_scan, one group,
 * a head of one channel, a device "cpu" of one unit, one default variant. Sizes
 * of 0 for channels and states mean that they are not known. */
typedef struct corey_sched_site_info {
  const char *name;
  corey_sched_op op;
  corey_sched_type type;
  int64_t channels, head_dim, states, groups;
  const char *device;
  int64_t units;
  const corey_sched_variant *variants;
  size_t num_variants;
} corey_sched_site_info;

/* `predicted_ms` is NaN where the policy predicts none. */
typedef struct corey_sched_decision {
  int64_t chunk;
  int32_t variant;
  double predicted_ms;
  int32_t used_data;
} corey_sched_decision;

typedef struct corey_sched_site corey_sched_site;

/* `policy` is a specification as corey/Scheduler/Policy.h lists them ("static:
 * 256", "guarded:inner=[entropy],delta=2", ...); null for the default. The
 * tables are the shipped ones with the user's cache over them. */
corey_sched_status corey_sched_site_create(const corey_sched_site_info *info,
                                           const char *policy,
                                           corey_sched_site **site);
void corey_sched_site_destroy(corey_sched_site *site);
/* The chunk for `batch` sequences of `length` tokens. Never waits for data. */
corey_sched_status corey_sched_decide(corey_sched_site *site, int64_t batch,
                                      int64_t length,
                                      corey_sched_decision *decision);
/* Statistics for later decisions, and what they took to gather. */
corey_sched_status corey_sched_publish(corey_sched_site *site,
                                       const corey_sched_statistics *statistics,
                                       double milliseconds);
/* Fixes the chunk of a site; 0 gives it back to the policy. */
corey_sched_status corey_sched_set_chunk(corey_sched_site *site, int64_t chunk);
/* The last decision's reason in words, NUL-terminated and cut to `size` bytes;
 * returns the length of the whole. `text` may be null if size is 0. */
size_t corey_sched_explain(const corey_sched_site *site, char *text,
                           size_t size);
/* The options of the estimator the site's policy wants. `wanted` becomes 0 if
 * it decides on no statistics. */
corey_sched_status corey_sched_wanted(const corey_sched_site *site,
                                      int32_t *wanted,
                                      corey_sched_estimator_options *options);

/*===-- Tuning ------------------------------------------------------------===*/

/* Milliseconds of one run with `chunk` tokens (0: unsplit) of a variant;
 * negative or NaN for failure, which ends the tuning. */
typedef double (*corey_sched_measure)(void *user, int64_t chunk,
                                      int32_t variant);

/* Measures the default candidates of a site for a batch and a length within
 * `budget_ms` and merges the result into the table at `path` (null: the user's
 * cache). `decision` is the winner. */
corey_sched_status corey_sched_tune(const corey_sched_site *site, int64_t batch,
                                    int64_t length, double budget_ms,
                                    corey_sched_measure measure, void *user,
                                    const char *path,
                                    corey_sched_decision *decision);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* COREY_SCHEDULER_H */
