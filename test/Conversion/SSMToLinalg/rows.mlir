// Lowering of ops along the last axis: ssm.rms_norm, ssm.hadamard, ssm.embedding,
// ssm.argmax, ssm.sample.

// RUN: corey-opt %s --convert-ssm-to-linalg=vector-bits=256 | FileCheck %s

// CHECK: func.func private @corey_rt_bad_index(i64, i64)

// Two passes over every group of a row: the sum of squares, then the scale.
// CHECK-LABEL: func.func @rms_norm(
// CHECK-SAME: %[[X:[a-z0-9]+]]: tensor<?x?x24xf32>, %[[W:[a-z0-9]+]]: tensor<24xf32>
// CHECK-DAG: %[[XB:.+]] = bufferization.to_buffer %[[X]] read_only
// CHECK-DAG: %[[WB:.+]] = bufferization.to_buffer %[[W]] read_only
// CHECK-DAG: %[[Y:.+]] = memref.alloc(%{{.+}}, %{{.+}}) {alignment = 64 : i64} : memref<?x?x24xf32>
// CHECK: scf.parallel (%[[B:.+]], %[[L:.+]]) =
// CHECK: %[[ROW:.+]] = memref.alloca() {alignment = 64 : i64} : memref<12xf32>
// CHECK: %[[GROUP:.+]] = arith.constant 12 : index
// CHECK: scf.for %[[BASE:.+]] = %{{.+}} to %{{.+}} step %[[GROUP]] {
// CHECK: scf.for {{.*}} -> (vector<8xf32>) {
// CHECK: vector.load %[[XB]][%[[B]], %[[L]], %{{.+}}]{{.*}} vector<8xf32>
// CHECK: math.fma
// What remains of a group is a narrower vector.
// CHECK: vector.load %[[XB]]{{.*}} vector<4xf32>
// CHECK: arith.constant 1.200000e+01 : f32
// CHECK: arith.divf
// CHECK: arith.constant 9.99999974E-6 : f32
// CHECK: math.sqrt
// CHECK: vector.load %[[ROW]]
// CHECK: vector.load %[[WB]]
// CHECK: vector.store %{{.+}}, %[[Y]][%[[B]], %[[L]], %{{.+}}]
func.func @rms_norm(%x: tensor<?x?x24xf32>, %w: tensor<24xf32>) -> tensor<?x?x24xf32> {
  %y = ssm.rms_norm %x, %w {group_size = 12 : i64} : tensor<?x?x24xf32>, tensor<24xf32> -> tensor<?x?x24xf32>
  return %y : tensor<?x?x24xf32>
}

// The gate comes before the square, or after the norm.
// CHECK-LABEL: func.func @gate_first(
// CHECK-SAME: %{{.+}}: tensor<?x8xf32>, %{{.+}}: tensor<8xf32>, %[[R:.+]]: tensor<?x8xf32>, %[[Z:.+]]: tensor<?x8xf32>)
// CHECK-DAG: %[[RB:.+]] = bufferization.to_buffer %[[R]] read_only
// CHECK-DAG: %[[ZB:.+]] = bufferization.to_buffer %[[Z]] read_only
// CHECK: memref.alloc({{.*}}) {alignment = 64 : i64} : memref<?x8xf32>
// CHECK: %[[OUT:.+]] = memref.alloc({{.*}}) {alignment = 64 : i64} : memref<?x8xf32>
// CHECK: vector.load %[[RB]]
// The sum is stored before it is gated.
// CHECK: vector.store %{{.+}}, %[[OUT]]
// CHECK: vector.load %[[ZB]]
// CHECK: math.sqrt
// CHECK-NOT: vector.load %[[ZB]]
// CHECK: return
func.func @gate_first(%x: tensor<?x8xf32>, %w: tensor<8xf32>, %r: tensor<?x8xf32>, %z: tensor<?x8xf32>) -> (tensor<?x8xf32>, tensor<?x8xf32>) {
  %y, %s = ssm.rms_norm %x, %w residual(%r : tensor<?x8xf32>) z(%z : tensor<?x8xf32>)
      : tensor<?x8xf32>, tensor<8xf32> -> tensor<?x8xf32>, tensor<?x8xf32>
  return %y, %s : tensor<?x8xf32>, tensor<?x8xf32>
}

