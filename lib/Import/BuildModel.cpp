//===- BuildModel.cpp - Language models as ssm modules --------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Import/BuildModel.h"
#include "corey/Dialect/SSM/IR/SSMOps.h"
#include "corey/Dialect/SSM/Transforms/Passes.h"
#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/IR/Diagnostics.h"
#include "mlir/IR/ImplicitLocOpBuilder.h"
#include "mlir/IR/Verifier.h"
#include "llvm/ADT/STLExtras.h"
#include "llvm/ADT/StringSet.h"
#include <algorithm>
#include <cmath>

using namespace mlir;
using namespace corey;
using namespace corey::import;
using namespace corey::ssm;

//===----------------------------------------------------------------------===//
// Tensors of a checkpoint
//===----------------------------------------------------------------------===//

static constexpr llvm::StringLiteral kEmbeddings = "backbone.embeddings.weight";
static constexpr llvm::StringLiteral kFinalNorm = "backbone.norm_f.weight";
static constexpr llvm::StringLiteral kHead = "lm_head.weight";

static std::string layerPrefix(int64_t layer) {
  return "backbone.layers." + std::to_string(layer) + ".";
}

/// A tensor as files have it.
namespace {
struct TensorSpec {
  std::string name;
  SmallVector<int64_t> shape;
};
} // namespace

/// Every tensor that a model reads, in the order of its layers.
static std::vector<TensorSpec> tensorsOf(const ModelConfig &config,
                                         bool ownHead) {
  int64_t hidden = config.hiddenSize, inner = config.intermediateSize;
  int64_t states = config.stateSize, channels = config.convChannels();
  bool isMamba2 = config.type == ModelType::Mamba2;
  // The gate, what the convolution takes, and dt of each head.
  int64_t projected = isMamba2 ? inner + channels + config.numHeads : 2 * inner;
  std::vector<TensorSpec> specs;
  specs.push_back({kEmbeddings.str(), {config.vocabSize, hidden}});
  for (int64_t layer = 0; layer < config.numLayers; ++layer) {
    std::string prefix = layerPrefix(layer), mixer = prefix + "mixer.";
    auto add = [&](StringRef name, ArrayRef<int64_t> shape) {
      specs.push_back({mixer + name.str(), llvm::to_vector(shape)});
    };
    specs.push_back({prefix + "norm.weight", {hidden}});
    add("in_proj.weight", {projected, hidden});
    if (config.useBias)
      add("in_proj.bias", {projected});
    add("conv1d.weight", {channels, 1, config.convKernel});
    if (config.useConvBias)
      add("conv1d.bias", {channels});
    if (isMamba2) {
      add("dt_bias", {config.numHeads});
      add("A_log", {config.numHeads});
      add("D", {config.numHeads});
      add("norm.weight", {inner});
    } else {
      add("x_proj.weight", {config.timeStepRank + 2 * states, inner});
      add("dt_proj.weight", {inner, config.timeStepRank});
      add("dt_proj.bias", {inner});
      add("A_log", {inner, states});
      add("D", {inner});
    }
    add("out_proj.weight", {hidden, inner});
    if (config.useBias)
      add("out_proj.bias", {hidden});
  }
  specs.push_back({kFinalNorm.str(), {hidden}});
  if (ownHead)
    specs.push_back({kHead.str(), {config.vocabSize, hidden}});
  return specs;
}

TensorIndex import::makeTensorIndex(const ModelConfig &config, DType dtype) {
  TensorIndex index;
  for (const TensorSpec &spec :
       tensorsOf(config, !config.tiedEmbeddings.value_or(true)))
    index[spec.name] = {
        dtype, std::vector<int64_t>(spec.shape.begin(), spec.shape.end())};
  return index;
}

static std::string shapeText(ArrayRef<int64_t> shape) {
  std::string text = "[";
  llvm::raw_string_ostream os(text);
  llvm::interleaveComma(shape, os);
  return text + "]";
}

/// A shape without its axes of size 1, which a binding does not look at.
static SmallVector<int64_t> squeeze(ArrayRef<int64_t> shape) {
  return llvm::to_vector(
      llvm::make_filter_range(shape, [](int64_t size) { return size != 1; }));
}

