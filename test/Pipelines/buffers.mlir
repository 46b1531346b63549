// The passes of the CPU pipeline on buffers, one by one.

// RUN: split-file %s %t
// RUN: corey-opt %t/bufferize.mlir --corey-bufferize | FileCheck %t/bufferize.mlir
// RUN: corey-opt %t/deallocate.mlir --corey-insert-deallocations | FileCheck %t/deallocate.mlir
// RUN: %if llvm-statistics %{ corey-opt %t/deallocate.mlir --corey-insert-deallocations --mlir-pass-statistics 2>&1 >/dev/null | FileCheck %t/deallocate.mlir --check-prefix=STATISTICS %}
// RUN: corey-opt %t/serialize.mlir --corey-serialize-inner-loops | FileCheck %t/serialize.mlir
// RUN: corey-opt %t/guard.mlir --corey-guard-parallel-regions | FileCheck %t/guard.mlir
// RUN: corey-opt %t/runtime.mlir --corey-runtime-allocation | FileCheck %t/runtime.mlir

//--- bufferize.mlir

// Arguments have free strides but for the innermost, results are trailing
// arguments. A fresh result is written in place ...
// CHECK-LABEL: func.func @fresh(
// CHECK-SAME: %[[X:.+]]: memref<?x8xf32, strided<[?, 1], offset: ?>>, %[[N:.+]]: index, %[[OUT:.+]]: memref<?x8xf32> {test.result})
// CHECK-SAME: attributes {llvm.emit_c_interface} {
// CHECK-NOT: memref.alloc
// CHECK-NOT: memref.copy
// CHECK: linalg.exp ins(%[[X]] : {{.*}}) outs(%[[OUT]] : memref<?x8xf32>)
// CHECK-NOT: linalg.generic
// CHECK: return{{$}}
func.func @fresh(%x: tensor<?x8xf32>, %n: index) -> (tensor<?x8xf32> {test.result}) {
  %e = tensor.empty(%n) : tensor<?x8xf32>
  %0 = linalg.exp ins(%x : tensor<?x8xf32>) outs(%e : tensor<?x8xf32>) -> tensor<?x8xf32>
  return %0 : tensor<?x8xf32>
}

// ... while an argument, a constant and a second copy of a result are copied, by
// loops like any other.
// CHECK-LABEL: func.func @copies(
// CHECK-SAME: %[[X:[a-z0-9]+]]: memref<8xf32, strided<[1], offset: ?>>, %[[O0:[a-z0-9]+]]: memref<8xf32>, %[[O1:[a-z0-9]+]]: memref<8xf32>, %[[O2:[a-z0-9]+]]: memref<8xf32>, %[[O3:[a-z0-9]+]]: memref<8xf32>)
// CHECK: linalg.exp ins(%[[X]] : {{.*}}) outs(%[[O2]] : memref<8xf32>)
// CHECK-NOT: memref.copy
// CHECK-DAG: linalg.generic {{.*}} ins(%[[X]] : {{.*}}) outs(%[[O0]] : memref<8xf32>)
// CHECK-DAG: linalg.generic {{.*}} outs(%[[O1]] : memref<8xf32>)
// CHECK-DAG: linalg.generic {{.*}} ins(%[[O2]] : {{.*}}) outs(%[[O3]] : memref<8xf32>)
// CHECK-NOT: memref.copy
// CHECK: return{{$}}
func.func @copies(%x: tensor<8xf32>) -> (tensor<8xf32>, tensor<8xf32>, tensor<8xf32>, tensor<8xf32>) {
  %c = arith.constant dense<1.0> : tensor<8xf32>
  %e = tensor.empty() : tensor<8xf32>
  %0 = linalg.exp ins(%x : tensor<8xf32>) outs(%e : tensor<8xf32>) -> tensor<8xf32>
  return %x, %c, %0, %0 : tensor<8xf32>, tensor<8xf32>, tensor<8xf32>, tensor<8xf32>
}

// An argument is never written: an op on top of it gets a copy.
// CHECK-LABEL: func.func @read_only(
// CHECK-SAME: %[[X:.+]]: memref<8xf32, strided<[1], offset: ?>>, %[[OUT:.+]]: memref<8xf32>)
// CHECK-NOT: outs(%[[X]]
// CHECK: linalg.exp
// CHECK-NOT: outs(%[[X]]
// CHECK: return{{$}}
func.func @read_only(%x: tensor<8xf32>) -> tensor<8xf32> {
  %0 = linalg.exp ins(%x : tensor<8xf32>) outs(%x : tensor<8xf32>) -> tensor<8xf32>
  return %0 : tensor<8xf32>
}

