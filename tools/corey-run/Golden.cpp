//===- Golden.cpp - Runs folders of golden cases --------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// A case names an op, its attributes and its tensors in a safetensors file. It
// is turned into a module with dynamic batch and length, compiled and run; the
// outputs are compared with the file's. The op `program` runs a whole .mlir.
//
//===----------------------------------------------------------------------===//

#include "Golden.h"
#include "corey/ToolUtils.h"
#include "llvm/ADT/STLExtras.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/Support/Format.h"
#include "llvm/Support/JSON.h"
#include "llvm/Support/MemoryBuffer.h"
#include "llvm/Support/raw_ostream.h"
#include <map>

using namespace corey;

namespace {
using Tensors = std::map<std::string, Tensor>;

struct Case {
  std::string name, op;
  const llvm::json::Object *attrs = nullptr;
  Tensors inputs, outputs;

  bool flag(llvm::StringRef key) const {
    return attrs && attrs->getBoolean(key).value_or(false);
  }
  double number(llvm::StringRef key, double fallback) const {
    return attrs ? attrs->getNumber(key).value_or(fallback) : fallback;
  }
  std::string text(llvm::StringRef key) const {
    return attrs ? attrs->getString(key).value_or("").str() : "";
  }
};

/// One function made of one op, in text: operands in the order they are added.
class OpProgram {
public:
  explicit OpProgram(llvm::StringRef mnemonic) : mnemonic(mnemonic) {}

  /// Type of a tensor whose first `dynamic` dimensions are free.
  static std::string type(const std::vector<int64_t> &shape, unsigned dynamic,
                          llvm::StringRef element = "f32") {
    std::string text = "tensor<";
    for (size_t i = 0; i < shape.size(); ++i)
      text += (i < dynamic ? "?" : std::to_string(shape[i])) + "x";
    return text + element.str() + ">";
  }

  /// An argument; `use` is how the op names it, "" for a plain operand, and
  /// "(B" stands for `B(%x)` with its type in the list at the end.
  void operand(const std::string &name, const Tensor &tensor, unsigned dynamic,
               llvm::StringRef keyword = "", bool typeAtEnd = true) {
    std::string t = type(tensor.shape(), dynamic);
    arguments += (arguments.empty() ? "" : ", ") + ("%" + name + ": " + t);
    if (keyword.empty())
      operands += (operands.empty() ? "%" : ", %") + name;
    else
      operands += " " + keyword.str() + "(%" + name +
                  (typeAtEnd ? ")" : " : " + t + ")");
    if (typeAtEnd)
      types += (types.empty() ? "" : ", ") + t;
    tensors.push_back(tensor);
  }
  void result(const std::string &name, const std::vector<int64_t> &shape,
              unsigned dynamic) {
    std::string t = type(shape, dynamic);
    results += (results.empty() ? "%" : ", %") + name + "_out";
    resultTypes += (resultTypes.empty() ? "" : ", ") + t;
    names.push_back(name);
  }
  void attribute(const std::string &text) {
    attributes += (attributes.empty() ? "" : ", ") + text;
  }

  std::string module() const {
    return "func.func @main(" + arguments + ") -> (" + resultTypes + ") {\n  " +
           results + " = ssm." + mnemonic + " " + operands +
           (attributes.empty() ? "" : " {" + attributes + "}") + " : " + types +
           " -> " + resultTypes + "\n  return " + results + " : " +
           resultTypes + "\n}\n";
  }

  std::vector<Tensor> tensors;
  std::vector<std::string> names;

private:
  std::string mnemonic, arguments, operands, types, results, resultTypes,
      attributes;
};

/// Runs golden cases against one context.
class Runner {
public:
  Runner(Context &context, const CompileOptions &options, double rtol,
         double atol)
      : context(context), options(options), rtol(rtol), atol(atol) {}

  void run(const Case &c) {
    worst = Difference();
    Status status = dispatch(c);
    double bound = rtol >= 0 ? rtol : operatorBound();
    bool ok = status && worst.relativeL2 <= bound &&
              !(atol >= 0 && !(worst.maxAbsolute <= atol));
    (ok ? passed : failed)++;
    llvm::outs() << (ok ? "PASS " : "FAIL ") << c.name << " (" << c.op << ")";
    if (status)
      llvm::outs() << llvm::format(
          ": relative l2 error %.3g, max absolute error %.3g\n",
          worst.relativeL2, worst.maxAbsolute);
    else
      llvm::outs() << ": " << status.message() << "\n";
  }

