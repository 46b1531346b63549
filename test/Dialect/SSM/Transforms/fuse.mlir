// ssm-fuse: which ops become regions, under each strategy; what is never fused;
// remarks, statistics, options.

// RUN: split-file %s %t
// RUN: corey-opt %t/chain.mlir --ssm-fuse="strategy=dp score=physical" | FileCheck %t/chain.mlir --check-prefix=DP
// RUN: corey-opt %t/chain.mlir --ssm-fuse="strategy=dp score=physical" --ssm-fuse="strategy=static" | FileCheck %t/chain.mlir --check-prefix=DP
// RUN: corey-opt %t/chain.mlir --ssm-fuse="strategy=none" | FileCheck %t/chain.mlir --check-prefix=NONE
// RUN: corey-opt %t/chain.mlir --ssm-fuse="strategy=entropy alpha=0.45 beta=0.35 gamma=0.2 tau=0.52" --remarks-filter=".*" 2>&1 | FileCheck %t/chain.mlir --check-prefix=REMARKS
// RUN: corey-opt %t/chain.mlir --ssm-fuse="strategy=entropy tau=2" | FileCheck %t/chain.mlir --check-prefix=NONE
// RUN: corey-opt %t/chain.mlir --ssm-fuse="strategy=dp score=physical machine=h200 max-shared=100" | FileCheck %t/chain.mlir --check-prefix=LIMIT
// RUN: %if llvm-statistics %{ corey-opt %t/chain.mlir --ssm-fuse="strategy=dp score=physical" --mlir-pass-statistics 2>&1 >/dev/null | FileCheck %t/chain.mlir --check-prefix=STATISTICS %}
// RUN: corey-opt %t/legality.mlir --ssm-fuse="strategy=dp score=physical" | FileCheck %t/legality.mlir
// RUN: corey-opt %t/legality.mlir --ssm-fuse="strategy=entropy depth-bonus=true tau=-9" | FileCheck %t/legality.mlir
// RUN: corey-opt %t/rotated.mlir --ssm-fuse="strategy=dp score=physical" | FileCheck %t/rotated.mlir
// RUN: corey-opt %t/rotated.mlir --ssm-fuse="strategy=dp score=physical machine=h200" | FileCheck %t/rotated.mlir
// RUN: corey-opt %t/rotated.mlir --ssm-fuse="strategy=entropy tau=-9" | FileCheck %t/rotated.mlir
// RUN: corey-opt %t/apart.mlir --ssm-fuse="strategy=dp score=physical machine=h200" --remarks-filter=".*" 2>&1 | FileCheck %t/apart.mlir --check-prefix=DP
// RUN: corey-opt %t/apart.mlir --ssm-fuse="strategy=entropy tau=-9" --remarks-filter=".*" 2>&1 | FileCheck %t/apart.mlir --check-prefix=GREEDY
// RUN: corey-opt %t/tokens.mlir --ssm-fuse="strategy=dp score=physical machine=h200" | FileCheck %t/tokens.mlir
// RUN: corey-opt %t/tokens.mlir --ssm-fuse="strategy=dp score=physical machine=cpu" | FileCheck %t/tokens.mlir --check-prefix=CPU
// RUN: corey-opt %t/tokens.mlir --ssm-fuse="strategy=entropy tau=-9 machine=h200" --remarks-filter=".*" 2>&1 | FileCheck %t/tokens.mlir --check-prefix=REASON
// RUN: corey-opt %t/static.mlir --ssm-fuse="strategy=static" | FileCheck %t/static.mlir
// RUN: corey-opt %t/stats.mlir --ssm-fuse="strategy=entropy depth-bonus=false tau=0.5" | FileCheck %t/stats.mlir --check-prefix=HIGH
// RUN: corey-opt %t/stats.mlir --ssm-fuse="strategy=arithmetic depth-bonus=false tau=0.5" | FileCheck %t/stats.mlir --check-prefix=WITHOUT

