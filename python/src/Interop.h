//===- Interop.h - Tensors of Python's libraries ----------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
///
/// \file
/// Tensors come in as what they are in memory: numpy's through the buffer
/// protocol, torch's and all others through DLPack. Nothing is copied. What is
/// returned is made by the library that the inputs are from.
///
//===----------------------------------------------------------------------===//

#ifndef COREY_PYTHON_INTEROP_H
#define COREY_PYTHON_INTEROP_H

#include "corey/Executable.h"
#include "corey/Tensor.h"
#include <memory>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <optional>
#include <vector>

struct DLTensor;

namespace corey::python {

namespace nb = nanobind;

/// Raises what a failure stands for: ValueError, MemoryError, OSError,
/// NotImplementedError (which is a RuntimeError), CompileError (which is a
/// ValueError) or RuntimeError.
[[noreturn]] void raise(const Status &status);
inline void check(const Status &status) {
  if (!status)
    raise(status);
}
template <class T> T take(Expected<T> value) {
  if (!value)
    raise(value.status());
  return std::move(*value);
}

/// The library that a tensor is of.
enum class Library : uint8_t { NumPy, Torch, CuPy, Corey, Other };

[[noreturn]] void raiseType(const std::string &message);
[[noreturn]] void raiseValue(const std::string &message);

/// A tensor of another library, for the duration of a call: what it is in
/// memory. Making one takes no memory where the library lets its tensors be
/// read in place.
class Borrowed {
public:
  /// `name` stands for the argument in messages; `writable` asks for memory
  /// that may be written.
  Borrowed(nb::handle object, const char *name, bool writable = false);
  Borrowed(const Borrowed &) = delete;
  Borrowed &operator=(const Borrowed &) = delete;

  /// As the compiler's library takes it, all its conditions checked.
  Tensor tensor(const char *name) const;
  /// Raises for a view that changes signs.
  void expectPlain(const char *name) const;
  /// Raises unless the memory may be written.
  void expectWritable(const char *name) const;

  Library library = Library::Other;
  DType dtype = DType::F32;
  Device device;
  bool readOnly = false;
  /// Of torch: whether numbers are those in memory with their signs changed.
  bool negated = false;
  void *data = nullptr;
  int rank = 0;
  /// In elements.
  const int64_t *shape = nullptr, *strides = nullptr;

private:
  bool fromArray(nb::handle object);
  bool fromCuPy(nb::handle object);
  void fromBuffer(nb::handle object, const char *name);
  void fromTensor(Tensor tensor);
  bool fromDescription(const DLTensor &described);
  int64_t *sizes(int count);

  /// What `shape` and `strides` point to where the library has no such list.
  static constexpr int kInline = 12;
  int64_t inlined[kInline];
  std::unique_ptr<int64_t[]> allocated;
  std::optional<Tensor> owned;
  struct Export : Py_buffer {
    Export() : Py_buffer() {}
    ~Export() {
      if (obj)
        PyBuffer_Release(this);
    }
  } buffer;
};

/// A tensor that keeps the memory of `object` for as long as it lives.
Tensor keep(nb::handle object, const char *name);

/// What a tensor of torch can be used for directly.
enum class TorchUse {
  /// Not a tensor of torch, or one of no consequence.
  Direct,
  /// Its gradient is recorded.
  Gradient,
  /// A derivative is taken forward with it.
  Forward,
  /// It stands for another (fake, functional, subclass): only torch's
  /// dispatcher knows what to do.
  Dispatch
};
TorchUse torchUse(nb::handle object);
/// Of all the arguments of a call: also where torch looks at every op, as under
/// transforms of functions, modes of its dispatcher, and while it traces.
TorchUse torchUse(PyObject *const *objects, size_t count);

/// A new tensor; empty `strides` stand for row-major. `like` is one of the same
/// library.
nb::object makeTensor(Library library, DType dtype,
                      const std::vector<int64_t> &shape,
                      const std::vector<int64_t> &strides, Device device);
/// A new tensor of torch, of tuples.
nb::object makeTorch(DType dtype, nb::handle shape, nb::handle strides,
                     Device device);
/// The tensor as one of `library`, sharing its memory; `like` is one of it.
nb::object share(const Tensor &tensor, Library library, nb::handle like);

/// The stream of a library that calls are put on: torch's and CuPy's current
/// one; null, with which run() waits, for others.
void *currentStream(Library library, Device device);
/// A stream as a user gives it: a number, or an object of torch or CuPy.
void *streamFrom(nb::handle object);

std::string listToString(const std::vector<int64_t> &list);
nb::tuple toTuple(const std::vector<int64_t> &list);

void bindTensor(nb::module_ &module);
void bindExecutable(nb::module_ &module);
void bindLauncher(nb::module_ &module);
void bindModel(nb::module_ &module);
void bindScheduler(nb::module_ &module);

} // namespace corey::python

#endif // COREY_PYTHON_INTEROP_H
