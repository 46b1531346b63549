//===- SSMToLinalg.h - CPU lowering of the ssm dialect ----------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_CONVERSION_SSMTOLINALG_SSMTOLINALG_H
#define COREY_CONVERSION_SSMTOLINALG_SSMTOLINALG_H

#include "mlir/Pass/Pass.h"

namespace mlir {
class ModuleOp;
} // namespace mlir

namespace corey {

#define GEN_PASS_DECL
#include "corey/Conversion/SSMToLinalg/Passes.h.inc"

#define GEN_PASS_REGISTRATION
#include "corey/Conversion/SSMToLinalg/Passes.h.inc"

} // namespace corey

#endif // COREY_CONVERSION_SSMTOLINALG_SSMTOLINALG_H
