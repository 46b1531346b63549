//===- Pipelines.h - Named pipelines ----------------------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_PIPELINES_PIPELINES_H
#define COREY_PIPELINES_PIPELINES_H

#include "mlir/Pass/Pass.h"
#include "mlir/Pass/PassManager.h"
#include "mlir/Pass/PassOptions.h"

namespace corey {

#define GEN_PASS_DECL
#include "corey/Pipelines/Passes.h.inc"

#define GEN_PASS_REGISTRATION
#include "corey/Pipelines/Passes.h.inc"

/// Options of every pipeline; they mirror those of its passes.
template <typename Derived>
struct ProgramPipelineOptions : public mlir::PassPipelineOptions<Derived> {
  template <typename T>
  using Option =
      typename mlir::PassPipelineOptions<Derived>::template Option<T>;

  Option<std::string> policy{
      *this, "policy",
      llvm::cl::desc("Scheduler policy recorded at every bound chunk; empty "
                     "(default) leaves the choice to the run time."),
      llvm::cl::init("")};
  Option<std::string> fusion{
      *this, "fusion",
      llvm::cl::desc("Which ops become one kernel: dp (default) by predicted "
                     "time; entropy, arithmetic or static by the published "
                     "score; none."),
      llvm::cl::init("dp")};
  Option<bool> observe{
      *this, "observe",
      llvm::cl::desc("Observe the input of every bound scan, for policies that "
                     "decide on statistics."),
      llvm::cl::init(false)};
  Option<bool> observeValues{
      *this, "observe-values",
      llvm::cl::desc("Observe every floating-point tensor of the captured "
                     "program."),
      llvm::cl::init(false)};
  Option<bool> hoistWeights{
      *this, "hoist-weights",
      llvm::cl::desc("Move what depends on weights alone into @ssm.prepare."),
      llvm::cl::init(true)};
};

/// Options of `corey-cpu-pipeline`.
struct CPUPipelineOptions : public ProgramPipelineOptions<CPUPipelineOptions> {
  Option<int64_t> vectorBits{
      *this, "vector-bits",
      llvm::cl::desc("Width of a vector register: 256 (AVX2) or 512 (AVX-512). "
                     "0 (default) takes the host's."),
      llvm::cl::init(0)};
};

/// Options of `corey-gpu-pipeline`.
struct GPUPipelineOptions : public ProgramPipelineOptions<GPUPipelineOptions> {
  Option<std::string> chip{
      *this, "chip",
      llvm::cl::desc(
          "Chip the kernels are made for, such as sm_90a (default)."),
      llvm::cl::init("sm_90a")};
  Option<int64_t> multiprocessors{
      *this, "multiprocessors",
      llvm::cl::desc(
          "Multiprocessors of the device; 132 (default) on an H200."),
      llvm::cl::init(132)};
};

/// The phases of a pipeline, in order. `corey-run --emit=<phase>` prints the
/// module after one of them.
enum class Phase {
  /// Canonical ssm ops, as given.
  Captured,
  /// Work on weights is in a function of its own; ops that become one kernel
  /// are regions.
  Fused,
  /// Chunks are values, weights are arguments, shape functions exist.
  Bound,
  /// CPU: linalg and loops, on tensors. GPU: kernels and their launches.
  Lowered,
  /// The same on memrefs.
  Buffers,
  /// The LLVM dialect.
  LLVM
};

/// Adds the passes of the CPU pipeline from phase `first` to phase `last`.
void buildCPUPipeline(mlir::OpPassManager &pm,
                      const CPUPipelineOptions &options,
                      Phase first = Phase::Captured, Phase last = Phase::LLVM);

/// Adds the passes of the GPU pipeline from phase `first` to phase `last`.
void buildGPUPipeline(mlir::OpPassManager &pm,
                      const GPUPipelineOptions &options,
                      Phase first = Phase::Captured, Phase last = Phase::LLVM);

/// Registers the named pipelines.
void registerPipelines();

} // namespace corey

#endif // COREY_PIPELINES_PIPELINES_H
