//===- CUDABlasLt.h - The part of cuBLASLt in use ---------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// Declarations, binary compatible with cuBLASLt 12 and 13.
//
//===----------------------------------------------------------------------===//

#ifndef COREY_DEVICE_CUDABLASLT_H
#define COREY_DEVICE_CUDABLASLT_H

#include "CUDADriver.h"

namespace corey::cuda {

enum cublasStatus_t : int {
  CUBLAS_STATUS_SUCCESS = 0,
  CUBLAS_STATUS_INVALID_VALUE = 7,
  CUBLAS_STATUS_NOT_SUPPORTED = 15,
};
enum cudaDataType_t : int { CUDA_R_32F = 0, CUDA_R_16F = 2, CUDA_R_16BF = 14 };
/// f32 on the CUDA cores, f16 and bf16 on the tensor cores, summed in f32.
enum cublasComputeType_t : int { CUBLAS_COMPUTE_32F = 68 };
enum cublasOperation_t : int { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 };
enum cublasLtEpilogue_t : int {
  CUBLASLT_EPILOGUE_DEFAULT = 1,
  CUBLASLT_EPILOGUE_BIAS = 4,
};
enum cublasLtMatmulDescAttributes_t : int {
  CUBLASLT_MATMUL_DESC_TRANSA = 3,
  CUBLASLT_MATMUL_DESC_TRANSB = 4,
  CUBLASLT_MATMUL_DESC_EPILOGUE = 7,
  CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8,
  CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE = 26,
};
enum cublasLtMatrixLayoutAttribute_t : int {
  CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT = 5,
  CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET = 6,
};
enum cublasLtMatmulPreferenceAttributes_t : int {
  CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8,
};

using cublasLtHandle_t = struct cublasLtContext *;
using cublasLtMatmulDesc_t = struct cublasLtMatmulDescOpaque_t *;
using cublasLtMatrixLayout_t = struct cublasLtMatrixLayoutOpaque_t *;
using cublasLtMatmulPreference_t = struct cublasLtMatmulPreferenceOpaque_t *;

struct cublasLtMatmulAlgo_t {
  uint64_t data[8];
};
struct cublasLtMatmulHeuristicResult_t {
  cublasLtMatmulAlgo_t algo;
  size_t workspaceSize;
  cublasStatus_t state;
  float wavesCount;
  int reserved[4];
};

/// X(function, parameters).
#define COREY_CUBLASLT_FUNCTIONS(X)                                            \
  X(cublasLtCreate, (cublasLtHandle_t * handle))                               \
  X(cublasLtMatmulDescCreate,                                                  \
    (cublasLtMatmulDesc_t * product, cublasComputeType_t computeType,          \
     cudaDataType_t scaleType))                                                \
  X(cublasLtMatmulDescDestroy, (cublasLtMatmulDesc_t product))                 \
  X(cublasLtMatmulDescSetAttribute,                                            \
    (cublasLtMatmulDesc_t product, cublasLtMatmulDescAttributes_t which,       \
     const void *value, size_t bytes))                                         \
  X(cublasLtMatrixLayoutCreate,                                                \
    (cublasLtMatrixLayout_t * layout, cudaDataType_t type, uint64_t rows,      \
     uint64_t columns, int64_t ld))                                            \
  X(cublasLtMatrixLayoutDestroy, (cublasLtMatrixLayout_t layout))              \
  X(cublasLtMatrixLayoutSetAttribute,                                          \
    (cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t which,     \
     const void *value, size_t bytes))                                         \
  X(cublasLtMatmulPreferenceCreate, (cublasLtMatmulPreference_t * preference)) \
  X(cublasLtMatmulPreferenceDestroy, (cublasLtMatmulPreference_t preference))  \
  X(cublasLtMatmulPreferenceSetAttribute,                                      \
    (cublasLtMatmulPreference_t preference,                                    \
     cublasLtMatmulPreferenceAttributes_t which, const void *value,            \
     size_t bytes))                                                            \
  X(cublasLtMatmulAlgoGetHeuristic,                                            \
    (cublasLtHandle_t handle, cublasLtMatmulDesc_t product,                    \
     cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,                       \
     cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,                       \
     cublasLtMatmulPreference_t preference, int requested,                     \
     cublasLtMatmulHeuristicResult_t results[], int *found))                   \
  X(cublasLtMatmul,                                                            \
    (cublasLtHandle_t handle, cublasLtMatmulDesc_t product, const void *alpha, \
     const void *a, cublasLtMatrixLayout_t aLayout, const void *b,             \
     cublasLtMatrixLayout_t bLayout, const void *beta, const void *c,          \
     cublasLtMatrixLayout_t cLayout, void *d, cublasLtMatrixLayout_t dLayout,  \
     const cublasLtMatmulAlgo_t *algorithm, void *workspace,                   \
     size_t workspaceBytes, driver::CUstream stream))

/// The functions of a loaded library.
struct BlasLt {
#define COREY_CUBLASLT_MEMBER(name, parameters)                                \
  cublasStatus_t(*name) parameters = nullptr;
  COREY_CUBLASLT_FUNCTIONS(COREY_CUBLASLT_MEMBER)
#undef COREY_CUBLASLT_MEMBER
};

} // namespace corey::cuda

#endif // COREY_DEVICE_CUDABLASLT_H
