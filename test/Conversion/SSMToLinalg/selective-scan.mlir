// Lowering of ssm.selective_scan: parallel loops over sequences and blocks of
// channels, a loop over chunks, in it one over tiles of tokens with three passes;
// the state goes from tile to tile and from chunk to chunk through scratch memory.

// RUN: corey-opt %s --convert-ssm-to-linalg=vector-bits=256 | FileCheck %s --check-prefixes=CHECK,AVX2
// RUN: corey-opt %s --convert-ssm-to-linalg=vector-bits=512 | FileCheck %s --check-prefixes=CHECK,AVX512,RECURRENCE

// CHECK: func.func private @corey_rt_check_sequence_start(i64, i64, i64, i64)

// CHECK-LABEL: func.func @scan(
// CHECK-SAME: %[[U:[a-z0-9]+]]: tensor<?x?x16xf32>, %[[DELTA:[a-z0-9]+]]: tensor<?x?x16xbf16>
// CHECK-SAME: %[[K:[a-z0-9]+]]: index)
// Inputs are read where they are, outputs are fresh.
// CHECK-DAG: %[[UB:.+]] = bufferization.to_buffer %[[U]] read_only : tensor<?x?x16xf32> to memref<?x?x16xf32, strided<[?, ?, 1], offset: ?>>
// CHECK-DAG: %[[DB:.+]] = bufferization.to_buffer %[[DELTA]] read_only
// CHECK-DAG: %[[Y:.+]] = memref.alloc(%{{.+}}, %{{.+}}) {alignment = 64 : i64} : memref<?x?x16xf32>
// CHECK-DAG: %[[H:.+]] = memref.alloc(%{{.+}}) {alignment = 64 : i64} : memref<?x16x4xf16>
// A chunk is at least 1.
// CHECK-DAG: %[[CHUNK:.+]] = arith.maxsi %[[K]], %{{.+}} : index
// CHECK: scf.parallel
// The rates and the state of a block, states outermost; what tokens of a tile have.
// CHECK: %[[RATE:.+]] = memref.alloca() {alignment = 64 : i64} : memref<4x16xf32>
// CHECK: %[[STATE:.+]] = memref.alloca() {alignment = 64 : i64} : memref<4x16xf32>
// CHECK: %[[DTS:.+]] = memref.alloca() {alignment = 64 : i64} : memref<32x16xf32>
// CHECK: %[[DTUS:.+]] = memref.alloca() {alignment = 64 : i64} : memref<32x16xf32>
// CHECK: %[[SUMS:.+]] = memref.alloca() {alignment = 64 : i64} : memref<32x16xf32>
// CHECK: scf.for %[[FIRST:.+]] = %{{.+}} to %[[LENGTH:.+]] step %[[CHUNK]] {
// CHECK: %[[NEXT:.+]] = arith.addi %[[FIRST]], %[[CHUNK]] : index
// CHECK: %[[END:.+]] = arith.minsi %{{.+}}, %[[NEXT]] : index
// Tiles end with their chunk.
// CHECK: scf.for %[[TILE:.+]] = %[[FIRST]] to %[[END]] step %{{.+}} {
// CHECK: %[[LEFT:.+]] = arith.subi %[[END]], %[[TILE]] : index
// CHECK: %[[COUNT:.+]] = arith.minsi %[[LEFT]], %{{.+}} : index
// Pass 1: dt, dt u and D u. Narrow inputs are widened.
// CHECK: %[[T:.+]] = arith.addi %[[TILE]], %{{.+}} : index
// CHECK: %[[UT:.+]] = vector.load %[[UB]][%{{.+}}, %[[T]], %{{.+}}]
// CHECK: vector.load %[[DB]][%{{.+}}, %[[T]], %{{.+}}]
// CHECK: %[[WIDE:.+]] = arith.extf %{{.+}} : vector<16xbf16> to vector<16xf32>
// One NaN for all.
// CHECK: %[[DT:.+]] = arith.select %{{.+}}, %[[WIDE]], %{{.+}}
// CHECK: vector.store %[[DT]], %[[DTS]]
// CHECK: %[[DTU:.+]] = arith.mulf %[[DT]], %[[UT]]
// CHECK: vector.store %[[DTU]], %[[DTUS]]
// CHECK: vector.store %{{.+}}, %[[SUMS]]
// Pass 2: the recurrence, with the hardware's scale by 2^n or integer arithmetic.
// CHECK: %[[H0:.+]] = vector.load %[[STATE]]
// CHECK: scf.for %{{.+}} = %{{.+}} to %[[COUNT]] step %{{.+}} iter_args(
// AVX512-COUNT-4: llvm.call_intrinsic "llvm.x86.avx512.mask.scalef.ps.512"
// AVX2-NOT: llvm.call_intrinsic
// CHECK: vector.store %{{.+}}, %[[SUMS]]
// CHECK: scf.yield %{{.+}} : vector<16xf32>
// CHECK: vector.store %{{.+}}, %[[STATE]]
// Pass 3: the outputs.
// CHECK: vector.load %[[SUMS]]
// CHECK: vector.store %{{.+}}, %[[Y]][
// The last state is rounded to the type of the result.
// CHECK: arith.truncf %{{.+}} : f32 to f16
// CHECK: memref.store %{{.+}}, %[[H]]
// CHECK-DAG: bufferization.to_tensor %[[Y]] restrict
// CHECK-DAG: bufferization.to_tensor %[[H]] restrict
func.func @scan(%u: tensor<?x?x16xf32>, %delta: tensor<?x?x16xbf16>, %a: tensor<16x4xf32>,
    %b: tensor<?x?x1x4xf32>, %d: tensor<16xf32>, %h0: tensor<?x16x4xf16>, %k: index) -> (tensor<?x?x16xf32>, tensor<?x16x4xf16>) {
  %y, %h = ssm.selective_scan %u, %delta, %a, %b, %b D(%d : tensor<16xf32>) initial_state(%h0 : tensor<?x16x4xf16>) chunk_size(%k)
      : tensor<?x?x16xf32>, tensor<?x?x16xbf16>, tensor<16x4xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32>
      -> tensor<?x?x16xf32>, tensor<?x16x4xf16>
  return %y, %h : tensor<?x?x16xf32>, tensor<?x16x4xf16>
}

