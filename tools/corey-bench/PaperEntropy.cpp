//===- PaperEntropy.cpp - Entropies and chunks ----------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "Paper.h"
#include "corey/Scheduler/ChunkRule.h"
#include "llvm/ADT/STLExtras.h"

using namespace corey;
using namespace corey::paper;
namespace sched = corey::scheduler;

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

Table paper::table1() {
  return binsTable("1", {{"normal", 32, 2.644, 512, 256},
                         {"normal", 128, 4.027, 512, 256},
                         {"normal", 512, 5.413, 512, 256},
                         {"normal", 1024, 6.106, 512, 512},
                         {"uniform", 32, 3.466, 512, 256},
                         {"uniform", 128, 4.852, 512, 256}});
}

Table paper::table21() {
  return binsTable("21", {{"normal", 32, 2.644, 512, 256},
                          {"normal", 64, 3.334, 512, 256},
                          {"normal", 128, 4.027, 512, 256},
                          {"normal", 256, 4.720, 512, 256},
                          {"normal", 512, 5.413, 512, 256},
                          {"normal", 1024, 6.106, 512, 512}});
}

llvm::ArrayRef<Distribution> paper::distributions() {
  static const Distribution list[] = {
      {"uniform", 5.545, 512, [](Random &r) { return r.uniform(); }, 4.34},
      {"normal", 4.612, 256, [](Random &r) { return r.normal(); }, {}},
      {"laplace", 3.892, 256, [](Random &r) { return r.laplace(); }, {}},
      {"sparse 10%",
       0.789,
       64,
       [](Random &r) { return 5 * r.sparse(0.1); },
       {}},
      {"sparse 2%", 0.192, 32, [](Random &r) { return 5 * r.sparse(0.02); },
       0.52}};
  return list;
}

Table paper::table3() {
  // The tensors of the paper: [1, 4096, 1024] in f16.
  constexpr int64_t kLength = 4096, kChannels = 1024;
  constexpr uint64_t kSeeds = 3;
  Table table{"3",
              "chunks for five distributions, f16 [1, 4096, 1024], K = 256; "
              "the paper says calibrated and prints legacy",
              {}};
  auto estimator = sched::Estimator::create();
  std::vector<uint16_t> values(kLength * kChannels);
  for (const Distribution &each : distributions()) {
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

Table paper::table14() {
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

Table paper::table20() {
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

Table paper::table29() {
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
