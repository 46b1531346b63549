// Lowering of ssm.quantize and ssm.dequantize: one kernel where a block has all
// that shares a scale, else three.

// RUN: corey-opt %s --convert-ssm-to-gpu --canonicalize | FileCheck %s
// RUN: corey-opt %s --convert-ssm-to-gpu --canonicalize | FileCheck %s --check-prefix=KERNEL

// The largest magnitude without NaN, the same for all threads; 1 for zeros.
// KERNEL-LABEL: gpu.func @quantize_rows(
// KERNEL: llvm.fabs.f32
// KERNEL: llvm.maxnum.f32
// KERNEL: nvvm.barrier
// KERNEL: arith.cmpf oeq
// KERNEL: arith.divf
// KERNEL: arith.cmpf olt
// KERNEL: arith.cmpf ogt
// KERNEL: llvm.nvvm.f2i.rn
// f8E4M3FN keeps NaN: no rounding through an integer type.
// KERNEL-LABEL: gpu.func @quantize(
// KERNEL-NOT: llvm.nvvm.f2i.rn
// KERNEL: gpu.return
// KERNEL-LABEL: gpu.func @dequantize(
// KERNEL: arith.constant 2143289344 : i32
// KERNEL: llvm.load {{.*}} -> i32

// CHECK-LABEL: func.func @token(
// CHECK: gpu.launch_func @kernels::@quantize_rows
// CHECK-NOT: gpu.launch_func
// CHECK: return
func.func @token(%x: tensor<?x768xf32>) -> (tensor<?x768xi8>, tensor<?xf32>) {
  %q, %s = ssm.quantize %x token : tensor<?x768xf32> -> tensor<?x768xi8>, tensor<?xf32>
  return %q, %s : tensor<?x768xi8>, tensor<?xf32>
}

// CHECK-LABEL: func.func @tensor(
// CHECK: gpu.launch_func @kernels::@quantize_maxima
// CHECK: gpu.launch_func @kernels::@quantize_scale
// CHECK: gpu.launch_func @kernels::@quantize{{(_[0-9]+)?}} blocks
// CHECK: gpu.launch_func @kernels::@dequantize
func.func @tensor(%x: tensor<?x768xf32>) -> tensor<?x768xf32> {
  %q, %s = ssm.quantize %x tensor : tensor<?x768xf32> -> tensor<?x768xf8E4M3FN>, tensor<f32>
  %y = ssm.dequantize %q, %s tensor : tensor<?x768xf8E4M3FN>, tensor<f32> -> tensor<?x768xf32>
  return %y : tensor<?x768xf32>
}

// CHECK-LABEL: func.func @channel(
// CHECK: gpu.launch_func @kernels::@quantize_column_maxima
// CHECK: gpu.launch_func @kernels::@quantize_column_scales
// CHECK: gpu.launch_func @kernels::@quantize{{(_[0-9]+)?}} blocks
func.func @channel(%x: tensor<?x48xbf16>) -> (tensor<?x48xi8>, tensor<48xf32>) {
  %q, %s = ssm.quantize %x channel : tensor<?x48xbf16> -> tensor<?x48xi8>, tensor<48xf32>
  return %q, %s : tensor<?x48xi8>, tensor<48xf32>
}
