//===- GPUTest.cpp - Programs on a CUDA device ----------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// What only a device can show: bits that stay the same, streams, graphs, memory
// that runs out, errors that kernels find, offsets beyond 32 bits. Every test
// is skipped where there is no device.
//
//===----------------------------------------------------------------------===//

#include "corey/Device/CUDA.h"
#include "corey/Executable.h"
#include "gtest/gtest.h"
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <random>
#include <thread>

using namespace corey;

namespace {
using Shape = std::vector<int64_t>;
using Tensors = std::vector<Tensor>;

#define ASSERT_OK(Expression)                                                  \
  do {                                                                         \
    Status result = (Expression);                                              \
    ASSERT_TRUE(result.isOk()) << result.toString();                           \
  } while (false)
#define EXPECT_OK(Expression)                                                  \
  do {                                                                         \
    Status result = (Expression);                                              \
    EXPECT_TRUE(result.isOk()) << result.toString();                           \
  } while (false)

template <class T> T take(Expected<T> value) {
  if (!value) {
    ADD_FAILURE() << value.status().toString();
    std::abort();
  }
  return *std::move(value);
}

//===----------------------------------------------------------------------===//
// Programs
//===----------------------------------------------------------------------===//

std::string typeText(DType type, const Shape &shape) {
  std::string text = "tensor<";
  for (int64_t size : shape)
    text += (size < 0 ? "?" : std::to_string(size)) + "x";
  return text + dtypeName(type) + ">";
}

/// A scan over `D` channels and `N` states with every operand but packed
/// sequences, whose site is `scan`.
struct ScanProgram {
  int64_t D, N, G = 1;
  DType type = DType::F32;
  bool packed = false, plain = false;

  std::string source() const {
    std::string u = typeText(type, {packed ? 1 : -1, -1, D}),
                b = typeText(type, {packed ? 1 : -1, -1, G, N}),
                a = typeText(DType::F32, {D, N}), d = typeText(type, {D}),
                h = typeText(DType::F32, {-1, D, N});
    std::string starts = "tensor<?xi32>";
    return "func.func @main(%u: " + u + ", %delta: " + u + ", %A: " + a +
           ", %B: " + b + ", %C: " + b +
           (plain ? ""
                  : ", %D: " + d + ", %z: " + u + ", %bias: " + d +
                        ", %h0: " + h) +
           (packed ? ", %starts: " + starts : "") + ") -> (" + u + ", " + h +
           ") {\n  %y, %h = ssm.selective_scan %u, %delta, %A, %B, %C" +
           (plain ? ""
                  : " D(%D : " + d + ") z(%z : " + u + ") delta_bias(%bias : " +
                        d + ") initial_state(%h0 : " + h + ")") +
           (packed ? " seq_starts(%starts : " + starts + ")" : "") + " {" +
           (plain ? "" : "delta_softplus, ") +
           "chunk = #ssm.chunk<runtime = @scan>} : " + u + ", " + u + ", " + a +
           ", " + b + ", " + b + " -> " + u + ", " + h +
           "\n  return %y, %h : " + u + ", " + h + "\n}\n";
  }
};

/// An ssd of `H` heads of `P` channels and `N` states.
struct SSDProgram {
  int64_t H, P, N;
  DType type = DType::F32;
  bool softplus = true;

  std::string source() const {
    std::string x = typeText(type, {-1, -1, H, P}),
                d = typeText(type, {-1, -1, H}), a = typeText(DType::F32, {H}),
                b = typeText(type, {-1, -1, 1, N}),
                h = typeText(DType::F32, {-1, H, P, N});
    return "func.func @main(%x: " + x + ", %dt: " + d + ", %A: " + a +
           ", %B: " + b + ", %C: " + b + ", %h0: " + h + ") -> (" + x + ", " +
           h + ") {\n  %y, %h = ssm.ssd %x dt(%dt : " + d + ") A(%A : " + a +
           ") B(%B) C(%C) initial_states(%h0 : " + h + ") {" +
           (softplus ? "dt_softplus, " : "") +
           "chunk = #ssm.chunk<runtime = @scan>} : " + x + ", " + b + ", " + b +
           " -> " + x + ", " + h + "\n  return %y, %h : " + x + ", " + h +
           "\n}\n";
  }
};

/// A function of one op on x [?, ?, D] and weights.
struct RowProgram {
  const char *name;
  std::string source;
  std::vector<Shape> weights;
};

std::vector<RowProgram> rowPrograms(int64_t D, DType type) {
  std::string x = typeText(type, {-1, -1, D});
  auto weight = [&](const Shape &shape) { return typeText(type, shape); };
  auto program = [&](const std::string &arguments, const std::string &op,
                     const std::string &result) {
    return "func.func @main(%x: " + x + arguments + ") -> " + result +
           " {\n  %y = ssm." + op + "\n  return %y : " + result + "\n}\n";
  };
  std::string w1 = weight({D}), w4 = weight({D, 4}), wm = weight({24, D}),
              m = typeText(type, {-1, -1, 24});
  return {
      {"pointwise",
       program(", %w: " + w1, "mul %x, %w : " + x + ", " + w1, x),
       {{D}}},
      {"causal_conv",
       program(", %w: " + w4,
               "causal_conv %x, %w {silu} : " + x + ", " + w4 + " -> " + x, x),
       {{D, 4}}},
      {"rms_norm",
       program(", %w: " + w1,
               "rms_norm %x, %w {eps = 1.0e-5 : f32} : " + x + ", " + w1 +
                   " -> " + x,
               x),
       {{D}}},
      {"hadamard",
       program("",
               "hadamard %x {block = " + std::to_string(D & -D) +
                   " : i64} : " + x + " -> " + x,
               x),
       {}},
      {"projection",
       program(", %w: " + wm,
               "projection %x, %w : " + x + ", " + wm + " -> " + m, m),
       {{24, D}}}};
}

/// Most of a Mamba-1 block: what is around the scan becomes part of it.
std::string blockSource() {
  return R"(
func.func @main(%x: tensor<?x?x64xf32>, %wi: tensor<128x64xf32>, %wz: tensor<128x64xf32>,
                %wc: tensor<128x4xf32>, %bc: tensor<128xf32>, %wd: tensor<128x128xf32>,
                %wb: tensor<16x128xf32>, %A_log: tensor<128x16xf32>, %D: tensor<128xf32>,
                %g: tensor<128xf32>, %wo: tensor<64x128xf32>) -> tensor<?x?x64xf32> {
  %i = ssm.projection %x, %wi : tensor<?x?x64xf32>, tensor<128x64xf32> -> tensor<?x?x128xf32>
  %z = ssm.projection %x, %wz : tensor<?x?x64xf32>, tensor<128x64xf32> -> tensor<?x?x128xf32>
  %c = ssm.causal_conv %i, %wc bias(%bc : tensor<128xf32>) : tensor<?x?x128xf32>, tensor<128x4xf32> -> tensor<?x?x128xf32>
  %u = ssm.silu %c : tensor<?x?x128xf32>
  %d0 = ssm.projection %u, %wd : tensor<?x?x128xf32>, tensor<128x128xf32> -> tensor<?x?x128xf32>
  %d = ssm.softplus %d0 : tensor<?x?x128xf32>
  %b0 = ssm.projection %u, %wb : tensor<?x?x128xf32>, tensor<16x128xf32> -> tensor<?x?x16xf32>
  %c1 = arith.constant 1 : index
  %c0 = arith.constant 0 : index
  %batch = tensor.dim %x, %c0 : tensor<?x?x64xf32>
  %length = tensor.dim %x, %c1 : tensor<?x?x64xf32>
  %b = tensor.expand_shape %b0 [[0], [1], [2, 3]] output_shape [%batch, %length, 1, 16] : tensor<?x?x16xf32> into tensor<?x?x1x16xf32>
  %e = ssm.exp %A_log : tensor<128x16xf32>
  %A = ssm.neg %e : tensor<128x16xf32>
  %y0 = ssm.selective_scan %u, %d, %A, %b, %b D(%D : tensor<128xf32>) {chunk = #ssm.chunk<runtime = @scan>}
      : tensor<?x?x128xf32>, tensor<?x?x128xf32>, tensor<128x16xf32>, tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x128xf32>
  %s = ssm.silu %z : tensor<?x?x128xf32>
  %y1 = ssm.mul %y0, %s : tensor<?x?x128xf32>, tensor<?x?x128xf32>
  %y2 = ssm.rms_norm %y1, %g {eps = 1.0e-5 : f32} : tensor<?x?x128xf32>, tensor<128xf32> -> tensor<?x?x128xf32>
  %y = ssm.projection %y2, %wo : tensor<?x?x128xf32>, tensor<64x128xf32> -> tensor<?x?x64xf32>
  return %y : tensor<?x?x64xf32>
}
)";
}

//===----------------------------------------------------------------------===//
// Tensors
//===----------------------------------------------------------------------===//

constexpr float NaN = std::numeric_limits<float>::quiet_NaN();

bool sameBits(const Tensor &a, const Tensor &b) {
  return a.shape() == b.shape() && a.dtype() == b.dtype() && a.isContiguous() &&
         b.isContiguous() &&
         !std::memcmp(a.data(), b.data(), static_cast<size_t>(a.numBytes()));
}

testing::AssertionResult sameBits(const Tensors &a, const Tensors &b) {
  for (size_t i = 0; i < a.size(); ++i)
    if (!sameBits(a[i], b[i])) {
      Tensor x = take(a[i].to(DType::F64)), y = take(b[i].to(DType::F64));
      for (int64_t k = 0; k < x.numElements(); ++k)
        if (std::memcmp(x.dataAs<double>() + k, y.dataAs<double>() + k, 8))
          return testing::AssertionFailure()
                 << "output " << i << " differs from element " << k
                 << " on: " << x.dataAs<double>()[k] << " and "
                 << y.dataAs<double>()[k];
      return testing::AssertionFailure() << "output " << i << " differs";
    }
  return testing::AssertionSuccess();
}

/// In the l2 norm, relative to `want`.
testing::AssertionResult isClose(const Tensor &got, const Tensor &want,
                                 double bound) {
  if (got.shape() != want.shape())
    return testing::AssertionFailure()
           << "expected " << want.describe() << ", got " << got.describe();
  Tensor a = take(got.to(DType::F64)), b = take(want.to(DType::F64));
  double difference = 0, norm = 0;
  for (int64_t i = 0; i < a.numElements(); ++i) {
    double x = a.dataAs<double>()[i], y = b.dataAs<double>()[i];
    difference += (x - y) * (x - y);
    norm += y * y;
  }
  double relative = std::sqrt(difference) / std::max(std::sqrt(norm), 1e-30);
  if (relative <= bound)
    return testing::AssertionSuccess();
  return testing::AssertionFailure()
         << "relative error " << relative << " beyond " << bound;
}

//===----------------------------------------------------------------------===//
// The fixture
//===----------------------------------------------------------------------===//

class GPU : public testing::Test {
protected:
  void SetUp() override {
    const char *text = std::getenv("COREY_TEST_DEVICE");
    name = text && std::string(text).rfind("cuda", 0) == 0 ? text : "cuda";
    ContextOptions options;
    options.device = name;
    Expected<std::shared_ptr<Context>> created = Context::create(options);
    if (!created)
      GTEST_SKIP() << "no CUDA device: " << created.status().message();
    context = *created;
    device = context->getDevice();
    gpu = take(cuda::Device::get(device.index));
    random.seed(11);
  }

