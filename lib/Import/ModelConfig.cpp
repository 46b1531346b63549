//===- ModelConfig.cpp - Descriptions of language models ------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Import/ModelConfig.h"
#include "llvm/ADT/STLExtras.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/Support/JSON.h"
#include "llvm/Support/raw_ostream.h"
#include <cmath>

using namespace corey;
using namespace corey::import;
namespace json = llvm::json;

llvm::StringRef import::modelTypeName(ModelType type) {
  switch (type) {
  case ModelType::Mamba:
    return "mamba";
  case ModelType::Mamba2:
    return "mamba2";
  case ModelType::FalconMamba:
    return "falcon_mamba";
  }
  llvm_unreachable("model type has three values");
}

//===----------------------------------------------------------------------===//
// Reading keys
//===----------------------------------------------------------------------===//

/// Python writes Infinity, -Infinity and NaN, which are not JSON, as numbers:
/// here they become strings.
static std::string quotePythonNumbers(llvm::StringRef text) {
  std::string result;
  result.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    if (text[i] == '"') {
      size_t end = i + 1;
      while (end < text.size() && text[end] != '"')
        end += text[end] == '\\' ? 2 : 1;
      end = std::min(end + 1, text.size());
      result += text.slice(i, end);
      i = end;
      continue;
    }
    bool quoted = false;
    for (llvm::StringRef word : {"-Infinity", "Infinity", "NaN"})
      if (text.substr(i).starts_with(word)) {
        result += ("\"" + word + "\"").str();
        i += word.size();
        quoted = true;
        break;
      }
    if (!quoted)
      result += text[i++];
  }
  return result;
}

/// A number, or the text that JSON writers have for one that JSON lacks.
static std::optional<double> toNumber(const json::Value &value) {
  if (auto number = value.getAsNumber())
    return *number;
  const json::Value *text = &value;
  if (const json::Object *object = value.getAsObject())
    if (text = object->get("__float__"); !text)
      return std::nullopt;
  std::optional<llvm::StringRef> word = text->getAsString();
  if (!word)
    return std::nullopt;
  if (word->equals_insensitive("infinity") || word->equals_insensitive("inf"))
    return std::numeric_limits<double>::infinity();
  if (word->equals_insensitive("-infinity") || word->equals_insensitive("-inf"))
    return -std::numeric_limits<double>::infinity();
  return std::nullopt;
}

/// A value as a message shows it: strings in single quotes, long ones cut.
static std::string describe(const json::Value &value) {
  if (auto text = value.getAsString())
    return "'" + text->substr(0, 80).str() + "'";
  std::string text;
  llvm::raw_string_ostream(text) << value;
  return text.size() > 80 ? text.substr(0, 80) + "..." : text;
}

namespace {
/// The keys of a file. The first error is kept, and what is read after it is of
/// no use.
class KeyReader {
public:
  KeyReader(const json::Object &object, llvm::StringRef file)
      : object(object), file(file) {}

  /// The value of a key; null counts as absent, as Python's None does.
  const json::Value *get(llvm::StringRef key) const {
    const json::Value *value = object.get(key);
    return value && value->kind() != json::Value::Null ? value : nullptr;
  }

  void fail(StatusCode code, llvm::StringRef key, const llvm::Twine &expected,
            const llvm::Twine &got) {
    if (status)
      status = Status(
          code,
          (file + ": " + key + ": expected " + expected + ", got ").str() +
              got.str());
  }
  void failValue(llvm::StringRef key, const llvm::Twine &expected,
                 StatusCode code = StatusCode::InvalidArgument) {
    const json::Value *value = get(key);
    fail(code, key, expected, value ? describe(*value) : "none");
  }

  int64_t integer(llvm::StringRef key, int64_t min, int64_t max,
                  std::optional<int64_t> absent = std::nullopt) {
    const json::Value *value = get(key);
    if (!value && absent)
      return *absent;
    std::optional<int64_t> number =
        value ? value->getAsInteger() : std::nullopt;
    if (number && *number >= min && *number <= max)
      return *number;
    failValue(key, "an integer from " + llvm::Twine(min) + " to " +
                       llvm::Twine(max));
    return min;
  }

