//===- SafeTensors.h - Reading and writing safetensors files ----*- C++ -*-===//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//===----------------------------------------------------------------------===//
///
/// \file
/// Reads and writes files in the safetensors format: eight bytes that give the
/// length of a JSON header in little-endian order, the header, and the bytes
/// of the tensors. Every message about a file is one line of the form
/// "<path>: <what>; expected <x>, got <y>".
///
//===----------------------------------------------------------------------===//

#ifndef COREY_SAFETENSORS_H
#define COREY_SAFETENSORS_H

#include "corey/Status.h"
#include "corey/Tensor.h"

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace corey {

/// An open safetensors file, mapped into memory and checked completely.
///
/// Copies share the mapping, and so do the tensors read from it, which outlive
/// the object that gave them. The mapping is private: writing to a tensor
/// changes what this object's other tensors of the same name see, never the
/// file. The file must not be truncated or modified in place while it is
/// mapped; replacing it by a rename, as `writeSafeTensors` does, is safe.
/// Concurrent calls of const members are safe.
class SafeTensors {
public:
  /// The longest header that `open` accepts and `writeSafeTensors` writes, in
  /// bytes.
  static constexpr uint64_t MaxHeaderBytes = 100000000;

  /// Maps the file at \p Path and checks its header: the JSON syntax, that no
  /// key is repeated, each tensor's dtype, shape and offsets, and that the
  /// tensors cover the data section without overlap, hole or trailing bytes.
  /// Fails with `NotFound` if there is no such file, with `IOError` if it
  /// cannot be read or is not a regular file, with `Unsupported` for a dtype
  /// that `DType` lacks, and with `InvalidArgument` for every other fault.
  static Expected<SafeTensors> open(const std::string &Path);

  /// Returns the path that was opened.
  const std::string &path() const { return Path; }

  /// Returns the names of the tensors in the order of the file's header.
  const std::vector<std::string> &names() const { return Names; }

  /// Returns whether the file holds a tensor called \p Name.
  bool contains(std::string_view Name) const {
    return Entries.find(Name) != Entries.end();
  }

  /// Returns the tensor called \p Name, contiguous and in host memory. It is a
  /// view of the mapping, which it keeps alive, unless the file places its
  /// data at an offset that is not a multiple of the element size; then it is
  /// a copy. Fails with `NotFound` if there is no such tensor and with
  /// `OutOfMemory` if a copy cannot be allocated.
  Expected<Tensor> get(std::string_view Name) const;

  /// Returns the strings of the header's "__metadata__" entry, empty if there
  /// is none.
  const std::map<std::string, std::string> &metadata() const {
    return Metadata;
  }

private:
  SafeTensors() = default;

  struct Entry {
    DType Type;
    std::vector<int64_t> Shape;
    // Byte offsets from the start of the data section.
    int64_t Begin;
    int64_t End;
  };

  // Parses and checks the header, HeaderLength bytes long, at offset 8 of the
  // mapping. DataLength is the number of bytes that follow it.
  Status parseHeader(uint64_t HeaderLength, int64_t DataLength);

  std::string Path;
  std::vector<std::string> Names;
  std::map<std::string, Entry, std::less<>> Entries;
  std::map<std::string, std::string> Metadata;
  // The start of the data section; owns the mapping.
  std::shared_ptr<void> DataSection;
};

/// Writes \p Tensors and \p Metadata to a safetensors file at \p Path,
/// replacing any file there at once: a reader sees the old file or the new one,
/// and a failure leaves the old one. A symbolic link at \p Path is replaced
/// itself, not followed. The header lists the tensors in the given order. Their
/// data is stored row-major by descending element size, so that every tensor is
/// aligned and can be read without a copy. Tensors may have any strides but
/// must be in host memory. Fails with `InvalidArgument` for a repeated or
/// reserved ("__metadata__") name, text that is not UTF-8, or a header beyond
/// `SafeTensors::MaxHeaderBytes`; with `Unsupported` for a tensor on another
/// device; and with `NotFound`, `IOError` or `OutOfMemory`.
Status
writeSafeTensors(const std::string &Path,
                 const std::vector<std::pair<std::string, Tensor>> &Tensors,
                 const std::map<std::string, std::string> &Metadata = {});

/// Splits a reference to one tensor of a file, "<path>:<key>", into the path
/// and the key. The split is at the last ':' before which the path ends in
/// ".safetensors", or at the last ':' if there is none, so both parts may
/// contain ':'. Fails with `InvalidArgument` if there is no ':' or a part is
/// empty. Does not look at the file system.
Expected<std::pair<std::string, std::string>>
splitTensorRef(std::string_view Ref);

} // namespace corey

#endif // COREY_SAFETENSORS_H
