//===- SSMInterfaces.td - Interfaces of the ssm dialect ----*- tablegen -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_DIALECT_SSM_IR_SSMINTERFACES_TD
#define COREY_DIALECT_SSM_IR_SSMINTERFACES_TD

include "mlir/IR/OpBase.td"

def SSM_DimSpecOpInterface : OpInterface<"DimSpecOpInterface"> {
  let cppNamespace = "::corey::ssm";
  let description = [{
    An op whose shapes follow one line of named dimensions, for example

        x:B,L,D weight:D,W state:R,W-1,D -> y:B,L,D

    The verifier, result type inference, shape reification and the checks made
    on the arguments of a compiled function are all derived from that line, so
    a shape rule is written once. Grammar: a name per operand and per result in
    ODS order; dimensions are a symbol, a symbol plus or minus a constant, a
    constant, or a leading `...` that stands for any number of dimensions; `_`
    is an operand that has none.
    Only the symbols B, L, S and R, and what `...` covers, may be dynamic.
  }];
  let methods = [
    InterfaceMethod<"The dimension line of this op as it stands.",
      "::llvm::StringRef", "getDimSpec">,
    InterfaceMethod<"One value per operand of the line; null where an optional operand is absent.",
      "::llvm::SmallVector<::mlir::Value>", "getSpecOperands">,
    InterfaceMethod<"One value per result of the line; null where an optional result is absent.",
      "::llvm::SmallVector<::mlir::Value>", "getSpecResults">
  ];
}

def SSM_FusableOpInterface : OpInterface<"FusableOpInterface"> {
  let cppNamespace = "::corey::ssm";
  let description = [{
    What fusion needs to know of an op: its arithmetic by unit, and, for
    pointwise ops, its scalar function, so that any kernel can inline it as a
    prologue or an epilogue.
  }];
  let methods = [
    InterfaceMethod<[{
        Arithmetic of one execution. Dynamic dimensions count as `dynamicDim`
        elements.
      }],
      "::corey::ssm::OpCost", "getCost", (ins "int64_t":$dynamicDim)>,
    InterfaceMethod<"Whether each output element depends on one element of each operand.",
      "bool", "isPointwise", (ins), [{}], [{ return false; }]>,
    InterfaceMethod<[{
        The operands whose every element a kernel of this op reads once, where it
        works on it. Pointwise producers of such an operand can be computed right
        there. Kernels of ops that have any also write each element of their first
        result once and never read it back, so that pointwise consumers can be
        computed before it is written.
      }],
      "::llvm::SmallVector<::mlir::OpOperand *>", "getStreamedOperands", (ins), [{}], [{ return {}; }]>,
    InterfaceMethod<[{
        Emits the scalar function of a pointwise op. `operands` are f32 scalars
        or vectors, one per tensor operand; returns an f32 value of the same
        shape. Only arith and math ops are created.
      }],
      "::mlir::Value", "emitScalar",
      (ins "::mlir::OpBuilder &":$builder, "::mlir::Location":$loc,
           "::mlir::ValueRange":$operands),
      [{}], [{ return {}; }]>
  ];
}

def SSM_ScanOpInterface : OpInterface<"ScanOpInterface"> {
  let cppNamespace = "::corey::ssm";
  let description = [{
    A recurrence along L that carries a state and is cut into chunks. The chunk
    is either an attribute (a constant or a named run-time site) or, once bound,
    an `index` operand; a scan with neither is not cut.
  }];
  let methods = [
    InterfaceMethod<"The chunk as an attribute; null when absent.",
      "::corey::ssm::ChunkAttr", "getScanChunkAttr">,
    InterfaceMethod<"The chunk as a value; null when absent.",
      "::mlir::Value", "getScanChunk">,
    InterfaceMethod<"Replaces the chunk attribute by a value.",
      "void", "bindScanChunk", (ins "::mlir::Value":$chunk)>,
    InterfaceMethod<"The operand whose two leading dimensions are B and L.",
      "::mlir::Value", "getScanInput">
  ];
}

#endif // COREY_DIALECT_SSM_IR_SSMINTERFACES_TD
