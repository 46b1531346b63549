//===- Tensor.h - Strided tensors, dtypes and devices -----------*- C++ -*-===//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//===----------------------------------------------------------------------===//
///
/// \file
/// `Tensor` is a handle to strided memory on the host or a CUDA device. Copies
/// and views of a tensor share its memory and keep it alive. Constness of a
/// handle is shallow: it protects the shape, not the elements.
///
/// Unless stated otherwise, sizes are in bytes where the name says so and in
/// elements elsewhere, and a dimension argument may be negative to count from
/// the last dimension, which is -1.
///
//===----------------------------------------------------------------------===//

#ifndef COREY_TENSOR_H
#define COREY_TENSOR_H

#include "corey/Status.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// The exchange structure of DLPack.h; callers that only pass the pointer on
// need not see its fields.
struct DLManagedTensor;

namespace corey {

//===----------------------------------------------------------------------===//
// Element types
//===----------------------------------------------------------------------===//

/// The type of a tensor's elements. `Bool` is one byte, false when zero.
enum class DType { F64, F32, F16, BF16, F8E4M3FN, I64, I32, I16, I8, U8, Bool };

/// Returns the size of one element of \p Type in bytes, which is also the
/// alignment that every tensor's data has.
size_t dtypeSize(DType Type);

/// Returns the name of \p Type: "f64", "f32", "f16", "bf16", "f8E4M3FN",
/// "i64", "i32", "i16", "i8", "u8" or "bool".
const char *dtypeName(DType Type);

/// Returns the type that `dtypeName` names \p Name. Names are case-sensitive.
/// Fails with `InvalidArgument` for every other string.
Expected<DType> dtypeFromName(std::string_view Name);

/// Returns whether \p Type is a floating-point type.
bool isFloat(DType Type);

/// Returns the value of the IEEE binary16 pattern \p Bits, exactly. A NaN
/// keeps its sign and payload.
float f16ToFloat(uint16_t Bits);
/// Rounds \p Value to binary16, to nearest with ties to even. Values that
/// round beyond 65504 become infinite; a NaN becomes quiet and keeps its sign
/// and the leading bits of its payload.
uint16_t floatToF16(float Value);
/// As `floatToF16`, rounding once from double precision.
uint16_t doubleToF16(double Value);

/// Returns the value of the bfloat16 pattern \p Bits, exactly. A NaN keeps its
/// sign and payload.
float bf16ToFloat(uint16_t Bits);
/// Rounds \p Value to bfloat16, to nearest with ties to even. Values that
/// round beyond the largest finite one become infinite; NaN is treated as by
/// `floatToF16`.
uint16_t floatToBF16(float Value);
/// As `floatToBF16`, rounding once from double precision.
uint16_t doubleToBF16(double Value);

/// Returns the value of the 8-bit pattern \p Bits with 4 exponent and 3
/// mantissa bits and no infinities, exactly. 0x7f and 0xff are NaN.
float f8E4M3FNToFloat(uint8_t Bits);
/// Rounds \p Value to f8E4M3FN, to nearest with ties to even. The format has
/// no infinities: whatever rounds beyond 448 becomes NaN, it does not
/// saturate, so that an overflow stays visible.
uint8_t floatToF8E4M3FN(float Value);
/// As `floatToF8E4M3FN`, rounding once from double precision.
uint8_t doubleToF8E4M3FN(double Value);

/// Returns the element of type \p Type at \p Ptr as a double. \p Ptr may have
/// any alignment. `I64` values beyond 2^53 are rounded to nearest.
double loadScalar(DType Type, const void *Ptr);

/// Stores \p Value at \p Ptr as an element of type \p Type. \p Ptr may have
/// any alignment. Floating-point types round to nearest even. Integer types
/// truncate toward zero and saturate at their limits, and NaN becomes 0.
/// `Bool` becomes 0 for zero and 1 for everything else, NaN included.
void storeScalar(DType Type, void *Ptr, double Value);

//===----------------------------------------------------------------------===//
// Devices
//===----------------------------------------------------------------------===//

/// The device whose memory holds a tensor.
struct Device {
  /// Kinds of devices.
  enum Kind { CPU, CUDA };

  /// The kind of the device.
  Kind kind = CPU;
  /// The zero-based number of the device among those of its kind; 0 for the
  /// host.
  int index = 0;

  /// Returns the host.
  static Device cpu() { return Device{CPU, 0}; }
  /// Returns the CUDA device number \p Index, without checking that it exists.
  static Device cuda(int Index = 0) { return Device{CUDA, Index}; }

  /// Parses "cpu", "cuda" (which is device 0) or "cuda:<number>". Fails with
  /// `InvalidArgument` for every other string. Does not check that the device
  /// exists.
  static Expected<Device> parse(std::string_view Text);

  /// Returns "cpu" or "cuda:<number>", which `parse` reads back.
  std::string name() const;

