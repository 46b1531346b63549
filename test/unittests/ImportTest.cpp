//===- ImportTest.cpp - Checkpoints as programs ---------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// What is read of a config.json and refused in one; trained checkpoints, run
// on texts, against logits that transformers computes; and ways of running a
// text that must not matter: in segments, packed, by single tokens.
//
//===----------------------------------------------------------------------===//

#include "corey/Checkpoint.h"
#include "corey/Executable.h"
#include "mlir/IR/MLIRContext.h"
#include "llvm/Support/FileSystem.h"
#include "llvm/Support/raw_ostream.h"
#include "gtest/gtest.h"
#include <algorithm>
#include <cmath>
#include <map>

using namespace corey;
using import::ModelConfig;
using import::ModelType;

namespace {
template <class T> T take(Expected<T> value) {
  if (!value) {
    ADD_FAILURE() << value.status().toString();
    std::abort();
  }
  return *std::move(value);
}

//===----------------------------------------------------------------------===//
// config.json
//===----------------------------------------------------------------------===//

const std::string sizes =
    R"("hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, )"
    R"("state_size": 16)";

ModelConfig parse(const std::string &text) {
  return take(import::parseModelConfig(text));
}

std::string refusal(const std::string &text) {
  auto config = import::parseModelConfig(text);
  EXPECT_FALSE(config) << text;
  return config ? "" : config.status().toString();
}

std::string mamba(const std::string &more = "") {
  return R"({"model_type": "mamba", )" + sizes + more + "}";
}
std::string mamba2(const std::string &more = "") {
  return R"({"model_type": "mamba2", "num_heads": 2, "n_groups": 1, )" + sizes +
         more + "}";
}

TEST(ModelConfig, Defaults) {
  ModelConfig config = parse(mamba());
  EXPECT_EQ(config.type, ModelType::Mamba);
  EXPECT_EQ(config.intermediateSize, 128);
  EXPECT_EQ(config.convKernel, 4);
  EXPECT_EQ(config.timeStepRank, 4);
  EXPECT_EQ(config.numHeads, 128);
  EXPECT_EQ(config.numGroups, 1);
  EXPECT_EQ(config.eps, 1e-5);
  EXPECT_FALSE(config.useBias);
  EXPECT_TRUE(config.useConvBias);
  EXPECT_TRUE(config.residualInF32);
  EXPECT_FALSE(config.tiedEmbeddings.has_value());
  EXPECT_FALSE(config.bosTokenId.has_value());
  EXPECT_TRUE(config.eosTokenIds.empty());
  EXPECT_EQ(config.convChannels(), 128);

  config = parse(mamba2());
  EXPECT_EQ(config.type, ModelType::Mamba2);
  EXPECT_EQ(config.numHeads, 2);
  EXPECT_EQ(config.headDim, 64);
  EXPECT_EQ(config.chunkSize, 256);
  EXPECT_EQ(config.timeStepMin, 0);
  EXPECT_TRUE(std::isinf(config.timeStepMax));
  EXPECT_EQ(config.convChannels(), 128 + 2 * 16);

  config = parse(R"({"model_type": "falcon_mamba", )" + sizes + "}");
  EXPECT_EQ(config.type, ModelType::FalconMamba);
  EXPECT_EQ(config.mixerEps, 1e-6);
}

