//===- SSMToGPU.h - GPU lowering of the ssm dialect -------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_CONVERSION_SSMTOGPU_SSMTOGPU_H
#define COREY_CONVERSION_SSMTOGPU_SSMTOGPU_H

#include "mlir/Pass/Pass.h"
#include <cstdint>
#include <optional>
#include <vector>

namespace mlir {
class ModuleOp;
} // namespace mlir

namespace corey {

#define GEN_PASS_DECL
#include "corey/Conversion/SSMToGPU/Passes.h.inc"

#define GEN_PASS_REGISTRATION
#include "corey/Conversion/SSMToGPU/Passes.h.inc"

/// The `gpu.module` that holds the kernels of a program.
inline constexpr llvm::StringLiteral kKernelModule = "kernels";
/// Attribute of the module: names of its kernels, an array of strings in the
/// order of the numbers that the host launches them by.
inline constexpr llvm::StringLiteral kKernelsAttr = "corey.kernels";

/// Unit attribute of a kernel that is not to start before its predecessors have
/// ended.
inline constexpr llvm::StringLiteral kInOrderAttr = "corey.in_order";

/// Kernels of a selective scan, by the numbers that the scheduler knows them
/// by: `Rule` leaves the choice to a rule on the sizes of the call; a warp
/// alone, with the states of a channel on a few lanes; blocks of specialised
/// warps, with one or two states a lane, in tiles of 64 tokens or, where the
/// sequence is short, 32; the same with more lanes a channel and fewer
/// channels a block.
enum class ScanVariant : int64_t { Rule, Warp, Split, SplitShort, SplitNarrow };

/// What the scheduler knows of a kernel.
struct ScanVariantInfo {
  llvm::StringLiteral name;
  /// Channels of a block, and tokens it works on together.
  int64_t channels, tile;
  /// Blocks of a multiprocessor at a time.
  int64_t resident;
  /// Whether the chunks of a sequence can be blocks of their own. A chunk that
  /// is shorter than the sequence takes the warp-autonomous kernel, whatever
  /// the variant.
  bool chunkable;
};

/// The kernels there are for a scan of known sizes, in the order of
/// ScanVariant.
std::vector<ScanVariantInfo> getScanVariants(int64_t channels, int64_t groups,
                                             int64_t states);

/// What kernels ask of a chip, such as "sm_90a".
struct ChipFeatures {
  /// The tensor cores take products of groups of warps (wgmma), and threads
  /// may trade registers.
  bool hasWarpGroups = false;
  /// Kernels may start before their predecessors end.
  bool hasDependentLaunches = false;
  /// Blocks of a cluster see each other's shared memory.
  bool hasClusters = false;
  /// Shared memory that a block of threads may have.
  int64_t sharedBytes = 99 << 10;
};
ChipFeatures getChipFeatures(llvm::StringRef chip);

/// The kernels of an ssd on the tensor cores of `chip`, by the type of its
/// activations, the heads that share B and C and the sizes of a head; none
/// where those are not for them. "tensor_core" has products of groups of warps,
/// "mma_sync" those of single ones. A chunk is a multiple of the tile: what is
/// not is rounded up.
std::optional<ScanVariantInfo>
getSSDTensorVariant(const ChipFeatures &chip, bool is16Bit,
                    int64_t headsOfGroup, int64_t channels, int64_t states);

/// Whether `op`, an ssm.ssd, alone or in its fused region, is for tensor cores:
/// its activations have one type and lie in memory, in whole vectors.
bool isForTensorCores(mlir::Operation *op);

} // namespace corey

#endif // COREY_CONVERSION_SSMTOGPU_SSMTOGPU_H
