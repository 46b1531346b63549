/*===- SchedulerCAPITest.c - The C API of the scheduler -----------*- C -*-===*\
|*
|* SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
|*
\*===----------------------------------------------------------------------===*/

/* A C11 program: that it compiles is half of the test. Prints what failed and
 * returns 1, or `N passed, 0 failed`. */

#define _POSIX_C_SOURCE 200809L
#include "corey/scheduler.h"
#include <math.h> /* NAN, INFINITY */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int passed, failed;

static void expect(int condition, const char *what, int line) {
  if (condition) {
    ++passed;
    return;
  }
  ++failed;
  printf("FAIL: line %d: %s (last error: %s)\n", line, what,
         corey_sched_last_error());
}
#define EXPECT(condition) expect((condition) != 0, #condition, __LINE__)

/* Fails with `code` and a message that has `text`. */
static void expectError(corey_sched_status got, corey_sched_status code,
                        const char *text, int line) {
  expect(got == code, "the status of an error", line);
  expect(strstr(corey_sched_last_error(), text) != NULL, text, line);
}
#define ERROR(call, code, text) expectError(call, code, text, __LINE__)
#define INVALID(call, text)                                                    \
  expectError(call, COREY_SCHED_INVALID_ARGUMENT, text, __LINE__)

/* Literals: no mathematical library is linked. */
static const double kLn2 = 0.6931471805599453;  /* ln 2 */
static const double kRoot = 1.8708286933869707; /* square root of 3.5 */

static int close_to(double a, double b) {
  return fabs(a - b) <= 1e-9 * (1 + fabs(a));
}

