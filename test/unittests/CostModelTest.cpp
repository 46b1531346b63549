//===- CostModelTest.cpp - Tests of predicted times -----------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Scheduler/CostModel.h"

#include "gtest/gtest.h"

#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <unistd.h>

using namespace corey;
using namespace corey::scheduler;

namespace {
/// splitmix64.
class Random {
public:
  explicit Random(uint64_t seed) : state(seed) {}
  uint64_t next() {
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  int64_t below(int64_t bound) {
    return static_cast<int64_t>(next() % static_cast<uint64_t>(bound));
  }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }

private:
  uint64_t state;
};

/// The terms by walking every token of an item: a piece ends at the end of a
/// tile and at the end of a chunk.
ModelVector walk(const Problem &p, const Variant &v, int64_t units,
                 int64_t chunk) {
  int64_t c = chunk == 0 || chunk > p.length ? p.length : chunk;
  int64_t segments = 1;
  if (v.segmented && p.length > 0) {
    segments = 0;
    for (int64_t begin = 0; begin < p.length; begin += c)
      ++segments;
  }
  int64_t lanes = 0;
  for (int64_t begin = 0; begin < p.channels; begin += v.itemChannels)
    ++lanes;
  int64_t items = p.batch * lanes * segments, waves = 0;
  double shares = 0, crowds = 0;
  for (int64_t begin = 0; begin < std::max<int64_t>(items, 1);
       begin += units * v.resident) {
    ++waves;
    // Dealt to the units in turn, the first has as many as any.
    int64_t ofFirst = 0;
    for (int64_t i = 0; i < v.resident; ++i)
      ofFirst += begin + i * units < std::max<int64_t>(items, 1);
    if (v.resident > 1) {
      shares += static_cast<double>(ofFirst);
      crowds += static_cast<double>(std::max<int64_t>(ofFirst - 2, 0));
    }
  }
  int64_t span = v.segmented ? c : p.length, pieces = 0, piece = 0;
  double squares = 0;
  auto close = [&] {
    pieces += piece > 0;
    squares += static_cast<double>(piece * piece);
    piece = 0;
  };
  for (int64_t t = 0, inChunk = 0; t < span; ++t) {
    ++piece;
    ++inChunk;
    if (inChunk == c) {
      inChunk = 0;
      close();
    } else if (piece == v.tile) {
      close();
    }
  }
  close();
  auto w = static_cast<double>(std::max<int64_t>(waves, 1)),
       inner = static_cast<double>(v.itemChannels * p.headDim),
       work = inner * static_cast<double>(p.states),
       s = static_cast<double>(span), n = static_cast<double>(pieces);
  bool split = segments > 1;
  return {1,
          w * s * work,
          w * s * inner,
          w * n * work,
          w * n,
          w * squares * static_cast<double>(v.itemChannels),
          w * squares * inner,
          split ? 1.0 : 0.0,
          split ? w * s * work : 0,
          split ? static_cast<double>(segments * p.batch * p.channels *
                                      p.headDim * p.states)
                : 0,
          split ? static_cast<double>(segments) : 0,
          shares * s * work,
          crowds * s * work,
          split ? shares * s * work : 0,
          split ? crowds * s * work : 0,
          w,
          split ? w * n : 0,
          split ? w * static_cast<double>(segments) : 0};
}

Problem someProblem(Random &random, int64_t mostLength = 2000) {
  Problem p;
  p.batch = 1 + random.below(5);
  p.length = random.below(mostLength);
  p.channels = 1 + random.below(300);
  p.headDim = random.below(2) ? 1 : 1 + random.below(64);
  p.states = 1 + random.below(128);
  return p;
}

Variant someVariant(Random &random) {
  Variant v;
  v.itemChannels = 1 + random.below(40);
  v.tile = random.below(3) ? 1 + random.below(100) : 1;
  v.resident = 1 + random.below(4);
  v.segmented = random.below(2);
  return v;
}

double dot(const ModelVector &a, const ModelVector &b) {
  double sum = 0;
  for (int i = 0; i < kModelTerms; ++i)
    sum += a[static_cast<size_t>(i)] * b[static_cast<size_t>(i)];
  return sum;
}

/// Measurements that follow `constants`, times 1 +- noise.
ChunkTable synthetic(const ModelVector &constants, const Variant &variant,
                     int problems, double noise, uint64_t seed,
                     int64_t units = 2) {
  Random random(seed);
  ChunkTable table;
  for (int i = 0; i < problems; ++i) {
    TableEntry entry;
    entry.device = "cpu-test";
    entry.units = units;
    Problem &p = entry.problem;
    p.batch = 1 + random.below(4);
    p.length = 64 << random.below(6);
    p.channels = 16 << random.below(5);
    p.states = 16 << random.below(3);
    // Not twice the same.
    p.length += i;
    entry.batch = {p.batch, p.batch};
    entry.length = {p.length, p.length};
    for (int64_t chunk = 0; chunk < p.length; chunk = chunk ? 2 * chunk : 8) {
      MeasuredCandidate m;
      m.chunk = chunk;
      m.variant = variant.name;
      m.medianMs = dot(constants, walk(p, variant, units, chunk)) *
                   (1 + noise * (2 * random.uniform() - 1));
      m.lowMs = 0.99 * m.medianMs;
      m.highMs = 1.01 * m.medianMs;
      m.runs = 20;
      entry.candidates.push_back(m);
    }
    EXPECT_TRUE(table.add(entry));
  }
  return table;
}

CostModel::VariantOf always(const Variant &variant) {
  return [variant](const TableEntry &, std::string_view name) {
    EXPECT_EQ(variant.name, name);
    return Expected<Variant>(variant);
  };
}

std::string entryText(const std::string &device, const std::string &dtype,
                      double launch, const std::string &variant = "default") {
  std::string text = R"({"device": ")" + device +
                     R"(", "op": "ssd", "dtype": ")" + dtype +
                     R"(", "variant": ")" + variant + R"(", "constants_ms": {)";
  for (int t = 0; t < kModelTerms; ++t)
    text += std::string(t ? ", \"" : "\"") +
            modelTermName(static_cast<ModelTerm>(t)) +
            "\": " + (t ? "0.5" : std::to_string(launch));
  return text + R"(}, "error": {"median": 0.02, "worst": 0.09,
    "mean_loss": 0.002, "worst_loss": 0.01, "problems": 12,
    "measurements": 110}})";
}

