// States in slots of a pool: the pool is copied unless the caller gave one
// memory for both, and then updated where it is to be left.

// RUN: corey-opt %s --split-input-file --convert-ssm-to-gpu --canonicalize | FileCheck %s
// RUN: corey-opt %s --split-input-file --corey-gpu-pipeline -o /dev/null

// One token: what does not depend on the slot is asked for first; all states of
// a lane, or zeros, before any is used. A warp sums eight channels with nine
// shuffles. Bad slots are reported.
// CHECK-LABEL: gpu.func @ssd_step(
// CHECK: %[[SLOT:.+]] = llvm.inline_asm has_side_effects "ld.global.b32
// CHECK: %[[NOT_PADDING:.+]] = arith.cmpi sge, %[[SLOT]], %c0_i32
// CHECK: %[[IN_POOL:.+]] = arith.cmpi slt, %{{.+}}, %{{.+}} : i64
// CHECK: %[[THERE:.+]] = arith.andi %[[NOT_PADDING]], %[[IN_POOL]] : i1
// CHECK: scf.if %{{.+}} -> (f32, vector<4xi32>, vector<2xi32>, vector<2xi32>)
// CHECK: %[[HAS_STATE:.+]] = arith.andi %[[THERE]], %{{.+}} : i1
// CHECK: scf.if %[[HAS_STATE]] -> (vector<4xf32>, {{.*}}vector<4xf32>)
// CHECK-COUNT-8: llvm.load %{{.+}} {alignment = 16 : i64} : !llvm.ptr<1> -> vector<4xf32>
// CHECK: else
// CHECK-NOT: llvm.load
// CHECK: scf.if %[[HAS_STATE]] {
// CHECK-COUNT-8: llvm.store %{{.+}} {alignment = 16 : i64} : vector<4xf32>
// CHECK-COUNT-9: nvvm.shfl.sync bfly
// CHECK-NOT: nvvm.shfl.sync
// CHECK: llvm.store %{{.+}} {alignment = 2 : i64} : i16
// CHECK: llvm.store %c3_i32, %{{.+}} : i32
// CHECK-NOT: nvvm.barrier
// CHECK-LABEL: func.func @ssd_step(
// CHECK: %[[POOL:.+]] = bufferization.to_buffer %{{.+}} read_only : tensor<?x8x64x128xf32>
// CHECK: %[[NEXT:.+]] = memref.alloc(%{{.+}}) {{.*}} : memref<?x8x64x128xf32>
// CHECK: memref.extract_aligned_pointer_as_index %[[POOL]]
// CHECK: memref.extract_aligned_pointer_as_index %[[NEXT]]
// CHECK: %[[APART:.+]] = arith.cmpi ne
// CHECK: scf.if %[[APART]] {
// CHECK-NEXT: memref.copy %[[POOL]], %[[NEXT]]
// CHECK-NOT: %[[POOL]]
// CHECK: gpu.launch_func @kernels::@ssd_step
func.func @ssd_step(%x: tensor<?x1x8x64xbf16>, %d: tensor<?x1x8xf32>, %b: tensor<?x1x1x128xbf16>,
                    %pool: tensor<?x8x64x128xf32>, %slots: tensor<?xi32>) -> (tensor<?x1x8x64xbf16>, tensor<?x8x64x128xf32>) {
  %y, %next = ssm.ssd %x decay(%d : tensor<?x1x8xf32>) B(%b) C(%b) initial_states(%pool : tensor<?x8x64x128xf32>)
      slots(%slots : tensor<?xi32>)
      : tensor<?x1x8x64xbf16>, tensor<?x1x1x128xbf16>, tensor<?x1x1x128xbf16> -> tensor<?x1x8x64xbf16>, tensor<?x8x64x128xf32>
  return %y, %next : tensor<?x1x8x64xbf16>, tensor<?x8x64x128xf32>
}

// -----

