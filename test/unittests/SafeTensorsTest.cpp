//===- SafeTensorsTest.cpp - Tests of the safetensors reader and writer ---===//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//===----------------------------------------------------------------------===//

#include "corey/SafeTensors.h"

#include "gtest/gtest.h"

#include <cstdio>
#include <cstring>
#include <dirent.h>
#include <fstream>
#include <sstream>
#include <sys/stat.h>
#include <unistd.h>

using namespace corey;

namespace {

using Shape = std::vector<int64_t>;
using Named = std::vector<std::pair<std::string, Tensor>>;

constexpr DType AllDTypes[] = {DType::F64,  DType::F32,      DType::F16,
                               DType::BF16, DType::F8E4M3FN, DType::I64,
                               DType::I32,  DType::I16,      DType::I8,
                               DType::U8,   DType::Bool};

/// Returns the value of a success, and fails the test otherwise.
template <class T> T get(Expected<T> Result) {
  EXPECT_TRUE(static_cast<bool>(Result)) << Result.status().message();
  return Result ? *std::move(Result) : T();
}

/// A directory for one test, empty at its start and removed at its end.
class SafeTensorsTest : public testing::Test {
protected:
  void SetUp() override {
    Directory = testing::TempDir() + "corey-safetensors-XXXXXX";
    ASSERT_NE(::mkdtemp(Directory.data()), nullptr);
  }

  void TearDown() override {
    for (const std::string &Name : listing())
      std::remove((Directory + "/" + Name).c_str());
    ::rmdir(Directory.c_str());
  }

  std::vector<std::string> listing() const {
    std::vector<std::string> Result;
    if (DIR *D = ::opendir(Directory.c_str())) {
      while (const dirent *Entry = ::readdir(D))
        if (std::strcmp(Entry->d_name, ".") != 0 &&
            std::strcmp(Entry->d_name, "..") != 0)
          Result.push_back(Entry->d_name);
      ::closedir(D);
    }
    return Result;
  }

  std::string path(const std::string &Name = "t.safetensors") const {
    return Directory + "/" + Name;
  }

  /// Writes Bytes to a file and returns its path.
  std::string write(const std::string &Bytes) const {
    std::ofstream(path(), std::ios::binary) << Bytes;
    return path();
  }

  static std::string read(const std::string &Path) {
    std::ostringstream OS;
    OS << std::ifstream(Path, std::ios::binary).rdbuf();
    return OS.str();
  }

  /// Returns the bytes of a file with the given header and data.
  static std::string file(const std::string &Header,
                          const std::string &Data = "") {
    return length(Header.size()) + Header + Data;
  }

  static std::string length(uint64_t N) {
    std::string Result;
    for (int I = 0; I != 8; ++I)
      Result += static_cast<char>(N >> (8 * I) & 0xff);
    return Result;
  }

  /// Checks that a file of these bytes is refused with "<path>: <Message>".
  void refuse(const std::string &Bytes, const std::string &Message,
              StatusCode Code = StatusCode::InvalidArgument) const {
    std::string Path = write(Bytes);
    Expected<SafeTensors> Result = SafeTensors::open(Path);
    ASSERT_FALSE(static_cast<bool>(Result)) << Message;
    EXPECT_EQ(Result.status().message(), Path + ": " + Message);
    EXPECT_EQ(Result.status().code(), Code) << Message;
    EXPECT_EQ(Result.status().message().find('\n'), std::string::npos);
  }

  SafeTensors open(const std::string &Path) const {
    Expected<SafeTensors> Result = SafeTensors::open(Path);
    if (!Result) {
      ADD_FAILURE() << Result.status().message();
      std::abort();
    }
    return *std::move(Result);
  }

