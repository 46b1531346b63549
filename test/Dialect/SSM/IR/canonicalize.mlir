// Folders and canonicalization patterns of the dialect, each next to the cases
// it must leave alone.

// RUN: corey-opt %s --canonicalize --split-input-file | FileCheck %s

//===----------------------------------------------------------------------===//
// ssm.hadamard: a transform of block 1, two transforms of one block
//===----------------------------------------------------------------------===//

// CHECK-LABEL: func.func @hadamard_twice(
// CHECK-SAME: %[[X:.+]]: tensor<?x16xf32>)
// CHECK-NEXT: return %[[X]]
func.func @hadamard_twice(%x: tensor<?x16xf32>) -> tensor<?x16xf32> {
  %0 = ssm.hadamard %x {block = 16 : i64} : tensor<?x16xf32> -> tensor<?x16xf32>
  %1 = ssm.hadamard %0 {block = 16 : i64} : tensor<?x16xf32> -> tensor<?x16xf32>
  return %1 : tensor<?x16xf32>
}

// CHECK-LABEL: func.func @hadamard_of_one(
// CHECK-SAME: %[[X:.+]]: tensor<?x16xbf16>)
// CHECK-NEXT: return %[[X]]
func.func @hadamard_of_one(%x: tensor<?x16xbf16>) -> tensor<?x16xbf16> {
  %0 = ssm.hadamard %x {block = 1 : i64} : tensor<?x16xbf16> -> tensor<?x16xbf16>
  return %0 : tensor<?x16xbf16>
}

// Three are one.
// CHECK-LABEL: func.func @hadamard_thrice(
// CHECK-SAME: %[[X:.+]]: tensor<16xf32>)
// CHECK-NEXT: %[[Y:.+]] = ssm.hadamard %[[X]] {block = 8 : i64}
// CHECK-NEXT: return %[[Y]]
func.func @hadamard_thrice(%x: tensor<16xf32>) -> tensor<16xf32> {
  %0 = ssm.hadamard %x {block = 8 : i64} : tensor<16xf32> -> tensor<16xf32>
  %1 = ssm.hadamard %0 {block = 8 : i64} : tensor<16xf32> -> tensor<16xf32>
  %2 = ssm.hadamard %1 {block = 8 : i64} : tensor<16xf32> -> tensor<16xf32>
  return %2 : tensor<16xf32>
}

// CHECK-LABEL: func.func @hadamard_of_different_blocks(
// CHECK: ssm.hadamard {{.*}} {block = 8 : i64}
// CHECK: %[[Y:.+]] = ssm.hadamard {{.*}} {block = 16 : i64}
// CHECK-NEXT: return %[[Y]]
func.func @hadamard_of_different_blocks(%x: tensor<?x16xf32>) -> tensor<?x16xf32> {
  %0 = ssm.hadamard %x {block = 8 : i64} : tensor<?x16xf32> -> tensor<?x16xf32>
  %1 = ssm.hadamard %0 {block = 16 : i64} : tensor<?x16xf32> -> tensor<?x16xf32>
  return %1 : tensor<?x16xf32>
}

// A fold keeps the type: here the op makes a size static.
// CHECK-LABEL: func.func @hadamard_that_refines(
// CHECK-SAME: %[[X:.+]]: tensor<?x16xf32>)
// CHECK-NEXT: %[[Y:.+]] = ssm.hadamard %[[X]] {block = 1 : i64} : tensor<?x16xf32> -> tensor<4x16xf32>
// CHECK-NEXT: return %[[Y]]
func.func @hadamard_that_refines(%x: tensor<?x16xf32>) -> tensor<4x16xf32> {
  %0 = ssm.hadamard %x {block = 1 : i64} : tensor<?x16xf32> -> tensor<4x16xf32>
  return %0 : tensor<4x16xf32>
}

// CHECK-LABEL: func.func @hadamard_twice_that_refines(
// CHECK-COUNT-2: ssm.hadamard
func.func @hadamard_twice_that_refines(%x: tensor<?x16xf32>) -> tensor<4x16xf32> {
  %0 = ssm.hadamard %x {block = 16 : i64} : tensor<?x16xf32> -> tensor<?x16xf32>
  %1 = ssm.hadamard %0 {block = 16 : i64} : tensor<?x16xf32> -> tensor<4x16xf32>
  return %1 : tensor<4x16xf32>
}