// CHECK-LABEL: func.func @gate_last(
// CHECK-SAME: %{{.+}}: tensor<?x8xf32>, %{{.+}}: tensor<8xf32>, %[[Z:.+]]: tensor<?x8xf32>)
// CHECK: %[[ZB:.+]] = bufferization.to_buffer %[[Z]] read_only
// CHECK-NOT: vector.load %[[ZB]]
// CHECK: math.sqrt
// CHECK: vector.load %[[ZB]]
func.func @gate_last(%x: tensor<?x8xf32>, %w: tensor<8xf32>, %z: tensor<?x8xf32>) -> tensor<?x8xf32> {
  %y = ssm.rms_norm %x, %w z(%z : tensor<?x8xf32>) {norm_before_gate} : tensor<?x8xf32>, tensor<8xf32> -> tensor<?x8xf32>
  return %y : tensor<?x8xf32>
}

// Butterflies: within a vector by shuffles, between vectors by sum and
// difference, then the factor 1 / sqrt(block).
// CHECK-LABEL: func.func @hadamard(
// CHECK: scf.parallel
// CHECK: memref.alloca() {alignment = 64 : i64} : memref<16xf32>
// CHECK: vector.shuffle %{{.+}}, %{{.+}} [1, 0, 3, 2, 5, 4, 7, 6]
// CHECK: vector.shuffle %{{.+}}, %{{.+}} [2, 3, 0, 1, 6, 7, 4, 5]
// CHECK: vector.shuffle %{{.+}}, %{{.+}} [4, 5, 6, 7, 0, 1, 2, 3]
// CHECK: arith.addf
// CHECK: arith.subf
// CHECK: arith.constant dense<2.500000e-01> : vector<8xf32>
func.func @hadamard(%x: tensor<?x48xf32>) -> tensor<?x48xf32> {
  %y = ssm.hadamard %x {block = 16 : i64} : tensor<?x48xf32> -> tensor<?x48xf32>
  return %y : tensor<?x48xf32>
}

// A rotation behind a norm is in its loops: the first stages as the norm is
// scaled, in registers; the others in the buffer of the norm. Its operand is not
// in memory otherwise.
// CHECK-LABEL: func.func @rotated(
// CHECK-SAME: %{{.+}}: tensor<?x48xf32>, %{{.+}}: tensor<48xf32>, %[[G:.+]]: tensor<?x48xf32>)
// CHECK-DAG: %[[GB:.+]] = bufferization.to_buffer %[[G]] read_only
// CHECK-DAG: %[[Y:.+]] = memref.alloc(%{{.+}}) {alignment = 64 : i64} : memref<?x48xbf16>
// CHECK-NOT: memref.alloc(
// CHECK: scf.parallel
// CHECK: %[[ROW:.+]] = memref.alloca() {alignment = 64 : i64} : memref<48xf32>
// CHECK-NOT: memref.alloca
// CHECK: math.sqrt
// CHECK: vector.load %[[ROW]]
// CHECK: vector.load %[[GB]]
// CHECK: arith.mulf
// CHECK: vector.shuffle %{{.+}}, %{{.+}} [1, 0, 3, 2, 5, 4, 7, 6]
// CHECK: vector.shuffle %{{.+}}, %{{.+}} [2, 3, 0, 1, 6, 7, 4, 5]
// CHECK: vector.shuffle %{{.+}}, %{{.+}} [4, 5, 6, 7, 0, 1, 2, 3]
// CHECK: vector.store %{{.+}}, %[[ROW]]
// CHECK: arith.addf
// CHECK: arith.subf
// CHECK: vector.load %[[ROW]]
// CHECK: arith.constant dense<2.500000e-01> : vector<8xf32>
// CHECK: arith.negf
// CHECK: vector.store %{{.+}}, %[[Y]]
// CHECK-NOT: scf.parallel
// CHECK-NOT: ssm.
// CHECK: return
func.func @rotated(%x: tensor<?x48xf32>, %w: tensor<48xf32>, %g: tensor<?x48xf32>) -> tensor<?x48xbf16> {
  %y = ssm.fused ins(%x, %w, %g : tensor<?x48xf32>, tensor<48xf32>, tensor<?x48xf32>) -> tensor<?x48xbf16> {
  ^bb0(%a: tensor<?x48xf32>, %b: tensor<48xf32>, %c: tensor<?x48xf32>):
    %0 = ssm.rms_norm %a, %b : tensor<?x48xf32>, tensor<48xf32> -> tensor<?x48xf32>
    %1 = ssm.mul %0, %c : tensor<?x48xf32>, tensor<?x48xf32>
    %2 = ssm.hadamard %1 {block = 16 : i64} : tensor<?x48xf32> -> tensor<?x48xf32>
    %3 = ssm.neg %2 : tensor<?x48xf32>
    %4 = ssm.cast %3 : tensor<?x48xf32> to tensor<?x48xbf16>
    ssm.yield %4 : tensor<?x48xbf16>
  }
  return %y : tensor<?x48xbf16>
}

