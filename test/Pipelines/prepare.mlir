// Work on weights in the CPU pipeline: on unless turned off; observations of
// every value, which keep it where it is.

// RUN: corey-opt %s --corey-cpu-pipeline --mlir-print-ir-after=ssm-shape-functions 2>&1 >/dev/null | FileCheck %s
// RUN: corey-opt %s --corey-cpu-pipeline="hoist-weights=false" --mlir-print-ir-after=ssm-shape-functions 2>&1 >/dev/null | FileCheck %s --check-prefix=OFF
// RUN: corey-opt %s --corey-cpu-pipeline="observe-values" --mlir-print-ir-after=ssm-shape-functions 2>&1 >/dev/null | FileCheck %s --check-prefix=OBSERVE

// The prepared weight is an argument like any other, and its function has shapes
// like any other.
// CHECK: func.func @ssm.prepare.shapes(
// CHECK: func.func @ssm.prepare(%{{.+}}: tensor<8xf32> {ssm.weight = "w"}) -> (tensor<8xf32> {ssm.prepares = "prepared0"})
// CHECK: ssm.exp
// CHECK: func.func @main(%{{.+}}: tensor<?x8xf32>, %{{.+}}: tensor<8xf32> {ssm.weight = "prepared0"})
// CHECK-NOT: ssm.exp

// OFF-NOT: ssm.prepare
// OFF: func.func @main(%{{.+}}: tensor<?x8xf32>, %{{.+}}: tensor<8xf32> {ssm.weight = "w"})
// OFF: ssm.exp

// OBSERVE-NOT: ssm.prepare
// OBSERVE: ssm.observe @"main.exp#0"
ssm.weight @w : tensor<8xf32>
func.func @main(%x: tensor<?x8xf32>) -> tensor<?x8xf32> {
  %w = ssm.get_weight @w : tensor<8xf32>
  %e = ssm.exp %w : tensor<8xf32>
  %y = ssm.mul %x, %e : tensor<?x8xf32>, tensor<8xf32>
  return %y : tensor<?x8xf32>
}
