// Result shapes of every op with dynamic dimensions, as reified from its
// dimension line and read off the functions that ssm-shape-functions makes of
// them, and the sizes that remain to be compared at run time. Constants are named
// after their values, and `%c5` is both the fifth slot and the number 5.

// RUN: corey-opt %s --ssm-shape-functions --canonicalize --cse | FileCheck %s

//===----------------------------------------------------------------------===//
// Scans
//===----------------------------------------------------------------------===//

// Two operands with B and L: the later one is held against the first.
// CHECK-LABEL: func.func @scan.shapes(
// CHECK-SAME: %[[IN:.+]]: memref<?xindex>, %[[OUT:.+]]: memref<?xindex>)
// CHECK-SAME: attributes {ssm.constraints = [{{\[}}2, 0, 0, 0, "B"], [2, 1, 0, 1, "L"]]} {
// CHECK-DAG: %[[I0:.+]] = memref.load %[[IN]][%c0]
// CHECK-DAG: %[[I1:.+]] = memref.load %[[IN]][%c1]
// CHECK-DAG: %[[I5:.+]] = memref.load %[[IN]][%c5]
// CHECK-DAG: %[[I6:.+]] = memref.load %[[IN]][%c6]
// CHECK: memref.store %[[I0]], %[[OUT]][%c0]
// CHECK-NEXT: memref.store %[[I1]], %[[OUT]][%c1]
// CHECK-NEXT: memref.store %c8, %[[OUT]][%c2]
// CHECK-NEXT: memref.store %[[I0]], %[[OUT]][%c3]
// CHECK-NEXT: memref.store %c8, %[[OUT]][%c4]
// CHECK-NEXT: memref.store %c4, %[[OUT]][%c5]
// CHECK-NEXT: memref.store %[[I5]], %[[OUT]][%c6]
// CHECK-NEXT: memref.store %[[I0]], %[[OUT]][%c7]
// CHECK-NEXT: memref.store %[[I6]], %[[OUT]][%c8]
// CHECK-NEXT: memref.store %[[I1]], %[[OUT]][%c9]
// CHECK-NEXT: return
func.func @scan(%u: tensor<?x?x8xf32>, %a: tensor<8x4xf32>, %b: tensor<?x?x1x4xf32>)
    -> (tensor<?x?x8xf32>, tensor<?x8x4xf32>) {
  %y, %h = ssm.selective_scan %u, %u, %a, %b, %b : tensor<?x?x8xf32>, tensor<?x?x8xf32>, tensor<8x4xf32>,
      tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x8xf32>, tensor<?x8x4xf32>
  return %y, %h : tensor<?x?x8xf32>, tensor<?x8x4xf32>
}

// Packed: one state per sequence.
// CHECK-LABEL: func.func @scan_packed.shapes(
// CHECK-SAME: %[[IN:.+]]: memref<?xindex>, %[[OUT:.+]]: memref<?xindex>)
// CHECK-SAME: attributes {ssm.constraints = [{{\[}}2, 1, 0, 1, "L"], [4, 0, 3, 0, "S"]]} {
// CHECK-DAG: %[[I1:.+]] = memref.load %[[IN]][%c1]
// CHECK-DAG: %[[I6:.+]] = memref.load %[[IN]][%c6]
// CHECK-DAG: %[[I9:.+]] = memref.load %[[IN]][%c9]
// CHECK-DAG: %[[I12:.+]] = memref.load %[[IN]][%c12]
// CHECK: memref.store %c1, %[[OUT]][%c0]
// CHECK-NEXT: memref.store %[[I1]], %[[OUT]][%c1]
// CHECK-NEXT: memref.store %c8, %[[OUT]][%c2]
// CHECK-NEXT: memref.store %[[I9]], %[[OUT]][%c3]
// CHECK-NEXT: memref.store %c8, %[[OUT]][%c4]
// CHECK-NEXT: memref.store %c4, %[[OUT]][%c5]
// CHECK-NEXT: memref.store %[[I6]], %[[OUT]][%c6]
// CHECK-NEXT: memref.store %[[I1]], %[[OUT]][%c7]
// CHECK-NEXT: memref.store %[[I12]], %[[OUT]][%c8]
// CHECK-NEXT: memref.store %[[I9]], %[[OUT]][%c9]
// CHECK-NEXT: return
func.func @scan_packed(%u: tensor<1x?x8xf32>, %a: tensor<8x4xf32>, %b: tensor<1x?x1x4xf32>, %h0: tensor<?x8x4xf32>,
    %starts: tensor<?xi32>) -> (tensor<1x?x8xf32>, tensor<?x8x4xf32>) {
  %y, %h = ssm.selective_scan %u, %u, %a, %b, %b initial_state(%h0 : tensor<?x8x4xf32>)
      seq_starts(%starts : tensor<?xi32>) : tensor<1x?x8xf32>, tensor<1x?x8xf32>, tensor<8x4xf32>,
      tensor<1x?x1x4xf32>, tensor<1x?x1x4xf32> -> tensor<1x?x8xf32>, tensor<?x8x4xf32>
  return %y, %h : tensor<1x?x8xf32>, tensor<?x8x4xf32>
}

