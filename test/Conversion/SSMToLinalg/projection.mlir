// Lowering of ssm.projection: up to four rows stream the weights as they are,
// more go through the run time's matrix product in f32.

// RUN: corey-opt %s --convert-ssm-to-linalg=vector-bits=512 | FileCheck %s
// RUN: corey-opt %s --convert-ssm-to-linalg=vector-bits=512 --canonicalize --cse | FileCheck %s --check-prefix=GEMM

// CHECK: func.func private @corey_rt_gemm(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64)

// CHECK-LABEL: func.func @plain(
// CHECK-SAME: %[[X:.+]]: tensor<?x?x32xf32>, %[[W:.+]]: tensor<4x32xf32>)
// CHECK-DAG: %[[XB:.+]] = bufferization.to_buffer %[[X]] read_only
// CHECK-DAG: %[[WB:.+]] = bufferization.to_buffer %[[W]] read_only
// CHECK-DAG: %[[Y:.+]] = memref.alloc(%{{.+}}, %{{.+}}) {alignment = 64 : i64} : memref<?x?x4xf32>
// CHECK: %[[ROWS:.+]] = arith.muli
// CHECK: %[[LIMIT:.+]] = arith.constant 4 : index
// CHECK: %[[FEW:.+]] = arith.cmpi sle, %[[ROWS]], %[[LIMIT]] : index
// CHECK: scf.if %[[FEW]] {
// Outputs in parallel, four at a time, the rows inside; the lines of the weights
// of the next four are prefetched.
// CHECK: scf.parallel
// CHECK: scf.for %[[M:[a-z0-9]+]] =
// CHECK: scf.for
// CHECK: scf.for
// CHECK: %{{.+}}:4 = scf.for %[[I:[a-z0-9]+]] = {{.*}} -> (vector<16xf32>, vector<16xf32>, vector<16xf32>, vector<16xf32>) {
// CHECK-COUNT-4: memref.prefetch %[[WB]]
// CHECK: vector.load %[[XB]][%{{.+}}, %{{.+}}, %[[I]]]
// CHECK-NOT: vector.load %[[XB]]
// CHECK: vector.load %[[WB]][%[[M]], %[[I]]]
// CHECK-COUNT-4: math.fma
// CHECK: vector.shuffle
// CHECK: memref.store %{{.+}}, %[[Y]][%{{.+}}, %{{.+}}, %[[M]]]
// CHECK: } else {
// No copies of f32 operands.
// CHECK-NOT: memref.alloc
// CHECK: memref.extract_aligned_pointer_as_index %[[XB]]
// CHECK: memref.extract_aligned_pointer_as_index %[[WB]]
// CHECK: memref.extract_aligned_pointer_as_index %[[Y]]
// CHECK: func.call @corey_rt_gemm(
// Sizes [B, L, M, K], strides of x, of the weight and of y; 0 overwrites.
// GEMM-LABEL: func.func @plain(
// GEMM-DAG: %[[B:.+]] = arith.index_cast %dim : index to i64
// GEMM-DAG: %[[L:.+]] = arith.index_cast %dim_{{[0-9]+}} : index to i64
// GEMM: func.call @corey_rt_gemm(%{{.+}}, %{{.+}}, %{{.+}}, %[[B]], %[[L]], %c4_i64, %c32_i64,
// GEMM-SAME: %c4_i64, %c0_i64) :
func.func @plain(%x: tensor<?x?x32xf32>, %w: tensor<4x32xf32>) -> tensor<?x?x4xf32> {
  %y = ssm.projection %x, %w : tensor<?x?x32xf32>, tensor<4x32xf32> -> tensor<?x?x4xf32>
  return %y : tensor<?x?x4xf32>
}

// A bias or residual is put into the output first, and the product added to it.
// CHECK-LABEL: func.func @accumulate(
// CHECK-SAME: %{{.+}}: tensor<?x32xf32>, %{{.+}}: tensor<4x32xf32>, %[[BIAS:.+]]: tensor<4xf32>, %[[R:.+]]: tensor<?x4xf32>)
// CHECK-DAG: %[[BB:.+]] = bufferization.to_buffer %[[BIAS]] read_only
// CHECK-DAG: %[[RB:.+]] = bufferization.to_buffer %[[R]] read_only
// CHECK-DAG: %[[Y:.+]] = memref.alloc({{.*}}) {alignment = 64 : i64} : memref<?x4xf32>
// CHECK: scf.if
// CHECK: memref.load %[[BB]]
// CHECK: memref.load %[[RB]]
// CHECK: } else {
// CHECK: vector.load %[[BB]]
// CHECK: vector.load %[[RB]]
// CHECK: vector.store %{{.+}}, %[[Y]]
// CHECK: func.call @corey_rt_gemm(
// GEMM-LABEL: func.func @accumulate(
// GEMM: func.call @corey_rt_gemm({{.*}}, %c1_i64) :
func.func @accumulate(%x: tensor<?x32xf32>, %w: tensor<4x32xf32>, %bias: tensor<4xf32>, %r: tensor<?x4xf32>) -> tensor<?x4xf32> {
  %y = ssm.projection %x, %w bias(%bias : tensor<4xf32>) residual(%r : tensor<?x4xf32>)
      : tensor<?x32xf32>, tensor<4x32xf32> -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}

