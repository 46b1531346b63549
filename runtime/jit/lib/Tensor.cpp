//===- Tensor.cpp - Strided tensors, dtypes and devices -------------------===//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//===----------------------------------------------------------------------===//

#include "corey/Tensor.h"

#include "corey/DLPack.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>

using namespace corey;

//===----------------------------------------------------------------------===//
// Element types
//===----------------------------------------------------------------------===//

namespace {

/// A floating-point format narrower than float. A format without infinities
/// uses their exponent for finite values and only the all-ones pattern as NaN.
struct SmallFormat {
  int ExpBits;
  int ManBits;
  bool HasInf;

  constexpr int bias() const { return (1 << (ExpBits - 1)) - 1; }
  constexpr uint32_t expMask() const {
    return ((1u << ExpBits) - 1) << ManBits;
  }
  constexpr uint32_t manMask() const { return (1u << ManBits) - 1; }
  constexpr uint32_t signMask() const { return 1u << (ExpBits + ManBits); }
};

constexpr SmallFormat F16Format{5, 10, true};
constexpr SmallFormat BF16Format{8, 7, true};
constexpr SmallFormat F8E4M3FNFormat{4, 3, false};

template <class To, class From> To bitCast(const From &Value) {
  static_assert(sizeof(To) == sizeof(From));
  To Result;
  std::memcpy(&Result, &Value, sizeof(To));
  return Result;
}

/// Rounds Value to the format F. The input is a double for all sources, since
/// going through float first would round twice.
uint32_t encode(SmallFormat F, double Value) {
  uint64_t Bits = bitCast<uint64_t>(Value);
  uint64_t Abs = Bits & ~(uint64_t(1) << 63);
  uint32_t Sign = (Bits >> 63) ? F.signMask() : 0;
  constexpr uint64_t Inf = uint64_t(0x7ff) << 52;
  constexpr uint64_t ManMask = (uint64_t(1) << 52) - 1;

  if (Abs > Inf) {
    if (!F.HasInf)
      return Sign | F.expMask() | F.manMask();
    // Setting the quiet bit also keeps a payload whose leading bits are zero
    // from turning into an infinity.
    uint32_t Payload =
        static_cast<uint32_t>((Abs & ManMask) >> (52 - F.ManBits));
    return Sign | F.expMask() | (1u << (F.ManBits - 1)) | Payload;
  }
  const uint32_t Overflow = Sign | F.expMask() | (F.HasInf ? 0 : F.manMask());
  if (Abs == Inf)
    return Overflow;

  int Exp = static_cast<int>(Abs >> 52) - 1023;
  uint64_t Man = Abs & ManMask;
  if (Exp != -1023)
    Man |= uint64_t(1) << 52;

  // Below the least normal exponent the unit in the last place stops shrinking,
  // so more bits fall off.
  const int MinExp = 1 - F.bias();
  int Shift = 52 - F.ManBits;
  if (Exp < MinExp)
    Shift += MinExp - Exp;
  // Man is below 2^53: with half a unit at 2^54 or more it rounds to zero.
  if (Shift >= 55)
    return Sign;

  uint64_t Rounded = Man >> Shift;
  uint64_t Rest = Man & ((uint64_t(1) << Shift) - 1);
  uint64_t Half = uint64_t(1) << (Shift - 1);
  if (Rest > Half || (Rest == Half && (Rounded & 1)))
    ++Rounded;

  // The leading one of a normal number, and a carry out of the mantissa, both
  // add one to the exponent field, as they should.
  uint64_t Result = Rounded;
  if (Exp >= MinExp)
    Result += static_cast<uint64_t>(Exp - MinExp) << F.ManBits;
  uint64_t Limit = F.HasInf ? F.expMask() : (F.expMask() | F.manMask());
  return Result >= Limit ? Overflow : (Sign | static_cast<uint32_t>(Result));
}

/// Returns the value of the pattern Bits of the format F, which float
/// represents exactly.
float decode(SmallFormat F, uint32_t Bits) {
  uint32_t Sign = (Bits & F.signMask()) ? 0x80000000u : 0;
  uint32_t Exp = (Bits & F.expMask()) >> F.ManBits;
  uint32_t Man = Bits & F.manMask();
  uint32_t AllOnes = F.expMask() >> F.ManBits;

  bool IsSpecial = Exp == AllOnes && (F.HasInf || Man == F.manMask());
  if (IsSpecial)
    return bitCast<float>(Sign | 0x7f800000u | (Man << (23 - F.ManBits)));
  if (Exp != 0)
    return bitCast<float>(
        Sign | ((Exp + 127 - static_cast<uint32_t>(F.bias())) << 23) |
        (Man << (23 - F.ManBits)));
  // A denormal is its mantissa in units of the least denormal, and the product
  // is a normal float for f16 and f8.
  float Unit = bitCast<float>(
      static_cast<uint32_t>(127 + 1 - F.bias() - F.ManBits) << 23);
  float Magnitude = static_cast<float>(Man) * Unit;
  return bitCast<float>(Sign | bitCast<uint32_t>(Magnitude));
}

/// Converts Value to double such that a second rounding to a format of at most
/// 51 bits gives what rounding Value once would: bits that do not fit are
/// collected into the lowest kept one.
double roundToOdd(int64_t Value) {
  uint64_t Magnitude = Value < 0 ? 0 - static_cast<uint64_t>(Value)
                                 : static_cast<uint64_t>(Value);
  int Excess = 0;
  while ((Magnitude >> Excess) >= (uint64_t(1) << 53))
    ++Excess;
  uint64_t Lost = Magnitude & ((uint64_t(1) << Excess) - 1);
  Magnitude -= Lost;
  if (Lost)
    Magnitude |= uint64_t(1) << Excess;
  double Result = static_cast<double>(Magnitude);
  return Value < 0 ? -Result : Result;
}

/// Truncates Value toward zero and limits it to the range of Int; NaN gives 0.
template <class Int> Int saturate(double Value) {
  if (std::isnan(Value))
    return 0;
  // The upper limit of int64_t is not a double; its successor is, so the
  // comparison must be with that.
  constexpr double Low = static_cast<double>(std::numeric_limits<Int>::min());
  constexpr double High =
      static_cast<double>(std::numeric_limits<Int>::max() / 2 + 1) * 2.0;
  if (Value <= Low)
    return std::numeric_limits<Int>::min();
  if (Value >= High)
    return std::numeric_limits<Int>::max();
  return static_cast<Int>(Value);
}

template <class Int> Int saturate(int64_t Value) {
  if (Value < static_cast<int64_t>(std::numeric_limits<Int>::min()))
    return std::numeric_limits<Int>::min();
  if (Value > static_cast<int64_t>(std::numeric_limits<Int>::max()))
    return std::numeric_limits<Int>::max();
  return static_cast<Int>(Value);
}

float narrowToFloat(double Value) {
  // Converting an out-of-range double is undefined in C++ but an infinity in
  // IEEE arithmetic, which is_iec559 promises.
  static_assert(std::numeric_limits<float>::is_iec559);
  constexpr double FirstInf = 0x1.ffffffp127;
  if (Value >= FirstInf)
    return std::numeric_limits<float>::infinity();
  if (Value <= -FirstInf)
    return -std::numeric_limits<float>::infinity();
  return static_cast<float>(Value);
}

/// How the elements of one dtype are read and written. `Wide` is the type that
/// holds every value of the dtype: double for floats and int64_t for the rest.
template <DType Type> struct Codec;

template <> struct Codec<DType::F64> {
  using Storage = double;
  using Wide = double;
  static Wide load(Storage Value) { return Value; }
  static Storage store(double Value) { return Value; }
  static Storage store(int64_t Value) { return static_cast<double>(Value); }
};

template <> struct Codec<DType::F32> {
  using Storage = float;
  using Wide = double;
  static Wide load(Storage Value) { return static_cast<double>(Value); }
  static Storage store(double Value) { return narrowToFloat(Value); }
  static Storage store(int64_t Value) { return static_cast<float>(Value); }
};

template <> struct Codec<DType::F16> {
  using Storage = uint16_t;
  using Wide = double;
  static Wide load(Storage Value) {
    return static_cast<double>(f16ToFloat(Value));
  }
  static Storage store(double Value) { return doubleToF16(Value); }
  static Storage store(int64_t Value) { return store(roundToOdd(Value)); }
};

template <> struct Codec<DType::BF16> {
  using Storage = uint16_t;
  using Wide = double;
  static Wide load(Storage Value) {
    return static_cast<double>(bf16ToFloat(Value));
  }
  static Storage store(double Value) { return doubleToBF16(Value); }
  static Storage store(int64_t Value) { return store(roundToOdd(Value)); }
};

template <> struct Codec<DType::F8E4M3FN> {
  using Storage = uint8_t;
  using Wide = double;
  static Wide load(Storage Value) {
    return static_cast<double>(f8E4M3FNToFloat(Value));
  }
  static Storage store(double Value) { return doubleToF8E4M3FN(Value); }
  static Storage store(int64_t Value) { return store(roundToOdd(Value)); }
};

template <class Int> struct IntCodec {
  using Storage = Int;
  using Wide = int64_t;
  static Wide load(Storage Value) { return static_cast<Wide>(Value); }
  static Storage store(double Value) { return saturate<Int>(Value); }
  static Storage store(int64_t Value) { return saturate<Int>(Value); }
};

template <> struct Codec<DType::I64> : IntCodec<int64_t> {};
template <> struct Codec<DType::I32> : IntCodec<int32_t> {};
template <> struct Codec<DType::I16> : IntCodec<int16_t> {};
template <> struct Codec<DType::I8> : IntCodec<int8_t> {};
template <> struct Codec<DType::U8> : IntCodec<uint8_t> {};

template <> struct Codec<DType::Bool> {
  // Not bool: memory from elsewhere may hold bytes other than 0 and 1.
  using Storage = uint8_t;
  using Wide = int64_t;
  static Wide load(Storage Value) { return Value != 0; }
  static Storage store(double Value) { return Value != 0.0; }
  static Storage store(int64_t Value) { return Value != 0; }
};

/// Calls Fn with the codec of Type.
template <class Fn> decltype(auto) withCodec(DType Type, Fn &&Call) {
  switch (Type) {
  case DType::F64:
    return Call(Codec<DType::F64>());
  case DType::F32:
    return Call(Codec<DType::F32>());
  case DType::F16:
    return Call(Codec<DType::F16>());
  case DType::BF16:
    return Call(Codec<DType::BF16>());
  case DType::F8E4M3FN:
    return Call(Codec<DType::F8E4M3FN>());
  case DType::I64:
    return Call(Codec<DType::I64>());
  case DType::I32:
    return Call(Codec<DType::I32>());
  case DType::I16:
    return Call(Codec<DType::I16>());
  case DType::I8:
    return Call(Codec<DType::I8>());
  case DType::U8:
    return Call(Codec<DType::U8>());
  case DType::Bool:
    return Call(Codec<DType::Bool>());
  }
  // A DType outside the enumeration is a defect of the caller.
  std::abort();
}

struct DTypeInfo {
  DType Type;
  const char *Name;
  size_t Size;
  // The DLPack type code.
  uint8_t Code;
};

// Codes are spelled as numbers because old versions of dlpack.h lack some of
// the names.
constexpr DTypeInfo DTypes[] = {
    {DType::F64, "f64", 8, 2},
    {DType::F32, "f32", 4, 2},
    {DType::F16, "f16", 2, 2},
    {DType::BF16, "bf16", 2, 4},
    {DType::F8E4M3FN, "f8E4M3FN", 1, 10},
    {DType::I64, "i64", 8, 0},
    {DType::I32, "i32", 4, 0},
    {DType::I16, "i16", 2, 0},
    {DType::I8, "i8", 1, 0},
    {DType::U8, "u8", 1, 1},
    {DType::Bool, "bool", 1, 6},
};

const DTypeInfo &dtypeInfo(DType Type) {
  const DTypeInfo &Info = DTypes[static_cast<size_t>(Type)];
  assert(Info.Type == Type && "the table is in the order of the enumeration");
  return Info;
}

} // namespace

