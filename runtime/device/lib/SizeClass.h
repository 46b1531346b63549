//===- SizeClass.h - Sizes that blocks of an arena have ---------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_DEVICE_SIZECLASS_H
#define COREY_DEVICE_SIZECLASS_H

#include <algorithm>
#include <cstddef>

namespace corey::device {

/// The class of a size, of four per power of two, and the size that every block
/// of the class has.
inline unsigned sizeClassOf(size_t size, size_t &rounded) {
  size = std::max<size_t>(size, 256);
  unsigned log = 63 - __builtin_clzll(size - 1);
  size_t quarter = size_t(1) << (log - 2);
  // In (2^log, 2^(log+1)]: rounded up to quarters of 2^log.
  size_t steps = (size - (size_t(1) << log) + quarter - 1) / quarter;
  rounded = (size_t(1) << log) + steps * quarter;
  return 4 * log + static_cast<unsigned>(steps) - 1;
}

} // namespace corey::device

#endif // COREY_DEVICE_SIZECLASS_H
