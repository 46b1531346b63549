// Lowering of ssm.selective_scan: parallel loops over sequences and blocks of
// channels, a loop over chunks, in it one over tokens that carries the states,
// which go from chunk to chunk through scratch memory.

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
// The rates and the state of a block, states outermost.
// CHECK: %[[RATE:.+]] = memref.alloca() {alignment = 64 : i64} : memref<4x[[LANES:[0-9]+]]xf32>
// CHECK: %[[STATE:.+]] = memref.alloca() {alignment = 64 : i64} : memref<4x[[LANES]]xf32>
// CHECK: scf.for %[[FIRST:.+]] = %{{.+}} to %[[LENGTH:.+]] step %[[CHUNK]] {
// CHECK: %[[SUM:.+]] = arith.addi %[[FIRST]], %[[CHUNK]] : index
// CHECK: %[[END:.+]] = arith.minsi %{{.+}}, %{{.+}} : index
// States enter the chunk in registers ...
// CHECK-COUNT-4: vector.load %[[STATE]][{{.*}}] : memref<4x[[LANES]]xf32>, vector<[[LANES]]xf32>
// CHECK: %[[OUT:.+]]:4 = scf.for %[[T:.+]] = %[[FIRST]] to %[[END]] step %{{.+}} iter_args(%[[H0:[a-z0-9]+]] =
// CHECK: %[[UT:.+]] = vector.load %[[UB]][%{{.+}}, %[[T]], %{{.+}}]
// Narrow inputs are widened.
// CHECK: vector.load %[[DB]][%{{.+}}, %[[T]], %{{.+}}]
// CHECK: %[[DT:.+]] = arith.extf %{{.+}} : vector<[[LANES]]xbf16> to vector<[[LANES]]xf32>
// CHECK: %[[DTU:.+]] = arith.mulf %[[DT]], %[[UT]]
// CHECK: vector.load %[[RATE]]
// The decay of every state: the hardware's scale by 2^n, or integer arithmetic.
// AVX512-COUNT-4: llvm.call_intrinsic "llvm.x86.avx512.mask.scalef.ps.512"
// AVX2-NOT: llvm.call_intrinsic
// CHECK: vector.store %[[YT:.+]], %[[Y]][%{{.+}}, %[[T]], %{{.+}}]
// CHECK: scf.yield %{{.+}}, %{{.+}}, %{{.+}}, %{{.+}} : vector<[[LANES]]xf32>
// ... and leave it for the next.
// CHECK: vector.store %[[OUT]]#0, %[[STATE]]
// CHECK: vector.store %[[OUT]]#3, %[[STATE]]
// The last state is rounded to the type of the result.
// CHECK: arith.truncf %{{.+}} : f32 to f16
// CHECK: memref.store %{{.+}}, %[[H]]
// CHECK-DAG: bufferization.to_tensor %[[Y]] restrict writable
// CHECK-DAG: bufferization.to_tensor %[[H]] restrict writable
func.func @scan(%u: tensor<?x?x16xf32>, %delta: tensor<?x?x16xbf16>, %a: tensor<16x4xf32>,
    %b: tensor<?x?x1x4xf32>, %d: tensor<16xf32>, %h0: tensor<?x16x4xf16>, %k: index) -> (tensor<?x?x16xf32>, tensor<?x16x4xf16>) {
  %y, %h = ssm.selective_scan %u, %delta, %a, %b, %b D(%d : tensor<16xf32>) initial_state(%h0 : tensor<?x16x4xf16>) chunk_size(%k)
      : tensor<?x?x16xf32>, tensor<?x?x16xbf16>, tensor<16x4xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32>
      -> tensor<?x?x16xf32>, tensor<?x16x4xf16>
  return %y, %h : tensor<?x?x16xf32>, tensor<?x16x4xf16>
}

// The recurrence of a state, and the output with its skip: one state is enough.
// RECURRENCE-LABEL: func.func @one_state(
// RECURRENCE: %[[SKIP:.+]] = vector.load {{.*}} : memref<16xf32
// RECURRENCE: scf.for %[[T:[a-z0-9]+]] = {{.*}} iter_args(%[[H:[a-z0-9]+]] =
// RECURRENCE: %[[DTU:.+]] = arith.mulf %[[DT:.+]], %[[U:.+]] fastmath<contract>
// RECURRENCE: %[[RATE:.+]] = vector.load {{.*}} : memref<1x16xf32>
// RECURRENCE: %[[RATED:.+]] = arith.mulf %[[DT]], %[[RATE]]
// RECURRENCE: %[[DECAY:.+]] = llvm.call_intrinsic
// RECURRENCE-DAG: %[[B:.+]] = vector.broadcast
// RECURRENCE-DAG: %[[C:.+]] = vector.broadcast
// RECURRENCE: %[[IN:.+]] = arith.mulf %[[DTU]], %[[B]]
// RECURRENCE: %[[NEXT:.+]] = math.fma %[[DECAY]], %[[H]], %[[IN]]
// RECURRENCE: %[[OUT:.+]] = math.fma %[[C]], %[[NEXT]], %{{.+}}
// RECURRENCE: %[[SUM:.+]] = arith.addf %[[OUT]], %{{.+}}
// RECURRENCE: %[[Y:.+]] = math.fma %[[SKIP]], %[[U]], %[[SUM]]
// RECURRENCE: vector.store %[[Y]]
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

// Many states do not fit the registers: they stay in the scratch, which every
// token reads and writes.
// CHECK-LABEL: func.func @many_states(
// CHECK: memref.alloca() {alignment = 64 : i64} : memref<64x{{.+}}xf32>
// CHECK: %[[STATE:.+]] = memref.alloca() {alignment = 64 : i64} : memref<64x{{.+}}xf32>
// CHECK: scf.for %[[FIRST:.+]] = %{{.+}} to %{{.+}} step %{{.+}} {
// CHECK-NOT: iter_args
// CHECK: scf.for %[[T:.+]] = %[[FIRST]] to
// CHECK: scf.for %{{.+}} = %{{.+}} to %{{.+}} step %{{.+}} iter_args(
// CHECK: vector.load %[[STATE]]
// CHECK: vector.store %{{.+}}, %[[STATE]]
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
