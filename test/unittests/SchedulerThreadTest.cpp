//===- SchedulerThreadTest.cpp - The scheduler from many threads ----------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// To be run under ThreadSanitizer as well; what it checks holds without.
//
//===----------------------------------------------------------------------===//

#include "corey/Scheduler/Site.h"

#include "gtest/gtest.h"

#include <atomic>
#include <cmath>
#include <cstdio>
#include <functional>
#include <string>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>

using namespace corey;
using namespace corey::scheduler;

namespace {
/// Runs body(i) on `count` threads that begin together.
void together(int count, const std::function<void(int)> &body) {
  std::atomic<int> ready{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i)
    threads.emplace_back([&, i] {
      ready.fetch_add(1);
      while (ready.load() < count)
        std::this_thread::yield();
      body(i);
    });
  for (std::thread &thread : threads)
    thread.join();
}

std::shared_ptr<const Policy> policy(const std::string &spec) {
  auto parsed = parsePolicy(spec);
  EXPECT_TRUE(parsed) << parsed.status().toString();
  return *parsed;
}

/// Statistics whose fields belong together: halves of two would show.
Statistics matching(double entropy) {
  Statistics s;
  s.validity = Validity::Ok;
  s.count = static_cast<uint64_t>(entropy * 1000);
  s.min = s.max = s.mean = s.variance = s.rms = entropy;
  s.peakToRms = entropy;
  s.bins = 256;
  s.entropy = Nats(entropy);
  s.low = s.high = entropy;
  return s;
}

TableEntry entryOf(int writer, int number) {
  TableEntry entry;
  entry.device = "cpu-writer" + std::to_string(writer);
  entry.problem.length = 10 + number;
  entry.problem.channels = 8;
  entry.problem.states = 4;
  entry.length = {10 + number, 10 + number};
  entry.candidates = {{0, "default", 2, 1.9, 2.1, 9},
                      {8, "default", 1, 0.9, 1.1, 9}};
  return entry;
}
} // namespace

TEST(SchedulerThreadTest, OneSiteOfMany) {
  SiteInfo info;
  info.problem.channels = 8;
  info.problem.states = 4;
  Site site(info, policy("static:64"));
  constexpr int kRounds = 3000;
  std::atomic<uint64_t> decided{0}, published{0};
  together(6, [&](int thread) {
    const std::shared_ptr<const Policy> policies[] = {
        policy("static:64"), policy("entropy"), policy("guarded:entropy"),
        policy("random")};
    for (int i = 0; i < kRounds; ++i)
      switch (thread) {
      case 0:
      case 1: {
        int64_t length = 100 + i % 7;
        Decision d = site.decide(1 + thread, length);
        ASSERT_GE(d.chunk, 1);
        ASSERT_EQ(0, d.variant);
        // Of one policy or another, never of two.
        switch (d.reason) {
        case Reason::Static:
          ASSERT_EQ(64, d.chunk);
          break;
        case Reason::Requested:
          ASSERT_EQ(77, d.chunk);
          break;
        case Reason::NoStatistics:
          ASSERT_TRUE(d.chunk == length || d.chunk == 512);
          break;
        case Reason::Entropy:
          // 1 and 5 nats by the unified rule.
          ASSERT_TRUE((d.value == 1 && d.chunk == 512) ||
                      (d.value == 5 && d.chunk == 2048))
              << d.value << " " << d.chunk;
          break;
        case Reason::GuardHeld:
          ASSERT_EQ(512, d.chunk);
          break;
        case Reason::GuardPassed:
          ASSERT_EQ(2048, d.chunk);
          break;
        case Reason::Random:
          ASSERT_GE(d.chunk, 128);
          ASSERT_LE(d.chunk, 2048);
          break;
        default:
          FAIL() << d.explain();
        }
        decided.fetch_add(1);
        break;
      }
      case 2:
      case 3:
        site.publish(matching(thread == 2 ? 1 : 5), thread);
        published.fetch_add(1);
        break;
      case 4:
        site.setPolicy(policies[i % 4]);
        ASSERT_NE(nullptr, site.policy());
        if (i % 50 == 0)
          site.setChunk(i % 100 ? 77 : 0);
        break;
      case 5: {
        Site::Report report = site.report();
        const Statistics &s = report.statistics;
        ASSERT_EQ(s.entropy.value(), s.mean);
        ASSERT_EQ(s.entropy.value(), s.high);
        ASSERT_EQ(static_cast<uint64_t>(s.mean * 1000), s.count);
        ASSERT_LE(report.switches, report.decisions);
        ASSERT_TRUE(
            report.policy == "static:64" || report.policy == "entropy" ||
            report.policy == "guarded:entropy" || report.policy == "random");
        ASSERT_FALSE(report.decision.explain().empty());
        if (report.publications) {
          ASSERT_GE(report.averageEntropy, 1);
          ASSERT_LE(report.averageEntropy, 5);
          // Who gathers them takes 2 or 3 milliseconds.
          ASSERT_EQ(s.mean == 1 ? 2 : 3, report.statisticsMs);
        }
        break;
      }
      }
  });
  Site::Report report = site.report();
  EXPECT_EQ(decided.load(), report.decisions);
  EXPECT_EQ(published.load(), report.publications);
  EXPECT_EQ(2u * kRounds, report.decisions);
}

