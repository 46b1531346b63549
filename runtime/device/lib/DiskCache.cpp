//===- DiskCache.cpp - What was compiled, kept on disk --------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// An entry is "COREYBIN", the key, the payload's length as eight bytes with the
// least first, the payload's digest, and the payload. Keys are digests in 64
// hexadecimal digits.
//
//===----------------------------------------------------------------------===//

#include "corey/Device/DiskCache.h"
#include "SHA256.h"
#include "corey/Scheduler/ChunkTable.h"
#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <unistd.h>
#include <vector>

using namespace corey;
using namespace corey::device;
namespace fs = std::filesystem;

static constexpr std::string_view kMagic = "COREYBIN";
static constexpr size_t kHeaderBytes = 8 + 64 + 8 + 32;

static std::string headerOf(const std::string &key, std::string_view payload) {
  std::string header = std::string(kMagic) + key;
  for (int i = 0; i < 8; ++i)
    header += static_cast<char>(uint64_t(payload.size()) >> (8 * i));
  SHA256 hash;
  hash.add(payload);
  std::array<uint8_t, 32> digest = hash.finish();
  return header.append(digest.begin(), digest.end());
}

std::string DiskCache::path(const std::string &key) const {
  std::string root = scheduler::cacheDirectory();
  return root.empty() ? root
                      : root + "/" + folder + "/" + key + "." + extension;
}

Expected<std::string> DiskCache::read(const std::string &key) const {
  std::string where = path(key);
  std::error_code error;
  fs::file_status status = fs::status(where, error);
  if (where.empty() || !fs::exists(status))
    return Status::notFound("expected an entry of the cache at '" + where +
                            "', got none");
  auto damaged = [&](const char *got) {
    return Status::ioError(where +
                           ": expected a whole entry of the cache, got " + got);
  };
  if (!fs::is_regular_file(status))
    return damaged("no file");
  std::ifstream file(where, std::ios::binary | std::ios::ate);
  std::string bytes(
      static_cast<size_t>(std::max<std::streamoff>(file.tellg(), 0)), 0);
  file.seekg(0);
  file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!file)
    return damaged("one that cannot be read");
  if (bytes.size() < kHeaderBytes)
    return damaged("a part of one");
  std::string payload = bytes.substr(kHeaderBytes);
  bytes.resize(kHeaderBytes);
  std::string expected = headerOf(key, payload);
  if (bytes.compare(0, kMagic.size() + key.size(), expected, 0,
                    kMagic.size() + key.size()) != 0)
    return damaged("another file");
  if (bytes != expected)
    return damaged("one whose digest does not match");
  // The time of the last use. Not to know it is no error.
  fs::last_write_time(where, fs::file_time_type::clock::now(), error);
  return payload;
}

Status DiskCache::write(const std::string &key,
                        std::string_view payload) const {
  fs::path where = path(key);
  if (where.empty())
    return Status::notFound("expected a folder for the cache, got none");
  std::error_code error;
  fs::create_directories(where.parent_path(), error);
  static std::atomic<unsigned> serial{0};
  fs::path temporary = where;
  temporary +=
      "." + std::to_string(getpid()) + "." + std::to_string(serial++) + ".tmp";
  bool written;
  {
    std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
    file << headerOf(key, payload) << payload;
    file.flush();
    written = file.good();
  }
  if (written)
    fs::rename(temporary, where, error);
  if (written && !error) {
    removeOldest(where);
    return Status::ok();
  }
  std::error_code ignored;
  fs::remove(temporary, ignored);
  return Status::ioError(where.string() +
                         ": expected to write an entry of the cache, got " +
                         (error ? error.message() : "an error"));
}

void DiskCache::removeOldest(const std::string &kept) const {
  struct File {
    fs::file_time_type used;
    uint64_t size;
    fs::path path;
  };
  std::vector<File> files;
  uint64_t total = 0;
  std::error_code error;
  // Files may go away meanwhile: other processes do the same.
  for (fs::directory_iterator it(fs::path(kept).parent_path(), error), end;
       !error && it != end; it.increment(error)) {
    std::error_code gone;
    File file{it->last_write_time(gone), it->file_size(gone), it->path()};
    if (gone || !it->is_regular_file(gone))
      continue;
    total += file.size;
    if (file.path != kept)
      files.push_back(std::move(file));
  }
  if (total <= maxBytes)
    return;
  std::sort(files.begin(), files.end(),
            [](const File &a, const File &b) { return a.used < b.used; });
  for (const File &file : files) {
    if (total <= maxBytes)
      return;
    if (fs::remove(file.path, error))
      total -= file.size;
  }
}