  std::shared_ptr<Executable> compile(const std::string &source,
                                      const std::string &fusion = "dp") {
    return compileOn(*context, source, fusion);
  }
  static std::shared_ptr<Executable>
  compileOn(Context &where, const std::string &source,
            const std::string &fusion = "dp") {
    CompileOptions options;
    options.policy = "unsplit";
    options.fusion = fusion;
    return take(where.compile(source, options));
  }
  Context &cpu() {
    if (!host)
      host = take(Context::create());
    return *host;
  }

  Tensor make(DType type, const Shape &shape,
              const std::function<double()> &next) {
    Tensor tensor = take(Tensor::empty(type, shape));
    for (int64_t i = 0; i < tensor.numElements(); ++i)
      storeScalar(type, tensor.dataAs<char>() + i * dtypeSize(type), next());
    return tensor;
  }
  Tensor normal(DType type, const Shape &shape, double scale = 1,
                double shift = 0) {
    std::normal_distribution<double> distribution(shift, scale);
    return make(type, shape, [&] { return distribution(random); });
  }
  Tensors scanInputs(const ScanProgram &p, int64_t B, int64_t L,
                     const std::vector<int> &starts = {}) {
    int64_t rows = p.packed ? static_cast<int64_t>(starts.size()) : B;
    std::uniform_real_distribution<double> rates(-4, -0.05);
    Tensors inputs = {
        normal(p.type, {B, L, p.D}),
        p.plain
            ? make(p.type, {B, L, p.D}, [&] { return -0.02 * rates(random); })
            : normal(p.type, {B, L, p.D}, 0.5, -1),
        make(DType::F32, {p.D, p.N}, [&] { return rates(random); }),
        normal(p.type, {B, L, p.G, p.N}), normal(p.type, {B, L, p.G, p.N})};
    if (!p.plain) {
      inputs.push_back(normal(p.type, {p.D}));
      inputs.push_back(normal(p.type, {B, L, p.D}));
      inputs.push_back(normal(p.type, {p.D}, 0.3));
      inputs.push_back(normal(DType::F32, {rows, p.D, p.N}));
    }
    if (p.packed) {
      size_t next = 0;
      inputs.push_back(make(DType::I32, {rows}, [&] {
        return static_cast<double>(starts[next++]);
      }));
    }
    return inputs;
  }
  Tensors ssdInputs(const SSDProgram &p, int64_t B, int64_t L) {
    std::uniform_real_distribution<double> rates(-4, -0.05);
    return {normal(p.type, {B, L, p.H, p.P}),
            p.softplus ? normal(p.type, {B, L, p.H}, 0.5, -1)
                       : make(p.type, {B, L, p.H},
                              [&] { return -0.02 * rates(random); }),
            make(DType::F32, {p.H}, [&] { return rates(random); }),
            normal(p.type, {B, L, 1, p.N}),
            normal(p.type, {B, L, 1, p.N}),
            normal(DType::F32, {B, p.H, p.P, p.N})};
  }
  Tensors blockInputs(int64_t B, int64_t L) {
    Tensors inputs = {normal(DType::F32, {B, L, 64})};
    for (const Shape &shape :
         {Shape{128, 64}, {128, 64}, {128, 4}, {128}, {128, 128}, {16, 128}})
      inputs.push_back(normal(DType::F32, shape, 0.1));
    std::uniform_real_distribution<double> rates(-1, 1);
    inputs.push_back(
        make(DType::F32, {128, 16}, [&] { return rates(random); }));
    inputs.push_back(normal(DType::F32, {128}));
    inputs.push_back(normal(DType::F32, {128}));
    inputs.push_back(normal(DType::F32, {64, 128}, 0.1));
    return inputs;
  }

  Tensors upload(const Tensors &tensors) {
    Tensors moved;
    for (const Tensor &tensor : tensors)
      moved.push_back(take(tensor.to(device)));
    return moved;
  }
  static Tensors download(const Tensors &tensors) {
    Tensors moved;
    for (const Tensor &tensor : tensors)
      moved.push_back(take(tensor.to(Device::cpu())));
    return moved;
  }
  /// What the program computes of tensors on the device, on the host.
  static Tensors run(Executable &program, const Tensors &inputs) {
    Tensors outputs;
    Status status = program.run("main", inputs, outputs);
    EXPECT_TRUE(status.isOk()) << status.toString();
    return status ? download(outputs) : Tensors();
  }
  Tensors runOnCPU(const std::string &source, const Tensors &inputs) {
    std::shared_ptr<Executable> &program = hostPrograms[source];
    if (!program)
      program = compileOn(cpu(), source);
    Tensors outputs;
    Status status = program->run("main", inputs, outputs);
    EXPECT_TRUE(status.isOk()) << status.toString();
    return outputs;
  }
  std::vector<std::string> variants(const ScanProgram &p) {
    scheduler::Problem problem;
    problem.op = scheduler::OpKind::SelectiveScan;
    problem.channels = p.D;
    problem.groups = p.G;
    problem.states = p.N;
    std::vector<std::string> names;
    for (const scheduler::Variant &variant :
         scanVariants(context->getDevice().kind, problem))
      names.push_back(variant.name);
    return names;
  }
  /// Whether the device has room for so many bytes.
  bool hasMemory(double bytes) {
    return static_cast<double>(take(gpu->freeMemory())) > 1.1 * bytes;
  }

