// What reads dt and decay of ssm.ssd takes the innermost stride of an argument
// from its descriptor, on both targets, and nothing copies it. What reads the
// tensors of a scan or a convolution of marked ones does on a GPU.

// RUN: corey-opt %s --ssm-any-strides --convert-ssm-to-linalg --canonicalize --corey-bufferize | FileCheck %s --check-prefixes=CHECK,CPU
// RUN: corey-opt %s --ssm-any-strides --convert-ssm-to-gpu --canonicalize --corey-bufferize=keep-copies | FileCheck %s --check-prefixes=CHECK,GPU
// RUN: corey-opt %s --corey-cpu-pipeline -o /dev/null
// RUN: corey-opt %s --corey-gpu-pipeline -o /dev/null

// CHECK-LABEL: func.func @main(
// CHECK-SAME: %[[X:[a-z0-9]+]]: memref<?x?x2x8xf32, strided<[?, ?, ?, 1], offset: ?>>,
// CHECK-SAME: %[[DECAY:[a-z0-9]+]]: memref<?x?x2xf32, strided<[?, ?, ?], offset: ?>> {ssm.any_strides},
// CHECK-NOT: memref.copy
// CPU: memref.load %[[DECAY]]
// GPU: %{{.+}}, %{{.+}}, %{{.+}}:3, %[[STRIDES:.+]]:3 = memref.extract_strided_metadata %[[DECAY]]
// GPU: %[[LAST:.+]] = arith.index_cast %[[STRIDES]]#2 : index to i64
// GPU: gpu.launch_func @kernels::@ssd_step {{.*}} args({{.*}}%[[LAST]] : i64
// CHECK-NOT: memref.copy
// CHECK: return
func.func @main(%x: tensor<?x?x2x8xf32>, %decay: tensor<?x?x2xf32>, %B: tensor<?x?x1x4xf32>) -> tensor<?x?x2x8xf32> {
  %y = ssm.ssd %x decay(%decay : tensor<?x?x2xf32>) B(%B) C(%B) : tensor<?x?x2x8xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x2x8xf32>
  return %y : tensor<?x?x2x8xf32>
}

// The same from within the region of a kernel.
// CHECK-LABEL: func.func @fused(
// CHECK-SAME: %[[DT:[a-z0-9]+]]: memref<?x?x2xf32, strided<[?, ?, ?], offset: ?>> {ssm.any_strides},
// CHECK-NOT: memref.copy
// CPU: memref.load %[[DT]]
// GPU: memref.extract_strided_metadata %[[DT]]
// CHECK-NOT: memref.copy
// CHECK: return
func.func @fused(%x: tensor<?x?x2x8xf32>, %dt: tensor<?x?x2xf32>, %A: tensor<2xf32>, %B: tensor<?x?x1x4xf32>) -> tensor<?x?x2x8xf32> {
  %z = ssm.fused ins(%x, %dt, %A, %B : tensor<?x?x2x8xf32>, tensor<?x?x2xf32>, tensor<2xf32>, tensor<?x?x1x4xf32>) -> tensor<?x?x2x8xf32> {
  ^bb0(%a: tensor<?x?x2x8xf32>, %d: tensor<?x?x2xf32>, %r: tensor<2xf32>, %b: tensor<?x?x1x4xf32>):
    %0 = ssm.ssd %a dt(%d : tensor<?x?x2xf32>) A(%r : tensor<2xf32>) B(%b) C(%b) : tensor<?x?x2x8xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x2x8xf32>
    %1 = ssm.silu %0 : tensor<?x?x2x8xf32>
    ssm.yield %1 : tensor<?x?x2x8xf32>
  }
  return %z : tensor<?x?x2x8xf32>
}

