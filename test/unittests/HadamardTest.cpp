//===- HadamardTest.cpp - Rotations and prepared weights ------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// The transform against its definition, the algebra of rotated projections in
// f64, rotated programs against plain ones on trained weights, and the weights
// that an executable prepares.
//
//===----------------------------------------------------------------------===//

#include "corey/Executable.h"
#include "corey/InitAll.h"
#include "mlir/IR/BuiltinOps.h"
#include "mlir/IR/MLIRContext.h"
#include "mlir/Parser/Parser.h"
#include "mlir/Pass/PassManager.h"
#include "mlir/Pass/PassRegistry.h"
#include "llvm/Support/FormatVariadic.h"
#include "llvm/Support/MathExtras.h"
#include "llvm/Support/MemoryBuffer.h"
#include "gtest/gtest.h"
#include <algorithm>
#include <cmath>
#include <random>
#include <thread>

using namespace corey;

namespace {
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

const std::string checkpoint =
    COREY_TEST_INPUTS "/checkpoints/mamba1-tiny/model.safetensors";

std::shared_ptr<Executable> compile(const std::string &source,
                                    CompileOptions options = {}) {
  static std::shared_ptr<Context> context = take(Context::create({"cpu", 2}));
  return take(context->compile(source, options));
}

std::string readFile(const std::string &path) {
  auto buffer = llvm::MemoryBuffer::getFile(path);
  EXPECT_TRUE(static_cast<bool>(buffer)) << path;
  return buffer ? (*buffer)->getBuffer().str() : "";
}

/// `source` after the passes of `pipeline`.
std::string transform(const std::string &source, const std::string &pipeline) {
  static bool registered = (registerAllPasses(), true);
  (void)registered;
  mlir::DialectRegistry registry;
  registerAllDialects(registry);
  mlir::MLIRContext context(registry, mlir::MLIRContext::Threading::DISABLED);
  auto module = mlir::parseSourceString<mlir::ModuleOp>(source, &context);
  EXPECT_TRUE(module);
  mlir::PassManager manager(&context);
  EXPECT_TRUE(succeeded(mlir::parsePassPipeline(pipeline, manager)));
  EXPECT_TRUE(succeeded(manager.run(*module)));
  std::string text;
  llvm::raw_string_ostream os(text);
  module->print(os);
  return text;
}

size_t occurrences(llvm::StringRef text, llvm::StringRef what) {
  return text.count(what);
}

/// The element (i, j) of the orthonormal transform of n elements.
double element(uint64_t i, uint64_t j, int64_t n) {
  double sign = llvm::popcount(i & j) % 2 ? -1 : 1;
  return sign / std::sqrt(static_cast<double>(n));
}

/// Fast transform of runs of `block` elements.
template <class T> void applyTransform(T *x, int64_t size, int64_t block) {
  for (int64_t base = 0; base < size; base += block) {
    for (int64_t half = 1; half < block; half *= 2)
      for (int64_t low = base; low < base + block; low += 2 * half)
        for (int64_t i = low; i < low + half; ++i) {
          T a = x[i], b = x[i + half];
          x[i] = a + b;
          x[i + half] = a - b;
        }
    for (int64_t i = base; i < base + block; ++i)
      x[i] /= std::sqrt(static_cast<T>(block));
  }
}

std::vector<double> normals(size_t size, uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<double> normal;
  std::vector<double> values(size);
  for (double &value : values)
    value = normal(engine);
  return values;
}

Tensor normalTensor(std::vector<int64_t> shape, uint64_t seed) {
  Tensor tensor = take(Tensor::empty(DType::F32, std::move(shape)));
  std::vector<double> values = normals(tensor.numElements(), seed);
  std::copy(values.begin(), values.end(), tensor.dataAs<float>());
  return tensor;
}

double relativeError(const double *got, const double *want, size_t size) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < size; ++i) {
    error += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  return std::sqrt(error / norm);
}

double relativeError(const Tensor &got, const Tensor &want) {
  Tensor a = take(got.to(DType::F64)), b = take(want.to(DType::F64));
  EXPECT_EQ(a.shape(), b.shape());
  return relativeError(a.dataAs<double>(), b.dataAs<double>(), a.numElements());
}