  std::string name;
  std::shared_ptr<Context> context, host;
  Device device;
  std::shared_ptr<cuda::Device> gpu;
  std::map<std::string, std::shared_ptr<Executable>> hostPrograms;
  std::mt19937_64 random;
};

//===----------------------------------------------------------------------===//
// The same bits
//===----------------------------------------------------------------------===//

TEST_F(GPU, ScansAreDeterministic) {
  for (const ScanProgram &p :
       {ScanProgram{64, 16}, ScanProgram{200, 16, 2, DType::BF16},
        ScanProgram{48, 64, 1, DType::F16}, ScanProgram{33, 5},
        ScanProgram{64, 200}, ScanProgram{64, 16, 1, DType::F32, true}}) {
    SCOPED_TRACE(p.source());
    std::shared_ptr<Executable> program = compile(p.source());
    Tensors inputs =
        upload(p.packed ? scanInputs(p, 1, 700, {0, 130, 130, 200, 699})
                        : scanInputs(p, 3, 700));
    for (const std::string &variant : variants(p)) {
      ASSERT_OK(program->setVariant("scan", variant));
      for (int64_t chunk : {0, 1, 7, 64, 100, 699, 5000}) {
        SCOPED_TRACE(variant + ", chunk " + std::to_string(chunk));
        ASSERT_OK(program->setChunk("scan", chunk));
        Tensors first = run(*program, inputs);
        for (int i = 0; i < 20; ++i)
          ASSERT_TRUE(sameBits(run(*program, inputs), first));
      }
    }
  }
}

TEST_F(GPU, OtherOpsAreDeterministic) {
  for (DType type : {DType::F32, DType::BF16})
    for (int64_t D : {64, 96, 1024})
      for (const RowProgram &p : rowPrograms(D, type)) {
        SCOPED_TRACE(p.source);
        std::shared_ptr<Executable> program = compile(p.source);
        Tensors inputs = {normal(type, {2, 37, D})};
        for (const Shape &shape : p.weights)
          inputs.push_back(normal(type, shape));
        inputs = upload(inputs);
        Tensors first = run(*program, inputs);
        for (int i = 0; i < 20; ++i)
          ASSERT_TRUE(sameBits(run(*program, inputs), first));
      }
}

//===----------------------------------------------------------------------===//
// Agreement with the CPU
//===----------------------------------------------------------------------===//

TEST_F(GPU, BlocksAgreeWithTheCPU) {
  std::shared_ptr<Executable> reference = compileOn(cpu(), blockSource());
  for (const char *fusion : {"dp", "none", "entropy"}) {
    std::shared_ptr<Executable> program = compile(blockSource(), fusion);
    for (auto [B, L] : {std::pair<int64_t, int64_t>{1, 1}, {2, 77}, {1, 900}})
      for (int64_t chunk : {0, 50}) {
        SCOPED_TRACE(std::string(fusion) + ", length " + std::to_string(L) +
                     ", chunk " + std::to_string(chunk));
        ASSERT_OK(program->setChunk("scan", chunk));
        Tensors inputs = blockInputs(B, L), want;
        ASSERT_OK(reference->run("main", inputs, want));
        EXPECT_TRUE(isClose(run(*program, upload(inputs))[0], want[0], 1e-5));
      }
  }
}

TEST_F(GPU, ScansAgreeWithTheCPU) {
  for (const ScanProgram &p :
       {ScanProgram{64, 16}, ScanProgram{130, 16, 1, DType::BF16},
        ScanProgram{48, 64, 3}, ScanProgram{33, 5}, ScanProgram{64, 200},
        ScanProgram{64, 16, 1, DType::F16, true}}) {
    SCOPED_TRACE(p.source());
    std::shared_ptr<Executable> program = compile(p.source());
    Tensors inputs = p.packed
                         ? scanInputs(p, 1, 450, {0, 1, 130, 130, 200, 450})
                         : scanInputs(p, 2, 450);
    Tensors want = runOnCPU(p.source(), inputs), given = upload(inputs);
    double bound = p.type == DType::F32    ? 7e-6
                   : p.type == DType::BF16 ? 6e-3
                                           : 1e-3;
    for (const std::string &variant : variants(p)) {
      ASSERT_OK(program->setVariant("scan", variant));
      for (int64_t chunk : {0, 1, 64, 449}) {
        SCOPED_TRACE(variant + ", chunk " + std::to_string(chunk));
        ASSERT_OK(program->setChunk("scan", chunk));
        Tensors got = run(*program, given);
        EXPECT_TRUE(isClose(got[0], want[0], bound));
        EXPECT_TRUE(isClose(got[1], want[1], 7e-6));
      }
    }
  }
}

TEST_F(GPU, SSDIsDeterministicAndAgreesWithTheCPU) {
  for (const SSDProgram &p : {SSDProgram{4, 64, 64}, SSDProgram{3, 20, 17},
                              SSDProgram{4, 64, 128, DType::BF16},
                              SSDProgram{2, 32, 16, DType::F16}}) {
    SCOPED_TRACE(p.source());
    std::shared_ptr<Executable> program = compile(p.source());
    Tensors inputs = ssdInputs(p, 2, 450), given = upload(inputs);
    Tensors want = runOnCPU(p.source(), inputs);
    double bound = p.type == DType::F32    ? 7e-6
                   : p.type == DType::BF16 ? 6e-3
                                           : 1e-3;
    // Tensor cores take the weighted x of a state in its own type.
    double stateBound = p.type == DType::F32    ? 7e-6
                        : p.type == DType::BF16 ? 3e-3
                                                : 5e-4;
    for (int64_t chunk : {0, 1, 64, 100, 449, 5000}) {
      SCOPED_TRACE("chunk " + std::to_string(chunk));
      ASSERT_OK(program->setChunk("scan", chunk));
      Tensors first = run(*program, given);
      EXPECT_TRUE(isClose(first[0], want[0], bound));
      EXPECT_TRUE(isClose(first[1], want[1], stateBound));
      for (int i = 0; i < 20; ++i)
        ASSERT_TRUE(sameBits(run(*program, given), first));
    }
  }
}

// Steps that lie by heads are read where they are.
TEST_F(GPU, StridesDoNotChangeSSD) {
  for (const SSDProgram &p :
       {SSDProgram{3, 20, 17}, SSDProgram{16, 64, 256, DType::BF16}}) {
    SCOPED_TRACE(p.source());
    std::shared_ptr<Executable> program = compile(p.source());
    Tensors given = upload(ssdInputs(p, 2, 450)), turned = given;
    turned[1] = take(
        take(take(given[1].permute({0, 2, 1})).to(device)).permute({0, 2, 1}));
    EXPECT_FALSE(turned[1].isContiguous());
    for (int64_t chunk : {0, 64}) {
      ASSERT_OK(program->setChunk("scan", chunk));
      EXPECT_TRUE(sameBits(run(*program, turned), run(*program, given)));
    }
  }
}

//===----------------------------------------------------------------------===//
// Graphs, streams, contexts
//===----------------------------------------------------------------------===//

TEST_F(GPU, CapturedRunsAreRuns) {
  ScanProgram p{64, 16};
  for (const std::string &source : {p.source(), blockSource()}) {
    std::shared_ptr<Executable> program = compile(source);
    Tensors inputs = upload(source == p.source() ? scanInputs(p, 2, 600)
                                                 : blockInputs(2, 600));
    Tensors want = run(*program, inputs);
    std::shared_ptr<CapturedRun> captured =
        take(program->capture("main", inputs));
    for (int i = 0; i < 3; ++i) {
      ASSERT_OK(captured->launch());
      ASSERT_TRUE(sameBits(download(captured->outputs()), want));
    }
    // Inputs that are changed in place are read anew.
    Tensor other = take(normal(DType::F32, inputs[0].shape()).to(device));
    ASSERT_OK(inputs[0].copyFrom(other));
    want = run(*program, inputs);
    ASSERT_OK(captured->launch());
    ASSERT_TRUE(sameBits(download(captured->outputs()), want));

    cuda::Stream stream = take(cuda::Stream::create(gpu));
    for (int64_t chunk : {100, 64, 0, 33}) {
      SCOPED_TRACE("chunk " + std::to_string(chunk));
      ASSERT_OK(program->setChunk("scan", chunk));
      want = run(*program, inputs);
      ASSERT_OK(captured->launch(stream.handle()));
      ASSERT_OK(stream.synchronize());
      ASSERT_TRUE(sameBits(download(captured->outputs()), want));
    }
    ASSERT_OK(program->setChunk("scan", 0));
    ASSERT_OK(program->setVariant("scan", "warp"));
    want = run(*program, inputs);
    ASSERT_OK(captured->update());
    ASSERT_OK(captured->launch());
    ASSERT_TRUE(sameBits(download(captured->outputs()), want));
    // Given outputs, and several runs in a launch.
    Tensors outputs = take(program->makeOutputs("main", inputs));
    std::shared_ptr<CapturedRun> repeated =
        take(program->capture("main", inputs, outputs, 5));
    program.reset();
    ASSERT_OK(repeated->launch());
    ASSERT_TRUE(sameBits(download(outputs), want));
  }
}

TEST_F(GPU, StreamsDoNotDisturbEachOther) {
  std::shared_ptr<Executable> program = compile(blockSource());
  ASSERT_OK(program->setChunk("scan", 64));
  constexpr int kStreams = 3, kRuns = 40;
  std::vector<Tensors> inputs, wanted, outputs(kStreams);
  for (int i = 0; i < kStreams; ++i) {
    inputs.push_back(upload(blockInputs(1 + i, 300 + 111 * i)));
    wanted.push_back(run(*program, inputs.back()));
    outputs[i] = take(program->makeOutputs("main", inputs[i]));
  }
  // One thread that fills several streams.
  {
    std::vector<cuda::Stream> streams;
    for (int i = 0; i < kStreams; ++i)
      streams.push_back(take(cuda::Stream::create(gpu)));
    for (int k = 0; k < kRuns; ++k)
      for (int i = 0; i < kStreams; ++i)
        ASSERT_OK(
            program->run("main", inputs[i], outputs[i], streams[i].handle()));
    for (int i = 0; i < kStreams; ++i) {
      ASSERT_OK(streams[i].synchronize());
      EXPECT_TRUE(sameBits(download(outputs[i]), wanted[i])) << "stream " << i;
    }
  }
  // A thread for each, on a stream of its own or the program's.
  for (bool own : {true, false}) {
    std::vector<std::thread> threads;
    std::vector<int> wrong(kStreams, 0);
    for (int i = 0; i < kStreams; ++i)
      threads.emplace_back([&, i] {
        cuda::Stream stream;
        if (own)
          stream = take(cuda::Stream::create(gpu));
        for (int k = 0; k < kRuns; ++k) {
          Status status =
              program->run("main", inputs[i], outputs[i], stream.handle());
          if (status && own)
            status = stream.synchronize();
          wrong[i] += !status || !sameBits(download(outputs[i]), wanted[i]);
        }
      });
    for (std::thread &thread : threads)
      thread.join();
    EXPECT_EQ(wrong, std::vector<int>(kStreams, 0));
  }
}

TEST_F(GPU, ContextsShareTheDevice) {
  ScanProgram p{64, 16};
  Tensors inputs = upload(scanInputs(p, 1, 300));
  ContextOptions options;
  options.device = name;
  std::shared_ptr<Context> other = take(Context::create(options));
  std::shared_ptr<Executable> first = compile(p.source()),
                              second = compileOn(*other, p.source());
  Tensors want = run(*first, inputs);
  EXPECT_TRUE(sameBits(run(*second, inputs), want));
  context.reset();
  first.reset();
  EXPECT_TRUE(sameBits(run(*second, inputs), want));
  other.reset();
  EXPECT_TRUE(sameBits(run(*second, inputs), want));
}

// Kernels are loaded when they are first launched.
TEST_F(GPU, ProgramsShareModules) {
  ScanProgram p{40, 8};
  std::shared_ptr<Executable> first = compile(p.source()),
                              second = compile(p.source());
  Tensors inputs = upload(scanInputs(p, 2, 99));
  Tensors want = run(*first, inputs);
  cuda::ModuleCacheCounts before = cuda::Device::moduleCacheCounts();
  EXPECT_TRUE(sameBits(run(*second, inputs), want));
  cuda::ModuleCacheCounts after = cuda::Device::moduleCacheCounts();
  EXPECT_GT(after.memory, before.memory);
  EXPECT_EQ(after.disk, before.disk);
  EXPECT_EQ(after.compiled, before.compiled);
  first.reset();
  EXPECT_TRUE(sameBits(run(*second, inputs), want));
}

TEST_F(GPU, WarmCallsAllocateNothing) {
  std::shared_ptr<Executable> program = compile(blockSource());
  for (int64_t chunk : {0, 32}) {
    ASSERT_OK(program->setChunk("scan", chunk));
    Tensors inputs = upload(blockInputs(2, 400));
    Tensors outputs = take(program->makeOutputs("main", inputs));
    cuda::Stream stream = take(cuda::Stream::create(gpu));
    for (void *handle : {static_cast<void *>(nullptr), stream.handle()}) {
      for (int i = 0; i < 2; ++i) {
        ASSERT_OK(program->run("main", inputs, outputs, handle));
        ASSERT_OK(gpu->synchronize());
      }
      auto use = program->memoryUse();
      size_t free = take(gpu->freeMemory());
      for (int i = 0; i < 20; ++i) {
        ASSERT_OK(program->run("main", inputs, outputs, handle));
        if (i % 2)
          ASSERT_OK(stream.synchronize());
      }
      ASSERT_OK(gpu->synchronize());
      EXPECT_EQ(program->memoryUse(), use);
      // Other processes may use the device: only a leak on every call shows.
      EXPECT_LT(static_cast<double>(free),
                static_cast<double>(take(gpu->freeMemory())) + (1 << 30));
    }
  }
}

//===----------------------------------------------------------------------===//
// Observations
//===----------------------------------------------------------------------===//

/// What the host and the device say of the same tensors.
static void expectSameObservation(const ObservationInfo &host,
                                  const ObservationInfo &device) {
  auto near = [](double expected, double got, double relative) {
    EXPECT_LE(std::fabs(expected - got),
              relative * std::max(std::fabs(expected), 1e-30))
        << "expected " << expected << ", got " << got;
  };
  EXPECT_EQ(host.validity, device.validity);
  EXPECT_EQ(host.calls, device.calls);
  EXPECT_EQ(host.count, device.count);
  EXPECT_EQ(host.nonFinite, device.nonFinite);
  EXPECT_EQ(host.min, device.min);
  EXPECT_EQ(host.max, device.max);
  EXPECT_EQ(host.bins, device.bins);
  // Of the same counts.
  EXPECT_EQ(std::isnan(host.entropy), std::isnan(device.entropy));
  if (!std::isnan(host.entropy))
    EXPECT_NEAR(host.entropy, device.entropy, 1e-12);
  EXPECT_EQ(host.outlierFraction, device.outlierFraction);
  EXPECT_NEAR(host.mean, device.mean,
              1e-9 * (1 + std::sqrt(host.variance) + std::fabs(host.mean)));
  near(host.variance, device.variance, 1e-8);
  near(host.kurtosis, device.kurtosis, 1e-6);
  near(host.peakToRms, device.peakToRms, 1e-8);
}

TEST_F(GPU, ObservationsAgreeWithTheCPU) {
  using scheduler::RangeMode;
  using scheduler::Sampling;
  std::vector<scheduler::EstimatorOptions> kinds;
  for (RangeMode range : {RangeMode::MinMax, RangeMode::PaddedMinMax,
                          RangeMode::Fixed, RangeMode::RunningQuantile})
    for (Sampling sampling :
         {Sampling::Full, Sampling::Strided, Sampling::Token})
      for (int bins : {2, 77, 256, 4097, 65536}) {
        if (sampling == Sampling::Token && range != RangeMode::MinMax)
          continue;
        scheduler::EstimatorOptions options;
        options.range = range;
        options.sampling = sampling;
        options.stride = sampling == Sampling::Full ? 1 : 3;
        options.bins = bins;
        // Some lie outside.
        options.low = -1.7;
        options.high = 2.1;
        kinds.push_back(options);
      }
  double infinity = std::numeric_limits<double>::infinity();
  for (DType type : {DType::F32, DType::F16, DType::BF16})
    for (const scheduler::EstimatorOptions &options : kinds) {
      std::string x = typeText(type, {-1, -1, -1});
      std::string source = "func.func @main(%x: " + x + ") -> " + x +
                           " {\n  %y = ssm.observe @seen %x : " + x +
                           "\n  return %y : " + x + "\n}\n";
      CompileOptions compileOptions;
      compileOptions.observation = options;
      std::shared_ptr<Executable> onDevice =
          take(context->compile(source, compileOptions));
      std::shared_ptr<Executable> onHost =
          take(cpu().compile(source, compileOptions));
      for (int data = 0; data < 5; ++data) {
        SCOPED_TRACE(
            std::string(dtypeName(type)) + " range " +
            std::to_string(static_cast<int>(options.range)) + " sampling " +
            std::to_string(static_cast<int>(options.sampling)) + " bins " +
            std::to_string(options.bins) + " data " + std::to_string(data));
        for (const Shape &shape : {Shape{2, 37, 64},
                                   {1, 5, 2048},
                                   {3, 7, 13},
                                   {1, 1, 1},
                                   {2, 300, 130},
                                   {0, 4, 8}}) {
          Tensor input = normal(type, shape, 0.8, data == 1 ? 30 : 0.1);
          auto set = [&](int64_t at, double value) {
            if (at < input.numElements())
              storeScalar(type, input.dataAs<char>() + at * dtypeSize(type),
                          value);
          };
          // Far outliers; what is not finite (of tokens, all of one, which has
          // no entropy then); one value; zeros of both signs.
          if (data == 2)
            for (int64_t i = 0; i < input.numElements(); i += 1000)
              set(i, 300);
          if (data == 3 && options.sampling == Sampling::Token) {
            for (int64_t i = 0; i < shape[2]; ++i)
              set(i, i % 3 ? std::nan("") : infinity);
          } else if (data == 3) {
            set(0, std::nan(""));
            set(60, infinity);
            set(61, -infinity);
          }
          for (int64_t i = 0; data == 4 && i < input.numElements(); ++i)
            set(i, 1.5);
          Tensor there = take(input.to(device));
          for (int call = 0; call < 2; ++call) {
            // Then half of its tokens, where they lie.
            if (call) {
              there = take(there.slice(1, 0, (shape[1] + 1) / 2));
              input = take(input.slice(1, 0, (shape[1] + 1) / 2));
            }
            Tensors outputs, hostOutputs;
            ASSERT_OK(onDevice->run("main", {there}, outputs));
            ASSERT_OK(onHost->run("main", {input}, hostOutputs));
            ASSERT_EQ(onDevice->observations().size(), 1u);
            expectSameObservation(onHost->observations()[0],
                                  onDevice->observations()[0]);
          }
        }
      }
    }
}

TEST_F(GPU, ObservationsDoNotDisturbTheCall) {
  // The observed value is an intermediate whose memory others take over.
  std::string source = R"(
func.func @main(%x: tensor<?x?x64xbf16>, %w: tensor<64xbf16>) -> tensor<?x?x64xbf16> {
  %a = ssm.hadamard %x {block = 64 : i64} : tensor<?x?x64xbf16> -> tensor<?x?x64xbf16>
  %b = OBSERVE
  %c = ssm.rms_norm %b, %w {eps = 1.0e-5 : f32} : tensor<?x?x64xbf16>, tensor<64xbf16> -> tensor<?x?x64xbf16>
  %d = ssm.hadamard %c {block = 64 : i64} : tensor<?x?x64xbf16> -> tensor<?x?x64xbf16>
  %e = ssm.rms_norm %d, %w {eps = 1.0e-5 : f32} : tensor<?x?x64xbf16>, tensor<64xbf16> -> tensor<?x?x64xbf16>
  return %e : tensor<?x?x64xbf16>
}
)";
  std::string plainSource = source;
  source.replace(source.find("OBSERVE"), 7,
                 "ssm.observe @seen %a : tensor<?x?x64xbf16>");
  size_t line = plainSource.find("  %b = OBSERVE\n");
  plainSource.erase(line, std::strlen("  %b = OBSERVE\n"));
  plainSource.replace(plainSource.find("%b"), 2, "%a");
  std::shared_ptr<Executable> observed = compile(source, "none"),
                              plain = compile(plainSource, "none");
  Tensors inputs =
      upload({normal(DType::BF16, {1, 30000, 64}), normal(DType::BF16, {64})});
  Tensors outputs = take(observed->makeOutputs("main", inputs));
  Tensors expected = run(*plain, inputs);
  cuda::Stream stream = take(cuda::Stream::create(gpu));
  for (int i = 0; i < 30; ++i)
    ASSERT_OK(observed->run("main", inputs, outputs, stream.handle()));
  ASSERT_OK(stream.synchronize());
  ASSERT_OK(observed->run("main", inputs, outputs, stream.handle()));
  ASSERT_OK(stream.synchronize());
  EXPECT_TRUE(sameBits(download(outputs), expected));
  ObservationInfo info = observed->observations().at(0);
  EXPECT_GE(info.calls, 1u);
  EXPECT_EQ(info.count, info.calls * 30000 * 64);
  // What was read is the tensor, not what took its memory over: a rotation
  // keeps the mean of squares.
  EXPECT_NEAR(info.variance, 1, 0.02);
}