  int64_t size(llvm::StringRef key,
               std::optional<int64_t> absent = std::nullopt) {
    // Products of two sizes are far from the limits of an int64_t.
    return integer(key, 1, int64_t(1) << 24, absent);
  }

  bool boolean(llvm::StringRef key, bool absent) {
    const json::Value *value = get(key);
    if (!value)
      return absent;
    if (auto boolean = value->getAsBoolean())
      return *boolean;
    failValue(key, "true or false");
    return absent;
  }

  /// The epsilon of a norm.
  double epsilon(llvm::StringRef key, double absent) {
    const json::Value *value = get(key);
    if (!value)
      return absent;
    auto number = value->getAsNumber();
    if (number && *number >= 0 && *number < 1)
      return *number;
    failValue(key, "a number from 0 to below 1");
    return absent;
  }

  std::optional<int64_t> token(llvm::StringRef key) {
    if (!get(key))
      return std::nullopt;
    return integer(key, std::numeric_limits<int32_t>::min(),
                   std::numeric_limits<int32_t>::max());
  }

  /// A key of a token or of a list of them.
  std::vector<int64_t> tokens(llvm::StringRef key) {
    const json::Value *value = get(key);
    const json::Array *list = value ? value->getAsArray() : nullptr;
    if (!list) {
      auto one = token(key);
      return one ? std::vector<int64_t>{*one} : std::vector<int64_t>();
    }
    std::vector<int64_t> ids;
    for (const json::Value &each : *list) {
      if (auto id = each.getAsInteger())
        ids.push_back(*id);
      else
        failValue(key, "an integer or a list of them");
    }
    return ids;
  }

  const json::Object &object;
  llvm::StringRef file;
  Status status;
};
} // namespace

/// Types of models whose layers are not all state-space layers.
static bool hasAttention(llvm::StringRef type) {
  return llvm::is_contained({"bamba", "jamba", "zamba", "zamba2", "nemotron_h",
                             "granitemoehybrid", "falcon_h1", "recurrent_gemma",
                             "plamo2", "samba", "hymba", "qwen3_next"},
                            type);
}

//===----------------------------------------------------------------------===//
// config.json
//===----------------------------------------------------------------------===//

static std::optional<ModelType> readType(KeyReader &keys) {
  if (!keys.get("model_type")) {
    // The library that the published weights were first made with has files of
    // the same name.
    for (llvm::StringRef key : {"ssm_cfg", "d_model", "n_layer"})
      if (keys.get(key)) {
        keys.fail(StatusCode::Unsupported, "model_type",
                  "mamba, mamba2 or falcon_mamba",
                  "none but '" + key +
                      "', a checkpoint of mamba_ssm; take the one converted "
                      "for transformers, such as state-spaces/mamba-130m-hf");
        return std::nullopt;
      }
  }
  const json::Value *value = keys.get("model_type");
  llvm::StringRef name;
  if (value)
    name = value->getAsString().value_or("");
  for (ModelType type :
       {ModelType::Mamba, ModelType::Mamba2, ModelType::FalconMamba})
    if (name == modelTypeName(type))
      return type;
  keys.fail(
      StatusCode::Unsupported, "model_type", "mamba, mamba2 or falcon_mamba",
      (value ? describe(*value) : "none") +
          (hasAttention(name) ? " (attention layers are not supported)" : ""));
  return std::nullopt;
}

