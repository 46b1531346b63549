//===- ExecutableTest.cpp - Tests of compiling and running ----------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "StatusTest.h"
#include "corey/Executable.h"

#include "corey/DLPack.h"

#include "gtest/gtest.h"

#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <limits>
#include <map>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>

using namespace corey;

//===----------------------------------------------------------------------===//
// Counting allocations
//===----------------------------------------------------------------------===//

/// Allocations of all threads while `counting`, those of the OpenMP run-time
/// library left out: it takes a few bytes for every parallel region.
static std::atomic<size_t> allocations{0};
static std::atomic<bool> counting{false};

#ifdef __has_feature
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) ||     \
    __has_feature(memory_sanitizer)
#define COREY_TEST_SANITIZED
#endif
#endif

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) &&                    \
    !defined(COREY_TEST_SANITIZED)
#define COREY_TEST_COUNTS_ALLOCATIONS
static void count(void *caller) {
  Dl_info info;
  if (counting.load(std::memory_order_relaxed) &&
      !(dladdr(caller, &info) && info.dli_fname &&
        std::strstr(info.dli_fname, "omp.so")))
    allocations.fetch_add(1, std::memory_order_relaxed);
}

// The C library's own functions keep doing the work; operator new calls malloc.
extern "C" {
void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);
void *malloc(size_t size) {
  count(__builtin_return_address(0));
  return __libc_malloc(size);
}
void *calloc(size_t number, size_t size) {
  count(__builtin_return_address(0));
  return __libc_calloc(number, size);
}
void *realloc(void *pointer, size_t size) {
  count(__builtin_return_address(0));
  return __libc_realloc(pointer, size);
}
void *aligned_alloc(size_t alignment, size_t size) {
  count(__builtin_return_address(0));
  return __libc_memalign(alignment, size);
}
int posix_memalign(void **pointer, size_t alignment, size_t size) {
  count(__builtin_return_address(0));
  *pointer = __libc_memalign(alignment, size);
  return *pointer ? 0 : ENOMEM;
}
}
#endif

namespace {
using Shape = std::vector<int64_t>;

constexpr double Inf = std::numeric_limits<double>::infinity();

//===----------------------------------------------------------------------===//
// Helpers
//===----------------------------------------------------------------------===//

std::shared_ptr<Context> newContext(int threads = 1) {
  ContextOptions options;
  options.threads = threads;
  return take(Context::create(options));
}

std::shared_ptr<Executable> compile(std::string_view source,
                                    CompileOptions options = {}) {
  return take(newContext()->compile(source, options));
}

/// A contiguous tensor of numbers that are simple in every type.
Tensor makeTensor(Shape shape, DType type = DType::F32, double scale = 1) {
  Tensor tensor = take(Tensor::empty(type, std::move(shape)));
  for (int64_t i = 0; i < tensor.numElements(); ++i)
    storeScalar(type, tensor.dataAs<char>() + i * dtypeSize(type),
                scale * static_cast<double>(i * 7 % 23 - 11) / 8);
  return tensor;
}

template <class T>
Tensor makeIntegers(DType type, const std::vector<T> &values) {
  Tensor tensor =
      take(Tensor::empty(type, {static_cast<int64_t>(values.size())}));
  std::copy(values.begin(), values.end(), tensor.dataAs<T>());
  return tensor;
}

/// The elements in row-major order.
std::vector<double> valuesOf(const Tensor &tensor) {
  Tensor wide = take(tensor.to(DType::F64));
  return std::vector<double>(wide.dataAs<double>(),
                             wide.dataAs<double>() + wide.numElements());
}

constexpr const char *AddSource = R"(
func.func @main(%x: tensor<?x?x8xf32>, %v: tensor<?x?x8xf32>) -> tensor<?x?x8xf32> {
  %y = ssm.add %x, %v : tensor<?x?x8xf32>, tensor<?x?x8xf32>
  return %y : tensor<?x?x8xf32>
}
)";

constexpr const char *ScanSource = R"(
func.func @main(%u: tensor<?x?x8xf32>, %delta: tensor<?x?x8xf32>, %A: tensor<8x4xf32>,
    %B: tensor<?x?x1x4xf32>, %C: tensor<?x?x1x4xf32>) -> (tensor<?x?x8xf32>, tensor<?x8x4xf32>) {
  %y, %state = ssm.selective_scan %u, %delta, %A, %B, %C
      {delta_softplus, chunk = #ssm.chunk<runtime = @layer0.scan>} :
      tensor<?x?x8xf32>, tensor<?x?x8xf32>, tensor<8x4xf32>, tensor<?x?x1x4xf32>,
      tensor<?x?x1x4xf32> -> tensor<?x?x8xf32>, tensor<?x8x4xf32>
  return %y, %state : tensor<?x?x8xf32>, tensor<?x8x4xf32>
}
)";

std::vector<Tensor> scanInputs(int64_t B, int64_t L) {
  return {makeTensor({B, L, 8}), makeTensor({B, L, 8}),
          makeTensor({8, 4}, DType::F32, -1), makeTensor({B, L, 1, 4}),
          makeTensor({B, L, 1, 4})};
}

/// A block with intermediates: a norm, a projection, a convolution, a scan.
constexpr const char *BlockSource = R"(
func.func @main(%x: tensor<?x?x24xbf16>, %n: tensor<24xf32>, %w: tensor<16x24xbf16>, %k: tensor<16x3xf32>,
    %A: tensor<16x4xf32>, %B: tensor<?x?x1x4xf32>, %C: tensor<?x?x1x4xf32>)
    -> (tensor<?x?x16xbf16>, tensor<?x16x4xf32>) {
  %0 = ssm.rms_norm %x, %n : tensor<?x?x24xbf16>, tensor<24xf32> -> tensor<?x?x24xbf16>
  %1 = ssm.projection %0, %w : tensor<?x?x24xbf16>, tensor<16x24xbf16> -> tensor<?x?x16xbf16>
  %2 = ssm.causal_conv %1, %k {silu} : tensor<?x?x16xbf16>, tensor<16x3xf32> -> tensor<?x?x16xbf16>
  %3 = ssm.softplus %1 : tensor<?x?x16xbf16>
  %y, %h = ssm.selective_scan %2, %3, %A, %B, %C : tensor<?x?x16xbf16>, tensor<?x?x16xbf16>,
      tensor<16x4xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x16xbf16>, tensor<?x16x4xf32>
  return %y, %h : tensor<?x?x16xbf16>, tensor<?x16x4xf32>
}
)";

std::vector<Tensor> blockInputs(int64_t B, int64_t L) {
  return {makeTensor({B, L, 24}, DType::BF16),
          makeTensor({24}),
          makeTensor({16, 24}, DType::BF16),
          makeTensor({16, 3}),
          makeTensor({16, 4}, DType::F32, -1),
          makeTensor({B, L, 1, 4}),
          makeTensor({B, L, 1, 4})};
}

/// A program with weights: two of one key prefix, one of a different type.
constexpr const char *WeightSource = R"(
module attributes {ssm.weight_prefix = "layers.0."} {
  ssm.weight @matrix "proj.weight" : tensor<6x8xf32>
  ssm.weight @bias : tensor<6xbf16>
  func.func @main(%x: tensor<?x8xf32>) -> tensor<?x6xf32> {
    %w = ssm.get_weight @matrix : tensor<6x8xf32>
    %b = ssm.get_weight @bias : tensor<6xbf16>
    %y = ssm.projection %x, %w bias(%b : tensor<6xbf16>) : tensor<?x8xf32>, tensor<6x8xf32> -> tensor<?x6xf32>
    return %y : tensor<?x6xf32>
  }
}
)";

std::string temporaryPath(const std::string &name) {
  return testing::TempDir() + "corey-executable-" + std::to_string(getpid()) +
         "-" + name;
}

//===----------------------------------------------------------------------===//
// One compilation for every size
//===----------------------------------------------------------------------===//

TEST(Run, EverySizeWithoutCompiling) {
  std::shared_ptr<Executable> executable = compile(ScanSource);
  std::vector<PhaseTime> before = executable->compileTimes();
  for (int64_t B : {0, 1, 2, 5})
    for (int64_t L : {0, 1, 2, 3, 17, 64, 65, 200}) {
      std::vector<Tensor> outputs;
      ASSERT_OK(executable->run("main", scanInputs(B, L), outputs));
      ASSERT_EQ(outputs.size(), 2u);
      EXPECT_EQ(outputs[0].shape(), (Shape{B, L, 8}));
      EXPECT_EQ(outputs[1].shape(), (Shape{B, 8, 4}));
      EXPECT_EQ(outputs[0].dtype(), DType::F32);
    }
  const std::vector<PhaseTime> &after = executable->compileTimes();
  ASSERT_EQ(before.size(), after.size());
  EXPECT_FALSE(before.empty());
  for (size_t i = 0; i < before.size(); ++i) {
    EXPECT_EQ(before[i].phase, after[i].phase);
    EXPECT_EQ(before[i].milliseconds, after[i].milliseconds);
    EXPECT_GE(before[i].milliseconds, 0);
  }
}

TEST(Run, DescribesFunctions) {
  std::shared_ptr<Executable> executable = compile(R"(
func.func @first(%x: tensor<?x8xbf16>, %s: tensor<f32>, %q: tensor<?x3xi8>) -> (tensor<?x8xbf16>, tensor<?x3xf16>) {
  %doubled = ssm.scale %x by 2.0 : tensor<?x8xbf16>
  %wide = ssm.dequantize %q, %s tensor : tensor<?x3xi8>, tensor<f32> -> tensor<?x3xf16>
  return %doubled, %wide : tensor<?x8xbf16>, tensor<?x3xf16>
}
func.func private @hidden(%x: tensor<?xf32>) -> tensor<?xf32> {
  return %x : tensor<?xf32>
}
func.func @second(%0: tensor<4xi64>) -> tensor<4xi64> {
  return %0 : tensor<4xi64>
}
)");
  ASSERT_EQ(executable->functions().size(), 2u);
  const FunctionInfo *first = executable->findFunction("first");
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(executable->functions()[0].name, "first");
  EXPECT_EQ(executable->findFunction("hidden"), nullptr);
  EXPECT_EQ(executable->findFunction("nowhere"), nullptr);
  ASSERT_EQ(first->inputs.size(), 3u);
  EXPECT_EQ(first->inputs[0].name, "x");
  EXPECT_EQ(first->inputs[0].dtype, DType::BF16);
  EXPECT_EQ(first->inputs[0].shape, (Shape{-1, 8}));
  EXPECT_EQ(first->inputs[1].name, "s");
  EXPECT_EQ(first->inputs[1].shape, Shape());
  EXPECT_EQ(first->inputs[2].dtype, DType::I8);
  ASSERT_EQ(first->outputs.size(), 2u);
  EXPECT_EQ(first->outputs[0].name, "doubled");
  EXPECT_EQ(first->outputs[1].name, "wide");
  EXPECT_EQ(first->outputs[1].dtype, DType::F16);
  EXPECT_EQ(executable->functions()[1].inputs[0].dtype, DType::I64);
  EXPECT_TRUE(executable->weights().empty());
  EXPECT_TRUE(executable->chunks().empty());
  EXPECT_TRUE(executable->observations().empty());

  // A function that returns its argument copies it.
  Tensor x = makeIntegers<int64_t>(DType::I64, {1, -2, 3, int64_t(1) << 62});
  std::vector<Tensor> outputs;
  ASSERT_OK(executable->run("second", {x}, outputs));
  EXPECT_FALSE(outputs[0].overlaps(x));
  EXPECT_FALSE(std::memcmp(outputs[0].data(), x.data(), 32));
}

