// What is observed in a region is observed before it: the region stays a kernel.

// RUN: corey-opt %s --split-input-file --ssm-fuse="strategy=none" --remarks-filter=ssm-fuse 2>%t.remarks | FileCheck %s
// RUN: FileCheck %s --check-prefix=REMARK --input-file=%t.remarks --implicit-check-not=remark:
// RUN: corey-opt %s --split-input-file --ssm-fuse="strategy=none" --ssm-fuse="strategy=none" | FileCheck %s
// Once is enough, and every region but the last is a kernel then.
// RUN: corey-opt %s --split-input-file --ssm-fuse="strategy=none" --canonicalize -o %t.once.mlir
// RUN: corey-opt %t.once.mlir --split-input-file --ssm-fuse="strategy=none" --remarks-filter=ssm-fuse 2>&1 >/dev/null | FileCheck %s --check-prefix=AGAIN --implicit-check-not=remark:
// AGAIN: remark: [Missed] region | {{.*}}Function=refused

// CHECK-LABEL: func.func @argument(
// CHECK-SAME: %[[X:[a-z0-9]+]]: tensor<?x8xf32>
// CHECK: %[[S:.+]] = ssm.observe @site %[[X]] {kept} : tensor<?x8xf32>
// CHECK-NEXT: ssm.fused ins(%[[S]] :
// CHECK-NEXT: ^bb0(%[[A:.+]]: tensor<?x8xf32>):
// CHECK-NEXT: ssm.exp %[[A]]
// CHECK-NEXT: ssm.add %{{.+}}, %[[A]]
func.func @argument(%x: tensor<?x8xf32>) -> tensor<?x8xf32> {
  %y = ssm.fused ins(%x : tensor<?x8xf32>) -> tensor<?x8xf32> {
  ^bb0(%a: tensor<?x8xf32>):
    %o = ssm.observe @site %a {kept} : tensor<?x8xf32>
    %0 = ssm.exp %o : tensor<?x8xf32>
    %1 = ssm.add %0, %a : tensor<?x8xf32>, tensor<?x8xf32>
    ssm.yield %1 : tensor<?x8xf32>
  }
  return %y : tensor<?x8xf32>
}

// -----