// Narrow operands are streamed in their own type, or widened into f32 copies,
// which are freed; so is an output that is not f32.
// CHECK-LABEL: func.func @narrow(
// CHECK: scf.if
// CHECK: vector.load {{.*}} vector<16xbf16>
// CHECK: arith.extf %{{.+}} : vector<16xbf16> to vector<16xf32>
// CHECK: vector.load {{.*}} vector<16xf16>
// CHECK: } else {
// CHECK: %[[X:.+]] = memref.alloc(%{{.+}}) {alignment = 64 : i64} : memref<?x32xf32>
// CHECK: vector.store %{{.+}}, %[[X]]
// CHECK: %[[W:.+]] = memref.alloc() {alignment = 64 : i64} : memref<4x32xf32>
// CHECK: vector.store %{{.+}}, %[[W]]
// CHECK: %[[Y:.+]] = memref.alloc(%{{.+}}) {alignment = 64 : i64} : memref<?x4xf32>
// CHECK: func.call @corey_rt_gemm
// CHECK: vector.load %[[Y]]
// CHECK: arith.truncf {{.*}} to vector<4xbf16>
// CHECK-DAG: memref.dealloc %[[X]]
// CHECK-DAG: memref.dealloc %[[W]]
// CHECK-DAG: memref.dealloc %[[Y]]
func.func @narrow(%x: tensor<?x32xbf16>, %w: tensor<4x32xf16>) -> tensor<?x4xbf16> {
  %y = ssm.projection %x, %w : tensor<?x32xbf16>, tensor<4x32xf16> -> tensor<?x4xbf16>
  return %y : tensor<?x4xbf16>
}

// A quantized weight: the scale of its row multiplies the sum of a stream, or the
// widened row.
// CHECK-LABEL: func.func @quantized(
// CHECK-SAME: %{{.+}}: tensor<?x32xf32>, %[[W:.+]]: tensor<4x32xi8>, %[[S:.+]]: tensor<4xf32>)
// CHECK-DAG: %[[WB:.+]] = bufferization.to_buffer %[[W]] read_only
// CHECK-DAG: %[[SB:.+]] = bufferization.to_buffer %[[S]] read_only
// CHECK: scf.if
// CHECK: scf.for %[[M:[a-z0-9]+]] =
// CHECK: vector.load %[[WB]]{{.*}} vector<16xi8>
// CHECK: arith.sitofp %{{.+}} : vector<16xi8> to vector<16xf32>
// CHECK: %[[F:.+]] = memref.load %[[SB]][%[[M]]]
// CHECK: arith.mulf %{{.+}}, %[[F]]
// CHECK: } else {
// CHECK: memref.load %[[SB]]
// CHECK: arith.sitofp
// CHECK: func.call @corey_rt_gemm
func.func @quantized(%x: tensor<?x32xf32>, %w: tensor<4x32xi8>, %s: tensor<4xf32>) -> tensor<?x4xf32> {
  %y = ssm.projection %x, %w weight_scale(%s : tensor<4xf32>) : tensor<?x32xf32>, tensor<4x32xi8> -> tensor<?x4xf32>
  return %y : tensor<?x4xf32>
}

// Axes before the last three are loops around the product.
// CHECK-LABEL: func.func @outer(
// CHECK: } else {
// CHECK: scf.for
// CHECK: scf.for
// CHECK: func.call @corey_rt_gemm
func.func @outer(%x: tensor<?x?x3x5x32xf32>, %w: tensor<4x32xf32>) -> tensor<?x?x3x5x4xf32> {
  %y = ssm.projection %x, %w : tensor<?x?x3x5x32xf32>, tensor<4x32xf32> -> tensor<?x?x3x5x4xf32>
  return %y : tensor<?x?x3x5x4xf32>
}

// A region that only a GPU makes one kernel of is taken apart.
// CHECK-LABEL: func.func @apart(
// CHECK-NOT: ssm.
// CHECK: return
func.func @apart(%x: tensor<?x1x16xf32>, %g: tensor<16xf32>, %w: tensor<8x16xf16>) -> tensor<?x1x8xf16> {
  %y = ssm.fused ins(%x, %g, %w : tensor<?x1x16xf32>, tensor<16xf32>, tensor<8x16xf16>) -> tensor<?x1x8xf16> {
  ^bb0(%a: tensor<?x1x16xf32>, %b: tensor<16xf32>, %c: tensor<8x16xf16>):
    %n = ssm.rms_norm %a, %b : tensor<?x1x16xf32>, tensor<16xf32> -> tensor<?x1x16xf32>
    %h = ssm.cast %n : tensor<?x1x16xf32> to tensor<?x1x16xf16>
    %p = ssm.projection %h, %c : tensor<?x1x16xf16>, tensor<8x16xf16> -> tensor<?x1x8xf16>
    ssm.yield %p : tensor<?x1x8xf16>
  }
  return %y : tensor<?x1x8xf16>
}
