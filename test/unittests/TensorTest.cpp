//===- TensorTest.cpp - Tests of Status, Tensor and DLPack ----------------===//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//===----------------------------------------------------------------------===//

#include "corey/Tensor.h"

#include "corey/DLPack.h"

#include "gtest/gtest.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

using namespace corey;

namespace {

using Shape = std::vector<int64_t>;

constexpr int64_t Max64 = std::numeric_limits<int64_t>::max();
constexpr int64_t Min64 = std::numeric_limits<int64_t>::min();
constexpr double Inf = std::numeric_limits<double>::infinity();
constexpr double NaN = std::numeric_limits<double>::quiet_NaN();

constexpr DType AllDTypes[] = {DType::F64,  DType::F32,      DType::F16,
                               DType::BF16, DType::F8E4M3FN, DType::I64,
                               DType::I32,  DType::I16,      DType::I8,
                               DType::U8,   DType::Bool};

/// Checks that an Expected failed with the given code and message.
#define EXPECT_FAILS(Expression, Code, Message)                                \
  do {                                                                         \
    auto Result = (Expression);                                                \
    ASSERT_FALSE(static_cast<bool>(Result));                                   \
    EXPECT_EQ(Result.status().code(), StatusCode::Code);                       \
    EXPECT_EQ(Result.status().message(), Message);                             \
  } while (false)

/// Checks that a Status is a failure with the given code and message.
#define EXPECT_STATUS(Expression, Code, Message)                               \
  do {                                                                         \
    Status Result = (Expression);                                              \
    EXPECT_EQ(Result.code(), StatusCode::Code);                                \
    EXPECT_EQ(Result.message(), Message);                                      \
  } while (false)

/// Returns the value of a success, and fails the test otherwise.
template <class T> T get(Expected<T> Result) {
  EXPECT_TRUE(static_cast<bool>(Result)) << Result.status().message();
  return Result ? *std::move(Result) : T();
}

/// Returns the elements in row-major order.
std::vector<double> values(const Tensor &T) {
  std::vector<double> Result;
  Shape Index(T.shape().size(), 0);
  for (int64_t N = T.numElements(); N > 0; --N) {
    int64_t Offset = 0;
    for (size_t I = 0; I != Index.size(); ++I)
      Offset += Index[I] * T.strides()[I];
    Result.push_back(
        loadScalar(T.dtype(), static_cast<const char *>(T.data()) +
                                  Offset * int64_t(dtypeSize(T.dtype()))));
    for (size_t I = Index.size(); I-- != 0;) {
      if (++Index[I] != T.shape()[I])
        break;
      Index[I] = 0;
    }
  }
  return Result;
}

/// Returns a contiguous tensor with the elements 0, 1, 2, ...
Tensor iota(DType Type, const Shape &S) {
  Tensor T = get(Tensor::empty(Type, S));
  for (int64_t I = 0; I != T.numElements(); ++I)
    storeScalar(Type,
                static_cast<char *>(T.data()) + I * int64_t(dtypeSize(Type)),
                static_cast<double>(I));
  return T;
}

/// Returns a contiguous tensor with the given elements.
template <class T> Tensor vec(DType Type, std::vector<T> Elements) {
  Tensor Result = get(Tensor::empty(Type, {int64_t(Elements.size())}));
  EXPECT_EQ(dtypeSize(Type), sizeof(T));
  std::memcpy(Result.data(), Elements.data(), Elements.size() * sizeof(T));
  return Result;
}

uint32_t floatBits(float Value) {
  uint32_t Bits;
  std::memcpy(&Bits, &Value, sizeof(Bits));
  return Bits;
}

//===----------------------------------------------------------------------===//
// Status and Expected
//===----------------------------------------------------------------------===//

TEST(StatusTest, OkAndFailures) {
  Status Ok;
  EXPECT_TRUE(Ok.isOk());
  EXPECT_TRUE(static_cast<bool>(Status::ok()));
  EXPECT_EQ(Ok.code(), StatusCode::Ok);
  EXPECT_EQ(Ok.message(), "");
  EXPECT_EQ(Ok.toString(), "ok");
  EXPECT_TRUE(Status(StatusCode::Ok, "dropped").isOk());

  struct {
    Status S;
    StatusCode Code;
    const char *Text;
  } Cases[] = {
      {Status::invalidArgument("m"), StatusCode::InvalidArgument,
       "invalid argument: m"},
      {Status::notFound("m"), StatusCode::NotFound, "not found: m"},
      {Status::ioError("m"), StatusCode::IOError, "input/output error: m"},
      {Status::compileError("m"), StatusCode::CompileError, "compile error: m"},
      {Status::unsupported("m"), StatusCode::Unsupported, "unsupported: m"},
      {Status::outOfMemory("m"), StatusCode::OutOfMemory, "out of memory: m"},
      {Status::internal("m"), StatusCode::Internal, "internal error: m"},
  };
  for (const auto &Case : Cases) {
    EXPECT_FALSE(Case.S.isOk());
    EXPECT_EQ(Case.S.code(), Case.Code);
    EXPECT_EQ(Case.S.message(), "m");
    EXPECT_EQ(Case.S.toString(), Case.Text);
  }

  Status Copy = Cases[0].S;
  Status Moved = std::move(Cases[0].S);
  EXPECT_EQ(Copy.message(), "m");
  EXPECT_EQ(Moved.message(), "m");
}

TEST(StatusTest, ExpectedHoldsMoveOnlyValues) {
  auto Make = [](bool Good) -> Expected<std::unique_ptr<int>> {
    if (!Good)
      return Status::notFound("none");
    return std::make_unique<int>(7);
  };
  Expected<std::unique_ptr<int>> Good = Make(true);
  ASSERT_TRUE(static_cast<bool>(Good));
  EXPECT_TRUE(Good.status().isOk());
  EXPECT_EQ(**Good, 7);
  EXPECT_EQ(*Good->get(), 7);
  std::unique_ptr<int> Taken = *std::move(Good);
  EXPECT_EQ(*Taken, 7);
  EXPECT_EQ(**Make(true), 7);

  Expected<std::unique_ptr<int>> Bad = Make(false);
  EXPECT_FALSE(static_cast<bool>(Bad));
  Status Why = Bad.takeStatus();
  EXPECT_EQ(Why.code(), StatusCode::NotFound);
  EXPECT_FALSE(static_cast<bool>(Bad));

  Expected<std::string> Converted = "text";
  const Expected<std::string> &Const = Converted;
  EXPECT_EQ(*Const, "text");
  EXPECT_EQ(Const->size(), 4u);
  EXPECT_EQ(Expected<int>(Status::ok()).status().code(), StatusCode::Internal);
}

TEST(StatusDeathTest, ValueOfAFailure) {
  Expected<int> Bad = Status::notFound("gone");
  EXPECT_DEATH((void)*Bad,
               "value of a failed Expected was used: not found: gone");
}

//===----------------------------------------------------------------------===//
// Element types
//===----------------------------------------------------------------------===//

TEST(DTypeTest, NamesAndSizes) {
  const char *Names[] = {"f64", "f32", "f16", "bf16", "f8E4M3FN", "i64",
                         "i32", "i16", "i8",  "u8",   "bool"};
  size_t Sizes[] = {8, 4, 2, 2, 1, 8, 4, 2, 1, 1, 1};
  for (size_t I = 0; I != std::size(AllDTypes); ++I) {
    EXPECT_STREQ(dtypeName(AllDTypes[I]), Names[I]);
    EXPECT_EQ(dtypeSize(AllDTypes[I]), Sizes[I]);
    EXPECT_EQ(get(dtypeFromName(Names[I])), AllDTypes[I]);
    EXPECT_EQ(isFloat(AllDTypes[I]), I < 5);
  }
  EXPECT_FAILS(dtypeFromName("F32"), InvalidArgument,
               "unknown dtype; expected one of f64, f32, f16, bf16, f8E4M3FN, "
               "i64, i32, i16, i8, u8, bool, got 'F32'");
  EXPECT_FALSE(static_cast<bool>(dtypeFromName("")));
}

/// The value of a small float by the definition of the format, independent of
/// how the library computes it.
double reference(uint32_t Bits, int ExpBits, int ManBits, bool HasInf) {
  uint32_t Man = Bits % (1u << ManBits);
  int Exp = int(Bits >> ManBits) % (1 << ExpBits);
  bool IsNegative = (Bits >> (ManBits + ExpBits)) & 1;
  int Bias = (1 << (ExpBits - 1)) - 1;
  double Magnitude;
  if (HasInf && Exp == (1 << ExpBits) - 1)
    Magnitude = Man == 0 ? Inf : NaN;
  else if (!HasInf && Exp == (1 << ExpBits) - 1 && Man == (1u << ManBits) - 1)
    Magnitude = NaN;
  else if (Exp == 0)
    Magnitude = std::ldexp(double(Man), 1 - Bias - ManBits);
  else
    Magnitude = std::ldexp(double(Man + (1u << ManBits)), Exp - Bias - ManBits);
  return std::copysign(Magnitude, IsNegative ? -1.0 : 1.0);
}

struct SmallFloat {
  const char *Name;
  DType Type;
  int ExpBits;
  int ManBits;
  bool HasInf;
  float (*Decode)(uint32_t);
  uint32_t (*FromFloat)(float);
  uint32_t (*FromDouble)(double);