// A packed batch must be 1, whatever its type says.
// CHECK-LABEL: func.func @scan_packed_open.shapes(
// CHECK-SAME: %[[IN:.+]]: memref<?xindex>, %[[OUT:.+]]: memref<?xindex>)
// CHECK-SAME: attributes {ssm.constraints = [{{\[}}0, 0, -1, -1, ""], [2, 1, 0, 1, "L"]]} {
// CHECK-DAG: %[[I0:.+]] = memref.load %[[IN]][%c0]
// CHECK-DAG: %[[I1:.+]] = memref.load %[[IN]][%c1]
// CHECK-DAG: %[[I6:.+]] = memref.load %[[IN]][%c6]
// CHECK-DAG: %[[I9:.+]] = memref.load %[[IN]][%c9]
// CHECK: memref.store %c1, %[[OUT]][%c0]
// CHECK-NEXT: memref.store %[[I1]], %[[OUT]][%c1]
// CHECK-NEXT: memref.store %c8, %[[OUT]][%c2]
// CHECK-NEXT: memref.store %[[I9]], %[[OUT]][%c3]
// CHECK-NEXT: memref.store %c8, %[[OUT]][%c4]
// CHECK-NEXT: memref.store %c4, %[[OUT]][%c5]
// CHECK-NEXT: memref.store %[[I0]], %[[OUT]][%c6]
// CHECK-NEXT: memref.store %c1, %[[OUT]][%c7]
// CHECK-NEXT: memref.store %[[I6]], %[[OUT]][%c8]
// CHECK-NEXT: memref.store %[[I1]], %[[OUT]][%c9]
// CHECK-NEXT: return
func.func @scan_packed_open(%u: tensor<?x?x8xf32>, %a: tensor<8x4xf32>, %b: tensor<1x?x1x4xf32>, %starts: tensor<?xi32>)
    -> (tensor<?x?x8xf32>, tensor<?x8x4xf32>) {
  %y, %h = ssm.selective_scan %u, %u, %a, %b, %b seq_starts(%starts : tensor<?xi32>)
      : tensor<?x?x8xf32>, tensor<?x?x8xf32>, tensor<8x4xf32>, tensor<1x?x1x4xf32>, tensor<1x?x1x4xf32>
      -> tensor<?x?x8xf32>, tensor<?x8x4xf32>
  return %y, %h : tensor<?x?x8xf32>, tensor<?x8x4xf32>
}

// CHECK-LABEL: func.func @ssd.shapes(
// CHECK-SAME: %[[IN:.+]]: memref<?xindex>, %[[OUT:.+]]: memref<?xindex>)
// CHECK-SAME: attributes {ssm.constraints = [{{\[}}1, 0, 0, 0, "B"], [1, 1, 0, 1, "L"], [-1, -1, 0, 0, "B"], [3, 1, 0, 1, "L"]]} {
// CHECK-DAG: %[[I0:.+]] = memref.load %[[IN]][%c0]
// CHECK-DAG: %[[I1:.+]] = memref.load %[[IN]][%c1]
// CHECK-DAG: %[[I4:.+]] = memref.load %[[IN]][%c4]
// CHECK-DAG: %[[I5:.+]] = memref.load %[[IN]][%c5]
// CHECK-DAG: %[[I9:.+]] = memref.load %[[IN]][%c9]
// CHECK: memref.store %[[I0]], %[[OUT]][%c0]
// CHECK-NEXT: memref.store %[[I1]], %[[OUT]][%c1]
// CHECK-NEXT: memref.store %c8, %[[OUT]][%c2]
// CHECK-NEXT: memref.store %c4, %[[OUT]][%c3]
// CHECK-NEXT: memref.store %[[I0]], %[[OUT]][%c4]
// CHECK-NEXT: memref.store %c8, %[[OUT]][%c5]
// CHECK-NEXT: memref.store %c4, %[[OUT]][%c6]
// CHECK-NEXT: memref.store %c16, %[[OUT]][%c7]
// CHECK-NEXT: memref.store %[[I4]], %[[OUT]][%c8]
// CHECK-NEXT: memref.store %[[I0]], %[[OUT]][%c9]
// CHECK-NEXT: memref.store %[[I5]], %[[OUT]][%c10]
// CHECK-NEXT: memref.store %[[I1]], %[[OUT]][%c11]
// CHECK-NEXT: memref.store %c2, %[[OUT]][%c12]
// CHECK-NEXT: memref.store %[[I0]], %[[OUT]][%c13]
// CHECK-NEXT: memref.store %[[I9]], %[[OUT]][%c14]
// CHECK-NEXT: memref.store %[[I1]], %[[OUT]][%c15]
// CHECK-NEXT: return
func.func @ssd(%x: tensor<?x?x8x4xf32>, %dt: tensor<?x?x8xf32>, %a: tensor<8xf32>, %b: tensor<2x?x1x16xf32>)
    -> (tensor<?x?x8x4xf32>, tensor<?x8x4x16xf32>) {
  %y, %s = ssm.ssd %x dt(%dt : tensor<?x?x8xf32>) A(%a : tensor<8xf32>) B(%b) C(%b)
      : tensor<?x?x8x4xf32>, tensor<2x?x1x16xf32>, tensor<2x?x1x16xf32> -> tensor<?x?x8x4xf32>, tensor<?x8x4x16xf32>
  return %y, %s : tensor<?x?x8x4xf32>, tensor<?x8x4x16xf32>
}