static void testEstimator(void) {
  corey_sched_estimator_options options;
  corey_sched_estimator_defaults(&options);
  corey_sched_estimator_defaults(NULL);
  EXPECT(options.bins == 256 && options.range == COREY_SCHED_RANGE_MIN_MAX);
  EXPECT(options.sampling == COREY_SCHED_SAMPLE_FULL && options.stride == 1);
  EXPECT(options.low == 0 && options.high == 1 && options.threads == 1);
  EXPECT(options.quantile == 0.001 && options.decay == 0.85);
  EXPECT(options.time_axis == -1 && options.layer_stride == 1);

  corey_sched_estimator *estimator = NULL, *none = NULL;
  INVALID(corey_sched_estimator_create(&options, NULL), "null");
  options.bins = 1;
  INVALID(corey_sched_estimator_create(&options, &none), "'bins'");
  options.bins = 4;
  options.range = (corey_sched_range)9;
  INVALID(corey_sched_estimator_create(&options, &none), "a range mode, got 9");
  options.range = (corey_sched_range)-1;
  INVALID(corey_sched_estimator_create(&options, &none),
          "a range mode, got -1");
  options.range = COREY_SCHED_RANGE_MIN_MAX;
  options.sampling = (corey_sched_sampling)3;
  INVALID(corey_sched_estimator_create(&options, &none), "a sampling, got 3");
  options.sampling = COREY_SCHED_SAMPLE_FULL;
  EXPECT(none == NULL);
  EXPECT(corey_sched_estimator_create(&options, &estimator) == COREY_SCHED_OK);
  EXPECT(corey_sched_estimator_create(NULL, &none) == COREY_SCHED_OK);
  corey_sched_estimator_destroy(none);
  corey_sched_estimator_destroy(NULL);
  if (!estimator)
    return;

  /* 0, 1, 2, 3 twice: mean 1.5, variance 1.25, m4 = (2 * 1.5^4 + 2 * .5^4) / 4
   * = 2.5625, kurtosis 1.64, mean of squares 3.5. */
  const float x[8] = {0, 1, 2, 3, 3, 2, 1, 0};
  int64_t shape[2] = {2, 4}, strides[2] = {4, 1};
  corey_sched_tensor tensor = {x, COREY_SCHED_F32, 2, shape, NULL};
  corey_sched_statistics s, t;
  memset(&s, 0x55, sizeof s);
  EXPECT(corey_sched_estimate(estimator, &tensor, &s) == COREY_SCHED_OK);
  EXPECT(s.validity == COREY_SCHED_VALID && s.count == 8);
  EXPECT(s.nan == 0 && s.positive_infinity == 0 && s.negative_infinity == 0);
  EXPECT(s.min == 0 && s.max == 3 && s.mean == 1.5);
  EXPECT(close_to(s.variance, 1.25) && close_to(s.kurtosis, 1.64));
  EXPECT(close_to(s.mean_absolute, 1.5) && close_to(s.rms, kRoot));
  EXPECT(s.outlier_fraction == 0 && close_to(s.peak_to_rms, 3 / kRoot));
  EXPECT(close_to(s.entropy_nats, 2 * kLn2));
  EXPECT(s.bins == 4 && s.low == 0 && s.high == 3);
  EXPECT(s.below == 0 && s.above == 0 && s.tokens == 0);
  EXPECT(s.tokens_dropped == 0);
  tensor.strides = strides;
  EXPECT(corey_sched_estimate(estimator, &tensor, &t) == COREY_SCHED_OK);
  EXPECT(t.mean == s.mean && t.entropy_nats == s.entropy_nats);
  /* The first row alone, and the other one backwards. */
  strides[0] = 0;
  EXPECT(corey_sched_estimate(estimator, &tensor, &t) == COREY_SCHED_OK);
  EXPECT(t.count == 8 && t.entropy_nats == s.entropy_nats);
  tensor.data = x + 7;
  strides[0] = -4;
  strides[1] = -1;
  EXPECT(corey_sched_estimate(estimator, &tensor, &t) == COREY_SCHED_OK);
  EXPECT(t.mean == 1.5 && t.count == 8);

  const double bad[4] = {1, NAN, INFINITY, -INFINITY};
  int64_t four = 4, zero = 0, minus = -1;
  corey_sched_tensor doubles = {bad, COREY_SCHED_F64, 1, &four, NULL};
  EXPECT(corey_sched_estimate(estimator, &doubles, &s) == COREY_SCHED_OK);
  EXPECT(s.validity == COREY_SCHED_NOT_FINITE && s.count == 1);
  EXPECT(s.nan == 1 && s.positive_infinity == 1 && s.negative_infinity == 1);
  doubles.shape = &zero;
  doubles.data = NULL;
  EXPECT(corey_sched_estimate(estimator, &doubles, &s) == COREY_SCHED_OK);
  EXPECT(s.validity == COREY_SCHED_EMPTY && s.count == 0);
  const uint16_t half = 0x3c00, brain = 0x3f80;
  corey_sched_tensor scalar = {&half, COREY_SCHED_F16, 0, NULL, NULL};
  EXPECT(corey_sched_estimate(estimator, &scalar, &s) == COREY_SCHED_OK);
  EXPECT(s.validity == COREY_SCHED_CONSTANT && s.mean == 1);
  scalar.data = &brain;
  scalar.type = COREY_SCHED_BF16;
  EXPECT(corey_sched_estimate(estimator, &scalar, &s) == COREY_SCHED_OK);
  EXPECT(s.mean == 1);

  tensor = (corey_sched_tensor){x, COREY_SCHED_F32, 2, shape, NULL};
  INVALID(corey_sched_estimate(NULL, &tensor, &s), "an estimator, got null");
  INVALID(corey_sched_estimate(estimator, NULL, &s), "a tensor, got null");
  INVALID(corey_sched_estimate(estimator, &tensor, NULL), "got null");
  tensor.type = (corey_sched_type)17;
  INVALID(corey_sched_estimate(estimator, &tensor, &s),
          "an element type, got 17");
  tensor.type = COREY_SCHED_F32;
  tensor.rank = 9;
  INVALID(corey_sched_estimate(estimator, &tensor, &s), "got 9");
  tensor.rank = -1;
  INVALID(corey_sched_estimate(estimator, &tensor, &s), "got -1");
  tensor.rank = 1;
  tensor.shape = NULL;
  INVALID(corey_sched_estimate(estimator, &tensor, &s), "a shape, got null");
  tensor.shape = &minus;
  INVALID(corey_sched_estimate(estimator, &tensor, &s), "got -1 for axis 0");
  int64_t huge[2] = {(int64_t)1 << 62, (int64_t)1 << 62};
  tensor.shape = huge;
  tensor.rank = 2;
  INVALID(corey_sched_estimate(estimator, &tensor, &s), "2^63");
  tensor.shape = &four;
  tensor.rank = 1;
  tensor.data = NULL;
  INVALID(corey_sched_estimate(estimator, &tensor, &s), "null pointer");
  corey_sched_estimator_destroy(estimator);
}

