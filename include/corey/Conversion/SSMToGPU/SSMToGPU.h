//===- SSMToGPU.h - GPU lowering of the ssm dialect -------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_CONVERSION_SSMTOGPU_SSMTOGPU_H
#define COREY_CONVERSION_SSMTOGPU_SSMTOGPU_H

#include "mlir/Pass/Pass.h"
#include <cstdint>

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

} // namespace corey

#endif // COREY_CONVERSION_SSMTOGPU_SSMTOGPU_H