// Results too: kernels of a GPU that can write to the caller's memory whatever
// its strides are; other code gets memory of its own, which is copied there.
// CHECK-LABEL: func.func @scan(
// CHECK-SAME: %[[U:[a-z0-9]+]]: memref<?x?x8xbf16, strided<[?, ?, ?], offset: ?>> {ssm.any_strides},
// CHECK-SAME: %[[OUT:[a-z0-9]+]]: memref<?x?x8xbf16, strided<[?, ?, ?], offset: ?>> {ssm.any_strides})
// GPU-NOT: memref.copy
// GPU: memref.extract_strided_metadata %[[U]]
// GPU: memref.extract_strided_metadata %[[OUT]]
// GPU: gpu.launch_func @kernels::@selective_scan_step
// GPU-NOT: memref.copy
// CPU: linalg.generic {{.*}}outs(%[[OUT]] : memref<?x?x8xbf16, strided<[?, ?, ?], offset: ?>>)
// CHECK: return
func.func @scan(%u: tensor<?x?x8xbf16> {ssm.any_strides}, %A: tensor<8x4xf32>, %B: tensor<?x?x1x4xbf16> {ssm.any_strides}) -> (tensor<?x?x8xbf16> {ssm.any_strides}) {
  %y = ssm.selective_scan %u, %u, %A, %B, %B : tensor<?x?x8xbf16>, tensor<?x?x8xbf16>, tensor<8x4xf32>, tensor<?x?x1x4xbf16>, tensor<?x?x1x4xbf16> -> tensor<?x?x8xbf16>
  return %y : tensor<?x?x8xbf16>
}

// The same from within the region of a kernel.
// CHECK-LABEL: func.func @fused_conv(
// CHECK-SAME: %[[X:[a-z0-9]+]]: memref<?x?x8xbf16, strided<[?, ?, ?], offset: ?>> {ssm.any_strides},
// CHECK-SAME: %[[OUT:[a-z0-9]+]]: memref<?x?x8xbf16, strided<[?, ?, ?], offset: ?>> {ssm.any_strides})
// GPU-NOT: memref.copy
// GPU: memref.extract_strided_metadata %[[X]]
// GPU: memref.extract_strided_metadata %[[OUT]]
// GPU: gpu.launch_func @kernels::@causal_conv
// GPU-NOT: memref.copy
// CHECK: return
func.func @fused_conv(%x: tensor<?x?x8xbf16> {ssm.any_strides}, %w: tensor<8x4xbf16>) -> (tensor<?x?x8xbf16> {ssm.any_strides}) {
  %z = ssm.fused ins(%x, %w : tensor<?x?x8xbf16>, tensor<8x4xbf16>) -> tensor<?x?x8xbf16> {
  ^bb0(%a: tensor<?x?x8xbf16>, %t: tensor<8x4xbf16>):
    %0 = ssm.causal_conv %a, %t : tensor<?x?x8xbf16>, tensor<8x4xbf16> -> tensor<?x?x8xbf16>
    %1 = ssm.silu %0 : tensor<?x?x8xbf16>
    ssm.yield %1 : tensor<?x?x8xbf16>
  }
  return %z : tensor<?x?x8xbf16>
}

// What only reads and writes vectors has a copy made of either.
// CHECK-LABEL: func.func @norm(
// CHECK-SAME: %[[X:[a-z0-9]+]]: memref<?x8xf32, strided<[?, ?], offset: ?>> {ssm.any_strides},
// CHECK-SAME: %[[OUT:[a-z0-9]+]]: memref<?x8xf32, strided<[?, ?], offset: ?>> {ssm.any_strides})
// GPU: memref.copy %[[X]], %{{.+}}
// GPU: gpu.launch_func @kernels::@rms_norm
// GPU: memref.copy %{{.+}}, %[[OUT]]
// CHECK: return
func.func @norm(%x: tensor<?x8xf32> {ssm.any_strides}, %w: tensor<8xf32>) -> (tensor<?x8xf32> {ssm.any_strides}) {
  %y = ssm.rms_norm %x, %w : tensor<?x8xf32>, tensor<8xf32> -> tensor<?x8xf32>
  return %y : tensor<?x8xf32>
}
