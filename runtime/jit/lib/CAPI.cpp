//===- CAPI.cpp - C API ---------------------------------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Executable.h"
#include "corey/corey.h"
#include <algorithm>
#include <cstring>

using namespace corey;

struct corey_context {
  std::shared_ptr<Context> impl;
};
struct corey_executable {
  std::shared_ptr<Executable> impl;
};

static thread_local std::string lastError;

static_assert(static_cast<int>(StatusCode::DeviceError) == COREY_DEVICE_ERROR &&
                  static_cast<int>(DType::Bool) == COREY_BOOL,
              "the C enumerations mirror the C++ ones");

static corey_status record(const Status &status) {
  if (!status)
    lastError = status.message();
  return static_cast<corey_status>(status.code());
}

static corey_status missing(const char *what) {
  return record(
      Status::invalidArgument(std::string("expected ") + what + ", got null"));
}

static CompileOptions convert(const corey_compile_options *options) {
  CompileOptions result;
  if (!options)
    return result;
  if (options->policy)
    result.policy = options->policy;
  result.vectorBits = options->vector_bits;
  if (options->has_opt_level)
    result.optLevel = options->opt_level;
  return result;
}

static Expected<Tensor> convert(const corey_tensor &tensor, const char *kind,
                                size_t index) {
  std::string subject =
      std::string(kind) + " " + std::to_string(index) + ": expected ";
  if (tensor.rank < 0 || (tensor.rank > 0 && !tensor.shape))
    return Status::invalidArgument(subject +
                                   "a shape of rank at least 0, got rank " +
                                   std::to_string(tensor.rank) +
                                   (tensor.shape ? "" : " and a null shape"));
  if (tensor.dtype < COREY_F64 || tensor.dtype > COREY_BOOL)
    return Status::invalidArgument(subject + "a dtype, got " +
                                   std::to_string(tensor.dtype));
  std::vector<int64_t> shape(tensor.shape, tensor.shape + tensor.rank), strides;
  if (tensor.strides)
    strides.assign(tensor.strides, tensor.strides + tensor.rank);
  if (tensor.device_kind != COREY_CPU && tensor.device_kind != COREY_CUDA)
    return Status::invalidArgument(subject + "a kind of device, got " +
                                   std::to_string(tensor.device_kind));
  Device device = tensor.device_kind == COREY_CUDA
                      ? Device::cuda(tensor.device_index)
                      : Device::cpu();
  Expected<Tensor> view = Tensor::view(
      tensor.data, static_cast<DType>(tensor.dtype), shape, strides, device);
  if (!view)
    return Status::invalidArgument(std::string(kind) + " " +
                                   std::to_string(index) + ": " +
                                   view.status().message());
  return view;
}

static Status convert(const corey_tensor *tensors, size_t count,
                      const char *kind, std::vector<Tensor> &result) {
  for (size_t i = 0; i < count; ++i) {
    Expected<Tensor> tensor = convert(tensors[i], kind, i);
    if (!tensor)
      return tensor.takeStatus();
    result.push_back(std::move(*tensor));
  }
  return Status::ok();
}

const char *corey_version(void) { return getVersion(); }
const char *corey_last_error(void) { return lastError.c_str(); }

corey_status corey_context_create(const char *device, int32_t threads,
                                  corey_context **context) {
  if (!device || !context)
    return missing(device ? "a place for the context" : "a device");
  ContextOptions options;
  options.device = device;
  options.threads = threads;
  Expected<std::shared_ptr<Context>> created = Context::create(options);
  if (!created)
    return record(created.status());
  *context = new corey_context{*created};
  return COREY_OK;
}

void corey_context_destroy(corey_context *context) { delete context; }

static corey_status finish(Expected<std::shared_ptr<Executable>> compiled,
                           corey_executable **executable) {
  if (!compiled)
    return record(compiled.status());
  *executable = new corey_executable{*compiled};
  return COREY_OK;
}

corey_status corey_compile(corey_context *context, const char *source,
                           size_t size, const char *name,
                           const corey_compile_options *options,
                           corey_executable **executable) {
  if (!context || !source || !executable)
    return missing(!context  ? "a context"
                   : !source ? "a source"
                             : "a place for the executable");
  return finish(context->impl->compile({source, size}, convert(options),
                                       name ? name : "<source>"),
                executable);
}

corey_status corey_compile_file(corey_context *context, const char *path,
                                const corey_compile_options *options,
                                corey_executable **executable) {
  if (!context || !path || !executable)
    return missing(!context ? "a context"
                   : !path  ? "a path"
                            : "a place for the executable");
  return finish(context->impl->compileFile(path, convert(options)), executable);
}