size_t corey::dtypeSize(DType Type) { return dtypeInfo(Type).Size; }

const char *corey::dtypeName(DType Type) { return dtypeInfo(Type).Name; }

Expected<DType> corey::dtypeFromName(std::string_view Name) {
  std::string Known;
  for (const DTypeInfo &Info : DTypes) {
    if (Name == Info.Name)
      return Info.Type;
    Known += Known.empty() ? "" : ", ";
    Known += Info.Name;
  }
  return Status::invalidArgument("unknown dtype; expected one of " + Known +
                                 ", got '" + std::string(Name) + "'");
}

bool corey::isFloat(DType Type) {
  return withCodec(Type, [](auto C) {
    return std::is_same_v<typename decltype(C)::Wide, double>;
  });
}

float corey::f16ToFloat(uint16_t Bits) { return decode(F16Format, Bits); }

uint16_t corey::floatToF16(float Value) {
  return doubleToF16(static_cast<double>(Value));
}

uint16_t corey::doubleToF16(double Value) {
  return static_cast<uint16_t>(encode(F16Format, Value));
}

float corey::bf16ToFloat(uint16_t Bits) {
  // bfloat16 is the upper half of a float.
  return bitCast<float>(static_cast<uint32_t>(Bits) << 16);
}

uint16_t corey::floatToBF16(float Value) {
  return doubleToBF16(static_cast<double>(Value));
}

