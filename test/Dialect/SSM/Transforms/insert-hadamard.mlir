// ssm-insert-hadamard: modes, blocks, what is refused, the reasons.

// RUN: corey-opt %s --ssm-insert-hadamard="mode=all" | FileCheck %s --check-prefixes=CHECK,ALL
// RUN: corey-opt %s --ssm-insert-hadamard | FileCheck %s --check-prefixes=CHECK,STATS
// RUN: corey-opt %s --ssm-insert-hadamard="mode=none" | FileCheck %s --check-prefixes=CHECK,NONE
// Twice is once.
// RUN: corey-opt %s --ssm-insert-hadamard="mode=all" --ssm-insert-hadamard="mode=all" | FileCheck %s --check-prefixes=CHECK,ALL
// RUN: corey-opt %s --ssm-insert-hadamard="mode=all" --verify-roundtrip > /dev/null

// RUN: corey-opt %s --ssm-insert-hadamard="mode=all block=64" | FileCheck %s --check-prefix=BLOCK
// RUN: corey-opt %s --ssm-insert-hadamard="mode=all max-block=128" | FileCheck %s --check-prefix=MAX
// RUN: corey-opt %s --ssm-insert-hadamard="mode=all keep-weight-type" | FileCheck %s --check-prefix=KEEP
// RUN: corey-opt %s --ssm-insert-hadamard="min-peak-to-rms=100" | FileCheck %s --check-prefix=PEAK
// RUN: corey-opt %s --ssm-insert-hadamard="min-peak-to-rms=100 min-kurtosis=100" | FileCheck %s --check-prefix=KURTOSIS
// RUN: corey-opt %s --ssm-insert-hadamard="min-entropy-gain=5" | FileCheck %s --check-prefix=GAIN
// RUN: corey-opt %s --ssm-insert-hadamard --remarks-filter=ssm-insert-hadamard 2>&1 >/dev/null | FileCheck %s --check-prefix=REMARK
// RUN: corey-opt %s --ssm-insert-hadamard="mode=all block=64" --remarks-filter=ssm-insert-hadamard 2>&1 >/dev/null | FileCheck %s --check-prefix=REMARK64
// RUN: %if llvm-statistics %{ corey-opt %s --ssm-insert-hadamard --mlir-pass-statistics --mlir-pass-statistics-display=list 2>&1 >/dev/null | FileCheck %s --check-prefix=STATISTICS %}
// STATISTICS: SSMInsertHadamard
// STATISTICS: num-pairs-inserted
// STATISTICS: num-pairs-rejected

// RUN: not corey-opt %s --ssm-insert-hadamard="block=3" 2>&1 | FileCheck %s --check-prefix=BADBLOCK
// BADBLOCK: error: ssm-insert-hadamard: expected 'block' to be 0 or a power of two, got 3
// RUN: not corey-opt %s --ssm-insert-hadamard="max-block=1" 2>&1 | FileCheck %s --check-prefix=BADMAX
// BADMAX: error: ssm-insert-hadamard: expected 'max-block' to be at least 2, got 1
// RUN: not corey-opt %s --ssm-insert-hadamard="mode=some" 2>&1 | FileCheck %s --check-prefix=BADMODE
// BADMODE: Cannot find option named 'some'

