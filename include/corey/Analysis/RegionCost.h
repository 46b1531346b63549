//===- RegionCost.h - Work and traffic of ops and regions -------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_ANALYSIS_REGIONCOST_H
#define COREY_ANALYSIS_REGIONCOST_H

#include "corey/Analysis/FusionScore.h"
#include "corey/Dialect/SSM/IR/SSMInterfaces.h"
#include "mlir/IR/Operation.h"
#include <string>

namespace corey {

/// Rates a machine has been measured to reach, per second, and what a block of
/// threads can hold. Kernels are assumed to overlap what different units do.
struct MachineRates {
  llvm::StringRef name;
  double bytes, fma, transcendental, matrix;
  /// Seconds that a kernel takes to begin.
  double launch;
  /// 32-bit registers of a thread, and bytes of memory shared by a block.
  double registers, shared;
};
/// "cpu" (two cores of Zen 1, f32, 256-bit vectors) or "h200"; null if unknown.
const MachineRates *findMachine(llvm::StringRef name);

/// Arithmetic and traffic of ops that run as one kernel.
struct RegionCost {
  double fma = 0, transcendental = 0, matrix = 0;
  double bytesRead = 0, bytesWritten = 0;
  /// Bytes of values between the ops: what separate kernels would write, and
  /// read once per use.
  double bytesKept = 0;
  /// Estimates per thread and per block.
  double registers = 0, shared = 0;

  double bytes() const { return bytesRead + bytesWritten; }
  double flops() const { return 2 * fma + 2 * matrix + transcendental; }
  /// Flops per byte.
  double intensity() const { return bytes() > 0 ? flops() / bytes() : 0; }
  /// Seconds on a machine: the slowest unit and the launch.
  double seconds(const MachineRates &machine) const;
};

/// What `ops` (of one block) cost as one kernel: tensors from outside are read
/// once, values that are used outside are written. Dynamic sizes count as
/// `dynamicDim`.
RegionCost regionCost(llvm::ArrayRef<mlir::Operation *> ops,
                      int64_t dynamicDim);

/// 32-bit registers of a thread and shared bytes of a block that a kernel of
/// `op` needs for its own values, from the kernels it is going to have: two
/// registers per value that is live in a pointwise op; the state, its rates and
/// a ring of tokens for scans.
void estimateFootprint(mlir::Operation *op, double &registers, double &shared);

/// What the score knows of an op: its cost, its footprint, and the entropy that
/// `ssm.stats` records of what it works on (its first result, else its first
/// operand); NaN if nothing does. Intensity is flops per byte, memory is MB.
FusionFeatures fusionFeatures(mlir::Operation *op, int64_t dynamicDim,
                              const MachineRates &machine);

} // namespace corey

#endif // COREY_ANALYSIS_REGIONCOST_H