  friend bool operator==(const Device &A, const Device &B) {
    return A.kind == B.kind && A.index == B.index;
  }
  friend bool operator!=(const Device &A, const Device &B) { return !(A == B); }
};

//===----------------------------------------------------------------------===//
// Tensors
//===----------------------------------------------------------------------===//

/// Returns the number of elements of a tensor of shape \p Shape, 1 for an
/// empty shape. Fails with `InvalidArgument` if an extent is negative or if
/// the product of the non-zero extents exceeds the range of int64_t; the
/// latter holds even when another extent is zero, because the strides of such
/// a shape could not be represented.
Expected<int64_t> countElements(const std::vector<int64_t> &Shape);

/// Returns the row-major strides, in elements, of a contiguous tensor of shape
/// \p Shape, counting an extent of zero as one. The shape must satisfy
/// `countElements`.
std::vector<int64_t> contiguousStrides(const std::vector<int64_t> &Shape);

/// Returns `Shape` without its dimensions of size 1.
std::vector<int64_t> squeezeShape(const std::vector<int64_t> &Shape);

/// A strided view of typed memory.
///
/// Every tensor satisfies these conditions, which its makers check: extents
/// are not negative; the product of the non-zero extents times the element
/// size fits int64_t; the bytes between its lowest and highest element lie
/// within the address space; the data is aligned to the element size, and it
/// is not null if there are elements. Strides count elements and may be zero
/// or negative, and `data()` is always the address of the element whose
/// indices are all zero.
class Tensor {
public:
  /// Constructs a tensor of shape [0], dtype f32, without memory.
  Tensor() : Shape{0}, Strides{1} {}

  /// Returns a new contiguous tensor in host memory, aligned to 64 bytes. The
  /// elements are zero if \p ZeroInit is set and indeterminate otherwise.
  /// Fails with `InvalidArgument` if an extent is negative or the size in
  /// bytes overflows, and with `OutOfMemory` if there is no memory.
  static Expected<Tensor> empty(DType Type, std::vector<int64_t> Shape,
                                bool ZeroInit = false);
  /// As above, in the memory of \p Dev, aligned to at least 64 bytes. Fails
  /// also as `Context::create` does for the device.
  static Expected<Tensor> empty(DType Type, std::vector<int64_t> Shape,
                                Device Dev, bool ZeroInit = false);

  /// Returns a tensor over the memory at \p Ptr, which is the address of the
  /// element whose indices are all zero, on \p Dev. Empty \p Strides stand for
  /// row-major contiguous. The memory must stay valid while the tensor or any
  /// view of it is used; \p Owner, if given, is kept alive that long and can
  /// ensure it. Fails with `InvalidArgument` if a condition of the class does
  /// not hold or \p Strides has the wrong length.
  static Expected<Tensor> view(void *Ptr, DType Type,
                               std::vector<int64_t> Shape,
                               std::vector<int64_t> Strides = {},
                               Device Dev = Device(),
                               std::shared_ptr<void> Owner = nullptr);

  /// Views other memory of the device with the same type, shape and strides:
  /// `view` without an owner, but takes no memory for either list. On failure,
  /// which is as there, the tensor is unchanged.
  Status rebind(void *Ptr);

  /// Returns the address of the element whose indices are all zero. For a CUDA
  /// tensor this is a device address.
  void *data() const { return Data; }
  /// Returns `data()` as a pointer to \p T, which must be the C++ type of
  /// `dtype()`; 16-bit and 8-bit floats are read as uint16_t and uint8_t.
  template <class T> T *dataAs() const { return static_cast<T *>(Data); }

  /// Returns the element type.
  DType dtype() const { return Type; }
  /// Returns the device that holds the elements.
  Device device() const { return Dev; }
  /// Returns the extents, outermost first.
  const std::vector<int64_t> &shape() const { return Shape; }
  /// Returns the strides in elements, outermost first.
  const std::vector<int64_t> &strides() const { return Strides; }
  /// Returns the number of dimensions; 0 for a scalar.
  int rank() const { return static_cast<int>(Shape.size()); }
  /// Returns the extent of dimension \p Dim, which must be in range.
  int64_t dim(int Dim) const;
  /// Returns the stride in elements of dimension \p Dim, which must be in
  /// range.
  int64_t stride(int Dim) const;

  /// Returns the number of elements, which never overflows by the conditions
  /// of the class.
  int64_t numElements() const;
  /// Returns the size in bytes of a contiguous copy, which never overflows.
  int64_t numBytes() const;

  /// Returns whether the elements lie densely in row-major order. The strides
  /// of dimensions of extent 1 do not matter, and a tensor without elements is
  /// contiguous.
  bool isContiguous() const;

  /// Returns the owner of the memory, null if nothing keeps it alive.
  const std::shared_ptr<void> &storage() const { return Storage; }

