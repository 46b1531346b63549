//===- SSMOps.td - Operations of the ssm dialect -----------*- tablegen -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_DIALECT_SSM_IR_SSMOPS_TD
#define COREY_DIALECT_SSM_IR_SSMOPS_TD

include "corey/Dialect/SSM/IR/SSMDialect.td"
include "corey/Dialect/SSM/IR/SSMInterfaces.td"
include "mlir/IR/BuiltinAttributeInterfaces.td"
include "mlir/IR/OpAsmInterface.td"
include "mlir/IR/SymbolInterfaces.td"
include "mlir/Interfaces/ControlFlowInterfaces.td"
include "mlir/Interfaces/InferTypeOpInterface.td"
include "mlir/Interfaces/SideEffectInterfaces.td"

//===----------------------------------------------------------------------===//
// Types and base classes
//===----------------------------------------------------------------------===//

def SSM_Float : AnyTypeOf<[F16, BF16, F32]>;
def SSM_QuantizedElement : AnyTypeOf<[I8, F8E4M3FN]>;
def SSM_FloatTensor : RankedTensorOf<[F16, BF16, F32]>;
def SSM_F32Tensor : RankedTensorOf<[F32]>;
def SSM_IndexTensor : RankedTensorOf<[I32, I64]>;
def SSM_QuantizedTensor : RankedTensorOf<[I8, F8E4M3FN]>;
def SSM_WeightTensor : RankedTensorOf<[F16, BF16, F32, I8, F8E4M3FN]>;
def SSM_SequenceStarts : RankedTensorOf<[I32]>;
def SSM_StateSlots : RankedTensorOf<[I32]>;

def SSM_SchedulerResource : Resource<"::corey::ssm::SchedulerResource">;
def SSM_StatisticsResource : Resource<"::corey::ssm::StatisticsResource">;

class SSM_Op<string mnemonic, list<Trait> traits = []>
    : Op<SSM_Dialect, mnemonic, traits>;

/// An op whose shapes follow a dimension line (see DimSpecOpInterface).
/// `lineExpr` is the C++ expression that selects the line; verification of the
/// shapes, inference and reification come from here, `verify` adds the rest.
/// `streams`: kernels of the op can take pointwise ops in.
class SSM_ShapedOp<string mnemonic, string line, list<Trait> traits = [], bit streams = 0>
    : SSM_Op<mnemonic, traits # [Pure,
        DeclareOpInterfaceMethods<SSM_DimSpecOpInterface>,
        DeclareOpInterfaceMethods<SSM_FusableOpInterface,
          !if(streams, ["getCost", "getStreamedOperands"], ["getCost"])>,
        DeclareOpInterfaceMethods<InferTypeOpInterface, ["inferReturnTypes", "refineReturnTypes"]>,
        DeclareOpInterfaceMethods<ReifyRankedShapedTypeOpInterface, ["reifyResultShapes"]>]> {
  // The line for one batch of equally long sequences, and the line for
  // sequences packed along L, where S counts sequences and B is 1. Q stands for
  // the number of sequences, R for that of states: as many, or, where
  // sequences name theirs, those of a pool of its own size.
  string batchedLine = !subst(":Q", ":B", line);
  string packedLine = !subst(":Q", ":S", !subst("B,", "1,", line));
  // Whether the op takes `seq_starts`, which selects the packed line, and
  // `state_slots`, which leaves R open.
  bit packable = 0;
  let hasVerifier = 1;
  code shapedDeclaration = [{
    static ::llvm::StringRef getDimSpecFor(bool packed, bool paged);
  }];
  let extraClassDeclaration = shapedDeclaration;
  string getDimSpecBody = !if(packable,
    "return getDimSpecFor(static_cast<bool>(getSeqStarts()), static_cast<bool>(getStateSlots()));",
    "return getDimSpecFor(/*packed=*/false, /*paged=*/false);");
  string inferSpecArguments = !if(packable,
    "static_cast<bool>(adaptor.getSeqStarts()), static_cast<bool>(adaptor.getStateSlots())",
    "false, false");
  let extraClassDefinition = [{
    ::llvm::StringRef $cppClass::getDimSpecFor(bool packed, bool paged) {
      if (paged)
        return packed ? "}] # packedLine # [{" : "}] # batchedLine # [{";
      return packed ? "}] # !subst("R,", "S,", packedLine) # [{"
                    : "}] # !subst("R,", "B,", batchedLine) # [{";
    }
    ::llvm::StringRef $cppClass::getDimSpec() { }] # getDimSpecBody # [{ }
    ::llvm::SmallVector<::mlir::Value> $cppClass::getSpecOperands() {
      return ::corey::ssm::detail::collectOperands(*this, getDimSpec());
    }
    ::llvm::SmallVector<::mlir::Value> $cppClass::getSpecResults() {
      return ::corey::ssm::detail::collectResults(*this, getDimSpec());
    }
    ::llvm::LogicalResult $cppClass::inferReturnTypes(
        ::mlir::MLIRContext *context, ::std::optional<::mlir::Location> location,
        ::mlir::ValueRange operands, ::mlir::DictionaryAttr attributes,
        ::mlir::OpaqueProperties properties, ::mlir::RegionRange regions,
        ::llvm::SmallVectorImpl<::mlir::Type> &inferredReturnTypes) {
      Adaptor adaptor(operands, attributes, properties, regions);
      ::llvm::StringRef spec = getDimSpecFor(}] # inferSpecArguments # [{);
      return ::corey::ssm::detail::inferFromDimSpec(
          context, location, spec, ::corey::ssm::detail::collectOperands(adaptor, spec),
          inferredReturnTypes);
    }
    ::llvm::LogicalResult $cppClass::refineReturnTypes(
        ::mlir::MLIRContext *context, ::std::optional<::mlir::Location> location,
        ::mlir::ValueRange operands, ::mlir::DictionaryAttr attributes,
        ::mlir::OpaqueProperties properties, ::mlir::RegionRange regions,
        ::llvm::SmallVectorImpl<::mlir::Type> &returnTypes) {
      // Given types were checked against the line by the verifier.
      if (!returnTypes.empty())
        return ::mlir::success();
      return inferReturnTypes(context, location, operands, attributes,
                              properties, regions, returnTypes);
    }
    ::llvm::LogicalResult $cppClass::reifyResultShapes(
        ::mlir::OpBuilder &builder, ::mlir::ReifiedRankedShapedTypeDims &shapes) {
      return ::corey::ssm::detail::reifyFromDimSpec(*this, builder, shapes);
    }
  }];
}

