//===- PaperKernels.cpp - Chunks of scans, measured -----------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// Tables 2, 3, 17, 18, 19 and 30. The paper cuts the sequence in Python, calls
// a scan per slice and forgets the state in between. Here one program serves
// every row: with its chunk bound in one call of all tokens, and with a call
// per slice that hands its state to the next.
//
//===----------------------------------------------------------------------===//

#include "Paper.h"
#include "corey/Scheduler/Policy.h"
#include "llvm/ADT/STLExtras.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/Support/Format.h"

using namespace corey;
using namespace corey::paper;
namespace json = llvm::json;
namespace sched = corey::scheduler;

//===----------------------------------------------------------------------===//
// Rows
//===----------------------------------------------------------------------===//

bool KernelRow::matches() const {
  // Several times what rounding y to its type makes.
  double most = dtype == DType::F32 ? 1e-5 : dtype == DType::F16 ? 1e-3 : 8e-3;
  return slicedError <= most && (!bound || boundError <= most);
}

void paper::print(llvm::raw_ostream &os, const KernelTable &table) {
  size_t wide = 3;
  for (const KernelRow &row : table.rows)
    wide = std::max(wide, row.name.size());
  os << "table " << table.id << ": " << table.title << "\n  "
     << llvm::left_justify("", wide + 17)
     << "one call, chunk bound                                    "
        "one call per slice, state handed on\n  "
     << llvm::left_justify("row", wide + 2)
     << "H nats   chunk        ms   95 % interval      speed-up   error   "
        "calls        ms   95 % interval        error if reset\n";
  auto timing = [&](const Timing &t) {
    os << llvm::format(" %9.4f [%8.4f, %8.4f]", t.median, t.low, t.high);
  };
  for (const KernelRow &row : table.rows) {
    os << "  " << llvm::left_justify(row.name, wide + 2)
       << llvm::right_justify(row.entropy ? text(*row.entropy, 3) : "-", 6)
       << llvm::right_justify(row.chunk ? std::to_string(row.chunk) : "all", 8);
    if (row.bound) {
      timing(*row.bound);
      os << llvm::format(" %8.3f %8.1e", row.speedup, row.boundError);
    } else {
      os << llvm::right_justify("-", 10 + 21 + 18);
    }
    os << llvm::format(" %6lld", static_cast<long long>(row.calls));
    timing(row.sliced);
    os << llvm::format(" %8.1e %8.1e", row.slicedError, row.resetError);
    for (size_t i = 0; i < row.paper.size(); ++i)
      os << (i ? ", " : "  paper: ") << row.paper[i].first << " "
         << llvm::format("%g", row.paper[i].second);
    if (row.against != KernelRow::Against::Noise)
      os << (row.against == KernelRow::Against::Faster ? "  faster"
                                                       : "  slower");
    if (!row.matches())
      os << "  FAIL";
    os << "\n";
  }
  os << "\n";
}

json::Value paper::toJSON(const KernelTable &table) {
  auto timing = [](const Timing &t) {
    return json::Object{{"median_ms", t.median}, {"low_ms", t.low},
                        {"high_ms", t.high},     {"min_ms", t.min},
                        {"max_ms", t.max},       {"runs", t.runs}};
  };
  json::Array rows;
  for (const KernelRow &row : table.rows) {
    json::Object calls = timing(row.sliced);
    calls["calls"] = row.calls;
    calls["rel_l2_error"] = finite(row.slicedError);
    calls["rel_l2_error_if_reset"] = finite(row.resetError);
    json::Object object{
        {"row", row.name},
        {"dtype", dtypeName(row.dtype)},
        {"shape", json::Array{1, row.length, row.channels, row.states}},
        {"chunk", row.chunk},
        {"call_per_slice", std::move(calls)},
        {"matches", row.matches()}};
    if (row.entropy)
      object["entropy_nats"] = *row.entropy;
    if (!row.variant.empty())
      object["variant"] = row.variant;
    if (row.bound) {
      json::Object one = timing(*row.bound);
      one["rel_l2_error"] = finite(row.boundError);
      one["speedup_over_unsplit"] = finite(row.speedup);
      one["against_unsplit"] =
          row.against == KernelRow::Against::Faster   ? "faster"
          : row.against == KernelRow::Against::Slower ? "slower"
                                                      : "within noise";
      object["one_call"] = std::move(one);
    }
    if (!row.paper.empty()) {
      json::Object printed;
      for (const auto &[quantity, value] : row.paper)
        printed[quantity] = value;
      object["paper"] = std::move(printed);
    }
    rows.push_back(std::move(object));
  }
  return rows;
}

