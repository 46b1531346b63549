// ssm-fuse where a program is more than one straight block: sizes, blocks, control
// flow, chunks that are bound before or after, ops that nobody uses.

// RUN: split-file %s %t
// RUN: corey-opt %t/sizes.mlir --ssm-fuse="strategy=dp score=physical" | FileCheck %t/sizes.mlir
// RUN: corey-opt %t/blocks.mlir --ssm-fuse="strategy=dp score=physical" | FileCheck %t/blocks.mlir
// RUN: corey-opt %t/order.mlir --ssm-fuse="strategy=entropy tau=9" | FileCheck %t/order.mlir
// RUN: corey-opt %t/order.mlir --ssm-fuse="strategy=entropy tau=9" --ssm-fuse="strategy=entropy tau=9" | FileCheck %t/order.mlir
// RUN: corey-opt %t/chunks.mlir --ssm-bind-chunks --ssm-fuse="strategy=dp score=physical" | FileCheck %t/chunks.mlir --check-prefix=BEFORE
// RUN: corey-opt %t/chunks.mlir --ssm-fuse="strategy=dp score=physical" --ssm-bind-chunks | FileCheck %t/chunks.mlir --check-prefix=AFTER
// RUN: corey-opt %t/dead.mlir --ssm-fuse="strategy=dp score=physical" | FileCheck %t/dead.mlir

//--- sizes.mlir

// All sizes of a shape are made, one is wanted: the others must not stay behind.
// CHECK-LABEL: func.func @one_of_two(
// CHECK-SAME: %[[X:[a-z0-9]+]]: tensor<?x?x8xf32>
// CHECK: ssm.fused
// CHECK: ssm.exp
// CHECK-NEXT: ssm.neg
// CHECK-NEXT: ssm.silu
// CHECK: %[[N:.+]] = tensor.dim %[[X]]
// CHECK-NOT: tensor.dim
// CHECK: return %{{.+}}, %[[N]]
func.func @one_of_two(%x: tensor<?x?x8xf32>) -> (tensor<?x?x8xf32>, index) {
  %c0 = arith.constant 0 : index
  %0 = ssm.exp %x : tensor<?x?x8xf32>
  %1 = ssm.neg %0 : tensor<?x?x8xf32>
  %2 = ssm.silu %1 : tensor<?x?x8xf32>
  %n = tensor.dim %1, %c0 : tensor<?x?x8xf32>
  return %2, %n : tensor<?x?x8xf32>, index
}

// Which size is not known: the value is needed.
// CHECK-LABEL: func.func @some_size(
// CHECK-NOT: ssm.fused
// CHECK: return
func.func @some_size(%x: tensor<?x?x8xf32>, %i: index) -> (tensor<?x?x8xf32>, index) {
  %0 = ssm.exp %x : tensor<?x?x8xf32>
  %n = tensor.dim %0, %i : tensor<?x?x8xf32>
  %1 = ssm.neg %0 : tensor<?x?x8xf32>
  return %1, %n : tensor<?x?x8xf32>, index
}

// Asked for in the body of a loop.
// CHECK-LABEL: func.func @size_in_loop(
// CHECK-SAME: %[[X:[a-z0-9]+]]: tensor<?x8xf32>
// CHECK: ssm.fused
// CHECK: scf.for
// CHECK: tensor.dim %[[X]]
func.func @size_in_loop(%x: tensor<?x8xf32>, %k: index) -> (tensor<?x8xf32>, index) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %0 = ssm.exp %x : tensor<?x8xf32>
  %1 = ssm.neg %0 : tensor<?x8xf32>
  %r = scf.for %i = %c0 to %k step %c1 iter_args(%a = %c0) -> index {
    %n = tensor.dim %0, %c0 : tensor<?x8xf32>
    %b = arith.addi %a, %n : index
    scf.yield %b : index
  }
  return %1, %r : tensor<?x8xf32>, index
}

//--- blocks.mlir

// Blocks are fused one by one; a value that another block uses leaves its own.
// CHECK-LABEL: func.func @blocks(
// CHECK: %[[A:.+]] = ssm.fused
// CHECK: cf.cond_br
// CHECK: ssm.fused ins(%[[A]]
// CHECK: return
func.func @blocks(%x: tensor<?x8xf32>, %c: i1) -> tensor<?x8xf32> {
  %0 = ssm.exp %x : tensor<?x8xf32>
  %1 = ssm.neg %0 : tensor<?x8xf32>
  cf.cond_br %c, ^a, ^b
^a:
  %2 = ssm.exp %1 : tensor<?x8xf32>
  %3 = ssm.neg %2 : tensor<?x8xf32>
  return %3 : tensor<?x8xf32>
^b:
  return %x : tensor<?x8xf32>
}