// The input of a scan is made in the region: it is made by a kernel of its own.
// The step, the skip connection and the gate stay with the scan; what both need
// is computed in both.
// CHECK-LABEL: func.func @made(
// CHECK-SAME: %[[X:[a-z0-9]+]]: tensor<?x?x8xf32>, %[[V:[a-z0-9]+]]: tensor<8xf32>
// CHECK: %[[U:.+]] = ssm.fused ins(%[[X]], %[[V]] : tensor<?x?x8xf32>, tensor<8xf32>) -> tensor<?x?x8xf32> {
// CHECK-NEXT: ^bb0(%[[X0:.+]]: tensor<?x?x8xf32>, %[[V0:.+]]: tensor<8xf32>):
// CHECK-NEXT: %[[T0:.+]] = ssm.mul %[[X0]], %[[V0]]
// CHECK-NEXT: %[[U0:.+]] = ssm.silu %[[T0]]
// CHECK-NEXT: ssm.yield %[[U0]]
// CHECK: %[[S:.+]] = ssm.observe @scan %[[U]]
// CHECK-NEXT: ssm.fused ins(%[[X]], %[[V]], %{{.+}}, %{{.+}}, %[[S]] : {{.*}}) score(<entropy = 5.0
// CHECK-NEXT: ^bb0(%[[X1:.+]]: tensor<?x?x8xf32>, %[[V1:.+]]: tensor<8xf32>, %{{.+}}: tensor<8x4xf32>, %{{.+}}: tensor<?x?x1x4xf32>, %[[U1:.+]]: tensor<?x?x8xf32>):
// CHECK: %[[T1:.+]] = ssm.mul %[[X1]], %[[V1]]
// CHECK: tensor.dim %[[U1]]
// CHECK: %[[D:.+]] = ssm.softplus %[[T1]]
// CHECK: ssm.bind_chunk @scan
// CHECK: %[[Y:.+]] = ssm.selective_scan %[[U1]], %[[D]],
// CHECK: ssm.add %[[Y]], %[[U1]]
// REMARK: remark: [Missed] split | Category:ssm-fuse | Function=made | Reason="what is observed between the ops of a region has to be in memory", site=scan
func.func @made(%x: tensor<?x?x8xf32>, %v: tensor<8xf32>, %A: tensor<8x4xf32>, %B: tensor<?x?x1x4xf32>) -> tensor<?x?x8xf32> {
  %y = ssm.fused ins(%x, %v, %A, %B : tensor<?x?x8xf32>, tensor<8xf32>, tensor<8x4xf32>, tensor<?x?x1x4xf32>)
      score(<entropy = 0.5, intensity = 0.5, memory = 0.5, score = 1.0, threshold = 0.5>) -> tensor<?x?x8xf32> {
  ^bb0(%x1: tensor<?x?x8xf32>, %v1: tensor<8xf32>, %a: tensor<8x4xf32>, %b: tensor<?x?x1x4xf32>):
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %t = ssm.mul %x1, %v1 : tensor<?x?x8xf32>, tensor<8xf32>
    %u = ssm.silu %t : tensor<?x?x8xf32>
    %n = tensor.dim %u, %c0 : tensor<?x?x8xf32>
    %l = tensor.dim %u, %c1 : tensor<?x?x8xf32>
    %dt = ssm.softplus %t : tensor<?x?x8xf32>
    %c = ssm.bind_chunk @scan(%n, %l)
    %o = ssm.observe @scan %u : tensor<?x?x8xf32>
    %s = ssm.selective_scan %o, %dt, %a, %b, %b chunk_size(%c)
        : tensor<?x?x8xf32>, tensor<?x?x8xf32>, tensor<8x4xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x8xf32>
    %z = ssm.add %s, %u : tensor<?x?x8xf32>, tensor<?x?x8xf32>
    ssm.yield %z : tensor<?x?x8xf32>
  }
  return %y : tensor<?x?x8xf32>
}

// -----

// Behind the anchor: it moves, once, with its states, and asks for its chunk where
// it is.
// CHECK-LABEL: func.func @behind(
// CHECK: %[[Y:.+]]:2 = ssm.fused
// CHECK: ssm.bind_chunk @scan
// CHECK: %[[S:[a-z0-9]+]], %[[H:.+]] = ssm.selective_scan
// CHECK-NEXT: %[[G:.+]] = ssm.silu %[[S]]
// CHECK-NEXT: ssm.yield %[[G]], %[[H]]
// CHECK: %[[O:.+]] = ssm.observe @out %[[Y]]#0
// CHECK-NEXT: ssm.fused ins({{.*}}%[[O]], %[[Y]]#1 :
// CHECK-NOT: ssm.selective_scan
// CHECK: ssm.neg
// CHECK-NEXT: ssm.exp
// REMARK: remark: [Missed] split | Category:ssm-fuse | Function=behind | {{.*}}site=out
func.func @behind(%u: tensor<?x?x8xf32>, %A: tensor<8x4xf32>, %B: tensor<?x?x1x4xf32>) -> (tensor<?x?x8xf32>, tensor<?x8x4xf32>) {
  %y:2 = ssm.fused ins(%u, %A, %B : tensor<?x?x8xf32>, tensor<8x4xf32>, tensor<?x?x1x4xf32>) -> tensor<?x?x8xf32>, tensor<?x8x4xf32> {
  ^bb0(%x: tensor<?x?x8xf32>, %a: tensor<8x4xf32>, %b: tensor<?x?x1x4xf32>):
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %n = tensor.dim %x, %c0 : tensor<?x?x8xf32>
    %l = tensor.dim %x, %c1 : tensor<?x?x8xf32>
    %c = ssm.bind_chunk @scan(%n, %l)
    %s, %h = ssm.selective_scan %x, %x, %a, %b, %b chunk_size(%c)
        : tensor<?x?x8xf32>, tensor<?x?x8xf32>, tensor<8x4xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x8xf32>, tensor<?x8x4xf32>
    %g = ssm.silu %s : tensor<?x?x8xf32>
    %o = ssm.observe @out %g : tensor<?x?x8xf32>
    %0 = ssm.neg %o : tensor<?x?x8xf32>
    %1 = ssm.exp %0 : tensor<?x?x8xf32>
    ssm.yield %1, %h : tensor<?x?x8xf32>, tensor<?x8x4xf32>
  }
  return %y#0, %y#1 : tensor<?x?x8xf32>, tensor<?x8x4xf32>
}

