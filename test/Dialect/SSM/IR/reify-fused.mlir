// Shapes of ssm.fused results in terms of its inputs: the arithmetic of the
// region is repeated outside of it. The pass is one of those that resolve
// tensor.dim by reification.

// RUN: corey-opt %s --linalg-fold-unit-extent-dims --cse --allow-unregistered-dialect | FileCheck %s

// CHECK-LABEL: func.func @sizes(
// CHECK-SAME: %{{.+}}: tensor<8xf32>, %[[X:.+]]: tensor<?x?x8xf32>, %{{.+}}: tensor<4x8xf32>)
// CHECK-DAG: %[[B:.+]] = tensor.dim %[[X]], %c0 : tensor<?x?x8xf32>
// CHECK-DAG: %[[L:.+]] = tensor.dim %[[X]], %c1 : tensor<?x?x8xf32>
// CHECK-DAG: %[[SUM:.+]] = arith.addi %[[B]], %[[B]] : index
// CHECK: return %[[B]], %[[L]], %[[SUM]] : index, index, index
func.func @sizes(%v: tensor<8xf32>, %x: tensor<?x?x8xf32>, %w: tensor<4x8xf32>) -> (index, index, index) {
  %y, %s = ssm.fused ins(%v, %x, %w : tensor<8xf32>, tensor<?x?x8xf32>, tensor<4x8xf32>)
      -> tensor<?x?x4xf32>, tensor<?x8xf32> {
  ^bb0(%b: tensor<8xf32>, %a: tensor<?x?x8xf32>, %c: tensor<4x8xf32>):
    %0 = ssm.mul %a, %b : tensor<?x?x8xf32>, tensor<8xf32>
    %1 = ssm.projection %0, %c : tensor<?x?x8xf32>, tensor<4x8xf32> -> tensor<?x?x4xf32>
    %zero = arith.constant 0 : index
    %n = tensor.dim %0, %zero : tensor<?x?x8xf32>
    %m = arith.addi %n, %n : index
    %e = tensor.empty(%m) : tensor<?x8xf32>
    ssm.yield %1, %e : tensor<?x?x4xf32>, tensor<?x8xf32>
  }
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %d0 = tensor.dim %y, %c0 : tensor<?x?x4xf32>
  %d1 = tensor.dim %y, %c1 : tensor<?x?x4xf32>
  %d2 = tensor.dim %s, %c0 : tensor<?x8xf32>
  return %d0, %d1, %d2 : index, index, index
}

// Through two regions.
// CHECK-LABEL: func.func @nested(
// CHECK-SAME: %{{.+}}: tensor<?x8xf32>, %[[V:.+]]: tensor<?x8xf32>)
// CHECK: %[[D:.+]] = tensor.dim %[[V]], %c0 : tensor<?x8xf32>
// CHECK: return %[[D]]
func.func @nested(%x: tensor<?x8xf32>, %v: tensor<?x8xf32>) -> index {
  %y = ssm.fused ins(%x, %v : tensor<?x8xf32>, tensor<?x8xf32>) -> tensor<?x8xf32> {
  ^bb0(%a: tensor<?x8xf32>, %b: tensor<?x8xf32>):
    %0 = ssm.fused ins(%b : tensor<?x8xf32>) -> tensor<?x8xf32> {
    ^bb0(%c: tensor<?x8xf32>):
      %1 = ssm.exp %c : tensor<?x8xf32>
      ssm.yield %1 : tensor<?x8xf32>
    }
    ssm.yield %0 : tensor<?x8xf32>
  }
  %c0 = arith.constant 0 : index
  %d = tensor.dim %y, %c0 : tensor<?x8xf32>
  return %d : index
}

// A size that only the region knows stays where it is, and the region as it was.
// CHECK-LABEL: func.func @unknown(
// CHECK: %[[Y:.+]] = ssm.fused
// CHECK-NEXT: ^bb0(%[[N:.+]]: index):
// CHECK-NEXT: %[[K:.+]] = ssm.bind_chunk @site(%[[N]], %[[N]])
// CHECK-NEXT: %[[E:.+]] = tensor.empty(%[[K]]) : tensor<?xf32>
// CHECK-NEXT: %[[R:.+]] = ssm.exp %[[E]]
// CHECK-NEXT: ssm.yield %[[R]]
// CHECK: %[[D:.+]] = tensor.dim %[[Y]], %c0
// CHECK: return %[[D]]
func.func @unknown(%n: index) -> index {
  %y = ssm.fused ins(%n : index) -> tensor<?xf32> {
  ^bb0(%a: index):
    %k = ssm.bind_chunk @site(%a, %a)
    %e = tensor.empty(%k) : tensor<?xf32>
    %r = ssm.exp %e : tensor<?xf32>
    ssm.yield %r : tensor<?xf32>
  }
  %c0 = arith.constant 0 : index
  %d = tensor.dim %y, %c0 : tensor<?xf32>
  return %d : index
}

// CHECK-LABEL: func.func @opaque(
// CHECK: tensor.dim %{{.+}}, %c0 : tensor<?xf32>
func.func @opaque() -> index {
  %y = ssm.fused -> tensor<?xf32> {
    %e = "test.source"() : () -> tensor<?xf32>
    ssm.yield %e : tensor<?xf32>
  }
  %c0 = arith.constant 0 : index
  %d = tensor.dim %y, %c0 : tensor<?xf32>
  return %d : index
}
