//===- SSMOps.h - Operations of the ssm dialect -----------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_DIALECT_SSM_IR_SSMOPS_H
#define COREY_DIALECT_SSM_IR_SSMOPS_H

#include "corey/Dialect/SSM/IR/SSMInterfaces.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/IR/BuiltinTypes.h"
#include "mlir/IR/SymbolTable.h"
#include "mlir/Interfaces/ControlFlowInterfaces.h"
#include "mlir/Interfaces/InferTypeOpInterface.h"
#include "mlir/Interfaces/SideEffectInterfaces.h"

namespace corey::ssm {

/// What `ssm.bind_chunk` reads: the scheduler's state.
struct SchedulerResource
    : public mlir::SideEffects::Resource::Base<SchedulerResource> {
  llvm::StringRef getName() final { return "SSMScheduler"; }
};

/// What `ssm.observe` writes: the statistics of a site.
struct StatisticsResource
    : public mlir::SideEffects::Resource::Base<StatisticsResource> {
  llvm::StringRef getName() final { return "SSMStatistics"; }
};

/// A pair of dimensions that must agree when an op runs but that its types
/// leave open: `lhs` of dimension `lhsDim` equals `rhs` of dimension `rhsDim`
/// plus `offset`, or equals `offset` where `rhs` is null.
struct DimConstraint {
  mlir::Value lhs;
  int64_t lhsDim;
  mlir::Value rhs;
  int64_t rhsDim;
  int64_t offset;
  /// The symbol both stand for, for messages.
  std::string symbol;
};

/// Appends what the types of `op` leave open; `op` may be any op.
void collectDimConstraints(mlir::Operation *op,
                           llvm::SmallVectorImpl<DimConstraint> &constraints);

namespace detail {

/// One value per operand entry of `spec`, in ODS order; null where absent, and
/// for what is not a tensor.
template <typename OpOrAdaptor>
llvm::SmallVector<mlir::Value> collectOperands(OpOrAdaptor op,
                                               llvm::StringRef spec) {
  llvm::SmallVector<mlir::Value> values;
  DimLine line(spec);
  for (auto [i, entry] : llvm::enumerate(line.operands)) {
    auto range = op.getODSOperands(i);
    bool isAbsent = range.empty() || entry.isPlaceholder();
    values.push_back(isAbsent ? mlir::Value() : *range.begin());
  }
  return values;
}

template <typename OpTy>
llvm::SmallVector<mlir::Value> collectResults(OpTy op, llvm::StringRef spec) {
  llvm::SmallVector<mlir::Value> values;
  unsigned count = DimLine(spec).results.size();
  for (unsigned i = 0; i < count; ++i) {
    auto range = op.getODSResults(i);
    values.push_back(range.empty() ? mlir::Value()
                                   : mlir::Value(*range.begin()));
  }
  return values;
}

/// Checks ranks, dimensions and element types of `op` against its line.
mlir::LogicalResult verifyDimSpec(DimSpecOpInterface op);

mlir::LogicalResult inferFromDimSpec(mlir::MLIRContext *context,
                                     std::optional<mlir::Location> location,
                                     llvm::StringRef spec,
                                     llvm::ArrayRef<mlir::Value> operands,
                                     llvm::SmallVectorImpl<mlir::Type> &types);

mlir::LogicalResult reifyFromDimSpec(DimSpecOpInterface op,
                                     mlir::OpBuilder &builder,
                                     mlir::ReifiedRankedShapedTypeDims &shapes);

/// Size of a dimension symbol of `op`, or kDynamic.
int64_t getSymbolSize(DimSpecOpInterface op, llvm::StringRef symbol);

mlir::LogicalResult verifyTrailingBroadcast(mlir::Operation *op);

OpCost elementwiseCost(mlir::Operation *op, int64_t dynamicDim);

} // namespace detail
} // namespace corey::ssm

#define GET_OP_CLASSES
#include "corey/Dialect/SSM/IR/SSMOps.h.inc"

#endif // COREY_DIALECT_SSM_IR_SSMOPS_H