// CHECK-LABEL: func.func @ssd_discretized.shapes(
// CHECK-SAME: %[[IN:.+]]: memref<?xindex>, %[[OUT:.+]]: memref<?xindex>)
// CHECK-SAME: attributes {ssm.constraints = [{{\[}}2, 1, 0, 1, "L"], [1, 1, 0, 1, "L"]]} {
// CHECK-DAG: %[[I1:.+]] = memref.load %[[IN]][%c1]
// CHECK-DAG: %[[I5:.+]] = memref.load %[[IN]][%c5]
// CHECK-DAG: %[[I8:.+]] = memref.load %[[IN]][%c8]
// CHECK: memref.store %c1, %[[OUT]][%c0]
// CHECK-NEXT: memref.store %[[I1]], %[[OUT]][%c1]
// CHECK-NEXT: memref.store %c8, %[[OUT]][%c2]
// CHECK-NEXT: memref.store %c4, %[[OUT]][%c3]
// CHECK-NEXT: memref.store %c3, %[[OUT]][%c4]
// CHECK-NEXT: memref.store %c8, %[[OUT]][%c5]
// CHECK-NEXT: memref.store %c4, %[[OUT]][%c6]
// CHECK-NEXT: memref.store %c16, %[[OUT]][%c7]
// CHECK-NEXT: memref.store %[[I8]], %[[OUT]][%c8]
// CHECK-NEXT: memref.store %[[I1]], %[[OUT]][%c9]
// CHECK-NEXT: memref.store %[[I5]], %[[OUT]][%c10]
// CHECK-NEXT: memref.store %[[I1]], %[[OUT]][%c11]
// CHECK-NEXT: return
func.func @ssd_discretized(%x: tensor<1x?x8x4xf32>, %decay: tensor<1x?x8xf32>, %b: tensor<1x?x1x16xf32>, %starts: tensor<3xi32>)
    -> (tensor<1x?x8x4xf32>, tensor<?x8x4x16xf32>) {
  %y, %s = ssm.ssd %x decay(%decay : tensor<1x?x8xf32>) B(%b) C(%b) seq_starts(%starts : tensor<3xi32>)
      : tensor<1x?x8x4xf32>, tensor<1x?x1x16xf32>, tensor<1x?x1x16xf32> -> tensor<1x?x8x4xf32>, tensor<?x8x4x16xf32>
  return %y, %s : tensor<1x?x8x4xf32>, tensor<?x8x4x16xf32>
}

// CHECK-LABEL: func.func @conv.shapes(
// CHECK-SAME: %[[IN:.+]]: memref<?xindex>, %[[OUT:.+]]: memref<?xindex>)
// CHECK-SAME: attributes {ssm.constraints = [{{\[}}2, 0, 0, 0, "B"]]} {
// CHECK-DAG: %[[I0:.+]] = memref.load %[[IN]][%c0]
// CHECK-DAG: %[[I1:.+]] = memref.load %[[IN]][%c1]
// CHECK-DAG: %[[I5:.+]] = memref.load %[[IN]][%c5]
// CHECK: memref.store %[[I0]], %[[OUT]][%c0]
// CHECK-NEXT: memref.store %[[I1]], %[[OUT]][%c1]
// CHECK-NEXT: memref.store %c8, %[[OUT]][%c2]
// CHECK-NEXT: memref.store %[[I0]], %[[OUT]][%c3]
// CHECK-NEXT: memref.store %c3, %[[OUT]][%c4]
// CHECK-NEXT: memref.store %c8, %[[OUT]][%c5]
// CHECK-NEXT: memref.store %[[I5]], %[[OUT]][%c6]
// CHECK-NEXT: memref.store %[[I0]], %[[OUT]][%c7]
// CHECK-NEXT: return
func.func @conv(%x: tensor<?x?x8xf32>, %w: tensor<8x4xf32>, %s0: tensor<?x3x8xf32>)
    -> (tensor<?x?x8xf32>, tensor<?x3x8xf32>) {
  %y, %s = ssm.causal_conv %x, %w initial_state(%s0 : tensor<?x3x8xf32>)
      : tensor<?x?x8xf32>, tensor<8x4xf32> -> tensor<?x?x8xf32>, tensor<?x3x8xf32>
  return %y, %s : tensor<?x?x8xf32>, tensor<?x3x8xf32>
}