TEST_F(GPU, GraphsFollowWhatPoliciesSee) {
  ScanProgram p{64, 16};
  CompileOptions options;
  options.policy = "entropy";
  std::shared_ptr<Executable> program =
      take(context->compile(p.source(), options));
  Tensors inputs = upload(scanInputs(p, 1, 5000));
  Tensors outputs = take(program->makeOutputs("main", inputs));
  std::shared_ptr<CapturedRun> run =
      take(program->capture("main", inputs, outputs));
  auto launch = [&](uint64_t times) {
    for (uint64_t i = 0; i < times; ++i)
      ASSERT_OK(run->launch());
  };
  launch(1);
  EXPECT_FALSE(program->chunks()[0].usedData);
  launch(1);
  ChunkInfo first = program->chunks()[0];
  EXPECT_TRUE(first.usedData) << first.reason;
  ObservationInfo seen = program->observations().at(0);
  EXPECT_EQ(seen.calls, 1u);
  EXPECT_EQ(seen.count, 5000u * 64);
  // The graph is what a run is with that chunk.
  Tensors captured = download(outputs);
  Tensors again = take(program->makeOutputs("main", inputs));
  ASSERT_OK(program->setPolicy("", "static:" + std::to_string(first.chunk)));
  ASSERT_OK(program->run("main", inputs, again));
  EXPECT_TRUE(sameBits(captured, download(again)));
  // Of two values the entropy is at most ln 2, and in the end its average is.
  ASSERT_OK(program->setPolicy("", "entropy"));
  int n = 0;
  ASSERT_OK(inputs[0].copyFrom(
      make(p.type, {1, 5000, 64}, [&] { return double(n++ % 2); })));
  launch(12 * CapturedRun::kLaunchesPerObservation);
  ChunkInfo last = program->chunks()[0];
  EXPECT_TRUE(last.usedData) << last.reason;
  EXPECT_NE(last.chunk, first.chunk) << last.reason;
}

