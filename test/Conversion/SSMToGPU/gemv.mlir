// Lowering of ssm.projection of few rows to tensor cores: the weight is on its way
// before predecessors end, x is read after.

// RUN: corey-opt %s --convert-ssm-to-gpu="chip=sm_90a" --canonicalize | FileCheck %s
// RUN: corey-opt %s --convert-ssm-to-gpu="chip=sm_90a" --canonicalize | FileCheck %s --check-prefix=KERNEL
// RUN: corey-opt %s --convert-ssm-to-gpu="chip=sm_80" --canonicalize | FileCheck %s --implicit-check-not=griddepcontrol

// A weight of the program is loaded, one of the caller asked for in L2.
// KERNEL-LABEL: gpu.func @gemv_8(
// KERNEL: nvvm.griddepcontrol launch_dependents
// KERNEL-COUNT-8: llvm.inline_asm has_side_effects "ld.global.v4.b32
// KERNEL-NOT: ld.global
// KERNEL: nvvm.griddepcontrol wait
// KERNEL-COUNT-4: llvm.inline_asm has_side_effects "ld.global.v4.b32
// KERNEL-COUNT-16: llvm.call_intrinsic "llvm.nvvm.mma.m16n8k16.row.col.f32.f32"
// KERNEL: nvvm.barrier
// KERNEL-LABEL: gpu.func @gemv_8_1(
// KERNEL: nvvm.griddepcontrol launch_dependents
// KERNEL-NOT: ld.global
// KERNEL: prefetch.global.L2
// KERNEL-NOT: ld.global
// KERNEL: nvvm.griddepcontrol wait
// KERNEL: llvm.call_intrinsic "llvm.nvvm.mma.m16n8k16.row.col.bf16"

// No load of what predecessors make may move to before the wait.
// KERNEL-LABEL: gpu.func @gemv_1(
// KERNEL-NOT: llvm.load {{.*}} !llvm.ptr<1>
// KERNEL-LABEL: gpu.func @gemv_8_3(
// KERNEL-NOT: llvm.load {{.*}} !llvm.ptr<1>
// KERNEL-LABEL: gpu.func @rms_norm(

// CHECK-LABEL: func.func @bound(
// CHECK: arith.cmpi sle, %[[ROWS:.+]], %c8
// CHECK: gpu.launch_func @kernels::@gemv_8 blocks in (%c256, {{.*}}) threads in (%c256,
// CHECK: } else {
// CHECK: arith.cmpi sle, %[[ROWS]], %c16
// CHECK: gpu.launch_func @kernels::@gemv_16 blocks in (%c256, {{.*}}) threads in (%c256,
// CHECK: } else {
// CHECK: func.call @corey_rt_device_gemm
func.func @bound(%x: tensor<?x1x1024xf16>, %w: tensor<4096x1024xf16> {ssm.weight = @w}) -> tensor<?x1x4096xf16> {
  %y = ssm.projection %x, %w : tensor<?x1x1024xf16>, tensor<4096x1024xf16> -> tensor<?x1x4096xf16>
  return %y : tensor<?x1x4096xf16>
}

// Few columns: a warp has all of an output. Blocks walk over many outputs.
// CHECK-LABEL: func.func @low(
// CHECK: gpu.launch_func @kernels::@gemv_8_1 blocks in (%c128, {{.*}}) threads in (%c64,
func.func @low(%x: tensor<?x1x64xbf16>, %w: tensor<2048x64xbf16>) -> tensor<?x1x2048xbf16> {
  %y = ssm.projection %x, %w : tensor<?x1x64xbf16>, tensor<2048x64xbf16> -> tensor<?x1x2048xbf16>
  return %y : tensor<?x1x2048xbf16>
}
// CHECK-LABEL: func.func @head(
// CHECK: gpu.launch_func @kernels::@gemv_8_2 blocks in (%c262, {{.*}}) threads in (%c256,
func.func @head(%x: tensor<?x1x1024xbf16>, %w: tensor<50280x1024xbf16>) -> tensor<?x1x50280xbf16> {
  %y = ssm.projection %x, %w : tensor<?x1x1024xbf16>, tensor<50280x1024xbf16> -> tensor<?x1x50280xbf16>
  return %y : tensor<?x1x50280xbf16>
}

