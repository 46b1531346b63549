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

Expected<DType> corey::parseFloatType(const std::string &option,
                                      const std::string &text) {
  Expected<DType> type = dtypeFromName(text);
  if (type &&
      (*type == DType::F32 || *type == DType::F16 || *type == DType::BF16))
    return type;
  return Status::invalidArgument(option + ": expected f32, f16 or bf16, got '" +
                                 text + "'");
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
  // Neither the clock nor the call can fail.
  return *timeOnDevice(
      Device::cpu(),
      [&](void *) {
        call();
        return Status::ok();
      },
      minRuns, budgetMs, samples);
}

struct Stopwatch::Events {
  Events(cuda::Stream stream, cuda::Event start, cuda::Event end)
      : stream(std::move(stream)), start(std::move(start)),
        end(std::move(end)) {}
  cuda::Stream stream;
  cuda::Event start, end;
};

Expected<Stopwatch> Stopwatch::create(Device device) {
  Stopwatch watch;
  if (device.kind != Device::CUDA)
    return watch;
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
  watch.events = std::make_shared<Events>(std::move(*stream), std::move(*start),
                                          std::move(*end));
  return watch;
}

Expected<double> Stopwatch::time(const Work &call, const Work &before) {
  using Clock = std::chrono::steady_clock;
  void *stream = events ? events->stream.handle() : nullptr;
  Status status = before ? before(stream) : Status::ok();
  if (status && events)
    status = events->start.record(stream);
  auto start = Clock::now();
  if (status)
    status = call(stream);
  auto end = Clock::now();
  if (status && events)
    status = events->end.record(stream);
  if (status && events)
    status = events->end.synchronize();
  if (!status)
    return status;
  if (events)
    return cuda::Event::milliseconds(events->start, events->end);
  return std::chrono::duration<double, std::milli>(end - start).count();
}

Expected<double> corey::timeOnDevice(Device device, const Stopwatch::Work &call,
                                     unsigned minRuns, double budgetMs,
                                     std::vector<double> *samples,
                                     const Stopwatch::Work &before) {
  Expected<Stopwatch> watch = Stopwatch::create(device);
  if (!watch)
    return watch.takeStatus();
  if (Expected<double> warm = watch->time(call, before); !warm)
    return warm;
  std::vector<double> times;
  double total = 0;
  while (times.size() < minRuns || (total < budgetMs && times.size() < 10000)) {
    Expected<double> ms = watch->time(call, before);
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

Expected<TimedWork> corey::workOf(Executable &executable, Device device,
                                  const std::string &function,
                                  std::vector<Tensor> inputs,
                                  std::vector<Tensor> outputs, int repeats) {
  TimedWork work;
  if (device.kind == Device::CUDA) {
    Expected<std::shared_ptr<CapturedRun>> captured =
        executable.capture(function, inputs, outputs, repeats);
    if (!captured)
      return captured.takeStatus();
    work.call = [run = *captured](void *stream) { return run->launch(stream); };
    work.repeats = repeats;
    return work;
  }
  work.call = [run = executable.shared_from_this(), function,
               inputs = std::move(inputs),
               outputs = std::move(outputs)](void *) mutable {
    return run->run(function, inputs.data(), inputs.size(), outputs.data(),
                    outputs.size());
  };
  return work;
}

Timing corey::timingOf(std::vector<double> samples) {
  Timing timing;
  timing.median = median(samples);
  timing.runs = static_cast<int64_t>(samples.size());
  timing.min = samples.front();
  timing.max = samples.back();
  // The ranks that a binomial distribution of n and one half leaves at most
  // 2.5 % beyond, on either side.
  double n = static_cast<double>(samples.size()), share = std::exp2(-n),
         below = share;
  size_t rank = 0;
  while (below + share * (n - double(rank)) / double(rank + 1) <= 0.025) {
    share *= (n - double(rank)) / double(rank + 1);
    below += share;
    ++rank;
  }
  timing.low = samples[rank];
  timing.high = samples[samples.size() - 1 - rank];
  return timing;
}

Expected<std::vector<Timing>>
corey::timeInTurn(Device device, const std::vector<TimedWork> &work,
                  unsigned minRounds, double budgetMs) {
  // 2^-n is a number yet, and enough.
  constexpr size_t kMaxRounds = 1000;
  Expected<Stopwatch> watch = Stopwatch::create(device);
  if (!watch)
    return watch.takeStatus();
  std::vector<std::vector<double>> samples(work.size());
  std::vector<size_t> order(work.size());
  for (size_t i = 0; i < order.size(); ++i)
    order[i] = i;
  std::mt19937 generator(1);
  auto start = std::chrono::steady_clock::now();
  auto elapsed = [&] {
    return std::chrono::duration<double, std::milli>(
               std::chrono::steady_clock::now() - start)
        .count();
  };
  // The first round warms up.
  for (size_t round = 0;
       round <= minRounds || (elapsed() < budgetMs && round <= kMaxRounds);
       ++round) {
    for (size_t i = order.size(); i > 1; --i)
      std::swap(order[i - 1], order[generator() % i]);
    for (size_t i : order) {
      Expected<double> ms = watch->time(work[i].call, work[i].before);
      if (!ms)
        return ms.takeStatus();
      if (round)
        samples[i].push_back(*ms / work[i].repeats);
    }
  }
  std::vector<Timing> timings;
  for (std::vector<double> &each : samples)
    timings.push_back(timingOf(std::move(each)));
  return timings;
}
