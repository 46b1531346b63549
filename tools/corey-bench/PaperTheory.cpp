//===- PaperTheory.cpp - What its theory says, and transforms -------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "Paper.h"
#include "corey/SafeTensors.h"
#include "corey/Scheduler/Estimator.h"
#include "llvm/ADT/STLExtras.h"
#include "llvm/Support/Format.h"
#include "llvm/Support/Path.h"

using namespace corey;
using namespace corey::paper;
namespace json = llvm::json;
namespace sched = corey::scheduler;

//===----------------------------------------------------------------------===//
// Theory
//===----------------------------------------------------------------------===//

/// Orthonormal Walsh-Hadamard transform in natural order; the size is a power
/// of two. `aliased` is what the published evaluation of real activations
/// computes: its differences read the sums, which have overwritten the first
/// operand.
static void hadamard(double *x, size_t n, bool aliased = false) {
  const double scale = std::sqrt(0.5);
  for (size_t h = 1; h < n; h *= 2)
    for (size_t i = 0; i < n; ++i)
      if (!(i & h)) {
        double a = x[i], b = x[i + h];
        x[i] = scale * (a + b);
        x[i + h] = scale * ((aliased ? x[i] : a) - b);
      }
}

static double entropyOf(llvm::ArrayRef<double> masses) {
  double entropy = 0;
  for (double p : masses)
    if (p > 0)
      entropy -= p * std::log(p);
  return entropy;
}

/// Makes a positive matrix doubly stochastic.
static void sinkhorn(std::vector<double> &matrix, size_t n) {
  std::vector<double> sums(n);
  for (int round = 0; round < 20000; ++round) {
    std::fill(sums.begin(), sums.end(), 0.0);
    for (size_t i = 0; i < n; ++i)
      for (size_t j = 0; j < n; ++j)
        sums[j] += matrix[i * n + j];
    double worst = 0;
    for (double sum : sums)
      worst = std::max(worst, std::abs(sum - 1));
    for (size_t i = 0; i < n; ++i) {
      double row = 0;
      for (size_t j = 0; j < n; ++j)
        row += matrix[i * n + j] /= sums[j];
      for (size_t j = 0; j < n; ++j)
        matrix[i * n + j] /= row;
    }
    if (worst < 1e-13)
      break;
  }
}

static void mixingRows(Table &table) {
  constexpr size_t kBins = 64;
  constexpr int kMatrices = 60;
  Random random(11);
  // Histograms of several kinds of data.
  double (*draws[])(Random &) = {[](Random &r) { return r.uniform(); },
                                 [](Random &r) { return r.normal(); },
                                 [](Random &r) { return r.laplace(); },
                                 [](Random &r) { return r.student3(); },
                                 [](Random &r) { return r.sparse(0.05); }};
  std::vector<std::vector<double>> histograms;
  sched::EstimatorOptions options;
  options.bins = kBins;
  auto estimator = sched::Estimator::create(options);
  for (auto draw : draws) {
    std::vector<double> values(50000), masses;
    for (double &value : values)
      value = draw(random);
    (void)estimator->estimate(sched::TensorView::contiguous(
        values.data(), sched::ElementType::F64, {int64_t(values.size())}));
    for (uint64_t count : estimator->histogram())
      masses.push_back(double(count) / double(values.size()));
    histograms.push_back(std::move(masses));
  }
  auto gain = [&](const std::vector<double> &matrix,
                  const std::vector<double> &masses) {
    std::vector<double> mixed(kBins, 0.0);
    for (size_t i = 0; i < kBins; ++i)
      for (size_t j = 0; j < kBins; ++j)
        mixed[i] += matrix[i * kBins + j] * masses[j];
    return entropyOf(mixed) - entropyOf(masses);
  };
  std::vector<double> mixing, permuting;
  for (int m = 0; m < kMatrices; ++m) {
    // From nearly uniform to nearly a permutation.
    double sharpness = 0.25 * std::pow(2.0, m % 6);
    std::vector<double> matrix(kBins * kBins);
    for (double &entry : matrix)
      entry = std::exp(sharpness * random.normal());
    sinkhorn(matrix, kBins);
    std::vector<size_t> order(kBins);
    for (size_t i = 0; i < kBins; ++i) {
      size_t j = random.next() % (i + 1);
      order[i] = order[j];
      order[j] = i;
    }
    std::vector<double> permutation(kBins * kBins, 0.0);
    for (size_t i = 0; i < kBins; ++i)
      permutation[i * kBins + order[i]] = 1;
    for (const std::vector<double> &masses : histograms) {
      mixing.push_back(gain(matrix, masses));
      permuting.push_back(std::abs(gain(permutation, masses)));
    }
  }
  double least = *llvm::min_element(mixing);
  table.exact(
      "doubly stochastic mixing", "shrinking entropies", 0,
      double(llvm::count_if(mixing, [](double g) { return g < -1e-9; })), 0,
      "of " + std::to_string(mixing.size()) +
          " histograms, mixed by "
          "matrices of Sinkhorn's iteration");
  table.compare("doubly stochastic mixing", "least gain, nats", std::nullopt,
                least, 4);
  table.compare("doubly stochastic mixing", "mean gain, nats", std::nullopt,
                spreadOf(mixing).mean, 4);
  table.exact("permutation of bins", "largest |gain|, nats", 0,
              *llvm::max_element(permuting), 9);
}

