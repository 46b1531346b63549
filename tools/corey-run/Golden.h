//===- Golden.h - Runs folders of golden cases ------------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_TOOLS_COREY_RUN_GOLDEN_H
#define COREY_TOOLS_COREY_RUN_GOLDEN_H

#include "corey/Executable.h"
#include <string>

namespace corey {

/// Runs every case of `folder`/cases.json and prints a line per case and a last
/// line `N passed, M failed`. Returns the exit code: 0 when all passed. A
/// negative `rtol` stands for the default: 2e-6 for ops, 1e-5 for programs.
int runGolden(Context &context, const std::string &folder,
              const CompileOptions &options, double rtol, double atol);

} // namespace corey

#endif // COREY_TOOLS_COREY_RUN_GOLDEN_H
