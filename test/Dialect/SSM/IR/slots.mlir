// States that lie in a pool: text, bytecode, shapes, canonical form.

// RUN: corey-opt %s --verify-roundtrip | FileCheck %s
// RUN: corey-opt %s -mlir-print-op-generic | corey-opt | FileCheck %s
// RUN: corey-opt %s --emit-bytecode | corey-opt | FileCheck %s
// RUN: corey-opt %s --canonicalize | FileCheck %s --check-prefix=CANON
// RUN: corey-opt %s --ssm-shape-functions --canonicalize --cse | FileCheck %s --check-prefix=SHAPES

// The pool has a size of its own, which is the result's: that of argument 3,
// dimension 9. There are as many slots, dimension 12, as sequences.
// SHAPES-LABEL: func.func @scan.shapes(
// SHAPES-SAME: %[[IN:.+]]: memref<?xindex>, %[[OUT:.+]]: memref<?xindex>)
// SHAPES-SAME: [4, 0, 0, 0, "B"]
// SHAPES-DAG: %[[R:.+]] = memref.load %[[IN]][%c9]
// SHAPES: memref.store %[[R]], %[[OUT]][%c3]
// CHECK-LABEL: func.func @scan(
// CHECK-SAME: %[[POOL:[a-z0-9_]+]]: tensor<?x8x4xbf16>, %[[SLOTS:[a-z0-9_]+]]: tensor<?xi32>
// CHECK: ssm.selective_scan {{.+}} initial_state(%[[POOL]] : tensor<?x8x4xbf16>) slots(%[[SLOTS]] : tensor<?xi32>) {delta_softplus} :
// CHECK-SAME: -> tensor<?x?x8xf32>, tensor<?x8x4xbf16>{{$}}
func.func @scan(%u: tensor<?x?x8xf32>, %a: tensor<8x4xf32>, %b: tensor<?x?x1x4xf32>,
                %pool: tensor<?x8x4xbf16>, %slots: tensor<?xi32>) -> (tensor<?x?x8xf32>, tensor<?x8x4xbf16>) {
  %y, %next = ssm.selective_scan %u, %u, %a, %b, %b initial_state(%pool : tensor<?x8x4xbf16>) slots(%slots : tensor<?xi32>)
      {delta_softplus} : tensor<?x?x8xf32>, tensor<?x?x8xf32>, tensor<8x4xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32>
      -> tensor<?x?x8xf32>, tensor<?x8x4xbf16>
  return %y, %next : tensor<?x?x8xf32>, tensor<?x8x4xbf16>
}

// CHECK-LABEL: func.func @ssd(
// CHECK-SAME: %[[POOL:[a-z0-9_]+]]: tensor<7x2x8x4xf32>, %[[SLOTS:[a-z0-9_]+]]: tensor<3xi32>, %[[K:[a-z0-9_]+]]: index
// CHECK: ssm.ssd {{.+}} initial_states(%[[POOL]] : tensor<7x2x8x4xf32>) slots(%[[SLOTS]] : tensor<3xi32>) chunk_size(%[[K]]) :
// CHECK-SAME: -> tensor<3x?x2x8xf32>, tensor<7x2x8x4xf32>{{$}}
func.func @ssd(%x: tensor<3x?x2x8xf32>, %d: tensor<3x?x2xf32>, %b: tensor<3x?x1x4xf32>, %pool: tensor<7x2x8x4xf32>,
               %slots: tensor<3xi32>, %k: index) -> (tensor<3x?x2x8xf32>, tensor<7x2x8x4xf32>) {
  %y, %next = ssm.ssd %x decay(%d : tensor<3x?x2xf32>) B(%b) C(%b) initial_states(%pool : tensor<7x2x8x4xf32>)
      slots(%slots : tensor<3xi32>) chunk_size(%k)
      : tensor<3x?x2x8xf32>, tensor<3x?x1x4xf32>, tensor<3x?x1x4xf32> -> tensor<3x?x2x8xf32>, tensor<7x2x8x4xf32>
  return %y, %next : tensor<3x?x2x8xf32>, tensor<7x2x8x4xf32>
}

// With packed sequences there is a slot for each start.
// CHECK-LABEL: func.func @conv(
// CHECK-SAME: %[[POOL:[a-z0-9_]+]]: tensor<?x3x8xf32>, %[[SLOTS:[a-z0-9_]+]]: tensor<5xi32>, %[[STARTS:[a-z0-9_]+]]: tensor<5xi32>
// CHECK: ssm.causal_conv {{.+}} initial_state(%[[POOL]] : tensor<?x3x8xf32>) slots(%[[SLOTS]] : tensor<5xi32>)
// CHECK-SAME: seq_starts(%[[STARTS]] : tensor<5xi32>) : {{.+}} -> tensor<1x?x8xf32>, tensor<?x3x8xf32>{{$}}
func.func @conv(%x: tensor<1x?x8xf32>, %w: tensor<8x4xf32>, %pool: tensor<?x3x8xf32>, %slots: tensor<5xi32>,
                %starts: tensor<5xi32>) -> (tensor<1x?x8xf32>, tensor<?x3x8xf32>) {
  %y, %next = ssm.causal_conv %x, %w initial_state(%pool : tensor<?x3x8xf32>) slots(%slots : tensor<5xi32>)
      seq_starts(%starts : tensor<5xi32>) : tensor<1x?x8xf32>, tensor<8x4xf32> -> tensor<1x?x8xf32>, tensor<?x3x8xf32>
  return %y, %next : tensor<1x?x8xf32>, tensor<?x3x8xf32>
}

// A pool that is only read from; an updated one that nobody wants is dropped.
// CANON-LABEL: func.func @reads_only(
// CANON: ssm.causal_conv {{.+}} slots(%{{.+}} : tensor<?xi32>) : {{.+}} -> tensor<?x?x8xf32>{{$}}
func.func @reads_only(%x: tensor<?x?x8xf32>, %w: tensor<8x4xf32>, %pool: tensor<?x3x8xf32>, %slots: tensor<?xi32>)
    -> tensor<?x?x8xf32> {
  %y, %next = ssm.causal_conv %x, %w initial_state(%pool : tensor<?x3x8xf32>) slots(%slots : tensor<?xi32>)
      : tensor<?x?x8xf32>, tensor<8x4xf32> -> tensor<?x?x8xf32>, tensor<?x3x8xf32>
  return %y : tensor<?x?x8xf32>
}