/// A recurrence along L with a chunk.
class SSM_ScanOp<string mnemonic, string line, string input, list<Trait> traits = []>
    : SSM_ShapedOp<mnemonic, line, traits # [AttrSizedOperandSegments,
        SSM_ScanOpInterface], /*streams=*/1> {
  let packable = 1;
  let hasCanonicalizer = 1;
  let extraClassDeclaration = shapedDeclaration # [{
    ::corey::ssm::ChunkAttr getScanChunkAttr() { return getChunkAttr(); }
    ::mlir::Value getScanChunk() { return getChunkSize(); }
    void bindScanChunk(::mlir::Value chunk) {
      removeChunkAttr();
      getChunkSizeMutable().assign(chunk);
    }
    ::mlir::Value getScanInput() { return get}] # input # [{(); }
  }];
}

//===----------------------------------------------------------------------===//
// Scans
//===----------------------------------------------------------------------===//

def SSM_SelectiveScanOp : SSM_ScanOp<"selective_scan",
    "u:B,L,D delta:B,L,D A:D,N B:B,L,G,N C:B,L,G,N D:D z:B,L,D delta_bias:D "
    "initial_state:R,D,N seq_starts:S _ state_slots:Q -> y:B,L,D:u last_state:R,D,N:~initial_state|f32", "U"> {
  let summary = "Mamba-1 selective scan";
  let description = [{
    For every batch element b, channel d (of group g = d / (D/G)) and state n:

        dt[t]   = delta[t,d] + delta_bias[d]
        dt[t]   = log(1 + exp(dt[t]))                     if delta_softplus
        h[t,n]  = exp(dt[t] A[d,n]) h[t-1,n] + dt[t] B[t,g,n] u[t,d]
        y[t,d]  = sum_n C[t,g,n] h[t,n]  (+ D[d] u[t,d])  (* silu(z[t,d]))

    with `h[-1] = initial_state`, or zero. `A` is f32; every other tensor is
    f16, bf16 or f32, and all arithmetic is f32. `last_state` is `h` after the
    last token.

    With `seq_starts`, `B` must be 1 and L holds S sequences one after another:
    sequence s covers tokens `seq_starts[s]` up to the next start (the last one
    up to L). The starts ascend and the first is 0; the state is
    `[S, D, N]`, one per sequence.

    With `slots`, one i32 per sequence, the states lie in a pool, as in a server
    whose sequences come and go: `initial_state` is `[R, D, N]` of any R, the
    sequence starts from the slot it names, and `last_state`, of the same type,
    is the pool with those slots replaced and all others as they were. A
    negative slot is padding: its sequence starts from zero and its last state
    goes nowhere. A slot of R or more is an error when the op runs. Of sequences
    that name one slot any may be the one whose state stays there.

    A compiled program updates the pool in place, touching nothing but the
    slots, where it is given the same memory for both (see Executable::run()).

    Example:

    ```mlir
    %y, %h = ssm.selective_scan %u, %delta, %A, %B, %C D(%D : tensor<64xf32>)
        z(%z : tensor<?x?x64xf32>) {delta_softplus, chunk = #ssm.chunk<runtime = @scan>}
        : tensor<?x?x64xf32>, tensor<?x?x64xf32>, tensor<64x16xf32>, tensor<?x?x1x16xf32>,
          tensor<?x?x1x16xf32> -> tensor<?x?x64xf32>, tensor<?x64x16xf32>
    ```
  }];
  let arguments = (ins SSM_FloatTensor:$u, SSM_FloatTensor:$delta, SSM_F32Tensor:$A,
    SSM_FloatTensor:$B, SSM_FloatTensor:$C, Optional<SSM_FloatTensor>:$D,
    Optional<SSM_FloatTensor>:$z, Optional<SSM_FloatTensor>:$delta_bias,
    Optional<SSM_FloatTensor>:$initial_state, Optional<SSM_SequenceStarts>:$seq_starts,
    Optional<Index>:$chunk_size, Optional<SSM_StateSlots>:$state_slots,
    UnitAttr:$delta_softplus, OptionalAttr<SSM_ChunkAttr>:$chunk);
  let results = (outs SSM_FloatTensor:$y, Optional<SSM_FloatTensor>:$last_state);
  let assemblyFormat = [{
    $u `,` $delta `,` $A `,` $B `,` $C
    (`D` `(` $D^ `:` type($D) `)`)? (`z` `(` $z^ `:` type($z) `)`)?
    (`delta_bias` `(` $delta_bias^ `:` type($delta_bias) `)`)?
    (`initial_state` `(` $initial_state^ `:` type($initial_state) `)`)?
    (`slots` `(` $state_slots^ `:` type($state_slots) `)`)?
    (`seq_starts` `(` $seq_starts^ `:` type($seq_starts) `)`)?
    (`chunk_size` `(` $chunk_size^ `)`)? attr-dict `:`
    type($u) `,` type($delta) `,` type($A) `,` type($B) `,` type($C) `->`
    type($y) (`,` type($last_state)^)?
  }];
}