// CHECK-LABEL: func.func @conv_packed.shapes(
// CHECK-SAME: %[[IN:.+]]: memref<?xindex>, %[[OUT:.+]]: memref<?xindex>)
// CHECK-SAME: attributes {ssm.constraints = []} {
// CHECK-DAG: %[[I1:.+]] = memref.load %[[IN]][%c1]
// CHECK-DAG: %[[I5:.+]] = memref.load %[[IN]][%c5]
// CHECK: memref.store %c1, %[[OUT]][%c0]
// CHECK-NEXT: memref.store %[[I1]], %[[OUT]][%c1]
// CHECK-NEXT: memref.store %c8, %[[OUT]][%c2]
// CHECK-NEXT: memref.store %[[I5]], %[[OUT]][%c3]
// CHECK-NEXT: memref.store %c3, %[[OUT]][%c4]
// CHECK-NEXT: memref.store %c8, %[[OUT]][%c5]
// CHECK-NEXT: return
func.func @conv_packed(%x: tensor<1x?x8xf32>, %w: tensor<8x4xf32>, %starts: tensor<?xi32>)
    -> (tensor<1x?x8xf32>, tensor<?x3x8xf32>) {
  %y, %s = ssm.causal_conv %x, %w seq_starts(%starts : tensor<?xi32>)
      : tensor<1x?x8xf32>, tensor<8x4xf32> -> tensor<1x?x8xf32>, tensor<?x3x8xf32>
  return %y, %s : tensor<1x?x8xf32>, tensor<?x3x8xf32>
}

// A result may be of a known size where its operand is not: the operand must then
// be of that size, or the result would be written out of bounds.
// CHECK-LABEL: func.func @conv_static.shapes(
// CHECK-SAME: %[[IN:.+]]: memref<?xindex>, %[[OUT:.+]]: memref<?xindex>)
// CHECK-SAME: attributes {ssm.constraints = [{{\[}}-1, -1, 0, 0, "B"], [-1, -1, 0, 1, "L"]]} {
// CHECK-DAG: %[[I0:.+]] = memref.load %[[IN]][%c0]
// CHECK-DAG: %[[I1:.+]] = memref.load %[[IN]][%c1]
// CHECK: memref.store %c2, %[[OUT]][%c0]
// CHECK-NEXT: memref.store %c16, %[[OUT]][%c1]
// CHECK-NEXT: memref.store %c8, %[[OUT]][%c2]
// CHECK-NEXT: memref.store %c2, %[[OUT]][%c3]
// CHECK-NEXT: memref.store %c3, %[[OUT]][%c4]
// CHECK-NEXT: memref.store %c8, %[[OUT]][%c5]
// CHECK-NEXT: memref.store %c2, %[[OUT]][%c6]
// CHECK-NEXT: memref.store %[[I0]], %[[OUT]][%c7]
// CHECK-NEXT: memref.store %c16, %[[OUT]][%c8]
// CHECK-NEXT: memref.store %[[I1]], %[[OUT]][%c9]
// CHECK-NEXT: return
func.func @conv_static(%x: tensor<?x?x8xf32>, %w: tensor<8x4xf32>) -> (tensor<2x16x8xf32>, tensor<2x3x8xf32>) {
  %y, %s = ssm.causal_conv %x, %w : tensor<?x?x8xf32>, tensor<8x4xf32> -> tensor<2x16x8xf32>, tensor<2x3x8xf32>
  return %y, %s : tensor<2x16x8xf32>, tensor<2x3x8xf32>
}

//===----------------------------------------------------------------------===//
// Ops along the last axis
//===----------------------------------------------------------------------===//

// CHECK-LABEL: func.func @projection.shapes(
// CHECK-SAME: %[[IN:.+]]: memref<?xindex>, %[[OUT:.+]]: memref<?xindex>)
// CHECK-SAME: attributes {ssm.constraints = [{{\[}}2, 0, 0, 0, ""], [-1, -1, 0, 1, ""]]} {
// CHECK-DAG: %[[I0:.+]] = memref.load %[[IN]][%c0]
// CHECK-DAG: %[[I1:.+]] = memref.load %[[IN]][%c1]
// CHECK-DAG: %[[I6:.+]] = memref.load %[[IN]][%c6]
// CHECK: memref.store %[[I0]], %[[OUT]][%c0]
// CHECK-NEXT: memref.store %[[I1]], %[[OUT]][%c1]
// CHECK-NEXT: memref.store %c3, %[[OUT]][%c2]
// CHECK-NEXT: memref.store %c4, %[[OUT]][%c3]
// CHECK-NEXT: memref.store %[[I6]], %[[OUT]][%c4]
// CHECK-NEXT: memref.store %[[I0]], %[[OUT]][%c5]
// CHECK-NEXT: memref.store %c2, %[[OUT]][%c6]
// CHECK-NEXT: memref.store %[[I1]], %[[OUT]][%c7]
// CHECK-NEXT: return
func.func @projection(%x: tensor<?x?x3x8xf32>, %w: tensor<4x8xf32>, %r: tensor<?x2x3x4xf32>) -> tensor<?x?x3x4xf32> {
  %y = ssm.projection %x, %w residual(%r : tensor<?x2x3x4xf32>) : tensor<?x?x3x8xf32>, tensor<4x8xf32> -> tensor<?x?x3x4xf32>
  return %y : tensor<?x?x3x4xf32>
}