static void testRules(void) {
  int64_t chunk = -5;
  EXPECT(corey_sched_rule("legacy", 4.604287, 256, &chunk) == COREY_SCHED_OK);
  EXPECT(chunk == 256);
  EXPECT(corey_sched_rule("calibrated", 4.604287, 256, &chunk) ==
         COREY_SCHED_OK);
  EXPECT(chunk == 512);
  EXPECT(corey_sched_rule("tile32", 4.02 * kLn2, 256, &chunk) ==
         COREY_SCHED_OK);
  EXPECT(chunk == 288);
  EXPECT(corey_sched_rule("unified", -1, 256, &chunk) == COREY_SCHED_OK);
  EXPECT(chunk == 128);
  chunk = -5;
  ERROR(corey_sched_rule("best", 1, 256, &chunk), COREY_SCHED_NOT_FOUND,
        "'best'");
  INVALID(corey_sched_rule(NULL, 1, 256, &chunk), "a rule, got null");
  INVALID(corey_sched_rule("legacy", 1, 256, NULL), "got null");
  INVALID(corey_sched_rule("legacy", NAN, 256, &chunk), "finite");
  INVALID(corey_sched_rule("legacy", INFINITY, 256, &chunk), "finite");
  INVALID(corey_sched_rule("legacy", 1, 1, &chunk), "bins, got 1");
  INVALID(corey_sched_rule("legacy", 1, 65537, &chunk), "bins, got 65537");
  EXPECT(chunk == -5);
}

static void testSites(void) {
  corey_sched_site_info info;
  memset(&info, 0, sizeof info);
  info.type = COREY_SCHED_F32;
  corey_sched_site *site = NULL;
  corey_sched_decision d;
  corey_sched_statistics s;
  memset(&s, 0, sizeof s);

  INVALID(corey_sched_site_create(NULL, NULL, &site), "got null");
  INVALID(corey_sched_site_create(&info, NULL, NULL), "got null");
  info.op = (corey_sched_op)2;
  INVALID(corey_sched_site_create(&info, NULL, &site), "an op, got 2");
  info.op = COREY_SCHED_SSD;
  info.type = (corey_sched_type)4;
  INVALID(corey_sched_site_create(&info, NULL, &site),
          "an element type, got 4");
  info.type = COREY_SCHED_F16;
  info.channels = -1;
  INVALID(corey_sched_site_create(&info, NULL, &site), "got -1");
  info.channels = 0;
  info.num_variants = 1;
  INVALID(corey_sched_site_create(&info, NULL, &site), "variants, got null");
  corey_sched_variant variant = {NULL, 0, 0, 0, 16, 0};
  info.variants = &variant;
  INVALID(corey_sched_site_create(&info, NULL, &site),
          "a name of every variant");
  variant.name = "wide";
  variant.tile = -4;
  INVALID(corey_sched_site_create(&info, NULL, &site), "'wide'");
  variant.tile = 0;
  INVALID(corey_sched_site_create(&info, "nonsense", &site), "'nonsense'");
  INVALID(corey_sched_site_create(&info, "", &site), "''");
  INVALID(corey_sched_site_create(&info, "static:0", &site), "chunk");
  ERROR(corey_sched_site_create(&info, "table:/no/such/file", &site),
        COREY_SCHED_NOT_FOUND, "/no/such/file");
  EXPECT(site == NULL);
  corey_sched_site_destroy(NULL);

  EXPECT(corey_sched_site_create(&info, "guarded:[entropy:bins=64]", &site) ==
         COREY_SCHED_OK);
  if (!site)
    return;
  char text[200];
  size_t whole = corey_sched_explain(site, text, sizeof text);
  EXPECT(strcmp(text, "not asked yet (policy guarded:[entropy:bins=64])") == 0);
  EXPECT(whole == strlen(text));
  EXPECT(corey_sched_explain(site, NULL, 0) == whole);
  EXPECT(corey_sched_explain(site, text, 4) == whole);
  EXPECT(strcmp(text, "not") == 0);
  text[0] = 'x';
  EXPECT(corey_sched_explain(site, text, 0) == whole && text[0] == 'x');
  EXPECT(corey_sched_explain(NULL, text, sizeof text) == 0 && text[0] == 0);

  int32_t wanted = -1;
  corey_sched_estimator_options options;
  EXPECT(corey_sched_wanted(site, &wanted, &options) == COREY_SCHED_OK);
  EXPECT(wanted == 1 && options.bins == 64);
  EXPECT(options.sampling == COREY_SCHED_SAMPLE_FULL);
  INVALID(corey_sched_wanted(NULL, &wanted, &options), "a site, got null");
  INVALID(corey_sched_wanted(site, NULL, &options), "got null");
  INVALID(corey_sched_wanted(site, &wanted, NULL), "got null");

  EXPECT(corey_sched_decide(site, 1, 1000, &d) == COREY_SCHED_OK);
  EXPECT(d.chunk == 512 && d.variant == 0 && d.used_data == 0);
  EXPECT(isnan(d.predicted_ms));
  corey_sched_explain(site, text, sizeof text);
  EXPECT(strstr(text, "no statistics yet") == text);
  s.validity = COREY_SCHED_VALID;
  s.entropy_nats = 0.01;
  s.count = 100;
  EXPECT(corey_sched_publish(site, &s, 0.5) == COREY_SCHED_OK);
  EXPECT(corey_sched_decide(site, 1, 1000, &d) == COREY_SCHED_OK);
  EXPECT(d.chunk == 128 && d.used_data == 1);
  corey_sched_explain(site, text, sizeof text);
  EXPECT(strstr(text, "guard passed") == text);
  s.validity = COREY_SCHED_NOT_FINITE;
  EXPECT(corey_sched_publish(site, &s, 0.5) == COREY_SCHED_OK);
  EXPECT(corey_sched_decide(site, 1, 1000, &d) == COREY_SCHED_OK);
  EXPECT(d.chunk == 512);
  EXPECT(corey_sched_set_chunk(site, 40) == COREY_SCHED_OK);
  EXPECT(corey_sched_decide(site, 1, 1000, &d) == COREY_SCHED_OK);
  EXPECT(d.chunk == 40);
  EXPECT(corey_sched_set_chunk(site, 0) == COREY_SCHED_OK);
  EXPECT(corey_sched_decide(site, 0, 0, &d) == COREY_SCHED_OK);
  EXPECT(d.chunk >= 1);
  INVALID(corey_sched_set_chunk(site, -1), "got -1");
  INVALID(corey_sched_set_chunk(NULL, 1), "a site, got null");
  INVALID(corey_sched_decide(NULL, 1, 1, &d), "a site, got null");
  INVALID(corey_sched_decide(site, 1, 1, NULL), "got null");
  INVALID(corey_sched_decide(site, -1, 1, &d), "got -1 and 1");
  INVALID(corey_sched_decide(site, 1, -7, &d), "got 1 and -7");
  INVALID(corey_sched_publish(NULL, &s, 0), "a site, got null");
  INVALID(corey_sched_publish(site, NULL, 0), "statistics, got null");
  s.validity = (corey_sched_validity)4;
  INVALID(corey_sched_publish(site, &s, 0), "a validity, got 4");
  corey_sched_site_destroy(site);

  /* A chunk is a multiple of the granularity. */
  EXPECT(corey_sched_site_create(&info, "static:100", &site) == COREY_SCHED_OK);
  EXPECT(corey_sched_decide(site, 1, 1000, &d) == COREY_SCHED_OK);
  EXPECT(d.chunk == 112);
  EXPECT(corey_sched_wanted(site, &wanted, &options) == COREY_SCHED_OK);
  EXPECT(wanted == 0 && options.bins == 256);
  corey_sched_site_destroy(site);
}