uint16_t corey::doubleToBF16(double Value) {
  return static_cast<uint16_t>(encode(BF16Format, Value));
}

float corey::f8E4M3FNToFloat(uint8_t Bits) {
  return decode(F8E4M3FNFormat, Bits);
}

uint8_t corey::floatToF8E4M3FN(float Value) {
  return doubleToF8E4M3FN(static_cast<double>(Value));
}

uint8_t corey::doubleToF8E4M3FN(double Value) {
  return static_cast<uint8_t>(encode(F8E4M3FNFormat, Value));
}

double corey::loadScalar(DType Type, const void *Ptr) {
  return withCodec(Type, [&](auto C) {
    using CodecT = decltype(C);
    typename CodecT::Storage Value;
    std::memcpy(&Value, Ptr, sizeof(Value));
    return static_cast<double>(CodecT::load(Value));
  });
}

void corey::storeScalar(DType Type, void *Ptr, double Value) {
  withCodec(Type, [&](auto C) {
    typename decltype(C)::Storage Stored = decltype(C)::store(Value);
    std::memcpy(Ptr, &Stored, sizeof(Stored));
  });
}

//===----------------------------------------------------------------------===//
// Devices
//===----------------------------------------------------------------------===//

Expected<Device> Device::parse(std::string_view Text) {
  if (Text == "cpu")
    return Device::cpu();
  if (Text == "cuda")
    return Device::cuda();
  constexpr std::string_view Prefix = "cuda:";
  if (Text.substr(0, Prefix.size()) == Prefix) {
    std::string_view Digits = Text.substr(Prefix.size());
    int Index = 0;
    bool IsValid = !Digits.empty();
    for (char C : Digits)
      IsValid = IsValid && C >= '0' && C <= '9' &&
                !__builtin_mul_overflow(Index, 10, &Index) &&
                !__builtin_add_overflow(Index, C - '0', &Index);
    if (IsValid)
      return Device::cuda(Index);
  }
  return Status::invalidArgument(
      "unknown device; expected 'cpu', 'cuda' or 'cuda:<number>', got '" +
      std::string(Text) + "'");
}

std::string Device::name() const {
  return kind == CPU ? "cpu" : "cuda:" + std::to_string(index);
}

//===----------------------------------------------------------------------===//
// Shapes
//===----------------------------------------------------------------------===//

