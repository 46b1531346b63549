// Ops that are equal to an earlier one take what that became, with operands and
// a chunk site of their own; what a lowering looks at keeps them apart. What
// works on memory is a function that equal ops call.

// RUN: corey-opt %s --convert-ssm-to-gpu=chip=sm_90a --canonicalize | FileCheck %s

// CHECK-LABEL: func.func @same(
// CHECK-SAME: %[[X:[a-z0-9]+]]: tensor<?x?x64xf16>, %[[Y:[a-z0-9]+]]: tensor<?x?x64xf16>)
// CHECK-NOT: gpu.launch_func
// CHECK: %[[XB:.+]] = bufferization.to_buffer %[[X]] read_only
// CHECK: call @[[$SILU:silu_launches[_0-9]*]](%[[XB]], %{{.+}})
// CHECK: %[[YB:.+]] = bufferization.to_buffer %[[Y]] read_only
// CHECK: call @[[$SILU]](%[[YB]], %{{.+}})
// CHECK-NOT: gpu.launch_func
// CHECK: return
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
// CHECK-DAG: %[[S0:.+]] = llvm.mlir.addressof @corey_site_layers.0.scan
// CHECK-DAG: %[[S1:.+]] = llvm.mlir.addressof @corey_site_layers.1.scan
// CHECK-NOT: gpu.launch_func
// CHECK: call @[[$SCAN:selective_scan_launches[_0-9]*]](%{{.*}}%[[S0]]{{[,)]}}
// CHECK-NOT: gpu.launch_func
// CHECK: call @[[$SCAN]](%{{.*}}%[[S1]]{{[,)]}}
// CHECK-NOT: gpu.launch_func
// CHECK: return
func.func @sites(%u: tensor<?x?x64xf32>, %v: tensor<?x?x64xf32>, %delta: tensor<?x?x64xf32>, %A: tensor<64x16xf32>, %B: tensor<?x?x1x16xf32>,
                 %batch: index, %length: index) -> (tensor<?x?x64xf32>, tensor<?x?x64xf32>) {
  %c0 = ssm.bind_chunk @layers.0.scan(%batch, %length)
  %y = ssm.selective_scan %u, %delta, %A, %B, %B chunk_size(%c0)
      : tensor<?x?x64xf32>, tensor<?x?x64xf32>, tensor<64x16xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x64xf32>
  %c1 = ssm.bind_chunk @layers.1.scan(%batch, %length)
  %z = ssm.selective_scan %v, %delta, %A, %B, %B chunk_size(%c1)
      : tensor<?x?x64xf32>, tensor<?x?x64xf32>, tensor<64x16xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x64xf32>
  return %y, %z : tensor<?x?x64xf32>, tensor<?x?x64xf32>
}

// Chunks of scans in regions, whose sites differ as well, and what is in the
// regions of the host's code: the norm before a projection of many rows.
// CHECK-LABEL: func.func @fused(
// CHECK: call @[[$FUSED:fused_launches[_0-9]*]](
// CHECK-NOT: gpu.launch_func
// CHECK: call @[[$FUSED]](
// CHECK-NOT: gpu.launch_func
// CHECK: return
func.func @fused(%x: tensor<?x1x256xf16>, %y: tensor<?x1x256xf16>, %norm: tensor<256xf16>, %W: tensor<512x256xf16>)
    -> (tensor<?x1x512xf16>, tensor<?x1x512xf16>) {
  %a = ssm.fused ins(%x, %norm, %W : tensor<?x1x256xf16>, tensor<256xf16>, tensor<512x256xf16>) -> tensor<?x1x512xf16> {
  ^bb0(%u: tensor<?x1x256xf16>, %n: tensor<256xf16>, %w: tensor<512x256xf16>):
    %1 = ssm.rms_norm %u, %n : tensor<?x1x256xf16>, tensor<256xf16> -> tensor<?x1x256xf16>
    %2 = ssm.projection %1, %w : tensor<?x1x256xf16>, tensor<512x256xf16> -> tensor<?x1x512xf16>
    ssm.yield %2 : tensor<?x1x512xf16>
  }
  %b = ssm.fused ins(%y, %norm, %W : tensor<?x1x256xf16>, tensor<256xf16>, tensor<512x256xf16>) -> tensor<?x1x512xf16> {
  ^bb0(%u: tensor<?x1x256xf16>, %n: tensor<256xf16>, %w: tensor<512x256xf16>):
    %1 = ssm.rms_norm %u, %n : tensor<?x1x256xf16>, tensor<256xf16> -> tensor<?x1x256xf16>
    %2 = ssm.projection %1, %w : tensor<?x1x256xf16>, tensor<512x256xf16> -> tensor<?x1x512xf16>
    ssm.yield %2 : tensor<?x1x512xf16>
  }
  return %a, %b : tensor<?x1x512xf16>, tensor<?x1x512xf16>
}

// Behind all of them.
// CHECK: func.func private @[[$SILU]](
// CHECK: gpu.launch_func @kernels::@pointwise
// CHECK: return
// CHECK: func.func private @[[$SCAN]](
// CHECK: call @corey_rt_variant(
// CHECK: gpu.launch_func @kernels::@selective_scan
// CHECK: return
// CHECK: func.func private @[[$FUSED]](
// CHECK: gpu.launch_func @kernels::@gemv
// CHECK: return
