// ssm-fold-hadamard: pairs that meet cancel, over linear ops and no others.

// RUN: corey-opt %s --split-input-file --ssm-fold-hadamard | FileCheck %s
// RUN: corey-opt %s --split-input-file --ssm-fold-hadamard --verify-roundtrip > /dev/null
// RUN: %if llvm-statistics %{ corey-opt %s --ssm-fold-hadamard --mlir-pass-statistics 2>&1 >/dev/null | FileCheck %s --check-prefix=STATISTICS %}
// STATISTICS: SSMFoldHadamard
// STATISTICS-NEXT: (S) 3 num-cancelled
// STATISTICS-NEXT: (S) 4 num-folded
// STATISTICS-NEXT: (S) 4 num-merged

ssm.weight @w : tensor<16x8xf32>
ssm.weight @v : tensor<8x16xbf16>
ssm.weight @b : tensor<8xf32>

// CHECK-LABEL: func.func @meet(
// CHECK-SAME: %[[X:.+]]: tensor<?x16xf32>
// CHECK-NEXT: ssm.silu %[[X]]
func.func @meet(%x: tensor<?x16xf32>) -> tensor<?x16xf32> {
  %0 = ssm.hadamard %x {block = 16 : i64} : tensor<?x16xf32> -> tensor<?x16xf32>
  %1 = ssm.hadamard %0 {block = 16 : i64} : tensor<?x16xf32> -> tensor<?x16xf32>
  %2 = ssm.silu %1 : tensor<?x16xf32>
  return %2 : tensor<?x16xf32>
}

// Different blocks do not cancel.
// CHECK-LABEL: func.func @differ(
// CHECK-COUNT-2: ssm.hadamard
func.func @differ(%x: tensor<?x16xf32>) -> tensor<?x16xf32> {
  %0 = ssm.hadamard %x {block = 16 : i64} : tensor<?x16xf32> -> tensor<?x16xf32>
  %1 = ssm.hadamard %0 {block = 8 : i64} : tensor<?x16xf32> -> tensor<?x16xf32>
  return %1 : tensor<?x16xf32>
}

// The rotation of what is between two projections goes into the rows of the
// first.
// CHECK-LABEL: func.func @chain(
// CHECK-SAME: %[[X:.+]]: tensor<?x8xf32>
// CHECK-DAG: %[[W:.+]] = ssm.get_weight @w
// CHECK-DAG: %[[V:.+]] = ssm.get_weight @v
// CHECK: %[[T:.+]] = linalg.transpose ins(%[[W]] : tensor<16x8xf32>) outs(%{{.+}} : tensor<8x16xf32>) permutation = [1, 0]
// CHECK: %[[H:.+]] = ssm.hadamard %[[T]] {block = 16 : i64} : tensor<8x16xf32> -> tensor<8x16xf32>
// CHECK: %[[R:.+]] = linalg.transpose ins(%[[H]] : tensor<8x16xf32>) outs(%{{.+}} : tensor<16x8xf32>) permutation = [1, 0]
// CHECK: %[[Y:.+]] = ssm.projection %[[X]], %[[R]]
// CHECK: ssm.projection %[[Y]],
func.func @chain(%x: tensor<?x8xf32>) -> tensor<?x8xf32> {
  %w = ssm.get_weight @w : tensor<16x8xf32>
  %v = ssm.get_weight @v : tensor<8x16xbf16>
  %0 = ssm.projection %x, %w : tensor<?x8xf32>, tensor<16x8xf32> -> tensor<?x16xf32>
  %1 = ssm.hadamard %0 {block = 16 : i64} : tensor<?x16xf32> -> tensor<?x16xf32>
  %f = ssm.cast %v : tensor<8x16xbf16> to tensor<8x16xf32>
  %2 = ssm.hadamard %f {block = 16 : i64} : tensor<8x16xf32> -> tensor<8x16xf32>
  %3 = ssm.projection %1, %2 : tensor<?x16xf32>, tensor<8x16xf32> -> tensor<?x8xf32>
  return %3 : tensor<?x8xf32>
}

