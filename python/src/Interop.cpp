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

void raiseType(const std::string &message) {
  PyErr_SetString(PyExc_TypeError, message.c_str());
  throw nb::python_error();
}

void raiseValue(const std::string &message) {
  PyErr_SetString(PyExc_ValueError, message.c_str());
  throw nb::python_error();
}

//===----------------------------------------------------------------------===//
// Libraries
//===----------------------------------------------------------------------===//

/// Names that numpy and torch have for types, by DType.
static const char *const kNames[] = {
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "int64",
    "int32",   "int16",   "int8",    "uint8",    "bool"};
static constexpr int kNumDTypes = 11;

/// What is used of a library, looked up once. Never released: the interpreter
/// may be gone when static destructors run.
struct NumPy {
  PyTypeObject *array;
  PyObject *make;
  /// numpy's types of ours that it has, by DType.
  PyObject *types[kNumDTypes];
  /// Whether arrays are the structs below.
  bool hasStruct;
};

/// What an array of numpy is in memory, the same in all of its versions (its
/// PyArrayObject_fields). The buffer protocol says the same, but has numpy
/// write a description of the type for every call.
struct ArrayStruct {
  PyObject_HEAD char *data;
  int rank;
  Py_ssize_t *shape, *strides;
  PyObject *base, *type;
  int flags;
};
static constexpr int kArrayWriteable = 0x0400, kArrayAligned = 0x0100;

/// Whether an array read as a struct is what the buffer protocol says.
static bool agreesWithBuffer(nb::handle array, nb::handle type) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(array.ptr(), &buffer, PyBUF_RECORDS_RO) != 0) {
    PyErr_Clear();
    return false;
  }
  auto *read = reinterpret_cast<const ArrayStruct *>(array.ptr());
  bool agrees = read->data == buffer.buf && read->rank == buffer.ndim &&
                read->type == type.ptr() &&
                !(read->flags & kArrayWriteable) == (buffer.readonly != 0);
  for (int i = 0; agrees && i < buffer.ndim; ++i)
    agrees = read->shape[i] == buffer.shape[i] &&
             read->strides[i] == buffer.strides[i];
  PyBuffer_Release(&buffer);
  return agrees;
}