  uint32_t count() const { return 1u << (1 + ExpBits + ManBits); }
  uint32_t sign() const { return count() / 2; }
  double value(uint32_t Bits) const {
    return reference(Bits, ExpBits, ManBits, HasInf);
  }
};

const SmallFloat SmallFloats[] = {
    {"f16", DType::F16, 5, 10, true,
     [](uint32_t B) { return f16ToFloat(uint16_t(B)); },
     [](float V) -> uint32_t { return floatToF16(V); },
     [](double V) -> uint32_t { return doubleToF16(V); }},
    {"bf16", DType::BF16, 8, 7, true,
     [](uint32_t B) { return bf16ToFloat(uint16_t(B)); },
     [](float V) -> uint32_t { return floatToBF16(V); },
     [](double V) -> uint32_t { return doubleToBF16(V); }},
    {"f8E4M3FN", DType::F8E4M3FN, 4, 3, false,
     [](uint32_t B) { return f8E4M3FNToFloat(uint8_t(B)); },
     [](float V) -> uint32_t { return floatToF8E4M3FN(V); },
     [](double V) -> uint32_t { return doubleToF8E4M3FN(V); }},
};

TEST(DTypeTest, SmallFloatsDecodeExhaustively) {
  for (const SmallFloat &F : SmallFloats) {
    for (uint32_t Bits = 0; Bits != F.count(); ++Bits) {
      double Want = F.value(Bits);
      float Got = F.Decode(Bits);
      if (std::isnan(Want))
        ASSERT_TRUE(std::isnan(Got)) << F.Name << " " << Bits;
      else
        ASSERT_EQ(double(Got), Want) << F.Name << " " << Bits;
      ASSERT_EQ(std::signbit(Got), std::signbit(Want)) << F.Name << " " << Bits;
    }
  }
}

TEST(DTypeTest, SmallFloatsRoundTripExhaustively) {
  for (const SmallFloat &F : SmallFloats) {
    uint32_t Quiet = F.HasInf ? 1u << (F.ManBits - 1) : 0;
    for (uint32_t Bits = 0; Bits != F.count(); ++Bits) {
      // A NaN becomes quiet and keeps its sign and payload.
      uint32_t Want = std::isnan(F.value(Bits)) ? (Bits | Quiet) : Bits;
      ASSERT_EQ(F.FromFloat(F.Decode(Bits)), Want) << F.Name << " " << Bits;
      ASSERT_EQ(F.FromDouble(double(F.Decode(Bits))), Want)
          << F.Name << " " << Bits;
    }
  }
}

TEST(DTypeTest, SmallFloatsRoundToNearestEvenExhaustively) {
  for (const SmallFloat &F : SmallFloats) {
    // The finite positive values, and the step beyond the largest one, whose
    // pattern stands for the overflow.
    for (uint32_t Low = 0; std::isfinite(F.value(Low)); ++Low) {
      double A = F.value(Low);
      double B = F.value(Low + 1);
      if (!std::isfinite(B))
        B = A + (A - F.value(Low - 1));
      double Middle = A + (B - A) / 2;
      uint32_t Even = Low % 2 == 0 ? Low : Low + 1;
      for (uint32_t Sign : {0u, F.sign()}) {
        double S = Sign ? -1.0 : 1.0;
        ASSERT_EQ(F.FromDouble(S * Middle), Sign | Even)
            << F.Name << " " << Low;
        ASSERT_EQ(F.FromDouble(S * std::nextafter(Middle, 0)), Sign | Low)
            << F.Name << " " << Low;
        ASSERT_EQ(F.FromDouble(S * std::nextafter(Middle, Inf)),
                  Sign | (Low + 1))
            << F.Name << " " << Low;
        // The middle between two bfloat16 is a float as well.
        ASSERT_EQ(F.FromFloat(float(S * Middle)), Sign | Even)
            << F.Name << " " << Low;
        ASSERT_EQ(F.FromFloat(std::nextafter(float(S * Middle), 0.0f)),
                  Sign | Low)
            << F.Name << " " << Low;
        ASSERT_EQ(
            F.FromFloat(std::nextafter(float(S * Middle), float(S * Inf))),
            Sign | (Low + 1))
            << F.Name << " " << Low;
      }
    }
  }
}

TEST(DTypeTest, SmallFloatsAtTheLimits) {
  double Tiny = std::numeric_limits<double>::denorm_min();
  double Huge = std::numeric_limits<double>::max();
  EXPECT_EQ(doubleToF16(Tiny), 0x0000);
  EXPECT_EQ(doubleToF16(-Tiny), 0x8000);
  EXPECT_EQ(doubleToF16(Huge), 0x7c00);
  EXPECT_EQ(doubleToF16(-Inf), 0xfc00);
  EXPECT_EQ(doubleToF16(65519.99), 0x7bff);
  EXPECT_EQ(doubleToF16(65520.0), 0x7c00);
  EXPECT_EQ(doubleToBF16(-Huge), 0xff80);
  EXPECT_EQ(doubleToBF16(Inf), 0x7f80);
  EXPECT_EQ(floatToBF16(std::numeric_limits<float>::denorm_min()), 0x0000);
  EXPECT_EQ(doubleToF8E4M3FN(464.0), 0x7e);
  EXPECT_EQ(doubleToF8E4M3FN(464.01), 0x7f);
  EXPECT_EQ(doubleToF8E4M3FN(Inf), 0x7f);
  EXPECT_EQ(doubleToF8E4M3FN(-Inf), 0xff);
  EXPECT_EQ(doubleToF8E4M3FN(NaN) & 0x7f, 0x7f);
  // A payload below the kept bits must not turn a NaN into an infinity.
  uint32_t Bits = 0xff800001;
  float Signaling;
  std::memcpy(&Signaling, &Bits, sizeof(Bits));
  EXPECT_EQ(floatToF16(Signaling), 0xfe00);
  EXPECT_EQ(floatToBF16(Signaling), 0xffc0);
  // One rounding: through float these would be a tie.
  EXPECT_EQ(doubleToF16(1.0 + 0x1p-11 + 0x1p-40), 0x3c01);
  EXPECT_EQ(doubleToBF16(1.0 + 0x1p-8 + 0x1p-40), 0x3f81);
}

TEST(DTypeTest, Scalars) {
  // One byte in, so that every access is misaligned.
  alignas(8) char Memory[9];
  void *P = Memory + 1;
  auto Round = [&](DType Type, double Value) {
    storeScalar(Type, P, Value);
    return loadScalar(Type, P);
  };
  EXPECT_EQ(Round(DType::F64, 0.1), 0.1);
  EXPECT_EQ(Round(DType::F32, 0.1), double(0.1f));
  EXPECT_EQ(Round(DType::F32, 1e300), Inf);
  EXPECT_EQ(Round(DType::F32, -1e300), -Inf);
  EXPECT_EQ(Round(DType::F32, 0x1.fffffefffffffp127), 0x1.fffffep127);
  EXPECT_EQ(Round(DType::F32, 0x1.ffffffp127), Inf);
  EXPECT_TRUE(std::isnan(Round(DType::F32, NaN)));
  EXPECT_EQ(Round(DType::F16, 0.1), 0.0999755859375);
  EXPECT_EQ(Round(DType::BF16, 0.1), 0.10009765625);
  EXPECT_EQ(Round(DType::F8E4M3FN, 0.1), 0.1015625);
  for (DType Type :
       {DType::I64, DType::I32, DType::I16, DType::I8, DType::U8}) {
    EXPECT_EQ(Round(Type, NaN), 0.0);
    EXPECT_EQ(Round(Type, 2.9), 2.0);
    EXPECT_EQ(Round(Type, -2.9), Type == DType::U8 ? 0.0 : -2.0);
  }
  EXPECT_EQ(Round(DType::I64, Inf), 0x1p63);
  storeScalar(DType::I64, P, 0x1p63);
  int64_t Stored;
  std::memcpy(&Stored, P, sizeof(Stored));
  EXPECT_EQ(Stored, Max64);
  EXPECT_EQ(Round(DType::I64, -Inf), -0x1p63);
  EXPECT_EQ(Round(DType::I64, 0x1p62), 0x1p62);
  EXPECT_EQ(Round(DType::I32, 3e9), 2147483647.0);
  EXPECT_EQ(Round(DType::I32, -3e9), -2147483648.0);
  EXPECT_EQ(Round(DType::I16, 32767.9), 32767.0);
  EXPECT_EQ(Round(DType::I16, -1e9), -32768.0);
  EXPECT_EQ(Round(DType::I8, 127.5), 127.0);
  EXPECT_EQ(Round(DType::I8, 128), 127.0);
  EXPECT_EQ(Round(DType::I8, -1000), -128.0);
  EXPECT_EQ(Round(DType::U8, 255.9), 255.0);
  EXPECT_EQ(Round(DType::U8, 256), 255.0);
  EXPECT_EQ(Round(DType::U8, -0.5), 0.0);
  EXPECT_EQ(Round(DType::Bool, 0.0), 0.0);
  EXPECT_EQ(Round(DType::Bool, -0.0), 0.0);
  EXPECT_EQ(Round(DType::Bool, 0.25), 1.0);
  EXPECT_EQ(Round(DType::Bool, NaN), 1.0);
}

//===----------------------------------------------------------------------===//
// Devices
//===----------------------------------------------------------------------===//

TEST(DeviceTest, ParseAndName) {
  EXPECT_EQ(get(Device::parse("cpu")), Device::cpu());
  EXPECT_EQ(get(Device::parse("cuda")), Device::cuda(0));
  EXPECT_EQ(get(Device::parse("cuda:0")), Device::cuda());
  EXPECT_EQ(get(Device::parse("cuda:12")), Device::cuda(12));
  EXPECT_NE(Device::cuda(0), Device::cuda(1));
  EXPECT_NE(Device::cuda(0), Device::cpu());
  EXPECT_EQ(Device::cpu().name(), "cpu");
  EXPECT_EQ(Device::cuda(3).name(), "cuda:3");
  for (const char *Bad : {"", "CPU", "cpu:0", "cuda:", "cuda:-1", "cuda:x",
                          "cuda:1 ", "cuda:99999999999", "cudaa", "gpu"})
    EXPECT_FAILS(
        Device::parse(Bad), InvalidArgument,
        "unknown device; expected 'cpu', 'cuda' or 'cuda:<number>', got '" +
            std::string(Bad) + "'");
}

//===----------------------------------------------------------------------===//
// Making tensors
//===----------------------------------------------------------------------===//

TEST(TensorTest, CountElements) {
  EXPECT_EQ(get(countElements({})), 1);
  EXPECT_EQ(get(countElements({2, 3, 5})), 30);
  EXPECT_EQ(get(countElements({2, 0, 5})), 0);
  EXPECT_EQ(get(countElements({Max64})), Max64);
  EXPECT_FAILS(countElements({2, -3}), InvalidArgument,
               "negative extent in shape [2, -3]; expected at least 0, got -3");
  EXPECT_FAILS(countElements({4294967296, 4294967296}), InvalidArgument,
               "number of elements of shape [4294967296, 4294967296] "
               "overflows; expected at most 9223372036854775807, got more");
  // Also when a zero makes the product itself harmless.
  EXPECT_FALSE(static_cast<bool>(countElements({0, Max64, 2})));
}

TEST(TensorTest, Default) {
  Tensor T;
  EXPECT_EQ(T.data(), nullptr);
  EXPECT_EQ(T.numElements(), 0);
  EXPECT_EQ(T.describe(), "tensor<0xf32, strides [1], cpu>");
  EXPECT_TRUE(T.isContiguous());
}

TEST(TensorTest, Empty) {
  for (DType Type : AllDTypes) {
    Tensor T = get(Tensor::empty(Type, {2, 7, 3}, /*ZeroInit=*/true));
    EXPECT_EQ(T.dtype(), Type);
    EXPECT_EQ(T.device(), Device::cpu());
    EXPECT_EQ(T.rank(), 3);
    EXPECT_EQ(T.dim(0), 2);
    EXPECT_EQ(T.dim(-1), 3);
    EXPECT_EQ(T.stride(0), 21);
    EXPECT_EQ(T.stride(-2), 3);
    EXPECT_EQ(T.numElements(), 42);
    EXPECT_EQ(T.numBytes(), 42 * int64_t(dtypeSize(Type)));
    EXPECT_TRUE(T.isContiguous());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(T.data()) % 64, 0u);
    EXPECT_EQ(values(T), std::vector<double>(42, 0.0));
    EXPECT_EQ(T.storage().use_count(), 1);
  }
  Tensor Scalar = get(Tensor::empty(DType::F64, {}));
  EXPECT_EQ(Scalar.rank(), 0);
  EXPECT_EQ(Scalar.numElements(), 1);
  EXPECT_EQ(Scalar.describe(), "tensor<f64, strides [], cpu>");
  Tensor None = get(Tensor::empty(DType::I8, {3, 0, 4}));
  EXPECT_EQ(None.numElements(), 0);
  EXPECT_EQ(None.numBytes(), 0);
  EXPECT_EQ(None.strides(), (Shape{4, 4, 1}));
  EXPECT_NE(None.data(), nullptr);
}

