//===- CUDATest.cpp - CUDA devices, on a fake driver ----------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Device/CUDA.h"
#include "CUDADriver.h"
#include "FakeCUDA.h"
#include "SHA256.h"
#include "corey/Device/RuntimeABI.h"
#include "gtest/gtest.h"
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

using namespace corey;
using namespace corey::cuda;
using namespace corey::fake;
namespace fs = std::filesystem;

extern "C" uint64_t corey_fake_blaslt_calls(const char *function);

namespace {
constexpr const char *kPTX = R"(.version 8.0
.target sm_90a
.visible .entry scale(.param .u64 x, .param .u32 count, .param .f32 factor)
{ ret; }
.visible .entry nothing()
{ ret; }
)";

/// A folder that goes with the test, as the cache.
class CUDATest : public testing::Test {
protected:
  void SetUp() override {
    std::string name =
        (fs::temp_directory_path() / "corey-cuda-XXXXXX").string();
    ASSERT_TRUE(mkdtemp(name.data()));
    folder = name;
    setenv("COREY_CACHE_DIR", name.c_str(), 1);
    setenv("COREY_CUDA_DRIVER", COREY_FAKE_CUDA, 1);
    corey_fake_set_devices(2);
    takeLaunches();
  }
  void TearDown() override {
    fs::remove_all(folder);
    corey_fake_set_memory(uint64_t(1) << 30);
    corey_fake_hold_events(0);
  }
  std::shared_ptr<Device> get(int ordinal = 0) {
    Expected<std::shared_ptr<Device>> device = Device::get(ordinal);
    EXPECT_TRUE(device) << device.status().toString();
    return device ? *device : nullptr;
  }
  std::vector<fs::path> entries() const {
    std::vector<fs::path> list;
    if (fs::exists(folder / "cuda"))
      for (auto &entry : fs::directory_iterator(folder / "cuda"))
        list.push_back(entry.path());
    return list;
  }
  fs::path folder;
};

#define ASSERT_OK(...)                                                         \
  do {                                                                         \
    auto &&result = __VA_ARGS__;                                               \
    ASSERT_TRUE(bool(result)) << toStatus(result).toString();                  \
  } while (false)
Status toStatus(const Status &status) { return status; }
template <class T> Status toStatus(const Expected<T> &value) {
  return value.status();
}

bool contains(const Status &status, std::string_view text) {
  return status.message().find(text) != std::string::npos;
}

std::vector<float> numbers(size_t count, int seed = 1) {
  std::mt19937 random(seed);
  std::uniform_int_distribution<int> pick(-4, 4);
  std::vector<float> list(count);
  for (float &x : list)
    x = static_cast<float>(pick(random)) / 4;
  return list;
}

/// A copy of host memory on a device.
struct Buffer {
  Buffer(std::shared_ptr<Device> device, const void *data, size_t bytes)
      : device(device), bytes(bytes) {
    pointer = *device->allocate(bytes);
    if (data)
      EXPECT_TRUE(device->copyToDevice(pointer, data, bytes, nullptr));
  }
  template <class T>
  Buffer(std::shared_ptr<Device> device, const std::vector<T> &data)
      : Buffer(device, data.data(), data.size() * sizeof(T)) {}
  ~Buffer() { device->deallocate(pointer); }
  template <class T> std::vector<T> read() const {
    std::vector<T> data(bytes / sizeof(T));
    EXPECT_TRUE(device->copyToHost(data.data(), pointer, bytes, nullptr));
    EXPECT_TRUE(device->synchronize());
    return data;
  }
  std::shared_ptr<Device> device;
  size_t bytes;
  void *pointer;
};
} // namespace

//===----------------------------------------------------------------------===//
// Devices
//===----------------------------------------------------------------------===//

// First: a driver that was found stays.
TEST_F(CUDATest, AbsentDriver) {
  setenv("COREY_CUDA_DRIVER", "/nowhere/libcuda.so", 1);
  Expected<std::shared_ptr<Device>> device = Device::get(0);
  ASSERT_FALSE(device);
  EXPECT_EQ(device.status().code(), StatusCode::NotFound);
  EXPECT_TRUE(contains(device.status(), "expected a CUDA device, got none: "));
  EXPECT_TRUE(contains(device.status(), "/nowhere/libcuda.so"));
  EXPECT_EQ(Device::ordinalOf(&device), -1);
}

TEST_F(CUDATest, DriverOfAnotherKind) {
  setenv("COREY_CUDA_DRIVER", "libm.so.6", 1);
  Expected<int> count = deviceCount();
  ASSERT_FALSE(count);
  EXPECT_TRUE(contains(count.status(), "libm.so.6 lacks cuInit; expected a "
                                       "driver of CUDA 12.0 or newer"));
}

TEST_F(CUDATest, DriverThatDoesNotStart) {
  corey_fake_fail("cuInit", driver::CUDA_ERROR_NO_DEVICE, 0);
  Expected<int> count = deviceCount();
  corey_fake_fail("cuInit", 0, 0);
  // Unless an earlier test has loaded it.
  if (count)
    GTEST_SKIP();
  EXPECT_EQ(count.status().message(),
            "expected a CUDA device, got none: cuInit: expected success, got "
            "CUDA_ERROR_NO_DEVICE (no CUDA-capable device is detected)");
}

TEST_F(CUDATest, NoDevice) {
  corey_fake_set_devices(0);
  Expected<std::shared_ptr<Device>> device = Device::get(0);
  ASSERT_FALSE(device);
  EXPECT_EQ(device.status().message(), "expected a CUDA device, got none: the "
                                       "driver sees no device");
}

TEST_F(CUDATest, Properties) {
  std::shared_ptr<Device> device = get();
  EXPECT_EQ(device->chip(), "sm_90a");
  EXPECT_EQ(get(1)->chip(), "sm_80");
  const DeviceProperties &p = device->properties();
  EXPECT_EQ(p.name, "Fake H200 #0");
  EXPECT_EQ(p.multiprocessors, 132);
  EXPECT_EQ(p.sharedPerBlock, 227u << 10);
  EXPECT_EQ(p.sharedPerMultiprocessor, 228u << 10);
  EXPECT_EQ(p.l2Bytes, 60u << 20);
  EXPECT_EQ(p.memoryBytes, size_t(1) << 30);
  EXPECT_EQ(p.driverVersion, 12080);
  EXPECT_EQ(get(), device);
  Expected<std::shared_ptr<Device>> third = Device::get(2);
  ASSERT_FALSE(third);
  EXPECT_EQ(third.status().code(), StatusCode::InvalidArgument);
  EXPECT_EQ(third.status().message(),
            "expected a CUDA device from 0 to 1, got 2");
}

TEST_F(CUDATest, KeepsTheCallersContext) {
  std::shared_ptr<Device> first = get(0), second = get(1);
  const driver::Driver &api = first->driver();
  auto context = static_cast<driver::CUcontext>(second->context());
  ASSERT_EQ(api.cuCtxPushCurrent(context), driver::CUDA_SUCCESS);
  Buffer a(first, nullptr, 64), b(second, nullptr, 64);
  driver::CUcontext current;
  api.cuCtxGetCurrent(&current);
  EXPECT_EQ(current, context);
  EXPECT_EQ(Device::ordinalOf(a.pointer), 0);
  EXPECT_EQ(Device::ordinalOf(b.pointer), 1);
  api.cuCtxPopCurrent(&current);
  api.cuCtxGetCurrent(&current);
  EXPECT_EQ(current, nullptr);
}

//===----------------------------------------------------------------------===//
// Modules
//===----------------------------------------------------------------------===//

