//===- corey-opt.cpp - Runs passes on .mlir -------------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/InitAll.h"
#include "corey/Tools.h"
#include "mlir/IR/DialectRegistry.h"
#include "mlir/Tools/mlir-opt/MlirOptMain.h"

int corey::coreyOptMain(int argc, char **argv) {
  mlir::DialectRegistry registry;
  corey::registerAllDialects(registry);
  corey::registerAllPasses();
  return mlir::asMainReturnCode(mlir::MlirOptMain(
      argc, argv, "COREY optimizer: passes on state-space models\n", registry));
}
