//===- CUDADriver.h - The part of the CUDA driver API in use ----*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// Declarations of the driver API, binary compatible with CUDA 12.0 and newer,
// so that nothing of a toolkit is needed to build. libcuda is loaded at run
// time. The fake driver of the tests implements the same declarations.
//
//===----------------------------------------------------------------------===//

#ifndef COREY_DEVICE_CUDADRIVER_H
#define COREY_DEVICE_CUDADRIVER_H

#include "corey/Status.h"
#include <cstddef>
#include <cstdint>
#include <string>

namespace corey::cuda::driver {

using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st *;
using CUmodule = struct CUmod_st *;
using CUfunction = struct CUfunc_st *;
using CUstream = struct CUstream_st *;
using CUevent = struct CUevent_st *;
using CUgraph = struct CUgraph_st *;
using CUgraphExec = struct CUgraphExec_st *;
using CUgraphNode = struct CUgraphNode_st *;
using CUlinkState = struct CUlinkState_st *;
using CUuserObject = struct CUuserObject_st *;
using CUhostFn = void (*)(void *userData);

enum CUresult : int {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_NOT_INITIALIZED = 3,
  CUDA_ERROR_NO_DEVICE = 100,
  CUDA_ERROR_INVALID_DEVICE = 101,
  CUDA_ERROR_INVALID_IMAGE = 200,
  CUDA_ERROR_INVALID_CONTEXT = 201,
  CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
  CUDA_ERROR_INVALID_PTX = 218,
  CUDA_ERROR_NOT_FOUND = 500,
  CUDA_ERROR_NOT_READY = 600,
  CUDA_ERROR_ILLEGAL_ADDRESS = 700,
  CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701,
  CUDA_ERROR_NOT_SUPPORTED = 801,
  CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
  CUDA_ERROR_STREAM_CAPTURE_UNJOINED = 904,
  CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905,
  CUDA_ERROR_CAPTURED_EVENT = 907,
  CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE = 910,
};

enum CUdevice_attribute : int {
  CU_DEVICE_ATTRIBUTE_CLOCK_RATE = 13,
  CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
  CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE = 36,
  CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH = 37,
  CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE = 38,
  CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR = 39,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
  CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = 81,
  CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR = 82,
  CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
};

enum CUfunction_attribute : int {
  CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 0,
  CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1,
  CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES = 3,
  CU_FUNC_ATTRIBUTE_NUM_REGS = 4,
  CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,
  CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14,
};

enum CUjit_option : int {
  CU_JIT_INFO_LOG_BUFFER = 3,
  CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES = 4,
  CU_JIT_ERROR_LOG_BUFFER = 5,
  CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES = 6,
  CU_JIT_OPTIMIZATION_LEVEL = 7,
  CU_JIT_LOG_VERBOSE = 12,
  CU_JIT_GENERATE_LINE_INFO = 13,
};

enum CUjitInputType : int { CU_JIT_INPUT_CUBIN = 0, CU_JIT_INPUT_PTX = 1 };

enum : unsigned {
  CU_STREAM_NON_BLOCKING = 1,
  CU_EVENT_DEFAULT = 0,
  CU_EVENT_DISABLE_TIMING = 2,
  CU_USER_OBJECT_NO_DESTRUCTOR_SYNC = 1,
  CU_GRAPH_USER_OBJECT_MOVE = 1,
};

enum CUpointer_attribute : int { CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9 };

enum CUstreamCaptureMode : int {
  CU_STREAM_CAPTURE_MODE_GLOBAL = 0,
  CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1,
  CU_STREAM_CAPTURE_MODE_RELAXED = 2,
};

enum CUstreamCaptureStatus : int {
  CU_STREAM_CAPTURE_STATUS_NONE = 0,
  CU_STREAM_CAPTURE_STATUS_ACTIVE = 1,
  CU_STREAM_CAPTURE_STATUS_INVALIDATED = 2,
};

enum CUlaunchAttributeID : int {
  CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4,
  CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6,
};

union CUlaunchAttributeValue {
  char pad[64];
  struct {
    unsigned x, y, z;
  } clusterDim;
  int programmaticStreamSerializationAllowed;
};

struct CUlaunchAttribute {
  CUlaunchAttributeID id;
  char pad[8 - sizeof(CUlaunchAttributeID)];
  CUlaunchAttributeValue value;
};

struct CUlaunchConfig {
  unsigned gridDimX, gridDimY, gridDimZ;
  unsigned blockDimX, blockDimY, blockDimZ;
  unsigned sharedMemBytes;
  CUstream hStream;
  CUlaunchAttribute *attrs;
  unsigned numAttrs;
};

struct CUgraphExecUpdateResultInfo {
  int result;
  CUgraphNode errorNode, errorFromNode;
};

/// X(function, symbol in libcuda, parameters).
#define COREY_CUDA_DRIVER_FUNCTIONS(X)                                         \
  X(cuInit, "cuInit", (unsigned flags))                                        \
  X(cuDriverGetVersion, "cuDriverGetVersion", (int *version))                  \
  X(cuGetErrorName, "cuGetErrorName", (CUresult error, const char **text))     \
  X(cuGetErrorString, "cuGetErrorString", (CUresult error, const char **text)) \
  X(cuDeviceGetCount, "cuDeviceGetCount", (int *count))                        \
  X(cuDeviceGet, "cuDeviceGet", (CUdevice * device, int ordinal))              \
  X(cuDeviceGetName, "cuDeviceGetName",                                        \
    (char *name, int size, CUdevice device))                                   \
  X(cuDeviceGetAttribute, "cuDeviceGetAttribute",                              \
    (int *value, CUdevice_attribute attribute, CUdevice device))               \
  X(cuDeviceTotalMem, "cuDeviceTotalMem_v2", (size_t *bytes, CUdevice device)) \
  X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain",                      \
    (CUcontext * context, CUdevice device))                                    \
  X(cuCtxGetCurrent, "cuCtxGetCurrent", (CUcontext * context))                 \
  X(cuCtxPushCurrent, "cuCtxPushCurrent_v2", (CUcontext context))              \
  X(cuCtxPopCurrent, "cuCtxPopCurrent_v2", (CUcontext * context))              \
  X(cuCtxSynchronize, "cuCtxSynchronize", ())                                  \
  X(cuMemGetInfo, "cuMemGetInfo_v2", (size_t *free, size_t *total))            \
  X(cuMemAlloc, "cuMemAlloc_v2", (CUdeviceptr * address, size_t bytes))        \
  X(cuMemFree, "cuMemFree_v2", (CUdeviceptr address))                          \
  X(cuMemHostAlloc, "cuMemHostAlloc",                                          \
    (void **address, size_t bytes, unsigned flags))                            \
  X(cuMemFreeHost, "cuMemFreeHost", (void *address))                           \
  X(cuPointerGetAttribute, "cuPointerGetAttribute",                            \
    (void *value, CUpointer_attribute attribute, CUdeviceptr address))         \
  X(cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2",                                 \
    (CUdeviceptr to, const void *from, size_t bytes, CUstream stream))         \
  X(cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2",                                 \
    (void *to, CUdeviceptr from, size_t bytes, CUstream stream))               \
  X(cuMemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2",                                 \
    (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream))         \
  X(cuMemcpyPeerAsync, "cuMemcpyPeerAsync",                                    \
    (CUdeviceptr to, CUcontext toContext, CUdeviceptr from,                    \
     CUcontext fromContext, size_t bytes, CUstream stream))                    \
  X(cuMemsetD8Async, "cuMemsetD8Async",                                        \
    (CUdeviceptr address, unsigned char value, size_t bytes, CUstream stream)) \
  X(cuStreamCreate, "cuStreamCreate", (CUstream * stream, unsigned flags))     \
  X(cuStreamDestroy, "cuStreamDestroy_v2", (CUstream stream))                  \
  X(cuStreamSynchronize, "cuStreamSynchronize", (CUstream stream))             \
  X(cuStreamWaitEvent, "cuStreamWaitEvent",                                    \
    (CUstream stream, CUevent event, unsigned flags))                          \
  X(cuStreamGetCtx, "cuStreamGetCtx", (CUstream stream, CUcontext * context))  \
  X(cuStreamIsCapturing, "cuStreamIsCapturing",                                \
    (CUstream stream, CUstreamCaptureStatus * status))                         \
  X(cuStreamBeginCapture, "cuStreamBeginCapture_v2",                           \
    (CUstream stream, CUstreamCaptureMode mode))                               \
  X(cuStreamEndCapture, "cuStreamEndCapture",                                  \
    (CUstream stream, CUgraph * graph))                                        \
  X(cuStreamGetCaptureInfo, "cuStreamGetCaptureInfo_v2",                       \
    (CUstream stream, CUstreamCaptureStatus * status, uint64_t *id,            \
     CUgraph *graph, const CUgraphNode **dependencies, size_t *count))         \
  X(cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode",    \
    (CUstreamCaptureMode * mode))                                              \
  X(cuEventCreate, "cuEventCreate", (CUevent * event, unsigned flags))         \
  X(cuEventDestroy, "cuEventDestroy_v2", (CUevent event))                      \
  X(cuEventRecord, "cuEventRecord", (CUevent event, CUstream stream))          \
  X(cuEventQuery, "cuEventQuery", (CUevent event))                             \
  X(cuEventSynchronize, "cuEventSynchronize", (CUevent event))                 \
  X(cuEventElapsedTime, "cuEventElapsedTime",                                  \
    (float *milliseconds, CUevent start, CUevent end))                         \
  X(cuModuleLoadData, "cuModuleLoadData",                                      \
    (CUmodule * module, const void *image))                                    \
  X(cuModuleLoadDataEx, "cuModuleLoadDataEx",                                  \
    (CUmodule * module, const void *image, unsigned numOptions,                \
     CUjit_option *options, void **values))                                    \
  X(cuModuleUnload, "cuModuleUnload", (CUmodule module))                       \
  X(cuModuleGetFunction, "cuModuleGetFunction",                                \
    (CUfunction * function, CUmodule module, const char *name))                \
  X(cuFuncGetAttribute, "cuFuncGetAttribute",                                  \
    (int *value, CUfunction_attribute attribute, CUfunction function))         \
  X(cuFuncSetAttribute, "cuFuncSetAttribute",                                  \
    (CUfunction function, CUfunction_attribute attribute, int value))          \
  X(cuLaunchKernel, "cuLaunchKernel",                                          \
    (CUfunction function, unsigned gridX, unsigned gridY, unsigned gridZ,      \
     unsigned blockX, unsigned blockY, unsigned blockZ, unsigned sharedBytes,  \
     CUstream stream, void **arguments, void **extra))                         \
  X(cuLaunchKernelEx, "cuLaunchKernelEx",                                      \
    (const CUlaunchConfig *config, CUfunction function, void **arguments,      \
     void **extra))                                                            \
  X(cuLinkCreate, "cuLinkCreate_v2",                                           \
    (unsigned numOptions, CUjit_option *options, void **values,                \
     CUlinkState *state))                                                      \
  X(cuLinkAddData, "cuLinkAddData_v2",                                         \
    (CUlinkState state, CUjitInputType type, void *data, size_t size,          \
     const char *name, unsigned numOptions, CUjit_option *options,             \
     void **values))                                                           \
  X(cuLinkComplete, "cuLinkComplete",                                          \
    (CUlinkState state, void **cubin, size_t *size))                           \
  X(cuLinkDestroy, "cuLinkDestroy", (CUlinkState state))                       \
  X(cuGraphInstantiate, "cuGraphInstantiateWithFlags",                         \
    (CUgraphExec * exec, CUgraph graph, unsigned long long flags))             \
  X(cuGraphLaunch, "cuGraphLaunch", (CUgraphExec exec, CUstream stream))       \
  X(cuGraphExecUpdate, "cuGraphExecUpdate_v2",                                 \
    (CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo * info))     \
  X(cuGraphGetNodes, "cuGraphGetNodes",                                        \
    (CUgraph graph, CUgraphNode * nodes, size_t *count))                       \
  X(cuGraphExecDestroy, "cuGraphExecDestroy", (CUgraphExec exec))              \
  X(cuGraphDestroy, "cuGraphDestroy", (CUgraph graph))                         \
  X(cuUserObjectCreate, "cuUserObjectCreate",                                  \
    (CUuserObject * object, void *pointer, CUhostFn destroy, unsigned count,   \
     unsigned flags))                                                          \
  X(cuGraphRetainUserObject, "cuGraphRetainUserObject",                        \
    (CUgraph graph, CUuserObject object, unsigned count, unsigned flags))

/// The functions of a loaded libcuda, initialized.
struct Driver {
#define COREY_CUDA_MEMBER(name, symbol, parameters) CUresult(*name) parameters;
  COREY_CUDA_DRIVER_FUNCTIONS(COREY_CUDA_MEMBER)
#undef COREY_CUDA_MEMBER
  /// As cuDriverGetVersion() gives it: 1000 * major + 10 * minor.
  int version = 0;
};

/// The driver of the process, loaded by the first call that finds one; a later
/// call tries again while there is none. Thread-safe.
Expected<const Driver *> load();

/// Success, or "<what>: expected success, got <name> (<description>)".
Status check(const Driver &driver, CUresult result, const std::string &what);
inline Status check(const Driver &driver, CUresult result, const char *what) {
  return result == CUDA_SUCCESS ? Status::ok()
                                : check(driver, result, std::string(what));
}

/// Makes a context current for a scope and then the caller's again.
class ContextScope {
public:
  ContextScope(const Driver &driver, CUcontext context) : driver(driver) {
    CUcontext current = nullptr;
    // Asking is cheaper than a push and a pop, and the usual answer is yes.
    if (driver.cuCtxGetCurrent(&current) == CUDA_SUCCESS && current == context)
      return;
    result = driver.cuCtxPushCurrent(context);
    pushed = result == CUDA_SUCCESS;
  }
  ContextScope(const ContextScope &) = delete;
  ContextScope &operator=(const ContextScope &) = delete;
  ~ContextScope() {
    CUcontext popped;
    if (pushed)
      driver.cuCtxPopCurrent(&popped);
  }
  Status status() const {
    return check(driver, result, "making a CUDA context current");
  }

private:
  const Driver &driver;
  CUresult result = CUDA_SUCCESS;
  bool pushed = false;
};

/// Lets the thread allocate while another of its streams captures a graph.
class RelaxedCapture {
public:
  explicit RelaxedCapture(const Driver &driver) : driver(driver) {
    driver.cuThreadExchangeStreamCaptureMode(&mode);
  }
  RelaxedCapture(const RelaxedCapture &) = delete;
  RelaxedCapture &operator=(const RelaxedCapture &) = delete;
  ~RelaxedCapture() { driver.cuThreadExchangeStreamCaptureMode(&mode); }

private:
  const Driver &driver;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
};

inline CUdeviceptr address(const void *pointer) {
  return reinterpret_cast<CUdeviceptr>(pointer);
}

} // namespace corey::cuda::driver

#endif // COREY_DEVICE_CUDADRIVER_H