//===----------------------------------------------------------------------===//
// Errors
//===----------------------------------------------------------------------===//

TEST_F(GPU, RefusesWrongTensors) {
  ScanProgram p{64, 16};
  std::shared_ptr<Executable> program = compile(p.source());
  Tensors hostInputs = scanInputs(p, 2, 50), good = upload(hostInputs);
  Tensors want = run(*program, good);
  auto refused = [&](size_t index, Tensor tensor, const char *text) {
    Tensors inputs = good, outputs;
    inputs[index] = std::move(tensor);
    Status status = program->run("main", inputs, outputs);
    EXPECT_EQ(status.code(), StatusCode::InvalidArgument);
    EXPECT_NE(status.message().find(text), std::string::npos)
        << status.message();
    EXPECT_NE(status.message().find("expected"), std::string::npos);
  };
  refused(0, hostInputs[0], "got cpu");
  refused(2, hostInputs[2], "got cpu");
  refused(0, take(normal(DType::F16, {2, 50, 64}).to(device)), "f16");
  refused(1, take(normal(DType::F32, {2, 51, 64}).to(device)), "51");
  refused(1, take(normal(DType::F32, {50, 64}).to(device)), "'delta'");
  refused(3, take(normal(DType::F32, {2, 50, 1, 15}).to(device)), "15");
  Tensors outputs = {take(Tensor::empty(DType::F32, {2, 50, 64})),
                     take(Tensor::empty(DType::F32, {2, 64, 16}))};
  Status status = program->run("main", good, outputs);
  EXPECT_EQ(status.code(), StatusCode::InvalidArgument);
  EXPECT_NE(status.message().find("got cpu"), std::string::npos);
  EXPECT_TRUE(sameBits(run(*program, good), want));
}

TEST_F(GPU, MemoryRunsOut) {
  auto total = static_cast<int64_t>(gpu->properties().memoryBytes);
  EXPECT_EQ(
      Tensor::empty(DType::F32, {total / 4 + 1024}, device).status().code(),
      StatusCode::OutOfMemory);
  ScanProgram p{64, 256, 1, DType::F32, false, /*plain=*/true};
  std::shared_ptr<Executable> program = compile(p.source());
  Tensors small = upload(scanInputs(p, 1, 20));
  Tensors want = run(*program, small);
  // One token, any number of times.
  auto repeated = [&](int64_t length) {
    Tensors inputs = small;
    for (size_t i : {0, 1, 3, 4}) {
      Shape shape = inputs[i].shape(), strides = inputs[i].strides();
      shape[1] = length;
      strides[1] = 0;
      inputs[i] = take(Tensor::view(inputs[i].data(), inputs[i].dtype(), shape,
                                    strides, device, inputs[i].storage()));
    }
    return inputs;
  };
  // The outputs do not fit.
  Tensors outputs;
  Status status =
      program->run("main", repeated(total / (64 * 4) + 1024), outputs);
  EXPECT_EQ(status.code(), StatusCode::OutOfMemory) << status.toString();
  EXPECT_TRUE(sameBits(run(*program, small), want));
  // They do, but not the states of as many chunks.
  ASSERT_OK(program->setChunk("scan", 1));
  int64_t length = total / (64 * 256 * 4) + 1024;
  if (!hasMemory(static_cast<double>(length) * 64 * 4 * 8))
    GTEST_SKIP() << "too little memory";
  outputs.clear();
  status = program->run("main", repeated(length), outputs);
  EXPECT_EQ(status.code(), StatusCode::OutOfMemory) << status.toString();
  ASSERT_OK(program->setChunk("scan", 0));
  EXPECT_TRUE(sameBits(run(*program, small), want));
}