//===----------------------------------------------------------------------===//
// Measuring
//===----------------------------------------------------------------------===//

namespace {
using Printed = std::vector<std::pair<std::string, double>>;

/// A row to be: who chooses its chunk.
struct RowSpec {
  std::string name;
  enum class Kind {
    /// One chunk; 0 is the whole sequence.
    Static,
    /// A rule of the entropy of u.
    Rule,
    /// The scheduler's own policy.
    Default,
    /// A call per token.
    Off,
    /// Slices by the rule of table 30, each by the tokens that follow.
    Windows
  } kind = Kind::Static;
  int64_t chunk = 0;
  std::string rule, variant;
  Printed paper;
};
using Kind = RowSpec::Kind;

RowSpec fixed(int64_t chunk, Printed paper = {}) {
  return {"static-" + std::to_string(chunk),
          Kind::Static,
          chunk,
          "",
          "",
          std::move(paper)};
}
RowSpec byRule(std::string rule, Printed paper = {}) {
  std::string name = "entropy, " + rule;
  return {std::move(name), Kind::Rule, 0,
          std::move(rule), "",         std::move(paper)};
}

/// Runs the calls of one row.
struct Slices {
  struct Call {
    std::vector<Tensor> inputs, outputs;
  };
  std::vector<Call> calls;

  Status run(Executable &executable, void *stream) {
    for (Call &call : calls)
      if (Status status =
              executable.run("main", call.inputs.data(), call.inputs.size(),
                             call.outputs.data(), call.outputs.size(), stream);
          !status)
        return status;
    return Status::ok();
  }
};

/// A scan of one sequence, as the paper has it: f16 or bf16, A = -1 .. -N,
/// delta uniform in [0, 1) before its softplus, B, C and D normal. The paper
/// draws A from a normal distribution, with which half of the states grow until
/// they overflow.
class ScanBench {
public:
  static Expected<std::unique_ptr<ScanBench>>
  create(Context &context, DType dtype, int64_t channels, int64_t states);

  /// Draws inputs, and computes what they make.
  Status load(int64_t length, double (*draw)(Random &));
  /// Measures rows that are compared with each other; the first is the whole
  /// sequence.
  Expected<std::vector<KernelRow>> measure(llvm::ArrayRef<RowSpec> specs,
                                           double budgetMs);

private:
  enum Operand { U, Delta, A, B, C, Skip, Initial };

  Expected<KernelRow> decide(const RowSpec &spec, std::vector<int64_t> &slices);
  Status fix(const KernelRow &row);
  Expected<std::shared_ptr<Slices>> cut(llvm::ArrayRef<int64_t> lengths,
                                        bool handOn);
  Expected<double> error();
  Expected<sched::Statistics> statistics(int64_t begin, int64_t tokens,
                                         int64_t channels, int bins);

  std::shared_ptr<Executable> executable;
  Device device;
  DType dtype = DType::F16;
  int64_t length = 0, channels = 0, states = 0;
  /// On the host, and on the device.
  std::vector<Tensor> drawn, inputs, outputs;
  /// A state that is handed on, next to the other.
  std::vector<Tensor> handed;
  Tensor expected;
};
} // namespace

Expected<std::unique_ptr<ScanBench>> ScanBench::create(Context &context,
                                                       DType dtype,
                                                       int64_t channels,
                                                       int64_t states) {
  std::string element = dtypeName(dtype), d = std::to_string(channels),
              n = std::to_string(states);
  std::string x = "tensor<?x?x" + d + "x" + element + ">",
              bc = "tensor<?x?x1x" + n + "x" + element + ">",
              rates = "tensor<" + d + "x" + n + "xf32>",
              skip = "tensor<" + d + "xf32>",
              state = "tensor<?x" + d + "x" + n + "xf32>";
  std::string program =
      "func.func @main(%u: " + x + ", %delta: " + x + ", %A: " + rates +
      ", %B: " + bc + ", %C: " + bc + ", %D: " + skip + ", %h0: " + state +
      ") -> (" + x + ", " + state + ") {\n" +
      "  %y, %h = ssm.selective_scan %u, %delta, %A, %B, %C D(%D : " + skip +
      ") initial_state(%h0 : " + state +
      ") {delta_softplus, chunk = #ssm.chunk<runtime = @scan>} : " + x + ", " +
      x + ", " + rates + ", " + bc + ", " + bc + " -> " + x + ", " + state +
      "\n  return %y, %h : " + x + ", " + state + "\n}\n";
  CompileOptions options;
  options.policy = "unsplit";
  auto executable = context.compile(program, options, "<scan>");
  if (!executable)
    return executable.takeStatus();
  std::unique_ptr<ScanBench> bench(new ScanBench);
  bench->executable = *executable;
  bench->device = context.getDevice();
  bench->dtype = dtype;
  bench->channels = channels;
  bench->states = states;
  return bench;
}