def SSM_SSDOp : SSM_ScanOp<"ssd",
    "x:B,L,H,P dt:B,L,H A:H B:B,L,G,N C:B,L,G,N D:H,[P] z:B,L,H,P dt_bias:H "
    "initial_states:R,H,P,N seq_starts:S decay:B,L,H _ state_slots:Q "
    "-> y:B,L,H,P:x final_states:R,H,P,N:~initial_states|f32", "X"> {
  let summary = "Mamba-2 state-space duality: a scan with one decay per head";
  let description = [{
    For every batch element and head h (of group g = h / (H/G)):

        d[t]    = dt[t,h] + dt_bias[h]
        d[t]    = log(1 + exp(d[t]))                      if dt_softplus
        d[t]    = min(max(d[t], lo), hi)                  if dt_limit = [lo, hi]
        S[t]    = exp(d[t] A[h]) S[t-1] + (d[t] x[t,h]) B[t,g]^T
        y[t,h]  = S[t] C[t,g]  (+ D x[t,h])  (* silu(z[t,h]))

    `D` is per head, `[H]`, or per head and channel, `[H, P]`. In the
    *discretized* form `decay` takes the place of `dt` and `A` and holds the
    logarithm of the decay of each token, `x` is already multiplied by dt:

        S[t] = exp(decay[t,h]) S[t-1] + x[t,h] B[t,g]^T

    A checkpoint's `chunk_size` may be recorded as `tile`: a hint for the size
    of the tiles of the matrix form, with no effect on the result. `seq_starts`
    packs sequences, and `slots` names their states in a pool `[R, H, P, N]`, as
    in `ssm.selective_scan`.

    Example:

    ```mlir
    %y, %s = ssm.ssd %x dt(%dt : tensor<?x?x8xf32>) A(%A : tensor<8xf32>) B(%B) C(%C)
        D(%D : tensor<8xf32>) {dt_softplus, chunk = #ssm.chunk<runtime = @scan>}
        : tensor<?x?x8x64xf32>, tensor<?x?x1x128xf32>, tensor<?x?x1x128xf32>
        -> tensor<?x?x8x64xf32>, tensor<?x8x64x128xf32>
    ```
  }];
  let arguments = (ins SSM_FloatTensor:$x, Optional<SSM_FloatTensor>:$dt,
    Optional<SSM_F32Tensor>:$A, SSM_FloatTensor:$B, SSM_FloatTensor:$C,
    Optional<SSM_FloatTensor>:$D, Optional<SSM_FloatTensor>:$z,
    Optional<SSM_FloatTensor>:$dt_bias, Optional<SSM_FloatTensor>:$initial_states,
    Optional<SSM_SequenceStarts>:$seq_starts, Optional<SSM_FloatTensor>:$decay,
    Optional<Index>:$chunk_size, Optional<SSM_StateSlots>:$state_slots, UnitAttr:$dt_softplus,
    OptionalAttr<DenseF64ArrayAttr>:$dt_limit, OptionalAttr<I64Attr>:$tile,
    OptionalAttr<SSM_ChunkAttr>:$chunk);
  let results = (outs SSM_FloatTensor:$y, Optional<SSM_FloatTensor>:$final_states);
  let assemblyFormat = [{
    $x (`dt` `(` $dt^ `:` type($dt) `)`)? (`A` `(` $A^ `:` type($A) `)`)?
    (`decay` `(` $decay^ `:` type($decay) `)`)? `B` `(` $B `)` `C` `(` $C `)`
    (`D` `(` $D^ `:` type($D) `)`)? (`z` `(` $z^ `:` type($z) `)`)?
    (`dt_bias` `(` $dt_bias^ `:` type($dt_bias) `)`)?
    (`initial_states` `(` $initial_states^ `:` type($initial_states) `)`)?
    (`slots` `(` $state_slots^ `:` type($state_slots) `)`)?
    (`seq_starts` `(` $seq_starts^ `:` type($seq_starts) `)`)?
    (`chunk_size` `(` $chunk_size^ `)`)? attr-dict `:`
    type($x) `,` type($B) `,` type($C) `->` type($y) (`,` type($final_states)^)?
  }];
}

