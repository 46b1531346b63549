/*===- corey.h - C API of COREY ----------------------------------*- C -*-===*\
|*
|* SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
|*
\*===----------------------------------------------------------------------===*/

#ifndef COREY_COREY_H
#define COREY_COREY_H

#include "corey/DLPack.h"
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Every function that can fail returns a status; corey_last_error() gives the
 * message of the last failure on the calling thread. Nothing aborts on a user's
 * mistake. Handles are destroyed by their destroy function; null is allowed
 * there, and nowhere else unless said so. */
typedef enum corey_status {
  COREY_OK = 0,
  COREY_INVALID_ARGUMENT,
  COREY_NOT_FOUND,
  COREY_IO_ERROR,
  COREY_COMPILE_ERROR,
  COREY_UNSUPPORTED,
  COREY_OUT_OF_MEMORY,
  COREY_INTERNAL,
  COREY_DEVICE_ERROR
} corey_status;

typedef enum corey_dtype {
  COREY_F64 = 0,
  COREY_F32,
  COREY_F16,
  COREY_BF16,
  COREY_F8E4M3FN,
  COREY_I64,
  COREY_I32,
  COREY_I16,
  COREY_I8,
  COREY_U8,
  COREY_BOOL
} corey_dtype;

typedef enum corey_device_kind {
  COREY_CPU = 0,
  COREY_CUDA = 1
} corey_device_kind;

/* A tensor the caller owns. `strides` are in elements and may be null for a
 * contiguous tensor; data must be aligned to the size of an element. */
typedef struct corey_tensor {
  void *data;
  corey_dtype dtype;
  corey_device_kind device_kind;
  int32_t device_index;
  int32_t rank;
  const int64_t *shape;
  const int64_t *strides;
} corey_tensor;

typedef struct corey_context corey_context;
typedef struct corey_executable corey_executable;

/* Null and zeros stand for the defaults: policy "measured", the host's vector
 * width, optimization level 2. `opt_level` counts if `has_opt_level` is not 0.
 */
typedef struct corey_compile_options {
  const char *policy;
  int32_t vector_bits;
  int32_t has_opt_level;
  int32_t opt_level;
} corey_compile_options;

/* "0.1.0 (0123456789ab)". */
const char *corey_version(void);
/* Of the last failed call on this thread; "" if there was none. */
const char *corey_last_error(void);

/* `device` is "cpu", "cuda" or "cuda:<number>"; `threads` of 0 takes every
 * processor. */
corey_status corey_context_create(const char *device, int32_t threads,
                                  corey_context **context);
void corey_context_destroy(corey_context *context);

/* Compiles MLIR text or bytecode. `name` stands for it in messages; `options`
 * may be null. The executable may outlive the context. */
corey_status corey_compile(corey_context *context, const char *source,
                           size_t size, const char *name,
                           const corey_compile_options *options,
                           corey_executable **executable);
corey_status corey_compile_file(corey_context *context, const char *path,
                                const corey_compile_options *options,
                                corey_executable **executable);
void corey_executable_destroy(corey_executable *executable);

/* Binds every weight to a tensor of a safetensors file. `prefix` replaces the
 * module's and may be null. */
corey_status corey_bind_weights(corey_executable *executable, const char *path,
                                const char *prefix);
/* Binds one weight by symbol. The memory must stay while the executable runs,
 * unless it is the host's and the program runs on a CUDA device: then it is
 * copied. */
corey_status corey_bind_weight(corey_executable *executable, const char *symbol,
                               const corey_tensor *tensor);

/* What there is to call. Names and shapes live as long as the executable;
 * dimensions of -1 are free. Null or 0 is returned for what does not exist. */
typedef struct corey_argument {
  const char *name;
  corey_dtype dtype;
  int32_t rank;
  const int64_t *shape;
} corey_argument;
size_t corey_num_functions(const corey_executable *executable);
const char *corey_function_name(const corey_executable *executable,
                                size_t index);
size_t corey_num_inputs(const corey_executable *executable,
                        const char *function);
size_t corey_num_outputs(const corey_executable *executable,
                         const char *function);
corey_status corey_get_input(const corey_executable *executable,
                             const char *function, size_t index,
                             corey_argument *argument);
corey_status corey_get_output(const corey_executable *executable,
                              const char *function, size_t index,
                              corey_argument *argument);

/* Shapes of the outputs for the given inputs, one after another in `sizes`,
 * which has room for `capacity` numbers. */
corey_status corey_output_shapes(corey_executable *executable,
                                 const char *function,
                                 const corey_tensor *inputs, size_t num_inputs,
                                 int64_t *sizes, size_t capacity);
/* Runs a function on the caller's tensors; see corey::Executable::run. A pool
 * of states is updated in place where its input and its output are one tensor.
 */