std::string fileText(const std::vector<std::string> &entries) {
  std::string text =
      R"({"schema": "corey-cost-model", "version": 1, "models": [)";
  for (size_t i = 0; i < entries.size(); ++i)
    text += (i ? "," : "") + entries[i];
  return text + "]}";
}
} // namespace

TEST(CostModelTest, TermsMatchAWalk) {
  Random random(11);
  for (int round = 0; round < 3000; ++round) {
    Problem p = someProblem(random, round % 2 ? 60 : 1500);
    Variant v = someVariant(random);
    int64_t units = 1 + random.below(round % 3 ? 8 : 200);
    for (int64_t chunk :
         {int64_t(0), int64_t(1), 1 + random.below(40), 1 + random.below(1500),
          p.length, p.length + 1, std::max<int64_t>(p.length - 1, 0)}) {
      ModelVector expected = walk(p, v, units, chunk),
                  got = modelTerms(p, v, units, chunk);
      for (int t = 0; t < kModelTerms; ++t)
        ASSERT_DOUBLE_EQ(expected[static_cast<size_t>(t)],
                         got[static_cast<size_t>(t)])
            << modelTermName(static_cast<ModelTerm>(t)) << " chunk " << chunk
            << " of " << p.length << " tile " << v.tile << " segmented "
            << v.segmented;
    }
  }
}

TEST(CostModelTest, CurvesAreSumsOfTerms) {
  Random random(12);
  for (int round = 0; round < 500; ++round) {
    Problem p = someProblem(random);
    p.op = random.below(2) ? OpKind::SSD : OpKind::SelectiveScan;
    p.groups = 1 + random.below(3);
    Variant v = someVariant(random);
    int64_t units = 1 + random.below(200);
    ModelEntry entry;
    for (double &constant : entry.constants)
      constant = random.below(3) ? random.uniform() : 0;
    CostModel::Curve curve(entry, p, v, units);
    for (int64_t chunk :
         {int64_t(0), 1 + random.below(40), 1 + random.below(1500), p.length}) {
      double expected = dot(entry.constants, modelTerms(p, v, units, chunk));
      ASSERT_NEAR(expected, curve.predict(chunk), 1e-12 * expected);
    }
  }
}

