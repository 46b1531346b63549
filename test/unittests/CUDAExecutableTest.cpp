//===- CUDAExecutableTest.cpp - Programs on CUDA, on a fake driver --------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "FakeCUDA.h"
#include "corey/Device/CUDA.h"
#include "corey/Device/RuntimeABI.h"
#include "corey/Executable.h"
#include "corey/Scheduler/Policy.h"
#include "gtest/gtest.h"
#include <algorithm>
#include <cstdlib>
#include <dlfcn.h>
#include <filesystem>
#include <fstream>

using namespace corey;
using namespace corey::fake;
namespace fs = std::filesystem;

namespace {
#define EXPECT_STATUS(Expression, Code, Message)                               \
  do {                                                                         \
    Status Result = (Expression);                                              \
    EXPECT_EQ(Result.code(), StatusCode::Code);                                \
    EXPECT_EQ(Result.message(), Message);                                      \
  } while (false)
#define ASSERT_OK(Expression)                                                  \
  do {                                                                         \
    Status Result = (Expression);                                              \
    ASSERT_TRUE(Result.isOk()) << Result.toString();                           \
  } while (false)

template <class T> T take(Expected<T> value) {
  if (!value) {
    ADD_FAILURE() << value.status().toString();
    std::abort();
  }
  return *std::move(value);
}

constexpr const char *kAdd = R"(
func.func @main(%x: tensor<?x?x8xf32>, %v: tensor<?x?x8xf32>) -> tensor<?x?x8xf32> {
  %y = ssm.add %x, %v : tensor<?x?x8xf32>, tensor<?x?x8xf32>
  return %y : tensor<?x?x8xf32>
}
)";

/// What the kernel of kAdd does. Tensors are an address and two strides in
/// elements; the number of runs of four elements and the second size follow.
void add(const Launch &launch) {
  auto argument = [&](int i) {
    return static_cast<int64_t>(launch.arguments[i]);
  };
  auto at = [&](int tensor, int64_t i, int64_t j) {
    return reinterpret_cast<float *>(argument(3 * tensor)) +
           i * argument(3 * tensor + 1) + j * argument(3 * tensor + 2);
  };
  int64_t rows = argument(9) * 4 / 8, length = argument(10);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t k = 0; k < 8; ++k)
      at(2, row / length, row % length)[k] =
          at(0, row / length, row % length)[k] +
          at(1, row / length, row % length)[k];
}

constexpr const char *kScan = R"(
func.func @main(%u: tensor<?x?x64xf32>, %dt: tensor<?x?x64xf32>, %A: tensor<64x16xf32>,
                %B: tensor<?x?x1x16xf32>, %C: tensor<?x?x1x16xf32>) -> tensor<?x?x64xf32> {
  %y = ssm.selective_scan %u, %dt, %A, %B, %C {chunk = #ssm.chunk<runtime = @scan>}
     : tensor<?x?x64xf32>, tensor<?x?x64xf32>, tensor<64x16xf32>,
       tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x64xf32>
  return %y : tensor<?x?x64xf32>
}
)";

constexpr const char *kSSD = R"(
func.func @main(%x: tensor<?x?x4x8xf32>, %decay: tensor<?x?x4xf32>, %B: tensor<?x?x1x16xf32>) -> tensor<?x?x4x8xf32> {
  %y = ssm.ssd %x decay(%decay : tensor<?x?x4xf32>) B(%B) C(%B)
     : tensor<?x?x4x8xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x4x8xf32>
  return %y : tensor<?x?x4x8xf32>
}
)";

/// Whether a kernel got a tensor as it lies: its address and its strides.
bool takesAsItLies(const Launch &launch, const Tensor &tensor) {
  std::vector<uint64_t> words{reinterpret_cast<uintptr_t>(tensor.data())};
  words.insert(words.end(), tensor.strides().begin(), tensor.strides().end());
  return std::search(launch.arguments.begin(), launch.arguments.end(),
                     words.begin(), words.end()) != launch.arguments.end();
}

/// What a run launches, which neither copies nor allocates.
std::vector<Launch> launchesOfRun(Executable &program,
                                  const std::vector<Tensor> &inputs,
                                  std::vector<Tensor> &outputs) {
  takeLaunches();
  corey_fake_reset_calls();
  EXPECT_TRUE(program.run("main", inputs, outputs));
  for (const char *name : {"cuMemcpyDtoDAsync", "cuMemAlloc"})
    EXPECT_EQ(corey_fake_calls(name), 0u) << name;
  return takeLaunches();
}

class CUDAExecutableTest : public testing::Test {
protected:
  void SetUp() override {
    std::string name =
        (fs::temp_directory_path() / "corey-cuda-XXXXXX").string();
    ASSERT_TRUE(mkdtemp(name.data()));
    folder = name;
    setenv("COREY_CACHE_DIR", name.c_str(), 1);
    setenv("COREY_CUDA_DRIVER", COREY_FAKE_CUDA, 1);
    setenv("COREY_CUBLASLT", "off", 1);
    corey_fake_register("pointwise", add);
    takeLaunches();
  }
  void TearDown() override {
    fs::remove_all(folder);
    corey_fake_hold_events(0);
  }

  std::shared_ptr<Context> context(std::string device = "cuda") {
    ContextOptions options;
    options.device = std::move(device);
    options.threads = 1;
    return take(Context::create(options));
  }
  std::shared_ptr<Executable> compile(std::string_view source) {
    CompileOptions options;
    options.policy = "unsplit";
    return take(context()->compile(source, options));
  }
  static Tensor numbers(std::vector<int64_t> shape, float scale = 1) {
    Tensor tensor = take(Tensor::empty(DType::F32, std::move(shape)));
    for (int64_t i = 0; i < tensor.numElements(); ++i)
      tensor.dataAs<float>()[i] = scale * static_cast<float>(i % 101);
    return tensor;
  }
  static Tensor upload(const Tensor &tensor, int index = 0) {
    return take(tensor.to(Device::cuda(index)));
  }
  static std::vector<float> read(const Tensor &tensor) {
    Tensor host = take(tensor.to(Device::cpu()));
    return {host.dataAs<float>(), host.dataAs<float>() + host.numElements()};
  }
  static std::vector<Tensor> scanInputs(int64_t length) {
    return {upload(numbers({1, length, 64})), upload(numbers({1, length, 64})),
            upload(numbers({64, 16}, -1)), upload(numbers({1, length, 1, 16})),
            upload(numbers({1, length, 1, 16}))};
  }
  static std::vector<std::string> launched() {
    std::vector<std::string> names;
    for (const Launch &launch : takeLaunches())
      names.push_back(launch.kernel);
    return names;
  }
  fs::path folder;
};

TEST_F(CUDAExecutableTest, ProgramsOfTheCacheLaunchTheSame) {
  auto made = compile(kScan), loaded = compile(kScan);
  EXPECT_EQ(made->cache().outcome, CacheInfo::Stored);
  ASSERT_EQ(loaded->cache().outcome, CacheInfo::Loaded);
  std::vector<Tensor> inputs = scanInputs(300);
  std::vector<Tensor> outputs = take(made->makeOutputs("main", inputs));
  std::vector<Launch> launches[2];
  for (int i = 0; i < 2; ++i) {
    Executable &executable = i ? *loaded : *made;
    for (int64_t chunk : {0, 64}) {
      ASSERT_OK(executable.setChunk("scan", chunk));
      ASSERT_OK(executable.run("main", inputs, outputs));
      for (Launch &launch : takeLaunches())
        launches[i].push_back(std::move(launch));
    }
  }
  ASSERT_FALSE(launches[0].empty());
  ASSERT_EQ(launches[0].size(), launches[1].size());
  for (size_t i = 0; i < launches[0].size(); ++i) {
    EXPECT_EQ(launches[0][i].kernel, launches[1][i].kernel);
    EXPECT_EQ(launches[0][i].arguments.size(), launches[1][i].arguments.size());
  }
  // Without intermediates, the same to the last argument.
  EXPECT_EQ(launches[0][0].arguments, launches[1][0].arguments);
}