corey_status corey_run(corey_executable *executable, const char *function,
                       const corey_tensor *inputs, size_t num_inputs,
                       const corey_tensor *outputs, size_t num_outputs);
/* The same on a stream of the program's CUDA device, without waiting for it:
 * `stream` is a CUstream, 1 for the legacy default stream, or null as in
 * corey_run(). */
corey_status corey_run_on_stream(corey_executable *executable,
                                 const char *function,
                                 const corey_tensor *inputs, size_t num_inputs,
                                 const corey_tensor *outputs,
                                 size_t num_outputs, void *stream);
/* The same on DLPack tensors. Inputs stay the caller's; outputs are made and
 * become the caller's, to be released through their deleters. */
corey_status corey_run_dlpack(corey_executable *executable,
                              const char *function,
                              DLManagedTensor *const *inputs, size_t num_inputs,
                              DLManagedTensor **outputs, size_t num_outputs);
corey_status corey_run_dlpack_on_stream(corey_executable *executable,
                                        const char *function,
                                        DLManagedTensor *const *inputs,
                                        size_t num_inputs,
                                        DLManagedTensor **outputs,
                                        size_t num_outputs, void *stream);

/* Fixes the chunk of a site, in tokens; 0 gives it back to the policy. */
corey_status corey_set_chunk(corey_executable *executable, const char *site,
                             int64_t chunk);
/* Fixes the kernel of a site by name; "" gives it back to the policy. */
corey_status corey_set_variant(corey_executable *executable, const char *site,
                               const char *variant);
/* Gives a site, or every site if `site` is null, to another policy. */
corey_status corey_set_policy(corey_executable *executable, const char *site,
                              const char *policy);
/* `predicted_ms` is NaN where none was predicted. */
typedef struct corey_chunk {
  int64_t requested, batch, length, chunk;
  double predicted_ms;
  int32_t used_data;
} corey_chunk;
/* What the last call of a site used; zeros before the first. */
corey_status corey_get_chunk(const corey_executable *executable,
                             const char *site, corey_chunk *chunk);

/* Copies the explanation of an executable, NUL-terminated and cut to `size`
 * bytes, and returns the length of the whole. `text` may be null if size is 0.
 */
size_t corey_explain(const corey_executable *executable, char *text,
                     size_t size);

/*===--- Language models: see corey/Model.h
 * --------------------------------===*/

/* A model on a context's device, which it may outlive. Not thread-safe. */
typedef struct corey_model corey_model;
/* What a model knows of a number of sequences, each in a slot, in memory of
 * its own on the model's device. May outlive the model. */
typedef struct corey_states corey_states;

/* Null and zeros stand for the defaults. Types count if their `has_` is not 0:
 * COREY_F32, COREY_F16 or COREY_BF16. Nothing takes, for activations, f32 on
 * the CPU and the type of the checkpoint on a CUDA device, and for states f32.
 * `segment`: tokens of a sequence that are prefilled at a time, 8192 for 0. */
typedef struct corey_model_options {
  int32_t has_compute_type;
  corey_dtype compute_type;
  int32_t has_state_type;
  corey_dtype state_type;
  int64_t segment;
  corey_compile_options compile;
} corey_model_options;

/* Loads the folder of a Hugging Face checkpoint; `options` may be null.
 * COREY_NOT_FOUND and COREY_IO_ERROR for files, COREY_INVALID_ARGUMENT,
 * COREY_UNSUPPORTED and COREY_COMPILE_ERROR for what is in them. */
corey_status corey_model_load(corey_context *context, const char *folder,
                              const corey_model_options *options,
                              corey_model **model);
/* A model of a published shape, such as "mamba-370m", with random weights. */
corey_status corey_model_random(corey_context *context, const char *preset,
                                corey_dtype weight_type, uint64_t seed,
                                const corey_model_options *options,
                                corey_model **model);
void corey_model_destroy(corey_model *model);

/* Pointers live as long as the model. */
typedef struct corey_model_info {
  const char *type;
  int64_t num_layers, hidden_size, vocab_size;
  int64_t parameters, weight_bytes;
  corey_dtype compute_type;
  const int32_t *eos_tokens;
  size_t num_eos_tokens;
} corey_model_info;
corey_status corey_model_get_info(const corey_model *model,
                                  corey_model_info *info);
/* The model's program, for chunks, policies and explanations: a handle of its
 * own, to be destroyed. */
corey_status corey_model_get_executable(corey_model *model,
                                        corey_executable **executable);

/* Empty states of a number of sequences, at least 1. */
corey_status corey_states_create(corey_model *model, int64_t sequences,
                                 corey_states **states);
