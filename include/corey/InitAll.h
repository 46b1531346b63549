//===- InitAll.h - Registration of dialects and passes ----------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_INITALL_H
#define COREY_INITALL_H

namespace mlir {
class DialectRegistry;
} // namespace mlir

namespace corey {

/// Registers the ssm dialect, the upstream dialects that COREY's pipelines and
/// users' files use, and their interfaces.
void registerAllDialects(mlir::DialectRegistry &registry);

/// Registers COREY's passes and pipelines, and the upstream passes that are
/// useful beside them.
void registerAllPasses();

} // namespace corey

#endif // COREY_INITALL_H
