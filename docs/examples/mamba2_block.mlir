// One Mamba-2 block: norm, in-projection, causal convolution over x, B and C
// together, state-space duality (one decay per head), gated norm,
// out-projection, residual.
//
// Any batch B and length L; hidden size 256, 8 heads of 64, state 64, 1 group.
// The weights are those of one layer of a Hugging Face `mamba2` checkpoint:
//
//   corey-run mamba2_block.mlir --weights model.safetensors --input x=random:1x300x256

module attributes {ssm.weight_prefix = "backbone.layers.4."} {
  ssm.weight @norm "norm.weight" : tensor<256xf32>
  ssm.weight @in_proj "mixer.in_proj.weight" : tensor<1160x256xbf16>
  ssm.weight @conv_weight "mixer.conv1d.weight" : tensor<640x4xf32>
  ssm.weight @conv_bias "mixer.conv1d.bias" : tensor<640xf32>
  ssm.weight @dt_bias "mixer.dt_bias" : tensor<8xf32>
  ssm.weight @A_log "mixer.A_log" : tensor<8xf32>
  ssm.weight @D "mixer.D" : tensor<8xf32>
  ssm.weight @gated_norm "mixer.norm.weight" : tensor<512xf32>
  ssm.weight @out_proj "mixer.out_proj.weight" : tensor<256x512xbf16>

  func.func @main(%x: tensor<?x?x256xf32>) -> tensor<?x?x256xf32> {
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %batch = tensor.dim %x, %c0 : tensor<?x?x256xf32>
    %length = tensor.dim %x, %c1 : tensor<?x?x256xf32>

    %norm = ssm.get_weight @norm : tensor<256xf32>
    %hidden = ssm.rms_norm %x, %norm {eps = 1.0e-5 : f32}
        : tensor<?x?x256xf32>, tensor<256xf32> -> tensor<?x?x256xf32>

    // One projection gives the gate, the convolution's input and dt.
    %in_proj = ssm.get_weight @in_proj : tensor<1160x256xbf16>
    %all = ssm.projection %hidden, %in_proj
        : tensor<?x?x256xf32>, tensor<1160x256xbf16> -> tensor<?x?x1160xf32>
    %gate = tensor.extract_slice %all[0, 0, 0] [%batch, %length, 512] [1, 1, 1]
        : tensor<?x?x1160xf32> to tensor<?x?x512xf32>
    %xBC = tensor.extract_slice %all[0, 0, 512] [%batch, %length, 640] [1, 1, 1]
        : tensor<?x?x1160xf32> to tensor<?x?x640xf32>
    %dt = tensor.extract_slice %all[0, 0, 1152] [%batch, %length, 8] [1, 1, 1]
        : tensor<?x?x1160xf32> to tensor<?x?x8xf32>

    %conv_weight = ssm.get_weight @conv_weight : tensor<640x4xf32>
    %conv_bias = ssm.get_weight @conv_bias : tensor<640xf32>
    %mixed = ssm.causal_conv %xBC, %conv_weight bias(%conv_bias : tensor<640xf32>) {silu}
        : tensor<?x?x640xf32>, tensor<640x4xf32> -> tensor<?x?x640xf32>
    %x2 = tensor.extract_slice %mixed[0, 0, 0] [%batch, %length, 512] [1, 1, 1]
        : tensor<?x?x640xf32> to tensor<?x?x512xf32>
    %B2 = tensor.extract_slice %mixed[0, 0, 512] [%batch, %length, 64] [1, 1, 1]
        : tensor<?x?x640xf32> to tensor<?x?x64xf32>
    %C2 = tensor.extract_slice %mixed[0, 0, 576] [%batch, %length, 64] [1, 1, 1]
        : tensor<?x?x640xf32> to tensor<?x?x64xf32>
    %heads = tensor.expand_shape %x2 [[0], [1], [2, 3]] output_shape [%batch, %length, 8, 64]
        : tensor<?x?x512xf32> into tensor<?x?x8x64xf32>
    %B = tensor.expand_shape %B2 [[0], [1], [2, 3]] output_shape [%batch, %length, 1, 64]
        : tensor<?x?x64xf32> into tensor<?x?x1x64xf32>
    %C = tensor.expand_shape %C2 [[0], [1], [2, 3]] output_shape [%batch, %length, 1, 64]
        : tensor<?x?x64xf32> into tensor<?x?x1x64xf32>

    // A = -exp(A_log).
    %A_log = ssm.get_weight @A_log : tensor<8xf32>
    %A_exp = ssm.exp %A_log : tensor<8xf32>
    %A = ssm.neg %A_exp : tensor<8xf32>
    %D = ssm.get_weight @D : tensor<8xf32>
    %dt_bias = ssm.get_weight @dt_bias : tensor<8xf32>
    %scan = ssm.ssd %heads dt(%dt : tensor<?x?x8xf32>) A(%A : tensor<8xf32>) B(%B) C(%C)
        D(%D : tensor<8xf32>) dt_bias(%dt_bias : tensor<8xf32>)
        {dt_softplus, chunk = #ssm.chunk<runtime = @layer.ssd>, tile = 256 : i64}
        : tensor<?x?x8x64xf32>, tensor<?x?x1x64xf32>, tensor<?x?x1x64xf32> -> tensor<?x?x8x64xf32>
    %flat = tensor.collapse_shape %scan [[0], [1], [2, 3]]
        : tensor<?x?x8x64xf32> into tensor<?x?x512xf32>

    // silu(gate) multiplies before the norm.
    %gated_norm = ssm.get_weight @gated_norm : tensor<512xf32>
    %gated = ssm.rms_norm %flat, %gated_norm z(%gate : tensor<?x?x512xf32>) {eps = 1.0e-5 : f32}
        : tensor<?x?x512xf32>, tensor<512xf32> -> tensor<?x?x512xf32>
    %out_proj = ssm.get_weight @out_proj : tensor<256x512xbf16>
    %y = ssm.projection %gated, %out_proj residual(%x : tensor<?x?x256xf32>)
        : tensor<?x?x512xf32>, tensor<256x512xbf16> -> tensor<?x?x256xf32>
    return %y : tensor<?x?x256xf32>
  }
}
