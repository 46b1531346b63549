// Elementwise ops become one linalg.generic: operands widened to f32, the op's
// arithmetic, the result rounded.

// RUN: corey-opt %s --convert-ssm-to-linalg=vector-bits=256 | FileCheck %s

// CHECK-DAG: #[[$FULL:.+]] = affine_map<(d0, d1, d2) -> (d0, d1, d2)>
// CHECK-DAG: #[[$LAST:.+]] = affine_map<(d0, d1, d2) -> (d2)>
// CHECK-DAG: #[[$LAST2:.+]] = affine_map<(d0, d1, d2) -> (d1, d2)>
// CHECK-DAG: #[[$SCALAR:.+]] = affine_map<(d0, d1, d2) -> ()>
// CHECK-DAG: #[[$EMPTY:.+]] = affine_map<() -> ()>

// CHECK-LABEL: func.func @neg(
// CHECK-SAME: %[[X:.+]]: tensor<?x2x8xf32>)
// CHECK: %[[B:.+]] = tensor.dim %[[X]], %{{.+}} : tensor<?x2x8xf32>
// CHECK: %[[INIT:.+]] = tensor.empty(%[[B]]) : tensor<?x2x8xf32>
// CHECK: %[[Y:.+]] = linalg.generic {indexing_maps = [#[[$FULL]], #[[$FULL]]], iterator_types = ["parallel", "parallel", "parallel"]}
// CHECK-SAME: ins(%[[X]] : tensor<?x2x8xf32>) outs(%[[INIT]] : tensor<?x2x8xf32>)
// CHECK-NEXT: ^bb0(%[[IN:.+]]: f32, %{{.+}}: f32):
// CHECK-NEXT: %[[R:.+]] = arith.negf %[[IN]] : f32
// CHECK-NEXT: linalg.yield %[[R]] : f32
// CHECK: return %[[Y]]
func.func @neg(%x: tensor<?x2x8xf32>) -> tensor<?x2x8xf32> {
  %y = ssm.neg %x : tensor<?x2x8xf32>
  return %y : tensor<?x2x8xf32>
}

// CHECK-LABEL: func.func @exp(
// CHECK: ^bb0(%[[IN:.+]]: f32, %{{.+}}: f32):
// CHECK-NEXT: %[[R:.+]] = math.exp %[[IN]] : f32
// CHECK-NEXT: linalg.yield %[[R]]
func.func @exp(%x: tensor<8xf32>) -> tensor<8xf32> {
  %y = ssm.exp %x : tensor<8xf32>
  return %y : tensor<8xf32>
}

// x / (1 + exp(-x))
// CHECK-LABEL: func.func @silu(
// CHECK: ^bb0(%[[IN:.+]]: f32, %{{.+}}: f32):
// CHECK: %[[ONE:.+]] = arith.constant 1.000000e+00 : f32
// CHECK: %[[N:.+]] = arith.negf %[[IN]] : f32
// CHECK: %[[E:.+]] = math.exp %[[N]] : f32
// CHECK: %[[S:.+]] = arith.addf %[[ONE]], %[[E]] : f32
// CHECK: %[[R:.+]] = arith.divf %[[IN]], %[[S]] : f32
// CHECK: linalg.yield %[[R]]
func.func @silu(%x: tensor<8xf32>) -> tensor<8xf32> {
  %y = ssm.silu %x : tensor<8xf32>
  return %y : tensor<8xf32>
}

// 1 / (1 + exp(-x))
// CHECK-LABEL: func.func @sigmoid(
// CHECK: ^bb0(%[[IN:.+]]: f32, %{{.+}}: f32):
// CHECK: %[[ONE:.+]] = arith.constant 1.000000e+00 : f32
// CHECK: %[[N:.+]] = arith.negf %[[IN]] : f32
// CHECK: %[[E:.+]] = math.exp %[[N]] : f32
// CHECK: %[[S:.+]] = arith.addf %[[ONE]], %[[E]] : f32
// CHECK: %[[R:.+]] = arith.divf %[[ONE]], %[[S]] : f32
// CHECK: linalg.yield %[[R]]
func.func @sigmoid(%x: tensor<8xf32>) -> tensor<8xf32> {
  %y = ssm.sigmoid %x : tensor<8xf32>
  return %y : tensor<8xf32>
}