static FloatType toFloatType(DType dtype, MLIRContext *context) {
  switch (dtype) {
  case DType::F32:
    return Float32Type::get(context);
  case DType::F16:
    return Float16Type::get(context);
  case DType::BF16:
    return BFloat16Type::get(context);
  default:
    return {};
  }
}

//===----------------------------------------------------------------------===//
// Functions
//===----------------------------------------------------------------------===//

namespace {
enum class Entry { Prefill, PrefillPacked, Decode };

/// The body of one function. Weights are declared already.
class FunctionBuilder {
public:
  FunctionBuilder(const ModelConfig &config, const ImportOptions &options,
                  bool ownHead, ModuleOp module)
      : config(config), module(module), ownHead(ownHead),
        b(module.getLoc(), module.getContext()), f32(b.getF32Type()),
        compute(toFloatType(options.computeType, b.getContext())),
        state(toFloatType(options.stateType, b.getContext())),
        stream(config.residualInF32 ? f32 : compute) {}

  void build(Entry entry) {
    constexpr int64_t dynamic = ShapedType::kDynamic;
    batch = entry == Entry::PrefillPacked ? 1 : dynamic;
    length = entry == Entry::Decode ? 1 : dynamic;
    bool isDecode = entry == Entry::Decode;

    Signature s;
    s.addInput("ids", indices({batch, length}));
    size_t startsAt = entry == Entry::PrefillPacked
                          ? s.addInput("starts", indices({dynamic}))
                          : 0;
    size_t rowsAt = isDecode ? 0 : s.addInput("rows", indices({dynamic}));
    size_t slotsAt = s.addInput("slots", indices({dynamic}));
    size_t drawAt = isDecode ? addDrawInputs(s) : 0;
    size_t poolsAt = s.inputs.size();
    s.addResult("logits", logitsType());
    if (isDecode)
      addDrawResults(s);
    for (int64_t layer = 0; layer < config.numLayers; ++layer) {
      std::string number = std::to_string(layer);
      s.addInput("conv_state." + number, convPoolType());
      s.addInput("ssm_state." + number, statePoolType());
    }
    for (size_t i = poolsAt; i < s.inputs.size(); ++i)
      s.addResult(s.inputNames[i], s.inputs[i]);
    Block *block = beginFunction(nameOf(entry), s);
    starts =
        entry == Entry::PrefillPacked ? block->getArgument(startsAt) : Value();
    slots = block->getArgument(slotsAt);

    Value ids = block->getArgument(0);
    sizes = {tensor::getMixedSize(b, b.getLoc(), ids, 0),
             tensor::getMixedSize(b, b.getLoc(), ids, 1)};
    Value table = weight(kEmbeddings);
    Value hidden = cast(
        EmbeddingOp::create(
            b, activation({config.hiddenSize}, elementOf(table)), ids, table),
        stream);
    SmallVector<Value> returned;
    for (int64_t layer = 0; layer < config.numLayers; ++layer) {
      prefix = layerPrefix(layer);
      site = FlatSymbolRefAttr::get(
          b.getContext(), "layers." + std::to_string(layer) + ".scan");
      convPool = block->getArgument(poolsAt + 2 * layer);
      statePool = block->getArgument(poolsAt + 2 * layer + 1);
      Value normed =
          cast(norm(hidden, weight(prefix + "norm.weight")), compute);
      hidden = config.type == ModelType::Mamba2 ? mixer2(normed, hidden)
                                                : mixer(normed, hidden);
      returned.append({convPool, statePool});
    }

    // Only rows that are asked for take part in the head.
    Value rows = tensor::CollapseShapeOp::create(
        b,
        RankedTensorType::get({isDecode ? batch : dynamic, config.hiddenSize},
                              stream),
        hidden, ArrayRef<ReassociationIndices>{{0, 1}, {2}});
    if (!isDecode)
      rows = EmbeddingOp::create(
          b, RankedTensorType::get({dynamic, config.hiddenSize}, stream),
          block->getArgument(rowsAt), rows);
    Value last = cast(norm(rows, weight(kFinalNorm)), compute);
    Value logits =
        cast(project(last, weight(ownHead ? kHead : kEmbeddings)), f32);
    SmallVector<Value> outputs{logits};
    if (isDecode)
      draw(logits, block->getArguments().slice(drawAt, kDrawInputs), outputs);
    outputs.append(returned);
    func::ReturnOp::create(b, outputs);
  }

