/*===- CAPITest.c - The C API from C ------------------------------*- C -*-===*\
|*
|* SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
|*
\*===----------------------------------------------------------------------===*/

/* A C11 program: that it compiles is half of the test. Prints what failed and
 * returns 1, or `N passed, 0 failed`. */

#include "corey/corey.h"
#include <stdio.h>
#include <string.h>

static int passed, failed;

static void expect(int condition, const char *what) {
  if (condition) {
    ++passed;
    return;
  }
  ++failed;
  printf("FAIL: %s (last error: %s)\n", what, corey_last_error());
}
#define EXPECT(condition) expect(condition, #condition)

static const char kProgram[] =
    "func.func @main(%x: tensor<?x4xf32>, %v: tensor<4xf32>) -> "
    "tensor<?x4xf32> {\n"
    "  %y = ssm.mul %x, %v : tensor<?x4xf32>, tensor<4xf32>\n"
    "  return %y : tensor<?x4xf32>\n"
    "}\n"
    "func.func @scan(%u: tensor<?x?x3xf32>, %a: tensor<3x2xf32>, %b: "
    "tensor<?x?x1x2xf32>) -> tensor<?x?x3xf32> {\n"
    "  %y = ssm.selective_scan %u, %u, %a, %b, %b {chunk = #ssm.chunk<runtime "
    "= @site>} : tensor<?x?x3xf32>,\n"
    "      tensor<?x?x3xf32>, tensor<3x2xf32>, tensor<?x?x1x2xf32>, "
    "tensor<?x?x1x2xf32> -> tensor<?x?x3xf32>\n"
    "  return %y : tensor<?x?x3xf32>\n"
    "}\n";

static corey_tensor tensor(void *data, int32_t rank, const int64_t *shape) {
  corey_tensor t = {data, COREY_F32, COREY_CPU, 0, rank, shape, NULL};
  return t;
}

/* Files: a program and its weights, by prefix and one by one. */
static void testWeights(void) {
  static const char source[] =
      "ssm.weight @w \"w\" : tensor<2xf32>\n"
      "func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {\n"
      "  %w = ssm.get_weight @w : tensor<2xf32>\n"
      "  %y = ssm.mul %x, %w : tensor<2xf32>, tensor<2xf32>\n"
      "  return %y : tensor<2xf32>\n"
      "}\n";
  static const char header[] = "{\"layer.w\":{\"dtype\":\"F32\",\"shape\":[2],"
                               "\"data_offsets\":[0,8]}}";
  const uint64_t length = sizeof header - 1;
  float values[2] = {3, 5}, x[2] = {10, 100}, y[2];
  int64_t shape[1] = {2};
  FILE *file = fopen("capi-program.mlir", "wb");
  EXPECT(file && fwrite(source, sizeof source - 1, 1, file) == 1);
  EXPECT(file && fclose(file) == 0);
  file = fopen("capi-weights.safetensors", "wb");
  EXPECT(file && fwrite(&length, 8, 1, file) == 1 &&
         fwrite(header, length, 1, file) == 1 &&
         fwrite(values, sizeof values, 1, file) == 1);
  EXPECT(file && fclose(file) == 0);
  corey_context *context = NULL;
  corey_executable *program = NULL;
  EXPECT(corey_context_create("cpu", 1, &context) == COREY_OK);
  EXPECT(corey_compile_file(context, "capi-program.mlir", NULL, &program) ==
         COREY_OK);
  corey_context_destroy(context);
  if (!program)
    return;
  corey_tensor in = tensor(x, 1, shape), out = tensor(y, 1, shape);
  EXPECT(corey_run(program, "main", &in, 1, &out, 1) == COREY_INVALID_ARGUMENT);
  EXPECT(corey_bind_weights(program, "capi-weights.safetensors", NULL) ==
         COREY_NOT_FOUND);
  EXPECT(corey_bind_weights(program, "capi-weights.safetensors", "layer.") ==
         COREY_OK);
  EXPECT(corey_run(program, "main", &in, 1, &out, 1) == COREY_OK);
  EXPECT(y[0] == 30 && y[1] == 500);
  float other[2] = {-1, 2};
  corey_tensor weight = tensor(other, 1, shape);
  EXPECT(corey_bind_weight(program, "w", &weight) == COREY_OK);
  EXPECT(corey_run(program, "main", &in, 1, &out, 1) == COREY_OK);
  EXPECT(y[0] == -10 && y[1] == 200);
  weight.dtype = COREY_I32;
  EXPECT(corey_bind_weight(program, "w", &weight) == COREY_INVALID_ARGUMENT);
  corey_executable_destroy(program);
  remove("capi-program.mlir");
  remove("capi-weights.safetensors");
}

