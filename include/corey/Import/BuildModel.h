//===- BuildModel.h - Language models as ssm modules ------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
///
/// \file
/// Builds the `ssm` module of a language model from its description and the
/// names, types and shapes of its tensors. With V the vocabulary, W the width
/// of the convolution and channels C of it, D channels of a mixer, N states (or
/// H heads of P channels and N states), T the compute type and R the number of
/// slots of the pools of states, any R:
///
///     @prefill(ids: [B, L] i32, rows: [M] i32, slots: [B] i32, pools)
///         -> (logits: [M, V] f32, pools)
///     @prefill_packed(ids: [1, L] i32, starts: [S] i32, rows: [M] i32,
///                     slots: [S] i32, pools) -> (logits: [M, V] f32, pools)
///     @decode(ids: [B, 1] i32, slots: [B] i32, draw, pools)
///         -> (logits: [B, V] f32, next: [B, 1] i32,
///             next_random: [B, 3] i64, pools)
///     @sample(logits: [B, V] f32, draw)
///         -> (next: [B, 1] i32, next_random: [B, 3] i64)
///
/// `pools` are, for each layer, `conv_state.<layer>` [R, W-1, C] of T and
/// `ssm_state.<layer>` [R, D, N], or [R, H, P, N], of the state type. Results
/// have the names of the arguments that they update; each may be given the
/// memory of its argument (see Executable::run()). Sequences begin with the
/// states in their slots, zeros at the start of a text, and leave theirs there,
/// so that a prompt can come in several calls. A negative slot is padding.
/// `rows` says which tokens' logits are wanted: b * L + t for token t of
/// sequence b. `draw` are temperature: [B] f32, top_k: [B] i32, top_p: [B] f32
/// and random: [B, 3] i64, as ssm.sample takes them, and `next` is what it
/// draws from the logits.
///
/// Weights are declared under the names of their tensors, with their types.
/// Every layer has a chunk site `layers.<layer>.scan`.
///
//===----------------------------------------------------------------------===//

#ifndef COREY_IMPORT_BUILDMODEL_H
#define COREY_IMPORT_BUILDMODEL_H

#include "corey/Import/ModelConfig.h"
#include "corey/Tensor.h"
#include "mlir/IR/BuiltinOps.h"
#include "mlir/IR/OwningOpRef.h"
#include "llvm/ADT/StringMap.h"
#include <string>
#include <vector>

namespace corey::import {

/// A tensor of a checkpoint.
struct TensorInfo {
  DType dtype = DType::F32;
  std::vector<int64_t> shape;
};
/// The tensors of a checkpoint, by name.
using TensorIndex = llvm::StringMap<TensorInfo>;

/// The tensors that a checkpoint of the model has, as transformers writes it:
/// all of one type. There is a head of its own if `config.tiedEmbeddings` says
/// no.
TensorIndex makeTensorIndex(const ModelConfig &config, DType dtype);

struct ImportOptions {
  /// Element type of activations between kernels and of the convolutions'
  /// states: F32, F16 or BF16. Arithmetic is f32 in any case.
  DType computeType = DType::F32;
  /// Element type of the scans' states: F32, F16 or BF16.
  DType stateType = DType::F32;
  /// Which functions there are.
  bool prefill = true, prefillPacked = true, decode = true, sample = true;
};

/// Builds the module of a model. Errors, each naming the tensor or key:
/// NotFound for a tensor that the model needs and `tensors` lacks;
/// InvalidArgument for one of another shape, of a type that is none of the
/// three, or that the model has no use for, and for an option out of range;
/// Unsupported for sizes that the ops do not take.
Expected<mlir::OwningOpRef<mlir::ModuleOp>>
buildModel(const ModelConfig &config, const TensorIndex &tensors,
           mlir::MLIRContext *context, const ImportOptions &options = {});

} // namespace corey::import

#endif // COREY_IMPORT_BUILDMODEL_H
