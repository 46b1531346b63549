//===- Entropy.cpp - Speed and error of the estimator ---------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "JsonOption.h"
#include "Workload.h"
#include "corey/Scheduler/Estimator.h"
#include "corey/ToolUtils.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/Support/CommandLine.h"
#include "llvm/Support/Format.h"
#include "llvm/Support/raw_ostream.h"
#include <algorithm>
#include <cmath>
#include <thread>

using namespace corey;
namespace cl = llvm::cl;
namespace sched = corey::scheduler;

static constexpr const char *kTool = "corey-bench";

namespace {
/// What the estimator says, from the definitions, in f64 and one element after
/// another.
struct Reference {
  double entropy = 0, mean = 0, variance = 0, kurtosis = 0, rms = 0;
};

double entropyOf(const std::vector<double> &values, double low, double width,
                 int bins) {
  std::vector<double> counts(bins, 0.0);
  for (double x : values) {
    double place = std::floor((x - low) / width * bins);
    ++counts[static_cast<int>(std::clamp(place, 0.0, double(bins - 1)))];
  }
  double entropy = 0;
  for (double count : counts)
    if (count > 0) {
      double p = count / static_cast<double>(values.size());
      entropy -= p * std::log(p);
    }
  return entropy;
}

double entropyOf(const std::vector<double> &values,
                 const sched::EstimatorOptions &options) {
  auto [least, most] = std::minmax_element(values.begin(), values.end());
  double low = *least, width = *most - *least;
  switch (options.range) {
  case sched::RangeMode::Fixed:
    return entropyOf(values, options.low, options.high - options.low,
                     options.bins);
  case sched::RangeMode::PaddedMinMax: {
    double margin = std::max(0.05 * width, 1e-6);
    return entropyOf(values, low - margin, width + 2 * margin, options.bins);
  }
  default:
    return width < 1e-8 ? 0
                        : entropyOf(values, low, width + 1e-8, options.bins);
  }
}

/// Of the tokens 0, stride, 2 stride, ... of every sequence in [B, L, D].
Reference referenceOf(const Tensor &tensor,
                      const sched::EstimatorOptions &options) {
  Tensor wide = *tensor.to(DType::F64);
  int64_t B = wide.dim(0), L = wide.dim(1), D = wide.dim(2);
  std::vector<double> seen;
  double entropies = 0;
  int64_t tokens = 0;
  for (int64_t b = 0; b < B; ++b)
    for (int64_t t = 0; t < L; t += options.stride) {
      const double *row = wide.dataAs<double>() + (b * L + t) * D;
      seen.insert(seen.end(), row, row + D);
      if (options.sampling != sched::Sampling::Token)
        continue;
      auto [least, most] = std::minmax_element(row, row + D);
      if (*most - *least < 1e-8)
        continue;
      entropies += entropyOf({row, row + D}, options);
      ++tokens;
    }
  Reference r;
  r.entropy = options.sampling != sched::Sampling::Token
                  ? entropyOf(seen, options)
              : tokens ? entropies / static_cast<double>(tokens)
                       : 0;
  double n = static_cast<double>(seen.size()), fourth = 0;
  for (double x : seen) {
    r.mean += x / n;
    r.rms += x * x / n;
  }
  r.rms = std::sqrt(r.rms);
  for (double x : seen) {
    double square = (x - r.mean) * (x - r.mean);
    r.variance += square / n;
    fourth += square * square / n;
  }
  r.kurtosis = r.variance > 0 ? fourth / (r.variance * r.variance) : 0;
  return r;
}

/// The largest error of a moment, relative to the moment; of the mean, to the
/// rms.
double momentError(const sched::Statistics &got, const Reference &expected) {
  auto relative = [](double a, double b, double scale) {
    return a == b ? 0 : std::abs(a - b) / scale;
  };
  return std::max(
      {relative(got.mean, expected.mean, expected.rms),
       relative(got.rms, expected.rms, expected.rms),
       relative(got.variance, expected.variance, expected.variance),
       relative(got.kurtosis, expected.kurtosis, expected.kurtosis)});
}
} // namespace

