//===- Passes.td - Steps of the pipelines on buffers -------*- tablegen -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_PIPELINES_PASSES_TD
#define COREY_PIPELINES_PASSES_TD

include "mlir/Pass/PassBase.td"

def Bufferize : Pass<"corey-bufferize", "::mlir::ModuleOp"> {
  let summary = "One-shot bufferization with the calling convention of compiled functions";
  let description = [{
    Arguments become memrefs with dynamic strides but for a unit innermost one,
    so that slices and padded tensors are read where they are; where they are marked
    `ssm.any_strides` that one is dynamic as well. Results become
    trailing memref arguments that the caller provides, contiguous where they are not
    marked so; a result that is a fresh allocation of such strides is written in
    place, others are copied there.
  }];
  let options = [
    Option<"keepCopies", "keep-copies", "bool", /*default=*/"false",
      "Leave copies between buffers as memref.copy; by default they become loops.">
  ];
  let dependentDialects = ["::mlir::bufferization::BufferizationDialect",
                           "::mlir::memref::MemRefDialect", "::mlir::linalg::LinalgDialect"];
}

def InsertDeallocations : Pass<"corey-insert-deallocations", "::mlir::func::FuncOp"> {
  let summary = "Free every allocation after its last use";
  let description = [{
    Expects structured control flow. Frees early, so that the arena can reuse the
    memory within a call; a buffer that a block yields is left to the end of the
    call.
  }];
  let statistics = [
    Statistic<"numDeallocations", "num-deallocations", "Number of deallocations inserted">
  ];
  let dependentDialects = ["::mlir::memref::MemRefDialect"];
}

def SerializeInnerLoops : Pass<"corey-serialize-inner-loops", "::mlir::func::FuncOp"> {
  let summary = "Keep the innermost dimension of parallel loops in one thread";
  let description = [{
    Splits the last dimension off every `scf.parallel` that was made from a
    linalg op, so that the back end vectorises it; one-dimensional loops become
    serial.
  }];
  let dependentDialects = ["::mlir::scf::SCFDialect"];
}

def OutlineEqualLoops : Pass<"corey-outline-equal-loops", "::mlir::ModuleOp"> {
  let summary = "Make one function of loop nests that are equal";
  let description = [{
    The layers of a model differ in their weights alone. Loop nests of function
    bodies that are equal but for the values they use become calls of one private
    function with those values as arguments, so that machine code is made once.
    Nests that occur once, or hold next to nothing, stay where they are.
  }];
  let options = [
    Option<"minOps", "min-ops", "int64_t", /*default=*/"16",
      "Leave nests with fewer ops in place.">
  ];
  let statistics = [
    Statistic<"numOutlined", "num-outlined", "Number of loop nests that became calls">,
    Statistic<"numFunctions", "num-functions", "Number of functions made of them">
  ];
  let dependentDialects = ["::mlir::func::FuncDialect"];
}

def OutlineRepeats : Pass<"corey-outline-repeats", "::mlir::ModuleOp"> {
  let summary = "Make one function of ops that repeat, such as the layers of a model";
  let description = [{
    Looks in every function for the run of ops that is repeated most, one copy
    after another, equal but for the values from outside that it uses, and cuts
    copies where they leave the fewest values to the next. They become calls of one private function, so that what comes after sees one layer
    in place of all. Constants go along; values that later ops use are results.
  }];
  let options = [
    Option<"minOps", "min-ops", "int64_t", /*default=*/"32",
      "Leave runs with fewer ops, those in regions included, in place.">
  ];
  let statistics = [
    Statistic<"numCopies", "num-copies", "Number of copies that became calls">,
    Statistic<"numFunctions", "num-functions", "Number of functions made of them">
  ];
  let dependentDialects = ["::mlir::func::FuncDialect"];
}

def GuardParallelRegions : Pass<"corey-guard-parallel-regions", "::mlir::ModuleOp"> {
  let summary = "Run parallel regions of one iteration without starting threads";
  let description = [{
    Adds an `if` clause to every `omp.parallel` that is false where its loop has
    at most one iteration, and turns the stack scopes of iterations into saving
    and restoring the stack pointer.
  }];
  let dependentDialects = ["::mlir::arith::ArithDialect", "::mlir::LLVM::LLVMDialect"];
}

def RuntimeAllocation : Pass<"corey-runtime-allocation", "::mlir::ModuleOp"> {
  let summary = "Allocate through the run-time library";
  let description = [{
    Replaces calls of `malloc` and `free` by `corey_rt_malloc` and
    `corey_rt_free`, which serve a call from memory kept from earlier ones.
  }];
  let options = [
    Option<"onDevice", "on-device", "bool", /*default=*/"false",
      "Allocate memory of the device, through corey_rt_device_malloc and corey_rt_device_free.">
  ];
  let dependentDialects = ["::mlir::LLVM::LLVMDialect"];
}

#endif // COREY_PIPELINES_PASSES_TD