  /// @sample: what @decode does with the logits.
  void buildSample() {
    Signature s;
    s.addInput("logits", logitsType());
    addDrawInputs(s);
    addDrawResults(s);
    Block *block = beginFunction("sample", s);
    SmallVector<Value> outputs;
    draw(block->getArgument(0), block->getArguments().drop_front(), outputs);
    func::ReturnOp::create(b, outputs);
  }

private:
  static constexpr size_t kDrawInputs = 4;

  /// The arguments and results of a function, with their names.
  struct Signature {
    SmallVector<Type> inputs, results;
    SmallVector<std::string> inputNames, resultNames;

    size_t addInput(std::string name, Type type) {
      inputNames.push_back(std::move(name));
      inputs.push_back(type);
      return inputs.size() - 1;
    }
    void addResult(std::string name, Type type) {
      resultNames.push_back(std::move(name));
      results.push_back(type);
    }
  };

  Block *beginFunction(StringRef name, const Signature &s) {
    b.setInsertionPointToEnd(module.getBody());
    auto function =
        func::FuncOp::create(b, name, b.getFunctionType(s.inputs, s.results));
    for (auto [i, name] : llvm::enumerate(s.inputNames))
      function.setArgAttr(i, kNameAttr, b.getStringAttr(name));
    for (auto [i, name] : llvm::enumerate(s.resultNames))
      function.setResultAttr(i, kNameAttr, b.getStringAttr(name));
    Block *block = function.addEntryBlock();
    b.setInsertionPointToStart(block);
    return block;
  }

  /// What ssm.sample takes behind the logits; the number of the first.
  size_t addDrawInputs(Signature &s) {
    constexpr int64_t dynamic = ShapedType::kDynamic;
    auto reals = RankedTensorType::get({dynamic}, f32);
    size_t first = s.addInput("temperature", reals);
    s.addInput("top_k", indices({dynamic}));
    s.addInput("top_p", reals);
    s.addInput("random", randomType());
    return first;
  }
  void addDrawResults(Signature &s) {
    s.addResult("next", indices({ShapedType::kDynamic, 1}));
    s.addResult("next_random", randomType());
  }
  /// Appends the tokens that are drawn from logits, as the ids of @decode, and
  /// the random numbers after that.
  void draw(Value logits, ValueRange inputs, SmallVectorImpl<Value> &outputs) {
    constexpr int64_t dynamic = ShapedType::kDynamic;
    auto drawn = SampleOp::create(b, indices({dynamic}), randomType(), logits,
                                  inputs[0], inputs[1], inputs[2], inputs[3]);
    OpFoldResult rows = tensor::getMixedSize(b, b.getLoc(), logits, 0);
    outputs.push_back(tensor::ExpandShapeOp::create(
        b, indices({dynamic, 1}), drawn.getIds(),
        ArrayRef<ReassociationIndices>{{0, 1}},
        ArrayRef<OpFoldResult>{rows, b.getIndexAttr(1)}));
    outputs.push_back(drawn.getNextRandom());
  }

  static StringRef nameOf(Entry entry) {
    switch (entry) {
    case Entry::Prefill:
      return "prefill";
    case Entry::PrefillPacked:
      return "prefill_packed";
    case Entry::Decode:
      return "decode";
    }
    llvm_unreachable("there are three entries");
  }

  //===--------------------------------------------------------------------===//
  // Types and small ops
  //===--------------------------------------------------------------------===//

  RankedTensorType indices(ArrayRef<int64_t> shape) {
    return RankedTensorType::get(shape, b.getI32Type());
  }
  RankedTensorType logitsType() {
    return RankedTensorType::get({ShapedType::kDynamic, config.vocabSize}, f32);
  }
  RankedTensorType randomType() {
    return RankedTensorType::get({ShapedType::kDynamic, 3}, b.getI64Type());
  }
  RankedTensorType convPoolType() {
    return RankedTensorType::get(
        {ShapedType::kDynamic, config.convKernel - 1, config.convChannels()},
        compute);
  }
  RankedTensorType statePoolType() {
    SmallVector<int64_t> shape{ShapedType::kDynamic, config.numHeads};
    if (config.type == ModelType::Mamba2)
      shape.push_back(config.headDim);
    shape.push_back(config.stateSize);
    return RankedTensorType::get(shape, state);
  }
  /// [B, L, inner...]
  RankedTensorType activation(ArrayRef<int64_t> inner, Type element) {
    SmallVector<int64_t> shape{batch, length};
    shape.append(inner.begin(), inner.end());
    return RankedTensorType::get(shape, element);
  }

