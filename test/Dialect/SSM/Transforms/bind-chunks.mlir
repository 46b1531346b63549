// ssm-bind-chunks: run-time sites and scans without a chunk get a bound value,
// constants and bound scans stay; the option, the statistics.

// RUN: corey-opt %s --ssm-bind-chunks | FileCheck %s
// RUN: corey-opt %s --ssm-bind-chunks="policy=fixed:128" | FileCheck %s --check-prefix=POLICY
// RUN: corey-opt %s --ssm-bind-chunks --ssm-bind-chunks | FileCheck %s
// RUN: corey-opt %s --ssm-bind-chunks="observe=true" | FileCheck %s --check-prefix=OBSERVE
// RUN: corey-opt %s --ssm-bind-chunks="observe=true" --ssm-bind-chunks="observe=true" | FileCheck %s --check-prefix=OBSERVE
// RUN: %if llvm-statistics %{ corey-opt %s --ssm-bind-chunks --mlir-pass-statistics 2>&1 >/dev/null | FileCheck %s --check-prefix=STATISTICS %}

// STATISTICS: SSMBindChunks
// STATISTICS-NEXT: (S) 5 num-bound-sites
// STATISTICS-NEXT: (S) 0 num-observed
// STATISTICS-NEXT: (S) 1 num-static-chunks