TEST(TensorTest, EmptyErrors) {
  EXPECT_FAILS(Tensor::empty(DType::F32, {-1}), InvalidArgument,
               "negative extent in shape [-1]; expected at least 0, got -1");
  EXPECT_FAILS(Tensor::empty(DType::I8, {Max64, 2}), InvalidArgument,
               "number of elements of shape [9223372036854775807, 2] "
               "overflows; expected at most 9223372036854775807, got more");
  EXPECT_FAILS(Tensor::empty(DType::F32, {Max64}), InvalidArgument,
               "size of shape [9223372036854775807] and dtype f32 overflows; "
               "expected at most 9223372036854775807 bytes, got more");
  EXPECT_FAILS(Tensor::empty(DType::F32, {0, Max64}), InvalidArgument,
               "size of shape [0, 9223372036854775807] and dtype f32 "
               "overflows; expected at most 9223372036854775807 bytes, got "
               "more");
}

#if !defined(__SANITIZE_ADDRESS__)
// The sanitizer's allocator ends the process on requests of this size.
TEST(TensorTest, EmptyOutOfMemory) {
  EXPECT_FAILS(Tensor::empty(DType::I8, {int64_t(1) << 62}), OutOfMemory,
               "cannot allocate shape [4611686018427387904] and dtype i8; "
               "expected 4611686018427387904 bytes, got none");
  // Rounded up to whole vectors, this would exceed int64_t.
  EXPECT_FALSE(static_cast<bool>(Tensor::empty(DType::I8, {Max64})));
}
#endif