// -----

//===----------------------------------------------------------------------===//
// ssm.neg: twice
//===----------------------------------------------------------------------===//

// CHECK-LABEL: func.func @neg_twice(
// CHECK-SAME: %[[X:.+]]: tensor<?xf16>)
// CHECK-NEXT: return %[[X]]
func.func @neg_twice(%x: tensor<?xf16>) -> tensor<?xf16> {
  %0 = ssm.neg %x : tensor<?xf16>
  %1 = ssm.neg %0 : tensor<?xf16>
  return %1 : tensor<?xf16>
}

// CHECK-LABEL: func.func @neg_once(
// CHECK-NEXT: ssm.neg
func.func @neg_once(%x: tensor<?xf16>) -> tensor<?xf16> {
  %0 = ssm.neg %x : tensor<?xf16>
  return %0 : tensor<?xf16>
}

// -----

//===----------------------------------------------------------------------===//
// ssm.cast: to its own type; widening, then narrowing
//===----------------------------------------------------------------------===//

// CHECK-LABEL: func.func @cast_to_itself(
// CHECK-SAME: %[[X:.+]]: tensor<?x8xbf16>)
// CHECK-NEXT: return %[[X]]
func.func @cast_to_itself(%x: tensor<?x8xbf16>) -> tensor<?x8xbf16> {
  %0 = ssm.cast %x : tensor<?x8xbf16> to tensor<?x8xbf16>
  return %0 : tensor<?x8xbf16>
}

// CHECK-LABEL: func.func @cast_wider_and_back(
// CHECK-SAME: %[[X:.+]]: tensor<?x8xbf16>, %[[Y:.+]]: tensor<8xf16>)
// CHECK-NEXT: return %[[X]], %[[Y]]
func.func @cast_wider_and_back(%x: tensor<?x8xbf16>, %y: tensor<8xf16>) -> (tensor<?x8xbf16>, tensor<8xf16>) {
  %0 = ssm.cast %x : tensor<?x8xbf16> to tensor<?x8xf32>
  %1 = ssm.cast %0 : tensor<?x8xf32> to tensor<?x8xbf16>
  %2 = ssm.cast %y : tensor<8xf16> to tensor<8xf32>
  %3 = ssm.cast %2 : tensor<8xf32> to tensor<8xf16>
  return %1, %3 : tensor<?x8xbf16>, tensor<8xf16>
}

// Narrowing rounds.
// CHECK-LABEL: func.func @cast_narrower_and_back(
// CHECK: ssm.cast {{.*}} : tensor<8xf32> to tensor<8xbf16>
// CHECK: ssm.cast {{.*}} : tensor<8xbf16> to tensor<8xf32>
func.func @cast_narrower_and_back(%x: tensor<8xf32>) -> tensor<8xf32> {
  %0 = ssm.cast %x : tensor<8xf32> to tensor<8xbf16>
  %1 = ssm.cast %0 : tensor<8xbf16> to tensor<8xf32>
  return %1 : tensor<8xf32>
}

// Neither f16 nor bf16 holds all of the other.
// CHECK-LABEL: func.func @cast_between_halves(
// CHECK-COUNT-4: ssm.cast
func.func @cast_between_halves(%x: tensor<8xf16>, %y: tensor<8xbf16>) -> (tensor<8xf16>, tensor<8xbf16>) {
  %0 = ssm.cast %x : tensor<8xf16> to tensor<8xbf16>
  %1 = ssm.cast %0 : tensor<8xbf16> to tensor<8xf16>
  %2 = ssm.cast %y : tensor<8xbf16> to tensor<8xf16>
  %3 = ssm.cast %2 : tensor<8xf16> to tensor<8xbf16>
  return %1, %3 : tensor<8xf16>, tensor<8xbf16>
}

