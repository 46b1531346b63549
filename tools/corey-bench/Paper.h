//===- Paper.h - What the tables of a paper share ---------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// What arXiv 2604.10597 prints, computed or measured again. docs/Papers.md
// discusses the results.
//
//===----------------------------------------------------------------------===//

#ifndef COREY_TOOLS_COREY_BENCH_PAPER_H
#define COREY_TOOLS_COREY_BENCH_PAPER_H

#include "Tier1.h"
#include "Workload.h"
#include "corey/Scheduler/Estimator.h"
#include "llvm/ADT/ArrayRef.h"
#include "llvm/ADT/STLFunctionalExtras.h"
#include "llvm/ADT/StringRef.h"
#include "llvm/Support/JSON.h"
#include "llvm/Support/raw_ostream.h"
#include <cmath>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace corey::paper {

//===----------------------------------------------------------------------===//
// Rows
//===----------------------------------------------------------------------===//

/// A printed number and ours.
struct Row {
  std::string row, quantity;
  /// What the paper prints, with so many decimals; nothing if it prints none.
  std::optional<double> paper;
  double ours = 0;
  int digits = 0;
  /// How far numbers of a random sample may be apart.
  double tolerance = 0;
  /// Whether a difference is a failure. It is none where the paper contradicts
  /// itself, and the row is there to show it.
  bool mustMatch = false;
  std::string note;

  bool matches() const;
};

struct Table {
  std::string id, title;
  std::vector<Row> rows;

  /// A row that must come out as printed.
  void exact(std::string row, std::string quantity, double paper, double ours,
             int digits = 0, std::string note = "") {
    rows.push_back({std::move(row), std::move(quantity), paper, ours, digits, 0,
                    true, std::move(note)});
  }
  /// A row that need not.
  void compare(std::string row, std::string quantity,
               std::optional<double> paper, double ours, int digits,
               std::string note = "", double tolerance = 0) {
    rows.push_back({std::move(row), std::move(quantity), paper, ours, digits,
                    tolerance, false, std::move(note)});
  }
};
/// A number with so many decimals, and no negative zeros.
std::string text(double value, int digits);
/// A number, or null, as JSON has no infinities.
llvm::json::Value finite(double value);
void print(llvm::raw_ostream &os, const Table &table);
llvm::json::Value toJSON(const Table &table);

//===----------------------------------------------------------------------===//
// Samples
//===----------------------------------------------------------------------===//