// The recurrence of a state, and the output with its skip: one state is enough.
// RECURRENCE-LABEL: func.func @one_state(
// RECURRENCE: %[[RATES:.+]] = memref.alloca() {alignment = 64 : i64} : memref<1x16xf32>
// RECURRENCE: %[[STATES:.+]] = memref.alloca() {alignment = 64 : i64} : memref<1x16xf32>
// RECURRENCE: %[[DTS:.+]] = memref.alloca() {alignment = 64 : i64} : memref<32x16xf32>
// RECURRENCE: %[[DTUS:.+]] = memref.alloca() {alignment = 64 : i64} : memref<32x16xf32>
// RECURRENCE: %[[SUMS:.+]] = memref.alloca() {alignment = 64 : i64} : memref<32x16xf32>
// RECURRENCE: %[[SKIP:.+]] = vector.load {{.*}} : memref<16xf32
// RECURRENCE: %[[DTU:.+]] = arith.mulf %[[DT:.+]], %[[U:.+]] fastmath<contract>
// RECURRENCE: vector.store %[[DTU]], %[[DTUS]]
// RECURRENCE: %[[DU:.+]] = arith.mulf %[[SKIP]], %[[U]]
// RECURRENCE: vector.store %[[DU]], %[[SUMS]]
// RECURRENCE: %[[RATE:.+]] = vector.load %[[RATES]]
// RECURRENCE: scf.for %{{.+}} = {{.*}} iter_args(%[[H:[a-z0-9]+]] =
// RECURRENCE: %[[DT2:.+]] = vector.load %[[DTS]]
// RECURRENCE: %[[DTU2:.+]] = vector.load %[[DTUS]]
// RECURRENCE: %[[SUM:.+]] = vector.load %[[SUMS]]
// RECURRENCE: %[[RATED:.+]] = arith.mulf %[[DT2]], %[[RATE]]
// RECURRENCE: %[[DECAY:.+]] = llvm.call_intrinsic
// RECURRENCE-DAG: %[[B:.+]] = vector.broadcast
// RECURRENCE-DAG: %[[C:.+]] = vector.broadcast
// RECURRENCE: %[[IN:.+]] = arith.mulf %[[DTU2]], %[[B]]
// RECURRENCE: %[[NEXT:.+]] = math.fma %[[DECAY]], %[[H]], %[[IN]]
// RECURRENCE: %[[OUT:.+]] = math.fma %[[C]], %[[NEXT]], %[[SUM]]
// RECURRENCE: vector.store %[[OUT]], %[[SUMS]]
// RECURRENCE: scf.yield %[[NEXT]]
func.func @one_state(%u: tensor<?x?x16xf32>, %a: tensor<16x1xf32>, %b: tensor<?x?x1x1xf32>, %c: tensor<?x?x1x1xf32>,
    %d: tensor<16xf32>, %k: index) -> tensor<?x?x16xf32> {
  %y = ssm.selective_scan %u, %u, %a, %b, %c D(%d : tensor<16xf32>) chunk_size(%k)
      : tensor<?x?x16xf32>, tensor<?x?x16xf32>, tensor<16x1xf32>, tensor<?x?x1x1xf32>, tensor<?x?x1x1xf32> -> tensor<?x?x16xf32>
  return %y : tensor<?x?x16xf32>
}

