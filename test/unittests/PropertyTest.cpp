//===- PropertyTest.cpp - Random programs against the reference -----------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// Every draw builds a program of one op with random types, sizes, operands and
// attributes, compiles it once and runs it for several batches, lengths, chunks
// and thread counts, on tensors of random strides. Results are compared with
// the reference, which gets the same rounded inputs.
//
//   COREY_TEST_SEED   seed of the first draw; draw i of a test uses seed + i,
//                     so that a failure is repeated with its own seed and one
//                     draw.
//   COREY_TEST_DRAWS  draws per test, in place of each test's own number.
//   COREY_TEST_DEVICE the device, "cpu" unless set. On "cuda" there are more
//                     draws and calls, larger ones, and one call of every
//                     program is compared with what the CPU computes.
//
//===----------------------------------------------------------------------===//

#include "../reference/Reference.h"

#include "corey/Executable.h"

#include "gtest/gtest.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <random>
#include <set>

using namespace corey;
using reference::Array;

namespace {
using Shape = std::vector<int64_t>;

constexpr double Inf = std::numeric_limits<double>::infinity();
constexpr double NaN = std::numeric_limits<double>::quiet_NaN();
/// A dimension that is only known at run time.
constexpr int64_t Free = -1;

//===----------------------------------------------------------------------===//
// Randomness
//===----------------------------------------------------------------------===//

uint64_t firstSeed() {
  static const uint64_t seed = [] {
    const char *text = std::getenv("COREY_TEST_SEED");
    uint64_t value = text ? std::strtoull(text, nullptr, 10) : 20240229;
    std::printf("COREY_TEST_SEED=%llu\n",
                static_cast<unsigned long long>(value));
    return value;
  }();
  return seed;
}

/// Where programs run.
Device device() {
  static const Device parsed = [] {
    const char *text = std::getenv("COREY_TEST_DEVICE");
    Expected<Device> named = Device::parse(text ? text : "cpu");
    if (!named) {
      std::fprintf(stderr, "COREY_TEST_DEVICE: %s\n",
                   named.status().message().c_str());
      std::exit(1);
    }
    return *named;
  }();
  return parsed;
}
bool onGPU() { return device().kind == Device::CUDA; }

int64_t draws(int64_t usual) {
  const char *text = std::getenv("COREY_TEST_DRAWS");
  return text ? std::strtoll(text, nullptr, 10) : onGPU() ? 2 * usual : usual;
}

class Random {
public:
  explicit Random(uint64_t seed) : engine(seed) {}
  /// Uniform in [low, high].
  int64_t integer(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(engine() %
                                      static_cast<uint64_t>(high - low + 1));
  }
  bool chance(double probability) { return uniform(0, 1) < probability; }
  double uniform(double low, double high) {
    return low + (high - low) * static_cast<double>(engine() >> 11) * 0x1p-53;
  }
  double normal() {
    return std::sqrt(-2 * std::log(1 - uniform(0, 1))) *
           std::cos(6.283185307179586 * uniform(0, 1));
  }
  template <typename T> T pick(std::initializer_list<T> list) {
    return list.begin()[integer(0, static_cast<int64_t>(list.size()) - 1)];
  }

private:
  std::mt19937_64 engine;
};

using Generator = std::function<double()>;

DType anyFloat(Random &random) {
  return random.chance(0.5) ? DType::F32
                            : random.pick({DType::F16, DType::BF16});
}

int64_t anyBatch(Random &random) {
  return random.chance(0.1) ? 0 : random.integer(1, onGPU() ? 6 : 3);
}

int64_t anyLength(Random &random) {
  double kind = random.uniform(0, 1);
  if (kind < 0.4)
    return random.integer(0, 8);
  if (onGPU() && kind < 0.55)
    return random.integer(500, 4200);
  return kind < 0.92 ? random.integer(1, 200) : random.integer(550, 650);
}

/// Starts of up to six sequences, some of them empty, over `length` tokens.
std::vector<int64_t> anyStarts(Random &random, int64_t length) {
  std::vector<int64_t> starts(random.integer(1, 6));
  for (int64_t &start : starts)
    start = random.chance(0.2) ? random.pick<int64_t>({0, length})
                               : random.integer(0, length);
  std::sort(starts.begin(), starts.end());
  starts[0] = 0;
  return starts;
}

int64_t anyDivisor(Random &random, int64_t value, int64_t limit) {
  std::vector<int64_t> list;
  for (int64_t i = 1; i <= std::min(value, limit); ++i)
    if (value % i == 0)
      list.push_back(i);
  return list[random.integer(0, static_cast<int64_t>(list.size()) - 1)];
}

//===----------------------------------------------------------------------===//
// Tensors
//===----------------------------------------------------------------------===//

template <class T> T take(Expected<T> value) {
  if (!value) {
    ADD_FAILURE() << value.status().toString();
    std::abort();
  }
  return *std::move(value);
}

Array toArray(const Tensor &tensor) {
  Array array(tensor.shape());
  Tensor wide = take(tensor.to(DType::F64));
  std::copy_n(wide.dataAs<double>(), array.size(), array.data.begin());
  return array;
}

/// Memory around a tensor, filled with a pattern that is NaN in every
/// floating-point type, and the tensor as a view of it.
struct Region {
  static constexpr int Pattern = 0xff;
  Tensor memory, view;

  /// The same region in the memory of the device.
  Region onDevice() const {
    Region copy;
    copy.memory = take(memory.to(device()));
    int64_t offset =
        static_cast<char *>(view.data()) - static_cast<char *>(memory.data());
    copy.view = take(Tensor::view(
        static_cast<char *>(copy.memory.data()) + offset, view.dtype(),
        view.shape(), view.strides(), device(), copy.memory.storage()));
    return copy;
  }

  /// Whether nothing beside the view was written to.
  bool isIntact() const {
    Tensor fresh = take(memory.to(memory.dtype()));
    std::memset(fresh.data(), Pattern, fresh.numBytes());
    int64_t offset =
        static_cast<char *>(view.data()) - static_cast<char *>(memory.data());
    Tensor same =
        take(Tensor::view(static_cast<char *>(fresh.data()) + offset,
                          view.dtype(), view.shape(), view.strides()));
    EXPECT_TRUE(same.copyFrom(view).isOk());
    return !std::memcmp(fresh.data(), memory.data(), memory.numBytes());
  }
};

/// A tensor with random strides. `broadcast` allows strides of 0.
Region anyRegion(Random &random, DType type, const Shape &shape, bool plain,
                 bool broadcast) {
  size_t rank = shape.size();
  std::vector<int> order(rank);
  for (size_t i = 0; i < rank; ++i)
    order[i] = static_cast<int>(i);
  Shape extent = shape, start(rank, 0), step(rank, 1);
  std::vector<bool> repeated(rank, false);
  if (!plain) {
    if (random.chance(0.4))
      for (size_t i = rank; i > 1; --i)
        std::swap(order[i - 1],
                  order[random.integer(0, static_cast<int64_t>(i) - 1)]);
    bool sliced = random.chance(0.5), reversed = random.chance(0.25);
    for (size_t i = 0; i < rank; ++i) {
      if (broadcast && random.chance(0.08)) {
        repeated[i] = true;
        extent[i] = 1;
        continue;
      }
      if (sliced && random.chance(0.5)) {
        step[i] = random.chance(0.3) ? 2 : 1;
        start[i] = random.integer(0, 3);
        extent[i] = start[i] + shape[i] * step[i] + random.integer(0, 3);
      }
      if (reversed && random.chance(0.5))
        step[i] = -step[i];
    }
  }
  // Any alignment that the element type allows.
  constexpr int64_t Guard = 16;
  int64_t lead = Guard + (random.chance(0.5) ? random.integer(0, 7) : 0);
  int64_t count = 1;
  for (int64_t size : extent)
    count *= size;
  Region region;
  region.memory = take(Tensor::empty(type, {lead + count + Guard}));
  std::memset(region.memory.data(), Region::Pattern, region.memory.numBytes());
  // Strides of the extents, laid out in the order of the permutation.
  Shape strides(rank);
  int64_t running = 1;
  for (size_t i = rank; i-- > 0;) {
    strides[order[i]] = running;
    running *= std::max<int64_t>(extent[order[i]], 1);
  }
  int64_t offset = lead;
  for (size_t i = 0; i < rank; ++i) {
    if (repeated[i]) {
      strides[i] = 0;
      continue;
    }
    if (shape[i] > 0)
      offset += (step[i] > 0 ? start[i] : start[i] - (shape[i] - 1) * step[i]) *
                strides[i];
    strides[i] *= step[i];
  }
  region.view = take(
      Tensor::view(static_cast<char *>(region.memory.data()) +
                       offset * static_cast<int64_t>(dtypeSize(type)),
                   type, shape, strides, Device(), region.memory.storage()));
  return region;
}

/// Fills a tensor, which may repeat elements.
void fill(const Tensor &tensor, const Generator &generator) {
  Tensor distinct = tensor;
  for (int dim = 0; dim < tensor.rank(); ++dim)
    if (tensor.stride(dim) == 0 && tensor.dim(dim) > 1)
      distinct = take(distinct.slice(dim, 0, 1));
  Tensor values = take(Tensor::empty(tensor.dtype(), distinct.shape()));
  size_t size = dtypeSize(tensor.dtype());
  for (int64_t i = 0; i < values.numElements(); ++i)
    storeScalar(tensor.dtype(), static_cast<char *>(values.data()) + i * size,
                generator());
  ASSERT_TRUE(distinct.copyFrom(values).isOk());
}

//===----------------------------------------------------------------------===//
// Programs
//===----------------------------------------------------------------------===//

std::string typeText(DType type, const Shape &shape) {
  std::string text = "tensor<";
  for (int64_t size : shape)
    text += (size == Free ? "?" : std::to_string(size)) + "x";
  return text + dtypeName(type) + ">";
}

/// The text of a function of one op.
class Program {
public:
  /// With `random` some arguments and results say that they take any strides.
  explicit Program(std::string mnemonic, Random *random = nullptr)
      : mnemonic(std::move(mnemonic)), random(random) {}

  /// An operand. `keyword` is what names it, "" if nothing does; its type is in
  /// the list at the end or beside the operand.
  void operand(const std::string &name, DType type, const Shape &shape,
               const std::string &keyword = "", bool typeAtEnd = true) {
    std::string text = typeText(type, shape);
    arguments +=
        (arguments.empty() ? "%" : ", %") + name + ": " + text + anyMark();
    if (keyword.empty())
      operands += (operands.empty() ? "%" : ", %") + name;
    else
      operands +=
          " " + keyword + "(%" + name + (typeAtEnd ? ")" : " : " + text + ")");
    if (typeAtEnd)
      types += (types.empty() ? "" : ", ") + text;
    inputTypes.push_back(type);
  }
  void optional(const std::string &name, DType type, const Shape &shape) {
    operand(name, type, shape, name, false);
  }
  void result(DType type, const Shape &shape) {
    std::string name = "%r" + std::to_string(outputTypes.size());
    results += (results.empty() ? "" : ", ") + name;
    resultTypes += (resultTypes.empty() ? "" : ", ") + typeText(type, shape);
    outputs +=
        (outputs.empty() ? "" : ", ") + typeText(type, shape) + anyMark();
    outputTypes.push_back(type);
  }
  void attribute(const std::string &text) {
    attributes += (attributes.empty() ? "" : ", ") + text;
  }

  std::string module() const {
    return "func.func @main(" + arguments + ") -> (" + outputs + ") {\n" +
           before + "  " + results + " = ssm." + mnemonic + " " + operands +
           (attributes.empty() ? "" : " {" + attributes + "}") + trailer() +
           "\n  return " + results + " : " + resultTypes + "\n}\n";
  }

  std::vector<DType> inputTypes, outputTypes;
  /// Ops before the op, and text after the operands.
  std::string before, operands;
  /// The types at the end end with those of the results.
  bool showResults = true;
  std::string separator = " -> ";

private:
  std::string trailer() const {
    return " : " + types + (showResults ? separator + resultTypes : "");
  }
  const char *anyMark() const {
    return random && random->chance(0.2) ? " {ssm.any_strides}" : "";
  }
  std::string mnemonic, arguments, types, results, resultTypes, outputs,
      attributes;
  Random *random;
};

//===----------------------------------------------------------------------===//
// Comparison
//===----------------------------------------------------------------------===//

/// The largest relative error of every op and type, printed at the end.
std::map<std::string, double> &worstErrors() {
  static std::map<std::string, double> errors;
  return errors;
}

class PrintErrors : public testing::Environment {
  void TearDown() override {
    for (auto &[what, error] : worstErrors())
      std::printf("largest relative error of %s: %.3g\n", what.c_str(), error);
  }
};
[[maybe_unused]] testing::Environment *const printErrors =
    testing::AddGlobalTestEnvironment(new PrintErrors);

double tolerance(DType type) {
  switch (type) {
  case DType::F16:
    return onGPU() ? 5e-4 : 1e-3;
  case DType::BF16:
    return onGPU() ? 4e-3 : 6e-3;
  default:
    return onGPU() ? 5e-6 : 2e-6;
  }
}

/// What is lost per element where numbers become denormal.
double absoluteError(DType type) {
  return type == DType::F16 ? 0x1p-25 : 1e-35;
}

/// Compares in the l2 norm, relative to the wanted values; what is not finite
/// must agree element by element. A few elements may cancel by chance, so that
/// those of a small tensor are also measured by the terms they are sums of.
/// `slack` multiplies the tolerance of the type.
testing::AssertionResult isClose(const std::string &what, const Tensor &tensor,
                                 const Array &want, double slack = 1) {
  Array got = toArray(tensor);
  DType type = tensor.dtype();
  if (got.shape != want.shape)
    return testing::AssertionFailure() << what << ": shapes differ";
  double difference = 0, norm = 0, terms = 0, worst = -1;
  int64_t at = -1;
  for (int64_t i = 0; i < got.size(); ++i) {
    char rounded[8];
    storeScalar(type, rounded, want.data[i]);
    double expected = loadScalar(type, rounded);
    if (!std::isfinite(expected) || !std::isfinite(got.data[i])) {
      bool same = std::isnan(expected) ? std::isnan(got.data[i])
                                       : expected == got.data[i];
      if (!same)
        return testing::AssertionFailure()
               << what << ": element " << i << " of " << tensor.describe()
               << ": expected " << expected << ", got " << got.data[i];
      continue;
    }
    double error = got.data[i] - want.data[i];
    if (std::abs(error) > worst) {
      worst = std::abs(error);
      at = i;
    }
    difference += error * error;
    norm += want.data[i] * want.data[i];
    double term = want.magnitude.empty() ? want.data[i] : want.magnitude[i];
    terms += term * term;
  }
  difference = std::sqrt(difference);
  norm = std::sqrt(norm);
  if (got.size() < 64)
    norm = std::max(norm, std::sqrt(terms) / 16);
  double bound = tolerance(type) * slack;
  double absolute =
      absoluteError(type) * std::sqrt(static_cast<double>(got.size()));
  double relative =
      std::max(difference - absolute, 0.0) / std::max(norm, 1e-300);
  double &largest = worstErrors()[what + " " + dtypeName(type)];
  largest = std::max(largest, relative);
  if (relative <= bound)
    return testing::AssertionSuccess();
  return testing::AssertionFailure()
         << what << ": relative error " << relative << " beyond " << bound
         << " in " << tensor.describe() << "; the worst element is " << at
         << ": expected " << want.data[at] << ", got " << got.data[at];
}

//===----------------------------------------------------------------------===//
// Running
//===----------------------------------------------------------------------===//

Context &contextOf(Device where) {
  auto create = [](Device device) {
    ContextOptions options;
    options.device = device.name();
    Expected<std::shared_ptr<Context>> context = Context::create(options);
    if (!context) {
      std::fprintf(stderr, "%s%s\n",
                   device.kind == Device::CUDA ? "no CUDA device: " : "",
                   context.status().message().c_str());
      std::exit(1);
    }
    return *context;
  };
  static std::shared_ptr<Context> here = create(device());
  if (where == device())
    return *here;
  static std::shared_ptr<Context> host = create(Device::cpu());
  return *host;
}
Context &context() { return contextOf(device()); }

/// Sources of programs that are still to be compared with the CPU.
std::map<const Executable *, std::string> &uncompared() {
  static std::map<const Executable *, std::string> sources;
  return sources;
}

std::shared_ptr<Executable> compile(const std::string &source,
                                    int vectorBits = 256) {
  CompileOptions options;
  options.vectorBits = onGPU() ? 0 : vectorBits;
  Expected<std::shared_ptr<Executable>> executable =
      context().compile(source, options);
  if (!executable) {
    ADD_FAILURE() << executable.status().toString() << "\n" << source;
    return nullptr;
  }
  if (onGPU())
    uncompared()[executable->get()] = source;
  return *executable;
}

/// Whether programs with an ssd can be compiled for the device.
bool hasSSD() {
  static const bool has = [] {
    Expected<std::string> text = context().emit(
        "func.func @main(%x: tensor<?x?x2x8xf32>, %d: tensor<?x?x2xf32>, "
        "%B: tensor<?x?x1x8xf32>) -> tensor<?x?x2x8xf32> {\n"
        "  %y = ssm.ssd %x decay(%d : tensor<?x?x2xf32>) B(%B) C(%B) : "
        "tensor<?x?x2x8xf32>, tensor<?x?x1x8xf32>, tensor<?x?x1x8xf32> -> "
        "tensor<?x?x2x8xf32>\n  return %y : tensor<?x?x2x8xf32>\n}\n",
        "lowered");
    return text ||
           text.status().message().find("GPU lowering") == std::string::npos;
  }();
  return has;
}
#define SKIP_WITHOUT_SSD()                                                     \
  if (!hasSSD())                                                               \
  GTEST_SKIP() << "ssm.ssd has no GPU lowering"

int anyVectorBits(Random &random) {
  return __builtin_cpu_supports("avx512f") && random.chance(0.7) ? 512 : 256;
}

/// A program with the inputs and outputs of one call.
class Trial {
public:
  Trial(Random &random, const Program &program)
      : random(random), program(program) {
    plain = random.chance(0.3);
  }

