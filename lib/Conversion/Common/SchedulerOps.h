//===- SchedulerOps.h - Lowering of what the scheduler serves ---*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_LIB_CONVERSION_COMMON_SCHEDULEROPS_H
#define COREY_LIB_CONVERSION_COMMON_SCHEDULEROPS_H

#include "OpBuffers.h"

namespace corey {

/// What functions of the run-time library take of an observed tensor: site,
/// address, layout, rank and width, as corey_rt_observe() does.
struct ObservedBuffer {
  llvm::SmallVector<mlir::Value> operands;
  mlir::Value site() const { return operands[0]; }
  mlir::Value address() const { return operands[1]; }
};
/// Fails, with an error, for a rank that the library does not take.
mlir::FailureOr<ObservedBuffer> describeObserved(OpBuffers &buffers,
                                                 ssm::ObserveOp op,
                                                 mlir::OpBuilder &builder);

/// `count` i64 on the stack of the function, once per op: it may be in a loop.
mlir::Value allocateOnStack(mlir::Operation *op, mlir::OpBuilder &builder,
                            int64_t count);

/// Lowers `ssm.bind_chunk` to a call of `corey_rt_chunk`.
void populateChunkLowerings(mlir::RewritePatternSet &patterns);
/// Lowers `ssm.observe` to a call of `corey_rt_observe`.
void populateObserveLowerings(mlir::RewritePatternSet &patterns);

} // namespace corey

#endif // COREY_LIB_CONVERSION_COMMON_SCHEDULEROPS_H
