//===- CUDAMemory.cpp - Device memory, copies and arenas ------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "CUDADriver.h"
#include "SizeClass.h"
#include "corey/Device/CUDA.h"
#include <algorithm>

using namespace corey;
using namespace corey::cuda;
using namespace corey::cuda::driver;

static CUcontext contextOf(const Device &device) {
  return static_cast<CUcontext>(device.context());
}
static CUstream toStream(void *stream) { return static_cast<CUstream>(stream); }

//===----------------------------------------------------------------------===//
// Blocks
//===----------------------------------------------------------------------===//

static std::string bytesText(size_t bytes) {
  return std::to_string(bytes) + " bytes of device memory";
}

Expected<void *> Device::allocate(size_t bytes) const {
  ContextScope scope(*api, contextOf(*this));
  if (Status status = scope.status(); !status)
    return status;
  RelaxedCapture relaxed(*api);
  CUdeviceptr pointer = 0;
  if (Status status =
          check(*api, api->cuMemAlloc(&pointer, std::max<size_t>(bytes, 1)),
                "allocating " + bytesText(bytes));
      !status)
    return status;
  return reinterpret_cast<void *>(pointer);
}

void Device::deallocate(void *pointer) const {
  if (!pointer)
    return;
  ContextScope scope(*api, contextOf(*this));
  RelaxedCapture relaxed(*api);
  api->cuMemFree(address(pointer));
}

Expected<PinnedBuffer> PinnedBuffer::allocate(std::shared_ptr<Device> device,
                                              size_t bytes) {
  const Driver &api = device->driver();
  ContextScope scope(api, contextOf(*device));
  RelaxedCapture relaxed(api);
  void *pointer = nullptr;
  if (Status status = check(
          api, api.cuMemHostAlloc(&pointer, std::max<size_t>(bytes, 1), 0),
          "allocating " + std::to_string(bytes) + " bytes of pinned memory");
      !status)
    return status;
  PinnedBuffer buffer;
  buffer.device = std::move(device);
  buffer.pointer = pointer;
  buffer.bytes = bytes;
  return buffer;
}

PinnedBuffer &PinnedBuffer::operator=(PinnedBuffer &&other) noexcept {
  std::swap(device, other.device);
  std::swap(pointer, other.pointer);
  std::swap(bytes, other.bytes);
  return *this;
}

PinnedBuffer::~PinnedBuffer() {
  if (!pointer)
    return;
  ContextScope scope(device->driver(), contextOf(*device));
  RelaxedCapture relaxed(device->driver());
  device->driver().cuMemFreeHost(pointer);
}

//===----------------------------------------------------------------------===//
// Arena
//===----------------------------------------------------------------------===//

Arena::~Arena() {
  for (auto &entry : blocks)
    device->deallocate(entry.first);
}

void *Arena::allocate(size_t bytes, Status *status) {
  if (bytes > (size_t(1) << 46)) {
    if (status)
      *status = Status::outOfMemory("allocating " + bytesText(bytes) +
                                    ": expected at most 2^46");
    return nullptr;
  }
  size_t rounded;
  unsigned sizeClass = device::sizeClassOf(bytes, rounded);
  Block *block = lists[sizeClass];
  if (block) {
    lists[sizeClass] = block->next;
  } else {
    Expected<void *> pointer = device->allocate(rounded);
    // What other shapes have left behind may be enough.
    if (!pointer && pointer.status().code() == StatusCode::OutOfMemory &&
        trim())
      pointer = device->allocate(rounded);
    if (!pointer) {
      if (status)
        *status = pointer.takeStatus();
      return nullptr;
    }
    auto made = std::make_unique<Block>();
    block = made.get();
    block->pointer = *pointer;
    block->bytes = rounded;
    block->sizeClass = sizeClass;
    blocks.emplace(*pointer, std::move(made));
    reserved += rounded;
    ++requests;
  }
  block->inUse = true;
  return block->pointer;
}

void Arena::release(void *pointer) {
  if (!pointer)
    return;
  auto it = blocks.find(pointer);
  if (it == blocks.end() || !it->second->inUse)
    return;
  Block &block = *it->second;
  block.inUse = false;
  block.next = lists[block.sizeClass];
  lists[block.sizeClass] = &block;
}

bool Arena::contains(void *pointer, const void *address) const {
  auto it = blocks.find(pointer);
  if (it == blocks.end())
    return false;
  auto *begin = static_cast<const char *>(pointer);
  auto *at = static_cast<const char *>(address);
  return at >= begin && at < begin + it->second->bytes;
}

void Arena::releaseAll() {
  for (auto &entry : blocks)
    release(entry.first);
}

