//===- ProgramCache.cpp - Compiled programs on disk -----------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "ProgramCache.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/Config/llvm-config.h"
#include "llvm/Support/Alignment.h"
#include "llvm/Support/SHA256.h"
#include <cstring>
#include <link.h>
#include <type_traits>

using namespace corey;

//===----------------------------------------------------------------------===//
// Programs as bytes
//===----------------------------------------------------------------------===//
//
// Numbers are eight bytes, texts and lists their length and what is in them.
//
//===----------------------------------------------------------------------===//

namespace {
class Writer {
public:
  static constexpr bool isReader = false;
  std::string bytes;

  void number(uint64_t &value) {
    bytes.append(reinterpret_cast<const char *>(&value), sizeof(value));
  }
  void text(std::string &value) {
    uint64_t size = value.size();
    number(size);
    bytes += value;
  }
};

class Reader {
public:
  static constexpr bool isReader = true;
  explicit Reader(llvm::StringRef bytes) : bytes(bytes) {}
  llvm::StringRef bytes;
  bool ok = true;

  void number(uint64_t &value) {
    value = 0;
    if (bytes.size() < sizeof(value)) {
      ok = false;
      return;
    }
    std::memcpy(&value, bytes.data(), sizeof(value));
    bytes = bytes.drop_front(sizeof(value));
  }
  void text(std::string &value) {
    uint64_t size;
    number(size);
    if (size > bytes.size()) {
      ok = false;
      return;
    }
    value = bytes.take_front(size).str();
    bytes = bytes.drop_front(size);
  }
};

template <typename Archive> void visit(Archive &archive, std::string &text) {
  archive.text(text);
}

template <typename Archive, typename T>
std::enable_if_t<std::is_arithmetic_v<T> || std::is_enum_v<T>>
visit(Archive &archive, T &value) {
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(value));
  archive.number(word);
  std::memcpy(&value, &word, sizeof(value));
}

/// The number of a list's elements. None of them takes no bytes.
template <typename Archive, typename T>
size_t visitSize(Archive &archive, const std::vector<T> &list) {
  uint64_t size = list.size();
  archive.number(size);
  if constexpr (Archive::isReader)
    if (size > archive.bytes.size()) {
      archive.ok = false;
      size = 0;
    }
  return static_cast<size_t>(size);
}

template <typename Archive>
void visit(Archive &archive, std::vector<bool> &list) {
  list.resize(visitSize(archive, list));
  for (size_t i = 0; i < list.size(); ++i) {
    uint64_t word = list[i];
    archive.number(word);
    list[i] = word != 0;
  }
}

template <typename Archive, typename T>
void visit(Archive &archive, std::vector<T> &list);
template <typename Archive, typename... Members>
void visitAll(Archive &archive, Members &...members);

template <typename Archive> void visit(Archive &archive, ArgumentInfo &x) {
  visitAll(archive, x.name, x.dtype, x.shape, x.updatedInput);
}
template <typename Archive> void visit(Archive &archive, Constraint &x) {
  visitAll(archive, x.lhsArg, x.lhsDim, x.rhsArg, x.rhsDim, x.symbol);
}
template <typename Archive> void visit(Archive &archive, Function &x) {
  visitAll(archive, x.info.name, x.info.inputs, x.info.outputs, x.anyStrides,
           x.outputAnyStrides, x.weights, x.constraints, x.numDims,
           x.numResultDims);
}
template <typename Archive> void visit(Archive &archive, Weight &x) {
  visitAll(archive, x.info, x.key, x.prepared);
}
template <typename Archive>
void visit(Archive &archive, scheduler::Problem &x) {
  visitAll(archive, x.op, x.type, x.batch, x.length, x.channels, x.headDim,
           x.states, x.groups);
}
template <typename Archive>
void visit(Archive &archive, scheduler::Variant &x) {
  visitAll(archive, x.name, x.itemChannels, x.tile, x.resident, x.granularity,
           x.segmented, x.byRule);
}
template <typename Archive> void visit(Archive &archive, ChunkSite &x) {
  visitAll(archive, x.name, x.problem, x.variants, x.policy);
}
template <typename Archive> void visit(Archive &archive, TrafficInfo &x) {
  visitAll(archive, x.kernels, x.bytesRead, x.bytesWritten, x.bytesKept,
           x.predictedMs);
}
template <typename Archive>
void visit(Archive &archive, DeviceImage::Kernel &x) {
  visitAll(archive, x.name, x.code);
}
template <typename Archive>
void visit(Archive &archive, std::unique_ptr<Function> &function) {
  bool isThere = function != nullptr;
  visit(archive, isThere);
  if (!isThere)
    return;
  if (!function)
    function = std::make_unique<Function>();
  visit(archive, *function);
}

