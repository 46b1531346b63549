// Every diagnostic of the verifiers and of the parser of attributes.

// RUN: corey-opt %s -split-input-file -verify-diagnostics

//===----------------------------------------------------------------------===//
// Shapes that do not follow the dimension line of an op
//===----------------------------------------------------------------------===//

func.func @rank_of_operand(%x: tensor<?x8xf32>, %w: tensor<8x4xf32>) {
  // expected-error @below {{'ssm.causal_conv' op expected operand 'x' to have shape [B, L, D], got 'tensor<?x8xf32>'}}
  %y = ssm.causal_conv %x, %w : tensor<?x8xf32>, tensor<8x4xf32> -> tensor<?x8xf32>
  return
}

// -----

func.func @rank_of_result(%x: tensor<?x?x8xf32>, %w: tensor<8x4xf32>) {
  // expected-error @below {{'ssm.causal_conv' op expected result 'y' to have shape [B, L, D], got 'tensor<?x8xf32>'}}
  %y = ssm.causal_conv %x, %w : tensor<?x?x8xf32>, tensor<8x4xf32> -> tensor<?x8xf32>
  return
}

// -----

func.func @rank_of_state(%x: tensor<?x?x8xf32>, %w: tensor<8x4xf32>, %s: tensor<?x8xf32>) {
  // expected-error @below {{'ssm.causal_conv' op expected operand 'initial_state' to have shape [B, W-1, D], got 'tensor<?x8xf32>'}}
  %y = ssm.causal_conv %x, %w initial_state(%s : tensor<?x8xf32>) : tensor<?x?x8xf32>, tensor<8x4xf32> -> tensor<?x?x8xf32>
  return
}

// -----

func.func @rank_below_ellipsis(%x: tensor<f32>, %w: tensor<8x4xf32>) {
  // expected-error @below {{'ssm.projection' op expected operand 'x' to have shape [..., K], got 'tensor<f32>'}}
  %y = ssm.projection %x, %w : tensor<f32>, tensor<8x4xf32> -> tensor<8xf32>
  return
}

// -----

// An optional dimension is there or not; there is no other.
func.func @rank_of_optional(%x: tensor<?x8xf32>, %w: tensor<4x8xi8>, %s: tensor<4x1xf32>) {
  // expected-error @below {{'ssm.projection' op expected operand 'weight_scale' to have shape [(M)], got 'tensor<4x1xf32>'}}
  %y = ssm.projection %x, %w weight_scale(%s : tensor<4x1xf32>) : tensor<?x8xf32>, tensor<4x8xi8> -> tensor<?x4xf32>
  return
}

// -----

func.func @rank_of_skip(%x: tensor<?x?x8x4xf32>, %dt: tensor<?x?x8xf32>, %a: tensor<8xf32>,
    %b: tensor<?x?x1x16xf32>, %d: tensor<f32>) {
  // expected-error @below {{'ssm.ssd' op expected operand 'D' to have shape [H, (P)], got 'tensor<f32>'}}
  %y = ssm.ssd %x dt(%dt : tensor<?x?x8xf32>) A(%a : tensor<8xf32>) B(%b) C(%b) D(%d : tensor<f32>) : tensor<?x?x8x4xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x8x4xf32>
  return
}

// -----

func.func @rank_of_prefix(%x: tensor<?x?x8xf32>, %w: tensor<4x8xf32>, %r: tensor<?x4xf32>) {
  // expected-error @below {{'ssm.projection' op expected operand 'residual' to have rank 3 like 'x', got 'tensor<?x4xf32>'}}
  %y = ssm.projection %x, %w residual(%r : tensor<?x4xf32>) : tensor<?x?x8xf32>, tensor<4x8xf32> -> tensor<?x?x4xf32>
  return
}

// -----

func.func @rank_of_prefix_in_result(%ids: tensor<?x?xi32>, %t: tensor<256x8xf32>) {
  // expected-error @below {{'ssm.embedding' op expected result 'y' to have rank 3 like 'ids', got 'tensor<?x8xf32>'}}
  %y = ssm.embedding %ids, %t : tensor<?x?xi32>, tensor<256x8xf32> -> tensor<?x8xf32>
  return
}

// -----

func.func @size_in_prefix(%x: tensor<2x?x8xf32>, %w: tensor<8xf32>, %r: tensor<3x?x8xf32>) {
  // expected-error @below {{'ssm.rms_norm' op expected dimension 0 of operand 'residual' to be 2 (from 'x'), got 3}}
  %y = ssm.rms_norm %x, %w residual(%r : tensor<3x?x8xf32>) : tensor<2x?x8xf32>, tensor<8xf32> -> tensor<2x?x8xf32>
  return
}

// -----

// A size may come from any operand: here not from the first.
func.func @size_in_prefix_of_result(%x: tensor<?x?x8xf32>, %w: tensor<8xf32>, %r: tensor<3x?x8xf32>) {
  // expected-error @below {{'ssm.rms_norm' op expected dimension 0 of result 'residual_out' to be 3 (from 'residual'), got 4}}
  %y, %s = ssm.rms_norm %x, %w residual(%r : tensor<3x?x8xf32>) : tensor<?x?x8xf32>, tensor<8xf32> -> tensor<?x?x8xf32>, tensor<4x?x8xf32>
  return
}

// -----

func.func @dynamic_channels(%x: tensor<?x?x?xf32>, %w: tensor<8x4xf32>) {
  // expected-error @below {{'ssm.causal_conv' op expected dimension 2 (D) of operand 'x' to be static, got 'tensor<?x?x?xf32>'}}
  %y = ssm.causal_conv %x, %w : tensor<?x?x?xf32>, tensor<8x4xf32> -> tensor<?x?x?xf32>
  return
}

// -----

func.func @dynamic_result(%x: tensor<?x8xf32>, %w: tensor<4x8xf32>) {
  // expected-error @below {{'ssm.projection' op expected dimension 1 (M) of result 'y' to be static, got 'tensor<?x?xf32>'}}
  %y = ssm.projection %x, %w : tensor<?x8xf32>, tensor<4x8xf32> -> tensor<?x?xf32>
  return
}

// -----

// The last axis is static even where all the others are free.
func.func @dynamic_last_axis(%x: tensor<?x?xf32>) {
  // expected-error @below {{'ssm.hadamard' op expected dimension 1 (D) of operand 'x' to be static, got 'tensor<?x?xf32>'}}
  %y = ssm.hadamard %x {block = 1 : i64} : tensor<?x?xf32> -> tensor<?x?xf32>
  return
}

// -----

func.func @dynamic_draws(%x: tensor<?x?xf32>, %t: tensor<?xf32>, %k: tensor<?xi32>, %r: tensor<?x3xi64>) {
  // expected-error @below {{'ssm.sample' op expected dimension 1 (V) of operand 'logits' to be static, got 'tensor<?x?xf32>'}}
  %y:2 = ssm.sample %x, %t, %k, %t, %r : tensor<?x?xf32>, tensor<?xf32>, tensor<?xi32>, tensor<?xf32>, tensor<?x3xi64> -> tensor<?xi32>, tensor<?x3xi64>
  return
}