// An argument that may have any strides keeps them; who wants more gets a copy.
// CHECK-LABEL: func.func @any_strides(
// CHECK-SAME: %[[X:.+]]: memref<?x8xf32, strided<[?, ?], offset: ?>> {ssm.any_strides}, %[[I:.+]]: index) -> (f32, vector<4xf32>)
// CHECK: %[[COPY:.+]] = memref.alloc
// CHECK: linalg.generic {{.*}} ins(%[[X]] :
// CHECK: memref.load %[[X]][%[[I]], %[[I]]]
// CHECK: vector.load
// CHECK: return
func.func @any_strides(%x: tensor<?x8xf32> {ssm.any_strides}, %i: index) -> (f32, vector<4xf32>) {
  %any = bufferization.to_buffer %x read_only : tensor<?x8xf32> to memref<?x8xf32, strided<[?, ?], offset: ?>>
  %rows = bufferization.to_buffer %x read_only : tensor<?x8xf32> to memref<?x8xf32, strided<[?, 1], offset: ?>>
  %0 = memref.load %any[%i, %i] : memref<?x8xf32, strided<[?, ?], offset: ?>>
  %1 = vector.load %rows[%i, %i] : memref<?x8xf32, strided<[?, 1], offset: ?>>, vector<4xf32>
  return %0, %1 : f32, vector<4xf32>
}

// Functions of several blocks, one of which returns.
// CHECK-LABEL: func.func private @branches(
// CHECK: cf.br
// CHECK: return %{{.+}} : memref<4xf32
func.func private @branches(%x: tensor<4xf32>) -> tensor<4xf32> {
  cf.br ^end
^end:
  return %x : tensor<4xf32>
}

// Scalars are returned as before; tensors without axes have no strides.
// CHECK-LABEL: func.func @scalars(
// CHECK-SAME: %[[X:.+]]: memref<f32, strided<[], offset: ?>>, %[[N:.+]]: index, %[[OUT:.+]]: memref<f32>) -> index
// CHECK: return %[[N]] : index
func.func @scalars(%x: tensor<f32>, %n: index) -> (index, tensor<f32>) {
  return %n, %x : index, tensor<f32>
}

// Private functions keep their results and have no C interface.
// CHECK-LABEL: func.func private @private(
// CHECK-SAME: -> memref<8xf32, {{.*}}> {
func.func private @private(%x: tensor<8xf32>) -> tensor<8xf32> {
  return %x : tensor<8xf32>
}

//--- deallocate.mlir

// STATISTICS: InsertDeallocations
// STATISTICS-NEXT: (S) 5 num-deallocations

// Freed after the last use, a use of a view being one.
// CHECK-LABEL: func.func @views(
// CHECK: %[[A:.+]] = memref.alloc(
// CHECK: memref.store %{{.+}}, %[[A]]
// CHECK-NEXT: memref.load %{{.+}}
// CHECK-NEXT: memref.dealloc %[[A]]
// CHECK-NEXT: arith.addf
func.func @views(%n: index, %x: f32) -> f32 {
  %c0 = arith.constant 0 : index
  %a = memref.alloc(%n) : memref<?xf32>
  %v = memref.subview %a[0] [%n] [1] : memref<?xf32> to memref<?xf32, strided<[1]>>
  memref.store %x, %a[%c0] : memref<?xf32>
  %y = memref.load %v[%c0] : memref<?xf32, strided<[1]>>
  %z = arith.addf %y, %y : f32
  return %z : f32
}

// Inside its block, and after a whole loop that uses it.
// CHECK-LABEL: func.func @loops(
// CHECK: %[[A:.+]] = memref.alloc() : memref<8xf32>
// CHECK: scf.for
// CHECK: %[[B:.+]] = memref.alloc() : memref<4xf32>
// CHECK: memref.store %{{.+}}, %[[B]]
// CHECK-NEXT: memref.dealloc %[[B]]
// CHECK: memref.store %{{.+}}, %[[A]]
// CHECK-NOT: memref.dealloc
// CHECK: }
// CHECK-NEXT: memref.dealloc %[[A]]
func.func @loops(%n: index, %x: f32) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %a = memref.alloc() : memref<8xf32>
  scf.for %i = %c0 to %n step %c1 {
    %b = memref.alloc() : memref<4xf32>
    memref.store %x, %b[%c0] : memref<4xf32>
    memref.store %x, %a[%i] : memref<8xf32>
  }
  return
}