/* Those that corey_states_save() wrote, of the same model. */
corey_status corey_states_load(corey_model *model, const char *path,
                               corey_states **states);
corey_status corey_states_save(const corey_states *states, const char *path);
void corey_states_destroy(corey_states *states);
/* The number of slots, and bytes of one; 0 for null. */
int64_t corey_states_size(const corey_states *states);
int64_t corey_states_bytes_per_sequence(const corey_states *states);
/* Tokens that the sequence in a slot has had. */
corey_status corey_states_get_tokens(const corey_states *states, int64_t slot,
                                     int64_t *tokens);
corey_status corey_states_clone(const corey_states *states,
                                corey_states **copy);
/* New states whose slot i is a copy of slot `slots[i]`; a slot may be taken
 * several times. */
corey_status corey_states_select(const corey_states *states,
                                 const int64_t *slots, size_t num_slots,
                                 corey_states **copy);
/* Copies slot `from` of `source`, states of the same model, to slot `to`. */
corey_status corey_states_assign(corey_states *states, int64_t to,
                                 const corey_states *source, int64_t from);
/* Empties all slots; one. */
corey_status corey_states_clear(corey_states *states);
corey_status corey_states_clear_slot(corey_states *states, int64_t slot);

/* Called while long prompts are prefilled; null for nothing. */
typedef void (*corey_on_progress)(void *user_data, int64_t done, int64_t total);
/* Called for each token as soon as it is known; 0 ends the sequence. */
typedef int32_t (*corey_on_token)(void *user_data, int64_t sequence,
                                  int32_t token);

/* Where there are `num_sequences` sequences, their tokens are one after another
 * in `tokens`, `lengths[i]` of sequence i, at least 1. Sequence i is in slot
 * `slots[i]`, or in slot i if `slots` is null. `logits` is a tensor of the
 * caller's, f32, on the host or the model's device, that is written to, or null
 * for nothing. COREY_INVALID_ARGUMENT for tokens and slots out of range, and
 * for a tensor of another type or shape; the states are as they were then. */

/* Reads more tokens of sequences; `logits`, [num_sequences, vocab_size], are of
 * what follows the last of each. */
corey_status corey_model_prefill(corey_model *model, const int32_t *tokens,
                                 const int64_t *lengths, size_t num_sequences,
                                 corey_states *states, const int64_t *slots,
                                 const corey_tensor *logits,
                                 corey_on_progress on_progress,
                                 void *user_data);
/* Reads one more token of each sequence. */
corey_status corey_model_decode(corey_model *model, const int32_t *tokens,
                                size_t num_sequences, corey_states *states,
                                const int64_t *slots,
                                const corey_tensor *logits);
/* The logits, [count, vocab_size], after each of the last `count` tokens of a
 * text of its own. */
corey_status corey_model_logits(corey_model *model, const int32_t *tokens,
                                size_t num_tokens, int64_t count,
                                const corey_tensor *logits);

/* Null and zeros stand for the defaults: the most likely token, of all tokens,
 * until one that the checkpoint ends texts with. A `top_p` of 0 is one of 1.
 * `stop_tokens` count if `has_stop_tokens` is not 0. */
typedef struct corey_generate_options {
  double temperature;
  int64_t top_k;
  double top_p;
  uint64_t seed;
  int32_t has_stop_tokens;
  const int32_t *stop_tokens;
  size_t num_stop_tokens;
  corey_on_token on_token;
  corey_on_progress on_progress;
  void *user_data;
} corey_generate_options;
typedef struct corey_generation {
  int64_t prompt_tokens, new_tokens;
  double prefill_ms, decode_ms;
} corey_generation;
/* Continues prompts by up to `max_tokens` tokens each: those of sequence i are
 * written from `generated[i * max_tokens]` on, and their number to `counts[i]`.
 * Prompts continue what is in slots 0, 1, ... of `states`, which are those
 * after all but the newest token of each then. `options`, `states`,
 * `generated`, `counts` and `generation` may be null. */
corey_status corey_model_generate(corey_model *model, const int32_t *tokens,
                                  const int64_t *lengths, size_t num_sequences,
                                  int64_t max_tokens,
                                  const corey_generate_options *options,
                                  corey_states *states, int32_t *generated,
                                  int64_t *counts,
                                  corey_generation *generation);
/* -ln p(token t + 1 | tokens 0 to t), in nats, for every t but the last:
 * `num_tokens` - 1 numbers. `window` and `stride`: of how many tokens at most,
 * and how far one window is from the next; 0 and 0 for all of them. */
corey_status corey_model_negative_log_likelihoods(corey_model *model,
                                                  const int32_t *tokens,
                                                  size_t num_tokens,
                                                  int64_t window,
                                                  int64_t stride, double *nats);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* COREY_COREY_H */
