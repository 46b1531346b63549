//===- FakeCUDA.cpp - A CUDA driver on host memory ------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "FakeCUDA.h"
#include "CUDADriver.h"
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>

using namespace corey::cuda::driver;
using namespace corey::fake;

//===----------------------------------------------------------------------===//
// State
//===----------------------------------------------------------------------===//

struct corey::cuda::driver::CUctx_st {
  int device;
};
struct corey::cuda::driver::CUfunc_st {
  std::string name;
  /// Bytes of each parameter.
  std::vector<size_t> parameters;
  int dynamicLimit = 48 << 10;
  bool largeClusters = false;
};
struct corey::cuda::driver::CUmod_st {
  std::map<std::string, CUfunc_st> functions;
};
struct corey::cuda::driver::CUuserObject_st {
  void *pointer;
  CUhostFn destroy;
  ~CUuserObject_st() { destroy(pointer); }
};
namespace {
struct Node {
  std::string kind;
  std::function<void()> run;
};
} // namespace
struct corey::cuda::driver::CUgraph_st {
  std::vector<Node> nodes;
  std::vector<std::shared_ptr<CUuserObject_st>> objects;
};
struct corey::cuda::driver::CUgraphExec_st {
  CUgraph_st graph;
};
struct corey::cuda::driver::CUstream_st {
  CUcontext context;
  /// What is captured, and the stream that it was begun on; another one that
  /// has waited for it takes part.
  std::shared_ptr<CUgraph_st> capture;
  CUstream origin = nullptr;
  /// Whether the origin has waited for the last work on the stream.
  bool isJoined = true;
};
struct corey::cuda::driver::CUevent_st {
  bool timing;
  bool recorded = false;
  /// Of the capture that it was last recorded in.
  std::weak_ptr<CUgraph_st> capture = {};
  CUstream stream = nullptr;
  std::chrono::steady_clock::time_point time;
};
struct corey::cuda::driver::CUlinkState_st {
  std::string cubin;
  char *errors = nullptr;
  size_t errorBytes = 0;
};

/// What the library's own kernels do: corey_copy_<bytes> and
/// corey_transpose_<bytes>, with five axes of size and steps in bytes.
static void copyStrided(const Launch &launch) {
  size_t bytes = std::stoul(launch.kernel.substr(launch.kernel.rfind('_') + 1));
  const uint64_t *axes = &launch.arguments[2];
  std::function<void(int, uint64_t, uint64_t)> loop = [&](int axis, uint64_t to,
                                                          uint64_t from) {
    if (axis < 0) {
      std::memcpy(reinterpret_cast<void *>(to),
                  reinterpret_cast<const void *>(from), bytes);
      return;
    }
    for (uint64_t i = 0; i < axes[3 * axis]; ++i)
      loop(axis - 1, to + i * axes[3 * axis + 1],
           from + i * axes[3 * axis + 2]);
  };
  loop(4, launch.arguments[0], launch.arguments[1]);
}

namespace {
struct Allocation {
  size_t bytes;
  int device;
};
struct State {
  std::recursive_mutex mutex;
  std::map<std::string, uint64_t> calls;
  std::map<std::string, std::pair<int, int>> failures;
  int devices = 2;
  uint64_t memory = uint64_t(1) << 30, inUse = 0;
  bool holdEvents = false;
  std::map<std::string, Kernel> kernels;
  State() { resetKernels(); }
  void resetKernels() {
    kernels.clear();
    for (const char *bytes : {"1", "2", "4", "8"})
      for (const char *kernel : {"corey_copy_", "corey_transpose_"})
        kernels[std::string(kernel) + bytes] = copyStrided;
  }
  std::vector<Launch> launches;
  std::map<CUdeviceptr, Allocation> allocations;
  CUctx_st contexts[8] = {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}};
  /// User objects that no graph has taken yet.
  std::map<CUuserObject, std::shared_ptr<CUuserObject_st>> objects;
  /// Streams that take part in a capture that was begun on another.
  std::vector<CUstream> forked;
};
State &state() {
  static State &state = *new State;
  return state;
}
thread_local std::vector<CUcontext> contextStack;
thread_local CUstreamCaptureMode captureMode = CU_STREAM_CAPTURE_MODE_GLOBAL;
/// Streams that this thread captures.
thread_local int capturing = 0;