// CHECK-LABEL: func.func @runtime_site(
// CHECK-SAME: %[[U:.+]]: tensor<?x?x8xf32>, %{{.+}}: tensor<8x4xf32>
// CHECK-DAG: %[[B:.+]] = tensor.dim %[[U]], %c0{{.*}} : tensor<?x?x8xf32>
// CHECK-DAG: %[[L:.+]] = tensor.dim %[[U]], %c1{{.*}} : tensor<?x?x8xf32>
// CHECK: %[[K:.+]] = ssm.bind_chunk @layer0.scan(%[[B]], %[[L]]){{$}}
// CHECK: ssm.selective_scan %[[U]], {{.*}} chunk_size(%[[K]]) {delta_softplus} :
// POLICY-LABEL: func.func @runtime_site(
// POLICY: ssm.bind_chunk @layer0.scan(%{{.+}}, %{{.+}}) {policy = "fixed:128"}
// Observed before the scan, and only its input.
// OBSERVE-LABEL: func.func @runtime_site(
// OBSERVE-SAME: %[[U:.+]]: tensor<?x?x8xf32>, %{{.+}}: tensor<8x4xf32>
// OBSERVE: %[[X:.+]] = ssm.observe @layer0.scan %[[U]] : tensor<?x?x8xf32>
// OBSERVE-NEXT: ssm.selective_scan %[[X]], %[[U]],
func.func @runtime_site(%u: tensor<?x?x8xf32>, %a: tensor<8x4xf32>, %b: tensor<?x?x1x4xf32>) -> tensor<?x?x8xf32> {
  %y = ssm.selective_scan %u, %u, %a, %b, %b {delta_softplus, chunk = #ssm.chunk<runtime = @layer0.scan>}
      : tensor<?x?x8xf32>, tensor<?x?x8xf32>, tensor<8x4xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x8xf32>
  return %y : tensor<?x?x8xf32>
}

// Sizes that the types know are constants. The site `scan0` is taken by a scan
// further below.
// CHECK-LABEL: func.func @no_chunk(
// CHECK-DAG: %[[B:.+]] = arith.constant 2 : index
// CHECK-DAG: %[[L:.+]] = arith.constant 16 : index
// CHECK: %[[K:.+]] = ssm.bind_chunk @scan1(%[[B]], %[[L]]){{$}}
// CHECK: ssm.ssd {{.*}} chunk_size(%[[K]]) {tile = 32 : i64} :
// POLICY-LABEL: func.func @no_chunk(
// POLICY: ssm.bind_chunk @scan1({{.*}}) {policy = "fixed:128"}
func.func @no_chunk(%x: tensor<2x16x8x4xf32>, %decay: tensor<2x16x8xf32>, %b: tensor<2x16x1x16xf32>) -> tensor<2x16x8x4xf32> {
  %y = ssm.ssd %x decay(%decay : tensor<2x16x8xf32>) B(%b) C(%b) {tile = 32 : i64}
      : tensor<2x16x8x4xf32>, tensor<2x16x1x16xf32>, tensor<2x16x1x16xf32> -> tensor<2x16x8x4xf32>
  return %y : tensor<2x16x8x4xf32>
}

// Constants stay, and so do values; a convolution has no chunk.
// CHECK-LABEL: func.func @left_alone(
// CHECK-NEXT: ssm.selective_scan {{.*}} {chunk = #ssm.chunk<static = 64>}
// CHECK-NEXT: ssm.selective_scan {{.*}} chunk_size(%{{.+}}) :
// CHECK-NEXT: ssm.causal_conv
// CHECK-NEXT: return
func.func @left_alone(%u: tensor<?x?x8xf32>, %a: tensor<8x4xf32>, %b: tensor<?x?x1x4xf32>, %w: tensor<8x4xf32>, %k: index)
    -> (tensor<?x?x8xf32>, tensor<?x?x8xf32>, tensor<?x?x8xf32>) {
  %0 = ssm.selective_scan %u, %u, %a, %b, %b {chunk = #ssm.chunk<static = 64>}
      : tensor<?x?x8xf32>, tensor<?x?x8xf32>, tensor<8x4xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x8xf32>
  %1 = ssm.selective_scan %u, %u, %a, %b, %b chunk_size(%k)
      : tensor<?x?x8xf32>, tensor<?x?x8xf32>, tensor<8x4xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x8xf32>
  %2 = ssm.causal_conv %u, %w : tensor<?x?x8xf32>, tensor<8x4xf32> -> tensor<?x?x8xf32>
  return %0, %1, %2 : tensor<?x?x8xf32>, tensor<?x?x8xf32>, tensor<?x?x8xf32>
}

// An op that asks already keeps its name and policy; new names avoid it.
// CHECK-LABEL: func.func @names(
// CHECK: ssm.bind_chunk @scan2(%{{.+}}, %{{.+}}) {policy = "sweep"}
// CHECK: ssm.bind_chunk @scan0(
// CHECK: ssm.bind_chunk @scan3(
// POLICY-LABEL: func.func @names(
// POLICY: ssm.bind_chunk @scan2(%{{.+}}, %{{.+}}) {policy = "sweep"}
// POLICY: ssm.bind_chunk @scan0({{.*}}) {policy = "fixed:128"}
// POLICY: ssm.bind_chunk @scan3({{.*}}) {policy = "fixed:128"}
func.func @names(%u: tensor<?x?x8xf32>, %a: tensor<8x4xf32>, %b: tensor<?x?x1x4xf32>, %n: index)
    -> (tensor<?x?x8xf32>, tensor<?x?x8xf32>, tensor<?x?x8xf32>) {
  %k = ssm.bind_chunk @scan2(%n, %n) {policy = "sweep"}
  %0 = ssm.selective_scan %u, %u, %a, %b, %b chunk_size(%k)
      : tensor<?x?x8xf32>, tensor<?x?x8xf32>, tensor<8x4xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x8xf32>
  %1 = ssm.selective_scan %u, %u, %a, %b, %b {chunk = #ssm.chunk<runtime = @scan0>}
      : tensor<?x?x8xf32>, tensor<?x?x8xf32>, tensor<8x4xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x8xf32>
  %2 = ssm.selective_scan %u, %u, %a, %b, %b
      : tensor<?x?x8xf32>, tensor<?x?x8xf32>, tensor<8x4xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x8xf32>
  return %0, %1, %2 : tensor<?x?x8xf32>, tensor<?x?x8xf32>, tensor<?x?x8xf32>
}

// Inside a fused region the sizes are those of its arguments.
// CHECK-LABEL: func.func @fused(
// CHECK: ssm.fused
// CHECK-NEXT: ^bb0(%[[A:.+]]: tensor<?x?x8xf32>, %{{.+}}: tensor<8x4xf32>
// CHECK: tensor.dim %[[A]]
// CHECK: %[[K:.+]] = ssm.bind_chunk @inner(
// CHECK: ssm.selective_scan %[[A]], {{.*}} seq_starts(%{{.+}} : tensor<?xi32>) chunk_size(%[[K]])
// Its input is observed before the region.
// OBSERVE-LABEL: func.func @fused(
// OBSERVE-SAME: %[[U:.+]]: tensor<?x?x8xf32>, %{{.+}}: tensor<8x4xf32>
// OBSERVE-NEXT: %[[X:.+]] = ssm.observe @inner %[[U]] : tensor<?x?x8xf32>
// OBSERVE-NEXT: ssm.fused ins(%[[X]],
// OBSERVE-NOT: ssm.observe
// OBSERVE: return
func.func @fused(%u: tensor<?x?x8xf32>, %a: tensor<8x4xf32>, %b: tensor<?x?x1x4xf32>, %starts: tensor<?xi32>) -> tensor<?x?x8xf32> {
  %y = ssm.fused ins(%u, %a, %b, %starts : tensor<?x?x8xf32>, tensor<8x4xf32>, tensor<?x?x1x4xf32>, tensor<?xi32>) -> tensor<?x?x8xf32> {
  ^bb0(%c: tensor<?x?x8xf32>, %d: tensor<8x4xf32>, %e: tensor<?x?x1x4xf32>, %f: tensor<?xi32>):
    %0 = ssm.selective_scan %c, %c, %d, %e, %e seq_starts(%f : tensor<?xi32>) {chunk = #ssm.chunk<runtime = @inner>}
        : tensor<?x?x8xf32>, tensor<?x?x8xf32>, tensor<8x4xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x8xf32>
    ssm.yield %0 : tensor<?x?x8xf32>
  }
  return %y : tensor<?x?x8xf32>
}
