// RUN: corey-opt %s --split-input-file --corey-outline-repeats=min-ops=2 | FileCheck %s
// RUN: corey-opt %s --split-input-file --corey-outline-repeats | FileCheck %s --check-prefix=SMALL
// RUN: %if llvm-statistics %{ corey-opt %s --split-input-file --corey-outline-repeats=min-ops=3 --mlir-pass-statistics 2>&1 >/dev/null | FileCheck %s --check-prefix=STATISTICS %}

// STATISTICS: (S) 3 num-copies
// STATISTICS: (S) 1 num-functions

// Few ops are not worth a call.
// SMALL-NOT: call @layer

func.func private @launch(index, memref<?xf32>, memref<?xf32>, memref<?xf32>)

// Three layers with weights of their own, where each reads what the one before
// it made; what the last one made is read once more.
// CHECK-LABEL: func.func @model(
// CHECK-SAME: %[[X:.*]]: memref<?xf32>, %[[W0:.*]]: memref<?xf32>, %[[W1:.*]]: memref<?xf32>, %[[W2:.*]]: memref<?xf32>, %[[Y:.*]]: memref<?xf32>)
// CHECK: %[[N:.*]] = memref.dim %[[X]]
// CHECK-NOT: memref.alloc
// CHECK: %[[A:.*]] = call @layer(%[[N]], %[[X]], %[[W0]])
// CHECK: %[[B:.*]] = call @layer(%[[N]], %[[A]], %[[W1]])
// CHECK: %[[C:.*]] = call @layer(%[[N]], %[[B]], %[[W2]])
// CHECK: memref.copy %[[C]], %[[Y]]
// CHECK: func.func private @layer(%[[LN:.*]]: index, %[[LX:.*]]: memref<?xf32>, %[[LW:.*]]: memref<?xf32>) -> memref<?xf32> {
// CHECK: %[[FOUR:.*]] = arith.constant 4 : index
// CHECK: %[[MADE:.*]] = memref.alloc(%[[LN]])
// CHECK: %[[SIZE:.*]] = arith.muli %[[LN]], %[[FOUR]]
// CHECK: call @launch(%[[SIZE]], %[[LX]], %[[LW]], %[[MADE]])
// CHECK: memref.dealloc %[[LX]]
// CHECK: return %[[MADE]]
func.func @model(%x: memref<?xf32>, %w0: memref<?xf32>, %w1: memref<?xf32>, %w2: memref<?xf32>, %y: memref<?xf32>) {
  %c0 = arith.constant 0 : index
  %c4 = arith.constant 4 : index
  %n = memref.dim %x, %c0 : memref<?xf32>
  %a = memref.alloc(%n) : memref<?xf32>
  %s0 = arith.muli %n, %c4 : index
  func.call @launch(%s0, %x, %w0, %a) : (index, memref<?xf32>, memref<?xf32>, memref<?xf32>) -> ()
  memref.dealloc %x : memref<?xf32>
  %b = memref.alloc(%n) : memref<?xf32>
  %s1 = arith.muli %n, %c4 : index
  func.call @launch(%s1, %a, %w1, %b) : (index, memref<?xf32>, memref<?xf32>, memref<?xf32>) -> ()
  memref.dealloc %a : memref<?xf32>
  %c = memref.alloc(%n) : memref<?xf32>
  %s2 = arith.muli %n, %c4 : index
  func.call @launch(%s2, %b, %w2, %c) : (index, memref<?xf32>, memref<?xf32>, memref<?xf32>) -> ()
  memref.dealloc %b : memref<?xf32>
  memref.copy %c, %y : memref<?xf32> to memref<?xf32>
  return
}

// -----

func.func private @use(!llvm.ptr, memref<2xindex>, memref<2xindex>)
llvm.mlir.global internal constant @first("a")
llvm.mlir.global internal constant @second("b")

