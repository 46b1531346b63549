//===- ToolUtils.cpp - What the running tools share -----------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/ToolUtils.h"
#include "corey/Device/CUDA.h"
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

Expected<std::vector<Tensor>> corey::moveTo(const std::vector<Tensor> &tensors,
                                            Device device) {
  std::vector<Tensor> moved;
  for (const Tensor &tensor : tensors) {
    if (tensor.device() == device) {
      moved.push_back(tensor);
      continue;
    }
    Expected<Tensor> copy = tensor.to(device);
    if (!copy)
      return copy.takeStatus();
    moved.push_back(std::move(*copy));
  }
  return moved;
}

Status corey::runFromHost(Executable &executable, Device device,
                          const std::string &function,
                          const std::vector<Tensor> &inputs,
                          std::vector<Tensor> &outputs) {
  Expected<std::vector<Tensor>> given = moveTo(inputs, device);
  if (!given)
    return given.takeStatus();
  std::vector<Tensor> results;
  if (Status status = executable.run(function, *given, results); !status)
    return status;
  Expected<std::vector<Tensor>> back = moveTo(results, Device::cpu());
  if (!back)
    return back.takeStatus();
  outputs = std::move(*back);
  return Status::ok();
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

Expected<double> corey::timeOnDevice(
    Device device, const std::function<Status(void *stream)> &call,
    unsigned minRuns, double budgetMs, std::vector<double> *samples,
    const std::function<Status(void *stream)> &before) {
  Expected<std::shared_ptr<cuda::Device>> gpu = cuda::Device::get(device.index);
  if (!gpu)
    return gpu.takeStatus();
  Expected<cuda::Stream> stream = cuda::Stream::create(*gpu);
  if (!stream)
    return stream.takeStatus();
  Expected<cuda::Event> start = cuda::Event::create(*gpu, /*timing=*/true),
                        end = cuda::Event::create(*gpu, /*timing=*/true);
  for (Expected<cuda::Event> *event : {&start, &end})
    if (!*event)
      return event->takeStatus();
  auto once = [&]() -> Expected<double> {
    Status status = before ? before(stream->handle()) : Status::ok();
    if (status)
      status = start->record(stream->handle());
    if (status)
      status = call(stream->handle());
    if (status)
      status = end->record(stream->handle());
    if (status)
      status = end->synchronize();
    if (!status)
      return status;
    return cuda::Event::milliseconds(*start, *end);
  };
  if (Expected<double> warm = once(); !warm)
    return warm;
  std::vector<double> times;
  double total = 0;
  while (times.size() < minRuns || (total < budgetMs && times.size() < 10000)) {
    Expected<double> ms = once();
    if (!ms)
      return ms;
    times.push_back(*ms);
    // Very short times would never end.
    total += std::max(*ms, 1e-3);
  }
  if (samples)
    *samples = times;
  return median(times);
}