int64_t largestBlock(int64_t size) {
  return std::min<int64_t>(1024, size & -size);
}
} // namespace

//===----------------------------------------------------------------------===//
// The transform
//===----------------------------------------------------------------------===//

/// The op against the definition; all outputs of small blocks, some of large.
static void checkTransform(int64_t size, int64_t block) {
  SCOPED_TRACE("size " + std::to_string(size) + ", block " +
               std::to_string(block));
  auto executable = compile(llvm::formatv(R"(
    func.func @main(%x: tensor<?x{0}xf32>) -> tensor<?x{0}xf32> {{
      %y = ssm.hadamard %x {{block = {1} : i64} : tensor<?x{0}xf32> -> tensor<?x{0}xf32>
      return %y : tensor<?x{0}xf32>
    })",
                                          size, block));
  std::vector<Tensor> inputs = {normalTensor({2, size}, size)}, outputs;
  ASSERT_OK(executable->run("main", inputs, outputs));
  const float *x = inputs[0].dataAs<float>();
  const float *y = outputs[0].dataAs<float>();
  int64_t step = std::max<int64_t>(1, block / 512) | 1;
  double error = 0, norm = 0;
  for (int64_t at = 0; at < 2 * size; at += step) {
    int64_t base = at / block * block;
    double want = 0;
    for (int64_t j = 0; j < block; ++j)
      want += element(at - base, j, block) * x[base + j];
    error += (y[at] - want) * (y[at] - want);
    norm += want * want;
  }
  EXPECT_LE(std::sqrt(error / norm), 1e-6);
}

TEST(Hadamard, OneBlock) {
  for (int64_t n = 2; n <= 32768; n *= 2)
    checkTransform(n, n);
}

TEST(Hadamard, ManyBlocks) {
  for (int64_t size : {768, 2560, 5120}) {
    checkTransform(size, largestBlock(size));
    checkTransform(size, 2);
    checkTransform(size, 64);
  }
}

//===----------------------------------------------------------------------===//
// The algebra, in f64
//===----------------------------------------------------------------------===//

TEST(Hadamard, RotatedProductIsTheProduct) {
  for (int64_t K : {2, 16, 256, 768, 2560, 5120}) {
    int64_t M = 24, rows = 3, block = largestBlock(K);
    std::vector<double> x = normals(rows * K, K), w = normals(M * K, K + 1);
    // An outlier, as rotations are for.
    x[1] = 1000;
    std::vector<double> rotatedX = x, rotatedW = w;
    for (int64_t i = 0; i < rows; ++i)
      applyTransform(&rotatedX[i * K], K, block);
    for (int64_t i = 0; i < M; ++i)
      applyTransform(&rotatedW[i * K], K, block);
    auto product = [&](const std::vector<double> &a,
                       const std::vector<double> &b) {
      std::vector<double> y(rows * M);
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < M; ++j)
          for (int64_t k = 0; k < K; ++k)
            y[i * M + j] += a[i * K + k] * b[j * K + k];
      return y;
    };
    std::vector<double> want = product(x, w), got = product(rotatedX, rotatedW);
    EXPECT_LE(relativeError(got.data(), want.data(), got.size()), 1e-12) << K;
    // Its own inverse, and orthonormal.
    std::vector<double> twice = rotatedX;
    for (int64_t i = 0; i < rows; ++i)
      applyTransform(&twice[i * K], K, block);
    EXPECT_LE(relativeError(twice.data(), x.data(), x.size()), 1e-12) << K;
    double before = 0, after = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      before += x[i] * x[i];
      after += rotatedX[i] * rotatedX[i];
    }
    EXPECT_NEAR(after / before, 1, 1e-12) << K;
  }
}