  Value weight(const llvm::Twine &name) {
    auto op = module.lookupSymbol<WeightOp>(name.str());
    return GetWeightOp::create(b, op.getType(), op.getSymName());
  }
  Value mixerWeight(StringRef name) { return weight(prefix + "mixer." + name); }
  Value mixerBias(StringRef name, bool present) {
    return present ? mixerWeight(name) : Value();
  }

  static Type elementOf(Value value) {
    return getElementTypeOrSelf(value.getType());
  }
  Value cast(Value value, Type element) {
    if (elementOf(value) == element)
      return value;
    return CastOp::create(
        b, llvm::cast<RankedTensorType>(value.getType()).clone(element), value);
  }
  Value norm(Value x, Value weight, double eps, Value gate = {},
             IntegerAttr groupSize = {}) {
    return RMSNormOp::create(b, x.getType(), /*residual_out=*/Type(), x, weight,
                             /*residual=*/Value(), gate, b.getF32FloatAttr(eps),
                             groupSize,
                             /*norm_before_gate=*/UnitAttr())
        .getY();
  }
  Value norm(Value x, Value weight) { return norm(x, weight, config.eps); }
  /// A matrix of another type than 16-bit activations is rounded to theirs,
  /// once: products of two types are not for tensor cores. Those of f32
  /// activations read narrower matrices as they are.
  Value project(Value x, Value weight, Value bias = {}, Value residual = {}) {
    if (!compute.isF32())
      weight = cast(weight, compute);
    auto type = llvm::cast<RankedTensorType>(x.getType());
    SmallVector<int64_t> shape(type.getShape());
    shape.back() = llvm::cast<RankedTensorType>(weight.getType()).getDimSize(0);
    Type element = residual ? elementOf(residual) : type.getElementType();
    return ProjectionOp::create(b, RankedTensorType::get(shape, element), x,
                                weight, bias, residual,
                                /*weight_scale=*/Value());
  }
  /// Channels [from, from + size) of [B, L, channels].
  Value slice(Value x, int64_t from, int64_t size) {
    SmallVector<OpFoldResult> offsets{b.getIndexAttr(0), b.getIndexAttr(0),
                                      b.getIndexAttr(from)};
    SmallVector<OpFoldResult> extents{sizes[0], sizes[1], b.getIndexAttr(size)};
    SmallVector<OpFoldResult> strides(3, b.getIndexAttr(1));
    return tensor::ExtractSliceOp::create(b, activation({size}, elementOf(x)),
                                          x, offsets, extents, strides);
  }
  /// [B, L, outer * inner] as [B, L, outer, inner].
  Value expand(Value x, int64_t outer, int64_t inner) {
    SmallVector<OpFoldResult> extents{sizes[0], sizes[1], b.getIndexAttr(outer),
                                      b.getIndexAttr(inner)};
    return tensor::ExpandShapeOp::create(
        b, activation({outer, inner}, elementOf(x)), x,
        ArrayRef<ReassociationIndices>{{0}, {1}, {2, 3}}, extents);
  }
  /// The decay rates, of A_log alone, in f32.
  Value decayRates() {
    Value exp = ExpOp::create(b, cast(mixerWeight("A_log"), f32));
    return NegOp::create(b, exp);
  }
  Value convolve(Value x) {
    auto conv = CausalConvOp::create(
        b, x.getType(), convPool.getType(), x, mixerWeight("conv1d.weight"),
        mixerBias("conv1d.bias", config.useConvBias), convPool, starts, slots,
        /*silu=*/true);
    convPool = conv.getFinalState();
    return conv.getY();
  }
  Value projectIn(Value x) {
    return project(x, mixerWeight("in_proj.weight"),
                   mixerBias("in_proj.bias", config.useBias));
  }
  Value projectOut(Value x, Value residual) {
    return project(x, mixerWeight("out_proj.weight"),
                   mixerBias("out_proj.bias", config.useBias), residual);
  }
  ChunkAttr chunk() { return ChunkAttr::get(site); }

