//===- DiskCache.h - What was compiled, kept on disk ------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// Folders of scheduler::cacheDirectory() whose files are entries: what was
// compiled, by a key that is a digest of everything it depends on. Any number
// of processes may read and write them at a time.
//
//===----------------------------------------------------------------------===//

#ifndef COREY_DEVICE_DISKCACHE_H
#define COREY_DEVICE_DISKCACHE_H

#include "corey/Status.h"
#include <cstdint>
#include <string>
#include <string_view>

namespace corey::device {

class DiskCache {
public:
  /// Entries are "<folder>/<key>.<extension>", of 1 GiB in all unless
  /// `maxBytes` is another number: those that were not used for longest go
  /// first.
  DiskCache(std::string folder, std::string extension,
            uint64_t maxBytes = uint64_t(1) << 30)
      : folder(std::move(folder)), extension(std::move(extension)),
        maxBytes(maxBytes) {}

  /// Where the entry of a key lies; empty if nothing is to be kept.
  std::string path(const std::string &key) const;
  /// The payload of an entry. Errors: NotFound if there is none, IOError if it
  /// is not whole or of another key.
  Expected<std::string> read(const std::string &key) const;
  /// Keeps a payload. Readers see it, or what was there before, and never a
  /// part. Errors: NotFound if nothing is to be kept, IOError.
  Status write(const std::string &key, std::string_view payload) const;

private:
  void removeOldest(const std::string &kept) const;

  std::string folder, extension;
  uint64_t maxBytes;
};

} // namespace corey::device

#endif // COREY_DEVICE_DISKCACHE_H