TEST(TensorTest, View) {
  float Memory[6] = {0, 1, 2, 3, 4, 5};
  Tensor T = get(Tensor::view(Memory, DType::F32, {2, 3}));
  EXPECT_EQ(T.data(), Memory);
  EXPECT_EQ(T.dataAs<float>()[4], 4.0f);
  EXPECT_EQ(T.strides(), (Shape{3, 1}));
  EXPECT_EQ(T.storage(), nullptr);
  EXPECT_EQ(values(T), (std::vector<double>{0, 1, 2, 3, 4, 5}));

  Tensor Reversed = get(Tensor::view(Memory + 5, DType::F32, {3}, {-2}));
  EXPECT_EQ(values(Reversed), (std::vector<double>{5, 3, 1}));
  EXPECT_FALSE(Reversed.isContiguous());
  Tensor Broadcast = get(Tensor::view(Memory + 1, DType::F32, {2, 2}, {0, 1}));
  EXPECT_EQ(values(Broadcast), (std::vector<double>{1, 2, 1, 2}));

  Tensor OnDevice = get(
      Tensor::view(Memory, DType::BF16, {2, 7, 3}, {1, 6, 2}, Device::cuda(1)));
  EXPECT_EQ(OnDevice.describe(),
            "tensor<2x7x3xbf16, strides [1, 6, 2], cuda:1>");
  EXPECT_EQ(get(Tensor::view(nullptr, DType::F64, {0})).data(), nullptr);

  auto Owner = std::make_shared<int>(0);
  {
    Tensor Owning =
        get(Tensor::view(Memory, DType::F32, {6}, {}, Device::cpu(), Owner));
    Tensor Slice = get(Owning.slice(0, 1, 2));
    EXPECT_EQ(Owner.use_count(), 3);
  }
  EXPECT_EQ(Owner.use_count(), 1);
}

TEST(TensorTest, ViewErrors) {
  alignas(8) char Memory[64];
  EXPECT_FAILS(Tensor::view(Memory, DType::F32, {2, -1}), InvalidArgument,
               "negative extent in shape [2, -1]; expected at least 0, got -1");
  EXPECT_FAILS(Tensor::view(Memory, DType::F32, {2, 2}, {1}), InvalidArgument,
               "wrong number of strides for shape [2, 2]; expected 2, got 1");
  EXPECT_FAILS(Tensor::view(Memory, DType::F32, {}, {1}), InvalidArgument,
               "wrong number of strides for shape []; expected 0, got 1");
  EXPECT_FAILS(Tensor::view(nullptr, DType::F32, {2}), InvalidArgument,
               "no data for shape [2]; expected an address, got null");
  EXPECT_FAILS(Tensor::view(Memory + 6, DType::F32, {2}), InvalidArgument,
               "data of dtype f32 is misaligned; expected a multiple of 4 "
               "bytes, got remainder 2");
  EXPECT_FAILS(Tensor::view(Memory, DType::F64, {2}, {Max64}), InvalidArgument,
               "shape [2] with strides [9223372036854775807] leaves the "
               "address space; expected every element inside, got an overflow");
  EXPECT_FAILS(Tensor::view(Memory, DType::U8, {2}, {Min64}), InvalidArgument,
               "shape [2] with strides [-9223372036854775808] leaves the "
               "address space; expected every element inside, got an overflow");
  EXPECT_FALSE(
      static_cast<bool>(Tensor::view(Memory, DType::U8, {3}, {Min64})));
  EXPECT_FALSE(
      static_cast<bool>(Tensor::view(Memory, DType::U8, {2, 2}, {Max64, 1})));
  EXPECT_FALSE(static_cast<bool>(
      Tensor::view(Memory, DType::U8, {2, 2}, {Max64 / 2, -Max64 / 2 - 100})));
  // The stride of a single element is never used.
  EXPECT_TRUE(
      static_cast<bool>(Tensor::view(Memory, DType::U8, {1, 2}, {Min64, 1})));
  // Broadcasting must not overflow the number of elements either.
  EXPECT_FALSE(static_cast<bool>(
      Tensor::view(Memory, DType::U8, {Max64, Max64}, {0, 0})));
}

TEST(TensorTest, Rebind) {
  float Memory[12] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
  Tensor T = get(Tensor::view(Memory + 5, DType::F32, {3}, {-2}));
  ASSERT_TRUE(T.rebind(Memory + 11));
  EXPECT_EQ(T.data(), Memory + 11);
  EXPECT_EQ(T.strides(), std::vector<int64_t>{-2});
  EXPECT_EQ(get(T.to(DType::F32)).dataAs<float>()[2], 7);
  // What fails changes nothing.
  EXPECT_EQ(T.rebind(nullptr).code(), StatusCode::InvalidArgument);
  EXPECT_EQ(T.rebind(reinterpret_cast<char *>(Memory) + 2).code(),
            StatusCode::InvalidArgument);
  EXPECT_EQ(T.rebind(reinterpret_cast<void *>(uintptr_t(8))).code(),
            StatusCode::InvalidArgument);
  EXPECT_EQ(T.data(), Memory + 11);
  // Memory that it owned is given back.
  Tensor Own = get(Tensor::empty(DType::F32, {3}));
  std::weak_ptr<void> Watch = Own.storage();
  ASSERT_TRUE(Own.rebind(Memory));
  EXPECT_TRUE(Watch.expired());
  EXPECT_EQ(Own.dataAs<float>()[2], 2);
}

TEST(TensorTest, IsContiguous) {
  Tensor T = iota(DType::F32, {2, 3, 4});
  EXPECT_TRUE(T.isContiguous());
  EXPECT_FALSE(get(T.transpose(0, 1)).isContiguous());
  EXPECT_FALSE(get(T.slice(2, 0, 3)).isContiguous());
  EXPECT_TRUE(get(T.slice(0, 1, 2)).isContiguous());
  EXPECT_TRUE(get(get(T.slice(1, 1, 2)).slice(0, 0, 1)).isContiguous());
  EXPECT_TRUE(get(T.slice(1, 0, 0)).isContiguous());
  EXPECT_TRUE(get(get(T.unsqueeze(0)).transpose(0, 1)).isContiguous());
  EXPECT_FALSE(get(T.slice(0, 1, -1, -1)).isContiguous());
}

//===----------------------------------------------------------------------===//
// Views
//===----------------------------------------------------------------------===//