// RUN: not corey-opt %t/chain.mlir --ssm-fuse="strategy=best" 2>&1 | FileCheck %s --check-prefix=STRATEGY
// STRATEGY: error: ssm-fuse: expected strategy none, static, arithmetic, entropy or dp, got 'best'
// RUN: not corey-opt %t/chain.mlir --ssm-fuse="score=best" 2>&1 | FileCheck %s --check-prefix=SCORE
// SCORE: error: ssm-fuse: expected score paper or physical, got 'best'
// RUN: not corey-opt %t/chain.mlir --ssm-fuse="machine=abacus" 2>&1 | FileCheck %s --check-prefix=MACHINE
// MACHINE: error: ssm-fuse: expected machine cpu or h200, got 'abacus'
// RUN: not corey-opt %t/chain.mlir --ssm-fuse="dynamic-size=0" 2>&1 | FileCheck %s --check-prefix=SIZE
// SIZE: error: ssm-fuse: expected dynamic-size of at least 1, got 0

//--- chain.mlir

// Producers of what the scan streams and consumers of its result; its state
// leaves as a second result. Producers move next to the scan.
// DP-LABEL: func.func @scan(
// DP-SAME: %[[U:[a-z0-9]+]]: tensor<?x?x16xf32>, %[[DT:[a-z0-9]+]]: tensor<?x?x16xf32>
// DP: %[[A:.+]] = ssm.neg
// DP: %[[R:.+]]:2 = ssm.fused ins(
// DP-SAME: score(<{{.*}}threshold = 0.000000e+00>) -> tensor<?x?x16xbf16>, tensor<?x16x4xf32>
// DP: ssm.add
// DP: ssm.softplus
// DP: ssm.silu
// DP: ssm.selective_scan
// DP: ssm.mul
// DP: ssm.cast
// DP: ssm.yield {{.*}} : tensor<?x?x16xbf16>, tensor<?x16x4xf32>
// DP: return %[[R]]#0, %[[R]]#1
// DP-NOT: ssm.fused
// NONE-NOT: ssm.fused
// REMARKS: remark: [Missed] fuse | Category:ssm-fuse:entropy | Function=scan | AI={{.+}}, H=5.000000e-01, M={{.+}}, Reason="the score is not above the threshold", S={{.+}}, bonus=1.800000e-01, bytes={{.+}}, bytes_kept={{.+}}, depth_bound_registers={{.+}}, depth_bound_shared={{.+}}, ops="{{.+}}", tau=5.200000e-01
// REMARKS: remark: [Passed] fuse | Category:ssm-fuse:entropy | Function=scan {{.*}}Reason="the score is above the threshold", S={{.+}}, bonus=3.600000e-01
// LIMIT: ssm.fused
// LIMIT: ssm.softplus
// LIMIT: ssm.yield
// LIMIT-NOT: ssm.fused
// LIMIT: ssm.selective_scan
// STATISTICS: SSMFuse
// STATISTICS-NEXT: (S) 6 num-fused-ops
// STATISTICS-NEXT: (S) 1 num-regions
func.func @scan(%u: tensor<?x?x16xf32>, %dt: tensor<?x?x16xf32>, %bias: tensor<16xf32>, %a: tensor<16x4xf32>,
    %b: tensor<?x?x1x4xf32>, %g: tensor<?x?x16xf32>) -> (tensor<?x?x16xbf16>, tensor<?x16x4xf32>) {
  %shifted = ssm.add %dt, %bias : tensor<?x?x16xf32>, tensor<16xf32>
  %step = ssm.softplus %shifted : tensor<?x?x16xf32>
  %neg = ssm.neg %a : tensor<16x4xf32>
  %s = ssm.silu %u : tensor<?x?x16xf32>
  %y, %h = ssm.selective_scan %s, %step, %neg, %b, %b : tensor<?x?x16xf32>, tensor<?x?x16xf32>, tensor<16x4xf32>,
      tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x16xf32>, tensor<?x16x4xf32>
  %gated = ssm.mul %y, %g : tensor<?x?x16xf32>, tensor<?x?x16xf32>
  %out = ssm.cast %gated : tensor<?x?x16xf32> to tensor<?x?x16xbf16>
  return %out, %h : tensor<?x?x16xbf16>, tensor<?x16x4xf32>
}

//--- legality.mlir

