//===- SOL.cpp - The SSD suite of SOL-ExecBench ---------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// L2/043_mamba_chunk_scan_with_segsum of NVIDIA's SOL-ExecBench (arXiv
// 2603.19173): a discretized SSD of 16 heads of 64 channels with 256 states in
// one group, all in bf16, from initial states to final ones, at 16 sizes.
// Shapes, distributions, tolerances and the way of timing are the suite's; the
// reference is the recurrence in float64, and the clock of the device is read
// by events around all kernels of a run.
//
//===----------------------------------------------------------------------===//

#include "DeviceOps.h"
#include "JsonOption.h"
#include "Workload.h"
#include "corey/Analysis/RegionCost.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/Support/CommandLine.h"
#include "llvm/Support/Format.h"
#include "llvm/Support/Parallel.h"
#include "llvm/Support/raw_ostream.h"
#include <chrono>
#include <cmath>
#include <random>

using namespace corey;
namespace cl = llvm::cl;

static constexpr const char *kTool = "corey-bench";

namespace {
constexpr int64_t kHeads = 16, kChannels = 64, kStates = 256, kGroups = 1;
/// Of what must match at least |expected| * kRelative plus the case's absolute
/// tolerance, and the share of elements that must.
constexpr double kRelative = 0.05, kRequiredRatio = 0.99;

struct SuiteCase {
  int64_t batch, length;
  double absolute;
};
constexpr SuiteCase kCases[] = {
    {1, 1024, 0.022}, {1, 997, 0.019},  {16, 512, 0.031}, {1, 256, 0.014},
    {4, 541, 0.029},  {4, 1879, 0.035}, {4, 256, 0.024},  {2, 512, 0.026},
    {8, 1024, 0.037}, {1, 4096, 0.031}, {16, 256, 0.046}, {32, 256, 0.036},
    {2, 293, 0.020},  {4, 2048, 0.034}, {2, 1321, 0.028}, {4, 1024, 0.029}};
constexpr int64_t kNumCases = std::size(kCases);

struct Settings {
  std::string policy, variant;
  int64_t chunk = 0;
  bool slowDecay = false, headMajor = true;
  int repetitions = 50;
  double budgetMs = 1000;
};

/// How close an output is to what it should be.
struct Match {
  double ratio = 0, relativeL2 = 0, maxAbsolute = 0;
  bool finite = true, zero = true;
  bool passes() const { return finite && !zero && ratio >= kRequiredRatio; }
};

struct CaseResult {
  /// What came in place of a measurement.
  Status status;
  double medianUs = NAN, lowUs = NAN, highUs = NAN, graphUs = NAN, warmUs = NAN;
  int64_t repetitions = 0, sets = 0;
  ChunkInfo ran;
  /// Of y and the final states; the worse of two runs of each.
  Match y, states;
  bool passes() const { return status.isOk() && y.passes() && states.passes(); }
};

/// Least times on a machine, in microseconds; NaN for one that is not known.
struct Floor {
  double bytes = 0, flops = 0;
  double bytesUs = NAN, flopsUs = NAN;
  double us() const { return std::max(bytesUs, flopsUs); }
};
} // namespace

/// A tensor of numbers drawn in parallel by `draw(engine)`.
template <typename F>
static Tensor drawn(const std::vector<int64_t> &shape, uint64_t seed, F draw) {
  constexpr int64_t kBlock = int64_t(1) << 16;
  Tensor tensor = *Tensor::empty(DType::BF16, shape);
  int64_t count = tensor.numElements();
  llvm::parallelFor(0, size_t((count + kBlock - 1) / kBlock), [&](size_t i) {
    std::seed_seq sequence{seed, uint64_t(i)};
    std::mt19937_64 engine(sequence);
    auto own = draw;
    for (int64_t at = int64_t(i) * kBlock, end = std::min(count, at + kBlock);
         at < end; ++at)
      storeScalar(DType::BF16, tensor.dataAs<uint16_t>() + at, own(engine));
  });
  return tensor;
}

