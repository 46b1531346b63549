//===- Passes.td - GPU lowering of the ssm dialect ---------*- tablegen -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_CONVERSION_SSMTOGPU_PASSES_TD
#define COREY_CONVERSION_SSMTOGPU_PASSES_TD

include "mlir/Pass/PassBase.td"

def ConvertSSMToGPU : Pass<"convert-ssm-to-gpu", "::mlir::ModuleOp"> {
  let summary = "Lower ssm ops to GPU kernels and their launches";
  let description = [{
    Every op, or region of ops, becomes one kernel or a few of them in the
    `gpu.module @kernels`, and `gpu.launch_func` on memrefs of device memory,
    wrapped in `bufferization.to_buffer` and `to_tensor`. Pointwise ops around an
    anchor in an `ssm.fused` are computed where its kernel loads and stores; a
    Hadamard transform behind a norm is the last part of its kernel.

    A chunk is an argument of the kernels of a scan: where it is shorter than the
    sequence, three kernels (states of chunks, states between chunks, outputs)
    take the place of one.

    Ops that are equal but for their operands, as those of layers are, are lowered
    once: they call one function with what of it works on memory.

    All arithmetic is f32. Calls to the run-time library (`corey_rt_*`) appear for
    large projections, chunks and statistics.
  }];
  let options = [
    Option<"chip", "chip", "std::string", /*default=*/"\"sm_90a\"",
      "Chip the kernels are tuned for, as ptxas spells it.">,
    Option<"multiprocessors", "multiprocessors", "int64_t", /*default=*/"132",
      "Multiprocessors of the device, by which variants are chosen where no site "
      "of the scheduler chooses one.">
  ];
  let statistics = [
    Statistic<"numLoweredOps", "num-lowered-ops", "Number of ssm ops lowered">,
    Statistic<"numKernels", "num-kernels", "Number of kernels made">
  ];
  let dependentDialects = [
    "::mlir::arith::ArithDialect", "::mlir::bufferization::BufferizationDialect",
    "::mlir::func::FuncDialect", "::mlir::gpu::GPUDialect",
    "::mlir::LLVM::LLVMDialect", "::mlir::math::MathDialect",
    "::mlir::memref::MemRefDialect", "::mlir::NVVM::NVVMDialect",
    "::mlir::scf::SCFDialect", "::mlir::tensor::TensorDialect"
  ];
}

def ExpandKernelMath : Pass<"corey-expand-kernel-math", "::mlir::gpu::GPUModuleOp"> {
  let summary = "Expand elementary functions of kernels";
  let description = [{
    Replaces `math.exp`, `math.log1p`, `math.erf` and `math.sqrt` on f32 by
    instructions of the special-function unit with corrections, so that no device
    library is needed.
  }];
  let dependentDialects = [
    "::mlir::arith::ArithDialect", "::mlir::LLVM::LLVMDialect",
    "::mlir::math::MathDialect", "::mlir::NVVM::NVVMDialect"
  ];
}

def LowerLaunches : Pass<"corey-lower-launches", "::mlir::ModuleOp"> {
  let summary = "Launch kernels through the run-time library";
  let description = [{
    Replaces `gpu.launch_func` by calls of `corey_rt_launch` with the number of
    the kernel among the module's `corey.kernels`, and copies between buffers by
    calls of `corey_rt_device_copy`. Loops of the host that would touch device
    memory are errors: no lowering makes any.
  }];
  let dependentDialects = [
    "::mlir::arith::ArithDialect", "::mlir::func::FuncDialect",
    "::mlir::LLVM::LLVMDialect", "::mlir::memref::MemRefDialect"
  ];
}

#endif // COREY_CONVERSION_SSMTOGPU_PASSES_TD
