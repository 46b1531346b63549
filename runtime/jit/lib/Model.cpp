//===- Model.cpp - Language models: loading, states, generation -----------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Model.h"
#include "corey/Checkpoint.h"
#include "corey/Device/CUDA.h"
#include "corey/InitAll.h"
#include "mlir/IR/MLIRContext.h"
#include "llvm/Support/raw_ostream.h"
#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <set>

using namespace corey;

//===----------------------------------------------------------------------===//
// States
//===----------------------------------------------------------------------===//

struct StateCache::Impl {
  Device device;
  /// Of each layer, in the order of the program's arguments: [slots, ...].
  std::vector<Tensor> pools;
  std::vector<std::string> names;
  std::vector<int64_t> tokens;
};

int64_t StateCache::size() const {
  return impl ? static_cast<int64_t>(impl->tokens.size()) : 0;
}
int64_t StateCache::tokens(int64_t slot) const {
  return impl->tokens[static_cast<size_t>(slot)];
}
int64_t StateCache::bytesPerSequence() const {
  int64_t bytes = 0;
  if (impl)
    for (const Tensor &pool : impl->pools)
      bytes += pool.numBytes() / pool.dim(0);
  return bytes;
}

static Status noStates() {
  return Status::invalidArgument(
      "expected states that Model::makeStates() or loadStates() made, got an "
      "empty handle");
}

static Status checkSlot(int64_t slot, int64_t size) {
  if (slot >= 0 && slot < size)
    return Status::ok();
  return Status::invalidArgument("expected a slot from 0 to " +
                                 std::to_string(size - 1) + ", got " +
                                 std::to_string(slot));
}

Expected<StateCache>
StateCache::select(const std::vector<int64_t> &slots) const {
  if (!impl)
    return noStates();
  if (slots.empty())
    return Status::invalidArgument("expected at least 1 slot, got none");
  for (int64_t slot : slots)
    if (Status status = checkSlot(slot, size()); !status)
      return status;
  auto made = std::make_shared<Impl>();
  made->device = impl->device;
  made->names = impl->names;
  for (int64_t slot : slots)
    made->tokens.push_back(tokens(slot));
  for (const Tensor &pool : impl->pools) {
    std::vector<int64_t> shape = pool.shape();
    shape[0] = static_cast<int64_t>(slots.size());
    Expected<Tensor> copy = Tensor::empty(pool.dtype(), shape, impl->device);
    if (!copy)
      return copy.takeStatus();
    // Neighbours are copied together.
    for (size_t i = 0; i < slots.size();) {
      size_t end = i + 1;
      while (end < slots.size() && slots[end] == slots[end - 1] + 1)
        ++end;
      int64_t count = static_cast<int64_t>(end - i),
              at = static_cast<int64_t>(i);
      if (Status status =
              copy->slice(0, at, at + count)
                  ->copyFrom(*pool.slice(0, slots[i], slots[i] + count));
          !status)
        return status;
      i = end;
    }
    made->pools.push_back(std::move(*copy));
  }
  StateCache states;
  states.impl = std::move(made);
  return states;
}

Expected<StateCache> StateCache::clone() const {
  std::vector<int64_t> all(static_cast<size_t>(size()));
  std::iota(all.begin(), all.end(), 0);
  return select(all);
}

/// Whether two pools differ in the number of slots only.
static bool haveSameSlots(const Tensor &a, const Tensor &b) {
  return a.dtype() == b.dtype() && a.rank() == b.rank() &&
         std::equal(a.shape().begin() + 1, a.shape().end(),
                    b.shape().begin() + 1);
}

Status StateCache::assign(int64_t to, const StateCache &source, int64_t from) {
  if (!impl || !source.impl)
    return noStates();
  if (Status status = checkSlot(to, size()); !status)
    return status;
  if (Status status = checkSlot(from, source.size()); !status)
    return status;
  bool same = impl->pools.size() == source.impl->pools.size();
  for (size_t i = 0; same && i < impl->pools.size(); ++i)
    same = haveSameSlots(impl->pools[i], source.impl->pools[i]);
  if (!same)
    return Status::invalidArgument(
        "expected states of the same model, got others");
  for (size_t i = 0; i < impl->pools.size(); ++i)
    if (Status status =
            impl->pools[i]
                .slice(0, to, to + 1)
                ->copyFrom(*source.impl->pools[i].slice(0, from, from + 1));
        !status)
      return status;
  impl->tokens[static_cast<size_t>(to)] = source.tokens(from);
  return Status::ok();
}

/// Fills contiguous tensors with zeros.
static Status fillZeros(const std::vector<Tensor> &tensors, Device device) {
  if (device.kind == Device::CPU) {
    for (const Tensor &tensor : tensors)
      std::memset(tensor.data(), 0, static_cast<size_t>(tensor.numBytes()));
    return Status::ok();
  }
  Expected<std::shared_ptr<cuda::Device>> gpu = cuda::Device::get(device.index);
  if (!gpu)
    return gpu.takeStatus();
  for (const Tensor &tensor : tensors)
    if (Status status = (*gpu)->memset(
            tensor.data(), 0, static_cast<size_t>(tensor.numBytes()), nullptr);
        !status)
      return status;
  return (*gpu)->synchronize();
}

Status StateCache::clear(int64_t slot) {
  if (!impl)
    return noStates();
  if (Status status = checkSlot(slot, size()); !status)
    return status;
  std::vector<Tensor> slices;
  for (const Tensor &pool : impl->pools)
    slices.push_back(*pool.slice(0, slot, slot + 1));
  impl->tokens[static_cast<size_t>(slot)] = 0;
  return fillZeros(slices, impl->device);
}

Status StateCache::clear() {
  if (!impl)
    return noStates();
  std::fill(impl->tokens.begin(), impl->tokens.end(), 0);
  return fillZeros(impl->pools, impl->device);
}

static constexpr const char *kTokensKey = "tokens";

Status StateCache::save(const std::string &path) const {
  if (!impl)
    return noStates();
  std::vector<std::pair<std::string, Tensor>> named;
  Expected<Tensor> counts = Tensor::empty(DType::I64, {size()});
  if (!counts)
    return counts.takeStatus();
  std::copy(impl->tokens.begin(), impl->tokens.end(),
            counts->dataAs<int64_t>());
  named.push_back({kTokensKey, *counts});
  for (size_t i = 0; i < impl->pools.size(); ++i) {
    Expected<Tensor> host = impl->pools[i].to(Device::cpu());
    if (!host)
      return host.takeStatus();
    named.push_back({impl->names[i], *host});
  }
  return writeSafeTensors(path, named);
}

