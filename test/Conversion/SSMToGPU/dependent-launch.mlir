// Where the chip can, kernels are launched before their predecessors on the
// stream have ended, and wait for them before they touch memory.

// RUN: corey-opt %s --convert-ssm-to-gpu="chip=sm_90a" | FileCheck %s --check-prefix=WAIT
// RUN: corey-opt %s --convert-ssm-to-gpu="chip=sm_100a" | FileCheck %s --check-prefix=WAIT
// RUN: corey-opt %s --convert-ssm-to-gpu="chip=sm_80" | FileCheck %s --check-prefix=NOWAIT
// RUN: corey-opt %s --convert-ssm-to-gpu="chip=sm_90a" --corey-bufferize --corey-lower-launches | FileCheck %s --check-prefix=HOST --check-prefix=DEPENDENT
// RUN: corey-opt %s --convert-ssm-to-gpu="chip=sm_80" --corey-bufferize --corey-lower-launches | FileCheck %s --check-prefix=HOST --check-prefix=INORDER

// WAIT: gpu.func @hadamard
// WAIT-NEXT: nvvm.griddepcontrol launch_dependents
// WAIT-NEXT: nvvm.griddepcontrol wait
// NOWAIT-NOT: griddepcontrol
// HOST-LABEL: func.func @main
// The last before the bytes of shared memory and the arguments.
// DEPENDENT: %[[DEPENDENT:.+]] = arith.constant 1 : i64
// INORDER: %[[DEPENDENT:.+]] = arith.constant 0 : i64
// HOST: call @corey_rt_launch({{.*}}, %[[DEPENDENT]], %{{[^,]*}}, %{{[^,]*}})
func.func @main(%x: tensor<?x16xf32>) -> tensor<?x16xf32> {
  %y = ssm.hadamard %x {block = 16 : i64} : tensor<?x16xf32> -> tensor<?x16xf32>
  return %y : tensor<?x16xf32>
}
