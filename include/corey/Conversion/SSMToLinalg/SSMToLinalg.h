//===- SSMToLinalg.h - CPU lowering of the ssm dialect ----------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_CONVERSION_SSMTOLINALG_SSMTOLINALG_H
#define COREY_CONVERSION_SSMTOLINALG_SSMTOLINALG_H

#include "mlir/Pass/Pass.h"
#include <cstdint>

namespace mlir {
class ModuleOp;
} // namespace mlir

namespace corey {

#define GEN_PASS_DECL
#include "corey/Conversion/SSMToLinalg/Passes.h.inc"

#define GEN_PASS_REGISTRATION
#include "corey/Conversion/SSMToLinalg/Passes.h.inc"

/// How the lowering cuts a scan into work items, which is what its time by
/// chunk depends on.
struct CPUWorkItem {
  /// Channels (selective scan) or heads (SSD) of an item.
  int64_t channels;
  /// Tokens it works on together; tiles end at every chunk.
  int64_t tile;
};
/// Of a selective scan of `channels` channels in `groups` groups.
CPUWorkItem getScanWorkItem(int64_t channels, int64_t groups);
/// Of an SSD of `heads` heads in `groups` groups.
CPUWorkItem getSSDWorkItem(int64_t heads, int64_t groups);

} // namespace corey

#endif // COREY_CONVERSION_SSMTOLINALG_SSMTOLINALG_H
