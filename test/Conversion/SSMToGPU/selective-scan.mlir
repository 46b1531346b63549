// Lowering of ssm.selective_scan: which kernels there are, which of them the
// host launches when, and what becomes part of them.

// RUN: corey-opt %s --split-input-file --convert-ssm-to-gpu --canonicalize | FileCheck %s
// RUN: corey-opt %s --split-input-file --corey-gpu-pipeline -o /dev/null

// A kernel for each variant: states on lanes, narrow and wide, the wide one with
// tiles of two lengths; channels on lanes. Three for chunks. And one for a
// single token.
// CHECK-LABEL: gpu.func @selective_scan_step(
// CHECK-SAME: known_block_size = array<i32: 128, 1, 1>
// CHECK: gpu.func @selective_scan_split2x16x64(
// CHECK: gpu.func @selective_scan_split2x16x32(
// CHECK: gpu.func @selective_scan_split1x8x64(
// CHECK-SAME: known_block_size = array<i32: 256, 1, 1>
// CHECK: gpu.func @selective_scan_warp(
// CHECK-SAME: known_block_size = array<i32: 128, 1, 1>
// Exponentials are the hardware's.
// CHECK: llvm.call_intrinsic "llvm.nvvm.ex2.approx.ftz.f32"
// CHECK: gpu.func @selective_scan_warp_states(
// CHECK: gpu.func @selective_scan_carry(
// CHECK: gpu.func @selective_scan_warp_outputs(
// CHECK-NOT: gpu.func

// CHECK-LABEL: func.func @variants(
// CHECK: memref.alloc(
// CHECK: scf.if
// CHECK: gpu.launch_func @kernels::@selective_scan_step
// CHECK: } else {
// CHECK: %[[VARIANT:.+]] = arith.select
// CHECK: scf.if
// CHECK-NOT: memref.alloc
// CHECK: gpu.launch_func @kernels::@selective_scan_split2x16x64
// CHECK: } else {
// CHECK: gpu.launch_func @kernels::@selective_scan_split2x16x32
// CHECK: } else {
// CHECK: gpu.launch_func @kernels::@selective_scan_split1x8x64
// CHECK: } else {
// CHECK: gpu.launch_func @kernels::@selective_scan_warp blocks
// Where there is more than one chunk: states from zero, states at the starts,
// outputs.
// CHECK: } else {
// CHECK: memref.alloc({{.*}} : memref<?x?x64x16xf32>
// CHECK: memref.alloc({{.*}} : memref<?x?x64xf32>
// CHECK: gpu.launch_func @kernels::@selective_scan_warp_states
// CHECK: gpu.launch_func @kernels::@selective_scan_carry
// CHECK: gpu.launch_func @kernels::@selective_scan_warp_outputs
// CHECK-NOT: gpu.launch_func
func.func @variants(%u: tensor<?x?x64xbf16>, %delta: tensor<?x?x64xbf16>, %A: tensor<64x16xf32>,
                    %B: tensor<?x?x1x16xbf16>, %C: tensor<?x?x1x16xbf16>) -> tensor<?x?x64xbf16> {
  %n = arith.constant 64 : index
  %y = ssm.selective_scan %u, %delta, %A, %B, %C chunk_size(%n)
      : tensor<?x?x64xbf16>, tensor<?x?x64xbf16>, tensor<64x16xf32>, tensor<?x?x1x16xbf16>, tensor<?x?x1x16xbf16>
      -> tensor<?x?x64xbf16>
  return %y : tensor<?x?x64xbf16>
}

// -----

// Without pairs of channels, or with many states, there is one variant; the
// whole of any length is one chunk.
// CHECK-LABEL: gpu.func @selective_scan_warp(
// CHECK-NOT: gpu.func {{.*}}split
// CHECK-LABEL: func.func @odd(
// CHECK-NOT: corey_rt_variant
// CHECK: gpu.launch_func @kernels::@selective_scan_warp blocks
// CHECK-NOT: gpu.launch_func @kernels::@selective_scan_split
// CHECK: return
func.func @odd(%u: tensor<?x?x33xf32>, %delta: tensor<?x?x33xf32>, %A: tensor<33x16xf32>,
               %B: tensor<?x?x1x16xf32>, %C: tensor<?x?x1x16xf32>) -> (tensor<?x?x33xf32>, tensor<?x33x16xf32>) {
  %y, %h = ssm.selective_scan %u, %delta, %A, %B, %C
      : tensor<?x?x33xf32>, tensor<?x?x33xf32>, tensor<33x16xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32>
      -> tensor<?x?x33xf32>, tensor<?x33x16xf32>
  return %y, %h : tensor<?x?x33xf32>, tensor<?x33x16xf32>
}

// -----

// A bound site is asked for its kernel.
// CHECK-LABEL: func.func @bound(
// CHECK: call @corey_rt_variant(
// CHECK: gpu.launch_func @kernels::@selective_scan_split1x32x64
func.func @bound(%u: tensor<?x?x64xf32>, %delta: tensor<?x?x64xf32>, %A: tensor<64x4xf32>,
                 %B: tensor<?x?x1x4xf32>, %C: tensor<?x?x1x4xf32>) -> tensor<?x?x64xf32> {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %b = tensor.dim %u, %c0 : tensor<?x?x64xf32>
  %l = tensor.dim %u, %c1 : tensor<?x?x64xf32>
  %n = ssm.bind_chunk @scan(%b, %l)
  %y = ssm.selective_scan %u, %delta, %A, %B, %C chunk_size(%n)
      : tensor<?x?x64xf32>, tensor<?x?x64xf32>, tensor<64x4xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32>
      -> tensor<?x?x64xf32>
  return %y : tensor<?x?x64xf32>
}