TEST(TensorTest, Slice) {
  Tensor T = iota(DType::I32, {7});
  auto Sliced = [&](int64_t Start, int64_t Stop, int64_t Step) {
    return values(get(T.slice(0, Start, Stop, Step)));
  };
  EXPECT_EQ(Sliced(0, 7, 1), (std::vector<double>{0, 1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(Sliced(1, 7, 3), (std::vector<double>{1, 4}));
  EXPECT_EQ(Sliced(1, 7, Max64), (std::vector<double>{1}));
  EXPECT_EQ(Sliced(6, -1, -1), (std::vector<double>{6, 5, 4, 3, 2, 1, 0}));
  EXPECT_EQ(Sliced(6, 0, -2), (std::vector<double>{6, 4, 2}));
  EXPECT_EQ(Sliced(6, -1, Min64), (std::vector<double>{6}));
  EXPECT_EQ(Sliced(7, 7, 1), (std::vector<double>{}));
  EXPECT_EQ(Sliced(5, 2, 1), (std::vector<double>{}));
  EXPECT_EQ(Sliced(2, 5, -1), (std::vector<double>{}));
  EXPECT_EQ(get(T.slice(0, 7, 7)).data(), T.data());

  Tensor M = iota(DType::I32, {3, 4});
  Tensor Corner = get(get(M.slice(-1, 3, 0, -2)).slice(0, 1, 3));
  EXPECT_EQ(values(Corner), (std::vector<double>{7, 5, 11, 9}));
  EXPECT_EQ(Corner.strides(), (Shape{4, -2}));
  EXPECT_EQ(Corner.storage(), M.storage());
  // A view of a reversed view goes forward again.
  EXPECT_EQ(values(get(get(T.slice(0, 6, -1, -1)).slice(0, 6, 3, -1))),
            (std::vector<double>{0, 1, 2}));
  Tensor None = iota(DType::F32, {0});
  EXPECT_EQ(get(None.slice(0, 0, 0)).numElements(), 0);
  EXPECT_EQ(get(None.slice(0, -1, -1, -1)).numElements(), 0);
}

TEST(TensorTest, SliceErrors) {
  Tensor T = iota(DType::I32, {2, 7});
  EXPECT_FAILS(T.slice(2, 0, 1), InvalidArgument,
               "dimension out of range; expected [-2, 1], got 2");
  EXPECT_FAILS(T.slice(-3, 0, 1), InvalidArgument,
               "dimension out of range; expected [-2, 1], got -3");
  EXPECT_FAILS(iota(DType::I32, {}).slice(0, 0, 1), InvalidArgument,
               "dimension out of range; expected none for a scalar, got 0");
  EXPECT_FAILS(T.slice(1, 0, 1, 0), InvalidArgument,
               "zero slice step; expected a positive or negative step, got 0");
  EXPECT_FAILS(T.slice(-1, -1, 3), InvalidArgument,
               "slice start out of range in dimension 1 of extent 7; expected "
               "[0, 7], got -1");
  EXPECT_FAILS(T.slice(1, 0, 8), InvalidArgument,
               "slice stop out of range in dimension 1 of extent 7; expected "
               "[0, 7], got 8");
  EXPECT_FAILS(T.slice(1, 7, 0, -1), InvalidArgument,
               "slice start out of range in dimension 1 of extent 7; expected "
               "[-1, 6], got 7");
  EXPECT_FAILS(T.slice(1, 6, Min64, -1), InvalidArgument,
               "slice stop out of range in dimension 1 of extent 7; expected "
               "[-1, 6], got -9223372036854775808");
}

TEST(TensorTest, Reshape) {
  Tensor T = iota(DType::F32, {2, 3, 4});
  EXPECT_EQ(get(T.reshape({24})).strides(), (Shape{1}));
  EXPECT_EQ(get(T.reshape({6, -1})).shape(), (Shape{6, 4}));
  EXPECT_EQ(get(T.reshape({-1})).data(), T.data());
  EXPECT_EQ(get(iota(DType::F32, {}).reshape({1, 1})).shape(), (Shape{1, 1}));
  EXPECT_EQ(get(iota(DType::F32, {1}).reshape({})).rank(), 0);
  EXPECT_EQ(get(iota(DType::F32, {0, 4}).reshape({2, 0, 9})).strides(),
            (Shape{9, 9, 1}));
  EXPECT_EQ(get(iota(DType::F32, {0, 4}).reshape({-1, 4})).shape(),
            (Shape{0, 4}));

  // Strided tensors: split a dimension, merge two that fit together, add and
  // drop dimensions of extent 1, go backwards, broadcast.
  struct {
    Tensor Source;
    Shape To;
    Shape Strides;
  } Cases[] = {
      {get(T.slice(2, 0, 4, 2)), {2, 3, 2}, {12, 4, 2}},
      {get(T.slice(2, 0, 4, 2)), {12}, {2}},
      {get(T.slice(2, 0, 4, 2)), {3, 1, 2, 2}, {8, 8, 4, 2}},
      {get(T.slice(2, 0, 3)), {6, 3}, {4, 1}},
      {get(T.slice(1, 0, 2)), {2, 8}, {12, 1}},
      {get(T.transpose(0, 2)), {2, 2, 3, 2}, {2, 1, 4, 12}},
      {get(iota(DType::I8, {6}).slice(0, 5, -1, -1)), {2, 3}, {-3, -1}},
      {get(Tensor::view(T.data(), DType::F32, {4, 6}, {0, 1})),
       {2, 2, 2, 3},
       {0, 0, 3, 1}},
      {get(Tensor::view(T.data(), DType::F32, {4, 6}, {0, 0})), {8, 3}, {0, 0}},
  };
  for (const auto &Case : Cases) {
    Tensor R = get(Case.Source.reshape(Case.To));
    EXPECT_EQ(R.shape(), Case.To);
    EXPECT_EQ(values(R), values(Case.Source)) << Case.Source.describe();
    for (size_t I = 0; I != Case.To.size(); ++I) {
      if (Case.To[I] != 1) {
        EXPECT_EQ(R.strides()[I], Case.Strides[I]) << R.describe();
      }
    }
  }
}

TEST(TensorTest, ReshapeErrors) {
  Tensor T = iota(DType::F32, {2, 3});
  EXPECT_FAILS(T.reshape({4}), InvalidArgument,
               "cannot reshape tensor<2x3xf32, strides [3, 1], cpu> to [4]; "
               "expected 6 elements, got 4");
  EXPECT_FAILS(T.reshape({-1, -1}), InvalidArgument,
               "ambiguous shape [-1, -1]; expected at most one extent of -1, "
               "got several");
  EXPECT_FAILS(T.reshape({-1, 4}), InvalidArgument,
               "cannot compute the extent -1 of shape [-1, 4]; expected a "
               "divisor of 6 elements, got 4");
  EXPECT_FAILS(iota(DType::F32, {0}).reshape({-1, 0}), InvalidArgument,
               "cannot compute the extent -1 of shape [-1, 0]; expected a "
               "divisor of 0 elements, got 0");
  EXPECT_FAILS(T.reshape({-2, -3}), InvalidArgument,
               "negative extent in shape [-2, -3]; expected at least 0, got "
               "-2");
  EXPECT_FAILS(
      T.reshape({-1, -3}), InvalidArgument,
      "negative extent in shape [-1, -3]; expected at least 0, got -3");
  EXPECT_FAILS(iota(DType::F32, {0}).reshape({0, Max64}), InvalidArgument,
               "size of shape [0, 9223372036854775807] and dtype f32 "
               "overflows; expected at most 9223372036854775807 bytes, got "
               "more");
  EXPECT_FAILS(get(T.transpose(0, 1)).reshape({6}), InvalidArgument,
               "cannot reshape tensor<3x2xf32, strides [1, 3], cpu> to [6] "
               "without a copy; expected strides that allow it, got [1, 3]");
  EXPECT_FAILS(get(T.slice(1, 0, 2)).reshape({4}), InvalidArgument,
               "cannot reshape tensor<2x2xf32, strides [3, 1], cpu> to [4] "
               "without a copy; expected strides that allow it, got [3, 1]");
}

TEST(TensorTest, TransposeAndPermute) {
  Tensor T = iota(DType::F32, {2, 3, 4});
  Tensor Swapped = get(T.transpose(0, -1));
  EXPECT_EQ(Swapped.shape(), (Shape{4, 3, 2}));
  EXPECT_EQ(Swapped.strides(), (Shape{1, 4, 12}));
  Tensor Permuted = get(T.permute({2, 0, -2}));
  EXPECT_EQ(Permuted.shape(), (Shape{4, 2, 3}));
  EXPECT_EQ(Permuted.strides(), (Shape{1, 12, 4}));
  EXPECT_EQ(values(get(Permuted.slice(0, 1, 2))),
            (std::vector<double>{1, 5, 9, 13, 17, 21}));
  EXPECT_EQ(get(iota(DType::F32, {}).permute({})).rank(), 0);

  EXPECT_FAILS(T.transpose(3, 0), InvalidArgument,
               "dimension out of range; expected [-3, 2], got 3");
  EXPECT_FAILS(T.transpose(0, -4), InvalidArgument,
               "dimension out of range; expected [-3, 2], got -4");
  EXPECT_FAILS(T.permute({0, 1}), InvalidArgument,
               "wrong number of dimensions to permute; expected 3, got 2");
  EXPECT_FAILS(T.permute({0, 1, 5}), InvalidArgument,
               "dimension out of range; expected [-3, 2], got 5");
  EXPECT_FAILS(
      T.permute({0, 2, -1}), InvalidArgument,
      "repeated dimension in permutation; expected each once, got -1 again");
}

TEST(TensorTest, Unsqueeze) {
  Tensor T = iota(DType::F32, {2, 3});
  EXPECT_EQ(get(T.unsqueeze(0)).shape(), (Shape{1, 2, 3}));
  EXPECT_EQ(get(T.unsqueeze(0)).strides(), (Shape{6, 3, 1}));
  EXPECT_EQ(get(T.unsqueeze(1)).shape(), (Shape{2, 1, 3}));
  EXPECT_EQ(get(T.unsqueeze(2)).shape(), (Shape{2, 3, 1}));
  EXPECT_EQ(get(T.unsqueeze(-1)).shape(), (Shape{2, 3, 1}));
  EXPECT_EQ(get(T.unsqueeze(-3)).shape(), (Shape{1, 2, 3}));
  EXPECT_EQ(get(iota(DType::F32, {}).unsqueeze(0)).shape(), (Shape{1}));
  EXPECT_FAILS(T.unsqueeze(3), InvalidArgument,
               "dimension out of range; expected [-3, 2], got 3");
}

TEST(TensorTest, ByteRangeAndOverlap) {
  float Memory[12] = {};
  uintptr_t Base = reinterpret_cast<uintptr_t>(Memory);
  Tensor T = get(Tensor::view(Memory, DType::F32, {12}));
  EXPECT_EQ(T.byteRange(), (std::pair<uintptr_t, uintptr_t>(Base, Base + 48)));
  Tensor Reversed = get(T.slice(0, 5, -1, -2));
  EXPECT_EQ(Reversed.byteRange(),
            (std::pair<uintptr_t, uintptr_t>(Base + 4, Base + 24)));
  Tensor Mixed = get(Tensor::view(Memory + 4, DType::F32, {2, 3}, {-4, 3}));
  EXPECT_EQ(Mixed.byteRange(),
            (std::pair<uintptr_t, uintptr_t>(Base, Base + 44)));

  Tensor Front = get(T.slice(0, 0, 6));
  Tensor Back = get(T.slice(0, 6, 12));
  EXPECT_FALSE(Front.overlaps(Back));
  EXPECT_FALSE(Back.overlaps(Front));
  EXPECT_TRUE(Front.overlaps(Reversed));
  EXPECT_TRUE(Reversed.overlaps(Front));
  EXPECT_FALSE(Reversed.overlaps(Back));
  EXPECT_TRUE(Back.overlaps(T));
  // Conservative for interleaved elements.
  EXPECT_TRUE(get(T.slice(0, 0, 12, 2)).overlaps(get(T.slice(0, 1, 12, 2))));
  Tensor None = get(T.slice(0, 3, 3));
  EXPECT_EQ(None.byteRange().first, None.byteRange().second);
  EXPECT_FALSE(None.overlaps(T));
  EXPECT_FALSE(T.overlaps(None));
  Tensor Elsewhere =
      get(Tensor::view(Memory, DType::F32, {12}, {}, Device::cuda(0)));
  EXPECT_FALSE(T.overlaps(Elsewhere));
  EXPECT_TRUE(Elsewhere.overlaps(Elsewhere));
}

//===----------------------------------------------------------------------===//
// Copies
//===----------------------------------------------------------------------===//

TEST(TensorTest, ConvertEveryPair) {
  // Small integers are exact in every type, and 600 exceeds a block.
  for (DType From : AllDTypes) {
    Tensor Source = get(Tensor::empty(From, {3, 200}));
    std::vector<double> Want;
    for (int I = 0; I != 600; ++I) {
      double Value = From == DType::Bool ? I % 2 : I % 11;
      Want.push_back(Value);
      storeScalar(From,
                  static_cast<char *>(Source.data()) +
                      size_t(I) * dtypeSize(From),
                  Value);
    }
    Tensor Reversed = get(Source.slice(1, 199, -1, -1));
    std::vector<double> WantReversed = values(Reversed);
    for (DType To : AllDTypes) {
      auto AsBool = [&](std::vector<double> V) {
        if (To == DType::Bool)
          for (double &X : V)
            X = X != 0;
        return V;
      };
      Tensor Copy = get(Source.to(To));
      EXPECT_EQ(Copy.dtype(), To);
      EXPECT_EQ(values(Copy), AsBool(Want))
          << dtypeName(From) << " to " << dtypeName(To);
      Tensor Dense = get(Reversed.to(To));
      EXPECT_TRUE(Dense.isContiguous());
      EXPECT_EQ(values(Dense), AsBool(WantReversed));
      EXPECT_FALSE(Dense.overlaps(Source));
    }
  }
}

TEST(TensorTest, ConvertSpecialValues) {
  Tensor Source = vec<double>(
      DType::F64, {NaN, Inf, -Inf, 1e10, -1e10, 0.5, -0.0, 3.99, -3.99});
  EXPECT_EQ(values(get(Source.to(DType::I8))),
            (std::vector<double>{0, 127, -128, 127, -128, 0, 0, 3, -3}));
  EXPECT_EQ(values(get(Source.to(DType::U8))),
            (std::vector<double>{0, 255, 0, 255, 0, 0, 0, 3, 0}));
  EXPECT_EQ(values(get(Source.to(DType::Bool))),
            (std::vector<double>{1, 1, 1, 1, 1, 1, 0, 1, 1}));
  Tensor Half = get(Source.to(DType::F16));
  EXPECT_TRUE(std::isnan(f16ToFloat(Half.dataAs<uint16_t>()[0])));
  EXPECT_EQ(Half.dataAs<uint16_t>()[1], 0x7c00);
  EXPECT_EQ(Half.dataAs<uint16_t>()[4], 0xfc00);
  EXPECT_EQ(Half.dataAs<uint16_t>()[6], 0x8000);

  // Integers do not pass through double.
  Tensor Longs = vec<int64_t>(
      DType::I64, {Max64, Min64, Max64 - 1, (int64_t(1) << 62) + 1, -129, 256});
  EXPECT_EQ(values(get(Longs.to(DType::I8))),
            (std::vector<double>{127, -128, 127, 127, -128, 127}));
  EXPECT_EQ(values(get(Longs.to(DType::U8))),
            (std::vector<double>{255, 0, 255, 255, 0, 255}));
  EXPECT_EQ(values(get(Longs.to(DType::Bool))), std::vector<double>(6, 1));
  EXPECT_EQ(values(get(Longs.to(DType::I32))),
            (std::vector<double>{2147483647, -2147483648.0, 2147483647,
                                 2147483647, -129, 256}));
  Tensor Same = get(get(Longs.to(DType::I64)).to(DType::I64));
  EXPECT_EQ(Same.dataAs<int64_t>()[3], (int64_t(1) << 62) + 1);

  // 2^62 + 2^54 is the middle between two bfloat16, 2^62 + 2^38 that between
  // two floats; one more must round up in a single step.
  int64_t Big = int64_t(1) << 62;
  Tensor Ties = vec<int64_t>(
      DType::I64, {Big + (int64_t(1) << 54), Big + (int64_t(1) << 54) + 1,
                   -Big - (int64_t(1) << 54) - 1, Min64});
  EXPECT_EQ(values(get(Ties.to(DType::BF16))),
            (std::vector<double>{0x1p62, 0x1.02p62, -0x1.02p62, -0x1p63}));
  Tensor FloatTies = vec<int64_t>(
      DType::I64, {Big + (int64_t(1) << 38), Big + (int64_t(1) << 38) + 1});
  EXPECT_EQ(values(get(FloatTies.to(DType::F32))),
            (std::vector<double>{0x1p62, 0x1.000002p62}));

  // Bytes other than 0 and 1 are true.
  Tensor Odd = vec<uint8_t>(DType::Bool, {0, 1, 2, 255});
  EXPECT_EQ(values(get(Odd.to(DType::F32))), (std::vector<double>{0, 1, 1, 1}));
}

TEST(TensorTest, SameDTypeCopiesBits) {
  Tensor Source = get(Tensor::empty(DType::F16, {256, 256}));
  for (uint32_t I = 0; I != 65536; ++I)
    Source.dataAs<uint16_t>()[I] = uint16_t(I);
  Tensor Transposed = get(get(Source.transpose(0, 1)).to(DType::F16));
  Tensor Back = get(get(Transposed.transpose(0, 1)).to(DType::F16));
  EXPECT_EQ(std::memcmp(Back.data(), Source.data(), 131072), 0);
  // A signaling NaN survives as float, too.
  Tensor F = vec<uint32_t>(DType::F32, {0x7f800001, 0x80000000});
  Tensor Copy = get(F.to(DType::F32));
  EXPECT_EQ(Copy.dataAs<uint32_t>()[0], 0x7f800001u);
  EXPECT_EQ(Copy.dataAs<uint32_t>()[1], 0x80000000u);
}

TEST(TensorTest, TensorConversionMatchesScalarConversion) {
  // Every 16-bit pattern through a tensor, against the reference.
  for (const SmallFloat &F : {SmallFloats[0], SmallFloats[1]}) {
    Tensor Source = get(Tensor::empty(F.Type, {65536}));
    for (uint32_t I = 0; I != 65536; ++I)
      Source.dataAs<uint16_t>()[I] = uint16_t(I);
    Tensor Wide = get(Source.to(DType::F32));
    Tensor Back = get(Wide.to(F.Type));
    for (uint32_t I = 0; I != 65536; ++I) {
      double Want = F.value(I);
      float Got = Wide.dataAs<float>()[I];
      if (std::isnan(Want)) {
        ASSERT_TRUE(std::isnan(Got));
        continue;
      }
      ASSERT_EQ(floatBits(Got), floatBits(float(Want)));
      ASSERT_EQ(Back.dataAs<uint16_t>()[I], I);
    }
  }
}

TEST(TensorTest, CopyStrided) {
  Tensor Source = iota(DType::I32, {3, 4, 5});
  Tensor Destination = get(Tensor::empty(DType::F32, {5, 8, 6}, true));
  Tensor Window =
      get(get(get(Destination.slice(1, 7, -1, -2)).slice(2, 1, 6, 2))
              .permute({2, 1, 0}));
  ASSERT_EQ(Window.shape(), (Shape{3, 4, 5}));
  ASSERT_TRUE(Window.copyFrom(Source).isOk());
  EXPECT_EQ(values(Window), values(Source));
  // Nothing else was written: 59 of the 60 copied elements are not zero.
  std::vector<double> All = values(Destination);
  EXPECT_EQ(
      std::count_if(All.begin(), All.end(), [](double X) { return X != 0; }),
      59);

  // From a broadcast, into a scalar, and of nothing.
  Tensor Row = iota(DType::F32, {5});
  Tensor Broadcast = get(Tensor::view(Row.data(), DType::F32, {2, 5}, {0, 1}));
  EXPECT_EQ(values(get(Broadcast.to(DType::I64))),
            (std::vector<double>{0, 1, 2, 3, 4, 0, 1, 2, 3, 4}));
  Tensor Scalar = get(Tensor::empty(DType::F64, {}));
  ASSERT_TRUE(Scalar.copyFrom(get(get(Row.slice(0, 3, 4)).reshape({}))).isOk());
  EXPECT_EQ(*Scalar.dataAs<double>(), 3.0);
  Tensor None = get(Tensor::empty(DType::F32, {4, 0}));
  EXPECT_TRUE(None.copyFrom(None).isOk());
  EXPECT_EQ(get(None.to(DType::I8)).shape(), (Shape{4, 0}));
}

TEST(TensorTest, CopyOverlapping) {
  Tensor T = iota(DType::I32, {6});
  ASSERT_TRUE(get(T.slice(0, 1, 6)).copyFrom(get(T.slice(0, 0, 5))).isOk());
  EXPECT_EQ(values(T), (std::vector<double>{0, 0, 1, 2, 3, 4}));
  ASSERT_TRUE(T.copyFrom(get(T.slice(0, 5, -1, -1))).isOk());
  EXPECT_EQ(values(T), (std::vector<double>{4, 3, 2, 1, 0, 0}));
  ASSERT_TRUE(T.copyFrom(T).isOk());
  EXPECT_EQ(values(T), (std::vector<double>{4, 3, 2, 1, 0, 0}));
  // The same memory under another dtype.
  Tensor AsFloat = get(Tensor::view(T.data(), DType::F32, {6}));
  ASSERT_TRUE(AsFloat.copyFrom(T).isOk());
  EXPECT_EQ(values(AsFloat), (std::vector<double>{4, 3, 2, 1, 0, 0}));
  Tensor Square = iota(DType::I8, {2, 2});
  ASSERT_TRUE(Square.copyFrom(get(Square.transpose(0, 1))).isOk());
  EXPECT_EQ(values(Square), (std::vector<double>{0, 2, 1, 3}));
}

TEST(TensorTest, CopyErrors) {
  Tensor T = iota(DType::F32, {2, 3});
  EXPECT_STATUS(T.copyFrom(iota(DType::F32, {3, 2})), InvalidArgument,
                "shapes of a copy differ; expected [2, 3], got [3, 2]");
  EXPECT_STATUS(T.copyFrom(iota(DType::F32, {6})), InvalidArgument,
                "shapes of a copy differ; expected [2, 3], got [6]");
  Tensor Remote =
      get(Tensor::view(T.data(), DType::F32, {2, 3}, {}, Device::cuda(1)));
  Tensor Wide = iota(DType::F64, {2, 3});
  EXPECT_STATUS(
      Wide.copyFrom(Remote), Unsupported,
      "cannot copy tensor<2x3xf32, strides [3, 1], cuda:1> to "
      "tensor<2x3xf64, strides [3, 1], cpu>; expected one dtype where "
      "a device takes part, got two");
  EXPECT_STATUS(Remote.copyFrom(Wide), Unsupported,
                "cannot copy tensor<2x3xf64, strides [3, 1], cpu> to "
                "tensor<2x3xf32, strides [3, 1], cuda:1>; expected one dtype "
                "where a device takes part, got two");
  EXPECT_FAILS(Remote.to(DType::F64), Unsupported,
               "cannot convert tensor<2x3xf32, strides [3, 1], cuda:1>; "
               "expected a tensor on cpu, got cuda:1");
  Tensor Broadcast = get(Tensor::view(T.data(), DType::F32, {2, 3}, {0, 1}));
  EXPECT_STATUS(Broadcast.copyFrom(iota(DType::F32, {2, 3})), InvalidArgument,
                "cannot copy into tensor<2x3xf32, strides [0, 1], cpu>; "
                "expected no stride of 0 along several elements, got one in "
                "dimension 0");
}

//===----------------------------------------------------------------------===//
// DLPack
//===----------------------------------------------------------------------===//

/// A DLPack tensor of shape [2, 3] and dtype f32 that counts how often its
/// deleter runs.
struct Foreign {
  float Memory[8] = {0, 1, 2, 3, 4, 5, 6, 7};
  int64_t Extents[2] = {2, 3};
  int64_t Steps[2] = {1, 2};
  int Deleted = 0;
  DLManagedTensor Managed = {};

  Foreign() {
    DLTensor &T = Managed.dl_tensor;
    T.data = Memory;
    T.device = {kDLCPU, 0};
    T.ndim = 2;
    T.dtype = {kDLFloat, 32, 1};
    T.shape = Extents;
    T.strides = nullptr;
    T.byte_offset = 0;
    Managed.manager_ctx = this;
    Managed.deleter = [](DLManagedTensor *Self) {
      ++static_cast<Foreign *>(Self->manager_ctx)->Deleted;
    };
  }
};

TEST(DLPackTest, ExportSharesAndKeepsAlive) {
  std::weak_ptr<void> Watch;
  DLManagedTensor *Managed;
  void *Data;
  {
    Tensor T = iota(DType::F32, {2, 3});
    Tensor View = get(T.transpose(0, 1));
    Watch = T.storage();
    Data = T.data();
    Managed = View.toDLPack();
  }
  EXPECT_FALSE(Watch.expired());
  const DLTensor &D = Managed->dl_tensor;
  EXPECT_EQ(D.data, Data);
  EXPECT_EQ(D.device.device_type, kDLCPU);
  EXPECT_EQ(D.device.device_id, 0);
  ASSERT_EQ(D.ndim, 2);
  EXPECT_EQ(D.shape[0], 3);
  EXPECT_EQ(D.shape[1], 2);
  EXPECT_EQ(D.strides[0], 1);
  EXPECT_EQ(D.strides[1], 3);
  EXPECT_EQ(D.byte_offset, 0u);
  EXPECT_EQ(static_cast<float *>(D.data)[5], 5.0f);
  Managed->deleter(Managed);
  EXPECT_TRUE(Watch.expired());
}

TEST(DLPackTest, EveryDTypeRoundTrips) {
  uint8_t Codes[] = {2, 2, 2, 4, 10, 0, 0, 0, 0, 1, 6};
  for (size_t I = 0; I != std::size(AllDTypes); ++I) {
    DType Type = AllDTypes[I];
    for (const Shape &S : {Shape{2, 3}, Shape{}, Shape{4, 0}}) {
      Tensor T = get(Tensor::empty(Type, S, true));
      std::weak_ptr<void> Watch = T.storage();
      DLManagedTensor *Managed = T.toDLPack();
      EXPECT_EQ(Managed->dl_tensor.dtype.code, Codes[I]);
      EXPECT_EQ(Managed->dl_tensor.dtype.bits, 8 * dtypeSize(Type));
      EXPECT_EQ(Managed->dl_tensor.dtype.lanes, 1);
      {
        Tensor Back = get(Tensor::fromDLPack(Managed));
        EXPECT_EQ(Back.describe(), T.describe());
        EXPECT_EQ(Back.data(), T.data());
        T = Tensor();
        EXPECT_FALSE(Watch.expired());
      }
      EXPECT_TRUE(Watch.expired());
    }
  }
}

TEST(DLPackTest, ExportOfOtherDevices) {
  float Memory[4] = {};
  Tensor T =
      get(Tensor::view(Memory + 3, DType::F32, {4}, {-1}, Device::cuda(2)));
  DLManagedTensor *Managed = T.toDLPack();
  EXPECT_EQ(Managed->dl_tensor.device.device_type, kDLCUDA);
  EXPECT_EQ(Managed->dl_tensor.device.device_id, 2);
  Tensor Back = get(Tensor::fromDLPack(Managed));
  EXPECT_EQ(Back.describe(), "tensor<4xf32, strides [-1], cuda:2>");
}

TEST(DLPackTest, ImportDeletesOnceAfterTheLastView) {
  Foreign F;
  {
    Tensor Last;
    {
      Tensor T = get(Tensor::fromDLPack(&F.Managed));
      EXPECT_EQ(T.describe(), "tensor<2x3xf32, strides [3, 1], cpu>");
      EXPECT_EQ(values(T), (std::vector<double>{0, 1, 2, 3, 4, 5}));
      Tensor Copy = T;
      Last = get(get(Copy.slice(0, 1, 2)).transpose(0, 1));
    }
    EXPECT_EQ(F.Deleted, 0);
    EXPECT_EQ(values(Last), (std::vector<double>{3, 4, 5}));
    Tensor Dense = get(Last.to(DType::F32));
    Last = Tensor();
    EXPECT_EQ(F.Deleted, 1);
    EXPECT_EQ(values(Dense), (std::vector<double>{3, 4, 5}));
  }
  EXPECT_EQ(F.Deleted, 1);
}

TEST(DLPackTest, ImportThenExport) {
  Foreign F;
  DLManagedTensor *Again = get(Tensor::fromDLPack(&F.Managed)).toDLPack();
  EXPECT_EQ(F.Deleted, 0);
  EXPECT_EQ(Again->dl_tensor.data, F.Memory);
  Again->deleter(Again);
  EXPECT_EQ(F.Deleted, 1);
}

TEST(DLPackTest, ImportVariants) {
  {
    Foreign F;
    F.Managed.dl_tensor.strides = F.Steps;
    F.Managed.dl_tensor.byte_offset = 4;
    F.Managed.dl_tensor.device.device_id = 3; // The host is one device.
    Tensor T = get(Tensor::fromDLPack(&F.Managed));
    EXPECT_EQ(values(T), (std::vector<double>{1, 3, 5, 2, 4, 6}));
    EXPECT_EQ(T.device(), Device::cpu());
  }
  {
    Foreign F;
    F.Managed.deleter = nullptr;
    EXPECT_EQ(get(Tensor::fromDLPack(&F.Managed)).numElements(), 6);
    EXPECT_EQ(F.Deleted, 0);
  }
  {
    Foreign F;
    F.Managed.dl_tensor.ndim = 0;
    F.Managed.dl_tensor.shape = nullptr;
    EXPECT_EQ(get(Tensor::fromDLPack(&F.Managed)).describe(),
              "tensor<f32, strides [], cpu>");
    EXPECT_EQ(F.Deleted, 1);
  }
  {
    Foreign F;
    F.Extents[0] = 0;
    F.Managed.dl_tensor.data = nullptr;
    F.Managed.dl_tensor.byte_offset = 1;
    EXPECT_EQ(get(Tensor::fromDLPack(&F.Managed)).numElements(), 0);
    EXPECT_EQ(F.Deleted, 1);
  }
}

TEST(DLPackTest, ImportErrorsLeaveOwnership) {
  EXPECT_FAILS(Tensor::fromDLPack(nullptr), InvalidArgument,
               "no DLPack tensor; expected an address, got null");
  struct {
    void (*Break)(Foreign &);
    StatusCode Code;
    const char *Message;
  } Cases[] = {
      {[](Foreign &F) {
         F.Managed.dl_tensor.device.device_type = DLDeviceType(10);
       },
       StatusCode::Unsupported,
       "unsupported DLPack device type; expected 1 (cpu) or 2 (cuda), got 10"},
      {[](Foreign &F) { F.Managed.dl_tensor.device.device_id = -1; },
       StatusCode::InvalidArgument,
       "negative DLPack device number; expected at least 0, got -1"},
      {[](Foreign &F) { F.Managed.dl_tensor.dtype.lanes = 4; },
       StatusCode::Unsupported,
       "unsupported DLPack vector type; expected 1 lane, got 4"},
      {[](Foreign &F) { F.Managed.dl_tensor.dtype = {kDLUInt, 32, 1}; },
       StatusCode::Unsupported,
       "unsupported DLPack element type; expected the code and bits of a known "
       "dtype, got code 1 with 32 bits"},
      {[](Foreign &F) { F.Managed.dl_tensor.dtype = {5, 64, 1}; },
       StatusCode::Unsupported,
       "unsupported DLPack element type; expected the code and bits of a known "
       "dtype, got code 5 with 64 bits"},
      {[](Foreign &F) { F.Managed.dl_tensor.dtype = {kDLFloat, 8, 1}; },
       StatusCode::Unsupported,
       "unsupported DLPack element type; expected the code and bits of a known "
       "dtype, got code 2 with 8 bits"},
      {[](Foreign &F) { F.Managed.dl_tensor.ndim = -2; },
       StatusCode::InvalidArgument,
       "negative DLPack rank; expected at least 0, got -2"},
      {[](Foreign &F) { F.Managed.dl_tensor.shape = nullptr; },
       StatusCode::InvalidArgument,
       "no DLPack shape; expected 2 extents, got null"},
      {[](Foreign &F) { F.Managed.dl_tensor.byte_offset = ~uint64_t(0); },
       StatusCode::InvalidArgument,
       "DLPack byte offset leaves the address space; expected an address "
       "inside, got offset 18446744073709551615"},
      {[](Foreign &F) { F.Managed.dl_tensor.byte_offset = 2; },
       StatusCode::InvalidArgument,
       "DLPack tensor: data of dtype f32 is misaligned; expected a multiple of "
       "4 bytes, got remainder 2"},
      {[](Foreign &F) {
         F.Managed.dl_tensor.data = nullptr;
         F.Managed.dl_tensor.byte_offset = 8;
       },
       StatusCode::InvalidArgument,
       "DLPack tensor: no data for shape [2, 3]; expected an address, got "
       "null"},
      {[](Foreign &F) { F.Extents[1] = -3; }, StatusCode::InvalidArgument,
       "DLPack tensor: negative extent in shape [2, -3]; expected at least 0, "
       "got -3"},
      {[](Foreign &F) {
         F.Steps[0] = Max64;
         F.Managed.dl_tensor.strides = F.Steps;
       },
       StatusCode::InvalidArgument,
       "DLPack tensor: shape [2, 3] with strides [9223372036854775807, 2] "
       "leaves the address space; expected every element inside, got an "
       "overflow"},
  };
  for (const auto &Case : Cases) {
    Foreign F;
    Case.Break(F);
    Expected<Tensor> Result = Tensor::fromDLPack(&F.Managed);
    EXPECT_FALSE(static_cast<bool>(Result)) << Case.Message;
    EXPECT_EQ(Result.status().code(), Case.Code) << Case.Message;
    EXPECT_EQ(Result.status().message(), Case.Message);
    EXPECT_EQ(F.Deleted, 0) << Case.Message;
  }
}

} // namespace