// CHECK-LABEL: func.func @projection_static.shapes(
// CHECK-SAME: %[[IN:.+]]: memref<?xindex>, %[[OUT:.+]]: memref<?xindex>)
// CHECK-SAME: attributes {ssm.constraints = [{{\[}}-1, -1, 0, 0, ""]]} {
// CHECK-DAG: %[[I0:.+]] = memref.load %[[IN]][%c0]
// CHECK: memref.store %c3, %[[OUT]][%c0]
// CHECK-NEXT: memref.store %c4, %[[OUT]][%c1]
// CHECK-NEXT: memref.store %c3, %[[OUT]][%c2]
// CHECK-NEXT: memref.store %[[I0]], %[[OUT]][%c3]
// CHECK-NEXT: return
func.func @projection_static(%x: tensor<?x8xf32>, %w: tensor<4x8xf32>) -> tensor<3x4xf32> {
  %y = ssm.projection %x, %w : tensor<?x8xf32>, tensor<4x8xf32> -> tensor<3x4xf32>
  return %y : tensor<3x4xf32>
}

// CHECK-LABEL: func.func @rms_norm.shapes(
// CHECK-SAME: %[[IN:.+]]: memref<?xindex>, %[[OUT:.+]]: memref<?xindex>)
// CHECK-SAME: attributes {ssm.constraints = [{{\[}}2, 0, 0, 0, ""], [3, 0, 0, 0, ""]]} {
// CHECK-DAG: %[[I0:.+]] = memref.load %[[IN]][%c0]
// CHECK-DAG: %[[I3:.+]] = memref.load %[[IN]][%c3]
// CHECK-DAG: %[[I5:.+]] = memref.load %[[IN]][%c5]
// CHECK: memref.store %[[I0]], %[[OUT]][%c0]
// CHECK-NEXT: memref.store %c8, %[[OUT]][%c1]
// CHECK-NEXT: memref.store %[[I0]], %[[OUT]][%c2]
// CHECK-NEXT: memref.store %c8, %[[OUT]][%c3]
// CHECK-NEXT: memref.store %[[I3]], %[[OUT]][%c4]
// CHECK-NEXT: memref.store %[[I0]], %[[OUT]][%c5]
// CHECK-NEXT: memref.store %[[I5]], %[[OUT]][%c6]
// CHECK-NEXT: memref.store %[[I0]], %[[OUT]][%c7]
// CHECK-NEXT: return
func.func @rms_norm(%x: tensor<?x8xf32>, %w: tensor<8xf32>, %r: tensor<?x8xbf16>, %z: tensor<?x8xf32>)
    -> (tensor<?x8xf32>, tensor<?x8xbf16>) {
  %y, %s = ssm.rms_norm %x, %w residual(%r : tensor<?x8xbf16>) z(%z : tensor<?x8xf32>)
      : tensor<?x8xf32>, tensor<8xf32> -> tensor<?x8xf32>, tensor<?x8xbf16>
  return %y, %s : tensor<?x8xf32>, tensor<?x8xbf16>
}

// CHECK-LABEL: func.func @hadamard.shapes(
// CHECK-SAME: %[[IN:.+]]: memref<?xindex>, %[[OUT:.+]]: memref<?xindex>)
// CHECK-SAME: attributes {ssm.constraints = []} {
// CHECK-DAG: %[[I0:.+]] = memref.load %[[IN]][%c0]
// CHECK-DAG: %[[I2:.+]] = memref.load %[[IN]][%c2]
// CHECK: memref.store %[[I0]], %[[OUT]][%c0]
// CHECK-NEXT: memref.store %c3, %[[OUT]][%c1]
// CHECK-NEXT: memref.store %[[I2]], %[[OUT]][%c2]
// CHECK-NEXT: memref.store %c8, %[[OUT]][%c3]
// CHECK-NEXT: return
func.func @hadamard(%x: tensor<?x3x?x8xf32>) -> tensor<?x3x?x8xf32> {
  %y = ssm.hadamard %x {block = 8 : i64} : tensor<?x3x?x8xf32> -> tensor<?x3x?x8xf32>
  return %y : tensor<?x3x?x8xf32>
}

