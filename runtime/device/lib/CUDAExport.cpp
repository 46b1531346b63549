//===- CUDAExport.cpp - Programs exported for CUDA devices ----------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Device/CUDACalls.h"
#include "corey/Device/RuntimeABI.h"
#include <cstdlib>

using namespace corey;
using namespace corey::cuda;

namespace {
struct CallStorage {
  device::CallState state;
};
/// A call of an exported program; its state comes before what refers to it.
class ExportedCall final : private CallStorage, public PooledCall {
public:
  ExportedCall(std::shared_ptr<Device> device,
               std::shared_ptr<const Program> program)
      : PooledCall(std::move(device), std::move(program), state) {}
  using CallStorage::state;
};

/// What a program has on one device.
struct LoadedProgram {
  std::shared_ptr<Program> program;
  CallPool pool;
};
/// What a program has, by number of the device.
struct ProgramState {
  std::vector<std::unique_ptr<LoadedProgram>> devices;
};

/// A memref descriptor: `sizes` are followed by strides.
struct Descriptor {
  void *allocated;
  char *data;
  int64_t offset;
  int64_t sizes[];
};
} // namespace

static Status expected(std::string what, std::string got) {
  return Status::invalidArgument("expected " + std::move(what) + ", got " +
                                 std::move(got));
}

static std::string deviceName(int ordinal) {
  return "cuda:" + std::to_string(ordinal);
}

static std::string listOf(const int64_t *numbers, int64_t count) {
  std::string text = "[";
  for (int64_t i = 0; i < count; ++i)
    text += (i ? ", " : "") + std::to_string(numbers[i]);
  return text + "]";
}

/// Checks where a tensor lies and how; `ordinal` is the device of those before
/// it, or -1.
static Status checkArgument(const corey_rt_argument &argument,
                            const Descriptor &tensor, int &ordinal) {
  const int64_t *strides = tensor.sizes + argument.rank;
  int64_t next = 1;
  bool contiguous = true;
  for (int64_t i = argument.rank; i-- > 0;) {
    contiguous &= tensor.sizes[i] == 1 || strides[i] == next;
    next *= tensor.sizes[i];
  }
  // Of a tensor without elements nothing is read.
  if (next == 0)
    return Status::ok();
  if (!tensor.data)
    return expected("data", "a null pointer");
  const char *data = tensor.data + tensor.offset * argument.elementBytes;
  int holder = Device::ordinalOf(data);
  if (holder < 0) {
    // Without a driver every pointer passes for the host's.
    if (Expected<int> count = deviceCount(); !count)
      return count.takeStatus();
    return expected("memory of a CUDA device", "the host's");
  }
  if (ordinal >= 0 && holder != ordinal)
    return expected("memory of " + deviceName(ordinal) +
                        " as for the arguments before it",
                    "memory of " + deviceName(holder));
  ordinal = holder;
  if (argument.isOutput && !argument.anyStrides && !contiguous)
    return expected("a contiguous output",
                    "sizes " + listOf(tensor.sizes, argument.rank) +
                        " and strides " + listOf(strides, argument.rank));
  if (argument.anyStrides) {
    auto past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) %
                                     argument.elementBytes);
    if (past)
      return expected("an address at a multiple of " +
                          std::to_string(argument.elementBytes) + " bytes",
                      "one " + std::to_string(past) + " bytes past one");
    return Status::ok();
  }
  if (!isAligned(data, tensor.sizes, strides,
                 static_cast<size_t>(argument.rank),
                 static_cast<size_t>(argument.elementBytes)))
    return expected(
        "an innermost stride of 1, an address at a multiple of 16 bytes, and "
        "rows at multiples of 16 or of the largest power of two that divides "
        "their bytes",
        "strides " + listOf(strides, argument.rank) + " and an address " +
            std::to_string(reinterpret_cast<uintptr_t>(data) % 16) +
            " bytes past one");
  return Status::ok();
}

