//===- SafeTensors.cpp - Reading and writing safetensors files ------------===//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//===----------------------------------------------------------------------===//

#include "corey/SafeTensors.h"

#include "llvm/ADT/StringRef.h"
#include "llvm/Support/Error.h"
#include "llvm/Support/JSON.h"
#include "llvm/Support/raw_ostream.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <iterator>
#include <optional>
#include <set>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

using namespace corey;
namespace json = llvm::json;

namespace {

constexpr uint64_t LengthBytes = 8;
constexpr char MetadataKey[] = "__metadata__";
// A header nests three levels. Refusing much deeper ones before parsing keeps
// the recursive parser from exhausting the stack.
constexpr size_t MaxDepth = 16;

struct DTypeName {
  DType Type;
  const char *Name;
};

constexpr DTypeName DTypeNames[] = {
    {DType::F64, "F64"},   {DType::F32, "F32"},          {DType::F16, "F16"},
    {DType::BF16, "BF16"}, {DType::F8E4M3FN, "F8_E4M3"}, {DType::I64, "I64"},
    {DType::I32, "I32"},   {DType::I16, "I16"},          {DType::I8, "I8"},
    {DType::U8, "U8"},     {DType::Bool, "BOOL"},
};

//===----------------------------------------------------------------------===//
// Messages
//===----------------------------------------------------------------------===//

/// Returns Text fit for one line of a message: control characters are escaped
/// and overlong text is cut.
std::string printable(llvm::StringRef Text, size_t MaxLength = 200) {
  std::string Result;
  for (char C : Text) {
    if (Result.size() >= MaxLength)
      return Result + "...";
    unsigned char Byte = static_cast<unsigned char>(C);
    if (Byte >= 0x20 && Byte != 0x7f) {
      Result += C;
      continue;
    }
    constexpr char Digits[] = "0123456789abcdef";
    Result += "\\x";
    Result += Digits[Byte >> 4];
    Result += Digits[Byte & 15];
  }
  return Result;
}

/// Returns Text in single quotes, fit for one line of a message.
std::string quote(llvm::StringRef Text) { return "'" + printable(Text) + "'"; }

/// Returns the JSON text of Value, or what stands for a missing one.
std::string show(const json::Value *Value) {
  if (!Value)
    return "none";
  std::string Text;
  llvm::raw_string_ostream(Text) << *Value;
  return printable(Text, 80);
}

/// Assembles "<path>: <what>; expected <x>, got <y>".
std::string message(llvm::StringRef Path, const std::string &What,
                    const std::string &Want, const std::string &Got) {
  return printable(Path, 4096) + ": " + What + "; expected " + Want + ", got " +
         Got;
}

/// Returns the failure of a system call, whose error number is Error.
Status systemError(llvm::StringRef Path, const std::string &What,
                   const std::string &Want, int Error) {
  std::string Message = message(Path, What, Want, std::strerror(Error));
  return Error == ENOENT ? Status::notFound(Message) : Status::ioError(Message);
}

/// Closes a file descriptor at the end of a scope.
class FileCloser {
public:
  explicit FileCloser(int FD) : FD(FD) {}
  FileCloser(const FileCloser &) = delete;
  FileCloser &operator=(const FileCloser &) = delete;
  ~FileCloser() {
    if (FD >= 0)
      ::close(FD);
  }
  /// Closes now. Returns 0 or the error number.
  int close() {
    int Result = ::close(FD) == 0 ? 0 : errno;
    FD = -1;
    return Result;
  }

private:
  int FD;
};

//===----------------------------------------------------------------------===//
// Properties of the header that parsed JSON no longer shows
//===----------------------------------------------------------------------===//

/// Returns whether the JSON text nests deeper than MaxDepth. The text need not
/// be valid.
bool nestsTooDeeply(llvm::StringRef Text) {
  size_t Depth = 0;
  bool InString = false;
  for (size_t I = 0; I != Text.size(); ++I) {
    char C = Text[I];
    if (InString) {
      if (C == '\\' && I + 1 != Text.size())
        ++I;
      else if (C == '"')
        InString = false;
    } else if (C == '"') {
      InString = true;
    } else if (C == '{' || C == '[') {
      if (++Depth > MaxDepth)
        return true;
    } else if ((C == '}' || C == ']') && Depth != 0) {
      --Depth;
    }
  }
  return false;
}

/// What is wrong with a header that is valid JSON.
struct ScanError {
  std::string What;
  std::string Want;
  std::string Got;
};

/// Walks over JSON text that is known to be an object, to find what parsing
/// loses: the order of the top-level keys, repeated keys, of which a parser
/// keeps one, and numbers written as fractions or with exponents, which it
/// may round to the integers that are wanted.
class HeaderScanner {
public:
  explicit HeaderScanner(llvm::StringRef Text) : Text(Text) {}

