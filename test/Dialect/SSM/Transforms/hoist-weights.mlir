// ssm-hoist-weights: what depends on weights alone moves into @ssm.prepare; what
// stays; sharing; running it again.

// RUN: corey-opt %s --split-input-file --ssm-hoist-weights | FileCheck %s
// Nothing is left to do the second time.
// RUN: corey-opt %s --split-input-file --ssm-hoist-weights --ssm-hoist-weights | FileCheck %s
// RUN: corey-opt %s --split-input-file --ssm-hoist-weights --verify-roundtrip > /dev/null
// RUN: %if llvm-statistics %{ corey-opt %s --split-input-file --ssm-hoist-weights --mlir-pass-statistics 2>&1 >/dev/null | FileCheck %s --check-prefix=STATISTICS %}
// The prepared weights are arguments like others.
// RUN: corey-opt %s --split-input-file --ssm-hoist-weights --ssm-weights-to-arguments | FileCheck %s --check-prefix=ARGUMENTS

// STATISTICS: SSMHoistWeights
// STATISTICS-NEXT: (S) 2 num-hoisted
// STATISTICS-NEXT: (S) 1 num-prepared

// CHECK: ssm.weight @A_log : tensor<8x4xf32>
// CHECK-NEXT: ssm.weight @prepared0 {ssm.prepared} : tensor<8x4xf32>
// CHECK-NEXT: func.func @ssm.prepare() -> (tensor<8x4xf32> {ssm.prepares = "prepared0"}) {
// CHECK-NEXT: %[[W:.+]] = ssm.get_weight @A_log
// CHECK-NEXT: %[[E:.+]] = ssm.exp %[[W]]
// CHECK-NEXT: %[[A:.+]] = ssm.neg %[[E]]
// CHECK-NEXT: return %[[A]]
// CHECK-LABEL: func.func @main(
// CHECK-NEXT: %[[P:.+]] = ssm.get_weight @prepared0 : tensor<8x4xf32>
// CHECK-NEXT: ssm.selective_scan %{{.+}}, %{{.+}}, %[[P]],
// CHECK-NEXT: return
// ARGUMENTS: func.func @ssm.prepare(%{{.+}}: tensor<8x4xf32> {ssm.weight = "A_log"}) -> (tensor<8x4xf32> {ssm.prepares = "prepared0"})
// ARGUMENTS: func.func @main(%{{.+}}: tensor<?x?x1x4xf32>, %{{.+}}: tensor<8x4xf32> {ssm.weight = "prepared0"})
ssm.weight @A_log : tensor<8x4xf32>
func.func @main(%u: tensor<?x?x8xf32>, %b: tensor<?x?x1x4xf32>) -> tensor<?x?x8xf32> {
  %w = ssm.get_weight @A_log : tensor<8x4xf32>
  %e = ssm.exp %w : tensor<8x4xf32>
  %a = ssm.neg %e : tensor<8x4xf32>
  %y = ssm.selective_scan %u, %u, %a, %b, %b
      : tensor<?x?x8xf32>, tensor<?x?x8xf32>, tensor<8x4xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x8xf32>
  return %y : tensor<?x?x8xf32>
}

// -----

// A name that is taken is passed over. Two functions share what they have in
// common, and a value used on the way is a weight as well.
// CHECK: ssm.weight @prepared0 "key" : tensor<8xf32>
// CHECK-NEXT: ssm.weight @prepared1 {ssm.prepared} : tensor<8xf32>
// CHECK-NEXT: ssm.weight @prepared2 {ssm.prepared} : tensor<8xf32>
// CHECK-NEXT: func.func @ssm.prepare() -> (tensor<8xf32> {ssm.prepares = "prepared1"}, tensor<8xf32> {ssm.prepares = "prepared2"}) {
// CHECK: %[[E:.+]] = ssm.exp
// CHECK-NOT: ssm.exp
// CHECK: %[[N:.+]] = ssm.neg %[[E]]
// CHECK: return %[[E]], %[[N]]
// CHECK-LABEL: func.func @prefill(
// CHECK: %[[P:.+]] = ssm.get_weight @prepared1
// CHECK: %[[Q:.+]] = ssm.get_weight @prepared2
// CHECK: ssm.mul %{{.+}}, %[[P]]
// CHECK: ssm.add %{{.+}}, %[[Q]]
// CHECK-LABEL: func.func @decode(
// CHECK: %[[P:.+]] = ssm.get_weight @prepared2
// CHECK: ssm.mul %{{.+}}, %[[P]]
ssm.weight @prepared0 "key" : tensor<8xf32>
func.func @prefill(%x: tensor<?x8xf32>) -> tensor<?x8xf32> {
  %w = ssm.get_weight @prepared0 : tensor<8xf32>
  %e = ssm.exp %w : tensor<8xf32>
  %n = ssm.neg %e : tensor<8xf32>
  %0 = ssm.mul %x, %e : tensor<?x8xf32>, tensor<8xf32>
  %1 = ssm.add %0, %n : tensor<?x8xf32>, tensor<8xf32>
  return %1 : tensor<?x8xf32>
}
func.func @decode(%x: tensor<?x8xf32>) -> tensor<?x8xf32> {
  %w = ssm.get_weight @prepared0 : tensor<8xf32>
  %e = ssm.exp %w : tensor<8xf32>
  %n = ssm.neg %e : tensor<8xf32>
  %0 = ssm.mul %x, %n : tensor<?x8xf32>, tensor<8xf32>
  return %0 : tensor<?x8xf32>
}