/// Refuses values under which the model is another one.
static void checkMaths(KeyReader &keys) {
  for (llvm::StringRef key : {"hidden_act"})
    if (const json::Value *value = keys.get(key)) {
      auto name = value->getAsString();
      if (!name || (*name != "silu" && *name != "swish"))
        keys.failValue(key, "silu", StatusCode::Unsupported);
    }
  if (!keys.boolean("rms_norm", true))
    keys.failValue("rms_norm", "true", StatusCode::Unsupported);
  if (keys.get("quantization_config"))
    keys.fail(StatusCode::Unsupported, "quantization_config",
              "weights in f32, f16 or bf16", "quantized ones");
  for (llvm::StringRef key : {"attn_layer_idx", "attn_layer_indices"})
    if (const json::Value *value = keys.get(key)) {
      const json::Array *list = value->getAsArray();
      if (!list || !list->empty())
        keys.fail(StatusCode::Unsupported, key, "no layers",
                  describe(*value) + " (attention layers are not supported)");
    }
  if (const json::Value *value = keys.get("d_intermediate"))
    if (value->getAsInteger() != 0)
      keys.failValue("d_intermediate", "0 (there are no feed-forward layers)",
                     StatusCode::Unsupported);
}

static void readTimeStepLimit(KeyReader &keys, ModelConfig &config) {
  const json::Value *value = keys.get("time_step_limit");
  if (!value)
    return;
  const json::Array *list = value->getAsArray();
  std::optional<double> min, max;
  if (list && list->size() == 2) {
    min = toNumber((*list)[0]);
    max = toNumber((*list)[1]);
  }
  if (!min || !max || !(*min <= *max))
    return keys.failValue("time_step_limit",
                          "two numbers, the smaller one first");
  config.timeStepMin = *min;
  config.timeStepMax = *max;
}

static void readTokens(KeyReader &keys, ModelConfig &config) {
  if (keys.get("bos_token_id"))
    config.bosTokenId = keys.token("bos_token_id");
  if (keys.get("pad_token_id"))
    config.padTokenId = keys.token("pad_token_id");
  if (keys.get("eos_token_id"))
    config.eosTokenIds = keys.tokens("eos_token_id");
}

/// The object that is a whole file.
static Expected<json::Object> parseObject(llvm::StringRef text,
                                          llvm::StringRef file) {
  llvm::Expected<json::Value> parsed = json::parse(quotePythonNumbers(text));
  if (!parsed)
    return Status::invalidArgument(file.str() + ": expected JSON, got " +
                                   llvm::toString(parsed.takeError()));
  json::Object *object = parsed->getAsObject();
  if (!object)
    return Status::invalidArgument(file.str() + ": expected an object, got " +
                                   describe(*parsed));
  return std::move(*object);
}

Status import::readGenerationConfig(llvm::StringRef text, llvm::StringRef file,
                                    ModelConfig &config) {
  Expected<json::Object> object = parseObject(text, file);
  if (!object)
    return object.takeStatus();
  KeyReader keys(*object, file);
  readTokens(keys, config);
  return keys.status;
}