  /// Scans the text. Returns whether it is fine; otherwise Error says why not.
  bool scan() {
    while (Pos != Text.size()) {
      char C = Text[Pos];
      if (C == '"') {
        if (!scanString())
          return false;
      } else if (C == '-' || (C >= '0' && C <= '9')) {
        if (!scanNumber())
          return false;
      } else {
        if (C == '{' || C == '[')
          Levels.push_back({C == '{', C == '{', {}, {}});
        else if (C == '}' || C == ']')
          Levels.pop_back();
        else if (C == ',')
          Levels.back().WantsKey = Levels.back().IsObject;
        else if (C == ':')
          Levels.back().WantsKey = false;
        ++Pos;
      }
    }
    return true;
  }

  std::vector<std::string> TopLevelKeys;
  ScanError Error;

private:
  struct Level {
    bool IsObject;
    // Whether the next string is a key rather than a value.
    bool WantsKey;
    std::set<std::string> Keys;
    std::string CurrentKey;
  };

  bool scanString() {
    size_t Begin = Pos++;
    while (Text[Pos] != '"')
      Pos += Text[Pos] == '\\' ? 2 : 1;
    ++Pos;
    Level &Top = Levels.back();
    if (!Top.WantsKey)
      return true;
    // Equal keys may be spelled differently, so they are compared decoded.
    llvm::Expected<json::Value> Parsed = json::parse(Text.slice(Begin, Pos));
    if (!Parsed) {
      llvm::consumeError(Parsed.takeError());
      return true;
    }
    std::string Key = Parsed->getAsString().value_or("").str();
    if (!Top.Keys.insert(Key).second) {
      std::string Where =
          Levels.size() > 1 ? " in " + quote(Levels.front().CurrentKey) : "";
      Error = {"key " + quote(Key) + " is repeated" + Where, "each key once",
               "it twice"};
      return false;
    }
    if (Levels.size() == 1)
      TopLevelKeys.push_back(Key);
    Top.CurrentKey = std::move(Key);
    return true;
  }

  bool scanNumber() {
    size_t Begin = Pos;
    Pos = std::min(Text.find_first_not_of("+-.0123456789eE", Pos), Text.size());
    llvm::StringRef Number = Text.slice(Begin, Pos);
    // Only these keys have a meaning; others may hold anything.
    if (Levels.size() < 2 || Number.find_first_of(".eE") == Number.npos)
      return true;
    const std::string &Key = Levels[1].CurrentKey;
    if (Key != "shape" && Key != "data_offsets")
      return true;
    Error = {"tensor " + quote(Levels[0].CurrentKey) + ": invalid " + Key,
             "integers without fraction or exponent", printable(Number, 80)};
    return false;
  }

  llvm::StringRef Text;
  size_t Pos = 0;
  std::vector<Level> Levels;
};

} // namespace

//===----------------------------------------------------------------------===//
// Reading
//===----------------------------------------------------------------------===//