static void peakRows(Table &table) {
  Random random(12);
  double worst = 0;
  for (size_t d : {size_t(16), size_t(256), size_t(4096)}) {
    std::string row = "Hadamard, d=" + std::to_string(d);
    auto ratio = [&](std::vector<double> x) {
      double peak = 0, norm = 0, newPeak = 0, newNorm = 0;
      for (double value : x) {
        peak = std::max(peak, std::abs(value));
        norm += value * value;
      }
      hadamard(x.data(), d);
      for (double value : x) {
        newPeak = std::max(newPeak, std::abs(value));
        newNorm += value * value;
      }
      worst = std::max(worst, std::abs(std::sqrt(newNorm / norm) - 1));
      return peak / newPeak;
    };
    std::vector<double> spike(d, 0.0), constant(d, 1.0), normal(d);
    spike[d / 3] = 7;
    table.exact(row, "peak shrinks, one spike", std::sqrt(double(d)),
                ratio(spike), 3, "sqrt(d), the most there is");
    table.compare(row, "peak shrinks, constant", std::nullopt, ratio(constant),
                  4, "below 1: it grows");
    std::vector<double> ratios;
    for (int i = 0; i < 20; ++i) {
      for (double &value : normal)
        value = random.normal();
      ratios.push_back(ratio(normal));
    }
    table.compare(row, "peak shrinks, normal", std::nullopt,
                  spreadOf(ratios).mean, 3);
  }
  table.exact("Hadamard", "error of the l2 norm", 0, worst, 9);
}