TEST_F(CUDAExecutableTest, ContextNeedsADevice) {
  EXPECT_EQ(context("cuda:1")->getDevice(), Device::cuda(1));
  EXPECT_EQ(context()->schedulerDevice().name, "cuda-sm_90");
  EXPECT_EQ(context()->schedulerDevice().units, 132);
  ContextOptions options;
  options.device = "cuda:9";
  EXPECT_FALSE(Context::create(options));
}

TEST_F(CUDAExecutableTest, TensorsMoveBetweenDevices) {
  Tensor host = numbers({4, 6, 8});
  Tensor strided = take(host.transpose(0, 1));
  Tensor device = upload(strided);
  EXPECT_EQ(device.device(), Device::cuda());
  EXPECT_TRUE(device.isContiguous());
  Tensor expected = take(strided.to(DType::F32));
  std::vector<float> values(expected.dataAs<float>(),
                            expected.dataAs<float>() + expected.numElements());
  EXPECT_EQ(read(device), values);
  // Back through a strided view, to a strided target, and to another device.
  Tensor target = take(Tensor::empty(DType::F32, {4, 6, 8}, true));
  ASSERT_OK(target.copyFrom(take(device.transpose(0, 1))));
  EXPECT_EQ(read(target), read(host));
  ASSERT_OK(take(target.transpose(0, 1)).copyFrom(device));
  EXPECT_EQ(read(target), read(host));
  EXPECT_EQ(read(upload(device, 1)), values);
  EXPECT_EQ(read(take(Tensor::empty(DType::F32, {3}, Device::cuda(1), true))),
            std::vector<float>(3, 0));
}

TEST_F(CUDAExecutableTest, RunsAndAllocatesNothingWhenWarm) {
  std::shared_ptr<Executable> program = compile(kAdd);
  Tensor x = numbers({2, 5, 8}), v = numbers({2, 5, 8}, 10);
  std::vector<Tensor> inputs = {upload(x), upload(v)}, outputs;
  ASSERT_OK(program->run("main", inputs, outputs));
  ASSERT_EQ(outputs.size(), 1u);
  EXPECT_EQ(outputs[0].device(), Device::cuda());
  std::vector<float> y = read(outputs[0]);
  for (size_t i = 0; i < y.size(); ++i)
    ASSERT_EQ(y[i], x.dataAs<float>()[i] + v.dataAs<float>()[i]) << i;
  EXPECT_EQ(launched(), std::vector<std::string>{"pointwise"});

  auto counts = [&](void *stream) {
    corey_fake_reset_calls();
    ASSERT_OK(
        program->run("main", inputs.data(), 2, outputs.data(), 1, stream));
    for (const char *name :
         {"cuMemAlloc", "cuMemHostAlloc", "cuMemFree", "cuModuleLoadData",
          "cuCtxSynchronize", "cuEventSynchronize", "cuStreamCreate",
          "cuEventCreate", "cuModuleGetFunction"})
      EXPECT_EQ(corey_fake_calls(name), 0u) << name;
    EXPECT_EQ(corey_fake_calls("cuLaunchKernelEx"), 1u);
    EXPECT_EQ(corey_fake_calls("cuStreamSynchronize"), stream ? 0u : 1u);
  };
  counts(nullptr);
  auto *legacy = reinterpret_cast<void *>(uintptr_t(1));
  ASSERT_OK(program->run("main", inputs, outputs, legacy));
  counts(legacy);
  cuda::Stream stream = take(cuda::Stream::create(take(cuda::Device::get(0))));
  ASSERT_OK(program->run("main", inputs, outputs, stream.handle()));
  counts(stream.handle());
  // A stream whose work is not done does not lend its memory to another.
  corey_fake_hold_events(1);
  ASSERT_OK(program->run("main", inputs, outputs, stream.handle()));
  ASSERT_OK(program->run("main", inputs, outputs, legacy));
  ASSERT_OK(program->run("main", inputs, outputs));
  cuda::Stream other = take(cuda::Stream::create(take(cuda::Device::get(1))));
  EXPECT_STATUS(program->run("main", inputs, outputs, other.handle()),
                InvalidArgument,
                "expected a stream of the primary context of CUDA device 0, "
                "got one of another context");
}

TEST_F(CUDAExecutableTest, RefusesTensorsOfOtherDevices) {
  std::shared_ptr<Executable> program = compile(kAdd);
  Tensor x = numbers({1, 2, 8}), here = upload(x);
  std::vector<Tensor> outputs;
  EXPECT_STATUS(program->run("main", {here, x}, outputs), InvalidArgument,
                "input 'v': expected device cuda:0, got cpu");
  EXPECT_STATUS(program->run("main", {upload(x, 1), here}, outputs),
                InvalidArgument,
                "input 'x': expected device cuda:0, got cuda:1");
  outputs = {numbers({1, 2, 8})};
  EXPECT_STATUS(program->run("main", {here, here}, outputs), InvalidArgument,
                "output 'y': expected device cuda:0, got cpu");
  CompileOptions options;
  options.vectorBits = 256;
  EXPECT_STATUS(context()->compile(kAdd, options).status(), InvalidArgument,
                "expected vectorBits to be 0 on cuda:0, got 256");
  std::shared_ptr<Executable> host = take(context("cpu")->compile(kAdd));
  outputs.clear();
  EXPECT_STATUS(host->run("main", {x, x}, outputs,
                          reinterpret_cast<void *>(uintptr_t(1))),
                InvalidArgument, "expected no stream on cpu, got one");
  EXPECT_EQ(host->capture("main", {x, x}).status().code(),
            StatusCode::Unsupported);
}

TEST_F(CUDAExecutableTest, StagesWhatKernelsCannotRead) {
  std::shared_ptr<Executable> program = compile(kAdd);
  // Rows at 9 elements, a base at 4 bytes, and axes that are exchanged.
  Tensor wide = numbers({3, 4, 9}), deep = numbers({3, 8, 4});
  Tensor x = take(upload(wide).slice(2, 1, 9));
  Tensor v = take(upload(deep).transpose(1, 2));
  Tensor room = take(Tensor::empty(DType::F32, {3, 4, 9}, Device::cuda()));
  std::vector<Tensor> outputs = {take(room.slice(2, 0, 8))};
  ASSERT_OK(program->run("main", {x, v}, outputs));
  std::vector<float> y = read(outputs[0]);
  Tensor hostX = take(take(wide.slice(2, 1, 9)).to(DType::F32)),
         hostV = take(take(deep.transpose(1, 2)).to(DType::F32));
  for (size_t i = 0; i < y.size(); ++i)
    ASSERT_EQ(y[i], hostX.dataAs<float>()[i] + hostV.dataAs<float>()[i]) << i;
  for (uint64_t address : {takeLaunches().at(0).arguments[0]})
    EXPECT_EQ(address % 16, 0u);
  // Rows at a multiple of their largest power of two are read where they lie.
  Tensor padded = take(upload(numbers({3, 4, 12})).slice(2, 0, 8));
  outputs.clear();
  ASSERT_OK(program->run("main", {padded, padded}, outputs));
  EXPECT_EQ(takeLaunches().at(0).arguments[0],
            reinterpret_cast<uintptr_t>(padded.data()));
}