namespace {

std::string listToString(const std::vector<int64_t> &List) {
  std::string Text = "[";
  for (size_t I = 0; I != List.size(); ++I)
    Text += (I ? ", " : "") + std::to_string(List[I]);
  return Text + "]";
}

/// Returns the number of bytes of a dense tensor. Fails as `countElements`
/// does, and if the product of the non-zero extents and the element size
/// overflows.
Expected<int64_t> countBytes(DType Type, const std::vector<int64_t> &Shape) {
  Expected<int64_t> Count = countElements(Shape);
  if (!Count)
    return Count.takeStatus();
  int64_t Bytes = static_cast<int64_t>(dtypeSize(Type));
  for (int64_t Extent : Shape)
    if (Extent != 0 && __builtin_mul_overflow(Bytes, Extent, &Bytes))
      return Status::invalidArgument(
          "size of shape " + listToString(Shape) + " and dtype " +
          dtypeName(Type) +
          " overflows; expected at most 9223372036854775807 bytes, got more");
  return *Count * static_cast<int64_t>(dtypeSize(Type));
}

/// The offsets, in bytes from the element at all-zero indices, of the lowest
/// byte and of the byte past the highest one.
struct Span {
  int64_t Low = 0;
  int64_t High = 0;
};

/// Computes the span of a tensor as if zero extents were one. Returns whether
/// it fits int64_t.
bool computeSpan(DType Type, const std::vector<int64_t> &Shape,
                 const std::vector<int64_t> &Strides, Span &Result) {
  int64_t Size = static_cast<int64_t>(dtypeSize(Type));
  Result.Low = 0;
  Result.High = Size;
  for (size_t I = 0; I != Shape.size(); ++I) {
    if (Shape[I] <= 1)
      continue;
    int64_t Reach;
    if (__builtin_mul_overflow(Shape[I] - 1, Strides[I], &Reach) ||
        __builtin_mul_overflow(Reach, Size, &Reach))
      return false;
    int64_t &End = Reach < 0 ? Result.Low : Result.High;
    if (__builtin_add_overflow(End, Reach, &End))
      return false;
  }
  int64_t Length;
  return !__builtin_sub_overflow(Result.High, Result.Low, &Length);
}

/// Resolves a possibly negative dimension number of a tensor with Rank
/// dimensions.
Expected<int> resolveDim(int Dim, int Rank) {
  if (Dim < -Rank || Dim >= Rank)
    return Status::invalidArgument("dimension out of range; expected " +
                                   (Rank == 0
                                        ? std::string("none for a scalar")
                                        : "[" + std::to_string(-Rank) + ", " +
                                              std::to_string(Rank - 1) + "]") +
                                   ", got " + std::to_string(Dim));
  return Dim < 0 ? Dim + Rank : Dim;
}

} // namespace

Expected<int64_t> corey::countElements(const std::vector<int64_t> &Shape) {
  int64_t Product = 1;
  bool HasZero = false;
  for (int64_t Extent : Shape) {
    if (Extent < 0)
      return Status::invalidArgument(
          "negative extent in shape " + listToString(Shape) +
          "; expected at least 0, got " + std::to_string(Extent));
    if (Extent == 0)
      HasZero = true;
    else if (__builtin_mul_overflow(Product, Extent, &Product))
      return Status::invalidArgument(
          "number of elements of shape " + listToString(Shape) +
          " overflows; expected at most 9223372036854775807, got more");
  }
  return HasZero ? 0 : Product;
}

std::vector<int64_t> corey::squeezeShape(const std::vector<int64_t> &Shape) {
  std::vector<int64_t> Kept;
  for (int64_t Size : Shape)
    if (Size != 1)
      Kept.push_back(Size);
  return Kept;
}

std::vector<int64_t>
corey::contiguousStrides(const std::vector<int64_t> &Shape) {
  std::vector<int64_t> Strides(Shape.size());
  int64_t Stride = 1;
  for (size_t I = Shape.size(); I-- != 0;) {
    Strides[I] = Stride;
    Stride *= std::max<int64_t>(Shape[I], 1);
  }
  return Strides;
}

//===----------------------------------------------------------------------===//
// Tensors
//===----------------------------------------------------------------------===//

Expected<Tensor> Tensor::empty(DType Type, std::vector<int64_t> Shape,
                               bool ZeroInit) {
  constexpr size_t Alignment = 64;
  Expected<int64_t> Bytes = countBytes(Type, Shape);
  if (!Bytes)
    return Bytes.takeStatus();
  // Whole vectors of the last partial one may be read, and tensors without
  // elements have a valid address too.
  size_t Size = std::max(static_cast<size_t>(*Bytes), size_t(1));
  Size = (Size + Alignment - 1) / Alignment * Alignment;
  void *Memory = nullptr;
  if (posix_memalign(&Memory, Alignment, Size) != 0)
    return Status::outOfMemory("cannot allocate shape " + listToString(Shape) +
                               " and dtype " + dtypeName(Type) + "; expected " +
                               std::to_string(*Bytes) + " bytes, got none");
  if (ZeroInit)
    std::memset(Memory, 0, Size);

  Tensor Result;
  Result.Storage = std::shared_ptr<void>(Memory, std::free);
  Result.Data = Memory;
  Result.Type = Type;
  Result.Strides = contiguousStrides(Shape);
  Result.Shape = std::move(Shape);
  return Result;
}

/// Checks the conditions of a tensor at an address, \p Bytes of which are its
/// elements'.
static Status checkPlace(void *Ptr, DType Type,
                         const std::vector<int64_t> &Shape,
                         const std::vector<int64_t> &Strides, int64_t Bytes) {
  if (!Ptr && Bytes != 0)
    return Status::invalidArgument("no data for shape " + listToString(Shape) +
                                   "; expected an address, got null");

  uintptr_t Address = reinterpret_cast<uintptr_t>(Ptr);
  if (Address % dtypeSize(Type) != 0)
    return Status::invalidArgument(
        "data of dtype " + std::string(dtypeName(Type)) +
        " is misaligned; expected a multiple of " +
        std::to_string(dtypeSize(Type)) + " bytes, got remainder " +
        std::to_string(Address % dtypeSize(Type)));

  Span Reach;
  bool Fits = computeSpan(Type, Shape, Strides, Reach);
  if (Fits && Bytes != 0) {
    uintptr_t Unused;
    Fits = Address >= 0 - static_cast<uintptr_t>(Reach.Low) &&
           !__builtin_add_overflow(Address, static_cast<uintptr_t>(Reach.High),
                                   &Unused);
  }
  if (!Fits)
    return Status::invalidArgument(
        "shape " + listToString(Shape) + " with strides " +
        listToString(Strides) +
        " leaves the address space; expected every element inside, got an "
        "overflow");
  return Status::ok();
}

