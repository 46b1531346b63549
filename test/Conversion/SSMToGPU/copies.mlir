// A result that is an input is copied by the run-time library.

// RUN: corey-opt %s --corey-gpu-pipeline | FileCheck %s

// CHECK-LABEL: llvm.func @identity(
// CHECK: llvm.call @corey_rt_device_copy(
// CHECK-NOT: corey_rt_launch
func.func @identity(%x: tensor<?x4xf32>) -> tensor<?x4xf32> {
  %y = ssm.hadamard %x {block = 1 : i64} : tensor<?x4xf32> -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}
