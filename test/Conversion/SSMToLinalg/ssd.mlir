// Lowering of ssm.ssd: the recurrence for a few tokens, else the matrix form,
// tile by tile in chunks.

// RUN: corey-opt %s --convert-ssm-to-linalg=vector-bits=256 | FileCheck %s '-D$LANES=8' --check-prefixes=CHECK,AVX2
// RUN: corey-opt %s --convert-ssm-to-linalg=vector-bits=512 | FileCheck %s '-D$LANES=16' --check-prefixes=CHECK,AVX512

// CHECK-LABEL: func.func @ssd(
// CHECK-SAME: %[[K:[a-z0-9]+]]: index)
// CHECK-DAG: %[[Y:.+]] = memref.alloc(%{{.+}}, %{{.+}}) {alignment = 64 : i64} : memref<?x?x8x16xbf16>
// CHECK-DAG: %[[FINAL:.+]] = memref.alloc(%{{.+}}) {alignment = 64 : i64} : memref<?x8x16x16xf32>
// CHECK-DAG: %[[CHUNK:.+]] = arith.maxsi %[[K]], %{{.+}} : index
// CHECK: scf.parallel
// CHECK: %[[FEW:.+]] = arith.cmpi sle, %{{.+}}, %{{.+}} : index
// CHECK: scf.if %[[FEW]] {
// The recurrence: states across the lanes, no chunks.
// CHECK: %[[ROW:.+]] = memref.alloca() {alignment = 64 : i64} : memref<16xf32>
// CHECK-NOT: step %[[CHUNK]]
// CHECK: vector.load %[[ROW]]{{.*}}, vector<[[$LANES]]xf32>
// CHECK: arith.truncf %{{.+}} : f32 to bf16
// CHECK: memref.store %{{.+}}, %[[Y]]
// CHECK: vector.store %{{.+}}, %[[FINAL]]
// CHECK: } else {
// The state of the heads of a work item, transposed.
// CHECK: %[[STATE:.+]] = memref.alloca() {alignment = 64 : i64} : memref<{{[0-9]+}}x16x16xf32>
// CHECK: memref.alloca() {alignment = 64 : i64} : memref<64x64xf32>
// CHECK: scf.for %[[FIRST:.+]] = %{{.+}} to %[[LENGTH:.+]] step %[[CHUNK]] {
// CHECK: %[[END:.+]] = arith.minsi %[[LENGTH]], %{{.+}} : index
// CHECK: scf.for %{{.+}} = %[[FIRST]] to %[[END]] step %{{.+}} {
// C B^T: four rows of two registers with AVX2, which has 16; of four with AVX-512.
// AVX2: %{{.+}}:8 = scf.for {{.*}} -> (vector<8xf32>, {{.*}}) {
// AVX512: %{{.+}}:16 = scf.for {{.*}} -> (vector<16xf32>, {{.*}}) {
// CHECK: math.fma
// Sums of logarithms run in f64.
// CHECK: scf.for {{.*}} iter_args({{.*}}) -> (f64) {
// CHECK: arith.truncf %{{.+}} : f64 to f32
// What a token does not see is masked.
// CHECK: %[[VISIBLE:.+]] = arith.cmpi sle, {{.*}} : vector<[[$LANES]]x
// CHECK: arith.select %[[VISIBLE]], {{.*}} : vector<[[$LANES]]xi1>, vector<[[$LANES]]xf32>
// Outputs and state of the tile.
// CHECK: vector.load %[[STATE]]
// CHECK: vector.store %{{.+}}, %[[Y]]
// CHECK: vector.store %{{.+}}, %[[STATE]]
// CHECK: memref.load %[[STATE]]
// CHECK: memref.store %{{.+}}, %[[FINAL]]
func.func @ssd(%x: tensor<?x?x8x16xbf16>, %dt: tensor<?x?x8xf32>, %a: tensor<8xf32>, %b: tensor<?x?x1x16xf32>, %k: index)
    -> (tensor<?x?x8x16xbf16>, tensor<?x8x16x16xf32>) {
  %y, %s = ssm.ssd %x dt(%dt : tensor<?x?x8xf32>) A(%a : tensor<8xf32>) B(%b) C(%b) chunk_size(%k)
      : tensor<?x?x8x16xbf16>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x8x16xbf16>, tensor<?x8x16x16xf32>
  return %y, %s : tensor<?x?x8x16xbf16>, tensor<?x8x16x16xf32>
}

