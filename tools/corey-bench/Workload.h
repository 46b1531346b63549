//===- Workload.h - Programs to measure -------------------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_TOOLS_COREY_BENCH_WORKLOAD_H
#define COREY_TOOLS_COREY_BENCH_WORKLOAD_H

#include "corey/Executable.h"
#include "corey/Scheduler/Problem.h"
#include "corey/Tensor.h"
#include "corey/ToolUtils.h"
#include "llvm/Support/JSON.h"
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace corey {

/// Inputs and program of one benchmark.
struct Workload {
  std::string program;
  /// The same program with statistics of its values; empty if there are none.
  std::string annotated;
  std::vector<Tensor> inputs;
  /// What each output should be, in float64 from the (rounded) inputs; empty if
  /// no reference was asked for.
  std::vector<Tensor> expected;
  /// Where all of it would take too long, the heads of an SSD (sequence and
  /// head) that `expected` has, along its first axis.
  std::vector<std::pair<int64_t, int64_t>> checkedHeads;
  /// Least bytes moved, multiply-adds and exponentials, for the floor.
  double bytes = 0, flops = 0, exponentials = 0;
};

struct WorkloadOptions {
  DType dtype = DType::F32;
  std::vector<int64_t> shape;
  /// Whether to compute what is expected.
  bool reference = true;
  /// Whether an SSD has the decay of each token, and initial states, in place
  /// of dt and A.
  bool discretized = false;
};

/// A tensor type whose first `dynamic` sizes are free.
std::string tensorType(const std::vector<int64_t> &shape, unsigned dynamic,
                       const char *element);
/// Activations: random, or, where there are many or nothing is compared with
/// what is expected and times alone count, random ones over and over.
Tensor makeActivation(const WorkloadOptions &options,
                      const std::vector<int64_t> &shape, uint64_t seed,
                      double mean = 0, double deviation = 1);

/// The distance of each output of a workload to what it should be.
Expected<std::vector<Difference>>
compareOutputs(const Workload &workload, const std::vector<Tensor> &outputs);

/// The operands of a selective scan with softplus, G = 1.
struct ScanOperands {
  Tensor u, delta, A, B, C;
  std::optional<Tensor> D, z, bias, initialState;
};
/// What it makes of them, in float64 and in parallel: y and the last state.
std::vector<Tensor> scanReference(const ScanOperands &operands);

/// Mamba-1 scan with D, z, delta_bias and softplus: shape B,L,D,N. Its chunk
/// site is "scan".
Workload makeScan(const WorkloadOptions &options);
/// The operands of an SSD: dt, A and dt_bias, with softplus, or the decay of
/// each token, which may lie in any order.
struct SSDOperands {
  Tensor x, B, C;
  std::optional<Tensor> dt, A, bias, decay, D, initialStates;

  /// Those that are there, in the order of the program's arguments.
  std::vector<Tensor> inputs() const;
  /// A program for any batch and length, with the chunk site "scan". States
  /// that it returns have the type of the initial ones, else f32.
  std::string program() const;
};
/// What it makes of them, in float64 and in parallel: y and the last states, or
/// for some heads (sequence and head) those of each, along a first axis.
std::vector<Tensor>
ssdReference(const SSDOperands &operands,
             const std::vector<std::pair<int64_t, int64_t>> &heads = {});
/// The arithmetic of one, with the products of C and B of a group taken once
/// and tiles of 64 tokens, which is about the least there is: what the matrix
/// units have to do of it.
double ssdFlops(int64_t B, int64_t L, int64_t H, int64_t P, int64_t N,
                int64_t G);

/// Mamba-2 with D, dt_bias and softplus, or discretized: shape B,L,H,P,N,G. Its
/// chunk site is "scan".
Workload makeSSD(const WorkloadOptions &options);
/// One token of a Mamba-1 scan with D, z, delta_bias and softplus, from given
/// states to new ones: shape B,D,N.
Workload makeStep(const WorkloadOptions &options);
/// One token of Mamba-2 with D, z, dt_bias and softplus, from given f32 states
/// to new ones: shape B,H,P,N,G.
Workload makeSSDStep(const WorkloadOptions &options);
/// Causal convolution of four taps with bias and silu: shape B,L,D.
Workload makeConv(const WorkloadOptions &options);
/// Normalized Walsh-Hadamard transform of every row, a power of two long: shape
/// rows,n.
Workload makeHadamard(const WorkloadOptions &options);
/// RMS norm of every row: shape rows,D.
Workload makeNorm(const WorkloadOptions &options);
/// Projection of one token of B sequences from K to M: shape B,M,K.
Workload makeProjection(const WorkloadOptions &options);

/// A whole block of a model with every operation on its own, for one sequence
/// of `length` tokens of 256 channels: norm, projections, convolution,
/// activations, scan, skip, gate, residual. `mamba2`: the SSD form. Weights
/// come as inputs, and there is no reference. All are random but for those that
/// `given` has, by the names of the programs in docs/examples, the hidden
/// states being `x`; axes of size 1 do not matter. Errors: InvalidArgument for
/// another shape.
Expected<Workload> makeBlock(bool mamba2, int64_t length, DType dtype,
                             const std::map<std::string, Tensor> &given = {});

/// A chain of `ops` pointwise operations on [1, length, 512] f32, with what it
/// should be.
Workload makeChain(int64_t ops, int64_t length);

/// One fusion strategy on a program.
struct FusionResult {
  std::string strategy;
  /// Whether the program had statistics of its values.
  bool annotated = false;
  int64_t kernels = 0;
  double bytesMoved = 0, bytesKept = 0;
  /// What the physical score predicts for the kernels.
  double predictedMs = 0;
  Timing time;
  /// Of the first output, to that without fusion.
  double relativeL2 = 0;
  /// Of the first output, to what it should be; NaN without a reference.
  double error = NAN;
};
/// Compiles a program, and what there is of it with statistics, with every
/// strategy (none, static, arithmetic, entropy, dp) and runs them in turn, in a
/// new order every round, for `budgetMs` and at least five rounds.
Expected<std::vector<FusionResult>>
measureFusion(Context &context, const Workload &workload, double budgetMs);

/// A kernel on a CUDA device.
struct DeviceResult {
  /// Of a scan, else "default".
  std::string variant = "default";
  /// 0 is unsplit.
  int64_t chunk = 0;
  /// After other memory was written, and right after itself; medians.
  double coldUs = 0, warmUs = 0;
  /// Of each output, and the largest of them.
  std::vector<double> errors;
  double relativeL2 = 0;
};
/// What a copy of as many bytes as a workload must move takes: its floor on a
/// device whose memory bounds it.
struct DeviceCopy {
  double coldUs = 0, warmUs = 0;
};
struct DeviceMeasurements {
  std::vector<DeviceResult> results;
  DeviceCopy copy;
};
/// Measures a program on a CUDA device. With `scan` and without `chunks`, what
/// the default policy binds at the site "scan", of `variant` if that is not
/// empty. With `chunks`, every kernel that there is for it, or `variant`,
/// unsplit and, where it can be, with each of them (with those that a tuner
/// would try if the list is empty). Errors: NotFound for another variant,
/// InvalidArgument for chunks that it cannot have.
Expected<DeviceMeasurements>
measureOnDevice(Context &context, const Workload &workload,
                const scheduler::Problem *scan,
                const std::optional<std::vector<int64_t>> &chunks,
                const std::string &variant, double budgetMs);

/// A scan with its input observed for a policy, and without, in turn; unsplit,
/// medians after other memory was written.
struct ObservedScan {
  double plainUs = 0, observedUs = 0;
  /// Runs with it, and those of them whose statistics came.
  uint64_t runs = 0, observations = 0;
  /// What the host does for the statistics of a call.
  double hostUs = 0;
};
/// Errors: InvalidArgument for a policy without statistics.
Expected<ObservedScan> measureObserved(Context &context,
                                       const Workload &workload,
                                       const std::string &policy,
                                       int64_t length, double budgetMs);

/// JSON has no NaN and no infinity: such a number is null.
llvm::json::Value jsonNumber(double value);
/// What a JSON result says of where it comes from.
llvm::json::Object describeRun(const std::string &target);
/// Writes a document to a file, or to standard output for "-". Reports what
/// goes wrong and returns the exit status.
int writeJSON(const std::string &path, llvm::json::Value document);

/// The subcommands with options of their own; `argv` begins with the name.
/// @{
int runRules(int argc, char **argv);
int runTune(int argc, char **argv);
int runFit(int argc, char **argv);
int runSchedule(int argc, char **argv);
int runFusion(int argc, char **argv);
int runEntropy(int argc, char **argv);
int runPaper(int argc, char **argv);
int runSol(int argc, char **argv);
int runLM(int argc, char **argv);
/// @}

} // namespace corey

#endif // COREY_TOOLS_COREY_BENCH_WORKLOAD_H