def SSM_CausalConvOp : SSM_ShapedOp<"causal_conv",
    "x:B,L,D weight:D,W bias:D initial_state:R,W-1,D seq_starts:S state_slots:Q "
    "-> y:B,L,D:x final_state:R,W-1,D:x", [AttrSizedOperandSegments], /*streams=*/1> {
  let packable = 1;
  let hasCanonicalizer = 1;
  let summary = "causal depthwise convolution along L";
  let description = [{
        y[t,d] = bias[d] + sum_k weight[d,k] x[t-(W-1)+k, d]        (then silu)

    for a width W from 2 to 4. Tokens before the first come from
    `initial_state` (`[B, W-1, D]`, oldest first) or are zero; `final_state`
    holds the last W-1 inputs, older state included where L < W-1. With
    `seq_starts` sequences are packed along L as in `ssm.selective_scan` and no
    sequence sees its neighbour. `slots` names their states in a pool
    `[R, W-1, D]`, as there.

    Example:

    ```mlir
    %y = ssm.causal_conv %x, %w bias(%b : tensor<64xf32>) {silu}
        : tensor<?x?x64xf32>, tensor<64x4xf32> -> tensor<?x?x64xf32>
    ```
  }];
  let arguments = (ins SSM_FloatTensor:$x, SSM_FloatTensor:$weight,
    Optional<SSM_FloatTensor>:$bias, Optional<SSM_FloatTensor>:$initial_state,
    Optional<SSM_SequenceStarts>:$seq_starts, Optional<SSM_StateSlots>:$state_slots,
    UnitAttr:$silu);
  let results = (outs SSM_FloatTensor:$y, Optional<SSM_FloatTensor>:$final_state);
  let assemblyFormat = [{
    $x `,` $weight (`bias` `(` $bias^ `:` type($bias) `)`)?
    (`initial_state` `(` $initial_state^ `:` type($initial_state) `)`)?
    (`slots` `(` $state_slots^ `:` type($state_slots) `)`)?
    (`seq_starts` `(` $seq_starts^ `:` type($seq_starts) `)`)? attr-dict `:`
    type($x) `,` type($weight) `->` type($y) (`,` type($final_state)^)?
  }];
}

//===----------------------------------------------------------------------===//
// Projections, norms, rotations
//===----------------------------------------------------------------------===//

def SSM_ProjectionOp : SSM_ShapedOp<"projection",
    "x:...,K weight:M,K bias:M residual:...,M weight_scale:[M] -> y:...,M:residual|x",
    [AttrSizedOperandSegments]> {
  let summary = "linear projection";
  let description = [{
        y = x weight^T (+ bias) (+ residual)

    over the last axis of `x`. The result has the residual's element type where
    there is a residual, else that of `x`; sums are f32. A quantized weight (i8
    or f8E4M3FN) needs `weight_scale`: one factor, `tensor<f32>`, or one per
    row of the weight, `[M]`.

    Example:

    ```mlir
    %y = ssm.projection %x, %w residual(%r : tensor<?x?x64xf32>)
        : tensor<?x?x128xbf16>, tensor<64x128xbf16> -> tensor<?x?x64xf32>
    ```
  }];
  let arguments = (ins SSM_FloatTensor:$x, SSM_WeightTensor:$weight,
    Optional<SSM_FloatTensor>:$bias, Optional<SSM_FloatTensor>:$residual,
    Optional<SSM_F32Tensor>:$weight_scale);
  let results = (outs SSM_FloatTensor:$y);
  let assemblyFormat = [{
    $x `,` $weight (`bias` `(` $bias^ `:` type($bias) `)`)?
    (`residual` `(` $residual^ `:` type($residual) `)`)?
    (`weight_scale` `(` $weight_scale^ `:` type($weight_scale) `)`)? attr-dict `:`
    type($x) `,` type($weight) `->` type($y)
  }];
}

def SSM_RMSNormOp : SSM_ShapedOp<"rms_norm",
    "x:...,D weight:D residual:...,D z:...,D -> y:...,D:x residual_out:...,D:residual",
    [AttrSizedOperandSegments], /*streams=*/1> {
  let hasCanonicalizer = 1;
  let summary = "root-mean-square norm with optional residual and gate";
  let description = [{
        r = x + residual                                  (x without a residual)
        y = r / sqrt(mean(r^2) + eps) * weight

    over the last axis, or over each group of `group_size` consecutive elements
    of it. A gate `z` multiplies by silu(z): before the norm, as in Mamba-2, or
    after it with `norm_before_gate`. `residual_out` is `r`.

    Example:

    ```mlir
    %y = ssm.rms_norm %x, %w {eps = 1.0e-5 : f32}
        : tensor<?x?x64xf32>, tensor<64xf32> -> tensor<?x?x64xf32>
    ```
  }];
  let arguments = (ins SSM_FloatTensor:$x, SSM_FloatTensor:$weight,
    Optional<SSM_FloatTensor>:$residual, Optional<SSM_FloatTensor>:$z,
    DefaultValuedAttr<F32Attr, "1.0e-5f">:$eps, OptionalAttr<I64Attr>:$group_size,
    UnitAttr:$norm_before_gate);
  let results = (outs SSM_FloatTensor:$y, Optional<SSM_FloatTensor>:$residual_out);
  let assemblyFormat = [{
    $x `,` $weight (`residual` `(` $residual^ `:` type($residual) `)`)?
    (`z` `(` $z^ `:` type($z) `)`)? attr-dict `:`
    type($x) `,` type($weight) `->` type($y) (`,` type($residual_out)^)?
  }];
}