// -----

func.func @other_rows(%x: tensor<4x8xf32>, %t: tensor<4xf32>, %k: tensor<5xi32>, %r: tensor<4x3xi64>) {
  // expected-error @below {{'ssm.sample' op expected dimension 0 of operand 'top_k' to be 4 (from 'logits'), got 5}}
  %y:2 = ssm.sample %x, %t, %k, %t, %r : tensor<4x8xf32>, tensor<4xf32>, tensor<5xi32>, tensor<4xf32>, tensor<4x3xi64> -> tensor<4xi32>, tensor<4x3xi64>
  return
}

// -----

func.func @short_counter(%x: tensor<?x8xf32>, %t: tensor<?xf32>, %k: tensor<?xi32>, %r: tensor<?x2xi64>) {
  // expected-error @below {{'ssm.sample' op expected dimension 1 of operand 'random' to be 3, got 2}}
  %y:2 = ssm.sample %x, %t, %k, %t, %r : tensor<?x8xf32>, tensor<?xf32>, tensor<?xi32>, tensor<?xf32>, tensor<?x2xi64> -> tensor<?xi32>, tensor<?x3xi64>
  return
}

// -----

func.func @narrow_temperature(%x: tensor<?x8xf32>, %t: tensor<?xf16>, %k: tensor<?xi32>, %p: tensor<?xf32>, %r: tensor<?x3xi64>) {
  // expected-error @below {{'ssm.sample' op operand #1 must be ranked tensor of 32-bit float values, but got 'tensor<?xf16>'}}
  %y:2 = ssm.sample %x, %t, %k, %p, %r : tensor<?x8xf32>, tensor<?xf16>, tensor<?xi32>, tensor<?xf32>, tensor<?x3xi64> -> tensor<?xi32>, tensor<?x3xi64>
  return
}

// -----

func.func @many_logits(%x: tensor<?x1073741825xf32>, %t: tensor<?xf32>, %k: tensor<?xi32>, %r: tensor<?x3xi64>) {
  // expected-error @below {{'ssm.sample' op expected at most 1073741824 logits in a row, got 1073741825}}
  %y:2 = ssm.sample %x, %t, %k, %t, %r : tensor<?x1073741825xf32>, tensor<?xf32>, tensor<?xi32>, tensor<?xf32>, tensor<?x3xi64> -> tensor<?xi32>, tensor<?x3xi64>
  return
}

// -----

func.func @dynamic_vocabulary(%x: tensor<?x?xf32>) {
  // expected-error @below {{'ssm.argmax' op expected dimension 1 (V) of operand 'x' to be static, got 'tensor<?x?xf32>'}}
  %y = ssm.argmax %x : tensor<?x?xf32> -> tensor<?xi32>
  return
}

// -----

// Only the rows of a table may be any number.
func.func @dynamic_table(%ids: tensor<?xi32>, %t: tensor<?x?xf32>) {
  // expected-error @below {{'ssm.embedding' op expected dimension 1 (D) of operand 'table' to be static, got 'tensor<?x?xf32>'}}
  %y = ssm.embedding %ids, %t : tensor<?xi32>, tensor<?x?xf32> -> tensor<?x?xf32>
  return
}

// -----

func.func @empty_channels(%x: tensor<?x?x0xf32>, %w: tensor<0x4xf32>) {
  // expected-error @below {{'ssm.causal_conv' op expected dimension 2 (D) of operand 'x' to be at least 1, got 0}}
  %y = ssm.causal_conv %x, %w : tensor<?x?x0xf32>, tensor<0x4xf32> -> tensor<?x?x0xf32>
  return
}

// -----

func.func @empty_groups(%u: tensor<?x?x8xf32>, %a: tensor<8x4xf32>, %b: tensor<?x?x0x4xf32>) {
  // expected-error @below {{'ssm.selective_scan' op expected dimension 2 (G) of operand 'B' to be at least 1, got 0}}
  %y = ssm.selective_scan %u, %u, %a, %b, %b : tensor<?x?x8xf32>, tensor<?x?x8xf32>, tensor<8x4xf32>, tensor<?x?x0x4xf32>, tensor<?x?x0x4xf32> -> tensor<?x?x8xf32>
  return
}

// -----

func.func @size_of_symbol(%x: tensor<?x?x8xf32>, %w: tensor<9x4xf32>) {
  // expected-error @below {{'ssm.causal_conv' op expected dimension 0 of operand 'weight' to be D = 8 (from 'x'), got 9}}
  %y = ssm.causal_conv %x, %w : tensor<?x?x8xf32>, tensor<9x4xf32> -> tensor<?x?x8xf32>
  return
}

// -----

func.func @size_of_batch(%u: tensor<2x?x8xf32>, %delta: tensor<3x?x8xf32>, %a: tensor<8x4xf32>, %b: tensor<?x?x1x4xf32>) {
  // expected-error @below {{'ssm.selective_scan' op expected dimension 0 of operand 'delta' to be B = 2 (from 'u'), got 3}}
  %y = ssm.selective_scan %u, %delta, %a, %b, %b : tensor<2x?x8xf32>, tensor<3x?x8xf32>, tensor<8x4xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<2x?x8xf32>
  return
}

// -----

func.func @size_of_length_in_result(%u: tensor<?x16x8xf32>, %a: tensor<8x4xf32>, %b: tensor<?x16x1x4xf32>) {
  // expected-error @below {{'ssm.selective_scan' op expected dimension 1 of result 'y' to be L = 16 (from 'u'), got 15}}
  %y = ssm.selective_scan %u, %u, %a, %b, %b : tensor<?x16x8xf32>, tensor<?x16x8xf32>, tensor<8x4xf32>, tensor<?x16x1x4xf32>, tensor<?x16x1x4xf32> -> tensor<?x15x8xf32>
  return
}

// -----

func.func @size_of_sum(%x: tensor<?x?x8xf32>, %w: tensor<8x4xf32>, %s: tensor<?x4x8xf32>) {
  // expected-error @below {{'ssm.causal_conv' op expected dimension 1 of operand 'initial_state' to be W-1 = 3 (from 'weight'), got 4}}
  %y = ssm.causal_conv %x, %w initial_state(%s : tensor<?x4x8xf32>) : tensor<?x?x8xf32>, tensor<8x4xf32> -> tensor<?x?x8xf32>
  return
}

// -----

func.func @size_of_state(%u: tensor<2x?x8xf32>, %a: tensor<8x4xf32>, %b: tensor<2x?x1x4xf32>) {
  // expected-error @below {{'ssm.selective_scan' op expected dimension 0 of result 'last_state' to be B = 2 (from 'u'), got 3}}
  %y, %h = ssm.selective_scan %u, %u, %a, %b, %b : tensor<2x?x8xf32>, tensor<2x?x8xf32>, tensor<8x4xf32>, tensor<2x?x1x4xf32>, tensor<2x?x1x4xf32> -> tensor<2x?x8xf32>, tensor<3x8x4xf32>
  return
}

// -----

