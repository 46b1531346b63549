// Observed tensors are counted by kernels, if the run-time library says so, by
// an observation that it fills in.

// RUN: corey-opt %s --convert-ssm-to-gpu="chip=sm_80" | FileCheck %s
// RUN: corey-opt %s --convert-ssm-to-gpu="chip=sm_80" | FileCheck %s --check-prefix=KERNELS
// RUN: corey-opt %s --corey-gpu-pipeline="chip=sm_90a" | FileCheck %s --check-prefix=HOST
// RUN: corey-translate %s --to=ptx --chip=sm_90a -o %t.ptx && FileCheck %s --check-prefix=PTX < %t.ptx

// CHECK-LABEL: func.func @observe(
// CHECK-SAME: %[[X:.+]]: tensor<?x?x64xbf16>)
// CHECK-DAG: %[[LAYOUT:.+]] = memref.alloca() : memref<6xi64>
// CHECK-DAG: %[[PLAN:.+]] = memref.alloca() : memref<28xi64>
// CHECK: %[[ADDRESS:.+]] = arith.index_cast %{{.+}} : index to i64
// CHECK: %[[COUNTED:.+]] = call @corey_rt_device_observe(%[[SITE:[^,]+]], {{.+}}) : (i64, i64, i64, i64, i64, i64) -> i64
// CHECK: %[[GO:.+]] = arith.cmpi ne, %[[COUNTED]], %{{.+}} : i64
// CHECK: scf.if %[[GO]] {
// CHECK-COUNT-28: memref.load %[[PLAN]][
// CHECK: scf.if
// CHECK: gpu.launch_func @kernels::@observe_tokens
// CHECK: } else {
// CHECK: gpu.launch_func @kernels::@observe_moments
// CHECK: }
// CHECK: gpu.launch_func @kernels::@observe_histogram
// CHECK: call @corey_rt_device_observed(%[[SITE]]) : (i64) -> ()
// CHECK: }
// CHECK: return %[[X]]

// The tensor is only read, and nothing else is where counts are added to. Bins
// are divided for, and counted in shared memory if they are few.
// KERNELS: gpu.func @observe_tokens(
// KERNELS: llvm.load {{.+}} invariant {{.*}}vector<4xi32>
// KERNELS: gpu.func @observe_moments(
// KERNELS-SAME: !llvm.ptr<1> {llvm.noalias}
// KERNELS-NOT: llvm.atomicrmw
// KERNELS: gpu.func @observe_histogram(
// KERNELS: llvm.call_intrinsic "llvm.sqrt.f64"
// KERNELS: arith.divf {{.+}} : f32
// KERNELS: arith.divf {{.+}} : f64
// KERNELS: llvm.atomicrmw add {{.+}} : !llvm.ptr<3>, i32
// KERNELS: llvm.atomicrmw add {{.+}} syncscope("device") monotonic {{.*}}: !llvm.ptr<1>, i64

// HOST-LABEL: llvm.func @observe(
// HOST: llvm.call @corey_rt_device_observe(
// HOST-COUNT-3: llvm.call @corey_rt_launch(
// HOST: llvm.call @corey_rt_device_observed(

// Rounded as the host does it.
// PTX: .entry observe_histogram(
// PTX-NOT: .ftz
// PTX-NOT: div.{{full|approx}}
// PTX: ld.global.nc.v4
func.func @observe(%x: tensor<?x?x64xbf16>) -> tensor<?x?x64xbf16> {
  %0 = ssm.observe @layer0.u %x : tensor<?x?x64xbf16>
  return %0 : tensor<?x?x64xbf16>
}