/// The operands of a case on the host, the decay in the suite's order, heads
/// before tokens, in memory.
static SSDOperands operandsOf(const SuiteCase &c, const Settings &settings) {
  int64_t B = c.batch, L = c.length;
  uint64_t seed = 200 + 8 * uint64_t(&c - kCases);
  auto normal = [](std::mt19937_64 &engine) {
    return std::normal_distribution<double>()(engine);
  };
  double scale = settings.slowDecay ? 0.01 : 1;
  SSDOperands o;
  o.x = drawn({B, L, kHeads, kChannels}, seed, normal);
  Tensor decay = drawn({B, kHeads, L}, seed + 1, [=](std::mt19937_64 &engine) {
    return scale * std::uniform_real_distribution<double>(-1, -0.001)(engine);
  });
  o.decay = *decay.permute({0, 2, 1});
  o.B = drawn({B, L, kGroups, kStates}, seed + 2, normal);
  o.C = drawn({B, L, kGroups, kStates}, seed + 3, normal);
  o.D = drawn({kHeads}, seed + 4, normal);
  o.initialStates = drawn({B, kHeads, kChannels, kStates}, seed + 5, normal);
  return o;
}

static Floor floorOf(const SuiteCase &c, const MachineRates *machine) {
  double tokens = double(c.batch) * c.length;
  Floor floor;
  floor.bytes =
      2.0 *
      (tokens * (2 * kHeads * kChannels + kHeads + 2 * kGroups * kStates) +
       2.0 * c.batch * kHeads * kChannels * kStates + kHeads);
  floor.flops =
      ssdFlops(c.batch, c.length, kHeads, kChannels, kStates, kGroups);
  if (machine) {
    floor.bytesUs = floor.bytes / machine->bytes * 1e6;
    floor.flopsUs = floor.flops / 2 / machine->matrix * 1e6;
  }
  return floor;
}

static Expected<Match> match(const Tensor &got, const Tensor &expected,
                             double absolute) {
  Expected<Tensor> wide = got.to(DType::F64);
  if (!wide)
    return wide.takeStatus();
  const double *x = wide->dataAs<double>(), *y = expected.dataAs<double>();
  int64_t count = expected.numElements(), matched = 0;
  Match result;
  double error = 0, norm = 0;
  for (int64_t i = 0; i < count; ++i) {
    result.zero &= x[i] == 0;
    norm += y[i] * y[i];
    if (!std::isfinite(x[i])) {
      result.finite = false;
      continue;
    }
    double d = std::fabs(x[i] - y[i]);
    error += d * d;
    result.maxAbsolute = std::max(result.maxAbsolute, d);
    matched += d <= absolute + kRelative * std::fabs(y[i]);
  }
  result.ratio = double(matched) / double(count);
  result.relativeL2 = result.finite ? std::sqrt(error / norm) : INFINITY;
  return result;
}

/// What is worse of two runs.
static Match worseOf(const Match &a, const Match &b) {
  Match result;
  result.ratio = std::min(a.ratio, b.ratio);
  result.relativeL2 = std::max(a.relativeL2, b.relativeL2);
  result.maxAbsolute = std::max(a.maxAbsolute, b.maxAbsolute);
  result.finite = a.finite && b.finite;
  result.zero = a.zero || b.zero;
  return result;
}

namespace {
/// Runs the cases of the suite on a device with one program.
class Suite {
public:
  static Expected<Suite> create(Context &context, const Settings &settings);
  Status measure(const SuiteCase &c, CaseResult &result);
  /// Microseconds that the clock shows for nothing: part of every time but the
  /// warm ones.
  Expected<double> measureNothing();

private:
  /// Tensors of their own for a repetition.
  struct Set {
    std::vector<Tensor> inputs, outputs;
  };

  Expected<Set> makeSet(const std::vector<Tensor> &from) const;
  Status clear(Set &set) const;
  Status check(const Set &set, const std::vector<Tensor> &expected,
               const SuiteCase &c, CaseResult &result, bool isFirst) const;
  /// Milliseconds of `call(i)` for i from -`warmUps` on, other memory being
  /// written before on a GPU.
  Expected<std::vector<double>>
  sample(const std::function<Status(int i, void *stream)> &call, int warmUps,
         int repetitions);

  Settings settings;
  Device device;
  std::shared_ptr<Executable> executable;
  std::shared_ptr<cuda::Device> gpu;
  std::optional<Flush> flush;
};
} // namespace