// What is used elsewhere has to be in memory: only the tail is fused.
// CHECK-LABEL: func.func @used_twice(
// CHECK: %[[A:.+]] = ssm.silu
// CHECK: %[[F:.+]] = ssm.fused ins(%[[A]]
// CHECK: return %[[A]], %[[F]]
func.func @used_twice(%x: tensor<?x8xf32>) -> (tensor<?x8xf32>, tensor<?x8xf32>) {
  %0 = ssm.silu %x : tensor<?x8xf32>
  %1 = ssm.exp %0 : tensor<?x8xf32>
  %2 = ssm.neg %1 : tensor<?x8xf32>
  return %0, %2 : tensor<?x8xf32>, tensor<?x8xf32>
}

// A projection takes nothing in; two anchors do not share a kernel.
// CHECK-LABEL: func.func @anchors(
// CHECK-NEXT: ssm.hadamard
// CHECK-NEXT: ssm.rms_norm
// CHECK-NEXT: ssm.projection
// CHECK-NEXT: ssm.silu
// CHECK-NEXT: ssm.projection
// CHECK-NEXT: return
func.func @anchors(%x: tensor<?x8xf32>, %w: tensor<8xf32>, %p: tensor<8x8xf32>) -> tensor<?x8xf32> {
  %0 = ssm.hadamard %x {block = 8 : i64} : tensor<?x8xf32> -> tensor<?x8xf32>
  %1 = ssm.rms_norm %0, %w : tensor<?x8xf32>, tensor<8xf32> -> tensor<?x8xf32>
  %2 = ssm.projection %1, %p : tensor<?x8xf32>, tensor<8x8xf32> -> tensor<?x8xf32>
  %3 = ssm.silu %2 : tensor<?x8xf32>
  %4 = ssm.projection %3, %p : tensor<?x8xf32>, tensor<8x8xf32> -> tensor<?x8xf32>
  return %4 : tensor<?x8xf32>
}

// The rates of a scan are read for every token: not where they are computed.
// CHECK-LABEL: func.func @rates(
// CHECK-NEXT: ssm.neg
// CHECK-NEXT: ssm.selective_scan
func.func @rates(%u: tensor<?x?x16xf32>, %a: tensor<16x4xf32>, %b: tensor<?x?x1x4xf32>) -> tensor<?x?x16xf32> {
  %n = ssm.neg %a : tensor<16x4xf32>
  %y = ssm.selective_scan %u, %u, %n, %b, %b : tensor<?x?x16xf32>, tensor<?x?x16xf32>, tensor<16x4xf32>,
      tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x16xf32>
  return %y : tensor<?x?x16xf32>
}

// A path that leaves through an op that is not fused and comes back.
// CHECK-LABEL: func.func @comes_back(
// CHECK-NOT: ssm.fused
// CHECK: return
func.func @comes_back(%x: tensor<?x8xf32>, %p: tensor<8x8xf32>) -> tensor<?x8xf32> {
  %0 = ssm.silu %x : tensor<?x8xf32>
  %1 = ssm.projection %0, %p : tensor<?x8xf32>, tensor<8x8xf32> -> tensor<?x8xf32>
  %2 = ssm.mul %0, %1 : tensor<?x8xf32>, tensor<?x8xf32>
  return %2 : tensor<?x8xf32>
}

// Sizes do not keep a value in memory, and a block of a loop is a block.
// CHECK-LABEL: func.func @sizes(
// CHECK: scf.for
// CHECK: ssm.fused
// CHECK: ssm.exp
// CHECK: ssm.neg
// CHECK: ssm.yield
func.func @sizes(%x: tensor<?x8xf32>) -> (tensor<?x8xf32>, index) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %r = scf.for %i = %c0 to %c1 step %c1 iter_args(%v = %x) -> tensor<?x8xf32> {
    %0 = ssm.exp %v : tensor<?x8xf32>
    %n = tensor.dim %0, %c0 : tensor<?x8xf32>
    %1 = ssm.neg %0 : tensor<?x8xf32>
    %s = tensor.extract_slice %1[0, 0] [%n, 8] [1, 1] : tensor<?x8xf32> to tensor<?x8xf32>
    scf.yield %s : tensor<?x8xf32>
  }
  return %r, %c0 : tensor<?x8xf32>, index
}

