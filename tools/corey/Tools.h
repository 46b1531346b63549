//===- Tools.h - Main functions of the tools --------------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_TOOLS_COREY_TOOLS_H
#define COREY_TOOLS_COREY_TOOLS_H

namespace corey {

int coreyOptMain(int argc, char **argv);
int coreyLspServerMain(int argc, char **argv);
int coreyReduceMain(int argc, char **argv);
int coreyRunMain(int argc, char **argv);
int coreyTranslateMain(int argc, char **argv);
int coreyBenchMain(int argc, char **argv);

} // namespace corey

#endif // COREY_TOOLS_COREY_TOOLS_H
