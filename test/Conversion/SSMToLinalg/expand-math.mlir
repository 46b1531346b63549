// corey-expand-math: elementary functions on f32 by polynomials, narrow float
// types by integer arithmetic.

// RUN: corey-opt %s --corey-expand-math=vector-bits=256 | FileCheck %s
// RUN: corey-opt %s --corey-expand-math=vector-bits=512 | FileCheck %s

// Scalars and vectors alike.
// CHECK-LABEL: func.func @exp(
// CHECK-NOT: math.exp
// CHECK-DAG: arith.constant 1.44269502 : f32
// CHECK-DAG: arith.constant dense<1.44269502> : vector<8xf32>
// CHECK: math.fma {{.*}} : f32
// CHECK: arith.shli {{.*}} : i32
// CHECK: math.fma {{.*}} : vector<8xf32>
// CHECK: arith.shli {{.*}} : vector<8xi32>
// CHECK-NOT: math.exp
// CHECK: return
func.func @exp(%x: f32, %v: vector<8xf32>) -> (f32, vector<8xf32>) {
  %0 = math.exp %x : f32
  %1 = math.exp %v : vector<8xf32>
  return %0, %1 : f32, vector<8xf32>
}

// CHECK-LABEL: func.func @others(
// CHECK-NOT: math.log1p
// CHECK-NOT: math.erf
// CHECK: return
func.func @others(%x: f32) -> (f32, f32) {
  %0 = math.log1p %x : f32
  %1 = math.erf %x : f32
  return %0, %1 : f32, f32
}

// What the hardware has stays, and so does f64.
// CHECK-LABEL: func.func @left_alone(
// CHECK: math.sqrt {{.*}} : f32
// CHECK: math.absf {{.*}} : f32
// CHECK: math.roundeven {{.*}} : f32
// CHECK: math.exp {{.*}} : f64
func.func @left_alone(%x: f32, %y: f64) -> (f32, f32, f32, f64) {
  %0 = math.sqrt %x : f32
  %1 = math.absf %x : f32
  %2 = math.roundeven %x : f32
  %3 = math.exp %y : f64
  return %0, %1, %2, %3 : f32, f32, f32, f64
}

// CHECK-LABEL: func.func @bf16(
// CHECK-NOT: arith.extf
// CHECK-NOT: arith.truncf
// CHECK: arith.shli {{.*}} : i32
// CHECK: return
func.func @bf16(%x: bf16, %y: f32) -> (f32, bf16) {
  %0 = arith.extf %x : bf16 to f32
  %1 = arith.truncf %y : f32 to bf16
  return %0, %1 : f32, bf16
}

// Codes 0x7F and 0xFF are NaN; 464 is the largest magnitude that rounds to 448.
// CHECK-LABEL: func.func @f8(
// CHECK-DAG: arith.constant dense<1.329228E+36> : vector<8xf32>
// CHECK-DAG: arith.constant 4.640000e+02 : f32
// CHECK-DAG: arith.constant 127 : i32
// CHECK-NOT: arith.extf
// CHECK-NOT: arith.truncf
// CHECK: arith.bitcast %{{.+}} : vector<8xf8E4M3FN> to vector<8xi8>
// CHECK: arith.bitcast %{{.+}} : i8 to f8E4M3FN
func.func @f8(%x: vector<8xf8E4M3FN>, %y: f32) -> (vector<8xf32>, f8E4M3FN) {
  %0 = arith.extf %x : vector<8xf8E4M3FN> to vector<8xf32>
  %1 = arith.truncf %y : f32 to f8E4M3FN
  return %0, %1 : vector<8xf32>, f8E4M3FN
}
