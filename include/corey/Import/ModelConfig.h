//===- ModelConfig.h - Descriptions of language models ----------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
///
/// \file
/// What the `config.json` of a Hugging Face checkpoint says of a model of the
/// types `mamba`, `mamba2` and `falcon_mamba`.
///
//===----------------------------------------------------------------------===//

#ifndef COREY_IMPORT_MODELCONFIG_H
#define COREY_IMPORT_MODELCONFIG_H

#include "corey/Status.h"
#include "llvm/ADT/ArrayRef.h"
#include "llvm/ADT/StringRef.h"
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

namespace corey::import {

enum class ModelType { Mamba, Mamba2, FalconMamba };

/// "mamba", "mamba2" or "falcon_mamba".
llvm::StringRef modelTypeName(ModelType type);

struct ModelConfig {
  ModelType type = ModelType::Mamba;
  int64_t hiddenSize = 0, numLayers = 0, vocabSize = 0;
  /// Channels of a mixer: of the convolution's x, the scan and the gate.
  int64_t intermediateSize = 0;
  int64_t stateSize = 0;
  /// Width of the convolution.
  int64_t convKernel = 0;
  /// Of Mamba and FalconMamba.
  int64_t timeStepRank = 0;
  /// Of Mamba2; the others have as many heads as channels, and one group.
  int64_t numHeads = 0, headDim = 1, numGroups = 1;
  /// Of the RMS norms; `mixerEps` of those of B, C and dt (FalconMamba).
  double eps = 1e-5, mixerEps = 1e-6;
  /// Limits of dt behind the softplus (Mamba2).
  double timeStepMin = 0, timeStepMax = std::numeric_limits<double>::infinity();
  /// Of a mixer's first and last projection, and of its convolution.
  bool useBias = false, useConvBias = true;
  /// Whether what the layers add up is f32, whatever the compute type is.
  bool residualInF32 = true;
  /// Whether the head is the table of the embeddings; nothing where the file
  /// leaves it to the tensors: it is one of its own if there is one.
  std::optional<bool> tiedEmbeddings;
  /// The checkpoint's chunk of the matrix form, or 0: a hint (Mamba2).
  int64_t chunkSize = 0;
  /// Tokens that begin and end a text and fill up a batch.
  std::optional<int64_t> bosTokenId, padTokenId;
  std::vector<int64_t> eosTokenIds;

  /// Channels of the convolution, and so of its state.
  int64_t convChannels() const {
    return type == ModelType::Mamba2
               ? intermediateSize + 2 * numGroups * stateSize
               : intermediateSize;
  }
};

/// Reads the text of a `config.json`; `file` stands for it in messages. Keys
/// that are unknown are passed over, those that are known to change what a
/// model computes are not. Errors, each naming the key: InvalidArgument for
/// text that is no such file, Unsupported for a model that COREY has no ops for
/// (attention layers, other activations, quantized weights).
Expected<ModelConfig> parseModelConfig(llvm::StringRef text,
                                       llvm::StringRef file = "config.json");

/// Takes the tokens that begin, end and fill up a text from the text of a
/// `generation_config.json`, which goes before the model's description where it
/// has them. Errors: InvalidArgument, naming the key.
Status readGenerationConfig(llvm::StringRef text, llvm::StringRef file,
                            ModelConfig &config);

/// The shapes of published models: "mamba-130m", "mamba-370m", "mamba-790m",
/// "mamba-1.4b", "mamba-2.8b", "mamba2-130m", "mamba2-370m", "mamba2-780m",
/// "mamba2-1.3b" and "mamba2-2.7b".
llvm::ArrayRef<llvm::StringLiteral> presetNames();
/// Errors: NotFound, with the names there are.
Expected<ModelConfig> presetConfig(llvm::StringRef name);

} // namespace corey::import

#endif // COREY_IMPORT_MODELCONFIG_H
