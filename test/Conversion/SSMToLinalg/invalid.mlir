// What the lowerings refuse: vector widths other than 256 and 512, chunks nobody
// bound.

// RUN: split-file %s %t
// RUN: not corey-opt %t/empty.mlir --convert-ssm-to-linalg=vector-bits=128 2>&1 | FileCheck %s --check-prefix=W128
// RUN: not corey-opt %t/empty.mlir --convert-ssm-to-linalg=vector-bits=-1 2>&1 | FileCheck %s --check-prefix=NEGATIVE
// RUN: not corey-opt %t/empty.mlir --convert-ssm-to-linalg=vector-bits=wide 2>&1 | FileCheck %s --check-prefix=WIDE
// RUN: not corey-opt %t/empty.mlir --corey-expand-math=vector-bits=1024 2>&1 | FileCheck %s --check-prefix=W1024
// RUN: corey-opt %t/empty.mlir --convert-ssm-to-linalg=vector-bits=0
// RUN: corey-opt %t/unbound.mlir --convert-ssm-to-linalg=vector-bits=256 --split-input-file --verify-diagnostics

// W128: error: expected vector-bits to be 0, 256 or 512, got 128
// NEGATIVE: error: expected vector-bits to be 0, 256 or 512, got -1
// WIDE: 'wide' value invalid for long argument!
// W1024: error: expected vector-bits to be 0, 256 or 512, got 1024

//--- empty.mlir
module {}

//--- unbound.mlir
func.func @scan(%u: tensor<?x?x8xf32>, %a: tensor<8x4xf32>, %b: tensor<?x?x1x4xf32>) -> tensor<?x?x8xf32> {
  // expected-error @below {{'ssm.selective_scan' op expected a bound chunk, got run-time site @scan; run ssm-bind-chunks first}}
  %y = ssm.selective_scan %u, %u, %a, %b, %b {chunk = #ssm.chunk<runtime = @scan>} : tensor<?x?x8xf32>, tensor<?x?x8xf32>,
      tensor<8x4xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x8xf32>
  return %y : tensor<?x?x8xf32>
}

// -----

func.func @ssd(%x: tensor<?x?x8x4xf32>, %decay: tensor<?x?x8xf32>, %b: tensor<?x?x1x16xf32>) -> tensor<?x?x8x4xf32> {
  // expected-error @below {{'ssm.ssd' op expected a bound chunk, got run-time site @layer0.scan; run ssm-bind-chunks first}}
  %y = ssm.ssd %x decay(%decay : tensor<?x?x8xf32>) B(%b) C(%b) {chunk = #ssm.chunk<runtime = @layer0.scan>}
      : tensor<?x?x8x4xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x8x4xf32>
  return %y : tensor<?x?x8x4xf32>
}

// -----

func.func @policy(%b: index, %l: index) -> index {
  // expected-error @below {{'ssm.bind_chunk' op expected a policy 'static:<tokens>', got 'static:0'}}
  %c = ssm.bind_chunk @site(%b, %l) {policy = "static:0"}
  return %c : index
}