// Wider, then to the other half: still a conversion.
// CHECK-LABEL: func.func @cast_through_f32(
// CHECK-COUNT-2: ssm.cast
func.func @cast_through_f32(%x: tensor<8xf16>) -> tensor<8xbf16> {
  %0 = ssm.cast %x : tensor<8xf16> to tensor<8xf32>
  %1 = ssm.cast %0 : tensor<8xf32> to tensor<8xbf16>
  return %1 : tensor<8xbf16>
}

// CHECK-LABEL: func.func @cast_that_refines(
// CHECK-COUNT-2: ssm.cast
func.func @cast_that_refines(%x: tensor<?xf16>) -> tensor<8xf16> {
  %0 = ssm.cast %x : tensor<?xf16> to tensor<?xf32>
  %1 = ssm.cast %0 : tensor<?xf32> to tensor<8xf16>
  return %1 : tensor<8xf16>
}

// -----

//===----------------------------------------------------------------------===//
// ssm.scale: by 1; twice
//===----------------------------------------------------------------------===//

// CHECK-LABEL: func.func @scale_by_one(
// CHECK-SAME: %[[X:.+]]: tensor<?xbf16>)
// CHECK-NEXT: return %[[X]]
func.func @scale_by_one(%x: tensor<?xbf16>) -> tensor<?xbf16> {
  %0 = ssm.scale %x by 1.0 : tensor<?xbf16>
  return %0 : tensor<?xbf16>
}

// CHECK-LABEL: func.func @scale_by_almost_one(
// CHECK-NEXT: ssm.scale {{.*}} by 1.0000000000000002
func.func @scale_by_almost_one(%x: tensor<?xf32>) -> tensor<?xf32> {
  %0 = ssm.scale %x by 1.0000000000000002 : tensor<?xf32>
  return %0 : tensor<?xf32>
}

// CHECK-LABEL: func.func @scale_twice(
// CHECK-SAME: %[[X:.+]]: tensor<?xf32>)
// CHECK-NEXT: %[[Y:.+]] = ssm.scale %[[X]] by -1.500000e+00 : tensor<?xf32>
// CHECK-NEXT: return %[[Y]]
func.func @scale_twice(%x: tensor<?xf32>) -> tensor<?xf32> {
  %0 = ssm.scale %x by 3.0 : tensor<?xf32>
  %1 = ssm.scale %0 by -0.5 : tensor<?xf32>
  return %1 : tensor<?xf32>
}

// The merged factor folds in turn.
// CHECK-LABEL: func.func @scale_there_and_back(
// CHECK-SAME: %[[X:.+]]: tensor<?xf32>)
// CHECK-NEXT: return %[[X]]
func.func @scale_there_and_back(%x: tensor<?xf32>) -> tensor<?xf32> {
  %0 = ssm.scale %x by 4.0 : tensor<?xf32>
  %1 = ssm.scale %0 by 0.25 : tensor<?xf32>
  return %1 : tensor<?xf32>
}

// In a narrow type the value between two scales is rounded, or overflows.
// CHECK-LABEL: func.func @scale_twice_in_bf16(
// CHECK: ssm.scale {{.*}} by 3.000000e+00
// CHECK: ssm.scale {{.*}} by 5.000000e-01
func.func @scale_twice_in_bf16(%x: tensor<?xbf16>) -> tensor<?xbf16> {
  %0 = ssm.scale %x by 3.0 : tensor<?xbf16>
  %1 = ssm.scale %0 by 0.5 : tensor<?xbf16>
  return %1 : tensor<?xbf16>
}

// CHECK-LABEL: func.func @scale_twice_in_f16(
// CHECK-COUNT-2: ssm.scale
func.func @scale_twice_in_f16(%x: tensor<?xf16>) -> tensor<?xf16> {
  %0 = ssm.scale %x by 4096.0 : tensor<?xf16>
  %1 = ssm.scale %0 by 0.000244140625 : tensor<?xf16>
  return %1 : tensor<?xf16>
}

// -----

//===----------------------------------------------------------------------===//
// Unused last results
//===----------------------------------------------------------------------===//

