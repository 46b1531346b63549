//===- RuntimeABI.h - Functions that compiled code calls --------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_DEVICE_RUNTIMEABI_H
#define COREY_DEVICE_RUNTIMEABI_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/// Memory for an intermediate of the call in progress, aligned to 64 bytes.
/// Kept for later calls when freed. Outside a call it comes from the heap.
void *corey_rt_malloc(size_t size);
void corey_rt_free(void *pointer);

/// The chunk, in tokens and at least 1, of the site called `site` (address of
/// a NUL-terminated string) for a scan over `batch` sequences of `length`: what
/// the scheduler chooses; without one, in programs that were compiled ahead of
/// time, `fallback` if it is not 0, else the whole length.
int64_t corey_rt_chunk(int64_t site, int64_t batch, int64_t length,
                       int64_t fallback);

/// The variant that the last corey_rt_chunk(site) of this call chose: an index
/// into the site's kernels; 0 before the first and without a scheduler.
int64_t corey_rt_variant(int64_t site);

/// y = x w^T, or y += x w^T with `accumulate`, in f32, for `batch` blocks of
/// `rows` rows: x is [batch, rows, inputs], w is [outputs, inputs] and y is
/// [batch, rows, outputs]. Addresses are those of element 0, strides are in
/// elements, the innermost ones are 1.
void corey_rt_gemm(int64_t x, int64_t w, int64_t y, int64_t batch, int64_t rows,
                   int64_t outputs, int64_t inputs, int64_t xBatchStride,
                   int64_t xRowStride, int64_t wRowStride, int64_t yBatchStride,
                   int64_t yRowStride, int64_t accumulate);

/// The index that ssm.sample draws from a row of `size` logits, f32 one after
/// another.
int64_t corey_rt_sample(int64_t logits, int64_t size, float temperature,
                        int32_t topK, float topP, int64_t seed,
                        int64_t sequence, int64_t draws);

/// Gathers statistics of a tensor for `site`. `address` is that of element 0,
/// `layout` that of `rank` sizes followed by `rank` strides in elements, rank
/// at most 8. `width` is the element's width in bits: 32 for f32, 16 for f16,
/// -16 for bf16. What one call sees is there for the next.
void corey_rt_observe(int64_t site, int64_t address, int64_t layout,
                      int64_t rank, int64_t width);

//===----------------------------------------------------------------------===//
// CUDA
//===----------------------------------------------------------------------===//
//
// For the call in progress, on its device and stream. Nothing here waits for
// the device, and no call of known shapes allocates. The first error fails the
// call; after it these functions do nothing.
//
//===----------------------------------------------------------------------===//

/// Device memory for an intermediate, aligned to 256 bytes and reused in stream
/// order once freed; null once the call has failed.
void *corey_rt_device_malloc(size_t size);
void corey_rt_device_free(void *pointer);

/// Launches kernel `kernel` of the program's device image, an index into its
/// list of names, with `gridX` * `gridY` * `gridZ` blocks of `blockX` *
/// `blockY` * `blockZ` threads in clusters of `clusterX` blocks (1 for none).
/// `arguments` is the address of an array of the addresses of the arguments'
/// values. `isDependent`: 1 if the kernel waits for its predecessors itself,
/// and may be launched before they end. A grid without blocks does nothing.
void corey_rt_launch(int64_t kernel, int64_t gridX, int64_t gridY,
                     int64_t gridZ, int64_t blockX, int64_t blockY,
                     int64_t blockZ, int64_t clusterX, int64_t isDependent,
                     int64_t dynamicSharedBytes, int64_t arguments);

/// Copies between tensors in device memory, given by the addresses of element
/// 0. `layout` is the address, on the host, of `rank` sizes, `rank` strides of
/// the target and `rank` strides of the source, in elements of `elementBytes`
/// bytes: 1, 2, 4 or 8.
void corey_rt_device_copy(int64_t target, int64_t source, int64_t layout,
                          int64_t rank, int64_t elementBytes);

/// y = x w^T (+ bias) (+ residual) as corey_rt_gemm() takes it, in device
/// memory: `residual` has y's sizes and type, `bias` is [outputs], and either
/// is 0 when absent. Types are 32 for f32, 16 for f16 and -16 for bf16;
/// `inputType` is that of x and w, and products are summed in f32. Returns 1
/// when done, and 0 when no library does it, so that the caller launches a
/// kernel of its own.
int64_t corey_rt_device_gemm(int64_t x, int64_t w, int64_t y, int64_t bias,
                             int64_t residual, int64_t batch, int64_t rows,
                             int64_t outputs, int64_t inputs,
                             int64_t xBatchStride, int64_t xRowStride,
                             int64_t wRowStride, int64_t yBatchStride,
                             int64_t yRowStride, int64_t residualBatchStride,
                             int64_t residualRowStride, int64_t inputType,
                             int64_t outputType, int64_t biasType);