// -----

// The result of a region, twice: nothing is left in it, and nothing is lost.
// CHECK-LABEL: func.func @result(
// CHECK: %[[Y:.+]] = ssm.fused
// CHECK-NEXT: ^bb0
// CHECK-NEXT: ssm.exp
// CHECK-NEXT: ssm.neg
// CHECK-NEXT: ssm.yield
// CHECK-NEXT: }
// CHECK-NEXT: %[[A:.+]] = ssm.observe @a %[[Y]]
// CHECK-NEXT: %[[B:.+]] = ssm.observe @b %[[A]]
// CHECK-NEXT: return %[[B]]
func.func @result(%x: tensor<?x8xf32>) -> tensor<?x8xf32> {
  %y = ssm.fused ins(%x : tensor<?x8xf32>) -> tensor<?x8xf32> {
  ^bb0(%a: tensor<?x8xf32>):
    %0 = ssm.exp %a : tensor<?x8xf32>
    %1 = ssm.neg %0 : tensor<?x8xf32>
    %2 = ssm.observe @a %1 : tensor<?x8xf32>
    %3 = ssm.observe @b %2 : tensor<?x8xf32>
    ssm.yield %3 : tensor<?x8xf32>
  }
  return %y : tensor<?x8xf32>
}

// -----

// Through two regions; one op needs none around it.
// REMARK: remark: [Missed] split | Category:ssm-fuse | Function=nested | {{.*}}site=site
// CHECK-LABEL: func.func @nested(
// CHECK-SAME: %[[X:[a-z0-9]+]]: tensor<?x8xf32>
// CHECK-NEXT: %[[E:.+]] = ssm.exp %[[X]]
// CHECK-NEXT: %[[O:.+]] = ssm.observe @site %[[E]]
// CHECK-NEXT: ssm.fused ins({{.*}}%[[O]] :
// CHECK: ssm.fused
// CHECK: ssm.neg
func.func @nested(%x: tensor<?x8xf32>) -> tensor<?x8xf32> {
  %y = ssm.fused ins(%x : tensor<?x8xf32>) -> tensor<?x8xf32> {
  ^bb0(%a: tensor<?x8xf32>):
    %0 = ssm.exp %a : tensor<?x8xf32>
    %1 = ssm.fused ins(%0 : tensor<?x8xf32>) -> tensor<?x8xf32> {
    ^bb0(%b: tensor<?x8xf32>):
      %o = ssm.observe @site %b : tensor<?x8xf32>
      %2 = ssm.neg %o : tensor<?x8xf32>
      ssm.yield %2 : tensor<?x8xf32>
    }
    ssm.yield %1 : tensor<?x8xf32>
  }
  return %y : tensor<?x8xf32>
}

// -----

// What no kernel can be made of is said.
// CHECK-LABEL: func.func @refused(
// REMARK: remark: [Missed] region | Category:ssm-fuse | Function=refused | Reason="ssm.projection takes no other op into its kernel"
func.func @refused(%x: tensor<?x8xf32>, %w: tensor<8x8xf32>) -> tensor<?x8xf32> {
  %y = ssm.fused ins(%x, %w : tensor<?x8xf32>, tensor<8x8xf32>) -> tensor<?x8xf32> {
  ^bb0(%a: tensor<?x8xf32>, %b: tensor<8x8xf32>):
    %0 = ssm.exp %a : tensor<?x8xf32>
    %1 = ssm.projection %0, %b : tensor<?x8xf32>, tensor<8x8xf32> -> tensor<?x8xf32>
    ssm.yield %1 : tensor<?x8xf32>
  }
  return %y : tensor<?x8xf32>
}