TEST(ModelConfig, Values) {
  // An intermediate size goes before what the hidden size expands to.
  ModelConfig config = parse(mamba(
      R"(, "intermediate_size": 96, "expand": 16, "time_step_rank": 7,
         "use_bias": true, "use_conv_bias": false, "residual_in_fp32": false,
         "layer_norm_epsilon": 1e-3, "conv_kernel": 2, "hidden_act": "silu",
         "tie_word_embeddings": false, "bos_token_id": 1, "pad_token_id": null,
         "eos_token_id": [2, 3], "anything": {"else": []}, "n_layer": 2,
         "d_model": 64, "ssm_cfg": {}, "rms_norm": true)"));
  EXPECT_EQ(config.intermediateSize, 96);
  EXPECT_EQ(config.timeStepRank, 7);
  EXPECT_TRUE(config.useBias);
  EXPECT_FALSE(config.useConvBias);
  EXPECT_FALSE(config.residualInF32);
  EXPECT_EQ(config.eps, 1e-3);
  EXPECT_EQ(config.convKernel, 2);
  EXPECT_EQ(config.tiedEmbeddings, std::optional<bool>(false));
  EXPECT_EQ(config.bosTokenId, std::optional<int64_t>(1));
  EXPECT_FALSE(config.padTokenId.has_value());
  EXPECT_EQ(config.eosTokenIds, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(parse(mamba(R"(, "expand": 1.5)")).intermediateSize, 96);
  EXPECT_EQ(parse(mamba(R"(, "time_step_rank": "auto")")).timeStepRank, 4);
  EXPECT_EQ(parse(mamba(R"(, "eos_token_id": 5)")).eosTokenIds,
            std::vector<int64_t>{5});
}

TEST(ModelConfig, GenerationConfig) {
  ModelConfig config =
      parse(mamba(R"(, "bos_token_id": 1, "eos_token_id": 2)"));
  EXPECT_TRUE(import::readGenerationConfig(
      R"({"eos_token_id": [3, 4], "pad_token_id": 5, "do_sample": false})",
      "generation_config.json", config));
  EXPECT_EQ(config.bosTokenId, std::optional<int64_t>(1));
  EXPECT_EQ(config.padTokenId, std::optional<int64_t>(5));
  EXPECT_EQ(config.eosTokenIds, (std::vector<int64_t>{3, 4}));
  EXPECT_EQ(import::readGenerationConfig(R"({"bos_token_id": "a"})",
                                         "generation_config.json", config)
                .message(),
            "generation_config.json: bos_token_id: expected an integer from "
            "-2147483648 to 2147483647, got 'a'");
}

TEST(ModelConfig, Infinities) {
  for (const char *infinity : {"Infinity", R"("inf")", R"("Infinity")",
                               R"({"__float__": "Infinity"})", "1e39"}) {
    ModelConfig config =
        parse(mamba2(std::string(R"(, "time_step_limit": [0.25, )") + infinity +
                     R"(], "a \" Infinity": "NaN, \\")"));
    EXPECT_EQ(config.timeStepMin, 0.25) << infinity;
    EXPECT_GE(config.timeStepMax, 1e39) << infinity;
  }
}

TEST(ModelConfig, Refusals) {
  EXPECT_EQ(refusal("{").substr(0, 42),
            "invalid argument: config.json: expected JS");
  EXPECT_EQ(refusal("[1]"),
            "invalid argument: config.json: expected an object, got [1]");
  EXPECT_EQ(refusal("{}"), "unsupported: config.json: model_type: expected "
                           "mamba, mamba2 or falcon_mamba, got none");
  EXPECT_EQ(refusal(R"({"model_type": "llama"})"),
            "unsupported: config.json: model_type: expected mamba, mamba2 or "
            "falcon_mamba, got 'llama'");
  for (std::string type : {"bamba", "jamba", "zamba", "zamba2", "nemotron_h",
                           "granitemoehybrid", "falcon_h1"})
    EXPECT_EQ(refusal(R"({"model_type": ")" + type + R"("})"),
              "unsupported: config.json: model_type: expected mamba, mamba2 or "
              "falcon_mamba, got '" +
                  type + "' (attention layers are not supported)");
  EXPECT_EQ(refusal(R"({"d_model": 768, "n_layer": 24, "ssm_cfg": {}})"),
            "unsupported: config.json: model_type: expected mamba, mamba2 or "
            "falcon_mamba, got none but 'ssm_cfg', a checkpoint of mamba_ssm; "
            "take the one converted for transformers, such as "
            "state-spaces/mamba-130m-hf");
  EXPECT_EQ(refusal(R"({"model_type": "mamba"})"),
            "invalid argument: config.json: hidden_size: expected an integer "
            "from 1 to 16777216, got none");
  const std::pair<const char *, const char *> others[] = {
      {R"("hidden_act": "gelu")",
       "unsupported: config.json: hidden_act: expected silu, got 'gelu'"},
      {R"("rms_norm": false)",
       "unsupported: config.json: rms_norm: expected true, got false"},
      {R"("quantization_config": {"bits": 4})",
       "unsupported: config.json: quantization_config: expected weights in "
       "f32, f16 or bf16, got quantized ones"},
      {R"("attn_layer_idx": [1])",
       "unsupported: config.json: attn_layer_idx: expected no layers, got [1] "
       "(attention layers are not supported)"},
      {R"("d_intermediate": 8)",
       "unsupported: config.json: d_intermediate: expected 0 (there are no "
       "feed-forward layers), got 8"},
      {R"("conv_kernel": 8)",
       "invalid argument: config.json: conv_kernel: expected an integer from 2 "
       "to 4, got 8"},
      {R"("use_bias": 1)",
       "invalid argument: config.json: use_bias: expected true or false, got "
       "1"},
      {R"("layer_norm_epsilon": "x")",
       "invalid argument: config.json: layer_norm_epsilon: expected a number "
       "from 0 to below 1, got 'x'"},
      {R"("expand": -1)",
       "invalid argument: config.json: expand: expected a number from above 0 "
       "to 1024, got -1"},
      {R"("eos_token_id": ["a"])",
       "invalid argument: config.json: eos_token_id: expected an integer or a "
       "list of them, got [\"a\"]"},
  };
  for (auto [key, message] : others)
    EXPECT_EQ(refusal(mamba(std::string(", ") + key)), message);
  const std::pair<const char *, const char *> ofMamba2[] = {
      {R"("expand": 4)",
       "invalid argument: config.json: num_heads: expected num_heads * "
       "head_dim to be expand * hidden_size = 256, got 2 * 64"},
      {R"("intermediate_size": 64)",
       "invalid argument: config.json: intermediate_size: expected 128 (expand "
       "* hidden_size), got 64"},
      {R"("time_step_limit": [1, 0.5])",
       "invalid argument: config.json: time_step_limit: expected two numbers, "
       "the smaller one first, got [1,0.5]"},
      {R"("time_step_limit": 3)",
       "invalid argument: config.json: time_step_limit: expected two numbers, "
       "the smaller one first, got 3"},
  };
  for (auto [key, message] : ofMamba2)
    EXPECT_EQ(refusal(mamba2(std::string(", ") + key)), message);
  EXPECT_EQ(refusal(R"({"model_type": "mamba2", "num_heads": 2, )"
                    R"("n_groups": 3, )" +
                    sizes + "}"),
            "invalid argument: config.json: n_groups: expected a divisor of "
            "num_heads = 2, got 3");
}

TEST(ModelConfig, Presets) {
  EXPECT_EQ(import::presetNames().size(), 10u);
  for (llvm::StringRef name : import::presetNames()) {
    ModelConfig config = take(import::presetConfig(name));
    // The names count parameters.
    double parameters = 0;
    for (auto &entry : import::makeTensorIndex(config, DType::F32)) {
      double size = 1;
      for (int64_t extent : entry.second.shape)
        size *= static_cast<double>(extent);
      parameters += size;
    }
    double named = 0;
    llvm::StringRef digits = name.split('-').second;
    double unit = digits.ends_with("b") ? 1e9 : 1e6;
    EXPECT_FALSE(digits.drop_back().getAsDouble(named));
    EXPECT_NEAR(parameters / (named * unit), 1, 0.05) << name.str();
  }
  EXPECT_EQ(
      import::presetConfig("mamba-7b").status().toString(),
      "not found: expected a model of mamba-130m, mamba-370m, mamba-790m, "
      "mamba-1.4b, mamba-2.8b, mamba2-130m, mamba2-370m, mamba2-780m, "
      "mamba2-1.3b, mamba2-2.7b, got 'mamba-7b'");
}

//===----------------------------------------------------------------------===//
// Building
//===----------------------------------------------------------------------===//

std::string buildRefusal(const ModelConfig &config,
                         const import::TensorIndex &tensors,
                         const import::ImportOptions &options = {}) {
  mlir::MLIRContext context(mlir::MLIRContext::Threading::DISABLED);
  auto module = import::buildModel(config, tensors, &context, options);
  EXPECT_FALSE(module);
  return module ? "" : module.status().toString();
}

TEST(BuildModel, Refusals) {
  ModelConfig config = parse(mamba());
  import::TensorIndex all = import::makeTensorIndex(config, DType::F16);

  import::TensorIndex tensors = all;
  tensors.erase("backbone.layers.1.mixer.dt_proj.bias");
  EXPECT_EQ(buildRefusal(config, tensors),
            "not found: expected tensor 'backbone.layers.1.mixer.dt_proj.bias' "
            "of shape [128], got none");
  tensors = all;
  tensors["backbone.norm_f.weight"].shape = {63};
  EXPECT_EQ(buildRefusal(config, tensors),
            "invalid argument: tensor 'backbone.norm_f.weight': expected shape "
            "[64], got [63]");
  tensors = all;
  tensors["backbone.norm_f.weight"].dtype = DType::I8;
  EXPECT_EQ(buildRefusal(config, tensors),
            "invalid argument: tensor 'backbone.norm_f.weight': expected f32, "
            "f16 or bf16, got another type");
  tensors = all;
  tensors["backbone.layers.0.self_attn.q_proj.weight"] = {DType::F16, {64, 64}};
  tensors["backbone.layers.0.mlp.weight"] = {DType::F16, {64, 64}};
  EXPECT_EQ(buildRefusal(config, tensors),
            "invalid argument: tensor 'backbone.layers.0.mlp.weight': expected "
            "none of that name in a mamba model of this config, got one");
  // A head of its own is wanted, and there is none.
  ModelConfig untied = config;
  untied.tiedEmbeddings = false;
  EXPECT_EQ(buildRefusal(untied, all),
            "not found: expected tensor 'lm_head.weight' of shape [100, 64], "
            "got none");
  import::ImportOptions options;
  options.computeType = DType::F64;
  EXPECT_EQ(buildRefusal(config, all, options),
            "invalid argument: compute type: expected f32, f16 or bf16, got "
            "another type");
}

//===----------------------------------------------------------------------===//
// Trained checkpoints
//===----------------------------------------------------------------------===//

using Row = std::vector<float>;

double relativeError(const Row &got, const double *want) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    error += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  return std::sqrt(error / norm);
}
double relativeError(const Row &got, const Row &want) {
  std::vector<double> wide(want.begin(), want.end());
  return relativeError(got, wide.data());
}

Tensor indices(const std::vector<int64_t> &shape, const std::vector<int> &ids) {
  Tensor tensor = take(Tensor::empty(DType::I32, shape));
  std::copy(ids.begin(), ids.end(), tensor.dataAs<int32_t>());
  return tensor;
}

/// A compiled checkpoint and its pools of states.
class Model {
public:
  Model(const std::string &name, const import::ImportOptions &options = {})
      : checkpoint(
            take(Checkpoint::open(COREY_TEST_INPUTS "/checkpoints/" + name))),
        golden(take(SafeTensors::open(COREY_TEST_INPUTS "/golden/models/" +
                                      name + ".safetensors"))) {
    mlir::MLIRContext mlirContext(mlir::MLIRContext::Threading::DISABLED);
    auto module = take(import::buildModel(
        checkpoint.config(), checkpoint.tensors(), &mlirContext, options));
    std::string text;
    llvm::raw_string_ostream(text) << *module;
    static std::shared_ptr<Context> context = take(Context::create({"cpu", 2}));
    program = take(context->compile(text));
    for (const ArgumentInfo &weight : program->weights()) {
      Status status =
          program->bindWeight(weight.name, take(checkpoint.get(weight.name)));
      EXPECT_TRUE(status.isOk()) << status.toString();
    }
  }

  /// Makes pools of `slots` slots, all zeros.
  void reset(int64_t slots) {
    pools.clear();
    for (const ArgumentInfo &input : program->functions().front().inputs)
      if (llvm::StringRef(input.name).contains("_state.")) {
        std::vector<int64_t> shape = input.shape;
        shape[0] = slots;
        pools.push_back(
            take(Tensor::empty(input.dtype, shape, /*ZeroInit=*/true)));
      }
  }

  /// Runs a function with the pools, which it updates in place. Gives the rows
  /// of logits.
  std::vector<Row> run(const std::string &function, std::vector<Tensor> inputs,
                       Tensor *next = nullptr) {
    const FunctionInfo &info = *program->findFunction(function);
    int64_t rows =
        function == "decode" ? inputs[0].dim(0) : inputs.end()[-2].dim(0);
    int64_t vocabulary = info.outputs[0].shape[1];
    std::vector<Tensor> outputs{
        take(Tensor::empty(DType::F32, {rows, vocabulary}))};
    if (function == "decode") {
      outputs.push_back(take(Tensor::empty(DType::I32, {rows, 1})));
      if (next)
        *next = outputs[1];
      outputs.push_back(take(Tensor::empty(DType::I64, {rows, 3})));
      // Of temperature 0: the most likely token.
      for (DType type : {DType::F32, DType::I32, DType::F32})
        inputs.push_back(take(Tensor::empty(type, {rows}, /*ZeroInit=*/true)));
      inputs.push_back(
          take(Tensor::empty(DType::I64, {rows, 3}, /*ZeroInit=*/true)));
    }
    size_t before = inputs.size();
    for (size_t i = 0; i < pools.size(); ++i) {
      EXPECT_EQ(info.outputs[outputs.size()].updatedInput, int(before + i));
      EXPECT_EQ(info.outputs[outputs.size()].name,
                info.inputs[before + i].name);
      inputs.push_back(pools[i]);
      outputs.push_back(pools[i]);
    }
    Status status = program->run(function, inputs, outputs);
    EXPECT_TRUE(status.isOk()) << status.toString();
    std::vector<Row> result;
    for (int64_t row = 0; row < rows; ++row) {
      const float *begin = outputs[0].dataAs<float>() + row * vocabulary;
      result.emplace_back(begin, begin + vocabulary);
    }
    return result;
  }

  /// The tokens of a text with reference results.
  std::vector<int> text(const std::string &key) {
    Tensor ids = take(golden.get(key + ".input_ids"));
    return {ids.dataAs<int32_t>(), ids.dataAs<int32_t>() + ids.numElements()};
  }
  Tensor expected(const std::string &key) { return take(golden.get(key)); }

  /// The logits after one sequence, in slot 0 of new pools.
  Row after(const std::vector<int> &ids) {
    reset(1);
    int length = ids.size();
    return run("prefill", {indices({1, length}, ids),
                           indices({1}, {length - 1}), indices({1}, {0})})[0];
  }

  Checkpoint checkpoint;
  SafeTensors golden;
  std::shared_ptr<Executable> program;
  std::vector<Tensor> pools;
};

class Checkpoints : public ::testing::TestWithParam<const char *> {
protected:
  /// In f32: compiled once.
  static Model &model() {
    static std::map<std::string, std::unique_ptr<Model>> models;
    std::unique_ptr<Model> &model = models[GetParam()];
    if (!model)
      model = std::make_unique<Model>(GetParam());
    return *model;
  }
};

const char *const texts[] = {"prose_512",  "code_512",      "logs_512",
                             "tables_512", "templated_512", "prose_997"};

TEST_P(Checkpoints, Logits) {
  for (const char *key : texts) {
    Row logits = model().after(model().text(key));
    double error = relativeError(
        logits, model()
                    .expected(std::string(key) + ".logits_last_f64")
                    .dataAs<double>());
    EXPECT_LE(error, 2e-6) << key;
  }
}

TEST_P(Checkpoints, Greedy) {
  Model &m = model();
  for (const char *key : texts) {
    Row logits = m.after(m.text(key));
    int id = std::max_element(logits.begin(), logits.end()) - logits.begin();
    Tensor expected = m.expected(std::string(key) + ".greedy64");
    Tensor next;
    for (int step = 0; step < 64; ++step) {
      ASSERT_EQ(id, expected.dataAs<int32_t>()[step]) << key << " " << step;
      m.run("decode", {indices({1, 1}, {id}), indices({1}, {0})}, &next);
      id = next.dataAs<int32_t>()[0];
    }
  }
}

TEST_P(Checkpoints, Segments) {
  Model &m = model();
  std::vector<int> ids = m.text("code_512");
  Row whole = m.after(ids);
  // A segment may be shorter than the convolution is wide.
  for (int cut : {1, 2, 100, 510}) {
    std::vector<int> first(ids.begin(), ids.begin() + cut);
    std::vector<int> second(ids.begin() + cut, ids.end());
    m.after(first);
    int length = second.size();
    Row logits =
        m.run("prefill", {indices({1, length}, second),
                          indices({1}, {length - 1}), indices({1}, {0})})[0];
    EXPECT_LE(relativeError(logits, whole), 2e-6) << cut;
  }
}

TEST_P(Checkpoints, SingleTokens) {
  Model &m = model();
  std::vector<int> ids = m.text("logs_512");
  Row whole = m.after(ids), logits;
  m.after({ids.begin(), ids.end() - 20});
  for (size_t i = ids.size() - 20; i < ids.size(); ++i)
    logits = m.run("decode", {indices({1, 1}, {ids[i]}), indices({1}, {0})})[0];
  EXPECT_LE(relativeError(logits, whole), 2e-6);
}

TEST_P(Checkpoints, PackedAndBatched) {
  Model &m = model();
  std::vector<int> ids = m.text("tables_512");
  const int lengths[] = {3, 200, 1, 77};
  std::vector<Row> alone;
  std::vector<int> packed, starts, rows;
  for (int length : lengths) {
    std::vector<int> part(ids.end() - length, ids.end());
    alone.push_back(m.after(part));
    starts.push_back(packed.size());
    packed.insert(packed.end(), part.begin(), part.end());
    rows.push_back(packed.size() - 1);
  }
  // Slots in no order; the states there go on.
  m.reset(7);
  int length = packed.size();
  std::vector<int> slots{5, 0, 6, 2};
  std::vector<Row> together = m.run(
      "prefill_packed", {indices({1, length}, packed), indices({4}, starts),
                         indices({4}, rows), indices({4}, slots)});
  for (int i = 0; i < 4; ++i)
    EXPECT_LE(relativeError(together[i], alone[i]), 2e-6) << i;

  // Four sequences of two more tokens, in another order, batched and alone.
  std::vector<int> order{2, 3, 0, 1}, more{40, 41, 42, 43, 44, 45, 46, 47};
  std::vector<int> reordered;
  for (int i : order)
    reordered.push_back(slots[i]);
  std::vector<Row> batched =
      m.run("prefill", {indices({4, 2}, more), indices({4}, {1, 3, 5, 7}),
                        indices({4}, reordered)});
  for (int i = 0; i < 4; ++i) {
    std::vector<int> part(ids.end() - lengths[order[i]], ids.end());
    part.push_back(more[2 * i]);
    part.push_back(more[2 * i + 1]);
    EXPECT_LE(relativeError(batched[i], m.after(part)), 2e-6) << i;
  }
}

TEST_P(Checkpoints, RowsOutOfRange) {
  Model &m = model();
  m.reset(1);
  std::vector<Tensor> outputs,
      inputs{indices({1, 3}, {1, 2, 3}), indices({1}, {3}), indices({1}, {0})};
  inputs.insert(inputs.end(), m.pools.begin(), m.pools.end());
  Status status = m.program->run("prefill", inputs, outputs);
  EXPECT_EQ(status.message(),
            "@prefill: expected ids of an embedding to be in [0, 3), got 3");
  // No tokens at all: there is no row to ask for.
  inputs[0] = indices({1, 0}, {});
  outputs.clear();
  status = m.program->run("prefill", inputs, outputs);
  EXPECT_EQ(status.message(),
            "@prefill: expected ids of an embedding to be in [0, 0), got 3");
}

/// 16 bits between kernels cost what they have to.
TEST_P(Checkpoints, HalfPrecision) {
  for (auto [type, bound] :
       {std::pair(DType::BF16, 1e-2), {DType::F16, 1e-3}}) {
    import::ImportOptions options;
    options.computeType = type;
    options.prefillPacked = options.decode = options.sample = false;
    Model half(GetParam(), options);
    EXPECT_EQ(half.program->functions().size(), 1u);
    for (const char *key : {"prose_512", "tables_512"}) {
      Row logits = half.after(half.text(key));
      double error = relativeError(
          logits, half.expected(std::string(key) + ".logits_last_f64")
                      .dataAs<double>());
      EXPECT_LE(error, bound) << dtypeName(type) << " " << key;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Tiny, Checkpoints,
                         ::testing::Values("mamba1-tiny", "mamba2-tiny"));
} // namespace