bool Arena::trim() {
  if (keeps)
    return false;
  bool any = false;
  for (auto it = blocks.begin(); it != blocks.end();) {
    if (it->second->inUse) {
      ++it;
      continue;
    }
    device->deallocate(it->first);
    reserved -= it->second->bytes;
    it = blocks.erase(it);
    any = true;
  }
  std::fill(std::begin(lists), std::end(lists), nullptr);
  return any;
}

//===----------------------------------------------------------------------===//
// Copies
//===----------------------------------------------------------------------===//

Status Device::copyToDevice(void *to, const void *from, size_t bytes,
                            void *stream) const {
  if (!bytes)
    return Status::ok();
  ContextScope scope(*api, contextOf(*this));
  return check(
      *api, api->cuMemcpyHtoDAsync(address(to), from, bytes, toStream(stream)),
      "copying to the device");
}

Status Device::copyToHost(void *to, const void *from, size_t bytes,
                          void *stream) const {
  if (!bytes)
    return Status::ok();
  ContextScope scope(*api, contextOf(*this));
  return check(
      *api, api->cuMemcpyDtoHAsync(to, address(from), bytes, toStream(stream)),
      "copying to the host");
}

Status Device::copyOnDevice(void *to, const void *from, size_t bytes,
                            void *stream) const {
  if (!bytes)
    return Status::ok();
  ContextScope scope(*api, contextOf(*this));
  return check(*api,
               api->cuMemcpyDtoDAsync(address(to), address(from), bytes,
                                      toStream(stream)),
               "copying on the device");
}

Status Device::copyFromPeer(void *to, const Device &source, const void *from,
                            size_t bytes, void *stream) const {
  if (!bytes)
    return Status::ok();
  ContextScope scope(*api, contextOf(*this));
  return check(*api,
               api->cuMemcpyPeerAsync(address(to), contextOf(*this),
                                      address(from), contextOf(source), bytes,
                                      toStream(stream)),
               "copying between devices");
}

Status Device::memset(void *to, unsigned char value, size_t bytes,
                      void *stream) const {
  if (!bytes)
    return Status::ok();
  ContextScope scope(*api, contextOf(*this));
  return check(
      *api, api->cuMemsetD8Async(address(to), value, bytes, toStream(stream)),
      "filling device memory");
}

namespace {
/// One loop of a copy: its length and its steps in bytes.
struct Axis {
  int64_t size, to, from;
};

/// Issues the operations of a strided copy.
class StridedCopy {
public:
  /// The most bytes that a driver takes from one row to the next.
  static constexpr int64_t kMaxPitch = 0x7fffffff;

  StridedCopy(const Driver &api, CUstream stream, bool toHost)
      : api(api), stream(stream), toHost(toHost) {}

  /// `width` bytes in a run, and `axes` around them, which are put in order.
  CUresult run(char *to, const char *from, int64_t width, Axis *axes,
               size_t count) {
    size_t inner = arrange(width, axes, count);
    return loop(to, from, width, axes, count - inner, inner);
  }

private:
  /// Moves to the end the axes that one operation copies, planes before rows,
  /// and returns how many they are: those that leave the fewest operations. Of
  /// a transposed tensor rows may be the axis that is innermost in the source.
  static size_t arrange(int64_t width, Axis *axes, size_t count) {
    int64_t most = 1;
    size_t rows = count, planes = count;
    // From the innermost, which is taken where others do no better.
    for (size_t r = count; r-- > 0;) {
      if (!pitchable(axes[r], width))
        continue;
      if (axes[r].size > most) {
        most = axes[r].size;
        rows = r;
        planes = count;
      }
      for (size_t p = count; p-- > 0;)
        if (p != r && volume(axes[p], axes[r]) &&
            axes[p].size * axes[r].size > most) {
          most = axes[p].size * axes[r].size;
          rows = r;
          planes = p;
        }
    }
    if (rows == count)
      return 0;
    std::rotate(axes + rows, axes + rows + 1, axes + count);
    if (planes == count)
      return 1;
    planes -= planes > rows;
    std::rotate(axes + planes, axes + planes + 1, axes + count - 1);
    return 2;
  }

  /// A loop of copies over the first `outer` axes.
  CUresult loop(char *to, const char *from, int64_t width, const Axis *axes,
                size_t outer, size_t inner) {
    if (!outer)
      return inner == 2   ? copy3D(to, from, width, axes[1], axes[0])
             : inner == 1 ? copy2D(to, from, width, axes[0])
                          : linear(to, from, width);
    for (int64_t i = 0; i < axes->size; ++i)
      if (CUresult result = loop(to + i * axes->to, from + i * axes->from,
                                 width, axes + 1, outer - 1, inner))
        return result;
    return CUDA_SUCCESS;
  }

