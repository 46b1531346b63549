/*===- CUDACAPITest.c - The C API on CUDA, on a fake driver -------*- C -*-===*\
|*
|* SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
|*
\*===----------------------------------------------------------------------===*/

/* Prints what failed and returns 1, or `N passed, 0 failed`. Device memory is
 * the host's, and kernels are launched but compute nothing. */

#include "corey/corey.h"
#include <stdio.h>
#include <string.h>

/* Of the fake driver: the part of the driver's API that callers need, and what
 * tells how often a function was called. */
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuCtxPushCurrent_v2(void *context);
int cuMemAlloc_v2(unsigned long long *address, size_t bytes);
int cuStreamCreate(void **stream, unsigned flags);
int cuStreamBeginCapture_v2(void *stream, int mode);
int cuStreamEndCapture(void *stream, void **graph);
int cuGraphInstantiateWithFlags(void **exec, void *graph,
                                unsigned long long flags);
int cuGraphLaunch(void *exec, void *stream);
int cuGraphExecDestroy(void *exec);
int cuGraphDestroy(void *graph);
uint64_t corey_fake_calls(const char *function);
/* Kernels that wait for their predecessors themselves are launched with
 * attributes. */
static uint64_t numLaunches(void) {
  return corey_fake_calls("cuLaunchKernel") +
         corey_fake_calls("cuLaunchKernelEx");
}
void corey_fake_reset_calls(void);

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
#define EXPECT_ERROR(call, code, message)                                      \
  EXPECT((call) == (code) && strcmp(corey_last_error(), (message)) == 0)

static const char kProgram[] =
    "ssm.weight @w \"w\" : tensor<16x64xf32>\n"
    "func.func @main(%u: tensor<?x?x64xf32>, %A: tensor<64x16xf32>, %B: "
    "tensor<?x?x1x16xf32>) -> tensor<?x?x64xf32> {\n"
    "  %y = ssm.selective_scan %u, %u, %A, %B, %B {chunk = #ssm.chunk<runtime "
    "= @scan>} : tensor<?x?x64xf32>,\n"
    "      tensor<?x?x64xf32>, tensor<64x16xf32>, tensor<?x?x1x16xf32>, "
    "tensor<?x?x1x16xf32> -> tensor<?x?x64xf32>\n"
    "  return %y : tensor<?x?x64xf32>\n"
    "}\n"
    "func.func @weighted(%x: tensor<16x64xf32>) -> tensor<16x64xf32> {\n"
    "  %w = ssm.get_weight @w : tensor<16x64xf32>\n"
    "  %y = ssm.add %x, %w : tensor<16x64xf32>, tensor<16x64xf32>\n"
    "  return %y : tensor<16x64xf32>\n"
    "}\n";

/* A tensor in the memory of the current context's device. */
static corey_tensor onDevice(int32_t device, int32_t rank,
                             const int64_t *shape) {
  size_t bytes = 4;
  for (int32_t i = 0; i < rank; ++i)
    bytes *= (size_t)shape[i];
  unsigned long long address = 0;
  EXPECT(cuMemAlloc_v2(&address, bytes) == 0);
  memset((void *)address, 0, bytes);
  corey_tensor t = {(void *)address, COREY_F32, COREY_CUDA, device, rank,
                    shape,           NULL};
  return t;
}

