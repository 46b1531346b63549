//===- OpBuffers.h - Tensors of an op as memrefs ----------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_LIB_CONVERSION_COMMON_OPBUFFERS_H
#define COREY_LIB_CONVERSION_COMMON_OPBUFFERS_H

#include "corey/Analysis/FusionPlan.h"
#include "corey/Dialect/SSM/IR/SSMOps.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/IR/PatternMatch.h"

namespace corey {

/// The half of a lowering that every target shares: an op on tensors, alone or
/// the anchor of an `ssm.fused`, becomes code on memrefs. Inputs are viewed as
/// memrefs (see view()), outputs are allocated, and the op is replaced by the
/// tensors in them.
class OpBuffers {
public:
  OpBuffers(mlir::PatternRewriter &rewriter, mlir::Operation *op);

  /// Views a tensor that is in memory as a memref, with an innermost stride of
  /// 1 unless it isReadByElement(); null for null.
  mlir::Value view(mlir::Value tensor);
  /// Says that the kernels of the op read `tensor` one element at a time, or
  /// can where it has strides that ask for that. Null is nothing.
  void readByElement(mlir::Value tensor);
  /// Whether `tensor` is an argument that may have any strides, and read so.
  bool isReadByElement(mlir::Value tensor) const {
    return byElement.contains(tensor) && hasAnyStrides(tensor);
  }
  /// Whether `tensor` is an argument that may have any strides.
  static bool hasAnyStrides(mlir::Value tensor);
  /// Whether `value` is nothing but a result of the function that may have any
  /// strides.
  static bool isAnyStridesResult(mlir::Value value);
  /// Whether `tensor` is a weight of the program, or a view of one: nothing
  /// writes to it while a call runs, nor just before.
  static bool isWeight(mlir::Value tensor);
  /// Whether the kernel of the fused region computes `tensor` itself.
  bool isComputed(mlir::Value tensor) const;
  /// Whether the loops of the kernel make `tensor` themselves: it is the first
  /// result of the op, of the rotation behind it, or of the norm before it.
  bool isMadeByLoops(mlir::Value tensor) const {
    mlir::Operation *producer = tensor.getDefiningOp();
    return producer && (producer == op || producer == rotation() ||
                        (plan && producer == plan->prologue()));
  }
  /// The transform behind the op, in its kernel; null if there is none.
  ssm::HadamardOp rotation() const;
  /// What the loops of the kernel make in the end, before the epilogue.
  mlir::Value lastOfLoops() const {
    mlir::Operation *last = plan && plan->rotation ? plan->rotation : op;
    return last->getResult(0);
  }
  /// Whether other ops follow the op in its region, the end of which is what
  /// the kernel writes.
  bool hasEpilogue() const { return plan && plan->result != op->getResult(0); }
  /// The type of what is written for result `index`: that of the end of the
  /// epilogue for the first.
  mlir::RankedTensorType outputType(unsigned index) const;
  /// Allocates the memref of result `index`, with the reified shape.
  mlir::Value allocate(unsigned index);
  /// Replaces the op by the given buffers; `buffers` has one per result.
  void replaceWith(mlir::ValueRange buffers);

  /// Calls a function of the run-time library (runtime/device).
  mlir::Value callRuntime(llvm::StringRef name, mlir::ValueRange arguments,
                          mlir::Type result = {});
  /// Address of element 0 of a memref, as i64.
  mlir::Value address(mlir::Value memref);
  mlir::Value toI64(mlir::Value index);
  /// Address of a NUL-terminated constant with the name of a site, as i64.
  mlir::Value siteAddress(mlir::FlatSymbolRefAttr site);

  mlir::Operation *op;
  std::optional<FusionPlan> plan;

private:
  mlir::PatternRewriter &rewriter;
  mlir::Location where;
  mlir::ReifiedRankedShapedTypeDims resultShapes;
  llvm::DenseSet<mlir::Value> byElement;
};

/// Replaces `op` by a tensor of no content if nothing needs what it computes:
/// it is a pointwise op, a rotation or a norm of one result whose users are no
/// better, or want its sizes. A lowering leaves such ops of a region that it
/// has computed itself.
bool replaceUnneeded(mlir::PatternRewriter &rewriter, mlir::Operation *op);

/// A memref type of the shape of `type` with dynamic strides but for the
/// innermost one.
mlir::MemRefType stridedMemRefType(mlir::RankedTensorType type);

} // namespace corey

#endif // COREY_LIB_CONVERSION_COMMON_OPBUFFERS_H