TEST(CostModelTest, TermsByHand) {
  // 10 tokens in chunks of 4: 4, 4, 2; tiles of 3: 3 1, 3 1, 2.
  Problem p;
  p.batch = 2;
  p.length = 10;
  p.channels = 5;
  p.states = 7;
  Variant v;
  v.itemChannels = 2;
  v.tile = 3;
  // Items 2 x 3, three at a time: two waves.
  ModelVector serial = modelTerms(p, v, 3, 4);
  EXPECT_EQ(
      (ModelVector{1, 2 * 10 * 14, 2 * 10 * 2, 2 * 5 * 14, 2 * 5, 2 * 24 * 2,
                   2 * 24 * 2, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0}),
      serial);
  // Three segments: 18 items, six waves of 4 tokens.
  v.segmented = true;
  ModelVector split = modelTerms(p, v, 3, 4);
  EXPECT_EQ((ModelVector{1, 6 * 4 * 14, 6 * 4 * 2, 6 * 2 * 14, 6 * 2,
                         6 * 10 * 2, 6 * 10 * 2, 1, 6 * 4 * 14, 3 * 2 * 5 * 7,
                         3, 0, 0, 0, 0, 6, 6 * 2, 6 * 3}),
            split);
  // Four at a time on each of three units: waves of 12 and 6, so 4 + 2.
  v.resident = 4;
  split = modelTerms(p, v, 3, 4);
  auto term = [&](ModelTerm t) { return split[static_cast<size_t>(t)]; };
  EXPECT_EQ(2 * 4 * 14, term(ModelTerm::Token));
  EXPECT_EQ(6 * 4 * 14, term(ModelTerm::Share));
  EXPECT_EQ(2 * 4 * 14, term(ModelTerm::Crowd));
  EXPECT_EQ(term(ModelTerm::Share), term(ModelTerm::SecondShare));
  EXPECT_EQ(term(ModelTerm::Crowd), term(ModelTerm::SecondCrowd));
  // One segment needs no second pass.
  ModelVector whole = modelTerms(p, v, 3, 10);
  EXPECT_EQ(whole, modelTerms(p, v, 3, 0));
  EXPECT_EQ(whole, modelTerms(p, v, 3, INT64_MAX));
  EXPECT_EQ(0, whole[static_cast<size_t>(ModelTerm::Relaunch)]);
  EXPECT_EQ(0, whole[static_cast<size_t>(ModelTerm::Carry)]);
}

TEST(CostModelTest, ItemsOfAnSSDAreOfOneGroup) {
  // Two groups of five heads, two at a time: three items each.
  Problem p;
  p.op = OpKind::SSD;
  p.batch = 2;
  p.length = 256;
  p.channels = 10;
  p.headDim = 4;
  p.states = 8;
  p.groups = 2;
  Variant v;
  v.itemChannels = 2;
  v.tile = 64;
  v.segmented = true;
  EXPECT_EQ(12, unsplitItems(p, v));
  auto waves = [&](int64_t units) {
    return modelTerms(p, v, units, 0)[static_cast<size_t>(ModelTerm::Wave)];
  };
  EXPECT_EQ(1, waves(12));
  EXPECT_EQ(2, waves(11));
  p.op = OpKind::SelectiveScan;
  EXPECT_EQ(10, unsplitItems(p, v));
  EXPECT_EQ(1, waves(10));
}

TEST(CostModelTest, TermsOfLargeSizes) {
  // Divisions are done in f64: exact below 2^52.
  Problem p;
  p.batch = 1;
  p.channels = 1;
  p.states = 1;
  Variant v;
  v.segmented = true;
  for (int64_t length : {int64_t(1) << 40, (int64_t(1) << 40) - 1,
                         (int64_t(1) << 40) + 1, int64_t(999999999989)})
    for (int64_t chunk : {3, 7, 10, 49, 1000003}) {
      p.length = length;
      int64_t segments = length / chunk + (length % chunk != 0);
      EXPECT_EQ(
          static_cast<double>(segments),
          modelTerms(p, v, 1, chunk)[static_cast<size_t>(ModelTerm::Carry)]);
    }
}

TEST(CostModelTest, NamesOfTerms) {
  const char *const names[] = {
      "launch", "token",        "channel",  "piece",        "visit",
      "pair",   "pair_channel", "relaunch", "second",       "carry",
      "chain",  "share",        "crowd",    "second_share", "second_crowd",
      "wave",   "second_visit", "gather"};
  for (int t = 0; t < kModelTerms; ++t)
    EXPECT_STREQ(names[t], modelTermName(static_cast<ModelTerm>(t)));
}