/// splitmix64, and what is made of it: the same numbers with every standard
/// library.
class Random {
public:
  explicit Random(uint64_t seed) : state(seed) {
    // Far from the streams of other seeds.
    state = next();
  }
  uint64_t next() {
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  /// In (0, 1).
  double uniform() { return (double(next() >> 11) + 0.5) * 0x1p-53; }
  double normal() {
    if (spare) {
      double value = *spare;
      spare.reset();
      return value;
    }
    double radius = std::sqrt(-2 * std::log(uniform()));
    double angle = 6.283185307179586477 * uniform();
    spare = radius * std::sin(angle);
    return radius * std::cos(angle);
  }
  double laplace() {
    double u = uniform() - 0.5;
    return (u < 0 ? 1 : -1) * std::log1p(-2 * std::abs(u));
  }
  double student3() {
    double z = normal(), a = normal(), b = normal(), c = normal();
    return z / std::sqrt((a * a + b * b + c * c) / 3);
  }
  double sparse(double share) {
    double value = normal();
    return uniform() < share ? value : 0;
  }

private:
  uint64_t state;
  std::optional<double> spare;
};
scheduler::Statistics measure(const std::vector<double> &values, int bins,
                              scheduler::RangeMode range);

struct Spread {
  double mean = 0, deviation = 0;
};
Spread spreadOf(llvm::ArrayRef<double> values);

/// The chunk of a named rule for an entropy in nats.
int64_t choose(llvm::StringRef rule, double nats, int64_t bins = 256);

/// The five distributions of the perturbation experiment, table 3.
struct Distribution {
  const char *name;
  /// What the paper prints of them: entropy in nats, and chunk.
  double entropy;
  int64_t chunk;
  double (*draw)(Random &);
  /// Of that chunk over 64, where it is printed.
  std::optional<double> speedup;
};
llvm::ArrayRef<Distribution> distributions();

//===----------------------------------------------------------------------===//
// Reference results
//===----------------------------------------------------------------------===//

struct PolicyResult {
  std::vector<int64_t> depths;
  /// Latency, traffic and quality per precision.
  std::vector<std::vector<double>> metrics;
  std::optional<double> tau;
};
struct GridResult {
  std::vector<int64_t> depths;
  /// Latency and traffic.
  std::vector<double> metrics;
};
struct ReferenceCase {
  tier1::Case data;
  std::map<std::string, PolicyResult> policies;
  std::map<std::string, GridResult> grid;
};
struct PrintedRow {
  std::optional<double> depth, latency, dram, proxy;
};
struct SweepRow {
  int64_t n = 0;
  std::string regime;
  std::vector<int64_t> launches, depths;
  double tau = 0;
};
struct Reference {
  std::vector<ReferenceCase> cases;
  std::map<std::string, PrintedRow> table11;
  std::vector<SweepRow> table33;
};

/// Those of a file, or those that are built in for an empty path.
Expected<Reference> readReference(const std::string &path);

//===----------------------------------------------------------------------===//
// Tables
//===----------------------------------------------------------------------===//

/// Entropies and chunks.
/// @{
Table table1();
Table table3();
Table table14();
Table table20();
Table table21();
Table table29();
/// @}

struct Tally {
  int64_t passed = 0, failed = 0;
  std::vector<std::string> failures;
  void add(bool good, llvm::function_ref<std::string()> name) {
    ++(good ? passed : failed);
    if (!good)
      failures.push_back(name());
  }
};
/// Every case, policy and precision of the fusion experiments: group depths,
/// latency, traffic and quality; and those of the grid of weights.
/// @{
Expected<Tally> checkPolicies(const Reference &reference);
Tally checkGrid(const Reference &reference);
/// @}
FusionWeights withTau(double tau);
Table table11(const Reference &reference);
Table table33(const Reference &reference);
Table figure1(const Reference &reference);
/// Tables 11 and 33 with kernels that are compiled and run: whole blocks of
/// `length` tokens, and chains of n operators on as many. Errors are against
/// float64 for chains, and for blocks on a CUDA device against the CPU.
/// @{
Expected<Table> measuredTable11(Context &context, int64_t length,
                                double budgetMs);
Expected<Table> measuredTable33(Context &context, int64_t length,
                                double budgetMs);
/// @}

/// One policy or chunk of a table of scans, measured.
struct KernelRow {
  std::string name;
  /// What the policy saw, in nats, if it looked at data.
  std::optional<double> entropy;
  /// What it chose, in tokens; 0 is the whole sequence.
  int64_t chunk = 0;
  /// The kernel; empty leaves the choice to the op's rule.
  std::string variant;
  DType dtype = DType::F16;
  int64_t length = 0, channels = 0, states = 0;
  /// One call with the chunk bound, in milliseconds; nothing where the paper's
  /// row is no chunk. Errors are of y, relative l2 against float64.
  std::optional<Timing> bound;
  double boundError = 0;
  /// The time of the whole sequence in one call over that of `bound`.
  double speedup = 0;
  /// Whether the intervals of the two are apart.
  enum class Against { Noise, Faster, Slower } against = Against::Noise;
  /// The same tokens in calls of a slice each, the state handed on; and the
  /// error if it is forgotten in between, as in the paper.
  int64_t calls = 0;
  Timing sliced;
  double slicedError = 0, resetError = 0;
  /// What the paper prints, by quantity.
  std::vector<std::pair<std::string, double>> paper;

  /// Whether the errors are those of rounding y. They must be.
  bool matches() const;
  static constexpr bool mustMatch = true;
};
struct KernelTable {
  std::string id, title;
  std::vector<KernelRow> rows;
};
void print(llvm::raw_ostream &os, const KernelTable &table);
llvm::json::Value toJSON(const KernelTable &table);

struct KernelOptions {
  /// Of one sequence.
  int64_t length = 4096, channels = 1024, states = 16;
  /// Time to spend on what is compared with each other.
  double budgetMs = 400;
};
/// Tables 2/19, 3m, 17, 18 and 30 with scans that carry their state.
Expected<KernelTable> kernelTable(llvm::StringRef id, Context &context,
                                  const KernelOptions &options);

Table theory(const Reference &reference);
/// The Hadamard transform on the activations of a file: prints its table, if
/// wanted, and returns its JSON.
Expected<llvm::json::Object> rotateFile(const std::string &path,
                                        int64_t channels, bool toPrint);

} // namespace corey::paper

#endif // COREY_TOOLS_COREY_BENCH_PAPER_H