  std::string Directory;
};

/// Returns a contiguous tensor whose bytes are 1, 2, 3, ...
Tensor bytes(DType Type, const Shape &S) {
  Tensor T = get(Tensor::empty(Type, S));
  for (int64_t I = 0; I != T.numBytes(); ++I)
    T.dataAs<uint8_t>()[I] = static_cast<uint8_t>(I + 1);
  return T;
}

bool sameBytes(const Tensor &A, const Tensor &B) {
  return A.dtype() == B.dtype() && A.shape() == B.shape() && A.isContiguous() &&
         B.isContiguous() &&
         std::memcmp(A.data(), B.data(), static_cast<size_t>(A.numBytes())) ==
             0;
}

//===----------------------------------------------------------------------===//
// Reading well-formed files
//===----------------------------------------------------------------------===//

TEST_F(SafeTensorsTest, ReadsHandWrittenFile) {
  // Header order differs from data order; keys are escaped; white space and
  // unknown fields are allowed; and there is a scalar and an empty tensor.
  std::string Header =
      R"({"b.w/x": {"dtype":"U8","shape":[2,2],"data_offsets":[8,12]},)"
      R"( "__metadata__": {"format": "pt", "note": "a\nb"}, "\u0061":)"
      R"({"data_offsets":[0,4],"dtype":"F32","shape":[],"extra":[1.5,{}]},)"
      R"("none":{"dtype":"F64","shape":[3,0],"data_offsets":[8,8]},)"
      R"("i":{"dtype":"I32","shape":[1],"data_offsets":[4,8]}})";
  Header.append((8 - Header.size() % 8) % 8, ' ');
  float One = 1.5f;
  std::string Data(reinterpret_cast<const char *>(&One), 4);
  SafeTensors S =
      open(write(file(Header, Data + std::string("\7\0\0\0\1\2\3\4", 8))));
  EXPECT_EQ(S.path(), path());
  EXPECT_EQ(S.names(), (std::vector<std::string>{"b.w/x", "a", "none", "i"}));
  EXPECT_TRUE(S.contains("a"));
  EXPECT_FALSE(S.contains("__metadata__"));
  EXPECT_FALSE(S.contains("A"));
  EXPECT_EQ(S.metadata(), (std::map<std::string, std::string>{
                              {"format", "pt"}, {"note", "a\nb"}}));
  Tensor A = get(S.get("a"));
  EXPECT_EQ(A.describe(), "tensor<f32, strides [], cpu>");
  EXPECT_EQ(*A.dataAs<float>(), 1.5f);
  EXPECT_EQ(*get(S.get("i")).dataAs<int32_t>(), 7);
  Tensor B = get(S.get("b.w/x"));
  EXPECT_EQ(B.describe(), "tensor<2x2xu8, strides [2, 1], cpu>");
  EXPECT_EQ(B.dataAs<uint8_t>()[3], 4);
  EXPECT_EQ(get(S.get("none")).shape(), (Shape{3, 0}));
}

TEST_F(SafeTensorsTest, ReadsFileWithoutTensors) {
  SafeTensors S = open(write(file("{}")));
  EXPECT_TRUE(S.names().empty());
  EXPECT_TRUE(S.metadata().empty());
  EXPECT_EQ(S.get("x").status().message(),
            path() + ": no such tensor; expected nothing, the file holds no "
                     "tensors, got 'x'");
}

TEST_F(SafeTensorsTest, ViewsAreZeroCopyAndOutliveTheReader) {
  Tensor Source = bytes(DType::F32, {4, 3});
  ASSERT_TRUE(writeSafeTensors(path(), {{"x", Source}}).isOk());
  Tensor View, Slice;
  {
    SafeTensors S = open(path());
    SafeTensors Copy = S;
    View = get(S.get("x"));
    EXPECT_EQ(View.data(), get(Copy.get("x")).data());
    EXPECT_NE(View.storage(), nullptr);
    Slice = get(View.slice(0, 3, -1, -1));
  }
  std::remove(path().c_str());
  EXPECT_TRUE(sameBytes(View, Source));
  View = Tensor();
  EXPECT_TRUE(
      sameBytes(get(get(Slice.slice(0, 3, -1, -1)).to(DType::F32)), Source));
}

TEST_F(SafeTensorsTest, WritesToViewsStayPrivate) {
  ASSERT_TRUE(writeSafeTensors(path(), {{"x", bytes(DType::U8, {8})}}).isOk());
  std::string Before = read(path());
  SafeTensors S = open(path());
  get(S.get("x")).dataAs<uint8_t>()[0] = 200;
  EXPECT_EQ(get(S.get("x")).dataAs<uint8_t>()[0], 200);
  EXPECT_EQ(read(path()), Before);
  EXPECT_EQ(get(open(path()).get("x")).dataAs<uint8_t>()[0], 1);
}

TEST_F(SafeTensorsTest, MisalignedDataIsCopied) {
  std::string Header =
      R"({"pad":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
      R"("x":{"dtype":"F64","shape":[2],"data_offsets":[1,17]}})";
  Header.append((8 - Header.size() % 8) % 8, ' ');
  double Values[2] = {2.5, -3.5};
  SafeTensors S = open(write(
      file(Header, "p" + std::string(reinterpret_cast<char *>(Values), 16))));
  Tensor X = get(S.get("x"));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(X.data()) % 64, 0u);
  EXPECT_EQ(X.dataAs<double>()[0], 2.5);
  EXPECT_EQ(X.dataAs<double>()[1], -3.5);
  EXPECT_NE(X.data(), get(S.get("x")).data());
  // A header that is not padded misaligns everything wider than a byte.
  Header = R"({"x":{"dtype":"F64","shape":[2],"data_offsets":[0,16]}} )";
  Header.append((9 - Header.size() % 8) % 8, ' ');
  S = open(
      write(file(Header, std::string(reinterpret_cast<char *>(Values), 16))));
  EXPECT_EQ(get(S.get("x")).dataAs<double>()[1], -3.5);
}

