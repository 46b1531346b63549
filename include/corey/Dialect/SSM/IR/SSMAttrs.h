//===- SSMAttrs.h - Attributes of the ssm dialect ---------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_DIALECT_SSM_IR_SSMATTRS_H
#define COREY_DIALECT_SSM_IR_SSMATTRS_H

#include "corey/Dialect/SSM/IR/SSMDialect.h"
#include "mlir/IR/BuiltinAttributes.h"

#include "corey/Dialect/SSM/IR/SSMEnums.h.inc"
#define GET_ATTRDEF_CLASSES
#include "corey/Dialect/SSM/IR/SSMAttrs.h.inc"

#endif // COREY_DIALECT_SSM_IR_SSMATTRS_H