// Residuals: a value from before the anchor is added behind it.
// CHECK-LABEL: func.func @residual(
// CHECK: ssm.fused
// CHECK: ssm.causal_conv
// CHECK-NEXT: ssm.silu
// CHECK-NEXT: ssm.add
// CHECK-NEXT: ssm.yield
func.func @residual(%x: tensor<?x?x8xf32>, %w: tensor<8x4xf32>) -> tensor<?x?x8xf32> {
  %0 = ssm.causal_conv %x, %w : tensor<?x?x8xf32>, tensor<8x4xf32> -> tensor<?x?x8xf32>
  %1 = ssm.silu %0 : tensor<?x?x8xf32>
  %2 = ssm.add %1, %x : tensor<?x?x8xf32>, tensor<?x?x8xf32>
  return %2 : tensor<?x?x8xf32>
}

//--- rotated.mlir

// A Hadamard transform of what a norm makes ends its kernel: pointwise ops
// before the norm, between the two and behind the transform are in it, and the
// sums of the norm leave as a second result.
// CHECK-LABEL: func.func @everything(
// CHECK: %[[R:.+]]:2 = ssm.fused ins(
// CHECK-SAME: -> tensor<?x?x48xbf16>, tensor<?x?x48xf32>
// CHECK: ssm.silu
// CHECK: ssm.rms_norm
// CHECK: ssm.sigmoid
// CHECK: ssm.mul
// CHECK: ssm.hadamard
// CHECK: ssm.add
// CHECK: ssm.cast
// CHECK: ssm.yield
// CHECK: return %[[R]]#0, %[[R]]#1
func.func @everything(%x: tensor<?x?x48xf32>, %w: tensor<48xf32>, %r: tensor<?x?x48xf32>, %z: tensor<?x?x48xf32>,
    %g: tensor<?x?x48xf32>, %v: tensor<48xf32>) -> (tensor<?x?x48xbf16>, tensor<?x?x48xf32>) {
  %0 = ssm.silu %x : tensor<?x?x48xf32>
  %n, %s = ssm.rms_norm %0, %w residual(%r : tensor<?x?x48xf32>) z(%z : tensor<?x?x48xf32>)
      : tensor<?x?x48xf32>, tensor<48xf32> -> tensor<?x?x48xf32>, tensor<?x?x48xf32>
  %1 = ssm.sigmoid %g : tensor<?x?x48xf32>
  %2 = ssm.mul %n, %1 : tensor<?x?x48xf32>, tensor<?x?x48xf32>
  %h = ssm.hadamard %2 {block = 16 : i64} : tensor<?x?x48xf32> -> tensor<?x?x48xf32>
  %3 = ssm.add %h, %v : tensor<?x?x48xf32>, tensor<48xf32>
  %4 = ssm.cast %3 : tensor<?x?x48xf32> to tensor<?x?x48xbf16>
  return %4, %s : tensor<?x?x48xbf16>, tensor<?x?x48xf32>
}

// Blocks need only divide the groups that are normalised.
// CHECK-LABEL: func.func @groups(
// CHECK: ssm.fused
// CHECK: ssm.rms_norm
// CHECK-NEXT: ssm.hadamard
// CHECK-NEXT: ssm.yield
func.func @groups(%x: tensor<?x96xf16>, %w: tensor<96xf32>) -> tensor<?x96xf16> {
  %0 = ssm.rms_norm %x, %w {group_size = 24 : i64} : tensor<?x96xf16>, tensor<96xf32> -> tensor<?x96xf16>
  %1 = ssm.hadamard %0 {block = 8 : i64} : tensor<?x96xf16> -> tensor<?x96xf16>
  return %1 : tensor<?x96xf16>
}

//--- apart.mlir