// Packed sequences: B is 1, and a state belongs to a sequence.
func.func @packed_batch(%x: tensor<2x?x8xf32>, %w: tensor<8x4xf32>, %starts: tensor<?xi32>) {
  // expected-error @below {{'ssm.causal_conv' op expected dimension 0 of operand 'x' to be 1, got 2}}
  %y = ssm.causal_conv %x, %w seq_starts(%starts : tensor<?xi32>) : tensor<2x?x8xf32>, tensor<8x4xf32> -> tensor<2x?x8xf32>
  return
}

// -----

func.func @packed_state(%x: tensor<1x?x8xf32>, %w: tensor<8x4xf32>, %starts: tensor<3xi32>) {
  // expected-error @below {{'ssm.causal_conv' op expected dimension 0 of result 'final_state' to be S = 3 (from 'seq_starts'), got 1}}
  %y, %s = ssm.causal_conv %x, %w seq_starts(%starts : tensor<3xi32>) : tensor<1x?x8xf32>, tensor<8x4xf32> -> tensor<1x?x8xf32>, tensor<1x3x8xf32>
  return
}

// -----

func.func @packed_scan(%u: tensor<4x?x8xf32>, %a: tensor<8x4xf32>, %b: tensor<4x?x1x4xf32>, %starts: tensor<?xi32>) {
  // expected-error @below {{'ssm.selective_scan' op expected dimension 0 of operand 'u' to be 1, got 4}}
  %y = ssm.selective_scan %u, %u, %a, %b, %b seq_starts(%starts : tensor<?xi32>) : tensor<4x?x8xf32>, tensor<4x?x8xf32>, tensor<8x4xf32>, tensor<4x?x1x4xf32>, tensor<4x?x1x4xf32> -> tensor<4x?x8xf32>
  return
}

// -----

func.func @element_type_of_x(%x: tensor<?x8xbf16>, %w: tensor<4x8xbf16>) {
  // expected-error @below {{'ssm.projection' op expected result 'y' to have element type 'bf16', got 'f32'}}
  %y = ssm.projection %x, %w : tensor<?x8xbf16>, tensor<4x8xbf16> -> tensor<?x4xf32>
  return
}

// -----

func.func @element_type_of_residual(%x: tensor<?x8xbf16>, %w: tensor<4x8xbf16>, %r: tensor<?x4xf32>) {
  // expected-error @below {{'ssm.projection' op expected result 'y' to have element type 'f32', got 'bf16'}}
  %y = ssm.projection %x, %w residual(%r : tensor<?x4xf32>) : tensor<?x8xbf16>, tensor<4x8xbf16> -> tensor<?x4xbf16>
  return
}

// -----

func.func @element_type_of_second_result(%x: tensor<?x8xbf16>, %w: tensor<8xbf16>, %r: tensor<?x8xf32>) {
  // expected-error @below {{'ssm.rms_norm' op expected result 'residual_out' to have element type 'f32', got 'bf16'}}
  %y, %s = ssm.rms_norm %x, %w residual(%r : tensor<?x8xf32>) : tensor<?x8xbf16>, tensor<8xbf16> -> tensor<?x8xbf16>, tensor<?x8xbf16>
  return
}

// -----

func.func @element_type_of_table(%ids: tensor<?xi32>, %t: tensor<256x8xbf16>) {
  // expected-error @below {{'ssm.embedding' op expected result 'y' to have element type 'bf16', got 'f32'}}
  %y = ssm.embedding %ids, %t : tensor<?xi32>, tensor<256x8xbf16> -> tensor<?x8xf32>
  return
}

// -----

//===----------------------------------------------------------------------===//
// Scans
//===----------------------------------------------------------------------===//