TEST_F(SafeTensorsTest, GetNamesTheKnownTensors) {
  ASSERT_TRUE(writeSafeTensors(path(), {{"a", bytes(DType::U8, {1})},
                                        {"b\n", bytes(DType::U8, {1})}})
                  .isOk());
  Expected<Tensor> Missing = open(path()).get("c");
  ASSERT_FALSE(static_cast<bool>(Missing));
  EXPECT_EQ(Missing.status().code(), StatusCode::NotFound);
  EXPECT_EQ(Missing.status().message(),
            path() +
                ": no such tensor; expected one of 'a', 'b\\x0a', got 'c'");
  Named Many;
  for (char C = 'a'; C != 'k'; ++C)
    Many.emplace_back(std::string(1, C), bytes(DType::U8, {1}));
  ASSERT_TRUE(writeSafeTensors(path(), Many).isOk());
  EXPECT_EQ(open(path()).get("z").status().message(),
            path() + ": no such tensor; expected one of 'a', 'b', 'c', 'd', "
                     "'e', 'f', 'g', 'h' and 2 more, got 'z'");
}

//===----------------------------------------------------------------------===//
// Round trips
//===----------------------------------------------------------------------===//

TEST_F(SafeTensorsTest, RoundTripsEveryDTypeAndShape) {
  Named Tensors;
  for (DType Type : AllDTypes)
    for (const Shape &S :
         {Shape{}, Shape{1}, Shape{7}, Shape{2, 7, 3}, Shape{0}, Shape{5, 0}})
      Tensors.emplace_back(std::string(dtypeName(Type)) + "/" +
                               std::to_string(Tensors.size()),
                           bytes(Type, S));
  std::map<std::string, std::string> Metadata = {
      {"", "empty key"}, {"k", "\"quoted\" \\ \x01 \xc3\xa9"}};
  ASSERT_TRUE(writeSafeTensors(path(), Tensors, Metadata).isOk());
  SafeTensors S = open(path());
  EXPECT_EQ(S.metadata(), Metadata);
  ASSERT_EQ(S.names().size(), Tensors.size());
  for (size_t I = 0; I != Tensors.size(); ++I) {
    EXPECT_EQ(S.names()[I], Tensors[I].first);
    Tensor Read = get(S.get(Tensors[I].first));
    EXPECT_TRUE(sameBytes(Read, Tensors[I].second)) << Tensors[I].first;
    // The writer aligns everything, so nothing was copied.
    EXPECT_EQ(Read.data(), get(S.get(Tensors[I].first)).data());
  }
  EXPECT_EQ(listing(), std::vector<std::string>{"t.safetensors"});
}

