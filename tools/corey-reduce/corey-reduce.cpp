//===- corey-reduce.cpp - Reduces a failing .mlir -------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/InitAll.h"
#include "corey/Tools.h"
#include "mlir/IR/MLIRContext.h"
#include "mlir/Reducer/Passes.h"
#include "mlir/Tools/mlir-reduce/MlirReduceMain.h"

int corey::coreyReduceMain(int argc, char **argv) {
  mlir::DialectRegistry registry;
  corey::registerAllDialects(registry);
  corey::registerAllPasses();
  mlir::registerReducerPasses();
  mlir::MLIRContext context(registry);
  return failed(mlir::mlirReduceMain(argc, argv, context));
}
