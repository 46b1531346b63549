// RUN: corey-opt %s --corey-outline-equal-loops=min-ops=2 | FileCheck %s
// RUN: corey-opt %s --corey-outline-equal-loops | FileCheck %s --check-prefix=SMALL
// RUN: %if llvm-statistics %{ corey-opt %s --corey-outline-equal-loops=min-ops=2 --mlir-pass-statistics 2>&1 >/dev/null | FileCheck %s --check-prefix=STATISTICS %}

// STATISTICS: (S) 2 num-functions
// STATISTICS: (S) 5 num-outlined

// Small nests are not worth a call.
// SMALL-NOT: call

// Two layers with other weights, and a third of another function: constants go
// into the function, all else is passed in the order of its use.
// CHECK-LABEL: func.func @layers(
// CHECK-SAME: %[[X:.*]]: memref<?xf32>, %[[W0:.*]]: memref<?xf32>, %[[W1:.*]]: memref<?xf32>)
func.func @layers(%x: memref<?xf32>, %w0: memref<?xf32>, %w1: memref<?xf32>) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  // CHECK: %[[N:.*]] = memref.dim %[[X]]
  %n = memref.dim %x, %c0 : memref<?xf32>
  // CHECK-NOT: scf.parallel
  // CHECK: call @[[$SCALE:.*]](%[[N]], %[[X]], %[[W0]])
  scf.parallel (%i) = (%c0) to (%n) step (%c1) {
    %a = memref.load %x[%i] : memref<?xf32>
    %b = memref.load %w0[%i] : memref<?xf32>
    %y = arith.mulf %a, %b : f32
    memref.store %y, %x[%i] : memref<?xf32>
  }
  // CHECK-NEXT: call @[[$SCALE]](%[[N]], %[[X]], %[[W1]])
  scf.parallel (%i) = (%c0) to (%n) step (%c1) {
    %a = memref.load %x[%i] : memref<?xf32>
    %b = memref.load %w1[%i] : memref<?xf32>
    %y = arith.mulf %a, %b : f32
    memref.store %y, %x[%i] : memref<?xf32>
  }
  // It stands alone.
  // CHECK-NEXT: scf.parallel
  scf.parallel (%i) = (%c0) to (%n) step (%c1) {
    %a = memref.load %x[%i] : memref<?xf32>
    %b = memref.load %w1[%i] : memref<?xf32>
    %y = arith.addf %a, %b : f32
    memref.store %y, %x[%i] : memref<?xf32>
  }
  return
}

// The same value twice is one argument.
// CHECK-LABEL: func.func @squares(
func.func @squares(%x: memref<?xf32>, %y: memref<?xf32>, %n: index, %few: i1) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %two = arith.constant 2.0 : f32
  %three = arith.constant 3.0 : f32
  // CHECK: call @[[$SCALE]](%{{.*}}, %{{.*}}, %{{.*}})
  scf.parallel (%i) = (%c0) to (%n) step (%c1) {
    %a = memref.load %x[%i] : memref<?xf32>
    %b = memref.load %y[%i] : memref<?xf32>
    %r = arith.mulf %a, %b : f32
    memref.store %r, %x[%i] : memref<?xf32>
  }
  // CHECK-NEXT: call @[[$BRANCH:.*]](%[[FEW:.*]], %{{.*}}, %{{.*}})
  scf.if %few {
    scf.for %i = %c0 to %n step %c1 {
      memref.store %two, %x[%i] : memref<?xf32>
    }
  }
  // Another constant is another nest.
  // CHECK-NEXT: scf.if
  scf.if %few {
    scf.for %i = %c0 to %n step %c1 {
      memref.store %three, %x[%i] : memref<?xf32>
    }
  }
  // CHECK: call @[[$BRANCH]](%[[FEW]], %{{.*}}, %{{.*}})
  scf.if %few {
    scf.for %i = %c0 to %n step %c1 {
      memref.store %two, %y[%i] : memref<?xf32>
    }
  }
  return
}

// Results stay where they are used.
// CHECK-LABEL: func.func @sums(
// CHECK-NOT: call
func.func @sums(%x: memref<?xf32>, %n: index) -> (f32, f32) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %zero = arith.constant 0.0 : f32
  %a = scf.for %i = %c0 to %n step %c1 iter_args(%s = %zero) -> f32 {
    %v = memref.load %x[%i] : memref<?xf32>
    %t = arith.addf %s, %v : f32
    scf.yield %t : f32
  }
  %b = scf.for %i = %c0 to %n step %c1 iter_args(%s = %zero) -> f32 {
    %v = memref.load %x[%i] : memref<?xf32>
    %t = arith.addf %s, %v : f32
    scf.yield %t : f32
  }
  return %a, %b : f32, f32
}

// CHECK: func.func private @[[$SCALE]](%[[UPPER:.*]]: index, %{{.*}}: memref<?xf32>, %{{.*}}: memref<?xf32>) {
// CHECK-DAG: arith.constant 0 : index
// CHECK-DAG: arith.constant 1 : index
// CHECK: scf.parallel
// CHECK: arith.mulf
// CHECK: func.func private @[[$BRANCH]](
// CHECK: arith.constant 2.0