Expected<Tensor> Tensor::view(void *Ptr, DType Type, std::vector<int64_t> Shape,
                              std::vector<int64_t> Strides, Device Dev,
                              std::shared_ptr<void> Owner) {
  Expected<int64_t> Bytes = countBytes(Type, Shape);
  if (!Bytes)
    return Bytes.takeStatus();
  if (Strides.empty())
    Strides = contiguousStrides(Shape);
  if (Strides.size() != Shape.size())
    return Status::invalidArgument("wrong number of strides for shape " +
                                   listToString(Shape) + "; expected " +
                                   std::to_string(Shape.size()) + ", got " +
                                   std::to_string(Strides.size()));
  if (Status Place = checkPlace(Ptr, Type, Shape, Strides, *Bytes); !Place)
    return Place;

  Tensor Result;
  Result.Storage = std::move(Owner);
  Result.Data = Ptr;
  Result.Type = Type;
  Result.Dev = Dev;
  Result.Shape = std::move(Shape);
  Result.Strides = std::move(Strides);
  return Result;
}

Status Tensor::rebind(void *Ptr) {
  Status Place = checkPlace(Ptr, Type, Shape, Strides, numBytes());
  if (!Place)
    return Place;
  Data = Ptr;
  Storage = nullptr;
  return Place;
}

int64_t Tensor::dim(int Dim) const {
  assert(Dim >= -rank() && Dim < rank() && "dimension out of range");
  return Shape[static_cast<size_t>(Dim < 0 ? Dim + rank() : Dim)];
}

int64_t Tensor::stride(int Dim) const {
  assert(Dim >= -rank() && Dim < rank() && "dimension out of range");
  return Strides[static_cast<size_t>(Dim < 0 ? Dim + rank() : Dim)];
}

int64_t Tensor::numElements() const {
  // A zero ends the product early so that partial products beyond what the
  // maker checked never arise.
  if (std::find(Shape.begin(), Shape.end(), 0) != Shape.end())
    return 0;
  int64_t Product = 1;
  for (int64_t Extent : Shape)
    Product *= Extent;
  return Product;
}

int64_t Tensor::numBytes() const {
  return numElements() * static_cast<int64_t>(dtypeSize(Type));
}

bool Tensor::isContiguous() const {
  if (numElements() == 0)
    return true;
  int64_t Stride = 1;
  for (size_t I = Shape.size(); I-- != 0;) {
    if (Shape[I] == 1)
      continue;
    if (Strides[I] != Stride)
      return false;
    Stride *= Shape[I];
  }
  return true;
}

Expected<Tensor> Tensor::slice(int Dim, int64_t Start, int64_t Stop,
                               int64_t Step) const {
  Expected<int> Resolved = resolveDim(Dim, rank());
  if (!Resolved)
    return Resolved.takeStatus();
  size_t D = static_cast<size_t>(*Resolved);
  int64_t Extent = Shape[D];
  if (Step == 0)
    return Status::invalidArgument(
        "zero slice step; expected a positive or negative step, got 0");
  int64_t Low = Step > 0 ? 0 : -1;
  int64_t High = Step > 0 ? Extent : Extent - 1;
  for (auto [What, Bound] : {std::pair("start", Start), {"stop", Stop}})
    if (Bound < Low || Bound > High)
      return Status::invalidArgument(
          "slice " + std::string(What) + " out of range in dimension " +
          std::to_string(D) + " of extent " + std::to_string(Extent) +
          "; expected [" + std::to_string(Low) + ", " + std::to_string(High) +
          "], got " + std::to_string(Bound));

  // Both distances are within the extent, so only the magnitude of the least
  // step needs care.
  uint64_t Distance = 0;
  if (Step > 0 && Stop > Start)
    Distance = static_cast<uint64_t>(Stop - Start);
  else if (Step < 0 && Stop < Start)
    Distance = static_cast<uint64_t>(Start - Stop);
  uint64_t Stride =
      Step > 0 ? static_cast<uint64_t>(Step) : 0 - static_cast<uint64_t>(Step);
  uint64_t Count = Distance == 0 ? 0 : (Distance - 1) / Stride + 1;

  Tensor Result = *this;
  Result.Shape[D] = static_cast<int64_t>(Count);
  // With at most one element the stride means nothing, and its product with a
  // large step may not be representable.
  if (Count > 1)
    Result.Strides[D] *= Step;
  // An empty result keeps the address, as the start may be past the end.
  if (Result.numElements() != 0)
    Result.Data = static_cast<char *>(Data) +
                  Start * Strides[D] * static_cast<int64_t>(dtypeSize(Type));
  return Result;
}