  //===--------------------------------------------------------------------===//
  // Mixers
  //===--------------------------------------------------------------------===//

  /// B, C or the low-rank dt, which FalconMamba norms without a weight. `like`
  /// is a weight with rows of that size.
  Value select(Value selected, int64_t from, int64_t size, StringRef like) {
    Value part = slice(selected, from, size);
    if (config.type != ModelType::FalconMamba)
      return part;
    return norm(part, ones(size, weight(layerPrefix(0) + "mixer." + like)),
                config.mixerEps);
  }
  /// exp(0 w) of the first row of a weight: computed once, for all layers, and
  /// kept where the program runs, as a tensor constant is not.
  Value ones(int64_t size, Value matrix) {
    Value row = tensor::ExtractSliceOp::create(
        b, RankedTensorType::get({size}, elementOf(matrix)), matrix,
        ArrayRef<OpFoldResult>{b.getIndexAttr(0), b.getIndexAttr(0)},
        ArrayRef<OpFoldResult>{b.getIndexAttr(1), b.getIndexAttr(size)},
        ArrayRef<OpFoldResult>{b.getIndexAttr(1), b.getIndexAttr(1)});
    return ExpOp::create(
        b, ScaleOp::create(b, cast(row, f32), b.getF64FloatAttr(0)));
  }

  /// Of Mamba and FalconMamba.
  Value mixer(Value x, Value residual) {
    int64_t inner = config.intermediateSize, states = config.stateSize;
    int64_t rank = config.timeStepRank;
    Value both = projectIn(x);
    Value u = convolve(slice(both, 0, inner)), z = slice(both, inner, inner);
    Value selected = project(u, mixerWeight("x_proj.weight"));
    Value low = select(selected, 0, rank, "dt_proj.weight");
    Value B = select(selected, rank, states, "A_log");
    Value C = select(selected, rank + states, states, "A_log");
    Value delta = project(low, mixerWeight("dt_proj.weight"));
    auto scan = SelectiveScanOp::create(
        b, u.getType(), statePool.getType(), u, delta, decayRates(),
        expand(B, 1, states), expand(C, 1, states), mixerWeight("D"), z,
        mixerWeight("dt_proj.bias"), statePool, starts, /*chunk_size=*/Value(),
        slots, /*delta_softplus=*/true, chunk());
    statePool = scan.getLastState();
    return projectOut(scan.getY(), residual);
  }

  Value mixer2(Value x, Value residual) {
    int64_t inner = config.intermediateSize, states = config.stateSize;
    int64_t groups = config.numGroups, channels = config.convChannels();
    Value all = projectIn(x);
    Value gate = slice(all, 0, inner);
    Value dt = slice(all, inner + channels, config.numHeads);
    Value mixed = convolve(slice(all, inner, channels));
    Value heads =
        expand(slice(mixed, 0, inner), config.numHeads, config.headDim);
    Value B = expand(slice(mixed, inner, groups * states), groups, states);
    Value C = expand(slice(mixed, inner + groups * states, groups * states),
                     groups, states);
    // dt is positive, so that the usual limits are none.
    DenseF64ArrayAttr limit;
    if (config.timeStepMin > 0 || std::isfinite(config.timeStepMax)) {
      double largest = std::numeric_limits<float>::max();
      limit = b.getDenseF64ArrayAttr(
          {std::clamp(config.timeStepMin, -largest, largest),
           std::clamp(config.timeStepMax, -largest, largest)});
    }
    auto scan = SSDOp::create(
        b, heads.getType(), statePool.getType(), heads, dt, decayRates(), B, C,
        mixerWeight("D"), /*z=*/Value(), mixerWeight("dt_bias"), statePool,
        starts, /*decay=*/Value(), /*chunk_size=*/Value(), slots,
        /*dt_softplus=*/b.getUnitAttr(), limit,
        config.chunkSize ? b.getI64IntegerAttr(config.chunkSize) : nullptr,
        chunk());
    statePool = scan.getFinalStates();
    Value flat = tensor::CollapseShapeOp::create(
        b, activation({inner}, compute), scan.getY(),
        ArrayRef<ReassociationIndices>{{0}, {1}, {2, 3}});
    // Behind the gate, of each group by itself.
    Value gated = norm(flat, mixerWeight("norm.weight"), config.eps, gate,
                       groups > 1 ? b.getI64IntegerAttr(inner / groups)
                                  : IntegerAttr());
    return projectOut(gated, residual);
  }