TEST_F(CUDAExecutableTest, ScansTakeVariantsAndChunks) {
  scheduler::Problem problem;
  problem.channels = 2048;
  problem.states = 16;
  std::vector<std::string> names;
  std::vector<int64_t> channels, tiles, resident;
  for (const scheduler::Variant &variant :
       scanVariants(Device::CUDA, problem)) {
    EXPECT_EQ(variant.byRule, names.empty());
    names.push_back(variant.name);
    channels.push_back(variant.itemChannels);
    tiles.push_back(variant.tile);
    resident.push_back(variant.resident);
  }
  EXPECT_EQ(names, (std::vector<std::string>{"rule", "warp", "split",
                                             "split-short", "split-narrow"}));
  EXPECT_EQ(channels, (std::vector<int64_t>{64, 64, 16, 16, 8}));
  EXPECT_EQ(tiles, (std::vector<int64_t>{8, 8, 64, 32, 64}));
  EXPECT_EQ(resident, (std::vector<int64_t>{4, 4, 1, 1, 1}));
  // Segments of an SSD are blocks of their own.
  scheduler::Problem ssd;
  ssd.op = scheduler::OpKind::SSD;
  ssd.channels = 16;
  ssd.headDim = 64;
  ssd.states = 256;
  std::vector<scheduler::Variant> variants = scanVariants(Device::CUDA, ssd);
  ASSERT_EQ(variants.size(), 1u);
  EXPECT_EQ(variants[0].name, "generic");
  EXPECT_TRUE(variants[0].segmented);
  // On tensor cores, where types and sizes are for them, of whole tiles.
  ssd.type = scheduler::ElementType::BF16;
  variants = scanVariants(Device::CUDA, ssd);
  ASSERT_EQ(variants.size(), 1u);
  EXPECT_EQ(variants[0].name, "tensor_core");
  EXPECT_TRUE(variants[0].segmented);
  EXPECT_EQ(variants[0].granularity, 64);
  EXPECT_EQ(variants[0].itemChannels, 1);
  ssd.states = 128;
  EXPECT_EQ(scanVariants(Device::CUDA, ssd)[0].itemChannels, 2);
  ssd.states = 100;
  EXPECT_EQ(scanVariants(Device::CUDA, ssd)[0].name, "generic");
  // What runs is told from the op: here two types do not meet on them.
  auto variantOf = [&](const std::string &type,
                       const std::string &device = "cuda") {
    std::string x = "tensor<1x300x4x64xbf16>";
    std::string b = "tensor<1x300x1x32x" + type + ">";
    std::shared_ptr<Executable> ssd = take(context(device)->compile(
        "func.func @main(%x: " + x + ", %d: tensor<1x300x4xf32>, %b: " + b +
        ") -> " + x +
        " {\n  %y = ssm.ssd %x decay(%d : tensor<1x300x4xf32>) B(%b) C(%b) "
        "{chunk = #ssm.chunk<runtime = @ssd>} : " +
        x + ", " + b + ", " + b + " -> " + x + "\n  return %y : " + x +
        "\n}\n"));
    return ssd->setVariant("ssd", "none").message();
  };
  EXPECT_EQ(variantOf("bf16"), "site 'ssd': expected a variant of tensor_core, "
                               "got 'none'");
  EXPECT_EQ(variantOf("f16"), "site 'ssd': expected a variant of generic, got "
                              "'none'");
  // The second device is of an older chip.
  EXPECT_EQ(variantOf("bf16", "cuda:1"), "site 'ssd': expected a variant of "
                                         "mma_sync, got 'none'");

  std::shared_ptr<Executable> program = compile(kScan);
  std::vector<Tensor> inputs = scanInputs(256), outputs;
  ASSERT_OK(program->run("main", inputs, outputs));
  EXPECT_EQ(launched().size(), 1u);
  ASSERT_OK(program->setVariant("scan", "warp"));
  ASSERT_OK(program->run("main", inputs, outputs));
  EXPECT_EQ(launched(), std::vector<std::string>{"selective_scan_warp"});
  EXPECT_EQ(program->chunks()[0].variant, "warp");
  ASSERT_OK(program->setChunk("scan", 64));
  ASSERT_OK(program->run("main", inputs, outputs));
  EXPECT_EQ(launched().size(), 3u);
  EXPECT_STATUS(program->setVariant("scan", "wide"), NotFound,
                "site 'scan': expected a variant of rule, warp, split, "
                "split-short, split-narrow, got 'wide'");
  std::string text = program->explain();
  EXPECT_NE(text.find("compiled for sm_90a on cuda:0 (Fake H200 #0, 132 "
                      "multiprocessors)"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("kernel selective_scan_warp: 40 registers, 1024 bytes "
                      "of shared memory, 16 bytes spilled by a thread"),
            std::string::npos)
      << text;
}

/// What the shipped measurements and model say of an H200.
TEST_F(CUDAExecutableTest, PoliciesChooseVariants) {
  struct Case {
    int64_t batch, length, channels;
    const char *variant;
    int64_t least, most;
  } cases[] = {// Few channels: chunks share the sequence out.
               {1, 8192, 256, "warp", 64, 256},
               {1, 3000, 384, "warp", 16, 256},
               // More than fill the device with states on lanes.
               {1, 64, 256, "split-narrow", 64, 64},
               {1, 512, 1024, "split-narrow", 512, 512},
               {1, 64, 2048, "split-short", 64, 64},
               {1, 4096, 2048, "split", 4096, 4096},
               {1, 5000, 1536, "split", 5000, 5000},
               // Channels alone fill it.
               {64, 512, 2048, "warp", 512, 512},
               {8, 2048, 5120, "warp", 2048, 2048}};
  scheduler::Device device = context()->schedulerDevice();
  EXPECT_EQ(device.name, "cuda-sm_90");
  for (const char *policy : {"measured", "cost-model"}) {
    auto parsed = scheduler::parsePolicy(policy);
    ASSERT_TRUE(parsed);
    for (const Case &c : cases) {
      scheduler::Query query;
      query.problem.type = scheduler::ElementType::BF16;
      query.problem.batch = c.batch;
      query.problem.length = c.length;
      query.problem.channels = c.channels;
      query.problem.states = 16;
      std::vector<scheduler::Variant> variants =
          scanVariants(Device::CUDA, query.problem);
      query.device = &device;
      query.variants = variants.data();
      query.numVariants = static_cast<int>(variants.size());
      scheduler::Decision d = (*parsed)->decide(query);
      EXPECT_EQ(variants[static_cast<size_t>(d.variant)].name, c.variant)
          << policy << " " << c.batch << "," << c.length << "," << c.channels
          << ": " << d.explain();
      EXPECT_GE(d.chunk, c.least);
      EXPECT_LE(d.chunk, c.most);
    }
  }
}

TEST_F(CUDAExecutableTest, CapturedRunsFollowChunks) {
  std::shared_ptr<Executable> program = compile(kScan);
  ASSERT_OK(program->setVariant("scan", "warp"));
  std::vector<Tensor> inputs = scanInputs(256);
  std::shared_ptr<CapturedRun> run = take(program->capture("main", inputs));
  EXPECT_TRUE(launched().empty());
  EXPECT_EQ(run->numNodes(), 1u);
  EXPECT_EQ(run->instantiations(), 1u);
  ASSERT_OK(run->launch());
  EXPECT_EQ(launched(), std::vector<std::string>{"selective_scan_warp"});
  ASSERT_OK(program->setChunk("scan", 64));
  ASSERT_OK(run->launch());
  EXPECT_EQ(launched().size(), 3u);
  // The driver does not take more nodes in place, but another number.
  uint64_t before = run->instantiations();
  ASSERT_OK(program->setChunk("scan", 32));
  cuda::Stream stream = take(cuda::Stream::create(take(cuda::Device::get(0))));
  corey_fake_reset_calls();
  ASSERT_OK(run->launch(stream.handle()));
  EXPECT_EQ(corey_fake_calls("cuStreamSynchronize"), 0u);
  EXPECT_EQ(launched().size(), 3u);
  EXPECT_EQ(run->instantiations(), before);
  corey_fake_reset_calls();
  ASSERT_OK(run->launch(stream.handle()));
  EXPECT_EQ(corey_fake_calls("cuStreamBeginCapture"), 0u);
  // It keeps the program.
  program.reset();
  takeLaunches();
  ASSERT_OK(run->launch());
  EXPECT_EQ(launched().size(), 3u);
}

TEST_F(CUDAExecutableTest, CallersCaptureRuns) {
  std::shared_ptr<cuda::Device> device = take(cuda::Device::get(0));
  cuda::Stream stream = take(cuda::Stream::create(device));
  std::shared_ptr<Executable> program = compile(kScan);
  ASSERT_OK(program->setChunk("scan", 64));
  std::vector<Tensor> inputs = scanInputs(256);
  std::vector<Tensor> outputs = take(program->makeOutputs("main", inputs));
  {
    cuda::Graph graph = take(cuda::Graph::capture(device, stream.handle(), [&] {
      return program->run("main", inputs, outputs, stream.handle());
    }));
    EXPECT_TRUE(launched().empty());
    ASSERT_OK(graph.launch(stream.handle()));
    EXPECT_EQ(launched().size(), 3u);
    // The memory that the graph uses is nobody else's.
    EXPECT_EQ(program->memoryUse().first, 0u);
    ASSERT_OK(program->run("main", inputs, outputs));
    EXPECT_GT(program->memoryUse().first, 0u);
    launched();
    program.reset();
    ASSERT_OK(graph.launch(stream.handle()));
    EXPECT_EQ(launched().size(), 3u);
  }
}

TEST_F(CUDAExecutableTest, WeightsGoToTheDeviceOnce) {
  std::shared_ptr<Executable> program = compile(R"(
ssm.weight @w "w" : tensor<2x4x8xf32>
func.func @main(%x: tensor<2x4x8xf32>) -> tensor<2x4x8xf32> {
  %w = ssm.get_weight @w : tensor<2x4x8xf32>
  %y = ssm.add %x, %w : tensor<2x4x8xf32>, tensor<2x4x8xf32>
  return %y : tensor<2x4x8xf32>
}
)");
  // Where sizes are known, the kernel takes other arguments than add().
  corey_fake_register("pointwise", [](const Launch &) {});
  Tensor w = numbers({2, 4, 8}, 3);
  ASSERT_OK(program->bindWeight("w", w));
  std::vector<Tensor> inputs = {upload(numbers({2, 4, 8}))}, outputs;
  ASSERT_OK(program->run("main", inputs, outputs));
  uint64_t address = takeLaunches().at(0).arguments.at(3);
  EXPECT_EQ(cuda::Device::ordinalOf(reinterpret_cast<void *>(address)), 0);
  corey_fake_reset_calls();
  ASSERT_OK(program->run("main", inputs, outputs));
  EXPECT_EQ(corey_fake_calls("cuMemcpyHtoDAsync"), 0u);
  EXPECT_EQ(takeLaunches().at(0).arguments.at(3), address);
  // A tensor on the device is used where it lies, one elsewhere refused.
  Tensor here = upload(w);
  ASSERT_OK(program->bindWeight("w", here));
  ASSERT_OK(program->run("main", inputs, outputs));
  EXPECT_EQ(takeLaunches().at(0).arguments.at(3),
            reinterpret_cast<uintptr_t>(here.data()));
  EXPECT_STATUS(program->bindWeight("w", upload(w, 1)), InvalidArgument,
                "weight 'w' (bound by name): expected device cuda:0 or cpu, "
                "got cuda:1");
}

TEST_F(CUDAExecutableTest, PreparesWeightsOnTheDevice) {
  std::shared_ptr<Executable> program = compile(R"(
ssm.weight @w "w" : tensor<2x4x8xf32>
func.func @main(%x: tensor<2x4x8xf32>) -> tensor<2x4x8xf32> {
  %w = ssm.get_weight @w : tensor<2x4x8xf32>
  %e = ssm.exp %w : tensor<2x4x8xf32>
  %y = ssm.add %x, %e : tensor<2x4x8xf32>, tensor<2x4x8xf32>
  return %y : tensor<2x4x8xf32>
}
)");
  corey_fake_register("pointwise", [](const Launch &) {});
  ASSERT_OK(program->bindWeight("w", numbers({2, 4, 8})));
  std::vector<Tensor> inputs = {upload(numbers({2, 4, 8}))};
  std::vector<Tensor> outputs = take(program->makeOutputs("main", inputs));
  std::shared_ptr<cuda::Device> device = take(cuda::Device::get(0));
  cuda::Stream stream = take(cuda::Stream::create(device));
  auto run = [&] {
    return program->run("main", inputs, outputs, stream.handle());
  };
  EXPECT_STATUS(cuda::Graph::capture(device, stream.handle(), run).status(),
                InvalidArgument,
                "@main: expected prepared weights before a stream is captured, "
                "got none; run the function once before");
  ASSERT_OK(run());
  EXPECT_EQ(launched().size(), 2u);
  ASSERT_OK(run());
  EXPECT_EQ(launched().size(), 1u);
}
TEST_F(CUDAExecutableTest, ErrorsThatKernelsRecordFailTheRun) {
  std::shared_ptr<Executable> program = compile(R"(
func.func @main(%ids: tensor<?x?xi64>, %table: tensor<10x8xf32>) -> tensor<?x?x8xf32> {
  %y = ssm.embedding %ids, %table : tensor<?x?xi64>, tensor<10x8xf32> -> tensor<?x?x8xf32>
  return %y : tensor<?x?x8xf32>
}
)");
  corey_fake_register("embedding", [](const Launch &launch) {
    auto &error =
        *reinterpret_cast<corey_rt_device_error *>(launch.arguments.at(7));
    error = {1, 0, 12, 10, 0, 0};
  });
  Tensor ids = take(Tensor::empty(DType::I64, {1, 4}, Device::cuda(), true));
  std::vector<Tensor> inputs = {ids, upload(numbers({10, 8}))};
  std::vector<Tensor> outputs = take(program->makeOutputs("main", inputs));
  const char *message = "@main: expected ids of an embedding to be in [0, 10), "
                        "got 12";
  EXPECT_STATUS(program->run("main", inputs, outputs), InvalidArgument,
                message);
  // On a caller's stream it shows at a later run, once.
  auto *legacy = reinterpret_cast<void *>(uintptr_t(1));
  ASSERT_OK(program->run("main", inputs, outputs, legacy));
  corey_fake_register("embedding", [](const Launch &) {});
  EXPECT_STATUS(program->run("main", inputs, outputs, legacy), InvalidArgument,
                "an earlier run: expected ids of an embedding to be in "
                "[0, 10), got 12");
  ASSERT_OK(program->run("main", inputs, outputs, legacy));
  ASSERT_OK(program->run("main", inputs, outputs));
}

// A pool given for input and output is not copied; slots that it does not have
// are reported as others are.
TEST_F(CUDAExecutableTest, PoolsAreUpdatedInPlace) {
  std::shared_ptr<Executable> program = compile(R"(
func.func @main(%x: tensor<?x1x8x64xbf16>, %d: tensor<?x1x8xf32>, %b: tensor<?x1x1x128xbf16>, %pool: tensor<?x8x64x128xf32>,
                %slots: tensor<?xi32>) -> (tensor<?x1x8x64xbf16>, tensor<?x8x64x128xf32>) {
  %y, %next = ssm.ssd %x decay(%d : tensor<?x1x8xf32>) B(%b) C(%b) initial_states(%pool : tensor<?x8x64x128xf32>)
      slots(%slots : tensor<?xi32>)
      : tensor<?x1x8x64xbf16>, tensor<?x1x1x128xbf16>, tensor<?x1x1x128xbf16> -> tensor<?x1x8x64xbf16>, tensor<?x8x64x128xf32>
  return %y, %next : tensor<?x1x8x64xbf16>, tensor<?x8x64x128xf32>
}
)");
  ASSERT_EQ(program->findFunction("main")->outputs[1].updatedInput, 3);
  corey_fake_register("ssd_step", [](const Launch &) {});
  auto zeros = [](DType type, std::vector<int64_t> shape) {
    return take(Tensor::empty(type, std::move(shape), Device::cuda(), true));
  };
  std::vector<Tensor> inputs = {
      zeros(DType::BF16, {2, 1, 8, 64}), zeros(DType::F32, {2, 1, 8}),
      zeros(DType::BF16, {2, 1, 1, 128}), zeros(DType::F32, {5, 8, 64, 128}),
      zeros(DType::I32, {2})};
  std::vector<Tensor> outputs = take(program->makeOutputs("main", inputs));
  EXPECT_EQ(outputs[1].shape(), inputs[3].shape());
  auto copies = [&] {
    corey_fake_reset_calls();
    takeLaunches();
    EXPECT_TRUE(program->run("main", inputs, outputs).isOk());
    EXPECT_EQ(launched(), std::vector<std::string>{"ssd_step"});
    return corey_fake_calls("cuMemcpyDtoDAsync");
  };
  EXPECT_EQ(copies(), 1u);
  outputs[1] = inputs[3];
  EXPECT_EQ(copies(), 0u);
  // A tensor that kernels cannot take would be copied.
  Tensor memory = zeros(DType::F32, {6 * 8 * 64 * 128});
  Tensor shifted =
      take(Tensor::view(memory.dataAs<float>() + 1, DType::F32, {5, 8, 64, 128},
                        {}, Device::cuda(), memory.storage()));
  std::vector<Tensor> others = inputs, targets = {outputs[0], shifted};
  others[3] = shifted;
  EXPECT_EQ(program->run("main", others, targets).code(),
            StatusCode::InvalidArgument);
  corey_fake_register("ssd_step", [](const Launch &launch) {
    auto &error =
        *reinterpret_cast<corey_rt_device_error *>(launch.arguments.at(24));
    error = {3, 0, 6, 5, 0, 0};
  });
  EXPECT_STATUS(
      program->run("main", inputs, outputs), InvalidArgument,
      "@main: expected a slot below 5, the states of the pool, got 6");
}

TEST_F(CUDAExecutableTest, DecaysAreReadAsTheyLie) {
  std::shared_ptr<Executable> program = compile(kSSD);
  Tensor x = upload(numbers({2, 30, 4, 8})),
         B = upload(numbers({2, 30, 1, 16}));
  Tensor heads = upload(numbers({2, 4, 30})),
         wide = upload(numbers({2, 30, 9}));
  auto run = [&](const Tensor &decay) {
    std::vector<Tensor> inputs = {x, decay, B};
    std::vector<Tensor> outputs = take(program->makeOutputs("main", inputs));
    std::vector<Launch> launches = launchesOfRun(*program, inputs, outputs);
    ASSERT_EQ(launches.size(), 1u);
    EXPECT_EQ(launches[0].kernel, "ssd");
    EXPECT_TRUE(takesAsItLies(launches[0], decay)) << decay.describe();
  };
  run(upload(numbers({2, 30, 4})));
  run(take(heads.permute({0, 2, 1})));
  // Nor need it be aligned to more than an element.
  run(take(wide.slice(2, 1, 5)));
  run(take(wide.slice(2, 1, 9, 2)));

  // Others are copied, each by one operation.
  Tensor turned = upload(numbers({2, 4, 8, 30}));
  std::vector<Tensor> inputs = {take(turned.permute({0, 3, 1, 2})),
                                take(heads.permute({0, 2, 1})), B};
  std::vector<Tensor> outputs = take(program->makeOutputs("main", inputs));
  takeLaunches();
  ASSERT_OK(program->run("main", inputs, outputs));
  EXPECT_EQ(launched(), (std::vector<std::string>{"corey_transpose_4", "ssd"}));
}

TEST_F(CUDAExecutableTest, MarkedTensorsAreReadAndWrittenAsTheyLie) {
  const char *scan = R"mlir(
    func.func @main(%u: tensor<?x?x8xf32> {ssm.any_strides}, %A: tensor<8x4xf32>,
                    %B: tensor<?x?x1x4xf32> {ssm.any_strides})
        -> (tensor<?x?x8xf32> {ssm.any_strides}) {
      %y = ssm.selective_scan %u, %u, %A, %B, %B : tensor<?x?x8xf32>, tensor<?x?x8xf32>,
        tensor<8x4xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x8xf32>
      return %y : tensor<?x?x8xf32>
    })mlir";
  const char *conv = R"mlir(
    func.func @main(%x: tensor<?x?x8xf32> {ssm.any_strides}, %w: tensor<8x4xf32>)
        -> (tensor<?x?x8xf32> {ssm.any_strides}) {
      %y = ssm.causal_conv %x, %w {silu} : tensor<?x?x8xf32>, tensor<8x4xf32> -> tensor<?x?x8xf32>
      return %y : tensor<?x?x8xf32>
    })mlir";
  auto turned = [&](std::vector<int64_t> shape) {
    return take(upload(numbers(shape)).transpose(1, -1));
  };
  auto run = [&](const char *source, const std::vector<Tensor> &inputs,
                 Tensor output) {
    std::shared_ptr<Executable> program = compile(source);
    std::vector<Tensor> outputs{output};
    ASSERT_OK(program->run("main", inputs, outputs));
    std::vector<Launch> launches = launchesOfRun(*program, inputs, outputs);
    ASSERT_EQ(launches.size(), 1u);
    EXPECT_TRUE(takesAsItLies(launches[0], inputs[0]));
    EXPECT_TRUE(takesAsItLies(launches[0], output));
  };
  Tensor A = upload(numbers({8, 4}));
  run(scan, {turned({2, 8, 30}), A, turned({2, 4, 1, 30})}, turned({2, 8, 30}));
  run(conv, {turned({2, 8, 30}), A}, turned({2, 8, 30}));
  // Backwards, and with elements between.
  Tensor wide = upload(numbers({2, 30, 16}));
  run(conv, {take(take(wide.slice(2, 14, -1, -2)).slice(2, 0, 8)), A},
      turned({2, 8, 30}));
  // Nothing is aligned to more than an element.
  run(conv, {take(wide.slice(2, 1, 9)), A}, turned({2, 8, 30}));
}