TEST(Run, OneResultTwice) {
  std::shared_ptr<Executable> executable = compile(R"(
func.func @main(%x: tensor<?xf32>) -> (tensor<?xf32>, tensor<?xf32>, tensor<?xf32>) {
  %y = ssm.neg %x : tensor<?xf32>
  return %y, %x, %y : tensor<?xf32>, tensor<?xf32>, tensor<?xf32>
}
)");
  Tensor x = makeTensor({5});
  std::vector<Tensor> outputs;
  ASSERT_OK(executable->run("main", {x}, outputs));
  ASSERT_EQ(outputs.size(), 3u);
  for (int64_t i = 0; i < 5; ++i) {
    EXPECT_EQ(outputs[0].dataAs<float>()[i], -x.dataAs<float>()[i]);
    EXPECT_EQ(outputs[1].dataAs<float>()[i], x.dataAs<float>()[i]);
    EXPECT_EQ(outputs[2].dataAs<float>()[i], -x.dataAs<float>()[i]);
  }
}

TEST(Run, OutputShapes) {
  std::shared_ptr<Executable> executable = compile(ScanSource);
  std::vector<Shape> shapes =
      take(executable->outputShapes("main", scanInputs(3, 5)));
  EXPECT_EQ(shapes, (std::vector<Shape>{{3, 5, 8}, {3, 8, 4}}));
  EXPECT_FAILS(executable->outputShapes("other", {}), NotFound,
               "expected a function of <source> (main), got 'other'");
  EXPECT_FAILS(executable->outputShapes("main", {}), InvalidArgument,
               "@main: expected 5 inputs, got 0");
  std::vector<Tensor> inputs = scanInputs(3, 5);
  inputs[1] = makeTensor({3, 4, 8});
  EXPECT_FAILS(executable->outputShapes("main", inputs), InvalidArgument,
               "@main: expected dimension 1 of 'delta' to equal dimension 1 of "
               "'u' (L), 5, got 4");
}

//===----------------------------------------------------------------------===//
// Errors of run
//===----------------------------------------------------------------------===//

TEST(RunErrors, Inputs) {
  std::shared_ptr<Executable> executable = compile(ScanSource);
  auto run = [&](const std::vector<Tensor> &inputs,
                 const char *function = "main") {
    std::vector<Tensor> outputs;
    Status status = executable->run(function, inputs, outputs);
    EXPECT_TRUE(outputs.empty());
    return status;
  };
  std::vector<Tensor> good = scanInputs(2, 3);
  auto with = [&](size_t i, Tensor tensor) {
    std::vector<Tensor> inputs = good;
    inputs[i] = std::move(tensor);
    return inputs;
  };
  EXPECT_STATUS(run(good, "Main"), NotFound,
                "expected a function of <source> (main), got 'Main'");
  EXPECT_STATUS(run({}), InvalidArgument, "@main: expected 5 inputs, got 0");
  std::vector<Tensor> many = good;
  many.push_back(good[0]);
  EXPECT_STATUS(run(many), InvalidArgument, "@main: expected 5 inputs, got 6");
  EXPECT_STATUS(run(with(0, makeTensor({2, 24}))), InvalidArgument,
                "input 'u': expected shape [?, ?, 8], got [2, 24]");
  EXPECT_STATUS(run(with(0, makeTensor({2, 3, 8, 1}))), InvalidArgument,
                "input 'u': expected shape [?, ?, 8], got [2, 3, 8, 1]");
  EXPECT_STATUS(run(with(2, makeTensor({4, 8}))), InvalidArgument,
                "input 'A': expected shape [8, 4], got [4, 8]");
  EXPECT_STATUS(run(with(2, makeTensor({}))), InvalidArgument,
                "input 'A': expected shape [8, 4], got []");
  EXPECT_STATUS(run(with(1, makeTensor({2, 3, 8}, DType::F16))),
                InvalidArgument, "input 'delta': expected dtype f32, got f16");
  EXPECT_STATUS(run(with(1, makeTensor({2, 3, 8}, DType::F64))),
                InvalidArgument, "input 'delta': expected dtype f32, got f64");
  float element = 0;
  EXPECT_STATUS(
      run(with(3, take(Tensor::view(&element, DType::F32, {2, 3, 1, 4}, {},
                                    Device::cuda(1))))),
      InvalidArgument, "input 'B': expected device cpu, got cuda:1");
  EXPECT_STATUS(run(with(1, makeTensor({2, 4, 8}))), InvalidArgument,
                "@main: expected dimension 1 of 'delta' to equal dimension 1 "
                "of 'u' (L), 3, got 4");
  EXPECT_STATUS(run(with(4, makeTensor({1, 3, 1, 4}))), InvalidArgument,
                "@main: expected dimension 0 of 'C' to equal dimension 0 of "
                "'u' (B), 2, got 1");
  EXPECT_STATUS(run(with(3, makeTensor({2, 2, 1, 4}))), InvalidArgument,
                "@main: expected dimension 1 of 'B' to equal dimension 1 of "
                "'u' (L), 3, got 2");
}

// A default tensor has no data, but no elements either.
TEST(RunErrors, DefaultTensors) {
  std::shared_ptr<Executable> executable = compile(R"(
func.func @main(%s: tensor<?xf32>) -> tensor<?xf32> {
  %y = ssm.neg %s : tensor<?xf32>
  return %y : tensor<?xf32>
}
)");
  std::vector<Tensor> outputs;
  ASSERT_OK(executable->run("main", {Tensor()}, outputs));
  EXPECT_EQ(outputs[0].shape(), Shape{0});
  outputs = {Tensor()};
  ASSERT_OK(executable->run("main", {Tensor()}, outputs));
  EXPECT_STATUS(executable->run("main", {makeTensor({3})}, outputs),
                InvalidArgument, "output 'y': expected shape [3], got [0]");
}

TEST(RunErrors, Outputs) {
  std::shared_ptr<Executable> executable = compile(AddSource);
  Tensor x = makeTensor({2, 3, 8}), v = makeTensor({2, 3, 8});
  auto run = [&](std::vector<Tensor> outputs) {
    return executable->run("main", {x, v}, outputs);
  };
  EXPECT_STATUS(run({makeTensor({2, 3, 8}), makeTensor({2, 3, 8})}),
                InvalidArgument, "@main: expected 1 outputs, got 2");
  EXPECT_STATUS(run({makeTensor({2, 3, 8}, DType::BF16)}), InvalidArgument,
                "output 'y': expected dtype f32, got bf16");
  EXPECT_STATUS(run({makeTensor({3, 2, 8})}), InvalidArgument,
                "output 'y': expected shape [2, 3, 8], got [3, 2, 8]");
  EXPECT_STATUS(run({makeTensor({6, 8})}), InvalidArgument,
                "output 'y': expected shape [?, ?, 8], got [6, 8]");
  EXPECT_STATUS(run({take(Tensor::view(x.data(), DType::F32, {2, 3, 8}, {},
                                       Device::cuda()))}),
                InvalidArgument, "output 'y': expected device cpu, got cuda:0");
  Tensor row = makeTensor({2, 1, 8});
  EXPECT_STATUS(
      run({take(Tensor::view(row.data(), DType::F32, {2, 3, 8}, {8, 0, 1}))}),
      InvalidArgument,
      "output 'y': expected strides that keep elements apart, got "
      "tensor<2x3x8xf32, strides [8, 0, 1], cpu>");
  EXPECT_STATUS(
      run({x}), InvalidArgument,
      "output 'y': expected memory of its own, got an overlap with input 'x'");
  Tensor large = makeTensor({4, 3, 8});
  v = take(large.slice(0, 0, 2));
  EXPECT_STATUS(
      run({take(large.slice(0, 1, 3))}), InvalidArgument,
      "output 'y': expected memory of its own, got an overlap with input 'v'");
  // Neighbours do not overlap.
  EXPECT_TRUE(run({take(large.slice(0, 2, 4))}).isOk());
}

//===----------------------------------------------------------------------===//
// Pools of states
//===----------------------------------------------------------------------===//

/// States of 4096 bytes each, of all three ops that have such.
const char *PoolSource = R"(
func.func @scan(%u: tensor<?x?x32xf32>, %a: tensor<32x32xf32>, %b: tensor<?x?x1x32xf32>,
                %slots: tensor<?xi32>, %pool: tensor<?x32x32xf32>) -> (tensor<?x?x32xf32>, tensor<?x32x32xf32>) {
  %y, %next = ssm.selective_scan %u, %u, %a, %b, %b initial_state(%pool : tensor<?x32x32xf32>)
      slots(%slots : tensor<?xi32>) {delta_softplus}
      : tensor<?x?x32xf32>, tensor<?x?x32xf32>, tensor<32x32xf32>, tensor<?x?x1x32xf32>, tensor<?x?x1x32xf32>
      -> tensor<?x?x32xf32>, tensor<?x32x32xf32>
  return %y, %next : tensor<?x?x32xf32>, tensor<?x32x32xf32>
}
func.func @ssd(%x: tensor<?x?x4x8xf32>, %decay: tensor<?x?x4xf32>, %b: tensor<?x?x2x32xf32>,
               %slots: tensor<?xi32>, %pool: tensor<?x4x8x32xf32>) -> (tensor<?x?x4x8xf32>, tensor<?x4x8x32xf32>) {
  %y, %next = ssm.ssd %x decay(%decay : tensor<?x?x4xf32>) B(%b) C(%b)
      initial_states(%pool : tensor<?x4x8x32xf32>) slots(%slots : tensor<?xi32>)
      : tensor<?x?x4x8xf32>, tensor<?x?x2x32xf32>, tensor<?x?x2x32xf32> -> tensor<?x?x4x8xf32>, tensor<?x4x8x32xf32>
  return %y, %next : tensor<?x?x4x8xf32>, tensor<?x4x8x32xf32>
}
func.func @conv(%x: tensor<?x?x512xf32>, %w: tensor<512x3xf32>, %b: tensor<512xf32>,
                %slots: tensor<?xi32>, %pool: tensor<?x2x512xf32>) -> (tensor<?x?x512xf32>, tensor<?x2x512xf32>) {
  %y, %next = ssm.causal_conv %x, %w bias(%b : tensor<512xf32>) initial_state(%pool : tensor<?x2x512xf32>)
      slots(%slots : tensor<?xi32>) : tensor<?x?x512xf32>, tensor<512x3xf32> -> tensor<?x?x512xf32>, tensor<?x2x512xf32>
  return %y, %next : tensor<?x?x512xf32>, tensor<?x2x512xf32>
}
)";

/// Inputs of a function of PoolSource but for the pool, for sequences of
/// `length` tokens in the given slots.
std::vector<Tensor> poolInputs(const std::string &function, int64_t length,
                               const std::vector<int32_t> &slots) {
  int64_t batch = static_cast<int64_t>(slots.size());
  // Rates and logarithms of decays.
  auto negative = [](const Shape &shape) {
    Tensor tensor = makeTensor(shape);
    for (int64_t i = 0; i < tensor.numElements(); ++i)
      tensor.dataAs<float>()[i] = -std::abs(tensor.dataAs<float>()[i]);
    return tensor;
  };
  Tensor named = makeIntegers<int32_t>(DType::I32, slots);
  if (function == "scan")
    return {makeTensor({batch, length, 32}), negative({32, 32}),
            makeTensor({batch, length, 1, 32}), named};
  if (function == "ssd")
    return {makeTensor({batch, length, 4, 8}), negative({batch, length, 4}),
            makeTensor({batch, length, 2, 32}), named};
  return {makeTensor({batch, length, 512}), makeTensor({512, 3}),
          makeTensor({512}), named};
}
Shape poolShape(const std::string &function, int64_t slots) {
  return function == "scan"  ? Shape{slots, 32, 32}
         : function == "ssd" ? Shape{slots, 4, 8, 32}
                             : Shape{slots, 2, 512};
}