void corey_executable_destroy(corey_executable *executable) {
  delete executable;
}

corey_status corey_bind_weights(corey_executable *executable, const char *path,
                                const char *prefix) {
  if (!executable || !path)
    return missing(!executable ? "an executable" : "a path");
  Expected<SafeTensors> file = SafeTensors::open(path);
  if (!file)
    return record(file.status());
  std::string text = prefix ? prefix : "";
  return record(executable->impl->bindWeights(*file, prefix ? &text : nullptr));
}

corey_status corey_bind_weight(corey_executable *executable, const char *symbol,
                               const corey_tensor *tensor) {
  if (!executable || !symbol || !tensor)
    return missing(!executable ? "an executable"
                   : !symbol   ? "a symbol"
                               : "a tensor");
  Expected<Tensor> view = convert(*tensor, "weight", 0);
  if (!view)
    return record(view.status());
  return record(executable->impl->bindWeight(symbol, *view));
}

size_t corey_num_functions(const corey_executable *executable) {
  return executable ? executable->impl->functions().size() : 0;
}

const char *corey_function_name(const corey_executable *executable,
                                size_t index) {
  if (!executable || index >= executable->impl->functions().size())
    return nullptr;
  return executable->impl->functions()[index].name.c_str();
}

static const FunctionInfo *find(const corey_executable *executable,
                                const char *function) {
  return executable && function ? executable->impl->findFunction(function)
                                : nullptr;
}

size_t corey_num_inputs(const corey_executable *executable,
                        const char *function) {
  const FunctionInfo *info = find(executable, function);
  return info ? info->inputs.size() : 0;
}

size_t corey_num_outputs(const corey_executable *executable,
                         const char *function) {
  const FunctionInfo *info = find(executable, function);
  return info ? info->outputs.size() : 0;
}

static corey_status
describe(const FunctionInfo *info,
         const std::vector<ArgumentInfo> FunctionInfo::*list, size_t index,
         corey_argument *argument) {
  if (!info || !argument)
    return missing(!info ? "a function of the executable"
                         : "a place for the argument");
  const std::vector<ArgumentInfo> &arguments = info->*list;
  if (index >= arguments.size())
    return record(Status::invalidArgument("expected an index below " +
                                          std::to_string(arguments.size()) +
                                          ", got " + std::to_string(index)));
  const ArgumentInfo &a = arguments[index];
  *argument = {a.name.c_str(), static_cast<corey_dtype>(a.dtype),
               static_cast<int32_t>(a.shape.size()), a.shape.data()};
  return COREY_OK;
}

corey_status corey_get_input(const corey_executable *executable,
                             const char *function, size_t index,
                             corey_argument *argument) {
  return describe(find(executable, function), &FunctionInfo::inputs, index,
                  argument);
}

corey_status corey_get_output(const corey_executable *executable,
                              const char *function, size_t index,
                              corey_argument *argument) {
  return describe(find(executable, function), &FunctionInfo::outputs, index,
                  argument);
}

corey_status corey_output_shapes(corey_executable *executable,
                                 const char *function,
                                 const corey_tensor *inputs, size_t numInputs,
                                 int64_t *sizes, size_t capacity) {
  if (!executable || !function || (numInputs && !inputs) ||
      (capacity && !sizes))
    return missing("an executable, a function, inputs and a place for sizes");
  std::vector<Tensor> tensors;
  if (Status status = convert(inputs, numInputs, "input", tensors); !status)
    return record(status);
  Expected<std::vector<std::vector<int64_t>>> shapes =
      executable->impl->outputShapes(function, tensors);
  if (!shapes)
    return record(shapes.status());
  size_t count = 0;
  for (const std::vector<int64_t> &shape : *shapes)
    count += shape.size();
  if (count > capacity)
    return record(
        Status::invalidArgument("expected room for " + std::to_string(count) +
                                " sizes, got " + std::to_string(capacity)));
  for (const std::vector<int64_t> &shape : *shapes)
    sizes = std::copy(shape.begin(), shape.end(), sizes);
  return COREY_OK;
}

corey_status corey_run(corey_executable *executable, const char *function,
                       const corey_tensor *inputs, size_t numInputs,
                       const corey_tensor *outputs, size_t numOutputs) {
  return corey_run_on_stream(executable, function, inputs, numInputs, outputs,
                             numOutputs, nullptr);
}