Expected<Tensor> Tensor::reshape(std::vector<int64_t> NewShape) const {
  const std::string Requested = listToString(NewShape);
  auto Inferred = std::find(NewShape.begin(), NewShape.end(), -1);
  if (Inferred != NewShape.end()) {
    if (std::find(Inferred + 1, NewShape.end(), -1) != NewShape.end())
      return Status::invalidArgument("ambiguous shape " + Requested +
                                     "; expected at most one extent of -1, "
                                     "got several");
    for (int64_t Extent : NewShape)
      if (Extent < -1)
        return Status::invalidArgument("negative extent in shape " + Requested +
                                       "; expected at least 0, got " +
                                       std::to_string(Extent));
    *Inferred = 1;
    Expected<int64_t> Rest = countElements(NewShape);
    if (!Rest)
      return Rest.takeStatus();
    if (*Rest == 0 || numElements() % *Rest != 0)
      return Status::invalidArgument("cannot compute the extent -1 of shape " +
                                     Requested + "; expected a divisor of " +
                                     std::to_string(numElements()) +
                                     " elements, got " + std::to_string(*Rest));
    *Inferred = numElements() / *Rest;
  }
  // Checked in bytes so that zero extents next to huge ones keep the condition
  // of the class.
  Expected<int64_t> Bytes = countBytes(Type, NewShape);
  if (!Bytes)
    return Bytes.takeStatus();
  if (*Bytes != numBytes())
    return Status::invalidArgument(
        "cannot reshape " + describe() + " to " + Requested + "; expected " +
        std::to_string(numElements()) + " elements, got " +
        std::to_string(*Bytes / static_cast<int64_t>(dtypeSize(Type))));

  Tensor Result = *this;
  Result.Strides = contiguousStrides(NewShape);
  Result.Shape = std::move(NewShape);
  if (isContiguous())
    return Result;

  // Merge this tensor's dimensions into runs of elements at a fixed distance,
  // innermost last. Every new dimension must divide such a run.
  struct Run {
    int64_t Extent;
    int64_t Stride;
  };
  std::vector<Run> Runs;
  for (size_t I = 0; I != Shape.size(); ++I) {
    if (Shape[I] == 1)
      continue;
    int64_t Outer;
    if (!Runs.empty() &&
        !__builtin_mul_overflow(Shape[I], Strides[I], &Outer) &&
        Outer == Runs.back().Stride)
      Runs.back() = {Runs.back().Extent * Shape[I], Strides[I]};
    else
      Runs.push_back({Shape[I], Strides[I]});
  }
  for (size_t I = Result.Shape.size(); I-- != 0;) {
    int64_t Extent = Result.Shape[I];
    // The stride of a single element means nothing; any will do.
    if (Extent == 1)
      continue;
    Run &Inner = Runs.back();
    if (Inner.Extent % Extent != 0)
      return Status::invalidArgument(
          "cannot reshape " + describe() + " to " + Requested +
          " without a copy; expected strides that allow it, got " +
          listToString(Strides));
    Result.Strides[I] = Inner.Stride;
    Inner.Extent /= Extent;
    if (Inner.Extent == 1)
      Runs.pop_back();
    else
      Inner.Stride *= Extent;
  }
  return Result;
}

Expected<Tensor> Tensor::transpose(int A, int B) const {
  Expected<int> First = resolveDim(A, rank());
  if (!First)
    return First.takeStatus();
  Expected<int> Second = resolveDim(B, rank());
  if (!Second)
    return Second.takeStatus();
  Tensor Result = *this;
  std::swap(Result.Shape[static_cast<size_t>(*First)],
            Result.Shape[static_cast<size_t>(*Second)]);
  std::swap(Result.Strides[static_cast<size_t>(*First)],
            Result.Strides[static_cast<size_t>(*Second)]);
  return Result;
}

Expected<Tensor> Tensor::permute(const std::vector<int> &Order) const {
  if (Order.size() != Shape.size())
    return Status::invalidArgument(
        "wrong number of dimensions to permute; expected " +
        std::to_string(Shape.size()) + ", got " + std::to_string(Order.size()));
  Tensor Result = *this;
  std::vector<bool> Seen(Shape.size());
  for (size_t I = 0; I != Order.size(); ++I) {
    Expected<int> Dim = resolveDim(Order[I], rank());
    if (!Dim)
      return Dim.takeStatus();
    size_t D = static_cast<size_t>(*Dim);
    if (Seen[D])
      return Status::invalidArgument(
          "repeated dimension in permutation; expected each once, got " +
          std::to_string(Order[I]) + " again");
    Seen[D] = true;
    Result.Shape[I] = Shape[D];
    Result.Strides[I] = Strides[D];
  }
  return Result;
}

Expected<Tensor> Tensor::unsqueeze(int Dim) const {
  Expected<int> Resolved = resolveDim(Dim, rank() + 1);
  if (!Resolved)
    return Resolved.takeStatus();
  size_t D = static_cast<size_t>(*Resolved);
  // The stride a contiguous tensor would have reads best, though it means
  // nothing.
  int64_t Stride = 1;
  if (D != Shape.size() &&
      __builtin_mul_overflow(std::max<int64_t>(Shape[D], 1), Strides[D],
                             &Stride))
    Stride = 1;
  Tensor Result = *this;
  Result.Shape.insert(Result.Shape.begin() + *Resolved, 1);
  Result.Strides.insert(Result.Strides.begin() + *Resolved, Stride);
  return Result;
}

std::string Tensor::describe() const {
  std::string Text = "tensor<";
  for (int64_t Extent : Shape)
    Text += std::to_string(Extent) + "x";
  return Text + dtypeName(Type) + ", strides " + listToString(Strides) + ", " +
         Dev.name() + ">";
}

std::pair<uintptr_t, uintptr_t> Tensor::byteRange() const {
  uintptr_t Address = reinterpret_cast<uintptr_t>(Data);
  Span Reach;
  if (numElements() == 0 || !computeSpan(Type, Shape, Strides, Reach))
    return {Address, Address};
  // Unsigned arithmetic wraps, so adding a negative offset subtracts.
  return {Address + static_cast<uintptr_t>(Reach.Low),
          Address + static_cast<uintptr_t>(Reach.High)};
}

bool Tensor::overlaps(const Tensor &Other) const {
  if (Dev != Other.Dev)
    return false;
  auto [BeginA, EndA] = byteRange();
  auto [BeginB, EndB] = Other.byteRange();
  return BeginA != EndA && BeginB != EndB && BeginA < EndB && BeginB < EndA;
}

//===----------------------------------------------------------------------===//
// Copies
//===----------------------------------------------------------------------===//

