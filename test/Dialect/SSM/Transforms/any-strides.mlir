// ssm-any-strides: arguments that are nothing but dt or decay of ssm.ssd.

// RUN: corey-opt %s --ssm-any-strides | FileCheck %s
// RUN: corey-opt %s --ssm-any-strides --ssm-any-strides | FileCheck %s
// RUN: %if llvm-statistics %{ corey-opt %s --ssm-any-strides --mlir-pass-statistics 2>&1 >/dev/null | FileCheck %s --check-prefix=STATISTICS %}
// STATISTICS: (S) 3 num-marked

// Sizes are no elements. What else there is of a scan is loaded in vectors.
// CHECK-LABEL: func.func @decay(
// CHECK-SAME: %{{[a-z0-9]+}}: tensor<?x?x2x8xf32>, %{{[a-z0-9]+}}: tensor<?x?x2xf32> {ssm.any_strides}, %{{[a-z0-9]+}}: tensor<?x?x1x4xf32>)
func.func @decay(%x: tensor<?x?x2x8xf32>, %decay: tensor<?x?x2xf32>, %B: tensor<?x?x1x4xf32>) -> (tensor<?x?x2x8xf32>, tensor<?xf32>) {
  %c0 = arith.constant 0 : index
  %n = tensor.dim %decay, %c0 : tensor<?x?x2xf32>
  %e = tensor.empty(%n) : tensor<?xf32>
  %y = ssm.ssd %x decay(%decay : tensor<?x?x2xf32>) B(%B) C(%B) : tensor<?x?x2x8xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x2x8xf32>
  return %y, %e : tensor<?x?x2x8xf32>, tensor<?xf32>
}

// Of two scans, one in the region of a kernel.
// CHECK-LABEL: func.func @both(
// CHECK-SAME: tensor<?x?x2xf32> {ssm.any_strides}, %{{[a-z0-9]+}}: tensor<2xf32>, %
func.func @both(%x: tensor<?x?x2x8xf32>, %dt: tensor<?x?x2xf32>, %A: tensor<2xf32>, %B: tensor<?x?x1x4xf32>) -> tensor<?x?x2x8xf32> {
  %y = ssm.ssd %x dt(%dt : tensor<?x?x2xf32>) A(%A : tensor<2xf32>) B(%B) C(%B) : tensor<?x?x2x8xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x2x8xf32>
  %z = ssm.fused ins(%y, %dt, %B : tensor<?x?x2x8xf32>, tensor<?x?x2xf32>, tensor<?x?x1x4xf32>) -> tensor<?x?x2x8xf32> {
  ^bb0(%a: tensor<?x?x2x8xf32>, %d: tensor<?x?x2xf32>, %b: tensor<?x?x1x4xf32>):
    %0 = ssm.ssd %a decay(%d : tensor<?x?x2xf32>) B(%b) C(%b) : tensor<?x?x2x8xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x2x8xf32>
    %1 = ssm.silu %0 : tensor<?x?x2x8xf32>
    ssm.yield %1 : tensor<?x?x2x8xf32>
  }
  return %z : tensor<?x?x2x8xf32>
}

// A pointwise op in between is part of a kernel that reads rows.
// CHECK-LABEL: func.func @computed(
// CHECK-NOT: ssm.any_strides
func.func @computed(%x: tensor<?x?x2x8xf32>, %a: tensor<?x?x2xf32>, %B: tensor<?x?x1x4xf32>) -> tensor<?x?x2x8xf32> {
  %decay = ssm.neg %a : tensor<?x?x2xf32>
  %y = ssm.ssd %x decay(%decay : tensor<?x?x2xf32>) B(%B) C(%B) : tensor<?x?x2x8xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x2x8xf32>
  return %y : tensor<?x?x2x8xf32>
}