//===----------------------------------------------------------------------===//
// Sampling
//===----------------------------------------------------------------------===//

Status SamplingOptions::check() const {
  if (!(temperature >= 0) || std::isinf(temperature))
    return Status::invalidArgument(
        "temperature: expected a number of at least 0, got " +
        std::to_string(temperature));
  if (topK < 0)
    return Status::invalidArgument(
        "top_k: expected at least 1, or 0 for all tokens, got " +
        std::to_string(topK));
  if (!(topP > 0 && topP <= 1))
    return Status::invalidArgument(
        "top_p: expected a number above 0 and up to 1, got " +
        std::to_string(topP));
  return Status::ok();
}

//===----------------------------------------------------------------------===//
// Loading
//===----------------------------------------------------------------------===//

struct Model::Impl {
  std::shared_ptr<Context> context;
  std::shared_ptr<Executable> executable;
  /// @prefill_packed, once prompts of different lengths came.
  std::shared_ptr<Executable> packed;
  ModelInfo info;
  import::ModelConfig config;
  import::TensorIndex index;
  import::ImportOptions import;
  std::string name;
  ModelOptions options;
  Device device;
  /// The pools among the arguments of @decode.
  std::vector<ArgumentInfo> pools;

  /// How tokens are drawn for each of a number of sequences.
  struct Draw {
    Tensor temperature, topK, topP;
    std::vector<Tensor> with(const Tensor &random) const {
      return {temperature, topK, topP, random};
    }
  };
  /// What decoding a batch keeps from call to call: buffers, and on a CUDA
  /// device a step as a graph, which reads tokens and random numbers from one
  /// buffer and writes to the other, and the same the other way round.
  struct Decoder {
    std::shared_ptr<StateCache::Impl> states;
    Tensor ids[2], random[2], slots, logits;
    Draw draw;
    std::shared_ptr<CapturedRun> runs[2];
    cuda::Stream stream;
    cuda::PinnedBuffer tokens;
  };
  std::unique_ptr<Decoder> decoder;
  /// Prompts of a shape that came before: the second one is captured, and those
  /// after it launch the graph. On a CUDA device; a few hundred launches take
  /// the host as long as a short prompt takes the device.
  struct Prefiller {
    std::shared_ptr<StateCache::Impl> states;
    Tensor ids, rows, slots;
    std::shared_ptr<CapturedRun> graph;
  };
  static constexpr size_t kPrefillers = 8;
  std::vector<Prefiller> prefillers;
  /// Of their graphs, those that are gone included.
  CapturedRun::Launches launches;
  /// For generate() without states.
  StateCache ownStates;
  /// The arguments and results of the draw in decode(), whose tokens nobody
  /// looks at.
  std::vector<Tensor> unseen;

  Expected<std::shared_ptr<Executable>>
  compile(const import::ImportOptions &how) const;
  Expected<Executable *> getPacked();
  Expected<Tensor> toDevice(const std::vector<int32_t> &values,
                            std::vector<int64_t> shape) const;
  /// Replaces the elements of a contiguous tensor of T.
  template <typename T>
  static Status fill(const Tensor &tensor, const std::vector<T> &values);
  Status checkTokens(const std::vector<int32_t> &tokens) const;
  /// Sequences of one length, one after another in `ids`.
  Status prefillEqual(const std::vector<int32_t> &ids,
                      const std::vector<int32_t> &rows,
                      const std::vector<int32_t> &slots, const Tensor &logits,
                      const StateCache &states);
  /// Sequences that begin at `starts` of `ids`.
  Status prefillPacked(Executable &packed, const std::vector<int32_t> &ids,
                       const std::vector<int32_t> &starts,
                       const std::vector<int32_t> &rows,
                       const std::vector<int32_t> &slots, const Tensor &logits,
                       const StateCache &states) const;
  Expected<std::vector<int32_t>> checkSlots(const StateCache &states,
                                            const std::vector<int64_t> &slots,
                                            size_t sequences) const;
  /// Runs one of the functions with the states in `pools`.
  static Status run(Executable &executable, const char *function,
                    std::vector<Tensor> inputs, std::vector<Tensor> results,
                    const std::vector<Tensor> &pools);
  /// Reads tokens of one sequence, in slot 0 of `states`, in one piece. The
  /// logits of the last `count` of them.
  Expected<Tensor> read(const int32_t *tokens, int64_t length, int64_t count,
                        StateCache &states) const;
  Expected<Draw> makeDraw(int64_t sequences) const;
  Expected<Decoder *> getDecoder(const StateCache &states, int64_t sequences);
  static Status startDraws(Decoder &decoder, const SamplingOptions &options);
  Status decodeSteps(Decoder &decoder, int64_t steps, bool exact,
                     const std::function<bool(const int32_t *)> &take);

  static Expected<std::shared_ptr<Model>>
  create(std::shared_ptr<Context> context, const import::ModelConfig &config,
         const import::TensorIndex &index, const ModelOptions &options,
         const std::string &name,
         const std::function<Expected<Tensor>(const std::string &)> &find);
};

Model::Model() : impl(std::make_unique<Impl>()) {}
Model::~Model() = default;
const ModelInfo &Model::info() const { return impl->info; }
Context &Model::context() const { return *impl->context; }
Executable &Model::executable() const { return *impl->executable; }

Expected<std::shared_ptr<Executable>>
Model::Impl::compile(const import::ImportOptions &how) const {
  mlir::DialectRegistry registry;
  registerAllDialects(registry);
  mlir::MLIRContext mlir(registry, mlir::MLIRContext::Threading::DISABLED);
  Expected<mlir::OwningOpRef<mlir::ModuleOp>> module =
      import::buildModel(config, index, &mlir, how);
  if (!module)
    return module.takeStatus();
  std::string text;
  llvm::raw_string_ostream os(text);
  (**module)->print(os);
  return context->compile(text, options.compile, name);
}

Expected<Executable *> Model::Impl::getPacked() {
  if (packed)
    return packed.get();
  import::ImportOptions how = import;
  how.prefill = how.decode = how.sample = false;
  how.prefillPacked = true;
  Expected<std::shared_ptr<Executable>> compiled = compile(how);
  if (!compiled)
    return compiled.takeStatus();
  // The tensors of the other program, which is never there twice.
  for (const ArgumentInfo &weight : (*compiled)->weights()) {
    Expected<Tensor> tensor = executable->boundWeight(weight.name);
    if (!tensor)
      return tensor.takeStatus();
    if (Status status = (*compiled)->bindWeight(weight.name, *tensor); !status)
      return status;
  }
  packed = *compiled;
  return packed.get();
}

