//===- Checkpoint.h - Folders of pretrained models --------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_CHECKPOINT_H
#define COREY_CHECKPOINT_H

#include "corey/Import/BuildModel.h"
#include "corey/SafeTensors.h"
#include "corey/Status.h"
#include <string>
#include <string_view>
#include <vector>

namespace corey {

/// A folder as transformers writes it: `config.json`, perhaps
/// `generation_config.json`, and the tensors in `model.safetensors` or in the
/// files that `model.safetensors.index.json` names. Not among what libcorey.so
/// exports: this header needs MLIR's.
class Checkpoint {
public:
  /// Maps the files of a folder and reads its description. Tensors of one name
  /// in two files, or in another file than the index says, are refused. Errors:
  /// NotFound for a folder or file that is not there, IOError, and those of
  /// import::parseModelConfig(), import::readGenerationConfig() and
  /// SafeTensors::open().
  static Expected<Checkpoint> open(const std::string &folder);

  const import::ModelConfig &config() const { return description; }
  /// Name, type and shape of every tensor.
  const import::TensorIndex &tensors() const { return index; }
  const std::vector<SafeTensors> &files() const { return shards; }
  /// A tensor, in host memory: a view of its file. Errors: NotFound.
  Expected<Tensor> get(std::string_view name) const;

private:
  Checkpoint() = default;

  std::string folder;
  import::ModelConfig description;
  import::TensorIndex index;
  std::vector<SafeTensors> shards;
  /// The file of each tensor.
  llvm::StringMap<size_t> shardOf;
};

} // namespace corey

#endif // COREY_CHECKPOINT_H