// Of every pair that stays apart a remark says why.
// DP: [Missed] fuse {{.*}}Function=used_twice {{.*}}Reason="the result of ssm.rms_norm is also used outside of the region", {{.*}}ops="rms_norm hadamard"
// GREEDY: [Missed] fuse {{.*}}Function=used_twice {{.*}}Reason="the result of ssm.rms_norm is also used outside of the region", {{.*}}ops="rms_norm hadamard"
func.func @used_twice(%x: tensor<?x64xf32>, %w: tensor<64xf32>) -> (tensor<?x64xf32>, tensor<?x64xf32>) {
  %0 = ssm.rms_norm %x, %w : tensor<?x64xf32>, tensor<64xf32> -> tensor<?x64xf32>
  %1 = ssm.hadamard %0 {block = 64 : i64} : tensor<?x64xf32> -> tensor<?x64xf32>
  return %0, %1 : tensor<?x64xf32>, tensor<?x64xf32>
}

// DP: [Missed] fuse {{.*}}Function=used_behind {{.*}}Reason="the result of ssm.silu is also used outside of the region", {{.*}}ops="rms_norm silu hadamard"
// GREEDY: [Missed] fuse {{.*}}Function=used_behind {{.*}}Reason="the result of ssm.silu is also used outside of the region", {{.*}}ops="rms_norm silu hadamard"
func.func @used_behind(%x: tensor<?x64xf32>, %w: tensor<64xf32>) -> tensor<?x64xf32> {
  %0 = ssm.rms_norm %x, %w : tensor<?x64xf32>, tensor<64xf32> -> tensor<?x64xf32>
  %1 = ssm.silu %0 : tensor<?x64xf32>
  %2 = ssm.hadamard %1 {block = 64 : i64} : tensor<?x64xf32> -> tensor<?x64xf32>
  %3 = ssm.add %2, %1 : tensor<?x64xf32>, tensor<?x64xf32>
  return %3 : tensor<?x64xf32>
}

// DP: [Missed] fuse {{.*}}Function=blocks {{.*}}Reason="blocks of 32 of ssm.hadamard do not divide the groups of 48 of ssm.rms_norm", {{.*}}ops="rms_norm hadamard"
// GREEDY: [Missed] fuse {{.*}}Function=blocks {{.*}}Reason="blocks of 32 of ssm.hadamard do not divide the groups of 48 of ssm.rms_norm", {{.*}}ops="rms_norm hadamard"
func.func @blocks(%x: tensor<?x96xf32>, %w: tensor<96xf32>) -> tensor<?x96xf32> {
  %0 = ssm.rms_norm %x, %w {group_size = 48 : i64} : tensor<?x96xf32>, tensor<96xf32> -> tensor<?x96xf32>
  %1 = ssm.hadamard %0 {block = 32 : i64} : tensor<?x96xf32> -> tensor<?x96xf32>
  return %1 : tensor<?x96xf32>
}

// DP: [Missed] fuse {{.*}}Function=large {{.*}}Reason="ssm.rms_norm has groups of 65536 elements, of which a kernel rotates 32768 at most", {{.*}}ops="rms_norm hadamard"
// GREEDY: [Missed] fuse {{.*}}Function=large {{.*}}Reason="ssm.rms_norm has groups of 65536 elements, of which a kernel rotates 32768 at most", {{.*}}ops="rms_norm hadamard"
func.func @large(%x: tensor<?x65536xf32>, %w: tensor<65536xf32>) -> tensor<?x65536xf32> {
  %0 = ssm.rms_norm %x, %w : tensor<?x65536xf32>, tensor<65536xf32> -> tensor<?x65536xf32>
  %1 = ssm.hadamard %0 {block = 64 : i64} : tensor<?x65536xf32> -> tensor<?x65536xf32>
  return %1 : tensor<?x65536xf32>
}

// A second transform has a kernel of its own.
// DP: [Passed] fuse {{.*}}Function=twice {{.*}}ops="rms_norm hadamard"
// GREEDY: [Missed] fuse {{.*}}Function=twice {{.*}}Reason="ssm.hadamard and ssm.hadamard cannot share a kernel", {{.*}}ops="rms_norm hadamard silu hadamard"
func.func @twice(%x: tensor<?x64xf32>, %w: tensor<64xf32>) -> tensor<?x64xf32> {
  %0 = ssm.rms_norm %x, %w : tensor<?x64xf32>, tensor<64xf32> -> tensor<?x64xf32>
  %1 = ssm.hadamard %0 {block = 64 : i64} : tensor<?x64xf32> -> tensor<?x64xf32>
  %2 = ssm.silu %1 : tensor<?x64xf32>
  %3 = ssm.hadamard %2 {block = 64 : i64} : tensor<?x64xf32> -> tensor<?x64xf32>
  return %3 : tensor<?x64xf32>
}