// CHECK-LABEL: func.func @language_model.shapes(
// CHECK-SAME: %[[IN:.+]]: memref<?xindex>, %[[OUT:.+]]: memref<?xindex>)
// CHECK-SAME: attributes {ssm.constraints = []} {
// CHECK-DAG: %[[I0:.+]] = memref.load %[[IN]][%c0]
// CHECK-DAG: %[[I1:.+]] = memref.load %[[IN]][%c1]
// CHECK: memref.store %[[I0]], %[[OUT]][%c0]
// CHECK-NEXT: memref.store %[[I1]], %[[OUT]][%c1]
// CHECK-NEXT: memref.store %c256, %[[OUT]][%c2]
// CHECK-NEXT: memref.store %[[I0]], %[[OUT]][%c3]
// CHECK-NEXT: memref.store %[[I1]], %[[OUT]][%c4]
// CHECK-NEXT: return
func.func @language_model(%ids: tensor<?x?xi32>, %t: tensor<256x8xf32>) -> (tensor<?x?x256xf32>, tensor<?x?xi32>) {
  %x = ssm.embedding %ids, %t : tensor<?x?xi32>, tensor<256x8xf32> -> tensor<?x?x8xf32>
  %y = ssm.projection %x, %t : tensor<?x?x8xf32>, tensor<256x8xf32> -> tensor<?x?x256xf32>
  %next = ssm.argmax %y : tensor<?x?x256xf32> -> tensor<?x?xi32>
  return %y, %next : tensor<?x?x256xf32>, tensor<?x?xi32>
}

// Every tensor has the rows of the logits.
// CHECK-LABEL: func.func @draws.shapes(
// CHECK-SAME: %[[IN:.+]]: memref<?xindex>, %[[OUT:.+]]: memref<?xindex>)
// CHECK-SAME: attributes {ssm.constraints = [{{.+}}]} {
// CHECK: %[[I0:.+]] = memref.load %[[IN]][%c0]
// CHECK: memref.store %[[I0]], %[[OUT]][%c0]
// CHECK-NEXT: memref.store %[[I0]], %[[OUT]][%c1]
// CHECK-NEXT: memref.store %c3, %[[OUT]][%c2]
func.func @draws(%x: tensor<?x8xf32>, %t: tensor<?xf32>, %k: tensor<?xi32>, %p: tensor<?xf32>, %r: tensor<?x3xi64>)
    -> (tensor<?xi32>, tensor<?x3xi64>) {
  %y:2 = ssm.sample %x, %t, %k, %p, %r : tensor<?x8xf32>, tensor<?xf32>, tensor<?xi32>, tensor<?xf32>, tensor<?x3xi64> -> tensor<?xi32>, tensor<?x3xi64>
  return %y#0, %y#1 : tensor<?xi32>, tensor<?x3xi64>
}

//===----------------------------------------------------------------------===//
// Elementwise ops and quantization
//===----------------------------------------------------------------------===//

// Trailing axes are held against those of lhs.
// CHECK-LABEL: func.func @elementwise.shapes(
// CHECK-SAME: %[[IN:.+]]: memref<?xindex>, %[[OUT:.+]]: memref<?xindex>)
// CHECK-SAME: attributes {ssm.constraints = [{{\[}}1, 0, 0, 1, ""]]} {
// CHECK-DAG: %[[I0:.+]] = memref.load %[[IN]][%c0]
// CHECK-DAG: %[[I1:.+]] = memref.load %[[IN]][%c1]
// CHECK-DAG: %[[I3:.+]] = memref.load %[[IN]][%c3]
// CHECK: memref.store %[[I0]], %[[OUT]][%c0]
// CHECK-NEXT: memref.store %[[I1]], %[[OUT]][%c1]
// CHECK-NEXT: memref.store %c8, %[[OUT]][%c2]
// CHECK-NEXT: memref.store %[[I3]], %[[OUT]][%c3]
// CHECK-NEXT: memref.store %[[I1]], %[[OUT]][%c4]
// CHECK-NEXT: return
func.func @elementwise(%x: tensor<?x?x8xf32>, %v: tensor<?x8xf32>) -> tensor<?x?x8xbf16> {
  %0 = ssm.add %x, %v : tensor<?x?x8xf32>, tensor<?x8xf32>
  %1 = ssm.gelu %0 : tensor<?x?x8xf32>
  %2 = ssm.observe @site %1 : tensor<?x?x8xf32>
  %3 = ssm.cast %2 : tensor<?x?x8xf32> to tensor<?x?x8xbf16>
  %4 = ssm.scale %3 by 0.5 : tensor<?x?x8xbf16>
  return %4 : tensor<?x?x8xbf16>
}

// CHECK-LABEL: func.func @cast_static.shapes(
// CHECK-SAME: %[[IN:.+]]: memref<?xindex>, %[[OUT:.+]]: memref<?xindex>)
// CHECK-SAME: attributes {ssm.constraints = [{{\[}}-1, -1, 0, 0, ""]]} {
// CHECK-DAG: %[[I0:.+]] = memref.load %[[IN]][%c0]
// CHECK-DAG: %[[I1:.+]] = memref.load %[[IN]][%c1]
// CHECK: memref.store %c4, %[[OUT]][%c0]
// CHECK-NEXT: memref.store %[[I1]], %[[OUT]][%c1]
// CHECK-NEXT: memref.store %c4, %[[OUT]][%c2]
// CHECK-NEXT: memref.store %[[I0]], %[[OUT]][%c3]
// CHECK-NEXT: return
func.func @cast_static(%x: tensor<?x?xf32>) -> tensor<4x?xf16> {
  %0 = ssm.cast %x : tensor<?x?xf32> to tensor<4x?xf16>
  return %0 : tensor<4x?xf16>
}