def SSM_HadamardOp : SSM_ShapedOp<"hadamard", "x:...,D -> y:...,D:x", [], /*streams=*/1> {
  let hasFolder = 1;
  let summary = "orthonormal Walsh-Hadamard transform of the last axis";
  let description = [{
    Transforms each run of `block` consecutive elements of the last axis by
    H / sqrt(block), H being the Sylvester Hadamard matrix in natural order.
    `block` is a power of two that divides the axis. Symmetric and its own
    inverse: two in a row fold away.

    Example:

    ```mlir
    %y = ssm.hadamard %x {block = 256 : i64} : tensor<?x?x768xf32> -> tensor<?x?x768xf32>
    ```
  }];
  let arguments = (ins SSM_FloatTensor:$x, I64Attr:$block);
  let results = (outs SSM_FloatTensor:$y);
  let assemblyFormat = "$x attr-dict `:` type($x) `->` type($y)";
}

//===----------------------------------------------------------------------===//
// Elementwise
//===----------------------------------------------------------------------===//

class SSM_ElementwiseOp<string mnemonic, list<Trait> traits = []>
    : SSM_Op<mnemonic, traits # [Pure,
        DeclareOpInterfaceMethods<SSM_FusableOpInterface, ["getCost", "isPointwise", "emitScalar"]>,
        DeclareOpInterfaceMethods<ReifyRankedShapedTypeOpInterface, ["reifyResultShapes"]>]> {
  code elementwiseDefinition = [{
    ::corey::ssm::OpCost $cppClass::getCost(int64_t dynamicDim) {
      return ::corey::ssm::detail::elementwiseCost(*this, dynamicDim);
    }
    bool $cppClass::isPointwise() { return true; }
    ::llvm::LogicalResult $cppClass::reifyResultShapes(
        ::mlir::OpBuilder &builder, ::mlir::ReifiedRankedShapedTypeDims &shapes) {
      shapes.push_back(::mlir::tensor::getMixedSizes(builder, getLoc(), getOperation()->getOperand(0)));
      return ::mlir::success();
    }
  }];
  let extraClassDefinition = elementwiseDefinition;
}

class SSM_UnaryOp<string mnemonic, string what, string formula>
    : SSM_ElementwiseOp<mnemonic, [SameOperandsAndResultType]> {
  let summary = what;
  let description = "    y = " # formula # [{

    Example:

    ```mlir
    %y = ssm.}] # mnemonic # [{ %x : tensor<?x?x64xf32>
    ```
  }];
  let arguments = (ins SSM_FloatTensor:$x);
  let results = (outs SSM_FloatTensor:$y);
  let assemblyFormat = "$x attr-dict `:` type($x)";
}

def SSM_NegOp : SSM_UnaryOp<"neg", "negation", "-x"> { let hasFolder = 1; }
def SSM_ExpOp : SSM_UnaryOp<"exp", "natural exponential", "exp(x)">;
def SSM_SiluOp : SSM_UnaryOp<"silu", "sigmoid-weighted linear unit", "x / (1 + exp(-x))">;
def SSM_SigmoidOp : SSM_UnaryOp<"sigmoid", "logistic function", "1 / (1 + exp(-x))">;
def SSM_SoftplusOp : SSM_UnaryOp<"softplus", "softplus", "log(1 + exp(x))">;
def SSM_GeluOp : SSM_UnaryOp<"gelu", "Gaussian error linear unit, exact form",
  "x (1 + erf(x / sqrt(2))) / 2">;

class SSM_BinaryOp<string mnemonic, string what, string formula, list<Trait> traits = []>
    : SSM_ElementwiseOp<mnemonic, traits # [
        DeclareOpInterfaceMethods<InferTypeOpInterface, ["inferReturnTypes"]>]> {
  let summary = what;
  let description = "    y = " # formula # [{

    `rhs` has the shape of `lhs` or that of its trailing axes, along which it is
    broadcast. The result has the type of `lhs`.

    Example:

    ```mlir
    %y = ssm.}] # mnemonic # [{ %x, %v : tensor<?x?x64xbf16>, tensor<64xf32>
    ```
  }];
  let arguments = (ins SSM_FloatTensor:$lhs, SSM_FloatTensor:$rhs);
  let results = (outs SSM_FloatTensor:$y);
  let assemblyFormat = "$lhs `,` $rhs attr-dict `:` type($lhs) `,` type($rhs)";
  let hasVerifier = 1;
  let extraClassDefinition = elementwiseDefinition # [{
    ::llvm::LogicalResult $cppClass::verify() {
      return ::corey::ssm::detail::verifyTrailingBroadcast(*this);
    }
    ::llvm::LogicalResult $cppClass::inferReturnTypes(
        ::mlir::MLIRContext *, ::std::optional<::mlir::Location>,
        ::mlir::ValueRange operands, ::mlir::DictionaryAttr, ::mlir::OpaqueProperties,
        ::mlir::RegionRange, ::llvm::SmallVectorImpl<::mlir::Type> &inferredReturnTypes) {
      inferredReturnTypes.push_back(operands[0].getType());
      return ::mlir::success();
    }
  }];
}

