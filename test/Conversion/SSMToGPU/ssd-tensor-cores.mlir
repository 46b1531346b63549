// Lowering of ssm.ssd to tensor cores, by products of warp groups where there are
// such, else of warps: kernels for few tokens as elsewhere, one for the states at
// the ends of segments and one for all else.

// RUN: corey-opt %s --split-input-file --ssm-bind-chunks --convert-ssm-to-gpu="chip=sm_90a" --canonicalize | FileCheck %s
// RUN: corey-opt %s --split-input-file --ssm-bind-chunks --convert-ssm-to-gpu="chip=sm_80" --canonicalize | FileCheck %s --check-prefix=WARPS
// RUN: corey-opt %s --split-input-file --ssm-bind-chunks --convert-ssm-to-gpu="chip=sm_86" --canonicalize | FileCheck %s --check-prefix=SMALL
// RUN: corey-opt %s --split-input-file --ssm-bind-chunks --convert-ssm-to-gpu="chip=sm_90" --canonicalize | FileCheck %s --check-prefix=OVERLAP
// RUN: corey-opt %s --split-input-file --corey-gpu-pipeline="chip=sm_90a" -o /dev/null
// RUN: corey-opt %s --split-input-file --corey-gpu-pipeline="chip=sm_80" -o /dev/null

// The states: registers of one product at a time, no weights M.
// CHECK-LABEL: gpu.func @ssd_segment_states(
// CHECK: nvvm.griddepcontrol wait
// CHECK: nvvm.griddepcontrol launch_dependents
// CHECK: cp.async.cg.shared.global
// CHECK: cp.async.mbarrier.arrive.noinc
// CHECK: ldmatrix.sync.aligned.m8n8.x4.trans
// CHECK: mul.rn.bf16x2
// CHECK-COUNT-4: wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16
// CHECK-NOT: stmatrix

// The flags of what workers hand on.
// CHECK-LABEL: gpu.func @ssd_reset(

// Roles share the registers of the block: 2 x 184 + 88 + 56 = 4 x 128.
// CHECK-LABEL: gpu.func @ssd_tensor(
// CHECK-SAME: known_block_size = array<i32: 512, 1, 1>
// CHECK: nvvm.griddepcontrol launch_dependents
// CHECK: nvvm.setmaxregister decrease 56
// Warps that copy, and one a head that makes factors.
// CHECK-COUNT-2: cp.async.mbarrier.arrive.noinc
// CHECK: nvvm.setmaxregister decrease 88
// C B^T once for both heads.
// CHECK: llvm.inline_asm has_side_effects {{.*}}"{{.*}}wgmma.fence{{.*}}m64n64k16.f32.bf16.bf16{{.*}}wgmma.commit_group
// CHECK: stmatrix.sync.aligned.m8n8.x4.shared
// CHECK: nvvm.setmaxregister increase 184
// S C^T, x^T B and M x, then the outputs.
// CHECK: m64n64k16.f32.bf16.bf16
// CHECK: m64n128k16.f32.bf16.bf16
// CHECK: wgmma.wait_group.sync.aligned 1
// CHECK: m64n64k16.f32.bf16.bf16
// CHECK: wgmma.wait_group.sync.aligned 0
// CHECK: stmatrix.sync.aligned.m8n8.x4.trans.shared

// CHECK-LABEL: func.func @chunked(
// CHECK: scf.if
// CHECK: gpu.launch_func @kernels::@ssd_segment_states
// CHECK: gpu.launch_func @kernels::@ssd_tensor

// Warps that are all alike, of as many heads as fit. Copies and factors of the
// first tile come before the loop, those of others a tile ahead.
// WARPS-LABEL: gpu.func @ssd_segment_states(
// WARPS-NOT: griddepcontrol
// WARPS: cp.async.cg.shared.global
// WARPS: cp.async.commit_group
// WARPS: cp.async.wait_group
// WARPS-NEXT: nvvm.barrier
// WARPS: cp.async.commit_group
// WARPS-COUNT-4: ldmatrix.sync.aligned.m8n8.x4.trans
// WARPS: fma.rn.bf16x2
// WARPS: ldmatrix.sync.aligned.m8n8.x4.trans
// WARPS: nvvm.mma.sync
// WARPS-LABEL: gpu.func @ssd_reset(
// WARPS-LABEL: gpu.func @ssd_tensor(
// WARPS-SAME: known_block_size = array<i32: 384, 1, 1>
// WARPS: cp.async.wait_group 0
// WARPS-NEXT: nvvm.barrier
// C B^T and M, whose squares the last warps have fewer of; S C^T.
// WARPS: nvvm.mma.sync
// WARPS: ldmatrix.sync.aligned.m8n8.x4.shared
// WARPS: nvvm.mma.sync
// x^T M^T, of squares up to the diagonal, once M is there.
// WARPS: nvvm.barrier
// WARPS: ldmatrix.sync.aligned.m8n8.x4.trans
// WARPS-COUNT-8: nvvm.mma.sync
// WARPS: ldmatrix.sync.aligned.m8n8.x4.trans
// WARPS-COUNT-6: nvvm.mma.sync
// WARPS: ldmatrix.sync.aligned.m8n8.x4.trans
// WARPS-COUNT-4: nvvm.mma.sync
// WARPS: ldmatrix.sync.aligned.m8n8.x4.trans
// WARPS-COUNT-2: nvvm.mma.sync
// x^T B.
// WARPS: fma.rn.bf16x2
// WARPS: nvvm.mma.sync
// WARPS-NOT: stmatrix
// WARPS-NOT: mbarrier
// WARPS-LABEL: func.func @chunked(
// WARPS: gpu.launch_func @kernels::@ssd_segment_states
// WARPS: gpu.launch_func @kernels::@ssd_tensor