/// How kernels count a tensor that is observed: see scheduler::CountPlan. Sizes
/// are in elements, strides in bytes, addresses of device memory.
struct corey_rt_observation {
  /// Of each kernel, with 256 threads; and room for a record of each, which is
  /// the first twelve fields of corey_rt_observed.
  int64_t blocks, records;
  /// A corey_rt_observed and, behind it, 64-bit counts: of every bin, or, where
  /// `tokens` is 1, of the bins of all tokens that have 0, 1, ..., `columns`
  /// elements; `bins` is at most 4096 then. Zero before the kernels run.
  int64_t counted, tokens, rule, bins;
  double low, width;
  /// `rows` rows of `columns` elements; columns may be loaded 16 bytes at a
  /// time if `isAligned` is 1.
  int64_t rows, columns, columnStride, isAligned;
  /// Axes of the rows: as many as the tensor has, and at least one.
  int64_t sizes[8], strides[8];
};

/// What they have counted: see scheduler::CountedTensor.
struct corey_rt_observed {
  int64_t count, nan, positiveInfinity, negativeInfinity;
  double min, max, s1, s2, s3, s4, absolute, pivot;
  int64_t below, above, outliers, tokens, tokensDropped, reserved;
};

/// As corey_rt_observe() for a tensor in device memory; `layout` is on the
/// host. Returns 1 if kernels are to count it: by `observation`, the address of
/// a corey_rt_observation that is filled in, launched before a call of
/// corey_rt_device_observed(), which is their end. They run beside the call's
/// other work, on a stream of their own, and the statistics are there for a
/// later call. A site whose last count is still under way is not looked at, nor
/// is a call that somebody else captures into a graph.
int64_t corey_rt_device_observe(int64_t site, int64_t address, int64_t layout,
                                int64_t rank, int64_t width,
                                int64_t observation);
void corey_rt_device_observed(int64_t site);

//===----------------------------------------------------------------------===//
// Errors
//===----------------------------------------------------------------------===//

/// Fails the call in progress: `index` is not in [0, limit).
void corey_rt_bad_index(int64_t index, int64_t limit);

/// Fails the call in progress: `slot` is not below `limit`, the states that a
/// pool has.
void corey_rt_bad_slot(int64_t slot, int64_t limit);

/// Fails the call in progress if there are tokens but no sequence to hold them.
void corey_rt_check_sequence_count(int64_t count, int64_t length);

/// Fails the call in progress unless sequence starts ascend from 0 and stay
/// within `length`: `start` is that of `sequence`, `previous` the one before.
void corey_rt_check_sequence_start(int64_t sequence, int64_t start,
                                   int64_t previous, int64_t length);

/// What a kernel has found wrong with what its operands hold. One record a
/// call, zero when the call begins; the first kernel that finds something
/// writes it.
struct corey_rt_device_error {
  /// 0: nothing is wrong.
  /// 1: an id of an embedding, `value`, is not in [0, limit); what
  ///    corey_rt_bad_index(value, limit) reports. If there are several, any.
  /// 2: the start of sequence `position`, `value`, is wrong with the one before
  ///    it, `previous` (that of sequence 0 for itself), and `limit` tokens;
  ///    what corey_rt_check_sequence_start(position, value, previous, limit)
  ///    reports. If there are several, the first.
  /// 3: a slot of a pool of states, `value`, is not below `limit`; what
  ///    corey_rt_bad_slot(value, limit) reports. If there are several, any.
  int32_t kind;
  int32_t reserved;
  int64_t value, limit, position, previous;
};

/// The device address of the record of the call in progress. It lies in memory
/// of the host that the device can write to, and is aligned to 8 bytes. Kernels
/// write it with ordinary stores: the host may read it when the stream has run
/// past them, and has to fail the call then if `kind` is not 0.
int64_t corey_rt_device_error_slot(void);

//===----------------------------------------------------------------------===//
// Programs exported for CUDA devices
//===----------------------------------------------------------------------===//

/// A kernel: PTX, with a NUL that `bytes` does not count, or a cubin.
struct corey_rt_kernel {
  const char *name, *image;
  int64_t bytes;
};

/// A program: its kernels by number, and the chip that they are for. `state` is
/// null at first, and the run-time library's.
struct corey_rt_program {
  void *state;
  const char *chip;
  int64_t numKernels;
  const struct corey_rt_kernel *kernels;
};

/// A tensor argument, which comes as a memref descriptor: two pointers, an
/// offset, `rank` sizes and `rank` strides.
struct corey_rt_argument {
  const char *name;
  int64_t rank, elementBytes, isOutput;
  /// 1 if the innermost stride need not be 1, and nothing be aligned to more
  /// than an element.
  int64_t anyStrides;
};

/// A function: `invoke` runs its host code, given descriptors.
struct corey_rt_function {
  struct corey_rt_program *program;
  const char *name;
  void (*invoke)(void **arguments);
  int64_t numArguments;
  const struct corey_rt_argument *arguments;
};

/// Checks the arguments and runs a function on the device that holds them:
/// `stream` is a CUstream, 1 for the legacy default stream, or null for a
/// stream of the program's own that is waited for. Returns null, or what went
/// wrong, which the calling thread's next call overwrites. Errors that kernels
/// find on a caller's stream are those of a later call. Thread-safe.
const char *corey_rt_run(const struct corey_rt_function *function,
                         void **arguments, void *stream);

#ifdef __cplusplus
} // extern "C"
#endif

#endif // COREY_DEVICE_RUNTIMEABI_H