TEST_F(GPU, BadIdsAreReported) {
  std::string source = R"(
func.func @main(%ids: tensor<?x?xi32>, %table: tensor<10x8xf32>) -> tensor<?x?x8xf32> {
  %y = ssm.embedding %ids, %table : tensor<?x?xi32>, tensor<10x8xf32> -> tensor<?x?x8xf32>
  return %y : tensor<?x?x8xf32>
}
)";
  std::shared_ptr<Executable> program = compile(source),
                              reference = compileOn(cpu(), source);
  Tensor table = normal(DType::F32, {10, 8});
  auto ids = [&](int32_t bad) {
    Tensor tensor = make(DType::I32, {3, 100},
                         [&] { return static_cast<double>(random() % 10); });
    tensor.dataAs<int32_t>()[217] = bad;
    return tensor;
  };
  for (int32_t bad : {10, -1, 1 << 30, -(1 << 30), 3}) {
    SCOPED_TRACE(bad);
    Tensors inputs = {ids(bad), table}, want, got;
    Status expected = reference->run("main", inputs, want),
           status = program->run("main", upload(inputs), got);
    EXPECT_EQ(status.code(), expected.code());
    EXPECT_EQ(status.message(), expected.message());
    if (bad == 3) {
      ASSERT_OK(status);
      EXPECT_TRUE(sameBits(download(got), want));
    } else {
      EXPECT_EQ(status.code(), StatusCode::InvalidArgument);
    }
  }
  // On a caller's stream, which is not waited for, a later run tells, once.
  cuda::Stream stream = take(cuda::Stream::create(gpu));
  Tensors bad = upload({ids(12), table}), good = upload({ids(3), table});
  Tensors outputs = take(program->makeOutputs("main", bad));
  ASSERT_OK(program->run("main", bad, outputs, stream.handle()));
  ASSERT_OK(stream.synchronize());
  Status late = program->run("main", good, outputs, stream.handle());
  EXPECT_EQ(late.code(), StatusCode::InvalidArgument);
  EXPECT_NE(late.message().find("an earlier run: expected ids of an embedding "
                                "to be in [0, 10), got 12"),
            std::string::npos)
      << late.message();
  ASSERT_OK(program->run("main", good, outputs, stream.handle()));
  ASSERT_OK(stream.synchronize());
  ASSERT_OK(program->run("main", good, outputs));
}

TEST_F(GPU, BadStartsAreReported) {
  ScanProgram p{16, 4, 1, DType::F32, true};
  std::string conv = R"(
func.func @main(%x: tensor<1x?x16xf32>, %w: tensor<16x4xf32>, %starts: tensor<?xi32>) -> tensor<1x?x16xf32> {
  %y = ssm.causal_conv %x, %w seq_starts(%starts : tensor<?xi32>) : tensor<1x?x16xf32>, tensor<16x4xf32> -> tensor<1x?x16xf32>
  return %y : tensor<1x?x16xf32>
}
)";
  for (const std::string &source : {p.source(), conv}) {
    std::shared_ptr<Executable> program = compile(source),
                                reference = compileOn(cpu(), source);
    for (const std::vector<int> &starts : {std::vector<int>{1, 20},
                                           {-1, 20},
                                           {0, 50, 30},
                                           {0, 71},
                                           {0, -5},
                                           {0, 1 << 30},
                                           {0, 30, 70}}) {
      SCOPED_TRACE(testing::PrintToString(starts));
      Tensors inputs = scanInputs(p, 1, 70, starts);
      if (source == conv)
        inputs = {inputs[0], normal(DType::F32, {16, 4}), inputs.back()};
      Tensors want, got;
      Status expected = reference->run("main", inputs, want),
             status = program->run("main", upload(inputs), got);
      EXPECT_EQ(status.code(), expected.code());
      EXPECT_EQ(status.message(), expected.message());
      if (starts.back() == 70)
        EXPECT_TRUE(isClose(download(got)[0], want[0], 7e-6));
      else
        EXPECT_EQ(status.code(), StatusCode::InvalidArgument);
    }
  }
}

//===----------------------------------------------------------------------===//
// Numbers that are not finite
//===----------------------------------------------------------------------===//

TEST_F(GPU, ScansKeepNaNInItsChannel) {
  for (const ScanProgram &p :
       {ScanProgram{64, 16}, ScanProgram{48, 64}, ScanProgram{33, 5}}) {
    SCOPED_TRACE(p.source());
    std::shared_ptr<Executable> program = compile(p.source());
    int64_t B = 2, L = 200;
    Tensors inputs = scanInputs(p, B, L);
    for (const std::string &variant : variants(p)) {
      ASSERT_OK(program->setVariant("scan", variant));
      for (int64_t chunk : {0, 16, 50}) {
        ASSERT_OK(program->setChunk("scan", chunk));
        Tensor clean = run(*program, upload(inputs))[0];
        for (float bad : {NaN, std::numeric_limits<float>::infinity()})
          for (size_t tensor : {0, 1})
            for (int64_t t : {0, 7, 63, 64, 133, 199})
              for (int64_t d : {0, 1, 17, 32}) {
                SCOPED_TRACE(variant + ", chunk " + std::to_string(chunk) +
                             ", input " + std::to_string(tensor) + ", token " +
                             std::to_string(t) + ", channel " +
                             std::to_string(d) + ", " + std::to_string(bad));
                float &element =
                    inputs[tensor].dataAs<float>()[(L + t) * p.D + d];
                float good = element;
                element = bad;
                Tensor y = run(*program, upload(inputs))[0];
                element = good;
                for (int64_t i = 0; i < y.numElements(); ++i) {
                  bool poisoned =
                      i / (L * p.D) == 1 && i % p.D == d && i / p.D % L >= t;
                  float got = y.dataAs<float>()[i];
                  // An infinite step forgets: what follows may be finite, but
                  // for inf * 0.
                  if (poisoned)
                    ASSERT_FALSE(std::isfinite(got)) << "element " << i;
                  else
                    ASSERT_EQ(got, clean.dataAs<float>()[i]) << "element " << i;
                }
              }
      }
    }
  }
}

TEST_F(GPU, OtherOpsKeepNaNWhereItBelongs) {
  int64_t D = 64, L = 40;
  for (const RowProgram &p : rowPrograms(D, DType::F32)) {
    SCOPED_TRACE(p.name);
    std::string op = p.name;
    std::shared_ptr<Executable> program = compile(p.source);
    Tensors inputs = {normal(DType::F32, {2, L, D})};
    for (const Shape &shape : p.weights)
      inputs.push_back(normal(DType::F32, shape));
    Tensor clean = run(*program, upload(inputs))[0];
    int64_t width = clean.dim(2);
    for (int64_t t : {0, 19, 39})
      for (int64_t d : {0, 5, 63}) {
        float &element = inputs[0].dataAs<float>()[t * D + d], good = element;
        element = NaN;
        Tensor y = run(*program, upload(inputs))[0];
        element = good;
        for (int64_t i = 0; i < y.numElements(); ++i) {
          int64_t row = i / width;
          bool poisoned =
              op == "pointwise" ? row == t && i % width == d
              : op == "causal_conv"
                  ? row >= t && row < std::min(t + 4, L) && i % width == d
                  : row == t;
          ASSERT_EQ(std::isnan(y.dataAs<float>()[i]), poisoned)
              << "element " << i << ", token " << t << ", channel " << d;
          if (!poisoned)
            ASSERT_EQ(y.dataAs<float>()[i], clean.dataAs<float>()[i]);
        }
      }
  }
}

//===----------------------------------------------------------------------===//
// Strides
//===----------------------------------------------------------------------===//

/// Views on the device with the elements of a host tensor, laid out otherwise.
struct Layout {
  const char *name;
  std::function<Tensor(const Tensor &, Device)> make;
};

/// A view into larger memory: `before` elements in front of every axis, every
/// `step`-th element, backwards for a negative one.
Tensor embed(const Tensor &tensor, Device device, int64_t before, int64_t step,
             bool lastOnly) {
  int rank = tensor.rank();
  Shape shape = tensor.shape();
  std::vector<bool> changed(rank);
  for (int i = 0; i < rank; ++i)
    if ((changed[i] = !lastOnly || i + 1 == rank))
      shape[i] = before + shape[i] * std::abs(step);
  Tensor view = take(Tensor::empty(tensor.dtype(), shape, device, true));
  for (int i = 0; i < rank; ++i)
    if (changed[i])
      view = step > 0 ? take(view.slice(i, before, shape[i], step))
                      : take(view.slice(i, shape[i] - 1, before - 1, step));
  EXPECT_EQ(view.shape(), tensor.shape());
  EXPECT_OK(view.copyFrom(tensor));
  return view;
}