corey_status corey_run_on_stream(corey_executable *executable,
                                 const char *function,
                                 const corey_tensor *inputs, size_t numInputs,
                                 const corey_tensor *outputs, size_t numOutputs,
                                 void *stream) {
  if (!executable || !function || (numInputs && !inputs) ||
      (numOutputs && !outputs))
    return missing("an executable, a function, inputs and outputs");
  std::vector<Tensor> in, out;
  if (Status status = convert(inputs, numInputs, "input", in); !status)
    return record(status);
  if (Status status = convert(outputs, numOutputs, "output", out); !status)
    return record(status);
  return record(executable->impl->run(function, in.data(), in.size(),
                                      out.data(), out.size(), stream));
}

corey_status corey_run_dlpack(corey_executable *executable,
                              const char *function,
                              DLManagedTensor *const *inputs, size_t numInputs,
                              DLManagedTensor **outputs, size_t numOutputs) {
  return corey_run_dlpack_on_stream(executable, function, inputs, numInputs,
                                    outputs, numOutputs, nullptr);
}

corey_status corey_run_dlpack_on_stream(corey_executable *executable,
                                        const char *function,
                                        DLManagedTensor *const *inputs,
                                        size_t numInputs,
                                        DLManagedTensor **outputs,
                                        size_t numOutputs, void *stream) {
  if (!executable || !function || (numInputs && !inputs) ||
      (numOutputs && !outputs))
    return missing("an executable, a function, inputs and a place for outputs");
  const FunctionInfo *info = executable->impl->findFunction(function);
  if (info && info->outputs.size() != numOutputs)
    return record(Status::invalidArgument("@" + info->name + ": expected " +
                                          std::to_string(info->outputs.size()) +
                                          " outputs, got " +
                                          std::to_string(numOutputs)));
  std::vector<Tensor> in, out;
  for (size_t i = 0; i < numInputs; ++i) {
    if (!inputs[i])
      return missing("an input tensor");
    // A copy of the descriptor without a deleter: the tensor stays the
    // caller's.
    DLManagedTensor borrowed = *inputs[i];
    borrowed.deleter = nullptr;
    Expected<Tensor> tensor = Tensor::fromDLPack(&borrowed);
    if (!tensor)
      return record(Status::invalidArgument("input " + std::to_string(i) +
                                            ": " + tensor.status().message()));
    // Detach from the descriptor on the stack.
    Expected<Tensor> view =
        Tensor::view(tensor->data(), tensor->dtype(), tensor->shape(),
                     tensor->strides(), tensor->device());
    if (!view)
      return record(view.status());
    in.push_back(*view);
  }
  if (Status status = executable->impl->run(function, in, out, stream); !status)
    return record(status);
  for (size_t i = 0; i < numOutputs; ++i)
    outputs[i] = out[i].toDLPack();
  return COREY_OK;
}

corey_status corey_set_chunk(corey_executable *executable, const char *site,
                             int64_t chunk) {
  if (!executable || !site)
    return missing(!executable ? "an executable" : "a site");
  return record(executable->impl->setChunk(site, chunk));
}

corey_status corey_set_variant(corey_executable *executable, const char *site,
                               const char *variant) {
  if (!executable || !site || !variant)
    return missing(!executable ? "an executable"
                   : !site     ? "a site"
                               : "a variant");
  return record(executable->impl->setVariant(site, variant));
}

corey_status corey_set_policy(corey_executable *executable, const char *site,
                              const char *policy) {
  if (!executable || !policy)
    return missing(!executable ? "an executable" : "a policy");
  return record(executable->impl->setPolicy(site ? site : "", policy));
}

corey_status corey_get_chunk(const corey_executable *executable,
                             const char *site, corey_chunk *chunk) {
  if (!executable || !site || !chunk)
    return missing(!executable ? "an executable"
                   : !site     ? "a site"
                               : "a place for the chunk");
  for (const ChunkInfo &info : executable->impl->chunks())
    if (info.site == site) {
      *chunk = {info.requested, info.batch,       info.length,
                info.chunk,     info.predictedMs, info.usedData};
      return COREY_OK;
    }
  return record(Status::notFound(std::string("expected a chunk site, got '") +
                                 site + "'"));
}

size_t corey_explain(const corey_executable *executable, char *text,
                     size_t size) {
  if (!executable)
    return 0;
  std::string full = executable->impl->explain();
  if (text && size) {
    size_t count = std::min(size - 1, full.size());
    std::memcpy(text, full.data(), count);
    text[count] = '\0';
  }
  return full.size();
}