// Addresses of symbols are passed, and so is memory of the stack that both
// use; that of one alone goes along.
// CHECK-LABEL: func.func @sites(
// CHECK-DAG: %[[FIRST:.*]] = llvm.mlir.addressof @first
// CHECK-DAG: %[[SECOND:.*]] = llvm.mlir.addressof @second
// CHECK-DAG: %[[SHARED:.*]] = memref.alloca() : memref<2xindex>
// CHECK: call @layer(%[[SHARED]], %[[FIRST]])
// CHECK: call @layer(%[[SHARED]], %[[SECOND]])
// CHECK: func.func private @layer(%[[S:.*]]: memref<2xindex>, %[[P:.*]]: !llvm.ptr)
// CHECK: %[[OWN:.*]] = memref.alloca() : memref<2xindex>
// CHECK: memref.store %{{.*}}, %[[S]]
// CHECK: call @use(%[[P]], %[[S]], %[[OWN]])
func.func @sites() {
  %c0 = arith.constant 0 : index
  %p = llvm.mlir.addressof @first : !llvm.ptr
  %q = llvm.mlir.addressof @second : !llvm.ptr
  %shared = memref.alloca() : memref<2xindex>
  %own0 = memref.alloca() : memref<2xindex>
  %own1 = memref.alloca() : memref<2xindex>
  memref.store %c0, %shared[%c0] : memref<2xindex>
  memref.store %c0, %own0[%c0] : memref<2xindex>
  func.call @use(%p, %shared, %own0) : (!llvm.ptr, memref<2xindex>, memref<2xindex>) -> ()
  memref.store %c0, %shared[%c0] : memref<2xindex>
  memref.store %c0, %own1[%c0] : memref<2xindex>
  func.call @use(%q, %shared, %own1) : (!llvm.ptr, memref<2xindex>, memref<2xindex>) -> ()
  return
}

// -----

func.func private @step(index)

// Constants that differ keep copies apart, and there is nothing to gain.
// CHECK-LABEL: func.func @different(
// CHECK-NOT: call @layer
func.func @different() {
  %c1 = arith.constant 1 : index
  %c2 = arith.constant 2 : index
  %c3 = arith.constant 3 : index
  func.call @step(%c1) : (index) -> ()
  func.call @step(%c2) : (index) -> ()
  func.call @step(%c3) : (index) -> ()
  return
}

// -----

func.func private @spread(memref<?xf32>) -> (memref<?xf32>, memref<?xf32>)
func.func private @join(memref<?xf32>, memref<?xf32>) -> memref<?xf32>

// What repeats begins where two values are needed: copies are cut where one is.
// CHECK-LABEL: func.func @cut(
// CHECK: %[[A:.*]] = call @join(
// CHECK-NEXT: %[[B:.*]] = call @layer(%[[A]]) : (memref<?xf32>) -> memref<?xf32>
// CHECK-NEXT: %[[C:.*]] = call @layer(%[[B]])
// CHECK-NEXT: %[[D:.*]] = call @layer(%[[C]])
// CHECK-NEXT: return %[[D]]
// CHECK: func.func private @layer(%[[H:.*]]: memref<?xf32>)
// CHECK-NEXT: %[[S:.*]]:2 = call @spread(%[[H]])
// CHECK-NEXT: %[[J:.*]] = call @join(%[[S]]#0, %[[S]]#1)
// CHECK: return %[[J]]
func.func @cut(%x: memref<?xf32>) -> memref<?xf32> {
  %0 = call @join(%x, %x) : (memref<?xf32>, memref<?xf32>) -> memref<?xf32>
  %1:2 = call @spread(%0) : (memref<?xf32>) -> (memref<?xf32>, memref<?xf32>)
  %2 = call @join(%1#0, %1#1) : (memref<?xf32>, memref<?xf32>) -> memref<?xf32>
  %3:2 = call @spread(%2) : (memref<?xf32>) -> (memref<?xf32>, memref<?xf32>)
  %4 = call @join(%3#0, %3#1) : (memref<?xf32>, memref<?xf32>) -> memref<?xf32>
  %5:2 = call @spread(%4) : (memref<?xf32>) -> (memref<?xf32>, memref<?xf32>)
  %6 = call @join(%5#0, %5#1) : (memref<?xf32>, memref<?xf32>) -> memref<?xf32>
  return %6 : memref<?xf32>
}
