// Lowering of ssm.quantize and ssm.dequantize: the largest magnitude of what
// shares a scale, the scale, the rounded quotients.

// RUN: corey-opt %s --convert-ssm-to-linalg=vector-bits=256 | FileCheck %s

// A scale per row: rows in parallel.
// CHECK-LABEL: func.func @token(
// CHECK-SAME: %[[X:.+]]: tensor<?x8xf32>)
// CHECK: %[[XB:.+]] = bufferization.to_buffer %[[X]] read_only
// CHECK: %[[Q:.+]] = memref.alloc(%{{.+}}) {alignment = 64 : i64} : memref<?x8xi8>
// CHECK: %[[S:.+]] = memref.alloc(%{{.+}}) {alignment = 64 : i64} : memref<?xf32>
// CHECK: scf.parallel (%[[R:.+]]) =
// CHECK: %[[BEST:.+]] = scf.for {{.*}} -> (f32) {
// CHECK: %[[V:.+]] = memref.load %[[XB]][%[[R]], %{{.+}}]
// CHECK: %[[A:.+]] = math.absf %[[V]]
// CHECK: arith.cmpf ogt, %[[A]]
// A row of zeros has the scale 1.
// CHECK: %[[ZERO:.+]] = arith.cmpf oeq, %[[BEST]]
// CHECK: arith.constant 1.270000e+02 : f32
// CHECK: %[[SCALE:.+]] = arith.divf %[[BEST]]
// CHECK: arith.select %[[ZERO]], %{{.+}}, %[[SCALE]]
// CHECK: memref.store %{{.+}}, %[[S]][%[[R]]]
// CHECK: scf.parallel (%[[R2:.+]]) =
// CHECK: memref.load %[[S]][%[[R2]]]
// Limited, NaN to 0, to nearest even.
// CHECK: arith.cmpf olt
// CHECK: arith.cmpf ogt
// CHECK: arith.cmpf ord
// CHECK: math.roundeven
// CHECK: arith.fptosi %{{.+}} : f32 to i8
// CHECK: memref.store %{{.+}}, %[[Q]]
func.func @token(%x: tensor<?x8xf32>) -> (tensor<?x8xi8>, tensor<?xf32>) {
  %q, %s = ssm.quantize %x token : tensor<?x8xf32> -> tensor<?x8xi8>, tensor<?xf32>
  return %q, %s : tensor<?x8xi8>, tensor<?xf32>
}

// One scale for all, f8E4M3FN: 448, and NaN is left to the conversion.
// CHECK-LABEL: func.func @tensor(
// CHECK: %[[S:.+]] = memref.alloc() {alignment = 64 : i64} : memref<f32>
// CHECK: memref.store %{{.+}}, %[[S]][] : memref<f32>
// CHECK: memref.load %[[S]][] : memref<f32>
// CHECK: arith.constant 4.480000e+02 : f32
// CHECK-NOT: arith.cmpf ord
// CHECK: arith.truncf %{{.+}} : f32 to f8E4M3FN
func.func @tensor(%x: tensor<?x8xbf16>) -> (tensor<?x8xf8E4M3FN>, tensor<f32>) {
  %q, %s = ssm.quantize %x tensor : tensor<?x8xbf16> -> tensor<?x8xf8E4M3FN>, tensor<f32>
  return %q, %s : tensor<?x8xf8E4M3FN>, tensor<f32>
}

// CHECK-LABEL: func.func @channel(
// CHECK: %[[S:.+]] = memref.alloc() {alignment = 64 : i64} : memref<8xf32>
// CHECK: memref.store %{{.+}}, %[[S]][%{{.+}}] : memref<8xf32>
// CHECK: scf.parallel
// CHECK: scf.for %[[D:[a-z0-9]+]] =
// CHECK: memref.load %[[S]][%[[D]]] : memref<8xf32>
func.func @channel(%x: tensor<?x8xf32>) -> (tensor<?x8xi8>, tensor<8xf32>) {
  %q, %s = ssm.quantize %x channel : tensor<?x8xf32> -> tensor<?x8xi8>, tensor<8xf32>
  return %q, %s : tensor<?x8xi8>, tensor<8xf32>
}

// CHECK-LABEL: func.func @dequantize(
// CHECK-SAME: %[[Q:.+]]: tensor<?x8xi8>, %[[S:.+]]: tensor<?xf32>)
// CHECK: %[[QB:.+]] = bufferization.to_buffer %[[Q]] read_only
// CHECK: %[[SB:.+]] = bufferization.to_buffer %[[S]] read_only
// CHECK: scf.parallel (%[[R:.+]]) =
// CHECK: %[[F:.+]] = memref.load %[[SB]][%[[R]]]
// CHECK: %[[V:.+]] = memref.load %[[QB]][%[[R]], %{{.+}}]
// CHECK: %[[W:.+]] = arith.sitofp %[[V]] : i8 to f32
// CHECK: %[[P:.+]] = arith.mulf %[[W]], %[[F]]
// CHECK: arith.truncf %[[P]] : f32 to bf16
func.func @dequantize(%q: tensor<?x8xi8>, %s: tensor<?xf32>) -> tensor<?x8xbf16> {
  %x = ssm.dequantize %q, %s token : tensor<?x8xi8>, tensor<?xf32> -> tensor<?x8xbf16>
  return %x : tensor<?x8xbf16>
}