Expected<Suite> Suite::create(Context &context, const Settings &settings) {
  Suite suite;
  suite.settings = settings;
  suite.device = context.getDevice();
  CompileOptions options;
  options.policy = settings.policy;
  auto executable = context.compile(operandsOf(kCases[3], settings).program(),
                                    options, "<sol>");
  if (!executable)
    return executable.takeStatus();
  suite.executable = *executable;
  if (!settings.variant.empty())
    if (Status status = suite.executable->setVariant("scan", settings.variant);
        !status)
      return status;
  if (settings.chunk)
    if (Status status = suite.executable->setChunk("scan", settings.chunk);
        !status)
      return status;
  if (suite.device.kind != Device::CUDA)
    return suite;
  auto gpu = cuda::Device::get(suite.device.index);
  if (!gpu)
    return gpu.takeStatus();
  suite.gpu = *gpu;
  Expected<Flush> flush = Flush::create(*gpu);
  if (!flush)
    return flush.takeStatus();
  suite.flush = std::move(*flush);
  return suite;
}

Expected<Suite::Set> Suite::makeSet(const std::vector<Tensor> &from) const {
  Set set;
  for (const Tensor &tensor : from) {
    // The decay keeps its order in memory.
    bool permuted = settings.headMajor && tensor.rank() == 3;
    Expected<Tensor> copy =
        (permuted ? *tensor.permute({0, 2, 1}) : tensor).to(device);
    if (!copy)
      return copy.takeStatus();
    set.inputs.push_back(permuted ? *copy->permute({0, 2, 1})
                                  : std::move(*copy));
  }
  Expected<std::vector<Tensor>> outputs =
      executable->makeOutputs("main", set.inputs);
  if (!outputs)
    return outputs.takeStatus();
  set.outputs = std::move(*outputs);
  if (Status status = clear(set); !status)
    return status;
  return set;
}

Status Suite::clear(Set &set) const {
  for (Tensor &output : set.outputs) {
    if (!gpu) {
      std::memset(output.data(), 0xff, static_cast<size_t>(output.numBytes()));
      continue;
    }
    if (Status status = poison(*gpu, output); !status)
      return status;
  }
  return Status::ok();
}

Status Suite::check(const Set &set, const std::vector<Tensor> &expected,
                    const SuiteCase &c, CaseResult &result,
                    bool isFirst) const {
  Expected<std::vector<Tensor>> got = moveTo(set.outputs, Device::cpu());
  if (!got)
    return got.takeStatus();
  for (auto [i, to] : {std::pair(0, &result.y), {1, &result.states}}) {
    Expected<Match> now = match((*got)[i], expected[i], c.absolute);
    if (!now)
      return now.takeStatus();
    *to = isFirst ? *now : worseOf(*to, *now);
  }
  return Status::ok();
}

Expected<std::vector<double>>
Suite::sample(const std::function<Status(int i, void *stream)> &call,
              int warmUps, int repetitions) {
  constexpr size_t kLeast = 5;
  Expected<Stopwatch> watch = Stopwatch::create(device);
  if (!watch)
    return watch.takeStatus();
  auto start = std::chrono::steady_clock::now();
  std::vector<double> times;
  for (int i = -warmUps; i < repetitions; ++i) {
    std::chrono::duration<double, std::milli> spent =
        std::chrono::steady_clock::now() - start;
    bool late = spent.count() >= settings.budgetMs;
    if (late && i < 0)
      continue;
    if (late && times.size() >= kLeast)
      break;
    Stopwatch::Work before;
    if (flush)
      before = [&](void *stream) { return (*flush)(stream); };
    Expected<double> ms = watch->time(
        [&](void *stream) { return call(i + warmUps, stream); }, before);
    if (!ms)
      return ms.takeStatus();
    if (i >= 0)
      times.push_back(*ms);
  }
  return times;
}

Expected<double> Suite::measureNothing() {
  Expected<std::vector<double>> times =
      sample([](int, void *) { return Status::ok(); }, 5, 50);
  if (!times)
    return times.takeStatus();
  return timingOf(*times).median * 1e3;
}