Status ScanBench::load(int64_t tokens, double (*draw)(Random &)) {
  length = tokens;
  Random values(1), steps(2);
  Expected<Tensor> u = Tensor::empty(dtype, {1, length, channels}),
                   delta = Tensor::empty(dtype, {1, length, channels}),
                   rates = Tensor::empty(DType::F32, {channels, states}),
                   b = randomTensor(dtype, {1, length, 1, states}, 3),
                   c = randomTensor(dtype, {1, length, 1, states}, 4),
                   skip = randomTensor(DType::F32, {channels}, 5),
                   zero = Tensor::empty(DType::F32, {1, channels, states},
                                        /*ZeroInit=*/true);
  drawn.clear();
  for (Expected<Tensor> *tensor : {&u, &delta, &rates, &b, &c, &skip, &zero}) {
    if (!*tensor)
      return tensor->takeStatus();
    drawn.push_back(**tensor);
  }
  size_t size = dtypeSize(dtype);
  for (int64_t i = 0; i < length * channels; ++i) {
    storeScalar(dtype, u->dataAs<char>() + size_t(i) * size, draw(values));
    storeScalar(dtype, delta->dataAs<char>() + size_t(i) * size,
                steps.uniform());
  }
  for (int64_t i = 0; i < channels * states; ++i)
    rates->dataAs<float>()[i] = -float(i % states + 1);
  expected = scanReference({drawn[U],
                            drawn[Delta],
                            drawn[A],
                            drawn[B],
                            drawn[C],
                            drawn[Skip],
                            {},
                            {},
                            drawn[Initial]})[0];
  Expected<std::vector<Tensor>> moved = moveTo(drawn, device);
  if (!moved)
    return moved.takeStatus();
  inputs = std::move(*moved);
  Expected<std::vector<Tensor>> made = executable->makeOutputs("main", inputs);
  if (!made)
    return made.takeStatus();
  outputs = std::move(*made);
  handed.clear();
  for (int i = 0; i < 2; ++i) {
    Expected<Tensor> state =
        Tensor::empty(DType::F32, {1, channels, states}, device);
    if (!state)
      return state.takeStatus();
    handed.push_back(*state);
  }
  return Status::ok();
}

/// Of u, over the given tokens and the first channels.
Expected<sched::Statistics> ScanBench::statistics(int64_t begin, int64_t tokens,
                                                  int64_t count, int bins) {
  sched::EstimatorOptions options;
  options.bins = bins;
  Expected<sched::Estimator> estimator = sched::Estimator::create(options);
  Expected<Tensor> part =
      drawn[U].slice(1, begin, std::min(begin + tokens, length));
  if (!estimator)
    return estimator.takeStatus();
  if (!part)
    return part.takeStatus();
  sched::TensorView view;
  view.data = part->data();
  view.type =
      dtype == DType::BF16 ? sched::ElementType::BF16 : sched::ElementType::F16;
  view.rank = 3;
  for (int i = 0; i < view.rank; ++i) {
    view.shape[i] = part->dim(i);
    view.strides[i] = part->stride(i);
  }
  view.shape[2] = count;
  return estimator->estimate(view);
}

