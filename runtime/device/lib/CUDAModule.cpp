//===- CUDAModule.cpp - Modules and the cache of compiled kernels ---------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "CUDADriver.h"
#include "SHA256.h"
#include "corey/Device/CUDA.h"
#include "corey/Device/DiskCache.h"
#include <cstring>

using namespace corey;
using namespace corey::cuda;
using namespace corey::cuda::driver;
using corey::device::DiskCache;
using corey::device::SHA256;

static CUcontext contextOf(const Device &device) {
  return static_cast<CUcontext>(device.context());
}

/// A cache that cannot be read or written is none: no error.
static const DiskCache &cubins() {
  static const DiskCache cache("cuda", "cubin");
  return cache;
}

//===----------------------------------------------------------------------===//
// Compiling
//===----------------------------------------------------------------------===//

/// A cubin and an ELF file start alike; everything else is taken for PTX.
static bool isBinary(std::string_view image) {
  return image.substr(0, 4) == std::string_view("\x7f"
                                                "ELF",
                                                4);
}

/// Whether a kernel's warps trade registers. The linker's compiler, which alone
/// hands cubins out, has it compiled as one unit of several, and those may not.
static bool tradesRegisters(std::string_view image) {
  return !isBinary(image) && image.find("setmaxnreg") != image.npos;
}

namespace {
/// Options of the driver's compiler, and what it has to say.
class CompilerOptions {
public:
  CompilerOptions(const ModuleOptions &options)
      : info(16 << 10, '\0'), errors(64 << 10, '\0'),
        values{info.data(),
               value(info.size()),
               errors.data(),
               value(errors.size()),
               value(static_cast<uintptr_t>(options.optLevel)),
               value(options.lineInfo)} {}

  static constexpr unsigned count = 6;
  CUjit_option names[count] = {
      CU_JIT_INFO_LOG_BUFFER,    CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES,
      CU_JIT_ERROR_LOG_BUFFER,   CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
      CU_JIT_OPTIMIZATION_LEVEL, CU_JIT_GENERATE_LINE_INFO};

private:
  static void *value(uintptr_t number) {
    return reinterpret_cast<void *>(number);
  }
  std::vector<char> info, errors;

public:
  void *values[count];

  /// `status` with the compiler's words, unless memory ran out.
  Status explain(const Status &status) const {
    if (status || status.code() == StatusCode::OutOfMemory)
      return status;
    std::string log(errors.data(), strnlen(errors.data(), errors.size()));
    if (log.empty())
      log.assign(info.data(), strnlen(info.data(), info.size()));
    while (!log.empty() && (log.back() == '\n' || log.back() == '\0'))
      log.pop_back();
    return Status::compileError(status.message() +
                                (log.empty() ? "" : "\n" + log));
  }
};
} // namespace

/// Compiles PTX to a cubin for the current context's device.
static Expected<std::string> compilePTX(const Driver &api,
                                        const std::string &ptx,
                                        const ModuleOptions &options,
                                        const std::string &chip) {
  CompilerOptions compiler(options);
  CUlinkState state = nullptr;
  if (Status status =
          check(api,
                api.cuLinkCreate(CompilerOptions::count, compiler.names,
                                 compiler.values, &state),
                "starting the PTX compiler");
      !status)
    return status;
  void *cubin = nullptr;
  size_t size = 0;
  // The driver reads text up to its NUL, which counts.
  CUresult result = api.cuLinkAddData(
      state, CU_JIT_INPUT_PTX, const_cast<char *>(ptx.c_str()), ptx.size() + 1,
      "kernels.ptx", 0, nullptr, nullptr);
  if (result == CUDA_SUCCESS)
    result = api.cuLinkComplete(state, &cubin, &size);
  Status status = check(api, result, "compiling PTX for " + chip);
  std::string binary;
  if (status)
    binary.assign(static_cast<const char *>(cubin), size);
  api.cuLinkDestroy(state);
  if (status)
    return binary;
  return compiler.explain(status);
}

//===----------------------------------------------------------------------===//
// Modules
//===----------------------------------------------------------------------===//

static std::atomic<uint64_t> fromMemory{0}, fromDisk{0}, compiled{0};

ModuleCacheCounts Device::moduleCacheCounts() {
  return {fromMemory, fromDisk, compiled};
}

