//===- Launcher.cpp - Warm calls of ops -----------------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// An op of the package is a program of one function and what is done to its
// arguments before: axes exchanged, added, broadcast. All of that depends on
// types, shapes and strides alone. Python works it out when it sees them for
// the first time and leaves a Plan; a call of known shapes finds its plan here
// and runs no code of Python.
//
//===----------------------------------------------------------------------===//

#include "Interop.h"
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <unordered_map>

namespace corey::python {

/// What a function reads or writes: a view of an argument's memory, an output,
/// or a tensor of the plan's own.
struct Operand {
  int argument = -1;
  std::vector<int64_t> shape, strides;
  int64_t offset = 0;
  /// Without an argument.
  Tensor constant;
};

struct Output {
  Operand view;
  /// Made anew unless `view` is one of an argument.
  DType dtype = DType::F32;
  std::vector<int64_t> shape, strides;
};

struct Plan {
  std::shared_ptr<Executable> program;
  std::vector<Operand> inputs;
  std::vector<Output> outputs;
  /// What is returned: numbers of outputs, -1 - i for argument i.
  std::vector<int> results;
};

using ViewTuple =
    std::tuple<int, std::vector<int64_t>, std::vector<int64_t>, int64_t>;

static Operand toOperand(nb::handle object) {
  Operand operand;
  if (nb::isinstance<Tensor>(object)) {
    operand.constant = nb::cast<Tensor>(object);
    return operand;
  }
  std::tie(operand.argument, operand.shape, operand.strides, operand.offset) =
      nb::cast<ViewTuple>(object);
  return operand;
}

class Launcher {
public:
  Launcher(std::string op, std::vector<std::string> names, nb::object builder)
      : op(std::move(op)), names(std::move(names)),
        builder(std::move(builder)) {}

  nb::object call(nb::args arguments, bool direct);
  void clear() { plans.clear(); }
  size_t size() const { return plans.size(); }

