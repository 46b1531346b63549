// Lowering of pointwise ops: one kernel for a region, runs of elements that are
// loaded at once.

// RUN: corey-opt %s --split-input-file --convert-ssm-to-gpu --canonicalize | FileCheck %s
// RUN: corey-opt %s --split-input-file --corey-gpu-pipeline -o /dev/null

// Eight elements of 16 bytes, computed in f32.
// CHECK-LABEL: gpu.func @pointwise(
// CHECK-SAME: known_block_size = array<i32: 256, 1, 1>
// CHECK-COUNT-2: llvm.load %{{.+}} invariant {alignment = 16 : i64} : !llvm.ptr<1> -> vector<4xi32>
// CHECK-COUNT-8: arith.addf %{{.+}}, %{{.+}} : f32
// CHECK: llvm.store %{{.+}} {alignment = 16 : i64} : vector<4xi32>, !llvm.ptr<1>
// CHECK-LABEL: func.func @add(
// CHECK: memref.alloc
// CHECK-NOT: memref.alloc
// CHECK: gpu.launch_func @kernels::@pointwise
// CHECK-NOT: gpu.launch_func
func.func @add(%x: tensor<?x?x64xbf16>, %v: tensor<?x?x64xbf16>) -> tensor<?x?x64xbf16> {
  %y = ssm.add %x, %v : tensor<?x?x64xbf16>, tensor<?x?x64xbf16>
  return %y : tensor<?x?x64xbf16>
}

// -----

// A region is one kernel; the row of a weight is read by every token.
// CHECK-LABEL: gpu.func @pointwise(
// CHECK: math.exp
// CHECK: arith.mulf
// CHECK-NOT: gpu.func
// CHECK-LABEL: func.func @chain(
// CHECK: memref.alloc
// CHECK-NOT: memref.alloc
// CHECK: gpu.launch_func @kernels::@pointwise
// CHECK-NOT: gpu.launch_func
func.func @chain(%x: tensor<?x?x6xf32>, %w: tensor<6xf32>) -> tensor<?x?x6xf32> {
  %r = ssm.fused ins(%x, %w : tensor<?x?x6xf32>, tensor<6xf32>) -> tensor<?x?x6xf32> {
  ^bb0(%a: tensor<?x?x6xf32>, %b: tensor<6xf32>):
    %0 = ssm.silu %a : tensor<?x?x6xf32>
    %1 = ssm.mul %0, %b : tensor<?x?x6xf32>, tensor<6xf32>
    %2 = ssm.exp %1 : tensor<?x?x6xf32>
    ssm.yield %2 : tensor<?x?x6xf32>
  }
  return %r : tensor<?x?x6xf32>
}

// -----

// Of an unknown row nothing is known to be aligned: element by element. A scalar
// has one.
// CHECK-LABEL: gpu.func @pointwise(
// CHECK: llvm.load %{{.+}} invariant {alignment = 2 : i64} : !llvm.ptr<1> -> i16
// CHECK: llvm.store %{{.+}} {alignment = 4 : i64} : f32, !llvm.ptr<1>
// CHECK-LABEL: gpu.func @pointwise_1(
// CHECK-LABEL: func.func @casts(
// CHECK: gpu.launch_func @kernels::@pointwise blocks
// CHECK: gpu.launch_func @kernels::@pointwise_1 blocks
func.func @casts(%x: tensor<?x?xf16>, %s: tensor<f32>) -> (tensor<?x?xf32>, tensor<f32>) {
  %y = ssm.cast %x : tensor<?x?xf16> to tensor<?x?xf32>
  %t = ssm.neg %s : tensor<f32>
  return %y, %t : tensor<?x?xf32>, tensor<f32>
}
