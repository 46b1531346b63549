//===- JsonOption.h - Where results are written -----------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_TOOLS_COREY_BENCH_JSONOPTION_H
#define COREY_TOOLS_COREY_BENCH_JSONOPTION_H

#include "llvm/Support/CommandLine.h"
#include <string>

namespace corey {

/// --json of a benchmark that prints a table otherwise.
class JsonOption : public llvm::cl::opt<std::string> {
public:
  explicit JsonOption(llvm::cl::OptionCategory &category)
      : opt("json",
            llvm::cl::desc("Write the results as JSON to a file, - for "
                           "standard output in place of the table"),
            llvm::cl::value_desc("file"), llvm::cl::cat(category)) {}
};

} // namespace corey

#endif // COREY_TOOLS_COREY_BENCH_JSONOPTION_H
