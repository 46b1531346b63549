//===- SSMDialect.td - The ssm dialect ---------------------*- tablegen -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_DIALECT_SSM_IR_SSMDIALECT_TD
#define COREY_DIALECT_SSM_IR_SSMDIALECT_TD

include "mlir/IR/OpBase.td"
include "mlir/IR/AttrTypeBase.td"
include "mlir/IR/EnumAttr.td"

def SSM_Dialect : Dialect {
  let name = "ssm";
  let cppNamespace = "::corey::ssm";
  let summary = "State-space models: selective scans, projections and what stands between them";
  let description = [{
    The `ssm` dialect represents whole state-space model blocks (Mamba-1,
    Mamba-2) as tensor programs. Activations are channel-last, `[B, L, D]`, with
    dynamic batch `B` and length `L`; every other dimension is static.

    A scan's *chunk*, the number of consecutive tokens one work item processes
    before it hands its state on, is not part of the program: it is either named
    as a run-time site (`#ssm.chunk<runtime = @site>`) and bound by
    `ssm.bind_chunk` on every call, or fixed (`#ssm.chunk<static = 256>`). It
    never changes the result beyond rounding.

    Arithmetic is carried out in f32 whatever the element types are; entropies
    are always in nats.
  }];
  let useDefaultAttributePrinterParser = 1;
  let dependentDialects = ["::mlir::arith::ArithDialect", "::mlir::tensor::TensorDialect"];
}

//===----------------------------------------------------------------------===//
// Attributes
//===----------------------------------------------------------------------===//

class SSM_Attr<string name, string attrMnemonic> : AttrDef<SSM_Dialect, name> {
  let mnemonic = attrMnemonic;
}

/// A double; printed in full, so that it round-trips.
def SSM_Double : APFloatParameter<"floating-point number"> {
  let parser = [{ [&]() -> ::mlir::FailureOr<::llvm::APFloat> {
    double value;
    if (::mlir::failed($_parser.parseFloat(value)))
      return ::mlir::failure();
    return ::llvm::APFloat(value);
  }() }];
  let printer = "$_printer.printFloat($_self)";
}

def SSM_ChunkAttr : SSM_Attr<"Chunk", "chunk"> {
  let summary = "chunk of a scan: a constant, or a run-time site";
  let description = [{
    `#ssm.chunk<static = 256>` fixes the chunk to 256 tokens.
    `#ssm.chunk<runtime = @layer0.scan>` names the site that binds it at run time.
  }];
  let parameters = (ins "int64_t":$size, "::mlir::FlatSymbolRefAttr":$site);
  let hasCustomAssemblyFormat = 1;
  let genVerifyDecl = 1;
  let builders = [
    AttrBuilder<(ins "int64_t":$size), [{ return $_get($_ctxt, size, ::mlir::FlatSymbolRefAttr()); }]>,
    AttrBuilderWithInferredContext<(ins "::mlir::FlatSymbolRefAttr":$site),
      [{ return $_get(site.getContext(), 0, site); }]>
  ];
  let extraClassDeclaration = [{
    bool isStatic() const { return !getSite(); }
  }];
}

def SSM_StatsAttr : SSM_Attr<"Stats", "stats"> {
  let summary = "measured statistics of a value";
  let description = [{
    Histogram entropy in nats over `bins` equal bins of [`min`, `max`], and the
    moments fusion and quantization look at. Example:

    `#ssm.stats<entropy = 2.27, bins = 256, min = -0.28, max = 4.1, mean = 0.02, variance = 0.11, kurtosis = 9.2>`
  }];
  let parameters = (ins SSM_Double:$entropy, "int64_t":$bins, SSM_Double:$min, SSM_Double:$max,
                        SSM_Double:$mean, SSM_Double:$variance, SSM_Double:$kurtosis);
  let assemblyFormat = [{
    `<` struct(params) `>`
  }];
  let genVerifyDecl = 1;
}

def SSM_ScoreAttr : SSM_Attr<"Score", "score"> {
  let summary = "terms of the fusion score S(R) = alpha H + beta AI - gamma M";
  let description = [{
    The normalised terms and the resulting score of a fused region. Example:

    `#ssm.score<entropy = 0.61, intensity = 0.4, memory = 0.2, score = 0.58, threshold = 0.52>`
  }];
  let parameters = (ins SSM_Double:$entropy, SSM_Double:$intensity, SSM_Double:$memory,
                        SSM_Double:$score, SSM_Double:$threshold);
  let assemblyFormat = "`<` struct(params) `>`";
}

//===----------------------------------------------------------------------===//
// Enums
//===----------------------------------------------------------------------===//

def SSM_Granularity : I32EnumAttr<"Granularity", "elements that share a quantization scale", [
    I32EnumAttrCase<"Tensor", 0, "tensor">,
    I32EnumAttrCase<"Token", 1, "token">,
    I32EnumAttrCase<"Channel", 2, "channel">]> {
  let cppNamespace = "::corey::ssm";
  let genSpecializedAttr = 0;
}
def SSM_GranularityAttr : EnumAttr<SSM_Dialect, SSM_Granularity, "granularity"> {
  let assemblyFormat = "$value";
}

#endif // COREY_DIALECT_SSM_IR_SSMDIALECT_TD