def SSM_AddOp : SSM_BinaryOp<"add", "sum", "lhs + rhs">;
def SSM_SubOp : SSM_BinaryOp<"sub", "difference", "lhs - rhs">;
def SSM_MulOp : SSM_BinaryOp<"mul", "product", "lhs * rhs">;

def SSM_CastOp : SSM_ElementwiseOp<"cast", [SameOperandsAndResultShape]> {
  let summary = "conversion between floating-point types";
  let description = [{
    Rounds to nearest even. A widening cast followed by the inverse narrowing
    cast folds away.

    Example:

    ```mlir
    %y = ssm.cast %x : tensor<?x?x64xbf16> to tensor<?x?x64xf32>
    ```
  }];
  let arguments = (ins SSM_FloatTensor:$x);
  let results = (outs SSM_FloatTensor:$y);
  let assemblyFormat = "$x attr-dict `:` type($x) `to` type($y)";
  let hasFolder = 1;
}

def SSM_ScaleOp : SSM_ElementwiseOp<"scale", [SameOperandsAndResultType]> {
  let summary = "product with a constant";
  let description = [{
        y = factor x

    A factor of 1 folds away; two scales in a row become one.

    Example:

    ```mlir
    %y = ssm.scale %x by 0.5 : tensor<?x?x64xf32>
    ```
  }];
  let arguments = (ins SSM_FloatTensor:$x, F64Attr:$factor);
  let results = (outs SSM_FloatTensor:$y);
  let assemblyFormat = "$x `by` $factor attr-dict `:` type($x)";
  let hasFolder = 1;
  let hasCanonicalizer = 1;
}

//===----------------------------------------------------------------------===//
// Ends of a language model
//===----------------------------------------------------------------------===//

def SSM_EmbeddingOp : SSM_ShapedOp<"embedding", "ids:... table:T,D -> y:...,D:table"> {
  let summary = "rows of a table";
  let description = [{
        y[..., d] = table[ids[...], d]

    An id outside `0 <= id < T` is an error at run time. The table may be a
    weight, or rows of any number that the program makes, of which some are
    wanted.

    Example:

    ```mlir
    %y = ssm.embedding %ids, %table : tensor<?x?xi32>, tensor<256x64xbf16> -> tensor<?x?x64xbf16>
    ```
  }];
  let arguments = (ins SSM_IndexTensor:$ids, SSM_FloatTensor:$table);
  let results = (outs SSM_FloatTensor:$y);
  let assemblyFormat = "$ids `,` $table attr-dict `:` type($ids) `,` type($table) `->` type($y)";
}

def SSM_ArgmaxOp : SSM_ShapedOp<"argmax", "x:...,V -> ids:...:~i32"> {
  let summary = "index of the largest element of the last axis";
  let description = [{
    The first of equal elements wins; NaN counts as larger than any number, as
    in torch and numpy.

    Example:

    ```mlir
    %ids = ssm.argmax %x : tensor<?x256xf32> -> tensor<?xi32>
    ```
  }];
  let arguments = (ins SSM_FloatTensor:$x);
  let results = (outs SSM_IndexTensor:$ids);
  let assemblyFormat = "$x attr-dict `:` type($x) `->` type($ids)";
}