TEST(SHA256, Vectors) {
  auto hash = [](std::string_view text) {
    device::SHA256 hash;
    hash.add(text);
    return hash.finishHex();
  };
  EXPECT_EQ(hash(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b"
                      "7852b855");
  EXPECT_EQ(hash("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410f"
                         "f61f20015ad");
  EXPECT_EQ(hash("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  std::string million(1000000, 'a');
  EXPECT_EQ(hash(million), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046"
                           "d39ccc7112cd0");
  device::SHA256 pieces;
  for (size_t i = 0, n = 1; i < million.size(); i += n, n = n % 130 + 1)
    pieces.add(std::string_view(million).substr(i, n));
  EXPECT_EQ(pieces.finishHex(), hash(million));
}

TEST_F(CUDATest, CompilesOnceForAllProcesses) {
  std::shared_ptr<Device> device = get();
  ModuleCacheCounts before = Device::moduleCacheCounts();
  auto since = [&] {
    ModuleCacheCounts now = Device::moduleCacheCounts();
    return std::array<uint64_t, 3>{now.memory - before.memory,
                                   now.disk - before.disk,
                                   now.compiled - before.compiled};
  };
  using Counts = std::array<uint64_t, 3>;
  {
    Expected<std::shared_ptr<Module>> first = device->loadModule(kPTX);
    ASSERT_OK(first);
    EXPECT_EQ(since(), (Counts{0, 0, 1}));
    EXPECT_EQ(*device->loadModule(kPTX), *first);
    EXPECT_EQ(since(), (Counts{1, 0, 1}));
    ASSERT_EQ(entries().size(), 1u);
    // Other options and other devices are other kernels.
    ModuleOptions options;
    options.optLevel = 1;
    ASSERT_OK(device->loadModule(kPTX, options));
    ASSERT_OK(get(1)->loadModule(kPTX));
    EXPECT_EQ(since(), (Counts{1, 0, 3}));
    EXPECT_EQ(entries().size(), 3u);
  }
  // Nobody holds it: as in a new process.
  ASSERT_OK(device->loadModule(kPTX));
  EXPECT_EQ(since(), (Counts{1, 1, 3}));
  for (size_t damage = 0; damage < 4; ++damage) {
    for (const fs::path &path : entries()) {
      std::string bytes;
      {
        std::ifstream file(path, std::ios::binary);
        bytes.assign(std::istreambuf_iterator<char>(file), {});
      }
      if (damage == 0)
        bytes.resize(bytes.size() / 2);
      else if (damage == 1)
        bytes.back() ^= 1;
      else if (damage == 2)
        bytes += "more";
      else
        bytes.clear();
      std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
    }
    ASSERT_OK(device->loadModule(kPTX));
    EXPECT_EQ(since(), (Counts{1, 1 + damage, 4 + damage}));
    ASSERT_OK(device->loadModule(kPTX));
    EXPECT_EQ(since(), (Counts{1, 2 + damage, 4 + damage}));
  }
}

TEST_F(CUDATest, CacheCanBeOff) {
  for (const char *off : {"", "off"}) {
    setenv("COREY_CACHE_DIR", off, 1);
    ASSERT_OK(get()->loadModule(kPTX));
  }
  EXPECT_TRUE(entries().empty());
  EXPECT_FALSE(fs::exists("off"));
  // One that cannot be written is no error.
  setenv("COREY_CACHE_DIR", "/proc/nowhere", 1);
  ASSERT_OK(get()->loadModule(kPTX));
}

TEST_F(CUDATest, KernelsThatTradeRegistersAreNotLinked) {
  // The linker's compiler would ignore it, and hand out slower kernels.
  std::string ptx = kPTX;
  ptx += "// setmaxnreg.inc.sync.aligned.u32 240;\n";
  corey_fake_reset_calls();
  Expected<std::shared_ptr<Module>> module = get()->loadModule(ptx);
  ASSERT_OK(module);
  EXPECT_EQ(corey_fake_calls("cuLinkCreate"), 0u);
  EXPECT_EQ(corey_fake_calls("cuModuleLoadDataEx"), 1u);
  EXPECT_TRUE((*module)->function("scale"));
  EXPECT_TRUE(entries().empty());
  EXPECT_EQ(*get()->loadModule(ptx), *module);
  EXPECT_EQ(corey_fake_calls("cuModuleLoadDataEx"), 1u);
  corey_fake_fail("cuModuleLoadDataEx", driver::CUDA_ERROR_INVALID_PTX, 0);
  ptx += "\n";
  module = get()->loadModule(ptx);
  ASSERT_FALSE(module);
  EXPECT_EQ(module.status().code(), StatusCode::CompileError);
}

TEST_F(CUDATest, CompilerLogIsInTheError) {
  Expected<std::shared_ptr<Module>> module =
      get()->loadModule(".version 8.0\nsyntax error\n");
  ASSERT_FALSE(module);
  EXPECT_EQ(module.status().code(), StatusCode::CompileError);
  EXPECT_EQ(module.status().message(),
            "compiling PTX for sm_90a: expected success, got "
            "CUDA_ERROR_INVALID_PTX (a PTX JIT compilation failed)\n"
            "ptxas application ptx input, line 3; fatal   : Parsing error");
  EXPECT_TRUE(entries().empty());
}

TEST_F(CUDATest, FunctionsAndAttributes) {
  std::shared_ptr<Module> module = *get()->loadModule(kPTX);
  Expected<const Function *> function = module->function("scale");
  ASSERT_OK(function);
  EXPECT_EQ((*function)->name(), "scale");
  EXPECT_EQ((*function)->attributes().registers, 40);
  EXPECT_EQ((*function)->attributes().localBytes, 16u);
  EXPECT_EQ((*function)->attributes().sharedBytes, 1024u);
  EXPECT_EQ((*function)->attributes().maxThreadsPerBlock, 1024);
  EXPECT_EQ(*module->function("scale"), *function);
  Expected<const Function *> other = module->function("other");
  ASSERT_FALSE(other);
  EXPECT_EQ(other.status().message(),
            "expected a kernel of the module, got 'other'");
  // It was not there, and is not there afterwards either.
  EXPECT_FALSE(module->function("other"));
}

//===----------------------------------------------------------------------===//
// Launches
//===----------------------------------------------------------------------===//

TEST_F(CUDATest, Launches) {
  std::shared_ptr<Device> device = get();
  std::shared_ptr<Module> module = *device->loadModule(kPTX);
  const Function &scale = **module->function("scale");
  Stream stream = std::move(*Stream::create(device));
  uint64_t x = 0x123456789abc;
  uint32_t count = 7;
  float factor = 2;
  void *arguments[] = {&x, &count, &factor};
  LaunchConfig config;
  config.grid = {3, 4, 5};
  config.block = {32, 2, 1};
  corey_fake_reset_calls();
  ASSERT_OK(launch(*device, scale, config, stream.handle(), arguments));
  EXPECT_EQ(corey_fake_calls("cuLaunchKernel"), 1u);
  config.clusterX = 3;
  config.programmaticDependent = true;
  config.dynamicSharedBytes = 100000;
  for (int i = 0; i < 2; ++i)
    ASSERT_OK(launch(*device, scale, config, stream.handle(), arguments));
  EXPECT_EQ(corey_fake_calls("cuLaunchKernelEx"), 2u);
  EXPECT_EQ(corey_fake_calls("cuFuncSetAttribute"), 1u);
  config.clusterX = 16;
  config.grid[0] = 32;
  for (int i = 0; i < 2; ++i)
    ASSERT_OK(launch(*device, scale, config, stream.handle(), arguments));
  EXPECT_EQ(corey_fake_calls("cuFuncSetAttribute"), 2u);
  std::vector<Launch> launches = takeLaunches();
  ASSERT_EQ(launches.size(), 5u);
  EXPECT_EQ(launches[0].kernel, "scale");
  EXPECT_EQ(launches[0].grid[2], 5u);
  EXPECT_EQ(launches[0].block[1], 2u);
  EXPECT_EQ(launches[0].cluster, 1u);
  EXPECT_FALSE(launches[0].programmatic);
  EXPECT_EQ(launches[0].stream, stream.handle());
  EXPECT_EQ(launches[0].arguments, (std::vector<uint64_t>{x, 7, 0x40000000}));
  EXPECT_EQ(launches[1].cluster, 3u);
  EXPECT_TRUE(launches[1].programmatic);
  EXPECT_EQ(launches[1].sharedBytes, 100000u);
}

TEST_F(CUDATest, LaunchLimits) {
  std::shared_ptr<Device> device = get();
  std::shared_ptr<Module> module = *device->loadModule(kPTX);
  const Function &nothing = **module->function("nothing");
  auto tryOut = [&](auto change) {
    LaunchConfig config;
    change(config);
    return launch(*device, nothing, config, nullptr, nullptr).message();
  };
  using C = LaunchConfig;
  EXPECT_EQ(tryOut([](C &c) { c.grid[0] = int64_t(1) << 31; }),
            "kernel 'nothing': expected grid x from 0 to 2147483647, got "
            "2147483648");
  EXPECT_EQ(tryOut([](C &c) { c.grid[1] = 65536; }),
            "kernel 'nothing': expected grid y from 0 to 65535, got 65536");
  EXPECT_EQ(tryOut([](C &c) { c.grid[2] = -1; }),
            "kernel 'nothing': expected grid z from 0 to 65535, got -1");
  EXPECT_EQ(tryOut([](C &c) { c.block[2] = 65; }),
            "kernel 'nothing': expected block z from 1 to 64, got 65");
  EXPECT_EQ(tryOut([](C &c) { c.block = {64, 32, 1}; }),
            "kernel 'nothing': expected at most 1024 threads per block, got "
            "2048");
  EXPECT_EQ(tryOut([](C &c) { c.clusterX = 2; }),
            "kernel 'nothing': expected clusters of 1 to 16 blocks that divide "
            "grid x of 1, got 2");
  EXPECT_EQ(tryOut([](C &c) { c.dynamicSharedBytes = 227 << 10; }),
            "kernel 'nothing': expected 0 to 231424 bytes of dynamic shared "
            "memory, got 232448");
  EXPECT_TRUE(takeLaunches().empty());
  for (int axis = 0; axis < 3; ++axis)
    EXPECT_EQ(tryOut([&](C &c) { c.grid[axis] = 0; }), "");
  EXPECT_TRUE(takeLaunches().empty());
  EXPECT_EQ(tryOut([](C &c) { c.grid = {0x7fffffff, 65535, 65535}; }), "");
  EXPECT_EQ(takeLaunches().size(), 1u);
  corey_fake_fail("cuLaunchKernel", driver::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
                  0);
  Status status = launch(*device, nothing, {}, nullptr, nullptr);
  EXPECT_EQ(status.code(), StatusCode::DeviceError);
  EXPECT_EQ(status.message(),
            "kernel 'nothing': expected success, got "
            "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES (too many resources requested "
            "for launch)");
}

//===----------------------------------------------------------------------===//
// Streams, events, graphs
//===----------------------------------------------------------------------===//

TEST_F(CUDATest, StreamsBelongToADevice) {
  std::shared_ptr<Device> first = get(0), second = get(1);
  Stream stream = std::move(*Stream::create(first));
  ASSERT_OK(Stream::borrow(first, stream.handle()));
  Expected<Stream> wrong = Stream::borrow(second, stream.handle());
  ASSERT_FALSE(wrong);
  EXPECT_TRUE(contains(wrong.status(), "primary context of CUDA device 1"));
  ASSERT_OK(Stream::borrow(second, nullptr));
  corey_fake_reset_calls();
  {
    Stream moved = std::move(stream);
  }
  EXPECT_EQ(corey_fake_calls("cuStreamDestroy"), 1u);
}

TEST_F(CUDATest, Events) {
  std::shared_ptr<Device> device = get();
  Stream stream = std::move(*Stream::create(device));
  Event start = std::move(*Event::create(device, true));
  Event end = std::move(*Event::create(device, true));
  ASSERT_OK(start.record(stream.handle()));
  ASSERT_OK(end.record(stream.handle()));
  ASSERT_OK(end.block(stream.handle()));
  ASSERT_OK(end.synchronize());
  EXPECT_TRUE(*end.isDone());
  EXPECT_GE(*Event::milliseconds(start, end), 0);
  corey_fake_hold_events(1);
  EXPECT_FALSE(*end.isDone());
  Event untimed = std::move(*Event::create(device));
  ASSERT_OK(untimed.record(stream.handle()));
  EXPECT_FALSE(Event::milliseconds(start, untimed));
}

TEST_F(CUDATest, Graphs) {
  std::shared_ptr<Device> device = get();
  std::shared_ptr<Module> module = *device->loadModule(kPTX);
  const Function &scale = **module->function("scale");
  Stream stream = std::move(*Stream::create(device));
  uint64_t x = 1;
  uint32_t count = 1;
  float factor = 1;
  void *arguments[] = {&x, &count, &factor};
  int launches = 2;
  auto body = [&]() -> Status {
    EXPECT_TRUE(*device->isCapturing(stream.handle()));
    for (int i = 0; i < launches; ++i)
      if (Status status =
              launch(*device, scale, {}, stream.handle(), arguments);
          !status)
        return status;
    return Status::ok();
  };
  Expected<Graph> graph = Graph::capture(device, stream.handle(), body);
  ASSERT_OK(graph);
  EXPECT_FALSE(*device->isCapturing(stream.handle()));
  EXPECT_EQ(graph->numNodes(), 2u);
  EXPECT_TRUE(takeLaunches().empty());
  x = 5;
  ASSERT_OK(graph->launch(stream.handle()));
  ASSERT_OK(graph->launch(stream.handle()));
  std::vector<Launch> seen = takeLaunches();
  ASSERT_EQ(seen.size(), 4u);
  EXPECT_EQ(seen[3].arguments[0], 1u);
  // Other arguments are updated in place, other work is instantiated.
  ASSERT_OK(graph->recapture(stream.handle(), body));
  EXPECT_EQ(graph->instantiations(), 1u);
  ASSERT_OK(graph->launch(stream.handle()));
  EXPECT_EQ(takeLaunches()[0].arguments[0], 5u);
  launches = 3;
  ASSERT_OK(graph->recapture(stream.handle(), body));
  EXPECT_EQ(graph->instantiations(), 2u);
  EXPECT_EQ(graph->numNodes(), 3u);
  ASSERT_OK(graph->launch(stream.handle()));
  EXPECT_EQ(takeLaunches().size(), 3u);
  // An error leaves the stream as it was.
  Status failed = graph->recapture(
      stream.handle(), [] { return Status::invalidArgument("no"); });
  EXPECT_EQ(failed.message(), "no");
  EXPECT_FALSE(*device->isCapturing(stream.handle()));
  EXPECT_FALSE(Graph::capture(device, nullptr, body));
}

TEST_F(CUDATest, GraphsKeepWhatTheyUse) {
  std::shared_ptr<Device> device = get();
  Stream stream = std::move(*Stream::create(device));
  int released = 0;
  auto release = [](void *data) { ++*static_cast<int *>(data); };
  {
    Expected<Graph> graph = Graph::capture(device, stream.handle(), [&] {
      // Memory may be taken while capturing.
      Buffer buffer(device, nullptr, 64);
      return device->onGraphDestroyed(stream.handle(), release, &released);
    });
    ASSERT_OK(graph);
    EXPECT_EQ(released, 0);
  }
  EXPECT_EQ(released, 1);
  EXPECT_EQ(
      device->onGraphDestroyed(stream.handle(), release, &released).code(),
      StatusCode::InvalidArgument);
}

//===----------------------------------------------------------------------===//
// Memory
//===----------------------------------------------------------------------===//

TEST_F(CUDATest, ArenaReusesBlocks) {
  std::shared_ptr<Device> device = get();
  uint64_t inUse = corey_fake_memory_in_use();
  {
    Arena arena(device);
    void *a = arena.allocate(1000), *b = arena.allocate(1000);
    EXPECT_NE(a, b);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(a) % 256, 0u);
    arena.release(a);
    EXPECT_EQ(arena.allocate(990), a);
    arena.release(nullptr);
    arena.releaseAll();
    corey_fake_reset_calls();
    for (int i = 0; i < 10; ++i) {
      void *c = arena.allocate(1000), *d = arena.allocate(1000);
      EXPECT_TRUE((c == a && d == b) || (c == b && d == a));
      arena.releaseAll();
    }
    EXPECT_EQ(corey_fake_calls(nullptr), 0u);
    EXPECT_EQ(arena.driverAllocations(), 2u);
    EXPECT_EQ(corey_fake_memory_in_use() - inUse, arena.bytesReserved());
  }
  EXPECT_EQ(corey_fake_memory_in_use(), inUse);
}

TEST_F(CUDATest, ArenaGivesBackBeforeItFails) {
  std::shared_ptr<Device> device = get();
  corey_fake_set_memory(corey_fake_memory_in_use() + (1 << 20));
  Arena arena(device);
  void *a = arena.allocate(700 << 10);
  ASSERT_TRUE(a);
  arena.release(a);
  ASSERT_TRUE(arena.allocate(900 << 10));
  Status status;
  EXPECT_FALSE(arena.allocate(512 << 10, &status));
  EXPECT_EQ(status.code(), StatusCode::OutOfMemory);
  EXPECT_EQ(status.message(),
            "allocating 524288 bytes of device memory: expected success, got "
            "CUDA_ERROR_OUT_OF_MEMORY (out of memory)");
  EXPECT_FALSE(arena.allocate(size_t(1) << 60, &status));
  arena.releaseAll();
  // Not where a graph uses the blocks.
  arena.keepBlocks();
  EXPECT_FALSE(arena.allocate(512 << 10));
}

TEST_F(CUDATest, LinearCopies) {
  std::shared_ptr<Device> first = get(0), second = get(1);
  std::vector<float> data = numbers(100);
  Buffer a(first, data), b(second, nullptr, 400), c(second, nullptr, 400);
  ASSERT_OK(second->copyFromPeer(b.pointer, *first, a.pointer, 400, nullptr));
  ASSERT_OK(second->copyOnDevice(c.pointer, b.pointer, 400, nullptr));
  EXPECT_EQ(c.read<float>(), data);
  ASSERT_OK(second->memset(c.pointer, 0, 396, nullptr));
  EXPECT_EQ(c.read<float>()[98], 0);
  EXPECT_EQ(c.read<float>()[99], data[99]);
  ASSERT_OK(second->copyOnDevice(nullptr, nullptr, 0, nullptr));
  Status status = first->copyOnDevice(a.pointer, &data, 400, nullptr);
  EXPECT_EQ(status.message(),
            "copying on the device: expected success, got "
            "CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access was "
            "encountered)");
  PinnedBuffer pinned = std::move(*PinnedBuffer::allocate(first, 400));
  ASSERT_OK(first->copyToHost(pinned.data(), a.pointer, 400, nullptr));
  EXPECT_EQ(std::memcmp(pinned.data(), data.data(), 400), 0);
}

TEST_F(CUDATest, StridedCopiesAgreeWithLoops) {
  std::shared_ptr<Device> device = get();
  std::mt19937 random(3);
  auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  constexpr int64_t kElements = 1 << 16;
  for (int round = 0; round < 400; ++round) {
    size_t rank = pick(0, 5);
    size_t bytes = size_t(1) << pick(0, 3);
    std::vector<int64_t> sizes(rank), to(rank), from(rank), order(rank);
    for (int64_t &size : sizes)
      size = pick(1, rank <= 2 ? 90 : rank == 3 ? 20 : 5);
    if (rank && pick(0, 20) == 0)
      sizes[pick(0, rank - 1)] = 0;
    // Strides of a random order of axes, with gaps and signs.
    auto makeStrides = [&](std::vector<int64_t> &strides, bool overlap) {
      for (size_t i = 0; i < rank; ++i)
        order[i] = i;
      if (pick(0, 1))
        std::shuffle(order.begin(), order.end(), random);
      int64_t step = 1, offset = 0;
      for (size_t i = rank; i-- > 0;) {
        int64_t axis = order[i];
        if (pick(0, 3) == 0)
          step += pick(0, 2);
        strides[axis] = pick(0, 7) == 0 ? -step : step;
        if (overlap && pick(0, 9) == 0)
          strides[axis] = 0;
        if (strides[axis] < 0)
          offset += step * (std::max<int64_t>(sizes[axis], 1) - 1);
        step *= std::max<int64_t>(sizes[axis], 1);
      }
      return offset;
    };
    int64_t toOffset = makeStrides(to, false);
    int64_t fromOffset = makeStrides(from, true);
    std::vector<char> source(kElements * bytes), target(kElements * bytes, 0);
    for (char &byte : source)
      byte = static_cast<char>(pick(0, 255));
    Buffer a(device, source), b(device, target);
    ASSERT_OK(device->copyStrided(
        static_cast<char *>(b.pointer) + toOffset * bytes, to.data(),
        static_cast<char *>(a.pointer) + fromOffset * bytes, from.data(),
        sizes.data(), rank, bytes, nullptr));
    std::function<void(size_t, int64_t, int64_t)> loop =
        [&](size_t axis, int64_t t, int64_t f) {
          if (axis == rank) {
            std::memcpy(&target[t * bytes], &source[f * bytes], bytes);
            return;
          }
          for (int64_t i = 0; i < sizes[axis]; ++i)
            loop(axis + 1, t + i * to[axis], f + i * from[axis]);
        };
    loop(0, toOffset, fromOffset);
    ASSERT_EQ(b.read<char>(), target) << round;
  }
}

// Sizes of whole and ragged tiles, and axes that only copies of single elements
// could take before.
TEST_F(CUDATest, StridedCopiesTakeOneOperation) {
  std::shared_ptr<Device> device = get();
  auto run = [&](std::vector<int64_t> sizes, std::vector<int64_t> to,
                 std::vector<int64_t> from, size_t bytes = 4) {
    Buffer a(device, nullptr, 1 << 20), b(device, nullptr, 1 << 20);
    takeLaunches();
    corey_fake_reset_calls();
    EXPECT_TRUE(device->copyStrided(b.pointer, to.data(), a.pointer,
                                    from.data(), sizes.data(), sizes.size(),
                                    bytes, nullptr));
    std::string done(corey_fake_calls("cuMemcpyDtoDAsync"), 'd');
    for (const Launch &launch : takeLaunches())
      done += (done.empty() ? "" : " ") + launch.kernel + " of " +
              std::to_string(launch.grid[0]);
    return done;
  };
  EXPECT_EQ(run({}, {}, {}), "d");
  EXPECT_EQ(run({2, 3, 4}, {12, 4, 1}, {12, 4, 1}), "d");
  EXPECT_EQ(run({2, 0, 4}, {12, 4, 1}, {30, 10, 1}), "");
  // Runs move by the largest words that they are made of.
  EXPECT_EQ(run({2, 3, 4}, {12, 4, 1}, {30, 10, 1}), "corey_copy_8 of 1");
  EXPECT_EQ(run({2, 3, 5}, {15, 5, 1}, {30, 10, 1}), "corey_copy_4 of 1");
  EXPECT_EQ(run({2, 3, 6}, {18, 6, 1}, {30, 10, 1}, 1), "corey_copy_2 of 1");
  EXPECT_EQ(run({200, 3}, {3, 1}, {6, 2}), "corey_copy_4 of 3");
  EXPECT_EQ(run({5, 2, 3, 4}, {24, 12, 4, 1}, {100, 40, 10, 1}, 8),
            "corey_copy_8 of 1");
  // Transposed, by tiles of 32 or 64.
  EXPECT_EQ(run({2, 50, 8}, {400, 8, 1}, {400, 1, 50}),
            "corey_transpose_4 of 4");
  EXPECT_EQ(run({2, 50, 65}, {3250, 65, 1}, {3250, 1, 50}, 2),
            "corey_transpose_2 of 4");
  EXPECT_EQ(run({2, 50, 7}, {350, 7, 1}, {350, 1, 50}), "corey_copy_4 of 3");
  // What is repeated has no order.
  EXPECT_EQ(run({50, 80}, {80, 1}, {0, 7}), "corey_copy_4 of 16");
  EXPECT_EQ(run({50, 80}, {80, 1}, {7, 0}), "corey_copy_4 of 16");
  // More axes than a kernel takes, which leave the outermost to a loop.
  EXPECT_EQ(run({2, 2, 2, 2, 2, 2}, {243, 81, 27, 9, 3, 1},
                {1024, 256, 64, 16, 4, 1}),
            "corey_copy_4 of 1 corey_copy_4 of 1");
  // As many blocks as fill the device.
  EXPECT_EQ(run({1000, 200}, {200, 1}, {201, 1}, 1), "corey_copy_1 of 782");
}

TEST_F(CUDATest, StridedCopiesOfMoreThanAKernelNumbers) {
  std::shared_ptr<Device> device = get();
  Buffer a(device, nullptr, 8), b(device, nullptr, 8);
  for (int bytes : {1, 2, 4, 8})
    corey_fake_register(("corey_copy_" + std::to_string(bytes)).c_str(),
                        [](const Launch &) {});
  int64_t sizes[] = {3, 3 << 29}, to[] = {3 << 29, 1}, from[] = {1l << 32, 2};
  takeLaunches();
  ASSERT_OK(device->copyStrided(b.pointer, to, a.pointer, from, sizes, 2, 1,
                                nullptr));
  std::vector<Launch> launches = takeLaunches();
  int64_t elements = 0;
  std::vector<uint64_t> starts;
  for (const Launch &launch : launches) {
    int64_t count = 1;
    for (int i = 0; i < 5; ++i)
      count *= static_cast<int64_t>(launch.arguments[2 + 3 * i]);
    EXPECT_LE(count, int64_t(1) << 30);
    elements += count;
    starts.push_back(launch.arguments[0]);
  }
  EXPECT_EQ(elements, int64_t(9) << 29);
  std::sort(starts.begin(), starts.end());
  EXPECT_EQ(std::unique(starts.begin(), starts.end()), starts.end());
  corey_fake_reset_kernels();

  Status status =
      device->copyStrided(b.pointer, to, a.pointer, from, sizes, 2, 3, nullptr);
  EXPECT_EQ(status.code(), StatusCode::InvalidArgument);
  EXPECT_EQ(status.message(), "expected elements of 1, 2, 4 or 8 bytes, got 3");
}

//===----------------------------------------------------------------------===//
// Matrix products
//===----------------------------------------------------------------------===//

// First of these: the library that was found stays.
TEST_F(CUDATest, ProductsWithoutALibrary) {
  testing::FLAGS_gtest_death_test_style = "fast";
  EXPECT_EXIT(
      {
        setenv("COREY_CUBLASLT", "off", 1);
        Gemm gemm(get());
        float x[4] = {};
        GemmProblem problem;
        problem.x = problem.w = x;
        problem.y = x + 2;
        problem.rows = problem.outputs = problem.inputs = 1;
        Expected<bool> done = gemm.run(problem, nullptr);
        std::_Exit(done && !*done ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

namespace {
struct GemmCase {
  int64_t batch, rows, outputs, inputs;
  bool bias = false, residual = false, packed = true;
  ElementType input = ElementType::F32, output = ElementType::F32;
};

/// Small multiples of 1/4 are exact in every type.
struct TypedBuffer {
  TypedBuffer(std::shared_ptr<Device> device, ElementType type,
              const std::vector<float> &values)
      : type(type), buffer(device, encode(type, values)) {}
  static std::vector<char> encode(ElementType type,
                                  const std::vector<float> &values) {
    std::vector<char> bytes;
    for (float value : values) {
      char element[4];
      if (type == ElementType::F32) {
        std::memcpy(element, &value, 4);
      } else if (type == ElementType::F16) {
        auto half = static_cast<_Float16>(value);
        std::memcpy(element, &half, 2);
      } else {
        std::memcpy(element, reinterpret_cast<char *>(&value) + 2, 2);
      }
      bytes.insert(bytes.end(), element,
                   element + (type == ElementType::F32 ? 4 : 2));
    }
    return bytes;
  }
  std::vector<float> read() const {
    if (type == ElementType::F32)
      return buffer.read<float>();
    std::vector<float> values;
    for (uint16_t bits : buffer.read<uint16_t>()) {
      float value;
      if (type == ElementType::F16) {
        _Float16 half;
        std::memcpy(&half, &bits, 2);
        value = static_cast<float>(half);
      } else {
        uint32_t wide = uint32_t(bits) << 16;
        std::memcpy(&value, &wide, 4);
      }
      values.push_back(value);
    }
    return values;
  }
  ElementType type;
  Buffer buffer;
};
} // namespace

class GemmTest : public CUDATest, public testing::WithParamInterface<GemmCase> {
protected:
  void SetUp() override {
    CUDATest::SetUp();
    setenv("COREY_CUBLASLT", COREY_FAKE_CUBLASLT, 1);
  }
};

TEST_P(GemmTest, AgreesWithLoops) {
  const GemmCase &c = GetParam();
  std::shared_ptr<Device> device = get();
  int64_t gap = c.packed ? 0 : 3;
  GemmProblem p;
  p.batch = c.batch;
  p.rows = c.rows;
  p.outputs = c.outputs;
  p.inputs = c.inputs;
  p.xRowStride = c.inputs + gap;
  p.xBatchStride = c.rows * p.xRowStride + gap;
  p.wRowStride = c.inputs + 2 * gap;
  p.yRowStride = c.outputs + gap;
  p.yBatchStride = c.rows * p.yRowStride + 2 * gap;
  p.residualRowStride = c.outputs + 2 * gap;
  p.residualBatchStride = c.rows * p.residualRowStride;
  p.inputType = c.input;
  p.outputType = p.biasType = c.output;
  std::vector<float> x = numbers(c.batch * p.xBatchStride, 1),
                     w = numbers(c.outputs * p.wRowStride, 2),
                     bias = numbers(c.outputs, 3),
                     residual = numbers(c.batch * p.residualBatchStride, 4),
                     y = numbers(c.batch * p.yBatchStride, 5);
  TypedBuffer dx(device, c.input, x), dw(device, c.input, w),
      dbias(device, c.output, bias), dresidual(device, c.output, residual),
      dy(device, c.output, y);
  p.x = dx.buffer.pointer;
  p.w = dw.buffer.pointer;
  p.y = dy.buffer.pointer;
  p.bias = c.bias ? dbias.buffer.pointer : nullptr;
  p.residual = c.residual ? dresidual.buffer.pointer : nullptr;
  Gemm gemm(device);
  Expected<bool> done = gemm.run(p, nullptr);
  ASSERT_OK(done);
  ASSERT_TRUE(*done);
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t i = 0; i < c.rows; ++i)
      for (int64_t j = 0; j < c.outputs; ++j) {
        float sum = (c.bias ? bias[j] : 0) +
                    (c.residual ? residual[b * p.residualBatchStride +
                                           i * p.residualRowStride + j]
                                : 0);
        for (int64_t k = 0; k < c.inputs; ++k)
          sum += x[b * p.xBatchStride + i * p.xRowStride + k] *
                 w[j * p.wRowStride + k];
        y[b * p.yBatchStride + i * p.yRowStride + j] = sum;
      }
  // Sums of few multiples of 1/16 are exact in f32 and f16, and gaps stay.
  std::vector<float> got = dy.read();
  ASSERT_EQ(got.size(), y.size());
  for (size_t i = 0; i < y.size(); ++i)
    ASSERT_NEAR(got[i], y[i], c.output == ElementType::BF16 ? 0.04 : 0) << i;
  // Once more asks for nothing and allocates nothing.
  corey_fake_reset_calls();
  uint64_t asked = corey_fake_blaslt_calls("cublasLtMatmulAlgoGetHeuristic");
  ASSERT_TRUE(*gemm.run(p, nullptr));
  EXPECT_EQ(corey_fake_blaslt_calls("cublasLtMatmulAlgoGetHeuristic"), asked);
  EXPECT_EQ(corey_fake_calls("cuMemAlloc"), 0u);
  EXPECT_EQ(corey_fake_calls("cuStreamSynchronize"), 0u);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, GemmTest,
    testing::Values(GemmCase{1, 5, 7, 3}, GemmCase{2, 5, 7, 3, true, true},
                    GemmCase{3, 5, 7, 4, true, true, false},
                    GemmCase{3, 1, 7, 4, false, true, false},
                    GemmCase{1, 1, 7, 4, true, false, false},
                    GemmCase{2, 3, 1, 4, true, true, false},
                    GemmCase{2, 3, 8, 1, false, false, false},
                    GemmCase{2, 5, 8, 4, true, true, true, ElementType::F16,
                             ElementType::F16},
                    GemmCase{2, 5, 8, 4, true, true, false, ElementType::F16,
                             ElementType::F32},
                    GemmCase{2, 5, 8, 4, true, true, true, ElementType::BF16,
                             ElementType::BF16},
                    GemmCase{2, 5, 8, 4, false, true, false, ElementType::BF16,
                             ElementType::F32}));

TEST_F(GemmTest, WhatNoLibraryDoes) {
  std::shared_ptr<Device> device = get();
  Buffer memory(device, nullptr, 4096);
  auto *base = static_cast<char *>(memory.pointer);
  GemmProblem good;
  good.x = base;
  good.w = base + 1024;
  good.y = base + 2048;
  good.rows = good.outputs = good.inputs = 4;
  good.xRowStride = good.wRowStride = good.yRowStride = 4;
  Gemm gemm(device);
  ASSERT_TRUE(*gemm.run(good, nullptr));
  auto refuses = [&](auto change) {
    GemmProblem problem = good;
    change(problem);
    Expected<bool> done = gemm.run(problem, nullptr);
    return done && !*done;
  };
  using P = GemmProblem;
  EXPECT_TRUE(refuses([&](P &p) { p.x = base + 2; }));
  EXPECT_TRUE(refuses([&](P &p) { p.inputs = 0; }));
  EXPECT_TRUE(refuses([&](P &p) { p.outputType = ElementType::F16; }));
  EXPECT_TRUE(refuses([&](P &p) { p.inputType = ElementType::F64; }));
  // Rows that coincide, overlap or run backwards.
  EXPECT_TRUE(refuses([&](P &p) { p.xRowStride = 0; }));
  EXPECT_TRUE(refuses([&](P &p) { p.xRowStride = 3; }));
  EXPECT_TRUE(refuses([&](P &p) { p.wRowStride = -4; }));
  EXPECT_TRUE(refuses([&](P &p) {
    p.bias = base;
    p.biasType = ElementType::F16;
  }));
  // The same product elsewhere is another choice only if its alignment is.
  uint64_t asked = corey_fake_blaslt_calls("cublasLtMatmulAlgoGetHeuristic");
  EXPECT_FALSE(refuses([&](P &p) { p.x = base + 256; }));
  EXPECT_EQ(corey_fake_blaslt_calls("cublasLtMatmulAlgoGetHeuristic"), asked);
  EXPECT_FALSE(refuses([&](P &p) { p.x = base + 16; }));
  EXPECT_EQ(corey_fake_blaslt_calls("cublasLtMatmulAlgoGetHeuristic"),
            asked + 1);
  EXPECT_FALSE(refuses([&](P &p) { p.rows = 0; }));
}

//===----------------------------------------------------------------------===//
// What compiled code calls
//===----------------------------------------------------------------------===//

namespace {
/// A call with the body that compiled code would be.
class RuntimeTest : public CUDATest {
protected:
  void SetUp() override {
    CUDATest::SetUp();
    setenv("COREY_CUBLASLT", COREY_FAKE_CUBLASLT, 1);
    std::shared_ptr<Device> device = get();
    program = std::make_unique<Program>(device);
    program->add("nothing", std::string(kPTX));
    program->add("scale", std::string(kPTX));
    ASSERT_OK(program->loadAll());
    stream = std::move(*Stream::create(device));
    call = std::make_unique<cuda::Call>(device);
    call->program = program.get();
    call->stream = stream.handle();
    state.cuda = call.get();
    state.program = &sites;
  }
  bool run(std::function<void()> given) {
    body = std::move(given);
    state.error = Status::ok();
    publishObservations(state);
    bool finished = device::invoke(state, 1, [](void **) { body(); }, nullptr);
    EXPECT_TRUE(joinObservations(*call).isOk());
    call->arena.releaseAll();
    return finished;
  }
  static std::function<void()> body;
  std::unique_ptr<Program> program;
  Stream stream;
  std::unique_ptr<cuda::Call> call;
  device::ProgramState sites;
  device::CallState state;
};
std::function<void()> RuntimeTest::body;
int64_t addressOf(const void *pointer) {
  return reinterpret_cast<int64_t>(pointer);
}
} // namespace

TEST_F(RuntimeTest, WarmCallsTakeNothing) {
  float x[16] = {};
  Buffer input(get(), x, sizeof x);
  auto work = [&] {
    void *a = corey_rt_device_malloc(4096);
    void *b = corey_rt_device_malloc(64);
    uint64_t address = addressOf(a);
    uint32_t count = 3;
    float factor = 0.5;
    void *arguments[] = {&address, &count, &factor};
    corey_rt_launch(1, 2, 1, 1, 128, 1, 1, 1, 1, 64 << 10,
                    addressOf(arguments));
    int64_t layout[] = {2, 3, 3, 1, 8, 2};
    corey_rt_device_copy(addressOf(b), addressOf(input.pointer),
                         addressOf(layout), 2, 4);
    EXPECT_EQ(corey_rt_device_gemm(addressOf(input.pointer),
                                   addressOf(input.pointer), addressOf(b), 0, 0,
                                   1, 4, 4, 4, 16, 4, 4, 16, 4, 0, 0, 32, 32,
                                   32),
              1);
    corey_rt_device_free(b);
    corey_rt_device_free(a);
  };
  ASSERT_TRUE(run(work));
  ASSERT_OK(state.error);
  corey_fake_reset_calls();
  ASSERT_TRUE(run(work));
  ASSERT_OK(state.error);
  for (const char *function :
       {"cuMemAlloc", "cuMemFree", "cuMemHostAlloc", "cuModuleLoadData",
        "cuModuleGetFunction", "cuStreamSynchronize", "cuCtxSynchronize",
        "cuEventSynchronize", "cuFuncSetAttribute", "cuStreamCreate",
        "cuEventCreate"})
    EXPECT_EQ(corey_fake_calls(function), 0u) << function;
  EXPECT_EQ(corey_fake_calls("cuLaunchKernelEx"), 1u);
  // Of both calls.
  std::vector<Launch> launches = takeLaunches();
  ASSERT_EQ(launches.size(), 4u);
  EXPECT_TRUE(launches[2].programmatic);
  EXPECT_EQ(launches[2].kernel, "scale");
  EXPECT_EQ(launches[2].arguments[1], 3u);
  EXPECT_EQ(launches[2].arguments[0], launches[0].arguments[0]);
  EXPECT_EQ(launches[2].stream, stream.handle());
  EXPECT_EQ(launches[3].kernel, "corey_copy_4");
  EXPECT_EQ(launches[3].stream, stream.handle());
}

TEST_F(RuntimeTest, FirstErrorFailsTheCall) {
  corey_fake_fail("cuLaunchKernel", driver::CUDA_ERROR_ILLEGAL_ADDRESS, 1);
  auto work = [&] {
    for (int i = 0; i < 4; ++i)
      corey_rt_launch(0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0);
    EXPECT_EQ(corey_rt_device_malloc(16), nullptr);
    corey_rt_device_free(nullptr);
    int64_t layout[] = {4, 1, 1};
    corey_rt_device_copy(16, 16, addressOf(layout), 1, 4);
    EXPECT_EQ(corey_rt_device_gemm(0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0,
                                   0, 32, 32, 32),
              1);
  };
  ASSERT_TRUE(run(work));
  EXPECT_EQ(state.error.code(), StatusCode::DeviceError);
  EXPECT_EQ(
      state.error.message(),
      "kernel 'nothing': expected success, got CUDA_ERROR_ILLEGAL_ADDRESS "
      "(an illegal memory access was encountered)");
  EXPECT_EQ(takeLaunches().size(), 1u);
  // The next call is a new one.
  ASSERT_TRUE(run([] { corey_rt_launch(0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0); }));
  ASSERT_OK(state.error);
  ASSERT_TRUE(run([] { corey_rt_launch(2, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0); }));
  EXPECT_EQ(state.error.message(), "expected a kernel from 0 to 1, got 2");
  ASSERT_TRUE(
      run([] { corey_rt_launch(0, 1, 70000, 1, 1, 1, 1, 1, 0, 0, 0); }));
  EXPECT_EQ(state.error.code(), StatusCode::InvalidArgument);
}

TEST_F(RuntimeTest, OutOfMemoryLeavesTheCall) {
  corey_fake_set_memory(corey_fake_memory_in_use() + (1 << 20));
  static bool after;
  after = false;
  EXPECT_FALSE(run([] {
    corey_rt_device_malloc(1 << 19);
    corey_rt_device_malloc(1 << 20);
    after = true;
  }));
  EXPECT_FALSE(after);
  EXPECT_EQ(state.missingBytes, size_t(1) << 20);
  // What it had is there for the next.
  EXPECT_TRUE(run([] { corey_rt_device_malloc(1 << 19); }));
}

TEST_F(RuntimeTest, CodeForADeviceNeedsOne) {
  state.cuda = nullptr;
  body = [] { corey_rt_launch(0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0); };
  ASSERT_TRUE(device::invoke(state, 1, [](void **) { body(); }, nullptr));
  EXPECT_EQ(state.error.message(),
            "expected a call on a CUDA device, got compiled code without one");
}

TEST_F(RuntimeTest, VariantFollowsTheChunk) {
  scheduler::SiteInfo info;
  info.name = "scan";
  info.problem.channels = 64;
  info.problem.states = 16;
  info.problem.groups = 1;
  info.device = {"cuda-sm_90", 132};
  sites.addChunk(std::make_unique<scheduler::Site>(
      info, *scheduler::parsePolicy("static:32")));
  ASSERT_TRUE(run([] {
    int64_t name = addressOf("scan");
    EXPECT_EQ(corey_rt_variant(name), 0);
    EXPECT_EQ(corey_rt_chunk(name, 1, 100, 0), 32);
    EXPECT_EQ(corey_rt_variant(name), 0);
    EXPECT_EQ(corey_rt_variant(addressOf("other")), 0);
  }));
}

namespace {
/// Counts 1 to 6 as kernels would, for bins of [1, 6].
void countOneToSix(const corey_rt_observation &o) {
  auto *found = reinterpret_cast<corey_rt_observed *>(o.counted);
  auto *counts = reinterpret_cast<uint64_t *>(found + 1);
  // They begin at zero.
  for (int64_t i = 0; i < o.bins; ++i)
    EXPECT_EQ(counts[i], 0u) << i;
  EXPECT_EQ(found->count, 0);
  found->count = 6;
  found->min = 1;
  found->max = 6;
  found->pivot = 3;
  found->s1 = 3;
  found->s2 = 19;
  found->s3 = 27;
  found->s4 = 115;
  found->absolute = 21;
  counts[0] = counts[o.bins - 1] = 3;
}
} // namespace

TEST_F(RuntimeTest, ObservationsAreThereForLaterCalls) {
  sites.addObservation(std::make_unique<device::ObservationSite>(
      "values", scheduler::EstimatorOptions(), nullptr));
  const device::ObservationSite &site = *sites.observations[0];
  std::vector<float> data = {1, 2, 3, 99, 4, 5, 6, 99};
  Buffer buffer(get(), data);
  int64_t counted = 0;
  auto work = [&] {
    int64_t layout[] = {2, 3, 4, 1};
    corey_rt_observation o;
    if (corey_rt_device_observe(addressOf("values"), addressOf(buffer.pointer),
                                addressOf(layout), 2, 32, addressOf(&o))) {
      ++counted;
      EXPECT_EQ(o.rows, 2);
      EXPECT_EQ(o.sizes[0], 1);
      EXPECT_EQ(o.sizes[1], 2);
      EXPECT_EQ(o.strides[1], 16);
      EXPECT_EQ(o.columns, 3);
      EXPECT_EQ(o.columnStride, 4);
      EXPECT_EQ(o.isAligned, 1);
      EXPECT_EQ(o.tokens, 0);
      EXPECT_EQ(o.bins, 256);
      EXPECT_EQ(o.blocks, 1);
      // On a stream beside the call's, which goes on behind it.
      corey_rt_launch(0, o.blocks, 1, 1, 128, 1, 1, 1, 0, 0, 0);
      countOneToSix(o);
      corey_rt_device_observed(addressOf("values"));
    }
    corey_rt_launch(0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0);
  };
  corey_fake_hold_events(1);
  takeLaunches();
  ASSERT_TRUE(run(work));
  ASSERT_OK(state.error);
  std::vector<Launch> launches = takeLaunches();
  ASSERT_EQ(launches.size(), 2u);
  EXPECT_EQ(launches[0].stream, call->side.handle());
  EXPECT_EQ(launches[1].stream, stream.handle());
  EXPECT_EQ(site.calls, 0u);
  // Still under way: this call is not looked at.
  ASSERT_TRUE(run(work));
  EXPECT_EQ(site.calls, 0u);
  EXPECT_EQ(counted, 1);
  corey_fake_hold_events(0);
  corey_fake_reset_calls();
  ASSERT_TRUE(run(work));
  EXPECT_EQ(counted, 2);
  EXPECT_EQ(site.calls, 1u);
  EXPECT_EQ(site.count, 6u);
  EXPECT_EQ(site.min, 1);
  EXPECT_EQ(site.max, 6);
  EXPECT_EQ(site.mean, 3.5);
  EXPECT_NEAR(site.last.variance, 35.0 / 12, 1e-12);
  EXPECT_NEAR(site.last.entropy.value(), std::log(2), 1e-9);
  for (const char *function :
       {"cuMemAlloc", "cuMemHostAlloc", "cuStreamCreate", "cuEventCreate",
        "cuEventSynchronize", "cuStreamSynchronize", "cuCtxSynchronize"})
    EXPECT_EQ(corey_fake_calls(function), 0u) << function;
  // Forked and joined.
  EXPECT_EQ(corey_fake_calls("cuStreamWaitEvent"), 2u);
  EXPECT_EQ(corey_fake_calls("cuMemcpyDtoHAsync"), 1u);
  // A call that is captured neither asks nor counts.
  call->capturing = true;
  corey_fake_reset_calls();
  ASSERT_TRUE(run(work));
  EXPECT_EQ(corey_fake_calls("cuEventQuery"), 0u);
  EXPECT_EQ(corey_fake_calls("cuEventRecord"), 0u);
  EXPECT_EQ(site.calls, 1u);
  call->capturing = false;
  publishObservations(state);
  publishObservations(state);
  EXPECT_EQ(site.calls, 2u);
}

TEST_F(RuntimeTest, ObservedMemoryIsNotWrittenBeforeItIsCounted) {
  for (const char *name : {"a", "b"})
    sites.addObservation(std::make_unique<device::ObservationSite>(
        name, scheduler::EstimatorOptions(), nullptr));
  auto observe = [](const char *name, void *memory) {
    int64_t layout[] = {4, 1};
    corey_rt_observation o;
    EXPECT_EQ(corey_rt_device_observe(addressOf(name), addressOf(memory),
                                      addressOf(layout), 1, 32, addressOf(&o)),
              1);
    corey_rt_device_observed(addressOf(name));
  };
  auto waits = [] { return corey_fake_calls("cuStreamWaitEvent"); };
  ASSERT_TRUE(run([&] {
    auto *x = static_cast<char *>(corey_rt_device_malloc(64));
    void *y = corey_rt_device_malloc(64), *z = corey_rt_device_malloc(64);
    observe("a", x + 16);
    uint64_t before = waits();
    // Not observed; observed; and nothing is left to wait for.
    corey_rt_device_free(y);
    EXPECT_EQ(waits(), before);
    corey_rt_device_free(x);
    EXPECT_EQ(waits(), before + 1);
    EXPECT_TRUE(call->unjoined.empty());
    // Nor before a copy, which may write to it.
    observe("b", z);
    before = waits();
    int64_t layout[] = {4, 1, 1};
    corey_rt_device_copy(addressOf(z), addressOf(z), addressOf(layout), 1, 4);
    EXPECT_EQ(waits(), before + 1);
  }));
  ASSERT_OK(state.error);
}

TEST_F(RuntimeTest, FirstQuantilesAreTheHosts) {
  scheduler::EstimatorOptions options;
  options.range = scheduler::RangeMode::RunningQuantile;
  options.sampling = scheduler::Sampling::Strided;
  options.stride = 2;
  sites.addObservation(
      std::make_unique<device::ObservationSite>("values", options, nullptr));
  const device::ObservationSite &site = *sites.observations[0];
  std::vector<float> data = {1, 2, 90, 91, 3, 4};
  Buffer buffer(get(), data);
  corey_rt_observation o;
  auto work = [&] {
    int64_t layout[] = {3, 2, 2, 1};
    bool counts =
        corey_rt_device_observe(addressOf("values"), addressOf(buffer.pointer),
                                addressOf(layout), 2, 32, addressOf(&o));
    EXPECT_EQ(counts, site.calls > 0);
    if (counts)
      corey_rt_device_observed(addressOf("values"));
  };
  ASSERT_TRUE(run(work));
  ASSERT_OK(state.error);
  ASSERT_TRUE(run(work));
  ASSERT_OK(state.error);
  // Every second row, once.
  EXPECT_EQ(site.count, 4u);
  EXPECT_EQ(site.max, 4);
  EXPECT_EQ(site.mean, 2.5);
  // Then there is a range to count in.
  EXPECT_EQ(o.rule, static_cast<int64_t>(scheduler::CountPlan::Rule::GivenF32));
  EXPECT_GE(o.low, 1);
  EXPECT_GT(o.width, 0);
}

TEST_F(RuntimeTest, FailedObservationsFailTheCall) {
  sites.addObservation(std::make_unique<device::ObservationSite>(
      "values", scheduler::EstimatorOptions(), nullptr));
  Buffer buffer(get(), std::vector<float>{1, 2});
  auto work = [&] {
    int64_t layout[] = {2, 1};
    corey_rt_observation o;
    if (corey_rt_device_observe(addressOf("values"), addressOf(buffer.pointer),
                                addressOf(layout), 1, 32, addressOf(&o))) {
      corey_rt_launch(0, 1, 1, 1, 256, 1, 1, 1, 0, 0, 0);
      corey_rt_device_observed(addressOf("values"));
    }
  };
  corey_fake_fail("cuLaunchKernel", driver::CUDA_ERROR_ILLEGAL_ADDRESS, 0);
  ASSERT_TRUE(run(work));
  EXPECT_EQ(state.error.code(), StatusCode::DeviceError);
  EXPECT_EQ(call->stream, stream.handle());
  EXPECT_FALSE(call->observations[0].pending);
  corey_fake_fail("cuMemsetD8Async", driver::CUDA_ERROR_INVALID_VALUE, 0);
  ASSERT_TRUE(run(work));
  EXPECT_EQ(state.error.message(),
            "site 'values': filling device memory: expected success, got "
            "CUDA_ERROR_INVALID_VALUE (invalid argument)");
  ASSERT_TRUE(run(work));
  ASSERT_OK(state.error);
}

TEST_F(RuntimeTest, CallsOfSeveralThreads) {
  std::shared_ptr<Device> device = get();
  std::vector<std::thread> threads;
  std::atomic<int> good{0};
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      Stream own = std::move(*Stream::create(device));
      cuda::Call mine(device);
      mine.program = program.get();
      mine.stream = own.handle();
      device::CallState callState;
      callState.cuda = &mine;
      callState.program = &sites;
      for (int i = 0; i < 50; ++i) {
        device::invoke(
            callState, 1,
            [](void **) {
              void *p = corey_rt_device_malloc(512);
              corey_rt_launch(0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0);
              corey_rt_device_free(p);
            },
            nullptr);
        good += callState.error.isOk();
      }
      EXPECT_EQ(mine.arena.driverAllocations(), 1u);
    });
  for (std::thread &thread : threads)
    thread.join();
  EXPECT_EQ(good, 200);
  EXPECT_EQ(takeLaunches().size(), 200u);
}