TEST_F(SafeTensorsTest, ExactBytes) {
  Tensor X = bytes(DType::U8, {3});
  Tensor Y = bytes(DType::I16, {1, 2});
  ASSERT_TRUE(
      writeSafeTensors(path(), {{"x", X}, {"y", Y}}, {{"k", "v"}}).isOk());
  std::string Header =
      R"({"__metadata__":{"k":"v"},)"
      R"("x":{"dtype":"U8","shape":[3],"data_offsets":[4,7]},)"
      R"("y":{"dtype":"I16","shape":[1,2],"data_offsets":[0,4]}})";
  Header.append((8 - Header.size() % 8) % 8, ' ');
  EXPECT_EQ(read(path()), file(Header, "\1\2\3\4\1\2\3"));
}

TEST_F(SafeTensorsTest, WritesStridedTensorsDensely) {
  Tensor Base = bytes(DType::I16, {3, 4});
  Tensor Strided = get(get(Base.transpose(0, 1)).slice(0, 3, -1, -2));
  uint8_t Byte = 9;
  Tensor Broadcast = get(Tensor::view(&Byte, DType::U8, {2, 3}, {0, 0}));
  ASSERT_TRUE(
      writeSafeTensors(path(), {{"s", Strided}, {"b", Broadcast}}).isOk());
  SafeTensors S = open(path());
  EXPECT_TRUE(sameBytes(get(S.get("s")), get(Strided.to(DType::I16))));
  EXPECT_TRUE(sameBytes(get(S.get("b")), get(Broadcast.to(DType::U8))));
}

TEST_F(SafeTensorsTest, NothingToWrite) {
  ASSERT_TRUE(writeSafeTensors(path(), {}).isOk());
  EXPECT_EQ(read(path()), file("{}      "));
  EXPECT_TRUE(open(path()).names().empty());
}

TEST_F(SafeTensorsTest, ReplacesTheFileItReadsFrom) {
  ASSERT_TRUE(writeSafeTensors(path(), {{"x", bytes(DType::U8, {4})}}).isOk());
  Tensor Old = get(open(path()).get("x"));
  ASSERT_TRUE(
      writeSafeTensors(path(), {{"x", get(Old.slice(0, 3, -1, -1))}}).isOk());
  EXPECT_EQ(Old.dataAs<uint8_t>()[0], 1);
  EXPECT_EQ(get(open(path()).get("x")).dataAs<uint8_t>()[0], 4);
  struct stat Info;
  ASSERT_EQ(::stat(path().c_str(), &Info), 0);
  mode_t Mask = ::umask(0);
  ::umask(Mask);
  EXPECT_EQ(Info.st_mode & 0777, 0666 & ~Mask);
}

//===----------------------------------------------------------------------===//
// Refused files
//===----------------------------------------------------------------------===//

TEST_F(SafeTensorsTest, RefusesUnreadablePaths) {
  auto Refuse = [](const std::string &Path, StatusCode Code,
                   const std::string &Message) {
    Expected<SafeTensors> Result = SafeTensors::open(Path);
    ASSERT_FALSE(static_cast<bool>(Result));
    EXPECT_EQ(Result.status().code(), Code);
    EXPECT_EQ(Result.status().message(), Message);
  };
  Refuse(path("absent"), StatusCode::NotFound,
         path("absent") + ": cannot open; expected a readable file, got No "
                          "such file or directory");
  Refuse("", StatusCode::NotFound,
         ": cannot open; expected a readable file, got No such file or "
         "directory");
  Refuse(Directory, StatusCode::IOError,
         Directory + ": not a regular file; expected a safetensors file, got a "
                     "directory");
  ASSERT_EQ(::mkfifo(path("fifo").c_str(), 0600), 0);
  Refuse(path("fifo"), StatusCode::IOError,
         path("fifo") +
             ": not a regular file; expected a safetensors file, got a "
             "special file");
  write("x");
  Refuse(path() + "/x", StatusCode::IOError,
         path() + "/x: cannot open; expected a readable file, got Not a "
                  "directory");
  // Permissions do not bind the superuser.
  ::chmod(path().c_str(), 0);
  if (::geteuid() != 0)
    Refuse(path(), StatusCode::IOError,
           path() + ": cannot open; expected a readable file, got Permission "
                    "denied");
}

