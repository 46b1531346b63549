func.func @main(%x: tensor<?x?x2x8xf32>, %decay: tensor<?x?x2xf32>, %B: tensor<?x?x1x4xf32>) -> tensor<?x?x2x8xf32> {
  %y = ssm.ssd %x decay(%decay : tensor<?x?x2xf32>) B(%B) C(%B)
      : tensor<?x?x2x8xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x2x8xf32>
  return %y : tensor<?x?x2x8xf32>
}
