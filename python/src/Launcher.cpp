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
  /// The same as tuples.
  nb::object shapeTuple, stridesTuple;
};

/// Views of the tensors of a call, kept for the next, which takes no memory for
/// them.
struct Frame {
  std::vector<Tensor> inputs, outputs;
};

struct Plan {
  std::shared_ptr<Executable> program;
  /// Of calls that are over. Under the interpreter's lock.
  std::vector<Frame> idle;
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

/// Types, shapes and strides of arguments.
class Key {
public:
  Key() { numbers.reserve(128); }
  void addNone() { numbers.push_back(-1); }
  void add(const Borrowed &one) {
    int device = one.device.kind == Device::CUDA ? 1 + one.device.index : 0;
    numbers.push_back(static_cast<int64_t>(one.library) |
                      static_cast<int64_t>(one.dtype) << 8 |
                      static_cast<int64_t>(one.rank) << 16 |
                      static_cast<int64_t>(device) << 32);
    numbers.insert(numbers.end(), one.shape, one.shape + one.rank);
    numbers.insert(numbers.end(), one.strides, one.strides + one.rank);
  }
  uint64_t hash() const {
    uint64_t state = numbers.size();
    for (int64_t number : numbers) {
      state = (state ^ static_cast<uint64_t>(number)) * 0x9E3779B97F4A7C15;
      state ^= state >> 29;
    }
    return state;
  }
  bool operator==(const Key &other) const { return numbers == other.numbers; }

private:
  std::vector<int64_t> numbers;
};
struct KeyHash {
  size_t operator()(const Key &key) const { return key.hash(); }
};

class Launcher {
public:
  Launcher(std::string op, std::vector<std::string> names, nb::object builder)
      : op(std::move(op)), names(std::move(names)),
        builder(std::move(builder)) {
    if (this->names.size() > kMostArguments)
      raiseValue("names: expected at most " + std::to_string(kMostArguments) +
                 ", got " + std::to_string(this->names.size()));
  }

  nb::object call(PyObject *const *arguments, size_t count, bool direct);
  void clear() { plans.clear(); }
  size_t size() const { return plans.size(); }

  std::string op;
  std::vector<std::string> names;
  nb::object builder;

private:
  static constexpr size_t kMostArguments = 24;
  /// Far more than a program of one kind meets; past it all are forgotten.
  static constexpr size_t kMostPlans = 4096;
  /// Plans, or for shapes that are no single program's, functions of Python.
  std::unordered_map<Key, nb::object, KeyHash> plans;