// -----

// A plain use, a slice, a constant, what writes and what depends on an argument
// stay; a slice of something computed stays as well, and the source is prepared.
// CHECK-NOT: prepared1
// CHECK-LABEL: func.func @ssm.prepare()
// CHECK: %[[E:.+]] = ssm.exp
// CHECK-NEXT: return %[[E]] : tensor<8x8xf32>
// CHECK-LABEL: func.func @stay(
// CHECK: ssm.get_weight @w
// CHECK: tensor.extract_slice
// CHECK: linalg.fill
// CHECK: %[[P:.+]] = ssm.get_weight @prepared0 : tensor<8x8xf32>
// CHECK: tensor.extract_slice %[[P]]
// CHECK: ssm.observe @site
// CHECK: ssm.neg
ssm.weight @w : tensor<8x8xf32>
func.func @stay(%x: tensor<?x8xf32>) -> (tensor<?x4xf32>, tensor<?x4xf32>, tensor<4x8xf32>, tensor<8x8xf32>) {
  %w = ssm.get_weight @w : tensor<8x8xf32>
  %half = tensor.extract_slice %w[0, 0] [4, 8] [1, 1] : tensor<8x8xf32> to tensor<4x8xf32>
  %y = ssm.projection %x, %half : tensor<?x8xf32>, tensor<4x8xf32> -> tensor<?x4xf32>
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<4x8xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<4x8xf32>) -> tensor<4x8xf32>
  %e = ssm.exp %w : tensor<8x8xf32>
  %other = tensor.extract_slice %e[4, 0] [4, 8] [1, 1] : tensor<8x8xf32> to tensor<4x8xf32>
  %z = ssm.projection %x, %other : tensor<?x8xf32>, tensor<4x8xf32> -> tensor<?x4xf32>
  %o = ssm.observe @site %w : tensor<8x8xf32>
  %n = ssm.neg %o : tensor<8x8xf32>
  return %y, %z, %zeros, %n : tensor<?x4xf32>, tensor<?x4xf32>, tensor<4x8xf32>, tensor<8x8xf32>
}

// -----

// Nothing to prepare: nothing is added.
// CHECK-LABEL: module
// CHECK-NOT: ssm.prepare
// CHECK: func.func private @called(
// CHECK: ssm.exp
func.func private @called(%x: tensor<?x8xf32>) -> tensor<?x8xf32> {
  %0 = arith.constant dense<1.0> : tensor<8xf32>
  %1 = ssm.exp %0 : tensor<8xf32>
  %y = ssm.mul %x, %1 : tensor<?x8xf32>, tensor<8xf32>
  return %y : tensor<?x8xf32>
}
func.func @plain(%x: tensor<?x8xf32>) -> tensor<?x8xf32> {
  %0 = call @called(%x) : (tensor<?x8xf32>) -> tensor<?x8xf32>
  return %0 : tensor<?x8xf32>
}

// -----