// 768 = 3 256. A 16-bit weight is rotated in f32. Bias and residual stay.
// CHECK-LABEL: func.func @no_statistics(
// CHECK-SAME: %[[X:.+]]: tensor<?x?x768xbf16>, %[[W:.+]]: tensor<64x768xbf16>, %[[B:.+]]: tensor<64xf32>, %[[R:.+]]: tensor<?x?x64xf32>
// ALL-DAG: %[[HX:.+]] = ssm.hadamard %[[X]] {block = 256 : i64} : tensor<?x?x768xbf16> -> tensor<?x?x768xbf16>
// ALL-DAG: %[[F:.+]] = ssm.cast %[[W]] : tensor<64x768xbf16> to tensor<64x768xf32>
// ALL-DAG: %[[HW:.+]] = ssm.hadamard %[[F]] {block = 256 : i64} : tensor<64x768xf32> -> tensor<64x768xf32>
// ALL: ssm.projection %[[HX]], %[[HW]] bias(%[[B]] : tensor<64xf32>) residual(%[[R]] : tensor<?x?x64xf32>) :
// STATS-NEXT: ssm.projection %[[X]], %[[W]]
// NONE-NEXT: ssm.projection %[[X]], %[[W]]
// BLOCK-LABEL: func.func @no_statistics(
// BLOCK: ssm.hadamard {{.*}} {block = 64 : i64}
// MAX-LABEL: func.func @no_statistics(
// MAX: ssm.hadamard {{.*}} {block = 128 : i64}
// KEEP-LABEL: func.func @no_statistics(
// KEEP: ssm.hadamard %{{.+}} {block = 256 : i64} : tensor<64x768xbf16> -> tensor<64x768xbf16>
// KEEP-NEXT: ssm.projection
// REMARK: remark: [Missed] NotRotated | Category:ssm-insert-hadamard | Function=no_statistics | Reason="there are no statistics of the input"
func.func @no_statistics(%x: tensor<?x?x768xbf16>, %w: tensor<64x768xbf16>, %b: tensor<64xf32>, %r: tensor<?x?x64xf32>) -> tensor<?x?x64xf32> {
  %y = ssm.projection %x, %w bias(%b : tensor<64xf32>) residual(%r : tensor<?x?x64xf32>)
      : tensor<?x?x768xbf16>, tensor<64x768xbf16> -> tensor<?x?x64xf32>
  return %y : tensor<?x?x64xf32>
}

// Who asks gets it in every mode, once.
// CHECK-LABEL: func.func @asked(
// CHECK-COUNT-2: ssm.hadamard {{.*}} {block = 512 : i64}
// CHECK-NOT: ssm.hadamard
// CHECK-NOT: ssm.rotate
// REMARK: [Passed] Rotated | {{.*}} | Function=asked | Reason="asked for", block=512
func.func @asked(%x: tensor<?x2560xf32>, %w: tensor<8x2560xf32>) -> tensor<?x8xf32> {
  %y = ssm.projection %x, %w {ssm.rotate} : tensor<?x2560xf32>, tensor<8x2560xf32> -> tensor<?x8xf32>
  return %y : tensor<?x8xf32>
}

