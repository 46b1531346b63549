// The block of mamba_block.mlir with every operation on its own, as a front end
// writes it down: bias and softplus of dt, SiLU of the convolution, skip, gate and
// residual are ops. `ssm-fuse` puts them back into the loops of their neighbours:
//
//   corey-run mamba_block_ops.mlir --emit=fused
//   corey-opt mamba_block_ops.mlir --ssm-fuse="strategy=dp score=physical" --remarks-filter=".*"

module attributes {ssm.weight_prefix = "backbone.layers.4."} {
  ssm.weight @norm "norm.weight" : tensor<256xf32>
  ssm.weight @in_proj "mixer.in_proj.weight" : tensor<1024x256xbf16>
  ssm.weight @conv_weight "mixer.conv1d.weight" : tensor<512x4xf32>
  ssm.weight @conv_bias "mixer.conv1d.bias" : tensor<512xf32>
  ssm.weight @x_proj "mixer.x_proj.weight" : tensor<48x512xbf16>
  ssm.weight @dt_proj "mixer.dt_proj.weight" : tensor<512x16xbf16>
  ssm.weight @dt_bias "mixer.dt_proj.bias" : tensor<512xf32>
  ssm.weight @A_log "mixer.A_log" : tensor<512x16xf32>
  ssm.weight @D "mixer.D" : tensor<512xf32>
  ssm.weight @out_proj "mixer.out_proj.weight" : tensor<256x512xbf16>

  func.func @main(%x: tensor<?x?x256xf32>) -> tensor<?x?x256xf32> {
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %batch = tensor.dim %x, %c0 : tensor<?x?x256xf32>
    %length = tensor.dim %x, %c1 : tensor<?x?x256xf32>

    %norm = ssm.get_weight @norm : tensor<256xf32>
    %hidden = ssm.rms_norm %x, %norm {eps = 1.0e-5 : f32}
        : tensor<?x?x256xf32>, tensor<256xf32> -> tensor<?x?x256xf32>

    // One projection gives the scan's input and the gate.
    %in_proj = ssm.get_weight @in_proj : tensor<1024x256xbf16>
    %both = ssm.projection %hidden, %in_proj
        : tensor<?x?x256xf32>, tensor<1024x256xbf16> -> tensor<?x?x1024xf32>
    %inner = tensor.extract_slice %both[0, 0, 0] [%batch, %length, 512] [1, 1, 1]
        : tensor<?x?x1024xf32> to tensor<?x?x512xf32>
    %z = tensor.extract_slice %both[0, 0, 512] [%batch, %length, 512] [1, 1, 1]
        : tensor<?x?x1024xf32> to tensor<?x?x512xf32>

    %conv_weight = ssm.get_weight @conv_weight : tensor<512x4xf32>
    %conv_bias = ssm.get_weight @conv_bias : tensor<512xf32>
    %conv = ssm.causal_conv %inner, %conv_weight bias(%conv_bias : tensor<512xf32>)
        : tensor<?x?x512xf32>, tensor<512x4xf32> -> tensor<?x?x512xf32>

    %u = ssm.silu %conv : tensor<?x?x512xf32>

    // dt (through its low rank), B and C depend on the input: the selection.
    %x_proj = ssm.get_weight @x_proj : tensor<48x512xbf16>
    %selected = ssm.projection %u, %x_proj
        : tensor<?x?x512xf32>, tensor<48x512xbf16> -> tensor<?x?x48xf32>
    %low = tensor.extract_slice %selected[0, 0, 0] [%batch, %length, 16] [1, 1, 1]
        : tensor<?x?x48xf32> to tensor<?x?x16xf32>
    %B3 = tensor.extract_slice %selected[0, 0, 16] [%batch, %length, 16] [1, 1, 1]
        : tensor<?x?x48xf32> to tensor<?x?x16xf32>
    %C3 = tensor.extract_slice %selected[0, 0, 32] [%batch, %length, 16] [1, 1, 1]
        : tensor<?x?x48xf32> to tensor<?x?x16xf32>
    %B = tensor.expand_shape %B3 [[0], [1], [2, 3]] output_shape [%batch, %length, 1, 16]
        : tensor<?x?x16xf32> into tensor<?x?x1x16xf32>
    %C = tensor.expand_shape %C3 [[0], [1], [2, 3]] output_shape [%batch, %length, 1, 16]
        : tensor<?x?x16xf32> into tensor<?x?x1x16xf32>
    %dt_proj = ssm.get_weight @dt_proj : tensor<512x16xbf16>
    %delta = ssm.projection %low, %dt_proj
        : tensor<?x?x16xf32>, tensor<512x16xbf16> -> tensor<?x?x512xf32>

    // A = -exp(A_log).
    %A_log = ssm.get_weight @A_log : tensor<512x16xf32>
    %A_exp = ssm.exp %A_log : tensor<512x16xf32>
    %A = ssm.neg %A_exp : tensor<512x16xf32>
    %D = ssm.get_weight @D : tensor<512xf32>
    %dt_bias = ssm.get_weight @dt_bias : tensor<512xf32>
    %shifted = ssm.add %delta, %dt_bias : tensor<?x?x512xf32>, tensor<512xf32>
    %dt = ssm.softplus %shifted : tensor<?x?x512xf32>
    %scan = ssm.selective_scan %u, %dt, %A, %B, %C {chunk = #ssm.chunk<runtime = @layer.scan>}
        : tensor<?x?x512xf32>, tensor<?x?x512xf32>, tensor<512x16xf32>,
          tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x512xf32>

    // Skip and gate.
    %skip = ssm.mul %u, %D : tensor<?x?x512xf32>, tensor<512xf32>
    %sum = ssm.add %scan, %skip : tensor<?x?x512xf32>, tensor<?x?x512xf32>
    %gate = ssm.silu %z : tensor<?x?x512xf32>
    %gated = ssm.mul %sum, %gate : tensor<?x?x512xf32>, tensor<?x?x512xf32>

    %out_proj = ssm.get_weight @out_proj : tensor<256x512xbf16>
    %out = ssm.projection %gated, %out_proj
        : tensor<?x?x512xf32>, tensor<256x512xbf16> -> tensor<?x?x256xf32>
    %y = ssm.add %out, %x : tensor<?x?x256xf32>, tensor<?x?x256xf32>
    return %y : tensor<?x?x256xf32>
  }
}