// CHECK-LABEL: func.func @quantize.shapes(
// CHECK-SAME: %[[IN:.+]]: memref<?xindex>, %[[OUT:.+]]: memref<?xindex>)
// CHECK-SAME: attributes {ssm.constraints = []} {
// CHECK-DAG: %[[I0:.+]] = memref.load %[[IN]][%c0]
// CHECK-DAG: %[[I1:.+]] = memref.load %[[IN]][%c1]
// CHECK: memref.store %[[I0]], %[[OUT]][%c0]
// CHECK-NEXT: memref.store %[[I1]], %[[OUT]][%c1]
// CHECK-NEXT: memref.store %[[I0]], %[[OUT]][%c2]
// CHECK-NEXT: memref.store %[[I1]], %[[OUT]][%c3]
// CHECK-NEXT: return
func.func @quantize(%x: tensor<?x?xf32>) -> (tensor<?x?xi8>, tensor<f32>, tensor<?xf32>, tensor<?xf32>) {
  %q0, %s0 = ssm.quantize %x tensor : tensor<?x?xf32> -> tensor<?x?xi8>, tensor<f32>
  %q1, %s1 = ssm.quantize %x token : tensor<?x?xf32> -> tensor<?x?xi8>, tensor<?xf32>
  %q2, %s2 = ssm.quantize %x channel : tensor<?x?xf32> -> tensor<?x?xi8>, tensor<?xf32>
  return %q0, %s0, %s1, %s2 : tensor<?x?xi8>, tensor<f32>, tensor<?xf32>, tensor<?xf32>
}

// CHECK-LABEL: func.func @quantize_static.shapes(
// CHECK-SAME: %[[IN:.+]]: memref<?xindex>, %[[OUT:.+]]: memref<?xindex>)
// CHECK-SAME: attributes {ssm.constraints = [{{\[}}-1, -1, 0, 0, ""], [-1, -1, 0, 1, ""]]} {
// CHECK-DAG: %[[I0:.+]] = memref.load %[[IN]][%c0]
// CHECK-DAG: %[[I1:.+]] = memref.load %[[IN]][%c1]
// CHECK: memref.store %[[I0]], %[[OUT]][%c0]
// CHECK-NEXT: memref.store %[[I1]], %[[OUT]][%c1]
// CHECK-NEXT: memref.store %c3, %[[OUT]][%c2]
// CHECK-NEXT: memref.store %c8, %[[OUT]][%c3]
// CHECK-NEXT: memref.store %c3, %[[OUT]][%c4]
// CHECK-NEXT: memref.store %[[I0]], %[[OUT]][%c5]
// CHECK-NEXT: memref.store %c8, %[[OUT]][%c6]
// CHECK-NEXT: memref.store %[[I1]], %[[OUT]][%c7]
// CHECK-NEXT: return
func.func @quantize_static(%x: tensor<?x?xf32>) -> (tensor<?x?xi8>, tensor<3xf32>, tensor<8xf32>) {
  %q1, %s1 = ssm.quantize %x token : tensor<?x?xf32> -> tensor<?x?xi8>, tensor<3xf32>
  %q2, %s2 = ssm.quantize %x channel : tensor<?x?xf32> -> tensor<?x?xi8>, tensor<8xf32>
  return %q1, %s1, %s2 : tensor<?x?xi8>, tensor<3xf32>, tensor<8xf32>
}

// CHECK-LABEL: func.func @dequantize_token.shapes(
// CHECK-SAME: %[[IN:.+]]: memref<?xindex>, %[[OUT:.+]]: memref<?xindex>)
// CHECK-SAME: attributes {ssm.constraints = [{{\[}}1, 0, 0, 0, ""]]} {
// CHECK-DAG: %[[I0:.+]] = memref.load %[[IN]][%c0]
// CHECK-DAG: %[[I2:.+]] = memref.load %[[IN]][%c2]
// CHECK: memref.store %[[I0]], %[[OUT]][%c0]
// CHECK-NEXT: memref.store %c8, %[[OUT]][%c1]
// CHECK-NEXT: memref.store %[[I2]], %[[OUT]][%c2]
// CHECK-NEXT: memref.store %[[I0]], %[[OUT]][%c3]
// CHECK-NEXT: return
func.func @dequantize_token(%q: tensor<?x8xi8>, %s: tensor<?xf32>) -> tensor<?x8xf32> {
  %x = ssm.dequantize %q, %s token : tensor<?x8xi8>, tensor<?xf32> -> tensor<?x8xf32>
  return %x : tensor<?x8xf32>
}