Expected<std::shared_ptr<Module>>
Device::loadModule(std::string_view image, const ModuleOptions &options) {
  if (options.optLevel < 0 || options.optLevel > 4)
    return Status::invalidArgument(
        "expected an optimization level of 0 to 4, got " +
        std::to_string(options.optLevel));
  SHA256 hash;
  hash.addField(image);
  hash.addField(target);
  hash.addField(std::to_string(api->version));
  hash.addField(std::to_string(options.optLevel) +
                (options.lineInfo ? " lineinfo" : ""));
  hash.addField(COREY_VERSION);
  std::string key = hash.finishHex();
  // Held while compiling, so that a module wanted by two threads is made once.
  std::lock_guard<std::mutex> lock(mutex);
  std::weak_ptr<Module> &known = modules[key];
  if (std::shared_ptr<Module> module = known.lock()) {
    ++fromMemory;
    return module;
  }
  ContextScope scope(*api, contextOf(*this));
  if (Status status = scope.status(); !status)
    return status;
  RelaxedCapture relaxed(*api);
  std::string cubin;
  bool stored = false;
  std::shared_ptr<Module> module(new Module(shared_from_this()));
  CUmodule handle = nullptr;
  if (tradesRegisters(image)) {
    // No cubin comes of this to be stored; the driver has a cache of its own.
    CompilerOptions compiler(options);
    CUresult result = api->cuModuleLoadDataEx(
        &handle, std::string(image).c_str(), CompilerOptions::count,
        compiler.names, compiler.values);
    if (Status status = compiler.explain(
            check(*api, result, "compiling PTX for " + target));
        !status)
      return status;
    ++compiled;
    module->handle = handle;
    known = module;
    return module;
  }
  if (isBinary(image)) {
    cubin = image;
  } else if (Expected<std::string> entry = cubins().read(key)) {
    cubin = std::move(*entry);
    stored = true;
  } else {
    Expected<std::string> made =
        compilePTX(*api, std::string(image), options, target);
    if (!made)
      return made.takeStatus();
    cubin = std::move(*made);
    ++compiled;
    (void)cubins().write(key, cubin);
  }
  CUresult result = api->cuModuleLoadData(&handle, cubin.c_str());
  if (result == CUDA_ERROR_OUT_OF_MEMORY || (result && !stored))
    return check(*api, result, "loading kernels for " + target);
  if (result) {
    // Whole, and still not what this driver takes: once more from the PTX.
    Expected<std::string> made =
        compilePTX(*api, std::string(image), options, target);
    if (!made)
      return made.takeStatus();
    ++compiled;
    (void)cubins().write(key, *made);
    if (Status status =
            check(*api, api->cuModuleLoadData(&handle, made->c_str()),
                  "loading kernels for " + target);
        !status)
      return status;
  } else if (stored) {
    ++fromDisk;
  }
  module->handle = handle;
  known = module;
  return module;
}

Module::~Module() {
  if (!handle)
    return;
  const Driver &api = owner->driver();
  ContextScope scope(api, contextOf(*owner));
  RelaxedCapture relaxed(api);
  api.cuModuleUnload(static_cast<CUmodule>(handle));
}

Expected<const Function *> Module::function(const std::string &name) {
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Function> &slot = functions[name];
  if (slot)
    return static_cast<const Function *>(slot.get());
  const Driver &api = owner->driver();
  ContextScope scope(api, contextOf(*owner));
  CUfunction found = nullptr;
  CUresult result = api.cuModuleGetFunction(
      &found, static_cast<CUmodule>(handle), name.c_str());
  if (result == CUDA_ERROR_NOT_FOUND)
    return Status::notFound("expected a kernel of the module, got '" + name +
                            "'");
  auto made = std::make_unique<Function>();
  made->symbol = name;
  made->handle = found;
  auto attribute = [&](CUfunction_attribute which) {
    int value = 0;
    if (result == CUDA_SUCCESS)
      result = api.cuFuncGetAttribute(&value, which, found);
    return value;
  };
  made->attrs.registers = attribute(CU_FUNC_ATTRIBUTE_NUM_REGS);
  made->attrs.maxThreadsPerBlock =
      attribute(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
  made->attrs.localBytes = attribute(CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES);
  made->attrs.sharedBytes = attribute(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
  if (Status status = check(api, result, "kernel '" + name + "'"); !status)
    return status;
  // What a launch may ask for without more.
  made->dynamicSharedLimit =
      attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
  slot = std::move(made);
  return static_cast<const Function *>(slot.get());
}
