//===- LoweringUtils.h - Shared pieces of the ssm lowerings -----*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_LIB_CONVERSION_SSMTOLINALG_LOWERINGUTILS_H
#define COREY_LIB_CONVERSION_SSMTOLINALG_LOWERINGUTILS_H

#include "../Common/OpBuffers.h"
#include "LoopEmitter.h"
#include "mlir/IR/PatternMatch.h"
#include "mlir/IR/TypeUtilities.h"

namespace corey {

/// Lowers one op on tensors to loops on memrefs: inputs are viewed as memrefs
/// with a unit innermost stride, outputs are allocated, and the loops stand in
/// between. If the op is the anchor of an `ssm.fused`, the pointwise ops around
/// it are computed where its loops load and store, without their knowing.
class OpLowering : public LoopEmitter, public OpBuffers {
public:
  OpLowering(mlir::PatternRewriter &rewriter, mlir::Operation *op,
             VectorTarget target);

  /// The memref of a tensor operand; null for null. Loads from that of a fused
  /// producer compute it.
  Value buffer(Value tensor);
  /// Allocates the memref of result `index`, with the reified shape. Stores to
  /// the first go through the epilogue, which its element type is that of.
  Value output(unsigned index);
  /// What makes of the op's result, at an index, what the rotation behind it
  /// transforms. Made where the loops begin.
  Transform toRotation();
  /// What computes the result of a region of pointwise ops, of which this is
  /// the last, at an index. Made where the loops begin.
  Compute regionResult();
  /// An f32 buffer of the shape of `memref`.
  Value f32Like(Value memref);
  /// Replaces the op by the given buffers; `buffers` has one per result.
  void replace(mlir::PatternRewriter &rewriter, mlir::ValueRange buffers) {
    replaceWith(buffers);
  }

  /// Loops in parallel over every index of the first `rank` axes.
  void parallelOver(Value memref, int64_t rank,
                    llvm::function_ref<void(mlir::ValueRange ivs)> body);

  /// The same, one index after another.
  void serialOver(Value memref, int64_t rank,
                  llvm::function_ref<void(mlir::ValueRange ivs)> body);

private:
  /// What `value` of the fused region is, at an index, where the loops have
  /// made `from`.
  Transform transformOf(Value from, Value value);
  /// Views what `value` of the fused region is computed from as memrefs.
  void openLeaves(Value value);
  /// A value of the fused region at an index, or those that follow on the last
  /// axis. `known` holds what there is of it at that index already: values are
  /// computed once however many paths lead to them.
  Value evaluate(Value value, mlir::ValueRange indices, int64_t lanes,
                 llvm::DenseMap<Value, Value> &known);

  /// The memrefs of what the region gets from outside; null for what it
  /// computes.
  llvm::DenseMap<Value, Value> leaves;
};

/// `ivs` followed by `last`.
llvm::SmallVector<mlir::Value> append(mlir::ValueRange ivs, mlir::Value last);

/// The sequences a scan runs over: the rows of a batch, or the sequences packed
/// along L of the only row.
struct Sequences {
  /// `input` is [B, L, ...]; `starts` may be null. Emits the check of `starts`.
  Sequences(LoopEmitter &e, OpLowering &lowering, mlir::Value input,
            mlir::Value starts);
  struct Range {
    mlir::Value batch, begin, end;
  };
  /// Tokens of sequence `row`. Always within [0, L], whatever `starts` holds.
  Range range(LoopEmitter &e, mlir::Value row) const;

  mlir::Value count;

private:
  mlir::Value starts, length;
};

/// The states that an op starts from and leaves: each sequence has a row of its
/// own, or names a slot of a pool.
class StateRows {
public:
  /// `initial` and `slots` are operands, null where absent; result 1 of the op
  /// are the last states. A pool is copied to where it is to be left, unless it
  /// is there already, and slots that it does not have are reported.
  StateRows(OpLowering &lowering, mlir::Value initial, mlir::Value slots,
            const Sequences &sequences);

  struct Place {
    mlir::Value row;
    /// Whether the sequence has the row; null if it does in any case. If not,
    /// it starts from zero and its last state goes nowhere.
    mlir::Value there;
  };
  Place of(LoopEmitter &e, mlir::Value sequence) const;
  /// The state at `indices` behind the row, or `lanes` of them; a scalar for
  /// 0. Zero where there is none.
  mlir::Value load(LoopEmitter &e, const Place &place, mlir::ValueRange indices,
                   int64_t lanes) const;
  /// Has `store` write to `last`, if the place is there.
  void store(LoopEmitter &e, const Place &place,
             llvm::function_ref<void()> store) const;

  /// Null where the op has no such states.
  mlir::Value initial, last;

private:
  mlir::Value slots;
};

/// The target for registers of `vectorBits`, 0 meaning the host's; reports an
/// error at `op` for anything but 0, 256 and 512.
mlir::FailureOr<VectorTarget> getVectorTarget(mlir::Operation *op,
                                              int64_t vectorBits);

/// The chunk of a scan as a value of at least 1: its operand, its constant, or
/// the whole length of `input`. Fails, with an error, on an unbound site.
mlir::FailureOr<mlir::Value> getChunk(LoopEmitter &e, ssm::ScanOpInterface op,
                                      mlir::Value input);

template <typename OpTy>
struct SSMLowering : public mlir::OpRewritePattern<OpTy> {
  SSMLowering(mlir::MLIRContext *context, VectorTarget target)
      : mlir::OpRewritePattern<OpTy>(context), target(target) {}
  VectorTarget target;
};

void populateScanLowerings(mlir::RewritePatternSet &patterns,
                           VectorTarget target);
void populateSSDLowerings(mlir::RewritePatternSet &patterns,
                          VectorTarget target);
void populateRowLowerings(mlir::RewritePatternSet &patterns,
                          VectorTarget target);
void populateElementwiseLowerings(mlir::RewritePatternSet &patterns,
                                  VectorTarget target);
void populateQuantizationLowerings(mlir::RewritePatternSet &patterns,
                                   VectorTarget target);

} // namespace corey

#endif // COREY_LIB_CONVERSION_SSMTOLINALG_LOWERINGUTILS_H
