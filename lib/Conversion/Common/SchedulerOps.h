//===- SchedulerOps.h - Lowering of what the scheduler serves ---*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_LIB_CONVERSION_COMMON_SCHEDULEROPS_H
#define COREY_LIB_CONVERSION_COMMON_SCHEDULEROPS_H

#include "mlir/IR/PatternMatch.h"

namespace corey {

/// Lowers `ssm.bind_chunk` to a call of `corey_rt_chunk` and `ssm.observe` to
/// one of `observeFunction`, which takes what `corey_rt_observe` does.
void populateSchedulerLowerings(mlir::RewritePatternSet &patterns,
                                llvm::StringRef observeFunction);

} // namespace corey

#endif // COREY_LIB_CONVERSION_COMMON_SCHEDULEROPS_H