/// Counts a call and says what it fails with.
CUresult enter(const char *name, bool needsContext = true) {
  State &s = state();
  ++s.calls[name];
  auto it = s.failures.find(name);
  if (it != s.failures.end()) {
    if (it->second.second-- == 0) {
      auto result = static_cast<CUresult>(it->second.first);
      s.failures.erase(it);
      return result;
    }
  }
  if (const char *fail = std::getenv("COREY_FAKE_CUDA_FAIL")) {
    std::string text = fail;
    size_t colon = text.find(':');
    if (text.substr(0, colon) == name && colon != std::string::npos)
      return static_cast<CUresult>(std::atoi(text.c_str() + colon + 1));
  }
  return needsContext && contextStack.empty() ? CUDA_ERROR_INVALID_CONTEXT
                                              : CUDA_SUCCESS;
}

#define ENTER(name)                                                            \
  std::lock_guard<std::recursive_mutex> lock(state().mutex);                   \
  if (CUresult entered = enter(#name))                                         \
  return entered
#define ENTER_WITHOUT_CONTEXT(name)                                            \
  std::lock_guard<std::recursive_mutex> lock(state().mutex);                   \
  if (CUresult entered = enter(#name, false))                                  \
  return entered
/// For what a thread that captures may not do.
#define REFUSE_CAPTURE()                                                       \
  if (capturing && captureMode != CU_STREAM_CAPTURE_MODE_RELAXED)              \
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED

CUresult checkStream(CUstream stream) {
  return stream && reinterpret_cast<uintptr_t>(stream) > 2 &&
                 stream->context != contextStack.back()
             ? CUDA_ERROR_INVALID_CONTEXT
             : CUDA_SUCCESS;
}

/// Runs work, or keeps it in the graph that the stream captures.
CUresult put(CUstream stream, std::string kind, std::function<void()> work) {
  if (CUresult result = checkStream(stream))
    return result;
  if (reinterpret_cast<uintptr_t>(stream) > 2 && stream->capture) {
    stream->capture->nodes.push_back({std::move(kind), std::move(work)});
    stream->isJoined = false;
  } else {
    work();
  }
  return CUDA_SUCCESS;
}

bool inDeviceMemory(CUdeviceptr address, size_t bytes) {
  auto &allocations = state().allocations;
  auto it = allocations.upper_bound(address);
  if (it == allocations.begin())
    return false;
  --it;
  return address + bytes <= it->first + it->second.bytes;
}

void *hostOf(CUdeviceptr address) { return reinterpret_cast<void *>(address); }

CUresult copy(CUstream stream, const char *kind, void *to, const void *from,
              size_t bytes) {
  return put(stream, kind, [=] { std::memmove(to, from, bytes); });
}

const std::pair<CUresult, std::pair<const char *, const char *>> kErrors[] = {
    {CUDA_ERROR_INVALID_VALUE,
     {"CUDA_ERROR_INVALID_VALUE", "invalid argument"}},
    {CUDA_ERROR_OUT_OF_MEMORY, {"CUDA_ERROR_OUT_OF_MEMORY", "out of memory"}},
    {CUDA_ERROR_NO_DEVICE,
     {"CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"}},
    {CUDA_ERROR_INVALID_IMAGE,
     {"CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"}},
    {CUDA_ERROR_INVALID_CONTEXT,
     {"CUDA_ERROR_INVALID_CONTEXT", "invalid device context"}},
    {CUDA_ERROR_INVALID_PTX,
     {"CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"}},
    {CUDA_ERROR_ILLEGAL_ADDRESS,
     {"CUDA_ERROR_ILLEGAL_ADDRESS",
      "an illegal memory access was encountered"}},
    {CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
     {"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
      "too many resources requested for launch"}},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
     {"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
      "operation not permitted when stream is capturing"}},
};

const char kMark[] = "\x7f"
                     "ELF fake ";
} // namespace

//===----------------------------------------------------------------------===//
// Control
//===----------------------------------------------------------------------===//

extern "C" {
uint64_t corey_fake_calls(const char *function) {
  std::lock_guard<std::recursive_mutex> lock(state().mutex);
  uint64_t total = 0;
  for (auto &[name, count] : state().calls)
    if (!function || name == function)
      total += count;
  return total;
}
void corey_fake_reset_calls() {
  std::lock_guard<std::recursive_mutex> lock(state().mutex);
  state().calls.clear();
}
void corey_fake_fail(const char *function, int result, int skip) {
  std::lock_guard<std::recursive_mutex> lock(state().mutex);
  if (result)
    state().failures[function] = {result, skip};
  else
    state().failures.erase(function);
}
void corey_fake_set_devices(int count) { state().devices = count; }
void corey_fake_set_memory(uint64_t bytes) { state().memory = bytes; }
uint64_t corey_fake_memory_in_use() { return state().inUse; }
void corey_fake_hold_events(int hold) { state().holdEvents = hold; }
void corey_fake_register(const char *kernel, Kernel function) {
  state().kernels[kernel] = function;
}
void corey_fake_reset_kernels() { state().resetKernels(); }
}

std::vector<Launch> corey::fake::takeLaunches() {
  std::lock_guard<std::recursive_mutex> lock(state().mutex);
  return std::exchange(state().launches, {});
}

//===----------------------------------------------------------------------===//
// The driver
//===----------------------------------------------------------------------===//

extern "C" {
CUresult cuInit(unsigned) {
  ENTER_WITHOUT_CONTEXT(cuInit);
  return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int *version) {
  ENTER_WITHOUT_CONTEXT(cuDriverGetVersion);
  *version = 12080;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char **text) {
  for (auto &known : kErrors)
    if (known.first == error) {
      *text = known.second.first;
      return CUDA_SUCCESS;
    }
  return CUDA_ERROR_INVALID_VALUE;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
  for (auto &known : kErrors)
    if (known.first == error) {
      *text = known.second.second;
      return CUDA_SUCCESS;
    }
  return CUDA_ERROR_INVALID_VALUE;
}
CUresult cuDeviceGetCount(int *count) {
  ENTER_WITHOUT_CONTEXT(cuDeviceGetCount);
  *count = state().devices;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  ENTER_WITHOUT_CONTEXT(cuDeviceGet);
  if (ordinal < 0 || ordinal >= state().devices)
    return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
  ENTER_WITHOUT_CONTEXT(cuDeviceGetName);
  snprintf(name, size, "Fake H200 #%d", device);
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute,
                              CUdevice device) {
  ENTER_WITHOUT_CONTEXT(cuDeviceGetAttribute);
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
    *value = 1980000;
    break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
    *value = 132;
    break;
  case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE:
    *value = 3201000;
    break;
  case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH:
    *value = 6144;
    break;
  case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
    *value = 60 << 20;
    break;
  case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
    *value = 2048;
    break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
    *value = device == 0 ? 9 : 8;
    break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
    *value = 0;
    break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
    *value = 228 << 10;
    break;
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR:
    *value = 65536;
    break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
    *value = 227 << 10;
    break;
  default:
    return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice) {
  ENTER_WITHOUT_CONTEXT(cuDeviceTotalMem);
  *bytes = state().memory;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  ENTER_WITHOUT_CONTEXT(cuDevicePrimaryCtxRetain);
  *context = &state().contexts[device];
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) {
  ENTER_WITHOUT_CONTEXT(cuCtxGetCurrent);
  *context = contextStack.empty() ? nullptr : contextStack.back();
  return CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent_v2(CUcontext context) {
  ENTER_WITHOUT_CONTEXT(cuCtxPushCurrent);
  contextStack.push_back(context);
  return CUDA_SUCCESS;
}
CUresult cuCtxPopCurrent_v2(CUcontext *context) {
  ENTER(cuCtxPopCurrent);
  *context = contextStack.back();
  contextStack.pop_back();
  return CUDA_SUCCESS;
}
CUresult cuCtxSynchronize() {
  ENTER(cuCtxSynchronize);
  REFUSE_CAPTURE();
  return CUDA_SUCCESS;
}
CUresult cuMemGetInfo_v2(size_t *free, size_t *total) {
  ENTER(cuMemGetInfo);
  *total = state().memory;
  *free = *total - state().inUse;
  return CUDA_SUCCESS;
}
CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes) {
  ENTER(cuMemAlloc);
  REFUSE_CAPTURE();
  State &s = state();
  if (s.inUse + bytes > s.memory)
    return CUDA_ERROR_OUT_OF_MEMORY;
  void *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (!memory)
    return CUDA_ERROR_OUT_OF_MEMORY;
  std::memset(memory, 0xcd, bytes);
  s.inUse += bytes;
  *address = corey::cuda::driver::address(memory);
  s.allocations[*address] = {bytes, contextStack.back()->device};
  return CUDA_SUCCESS;
}
CUresult cuMemFree_v2(CUdeviceptr address) {
  ENTER(cuMemFree);
  REFUSE_CAPTURE();
  auto it = state().allocations.find(address);
  if (it == state().allocations.end())
    return CUDA_ERROR_INVALID_VALUE;
  state().inUse -= it->second.bytes;
  state().allocations.erase(it);
  std::free(hostOf(address));
  return CUDA_SUCCESS;
}
CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned) {
  ENTER(cuMemHostAlloc);
  REFUSE_CAPTURE();
  *address = std::malloc(bytes);
  return *address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemFreeHost(void *address) {
  ENTER(cuMemFreeHost);
  REFUSE_CAPTURE();
  std::free(address);
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute,
                               CUdeviceptr address) {
  ENTER_WITHOUT_CONTEXT(cuPointerGetAttribute);
  if (!inDeviceMemory(address, 1))
    return CUDA_ERROR_INVALID_VALUE;
  *static_cast<int *>(value) =
      std::prev(state().allocations.upper_bound(address))->second.device;
  return CUDA_SUCCESS;
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes,
                              CUstream stream) {
  ENTER(cuMemcpyHtoDAsync);
  if (!inDeviceMemory(to, bytes))
    return CUDA_ERROR_ILLEGAL_ADDRESS;
  return copy(stream, "memcpy", hostOf(to), from, bytes);
}
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes,
                              CUstream stream) {
  ENTER(cuMemcpyDtoHAsync);
  if (!inDeviceMemory(from, bytes))
    return CUDA_ERROR_ILLEGAL_ADDRESS;
  return copy(stream, "memcpy", to, hostOf(from), bytes);
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes,
                              CUstream stream) {
  ENTER(cuMemcpyDtoDAsync);
  if (!inDeviceMemory(to, bytes) || !inDeviceMemory(from, bytes))
    return CUDA_ERROR_ILLEGAL_ADDRESS;
  return copy(stream, "memcpy", hostOf(to), hostOf(from), bytes);
}
CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext, CUdeviceptr from,
                           CUcontext, size_t bytes, CUstream stream) {
  ENTER(cuMemcpyPeerAsync);
  if (!inDeviceMemory(to, bytes) || !inDeviceMemory(from, bytes))
    return CUDA_ERROR_ILLEGAL_ADDRESS;
  return copy(stream, "memcpy", hostOf(to), hostOf(from), bytes);
}

CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t bytes,
                         CUstream stream) {
  ENTER(cuMemsetD8Async);
  if (!inDeviceMemory(address, bytes))
    return CUDA_ERROR_ILLEGAL_ADDRESS;
  return put(stream, "memset",
             [=] { std::memset(hostOf(address), value, bytes); });
}