static const NumPy &numpy() {
  static const NumPy *loaded = [] {
    nb::module_ module = nb::module_::import_("numpy");
    auto *result = new NumPy;
    result->make = nb::object(module.attr("ndarray")).release().ptr();
    result->array = reinterpret_cast<PyTypeObject *>(result->make);
    for (int i = 0; i < kNumDTypes; ++i) {
      auto type = static_cast<DType>(i);
      result->types[i] =
          type == DType::BF16 || type == DType::F8E4M3FN
              ? nullptr
              : nb::object(module.attr("dtype")(kNames[i])).release().ptr();
    }
    nb::object probe = module.attr("zeros")(
        nb::make_tuple(3, 5),
        nb::handle(result->types[static_cast<int>(DType::F16)]));
    nb::object part = probe.attr("T");
    result->hasStruct = true;
    for (int writeable : {1, 0}) {
      part.attr("flags").attr("writeable") = nb::bool_(writeable != 0);
      result->hasStruct &= agreesWithBuffer(part, part.attr("dtype"));
    }
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

/// A function of no arguments of torch, such as a getter of its tensors, called
/// without looking it up or making arguments.
struct Getter {
  PyObject *object = nullptr;
  getter get = nullptr;
  PyCFunction call = nullptr;
  void *closure = nullptr;

  /// `found` is what a type has under a name.
  explicit Getter(nb::object found) {
    object = found.release().ptr();
    if (Py_TYPE(object) == &PyGetSetDescr_Type) {
      const PyGetSetDef *def =
          reinterpret_cast<PyGetSetDescrObject *>(object)->d_getset;
      get = def->get;
      closure = def->closure;
    } else if (Py_TYPE(object) == &PyMethodDescr_Type) {
      const PyMethodDef *def =
          reinterpret_cast<PyMethodDescrObject *>(object)->d_method;
      if (def->ml_flags == METH_NOARGS)
        call = def->ml_meth;
    }
  }
  bool operator()(PyObject *tensor) const {
    PyObject *value = get    ? get(tensor, closure)
                      : call ? call(tensor, nullptr)
                             : PyObject_CallOneArg(object, tensor);
    if (!value)
      throw nb::python_error();
    bool result = value == Py_True;
    Py_DECREF(value);
    return result;
  }
};

struct Torch {
  explicit Torch(nb::handle tensor)
      : requiresGrad(tensor.attr("requires_grad")),
        isNegated(tensor.attr("is_neg")) {}

  PyTypeObject *tensor, *parameter;
  /// Null where this torch has none.
  const ExchangeAPI *exchange = nullptr;
  PyObject *toDLPack, *fromDLPack, *emptyStrided, *isGradEnabled;
  /// Of sizes, strides and a type, on the CPU and the current GPU, as programs
  /// of torch's compiler make tensors; null where this torch has none.
  PyObject *emptyCPU, *emptyCUDA, *currentDevice;
  Getter requiresGrad, isNegated;
  /// Null where this torch has none: whether functions are transformed, how
  /// many modes the dispatcher has, whether calls are traced.
  PyObject *transforms, *numModes, *tracing;
  /// The dict of the module of derivatives taken forward, which has the level
  /// they are taken at, -1 for none; null where this torch has none.
  PyObject *forwardDerivatives;
  /// Of a device number; null where this torch has none.
  PyObject *rawStream;
  PyObject *currentStream;
  PyObject *dtypes[kNumDTypes];
};

/// What `module` has under a path of names; null if nothing.
static PyObject *findAttribute(nb::handle module,
                               std::initializer_list<const char *> path) {
  nb::object found = nb::borrow(module);
  for (const char *name : path) {
    if (!nb::hasattr(found, name))
      return nullptr;
    found = found.attr(name);
  }
  return found.release().ptr();
}

/// Null until somebody has imported torch.
static const Torch *torch() {
  static const Torch *loaded = nullptr;
  if (loaded)
    return loaded;
  static PyObject *name = PyUnicode_InternFromString("torch");
  nb::object module = nb::steal(PyImport_GetModule(name));
  // One that is being imported has no tensors yet.
  if (!module.is_valid()) {
    PyErr_Clear();
    return nullptr;
  }
  if (!nb::hasattr(module, "Tensor") || !nb::hasattr(module, "nn") ||
      !nb::hasattr(module, "cuda") || !nb::hasattr(module, "utils") ||
      !nb::hasattr(module, "compiler"))
    return nullptr;
  auto get = [](nb::object object) { return object.release().ptr(); };
  nb::object tensor = module.attr("Tensor");
  auto *result = new Torch(tensor);
  result->tensor = reinterpret_cast<PyTypeObject *>(get(tensor));
  result->parameter = reinterpret_cast<PyTypeObject *>(
      get(module.attr("nn").attr("Parameter")));
  if (nb::hasattr(tensor, "__dlpack_c_exchange_api__")) {
    nb::object capsule = tensor.attr("__dlpack_c_exchange_api__");
    auto *api = static_cast<const ExchangeAPI *>(
        PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    PyErr_Clear();
    if (api && api->major == 1 && api->view)
      result->exchange = api;
  }
  nb::module_ dlpack = nb::module_::import_("torch.utils.dlpack");
  result->toDLPack = get(dlpack.attr("to_dlpack"));
  result->fromDLPack = get(dlpack.attr("from_dlpack"));
  result->emptyStrided = get(module.attr("empty_strided"));
  result->isGradEnabled = get(module.attr("is_grad_enabled"));
  result->currentStream = get(module.attr("cuda").attr("current_stream"));
  // Not among what torch documents, but what its own compiler uses; the public
  // ways cost several times as much.
  nb::object internals = module.attr("_C");
  result->emptyCPU =
      findAttribute(internals, {"_dynamo", "guards", "_empty_strided_cpu"});
  result->emptyCUDA =
      findAttribute(internals, {"_dynamo", "guards", "_empty_strided_cuda"});
  result->currentDevice = findAttribute(internals, {"_cuda_getDevice"});
  result->rawStream = findAttribute(internals, {"_cuda_getCurrentRawStream"});
  result->transforms =
      findAttribute(internals, {"_are_functorch_transforms_active"});
  result->numModes = findAttribute(internals, {"_len_torch_dispatch_stack"});
  result->tracing = findAttribute(internals, {"_is_tracing"});
  result->forwardDerivatives =
      findAttribute(module, {"autograd", "forward_ad", "__dict__"});
  for (int i = 0; i < kNumDTypes; ++i)
    result->dtypes[i] =
        nb::hasattr(module, kNames[i]) ? get(module.attr(kNames[i])) : nullptr;
  return loaded = result;
}

static bool isTorch(nb::handle object) {
  const Torch *library = torch();
  return library && PyObject_TypeCheck(object.ptr(), library->tensor);
}

static nb::object callNoArguments(PyObject *function) {
  nb::object result = nb::steal(PyObject_CallNoArgs(function));
  if (!result.is_valid())
    throw nb::python_error();
  return result;
}

static bool isGradEnabled(const Torch &library) {
  return callNoArguments(library.isGradEnabled).ptr() == Py_True;
}

/// Whether only torch's dispatcher knows what to do with a tensor.
static bool needsDispatcher(const Torch &library, PyObject *tensor) {
  return Py_TYPE(tensor) != library.tensor &&
         Py_TYPE(tensor) != library.parameter;
}

/// Whether a tensor's numbers are those in memory with their signs changed, as
/// of the imaginary part of a conjugate. Those lie two and more apart; asking
/// torch costs as much as all else about a tensor.
static bool isNegatedView(const Torch &library, PyObject *tensor,
                          const Borrowed &read) {
  for (int i = 0; i < read.rank; ++i)
    if (read.shape[i] > 1 && read.strides[i] % 2 != 0)
      return false;
  return library.isNegated(tensor);
}

TorchUse torchUse(nb::handle object) {
  const Torch *library = torch();
  if (!library || !PyObject_TypeCheck(object.ptr(), library->tensor))
    return TorchUse::Direct;
  if (needsDispatcher(*library, object.ptr()))
    return TorchUse::Dispatch;
  return library->requiresGrad(object.ptr()) && isGradEnabled(*library)
             ? TorchUse::Gradient
             : TorchUse::Direct;
}

TorchUse torchUse(PyObject *const *objects, size_t count) {
  const Torch *library = torch();
  if (!library)
    return TorchUse::Direct;
  bool any = false, gradients = false;
  for (size_t i = 0; i < count; ++i) {
    if (objects[i] == Py_None ||
        !PyObject_TypeCheck(objects[i], library->tensor))
      continue;
    if (!any)
      gradients = isGradEnabled(*library);
    any = true;
    if (needsDispatcher(*library, objects[i]))
      return TorchUse::Dispatch;
    if (gradients && library->requiresGrad(objects[i]))
      return TorchUse::Gradient;
  }
  if (!any)
    return TorchUse::Direct;
  for (PyObject *function : {library->transforms, library->tracing})
    if (function && callNoArguments(function).ptr() == Py_True)
      return TorchUse::Dispatch;
  static PyObject *level = PyUnicode_InternFromString("_current_level");
  if (library->forwardDerivatives) {
    PyObject *at = PyDict_GetItem(library->forwardDerivatives, level);
    if (at && PyLong_AsLong(at) >= 0) {
      nb::object unpack =
          nb::module_::import_("torch.autograd.forward_ad").attr("unpack_dual");
      for (size_t i = 0; i < count; ++i)
        if (isTorch(objects[i]) &&
            !unpack(nb::handle(objects[i])).attr("tangent").is_none())
          return TorchUse::Forward;
    }
  }
  if (library->numModes &&
      PyLong_AsLong(callNoArguments(library->numModes).ptr()) != 0)
    return TorchUse::Dispatch;
  return TorchUse::Direct;
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

static bool isJax(nb::handle object) {
  std::string root = rootModule(object);
  return root == "jaxlib" || root == "jax";
}

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

int64_t *Borrowed::sizes(int count) {
  if (count <= kInline)
    return inlined;
  allocated = std::make_unique<int64_t[]>(count);
  return allocated.get();
}

/// False for an array that only the buffer protocol can say more of.
bool Borrowed::fromArray(nb::handle object) {
  const NumPy &library = numpy();
  if (!library.hasStruct)
    return false;
  auto *array = reinterpret_cast<const ArrayStruct *>(object.ptr());
  int type = 0;
  while (type < kNumDTypes && library.types[type] != array->type)
    ++type;
  if (type == kNumDTypes)
    return false;
  dtype = static_cast<DType>(type);
  auto size = static_cast<int64_t>(dtypeSize(dtype));
  rank = array->rank;
  int64_t *steps = sizes(rank);
  for (int i = 0; i < rank; ++i) {
    if (array->strides[i] % size != 0)
      return false;
    steps[i] = array->strides[i] / size;
  }
  static_assert(sizeof(Py_ssize_t) == sizeof(int64_t));
  shape = reinterpret_cast<const int64_t *>(array->shape);
  strides = steps;
  data = array->data;
  readOnly = !(array->flags & kArrayWriteable);
  return true;
}

/// An array of CuPy, which exports negative strides wrongly. False for a type
/// of which the ways that all libraries share say why it is none here.
bool Borrowed::fromCuPy(nb::handle object) {
  nb::object type = object.attr("dtype");
  int found = 0;
  while (found < kNumDTypes && numpy().types[found] != type.ptr())
    ++found;
  if (found == kNumDTypes)
    return false;
  dtype = static_cast<DType>(found);
  auto bytes = static_cast<int64_t>(dtypeSize(dtype));
  nb::tuple extents = object.attr("shape"), steps = object.attr("strides");
  rank = static_cast<int>(extents.size());
  int64_t *list = sizes(2 * rank);
  for (int i = 0; i < rank; ++i) {
    list[i] = nb::cast<int64_t>(extents[i]);
    auto step = nb::cast<int64_t>(steps[i]);
    if (step % bytes != 0)
      return false;
    list[rank + i] = step / bytes;
  }
  shape = list;
  strides = list + rank;
  data = reinterpret_cast<void *>(
      nb::cast<uintptr_t>(object.attr("data").attr("ptr")));
  device = Device::cuda(nb::cast<int>(object.attr("device").attr("id")));
  return true;
}

void Borrowed::fromBuffer(nb::handle object, const char *name) {
  nb::object holder = nb::borrow(object);
  std::optional<DType> type;
  if (PyObject_GetBuffer(object.ptr(), &buffer, PyBUF_RECORDS_RO) != 0) {
    buffer.obj = nullptr;
    PyErr_Clear();
    // Types that numpy has from ml_dtypes are not known to the protocol.
    nb::object named = object.attr("dtype");
    auto text = nb::cast<std::string>(nb::str(nb::handle(named)));
    const char *bits = nullptr;
    if (text == "bfloat16") {
      type = DType::BF16;
      bits = "uint16";
    } else if (text == "float8_e4m3fn") {
      type = DType::F8E4M3FN;
      bits = "uint8";
    }
    if (!bits)
      raiseType(std::string(name) + ": expected " + kNumPyTypes + ", got " +
                text);
    holder = object.attr("view")(bits);
    if (PyObject_GetBuffer(holder.ptr(), &buffer, PyBUF_RECORDS_RO) != 0) {
      buffer.obj = nullptr;
      throw nb::python_error();
    }
  }
  if (!type)
    type = fromFormat(buffer.format, buffer.itemsize);
  if (!type)
    raiseType(std::string(name) + ": expected " + kNumPyTypes +
              " in the machine's byte order, got format '" + buffer.format +
              "'");
  dtype = *type;
  data = buffer.buf;
  readOnly = buffer.readonly;
  rank = buffer.ndim;
  int64_t *steps = sizes(rank);
  for (int i = 0; i < rank; ++i) {
    if (buffer.shape[i] > 1 && buffer.strides[i] % buffer.itemsize != 0)
      raiseValue(std::string(name) +
                 ": expected strides of whole elements, got " +
                 std::to_string(buffer.strides[i]) + " bytes");
    steps[i] = buffer.strides[i] / buffer.itemsize;
  }
  shape = reinterpret_cast<const int64_t *>(buffer.shape);
  strides = steps;
}

void Borrowed::fromTensor(Tensor tensor) {
  const Tensor &kept = owned.emplace(std::move(tensor));
  dtype = kept.dtype();
  device = kept.device();
  data = kept.data();
  rank = kept.rank();
  shape = kept.shape().data();
  strides = kept.strides().data();
}

void Borrowed::expectPlain(const char *name) const {
  if (negated)
    raiseValue(std::string(name) +
               ": expected a tensor of what is in memory, got a view of it "
               "with other signs; pass tensor.resolve_neg()");
}

Tensor Borrowed::tensor(const char *name) const {
  expectPlain(name);
  if (owned)
    return *owned;
  Expected<Tensor> view =
      Tensor::view(data, dtype, std::vector<int64_t>(shape, shape + rank),
                   std::vector<int64_t>(strides, strides + rank), device);
  if (!view)
    raise(Status(view.status().code(),
                 std::string(name) + ": " + view.status().message()));
  return std::move(*view);
}

void Borrowed::expectWritable(const char *name) const {
  if (readOnly)
    raiseValue(std::string(name) +
               ": expected a tensor that may be written, got a read-only one");
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
bool Borrowed::fromDescription(const DLTensor &from) {
  std::optional<DType> type = fromDLPack(from.dtype);
  if (!type ||
      (from.device.device_type != kDLCPU && from.device.device_type != kDLCUDA))
    return false;
  dtype = *type;
  device = from.device.device_type == kDLCPU
               ? Device::cpu()
               : Device::cuda(from.device.device_id);
  data = static_cast<char *>(from.data) + from.byte_offset;
  rank = from.ndim;
  shape = from.shape;
  strides = from.strides;
  if (!strides) {
    int64_t *steps = sizes(rank), step = 1;
    for (int i = rank - 1; i >= 0; --i) {
      steps[i] = step;
      step *= std::max<int64_t>(shape[i], 1);
    }
    strides = steps;
  }
  return true;
}

/// Through a capsule, as every library with DLPack makes one.
static nb::object capsuleOf(nb::handle object, nb::handle stream) {
  nb::object make = object.attr("__dlpack__");
  return stream.is_none() ? make() : make(nb::arg("stream") = stream);
}

Borrowed::Borrowed(nb::handle object, const char *name, bool writable) {
  if (Py_TYPE(object.ptr()) == numpy().array) {
    library = Library::NumPy;
    if (!fromArray(object))
      fromBuffer(object, name);
  } else if (isTorch(object)) {
    library = Library::Torch;
    DLTensor described;
    bool read = false;
    if (const ExchangeAPI *api = torch()->exchange) {
      if (api->view(object.ptr(), &described) != 0)
        throw nb::python_error();
      read = fromDescription(described);
    }
    if (!read) {
      static PyObject *key = PyUnicode_InternFromString("dtype");
      nb::object type = nb::steal(PyObject_GetAttr(object.ptr(), key));
      const auto &known = torch()->dtypes;
      if (std::find(known, known + kNumDTypes, type.ptr()) ==
          known + kNumDTypes)
        raiseType(std::string(name) + ": expected " + kNumPyTypes + ", got " +
                  nb::cast<std::string>(nb::str(type)));
      nb::object capsule =
          nb::steal(PyObject_CallOneArg(torch()->toDLPack, object.ptr()));
      if (!capsule.is_valid())
        throw nb::python_error();
      fromTensor(fromCapsule(std::move(capsule), name));
    }
    negated = isNegatedView(*torch(), object.ptr(), *this);
  } else if (nb::isinstance<Tensor>(object)) {
    library = Library::Corey;
    fromTensor(nb::cast<Tensor>(object));
  } else if (PyObject_TypeCheck(object.ptr(), numpy().array)) {
    library = Library::NumPy;
    fromBuffer(object, name);
  } else if (!nb::hasattr(object, "__dlpack__") ||
             !nb::hasattr(object, "__dlpack_device__")) {
    raiseType(std::string(name) +
              ": expected a tensor (of numpy, torch or another library with "
              "DLPack), got " +
              typeName(object));
  } else if (rootModule(object) == "cupy" && fromCuPy(object)) {
    library = Library::CuPy;
  } else if (rootModule(object) == "cupy") {
    library = Library::CuPy;
    nb::object stream = nb::module_::import_("cupy")
                            .attr("cuda")
                            .attr("get_current_stream")()
                            .attr("ptr");
    if (nb::cast<int64_t>(stream) == 0)
      stream = nb::int_(1);
    fromTensor(fromCapsule(capsuleOf(object, stream), name));
  } else {
    // Of other libraries' streams nothing is known: what is queued is waited
    // for.
    if (nb::hasattr(object, "block_until_ready"))
      object.attr("block_until_ready")();
    fromTensor(fromCapsule(capsuleOf(object, nb::none()), name));
    // Its arrays are values, of which others may be views.
    readOnly = isJax(object);
  }
  if (writable)
    expectWritable(name);
}

Tensor keep(nb::handle object, const char *name) {
  struct Held {
    Held(nb::handle object, const char *name)
        : borrowed(object, name), object(nb::borrow(object)) {}
    Borrowed borrowed;
    nb::object object;
  };
  std::shared_ptr<void> owner(new Held(object, name), [](void *held) {
    nb::gil_scoped_acquire gil;
    delete static_cast<Held *>(held);
  });
  Tensor source = static_cast<Held *>(owner.get())->borrowed.tensor(name);
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
  static PyObject *cache[kNumDTypes] = {};
  int number = static_cast<int>(dtype);
  if (PyObject *type = numpy().types[number])
    return nb::borrow(type);
  PyObject *&entry = cache[number];
  if (entry)
    return nb::borrow(entry);
  nb::object type;
  try {
    type = nb::module_::import_("ml_dtypes").attr(kNames[number]);
  } catch (nb::python_error &) {
    raiseType(
        std::string("expected the package ml_dtypes for numpy arrays of ") +
        kNames[number] + ", got none (pip install ml_dtypes)");
  }
  type = nb::module_::import_("numpy").attr("dtype")(type);
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

nb::object makeTorch(DType dtype, nb::handle shape, nb::handle strides,
                     Device device) {
  const Torch &library = *torch();
  PyObject *type = library.dtypes[static_cast<int>(dtype)];
  if (!type)
    raiseType(std::string("expected a torch with the dtype of ") +
              dtypeName(dtype) + ", got one without it");
  PyObject *maker = nullptr;
  if (device.kind == Device::CPU)
    maker = library.emptyCPU;
  else if (library.emptyCUDA && library.currentDevice &&
           PyLong_AsLong(callNoArguments(library.currentDevice).ptr()) ==
               device.index)
    maker = library.emptyCUDA;
  nb::object place;
  PyObject *arguments[4] = {shape.ptr(), strides.ptr(), type};
  nb::object made;
  if (maker) {
    made = nb::steal(PyObject_Vectorcall(maker, arguments, 3, nullptr));
  } else {
    static PyObject *names = Py_BuildValue("(ss)", "dtype", "device");
    // The default device may be set to another by the user.
    place = nb::str(device.name().c_str());
    arguments[3] = place.ptr();
    made = nb::steal(
        PyObject_Vectorcall(library.emptyStrided, arguments, 2, names));
  }
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
    return makeTorch(
        dtype, toTuple(shape),
        toTuple(strides.empty() ? contiguousStrides(shape) : strides), device);
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
  if (isJax(like))
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
    const Torch &known = *torch();
    void *queue = nullptr;
    if (known.exchange && known.exchange->currentStream) {
      if (known.exchange->currentStream(kDLCUDA, device.index, &queue) != 0)
        throw nb::python_error();
      return fromRaw(reinterpret_cast<uintptr_t>(queue));
    }
    nb::object raw =
        known.rawStream
            ? nb::handle(known.rawStream)(device.index)
            : nb::handle(known.currentStream)(device.index).attr("cuda_stream");
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