TEST(CostModelTest, FitFindsTheTimesBack) {
  Variant serial, segmented, tiled;
  serial.itemChannels = 8;
  segmented.itemChannels = 8;
  segmented.segmented = true;
  segmented.resident = 2;
  tiled.itemChannels = 4;
  tiled.tile = 32;
  const ModelVector constants[] = {
      {0.01, 1e-6, 0, 0, 1e-5, 0, 0, 0, 0, 0},
      {0.02, 2e-6, 3e-6, 1e-6, 2e-5, 1e-7, 0, 0.005, 1e-7, 1e-6},
      {0.001, 1e-7, 1e-6, 2e-6, 0, 1e-8, 3e-8, 0.02, 5e-7, 0},
      {0, 1e-6, 0, 0, 0, 0, 0, 0, 0, 0}};
  for (const Variant &variant : {serial, segmented, tiled})
    for (const ModelVector &truth : constants) {
      ChunkTable table = synthetic(truth, variant, 24, 0, 5);
      Expected<CostModel> model = CostModel::fit(table, always(variant));
      ASSERT_TRUE(model) << model.status().toString();
      ASSERT_EQ(1u, model->models().size());
      const ModelEntry &entry = model->models()[0];
      for (double constant : entry.constants)
        EXPECT_GE(constant, 0);
      double worst = 0;
      int64_t measurements = 0;
      for (const TableEntry &e : table.entries())
        for (const MeasuredCandidate &m : e.candidates) {
          CostModel::Curve curve(entry, e.problem, variant, e.units);
          worst = std::max(worst,
                           std::fabs(curve.predict(m.chunk) / m.medianMs - 1));
          ++measurements;
        }
      EXPECT_LE(worst, 1e-6)
          << "segmented " << variant.segmented << " tile " << variant.tile;
      EXPECT_EQ(24, entry.error.problems);
      EXPECT_EQ(measurements, entry.error.measurements);
      EXPECT_LE(entry.error.median, 1e-5);
      EXPECT_LE(entry.error.median, entry.error.worst);
      EXPECT_LE(entry.error.meanLoss, entry.error.worstLoss);
      EXPECT_GE(entry.error.meanLoss, 0);
    }
}

TEST(CostModelTest, FitOfNoisyTimes) {
  Variant variant;
  variant.itemChannels = 8;
  variant.segmented = true;
  ModelVector truth = {0.02, 2e-6, 0, 0, 2e-5, 0, 0, 0.005, 1e-6, 1e-6};
  ChunkTable table = synthetic(truth, variant, 30, 0.1, 6);
  Expected<CostModel> model = CostModel::fit(table, always(variant));
  ASSERT_TRUE(model);
  const ModelEntry &entry = model->models()[0];
  for (double constant : entry.constants)
    EXPECT_GE(constant, 0);
  // Uniform noise of 10 %: half of it in the median.
  EXPECT_NEAR(0.05, entry.error.median, 0.02);
  EXPECT_GT(entry.error.worst, 0.08);
  EXPECT_LT(entry.error.worst, 0.3);
  EXPECT_LE(entry.error.meanLoss, 0.1);
  EXPECT_LE(entry.error.meanLoss, entry.error.worstLoss);
  // The truth is not far: 5 % wherever it matters.
  for (const TableEntry &e : table.entries()) {
    CostModel::Curve curve(entry, e.problem, variant, e.units);
    double exact = dot(truth, walk(e.problem, variant, e.units, 0));
    EXPECT_NEAR(1, curve.predict(0) / exact, 0.1);
  }
}

namespace {
/// Sizes of an SSD and its times by the number of segments.
struct Sweep {
  int64_t batch, length, heads, states;
  std::vector<std::pair<int64_t, double>> us;
};

Variant tensorCores(const Problem &p) {
  Variant v;
  v.name = "tensor_core";
  v.itemChannels = p.states <= 128 ? 2 : 1;
  v.tile = v.granularity = 64;
  v.segmented = true;
  return v;
}

ChunkTable tableOf(const std::vector<Sweep> &sweeps) {
  ChunkTable table;
  for (const Sweep &sweep : sweeps) {
    TableEntry entry;
    entry.device = "cuda-test";
    entry.units = 132;
    Problem &p = entry.problem;
    p.op = OpKind::SSD;
    p.type = ElementType::BF16;
    p.batch = sweep.batch;
    p.length = sweep.length;
    p.channels = sweep.heads;
    p.headDim = 64;
    p.states = sweep.states;
    entry.batch = {p.batch, p.batch};
    entry.length = {p.length, p.length};
    int64_t tiles = (p.length + 63) / 64;
    for (auto [segments, us] : sweep.us) {
      int64_t each = (tiles + segments - 1) / segments;
      double ms = us * 1e-3;
      entry.candidates.push_back({segments == 1 ? 0 : each * 64, "tensor_core",
                                  ms, 0.99 * ms, 1.01 * ms, 11});
    }
    EXPECT_TRUE(table.add(entry));
  }
  return table;
}

Expected<Variant> tensorCoresOf(const TableEntry &entry, std::string_view) {
  return tensorCores(entry.problem);
}
} // namespace

