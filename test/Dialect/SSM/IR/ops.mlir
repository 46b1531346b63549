// Round trip of every op, with every combination of optional operands, results
// and attributes that has a spelling of its own: f32, f16 and bf16, static and
// dynamic batch and length. The expected text is the text of the input.

// RUN: corey-opt %s --verify-roundtrip | FileCheck %s
// RUN: corey-opt %s -mlir-print-op-generic | corey-opt | FileCheck %s

//===----------------------------------------------------------------------===//
// ssm.selective_scan
//===----------------------------------------------------------------------===//

// CHECK-LABEL: func.func @scan_static(
// CHECK-SAME: %[[U:[a-z0-9_]+]]: {{[^%]*}}%[[DELTA:[a-z0-9_]+]]: {{[^%]*}}%[[A:[a-z0-9_]+]]:
// CHECK-SAME: %[[B:[a-z0-9_]+]]: {{[^%]*}}%[[C:[a-z0-9_]+]]:
func.func @scan_static(%u: tensor<2x16x8xf32>, %delta: tensor<2x16x8xf32>, %a: tensor<8x4xf32>,
    %b: tensor<2x16x1x4xf32>, %c: tensor<2x16x1x4xf32>) -> tensor<2x16x8xf32> {
  // CHECK: %[[Y:[a-z0-9_]+]] = ssm.selective_scan %[[U]], %[[DELTA]], %[[A]], %[[B]], %[[C]] :
  // CHECK-SAME: tensor<2x16x8xf32>, tensor<2x16x8xf32>, tensor<8x4xf32>,
  // CHECK-SAME: tensor<2x16x1x4xf32>, tensor<2x16x1x4xf32> -> tensor<2x16x8xf32>{{$}}
  %y = ssm.selective_scan %u, %delta, %a, %b, %c :
      tensor<2x16x8xf32>, tensor<2x16x8xf32>, tensor<8x4xf32>,
      tensor<2x16x1x4xf32>, tensor<2x16x1x4xf32> -> tensor<2x16x8xf32>
  // CHECK: return %[[Y]] : tensor<2x16x8xf32>{{$}}
  return %y : tensor<2x16x8xf32>
}

// CHECK-LABEL: func.func @scan_dynamic(
// CHECK-SAME: %[[U:[a-z0-9_]+]]: {{[^%]*}}%[[DELTA:[a-z0-9_]+]]: {{[^%]*}}%[[A:[a-z0-9_]+]]:
// CHECK-SAME: %[[B:[a-z0-9_]+]]: {{[^%]*}}%[[C:[a-z0-9_]+]]:
func.func @scan_dynamic(%u: tensor<?x?x8xf32>, %delta: tensor<?x?x8xf32>, %a: tensor<8x4xf32>,
    %b: tensor<?x?x2x4xf32>, %c: tensor<?x?x2x4xf32>) -> (tensor<?x?x8xf32>, tensor<?x8x4xf32>) {
  // CHECK: %[[Y:[a-z0-9_]+]], %[[H:[a-z0-9_]+]] = ssm.selective_scan %[[U]], %[[DELTA]], %[[A]], %[[B]], %[[C]] :
  // CHECK-SAME: tensor<?x?x8xf32>, tensor<?x?x8xf32>, tensor<8x4xf32>,
  // CHECK-SAME: tensor<?x?x2x4xf32>, tensor<?x?x2x4xf32> -> tensor<?x?x8xf32>, tensor<?x8x4xf32>{{$}}
  %y, %h = ssm.selective_scan %u, %delta, %a, %b, %c :
      tensor<?x?x8xf32>, tensor<?x?x8xf32>, tensor<8x4xf32>,
      tensor<?x?x2x4xf32>, tensor<?x?x2x4xf32> -> tensor<?x?x8xf32>, tensor<?x8x4xf32>
  // CHECK: return %[[Y]], %[[H]] : tensor<?x?x8xf32>, tensor<?x8x4xf32>{{$}}
  return %y, %h : tensor<?x?x8xf32>, tensor<?x8x4xf32>
}

// Every operand, and the attributes beside a chunk.
// CHECK-LABEL: func.func @scan_full(
// CHECK-SAME: %[[U:[a-z0-9_]+]]: {{[^%]*}}%[[DELTA:[a-z0-9_]+]]: {{[^%]*}}%[[A:[a-z0-9_]+]]:
// CHECK-SAME: %[[B:[a-z0-9_]+]]: {{[^%]*}}%[[C:[a-z0-9_]+]]: {{[^%]*}}%[[D:[a-z0-9_]+]]:
// CHECK-SAME: %[[Z:[a-z0-9_]+]]: {{[^%]*}}%[[BIAS:[a-z0-9_]+]]: {{[^%]*}}%[[H0:[a-z0-9_]+]]:
// CHECK-SAME: %[[K:[a-z0-9_]+]]:
func.func @scan_full(%u: tensor<?x?x8xbf16>, %delta: tensor<?x?x8xf16>, %a: tensor<8x4xf32>,
    %b: tensor<?x?x1x4xbf16>, %c: tensor<?x?x1x4xf16>, %d: tensor<8xf32>, %z: tensor<?x?x8xf16>,
    %bias: tensor<8xbf16>, %h0: tensor<?x8x4xf16>, %k: index) -> (tensor<?x?x8xbf16>, tensor<?x8x4xf16>) {
  // CHECK: %[[Y:[a-z0-9_]+]], %[[H:[a-z0-9_]+]] = ssm.selective_scan %[[U]], %[[DELTA]], %[[A]], %[[B]], %[[C]] D(%[[D]] : tensor<8xf32>) z(%[[Z]] : tensor<?x?x8xf16>)
  // CHECK-SAME: delta_bias(%[[BIAS]] : tensor<8xbf16>) initial_state(%[[H0]] : tensor<?x8x4xf16>) chunk_size(%[[K]]) {delta_softplus} :
  // CHECK-SAME: tensor<?x?x8xbf16>, tensor<?x?x8xf16>, tensor<8x4xf32>, tensor<?x?x1x4xbf16>,
  // CHECK-SAME: tensor<?x?x1x4xf16> -> tensor<?x?x8xbf16>, tensor<?x8x4xf16>{{$}}
  %y, %h = ssm.selective_scan %u, %delta, %a, %b, %c D(%d : tensor<8xf32>) z(%z : tensor<?x?x8xf16>)
      delta_bias(%bias : tensor<8xbf16>) initial_state(%h0 : tensor<?x8x4xf16>) chunk_size(%k) {delta_softplus} :
      tensor<?x?x8xbf16>, tensor<?x?x8xf16>, tensor<8x4xf32>, tensor<?x?x1x4xbf16>,
      tensor<?x?x1x4xf16> -> tensor<?x?x8xbf16>, tensor<?x8x4xf16>
  // CHECK: return %[[Y]], %[[H]] : tensor<?x?x8xbf16>, tensor<?x8x4xf16>{{$}}
  return %y, %h : tensor<?x?x8xbf16>, tensor<?x8x4xf16>
}