  unsigned passed = 0, failed = 0;

private:
  /// Bound on the error of an operator in f32. Kernels of a GPU approximate
  /// exponentials to two units in the last place, and add in other orders.
  double operatorBound() const {
    return context.getDevice().kind == Device::CUDA ? 5e-6 : 2e-6;
  }

  /// What runs a case of an op, and the tensors the case must have with their
  /// ranks; * is any rank of at least 1.
  struct Op {
    Status (Runner::*run)(const Case &);
    llvm::StringLiteral inputs, outputs;
  };

  Status dispatch(const Case &c) {
    static const std::map<std::string, Op> ops = {
        {"selective_scan",
         {&Runner::selectiveScan, "u:3 dt:3 A:2 B:4 C:4", "y:3 final_state:3"}},
        {"ssd", {&Runner::ssd, "x:4 dt:3 A:1 B:4 C:4", "y:4 final_states:4"}},
        {"ssd_discrete",
         {&Runner::ssdDiscrete, "X:4 A:3 B:4 C:4", "y:4 final_states:4"}},
        {"causal_conv1d",
         {&Runner::causalConv, "x:3 weight:2", "y:3 final_state:3"}},
        {"selective_state_update",
         {&Runner::selectiveStateUpdate, "state0:3 x:3 dt:3 A:2 B:4 C:4",
          "y:3 state:4"}},
        {"ssd_state_update",
         {&Runner::ssdStateUpdate, "state0:4 x:4 dt:3 A:1 B:4 C:4",
          "y:4 state:5"}},
        {"causal_conv1d_update",
         {&Runner::causalConvUpdate, "state0:3 x:3 weight:2", "y:3 state:4"}},
        {"rmsnorm", {&Runner::rmsNorm, "x:* weight:1", "y:*"}},
        {"rmsnorm_gated", {&Runner::rmsNorm, "x:* weight:1 z:*", "y:*"}},
        {"hadamard", {&Runner::hadamard, "x:*", "y:*"}},
    };
    auto it = ops.find(c.op);
    if (it == ops.end())
      return Status::unsupported("expected a known op, got '" + c.op + "'");
    if (Status status = require(c.inputs, "input", it->second.inputs); !status)
      return status;
    if (Status status = require(c.outputs, "output", it->second.outputs);
        !status)
      return status;
    return (this->*it->second.run)(c);
  }

  /// Checks that `tensors` has those of `list`, with their ranks.
  static Status require(const Tensors &tensors, const char *kind,
                        llvm::StringRef list) {
    llvm::SmallVector<llvm::StringRef> entries;
    list.split(entries, ' ');
    for (llvm::StringRef entry : entries) {
      auto [name, rank] = entry.split(':');
      auto it = tensors.find(name.str());
      if (it == tensors.end())
        return Status::invalidArgument(std::string("expected an ") + kind +
                                       " '" + name.str() + "', got none");
      size_t given = it->second.shape().size();
      if (rank == "*" ? given < 1 : std::to_string(given) != rank)
        return Status::invalidArgument(
            std::string(kind) + " '" + name.str() + "': expected rank " +
            (rank == "*" ? "at least 1" : rank.str()) + ", got " +
            it->second.describe());
    }
    return Status::ok();
  }

  Status merge(const Tensor &result, const Tensor &expected) {
    Expected<Difference> difference = compare(result, expected);
    if (!difference)
      return difference.takeStatus();
    worst.relativeL2 = std::max(worst.relativeL2, difference->relativeL2);
    worst.maxAbsolute = std::max(worst.maxAbsolute, difference->maxAbsolute);
    return Status::ok();
  }

  Status runAndCompare(const OpProgram &program, const Tensors &expected,
                       const std::map<std::string, std::string> &renamed = {}) {
    Expected<std::shared_ptr<Executable>> executable =
        context.compile(program.module(), options, "<golden>");
    if (!executable)
      return executable.takeStatus();
    std::vector<Tensor> outputs;
    if (Status status = runFromHost(**executable, context.getDevice(), "main",
                                    program.tensors, outputs);
        !status)
      return status;
    for (size_t i = 0; i < outputs.size(); ++i) {
      auto it = renamed.find(program.names[i]);
      const Tensor &reference =
          expected.at(it == renamed.end() ? program.names[i] : it->second);
      if (Status status = merge(outputs[i], reference); !status)
        return status;
    }
    return Status::ok();
  }