// CHECK-LABEL: func.func @unused_state(
// CHECK: ssm.selective_scan {{.*}} D(%{{.+}} : tensor<8xf32>) initial_state(%{{.+}} : tensor<?x8x4xf32>) chunk_size(%{{.+}}) {delta_softplus, test.note}
// CHECK-SAME: tensor<?x?x1x4xf32> -> tensor<?x?x8xf32>{{$}}
func.func @unused_state(%u: tensor<?x?x8xf32>, %a: tensor<8x4xf32>, %b: tensor<?x?x1x4xf32>, %d: tensor<8xf32>,
    %h0: tensor<?x8x4xf32>, %k: index) -> tensor<?x?x8xf32> {
  %y, %h = ssm.selective_scan %u, %u, %a, %b, %b D(%d : tensor<8xf32>) initial_state(%h0 : tensor<?x8x4xf32>)
      chunk_size(%k) {delta_softplus, test.note} : tensor<?x?x8xf32>, tensor<?x?x8xf32>, tensor<8x4xf32>,
      tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x8xf32>, tensor<?x8x4xf32>
  return %y : tensor<?x?x8xf32>
}

// CHECK-LABEL: func.func @used_state(
// CHECK: %{{.+}}, %[[H:.+]] = ssm.selective_scan
// CHECK-SAME: -> tensor<?x?x8xf32>, tensor<?x8x4xf32>{{$}}
// CHECK-NEXT: return %[[H]]
func.func @used_state(%u: tensor<?x?x8xf32>, %a: tensor<8x4xf32>, %b: tensor<?x?x1x4xf32>) -> tensor<?x8x4xf32> {
  %y, %h = ssm.selective_scan %u, %u, %a, %b, %b : tensor<?x?x8xf32>, tensor<?x?x8xf32>, tensor<8x4xf32>,
      tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x8xf32>, tensor<?x8x4xf32>
  return %h : tensor<?x8x4xf32>
}

// CHECK-LABEL: func.func @unused_ssd_state(
// CHECK: ssm.ssd {{.*}} {dt_limit = array<f64: 0.000000e+00, 1.000000e+00>, dt_softplus, tile = 32 : i64}
// CHECK-SAME: -> tensor<?x?x8x4xf32>{{$}}
func.func @unused_ssd_state(%x: tensor<?x?x8x4xf32>, %dt: tensor<?x?x8xf32>, %a: tensor<8xf32>,
    %b: tensor<?x?x1x16xf32>) -> tensor<?x?x8x4xf32> {
  %y, %s = ssm.ssd %x dt(%dt : tensor<?x?x8xf32>) A(%a : tensor<8xf32>) B(%b) C(%b)
      {dt_softplus, dt_limit = array<f64: 0.0, 1.0>, tile = 32 : i64}
      : tensor<?x?x8x4xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x8x4xf32>, tensor<?x8x4x16xf32>
  return %y : tensor<?x?x8x4xf32>
}

// CHECK-LABEL: func.func @used_ssd_state(
// CHECK: ssm.ssd
// CHECK-SAME: -> tensor<?x?x8x4xf32>, tensor<?x8x4x16xf32>{{$}}
func.func @used_ssd_state(%x: tensor<?x?x8x4xf32>, %decay: tensor<?x?x8xf32>, %b: tensor<?x?x1x16xf32>)
    -> (tensor<?x?x8x4xf32>, tensor<?x8x4x16xf32>) {
  %y, %s = ssm.ssd %x decay(%decay : tensor<?x?x8xf32>) B(%b) C(%b)
      : tensor<?x?x8x4xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x8x4xf32>, tensor<?x8x4x16xf32>
  return %y, %s : tensor<?x?x8x4xf32>, tensor<?x8x4x16xf32>
}

// CHECK-LABEL: func.func @unused_conv_state(
// CHECK: ssm.causal_conv {{.*}} seq_starts(%{{.+}} : tensor<?xi32>) {silu} : {{.*}} -> tensor<1x?x8xf32>{{$}}
func.func @unused_conv_state(%x: tensor<1x?x8xf32>, %w: tensor<8x4xf32>, %starts: tensor<?xi32>) -> tensor<1x?x8xf32> {
  %y, %s = ssm.causal_conv %x, %w seq_starts(%starts : tensor<?xi32>) {silu}
      : tensor<1x?x8xf32>, tensor<8x4xf32> -> tensor<1x?x8xf32>, tensor<?x3x8xf32>
  return %y : tensor<1x?x8xf32>
}

