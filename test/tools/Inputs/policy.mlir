func.func @main(%u: tensor<?x?x4xf32>, %A: tensor<4x2xf32>, %B: tensor<?x?x1x2xf32>) -> tensor<?x?x4xf32> {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %b = tensor.dim %u, %c0 : tensor<?x?x4xf32>
  %l = tensor.dim %u, %c1 : tensor<?x?x4xf32>
  %c = ssm.bind_chunk @here(%b, %l) {policy = "static:3"}
  %y = ssm.selective_scan %u, %u, %A, %B, %B chunk_size(%c) : tensor<?x?x4xf32>, tensor<?x?x4xf32>, tensor<4x2xf32>, tensor<?x?x1x2xf32>, tensor<?x?x1x2xf32> -> tensor<?x?x4xf32>
  return %y : tensor<?x?x4xf32>
}