// Blocks that fit into a vector are done with it, the rest of a group too.
// CHECK-LABEL: func.func @rotated_small(
// CHECK: math.sqrt
// CHECK: vector.shuffle %{{.+}}, %{{.+}} [1, 0, 3, 2, 5, 4, 7, 6]
// CHECK: vector.shuffle %{{.+}}, %{{.+}} [2, 3, 0, 1, 6, 7, 4, 5]
// CHECK: vector.store %{{.+}} : memref<?x12xf32>, vector<8xf32>
// CHECK: vector.shuffle %{{.+}}, %{{.+}} [1, 0, 3, 2] : vector<4xf32>
// CHECK: vector.shuffle %{{.+}}, %{{.+}} [2, 3, 0, 1] : vector<4xf32>
// CHECK: vector.store %{{.+}} : memref<?x12xf32>, vector<4xf32>
// CHECK-NOT: scf.for
// CHECK: return
func.func @rotated_small(%x: tensor<?x12xf32>, %w: tensor<12xf32>) -> tensor<?x12xf32> {
  %y = ssm.fused ins(%x, %w : tensor<?x12xf32>, tensor<12xf32>) -> tensor<?x12xf32> {
  ^bb0(%a: tensor<?x12xf32>, %b: tensor<12xf32>):
    %0 = ssm.rms_norm %a, %b : tensor<?x12xf32>, tensor<12xf32> -> tensor<?x12xf32>
    %1 = ssm.hadamard %0 {block = 4 : i64} : tensor<?x12xf32> -> tensor<?x12xf32>
    ssm.yield %1 : tensor<?x12xf32>
  }
  return %y : tensor<?x12xf32>
}

// All ids are checked before, and clamped, so that a wrong one reads nothing out
// of bounds.
// CHECK-LABEL: func.func @embedding(
// CHECK-SAME: %[[IDS:.+]]: tensor<?x?xi64>, %[[TABLE:.+]]: tensor<256x24xbf16>)
// CHECK-DAG: %[[IB:.+]] = bufferization.to_buffer %[[IDS]] read_only
// CHECK-DAG: %[[TB:.+]] = bufferization.to_buffer %[[TABLE]] read_only
// CHECK: %[[SIZE:.+]] = arith.constant 256 : i64
// CHECK: scf.for
// CHECK: scf.for
// CHECK: %[[ID:.+]] = memref.load %[[IB]]
// CHECK: %[[BAD:.+]] = arith.cmpi uge, %[[ID]], %[[SIZE]] : i64
// CHECK: scf.if %[[BAD]] {
// CHECK: func.call @corey_rt_bad_index(%[[ID]], %[[SIZE]])
// CHECK: scf.parallel
// CHECK: %[[LOW:.+]] = arith.minsi
// CHECK: %[[ROW:.+]] = arith.maxsi %[[LOW]]
// CHECK: vector.load %[[TB]][%[[ROW]], %{{.+}}]
func.func @embedding(%ids: tensor<?x?xi64>, %t: tensor<256x24xbf16>) -> tensor<?x?x24xbf16> {
  %y = ssm.embedding %ids, %t : tensor<?x?xi64>, tensor<256x24xbf16> -> tensor<?x?x24xbf16>
  return %y : tensor<?x?x24xbf16>
}