/// waves (F + tiles main + [S > 1] (tiles second + S sum)) is found back.
TEST(CostModelTest, FitOfAnSSDInSegments) {
  std::vector<Sweep> sweeps;
  for (auto [batch, length, heads, states] :
       {std::array<int64_t, 4>{1, 4096, 80, 128},
        {1, 65536, 80, 128},
        {2, 1321, 16, 256},
        {1, 1024, 16, 256},
        {8, 4096, 80, 128},
        {4, 541, 16, 128}}) {
    Sweep sweep{batch, length, heads, states, {}};
    int64_t blocks = batch * (heads / (states <= 128 ? 2 : 1)),
            tiles = (length + 63) / 64;
    for (int64_t wanted : {1, 2, 3, 4, 6, 8}) {
      auto each = static_cast<double>((tiles + wanted - 1) / wanted);
      double segments = std::ceil(static_cast<double>(tiles) / each),
             waves = std::ceil(static_cast<double>(blocks) * segments / 132),
             us = waves * (6.7 + each * 1.49 +
                           (segments > 1 ? each * 0.9 + segments * 0.3 : 0));
      if (segments == static_cast<double>(wanted))
        sweep.us.push_back({wanted, us});
    }
    sweeps.push_back(sweep);
  }
  ChunkTable table = tableOf(sweeps);
  Expected<CostModel> model = CostModel::fit(table, tensorCoresOf);
  ASSERT_TRUE(model) << model.status().toString();
  const ModelEntry &entry = model->models()[0];
  EXPECT_EQ("tensor_core", entry.variant);
  for (const TableEntry &e : table.entries())
    for (const MeasuredCandidate &m : e.candidates)
      EXPECT_NEAR(
          1,
          CostModel::Curve(entry, e.problem, tensorCores(e.problem), e.units)
                  .predict(m.chunk) /
              m.medianMs,
          0.01)
          << e.problem.length << " in chunks of " << m.chunk;
}

/// Times of a kernel of this kind on an H200: the fit chooses the best number
/// of segments of each.
TEST(CostModelTest, FitOfMeasuredSegments) {
  ChunkTable table = tableOf(
      {{1,
        4096,
        80,
        128,
        {{1, 102}, {2, 83}, {3, 61.6}, {4, 81}, {6, 75}, {8, 90}, {13, 99}}},
       {1,
        65536,
        80,
        128,
        {{1, 1554},
         {2, 1251},
         {3, 874},
         {4, 1088},
         {6, 901},
         {9, 943},
         {13, 900}}},
       {1,
        4096,
        16,
        256,
        {{1, 105}, {2, 72}, {4, 40}, {8, 26.4}, {16, 33}, {32, 52}}},
       {1, 1024, 16, 256, {{1, 31}, {2, 23}, {4, 15.4}, {8, 14.5}, {16, 24}}}});
  Expected<CostModel> model = CostModel::fit(table, tensorCoresOf);
  ASSERT_TRUE(model) << model.status().toString();
  const ModelEntry &entry = model->models()[0];
  for (const TableEntry &e : table.entries()) {
    CostModel::Curve curve(entry, e.problem, tensorCores(e.problem), e.units);
    const MeasuredCandidate *chosen = &e.candidates[0];
    for (const MeasuredCandidate &m : e.candidates)
      if (curve.predict(m.chunk) < curve.predict(chosen->chunk))
        chosen = &m;
    EXPECT_LE(chosen->medianMs / e.best().medianMs, 1.07)
        << e.problem.length << ", " << e.problem.channels << " heads in chunks "
        << "of " << chosen->chunk << ", best " << e.best().chunk;
  }
  std::printf("segments of an SSD: median error %.1f %%, worst %.1f %%\n",
              100 * entry.error.median, 100 * entry.error.worst);
}

