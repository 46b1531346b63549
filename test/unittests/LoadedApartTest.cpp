//===- LoadedApartTest.cpp - libcorey.so whose names nobody sees ----------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// Interpreters load their extensions, and what those are linked with, apart
// from one another: compiled code must find OpenMP's functions all the same.
//
//===----------------------------------------------------------------------===//

#include "corey/corey.h"
#include <cstdio>
#include <cstring>
#include <dlfcn.h>

static const char kProgram[] =
    "func.func @main(%x: tensor<?x64xf32>) -> tensor<?x64xf32> {\n"
    "  %0 = ssm.neg %x : tensor<?x64xf32>\n"
    "  return %0 : tensor<?x64xf32>\n"
    "}\n";

int main() {
  void *library = dlopen(COREY_LIBRARY, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  if (dlsym(RTLD_DEFAULT, "__kmpc_fork_call")) {
    std::fprintf(stderr, "expected no OpenMP in the process, got one\n");
    return 1;
  }
#define LOOK_UP(name)                                                          \
  auto name##_ = reinterpret_cast<decltype(&name)>(dlsym(library, #name))
  LOOK_UP(corey_last_error);
  LOOK_UP(corey_context_create);
  LOOK_UP(corey_compile);
  LOOK_UP(corey_run);
  corey_context *context = nullptr;
  corey_executable *program = nullptr;
  float x[128], y[128] = {};
  for (int i = 0; i < 128; ++i)
    x[i] = i;
  int64_t shape[] = {2, 64};
  corey_tensor in = {x, COREY_F32, COREY_CPU, 0, 2, shape, nullptr};
  corey_tensor out = {y, COREY_F32, COREY_CPU, 0, 2, shape, nullptr};
  if (corey_context_create_("cpu", 2, &context) != COREY_OK ||
      corey_compile_(context, kProgram, std::strlen(kProgram), nullptr, nullptr,
                     &program) != COREY_OK ||
      corey_run_(program, "main", &in, 1, &out, 1) != COREY_OK) {
    std::fprintf(stderr, "%s\n", corey_last_error_());
    return 1;
  }
  for (int i = 0; i < 128; ++i)
    if (y[i] != -i) {
      std::fprintf(stderr, "expected %d, got %g\n", -i, y[i]);
      return 1;
    }
  return 0;
}