  const ModelConfig &config;
  ModuleOp module;
  bool ownHead;
  ImplicitLocOpBuilder b;
  FloatType f32, compute, state;
  /// Of what the layers add up.
  FloatType stream;

  // Of the function that is being built.
  int64_t batch = 0, length = 0;
  SmallVector<OpFoldResult, 2> sizes;
  Value starts, slots;
  // Of the layer.
  std::string prefix;
  FlatSymbolRefAttr site;
  Value convPool, statePool;
};
} // namespace

//===----------------------------------------------------------------------===//
// The module
//===----------------------------------------------------------------------===//

/// Declares what the model reads; nothing else may be there.
static Status declareWeights(const ModelConfig &config,
                             const TensorIndex &tensors, bool ownHead,
                             ModuleOp module) {
  OpBuilder b = OpBuilder::atBlockEnd(module.getBody());
  llvm::StringSet<> used;
  for (const TensorSpec &spec : tensorsOf(config, ownHead)) {
    auto it = tensors.find(spec.name);
    if (it == tensors.end())
      return Status::notFound("expected tensor '" + spec.name + "' of shape " +
                              shapeText(spec.shape) + ", got none");
    const TensorInfo &info = it->second;
    if (squeeze(info.shape) != squeeze(spec.shape))
      return Status::invalidArgument(
          "tensor '" + spec.name + "': expected shape " +
          shapeText(spec.shape) + ", got " + shapeText(info.shape));
    Type element = toFloatType(info.dtype, module.getContext());
    if (!element)
      return Status::invalidArgument("tensor '" + spec.name +
                                     "': expected f32, f16 or bf16, got "
                                     "another type");
    // A depthwise convolution has one input channel per output channel.
    SmallVector<int64_t> shape = spec.shape;
    if (shape.size() == 3)
      shape.erase(shape.begin() + 1);
    WeightOp::create(b, module.getLoc(), b.getStringAttr(spec.name),
                     /*key=*/nullptr,
                     TypeAttr::get(RankedTensorType::get(shape, element)));
    used.insert(spec.name);
  }
  // Files of tied embeddings may hold them twice.
  if (!ownHead)
    used.insert(kHead);
  std::vector<StringRef> others;
  for (StringRef name : tensors.keys())
    if (!used.contains(name))
      others.push_back(name);
  if (!others.empty())
    return Status::invalidArgument(
        "tensor '" + llvm::min_element(others)->str() +
        "': expected none of that name in a " +
        modelTypeName(config.type).str() + " model of this config, got one");
  return Status::ok();
}

Expected<OwningOpRef<ModuleOp>>
import::buildModel(const ModelConfig &config, const TensorIndex &tensors,
                   MLIRContext *context, const ImportOptions &options) {
  context->loadDialect<arith::ArithDialect, func::FuncDialect, SSMDialect,
                       tensor::TensorDialect>();
  for (auto [name, dtype] :
       {std::pair<const char *, DType>{"compute type", options.computeType},
        {"state type", options.stateType}})
    if (!toFloatType(dtype, context))
      return Status::invalidArgument(std::string(name) +
                                     ": expected f32, f16 or bf16, got "
                                     "another type");
  OwningOpRef<ModuleOp> module = ModuleOp::create(UnknownLoc::get(context));
  bool ownHead =
      config.tiedEmbeddings ? !*config.tiedEmbeddings : tensors.contains(kHead);
  if (Status status = declareWeights(config, tensors, ownHead, *module);
      !status)
    return status;
  FunctionBuilder builder(config, options, ownHead, *module);
  if (options.prefill)
    builder.build(Entry::Prefill);
  if (options.prefillPacked)
    builder.build(Entry::PrefillPacked);
  if (options.decode)
    builder.build(Entry::Decode);
  if (options.sample)
    builder.buildSample();

  std::string message;
  ScopedDiagnosticHandler handler(context, [&](Diagnostic &diagnostic) {
    if (diagnostic.getSeverity() == DiagnosticSeverity::Error)
      message += (message.empty() ? "" : "\n") + diagnostic.str();
    return success();
  });
  if (failed(verify(*module)))
    return Status::unsupported(message);
  return module;
}