/// Errors are of problems that the fit did not see.
TEST(CostModelTest, ErrorsAreOfWhatWasLeftOut) {
  Variant variant;
  // Two problems of which one takes ten times what the other says: seen alone,
  // each predicts the other wrong by a factor of ten.
  ChunkTable table;
  for (int i = 0; i < 2; ++i) {
    TableEntry entry;
    entry.device = "cpu-test";
    entry.problem.length = 100 + i;
    entry.problem.channels = entry.problem.states = 1;
    entry.length = {100 + i, 100 + i};
    double ms = i ? 10 : 1;
    entry.candidates = {{0, "default", ms, ms, ms, 9}};
    ASSERT_TRUE(table.add(entry));
  }
  Expected<CostModel> model = CostModel::fit(table, always(variant));
  ASSERT_TRUE(model);
  const ModelError &error = model->models()[0].error;
  EXPECT_NEAR(9, error.worst, 0.3);
  EXPECT_EQ(2, error.problems);
  EXPECT_EQ(2, error.measurements);
  EXPECT_EQ(0, error.worstLoss);
  // A single one is judged by itself.
  ChunkTable one;
  ASSERT_TRUE(one.add(table.entries()[0]));
  model = CostModel::fit(one, always(variant));
  ASSERT_TRUE(model);
  EXPECT_NEAR(0, model->models()[0].error.worst, 1e-9);
  EXPECT_EQ(1, model->models()[0].error.problems);
}

TEST(CostModelTest, LossIsOfTheChosenChunk) {
  // No model of these terms makes the shortest chunk of a serial walk the
  // fastest: the whole is predicted, and costs 100 %.
  Variant variant;
  ChunkTable table;
  TableEntry entry;
  entry.device = "cpu-test";
  entry.problem.length = 100;
  entry.problem.channels = entry.problem.states = 1;
  entry.length = {100, 100};
  variant.tile = 1;
  entry.candidates = {{0, "default", 2, 2, 2, 9}, {10, "default", 1, 1, 1, 9}};
  ASSERT_TRUE(table.add(entry));
  Expected<CostModel> model = CostModel::fit(table, always(variant));
  ASSERT_TRUE(model);
  EXPECT_DOUBLE_EQ(1, model->models()[0].error.worstLoss);
  EXPECT_DOUBLE_EQ(1, model->models()[0].error.meanLoss);
}

TEST(CostModelTest, FitKeepsGroupsApart) {
  ModelVector slow = {0, 4e-6, 0, 0, 0, 0, 0, 0, 0, 0},
              fast = {0, 1e-6, 0, 0, 0, 0, 0, 0, 0, 0};
  Variant a, b;
  a.name = "a";
  b.name = "b";
  b.tile = 16;
  ChunkTable table = synthetic(slow, a, 6, 0, 1);
  ChunkTable onGPU = synthetic(fast, b, 6, 0, 2),
             inF16 = synthetic(fast, a, 6, 0, 1);
  for (TableEntry entry : onGPU.entries()) {
    entry.device = "gpu-test";
    ASSERT_TRUE(table.add(entry));
  }
  for (TableEntry entry : inF16.entries()) {
    entry.problem.type = ElementType::F16;
    ASSERT_TRUE(table.add(entry));
  }
  Expected<CostModel> model =
      CostModel::fit(table, [&](const TableEntry &, std::string_view name) {
        return Expected<Variant>(name == "a" ? a : b);
      });
  ASSERT_TRUE(model);
  ASSERT_EQ(3u, model->models().size());
  const ModelEntry *entry = model->find({"cpu-test", 2}, OpKind::SelectiveScan,
                                        ElementType::F32, "a");
  ASSERT_NE(nullptr, entry);
  Problem p;
  p.length = 1000;
  p.channels = p.states = 10;
  double ms = CostModel::Curve(*entry, p, a, 2).predict(0);
  EXPECT_NEAR(dot(slow, walk(p, a, 2, 0)), ms, 1e-6 * ms);
  entry = model->find({"cpu-test", 2}, OpKind::SelectiveScan, ElementType::F16,
                      "a");
  ASSERT_NE(nullptr, entry);
  ms = CostModel::Curve(*entry, p, a, 2).predict(0);
  EXPECT_NEAR(dot(fast, walk(p, a, 2, 0)), ms, 1e-6 * ms);
}

TEST(CostModelTest, FitFails) {
  Expected<CostModel> model = CostModel::fit(ChunkTable(), always(Variant()));
  ASSERT_FALSE(model);
  EXPECT_EQ(StatusCode::InvalidArgument, model.status().code());
  EXPECT_EQ("expected measurements to fit a model to, got an empty table",
            model.status().message());
  model = CostModel::fit(
      synthetic({1, 0, 0, 0, 0, 0, 0, 0, 0, 0}, Variant(), 2, 0, 1),
      [](const TableEntry &, std::string_view) {
        return Expected<Variant>(Status::notFound("no such kernel"));
      });
  ASSERT_FALSE(model);
  EXPECT_EQ(StatusCode::NotFound, model.status().code());
  EXPECT_EQ("no such kernel", model.status().message());
}