CUresult cuStreamCreate(CUstream *stream, unsigned) {
  ENTER(cuStreamCreate);
  *stream = new CUstream_st{contextStack.back(), nullptr};
  return CUDA_SUCCESS;
}
CUresult cuStreamDestroy_v2(CUstream stream) {
  ENTER(cuStreamDestroy);
  delete stream;
  return CUDA_SUCCESS;
}
CUresult cuStreamSynchronize(CUstream stream) {
  ENTER(cuStreamSynchronize);
  REFUSE_CAPTURE();
  return checkStream(stream);
}
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
  ENTER(cuStreamWaitEvent);
  if (CUresult result = checkStream(stream))
    return result;
  std::shared_ptr<CUgraph_st> capture = event->capture.lock();
  bool isReal = reinterpret_cast<uintptr_t>(stream) > 2;
  if (!capture)
    return isReal && stream->capture ? CUDA_ERROR_STREAM_CAPTURE_ISOLATION
                                     : CUDA_SUCCESS;
  if (!isReal || (stream->capture && stream->capture != capture))
    return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
  if (!stream->capture) {
    stream->capture = capture;
    stream->origin = event->stream->origin;
    stream->isJoined = false;
    state().forked.push_back(stream);
  }
  event->stream->isJoined = true;
  return CUDA_SUCCESS;
}
CUresult cuStreamGetCtx(CUstream stream, CUcontext *context) {
  ENTER(cuStreamGetCtx);
  *context = reinterpret_cast<uintptr_t>(stream) > 2 ? stream->context
                                                     : contextStack.back();
  return CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  ENTER(cuStreamIsCapturing);
  *status = reinterpret_cast<uintptr_t>(stream) > 2 && stream->capture
                ? CU_STREAM_CAPTURE_STATUS_ACTIVE
                : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode) {
  ENTER(cuStreamBeginCapture);
  if (reinterpret_cast<uintptr_t>(stream) <= 2 || stream->capture)
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  stream->capture = std::make_shared<CUgraph_st>();
  stream->origin = stream;
  ++capturing;
  return CUDA_SUCCESS;
}
CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
  ENTER(cuStreamEndCapture);
  if (!stream->capture || stream->origin != stream)
    return CUDA_ERROR_INVALID_VALUE;
  *graph = nullptr;
  bool isJoined = true;
  auto &forked = state().forked;
  for (size_t i = forked.size(); i-- > 0;)
    if (forked[i]->origin == stream) {
      isJoined &= forked[i]->isJoined;
      forked[i]->capture = nullptr;
      forked.erase(forked.begin() + static_cast<ptrdiff_t>(i));
    }
  if (isJoined)
    *graph = new CUgraph_st(*stream->capture);
  stream->capture = nullptr;
  --capturing;
  return isJoined ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
}
CUresult cuStreamGetCaptureInfo_v2(CUstream stream,
                                   CUstreamCaptureStatus *status, uint64_t *id,
                                   CUgraph *graph, const CUgraphNode **,
                                   size_t *) {
  ENTER(cuStreamGetCaptureInfo);
  bool captures = reinterpret_cast<uintptr_t>(stream) > 2 && stream->capture;
  *status = captures ? CU_STREAM_CAPTURE_STATUS_ACTIVE
                     : CU_STREAM_CAPTURE_STATUS_NONE;
  *graph = captures ? stream->capture.get() : nullptr;
  *id = 1;
  return CUDA_SUCCESS;
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
  ENTER_WITHOUT_CONTEXT(cuThreadExchangeStreamCaptureMode);
  std::swap(*mode, captureMode);
  return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent *event, unsigned flags) {
  ENTER(cuEventCreate);
  *event = new CUevent_st{!(flags & CU_EVENT_DISABLE_TIMING), false, {}};
  return CUDA_SUCCESS;
}
CUresult cuEventDestroy_v2(CUevent event) {
  ENTER(cuEventDestroy);
  delete event;
  return CUDA_SUCCESS;
}
CUresult cuEventRecord(CUevent event, CUstream stream) {
  ENTER(cuEventRecord);
  bool captures = reinterpret_cast<uintptr_t>(stream) > 2 && stream->capture;
  event->capture = captures ? stream->capture : nullptr;
  event->stream = captures ? stream : nullptr;
  if (captures)
    return checkStream(stream);
  return put(stream, "event", [=] {
    event->recorded = true;
    event->time = std::chrono::steady_clock::now();
  });
}
CUresult cuEventQuery(CUevent event) {
  ENTER(cuEventQuery);
  REFUSE_CAPTURE();
  if (!event->capture.expired())
    return CUDA_ERROR_CAPTURED_EVENT;
  return event->recorded && state().holdEvents ? CUDA_ERROR_NOT_READY
                                               : CUDA_SUCCESS;
}
CUresult cuEventSynchronize(CUevent) {
  ENTER(cuEventSynchronize);
  REFUSE_CAPTURE();
  return CUDA_SUCCESS;
}
CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end) {
  ENTER(cuEventElapsedTime);
  if (!start->timing || !end->timing || !start->recorded || !end->recorded)
    return CUDA_ERROR_INVALID_VALUE;
  *milliseconds =
      std::chrono::duration<float, std::milli>(end->time - start->time).count();
  return CUDA_SUCCESS;
}