Expected<std::shared_ptr<Model>> Model::Impl::create(
    std::shared_ptr<Context> context, const import::ModelConfig &config,
    const import::TensorIndex &index, const ModelOptions &options,
    const std::string &name,
    const std::function<Expected<Tensor>(const std::string &)> &find) {
  if (options.segment < 1)
    return Status::invalidArgument("segment: expected at least 1 token, got " +
                                   std::to_string(options.segment));
  std::shared_ptr<Model> model(new Model);
  Impl &impl = *model->impl;
  impl.context = context;
  impl.device = context->getDevice();
  impl.options = options;

  import::ImportOptions how;
  how.stateType = options.stateType;
  if (options.computeType) {
    how.computeType = *options.computeType;
  } else if (impl.device.kind == Device::CUDA) {
    // The largest tensor is a table or a projection.
    int64_t most = -1;
    for (const auto &each : index) {
      int64_t size = *countElements(each.second.shape);
      if (each.second.shape.size() == 2 && size > most) {
        most = size;
        how.computeType = each.second.dtype;
      }
    }
  }
  how.prefillPacked = false;
  impl.config = config;
  impl.index = index;
  impl.import = how;
  impl.name = name;
  Expected<std::shared_ptr<Executable>> compiled = impl.compile(how);
  if (!compiled)
    return compiled.takeStatus();
  impl.executable = *compiled;
  if (Status status = impl.executable->bindWeights(find); !status)
    return status;

  const FunctionInfo *decode = impl.executable->findFunction("decode");
  // Behind the tokens, the slots and the four arguments of the draw.
  impl.pools.assign(decode->inputs.begin() + 6, decode->inputs.end());
  impl.info.type = import::modelTypeName(config.type).str();
  impl.info.numLayers = config.numLayers;
  impl.info.hiddenSize = config.hiddenSize;
  impl.info.vocabSize = config.vocabSize;
  impl.info.computeType = how.computeType;
  for (int64_t token : config.eosTokenIds)
    impl.info.eosTokens.push_back(static_cast<int32_t>(token));
  for (const auto &each : index) {
    int64_t size = *countElements(each.second.shape);
    impl.info.parameters += size;
    impl.info.weightBytes +=
        size * static_cast<int64_t>(dtypeSize(each.second.dtype));
  }
  return model;
}

Expected<std::shared_ptr<Model>> Model::load(std::shared_ptr<Context> context,
                                             const std::string &folder,
                                             const ModelOptions &options) {
  Expected<Checkpoint> checkpoint = Checkpoint::open(folder);
  if (!checkpoint)
    return checkpoint.takeStatus();
  return Impl::create(
      std::move(context), checkpoint->config(), checkpoint->tensors(), options,
      folder, [&](const std::string &key) { return checkpoint->get(key); });
}

/// Numbers of normal distribution in device memory, of which every matrix of a
/// random model is made: as many of its own would take longer to make than to
/// use.
static constexpr int64_t kRandomNumbers = int64_t(1) << 22;
/// Standard deviation of the matrices, as transformers initializes them.
static constexpr double kDeviation = 0.02;

namespace {
class RandomWeights {
public:
  static Expected<RandomWeights> create(Device device, DType type,
                                        uint64_t seed) {
    RandomWeights weights(device, type, seed);
    Expected<Tensor> host = Tensor::empty(type, {kRandomNumbers});
    if (!host)
      return host.takeStatus();
    std::normal_distribution<double> normal(0, kDeviation);
    for (int64_t i = 0; i < kRandomNumbers; ++i)
      storeScalar(type,
                  host->dataAs<char>() +
                      i * static_cast<int64_t>(dtypeSize(type)),
                  normal(weights.random));
    Expected<Tensor> numbers =
        device.kind == Device::CPU ? host : host->to(device);
    if (!numbers)
      return numbers.takeStatus();
    weights.numbers = std::move(*numbers);
    return weights;
  }

  Expected<Tensor> make(llvm::StringRef name, const import::TensorInfo &info) {
    auto is = [&](llvm::StringRef end) { return name.ends_with(end); };
    std::uniform_real_distribution<double> unit(0, 1);
    int64_t last = info.shape.empty() ? 1 : info.shape.back();
    if (is("A_log"))
      return fill(info, [&](int64_t i) {
        // 1 to the number of states, or 1 to 16 for a head.
        return std::log(info.shape.size() == 2
                            ? static_cast<double>(i % last + 1)
                            : 1 + 15 * unit(random));
      });
    if (is("dt_bias") || is("dt_proj.bias"))
      return fill(info, [&](int64_t) {
        // Of which softplus is between 0.001 and 0.1.
        double dt = std::exp(std::log(1e-3) + unit(random) * std::log(1e2));
        return dt + std::log(-std::expm1(-dt));
      });
    if (is(".D") || is("norm.weight") || is("norm_f.weight"))
      return fill(info, [](int64_t) { return 1.0; });
    if (is("conv1d.weight"))
      return fill(info, [&](int64_t) { return unit(random) - 0.5; });
    if (is(".bias"))
      return fill(info, [](int64_t) { return 0.0; });
    Expected<Tensor> made = Tensor::empty(type, info.shape, device);
    if (!made)
      return made;
    int64_t size = made->numElements();
    Expected<Tensor> flat = made->reshape({size});
    for (int64_t at = 0; at < size;) {
      int64_t count = std::min(size - at, kRandomNumbers - next);
      if (Status status = flat->slice(0, at, at + count)
                              ->copyFrom(*numbers.slice(0, next, next + count));
          !status)
        return status;
      at += count;
      next = (next + count) % kRandomNumbers;
    }
    return made;
  }

private:
  RandomWeights(Device device, DType type, uint64_t seed)
      : device(device), type(type), random(seed) {}

  Expected<Tensor> fill(const import::TensorInfo &info,
                        const std::function<double(int64_t)> &value) {
    Expected<Tensor> host = Tensor::empty(type, info.shape);
    if (!host)
      return host;
    for (int64_t i = 0; i < host->numElements(); ++i)
      storeScalar(type,
                  host->dataAs<char>() +
                      i * static_cast<int64_t>(dtypeSize(type)),
                  value(i));
    return host;
  }

  Device device;
  DType type;
  std::mt19937_64 random;
  Tensor numbers;
  /// The next of the numbers to use.
  int64_t next = 0;
};
} // namespace