TEST_F(SafeTensorsTest, RefusesBadLengths) {
  refuse("", "file too short for its header length; expected at least 8 "
             "bytes, got 0");
  refuse("1234567", "file too short for its header length; expected at least "
                    "8 bytes, got 7");
  refuse(length(3) + "{}", "header extends beyond the file; expected at most "
                           "2 bytes, got 3");
  refuse(length(100000000) + "{}",
         "header extends beyond the file; expected at most 2 bytes, got "
         "100000000");
  refuse(length(100000001) + "{}", "header too long; expected at most "
                                   "100000000 bytes, got 100000001");
  refuse(length(~uint64_t(0)), "header too long; expected at most 100000000 "
                               "bytes, got 18446744073709551615");
}

TEST_F(SafeTensorsTest, RefusesBadJSON) {
  // The parser's own words are LLVM's; only the frame is checked.
  for (const std::string &Header :
       {std::string(""), std::string("{"), std::string("{} x"),
        std::string("{\"a\" 1}"), std::string("{\"\xff\":1}"),
        std::string("nope"), std::string("{\"a\\"), std::string("}{"),
        std::string("{\"a\":1}\0", 8)}) {
    Expected<SafeTensors> Result = SafeTensors::open(write(file(Header)));
    ASSERT_FALSE(static_cast<bool>(Result));
    EXPECT_EQ(Result.status().code(), StatusCode::InvalidArgument);
    EXPECT_EQ(Result.status().message().find(
                  path() + ": header is not valid JSON; expected JSON text, "
                           "got error ["),
              0u)
        << Result.status().message();
    EXPECT_EQ(Result.status().message().find('\n'), std::string::npos);
  }
  refuse(file("[1]"), "header is not a JSON object; expected '{', got '['");
  refuse(file("7"), "header is not a JSON object; expected '{', got '7'");
  refuse(file(" {}"), "header is not a JSON object; expected '{', got ' '");
  refuse(file("null"), "header is not a JSON object; expected '{', got 'n'");
  // Enough to overflow the stack of a recursive parser.
  refuse(file("{\"a\":" + std::string(1000000, '[')),
         "header nests too deeply; expected at most 16 levels, got more");
  refuse(file(R"({"a\"]}[":{},"a\u0022]}[":{}})"),
         "key 'a\"]}[' is repeated; expected each key once, got it twice");
}

TEST_F(SafeTensorsTest, RefusesRepeatedKeys) {
  std::string Entry = R"({"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  refuse(file("{\"a\":" + Entry + ",\"b\":" + Entry + ",\"\\u0061\":" + Entry +
              "}"),
         "key 'a' is repeated; expected each key once, got it twice");
  refuse(
      file(R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0],)"
           R"("shape":[]}})"),
      "key 'shape' is repeated in 'a'; expected each key once, got it twice");
  refuse(file(R"({"__metadata__":{"k":"1","k":"2"}})"),
         "key 'k' is repeated in '__metadata__'; expected each key once, got "
         "it twice");
}

TEST_F(SafeTensorsTest, RefusesBadMetadata) {
  refuse(file(R"({"__metadata__":[1]})"),
         "invalid __metadata__; expected an object of strings, got [1]");
  refuse(file(R"({"__metadata__":{"k":1}})"),
         "invalid __metadata__ entry 'k'; expected a string, got 1");
}