// max(x, 0) + log1p(exp(-|x|))
// CHECK-LABEL: func.func @softplus(
// CHECK: ^bb0(%[[IN:.+]]: f32, %{{.+}}: f32):
// CHECK: %[[ZERO:.+]] = arith.constant 0.000000e+00 : f32
// CHECK: %[[P:.+]] = arith.maximumf %[[IN]], %[[ZERO]] : f32
// CHECK: %[[A:.+]] = math.absf %[[IN]] : f32
// CHECK: %[[N:.+]] = arith.negf %[[A]] : f32
// CHECK: %[[E:.+]] = math.exp %[[N]] : f32
// CHECK: %[[L:.+]] = math.log1p %[[E]] : f32
// CHECK: %[[R:.+]] = arith.addf %[[P]], %[[L]] : f32
// CHECK: linalg.yield %[[R]]
func.func @softplus(%x: tensor<8xf32>) -> tensor<8xf32> {
  %y = ssm.softplus %x : tensor<8xf32>
  return %y : tensor<8xf32>
}

// x / 2 (1 + erf(x / sqrt(2)))
// CHECK-LABEL: func.func @gelu(
// CHECK: ^bb0(%[[IN:.+]]: f32, %{{.+}}: f32):
// CHECK-DAG: %[[HALF:.+]] = arith.constant 5.000000e-01 : f32
// CHECK-DAG: %[[ONE:.+]] = arith.constant 1.000000e+00 : f32
// CHECK-DAG: %[[ROOT:.+]] = arith.constant 0.707106769 : f32
// CHECK: %[[Q:.+]] = arith.mulf %[[IN]], %[[ROOT]] : f32
// CHECK: %[[E:.+]] = math.erf %[[Q]] : f32
// CHECK: %[[S:.+]] = arith.addf %[[ONE]], %[[E]] : f32
// CHECK: %[[H:.+]] = arith.mulf %[[HALF]], %[[IN]] : f32
// CHECK: %[[R:.+]] = arith.mulf %[[H]], %[[S]] : f32
// CHECK: linalg.yield %[[R]]
func.func @gelu(%x: tensor<8xf32>) -> tensor<8xf32> {
  %y = ssm.gelu %x : tensor<8xf32>
  return %y : tensor<8xf32>
}

// rhs stands on the trailing axes; both are widened, the result is of lhs's type.
// CHECK-LABEL: func.func @add(
// CHECK-SAME: %[[X:.+]]: tensor<?x?x8xbf16>, %[[V:.+]]: tensor<8xf16>)
// CHECK: linalg.generic {indexing_maps = [#[[$FULL]], #[[$LAST]], #[[$FULL]]]
// CHECK-SAME: ins(%[[X]], %[[V]] : tensor<?x?x8xbf16>, tensor<8xf16>) outs(%{{.+}} : tensor<?x?x8xbf16>)
// CHECK-NEXT: ^bb0(%[[L:.+]]: bf16, %[[R:.+]]: f16, %{{.+}}: bf16):
// CHECK-NEXT: %[[WL:.+]] = arith.extf %[[L]] : bf16 to f32
// CHECK-NEXT: %[[WR:.+]] = arith.extf %[[R]] : f16 to f32
// CHECK-NEXT: %[[S:.+]] = arith.addf %[[WL]], %[[WR]] : f32
// CHECK-NEXT: %[[N:.+]] = arith.truncf %[[S]] : f32 to bf16
// CHECK-NEXT: linalg.yield %[[N]] : bf16
func.func @add(%x: tensor<?x?x8xbf16>, %v: tensor<8xf16>) -> tensor<?x?x8xbf16> {
  %y = ssm.add %x, %v : tensor<?x?x8xbf16>, tensor<8xf16>
  return %y : tensor<?x?x8xbf16>
}