// What a region yields lives on as the result of its op.
// CHECK-LABEL: func.func @yielded(
// CHECK: %[[A:.+]] = memref.alloc() : memref<8xf32>
// CHECK: %[[R:.+]] = scf.if
// CHECK-NOT: memref.dealloc
// CHECK: memref.load %[[R]]
// CHECK-NEXT: memref.dealloc %[[A]]
func.func @yielded(%c: i1, %y: memref<8xf32>) -> f32 {
  %c0 = arith.constant 0 : index
  %a = memref.alloc() : memref<8xf32>
  %r = scf.if %c -> memref<8xf32> {
    scf.yield %a : memref<8xf32>
  } else {
    scf.yield %y : memref<8xf32>
  }
  %x = memref.load %r[%c0] : memref<8xf32>
  return %x : f32
}

// Nobody's memory goes at once; what is freed already is left alone.
// CHECK-LABEL: func.func @others(
// CHECK: %[[A:.+]] = memref.alloc() : memref<8xf32>
// CHECK-NEXT: memref.dealloc %[[A]]
// CHECK-NEXT: %[[B:.+]] = memref.alloc() : memref<4xf32>
// CHECK-NEXT: memref.dealloc %[[B]]
// CHECK-NEXT: memref.alloca() : memref<2xf32>
// CHECK-NEXT: return
func.func @others() {
  %a = memref.alloc() : memref<8xf32>
  %b = memref.alloc() : memref<4xf32>
  memref.dealloc %b : memref<4xf32>
  %c = memref.alloca() : memref<2xf32>
  return
}

//--- serialize.mlir

// The last dimension becomes a loop in the thread; a loop of one dimension is
// serial.
// CHECK-LABEL: func.func @split(
// CHECK: scf.parallel (%[[I:.+]], %[[J:.+]]) = {{.*}} {
// CHECK-NEXT: scf.for %[[K:.+]] = %{{.+}} to %{{.+}} step %{{.+}} {
// CHECK-NEXT: memref.store %{{.+}}, %{{.+}}[%[[I]], %[[J]], %[[K]]]
// CHECK: scf.reduce
// CHECK: scf.for %[[L:.+]] = %{{.+}} to %{{.+}} step %{{.+}} {
// CHECK-NEXT: memref.store %{{.+}}, %{{.+}}[%[[L]], %{{.+}}, %{{.+}}]
// CHECK-NOT: scf.parallel
// CHECK: return
func.func @split(%x: memref<?x?x?xf32>, %n: index, %v: f32) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  scf.parallel (%i, %j, %k) = (%c0, %c0, %c0) to (%n, %n, %n) step (%c1, %c1, %c1) {
    memref.store %v, %x[%i, %j, %k] : memref<?x?x?xf32>
  }
  scf.parallel (%i) = (%c0) to (%n) step (%c1) {
    memref.store %v, %x[%i, %c0, %c0] : memref<?x?x?xf32>
  }
  return
}

// Loops around loops, around stack memory and reductions are not of linalg's
// making and stay.
// CHECK-LABEL: func.func @left_alone(
// CHECK: scf.parallel (%{{.+}}, %{{.+}}) = {{.*}} {
// CHECK-NEXT: scf.for
// CHECK: scf.parallel (%{{.+}}) = {{.*}} {
// CHECK-NEXT: memref.alloca
// CHECK: scf.parallel (%{{.+}}) = {{.*}} init
func.func @left_alone(%x: memref<?x?x?xf32>, %n: index, %v: f32) -> f32 {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  scf.parallel (%i, %j) = (%c0, %c0) to (%n, %n) step (%c1, %c1) {
    scf.for %k = %c0 to %n step %c1 {
      memref.store %v, %x[%i, %j, %k] : memref<?x?x?xf32>
    }
  }
  scf.parallel (%i) = (%c0) to (%n) step (%c1) {
    %a = memref.alloca() : memref<4xf32>
    memref.store %v, %a[%c0] : memref<4xf32>
  }
  %s = scf.parallel (%i) = (%c0) to (%n) step (%c1) init (%v) -> f32 {
    %w = memref.load %x[%i, %c0, %c0] : memref<?x?x?xf32>
    scf.reduce(%w : f32) {
    ^bb0(%l: f32, %r: f32):
      %t = arith.addf %l, %r : f32
      scf.reduce.return %t : f32
    }
  }
  return %s : f32
}