// With bias and a residual that is rotated: two transforms less.
// CHECK-LABEL: func.func @residual(
// CHECK-SAME: %[[X:.+]]: tensor<?x16xf32>, %[[R:.+]]: tensor<?x8xf32>
// CHECK-DAG: %[[HB:.+]] = ssm.hadamard %{{.+}} {block = 8 : i64} : tensor<8xf32> -> tensor<8xf32>
// CHECK-DAG: ssm.cast %{{.+}} : tensor<8x16xbf16> to tensor<8x16xf32>
// CHECK: %[[Y:.+]] = ssm.projection %[[X]], %{{.+}} bias(%[[HB]] : tensor<8xf32>) residual(%[[R]] : tensor<?x8xf32>)
// CHECK-NEXT: return %[[Y]]
func.func @residual(%x: tensor<?x16xf32>, %r: tensor<?x8xf32>) -> tensor<?x8xf32> {
  %v = ssm.get_weight @v : tensor<8x16xbf16>
  %b = ssm.get_weight @b : tensor<8xf32>
  %0 = ssm.hadamard %r {block = 8 : i64} : tensor<?x8xf32> -> tensor<?x8xf32>
  %1 = ssm.projection %x, %v bias(%b : tensor<8xf32>) residual(%0 : tensor<?x8xf32>)
      : tensor<?x16xf32>, tensor<8x16xbf16> -> tensor<?x8xf32>
  %2 = ssm.hadamard %1 {block = 8 : i64} : tensor<?x8xf32> -> tensor<?x8xf32>
  return %2 : tensor<?x8xf32>
}

// A residual that is not, another use, a weight that is computed per call and a
// quantized one keep the transform where it is.
// CHECK-LABEL: func.func @stays(
// CHECK-COUNT-4: ssm.hadamard {{.*}} : tensor<?x8xf32> -> tensor<?x8xf32>
func.func @stays(%x: tensor<?x16xf32>, %r: tensor<?x8xf32>, %a: tensor<8x16xf32>, %q: tensor<8x16xi8>, %s: tensor<f32>)
    -> (tensor<?x8xf32>, tensor<?x8xf32>, tensor<?x8xf32>, tensor<?x8xf32>, tensor<?x8xf32>) {
  %v = ssm.get_weight @v : tensor<8x16xbf16>
  %0 = ssm.projection %x, %v residual(%r : tensor<?x8xf32>) : tensor<?x16xf32>, tensor<8x16xbf16> -> tensor<?x8xf32>
  %1 = ssm.hadamard %0 {block = 8 : i64} : tensor<?x8xf32> -> tensor<?x8xf32>
  %2 = ssm.projection %x, %v : tensor<?x16xf32>, tensor<8x16xbf16> -> tensor<?x8xf32>
  %3 = ssm.hadamard %2 {block = 8 : i64} : tensor<?x8xf32> -> tensor<?x8xf32>
  %4 = ssm.projection %x, %a : tensor<?x16xf32>, tensor<8x16xf32> -> tensor<?x8xf32>
  %5 = ssm.hadamard %4 {block = 8 : i64} : tensor<?x8xf32> -> tensor<?x8xf32>
  %6 = ssm.projection %x, %q weight_scale(%s : tensor<f32>) : tensor<?x16xf32>, tensor<8x16xi8> -> tensor<?x8xf32>
  %7 = ssm.hadamard %6 {block = 8 : i64} : tensor<?x8xf32> -> tensor<?x8xf32>
  return %1, %2, %3, %5, %7 : tensor<?x8xf32>, tensor<?x8xf32>, tensor<?x8xf32>, tensor<?x8xf32>, tensor<?x8xf32>
}

// H a + H b = H (a + b), and on over what is linear until it cancels.
// CHECK-LABEL: func.func @sum(
// CHECK-SAME: %[[X:.+]]: tensor<?x8xf32>, %[[Z:.+]]: tensor<?x8xf32>
// CHECK-NEXT: %[[S:.+]] = ssm.add %[[X]], %[[Z]]
// CHECK-NEXT: %[[N:.+]] = ssm.scale %[[S]] by 5.0
// CHECK-NEXT: return %[[N]]
func.func @sum(%x: tensor<?x8xf32>, %z: tensor<?x8xf32>) -> tensor<?x8xf32> {
  %0 = ssm.hadamard %x {block = 8 : i64} : tensor<?x8xf32> -> tensor<?x8xf32>
  %1 = ssm.hadamard %z {block = 8 : i64} : tensor<?x8xf32> -> tensor<?x8xf32>
  %2 = ssm.add %0, %1 : tensor<?x8xf32>, tensor<?x8xf32>
  %3 = ssm.scale %2 by 0.5 : tensor<?x8xf32>
  %4 = ssm.hadamard %3 {block = 8 : i64} : tensor<?x8xf32> -> tensor<?x8xf32>
  return %4 : tensor<?x8xf32>
}

