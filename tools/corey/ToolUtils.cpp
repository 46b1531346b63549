//===- ToolUtils.cpp - What the running tools share -----------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/ToolUtils.h"
#include "llvm/Support/JSON.h"
#include "llvm/Support/Path.h"
#include "llvm/Support/raw_ostream.h"
#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <random>

using namespace corey;

int corey::reportError(const char *tool, const Status &status) {
  llvm::errs() << tool << ": error: " << status.message() << "\n";
  return 1;
}

Expected<Difference> corey::compare(const Tensor &result,
                                    const Tensor &expected) {
  if (squeezeShape(result.shape()) != squeezeShape(expected.shape()))
    return Status::invalidArgument("expected shapes to agree, got " +
                                   result.describe() + " and " +
                                   expected.describe());
  Expected<Tensor> a = result.to(DType::F64), b = expected.to(DType::F64);
  if (!a)
    return a.takeStatus();
  if (!b)
    return b.takeStatus();
  const double *x = a->dataAs<double>(), *y = b->dataAs<double>();
  double error = 0, norm = 0;
  Difference difference;
  for (int64_t i = 0, e = a->numElements(); i < e; ++i) {
    // Equal infinities and pairs of NaN agree.
    if (x[i] == y[i] || (std::isnan(x[i]) && std::isnan(y[i]))) {
      if (std::isfinite(y[i]))
        norm += y[i] * y[i];
      continue;
    }
    double d = std::abs(x[i] - y[i]);
    if (!std::isfinite(d)) {
      difference.maxAbsolute = difference.relativeL2 =
          std::numeric_limits<double>::infinity();
      return difference;
    }
    error += d * d;
    norm += y[i] * y[i];
    difference.maxAbsolute = std::max(difference.maxAbsolute, d);
  }
  if (error > 0)
    difference.relativeL2 = std::sqrt(error / norm);
  return difference;
}

Status corey::writeProfile(const std::string &path,
                           const Executable &executable) {
  std::error_code code;
  llvm::raw_fd_ostream os(path, code);
  if (code)
    return Status::ioError(path + ": " + code.message());
  llvm::json::OStream json(os, /*IndentSize=*/1);
  // JSON has no NaN: such a number is null.
  auto number = [&](llvm::StringRef key, double value) {
    json.attribute(key, std::isfinite(value) ? llvm::json::Value(value)
                                             : llvm::json::Value(nullptr));
  };
  json.object([&] {
    json.attribute("schema", "corey-profile");
    json.attribute("version", 1);
    json.attributeArray("values", [&] {
      for (const ObservationInfo &info : executable.observations())
        json.object([&] {
          json.attribute("site", info.site);
          json.attribute("validity", info.validity);
          number("entropy", info.entropy);
          json.attribute("bins", info.bins);
          number("min", info.min);
          number("max", info.max);
          number("mean", info.mean);
          number("variance", info.variance);
          number("kurtosis", info.kurtosis);
          number("peak_to_rms", info.peakToRms);
          number("outlier_fraction", info.outlierFraction);
          json.attribute("count", static_cast<int64_t>(info.count));
          json.attribute("non_finite", static_cast<int64_t>(info.nonFinite));
        });
    });
  });
  os << "\n";
  os.close();
  if (os.has_error())
    return Status::ioError(path + ": " + os.error().message());
  return Status::ok();
}

Expected<Tensor> corey::randomTensor(DType dtype,
                                     const std::vector<int64_t> &shape,
                                     uint64_t seed, double mean,
                                     double deviation) {
  Expected<Tensor> tensor = Tensor::empty(dtype, shape, /*ZeroInit=*/true);
  if (!tensor || !isFloat(dtype))
    return tensor;
  std::mt19937_64 engine(seed);
  std::normal_distribution<double> normal(mean, deviation);
  char *data = static_cast<char *>(tensor->data());
  for (int64_t i = 0, e = tensor->numElements(); i < e; ++i)
    storeScalar(dtype, data + i * dtypeSize(dtype), normal(engine));
  return tensor;
}

std::string corey::pathFrom(const std::string &folder,
                            const std::string &path) {
  if (llvm::sys::path::is_absolute(path))
    return path;
  llvm::SmallString<256> result(folder);
  llvm::sys::path::append(result, path);
  return result.str().str();
}

Expected<Tensor> corey::readTensorRef(const std::string &ref) {
  auto split = splitTensorRef(ref);
  if (!split)
    return split.takeStatus();
  Expected<SafeTensors> file = SafeTensors::open(split->first);
  if (!file)
    return file.takeStatus();
  return file->get(split->second);
}

double corey::median(std::vector<double> &values) {
  std::sort(values.begin(), values.end());
  size_t n = values.size();
  return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

double corey::timeCall(const std::function<void()> &call, unsigned minRuns,
                       double budgetMs, std::vector<double> *samples) {
  using Clock = std::chrono::steady_clock;
  auto once = [&] {
    auto start = Clock::now();
    call();
    return std::chrono::duration<double, std::milli>(Clock::now() - start)
        .count();
  };
  once();
  std::vector<double> times;
  double total = 0;
  while (times.size() < minRuns || (total < budgetMs && times.size() < 10000)) {
    times.push_back(once());
    total += times.back();
  }
  if (samples)
    *samples = times;
  return median(times);
}