  /// Returns the view of the elements \p Start, \p Start + \p Step, ... before
  /// \p Stop along \p Dim. For a positive step the bounds are within
  /// [0, extent] and for a negative one within [-1, extent - 1], where a stop
  /// of -1 includes element 0; bounds are neither wrapped nor clamped. A stop
  /// that is not beyond the start gives extent 0. Fails with `InvalidArgument`
  /// if the dimension or a bound is out of range or the step is 0.
  Expected<Tensor> slice(int Dim, int64_t Start, int64_t Stop,
                         int64_t Step = 1) const;

  /// Returns a view with the same elements in row-major order and the shape
  /// \p NewShape, one extent of which may be -1 and is then computed. Fails
  /// with `InvalidArgument` if the numbers of elements differ or if the
  /// strides allow no such view without a copy; `to(dtype())` makes a
  /// contiguous copy that can always be reshaped.
  Expected<Tensor> reshape(std::vector<int64_t> NewShape) const;

  /// Returns the view with the dimensions \p A and \p B exchanged. Fails with
  /// `InvalidArgument` if either is out of range.
  Expected<Tensor> transpose(int A, int B) const;

  /// Returns the view whose dimension i is this tensor's dimension
  /// \p Order[i]. Fails with `InvalidArgument` if \p Order is not a
  /// permutation of the dimensions.
  Expected<Tensor> permute(const std::vector<int> &Order) const;

  /// Returns the view with a new dimension of extent 1 before dimension
  /// \p Dim, which is in [-(rank + 1), rank]; rank and -1 append it. Fails
  /// with `InvalidArgument` if \p Dim is out of range.
  Expected<Tensor> unsqueeze(int Dim) const;

  /// Returns a new contiguous host tensor with these elements converted to
  /// \p NewType, as `copyFrom` converts them. Fails with `Unsupported` if the
  /// tensor is not in host memory, and with `OutOfMemory`.
  Expected<Tensor> to(DType NewType) const;
  /// Returns a new contiguous tensor in the memory of \p NewDevice with these
  /// elements, as `copyFrom` copies them.
  Expected<Tensor> to(Device NewDevice) const;

  /// Copies the elements of \p Src, which has the same shape, any strides and
  /// any dtype, into this tensor's memory, as if \p Src were read entirely
  /// before the first write: the two may overlap. Equal dtypes copy bits.
  /// Others round once, to nearest even, to a floating-point type; truncate
  /// toward zero and saturate to an integer type, with NaN becoming 0; and
  /// give whether the value is not zero for `Bool`. Where a tensor is on a CUDA
  /// device, the copy comes after all work of the device and is done on return.
  /// Fails with `InvalidArgument` if the shapes differ or if this tensor has a
  /// stride of 0 along more than one element, with `Unsupported` if the dtypes
  /// differ and either is not in host memory, with `OutOfMemory` if a temporary
  /// is needed (for overlapping operands, or strides on two devices) that
  /// cannot be allocated, and with `DeviceError`.
  Status copyFrom(const Tensor &Src) const;

  /// Returns the dtype, shape, strides and device for messages, such as
  /// "tensor<2x7x3xf32, strides [21, 3, 1], cpu>".
  std::string describe() const;

  /// Returns the addresses [first, second) of the bytes from the lowest to the
  /// highest element, both equal to `data()` if there are no elements.
  std::pair<uintptr_t, uintptr_t> byteRange() const;

  /// Returns whether the byte ranges of the two tensors intersect on one
  /// device. The answer is conservative: interleaved views that share no
  /// element overlap too. A tensor without elements overlaps nothing.
  bool overlaps(const Tensor &Other) const;

  /// Returns a DLPack description of this tensor, which shares its memory and
  /// keeps it alive until the caller calls the description's deleter. Strides
  /// are always given and the byte offset is 0.
  DLManagedTensor *toDLPack() const;

  /// Returns a tensor over the memory of \p Managed. On success the tensor
  /// owns \p Managed and calls its deleter, if any, exactly once, when the
  /// last tensor that shares the memory dies. On failure the caller still owns
  /// \p Managed and nothing was called. Fails with `InvalidArgument` if the
  /// pointer is null, the rank or device number is negative, the shape is
  /// missing, or a condition of the class does not hold, including that the
  /// data plus the byte offset is aligned to the element size; and with
  /// `Unsupported` for element types that `DType` lacks, more than one lane,
  /// and devices other than the host and CUDA.
  static Expected<Tensor> fromDLPack(DLManagedTensor *Managed);

private:
  Status copyAcross(const Tensor &Src) const;

  void *Data = nullptr;
  DType Type = DType::F32;
  Device Dev;
  std::vector<int64_t> Shape;
  std::vector<int64_t> Strides;
  std::shared_ptr<void> Storage;
};

} // namespace corey

#endif // COREY_TENSOR_H