TEST_F(SafeTensorsTest, RefusesBadEntries) {
  auto Entry = [&](const std::string &Fields, const std::string &Message,
                   StatusCode Code = StatusCode::InvalidArgument) {
    refuse(file("{\"w\":" + Fields + "}", "12345678"), "tensor 'w': " + Message,
           Code);
  };
  Entry("[]", "invalid entry; expected an object, got []");

  Entry(R"({"shape":[8],"data_offsets":[0,8]})",
        "missing dtype; expected a string, got none");
  Entry(R"({"dtype":8,"shape":[8],"data_offsets":[0,8]})",
        "invalid dtype; expected a string, got 8");
  for (const char *Unknown : {"U16", "U32", "U64", "F8_E5M2", "f32", "a\\n"})
    Entry(std::string(R"({"dtype":")") + Unknown +
              R"(","shape":[8],"data_offsets":[0,8]})",
          std::string("unknown dtype; expected one of F64 F32 F16 BF16 "
                      "F8_E4M3 I64 I32 I16 I8 U8 BOOL, got '") +
              (Unknown[0] == 'a' ? "a\\x0a" : Unknown) + "'",
          StatusCode::Unsupported);

  Entry(R"({"dtype":"U8","data_offsets":[0,8]})",
        "missing shape; expected an array of integers, got none");
  Entry(R"({"dtype":"U8","shape":8,"data_offsets":[0,8]})",
        "invalid shape; expected an array of integers, got 8");
  Entry(R"({"dtype":"U8","shape":[2,-4],"data_offsets":[0,8]})",
        "invalid extent in shape [2,-4]; expected an integer in [0, "
        "9223372036854775807], got -4");
  Entry(R"({"dtype":"U8","shape":["8"],"data_offsets":[0,8]})",
        "invalid extent in shape [\"8\"]; expected an integer in [0, "
        "9223372036854775807], got \"8\"");
  Entry(R"({"dtype":"U8","shape":[9223372036854775808],"data_offsets":[0,8]})",
        "invalid extent in shape [9223372036854775808]; expected an integer "
        "in [0, 9223372036854775807], got 9223372036854775808");
  Entry(R"({"dtype":"U8","shape":[8.0],"data_offsets":[0,8]})",
        "invalid shape; expected integers without fraction or exponent, got "
        "8.0");
  Entry(R"({"dtype":"U8","shape":[8],"data_offsets":[0,8e0]})",
        "invalid data_offsets; expected integers without fraction or "
        "exponent, got 8e0");
  Entry(R"({"dtype":"F32","shape":[4294967296,4294967296],)"
        R"("data_offsets":[0,8]})",
        "size of shape [4294967296,4294967296] overflows; expected at most "
        "9223372036854775807 bytes, got more");
  Entry(R"({"dtype":"F32","shape":[0,9223372036854775807],)"
        R"("data_offsets":[0,0]})",
        "size of shape [0,9223372036854775807] overflows; expected at most "
        "9223372036854775807 bytes, got more");

  Entry(R"({"dtype":"U8","shape":[8]})",
        "missing data_offsets; expected an array of two integers, got none");
  Entry(R"({"dtype":"U8","shape":[8],"data_offsets":[0,8,9]})",
        "invalid data_offsets; expected an array of two integers, got "
        "[0,8,9]");
  Entry(R"({"dtype":"U8","shape":[8],"data_offsets":"0,8"})",
        "invalid data_offsets; expected an array of two integers, got "
        "\"0,8\"");
  Entry(R"({"dtype":"U8","shape":[8],"data_offsets":[-1,7]})",
        "invalid data_offsets; expected integers in [0, 9223372036854775807], "
        "got -1");
  Entry(R"({"dtype":"U8","shape":[8],)"
        R"("data_offsets":[0,18446744073709551616]})",
        "invalid data_offsets; expected integers in [0, 9223372036854775807], "
        "got 1.8446744073709552e+19");
  Entry(R"({"dtype":"U8","shape":[8],"data_offsets":[8,0]})",
        "data_offsets are reversed; expected an end of at least 8, got 0");
  Entry(R"({"dtype":"U8","shape":[9],"data_offsets":[0,9]})",
        "data extends beyond the file; expected an end of at most 8, got 9");
  Entry(R"({"dtype":"F16","shape":[2,3],"data_offsets":[0,8]})",
        "size of shape [2,3] and dtype F16 does not match its data_offsets; "
        "expected 12 bytes, got 8");
  Entry(R"({"dtype":"F16","shape":[0,3],"data_offsets":[0,8]})",
        "size of shape [0,3] and dtype F16 does not match its data_offsets; "
        "expected 0 bytes, got 8");
}