/// Whether code for `chip` runs on a device: PTX on later ones as well, but for
/// what is of one architecture ("a") or family ("f"), and machine code on later
/// ones of the same generation.
static bool runsOn(const std::string &chip, bool isBinary,
                   const DeviceProperties &device) {
  char *suffix = nullptr;
  long number = std::strtol(chip.c_str() + 3, &suffix, 10);
  long major = number / 10, minor = number % 10;
  bool same = device.major == major && device.minor == minor;
  if (*suffix == 'a')
    return same;
  if (*suffix == 'f' || isBinary)
    return device.major == major && device.minor >= minor;
  return device.major > major ||
         (device.major == major && device.minor >= minor);
}

static Expected<LoadedProgram *> load(corey_rt_program &program, int ordinal) {
  // Both stay until the process ends, as devices do.
  static std::mutex &mutex = *new std::mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (!program.state)
    program.state = new ProgramState;
  auto &devices = static_cast<ProgramState *>(program.state)->devices;
  if (devices.size() <= static_cast<size_t>(ordinal))
    devices.resize(ordinal + 1);
  std::unique_ptr<LoadedProgram> &slot = devices[ordinal];
  if (slot)
    return slot.get();
  Expected<std::shared_ptr<Device>> device = Device::get(ordinal);
  if (!device)
    return device.takeStatus();
  auto kernels = std::make_shared<Program>(*device);
  bool isBinary = false;
  for (int64_t i = 0; i < program.numKernels; ++i) {
    const corey_rt_kernel &kernel = program.kernels[i];
    kernels->add(kernel.name, std::string(kernel.image, kernel.bytes));
    isBinary |= kernel.image[0] == '\x7f';
  }
  if (!runsOn(program.chip, isBinary, (*device)->properties()))
    return Status::unsupported(
        "expected a device that runs code for " + std::string(program.chip) +
        ", got " + deviceName(ordinal) + " (" + (*device)->chip() + ")");
  slot.reset(new LoadedProgram{
      kernels, CallPool(*device, [device = *device, kernels] {
        return std::make_unique<ExportedCall>(device, kernels);
      })});
  return slot.get();
}

static Status run(const corey_rt_function &function, void **arguments,
                  void *stream) {
  int ordinal = -1;
  for (int64_t i = 0; i < function.numArguments; ++i) {
    const corey_rt_argument &argument = function.arguments[i];
    Status status = checkArgument(
        argument, *static_cast<const Descriptor *>(arguments[i]), ordinal);
    if (!status)
      return Status(status.code(), "argument '" + std::string(argument.name) +
                                       "': " + status.message());
  }
  // No argument has an element: there is nothing to compute.
  if (ordinal < 0)
    return Status::ok();
  Expected<LoadedProgram *> loaded = load(*function.program, ordinal);
  if (!loaded)
    return loaded.takeStatus();
  Expected<std::unique_ptr<PooledCall>> acquired =
      (*loaded)->pool.acquire(stream);
  if (!acquired)
    return acquired.takeStatus();
  auto &call = static_cast<ExportedCall &>(**acquired);
  call.state.error = Status::ok();
  Status status = call.begin();
  if (status) {
    if (!device::invoke(call.state, /*threads=*/1, function.invoke, arguments))
      status = Status::outOfMemory("expected " +
                                   std::to_string(call.state.missingBytes) +
                                   " bytes for an intermediate, got none");
    else
      status = call.state.error;
  }
  Status finished = call.finish();
  (*loaded)->pool.release(std::move(*acquired));
  return status ? finished : status;
}

const char *corey_rt_run(const corey_rt_function *function, void **arguments,
                         void *stream) {
  Status status = run(*function, arguments, stream);
  if (status)
    return nullptr;
  static thread_local std::string message;
  message = "@" + std::string(function->name) + ": " + status.message();
  return message.c_str();
}
