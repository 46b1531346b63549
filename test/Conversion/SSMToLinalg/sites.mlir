// Lowering of sites, ssm.bind_chunk and ssm.observe, to calls of the run-time
// library, and what becomes of weights.

// RUN: corey-opt %s --convert-ssm-to-linalg=vector-bits=256 | FileCheck %s
// RUN: corey-opt %s --convert-ssm-to-linalg=vector-bits=256 | FileCheck %s --check-prefix=ONCE
// RUN: %if llvm-statistics %{ corey-opt %s --convert-ssm-to-linalg --mlir-pass-statistics 2>&1 >/dev/null | FileCheck %s --check-prefix=STATISTICS %}

// STATISTICS: ConvertSSMToLinalg
// STATISTICS-NEXT: (S) 4 num-lowered-ops

// One constant per site, ended by a zero byte.
// CHECK-DAG: llvm.mlir.global internal constant @corey_site_layer0.scan("layer0.scan\00")
// CHECK-DAG: llvm.mlir.global internal constant @corey_site_layer0.u("layer0.u\00")
// CHECK-DAG: func.func private @corey_rt_chunk(i64, i64, i64, i64) -> i64
// CHECK-DAG: func.func private @corey_rt_observe(i64, i64, i64, i64, i64)

// ONCE-COUNT-2: llvm.mlir.global
// ONCE-NOT: llvm.mlir.global

// CHECK-LABEL: func.func @chunk(
// CHECK-SAME: %[[B:.+]]: index, %[[L:.+]]: index)
// CHECK: %[[NAME:.+]] = llvm.mlir.addressof @corey_site_layer0.scan : !llvm.ptr
// CHECK: %[[SITE:.+]] = llvm.ptrtoint %[[NAME]] : !llvm.ptr to i64
// CHECK: %[[BI:.+]] = arith.index_cast %[[B]] : index to i64
// CHECK: %[[LI:.+]] = arith.index_cast %[[L]] : index to i64
// CHECK: %[[K:.+]] = call @corey_rt_chunk(%[[SITE]], %[[BI]], %[[LI]], %{{.+}}) : (i64, i64, i64, i64) -> i64
// CHECK: %[[R:.+]] = arith.index_cast %[[K]] : i64 to index
// CHECK: return %[[R]]
func.func @chunk(%b: index, %l: index) -> index {
  %k = ssm.bind_chunk @layer0.scan(%b, %l)
  return %k : index
}

// CHECK-LABEL: func.func @again(
// CHECK: llvm.mlir.addressof @corey_site_layer0.scan : !llvm.ptr
func.func @again(%n: index) -> index {
  %k = ssm.bind_chunk @layer0.scan(%n, %n)
  return %k : index
}

// At once: the address, sizes and strides on the stack, and the width of an
// element.
// CHECK-LABEL: func.func @observe(
// CHECK-SAME: %[[X:.+]]: tensor<?x8xf32>, %[[Y:.+]]: tensor<8xbf16>)
// CHECK-DAG: memref.alloca() : memref<4xi64>
// CHECK-DAG: memref.alloca() : memref<2xi64>
// CHECK: memref.extract_strided_metadata
// CHECK-COUNT-4: memref.store {{.*}} : memref<4xi64>
// CHECK: arith.constant 32 : index
// CHECK: memref.extract_aligned_pointer_as_index
// CHECK: memref.extract_aligned_pointer_as_index
// CHECK: call @corey_rt_observe(
// CHECK-COUNT-2: memref.store {{.*}} : memref<2xi64>
// A negative width means bf16.
// CHECK: arith.constant -16 : index
// CHECK: call @corey_rt_observe(
// CHECK: return %[[X]], %[[Y]]
func.func @observe(%x: tensor<?x8xf32>, %y: tensor<8xbf16>) -> (tensor<?x8xf32>, tensor<8xbf16>) {
  %0 = ssm.observe @layer0.u %x : tensor<?x8xf32>
  %1 = ssm.observe @layer0.u %y : tensor<8xbf16>
  return %0, %1 : tensor<?x8xf32>, tensor<8xbf16>
}

// Weights are no matter of this lowering.
// CHECK: ssm.weight @w : tensor<8xf32>
ssm.weight @w : tensor<8xf32>
// CHECK-LABEL: func.func @weight(
// CHECK: ssm.get_weight @w
func.func @weight() -> tensor<8xf32> {
  %w = ssm.get_weight @w : tensor<8xf32>
  return %w : tensor<8xf32>
}