/* Callbacks count, and the second one ends sequence 1 with its second token. */
static int64_t progressCalls, tokenCalls, sequenceOne;
static void onProgress(void *data, int64_t done, int64_t total) {
  EXPECT(data == &progressCalls && done >= 1 && done <= total);
  ++progressCalls;
}
static int32_t onToken(void *data, int64_t sequence, int32_t token) {
  EXPECT(data == &progressCalls && token >= 0 && token < 256);
  ++tokenCalls;
  return sequence != 1 || ++sequenceOne < 2;
}

static int32_t largest(const float *logits) {
  int32_t best = 0;
  for (int32_t i = 1; i < 256; ++i)
    if (logits[i] > logits[best])
      best = i;
  return best;
}

/* What a model generates, by itself and step by step, in any slots. */
static void testModel(const char *folder, const char *type) {
  enum { kPrompts = 3, kTokens = 6, kVocabulary = 256 };
  static const int32_t tokens[] = {'T', 'h', 'e', ' ', 'a', 'I', 'n', ' '};
  static const int64_t lengths[kPrompts] = {4, 1, 3},
                       slots[kPrompts] = {2, 0, 3};
  corey_context *context = NULL;
  corey_model *model = NULL;
  corey_states *states = NULL, *copy = NULL, *loaded = NULL;
  progressCalls = tokenCalls = sequenceOne = 0;
  EXPECT(corey_context_create("cpu", 1, &context) == COREY_OK);
  EXPECT(corey_model_load(context, "no/such/folder", NULL, &model) ==
         COREY_NOT_FOUND);
  EXPECT(corey_model_load(NULL, folder, NULL, &model) ==
         COREY_INVALID_ARGUMENT);
  corey_model_options modelOptions;
  memset(&modelOptions, 0, sizeof modelOptions);
  modelOptions.has_compute_type = 1;
  modelOptions.compute_type = (corey_dtype)99;
  EXPECT(corey_model_load(context, folder, &modelOptions, &model) ==
         COREY_INVALID_ARGUMENT);
  EXPECT(strcmp(corey_last_error(), "compute_type: expected a dtype, got 99") ==
         0);
  modelOptions.compute_type = COREY_F32;
  modelOptions.segment = -1;
  EXPECT(corey_model_load(context, folder, &modelOptions, &model) ==
         COREY_INVALID_ARGUMENT);
  EXPECT(strcmp(corey_last_error(),
                "segment: expected at least 1 token, got -1") == 0);
  modelOptions.segment = 3;
  modelOptions.compile.policy = "static:2";
  EXPECT(corey_model_load(context, folder, &modelOptions, &model) == COREY_OK);
  corey_context_destroy(context);
  if (!model)
    return;

  corey_model_info info;
  EXPECT(corey_model_get_info(model, &info) == COREY_OK);
  EXPECT(strcmp(info.type, type) == 0 && info.vocab_size == kVocabulary &&
         info.num_layers > 0 && info.compute_type == COREY_F32 &&
         info.parameters > 0 && info.weight_bytes > 0);
  corey_executable *program = NULL;
  EXPECT(corey_model_get_executable(model, &program) == COREY_OK);
  EXPECT(corey_num_inputs(program, "sample") == 5);

  /* Greedy, with callbacks, into room of the caller's. */
  int32_t generated[kPrompts * kTokens];
  int64_t counts[kPrompts];
  corey_generation generation;
  corey_generate_options options;
  memset(&options, 0, sizeof options);
  options.has_stop_tokens = 1;
  memset(generated, 0x7f, sizeof generated);
  EXPECT(corey_model_generate(model, tokens, lengths, kPrompts, kTokens,
                              &options, NULL, generated, counts,
                              &generation) == COREY_OK);
  EXPECT(counts[0] == kTokens && counts[1] == kTokens && counts[2] == kTokens);
  EXPECT(generation.prompt_tokens == 8 &&
         generation.new_tokens == kPrompts * kTokens &&
         generation.prefill_ms > 0 && generation.decode_ms > 0);

  /* The same step by step, in other slots, behind a copy half way. */
  float logits[kPrompts * kVocabulary], again[kPrompts * kVocabulary];
  int64_t shape[2] = {kPrompts, kVocabulary};
  corey_tensor place = tensor(logits, 2, shape);
  EXPECT(corey_states_create(model, 0, &states) == COREY_INVALID_ARGUMENT);
  EXPECT(corey_states_create(model, 4, &states) == COREY_OK);
  EXPECT(corey_states_size(states) == 4 && corey_states_size(NULL) == 0 &&
         corey_states_bytes_per_sequence(states) > 0);
  EXPECT(corey_model_prefill(model, tokens, lengths, kPrompts, states, slots,
                             &place, onProgress, &progressCalls) == COREY_OK);
  EXPECT(progressCalls > 1);
  int32_t next[kPrompts];
  for (int step = 0; step < kTokens; ++step) {
    for (int i = 0; i < kPrompts; ++i) {
      next[i] = largest(logits + i * kVocabulary);
      EXPECT(next[i] == generated[i * kTokens + step]);
    }
    if (step == 2) {
      EXPECT(corey_states_clone(states, &copy) == COREY_OK);
      corey_states_destroy(states);
      states = copy;
    }
    EXPECT(corey_model_decode(model, next, kPrompts, states, slots, &place) ==
           COREY_OK);
  }
  int64_t count = 0;
  EXPECT(corey_states_get_tokens(states, 2, &count) == COREY_OK &&
         count == 4 + kTokens);
  EXPECT(corey_states_get_tokens(states, 1, &count) == COREY_OK && count == 0);
  EXPECT(corey_states_get_tokens(states, 4, &count) == COREY_INVALID_ARGUMENT);
  EXPECT(strcmp(corey_last_error(), "expected a slot from 0 to 3, got 4") == 0);

  /* Saved, loaded, selected, assigned: the same logits of one more token. */
  EXPECT(corey_model_decode(model, next, 1, states, &slots[2], NULL) ==
         COREY_OK);
  EXPECT(corey_states_save(states, "capi-states.safetensors") == COREY_OK);
  EXPECT(corey_states_load(model, "no/such/states", &loaded) ==
         COREY_NOT_FOUND);
  EXPECT(corey_states_load(model, "capi-states.safetensors", &loaded) ==
         COREY_OK);
  remove("capi-states.safetensors");
  EXPECT(corey_states_select(loaded, slots, kPrompts, &copy) == COREY_OK &&
         corey_states_size(copy) == kPrompts);
  EXPECT(corey_states_select(loaded, NULL, 0, &copy) == COREY_INVALID_ARGUMENT);
  EXPECT(corey_states_clear_slot(copy, 1) == COREY_OK);
  EXPECT(corey_states_get_tokens(copy, 1, &count) == COREY_OK && count == 0);
  EXPECT(corey_states_assign(copy, 1, states, slots[1]) == COREY_OK);
  EXPECT(corey_states_assign(copy, 3, states, 0) == COREY_INVALID_ARGUMENT);
  corey_tensor other = tensor(again, 2, shape);
  EXPECT(corey_model_decode(model, next, kPrompts, states, slots, &place) ==
         COREY_OK);
  EXPECT(corey_model_decode(model, next, kPrompts, copy, NULL, &other) ==
         COREY_OK);
  EXPECT(memcmp(logits, again, sizeof logits) == 0);

  /* Sampling: the same seed gives the same, whatever else there is. */
  int32_t drawn[kPrompts * kTokens], alone[kTokens];
  options.temperature = 2;
  options.top_k = 100;
  options.top_p = 0.99;
  options.seed = 5;
  EXPECT(corey_model_generate(model, tokens, lengths, kPrompts, kTokens,
                              &options, NULL, drawn, NULL, NULL) == COREY_OK);
  EXPECT(memcmp(drawn, generated, sizeof drawn) != 0);
  EXPECT(corey_model_generate(model, tokens, lengths, 1, kTokens, &options,
                              NULL, alone, NULL, NULL) == COREY_OK);
  EXPECT(memcmp(drawn, alone, sizeof alone) == 0);
  options.seed = 6;
  EXPECT(corey_model_generate(model, tokens, lengths, 1, kTokens, &options,
                              NULL, alone, NULL, NULL) == COREY_OK);
  EXPECT(memcmp(drawn, alone, sizeof alone) != 0);

  /* Ends: a token, and a callback. */
  memset(&options, 0, sizeof options);
  options.has_stop_tokens = 1;
  options.stop_tokens = generated;
  options.num_stop_tokens = 1;
  options.on_token = onToken;
  options.on_progress = onProgress;
  options.user_data = &progressCalls;
  EXPECT(corey_model_generate(model, tokens, lengths, 2, kTokens, &options,
                              NULL, NULL, counts, &generation) == COREY_OK);
  EXPECT(counts[0] == 1 && counts[1] <= 2 &&
         tokenCalls == counts[0] + counts[1]);
  /* With states, which are those behind all but the newest token. */
  EXPECT(corey_states_clear(copy) == COREY_OK);
  memset(&options, 0, sizeof options);
  options.has_stop_tokens = 1;
  EXPECT(corey_model_generate(model, tokens, lengths, 1, 2, &options, copy,
                              alone, NULL, NULL) == COREY_OK);
  EXPECT(memcmp(alone, generated, 2 * sizeof *alone) == 0);
  EXPECT(corey_states_get_tokens(copy, 0, &count) == COREY_OK && count == 5);

  /* Logits and likelihoods of a text. */
  shape[0] = 2;
  EXPECT(corey_model_logits(model, tokens, 4, 2, &place) == COREY_OK);
  EXPECT(largest(logits + kVocabulary) == generated[0]);
  double nats[3];
  EXPECT(corey_model_negative_log_likelihoods(model, tokens, 4, 0, 0, nats) ==
         COREY_OK);
  EXPECT(nats[0] > 0 && nats[1] > 0 && nats[2] > 0);

  /* Mistakes. */
  EXPECT(corey_model_logits(model, tokens, 4, 3, &place) ==
         COREY_INVALID_ARGUMENT);
  EXPECT(strncmp(corey_last_error(),
                 "logits: expected an f32 tensor of shape [3, 256], got ",
                 54) == 0);
  EXPECT(corey_model_logits(model, tokens, 4, 2, NULL) ==
         COREY_INVALID_ARGUMENT);
  static const int32_t beyond[] = {256};
  EXPECT(corey_model_decode(model, beyond, 1, states, NULL, NULL) ==
         COREY_INVALID_ARGUMENT);
  EXPECT(strcmp(corey_last_error(), "expected tokens from 0 to 255, got 256") ==
         0);
  static const int64_t negative[] = {-1}, same[] = {1, 1, 1};
  EXPECT(corey_model_prefill(model, tokens, negative, 1, states, NULL, NULL,
                             NULL, NULL) == COREY_INVALID_ARGUMENT);
  EXPECT(corey_model_prefill(model, tokens, lengths, kPrompts, states, same,
                             NULL, NULL, NULL) == COREY_INVALID_ARGUMENT);
  EXPECT(corey_model_prefill(model, tokens, NULL, 1, states, NULL, NULL, NULL,
                             NULL) == COREY_INVALID_ARGUMENT);
  options.temperature = -1;
  EXPECT(corey_model_generate(model, tokens, lengths, 1, kTokens, &options,
                              NULL, NULL, NULL,
                              NULL) == COREY_INVALID_ARGUMENT);
  EXPECT(strncmp(corey_last_error(), "temperature: ", 13) == 0);
  options.temperature = 1;
  options.num_stop_tokens = 1;
  EXPECT(corey_model_generate(model, tokens, lengths, 1, kTokens, &options,
                              NULL, NULL, NULL,
                              NULL) == COREY_INVALID_ARGUMENT);
  EXPECT(corey_model_generate(model, tokens, lengths, 1, -1, NULL, NULL, NULL,
                              NULL, NULL) == COREY_INVALID_ARGUMENT);

  /* The program may outlive the model; so may states. */
  corey_model_destroy(model);
  EXPECT(corey_num_functions(program) == 3);
  EXPECT(corey_states_clear(states) == COREY_OK);
  corey_executable_destroy(program);
  corey_states_destroy(states);
  corey_states_destroy(copy);
  corey_states_destroy(loaded);
  corey_states_destroy(NULL);
  corey_model_destroy(NULL);
}