func.func @two_chunks(%u: tensor<?x?x8xf32>, %a: tensor<8x4xf32>, %b: tensor<?x?x1x4xf32>, %k: index) {
  // expected-error @below {{'ssm.selective_scan' op expected at most one of attribute 'chunk' and operand 'chunk_size', got both}}
  %y = ssm.selective_scan %u, %u, %a, %b, %b chunk_size(%k) {chunk = #ssm.chunk<static = 4>} : tensor<?x?x8xf32>, tensor<?x?x8xf32>, tensor<8x4xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x8xf32>
  return
}

// -----

func.func @two_chunks_of_ssd(%x: tensor<?x?x8x4xf32>, %decay: tensor<?x?x8xf32>, %b: tensor<?x?x1x16xf32>, %k: index) {
  // expected-error @below {{'ssm.ssd' op expected at most one of attribute 'chunk' and operand 'chunk_size', got both}}
  %y = ssm.ssd %x decay(%decay : tensor<?x?x8xf32>) B(%b) C(%b) chunk_size(%k) {chunk = #ssm.chunk<runtime = @s>} : tensor<?x?x8x4xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x8x4xf32>
  return
}

// -----

func.func @groups(%u: tensor<?x?x8xf32>, %a: tensor<8x4xf32>, %b: tensor<?x?x3x4xf32>) {
  // expected-error @below {{'ssm.selective_scan' op expected D to be a multiple of G = 3, got D = 8}}
  %y = ssm.selective_scan %u, %u, %a, %b, %b : tensor<?x?x8xf32>, tensor<?x?x8xf32>, tensor<8x4xf32>, tensor<?x?x3x4xf32>, tensor<?x?x3x4xf32> -> tensor<?x?x8xf32>
  return
}

// -----

func.func @groups_of_ssd(%x: tensor<?x?x8x4xf32>, %decay: tensor<?x?x8xf32>, %b: tensor<?x?x16x16xf32>) {
  // expected-error @below {{'ssm.ssd' op expected H to be a multiple of G = 16, got H = 8}}
  %y = ssm.ssd %x decay(%decay : tensor<?x?x8xf32>) B(%b) C(%b) : tensor<?x?x8x4xf32>, tensor<?x?x16x16xf32>, tensor<?x?x16x16xf32> -> tensor<?x?x8x4xf32>
  return
}

// -----

func.func @decay_and_dt(%x: tensor<?x?x8x4xf32>, %decay: tensor<?x?x8xf32>, %b: tensor<?x?x1x16xf32>) {
  // expected-error @below {{'ssm.ssd' op expected no 'dt' in the discretized form, which takes 'decay'}}
  %y = ssm.ssd %x dt(%decay : tensor<?x?x8xf32>) decay(%decay : tensor<?x?x8xf32>) B(%b) C(%b) : tensor<?x?x8x4xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x8x4xf32>
  return
}

// -----

func.func @decay_and_a(%x: tensor<?x?x8x4xf32>, %decay: tensor<?x?x8xf32>, %a: tensor<8xf32>, %b: tensor<?x?x1x16xf32>) {
  // expected-error @below {{'ssm.ssd' op expected no 'A' in the discretized form, which takes 'decay'}}
  %y = ssm.ssd %x A(%a : tensor<8xf32>) decay(%decay : tensor<?x?x8xf32>) B(%b) C(%b) : tensor<?x?x8x4xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x8x4xf32>
  return
}

// -----

func.func @decay_and_bias(%x: tensor<?x?x8x4xf32>, %decay: tensor<?x?x8xf32>, %bias: tensor<8xf32>, %b: tensor<?x?x1x16xf32>) {
  // expected-error @below {{'ssm.ssd' op expected no 'dt_bias' in the discretized form, which takes 'decay'}}
  %y = ssm.ssd %x decay(%decay : tensor<?x?x8xf32>) B(%b) C(%b) dt_bias(%bias : tensor<8xf32>) : tensor<?x?x8x4xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x8x4xf32>
  return
}

// -----

func.func @decay_and_softplus(%x: tensor<?x?x8x4xf32>, %decay: tensor<?x?x8xf32>, %b: tensor<?x?x1x16xf32>) {
  // expected-error @below {{'ssm.ssd' op expected no 'dt_softplus' in the discretized form, which takes 'decay'}}
  %y = ssm.ssd %x decay(%decay : tensor<?x?x8xf32>) B(%b) C(%b) {dt_softplus} : tensor<?x?x8x4xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x8x4xf32>
  return
}

// -----

func.func @decay_and_limit(%x: tensor<?x?x8x4xf32>, %decay: tensor<?x?x8xf32>, %b: tensor<?x?x1x16xf32>) {
  // expected-error @below {{'ssm.ssd' op expected no 'dt_limit' in the discretized form, which takes 'decay'}}
  %y = ssm.ssd %x decay(%decay : tensor<?x?x8xf32>) B(%b) C(%b) {dt_limit = array<f64: 0.0, 1.0>} : tensor<?x?x8x4xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x8x4xf32>
  return
}

// -----

func.func @no_dt(%x: tensor<?x?x8x4xf32>, %a: tensor<8xf32>, %b: tensor<?x?x1x16xf32>) {
  // expected-error @below {{'ssm.ssd' op expected 'dt', or 'decay' for the discretized form}}
  %y = ssm.ssd %x A(%a : tensor<8xf32>) B(%b) C(%b) : tensor<?x?x8x4xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x8x4xf32>
  return
}

// -----

func.func @no_a(%x: tensor<?x?x8x4xf32>, %dt: tensor<?x?x8xf32>, %b: tensor<?x?x1x16xf32>) {
  // expected-error @below {{'ssm.ssd' op expected 'A', or 'decay' for the discretized form}}
  %y = ssm.ssd %x dt(%dt : tensor<?x?x8xf32>) B(%b) C(%b) : tensor<?x?x8x4xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x8x4xf32>
  return
}

// -----

func.func @no_step_at_all(%x: tensor<?x?x8x4xf32>, %b: tensor<?x?x1x16xf32>) {
  // expected-error @below {{'ssm.ssd' op expected 'dt', or 'decay' for the discretized form}}
  %y = ssm.ssd %x B(%b) C(%b) : tensor<?x?x8x4xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x8x4xf32>
  return
}

// -----

func.func @limit_out_of_order(%x: tensor<?x?x8x4xf32>, %dt: tensor<?x?x8xf32>, %a: tensor<8xf32>, %b: tensor<?x?x1x16xf32>) {
  // expected-error @below {{'ssm.ssd' op expected 'dt_limit' to be [lo, hi] with lo <= hi, got [5.000000e-01, 2.500000e-01]}}
  %y = ssm.ssd %x dt(%dt : tensor<?x?x8xf32>) A(%a : tensor<8xf32>) B(%b) C(%b) {dt_limit = array<f64: 0.5, 0.25>} : tensor<?x?x8x4xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x8x4xf32>
  return
}

// -----

func.func @limit_of_one(%x: tensor<?x?x8x4xf32>, %dt: tensor<?x?x8xf32>, %a: tensor<8xf32>, %b: tensor<?x?x1x16xf32>) {
  // expected-error @below {{'ssm.ssd' op expected 'dt_limit' to be [lo, hi] with lo <= hi, got [5.000000e-01]}}
  %y = ssm.ssd %x dt(%dt : tensor<?x?x8xf32>) A(%a : tensor<8xf32>) B(%b) C(%b) {dt_limit = array<f64: 0.5>} : tensor<?x?x8x4xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x8x4xf32>
  return
}

// -----

func.func @limit_not_a_number(%x: tensor<?x?x8x4xf32>, %dt: tensor<?x?x8xf32>, %a: tensor<8xf32>, %b: tensor<?x?x1x16xf32>) {
  // expected-error @below {{'ssm.ssd' op expected 'dt_limit' to be [lo, hi] with lo <= hi, got [nan, 2.500000e-01]}}
  %y = ssm.ssd %x dt(%dt : tensor<?x?x8xf32>) A(%a : tensor<8xf32>) B(%b) C(%b) {dt_limit = array<f64: 0x7FF8000000000000, 0.25>} : tensor<?x?x8x4xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x8x4xf32>
  return
}

// -----

func.func @tile(%x: tensor<?x?x8x4xf32>, %dt: tensor<?x?x8xf32>, %a: tensor<8xf32>, %b: tensor<?x?x1x16xf32>) {
  // expected-error @below {{'ssm.ssd' op expected 'tile' to be at least 1, got 0}}
  %y = ssm.ssd %x dt(%dt : tensor<?x?x8xf32>) A(%a : tensor<8xf32>) B(%b) C(%b) {tile = 0 : i64} : tensor<?x?x8x4xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x8x4xf32>
  return
}

// -----

func.func @width_1(%x: tensor<?x?x8xf32>, %w: tensor<8x1xf32>) {
  // expected-error @below {{'ssm.causal_conv' op expected a width W from 2 to 4, got 1}}
  %y = ssm.causal_conv %x, %w : tensor<?x?x8xf32>, tensor<8x1xf32> -> tensor<?x?x8xf32>
  return
}

// -----

func.func @width_5(%x: tensor<?x?x8xf32>, %w: tensor<8x5xf32>) {
  // expected-error @below {{'ssm.causal_conv' op expected a width W from 2 to 4, got 5}}
  %y = ssm.causal_conv %x, %w : tensor<?x?x8xf32>, tensor<8x5xf32> -> tensor<?x?x8xf32>
  return
}

// -----

//===----------------------------------------------------------------------===//
// Projections, norms, rotations
//===----------------------------------------------------------------------===//

func.func @quantized_without_scale(%x: tensor<?x8xf32>, %w: tensor<4x8xi8>) {
  // expected-error @below {{'ssm.projection' op expected 'weight_scale' for a weight of type 'i8'}}
  %y = ssm.projection %x, %w : tensor<?x8xf32>, tensor<4x8xi8> -> tensor<?x4xf32>
  return
}

// -----

func.func @narrow_without_scale(%x: tensor<?x8xf32>, %w: tensor<4x8xf8E4M3FN>) {
  // expected-error @below {{'ssm.projection' op expected 'weight_scale' for a weight of type 'f8E4M3FN'}}
  %y = ssm.projection %x, %w : tensor<?x8xf32>, tensor<4x8xf8E4M3FN> -> tensor<?x4xf32>
  return
}

// -----

func.func @scale_without_quantization(%x: tensor<?x8xf32>, %w: tensor<4x8xbf16>, %s: tensor<f32>) {
  // expected-error @below {{'ssm.projection' op expected no 'weight_scale' for a weight of type 'bf16'}}
  %y = ssm.projection %x, %w weight_scale(%s : tensor<f32>) : tensor<?x8xf32>, tensor<4x8xbf16> -> tensor<?x4xf32>
  return
}

// -----

func.func @scale_size(%x: tensor<?x8xf32>, %w: tensor<4x8xi8>, %s: tensor<8xf32>) {
  // expected-error @below {{'ssm.projection' op expected dimension 0 of operand 'weight_scale' to be M = 4 (from 'weight'), got 8}}
  %y = ssm.projection %x, %w weight_scale(%s : tensor<8xf32>) : tensor<?x8xf32>, tensor<4x8xi8> -> tensor<?x4xf32>
  return
}

// -----

func.func @eps(%x: tensor<?x8xf32>, %w: tensor<8xf32>) {
  // expected-error @below {{'ssm.rms_norm' op expected 'eps' to be at least 0, got -5.000000e-01}}
  %y = ssm.rms_norm %x, %w {eps = -0.5 : f32} : tensor<?x8xf32>, tensor<8xf32> -> tensor<?x8xf32>
  return
}

// -----

func.func @eps_not_a_number(%x: tensor<?x8xf32>, %w: tensor<8xf32>) {
  // expected-error @below {{'ssm.rms_norm' op expected 'eps' to be at least 0, got nan}}
  %y = ssm.rms_norm %x, %w {eps = 0x7FC00000 : f32} : tensor<?x8xf32>, tensor<8xf32> -> tensor<?x8xf32>
  return
}

// -----

func.func @group_size(%x: tensor<?x8xf32>, %w: tensor<8xf32>) {
  // expected-error @below {{'ssm.rms_norm' op expected 'group_size' to divide D = 8, got 3}}
  %y = ssm.rms_norm %x, %w {group_size = 3 : i64} : tensor<?x8xf32>, tensor<8xf32> -> tensor<?x8xf32>
  return
}

// -----

func.func @group_size_zero(%x: tensor<?x8xf32>, %w: tensor<8xf32>) {
  // expected-error @below {{'ssm.rms_norm' op expected 'group_size' to divide D = 8, got 0}}
  %y = ssm.rms_norm %x, %w {group_size = 0 : i64} : tensor<?x8xf32>, tensor<8xf32> -> tensor<?x8xf32>
  return
}

// -----

func.func @gate(%x: tensor<?x8xf32>, %w: tensor<8xf32>) {
  // expected-error @below {{'ssm.rms_norm' op expected a gate 'z' for 'norm_before_gate'}}
  %y = ssm.rms_norm %x, %w {norm_before_gate} : tensor<?x8xf32>, tensor<8xf32> -> tensor<?x8xf32>
  return
}

// -----

func.func @residual_out(%x: tensor<?x8xf32>, %w: tensor<8xf32>) {
  // expected-error @below {{'ssm.rms_norm' op expected a 'residual' for result 'residual_out'}}
  %y, %r = ssm.rms_norm %x, %w : tensor<?x8xf32>, tensor<8xf32> -> tensor<?x8xf32>, tensor<?x8xf32>
  return
}

// -----

func.func @block(%x: tensor<?x12xf32>) {
  // expected-error @below {{'ssm.hadamard' op expected 'block' to be a power of two that divides D = 12, got 3}}
  %y = ssm.hadamard %x {block = 3 : i64} : tensor<?x12xf32> -> tensor<?x12xf32>
  return
}

// -----

func.func @block_does_not_divide(%x: tensor<?x12xf32>) {
  // expected-error @below {{'ssm.hadamard' op expected 'block' to be a power of two that divides D = 12, got 8}}
  %y = ssm.hadamard %x {block = 8 : i64} : tensor<?x12xf32> -> tensor<?x12xf32>
  return
}

// -----

func.func @block_zero(%x: tensor<?x12xf32>) {
  // expected-error @below {{'ssm.hadamard' op expected 'block' to be a power of two that divides D = 12, got 0}}
  %y = ssm.hadamard %x {block = 0 : i64} : tensor<?x12xf32> -> tensor<?x12xf32>
  return
}

// -----

func.func @block_negative(%x: tensor<?x12xf32>) {
  // expected-error @below {{'ssm.hadamard' op expected 'block' to be a power of two that divides D = 12, got -4}}
  %y = ssm.hadamard %x {block = -4 : i64} : tensor<?x12xf32> -> tensor<?x12xf32>
  return
}

// -----

//===----------------------------------------------------------------------===//
// Elementwise ops
//===----------------------------------------------------------------------===//

func.func @broadcast(%x: tensor<?x8xf32>, %v: tensor<4xf32>) {
  // expected-error @below {{'ssm.add' op expected 'rhs' to have the trailing axes of 'lhs' 'tensor<?x8xf32>', got 'tensor<4xf32>'}}
  %y = ssm.add %x, %v : tensor<?x8xf32>, tensor<4xf32>
  return
}

// -----

// Not an axis in front of the trailing ones, and no axis of size 1 either.
func.func @broadcast_leading(%x: tensor<?x8xf32>, %v: tensor<?x1xf32>) {
  // expected-error @below {{'ssm.sub' op expected 'rhs' to have the trailing axes of 'lhs' 'tensor<?x8xf32>', got 'tensor<?x1xf32>'}}
  %y = ssm.sub %x, %v : tensor<?x8xf32>, tensor<?x1xf32>
  return
}

// -----

func.func @broadcast_lhs(%x: tensor<8xf32>, %v: tensor<?x8xf32>) {
  // expected-error @below {{'ssm.mul' op expected 'rhs' to have the trailing axes of 'lhs' 'tensor<8xf32>', got 'tensor<?x8xf32>'}}
  %y = ssm.mul %x, %v : tensor<8xf32>, tensor<?x8xf32>
  return
}

// -----

func.func @result_like_lhs(%x: tensor<8xbf16>, %v: tensor<8xf32>) {
  // expected-error @below {{'ssm.mul' op expected result 'y' to have type 'tensor<8xbf16>' like 'lhs', got 'tensor<8xf32>'}}
  %y = "ssm.mul"(%x, %v) : (tensor<8xbf16>, tensor<8xf32>) -> tensor<8xf32>
  return
}

// -----

func.func @unary_result(%x: tensor<8xbf16>) {
  // expected-error @below {{'ssm.neg' op requires the same type for all operands and results}}
  %y = "ssm.neg"(%x) : (tensor<8xbf16>) -> tensor<8xf32>
  return
}

// -----

func.func @unary_result_shape(%x: tensor<?xf16>) {
  // expected-error @below {{'ssm.neg' op inferred type(s) 'tensor<?xf16>' are incompatible with return type(s) of operation 'tensor<4xf16>'}}
  // expected-error @below {{'ssm.neg' op failed to infer returned types}}
  %y = "ssm.neg"(%x) : (tensor<?xf16>) -> tensor<4xf16>
  return
}

// -----

func.func @cast_shape(%x: tensor<8xbf16>) {
  // expected-error @below {{'ssm.cast' op requires the same shape for all operands and results}}
  %y = ssm.cast %x : tensor<8xbf16> to tensor<4xf32>
  return
}

// -----

func.func @observe_result(%x: tensor<8xbf16>) {
  // expected-error @below {{'ssm.observe' op requires the same type for all operands and results}}
  %y = "ssm.observe"(%x) {site = @s} : (tensor<8xbf16>) -> tensor<8xf32>
  return
}

// -----

//===----------------------------------------------------------------------===//
// Quantization
//===----------------------------------------------------------------------===//

func.func @quantize_rank(%x: tensor<f32>) {
  // expected-error @below {{'ssm.quantize' op expected at least one axis, got 'tensor<f32>'}}
  %q, %s = ssm.quantize %x tensor : tensor<f32> -> tensor<i8>, tensor<f32>
  return
}

// -----

func.func @quantize_shape(%x: tensor<?x8xf32>) {
  // expected-error @below {{'ssm.quantize' op expected 'q' and 'x' to have one shape, got 'tensor<?x4xi8>' and 'tensor<?x8xf32>'}}
  %q, %s = ssm.quantize %x tensor : tensor<?x8xf32> -> tensor<?x4xi8>, tensor<f32>
  return
}

// -----

func.func @scale_of_tensor(%x: tensor<?x8xf32>) {
  // expected-error @below {{'ssm.quantize' op expected 'scale' to have type 'tensor<f32>' for granularity 'tensor', got 'tensor<1xf32>'}}
  %q, %s = ssm.quantize %x tensor : tensor<?x8xf32> -> tensor<?x8xi8>, tensor<1xf32>
  return
}

// -----

func.func @scale_of_token(%x: tensor<?x8xf32>) {
  // expected-error @below {{'ssm.quantize' op expected 'scale' to have type 'tensor<?xf32>' for granularity 'token', got 'tensor<?x8xf32>'}}
  %q, %s = ssm.quantize %x token : tensor<?x8xf32> -> tensor<?x8xi8>, tensor<?x8xf32>
  return
}

// -----

func.func @scale_of_channel(%x: tensor<?x8xf32>) {
  // expected-error @below {{'ssm.quantize' op expected 'scale' to have type 'tensor<8xf32>' for granularity 'channel', got 'tensor<4xf32>'}}
  %q, %s = ssm.quantize %x channel : tensor<?x8xf32> -> tensor<?x8xi8>, tensor<4xf32>
  return
}

// -----

func.func @dequantize_scale(%q: tensor<3x8xi8>, %s: tensor<4xf32>) {
  // expected-error @below {{'ssm.dequantize' op expected 'scale' to have type 'tensor<3xf32>' for granularity 'token', got 'tensor<4xf32>'}}
  %x = ssm.dequantize %q, %s token : tensor<3x8xi8>, tensor<4xf32> -> tensor<3x8xf32>
  return
}

// -----

func.func @dequantize_shape(%q: tensor<3x8xi8>, %s: tensor<f32>) {
  // expected-error @below {{'ssm.dequantize' op expected 'q' and 'x' to have one shape, got 'tensor<3x8xi8>' and 'tensor<3x4xf32>'}}
  %x = ssm.dequantize %q, %s tensor : tensor<3x8xi8>, tensor<f32> -> tensor<3x4xf32>
  return
}

// -----

//===----------------------------------------------------------------------===//
// Weights
//===----------------------------------------------------------------------===//

// expected-error @below {{'ssm.weight' op expected a static shape, got 'tensor<?x8xf32>'}}
ssm.weight @dynamic : tensor<?x8xf32>

// -----

// expected-error @below {{'ssm.weight' op expected an element type of f32, f16, bf16, f8E4M3FN, i8, i32 or i64, got 'f64'}}
ssm.weight @double : tensor<8xf64>

// -----

// expected-error @below {{'ssm.weight' op expected an element type of f32, f16, bf16, f8E4M3FN, i8, i32 or i64, got 'i1'}}
ssm.weight @boolean : tensor<8xi1>

// -----

func.func @no_such_weight() {
  // expected-error @below {{'ssm.get_weight' op expected @missing to name an ssm.weight}}
  %w = ssm.get_weight @missing : tensor<8xf32>
  return
}

// -----

func.func private @not_a_weight()
func.func @get_function() {
  // expected-error @below {{'ssm.get_weight' op expected @not_a_weight to name an ssm.weight}}
  %w = ssm.get_weight @not_a_weight : tensor<8xf32>
  return
}

// -----

// expected-note @below {{weight declared here}}
ssm.weight @w : tensor<8xf32>
func.func @type_of_weight() {
  // expected-error @below {{'ssm.get_weight' op expected type 'tensor<8xf32>' like the weight, got 'tensor<8xbf16>'}}
  %w = ssm.get_weight @w : tensor<8xbf16>
  return
}

// -----

//===----------------------------------------------------------------------===//
// Fused regions
//===----------------------------------------------------------------------===//

func.func @region_arguments(%x: tensor<8xf32>) {
  // expected-error @below {{'ssm.fused' op expected region arguments of types ('tensor<8xf32>'), got ('tensor<4xf32>', 'index')}}
  %y = ssm.fused ins(%x : tensor<8xf32>) -> tensor<8xf32> {
  ^bb0(%a: tensor<4xf32>, %b: index):
    %z = ssm.exp %a : tensor<4xf32>
    ssm.yield %z : tensor<4xf32>
  }
  return
}

// -----

func.func @no_region_arguments(%x: tensor<8xf32>) {
  // expected-error @below {{'ssm.fused' op expected region arguments of types ('tensor<8xf32>'), got ()}}
  ssm.fused ins(%x : tensor<8xf32>) {
    ssm.yield
  }
  return
}

// -----

func.func @yielded_types(%x: tensor<8xf32>) {
  // expected-error @below {{'ssm.fused' op expected the region to yield ('tensor<8xbf16>'), got ('tensor<8xf32>')}}
  %y = ssm.fused ins(%x : tensor<8xf32>) -> tensor<8xbf16> {
  ^bb0(%a: tensor<8xf32>):
    ssm.yield %a : tensor<8xf32>
  }
  return
}

// -----

func.func @yields_nothing(%x: tensor<8xf32>) {
  // expected-error @below {{'ssm.fused' op expected the region to yield ('tensor<8xf32>'), got ()}}
  %y = ssm.fused ins(%x : tensor<8xf32>) -> tensor<8xf32> {
  ^bb0(%a: tensor<8xf32>):
  }
  return
}

// -----

func.func @isolated(%x: tensor<8xf32>) {
  // expected-note @below {{required by region isolation constraints}}
  ssm.fused {
    // expected-error @below {{'ssm.exp' op using value defined outside the region}}
    %y = ssm.exp %x : tensor<8xf32>
  }
  return
}

// -----

func.func @terminator(%x: tensor<8xf32>) {
  // expected-error @below {{'ssm.fused' op expects regions to end with 'ssm.yield', found 'llvm.unreachable'}}
  // expected-note @below {{in custom textual format, the absence of terminator implies 'ssm.yield'}}
  %y = "ssm.fused"(%x) ({
  ^bb0(%a: tensor<8xf32>):
    llvm.unreachable
  }) : (tensor<8xf32>) -> tensor<8xf32>
  return
}

// -----

func.func @two_blocks() {
  // expected-error @below {{'ssm.fused' op expects region #0 to have 0 or 1 blocks}}
  "ssm.fused"() ({
  ^bb0:
    cf.br ^bb1
  ^bb1:
    "ssm.yield"() : () -> ()
  }) : () -> ()
  return
}

// -----

func.func @no_block() {
  // expected-error @below {{'ssm.fused' op region #0 ('body') failed to verify constraint: region with 1 blocks}}
  "ssm.fused"() ({}) : () -> ()
  return
}

// -----

func.func @yield_outside(%x: tensor<8xf32>) {
  // expected-error @below {{'ssm.yield' op expects parent op 'ssm.fused'}}
  ssm.yield %x : tensor<8xf32>
}

// -----

//===----------------------------------------------------------------------===//
// Types of operands and results
//===----------------------------------------------------------------------===//

func.func @double(%x: tensor<8xf64>) {
  // expected-error @below {{'ssm.neg' op operand #0 must be ranked tensor of 16-bit float or bfloat16 type or 32-bit float values, but got 'tensor<8xf64>'}}
  %y = ssm.neg %x : tensor<8xf64>
  return
}

// -----

func.func @integer(%x: tensor<8xi32>) {
  // expected-error @below {{'ssm.silu' op operand #0 must be ranked tensor of 16-bit float or bfloat16 type or 32-bit float values, but got 'tensor<8xi32>'}}
  %y = ssm.silu %x : tensor<8xi32>
  return
}

// -----

func.func @unranked(%x: tensor<*xf32>) {
  // expected-error @below {{custom op 'ssm.exp' invalid kind of type specified: expected builtin.tensor, but found 'tensor<*xf32>'}}
  %y = ssm.exp %x : tensor<*xf32>
  return
}

// -----

func.func @buffer(%x: memref<8xf32>) {
  // expected-error @below {{custom op 'ssm.exp' invalid kind of type specified: expected builtin.tensor, but found 'memref<8xf32>'}}
  %y = ssm.exp %x : memref<8xf32>
  return
}

// -----

func.func @half_rates(%u: tensor<?x?x8xf32>, %a: tensor<8x4xf16>, %b: tensor<?x?x1x4xf32>) {
  // expected-error @below {{'ssm.selective_scan' op operand #2 must be ranked tensor of 32-bit float values, but got 'tensor<8x4xf16>'}}
  %y = ssm.selective_scan %u, %u, %a, %b, %b : tensor<?x?x8xf32>, tensor<?x?x8xf32>, tensor<8x4xf16>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x8xf32>
  return
}

// -----

func.func @long_starts(%x: tensor<1x?x8xf32>, %w: tensor<8x4xf32>, %starts: tensor<?xi64>) {
  // expected-error @below {{'ssm.causal_conv' op operand #2 must be ranked tensor of 32-bit signless integer values, but got 'tensor<?xi64>'}}
  %y = ssm.causal_conv %x, %w seq_starts(%starts : tensor<?xi64>) : tensor<1x?x8xf32>, tensor<8x4xf32> -> tensor<1x?x8xf32>
  return
}

// -----

func.func @wide_weight(%x: tensor<?x8xf32>, %w: tensor<4x8xi16>) {
  // expected-error @below {{'ssm.projection' op operand #1 must be ranked tensor of 16-bit float or bfloat16 type or 32-bit float or 8-bit signless integer or f8E4M3FN type values, but got 'tensor<4x8xi16>'}}
  %y = ssm.projection %x, %w : tensor<?x8xf32>, tensor<4x8xi16> -> tensor<?x4xf32>
  return
}

// -----

func.func @half_scale(%x: tensor<?x8xf32>, %w: tensor<4x8xi8>, %s: tensor<f16>) {
  // expected-error @below {{'ssm.projection' op operand #2 must be ranked tensor of 32-bit float values, but got 'tensor<f16>'}}
  %y = ssm.projection %x, %w weight_scale(%s : tensor<f16>) : tensor<?x8xf32>, tensor<4x8xi8> -> tensor<?x4xf32>
  return
}

// -----

func.func @float_ids(%ids: tensor<?xf32>, %t: tensor<256x8xf32>) {
  // expected-error @below {{'ssm.embedding' op operand #0 must be ranked tensor of 32-bit signless integer or 64-bit signless integer values, but got 'tensor<?xf32>'}}
  %y = ssm.embedding %ids, %t : tensor<?xf32>, tensor<256x8xf32> -> tensor<?x8xf32>
  return
}

// -----

func.func @short_ids(%x: tensor<?x256xf32>) {
  // expected-error @below {{'ssm.argmax' op result #0 must be ranked tensor of 32-bit signless integer or 64-bit signless integer values, but got 'tensor<?xi16>'}}
  %y = ssm.argmax %x : tensor<?x256xf32> -> tensor<?xi16>
  return
}

// -----

func.func @quantized_type(%x: tensor<?x8xf32>) {
  // expected-error @below {{'ssm.quantize' op result #0 must be ranked tensor of 8-bit signless integer or f8E4M3FN type values, but got 'tensor<?x8xf8E5M2>'}}
  %q, %s = ssm.quantize %x tensor : tensor<?x8xf32> -> tensor<?x8xf8E5M2>, tensor<f32>
  return
}

// -----

func.func @scale_type(%x: tensor<?x8xf32>) {
  // expected-error @below {{'ssm.quantize' op result #1 must be ranked tensor of 32-bit float values, but got 'tensor<f16>'}}
  %q, %s = ssm.quantize %x tensor : tensor<?x8xf32> -> tensor<?x8xi8>, tensor<f16>
  return
}

// -----

func.func @type_of_factor(%x: tensor<8xf32>) {
  // expected-error @below {{'ssm.scale' op attribute 'factor' failed to satisfy constraint: 64-bit float attribute}}
  %y = "ssm.scale"(%x) {factor = 1.0 : f32} : (tensor<8xf32>) -> tensor<8xf32>
  return
}

// -----

func.func @no_block_attribute(%x: tensor<?x8xf32>) {
  // expected-error @below {{'ssm.hadamard' op requires attribute 'block'}}
  %y = ssm.hadamard %x : tensor<?x8xf32> -> tensor<?x8xf32>
  return
}

// -----

func.func @no_granularity(%x: tensor<?x8xf32>) {
  // expected-error @below {{custom op 'ssm.quantize' expected ::corey::ssm::Granularity to be one of: tensor, token, channel}}
  // expected-error @below {{custom op 'ssm.quantize' failed to parse SSM_GranularityAttr parameter 'value' which is to be a `::corey::ssm::Granularity`}}
  %q, %s = ssm.quantize %x rows : tensor<?x8xf32> -> tensor<?x8xi8>, tensor<f32>
  return
}

// -----

func.func @nested_site(%x: tensor<8xf32>) {
  // expected-error @below {{'ssm.observe' op attribute 'site' failed to satisfy constraint: flat symbol reference attribute}}
  %y = "ssm.observe"(%x) {site = @a::@b} : (tensor<8xf32>) -> tensor<8xf32>
  return
}

// -----

func.func @kind_of_chunk(%u: tensor<?x?x8xf32>, %a: tensor<8x4xf32>, %b: tensor<?x?x1x4xf32>) {
  // expected-error @below {{custom op 'ssm.selective_scan' 'ssm.selective_scan' op attribute 'chunk' failed to satisfy constraint: chunk of a scan: a constant, or a run-time site}}
  %y = ssm.selective_scan %u, %u, %a, %b, %b {chunk = 256 : i64} : tensor<?x?x8xf32>, tensor<?x?x8xf32>, tensor<8x4xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x8xf32>
  return
}

// -----

//===----------------------------------------------------------------------===//
// Attributes
//===----------------------------------------------------------------------===//

// expected-error @below {{expected a chunk of at least 1 token, got 0}}
module attributes { test.a = #ssm.chunk<static = 0> } {}

// -----

// expected-error @below {{expected a chunk of at least 1 token, got -4}}
module attributes { test.a = #ssm.chunk<static = -4> } {}

// -----

// expected-error @below {{expected 'static' or 'runtime', got 'dynamic'}}
module attributes { test.a = #ssm.chunk<dynamic = 256> } {}

// -----

// expected-error @below {{expected integer value}}
module attributes { test.a = #ssm.chunk<static = @scan> } {}

// -----

// expected-error @below {{invalid kind of attribute specified}}
module attributes { test.a = #ssm.chunk<runtime = 256> } {}

// -----

// expected-error @below {{expected 2 to 65536 bins, got 1}}
module attributes { test.a = #ssm.stats<entropy = 0.5, bins = 1, min = 0.0, max = 1.0, mean = 0.0, variance = 1.0, kurtosis = 3.0> } {}

// -----

// expected-error @below {{expected 2 to 65536 bins, got 65537}}
module attributes { test.a = #ssm.stats<entropy = 0.5, bins = 65537, min = 0.0, max = 1.0, mean = 0.0, variance = 1.0, kurtosis = 3.0> } {}

// -----

// expected-error @below {{expected a non-negative entropy, got -5.000000e-01}}
module attributes { test.a = #ssm.stats<entropy = -0.5, bins = 2, min = 0.0, max = 1.0, mean = 0.0, variance = 1.0, kurtosis = 3.0> } {}

// -----

// expected-error @below {{expected a non-negative entropy, got nan}}
module attributes { test.a = #ssm.stats<entropy = 0x7FF8000000000000, bins = 2, min = 0.0, max = 1.0, mean = 0.0, variance = 1.0, kurtosis = 3.0> } {}

// -----

// expected-error @below {{expected min <= max, got 2.000000e+00 and 1.000000e+00}}
module attributes { test.a = #ssm.stats<entropy = 0.5, bins = 2, min = 2.0, max = 1.0, mean = 0.0, variance = 1.0, kurtosis = 3.0> } {}

// -----

// expected-error @below {{expected a non-negative variance, got -1.000000e+00}}
module attributes { test.a = #ssm.stats<entropy = 0.5, bins = 2, min = 0.0, max = 1.0, mean = 0.0, variance = -1.0, kurtosis = 3.0> } {}

// -----

// expected-error @below {{expected ','}}
module attributes { test.a = #ssm.score<entropy = 0.5> } {}

// -----

//===----------------------------------------------------------------------===//
// Slots of a pool
//===----------------------------------------------------------------------===//

func.func @slots_without_pool(%x: tensor<?x?x8xf32>, %w: tensor<8x4xf32>, %slots: tensor<?xi32>) {
  // expected-error @below {{'ssm.causal_conv' op expected 'initial_state' to be the pool that 'slots' name states of, got none}}
  %y = ssm.causal_conv %x, %w slots(%slots : tensor<?xi32>) : tensor<?x?x8xf32>, tensor<8x4xf32> -> tensor<?x?x8xf32>
  return
}

// -----

func.func @slots_of_a_batch(%x: tensor<2x?x8xf32>, %w: tensor<8x4xf32>, %s: tensor<9x3x8xf32>, %slots: tensor<3xi32>) {
  // expected-error @below {{'ssm.causal_conv' op expected dimension 0 of operand 'state_slots' to be B = 2 (from 'x'), got 3}}
  %y = ssm.causal_conv %x, %w initial_state(%s : tensor<9x3x8xf32>) slots(%slots : tensor<3xi32>)
      : tensor<2x?x8xf32>, tensor<8x4xf32> -> tensor<2x?x8xf32>
  return
}

// -----

func.func @slots_of_packed(%x: tensor<1x?x8xf32>, %w: tensor<8x4xf32>, %s: tensor<9x3x8xf32>, %slots: tensor<1xi32>, %starts: tensor<3xi32>) {
  // expected-error @below {{'ssm.causal_conv' op expected dimension 0 of operand 'state_slots' to be S = 3 (from 'seq_starts'), got 1}}
  %y = ssm.causal_conv %x, %w initial_state(%s : tensor<9x3x8xf32>) slots(%slots : tensor<1xi32>) seq_starts(%starts : tensor<3xi32>)
      : tensor<1x?x8xf32>, tensor<8x4xf32> -> tensor<1x?x8xf32>
  return
}

// -----

func.func @size_of_updated_pool(%x: tensor<2x?x8xf32>, %w: tensor<8x4xf32>, %s: tensor<9x3x8xf32>, %slots: tensor<2xi32>) {
  // expected-error @below {{'ssm.causal_conv' op expected dimension 0 of result 'final_state' to be R = 9 (from 'initial_state'), got 2}}
  %y, %n = ssm.causal_conv %x, %w initial_state(%s : tensor<9x3x8xf32>) slots(%slots : tensor<2xi32>)
      : tensor<2x?x8xf32>, tensor<8x4xf32> -> tensor<2x?x8xf32>, tensor<2x3x8xf32>
  return
}

// -----

func.func @type_of_updated_pool(%x: tensor<?x?x2x8xf32>, %d: tensor<?x?x2xf32>, %b: tensor<?x?x1x4xf32>, %s: tensor<?x2x8x4xbf16>, %slots: tensor<?xi32>) {
  // expected-error @below {{'ssm.ssd' op expected result 'final_states' to have element type 'bf16' of the pool 'initial_states', got 'f32'}}
  %y, %n = ssm.ssd %x decay(%d : tensor<?x?x2xf32>) B(%b) C(%b) initial_states(%s : tensor<?x2x8x4xbf16>) slots(%slots : tensor<?xi32>)
      : tensor<?x?x2x8xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x2x8xf32>, tensor<?x2x8x4xf32>
  return
}

// -----

func.func @type_of_slots(%x: tensor<?x?x8xf32>, %w: tensor<8x4xf32>, %s: tensor<?x3x8xf32>, %slots: tensor<?xi64>) {
  // expected-error @below {{'ssm.causal_conv' op operand #3 must be ranked tensor of 32-bit signless integer values, but got 'tensor<?xi64>'}}
  %y = ssm.causal_conv %x, %w initial_state(%s : tensor<?x3x8xf32>) slots(%slots : tensor<?xi64>)
      : tensor<?x?x8xf32>, tensor<8x4xf32> -> tensor<?x?x8xf32>
  return
}