  /// The next input, drawn from `generator`.
  const Array *input(const Shape &shape, const Generator &generator) {
    DType type = program.inputTypes[inputs.size()];
    regions.push_back(
        anyRegion(random, type, shape, plain, /*broadcast=*/true));
    fill(regions.back().view, generator);
    inputs.push_back(regions.back().view);
    arrays.push_back(std::make_unique<Array>(toArray(regions.back().view)));
    return arrays.back().get();
  }
  const Array *input(const Shape &shape, const std::vector<int64_t> &values) {
    size_t next = 0;
    DType type = program.inputTypes[inputs.size()];
    regions.push_back(
        anyRegion(random, type, shape, plain, /*broadcast=*/false));
    fill(regions.back().view,
         [&] { return static_cast<double>(values[next++]); });
    inputs.push_back(regions.back().view);
    return nullptr;
  }

  bool run(Executable &executable, const std::vector<Shape> &shapes) {
    Status status =
        context().setThreads(static_cast<int>(random.integer(1, 2)));
    EXPECT_TRUE(status.isOk());
    std::vector<Region> targets;
    // Results go to contiguous tensors, strided ones, or new ones.
    bool given = random.chance(0.8), contiguous = random.chance(0.5);
    for (size_t i = 0; given && i < shapes.size(); ++i) {
      targets.push_back(anyRegion(random, program.outputTypes[i], shapes[i],
                                  contiguous, false));
      outputs.push_back(targets.back().view);
    }
    status = onGPU() ? runOnDevice(executable, targets)
                     : executable.run("main", inputs, outputs);
    if (!status) {
      ADD_FAILURE() << status.toString();
      return false;
    }
    for (const Region &region : targets)
      EXPECT_TRUE(region.isIntact())
          << "memory beside an output was written to";
    for (size_t i = 0; i < shapes.size(); ++i)
      EXPECT_EQ(outputs[i].shape(), shapes[i]);
    if (uncompared().count(&executable))
      compareWithCPU(executable);
    return true;
  }

  /// The call in words.
  std::string describe() const {
    std::string text;
    for (const Tensor &tensor : inputs)
      text += "  in  " + tensor.describe() + "\n";
    for (const Tensor &tensor : outputs)
      text += "  out " + tensor.describe() + "\n";
    return text + "  threads " + std::to_string(context().getThreads()) + "\n";
  }

  std::vector<Tensor> inputs, outputs;
  /// Multiplies the tolerance of the comparison with the CPU.
  double slack = 1;

private:
  /// The same with every region copied to the device, and back: what lies
  /// beside the outputs too.
  Status runOnDevice(Executable &executable, std::vector<Region> &targets) {
    std::vector<Tensor> given, results;
    std::vector<Region> written;
    for (const Region &region : regions)
      given.push_back(region.onDevice().view);
    for (const Region &region : targets) {
      written.push_back(region.onDevice());
      results.push_back(written.back().view);
    }
    Status status = executable.run("main", given, results);
    for (size_t i = 0; status && i < targets.size(); ++i)
      status = targets[i].memory.copyFrom(written[i].memory);
    for (size_t i = 0; status && targets.empty() && i < results.size(); ++i)
      outputs.push_back(take(results[i].to(Device::cpu())));
    return status;
  }

  void compareWithCPU(const Executable &executable) {
    std::string source = std::move(uncompared()[&executable]);
    uncompared().erase(&executable);
    Expected<std::shared_ptr<Executable>> compiled =
        contextOf(Device::cpu()).compile(source);
    ASSERT_TRUE(compiled) << compiled.status().toString();
    std::vector<Tensor> results;
    Status status = (*compiled)->run("main", inputs, results);
    ASSERT_TRUE(status.isOk()) << status.toString();
    for (size_t i = 0; i < outputs.size(); ++i) {
      DType type = outputs[i].dtype();
      // Quantized numbers may lie on two sides of a tie, and few sums cancel.
      bool comparable =
          type == DType::F32 || type == DType::F16 || type == DType::BF16;
      if (comparable && outputs[i].numElements() >= 64)
        EXPECT_TRUE(isClose("cuda against cpu", outputs[i], toArray(results[i]),
                            2 * slack));
    }
  }

  Random &random;
  const Program &program;
  bool plain;
  std::vector<Region> regions;
  std::vector<std::unique_ptr<Array>> arrays;
};

/// Calls `draw` for every seed, until one fails.
void forDraws(int64_t usual, const std::function<void(Random &)> &draw) {
  for (int64_t i = 0, count = draws(usual); i < count; ++i) {
    uint64_t seed = firstSeed() + static_cast<uint64_t>(i);
    SCOPED_TRACE("COREY_TEST_SEED=" + std::to_string(seed) +
                 " COREY_TEST_DRAWS=1");
    Random random(seed);
    draw(random);
    if (testing::Test::HasFailure() || testing::Test::IsSkipped())
      return;
  }
}

//===----------------------------------------------------------------------===//
// Chunks
//===----------------------------------------------------------------------===//

enum class ChunkKind { Unset, Static, Site, Operand };

ChunkKind anyChunk(Random &random, Program &program, const std::string &input) {
  auto kind = random.pick({ChunkKind::Unset, ChunkKind::Static, ChunkKind::Site,
                           ChunkKind::Site, ChunkKind::Operand});
  if (kind == ChunkKind::Static)
    program.attribute(
        "chunk = #ssm.chunk<static = " +
        std::to_string(random.pick<int64_t>(
            {1, 2, 3, 7, 16, 63, 64, 65, 100, int64_t(1) << 40})) +
        ">");
  if (kind == ChunkKind::Site)
    program.attribute("chunk = #ssm.chunk<runtime = @site>");
  if (kind == ChunkKind::Operand) {
    // A value that depends on the call: a third of the length.
    program.before = "  %one = arith.constant 1 : index\n  %three = "
                     "arith.constant 3 : index\n"
                     "  %length = tensor.dim %" +
                     input + ", %one : " + "TYPE" +
                     "\n"
                     "  %third = arith.divui %length, %three : index\n";
    program.operands += " chunk_size(%third)";
  }
  return kind;
}

void replaceType(Program &program, const std::string &type) {
  size_t at = program.before.find("TYPE");
  if (at != std::string::npos)
    program.before.replace(at, 4, type);
}

/// Sets a chunk and, on a GPU, a kernel at the only site, if there is one.
int64_t setAnyChunk(Random &random, Executable &executable, int64_t length) {
  if (executable.chunks().empty())
    return 0;
  int64_t chunk = random.pick<int64_t>(
      {0, 1, 2, 3, 7, 16, 63, 64, 65, length - 1, length, length + 1,
       std::numeric_limits<int64_t>::max() / 2});
  chunk = std::max<int64_t>(chunk, 0);
  std::string site = executable.chunks()[0].site;
  EXPECT_TRUE(executable.setChunk(site, chunk).isOk());
  // There are other kernels for some sizes only.
  if (onGPU())
    (void)executable.setVariant(
        site,
        random.pick({"", "", "warp", "split", "split-short", "split-narrow"}));
  return chunk;
}

//===----------------------------------------------------------------------===//
// Scans
//===----------------------------------------------------------------------===//

/// Rates of decay: mostly those of trained models, some tiny, some growing.
/// `slack` multiplies the tolerance: a decay near 1 is rounded by up to 2^-25,
/// the same way in every token if the steps are equal, and nothing is
/// forgotten over `length` tokens.
Generator anyRates(Random &random, int64_t length, double &slack) {
  double kind = random.uniform(0, 1);
  slack = 1;
  if (kind < 0.75)
    return [&random] { return random.uniform(-8, -0.05); };
  slack = std::max(1.0, static_cast<double>(length) * 0x1p-25 / 2e-6);
  if (kind < 0.9)
    return [&random] { return -std::exp(random.uniform(-12, -3)); };
  return [&random] { return random.uniform(-0.1, 0.005); };
}

Generator normals(Random &random, double scale = 1, double shift = 0) {
  return [&random, scale, shift] { return scale * random.normal() + shift; };
}

/// Steps that are positive with or without a softplus.
Generator anySteps(Random &random, bool softplus) {
  if (softplus)
    return random.chance(0.1) ? normals(random, 6) : normals(random, 0.5, -1);
  return [&random] { return std::abs(random.normal()) * 0.2 + 0.001; };
}

Generator anyBias(Random &random, bool softplus) {
  if (softplus)
    return normals(random, 0.5);
  return [&random] { return std::abs(random.normal()) * 0.05; };
}

/// The sizes of a call: a batch of equal sequences, or packed ones.
struct Sizes {
  int64_t batch, length, rows;
  std::vector<int64_t> starts;
};

Sizes anySizes(Random &random, bool packed, int64_t workPerToken,
               int64_t limit) {
  Sizes sizes;
  sizes.batch = packed ? 1 : anyBatch(random);
  sizes.length = anyLength(random);
  while (sizes.batch * sizes.length * workPerToken > limit && sizes.length > 8)
    sizes.length = sizes.length / 2 + 1;
  sizes.rows = sizes.batch;
  if (packed) {
    sizes.starts = anyStarts(random, sizes.length);
    sizes.rows = static_cast<int64_t>(sizes.starts.size());
  }
  return sizes;
}

/// A pool of states, and the slot of every sequence: no two are equal but the
/// negative ones, of sequences that have none.
struct Pool {
  int64_t size = 0;
  std::vector<int64_t> slots;