namespace {

/// One loop of a copy, with strides in bytes.
struct Loop {
  int64_t Extent;
  int64_t DstStride;
  int64_t SrcStride;
};

/// Copies N elements without conversion.
using RawRow = void (*)(char *Dst, int64_t DstStride, const char *Src,
                        int64_t SrcStride, int64_t N);

template <size_t Size>
void copyRaw(char *Dst, int64_t DstStride, const char *Src, int64_t SrcStride,
             int64_t N) {
  if (DstStride == static_cast<int64_t>(Size) && SrcStride == DstStride) {
    std::memcpy(Dst, Src, static_cast<size_t>(N) * Size);
    return;
  }
  for (int64_t I = 0; I != N; ++I)
    std::memcpy(Dst + I * DstStride, Src + I * SrcStride, Size);
}

RawRow rawRow(size_t Size) {
  switch (Size) {
  case 8:
    return copyRaw<8>;
  case 4:
    return copyRaw<4>;
  case 2:
    return copyRaw<2>;
  default:
    return copyRaw<1>;
  }
}

// Conversions go through a block of wide values, which needs one loader and
// two storers per dtype instead of one loop per pair of dtypes. A block stays
// in the first-level cache.
constexpr int64_t BlockSize = 256;
union Block {
  double Floats[BlockSize];
  int64_t Ints[BlockSize];
};

template <class CodecT>
void loadBlock(Block &To, const char *Src, int64_t SrcStride, int64_t N) {
  for (int64_t I = 0; I != N; ++I) {
    typename CodecT::Storage Value;
    std::memcpy(&Value, Src + I * SrcStride, sizeof(Value));
    if constexpr (std::is_same_v<typename CodecT::Wide, double>)
      To.Floats[I] = CodecT::load(Value);
    else
      To.Ints[I] = CodecT::load(Value);
  }
}

template <class CodecT, bool FromFloats>
void storeBlock(char *Dst, int64_t DstStride, const Block &From, int64_t N) {
  for (int64_t I = 0; I != N; ++I) {
    typename CodecT::Storage Value;
    if constexpr (FromFloats)
      Value = CodecT::store(From.Floats[I]);
    else
      Value = CodecT::store(From.Ints[I]);
    std::memcpy(Dst + I * DstStride, &Value, sizeof(Value));
  }
}

using BlockLoader = void (*)(Block &, const char *, int64_t, int64_t);
using BlockStorer = void (*)(char *, int64_t, const Block &, int64_t);

/// Returns the loops of a copy, outermost first, with those of extent 1
/// dropped and those merged that step through both operands alike. There is
/// always at least one.
std::vector<Loop> buildLoops(const Tensor &Dst, const Tensor &Src) {
  const int64_t DstSize = static_cast<int64_t>(dtypeSize(Dst.dtype()));
  const int64_t SrcSize = static_cast<int64_t>(dtypeSize(Src.dtype()));
  std::vector<Loop> Loops;
  for (int I = 0; I != Dst.rank(); ++I) {
    if (Dst.dim(I) == 1)
      continue;
    Loop Inner{Dst.dim(I), Dst.stride(I) * DstSize, Src.stride(I) * SrcSize};
    int64_t DstStep, SrcStep;
    if (!Loops.empty() &&
        !__builtin_mul_overflow(Inner.Extent, Inner.DstStride, &DstStep) &&
        !__builtin_mul_overflow(Inner.Extent, Inner.SrcStride, &SrcStep) &&
        Loops.back().DstStride == DstStep &&
        Loops.back().SrcStride == SrcStep) {
      Inner.Extent *= Loops.back().Extent;
      Loops.back() = Inner;
    } else {
      Loops.push_back(Inner);
    }
  }
  if (Loops.empty())
    Loops.push_back({1, DstSize, SrcSize});
  return Loops;
}

} // namespace

Expected<Tensor> Tensor::to(DType NewType) const {
  if (Dev.kind != Device::CPU)
    return Status::unsupported("cannot convert " + describe() +
                               "; expected a tensor on cpu, got " + Dev.name());
  Expected<Tensor> Result = empty(NewType, Shape);
  if (!Result)
    return Result;
  if (Status S = Result->copyFrom(*this); !S)
    return S;
  return Result;
}

Status Tensor::copyFrom(const Tensor &Src) const {
  if (Shape != Src.Shape)
    return Status::invalidArgument("shapes of a copy differ; expected " +
                                   listToString(Shape) + ", got " +
                                   listToString(Src.Shape));
  if (numElements() == 0)
    return Status::ok();
  for (size_t I = 0; I != Shape.size(); ++I)
    if (Shape[I] > 1 && Strides[I] == 0)
      return Status::invalidArgument(
          "cannot copy into " + describe() +
          "; expected no stride of 0 along several elements, got one in "
          "dimension " +
          std::to_string(I));
  if (Dev.kind != Device::CPU || Src.Dev.kind != Device::CPU)
    return copyAcross(Src);

  if (overlaps(Src)) {
    if (Data == Src.Data && Type == Src.Type && Strides == Src.Strides)
      return Status::ok();
    Expected<Tensor> Temporary = Src.to(Src.Type);
    if (!Temporary)
      return Temporary.takeStatus();
    return copyFrom(*Temporary);
  }

  std::vector<Loop> Loops = buildLoops(*this, Src);
  const Loop Row = Loops.back();
  Loops.pop_back();

  RawRow CopyRow = Type == Src.Type ? rawRow(dtypeSize(Type)) : nullptr;
  BlockLoader Load = withCodec(
      Src.Type, [](auto C) -> BlockLoader { return loadBlock<decltype(C)>; });
  bool FromFloats = isFloat(Src.Type);
  BlockStorer Store = withCodec(Type, [&](auto C) -> BlockStorer {
    return FromFloats ? storeBlock<decltype(C), true>
                      : storeBlock<decltype(C), false>;
  });

  std::vector<int64_t> Index(Loops.size(), 0);
  char *To = static_cast<char *>(Data);
  const char *From = static_cast<const char *>(Src.Data);
  Block Buffer;
  while (true) {
    if (CopyRow) {
      CopyRow(To, Row.DstStride, From, Row.SrcStride, Row.Extent);
    } else {
      for (int64_t I = 0; I < Row.Extent; I += BlockSize) {
        int64_t N = std::min(BlockSize, Row.Extent - I);
        Load(Buffer, From + I * Row.SrcStride, Row.SrcStride, N);
        Store(To + I * Row.DstStride, Row.DstStride, Buffer, N);
      }
    }
    // Advance the outer loops like an odometer, and stop when all wrapped.
    size_t L = Loops.size();
    while (L != 0) {
      const Loop &Outer = Loops[L - 1];
      if (++Index[L - 1] != Outer.Extent) {
        To += Outer.DstStride;
        From += Outer.SrcStride;
        break;
      }
      Index[L - 1] = 0;
      To -= (Outer.Extent - 1) * Outer.DstStride;
      From -= (Outer.Extent - 1) * Outer.SrcStride;
      --L;
    }
    if (L == 0)
      return Status::ok();
  }
}

