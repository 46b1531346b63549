//===- CUDADriver.cpp - Loading the CUDA driver ---------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "CUDADriver.h"
#include <atomic>
#include <cstdlib>
#include <dlfcn.h>
#include <mutex>

using namespace corey;
using namespace corey::cuda;
using namespace corey::cuda::driver;

static Status noDevice(const std::string &why) {
  return Status::notFound("expected a CUDA device, got none: " + why);
}

/// Loads and initializes `driver`. What was loaded is never unloaded: libcuda
/// keeps threads of its own.
static Status loadInto(Driver &driver) {
  const char *path = std::getenv("COREY_CUDA_DRIVER");
  if (!path || !*path)
    path = "libcuda.so.1";
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    const char *error = dlerror();
    return noDevice(std::string("the driver cannot be loaded (") +
                    (error ? error : path) + ")");
  }
  const char *missing = nullptr;
#define COREY_CUDA_LOAD(name, symbol, parameters)                              \
  driver.name =                                                                \
      reinterpret_cast<CUresult(*) parameters>(dlsym(library, symbol));        \
  if (!driver.name && !missing)                                                \
    missing = symbol;
  COREY_CUDA_DRIVER_FUNCTIONS(COREY_CUDA_LOAD)
#undef COREY_CUDA_LOAD
  if (driver.cuDriverGetVersion)
    driver.cuDriverGetVersion(&driver.version);
  if (missing)
    return noDevice(std::string(path) + " lacks " + missing +
                    "; expected a driver of CUDA 12.0 or newer, got " +
                    std::to_string(driver.version / 1000) + "." +
                    std::to_string(driver.version % 1000 / 10));
  if (CUresult result = driver.cuInit(0); result != CUDA_SUCCESS) {
    Status status = check(driver, result, "cuInit");
    return noDevice(status.message());
  }
  return Status::ok();
}

Expected<const Driver *> driver::load() {
  static std::atomic<const Driver *> loaded{nullptr};
  static std::mutex mutex;
  if (const Driver *driver = loaded.load(std::memory_order_acquire))
    return driver;
  std::lock_guard<std::mutex> lock(mutex);
  if (const Driver *driver = loaded.load(std::memory_order_relaxed))
    return driver;
  // Outlives every object of static storage that frees device memory.
  auto *driver = new Driver;
  if (Status status = loadInto(*driver); !status) {
    delete driver;
    return status;
  }
  loaded.store(driver, std::memory_order_release);
  return static_cast<const Driver *>(driver);
}

Status driver::check(const Driver &driver, CUresult result,
                     const std::string &what) {
  if (result == CUDA_SUCCESS)
    return Status::ok();
  const char *name = nullptr, *text = nullptr;
  std::string message = what + ": expected success, got ";
  if (driver.cuGetErrorName(result, &name) == CUDA_SUCCESS && name)
    message += name;
  else
    message += "CUDA error " + std::to_string(result);
  if (driver.cuGetErrorString(result, &text) == CUDA_SUCCESS && text)
    message += std::string(" (") + text + ")";
  switch (result) {
  case CUDA_ERROR_OUT_OF_MEMORY:
    return Status::outOfMemory(message);
  case CUDA_ERROR_NOT_SUPPORTED:
  case CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED:
    return Status::unsupported(message);
  default:
    return Status::deviceError(message);
  }
}
