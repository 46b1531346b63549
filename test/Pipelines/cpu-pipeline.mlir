// The whole CPU pipeline, from ssm ops to the LLVM dialect: what is left of
// whom, the calling convention, the options.

// RUN: corey-opt %s --corey-cpu-pipeline=vector-bits=256 | FileCheck %s --check-prefixes=CHECK,AVX2
// RUN: corey-opt %s --corey-cpu-pipeline=vector-bits=512 | FileCheck %s --check-prefixes=CHECK,AVX512
// RUN: corey-opt %s --corey-cpu-pipeline=vector-bits=512 | FileCheck %s --check-prefix=LEFT
// RUN: corey-opt %s --corey-cpu-pipeline > /dev/null

// The options reach the passes.
// RUN: corey-opt %s --corey-cpu-pipeline="vector-bits=512 policy=static:64" --dump-pass-pipeline 2>&1 >/dev/null | FileCheck %s --check-prefix=OPTIONS
// OPTIONS: ssm-fuse{{.*}}score=physical strategy=dp
// OPTIONS: ssm-bind-chunks{observe=false policy=static:64}
// OPTIONS: convert-ssm-to-linalg{vector-bits=512}
// OPTIONS: corey-expand-math{vector-bits=512}

// RUN: corey-opt %s --corey-cpu-pipeline="vector-bits=512 fusion=entropy" --dump-pass-pipeline 2>&1 >/dev/null | FileCheck %s --check-prefix=FUSION
// FUSION: ssm-fuse{{.*}}score=paper strategy=entropy

// RUN: not corey-opt %s --corey-cpu-pipeline=vector-bits=384 2>&1 | FileCheck %s --check-prefix=WIDTH
// WIDTH: error: expected vector-bits to be 0, 256 or 512, got 384
// RUN: not corey-opt %s --corey-cpu-pipeline=width=256 2>&1 | FileCheck %s --check-prefix=UNKNOWN
// UNKNOWN: no such option width

// Nothing is left of the dialects in between, and of ssm only the weights.
// LEFT-NOT: unrealized_conversion_cast
// LEFT-NOT: {{(= |^ +)(affine|arith|bufferization|cf|func|linalg|math|memref|scf|tensor|vector)[.]}}
// LEFT-NOT: {{(= |^ +)ssm[.][a-vx-z]}}

// CHECK-DAG: llvm.func @corey_rt_malloc(i64) -> !llvm.ptr
// CHECK-DAG: llvm.func @corey_rt_free(!llvm.ptr)
// CHECK-DAG: llvm.func @corey_rt_chunk(i64, i64, i64, i64) -> i64
// CHECK-DAG: llvm.func @corey_rt_gemm(
// CHECK-DAG: llvm.mlir.global internal constant @corey_site_scan0("scan0\00")
// CHECK-DAG: ssm.weight @w "block.w" : tensor<16xf32>
ssm.weight @w "block.w" : tensor<16xf32>

// The shape function, with what it has to hold.
// CHECK: llvm.func @_mlir_ciface_block.shapes(%{{.+}}: !llvm.ptr, %{{.+}}: !llvm.ptr)
// CHECK-SAME: ssm.constraints = [{{\[}}2, 0, 0, 0, "B"], [2, 1, 0, 1, "L"]]

// CHECK: llvm.func @block(
// The ops before the scan are in its loops: its result is the only intermediate.
// CHECK: llvm.call @corey_rt_chunk(
// CHECK: llvm.call @corey_rt_malloc(
// CHECK-NOT: llvm.call @corey_rt_malloc(
// Threads run over work items unless there is but one.
// CHECK: omp.parallel if(%{{.+}}) {
// CHECK-NEXT: omp.wsloop {
// Stack memory of a work item is returned.
// CHECK: llvm.intr.stacksave
// AVX512: llvm.call_intrinsic "llvm.x86.avx512.mask.scalef.ps.512"
// AVX2-NOT: llvm.call_intrinsic
// CHECK: llvm.intr.stackrestore
// CHECK: llvm.call @corey_rt_gemm(
// CHECK: llvm.call @corey_rt_free(
// CHECK: llvm.return
// CHECK-NEXT: }

// Through the C interface: x, A, B and the output weight, then the weight, then
// the result, a descriptor each.
// CHECK: llvm.func @_mlir_ciface_block(%{{[a-z0-9]+}}: !llvm.ptr, %{{[a-z0-9]+}}: !llvm.ptr, %{{[a-z0-9]+}}: !llvm.ptr, %{{[a-z0-9]+}}: !llvm.ptr,
// CHECK-SAME: %{{[a-z0-9]+}}: !llvm.ptr {ssm.weight = "w"}, %{{[a-z0-9]+}}: !llvm.ptr) attributes {llvm.emit_c_interface}
func.func @block(%x: tensor<?x?x16xf32>, %a: tensor<16x4xf32>, %b: tensor<?x?x1x4xf32>, %o: tensor<6x16xf32>) -> tensor<?x?x6xf32> {
  %w = ssm.get_weight @w : tensor<16xf32>
  %0 = ssm.mul %x, %w : tensor<?x?x16xf32>, tensor<16xf32>
  %1 = ssm.silu %0 : tensor<?x?x16xf32>
  %y = ssm.selective_scan %1, %1, %a, %b, %b {delta_softplus} : tensor<?x?x16xf32>, tensor<?x?x16xf32>, tensor<16x4xf32>,
      tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x16xf32>
  %2 = ssm.projection %y, %o : tensor<?x?x16xf32>, tensor<6x16xf32> -> tensor<?x?x6xf32>
  return %2 : tensor<?x?x6xf32>
}
