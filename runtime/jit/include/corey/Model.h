//===- Model.h - Language models: loading, states, generation ---*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
///
/// \file
/// A language model of state-space layers, from a Hugging Face folder: prompts
/// are prefilled, in segments where they are long, and text is generated token
/// by token. What a model knows of a text is its states, of a fixed size; they
/// are an object of their own, so that a prompt is prefilled once and continued
/// often.
///
//===----------------------------------------------------------------------===//

#ifndef COREY_MODEL_H
#define COREY_MODEL_H

#include "corey/Executable.h"
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace corey {

struct ModelOptions {
  /// Element type of activations between kernels: f32, f16 or bf16. Nothing
  /// takes f32 on the CPU, and on a CUDA device that of the checkpoint's
  /// embeddings. Arithmetic is f32 in any case.
  std::optional<DType> computeType;
  /// Element type of the scans' states: f32, f16 or bf16.
  DType stateType = DType::F32;
  /// Tokens of a sequence that are prefilled at a time: bounds the memory of a
  /// prompt of any length. At least 1.
  int64_t segment = 8192;
  CompileOptions compile;
};

struct ModelInfo {
  /// "mamba", "mamba2" or "falcon_mamba".
  std::string type;
  int64_t numLayers = 0, hiddenSize = 0, vocabSize = 0;
  /// Elements and bytes of the checkpoint's tensors.
  int64_t parameters = 0, weightBytes = 0;
  DType computeType = DType::F32;
  /// Tokens that end a text, as the checkpoint says.
  std::vector<int32_t> eosTokens;
};

/// The states of a number of sequences, each in a slot, on a model's device.
/// Copies share the memory; clone() does not.
class StateCache {
public:
  /// Number of slots.
  int64_t size() const;
  /// Tokens that the sequence in a slot has had; 0 is an empty one. `slot` must
  /// be in range.
  int64_t tokens(int64_t slot) const;
  /// Bytes of one sequence's states.
  int64_t bytesPerSequence() const;
  Expected<StateCache> clone() const;
  /// New states whose slot i is a copy of slot `slots[i]`; a slot may be taken
  /// several times. Errors: InvalidArgument for one out of range.
  Expected<StateCache> select(const std::vector<int64_t> &slots) const;
  /// Copies slot `from` of `source`, states of the same model, to slot `to`.
  Status assign(int64_t to, const StateCache &source, int64_t from);
  /// Empties a slot; all of them.
  Status clear(int64_t slot);
  Status clear();
  /// Writes the states to a safetensors file; Model::loadStates() reads it.
  Status save(const std::string &path) const;

private:
  friend class Model;
  struct Impl;
  std::shared_ptr<Impl> impl;
};

/// How the next token is chosen from logits: among all tokens, the `topK` most
/// likely ones if that is not 0, and of these the fewest whose probabilities
/// add up to `topP`, after division by the temperature. The largest logit, the
/// first of equal ones, for a temperature of 0. The device draws, as ssm.sample
/// says: a token depends on the logits, the seed, the number of its sequence in
/// the batch and that of the token, and on nothing else that is in the batch.
/// Equal logits give equal tokens on every device.
struct SamplingOptions {
  double temperature = 0;
  int64_t topK = 0;
  double topP = 1;
  uint64_t seed = 0;

  /// InvalidArgument, with the name of the field, for a temperature or top_k
  /// below 0, a top_p that is not above 0 and up to 1, and what is not finite.
  Status check() const;
};

struct GenerateOptions {
  /// Of each sequence, at least 0.
  int64_t maxTokens = 64;
  SamplingOptions sampling;
  /// A sequence ends with the first of these that comes up, which is its last
  /// token. Nothing takes the checkpoint's; an empty list has none.
  std::optional<std::vector<int32_t>> stopTokens;
  /// Called for each token as soon as it is known, in order; returning false
  /// ends the sequence.
  std::function<bool(int64_t sequence, int32_t token)> onToken;
  /// Called while a long prompt is prefilled, with tokens done and in all.
  std::function<void(int64_t done, int64_t total)> onProgress;
};

struct Generation {
  /// The new tokens of each sequence.
  std::vector<std::vector<int32_t>> tokens;
  int64_t promptTokens = 0, newTokens = 0;
  /// Milliseconds until the first token of every sequence was known, and of all
  /// that came after.
  double prefillMs = 0, decodeMs = 0;
  /// Of the prompts: launches of graphs, which only a CUDA device has, and only
  /// for a shape that came before.
  CapturedRun::Launches prefillLaunches;
};

using TokenSequences = std::vector<std::vector<int32_t>>;

/// A model on a context's device. Not thread-safe.
class Model {
public:
  /// Loads the folder of a checkpoint: `config.json`, and `model.safetensors`
  /// or the files that `model.safetensors.index.json` names. Errors: those of
  /// the files, each naming the file and key or tensor; CompileError.
  static Expected<std::shared_ptr<Model>>
  load(std::shared_ptr<Context> context, const std::string &folder,
       const ModelOptions &options = {});
  /// A model of a published shape ("mamba-370m", see corey-bench lm --help)
  /// with random weights of a type, for measurements.
  static Expected<std::shared_ptr<Model>>
  random(std::shared_ptr<Context> context, std::string_view preset,
         DType weightType, const ModelOptions &options = {}, uint64_t seed = 0);
  ~Model();

  const ModelInfo &info() const;
  Context &context() const;
  /// The program: @prefill, @decode and @sample (see
  /// corey/Import/BuildModel.h), for chunks, policies and explanations.
  Executable &executable() const;

  /// Empty states of a number of sequences, at least 1.
  Expected<StateCache> makeStates(int64_t sequences) const;
  /// Errors: those of the file, InvalidArgument for states of another model.
  Expected<StateCache> loadStates(const std::string &path) const;

  /// Reads more tokens of the sequences in the slots `slots` of `states`
  /// (slots 0, 1, ... if empty), any number but 0 of each, and returns the
  /// logits of what follows the last of each: [sequences, V] f32, on the
  /// model's device. Errors: InvalidArgument for no tokens, tokens out of
  /// range, and slots that are out of range or not different.
  Expected<Tensor>
  prefill(const TokenSequences &tokens, StateCache &states,
          const std::vector<int64_t> &slots = {},
          const std::function<void(int64_t, int64_t)> &onProgress = {});
  /// Reads one more token of each sequence: what prefill() does with one, with
  /// the kernels of single tokens.
  Expected<Tensor> decode(const std::vector<int32_t> &tokens,
                          StateCache &states,
                          const std::vector<int64_t> &slots = {});
  /// The logits after each of the last `count` of `tokens`, a text of its own:
  /// [count, V] f32, on the model's device. Errors: InvalidArgument for a count
  /// of less than 1 or more than there are tokens.
  Expected<Tensor> logits(const std::vector<int32_t> &tokens, int64_t count);
  /// Prefills prompts, none of them empty, and continues them. With `states`,
  /// prompts continue what is in slots 0, 1, ..., and the states are those
  /// after all but the newest token of each on return.
  Expected<Generation> generate(const TokenSequences &prompts,
                                const GenerateOptions &options = {},
                                StateCache *states = nullptr);
  /// -ln p(token t + 1 | tokens 0 to t) for every t but the last, in nats.
  /// With a `window`, of at least 2 tokens, no token is judged from more than
  /// window - 1 others: the text is read anew every `stride` tokens, 1 to
  /// window - 1, and each window judges those that the one before it did not.
  Expected<std::vector<double>> negativeLogLikelihoods(
      const std::vector<int32_t> &tokens, int64_t window = 0,
      int64_t stride = 0,
      const std::function<void(int64_t, int64_t)> &onProgress = {});

private:
  Model();
  struct Impl;
  std::unique_ptr<Impl> impl;
};

} // namespace corey

#endif // COREY_MODEL_H