TEST(CostModelTest, RoundTrip) {
  Variant variant;
  variant.segmented = true;
  ModelVector truth = {0.02, 2e-6, 0, 0, 2e-5, 0, 0, 0.005, 1e-6, 1e-6};
  Expected<CostModel> model =
      CostModel::fit(synthetic(truth, variant, 9, 0.1, 6), always(variant));
  ASSERT_TRUE(model);
  std::string text = model->toJSON();
  Expected<CostModel> again = CostModel::parse(text, "again");
  ASSERT_TRUE(again) << again.status().toString();
  EXPECT_EQ(text, again->toJSON());
  const ModelEntry &a = model->models()[0], &b = again->models()[0];
  EXPECT_EQ(a.constants, b.constants);
  EXPECT_EQ(a.device, b.device);
  EXPECT_EQ(a.error.median, b.error.median);
  EXPECT_EQ(a.error.worst, b.error.worst);
  EXPECT_EQ(a.error.meanLoss, b.error.meanLoss);
  EXPECT_EQ(a.error.worstLoss, b.error.worstLoss);
  EXPECT_EQ(a.error.problems, b.error.problems);
  EXPECT_EQ(a.error.measurements, b.error.measurements);
  EXPECT_EQ("", CostModel().toJSON() ==
                        CostModel::parse(CostModel().toJSON())->toJSON()
                    ? ""
                    : "an empty model changes");
  // Terms that came later may be left out.
  std::string old = text;
  size_t late = old.find(",\n        \"second_visit\"");
  ASSERT_NE(std::string::npos, late) << text;
  old.erase(late, old.find('}', late) - late);
  Expected<CostModel> earlier = CostModel::parse(old, "earlier");
  ASSERT_TRUE(earlier) << earlier.status().toString();
  EXPECT_EQ(0, earlier->models()[0].constants.back());
  // From a file.
  std::string path = testing::TempDir() + "corey-cost-model-" +
                     std::to_string(getpid()) + ".json";
  std::ofstream(path) << text;
  Expected<CostModel> loaded = CostModel::load(path);
  std::remove(path.c_str());
  ASSERT_TRUE(loaded);
  EXPECT_EQ(text, loaded->toJSON());
  loaded = CostModel::load(path);
  ASSERT_FALSE(loaded);
  EXPECT_EQ(StatusCode::NotFound, loaded.status().code());
  EXPECT_NE(std::string::npos, loaded.status().message().find(path));
}

TEST(CostModelTest, DamagedFiles) {
  const std::string good = fileText({entryText("cpu-a", "f32", 1)});
  ASSERT_TRUE(CostModel::parse(good));
  // What is replaced, by what, and a word the message has to have.
  const char *const changes[][3] = {
      {"corey-cost-model", "corey-chunk-table", "schema"},
      {"\"version\": 1", "\"version\": 2", "version"},
      {"\"version\": 1", "\"version\": \"1\"", "version"},
      {"\"models\"", "\"model\"", "model"},
      {"\"device\": \"cpu-a\"", "\"device\": \"\"", "device"},
      {"\"device\": \"cpu-a\"", "\"device\": 4", "device"},
      {"\"ssd\"", "\"scan\"", "op"},
      {"\"f32\"", "\"int8\"", "dtype"},
      {"\"variant\": \"default\"", "\"variant\": null", "variant"},
      {"\"launch\": ", "\"lunch\": ", "launch"},
      {"\"token\": 0.5", "\"token\": -0.5", "token"},
      {"\"token\": 0.5", "\"token\": \"0.5\"", "token"},
      {"\"token\": 0.5", "\"token\": 1e999", ""},
      {"\"token\": 0.5", "\"token\": NaN", ""},
      {"\"token\": 0.5", "\"token\": 0.5, \"token\": 0.5", "token"},
      {"\"gather\": 0.5", "\"gather\": -0.5", "gather"},
      {"\"carry\": 0.5", "\"carry\": 0.5, \"magic\": 1", "magic"},
      {"\"problems\": 12", "\"problems\": 0", "problems"},
      {"\"problems\": 12", "\"problems\": 1.5", "problems"},
      {"\"median\": 0.02", "\"median\": -1", "median"},
      {"]}", "]", ""},
      {"]}", "], \"extra\": 1}", "extra"},
      {"]}", "]} x", ""}};
  for (const auto &change : changes) {
    std::string text = good;
    size_t at = text.rfind(change[0]);
    ASSERT_NE(std::string::npos, at) << change[0];
    text.replace(at, std::strlen(change[0]), change[1]);
    Expected<CostModel> model = CostModel::parse(text, "some/file.json");
    ASSERT_FALSE(model) << change[1];
    EXPECT_EQ(StatusCode::InvalidArgument, model.status().code());
    const std::string &message = model.status().message();
    EXPECT_NE(std::string::npos, message.find("some/file.json")) << message;
    EXPECT_NE(std::string::npos, message.find(change[2])) << message;
  }
  Expected<CostModel> twice = CostModel::parse(
      fileText({entryText("cpu-a", "f32", 1), entryText("cpu-a", "f32", 2)}));
  ASSERT_FALSE(twice);
  EXPECT_NE(std::string::npos, twice.status().message().find("second"))
      << twice.status().message();
  // Cut anywhere it is no model, and no crash.
  for (size_t n = 0; n < good.size(); ++n)
    EXPECT_FALSE(CostModel::parse(good.substr(0, n))) << n;
}