  static const Tensor *find(const Case &c, const std::string &name) {
    auto it = c.inputs.find(name);
    return it == c.inputs.end() ? nullptr : &it->second;
  }

  //===--- Whole sequences
  //--------------------------------------------------===//

  Status selectiveScan(const Case &c) {
    OpProgram p("selective_scan");
    for (const char *name : {"u", "dt", "A", "B", "C"})
      p.operand(name, c.inputs.at(name), llvm::StringRef(name) == "A" ? 0 : 2);
    for (auto [name, dynamic] : {std::pair<const char *, unsigned>{"D", 0},
                                 {"z", 2},
                                 {"delta_bias", 0},
                                 {"initial_state", 1}})
      if (const Tensor *t = find(c, name))
        p.operand(name, *t, dynamic, name, /*typeAtEnd=*/false);
    if (c.flag("delta_softplus"))
      p.attribute("delta_softplus");
    p.result("y", c.outputs.at("y").shape(), 2);
    p.result("final_state", c.outputs.at("final_state").shape(), 1);
    return runAndCompare(p, c.outputs);
  }

  void ssdOptions(const Case &c, OpProgram &p) {
    for (auto [name, dynamic] : {std::pair<const char *, unsigned>{"D", 0},
                                 {"z", 2},
                                 {"dt_bias", 0},
                                 {"initial_states", 1}})
      if (const Tensor *t = find(c, name))
        p.operand(name, *t, dynamic, name, /*typeAtEnd=*/false);
    if (c.flag("dt_softplus"))
      p.attribute("dt_softplus");
  }

  Status ssd(const Case &c) {
    OpProgram p("ssd");
    p.operand("x", c.inputs.at("x"), 2);
    p.operand("dt", c.inputs.at("dt"), 2, "dt", false);
    p.operand("A", c.inputs.at("A"), 0, "A", false);
    p.operand("B", c.inputs.at("B"), 2, "B");
    p.operand("C", c.inputs.at("C"), 2, "C");
    ssdOptions(c, p);
    p.result("y", c.outputs.at("y").shape(), 2);
    p.result("final_states", c.outputs.at("final_states").shape(), 1);
    return runAndCompare(p, c.outputs);
  }

  Status ssdDiscrete(const Case &c) {
    OpProgram p("ssd");
    // The case stores decays head-major; a transposed view is [B, L, H].
    Expected<Tensor> decay = c.inputs.at("A").transpose(1, 2);
    if (!decay)
      return decay.takeStatus();
    p.operand("x", c.inputs.at("X"), 2);
    p.operand("decay", *decay, 2, "decay", false);
    p.operand("B", c.inputs.at("B"), 2, "B");
    p.operand("C", c.inputs.at("C"), 2, "C");
    ssdOptions(c, p);
    p.result("y", c.outputs.at("y").shape(), 2);
    p.result("final_states", c.outputs.at("final_states").shape(), 1);
    return runAndCompare(p, c.outputs);
  }

  Status causalConv(const Case &c) {
    OpProgram p("causal_conv");
    p.operand("x", c.inputs.at("x"), 2);
    p.operand("weight", c.inputs.at("weight"), 0);
    for (auto [name, dynamic] :
         {std::pair<const char *, unsigned>{"bias", 0}, {"initial_state", 1}})
      if (const Tensor *t = find(c, name))
        p.operand(name, *t, dynamic, name, false);
    if (c.text("activation") == "silu")
      p.attribute("silu");
    p.result("y", c.outputs.at("y").shape(), 2);
    p.result("final_state", c.outputs.at("final_state").shape(), 1);
    return runAndCompare(p, c.outputs);
  }

  Status rmsNorm(const Case &c) {
    OpProgram p("rms_norm");
    unsigned rank = c.inputs.at("x").shape().size();
    p.operand("x", c.inputs.at("x"), rank - 1);
    p.operand("weight", c.inputs.at("weight"), 0);
    if (const Tensor *z = find(c, "z"))
      p.operand("z", *z, rank - 1, "z", false);
    std::string eps;
    llvm::raw_string_ostream(eps)
        << llvm::format("eps = %.9e : f32", c.number("eps", 1e-5));
    p.attribute(eps);
    if (c.flag("norm_before_gate"))
      p.attribute("norm_before_gate");
    if (double group = c.number("group_size", 0))
      p.attribute("group_size = " +
                  std::to_string(static_cast<int64_t>(group)) + " : i64");
    p.result("y", c.outputs.at("y").shape(), rank - 1);
    return runAndCompare(p, c.outputs);
  }

