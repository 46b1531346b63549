// ssm-weights-to-arguments: one argument per weight and function, in the order of
// first use; the statistics. Errors are in weights-to-arguments-invalid.mlir.

// RUN: corey-opt %s --ssm-weights-to-arguments | FileCheck %s
// RUN: corey-opt %s --ssm-weights-to-arguments --ssm-weights-to-arguments | FileCheck %s
// RUN: %if llvm-statistics %{ corey-opt %s --ssm-weights-to-arguments --mlir-pass-statistics 2>&1 >/dev/null | FileCheck %s --check-prefix=STATISTICS %}

// STATISTICS: SSMWeightsToArguments
// STATISTICS-NEXT: (S) 5 num-arguments

// Declarations stay for the run time.
// CHECK: ssm.weight @w "file.w" : tensor<8xf32>
// CHECK: ssm.weight @v : tensor<4x8xbf16>
// CHECK: ssm.weight @unused : tensor<2xf32>
ssm.weight @w "file.w" : tensor<8xf32>
ssm.weight @v : tensor<4x8xbf16>
ssm.weight @unused : tensor<2xf32>

// CHECK-LABEL: func.func @main(
// CHECK-SAME: %[[X:.+]]: tensor<?x8xf32> {test.mark}, %[[V:.+]]: tensor<4x8xbf16> {ssm.weight = "v"}, %[[W:.+]]: tensor<8xf32> {ssm.weight = "w"}) -> tensor<?x4xf32> {
// CHECK-NEXT: %[[P:.+]] = ssm.mul %[[X]], %[[W]]
// CHECK-NEXT: %[[Q:.+]] = ssm.add %[[P]], %[[W]]
// CHECK-NEXT: %[[R:.+]] = ssm.projection %[[Q]], %[[V]]
// CHECK-NEXT: return %[[R]]
func.func @main(%x: tensor<?x8xf32> {test.mark}) -> tensor<?x4xf32> {
  %v = ssm.get_weight @v : tensor<4x8xbf16>
  %w = ssm.get_weight @w : tensor<8xf32>
  %0 = ssm.mul %x, %w : tensor<?x8xf32>, tensor<8xf32>
  %again = ssm.get_weight @w : tensor<8xf32>
  %1 = ssm.add %0, %again : tensor<?x8xf32>, tensor<8xf32>
  %2 = ssm.projection %1, %v : tensor<?x8xf32>, tensor<4x8xbf16> -> tensor<?x4xf32>
  return %2 : tensor<?x4xf32>
}

// Every function has arguments of its own.
// CHECK-LABEL: func.func @other(
// CHECK-SAME: %[[W:.+]]: tensor<8xf32> {ssm.weight = "w"}) -> tensor<8xf32> {
// CHECK-NEXT: return %[[W]]
func.func @other() -> tensor<8xf32> {
  %w = ssm.get_weight @w : tensor<8xf32>
  return %w : tensor<8xf32>
}

// CHECK-LABEL: func.func @none(
// CHECK-SAME: %[[X:.+]]: tensor<8xf32>) -> tensor<8xf32> {
func.func @none(%x: tensor<8xf32>) -> tensor<8xf32> {
  return %x : tensor<8xf32>
}

// CHECK: func.func private @external(tensor<8xf32>)
func.func private @external(tensor<8xf32>)

// Into regions, nested ones too, weights go as inputs.
// CHECK-LABEL: func.func @fused(
// CHECK-SAME: %[[X:.+]]: tensor<?x8xf32>, %[[W:.+]]: tensor<8xf32> {ssm.weight = "w"}, %[[V:.+]]: tensor<4x8xbf16> {ssm.weight = "v"})
// CHECK: ssm.fused ins(%[[X]], %[[W]], %[[V]] : tensor<?x8xf32>, tensor<8xf32>, tensor<4x8xbf16>)
// CHECK-NEXT: ^bb0(%[[A:.+]]: tensor<?x8xf32>, %[[W1:.+]]: tensor<8xf32>, %[[V1:.+]]: tensor<4x8xbf16>):
// CHECK-NEXT: ssm.mul %[[A]], %[[W1]]
// CHECK: ssm.fused ins(%{{.+}}, %[[V1]] : tensor<?x8xf32>, tensor<4x8xbf16>)
// CHECK-NEXT: ^bb0(%[[C:.+]]: tensor<?x8xf32>, %[[V2:.+]]: tensor<4x8xbf16>):
// CHECK-NEXT: ssm.projection %[[C]], %[[V2]]
// CHECK-NOT: ssm.get_weight
func.func @fused(%x: tensor<?x8xf32>) -> tensor<?x4xf32> {
  %y = ssm.fused ins(%x : tensor<?x8xf32>) -> tensor<?x4xf32> {
  ^bb0(%a: tensor<?x8xf32>):
    %w = ssm.get_weight @w : tensor<8xf32>
    %0 = ssm.mul %a, %w : tensor<?x8xf32>, tensor<8xf32>
    %1 = ssm.fused ins(%0 : tensor<?x8xf32>) -> tensor<?x4xf32> {
    ^bb0(%c: tensor<?x8xf32>):
      %v = ssm.get_weight @v : tensor<4x8xbf16>
      %2 = ssm.projection %c, %v : tensor<?x8xf32>, tensor<4x8xbf16> -> tensor<?x4xf32>
      ssm.yield %2 : tensor<?x4xf32>
    }
    ssm.yield %1 : tensor<?x4xf32>
  }
  return %y : tensor<?x4xf32>
}
