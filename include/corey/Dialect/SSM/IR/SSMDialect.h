//===- SSMDialect.h - The ssm dialect ---------------------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_DIALECT_SSM_IR_SSMDIALECT_H
#define COREY_DIALECT_SSM_IR_SSMDIALECT_H

#include "mlir/Bytecode/BytecodeImplementation.h"
#include "mlir/IR/Dialect.h"

namespace corey::ssm {

/// Version of the dialect in bytecode. Bytecode of the same major version and
/// an equal or older minor version loads; anything newer is refused.
struct SSMDialectVersion : public mlir::DialectVersion {
  SSMDialectVersion(uint64_t majorVersion, uint64_t minorVersion)
      : majorVersion(majorVersion), minorVersion(minorVersion) {}

  static SSMDialectVersion getCurrent() { return {1, 1}; }

  uint64_t majorVersion;
  uint64_t minorVersion;
};

} // namespace corey::ssm

#include "corey/Dialect/SSM/IR/SSMDialect.h.inc"

#endif // COREY_DIALECT_SSM_IR_SSMDIALECT_H