template <typename Archive, typename T>
void visit(Archive &archive, std::vector<T> &list) {
  list.resize(visitSize(archive, list));
  for (T &element : list)
    visit(archive, element);
}
template <typename Archive, typename... Members>
void visitAll(Archive &archive, Members &...members) {
  (visit(archive, members), ...);
}

template <typename Archive>
void visitProgram(Archive &archive, ProgramInfo &info, ProgramCode &code) {
  visitAll(archive, info.prefix, info.functions, info.weights, info.prepare,
           info.preparedWeights, info.chunkSites, info.observationSites,
           info.traffic, code.objects, code.image.kernels, code.image.chip);
}
} // namespace

std::string corey::writeProgram(ProgramInfo &info, ProgramCode &code) {
  Writer writer;
  visitProgram(writer, info, code);
  return std::move(writer.bytes);
}

bool corey::readProgram(llvm::StringRef bytes, ProgramInfo &info,
                        ProgramCode &code) {
  Reader reader(bytes);
  visitProgram(reader, info, code);
  return reader.ok && reader.bytes.empty();
}

//===----------------------------------------------------------------------===//
// Keys
//===----------------------------------------------------------------------===//

namespace {
/// Of the loaded object that holds `address`.
struct BuildId {
  uintptr_t address;
  std::string id;
};
} // namespace

static void findBuildId(const dl_phdr_info *object, BuildId &found) {
  auto startOf = [&](const ElfW(Phdr) & segment) {
    return static_cast<uintptr_t>(object->dlpi_addr + segment.p_vaddr);
  };
  llvm::ArrayRef<ElfW(Phdr)> segments(object->dlpi_phdr, object->dlpi_phnum);
  if (llvm::none_of(segments, [&](const ElfW(Phdr) & segment) {
        return segment.p_type == PT_LOAD && found.address >= startOf(segment) &&
               found.address - startOf(segment) < segment.p_memsz;
      }))
    return;
  for (const ElfW(Phdr) &segment : segments) {
    if (segment.p_type != PT_NOTE)
      continue;
    llvm::StringRef notes(reinterpret_cast<const char *>(startOf(segment)),
                          segment.p_memsz);
    ElfW(Nhdr) note;
    while (notes.size() >= sizeof(note)) {
      std::memcpy(&note, notes.data(), sizeof(note));
      size_t name = llvm::alignTo(note.n_namesz, 4),
             size = sizeof(note) + name + llvm::alignTo(note.n_descsz, 4);
      if (note.n_type == NT_GNU_BUILD_ID && size <= notes.size())
        found.id = notes.substr(sizeof(note) + name, note.n_descsz).str();
      notes = notes.drop_front(std::min(size, notes.size()));
    }
  }
}

std::string corey::compilerIdentity() {
  static const std::string identity = [] {
    static const char here = 0;
    BuildId found{reinterpret_cast<uintptr_t>(&here), ""};
    dl_iterate_phdr(
        [](dl_phdr_info *object, size_t, void *data) {
          findBuildId(object, *static_cast<BuildId *>(data));
          return 0;
        },
        &found);
    if (found.id.empty())
      return std::string();
    return std::string(getVersion()) +
           ", LLVM " LLVM_VERSION_STRING ", build " + llvm::toHex(found.id);
  }();
  return identity;
}

std::string corey::programKey(llvm::StringRef compiler, llvm::StringRef host,
                              llvm::StringRef device,
                              const CompileOptions &options,
                              llvm::StringRef source) {
  llvm::SHA256 hash;
  auto add = [&](llvm::StringRef field) {
    // Its length first: fields must not run into one another.
    hash.update(std::to_string(field.size()) + ":");
    hash.update(field);
  };
  for (llvm::StringRef field :
       {compiler, host, device, llvm::StringRef(options.policy),
        llvm::StringRef(options.fusion)})
    add(field);
  for (int number : {options.vectorBits, options.optLevel,
                     static_cast<int>(options.hoistWeights),
                     static_cast<int>(options.observeValues)})
    add(std::to_string(number));
  add(source);
  std::array<uint8_t, 32> digest = hash.final();
  return llvm::toHex(digest, /*LowerCase=*/true);
}