// CHECK-LABEL: func.func @dequantize_channel.shapes(
// CHECK-SAME: %[[IN:.+]]: memref<?xindex>, %[[OUT:.+]]: memref<?xindex>)
// CHECK-SAME: attributes {ssm.constraints = [{{\[}}1, 0, 0, 1, ""]]} {
// CHECK-DAG: %[[I0:.+]] = memref.load %[[IN]][%c0]
// CHECK-DAG: %[[I1:.+]] = memref.load %[[IN]][%c1]
// CHECK-DAG: %[[I2:.+]] = memref.load %[[IN]][%c2]
// CHECK: memref.store %[[I0]], %[[OUT]][%c0]
// CHECK-NEXT: memref.store %[[I1]], %[[OUT]][%c1]
// CHECK-NEXT: memref.store %[[I2]], %[[OUT]][%c2]
// CHECK-NEXT: memref.store %[[I1]], %[[OUT]][%c3]
// CHECK-NEXT: return
func.func @dequantize_channel(%q: tensor<?x?xi8>, %s: tensor<?xf32>) -> tensor<?x?xf32> {
  %x = ssm.dequantize %q, %s channel : tensor<?x?xi8>, tensor<?xf32> -> tensor<?x?xf32>
  return %x : tensor<?x?xf32>
}

//===----------------------------------------------------------------------===//
// ssm.fused: shapes of the region in terms of the inputs
//===----------------------------------------------------------------------===//

// CHECK-LABEL: func.func @fused.shapes(
// CHECK-SAME: %[[IN:.+]]: memref<?xindex>, %[[OUT:.+]]: memref<?xindex>)
// CHECK-SAME: attributes {ssm.constraints = []} {
// CHECK-DAG: %[[I1:.+]] = memref.load %[[IN]][%c1]
// CHECK-DAG: %[[I2:.+]] = memref.load %[[IN]][%c2]
// CHECK: memref.store %[[I1]], %[[OUT]][%c0]
// CHECK-NEXT: memref.store %[[I2]], %[[OUT]][%c1]
// CHECK-NEXT: memref.store %c4, %[[OUT]][%c2]
// CHECK-NEXT: memref.store %[[I1]], %[[OUT]][%c3]
// CHECK-NEXT: memref.store %c8, %[[OUT]][%c4]
// CHECK-NEXT: return
func.func @fused(%v: tensor<8xf32>, %x: tensor<?x?x8xf32>, %w: tensor<4x8xf32>) -> (tensor<?x?x4xf32>, tensor<?x8xf32>) {
  %y, %s = ssm.fused ins(%v, %x, %w : tensor<8xf32>, tensor<?x?x8xf32>, tensor<4x8xf32>)
      -> tensor<?x?x4xf32>, tensor<?x8xf32> {
  ^bb0(%b: tensor<8xf32>, %a: tensor<?x?x8xf32>, %c: tensor<4x8xf32>):
    %0 = ssm.mul %a, %b : tensor<?x?x8xf32>, tensor<8xf32>
    %1 = ssm.projection %0, %c : tensor<?x?x8xf32>, tensor<4x8xf32> -> tensor<?x?x4xf32>
    %zero = arith.constant 0 : index
    %n = tensor.dim %0, %zero : tensor<?x?x8xf32>
    %e = tensor.empty(%n) : tensor<?x8xf32>
    ssm.yield %1, %e : tensor<?x?x4xf32>, tensor<?x8xf32>
  }
  return %y, %s : tensor<?x?x4xf32>, tensor<?x8xf32>
}

// Constraints within a region count.
// CHECK-LABEL: func.func @fused_nested.shapes(
// CHECK-SAME: %[[IN:.+]]: memref<?xindex>, %[[OUT:.+]]: memref<?xindex>)
// CHECK-SAME: attributes {ssm.constraints = [{{\[}}0, 0, 1, 0, ""]]} {
// CHECK-DAG: %[[I0:.+]] = memref.load %[[IN]][%c0]
// CHECK-DAG: %[[I2:.+]] = memref.load %[[IN]][%c2]
// CHECK: memref.store %[[I2]], %[[OUT]][%c0]
// CHECK-NEXT: memref.store %c8, %[[OUT]][%c1]
// CHECK-NEXT: memref.store %[[I0]], %[[OUT]][%c2]
// CHECK-NEXT: memref.store %[[I2]], %[[OUT]][%c3]
// CHECK-NEXT: return
func.func @fused_nested(%x: tensor<?x8xf32>, %v: tensor<?x8xf32>) -> tensor<?x8xf32> {
  %y = ssm.fused ins(%x, %v : tensor<?x8xf32>, tensor<?x8xf32>) -> tensor<?x8xf32> {
  ^bb0(%a: tensor<?x8xf32>, %b: tensor<?x8xf32>):
    %0 = ssm.fused ins(%b, %a : tensor<?x8xf32>, tensor<?x8xf32>) -> tensor<?x8xf32> {
    ^bb0(%c: tensor<?x8xf32>, %d: tensor<?x8xf32>):
      %1 = ssm.sub %c, %d : tensor<?x8xf32>, tensor<?x8xf32>
      ssm.yield %1 : tensor<?x8xf32>
    }
    ssm.yield %0 : tensor<?x8xf32>
  }
  return %y : tensor<?x8xf32>
}
