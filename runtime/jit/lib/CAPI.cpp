//===- CAPI.cpp - C API ---------------------------------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Executable.h"
#include "corey/Model.h"
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
struct corey_model {
  std::shared_ptr<Model> impl;
};
struct corey_states {
  StateCache impl;
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

//===----------------------------------------------------------------------===//
// Language models
//===----------------------------------------------------------------------===//

static Status toDType(corey_dtype dtype, const char *name, DType &result) {
  if (dtype < COREY_F64 || dtype > COREY_BOOL)
    return Status::invalidArgument(
        std::string(name) + ": expected a dtype, got " + std::to_string(dtype));
  result = static_cast<DType>(dtype);
  return Status::ok();
}

static Expected<ModelOptions> convert(const corey_model_options *options) {
  ModelOptions result;
  if (!options)
    return result;
  if (options->has_compute_type) {
    DType type;
    if (Status status = toDType(options->compute_type, "compute_type", type);
        !status)
      return status;
    result.computeType = type;
  }
  if (options->has_state_type)
    if (Status status =
            toDType(options->state_type, "state_type", result.stateType);
        !status)
      return status;
  if (options->segment)
    result.segment = options->segment;
  result.compile = convert(&options->compile);
  return result;
}

static corey_status finish(Expected<std::shared_ptr<Model>> made,
                           corey_model **model) {
  if (!made)
    return record(made.status());
  *model = new corey_model{*made};
  return COREY_OK;
}

static corey_status finish(Expected<StateCache> made, corey_states **states) {
  if (!made)
    return record(made.status());
  *states = new corey_states{*made};
  return COREY_OK;
}

corey_status corey_model_load(corey_context *context, const char *folder,
                              const corey_model_options *options,
                              corey_model **model) {
  if (!context || !folder || !model)
    return missing(!context  ? "a context"
                   : !folder ? "a folder"
                             : "a place for the model");
  Expected<ModelOptions> converted = convert(options);
  if (!converted)
    return record(converted.status());
  return finish(Model::load(context->impl, folder, *converted), model);
}

corey_status corey_model_random(corey_context *context, const char *preset,
                                corey_dtype weightType, uint64_t seed,
                                const corey_model_options *options,
                                corey_model **model) {
  if (!context || !preset || !model)
    return missing(!context  ? "a context"
                   : !preset ? "a preset"
                             : "a place for the model");
  Expected<ModelOptions> converted = convert(options);
  if (!converted)
    return record(converted.status());
  DType type;
  if (Status status = toDType(weightType, "weight_type", type); !status)
    return record(status);
  return finish(Model::random(context->impl, preset, type, *converted, seed),
                model);
}

void corey_model_destroy(corey_model *model) { delete model; }

corey_status corey_model_get_info(const corey_model *model,
                                  corey_model_info *info) {
  if (!model || !info)
    return missing(!model ? "a model" : "a place for the info");
  const ModelInfo &i = model->impl->info();
  *info = {i.type.c_str(),
           i.numLayers,
           i.hiddenSize,
           i.vocabSize,
           i.parameters,
           i.weightBytes,
           static_cast<corey_dtype>(i.computeType),
           i.eosTokens.data(),
           i.eosTokens.size()};
  return COREY_OK;
}

corey_status corey_model_get_executable(corey_model *model,
                                        corey_executable **executable) {
  if (!model || !executable)
    return missing(!model ? "a model" : "a place for the executable");
  // The program goes with the model that has it.
  *executable = new corey_executable{
      std::shared_ptr<Executable>(model->impl, &model->impl->executable())};
  return COREY_OK;
}

corey_status corey_states_create(corey_model *model, int64_t sequences,
                                 corey_states **states) {
  if (!model || !states)
    return missing(!model ? "a model" : "a place for the states");
  return finish(model->impl->makeStates(sequences), states);
}

corey_status corey_states_load(corey_model *model, const char *path,
                               corey_states **states) {
  if (!model || !path || !states)
    return missing(!model  ? "a model"
                   : !path ? "a path"
                           : "a place for the states");
  return finish(model->impl->loadStates(path), states);
}

corey_status corey_states_save(const corey_states *states, const char *path) {
  if (!states || !path)
    return missing(!states ? "states" : "a path");
  return record(states->impl.save(path));
}

void corey_states_destroy(corey_states *states) { delete states; }

int64_t corey_states_size(const corey_states *states) {
  return states ? states->impl.size() : 0;
}

int64_t corey_states_bytes_per_sequence(const corey_states *states) {
  return states ? states->impl.bytesPerSequence() : 0;
}

corey_status corey_states_get_tokens(const corey_states *states, int64_t slot,
                                     int64_t *tokens) {
  if (!states || !tokens)
    return missing(!states ? "states" : "a place for the number of tokens");
  if (slot < 0 || slot >= states->impl.size())
    return record(Status::invalidArgument(
        "expected a slot from 0 to " + std::to_string(states->impl.size() - 1) +
        ", got " + std::to_string(slot)));
  *tokens = states->impl.tokens(slot);
  return COREY_OK;
}

corey_status corey_states_clone(const corey_states *states,
                                corey_states **copy) {
  if (!states || !copy)
    return missing(!states ? "states" : "a place for the states");
  return finish(states->impl.clone(), copy);
}

corey_status corey_states_select(const corey_states *states,
                                 const int64_t *slots, size_t numSlots,
                                 corey_states **copy) {
  if (!states || (numSlots && !slots) || !copy)
    return missing(!states ? "states"
                   : !copy ? "a place for the states"
                           : "slots");
  return finish(
      states->impl.select(std::vector<int64_t>(slots, slots + numSlots)), copy);
}

corey_status corey_states_assign(corey_states *states, int64_t to,
                                 const corey_states *source, int64_t from) {
  if (!states || !source)
    return missing(!states ? "states" : "states to copy from");
  return record(states->impl.assign(to, source->impl, from));
}

corey_status corey_states_clear(corey_states *states) {
  if (!states)
    return missing("states");
  return record(states->impl.clear());
}

corey_status corey_states_clear_slot(corey_states *states, int64_t slot) {
  if (!states)
    return missing("states");
  return record(states->impl.clear(slot));
}

/// Tokens that lie one after another.
static Expected<TokenSequences> split(const int32_t *tokens,
                                      const int64_t *lengths, size_t count) {
  TokenSequences sequences;
  for (size_t i = 0; i < count; ++i) {
    if (lengths[i] < 0)
      return Status::invalidArgument("lengths: expected at least 1 token of "
                                     "each sequence, got " +
                                     std::to_string(lengths[i]) + " of " +
                                     std::to_string(i));
    sequences.emplace_back(tokens, tokens + lengths[i]);
    tokens += lengths[i];
  }
  return sequences;
}

static std::vector<int64_t> toVector(const int64_t *slots, size_t count) {
  return slots ? std::vector<int64_t>(slots, slots + count)
               : std::vector<int64_t>();
}

static std::function<void(int64_t, int64_t)>
toFunction(corey_on_progress onProgress, void *userData) {
  if (!onProgress)
    return nullptr;
  return
      [=](int64_t done, int64_t total) { onProgress(userData, done, total); };
}

/// The caller's tensor for logits, checked before anything runs; an empty one
/// for null.
static Expected<Tensor> logitsView(const corey_model &model,
                                   const corey_tensor *logits, int64_t rows) {
  if (!logits)
    return Tensor();
  Expected<Tensor> view = convert(*logits, "logits", 0);
  if (!view)
    return view;
  std::vector<int64_t> shape = {rows, model.impl->info().vocabSize};
  Device device = model.impl->context().getDevice();
  if (view->dtype() != DType::F32 || view->shape() != shape)
    return Status::invalidArgument(
        "logits: expected an f32 tensor of shape [" + std::to_string(rows) +
        ", " + std::to_string(shape[1]) + "], got " + view->describe());
  if (view->device() != device && view->device().kind != Device::CPU)
    return Status::invalidArgument("logits: expected a tensor on the host or " +
                                   device.name() + ", got " + view->describe());
  return view;
}

static corey_status finish(Expected<Tensor> made, const corey_tensor *logits,
                           const Tensor &view) {
  if (!made)
    return record(made.status());
  return logits ? record(view.copyFrom(*made)) : COREY_OK;
}

corey_status corey_model_prefill(corey_model *model, const int32_t *tokens,
                                 const int64_t *lengths, size_t numSequences,
                                 corey_states *states, const int64_t *slots,
                                 const corey_tensor *logits,
                                 corey_on_progress onProgress, void *userData) {
  if (!model || (numSequences && (!tokens || !lengths)) || !states)
    return missing(!model    ? "a model"
                   : !states ? "states"
                             : "tokens and lengths");
  Expected<TokenSequences> sequences = split(tokens, lengths, numSequences);
  if (!sequences)
    return record(sequences.status());
  Expected<Tensor> view =
      logitsView(*model, logits, static_cast<int64_t>(numSequences));
  if (!view)
    return record(view.status());
  return finish(model->impl->prefill(*sequences, states->impl,
                                     toVector(slots, numSequences),
                                     toFunction(onProgress, userData)),
                logits, *view);
}

corey_status corey_model_decode(corey_model *model, const int32_t *tokens,
                                size_t numSequences, corey_states *states,
                                const int64_t *slots,
                                const corey_tensor *logits) {
  if (!model || (numSequences && !tokens) || !states)
    return missing(!model ? "a model" : !states ? "states" : "tokens");
  Expected<Tensor> view =
      logitsView(*model, logits, static_cast<int64_t>(numSequences));
  if (!view)
    return record(view.status());
  return finish(
      model->impl->decode(std::vector<int32_t>(tokens, tokens + numSequences),
                          states->impl, toVector(slots, numSequences)),
      logits, *view);
}

corey_status corey_model_logits(corey_model *model, const int32_t *tokens,
                                size_t numTokens, int64_t count,
                                const corey_tensor *logits) {
  if (!model || (numTokens && !tokens) || !logits)
    return missing(!model    ? "a model"
                   : !logits ? "a place for the logits"
                             : "tokens");
  Expected<Tensor> view = logitsView(*model, logits, count);
  if (!view)
    return record(view.status());
  return finish(model->impl->logits(
                    std::vector<int32_t>(tokens, tokens + numTokens), count),
                logits, *view);
}

corey_status corey_model_generate(corey_model *model, const int32_t *tokens,
                                  const int64_t *lengths, size_t numSequences,
                                  int64_t maxTokens,
                                  const corey_generate_options *options,
                                  corey_states *states, int32_t *generated,
                                  int64_t *counts,
                                  corey_generation *generation) {
  if (!model || (numSequences && (!tokens || !lengths)))
    return missing(!model ? "a model" : "tokens and lengths");
  Expected<TokenSequences> prompts = split(tokens, lengths, numSequences);
  if (!prompts)
    return record(prompts.status());
  GenerateOptions converted;
  converted.maxTokens = maxTokens;
  if (options) {
    converted.sampling = {options->temperature, options->top_k,
                          options->top_p == 0 ? 1 : options->top_p,
                          options->seed};
    if (options->has_stop_tokens) {
      if (options->num_stop_tokens && !options->stop_tokens)
        return missing("stop tokens");
      converted.stopTokens.emplace(options->stop_tokens,
                                   options->stop_tokens +
                                       options->num_stop_tokens);
    }
    if (options->on_token)
      converted.onToken = [=](int64_t sequence, int32_t token) {
        return options->on_token(options->user_data, sequence, token) != 0;
      };
    converted.onProgress = toFunction(options->on_progress, options->user_data);
  }
  Expected<Generation> made = model->impl->generate(
      *prompts, converted, states ? &states->impl : nullptr);
  if (!made)
    return record(made.status());
  for (size_t i = 0; i < numSequences; ++i) {
    const std::vector<int32_t> &each = made->tokens[i];
    if (generated)
      std::copy(each.begin(), each.end(),
                generated + static_cast<int64_t>(i) * maxTokens);
    if (counts)
      counts[i] = static_cast<int64_t>(each.size());
  }
  if (generation)
    *generation = {made->promptTokens, made->newTokens, made->prefillMs,
                   made->decodeMs};
  return COREY_OK;
}

corey_status
corey_model_negative_log_likelihoods(corey_model *model, const int32_t *tokens,
                                     size_t numTokens, int64_t window,
                                     int64_t stride, double *nats) {
  if (!model || (numTokens && !tokens) || !nats)
    return missing(!model  ? "a model"
                   : !nats ? "a place for the likelihoods"
                           : "tokens");
  Expected<std::vector<double>> made = model->impl->negativeLogLikelihoods(
      std::vector<int32_t>(tokens, tokens + numTokens), window, stride);
  if (!made)
    return record(made.status());
  std::copy(made->begin(), made->end(), nats);
  return COREY_OK;
}
