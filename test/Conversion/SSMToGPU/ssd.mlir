// Lowering of ssm.ssd to kernels: one for whole sequences and one for a single
// token; three for chunks, of which the host decides.

// RUN: corey-opt %s --split-input-file --convert-ssm-to-gpu --canonicalize | FileCheck %s
// RUN: corey-opt %s --split-input-file --corey-gpu-pipeline -o /dev/null

// The one token needs neither running sums of exponents nor shared memory. A
// lane asks for its states of eight channels before all else.
// CHECK-LABEL: gpu.func @ssd_step(
// CHECK-NOT: nvvm.shfl.sync up
// CHECK-NOT: nvvm.barrier
// CHECK: scf.if
// CHECK-COUNT-8: llvm.load %{{.+}} : !llvm.ptr<1> -> vector<4xf32>
// CHECK: } else {
// CHECK-COUNT-8: llvm.store %{{.+}} : vector<4xf32>, !llvm.ptr<1>
// CHECK-COUNT-9: nvvm.shfl.sync bfly
// CHECK-LABEL: gpu.func @ssd(
// CHECK: scf.for
// The next tokens are asked for before these are computed.
// CHECK-COUNT-3: nvvm.shfl.sync up
// CHECK: scf.if
// CHECK: llvm.load %{{.+}} : !llvm.ptr<1> -> vector<2xi32>
// CHECK: nvvm.barrier
// Weak decays, kept out of the recurrence, and others.
// CHECK: scf.if
// CHECK: llvm.intr.fma
// CHECK: } else {
// CHECK: llvm.call_intrinsic "llvm.nvvm.ex2.approx.ftz.f32"
// CHECK: llvm.intr.fma
// CHECK-LABEL: func.func @whole(
// CHECK-COUNT-2: memref.alloc
// CHECK-NOT: memref.alloc
// CHECK: scf.if
// CHECK: gpu.launch_func @kernels::@ssd_step {{.*}} threads in (%c128
// CHECK: } else {
// CHECK: gpu.launch_func @kernels::@ssd {{.*}} threads in (%c128
func.func @whole(%x: tensor<?x?x8x64xbf16>, %dt: tensor<?x?x8xbf16>, %A: tensor<8xf32>, %B: tensor<?x?x1x128xbf16>,
                 %D: tensor<8xf32>, %bias: tensor<8xf32>, %s0: tensor<?x8x64x128xf32>)
    -> (tensor<?x?x8x64xbf16>, tensor<?x8x64x128xf32>) {
  %y, %s = ssm.ssd %x dt(%dt : tensor<?x?x8xbf16>) A(%A : tensor<8xf32>) B(%B) C(%B) D(%D : tensor<8xf32>)
      dt_bias(%bias : tensor<8xf32>) initial_states(%s0 : tensor<?x8x64x128xf32>) {dt_softplus}
      : tensor<?x?x8x64xbf16>, tensor<?x?x1x128xbf16>, tensor<?x?x1x128xbf16> -> tensor<?x?x8x64xbf16>, tensor<?x8x64x128xf32>
  return %y, %s : tensor<?x?x8x64xbf16>, tensor<?x8x64x128xf32>
}

// -----

// CHECK-LABEL: func.func @chunked(
// CHECK: %[[C100:.+]] = arith.constant 100 : index
// CHECK: gpu.launch_func @kernels::@check_sequences
// CHECK: arith.divui %{{.+}}, %[[C100]]
// CHECK: gpu.launch_func @kernels::@ssd
// CHECK: } else {
// CHECK-COUNT-2: memref.alloc
// CHECK: gpu.launch_func @kernels::@ssd_states
// CHECK: gpu.launch_func @kernels::@ssd_carry
// CHECK: gpu.launch_func @kernels::@ssd_outputs
func.func @chunked(%x: tensor<1x?x6x5xf32>, %decay: tensor<1x?x6xf32>, %B: tensor<1x?x2x7xf32>, %starts: tensor<?xi32>)
    -> (tensor<1x?x6x5xf32>, tensor<?x6x5x7xf32>) {
  %y, %s = ssm.ssd %x decay(%decay : tensor<1x?x6xf32>) B(%B) C(%B) seq_starts(%starts : tensor<?xi32>)
      {chunk = #ssm.chunk<static = 100>}
      : tensor<1x?x6x5xf32>, tensor<1x?x2x7xf32>, tensor<1x?x2x7xf32> -> tensor<1x?x6x5xf32>, tensor<?x6x5x7xf32>
  return %y, %s : tensor<1x?x6x5xf32>, tensor<?x6x5x7xf32>
}

// -----

// Pointwise ops on either side are within, x is nowhere in memory.
// CHECK-LABEL: gpu.func @ssd(
// CHECK: math.exp
// CHECK-LABEL: func.func @fused(
// CHECK: memref.alloc
// CHECK-NOT: memref.alloc
// CHECK: gpu.launch_func @kernels::@ssd
// CHECK-NOT: gpu.launch_func
// CHECK: return
func.func @fused(%x: tensor<2x64x6x4xf16>, %dt: tensor<2x64x6xf32>, %A: tensor<6xf32>, %B: tensor<2x64x2x16xf32>) -> tensor<2x64x6x4xf16> {
  %y = ssm.fused ins(%x, %dt, %A, %B : tensor<2x64x6x4xf16>, tensor<2x64x6xf32>, tensor<6xf32>, tensor<2x64x2x16xf32>) -> tensor<2x64x6x4xf16> {
  ^bb0(%a: tensor<2x64x6x4xf16>, %b: tensor<2x64x6xf32>, %c: tensor<6xf32>, %d: tensor<2x64x2x16xf32>):
    %0 = ssm.silu %a : tensor<2x64x6x4xf16>
    %1 = ssm.ssd %0 dt(%b : tensor<2x64x6xf32>) A(%c : tensor<6xf32>) B(%d) C(%d)
        : tensor<2x64x6x4xf16>, tensor<2x64x2x16xf32>, tensor<2x64x2x16xf32> -> tensor<2x64x6x4xf16>
    %2 = ssm.mul %1, %a : tensor<2x64x6x4xf16>, tensor<2x64x6x4xf16>
    ssm.yield %2 : tensor<2x64x6x4xf16>
  }
  return %y : tensor<2x64x6x4xf16>
}