// One optional operand at a time; the state of a result may have another type
// than the initial state.
// CHECK-LABEL: func.func @scan_single(
// CHECK-SAME: %[[U:[a-z0-9_]+]]: {{[^%]*}}%[[DELTA:[a-z0-9_]+]]: {{[^%]*}}%[[A:[a-z0-9_]+]]:
// CHECK-SAME: %[[B:[a-z0-9_]+]]: {{[^%]*}}%[[C:[a-z0-9_]+]]: {{[^%]*}}%[[D:[a-z0-9_]+]]:
// CHECK-SAME: %[[BIAS:[a-z0-9_]+]]: {{[^%]*}}%[[H0:[a-z0-9_]+]]: {{[^%]*}}%[[K:[a-z0-9_]+]]:
func.func @scan_single(%u: tensor<?x16x8xf32>, %delta: tensor<?x16x8xf32>, %a: tensor<8x4xf32>,
    %b: tensor<?x16x1x4xf32>, %c: tensor<?x16x1x4xf32>, %d: tensor<8xf16>, %bias: tensor<8xf32>,
    %h0: tensor<?x8x4xbf16>, %k: index) {
  // CHECK: %[[V0:[a-z0-9_]+]] = ssm.selective_scan %[[U]], %[[DELTA]], %[[A]], %[[B]], %[[C]] D(%[[D]] : tensor<8xf16>) :
  // CHECK-SAME: tensor<?x16x8xf32>, tensor<?x16x8xf32>, tensor<8x4xf32>, tensor<?x16x1x4xf32>, tensor<?x16x1x4xf32> -> tensor<?x16x8xf32>{{$}}
  %0 = ssm.selective_scan %u, %delta, %a, %b, %c D(%d : tensor<8xf16>) :
      tensor<?x16x8xf32>, tensor<?x16x8xf32>, tensor<8x4xf32>, tensor<?x16x1x4xf32>, tensor<?x16x1x4xf32> -> tensor<?x16x8xf32>
  // CHECK: %[[V1:[a-z0-9_]+]] = ssm.selective_scan %[[U]], %[[DELTA]], %[[A]], %[[B]], %[[C]] z(%[[U]] : tensor<?x16x8xf32>) :
  // CHECK-SAME: tensor<?x16x8xf32>, tensor<?x16x8xf32>, tensor<8x4xf32>, tensor<?x16x1x4xf32>, tensor<?x16x1x4xf32> -> tensor<?x16x8xf32>{{$}}
  %1 = ssm.selective_scan %u, %delta, %a, %b, %c z(%u : tensor<?x16x8xf32>) :
      tensor<?x16x8xf32>, tensor<?x16x8xf32>, tensor<8x4xf32>, tensor<?x16x1x4xf32>, tensor<?x16x1x4xf32> -> tensor<?x16x8xf32>
  // CHECK: %[[V2:[a-z0-9_]+]] = ssm.selective_scan %[[U]], %[[DELTA]], %[[A]], %[[B]], %[[C]] delta_bias(%[[BIAS]] : tensor<8xf32>) :
  // CHECK-SAME: tensor<?x16x8xf32>, tensor<?x16x8xf32>, tensor<8x4xf32>, tensor<?x16x1x4xf32>, tensor<?x16x1x4xf32> -> tensor<?x16x8xf32>{{$}}
  %2 = ssm.selective_scan %u, %delta, %a, %b, %c delta_bias(%bias : tensor<8xf32>) :
      tensor<?x16x8xf32>, tensor<?x16x8xf32>, tensor<8x4xf32>, tensor<?x16x1x4xf32>, tensor<?x16x1x4xf32> -> tensor<?x16x8xf32>
  // CHECK: %[[V3:[a-z0-9_]+]], %[[LAST:[a-z0-9_]+]] = ssm.selective_scan %[[U]], %[[DELTA]], %[[A]], %[[B]], %[[C]] initial_state(%[[H0]] : tensor<?x8x4xbf16>) :
  // CHECK-SAME: tensor<?x16x8xf32>, tensor<?x16x8xf32>, tensor<8x4xf32>, tensor<?x16x1x4xf32>, tensor<?x16x1x4xf32> -> tensor<?x16x8xf32>, tensor<?x8x4xf32>{{$}}
  %3, %last = ssm.selective_scan %u, %delta, %a, %b, %c initial_state(%h0 : tensor<?x8x4xbf16>) :
      tensor<?x16x8xf32>, tensor<?x16x8xf32>, tensor<8x4xf32>, tensor<?x16x1x4xf32>, tensor<?x16x1x4xf32> -> tensor<?x16x8xf32>, tensor<?x8x4xf32>
  // CHECK: %[[V4:[a-z0-9_]+]] = ssm.selective_scan %[[U]], %[[DELTA]], %[[A]], %[[B]], %[[C]] chunk_size(%[[K]]) :
  // CHECK-SAME: tensor<?x16x8xf32>, tensor<?x16x8xf32>, tensor<8x4xf32>, tensor<?x16x1x4xf32>, tensor<?x16x1x4xf32> -> tensor<?x16x8xf32>{{$}}
  %4 = ssm.selective_scan %u, %delta, %a, %b, %c chunk_size(%k) :
      tensor<?x16x8xf32>, tensor<?x16x8xf32>, tensor<8x4xf32>, tensor<?x16x1x4xf32>, tensor<?x16x1x4xf32> -> tensor<?x16x8xf32>
  // CHECK: %[[V5:[a-z0-9_]+]] = ssm.selective_scan %[[U]], %[[DELTA]], %[[A]], %[[B]], %[[C]] {chunk = #ssm.chunk<static = 64>} :
  // CHECK-SAME: tensor<?x16x8xf32>, tensor<?x16x8xf32>, tensor<8x4xf32>, tensor<?x16x1x4xf32>, tensor<?x16x1x4xf32> -> tensor<?x16x8xf32>{{$}}
  %5 = ssm.selective_scan %u, %delta, %a, %b, %c {chunk = #ssm.chunk<static = 64>} :
      tensor<?x16x8xf32>, tensor<?x16x8xf32>, tensor<8x4xf32>, tensor<?x16x1x4xf32>, tensor<?x16x1x4xf32> -> tensor<?x16x8xf32>
  // CHECK: %[[V6:[a-z0-9_]+]] = ssm.selective_scan %[[U]], %[[DELTA]], %[[A]], %[[B]], %[[C]] {chunk = #ssm.chunk<runtime = @layer0.scan>, delta_softplus} :
  // CHECK-SAME: tensor<?x16x8xf32>, tensor<?x16x8xf32>, tensor<8x4xf32>, tensor<?x16x1x4xf32>, tensor<?x16x1x4xf32> -> tensor<?x16x8xf32>{{$}}
  %6 = ssm.selective_scan %u, %delta, %a, %b, %c {chunk = #ssm.chunk<runtime = @layer0.scan>, delta_softplus} :
      tensor<?x16x8xf32>, tensor<?x16x8xf32>, tensor<8x4xf32>, tensor<?x16x1x4xf32>, tensor<?x16x1x4xf32> -> tensor<?x16x8xf32>
  // CHECK: return{{$}}
  return
}

// Sequences packed along L: B is 1 and the states are per sequence.
// CHECK-LABEL: func.func @scan_packed(
// CHECK-SAME: %[[U:[a-z0-9_]+]]: {{[^%]*}}%[[A:[a-z0-9_]+]]: {{[^%]*}}%[[B:[a-z0-9_]+]]:
// CHECK-SAME: %[[H0:[a-z0-9_]+]]: {{[^%]*}}%[[STARTS:[a-z0-9_]+]]:
func.func @scan_packed(%u: tensor<1x?x8xf32>, %a: tensor<8x4xf32>, %b: tensor<1x?x1x4xf32>,
    %h0: tensor<?x8x4xf32>, %starts: tensor<?xi32>) -> (tensor<1x?x8xf32>, tensor<?x8x4xf32>) {
  // CHECK: %[[Y:[a-z0-9_]+]], %[[H:[a-z0-9_]+]] = ssm.selective_scan %[[U]], %[[U]], %[[A]], %[[B]], %[[B]] initial_state(%[[H0]] : tensor<?x8x4xf32>)
  // CHECK-SAME: seq_starts(%[[STARTS]] : tensor<?xi32>) :
  // CHECK-SAME: tensor<1x?x8xf32>, tensor<1x?x8xf32>, tensor<8x4xf32>, tensor<1x?x1x4xf32>, tensor<1x?x1x4xf32> -> tensor<1x?x8xf32>, tensor<?x8x4xf32>{{$}}
  %y, %h = ssm.selective_scan %u, %u, %a, %b, %b initial_state(%h0 : tensor<?x8x4xf32>)
      seq_starts(%starts : tensor<?xi32>) :
      tensor<1x?x8xf32>, tensor<1x?x8xf32>, tensor<8x4xf32>, tensor<1x?x1x4xf32>, tensor<1x?x1x4xf32> -> tensor<1x?x8xf32>, tensor<?x8x4xf32>
  // CHECK: return %[[Y]], %[[H]] : tensor<1x?x8xf32>, tensor<?x8x4xf32>{{$}}
  return %y, %h : tensor<1x?x8xf32>, tensor<?x8x4xf32>
}

// Packed with dynamic B, and a static number of sequences.
// CHECK-LABEL: func.func @scan_packed_dynamic_batch(
// CHECK-SAME: %[[U:[a-z0-9_]+]]: {{[^%]*}}%[[A:[a-z0-9_]+]]: {{[^%]*}}%[[B:[a-z0-9_]+]]:
// CHECK-SAME: %[[STARTS:[a-z0-9_]+]]: {{[^%]*}}%[[K:[a-z0-9_]+]]:
func.func @scan_packed_dynamic_batch(%u: tensor<?x?x8xf16>, %a: tensor<8x4xf32>, %b: tensor<?x?x1x4xf16>,
    %starts: tensor<3xi32>, %k: index) -> (tensor<?x?x8xf16>, tensor<3x8x4xf32>) {
  // CHECK: %[[Y:[a-z0-9_]+]], %[[H:[a-z0-9_]+]] = ssm.selective_scan %[[U]], %[[U]], %[[A]], %[[B]], %[[B]] seq_starts(%[[STARTS]] : tensor<3xi32>) chunk_size(%[[K]]) :
  // CHECK-SAME: tensor<?x?x8xf16>, tensor<?x?x8xf16>, tensor<8x4xf32>, tensor<?x?x1x4xf16>, tensor<?x?x1x4xf16> -> tensor<?x?x8xf16>, tensor<3x8x4xf32>{{$}}
  %y, %h = ssm.selective_scan %u, %u, %a, %b, %b seq_starts(%starts : tensor<3xi32>) chunk_size(%k) :
      tensor<?x?x8xf16>, tensor<?x?x8xf16>, tensor<8x4xf32>, tensor<?x?x1x4xf16>, tensor<?x?x1x4xf16> -> tensor<?x?x8xf16>, tensor<3x8x4xf32>
  // CHECK: return %[[Y]], %[[H]] : tensor<?x?x8xf16>, tensor<3x8x4xf32>{{$}}
  return %y, %h : tensor<?x?x8xf16>, tensor<3x8x4xf32>
}

//===----------------------------------------------------------------------===//
// ssm.ssd
//===----------------------------------------------------------------------===//

// CHECK-LABEL: func.func @ssd_static(
// CHECK-SAME: %[[X:[a-z0-9_]+]]: {{[^%]*}}%[[DT:[a-z0-9_]+]]: {{[^%]*}}%[[A:[a-z0-9_]+]]:
// CHECK-SAME: %[[B:[a-z0-9_]+]]:
func.func @ssd_static(%x: tensor<2x16x8x4xf32>, %dt: tensor<2x16x8xf32>, %a: tensor<8xf32>,
    %b: tensor<2x16x2x16xf32>) -> tensor<2x16x8x4xf32> {
  // CHECK: %[[Y:[a-z0-9_]+]] = ssm.ssd %[[X]] dt(%[[DT]] : tensor<2x16x8xf32>) A(%[[A]] : tensor<8xf32>) B(%[[B]]) C(%[[B]]) :
  // CHECK-SAME: tensor<2x16x8x4xf32>, tensor<2x16x2x16xf32>, tensor<2x16x2x16xf32> -> tensor<2x16x8x4xf32>{{$}}
  %y = ssm.ssd %x dt(%dt : tensor<2x16x8xf32>) A(%a : tensor<8xf32>) B(%b) C(%b) :
      tensor<2x16x8x4xf32>, tensor<2x16x2x16xf32>, tensor<2x16x2x16xf32> -> tensor<2x16x8x4xf32>
  // CHECK: return %[[Y]] : tensor<2x16x8x4xf32>{{$}}
  return %y : tensor<2x16x8x4xf32>
}

// CHECK-LABEL: func.func @ssd_full(
// CHECK-SAME: %[[X:[a-z0-9_]+]]: {{[^%]*}}%[[DT:[a-z0-9_]+]]: {{[^%]*}}%[[A:[a-z0-9_]+]]:
// CHECK-SAME: %[[B:[a-z0-9_]+]]: {{[^%]*}}%[[C:[a-z0-9_]+]]: {{[^%]*}}%[[D:[a-z0-9_]+]]:
// CHECK-SAME: %[[Z:[a-z0-9_]+]]: {{[^%]*}}%[[BIAS:[a-z0-9_]+]]: {{[^%]*}}%[[S0:[a-z0-9_]+]]:
// CHECK-SAME: %[[K:[a-z0-9_]+]]:
func.func @ssd_full(%x: tensor<?x?x8x4xbf16>, %dt: tensor<?x?x8xf16>, %a: tensor<8xf32>,
    %b: tensor<?x?x1x16xbf16>, %c: tensor<?x?x1x16xf16>, %d: tensor<8xf32>, %z: tensor<?x?x8x4xf16>,
    %bias: tensor<8xbf16>, %s0: tensor<?x8x4x16xbf16>, %k: index)
    -> (tensor<?x?x8x4xbf16>, tensor<?x8x4x16xbf16>) {
  // CHECK: %[[Y:[a-z0-9_]+]], %[[S:[a-z0-9_]+]] = ssm.ssd %[[X]] dt(%[[DT]] : tensor<?x?x8xf16>) A(%[[A]] : tensor<8xf32>) B(%[[B]]) C(%[[C]]) D(%[[D]] : tensor<8xf32>)
  // CHECK-SAME: z(%[[Z]] : tensor<?x?x8x4xf16>) dt_bias(%[[BIAS]] : tensor<8xbf16>) initial_states(%[[S0]] : tensor<?x8x4x16xbf16>)
  // CHECK-SAME: chunk_size(%[[K]]) {dt_limit = array<f64: 1.000000e-03, 1.000000e-01>, dt_softplus, tile = 128 : i64} :
  // CHECK-SAME: tensor<?x?x8x4xbf16>, tensor<?x?x1x16xbf16>, tensor<?x?x1x16xf16> -> tensor<?x?x8x4xbf16>, tensor<?x8x4x16xbf16>{{$}}
  %y, %s = ssm.ssd %x dt(%dt : tensor<?x?x8xf16>) A(%a : tensor<8xf32>) B(%b) C(%c) D(%d : tensor<8xf32>)
      z(%z : tensor<?x?x8x4xf16>) dt_bias(%bias : tensor<8xbf16>) initial_states(%s0 : tensor<?x8x4x16xbf16>)
      chunk_size(%k) {dt_limit = array<f64: 1.000000e-03, 1.000000e-01>, dt_softplus, tile = 128 : i64} :
      tensor<?x?x8x4xbf16>, tensor<?x?x1x16xbf16>, tensor<?x?x1x16xf16> -> tensor<?x?x8x4xbf16>, tensor<?x8x4x16xbf16>
  // CHECK: return %[[Y]], %[[S]] : tensor<?x?x8x4xbf16>, tensor<?x8x4x16xbf16>{{$}}
  return %y, %s : tensor<?x?x8x4xbf16>, tensor<?x8x4x16xbf16>
}

// D per head and channel; chunks of both kinds; one optional operand at a time.
// CHECK-LABEL: func.func @ssd_single(
// CHECK-SAME: %[[X:[a-z0-9_]+]]: {{[^%]*}}%[[DT:[a-z0-9_]+]]: {{[^%]*}}%[[A:[a-z0-9_]+]]:
// CHECK-SAME: %[[B:[a-z0-9_]+]]: {{[^%]*}}%[[D:[a-z0-9_]+]]: {{[^%]*}}%[[BIAS:[a-z0-9_]+]]:
// CHECK-SAME: %[[S0:[a-z0-9_]+]]:
func.func @ssd_single(%x: tensor<2x?x8x4xf32>, %dt: tensor<2x?x8xf32>, %a: tensor<8xf32>,
    %b: tensor<2x?x1x16xf32>, %d: tensor<8x4xf16>, %bias: tensor<8xf32>, %s0: tensor<2x8x4x16xf16>) {
  // CHECK: %[[V0:[a-z0-9_]+]] = ssm.ssd %[[X]] dt(%[[DT]] : tensor<2x?x8xf32>) A(%[[A]] : tensor<8xf32>) B(%[[B]]) C(%[[B]]) D(%[[D]] : tensor<8x4xf16>) :
  // CHECK-SAME: tensor<2x?x8x4xf32>, tensor<2x?x1x16xf32>, tensor<2x?x1x16xf32> -> tensor<2x?x8x4xf32>{{$}}
  %0 = ssm.ssd %x dt(%dt : tensor<2x?x8xf32>) A(%a : tensor<8xf32>) B(%b) C(%b) D(%d : tensor<8x4xf16>) :
      tensor<2x?x8x4xf32>, tensor<2x?x1x16xf32>, tensor<2x?x1x16xf32> -> tensor<2x?x8x4xf32>
  // CHECK: %[[V1:[a-z0-9_]+]] = ssm.ssd %[[X]] dt(%[[DT]] : tensor<2x?x8xf32>) A(%[[A]] : tensor<8xf32>) B(%[[B]]) C(%[[B]]) z(%[[X]] : tensor<2x?x8x4xf32>) {dt_softplus} :
  // CHECK-SAME: tensor<2x?x8x4xf32>, tensor<2x?x1x16xf32>, tensor<2x?x1x16xf32> -> tensor<2x?x8x4xf32>{{$}}
  %1 = ssm.ssd %x dt(%dt : tensor<2x?x8xf32>) A(%a : tensor<8xf32>) B(%b) C(%b) z(%x : tensor<2x?x8x4xf32>) {dt_softplus} :
      tensor<2x?x8x4xf32>, tensor<2x?x1x16xf32>, tensor<2x?x1x16xf32> -> tensor<2x?x8x4xf32>
  // CHECK: %[[V2:[a-z0-9_]+]] = ssm.ssd %[[X]] dt(%[[DT]] : tensor<2x?x8xf32>) A(%[[A]] : tensor<8xf32>) B(%[[B]]) C(%[[B]]) dt_bias(%[[BIAS]] : tensor<8xf32>) {chunk = #ssm.chunk<static = 1>} :
  // CHECK-SAME: tensor<2x?x8x4xf32>, tensor<2x?x1x16xf32>, tensor<2x?x1x16xf32> -> tensor<2x?x8x4xf32>{{$}}
  %2 = ssm.ssd %x dt(%dt : tensor<2x?x8xf32>) A(%a : tensor<8xf32>) B(%b) C(%b) dt_bias(%bias : tensor<8xf32>) {chunk = #ssm.chunk<static = 1>} :
      tensor<2x?x8x4xf32>, tensor<2x?x1x16xf32>, tensor<2x?x1x16xf32> -> tensor<2x?x8x4xf32>
  // CHECK: %[[V3:[a-z0-9_]+]], %[[S:[a-z0-9_]+]] = ssm.ssd %[[X]] dt(%[[DT]] : tensor<2x?x8xf32>) A(%[[A]] : tensor<8xf32>) B(%[[B]]) C(%[[B]]) initial_states(%[[S0]] : tensor<2x8x4x16xf16>) {chunk = #ssm.chunk<runtime = @scan>} :
  // CHECK-SAME: tensor<2x?x8x4xf32>, tensor<2x?x1x16xf32>, tensor<2x?x1x16xf32> -> tensor<2x?x8x4xf32>, tensor<2x8x4x16xf16>{{$}}
  %3, %s = ssm.ssd %x dt(%dt : tensor<2x?x8xf32>) A(%a : tensor<8xf32>) B(%b) C(%b) initial_states(%s0 : tensor<2x8x4x16xf16>) {chunk = #ssm.chunk<runtime = @scan>} :
      tensor<2x?x8x4xf32>, tensor<2x?x1x16xf32>, tensor<2x?x1x16xf32> -> tensor<2x?x8x4xf32>, tensor<2x8x4x16xf16>
  // CHECK: return{{$}}
  return
}

// The discretized form: decay in the place of dt and A.
// CHECK-LABEL: func.func @ssd_discretized(
// CHECK-SAME: %[[X:[a-z0-9_]+]]: {{[^%]*}}%[[DECAY:[a-z0-9_]+]]: {{[^%]*}}%[[B:[a-z0-9_]+]]:
// CHECK-SAME: %[[D:[a-z0-9_]+]]: {{[^%]*}}%[[S0:[a-z0-9_]+]]: {{[^%]*}}%[[K:[a-z0-9_]+]]:
func.func @ssd_discretized(%x: tensor<?x?x8x4xf32>, %decay: tensor<?x?x8xf32>, %b: tensor<?x?x1x16xf32>,
    %d: tensor<8xf32>, %s0: tensor<?x8x4x16xf32>, %k: index) -> (tensor<?x?x8x4xf32>, tensor<?x8x4x16xf32>) {
  // CHECK: %[[V0:[a-z0-9_]+]] = ssm.ssd %[[X]] decay(%[[DECAY]] : tensor<?x?x8xf32>) B(%[[B]]) C(%[[B]]) :
  // CHECK-SAME: tensor<?x?x8x4xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x8x4xf32>{{$}}
  %0 = ssm.ssd %x decay(%decay : tensor<?x?x8xf32>) B(%b) C(%b) :
      tensor<?x?x8x4xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x8x4xf32>
  // CHECK: %[[Y:[a-z0-9_]+]], %[[S:[a-z0-9_]+]] = ssm.ssd %[[X]] decay(%[[DECAY]] : tensor<?x?x8xf32>) B(%[[B]]) C(%[[B]]) D(%[[D]] : tensor<8xf32>) z(%[[V0]] : tensor<?x?x8x4xf32>)
  // CHECK-SAME: initial_states(%[[S0]] : tensor<?x8x4x16xf32>) chunk_size(%[[K]]) {tile = 64 : i64} :
  // CHECK-SAME: tensor<?x?x8x4xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x8x4xf32>, tensor<?x8x4x16xf32>{{$}}
  %y, %s = ssm.ssd %x decay(%decay : tensor<?x?x8xf32>) B(%b) C(%b) D(%d : tensor<8xf32>) z(%0 : tensor<?x?x8x4xf32>)
      initial_states(%s0 : tensor<?x8x4x16xf32>) chunk_size(%k) {tile = 64 : i64} :
      tensor<?x?x8x4xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x8x4xf32>, tensor<?x8x4x16xf32>
  // CHECK: return %[[Y]], %[[S]] : tensor<?x?x8x4xf32>, tensor<?x8x4x16xf32>{{$}}
  return %y, %s : tensor<?x?x8x4xf32>, tensor<?x8x4x16xf32>
}

// CHECK-LABEL: func.func @ssd_packed(
// CHECK-SAME: %[[X:[a-z0-9_]+]]: {{[^%]*}}%[[DT:[a-z0-9_]+]]: {{[^%]*}}%[[A:[a-z0-9_]+]]:
// CHECK-SAME: %[[B:[a-z0-9_]+]]: {{[^%]*}}%[[STARTS:[a-z0-9_]+]]:
func.func @ssd_packed(%x: tensor<1x?x8x4xf16>, %dt: tensor<1x?x8xf16>, %a: tensor<8xf32>,
    %b: tensor<1x?x1x16xf16>, %starts: tensor<?xi32>) -> (tensor<1x?x8x4xf16>, tensor<?x8x4x16xf32>) {
  // CHECK: %[[Y:[a-z0-9_]+]], %[[S:[a-z0-9_]+]] = ssm.ssd %[[X]] dt(%[[DT]] : tensor<1x?x8xf16>) A(%[[A]] : tensor<8xf32>) B(%[[B]]) C(%[[B]]) seq_starts(%[[STARTS]] : tensor<?xi32>) :
  // CHECK-SAME: tensor<1x?x8x4xf16>, tensor<1x?x1x16xf16>, tensor<1x?x1x16xf16> -> tensor<1x?x8x4xf16>, tensor<?x8x4x16xf32>{{$}}
  %y, %s = ssm.ssd %x dt(%dt : tensor<1x?x8xf16>) A(%a : tensor<8xf32>) B(%b) C(%b) seq_starts(%starts : tensor<?xi32>) :
      tensor<1x?x8x4xf16>, tensor<1x?x1x16xf16>, tensor<1x?x1x16xf16> -> tensor<1x?x8x4xf16>, tensor<?x8x4x16xf32>
  // CHECK: return %[[Y]], %[[S]] : tensor<1x?x8x4xf16>, tensor<?x8x4x16xf32>{{$}}
  return %y, %s : tensor<1x?x8x4xf16>, tensor<?x8x4x16xf32>
}

//===----------------------------------------------------------------------===//
// ssm.causal_conv
//===----------------------------------------------------------------------===//

// CHECK-LABEL: func.func @conv(
// CHECK-SAME: %[[X:[a-z0-9_]+]]: {{[^%]*}}%[[W2:[a-z0-9_]+]]: {{[^%]*}}%[[W3:[a-z0-9_]+]]:
// CHECK-SAME: %[[W4:[a-z0-9_]+]]: {{[^%]*}}%[[BIAS:[a-z0-9_]+]]: {{[^%]*}}%[[S2:[a-z0-9_]+]]:
// CHECK-SAME: %[[S4:[a-z0-9_]+]]:
func.func @conv(%x: tensor<?x?x8xf32>, %w2: tensor<8x2xf32>, %w3: tensor<8x3xbf16>, %w4: tensor<8x4xf16>,
    %bias: tensor<8xf16>, %s2: tensor<?x1x8xf32>, %s4: tensor<?x3x8xbf16>) {
  // CHECK: %[[V0:[a-z0-9_]+]] = ssm.causal_conv %[[X]], %[[W2]] : tensor<?x?x8xf32>, tensor<8x2xf32> -> tensor<?x?x8xf32>{{$}}
  %0 = ssm.causal_conv %x, %w2 : tensor<?x?x8xf32>, tensor<8x2xf32> -> tensor<?x?x8xf32>
  // CHECK: %[[V1:[a-z0-9_]+]] = ssm.causal_conv %[[X]], %[[W3]] bias(%[[BIAS]] : tensor<8xf16>) : tensor<?x?x8xf32>, tensor<8x3xbf16> -> tensor<?x?x8xf32>{{$}}
  %1 = ssm.causal_conv %x, %w3 bias(%bias : tensor<8xf16>) : tensor<?x?x8xf32>, tensor<8x3xbf16> -> tensor<?x?x8xf32>
  // CHECK: %[[V2:[a-z0-9_]+]] = ssm.causal_conv %[[X]], %[[W4]] {silu} : tensor<?x?x8xf32>, tensor<8x4xf16> -> tensor<?x?x8xf32>{{$}}
  %2 = ssm.causal_conv %x, %w4 {silu} : tensor<?x?x8xf32>, tensor<8x4xf16> -> tensor<?x?x8xf32>
  // CHECK: %[[V3:[a-z0-9_]+]], %[[S:[a-z0-9_]+]] = ssm.causal_conv %[[X]], %[[W2]] initial_state(%[[S2]] : tensor<?x1x8xf32>) :
  // CHECK-SAME: tensor<?x?x8xf32>, tensor<8x2xf32> -> tensor<?x?x8xf32>, tensor<?x1x8xf32>{{$}}
  %3, %s = ssm.causal_conv %x, %w2 initial_state(%s2 : tensor<?x1x8xf32>) :
      tensor<?x?x8xf32>, tensor<8x2xf32> -> tensor<?x?x8xf32>, tensor<?x1x8xf32>
  // CHECK: %[[V4:[a-z0-9_]+]], %[[T:[a-z0-9_]+]] = ssm.causal_conv %[[X]], %[[W4]] bias(%[[BIAS]] : tensor<8xf16>) initial_state(%[[S4]] : tensor<?x3x8xbf16>) {silu} :
  // CHECK-SAME: tensor<?x?x8xf32>, tensor<8x4xf16> -> tensor<?x?x8xf32>, tensor<?x3x8xf32>{{$}}
  %4, %t = ssm.causal_conv %x, %w4 bias(%bias : tensor<8xf16>) initial_state(%s4 : tensor<?x3x8xbf16>) {silu} :
      tensor<?x?x8xf32>, tensor<8x4xf16> -> tensor<?x?x8xf32>, tensor<?x3x8xf32>
  // CHECK: return{{$}}
  return
}

// CHECK-LABEL: func.func @conv_static(
// CHECK-SAME: %[[X:[a-z0-9_]+]]: {{[^%]*}}%[[W:[a-z0-9_]+]]:
func.func @conv_static(%x: tensor<2x1x8xbf16>, %w: tensor<8x4xbf16>) -> (tensor<2x1x8xbf16>, tensor<2x3x8xbf16>) {
  // CHECK: %[[Y:[a-z0-9_]+]], %[[S:[a-z0-9_]+]] = ssm.causal_conv %[[X]], %[[W]] : tensor<2x1x8xbf16>, tensor<8x4xbf16> -> tensor<2x1x8xbf16>, tensor<2x3x8xbf16>{{$}}
  %y, %s = ssm.causal_conv %x, %w : tensor<2x1x8xbf16>, tensor<8x4xbf16> -> tensor<2x1x8xbf16>, tensor<2x3x8xbf16>
  // CHECK: return %[[Y]], %[[S]] : tensor<2x1x8xbf16>, tensor<2x3x8xbf16>{{$}}
  return %y, %s : tensor<2x1x8xbf16>, tensor<2x3x8xbf16>
}

// CHECK-LABEL: func.func @conv_packed(
// CHECK-SAME: %[[X:[a-z0-9_]+]]: {{[^%]*}}%[[W:[a-z0-9_]+]]: {{[^%]*}}%[[S0:[a-z0-9_]+]]:
// CHECK-SAME: %[[STARTS:[a-z0-9_]+]]:
func.func @conv_packed(%x: tensor<1x?x8xf16>, %w: tensor<8x4xf16>, %s0: tensor<?x3x8xf16>, %starts: tensor<?xi32>)
    -> (tensor<1x?x8xf16>, tensor<?x3x8xf16>) {
  // CHECK: %[[Y:[a-z0-9_]+]], %[[S:[a-z0-9_]+]] = ssm.causal_conv %[[X]], %[[W]] initial_state(%[[S0]] : tensor<?x3x8xf16>) seq_starts(%[[STARTS]] : tensor<?xi32>) :
  // CHECK-SAME: tensor<1x?x8xf16>, tensor<8x4xf16> -> tensor<1x?x8xf16>, tensor<?x3x8xf16>{{$}}
  %y, %s = ssm.causal_conv %x, %w initial_state(%s0 : tensor<?x3x8xf16>) seq_starts(%starts : tensor<?xi32>) :
      tensor<1x?x8xf16>, tensor<8x4xf16> -> tensor<1x?x8xf16>, tensor<?x3x8xf16>
  // CHECK: return %[[Y]], %[[S]] : tensor<1x?x8xf16>, tensor<?x3x8xf16>{{$}}
  return %y, %s : tensor<1x?x8xf16>, tensor<?x3x8xf16>
}

//===----------------------------------------------------------------------===//
// ssm.projection
//===----------------------------------------------------------------------===//

// CHECK-LABEL: func.func @projection(
// CHECK-SAME: %[[X:[a-z0-9_]+]]: {{[^%]*}}%[[W:[a-z0-9_]+]]: {{[^%]*}}%[[BIAS:[a-z0-9_]+]]:
// CHECK-SAME: %[[R:[a-z0-9_]+]]:
func.func @projection(%x: tensor<?x?x8xf32>, %w: tensor<4x8xf32>, %bias: tensor<4xf16>, %r: tensor<?x?x4xf32>) {
  // CHECK: %[[V0:[a-z0-9_]+]] = ssm.projection %[[X]], %[[W]] : tensor<?x?x8xf32>, tensor<4x8xf32> -> tensor<?x?x4xf32>{{$}}
  %0 = ssm.projection %x, %w : tensor<?x?x8xf32>, tensor<4x8xf32> -> tensor<?x?x4xf32>
  // CHECK: %[[V1:[a-z0-9_]+]] = ssm.projection %[[X]], %[[W]] bias(%[[BIAS]] : tensor<4xf16>) : tensor<?x?x8xf32>, tensor<4x8xf32> -> tensor<?x?x4xf32>{{$}}
  %1 = ssm.projection %x, %w bias(%bias : tensor<4xf16>) : tensor<?x?x8xf32>, tensor<4x8xf32> -> tensor<?x?x4xf32>
  // CHECK: %[[V2:[a-z0-9_]+]] = ssm.projection %[[X]], %[[W]] residual(%[[R]] : tensor<?x?x4xf32>) : tensor<?x?x8xf32>, tensor<4x8xf32> -> tensor<?x?x4xf32>{{$}}
  %2 = ssm.projection %x, %w residual(%r : tensor<?x?x4xf32>) : tensor<?x?x8xf32>, tensor<4x8xf32> -> tensor<?x?x4xf32>
  // CHECK: %[[V3:[a-z0-9_]+]] = ssm.projection %[[X]], %[[W]] bias(%[[BIAS]] : tensor<4xf16>) residual(%[[R]] : tensor<?x?x4xf32>) : tensor<?x?x8xf32>, tensor<4x8xf32> -> tensor<?x?x4xf32>{{$}}
  %3 = ssm.projection %x, %w bias(%bias : tensor<4xf16>) residual(%r : tensor<?x?x4xf32>) : tensor<?x?x8xf32>, tensor<4x8xf32> -> tensor<?x?x4xf32>
  // CHECK: return{{$}}
  return
}

// The result has the residual's element type, else that of x.
// CHECK-LABEL: func.func @projection_types(
// CHECK-SAME: %[[X:[a-z0-9_]+]]: {{[^%]*}}%[[V:[a-z0-9_]+]]: {{[^%]*}}%[[W:[a-z0-9_]+]]:
// CHECK-SAME: %[[R:[a-z0-9_]+]]:
func.func @projection_types(%x: tensor<2x8xbf16>, %v: tensor<8xf16>, %w: tensor<4x8xbf16>, %r: tensor<2x4xf32>) {
  // CHECK: %[[V0:[a-z0-9_]+]] = ssm.projection %[[X]], %[[W]] : tensor<2x8xbf16>, tensor<4x8xbf16> -> tensor<2x4xbf16>{{$}}
  %0 = ssm.projection %x, %w : tensor<2x8xbf16>, tensor<4x8xbf16> -> tensor<2x4xbf16>
  // CHECK: %[[V1:[a-z0-9_]+]] = ssm.projection %[[X]], %[[W]] residual(%[[R]] : tensor<2x4xf32>) : tensor<2x8xbf16>, tensor<4x8xbf16> -> tensor<2x4xf32>{{$}}
  %1 = ssm.projection %x, %w residual(%r : tensor<2x4xf32>) : tensor<2x8xbf16>, tensor<4x8xbf16> -> tensor<2x4xf32>
  // CHECK: %[[V2:[a-z0-9_]+]] = ssm.projection %[[V]], %[[W]] : tensor<8xf16>, tensor<4x8xbf16> -> tensor<4xf16>{{$}}
  %2 = ssm.projection %v, %w : tensor<8xf16>, tensor<4x8xbf16> -> tensor<4xf16>
  // CHECK: return{{$}}
  return
}

// CHECK-LABEL: func.func @projection_quantized(
// CHECK-SAME: %[[X:[a-z0-9_]+]]: {{[^%]*}}%[[W:[a-z0-9_]+]]: {{[^%]*}}%[[F:[a-z0-9_]+]]:
// CHECK-SAME: %[[ONE:[a-z0-9_]+]]: {{[^%]*}}%[[ROWS:[a-z0-9_]+]]: {{[^%]*}}%[[BIAS:[a-z0-9_]+]]:
// CHECK-SAME: %[[R:[a-z0-9_]+]]:
func.func @projection_quantized(%x: tensor<2x3x5x8xf32>, %w: tensor<4x8xi8>, %f: tensor<4x8xf8E4M3FN>,
    %one: tensor<f32>, %rows: tensor<4xf32>, %bias: tensor<4xf32>, %r: tensor<2x3x5x4xf16>) {
  // CHECK: %[[V0:[a-z0-9_]+]] = ssm.projection %[[X]], %[[W]] weight_scale(%[[ONE]] : tensor<f32>) : tensor<2x3x5x8xf32>, tensor<4x8xi8> -> tensor<2x3x5x4xf32>{{$}}
  %0 = ssm.projection %x, %w weight_scale(%one : tensor<f32>) : tensor<2x3x5x8xf32>, tensor<4x8xi8> -> tensor<2x3x5x4xf32>
  // CHECK: %[[V1:[a-z0-9_]+]] = ssm.projection %[[X]], %[[F]] weight_scale(%[[ROWS]] : tensor<4xf32>) : tensor<2x3x5x8xf32>, tensor<4x8xf8E4M3FN> -> tensor<2x3x5x4xf32>{{$}}
  %1 = ssm.projection %x, %f weight_scale(%rows : tensor<4xf32>) : tensor<2x3x5x8xf32>, tensor<4x8xf8E4M3FN> -> tensor<2x3x5x4xf32>
  // CHECK: %[[V2:[a-z0-9_]+]] = ssm.projection %[[X]], %[[W]] bias(%[[BIAS]] : tensor<4xf32>) residual(%[[R]] : tensor<2x3x5x4xf16>) weight_scale(%[[ROWS]] : tensor<4xf32>) :
  // CHECK-SAME: tensor<2x3x5x8xf32>, tensor<4x8xi8> -> tensor<2x3x5x4xf16>{{$}}
  %2 = ssm.projection %x, %w bias(%bias : tensor<4xf32>) residual(%r : tensor<2x3x5x4xf16>) weight_scale(%rows : tensor<4xf32>) :
      tensor<2x3x5x8xf32>, tensor<4x8xi8> -> tensor<2x3x5x4xf16>
  // CHECK: return{{$}}
  return
}

//===----------------------------------------------------------------------===//
// ssm.rms_norm
//===----------------------------------------------------------------------===//

// The default of eps is not printed.
// CHECK-LABEL: func.func @rms_norm(
// CHECK-SAME: %[[X:[a-z0-9_]+]]: {{[^%]*}}%[[W:[a-z0-9_]+]]: {{[^%]*}}%[[R:[a-z0-9_]+]]:
// CHECK-SAME: %[[Z:[a-z0-9_]+]]:
func.func @rms_norm(%x: tensor<?x?x8xf32>, %w: tensor<8xf32>, %r: tensor<?x?x8xf32>, %z: tensor<?x?x8xbf16>) {
  // CHECK: %[[V0:[a-z0-9_]+]] = ssm.rms_norm %[[X]], %[[W]] : tensor<?x?x8xf32>, tensor<8xf32> -> tensor<?x?x8xf32>{{$}}
  %0 = ssm.rms_norm %x, %w : tensor<?x?x8xf32>, tensor<8xf32> -> tensor<?x?x8xf32>
  // CHECK: %[[V1:[a-z0-9_]+]] = ssm.rms_norm %[[X]], %[[W]] {eps = 9.99999997E-7 : f32} : tensor<?x?x8xf32>, tensor<8xf32> -> tensor<?x?x8xf32>{{$}}
  %1 = ssm.rms_norm %x, %w {eps = 9.99999997E-7 : f32} : tensor<?x?x8xf32>, tensor<8xf32> -> tensor<?x?x8xf32>
  // CHECK: %[[V2:[a-z0-9_]+]] = ssm.rms_norm %[[X]], %[[W]] residual(%[[R]] : tensor<?x?x8xf32>) : tensor<?x?x8xf32>, tensor<8xf32> -> tensor<?x?x8xf32>{{$}}
  %2 = ssm.rms_norm %x, %w residual(%r : tensor<?x?x8xf32>) : tensor<?x?x8xf32>, tensor<8xf32> -> tensor<?x?x8xf32>
  // CHECK: %[[V3:[a-z0-9_]+]], %[[S:[a-z0-9_]+]] = ssm.rms_norm %[[X]], %[[W]] residual(%[[R]] : tensor<?x?x8xf32>) : tensor<?x?x8xf32>, tensor<8xf32> -> tensor<?x?x8xf32>, tensor<?x?x8xf32>{{$}}
  %3, %s = ssm.rms_norm %x, %w residual(%r : tensor<?x?x8xf32>) : tensor<?x?x8xf32>, tensor<8xf32> -> tensor<?x?x8xf32>, tensor<?x?x8xf32>
  // CHECK: %[[V4:[a-z0-9_]+]] = ssm.rms_norm %[[X]], %[[W]] z(%[[Z]] : tensor<?x?x8xbf16>) : tensor<?x?x8xf32>, tensor<8xf32> -> tensor<?x?x8xf32>{{$}}
  %4 = ssm.rms_norm %x, %w z(%z : tensor<?x?x8xbf16>) : tensor<?x?x8xf32>, tensor<8xf32> -> tensor<?x?x8xf32>
  // CHECK: %[[V5:[a-z0-9_]+]] = ssm.rms_norm %[[X]], %[[W]] z(%[[Z]] : tensor<?x?x8xbf16>) {norm_before_gate} : tensor<?x?x8xf32>, tensor<8xf32> -> tensor<?x?x8xf32>{{$}}
  %5 = ssm.rms_norm %x, %w z(%z : tensor<?x?x8xbf16>) {norm_before_gate} : tensor<?x?x8xf32>, tensor<8xf32> -> tensor<?x?x8xf32>
  // CHECK: %[[V6:[a-z0-9_]+]] = ssm.rms_norm %[[X]], %[[W]] {group_size = 4 : i64} : tensor<?x?x8xf32>, tensor<8xf32> -> tensor<?x?x8xf32>{{$}}
  %6 = ssm.rms_norm %x, %w {group_size = 4 : i64} : tensor<?x?x8xf32>, tensor<8xf32> -> tensor<?x?x8xf32>
  // CHECK: return{{$}}
  return
}

// CHECK-LABEL: func.func @rms_norm_full(
// CHECK-SAME: %[[X:[a-z0-9_]+]]: {{[^%]*}}%[[W:[a-z0-9_]+]]: {{[^%]*}}%[[R:[a-z0-9_]+]]:
// CHECK-SAME: %[[Z:[a-z0-9_]+]]:
func.func @rms_norm_full(%x: tensor<8xbf16>, %w: tensor<8xf16>, %r: tensor<8xf32>, %z: tensor<8xf16>)
    -> (tensor<8xbf16>, tensor<8xf32>) {
  // CHECK: %[[Y:[a-z0-9_]+]], %[[S:[a-z0-9_]+]] = ssm.rms_norm %[[X]], %[[W]] residual(%[[R]] : tensor<8xf32>) z(%[[Z]] : tensor<8xf16>)
  // CHECK-SAME: {eps = 0.000000e+00 : f32, group_size = 1 : i64, norm_before_gate} :
  // CHECK-SAME: tensor<8xbf16>, tensor<8xf16> -> tensor<8xbf16>, tensor<8xf32>{{$}}
  %y, %s = ssm.rms_norm %x, %w residual(%r : tensor<8xf32>) z(%z : tensor<8xf16>)
      {eps = 0.000000e+00 : f32, group_size = 1 : i64, norm_before_gate} :
      tensor<8xbf16>, tensor<8xf16> -> tensor<8xbf16>, tensor<8xf32>
  // CHECK: return %[[Y]], %[[S]] : tensor<8xbf16>, tensor<8xf32>{{$}}
  return %y, %s : tensor<8xbf16>, tensor<8xf32>
}

//===----------------------------------------------------------------------===//
// ssm.hadamard
//===----------------------------------------------------------------------===//

// CHECK-LABEL: func.func @hadamard(
// CHECK-SAME: %[[X:[a-z0-9_]+]]: {{[^%]*}}%[[V:[a-z0-9_]+]]: {{[^%]*}}%[[H:[a-z0-9_]+]]:
func.func @hadamard(%x: tensor<?x?x768xf32>, %v: tensor<8xbf16>, %h: tensor<3x8xf16>) {
  // CHECK: %[[V0:[a-z0-9_]+]] = ssm.hadamard %[[X]] {block = 256 : i64} : tensor<?x?x768xf32> -> tensor<?x?x768xf32>{{$}}
  %0 = ssm.hadamard %x {block = 256 : i64} : tensor<?x?x768xf32> -> tensor<?x?x768xf32>
  // CHECK: %[[V1:[a-z0-9_]+]] = ssm.hadamard %[[V]] {block = 8 : i64} : tensor<8xbf16> -> tensor<8xbf16>{{$}}
  %1 = ssm.hadamard %v {block = 8 : i64} : tensor<8xbf16> -> tensor<8xbf16>
  // CHECK: %[[V2:[a-z0-9_]+]] = ssm.hadamard %[[H]] {block = 1 : i64} : tensor<3x8xf16> -> tensor<3x8xf16>{{$}}
  %2 = ssm.hadamard %h {block = 1 : i64} : tensor<3x8xf16> -> tensor<3x8xf16>
  // CHECK: return{{$}}
  return
}

//===----------------------------------------------------------------------===//
// Elementwise ops
//===----------------------------------------------------------------------===//

// CHECK-LABEL: func.func @unary(
// CHECK-SAME: %[[X:[a-z0-9_]+]]: {{[^%]*}}%[[Y:[a-z0-9_]+]]: {{[^%]*}}%[[Z:[a-z0-9_]+]]:
func.func @unary(%x: tensor<?x?x8xf32>, %y: tensor<2x8xbf16>, %z: tensor<f16>) {
  // CHECK: %[[V0:[a-z0-9_]+]] = ssm.neg %[[X]] : tensor<?x?x8xf32>{{$}}
  %0 = ssm.neg %x : tensor<?x?x8xf32>
  // CHECK: %[[V1:[a-z0-9_]+]] = ssm.exp %[[X]] : tensor<?x?x8xf32>{{$}}
  %1 = ssm.exp %x : tensor<?x?x8xf32>
  // CHECK: %[[V2:[a-z0-9_]+]] = ssm.silu %[[X]] : tensor<?x?x8xf32>{{$}}
  %2 = ssm.silu %x : tensor<?x?x8xf32>
  // CHECK: %[[V3:[a-z0-9_]+]] = ssm.sigmoid %[[Y]] : tensor<2x8xbf16>{{$}}
  %3 = ssm.sigmoid %y : tensor<2x8xbf16>
  // CHECK: %[[V4:[a-z0-9_]+]] = ssm.softplus %[[Y]] : tensor<2x8xbf16>{{$}}
  %4 = ssm.softplus %y : tensor<2x8xbf16>
  // CHECK: %[[V5:[a-z0-9_]+]] = ssm.gelu %[[Z]] : tensor<f16>{{$}}
  %5 = ssm.gelu %z : tensor<f16>
  // CHECK: return{{$}}
  return
}

// rhs has the shape of lhs, or of trailing axes of it, in any float type.
// CHECK-LABEL: func.func @binary(
// CHECK-SAME: %[[X:[a-z0-9_]+]]: {{[^%]*}}%[[Y:[a-z0-9_]+]]: {{[^%]*}}%[[V:[a-z0-9_]+]]:
// CHECK-SAME: %[[S:[a-z0-9_]+]]:
func.func @binary(%x: tensor<?x?x8xf32>, %y: tensor<?x8xbf16>, %v: tensor<8xf16>, %s: tensor<f32>) {
  // CHECK: %[[V0:[a-z0-9_]+]] = ssm.add %[[X]], %[[X]] : tensor<?x?x8xf32>, tensor<?x?x8xf32>{{$}}
  %0 = ssm.add %x, %x : tensor<?x?x8xf32>, tensor<?x?x8xf32>
  // CHECK: %[[V1:[a-z0-9_]+]] = ssm.sub %[[X]], %[[Y]] : tensor<?x?x8xf32>, tensor<?x8xbf16>{{$}}
  %1 = ssm.sub %x, %y : tensor<?x?x8xf32>, tensor<?x8xbf16>
  // CHECK: %[[V2:[a-z0-9_]+]] = ssm.mul %[[Y]], %[[V]] : tensor<?x8xbf16>, tensor<8xf16>{{$}}
  %2 = ssm.mul %y, %v : tensor<?x8xbf16>, tensor<8xf16>
  // CHECK: %[[V3:[a-z0-9_]+]] = ssm.mul %[[V]], %[[S]] : tensor<8xf16>, tensor<f32>{{$}}
  %3 = ssm.mul %v, %s : tensor<8xf16>, tensor<f32>
  // CHECK: return{{$}}
  return
}

// CHECK-LABEL: func.func @cast_scale(
// CHECK-SAME: %[[X:[a-z0-9_]+]]: {{[^%]*}}%[[V:[a-z0-9_]+]]:
func.func @cast_scale(%x: tensor<?x8xf32>, %v: tensor<8xbf16>) {
  // CHECK: %[[V0:[a-z0-9_]+]] = ssm.cast %[[X]] : tensor<?x8xf32> to tensor<?x8xbf16>{{$}}
  %0 = ssm.cast %x : tensor<?x8xf32> to tensor<?x8xbf16>
  // CHECK: %[[V1:[a-z0-9_]+]] = ssm.cast %[[V0]] : tensor<?x8xbf16> to tensor<?x8xf16>{{$}}
  %1 = ssm.cast %0 : tensor<?x8xbf16> to tensor<?x8xf16>
  // CHECK: %[[V2:[a-z0-9_]+]] = ssm.cast %[[V1]] : tensor<?x8xf16> to tensor<?x8xf32>{{$}}
  %2 = ssm.cast %1 : tensor<?x8xf16> to tensor<?x8xf32>
  // CHECK: %[[V3:[a-z0-9_]+]] = ssm.scale %[[V2]] by 5.000000e-01 : tensor<?x8xf32>{{$}}
  %3 = ssm.scale %2 by 5.000000e-01 : tensor<?x8xf32>
  // CHECK: %[[V4:[a-z0-9_]+]] = ssm.scale %[[V]] by -1.250000e-01 : tensor<8xbf16>{{$}}
  %4 = ssm.scale %v by -1.250000e-01 : tensor<8xbf16>
  // CHECK: return{{$}}
  return
}

//===----------------------------------------------------------------------===//
// ssm.embedding, ssm.argmax, ssm.sample
//===----------------------------------------------------------------------===//

// CHECK-LABEL: func.func @ends(
// CHECK-SAME: %[[IDS:[a-z0-9_]+]]: {{[^%]*}}%[[LONG:[a-z0-9_]+]]: {{[^%]*}}%[[ID:[a-z0-9_]+]]:
// CHECK-SAME: %[[TABLE:[a-z0-9_]+]]: {{[^%]*}}%[[X:[a-z0-9_]+]]: {{[^%]*}}%[[V:[a-z0-9_]+]]:
func.func @ends(%ids: tensor<?x?xi32>, %long: tensor<7xi64>, %id: tensor<i32>, %table: tensor<256x8xbf16>,
    %x: tensor<?x256xf32>, %v: tensor<256xf16>) {
  // Rows of any number.
  // CHECK: ssm.embedding %[[IDS]], %[[X]] : tensor<?x?xi32>, tensor<?x256xf32> -> tensor<?x?x256xf32>{{$}}
  %rows = ssm.embedding %ids, %x : tensor<?x?xi32>, tensor<?x256xf32> -> tensor<?x?x256xf32>
  // CHECK: %[[V0:[a-z0-9_]+]] = ssm.embedding %[[IDS]], %[[TABLE]] : tensor<?x?xi32>, tensor<256x8xbf16> -> tensor<?x?x8xbf16>{{$}}
  %0 = ssm.embedding %ids, %table : tensor<?x?xi32>, tensor<256x8xbf16> -> tensor<?x?x8xbf16>
  // CHECK: %[[V1:[a-z0-9_]+]] = ssm.embedding %[[LONG]], %[[TABLE]] : tensor<7xi64>, tensor<256x8xbf16> -> tensor<7x8xbf16>{{$}}
  %1 = ssm.embedding %long, %table : tensor<7xi64>, tensor<256x8xbf16> -> tensor<7x8xbf16>
  // CHECK: %[[V2:[a-z0-9_]+]] = ssm.embedding %[[ID]], %[[TABLE]] : tensor<i32>, tensor<256x8xbf16> -> tensor<8xbf16>{{$}}
  %2 = ssm.embedding %id, %table : tensor<i32>, tensor<256x8xbf16> -> tensor<8xbf16>
  // CHECK: %[[V3:[a-z0-9_]+]] = ssm.argmax %[[X]] : tensor<?x256xf32> -> tensor<?xi32>{{$}}
  %3 = ssm.argmax %x : tensor<?x256xf32> -> tensor<?xi32>
  // CHECK: %[[V4:[a-z0-9_]+]] = ssm.argmax %[[X]] : tensor<?x256xf32> -> tensor<?xi64>{{$}}
  %4 = ssm.argmax %x : tensor<?x256xf32> -> tensor<?xi64>
  // CHECK: %[[V5:[a-z0-9_]+]] = ssm.argmax %[[V]] : tensor<256xf16> -> tensor<i32>{{$}}
  %5 = ssm.argmax %v : tensor<256xf16> -> tensor<i32>
  // CHECK: return{{$}}
  return
}

// CHECK-LABEL: func.func @sample(
// CHECK-SAME: %[[X:[a-z0-9_]+]]: {{[^%]*}}%[[T:[a-z0-9_]+]]: {{[^%]*}}%[[K:[a-z0-9_]+]]: {{[^%]*}}%[[P:[a-z0-9_]+]]: {{[^%]*}}%[[R:[a-z0-9_]+]]:
func.func @sample(%x: tensor<?x257xf32>, %t: tensor<?xf32>, %k: tensor<?xi32>, %p: tensor<?xf32>, %r: tensor<?x3xi64>,
    %y: tensor<1xbf16>, %t0: tensor<f32>, %k0: tensor<i32>, %r0: tensor<3xi64>) {
  // CHECK: %{{.+}}, %{{.+}} = ssm.sample %[[X]], %[[T]], %[[K]], %[[P]], %[[R]] : tensor<?x257xf32>, tensor<?xf32>, tensor<?xi32>, tensor<?xf32>, tensor<?x3xi64> -> tensor<?xi32>, tensor<?x3xi64>{{$}}
  %0, %1 = ssm.sample %x, %t, %k, %p, %r : tensor<?x257xf32>, tensor<?xf32>, tensor<?xi32>, tensor<?xf32>, tensor<?x3xi64> -> tensor<?xi32>, tensor<?x3xi64>
  // One row.
  // CHECK: ssm.sample {{.+}} : tensor<1xbf16>, tensor<f32>, tensor<i32>, tensor<f32>, tensor<3xi64> -> tensor<i64>, tensor<3xi64>{{$}}
  %2, %3 = ssm.sample %y, %t0, %k0, %t0, %r0 : tensor<1xbf16>, tensor<f32>, tensor<i32>, tensor<f32>, tensor<3xi64> -> tensor<i64>, tensor<3xi64>
  // CHECK: return{{$}}
  return
}

//===----------------------------------------------------------------------===//
// ssm.quantize, ssm.dequantize
//===----------------------------------------------------------------------===//

// CHECK-LABEL: func.func @quantization(
// CHECK-SAME: %[[X:[a-z0-9_]+]]: {{[^%]*}}%[[H:[a-z0-9_]+]]:
func.func @quantization(%x: tensor<?x?x8xf32>, %h: tensor<8xf16>) {
  // CHECK: %[[Q0:[a-z0-9_]+]], %[[S0:[a-z0-9_]+]] = ssm.quantize %[[X]] tensor : tensor<?x?x8xf32> -> tensor<?x?x8xi8>, tensor<f32>{{$}}
  %q0, %s0 = ssm.quantize %x tensor : tensor<?x?x8xf32> -> tensor<?x?x8xi8>, tensor<f32>
  // CHECK: %[[Q1:[a-z0-9_]+]], %[[S1:[a-z0-9_]+]] = ssm.quantize %[[X]] token : tensor<?x?x8xf32> -> tensor<?x?x8xf8E4M3FN>, tensor<?x?xf32>{{$}}
  %q1, %s1 = ssm.quantize %x token : tensor<?x?x8xf32> -> tensor<?x?x8xf8E4M3FN>, tensor<?x?xf32>
  // CHECK: %[[Q2:[a-z0-9_]+]], %[[S2:[a-z0-9_]+]] = ssm.quantize %[[X]] channel : tensor<?x?x8xf32> -> tensor<?x?x8xi8>, tensor<8xf32>{{$}}
  %q2, %s2 = ssm.quantize %x channel : tensor<?x?x8xf32> -> tensor<?x?x8xi8>, tensor<8xf32>
  // CHECK: %[[Q3:[a-z0-9_]+]], %[[S3:[a-z0-9_]+]] = ssm.quantize %[[H]] token : tensor<8xf16> -> tensor<8xi8>, tensor<f32>{{$}}
  %q3, %s3 = ssm.quantize %h token : tensor<8xf16> -> tensor<8xi8>, tensor<f32>
  // CHECK: %[[X0:[a-z0-9_]+]] = ssm.dequantize %[[Q0]], %[[S0]] tensor : tensor<?x?x8xi8>, tensor<f32> -> tensor<?x?x8xf32>{{$}}
  %x0 = ssm.dequantize %q0, %s0 tensor : tensor<?x?x8xi8>, tensor<f32> -> tensor<?x?x8xf32>
  // CHECK: %[[X1:[a-z0-9_]+]] = ssm.dequantize %[[Q1]], %[[S1]] token : tensor<?x?x8xf8E4M3FN>, tensor<?x?xf32> -> tensor<?x?x8xbf16>{{$}}
  %x1 = ssm.dequantize %q1, %s1 token : tensor<?x?x8xf8E4M3FN>, tensor<?x?xf32> -> tensor<?x?x8xbf16>
  // CHECK: %[[X2:[a-z0-9_]+]] = ssm.dequantize %[[Q2]], %[[S2]] channel : tensor<?x?x8xi8>, tensor<8xf32> -> tensor<?x?x8xf16>{{$}}
  %x2 = ssm.dequantize %q2, %s2 channel : tensor<?x?x8xi8>, tensor<8xf32> -> tensor<?x?x8xf16>
  // CHECK: return{{$}}
  return
}

//===----------------------------------------------------------------------===//
// Structure
//===----------------------------------------------------------------------===//

// CHECK-LABEL: func.func @sites(
// CHECK-SAME: %[[X:[a-z0-9_]+]]: {{[^%]*}}%[[N:[a-z0-9_]+]]:
func.func @sites(%x: tensor<?x?x8xf32>, %n: index) {
  // CHECK: %[[V0:[a-z0-9_]+]] = ssm.observe @layer0.u %[[X]] : tensor<?x?x8xf32>{{$}}
  %0 = ssm.observe @layer0.u %x : tensor<?x?x8xf32>
  // CHECK: %[[V1:[a-z0-9_]+]] = ssm.bind_chunk @layer0.scan(%[[N]], %[[N]]){{$}}
  %1 = ssm.bind_chunk @layer0.scan(%n, %n)
  // CHECK: %[[V2:[a-z0-9_]+]] = ssm.bind_chunk @"a name with spaces"(%[[N]], %[[V1]]) {policy = "fixed:256"}{{$}}
  %2 = ssm.bind_chunk @"a name with spaces"(%n, %1) {policy = "fixed:256"}
  // CHECK: return{{$}}
  return
}

// CHECK: ssm.weight @in_proj "mixer.in_proj.weight" : tensor<1024x256xbf16>{{$}}
ssm.weight @in_proj "mixer.in_proj.weight" : tensor<1024x256xbf16>
// CHECK: ssm.weight @plain : tensor<8xf32>{{$}}
ssm.weight @plain : tensor<8xf32>
// CHECK: ssm.weight @scalar : tensor<f16>{{$}}
ssm.weight @scalar : tensor<f16>
// CHECK: ssm.weight @quantized "q" {ssm.note = 1 : i32} : tensor<4x8xi8>{{$}}
ssm.weight @quantized "q" {ssm.note = 1 : i32} : tensor<4x8xi8>
// CHECK: ssm.weight @narrow : tensor<4x8xf8E4M3FN>{{$}}
ssm.weight @narrow : tensor<4x8xf8E4M3FN>
// CHECK: ssm.weight @ids32 : tensor<4xi32>{{$}}
ssm.weight @ids32 : tensor<4xi32>
// CHECK: ssm.weight @ids64 : tensor<4xi64>{{$}}
ssm.weight @ids64 : tensor<4xi64>

// CHECK-LABEL: func.func @weights(
func.func @weights() -> tensor<1024x256xbf16> {
  // CHECK: %[[W:[a-z0-9_]+]] = ssm.get_weight @in_proj : tensor<1024x256xbf16>{{$}}
  %w = ssm.get_weight @in_proj : tensor<1024x256xbf16>
  // CHECK: return %[[W]] : tensor<1024x256xbf16>{{$}}
  return %w : tensor<1024x256xbf16>
}

// CHECK-LABEL: func.func @fused(
// CHECK-SAME: %[[X:[a-z0-9_]+]]: {{[^%]*}}%[[V:[a-z0-9_]+]]:
func.func @fused(%x: tensor<?x8xf32>, %v: tensor<8xf32>) -> tensor<?x8xf32> {
  // CHECK: %[[Y:[a-z0-9_]+]] = ssm.fused ins(%[[X]], %[[V]] : tensor<?x8xf32>, tensor<8xf32>)
  // CHECK-SAME: score(<entropy = 6.100000e-01, intensity = 4.000000e-01, memory = 2.000000e-01, score = 5.800000e-01, threshold = 5.200000e-01>)
  // CHECK-SAME: -> tensor<?x8xf32> attributes {kind = "gate"} {
  %y = ssm.fused ins(%x, %v : tensor<?x8xf32>, tensor<8xf32>)
      score(<entropy = 6.100000e-01, intensity = 4.000000e-01, memory = 2.000000e-01, score = 5.800000e-01, threshold = 5.200000e-01>)
      -> tensor<?x8xf32> attributes {kind = "gate"} {
  // CHECK: ^bb0(%[[A:[a-z0-9_]+]]: tensor<?x8xf32>, %[[B:[a-z0-9_]+]]: tensor<8xf32>):{{$}}
  ^bb0(%a: tensor<?x8xf32>, %b: tensor<8xf32>):
    // CHECK: %[[V0:[a-z0-9_]+]] = ssm.mul %[[A]], %[[B]] : tensor<?x8xf32>, tensor<8xf32>{{$}}
    %0 = ssm.mul %a, %b : tensor<?x8xf32>, tensor<8xf32>
    // CHECK: %[[V1:[a-z0-9_]+]] = ssm.silu %[[V0]] : tensor<?x8xf32>{{$}}
    %1 = ssm.silu %0 : tensor<?x8xf32>
    // CHECK: ssm.yield %[[V1]] : tensor<?x8xf32>{{$}}
    ssm.yield %1 : tensor<?x8xf32>
  }
  // CHECK: return %[[Y]] : tensor<?x8xf32>{{$}}
  return %y : tensor<?x8xf32>
}

// Nested, with several results; an index is a fine input.
// CHECK-LABEL: func.func @fused_nested(
// CHECK-SAME: %[[X:[a-z0-9_]+]]: {{[^%]*}}%[[N:[a-z0-9_]+]]:
func.func @fused_nested(%x: tensor<?x8xf32>, %n: index) -> (tensor<?x8xf32>, index) {
  // CHECK: %[[Y:[a-z0-9_]+]]:2 = ssm.fused ins(%[[X]], %[[N]] : tensor<?x8xf32>, index) -> tensor<?x8xf32>, index {
  %y, %m = ssm.fused ins(%x, %n : tensor<?x8xf32>, index) -> tensor<?x8xf32>, index {
  // CHECK: ^bb0(%[[A:[a-z0-9_]+]]: tensor<?x8xf32>, %[[I:[a-z0-9_]+]]: index):{{$}}
  ^bb0(%a: tensor<?x8xf32>, %i: index):
    // CHECK: %[[T:[a-z0-9_]+]] = ssm.fused ins(%[[A]] : tensor<?x8xf32>) -> tensor<?x8xf32> {
    %t = ssm.fused ins(%a : tensor<?x8xf32>) -> tensor<?x8xf32> {
    // CHECK: ^bb0(%[[B:[a-z0-9_]+]]: tensor<?x8xf32>):{{$}}
    ^bb0(%b: tensor<?x8xf32>):
      // CHECK: %[[E:[a-z0-9_]+]] = ssm.exp %[[B]] : tensor<?x8xf32>{{$}}
      %e = ssm.exp %b : tensor<?x8xf32>
      // CHECK: ssm.yield %[[E]] : tensor<?x8xf32>{{$}}
      ssm.yield %e : tensor<?x8xf32>
    }
    // CHECK: ssm.yield %[[T]], %[[I]] : tensor<?x8xf32>, index{{$}}
    ssm.yield %t, %i : tensor<?x8xf32>, index
  }
  // CHECK: return %[[Y]]#0, %[[Y]]#1 : tensor<?x8xf32>, index{{$}}
  return %y, %m : tensor<?x8xf32>, index
}

// Without inputs or results, where the terminator has nothing to say.
// CHECK-LABEL: func.func @fused_empty(
func.func @fused_empty() {
  // CHECK: ssm.fused {
  ssm.fused {
  // CHECK-NEXT: }
  }
  // CHECK: return{{$}}
  return
}

// Attributes the dialect does not know stay.
// CHECK-LABEL: func.func @discardable(
// CHECK-SAME: %[[X:[a-z0-9_]+]]:
func.func @discardable(%x: tensor<8xf32>) -> tensor<8xf32> {
  // CHECK: %[[Y:[a-z0-9_]+]] = ssm.silu %[[X]] {corey.stats = #ssm.stats<entropy = 2.270000e+00, bins = 256, min = -2.500000e-01, max = 4.000000e+00, mean = 0.000000e+00, variance = 1.000000e+00, kurtosis = 3.000000e+00>} : tensor<8xf32>{{$}}
  %y = ssm.silu %x {corey.stats = #ssm.stats<entropy = 2.270000e+00, bins = 256, min = -2.500000e-01, max = 4.000000e+00, mean = 0.000000e+00, variance = 1.000000e+00, kurtosis = 3.000000e+00>} : tensor<8xf32>
  // CHECK: return %[[Y]] : tensor<8xf32>{{$}}
  return %y : tensor<8xf32>
}