  /// What sequences start from: a row each, zero without a slot.
  Array gather(const Array &pool) const {
    Shape shape = pool.shape;
    shape[0] = static_cast<int64_t>(slots.size());
    Array rows(shape);
    forSlots(pool, [&](size_t from, size_t to, size_t count) {
      std::copy_n(pool.data.begin() + from, count, rows.data.begin() + to);
    });
    return rows;
  }
  /// The pool with the states of sequences where they belong.
  Array scatter(const Array &pool, const Array &rows) const {
    Array result = pool;
    result.magnitude = pool.data;
    for (double &term : result.magnitude)
      term = std::abs(term);
    const std::vector<double> &terms =
        rows.magnitude.empty() ? rows.data : rows.magnitude;
    forSlots(pool, [&](size_t to, size_t from, size_t count) {
      std::copy_n(rows.data.begin() + from, count, result.data.begin() + to);
      std::copy_n(terms.begin() + from, count, result.magnitude.begin() + to);
    });
    return result;
  }

private:
  template <class F> void forSlots(const Array &pool, F body) const {
    size_t count = pool.shape[0] ? pool.data.size() / pool.shape[0] : 0;
    for (size_t i = 0; i < slots.size(); ++i)
      if (slots[i] >= 0)
        body(static_cast<size_t>(slots[i]) * count, i * count, count);
  }
};

Pool anyPool(Random &random, int64_t rows) {
  Pool pool;
  pool.size = rows + random.integer(1, 4);
  for (int64_t i = 0; i < pool.size; ++i)
    pool.slots.push_back(i);
  for (int64_t i = pool.size; i > 1; --i)
    std::swap(pool.slots[i - 1], pool.slots[random.integer(0, i - 1)]);
  pool.slots.resize(rows);
  for (int64_t &slot : pool.slots)
    if (random.chance(0.2))
      slot = random.pick<int64_t>({-1, -7, -2147483647 - 1});
  return pool;
}

/// Calls of a program that was compiled for any size.
const int Calls = onGPU() ? 8 : 4;

TEST(Property, SelectiveScan) {
  forDraws(16, [](Random &random) {
    int64_t D = random.pick<int64_t>(
        {1, 2, 3, 5, 7, 8, 9, 13, 15, 16, 17, 24, 31, 33, 40, 64, 65});
    if (onGPU() && random.chance(0.4))
      D = random.pick<int64_t>({66, 96, 128, 130, 192, 201, 320, 513});
    int64_t N = random.pick<int64_t>(
        {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 32, 33, 40, 64, 128, 256});
    int64_t G = random.chance(0.6) ? 1 : anyDivisor(random, D, 8);
    bool packed = random.chance(0.3), isStatic = random.chance(0.2);
    bool hasD = random.chance(0.6), hasZ = random.chance(0.5),
         hasBias = random.chance(0.5);
    bool hasInitial = random.chance(0.5), hasLast = random.chance(0.7),
         softplus = random.chance(0.7);
    bool paged = random.chance(0.3);
    hasInitial |= paged;
    auto newSizes = [&] {
      return anySizes(random, packed, D * N, onGPU() ? 6000000 : 500000);
    };
    Sizes sizes = newSizes();
    int64_t b = isStatic                       ? sizes.batch
                : packed && random.chance(0.5) ? 1
                                               : Free;
    int64_t l = isStatic ? sizes.length : Free,
            r = isStatic ? sizes.rows : Free;
    Program program("selective_scan", &random);
    DType u = anyFloat(random);
    program.operand("u", u, {b, l, D});
    program.operand("delta", anyFloat(random), {b, l, D});
    program.operand("A", DType::F32, {D, N});
    program.operand("B", anyFloat(random), {b, l, G, N});
    program.operand("C", anyFloat(random), {b, l, G, N});
    if (hasD)
      program.optional("D", anyFloat(random), {D});
    if (hasZ)
      program.optional("z", anyFloat(random), {b, l, D});
    if (hasBias)
      program.optional("delta_bias", anyFloat(random), {D});
    DType stateType = anyFloat(random);
    if (hasInitial)
      program.optional("initial_state", stateType, {paged ? Free : r, D, N});
    if (paged)
      program.optional("slots", DType::I32, {r});
    if (packed)
      program.optional("seq_starts", DType::I32, {r});
    anyChunk(random, program, "u");
    replaceType(program, typeText(u, {b, l, D}));
    if (softplus)
      program.attribute("delta_softplus");
    program.result(u, {b, l, D});
    if (hasLast)
      program.result(paged ? stateType : anyFloat(random),
                     {paged ? Free : r, D, N});
    SCOPED_TRACE(program.module());
    auto executable = compile(program.module(), anyVectorBits(random));
    ASSERT_TRUE(executable);
    for (int call = 0; call < (isStatic ? 1 : Calls); ++call) {
      if (call)
        sizes = newSizes();
      auto [B, L, R, starts] = sizes;
      reference::SelectiveScan op;
      Trial trial(random, program);
      op.u = trial.input({B, L, D}, normals(random));
      op.delta = trial.input({B, L, D}, anySteps(random, softplus));
      double slack = 1;
      op.A = trial.input({D, N}, anyRates(random, L, slack));
      op.B = trial.input({B, L, G, N}, normals(random));
      op.C = trial.input({B, L, G, N}, normals(random));
      if (hasD)
        op.D = trial.input({D}, normals(random));
      if (hasZ)
        op.z = trial.input({B, L, D}, normals(random, 2));
      if (hasBias)
        op.deltaBias = trial.input({D}, anyBias(random, softplus));
      Pool pool;
      Array before;
      if (paged)
        pool = anyPool(random, R);
      int64_t states = paged ? pool.size : R;
      const Array *initial = nullptr;
      if (hasInitial)
        initial = op.initialState =
            trial.input({states, D, N}, normals(random));
      if (paged) {
        trial.input({R}, pool.slots);
        before = pool.gather(*initial);
        op.initialState = &before;
      }
      if (packed)
        trial.input({R}, starts);
      op.seqStarts = packed ? &starts : nullptr;
      op.deltaSoftplus = softplus;
      int64_t chunk = setAnyChunk(random, *executable, L);
      std::vector<Shape> shapes = {{B, L, D}};
      if (hasLast)
        shapes.push_back({states, D, N});
      trial.slack = slack;
      bool ran = trial.run(*executable, shapes);
      SCOPED_TRACE("chunk " + std::to_string(chunk) + "\n" + trial.describe());
      ASSERT_TRUE(ran);
      reference::ScanResult want = reference::selectiveScan(op);
      if (paged)
        want.state = pool.scatter(*initial, want.state);
      ASSERT_TRUE(isClose("selective_scan y", trial.outputs[0], want.y, slack));
      if (hasLast)
        ASSERT_TRUE(isClose("selective_scan last_state", trial.outputs[1],
                            want.state, slack));
    }
  });
}

/// A random SSD; `inTiles` of the sizes and types that tensor cores take.
void drawSSD(Random &random, bool inTiles) {
  int64_t H = random.pick<int64_t>({1, 2, 3, 4, 5, 6, 8, 12, 24});
  int64_t P = random.pick<int64_t>(
      {1, 2, 3, 4, 5, 8, 12, 15, 16, 17, 20, 31, 32, 33, 48, 64, 72, 128});
  int64_t N = random.pick<int64_t>(
      {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 32, 33, 64, 100, 128, 256});
  if (inTiles) {
    P = random.pick<int64_t>({8, 32, 64, 64, 64, 72, 96, 128});
    N = random.pick<int64_t>({16, 32, 48, 64, 80, 128, 128, 144, 192, 256});
  }
  int64_t G = random.chance(0.6) ? 1 : anyDivisor(random, H, 8);
  bool packed = random.chance(0.3), isStatic = random.chance(0.2),
       discrete = random.chance(0.3);
  bool hasD = random.chance(0.6), perChannel = random.chance(0.5),
       hasZ = random.chance(0.5);
  bool hasBias = !discrete && random.chance(0.5),
       softplus = !discrete && random.chance(0.7);
  bool hasLimit = !discrete && random.chance(0.3);
  bool hasInitial = random.chance(0.5), hasFinal = random.chance(0.7);
  bool paged = random.chance(0.3);
  hasInitial |= paged;
  auto newSizes = [&] { return anySizes(random, packed, H * P * N, 4000000); };
  Sizes sizes = newSizes();
  int64_t b = isStatic ? sizes.batch : packed && random.chance(0.5) ? 1 : Free;
  int64_t l = isStatic ? sizes.length : Free, r = isStatic ? sizes.rows : Free;
  Program program("ssd", &random);
  DType x = anyFloat(random);
  if (inTiles && x == DType::F32)
    x = DType::BF16;
  auto anyState = [&] { return inTiles ? x : anyFloat(random); };
  program.operand("x", x, {b, l, H, P});
  if (discrete) {
    program.optional("decay", anyFloat(random), {b, l, H});
  } else {
    program.optional("dt", anyFloat(random), {b, l, H});
    program.optional("A", DType::F32, {H});
  }
  program.operand("B", anyState(), {b, l, G, N}, "B");
  program.operand("C", anyState(), {b, l, G, N}, "C");
  Shape skip = perChannel ? Shape{H, P} : Shape{H};
  if (hasD)
    program.optional("D", anyFloat(random), skip);
  if (hasZ)
    program.optional("z", anyFloat(random), {b, l, H, P});
  if (hasBias)
    program.optional("dt_bias", anyFloat(random), {H});
  DType stateType = anyFloat(random);
  if (hasInitial)
    program.optional("initial_states", stateType, {paged ? Free : r, H, P, N});
  if (paged)
    program.optional("slots", DType::I32, {r});
  if (packed)
    program.optional("seq_starts", DType::I32, {r});
  anyChunk(random, program, "x");
  replaceType(program, typeText(x, {b, l, H, P}));
  if (softplus)
    program.attribute("dt_softplus");
  double low = 0.001, high = 0.1;
  if (random.chance(0.5)) {
    low = 0;
    high = Inf;
  }
  if (hasLimit)
    program.attribute(high == Inf
                          ? "dt_limit = array<f64: 0.0, 0x7FF0000000000000>"
                          : "dt_limit = array<f64: 0.001, 0.1>");
  if (random.chance(0.3))
    program.attribute("tile = 128 : i64");
  program.result(x, {b, l, H, P});
  if (hasFinal)
    program.result(paged ? stateType : anyFloat(random),
                   {paged ? Free : r, H, P, N});
  SCOPED_TRACE(program.module());
  auto executable = compile(program.module(), anyVectorBits(random));
  ASSERT_TRUE(executable);
  for (int call = 0; call < (isStatic ? 1 : Calls); ++call) {
    if (call)
      sizes = newSizes();
    auto [B, L, R, starts] = sizes;
    reference::SSD op;
    Trial trial(random, program);
    double slack = 1;
    op.x = trial.input({B, L, H, P}, normals(random));
    if (discrete) {
      double scale = random.pick({1.0, 0.01, 20.0});
      op.decay = trial.input({B, L, H}, [&random, scale] {
        return -std::abs(random.normal()) * scale;
      });
    } else {
      op.dt = trial.input({B, L, H}, anySteps(random, softplus));
      op.A = trial.input({H}, anyRates(random, L, slack));
    }
    op.B = trial.input({B, L, G, N}, normals(random));
    op.C = trial.input({B, L, G, N}, normals(random));
    if (hasD)
      op.D = trial.input(skip, normals(random));
    if (hasZ)
      op.z = trial.input({B, L, H, P}, normals(random, 2));
    if (hasBias)
      op.dtBias = trial.input({H}, anyBias(random, softplus));
    Pool pool;
    Array before;
    if (paged)
      pool = anyPool(random, R);
    int64_t states = paged ? pool.size : R;
    const Array *initial = nullptr;
    if (hasInitial)
      initial = op.initialStates =
          trial.input({states, H, P, N}, normals(random));
    if (paged) {
      trial.input({R}, pool.slots);
      before = pool.gather(*initial);
      op.initialStates = &before;
    }
    if (packed)
      trial.input({R}, starts);
    op.seqStarts = packed ? &starts : nullptr;
    op.dtSoftplus = softplus;
    op.hasLimit = hasLimit;
    op.limitLow = low;
    op.limitHigh = high;
    int64_t chunk = setAnyChunk(random, *executable, L);
    std::vector<Shape> shapes = {{B, L, H, P}};
    if (hasFinal)
      shapes.push_back({states, H, P, N});
    // Operands of tensor cores have the type of x, whatever the results have.
    auto slackOf = [&](DType type) {
      return inTiles ? std::max(1.5 * tolerance(x) / tolerance(type), 1.5)
                     : 1.0;
    };
    trial.slack = 2 * slack * (inTiles ? slackOf(DType::F32) : 1);
    bool ran = trial.run(*executable, shapes);
    SCOPED_TRACE("chunk " + std::to_string(chunk) + "\n" + trial.describe());
    ASSERT_TRUE(ran);
    reference::ScanResult want = reference::ssd(op);
    if (paged)
      want.state = pool.scatter(*initial, want.state);
    // The products with the state add one term after the other. Where many
    // are alike, as those of a tensor with stride 0, they round one way.
    ASSERT_TRUE(isClose("ssd y", trial.outputs[0], want.y,
                        (N > 64 ? 2 * slack : slack) * slackOf(x)));
    if (hasFinal)
      ASSERT_TRUE(isClose("ssd final_states", trial.outputs[1], want.state,
                          slack * slackOf(trial.outputs[1].dtype())));
  }
}

TEST(Property, SSD) {
  SKIP_WITHOUT_SSD();
  forDraws(16, [](Random &random) { drawSSD(random, false); });
}

TEST(Property, SSDInTiles) {
  SKIP_WITHOUT_SSD();
  forDraws(24, [](Random &random) { drawSSD(random, true); });
}

TEST(Property, CausalConv) {
  forDraws(10, [](Random &random) {
    int64_t D = random.pick<int64_t>(
        {1, 2, 3, 5, 7, 8, 9, 13, 16, 17, 24, 31, 33, 64, 65, 100});
    int64_t W = random.integer(2, 4);
    bool packed = random.chance(0.3), isStatic = random.chance(0.2);
    bool hasBias = random.chance(0.5), hasInitial = random.chance(0.5);
    bool hasFinal = random.chance(0.7), silu = random.chance(0.5);
    if (onGPU() && random.chance(0.4))
      D = random.pick<int64_t>({66, 96, 128, 130, 192, 201, 320, 513, 1024});
    bool paged = random.chance(0.3);
    hasInitial |= paged;
    auto newSizes = [&] {
      return anySizes(random, packed, D, onGPU() ? 1000000 : 200000);
    };
    Sizes sizes = newSizes();
    int64_t b = isStatic                       ? sizes.batch
                : packed && random.chance(0.5) ? 1
                                               : Free;
    int64_t l = isStatic ? sizes.length : Free,
            r = isStatic ? sizes.rows : Free;
    Program program("causal_conv", &random);
    DType x = anyFloat(random);
    program.operand("x", x, {b, l, D});
    program.operand("weight", anyFloat(random), {D, W});
    if (hasBias)
      program.optional("bias", anyFloat(random), {D});
    DType stateType = paged ? x : anyFloat(random);
    if (hasInitial)
      program.optional("initial_state", stateType,
                       {paged ? Free : r, W - 1, D});
    if (paged)
      program.optional("slots", DType::I32, {r});
    if (packed)
      program.optional("seq_starts", DType::I32, {r});
    if (silu)
      program.attribute("silu");
    program.result(x, {b, l, D});
    if (hasFinal)
      program.result(x, {paged ? Free : r, W - 1, D});
    SCOPED_TRACE(program.module());
    auto executable = compile(program.module(), anyVectorBits(random));
    ASSERT_TRUE(executable);
    for (int call = 0; call < (isStatic ? 1 : Calls); ++call) {
      if (call)
        sizes = newSizes();
      auto [B, L, R, starts] = sizes;
      reference::CausalConv op;
      Trial trial(random, program);
      op.x = trial.input({B, L, D}, normals(random));
      op.weight = trial.input({D, W}, normals(random));
      if (hasBias)
        op.bias = trial.input({D}, normals(random));
      Pool pool;
      Array before;
      if (paged)
        pool = anyPool(random, R);
      int64_t states = paged ? pool.size : R;
      const Array *initial = nullptr;
      if (hasInitial)
        initial = op.initialState =
            trial.input({states, W - 1, D}, normals(random));
      if (paged) {
        trial.input({R}, pool.slots);
        before = pool.gather(*initial);
        op.initialState = &before;
      }
      if (packed)
        trial.input({R}, starts);
      op.seqStarts = packed ? &starts : nullptr;
      op.silu = silu;
      std::vector<Shape> shapes = {{B, L, D}};
      if (hasFinal)
        shapes.push_back({states, W - 1, D});
      bool ran = trial.run(*executable, shapes);
      SCOPED_TRACE(trial.describe());
      ASSERT_TRUE(ran);
      reference::ScanResult want = reference::causalConv(op);
      if (paged)
        want.state = pool.scatter(*initial, want.state);
      ASSERT_TRUE(isClose("causal_conv y", trial.outputs[0], want.y));
      if (hasFinal)
        ASSERT_TRUE(
            isClose("causal_conv final_state", trial.outputs[1], want.state));
    }
  });
}

//===----------------------------------------------------------------------===//
// The last axis
//===----------------------------------------------------------------------===//

/// `rank` leading sizes with a product of at most 200, and what the program
/// says of them.
Shape anyLeading(Random &random, int64_t rank) {
  Shape shape(rank);
  for (int64_t &size : shape)
    size = random.chance(0.07)  ? 0
           : random.chance(0.5) ? random.integer(1, 4)
                                : random.integer(1, 20);
  auto product = [&] {
    int64_t count = 1;
    for (int64_t size : shape)
      count *= size;
    return count;
  };
  while (product() > 200)
    for (int64_t &size : shape)
      size = std::max<int64_t>(1, size / 2);
  return shape;
}

Shape join(Shape leading, int64_t last) {
  leading.push_back(last);
  return leading;
}

TEST(Property, Projection) {
  forDraws(14, [](Random &random) {
    int64_t K = random.pick<int64_t>(
        {1, 2, 3, 7, 8, 9, 16, 17, 31, 33, 64, 100, 129, 256});
    int64_t M =
        random.pick<int64_t>({1, 2, 3, 7, 8, 9, 16, 17, 31, 33, 64, 96, 130});
    if (onGPU() && random.chance(0.4)) {
      K = random.pick<int64_t>(
          {24, 40, 256, 384, 511, 768, 1024, 2048, 2056, 5120, 8200});
      M = random.pick<int64_t>({8, 16, 128, 200, 257, 384, 512, 4100});
    }
    int64_t rank = random.integer(0, 3);
    // A few rows have a kernel of their own.
    bool few = onGPU() && rank > 0 && random.chance(0.5);
    auto anyRows = [&] {
      if (!few)
        return anyLeading(random, rank);
      Shape shape(rank, 1);
      shape[random.integer(0, rank - 1)] = random.integer(1, 18);
      return shape;
    };
    bool isStatic = random.chance(0.25), hasBias = random.chance(0.4),
         hasResidual = random.chance(0.4);
    DType weight = random.chance(0.3)
                       ? random.pick({DType::I8, DType::F8E4M3FN})
                       : anyFloat(random);
    bool quantized = weight == DType::I8 || weight == DType::F8E4M3FN,
         oneScale = random.chance(0.5);
    Shape leading = anyRows(), spec = isStatic ? leading : Shape(rank, Free);
    Program program("projection", &random);
    DType x = anyFloat(random), y = x;
    program.operand("x", x, join(spec, K));
    program.operand("weight", weight, {M, K});
    if (hasBias)
      program.optional("bias", anyFloat(random), {M});
    if (hasResidual)
      program.optional("residual", y = anyFloat(random), join(spec, M));
    Shape scales = oneScale ? Shape{} : Shape{M};
    if (quantized)
      program.optional("weight_scale", DType::F32, scales);
    program.result(y, join(spec, M));
    SCOPED_TRACE(program.module());
    auto executable = compile(program.module(), anyVectorBits(random));
    ASSERT_TRUE(executable);
    for (int call = 0; call < (isStatic ? 1 : Calls); ++call) {
      if (call)
        leading = anyRows();
      Trial trial(random, program);
      const Array *bias = nullptr, *residual = nullptr, *scale = nullptr;
      const Array *input = trial.input(join(leading, K), normals(random));
      double range = weight == DType::I8         ? 50
                     : weight == DType::F8E4M3FN ? 20
                                                 : 1;
      const Array *matrix = trial.input({M, K}, normals(random, range));
      if (hasBias)
        bias = trial.input({M}, normals(random));
      if (hasResidual)
        residual = trial.input(join(leading, M), normals(random));
      if (quantized)
        scale = trial.input(scales, [&random, range] {
          return random.uniform(0.5, 2) / range;
        });
      bool ran = trial.run(*executable, {join(leading, M)});
      SCOPED_TRACE(trial.describe());
      ASSERT_TRUE(ran);
      ASSERT_TRUE(isClose(
          "projection", trial.outputs[0],
          reference::projection(*input, *matrix, bias, residual, scale)));
    }
  });
}

TEST(Property, RMSNorm) {
  forDraws(10, [](Random &random) {
    int64_t D = random.pick<int64_t>(
        {1, 2, 3, 6, 7, 8, 9, 12, 16, 17, 24, 32, 33, 64, 96, 100, 256, 700});
    if (onGPU() && random.chance(0.4))
      D = random.pick<int64_t>({768, 1000, 1536, 2048, 2561, 4096, 8192});
    int64_t rank = random.integer(0, 3);
    bool isStatic = random.chance(0.25), hasResidual = random.chance(0.5),
         hasZ = random.chance(0.5);
    bool hasOut = hasResidual && random.chance(0.6),
         normFirst = hasZ && random.chance(0.5);
    int64_t group = random.chance(0.4) ? anyDivisor(random, D, D) : 0;
    float eps = random.pick({1e-5f, 1e-6f, 0.0f, 0.1f});
    Shape leading = anyLeading(random, rank),
          spec = isStatic ? leading : Shape(rank, Free);
    Program program("rms_norm", &random);
    DType x = anyFloat(random), residual = anyFloat(random);
    program.operand("x", x, join(spec, D));
    program.operand("weight", anyFloat(random), {D});
    if (hasResidual)
      program.optional("residual", residual, join(spec, D));
    if (hasZ)
      program.optional("z", anyFloat(random), join(spec, D));
    char text[64];
    std::snprintf(text, sizeof text, "eps = %.9e : f32",
                  static_cast<double>(eps));
    program.attribute(text);
    if (group)
      program.attribute("group_size = " + std::to_string(group) + " : i64");
    if (normFirst)
      program.attribute("norm_before_gate");
    program.result(x, join(spec, D));
    if (hasOut)
      program.result(residual, join(spec, D));
    SCOPED_TRACE(program.module());
    auto executable = compile(program.module(), anyVectorBits(random));
    ASSERT_TRUE(executable);
    for (int call = 0; call < (isStatic ? 1 : Calls); ++call) {
      if (call)
        leading = anyLeading(random, rank);
      Trial trial(random, program);
      reference::RMSNorm op;
      op.x = trial.input(join(leading, D), normals(random));
      op.weight = trial.input({D}, normals(random));
      if (hasResidual)
        op.residual = trial.input(join(leading, D), normals(random));
      if (hasZ)
        op.z = trial.input(join(leading, D), normals(random, 2));
      op.eps = static_cast<double>(eps);
      op.groupSize = group;
      op.normBeforeGate = normFirst;
      std::vector<Shape> shapes(hasOut ? 2 : 1, join(leading, D));
      bool ran = trial.run(*executable, shapes);
      SCOPED_TRACE(trial.describe());
      ASSERT_TRUE(ran);
      reference::RMSNormResult want = reference::rmsNorm(op);
      ASSERT_TRUE(isClose("rms_norm y", trial.outputs[0], want.y));
      if (hasOut)
        ASSERT_TRUE(isClose("rms_norm residual_out", trial.outputs[1],
                            want.residualOut));
    }
  });
}

TEST(Property, Hadamard) {
  forDraws(8, [](Random &random) {
    int64_t block = int64_t(1) << random.integer(0, onGPU() ? 15 : 9);
    int64_t D = block * random.pick<int64_t>({1, 1, 2, 3, 5});
    int64_t rank = random.integer(0, 3);
    bool isStatic = random.chance(0.25);
    // Of the largest blocks a few rows are enough.
    auto anyRows = [&] {
      Shape shape = anyLeading(random, rank);
      if (block > 1024)
        for (int64_t &size : shape)
          size = std::min<int64_t>(size, 3);
      return shape;
    };
    Shape leading = anyRows(), spec = isStatic ? leading : Shape(rank, Free);
    Program program("hadamard", &random);
    DType x = anyFloat(random);
    program.operand("x", x, join(spec, D));
    program.attribute("block = " + std::to_string(block) + " : i64");
    program.result(x, join(spec, D));
    SCOPED_TRACE(program.module());
    auto executable = compile(program.module(), anyVectorBits(random));
    ASSERT_TRUE(executable);
    for (int call = 0; call < (isStatic ? 1 : Calls); ++call) {
      if (call)
        leading = anyRows();
      Trial trial(random, program);
      const Array *input = trial.input(join(leading, D), normals(random));
      bool ran = trial.run(*executable, {join(leading, D)});
      SCOPED_TRACE(trial.describe());
      ASSERT_TRUE(ran);
      ASSERT_TRUE(isClose("hadamard", trial.outputs[0],
                          reference::hadamard(*input, block)));
    }
  });
}

// Each number of steps has a kernel of its own shape.
TEST(Property, HadamardOfEveryBlock) {
  if (!onGPU())
    GTEST_SKIP() << "for GPUs";
  Random random(firstSeed());
  for (int64_t block = 1; block <= 32768; block *= 2)
    for (DType type : {DType::F32, DType::F16, DType::BF16}) {
      // One block a row where a block is long.
      int64_t size = block > 8192 ? block : 2 * block;
      Program program("hadamard", &random);
      program.operand("x", type, {Free, size});
      program.attribute("block = " + std::to_string(block) + " : i64");
      program.result(type, {Free, size});
      SCOPED_TRACE(program.module());
      auto executable = compile(program.module());
      ASSERT_TRUE(executable);
      for (int64_t rows : {1, 5, 133}) {
        // The reference is the definition, with as many terms as the square.
        if (rows * block * block > (int64_t(1) << 30))
          continue;
        Trial trial(random, program);
        const Array *input = trial.input({rows, size}, normals(random));
        bool ran = trial.run(*executable, {{rows, size}});
        SCOPED_TRACE(trial.describe());
        ASSERT_TRUE(ran);
        ASSERT_TRUE(isClose("hadamard", trial.outputs[0],
                            reference::hadamard(*input, block)));
      }
    }
}

/// A norm, pointwise ops and a transform, which are one kernel.
struct RotatedNorm {
  int64_t D, group, block;
  DType x, residual, gate, result;
  bool hasResidual, hasOut, hasZ, normFirst, hasGate, hasEpilogue;