// Rows of x that are not a multiple of what is loaded at once have another kernel.
// CHECK-LABEL: func.func @odd(
// CHECK: gpu.launch_func @kernels::@projection_stream_1
func.func @odd(%x: tensor<?x1x63xf16>, %w: tensor<64x63xf16>) -> tensor<?x1x64xf16> {
  %y = ssm.projection %x, %w : tensor<?x1x63xf16>, tensor<64x63xf16> -> tensor<?x1x64xf16>
  return %y : tensor<?x1x64xf16>
}

// What is before the projection is made in its kernel; of many rows, apart.
// CHECK-LABEL: func.func @normed(
// CHECK: arith.cmpi sle, %[[ROWS:.+]], %c1
// CHECK: gpu.launch_func @kernels::@gemv_1
// CHECK: } else {
// CHECK: arith.cmpi sle, %[[ROWS]], %c8
// CHECK: gpu.launch_func @kernels::@gemv_8_3
// CHECK: } else {
// CHECK: gpu.launch_func @kernels::@rms_norm
// CHECK: arith.cmpi sle, %[[ROWS]], %c16
// CHECK: gpu.launch_func @kernels::@gemv_16
// CHECK: } else {
// CHECK: func.call @corey_rt_device_gemm
// CHECK-NOT: ssm.
// CHECK: return
func.func @normed(%x: tensor<?x1x1024xf32>, %g: tensor<1024xf32>, %w: tensor<512x1024xf16>) -> tensor<?x1x512xf16> {
  %y = ssm.fused ins(%x, %g, %w : tensor<?x1x1024xf32>, tensor<1024xf32>, tensor<512x1024xf16>) -> tensor<?x1x512xf16> {
  ^bb0(%a: tensor<?x1x1024xf32>, %b: tensor<1024xf32>, %c: tensor<512x1024xf16>):
    %n = ssm.rms_norm %a, %b : tensor<?x1x1024xf32>, tensor<1024xf32> -> tensor<?x1x1024xf32>
    %h = ssm.cast %n : tensor<?x1x1024xf32> to tensor<?x1x1024xf16>
    %p = ssm.projection %h, %c : tensor<?x1x1024xf16>, tensor<512x1024xf16> -> tensor<?x1x512xf16>
    ssm.yield %p : tensor<?x1x512xf16>
  }
  return %y : tensor<?x1x512xf16>
}

// One token of a scan makes delta from a few columns.
// CHECK-LABEL: func.func @low_rank(
// CHECK: gpu.launch_func @kernels::@selective_scan_project_step
// CHECK-NOT: gpu.launch_func
// CHECK-NOT: ssm.
// CHECK: return
func.func @low_rank(%u: tensor<?x1x32xf16>, %l: tensor<?x1x24xf16>, %w: tensor<32x24xf16>, %A: tensor<32x16xf32>,
                    %B: tensor<?x1x1x16xf16>) -> tensor<?x1x32xf16> {
  %y = ssm.fused ins(%u, %l, %w, %A, %B : tensor<?x1x32xf16>, tensor<?x1x24xf16>, tensor<32x24xf16>, tensor<32x16xf32>, tensor<?x1x1x16xf16>) -> tensor<?x1x32xf16> {
  ^bb0(%a: tensor<?x1x32xf16>, %b: tensor<?x1x24xf16>, %c: tensor<32x24xf16>, %d: tensor<32x16xf32>, %e: tensor<?x1x1x16xf16>):
    %p = ssm.projection %b, %c : tensor<?x1x24xf16>, tensor<32x24xf16> -> tensor<?x1x32xf16>
    %s = ssm.selective_scan %a, %p, %d, %e, %e {delta_softplus}
        : tensor<?x1x32xf16>, tensor<?x1x32xf16>, tensor<32x16xf32>, tensor<?x1x1x16xf16>, tensor<?x1x1x16xf16> -> tensor<?x1x32xf16>
    ssm.yield %s : tensor<?x1x32xf16>
  }
  return %y : tensor<?x1x32xf16>
}
