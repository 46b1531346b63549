// Ops that are equal to an earlier one take what that became, with operands and
// a chunk site of their own; what a lowering looks at keeps them apart.

// RUN: corey-opt %s --convert-ssm-to-gpu=chip=sm_90a --canonicalize | FileCheck %s

// CHECK-LABEL: func.func @same(
// CHECK-SAME: %[[X:[a-z0-9]+]]: tensor<?x?x64xf16>, %[[Y:[a-z0-9]+]]: tensor<?x?x64xf16>)
// CHECK: %[[XB:.+]] = bufferization.to_buffer %[[X]] read_only
// CHECK: memref.extract_aligned_pointer_as_index %[[XB]]
// CHECK: gpu.launch_func @kernels::@[[SILU:pointwise[_0-9]*]] blocks
// CHECK: %[[YB:.+]] = bufferization.to_buffer %[[Y]] read_only
// CHECK: memref.extract_aligned_pointer_as_index %[[YB]]
// CHECK: gpu.launch_func @kernels::@[[SILU]] blocks
func.func @same(%x: tensor<?x?x64xf16>, %y: tensor<?x?x64xf16>) -> (tensor<?x?x64xf16>, tensor<?x?x64xf16>) {
  %a = ssm.silu %x : tensor<?x?x64xf16>
  %b = ssm.silu %y : tensor<?x?x64xf16>
  return %a, %b : tensor<?x?x64xf16>, tensor<?x?x64xf16>
}

// The second slice is not aligned to the vectors of the first.
// CHECK-LABEL: func.func @slices(
// CHECK: gpu.launch_func @kernels::@[[ALIGNED:pointwise[_0-9]*]] blocks
// CHECK-NOT: gpu.launch_func @kernels::@[[ALIGNED]] blocks
// CHECK: gpu.launch_func @kernels::@pointwise{{.*}} blocks
// CHECK: return
func.func @slices(%x: tensor<?x?x128xf16>, %B: index, %L: index) -> (tensor<?x?x64xf16>, tensor<?x?x64xf16>) {
  %even = tensor.extract_slice %x[0, 0, 64] [%B, %L, 64] [1, 1, 1] : tensor<?x?x128xf16> to tensor<?x?x64xf16>
  %odd = tensor.extract_slice %x[0, 0, 1] [%B, %L, 64] [1, 1, 1] : tensor<?x?x128xf16> to tensor<?x?x64xf16>
  %a = ssm.silu %even : tensor<?x?x64xf16>
  %b = ssm.silu %odd : tensor<?x?x64xf16>
  return %a, %b : tensor<?x?x64xf16>, tensor<?x?x64xf16>
}

// CHECK-LABEL: func.func @sites(
// CHECK-DAG: llvm.mlir.addressof @corey_site_layers.0.scan
// CHECK-DAG: llvm.mlir.addressof @corey_site_layers.1.scan
func.func @sites(%u: tensor<?x?x64xf32>, %delta: tensor<?x?x64xf32>, %A: tensor<64x16xf32>, %B: tensor<?x?x1x16xf32>,
                 %batch: index, %length: index) -> (tensor<?x?x64xf32>, tensor<?x?x64xf32>) {
  %c0 = ssm.bind_chunk @layers.0.scan(%batch, %length)
  %y = ssm.selective_scan %u, %delta, %A, %B, %B chunk_size(%c0)
      : tensor<?x?x64xf32>, tensor<?x?x64xf32>, tensor<64x16xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x64xf32>
  %c1 = ssm.bind_chunk @layers.1.scan(%batch, %length)
  %z = ssm.selective_scan %y, %delta, %A, %B, %B chunk_size(%c1)
      : tensor<?x?x64xf32>, tensor<?x?x64xf32>, tensor<64x16xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x64xf32>
  return %y, %z : tensor<?x?x64xf32>, tensor<?x?x64xf32>
}