Expected<SafeTensors> SafeTensors::open(const std::string &Path) {
  // Opening a FIFO would otherwise wait for a writer.
  int FD = ::open(Path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (FD < 0)
    return systemError(Path, "cannot open", "a readable file", errno);
  FileCloser Closer(FD);

  struct stat Info;
  if (::fstat(FD, &Info) != 0)
    return systemError(Path, "cannot stat", "a readable file", errno);
  if (!S_ISREG(Info.st_mode))
    return Status::ioError(
        message(Path, "not a regular file", "a safetensors file",
                S_ISDIR(Info.st_mode) ? "a directory" : "a special file"));

  const uint64_t FileSize = static_cast<uint64_t>(Info.st_size);
  if (FileSize < LengthBytes)
    return Status::invalidArgument(
        message(Path, "file too short for its header length",
                "at least 8 bytes", std::to_string(FileSize)));

  // A private writable mapping lets callers write to tensors without touching
  // the file; no swap is reserved for pages that mostly stay clean.
  void *Base = ::mmap(nullptr, FileSize, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_NORESERVE, FD, 0);
  if (Base == MAP_FAILED)
    return systemError(Path, "cannot map",
                       std::to_string(FileSize) + " bytes of memory", errno);
  std::shared_ptr<void> Mapping(
      Base, [FileSize](void *Address) { ::munmap(Address, FileSize); });

  const auto *Bytes = static_cast<const unsigned char *>(Base);
  uint64_t HeaderLength = 0;
  for (uint64_t I = LengthBytes; I-- != 0;)
    HeaderLength = HeaderLength << 8 | Bytes[I];
  if (HeaderLength > MaxHeaderBytes)
    return Status::invalidArgument(
        message(Path, "header too long",
                "at most " + std::to_string(MaxHeaderBytes) + " bytes",
                std::to_string(HeaderLength)));
  if (HeaderLength > FileSize - LengthBytes)
    return Status::invalidArgument(
        message(Path, "header extends beyond the file",
                "at most " + std::to_string(FileSize - LengthBytes) + " bytes",
                std::to_string(HeaderLength)));

  SafeTensors Result;
  Result.Path = Path;
  Result.DataSection = std::shared_ptr<void>(
      Mapping, static_cast<char *>(Base) + LengthBytes + HeaderLength);
  if (Status S = Result.parseHeader(
          HeaderLength,
          static_cast<int64_t>(FileSize - LengthBytes - HeaderLength));
      !S)
    return S;
  return Result;
}

Status SafeTensors::parseHeader(uint64_t HeaderLength, int64_t DataLength) {
  auto Fail = [&](const std::string &What, const std::string &Want,
                  const std::string &Got) {
    return Status::invalidArgument(message(Path, What, Want, Got));
  };

  llvm::StringRef Text(static_cast<const char *>(DataSection.get()) -
                           HeaderLength,
                       HeaderLength);
  if (nestsTooDeeply(Text))
    return Fail("header nests too deeply",
                "at most " + std::to_string(MaxDepth) + " levels", "more");
  llvm::Expected<json::Value> Parsed = json::parse(Text);
  if (!Parsed)
    return Fail("header is not valid JSON", "JSON text",
                "error " + printable(llvm::toString(Parsed.takeError())));
  const json::Object *Root = Parsed->getAsObject();
  // The format forbids white space before the object, unlike JSON.
  if (!Root || Text.front() != '{')
    return Fail("header is not a JSON object", "'{'",
                quote(Text.take_front(1)));
  HeaderScanner Scanner(Text);
  if (!Scanner.scan())
    return Fail(Scanner.Error.What, Scanner.Error.Want, Scanner.Error.Got);

  if (const json::Value *Value = Root->get(MetadataKey)) {
    const json::Object *Strings = Value->getAsObject();
    if (!Strings)
      return Fail("invalid __metadata__", "an object of strings", show(Value));
    for (const auto &[Key, Item] : *Strings) {
      std::optional<llvm::StringRef> String = Item.getAsString();
      if (!String)
        return Fail("invalid __metadata__ entry " + quote(Key.str()),
                    "a string", show(&Item));
      Metadata.emplace(Key.str(), String->str());
    }
  }

  for (const std::string &Name : Scanner.TopLevelKeys) {
    if (Name == MetadataKey)
      continue;
    const std::string Where = "tensor " + quote(Name) + ": ";
    const json::Value *Value = Root->get(Name);
    const json::Object *Fields = Value ? Value->getAsObject() : nullptr;
    if (!Fields)
      return Fail(Where + "invalid entry", "an object", show(Value));

    Entry E;
    const json::Value *Type = Fields->get("dtype");
    std::optional<llvm::StringRef> TypeName;
    if (Type)
      TypeName = Type->getAsString();
    if (!TypeName)
      return Fail(Where + (Type ? "invalid dtype" : "missing dtype"),
                  "a string", show(Type));
    const DTypeName *Known =
        std::find_if(std::begin(DTypeNames), std::end(DTypeNames),
                     [&](const DTypeName &D) { return *TypeName == D.Name; });
    if (Known == std::end(DTypeNames)) {
      std::string All;
      for (const DTypeName &D : DTypeNames)
        All += (All.empty() ? "" : " ") + std::string(D.Name);
      return Status::unsupported(message(Path, Where + "unknown dtype",
                                         "one of " + All, quote(*TypeName)));
    }
    E.Type = Known->Type;

    const json::Value *Shape = Fields->get("shape");
    const json::Array *Extents = Shape ? Shape->getAsArray() : nullptr;
    if (!Extents)
      return Fail(Where + (Shape ? "invalid shape" : "missing shape"),
                  "an array of integers", show(Shape));
    for (const json::Value &Item : *Extents) {
      std::optional<int64_t> Extent = Item.getAsInteger();
      if (!Extent || *Extent < 0)
        return Fail(Where + "invalid extent in shape " + show(Shape),
                    "an integer in [0, 9223372036854775807]", show(&Item));
      E.Shape.push_back(*Extent);
    }

    const json::Value *Offsets = Fields->get("data_offsets");
    const json::Array *Pair = Offsets ? Offsets->getAsArray() : nullptr;
    if (!Pair || Pair->size() != 2)
      return Fail(
          Where + (Offsets ? "invalid data_offsets" : "missing data_offsets"),
          "an array of two integers", show(Offsets));
    int64_t Bounds[2];
    for (size_t I = 0; I != 2; ++I) {
      std::optional<int64_t> Bound = (*Pair)[I].getAsInteger();
      if (!Bound || *Bound < 0)
        return Fail(Where + "invalid data_offsets",
                    "integers in [0, 9223372036854775807]", show(&(*Pair)[I]));
      Bounds[I] = *Bound;
    }
    E.Begin = Bounds[0];
    E.End = Bounds[1];
    if (E.Begin > E.End)
      return Fail(Where + "data_offsets are reversed",
                  "an end of at least " + std::to_string(E.Begin),
                  std::to_string(E.End));
    if (E.End > DataLength)
      return Fail(Where + "data extends beyond the file",
                  "an end of at most " + std::to_string(DataLength),
                  std::to_string(E.End));

    // The product of the non-zero extents matters even if another is zero; the
    // tensor could not be described otherwise.
    int64_t Bytes = static_cast<int64_t>(dtypeSize(E.Type));
    bool IsEmpty = false;
    for (int64_t Extent : E.Shape) {
      if (Extent == 0)
        IsEmpty = true;
      else if (__builtin_mul_overflow(Bytes, Extent, &Bytes))
        return Fail(Where + "size of shape " + show(Shape) + " overflows",
                    "at most 9223372036854775807 bytes", "more");
    }
    if (IsEmpty)
      Bytes = 0;
    if (Bytes != E.End - E.Begin)
      return Fail(Where + "size of shape " + show(Shape) + " and dtype " +
                      TypeName->str() + " does not match its data_offsets",
                  std::to_string(Bytes) + " bytes",
                  std::to_string(E.End - E.Begin));
    Names.push_back(Name);
    Entries.emplace(Name, std::move(E));
  }

  // In the order of the data, each tensor must begin where the last one ended.
  std::vector<const std::pair<const std::string, Entry> *> Ordered;
  for (const auto &NamedEntry : Entries)
    Ordered.push_back(&NamedEntry);
  std::sort(Ordered.begin(), Ordered.end(), [](const auto *A, const auto *B) {
    return std::pair(A->second.Begin, A->second.End) <
           std::pair(B->second.Begin, B->second.End);
  });
  int64_t Next = 0;
  const std::string *Previous = nullptr;
  for (const auto *NamedEntry : Ordered) {
    const auto &[Name, E] = *NamedEntry;
    if (E.Begin < Next)
      return Fail(
          "tensor " + quote(Name) + " overlaps tensor " + quote(*Previous),
          "a begin of " + std::to_string(Next), std::to_string(E.Begin));
    if (E.Begin > Next)
      return Fail("hole in the data before tensor " + quote(Name),
                  "a begin of " + std::to_string(Next),
                  std::to_string(E.Begin));
    Next = E.End;
    Previous = &Name;
  }
  if (Next != DataLength)
    return Fail("trailing bytes after the last tensor",
                std::to_string(Next) + " bytes of data",
                std::to_string(DataLength));
  return Status::ok();
}

Expected<Tensor> SafeTensors::get(std::string_view Name) const {
  auto Found = Entries.find(Name);
  if (Found == Entries.end()) {
    // A handful of names helps with a typo; thousands would not.
    std::string Known;
    for (size_t I = 0; I != Names.size() && I != 8; ++I)
      Known += (I ? ", " : "") + quote(Names[I]);
    if (Names.size() > 8)
      Known += " and " + std::to_string(Names.size() - 8) + " more";
    return Status::notFound(message(Path, "no such tensor",
                                    Names.empty()
                                        ? "nothing, the file holds no tensors"
                                        : "one of " + Known,
                                    quote(Name)));
  }
  const Entry &E = Found->second;
  char *Data = static_cast<char *>(DataSection.get()) + E.Begin;
  if (reinterpret_cast<uintptr_t>(Data) % dtypeSize(E.Type) == 0)
    return Tensor::view(Data, E.Type, E.Shape, {}, Device::cpu(), DataSection);
  Expected<Tensor> Copy = Tensor::empty(E.Type, E.Shape);
  if (Copy)
    std::memcpy(Copy->data(), Data, static_cast<size_t>(E.End - E.Begin));
  return Copy;
}

//===----------------------------------------------------------------------===//
// Writing
//===----------------------------------------------------------------------===//

namespace {

/// Writes N bytes to FD. Returns 0 or the error number.
int writeAll(int FD, const char *Data, size_t N) {
  while (N != 0) {
    // Larger requests are cut short by the system anyway.
    ssize_t Written = ::write(FD, Data, std::min(N, size_t(1) << 30));
    if (Written < 0) {
      if (errno == EINTR)
        continue;
      return errno;
    }
    Data += Written;
    N -= static_cast<size_t>(Written);
  }
  return 0;
}

/// Creates a new file next to Path, so that a rename replaces Path at once.
/// Returns its descriptor and sets Name, or returns -1 and leaves errno.
int createTemporary(const std::string &Path, std::string &Name) {
  static std::atomic<unsigned> Counter{0};
  int FD;
  do {
    Name = Path + ".tmp." + std::to_string(::getpid()) + "." +
           std::to_string(Counter++);
    // Unlike mkstemp, this gives the file the permissions of a new file.
    FD = ::open(Name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  } while (FD < 0 && errno == EEXIST);
  return FD;
}

} // namespace

Status corey::writeSafeTensors(
    const std::string &Path,
    const std::vector<std::pair<std::string, Tensor>> &Tensors,
    const std::map<std::string, std::string> &Metadata) {
  auto Fail = [&](const std::string &What, const std::string &Want,
                  const std::string &Got) {
    return Status::invalidArgument(message(Path, What, Want, Got));
  };

  std::set<std::string_view> Seen;
  for (const auto &[Name, T] : Tensors) {
    if (Name == MetadataKey)
      return Fail("reserved tensor name", "any other name", quote(Name));
    if (!json::isUTF8(Name))
      return Fail("tensor name is not text", "UTF-8", quote(Name));
    if (!Seen.insert(Name).second)
      return Fail("tensor name is repeated", "each name once",
                  quote(Name) + " twice");
    if (T.device().kind != Device::CPU)
      return Status::unsupported(
          message(Path, "tensor " + quote(Name) + " is not in host memory",
                  "device cpu", T.device().name()));
  }
  for (const auto &[Key, Value] : Metadata)
    if (!json::isUTF8(Key) || !json::isUTF8(Value))
      return Fail("metadata entry " + quote(Key) + " is not text", "UTF-8",
                  quote(json::isUTF8(Key) ? Value : Key));

  // Data in descending order of element size keeps every tensor aligned
  // without padding, which the format forbids.
  std::vector<size_t> Order(Tensors.size());
  for (size_t I = 0; I != Order.size(); ++I)
    Order[I] = I;
  std::sort(Order.begin(), Order.end(), [&](size_t A, size_t B) {
    size_t SizeA = dtypeSize(Tensors[A].second.dtype());
    size_t SizeB = dtypeSize(Tensors[B].second.dtype());
    return SizeA != SizeB ? SizeA > SizeB : A < B;
  });
  std::vector<int64_t> Begins(Tensors.size());
  int64_t Next = 0;
  for (size_t I : Order) {
    Begins[I] = Next;
    if (__builtin_add_overflow(Next, Tensors[I].second.numBytes(), &Next))
      return Fail("tensors too large", "at most 9223372036854775807 bytes",
                  "more");
  }

  std::string Header;
  {
    llvm::raw_string_ostream OS(Header);
    json::OStream J(OS);
    J.object([&] {
      if (!Metadata.empty())
        J.attributeObject(MetadataKey, [&] {
          for (const auto &[Key, Value] : Metadata)
            J.attribute(Key, Value);
        });
      for (size_t I = 0; I != Tensors.size(); ++I) {
        const Tensor &T = Tensors[I].second;
        J.attributeObject(Tensors[I].first, [&] {
          const DTypeName *Known = std::find_if(
              std::begin(DTypeNames), std::end(DTypeNames),
              [&](const DTypeName &D) { return D.Type == T.dtype(); });
          J.attribute("dtype", Known->Name);
          J.attributeArray("shape", [&] {
            for (int64_t Extent : T.shape())
              J.value(Extent);
          });
          J.attributeArray("data_offsets", [&] {
            J.value(Begins[I]);
            J.value(Begins[I] + T.numBytes());
          });
        });
      }
    });
  }
  // The length field is eight bytes itself, so this aligns the data too.
  Header.append((8 - Header.size() % 8) % 8, ' ');
  if (Header.size() > SafeTensors::MaxHeaderBytes)
    return Fail("header too long",
                "at most " + std::to_string(SafeTensors::MaxHeaderBytes) +
                    " bytes",
                std::to_string(Header.size()));

  std::string Temporary;
  int FD = createTemporary(Path, Temporary);
  if (FD < 0)
    return systemError(Path, "cannot create a temporary file next to it",
                       "a writable directory", errno);
  FileCloser Closer(FD);

  auto Write = [&]() -> Status {
    auto Check = [&](int Error) {
      return Error == 0 ? Status::ok()
                        : systemError(Path, "cannot write",
                                      "a successful write", Error);
    };
    char Length[LengthBytes];
    for (size_t I = 0; I != LengthBytes; ++I)
      Length[I] = static_cast<char>(Header.size() >> (8 * I) & 0xff);
    if (Status S = Check(writeAll(FD, Length, LengthBytes)); !S)
      return S;
    if (Status S = Check(writeAll(FD, Header.data(), Header.size())); !S)
      return S;
    for (size_t I : Order) {
      const auto &[Name, T] = Tensors[I];
      Tensor Dense = T;
      if (!T.isContiguous()) {
        Expected<Tensor> Copy = T.to(T.dtype());
        if (!Copy)
          return Status(Copy.status().code(),
                        printable(Path, 4096) + ": tensor " + quote(Name) +
                            ": " + Copy.status().message());
        Dense = *std::move(Copy);
      }
      if (Status S = Check(writeAll(FD, static_cast<const char *>(Dense.data()),
                                    static_cast<size_t>(Dense.numBytes())));
          !S)
        return S;
    }
    // Without this a crash after the rename could leave an empty file in place
    // of the old one.
    if (Status S = Check(::fsync(FD) == 0 ? 0 : errno); !S)
      return S;
    if (Status S = Check(Closer.close()); !S)
      return S;
    if (::rename(Temporary.c_str(), Path.c_str()) != 0)
      return systemError(Path, "cannot replace", "a replaceable file", errno);
    return Status::ok();
  };
  Status Result = Write();
  if (!Result)
    ::unlink(Temporary.c_str());
  return Result;
}

//===----------------------------------------------------------------------===//
// References
//===----------------------------------------------------------------------===//

Expected<std::pair<std::string, std::string>>
corey::splitTensorRef(std::string_view Ref) {
  constexpr std::string_view Suffix = ".safetensors:";
  size_t Colon = Ref.rfind(Suffix);
  Colon = Colon == Ref.npos ? Ref.rfind(':') : Colon + Suffix.size() - 1;
  if (Colon == Ref.npos || Colon == 0 || Colon + 1 == Ref.size())
    return Status::invalidArgument(
        "not a tensor reference; expected '<path>:<key>', got " + quote(Ref));
  return std::pair(std::string(Ref.substr(0, Colon)),
                   std::string(Ref.substr(Colon + 1)));
}
