//===- ToolUtils.h - What the running tools share ---------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_TOOLS_COREY_TOOLUTILS_H
#define COREY_TOOLS_COREY_TOOLUTILS_H

#include "corey/Executable.h"
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace corey {

/// Prints `<tool>: error: <message>` and returns 1.
int reportError(const char *tool, const Status &status);

/// Distance between a result and what it should be.
struct Difference {
  /// ||result - expected|| / ||expected||; infinity if either is not finite
  /// where the other is, or if only `expected` is zero.
  double relativeL2 = 0;
  /// Largest |result - expected|.
  double maxAbsolute = 0;
};
/// Errors: InvalidArgument if the shapes differ by more than axes of size 1.
Expected<Difference> compare(const Tensor &result, const Tensor &expected);

/// A tensor of normally distributed values (zeros for integer types).
Expected<Tensor> randomTensor(DType dtype, const std::vector<int64_t> &shape,
                              uint64_t seed, double mean = 0,
                              double deviation = 1);

/// The type that the text of an option, such as "--dtype", names: f32, f16 or
/// bf16. The message of an error begins with the option.
Expected<DType> parseFloatType(const std::string &option,
                               const std::string &text);

/// A path that a file in `folder` names: relative to the folder, or absolute.
std::string pathFrom(const std::string &folder, const std::string &path);

/// Reads `path.safetensors:key`.
Expected<Tensor> readTensorRef(const std::string &ref);

/// Writes what a program observed as a profile for `ssm-annotate-stats`. Range
/// and moments of order one and two are over all calls, the rest is of the
/// last. Errors: IOError.
Status writeProfile(const std::string &path, const Executable &executable);

/// `tensors` in the memory of `device`: themselves, or copies.
Expected<std::vector<Tensor>> moveTo(const std::vector<Tensor> &tensors,
                                     Device device);
/// Runs a function of a program for `device` on tensors of the host; `outputs`
/// are made on the host.
Status runFromHost(Executable &executable, Device device,
                   const std::string &function,
                   const std::vector<Tensor> &inputs,
                   std::vector<Tensor> &outputs);

/// Median of `values`; sorts them.
double median(std::vector<double> &values);

/// Milliseconds of one call: the median of at least `minRuns` runs, and of more
/// while they fit in `budgetMs`, after one to warm up.
double timeCall(const std::function<void()> &call, unsigned minRuns,
                double budgetMs, std::vector<double> *samples = nullptr);

/// Times work on a device: by the clock of the wall on the CPU, by the device's
/// own on a CUDA device.
class Stopwatch {
public:
  using Work = std::function<Status(void *stream)>;
  static Expected<Stopwatch> create(Device device);
  /// Milliseconds of `call`, which puts work on a stream (null on the CPU), and
  /// not of `before`, which does too and may be empty.
  Expected<double> time(const Work &call, const Work &before = nullptr);

private:
  struct Events;
  std::shared_ptr<Events> events;
};

/// As timeCall(), by the stopwatch of a device: `before`, if given, is not
/// measured.
Expected<double> timeOnDevice(Device device, const Stopwatch::Work &call,
                              unsigned minRuns, double budgetMs,
                              std::vector<double> *samples = nullptr,
                              const Stopwatch::Work &before = nullptr);

/// One of several pieces of work to compare.
struct TimedWork {
  Stopwatch::Work call, before;
  /// How often `call` does what is to be timed.
  int repeats = 1;
};
/// A run of a function with given outputs as work: `repeats` of them in a
/// captured graph on a CUDA device, one on the CPU.
Expected<TimedWork> workOf(Executable &executable, Device device,
                           const std::string &function,
                           std::vector<Tensor> inputs,
                           std::vector<Tensor> outputs, int repeats);

/// A median, and an interval that has the median of the distribution in it with
/// a probability of at least 95 %: from order statistics, whatever the
/// distribution. Of fewer than six samples it is the least and the largest.
struct Timing {
  double median = 0, low = 0, high = 0, min = 0, max = 0;
  int64_t runs = 0;
};
Timing timingOf(std::vector<double> samples);

/// Times pieces of work in turn, in a new order every round, for `budgetMs` and
/// at least `minRounds` after one to warm up.
Expected<std::vector<Timing>> timeInTurn(Device device,
                                         const std::vector<TimedWork> &work,
                                         unsigned minRounds, double budgetMs);

} // namespace corey

#endif // COREY_TOOLS_COREY_TOOLUTILS_H