//===----------------------------------------------------------------------===//
// Exported programs
//===----------------------------------------------------------------------===//

template <int Rank> struct Descriptor {
  void *allocated, *data;
  int64_t offset, sizes[Rank], strides[Rank];
  /// Behind what the program sees.
  Tensor kept;

  explicit Descriptor(const Tensor &tensor)
      : allocated(tensor.data()), data(tensor.data()), offset(0), kept(tensor) {
    std::copy(tensor.shape().begin(), tensor.shape().end(), sizes);
    std::copy(tensor.strides().begin(), tensor.strides().end(), strides);
  }
};

class CUDAExportTest : public CUDAExecutableTest {
protected:
  /// Exports a program for `chip` as a library and loads it.
  void load(std::string_view source, const std::string &chip = "sm_90a",
            ExportOptions what = {}) {
    // Libraries are not unloaded: one name for each.
    static int number = 0;
    std::string path = folder / ("lib" + std::to_string(number++) + ".so");
    what.runtimeArchive = COREY_RUNTIME_ARCHIVE;
    CompileOptions options;
    options.chip = chip;
    ASSERT_OK(context("cpu")->exportProgram(source, path, what, options));
    library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    ASSERT_TRUE(library) << dlerror();
  }
  template <class... Arguments>
  std::string call(const char *symbol, void *stream, Arguments &...arguments) {
    using Function = const char *(*)(decltype((void *)&arguments)..., void *);
    auto function = reinterpret_cast<Function>(dlsym(library, symbol));
    if (!function)
      return std::string("no ") + symbol;
    const char *error = function(&arguments..., stream);
    return error ? error : "";
  }
  /// An assembler for the fake driver.
  std::string fakeAssembler() {
    fs::path path = folder / "ptxas";
    std::ofstream(path) << "#!/bin/sh\nprintf '\\177ELF fake ' > $5\n"
                           "/bin/cat $3 >> $5\n";
    fs::permissions(path, fs::perms::owner_all);
    return path;
  }
  void *library = nullptr;
};

