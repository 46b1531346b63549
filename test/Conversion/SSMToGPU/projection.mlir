// Lowering of ssm.projection: kernels that stream the weights once for up to 1, 4
// and 8 rows, then the product of the run-time library, or tiles.

// RUN: corey-opt %s --convert-ssm-to-gpu --canonicalize | FileCheck %s
// RUN: corey-opt %s --convert-ssm-to-gpu --canonicalize | FileCheck %s --check-prefix=KERNEL

// Tiles pass through shared memory, double buffered: one barrier a step.
// KERNEL-LABEL: gpu.func @projection(
// KERNEL: llvm.mlir.addressof @shared_25600
// KERNEL: llvm.load {{.*}} invariant {alignment = 16 : i64} : !llvm.ptr<1> -> vector<4xf32>
// KERNEL: nvvm.barrier
// KERNEL: scf.for
// KERNEL-COUNT-64: llvm.intr.fma
// KERNEL: nvvm.barrier
// KERNEL: scf.yield
// KERNEL: llvm.store {{.*}} {alignment = 16 : i64} : vector<4xf32>, !llvm.ptr<1>

// CHECK-LABEL: func.func @plain(
// CHECK-SAME: %[[X:.+]]: tensor<?x?x256xf32>,
// CHECK: %[[ROWS:.+]] = arith.muli
// CHECK: arith.cmpi sle, %[[ROWS]], %c1
// CHECK: scf.if
// CHECK: gpu.launch_func @kernels::@projection_stream_1{{(_[0-9]+)?}}
// CHECK: } else {
// CHECK: arith.cmpi sle, %[[ROWS]], %c4
// CHECK: gpu.launch_func @kernels::@projection_stream_4{{(_[0-9]+)?}}
// CHECK: } else {
// CHECK: arith.cmpi sle, %[[ROWS]], %c8
// CHECK: gpu.launch_func @kernels::@projection_stream_8{{(_[0-9]+)?}}
// CHECK: } else {
// CHECK: %[[DONE:.+]] = func.call @corey_rt_device_gemm({{.*}}, %c64_i64, %c256_i64, {{.*}}, %c32_i64, %c32_i64, %c0_i64)
// CHECK: %[[MISSING:.+]] = arith.cmpi eq, %[[DONE]], %c0_i64
// CHECK: scf.if %[[MISSING]] {
// CHECK: gpu.launch_func @kernels::@projection
func.func @plain(%x: tensor<?x?x256xf32>, %w: tensor<64x256xf32>) -> tensor<?x?x64xf32> {
  %y = ssm.projection %x, %w : tensor<?x?x256xf32>, tensor<64x256xf32> -> tensor<?x?x64xf32>
  return %y : tensor<?x?x64xf32>
}

// Types that differ have no library: tiles at once.
// CHECK-LABEL: func.func @mixed(
// CHECK-NOT: corey_rt_device_gemm
// CHECK: return
func.func @mixed(%x: tensor<?x256xf32>, %w: tensor<64x256xbf16>) -> tensor<?x64xf32> {
  %y = ssm.projection %x, %w : tensor<?x256xf32>, tensor<64x256xbf16> -> tensor<?x64xf32>
  return %y : tensor<?x64xf32>
}

// One output type for the library, the codes of bf16, f32 and f16.
// CHECK-LABEL: func.func @epilogue(
// CHECK: func.call @corey_rt_device_gemm({{.*}}, %c-16_i64, %c32_i64, %c16_i64)
func.func @epilogue(%x: tensor<?x256xbf16>, %w: tensor<64x256xbf16>, %b: tensor<64xf16>,
                    %r: tensor<?x64xf32>) -> tensor<?x64xf32> {
  %y = ssm.projection %x, %w bias(%b : tensor<64xf16>) residual(%r : tensor<?x64xf32>)
      : tensor<?x256xbf16>, tensor<64x256xbf16> -> tensor<?x64xf32>
  return %y : tensor<?x64xf32>
}

// Axes that the library does not have are folded if strides allow.
// CHECK-LABEL: func.func @outer(
// CHECK-COUNT-2: arith.cmpi eq
// CHECK: %[[FOLDS:.+]] = arith.andi
// CHECK: scf.if %[[FOLDS]] -> (i64) {
// CHECK: func.call @corey_rt_device_gemm
// CHECK: } else {
// CHECK: scf.yield %c0_i64
func.func @outer(%x: tensor<?x?x9x5x256xf32>, %w: tensor<64x256xf32>) -> tensor<?x?x9x5x64xf32> {
  %y = ssm.projection %x, %w : tensor<?x?x9x5x256xf32>, tensor<64x256xf32> -> tensor<?x?x9x5x64xf32>
  return %y : tensor<?x?x9x5x64xf32>
}

// Known rows need no branch.
// CHECK-LABEL: func.func @known(
// CHECK-NOT: scf.if
// CHECK: gpu.launch_func @kernels::@projection_stream_4
// CHECK-NOT: gpu.launch_func
// CHECK: return
func.func @known(%x: tensor<3x256xf32>, %w: tensor<64x256xi8>, %s: tensor<64xf32>) -> tensor<3x64xf32> {
  %y = ssm.projection %x, %w weight_scale(%s : tensor<64xf32>)
      : tensor<3x256xf32>, tensor<64x256xi8> -> tensor<3x64xf32>
  return %y : tensor<3x64xf32>
}