  std::string source() const {
    std::string row = "x" + std::to_string(D) + "x";
    auto type = [&](DType type) {
      return "tensor<?x?" + row + dtypeName(type) + ">";
    };
    std::string weight = "tensor<" + std::to_string(D) + "xf32>";
    std::string X = type(x), R = type(residual), Y = type(result),
                text = "func.func @main(%x: " + X + ", %w: " + weight;
    if (hasResidual)
      text += ", %r: " + R;
    if (hasZ)
      text += ", %z: " + X;
    if (hasGate)
      text += ", %g: " + type(gate);
    std::string results = "(" + Y + (hasOut ? ", " + R : "") + ")";
    text += ") -> " + results + " {\n  %n" + (hasOut ? ", %s" : "") +
            " = ssm.rms_norm %x, %w";
    if (hasResidual)
      text += " residual(%r : " + R + ")";
    if (hasZ)
      text += " z(%z : " + X + ")";
    text += " {group_size = " + std::to_string(group) + " : i64" +
            (normFirst ? ", norm_before_gate" : "") + "} : " + X + ", " +
            weight + " -> " + X + (hasOut ? ", " + R : "") + "\n";
    if (hasGate)
      text += "  %a = ssm.silu %g : " + type(gate) +
              "\n  %m = ssm.mul %n, %a : " + X + ", " + type(gate) + "\n";
    text += std::string("  %h = ssm.hadamard ") + (hasGate ? "%m" : "%n") +
            " {block = " + std::to_string(block) + " : i64} : " + X + " -> " +
            X + "\n";
    if (hasEpilogue)
      text += "  %e = ssm.add %h, %w : " + X + ", " + weight +
              "\n  %c = ssm.cast %e : " + X + " to " + Y + "\n";
    return text + "  return " + (hasEpilogue ? "%c" : "%h") +
           (hasOut ? ", %s : " : " : ") + Y + (hasOut ? ", " + R : "") +
           "\n}\n";
  }

