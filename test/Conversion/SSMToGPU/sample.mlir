// Lowering of ssm.sample: a cluster of blocks for a row, or one block, whose
// weights are integers.

// RUN: corey-opt %s --convert-ssm-to-gpu --canonicalize | FileCheck %s
// RUN: corey-opt %s --convert-ssm-to-gpu=chip=sm_80 --canonicalize | FileCheck %s --check-prefix=SM80

// CHECK-LABEL: gpu.func @sample(
// CHECK-SAME: known_block_size = array<i32: 512, 1, 1>
// CHECK-NOT: atomicrmw fadd
// The largest and the smallest logit, of a block and of all.
// CHECK: "ld.global.v4.b32
// CHECK: nvvm.shfl.sync bfly
// CHECK: nvvm.barrier
// CHECK: nvvm.cluster.arrive
// CHECK: nvvm.cluster.wait
// CHECK: nvvm.mapa {{.+}} : !llvm.ptr<3> -> !llvm.ptr<7>
// Exponents are rounded one by one, and sums are of integers.
// CHECK: arith.mulf %{{[^ ]+}}, %{{[^ ]+}} : f32
// CHECK: arith.fptosi
// CHECK: arith.shrui %{{.+}} : i64
// CHECK: llvm.atomicrmw add {{.+}} : !llvm.ptr<3>, i32
// The random numbers, by the last thread.
// CHECK: arith.muli %{{.+}}, %c3528531795_i64
// No block ends while others may read its memory.
// CHECK: llvm.store {{.+}} : i32, !llvm.ptr<1>
// CHECK: nvvm.cluster.arrive
// CHECK-NEXT: nvvm.cluster.wait
// CHECK-NEXT: }
// CHECK-NEXT: gpu.return

// SM80-NOT: cluster
// SM80-NOT: mapa

// One block for each of many rows.
// CHECK-LABEL: gpu.func @sample_1(
// CHECK-SAME: known_block_size = array<i32: 512, 1, 1>
// CHECK-NOT: cluster
// CHECK-NOT: mapa
// CHECK: gpu.return

// A logit at a time, for less threads.
// CHECK-LABEL: gpu.func @sample_2(
// CHECK-SAME: known_block_size = array<i32: 32, 1, 1>
// CHECK: "ld.global.b16
// CHECK-NOT: cluster
// CHECK: gpu.return

// CHECK-LABEL: func.func @large(
// CHECK: %[[IS_FEW:.+]] = arith.cmpi sle, %{{.+}}, %c528 : index
// CHECK: scf.if %[[IS_FEW]]
// CHECK: gpu.launch_func @kernels::@sample clusters in (%c8, %c1, %c1) blocks in (%c8,
// CHECK: gpu.launch_func @kernels::@sample_1 blocks in (%c1,
func.func @large(%x: tensor<?x50280xf32>, %t: tensor<?xf32>, %k: tensor<?xi32>, %p: tensor<?xf32>, %r: tensor<?x3xi64>)
    -> (tensor<?xi32>, tensor<?x3xi64>) {
  %y:2 = ssm.sample %x, %t, %k, %p, %r : tensor<?x50280xf32>, tensor<?xf32>, tensor<?xi32>, tensor<?xf32>, tensor<?x3xi64> -> tensor<?xi32>, tensor<?x3xi64>
  return %y#0, %y#1 : tensor<?xi32>, tensor<?x3xi64>
}

// CHECK-LABEL: func.func @small(
// CHECK: gpu.launch_func @kernels::@sample_2 blocks in (%c1,
func.func @small(%x: tensor<33xbf16>, %t: tensor<f32>, %k: tensor<i32>, %p: tensor<f32>, %r: tensor<3xi64>)
    -> (tensor<i64>, tensor<3xi64>) {
  %y:2 = ssm.sample %x, %t, %k, %p, %r : tensor<33xbf16>, tensor<f32>, tensor<i32>, tensor<f32>, tensor<3xi64> -> tensor<i64>, tensor<3xi64>
  return %y#0, %y#1 : tensor<i64>, tensor<3xi64>
}
