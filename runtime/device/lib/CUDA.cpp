//===- CUDA.cpp - Devices, streams, events, graphs and launches -----------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Device/CUDA.h"
#include "CUDADriver.h"
#include <algorithm>

using namespace corey;
using namespace corey::cuda;
using namespace corey::cuda::driver;

static CUcontext contextOf(const Device &device) {
  return static_cast<CUcontext>(device.context());
}
static CUstream toStream(void *stream) { return static_cast<CUstream>(stream); }
static CUevent toEvent(void *event) { return static_cast<CUevent>(event); }

//===----------------------------------------------------------------------===//
// Devices
//===----------------------------------------------------------------------===//

Expected<int> cuda::deviceCount() {
  Expected<const Driver *> driver = load();
  if (!driver)
    return driver.takeStatus();
  int count = 0;
  if (Status status =
          check(**driver, (*driver)->cuDeviceGetCount(&count), "counting");
      !status)
    return Status::notFound("expected a CUDA device, got none: " +
                            status.message());
  if (count < 1)
    return Status::notFound(
        "expected a CUDA device, got none: the driver sees no device");
  return count;
}

Expected<std::shared_ptr<Device>> Device::get(int ordinal) {
  Expected<int> count = deviceCount();
  if (!count)
    return count.takeStatus();
  if (ordinal < 0 || ordinal >= *count)
    return Status::invalidArgument("expected a CUDA device from 0 to " +
                                   std::to_string(*count - 1) + ", got " +
                                   std::to_string(ordinal));
  // Never destroyed: others of static storage may free memory later.
  static std::mutex &mutex = *new std::mutex;
  static auto &devices = *new std::vector<std::shared_ptr<Device>>;
  std::lock_guard<std::mutex> lock(mutex);
  if (devices.size() <= static_cast<size_t>(ordinal))
    devices.resize(ordinal + 1);
  std::shared_ptr<Device> &device = devices[ordinal];
  if (!device) {
    std::shared_ptr<Device> made(new Device);
    if (Status status = made->initialize(ordinal); !status)
      return status;
    made->copies = makeCopies(made);
    device = std::move(made);
  }
  return device;
}

Status Device::initialize(int ordinal) {
  Expected<const Driver *> loaded = load();
  if (!loaded)
    return loaded.takeStatus();
  api = *loaded;
  number = ordinal;
  std::string what = "CUDA device " + std::to_string(ordinal);
  CUdevice device;
  if (Status status = check(*api, api->cuDeviceGet(&device, ordinal), what);
      !status)
    return status;
  char name[256] = "";
  CUresult result = api->cuDeviceGetName(name, sizeof name, device);
  props.name = name;
  auto attribute = [&](CUdevice_attribute which) {
    int value = 0;
    CUresult asked = api->cuDeviceGetAttribute(&value, which, device);
    if (result == CUDA_SUCCESS)
      result = asked;
    return value;
  };
  // Drivers may drop these.
  auto optional = [&](CUdevice_attribute which) {
    int value = 0;
    return api->cuDeviceGetAttribute(&value, which, device) == CUDA_SUCCESS
               ? value
               : 0;
  };
  props.major = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  props.minor = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  props.multiprocessors = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  props.sharedPerBlock =
      attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  props.sharedPerMultiprocessor =
      attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
  props.registersPerMultiprocessor =
      attribute(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR);
  props.threadsPerMultiprocessor =
      attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR);
  props.l2Bytes = attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
  props.clockKHz = optional(CU_DEVICE_ATTRIBUTE_CLOCK_RATE);
  props.memoryClockKHz = optional(CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE);
  props.memoryBusBits = optional(CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH);
  props.driverVersion = api->version;
  if (result == CUDA_SUCCESS)
    result = api->cuDeviceTotalMem(&props.memoryBytes, device);
  if (Status status = check(*api, result, what); !status)
    return status;
  target = "sm_" + std::to_string(props.major) + std::to_string(props.minor);
  // Instructions of one architecture only, such as wgmma, need the suffix.
  if (props.major >= 9)
    target += "a";
  if (const char *chip = std::getenv("COREY_CUDA_CHIP"))
    target = chip;
  CUcontext made = nullptr;
  if (Status status = check(*api, api->cuDevicePrimaryCtxRetain(&made, device),
                            what + ": its primary context");
      !status)
    return status;
  ctx = made;
  return Status::ok();
}

Expected<size_t> Device::freeMemory() const {
  ContextScope scope(*api, contextOf(*this));
  size_t free = 0, total = 0;
  if (Status status = check(*api, api->cuMemGetInfo(&free, &total),
                            "asking for free memory");
      !status)
    return status;
  return free;
}

Status Device::synchronize() const {
  ContextScope scope(*api, contextOf(*this));
  if (Status status = scope.status(); !status)
    return status;
  return check(*api, api->cuCtxSynchronize(), "waiting for the device");
}

