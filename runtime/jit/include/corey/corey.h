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

/* `device` is "cpu", "cuda" or "cuda:<number>"; `threads` of 0 takes every processor. */
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
/* Runs a function on the caller's tensors; see corey::Executable::run. A pool of
 * states is updated in place where its input and its output are one tensor. */
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

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* COREY_COREY_H */
