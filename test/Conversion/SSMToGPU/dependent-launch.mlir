// Where the chip can, kernels are launched before their predecessors on the
// stream have ended, and wait for them before they touch memory.

// RUN: corey-opt %s --convert-ssm-to-gpu="chip=sm_90a" | FileCheck %s --check-prefix=WAIT
// RUN: corey-opt %s --convert-ssm-to-gpu="chip=sm_100a" | FileCheck %s --check-prefix=WAIT
// RUN: corey-opt %s --convert-ssm-to-gpu="chip=sm_80" | FileCheck %s --check-prefix=NOWAIT
// RUN: corey-opt %s --convert-ssm-to-gpu="chip=sm_90a" --corey-bufferize --corey-lower-launches --cse | FileCheck %s --check-prefix=HOST -DDEPENDENT=%c1_i64
// RUN: corey-opt %s --convert-ssm-to-gpu="chip=sm_80" --corey-bufferize --corey-lower-launches --cse | FileCheck %s --check-prefix=HOST -DDEPENDENT=%c0_i64

// WAIT: gpu.func @hadamard
// WAIT-NEXT: nvvm.griddepcontrol launch_dependents
// WAIT-NEXT: nvvm.griddepcontrol wait
// NOWAIT-NOT: griddepcontrol
// The ninth argument: of kernel, grid, block and cluster there are eight.
// HOST-LABEL: func.func @main
// HOST: call @corey_rt_launch({{([^,]*, ){8}}}[[DEPENDENT]],
func.func @main
// The last before the bytes of shared memory and the arguments.
// DEPENDENT: %[[DEPENDENT:.+]] = arith.constant 1 : i64
// INORDER: %[[DEPENDENT:.+]] = arith.constant 0 : i64
// HOST: call @corey_rt_launch({{.*}}, %[[DEPENDENT]], %{{[^,]*}}, %{{[^,]*}})
func.func @main(%x: tensor<?x16xf32>) -> tensor<?x16xf32> {
  %y = ssm.hadamard %x {block = 16 : i64} : tensor<?x16xf32> -> tensor<?x16xf32>
  return %y : tensor<?x16xf32>
}

// Blocks of this kernel share multiprocessors for as long as it runs, and start
// where all are free: it lets others overlap, and waits for none.
// WAIT: gpu.func @selective_scan_warp(
// WAIT-NEXT: nvvm.griddepcontrol launch_dependents
// WAIT-NOT: nvvm.griddepcontrol wait
// WAIT: gpu.return
// HOST-LABEL: func.func @scan
// HOST: call @corey_rt_launch({{([^,]*, ){8}}}%c0_i64,
func.func @scan(%u: tensor<2x64x7xf32>, %A: tensor<7x16xf32>, %B: tensor<2x64x1x16xf32>) -> tensor<2x64x7xf32> {
  %y = ssm.selective_scan %u, %u, %A, %B, %B : tensor<2x64x7xf32>, tensor<2x64x7xf32>, tensor<7x16xf32>, tensor<2x64x1x16xf32>, tensor<2x64x1x16xf32> -> tensor<2x64x7xf32>
  return %y : tensor<2x64x7xf32>
}