// A branch uses what stands before it.
// CHECK-LABEL: func.func @branch(
// CHECK: %[[A:.+]] = ssm.silu
// CHECK: scf.if
// CHECK: ssm.fused ins(%[[A]]
// CHECK: else
// CHECK: scf.yield %[[A]]
func.func @branch(%x: tensor<?x8xf32>, %c: i1) -> tensor<?x8xf32> {
  %0 = ssm.silu %x : tensor<?x8xf32>
  %r = scf.if %c -> tensor<?x8xf32> {
    %1 = ssm.exp %0 : tensor<?x8xf32>
    %2 = ssm.neg %1 : tensor<?x8xf32>
    scf.yield %2 : tensor<?x8xf32>
  } else {
    scf.yield %0 : tensor<?x8xf32>
  }
  return %r : tensor<?x8xf32>
}

//--- order.mlir

// Ops that stand right stay in their order, however often the pass runs.
// CHECK-LABEL: func.func @order(
// CHECK-NEXT: ssm.exp
// CHECK-NEXT: ssm.neg
// CHECK-NEXT: ssm.softplus
// CHECK-NEXT: ssm.sigmoid
// CHECK-NEXT: ssm.selective_scan
func.func @order(%u: tensor<?x?x8xf32>, %d: tensor<?x?x8xf32>, %a: tensor<8x4xf32>, %b: tensor<?x?x1x4xf32>) -> tensor<?x?x8xf32> {
  %0 = ssm.softplus %d : tensor<?x?x8xf32>
  %1 = ssm.exp %a : tensor<8x4xf32>
  %2 = ssm.neg %1 : tensor<8x4xf32>
  %3 = ssm.sigmoid %u : tensor<?x?x8xf32>
  %y = ssm.selective_scan %3, %0, %2, %b, %b : tensor<?x?x8xf32>, tensor<?x?x8xf32>, tensor<8x4xf32>,
      tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x8xf32>
  return %y : tensor<?x?x8xf32>
}

//--- chunks.mlir

// A chunk is bound outside of the region that it is an input of, or in it.
// BEFORE-LABEL: func.func @chunks(
// BEFORE: %[[C:.+]] = ssm.bind_chunk @s(
// BEFORE: ssm.fused ins({{.*}}%[[C]]{{.*}} : {{.*}}index
// BEFORE-NOT: tensor.dim
// BEFORE: ssm.silu
// BEFORE: ssm.selective_scan
// BEFORE: ssm.mul
// AFTER-LABEL: func.func @chunks(
// AFTER: ssm.fused
// AFTER: ssm.silu
// AFTER: ssm.bind_chunk @s(
// AFTER: ssm.selective_scan
// AFTER: ssm.mul
func.func @chunks(%u: tensor<?x?x8xf32>, %a: tensor<8x4xf32>, %b: tensor<?x?x1x4xf32>) -> tensor<?x?x8xf32> {
  %0 = ssm.silu %u : tensor<?x?x8xf32>
  %y = ssm.selective_scan %0, %u, %a, %b, %b {chunk = #ssm.chunk<runtime = @s>}
      : tensor<?x?x8xf32>, tensor<?x?x8xf32>, tensor<8x4xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x8xf32>
  %m = ssm.mul %y, %0 : tensor<?x?x8xf32>, tensor<?x?x8xf32>
  return %m : tensor<?x?x8xf32>
}

//--- dead.mlir

// Observed values are in memory, and so are those that a dead op reads.
// CHECK-LABEL: func.func @observed(
// CHECK-NOT: ssm.fused
// CHECK: return
func.func @observed(%x: tensor<?x8xf32>) -> (tensor<?x8xf32>, tensor<?x8xf32>) {
  %0 = ssm.exp %x : tensor<?x8xf32>
  %1 = ssm.observe @site %0 : tensor<?x8xf32>
  %2 = ssm.neg %1 : tensor<?x8xf32>
  %3 = ssm.exp %x : tensor<?x8xf32>
  %dead = ssm.silu %3 : tensor<?x8xf32>
  %4 = ssm.scale %3 by 2.0 : tensor<?x8xf32>
  return %2, %4 : tensor<?x8xf32>, tensor<?x8xf32>
}