int corey::runEntropy(int argc, char **argv) {
  cl::OptionCategory category("corey-bench entropy options");
  cl::opt<std::string> target("target", cl::desc("Device to run on: cpu"),
                              cl::init("cpu"), cl::cat(category));
  cl::list<std::string> shapes(
      "shape",
      cl::desc("B,L,D; default 1,2048,2048. May be given several times"),
      cl::value_desc("n,n,n"), cl::cat(category));
  cl::list<std::string> dtypes(
      "dtype", cl::desc("f64, f32, f16 or bf16; default f32, f16 and bf16"),
      cl::CommaSeparated, cl::cat(category));
  cl::list<int64_t> strides(
      "stride", cl::desc("Looks at every n-th token; default 1 and 8"),
      cl::CommaSeparated, cl::cat(category));
  cl::list<int> threads(
      "threads", cl::desc("Threads, 0 being every processor; default 1 and 0"),
      cl::CommaSeparated, cl::cat(category));
  cl::opt<std::string> sampling(
      "sampling",
      cl::desc("full (default): one histogram; token: one per token"),
      cl::init("full"), cl::cat(category));
  cl::opt<std::string> range("range",
                             cl::desc("Range of the bins: minmax (default), "
                                      "padded, or fixed, from -6 to 6"),
                             cl::init("minmax"), cl::cat(category));
  cl::opt<int> bins("bins", cl::desc("Bins of a histogram"), cl::init(256),
                    cl::cat(category));
  cl::opt<double> budget("budget-ms",
                         cl::desc("Time to spend on each measurement"),
                         cl::init(500), cl::cat(category));
  JsonOption json(category);
  cl::HideUnrelatedOptions(category);
  cl::ParseCommandLineOptions(
      argc, argv,
      "COREY: the entropy estimator, with its error against f64 loops\n");
  if (target != "cpu")
    return reportError(
        kTool,
        Status::unsupported("--target: expected cpu, got '" + target + "'"));
  sched::EstimatorOptions options;
  options.bins = bins;
  if (sampling != "full" && sampling != "token")
    return reportError(
        kTool, Status::invalidArgument("--sampling: expected full or token, "
                                       "got '" +
                                       sampling + "'"));
  if (range == "padded") {
    options.range = sched::RangeMode::PaddedMinMax;
  } else if (range == "fixed") {
    options.range = sched::RangeMode::Fixed;
    options.low = -6;
    options.high = 6;
  } else if (range != "minmax") {
    return reportError(
        kTool,
        Status::invalidArgument(
            "--range: expected minmax, padded or fixed, got '" + range + "'"));
  }
  if (shapes.empty())
    shapes.push_back("1,2048,2048");
  std::vector<std::string> typeList(dtypes.begin(), dtypes.end());
  if (typeList.empty())
    typeList = {"f32", "f16", "bf16"};
  std::vector<int64_t> strideList(strides.begin(), strides.end());
  if (strideList.empty())
    strideList = {1, 8};
  std::vector<int> threadList(threads.begin(), threads.end());
  if (threadList.empty())
    threadList = {1, 0};

  llvm::json::Array results;
  bool toStdout = json == "-";
  if (!toStdout)
    llvm::outs()
        << "shape                dtype stride threads   median ms      "
           "min      max    GB/s  entropy  entropy error  moment "
           "error\n";
  for (const std::string &text : shapes) {
    llvm::SmallVector<llvm::StringRef> parts;
    llvm::StringRef(text).split(parts, ',');
    std::vector<int64_t> shape;
    for (llvm::StringRef part : parts) {
      int64_t size;
      if (part.getAsInteger(10, size) || size < 1)
        return reportError(
            kTool, Status::invalidArgument(
                       "--shape: expected positive sizes, got '" + text + "'"));
      shape.push_back(size);
    }
    if (shape.size() != 3)
      return reportError(
          kTool, Status::invalidArgument(
                     "--shape: expected 3 sizes (B,L,D), got '" + text + "'"));
    for (const std::string &typeText : typeList) {
      static constexpr std::pair<DType, sched::ElementType> types[] = {
          {DType::F64, sched::ElementType::F64},
          {DType::F32, sched::ElementType::F32},
          {DType::F16, sched::ElementType::F16},
          {DType::BF16, sched::ElementType::BF16}};
      Expected<DType> dtype = dtypeFromName(typeText);
      const auto *type = llvm::find_if(
          types, [&](auto &entry) { return dtype && entry.first == *dtype; });
      if (type == std::end(types))
        return reportError(
            kTool, Status::invalidArgument(
                       "--dtype: expected f64, f32, f16 or bf16, got '" +
                       typeText + "'"));
      Expected<Tensor> tensor = randomTensor(*dtype, shape, 1);
      if (!tensor)
        return reportError(kTool, tensor.status());
      auto view = sched::TensorView::contiguous(tensor->data(), type->second,
                                                {shape[0], shape[1], shape[2]});
      for (int64_t stride : strideList) {
        options.stride = stride;
        options.sampling = sampling == "token" ? sched::Sampling::Token
                           : stride == 1       ? sched::Sampling::Full
                                               : sched::Sampling::Strided;
        Reference reference;
        for (int count : threadList) {
          options.threads = count;
          auto estimator = sched::Estimator::create(options);
          if (!estimator)
            return reportError(kTool, estimator.status());
          if (count == threadList.front())
            reference = referenceOf(*tensor, options);
          Expected<sched::Statistics> statistics = estimator->estimate(view);
          if (!statistics)
            return reportError(kTool, statistics.status());
          std::vector<double> samples;
          double ms = timeCall([&] { (void)!estimator->estimate(view); }, 5,
                               budget, &samples);
          std::sort(samples.begin(), samples.end());
          double bytes = static_cast<double>(shape[0]) *
                         static_cast<double>((shape[1] + stride - 1) / stride) *
                         static_cast<double>(shape[2] * dtypeSize(*dtype));
          double entropyError =
                     std::abs(statistics->entropy.value() - reference.entropy),
                 moments = momentError(*statistics, reference);
          int used =
              count ? count
                    : std::max(1, static_cast<int>(
                                      std::thread::hardware_concurrency()));
          if (!toStdout) {
            llvm::outs() << llvm::left_justify(text, 20) << " "
                         << llvm::left_justify(typeText, 5)
                         << llvm::format(
                                " %6lld %7d  %10.4f %8.4f %8.4f  %6.2f  %7.4f "
                                " %13.3g  %12.3g\n",
                                static_cast<long long>(stride), used, ms,
                                samples.front(), samples.back(),
                                bytes / ms * 1e-6, statistics->entropy.value(),
                                entropyError, moments);
            llvm::outs().flush();
          }
          results.push_back(
              llvm::json::Object{{"benchmark", "entropy"},
                                 {"shape", llvm::json::Array(shape)},
                                 {"dtype", typeText},
                                 {"sampling", sampling.getValue()},
                                 {"range", range.getValue()},
                                 {"bins", options.bins},
                                 {"stride", stride},
                                 {"threads", used},
                                 {"median_ms", ms},
                                 {"min_ms", samples.front()},
                                 {"max_ms", samples.back()},
                                 {"runs", static_cast<int64_t>(samples.size())},
                                 {"bytes", bytes},
                                 {"gb_per_s", bytes / ms * 1e-6},
                                 {"entropy_nats", statistics->entropy.value()},
                                 {"entropy_error_nats", entropyError},
                                 {"moment_error", moments}});
        }
      }
    }
  }
  if (json.empty())
    return 0;
  llvm::json::Value document = describeRun(target);
  (*document.getAsObject())["benchmark"] = "entropy";
  (*document.getAsObject())["results"] = std::move(results);
  return writeJSON(json, std::move(document));
}