TEST(CostModelTest, FindTakesTheNearest) {
  Expected<CostModel> model = CostModel::parse(
      fileText({entryText("cpu-b", "f32", 1), entryText("cpu-c", "f32", 2),
                entryText("cpu-c", "bf16", 3), entryText("h200", "f32", 4),
                entryText("cpu-b", "f32", 5, "fast")}));
  ASSERT_TRUE(model) << model.status().toString();
  auto launch = [&](const char *device, ElementType type,
                    const char *variant = "default",
                    OpKind op = OpKind::SSD) -> double {
    const ModelEntry *entry = model->find({device, 1}, op, type, variant);
    return entry ? entry->constants[0] : -1;
  };
  EXPECT_EQ(1, launch("cpu-b", ElementType::F32));
  EXPECT_EQ(2, launch("cpu-c", ElementType::F32));
  EXPECT_EQ(3, launch("cpu-c", ElementType::BF16));
  EXPECT_EQ(5, launch("cpu-b", ElementType::F32, "fast"));
  EXPECT_EQ(4, launch("h200", ElementType::F32));
  // Another device of the kind: the first that there is, of the type if any.
  EXPECT_EQ(1, launch("cpu-zzz", ElementType::F32));
  EXPECT_EQ(1, launch("cpu", ElementType::F32));
  EXPECT_EQ(3, launch("cpu-zzz", ElementType::BF16));
  // The device itself with another type comes before another device.
  EXPECT_EQ(1, launch("cpu-b", ElementType::BF16));
  EXPECT_EQ(4, launch("h200", ElementType::F16));
  EXPECT_EQ(4, launch("h200-pcie", ElementType::F32));
  EXPECT_EQ(-1, launch("a100", ElementType::F32));
  EXPECT_EQ(-1, launch("cpux-b", ElementType::F32));
  EXPECT_EQ(-1, launch("", ElementType::F32));
  EXPECT_EQ(-1, launch("cpu-b", ElementType::F32, "slow"));
  EXPECT_EQ(
      -1, launch("cpu-b", ElementType::F32, "default", OpKind::SelectiveScan));
  EXPECT_EQ(-1, launch("h200", ElementType::F32, "fast"));
}

TEST(CostModelTest, MergeReplaces) {
  CostModel a = *CostModel::parse(
      fileText({entryText("cpu-b", "f32", 1), entryText("cpu-c", "f32", 2)}));
  CostModel b = *CostModel::parse(
      fileText({entryText("cpu-c", "f32", 7), entryText("cpu-d", "f32", 8)}));
  a.merge(b);
  ASSERT_EQ(3u, a.models().size());
  EXPECT_EQ(7, a.find({"cpu-c", 1}, OpKind::SSD, ElementType::F32, "default")
                   ->constants[0]);
  EXPECT_EQ(1, a.find({"cpu-b", 1}, OpKind::SSD, ElementType::F32, "default")
                   ->constants[0]);
  a.merge(a);
  EXPECT_EQ(3u, a.models().size());
}

TEST(CostModelTest, ShippedModelsAreFine) {
  const CostModel &model = CostModel::shipped();
  EXPECT_EQ(&model, &CostModel::shipped());
  for (const ModelEntry &entry : model.models())
    for (double constant : entry.constants)
      EXPECT_GE(constant, 0);
}
