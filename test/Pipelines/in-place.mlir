// What kernels read is what it was, whatever is written in place.

// RUN: split-file %s %t
// RUN: corey-run %t/insert.mlir --emit=buffers | FileCheck %t/insert.mlir
// RUN: corey-run %t/read-twice.mlir --fusion=none --emit=buffers | FileCheck %t/read-twice.mlir

//--- insert.mlir

// The slice goes into a copy: the result of the norm is still to be read.
// CHECK-LABEL: func.func @main(
// CHECK: %[[Y:.+]] = memref.alloc() {{.*}} : memref<2x8xf32>
// CHECK: memref.load %[[Y]]
// CHECK: memref.store %{{.+}}, %arg3
// CHECK: scf.parallel
// CHECK: vector.load %[[Y]]
// CHECK: vector.store %{{.+}}, %arg4
func.func @main(%x: tensor<2x8xf32>, %w: tensor<8xf32>, %a: tensor<1x8xf32>) -> (tensor<2x8xf32>, tensor<2x8xf32>) {
  %y = ssm.rms_norm %x, %w : tensor<2x8xf32>, tensor<8xf32> -> tensor<2x8xf32>
  %p = tensor.insert_slice %a into %y[0, 0] [1, 8] [1, 1] : tensor<1x8xf32> into tensor<2x8xf32>
  %q = ssm.hadamard %y {block = 8 : i64} : tensor<2x8xf32> -> tensor<2x8xf32>
  return %p, %q : tensor<2x8xf32>, tensor<2x8xf32>
}

//--- read-twice.mlir

// Two kernels read %z, and in between another value of its type is made: not in
// its place.
// CHECK-LABEL: func.func @main(
// CHECK: %[[Z:.+]] = memref.alloc() {{.*}} : memref<2x8xf32>
// CHECK: math.exp
// CHECK: memref.store %{{.+}}, %[[Z]]
// CHECK-NOT: memref.store %{{.+}}, %[[Z]]
// CHECK-NOT: vector.store %{{.+}}, %[[Z]]
// CHECK: vector.load %[[Z]]
// CHECK: memref.dealloc %[[Z]]
func.func @main(%x: tensor<2x8xf32>, %v: tensor<2x8xf32>, %w: tensor<8xf32>) -> tensor<2x8xf32> {
  %z = ssm.exp %v : tensor<2x8xf32>
  %a = ssm.rms_norm %x, %w z(%z : tensor<2x8xf32>) : tensor<2x8xf32>, tensor<8xf32> -> tensor<2x8xf32>
  %b = ssm.neg %a : tensor<2x8xf32>
  %c = ssm.rms_norm %b, %w z(%z : tensor<2x8xf32>) : tensor<2x8xf32>, tensor<8xf32> -> tensor<2x8xf32>
  %d = ssm.neg %c : tensor<2x8xf32>
  return %d : tensor<2x8xf32>
}