TEST_F(CUDAExportTest, RunsOnDeviceTensors) {
  load(kAdd);
  Tensor x = numbers({2, 5, 8}), v = numbers({2, 5, 8}, 10);
  Tensor onDevice[] = {
      upload(x), upload(v),
      upload(take(Tensor::empty(DType::F32, {2, 5, 8}, true)))};
  Descriptor<3> dx(onDevice[0]), dv(onDevice[1]), dy(onDevice[2]);
  cuda::Stream stream = take(cuda::Stream::create(take(cuda::Device::get(0))));
  auto run = [&](void *on) { return call("corey_main", on, dx, dv, dy); };
  ASSERT_EQ(run(stream.handle()), "");
  std::vector<Launch> launches = takeLaunches();
  ASSERT_EQ(launches.size(), 1u);
  EXPECT_EQ(launches[0].kernel, "pointwise");
  EXPECT_EQ(launches[0].stream, stream.handle());
  for (int i = 0; i < 3; ++i)
    EXPECT_EQ(launches[0].arguments.at(3 * i),
              reinterpret_cast<uintptr_t>(onDevice[i].data()));
  std::vector<float> y = read(onDevice[2]);
  for (size_t i = 0; i < y.size(); ++i)
    ASSERT_EQ(y[i], x.dataAs<float>()[i] + v.dataAs<float>()[i]) << i;

  // A warm call waits only where nobody else would.
  for (void *on : {stream.handle(), static_cast<void *>(nullptr)}) {
    ASSERT_EQ(run(on), "");
    corey_fake_reset_calls();
    ASSERT_EQ(run(on), "");
    for (const char *name :
         {"cuMemAlloc", "cuMemHostAlloc", "cuModuleLoadData", "cuStreamCreate",
          "cuEventCreate", "cuModuleGetFunction", "cuCtxSynchronize"})
      EXPECT_EQ(corey_fake_calls(name), 0u) << name;
    EXPECT_EQ(corey_fake_calls("cuLaunchKernelEx"), 1u);
    EXPECT_EQ(corey_fake_calls("cuStreamSynchronize"), on ? 0u : 1u);
  }
  // It can be captured into a graph.
  std::shared_ptr<cuda::Device> device = take(cuda::Device::get(0));
  takeLaunches();
  cuda::Graph graph = take(cuda::Graph::capture(device, stream.handle(), [&] {
    EXPECT_EQ(run(stream.handle()), "");
    return Status::ok();
  }));
  EXPECT_TRUE(launched().empty());
  ASSERT_OK(graph.launch(stream.handle()));
  EXPECT_EQ(launched(), std::vector<std::string>{"pointwise"});
}