/// The chunk of a row, and its slices.
Expected<KernelRow> ScanBench::decide(const RowSpec &spec,
                                      std::vector<int64_t> &slices) {
  // Of table 30.
  constexpr int64_t kWindow = 256;
  constexpr int kWindowBins = 64;
  KernelRow row;
  row.name = spec.name;
  row.chunk = spec.chunk;
  row.variant = spec.variant;
  row.dtype = dtype;
  row.length = length;
  row.channels = channels;
  row.states = states;
  row.paper = spec.paper;
  // What a rule makes of tokens, and the entropy behind it.
  auto byRule = [&](llvm::StringRef rule, int64_t begin, int64_t tokens,
                    int64_t count, int bins,
                    std::optional<double> &entropy) -> Expected<int64_t> {
    Expected<sched::Statistics> seen = statistics(begin, tokens, count, bins);
    if (!seen)
      return seen.takeStatus();
    entropy = seen->entropy.value();
    return choose(rule, *entropy, bins);
  };
  switch (spec.kind) {
  case Kind::Static:
    break;
  case Kind::Rule: {
    Expected<int64_t> chunk =
        byRule(spec.rule, 0, length, channels, 256, row.entropy);
    if (!chunk)
      return chunk.takeStatus();
    row.chunk = *chunk;
    break;
  }
  case Kind::Default: {
    if (Status status = executable->setPolicy("scan", sched::kDefaultPolicy);
        !status)
      return status;
    if (Status status = fix(row); !status)
      return status;
    if (Status status = executable->run("main", inputs, outputs); !status)
      return status;
    ChunkInfo chosen = executable->chunks().front();
    row.chunk = chosen.chunk < length ? chosen.chunk : 0;
    row.variant = chosen.variant;
    if (Status status = executable->setPolicy("scan", "unsplit"); !status)
      return status;
    break;
  }
  case Kind::Off:
    row.chunk = 1;
    break;
  case Kind::Windows: {
    Expected<int64_t> chunk =
        byRule("profile", 0, length, 1, kWindowBins, row.entropy);
    if (!chunk)
      return chunk.takeStatus();
    row.chunk = *chunk;
    for (int64_t begin = 0; begin < length; begin += slices.back()) {
      std::optional<double> entropy;
      Expected<int64_t> slice =
          byRule("profile", begin, kWindow, 1, kWindowBins, entropy);
      if (!slice)
        return slice.takeStatus();
      slices.push_back(std::min(length - begin, *slice));
    }
    return row;
  }
  }
  int64_t step = row.chunk ? row.chunk : length;
  for (int64_t begin = 0; begin < length; begin += step)
    slices.push_back(std::min(step, length - begin));
  return row;
}

/// Binds the chunk and the kernel of a row.
Status ScanBench::fix(const KernelRow &row) {
  if (Status status = executable->setVariant("scan", row.variant); !status)
    return status;
  return executable->setChunk("scan", row.chunk);
}

Expected<std::shared_ptr<Slices>>
ScanBench::cut(llvm::ArrayRef<int64_t> lengths, bool handOn) {
  auto slices = std::make_shared<Slices>();
  int64_t begin = 0;
  for (size_t i = 0; i < lengths.size(); ++i) {
    Slices::Call call{inputs, outputs};
    for (Tensor *tensor :
         {&call.inputs[U], &call.inputs[Delta], &call.inputs[B],
          &call.inputs[C], &call.outputs[0]}) {
      Expected<Tensor> part = tensor->slice(1, begin, begin + lengths[i]);
      if (!part)
        return part.takeStatus();
      *tensor = *part;
    }
    if (handOn && i)
      call.inputs[Initial] = handed[(i - 1) % 2];
    call.outputs[1] = handed[i % 2];
    slices->calls.push_back(std::move(call));
    begin += lengths[i];
  }
  return slices;
}

/// Of y as it is now.
Expected<double> ScanBench::error() {
  Expected<std::vector<Tensor>> y = moveTo({outputs[0]}, Device::cpu());
  if (!y)
    return y.takeStatus();
  Expected<Difference> difference = compare(y->front(), expected);
  if (!difference)
    return difference.takeStatus();
  return difference->relativeL2;
}