def SSM_SampleOp : SSM_ShapedOp<"sample",
    "logits:...,V temperature:... top_k:... top_p:... random:...,3 -> ids:...:~i32 next_random:...,3:random"> {
  let summary = "draws an index of the last axis with the probabilities that logits give";
  let description = [{
    Of every row, with `x` its V logits, each a float, and its own temperature,
    top_k, top_p and random numbers:

     1. If the temperature is not above 0, or the largest logit is NaN or
        infinite, the index is that of `ssm.argmax`: the first of the largest,
        NaN counting as larger than any number.
     2. If `0 < top_k < V`, the top_k largest logits are kept, of equal ones
        those with the lower indices; else all are.
     3. `w[i] = exp((x[i] - max x) / temperature)`, for what is kept.
     4. If `top_p < 1`, the fewest largest logits are kept whose `w` sum up to
        at least `top_p`, in whole multiples of 2^-32, times the sum of all that
        step 3 has, again those with the lower indices of equal ones, and at
        least one.
     5. With `u` a random number in [0, 1), the index is the first at which the
        running sum of `w`, over what is kept, in the order of indices, is above
        `u` times their sum.

    `random` has, for each row, a seed, the number of the row's sequence and the
    number of its draws so far, as `next_random` has them after this draw: `u`
    is made of these three and nothing else, by Philox4x32-10 with the seed as
    key and (draws, sequence) as counter, the low words first, and is its first
    two words, the low one first, divided by 2^64. A row depends on nothing of
    other rows.

    The difference and its product with log2(e) / temperature are f32; `w` is a
    fixed-point number of 61 - ceil(log2 V) fractional bits, within about 2^-23
    (1 + |(x[i] - max x) / temperature|) of what it stands for, and everything
    after that is exact: sums do not depend on their order, and equal logits
    give equal indices on every target.

    Without a use of `next_random`, a temperature that is a constant 0 makes it
    an `ssm.argmax`.

    Example:

    ```mlir
    %ids, %next = ssm.sample %logits, %temperature, %top_k, %top_p, %random : tensor<?x256xf32>, tensor<?xf32>, tensor<?xi32>, tensor<?xf32>, tensor<?x3xi64> -> tensor<?xi32>, tensor<?x3xi64>
    ```
  }];
  let arguments = (ins SSM_FloatTensor:$logits, SSM_F32Tensor:$temperature,
                       RankedTensorOf<[I32]>:$top_k, SSM_F32Tensor:$top_p,
                       RankedTensorOf<[I64]>:$random);
  let results = (outs SSM_IndexTensor:$ids, RankedTensorOf<[I64]>:$next_random);
  let assemblyFormat = [{
    $logits `,` $temperature `,` $top_k `,` $top_p `,` $random attr-dict `:`
    type(operands) `->` type(results)
  }];
  let hasCanonicalizer = 1;
}

//===----------------------------------------------------------------------===//
// Quantization
//===----------------------------------------------------------------------===//

def SSM_QuantizeOp : SSM_Op<"quantize", [Pure,
    DeclareOpInterfaceMethods<SSM_FusableOpInterface, ["getCost"]>,
    DeclareOpInterfaceMethods<ReifyRankedShapedTypeOpInterface, ["reifyResultShapes"]>]> {
  let summary = "symmetric quantization by the largest magnitude";
  let description = [{
        scale = max |x| / q_max          (1 where all of x is zero)
        q     = round_half_even(clamp(x / scale, -q_max, q_max))

    with q_max = 127 for i8 and 448 for f8E4M3FN. The granularity says which
    elements share a scale: `tensor`, all (scale `tensor<f32>`); `token`, a row
    of the last axis (scale has the shape of `x` without its last axis);
    `channel`, one index of the last axis (scale `[D]`). The rows of a
    projection's weight are its output channels, so weights take `token`. NaN
    quantizes to 0 in i8 and to NaN in f8E4M3FN, and is left out of the maximum.

    Example:

    ```mlir
    %q, %s = ssm.quantize %x token : tensor<?x64xf32> -> tensor<?x64xi8>, tensor<?xf32>
    ```
  }];
  let arguments = (ins SSM_FloatTensor:$x, SSM_GranularityAttr:$granularity);
  let results = (outs SSM_QuantizedTensor:$q, SSM_F32Tensor:$scale);
  let assemblyFormat = "$x `` $granularity attr-dict `:` type($x) `->` type($q) `,` type($scale)";
  let hasVerifier = 1;
}

def SSM_DequantizeOp : SSM_Op<"dequantize", [Pure,
    DeclareOpInterfaceMethods<SSM_FusableOpInterface, ["getCost"]>,
    DeclareOpInterfaceMethods<ReifyRankedShapedTypeOpInterface, ["reifyResultShapes"]>]> {
  let summary = "inverse of ssm.quantize";
  let description = [{
        x = q * scale

    Example:

    ```mlir
    %x = ssm.dequantize %q, %s token : tensor<?x64xi8>, tensor<?xf32> -> tensor<?x64xf32>
    ```
  }];
  let arguments = (ins SSM_QuantizedTensor:$q, SSM_F32Tensor:$scale, SSM_GranularityAttr:$granularity);
  let results = (outs SSM_FloatTensor:$x);
  let assemblyFormat = [{
    $q `,` $scale `` $granularity attr-dict `:` type($q) `,` type($scale) `->` type($x)
  }];
  let hasVerifier = 1;
}

//===----------------------------------------------------------------------===//
// Structure: sites, weights, fused regions
//===----------------------------------------------------------------------===//

def SSM_ObserveOp : SSM_Op<"observe", [SameOperandsAndResultType,
    MemoryEffects<[MemWrite<SSM_StatisticsResource>]>,
    DeclareOpInterfaceMethods<ReifyRankedShapedTypeOpInterface, ["reifyResultShapes"]>]> {
  let summary = "passes a value through and feeds a statistics site";
  let description = [{
    The statistics of `x` (entropy, range, moments, non-finite count) are recorded
    at `site` and read through the run-time API. If a chunk is bound at a site of
    the same name, its policy gets them: those of one call serve the next.

    Example:

    ```mlir
    %y = ssm.observe @layer0.u %x : tensor<?x?x64xf32>
    ```
  }];
  let arguments = (ins FlatSymbolRefAttr:$site, SSM_FloatTensor:$x);
  let results = (outs SSM_FloatTensor:$y);
  let assemblyFormat = "$site $x attr-dict `:` type($x)";
}