Expected<std::shared_ptr<Model>>
Model::random(std::shared_ptr<Context> context, std::string_view preset,
              DType weightType, const ModelOptions &options, uint64_t seed) {
  if (weightType != DType::F32 && weightType != DType::F16 &&
      weightType != DType::BF16)
    return Status::invalidArgument(
        std::string("expected weights of f32, f16 or bf16, got ") +
        dtypeName(weightType));
  Expected<import::ModelConfig> config =
      import::presetConfig(llvm::StringRef(preset.data(), preset.size()));
  if (!config)
    return config.takeStatus();
  import::TensorIndex index = import::makeTensorIndex(*config, weightType);
  Expected<RandomWeights> weights =
      RandomWeights::create(context->getDevice(), weightType, seed);
  if (!weights)
    return weights.takeStatus();
  return Impl::create(
      std::move(context), *config, index, options, std::string(preset),
      [&](const std::string &key) { return weights->make(key, index[key]); });
}

//===----------------------------------------------------------------------===//
// Running
//===----------------------------------------------------------------------===//

Expected<StateCache> Model::makeStates(int64_t sequences) const {
  if (sequences < 1)
    return Status::invalidArgument("expected at least 1 sequence, got " +
                                   std::to_string(sequences));
  auto made = std::make_shared<StateCache::Impl>();
  made->device = impl->device;
  made->tokens.assign(static_cast<size_t>(sequences), 0);
  for (const ArgumentInfo &info : impl->pools) {
    std::vector<int64_t> shape = info.shape;
    shape[0] = sequences;
    Expected<Tensor> pool = Tensor::empty(info.dtype, shape, impl->device);
    if (!pool)
      return pool.takeStatus();
    made->pools.push_back(std::move(*pool));
    made->names.push_back(info.name);
  }
  StateCache states;
  states.impl = std::move(made);
  if (Status status = states.clear(); !status)
    return status;
  return states;
}

Expected<StateCache> Model::loadStates(const std::string &path) const {
  Expected<SafeTensors> file = SafeTensors::open(path);
  if (!file)
    return file.takeStatus();
  Expected<Tensor> counts = file->get(kTokensKey);
  if (!counts || counts->dtype() != DType::I64 || counts->rank() != 1 ||
      counts->numElements() < 1)
    return Status::invalidArgument(
        path + ": expected states that StateCache::save() wrote, with an i64 "
               "tensor 'tokens' of one axis, got a file without it");
  int64_t sequences = counts->dim(0);
  for (int64_t i = 0; i < sequences; ++i)
    if (int64_t count = counts->dataAs<int64_t>()[i]; count < 0)
      return Status::invalidArgument(
          path + ": tokens: expected counts of at least 0, got " +
          std::to_string(count));
  Expected<StateCache> states = makeStates(sequences);
  if (!states)
    return states;
  for (int64_t i = 0; i < sequences; ++i)
    states->impl->tokens[static_cast<size_t>(i)] = counts->dataAs<int64_t>()[i];
  for (size_t i = 0; i < impl->pools.size(); ++i) {
    const Tensor &pool = states->impl->pools[i];
    Expected<Tensor> tensor = file->get(impl->pools[i].name);
    if (!tensor)
      return Status(tensor.status().code(), path +
                                                ": expected states of this "
                                                "model, got none for '" +
                                                impl->pools[i].name + "'");
    if (tensor->dtype() != pool.dtype() || tensor->shape() != pool.shape())
      return Status::invalidArgument(
          path + ": expected states of this model, " + pool.describe() +
          " for '" + impl->pools[i].name + "', got " + tensor->describe());
    if (Status status = pool.copyFrom(*tensor); !status)
      return status;
  }
  return states;
}

Expected<Tensor> Model::Impl::toDevice(const std::vector<int32_t> &values,
                                       std::vector<int64_t> shape) const {
  Expected<Tensor> host = Tensor::empty(DType::I32, std::move(shape));
  if (!host)
    return host;
  std::copy(values.begin(), values.end(), host->dataAs<int32_t>());
  return device.kind == Device::CPU ? host : host->to(device);
}

template <typename T>
Status Model::Impl::fill(const Tensor &tensor, const std::vector<T> &values) {
  Expected<Tensor> host = Tensor::empty(tensor.dtype(), tensor.shape());
  if (!host)
    return host.takeStatus();
  std::copy(values.begin(), values.end(), host->dataAs<T>());
  return tensor.copyFrom(*host);
}

Status Model::Impl::checkTokens(const std::vector<int32_t> &tokens) const {
  for (int32_t token : tokens)
    if (token < 0 || token >= info.vocabSize)
      return Status::invalidArgument("expected tokens from 0 to " +
                                     std::to_string(info.vocabSize - 1) +
                                     ", got " + std::to_string(token));
  return Status::ok();
}

Expected<std::vector<int32_t>>
Model::Impl::checkSlots(const StateCache &states,
                        const std::vector<int64_t> &slots,
                        size_t sequences) const {
  if (!states.impl)
    return noStates();
  bool ours = states.impl->device == device &&
              states.impl->pools.size() == pools.size();
  for (size_t i = 0; ours && i < pools.size(); ++i) {
    const Tensor &pool = states.impl->pools[i];
    ours = pool.dtype() == pools[i].dtype &&
           static_cast<size_t>(pool.rank()) == pools[i].shape.size() &&
           std::equal(pool.shape().begin() + 1, pool.shape().end(),
                      pools[i].shape.begin() + 1);
  }
  if (!ours)
    return Status::invalidArgument(
        "expected states of this model, got those of another");
  std::vector<int32_t> result;
  if (slots.empty()) {
    if (static_cast<int64_t>(sequences) > states.size())
      return Status::invalidArgument(
          "expected states of at least " + std::to_string(sequences) +
          " sequences, got " + std::to_string(states.size()));
    result.resize(sequences);
    std::iota(result.begin(), result.end(), 0);
    return result;
  }
  if (slots.size() != sequences)
    return Status::invalidArgument(
        "expected a slot for each of " + std::to_string(sequences) +
        " sequences, got " + std::to_string(slots.size()));
  std::set<int64_t> seen;
  for (int64_t slot : slots) {
    if (Status status = checkSlot(slot, states.size()); !status)
      return status;
    if (!seen.insert(slot).second)
      return Status::invalidArgument(
          "expected a slot of its own for each sequence, got " +
          std::to_string(slot) + " twice");
    result.push_back(static_cast<int32_t>(slot));
  }
  return result;
}

Status Model::Impl::run(Executable &executable, const char *function,
                        std::vector<Tensor> inputs, std::vector<Tensor> results,
                        const std::vector<Tensor> &pools) {
  inputs.insert(inputs.end(), pools.begin(), pools.end());
  results.insert(results.end(), pools.begin(), pools.end());
  return executable.run(function, inputs, results);
}

