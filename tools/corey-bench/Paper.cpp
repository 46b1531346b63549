//===- Paper.cpp - Published tables, again --------------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "Paper.h"
#include "JsonOption.h"
#include "corey/Scheduler/ChunkRule.h"
#include "corey/ToolUtils.h"
#include "llvm/ADT/STLExtras.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/ADT/StringMap.h"
#include "llvm/ADT/StringSwitch.h"
#include "llvm/Support/CommandLine.h"
#include "llvm/Support/FormatVariadic.h"

using namespace corey;
using namespace corey::paper;
namespace json = llvm::json;
namespace sched = corey::scheduler;
namespace cl = llvm::cl;

//===----------------------------------------------------------------------===//
// Rows
//===----------------------------------------------------------------------===//

std::string paper::text(double value, int digits) {
  std::string result =
      llvm::formatv(("{0:F" + std::to_string(digits) + "}").c_str(), value)
          .str();
  // No negative zeros.
  if (result[0] == '-' &&
      result.find_first_not_of("0.", 1) == std::string::npos)
    result.erase(0, 1);
  return result;
}

bool Row::matches() const {
  if (!paper)
    return true;
  if (tolerance > 0)
    return std::abs(ours - *paper) <= tolerance + 0.5 * std::pow(10.0, -digits);
  return text(ours, digits) == text(*paper, digits);
}

void paper::print(llvm::raw_ostream &os, const Table &table) {
  size_t wide = 3, middle = 8;
  for (const Row &row : table.rows) {
    wide = std::max(wide, row.row.size());
    middle = std::max(middle, row.quantity.size());
  }
  os << "table " << table.id << ": " << table.title << "\n  "
     << llvm::left_justify("row", wide + 2)
     << llvm::left_justify("quantity", middle)
     << "        paper         ours   difference\n";
  for (const Row &row : table.rows) {
    os << "  " << llvm::left_justify(row.row, wide + 2)
       << llvm::left_justify(row.quantity, middle)
       << llvm::right_justify(row.paper ? text(*row.paper, row.digits) : "-",
                              13)
       << llvm::right_justify(text(row.ours, row.digits), 13)
       << llvm::right_justify(
              row.paper ? text(row.ours - *row.paper, row.digits) : "-", 13);
    if (!row.matches())
      os << (row.mustMatch ? "  FAIL" : "  differs");
    if (!row.note.empty())
      os << "  " << row.note;
    os << "\n";
  }
  os << "\n";
}

json::Value paper::finite(double value) {
  return std::isfinite(value) ? json::Value(value) : json::Value(nullptr);
}

json::Value paper::toJSON(const Table &table) {
  json::Array rows;
  for (const Row &row : table.rows) {
    json::Object object{{"row", row.row},
                        {"quantity", row.quantity},
                        {"ours", finite(row.ours)}};
    if (row.paper) {
      object["paper"] = *row.paper;
      object["difference"] = row.ours - *row.paper;
      object["matches"] = row.matches();
      object["must_match"] = row.mustMatch;
    }
    if (row.tolerance > 0)
      object["tolerance"] = row.tolerance;
    if (!row.note.empty())
      object["note"] = row.note;
    rows.push_back(std::move(object));
  }
  return rows;
}

//===----------------------------------------------------------------------===//
// Samples
//===----------------------------------------------------------------------===//

sched::Statistics paper::measure(const std::vector<double> &values, int bins,
                                 sched::RangeMode range) {
  sched::EstimatorOptions options;
  options.bins = bins;
  options.range = range;
  // Neither the options nor a contiguous view can be refused.
  auto estimator = sched::Estimator::create(options);
  return *estimator->estimate(sched::TensorView::contiguous(
      values.data(), sched::ElementType::F64, {int64_t(values.size())}));
}

Spread paper::spreadOf(llvm::ArrayRef<double> values) {
  Spread spread;
  for (double value : values)
    spread.mean += value / double(values.size());
  for (double value : values)
    spread.deviation += (value - spread.mean) * (value - spread.mean);
  spread.deviation =
      values.size() > 1
          ? std::sqrt(spread.deviation / double(values.size() - 1))
          : 0;
  return spread;
}

int64_t paper::choose(llvm::StringRef rule, double nats, int64_t bins) {
  auto found =
      sched::ChunkRule::named(std::string_view(rule.data(), rule.size()));
  return *found->chunk(sched::Nats(nats), bins);
}

//===----------------------------------------------------------------------===//
// paper
//===----------------------------------------------------------------------===//

static constexpr const char *kTool = "corey-bench";