// More work on prepared weights extends the function; what is used no more goes
// and leaves its name. Ops with regions and quantized results are no exception.
// CHECK: ssm.weight @prepared1 {ssm.prepared} : tensor<8x4xf32>
// CHECK-NEXT: ssm.weight @prepared0 {ssm.prepared} : tensor<4x8xi8>
// CHECK-NEXT: ssm.weight @prepared2 {ssm.prepared} : tensor<4xf32>
// CHECK-NEXT: func.func @ssm.prepare() -> (tensor<8x4xf32> {ssm.prepares = "prepared1"}, tensor<4x8xi8> {ssm.prepares = "prepared0"}, tensor<4xf32> {ssm.prepares = "prepared2"}) {
// CHECK: %[[E:.+]] = ssm.exp
// CHECK: %[[N:.+]] = ssm.neg
// CHECK: %[[T:.+]] = linalg.transpose ins(%[[E]]
// CHECK: %[[Q:.+]], %[[S:.+]] = ssm.quantize %[[T]] token
// CHECK: return %[[N]], %[[Q]], %[[S]]
// CHECK-LABEL: func.func @again(
// CHECK-DAG: %[[Q:.+]] = ssm.get_weight @prepared0
// CHECK-DAG: %[[S:.+]] = ssm.get_weight @prepared2
// CHECK: ssm.projection %{{.+}}, %[[Q]] weight_scale(%[[S]]
ssm.weight @w : tensor<8x4xf32>
ssm.weight @prepared0 {ssm.prepared} : tensor<8x4xf32>
ssm.weight @prepared1 {ssm.prepared} : tensor<8x4xf32>
func.func @ssm.prepare() -> (tensor<8x4xf32> {ssm.prepares = "prepared0"}, tensor<8x4xf32> {ssm.prepares = "prepared1"}) {
  %0 = ssm.get_weight @w : tensor<8x4xf32>
  %1 = ssm.exp %0 : tensor<8x4xf32>
  %2 = ssm.neg %0 : tensor<8x4xf32>
  return %1, %2 : tensor<8x4xf32>, tensor<8x4xf32>
}
func.func @again(%x: tensor<?x8xf32>, %z: tensor<8x4xf32>) -> (tensor<?x4xf32>, tensor<8x4xf32>) {
  %0 = ssm.get_weight @prepared0 : tensor<8x4xf32>
  %1 = ssm.get_weight @prepared1 : tensor<8x4xf32>
  %e = tensor.empty() : tensor<4x8xf32>
  %t = linalg.transpose ins(%0 : tensor<8x4xf32>) outs(%e : tensor<4x8xf32>) permutation = [1, 0]
  %q, %s = ssm.quantize %t token : tensor<4x8xf32> -> tensor<4x8xi8>, tensor<4xf32>
  %y = ssm.projection %x, %q weight_scale(%s : tensor<4xf32>) : tensor<?x8xf32>, tensor<4x8xi8> -> tensor<?x4xf32>
  %m = ssm.mul %z, %1 : tensor<8x4xf32>, tensor<8x4xf32>
  return %y, %m : tensor<?x4xf32>, tensor<8x4xf32>
}

// -----

// In control flow and in fused regions.
// CHECK-LABEL: func.func @nested(
// CHECK: ssm.fused
// CHECK: %[[P:.+]] = ssm.get_weight @prepared0
// CHECK-NEXT: ssm.mul %{{.+}}, %[[P]]
// CHECK: scf.if
// CHECK: %[[P:.+]] = ssm.get_weight @prepared0
// CHECK-NEXT: ssm.mul %{{.+}}, %[[P]]
ssm.weight @w : tensor<8xf32>
func.func @nested(%x: tensor<?x8xf32>, %c: i1) -> tensor<?x8xf32> {
  %f = ssm.fused ins(%x : tensor<?x8xf32>) -> tensor<?x8xf32> {
  ^bb0(%a: tensor<?x8xf32>):
    %w = ssm.get_weight @w : tensor<8xf32>
    %e = ssm.exp %w : tensor<8xf32>
    %0 = ssm.mul %a, %e : tensor<?x8xf32>, tensor<8xf32>
    ssm.yield %0 : tensor<?x8xf32>
  }
  %y = scf.if %c -> tensor<?x8xf32> {
    %w = ssm.get_weight @w : tensor<8xf32>
    %e = ssm.exp %w : tensor<8xf32>
    %0 = ssm.mul %f, %e : tensor<?x8xf32>, tensor<8xf32>
    scf.yield %0 : tensor<?x8xf32>
  } else {
    scf.yield %f : tensor<?x8xf32>
  }
  return %y : tensor<?x8xf32>
}