Expected<ModelConfig> import::parseModelConfig(llvm::StringRef text,
                                               llvm::StringRef file) {
  Expected<json::Object> object = parseObject(text, file);
  if (!object)
    return object.takeStatus();
  KeyReader keys(*object, file);
  ModelConfig config;
  std::optional<ModelType> type = readType(keys);
  if (!type)
    return keys.status;
  config.type = *type;
  checkMaths(keys);

  // Sizes are always written; what else is left out has transformers' default.
  config.hiddenSize = keys.size("hidden_size");
  config.numLayers = keys.size("num_hidden_layers");
  config.vocabSize =
      keys.integer("vocab_size", 1, std::numeric_limits<int32_t>::max());
  config.stateSize = keys.size("state_size");
  config.convKernel = keys.integer("conv_kernel", 2, 4, 4);
  config.eps = keys.epsilon("layer_norm_epsilon", config.eps);
  config.useBias = keys.boolean("use_bias", config.useBias);
  config.useConvBias = keys.boolean("use_conv_bias", config.useConvBias);
  config.residualInF32 = keys.boolean("residual_in_fp32", config.residualInF32);
  if (keys.get("tie_word_embeddings"))
    config.tiedEmbeddings = keys.boolean("tie_word_embeddings", true);

  double expand = 2;
  if (const json::Value *value = keys.get("expand")) {
    expand = value->getAsNumber().value_or(0);
    if (!(expand > 0 && expand <= 1024))
      keys.failValue("expand", "a number from above 0 to 1024");
  }
  int64_t expanded = static_cast<int64_t>(
      std::max(1.0, std::floor(expand * double(config.hiddenSize))));
  config.intermediateSize = keys.size("intermediate_size", expanded);

  if (config.type == ModelType::Mamba2) {
    if (config.intermediateSize != expanded)
      keys.failValue("intermediate_size",
                     llvm::Twine(expanded) + " (expand * hidden_size)");
    config.numHeads = keys.size("num_heads");
    config.headDim = keys.size("head_dim", 64);
    config.numGroups = keys.size("n_groups", 8);
    if (config.numHeads * config.headDim != expanded)
      keys.fail(StatusCode::InvalidArgument, "num_heads",
                "num_heads * head_dim to be expand * hidden_size = " +
                    llvm::Twine(expanded),
                llvm::Twine(config.numHeads) + " * " +
                    llvm::Twine(config.headDim));
    if (config.numHeads % config.numGroups)
      keys.failValue("n_groups", "a divisor of num_heads = " +
                                     llvm::Twine(config.numHeads));
    config.chunkSize = keys.size("chunk_size", 256);
    readTimeStepLimit(keys, config);
    // `norm_before_gate` stands in some files; transformers gates first
    // whatever it says.
  } else {
    const json::Value *rank = keys.get("time_step_rank");
    bool isAuto = !rank || rank->getAsString() == llvm::StringRef("auto");
    config.timeStepRank = isAuto ? llvm::divideCeil(config.hiddenSize, 16)
                                 : keys.size("time_step_rank");
    config.numHeads = config.intermediateSize;
    if (config.type == ModelType::FalconMamba)
      config.mixerEps = keys.epsilon("mixer_rms_eps", config.mixerEps);
  }

  readTokens(keys, config);
  if (!keys.status)
    return keys.status;
  return config;
}

//===----------------------------------------------------------------------===//
// Presets
//===----------------------------------------------------------------------===//

namespace {
struct PresetShape {
  int64_t hiddenSize, numLayers;
};
} // namespace

static constexpr llvm::StringLiteral kPresetNames[] = {
    "mamba-130m",  "mamba-370m",  "mamba-790m",  "mamba-1.4b",  "mamba-2.8b",
    "mamba2-130m", "mamba2-370m", "mamba2-780m", "mamba2-1.3b", "mamba2-2.7b"};
/// Of either type.
static constexpr PresetShape kPresetShapes[] = {
    {768, 24}, {1024, 48}, {1536, 48}, {2048, 48}, {2560, 64}};

llvm::ArrayRef<llvm::StringLiteral> import::presetNames() {
  return kPresetNames;
}

Expected<ModelConfig> import::presetConfig(llvm::StringRef name) {
  const llvm::StringLiteral *found = llvm::find(kPresetNames, name);
  if (found == std::end(kPresetNames))
    return Status::notFound("expected a model of " +
                            llvm::join(presetNames(), ", ") + ", got '" +
                            name.str() + "'");
  size_t index = found - std::begin(kPresetNames);
  PresetShape shape = kPresetShapes[index % std::size(kPresetShapes)];
  ModelConfig config;
  config.hiddenSize = shape.hiddenSize;
  config.numLayers = shape.numLayers;
  config.intermediateSize = 2 * config.hiddenSize;
  config.convKernel = 4;
  config.tiedEmbeddings = true;
  config.bosTokenId = config.padTokenId = 0;
  config.eosTokenIds = {0};
  if (index < std::size(kPresetShapes)) {
    config.type = ModelType::Mamba;
    config.vocabSize = 50280;
    config.stateSize = 16;
    config.timeStepRank = llvm::divideCeil(config.hiddenSize, 16);
    config.numHeads = config.intermediateSize;
  } else {
    config.type = ModelType::Mamba2;
    // The tokenizer's 50277, in multiples of 16.
    config.vocabSize = 50288;
    config.stateSize = 128;
    config.headDim = 64;
    config.numHeads = config.intermediateSize / config.headDim;
    config.chunkSize = 256;
  }
  return config;
}