int Device::ordinalOf(const void *pointer) {
  Expected<const Driver *> driver = load();
  int ordinal = -1;
  if (!driver || (*driver)->cuPointerGetAttribute(
                     &ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                     address(pointer)) != CUDA_SUCCESS)
    return -1;
  return ordinal;
}

Expected<bool> Device::isCapturing(void *stream) const {
  ContextScope scope(*api, contextOf(*this));
  CUstreamCaptureStatus state = CU_STREAM_CAPTURE_STATUS_NONE;
  if (Status status =
          check(*api, api->cuStreamIsCapturing(toStream(stream), &state),
                "asking whether a stream captures");
      !status)
    return status;
  return state != CU_STREAM_CAPTURE_STATUS_NONE;
}

Status Device::onGraphDestroyed(void *stream, void (*release)(void *),
                                void *data) const {
  ContextScope scope(*api, contextOf(*this));
  CUstreamCaptureStatus state = CU_STREAM_CAPTURE_STATUS_NONE;
  uint64_t id = 0;
  CUgraph graph = nullptr;
  const CUgraphNode *dependencies = nullptr;
  size_t count = 0;
  if (Status status =
          check(*api,
                api->cuStreamGetCaptureInfo(toStream(stream), &state, &id,
                                            &graph, &dependencies, &count),
                "asking for the graph of a stream");
      !status)
    return status;
  if (state != CU_STREAM_CAPTURE_STATUS_ACTIVE || !graph)
    return Status::invalidArgument(
        "expected a stream that captures a graph, got one that does not");
  CUuserObject object = nullptr;
  if (Status status =
          check(*api,
                api->cuUserObjectCreate(&object, data, release, 1,
                                        CU_USER_OBJECT_NO_DESTRUCTOR_SYNC),
                "cuUserObjectCreate");
      !status)
    return status;
  return check(
      *api,
      api->cuGraphRetainUserObject(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE),
      "cuGraphRetainUserObject");
}

//===----------------------------------------------------------------------===//
// Launches
//===----------------------------------------------------------------------===//

Status cuda::launch(const Device &device, const Function &function,
                    const LaunchConfig &config, void *stream,
                    void **arguments) {
  auto expected = [&](const std::string &what, const std::string &got) {
    return Status::invalidArgument("kernel '" + function.symbol +
                                   "': expected " + what + ", got " + got);
  };
  static constexpr int64_t gridLimit[] = {0x7fffffff, 65535, 65535};
  static constexpr int64_t blockLimit[] = {1024, 1024, 64};
  int64_t threads = 1;
  bool empty = false;
  for (int i = 0; i < 3; ++i) {
    if (config.grid[i] < 0 || config.grid[i] > gridLimit[i])
      return expected(std::string("grid ") + "xyz"[i] + " from 0 to " +
                          std::to_string(gridLimit[i]),
                      std::to_string(config.grid[i]));
    if (config.block[i] < 1 || config.block[i] > blockLimit[i])
      return expected(std::string("block ") + "xyz"[i] + " from 1 to " +
                          std::to_string(blockLimit[i]),
                      std::to_string(config.block[i]));
    threads *= config.block[i];
    empty |= config.grid[i] == 0;
  }
  if (threads > function.attrs.maxThreadsPerBlock)
    return expected("at most " +
                        std::to_string(function.attrs.maxThreadsPerBlock) +
                        " threads per block",
                    std::to_string(threads));
  if (empty)
    return Status::ok();
  if (config.clusterX < 1 || config.clusterX > 16 ||
      config.grid[0] % config.clusterX)
    return expected("clusters of 1 to 16 blocks that divide grid x of " +
                        std::to_string(config.grid[0]),
                    std::to_string(config.clusterX));
  int64_t sharedLimit =
      static_cast<int64_t>(device.properties().sharedPerBlock) -
      static_cast<int64_t>(function.attrs.sharedBytes);
  if (config.dynamicSharedBytes < 0 || config.dynamicSharedBytes > sharedLimit)
    return expected("0 to " + std::to_string(sharedLimit) +
                        " bytes of dynamic shared memory",
                    std::to_string(config.dynamicSharedBytes));
  const Driver &api = device.driver();
  ContextScope scope(api, contextOf(device));
  if (Status status = scope.status(); !status)
    return status;
  auto handle = static_cast<CUfunction>(function.handle);
  auto what = [&] { return "kernel '" + function.symbol + "'"; };
  // Both limits are raised once, to the most there is.
  if (config.dynamicSharedBytes >
      function.dynamicSharedLimit.load(std::memory_order_relaxed)) {
    if (CUresult result = api.cuFuncSetAttribute(
            handle, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            static_cast<int>(sharedLimit)))
      return check(api, result, what() + ": shared memory");
    function.dynamicSharedLimit.store(sharedLimit, std::memory_order_relaxed);
  }
  if (config.clusterX > 8 &&
      !function.largeClusters.load(std::memory_order_relaxed)) {
    if (CUresult result = api.cuFuncSetAttribute(
            handle, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1))
      return check(api, result, what() + ": clusters");
    function.largeClusters.store(true, std::memory_order_relaxed);
  }
  auto size = [](int64_t value) { return static_cast<unsigned>(value); };
  CUresult result;
  if (config.clusterX == 1 && !config.programmaticDependent) {
    result = api.cuLaunchKernel(
        handle, size(config.grid[0]), size(config.grid[1]),
        size(config.grid[2]), size(config.block[0]), size(config.block[1]),
        size(config.block[2]), size(config.dynamicSharedBytes),
        toStream(stream), arguments, nullptr);
  } else {
    CUlaunchAttribute attributes[2] = {};
    unsigned count = 0;
    if (config.clusterX > 1) {
      attributes[count].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
      attributes[count++].value.clusterDim = {size(config.clusterX), 1, 1};
    }
    if (config.programmaticDependent) {
      attributes[count].id =
          CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
      attributes[count++].value.programmaticStreamSerializationAllowed = 1;
    }
    CUlaunchConfig launchConfig = {size(config.grid[0]),
                                   size(config.grid[1]),
                                   size(config.grid[2]),
                                   size(config.block[0]),
                                   size(config.block[1]),
                                   size(config.block[2]),
                                   size(config.dynamicSharedBytes),
                                   toStream(stream),
                                   attributes,
                                   count};
    result = api.cuLaunchKernelEx(&launchConfig, handle, arguments, nullptr);
  }
  return result == CUDA_SUCCESS ? Status::ok() : check(api, result, what());
}

