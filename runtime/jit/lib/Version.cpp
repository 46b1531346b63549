//===- Version.cpp - Version of the library -------------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Executable.h"

const char *corey::getVersion() { return COREY_VERSION " (" COREY_COMMIT ")"; }
