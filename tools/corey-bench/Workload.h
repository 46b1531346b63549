//===- Workload.h - Programs to measure -------------------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_TOOLS_COREY_BENCH_WORKLOAD_H
#define COREY_TOOLS_COREY_BENCH_WORKLOAD_H

#include "corey/Tensor.h"
#include "llvm/Support/JSON.h"
#include <string>
#include <vector>

namespace corey {

/// Inputs and program of one benchmark.
struct Workload {
  std::string program;
  std::vector<Tensor> inputs;
  /// What each output should be, in float64 from the (rounded) inputs; empty if
  /// no reference was asked for.
  std::vector<Tensor> expected;
  /// Least bytes moved, multiply-adds and exponentials, for the floor.
  double bytes = 0, flops = 0, exponentials = 0;
};

struct WorkloadOptions {
  DType dtype = DType::F32;
  std::vector<int64_t> shape;
  /// Whether to compute what is expected.
  bool reference = true;
};

/// Mamba-1 scan with D, z, delta_bias and softplus: shape B,L,D,N. Its chunk site
/// is "scan".
Workload makeScan(const WorkloadOptions &options);
/// Mamba-2 with D, dt_bias and softplus: shape B,L,H,P,N,G. Its chunk site is
/// "scan".
Workload makeSSD(const WorkloadOptions &options);

/// A whole block of a model with every operation on its own, for one sequence of
/// `length` tokens of 256 channels: norm, projections, convolution, activations,
/// scan, skip, gate, residual. `mamba2`: the SSD form. Weights are random and come
/// as inputs; there is no reference.
Workload makeBlock(bool mamba2, int64_t length, DType dtype);

/// What a JSON result says of where it comes from.
llvm::json::Object describeRun(const std::string &target);
/// Writes a document to a file, or to standard output for "-". Reports what goes
/// wrong and returns the exit status.
int writeJSON(const std::string &path, llvm::json::Value document);

/// The subcommands with options of their own; `argv` begins with the name.
/// @{
int runRules(int argc, char **argv);
int runTune(int argc, char **argv);
int runFit(int argc, char **argv);
int runSchedule(int argc, char **argv);
int runFusion(int argc, char **argv);
int runPaper(int argc, char **argv);
/// @}

} // namespace corey

#endif // COREY_TOOLS_COREY_BENCH_WORKLOAD_H