Status Suite::measure(const SuiteCase &c, CaseResult &result) {
  SSDOperands operands = operandsOf(c, settings);
  std::vector<Tensor> expected = ssdReference(operands);
  std::vector<Tensor> host = operands.inputs();

  int warmUps = gpu ? 10 : 1;
  int64_t wanted = gpu ? warmUps + settings.repetitions : 2;
  std::vector<Set> sets;
  auto add = [&](const std::vector<Tensor> &from) -> Status {
    Expected<Set> set = makeSet(from);
    if (!set)
      return set.takeStatus();
    sets.push_back(std::move(*set));
    return Status::ok();
  };
  if (Status status = add(host); !status)
    return status;
  if (gpu) {
    // A small part of the memory: others may use it too.
    Expected<size_t> free = gpu->freeMemory();
    if (!free)
      return free.takeStatus();
    wanted = std::min<int64_t>(
        wanted, int64_t(double(*free) / 2 / floorOf(c, nullptr).bytes));
  }
  // Copies of what is on the device already.
  while (int64_t(sets.size()) < wanted) {
    std::vector<Tensor> from = sets.front().inputs;
    if (Status status = add(from); !status)
      return status;
  }
  result.sets = int64_t(sets.size());

  auto run = [&](Set &set, void *stream) {
    return executable->run("main", set.inputs.data(), set.inputs.size(),
                           set.outputs.data(), set.outputs.size(), stream);
  };
  if (Status status = run(sets[0], nullptr); !status)
    return status;
  if (Status status = check(sets[0], expected, c, result, true); !status)
    return status;
  for (const ChunkInfo &info : executable->chunks())
    if (info.site == "scan")
      result.ran = info;

  Set *last = &sets[0];
  Expected<std::vector<double>> times = sample(
      [&](int i, void *stream) {
        last = &sets[size_t(i) % sets.size()];
        return run(*last, stream);
      },
      warmUps, settings.repetitions);
  if (!times)
    return times.takeStatus();
  Timing timing = timingOf(*times);
  result.medianUs = timing.median * 1e3;
  result.lowUs = timing.low * 1e3;
  result.highUs = timing.high * 1e3;
  result.repetitions = timing.runs;
  if (Status status = check(*last, expected, c, result, false); !status)
    return status;
  if (!gpu)
    return Status::ok();

  // As graphs, each of its own tensors.
  constexpr size_t kGraphs = 11;
  std::vector<std::shared_ptr<CapturedRun>> graphs;
  for (size_t i = 0; i < std::min(kGraphs, sets.size()); ++i) {
    auto graph = executable->capture("main", sets[i].inputs, sets[i].outputs);
    if (!graph)
      return graph.takeStatus();
    graphs.push_back(*graph);
  }
  times = sample(
      [&](int i, void *stream) {
        return graphs[size_t(i) % graphs.size()]->launch(stream);
      },
      int(graphs.size()), settings.repetitions);
  if (!times)
    return times.takeStatus();
  result.graphUs = timingOf(*times).median * 1e3;

  constexpr int kRepeats = 20;
  auto warm =
      executable->capture("main", sets[0].inputs, sets[0].outputs, kRepeats);
  if (!warm)
    return warm.takeStatus();
  Expected<double> warmMs = timeOnDevice(
      device, [&](void *stream) { return (*warm)->launch(stream); }, 11,
      std::min(settings.budgetMs, 20.0));
  if (!warmMs)
    return warmMs.takeStatus();
  result.warmUs = *warmMs * 1e3 / kRepeats;
  return Status::ok();
}

//===----------------------------------------------------------------------===//
// Report
//===----------------------------------------------------------------------===//

static double geomean(const std::vector<double> &values) {
  double sum = 0;
  for (double value : values)
    sum += std::log(value);
  return std::exp(sum / double(values.size()));
}

static llvm::json::Object toJSON(int64_t index, const CaseResult &r,
                                 const Floor &floor) {
  const SuiteCase &c = kCases[index];
  llvm::json::Object object{{"case", index},
                            {"batch", c.batch},
                            {"length", c.length},
                            {"bytes", floor.bytes},
                            {"flops", floor.flops},
                            {"bytes_floor_us", jsonNumber(floor.bytesUs)},
                            {"flops_floor_us", jsonNumber(floor.flopsUs)},
                            {"floor_us", jsonNumber(floor.us())},
                            {"pass", r.passes()}};
  if (!r.status) {
    object["error"] = r.status.message();
    return object;
  }
  object["median_us"] = jsonNumber(r.medianUs);
  object["low_us"] = jsonNumber(r.lowUs);
  object["high_us"] = jsonNumber(r.highUs);
  object["graph_us"] = jsonNumber(r.graphUs);
  object["warm_us"] = jsonNumber(r.warmUs);
  object["repetitions"] = r.repetitions;
  object["pointer_sets"] = r.sets;
  object["chunk"] = r.ran.chunk >= c.length ? 0 : r.ran.chunk;
  object["variant"] = r.ran.variant;
  object["reason"] = r.ran.reason;
  object["x_over_floor"] = jsonNumber(r.medianUs / floor.us());
  object["absolute_tolerance"] = c.absolute;
  object["match_ratio"] = std::min(r.y.ratio, r.states.ratio);
  object["y_match_ratio"] = r.y.ratio;
  object["state_match_ratio"] = r.states.ratio;
  object["y_rel_l2_error"] = jsonNumber(r.y.relativeL2);
  object["state_rel_l2_error"] = jsonNumber(r.states.relativeL2);
  object["y_max_abs_error"] = r.y.maxAbsolute;
  object["state_max_abs_error"] = r.states.maxAbsolute;
  return object;
}

