// Lowering of ssm.sample: one block for a row, without atomics, whose weights
// are integers.

// RUN: corey-opt %s --convert-ssm-to-gpu --canonicalize | FileCheck %s

// CHECK-LABEL: gpu.func @sample(
// CHECK-SAME: known_block_size = array<i32: 512, 1, 1>
// CHECK-NOT: atomicrmw
// The largest and the smallest logit.
// CHECK: llvm.load {{.+}} : !llvm.ptr<1> -> vector<4xf32>
// CHECK: nvvm.shfl.sync bfly
// CHECK: nvvm.barrier
// Exponents are rounded one by one, and sums are of integers.
// CHECK: arith.mulf %{{[^ ]+}}, %{{[^ ]+}} : f32
// CHECK: arith.fptosi
// CHECK: arith.shrui %{{.+}} : i64
// CHECK: arith.addi %{{.+}} : i64
// The random numbers, by the last thread.
// CHECK: arith.muli %{{.+}}, %c3528531795_i64
// CHECK: gpu.return

// A logit at a time, for less threads.
// CHECK-LABEL: gpu.func @sample_1(
// CHECK-SAME: known_block_size = array<i32: 32, 1, 1>
// CHECK: llvm.load {{.+}} : !llvm.ptr<1> -> i16
// CHECK: gpu.return

// CHECK-LABEL: func.func @large(
// CHECK: gpu.launch_func @kernels::@sample blocks
func.func @large(%x: tensor<?x50280xf32>, %t: tensor<?xf32>, %k: tensor<?xi32>, %p: tensor<?xf32>, %r: tensor<?x3xi64>)
    -> (tensor<?xi32>, tensor<?x3xi64>) {
  %y:2 = ssm.sample %x, %t, %k, %p, %r : tensor<?x50280xf32>, tensor<?xf32>, tensor<?xi32>, tensor<?xf32>, tensor<?x3xi64> -> tensor<?xi32>, tensor<?x3xi64>
  return %y#0, %y#1 : tensor<?xi32>, tensor<?x3xi64>
}

// CHECK-LABEL: func.func @small(
// CHECK: gpu.launch_func @kernels::@sample_1 blocks
func.func @small(%x: tensor<33xbf16>, %t: tensor<f32>, %k: tensor<i32>, %p: tensor<f32>, %r: tensor<3xi64>)
    -> (tensor<i64>, tensor<3xi64>) {
  %y:2 = ssm.sample %x, %t, %k, %p, %r : tensor<33xbf16>, tensor<f32>, tensor<i32>, tensor<f32>, tensor<3xi64> -> tensor<i64>, tensor<3xi64>
  return %y#0, %y#1 : tensor<i64>, tensor<3xi64>
}