/// What the transform does to the entropy of values: mixing values is not
/// mixing the masses of bins, and the first theorem says nothing of it.
static void valueRows(Table &table) {
  // The channels of the checkpoint of the paper, and fewer.
  constexpr size_t kValues = 1 << 20, kSizes[] = {256, 2048};
  const struct {
    const char *name;
    double (*draw)(Random &);
  } cases[] = {{"normal", [](Random &r) { return r.normal(); }},
               {"laplace", [](Random &r) { return r.laplace(); }},
               {"student t3", [](Random &r) { return r.student3(); }},
               {"silu(normal)", [](Random &r) {
                  double x = r.normal();
                  return x / (1 + std::exp(-x));
                }}};
  auto entropy = [](const std::vector<double> &v) {
    return measure(v, 64, sched::RangeMode::MinMax).entropy.value();
  };
  for (const auto &each : cases) {
    Random random(13);
    std::vector<double> values(kValues);
    for (double &value : values)
      value = each.draw(random);
    double before = entropy(values);
    for (size_t size : kSizes)
      for (bool aliased : {false, true}) {
        std::vector<double> rotated = values;
        for (size_t i = 0; i < kValues; i += size)
          hadamard(&rotated[i], size, aliased);
        table.compare(std::string(each.name) + ", d=" + std::to_string(size),
                      aliased ? "entropy gain, aliased" : "entropy gain, nats",
                      std::nullopt, entropy(rotated) - before, 2);
      }
  }
  // The aliased transform is not orthogonal.
  constexpr size_t kSmall = 8;
  double matrix[kSmall][kSmall], worst = 0;
  for (size_t j = 0; j < kSmall; ++j) {
    double unit[kSmall] = {};
    unit[j] = 1;
    hadamard(unit, kSmall, /*aliased=*/true);
    for (size_t i = 0; i < kSmall; ++i)
      matrix[i][j] = unit[i];
  }
  for (size_t i = 0; i < kSmall; ++i)
    for (size_t j = 0; j < kSmall; ++j) {
      double product = i == j ? -1 : 0;
      for (size_t k = 0; k < kSmall; ++k)
        product += matrix[k][i] * matrix[k][j];
      worst = std::max(worst, std::abs(product));
    }
  table.compare("aliased transform, d=8", "max |M^T M - I|", std::nullopt,
                worst, 2, "0 for an orthogonal one");
}

/// What the bins do with the least and the largest value of a sample.
static void rangeRows(Table &table) {
  Random random(14);
  auto rows = [&](const std::string &row, const std::vector<double> &values) {
    double nats =
        measure(values, 256, sched::RangeMode::MinMax).entropy.value();
    table.compare(row, "entropy K=256, nats", std::nullopt, nats, 2);
    table.compare(row, "chunk, calibrated", std::nullopt,
                  double(choose("calibrated", nats)), 0);
  };
  for (size_t n : {size_t(1000), size_t(1000000)}) {
    std::vector<double> values(n);
    for (double &value : values)
      value = random.normal();
    rows(std::to_string(n) + " normal values", values);
    values[n / 2] = 100;
    rows(std::to_string(n) + " and one of 100 sigma", values);
  }
}

static void depthRows(Table &table, const Reference &reference) {
  for (double room : {64.0, 96.0, 512.0}) {
    constexpr double kTile = 28;
    FusionFeatures op;
    op.shared = kTile;
    // Equal operators are halfway in every term; at the default threshold the
    // first pair of them would not score enough.
    FusionScorer scorer(std::vector<FusionFeatures>(64, op), withTau(0.4),
                        {INFINITY, room, 0});
    size_t deepest = 0;
    for (FusionRegion region : scorer.partition(FusionStrategy::Entropy))
      deepest = std::max(deepest, region.size());
    table.exact("depth, " + text(room, 0) + " / " + text(kTile, 0),
                "deepest region", double(fusionDepthBound(room, kTile)),
                double(deepest), 0, "64 equal operators");
  }
  // Operators of the block differ: the bound of the smallest holds for all.
  double beyond = 0, regions = 0;
  for (const ReferenceCase &each : reference.cases)
    for (FusionStrategy strategy :
         {FusionStrategy::Entropy, FusionStrategy::Dp}) {
      double tile = INFINITY;
      for (const FusionFeatures &op : each.data.chain)
        tile = std::min(tile, op.shared);
      for (FusionRegion region :
           FusionScorer(each.data.chain, {}, each.data.limits)
               .partition(strategy)) {
        ++regions;
        beyond +=
            region.size() > fusionDepthBound(each.data.limits.shared, tile);
      }
    }
  table.exact("depth, synthetic block", "regions beyond", 0, beyond, 0,
              "of " + text(regions, 0));
}