TEST_F(CUDAExportTest, ChecksArguments) {
  load(kAdd);
  Tensor host = numbers({2, 4, 8}), here = upload(host),
         there = upload(host, 1);
  Tensor wide = upload(numbers({2, 4, 9})), deep = upload(numbers({2, 8, 4}));
  Descriptor<3> x(here), v(upload(host)), y(upload(host));
  auto with = [&](const Tensor &tensor) {
    Descriptor<3> d(tensor);
    return call("corey_main", nullptr, d, x, y);
  };
  EXPECT_EQ(with(host), "@main: argument 'x': expected memory of a CUDA "
                        "device, got the host's");
  EXPECT_EQ(with(there),
            "@main: argument 'v': expected memory of cuda:1 as for the "
            "arguments before it, got memory of cuda:0");
  const std::string layout =
      "@main: argument 'x': expected an innermost stride of 1, an address at a "
      "multiple of 16 bytes, and rows at multiples of 16 or of the largest "
      "power of two that divides their bytes, got strides ";
  EXPECT_EQ(with(take(wide.slice(2, 0, 8))),
            layout + "[36, 9, 1] and an address 0 bytes past one");
  EXPECT_EQ(with(take(upload(numbers({2, 4, 12})).slice(2, 1, 9))),
            layout + "[48, 12, 1] and an address 4 bytes past one");
  EXPECT_EQ(with(take(deep.transpose(1, 2))),
            layout + "[32, 1, 4] and an address 0 bytes past one");
  Descriptor<3> rows(take(upload(numbers({2, 4, 12})).slice(2, 0, 8)));
  EXPECT_EQ(call("corey_main", nullptr, x, x, rows),
            "@main: argument 'y': expected a contiguous output, got sizes "
            "[2, 4, 8] and strides [48, 12, 1]");
  Descriptor<3> null(here);
  null.data = nullptr;
  EXPECT_EQ(call("corey_main", nullptr, x, null, y),
            "@main: argument 'v': expected data, got a null pointer");
  // The offset counts.
  Descriptor<3> shifted(here);
  shifted.data = static_cast<float *>(shifted.data) - 8;
  shifted.offset = 8;
  takeLaunches();
  EXPECT_EQ(call("corey_main", nullptr, shifted, x, y), "");
  EXPECT_EQ(takeLaunches().at(0).arguments.at(0),
            reinterpret_cast<uintptr_t>(here.data()));
  // Where there is nothing to compute nothing is asked.
  Descriptor<3> empty(numbers({0, 4, 8}));
  takeLaunches();
  EXPECT_EQ(call("corey_main", nullptr, empty, empty, empty), "");
  EXPECT_TRUE(launched().empty());
  cuda::Stream other = take(cuda::Stream::create(take(cuda::Device::get(1))));
  EXPECT_EQ(call("corey_main", other.handle(), x, v, y),
            "@main: expected a stream of the primary context of CUDA device 0, "
            "got one of another context");
  // Device 1 is of another architecture.
  Descriptor<3> far(there);
  EXPECT_EQ(call("corey_main", nullptr, far, far, far),
            "@main: expected a device that runs code for sm_90a, got cuda:1 "
            "(sm_80)");
}

TEST_F(CUDAExportTest, TakesAnyStridesWhereTheyMayBe) {
  load(kSSD);
  Tensor shape = numbers({2, 30, 4, 8});
  Descriptor<4> x(upload(shape)), y(upload(shape)),
      B(upload(numbers({2, 30, 1, 16})));
  Descriptor<3> decay(take(upload(numbers({2, 4, 31})).permute({0, 2, 1})));
  decay.sizes[1] = 30;
  decay.offset = 1;
  takeLaunches();
  corey_fake_reset_calls();
  ASSERT_EQ(call("corey_main", nullptr, x, decay, B, y), "");
  std::vector<Launch> launches = takeLaunches();
  ASSERT_EQ(launches.size(), 1u);
  EXPECT_TRUE(takesAsItLies(launches[0], take(decay.kept.slice(1, 1, 31))));
  decay.data = static_cast<char *>(decay.data) + 2;
  EXPECT_EQ(call("corey_main", nullptr, x, decay, B, y),
            "@main: argument 'decay': expected an address at a multiple of 4 "
            "bytes, got one 2 bytes past one");
  // The others are as they were.
  Descriptor<4> turned(
      take(upload(numbers({2, 4, 30, 8})).permute({0, 2, 1, 3}))),
      narrow(take(upload(numbers({2, 30, 8, 4})).permute({0, 1, 3, 2})));
  decay.data = static_cast<char *>(decay.data) - 2;
  EXPECT_EQ(call("corey_main", nullptr, turned, decay, B, y), "");
  EXPECT_NE(call("corey_main", nullptr, narrow, decay, B, y)
                .find("argument 'x': expected an innermost stride of 1"),
            std::string::npos);
}