// The limits of dt, in the recurrence and in the tiles.
// CHECK-LABEL: func.func @limits(
// CHECK: scf.if
// CHECK: arith.constant 2.500000e-01 : f32
// CHECK: arith.constant 4.000000e+00 : f32
// CHECK: } else {
// CHECK: arith.constant dense<2.500000e-01> : vector<[[$LANES]]xf32>
// CHECK: arith.constant dense<4.000000e+00> : vector<[[$LANES]]xf32>
func.func @limits(%x: tensor<?x?x8x16xf32>, %dt: tensor<?x?x8xf32>, %a: tensor<8xf32>, %b: tensor<?x?x1x16xf32>, %k: index)
    -> tensor<?x?x8x16xf32> {
  %y = ssm.ssd %x dt(%dt : tensor<?x?x8xf32>) A(%a : tensor<8xf32>) B(%b) C(%b) chunk_size(%k)
      {dt_limit = array<f64: 0.25, 4.0>}
      : tensor<?x?x8x16xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x8x16xf32>
  return %y : tensor<?x?x8x16xf32>
}

// The discretized form has neither: its steps are 1.
// CHECK-LABEL: func.func @discretized(
// CHECK-SAME: %{{.+}}: tensor<?x?x8x16xf32>, %[[DECAY:.+]]: tensor<?x?x8xf32>, %{{.+}}: tensor<?x?x1x16xf32>
// CHECK: %[[D:.+]] = bufferization.to_buffer %[[DECAY]] read_only
// CHECK: scf.if
// CHECK: memref.load %[[D]]
// CHECK: } else {
// CHECK: memref.load %[[D]]
func.func @discretized(%x: tensor<?x?x8x16xf32>, %decay: tensor<?x?x8xf32>, %b: tensor<?x?x1x16xf32>, %k: index)
    -> tensor<?x?x8x16xf32> {
  %y = ssm.ssd %x decay(%decay : tensor<?x?x8xf32>) B(%b) C(%b) chunk_size(%k)
      : tensor<?x?x8x16xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x8x16xf32>
  return %y : tensor<?x?x8x16xf32>
}

// D per head is one number for the channels of a head, D per channel a vector.
// CHECK-LABEL: func.func @skip(
// CHECK-SAME: %[[DH:[a-z0-9]+]]: tensor<8xf32>, %[[DC:[a-z0-9]+]]: tensor<8x16xf32>
// CHECK: %[[H:.+]] = bufferization.to_buffer %[[DH]] read_only
// CHECK: memref.load %[[H]]
// CHECK: memref.load %[[H]]
// CHECK: %[[C:.+]] = bufferization.to_buffer %[[DC]] read_only
// CHECK: memref.load %[[C]]
// CHECK: vector.load %[[C]]
func.func @skip(%x: tensor<?x?x8x16xf32>, %decay: tensor<?x?x8xf32>, %b: tensor<?x?x1x16xf32>, %h: tensor<8xf32>, %c: tensor<8x16xf32>, %k: index)
    -> (tensor<?x?x8x16xf32>, tensor<?x?x8x16xf32>) {
  %0 = ssm.ssd %x decay(%decay : tensor<?x?x8xf32>) B(%b) C(%b) D(%h : tensor<8xf32>) chunk_size(%k)
      : tensor<?x?x8x16xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x8x16xf32>
  %1 = ssm.ssd %x decay(%decay : tensor<?x?x8xf32>) B(%b) C(%b) D(%c : tensor<8x16xf32>) chunk_size(%k)
      : tensor<?x?x8x16xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x8x16xf32>
  return %0, %1 : tensor<?x?x8x16xf32>, tensor<?x?x8x16xf32>
}
