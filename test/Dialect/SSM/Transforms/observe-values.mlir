// ssm-observe-values: a site for every value, with the name of the value.

// RUN: corey-opt %s --ssm-observe-values | FileCheck %s
// Twice is once.
// RUN: corey-opt %s --ssm-observe-values --ssm-observe-values | FileCheck %s
// RUN: corey-opt %s --ssm-observe-values --verify-roundtrip > /dev/null
// RUN: %if llvm-statistics %{ corey-opt %s --ssm-observe-values --mlir-pass-statistics 2>&1 >/dev/null | FileCheck %s --check-prefix=STATISTICS %}
// STATISTICS: num-observed

// CHECK-LABEL: func.func @main(
// CHECK-SAME: %[[X:.+]]: tensor<?x?x8xf32>, %[[I:.+]]: tensor<?x?xi32>
// CHECK: %[[OX:.+]] = ssm.observe @"main.arg#0" %[[X]] : tensor<?x?x8xf32>
// Sizes are taken of the value itself; constants have no site.
// CHECK: tensor.dim %[[X]],
// CHECK: %[[C:.+]] = arith.constant dense
// CHECK: %[[M:.+]] = ssm.mul %[[OX]], %[[C]]
// CHECK: %[[OM:.+]] = ssm.observe @"main.mul#0" %[[M]]
// A site of the program keeps its name and is not observed twice.
// CHECK-NEXT: %[[S:.+]] = ssm.silu %[[OM]]
// CHECK-NEXT: %[[OS:.+]] = ssm.observe @layer0.u %[[S]]
// CHECK-NEXT: %[[N:.+]] = ssm.mul %[[OS]], %[[S]]
// CHECK-NEXT: %[[ON:.+]] = ssm.observe @"main.mul#1" %[[N]]
// CHECK-NEXT: %[[Y:.+]], %[[L:.+]] = ssm.causal_conv %[[ON]],
// CHECK: ssm.observe @"main.causal_conv#0:1" %[[L]]
// CHECK: ssm.observe @"main.causal_conv#0" %[[Y]]
// CHECK: ssm.observe @"main.tensor.extract_slice#0"
func.func @main(%x: tensor<?x?x8xf32>, %ids: tensor<?x?xi32>, %w: tensor<8x4xf32>) -> (tensor<?x?x4xf32>, tensor<?x3x8xf32>, index) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %b = tensor.dim %x, %c0 : tensor<?x?x8xf32>
  %l = tensor.dim %x, %c1 : tensor<?x?x8xf32>
  %c = arith.constant dense<2.0> : tensor<8xf32>
  %0 = ssm.mul %x, %c : tensor<?x?x8xf32>, tensor<8xf32>
  %1 = ssm.silu %0 : tensor<?x?x8xf32>
  %2 = ssm.observe @layer0.u %1 : tensor<?x?x8xf32>
  %3 = ssm.mul %2, %1 : tensor<?x?x8xf32>, tensor<?x?x8xf32>
  %y, %s = ssm.causal_conv %3, %w : tensor<?x?x8xf32>, tensor<8x4xf32> -> tensor<?x?x8xf32>, tensor<?x3x8xf32>
  %half = tensor.extract_slice %y[0, 0, 0] [%b, %l, 4] [1, 1, 1] : tensor<?x?x8xf32> to tensor<?x?x4xf32>
  return %half, %s, %l : tensor<?x?x4xf32>, tensor<?x3x8xf32>, index
}

// What is inside a fused region is a kernel's own; its result is a value.
// CHECK-LABEL: func.func @fused(
// CHECK: ssm.fused
// CHECK-NOT: ssm.observe
// CHECK: ssm.yield
// CHECK: ssm.observe @"fused.fused#0"
func.func @fused(%x: tensor<?x8xf16>) -> tensor<?x8xf16> {
  %y = ssm.fused ins(%x : tensor<?x8xf16>) -> tensor<?x8xf16> {
  ^bb0(%a: tensor<?x8xf16>):
    %0 = ssm.silu %a : tensor<?x8xf16>
    ssm.yield %0 : tensor<?x8xf16>
  }
  return %y : tensor<?x8xf16>
}