// Over projections and sums: nothing is left of three transforms of activations.
// CHECK-LABEL: func.func @both(
// CHECK-NOT: ssm.hadamard {{.*}} : tensor<?x16xf32>
// CHECK: ssm.add
// CHECK-NOT: ssm.hadamard
// CHECK: return
func.func @both(%x: tensor<?x8xf32>, %z: tensor<?x8xf32>) -> tensor<?x16xf32> {
  %w = ssm.get_weight @w : tensor<16x8xf32>
  %0 = ssm.projection %x, %w : tensor<?x8xf32>, tensor<16x8xf32> -> tensor<?x16xf32>
  %1 = ssm.hadamard %0 {block = 4 : i64} : tensor<?x16xf32> -> tensor<?x16xf32>
  %2 = ssm.projection %z, %w : tensor<?x8xf32>, tensor<16x8xf32> -> tensor<?x16xf32>
  %3 = ssm.hadamard %2 {block = 4 : i64} : tensor<?x16xf32> -> tensor<?x16xf32>
  %4 = ssm.add %1, %3 : tensor<?x16xf32>, tensor<?x16xf32>
  return %4 : tensor<?x16xf32>
}

// One side only, a product, and what is not linear.
// CHECK-LABEL: func.func @barriers(
// CHECK: ssm.hadamard
// CHECK-NEXT: ssm.add
// CHECK-NEXT: ssm.hadamard
// CHECK-NEXT: ssm.silu
// CHECK-NEXT: ssm.hadamard
// CHECK-NEXT: ssm.rms_norm
// CHECK-NEXT: ssm.hadamard
// CHECK-NEXT: ssm.hadamard
// CHECK-NEXT: ssm.mul
// CHECK-NEXT: ssm.hadamard
func.func @barriers(%x: tensor<?x8xf32>, %g: tensor<8xf32>) -> tensor<?x8xf32> {
  %0 = ssm.hadamard %x {block = 8 : i64} : tensor<?x8xf32> -> tensor<?x8xf32>
  %1 = ssm.add %0, %x : tensor<?x8xf32>, tensor<?x8xf32>
  %2 = ssm.hadamard %1 {block = 8 : i64} : tensor<?x8xf32> -> tensor<?x8xf32>
  %3 = ssm.silu %2 : tensor<?x8xf32>
  %4 = ssm.hadamard %3 {block = 8 : i64} : tensor<?x8xf32> -> tensor<?x8xf32>
  %5 = ssm.rms_norm %4, %g : tensor<?x8xf32>, tensor<8xf32> -> tensor<?x8xf32>
  %6 = ssm.hadamard %5 {block = 8 : i64} : tensor<?x8xf32> -> tensor<?x8xf32>
  %7 = ssm.hadamard %x {block = 8 : i64} : tensor<?x8xf32> -> tensor<?x8xf32>
  %8 = ssm.mul %6, %7 : tensor<?x8xf32>, tensor<?x8xf32>
  %9 = ssm.hadamard %8 {block = 8 : i64} : tensor<?x8xf32> -> tensor<?x8xf32>
  return %9 : tensor<?x8xf32>
}

// -----

// After ssm-hoist-weights what is added is hoisted at once; what it
// replaces goes, and its name is free.
// CHECK: ssm.weight @prepared0 {ssm.prepared} : tensor<8x4xf32>
// CHECK-NOT: ssm.weight
// CHECK-LABEL: func.func @ssm.prepare(
// CHECK: ssm.exp
// CHECK: linalg.transpose
// CHECK: ssm.hadamard
// CHECK: linalg.transpose
// CHECK-LABEL: func.func @hoisted(
// CHECK-NEXT: ssm.get_weight @prepared0
// CHECK-NEXT: ssm.projection
// CHECK-NEXT: return
ssm.weight @w : tensor<8x4xf32>
ssm.weight @prepared0 {ssm.prepared} : tensor<8x4xf32>
func.func @ssm.prepare() -> (tensor<8x4xf32> {ssm.prepares = "prepared0"}) {
  %0 = ssm.get_weight @w : tensor<8x4xf32>
  %1 = ssm.exp %0 : tensor<8x4xf32>
  return %1 : tensor<8x4xf32>
}
func.func @hoisted(%x: tensor<?x4xf32>) -> tensor<?x8xf32> {
  %w = ssm.get_weight @prepared0 : tensor<8x4xf32>
  %0 = ssm.projection %x, %w : tensor<?x4xf32>, tensor<8x4xf32> -> tensor<?x8xf32>
  %1 = ssm.hadamard %0 {block = 8 : i64} : tensor<?x8xf32> -> tensor<?x8xf32>
  return %1 : tensor<?x8xf32>
}
