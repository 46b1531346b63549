func.func @scale(%x: tensor<?x?xf32>) -> tensor<?x?xf32> {
  %y = ssm.scale %x by 2.5 : tensor<?x?xf32>
  return %y : tensor<?x?xf32>
}
