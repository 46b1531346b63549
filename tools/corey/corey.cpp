//===- corey.cpp - Dispatch to the tools by name --------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Tools.h"
#include "llvm/ADT/StringRef.h"
#include "llvm/Support/PrettyStackTrace.h"
#include "llvm/Support/raw_ostream.h"

using namespace corey;

namespace {
struct Tool {
  llvm::StringLiteral name;
  int (*main)(int, char **);
  llvm::StringLiteral what;
};
} // namespace

static constexpr Tool kTools[] = {
    {"corey-run", coreyRunMain, "compile and run a program"},
    {"corey-bench", coreyBenchMain, "benchmarks"},
    {"corey-translate", coreyTranslateMain,
     "export a program: LLVM IR, object, shared library"},
    {"corey-opt", coreyOptMain, "run passes on .mlir"},
    {"corey-lsp-server", coreyLspServerMain, "language server for .mlir"},
    {"corey-reduce", coreyReduceMain, "reduce a failing .mlir"},
};

int main(int argc, char **argv) {
  llvm::setBugReportMsg("Please report this crash to COREY with the command "
                        "line and the input.\n");
  llvm::StringRef self(argv[0]);
  self = self.substr(self.find_last_of('/') + 1);
  for (const Tool &tool : kTools)
    if (self == tool.name)
      return tool.main(argc, argv);
  // `corey run ...` and `corey corey-run ...` work as well.
  if (argc > 1)
    for (const Tool &tool : kTools)
      if (argv[1] == tool.name ||
          argv[1] == tool.name.drop_front(llvm::StringRef("corey-").size()))
        return tool.main(argc - 1, argv + 1);
  llvm::raw_ostream &os = argc > 1 ? llvm::errs() : llvm::outs();
  if (argc > 1)
    os << "corey: error: expected a tool, got '" << argv[1] << "'\n";
  os << "usage: corey <tool> [arguments]\n\ntools:\n";
  for (const Tool &tool : kTools)
    os << "  " << tool.name << ": " << tool.what << "\n";
  return argc > 1;
}
