// What reads dt and decay of ssm.ssd takes the innermost stride of an argument
// from its descriptor, on both targets, and nothing copies it.

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
