// Lowering of ssm.rms_norm to a kernel: short rows to lanes of a warp, longer
// ones to a block, those that do not fit into registers to two loops. A
// Hadamard transform behind it is in the same kernel.

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

// A rotation of short groups: two transforms of 32 on four lanes each, of which
// eight share the sum. The last stages of the transform are two shuffles for
// each of the eight elements of a lane.
// CHECK-LABEL: gpu.func @rms_norm_hadamard(
// CHECK-SAME: known_block_size = array<i32: 128, 1, 1>
// CHECK-NOT: gpu.func
// CHECK-COUNT-3: nvvm.shfl.sync
// CHECK: llvm.call_intrinsic "llvm.nvvm.rsqrt.approx.f"
// CHECK: math.exp
// CHECK-COUNT-16: nvvm.shfl.sync
// CHECK-NOT: nvvm.shfl.sync
// CHECK-NOT: nvvm.barrier
// CHECK-COUNT-1: llvm.store %{{.+}} {alignment = 16 : i64} : vector<4xi32>, !llvm.ptr<1>
// CHECK-NOT: llvm.store
// CHECK-LABEL: func.func @rotated_short(
// CHECK: memref.alloc
// CHECK-NOT: memref.alloc
// CHECK: gpu.launch_func @kernels::@rms_norm_hadamard
// CHECK-NOT: gpu.launch_func
// CHECK-NOT: ssm.
func.func @rotated_short(%x: tensor<?x?x64xf16>, %w: tensor<64xf32>, %g: tensor<?x?x64xf16>) -> tensor<?x?x64xf16> {
  %y = ssm.fused ins(%x, %w, %g : tensor<?x?x64xf16>, tensor<64xf32>, tensor<?x?x64xf16>) -> tensor<?x?x64xf16> {
  ^bb0(%a: tensor<?x?x64xf16>, %b: tensor<64xf32>, %c: tensor<?x?x64xf16>):
    %0 = ssm.rms_norm %a, %b : tensor<?x?x64xf16>, tensor<64xf32> -> tensor<?x?x64xf16>
    %1 = ssm.exp %c : tensor<?x?x64xf16>
    %2 = ssm.mul %0, %1 : tensor<?x?x64xf16>, tensor<?x?x64xf16>
    %3 = ssm.hadamard %2 {block = 32 : i64} : tensor<?x?x64xf16> -> tensor<?x?x64xf16>
    ssm.yield %3 : tensor<?x?x64xf16>
  }
  return %y : tensor<?x?x64xf16>
}

// -----

// Five transforms of 1024 on 16 threads each, rounded up to three warps; 64
// elements of a thread, whose gate is loaded when the norm is known. What is
// added behind the transform is read where the result is written, and the sums
// leave as they are.
// CHECK-LABEL: gpu.func @rms_norm_hadamard(
// CHECK-SAME: known_block_size = array<i32: 96, 1, 1>
// CHECK-NOT: gpu.func
// CHECK: nvvm.barrier
// CHECK-NOT: nvvm.barrier
// CHECK: llvm.call_intrinsic "llvm.nvvm.ex2.approx.ftz.f32"
// CHECK-COUNT-256: nvvm.shfl.sync
// CHECK-NOT: nvvm.shfl.sync
// CHECK: scf.if
// CHECK-COUNT-8: llvm.store %{{.+}} {alignment = 16 : i64} : vector<4xi32>, !llvm.ptr<1>
// CHECK-NOT: llvm.store
// CHECK-LABEL: func.func @rotated(
// CHECK-COUNT-2: memref.alloc
// CHECK-NOT: memref.alloc
// CHECK: gpu.launch_func @kernels::@rms_norm_hadamard
// CHECK-NOT: gpu.launch_func
// CHECK-NOT: ssm.
func.func @rotated(%x: tensor<?x5120xbf16>, %w: tensor<5120xbf16>, %r: tensor<?x5120xbf16>, %z: tensor<?x5120xbf16>) -> (tensor<?x5120xbf16>, tensor<?x5120xbf16>) {
  %y:2 = ssm.fused ins(%x, %w, %r, %z : tensor<?x5120xbf16>, tensor<5120xbf16>, tensor<?x5120xbf16>, tensor<?x5120xbf16>) -> tensor<?x5120xbf16>, tensor<?x5120xbf16> {
  ^bb0(%a: tensor<?x5120xbf16>, %b: tensor<5120xbf16>, %c: tensor<?x5120xbf16>, %d: tensor<?x5120xbf16>):
    %0, %s = ssm.rms_norm %a, %b residual(%c : tensor<?x5120xbf16>) z(%d : tensor<?x5120xbf16>) {norm_before_gate}
        : tensor<?x5120xbf16>, tensor<5120xbf16> -> tensor<?x5120xbf16>, tensor<?x5120xbf16>
    %1 = ssm.hadamard %0 {block = 1024 : i64} : tensor<?x5120xbf16> -> tensor<?x5120xbf16>
    %2 = ssm.add %1, %c : tensor<?x5120xbf16>, tensor<?x5120xbf16>
    ssm.yield %2, %s : tensor<?x5120xbf16>, tensor<?x5120xbf16>
  }
  return %y#0, %y#1 : tensor<?x5120xbf16>, tensor<?x5120xbf16>
}