// CHECK-LABEL: func.func @used_conv_state(
// CHECK: ssm.causal_conv {{.*}} -> tensor<?x?x8xf32>, tensor<?x3x8xf32>{{$}}
func.func @used_conv_state(%x: tensor<?x?x8xf32>, %w: tensor<8x4xf32>) -> tensor<?x3x8xf32> {
  %y, %s = ssm.causal_conv %x, %w : tensor<?x?x8xf32>, tensor<8x4xf32> -> tensor<?x?x8xf32>, tensor<?x3x8xf32>
  return %s : tensor<?x3x8xf32>
}

// CHECK-LABEL: func.func @unused_sum(
// CHECK: ssm.rms_norm {{.*}} residual(%{{.+}} : tensor<?x8xf32>) {group_size = 4 : i64} : {{.*}} -> tensor<?x8xf32>{{$}}
func.func @unused_sum(%x: tensor<?x8xf32>, %w: tensor<8xf32>) -> tensor<?x8xf32> {
  %y, %r = ssm.rms_norm %x, %w residual(%x : tensor<?x8xf32>) {group_size = 4 : i64}
      : tensor<?x8xf32>, tensor<8xf32> -> tensor<?x8xf32>, tensor<?x8xf32>
  return %y : tensor<?x8xf32>
}

// CHECK-LABEL: func.func @used_sum(
// CHECK: ssm.rms_norm {{.*}} -> tensor<?x8xf32>, tensor<?x8xf32>{{$}}
func.func @used_sum(%x: tensor<?x8xf32>, %w: tensor<8xf32>) -> (tensor<?x8xf32>, tensor<?x8xf32>) {
  %y, %r = ssm.rms_norm %x, %w residual(%x : tensor<?x8xf32>)
      : tensor<?x8xf32>, tensor<8xf32> -> tensor<?x8xf32>, tensor<?x8xf32>
  return %y, %r : tensor<?x8xf32>, tensor<?x8xf32>
}

// -----

//===----------------------------------------------------------------------===//
// Constant chunks
//===----------------------------------------------------------------------===//

// CHECK-LABEL: func.func @constant_chunk(
// CHECK-NOT: arith.constant
// CHECK: ssm.selective_scan
// CHECK-NOT: chunk_size
// CHECK-SAME: {chunk = #ssm.chunk<static = 256>, delta_softplus}
func.func @constant_chunk(%u: tensor<?x?x8xf32>, %a: tensor<8x4xf32>, %b: tensor<?x?x1x4xf32>) -> tensor<?x?x8xf32> {
  %k = arith.constant 256 : index
  %y = ssm.selective_scan %u, %u, %a, %b, %b chunk_size(%k) {delta_softplus} : tensor<?x?x8xf32>, tensor<?x?x8xf32>,
      tensor<8x4xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x8xf32>
  return %y : tensor<?x?x8xf32>
}

// CHECK-LABEL: func.func @constant_ssd_chunk(
// CHECK: ssm.ssd
// CHECK-NOT: chunk_size
// CHECK-SAME: {chunk = #ssm.chunk<static = 1>}
func.func @constant_ssd_chunk(%x: tensor<?x?x8x4xf32>, %decay: tensor<?x?x8xf32>, %b: tensor<?x?x1x16xf32>)
    -> tensor<?x?x8x4xf32> {
  %k = arith.constant 1 : index
  %y = ssm.ssd %x decay(%decay : tensor<?x?x8xf32>) B(%b) C(%b) chunk_size(%k)
      : tensor<?x?x8x4xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x8x4xf32>
  return %y : tensor<?x?x8x4xf32>
}