TEST_F(CUDAExportTest, CodeRunsOnLaterChips) {
  Tensor host = numbers({2, 4, 8});
  Descriptor<3> newer(upload(host)), older(upload(host, 1));
  load(kAdd, "sm_80");
  EXPECT_EQ(call("corey_main", nullptr, newer, newer, newer), "");
  EXPECT_EQ(call("corey_main", nullptr, older, older, older), "");
  load(kAdd, "sm_86");
  EXPECT_EQ(call("corey_main", nullptr, newer, newer, newer), "");
  EXPECT_EQ(call("corey_main", nullptr, older, older, older),
            "@main: expected a device that runs code for sm_86, got cuda:1 "
            "(sm_80)");
}

TEST_F(CUDAExportTest, HoldsMachineCode) {
  ExportOptions what;
  what.kernels = "cubin";
  what.ptxas = fakeAssembler();
  load(kAdd, "sm_80", what);
  Tensor host = numbers({2, 4, 8});
  Descriptor<3> older(upload(host, 1)), newer(upload(host));
  corey_fake_reset_calls();
  EXPECT_EQ(call("corey_main", nullptr, older, older, older), "");
  EXPECT_EQ(launched(), std::vector<std::string>{"pointwise"});
  // The driver compiles nothing.
  EXPECT_EQ(corey_fake_calls("cuLinkCreate"), 0u);
  EXPECT_EQ(corey_fake_calls("cuModuleLoadData"), 1u);
  // Machine code is of one generation.
  EXPECT_EQ(call("corey_main", nullptr, newer, newer, newer),
            "@main: expected a device that runs code for sm_80, got cuda:0 "
            "(sm_90a)");
  // The kernels alone, in one file.
  what.format = "cubin";
  CompileOptions options;
  options.chip = "sm_90a";
  std::string path = folder / "kernels.cubin";
  ASSERT_OK(context("cpu")->exportProgram(kScan, path, what, options));
  std::ifstream file(path, std::ios::binary);
  std::string cubin{std::istreambuf_iterator<char>(file), {}};
  for (const char *kernel : {"selective_scan_warp(", "selective_scan_carry("})
    EXPECT_NE(cubin.find(kernel), std::string::npos) << kernel;
}

TEST_F(CUDAExportTest, TakesWeightsAndFixedChunks) {
  ExportOptions what;
  what.runtimeArchive = COREY_RUNTIME_ARCHIVE;
  CompileOptions options;
  options.chip = "sm_90a";
  for (auto [policy, launches] :
       {std::pair<const char *, size_t>{"unsplit", 1}, {"static:64", 3}}) {
    options.policy = policy;
    std::string path = folder / (std::string(policy, 6) + ".so");
    ASSERT_OK(context("cpu")->exportProgram(kScan, path, what, options));
    library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    ASSERT_TRUE(library) << dlerror();
    std::vector<Tensor> inputs = scanInputs(256);
    Tensor y = upload(numbers({1, 256, 64}));
    Descriptor<3> u(inputs[0]), dt(inputs[1]), out(y);
    Descriptor<2> A(inputs[2]);
    Descriptor<4> B(inputs[3]), C(inputs[4]);
    EXPECT_EQ(call("corey_main", nullptr, u, dt, A, B, C, out), "");
    EXPECT_EQ(launched().size(), launches) << policy;
  }
}

TEST_F(CUDAExportTest, ErrorsThatKernelsRecordAreReturned) {
  load(R"(
func.func @main(%ids: tensor<?x?xi64>, %table: tensor<10x8xf32>) -> tensor<?x?x8xf32> {
  %y = ssm.embedding %ids, %table : tensor<?x?xi64>, tensor<10x8xf32> -> tensor<?x?x8xf32>
  return %y : tensor<?x?x8xf32>
}
)");
  corey_fake_register("embedding", [](const Launch &launch) {
    auto &error =
        *reinterpret_cast<corey_rt_device_error *>(launch.arguments.at(7));
    error = {1, 0, 12, 10, 0, 0};
  });
  Tensor held[] = {
      take(Tensor::empty(DType::I64, {1, 4}, Device::cuda(), true)),
      upload(numbers({10, 8})), upload(numbers({1, 4, 8}))};
  Descriptor<2> ids(held[0]), table(held[1]);
  Descriptor<3> y(held[2]);
  const char *message = "expected ids of an embedding to be in [0, 10), got 12";
  EXPECT_EQ(call("corey_main", nullptr, ids, table, y),
            std::string("@main: ") + message);
  cuda::Stream stream = take(cuda::Stream::create(take(cuda::Device::get(0))));
  EXPECT_EQ(call("corey_main", stream.handle(), ids, table, y), "");
  corey_fake_register("embedding", [](const Launch &) {});
  EXPECT_EQ(call("corey_main", stream.handle(), ids, table, y),
            std::string("@main: an earlier run: ") + message);
  EXPECT_EQ(call("corey_main", stream.handle(), ids, table, y), "");
}

TEST_F(CUDAExportTest, LooksForAnAssembler) {
  std::string path = getenv("PATH");
  unsetenv("PTXAS");
  setenv("PATH", folder.c_str(), 1);
  setenv("CUDA_HOME", "/nowhere", 1);
  ExportOptions what;
  what.format = "cubin";
  CompileOptions options;
  options.chip = "sm_90a";
  std::string file = folder / "x.cubin";
  auto run = [&] {
    return context("cpu")->exportProgram(kAdd, file, what, options);
  };
  fs::path assembler = fakeAssembler();
  EXPECT_STATUS(run(), Ok, "");
  // Not on PATH, but named, or under CUDA_HOME.
  fs::create_directory(folder / "bin");
  fs::rename(assembler, folder / "bin" / "ptxas");
  setenv("PTXAS", (folder / "bin" / "ptxas").c_str(), 1);
  EXPECT_STATUS(run(), Ok, "");
  unsetenv("PTXAS");
  setenv("CUDA_HOME", folder.c_str(), 1);
  EXPECT_STATUS(run(), Ok, "");
  setenv("CUDA_HOME", "/nowhere", 1);
  if (!fs::exists("/usr/local/cuda/bin/ptxas"))
    EXPECT_STATUS(
        run(), CompileError,
        "expected NVIDIA's ptxas for machine code, got none on PATH, in "
        "/nowhere/bin, in /usr/local/cuda/bin; PTXAS may name it");
  setenv("PATH", path.c_str(), 1);
  unsetenv("CUDA_HOME");
}

