//===- Interop.cpp - Tensors of Python's libraries as corey::Tensor -------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "Interop.h"
#include "corey/DLPack.h"
#include <algorithm>
#include <memory>
#include <nanobind/ndarray.h>
#include <optional>

namespace corey::python {

static PyObject *compileError = nullptr;

void raise(const Status &status) {
  PyObject *type = PyExc_RuntimeError;
  switch (status.code()) {
  case StatusCode::InvalidArgument:
  case StatusCode::NotFound:
    type = PyExc_ValueError;
    break;
  case StatusCode::IOError:
    type = PyExc_OSError;
    break;
  case StatusCode::OutOfMemory:
    type = PyExc_MemoryError;
    break;
  case StatusCode::Unsupported:
    type = PyExc_NotImplementedError;
    break;
  case StatusCode::CompileError:
    type = compileError;
    break;
  default:
    break;
  }
  PyErr_SetString(type, status.message().c_str());
  throw nb::python_error();
}

[[noreturn]] static void raiseType(const std::string &message) {
  throw nb::type_error(message.c_str());
}

//===----------------------------------------------------------------------===//
// Libraries
//===----------------------------------------------------------------------===//

/// What is used of a library, looked up once. Never released: the interpreter
/// may be gone when static destructors run.
struct NumPy {
  PyTypeObject *array;
  PyObject *make;
};
static const NumPy &numpy() {
  static const NumPy *loaded = [] {
    nb::module_ module = nb::module_::import_("numpy");
    auto *result = new NumPy;
    result->make = nb::object(module.attr("ndarray")).release().ptr();
    result->array = reinterpret_cast<PyTypeObject *>(result->make);
    return result;
  }();
  return *loaded;
}

/// The part that is used of what DLPack 1.3 has libraries offer for calls
/// without objects of Python in between: a struct behind a capsule of their
/// tensors' type. Functions return 0, or raise.
struct ExchangeAPI {
  uint32_t major, minor;
  const ExchangeAPI *previous;
  int (*allocate)(DLTensor *, void **, void *,
                  void (*)(void *, const char *, const char *));
  int (*managedFromObject)(void *, void **);
  int (*objectFromManaged)(void *, void **);
  /// The tensor without an owner; may be null.
  int (*view)(void *object, DLTensor *tensor);
  int (*currentStream)(DLDeviceType, int32_t, void **);
};

struct Torch {
  PyTypeObject *tensor, *parameter;
  /// Null where this torch has none.
  const ExchangeAPI *exchange;
  PyObject *toDLPack, *fromDLPack, *empty, *emptyStrided, *isGradEnabled;
  /// Of a device number; null where this torch has none.
  PyObject *rawStream;
  PyObject *currentStream;
  PyObject *dtypes[11];
};
/// Null until somebody has imported torch.
static const Torch *torch() {
  static const Torch *loaded = nullptr;
  if (loaded)
    return loaded;
  nb::str name("torch");
  nb::object module = nb::steal(PyImport_GetModule(name.ptr()));
  // One that is being imported has no tensors yet.
  if (!module.is_valid()) {
    PyErr_Clear();
    return nullptr;
  }
  if (!nb::hasattr(module, "Tensor") || !nb::hasattr(module, "nn") ||
      !nb::hasattr(module, "cuda") || !nb::hasattr(module, "utils"))
    return nullptr;
  auto *result = new Torch;
  auto get = [](nb::object object) { return object.release().ptr(); };
  result->tensor = reinterpret_cast<PyTypeObject *>(get(module.attr("Tensor")));
  result->parameter = reinterpret_cast<PyTypeObject *>(
      get(module.attr("nn").attr("Parameter")));
  result->exchange = nullptr;
  if (nb::hasattr(module.attr("Tensor"), "__dlpack_c_exchange_api__")) {
    nb::object capsule =
        module.attr("Tensor").attr("__dlpack_c_exchange_api__");
    auto *api = static_cast<const ExchangeAPI *>(
        PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    PyErr_Clear();
    if (api && api->major == 1 && api->view)
      result->exchange = api;
  }
  nb::module_ dlpack = nb::module_::import_("torch.utils.dlpack");
  result->toDLPack = get(dlpack.attr("to_dlpack"));
  result->fromDLPack = get(dlpack.attr("from_dlpack"));
  result->empty = get(module.attr("empty"));
  result->emptyStrided = get(module.attr("empty_strided"));
  result->isGradEnabled = get(module.attr("is_grad_enabled"));
  // Not among what torch documents, but what its own compiler uses; the public
  // way makes two objects.
  nb::object internals = module.attr("_C");
  result->rawStream = nb::hasattr(internals, "_cuda_getCurrentRawStream")
                          ? get(internals.attr("_cuda_getCurrentRawStream"))
                          : nullptr;
  result->currentStream = get(module.attr("cuda").attr("current_stream"));
  const char *names[] = {"float64",       "float32", "float16", "bfloat16",
                         "float8_e4m3fn", "int64",   "int32",   "int16",
                         "int8",          "uint8",   "bool"};
  for (int i = 0; i < 11; ++i)
    result->dtypes[i] =
        nb::hasattr(module, names[i]) ? get(module.attr(names[i])) : nullptr;
  return loaded = result;
}

static bool isTorch(nb::handle object) {
  const Torch *library = torch();
  return library && PyObject_TypeCheck(object.ptr(), library->tensor);
}

TorchUse torchUse(nb::handle object) {
  const Torch *library = torch();
  if (!library || !PyObject_TypeCheck(object.ptr(), library->tensor))
    return TorchUse::Direct;
  if (Py_TYPE(object.ptr()) != library->tensor &&
      Py_TYPE(object.ptr()) != library->parameter)
    return TorchUse::Dispatch;
  static PyObject *name = PyUnicode_InternFromString("requires_grad");
  nb::object wants = nb::steal(PyObject_GetAttr(object.ptr(), name));
  if (!wants.is_valid())
    throw nb::python_error();
  if (wants.ptr() != Py_True)
    return TorchUse::Direct;
  nb::object enabled = nb::steal(PyObject_CallNoArgs(library->isGradEnabled));
  if (!enabled.is_valid())
    throw nb::python_error();
  return enabled.ptr() == Py_True ? TorchUse::Gradient : TorchUse::Direct;
}

/// The first part of the name of the module of an object's type.
static std::string rootModule(nb::handle object) {
  std::string name = nb::cast<std::string>(nb::str(
      nb::handle((PyObject *)Py_TYPE(object.ptr())).attr("__module__")));
  return name.substr(0, name.find('.'));
}

//===----------------------------------------------------------------------===//
// In
//===----------------------------------------------------------------------===//

static std::string typeName(nb::handle object) {
  return Py_TYPE(object.ptr())->tp_name;
}

static std::optional<DType> fromFormat(const char *format, Py_ssize_t size) {
  if (!format)
    return DType::U8;
  if (*format == '@' || *format == '=' || *format == '<')
    ++format;
  if (!*format || format[1])
    return std::nullopt;
  switch (*format) {
  case 'd':
    return DType::F64;
  case 'f':
    return DType::F32;
  case 'e':
    return DType::F16;
  case '?':
    return DType::Bool;
  case 'B':
    return DType::U8;
  case 'b':
  case 'h':
  case 'i':
  case 'l':
  case 'q':
    return size == 8   ? DType::I64
           : size == 4 ? DType::I32
           : size == 2 ? DType::I16
                       : DType::I8;
  }
  return std::nullopt;
}

static const char *const kNumPyTypes =
    "float64, float32, float16, bfloat16, int64, int32, int16, int8, uint8 or "
    "bool";

void Borrowed::fromBuffer(nb::handle object, const char *name, bool writable) {
  int flags = writable ? PyBUF_RECORDS : PyBUF_RECORDS_RO;
  nb::object holder = nb::borrow(object);
  std::optional<DType> dtype;
  if (PyObject_GetBuffer(object.ptr(), &buffer, flags) != 0) {
    buffer.obj = nullptr;
    PyErr_Clear();
    if (writable && !nb::cast<bool>(object.attr("flags").attr("writeable")))
      throw nb::value_error(
          (std::string(name) +
           ": expected an array that may be written, got a read-only one")
              .c_str());
    // Types that numpy has from ml_dtypes are not known to the protocol.
    std::string text = nb::cast<std::string>(nb::str(object.attr("dtype")));
    const char *bits = nullptr;
    if (text == "bfloat16") {
      dtype = DType::BF16;
      bits = "uint16";
    } else if (text == "float8_e4m3fn") {
      dtype = DType::F8E4M3FN;
      bits = "uint8";
    }
    if (!bits)
      raiseType(std::string(name) + ": expected " + kNumPyTypes + ", got " +
                text);
    holder = object.attr("view")(bits);
    if (PyObject_GetBuffer(holder.ptr(), &buffer, flags) != 0) {
      buffer.obj = nullptr;
      throw nb::python_error();
    }
  }
  if (!dtype) {
    dtype = fromFormat(buffer.format, buffer.itemsize);
    if (!dtype)
      raiseType(std::string(name) + ": expected " + kNumPyTypes +
                " in the machine's byte order, got format '" + buffer.format +
                "'");
  }
  std::vector<int64_t> shape(buffer.shape, buffer.shape + buffer.ndim);
  std::vector<int64_t> strides(buffer.ndim);
  for (int i = 0; i < buffer.ndim; ++i) {
    if (shape[i] > 1 && buffer.strides[i] % buffer.itemsize != 0)
      throw nb::value_error((std::string(name) +
                             ": expected strides of whole elements, got " +
                             std::to_string(buffer.strides[i]) + " bytes")
                                .c_str());
    strides[i] = buffer.strides[i] / buffer.itemsize;
  }
  Expected<Tensor> view =
      Tensor::view(buffer.buf, *dtype, std::move(shape), std::move(strides));
  if (!view)
    raise(Status(view.status().code(),
                 std::string(name) + ": " + view.status().message()));
  tensor = std::move(*view);
}

static Tensor fromCapsule(nb::object capsule, const char *name) {
  auto *managed = static_cast<DLManagedTensor *>(
      PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (!managed)
    throw nb::python_error();
  Expected<Tensor> tensor = Tensor::fromDLPack(managed);
  if (!tensor)
    raise(Status(tensor.status().code(),
                 std::string(name) + ": " + tensor.status().message()));
  PyCapsule_SetName(capsule.ptr(), "used_dltensor");
  return std::move(*tensor);
}

static std::optional<DType> fromDLPack(DLDataType type) {
  if (type.lanes != 1)
    return std::nullopt;
  switch (type.code) {
  case kDLFloat:
    return type.bits == 32   ? std::optional(DType::F32)
           : type.bits == 16 ? std::optional(DType::F16)
           : type.bits == 64 ? std::optional(DType::F64)
                             : std::nullopt;
  case kDLBfloat:
    return type.bits == 16 ? std::optional(DType::BF16) : std::nullopt;
  case kDLInt:
    return type.bits == 32   ? std::optional(DType::I32)
           : type.bits == 64 ? std::optional(DType::I64)
           : type.bits == 16 ? std::optional(DType::I16)
           : type.bits == 8  ? std::optional(DType::I8)
                             : std::nullopt;
  case kDLUInt:
    return type.bits == 8 ? std::optional(DType::U8) : std::nullopt;
  case kDLBool:
    return type.bits == 8 ? std::optional(DType::Bool) : std::nullopt;
  case kDLFloat8_e4m3fn:
    return DType::F8E4M3FN;
  }
  return std::nullopt;
}

/// A tensor as its library describes it. False for what there is no tensor of
/// here, of which the ways that own it say why.
static bool fromDescription(const DLTensor &from, Tensor &tensor) {
  std::optional<DType> dtype = fromDLPack(from.dtype);
  if (!dtype ||
      (from.device.device_type != kDLCPU && from.device.device_type != kDLCUDA))
    return false;
  std::vector<int64_t> shape(from.shape, from.shape + from.ndim), strides;
  if (from.strides)
    strides.assign(from.strides, from.strides + from.ndim);
  Expected<Tensor> view = Tensor::view(
      static_cast<char *>(from.data) + from.byte_offset, *dtype,
      std::move(shape), std::move(strides),
      from.device.device_type == kDLCPU ? Device::cpu()
                                        : Device::cuda(from.device.device_id));
  if (!view)
    return false;
  tensor = std::move(*view);
  return true;
}

Borrowed::Borrowed(nb::handle object, const char *name, bool writable) {
  if (Py_TYPE(object.ptr()) == numpy().array) {
    library = Library::NumPy;
    fromBuffer(object, name, writable);
    return;
  }
  if (isTorch(object)) {
    library = Library::Torch;
    if (const ExchangeAPI *api = torch()->exchange) {
      DLTensor described;
      if (api->view(object.ptr(), &described) != 0)
        throw nb::python_error();
      if (fromDescription(described, tensor))
        return;
    }
    nb::object capsule =
        nb::steal(PyObject_CallOneArg(torch()->toDLPack, object.ptr()));
    if (!capsule.is_valid())
      throw nb::python_error();
    tensor = fromCapsule(std::move(capsule), name);
    return;
  }
  if (nb::isinstance<Tensor>(object)) {
    library = Library::Corey;
    tensor = nb::cast<Tensor>(object);
    return;
  }
  if (PyObject_TypeCheck(object.ptr(), numpy().array)) {
    library = Library::NumPy;
    fromBuffer(object, name, writable);
    return;
  }
  if (!nb::hasattr(object, "__dlpack__") ||
      !nb::hasattr(object, "__dlpack_device__"))
    raiseType(std::string(name) +
              ": expected a tensor (of numpy, torch or another library with "
              "DLPack), got " +
              typeName(object));
  if (rootModule(object) == "cupy") {
    library = Library::CuPy;
    nb::object stream = nb::module_::import_("cupy")
                            .attr("cuda")
                            .attr("get_current_stream")()
                            .attr("ptr");
    if (nb::cast<int64_t>(stream) == 0)
      stream = nb::int_(1);
    tensor = fromCapsule(object.attr("__dlpack__")(nb::arg("stream") = stream),
                         name);
    return;
  }
  // Of other libraries' streams nothing is known: what is queued is waited for.
  if (nb::hasattr(object, "block_until_ready"))
    object.attr("block_until_ready")();
  tensor = fromCapsule(object.attr("__dlpack__")(), name);
}

Tensor keep(nb::handle object, const char *name) {
  struct Held {
    Borrowed borrowed;
    nb::object object;
  };
  std::shared_ptr<void> owner(
      new Held{Borrowed(object, name), nb::borrow(object)}, [](void *held) {
        nb::gil_scoped_acquire gil;
        delete static_cast<Held *>(held);
      });
  const Tensor &source = static_cast<Held *>(owner.get())->borrowed.tensor;
  return take(Tensor::view(source.data(), source.dtype(), source.shape(),
                           source.strides(), source.device(), owner));
}

//===----------------------------------------------------------------------===//
// Out
//===----------------------------------------------------------------------===//

nb::tuple toTuple(const std::vector<int64_t> &list) {
  nb::tuple result = nb::steal<nb::tuple>(PyTuple_New(list.size()));
  for (size_t i = 0; i < list.size(); ++i)
    PyTuple_SET_ITEM(result.ptr(), i, PyLong_FromLongLong(list[i]));
  return result;
}

std::string listToString(const std::vector<int64_t> &list) {
  std::string text = "[";
  for (size_t i = 0; i < list.size(); ++i)
    text += (i ? ", " : "") + std::to_string(list[i]);
  return text + "]";
}

/// numpy's type of a dtype; those it lacks are of ml_dtypes.
static nb::object numpyType(DType dtype) {
  static PyObject *cache[11] = {};
  PyObject *&entry = cache[static_cast<int>(dtype)];
  if (entry)
    return nb::borrow(entry);
  const char *names[] = {"float64",       "float32", "float16", "bfloat16",
                         "float8_e4m3fn", "int64",   "int32",   "int16",
                         "int8",          "uint8",   "bool"};
  const char *name = names[static_cast<int>(dtype)];
  nb::object type;
  if (dtype == DType::BF16 || dtype == DType::F8E4M3FN) {
    try {
      type = nb::module_::import_("ml_dtypes").attr(name);
    } catch (nb::python_error &) {
      throw nb::type_error(
          (std::string("expected the package ml_dtypes for numpy arrays of ") +
           name + ", got none (pip install ml_dtypes)")
              .c_str());
    }
    type = nb::module_::import_("numpy").attr("dtype")(type);
  } else {
    type = nb::module_::import_("numpy").attr("dtype")(name);
  }
  entry = type.inc_ref().ptr();
  return type;
}

static nb::object makeNumPy(DType dtype, const std::vector<int64_t> &shape,
                            const std::vector<int64_t> &strides) {
  nb::object type = numpyType(dtype), sizes = toTuple(shape);
  if (strides.empty()) {
    PyObject *arguments[] = {sizes.ptr(), type.ptr()};
    nb::object made = nb::steal(
        PyObject_Vectorcall(numpy().make, arguments, 2, /*kwnames=*/nullptr));
    if (!made.is_valid())
      throw nb::python_error();
    return made;
  }
  std::vector<int64_t> bytes;
  for (int64_t stride : strides)
    bytes.push_back(stride * dtypeSize(dtype));
  return nb::handle(numpy().make)(sizes, type, nb::none(), 0, toTuple(bytes));
}

static nb::object makeTorch(DType dtype, const std::vector<int64_t> &shape,
                            const std::vector<int64_t> &strides,
                            Device device) {
  const Torch &library = *torch();
  PyObject *type = library.dtypes[static_cast<int>(dtype)];
  if (!type)
    throw nb::type_error((std::string("expected a torch with the dtype of ") +
                          dtypeName(dtype) + ", got one without it")
                             .c_str());
  static PyObject *names = Py_BuildValue("(ss)", "dtype", "device");
  nb::object sizes = toTuple(shape), steps, place;
  PyObject *arguments[4];
  int count = 0;
  arguments[count++] = sizes.ptr();
  if (!strides.empty()) {
    steps = toTuple(strides);
    arguments[count++] = steps.ptr();
  }
  int positional = count;
  arguments[count++] = type;
  // The default device may be set to another by the user.
  static PyObject *cpu = PyUnicode_InternFromString("cpu");
  if (device.kind == Device::CPU)
    arguments[count++] = cpu;
  else {
    place = nb::str(device.name().c_str());
    arguments[count++] = place.ptr();
  }
  nb::object made = nb::steal(PyObject_Vectorcall(
      strides.empty() ? library.empty : library.emptyStrided, arguments,
      positional, names));
  if (!made.is_valid())
    throw nb::python_error();
  return made;
}

nb::object makeTensor(Library library, DType dtype,
                      const std::vector<int64_t> &shape,
                      const std::vector<int64_t> &strides, Device device) {
  switch (library) {
  case Library::NumPy:
    if (device.kind == Device::CPU)
      return makeNumPy(dtype, shape, strides);
    break;
  case Library::Torch:
    return makeTorch(dtype, shape, strides, device);
  case Library::CuPy: {
    if (device.kind == Device::CPU)
      break;
    nb::module_ cupy = nb::module_::import_("cupy");
    if (strides.empty())
      return cupy.attr("empty")(toTuple(shape), numpyType(dtype));
    // CuPy makes memory of its own for strides as numpy does.
    std::vector<int64_t> bytes;
    for (int64_t stride : strides)
      bytes.push_back(stride * dtypeSize(dtype));
    return cupy.attr("ndarray")(toTuple(shape), numpyType(dtype), nb::none(),
                                toTuple(bytes));
  }
  default:
    break;
  }
  if (strides.empty())
    return nb::cast(take(Tensor::empty(dtype, shape, device)));
  // Dense in some order of the axes: a permutation of a contiguous tensor.
  std::vector<int> order(shape.size()), inverse(shape.size());
  for (size_t i = 0; i < order.size(); ++i)
    order[i] = static_cast<int>(i);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return strides[a] > strides[b]; });
  std::vector<int64_t> sizes;
  for (size_t i = 0; i < order.size(); ++i) {
    sizes.push_back(shape[order[i]]);
    inverse[order[i]] = static_cast<int>(i);
  }
  return nb::cast(
      take(take(Tensor::empty(dtype, sizes, device)).permute(inverse)));
}

nb::object share(const Tensor &tensor, Library library, nb::handle like) {
  nb::object own = nb::cast(tensor);
  switch (library) {
  case Library::Torch:
    return nb::handle(torch()->fromDLPack)(own);
  case Library::NumPy:
    if (tensor.device().kind == Device::CPU)
      return own.attr("numpy")();
    return own;
  case Library::CuPy:
    if (tensor.device().kind == Device::CUDA)
      return nb::module_::import_("cupy").attr("from_dlpack")(own);
    return own;
  case Library::Corey:
    return own;
  case Library::Other:
    break;
  }
  std::string root = rootModule(like);
  if (root == "jaxlib" || root == "jax")
    return nb::module_::import_("jax.dlpack").attr("from_dlpack")(own);
  // The array API's name for it.
  if (nb::hasattr(like, "__array_namespace__"))
    return like.attr("__array_namespace__")().attr("from_dlpack")(own);
  return own;
}

//===----------------------------------------------------------------------===//
// Streams
//===----------------------------------------------------------------------===//

/// COREY's and DLPack's number of the legacy default stream is 1, a raw
/// stream's is 0.
static void *fromRaw(uintptr_t raw) {
  return reinterpret_cast<void *>(raw ? raw : 1);
}

void *currentStream(Library library, Device device) {
  if (device.kind != Device::CUDA)
    return nullptr;
  if (library == Library::Torch) {
    nb::object raw = torch()->rawStream
                         ? nb::handle(torch()->rawStream)(device.index)
                         : nb::handle(torch()->currentStream)(device.index)
                               .attr("cuda_stream");
    return fromRaw(nb::cast<uintptr_t>(raw));
  }
  if (library == Library::CuPy)
    return fromRaw(nb::cast<uintptr_t>(nb::module_::import_("cupy")
                                           .attr("cuda")
                                           .attr("get_current_stream")()
                                           .attr("ptr")));
  return nullptr;
}

void *streamFrom(nb::handle object) {
  nb::object number = nb::borrow(object);
  if (nb::hasattr(object, "cuda_stream"))
    number = object.attr("cuda_stream");
  else if (nb::hasattr(object, "ptr"))
    number = object.attr("ptr");
  if (!PyLong_Check(number.ptr()))
    raiseType("stream: expected a number or a stream of torch or CuPy, got " +
              typeName(object));
  return fromRaw(nb::cast<uintptr_t>(number));
}

//===----------------------------------------------------------------------===//
// corey.Tensor
//===----------------------------------------------------------------------===//

static nb::object toCapsule(const Tensor &tensor) {
  DLManagedTensor *managed = tensor.toDLPack();
  PyObject *capsule = PyCapsule_New(managed, "dltensor", [](PyObject *capsule) {
    if (!PyCapsule_IsValid(capsule, "dltensor"))
      return; // Taken.
    auto *managed = static_cast<DLManagedTensor *>(
        PyCapsule_GetPointer(capsule, "dltensor"));
    if (managed->deleter)
      managed->deleter(managed);
  });
  if (!capsule) {
    if (managed->deleter)
      managed->deleter(managed);
    throw nb::python_error();
  }
  return nb::steal(capsule);
}

static nb::object toNumPy(const Tensor &self) {
  Tensor tensor = self;
  if (tensor.device().kind != Device::CPU)
    tensor = take(tensor.to(Device::cpu()));
  nb::dlpack::dtype bits = {0, 8, 1};
  bool hidden = false;
  switch (tensor.dtype()) {
  case DType::F64:
    bits = nb::dtype<double>();
    break;
  case DType::F32:
    bits = nb::dtype<float>();
    break;
  case DType::F16:
    bits = {static_cast<uint8_t>(nb::dlpack::dtype_code::Float), 16, 1};
    break;
  case DType::BF16:
    bits = nb::dtype<uint16_t>();
    hidden = true;
    break;
  case DType::F8E4M3FN:
    bits = nb::dtype<uint8_t>();
    hidden = true;
    break;
  case DType::I64:
    bits = nb::dtype<int64_t>();
    break;
  case DType::I32:
    bits = nb::dtype<int32_t>();
    break;
  case DType::I16:
    bits = nb::dtype<int16_t>();
    break;
  case DType::I8:
    bits = nb::dtype<int8_t>();
    break;
  case DType::U8:
    bits = nb::dtype<uint8_t>();
    break;
  case DType::Bool:
    bits = nb::dtype<bool>();
    break;
  }
  std::vector<size_t> shape(tensor.shape().begin(), tensor.shape().end());
  nb::capsule owner(new Tensor(tensor), [](void *held) noexcept {
    delete static_cast<Tensor *>(held);
  });
  nb::object array =
      nb::cast(nb::ndarray<nb::numpy>(tensor.data(), shape.size(), shape.data(),
                                      owner, tensor.strides().data(), bits));
  // numpy knows these by ml_dtypes only.
  if (hidden)
    array = array.attr("view")(numpyType(tensor.dtype()));
  return array;
}

void bindTensor(nb::module_ &module) {
  compileError =
      PyErr_NewExceptionWithDoc("corey.CompileError",
                                "A program could not be compiled; one line per "
                                "diagnostic.",
                                PyExc_ValueError, nullptr);
  module.attr("CompileError") = nb::borrow(compileError);

  nb::class_<Tensor>(module, "Tensor",
                     "A tensor of COREY. Other libraries take it through "
                     "DLPack: torch.from_dlpack(t), np.asarray(t).")
      .def_prop_ro("shape",
                   [](const Tensor &self) { return toTuple(self.shape()); })
      .def_prop_ro(
          "strides", [](const Tensor &self) { return toTuple(self.strides()); },
          "In elements.")
      .def_prop_ro("dtype",
                   [](const Tensor &self) { return dtypeName(self.dtype()); })
      .def_prop_ro("device",
                   [](const Tensor &self) { return self.device().name(); })
      .def("__dlpack__",
           [](const Tensor &self, nb::kwargs) { return toCapsule(self); })
      .def("__dlpack_device__",
           [](const Tensor &self) {
             bool host = self.device().kind == Device::CPU;
             return nb::make_tuple(host ? 1 : 2, self.device().index);
           })
      .def("numpy", &toNumPy,
           "As an array of numpy: of the same memory on the CPU, a copy of a "
           "device's.")
      .def(
          "__array__",
          [](nb::handle self, nb::object dtype, nb::object copy) {
            nb::object array = toNumPy(nb::cast<const Tensor &>(self));
            if (!dtype.is_none())
              array = array.attr("astype")(dtype, nb::arg("copy") = false);
            if (nb::isinstance<nb::bool_>(copy) && nb::cast<bool>(copy))
              array = array.attr("copy")();
            return array;
          },
          nb::arg("dtype") = nb::none(), nb::arg("copy") = nb::none())
      .def("__repr__",
           [](const Tensor &self) { return "corey." + self.describe(); });
}

} // namespace corey::python