  std::string op;
  std::vector<std::string> names;
  nb::object builder;

private:
  /// Far more than a program of one kind meets; past it all are forgotten.
  static constexpr size_t kMostPlans = 4096;
  std::unordered_map<std::string, std::shared_ptr<const Plan>> plans;
};

static void appendKey(std::string &key, const Borrowed &one) {
  const Tensor &tensor = one.tensor;
  char head[4] = {
      static_cast<char>(one.library), static_cast<char>(tensor.dtype()),
      static_cast<char>(
          tensor.device().kind == Device::CUDA ? 1 + tensor.device().index : 0),
      static_cast<char>(tensor.rank())};
  key.append(head, 4);
  key.append(reinterpret_cast<const char *>(tensor.shape().data()),
             tensor.rank() * sizeof(int64_t));
  key.append(reinterpret_cast<const char *>(tensor.strides().data()),
             tensor.rank() * sizeof(int64_t));
}

static Tensor viewOf(const Tensor &base, const Operand &operand) {
  char *data = static_cast<char *>(base.data()) +
               operand.offset * static_cast<int64_t>(dtypeSize(base.dtype()));
  return take(Tensor::view(data, base.dtype(), operand.shape, operand.strides,
                           base.device()));
}

/// Whether kernels cannot read a tensor where it lies, and copies of the
/// driver, which libcorey makes of it then, move one element at a time:
/// milliseconds.
static bool isTransposed(const Operand &operand) {
  return !operand.shape.empty() && operand.shape.back() > 1 &&
         operand.strides.back() != 1;
}

/// The part of a tensor of torch that an operand is, as a tensor of torch.
static nb::object partOf(nb::handle base, const Operand &operand) {
  return base.attr("as_strided")(
      toTuple(operand.shape), toTuple(operand.strides),
      nb::cast<int64_t>(base.attr("storage_offset")()) + operand.offset);
}

nb::object Launcher::call(nb::args arguments, bool direct) {
  size_t count = arguments.size();
  if (count != names.size())
    throw nb::type_error((op + ": expected " + std::to_string(names.size()) +
                          " arguments, got " + std::to_string(count))
                             .c_str());
  if (!direct)
    for (nb::handle argument : arguments)
      if (!argument.is_none() && torchUse(argument) != TorchUse::Direct)
        return nb::borrow(Py_NotImplemented);

  std::vector<std::optional<Borrowed>> borrowed(count);
  std::string key;
  key.reserve(count * 72);
  const Borrowed *first = nullptr;
  nb::handle like;
  for (size_t i = 0; i < count; ++i) {
    if (arguments[i].is_none()) {
      key.push_back(-1);
      continue;
    }
    borrowed[i].emplace(arguments[i], names[i].c_str());
    appendKey(key, *borrowed[i]);
    if (!first) {
      first = &*borrowed[i];
      like = arguments[i];
    } else if (borrowed[i]->tensor.device() != first->tensor.device()) {
      throw nb::value_error(
          (op + ": expected every tensor on " + first->tensor.device().name() +
           ", got " + names[i] + " on " + borrowed[i]->tensor.device().name())
              .c_str());
    }
  }
  if (!first)
    throw nb::type_error((op + ": expected tensors, got none").c_str());

  std::shared_ptr<const Plan> plan;
  if (auto found = plans.find(key); found != plans.end()) {
    plan = found->second;
  } else {
    nb::list described;
    for (const std::optional<Borrowed> &one : borrowed) {
      if (!one) {
        described.append(nb::none());
        continue;
      }
      described.append(nb::make_tuple(dtypeName(one->tensor.dtype()),
                                      toTuple(one->tensor.shape()),
                                      toTuple(one->tensor.strides())));
    }
    plan = nb::cast<std::shared_ptr<Plan>>(
        builder(first->tensor.device().name(), described));
    if (plans.size() >= kMostPlans)
      plans.clear();
    plans.emplace(std::move(key), plan);
  }

  Device device = first->tensor.device();
  std::vector<Tensor> inputs, outputs;
  inputs.reserve(plan->inputs.size());
  outputs.reserve(plan->outputs.size());
  // On a device torch has kernels that transpose.
  bool transposes =
      device.kind == Device::CUDA && first->library == Library::Torch;
  std::vector<nb::object> copies;
  std::vector<Borrowed> ofCopies;
  ofCopies.reserve(plan->inputs.size());
  for (const Operand &operand : plan->inputs) {
    if (operand.argument < 0) {
      inputs.push_back(operand.constant);
      continue;
    }
    if (transposes && isTransposed(operand)) {
      copies.push_back(
          partOf(arguments[operand.argument], operand).attr("contiguous")());
      ofCopies.emplace_back(copies.back(), names[operand.argument].c_str());
      inputs.push_back(ofCopies.back().tensor);
      continue;
    }
    inputs.push_back(viewOf(borrowed[operand.argument]->tensor, operand));
  }
  std::vector<nb::object> made(plan->outputs.size()), staged(made.size());
  std::vector<Borrowed> written;
  written.reserve(plan->outputs.size());
  for (size_t i = 0; i < plan->outputs.size(); ++i) {
    const Output &output = plan->outputs[i];
    if (output.view.argument >= 0) {
      outputs.push_back(
          viewOf(borrowed[output.view.argument]->tensor, output.view));
      continue;
    }
    made[i] = makeTensor(first->library, output.dtype, output.shape,
                         output.strides, device);
    if (transposes && isTransposed(output.view)) {
      staged[i] = makeTensor(first->library, output.dtype, output.view.shape,
                             {}, device);
      written.emplace_back(staged[i], "output", /*writable=*/true);
      outputs.push_back(written.back().tensor);
      continue;
    }
    written.emplace_back(made[i], "output", /*writable=*/true);
    outputs.push_back(viewOf(written.back().tensor, output.view));
  }
  void *stream = currentStream(first->library, device);
  Status status;
  {
    nb::gil_scoped_release unlocked;
    status = plan->program->run("main", inputs.data(), inputs.size(),
                                outputs.data(), outputs.size(), stream);
  }
  if (!status)
    raise(Status(status.code(), op + ": " + status.message()));
  for (size_t i = 0; i < staged.size(); ++i)
    if (staged[i].is_valid())
      partOf(made[i], plan->outputs[i].view).attr("copy_")(staged[i]);

  auto result = [&](int number) -> nb::object {
    if (number < 0)
      return nb::borrow(arguments[-1 - number]);
    // What a library without makers of strided tensors gets is shared with it.
    if (first->library == Library::Other)
      return share(nb::cast<Tensor>(made[number]), first->library, like);
    return made[number];
  };
  if (plan->results.size() == 1)
    return result(plan->results[0]);
  nb::tuple tuple = nb::steal<nb::tuple>(PyTuple_New(plan->results.size()));
  for (size_t i = 0; i < plan->results.size(); ++i)
    PyTuple_SET_ITEM(tuple.ptr(), i, result(plan->results[i]).release().ptr());
  return tuple;
}

static int traverse(PyObject *self, visitproc visit, void *arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self))
    return 0;
  Launcher *launcher = nb::inst_ptr<Launcher>(self);
  Py_VISIT(launcher->builder.ptr());
  return 0;
}
static int clear(PyObject *self) {
  nb::inst_ptr<Launcher>(self)->builder.reset();
  return 0;
}
static PyType_Slot slots[] = {{Py_tp_traverse, (void *)traverse},
                              {Py_tp_clear, (void *)clear},
                              {0, nullptr}};