int main(void) {
  corey_context *context = NULL;
  corey_executable *program = NULL;
  EXPECT(strlen(corey_version()) > 0);

  EXPECT(corey_context_create("tpu", 1, &context) == COREY_INVALID_ARGUMENT);
  EXPECT(strstr(corey_last_error(), "tpu") != NULL);
  EXPECT(corey_context_create("cpu", -1, &context) == COREY_INVALID_ARGUMENT);
  EXPECT(corey_context_create(NULL, 1, &context) == COREY_INVALID_ARGUMENT);
  EXPECT(corey_context_create("cpu", 1, &context) == COREY_OK);
  if (failed)
    return 1;

  EXPECT(corey_compile(context, "nonsense", 8, "x.mlir", NULL, &program) ==
         COREY_COMPILE_ERROR);
  EXPECT(strncmp(corey_last_error(), "x.mlir:1:1: ", 12) == 0);
  corey_compile_options options = {"later", 0, 0, 0};
  EXPECT(corey_compile(context, kProgram, sizeof kProgram - 1, NULL, &options,
                       &program) == COREY_INVALID_ARGUMENT);
  EXPECT(corey_compile_file(context, "no/such/file.mlir", NULL, &program) ==
         COREY_NOT_FOUND);
  options.policy = "static:2";
  EXPECT(corey_compile(context, kProgram, sizeof kProgram - 1, NULL, &options,
                       &program) == COREY_OK);
  /* The executable outlives its context. */
  corey_context_destroy(context);
  if (failed)
    return 1;

  EXPECT(corey_num_functions(program) == 2);
  EXPECT(strcmp(corey_function_name(program, 0), "main") == 0);
  EXPECT(corey_function_name(program, 2) == NULL);
  EXPECT(corey_num_inputs(program, "main") == 2 &&
         corey_num_outputs(program, "main") == 1);
  EXPECT(corey_num_inputs(program, "none") == 0);
  corey_argument argument;
  EXPECT(corey_get_input(program, "main", 0, &argument) == COREY_OK);
  EXPECT(strcmp(argument.name, "x") == 0 && argument.dtype == COREY_F32 &&
         argument.rank == 2 && argument.shape[0] == -1 &&
         argument.shape[1] == 4);
  EXPECT(corey_get_output(program, "main", 1, &argument) ==
         COREY_INVALID_ARGUMENT);

  char text[16];
  EXPECT(corey_get_output(program, "main", 0, &argument) == COREY_OK);
  EXPECT(strcmp(argument.name, "y") == 0 && argument.rank == 2);
  EXPECT(corey_get_input(program, "none", 0, &argument) ==
         COREY_INVALID_ARGUMENT);

  float x[8] = {1, 2, 3, 4, 5, 6, 7, 8}, v[4] = {1, 10, 100, -1}, y[8];
  int64_t xShape[2] = {2, 4}, vShape[1] = {4}, sizes[2];
  corey_tensor inputs[2] = {tensor(x, 2, xShape), tensor(v, 1, vShape)},
               output = tensor(y, 2, xShape);
  EXPECT(corey_output_shapes(program, "main", inputs, 2, sizes, 2) ==
             COREY_OK &&
         sizes[0] == 2 && sizes[1] == 4);
  EXPECT(corey_output_shapes(program, "main", inputs, 2, sizes, 1) ==
         COREY_INVALID_ARGUMENT);
  memset(y, 0x7f, sizeof y);
  EXPECT(corey_run(program, "main", inputs, 2, &output, 1) == COREY_OK);
  for (int i = 0; i < 8; ++i)
    EXPECT(y[i] == x[i] * v[i % 4]);
  /* Strides: the rows the other way round. */
  int64_t reversed[2] = {-4, 1};
  corey_tensor flipped = inputs[0];
  flipped.data = x + 4;
  flipped.strides = reversed;
  corey_tensor flippedInputs[2] = {flipped, inputs[1]};
  EXPECT(corey_run(program, "main", flippedInputs, 2, &output, 1) == COREY_OK);
  EXPECT(y[0] == 5 && y[1] == 60 && y[4] == 1);
  EXPECT(corey_run(program, "main", inputs, 1, &output, 1) ==
         COREY_INVALID_ARGUMENT);
  EXPECT(strcmp(corey_last_error(), "@main: expected 2 inputs, got 1") == 0);
  EXPECT(corey_run(program, "none", inputs, 2, &output, 1) == COREY_NOT_FOUND);
  /* There are no streams on the CPU. */
  EXPECT(corey_run_on_stream(program, "main", inputs, 2, &output, 1, NULL) ==
         COREY_OK);
  EXPECT(corey_run_on_stream(program, "main", inputs, 2, &output, 1, text) ==
         COREY_INVALID_ARGUMENT);
  EXPECT(strcmp(corey_last_error(), "expected no stream on cpu, got one") == 0);
  output.dtype = COREY_F16;
  EXPECT(corey_run(program, "main", inputs, 2, &output, 1) ==
         COREY_INVALID_ARGUMENT);
  output.dtype = COREY_F32;
  output.data = x;
  EXPECT(corey_run(program, "main", inputs, 2, &output, 1) ==
         COREY_INVALID_ARGUMENT);
  EXPECT(strstr(corey_last_error(), "overlap") != NULL);

  /* DLPack: inputs stay ours, outputs become ours. */
  DLManagedTensor managed[2];
  memset(managed, 0, sizeof managed);
  for (int i = 0; i < 2; ++i) {
    managed[i].dl_tensor.data = inputs[i].data;
    managed[i].dl_tensor.device.device_type = kDLCPU;
    managed[i].dl_tensor.ndim = inputs[i].rank;
    managed[i].dl_tensor.dtype.code = kDLFloat;
    managed[i].dl_tensor.dtype.bits = 32;
    managed[i].dl_tensor.dtype.lanes = 1;
    managed[i].dl_tensor.shape = (int64_t *)inputs[i].shape;
  }
  DLManagedTensor *in[2] = {&managed[0], &managed[1]}, *out = NULL;
  EXPECT(corey_run_dlpack(program, "main", in, 2, &out, 1) == COREY_OK);
  if (out) {
    EXPECT(out->dl_tensor.ndim == 2 && out->dl_tensor.shape[0] == 2);
    EXPECT(((float *)out->dl_tensor.data)[1] == 20);
    out->deleter(out);
  }
  EXPECT(corey_run_dlpack_on_stream(program, "main", in, 2, &out, 1, text) ==
         COREY_INVALID_ARGUMENT);
  EXPECT(corey_run_dlpack(program, "main", in, 2, &out, 2) ==
         COREY_INVALID_ARGUMENT);

  /* Chunks. */
  float u[15] = {0}, a[6] = {-1, -1, -1, -1, -1, -1}, b[10], s[15];
  for (int i = 0; i < 10; ++i)
    b[i] = 1;
  u[0] = 1;
  int64_t uShape[3] = {1, 5, 3}, aShape[2] = {3, 2}, bShape[4] = {1, 5, 1, 2};
  corey_tensor scanIn[3] = {tensor(u, 3, uShape), tensor(a, 2, aShape),
                            tensor(b, 4, bShape)},
               scanOut = tensor(s, 3, uShape);
  corey_chunk chunk;
  EXPECT(corey_run(program, "scan", scanIn, 3, &scanOut, 1) == COREY_OK);
  EXPECT(s[0] == 2);
  EXPECT(corey_get_chunk(program, "site", &chunk) == COREY_OK &&
         chunk.chunk == 2 && chunk.length == 5 && chunk.batch == 1);
  EXPECT(corey_set_chunk(program, "site", 3) == COREY_OK);
  EXPECT(corey_run(program, "scan", scanIn, 3, &scanOut, 1) == COREY_OK);
  EXPECT(corey_get_chunk(program, "site", &chunk) == COREY_OK &&
         chunk.chunk == 3 && chunk.requested == 3);
  EXPECT(corey_set_chunk(program, "site", 0) == COREY_OK);
  EXPECT(corey_set_policy(program, "site", "static:4") == COREY_OK);
  EXPECT(corey_run(program, "scan", scanIn, 3, &scanOut, 1) == COREY_OK);
  EXPECT(corey_get_chunk(program, "site", &chunk) == COREY_OK &&
         chunk.chunk == 4 && chunk.requested == 0 && !chunk.used_data);
  EXPECT(corey_set_policy(program, NULL, "unsplit") == COREY_OK);
  EXPECT(corey_run(program, "scan", scanIn, 3, &scanOut, 1) == COREY_OK);
  EXPECT(corey_get_chunk(program, "site", &chunk) == COREY_OK &&
         chunk.chunk == 5);
  EXPECT(corey_set_policy(program, "site", "best") == COREY_INVALID_ARGUMENT);
  EXPECT(corey_set_policy(program, "nowhere", "unsplit") == COREY_NOT_FOUND);
  EXPECT(corey_get_chunk(program, "nowhere", &chunk) == COREY_NOT_FOUND);
  EXPECT(corey_set_chunk(program, "nowhere", 3) == COREY_NOT_FOUND);
  EXPECT(corey_set_chunk(program, "site", -3) == COREY_INVALID_ARGUMENT);
  /* The CPU has one kernel for a scan. */
  EXPECT(corey_set_variant(program, "site", "default") == COREY_OK);
  EXPECT(corey_set_variant(program, "site", "") == COREY_OK);
  EXPECT(corey_set_variant(program, "site", "warp") == COREY_NOT_FOUND);
  EXPECT(strcmp(corey_last_error(), "site 'site': expected a variant of "
                                    "default, got 'warp'") == 0);
  EXPECT(corey_set_variant(program, "nowhere", "default") == COREY_NOT_FOUND);
  EXPECT(corey_set_variant(program, "site", NULL) == COREY_INVALID_ARGUMENT);
  size_t length = corey_explain(program, text, sizeof text);
  EXPECT(length > sizeof text && strlen(text) == sizeof text - 1);
  EXPECT(corey_bind_weights(program, "no/such/file.safetensors", NULL) ==
         COREY_NOT_FOUND);
  EXPECT(corey_bind_weight(program, "w", &inputs[0]) == COREY_NOT_FOUND);

  EXPECT(corey_explain(program, NULL, 0) == length);

  corey_executable_destroy(program);
  corey_executable_destroy(NULL);
  corey_context_destroy(NULL);
  testWeights();
  testModel(COREY_TEST_INPUTS "/checkpoints/mamba1-tiny", "mamba");
  testModel(COREY_TEST_INPUTS "/checkpoints/mamba2-tiny", "mamba2");
  printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}