TEST_F(SafeTensorsTest, RefusesBadLayout) {
  auto U8 = [](const std::string &Name, int Begin, int End) {
    return "\"" + Name + "\":{\"dtype\":\"U8\",\"shape\":[" +
           std::to_string(End - Begin) + "],\"data_offsets\":[" +
           std::to_string(Begin) + "," + std::to_string(End) + "]}";
  };
  const std::string Data = "12345678";
  refuse(file("{" + U8("b", 3, 8) + "," + U8("a", 0, 4) + "}", Data),
         "tensor 'b' overlaps tensor 'a'; expected a begin of 4, got 3");
  refuse(file("{" + U8("a", 0, 8) + "," + U8("b", 0, 8) + "}", Data),
         "tensor 'b' overlaps tensor 'a'; expected a begin of 8, got 0");
  refuse(file("{" + U8("a", 0, 8) + "," + U8("e", 5, 5) + "}", Data),
         "tensor 'e' overlaps tensor 'a'; expected a begin of 8, got 5");
  refuse(file("{" + U8("a", 0, 3) + "," + U8("b", 5, 8) + "}", Data),
         "hole in the data before tensor 'b'; expected a begin of 3, got 5");
  refuse(file("{" + U8("a", 1, 8) + "}", Data),
         "hole in the data before tensor 'a'; expected a begin of 0, got 1");
  refuse(file("{" + U8("a", 0, 7) + "}", Data),
         "trailing bytes after the last tensor; expected 7 bytes of data, got "
         "8");
  refuse(file("{}", Data), "trailing bytes after the last tensor; expected 0 "
                           "bytes of data, got 8");
  // Empty tensors may share their place with others.
  open(write(file("{" + U8("e", 0, 0) + "," + U8("a", 0, 4) + "," +
                      U8("f", 4, 4) + "," + U8("g", 4, 4) + "," +
                      U8("b", 4, 8) + "," + U8("h", 8, 8) + "}",
                  Data)));
}

TEST_F(SafeTensorsTest, SurvivesEveryTruncationAndByteFlip) {
  ASSERT_TRUE(writeSafeTensors(path("good"),
                               {{"a", bytes(DType::F32, {2, 3})},
                                {"b", bytes(DType::U8, {5})}},
                               {{"k", "v"}})
                  .isOk());
  const std::string Good = read(path("good"));
  for (size_t N = 0; N != Good.size(); ++N)
    EXPECT_FALSE(
        static_cast<bool>(SafeTensors::open(write(Good.substr(0, N)))));
  // Whatever a flip gives must be refused or readable, and never crash.
  for (size_t I = 0; I != Good.size() - 29; ++I)
    for (unsigned char Flip : {0x01, 0x02, 0x10, 0x20, 0x80}) {
      std::string Bad = Good;
      Bad[I] = static_cast<char>(Bad[I] ^ Flip);
      Expected<SafeTensors> Result = SafeTensors::open(write(Bad));
      if (!Result) {
        EXPECT_EQ(Result.status().message().find('\n'), std::string::npos);
        continue;
      }
      for (const std::string &Name : Result->names())
        EXPECT_GE(get(get(Result->get(Name)).to(DType::F64)).numElements(), 0);
    }
}

//===----------------------------------------------------------------------===//
// Refused writes
//===----------------------------------------------------------------------===//