def SSM_BindChunkOp : SSM_Op<"bind_chunk", [
    MemoryEffects<[MemRead<SSM_SchedulerResource>]>]> {
  let summary = "run-time chunk of a scan";
  let description = [{
    Asks the scheduler for the chunk, in tokens and at least 1, of `site` for
    this call's batch and length.

    Example:

    ```mlir
    %c = ssm.bind_chunk @layer0.scan(%B, %L)
    ```
  }];
  let arguments = (ins FlatSymbolRefAttr:$site, Index:$batch, Index:$length,
    OptionalAttr<StrAttr>:$policy);
  let results = (outs Index:$chunk);
  let assemblyFormat = "$site `(` $batch `,` $length `)` attr-dict";
}

def SSM_WeightOp : SSM_Op<"weight", [Symbol]> {
  let summary = "module-level parameter bound to a tensor of a safetensors file";
  let description = [{
    Declares a parameter. `key` names the tensor in the file; it defaults to the
    symbol's name, and the module's `ssm.weight_prefix` is put before it. The
    file's tensor must have the declared element type, and the declared shape up
    to axes of size 1.

    A weight marked `ssm.prepared` is in no file: the function `@ssm.prepare`
    computes it from the others, once (see `ssm-hoist-weights`).

    Example:

    ```mlir
    ssm.weight @in_proj "mixer.in_proj.weight" : tensor<1024x256xbf16>
    ```
  }];
  let arguments = (ins SymbolNameAttr:$sym_name, OptionalAttr<StrAttr>:$key, TypeAttrOf<AnyRankedTensor>:$type);
  let assemblyFormat = "$sym_name ($key^)? attr-dict `:` $type";
  let hasVerifier = 1;
  let extraClassDeclaration = [{
    /// The tensor's name in the weight file, without the module's prefix.
    ::llvm::StringRef getFileKey() {
      return getKey() ? *getKey() : getSymName();
    }
    /// Whether the weight is computed from others rather than read.
    bool isPrepared() { return (*this)->hasAttr(getPreparedAttrName()); }
    /// Whether a weight may have the type.
    static bool isWeightType(::mlir::Type type);
    static ::llvm::StringRef getPrefixAttrName() { return "ssm.weight_prefix"; }
    static ::llvm::StringRef getPreparedAttrName() { return "ssm.prepared"; }
  }];
}

def SSM_GetWeightOp : SSM_Op<"get_weight", [Pure, DeclareOpInterfaceMethods<SymbolUserOpInterface>]> {
  let summary = "value of a weight";
  let description = [{
    Example:

    ```mlir
    %w = ssm.get_weight @in_proj : tensor<1024x256xbf16>
    ```
  }];
  let arguments = (ins FlatSymbolRefAttr:$weight);
  let results = (outs AnyRankedTensor:$value);
  let assemblyFormat = "$weight attr-dict `:` type($value)";
}

def SSM_FusedOp : SSM_Op<"fused", [IsolatedFromAbove, RecursiveMemoryEffects,
    SingleBlockImplicitTerminator<"YieldOp">,
    DeclareOpInterfaceMethods<SSM_FusableOpInterface, ["getCost"]>,
    DeclareOpInterfaceMethods<ReifyRankedShapedTypeOpInterface, ["reifyResultShapes"]>]> {
  let summary = "region that becomes one kernel";
  let description = [{
    Groups ops that a back end emits as one kernel. The region sees only its
    arguments. `score` records why the region was formed.

    Example:

    ```mlir
    %y = ssm.fused ins(%x, %v : tensor<?x64xf32>, tensor<64xf32>) -> tensor<?x64xf32> {
    ^bb0(%a: tensor<?x64xf32>, %b: tensor<64xf32>):
      %0 = ssm.mul %a, %b : tensor<?x64xf32>, tensor<64xf32>
      %1 = ssm.silu %0 : tensor<?x64xf32>
      ssm.yield %1 : tensor<?x64xf32>
    }
    ```
  }];
  let arguments = (ins Variadic<AnyType>:$inputs, OptionalAttr<SSM_ScoreAttr>:$score);
  let results = (outs Variadic<AnyType>:$outputs);
  let regions = (region SizedRegion<1>:$body);
  let assemblyFormat = [{
    (`ins` `(` $inputs^ `:` type($inputs) `)`)? (`score` `(` $score^ `)`)?
    (`->` type($outputs)^)? attr-dict-with-keyword $body
  }];
  let hasRegionVerifier = 1;
  let hasCanonicalizer = 1;
}

def SSM_YieldOp : SSM_Op<"yield", [Pure, Terminator, ReturnLike, HasParent<"FusedOp">]> {
  let summary = "terminator of ssm.fused";
  let arguments = (ins Variadic<AnyType>:$values);
  let builders = [OpBuilder<(ins), [{ build($_builder, $_state, ::mlir::ValueRange()); }]>];
  let assemblyFormat = "attr-dict ($values^ `:` type($values))?";
}

#endif // COREY_DIALECT_SSM_IR_SSMOPS_TD
