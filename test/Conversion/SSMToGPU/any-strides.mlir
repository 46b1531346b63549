// Scans and convolutions of tensors of any strides: elements one at a time, and
// where tokens are the neighbours in memory those of a lane together.

// RUN: corey-opt %s --split-input-file --convert-ssm-to-gpu --canonicalize | FileCheck %s
// RUN: corey-opt %s --split-input-file --corey-gpu-pipeline -o /dev/null

// Two tokens of two channels are loads of a word for each channel, exchanged
// afterwards; what comes of them is stored in the same way.
// CHECK-LABEL: gpu.func @selective_scan_warp_tokens(
// CHECK: llvm.load %{{.+}} {alignment = 4 : i64} : !llvm.ptr<1> -> i32
// CHECK-NOT: llvm.load %{{.+}} {alignment = 2 : i64} : !llvm.ptr<1> -> i16
// CHECK: gpu.return
// Others are loaded one by one.
// CHECK-LABEL: gpu.func @selective_scan_warp(
// CHECK: llvm.load %{{.+}} {alignment = 2 : i64} : !llvm.ptr<1> -> i16
// CHECK: gpu.return
// The host finds out which it is: lengths and strides are even, addresses
// multiples of four.
// CHECK-LABEL: func.func @scan(
// CHECK-DAG: %[[ONE:.+]] = arith.constant 1 : index
// CHECK-DAG: %[[THREE:.+]] = arith.constant 3 : index
// CHECK: arith.andi %{{.+}}, %[[ONE]] : index
// CHECK: arith.andi %{{.+}}, %[[THREE]] : index
// CHECK: scf.if
// CHECK: gpu.launch_func @kernels::@selective_scan_warp_tokens
// CHECK: else
// CHECK: gpu.launch_func @kernels::@selective_scan_warp
func.func @scan(%u: tensor<?x?x128xbf16> {ssm.any_strides}, %A: tensor<128x16xf32>, %B: tensor<?x?x1x16xbf16>) -> (tensor<?x?x128xbf16> {ssm.any_strides}) {
  %y = ssm.selective_scan %u, %u, %A, %B, %B : tensor<?x?x128xbf16>, tensor<?x?x128xbf16>, tensor<128x16xf32>, tensor<?x?x1x16xbf16>, tensor<?x?x1x16xbf16> -> tensor<?x?x128xbf16>
  return %y : tensor<?x?x128xbf16>
}

// -----

// A thread loads the four tokens before its eight, and those, and four times
// that before it computes.
// CHECK-LABEL: gpu.func @causal_conv_tokens(
// CHECK-NOT: -> i16
// CHECK-COUNT-8: llvm.inline_asm {{.*}}"ld.global.v{{2.b32 ..0,.1., ..2.|4.b32 ..0,.1,.2,.3., ..4.}};"
// CHECK: llvm.intr.fma
// CHECK-NOT: llvm.store {{.*}}i16,
// CHECK: llvm.store %{{.+}} {alignment = 16 : i64} : vector<4xi32>, !llvm.ptr<1>
// CHECK-NOT: llvm.store {{.*}}i16,
// CHECK: gpu.return
// Of other tensors at once where it finds them together.
// CHECK-LABEL: gpu.func @causal_conv_strided(
// CHECK: llvm.inline_asm {{.*}}"ld.global.v2.b32 {$0,$1}, [$2];"
// CHECK: llvm.load %{{.+}} invariant {alignment = 2 : i64} : !llvm.ptr<1> -> i16
// CHECK-COUNT-4: llvm.inline_asm {{.*}}"ld.global.v4.b32 {$0,$1,$2,$3}, [$4];"
// CHECK: llvm.intr.fma
// CHECK: llvm.store %{{.+}} {alignment = 16 : i64} : vector<4xi32>, !llvm.ptr<1>
// CHECK: llvm.store %{{.+}} {alignment = 2 : i64} : i16, !llvm.ptr<1>
// CHECK: gpu.return
// CHECK-LABEL: func.func @conv(
// CHECK: gpu.launch_func @kernels::@causal_conv_tokens
// CHECK: gpu.launch_func @kernels::@causal_conv_strided
// CHECK-NOT: gpu.launch_func
func.func @conv(%x: tensor<?x?x2048xbf16> {ssm.any_strides}, %w: tensor<2048x4xbf16>) -> (tensor<?x?x2048xbf16> {ssm.any_strides}) {
  %y = ssm.causal_conv %x, %w {silu} : tensor<?x?x2048xbf16>, tensor<2048x4xbf16> -> tensor<?x?x2048xbf16>
  return %y : tensor<?x?x2048xbf16>
}

// -----

// Of a dense input it is the usual kernel, which stores one by one.
// CHECK-LABEL: gpu.func @causal_conv(
// CHECK: llvm.load %{{.+}} invariant {alignment = 8 : i64} : !llvm.ptr<1> -> vector<2xi32>
// CHECK-NOT: llvm.store %{{.+}} : vector
// CHECK: llvm.store %{{.+}} {alignment = 2 : i64} : i16, !llvm.ptr<1>
// CHECK-NOT: llvm.store %{{.+}} : vector
// CHECK-LABEL: func.func @strided_result(
func.func @strided_result(%x: tensor<?x?x2048xbf16>, %w: tensor<2048x4xbf16>) -> (tensor<?x?x2048xbf16> {ssm.any_strides}) {
  %y = ssm.causal_conv %x, %w {silu} : tensor<?x?x2048xbf16>, tensor<2048x4xbf16> -> tensor<?x?x2048xbf16>
  return %y : tensor<?x?x2048xbf16>
}