  Status hadamard(const Case &c) {
    OpProgram p("hadamard");
    unsigned rank = c.inputs.at("x").shape().size();
    p.operand("x", c.inputs.at("x"), rank - 1);
    p.attribute("block = " +
                std::to_string(static_cast<int64_t>(c.number("block", 0))) +
                " : i64");
    p.result("y", c.outputs.at("y").shape(), rank - 1);
    return runAndCompare(p, c.outputs);
  }

  //===--- One token at a time
  //----------------------------------------------===//

  /// Slice t of a [T, ...] tensor as [B, 1, ...]: one token.
  static Expected<Tensor> token(const Tensor &tensor, int64_t t) {
    Expected<Tensor> slice = tensor.slice(0, t, t + 1);
    return slice ? slice->transpose(0, 1) : std::move(slice);
  }
  static Expected<Tensor> step(const Tensor &tensor, int64_t t) {
    Expected<Tensor> slice = tensor.slice(0, t, t + 1);
    if (!slice)
      return slice;
    return slice->reshape(
        std::vector<int64_t>(tensor.shape().begin() + 1, tensor.shape().end()));
  }

  /// Compiles `build` once for tokens of the first step and runs every step,
  /// the state of one being the input of the next.
  Status steps(const Case &c,
               llvm::function_ref<Status(OpProgram &, const Tensors &)> build) {
    int64_t count = c.outputs.at("y").shape()[0];
    Tensor state = c.inputs.at("state0");
    std::shared_ptr<Executable> executable;
    for (int64_t t = 0; t < count; ++t) {
      Tensors inputs = c.inputs;
      inputs["state0"] = state;
      for (const char *name : {"x", "dt", "B", "C", "z"}) {
        auto it = inputs.find(name);
        if (it == inputs.end())
          continue;
        Expected<Tensor> one = token(it->second, t);
        if (!one)
          return one.takeStatus();
        it->second = *one;
      }
      OpProgram p(c.op == "selective_state_update" ? "selective_scan"
                  : c.op == "ssd_state_update"     ? "ssd"
                                                   : "causal_conv");
      if (Status status = build(p, inputs); !status)
        return status;
      if (!executable) {
        Expected<std::shared_ptr<Executable>> compiled =
            context.compile(p.module(), options, "<golden>");
        if (!compiled)
          return compiled.takeStatus();
        executable = *compiled;
      }
      std::vector<Tensor> outputs;
      if (Status status = runFromHost(*executable, context.getDevice(), "main",
                                      p.tensors, outputs);
          !status)
        return status;
      for (auto [name, output] :
           {std::pair<const char *, Tensor *>{"y", &outputs[0]},
            {"state", &outputs[1]}}) {
        Expected<Tensor> expected = step(c.outputs.at(name), t);
        if (!expected)
          return expected.takeStatus();
        if (Status status = merge(*output, *expected); !status)
          return status;
      }
      state = outputs[1];
    }
    return Status::ok();
  }

  Status selectiveStateUpdate(const Case &c) {
    return steps(c, [&](OpProgram &p, const Tensors &inputs) {
      for (const char *name : {"x", "dt", "A", "B", "C"})
        p.operand(name, inputs.at(name), llvm::StringRef(name) == "A" ? 0 : 2);
      for (auto [name, keyword, dynamic] :
           {std::tuple<const char *, const char *, unsigned>{"D", "D", 0},
            {"z", "z", 2},
            {"dt_bias", "delta_bias", 0},
            {"state0", "initial_state", 1}})
        if (inputs.count(name))
          p.operand(name, inputs.at(name), dynamic, keyword, false);
      if (c.flag("dt_softplus"))
        p.attribute("delta_softplus");
      p.result("y", inputs.at("x").shape(), 2);
      p.result("state", inputs.at("state0").shape(), 1);
      return Status::ok();
    });
  }

