//===- Executable.h - Compiling and running ssm programs --------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_EXECUTABLE_H
#define COREY_EXECUTABLE_H

#include "corey/SafeTensors.h"
#include "corey/Scheduler/Estimator.h"
#include "corey/Scheduler/Problem.h"
#include "corey/Status.h"
#include "corey/Tensor.h"
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace corey {

class Executable;

/// Version of the library, for example "0.1.0 (0123456789ab)".
const char *getVersion();

struct ContextOptions {
  /// "cpu", "cuda" (the first one) or "cuda:<number>".
  std::string device = "cpu";
  /// Threads of the parallel loops of a call; 0 takes every processor.
  int threads = 0;
};

struct CompileOptions {
  /// Who chooses the chunks that nobody sets, as scheduler::parsePolicy() reads
  /// it: "measured" (the chunk table, and where it has no entry the cost
  /// model), "unsplit", "static:256", "guarded:inner=[entropy]", ... A policy
  /// of its own at a site goes before.
  std::string policy = "measured";
  /// Which ops become one kernel: "dp" by predicted time, "entropy",
  /// "arithmetic" or "static" by the published score, or "none".
  std::string fusion = "dp";
  /// Width of a vector register in bits: 256 or 512; 0, the only choice on a
  /// CUDA device, takes the host's.
  int vectorBits = 0;
  /// 2 runs the passes that lowered programs need; 0, 1 and 3 run LLVM's O0, O1
  /// and O3.
  int optLevel = 2;
  /// Computes what depends on weights alone once, before the first run that
  /// needs it and again after a weight is bound anew. Off, every call does.
  bool hoistWeights = true;
  /// Gathers statistics of every floating-point tensor of the program in each
  /// run, at sites of their own (see observations()). Slow.
  bool observeValues = false;
  /// What is looked at of an observed value, and how, at sites that serve no
  /// policy's decision.
  scheduler::EstimatorOptions observation;
  /// The chip whose code emit() shows and exportProgram() writes, such as
  /// "sm_90a"; empty stands for the context's device. compile() always makes
  /// code for that.
  std::string chip = "";
};

/// The kernels that programs have for a scan on devices of a kind.
std::vector<scheduler::Variant> scanVariants(Device::Kind kind,
                                             const scheduler::Problem &problem);

/// What exportProgram() writes.
struct ExportOptions {
  /// "o" for an object, "so" for a shared library, "cubin" for the kernels of a
  /// chip as machine code.
  std::string format = "so";
  /// The archive of run-time functions that a shared library is linked with.
  std::string runtimeArchive = "";
  /// What a program for a chip holds of its kernels: "ptx", which the driver
  /// compiles when they are first launched, or "cubin".
  std::string kernels = "ptx";
  /// The ptxas that makes machine code; empty takes the one that $PTXAS names,
  /// or of $PATH, $CUDA_HOME/bin or /usr/local/cuda/bin.
  std::string ptxas = "";
};

/// A device and the compiler for it. Thread-safe: compile() takes turns.
class Context {
public:
  /// Errors: InvalidArgument for an unknown device or a negative thread count,
  /// NotFound without a CUDA driver or device, Unsupported for a device that no
  /// kernels can be made for.
  static Expected<std::shared_ptr<Context>> create(ContextOptions options = {});
  ~Context();

  /// Compiles a module, given as MLIR text or bytecode; `name` stands for it in
  /// messages. One that a process has compiled before is taken from the cache
  /// on disk (see Executable::cache()). Errors: CompileError with one line per
  /// diagnostic.
  Expected<std::shared_ptr<Executable>>
  compile(std::string_view source, const CompileOptions &options = {},
          std::string_view name = "<source>");
  /// Compiles a file; NotFound or IOError when it cannot be read.
  Expected<std::shared_ptr<Executable>>
  compileFile(const std::string &path, const CompileOptions &options = {});

  /// The program after a phase of the pipeline, as text: "captured", "fused",
  /// "bound", "lowered", "buffers" or "llvm" for MLIR, "llvmir" for LLVM IR of
  /// the host and "llvmir-opt" for it optimized; "ptx" for the kernels of a
  /// GPU.
  Expected<std::string> emit(std::string_view source, std::string_view phase,
                             const CompileOptions &options = {},
                             std::string_view name = "<source>");
  /// The device as the scheduler sees it.
  scheduler::Device schedulerDevice() const;

  /// Writes a program to `path`, and its C header beside it, with `.h` in place
  /// of the extension; of a "cubin" there is no header. With a chip in
  /// `options` the functions work on the memory of a CUDA device and on a
  /// stream. There is no scheduler in such a program: policies other than
  /// "static:<n>" and "unsplit" (which "measured" becomes here) are
  /// Unsupported.
  Status exportProgram(std::string_view source, const std::string &path,
                       const ExportOptions &what,
                       const CompileOptions &options = {},
                       std::string_view name = "<source>");

  Device getDevice() const;
  int getThreads() const;
  /// Errors: InvalidArgument for a negative count. 0 takes every processor.
  Status setThreads(int threads);

private:
  Context();
  friend class Executable;
  struct Impl;
  std::unique_ptr<Impl> impl;
};

/// An input, weight or output of a function. Dimensions of -1 are free.
struct ArgumentInfo {
  std::string name;
  DType dtype = DType::F32;
  std::vector<int64_t> shape;
  /// Of an output that is an updated pool of states: the number of the input
  /// that it may share its memory with; else -1.
  int updatedInput = -1;
};

struct FunctionInfo {
  std::string name;
  std::vector<ArgumentInfo> inputs, outputs;
};

/// A chunk site and what its last call used.
struct ChunkInfo {
  std::string site;
  /// The chunk set by setChunk(), or 0.
  int64_t requested = 0;
  /// Of the last call; 0 before the first.
  int64_t batch = 0, length = 0, chunk = 0;
  /// The kernel that ran.
  std::string variant;
  /// Milliseconds that were predicted for it; NaN if none were.
  double predictedMs = NAN;
  /// Whether statistics of earlier calls had a part in the choice.
  bool usedData = false;
  /// The policy of the site, and who chose the chunk, in words.
  std::string policy, reason;
};

/// Statistics of an `ssm.observe` site: of all elements that were looked at
/// since the program was compiled, and of the last call. A site whose chunk is
/// chosen by a policy that samples looks at the sample.
struct ObservationInfo {
  std::string site;
  uint64_t calls = 0;
  uint64_t count = 0, nonFinite = 0;
  double min = 0, max = 0, mean = 0, variance = 0;
  /// Of the last call: "ok", "constant", "empty" or "not finite".
  std::string validity;
  /// Entropy of the last call's histogram and its moving average, in nats; NaN
  /// if there is none.
  double entropy = NAN, averageEntropy = NAN;
  int bins = 0;
  double kurtosis = 0, outlierFraction = 0, peakToRms = 0;
  /// What gathering them took.
  double milliseconds = 0;
};

/// What the kernels of a program move, at the sizes it states; a dynamic size
/// counts as 1024.
struct TrafficInfo {
  int64_t kernels = 0;
  /// Bytes that kernels read and write, counting each tensor once per kernel.
  double bytesRead = 0, bytesWritten = 0;
  /// Bytes that separate kernels would read and write in addition.
  double bytesKept = 0;
  /// What ssm-fuse's physical score predicts for them, one after another.
  double predictedMs = 0;
  double bytes() const { return bytesRead + bytesWritten; }
};

/// Milliseconds spent on a step of compilation.
struct PhaseTime {
  std::string phase;
  double milliseconds;
};

/// What became of a program in the cache on disk, the folder "programs" of
/// $COREY_CACHE_DIR (see README.md), which spares another process compiling it.
struct CacheInfo {
  enum Outcome {
    /// There is no cache.
    Off,
    /// It was compiled, and could not be stored.
    Missing,
    /// It was compiled and stored.
    Stored,
    /// It was there.
    Loaded
  };
  Outcome outcome = Off;
  /// The file; empty where there is no cache.
  std::string path;
  /// What was wrong with an entry that was there, or with storing one; empty if
  /// nothing was. It is no error: the program was compiled.
  std::string problem;
};

/// A run that was captured once, on a CUDA device, to be launched as a whole:
/// it reads and writes the same tensors every time. Keeps them, and the
/// program. Thread-safe; launches must follow one another on the device.
class CapturedRun {
public:
  /// Of how many launches under the same policies one observes. Of a prompt of
  /// a whole model that launch takes up to twice as long as another: spread
  /// over so many it is below 0.3 %.
  static constexpr uint64_t kLaunchesPerObservation = 512;

  ~CapturedRun();
  /// Puts the run on a stream, and captures it again first if a weight has been
  /// set since, or chunks, variants or policies have and that makes a
  /// difference. For null it runs on a stream of its own, and is done on
  /// return. Where a policy decides on statistics, or the program observes,
  /// one of kLaunchesPerObservation gathers them, the first one to begin with;
  /// it is a graph of its own. Launches under other policies do not count. A
  /// later launch takes them when they are there, waits for nothing, and
  /// captures again if a policy then chooses otherwise.
  Status launch(void *stream = nullptr);
  /// Captures it again, for what the policies choose now.
  Status update();
  /// Of the graph that does not observe: its nodes, and how often the driver
  /// did not take an update in place, and once.
  size_t numNodes() const;
  uint64_t instantiations() const;
  /// Launches so far, and how many of them gathered statistics.
  struct Launches {
    uint64_t all = 0, observing = 0;
  };
  Launches launches() const;
  const std::vector<Tensor> &outputs() const;

private:
  CapturedRun();
  friend class Executable;
  struct Impl;
  std::unique_ptr<Impl> impl;
};

/// A compiled program. One compilation serves every batch and length. run() may
/// be called from several threads at a time.
class Executable : public std::enable_shared_from_this<Executable> {
public:
  ~Executable();

  const std::vector<FunctionInfo> &functions() const;
  /// Null when there is no function of that name.
  const FunctionInfo *findFunction(std::string_view name) const;

  /// Weights the program declares, by symbol; those it prepares from others are
  /// not among them.
  const std::vector<ArgumentInfo> &weights() const;
  /// Binds every weight to a tensor of `file`. `prefix` replaces the module's
  /// `ssm.weight_prefix` unless it is null. A tensor must have the declared
  /// dtype and, up to axes of size 1, the declared shape.
  Status bindWeights(const SafeTensors &file,
                     const std::string *prefix = nullptr);
  /// Binds every weight to what `find` returns for its key, the module's
  /// `ssm.weight_prefix` included.
  Status bindWeights(
      const std::function<Expected<Tensor>(const std::string &key)> &find);
  /// A tensor on the host is copied to the device of a program there; one on
  /// the device is used where it lies, if it is contiguous and aligned.
  Status bindWeight(std::string_view symbol, const Tensor &tensor);
  /// The tensor that a weight is bound to, on the program's device. Errors:
  /// NotFound.
  Expected<Tensor> boundWeight(std::string_view symbol) const;

  /// Runs a function. `outputs` may be empty: contiguous tensors are made.
  /// Otherwise there is one per result, of the right dtype, shape and device,
  /// with any strides, and overlapping neither an input nor another output, but
  /// for pools of states (see below). Everything is checked before anything
  /// runs; what depends on data (ids of an embedding, starts of sequences,
  /// slots of a pool) is reported after, with InvalidArgument. An input whose
  /// innermost stride is not 1 is copied first, and an output that is not
  /// contiguous after; other strides cost nothing. `dt` and `decay` of
  /// `ssm.ssd` are read with any strides, [B, H, L] in memory say, where an
  /// input is nothing but those (see the pass `ssm-any-strides`). Calls of
  /// known shapes with given outputs allocate no memory.
  ///
  /// Where an output is a pool of states whose `slots` an op has updated
  /// (`last_state` of `ssm.selective_scan`, `final_states` of `ssm.ssd`,
  /// `final_state` of `ssm.causal_conv`), the pool is an input, and nothing
  /// else reads that input, the output may be the very tensor given as that
  /// input: ArgumentInfo::updatedInput is its number. The pool is updated in
  /// place then, and no memory of it but the slots is read or written, as a
  /// server's decode loop needs. It must be contiguous and, on a CUDA device,
  /// aligned. With an output of its own memory the input stays what it was, for
  /// a copy of the whole pool. A run that fails may have updated slots.
  ///
  /// On a CUDA device kernels want rows at multiples of 16 bytes, or of the
  /// largest power of two that divides the bytes of a row, and the first at one
  /// of 16: other tensors are copied as well, but for inputs that are read
  /// with any strides. `stream` is the CUstream that the
  /// call's work is put on, 1 for the legacy default stream; run() does not
  /// wait for it, so that the work can be captured into a graph, and errors of
  /// the device show where the caller waits, those in data at a later run. Null
  /// stands for a stream of the program's own, which does not wait for others:
  /// inputs must be there, and outputs are on return. On the CPU only null is
  /// accepted.
  Status run(std::string_view function, const std::vector<Tensor> &inputs,
             std::vector<Tensor> &outputs, void *stream = nullptr);
  Status run(std::string_view function, const Tensor *inputs, size_t numInputs,
             Tensor *outputs, size_t numOutputs, void *stream = nullptr);
  /// Captures a run, on a CUDA device; nothing of it runs yet. `outputs` may be
  /// empty, as for run(). `repeats` has one launch run it so often. Errors:
  /// those of run(), Unsupported on the CPU.
  Expected<std::shared_ptr<CapturedRun>>
  capture(std::string_view function, const std::vector<Tensor> &inputs,
          const std::vector<Tensor> &outputs = {}, int repeats = 1);
  /// The shapes of the results for the given inputs, after all checks of them.
  Expected<std::vector<std::vector<int64_t>>>
  outputShapes(std::string_view function, const std::vector<Tensor> &inputs);
  /// New tensors of those shapes, on the program's device.
  Expected<std::vector<Tensor>> makeOutputs(std::string_view function,
                                            const std::vector<Tensor> &inputs);

  /// Fixes the chunk of a site, in tokens; 0 gives it back to the policy.
  /// Errors: NotFound with the sites there are, InvalidArgument for a negative
  /// chunk.
  Status setChunk(std::string_view site, int64_t chunk);
  /// Fixes the kernel of a site by name (see Context::variants()); empty gives
  /// it back to the policy. Errors: NotFound with the kernels there are.
  Status setVariant(std::string_view site, std::string_view variant);
  /// Gives a site, or every site if `site` is empty, to another policy. A
  /// policy that decides on statistics is refused if the program was compiled
  /// without gathering them at the site. Errors: NotFound, InvalidArgument.
  Status setPolicy(std::string_view site, std::string_view policy);
  std::vector<ChunkInfo> chunks() const;
  std::vector<ObservationInfo> observations() const;

  /// What was compiled, for what, how long it took and what the last call
  /// chose, for people to read.
  std::string explain() const;
  const std::vector<PhaseTime> &compileTimes() const;
  const CacheInfo &cache() const;
  const TrafficInfo &traffic() const;
  /// Bytes of intermediates kept for later calls, and how often the system was
  /// asked for memory.
  std::pair<size_t, size_t> memoryUse() const;

private:
  Executable();
  friend class Context;
  friend class CapturedRun;
  struct Impl;
  std::unique_ptr<Impl> impl;
};

} // namespace corey

#endif // COREY_EXECUTABLE_H
