//===- corey-lsp-server.cpp - Language server for .mlir -------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/InitAll.h"
#include "corey/Tools.h"
#include "mlir/IR/DialectRegistry.h"
#include "mlir/Tools/mlir-lsp-server/MlirLspServerMain.h"

int corey::coreyLspServerMain(int argc, char **argv) {
  mlir::DialectRegistry registry;
  corey::registerAllDialects(registry);
  return failed(mlir::MlirLspServerMain(argc, argv, registry));
}