TEST_F(CUDAExecutableTest, ObservesBesideTheCall) {
  std::shared_ptr<Executable> program = compile(R"(
func.func @main(%x: tensor<?x?x8xf32>, %v: tensor<?x?x8xf32>) -> tensor<?x?x8xf32> {
  %o = ssm.observe @seen %x : tensor<?x?x8xf32>
  %y = ssm.add %o, %v : tensor<?x?x8xf32>, tensor<?x?x8xf32>
  return %y : tensor<?x?x8xf32>
}
)");
  Tensor x = numbers({2, 5, 8});
  std::vector<Tensor> inputs = {upload(x), upload(numbers({2, 5, 8}, 10))};
  std::vector<Tensor> outputs = take(program->makeOutputs("main", inputs));
  cuda::Stream stream = take(cuda::Stream::create(take(cuda::Device::get(0))));
  for (void *handle : {static_cast<void *>(nullptr), stream.handle()}) {
    for (int call = 0; call < 2; ++call)
      ASSERT_OK(program->run("main", inputs, outputs, handle));
    takeLaunches();
    corey_fake_reset_calls();
    ASSERT_OK(program->run("main", inputs, outputs, handle));
    std::vector<Launch> launches = takeLaunches();
    ASSERT_EQ(launches.size(), 3u);
    EXPECT_EQ(launches[0].kernel, "observe_moments");
    EXPECT_EQ(launches[1].kernel, "observe_histogram");
    EXPECT_EQ(launches[2].kernel, "pointwise");
    EXPECT_EQ(launches[0].grid[0], launches[1].grid[0]);
    EXPECT_EQ(launches[0].block[0], 128u);
    EXPECT_EQ(launches[0].stream, launches[1].stream);
    EXPECT_NE(launches[0].stream, launches[2].stream);
    if (handle)
      EXPECT_EQ(launches[2].stream, handle);
    for (const char *name :
         {"cuMemAlloc", "cuMemHostAlloc", "cuMemFree", "cuModuleLoadData",
          "cuCtxSynchronize", "cuEventSynchronize", "cuStreamCreate",
          "cuEventCreate", "cuModuleGetFunction"})
      EXPECT_EQ(corey_fake_calls(name), 0u) << name;
    EXPECT_EQ(corey_fake_calls("cuStreamSynchronize"), handle ? 0u : 1u);
    // The side stream waits for the call's, and that for the side stream.
    EXPECT_EQ(corey_fake_calls("cuStreamWaitEvent"), 2u);
    // Kilobytes leave the device: of 256 bins and their summary.
    EXPECT_EQ(corey_fake_calls("cuMemcpyDtoHAsync"), 1u);
  }
  ASSERT_EQ(program->observations().size(), 1u);
  EXPECT_EQ(program->observations()[0].bins, 256);
  // Of the launches of a graph the first and every 512th observe.
  std::shared_ptr<CapturedRun> run =
      take(program->capture("main", inputs, outputs));
  EXPECT_EQ(run->numNodes(), 1u);
  uint64_t before = program->observations()[0].calls;
  constexpr int kPeriod = 512;
  static_assert(kPeriod == CapturedRun::kLaunchesPerObservation);
  for (void *handle : {static_cast<void *>(nullptr), stream.handle()})
    for (int launch = 0; launch < kPeriod; ++launch) {
      takeLaunches();
      corey_fake_reset_calls();
      ASSERT_OK(run->launch(handle));
      EXPECT_EQ(takeLaunches().size(), launch == 0 ? 3u : 1u);
      // What the first one saw is there when the second one asks.
      EXPECT_EQ(program->observations()[0].calls,
                before + (handle ? 1 : 0) + (launch == 0 ? 0 : 1));
      EXPECT_EQ(corey_fake_calls("cuEventSynchronize"), 0u);
      EXPECT_EQ(corey_fake_calls("cuStreamSynchronize"), handle ? 0u : 1u);
    }
  // What is not there yet is nobody's concern.
  corey_fake_hold_events(true);
  for (int launch = 1; launch < kPeriod; ++launch)
    ASSERT_OK(run->launch(stream.handle()));
  EXPECT_EQ(program->observations()[0].calls, before + 2);
  corey_fake_hold_events(false);
  ASSERT_OK(run->launch(stream.handle()));
  EXPECT_EQ(program->observations()[0].calls, before + 3);
}

TEST_F(CUDAExecutableTest, GraphsObserveForPoliciesThatAsk) {
  CompileOptions options;
  options.policy = "entropy";
  std::shared_ptr<Executable> program =
      take(context()->compile(kScan, options));
  std::vector<Tensor> inputs = scanInputs(4096);
  std::vector<Tensor> outputs = take(program->makeOutputs("main", inputs));
  std::shared_ptr<CapturedRun> run =
      take(program->capture("main", inputs, outputs));
  auto observes = [&] {
    takeLaunches();
    Status status = run->launch();
    EXPECT_TRUE(status) << status.message();
    std::vector<Launch> launches = takeLaunches();
    return std::any_of(
        launches.begin(), launches.end(),
        [](const Launch &each) { return each.kernel == "observe_moments"; });
  };
  EXPECT_TRUE(observes());
  EXPECT_TRUE(program->observations().empty());
  EXPECT_FALSE(observes());
  EXPECT_EQ(program->observations()[0].calls, 1u);
  EXPECT_EQ(run->launches().all, 2u);
  EXPECT_EQ(run->launches().observing, 1u);
  // One that asks for nothing ends it, and its launches do not count.
  ASSERT_OK(program->setPolicy("", "unsplit"));
  for (int launch = 0; launch < 100; ++launch)
    EXPECT_FALSE(observes());
  EXPECT_EQ(program->chunks()[0].chunk, 4096);
  // Each of those that ask has a count of its own, whatever turns they take:
  // of 602 and 600 launches two each observe.
  std::map<std::string, uint64_t> launches{{"entropy", 2},
                                           {"guarded:inner=[entropy]", 0}};
  for (int turn = 0; turn < 300; ++turn)
    for (const char *policy :
         {"unsplit", "entropy", "guarded:inner=[entropy]"}) {
      ASSERT_OK(program->setPolicy("", policy));
      for (int i = 0; i < 2; ++i)
        EXPECT_EQ(
            observes(),
            policy != std::string("unsplit") &&
                launches[policy]++ % CapturedRun::kLaunchesPerObservation == 0)
            << policy << " " << turn;
    }
  EXPECT_EQ(run->launches().all, 102u + 300 * 6);
  EXPECT_EQ(run->launches().observing, 4u);
}

TEST_F(CUDAExecutableTest, GraphsAreKeptForPoliciesThatAgree) {
  std::shared_ptr<Executable> program = compile(kScan);
  ASSERT_OK(program->setPolicy("", "static:64"));
  std::vector<Tensor> inputs = scanInputs(256);
  std::shared_ptr<CapturedRun> run = take(program->capture("main", inputs));
  auto captures = [&] {
    corey_fake_reset_calls();
    Status status = run->launch();
    EXPECT_TRUE(status) << status.message();
    return corey_fake_calls("cuStreamBeginCapture");
  };
  ASSERT_OK(program->setPolicy("", "unsplit"));
  EXPECT_EQ(captures(), 1u);
  ASSERT_OK(program->setPolicy("", "static:256"));
  EXPECT_EQ(captures(), 0u);
  EXPECT_EQ(program->chunks()[0].policy, "static:256");
  ASSERT_OK(program->setChunk("scan", 256));
  EXPECT_EQ(captures(), 0u);
  ASSERT_OK(program->setChunk("scan", 64));
  EXPECT_EQ(captures(), 1u);
}

TEST_F(CUDAExecutableTest, ObservationsAreAsTheOptionsSay) {
  const char *source = R"(
func.func @main(%x: tensor<?x?x8xf32>) -> tensor<?x?x8xf32> {
  %y = ssm.observe @seen %x : tensor<?x?x8xf32>
  return %y : tensor<?x?x8xf32>
}
)";
  CompileOptions options;
  options.observation.sampling = scheduler::Sampling::Token;
  options.observation.stride = 2;
  std::shared_ptr<Executable> program =
      take(context()->compile(source, options));
  std::vector<Tensor> inputs = {upload(numbers({2, 5, 8}))}, outputs;
  ASSERT_OK(program->run("main", inputs, outputs));
  std::vector<Launch> launches = takeLaunches();
  ASSERT_EQ(launches.size(), 2u);
  EXPECT_EQ(launches[0].kernel, "observe_tokens");
  // A block to each of the six tokens.
  EXPECT_EQ(launches[0].grid[0], 6u);
  EXPECT_EQ(launches[1].kernel, "observe_histogram");
  options.observation.bins = 1;
  EXPECT_STATUS(context()->compile(source, options).status(), InvalidArgument,
                "estimator option 'bins': expected 2 to 65536, got 1");
}
} // namespace
