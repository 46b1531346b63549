//===- ProgramCache.h - Compiled programs on disk ---------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_JIT_PROGRAMCACHE_H
#define COREY_JIT_PROGRAMCACHE_H

#include "Program.h"
#include "llvm/ADT/StringRef.h"
#include <optional>

namespace corey {

/// A program as bytes. Reading gives none for bytes that are no program.
std::string writeProgram(ProgramInfo &info, ProgramCode &code);
bool readProgram(llvm::StringRef bytes, ProgramInfo &info, ProgramCode &code);

/// What compiles: the version of COREY and of LLVM, and the build of this
/// library. Empty where the linker has not named the build.
std::string compilerIdentity();

/// The key of a program, of all that it depends on. `host` and `device` say
/// what its code is made for.
std::string programKey(llvm::StringRef compiler, llvm::StringRef host,
                       llvm::StringRef device, const CompileOptions &options,
                       llvm::StringRef source);

} // namespace corey

#endif // COREY_JIT_PROGRAMCACHE_H