Table paper::theory(const Reference &reference) {
  Table table{"theory", "what the theorems say, measured", {}};
  mixingRows(table);
  peakRows(table);
  depthRows(table, reference);
  valueRows(table);
  rangeRows(table);
  return table;
}

//===----------------------------------------------------------------------===//
// Hadamard on activations
//===----------------------------------------------------------------------===//

namespace {
/// What is measured of a tensor; entropies in nats.
struct Shape {
  double entropy256 = 0, entropy64 = 0, normalized64 = 0, peakToRms = 0,
         outliers = 0, kurtosis = 0;
  static constexpr double Shape::*kFields[] = {
      &Shape::entropy256, &Shape::entropy64, &Shape::normalized64,
      &Shape::peakToRms,  &Shape::outliers,  &Shape::kurtosis};
};

/// One tensor before the transform, after it, and after the aliased one.
struct Rotation {
  std::string name;
  int64_t tokens = 0, channels = 0, block = 0;
  Shape before, after, aliased;
  double gain() const { return after.entropy64 - before.entropy64; }
  double aliasedGain() const { return aliased.entropy64 - before.entropy64; }
};
} // namespace

static Shape shapeOf(const std::vector<double> &values) {
  sched::Statistics fine = measure(values, 256, sched::RangeMode::MinMax);
  return {
      fine.entropy.value(),
      measure(values, 64, sched::RangeMode::MinMax).entropy.value(),
      measure(values, 64, sched::RangeMode::PaddedMinMax).normalizedEntropy(),
      fine.peakToRms,
      fine.outlierFraction,
      fine.kurtosis};
}

static Expected<Rotation> rotate(const std::string &path,
                                 const std::string &name, const Tensor &tensor,
                                 int64_t channels) {
  Rotation rotation;
  rotation.name = name;
  rotation.tokens = tensor.dim(0);
  rotation.channels = channels ? channels : tensor.dim(1);
  if (rotation.channels > tensor.dim(1) || tensor.numElements() == 0)
    return Status::invalidArgument(
        path + ": " + name + ": expected a token and at least " +
        std::to_string(std::max<int64_t>(channels, 1)) + " channels, got " +
        tensor.describe());
  // The largest power of two that divides the channels.
  rotation.block = rotation.channels & -rotation.channels;
  Expected<Tensor> wide = tensor.to(DType::F64);
  if (!wide)
    return wide.takeStatus();
  std::vector<double> before;
  for (int64_t t = 0; t < rotation.tokens; ++t) {
    const double *row = wide->dataAs<double>() + t * tensor.dim(1);
    before.insert(before.end(), row, row + rotation.channels);
  }
  for (double value : before)
    if (!std::isfinite(value))
      return Status::invalidArgument(path + ": " + name +
                                     ": expected finite numbers, got " +
                                     std::to_string(value));
  std::vector<double> after = before, aliased = before;
  for (size_t i = 0; i < before.size(); i += size_t(rotation.block)) {
    hadamard(&after[i], size_t(rotation.block));
    hadamard(&aliased[i], size_t(rotation.block), /*aliased=*/true);
  }
  rotation.before = shapeOf(before);
  rotation.after = shapeOf(after);
  rotation.aliased = shapeOf(aliased);
  return rotation;
}

static json::Object jsonOf(const Shape &shape) {
  // Digits that mean something.
  auto rounded = [](double value) { return std::round(value * 1e9) / 1e9; };
  return json::Object{{"entropy_k256_nats", rounded(shape.entropy256)},
                      {"entropy_k64_nats", rounded(shape.entropy64)},
                      {"normalized_padded_k64", rounded(shape.normalized64)},
                      {"peak_to_rms", rounded(shape.peakToRms)},
                      {"outlier_fraction", rounded(shape.outliers)},
                      {"kurtosis", rounded(shape.kurtosis)}};
}

