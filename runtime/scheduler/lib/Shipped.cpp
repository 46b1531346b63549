//===- Shipped.cpp - Data that is part of the library ---------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "Shipped.h"

#include <algorithm>

using namespace corey::scheduler;

namespace {
struct File {
  const char *name, *text;
};

// The build makes the list of the files in data/.
constexpr File files[] = {
#include "ShippedData.inc"
    {nullptr, nullptr}};
} // namespace

const char *corey::scheduler::shippedFile(std::string_view name) {
  for (const File *file = files; file->name; ++file)
    if (name == file->name)
      return file->text;
  return nullptr;
}

std::vector<std::string_view> corey::scheduler::shippedFiles() {
  std::vector<std::string_view> names;
  for (const File *file = files; file->name; ++file)
    names.push_back(file->name);
  std::sort(names.begin(), names.end());
  return names;
}
