//===- LowerProgram.h - Applying a target's lowerings -----------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_LIB_CONVERSION_COMMON_LOWERPROGRAM_H
#define COREY_LIB_CONVERSION_COMMON_LOWERPROGRAM_H

#include "mlir/IR/BuiltinOps.h"
#include "mlir/IR/PatternMatch.h"

namespace corey {

/// The ssm ops of a module that a target's lowerings must replace.
int64_t countLoweredOps(mlir::ModuleOp module);

/// Lowers the ssm ops of a module by `patterns`, level by level of the regions
/// that they nest in, and then by `last`, which are for ops that the others
/// look at. Fails with an error at an op that is left; `target` names, for
/// people, what has no lowering of it.
mlir::LogicalResult lowerProgram(mlir::ModuleOp module,
                                 mlir::RewritePatternSet patterns,
                                 mlir::RewritePatternSet last,
                                 llvm::StringRef target);

} // namespace corey

#endif // COREY_LIB_CONVERSION_COMMON_LOWERPROGRAM_H