// A chunk below 1 has no attribute; the lowering takes it as 1.
// CHECK-LABEL: func.func @chunk_of_zero(
// CHECK: %[[K:.+]] = arith.constant 0 : index
// CHECK: ssm.selective_scan {{.*}} chunk_size(%[[K]])
// CHECK-NOT: chunk =
// CHECK: return
func.func @chunk_of_zero(%u: tensor<?x?x8xf32>, %a: tensor<8x4xf32>, %b: tensor<?x?x1x4xf32>) -> tensor<?x?x8xf32> {
  %k = arith.constant 0 : index
  %y = ssm.selective_scan %u, %u, %a, %b, %b chunk_size(%k) : tensor<?x?x8xf32>, tensor<?x?x8xf32>,
      tensor<8x4xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x8xf32>
  return %y : tensor<?x?x8xf32>
}

// CHECK-LABEL: func.func @negative_chunk(
// CHECK: ssm.selective_scan {{.*}} chunk_size(%{{.+}})
func.func @negative_chunk(%u: tensor<?x?x8xf32>, %a: tensor<8x4xf32>, %b: tensor<?x?x1x4xf32>) -> tensor<?x?x8xf32> {
  %k = arith.constant -8 : index
  %y = ssm.selective_scan %u, %u, %a, %b, %b chunk_size(%k) : tensor<?x?x8xf32>, tensor<?x?x8xf32>,
      tensor<8x4xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x8xf32>
  return %y : tensor<?x?x8xf32>
}

// CHECK-LABEL: func.func @bound_chunk(
// CHECK: %[[K:.+]] = ssm.bind_chunk @scan(
// CHECK: ssm.selective_scan {{.*}} chunk_size(%[[K]])
func.func @bound_chunk(%u: tensor<?x?x8xf32>, %a: tensor<8x4xf32>, %b: tensor<?x?x1x4xf32>, %n: index) -> tensor<?x?x8xf32> {
  %k = ssm.bind_chunk @scan(%n, %n)
  %y = ssm.selective_scan %u, %u, %a, %b, %b chunk_size(%k) : tensor<?x?x8xf32>, tensor<?x?x8xf32>,
      tensor<8x4xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x8xf32>
  return %y : tensor<?x?x8xf32>
}

// -----

//===----------------------------------------------------------------------===//
// ssm.fused: unused results, unused and repeated inputs
//===----------------------------------------------------------------------===//

// CHECK-LABEL: func.func @fused_unused_result(
// CHECK-SAME: %[[X:.+]]: tensor<8xf32>)
// CHECK-NEXT: %[[Y:.+]] = ssm.fused ins(%[[X]] : tensor<8xf32>) score(<entropy = 1.000000e+00,
// CHECK-SAME: -> tensor<8xf32> attributes {test.note} {
// CHECK-NEXT: ^bb0(%[[A:.+]]: tensor<8xf32>):
// CHECK-NEXT: %[[E:.+]] = ssm.exp %[[A]]
// CHECK-NEXT: ssm.yield %[[E]] : tensor<8xf32>
// CHECK-NEXT: }
// CHECK-NEXT: return %[[Y]]
func.func @fused_unused_result(%x: tensor<8xf32>) -> tensor<8xf32> {
  %0, %1, %2 = ssm.fused ins(%x : tensor<8xf32>)
      score(<entropy = 1.0, intensity = 0.0, memory = 0.0, score = 1.0, threshold = 0.5>)
      -> tensor<8xf32>, tensor<8xf32>, tensor<8xf32> attributes {test.note} {
  ^bb0(%a: tensor<8xf32>):
    %s = ssm.silu %a : tensor<8xf32>
    %e = ssm.exp %a : tensor<8xf32>
    ssm.yield %s, %e, %a : tensor<8xf32>, tensor<8xf32>, tensor<8xf32>
  }
  return %1 : tensor<8xf32>
}

