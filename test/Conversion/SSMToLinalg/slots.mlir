// States in slots of a pool: bad slots are reported, the pool is copied unless
// the caller gave one memory for both, and sequences with a slot read and write
// it where it is to be left.

// RUN: corey-opt %s --split-input-file --convert-ssm-to-linalg --canonicalize | FileCheck %s
// RUN: corey-opt %s --split-input-file --corey-cpu-pipeline -o /dev/null

// CHECK-LABEL: func.func @conv(
// CHECK-DAG: %[[POOL:.+]] = bufferization.to_buffer %arg3 read_only
// CHECK-DAG: %[[NEXT:.+]] = memref.alloc(%{{.+}}) {{.*}} : memref<?x2x16xf32>
// CHECK: scf.for
// CHECK: arith.cmpi sge
// CHECK: func.call @corey_rt_bad_slot
// CHECK: %[[APART:.+]] = arith.cmpi ne
// CHECK: scf.if %[[APART]] {
// CHECK-NEXT: memref.copy %[[POOL]], %[[NEXT]]
// CHECK: scf.parallel
// CHECK: %[[SLOT:.+]] = arith.index_cast %{{.+}} : i32 to index
// CHECK: %[[THERE:.+]] = arith.cmpi ult, %[[SLOT]]
// CHECK: scf.if %[[THERE]] -> (vector<8xf32>, vector<8xf32>) {
// CHECK-NEXT: vector.load %[[NEXT]][%[[SLOT]], %c0
// CHECK-NEXT: vector.load %[[NEXT]][%[[SLOT]], %c1
// CHECK: scf.if %[[THERE]] {
// CHECK-NEXT: vector.store %{{.+}}, %[[NEXT]][%[[SLOT]], %c0
// CHECK-NEXT: vector.store %{{.+}}, %[[NEXT]][%[[SLOT]], %c1
func.func @conv(%x: tensor<?x?x16xf32>, %w: tensor<16x3xf32>, %slots: tensor<?xi32>, %pool: tensor<?x2x16xf32>)
    -> (tensor<?x?x16xf32>, tensor<?x2x16xf32>) {
  %y, %next = ssm.causal_conv %x, %w initial_state(%pool : tensor<?x2x16xf32>) slots(%slots : tensor<?xi32>)
      : tensor<?x?x16xf32>, tensor<16x3xf32> -> tensor<?x?x16xf32>, tensor<?x2x16xf32>
  return %y, %next : tensor<?x?x16xf32>, tensor<?x2x16xf32>
}

// -----

// Only read from: nothing is copied.
// CHECK-LABEL: func.func @reads_only(
// CHECK: call @corey_rt_bad_slot
// CHECK-NOT: memref.copy
// CHECK: scf.parallel
// CHECK: arith.cmpi ult
// CHECK: scf.if %{{.+}} -> (f32)
func.func @reads_only(%u: tensor<?x?x8xf32>, %a: tensor<8x4xf32>, %b: tensor<?x?x1x4xf32>, %pool: tensor<?x8x4xf32>,
                      %slots: tensor<?xi32>) -> tensor<?x?x8xf32> {
  %y = ssm.selective_scan %u, %u, %a, %b, %b initial_state(%pool : tensor<?x8x4xf32>) slots(%slots : tensor<?xi32>)
      : tensor<?x?x8xf32>, tensor<?x?x8xf32>, tensor<8x4xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x8xf32>
  return %y : tensor<?x?x8xf32>
}

// -----

// Of few tokens and of many.
// CHECK-LABEL: func.func @ssd(
// CHECK: memref.copy
// CHECK: scf.parallel
// CHECK: arith.cmpi ult
// CHECK-COUNT-2: scf.if %{{.+}} -> ({{.*}}f32>)
// CHECK: scf.if %{{.+}} -> (f32)
func.func @ssd(%x: tensor<?x?x2x8xf32>, %d: tensor<?x?x2xf32>, %b: tensor<?x?x1x12xf32>, %pool: tensor<?x2x8x12xf32>,
               %slots: tensor<?xi32>) -> (tensor<?x?x2x8xf32>, tensor<?x2x8x12xf32>) {
  %y, %next = ssm.ssd %x decay(%d : tensor<?x?x2xf32>) B(%b) C(%b) initial_states(%pool : tensor<?x2x8x12xf32>)
      slots(%slots : tensor<?xi32>) : tensor<?x?x2x8xf32>, tensor<?x?x1x12xf32>, tensor<?x?x1x12xf32>
      -> tensor<?x?x2x8xf32>, tensor<?x2x8x12xf32>
  return %y, %next : tensor<?x?x2x8xf32>, tensor<?x2x8x12xf32>
}