Status Model::Impl::prefillPacked(Executable &packed,
                                  const std::vector<int32_t> &ids,
                                  const std::vector<int32_t> &starts,
                                  const std::vector<int32_t> &rows,
                                  const std::vector<int32_t> &slots,
                                  const Tensor &logits,
                                  const StateCache &states) const {
  auto sizeOf = [](const std::vector<int32_t> &values) {
    return static_cast<int64_t>(values.size());
  };
  Expected<Tensor> idsTensor = toDevice(ids, {1, sizeOf(ids)});
  Expected<Tensor> startsTensor = toDevice(starts, {sizeOf(starts)});
  Expected<Tensor> rowsTensor = toDevice(rows, {sizeOf(rows)});
  Expected<Tensor> slotsTensor = toDevice(slots, {sizeOf(slots)});
  for (Expected<Tensor> *each :
       {&idsTensor, &startsTensor, &rowsTensor, &slotsTensor})
    if (!*each)
      return each->takeStatus();
  return run(packed, "prefill_packed",
             {*idsTensor, *startsTensor, *rowsTensor, *slotsTensor}, {logits},
             states.impl->pools);
}

Status Model::Impl::prefillEqual(const std::vector<int32_t> &ids,
                                 const std::vector<int32_t> &rows,
                                 const std::vector<int32_t> &slots,
                                 const Tensor &logits,
                                 const StateCache &states) {
  int64_t batch = static_cast<int64_t>(slots.size()),
          length = static_cast<int64_t>(ids.size()) / batch,
          wanted = static_cast<int64_t>(rows.size());
  auto known = std::find_if(
      prefillers.begin(), prefillers.end(), [&](const Prefiller &each) {
        return each.states == states.impl &&
               each.ids.shape() == std::vector<int64_t>{batch, length} &&
               each.rows.dim(0) == wanted;
      });
  if (known == prefillers.end()) {
    Prefiller made;
    made.states = states.impl;
    Expected<Tensor> idsTensor = toDevice(ids, {batch, length});
    Expected<Tensor> rowsTensor = toDevice(rows, {wanted});
    Expected<Tensor> slotsTensor = toDevice(slots, {batch});
    for (auto [from, to] :
         {std::pair<Expected<Tensor> *, Tensor *>{&idsTensor, &made.ids},
          {&rowsTensor, &made.rows},
          {&slotsTensor, &made.slots}}) {
      if (!*from)
        return from->takeStatus();
      *to = std::move(**from);
    }
    if (Status status =
            run(*executable, "prefill", {made.ids, made.rows, made.slots},
                {logits}, states.impl->pools);
        !status)
      return status;
    // Values that are observed for their own sake are, in each run; a graph
    // looks at some of its launches, which is enough for policies.
    if (device.kind == Device::CUDA && !options.compile.observeValues) {
      if (prefillers.size() >= kPrefillers)
        prefillers.pop_back();
      prefillers.insert(prefillers.begin(), std::move(made));
    }
    return Status::ok();
  }
  // The last one used is the first in the list.
  std::rotate(prefillers.begin(), known, known + 1);
  Prefiller &prefiller = prefillers.front();
  for (auto [values, to] :
       {std::pair<const std::vector<int32_t> *, Tensor *>{&ids, &prefiller.ids},
        {&rows, &prefiller.rows},
        {&slots, &prefiller.slots}})
    if (Status status = fill(*to, *values); !status)
      return status;
  if (!prefiller.graph) {
    Expected<Tensor> own =
        Tensor::empty(DType::F32, {wanted, info.vocabSize}, device);
    if (!own)
      return own.takeStatus();
    const std::vector<Tensor> &pools = states.impl->pools;
    std::vector<Tensor> inputs{prefiller.ids, prefiller.rows, prefiller.slots},
        outputs{*own};
    inputs.insert(inputs.end(), pools.begin(), pools.end());
    outputs.insert(outputs.end(), pools.begin(), pools.end());
    Expected<std::shared_ptr<CapturedRun>> graph =
        executable->capture("prefill", inputs, outputs);
    if (!graph)
      return graph.takeStatus();
    prefiller.graph = *graph;
  }
  CapturedRun::Launches before = prefiller.graph->launches();
  if (Status status = prefiller.graph->launch(); !status)
    return status;
  CapturedRun::Launches after = prefiller.graph->launches();
  launches.all += after.all - before.all;
  launches.observing += after.observing - before.observing;
  return logits.copyFrom(prefiller.graph->outputs().front());
}

Expected<Tensor>
Model::prefill(const TokenSequences &tokens, StateCache &states,
               const std::vector<int64_t> &slots,
               const std::function<void(int64_t, int64_t)> &onProgress) {
  if (tokens.empty())
    return Status::invalidArgument("expected at least 1 sequence, got none");
  int64_t total = 0;
  bool equal = true;
  for (const std::vector<int32_t> &sequence : tokens) {
    if (sequence.empty())
      return Status::invalidArgument(
          "expected at least 1 token of each sequence, got none of one");
    if (Status status = impl->checkTokens(sequence); !status)
      return status;
    total += static_cast<int64_t>(sequence.size());
    equal &= sequence.size() == tokens.front().size();
  }
  Expected<std::vector<int32_t>> places =
      impl->checkSlots(states, slots, tokens.size());
  if (!places)
    return places.takeStatus();

  int64_t count = static_cast<int64_t>(tokens.size()),
          vocabulary = impl->info.vocabSize;
  Expected<Tensor> logits =
      Tensor::empty(DType::F32, {count, vocabulary}, impl->device);
  if (!logits)
    return logits;
  Executable *packed = nullptr;
  if (!equal) {
    Expected<Executable *> made = impl->getPacked();
    if (!made)
      return made.takeStatus();
    packed = *made;
  }
  std::vector<int64_t> done(tokens.size(), 0);
  int64_t allDone = 0;
  while (allDone < total) {
    // The sequences that have tokens left, and how many of each are next.
    std::vector<size_t> active;
    for (size_t i = 0; i < tokens.size(); ++i)
      if (done[i] < static_cast<int64_t>(tokens[i].size()))
        active.push_back(i);
    int64_t share = std::max<int64_t>(
        impl->options.segment / static_cast<int64_t>(active.size()), 1);
    std::vector<int32_t> ids, starts, rows, where;
    bool last = false;
    for (size_t i : active) {
      const std::vector<int32_t> &sequence = tokens[i];
      int64_t take =
          std::min(share, static_cast<int64_t>(sequence.size()) - done[i]);
      starts.push_back(static_cast<int32_t>(ids.size()));
      ids.insert(ids.end(), sequence.begin() + done[i],
                 sequence.begin() + done[i] + take);
      done[i] += take;
      where.push_back((*places)[i]);
      rows.push_back(static_cast<int32_t>(ids.size()) - 1);
      last |= done[i] == static_cast<int64_t>(sequence.size());
      states.impl->tokens[static_cast<size_t>((*places)[i])] += take;
    }
    // Nobody asks for logits in the middle of all prompts.
    if (!last)
      rows.resize(1);
    int64_t length = static_cast<int64_t>(ids.size()),
            batch = static_cast<int64_t>(active.size());
    // Of every sequence, in order: straight to where they belong.
    bool direct = batch == count && last;
    Expected<Tensor> made =
        direct ? *logits
               : Tensor::empty(DType::F32,
                               {static_cast<int64_t>(rows.size()), vocabulary},
                               impl->device);
    if (!made)
      return made;
    if (Status status =
            equal ? impl->prefillEqual(ids, rows, where, *made, states)
                  : impl->prefillPacked(*packed, ids, starts, rows, where,
                                        *made, states);
        !status)
      return status;
    if (!direct && last)
      for (size_t j = 0; j < active.size(); ++j) {
        size_t i = active[j];
        if (done[i] < static_cast<int64_t>(tokens[i].size()))
          continue;
        int64_t to = static_cast<int64_t>(i), from = static_cast<int64_t>(j);
        if (Status copied = logits->slice(0, to, to + 1)
                                ->copyFrom(*made->slice(0, from, from + 1));
            !copied)
          return copied;
      }
    allDone += length;
    if (onProgress)
      onProgress(allDone, total);
  }
  return logits;
}