// So has one of the sums of a norm.
// DP: [Missed] fuse {{.*}}Function=sums {{.*}}Reason="a further result of the anchor is used in the region", {{.*}}ops="rms_norm hadamard"
// GREEDY: [Missed] fuse {{.*}}Function=sums {{.*}}Reason="a further result of the anchor is used in the region", {{.*}}ops="rms_norm hadamard"
func.func @sums(%x: tensor<?x64xf32>, %w: tensor<64xf32>) -> (tensor<?x64xf32>, tensor<?x64xf32>) {
  %0, %s = ssm.rms_norm %x, %w residual(%x : tensor<?x64xf32>) : tensor<?x64xf32>, tensor<64xf32> -> tensor<?x64xf32>, tensor<?x64xf32>
  %1 = ssm.hadamard %s {block = 64 : i64} : tensor<?x64xf32> -> tensor<?x64xf32>
  return %0, %1 : tensor<?x64xf32>, tensor<?x64xf32>
}

//--- static.mlir

// Three at a time.
// CHECK-LABEL: func.func @five(
// CHECK: ssm.fused
// CHECK: ssm.exp
// CHECK-NEXT: ssm.neg
// CHECK-NEXT: ssm.silu
// CHECK-NEXT: ssm.yield
// CHECK: ssm.fused
// CHECK: ssm.neg
// CHECK-NEXT: ssm.exp
// CHECK-NEXT: ssm.yield
func.func @five(%x: tensor<?x8xf32>) -> tensor<?x8xf32> {
  %0 = ssm.exp %x : tensor<?x8xf32>
  %1 = ssm.neg %0 : tensor<?x8xf32>
  %2 = ssm.silu %1 : tensor<?x8xf32>
  %3 = ssm.neg %2 : tensor<?x8xf32>
  %4 = ssm.exp %3 : tensor<?x8xf32>
  return %4 : tensor<?x8xf32>
}

//--- stats.mlir