//--- guard.mlir

// One iteration in all runs where it is.
// CHECK-LABEL: func.func @guard(
// CHECK-SAME: %[[N:.+]]: index, %[[M:.+]]: index, %{{.+}}: memref
// CHECK: %[[P:.+]] = arith.muli %[[N]], %[[M]] : index
// CHECK: %[[ONE:.+]] = arith.constant 1 : index
// CHECK: %[[SEVERAL:.+]] = arith.cmpi sgt, %[[P]], %[[ONE]] : index
// CHECK: omp.parallel if(%[[SEVERAL]]) {
func.func @guard(%n: index, %m: index, %x: memref<?x?xf32>, %v: f32) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  omp.parallel {
    omp.wsloop {
      omp.loop_nest (%i, %j) : index = (%c0, %c0) to (%n, %m) step (%c1, %c1) collapse(2) {
        memref.store %v, %x[%i, %j] : memref<?x?xf32>
        omp.yield
      }
    }
    omp.terminator
  }
  return
}

// A clause that is there stays, and a bound computed inside says nothing outside.
// CHECK-LABEL: func.func @unguarded(
// CHECK-SAME: %{{.+}}: index, %[[C:.+]]: i1,
// CHECK: omp.parallel if(%[[C]]) {
// CHECK: omp.parallel {
func.func @unguarded(%n: index, %c: i1, %x: memref<?xf32>, %v: f32) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  omp.parallel if(%c) {
    omp.wsloop {
      omp.loop_nest (%i) : index = (%c0) to (%n) step (%c1) {
        memref.store %v, %x[%i] : memref<?xf32>
        omp.yield
      }
    }
    omp.terminator
  }
  omp.parallel {
    %m = arith.addi %n, %n : index
    omp.wsloop {
      omp.loop_nest (%i) : index = (%c0) to (%m) step (%c1) {
        memref.store %v, %x[%i] : memref<?xf32>
        omp.yield
      }
    }
    omp.terminator
  }
  return
}

// A stack scope saves and restores the pointer where it allocates, also in a
// region, and is gone where it does not.
// CHECK-LABEL: func.func @scopes(
// CHECK-NOT: memref.alloca_scope
// CHECK: %[[S:.+]] = llvm.intr.stacksave : !llvm.ptr
// CHECK: memref.alloca() : memref<4xf32>
// CHECK: llvm.intr.stackrestore %[[S]] : !llvm.ptr
// CHECK: %[[T:.+]] = llvm.intr.stacksave : !llvm.ptr
// CHECK: scf.if
// CHECK: llvm.intr.stackrestore %[[T]] : !llvm.ptr
// CHECK-NOT: llvm.intr.stacksave
// CHECK: %[[SUM:.+]] = arith.addf
// CHECK: return %[[SUM]]
func.func @scopes(%x: f32, %c: i1) -> f32 {
  %c0 = arith.constant 0 : index
  memref.alloca_scope {
    %a = memref.alloca() : memref<4xf32>
    memref.store %x, %a[%c0] : memref<4xf32>
  }
  memref.alloca_scope {
    scf.if %c {
      %a = memref.alloca() : memref<4xf32>
      memref.store %x, %a[%c0] : memref<4xf32>
    }
  }
  %r = memref.alloca_scope -> (f32) {
    %y = arith.addf %x, %x : f32
    memref.alloca_scope.return %y : f32
  }
  return %r : f32
}

//--- runtime.mlir

// CHECK-DAG: llvm.func @corey_rt_malloc(i64) -> !llvm.ptr
// CHECK-DAG: llvm.func @corey_rt_free(!llvm.ptr)
// CHECK-NOT: @malloc
// CHECK-NOT: @free
// CHECK-LABEL: llvm.func @memory(
// CHECK: llvm.call @corey_rt_malloc(
// CHECK: llvm.call @corey_rt_free(
// CHECK-NOT: @malloc
// CHECK-NOT: @free
llvm.func @malloc(i64) -> !llvm.ptr
llvm.func @free(!llvm.ptr)
llvm.func @memory(%n: i64) {
  %0 = llvm.call @malloc(%n) : (i64) -> !llvm.ptr
  llvm.call @free(%0) : (!llvm.ptr) -> ()
  llvm.return
}
