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
  block->inUse = used = true;
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

bool Arena::releaseAll() {
  if (!used)
    return false;
  for (auto &entry : blocks)
    release(entry.first);
  used = false;
  return true;
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

//===----------------------------------------------------------------------===//
// Strided copies
//===----------------------------------------------------------------------===//

namespace {
/// StridedCopy.cu as PTX: for elements of 1, 2, 4 and 8 bytes what copies and
/// what transposes.
struct Image {
  const char *name, *ptx;
};
constexpr Image kImages[] = {
#include "StridedCopy.inc"
};
} // namespace

std::shared_ptr<Program> Device::makeCopies(std::shared_ptr<Device> device) {
  auto program = std::make_shared<Program>(std::move(device));
  for (const Image &image : kImages)
    program->add(image.name, image.ptx);
  return program;
}

namespace {
/// One loop of a copy: its length and its steps in bytes.
struct Axis {
  int64_t size, to, from;
};

/// Launches what a strided copy takes.
class StridedCopy {
public:
  /// Axes of a kernel, and elements that it numbers in 32 bits.
  static constexpr size_t kAxes = 5;
  static constexpr int64_t kMaxElements = int64_t(1) << 30;

  StridedCopy(const Device &device, const Program &kernels, void *stream)
      : device(device), kernels(kernels), stream(stream) {}

  /// `unit` bytes an element, and `axes` around it from the innermost one of
  /// the target.
  Status run(char *to, const char *from, int64_t unit, const Axis *axes,
             size_t count) {
    // A tile's axes are the innermost ones of the target and of the source.
    // What is repeated is in no order.
    size_t read = 0;
    for (size_t i = 1; i < count && axes[0].from; ++i)
      if (axes[i].from && std::abs(axes[i].from) < std::abs(axes[read].from))
        read = i;
    bool transposes =
        read != 0 && std::min(axes[0].size, axes[read].size) >= kMinSide;
    Axis inner[kMaxRank];
    std::copy(axes, axes + count, inner);
    if (transposes)
      std::rotate(inner + 1, inner + read, inner + read + 1);
    return loop(to, from, unit, inner, count, transposes);
  }

  static constexpr size_t kMaxRank = 33;

private:
  /// Shorter axes leave most of a tile empty.
  static constexpr int64_t kMinSide = 8;
  static constexpr int64_t kThreads = 256, kBlocksPerMultiprocessor = 16;

  /// Launches over what one kernel takes of the axes.
  Status loop(char *to, const char *from, int64_t unit, Axis *axes,
              size_t count, bool transposes) {
    int64_t elements = 1;
    size_t longest = 0;
    bool fits = count <= kAxes;
    for (size_t i = 0; i < count; ++i) {
      fits = fits && axes[i].size <= kMaxElements / elements;
      elements *= fits ? axes[i].size : 1;
      if (axes[i].size > axes[longest].size)
        longest = i;
    }
    if (fits)
      return launch(to, from, unit, axes, count, elements, transposes);
    // The outermost axis one by one, or the longest in halves.
    if (count > kAxes) {
      const Axis &outer = axes[count - 1];
      for (int64_t i = 0; i < outer.size; ++i)
        if (Status status = loop(to + i * outer.to, from + i * outer.from, unit,
                                 axes, count - 1, transposes);
            !status)
          return status;
      return Status::ok();
    }
    Axis half[kAxes];
    std::copy(axes, axes + count, half);
    half[longest].size = axes[longest].size / 2;
    if (Status status = loop(to, from, unit, half, count, transposes); !status)
      return status;
    int64_t done = half[longest].size;
    half[longest].size = axes[longest].size - done;
    return loop(to + done * axes[longest].to, from + done * axes[longest].from,
                unit, half, count, transposes);
  }

  Status launch(char *to, const char *from, int64_t unit, const Axis *axes,
                size_t count, int64_t elements, bool transposes) {
    size_t number = 0;
    for (int64_t bytes = unit; bytes > 1; bytes /= 2)
      number += 2;
    Expected<const Function *> function = kernels.kernel(number + transposes);
    if (!function)
      return function.takeStatus();
    int64_t values[3 * kAxes];
    void *arguments[2 + 3 * kAxes] = {&to, &from};
    for (size_t i = 0; i < kAxes; ++i) {
      Axis axis = i < count ? axes[i] : Axis{1, 0, 0};
      values[3 * i] = axis.size;
      values[3 * i + 1] = axis.to;
      values[3 * i + 2] = axis.from;
    }
    for (size_t i = 0; i < 3 * kAxes; ++i)
      arguments[2 + i] = &values[i];
    int64_t blocks = (elements + kThreads - 1) / kThreads;
    if (transposes) {
      int64_t side = unit < 4 ? 64 : 32;
      blocks = elements / axes[0].size / axes[1].size;
      for (int i = 0; i < 2; ++i)
        blocks *= (axes[i].size + side - 1) / side;
    }
    LaunchConfig config;
    config.grid[0] = std::min<int64_t>(
        blocks, kBlocksPerMultiprocessor * device.properties().multiprocessors);
    config.block[0] = kThreads;
    return cuda::launch(device, **function, config, stream, arguments);
  }

  const Device &device;
  const Program &kernels;
  void *stream;
};
} // namespace

Status Device::copyStrided(void *to, const int64_t *toStrides, const void *from,
                           const int64_t *fromStrides, const int64_t *sizes,
                           size_t rank, size_t elementBytes, void *stream,
                           bool toHost) const {
  // No warm call may allocate; tensors have few axes.
  if (rank >= StridedCopy::kMaxRank)
    return Status::unsupported(
        "expected a copy of at most 32 dimensions, got " +
        std::to_string(rank));
  if (elementBytes != 1 && elementBytes != 2 && elementBytes != 4 &&
      elementBytes != 8)
    return Status::invalidArgument(
        "expected elements of 1, 2, 4 or 8 bytes, got " +
        std::to_string(elementBytes));
  Axis axes[StridedCopy::kMaxRank];
  size_t count = 0;
  auto unit = static_cast<int64_t>(elementBytes);
  auto *target = static_cast<char *>(to);
  auto *source = static_cast<const char *>(from);
  for (size_t i = 0; i < rank; ++i) {
    if (sizes[i] == 0)
      return Status::ok();
    if (sizes[i] == 1)
      continue;
    Axis axis = {sizes[i], toStrides[i] * unit, fromStrides[i] * unit};
    // Both run backwards: the same elements the other way round.
    if (axis.to < 0) {
      target += (axis.size - 1) * axis.to;
      source += (axis.size - 1) * axis.from;
      axis.to = -axis.to;
      axis.from = -axis.from;
    }
    axes[count++] = axis;
  }
  // Innermost first: what has the smallest step in the target.
  for (size_t i = 1; i < count; ++i)
    for (size_t j = i; j && axes[j].to < axes[j - 1].to; --j)
      std::swap(axes[j], axes[j - 1]);
  size_t merged = 0;
  for (size_t i = 0; i < count; ++i) {
    if (merged && axes[i].to == axes[merged - 1].size * axes[merged - 1].to &&
        axes[i].from == axes[merged - 1].size * axes[merged - 1].from)
      axes[merged - 1].size *= axes[i].size;
    else
      axes[merged++] = axes[i];
  }
  count = merged;
  bool isRun = count && axes[0].to == unit && axes[0].from == unit;
  if (count == 0 || (count == 1 && isRun)) {
    auto bytes = static_cast<size_t>(count ? axes[0].size * unit : unit);
    return toHost ? copyToHost(target, source, bytes, stream)
                  : copyOnDevice(target, source, bytes, stream);
  }
  if (isRun) {
    // Runs are moved by the largest words that all of them can be read in.
    uintptr_t bits = reinterpret_cast<uintptr_t>(target) |
                     reinterpret_cast<uintptr_t>(source) |
                     static_cast<uintptr_t>(axes[0].size * unit);
    for (size_t i = 1; i < count; ++i)
      bits |= static_cast<uintptr_t>(axes[i].to) |
              static_cast<uintptr_t>(axes[i].from);
    while (unit < 8 && bits % static_cast<uintptr_t>(2 * unit) == 0) {
      unit *= 2;
      axes[0] = {axes[0].size / 2, unit, unit};
    }
  }
  return StridedCopy(*this, *copies, stream)
      .run(target, source, unit, axes, count);
}