// Outliers by their peak: 40 / sqrt(1.01) rms. One transform serves two
// projections.
// CHECK-LABEL: func.func @peaks(
// CHECK-SAME: %[[X:[a-z0-9]+]]: tensor<?x64xf32>
// ALL: %[[HX:.+]] = ssm.hadamard %[[X]] {block = 64 : i64}
// STATS: %[[HX:.+]] = ssm.hadamard %[[X]] {block = 64 : i64}
// STATS: ssm.projection %[[HX]],
// STATS: ssm.projection %[[HX]],
// NONE-NOT: ssm.hadamard
// PEAK-LABEL: func.func @peaks(
// PEAK: ssm.hadamard
// KURTOSIS-LABEL: func.func @peaks(
// KURTOSIS-NOT: ssm.hadamard
// KURTOSIS: func.func @refused(
// GAIN-LABEL: func.func @peaks(
// GAIN-NOT: ssm.hadamard
// GAIN: func.func @refused(
// REMARK: [Passed] Rotated | {{.*}} | Function=peaks | Reason="peak to rms 39.80 at least 8.00", block=64, entropy=1.5{{0*}}e+00, entropy-after=4.68{{[0-9]*}}e+00, kurtosis=5.0{{0*}}e+01, peak-to-rms=3.98
func.func @peaks(%x: tensor<?x64xf32> {ssm.stats = #ssm.stats<entropy = 1.5, bins = 256, min = -1.0, max = 40.0, mean = 0.1, variance = 1.0, kurtosis = 50.0>},
                 %v: tensor<8x64xf32>, %w: tensor<4x64xf32>) -> (tensor<?x8xf32>, tensor<?x4xf32>) {
  %y = ssm.projection %x, %v : tensor<?x64xf32>, tensor<8x64xf32> -> tensor<?x8xf32>
  %z = ssm.projection %x, %w : tensor<?x64xf32>, tensor<4x64xf32> -> tensor<?x4xf32>
  return %y, %z : tensor<?x8xf32>, tensor<?x4xf32>
}

// Nothing to gain: as good as normal; and a mean that would gather in one
// coordinate of each block.
// CHECK-LABEL: func.func @nothing_to_gain(
// STATS-NOT: ssm.hadamard
// REMARK: [Missed] NotRotated | {{.*}} | Function=nothing_to_gain | Reason="no outliers: peak to rms 4.20 below 8.00, kurtosis 3.10 below 6.00"
// REMARK: [Missed] NotRotated | {{.*}} | Function=nothing_to_gain | Reason="estimated gain of entropy -{{.*}} nats below 0.000"
func.func @nothing_to_gain(%x: tensor<?x64xf32> {ssm.stats = #ssm.stats<entropy = 4.8, bins = 256, min = -4.2, max = 4.0, mean = 0.0, variance = 1.0, kurtosis = 3.1>},
                           %w: tensor<8x64xf32>, %v: tensor<64xf32>) -> (tensor<?x8xf32>, tensor<?x64xf32>, tensor<?x8xf32>) {
  %y = ssm.projection %x, %w : tensor<?x64xf32>, tensor<8x64xf32> -> tensor<?x8xf32>
  // Of an op with two results.
  %n, %r = ssm.rms_norm %x, %v residual(%x : tensor<?x64xf32>)
      {ssm.stats = [#ssm.stats<entropy = 4.0, bins = 256, min = 0.0, max = 20.0, mean = 3.0, variance = 1.0, kurtosis = 9.0>, unit]}
      : tensor<?x64xf32>, tensor<64xf32> -> tensor<?x64xf32>, tensor<?x64xf32>
  %z = ssm.projection %n, %w : tensor<?x64xf32>, tensor<8x64xf32> -> tensor<?x8xf32>
  return %y, %r, %z : tensor<?x8xf32>, tensor<?x64xf32>, tensor<?x8xf32>
}

// Refused in every mode. An axis of 12 has blocks of 4, but not of 64.
// CHECK-LABEL: func.func @refused(
// CHECK-NOT: ssm.hadamard %{{.*}} {block = 1 : i64}
// CHECK: ssm.hadamard %{{.*}} {block = 8 : i64}
// CHECK-NOT: ssm.hadamard
// REMARK: Function=refused | Reason="the weight is quantized"
// REMARK: Function=refused | Reason="the input is rotated already"
// REMARK: Function=refused | Reason="63 is odd"
// REMARK64: Function=refused | Reason="63 is no multiple of block 64"
func.func @refused(%x: tensor<?x64xf32>, %q: tensor<8x64xi8>, %s: tensor<f32>, %w: tensor<8x64xf32>, %o: tensor<?x63xf32>, %v: tensor<8x63xf32>)
    -> (tensor<?x8xf32>, tensor<?x8xf32>, tensor<?x8xf32>) {
  %0 = ssm.projection %x, %q weight_scale(%s : tensor<f32>) {ssm.rotate} : tensor<?x64xf32>, tensor<8x64xi8> -> tensor<?x8xf32>
  %h = ssm.hadamard %x {block = 8 : i64} : tensor<?x64xf32> -> tensor<?x64xf32>
  %1 = ssm.projection %h, %w {ssm.rotate} : tensor<?x64xf32>, tensor<8x64xf32> -> tensor<?x8xf32>
  %2 = ssm.projection %o, %v {ssm.rotate} : tensor<?x63xf32>, tensor<8x63xf32> -> tensor<?x8xf32>
  return %0, %1, %2 : tensor<?x8xf32>, tensor<?x8xf32>, tensor<?x8xf32>
}
