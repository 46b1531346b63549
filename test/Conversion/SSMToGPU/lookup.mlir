// Lowering of ssm.embedding and ssm.argmax, and what kernels report.

// RUN: corey-opt %s --convert-ssm-to-gpu --canonicalize | FileCheck %s
// RUN: corey-opt %s --convert-ssm-to-gpu --canonicalize | FileCheck %s --check-prefix=KERNEL

// The first of equals is kept within a thread, then across lanes and warps.
// KERNEL-LABEL: gpu.func @argmax(
// KERNEL: scf.for
// KERNEL: arith.cmpi sgt
// KERNEL: nvvm.shfl.sync bfly
// KERNEL: nvvm.barrier
// KERNEL: nvvm.shfl.sync bfly

// A run of eight elements is copied as it is; a bad id is reported, once a row,
// and clamped.
// KERNEL-LABEL: gpu.func @embedding(
// KERNEL: arith.cmpi slt
// KERNEL: arith.cmpi sge
// KERNEL: scf.if
// KERNEL: llvm.store %{{.+}} {alignment = 4 : i64} : i32, !llvm.ptr<1>
// KERNEL: llvm.store %{{.+}} {alignment = 8 : i64} : i64, !llvm.ptr<1>
// KERNEL: arith.minsi
// KERNEL: arith.maxsi
// KERNEL: llvm.load %{{.+}} invariant {alignment = 16 : i64} : !llvm.ptr<1> -> vector<4xi32>
// KERNEL: llvm.store %{{.+}} {alignment = 16 : i64} : vector<4xi32>, !llvm.ptr<1>

// How many rows there are is an argument.
// KERNEL-LABEL: gpu.func @embedding_1(
// KERNEL-SAME: %[[ROWS:[a-z0-9]+]]: i64, %{{[a-z0-9]+}}: i64) kernel
// KERNEL: arith.cmpi sge, %{{.+}}, %[[ROWS]]
// KERNEL: arith.cmpi sgt, %[[ROWS]]
// KERNEL: scf.if
// KERNEL: arith.minsi

// One warp looks at the starts.
// KERNEL-LABEL: gpu.func @check_sequences(
// KERNEL-SAME: known_block_size = array<i32: 32, 1, 1>
// KERNEL-NOT: nvvm.barrier
// KERNEL: gpu.return

// CHECK: func.func private @corey_rt_check_sequence_count(i64, i64)
// CHECK: func.func private @corey_rt_device_error_slot() -> i64

// CHECK-LABEL: func.func @argmax(
// CHECK: gpu.launch_func @kernels::@argmax
func.func @argmax(%x: tensor<?x4096xf32>) -> tensor<?xi32> {
  %y = ssm.argmax %x : tensor<?x4096xf32> -> tensor<?xi32>
  return %y : tensor<?xi32>
}

// CHECK-LABEL: func.func @embedding(
// CHECK: %[[SLOT:.+]] = {{.*}}call @corey_rt_device_error_slot()
// CHECK: llvm.inttoptr %[[SLOT]]
// CHECK: gpu.launch_func @kernels::@embedding
func.func @embedding(%ids: tensor<?x?xi32>, %t: tensor<256x64xbf16>) -> tensor<?x?x64xbf16> {
  %y = ssm.embedding %ids, %t : tensor<?x?xi32>, tensor<256x64xbf16> -> tensor<?x?x64xbf16>
  return %y : tensor<?x?x64xbf16>
}

// CHECK-LABEL: func.func @gather(
// CHECK: tensor.dim %arg1
// CHECK: gpu.launch_func @kernels::@embedding_1
func.func @gather(%ids: tensor<?xi32>, %t: tensor<?x64xf32>) -> tensor<?x64xf32> {
  %y = ssm.embedding %ids, %t : tensor<?xi32>, tensor<?x64xf32> -> tensor<?x64xf32>
  return %y : tensor<?x64xf32>
}

// CHECK-LABEL: func.func @packed(
// CHECK: call @corey_rt_check_sequence_count
// CHECK: gpu.launch_func @kernels::@check_sequences
func.func @packed(%u: tensor<1x?x64xf32>, %A: tensor<64x16xf32>, %B: tensor<1x?x1x16xf32>,
                  %starts: tensor<?xi32>) -> tensor<1x?x64xf32> {
  %y = ssm.selective_scan %u, %u, %A, %B, %B seq_starts(%starts : tensor<?xi32>)
      : tensor<1x?x64xf32>, tensor<1x?x64xf32>, tensor<64x16xf32>, tensor<1x?x1x16xf32>,
        tensor<1x?x1x16xf32> -> tensor<1x?x64xf32>
  return %y : tensor<1x?x64xf32>
}