Expected<Tensor> Model::decode(const std::vector<int32_t> &tokens,
                               StateCache &states,
                               const std::vector<int64_t> &slots) {
  if (tokens.empty())
    return Status::invalidArgument("expected at least 1 sequence, got none");
  if (Status status = impl->checkTokens(tokens); !status)
    return status;
  Expected<std::vector<int32_t>> places =
      impl->checkSlots(states, slots, tokens.size());
  if (!places)
    return places.takeStatus();
  int64_t count = static_cast<int64_t>(tokens.size());
  Expected<Tensor> ids = impl->toDevice(tokens, {count, 1});
  Expected<Tensor> where = impl->toDevice(*places, {count});
  Expected<Tensor> logits =
      Tensor::empty(DType::F32, {count, impl->info.vocabSize}, impl->device);
  for (Expected<Tensor> *each : {&ids, &where, &logits})
    if (!*each)
      return each->takeStatus();
  if (impl->unseen.empty() || impl->unseen[0].dim(0) != count) {
    impl->unseen.clear();
    Expected<Impl::Draw> draw = impl->makeDraw(count);
    if (!draw)
      return draw.takeStatus();
    std::vector<Tensor> made = {draw->temperature, draw->topK, draw->topP};
    for (auto [type, size] : {std::pair<DType, int64_t>{DType::I64, 3},
                              {DType::I32, 1},
                              {DType::I64, 3}}) {
      Expected<Tensor> tensor = Tensor::empty(type, {count, size}, impl->device,
                                              /*ZeroInit=*/true);
      if (!tensor)
        return tensor.takeStatus();
      made.push_back(std::move(*tensor));
    }
    impl->unseen = std::move(made);
  }
  const std::vector<Tensor> &u = impl->unseen;
  if (Status status = Impl::run(*impl->executable, "decode",
                                {*ids, *where, u[0], u[1], u[2], u[3]},
                                {*logits, u[4], u[5]}, states.impl->pools);
      !status)
    return status;
  for (int32_t slot : *places)
    ++states.impl->tokens[static_cast<size_t>(slot)];
  return logits;
}

Expected<Tensor> Model::Impl::read(const int32_t *tokens, int64_t length,
                                   int64_t count, StateCache &states) const {
  std::vector<int32_t> rows(static_cast<size_t>(count));
  std::iota(rows.begin(), rows.end(), static_cast<int32_t>(length - count));
  Expected<Tensor> ids = toDevice({tokens, tokens + length}, {1, length});
  Expected<Tensor> wanted = toDevice(rows, {count});
  Expected<Tensor> slot = toDevice({0}, {1});
  Expected<Tensor> logits =
      Tensor::empty(DType::F32, {count, info.vocabSize}, device);
  for (Expected<Tensor> *each : {&ids, &wanted, &slot, &logits})
    if (!*each)
      return each->takeStatus();
  if (Status status = run(*executable, "prefill", {*ids, *wanted, *slot},
                          {*logits}, states.impl->pools);
      !status)
    return status;
  states.impl->tokens[0] += length;
  return logits;
}

Expected<Tensor> Model::logits(const std::vector<int32_t> &tokens,
                               int64_t count) {
  if (Status status = impl->checkTokens(tokens); !status)
    return status;
  int64_t size = static_cast<int64_t>(tokens.size()),
          segment = impl->options.segment;
  if (count < 1 || count > size)
    return Status::invalidArgument("expected a count from 1 to " +
                                   std::to_string(size) + " tokens, got " +
                                   std::to_string(count));
  Expected<StateCache> states = makeStates(1);
  if (!states)
    return states.takeStatus();
  Expected<Tensor> result =
      Tensor::empty(DType::F32, {count, impl->info.vocabSize}, impl->device);
  if (!result)
    return result;
  for (int64_t at = 0; at < size; at += segment) {
    int64_t length = std::min(segment, size - at),
            // Those wanted of this piece; one where there are none.
        wanted = std::clamp<int64_t>(at + length - (size - count), 1, length);
    Expected<Tensor> piece =
        impl->read(tokens.data() + at, length, wanted, *states);
    if (!piece)
      return piece;
    int64_t to = at + length - wanted - (size - count);
    if (to < 0)
      continue;
    if (Status status = result->slice(0, to, to + wanted)->copyFrom(*piece);
        !status)
      return status;
  }
  return result;
}

//===----------------------------------------------------------------------===//
// Generation
//===----------------------------------------------------------------------===//

/// One of temperature 0 until it is filled.
Expected<Model::Impl::Draw> Model::Impl::makeDraw(int64_t sequences) const {
  Draw draw;
  for (auto [to, type] :
       {std::pair<Tensor *, DType>{&draw.temperature, DType::F32},
        {&draw.topK, DType::I32},
        {&draw.topP, DType::F32}}) {
    Expected<Tensor> tensor =
        Tensor::empty(type, {sequences}, device, /*ZeroInit=*/true);
    if (!tensor)
      return tensor.takeStatus();
    *to = std::move(*tensor);
  }
  return draw;
}