// CHECK-LABEL: func.func @sub(
// CHECK: linalg.generic {indexing_maps = [#[[$FULL]], #[[$LAST2]], #[[$FULL]]]
// CHECK-NEXT: ^bb0(%[[L:.+]]: f32, %[[R:.+]]: f32, %{{.+}}: f32):
// CHECK-NEXT: arith.subf %[[L]], %[[R]] : f32
func.func @sub(%x: tensor<?x?x8xf32>, %v: tensor<?x8xf32>) -> tensor<?x?x8xf32> {
  %y = ssm.sub %x, %v : tensor<?x?x8xf32>, tensor<?x8xf32>
  return %y : tensor<?x?x8xf32>
}

// CHECK-LABEL: func.func @mul(
// CHECK: linalg.generic {indexing_maps = [#[[$FULL]], #[[$SCALAR]], #[[$FULL]]]
// CHECK-NEXT: ^bb0(%[[L:.+]]: f32, %[[R:.+]]: f32, %{{.+}}: f32):
// CHECK-NEXT: arith.mulf %[[L]], %[[R]] : f32
func.func @mul(%x: tensor<?x?x8xf32>, %v: tensor<f32>) -> tensor<?x?x8xf32> {
  %y = ssm.mul %x, %v : tensor<?x?x8xf32>, tensor<f32>
  return %y : tensor<?x?x8xf32>
}

// A cast is the conversion alone; between the halves it goes through f32.
// CHECK-LABEL: func.func @cast(
// CHECK: ^bb0(%[[IN:.+]]: f16, %{{.+}}: bf16):
// CHECK-NEXT: %[[W:.+]] = arith.extf %[[IN]] : f16 to f32
// CHECK-NEXT: %[[N:.+]] = arith.truncf %[[W]] : f32 to bf16
// CHECK-NEXT: linalg.yield %[[N]] : bf16
func.func @cast(%x: tensor<?x8xf16>) -> tensor<?x8xbf16> {
  %y = ssm.cast %x : tensor<?x8xf16> to tensor<?x8xbf16>
  return %y : tensor<?x8xbf16>
}

// CHECK-LABEL: func.func @scale(
// CHECK: linalg.generic {indexing_maps = [#[[$EMPTY]], #[[$EMPTY]]], iterator_types = []}
// CHECK-NEXT: ^bb0(%[[IN:.+]]: bf16, %{{.+}}: bf16):
// CHECK: %[[W:.+]] = arith.extf %[[IN]] : bf16 to f32
// CHECK: %[[F:.+]] = arith.constant 1.000000e-01 : f32
// CHECK: %[[P:.+]] = arith.mulf %[[W]], %[[F]] : f32
// CHECK: arith.truncf %[[P]] : f32 to bf16
func.func @scale(%x: tensor<bf16>) -> tensor<bf16> {
  %y = ssm.scale %x by 0.1 : tensor<bf16>
  return %y : tensor<bf16>
}

// Chains stay separate generics, which linalg's passes fuse; a fused region is
// its contents.
// CHECK-LABEL: func.func @fused(
// CHECK-NOT: ssm.
// CHECK: linalg.generic
// CHECK: arith.mulf
// CHECK: linalg.generic
// CHECK: math.exp
// CHECK: linalg.generic
// CHECK: arith.negf
// CHECK: return
func.func @fused(%x: tensor<?x8xf32>, %v: tensor<8xf32>) -> tensor<?x8xf32> {
  %y = ssm.fused ins(%x, %v : tensor<?x8xf32>, tensor<8xf32>) -> tensor<?x8xf32> {
  ^bb0(%a: tensor<?x8xf32>, %b: tensor<8xf32>):
    %0 = ssm.mul %a, %b : tensor<?x8xf32>, tensor<8xf32>
    %1 = ssm.fused ins(%0 : tensor<?x8xf32>) -> tensor<?x8xf32> {
    ^bb0(%c: tensor<?x8xf32>):
      %2 = ssm.exp %c : tensor<?x8xf32>
      ssm.yield %2 : tensor<?x8xf32>
    }
    %3 = ssm.neg %1 : tensor<?x8xf32>
    ssm.yield %3 : tensor<?x8xf32>
  }
  return %y : tensor<?x8xf32>
}
