//===- StridedCopy.cu - Copies between strided tensors on a device --------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// Kernels of Device::copyStrided(), one for each size of an element in bytes:
//
//   corey_copy_<bytes>       element by element, in the order of the axes
//   corey_transpose_<bytes>  by tiles of the two innermost axes through shared
//                            memory: read along axis 1, written along axis 0
//
// Both take five axes, the innermost first, with lengths from 1 and steps in
// bytes. The elements of a call number less than 2^31. Compiled with the
// project to PTX that the driver takes; no toolkit and no header is needed.
//
//===----------------------------------------------------------------------===//

#define KERNEL extern "C" __attribute__((global))
#define DEVICE static inline __attribute__((device))

using int64 = long long;

namespace {
struct Axes {
  int64 size[5], to[5], from[5];
};
struct Place {
  int64 to, from;
};
template <int bytes> struct Element;
template <> struct Element<1> { using Type = unsigned char; };
template <> struct Element<2> { using Type = unsigned short; };
template <> struct Element<4> { using Type = unsigned; };
template <> struct Element<8> { using Type = unsigned long long; };

constexpr unsigned kThreads = 256;
/// Elements on the side of a tile: a row of it is a segment of memory at least.
template <class T> constexpr unsigned kTile = sizeof(T) < 4 ? 64 : 32;
} // namespace

/// Where the `index`-th element of the axes from `first` on begins.
DEVICE Place locate(const Axes &axes, int first, unsigned index) {
  Place place = {0, 0};
#pragma unroll
  for (int i = 0; i < 5; ++i) {
    if (i < first)
      continue;
    auto size = static_cast<unsigned>(axes.size[i]);
    unsigned quotient = index / size, rest = index - quotient * size;
    place.to += rest * axes.to[i];
    place.from += rest * axes.from[i];
    index = quotient;
  }
  return place;
}

template <class T> DEVICE void copy(char *to, const char *from, Axes axes) {
  unsigned count = 1;
  for (int i = 0; i < 5; ++i)
    count *= static_cast<unsigned>(axes.size[i]);
  unsigned step = __nvvm_read_ptx_sreg_nctaid_x() * kThreads;
#pragma unroll 4
  for (unsigned i = __nvvm_read_ptx_sreg_ctaid_x() * kThreads +
                    __nvvm_read_ptx_sreg_tid_x();
       i < count; i += step) {
    Place place = locate(axes, 0, i);
    *reinterpret_cast<T *>(to + place.to) =
        *reinterpret_cast<const T *>(from + place.from);
  }
}

template <class T>
DEVICE void transpose(char *to, const char *from, Axes axes) {
  constexpr unsigned kSide = kTile<T>, kRows = kThreads / kSide;
  // Rows are an odd number of banks apart, so that columns meet each once.
  constexpr unsigned kPad = sizeof(T) < 4 ? 4 / sizeof(T) : 1;
  __attribute__((shared)) static T tile[kSide][kSide + kPad];
  auto width = static_cast<unsigned>(axes.size[0]);
  auto height = static_cast<unsigned>(axes.size[1]);
  unsigned across = (width + kSide - 1) / kSide;
  unsigned down = (height + kSide - 1) / kSide;
  unsigned count = across * down;
  for (int i = 2; i < 5; ++i)
    count *= static_cast<unsigned>(axes.size[i]);
  unsigned lane = __nvvm_read_ptx_sreg_tid_x() % kSide;
  unsigned row = __nvvm_read_ptx_sreg_tid_x() / kSide;
  for (unsigned i = __nvvm_read_ptx_sreg_ctaid_x(); i < count;
       i += __nvvm_read_ptx_sreg_nctaid_x()) {
    unsigned plane = i / (across * down), inPlane = i - plane * across * down;
    unsigned y = inPlane / across * kSide, x = inPlane % across * kSide;
    Place place = locate(axes, 2, plane);
    const char *source = from + place.from;
    char *target = to + place.to;
#pragma unroll
    for (unsigned r = 0; r < kSide; r += kRows)
      if (x + r + row < width && y + lane < height)
        tile[r + row][lane] = *reinterpret_cast<const T *>(
            source + (x + r + row) * axes.from[0] + (y + lane) * axes.from[1]);
    __syncthreads();
#pragma unroll
    for (unsigned r = 0; r < kSide; r += kRows)
      if (y + r + row < height && x + lane < width)
        *reinterpret_cast<T *>(target + (x + lane) * axes.to[0] +
                               (y + r + row) * axes.to[1]) =
            tile[lane][r + row];
    __syncthreads();
  }
}

// COREY_KERNEL and COREY_BYTES say which of them is compiled. Scalars, as the
// compiler's own kernels take them.
#define PASTE(kernel, bytes) corey_##kernel##_##bytes
#define NAME(kernel, bytes) PASTE(kernel, bytes)

KERNEL void NAME(COREY_KERNEL, COREY_BYTES)(
    char *to, const char *from, int64 size0, int64 to0, int64 from0,
    int64 size1, int64 to1, int64 from1, int64 size2, int64 to2, int64 from2,
    int64 size3, int64 to3, int64 from3, int64 size4, int64 to4, int64 from4) {
  COREY_KERNEL<Element<COREY_BYTES>::Type>(to, from,
                                           {{size0, size1, size2, size3, size4},
                                            {to0, to1, to2, to3, to4},
                                            {from0, from1, from2, from3,
                                             from4}});
}