struct Fake {
  int runs;
  int fail_at;
};

/* Best at a chunk of 64 of the second variant. */
static double measure(void *user, int64_t chunk, int32_t variant) {
  struct Fake *fake = user;
  ++fake->runs;
  if (fake->fail_at && fake->runs >= fake->fail_at)
    return fake->fail_at % 2 ? -1 : NAN;
  return (chunk == 64 ? 1.0 : 2.0) + (variant == 1 ? 0 : 0.5);
}

static void testTuning(const char *folder) {
  corey_sched_variant variants[2] = {{"plain", 1, 1, 1, 1, 0},
                                     {"split", 1, 1, 1, 1, 1}};
  corey_sched_site_info info;
  memset(&info, 0, sizeof info);
  info.name = "layer7.scan";
  info.type = COREY_SCHED_F32;
  info.channels = 16;
  info.states = 8;
  info.device = "cpu-fake";
  info.units = 3;
  info.variants = variants;
  info.num_variants = 2;
  corey_sched_site *site = NULL;
  EXPECT(corey_sched_site_create(&info, NULL, &site) == COREY_SCHED_OK);
  if (!site)
    return;
  corey_sched_decision d;
  EXPECT(corey_sched_decide(site, 2, 500, &d) == COREY_SCHED_OK);
  EXPECT(d.chunk == 500);

  struct Fake fake = {0, 0};
  INVALID(corey_sched_tune(NULL, 2, 500, 50, measure, &fake, NULL, &d),
          "a site, got null");
  INVALID(corey_sched_tune(site, 2, 500, 50, NULL, &fake, NULL, &d),
          "got null");
  INVALID(corey_sched_tune(site, 0, 500, 50, measure, &fake, NULL, &d), "");
  INVALID(corey_sched_tune(site, 2, 0, 50, measure, &fake, NULL, &d), "");
  INVALID(corey_sched_tune(site, 2, -3, 50, measure, &fake, NULL, &d), "");
  INVALID(corey_sched_tune(site, 2, 500, NAN, measure, &fake, NULL, &d), "");
  INVALID(corey_sched_tune(site, 2, 500, -1, measure, &fake, NULL, &d), "");
  EXPECT(fake.runs == 0);
  fake.fail_at = 3;
  ERROR(corey_sched_tune(site, 2, 500, 50, measure, &fake, NULL, &d),
        COREY_SCHED_FAILED, "failed");
  EXPECT(fake.runs == 3);
  fake = (struct Fake){0, 2};
  ERROR(corey_sched_tune(site, 2, 500, 50, measure, &fake, NULL, &d),
        COREY_SCHED_FAILED, "failed");

  fake = (struct Fake){0, 0};
  memset(&d, 0, sizeof d);
  EXPECT(corey_sched_tune(site, 2, 500, 50, measure, &fake, NULL, &d) ==
         COREY_SCHED_OK);
  EXPECT(d.chunk == 64 && d.variant == 1 && d.predicted_ms == 1);
  EXPECT(fake.runs > 10);
  char path[300];
  snprintf(path, sizeof path, "%s/chunk-table.json", folder);
  EXPECT(access(path, R_OK) == 0);
  /* The winner need not be told. */
  snprintf(path, sizeof path, "%s/deeper/table.json", folder);
  EXPECT(corey_sched_tune(site, 2, 500, 50, measure, &fake, path, NULL) ==
         COREY_SCHED_OK);
  EXPECT(access(path, R_OK) == 0);
  ERROR(corey_sched_tune(site, 2, 500, 50, measure, &fake,
                         "/proc/no/such/table.json", NULL),
        COREY_SCHED_IO_ERROR, "/proc/no");
  corey_sched_site_destroy(site);

  /* New sites find the result in the user's cache, or by its path. */
  EXPECT(corey_sched_site_create(&info, NULL, &site) == COREY_SCHED_OK);
  EXPECT(corey_sched_decide(site, 2, 510, &d) == COREY_SCHED_OK);
  EXPECT(d.chunk == 64 && d.variant == 1);
  char text[200];
  corey_sched_explain(site, text, sizeof text);
  EXPECT(strstr(text, "measured 1 ms at length 500") == text);
  EXPECT(corey_sched_decide(site, 3, 510, &d) == COREY_SCHED_OK);
  EXPECT(d.chunk == 510);
  corey_sched_site_destroy(site);
  char policy[400];
  snprintf(policy, sizeof policy, "measured:file=%s", path);
  EXPECT(corey_sched_site_create(&info, policy, &site) == COREY_SCHED_OK);
  EXPECT(corey_sched_decide(site, 2, 500, &d) == COREY_SCHED_OK);
  EXPECT(d.chunk == 64);
  corey_sched_site_destroy(site);
  site = NULL;

  /* Sizes that are not known cannot be measured for. */
  info.channels = 0;
  corey_sched_site *unknown = NULL;
  EXPECT(corey_sched_site_create(&info, NULL, &unknown) == COREY_SCHED_OK);
  INVALID(corey_sched_tune(unknown, 2, 500, 50, measure, &fake, NULL, &d), "");
  corey_sched_site_destroy(unknown);
  info.channels = 16;

  /* A damaged cache is an error that names it. */
  snprintf(path, sizeof path, "%s/chunk-table.json", folder);
  FILE *file = fopen(path, "w");
  EXPECT(file && fputs("{", file) >= 0 && fclose(file) == 0);
  INVALID(corey_sched_site_create(&info, NULL, &site), "chunk-table.json");
  EXPECT(site == NULL);
}

int main(void) {
  /* Nothing of the user's may come in or be changed. */
  char folder[] = "/tmp/corey-scheduler-capi-XXXXXX";
  if (!mkdtemp(folder) || setenv("COREY_CACHE_DIR", folder, 1) != 0) {
    printf("FAIL: no temporary folder\n");
    return 1;
  }
  EXPECT(corey_sched_last_error() != NULL);
  EXPECT(strcmp(corey_sched_last_error(), "") == 0);
  testEstimator();
  testRules();
  testSites();
  testTuning(folder);
  char command[100];
  snprintf(command, sizeof command, "rm -r %s", folder);
  EXPECT(system(command) == 0);
  printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}