TEST(SchedulerThreadTest, SharedPoliciesDecideAlike) {
  TableEntry entry = entryOf(0, 500);
  ChunkTable table;
  ASSERT_TRUE(table.add(entry));
  PolicyContext context;
  context.table = std::make_shared<ChunkTable>(table);
  std::vector<std::shared_ptr<const Policy>> policies;
  for (const char *spec :
       {"entropy", "token", "cheap", "random", "guarded", "table", "cost-model",
        "measured", "guarded:mode=gain"}) {
    auto parsed = parsePolicy(spec, context);
    ASSERT_TRUE(parsed);
    policies.push_back(*parsed);
  }
  std::vector<std::vector<int64_t>> chunks(4);
  together(4, [&](int thread) {
    Variant variant;
    Device device;
    device.name = "cpu-writer0";
    Statistics s = matching(3);
    Query query;
    query.variants = &variant;
    query.numVariants = 1;
    query.device = &device;
    query.statistics = &s;
    query.problem = entry.problem;
    for (uint64_t i = 0; i < 500; ++i)
      for (const auto &each : policies) {
        query.call = i;
        query.problem.length = 500 + static_cast<int64_t>(i % 20);
        chunks[static_cast<size_t>(thread)].push_back(
            each->decide(query).chunk);
      }
  });
  for (int thread = 1; thread < 4; ++thread)
    EXPECT_EQ(chunks[0], chunks[static_cast<size_t>(thread)]);
}

/// What is made on first use is made once.
TEST(SchedulerThreadTest, FirstUses) {
  std::vector<const ChunkTable *> tables(5);
  std::vector<const CostModel *> models(5);
  together(5, [&](int thread) {
    auto i = static_cast<size_t>(thread);
    EXPECT_TRUE(parsePolicy("measured"));
    EXPECT_TRUE(parsePolicy("table"));
    EXPECT_EQ(14u, policyNames().size());
    tables[i] = &ChunkTable::shipped();
    models[i] = &CostModel::shipped();
    Expected<Estimator> estimator = Estimator::create();
    float x[4] = {1, 2, 3, 4};
    EXPECT_TRUE(
        estimator->estimate(TensorView::contiguous(x, ElementType::F32, {4})));
  });
  for (size_t i = 1; i < 5; ++i) {
    EXPECT_EQ(tables[0], tables[i]);
    EXPECT_EQ(models[0], models[i]);
  }
}