TEST(Hadamard, RotatedRowsAreTheRotatedProduct) {
  // H (W x) = (H W) x, as folding has it.
  int64_t K = 40, M = 96, block = 32;
  std::vector<double> x = normals(K, 1), w = normals(M * K, 2);
  auto product = [&](const std::vector<double> &weight) {
    std::vector<double> y(M);
    for (int64_t i = 0; i < M; ++i)
      for (int64_t k = 0; k < K; ++k)
        y[i] += weight[i * K + k] * x[k];
    return y;
  };
  std::vector<double> want = product(w), rotated(M * K);
  applyTransform(want.data(), M, block);
  for (int64_t k = 0; k < K; ++k) {
    std::vector<double> column(M);
    for (int64_t i = 0; i < M; ++i)
      column[i] = w[i * K + k];
    applyTransform(column.data(), M, block);
    for (int64_t i = 0; i < M; ++i)
      rotated[i * K + k] = column[i];
  }
  std::vector<double> got = product(rotated);
  EXPECT_LE(relativeError(got.data(), want.data(), got.size()), 1e-12);
}

//===----------------------------------------------------------------------===//
// Programs on trained weights
//===----------------------------------------------------------------------===//

/// Linear layers in a row: the out-projection of a layer with its residual, the
/// in-projection of the same layer.
static const char *const chain = R"(
module attributes {ssm.weight_prefix = "backbone.layers.2.mixer."} {
  ssm.weight @out_proj "out_proj.weight" : tensor<256x512xbf16>
  ssm.weight @in_proj "in_proj.weight" : tensor<1024x256xbf16>
  func.func @main(%x: tensor<?x?x512xf32>) -> tensor<?x?x1024xf32> {
    %out = ssm.get_weight @out_proj : tensor<256x512xbf16>
    %h = ssm.projection %x, %out : tensor<?x?x512xf32>, tensor<256x512xbf16> -> tensor<?x?x256xf32>
    %in = ssm.get_weight @in_proj : tensor<1024x256xbf16>
    %y = ssm.projection %h, %in : tensor<?x?x256xf32>, tensor<1024x256xbf16> -> tensor<?x?x1024xf32>
    return %y : tensor<?x?x1024xf32>
  }
})";

static std::vector<Tensor> runOnCheckpoint(const std::string &source,
                                           std::vector<Tensor> inputs,
                                           CompileOptions options = {}) {
  auto executable = compile(source, options);
  SafeTensors weights = take(SafeTensors::open(checkpoint));
  std::vector<Tensor> outputs;
  Status status = executable->bindWeights(weights);
  EXPECT_TRUE(status.isOk()) << status.toString();
  status = executable->run("main", inputs, outputs);
  EXPECT_TRUE(status.isOk()) << status.toString();
  return outputs;
}

static const char *const insertAll = "func.func(ssm-insert-hadamard{mode=all})";

TEST(Rotation, ChainOfProjections) {
  std::string all = insertAll;
  for (int64_t tokens : {1, 3, 37}) {
    std::vector<Tensor> inputs = {normalTensor({2, tokens, 512}, tokens)};
    Tensor plain = runOnCheckpoint(chain, inputs)[0];
    for (const std::string &pipeline :
         {all, all + ",ssm-hoist-weights", all + ",ssm-fold-hadamard",
          all + ",ssm-fold-hadamard,ssm-hoist-weights",
          all + ",ssm-hoist-weights,ssm-fold-hadamard"}) {
      std::string rotated = transform(chain, pipeline);
      Tensor got = runOnCheckpoint(rotated, inputs)[0];
      EXPECT_LE(relativeError(got, plain), 1e-5) << pipeline;
    }
  }
  // Between the two nothing is rotated any more.
  std::string folded =
      transform(chain, all + ",ssm-fold-hadamard,ssm-hoist-weights");
  llvm::StringRef main = llvm::StringRef(folded).split("@main").second;
  EXPECT_EQ(occurrences(main, "ssm.hadamard"), 1u) << folded;
  EXPECT_EQ(occurrences(main, "linalg.transpose"), 0u) << folded;
  EXPECT_EQ(occurrences(folded, "{ssm.prepared}"), 2u) << folded;
}

TEST(Rotation, KeptWeightType) {
  std::vector<Tensor> inputs = {normalTensor({1, 20, 512}, 5)};
  Tensor plain = runOnCheckpoint(chain, inputs)[0];
  std::string rotated = transform(
      chain, "func.func(ssm-insert-hadamard{mode=all keep-weight-type})");
  EXPECT_EQ(occurrences(rotated, "ssm.cast"), 0u);
  // Rounded weights: an error of bf16, once per layer.
  double error = relativeError(runOnCheckpoint(rotated, inputs)[0], plain);
  EXPECT_LE(error, 1e-2);
  EXPECT_GE(error, 1e-5);
}

