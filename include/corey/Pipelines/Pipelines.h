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

/// Options of `corey-cpu-pipeline`; they mirror those of its passes.
struct CPUPipelineOptions
    : public mlir::PassPipelineOptions<CPUPipelineOptions> {
  Option<int64_t> vectorBits{
      *this, "vector-bits",
      llvm::cl::desc("Width of a vector register: 256 (AVX2) or 512 (AVX-512). "
                     "0 (default) takes the host's."),
      llvm::cl::init(0)};
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

/// The phases of the CPU pipeline, in order. `corey-run --emit=<phase>` prints
/// the module after one of them.
enum class CPUPhase {
  /// Canonical ssm ops, as given.
  Captured,
  /// Work on weights is in a function of its own; ops that become one kernel
  /// are
  /// regions.
  Fused,
  /// Chunks are values, weights are arguments, shape functions exist.
  Bound,
  /// linalg and loops on tensors.
  Lowered,
  /// Loops on memrefs.
  Buffers,
  /// The LLVM dialect.
  LLVM
};

/// Adds the passes of the CPU pipeline from phase `first` to phase `last`.
void buildCPUPipeline(mlir::OpPassManager &pm,
                      const CPUPipelineOptions &options,
                      CPUPhase first = CPUPhase::Captured,
                      CPUPhase last = CPUPhase::LLVM);

/// Registers the named pipelines.
void registerPipelines();

} // namespace corey

#endif // COREY_PIPELINES_PIPELINES_H
