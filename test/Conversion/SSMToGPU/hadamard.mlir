// Lowering of ssm.hadamard to a kernel: butterflies between registers, by
// shuffles, and behind an exchange through shared memory.

// RUN: corey-opt %s --split-input-file --convert-ssm-to-gpu --canonicalize | FileCheck %s
// RUN: corey-opt %s --split-input-file --corey-gpu-pipeline -o /dev/null

// Two transforms within what a thread loads at once.
// CHECK-LABEL: gpu.func @hadamard(
// CHECK: llvm.load %{{.+}} invariant {alignment = 16 : i64} : !llvm.ptr<1> -> vector<4xi32>
// CHECK-COUNT-16: arith.{{addf|subf}}
// CHECK-NOT: arith.{{addf|subf}}
// CHECK-NOT: nvvm.shfl.sync
// CHECK: llvm.store %{{.+}} {alignment = 16 : i64} : vector<4xi32>, !llvm.ptr<1>
// CHECK-LABEL: func.func @within_pieces(
func.func @within_pieces(%x: tensor<?x24xf16>) -> tensor<?x24xf16> {
  %y = ssm.hadamard %x {block = 4 : i64} : tensor<?x24xf16> -> tensor<?x24xf16>
  return %y : tensor<?x24xf16>
}

// -----

// 128 elements on eight lanes: three stages between them.
// CHECK-LABEL: gpu.func @hadamard(
// CHECK-COUNT-2: llvm.load %{{.+}} -> vector<4xi32>
// CHECK-COUNT-48: nvvm.shfl.sync
// CHECK-NOT: nvvm.shfl.sync
// CHECK-NOT: nvvm.barrier
// CHECK-COUNT-2: llvm.store %{{.+}} : vector<4xi32>, !llvm.ptr<1>
// CHECK-LABEL: func.func @lanes(
func.func @lanes(%x: tensor<?x?x768xf16>) -> tensor<?x?x768xf16> {
  %y = ssm.hadamard %x {block = 128 : i64} : tensor<?x?x768xf16> -> tensor<?x?x768xf16>
  return %y : tensor<?x?x768xf16>
}

// -----

// 4096 on 64 threads, each with 64 of them, in two layouts.
// CHECK: llvm.mlir.global internal @shared_16640()
// CHECK-LABEL: gpu.func @hadamard(
// CHECK-SAME: known_block_size = array<i32: 64, 1, 1>
// CHECK-COUNT-8: llvm.load %{{.+}} -> vector<4xi32>
// CHECK-COUNT-16: llvm.store %{{.+}} {alignment = 16 : i64} : vector<4xf32>, !llvm.ptr<3>
// CHECK: nvvm.barrier
// CHECK-COUNT-64: llvm.load %{{.+}} : !llvm.ptr<3> -> f32
// CHECK-COUNT-64: llvm.store %{{.+}} : f32, !llvm.ptr<3>
// CHECK: nvvm.barrier
// CHECK-COUNT-16: llvm.load %{{.+}} {alignment = 16 : i64} : !llvm.ptr<3> -> vector<4xf32>
// CHECK-COUNT-8: llvm.store %{{.+}} {alignment = 16 : i64} : vector<4xi32>, !llvm.ptr<1>
// CHECK-LABEL: func.func @block(
// CHECK: gpu.launch_func @kernels::@hadamard
func.func @block(%x: tensor<?x4096xf16>) -> tensor<?x4096xf16> {
  %y = ssm.hadamard %x {block = 4096 : i64} : tensor<?x4096xf16> -> tensor<?x4096xf16>
  return %y : tensor<?x4096xf16>
}

// -----

// As much shared memory as has to be asked for at the launch.
// CHECK: llvm.mlir.global external @shared()
// CHECK-LABEL: func.func @largest(
// CHECK: %[[BYTES:.+]] = arith.constant 131072 : i32
// CHECK: gpu.launch_func @kernels::@hadamard {{.*}} dynamic_shared_memory_size %[[BYTES]]
func.func @largest(%x: tensor<?x32768xf32>) -> tensor<?x32768xf32> {
  %y = ssm.hadamard %x {block = 32768 : i64} : tensor<?x32768xf32> -> tensor<?x32768xf32>
  return %y : tensor<?x32768xf32>
}

// -----

// One kernel, nothing in memory between its ops.
// CHECK-LABEL: gpu.func @hadamard(
// CHECK-NOT: gpu.func
// CHECK: math.exp
// CHECK-LABEL: func.func @fused(
// CHECK: memref.alloc
// CHECK-NOT: memref.alloc
// CHECK: gpu.launch_func @kernels::@hadamard
// CHECK-NOT: gpu.launch_func
func.func @fused(%x: tensor<?x64xf16>, %s: tensor<64xf16>) -> tensor<?x64xf16> {
  %y = ssm.fused ins(%x, %s : tensor<?x64xf16>, tensor<64xf16>) -> tensor<?x64xf16> {
  ^bb0(%a: tensor<?x64xf16>, %b: tensor<64xf16>):
    %0 = ssm.exp %a : tensor<?x64xf16>
    %1 = ssm.hadamard %0 {block = 64 : i64} : tensor<?x64xf16> -> tensor<?x64xf16>
    %2 = ssm.mul %1, %b : tensor<?x64xf16>, tensor<64xf16>
    ssm.yield %2 : tensor<?x64xf16>
  }
  return %y : tensor<?x64xf16>
}
