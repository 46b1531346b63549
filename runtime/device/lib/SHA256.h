//===- SHA256.h - The hash function SHA-256 ---------------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_DEVICE_SHA256_H
#define COREY_DEVICE_SHA256_H

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace corey::device {

/// The hash of everything that was added, as FIPS 180-4 defines it.
class SHA256 {
public:
  void add(std::string_view bytes);
  /// Adds the length before the text, so that lists of texts differ where their
  /// elements do.
  void addField(std::string_view text);
  /// The digest; nothing may be added afterwards.
  std::array<uint8_t, 32> finish();
  /// The digest in 64 hexadecimal digits.
  std::string finishHex();

private:
  void compress(const uint8_t *block);
  uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                       0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  uint8_t buffer[64];
  size_t filled = 0;
  uint64_t length = 0;
};

} // namespace corey::device

#endif // COREY_DEVICE_SHA256_H
