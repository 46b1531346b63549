// Where the chip can, kernels are launched before their predecessors on the
// stream have ended, and wait for them before they touch memory.

// RUN: corey-opt %s --convert-ssm-to-gpu="chip=sm_90a" | FileCheck %s --check-prefix=WAIT
// RUN: corey-opt %s --convert-ssm-to-gpu="chip=sm_100a" | FileCheck %s --check-prefix=WAIT
// RUN: corey-opt %s --convert-ssm-to-gpu="chip=sm_80" | FileCheck %s --check-prefix=NOWAIT
// RUN: corey-opt %s --convert-ssm-to-gpu="chip=sm_90a" --corey-bufferize --corey-lower-launches --cse | FileCheck %s --check-prefixes=HOST,EARLY
// RUN: corey-opt %s --convert-ssm-to-gpu="chip=sm_80" --corey-bufferize --corey-lower-launches --cse | FileCheck %s --check-prefixes=HOST,LATE

// NOWAIT-NOT: griddepcontrol

// WAIT-DAG: gpu.func @hadamard
// WAIT: nvvm.griddepcontrol launch_dependents
// WAIT-NEXT: nvvm.griddepcontrol wait
// The ninth argument: of kernel, grid, block and cluster there are eight.
// HOST-LABEL: @main(
// EARLY: call @corey_rt_launch({{[^,]*, [^,]*, [^,]*, [^,]*, [^,]*, [^,]*, [^,]*, [^,]*, }}%c1_i64,
// LATE: call @corey_rt_launch({{[^,]*, [^,]*, [^,]*, [^,]*, [^,]*, [^,]*, [^,]*, [^,]*, }}%c0_i64,
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
// HOST-LABEL: @scan(
// HOST: call @corey_rt_launch({{[^,]*, [^,]*, [^,]*, [^,]*, [^,]*, [^,]*, [^,]*, [^,]*, }}%c0_i64,
func.func @scan(%u: tensor<2x64x7xf32>, %A: tensor<7x16xf32>, %B: tensor<2x64x1x16xf32>) -> tensor<2x64x7xf32> {
  %y = ssm.selective_scan %u, %u, %A, %B, %B : tensor<2x64x7xf32>, tensor<2x64x7xf32>, tensor<7x16xf32>, tensor<2x64x1x16xf32>, tensor<2x64x1x16xf32> -> tensor<2x64x7xf32>
  return %y : tensor<2x64x7xf32>
}