// An input whose only use was the dropped result goes with it.
// CHECK-LABEL: func.func @fused_unused_input(
// CHECK-SAME: %[[X:.+]]: tensor<8xf32>, %[[Y:.+]]: tensor<4xf32>, %[[Z:.+]]: tensor<2xf32>)
// CHECK-NEXT: ssm.fused ins(%[[X]] : tensor<8xf32>) -> tensor<8xf32> {
// CHECK-NEXT: ^bb0(%[[A:.+]]: tensor<8xf32>):
// CHECK-NEXT: ssm.exp %[[A]]
func.func @fused_unused_input(%x: tensor<8xf32>, %y: tensor<4xf32>, %z: tensor<2xf32>) -> tensor<8xf32> {
  %0, %1 = ssm.fused ins(%y, %x, %z : tensor<4xf32>, tensor<8xf32>, tensor<2xf32>) -> tensor<4xf32>, tensor<8xf32> {
  ^bb0(%b: tensor<4xf32>, %a: tensor<8xf32>, %c: tensor<2xf32>):
    %e = ssm.exp %a : tensor<8xf32>
    ssm.yield %b, %e : tensor<4xf32>, tensor<8xf32>
  }
  return %1 : tensor<8xf32>
}

// CHECK-LABEL: func.func @fused_repeated_input(
// CHECK-SAME: %[[X:.+]]: tensor<8xf32>, %[[V:.+]]: tensor<8xf32>)
// CHECK-NEXT: ssm.fused ins(%[[X]], %[[V]] : tensor<8xf32>, tensor<8xf32>) -> tensor<8xf32> {
// CHECK-NEXT: ^bb0(%[[A:.+]]: tensor<8xf32>, %[[B:.+]]: tensor<8xf32>):
// CHECK-NEXT: %[[P:.+]] = ssm.mul %[[A]], %[[B]]
// CHECK-NEXT: %[[Q:.+]] = ssm.add %[[P]], %[[A]]
// CHECK-NEXT: ssm.yield %[[Q]]
func.func @fused_repeated_input(%x: tensor<8xf32>, %v: tensor<8xf32>) -> tensor<8xf32> {
  %0 = ssm.fused ins(%x, %v, %x, %x : tensor<8xf32>, tensor<8xf32>, tensor<8xf32>, tensor<8xf32>) -> tensor<8xf32> {
  ^bb0(%a: tensor<8xf32>, %b: tensor<8xf32>, %c: tensor<8xf32>, %d: tensor<8xf32>):
    %p = ssm.mul %a, %b : tensor<8xf32>, tensor<8xf32>
    %q = ssm.add %p, %c : tensor<8xf32>, tensor<8xf32>
    ssm.yield %q : tensor<8xf32>
  }
  return %0 : tensor<8xf32>
}

// The first of two occurrences is unused: the second stays.
// CHECK-LABEL: func.func @fused_repeated_unused_input(
// CHECK-SAME: %[[X:.+]]: tensor<8xf32>)
// CHECK-NEXT: ssm.fused ins(%[[X]] : tensor<8xf32>) -> tensor<8xf32> {
// CHECK-NEXT: ^bb0(%[[A:.+]]: tensor<8xf32>):
// CHECK-NEXT: ssm.exp %[[A]]
func.func @fused_repeated_unused_input(%x: tensor<8xf32>) -> tensor<8xf32> {
  %0 = ssm.fused ins(%x, %x : tensor<8xf32>, tensor<8xf32>) -> tensor<8xf32> {
  ^bb0(%a: tensor<8xf32>, %b: tensor<8xf32>):
    %e = ssm.exp %b : tensor<8xf32>
    ssm.yield %e : tensor<8xf32>
  }
  return %0 : tensor<8xf32>
}

// What has an effect stays though nobody uses its result.
// CHECK-LABEL: func.func @fused_effect(
// CHECK: ssm.fused ins(%{{.+}} : tensor<8xf32>) {
// CHECK: ssm.observe @site
// CHECK-NEXT: }
func.func @fused_effect(%x: tensor<8xf32>) {
  %0 = ssm.fused ins(%x : tensor<8xf32>) -> tensor<8xf32> {
  ^bb0(%a: tensor<8xf32>):
    %o = ssm.observe @site %a : tensor<8xf32>
    ssm.yield %o : tensor<8xf32>
  }
  return
}

// CHECK-LABEL: func.func @fused_dead(
// CHECK-NEXT: return
func.func @fused_dead(%x: tensor<8xf32>) {
  %0 = ssm.fused ins(%x : tensor<8xf32>) -> tensor<8xf32> {
  ^bb0(%a: tensor<8xf32>):
    %e = ssm.exp %a : tensor<8xf32>
    ssm.yield %e : tensor<8xf32>
  }
  return
}