// SMALL-LABEL: gpu.func @ssd_tensor(
// SMALL-SAME: known_block_size = array<i32: 128, 1, 1>

// OVERLAP-LABEL: gpu.func @ssd_segment_states(
// OVERLAP: nvvm.griddepcontrol wait
// OVERLAP: nvvm.griddepcontrol launch_dependents
// OVERLAP-LABEL: gpu.func @ssd_tensor(
// OVERLAP: nvvm.griddepcontrol launch_dependents
// OVERLAP: nvvm.mma.sync
func.func @chunked(%x: tensor<?x?x8x64xbf16>, %dt: tensor<?x?x8xbf16>, %A: tensor<8xf32>, %B: tensor<?x?x1x128xbf16>,
                   %s0: tensor<?x8x64x128xf32>) -> (tensor<?x?x8x64xbf16>, tensor<?x8x64x128xf32>) {
  %y, %s = ssm.ssd %x dt(%dt : tensor<?x?x8xbf16>) A(%A : tensor<8xf32>) B(%B) C(%B)
      initial_states(%s0 : tensor<?x8x64x128xf32>) {dt_softplus, chunk = #ssm.chunk<runtime = @ssd>}
      : tensor<?x?x8x64xbf16>, tensor<?x?x1x128xbf16>, tensor<?x?x1x128xbf16>
      -> tensor<?x?x8x64xbf16>, tensor<?x8x64x128xf32>
  return %y, %s : tensor<?x?x8x64xbf16>, tensor<?x8x64x128xf32>
}

// -----

// With 256 states a block has one slice of a head, whose states are in two
// products.
// CHECK-LABEL: gpu.func @ssd_tensor(
// CHECK-SAME: known_block_size = array<i32: 384, 1, 1>
// CHECK: nvvm.setmaxregister increase 240
// CHECK-COUNT-2: m64n128k16.f32.f16.f16
// CHECK-LABEL: func.func @wide(
// CHECK: gpu.launch_func @kernels::@ssd_tensor
// WARPS-LABEL: gpu.func @ssd_tensor(
// WARPS-SAME: known_block_size = array<i32: 128, 1, 1>
// WARPS: nvvm.mma.sync {{.*}} : (vector<2xf16>, vector<2xf16>, f32)
// Two tiles of that do not fit a block of a small chip.
// SMALL-LABEL: func.func @wide(
// SMALL-NOT: @ssd_tensor
func.func @wide(%x: tensor<2x300x8x128xf16>, %decay: tensor<2x300x8xf32>, %B: tensor<2x300x2x256xf16>)
    -> tensor<2x300x8x128xf16> {
  %y = ssm.ssd %x decay(%decay : tensor<2x300x8xf32>) B(%B) C(%B)
      : tensor<2x300x8x128xf16>, tensor<2x300x2x256xf16>, tensor<2x300x2x256xf16> -> tensor<2x300x8x128xf16>
  return %y : tensor<2x300x8x128xf16>
}

// -----

// What tensor cores do not take: f32, mixed types, sizes that are no multiples,
// and inputs that the kernel computes itself.
// CHECK-LABEL: func.func @f32(
// CHECK-NOT: @ssd_tensor
// WARPS-LABEL: func.func @f32(
// WARPS-NOT: @ssd_tensor
func.func @f32(%x: tensor<?x?x8x64xf32>, %decay: tensor<?x?x8xf32>, %B: tensor<?x?x1x128xf32>) -> tensor<?x?x8x64xf32> {
  %y = ssm.ssd %x decay(%decay : tensor<?x?x8xf32>) B(%B) C(%B)
      : tensor<?x?x8x64xf32>, tensor<?x?x1x128xf32>, tensor<?x?x1x128xf32> -> tensor<?x?x8x64xf32>
  return %y : tensor<?x?x8x64xf32>
}
func.func @mixed(%x: tensor<?x?x8x64xbf16>, %decay: tensor<?x?x8xf32>, %B: tensor<?x?x1x128xf16>) -> tensor<?x?x8x64xbf16> {
  %y = ssm.ssd %x decay(%decay : tensor<?x?x8xf32>) B(%B) C(%B)
      : tensor<?x?x8x64xbf16>, tensor<?x?x1x128xf16>, tensor<?x?x1x128xf16> -> tensor<?x?x8x64xbf16>
  return %y : tensor<?x?x8x64xbf16>
}
func.func @sizes(%x: tensor<?x?x8x60xbf16>, %decay: tensor<?x?x8xf32>, %B: tensor<?x?x1x100xbf16>) -> tensor<?x?x8x60xbf16> {
  %y = ssm.ssd %x decay(%decay : tensor<?x?x8xf32>) B(%B) C(%B)
      : tensor<?x?x8x60xbf16>, tensor<?x?x1x100xbf16>, tensor<?x?x1x100xbf16> -> tensor<?x?x8x60xbf16>
  return %y : tensor<?x?x8x60xbf16>
}