  friend int traverse(PyObject *, visitproc, void *);
};

/// Makes the view number `i` of `list`: anew, or of the one that was there.
static void makeView(std::vector<Tensor> &list, size_t i, const Borrowed &base,
                     const Operand &operand, const char *name) {
  base.expectPlain(name);
  char *data = static_cast<char *>(base.data) +
               operand.offset * static_cast<int64_t>(dtypeSize(base.dtype));
  Status status;
  if (i < list.size()) {
    status = list[i].rebind(data);
  } else {
    Expected<Tensor> view = Tensor::view(data, base.dtype, operand.shape,
                                         operand.strides, base.device);
    status = view.status();
    if (view)
      list.push_back(std::move(*view));
  }
  if (!status)
    raise(Status(status.code(), std::string(name) + ": " + status.message()));
}

nb::object Launcher::call(PyObject *const *arguments, size_t count,
                          bool direct) {
  if (count != names.size())
    raiseType(op + ": expected " + std::to_string(names.size()) +
              " arguments, got " + std::to_string(count));
  if (!direct) {
    TorchUse use = torchUse(arguments, count);
    if (use == TorchUse::Forward)
      raise(Status(StatusCode::Unsupported,
                   op + ": expected tensors without derivatives that are taken "
                        "forward, got one with; take gradients backward"));
    if (use != TorchUse::Direct)
      return nb::borrow(Py_NotImplemented);
  }

  std::optional<Borrowed> borrowed[kMostArguments];
  Key key;
  const Borrowed *first = nullptr;
  nb::handle like;
  for (size_t i = 0; i < count; ++i) {
    if (arguments[i] == Py_None) {
      key.addNone();
      continue;
    }
    const Borrowed &one =
        borrowed[i].emplace(nb::handle(arguments[i]), names[i].c_str());
    if (one.negated && !direct)
      return nb::borrow(Py_NotImplemented);
    key.add(one);
    if (!first) {
      first = &one;
      like = arguments[i];
    } else if (one.device != first->device) {
      raiseValue(op + ": expected every tensor on " + first->device.name() +
                 ", got " + names[i] + " on " + one.device.name());
    }
  }
  if (!first)
    raiseType(op + ": expected tensors, got none");

  nb::object found;
  if (auto known = plans.find(key); known != plans.end()) {
    found = known->second;
  } else {
    nb::list described;
    for (size_t i = 0; i < count; ++i) {
      if (!borrowed[i]) {
        described.append(nb::none());
        continue;
      }
      // With all conditions of a tensor checked.
      Tensor tensor = borrowed[i]->tensor(names[i].c_str());
      described.append(nb::make_tuple(dtypeName(tensor.dtype()),
                                      toTuple(tensor.shape()),
                                      toTuple(tensor.strides())));
    }
    found = builder(first->device.name(), described);
    if (plans.size() >= kMostPlans)
      plans.clear();
    plans.emplace(std::move(key), found);
  }
  Plan *plan = nullptr;
  if (!nb::try_cast(found, plan)) {
    nb::object result =
        nb::steal(PyObject_Vectorcall(found.ptr(), arguments, count, nullptr));
    if (!result.is_valid())
      throw nb::python_error();
    return result;
  }

  Device device = first->device;
  Frame frame;
  if (!plan->idle.empty()) {
    frame = std::move(plan->idle.back());
    plan->idle.pop_back();
  }
  frame.inputs.reserve(plan->inputs.size());
  frame.outputs.reserve(plan->outputs.size());
  for (size_t i = 0; i < plan->inputs.size(); ++i) {
    const Operand &operand = plan->inputs[i];
    if (operand.argument >= 0)
      makeView(frame.inputs, i, *borrowed[operand.argument], operand,
               names[operand.argument].c_str());
    else if (i == frame.inputs.size())
      frame.inputs.push_back(operand.constant);
  }
  std::vector<nb::object> made(plan->outputs.size());
  for (size_t i = 0; i < plan->outputs.size(); ++i) {
    const Output &output = plan->outputs[i];
    if (output.view.argument >= 0) {
      const Borrowed &one = *borrowed[output.view.argument];
      const char *name = names[output.view.argument].c_str();
      one.expectWritable(name);
      makeView(frame.outputs, i, one, output.view, name);
      continue;
    }
    made[i] = first->library == Library::Torch
                  ? makeTorch(output.dtype, output.shapeTuple,
                              output.stridesTuple, device)
                  : makeTensor(first->library, output.dtype, output.shape,
                               output.strides, device);
    makeView(frame.outputs, i, Borrowed(made[i], "output"), output.view,
             "output");
  }
  void *stream = currentStream(first->library, device);
  Status status;
  {
    nb::gil_scoped_release unlocked;
    status =
        plan->program->run("main", frame.inputs.data(), frame.inputs.size(),
                           frame.outputs.data(), frame.outputs.size(), stream);
  }
  plan->idle.push_back(std::move(frame));
  if (!status)
    raise(Status(status.code(), op + ": " + status.message()));
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

//===----------------------------------------------------------------------===//
// Functions
//===----------------------------------------------------------------------===//

template <bool direct>
static PyObject *callLauncher(PyObject *self, PyObject *const *arguments,
                              Py_ssize_t count) {
  try {
    return nb::inst_ptr<Launcher>(self)
        ->call(arguments, static_cast<size_t>(count), direct)
        .release()
        .ptr();
  } catch (nb::python_error &error) {
    error.restore();
  } catch (const std::bad_alloc &) {
    PyErr_NoMemory();
  } catch (const std::exception &error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

/// Calls of a launcher as a function of the interpreter, which passes arguments
/// as they are.
template <bool direct> static nb::object functionOf(nb::handle launcher) {
  static PyMethodDef definition = {
      "launch",
      reinterpret_cast<PyCFunction>(
          reinterpret_cast<void (*)()>(&callLauncher<direct>)),
      METH_FASTCALL, nullptr};
  return nb::steal(PyCFunction_New(&definition, launcher.ptr()));
}

int traverse(PyObject *self, visitproc visit, void *arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self))
    return 0;
  Launcher *launcher = nb::inst_ptr<Launcher>(self);
  Py_VISIT(launcher->builder.ptr());
  for (const auto &[key, plan] : launcher->plans)
    Py_VISIT(plan.ptr());
  return 0;
}
static int clear(PyObject *self) {
  Launcher *launcher = nb::inst_ptr<Launcher>(self);
  launcher->builder.reset();
  launcher->clear();
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
              made.shapeTuple = toTuple(made.shape);
              made.stridesTuple =
                  toTuple(made.strides.empty() ? contiguousStrides(made.shape)
                                               : made.strides);
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
      .def_prop_ro("function", &functionOf<false>,
                   "Calls it: NotImplemented where only torch's dispatcher can "
                   "make the call.")
      .def_prop_ro("direct", &functionOf<true>, "Calls it in any case.")
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