// A constant chunk is a constant; without one the chunk is the length.
// CHECK-LABEL: func.func @chunks(
// CHECK: %[[CHUNK:.+]] = arith.constant 24 : index
// CHECK: scf.for %{{.+}} = %{{.+}} to %{{.+}} step %[[CHUNK]] {
// CHECK: %[[LENGTH:.+]] = arith.maxsi %{{.+}}, %{{.+}} : index
// CHECK: scf.for %{{.+}} = %{{.+}} to %{{.+}} step %[[LENGTH]] {
func.func @chunks(%u: tensor<?x?x16xf32>, %a: tensor<16x4xf32>, %b: tensor<?x?x1x4xf32>) -> (tensor<?x?x16xf32>, tensor<?x?x16xf32>) {
  %0 = ssm.selective_scan %u, %u, %a, %b, %b {chunk = #ssm.chunk<static = 24>}
      : tensor<?x?x16xf32>, tensor<?x?x16xf32>, tensor<16x4xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x16xf32>
  %1 = ssm.selective_scan %u, %u, %a, %b, %b
      : tensor<?x?x16xf32>, tensor<?x?x16xf32>, tensor<16x4xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x16xf32>
  return %0, %1 : tensor<?x?x16xf32>, tensor<?x?x16xf32>
}

// Many states take as many passes over the tile, in a loop.
// CHECK-LABEL: func.func @many_states(
// CHECK: %[[STATE:.+]] = memref.alloca() {alignment = 64 : i64} : memref<64x16xf32>
// AVX2: %[[TOGETHER:.+]] = arith.constant 1 : index
// AVX512: %[[TOGETHER:.+]] = arith.constant 4 : index
// CHECK: scf.for %[[N:.+]] = %{{.+}} to %{{.+}} step %[[TOGETHER]] {
// CHECK: vector.load
// CHECK: scf.for %{{.+}} = %{{.+}} to %{{.+}} step %{{.+}} iter_args(
func.func @many_states(%u: tensor<?x?x16xf32>, %a: tensor<16x64xf32>, %b: tensor<?x?x1x64xf32>, %k: index) -> tensor<?x?x16xf32> {
  %y = ssm.selective_scan %u, %u, %a, %b, %b chunk_size(%k)
      : tensor<?x?x16xf32>, tensor<?x?x16xf32>, tensor<16x64xf32>, tensor<?x?x1x64xf32>, tensor<?x?x1x64xf32> -> tensor<?x?x16xf32>
  return %y : tensor<?x?x16xf32>
}

// Channels that are no multiple of the lanes leave a narrower rest: 20 channels
// are 16 and 4.
// CHECK-LABEL: func.func @rest(
// CHECK: vector.store {{.*}} : memref<?x?x20xf32>, vector<{{8|16}}xf32>
// CHECK: vector.store {{.*}} : memref<?x?x20xf32>, vector<4xf32>
// CHECK: return
func.func @rest(%u: tensor<?x?x20xf32>, %a: tensor<20x4xf32>, %b: tensor<?x?x1x4xf32>, %k: index) -> tensor<?x?x20xf32> {
  %y = ssm.selective_scan %u, %u, %a, %b, %b chunk_size(%k)
      : tensor<?x?x20xf32>, tensor<?x?x20xf32>, tensor<20x4xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x20xf32>
  return %y : tensor<?x?x20xf32>
}

// Packed sequences: the starts are checked, and clamped to the length, so that a
// wrong one reads nothing out of bounds.
// CHECK-LABEL: func.func @packed(
// CHECK-SAME: %{{.+}}: tensor<1x?x16xf32>, %{{.+}}: tensor<16x4xf32>, %{{.+}}: tensor<1x?x1x4xf32>, %[[S:.+]]: tensor<?xi32>
// CHECK-DAG: %[[STARTS:.+]] = bufferization.to_buffer %[[S]] read_only
// CHECK: scf.for
// CHECK: func.call @corey_rt_check_sequence_start(
// CHECK: scf.parallel
// CHECK: memref.load %[[STARTS]]
// CHECK: arith.minsi
// CHECK: arith.maxsi
func.func @packed(%u: tensor<1x?x16xf32>, %a: tensor<16x4xf32>, %b: tensor<1x?x1x4xf32>, %starts: tensor<?xi32>, %k: index)
    -> tensor<1x?x16xf32> {
  %y = ssm.selective_scan %u, %u, %a, %b, %b seq_starts(%starts : tensor<?xi32>) chunk_size(%k)
      : tensor<1x?x16xf32>, tensor<1x?x16xf32>, tensor<16x4xf32>, tensor<1x?x1x4xf32>, tensor<1x?x1x4xf32> -> tensor<1x?x16xf32>
  return %y : tensor<1x?x16xf32>
}