//===----------------------------------------------------------------------===//
// DLPack
//===----------------------------------------------------------------------===//

namespace {

/// What a description made by `toDLPack` points to.
struct Export {
  DLManagedTensor Managed;
  // Keeps the memory, and the arrays of extents and strides, alive.
  Tensor Source;
  std::vector<int64_t> Shape;
  std::vector<int64_t> Strides;
};

constexpr int32_t DLPackCPU = 1;
constexpr int32_t DLPackCUDA = 2;

} // namespace

DLManagedTensor *Tensor::toDLPack() const {
  Export *Context = new Export{{}, *this, Shape, Strides};
  DLTensor &Out = Context->Managed.dl_tensor;
  Out.data = Data;
  Out.device.device_type = static_cast<DLDeviceType>(
      Dev.kind == Device::CPU ? DLPackCPU : DLPackCUDA);
  Out.device.device_id = Dev.index;
  Out.ndim = rank();
  Out.dtype.code = dtypeInfo(Type).Code;
  Out.dtype.bits = static_cast<uint8_t>(dtypeSize(Type) * 8);
  Out.dtype.lanes = 1;
  Out.shape = Context->Shape.data();
  Out.strides = Context->Strides.data();
  Out.byte_offset = 0;
  Context->Managed.manager_ctx = Context;
  Context->Managed.deleter = [](DLManagedTensor *Self) {
    delete static_cast<Export *>(Self->manager_ctx);
  };
  return &Context->Managed;
}

Expected<Tensor> Tensor::fromDLPack(DLManagedTensor *Managed) {
  if (!Managed)
    return Status::invalidArgument(
        "no DLPack tensor; expected an address, got null");
  const DLTensor &In = Managed->dl_tensor;

  Device Dev;
  int32_t DeviceType = static_cast<int32_t>(In.device.device_type);
  if (DeviceType != DLPackCPU && DeviceType != DLPackCUDA)
    return Status::unsupported("unsupported DLPack device type; expected 1 "
                               "(cpu) or 2 (cuda), got " +
                               std::to_string(DeviceType));
  if (In.device.device_id < 0)
    return Status::invalidArgument(
        "negative DLPack device number; expected at least 0, got " +
        std::to_string(In.device.device_id));
  // The host is one device, whatever number a producer gives it.
  if (DeviceType == DLPackCUDA)
    Dev = Device::cuda(In.device.device_id);

  if (In.dtype.lanes != 1)
    return Status::unsupported(
        "unsupported DLPack vector type; expected 1 lane, got " +
        std::to_string(In.dtype.lanes));
  const DTypeInfo *Info = std::find_if(
      std::begin(DTypes), std::end(DTypes), [&](const DTypeInfo &Candidate) {
        return Candidate.Code == In.dtype.code &&
               Candidate.Size * 8 == In.dtype.bits;
      });
  if (Info == std::end(DTypes))
    return Status::unsupported(
        "unsupported DLPack element type; expected the code and bits of a "
        "known dtype, got code " +
        std::to_string(In.dtype.code) + " with " +
        std::to_string(In.dtype.bits) + " bits");

  if (In.ndim < 0)
    return Status::invalidArgument(
        "negative DLPack rank; expected at least 0, got " +
        std::to_string(In.ndim));
  if (In.ndim > 0 && !In.shape)
    return Status::invalidArgument("no DLPack shape; expected " +
                                   std::to_string(In.ndim) +
                                   " extents, got null");
  std::vector<int64_t> Shape, Strides;
  if (In.ndim > 0) {
    Shape.assign(In.shape, In.shape + In.ndim);
    if (In.strides)
      Strides.assign(In.strides, In.strides + In.ndim);
  }

  uintptr_t Address;
  if (__builtin_add_overflow(reinterpret_cast<uintptr_t>(In.data),
                             In.byte_offset, &Address))
    return Status::invalidArgument(
        "DLPack byte offset leaves the address space; expected an address "
        "inside, got offset " +
        std::to_string(In.byte_offset));
  // Added to null, an offset would make the missing data look present.
  void *Data = In.data ? reinterpret_cast<void *>(Address) : nullptr;

  // The checks of the view come before ownership moves, so that a failure
  // leaves the caller its tensor.
  Expected<Tensor> Result =
      view(Data, Info->Type, std::move(Shape), std::move(Strides), Dev);
  if (!Result)
    return Status(Result.status().code(),
                  "DLPack tensor: " + Result.status().message());
  Result->Storage = std::shared_ptr<void>(Managed, [](void *Owned) {
    auto *Self = static_cast<DLManagedTensor *>(Owned);
    if (Self->deleter)
      Self->deleter(Self);
  });
  return Result;
}