Expected<std::vector<KernelRow>>
ScanBench::measure(llvm::ArrayRef<RowSpec> specs, double budgetMs) {
  /// Runs of one launch of a graph.
  constexpr int kRepeats = 10;
  constexpr unsigned kMinRounds = 11;
  std::vector<KernelRow> rows;
  std::vector<TimedWork> work;
  Expected<Tensor> blank =
      Tensor::empty(dtype, outputs[0].shape(), /*ZeroInit=*/true);
  if (!blank)
    return blank.takeStatus();
  // What is not written is not right.
  auto errorOf = [&](auto run) -> Expected<double> {
    if (Status status = outputs[0].copyFrom(*blank); !status)
      return status;
    if (Status status = run(); !status)
      return status;
    return error();
  };
  for (const RowSpec &spec : specs) {
    std::vector<int64_t> lengths;
    Expected<KernelRow> row = decide(spec, lengths);
    if (!row)
      return row.takeStatus();
    row->calls = static_cast<int64_t>(lengths.size());
    Expected<std::shared_ptr<Slices>> slices = cut(lengths, /*handOn=*/true),
                                      reset = cut(lengths, /*handOn=*/false);
    if (!slices)
      return slices.takeStatus();
    if (!reset)
      return reset.takeStatus();
    // A slice is a whole sequence to its call.
    KernelRow whole;
    auto wholeCalls = [this, whole] { return fix(whole); };
    if (Status status = wholeCalls(); !status)
      return status;
    Expected<double> resetError = errorOf(
                         [&] { return (*reset)->run(*executable, nullptr); }),
                     slicedError = errorOf(
                         [&] { return (*slices)->run(*executable, nullptr); });
    if (!resetError)
      return resetError.takeStatus();
    if (!slicedError)
      return slicedError.takeStatus();
    row->resetError = *resetError;
    row->slicedError = *slicedError;
    work.push_back({[this, calls = *slices](void *stream) {
                      return calls->run(*executable, stream);
                    },
                    [wholeCalls](void *) { return wholeCalls(); }, 1});
    if (spec.kind != Kind::Off) {
      if (Status status = fix(*row); !status)
        return status;
      Expected<double> boundError =
          errorOf([&] { return executable->run("main", inputs, outputs); });
      if (!boundError)
        return boundError.takeStatus();
      row->boundError = *boundError;
      row->bound.emplace();
      Expected<TimedWork> bound =
          workOf(*executable, device, "main", inputs, outputs, kRepeats);
      if (!bound)
        return bound.takeStatus();
      // A captured run follows its sites at its next launch, which is not to be
      // measured.
      bound->before = [this, row = *row, call = bound->call](void *stream) {
        Status status = fix(row);
        return status && stream ? call(stream) : status;
      };
      work.push_back(std::move(*bound));
    }
    rows.push_back(std::move(*row));
  }
  Expected<std::vector<Timing>> timings =
      timeInTurn(device, work, kMinRounds, budgetMs);
  if (!timings)
    return timings.takeStatus();
  size_t next = 0;
  for (KernelRow &row : rows) {
    row.sliced = (*timings)[next++];
    if (!row.bound)
      continue;
    row.bound = (*timings)[next++];
    const Timing &whole = *rows.front().bound;
    row.speedup = whole.median / row.bound->median;
    if (row.bound->high < whole.low)
      row.against = KernelRow::Against::Faster;
    else if (row.bound->low > whole.high)
      row.against = KernelRow::Against::Slower;
  }
  return rows;
}

//===----------------------------------------------------------------------===//
// Tables
//===----------------------------------------------------------------------===//