TEST(SchedulerThreadTest, EstimatorsWithThreads) {
  // Four callers of estimators that use threads of their own, on one tensor.
  constexpr int64_t n = 1200000;
  std::vector<float> x(n);
  std::vector<uint16_t> bits(n);
  uint64_t state = 1;
  for (size_t i = 0; i < n; ++i) {
    state = state * 6364136223846793005 + 1442695040888963407;
    x[i] = static_cast<float>(state >> 40) / 65536.0f - 128;
    bits[i] = static_cast<uint16_t>(state >> 50);
  }
  struct Mode {
    ElementType type;
    RangeMode range;
    Sampling sampling;
  };
  for (const Mode &mode :
       {Mode{ElementType::F32, RangeMode::MinMax, Sampling::Full},
        Mode{ElementType::F32, RangeMode::PaddedMinMax, Sampling::Full},
        Mode{ElementType::F32, RangeMode::RunningQuantile, Sampling::Full},
        Mode{ElementType::F32, RangeMode::MinMax, Sampling::Token},
        Mode{ElementType::BF16, RangeMode::MinMax, Sampling::Full}}) {
    TensorView view =
        mode.type == ElementType::F32
            ? TensorView::contiguous(x.data(), mode.type, {1, 1200, 1000})
            : TensorView::contiguous(bits.data(), mode.type, {1, 1200, 1000});
    std::vector<Statistics> results(4);
    std::vector<std::vector<uint64_t>> histograms(4);
    together(4, [&](int thread) {
      EstimatorOptions options;
      options.range = mode.range;
      options.sampling = mode.sampling;
      options.threads = 1 + thread;
      Expected<Estimator> estimator = Estimator::create(options);
      ASSERT_TRUE(estimator);
      for (int call = 0; call < 2; ++call) {
        Expected<Statistics> s = estimator->estimate(view);
        ASSERT_TRUE(s);
        results[static_cast<size_t>(thread)] = *s;
      }
      histograms[static_cast<size_t>(thread)] = estimator->histogram();
    });
    EXPECT_EQ(static_cast<uint64_t>(n), results[0].count);
    for (size_t i = 1; i < 4; ++i) {
      EXPECT_EQ(results[0].entropy.value(), results[i].entropy.value());
      EXPECT_EQ(results[0].mean, results[i].mean);
      EXPECT_EQ(results[0].variance, results[i].variance);
      EXPECT_EQ(results[0].kurtosis, results[i].kurtosis);
      EXPECT_EQ(results[0].meanAbsolute, results[i].meanAbsolute);
      EXPECT_EQ(histograms[0], histograms[i]);
    }
  }
}

TEST(SchedulerThreadTest, MergingLosesNothing) {
  char folder[] = "/tmp/corey-thread-test-XXXXXX";
  ASSERT_NE(nullptr, mkdtemp(folder));
  std::string path = std::string(folder) + "/cache/table.json";
  constexpr int kWriters = 4, kEntries = 12;
  std::atomic<bool> done{false};
  std::atomic<int> read{0};
  // Readers see a whole file or none.
  std::thread reader([&] {
    while (!done) {
      Expected<ChunkTable> table = ChunkTable::load(path);
      if (!table)
        ASSERT_EQ(StatusCode::NotFound, table.status().code())
            << table.status().message();
      else
        read.fetch_add(1);
    }
  });
  together(kWriters, [&](int writer) {
    for (int i = 0; i < kEntries; ++i) {
      ChunkTable table;
      ASSERT_TRUE(table.add(entryOf(writer, i)));
      Status status = table.mergeInto(path);
      ASSERT_TRUE(status) << status.message();
    }
  });
  done = true;
  reader.join();
  Expected<ChunkTable> table = ChunkTable::load(path);
  ASSERT_TRUE(table) << table.status().toString();
  EXPECT_EQ(static_cast<size_t>(kWriters * kEntries), table->entries().size());
  for (int writer = 0; writer < kWriters; ++writer)
    for (int i = 0; i < kEntries; ++i) {
      TableEntry entry = entryOf(writer, i);
      EXPECT_NE(nullptr, table->find({entry.device, 1}, entry.problem));
    }
  std::string command = "rm -r " + std::string(folder);
  EXPECT_EQ(0, std::system(command.c_str()));
}