Expected<Model::Impl::Decoder *>
Model::Impl::getDecoder(const StateCache &states, int64_t sequences) {
  if (decoder && decoder->states == states.impl &&
      decoder->slots.dim(0) == sequences)
    return decoder.get();
  decoder.reset();
  auto made = std::make_unique<Decoder>();
  made->states = states.impl;
  for (auto [to, type, shape] :
       {std::tuple<Tensor *, DType, std::vector<int64_t>>{
            &made->ids[0], DType::I32, {sequences, 1}},
        {&made->ids[1], DType::I32, {sequences, 1}},
        {&made->random[0], DType::I64, {sequences, 3}},
        {&made->random[1], DType::I64, {sequences, 3}},
        {&made->slots, DType::I32, {sequences}},
        {&made->logits, DType::F32, {sequences, info.vocabSize}}}) {
    Expected<Tensor> tensor = Tensor::empty(type, shape, device);
    if (!tensor)
      return tensor.takeStatus();
    *to = std::move(*tensor);
  }
  Expected<Draw> draw = makeDraw(sequences);
  if (!draw)
    return draw.takeStatus();
  made->draw = std::move(*draw);
  if (device.kind == Device::CUDA) {
    Expected<std::shared_ptr<cuda::Device>> gpu =
        cuda::Device::get(device.index);
    if (!gpu)
      return gpu.takeStatus();
    Expected<cuda::Stream> stream = cuda::Stream::create(*gpu);
    if (!stream)
      return stream.takeStatus();
    made->stream = std::move(*stream);
    Expected<cuda::PinnedBuffer> tokens = cuda::PinnedBuffer::allocate(
        *gpu, static_cast<size_t>(2 * sequences) * sizeof(int32_t));
    if (!tokens)
      return tokens.takeStatus();
    made->tokens = std::move(*tokens);
  }
  decoder = std::move(made);
  return decoder.get();
}

/// Fills what draws depend on: the first one reads `random[1]`.
Status Model::Impl::startDraws(Decoder &decoder,
                               const SamplingOptions &options) {
  auto count = static_cast<size_t>(decoder.slots.dim(0));
  auto topK = static_cast<int32_t>(
      std::min<int64_t>(options.topK, std::numeric_limits<int32_t>::max()));
  std::vector<int64_t> random;
  for (size_t i = 0; i < count; ++i)
    random.insert(random.end(), {static_cast<int64_t>(options.seed),
                                 static_cast<int64_t>(i), 0});
  Status status =
      fill(decoder.draw.temperature,
           std::vector<float>(count, static_cast<float>(options.temperature)));
  if (status)
    status = fill(decoder.draw.topK, std::vector<int32_t>(count, topK));
  if (status)
    status = fill(decoder.draw.topP,
                  std::vector<float>(count, static_cast<float>(options.topP)));
  return status ? fill(decoder.random[1], random) : status;
}

/// Steps from the tokens in `ids[0]`, `steps` times, until `take` returns false
/// for the tokens that the device drew in a step. Unless the states must be
/// `exact`, a step may already be under way when it does.
Status
Model::Impl::decodeSteps(Decoder &decoder, int64_t steps, bool exact,
                         const std::function<bool(const int32_t *)> &take) {
  const std::vector<Tensor> &pools = decoder.states->pools;
  // From each of the two buffers of tokens to the other.
  std::vector<Tensor> inputs[2], outputs[2];
  for (int way : {0, 1}) {
    inputs[way] = decoder.draw.with(decoder.random[way]);
    inputs[way].insert(inputs[way].begin(), {decoder.ids[way], decoder.slots});
    outputs[way] = {decoder.logits, decoder.ids[1 - way],
                    decoder.random[1 - way]};
    inputs[way].insert(inputs[way].end(), pools.begin(), pools.end());
    outputs[way].insert(outputs[way].end(), pools.begin(), pools.end());
  }
  if (device.kind == Device::CPU) {
    for (int64_t step = 0; step < steps; ++step) {
      int64_t way = step % 2;
      if (Status status = executable->run("decode", inputs[way], outputs[way]);
          !status)
        return status;
      if (!take(decoder.ids[1 - way].dataAs<int32_t>()))
        break;
    }
    return Status::ok();
  }
  std::shared_ptr<cuda::Device> gpu = *cuda::Device::get(device.index);
  void *stream = decoder.stream.handle();
  size_t bytes = static_cast<size_t>(decoder.slots.numBytes());
  auto *tokens = static_cast<int32_t *>(decoder.tokens.data());
  cuda::Event events[2];
  for (cuda::Event &event : events) {
    Expected<cuda::Event> made = cuda::Event::create(gpu);
    if (!made)
      return made.takeStatus();
    event = std::move(*made);
  }
  auto launch = [&](int64_t step) -> Status {
    int way = static_cast<int>(step % 2);
    if (!decoder.runs[way]) {
      // Kernels are loaded when they first run, which a capture does not.
      if (Status status =
              executable->run("decode", inputs[way], outputs[way], stream);
          !status)
        return status;
      // The step has been taken: the graph is for the next time.
      Expected<std::shared_ptr<CapturedRun>> captured =
          executable->capture("decode", inputs[way], outputs[way]);
      if (!captured)
        return captured.takeStatus();
      decoder.runs[way] = *captured;
    } else if (Status status = decoder.runs[way]->launch(stream); !status) {
      return status;
    }
    if (Status status =
            gpu->copyToHost(tokens + way * decoder.slots.dim(0),
                            decoder.ids[1 - way].data(), bytes, stream);
        !status)
      return status;
    return events[way].record(stream);
  };
  int64_t launched = 0;
  for (int64_t step = 0; step < steps; ++step) {
    int64_t ahead = std::min(steps, step + (exact ? 1 : 2));
    for (; launched < ahead; ++launched)
      if (Status status = launch(launched); !status)
        return status;
    if (Status status = events[step % 2].synchronize(); !status)
      return status;
    if (!take(tokens + (step % 2) * decoder.slots.dim(0)))
      break;
  }
  return decoder.stream.synchronize();
}