TEST(Pools, UpdatedInPlace) {
  std::shared_ptr<Executable> executable = compile(PoolSource);
  constexpr int64_t Slots = 6, SlotBytes = 4096;
  if (sysconf(_SC_PAGESIZE) != SlotBytes)
    GTEST_SKIP() << "pages are not of " << SlotBytes << " bytes";
  void *memory = mmap(nullptr, Slots * SlotBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  for (std::string function : {"scan", "ssd", "conv"})
    for (int64_t length : {1, 3, 70}) {
      SCOPED_TRACE(function + ", length " + std::to_string(length));
      EXPECT_EQ(executable->findFunction(function)->outputs[0].updatedInput,
                -1);
      EXPECT_EQ(executable->findFunction(function)->outputs[1].updatedInput, 4);
      std::vector<Tensor> inputs = poolInputs(function, length, {4, -1, 1, -3});
      Shape shape = poolShape(function, Slots);
      Tensor given = makeTensor(shape);
      ASSERT_EQ(given.numBytes(), Slots * SlotBytes);
      inputs.push_back(given);
      Tensor kept = take(given.to(DType::F32));
      std::vector<Tensor> apart;
      ASSERT_OK(executable->run(function, inputs, apart));
      EXPECT_EQ(valuesOf(given), valuesOf(kept));

      // What is not of the call can be neither read nor written.
      Tensor pool = take(Tensor::view(memory, DType::F32, shape));
      ASSERT_TRUE(pool.copyFrom(given).isOk());
      inputs.back() = pool;
      std::vector<Tensor> outputs = {
          take(Tensor::empty(DType::F32, apart[0].shape())), pool};
      auto protect = [&](int access) {
        for (int64_t slot : {0, 2, 3, 5})
          EXPECT_EQ(mprotect(static_cast<char *>(memory) + slot * SlotBytes,
                             SlotBytes, access),
                    0);
      };
      protect(PROT_NONE);
      Status status = executable->run(function, inputs, outputs);
      protect(PROT_READ | PROT_WRITE);
      ASSERT_OK(status);
      EXPECT_EQ(valuesOf(outputs[0]), valuesOf(apart[0]));
      EXPECT_EQ(valuesOf(pool), valuesOf(apart[1]));
      std::vector<double> before = valuesOf(kept), after = valuesOf(pool);
      size_t each = before.size() / Slots;
      for (size_t slot = 0; slot < Slots; ++slot)
        EXPECT_EQ(std::equal(before.begin() + slot * each,
                             before.begin() + (slot + 1) * each,
                             after.begin() + slot * each),
                  slot != 4 && slot != 1)
            << slot;
    }
  munmap(memory, Slots * SlotBytes);
}

TEST(Pools, Errors) {
  std::shared_ptr<Executable> executable = compile(PoolSource);
  std::vector<Tensor> inputs = poolInputs("ssd", 1, {2, 3, 0});
  inputs.push_back(makeTensor(poolShape("ssd", 3)));
  std::vector<Tensor> outputs;
  EXPECT_STATUS(executable->run("ssd", inputs, outputs), InvalidArgument,
                "@ssd: expected a slot below 3, the states of the pool, got 3");
  // Nobody has any.
  inputs.back() = makeTensor(poolShape("ssd", 0));
  outputs.clear();
  EXPECT_STATUS(executable->run("ssd", inputs, outputs), InvalidArgument,
                "@ssd: expected a slot below 0, the states of the pool, got 2");
  inputs[3] = makeIntegers<int32_t>(DType::I32, {-1, -1, -1});
  outputs.clear();
  EXPECT_TRUE(executable->run("ssd", inputs, outputs).isOk());
  // One slot for two sequences: either may stay.
  inputs[3] = makeIntegers<int32_t>(DType::I32, {1, 1, 0});
  inputs.back() = makeTensor(poolShape("ssd", 3));
  outputs.clear();
  EXPECT_TRUE(executable->run("ssd", inputs, outputs).isOk());
  // One slot a sequence.
  inputs[3] = makeIntegers<int32_t>(DType::I32, {1, 0});
  outputs.clear();
  EXPECT_FALSE(executable->run("ssd", inputs, outputs).isOk());

  // All of the pool or nothing of it.
  inputs = poolInputs("ssd", 1, {0});
  Tensor memory = makeTensor(poolShape("ssd", 4));
  inputs.push_back(take(memory.slice(0, 0, 3)));
  outputs = {makeTensor({1, 1, 4, 8}), take(memory.slice(0, 1, 4))};
  Status status = executable->run("ssd", inputs, outputs);
  EXPECT_EQ(status.code(), StatusCode::InvalidArgument);
  EXPECT_EQ(status.message().find(
                "output 'next': expected all of input 'pool', contiguous and "
                "aligned, to be updated in place, or memory of its own, got"),
            0u)
      << status.message();
}

// A pool that something else reads is not to change under it.
TEST(Pools, ReadElsewhere) {
  std::shared_ptr<Executable> executable = compile(R"(
func.func @main(%x: tensor<?x?x8xf32>, %w: tensor<8x2xf32>, %slots: tensor<?xi32>, %pool: tensor<?x1x8xf32>)
    -> (tensor<?x?x8xf32>, tensor<?x1x8xf32>, tensor<?x1x8xf32>) {
  %y, %next = ssm.causal_conv %x, %w initial_state(%pool : tensor<?x1x8xf32>) slots(%slots : tensor<?xi32>)
      : tensor<?x?x8xf32>, tensor<8x2xf32> -> tensor<?x?x8xf32>, tensor<?x1x8xf32>
  %twice = ssm.add %pool, %pool : tensor<?x1x8xf32>, tensor<?x1x8xf32>
  return %y, %next, %twice : tensor<?x?x8xf32>, tensor<?x1x8xf32>, tensor<?x1x8xf32>
})");
  EXPECT_EQ(executable->findFunction("main")->outputs[1].updatedInput, -1);
  Tensor pool = makeTensor({3, 1, 8});
  std::vector<Tensor> inputs = {makeTensor({1, 2, 8}), makeTensor({8, 2}),
                                makeIntegers<int32_t>(DType::I32, {2}), pool};
  std::vector<Tensor> outputs = {makeTensor({1, 2, 8}), pool,
                                 makeTensor({3, 1, 8})};
  EXPECT_STATUS(executable->run("main", inputs, outputs), InvalidArgument,
                "output 'next': expected memory of its own, got an overlap "
                "with input 'pool'");
}

TEST(RunErrors, OverlappingOutputs) {
  std::shared_ptr<Executable> executable = compile(ScanSource);
  Tensor memory = makeTensor({256});
  Tensor y = take(Tensor::view(memory.data(), DType::F32, {2, 3, 8}));
  Tensor state =
      take(Tensor::view(memory.dataAs<float>() + 47, DType::F32, {2, 8, 4}));
  std::vector<Tensor> outputs = {y, state};
  EXPECT_STATUS(executable->run("main", scanInputs(2, 3), outputs),
                InvalidArgument,
                "output 'state': expected memory of its own, got an overlap "
                "with output 'y'");
  outputs[1] =
      take(Tensor::view(memory.dataAs<float>() + 48, DType::F32, {2, 8, 4}));
  EXPECT_TRUE(executable->run("main", scanInputs(2, 3), outputs).isOk());
}

TEST(RunErrors, EmbeddingIdsOfAnyTable) {
  std::shared_ptr<Executable> executable = compile(
      "func.func @main(%ids: tensor<?xi32>, %t: tensor<?x2xf32>) -> "
      "tensor<?x2xf32> {\n"
      "  %y = ssm.embedding %ids, %t : tensor<?xi32>, tensor<?x2xf32> -> "
      "tensor<?x2xf32>\n  return %y : tensor<?x2xf32>\n}\n");
  auto run = [&](const std::vector<int32_t> &ids, int64_t rows,
                 std::vector<Tensor> &outputs) {
    return executable->run("main",
                           {makeIntegers<int32_t>(DType::I32, ids),
                            take(Tensor::empty(DType::F32, {rows, 2}, true))},
                           outputs);
  };
  std::vector<Tensor> outputs;
  for (int64_t rows : {1, 5, 7}) {
    ASSERT_OK(run({0, int32_t(rows - 1)}, rows, outputs));
    outputs.clear();
    EXPECT_STATUS(run({int32_t(rows)}, rows, outputs), InvalidArgument,
                  "@main: expected ids of an embedding to be in [0, " +
                      std::to_string(rows) + "), got " + std::to_string(rows));
  }
  // Of none there is no row to copy.
  EXPECT_STATUS(run({0}, 0, outputs), InvalidArgument,
                "@main: expected ids of an embedding to be in [0, 0), got 0");
  ASSERT_OK(run({}, 0, outputs));
}

TEST(RunErrors, EmbeddingIds) {
  for (const char *type : {"i32", "i64"}) {
    std::string source = std::string("func.func @main(%ids: tensor<?x") + type +
                         ">) -> tensor<?x2xf32> {\n  %t = ssm.get_weight "
                         "@table : tensor<10x2xf32>\n"
                         "  %y = ssm.embedding %ids, %t : tensor<?x" +
                         type +
                         ">, tensor<10x2xf32> -> tensor<?x2xf32>\n  return %y "
                         ": tensor<?x2xf32>\n}\n"
                         "ssm.weight @table : tensor<10x2xf32>\n";
    std::shared_ptr<Executable> executable = compile(source);
    Tensor table = makeTensor({10, 2});
    ASSERT_OK(executable->bindWeight("table", table));
    auto run = [&](const std::vector<int64_t> &ids,
                   std::vector<Tensor> &outputs) {
      if (type == std::string("i64"))
        return executable->run("main", {makeIntegers<int64_t>(DType::I64, ids)},
                               outputs);
      return executable->run(
          "main",
          {makeIntegers<int32_t>(DType::I32,
                                 std::vector<int32_t>(ids.begin(), ids.end()))},
          outputs);
    };
    std::vector<Tensor> outputs;
    EXPECT_STATUS(
        run({0, 9, 10}, outputs), InvalidArgument,
        "@main: expected ids of an embedding to be in [0, 10), got 10");
    EXPECT_STATUS(
        run({-1, 10}, outputs), InvalidArgument,
        "@main: expected ids of an embedding to be in [0, 10), got -1");
    if (type == std::string("i64"))
      EXPECT_STATUS(run({int64_t(1) << 40}, outputs), InvalidArgument,
                    "@main: expected ids of an embedding to be in [0, 10), got "
                    "1099511627776");
    EXPECT_TRUE(outputs.empty());
    // The error is that of one call.
    ASSERT_OK(run({9, 0}, outputs));
    EXPECT_EQ(valuesOf(outputs[0]),
              (std::vector<double>{valuesOf(table)[18], valuesOf(table)[19],
                                   valuesOf(table)[0], valuesOf(table)[1]}));
  }
}

TEST(RunErrors, SequenceStarts) {
  std::shared_ptr<Executable> executable = compile(R"(
func.func @main(%x: tensor<?x?x4xf32>, %w: tensor<4x2xf32>, %starts: tensor<?xi32>) -> (tensor<?x?x4xf32>, tensor<?x1x4xf32>) {
  %y, %s = ssm.causal_conv %x, %w seq_starts(%starts : tensor<?xi32>)
      : tensor<?x?x4xf32>, tensor<4x2xf32> -> tensor<?x?x4xf32>, tensor<?x1x4xf32>
  return %y, %s : tensor<?x?x4xf32>, tensor<?x1x4xf32>
}
)");
  auto run = [&](const std::vector<int32_t> &starts, int64_t batch = 1) {
    std::vector<Tensor> outputs;
    return executable->run("main",
                           {makeTensor({batch, 7, 4}), makeTensor({4, 2}),
                            makeIntegers<int32_t>(DType::I32, starts)},
                           outputs);
  };
  EXPECT_TRUE(run({0}).isOk());
  EXPECT_TRUE(run({0, 0, 7, 7}).isOk());
  EXPECT_STATUS(run({1, 3}), InvalidArgument,
                "@main: expected seq_starts[0] to be 0, got 1");
  EXPECT_STATUS(run({-1}), InvalidArgument,
                "@main: expected seq_starts[0] to be 0, got -1");
  EXPECT_STATUS(run({0, 5, 3}), InvalidArgument,
                "@main: expected seq_starts[2] to be in [5, 7], got 3");
  EXPECT_STATUS(run({0, 8}), InvalidArgument,
                "@main: expected seq_starts[1] to be in [0, 7], got 8");
  EXPECT_STATUS(run({0}, 2), InvalidArgument,
                "@main: expected dimension 0 of 'x' to be 1, got 2");
}

// Tokens that no sequence covers would keep what was in memory.
TEST(RunErrors, NoSequenceForTokens) {
  std::shared_ptr<Executable> executable = compile(R"(
func.func @main(%x: tensor<1x?x4xf32>, %w: tensor<4x2xf32>, %starts: tensor<?xi32>) -> tensor<1x?x4xf32> {
  %y = ssm.causal_conv %x, %w seq_starts(%starts : tensor<?xi32>)
      : tensor<1x?x4xf32>, tensor<4x2xf32> -> tensor<1x?x4xf32>
  return %y : tensor<1x?x4xf32>
}
)");
  Tensor none = take(Tensor::empty(DType::I32, {0}));
  std::vector<Tensor> outputs;
  EXPECT_TRUE(executable
                  ->run("main",
                        {makeTensor({1, 0, 4}), makeTensor({4, 2}), none},
                        outputs)
                  .isOk());
  outputs.clear();
  Status status = executable->run(
      "main", {makeTensor({1, 3, 4}), makeTensor({4, 2}), none}, outputs);
  EXPECT_EQ(status.code(), StatusCode::InvalidArgument) << status.toString();
}

TEST(RunErrors, Broadcast) {
  std::shared_ptr<Executable> executable = compile(R"(
func.func @main(%x: tensor<?x?xf32>, %v: tensor<?xf32>) -> tensor<?x?xf32> {
  %y = ssm.mul %x, %v : tensor<?x?xf32>, tensor<?xf32>
  return %y : tensor<?x?xf32>
}
)");
  std::vector<Tensor> outputs;
  EXPECT_STATUS(
      executable->run("main", {makeTensor({2, 3}), makeTensor({2})}, outputs),
      InvalidArgument,
      "@main: expected dimension 0 of 'v' to equal dimension 1 of 'x', 3, got "
      "2");
  EXPECT_TRUE(
      executable->run("main", {makeTensor({2, 3}), makeTensor({3})}, outputs)
          .isOk());
}

//===----------------------------------------------------------------------===//
// Errors of compilation
//===----------------------------------------------------------------------===//

TEST(CompileErrors, Contexts) {
  ContextOptions options;
  options.threads = -1;
  EXPECT_FAILS(Context::create(options), InvalidArgument,
               "expected a thread count of at least 0, got -1");
  options.threads = 0;
  options.device = "cuda";
  setenv("COREY_CUDA_DRIVER", "/nowhere/libcuda.so", 1);
  Expected<std::shared_ptr<Context>> gpu = Context::create(options);
  ASSERT_FALSE(static_cast<bool>(gpu));
  EXPECT_EQ(gpu.status().code(), StatusCode::NotFound);
  EXPECT_EQ(
      gpu.status().message().rfind("expected a CUDA device, got none: ", 0),
      0u);
  options.device = "tpu";
  Expected<std::shared_ptr<Context>> context = Context::create(options);
  ASSERT_FALSE(static_cast<bool>(context));
  EXPECT_EQ(context.status().code(), StatusCode::InvalidArgument);
  EXPECT_NE(context.status().message().find("'tpu'"), std::string::npos)
      << context.status().message();
}

TEST(Contexts, Threads) {
  std::shared_ptr<Context> context = take(Context::create());
  EXPECT_GE(context->getThreads(), 1);
  EXPECT_EQ(context->getDevice(), Device::cpu());
  ASSERT_OK(context->setThreads(3));
  EXPECT_EQ(context->getThreads(), 3);
  EXPECT_STATUS(context->setThreads(-2), InvalidArgument,
                "expected a thread count of at least 0, got -2");
  EXPECT_EQ(context->getThreads(), 3);
  ASSERT_OK(context->setThreads(0));
  EXPECT_GE(context->getThreads(), 1);
}

TEST(CompileErrors, Options) {
  std::shared_ptr<Context> context = newContext();
  auto with = [](auto change) {
    CompileOptions options;
    change(options);
    return options;
  };
  for (const char *policy : {"", "greedy", "Unsplit"})
    EXPECT_FAILS(
        context->compile(AddSource,
                         with([&](CompileOptions &o) { o.policy = policy; })),
        InvalidArgument,
        std::string("expected a policy of unsplit, static, entropy, sampled, "
                    "token, midpoint, random, cheap, variance, kurtosis, "
                    "guarded, table, cost-model, measured, got '") +
            policy + "'");
  for (const char *chunk : {"0", "-4", "x", "4x", "99999999999999999999"})
    EXPECT_FAILS(
        context->compile(AddSource, with([&](CompileOptions &o) {
                           o.policy = std::string("static:") + chunk;
                         })),
        InvalidArgument,
        std::string("policy 'static': expected chunk to be an integer from 1 "
                    "to 1099511627776, got '") +
            chunk + "'");
  for (int bits : {128, -1, 1024, 1})
    EXPECT_FAILS(
        context->compile(AddSource,
                         with([&](CompileOptions &o) { o.vectorBits = bits; })),
        InvalidArgument,
        "expected vectorBits to be 0, 256 or 512, got " + std::to_string(bits));
  for (int level : {-1, 4})
    EXPECT_FAILS(
        context->compile(AddSource,
                         with([&](CompileOptions &o) { o.optLevel = level; })),
        InvalidArgument,
        "expected optLevel to be from 0 to 3, got " + std::to_string(level));
  // The same checks stand before emit() and exportProgram().
  CompileOptions bad;
  bad.optLevel = 9;
  EXPECT_FAILS(context->emit(AddSource, "llvm", bad), InvalidArgument,
               "expected optLevel to be from 0 to 3, got 9");
  EXPECT_STATUS(context->exportProgram(AddSource, "unused.o", {"o"}, bad),
                InvalidArgument, "expected optLevel to be from 0 to 3, got 9");
}

// A width that the host lacks is refused or emulated; it must not end the
// process.
TEST(CompileErrorsDeathTest, VectorsTheHostLacks) {
  if (__builtin_cpu_supports("avx512f"))
    GTEST_SKIP() << "the host has them";
  EXPECT_EXIT(
      {
        CompileOptions options;
        options.vectorBits = 512;
        Expected<std::shared_ptr<Executable>> executable =
            newContext()->compile(BlockSource, options);
        // Export generates code as well, and must refuse the same.
        const std::string expected =
            "expected vectorBits to be 0 or 256 on a processor without "
            "AVX-512, got 512";
        Status exported = newContext()->exportProgram(
            BlockSource, testing::TempDir() + "wide.o", {"o"}, options);
        bool ok = !executable && executable.status().message() == expected &&
                  exported.message() == expected;
        std::exit(ok ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

TEST(CompileErrors, Text) {
  std::shared_ptr<Context> context = newContext();
  auto failure = [&](std::string_view source) {
    Expected<std::shared_ptr<Executable>> executable =
        context->compile(source, {}, "model.mlir");
    EXPECT_FALSE(static_cast<bool>(executable));
    EXPECT_EQ(executable.status().code(), StatusCode::CompileError);
    return executable.status().message();
  };
  EXPECT_EQ(failure(""), "model.mlir: expected at least one public function "
                         "with a body, got none");
  EXPECT_EQ(failure("func.func private @f(tensor<4xf32>)\n"),
            "model.mlir: expected at least one public function with a body, "
            "got none");
  EXPECT_EQ(failure("func.func @main(\n"),
            "model.mlir:1:17: expected non-function type");
  EXPECT_EQ(failure("func.func @main(%x: tensor<?xf32>) -> tensor<?xf32> {\n"
                    "  %y = ssm.nothing %x : tensor<?xf32>\n  return %y : "
                    "tensor<?xf32>\n}\n"),
            "model.mlir:2:8: custom op 'ssm.nothing' is unknown");
  EXPECT_EQ(failure("func.func @main(%x: tensor<?xf64>) -> tensor<?xf64> {\n"
                    "  %y = ssm.neg %x : tensor<?xf64>\n  return %y : "
                    "tensor<?xf64>\n}\n"),
            "model.mlir:2:8: 'ssm.neg' op operand #0 must be ranked tensor of "
            "16-bit float or bfloat16 type or 32-bit "
            "float values, but got 'tensor<?xf64>'");
  EXPECT_EQ(failure("func.func @main(%x: tensor<?x8xf32>, %w: tensor<8xf32>) "
                    "-> tensor<?x8xf32> {\n"
                    "  %y = ssm.rms_norm %x, %w {group_size = 3 : i64}\n"
                    "      : tensor<?x8xf32>, tensor<8xf32> -> "
                    "tensor<?x8xf32>\n  return %y : tensor<?x8xf32>\n}\n"),
            "model.mlir:2:8: 'ssm.rms_norm' op expected 'group_size' to divide "
            "D = 8, got 3");
  EXPECT_EQ(failure("func.func @main(%x: tensor<?x8xf32>, %w: tensor<4x9xf32>) "
                    "-> tensor<?x4xf32> {\n"
                    "  %y = ssm.projection %x, %w : tensor<?x8xf32>, "
                    "tensor<4x9xf32> -> tensor<?x4xf32>\n"
                    "  return %y : tensor<?x4xf32>\n}\n"),
            "model.mlir:2:8: 'ssm.projection' op expected dimension 1 of "
            "operand 'weight' to be K = 8 (from 'x'), got 9");
  EXPECT_EQ(failure("func.func @main(%x: tensor<?xf32>) -> tensor<?xf32> {\n"
                    "  %y = ssm.neg %z : tensor<?xf32>\n  return %y : "
                    "tensor<?xf32>\n}\n"),
            "model.mlir:2:16: use of undeclared SSA value name");
  EXPECT_EQ(
      failure("func.func @main(%x: tensor<?xf32>) -> tensor<?xf32> {\n"
              "  %w = ssm.get_weight @w : tensor<3xf32>\n  return %x : "
              "tensor<?xf32>\n}\n"),
      "model.mlir:2:8: 'ssm.get_weight' op expected @w to name an ssm.weight");
  // A failure leaves nothing behind.
  EXPECT_TRUE(static_cast<bool>(context->compile(AddSource, {}, "model.mlir")));
}

TEST(CompileErrors, Signatures) {
  std::shared_ptr<Context> context = newContext();
  auto failure = [&](std::string_view source) {
    Expected<std::shared_ptr<Executable>> executable =
        context->compile(source, {}, "model.mlir");
    EXPECT_FALSE(static_cast<bool>(executable));
    EXPECT_EQ(executable.status().code(), StatusCode::CompileError)
        << executable.status().toString();
    return executable.status().message();
  };
  // None may bring the process down.
  EXPECT_NE(failure("func.func @main(%x: index) -> tensor<3xf32> {\n  %y = "
                    "arith.constant dense<0.0> : tensor<3xf32>\n"
                    "  return %y : tensor<3xf32>\n}\n"),
            "");
  EXPECT_NE(failure("func.func @main(%x: tensor<*xf32>) -> tensor<3xf32> {\n"
                    "  %y = arith.constant dense<0.0> : tensor<3xf32>\n  "
                    "return %y : tensor<3xf32>\n}\n"),
            "");
  EXPECT_NE(failure("func.func @main(%x: tensor<3xi1>) -> tensor<3xi1> {\n  "
                    "return %x : tensor<3xi1>\n}\n"),
            "");
  EXPECT_NE(failure("func.func @main(%x: tensor<3xf32>) -> index {\n  %c = "
                    "arith.constant 1 : index\n"
                    "  return %c : index\n}\n"),
            "");
  EXPECT_NE(failure("func.func @main(%m: memref<3xf32>) {\n  return\n}\n"), "");
}

TEST(CompileErrors, Files) {
  std::shared_ptr<Context> context = newContext();
  std::string path = temporaryPath("missing.mlir");
  EXPECT_FAILS(context->compileFile(path), NotFound,
               path + ": No such file or directory");
  EXPECT_FAILS(context->compileFile(testing::TempDir()), IOError,
               testing::TempDir() + ": expected a file, got a directory");
  path = temporaryPath("program.mlir");
  std::FILE *file = std::fopen(path.c_str(), "w");
  ASSERT_TRUE(file);
  std::fputs(AddSource, file);
  std::fclose(file);
  std::shared_ptr<Executable> executable = take(context->compileFile(path));
  EXPECT_FAILS(executable->outputShapes("none", {}), NotFound,
               "expected a function of " + path + " (main), got 'none'");
  std::remove(path.c_str());
}

//===----------------------------------------------------------------------===//
// Strides
//===----------------------------------------------------------------------===//

TEST(Strides, InputsAndOutputs) {
  std::shared_ptr<Executable> executable = compile(AddSource);
  Tensor x = makeTensor({3, 5, 8}), v = makeTensor({3, 5, 8}, DType::F32, 3);
  std::vector<Tensor> wanted;
  ASSERT_OK(executable->run("main", {x, v}, wanted));

  // The same elements, laid out in other ways.
  std::vector<Tensor> inputs;
  auto add = [&](Tensor target) {
    ASSERT_TRUE(target.copyFrom(x).isOk());
    inputs.push_back(target);
  };
  add(take(makeTensor({8, 3, 5}).permute({1, 2, 0})));
  add(take(makeTensor({5, 3, 8}).transpose(0, 1)));
  add(take(take(makeTensor({6, 5, 8}).slice(0, 0, 6, 2)).slice(1, 4, -1, -1)));
  add(take(
      take(makeTensor({3, 5, 8}).slice(0, 2, -1, -1)).slice(2, 7, -1, -1)));
  add(take(take(makeTensor({3, 9, 17}).slice(1, 1, 6)).slice(2, 0, 16, 2)));
  // Aligned to an element only.
  Tensor memory = makeTensor({121});
  add(take(Tensor::view(memory.dataAs<float>() + 1, DType::F32, {3, 5, 8})));
  for (const Tensor &input : inputs) {
    SCOPED_TRACE(input.describe());
    std::vector<Tensor> outputs;
    ASSERT_OK(executable->run("main", {input, v}, outputs));
    EXPECT_EQ(valuesOf(outputs[0]), valuesOf(wanted[0]));
    for (const Tensor &target :
         {take(makeTensor({8, 3, 5}).permute({1, 2, 0})),
          take(take(makeTensor({3, 5, 8}).slice(0, 2, -1, -1))
                   .slice(2, 7, -1, -1)),
          take(take(makeTensor({3, 9, 17}).slice(1, 1, 6))
                   .slice(2, 0, 16, 2))}) {
      SCOPED_TRACE(target.describe());
      outputs = {target};
      ASSERT_OK(executable->run("main", {input, v}, outputs));
      EXPECT_EQ(outputs[0].data(), target.data());
      EXPECT_EQ(valuesOf(outputs[0]), valuesOf(wanted[0]));
    }
  }
  // One row for all, and one number for all.
  Tensor row = makeTensor({8});
  for (const Tensor &input :
       {take(Tensor::view(row.data(), DType::F32, {3, 5, 8}, {0, 0, 1})),
        take(Tensor::view(row.data(), DType::F32, {3, 5, 8}, {0, 0, 0})),
        take(Tensor::view(row.data(), DType::F32, {3, 5, 8}, {0, 1, 0}))}) {
    SCOPED_TRACE(input.describe());
    std::vector<Tensor> outputs, plain;
    ASSERT_OK(executable->run("main", {input, v}, outputs));
    ASSERT_OK(executable->run("main", {take(input.to(DType::F32)), v}, plain));
    EXPECT_EQ(valuesOf(outputs[0]), valuesOf(plain[0]));
  }
}

// The product of matrices takes strides of its own.
TEST(Strides, Projections) {
  std::shared_ptr<Executable> executable = compile(R"(
func.func @main(%x: tensor<?x?x16xf32>, %w: tensor<12x16xf32>) -> tensor<?x?x12xf32> {
  %y = ssm.projection %x, %w : tensor<?x?x16xf32>, tensor<12x16xf32> -> tensor<?x?x12xf32>
  return %y : tensor<?x?x12xf32>
}
)");
  Tensor memory = makeTensor({2000});
  float *base = memory.dataAs<float>() + 900;
  for (const Shape &x : std::vector<Shape>{{96, 16, 1},
                                           {16, 96, 1},
                                           {0, 16, 1},
                                           {96, 0, 1},
                                           {0, 0, 1},
                                           {-96, 16, 1},
                                           {96, -16, 1},
                                           {96, 8, 1},
                                           {1, 16, 1},
                                           {4, 2, 1},
                                           {100, 33, 2}})
    for (const Shape &w : std::vector<Shape>{
             {16, 1}, {40, 1}, {0, 1}, {-16, 1}, {4, 1}, {1, 12}}) {
      Tensor input = take(Tensor::view(base, DType::F32, {3, 6, 16}, x));
      Tensor weight = take(Tensor::view(base, DType::F32, {12, 16}, w));
      SCOPED_TRACE(input.describe() + " " + weight.describe());
      std::vector<Tensor> outputs, plain;
      ASSERT_OK(executable->run("main", {input, weight}, outputs));
      ASSERT_OK(executable->run(
          "main", {take(input.to(DType::F32)), take(weight.to(DType::F32))},
          plain));
      std::vector<double> got = valuesOf(outputs[0]), want = valuesOf(plain[0]);
      for (size_t i = 0; i < want.size(); ++i)
        ASSERT_NEAR(got[i], want[i], 1e-4) << "element " << i;
    }
}

TEST(Strides, DLPack) {
  std::shared_ptr<Executable> executable = compile(AddSource);
  Tensor x = makeTensor({5, 2, 8}), v = makeTensor({2, 5, 8});
  // A transposed tensor goes in, results go into memory described by DLPack.
  Tensor in = take(Tensor::fromDLPack(take(x.transpose(0, 1)).toDLPack()));
  Tensor out = take(Tensor::fromDLPack(
      take(makeTensor({2, 8, 5}).transpose(1, 2)).toDLPack()));
  std::vector<Tensor> outputs = {out};
  ASSERT_OK(executable->run("main", {in, v}, outputs));
  DLManagedTensor *managed = outputs[0].toDLPack();
  ASSERT_EQ(managed->dl_tensor.ndim, 3);
  auto *data = static_cast<float *>(managed->dl_tensor.data);
  const int64_t *strides = managed->dl_tensor.strides;
  for (int64_t b = 0; b < 2; ++b)
    for (int64_t l = 0; l < 5; ++l)
      for (int64_t d = 0; d < 8; ++d)
        EXPECT_EQ(data[b * strides[0] + l * strides[1] + d * strides[2]],
                  x.dataAs<float>()[(l * 2 + b) * 8 + d] +
                      v.dataAs<float>()[(b * 5 + l) * 8 + d]);
  managed->deleter(managed);
}

//===----------------------------------------------------------------------===//
// Weights
//===----------------------------------------------------------------------===//

TEST(Weights, Bind) {
  std::shared_ptr<Executable> executable = compile(WeightSource);
  ASSERT_EQ(executable->weights().size(), 2u);
  EXPECT_EQ(executable->weights()[0].name, "matrix");
  EXPECT_EQ(executable->weights()[0].shape, (Shape{6, 8}));
  EXPECT_EQ(executable->weights()[1].dtype, DType::BF16);
  ASSERT_EQ(executable->functions()[0].inputs.size(), 1u);
  Tensor x = makeTensor({3, 8}), matrix = makeTensor({6, 8}),
         bias = makeTensor({6}, DType::BF16);
  std::vector<Tensor> outputs;
  EXPECT_STATUS(executable->run("main", {x}, outputs), InvalidArgument,
                "weight 'matrix': expected it to be bound before @main runs, "
                "got no tensor");
  EXPECT_STATUS(executable->bindWeight("nothing", matrix), NotFound,
                "expected a weight of <source>, got 'nothing'");
  EXPECT_STATUS(
      executable->bindWeight("matrix", makeTensor({6, 8}, DType::F16)),
      InvalidArgument,
      "weight 'matrix' (bound by name): expected dtype f32, got f16");
  EXPECT_STATUS(
      executable->bindWeight("matrix", makeTensor({8, 6})), InvalidArgument,
      "weight 'matrix' (bound by name): expected shape [6, 8], got [8, 6]");
  EXPECT_STATUS(
      executable->bindWeight("matrix", makeTensor({48})), InvalidArgument,
      "weight 'matrix' (bound by name): expected shape [6, 8], got [48]");
  EXPECT_STATUS(
      executable->bindWeight(
          "matrix",
          take(Tensor::view(x.data(), DType::F32, {6, 8}, {}, Device::cuda()))),
      InvalidArgument,
      "weight 'matrix' (bound by name): expected device cpu, got cuda:0");
  ASSERT_OK(executable->bindWeight("matrix", matrix));
  EXPECT_STATUS(executable->run("main", {x}, outputs), InvalidArgument,
                "weight 'bias': expected it to be bound before @main runs, got "
                "no tensor");
  ASSERT_OK(executable->bindWeight("bias", bias));
  ASSERT_OK(executable->run("main", {x}, outputs));
  for (int64_t r = 0; r < 3; ++r)
    for (int64_t m = 0; m < 6; ++m) {
      double sum = valuesOf(bias)[m];
      for (int64_t k = 0; k < 8; ++k)
        sum += valuesOf(x)[r * 8 + k] * valuesOf(matrix)[m * 8 + k];
      EXPECT_NEAR(valuesOf(outputs[0])[r * 6 + m], sum, 1e-5);
    }
  // Axes of size 1 and strides do not matter, and a new tensor takes the place
  // of the old one.
  Tensor flipped =
      take(take(makeTensor({8, 1, 6}).permute({2, 1, 0})).unsqueeze(0));
  ASSERT_TRUE(flipped.copyFrom(take(matrix.reshape({1, 6, 1, 8}))).isOk());
  std::vector<Tensor> again;
  ASSERT_OK(executable->bindWeight("matrix", flipped));
  ASSERT_OK(executable->run("main", {x}, again));
  EXPECT_EQ(valuesOf(again[0]), valuesOf(outputs[0]));
  // Results may not be written over a weight.
  ASSERT_OK(executable->bindWeight("matrix", matrix));
  again = {take(Tensor::view(matrix.data(), DType::F32, {3, 6}))};
  EXPECT_STATUS(executable->run("main", {x}, again), InvalidArgument,
                "output 'y': expected memory of its own, got an overlap with "
                "weight 'matrix'");
}

TEST(Weights, Files) {
  std::string path = temporaryPath("weights.safetensors");
  Tensor matrix = makeTensor({6, 8}), other = makeTensor({6, 8}, DType::F32, 2);
  ASSERT_OK(writeSafeTensors(
      path, {{"layers.0.proj.weight", matrix},
             {"layers.0.bias", makeTensor({6, 1}, DType::BF16)},
             {"b.proj.weight", other},
             {"b.bias", makeTensor({6}, DType::BF16)},
             {"c.proj.weight", makeTensor({6, 8}, DType::BF16)},
             {"d.proj.weight", makeTensor({6, 7})},
             {"proj.weight", matrix},
             {"bias", makeTensor({6}, DType::BF16)}}));
  SafeTensors file = take(SafeTensors::open(path));
  std::shared_ptr<Executable> executable = compile(WeightSource);
  Tensor x = makeTensor({3, 8});
  std::vector<Tensor> first, second, third;
  ASSERT_OK(executable->bindWeights(file));
  ASSERT_OK(executable->run("main", {x}, first));
  std::string prefix = "b.";
  ASSERT_OK(executable->bindWeights(file, &prefix));
  ASSERT_OK(executable->run("main", {x}, second));
  EXPECT_NE(valuesOf(first[0]), valuesOf(second[0]));
  prefix = "";
  ASSERT_OK(executable->bindWeights(file, &prefix));
  ASSERT_OK(executable->run("main", {x}, third));
  EXPECT_EQ(valuesOf(first[0]), valuesOf(third[0]));
  prefix = "a.";
  EXPECT_STATUS(executable->bindWeights(file, &prefix), NotFound,
                path + ": expected tensor 'a.proj.weight' for weight 'matrix', "
                       "got a file without it");
  prefix = "c.";
  EXPECT_STATUS(executable->bindWeights(file, &prefix), InvalidArgument,
                "weight 'matrix' (" + path +
                    ":c.proj.weight): expected dtype f32, got bf16");
  prefix = "d.";
  EXPECT_STATUS(executable->bindWeights(file, &prefix), InvalidArgument,
                "weight 'matrix' (" + path +
                    ":d.proj.weight): expected shape [6, 8], got [6, 7]");
  std::remove(path.c_str());
}

/// Tensors from anywhere, by key, and what a program has of them.
TEST(Weights, FoundByTheCaller) {
  std::shared_ptr<Executable> executable = compile(WeightSource);
  EXPECT_FAILS(executable->boundWeight("matrix"), NotFound,
               "expected a bound weight of <source>, got 'matrix'");
  Tensor matrix = makeTensor({6, 8}), bias = makeTensor({6}, DType::BF16);
  std::vector<std::string> keys;
  auto find = [&](const std::string &key) -> Expected<Tensor> {
    keys.push_back(key);
    return key == "layers.0.bias" ? bias : matrix;
  };
  ASSERT_OK(executable->bindWeights(find));
  EXPECT_EQ(keys, (std::vector<std::string>{"layers.0.proj.weight",
                                            "layers.0.bias"}));
  // Used where they lie.
  EXPECT_EQ(take(executable->boundWeight("matrix")).data(), matrix.data());
  EXPECT_EQ(take(executable->boundWeight("bias")).data(), bias.data());
  EXPECT_FAILS(executable->boundWeight("proj.weight"), NotFound,
               "expected a bound weight of <source>, got 'proj.weight'");
  // One program's are another's.
  std::shared_ptr<Executable> other = compile(WeightSource);
  for (const ArgumentInfo &weight : other->weights())
    ASSERT_OK(other->bindWeight(weight.name,
                                take(executable->boundWeight(weight.name))));
  Tensor x = makeTensor({3, 8});
  std::vector<Tensor> first, second, third;
  ASSERT_OK(executable->run("main", {x}, first));
  ASSERT_OK(other->run("main", {x}, second));
  EXPECT_EQ(valuesOf(first[0]), valuesOf(second[0]));

  // The caller's own error is the one that comes back; what was bound before it
  // stays.
  matrix = makeTensor({6, 8}, DType::F32, 2);
  EXPECT_STATUS(
      executable->bindWeights([&](const std::string &key) -> Expected<Tensor> {
        if (key == "layers.0.bias")
          return Status::ioError("no " + key);
        return matrix;
      }),
      IOError, "no layers.0.bias");
  EXPECT_EQ(take(executable->boundWeight("matrix")).data(), matrix.data());
  EXPECT_EQ(take(executable->boundWeight("bias")).data(), bias.data());
  ASSERT_OK(executable->run("main", {x}, third));
  EXPECT_NE(valuesOf(third[0]), valuesOf(first[0]));
  matrix = makeTensor({6, 7});
  EXPECT_STATUS(executable->bindWeights(find), InvalidArgument,
                "weight 'matrix' (layers.0.proj.weight): expected shape [6, "
                "8], got [6, 7]");
}

//===----------------------------------------------------------------------===//
// Chunks, statistics, explanations
//===----------------------------------------------------------------------===//

TEST(Chunks, SetAndReport) {
  CompileOptions options;
  options.policy = "static:16";
  std::shared_ptr<Executable> executable = compile(ScanSource, options);
  ASSERT_EQ(executable->chunks().size(), 1u);
  ChunkInfo info = executable->chunks()[0];
  EXPECT_EQ(info.site, "layer0.scan");
  EXPECT_EQ(info.requested, 0);
  EXPECT_EQ(info.chunk, 0);
  EXPECT_EQ(info.reason, "policy static:16");
  std::vector<Tensor> outputs;
  ASSERT_OK(executable->run("main", scanInputs(2, 40), outputs));
  info = executable->chunks()[0];
  EXPECT_EQ(info.batch, 2);
  EXPECT_EQ(info.length, 40);
  EXPECT_EQ(info.chunk, 16);
  ASSERT_OK(executable->setChunk("layer0.scan", 7));
  ASSERT_OK(executable->run("main", scanInputs(1, 30), outputs = {}));
  info = executable->chunks()[0];
  EXPECT_EQ(info.requested, 7);
  EXPECT_EQ(info.batch, 1);
  EXPECT_EQ(info.length, 30);
  EXPECT_EQ(info.chunk, 7);
  EXPECT_EQ(info.reason, "set by the caller");
  ASSERT_OK(executable->setChunk("layer0.scan", 0));
  ASSERT_OK(executable->run("main", scanInputs(1, 30), outputs = {}));
  EXPECT_EQ(executable->chunks()[0].chunk, 16);
  EXPECT_STATUS(executable->setChunk("layer0.scan", -3), InvalidArgument,
                "site 'layer0.scan': expected a chunk of at least 1 token, or "
                "0 for the policy's, got -3");
  EXPECT_STATUS(
      executable->setChunk("layer1.scan", 3), NotFound,
      "expected a chunk site of <source> (layer0.scan), got 'layer1.scan'");
  EXPECT_STATUS(compile(AddSource)->setChunk("scan", 3), NotFound,
                "expected a chunk site of <source> (it has none), got 'scan'");
}

TEST(Chunks, Unsplit) {
  CompileOptions options;
  options.policy = "unsplit";
  std::shared_ptr<Executable> executable = compile(ScanSource, options);
  EXPECT_EQ(executable->chunks()[0].reason, "policy unsplit");
  std::vector<Tensor> outputs;
  ASSERT_OK(executable->run("main", scanInputs(2, 40), outputs));
  EXPECT_EQ(executable->chunks()[0].chunk, 40);
}

TEST(Observations, Statistics) {
  std::shared_ptr<Executable> executable = compile(R"(
func.func @main(%x: tensor<?x4xf32>, %h: tensor<?x4xbf16>) -> (tensor<?x4xf32>, tensor<?x4xbf16>) {
  %y = ssm.observe @site.a %x : tensor<?x4xf32>
  %g = ssm.observe @site.b %h : tensor<?x4xbf16>
  return %y, %g : tensor<?x4xf32>, tensor<?x4xbf16>
}
)");
  Tensor x = makeTensor({2, 4}), h = makeTensor({2, 4}, DType::BF16, 2);
  x.dataAs<float>()[1] = std::numeric_limits<float>::quiet_NaN();
  x.dataAs<float>()[6] = -std::numeric_limits<float>::infinity();
  std::vector<Tensor> outputs;
  ASSERT_OK(executable->run("main", {x, h}, outputs));
  // The value itself passes through.
  EXPECT_FALSE(std::memcmp(outputs[0].data(), x.data(), 32));
  EXPECT_FALSE(std::memcmp(outputs[1].data(), h.data(), 16));
  ASSERT_OK(executable->run(
      "main", {take(x.slice(0, 0, 1)), take(h.slice(0, 0, 1))}, outputs = {}));
  std::vector<ObservationInfo> list = executable->observations();
  ASSERT_EQ(list.size(), 2u);
  for (const ObservationInfo &info : list) {
    const Tensor &tensor = info.site == "site.a" ? x : h;
    std::vector<double> all = valuesOf(tensor), values;
    all.insert(all.end(), all.begin(), all.begin() + 4);
    double sum = 0, squares = 0, low = Inf, high = -Inf;
    for (double v : all)
      if (std::isfinite(v)) {
        values.push_back(v);
        sum += v;
        low = std::min(low, v);
        high = std::max(high, v);
      }
    double mean = sum / static_cast<double>(values.size());
    for (double v : values)
      squares += (v - mean) * (v - mean);
    EXPECT_EQ(info.count, values.size()) << info.site;
    EXPECT_EQ(info.nonFinite, all.size() - values.size());
    EXPECT_EQ(info.min, low);
    EXPECT_EQ(info.max, high);
    EXPECT_NEAR(info.mean, mean, 1e-12);
    EXPECT_NEAR(info.variance, squares / static_cast<double>(values.size()),
                1e-12);
  }
  EXPECT_NE(
      executable->explain().find("observed site.a: 9 values, 3 not finite"),
      std::string::npos)
      << executable->explain();
}

//===----------------------------------------------------------------------===//
// Policies
//===----------------------------------------------------------------------===//

TEST(Policies, StatisticsServeTheNextCall) {
  CompileOptions options;
  options.policy = "entropy:rule=calibrated,bins=64";
  std::shared_ptr<Executable> executable = compile(ScanSource, options);
  // An input to look at has been put in.
  std::vector<Tensor> inputs = scanInputs(1, 400), outputs;
  ASSERT_OK(executable->run("main", inputs, outputs));
  ChunkInfo info = executable->chunks()[0];
  EXPECT_EQ(info.chunk, 400);
  EXPECT_FALSE(info.usedData);
  EXPECT_EQ(info.reason,
            "policy entropy:rule=calibrated,bins=64: no statistics yet");
  ASSERT_EQ(executable->observations().size(), 1u);
  ObservationInfo seen = executable->observations()[0];
  EXPECT_EQ(seen.site, "layer0.scan");
  EXPECT_EQ(seen.calls, 1u);
  EXPECT_EQ(seen.count, 400u * 8);
  EXPECT_EQ(seen.validity, "ok");
  EXPECT_EQ(seen.bins, 64);
  // The published estimator and rule, written down once more.
  std::vector<double> u = valuesOf(inputs[0]);
  float low = static_cast<float>(*std::min_element(u.begin(), u.end()));
  float high = static_cast<float>(*std::max_element(u.begin(), u.end()));
  std::vector<double> counts(64);
  for (double x : u) {
    float t = (static_cast<float>(x) - low) / ((high - low) + 1e-8f);
    ++counts[std::min(63, static_cast<int>(64 * t))];
  }
  double entropy = 0;
  for (double c : counts)
    if (c > 0) {
      double p = c / static_cast<double>(u.size());
      entropy -= p * std::log(p);
    }
  EXPECT_NEAR(seen.entropy, entropy, 1e-6);
  double raw = 32 + std::min(entropy / std::log(64.0), 1.0) * 480;
  double chunk = std::exp2(std::nearbyint(std::log2(raw)));
  // The next call decides on that, whatever it brings itself.
  std::vector<Tensor> zeros = scanInputs(1, 300);
  std::fill_n(zeros[0].dataAs<float>(), 300 * 8, 0.0f);
  ASSERT_OK(executable->run("main", zeros, outputs = {}));
  info = executable->chunks()[0];
  EXPECT_EQ(static_cast<double>(info.chunk), chunk);
  EXPECT_TRUE(info.usedData);
  // A constant input is a fact, and the rule's least chunk.
  ASSERT_OK(executable->run("main", zeros, outputs = {}));
  info = executable->chunks()[0];
  EXPECT_EQ(info.chunk, 32);
  EXPECT_EQ(executable->observations()[0].validity, "constant");
  // One that is not finite is nothing to decide on.
  zeros[0].dataAs<float>()[17] = std::numeric_limits<float>::quiet_NaN();
  ASSERT_OK(executable->run("main", zeros, outputs = {}));
  ASSERT_OK(executable->run("main", inputs, outputs = {}));
  info = executable->chunks()[0];
  EXPECT_EQ(info.chunk, 400);
  EXPECT_EQ(info.reason,
            "policy entropy:rule=calibrated,bins=64: statistics not finite");
}

TEST(Policies, EveryOneGivesTheSameResult) {
  CompileOptions unsplit;
  unsplit.policy = "unsplit";
  std::vector<Tensor> inputs = scanInputs(2, 333), expected;
  ASSERT_OK(compile(ScanSource, unsplit)->run("main", inputs, expected));
  for (const char *policy :
       {"static:64", "entropy", "sampled", "token", "midpoint", "random",
        "cheap", "variance", "kurtosis", "guarded", "guarded:mode=gain",
        "table", "cost-model", "measured"}) {
    SCOPED_TRACE(policy);
    CompileOptions options;
    options.policy = policy;
    std::shared_ptr<Executable> executable = compile(ScanSource, options);
    for (int call = 0; call < 3; ++call) {
      std::vector<Tensor> outputs;
      ASSERT_OK(executable->run("main", inputs, outputs));
      // Bit by bit: values that overflow are part of it.
      EXPECT_FALSE(std::memcmp(outputs[0].data(), expected[0].data(),
                               outputs[0].numBytes()));
      EXPECT_GE(executable->chunks()[0].chunk, 1);
      EXPECT_EQ(executable->chunks()[0].policy, policy);
    }
  }
}

TEST(Policies, CanBeSet) {
  CompileOptions options;
  options.policy = "sampled";
  std::shared_ptr<Executable> executable = compile(ScanSource, options);
  std::vector<Tensor> outputs;
  ASSERT_OK(executable->setPolicy("", "static:12"));
  ASSERT_OK(executable->run("main", scanInputs(1, 40), outputs));
  EXPECT_EQ(executable->chunks()[0].chunk, 12);
  ASSERT_OK(executable->setPolicy("layer0.scan", "guarded:fallback=64"));
  ASSERT_OK(executable->run("main", scanInputs(1, 40), outputs = {}));
  EXPECT_TRUE(executable->chunks()[0].usedData);
  EXPECT_STATUS(executable->setPolicy("other", "unsplit"), NotFound,
                "expected a chunk site of <source> (layer0.scan), got 'other'");
  EXPECT_STATUS(executable->setPolicy("", "static:0"), InvalidArgument,
                "policy 'static': expected chunk to be an integer from 1 to "
                "1099511627776, got '0'");
  // What is gathered is decided when the program is compiled.
  EXPECT_STATUS(executable->setPolicy("", "token"), InvalidArgument,
                "site 'layer0.scan': expected a policy on the statistics that "
                "the program gathers there, got 'token', which wants others; "
                "compile with it");
  EXPECT_STATUS(compile(ScanSource)->setPolicy("", "entropy"), InvalidArgument,
                "site 'layer0.scan': expected a policy without statistics, as "
                "the program gathers none there, got 'entropy'; compile with "
                "it");
}

TEST(Policies, AtASite) {
  std::string source = R"(
func.func @main(%u: tensor<?x?x8xf32>, %A: tensor<8x4xf32>, %B: tensor<?x?x1x4xf32>) -> tensor<?x?x8xf32> {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %b = tensor.dim %u, %c0 : tensor<?x?x8xf32>
  %l = tensor.dim %u, %c1 : tensor<?x?x8xf32>
  %c = ssm.bind_chunk @layer7.scan(%b, %l) {policy = "POLICY"}
  %y = ssm.selective_scan %u, %u, %A, %B, %B chunk_size(%c) {delta_softplus} : tensor<?x?x8xf32>, tensor<?x?x8xf32>,
      tensor<8x4xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x8xf32>
  return %y : tensor<?x?x8xf32>
}
)";
  auto with = [&](const std::string &policy) {
    std::string text = source;
    return text.replace(text.find("POLICY"), 6, policy);
  };
  std::vector<Tensor> all = scanInputs(1, 100);
  std::vector<Tensor> inputs = {all[0], all[2], all[3]}, outputs;
  std::shared_ptr<Executable> executable = compile(with("token:8"));
  ASSERT_OK(executable->run("main", inputs, outputs));
  ASSERT_OK(executable->run("main", inputs, outputs = {}));
  EXPECT_TRUE(executable->chunks()[0].usedData);
  EXPECT_EQ(executable->chunks()[0].policy, "token:8");
  EXPECT_EQ(executable->observations()[0].count, 2 * 13u * 8);
  EXPECT_FAILS(newContext()->compile(with("best")), CompileError,
               "site 'layer7.scan': expected a policy of unsplit, static, "
               "entropy, sampled, token, midpoint, random, cheap, variance, "
               "kurtosis, guarded, table, cost-model, measured, got 'best'");
  EXPECT_STATUS(newContext()->exportProgram(with("token"), "unused.o", {"o"}),
                Unsupported,
                "site 'layer7.scan': expected policy 'unsplit' or "
                "'static:<tokens>' for an exported program, got 'token'");
  CompileOptions options;
  options.policy = "entropy";
  EXPECT_STATUS(
      newContext()->exportProgram(ScanSource, "unused.o", {"o"}, options),
      Unsupported,
      "expected policy 'unsplit' or 'static:<tokens>' for an "
      "exported program, got 'entropy'");
}

TEST(Policies, WhatIsObservedStaysFused) {
  // The input of the scan is an argument of its region, or made in it.
  for (const char *input : {"%x", "%silu"}) {
    SCOPED_TRACE(input);
    std::string source = R"(
func.func @main(%x: tensor<?x?x8xf32>, %delta: tensor<?x?x8xf32>, %A: tensor<8x4xf32>, %B: tensor<?x?x1x4xf32>)
    -> tensor<?x?x8xf32> {
  %silu = ssm.silu %x : tensor<?x?x8xf32>
  %dt = ssm.softplus %delta : tensor<?x?x8xf32>
  %y = ssm.selective_scan INPUT, %dt, %A, %B, %B {chunk = #ssm.chunk<runtime = @scan>} : tensor<?x?x8xf32>,
      tensor<?x?x8xf32>, tensor<8x4xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32> -> tensor<?x?x8xf32>
  %z = ssm.mul %y, %silu : tensor<?x?x8xf32>, tensor<?x?x8xf32>
  return %z : tensor<?x?x8xf32>
}
)";
    source.replace(source.find("INPUT"), 5, input);
    CompileOptions options;
    options.policy = "unsplit";
    std::shared_ptr<Executable> plain = compile(source, options);
    options.policy = "entropy";
    std::shared_ptr<Executable> observed = compile(source, options);
    EXPECT_EQ(plain->traffic().kernels, 1);
    bool isArgument = input == std::string("%x");
    EXPECT_EQ(observed->traffic().kernels, isArgument ? 1 : 2);
    // One value of 1024 x 1024 x 8 is written and read in addition.
    double value = 4.0 * 8 * 1024 * 1024;
    EXPECT_EQ(observed->traffic().bytes() - plain->traffic().bytes(),
              isArgument ? 0 : 2 * value);
    std::vector<Tensor> all = scanInputs(2, 70), expected, outputs;
    std::vector<Tensor> inputs = {all[0], all[1], all[2], all[3]};
    ASSERT_OK(plain->run("main", inputs, expected));
    ASSERT_OK(observed->run("main", inputs, outputs));
    std::vector<double> got = valuesOf(outputs[0]),
                        wanted = valuesOf(expected[0]);
    for (size_t i = 0; i < wanted.size(); ++i)
      ASSERT_NEAR(got[i], wanted[i], 1e-5 * (1 + std::abs(wanted[i])));
    ObservationInfo seen = observed->observations().at(0);
    EXPECT_EQ(seen.count, 2u * 70 * 8);
    double sum = 0;
    for (double x : valuesOf(inputs[0]))
      sum += isArgument ? x : x / (1 + std::exp(-x));
    EXPECT_NEAR(seen.mean, sum / (2 * 70 * 8), 1e-6);
  }
}

TEST(Policies, LayersAreSkipped) {
  std::string source = ScanSource;
  source.replace(source.find("layer0"), 6, "layer3");
  std::vector<Tensor> outputs;
  for (auto [spec, isLookedAt] :
       {std::pair<const char *, bool>{"entropy:layers=3", true},
        {"entropy:layers=2", false}}) {
    SCOPED_TRACE(spec);
    CompileOptions options;
    options.policy = spec;
    std::shared_ptr<Executable> executable = compile(source, options);
    for (int call = 0; call < 2; ++call)
      ASSERT_OK(executable->run("main", scanInputs(1, 40), outputs = {}));
    EXPECT_EQ(executable->observations().size(), isLookedAt ? 1u : 0u);
    EXPECT_EQ(executable->chunks()[0].usedData, isLookedAt);
  }
}

TEST(Policies, ManyThreads) {
  CompileOptions options;
  options.policy = "guarded:inner=[sampled:stride=2],fallback=16";
  std::shared_ptr<Executable> executable = compile(ScanSource, options);
  std::vector<Tensor> inputs = scanInputs(1, 77), expected;
  ASSERT_OK(executable->run("main", inputs, expected));
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 50; ++i) {
        std::vector<Tensor> outputs;
        if (!executable->run("main", inputs, outputs) ||
            std::memcmp(outputs[0].data(), expected[0].data(),
                        outputs[0].numBytes()))
          ++wrong;
        if (t == 0 && i % 10 == 0 && !executable->setChunk("layer0.scan", i))
          ++wrong;
        if (executable->chunks()[0].chunk < 1)
          ++wrong;
      }
    });
  for (std::thread &thread : threads)
    thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(executable->observations()[0].calls, 201u);
}

TEST(Traffic, TheBestPartitionIsPredictedToBe) {
  std::map<std::string, TrafficInfo> traffic;
  for (const char *fusion : {"none", "static", "arithmetic", "entropy", "dp"}) {
    CompileOptions options;
    options.fusion = fusion;
    traffic[fusion] = compile(BlockSource, options)->traffic();
  }
  for (auto &[fusion, info] : traffic) {
    SCOPED_TRACE(fusion);
    EXPECT_LE(traffic["dp"].predictedMs, info.predictedMs);
    EXPECT_LE(info.bytes(), traffic["none"].bytes());
    EXPECT_GT(info.predictedMs, 0);
  }
  EXPECT_EQ(traffic["none"].bytesKept, 0);
  EXPECT_EQ(traffic["none"].kernels, 5);
  // Softplus goes into the scan.
  EXPECT_EQ(traffic["dp"].kernels, 4);
  // What is kept is what separate kernels would move: softplus of bf16, written
  // and read. Dynamic sizes count as 1024.
  EXPECT_EQ(traffic["dp"].bytesKept, 2.0 * 1024 * 1024 * 16 * 2);
  CompileOptions options;
  options.fusion = "best";
  EXPECT_FAILS(newContext()->compile(BlockSource, options), InvalidArgument,
               "expected fusion to be dp, entropy, arithmetic, static or none, "
               "got 'best'");
}

TEST(Explanations, Content) {
  CompileOptions options;
  options.policy = "static:8";
  std::shared_ptr<Executable> executable = compile(ScanSource, options);
  std::string text = executable->explain();
  EXPECT_NE(text.find("<source>: compiled for "), std::string::npos) << text;
  EXPECT_NE(text.find("chunk layer0.scan: not run yet (policy static:8)"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find(" ms"), std::string::npos) << text;
  for (const PhaseTime &time : executable->compileTimes())
    EXPECT_NE(text.find(time.phase), std::string::npos) << text;
  std::vector<Tensor> outputs;
  ASSERT_OK(executable->run("main", scanInputs(2, 40), outputs));
  EXPECT_NE(executable->explain().find("chunk layer0.scan: 8 tokens for batch "
                                       "2, length 40 (policy static:8)"),
            std::string::npos)
      << executable->explain();
  ASSERT_OK(executable->setChunk("layer0.scan", 5));
  ASSERT_OK(executable->run("main", scanInputs(2, 41), outputs = {}));
  EXPECT_NE(executable->explain().find("chunk layer0.scan: 5 tokens for batch "
                                       "2, length 41 (set by the caller)"),
            std::string::npos)
      << executable->explain();
}

TEST(Emit, EveryPhase) {
  std::shared_ptr<Context> context = newContext();
  auto emit = [&](const char *phase) {
    return take(context->emit(ScanSource, phase));
  };
  EXPECT_NE(emit("captured").find("ssm.selective_scan"), std::string::npos);
  EXPECT_NE(emit("captured").find("#ssm.chunk<runtime = @layer0.scan>"),
            std::string::npos);
  EXPECT_NE(emit("bound").find("ssm.bind_chunk @layer0.scan"),
            std::string::npos);
  std::string lowered = emit("lowered");
  EXPECT_EQ(lowered.find("ssm.selective_scan"), std::string::npos);
  EXPECT_NE(lowered.find("scf.for"), std::string::npos);
  EXPECT_NE(emit("buffers").find("memref"), std::string::npos);
  EXPECT_NE(emit("llvm").find("llvm.func"), std::string::npos);
  EXPECT_NE(emit("llvmir").find("define "), std::string::npos);
  EXPECT_NE(emit("llvmir-opt").find("define "), std::string::npos);
  EXPECT_FAILS(context->emit(ScanSource, "assembly"), InvalidArgument,
               "expected a phase of captured, fused, bound, lowered, buffers, "
               "llvm, llvmir, llvmir-opt and ptx, got 'assembly'");
  EXPECT_FAILS(context->emit("func.func", "llvm"), CompileError,
               "<source>:1:10: custom op 'func.func' expected valid "
               "'@'-identifier for symbol name");
  EXPECT_STATUS(context->exportProgram(ScanSource, "unused", {"exe"}),
                InvalidArgument,
                "expected format 'o', 'so' or 'cubin', got 'exe'");
  // What was emitted is a program.
  EXPECT_TRUE(static_cast<bool>(context->compile(emit("captured"))));
  EXPECT_TRUE(static_cast<bool>(context->compile(emit("bound"))));
}

TEST(Options, OptimizationLevels) {
  std::vector<double> wanted;
  for (int level : {2, 0, 1, 3}) {
    CompileOptions options;
    options.optLevel = level;
    std::vector<Tensor> outputs;
    ASSERT_OK(
        compile(ScanSource, options)->run("main", scanInputs(2, 20), outputs));
    std::vector<double> values = valuesOf(outputs[0]);
    if (level == 2)
      wanted = values;
    for (size_t i = 0; i < values.size(); ++i)
      ASSERT_NEAR(values[i], wanted[i], 1e-5 * (1 + std::abs(wanted[i])))
          << "level " << level;
  }
}

//===----------------------------------------------------------------------===//
// Concurrency and memory
//===----------------------------------------------------------------------===//

TEST(Threads, RunOneExecutable) {
  for (int inner : {1, 2}) {
    std::shared_ptr<Context> context = newContext(inner);
    std::shared_ptr<Executable> executable = take(context->compile(ScanSource));
    // The context may go: the program holds what it needs.
    context.reset();
    std::vector<std::thread> threads;
    std::atomic<int> failures{0};
    for (int t = 0; t < 4; ++t)
      threads.emplace_back([&, t] {
        int64_t B = 1 + t % 3, L = 10 + 13 * t;
        std::vector<Tensor> inputs = scanInputs(B, L), wanted;
        if (!executable->run("main", inputs, wanted)) {
          ++failures;
          return;
        }
        for (int i = 0; i < 50; ++i) {
          std::vector<Tensor> outputs;
          if (!executable->setChunk("layer0.scan", 1 + (t + i) % 9) ||
              !executable->run("main", inputs, outputs) ||
              std::memcmp(outputs[0].data(), wanted[0].data(),
                          wanted[0].numBytes()) ||
              std::memcmp(outputs[1].data(), wanted[1].data(),
                          wanted[1].numBytes()))
            ++failures;
          (void)executable->explain();
          (void)executable->memoryUse();
        }
      });
    for (std::thread &thread : threads)
      thread.join();
    EXPECT_EQ(failures, 0);
  }
}

TEST(Threads, CompileInTurns) {
  std::shared_ptr<Context> context = newContext();
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  for (int t = 0; t < 3; ++t)
    threads.emplace_back([&, t] {
      Expected<std::shared_ptr<Executable>> executable =
          context->compile(t == 1 ? "func.func" : AddSource);
      std::vector<Tensor> outputs;
      if (static_cast<bool>(executable) == (t == 1))
        ++failures;
      else if (executable &&
               !(*executable)
                    ->run("main",
                          {makeTensor({1, 2, 8}), makeTensor({1, 2, 8})},
                          outputs))
        ++failures;
    });
  for (std::thread &thread : threads)
    thread.join();
  EXPECT_EQ(failures, 0);
}

/// Runs a warm program again and counts what it allocates.
void expectNoAllocation(Executable &executable,
                        const std::vector<Tensor> &inputs,
                        std::vector<Tensor> outputs) {
  for (int i = 0; i < 3; ++i)
    ASSERT_OK(executable.run("main", inputs.data(), inputs.size(),
                             outputs.data(), outputs.size()));
  std::pair<size_t, size_t> memory = executable.memoryUse();
  allocations = 0;
  counting = true;
  bool ok = true;
  for (int i = 0; i < 20; ++i)
    ok &= executable
              .run("main", inputs.data(), inputs.size(), outputs.data(),
                   outputs.size())
              .isOk();
  counting = false;
  EXPECT_TRUE(ok);
  EXPECT_EQ(allocations, 0u) << "allocations in 20 calls";
  EXPECT_EQ(executable.memoryUse(), memory);
}

TEST(Memory, CountsAllocations) {
#ifndef COREY_TEST_COUNTS_ALLOCATIONS
  GTEST_SKIP() << "allocations are not counted in this build";
#endif
  allocations = 0;
  counting = true;
  auto *kept = new std::vector<int>(100);
  counting = false;
  EXPECT_GE(allocations, 2u);
  delete kept;
}

TEST(Memory, DecisionsAndStatisticsAllocateNothing) {
#ifndef COREY_TEST_COUNTS_ALLOCATIONS
  GTEST_SKIP() << "allocations are not counted in this build";
#endif
  for (const char *policy : {"entropy", "token:2", "guarded", "measured"}) {
    SCOPED_TRACE(policy);
    ContextOptions contextOptions;
    contextOptions.threads = 1;
    CompileOptions options;
    options.policy = policy;
    std::shared_ptr<Executable> executable = take(
        take(Context::create(contextOptions))->compile(ScanSource, options));
    std::vector<Tensor> inputs = scanInputs(2, 65), outputs;
    ASSERT_OK(executable->run("main", inputs, outputs));
    expectNoAllocation(*executable, inputs, outputs);
  }
}

TEST(Memory, WarmCallsAllocateNothing) {
  for (int threads : {1, 2}) {
    SCOPED_TRACE(std::to_string(threads) + " threads");
    std::shared_ptr<Context> context = newContext(threads);
    std::shared_ptr<Executable> executable =
        take(context->compile(BlockSource));
    // Below and above the number of rows from which projections are products.
    for (int64_t L : {1, 50})
      expectNoAllocation(
          *executable, blockInputs(2, L),
          {makeTensor({2, L, 16}, DType::BF16), makeTensor({2, 16, 4})});
  }
}

TEST(Memory, WarmCallsOfEarlierShapes) {
  std::shared_ptr<Executable> executable = compile(BlockSource);
  std::vector<Tensor> outputs;
  for (int64_t L : {1, 100, 7, 33})
    ASSERT_OK(executable->run("main", blockInputs(2, L), outputs = {}));
  std::pair<size_t, size_t> memory = executable->memoryUse();
  EXPECT_GT(memory.first, 0u);
  EXPECT_GT(memory.second, 0u);
  for (int64_t L : {33, 7, 100, 1, 100})
    ASSERT_OK(executable->run("main", blockInputs(2, L), outputs = {}));
  EXPECT_EQ(executable->memoryUse(), memory);
}

TEST(Memory, WarmCallsWithStrides) {
  std::shared_ptr<Executable> executable = compile(AddSource);
  // An input that is copied first and an output that is copied after.
  expectNoAllocation(
      *executable,
      {take(makeTensor({2, 8, 5}).transpose(1, 2)), makeTensor({2, 5, 8})},
      {take(makeTensor({2, 8, 5}).transpose(1, 2))});
}

TEST(Memory, FailedCallsKeepNothing) {
  std::shared_ptr<Executable> executable = compile(AddSource);
  std::vector<Tensor> outputs;
  ASSERT_OK(executable->run(
      "main", {makeTensor({2, 5, 8}), makeTensor({2, 5, 8})}, outputs));
  std::pair<size_t, size_t> memory = executable->memoryUse();
  for (int i = 0; i < 5; ++i)
    EXPECT_FALSE(executable
                     ->run("main",
                           {makeTensor({2, 5, 8}), makeTensor({2, 4, 8})},
                           outputs)
                     .isOk());
  EXPECT_EQ(executable->memoryUse(), memory);
}

} // namespace