TEST_F(SafeTensorsTest, WriteErrorsLeaveTheOldFile) {
  write("old");
  Tensor T = bytes(DType::U8, {2});
  auto Refuse = [&](const std::string &Path, const Named &Tensors,
                    const std::map<std::string, std::string> &Metadata,
                    StatusCode Code, const std::string &Message) {
    Status S = writeSafeTensors(Path, Tensors, Metadata);
    EXPECT_EQ(S.code(), Code);
    EXPECT_EQ(S.message(), Path + ": " + Message);
  };
  Refuse(path(), {{"__metadata__", T}}, {}, StatusCode::InvalidArgument,
         "reserved tensor name; expected any other name, got '__metadata__'");
  Refuse(path(), {{"a", T}, {"a", T}}, {}, StatusCode::InvalidArgument,
         "tensor name is repeated; expected each name once, got 'a' twice");
  Refuse(path(), {{"\xff", T}}, {}, StatusCode::InvalidArgument,
         "tensor name is not text; expected UTF-8, got '\xff'");
  Refuse(path(), {}, {{"k", "\xff"}}, StatusCode::InvalidArgument,
         "metadata entry 'k' is not text; expected UTF-8, got '\xff'");
  Tensor Remote =
      get(Tensor::view(T.data(), DType::U8, {2}, {}, Device::cuda(1)));
  Refuse(path(), {{"r", Remote}}, {}, StatusCode::Unsupported,
         "tensor 'r' is not in host memory; expected device cpu, got cuda:1");
  Refuse(path(), {}, {{"k", std::string(100000000, 'x')}},
         StatusCode::InvalidArgument,
         "header too long; expected at most 100000000 bytes, got 100000032");
  uint8_t Byte = 0;
  Tensor Huge = get(Tensor::view(&Byte, DType::U8, {int64_t(1) << 62}, {0}));
  Refuse(path(), {{"a", Huge}, {"b", Huge}}, {}, StatusCode::InvalidArgument,
         "tensors too large; expected at most 9223372036854775807 bytes, got "
         "more");
  Refuse(path("no/such"), {{"a", T}}, {}, StatusCode::NotFound,
         "cannot create a temporary file next to it; expected a writable "
         "directory, got No such file or directory");
  Refuse(path() + "/x", {{"a", T}}, {}, StatusCode::IOError,
         "cannot create a temporary file next to it; expected a writable "
         "directory, got Not a directory");
  ASSERT_EQ(::mkdir(path("dir").c_str(), 0700), 0);
  Refuse(path("dir"), {{"a", T}}, {}, StatusCode::IOError,
         "cannot replace; expected a replaceable file, got Is a directory");
#if !defined(__SANITIZE_ADDRESS__)
  // The sanitizer's allocator ends the process on requests of this size.
  Refuse(path(), {{"h", Huge}}, {}, StatusCode::OutOfMemory,
         "tensor 'h': cannot allocate shape [4611686018427387904] and dtype "
         "u8; expected 4611686018427387904 bytes, got none");
#endif
  EXPECT_EQ(read(path()), "old");
  // No temporary file is left behind.
  EXPECT_EQ(listing().size(), 2u);
}

//===----------------------------------------------------------------------===//
// References
//===----------------------------------------------------------------------===//

TEST(SplitTensorRefTest, Splits) {
  struct {
    const char *Ref;
    const char *Path;
    const char *Key;
  } Cases[] = {
      {"m.safetensors:w", "m.safetensors", "w"},
      {"/a/b.safetensors:layers.0/mixer.A_log", "/a/b.safetensors",
       "layers.0/mixer.A_log"},
      {"c:/x:y/m.safetensors:k", "c:/x:y/m.safetensors", "k"},
      {"m.safetensors:a:b:c", "m.safetensors", "a:b:c"},
      {"a.safetensors:b.safetensors:k", "a.safetensors:b.safetensors", "k"},
      {"weights.bin:k", "weights.bin", "k"},
      {"a:b:k", "a:b", "k"},
      {"m.safetensors.old:k", "m.safetensors.old", "k"},
  };
  for (const auto &Case : Cases) {
    std::pair<std::string, std::string> Split = get(splitTensorRef(Case.Ref));
    EXPECT_EQ(Split.first, Case.Path);
    EXPECT_EQ(Split.second, Case.Key);
  }
  for (const char *Bad :
       {"", "m.safetensors", "m.safetensors:", ":k", ":", "a:b:"}) {
    Expected<std::pair<std::string, std::string>> Result = splitTensorRef(Bad);
    ASSERT_FALSE(static_cast<bool>(Result)) << Bad;
    EXPECT_EQ(Result.status().code(), StatusCode::InvalidArgument);
    EXPECT_EQ(Result.status().message(),
              "not a tensor reference; expected '<path>:<key>', got '" +
                  std::string(Bad) + "'");
  }
}

} // namespace
