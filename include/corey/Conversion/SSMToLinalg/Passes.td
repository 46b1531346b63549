//===- Passes.td - CPU lowering of the ssm dialect ---------*- tablegen -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_CONVERSION_SSMTOLINALG_PASSES_TD
#define COREY_CONVERSION_SSMTOLINALG_PASSES_TD

include "mlir/Pass/PassBase.td"

def ConvertSSMToLinalg : Pass<"convert-ssm-to-linalg", "::mlir::ModuleOp"> {
  let summary = "Lower ssm ops to linalg and to loops over vectors";
  let description = [{
    Elementwise ops become `linalg.generic`, one per region of them. Those around an
    anchor in an `ssm.fused` become part of its loops, and so does a Hadamard
    transform behind a norm.
    Everything with a recurrence or a reduction becomes loops over memrefs in the
    scf and vector dialects, wrapped in `bufferization.to_buffer` and
    `to_tensor`: for scans, channels (or the channels of a head) stand across the
    lanes, tokens run in order, and `scf.parallel` runs over sequences and blocks
    of channels. A chunk is the step of a loop around the tokens; the state
    crosses it in f32.

    All arithmetic is f32. Calls to the run-time library (`corey_rt_*`) appear
    for large projections, chunks, statistics and checks that depend on data.

    ```mlir
    func.func @main(%x: tensor<?x64xf32>, %scale: tensor<64xf32>) -> tensor<?x64xf32> {
      %y = ssm.mul %x, %scale : tensor<?x64xf32>, tensor<64xf32>
      return %y : tensor<?x64xf32>
    }
    ```

    becomes

    ```mlir
    #whole = affine_map<(d0, d1) -> (d0, d1)>
    #last = affine_map<(d0, d1) -> (d1)>
    func.func @main(%x: tensor<?x64xf32>, %scale: tensor<64xf32>) -> tensor<?x64xf32> {
      %c0 = arith.constant 0 : index
      %rows = tensor.dim %x, %c0 : tensor<?x64xf32>
      %init = tensor.empty(%rows) : tensor<?x64xf32>
      %y = linalg.generic {indexing_maps = [#whole, #last, #whole],
                           iterator_types = ["parallel", "parallel"]}
          ins(%x, %scale : tensor<?x64xf32>, tensor<64xf32>) outs(%init : tensor<?x64xf32>) {
      ^bb0(%in: f32, %by: f32, %out: f32):
        %product = arith.mulf %in, %by : f32
        linalg.yield %product : f32
      } -> tensor<?x64xf32>
      return %y : tensor<?x64xf32>
    }
    ```
  }];
  let options = [
    Option<"vectorBits", "vector-bits", "int64_t", /*default=*/"0",
      "Width of a vector register: 256 (AVX2) or 512 (AVX-512). 0 (default) takes the host's.">
  ];
  let statistics = [
    Statistic<"numLoweredOps", "num-lowered-ops", "Number of ssm ops lowered">
  ];
  let dependentDialects = [
    "::mlir::arith::ArithDialect", "::mlir::bufferization::BufferizationDialect",
    "::mlir::func::FuncDialect", "::mlir::linalg::LinalgDialect",
    "::mlir::LLVM::LLVMDialect", "::mlir::math::MathDialect",
    "::mlir::memref::MemRefDialect", "::mlir::scf::SCFDialect",
    "::mlir::tensor::TensorDialect", "::mlir::vector::VectorDialect"
  ];
}

def ExpandScalarMath : Pass<"corey-expand-math"> {
  let summary = "Expand elementary functions and narrow float types for the CPU";
  let description = [{
    Replaces `math.exp`, `math.log1p` and `math.erf` on f32 by polynomials that
    the back end vectorises, and conversions to and from bf16 and f8E4M3FN by
    integer arithmetic with round to nearest even (x86 has no such instructions
    before AVX512-BF16, and the library calls are scalar).
  }];
  let options = [
    Option<"vectorBits", "vector-bits", "int64_t", /*default=*/"0",
      "Width of a vector register; see convert-ssm-to-linalg.">
  ];
  let dependentDialects = [
    "::mlir::arith::ArithDialect", "::mlir::LLVM::LLVMDialect",
    "::mlir::math::MathDialect", "::mlir::vector::VectorDialect"
  ];
}

#endif // COREY_CONVERSION_SSMTOLINALG_PASSES_TD