// -----

// The largest: 512 threads, and shared memory for the exchange beside that of
// the sum.
// CHECK: llvm.mlir.global external @shared()
// CHECK-LABEL: gpu.func @rms_norm_hadamard(
// CHECK-SAME: known_block_size = array<i32: 512, 1, 1>
// CHECK-COUNT-3: nvvm.barrier
// CHECK-NOT: nvvm.barrier
// CHECK-LABEL: func.func @rotated_largest(
// CHECK: %[[BYTES:.+]] = arith.constant 131136 : i32
// CHECK: gpu.launch_func @kernels::@rms_norm_hadamard {{.*}} dynamic_shared_memory_size %[[BYTES]]
func.func @rotated_largest(%x: tensor<?x32768xf32>, %w: tensor<32768xf32>) -> tensor<?x32768xf32> {
  %y = ssm.fused ins(%x, %w : tensor<?x32768xf32>, tensor<32768xf32>) -> tensor<?x32768xf32> {
  ^bb0(%a: tensor<?x32768xf32>, %b: tensor<32768xf32>):
    %0 = ssm.rms_norm %a, %b : tensor<?x32768xf32>, tensor<32768xf32> -> tensor<?x32768xf32>
    %1 = ssm.hadamard %0 {block = 32768 : i64} : tensor<?x32768xf32> -> tensor<?x32768xf32>
    ssm.yield %1 : tensor<?x32768xf32>
  }
  return %y : tensor<?x32768xf32>
}

// -----

// A region that no kernel can be made of becomes two.
// CHECK-LABEL: func.func @apart(
// CHECK: gpu.launch_func @kernels::@rms_norm blocks
// CHECK: gpu.launch_func @kernels::@hadamard blocks
// CHECK-NOT: gpu.launch_func
func.func @apart(%x: tensor<?x96xf32>, %w: tensor<96xf32>) -> tensor<?x96xf32> {
  %y = ssm.fused ins(%x, %w : tensor<?x96xf32>, tensor<96xf32>) -> tensor<?x96xf32> {
  ^bb0(%a: tensor<?x96xf32>, %b: tensor<96xf32>):
    %0 = ssm.rms_norm %a, %b {group_size = 48 : i64} : tensor<?x96xf32>, tensor<96xf32> -> tensor<?x96xf32>
    %1 = ssm.hadamard %0 {block = 32 : i64} : tensor<?x96xf32> -> tensor<?x96xf32>
    ssm.yield %1 : tensor<?x96xf32>
  }
  return %y : tensor<?x96xf32>
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
