// Bytecode: every op survives it, and a file written by version 1.0 of the
// dialect loads for good. Inputs/v1.0.mlirbc is this file as that version wrote
// it; it is never written anew. What a later version adds goes into a file of
// its own.

// RUN: corey-opt %s --emit-bytecode | corey-opt | FileCheck %s
// RUN: corey-opt %S/Inputs/v1.0.mlirbc | FileCheck %s

// The version is written to the file and compared when it is read: the major
// one must be equal, the minor one not newer.
// RUN: corey-opt %s --emit-bytecode -o %t.mlirbc
// RUN: %python %test_inputs/set_bytecode_version.py 1.1 1.2 < %t.mlirbc > %t.minor.mlirbc
// RUN: not corey-opt %t.minor.mlirbc 2>&1 | FileCheck %s --check-prefix=MINOR
// MINOR: error: expected ssm dialect version 1.1 or an older minor version, got 1.2
// RUN: %python %test_inputs/set_bytecode_version.py 1.1 2.0 < %t.mlirbc > %t.major.mlirbc
// RUN: not corey-opt %t.major.mlirbc 2>&1 | FileCheck %s --check-prefix=MAJOR
// MAJOR: error: expected ssm dialect version 1.1 or an older minor version, got 2.0
// RUN: %python %test_inputs/set_bytecode_version.py 1.1 0.0 < %t.mlirbc > %t.old.mlirbc
// RUN: not corey-opt %t.old.mlirbc 2>&1 | FileCheck %s --check-prefix=OLD
// OLD: error: expected ssm dialect version 1.1 or an older minor version, got 0.0

// CHECK: ssm.weight @in_proj "mixer.in_proj.weight" : tensor<4x8xbf16>{{$}}
ssm.weight @in_proj "mixer.in_proj.weight" : tensor<4x8xbf16>
// CHECK: ssm.weight @plain : tensor<8xf32>{{$}}
ssm.weight @plain : tensor<8xf32>