//===----------------------------------------------------------------------===//
// Streams
//===----------------------------------------------------------------------===//

Expected<Stream> Stream::create(std::shared_ptr<Device> device) {
  const Driver &api = device->driver();
  ContextScope scope(api, contextOf(*device));
  CUstream made = nullptr;
  if (Status status =
          check(api, api.cuStreamCreate(&made, CU_STREAM_NON_BLOCKING),
                "creating a stream");
      !status)
    return status;
  Stream stream;
  stream.device = std::move(device);
  stream.stream = made;
  stream.owned = true;
  return stream;
}

Expected<Stream> Stream::borrow(std::shared_ptr<Device> device, void *handle) {
  const Driver &api = device->driver();
  ContextScope scope(api, contextOf(*device));
  CUcontext context = nullptr;
  // The default streams belong to whatever context is current.
  if (Status status = check(api, api.cuStreamGetCtx(toStream(handle), &context),
                            "asking for the context of a stream");
      !status)
    return status;
  if (context != contextOf(*device))
    return Status::invalidArgument(
        "expected a stream of the primary context of CUDA device " +
        std::to_string(device->ordinal()) + ", got one of another context");
  Stream stream;
  stream.device = std::move(device);
  stream.stream = handle;
  return stream;
}

Stream &Stream::operator=(Stream &&other) noexcept {
  std::swap(device, other.device);
  std::swap(stream, other.stream);
  std::swap(owned, other.owned);
  return *this;
}

Stream::~Stream() {
  if (!owned || !stream)
    return;
  ContextScope scope(device->driver(), contextOf(*device));
  device->driver().cuStreamDestroy(toStream(stream));
}

Status Stream::synchronize() const {
  const Driver &api = device->driver();
  ContextScope scope(api, contextOf(*device));
  return check(api, api.cuStreamSynchronize(toStream(stream)),
               "waiting for a stream");
}

//===----------------------------------------------------------------------===//
// Events
//===----------------------------------------------------------------------===//

Expected<Event> Event::create(std::shared_ptr<Device> device, bool timing) {
  const Driver &api = device->driver();
  ContextScope scope(api, contextOf(*device));
  RelaxedCapture relaxed(api);
  CUevent made = nullptr;
  if (Status status =
          check(api,
                api.cuEventCreate(&made, timing ? CU_EVENT_DEFAULT
                                                : CU_EVENT_DISABLE_TIMING),
                "creating an event");
      !status)
    return status;
  Event event;
  event.device = std::move(device);
  event.event = made;
  return event;
}

Event &Event::operator=(Event &&other) noexcept {
  std::swap(device, other.device);
  std::swap(event, other.event);
  return *this;
}

Event::~Event() {
  if (!event)
    return;
  ContextScope scope(device->driver(), contextOf(*device));
  device->driver().cuEventDestroy(toEvent(event));
}

Status Event::record(void *stream) const {
  const Driver &api = device->driver();
  ContextScope scope(api, contextOf(*device));
  return check(api, api.cuEventRecord(toEvent(event), toStream(stream)),
               "recording an event");
}