Expected<Generation> Model::generate(const TokenSequences &prompts,
                                     const GenerateOptions &options,
                                     StateCache *given) {
  if (options.maxTokens < 0)
    return Status::invalidArgument("max_tokens: expected at least 0, got " +
                                   std::to_string(options.maxTokens));
  if (Status status = options.sampling.check(); !status)
    return status;
  auto start = std::chrono::steady_clock::now();
  auto lap = [&] {
    auto now = std::chrono::steady_clock::now();
    double ms = std::chrono::duration<double, std::milli>(now - start).count();
    start = now;
    return ms;
  };
  size_t count = prompts.size();
  StateCache &states = given ? *given : impl->ownStates;
  if (!given) {
    if (count && states.size() == static_cast<int64_t>(count)) {
      if (Status status = states.clear(); !status)
        return status;
    } else if (count) {
      Expected<StateCache> made = makeStates(static_cast<int64_t>(count));
      if (!made)
        return made.takeStatus();
      states = std::move(*made);
    }
  }
  CapturedRun::Launches before = impl->launches;
  Expected<Tensor> logits = prefill(prompts, states, {}, options.onProgress);
  if (!logits)
    return logits.takeStatus();

  Generation result;
  result.prefillLaunches.all = impl->launches.all - before.all;
  result.prefillLaunches.observing =
      impl->launches.observing - before.observing;
  result.tokens.resize(count);
  for (const std::vector<int32_t> &prompt : prompts)
    result.promptTokens += static_cast<int64_t>(prompt.size());
  const std::vector<int32_t> &stops =
      options.stopTokens ? *options.stopTokens : impl->info.eosTokens;
  std::vector<bool> ended(count, options.maxTokens == 0);
  std::vector<int32_t> slots(count, -1);
  for (size_t i = 0; i < count; ++i)
    slots[i] = options.maxTokens ? static_cast<int32_t>(i) : -1;
  // Takes the tokens of a step; returns whether a sequence is left, and whether
  // one has ended.
  auto accept = [&](const int32_t *tokens, bool &changed) {
    bool left = false;
    changed = false;
    for (size_t i = 0; i < count; ++i) {
      if (ended[i])
        continue;
      result.tokens[i].push_back(tokens[i]);
      ++result.newTokens;
      ended[i] =
          std::find(stops.begin(), stops.end(), tokens[i]) != stops.end();
      if (options.onToken &&
          !options.onToken(static_cast<int64_t>(i), tokens[i]))
        ended[i] = true;
      ended[i] = ended[i] || static_cast<int64_t>(result.tokens[i].size()) >=
                                 options.maxTokens;
      if (ended[i]) {
        slots[i] = -1;
        changed = true;
      }
      left |= !ended[i];
    }
    return left;
  };
  bool left = false, changed = false;
  Impl::Decoder *decoder = nullptr;
  if (options.maxTokens > 0) {
    Expected<Impl::Decoder *> made =
        impl->getDecoder(states, static_cast<int64_t>(count));
    if (!made)
      return made.takeStatus();
    decoder = *made;
    if (Status status = impl->startDraws(*decoder, options.sampling); !status)
      return status;
    std::vector<Tensor> inputs = decoder->draw.with(decoder->random[1]);
    inputs.insert(inputs.begin(), *logits);
    std::vector<Tensor> outputs{decoder->ids[0], decoder->random[0]};
    if (Status status = impl->executable->run("sample", inputs, outputs);
        !status)
      return status;
    Expected<Tensor> first = decoder->ids[0].to(Device::cpu());
    if (!first)
      return first.takeStatus();
    left = accept(first->dataAs<int32_t>(), changed);
  }
  result.prefillMs = lap();
  if (left) {
    auto countTokens = [&] {
      for (int32_t slot : slots)
        if (slot >= 0)
          ++states.impl->tokens[static_cast<size_t>(slot)];
    };
    Status inner, status = Impl::fill(decoder->slots, slots);
    if (status)
      status = impl->decodeSteps(*decoder, options.maxTokens - 1,
                                 /*exact=*/given != nullptr,
                                 [&](const int32_t *tokens) {
                                   countTokens();
                                   left = accept(tokens, changed);
                                   if (left && changed)
                                     inner = Impl::fill(decoder->slots, slots);
                                   return left && inner.isOk();
                                 });
    if (!status)
      return status;
    if (!inner)
      return inner;
  }
  result.decodeMs = lap();
  return result;
}

//===----------------------------------------------------------------------===//
// Likelihoods
//===----------------------------------------------------------------------===//

/// Logits of so many elements are made at a time.
static constexpr int64_t kLogitsAtATime = int64_t(1) << 24;

Expected<std::vector<double>> Model::negativeLogLikelihoods(
    const std::vector<int32_t> &tokens, int64_t window, int64_t stride,
    const std::function<void(int64_t, int64_t)> &onProgress) {
  if (Status status = impl->checkTokens(tokens); !status)
    return status;
  if (tokens.size() < 2)
    return Status::invalidArgument("expected at least 2 tokens, got " +
                                   std::to_string(tokens.size()));
  if (window != 0 && (window < 2 || stride < 1 || stride >= window))
    return Status::invalidArgument(
        "expected a window of at least 2 tokens and a stride from 1 to the "
        "window less 1, got a window of " +
        std::to_string(window) + " and a stride of " + std::to_string(stride));
  int64_t size = static_cast<int64_t>(tokens.size()),
          vocabulary = impl->info.vocabSize;
  if (window == 0 || window > size) {
    window = size;
    stride = size;
  }
  Expected<StateCache> states = makeStates(1);
  if (!states)
    return states.takeStatus();
  int64_t piece = std::clamp<int64_t>(kLogitsAtATime / vocabulary, 1,
                                      impl->options.segment);
  std::vector<double> result;
  // The first token that has not been judged.
  int64_t judged = 1;
  for (int64_t begin = 0; judged < size; begin += stride) {
    int64_t end = std::min(begin + window, size);
    if (begin > 0)
      if (Status status = states->clear(); !status)
        return status;
    // Token t is judged from the logits of t - 1; those of the last are of no
    // use.
    for (int64_t at = begin; at < end - 1;) {
      int64_t stop = std::min(at + piece, end - 1);
      // Those before the first that is judged only fill the states.
      int64_t firstRow = std::max(at, judged - 1);
      if (firstRow >= stop) {
        stop = std::min({at + impl->options.segment, judged - 1, end - 1});
        firstRow = stop - 1;
      }
      Expected<Tensor> logits =
          impl->read(tokens.data() + at, stop - at, stop - firstRow, *states);
      if (!logits)
        return logits.takeStatus();
      if (stop > judged - 1) {
        Expected<Tensor> host = impl->device.kind == Device::CPU
                                    ? *logits
                                    : logits->to(Device::cpu());
        if (!host)
          return host.takeStatus();
        for (int64_t row = firstRow; row < stop; ++row) {
          const float *values =
              host->dataAs<float>() + (row - firstRow) * vocabulary;
          double largest = *std::max_element(values, values + vocabulary),
                 sum = 0;
          for (int64_t v = 0; v < vocabulary; ++v)
            sum += std::exp(static_cast<double>(values[v]) - largest);
          int32_t next = tokens[static_cast<size_t>(row + 1)];
          result.push_back(std::log(sum) + largest -
                           static_cast<double>(values[next]));
        }
        judged = stop + 1;
      }
      at = stop;
      if (onProgress)
        onProgress(judged, size);
    }
  }
  return result;
}