// One use of another kind is enough, inside a region too.
// CHECK-LABEL: func.func @returned(
// CHECK-NOT: ssm.any_strides
func.func @returned(%x: tensor<?x?x2x8xf32>, %decay: tensor<?x?x2xf32>, %B: tensor<?x?x1x4xf32>) -> (tensor<?x?x2x8xf32>, tensor<?x?x2xf32>) {
  %y = ssm.ssd %x decay(%decay : tensor<?x?x2xf32>) B(%B) C(%B) : tensor<?x?x2x8xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x2x8xf32>
  return %y, %decay : tensor<?x?x2x8xf32>, tensor<?x?x2xf32>
}

// CHECK-LABEL: func.func @inside(
// CHECK-NOT: ssm.any_strides
func.func @inside(%x: tensor<?x?x2x8xf32>, %decay: tensor<?x?x2xf32>, %B: tensor<?x?x1x4xf32>) -> (tensor<?x?x2x8xf32>, tensor<?x?x2xf32>) {
  %y = ssm.ssd %x decay(%decay : tensor<?x?x2xf32>) B(%B) C(%B) : tensor<?x?x2x8xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x2x8xf32>
  %z = ssm.fused ins(%decay : tensor<?x?x2xf32>) -> tensor<?x?x2xf32> {
  ^bb0(%d: tensor<?x?x2xf32>):
    %0 = ssm.exp %d : tensor<?x?x2xf32>
    %1 = ssm.silu %0 : tensor<?x?x2xf32>
    ssm.yield %1 : tensor<?x?x2xf32>
  }
  return %y, %z : tensor<?x?x2x8xf32>, tensor<?x?x2xf32>
}

// Nothing is read of an argument without uses.
// CHECK-LABEL: func.func @unused(
// CHECK-NOT: ssm.any_strides
func.func @unused(%x: tensor<?x?x2xf32>) {
  return
}

// Private functions are called from within, and so may public ones be.
// CHECK-LABEL: func.func private @inner(
// CHECK-NOT: ssm.any_strides
func.func private @inner(%x: tensor<?x?x2x8xf32>, %decay: tensor<?x?x2xf32>, %B: tensor<?x?x1x4xf32>) -> tensor<?x?x2x8xf32> {
  %y = ssm.ssd %x decay(%decay : tensor<?x?x2xf32>) B(%B) C(%B) : tensor<?x?x2x8xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x2x8xf32>
  return %y : tensor<?x?x2x8xf32>
}

// CHECK-LABEL: func.func @called(
// CHECK-NOT: ssm.any_strides
func.func @called(%x: tensor<?x?x2x8xf32>, %decay: tensor<?x?x2xf32>, %B: tensor<?x?x1x4xf32>) -> tensor<?x?x2x8xf32> {
  %y = ssm.ssd %x decay(%decay : tensor<?x?x2xf32>) B(%B) C(%B) : tensor<?x?x2x8xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x2x8xf32>
  return %y : tensor<?x?x2x8xf32>
}

// CHECK-LABEL: func.func @caller(
// CHECK-NOT: ssm.any_strides
// CHECK: return
func.func @caller(%x: tensor<?x?x2x8xf32>, %decay: tensor<?x?x2xf32>, %B: tensor<?x?x1x4xf32>) -> tensor<?x?x2x8xf32> {
  %y = func.call @called(%x, %decay, %B) : (tensor<?x?x2x8xf32>, tensor<?x?x2xf32>, tensor<?x?x1x4xf32>) -> tensor<?x?x2x8xf32>
  return %y : tensor<?x?x2x8xf32>
}

// A weight is bound as any other tensor, and may be marked like one.
// CHECK-LABEL: func.func @weight(
// CHECK-SAME: tensor<1x4x2xf32> {ssm.any_strides, ssm.weight = "steps"}
func.func @weight(%x: tensor<1x4x2x8xf32>, %B: tensor<1x4x1x4xf32>, %decay: tensor<1x4x2xf32> {ssm.weight = "steps"}) -> tensor<1x4x2x8xf32> {
  %y = ssm.ssd %x decay(%decay : tensor<1x4x2xf32>) B(%B) C(%B) : tensor<1x4x2x8xf32>, tensor<1x4x1x4xf32>, tensor<1x4x1x4xf32> -> tensor<1x4x2x8xf32>
  return %y : tensor<1x4x2x8xf32>
}