/// A module of the kernels that the PTX has.
static CUmodule makeModule(const std::string &ptx) {
  auto made = std::make_unique<CUmod_st>();
  for (size_t at = 0; (at = ptx.find(".entry ", at)) != std::string::npos;) {
    at += 7;
    CUfunc_st function;
    function.name = ptx.substr(at, ptx.find_first_of("( \n", at) - at);
    size_t body = std::min(ptx.find('{', at), ptx.size());
    std::istringstream words(ptx.substr(at, body - at));
    bool afterParam = false;
    for (std::string word; words >> word;) {
      if (word.find(".param") != std::string::npos)
        afterParam = true;
      else if (afterParam && word.find_first_of("1368") != std::string::npos) {
        // .u64, .b32, .f16 and the like.
        function.parameters.push_back(
            std::strtoul(word.c_str() + word.find_first_of("1368"), nullptr,
                         10) /
            8);
        afterParam = false;
      }
    }
    made->functions[function.name] = function;
  }
  return made.release();
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  ENTER(cuModuleLoadData);
  REFUSE_CAPTURE();
  auto *text = static_cast<const char *>(image);
  if (std::strncmp(text, kMark, std::strlen(kMark)) != 0)
    return CUDA_ERROR_INVALID_IMAGE;
  *module = makeModule(text + std::strlen(kMark));
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned,
                            CUjit_option *, void **) {
  ENTER(cuModuleLoadDataEx);
  REFUSE_CAPTURE();
  *module = makeModule(static_cast<const char *>(image));
  return CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule module) {
  ENTER(cuModuleUnload);
  delete module;
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module,
                             const char *name) {
  ENTER(cuModuleGetFunction);
  auto it = module->functions.find(name);
  if (it == module->functions.end())
    return CUDA_ERROR_NOT_FOUND;
  *function = &it->second;
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute,
                            CUfunction function) {
  ENTER(cuFuncGetAttribute);
  switch (attribute) {
  case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    *value = 1024;
    break;
  case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
    *value = 1024;
    break;
  case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
    *value = 16;
    break;
  case CU_FUNC_ATTRIBUTE_NUM_REGS:
    *value = 40;
    break;
  case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
    *value = function->dynamicLimit;
    break;
  default:
    *value = 0;
  }
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute,
                            int value) {
  ENTER(cuFuncSetAttribute);
  if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
    function->dynamicLimit = value;
  else if (attribute == CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED)
    function->largeClusters = value != 0;
  return CUDA_SUCCESS;
}