  static bool pitchable(const Axis &axis, int64_t width) {
    return axis.to >= width && axis.from >= width && axis.to <= kMaxPitch &&
           axis.from <= kMaxPitch;
  }
  /// A plane's height is what lies between planes, in rows: both tensors must
  /// have a whole number of them.
  static bool volume(const Axis &outer, const Axis &inner) {
    return outer.to > 0 && outer.from > 0 && outer.to % inner.to == 0 &&
           outer.from % inner.from == 0 && outer.to / inner.to >= inner.size &&
           outer.from / inner.from >= inner.size;
  }

  CUresult linear(char *to, const char *from, int64_t bytes) {
    auto size = static_cast<size_t>(bytes);
    return toHost ? api.cuMemcpyDtoHAsync(to, address(from), size, stream)
                  : api.cuMemcpyDtoDAsync(address(to), address(from), size,
                                          stream);
  }

  template <class Copy> void setEnds(Copy &copy, char *to, const char *from) {
    copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
    copy.srcDevice = address(from);
    copy.dstMemoryType = toHost ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
    if (toHost)
      copy.dstHost = to;
    else
      copy.dstDevice = address(to);
  }

  CUresult copy2D(char *to, const char *from, int64_t width, const Axis &rows) {
    CUDA_MEMCPY2D copy = {};
    setEnds(copy, to, from);
    copy.srcPitch = rows.from;
    copy.dstPitch = rows.to;
    copy.WidthInBytes = width;
    copy.Height = rows.size;
    return api.cuMemcpy2DAsync(&copy, stream);
  }

  CUresult copy3D(char *to, const char *from, int64_t width, const Axis &rows,
                  const Axis &planes) {
    CUDA_MEMCPY3D copy = {};
    setEnds(copy, to, from);
    copy.srcPitch = rows.from;
    copy.srcHeight = planes.from / rows.from;
    copy.dstPitch = rows.to;
    copy.dstHeight = planes.to / rows.to;
    copy.WidthInBytes = width;
    copy.Height = rows.size;
    copy.Depth = planes.size;
    return api.cuMemcpy3DAsync(&copy, stream);
  }

  const Driver &api;
  CUstream stream;
  bool toHost;
};
} // namespace

Status Device::copyStrided(void *to, const int64_t *toStrides, const void *from,
                           const int64_t *fromStrides, const int64_t *sizes,
                           size_t rank, size_t elementBytes, void *stream,
                           bool toHost) const {
  // No warm call may allocate; tensors have few axes.
  constexpr size_t kMaxRank = 32;
  if (rank > kMaxRank)
    return Status::unsupported(
        "expected a copy of at most 32 dimensions, got " +
        std::to_string(rank));
  Axis axes[kMaxRank + 1];
  size_t count = 0;
  auto bytes = static_cast<int64_t>(elementBytes);
  auto *target = static_cast<char *>(to);
  auto *source = static_cast<const char *>(from);
  for (size_t i = 0; i < rank; ++i) {
    if (sizes[i] == 0)
      return Status::ok();
    if (sizes[i] == 1)
      continue;
    Axis axis = {sizes[i], toStrides[i] * bytes, fromStrides[i] * bytes};
    // Both run backwards: the same elements the other way round.
    if (axis.to < 0) {
      target += (axis.size - 1) * axis.to;
      source += (axis.size - 1) * axis.from;
      axis.to = -axis.to;
      axis.from = -axis.from;
    }
    axes[count++] = axis;
  }
  // Outermost is what has the largest step in the target.
  for (size_t i = 1; i < count; ++i)
    for (size_t j = i; j && axes[j].to > axes[j - 1].to; --j)
      std::swap(axes[j], axes[j - 1]);
  size_t merged = 0;
  for (size_t i = 0; i < count; ++i) {
    Axis axis = axes[i];
    if (merged && axes[merged - 1].to == axis.size * axis.to &&
        axes[merged - 1].from == axis.size * axis.from) {
      axis.size *= axes[merged - 1].size;
      axes[merged - 1] = axis;
    } else {
      axes[merged++] = axis;
    }
  }
  count = merged;
  int64_t width = bytes;
  if (count && axes[count - 1].to == bytes && axes[count - 1].from == bytes)
    width *= axes[--count].size;
  ContextScope scope(*api, contextOf(*this));
  if (Status status = scope.status(); !status)
    return status;
  return check(*api,
               StridedCopy(*api, toStream(stream), toHost)
                   .run(target, source, width, axes, count),
               "copying a strided tensor");
}