TEST(Rotation, Block) {
  std::string source = readFile(COREY_TEST_EXAMPLES "/mamba_block.mlir");
  std::vector<Tensor> inputs = {normalTensor({2, 50, 256}, 3)};
  Tensor plain = runOnCheckpoint(source, inputs)[0];
  std::string rotated = transform(
      source, std::string(insertAll) + ",ssm-hoist-weights,ssm-fold-hadamard");
  EXPECT_EQ(occurrences(rotated, "ssm.hadamard"), 8u);
  EXPECT_LE(relativeError(runOnCheckpoint(rotated, inputs)[0], plain), 1e-5);
}

//===----------------------------------------------------------------------===//
// Prepared weights
//===----------------------------------------------------------------------===//

static const char *const prepared = R"(
ssm.weight @w : tensor<8xf32>
ssm.weight @v : tensor<8xf32>
func.func @main(%x: tensor<?x8xf32>) -> tensor<?x8xf32> {
  %w = ssm.get_weight @w : tensor<8xf32>
  %e = ssm.exp %w : tensor<8xf32>
  %y = ssm.mul %x, %e : tensor<?x8xf32>, tensor<8xf32>
  return %y : tensor<?x8xf32>
}
func.func @other(%x: tensor<?x8xf32>) -> tensor<?x8xf32> {
  %v = ssm.get_weight @v : tensor<8xf32>
  %y = ssm.mul %x, %v : tensor<?x8xf32>, tensor<8xf32>
  return %y : tensor<?x8xf32>
})";

TEST(Prepare, OnceAndAfterEveryBinding) {
  auto executable = compile(prepared);
  // No trace of it among what users bind and run.
  ASSERT_EQ(executable->functions().size(), 2u);
  EXPECT_EQ(executable->functions()[0].name, "main");
  EXPECT_EQ(executable->findFunction("ssm.prepare"), nullptr);
  ASSERT_EQ(executable->weights().size(), 2u);
  EXPECT_EQ(executable->weights()[0].name, "w");
  EXPECT_NE(executable->explain().find("prepared 1 weight: not run yet"),
            std::string::npos);
  Tensor some = take(Tensor::empty(DType::F32, {8}, true));
  EXPECT_FALSE(executable->bindWeight("prepared0", some).isOk());
  EXPECT_FALSE(executable->boundWeight("prepared0"));
  std::vector<Tensor> outputs;
  EXPECT_FALSE(executable->run("ssm.prepare", {}, outputs).isOk());

  std::vector<Tensor> inputs = {normalTensor({3, 8}, 1)};
  Status status = executable->run("main", inputs, outputs);
  EXPECT_EQ(status.message(),
            "weight 'w': expected it to be bound before @main runs, got no "
            "tensor");
  // What needs no prepared weight needs not theirs.
  ASSERT_OK(executable->bindWeight("v", some));
  ASSERT_OK(executable->run("other", inputs, outputs));
  for (uint64_t seed : {2, 3}) {
    Tensor weight = normalTensor({8}, seed);
    ASSERT_OK(executable->bindWeight("w", weight));
    for (int call = 0; call < 2; ++call) {
      ASSERT_OK(executable->run("main", inputs, outputs));
      for (int64_t i = 0; i < 24; ++i)
        EXPECT_FLOAT_EQ(outputs[0].dataAs<float>()[i],
                        inputs[0].dataAs<float>()[i] *
                            std::exp(weight.dataAs<float>()[i % 8]));
    }
    EXPECT_FALSE(executable->boundWeight("prepared0"));
    EXPECT_NE(executable->explain().find("prepared 1 weight in "),
              std::string::npos);
    // It is read again when a weight is bound.
    std::vector<Tensor> over = {take(weight.reshape({1, 8}))};
    std::vector<Tensor> row = {normalTensor({1, 8}, 4)};
    EXPECT_EQ(executable->run("main", row, over).message(),
              "output 'y': expected memory of its own, got an overlap with "
              "weight 'w'");
  }
}