  /// Compiles and runs the program for tensors of the leading shapes that
  /// `anyRows` returns.
  void check(Random &random, int calls, const std::function<Shape()> &anyRows) {
    std::string text = source();
    SCOPED_TRACE(text);
    auto executable = compile(text, anyVectorBits(random));
    ASSERT_TRUE(executable);
    EXPECT_EQ(executable->traffic().kernels, 1);
    Program signature("rotated_norm", &random);
    Shape spec = {Free, Free, D};
    signature.operand("x", x, spec);
    signature.operand("w", DType::F32, {D});
    if (hasResidual)
      signature.operand("r", residual, spec);
    if (hasZ)
      signature.operand("z", x, spec);
    if (hasGate)
      signature.operand("g", gate, spec);
    signature.result(result, spec);
    if (hasOut)
      signature.result(residual, spec);
    for (int call = 0; call < calls; ++call) {
      Shape shape = join(anyRows(), D);
      Trial trial(random, signature);
      reference::RMSNorm op;
      op.x = trial.input(shape, normals(random));
      op.weight = trial.input({D}, normals(random));
      if (hasResidual)
        op.residual = trial.input(shape, normals(random));
      if (hasZ)
        op.z = trial.input(shape, normals(random, 2));
      const Array *by =
          hasGate ? trial.input(shape, normals(random, 2)) : nullptr;
      op.eps = static_cast<double>(1e-5f);
      op.groupSize = group;
      op.normBeforeGate = normFirst;
      // Blocks that the CPU transforms in a loop nest of their own pass through
      // memory there, in the narrower type.
      trial.slack = std::max(1.0, tolerance(x) / tolerance(result));
      bool ran =
          trial.run(*executable, std::vector<Shape>(hasOut ? 2 : 1, shape));
      SCOPED_TRACE(trial.describe());
      ASSERT_TRUE(ran);
      reference::RMSNormResult norm = reference::rmsNorm(op);
      Array want = norm.y;
      if (by)
        want = reference::mul(want, reference::silu(*by));
      want = reference::hadamard(want, block);
      if (hasEpilogue)
        want = reference::add(want, *op.weight);
      ASSERT_TRUE(isClose("rotated norm", trial.outputs[0], want));
      if (hasOut)
        ASSERT_TRUE(isClose("rms_norm residual_out", trial.outputs[1],
                            norm.residualOut));
    }
  }
};

RotatedNorm anyRotatedNorm(Random &random, int64_t block, int64_t group,
                           int64_t D) {
  RotatedNorm norm;
  norm.D = D;
  norm.group = group;
  norm.block = block;
  norm.x = anyFloat(random), norm.residual = anyFloat(random);
  norm.gate = anyFloat(random);
  norm.hasResidual = random.chance(0.5), norm.hasZ = random.chance(0.5);
  norm.hasOut = norm.hasResidual && random.chance(0.6);
  norm.normFirst = norm.hasZ && random.chance(0.5);
  norm.hasGate = random.chance(0.4), norm.hasEpilogue = random.chance(0.4);
  norm.result = norm.hasEpilogue ? anyFloat(random) : norm.x;
  // A cast to the same type is none.
  if (norm.hasEpilogue && norm.result == norm.x)
    norm.result = norm.x == DType::F32 ? DType::BF16 : DType::F32;
  return norm;
}

// A norm whose result is transformed, before it was ever in memory.
TEST(Property, RotatedNorm) {
  forDraws(12, [](Random &random) {
    int64_t block = int64_t(1) << random.integer(0, onGPU() ? 13 : 8);
    int64_t group = block * random.pick<int64_t>({1, 1, 2, 3, 5, 7});
    while (group > 16384)
      group = block;
    int64_t D = group * random.pick<int64_t>({1, 1, 2, 3});
    // The reference has as many terms as a row times a block.
    anyRotatedNorm(random, block, group, D).check(random, Calls, [&] {
      Shape shape = anyLeading(random, 2);
      if (block * D > 1 << 18)
        for (int64_t &size : shape)
          size = std::min<int64_t>(size, 3);
      return shape;
    });
  });
}

// Every way in which threads share a group: each number of steps of a
// transform, alone and beside others, up to the largest group there is.
TEST(Property, RotatedNormOfEveryBlock) {
  if (!onGPU())
    GTEST_SKIP() << "for GPUs";
  Random random(firstSeed());
  for (int64_t block = 1; block <= 32768; block *= 2)
    for (int64_t group : std::set<int64_t>{block, 3 * block, 5 * block,
                                           std::max<int64_t>(block, 5120),
                                           std::max<int64_t>(block, 32768)}) {
      if (group % block || group > 32768)
        continue;
      RotatedNorm norm = anyRotatedNorm(random, block, group, group);
      // The definition of the transform, for a few rows where it is long.
      int64_t rows =
          std::min<int64_t>((int64_t(1) << 25) / (group * block), 133);
      norm.check(random, 1,
                 [&] { return Shape{1, std::max<int64_t>(rows, 1)}; });
      if (testing::Test::HasFailure())
        return;
    }
}

/// What `array` becomes in memory of `type`.
Array stored(Array array, DType type) {
  for (double &value : array.data) {
    char rounded[8];
    storeScalar(type, rounded, value);
    value = loadScalar(type, rounded);
  }
  return array;
}

// A projection of one token of each sequence, of what a norm makes.
TEST(Property, ProjectionOfANorm) {
  forDraws(10, [](Random &random) {
    int64_t K = random.pick<int64_t>({1, 7, 8, 16, 24, 40, 64, 72, 136, 520});
    int64_t M = random.pick<int64_t>({1, 3, 8, 17, 64, 130});
    if (onGPU() && random.chance(0.6)) {
      K = random.pick<int64_t>({256, 1000, 1024, 2048, 2560, 5120, 8192});
      M = random.pick<int64_t>({128, 257, 1024, 4096});
    }
    DType x = anyFloat(random), sum = anyFloat(random),
          weight = random.chance(0.8) ? random.pick({DType::F16, DType::BF16})
                                      : DType::F32,
          y = weight;
    bool hasNorm = random.chance(0.8), hasAdded = random.chance(0.3),
         hasZ = random.chance(0.3), normFirst = random.chance(0.5),
         hasSilu = !hasNorm || random.chance(0.3), hasBias = random.chance(0.3),
         hasResidual = random.chance(0.5);
    if (hasResidual)
      y = anyFloat(random);
    Shape spec = {Free, 1};
    std::string X = typeText(x, join(spec, K)), W = typeText(weight, {M, K}),
                R = typeText(sum, join(spec, K)),
                H = typeText(weight, join(spec, K)),
                Y = typeText(y, join(spec, M)), G = typeText(DType::F32, {K}),
                V = typeText(DType::F32, {M});
    Program signature("projection_of_norm", &random);
    std::string text = "func.func @main(%x: " + X + ", %w: " + W;
    signature.operand("x", x, join(spec, K));
    signature.operand("w", weight, {M, K});
    auto argument = [&](const char *name, DType type, const Shape &shape) {
      text += std::string(", %") + name + ": " + typeText(type, shape);
      signature.operand(name, type, shape);
    };
    if (hasNorm)
      argument("g", DType::F32, {K});
    if (hasNorm && hasAdded)
      argument("a", sum, join(spec, K));
    if (hasNorm && hasZ)
      argument("z", x, join(spec, K));
    if (hasBias)
      argument("b", DType::F32, {M});
    if (hasResidual)
      argument("r", y, join(spec, M));
    text += ") -> " + Y + " {\n";
    std::string last = "%x";
    if (hasNorm) {
      text += "  %n = ssm.rms_norm %x, %g";
      if (hasAdded)
        text += " residual(%a : " + R + ")";
      if (hasZ)
        text += " z(%z : " + X + ")";
      if (hasZ && normFirst)
        text += " {norm_before_gate}";
      text += " : " + X + ", " + G + " -> " + X + "\n";
      last = "%n";
    }
    if (hasSilu) {
      text += "  %s = ssm.silu " + last + " : " + X + "\n";
      last = "%s";
    }
    if (x != weight) {
      text += "  %h = ssm.cast " + last + " : " + X + " to " + H + "\n";
      last = "%h";
    }
    text += "  %y = ssm.projection " + last + ", %w";
    if (hasBias)
      text += " bias(%b : " + V + ")";
    if (hasResidual)
      text += " residual(%r : " + Y + ")";
    text +=
        " : " + H + ", " + W + " -> " + Y + "\n  return %y : " + Y + "\n}\n";
    signature.result(y, join(spec, M));
    SCOPED_TRACE(text);
    auto executable = compile(text, anyVectorBits(random));
    ASSERT_TRUE(executable);
    for (int call = 0; call < 2 * Calls; ++call) {
      Shape leading = {random.pick<int64_t>({1, 1, 2, 7, 8, 9, 16, 17, 33}), 1};
      Trial trial(random, signature);
      reference::RMSNorm op;
      const Array *bias = nullptr, *residual = nullptr;
      op.x = trial.input(join(leading, K), normals(random));
      const Array *matrix = trial.input({M, K}, normals(random));
      if (hasNorm)
        op.weight = trial.input({K}, normals(random));
      if (hasNorm && hasAdded)
        op.residual = trial.input(join(leading, K), normals(random));
      if (hasNorm && hasZ)
        op.z = trial.input(join(leading, K), normals(random, 2));
      if (hasBias)
        bias = trial.input({M}, normals(random));
      if (hasResidual)
        residual = trial.input(join(leading, M), normals(random));
      op.eps = static_cast<double>(1e-5f);
      op.normBeforeGate = hasZ && normFirst;
      // Of the type that the weight has, with what rounds the other way; values
      // in between may be of a narrower type, or not be rounded at all.
      double slack = 2;
      if (y == DType::F32)
        slack = weight == DType::F32 && x == DType::F32 ? 2 : 60;
      if (x == DType::BF16)
        slack = y == DType::BF16 ? 2 : y == DType::F16 ? 12 : 2500;
      else if (x == DType::F16 && y == DType::F32)
        slack = 300;
      trial.slack = slack;
      bool ran = trial.run(*executable, {join(leading, M)});
      SCOPED_TRACE(trial.describe());
      ASSERT_TRUE(ran);
      Array made = hasNorm ? reference::rmsNorm(op).y : *op.x;
      if (hasSilu)
        made = reference::silu(made);
      ASSERT_TRUE(isClose("projection of norm", trial.outputs[0],
                          reference::projection(stored(made, weight), *matrix,
                                                bias, residual, nullptr),
                          slack));
    }
  });
}

// One token of a scan, whose delta a projection of a few columns makes.
TEST(Property, SelectiveScanOfLowRank) {
  forDraws(8, [](Random &random) {
    int64_t D = random.pick<int64_t>({1, 3, 32, 33, 64, 130});
    if (onGPU() && random.chance(0.5))
      D = random.pick<int64_t>({512, 2048, 2056});
    int64_t N = random.pick<int64_t>({1, 3, 4, 8, 16, 17, 64});
    int64_t K = random.pick<int64_t>({1, 5, 8, 16, 24, 64, 80, 160, 256, 264});
    DType type = anyFloat(random);
    bool hasBias = random.chance(0.3), softplus = random.chance(0.8);
    std::string U = typeText(type, {Free, 1, D}),
                L = typeText(type, {Free, 1, K}), W = typeText(type, {D, K}),
                BC = typeText(type, {Free, 1, 1, N}),
                A = typeText(DType::F32, {D, N}), V = typeText(DType::F32, {D}),
                S = typeText(DType::F32, {Free, D, N});
    std::string text =
        "func.func @main(%u: " + U + ", %l: " + L + ", %w: " + W +
        ", %A: " + A + ", %B: " + BC + ", %C: " + BC + ", %h: " + S +
        (hasBias ? ", %b: " + V : "") + ") -> (" + U + ", " + S +
        ") {\n  %d = ssm.projection %l, %w" +
        (hasBias ? " bias(%b : " + V + ")" : "") + " : " + L + ", " + W +
        " -> " + U +
        "\n  %y, %n = ssm.selective_scan %u, %d, %A, %B, %C initial_state(%h "
        ": " +
        S + ")" + (softplus ? " {delta_softplus}" : "") + " : " + U + ", " + U +
        ", " + A + ", " + BC + ", " + BC + " -> " + U + ", " + S +
        "\n  return %y, %n : " + U + ", " + S + "\n}\n";
    SCOPED_TRACE(text);
    auto executable = compile(text, anyVectorBits(random));
    ASSERT_TRUE(executable);
    Program signature("low_rank_scan", &random);
    signature.operand("u", type, {Free, 1, D});
    signature.operand("l", type, {Free, 1, K});
    signature.operand("w", type, {D, K});
    signature.operand("A", DType::F32, {D, N});
    signature.operand("B", type, {Free, 1, 1, N});
    signature.operand("C", type, {Free, 1, 1, N});
    signature.operand("h", DType::F32, {Free, D, N});
    if (hasBias)
      signature.operand("b", DType::F32, {D});
    signature.result(type, {Free, 1, D});
    signature.result(DType::F32, {Free, D, N});
    for (int call = 0; call < Calls; ++call) {
      int64_t B = random.pick<int64_t>({1, 2, 5, 70});
      Trial trial(random, signature);
      reference::SelectiveScan op;
      double scale = 1 / std::sqrt(static_cast<double>(K));
      op.u = trial.input({B, 1, D}, normals(random));
      const Array *low = trial.input({B, 1, K}, normals(random));
      const Array *matrix = trial.input({D, K}, normals(random, scale));
      op.A = trial.input({D, N}, [&] { return -random.uniform(0.1, 2); });
      op.B = trial.input({B, 1, 1, N}, normals(random));
      op.C = trial.input({B, 1, 1, N}, normals(random));
      op.initialState = trial.input({B, D, N}, normals(random));
      const Array *bias = hasBias ? trial.input({D}, normals(random)) : nullptr;
      op.deltaSoftplus = softplus;
      Array delta =
          reference::projection(*low, *matrix, bias, nullptr, nullptr);
      op.delta = &delta;
      // Delta is rounded where it was in memory, and what is negative grows.
      double slack = type == DType::F16    ? 1500
                     : type == DType::BF16 ? 12000
                                           : 8;
      trial.slack = slack;
      bool ran = trial.run(*executable, {{B, 1, D}, {B, D, N}});
      SCOPED_TRACE(trial.describe());
      ASSERT_TRUE(ran);
      auto want = reference::selectiveScan(op);
      ASSERT_TRUE(isClose("low-rank scan", trial.outputs[0], want.y, 8));
      ASSERT_TRUE(
          isClose("low-rank scan state", trial.outputs[1], want.state, slack));
    }
  });
}

TEST(Property, EmbeddingAndArgmax) {
  forDraws(6, [](Random &random) {
    int64_t V = random.pick<int64_t>({1, 2, 3, 17, 256, 1000});
    int64_t D = random.pick<int64_t>({1, 2, 3, 7, 8, 9, 16, 17, 64, 65});
    int64_t rank = random.integer(0, 3);
    bool isStatic = random.chance(0.25);
    Shape leading = anyLeading(random, rank),
          spec = isStatic ? leading : Shape(rank, Free);
    DType ids = random.pick({DType::I32, DType::I64});
    Program look("embedding", &random);
    DType table = anyFloat(random);
    look.operand("ids", ids, spec);
    look.operand("table", table, {random.chance(0.5) ? Free : V, D});
    look.result(table, join(spec, D));
    Program find("argmax", &random);
    find.operand("x", anyFloat(random), join(spec, V));
    find.result(ids, spec);
    auto embedding = compile(look.module(), anyVectorBits(random));
    auto argmax = compile(find.module(), anyVectorBits(random));
    ASSERT_TRUE(embedding && argmax);
    for (int call = 0; call < (isStatic ? 1 : Calls); ++call) {
      if (call)
        leading = anyLeading(random, rank);
      {
        SCOPED_TRACE(look.module());
        Trial trial(random, look);
        const Array *index = trial.input(leading, [&] {
          return static_cast<double>(random.integer(0, V - 1));
        });
        const Array *rows = trial.input({V, D}, normals(random));
        bool ran = trial.run(*embedding, {join(leading, D)});
        SCOPED_TRACE(trial.describe());
        ASSERT_TRUE(ran);
        EXPECT_EQ(toArray(trial.outputs[0]).data,
                  reference::embedding(*index, *rows).data);
      }
      {
        SCOPED_TRACE(find.module());
        Trial trial(random, find);
        // Few values, so that many are equal, and some NaN.
        bool coarse = random.chance(0.5);
        double odds = random.chance(0.3) ? 0.02 : 0;
        const Array *input = trial.input(join(leading, V), [&]() -> double {
          if (random.chance(odds))
            return NaN;
          return coarse ? static_cast<double>(random.integer(-3, 3))
                        : random.normal();
        });
        bool ran = trial.run(*argmax, {leading});
        SCOPED_TRACE(trial.describe());
        ASSERT_TRUE(ran);
        EXPECT_EQ(toArray(trial.outputs[0]).data,
                  reference::argmax(*input).data);
      }
    }
  });
}

//===----------------------------------------------------------------------===//
// Sampling
//===----------------------------------------------------------------------===//

/// The program of draws from rows of `V` logits.
Program sampleProgram(DType logits, DType ids, const Shape &leading,
                      int64_t V) {
  Program program("sample");
  program.operand("logits", logits, join(leading, V));
  program.operand("temperature", DType::F32, leading);
  program.operand("top_k", DType::I32, leading);
  program.operand("top_p", DType::F32, leading);
  program.operand("random", DType::I64, join(leading, 3));
  program.result(ids, leading);
  program.result(DType::I64, join(leading, 3));
  return program;
}

/// The published known answers.
TEST(Property, ReferencePhilox) {
  using Counter = std::array<uint32_t, 4>;
  EXPECT_EQ(reference::philox({0, 0, 0, 0}, {0, 0}),
            (Counter{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(reference::philox({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}),
            (Counter{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(reference::philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
                              {0xa4093822, 0x299f31d0}),
            (Counter{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

/// Logits of different kinds, row by row.
Generator anyLogits(Random &random, int64_t size) {
  auto kind = std::make_shared<int64_t>(0);
  auto next = std::make_shared<int64_t>(0);
  return [&random, size, kind, next]() -> double {
    if ((*next)++ % size == 0)
      *kind = random.integer(0, 9);
    switch (*kind) {
    case 0: // Many equal ones.
      return static_cast<double>(random.integer(-3, 3));
    case 1:
      return 2;
    case 2: // Some masked.
      return random.chance(0.3) ? -Inf : random.normal();
    case 3:
      return random.chance(0.5) ? -30000 : 3 * random.normal();
    case 4: // One far above the others.
      return random.chance(2.0 / static_cast<double>(size)) ? 1000
                                                            : random.normal();
    case 5:
      return random.chance(0.1)   ? -0.0
             : random.chance(0.1) ? 0.0
                                  : -random.uniform(0, 1e-3);
    case 6: // None above 0, and denormal ones.
      return random.chance(0.5) ? -1e-40 : -1e-39 * random.uniform(0, 1);
    case 7:
      return random.chance(1.0 / static_cast<double>(size))
                 ? random.pick({NaN, Inf, -Inf})
                 : random.normal();
    case 8:
      return 0.01 * random.normal();
    default:
      return 4 * random.normal();
    }
  };
}

TEST(Property, Sample) {
  int64_t rows = 0, others = 0;
  forDraws(24, [&](Random &random) {
    int64_t V = random.pick<int64_t>(
        {1, 2, 3, 17, 31, 33, 256, 1000, 1024, 4099, 8200, 20000});
    if (random.chance(onGPU() ? 0.3 : 0.06))
      V = random.pick<int64_t>({50277, 50280, 50288, 128256, 300001});
    int64_t rank = V > 30000 ? 1 : random.integer(0, 2);
    bool isStatic = random.chance(0.25);
    Shape leading = anyLeading(random, rank),
          spec = isStatic ? leading : Shape(rank, Free);
    Program program = sampleProgram(
        anyFloat(random), random.pick({DType::I32, DType::I64}), spec, V);
    SCOPED_TRACE(program.module());
    auto executable = compile(program.module(), anyVectorBits(random));
    ASSERT_TRUE(executable);
    for (int call = 0; call < (isStatic ? 1 : Calls); ++call) {
      if (call)
        leading = anyLeading(random, rank);
      Trial trial(random, program);
      const Array *logits = trial.input(join(leading, V), anyLogits(random, V));
      const Array *temperature = trial.input(leading, [&] {
        return random.chance(0.5)
                   ? random.uniform(0.2, 2)
                   : random.pick({0.0, 1e-30, 1e-3, 1.0, 10.0, 1e6, 1e30, Inf,
                                  NaN, -1.0, -0.0});
      });
      const Array *topK = trial.input(leading, [&] {
        return static_cast<double>(
            random.chance(0.4)
                ? 0
                : random.pick<int64_t>({1, 2, 3, 50, V / 2, V - 1, V, V + 1,
                                        INT32_MAX, -1, INT32_MIN,
                                        random.integer(1, V)}));
      });
      const Array *topP = trial.input(leading, [&] {
        return random.chance(0.3) ? 1.0
               : random.chance(0.4)
                   ? random.uniform(0, 1)
                   : random.pick({0.0, 1e-12, 0.5, 0.9, 0.95, 0.999, 0.9999999,
                                  2.0, -1.0, NaN, Inf});
      });
      const Array *counters = trial.input(join(leading, 3), [&] {
        // What a double holds.
        return static_cast<double>(
            random.chance(0.5)
                ? random.integer(-5, 5)
                : random.integer(-(int64_t(1) << 52), int64_t(1) << 52));
      });
      bool ran = trial.run(*executable, {leading, join(leading, 3)});
      SCOPED_TRACE(trial.describe());
      ASSERT_TRUE(ran);
      reference::Draws want =
          reference::sample(*logits, *temperature, *topK, *topP, *counters);
      EXPECT_EQ(toArray(trial.outputs[1]).data, want.nextRandom.data);
      Array got = toArray(trial.outputs[0]);
      for (int64_t r = 0; r < got.size(); ++r) {
        EXPECT_TRUE(want.lowest.data[r] <= got.data[r] &&
                    got.data[r] <= want.highest.data[r])
            << "row " << r << ": temperature " << temperature->data[r]
            << ", top_k " << topK->data[r] << ", top_p " << topP->data[r]
            << ": expected " << want.ids.data[r] << " (" << want.lowest.data[r]
            << " to " << want.highest.data[r] << "), got " << got.data[r];
        ++rows;
        others += got.data[r] != want.ids.data[r];
      }
    }
  });
  // Where nothing is off the index is that of the definition.
  EXPECT_LE(others * 50, rows) << others << " of " << rows;
}

// Frequencies, by draws of one sequence and by the first draws of many.
TEST(Property, SampleDistribution) {
  constexpr int64_t V = 20, N = 40000;
  Program program = sampleProgram(DType::F32, DType::I32, {Free}, V);
  auto executable = compile(program.module());
  ASSERT_TRUE(executable);
  std::vector<double> logits;
  for (int64_t i = 0; i < V; ++i)
    logits.push_back(static_cast<float>(i * 7 % V) / 5.0f - 1.0f);
  struct Case {
    double temperature;
    int64_t topK;
    double topP;
    bool bySequence;
  };
  uint64_t seed = firstSeed();
  for (Case c : {Case{1, 0, 1, false},
                 {0.75, 0, 1, true},
                 {3, 0, 1, false},
                 {1, 5, 1, true},
                 {1, 0, 0.8125, false},
                 {0.75, 8, 0.625, true},
                 {1, V, 1, false},
                 {1e9, 100, 1, true},
                 {1.5, 2, 0.9990234375, false},
                 {0.001, 0, 1, true}}) {
    SCOPED_TRACE(std::to_string(c.temperature) + " " + std::to_string(c.topK) +
                 " " + std::to_string(c.topP));
    Random random(++seed);
    Trial trial(random, program);
    int64_t next = 0;
    trial.input({N, V},
                [&] { return logits[static_cast<size_t>(next++ % V)]; });
    trial.input({N}, [&] { return c.temperature; });
    trial.input({N}, [&] { return static_cast<double>(c.topK); });
    trial.input({N}, [&] { return c.topP; });
    next = 0;
    std::vector<int64_t> counters;
    for (int64_t i = 0; i < N; ++i)
      counters.insert(counters.end(),
                      {static_cast<int64_t>(seed), c.bySequence ? i : 5,
                       c.bySequence ? 5 : i});
    trial.input({N, 3}, counters);
    ASSERT_TRUE(trial.run(*executable, {{N}, {N, 3}}));
    std::vector<double> counts(V, 0),
        want = reference::probabilities(logits, c.temperature, c.topK, c.topP);
    for (double id : toArray(trial.outputs[0]).data)
      ++counts[static_cast<size_t>(id)];
    double statistic = 0;
    for (size_t i = 0; i < V; ++i) {
      double expected = want[i] * N;
      // Beyond what a draw of 2^-64 resolves there is nothing.
      if (expected < 1e-6)
        EXPECT_EQ(counts[i], 0) << i;
      else
        statistic += (counts[i] - expected) * (counts[i] - expected) / expected;
    }
    // 19 degrees of freedom exceed 60 once in 250,000 times.
    EXPECT_LT(statistic, 60);
  }
}

//===----------------------------------------------------------------------===//
// Elementwise
//===----------------------------------------------------------------------===//

struct Unary {
  const char *mnemonic;
  Array (*apply)(const Array &);
};
constexpr Unary Unaries[] = {
    {"neg", reference::neg},           {"exp", reference::exp},
    {"silu", reference::silu},         {"sigmoid", reference::sigmoid},
    {"softplus", reference::softplus}, {"gelu", reference::gelu}};
struct Binary {
  const char *mnemonic;
  Array (*apply)(const Array &, const Array &);
};
constexpr Binary Binaries[] = {
    {"add", reference::add}, {"sub", reference::sub}, {"mul", reference::mul}};

TEST(Property, Unary) {
  forDraws(1, [](Random &random) {
    for (const Unary &unary : Unaries) {
      for (DType type : {DType::F32, DType::F16, DType::BF16}) {
        int64_t rank = random.integer(0, 4);
        Shape leading = anyLeading(random, rank);
        bool isStatic = random.chance(0.25);
        Program program(unary.mnemonic);
        program.operand("x", type, isStatic ? leading : Shape(rank, Free));
        program.result(type, isStatic ? leading : Shape(rank, Free));
        program.showResults = false;
        SCOPED_TRACE(program.module());
        auto executable = compile(program.module(), anyVectorBits(random));
        ASSERT_TRUE(executable);
        for (int call = 0; call < (isStatic ? 1 : Calls); ++call) {
          if (call)
            leading = anyLeading(random, rank);
          Trial trial(random, program);
          double range = random.pick({1.0, 4.0, 30.0});
          const Array *input = trial.input(leading, normals(random, range));
          bool ran = trial.run(*executable, {leading});
          SCOPED_TRACE(trial.describe());
          ASSERT_TRUE(ran);
          ASSERT_TRUE(
              isClose(unary.mnemonic, trial.outputs[0], unary.apply(*input)));
        }
      }
    }
  });
}

TEST(Property, BinaryScaleCast) {
  forDraws(3, [](Random &random) {
    std::vector<std::string> names = {"add", "sub", "mul", "scale", "cast"};
    for (const std::string &name : names) {
      int64_t rank = random.integer(0, 4), axes = random.integer(0, rank);
      Shape leading = anyLeading(random, rank);
      bool isStatic = random.chance(0.25);
      auto spec = [&](const Shape &shape) {
        return isStatic ? shape : Shape(shape.size(), Free);
      };
      auto trailing = [&] {
        return Shape(leading.end() - axes, leading.end());
      };
      DType type = anyFloat(random), other = anyFloat(random);
      const Binary *binary = nullptr;
      for (const Binary &entry : Binaries)
        if (name == entry.mnemonic)
          binary = &entry;
      Program program(name);
      program.operand("x", type, spec(leading));
      program.showResults = false;
      if (binary)
        program.operand("v", other, spec(trailing()));
      double factor = random.pick({0.5, -3.0, 0.1});
      if (name == "scale")
        program.operands += factor == 0.1   ? " by 0.1"
                            : factor == 0.5 ? " by 0.5"
                                            : " by -3.0";
      if (name == "cast") {
        program.showResults = true;
        program.separator = " to ";
      }
      DType result = name == "cast" ? other : type;
      program.result(result, spec(leading));
      SCOPED_TRACE(program.module());
      auto executable = compile(program.module(), anyVectorBits(random));
      ASSERT_TRUE(executable);
      for (int call = 0; call < (isStatic ? 1 : Calls); ++call) {
        if (call)
          leading = anyLeading(random, rank);
        Trial trial(random, program);
        const Array *x = trial.input(leading,
                                     normals(random, name == "cast" ? 100 : 1)),
                    *v = nullptr;
        if (binary)
          v = trial.input(trailing(), normals(random));
        bool ran = trial.run(*executable, {leading});
        SCOPED_TRACE(trial.describe());
        ASSERT_TRUE(ran);
        Array want = name == "cast" ? *x
                     : binary       ? binary->apply(*x, *v)
                                    : reference::scale(*x, factor);
        ASSERT_TRUE(isClose(name, trial.outputs[0], want));
        // One rounding: the nearest number of the type, to the bit. The factor
        // is rounded to f32 first.
        if (name != "scale") {
          Tensor rounded = take(Tensor::empty(result, leading));
          for (int64_t i = 0; i < want.size(); ++i) {
            // Sums and products of the arguments are exact in f64, then f32.
            float once = static_cast<float>(want.data[i]);
            storeScalar(result, rounded.dataAs<char>() + i * dtypeSize(result),
                        static_cast<double>(once));
          }
          EXPECT_EQ(toArray(rounded).data, toArray(trial.outputs[0]).data);
        }
      }
    }
  });
}

// Chains that the compiler fuses into one loop.
TEST(Property, ElementwiseChain) {
  forDraws(6, [](Random &random) {
    int64_t D = random.pick<int64_t>({1, 3, 8, 17, 64});
    int64_t count = random.integer(2, 8);
    std::string body, value = "%x";
    const std::string type = "tensor<?x?x" + std::to_string(D) + "xf32>";
    const std::string row = "tensor<" + std::to_string(D) + "xf32>";
    std::vector<int64_t> ops;
    for (int64_t i = 0; i < count; ++i) {
      int64_t op = random.integer(0, 8);
      ops.push_back(op);
      std::string next = "%v" + std::to_string(i);
      // No exponential: a chain of them overflows.
      if (op == 1)
        ops.back() = op = 0;
      if (op < 6)
        body += "  " + next + " = ssm." + Unaries[op].mnemonic + " " + value +
                " : " + type + "\n";
      else
        body += "  " + next + " = ssm." + Binaries[op - 6].mnemonic + " " +
                value + ", " +
                (i % 2 ? "%w : " + type + ", " + row
                       : "%x : " + type + ", " + type) +
                "\n";
      value = next;
    }
    std::string source = "func.func @main(%x: " + type + ", %w: " + row +
                         ") -> (" + type + ") {\n" + body + "  return " +
                         value + " : " + type + "\n}\n";
    SCOPED_TRACE(source);
    auto executable = compile(source, anyVectorBits(random));
    ASSERT_TRUE(executable);
    Program signature("chain", &random);
    signature.operand("x", DType::F32, {Free, Free, D});
    signature.operand("w", DType::F32, {D});
    signature.result(DType::F32, {Free, Free, D});
    for (int call = 0; call < Calls; ++call) {
      Shape shape = join(anyLeading(random, 2), D);
      Trial trial(random, signature);
      const Array *x = trial.input(shape, normals(random));
      const Array *w = trial.input({D}, normals(random));
      trial.slack = 10;
      bool ran = trial.run(*executable, {shape});
      SCOPED_TRACE(trial.describe());
      ASSERT_TRUE(ran);
      Array want = *x;
      std::vector<double> largest(x->size(), 0.0);
      for (int64_t i = 0; i < count; ++i) {
        want = ops[i] < 6 ? Unaries[ops[i]].apply(want)
                          : Binaries[ops[i] - 6].apply(want, i % 2 ? *w : *x);
        for (int64_t k = 0; k < want.size(); ++k)
          largest[k] = std::max(
              {largest[k], std::abs(want.data[k]), std::abs(x->data[k])});
      }
      // Errors of the parts add up, and differences magnify them.
      want.magnitude = largest;
      ASSERT_TRUE(isClose("chain", trial.outputs[0], want, 10));
    }
  });
}

//===----------------------------------------------------------------------===//
// Quantization
//===----------------------------------------------------------------------===//

TEST(Property, QuantizeAndDequantize) {
  forDraws(8, [](Random &random) {
    using reference::Granularity;
    int64_t D = random.pick<int64_t>({1, 2, 3, 7, 8, 9, 16, 17, 64, 65});
    int64_t rank = random.integer(0, 3);
    bool isStatic = random.chance(0.25);
    Shape leading = anyLeading(random, rank),
          spec = isStatic ? leading : Shape(rank, Free);
    auto granularity = random.pick(
        {Granularity::Tensor, Granularity::Token, Granularity::Channel});
    std::string word = granularity == Granularity::Tensor  ? " tensor"
                       : granularity == Granularity::Token ? " token"
                                                           : " channel";
    auto scaleShape = [&](const Shape &base) {
      return granularity == Granularity::Tensor  ? Shape{}
             : granularity == Granularity::Token ? base
                                                 : Shape{D};
    };
    DType q = random.pick({DType::I8, DType::F8E4M3FN});
    auto kind = q == DType::I8 ? reference::QuantizedType::I8
                               : reference::QuantizedType::F8E4M3FN;
    DType x = anyFloat(random), y = anyFloat(random);
    Program quantize("quantize", &random);
    quantize.operand("x", x, join(spec, D));
    quantize.operands += word;
    quantize.result(q, join(spec, D));
    quantize.result(DType::F32, scaleShape(spec));
    Program dequantize("dequantize", &random);
    dequantize.operand("q", q, join(spec, D));
    dequantize.operand("scale", DType::F32, scaleShape(spec));
    dequantize.operands += word;
    dequantize.result(y, join(spec, D));
    auto narrow = compile(quantize.module(), anyVectorBits(random));
    auto widen = compile(dequantize.module(), anyVectorBits(random));
    ASSERT_TRUE(narrow && widen);
    for (int call = 0; call < (isStatic ? 1 : Calls); ++call) {
      if (call)
        leading = anyLeading(random, rank);
      Shape shape = join(leading, D);
      {
        SCOPED_TRACE(quantize.module());
        Trial trial(random, quantize);
        double odds = random.chance(0.3) ? 0.05 : 0,
               zeros = random.pick({0.0, 0.0, 0.3, 1.0});
        const Array *input = trial.input(shape, [&]() -> double {
          return random.chance(odds)    ? NaN
                 : random.chance(zeros) ? 0.0
                                        : random.normal();
        });
        bool ran = trial.run(*narrow, {shape, scaleShape(leading)});
        SCOPED_TRACE(trial.describe());
        ASSERT_TRUE(ran);
        reference::Quantized want =
            reference::quantize(*input, kind, granularity);
        ASSERT_TRUE(isClose("quantize scale", trial.outputs[1], want.scale));
        Array got = toArray(trial.outputs[0]);
        for (int64_t i = 0; i < got.size(); ++i) {
          double exact =
              input->data[i] /
              want.scale.data[reference::scaleIndex(shape, i, granularity)];
          if (std::isnan(want.q.data[i])) {
            ASSERT_TRUE(std::isnan(got.data[i])) << "element " << i;
            continue;
          }
          if (std::isnan(exact)) {
            ASSERT_EQ(got.data[i], 0) << "element " << i;
            continue;
          }
          // The quotient in f32 may fall to the other side of a tie.
          ASSERT_LE(std::abs(got.data[i] - exact),
                    std::abs(want.q.data[i] - exact) + 1e-6 * std::abs(exact))
              << "element " << i << ": expected " << want.q.data[i] << ", got "
              << got.data[i];
        }
      }
      {
        SCOPED_TRACE(dequantize.module());
        Trial trial(random, dequantize);
        const Array *numbers = trial.input(shape, normals(random, 40));
        const Array *scale = trial.input(
            scaleShape(leading), [&] { return random.uniform(0.01, 0.1); });
        bool ran = trial.run(*widen, {shape});
        SCOPED_TRACE(trial.describe());
        ASSERT_TRUE(ran);
        ASSERT_TRUE(
            isClose("dequantize", trial.outputs[0],
                    reference::dequantize(*numbers, *scale, granularity)));
      }
    }
  });
}
//===----------------------------------------------------------------------===//
// Every chunk, any number of threads
//===----------------------------------------------------------------------===//

Tensor makeTensor(DType type, const Shape &shape, const Generator &generator) {
  Tensor tensor = take(Tensor::empty(type, shape));
  fill(tensor, generator);
  return tensor;
}

std::vector<Tensor> runMain(Executable &executable,
                            const std::vector<Tensor> &inputs) {
  std::vector<Tensor> given = inputs, outputs;
  for (Tensor &tensor : given)
    if (onGPU())
      tensor = take(tensor.to(device()));
  Status status = executable.run("main", given, outputs);
  EXPECT_TRUE(status.isOk()) << status.toString();
  for (Tensor &tensor : outputs)
    if (onGPU())
      tensor = take(tensor.to(Device::cpu()));
  return outputs;
}

bool sameBits(const Tensor &a, const Tensor &b) {
  return a.shape() == b.shape() && a.isContiguous() && b.isContiguous() &&
         !std::memcmp(a.data(), b.data(), a.numBytes());
}

/// A scan with every operand and result, over `D` channels and `N` states.
std::string scanSource(int64_t D, int64_t N, const std::string &options = "") {
  std::string d = std::to_string(D), n = std::to_string(N);
  std::string u = "tensor<?x?x" + d + "xf32>",
              a = "tensor<" + d + "x" + n + "xf32>";
  std::string b = "tensor<?x?x1x" + n + "xf32>",
              h = "tensor<?x" + d + "x" + n + "xf32>";
  return "func.func @main(%u: " + u + ", %delta: " + u + ", %A: " + a +
         ", %B: " + b + ", %C: " + b + ", %h0: " + h + ") -> (" + u + ", " + h +
         ") {\n  %y, %h = ssm.selective_scan %u, %delta, %A, %B, %C "
         "initial_state(%h0 : " +
         h + ") {" + options + "} : " + u + ", " + u + ", " + a + ", " + b +
         ", " + b + " -> " + u + ", " + h + "\n  return %y, %h : " + u + ", " +
         h + "\n}\n";
}

struct ScanInputs {
  ScanInputs(Random &random, int64_t B, int64_t L, int64_t D, int64_t N)
      : tensors{makeTensor(DType::F32, {B, L, D}, normals(random)),
                makeTensor(DType::F32, {B, L, D}, normals(random, 0.5, -1)),
                makeTensor(DType::F32, {D, N},
                           [&random] { return random.uniform(-8, -0.05); }),
                makeTensor(DType::F32, {B, L, 1, N}, normals(random)),
                makeTensor(DType::F32, {B, L, 1, N}, normals(random)),
                makeTensor(DType::F32, {B, D, N}, normals(random))} {}
  reference::ScanResult reference(bool softplus) {
    arrays.clear();
    for (const Tensor &tensor : tensors)
      arrays.push_back(toArray(tensor));
    reference::SelectiveScan op;
    op.u = &arrays[0];
    op.delta = &arrays[1];
    op.A = &arrays[2];
    op.B = &arrays[3];
    op.C = &arrays[4];
    op.initialState = &arrays[5];
    op.deltaSoftplus = softplus;
    return reference::selectiveScan(op);
  }
  float &at(int tensor, int64_t offset) {
    return tensors[tensor].dataAs<float>()[offset];
  }

  std::vector<Tensor> tensors;
  std::vector<Array> arrays;
};

/// The discretized form, of `H` heads with `P` channels and `N` states.
std::string ssdSource(int64_t H, int64_t P, int64_t N,
                      const std::string &form) {
  std::string h = std::to_string(H), p = std::to_string(P),
              n = std::to_string(N);
  std::string x = "tensor<?x?x" + h + "x" + p + "xf32>",
              d = "tensor<?x?x" + h + "xf32>";
  std::string b = "tensor<?x?x1x" + n + "xf32>",
              s = "tensor<?x" + h + "x" + p + "x" + n + "xf32>";
  bool discrete = form == "decay";
  std::string a = discrete ? "" : ", %A: tensor<" + h + "xf32>";
  std::string use = discrete
                        ? " decay(%d : " + d + ")"
                        : " dt(%d : " + d + ") A(%A : tensor<" + h + "xf32>)";
  return "func.func @main(%x: " + x + ", %d: " + d + a + ", %B: " + b +
         ", %C: " + b + ", %s0: " + s + ") -> (" + x + ", " + s +
         ") {\n  %y, %s = ssm.ssd %x" + use +
         " B(%B) C(%C) initial_states(%s0 : " + s + ")" +
         (discrete ? "" : " {dt_softplus}") + " : " + x + ", " + b + ", " + b +
         " -> " + x + ", " + s + "\n  return %y, %s : " + x + ", " + s +
         "\n}\n";
}

struct SSDInputs {
  SSDInputs(Random &random, int64_t B, int64_t L, int64_t H, int64_t P,
            int64_t N, bool discrete)
      : discrete(discrete) {
    tensors.push_back(makeTensor(DType::F32, {B, L, H, P}, normals(random)));
    if (discrete) {
      tensors.push_back(makeTensor(DType::F32, {B, L, H},
                                   [&] { return -std::abs(random.normal()); }));
    } else {
      tensors.push_back(
          makeTensor(DType::F32, {B, L, H}, normals(random, 0.5, -1)));
      tensors.push_back(makeTensor(DType::F32, {H},
                                   [&] { return random.uniform(-8, -0.05); }));
    }
    tensors.push_back(makeTensor(DType::F32, {B, L, 1, N}, normals(random)));
    tensors.push_back(makeTensor(DType::F32, {B, L, 1, N}, normals(random)));
    tensors.push_back(makeTensor(DType::F32, {B, H, P, N}, normals(random)));
  }
  reference::ScanResult reference() {
    arrays.clear();
    for (const Tensor &tensor : tensors)
      arrays.push_back(toArray(tensor));
    reference::SSD op;
    size_t next = 0;
    op.x = &arrays[next++];
    (discrete ? op.decay : op.dt) = &arrays[next++];
    if (!discrete)
      op.A = &arrays[next++];
    op.B = &arrays[next++];
    op.C = &arrays[next++];
    op.initialStates = &arrays[next++];
    op.dtSoftplus = !discrete;
    return reference::ssd(op);
  }
  float &at(int tensor, int64_t offset) {
    return tensors[tensor].dataAs<float>()[offset];
  }

  bool discrete;
  std::vector<Tensor> tensors;
  std::vector<Array> arrays;
};

// The state crosses from chunk to chunk in f32: not a bit may change. With
// states in registers (N = 5) and in memory (N = 33). A GPU runs the chunks at
// a time, and the states at their starts are computed apart: they round
// otherwise.
TEST(Chunks, ScanIsTheSameForEvery) {
  Random random(firstSeed());
  for (int64_t N : {5, 33}) {
    auto executable = compile(scanSource(
        19, N, "delta_softplus, chunk = #ssm.chunk<runtime = @site>"));
    ASSERT_TRUE(executable);
    for (int64_t L : {1, 2, 37, 67}) {
      ScanInputs inputs(random, 2, L, 19, N);
      std::vector<Tensor> whole = runMain(*executable, inputs.tensors);
      reference::ScanResult want = inputs.reference(true);
      EXPECT_TRUE(isClose("selective_scan y", whole[0], want.y));
      EXPECT_TRUE(isClose("selective_scan last_state", whole[1], want.state));
      for (int64_t chunk = 1; chunk <= L + 2; ++chunk) {
        ASSERT_TRUE(executable->setChunk("site", chunk).isOk());
        std::vector<Tensor> outputs = runMain(*executable, inputs.tensors);
        if (onGPU()) {
          EXPECT_TRUE(isClose("selective_scan y", outputs[0], want.y))
              << "chunk " << chunk << " of " << L;
          EXPECT_TRUE(
              isClose("selective_scan last_state", outputs[1], want.state))
              << "chunk " << chunk << " of " << L;
          continue;
        }
        EXPECT_TRUE(sameBits(whole[0], outputs[0]))
            << "chunk " << chunk << " of " << L;
        EXPECT_TRUE(sameBits(whole[1], outputs[1]))
            << "chunk " << chunk << " of " << L;
      }
      ASSERT_TRUE(executable->setChunk("site", 0).isOk());
    }
  }
}

// A chunk moves the borders of the tiles, and with them the order of sums.
TEST(Chunks, SSDIsTheSameForEvery) {
  SKIP_WITHOUT_SSD();
  Random random(firstSeed());
  for (const char *form : {"dt", "decay"}) {
    auto executable = compile(ssdSource(3, 20, 17, form));
    ASSERT_TRUE(executable);
    ASSERT_EQ(executable->chunks().size(), 1u);
    std::string site = executable->chunks()[0].site;
    for (int64_t L : {1, 5, 70, 131}) {
      SSDInputs inputs(random, 2, L, 3, 20, 17, form == std::string("decay"));
      reference::ScanResult want = inputs.reference();
      for (int64_t chunk = 0; chunk <= L + 2; ++chunk) {
        SCOPED_TRACE("chunk " + std::to_string(chunk) + " of " +
                     std::to_string(L));
        ASSERT_TRUE(executable->setChunk(site, chunk).isOk());
        std::vector<Tensor> outputs = runMain(*executable, inputs.tensors);
        ASSERT_TRUE(isClose("ssd y", outputs[0], want.y));
        ASSERT_TRUE(isClose("ssd final_states", outputs[1], want.state));
      }
    }
  }
}

// Steps and decays are read as they lie, whatever their strides: the same
// numbers give the same bits.
TEST(Strides, DoNotChangeSSD) {
  SKIP_WITHOUT_SSD();
  Random random(firstSeed());
  constexpr int64_t H = 3, P = 20, N = 17;
  for (const char *form : {"dt", "decay"}) {
    auto executable = compile(ssdSource(H, P, N, form));
    ASSERT_TRUE(executable);
    for (int64_t L : {1, 3, 70, 131}) {
      SCOPED_TRACE(std::string(form) + " of " + std::to_string(L) + " tokens");
      SSDInputs inputs(random, 2, L, H, P, N, form == std::string("decay"));
      std::vector<Tensor> whole = runMain(*executable, inputs.tensors);
      reference::ScanResult want = inputs.reference();
      ASSERT_TRUE(isClose("ssd y", whole[0], want.y));
      ASSERT_TRUE(isClose("ssd final_states", whole[1], want.state));
      Device where = device();
      Tensor heads = take(Tensor::empty(DType::F32, {2, H, L}, where)),
             tokens = take(Tensor::empty(DType::F32, {L, 2, H}, where)),
             wide = take(Tensor::empty(DType::F32, {2, L, 2 * H + 1}, where));
      for (Tensor view :
           {take(heads.permute({0, 2, 1})), take(tokens.permute({1, 0, 2})),
            take(wide.slice(2, 1, 2 * H + 1, 2)),
            take(wide.slice(2, 2 * H, H, -1))}) {
        SCOPED_TRACE(view.describe());
        ASSERT_TRUE(view.copyFrom(take(inputs.tensors[1].to(where))).isOk());
        std::vector<Tensor> given, outputs;
        for (const Tensor &tensor : inputs.tensors)
          given.push_back(take(tensor.to(where)));
        given[1] = view;
        Status status = executable->run("main", given, outputs);
        ASSERT_TRUE(status.isOk()) << status.toString();
        for (size_t i : {0, 1})
          EXPECT_TRUE(sameBits(take(outputs[i].to(Device::cpu())), whole[i]));
      }
    }
  }
}

TEST(Threads, DoNotChangeScans) {
  if (onGPU())
    GTEST_SKIP() << "for CPUs";
  Random random(firstSeed());
  auto scan = compile(scanSource(41, 16, "delta_softplus"));
  auto ssd = compile(ssdSource(4, 24, 32, "dt"));
  ASSERT_TRUE(scan && ssd);
  ScanInputs scanInputs(random, 3, 150, 41, 16);
  SSDInputs ssdInputs(random, 3, 150, 4, 24, 32, false);
  ASSERT_TRUE(context().setThreads(1).isOk());
  std::vector<Tensor> scanOne = runMain(*scan, scanInputs.tensors),
                      ssdOne = runMain(*ssd, ssdInputs.tensors);
  for (int threads : {2, 3, 8}) {
    ASSERT_TRUE(context().setThreads(threads).isOk());
    std::vector<Tensor> scanMany = runMain(*scan, scanInputs.tensors),
                        ssdMany = runMain(*ssd, ssdInputs.tensors);
    for (int i : {0, 1}) {
      EXPECT_TRUE(sameBits(scanOne[i], scanMany[i])) << threads << " threads";
      EXPECT_TRUE(sameBits(ssdOne[i], ssdMany[i])) << threads << " threads";
    }
  }
  ASSERT_TRUE(context().setThreads(2).isOk());
}

TEST(Sizes, NothingToDo) {
  Random random(firstSeed());
  auto scan = compile(scanSource(9, 4));
  auto ssd = hasSSD() ? compile(ssdSource(2, 5, 6, "dt")) : nullptr;
  ASSERT_TRUE(scan && (ssd || !hasSSD()));
  for (auto [B, L] : {std::pair<int64_t, int64_t>{0, 0}, {0, 5}, {3, 0}}) {
    // Without tokens the state is the initial one.
    ScanInputs a(random, B, L, 9, 4);
    std::vector<Tensor> outputs = runMain(*scan, a.tensors);
    EXPECT_EQ(outputs[0].shape(), (Shape{B, L, 9}));
    EXPECT_TRUE(sameBits(outputs[1], a.tensors[5]));
    if (!ssd)
      continue;
    SSDInputs b(random, B, L, 2, 5, 6, false);
    outputs = runMain(*ssd, b.tensors);
    EXPECT_EQ(outputs[0].shape(), (Shape{B, L, 2, 5}));
    EXPECT_TRUE(sameBits(outputs[1], b.tensors[5]));
  }
}

//===----------------------------------------------------------------------===//
// Numbers that are not finite
//===----------------------------------------------------------------------===//

/// The NaN of arithmetic, and one with every payload bit set.
float quietNaN() { return std::numeric_limits<float>::quiet_NaN(); }
float fullNaN() {
  uint32_t bits = 0x7fffffff;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// A bad input reaches the later tokens of its channel and nothing else.
TEST(NonFinite, ScanStaysInItsChannel) {
  Random random(firstSeed());
  int64_t B = 2, L = 40, D = 19;
  for (int64_t N : {3, 33}) {
    auto executable = compile(scanSource(D, N, "delta_softplus"));
    ASSERT_TRUE(executable);
    ScanInputs inputs(random, B, L, D, N);
    Tensor clean = runMain(*executable, inputs.tensors)[0];
    for (float bad :
         {quietNaN(), fullNaN(), std::numeric_limits<float>::infinity()})
      for (int tensor : {0, 1})
        for (int64_t t : {0, 1, 17, 39})
          for (int64_t d : {0, 7, 8, 18}) {
            SCOPED_TRACE("tensor " + std::to_string(tensor) + " token " +
                         std::to_string(t) + " channel " + std::to_string(d) +
                         " value " + std::to_string(bad));
            float &element = inputs.at(tensor, (L + t) * D + d);
            float good = element;
            element = bad;
            std::vector<Tensor> outputs = runMain(*executable, inputs.tensors);
            reference::ScanResult want = inputs.reference(true);
            ASSERT_TRUE(isClose("selective_scan y", outputs[0], want.y));
            ASSERT_TRUE(
                isClose("selective_scan last_state", outputs[1], want.state));
            for (int64_t i = 0; i < clean.numElements(); ++i) {
              bool poisoned = i / (L * D) == 1 && i % D == d && i / D % L >= t;
              float got = outputs[0].dataAs<float>()[i];
              if (poisoned)
                ASSERT_FALSE(std::isfinite(got)) << "element " << i;
              else
                ASSERT_EQ(got, clean.dataAs<float>()[i]) << "element " << i;
            }
            element = good;
          }
  }
}

// A rate that is not a number makes its state one that is not, whatever bits
// the NaN has.
TEST(NonFinite, ScanRates) {
  Random random(firstSeed());
  int64_t L = 6, D = 9, N = 4;
  auto executable = compile(scanSource(D, N, "delta_softplus"));
  ASSERT_TRUE(executable);
  for (float bad : {quietNaN(), fullNaN(), -fullNaN()}) {
    ScanInputs inputs(random, 1, L, D, N);
    inputs.at(2, 3 * N + 2) = bad;
    inputs.at(5, 3 * N + 2) = 0;
    std::vector<Tensor> outputs = runMain(*executable, inputs.tensors);
    reference::ScanResult want = inputs.reference(true);
    EXPECT_TRUE(isClose("selective_scan y", outputs[0], want.y));
    EXPECT_TRUE(isClose("selective_scan last_state", outputs[1], want.state));
  }
}

TEST(NonFinite, SSDStaysInItsChannel) {
  SKIP_WITHOUT_SSD();
  Random random(firstSeed());
  int64_t B = 2, L = 75, H = 3, P = 20, N = 9;
  for (const char *form : {"dt", "decay"}) {
    auto executable = compile(ssdSource(H, P, N, form));
    ASSERT_TRUE(executable);
    for (int64_t length : {L, int64_t(3)}) {
      SSDInputs inputs(random, B, length, H, P, N,
                       form == std::string("decay"));
      Tensor clean = runMain(*executable, inputs.tensors)[0];
      for (float bad :
           {quietNaN(), fullNaN(), std::numeric_limits<float>::infinity()})
        for (int tensor : {0, 1})
          for (int64_t t : {0, 2, 62, 63, 64, 70, 74})
            for (int64_t p : {0, 17}) {
              if (t >= length)
                continue;
              int64_t h = 1;
              SCOPED_TRACE(std::string(form) + " tensor " +
                           std::to_string(tensor) + " token " +
                           std::to_string(t) + " of " + std::to_string(length) +
                           " channel " + std::to_string(p) + " value " +
                           std::to_string(bad));
              int64_t token = length + t;
              float &element =
                  inputs.at(tensor, tensor == 0 ? (token * H + h) * P + p
                                                : token * H + h);
              float good = element;
              element = bad;
              Tensor y = runMain(*executable, inputs.tensors)[0];
              element = good;
              for (int64_t i = 0; i < clean.numElements(); ++i) {
                int64_t row = i / P / H;
                bool poisoned = row / length == 1 && row % length >= t &&
                                i / P % H == h && (tensor == 1 || i % P == p);
                float got = y.dataAs<float>()[i];
                if (poisoned)
                  ASSERT_FALSE(std::isfinite(got))
                      << "element " << i << ", token " << row % length;
                else if (onGPU())
                  // A warp that sees such a value takes the form of the
                  // recurrence that can stand it, for all of its channels.
                  ASSERT_NEAR(got, clean.dataAs<float>()[i],
                              1e-5 * (1 + std::fabs(clean.dataAs<float>()[i])))
                      << "element " << i << ", token " << row % length;
                else
                  ASSERT_EQ(got, clean.dataAs<float>()[i])
                      << "element " << i << ", token " << row % length;
              }
            }
    }
  }
}

// All heads of a group read one B and C of a token: a bad C spoils its
// token, a bad B the tokens from there on.
TEST(NonFinite, SSDInputsOfAToken) {
  SKIP_WITHOUT_SSD();
  Random random(firstSeed());
  int64_t L = 75, H = 3, P = 20, N = 9;
  auto executable = compile(ssdSource(H, P, N, "dt"));
  ASSERT_TRUE(executable);
  SSDInputs inputs(random, 1, L, H, P, N, false);
  Tensor clean = runMain(*executable, inputs.tensors)[0];
  for (int tensor : {3, 4})
    for (int64_t t : {0, 2, 62, 63, 64, 70, 74}) {
      SCOPED_TRACE("tensor " + std::to_string(tensor) + " token " +
                   std::to_string(t));
      float &element = inputs.at(tensor, t * N + 4);
      float good = element;
      element = quietNaN();
      Tensor y = runMain(*executable, inputs.tensors)[0];
      element = good;
      for (int64_t i = 0; i < clean.numElements(); ++i) {
        int64_t token = i / P / H;
        bool poisoned = tensor == 3 ? token >= t : token == t;
        float got = y.dataAs<float>()[i];
        if (poisoned)
          ASSERT_TRUE(std::isnan(got))
              << "element " << i << ", token " << token;
        else
          ASSERT_EQ(got, clean.dataAs<float>()[i])
              << "element " << i << ", token " << token;
      }
    }
}

TEST(NonFinite, ConvolutionSpoilsItsWindow) {
  Random random(firstSeed());
  int64_t L = 20, D = 19, W = 4;
  auto executable =
      compile("func.func @main(%x: tensor<?x?x19xf32>, %w: tensor<19x4xf32>) "
              "-> tensor<?x?x19xf32> {\n"
              "  %y = ssm.causal_conv %x, %w : tensor<?x?x19xf32>, "
              "tensor<19x4xf32> -> tensor<?x?x19xf32>\n"
              "  return %y : tensor<?x?x19xf32>\n}\n");
  ASSERT_TRUE(executable);
  Tensor x = makeTensor(DType::F32, {1, L, D}, normals(random)),
         w = makeTensor(DType::F32, {D, W}, normals(random));
  Tensor clean = runMain(*executable, {x, w})[0];
  for (int64_t t : {0, 5, 19})
    for (int64_t d : {0, 7, 18}) {
      float &element = x.dataAs<float>()[t * D + d], good = element;
      element = quietNaN();
      Tensor y = runMain(*executable, {x, w})[0];
      element = good;
      for (int64_t i = 0; i < y.numElements(); ++i) {
        bool poisoned = i % D == d && i / D >= t && i / D < t + W;
        ASSERT_EQ(std::isnan(y.dataAs<float>()[i]), poisoned)
            << "element " << i;
        if (!poisoned)
          ASSERT_EQ(y.dataAs<float>()[i], clean.dataAs<float>()[i])
              << "element " << i;
      }
    }
}

//===----------------------------------------------------------------------===//
// Extremes
//===----------------------------------------------------------------------===//

// Element by element over all orders of magnitude, whole vectors and the rest.
TEST(Extremes, Unary) {
  std::vector<double> values = {0.0,    -0.0,  Inf,    -Inf, NaN,  1e-45,
                                -1e-45, 1e-38, -1e-38, 3e38, -3e38};
  for (double x = -120; x <= 120; x += 0.37)
    values.push_back(x);
  for (double x = 1e-30; x < 1e30; x *= 3.1) {
    values.push_back(x);
    values.push_back(-x);
  }
  size_t next = 0;
  Tensor x = makeTensor(DType::F32, {static_cast<int64_t>(values.size())},
                        [&] { return values[next++]; });
  Array exact = toArray(x);
  for (const Unary &unary : Unaries) {
    std::string name = unary.mnemonic;
    auto executable = compile(
        "func.func @main(%x: tensor<?xf32>) -> tensor<?xf32> {\n  %y = ssm." +
        name + " %x : tensor<?xf32>\n  return %y : tensor<?xf32>\n}\n");
    ASSERT_TRUE(executable);
    Tensor y = runMain(*executable, {x})[0];
    Array want = unary.apply(exact);
    for (int64_t i = 0; i < want.size(); ++i) {
      double got = static_cast<double>(y.dataAs<float>()[i]),
             expected = want.data[i];
      float rounded = static_cast<float>(expected);
      if (!std::isfinite(rounded)) {
        EXPECT_TRUE(std::isnan(rounded) ? std::isnan(got)
                                        : got == static_cast<double>(rounded))
            << name << "(" << exact.data[i] << "): expected " << rounded
            << ", got " << got;
        continue;
      }
      // gelu's factor has an absolute error; others lose denormal results only,
      // which the quotient by an overflown exponential flushes.
      // A GPU rounds the exponent to f32 before it is exponentiated.
      double relative =
          onGPU() ? 1e-6 + 1.5e-7 * std::min(std::abs(exact.data[i]), 120.0)
                  : 5e-7;
      double bound = relative * std::abs(expected) +
                     (name == "gelu" ? 2e-7 * std::abs(exact.data[i]) : 0) +
                     (name == "silu" ? 2e-36 : 2e-38);
      EXPECT_LE(std::abs(got - expected), bound)
          << name << "(" << exact.data[i] << "): expected " << expected
          << ", got " << got;
    }
  }
}

/// Numbers of every magnitude, ties of the narrow types, and what is not
/// finite.
std::vector<float> anyBits(Random &random) {
  std::vector<float> values = {
      0.0f,      -0.0f,      65504.0f,    65519.9f,    65520.0f,
      -65520.0f, 3.3895e38f, 3.4e38f,     6.0e-8f,     2.98e-8f,
      2.99e-8f,  1e-40f,     1.00390625f, 1.01171875f, 1.00048828125f};
  // Infinities, and NaN with payloads that a narrow type cannot hold.
  for (uint32_t bits : {0x7f800000u, 0xff800000u, 0x7fc00000u, 0x7fffffffu,
                        0xffffffffu, 0x7f800001u, 0xff800001u}) {
    values.emplace_back();
    std::memcpy(&values.back(), &bits, sizeof bits);
  }
  while (values.size() < 4001) {
    uint32_t bits = static_cast<uint32_t>(random.integer(0, 0xffffffff));
    // Half of them on ties of bf16 or f16.
    if (random.chance(0.5))
      bits = (bits & 0xffff0000u) | 0x8000u;
    else if (random.chance(0.5))
      bits = (bits & 0xffffe000u) | 0x1000u;
    values.emplace_back();
    std::memcpy(&values.back(), &bits, sizeof bits);
  }
  return values;
}

TEST(Extremes, Casts) {
  Random random(firstSeed());
  std::vector<float> values = anyBits(random);
  auto count = static_cast<int64_t>(values.size());
  for (DType from : {DType::F32, DType::F16, DType::BF16})
    for (DType to : {DType::F32, DType::F16, DType::BF16}) {
      if (from == to)
        continue;
      std::string a = typeText(from, {Free}), b = typeText(to, {Free});
      auto executable = compile("func.func @main(%x: " + a + ") -> " + b +
                                " {\n  %y = ssm.cast %x : " + a + " to " + b +
                                "\n  return %y : " + b + "\n}\n");
      ASSERT_TRUE(executable);
      Tensor x = take(Tensor::empty(DType::F32, {count}));
      std::copy(values.begin(), values.end(), x.dataAs<float>());
      x = take(x.to(from));
      Tensor want = take(x.to(to)), got = runMain(*executable, {x})[0];
      size_t size = dtypeSize(to);
      for (int64_t i = 0; i < count; ++i) {
        double expected = loadScalar(to, want.dataAs<char>() + i * size),
               found = loadScalar(to, got.dataAs<char>() + i * size);
        EXPECT_TRUE(std::isnan(expected)
                        ? std::isnan(found)
                        : expected == found &&
                              std::signbit(expected) == std::signbit(found))
            << a << " "
            << loadScalar(from, x.dataAs<char>() + i * dtypeSize(from))
            << " to " << b << ": expected " << expected << ", got " << found;
      }
    }
}

// With the largest magnitude in the tensor the scale is 1, and quantizing is
// rounding.
TEST(Extremes, RoundingOfQuantize) {
  Random random(firstSeed());
  for (DType type : {DType::I8, DType::F8E4M3FN}) {
    double largest = type == DType::I8 ? 127 : 448;
    std::string q = typeText(type, {Free});
    auto executable = compile(
        "func.func @main(%x: tensor<?xf32>) -> (" + q +
        ", tensor<f32>) {\n  %q, %s = ssm.quantize %x tensor"
        " : tensor<?xf32> -> " +
        q + ", tensor<f32>\n  return %q, %s : " + q + ", tensor<f32>\n}\n");
    ASSERT_TRUE(executable);
    std::vector<double> values = {largest, -largest, NaN, 0.0, -0.0};
    // Every number of the type, every tie, and what lies beside it.
    for (int i = -127; i < 127; ++i)
      for (double offset : {0.0, 0.5, 0.4999, 0.5001})
        values.push_back(i + offset);
    for (int code = 0; code < 0x7e; ++code) {
      double low =
          static_cast<double>(f8E4M3FNToFloat(static_cast<uint8_t>(code)));
      double high =
          static_cast<double>(f8E4M3FNToFloat(static_cast<uint8_t>(code + 1)));
      for (double part : {0.0, 0.25, 0.4999, 0.5, 0.5001, 0.75})
        if (double v = low + part * (high - low); v <= largest)
          values.insert(values.end(), {v, -v});
    }
    size_t next = 0;
    Tensor x = makeTensor(DType::F32, {static_cast<int64_t>(values.size())},
                          [&] { return values[next++]; });
    std::vector<Tensor> outputs = runMain(*executable, {x});
    EXPECT_EQ(outputs[1].dataAs<float>()[0], 1.0f);
    Array exact = toArray(x), got = toArray(outputs[0]);
    for (int64_t i = 0; i < exact.size(); ++i) {
      double want = reference::roundTo(type == DType::I8
                                           ? reference::QuantizedType::I8
                                           : reference::QuantizedType::F8E4M3FN,
                                       exact.data[i]);
      EXPECT_TRUE(std::isnan(want) ? std::isnan(got.data[i])
                                   : want == got.data[i])
          << dtypeName(type) << " of " << exact.data[i] << ": expected " << want
          << ", got " << got.data[i];
    }
  }
}

TEST(Extremes, EveryQuantizedNumber) {
  for (DType type : {DType::I8, DType::F8E4M3FN})
    for (DType to : {DType::F32, DType::F16, DType::BF16}) {
      std::string q = typeText(type, {Free}), y = typeText(to, {Free});
      auto executable = compile(
          "func.func @main(%q: " + q + ", %s: tensor<f32>) -> " + y +
          " {\n  %y = ssm.dequantize %q, %s tensor"
          " : " +
          q + ", tensor<f32> -> " + y + "\n  return %y : " + y + "\n}\n");
      ASSERT_TRUE(executable);
      Tensor codes = take(Tensor::empty(type, {256}));
      for (int i = 0; i < 256; ++i)
        codes.dataAs<uint8_t>()[i] = static_cast<uint8_t>(i);
      Tensor got =
          runMain(*executable,
                  {codes, makeTensor(DType::F32, {}, [] { return 1.0; })})[0];
      Array want = toArray(take(codes.to(to))), found = toArray(got);
      for (int i = 0; i < 256; ++i)
        EXPECT_TRUE(std::isnan(want.data[i]) ? std::isnan(found.data[i])
                                             : want.data[i] == found.data[i])
            << dtypeName(type) << " code " << i << ": expected " << want.data[i]
            << ", got " << found.data[i];
    }
}

// The tails of softplus in a scan: steps of all sizes, one token, one state.
TEST(Extremes, SoftplusOfScans) {
  std::vector<double> steps = {-104, -100, -90,   -88,   -60, -30,  -20, -16,
                               -10,  -5,   -1,    -1e-3, 0,   1e-3, 1,   5,
                               10,   15,   20,    30,    60,  88,   90,  100,
                               1000, 1e10, -1000, -1e10, -Inf};
  auto executable = compile(scanSource(29, 1, "delta_softplus"));
  ASSERT_TRUE(executable);
  size_t next = 0;
  auto one = [] { return 1.0; };
  std::vector<Tensor> inputs = {
      makeTensor(DType::F32, {1, 1, 29}, one),
      makeTensor(DType::F32, {1, 1, 29}, [&] { return steps[next++]; }),
      makeTensor(DType::F32, {29, 1}, [] { return -1.0; }),
      makeTensor(DType::F32, {1, 1, 1, 1}, one),
      makeTensor(DType::F32, {1, 1, 1, 1}, one),
      makeTensor(DType::F32, {1, 29, 1}, [] { return 0.0; })};
  Tensor y = runMain(*executable, inputs)[0];
  for (int64_t i = 0; i < 29; ++i) {
    double want =
        reference::softplus(static_cast<double>(inputs[1].dataAs<float>()[i]));
    double relative =
        onGPU() ? 1e-6 + 1.5e-7 * std::min(std::abs(steps[i]), 120.0) : 3e-7;
    EXPECT_NEAR(y.dataAs<float>()[i], want, relative * want + 2e-38)
        << "softplus(" << steps[i] << ")";
  }
}

// Decays from growth beyond f32 to none at all. Steps of 1 and one token: the
// state is the decay.
TEST(Extremes, DecaysOfScans) {
  std::vector<double> rates = {
      100, 89,  88.7, 88,  10,   1,    1e-3, 1e-7, 0,     -1e-7, -1e-3, -1,
      -10, -80, -87,  -88, -100, -104, -200, -1e4, -1e10, -1e30, Inf,   -Inf};
  int64_t D = static_cast<int64_t>(rates.size());
  auto executable = compile(scanSource(D, 1));
  ASSERT_TRUE(executable);
  size_t next = 0;
  auto zero = [] { return 0.0; };
  auto one = [] { return 1.0; };
  std::vector<Tensor> inputs = {
      makeTensor(DType::F32, {1, 1, D}, zero),
      makeTensor(DType::F32, {1, 1, D}, one),
      makeTensor(DType::F32, {D, 1}, [&] { return rates[next++]; }),
      makeTensor(DType::F32, {1, 1, 1, 1}, one),
      makeTensor(DType::F32, {1, 1, 1, 1}, one),
      makeTensor(DType::F32, {1, D, 1}, one)};
  Tensor y = runMain(*executable, inputs)[0];
  for (int64_t i = 0; i < D; ++i) {
    double rate = static_cast<double>(inputs[2].dataAs<float>()[i]);
    double want = std::exp(rate),
           got = static_cast<double>(y.dataAs<float>()[i]);
    if (!std::isfinite(static_cast<float>(want)))
      EXPECT_EQ(got, Inf) << "exp(" << rate << ")";
    else
      // The exponent is rounded to f32 before it is exponentiated.
      EXPECT_NEAR(got, want,
                  (onGPU() ? 2 : 1) *
                          (2e-7 + 1.2e-7 * std::abs(std::max(rate, -1e3))) *
                          want +
                      2e-38)
          << "exp(" << rate << ")";
  }
}

// The matrix form takes differences of sums of the logarithms: tokens that
// forget everything must not cost the accuracy of those behind them.
TEST(Extremes, SSDResets) {
  SKIP_WITHOUT_SSD();
  Random random(firstSeed());
  int64_t L = 150, H = 2, P = 12, N = 10;
  auto executable = compile(ssdSource(H, P, N, "decay"));
  ASSERT_TRUE(executable);
  for (double reset : {-50.0, -1e3, -1e5, -1e7, -1e10, -1e30, -Inf}) {
    SCOPED_TRACE("logarithm of the decay " + std::to_string(reset));
    SSDInputs inputs(random, 1, L, H, P, N, true);
    for (int64_t i = 0; i < L * H; ++i)
      inputs.at(1, i) = static_cast<float>(
          random.chance(0.1) ? reset : -0.1 * std::abs(random.normal()));
    std::vector<Tensor> outputs = runMain(*executable, inputs.tensors);
    reference::ScanResult want = inputs.reference();
    EXPECT_TRUE(isClose("ssd y", outputs[0], want.y));
    EXPECT_TRUE(isClose("ssd final_states", outputs[1], want.state));
  }
}

// Growth that overflows: infinite where the exact value is, never a wrong
// finite number.
TEST(Extremes, Overflow) {
  Random random(firstSeed());
  int64_t L = 60, D = 11, N = 3;
  auto scan = compile(scanSource(D, N, "delta_softplus"));
  ASSERT_TRUE(scan);
  ScanInputs inputs(random, 1, L, D, N);
  for (int64_t i = 0; i < D * N; ++i)
    inputs.at(2, i) = 20;
  std::vector<Tensor> outputs = runMain(*scan, inputs.tensors);
  reference::ScanResult want = inputs.reference(true);
  for (int64_t i = 0; i < L * D; ++i) {
    double expected = want.y.data[i];
    float got = outputs[0].dataAs<float>()[i];
    // Intermediate values may overflow a little before the result does.
    if (std::abs(expected) > 1e38)
      EXPECT_TRUE(!std::isfinite(got) || std::abs(got) > 1e37f)
          << "element " << i << ": " << got;
    else if (want.y.magnitude[i] < 1e37)
      EXPECT_NEAR(got, expected, 1e-4 * want.y.magnitude[i]) << "element " << i;
  }
}

} // namespace