static CUresult launchKernel(CUfunction function, Launch launch,
                             CUstream stream, void **arguments) {
  for (int i = 0; i < 3; ++i)
    if (!launch.grid[i] || !launch.block[i])
      return CUDA_ERROR_INVALID_VALUE;
  if (launch.sharedBytes > static_cast<unsigned>(function->dynamicLimit) ||
      (launch.cluster > 8 && !function->largeClusters))
    return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
  launch.kernel = function->name;
  launch.stream = stream;
  for (size_t i = 0; i < function->parameters.size(); ++i) {
    uint64_t value = 0;
    std::memcpy(&value, arguments[i], function->parameters[i]);
    launch.arguments.push_back(value);
  }
  return put(stream, "kernel", [launch] {
    state().launches.push_back(launch);
    auto it = state().kernels.find(launch.kernel);
    if (it != state().kernels.end())
      it->second(launch);
  });
}
CUresult cuLaunchKernel(CUfunction function, unsigned gridX, unsigned gridY,
                        unsigned gridZ, unsigned blockX, unsigned blockY,
                        unsigned blockZ, unsigned sharedBytes, CUstream stream,
                        void **arguments, void **) {
  ENTER(cuLaunchKernel);
  return launchKernel(function,
                      {"",
                       {gridX, gridY, gridZ},
                       {blockX, blockY, blockZ},
                       1,
                       sharedBytes,
                       false,
                       nullptr,
                       {}},
                      stream, arguments);
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction function,
                          void **arguments, void **) {
  ENTER(cuLaunchKernelEx);
  Launch launch{"",
                {c->gridDimX, c->gridDimY, c->gridDimZ},
                {c->blockDimX, c->blockDimY, c->blockDimZ},
                1,
                c->sharedMemBytes,
                false,
                nullptr,
                {}};
  for (unsigned i = 0; i < c->numAttrs; ++i) {
    if (c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
      launch.cluster = c->attrs[i].value.clusterDim.x;
    else
      launch.programmatic =
          c->attrs[i].value.programmaticStreamSerializationAllowed != 0;
  }
  return launchKernel(function, launch, c->hStream, arguments);
}

CUresult cuLinkCreate_v2(unsigned count, CUjit_option *options, void **values,
                         CUlinkState *link) {
  ENTER(cuLinkCreate);
  REFUSE_CAPTURE();
  *link = new CUlinkState_st;
  for (unsigned i = 0; i < count; ++i) {
    if (options[i] == CU_JIT_ERROR_LOG_BUFFER)
      (*link)->errors = static_cast<char *>(values[i]);
    if (options[i] == CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES)
      (*link)->errorBytes = reinterpret_cast<uintptr_t>(values[i]);
  }
  return CUDA_SUCCESS;
}
CUresult cuLinkAddData_v2(CUlinkState link, CUjitInputType, void *data, size_t,
                          const char *, unsigned, CUjit_option *, void **) {
  ENTER(cuLinkAddData);
  link->cubin = kMark + std::string(static_cast<const char *>(data));
  if (link->cubin.find("syntax error") == std::string::npos)
    return CUDA_SUCCESS;
  snprintf(link->errors, link->errorBytes,
           "ptxas application ptx input, line 3; fatal   : Parsing error\n");
  return CUDA_ERROR_INVALID_PTX;
}
CUresult cuLinkComplete(CUlinkState link, void **cubin, size_t *size) {
  ENTER(cuLinkComplete);
  *cubin = link->cubin.data();
  *size = link->cubin.size();
  return CUDA_SUCCESS;
}
CUresult cuLinkDestroy(CUlinkState link) {
  ENTER(cuLinkDestroy);
  delete link;
  return CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph,
                                     unsigned long long) {
  ENTER(cuGraphInstantiate);
  *exec = new CUgraphExec_st{*graph};
  return CUDA_SUCCESS;
}
CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) {
  ENTER(cuGraphLaunch);
  if (CUresult result = checkStream(stream))
    return result;
  for (Node &node : exec->graph.nodes)
    node.run();
  return CUDA_SUCCESS;
}
CUresult cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph,
                              CUgraphExecUpdateResultInfo *info) {
  ENTER(cuGraphExecUpdate);
  auto sameKind = [](const Node &a, const Node &b) { return a.kind == b.kind; };
  if (!std::equal(exec->graph.nodes.begin(), exec->graph.nodes.end(),
                  graph->nodes.begin(), graph->nodes.end(), sameKind)) {
    info->result = 2;
    return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
  }
  exec->graph = *graph;
  return CUDA_SUCCESS;
}
CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *, size_t *count) {
  ENTER(cuGraphGetNodes);
  *count = graph->nodes.size();
  return CUDA_SUCCESS;
}
CUresult cuGraphExecDestroy(CUgraphExec exec) {
  ENTER(cuGraphExecDestroy);
  delete exec;
  return CUDA_SUCCESS;
}
CUresult cuGraphDestroy(CUgraph graph) {
  ENTER(cuGraphDestroy);
  delete graph;
  return CUDA_SUCCESS;
}
CUresult cuUserObjectCreate(CUuserObject *object, void *pointer,
                            CUhostFn destroy, unsigned, unsigned) {
  ENTER(cuUserObjectCreate);
  auto made = std::make_shared<CUuserObject_st>();
  made->pointer = pointer;
  made->destroy = destroy;
  *object = made.get();
  state().objects[*object] = std::move(made);
  return CUDA_SUCCESS;
}
CUresult cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned,
                                 unsigned) {
  ENTER(cuGraphRetainUserObject);
  graph->objects.push_back(std::move(state().objects[object]));
  state().objects.erase(object);
  return CUDA_SUCCESS;
}
} // extern "C"