Expected<KernelTable> paper::kernelTable(llvm::StringRef id, Context &context,
                                         const KernelOptions &options) {
  KernelTable table;
  table.id = id.str();
  auto normal = [](Random &random) { return random.normal(); };
  std::map<std::pair<DType, int64_t>, std::unique_ptr<ScanBench>> benches;
  auto measure = [&](const std::string &prefix, DType dtype, int64_t length,
                     int64_t channels, double (*draw)(Random &),
                     llvm::ArrayRef<RowSpec> specs) -> Status {
    std::unique_ptr<ScanBench> &bench = benches[{dtype, channels}];
    if (!bench) {
      auto made = ScanBench::create(context, dtype, channels, options.states);
      if (!made)
        return made.takeStatus();
      bench = std::move(*made);
    }
    if (Status status = bench->load(length, draw); !status)
      return status;
    auto rows = bench->measure(specs, options.budgetMs);
    if (!rows)
      return rows.takeStatus();
    for (KernelRow &row : *rows) {
      row.name = prefix + row.name;
      table.rows.push_back(std::move(row));
    }
    return Status::ok();
  };
  auto shape = [&](int64_t channels) {
    return "[1, " + std::to_string(options.length) + ", " +
           std::to_string(channels) +
           "], N = " + std::to_string(options.states);
  };
  auto whole = [](Printed printed = {}) {
    return RowSpec{"unsplit", Kind::Static, 0, "", "", std::move(printed)};
  };
  RowSpec byDefault{"default policy", Kind::Default, 0, "", "", {}};
  auto off = [](Printed printed) {
    return RowSpec{"off", Kind::Off, 0, "", "", std::move(printed)};
  };
  // The rule of the op takes other kernels for whole sequences than for chunks.
  std::vector<RowSpec> sameKernel;
  if (context.getDevice().kind == Device::CUDA)
    sameKernel.push_back(
        {"unsplit, kernel of chunks", Kind::Static, 0, "", "warp", {}});
  auto append = [](std::vector<RowSpec> &specs, std::vector<RowSpec> more) {
    specs.insert(specs.end(), more.begin(), more.end());
  };

  Status status;
  std::vector<RowSpec> specs;
  if (id == "2/19") {
    table.title = "policies, f16 " + shape(options.channels) +
                  ", normal u; paper: RTX 3070, slices that forget their "
                  "state, and views of them (isolated)";
    specs = {whole({{"ms", 0.320}})};
    append(specs, sameKernel);
    append(specs,
           {off({{"ms", 403.0}}),
            fixed(64, {{"ms", 3.58}, {"isolated ms", 0.101}}),
            byRule("legacy",
                   {{"ms", 1.10}, {"isolated ms", 0.017}, {"chunk", 256}}),
            byRule("calibrated",
                   {{"ms", 0.748}, {"isolated ms", 0.013}, {"chunk", 512}}),
            fixed(512, {{"ms", 0.748}}), byDefault});
    status = measure("", DType::F16, options.length, options.channels, normal,
                     specs);
  } else if (id == "3m") {
    table.title = "five distributions of u, f16 " + shape(options.channels);
    for (const Distribution &each : distributions()) {
      Printed printed = {{"H", each.entropy}, {"chunk", double(each.chunk)}};
      if (each.speedup)
        printed.push_back({"speed-up over 64", *each.speedup});
      specs = {whole(), fixed(64), byRule("legacy", std::move(printed)),
               byRule("calibrated")};
      status = measure(std::string(each.name) + ", ", DType::F16,
                       options.length, options.channels, each.draw, specs);
      if (!status)
        break;
    }
  } else if (id == "17") {
    table.title = "chunks, f16 " + shape(options.channels) +
                  ", normal u; paper: RTX 3070, up to 512";
    specs = {whole()};
    append(specs, sameKernel);
    append(specs,
           {fixed(32), fixed(64, {{"ms", 3.299}}), fixed(128), fixed(256),
            fixed(512, {{"ms", 0.748}}), fixed(1024), fixed(2048),
            byRule("legacy", {{"chunk", 256}, {"speed-up over 64", 2.87}}),
            byRule("calibrated",
                   {{"chunk", 512}, {"ms", 0.748}, {"speed-up over 64", 4.41}}),
            byDefault});
    status = measure("", DType::F16, options.length, options.channels, normal,
                     specs);
  } else if (id == "18") {
    table.title = "a data-centre GPU, " + shape(options.channels) +
                  " and twice as long, normal u; paper: H800";
    const struct {
      DType dtype;
      int64_t times;
      double fixed64, legacy, fixed512;
    } cases[] = {{DType::F16, 1, 2.2994, 0.5874, 0.2996},
                 {DType::BF16, 1, 2.3427, 0.5806, 0.3020},
                 {DType::F16, 2, 4.5480, 1.1669, 0.5862}};
    for (const auto &each : cases) {
      int64_t length = each.times * options.length;
      specs = {whole(), fixed(64, {{"ms", each.fixed64}}),
               byRule("legacy", {{"chunk", 256}, {"ms", each.legacy}}),
               fixed(512, {{"ms", each.fixed512}}), byDefault};
      status = measure(std::string(dtypeName(each.dtype)) + " " +
                           std::to_string(length) + ", ",
                       each.dtype, length, options.channels, normal, specs);
      if (!status)
        break;
    }
  } else {
    // The paper's vector has one channel; rows of 16 bytes are read in place.
    constexpr int64_t kChannels = 8;
    table.title = "launches, f16 " + shape(kChannels) +
                  ", normal u; paper: RTX 3090, 0.9 x + 1 over all of the "
                  "vector in every launch";
    specs = {whole(),
             off({{"launches", 4096}, {"us a launch", 29}}),
             fixed(64, {{"launches", 64}, {"us a launch", 35}}),
             {"entropy of windows",
              Kind::Windows,
              0,
              "",
              "",
              {{"launches", 9}, {"us a launch", 34}}},
             byDefault};
    status = measure("", DType::F16, options.length, kChannels, normal, specs);
  }
  if (!status)
    return status;
  return table;
}