  Status ssdStateUpdate(const Case &c) {
    return steps(c, [&](OpProgram &p, const Tensors &inputs) {
      p.operand("x", inputs.at("x"), 2);
      p.operand("dt", inputs.at("dt"), 2, "dt", false);
      p.operand("A", inputs.at("A"), 0, "A", false);
      p.operand("B", inputs.at("B"), 2, "B");
      p.operand("C", inputs.at("C"), 2, "C");
      for (auto [name, keyword, dynamic] :
           {std::tuple<const char *, const char *, unsigned>{"D", "D", 0},
            {"z", "z", 2},
            {"dt_bias", "dt_bias", 0},
            {"state0", "initial_states", 1}})
        if (inputs.count(name))
          p.operand(name, inputs.at(name), dynamic, keyword, false);
      if (c.flag("dt_softplus"))
        p.attribute("dt_softplus");
      p.result("y", inputs.at("x").shape(), 2);
      p.result("state", inputs.at("state0").shape(), 1);
      return Status::ok();
    });
  }

  Status causalConvUpdate(const Case &c) {
    return steps(c, [&](OpProgram &p, const Tensors &inputs) {
      p.operand("x", inputs.at("x"), 2);
      p.operand("weight", inputs.at("weight"), 0);
      if (inputs.count("bias"))
        p.operand("bias", inputs.at("bias"), 0, "bias", false);
      p.operand("state0", inputs.at("state0"), 1, "initial_state", false);
      if (c.text("activation") == "silu")
        p.attribute("silu");
      p.result("y", inputs.at("x").shape(), 2);
      p.result("state", inputs.at("state0").shape(), 1);
      return Status::ok();
    });
  }

  Context &context;
  CompileOptions options;
  double rtol, atol;
  Difference worst;
};
} // namespace

/// Runs a `program` case: a .mlir with weights, inputs and expected outputs
/// named by references from the folder.
static Status runProgram(Context &context, const CompileOptions &options,
                         const std::string &folder,
                         const llvm::json::Object &object, Difference &worst) {
  auto path = [&](llvm::StringRef text) {
    return pathFrom(folder, text.str());
  };
  auto program = object.getString("program");
  if (!program)
    return Status::invalidArgument("expected a string 'program', got none");
  Expected<std::shared_ptr<Executable>> executable =
      context.compileFile(path(*program), options);
  if (!executable)
    return executable.takeStatus();
  if (auto weights = object.getString("weights")) {
    Expected<SafeTensors> file = SafeTensors::open(path(*weights));
    if (!file)
      return file.takeStatus();
    std::string prefix = object.getString("weight_prefix").value_or("").str();
    if (Status status =
            (*executable)
                ->bindWeights(*file, object.getString("weight_prefix")
                                         ? &prefix
                                         : nullptr);
        !status)
      return status;
  }
  const llvm::json::Object *inputs = object.getObject("inputs"),
                           *outputs = object.getObject("outputs");
  if (!inputs || !outputs)
    return Status::invalidArgument(
        "expected objects 'inputs' and 'outputs', got none");
  const FunctionInfo &info = (*executable)->functions().front();
  std::vector<Tensor> tensors, results;
  for (const ArgumentInfo &argument : info.inputs) {
    auto ref = inputs->getString(argument.name);
    if (!ref)
      return Status::invalidArgument("expected an input '" + argument.name +
                                     "', got none");
    Expected<Tensor> tensor = readTensorRef(path(*ref));
    if (!tensor)
      return tensor.takeStatus();
    while (tensor->shape().size() < argument.shape.size()) {
      tensor = tensor->unsqueeze(0);
      if (!tensor)
        return tensor.takeStatus();
    }
    tensors.push_back(*tensor);
  }
  if (Status status = runFromHost(**executable, context.getDevice(), info.name,
                                  tensors, results);
      !status)
    return status;
  for (auto [given, known, kind] :
       {std::tuple<const llvm::json::Object *,
                   const std::vector<ArgumentInfo> *, const char *>{
            inputs, &info.inputs, "input"},
        {outputs, &info.outputs, "output"}})
    for (auto &[key, value] : *given)
      if (llvm::none_of(*known, [&, &key = key](const ArgumentInfo &a) {
            return llvm::StringRef(key) == a.name;
          }))
        return Status::invalidArgument(std::string("expected an ") + kind +
                                       " of @" + info.name + ", got '" +
                                       key.str() + "'");
  if (outputs->empty())
    return Status::invalidArgument("expected an output to compare, got none");
  for (size_t i = 0; i < results.size(); ++i) {
    auto ref = outputs->getString(info.outputs[i].name);
    if (!ref)
      continue;
    Expected<Tensor> expected = readTensorRef(path(*ref));
    if (!expected)
      return expected.takeStatus();
    Expected<Difference> difference = compare(results[i], *expected);
    if (!difference)
      return difference.takeStatus();
    worst.relativeL2 = std::max(worst.relativeL2, difference->relativeL2);
    worst.maxAbsolute = std::max(worst.maxAbsolute, difference->maxAbsolute);
  }
  return Status::ok();
}

