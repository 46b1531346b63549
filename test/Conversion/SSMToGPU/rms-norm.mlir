// Lowering of ssm.rms_norm to a kernel: short rows to lanes of a warp, longer
// ones to a block, those that do not fit into registers to two loops.

// RUN: corey-opt %s --split-input-file --convert-ssm-to-gpu --canonicalize | FileCheck %s
// RUN: corey-opt %s --split-input-file --corey-gpu-pipeline -o /dev/null

// Eight lanes a row, and no barrier.
// CHECK-LABEL: gpu.func @rms_norm(
// CHECK-SAME: known_block_size = array<i32: 128, 1, 1>
// CHECK: llvm.load %{{.+}} invariant {alignment = 16 : i64} : !llvm.ptr<1> -> vector<4xi32>
// CHECK-COUNT-3: nvvm.shfl.sync
// CHECK-NOT: nvvm.shfl.sync
// CHECK-NOT: nvvm.barrier
// CHECK: llvm.call_intrinsic "llvm.nvvm.rsqrt.approx.f"
// CHECK: scf.if
// CHECK: llvm.store %{{.+}} {alignment = 16 : i64} : vector<4xi32>, !llvm.ptr<1>
// CHECK-LABEL: func.func @short(
// CHECK: gpu.launch_func @kernels::@rms_norm
func.func @short(%x: tensor<?x?x64xbf16>, %w: tensor<64xf32>) -> tensor<?x?x64xbf16> {
  %y = ssm.rms_norm %x, %w {eps = 1.0e-5 : f32} : tensor<?x?x64xbf16>, tensor<64xf32> -> tensor<?x?x64xbf16>
  return %y : tensor<?x?x64xbf16>
}

// -----

// A row of 5120 elements to 320 threads, everything asked for before any of it
// is used.
// CHECK-LABEL: gpu.func @rms_norm(
// CHECK-SAME: known_block_size = array<i32: 320, 1, 1>
// CHECK-COUNT-8: llvm.load %{{.+}} invariant {alignment = 16 : i64} : !llvm.ptr<1> -> vector<4xi32>
// CHECK: llvm.store %{{.+}} {alignment = 16 : i64} : vector<4xi32>, !llvm.ptr<1>
// CHECK: nvvm.barrier
// CHECK-NOT: nvvm.barrier
// The gate that comes after the norm.
// CHECK: llvm.call_intrinsic "llvm.nvvm.ex2.approx.ftz.f32"
// CHECK: llvm.store %{{.+}} {alignment = 16 : i64} : vector<4xi32>, !llvm.ptr<1>
// CHECK-LABEL: func.func @gated(
// CHECK-COUNT-2: memref.alloc
// CHECK-NOT: memref.alloc
// CHECK: gpu.launch_func @kernels::@rms_norm
// CHECK-NOT: gpu.launch_func
func.func @gated(%x: tensor<?x5120xbf16>, %w: tensor<5120xbf16>, %r: tensor<?x5120xbf16>, %z: tensor<?x5120xbf16>) -> (tensor<?x5120xbf16>, tensor<?x5120xbf16>) {
  %y, %s = ssm.rms_norm %x, %w residual(%r : tensor<?x5120xbf16>) z(%z : tensor<?x5120xbf16>) {norm_before_gate}
      : tensor<?x5120xbf16>, tensor<5120xbf16> -> tensor<?x5120xbf16>, tensor<?x5120xbf16>
  return %y, %s : tensor<?x5120xbf16>, tensor<?x5120xbf16>
}

// -----

// CHECK-LABEL: gpu.func @rms_norm(
// CHECK-SAME: known_block_size = array<i32: 1024, 1, 1>
// CHECK: scf.for
// CHECK: nvvm.barrier
// CHECK: scf.for
// CHECK-LABEL: func.func @long(
func.func @long(%x: tensor<100003xf16>, %w: tensor<100003xf32>) -> tensor<100003xf16> {
  %y = ssm.rms_norm %x, %w : tensor<100003xf16>, tensor<100003xf32> -> tensor<100003xf16>
  return %y : tensor<100003xf16>
}

// -----

// One kernel, nothing in memory between its ops.
// CHECK-LABEL: gpu.func @rms_norm(
// CHECK-NOT: gpu.func
// CHECK: math.exp
// CHECK: llvm.call_intrinsic "llvm.nvvm.rsqrt.approx.f"
// CHECK-LABEL: func.func @fused(
// CHECK: memref.alloc
// CHECK-NOT: memref.alloc
// CHECK: gpu.launch_func @kernels::@rms_norm
// CHECK-NOT: gpu.launch_func
func.func @fused(%x: tensor<?x768xf32>, %w: tensor<768xf32>, %s: tensor<768xf32>) -> tensor<?x768xf32> {
  %y = ssm.fused ins(%x, %w, %s : tensor<?x768xf32>, tensor<768xf32>, tensor<768xf32>) -> tensor<?x768xf32> {
  ^bb0(%a: tensor<?x768xf32>, %b: tensor<768xf32>, %c: tensor<768xf32>):
    %0 = ssm.exp %a : tensor<?x768xf32>
    %1 = ssm.rms_norm %0, %b {group_size = 256 : i64} : tensor<?x768xf32>, tensor<768xf32> -> tensor<?x768xf32>
    %2 = ssm.mul %1, %c : tensor<?x768xf32>, tensor<768xf32>
    %3 = ssm.neg %2 : tensor<?x768xf32>
    ssm.yield %3 : tensor<?x768xf32>
  }
  return %y : tensor<?x768xf32>
}

// -----

// Layers of a model have the same kernels: one is made. Another group of
// elements is another kernel.
// CHECK-LABEL: gpu.module @kernels
// CHECK: gpu.func @rms_norm(
// CHECK: gpu.func @rms_norm_1(
// CHECK-NOT: gpu.func
// CHECK-LABEL: func.func @layers(
// CHECK: gpu.launch_func @kernels::@rms_norm blocks
// CHECK: gpu.launch_func @kernels::@rms_norm blocks
// CHECK: gpu.launch_func @kernels::@rms_norm_1 blocks
func.func @layers(%x: tensor<?x?x256xf32>, %w: tensor<256xf32>, %v: tensor<256xf32>) -> tensor<?x?x256xf32> {
  %a = ssm.rms_norm %x, %w : tensor<?x?x256xf32>, tensor<256xf32> -> tensor<?x?x256xf32>
  %b = ssm.rms_norm %a, %v : tensor<?x?x256xf32>, tensor<256xf32> -> tensor<?x?x256xf32>
  %c = ssm.rms_norm %b, %v {group_size = 128 : i64} : tensor<?x?x256xf32>, tensor<256xf32> -> tensor<?x?x256xf32>
  return %c : tensor<?x?x256xf32>
}