const Layout kLayouts[] = {
    {"rows beside others",
     [](const Tensor &t, Device d) { return embed(t, d, 8, 1, true); }},
    {"any offset",
     [](const Tensor &t, Device d) { return embed(t, d, 1, 1, false); }},
    {"every other element",
     [](const Tensor &t, Device d) { return embed(t, d, 2, 2, true); }},
    {"every third of all axes",
     [](const Tensor &t, Device d) { return embed(t, d, 3, 3, false); }},
    {"backwards",
     [](const Tensor &t, Device d) { return embed(t, d, 1, -1, false); }},
    {"every other, backwards",
     [](const Tensor &t, Device d) { return embed(t, d, 0, -2, false); }},
    {"axes exchanged", [](const Tensor &t, Device d) {
       if (t.rank() < 2)
         return take(t.to(d));
       Tensor other = take(t.transpose(0, t.rank() - 1));
       return take(take(other.to(d)).transpose(0, t.rank() - 1));
     }}};

TEST_F(GPU, StridesDoNotMatter) {
  ScanProgram p{64, 16, 2}, odd{33, 5, 1, DType::BF16},
      packed{16, 4, 1, DType::F32, true};
  std::vector<std::pair<std::string, Tensors>> programs = {
      {p.source(), scanInputs(p, 3, 70)},
      {odd.source(), scanInputs(odd, 2, 70)},
      {packed.source(), scanInputs(packed, 1, 70, {0, 3, 50})},
      {SSDProgram{3, 20, 17}.source(), ssdInputs({3, 20, 17}, 2, 70)},
      {blockSource(), blockInputs(2, 30)}};
  for (DType type : {DType::F32, DType::F16})
    for (const RowProgram &row : rowPrograms(96, type)) {
      Tensors inputs = {normal(type, {3, 21, 96})};
      for (const Shape &shape : row.weights)
        inputs.push_back(normal(type, shape));
      programs.emplace_back(row.source, inputs);
    }
  for (auto &[source, inputs] : programs) {
    SCOPED_TRACE(source);
    std::shared_ptr<Executable> program = compile(source);
    Tensors want = run(*program, upload(inputs));
    for (const Layout &layout : kLayouts) {
      SCOPED_TRACE(layout.name);
      Tensors given, outputs;
      for (const Tensor &tensor : inputs)
        given.push_back(layout.make(tensor, device));
      EXPECT_TRUE(sameBits(run(*program, given), want));
      for (const Tensor &tensor : want)
        outputs.push_back(layout.make(
            take(Tensor::empty(tensor.dtype(), tensor.shape(), true)), device));
      ASSERT_OK(program->run("main", given, outputs));
      EXPECT_TRUE(sameBits(download(outputs), want));
    }
  }
}

// Of every size of an element: whole and ragged tiles, runs of every alignment,
// what is repeated or runs backwards, and more axes than a kernel takes.
TEST_F(GPU, StridedCopiesAgreeWithLoops) {
  auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  constexpr int64_t kLargest[] = {1, 70000, 400, 70, 20, 9, 5};
  for (int round = 0; round < 150; ++round) {
    size_t rank = pick(1, 6), bytes = size_t(1) << pick(0, 3);
    Shape sizes(rank), to(rank), from(rank);
    for (int64_t &size : sizes)
      size = pick(1, kLargest[rank]);
    auto makeStrides = [&](Shape &strides, bool repeats, int64_t &end) {
      std::vector<size_t> order(rank);
      for (size_t i = 0; i < rank; ++i)
        order[i] = i;
      std::shuffle(order.begin(), order.end(), random);
      int64_t step = pick(0, 2) ? 1 : pick(1, 3), offset = 0;
      for (size_t axis : order) {
        strides[axis] = pick(0, 7) == 0 ? -step : step;
        if (repeats && pick(0, 9) == 0)
          strides[axis] = 0;
        if (strides[axis] < 0)
          offset += step * (sizes[axis] - 1);
        step = step * sizes[axis] + (pick(0, 2) ? 0 : pick(1, 9));
      }
      end = step;
      return offset + pick(0, 1);
    };
    int64_t toEnd = 0, fromEnd = 0;
    int64_t toOffset = makeStrides(to, false, toEnd);
    int64_t fromOffset = makeStrides(from, true, fromEnd);
    std::vector<char> source((fromEnd + 16) * bytes),
        target((toEnd + 16) * bytes);
    for (char &byte : source)
      byte = static_cast<char>(pick(0, 255));
    std::vector<char> got = target;
    auto *a = static_cast<char *>(take(gpu->allocate(source.size()))),
         *b = static_cast<char *>(take(gpu->allocate(target.size())));
    EXPECT_OK(gpu->copyToDevice(a, source.data(), source.size(), nullptr));
    EXPECT_OK(gpu->memset(b, 0, target.size(), nullptr));
    EXPECT_OK(gpu->copyStrided(b + toOffset * bytes, to.data(),
                               a + fromOffset * bytes, from.data(),
                               sizes.data(), rank, bytes, nullptr));
    EXPECT_OK(gpu->copyToHost(got.data(), b, got.size(), nullptr));
    EXPECT_OK(gpu->synchronize());
    gpu->deallocate(a);
    gpu->deallocate(b);
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
    ASSERT_TRUE(got == target) << "round " << round;
  }
}

// Pinned memory of the host is written by the kernel.
TEST_F(GPU, StridedCopiesReachTheHost) {
  constexpr int64_t kRows = 300, kColumns = 70;
  std::vector<float> values(kRows * kColumns);
  for (float &value : values)
    value = static_cast<float>(random() % 1000);
  auto *a = static_cast<float *>(take(gpu->allocate(values.size() * 4)));
  cuda::PinnedBuffer pinned =
      take(cuda::PinnedBuffer::allocate(gpu, values.size() * 4));
  EXPECT_OK(gpu->copyToDevice(a, values.data(), values.size() * 4, nullptr));
  int64_t sizes[] = {kColumns, kRows}, to[] = {kRows, 1},
          from[] = {1, kColumns};
  EXPECT_OK(gpu->copyStrided(pinned.data(), to, a, from, sizes, 2, 4, nullptr,
                             /*toHost=*/true));
  EXPECT_OK(gpu->synchronize());
  gpu->deallocate(a);
  for (int64_t i = 0; i < kRows; ++i)
    for (int64_t j = 0; j < kColumns; ++j)
      ASSERT_EQ(static_cast<float *>(pinned.data())[j * kRows + i],
                values[i * kColumns + j]);
}

//===----------------------------------------------------------------------===//
// Sizes
//===----------------------------------------------------------------------===//

TEST_F(GPU, ShortLengths) {
  ScanProgram p{64, 16};
  std::shared_ptr<Executable> program = compile(p.source());
  for (auto [B, L] : {std::pair<int64_t, int64_t>{0, 0},
                      {0, 5},
                      {3, 0},
                      {1, 1},
                      {3, 1},
                      {2, 2}})
    for (const std::string &variant : variants(p))
      for (int64_t chunk : {0, 1}) {
        SCOPED_TRACE(variant + ", batch " + std::to_string(B) + ", length " +
                     std::to_string(L) + ", chunk " + std::to_string(chunk));
        ASSERT_OK(program->setVariant("scan", variant));
        ASSERT_OK(program->setChunk("scan", chunk));
        Tensors inputs = scanInputs(p, B, L);
        Tensors got = run(*program, upload(inputs));
        Tensors want = runOnCPU(p.source(), inputs);
        EXPECT_TRUE(isClose(got[0], want[0], 7e-6));
        EXPECT_TRUE(isClose(got[1], want[1], 7e-6));
        if (L == 0)
          EXPECT_TRUE(sameBits(got[1], inputs[8]));
      }
  for (const RowProgram &row : rowPrograms(64, DType::F32)) {
    SCOPED_TRACE(row.source);
    std::shared_ptr<Executable> program = compile(row.source);
    for (auto [B, L] :
         {std::pair<int64_t, int64_t>{0, 0}, {0, 5}, {3, 0}, {1, 1}, {5, 1}}) {
      Tensors inputs = {normal(DType::F32, {B, L, 64})};
      for (const Shape &shape : row.weights)
        inputs.push_back(normal(DType::F32, shape));
      EXPECT_TRUE(isClose(run(*program, upload(inputs))[0],
                          runOnCPU(row.source, inputs)[0], 7e-6));
    }
  }
}