// Entropy decides: H of the pair is high, and without it the score is too low.
// HIGH-LABEL: func.func @entropy(
// HIGH: ssm.fused
// HIGH-SAME: score(<entropy = 1.000000e+00
// WITHOUT-LABEL: func.func @entropy(
// WITHOUT-NOT: ssm.fused
func.func @entropy(%x: tensor<?x8xf32>, %p: tensor<8x8xf32>) -> tensor<?x8xf32> {
  %0 = ssm.projection %x, %p {ssm.stats = #ssm.stats<entropy = 1.0, bins = 256, min = 0.0, max = 1.0, mean = 0.5, variance = 0.1, kurtosis = 3.0>}
      : tensor<?x8xf32>, tensor<8x8xf32> -> tensor<?x8xf32>
  %1 = ssm.exp %0 {ssm.stats = #ssm.stats<entropy = 5.0, bins = 256, min = 0.0, max = 1.0, mean = 0.5, variance = 0.1, kurtosis = 3.0>} : tensor<?x8xf32>
  %2 = ssm.silu %1 {ssm.stats = #ssm.stats<entropy = 5.0, bins = 256, min = 0.0, max = 1.0, mean = 0.5, variance = 0.1, kurtosis = 3.0>} : tensor<?x8xf32>
  return %2 : tensor<?x8xf32>
}

//--- tokens.mlir

// A projection of one token of each sequence makes what a norm before it does
// for itself, where many blocks share it.
// CHECK-LABEL: func.func @token(
// CHECK: ssm.fused
// CHECK: ssm.rms_norm
// CHECK: ssm.cast
// CHECK: ssm.projection
// CHECK: ssm.yield
// CHECK-NOT: ssm.fused
// CHECK: return
// CPU-LABEL: func.func @token(
// CPU: ssm.fused
// CPU: ssm.cast
// CPU-NEXT: ssm.yield
// CPU: }
// CPU-NEXT: ssm.projection
func.func @token(%x: tensor<?x1x64xf32>, %g: tensor<64xf32>, %w: tensor<128x64xf16>) -> tensor<?x1x128xf16> {
  %n = ssm.rms_norm %x, %g : tensor<?x1x64xf32>, tensor<64xf32> -> tensor<?x1x64xf32>
  %h = ssm.cast %n : tensor<?x1x64xf32> to tensor<?x1x64xf16>
  %y = ssm.projection %h, %w : tensor<?x1x64xf16>, tensor<128x64xf16> -> tensor<?x1x128xf16>
  return %y : tensor<?x1x128xf16>
}

// Not of many tokens.
// CHECK-LABEL: func.func @tokens(
// CHECK: ssm.fused
// CHECK: ssm.yield
// CHECK: }
// CHECK-NEXT: ssm.projection
func.func @tokens(%x: tensor<?x?x64xf32>, %g: tensor<64xf32>, %w: tensor<128x64xf16>) -> tensor<?x?x128xf16> {
  %n = ssm.rms_norm %x, %g : tensor<?x?x64xf32>, tensor<64xf32> -> tensor<?x?x64xf32>
  %h = ssm.cast %n : tensor<?x?x64xf32> to tensor<?x?x64xf16>
  %y = ssm.projection %h, %w : tensor<?x?x64xf16>, tensor<128x64xf16> -> tensor<?x?x128xf16>
  return %y : tensor<?x?x128xf16>
}

// Nor what others read, nor by groups, nor twice, nor behind a projection.
// CHECK-LABEL: func.func @apart(
// CHECK-NEXT: ssm.rms_norm
// CHECK-NEXT: ssm.projection
// CHECK-NEXT: ssm.fused
// CHECK: ssm.silu
// CHECK: ssm.rms_norm
// CHECK-NEXT: ssm.yield
// CHECK-NEXT: }
// CHECK-NEXT: ssm.projection
// REASON-DAG: Function=apart {{.*}}Reason="ssm.projection takes no op behind it into its kernel"
// REASON-DAG: Function=apart {{.*}}Reason="a norm before a projection has groups of 32 elements, of rows of 64"
func.func @apart(%x: tensor<?x1x64xf32>, %g: tensor<64xf32>, %w: tensor<64x64xf32>) -> (tensor<?x1x64xf32>, tensor<?x1x64xf32>) {
  %n = ssm.rms_norm %x, %g : tensor<?x1x64xf32>, tensor<64xf32> -> tensor<?x1x64xf32>
  %y = ssm.projection %n, %w : tensor<?x1x64xf32>, tensor<64x64xf32> -> tensor<?x1x64xf32>
  %s = ssm.silu %y : tensor<?x1x64xf32>
  %m = ssm.rms_norm %s, %g {group_size = 32 : i64} : tensor<?x1x64xf32>, tensor<64xf32> -> tensor<?x1x64xf32>
  %z = ssm.projection %m, %w : tensor<?x1x64xf32>, tensor<64x64xf32> -> tensor<?x1x64xf32>
  return %n, %z : tensor<?x1x64xf32>, tensor<?x1x64xf32>
}

// A scan of one token makes its delta for itself.
// CHECK-LABEL: func.func @low_rank(
// CHECK: ssm.fused
// CHECK: ssm.projection
// CHECK-NEXT: ssm.selective_scan
// CHECK-NEXT: ssm.yield
// CPU-LABEL: func.func @low_rank(
// CPU-NOT: ssm.fused
func.func @low_rank(%u: tensor<?x1x32xf16>, %l: tensor<?x1x24xf16>, %w: tensor<32x24xf16>, %A: tensor<32x16xf32>,
                    %B: tensor<?x1x1x16xf16>) -> tensor<?x1x32xf16> {
  %p = ssm.projection %l, %w : tensor<?x1x24xf16>, tensor<32x24xf16> -> tensor<?x1x32xf16>
  %s = ssm.selective_scan %u, %p, %A, %B, %B {delta_softplus}
      : tensor<?x1x32xf16>, tensor<?x1x32xf16>, tensor<32x16xf32>, tensor<?x1x1x16xf16>, tensor<?x1x1x16xf16> -> tensor<?x1x32xf16>
  return %s : tensor<?x1x32xf16>
}
