// ssm-shape-functions: which functions get one, the calling convention, what
// constraints look like, the statistics. The shapes of single ops are in
// IR/reify.mlir; errors are in shape-functions-invalid.mlir.

// RUN: corey-opt %s --ssm-shape-functions --canonicalize --cse | FileCheck %s
// RUN: corey-opt %s --ssm-shape-functions --ssm-shape-functions --canonicalize --cse | FileCheck %s
// RUN: %if llvm-statistics %{ corey-opt %s --ssm-shape-functions --mlir-pass-statistics 2>&1 >/dev/null | FileCheck %s --check-prefix=STATISTICS %}

// STATISTICS: SSMShapeFunctions
// STATISTICS-NEXT: (S) 5 num-constraints

// Sizes of the arguments stand one after another, those of the results too.
// Weight arguments count, scalars have no sizes.
// CHECK: func.func @flat.shapes(%[[IN:.+]]: memref<?xindex>, %[[OUT:.+]]: memref<?xindex>)
// CHECK-SAME: attributes {ssm.constraints = []} {
// CHECK-DAG: %[[I1:.+]] = memref.load %[[IN]][%c1]
// CHECK-DAG: %[[I3:.+]] = memref.load %[[IN]][%c3]
// CHECK: memref.store %[[I3]], %[[OUT]][%c0]
// CHECK-NEXT: memref.store %c8, %[[OUT]][%c1]
// CHECK-NEXT: memref.store %[[I1]], %[[OUT]][%c2]
// CHECK-NEXT: return
// CHECK: func.func @flat(
func.func @flat(%w: tensor<8xf32> {ssm.weight = "w"}, %v: tensor<?xf32>, %s: f32, %t: tensor<f32>, %x: tensor<4x?x8xf32>, %m: tensor<?x8xf32>)
    -> (tensor<?x8xf32>, tensor<?xf32>, tensor<f32>) {
  %c1 = arith.constant 1 : index
  %n = tensor.dim %x, %c1 : tensor<4x?x8xf32>
  %e = tensor.empty(%n) : tensor<?x8xf32>
  %0 = ssm.mul %e, %w : tensor<?x8xf32>, tensor<8xf32>
  return %0, %v, %t : tensor<?x8xf32>, tensor<?xf32>, tensor<f32>
}

// A constraint that two ops share is listed once; one between a value and itself
// is not. A size of -1, -1 is computed, here 2 n.
// CHECK: func.func @pairs.shapes(%[[IN:.+]]: memref<?xindex>, %[[OUT:.+]]: memref<?xindex>)
// CHECK-SAME: attributes {ssm.constraints = [{{\[}}1, 0, 0, 0, ""], [-1, -1, 0, 0, ""]]} {
// CHECK-DAG: %[[I0:.+]] = memref.load %[[IN]][%c0]
// CHECK-DAG: %[[I2:.+]] = memref.load %[[IN]][%c2]
// CHECK-DAG: %[[I4:.+]] = memref.load %[[IN]][%c4]
// CHECK-DAG: %[[TWICE:.+]] = arith.addi %[[I4]], %[[I4]]
// CHECK: memref.store %[[I0]], %[[OUT]][%c0]
// CHECK-NEXT: memref.store %c8, %[[OUT]][%c1]
// CHECK-NEXT: memref.store %[[I2]], %[[OUT]][%c2]
// CHECK-NEXT: memref.store %[[I0]], %[[OUT]][%c3]
// CHECK-NEXT: memref.store %[[TWICE]], %[[OUT]][%c4]
// CHECK-NEXT: memref.store %[[I0]], %[[OUT]][%c5]
// CHECK-NEXT: return
func.func @pairs(%x: tensor<?x8xf32>, %y: tensor<?x8xf32>, %z: tensor<?xf32>) -> tensor<?x8xf32> {
  %c0 = arith.constant 0 : index
  %n = tensor.dim %z, %c0 : tensor<?xf32>
  %m = arith.addi %n, %n : index
  %e = tensor.empty(%m) : tensor<?x8xf32>
  %0 = ssm.add %x, %y : tensor<?x8xf32>, tensor<?x8xf32>
  %1 = ssm.sub %0, %y : tensor<?x8xf32>, tensor<?x8xf32>
  %2 = ssm.mul %1, %0 : tensor<?x8xf32>, tensor<?x8xf32>
  %3 = ssm.add %2, %e : tensor<?x8xf32>, tensor<?x8xf32>
  return %3 : tensor<?x8xf32>
}

// Symbols name the constraint, and bound chunks, observations and effects leave
// no trace. Of ops nobody uses the constraints still hold.
// CHECK: func.func @scan.shapes(
// CHECK-SAME: attributes {ssm.constraints = [{{\[}}2, 0, 0, 0, "B"], [2, 1, 0, 1, "L"], [3, 0, 0, 0, "B"]]} {
// CHECK-NOT: ssm.
// CHECK: func.func @scan(
func.func @scan(%u: tensor<?x?x8xf32>, %a: tensor<8x4xf32>, %b: tensor<?x?x1x4xf32>, %s: tensor<?x3x8xf32>, %w: tensor<8x4xf32>)
    -> tensor<?x?x8xf32> {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %batch = tensor.dim %u, %c0 : tensor<?x?x8xf32>
  %length = tensor.dim %u, %c1 : tensor<?x?x8xf32>
  %k = ssm.bind_chunk @scan(%batch, %length)
  %o = ssm.observe @u %u : tensor<?x?x8xf32>
  %y = ssm.selective_scan %o, %o, %a, %b, %b chunk_size(%k)
      : tensor<?x?x8xf32>, tensor<?x?x8xf32>, tensor<8x4xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x8xf32>
  %unused = ssm.causal_conv %y, %w initial_state(%s : tensor<?x3x8xf32>)
      : tensor<?x?x8xf32>, tensor<8x4xf32> -> tensor<?x?x8xf32>
  return %y : tensor<?x?x8xf32>
}

// CHECK: func.func @nothing.shapes(%{{.+}}: memref<?xindex>, %{{.+}}: memref<?xindex>) attributes {ssm.constraints = []} {
// CHECK-NEXT: return
// CHECK-NEXT: }
func.func @nothing() {
  return
}

// Private functions are nobody's entry.
// CHECK-NOT: @private.shapes
// CHECK-NOT: @external.shapes
func.func private @private(%x: tensor<?xf32>) -> tensor<?xf32> {
  return %x : tensor<?xf32>
}
func.func private @external(tensor<?xf32>) -> tensor<?xf32>

// A slice with constant offsets must lie in its source.
// CHECK-LABEL: func.func @slice.shapes(
// CHECK-SAME: ssm.constraints = {{\[\[}}0, 0, -1, -1, ">="]]
// CHECK: %[[SIZE:.+]] = memref.load %{{.+}}[%{{.+}}] : memref<?xindex>
// CHECK: arith.maxsi %[[SIZE]], %{{.+}} : index
func.func @slice(%x: tensor<?x8xf32>) -> tensor<2x8xf32> {
  %0 = tensor.extract_slice %x[5, 0] [2, 8] [1, 1] : tensor<?x8xf32> to tensor<2x8xf32>
  return %0 : tensor<2x8xf32>
}