static json::Object jsonOf(const Rotation &rotation) {
  return json::Object{{"tensor", rotation.name},
                      {"tokens", rotation.tokens},
                      {"channels", rotation.channels},
                      {"block", rotation.block},
                      {"before", jsonOf(rotation.before)},
                      {"after", jsonOf(rotation.after)},
                      {"after_aliased", jsonOf(rotation.aliased)}};
}

static void printRotation(llvm::raw_ostream &os, const Rotation &r) {
  os << "  " << llvm::left_justify(r.name, 22)
     << llvm::format("%6.3f %6.3f  %6.3f %6.3f  %6.3f %7.3f  %6.1f %6.1f  "
                     "%6.0f %6.0f\n",
                     r.before.entropy256, r.after.entropy256,
                     r.before.normalized64, r.after.normalized64, r.gain(),
                     r.aliasedGain(), r.before.peakToRms, r.after.peakToRms,
                     1e6 * r.before.outliers, 1e6 * r.after.outliers);
}

Expected<json::Object> paper::rotateFile(const std::string &path,
                                         int64_t channels, bool toPrint) {
  Expected<SafeTensors> file = SafeTensors::open(path);
  if (!file)
    return file.takeStatus();
  std::vector<Rotation> rotations;
  for (const std::string &name : file->names()) {
    Expected<Tensor> tensor = file->get(name);
    if (!tensor)
      return tensor.takeStatus();
    if (tensor->rank() != 2 || !isFloat(tensor->dtype()))
      continue;
    Expected<Rotation> rotation = rotate(path, name, *tensor, channels);
    if (!rotation)
      return rotation.takeStatus();
    rotations.push_back(std::move(*rotation));
  }
  if (rotations.empty())
    return Status::invalidArgument(
        path + ": expected a float tensor [tokens, channels], got none");

  Rotation mean;
  mean.name = "mean";
  json::Array rows;
  std::vector<double> gains, aliasedGains;
  for (const Rotation &each : rotations) {
    for (Shape Rotation::*shape :
         {&Rotation::before, &Rotation::after, &Rotation::aliased})
      for (double Shape::*field : Shape::kFields)
        mean.*shape.*field += each.*shape.*field / double(rotations.size());
    gains.push_back(each.gain());
    aliasedGains.push_back(each.aliasedGain());
    rows.push_back(jsonOf(each));
  }
  auto positive = [](double gain) { return gain > 0; };
  int64_t gaining = llvm::count_if(gains, positive);
  int64_t aliasedGaining = llvm::count_if(aliasedGains, positive);
  std::string stem = llvm::sys::path::stem(path).str();
  if (toPrint) {
    llvm::raw_ostream &os = llvm::outs();
    os << "hadamard: " << stem << ", orthonormal over channels in blocks of "
       << rotations[0].block << "\n  " << llvm::left_justify("", 22)
       << "H, K=256 nats  normalised K=64  gain K=64 nats   peak/rms       "
          "> 6 sigma, ppm\n  "
       << llvm::left_justify("tensor", 22)
       << "before  after  before  after   right aliased  before  after  "
          "before  after\n";
    for (const Rotation &each : rotations)
      printRotation(os, each);
    printRotation(os, mean);
    os << "  entropy grows in " << gaining << " of " << rotations.size()
       << " tensors (aliased transform: " << aliasedGaining << ")\n\n";
  }
  return json::Object{
      {"file", stem},
      {"tensors", std::move(rows)},
      {"mean", json::Object{{"before", jsonOf(mean.before)},
                            {"after", jsonOf(mean.after)},
                            {"after_aliased", jsonOf(mean.aliased)}}},
      {"gain_k64_nats", mean.gain()},
      {"gain_k64_nats_deviation", spreadOf(gains).deviation},
      {"tensors_gaining", gaining},
      {"gain_k64_nats_aliased", mean.aliasedGain()},
      {"gain_k64_nats_aliased_deviation", spreadOf(aliasedGains).deviation},
      {"tensors_gaining_aliased", aliasedGaining}};
}