TEST(Prepare, ChangesNoResult) {
  std::string source = readFile(COREY_TEST_EXAMPLES "/mamba_block.mlir");
  std::vector<Tensor> inputs = {normalTensor({2, 50, 256}, 3)};
  CompileOptions options;
  Tensor once = runOnCheckpoint(source, inputs, options)[0];
  options.hoistWeights = false;
  Tensor always = runOnCheckpoint(source, inputs, options)[0];
  // Sums of a product may be cut differently from one call to the next.
  EXPECT_LE(relativeError(once, always), 1e-6);
}

TEST(Prepare, ModulesThatDoNotFit) {
  auto fails = [](const std::string &source, const std::string &message) {
    static std::shared_ptr<Context> context = take(Context::create());
    auto executable = context->compile(source);
    ASSERT_FALSE(static_cast<bool>(executable));
    EXPECT_NE(executable.status().message().find(message), std::string::npos)
        << executable.status().message();
  };
  fails(R"(
    ssm.weight @p {ssm.prepared} : tensor<8xf32>
    func.func @main(%x: tensor<?x8xf32>) -> tensor<?x8xf32> {
      %w = ssm.get_weight @p : tensor<8xf32>
      %y = ssm.mul %x, %w : tensor<?x8xf32>, tensor<8xf32>
      return %y : tensor<?x8xf32>
    })",
        "expected @ssm.prepare to give prepared weight 'p', got none");
  fails(R"(
    ssm.weight @w : tensor<8xf32>
    func.func @ssm.prepare() -> (tensor<8xf32> {ssm.prepares = "w"}) {
      %w = ssm.get_weight @w : tensor<8xf32>
      %y = ssm.exp %w : tensor<8xf32>
      return %y : tensor<8xf32>
    }
    func.func @main(%x: tensor<?x8xf32>) -> tensor<?x8xf32> {
      %w = ssm.get_weight @w : tensor<8xf32>
      %y = ssm.mul %x, %w : tensor<?x8xf32>, tensor<8xf32>
      return %y : tensor<?x8xf32>
    })",
        "expected result 0 of @ssm.prepare to be a prepared weight, got 'w'");
}

TEST(Prepare, FromManyThreads) {
  // The first calls race for the work.
  auto executable = compile(prepared);
  ASSERT_OK(executable->bindWeight("w", normalTensor({8}, 2)));
  std::vector<Tensor> inputs = {normalTensor({3, 8}, 1)};
  std::vector<std::vector<Tensor>> outputs(4);
  std::vector<std::thread> threads;
  for (auto &result : outputs)
    threads.emplace_back([&] {
      Status status = executable->run("main", inputs, result);
      EXPECT_TRUE(status.isOk()) << status.toString();
    });
  for (std::thread &thread : threads)
    thread.join();
  for (auto &result : outputs)
    EXPECT_EQ(relativeError(result[0], outputs[0][0]), 0);
}

//===----------------------------------------------------------------------===//
// Profiles
//===----------------------------------------------------------------------===//

TEST(Profile, EveryValueHasASite) {
  std::string source = readFile(COREY_TEST_EXAMPLES "/mamba_block.mlir");
  CompileOptions options;
  options.observeValues = true;
  auto executable = compile(source, options);
  SafeTensors weights = take(SafeTensors::open(checkpoint));
  ASSERT_OK(executable->bindWeights(weights));
  std::vector<Tensor> inputs = {normalTensor({2, 50, 256}, 3)}, outputs;
  ASSERT_OK(executable->run("main", inputs, outputs));
  std::vector<std::string> sites;
  for (const ObservationInfo &info : executable->observations()) {
    sites.push_back(info.site);
    if (info.site == "main.arg#0") {
      EXPECT_EQ(info.count, 2u * 50 * 256);
      EXPECT_NEAR(info.mean, 0, 0.05);
      EXPECT_NEAR(info.kurtosis, 3, 0.3);
    }
  }
  for (const char *site :
       {"main.arg#0", "main.projection#0", "main.projection#3",
        "main.selective_scan#0", "main.causal_conv#0"})
    EXPECT_EQ(std::count(sites.begin(), sites.end(), std::string(site)), 1)
        << site;
  // Looking changes nothing.
  EXPECT_LE(relativeError(outputs[0], runOnCheckpoint(source, inputs)[0]),
            1e-6);
}
