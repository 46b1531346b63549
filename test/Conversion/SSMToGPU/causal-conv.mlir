// Lowering of ssm.causal_conv to a kernel: pieces of channels, runs of tokens
// whose length the host decides, pointwise ops on either side within.

// RUN: corey-opt %s --split-input-file --convert-ssm-to-gpu --canonicalize | FileCheck %s
// RUN: corey-opt %s --split-input-file --corey-gpu-pipeline -o /dev/null

// CHECK-LABEL: gpu.func @causal_conv(
// The three tokens before the run and the first eight, before taps and bias.
// CHECK-COUNT-11: llvm.load %{{.+}} invariant {alignment = 8 : i64} : !llvm.ptr<1> -> vector<2xi32>
// CHECK-COUNT-4: llvm.load %{{.+}} invariant {alignment = 8 : i64} : !llvm.ptr<1> -> vector<2xi32>
// CHECK: llvm.load %{{.+}} invariant {alignment = 8 : i64} : !llvm.ptr<1> -> vector<2xi32>
// CHECK: scf.for
// The next eight are on their way while these are computed.
// CHECK-COUNT-8: llvm.load %{{.+}} -> vector<2xi32>
// CHECK: llvm.intr.fma
// CHECK: llvm.call_intrinsic "llvm.nvvm.ex2.approx.ftz.f32"
// CHECK: llvm.store %{{.+}} {alignment = 8 : i64} : vector<2xi32>, !llvm.ptr<1>
// CHECK-LABEL: func.func @conv(
// CHECK: memref.alloc
// CHECK-NOT: memref.alloc
// CHECK: gpu.launch_func @kernels::@causal_conv
// CHECK-NOT: gpu.launch_func
func.func @conv(%x: tensor<?x?x2048xbf16>, %w: tensor<2048x4xbf16>, %b: tensor<2048xbf16>) -> tensor<?x?x2048xbf16> {
  %y = ssm.causal_conv %x, %w bias(%b : tensor<2048xbf16>) {silu} : tensor<?x?x2048xbf16>, tensor<2048x4xbf16> -> tensor<?x?x2048xbf16>
  return %y : tensor<?x?x2048xbf16>
}

// -----

// Sequences that are packed are found by a search; their state comes after.
// CHECK-LABEL: gpu.func @causal_conv(
// CHECK: llvm.call_intrinsic "llvm.ctlz.i32"
// CHECK: scf.for
// CHECK: llvm.load %{{.+}} -> i32
// CHECK: scf.if
// CHECK: llvm.store %{{.+}} : vector<2xf32>, !llvm.ptr<1>
// CHECK: scf.if
// CHECK: llvm.store %{{.+}} : vector<2xf32>, !llvm.ptr<1>
// CHECK-LABEL: func.func @packed(
// CHECK-COUNT-2: memref.alloc
// CHECK-NOT: memref.alloc
// CHECK: gpu.launch_func @kernels::@causal_conv
func.func @packed(%x: tensor<1x?x6xf32>, %w: tensor<6x2xf32>, %s0: tensor<?x1x6xf16>, %starts: tensor<?xi32>) -> (tensor<1x?x6xf32>, tensor<?x1x6xf32>) {
  %y, %s = ssm.causal_conv %x, %w initial_state(%s0 : tensor<?x1x6xf16>) seq_starts(%starts : tensor<?xi32>)
      : tensor<1x?x6xf32>, tensor<6x2xf32> -> tensor<1x?x6xf32>, tensor<?x1x6xf32>
  return %y, %s : tensor<1x?x6xf32>, tensor<?x1x6xf32>
}

// -----

// One kernel, nothing in memory between its ops.
// CHECK-LABEL: gpu.func @causal_conv(
// CHECK-NOT: gpu.func
// CHECK: math.exp
// CHECK-LABEL: func.func @fused(
// CHECK: memref.alloc
// CHECK-NOT: memref.alloc
// CHECK: gpu.launch_func @kernels::@causal_conv
// CHECK-NOT: gpu.launch_func
func.func @fused(%x: tensor<2x?x64xf16>, %w: tensor<64x4xf32>, %z: tensor<2x?x64xf16>) -> tensor<2x?x64xf16> {
  %y = ssm.fused ins(%x, %w, %z : tensor<2x?x64xf16>, tensor<64x4xf32>, tensor<2x?x64xf16>) -> tensor<2x?x64xf16> {
  ^bb0(%a: tensor<2x?x64xf16>, %b: tensor<64x4xf32>, %c: tensor<2x?x64xf16>):
    %0 = ssm.exp %a : tensor<2x?x64xf16>
    %1 = ssm.causal_conv %0, %b : tensor<2x?x64xf16>, tensor<64x4xf32> -> tensor<2x?x64xf16>
    %2 = ssm.mul %1, %c : tensor<2x?x64xf16>, tensor<2x?x64xf16>
    %3 = ssm.silu %2 : tensor<2x?x64xf16>
    ssm.yield %3 : tensor<2x?x64xf16>
  }
  return %y : tensor<2x?x64xf16>
}