int corey::runSol(int argc, char **argv) {
  cl::OptionCategory category("corey-bench sol options");
  cl::opt<std::string> target(
      "target", cl::desc("Device to run on: cuda (default), cuda:<n> or cpu"),
      cl::init("cuda"), cl::cat(category));
  cl::list<int64_t> selected(
      "case", cl::desc("Number of a case, from 0; default: all 16"),
      cl::CommaSeparated, cl::cat(category));
  cl::opt<std::string> policy(
      "policy", cl::desc("Who chooses chunk and kernel; default measured"),
      cl::init("measured"), cl::cat(category));
  cl::opt<int64_t> chunk(
      "chunk", cl::desc("Chunk in tokens; 0 (default) leaves it to the policy"),
      cl::init(0), cl::cat(category));
  cl::opt<std::string> variant(
      "variant", cl::desc("Kernel; by default the policy chooses"),
      cl::value_desc("name"), cl::cat(category));
  cl::opt<bool> slowDecay(
      "slow-decay",
      cl::desc("Divide the logarithms of the decays by 100, so that what "
               "segments hand on matters"),
      cl::init(false), cl::cat(category));
  cl::opt<std::string> layout(
      "decay-layout",
      cl::desc("heads (default): the decays of a head lie together, as in the "
               "suite; tokens: those of a token. Kernels read either where it "
               "is"),
      cl::value_desc("heads|tokens"), cl::init("heads"), cl::cat(category));
  cl::opt<std::string> ceilings(
      "ceilings",
      cl::desc("Measured rates that floors are computed from: h200, cpu or "
               "none; default: those of the device, if it is one of them"),
      cl::value_desc("machine"), cl::cat(category));
  cl::opt<int> repetitions("repetitions",
                           cl::desc("Timed runs of a case; default 50"),
                           cl::init(50), cl::cat(category));
  cl::opt<double> budget(
      "budget-ms",
      cl::desc("Time after which a case is timed no further, with at least "
               "five runs; default 1000"),
      cl::init(1000), cl::cat(category));
  JsonOption json(category);
  cl::HideUnrelatedOptions(category);
  cl::ParseCommandLineOptions(
      argc, argv,
      "COREY: the SSD suite of SOL-ExecBench (L2/043), at 16 sizes\n");

  auto refuse = [](const std::string &message) {
    return reportError(kTool, Status::invalidArgument(message));
  };
  std::vector<int64_t> cases(selected.begin(), selected.end());
  for (int64_t index : cases)
    if (index < 0 || index >= kNumCases)
      return refuse("--case: expected a number from 0 to " +
                    std::to_string(kNumCases - 1) + ", got " +
                    std::to_string(index));
  if (cases.empty())
    for (int64_t index = 0; index < kNumCases; ++index)
      cases.push_back(index);
  if (layout != "heads" && layout != "tokens")
    return refuse("--decay-layout: expected heads or tokens, got '" + layout +
                  "'");
  if (chunk < 0)
    return refuse("--chunk: expected at least 0, got " +
                  std::to_string(chunk.getValue()));
  if (repetitions < 1 || !(budget > 0))
    return refuse("expected --repetitions of at least 1 and --budget-ms above "
                  "0, got " +
                  std::to_string(repetitions) + " and " +
                  std::to_string(budget));
  const MachineRates *machine = findMachine(ceilings);
  if (!ceilings.empty() && ceilings != "none" && !machine)
    return refuse("--ceilings: expected h200, cpu or none, got '" + ceilings +
                  "'");
  ContextOptions contextOptions;
  contextOptions.device = target;
  Expected<std::shared_ptr<Context>> context = Context::create(contextOptions);
  if (!context)
    return reportError(kTool, context.status());
  Device device = (*context)->getDevice();
  if (chunk) {
    scheduler::Problem problem;
    problem.op = scheduler::OpKind::SSD;
    problem.type = scheduler::ElementType::BF16;
    problem.channels = kHeads;
    problem.headDim = kChannels;
    problem.states = kStates;
    problem.groups = kGroups;
    for (const scheduler::Variant &each : scanVariants(device.kind, problem))
      if ((variant.empty() || each.name == variant) && each.segmented &&
          chunk % each.granularity)
        return refuse("--chunk: expected a multiple of " +
                      std::to_string(each.granularity) + " for '" + each.name +
                      "', got " + std::to_string(chunk.getValue()));
  }
  llvm::json::Object document = describeRun(target);
  if (ceilings.empty())
    if (auto name = document.getString("gpu"); name && name->contains("H200"))
      machine = findMachine("h200");

  Settings settings;
  settings.policy = policy;
  settings.variant = variant;
  settings.chunk = chunk;
  settings.slowDecay = slowDecay;
  settings.headMajor = layout == "heads";
  settings.repetitions = repetitions;
  settings.budgetMs = budget;
  Expected<Suite> suite = Suite::create(**context, settings);
  if (!suite)
    return reportError(kTool, suite.status());

  Expected<double> nothing = suite->measureNothing();
  if (!nothing)
    return reportError(kTool, nothing.status());

  bool print = json != "-";
  if (print)
    llvm::outs() << "case   B    L  median us   graph us    warm us  chunk "
                    "variant       floor us  x floor   match  y rel l2 "
                    "state l2\n";
  llvm::json::Array results;
  std::vector<double> medians, graphs, warms, floors;
  int64_t passed = 0;
  for (int64_t index : cases) {
    const SuiteCase &c = kCases[index];
    Floor floor = floorOf(c, machine);
    CaseResult result;
    result.status = suite->measure(c, result);
    passed += result.passes();
    medians.push_back(result.medianUs);
    graphs.push_back(result.graphUs);
    warms.push_back(result.warmUs);
    floors.push_back(floor.us());
    results.push_back(toJSON(index, result, floor));
    if (!print)
      continue;
    llvm::outs() << llvm::format("%4d %3d %4d ", int(index), int(c.batch),
                                 int(c.length));
    if (!result.status)
      llvm::outs() << " FAIL: " << result.status.message() << "\n";
    else
      llvm::outs()
          << llvm::format("%10.2f %10.2f %10.2f %6lld ", result.medianUs,
                          result.graphUs, result.warmUs,
                          static_cast<long long>(result.ran.chunk >= c.length
                                                     ? 0
                                                     : result.ran.chunk))
          << llvm::left_justify(result.ran.variant, 12)
          << llvm::format(" %9.2f %8.1f %7.4f %9.2e %8.2e  %s\n", floor.us(),
                          result.medianUs / floor.us(),
                          std::min(result.y.ratio, result.states.ratio),
                          result.y.relativeL2, result.states.relativeL2,
                          result.passes() ? "pass" : "FAIL");
    llvm::outs().flush();
  }
  bool allPass = passed == int64_t(cases.size());
  if (print)
    llvm::outs() << llvm::format(
        "geometric means: median %.2f us, graph %.2f us, warm %.2f us, floor "
        "%.2f us; %lld of %lld pass\n",
        geomean(medians), geomean(graphs), geomean(warms), geomean(floors),
        static_cast<long long>(passed), static_cast<long long>(cases.size()));
  if (!json.empty()) {
    document["benchmark"] = "sol";
    document["suite"] = "SOL-ExecBench L2/043_mamba_chunk_scan_with_segsum";
    document["device"] = (*context)->schedulerDevice().name;
    document["policy"] = policy.getValue();
    document["slow_decay"] = slowDecay.getValue();
    document["decay_layout"] = layout.getValue();
    document["relative_tolerance"] = kRelative;
    document["required_match_ratio"] = kRequiredRatio;
    document["ceilings"] = machine
                               ? llvm::json::Value(llvm::json::Object{
                                     {"machine", machine->name},
                                     {"bytes_per_second", machine->bytes},
                                     {"flops_per_second", 2 * machine->matrix}})
                               : llvm::json::Value(nullptr);
    document["empty_us"] = jsonNumber(*nothing);
    document["geomean_us"] = jsonNumber(geomean(medians));
    document["geomean_graph_us"] = jsonNumber(geomean(graphs));
    document["geomean_warm_us"] = jsonNumber(geomean(warms));
    document["geomean_floor_us"] = jsonNumber(geomean(floors));
    document["all_pass"] = allPass;
    document["results"] = std::move(results);
    if (int failed = writeJSON(json, std::move(document)))
      return failed;
  }
  return allPass ? 0 : 1;
}
