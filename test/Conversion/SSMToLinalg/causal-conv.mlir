// Lowering of ssm.causal_conv: blocks of channels in parallel, the last W - 1
// inputs carried through the loop over tokens.

// RUN: corey-opt %s --convert-ssm-to-linalg=vector-bits=256 | FileCheck %s

// CHECK-LABEL: func.func @conv(
// CHECK-SAME: %[[X:[a-z0-9]+]]: tensor<?x?x8xf32>, %[[W:[a-z0-9]+]]: tensor<8x4xbf16>, %[[S0:[a-z0-9]+]]: tensor<?x3x8xf32>
// CHECK-DAG: %[[XB:.+]] = bufferization.to_buffer %[[X]] read_only
// CHECK-DAG: %[[SB:.+]] = bufferization.to_buffer %[[S0]] read_only
// CHECK-DAG: %[[Y:.+]] = memref.alloc(%{{.+}}, %{{.+}}) {alignment = 64 : i64} : memref<?x?x8xf32>
// CHECK: %[[LAST:.+]] = memref.alloc(%{{.+}}) {alignment = 64 : i64} : memref<?x3x8xf32>
// CHECK: scf.parallel
// CHECK: %[[TAPS:.+]] = memref.alloca() {alignment = 64 : i64} : memref<4x8xf32>
// CHECK: arith.extf %{{.+}} : bf16 to f32
// CHECK: %[[W0:.+]] = vector.load %[[TAPS]]
// CHECK-COUNT-2: vector.load %[[TAPS]]
// CHECK: %[[W3:.+]] = vector.load %[[TAPS]]
// CHECK-COUNT-3: vector.load %[[SB]]
// CHECK: %[[WINDOW:.+]]:3 = scf.for %[[T:.+]] = %{{.+}} to %{{.+}} step %{{.+}} iter_args(%[[A:[a-z0-9]+]] = %{{.+}}, %[[B:[a-z0-9]+]] = %{{.+}}, %[[C:[a-z0-9]+]] = %{{.+}}) -> (vector<8xf32>, vector<8xf32>, vector<8xf32>) {
// CHECK: %[[NEW:.+]] = vector.load %[[XB]][%{{.+}}, %[[T]], %{{.+}}]
// CHECK: math.fma %[[W0]], %[[A]], %{{.+}}
// CHECK-COUNT-2: math.fma
// CHECK: math.fma %[[W3]], %[[NEW]], %{{.+}}
// CHECK: vector.store %{{.+}}, %[[Y]][%{{.+}}, %[[T]], %{{.+}}]
// The window moves by one.
// CHECK: scf.yield %[[B]], %[[C]], %[[NEW]]
// CHECK: vector.store %[[WINDOW]]#0, %[[LAST]]
// CHECK: vector.store %[[WINDOW]]#1, %[[LAST]]
// CHECK: vector.store %[[WINDOW]]#2, %[[LAST]]
func.func @conv(%x: tensor<?x?x8xf32>, %w: tensor<8x4xbf16>, %s0: tensor<?x3x8xf32>) -> (tensor<?x?x8xf32>, tensor<?x3x8xf32>) {
  %y, %s = ssm.causal_conv %x, %w initial_state(%s0 : tensor<?x3x8xf32>)
      : tensor<?x?x8xf32>, tensor<8x4xbf16> -> tensor<?x?x8xf32>, tensor<?x3x8xf32>
  return %y, %s : tensor<?x?x8xf32>, tensor<?x3x8xf32>
}

// A bias is what a sum starts from; silu divides.
// CHECK-LABEL: func.func @bias_silu(
// CHECK-SAME: %{{.+}}: tensor<?x?x3xf32>, %{{.+}}: tensor<3x2xf32>, %[[BIAS:.+]]: tensor<3xf32>)
// CHECK: %[[BB:.+]] = bufferization.to_buffer %[[BIAS]] read_only
// CHECK: %[[START:.+]] = vector.load %[[BB]]{{.*}} vector<3xf32>
// CHECK: scf.for
// CHECK: math.fma %{{.+}}, %{{.+}}, %[[START]] : vector<3xf32>
// CHECK: arith.divf %{{.+}}, %{{.+}} : vector<3xf32>
func.func @bias_silu(%x: tensor<?x?x3xf32>, %w: tensor<3x2xf32>, %bias: tensor<3xf32>) -> tensor<?x?x3xf32> {
  %y = ssm.causal_conv %x, %w bias(%bias : tensor<3xf32>) {silu} : tensor<?x?x3xf32>, tensor<3x2xf32> -> tensor<?x?x3xf32>
  return %y : tensor<?x?x3xf32>
}