// The slots of the next sequence are there when its states are asked for.
// CHECK-LABEL: gpu.func @selective_scan_step(
// CHECK: scf.for {{.+}} iter_args({{.+}}) -> ({{.+}}i32, i1, i32, i1)
// CHECK: scf.if %{{.+}} -> (f32, f32, f32, f32)
// CHECK: llvm.store %c3_i32
// CHECK-LABEL: func.func @scan_step(
// CHECK: memref.copy
// CHECK: gpu.launch_func @kernels::@selective_scan_step
func.func @scan_step(%u: tensor<?x1x64xf32>, %a: tensor<64x16xf32>, %b: tensor<?x1x1x16xf32>, %pool: tensor<?x64x16xf32>,
                     %slots: tensor<?xi32>) -> (tensor<?x1x64xf32>, tensor<?x64x16xf32>) {
  %y, %next = ssm.selective_scan %u, %u, %a, %b, %b initial_state(%pool : tensor<?x64x16xf32>) slots(%slots : tensor<?xi32>)
      : tensor<?x1x64xf32>, tensor<?x1x64xf32>, tensor<64x16xf32>, tensor<?x1x1x16xf32>, tensor<?x1x1x16xf32>
      -> tensor<?x1x64xf32>, tensor<?x64x16xf32>
  return %y, %next : tensor<?x1x64xf32>, tensor<?x64x16xf32>
}

// -----

// Only read from: nothing is copied.
// CHECK-LABEL: gpu.func @ssd_step(
// CHECK-LABEL: gpu.func @ssd(
// CHECK-LABEL: func.func @reads_only(
// CHECK-NOT: memref.copy
// CHECK: gpu.launch_func @kernels::@ssd_step
// CHECK: gpu.launch_func @kernels::@ssd
func.func @reads_only(%x: tensor<?x?x8x64xf32>, %d: tensor<?x?x8xf32>, %b: tensor<?x?x1x64xf32>,
                      %pool: tensor<?x8x64x64xbf16>, %slots: tensor<?xi32>) -> tensor<?x?x8x64xf32> {
  %y = ssm.ssd %x decay(%d : tensor<?x?x8xf32>) B(%b) C(%b) initial_states(%pool : tensor<?x8x64x64xbf16>)
      slots(%slots : tensor<?xi32>)
      : tensor<?x?x8x64xf32>, tensor<?x?x1x64xf32>, tensor<?x?x1x64xf32> -> tensor<?x?x8x64xf32>
  return %y : tensor<?x?x8x64xf32>
}

// -----

// In chunks the slots matter where states are carried.
// CHECK-LABEL: gpu.func @ssd_states(
// CHECK-NOT: llvm.store %c3_i32
// CHECK-LABEL: gpu.func @ssd_carry(
// CHECK: llvm.store %c3_i32
// CHECK-LABEL: gpu.func @ssd_outputs(
// CHECK-NOT: llvm.store %c3_i32
// CHECK-LABEL: gpu.func @causal_conv(
// CHECK: llvm.store %c3_i32
// CHECK-LABEL: func.func @chunked(
func.func @chunked(%x: tensor<1x?x8x64xf32>, %d: tensor<1x?x8xf32>, %b: tensor<1x?x1x64xf32>, %w: tensor<64x4xf32>,
                   %pool: tensor<?x8x64x64xf32>, %pool2: tensor<?x3x64xf32>, %slots: tensor<?xi32>, %starts: tensor<?xi32>)
    -> (tensor<1x?x8x64xf32>, tensor<?x8x64x64xf32>, tensor<1x?x64xf32>, tensor<?x3x64xf32>) {
  %y, %next = ssm.ssd %x decay(%d : tensor<1x?x8xf32>) B(%b) C(%b) initial_states(%pool : tensor<?x8x64x64xf32>)
      slots(%slots : tensor<?xi32>) seq_starts(%starts : tensor<?xi32>) {chunk = #ssm.chunk<static = 64>}
      : tensor<1x?x8x64xf32>, tensor<1x?x1x64xf32>, tensor<1x?x1x64xf32> -> tensor<1x?x8x64xf32>, tensor<?x8x64x64xf32>
  %flat = tensor.collapse_shape %b [[0], [1], [2, 3]] : tensor<1x?x1x64xf32> into tensor<1x?x64xf32>
  %z, %next2 = ssm.causal_conv %flat, %w initial_state(%pool2 : tensor<?x3x64xf32>) slots(%slots : tensor<?xi32>)
      seq_starts(%starts : tensor<?xi32>) : tensor<1x?x64xf32>, tensor<64x4xf32> -> tensor<1x?x64xf32>, tensor<?x3x64xf32>
  return %y, %next, %z, %next2 : tensor<1x?x8x64xf32>, tensor<?x8x64x64xf32>, tensor<1x?x64xf32>, tensor<?x3x64xf32>
}