int corey::runGolden(Context &context, const std::string &folder,
                     const CompileOptions &options, double rtol, double atol) {
  constexpr const char *tool = "corey-run";
  std::string index = folder + "/cases.json";
  auto buffer = llvm::MemoryBuffer::getFile(index);
  if (!buffer)
    return reportError(
        tool, Status::notFound(index + ": " + buffer.getError().message()));
  auto json = llvm::json::parse((*buffer)->getBuffer());
  if (!json)
    return reportError(tool,
                       Status::invalidArgument(
                           index + ": " + llvm::toString(json.takeError())));
  const llvm::json::Array *cases =
      json->getAsObject() ? json->getAsObject()->getArray("cases") : nullptr;
  if (cases && cases->empty())
    return reportError(tool,
                       Status::invalidArgument(
                           index + ": expected at least one case, got none"));
  if (!cases)
    return reportError(
        tool, Status::invalidArgument(
                  index + ": expected an object with an array 'cases'"));

  Runner runner(context, options, rtol, atol);
  std::map<std::string, SafeTensors> files;
  for (const llvm::json::Value &value : *cases) {
    const llvm::json::Object *object = value.getAsObject();
    if (!object || !object->getString("name") || !object->getString("op"))
      return reportError(
          tool,
          Status::invalidArgument(
              index +
              ": expected every case to be an object with 'name' and 'op'"));
    Case c;
    c.name = object->getString("name")->str();
    c.op = object->getString("op")->str();
    c.attrs = object->getObject("attrs");
    if (c.op == "program") {
      Difference worst;
      Status status = runProgram(context, options, folder, *object, worst);
      bool ok = status && worst.relativeL2 <= (rtol >= 0 ? rtol : 1e-5) &&
                !(atol >= 0 && !(worst.maxAbsolute <= atol));
      (ok ? runner.passed : runner.failed)++;
      llvm::outs() << (ok ? "PASS " : "FAIL ") << c.name << " (program): ";
      if (status)
        llvm::outs() << llvm::format(
            "relative l2 error %.3g, max absolute error %.3g\n",
            worst.relativeL2, worst.maxAbsolute);
      else
        llvm::outs() << status.message() << "\n";
      continue;
    }
    auto fileName = object->getString("file");
    const llvm::json::Object *tensors = object->getObject("tensors");
    if (!fileName || !tensors)
      return reportError(
          tool, Status::invalidArgument(index + ": case '" + c.name +
                                        "': expected 'file' and 'tensors'"));
    std::string path = folder + "/" + fileName->str();
    auto it = files.find(path);
    if (it == files.end()) {
      Expected<SafeTensors> file = SafeTensors::open(path);
      if (!file)
        return reportError(tool, file.status());
      it = files.emplace(path, std::move(*file)).first;
    }
    std::string prefix = object->getString("key_prefix").value_or("").str();
    Status status;
    for (auto &[key, description] : *tensors) {
      Expected<Tensor> tensor = it->second.get(prefix + key.str());
      if (!tensor) {
        status = tensor.takeStatus();
        break;
      }
      const llvm::json::Object *fields = description.getAsObject();
      auto role = fields ? fields->getString("role") : std::nullopt;
      if (role != llvm::StringRef("input") &&
          role != llvm::StringRef("output")) {
        status = Status::invalidArgument(index + ": case '" + c.name +
                                         "': expected tensor '" + key.str() +
                                         "' to have the role input or output");
        break;
      }
      (role == llvm::StringRef("input") ? c.inputs : c.outputs)[key.str()] =
          *tensor;
    }
    if (!status)
      return reportError(tool, status);
    runner.run(c);
  }
  llvm::outs() << runner.passed << " passed, " << runner.failed << " failed\n";
  return runner.failed != 0;
}
