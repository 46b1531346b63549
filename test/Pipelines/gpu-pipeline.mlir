// The whole GPU pipeline: kernels in NVVM, and a host that launches them through
// the run-time library.

// RUN: corey-opt %s --corey-gpu-pipeline | FileCheck %s
// RUN: corey-opt %s --corey-gpu-pipeline | FileCheck %s --check-prefix=LEFT
// RUN: corey-opt %s --corey-gpu-pipeline="chip=sm_80" | FileCheck %s --check-prefix=CHIP
// CHIP: #nvvm.target<chip = "sm_80"

// Nothing is left of the dialects in between, but for the module of kernels.
// LEFT-NOT: unrealized_conversion_cast
// LEFT-NOT: gpu.launch_func
// LEFT-NOT: {{(= |^ +)(affine|arith|bufferization|cf|func|linalg|math|memref|scf|tensor|vector)[.]}}
// LEFT-NOT: {{(= |^ +)ssm[.][a-vx-z]}}

// CHECK-DAG: llvm.func @corey_rt_launch(
// CHECK-DAG: llvm.func @corey_rt_device_malloc(i64) -> !llvm.ptr
// CHECK-DAG: llvm.func @corey_rt_device_free(!llvm.ptr)
// CHECK: gpu.module @kernels [#nvvm.target<chip = "sm_90a"
// CHECK-DAG: llvm.func @selective_scan_warp({{.*}} attributes {{.*}}nvvm.kernel
// CHECK-DAG: llvm.func @causal_conv({{.*}} attributes {{.*}}nvvm.kernel
// No device library.
// CHECK-NOT: @__nv_
// CHECK-LABEL: llvm.func @main(
// CHECK: llvm.call @corey_rt_launch(
// CHECK: llvm.call @corey_rt_launch(
func.func @main(%x: tensor<?x?x64xf32>, %w: tensor<64x4xf32>, %A: tensor<64x16xf32>, %B: tensor<?x?x1x16xf32>)
    -> tensor<?x?x64xf32> {
  %u = ssm.causal_conv %x, %w {silu} : tensor<?x?x64xf32>, tensor<64x4xf32> -> tensor<?x?x64xf32>
  %y = ssm.selective_scan %u, %u, %A, %B, %B {delta_softplus}
      : tensor<?x?x64xf32>, tensor<?x?x64xf32>, tensor<64x16xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32>
      -> tensor<?x?x64xf32>
  return %y : tensor<?x?x64xf32>
}