Expected<bool> Event::isDone() const {
  const Driver &api = device->driver();
  ContextScope scope(api, contextOf(*device));
  CUresult result = api.cuEventQuery(toEvent(event));
  if (result == CUDA_ERROR_NOT_READY)
    return false;
  if (Status status = check(api, result, "asking for an event"); !status)
    return status;
  return true;
}

Status Event::synchronize() const {
  const Driver &api = device->driver();
  ContextScope scope(api, contextOf(*device));
  return check(api, api.cuEventSynchronize(toEvent(event)),
               "waiting for an event");
}

Status Event::block(void *stream) const {
  const Driver &api = device->driver();
  ContextScope scope(api, contextOf(*device));
  return check(api, api.cuStreamWaitEvent(toStream(stream), toEvent(event), 0),
               "having a stream wait for an event");
}

Expected<double> Event::milliseconds(const Event &start, const Event &end) {
  const Driver &api = start.device->driver();
  ContextScope scope(api, contextOf(*start.device));
  float elapsed = 0;
  if (Status status =
          check(api,
                api.cuEventElapsedTime(&elapsed, toEvent(start.event),
                                       toEvent(end.event)),
                "time between events");
      !status)
    return status;
  return static_cast<double>(elapsed);
}

//===----------------------------------------------------------------------===//
// Graphs
//===----------------------------------------------------------------------===//

Expected<void *> Graph::record(const Device &device, void *stream,
                               const std::function<Status()> &body,
                               size_t &nodes) {
  const Driver &api = device.driver();
  if (Status status =
          check(api,
                api.cuStreamBeginCapture(toStream(stream),
                                         CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
                "capturing a stream");
      !status)
    return status;
  Status status = body();
  CUgraph graph = nullptr;
  CUresult result = api.cuStreamEndCapture(toStream(stream), &graph);
  if (status && result != CUDA_SUCCESS)
    status = check(api, result, "ending the capture of a stream");
  if (status)
    status = check(api, api.cuGraphGetNodes(graph, nullptr, &nodes),
                   "counting the nodes of a graph");
  if (!status) {
    if (graph)
      api.cuGraphDestroy(graph);
    return status;
  }
  return static_cast<void *>(graph);
}

Status Graph::instantiate(void *graph) {
  const Driver &api = device->driver();
  CUgraphExec made = nullptr;
  if (Status status = check(
          api, api.cuGraphInstantiate(&made, static_cast<CUgraph>(graph), 0),
          "instantiating a graph");
      !status)
    return status;
  if (exec)
    api.cuGraphExecDestroy(static_cast<CUgraphExec>(exec));
  exec = made;
  ++instances;
  return Status::ok();
}

Expected<Graph> Graph::capture(std::shared_ptr<Device> device, void *stream,
                               const std::function<Status()> &body) {
  const Driver &api = device->driver();
  ContextScope scope(api, contextOf(*device));
  Graph graph;
  graph.device = device;
  Expected<void *> recorded = record(*device, stream, body, graph.nodes);
  if (!recorded)
    return recorded.takeStatus();
  Status status = graph.instantiate(*recorded);
  api.cuGraphDestroy(static_cast<CUgraph>(*recorded));
  if (!status)
    return status;
  return graph;
}

Status Graph::recapture(void *stream, const std::function<Status()> &body) {
  const Driver &api = device->driver();
  ContextScope scope(api, contextOf(*device));
  size_t count = 0;
  Expected<void *> recorded = record(*device, stream, body, count);
  if (!recorded)
    return recorded.takeStatus();
  auto graph = static_cast<CUgraph>(*recorded);
  CUgraphExecUpdateResultInfo info = {};
  Status status;
  CUresult result =
      api.cuGraphExecUpdate(static_cast<CUgraphExec>(exec), graph, &info);
  if (result == CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE)
    status = instantiate(graph);
  else
    status = check(api, result, "updating a graph");
  if (status)
    nodes = count;
  api.cuGraphDestroy(graph);
  return status;
}

Graph &Graph::operator=(Graph &&other) noexcept {
  std::swap(device, other.device);
  std::swap(exec, other.exec);
  std::swap(nodes, other.nodes);
  std::swap(instances, other.instances);
  return *this;
}

Graph::~Graph() {
  if (!exec)
    return;
  ContextScope scope(device->driver(), contextOf(*device));
  device->driver().cuGraphExecDestroy(static_cast<CUgraphExec>(exec));
}

Status Graph::launch(void *stream) const {
  const Driver &api = device->driver();
  ContextScope scope(api, contextOf(*device));
  return check(
      api, api.cuGraphLaunch(static_cast<CUgraphExec>(exec), toStream(stream)),
      "launching a graph");
}