namespace {
/// A table that is measured on the target.
struct MeasuredTable {
  llvm::StringRef id;
  /// Whether it is among those of the CPU if none are named.
  bool onCPU;
  std::function<Status()> run;
};

/// Three sizes, separated by commas.
std::optional<KernelOptions> parseShape(llvm::StringRef text) {
  llvm::SmallVector<llvm::StringRef> parts;
  text.split(parts, ',');
  KernelOptions options;
  int64_t *sizes[] = {&options.length, &options.channels, &options.states};
  if (parts.size() != std::size(sizes))
    return std::nullopt;
  for (auto [part, size] : llvm::zip(parts, sizes))
    if (part.getAsInteger(10, *size) || *size < 1)
      return std::nullopt;
  return options;
}
} // namespace

int corey::runPaper(int argc, char **argv) {
  cl::OptionCategory category("corey-bench paper options");
  cl::opt<std::string> target(
      "target",
      cl::desc("Device of measured tables: cpu (default), cuda or cuda:<n>"),
      cl::init("cpu"), cl::cat(category));
  cl::list<std::string> names(
      "table",
      cl::desc(
          "Computed: 1, 3, 11, 14, 20, 21, 22, 29, 33, figure1, theory, "
          "hadamard; measured: 2, 3m, 11m, 17, 18, 19, 30, 33m. May be given "
          "several times; default on the CPU: the computed ones, hadamard if "
          "there are activations, 11m and 33m; on a CUDA device: all that are "
          "measured"),
      cl::value_desc("table"), cl::cat(category));
  cl::opt<std::string> referencePath(
      "reference",
      cl::desc("Reference results of the fusion experiments; default: those "
               "that are built in"),
      cl::value_desc("file"), cl::cat(category));
  cl::list<std::string> activations(
      "activations",
      cl::desc("Tensors [tokens, channels] for hadamard, a safetensors file. "
               "May be given several times"),
      cl::value_desc("file"), cl::cat(category));
  cl::opt<int64_t> channels(
      "channels",
      cl::desc("Of hadamard: transform the first so many channels; "
               "0 (default) is all"),
      cl::init(0), cl::cat(category));
  cl::opt<std::string> shape(
      "shape",
      cl::desc("Tokens, channels and states of the scans of 2, 3m, 17, 18, 19 "
               "and 30 (which has 8 channels); default: those of the paper, "
               "4096,1024,16"),
      cl::value_desc("L,D,N"), cl::init("4096,1024,16"), cl::cat(category));
  cl::opt<int64_t> length("length",
                          cl::desc("Tokens of 11m and 33m; default 2048"),
                          cl::init(2048), cl::cat(category));
  cl::opt<double> budget(
      "budget-ms",
      cl::desc("Time to spend on what a measured table compares; default 400"),
      cl::init(400), cl::cat(category));
  JsonOption jsonPath(category);
  cl::HideUnrelatedOptions(category);
  cl::ParseCommandLineOptions(
      argc, argv,
      "COREY: what the papers print, computed and measured again\n");
  auto fail = [](std::string message) {
    return reportError(kTool, Status::invalidArgument(std::move(message)));
  };
  Expected<Device> device = Device::parse(target.getValue());
  if (!device)
    return fail("--target: " + device.status().message());
  if (channels < 0)
    return fail("--channels: expected at least 0, got " +
                std::to_string(channels));
  if (length < 1)
    return fail("--length: expected at least 1, got " + std::to_string(length));
  if (!(budget > 0))
    return fail("--budget-ms: expected more than 0, got " +
                llvm::formatv("{0}", budget.getValue()).str());
  std::optional<KernelOptions> kernelOptions = parseShape(shape);
  if (!kernelOptions)
    return fail("--shape: expected three positive sizes (L,D,N), got '" +
                shape + "'");
  kernelOptions->budgetMs = budget;

  Expected<Reference> reference = readReference(referencePath);
  if (!reference)
    return reportError(kTool, reference.status());
  const std::pair<llvm::StringRef, std::function<Table()>> makers[] = {
      {"1", table1},
      {"3", table3},
      {"11", [&] { return table11(*reference); }},
      {"14", table14},
      {"20", table20},
      {"21", table21},
      {"29", table29},
      {"33", [&] { return table33(*reference); }},
      {"figure1", [&] { return figure1(*reference); }},
      {"theory", [&] { return theory(*reference); }}};

  bool toStdout = jsonPath == "-", failed = false;
  json::Object tables;
  auto finish = [&](const auto &table) {
    failed |= llvm::any_of(table.rows, [](const auto &row) {
      return row.mustMatch && !row.matches();
    });
    if (!toStdout) {
      print(llvm::outs(), table);
      llvm::outs().flush();
    }
    tables[table.id] = toJSON(table);
  };
  std::shared_ptr<Context> context;
  auto measured = [&](auto make) -> Status {
    if (!context) {
      ContextOptions options;
      options.device = target;
      auto made = Context::create(options);
      if (!made)
        return made.takeStatus();
      context = *made;
    }
    auto table = make();
    if (!table)
      return table.takeStatus();
    finish(*table);
    return Status::ok();
  };
  auto kernels = [&](const char *id) {
    return [&measured, &context, &kernelOptions, id] {
      return measured(
          [&] { return kernelTable(id, *context, *kernelOptions); });
    };
  };
  const MeasuredTable measurements[] = {
      {"2/19", false, kernels("2/19")},
      {"3m", false, kernels("3m")},
      {"11m", true,
       [&] {
         return measured(
             [&] { return measuredTable11(*context, length, budget); });
       }},
      {"17", false, kernels("17")},
      {"18", false, kernels("18")},
      {"30", false, kernels("30")},
      {"33m", true, [&] {
         return measured(
             [&] { return measuredTable33(*context, length, budget); });
       }}};

  llvm::StringMap<bool> wanted;
  for (const std::string &name : names) {
    // Tables of the same rows.
    llvm::StringRef canonical = llvm::StringSwitch<llvm::StringRef>(name)
                                    .Cases({"14", "22", "14/22"}, "14")
                                    .Cases({"2", "19", "2/19"}, "2/19")
                                    .Default(name);
    if (canonical != "hadamard" &&
        llvm::none_of(
            makers,
            [&](const auto &each) { return each.first == canonical; }) &&
        llvm::none_of(measurements,
                      [&](const auto &each) { return each.id == canonical; }))
      return fail(
          "--table: expected 1, 2, 3, 3m, 11, 11m, 14, 17, 18, 19, 20, "
          "21, 22, 29, 30, 33, 33m, figure1, theory or hadamard, got '" +
          name + "'");
    wanted[canonical] = true;
  }
  if (names.empty()) {
    bool onCPU = device->kind == Device::CPU;
    if (onCPU)
      for (const auto &each : makers)
        wanted[each.first] = true;
    if (!activations.empty())
      wanted["hadamard"] = true;
    for (const MeasuredTable &each : measurements)
      if (!onCPU || each.onCPU)
        wanted[each.id] = true;
  }
  bool rotating = wanted.contains("hadamard");
  if (rotating && activations.empty())
    return fail("--table=hadamard: expected --activations, got none");
  if (!rotating && !activations.empty())
    return fail("--activations: expected --table=hadamard, got other tables");

  json::Value document = describeRun(target);
  json::Object &root = *document.getAsObject();
  root["command"] = kTool + (" " + llvm::join(llvm::ArrayRef(argv, argc), " "));
  // The model of the fusion experiments stands behind the computed tables.
  if (llvm::any_of(makers, [&](const auto &each) {
        return wanted.contains(each.first);
      })) {
    Expected<Tally> policies = checkPolicies(*reference);
    if (!policies)
      return reportError(kTool, policies.status());
    Tally grid = checkGrid(*reference);
    for (const auto &[tally, what] :
         {std::pair(&*policies, "policies"), std::pair(&grid, "weightings")}) {
      failed |= tally->failed != 0;
      if (!toStdout) {
        for (const std::string &name : tally->failures)
          llvm::outs() << "FAIL " << name << "\n";
        llvm::outs() << "fusion " << what << ": " << tally->passed
                     << " passed, " << tally->failed << " failed\n";
      }
    }
    if (!toStdout)
      llvm::outs() << "\n";
    root["tier1"] = json::Object{{"passed", policies->passed},
                                 {"failed", policies->failed},
                                 {"grid_passed", grid.passed},
                                 {"grid_failed", grid.failed}};
  }
  for (const auto &[name, make] : makers)
    if (wanted.contains(name))
      finish(make());
  for (const MeasuredTable &each : measurements)
    if (wanted.contains(each.id))
      if (Status status = each.run(); !status)
        return reportError(kTool, status);
  if (!tables.empty())
    root["tables"] = std::move(tables);
  if (rotating) {
    json::Array files;
    for (const std::string &path : activations) {
      Expected<json::Object> result = rotateFile(path, channels, !toStdout);
      if (!result)
        return reportError(kTool, result.status());
      files.push_back(std::move(*result));
    }
    root["hadamard"] = std::move(files);
  }
  if (!jsonPath.empty())
    if (int status = writeJSON(jsonPath, std::move(document)))
      return status;
  return failed;
}
