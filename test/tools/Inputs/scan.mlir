func.func @main(%u: tensor<?x?x64xf32>, %A: tensor<64x16xf32>, %B: tensor<?x?x1x16xf32>) -> tensor<?x?x64xf32> {
  %y = ssm.selective_scan %u, %u, %A, %B, %B {chunk = #ssm.chunk<runtime = @here>} : tensor<?x?x64xf32>, tensor<?x?x64xf32>, tensor<64x16xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x64xf32>
  return %y : tensor<?x?x64xf32>
}