// CHECK-LABEL: func.func @scans(
// CHECK-SAME: %[[U:[a-z0-9_]+]]: {{[^%]*}}%[[DELTA:[a-z0-9_]+]]: {{[^%]*}}%[[A:[a-z0-9_]+]]:
// CHECK-SAME: %[[B:[a-z0-9_]+]]: {{[^%]*}}%[[D:[a-z0-9_]+]]: {{[^%]*}}%[[Z:[a-z0-9_]+]]:
// CHECK-SAME: %[[BIAS:[a-z0-9_]+]]: {{[^%]*}}%[[H0:[a-z0-9_]+]]: {{[^%]*}}%[[K:[a-z0-9_]+]]:
// CHECK-SAME: %[[X:[a-z0-9_]+]]: {{[^%]*}}%[[DT:[a-z0-9_]+]]: {{[^%]*}}%[[RATE:[a-z0-9_]+]]:
// CHECK-SAME: %[[BB:[a-z0-9_]+]]: {{[^%]*}}%[[S0:[a-z0-9_]+]]:
func.func @scans(%u: tensor<?x?x8xbf16>, %delta: tensor<?x?x8xf16>, %a: tensor<8x4xf32>,
    %b: tensor<?x?x1x4xbf16>, %d: tensor<8xf32>, %z: tensor<?x?x8xf16>, %bias: tensor<8xbf16>,
    %h0: tensor<?x8x4xf16>, %k: index, %x: tensor<?x?x8x4xf32>, %dt: tensor<?x?x8xf32>, %rate: tensor<8xf32>,
    %bb: tensor<?x?x1x16xf32>, %s0: tensor<?x8x4x16xf32>) {
  // CHECK: %[[Y:[a-z0-9_]+]], %[[H:[a-z0-9_]+]] = ssm.selective_scan %[[U]], %[[DELTA]], %[[A]], %[[B]], %[[B]] D(%[[D]] : tensor<8xf32>) z(%[[Z]] : tensor<?x?x8xf16>)
  // CHECK-SAME: delta_bias(%[[BIAS]] : tensor<8xbf16>) initial_state(%[[H0]] : tensor<?x8x4xf16>) chunk_size(%[[K]]) {delta_softplus} :
  // CHECK-SAME: tensor<?x?x8xbf16>, tensor<?x?x8xf16>, tensor<8x4xf32>, tensor<?x?x1x4xbf16>,
  // CHECK-SAME: tensor<?x?x1x4xbf16> -> tensor<?x?x8xbf16>, tensor<?x8x4xf16>{{$}}
  %y, %h = ssm.selective_scan %u, %delta, %a, %b, %b D(%d : tensor<8xf32>) z(%z : tensor<?x?x8xf16>)
      delta_bias(%bias : tensor<8xbf16>) initial_state(%h0 : tensor<?x8x4xf16>) chunk_size(%k) {delta_softplus} :
      tensor<?x?x8xbf16>, tensor<?x?x8xf16>, tensor<8x4xf32>, tensor<?x?x1x4xbf16>,
      tensor<?x?x1x4xbf16> -> tensor<?x?x8xbf16>, tensor<?x8x4xf16>
  // CHECK: %[[Y1:[a-z0-9_]+]], %[[S:[a-z0-9_]+]] = ssm.ssd %[[X]] dt(%[[DT]] : tensor<?x?x8xf32>) A(%[[RATE]] : tensor<8xf32>) B(%[[BB]]) C(%[[BB]]) D(%[[D]] : tensor<8xf32>)
  // CHECK-SAME: z(%[[X]] : tensor<?x?x8x4xf32>) dt_bias(%[[RATE]] : tensor<8xf32>) initial_states(%[[S0]] : tensor<?x8x4x16xf32>)
  // CHECK-SAME: {chunk = #ssm.chunk<runtime = @scan>, dt_limit = array<f64: 1.000000e-03, 1.000000e-01>, dt_softplus, tile = 128 : i64} :
  // CHECK-SAME: tensor<?x?x8x4xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x8x4xf32>, tensor<?x8x4x16xf32>{{$}}
  %y1, %s = ssm.ssd %x dt(%dt : tensor<?x?x8xf32>) A(%rate : tensor<8xf32>) B(%bb) C(%bb) D(%d : tensor<8xf32>)
      z(%x : tensor<?x?x8x4xf32>) dt_bias(%rate : tensor<8xf32>) initial_states(%s0 : tensor<?x8x4x16xf32>)
      {chunk = #ssm.chunk<runtime = @scan>, dt_limit = array<f64: 1.000000e-03, 1.000000e-01>, dt_softplus, tile = 128 : i64} :
      tensor<?x?x8x4xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x8x4xf32>, tensor<?x8x4x16xf32>
  // CHECK: %[[Y2:[a-z0-9_]+]] = ssm.ssd %[[X]] decay(%[[DT]] : tensor<?x?x8xf32>) B(%[[BB]]) C(%[[BB]]) {chunk = #ssm.chunk<static = 256>} :
  // CHECK-SAME: tensor<?x?x8x4xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x8x4xf32>{{$}}
  %y2 = ssm.ssd %x decay(%dt : tensor<?x?x8xf32>) B(%bb) C(%bb) {chunk = #ssm.chunk<static = 256>} :
      tensor<?x?x8x4xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x8x4xf32>
  // CHECK: return{{$}}
  return
}

// CHECK-LABEL: func.func @packed(
// CHECK-SAME: %[[X:[a-z0-9_]+]]: {{[^%]*}}%[[W:[a-z0-9_]+]]: {{[^%]*}}%[[BIAS:[a-z0-9_]+]]:
// CHECK-SAME: %[[S0:[a-z0-9_]+]]: {{[^%]*}}%[[STARTS:[a-z0-9_]+]]:
func.func @packed(%x: tensor<1x?x8xf32>, %w: tensor<8x4xf32>, %bias: tensor<8xf32>, %s0: tensor<?x3x8xf32>,
    %starts: tensor<?xi32>) {
  // CHECK: %[[Y:[a-z0-9_]+]], %[[S:[a-z0-9_]+]] = ssm.causal_conv %[[X]], %[[W]] bias(%[[BIAS]] : tensor<8xf32>) initial_state(%[[S0]] : tensor<?x3x8xf32>)
  // CHECK-SAME: seq_starts(%[[STARTS]] : tensor<?xi32>) {silu} : tensor<1x?x8xf32>, tensor<8x4xf32> -> tensor<1x?x8xf32>, tensor<?x3x8xf32>{{$}}
  %y, %s = ssm.causal_conv %x, %w bias(%bias : tensor<8xf32>) initial_state(%s0 : tensor<?x3x8xf32>)
      seq_starts(%starts : tensor<?xi32>) {silu} : tensor<1x?x8xf32>, tensor<8x4xf32> -> tensor<1x?x8xf32>, tensor<?x3x8xf32>
  // CHECK: return{{$}}
  return
}

// CHECK-LABEL: func.func @rows(
// CHECK-SAME: %[[X:[a-z0-9_]+]]: {{[^%]*}}%[[W:[a-z0-9_]+]]: {{[^%]*}}%[[Q:[a-z0-9_]+]]:
// CHECK-SAME: %[[S:[a-z0-9_]+]]: {{[^%]*}}%[[BIAS:[a-z0-9_]+]]: {{[^%]*}}%[[R:[a-z0-9_]+]]:
// CHECK-SAME: %[[G:[a-z0-9_]+]]: {{[^%]*}}%[[IDS:[a-z0-9_]+]]: {{[^%]*}}%[[T:[a-z0-9_]+]]:
func.func @rows(%x: tensor<?x?x8xf32>, %w: tensor<4x8xf32>, %q: tensor<4x8xf8E4M3FN>, %s: tensor<4xf32>,
    %bias: tensor<4xf16>, %r: tensor<?x?x4xbf16>, %g: tensor<8xf32>, %ids: tensor<?x?xi64>, %t: tensor<256x8xbf16>) {
  // CHECK: %[[V0:[a-z0-9_]+]] = ssm.projection %[[X]], %[[W]] : tensor<?x?x8xf32>, tensor<4x8xf32> -> tensor<?x?x4xf32>{{$}}
  %0 = ssm.projection %x, %w : tensor<?x?x8xf32>, tensor<4x8xf32> -> tensor<?x?x4xf32>
  // CHECK: %[[V1:[a-z0-9_]+]] = ssm.projection %[[X]], %[[Q]] bias(%[[BIAS]] : tensor<4xf16>) residual(%[[R]] : tensor<?x?x4xbf16>) weight_scale(%[[S]] : tensor<4xf32>) :
  // CHECK-SAME: tensor<?x?x8xf32>, tensor<4x8xf8E4M3FN> -> tensor<?x?x4xbf16>{{$}}
  %1 = ssm.projection %x, %q bias(%bias : tensor<4xf16>) residual(%r : tensor<?x?x4xbf16>) weight_scale(%s : tensor<4xf32>) :
      tensor<?x?x8xf32>, tensor<4x8xf8E4M3FN> -> tensor<?x?x4xbf16>
  // CHECK: %[[Y:[a-z0-9_]+]], %[[SUM:[a-z0-9_]+]] = ssm.rms_norm %[[X]], %[[G]] residual(%[[X]] : tensor<?x?x8xf32>) z(%[[X]] : tensor<?x?x8xf32>)
  // CHECK-SAME: {eps = 9.99999997E-7 : f32, group_size = 4 : i64, norm_before_gate} : tensor<?x?x8xf32>, tensor<8xf32> -> tensor<?x?x8xf32>, tensor<?x?x8xf32>{{$}}
  %y, %sum = ssm.rms_norm %x, %g residual(%x : tensor<?x?x8xf32>) z(%x : tensor<?x?x8xf32>)
      {eps = 9.99999997E-7 : f32, group_size = 4 : i64, norm_before_gate} : tensor<?x?x8xf32>, tensor<8xf32> -> tensor<?x?x8xf32>, tensor<?x?x8xf32>
  // CHECK: %[[V2:[a-z0-9_]+]] = ssm.rms_norm %[[X]], %[[G]] : tensor<?x?x8xf32>, tensor<8xf32> -> tensor<?x?x8xf32>{{$}}
  %2 = ssm.rms_norm %x, %g : tensor<?x?x8xf32>, tensor<8xf32> -> tensor<?x?x8xf32>
  // CHECK: %[[V3:[a-z0-9_]+]] = ssm.hadamard %[[X]] {block = 8 : i64} : tensor<?x?x8xf32> -> tensor<?x?x8xf32>{{$}}
  %3 = ssm.hadamard %x {block = 8 : i64} : tensor<?x?x8xf32> -> tensor<?x?x8xf32>
  // CHECK: %[[V4:[a-z0-9_]+]] = ssm.embedding %[[IDS]], %[[T]] : tensor<?x?xi64>, tensor<256x8xbf16> -> tensor<?x?x8xbf16>{{$}}
  %4 = ssm.embedding %ids, %t : tensor<?x?xi64>, tensor<256x8xbf16> -> tensor<?x?x8xbf16>
  // CHECK: %[[V5:[a-z0-9_]+]] = ssm.argmax %[[X]] : tensor<?x?x8xf32> -> tensor<?x?xi32>{{$}}
  %5 = ssm.argmax %x : tensor<?x?x8xf32> -> tensor<?x?xi32>
  // CHECK: return{{$}}
  return
}

// CHECK-LABEL: func.func @elementwise(
// CHECK-SAME: %[[X:[a-z0-9_]+]]: {{[^%]*}}%[[V:[a-z0-9_]+]]:
func.func @elementwise(%x: tensor<?x8xf32>, %v: tensor<8xbf16>) {
  // CHECK: %[[V0:[a-z0-9_]+]] = ssm.neg %[[X]] : tensor<?x8xf32>{{$}}
  %0 = ssm.neg %x : tensor<?x8xf32>
  // CHECK: %[[V1:[a-z0-9_]+]] = ssm.exp %[[X]] : tensor<?x8xf32>{{$}}
  %1 = ssm.exp %x : tensor<?x8xf32>
  // CHECK: %[[V2:[a-z0-9_]+]] = ssm.silu %[[X]] : tensor<?x8xf32>{{$}}
  %2 = ssm.silu %x : tensor<?x8xf32>
  // CHECK: %[[V3:[a-z0-9_]+]] = ssm.sigmoid %[[X]] : tensor<?x8xf32>{{$}}
  %3 = ssm.sigmoid %x : tensor<?x8xf32>
  // CHECK: %[[V4:[a-z0-9_]+]] = ssm.softplus %[[X]] : tensor<?x8xf32>{{$}}
  %4 = ssm.softplus %x : tensor<?x8xf32>
  // CHECK: %[[V5:[a-z0-9_]+]] = ssm.gelu %[[X]] : tensor<?x8xf32>{{$}}
  %5 = ssm.gelu %x : tensor<?x8xf32>
  // CHECK: %[[V6:[a-z0-9_]+]] = ssm.add %[[X]], %[[V]] : tensor<?x8xf32>, tensor<8xbf16>{{$}}
  %6 = ssm.add %x, %v : tensor<?x8xf32>, tensor<8xbf16>
  // CHECK: %[[V7:[a-z0-9_]+]] = ssm.sub %[[X]], %[[V]] : tensor<?x8xf32>, tensor<8xbf16>{{$}}
  %7 = ssm.sub %x, %v : tensor<?x8xf32>, tensor<8xbf16>
  // CHECK: %[[V8:[a-z0-9_]+]] = ssm.mul %[[X]], %[[V]] : tensor<?x8xf32>, tensor<8xbf16>{{$}}
  %8 = ssm.mul %x, %v : tensor<?x8xf32>, tensor<8xbf16>
  // CHECK: %[[V9:[a-z0-9_]+]] = ssm.cast %[[X]] : tensor<?x8xf32> to tensor<?x8xf16>{{$}}
  %9 = ssm.cast %x : tensor<?x8xf32> to tensor<?x8xf16>
  // CHECK: %[[V10:[a-z0-9_]+]] = ssm.scale %[[X]] by 1.0000000000000002 : tensor<?x8xf32>{{$}}
  %10 = ssm.scale %x by 1.0000000000000002 : tensor<?x8xf32>
  // CHECK: return{{$}}
  return
}

// CHECK-LABEL: func.func @quantization(
// CHECK-SAME: %[[X:[a-z0-9_]+]]:
func.func @quantization(%x: tensor<?x8xf32>) {
  // CHECK: %[[Q0:[a-z0-9_]+]], %[[S0:[a-z0-9_]+]] = ssm.quantize %[[X]] tensor : tensor<?x8xf32> -> tensor<?x8xi8>, tensor<f32>{{$}}
  %q0, %s0 = ssm.quantize %x tensor : tensor<?x8xf32> -> tensor<?x8xi8>, tensor<f32>
  // CHECK: %[[Q1:[a-z0-9_]+]], %[[S1:[a-z0-9_]+]] = ssm.quantize %[[X]] token : tensor<?x8xf32> -> tensor<?x8xf8E4M3FN>, tensor<?xf32>{{$}}
  %q1, %s1 = ssm.quantize %x token : tensor<?x8xf32> -> tensor<?x8xf8E4M3FN>, tensor<?xf32>
  // CHECK: %[[Q2:[a-z0-9_]+]], %[[S2:[a-z0-9_]+]] = ssm.quantize %[[X]] channel : tensor<?x8xf32> -> tensor<?x8xi8>, tensor<8xf32>{{$}}
  %q2, %s2 = ssm.quantize %x channel : tensor<?x8xf32> -> tensor<?x8xi8>, tensor<8xf32>
  // CHECK: %[[X1:[a-z0-9_]+]] = ssm.dequantize %[[Q1]], %[[S1]] token : tensor<?x8xf8E4M3FN>, tensor<?xf32> -> tensor<?x8xbf16>{{$}}
  %x1 = ssm.dequantize %q1, %s1 token : tensor<?x8xf8E4M3FN>, tensor<?xf32> -> tensor<?x8xbf16>
  // CHECK: return{{$}}
  return
}

// CHECK-LABEL: func.func @structure(
// CHECK-SAME: %[[X:[a-z0-9_]+]]: {{[^%]*}}%[[N:[a-z0-9_]+]]:
func.func @structure(%x: tensor<?x8xf32>, %n: index) {
  // CHECK: %[[W:[a-z0-9_]+]] = ssm.get_weight @plain : tensor<8xf32>{{$}}
  %w = ssm.get_weight @plain : tensor<8xf32>
  // CHECK: %[[O:[a-z0-9_]+]] = ssm.observe @layer0.u %[[X]] : tensor<?x8xf32>{{$}}
  %o = ssm.observe @layer0.u %x : tensor<?x8xf32>
  // CHECK: %[[C:[a-z0-9_]+]] = ssm.bind_chunk @layer0.scan(%[[N]], %[[N]]) {policy = "fixed:256"}{{$}}
  %c = ssm.bind_chunk @layer0.scan(%n, %n) {policy = "fixed:256"}
  // CHECK: %[[Y:[a-z0-9_]+]] = ssm.fused ins(%[[O]], %[[W]] : tensor<?x8xf32>, tensor<8xf32>)
  // CHECK-SAME: score(<entropy = 6.100000e-01, intensity = 4.000000e-01, memory = 2.000000e-01, score = 1.000000e-01, threshold = 0.30000000000000004>)
  // CHECK-SAME: -> tensor<?x8xf32> attributes {test.stats = #ssm.stats<entropy = 2.2718281828459044, bins = 256, min = -1.000000e+00, max = 1.000000e+00, mean = 4.940660e-324, variance = 1.000000e+00, kurtosis = 3.3333333333333335>} {
  %y = ssm.fused ins(%o, %w : tensor<?x8xf32>, tensor<8xf32>)
      score(<entropy = 6.100000e-01, intensity = 4.000000e-01, memory = 2.000000e-01, score = 1.000000e-01, threshold = 0.30000000000000004>)
      -> tensor<?x8xf32> attributes {test.stats = #ssm.stats<entropy = 2.2718281828459044, bins = 256, min = -1.000000e+00, max = 1.000000e+00, mean = 4.940660e-324, variance = 1.000000e+00, kurtosis = 3.3333333333333335>} {
  // CHECK: ^bb0(%[[A:[a-z0-9_]+]]: tensor<?x8xf32>, %[[B:[a-z0-9_]+]]: tensor<8xf32>):{{$}}
  ^bb0(%a: tensor<?x8xf32>, %b: tensor<8xf32>):
    // CHECK: %[[V0:[a-z0-9_]+]] = ssm.mul %[[A]], %[[B]] : tensor<?x8xf32>, tensor<8xf32>{{$}}
    %0 = ssm.mul %a, %b : tensor<?x8xf32>, tensor<8xf32>
    // CHECK: ssm.yield %[[V0]] : tensor<?x8xf32>{{$}}
    ssm.yield %0 : tensor<?x8xf32>
  }
  // CHECK: return{{$}}
  return
}