int main(void) {
  corey_context *context = NULL, *second = NULL;
  corey_executable *program = NULL;
  EXPECT_ERROR(corey_context_create("cuda:9", 1, &context),
               COREY_INVALID_ARGUMENT,
               "expected a CUDA device from 0 to 1, got 9");
  EXPECT(corey_context_create("cuda:1", 1, &second) == COREY_OK);
  corey_context_destroy(second);
  EXPECT(corey_context_create("cuda", 1, &context) == COREY_OK);
  if (failed)
    return 1;
  corey_compile_options options = {"unsplit", 256, 0, 0};
  EXPECT_ERROR(corey_compile(context, kProgram, sizeof kProgram - 1, NULL,
                             &options, &program),
               COREY_INVALID_ARGUMENT,
               "expected vectorBits to be 0 on cuda:0, got 256");
  options.vector_bits = 0;
  EXPECT(corey_compile(context, kProgram, sizeof kProgram - 1, NULL, &options,
                       &program) == COREY_OK);
  corey_context_destroy(context);
  void *device = NULL, *other = NULL, *stream = NULL, *foreign = NULL;
  EXPECT(cuDevicePrimaryCtxRetain(&device, 0) == 0);
  EXPECT(cuDevicePrimaryCtxRetain(&other, 1) == 0);
  EXPECT(cuCtxPushCurrent_v2(other) == 0);
  EXPECT(cuStreamCreate(&foreign, 1) == 0);
  int64_t uShape[3] = {1, 256, 64}, aShape[2] = {64, 16},
          bShape[4] = {1, 256, 1, 16}, wShape[2] = {16, 64};
  corey_tensor elsewhere = onDevice(1, 3, uShape);
  EXPECT(cuCtxPushCurrent_v2(device) == 0);
  EXPECT(cuStreamCreate(&stream, 1) == 0);
  if (failed)
    return 1;
  corey_tensor in[3] = {onDevice(0, 3, uShape), onDevice(0, 2, aShape),
                        onDevice(0, 4, bShape)},
               out = onDevice(0, 3, uShape);

  /* Devices. */
  static float memory[256 * 64];
  corey_tensor host = {memory, COREY_F32, COREY_CPU, 0, 3, uShape, NULL};
  corey_tensor wrong[3] = {host, in[1], in[2]};
  EXPECT_ERROR(corey_run(program, "main", wrong, 3, &out, 1),
               COREY_INVALID_ARGUMENT,
               "input 'u': expected device cuda:0, got cpu");
  wrong[0] = elsewhere;
  EXPECT_ERROR(corey_run(program, "main", wrong, 3, &out, 1),
               COREY_INVALID_ARGUMENT,
               "input 'u': expected device cuda:0, got cuda:1");
  wrong[0] = in[0];
  wrong[0].device_kind = (corey_device_kind)7;
  EXPECT_ERROR(corey_run(program, "main", wrong, 3, &out, 1),
               COREY_INVALID_ARGUMENT,
               "input 0: expected a kind of device, got 7");

  /* Streams: only the program's own is waited for. */
  EXPECT(corey_run(program, "main", in, 3, &out, 1) == COREY_OK);
  corey_fake_reset_calls();
  EXPECT(corey_run(program, "main", in, 3, &out, 1) == COREY_OK);
  EXPECT(corey_fake_calls("cuStreamSynchronize") == 1);
  EXPECT(numLaunches() == 1);
  corey_fake_reset_calls();
  EXPECT(corey_run_on_stream(program, "main", in, 3, &out, 1, stream) ==
         COREY_OK);
  EXPECT(corey_fake_calls("cuStreamSynchronize") == 0);
  EXPECT(numLaunches() == 1);
  EXPECT_ERROR(
      corey_run_on_stream(program, "main", in, 3, &out, 1, foreign),
      COREY_INVALID_ARGUMENT,
      "expected a stream of the primary context of CUDA device 0, got one of "
      "another context");

  /* Variants and chunks. */
  corey_chunk chunk;
  EXPECT(corey_set_variant(program, "scan", "warp") == COREY_OK);
  EXPECT(corey_set_chunk(program, "scan", 64) == COREY_OK);
  corey_fake_reset_calls();
  EXPECT(corey_run_on_stream(program, "main", in, 3, &out, 1, stream) ==
         COREY_OK);
  EXPECT(numLaunches() == 3);
  EXPECT(corey_get_chunk(program, "scan", &chunk) == COREY_OK &&
         chunk.chunk == 64 && chunk.requested == 64 && chunk.length == 256);
  EXPECT(corey_set_chunk(program, "scan", 0) == COREY_OK);
  EXPECT_ERROR(corey_set_variant(program, "scan", "wide"), COREY_NOT_FOUND,
               "site 'scan': expected a variant of rule, warp, split, "
               "split-short, split-narrow, got 'wide'");
  EXPECT(corey_set_variant(program, "scan", "split") == COREY_OK);
  EXPECT(corey_run(program, "main", in, 3, &out, 1) == COREY_OK);
  static char text[1 << 14];
  EXPECT(corey_explain(program, text, sizeof text) < sizeof text);
  EXPECT(strstr(text, "variant split (") != NULL);
  EXPECT(strstr(text, "kernel selective_scan_split") != NULL);
  EXPECT(corey_set_variant(program, "scan", "") == COREY_OK);

  /* A run that the caller captures into a graph. */
  void *graph = NULL, *exec = NULL;
  corey_fake_reset_calls();
  EXPECT(cuStreamBeginCapture_v2(stream, 2) == 0);
  EXPECT(corey_run_on_stream(program, "main", in, 3, &out, 1, stream) ==
         COREY_OK);
  EXPECT(cuStreamEndCapture(stream, &graph) == 0);
  EXPECT(corey_fake_calls("cuStreamSynchronize") == 0);
  EXPECT(cuGraphInstantiateWithFlags(&exec, graph, 0) == 0);
  EXPECT(cuGraphLaunch(exec, stream) == 0);
  cuGraphExecDestroy(exec);
  cuGraphDestroy(graph);

  /* DLPack: outputs are made on the device. */
  DLManagedTensor managed[3], *list[3], *made = NULL;
  memset(managed, 0, sizeof managed);
  for (int i = 0; i < 3; ++i) {
    DLTensor *t = &managed[i].dl_tensor;
    t->data = in[i].data;
    t->device.device_type = kDLCUDA;
    t->ndim = in[i].rank;
    t->dtype.code = kDLFloat;
    t->dtype.bits = 32;
    t->dtype.lanes = 1;
    t->shape = (int64_t *)in[i].shape;
    list[i] = &managed[i];
  }
  EXPECT(corey_run_dlpack_on_stream(program, "main", list, 3, &made, 1,
                                    stream) == COREY_OK);
  if (made) {
    EXPECT(made->dl_tensor.device.device_type == kDLCUDA &&
           made->dl_tensor.device.device_id == 0);
    EXPECT(made->dl_tensor.ndim == 3 && made->dl_tensor.shape[1] == 256);
    made->deleter(made);
  }
  managed[0].dl_tensor.device.device_type = kDLCPU;
  EXPECT_ERROR(
      corey_run_dlpack_on_stream(program, "main", list, 3, &made, 1, stream),
      COREY_INVALID_ARGUMENT, "input 'u': expected device cuda:0, got cpu");

  /* A weight of the host is copied, once; one of the device stays. */
  corey_tensor weight = {memory, COREY_F32, COREY_CPU, 0, 2, wShape, NULL},
               x = onDevice(0, 2, wShape), y = onDevice(0, 2, wShape);
  EXPECT(corey_run(program, "weighted", &x, 1, &y, 1) ==
         COREY_INVALID_ARGUMENT);
  EXPECT(strstr(corey_last_error(), "weight 'w': expected it to be bound") ==
         corey_last_error());
  corey_fake_reset_calls();
  EXPECT(corey_bind_weight(program, "w", &weight) == COREY_OK);
  EXPECT(corey_fake_calls("cuMemcpyHtoDAsync") == 1);
  EXPECT(corey_run(program, "weighted", &x, 1, &y, 1) == COREY_OK);
  EXPECT(corey_fake_calls("cuMemcpyHtoDAsync") == 1);
  weight = onDevice(0, 2, wShape);
  EXPECT(corey_bind_weight(program, "w", &weight) == COREY_OK);
  EXPECT(corey_fake_calls("cuMemcpyHtoDAsync") == 1);
  elsewhere.rank = 2;
  elsewhere.shape = wShape;
  EXPECT_ERROR(corey_bind_weight(program, "w", &elsewhere),
               COREY_INVALID_ARGUMENT,
               "weight 'w' (bound by name): expected device cuda:0 or cpu, got "
               "cuda:1");

  corey_executable_destroy(program);
  printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}