// CHECK-LABEL: func.func @fused_tight(
// CHECK: ssm.fused ins(%{{.+}}, %{{.+}} : tensor<8xf32>, tensor<8xf32>) -> tensor<8xf32>, tensor<8xf32> {
func.func @fused_tight(%x: tensor<8xf32>, %v: tensor<8xf32>) -> (tensor<8xf32>, tensor<8xf32>) {
  %0, %1 = ssm.fused ins(%x, %v : tensor<8xf32>, tensor<8xf32>) -> tensor<8xf32>, tensor<8xf32> {
  ^bb0(%a: tensor<8xf32>, %b: tensor<8xf32>):
    ssm.yield %b, %a : tensor<8xf32>, tensor<8xf32>
  }
  return %0, %1 : tensor<8xf32>, tensor<8xf32>
}

// -----

//===----------------------------------------------------------------------===//
// ssm.sample: at a temperature of 0, with no use of the next random numbers
//===----------------------------------------------------------------------===//

// CHECK-LABEL: func.func @sample_at_zero(
// CHECK-SAME: %[[X:[a-z0-9]+]]: tensor<2x8xf32>
// CHECK-NEXT: %[[Y:.+]] = ssm.argmax %[[X]] : tensor<2x8xf32> -> tensor<2xi32>
// CHECK-NEXT: return %[[Y]]
func.func @sample_at_zero(%x: tensor<2x8xf32>, %k: tensor<2xi32>, %p: tensor<2xf32>, %r: tensor<2x3xi64>) -> tensor<2xi32> {
  %t = arith.constant dense<[0.0, -1.0]> : tensor<2xf32>
  %y:2 = ssm.sample %x, %t, %k, %p, %r : tensor<2x8xf32>, tensor<2xf32>, tensor<2xi32>, tensor<2xf32>, tensor<2x3xi64> -> tensor<2xi32>, tensor<2x3xi64>
  return %y#0 : tensor<2xi32>
}

// CHECK-LABEL: func.func @sample_of_which_one_is_drawn(
// CHECK: ssm.sample
func.func @sample_of_which_one_is_drawn(%x: tensor<2x8xf32>, %k: tensor<2xi32>, %p: tensor<2xf32>, %r: tensor<2x3xi64>) -> tensor<2xi32> {
  %t = arith.constant dense<[0.0, 0.5]> : tensor<2xf32>
  %y:2 = ssm.sample %x, %t, %k, %p, %r : tensor<2x8xf32>, tensor<2xf32>, tensor<2xi32>, tensor<2xf32>, tensor<2x3xi64> -> tensor<2xi32>, tensor<2x3xi64>
  return %y#0 : tensor<2xi32>
}

// CHECK-LABEL: func.func @sample_that_goes_on(
// CHECK: ssm.sample
func.func @sample_that_goes_on(%x: tensor<2x8xf32>, %k: tensor<2xi32>, %p: tensor<2xf32>, %r: tensor<2x3xi64>) -> tensor<2x3xi64> {
  %t = arith.constant dense<0.0> : tensor<2xf32>
  %y:2 = ssm.sample %x, %t, %k, %p, %r : tensor<2x8xf32>, tensor<2xf32>, tensor<2xi32>, tensor<2xf32>, tensor<2x3xi64> -> tensor<2xi32>, tensor<2x3xi64>
  return %y#1 : tensor<2x3xi64>
}

// -----

//===----------------------------------------------------------------------===//
// Effects
//===----------------------------------------------------------------------===//

// Pure ops without uses die, observations stay, and a chunk nobody uses need
// not be asked for.
// CHECK-LABEL: func.func @effects(
// CHECK-NEXT: ssm.observe @site
// CHECK-NEXT: return
func.func @effects(%x: tensor<8xf32>, %n: index) {
  %0 = ssm.silu %x : tensor<8xf32>
  %1 = ssm.observe @site %x : tensor<8xf32>
  %2 = ssm.bind_chunk @scan(%n, %n)
  return
}