// The last row is one less than there are when it runs, if there are any.
// CHECK-LABEL: func.func @gather(
// CHECK-DAG: %[[IB:.+]] = bufferization.to_buffer %arg0 read_only
// CHECK-DAG: %[[TB:.+]] = bufferization.to_buffer %arg1 read_only
// CHECK: %[[ROWS:.+]] = memref.dim %[[TB]]
// CHECK: %[[SIZE:.+]] = arith.index_cast %[[ROWS]] : index to i64
// CHECK: arith.cmpi uge, %{{.+}}, %[[SIZE]] : i64
// CHECK: %[[SOME:.+]] = arith.cmpi ne, %[[ROWS]]
// CHECK: scf.if %[[SOME]] {
// CHECK: %[[LAST:.+]] = arith.subi %[[ROWS]]
// CHECK: scf.parallel
// CHECK: arith.minsi %{{.+}}, %[[LAST]]
func.func @gather(%ids: tensor<?xi32>, %t: tensor<?x24xf32>) -> tensor<?x24xf32> {
  %y = ssm.embedding %ids, %t : tensor<?xi32>, tensor<?x24xf32> -> tensor<?x24xf32>
  return %y : tensor<?x24xf32>
}

// The running best and its index.
// CHECK-LABEL: func.func @argmax(
// CHECK: %[[Y:.+]] = memref.alloc(%{{.+}}) {alignment = 64 : i64} : memref<?xi64>
// CHECK: %[[BEST:.+]]:2 = scf.for {{.*}} -> (f32, index) {
// CHECK: arith.select
// CHECK: %[[ID:.+]] = arith.index_cast %[[BEST]]#1 : index to i64
// CHECK: memref.store %[[ID]], %[[Y]]
func.func @argmax(%x: tensor<?x256xf32>) -> tensor<?xi64> {
  %y = ssm.argmax %x : tensor<?x256xf32> -> tensor<?xi64>
  return %y : tensor<?xi64>
}

// A row at a time by the run-time library, in f32.
// CHECK-LABEL: func.func @sample(
// CHECK: %[[WIDE:.+]] = memref.alloc(%{{.+}}) {alignment = 64 : i64} : memref<?x256xf32>
// CHECK: scf.parallel
// CHECK: arith.extf
// CHECK: scf.parallel
// CHECK: %[[DRAWN:.+]] = func.call @corey_rt_sample(%{{.+}}) : (i64, i64, f32, i32, f32, i64, i64, i64) -> i64
// CHECK: %[[ID:.+]] = arith.trunci %[[DRAWN]] : i64 to i32
// CHECK: memref.store %[[ID]]
// CHECK: memref.dealloc %[[WIDE]]
func.func @sample(%x: tensor<?x256xf16>, %t: tensor<?xf32>, %k: tensor<?xi32>, %p: tensor<?xf32>, %r: tensor<?x3xi64>)
    -> (tensor<?xi32>, tensor<?x3xi64>) {
  %y:2 = ssm.sample %x, %t, %k, %p, %r : tensor<?x256xf16>, tensor<?xf32>, tensor<?xi32>, tensor<?xf32>, tensor<?x3xi64> -> tensor<?xi32>, tensor<?x3xi64>
  return %y#0, %y#1 : tensor<?xi32>, tensor<?x3xi64>
}