void bindLauncher(nb::module_ &module) {
  nb::class_<Plan>(module, "Plan")
      .def(
          "__init__",
          [](Plan *self, std::shared_ptr<Executable> program, nb::list inputs,
             nb::list outputs, std::vector<int> results) {
            auto *plan = new (self) Plan;
            plan->program = std::move(program);
            for (nb::handle input : inputs)
              plan->inputs.push_back(toOperand(input));
            for (nb::handle output : outputs) {
              auto [view, dtype, shape, strides] = nb::cast<
                  std::tuple<nb::object, std::string, std::vector<int64_t>,
                             std::vector<int64_t>>>(output);
              Output made;
              made.view = toOperand(view);
              made.dtype = take(dtypeFromName(dtype));
              made.shape = std::move(shape);
              made.strides = std::move(strides);
              plan->outputs.push_back(std::move(made));
            }
            plan->results = std::move(results);
          },
          nb::arg("program"), nb::arg("inputs"), nb::arg("outputs"),
          nb::arg("results"),
          "Inputs are (argument, shape, strides, offset) or tensors; outputs "
          "(view, dtype, shape, strides), the view's argument -1 for one that "
          "is "
          "made.");
  nb::class_<Launcher>(module, "Launcher", nb::type_slots(slots))
      .def(nb::init<std::string, std::vector<std::string>, nb::object>(),
           nb::arg("op"), nb::arg("names"), nb::arg("builder"))
      .def(
          "__call__",
          [](Launcher &self, nb::args arguments) {
            return self.call(arguments, /*direct=*/false);
          },
          "NotImplemented where only torch's dispatcher can make the call.")
      .def("direct",
           [](Launcher &self, nb::args arguments) {
             return self.call(arguments, /*direct=*/true);
           })
      .def("clear", &Launcher::clear)
      .def("__len__", &Launcher::size);
  module.def(
      "range_tensor",
      [](int64_t count, const std::string &device) {
        Tensor host = take(Tensor::empty(DType::I32, {count}));
        for (int64_t i = 0; i < count; ++i)
          host.dataAs<int32_t>()[i] = static_cast<int32_t>(i);
        Device place = take(Device::parse(device));
        return place.kind == Device::CPU ? host : take(host.to(place));
      },
      nb::arg("count"), nb::arg("device"), "0, 1, ... as i32.");
}

} // namespace corey::python