// An axis of a grid takes 65535 blocks.
TEST_F(GPU, LargeBatches) {
  int64_t B = 70001, L = 3;
  for (const ScanProgram &p :
       {ScanProgram{8, 4}, ScanProgram{5, 3, 1, DType::BF16}}) {
    SCOPED_TRACE(p.source());
    std::shared_ptr<Executable> program = compile(p.source());
    Tensors inputs = scanInputs(p, B, L), given = upload(inputs);
    Tensors want = runOnCPU(p.source(), inputs);
    double bound = p.type == DType::F32 ? 7e-6 : 6e-3;
    for (const std::string &variant : variants(p))
      for (int64_t chunk : {0, 1}) {
        SCOPED_TRACE(variant + ", chunk " + std::to_string(chunk));
        ASSERT_OK(program->setVariant("scan", variant));
        ASSERT_OK(program->setChunk("scan", chunk));
        Tensors got = run(*program, given);
        EXPECT_TRUE(isClose(got[0], want[0], bound));
        EXPECT_TRUE(isClose(got[1], want[1], 7e-6));
      }
  }
  {
    SSDProgram p{2, 4, 3};
    SCOPED_TRACE(p.source());
    std::shared_ptr<Executable> program = compile(p.source());
    Tensors inputs = ssdInputs(p, B, L), given = upload(inputs);
    Tensors want = runOnCPU(p.source(), inputs);
    for (int64_t chunk : {0, 1}) {
      ASSERT_OK(program->setChunk("scan", chunk));
      Tensors got = run(*program, given);
      EXPECT_TRUE(isClose(got[0], want[0], 7e-6));
      EXPECT_TRUE(isClose(got[1], want[1], 7e-6));
    }
  }
  for (const RowProgram &row : rowPrograms(8, DType::F32)) {
    SCOPED_TRACE(row.source);
    std::shared_ptr<Executable> program = compile(row.source);
    Tensors inputs = {normal(DType::F32, {B, L, 8})};
    for (const Shape &shape : row.weights)
      inputs.push_back(normal(DType::F32, shape));
    EXPECT_TRUE(isClose(run(*program, upload(inputs))[0],
                        runOnCPU(row.source, inputs)[0], 7e-6));
  }
}

// A tensor of zeros with something at its end, of more than 2^31 elements:
// the result at the end is that of the end alone.
TEST_F(GPU, OffsetsBeyond32Bits) {
  constexpr int64_t D = 2048, Tail = 8;
  DType type = DType::BF16;
  double bytes = 2.0 * D * ((1 << 20) + 1024);
  if (!hasMemory(2 * bytes))
    GTEST_SKIP() << "too little memory";
  for (const RowProgram &row : rowPrograms(D, type)) {
    std::shared_ptr<Executable> program = compile(row.source);
    Tensors weights;
    for (const Shape &shape : row.weights)
      weights.push_back(take(normal(type, shape).to(device)));
    // Long, and of many.
    for (auto [B, L] : {std::pair<int64_t, int64_t>{1, (1 << 20) + 16},
                        {(1 << 16) + 1, 16}}) {
      SCOPED_TRACE(std::string(row.name) + ", batch " + std::to_string(B));
      // Tokens that a convolution looks back on are zero in both.
      Tensor small = take(Tensor::empty(type, {1, Tail + 4, D}, true));
      EXPECT_OK(take(small.slice(1, 4, Tail + 4))
                    .copyFrom(normal(type, {1, Tail, D})));
      Tensor x = take(Tensor::empty(type, {B, L, D}, device, true));
      EXPECT_OK(take(take(x.slice(0, B - 1, B)).slice(1, L - Tail - 4, L))
                    .copyFrom(small));
      Tensors big = {x}, few = {take(small.to(device))}, outputs;
      big.insert(big.end(), weights.begin(), weights.end());
      few.insert(few.end(), weights.begin(), weights.end());
      ASSERT_OK(program->run("main", big, outputs));
      Tensor end =
          take(take(outputs[0].slice(0, B - 1, B)).slice(1, L - Tail - 4, L));
      Tensor want = run(*program, few)[0];
      EXPECT_TRUE(isClose(take(end.to(Device::cpu())), want, 4e-3));
      // What comes before is zero.
      for (int64_t row : {int64_t(0), B * L / 2, B * L - Tail - 5}) {
        Tensor zero = take(take(take(outputs[0].slice(0, row / L, row / L + 1))
                                    .slice(1, row % L, row % L + 1))
                               .to(Device::cpu()));
        EXPECT_TRUE(
            isClose(zero, take(Tensor::empty(type, zero.shape(), true)), 0))
            << "token " << row;
      }
    }
  }
}

TEST_F(GPU, ScansBeyond32Bits) {
  ScanProgram p{2048, 2, 1, DType::BF16, false, /*plain=*/true};
  constexpr int64_t Tail = 40;
  double bytes = 2.0 * p.D * ((1 << 20) + 1024);
  if (!hasMemory(3.5 * bytes))
    GTEST_SKIP() << "too little memory";
  std::shared_ptr<Executable> program = compile(p.source());
  for (auto [B, L] :
       {std::pair<int64_t, int64_t>{1, (1 << 20) + 64}, {(1 << 14) + 1, 64}}) {
    Tensors small = upload(scanInputs(p, 1, Tail)), big = small;
    for (size_t i : {0, 1, 3, 4}) {
      Shape shape = small[i].shape();
      shape[0] = B;
      shape[1] = L;
      big[i] = take(Tensor::empty(p.type, shape, device, true));
      EXPECT_OK(take(take(big[i].slice(0, B - 1, B)).slice(1, L - Tail, L))
                    .copyFrom(small[i]));
    }
    ASSERT_OK(program->setVariant("scan", ""));
    ASSERT_OK(program->setChunk("scan", 0));
    Tensors want = run(*program, small);
    for (const std::string &variant : variants(p))
      for (int64_t chunk : {0, 4096}) {
        // Only the kernels in chunks have them, whatever the variant.
        if (chunk && (variant != "warp" || chunk >= L))
          continue;
        SCOPED_TRACE(variant + ", batch " + std::to_string(B) + ", chunk " +
                     std::to_string(chunk));
        ASSERT_OK(program->setVariant("scan", variant));
        ASSERT_OK(program->setChunk("scan", chunk));
        Tensors outputs;
        ASSERT_OK(program->run("main", big, outputs));
        Tensor end =
            take(take(outputs[0].slice(0, B - 1, B)).slice(1, L - Tail, L));
        EXPECT_TRUE(isClose(take(end.to(Device::cpu())), want[0], 4e-3));
        Tensor state =
            take(take(outputs[1].slice(0, B - 1, B)).to(Device::cpu()));
        EXPECT_TRUE(isClose(state, want[1], 7e-6));
        Tensor before = take(take(take(outputs[0].slice(0, B - 1, B))
                                      .slice(1, L - Tail - 1, L - Tail))
                                 .to(Device::cpu()));
        EXPECT_TRUE(isClose(
            before, take(Tensor::empty(p.type, before.shape(), true)), 0));
      }
  }
}

TEST_F(GPU, SSDBeyond32Bits) {
  SSDProgram p{32, 64, 16, DType::BF16, /*softplus=*/false};
  constexpr int64_t Tail = 40;
  double bytes = 2.0 * p.H * p.P * ((1 << 20) + 1024);
  if (!hasMemory(3 * bytes))
    GTEST_SKIP() << "too little memory";
  std::shared_ptr<Executable> program = compile(p.source());
  for (auto [B, L] :
       {std::pair<int64_t, int64_t>{1, (1 << 20) + 64}, {(1 << 12) + 1, 256}}) {
    Tensors small = upload(ssdInputs(p, 1, Tail)), big = small;
    for (size_t i : {0, 1, 3, 4, 5}) {
      Shape shape = small[i].shape();
      shape[0] = B;
      shape[1] = i == 5 ? shape[1] : L;
      big[i] = take(Tensor::empty(small[i].dtype(), shape, device, true));
      Tensor end = take(big[i].slice(0, B - 1, B));
      if (i != 5)
        end = take(end.slice(1, L - Tail, L));
      EXPECT_OK(end.copyFrom(small[i]));
    }
    ASSERT_OK(program->setChunk("scan", 0));
    Tensors want = run(*program, small);
    for (int64_t chunk : {0, 4096}) {
      if (chunk >= L)
        continue;
      SCOPED_TRACE("batch " + std::to_string(B) + ", chunk " +
                   std::to_string(chunk));
      ASSERT_OK(program->setChunk("scan", chunk));
      Tensors outputs;
      ASSERT_OK(program->run("main", big, outputs));
      Tensor end =
          take(take(outputs[0].slice(0, B - 1, B)).slice(1, L - Tail, L));
      EXPECT_TRUE(isClose(take(end.to(Device::cpu())), want[0], 4e-3));
      Tensor state =
          take(take(outputs[1].slice(0, B - 1, B)).to(Device::cpu()));
      EXPECT_TRUE(isClose(state, want[1], 7e-6));
    }
  }
}

} // namespace