// -----

// Sequences that are packed are checked once, and found by every block.
// CHECK-LABEL: gpu.func @check_sequences(
// CHECK-LABEL: gpu.func @selective_scan_warp(
// CHECK: llvm.load %{{.+}} -> i32
// CHECK-LABEL: func.func @packed(
// CHECK: call @corey_rt_check_sequence_count
// CHECK: gpu.launch_func @kernels::@check_sequences
// CHECK-NOT: gpu.launch_func @kernels::@check_sequences
// CHECK: gpu.launch_func @kernels::@selective_scan_warp blocks
// CHECK: gpu.launch_func @kernels::@selective_scan_warp_states
// CHECK: gpu.launch_func @kernels::@selective_scan_carry
// CHECK: gpu.launch_func @kernels::@selective_scan_warp_outputs
// CHECK-NOT: gpu.launch_func
func.func @packed(%u: tensor<1x?x6xf32>, %A: tensor<6x100xf32>, %B: tensor<1x?x1x100xf32>, %h0: tensor<?x6x100xf32>,
                  %starts: tensor<?xi32>) -> (tensor<1x?x6xf32>, tensor<?x6x100xf32>) {
  %n = arith.constant 32 : index
  %y, %h = ssm.selective_scan %u, %u, %A, %B, %B initial_state(%h0 : tensor<?x6x100xf32>)
      seq_starts(%starts : tensor<?xi32>) chunk_size(%n)
      : tensor<1x?x6xf32>, tensor<1x?x6xf32>, tensor<6x100xf32>, tensor<1x?x1x100xf32>, tensor<1x?x1x100xf32>
      -> tensor<1x?x6xf32>, tensor<?x6x100xf32>
  return %y, %h : tensor<1x?x6xf32>, tensor<?x6x100xf32>
}

// -----

// What is before and after becomes part of the kernels: no other is launched,
// and nothing between is in memory.
// CHECK-NOT: gpu.func @pointwise
// CHECK-LABEL: func.func @fused(
// CHECK: memref.alloc(
// CHECK-NOT: memref.alloc
// CHECK: gpu.launch_func @kernels::@selective_scan_warp blocks
// CHECK-NOT: gpu.launch_func @kernels::@pointwise
// CHECK: return
func.func @fused(%u: tensor<?x?x64xf32>, %delta: tensor<?x?x64xf32>, %A: tensor<64x80xf32>,
                 %B: tensor<?x?x1x80xf32>, %z: tensor<?x?x64xf32>) -> tensor<?x?x64xf32> {
  %r = ssm.fused ins(%u, %delta, %A, %B, %z : tensor<?x?x64xf32>, tensor<?x?x64xf32>, tensor<64x80xf32>,
                     tensor<?x?x1x80xf32>, tensor<?x?x64xf32>) -> tensor<?x?x64xf32> {
  ^bb0(%a: tensor<?x?x64xf32>, %b: tensor<?x?x64xf32>, %c: tensor<64x80xf32>, %d: tensor<?x?x1x80xf32>,
       %e: tensor<?x?x64xf32>):
    %0 = ssm.silu %a : tensor<?x?x64xf32>
    %1 = ssm.softplus %b : tensor<?x?x64xf32>
    %2 = ssm.selective_scan %0, %1, %c, %d, %d {chunk = #ssm.chunk<static = 1099511627776>}
        : tensor<?x?x64xf32>, tensor<?x?x64xf32>, tensor<64x80xf32>, tensor<?x?x1x80xf32>, tensor<?x?x1x80xf32>
        -> tensor<?x?x64xf32>
    %3 = ssm.mul %2, %e : tensor<?x?x64xf32>, tensor<?x?x64xf32>
    ssm.yield %3 : tensor<?x?x64xf32>
  }
  return %r : tensor<?x?x64xf32>
}

// -----

// Rows of many states in f32 take registers: tiles are short, and there are
// fewer blocks of the warp kernel at a time, but not where it has no outputs.
// CHECK-LABEL: gpu.func @selective_scan_split8x16x32(
// CHECK-NOT: split8x16x64
// CHECK: gpu.func @selective_scan_split4x8x64(
// CHECK-NOT: split8x16x64
// CHECK: gpu.func @selective_scan_warp(
// CHECK-SAME: nvvm.minctasm = 3
// CHECK: gpu.func @selective_scan_warp_states(
// CHECK-SAME: nvvm.minctasm = 4
// CHECK: gpu.func @selective_scan_warp_outputs(
// CHECK-SAME: nvvm.minctasm = 3
// CHECK-LABEL: func.func @many(
func.func @many(%u: tensor<?x?x64xf32>, %delta: tensor<?x?x64xf32>, %A: tensor<64x64xf32>,
                %B: tensor<?x?x1x64xf32>, %C: tensor<?x?x1x64xf32>) -> tensor<?x?x64xf32> {
  %n = arith.constant 64 : index
  %y = ssm.selective_scan %u, %delta, %A, %B, %C chunk_size(%n)
      : tensor<?x?x64xf32>, tensor<?x?x64xf32>, tensor<64x64xf32>, tensor<?x?x1x64xf32>, tensor<?x?x1x64xf32>
      -> tensor<?x?x64xf32>
  return %y : tensor<?x?x64xf32>
}
