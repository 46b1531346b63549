//===- FakeBlasLt.cpp - cuBLASLt on host memory ---------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// libcorey_fake_cublaslt.so: column-major products as cuBLASLt defines them, in
// double, at once. corey_fake_blaslt_calls() counts.
//
//===----------------------------------------------------------------------===//

#include "CUDABlasLt.h"
#include <cstring>
#include <map>
#include <string>

using namespace corey::cuda;

struct corey::cuda::cublasLtContext {};
struct corey::cuda::cublasLtMatmulDescOpaque_t {
  int transA = 0, transB = 0, epilogue = 1, biasType = -1;
  const void *bias = nullptr;
};
struct corey::cuda::cublasLtMatrixLayoutOpaque_t {
  int type;
  int64_t rows, columns, ld;
  int batch = 1;
  int64_t batchStride = 0;
};
struct corey::cuda::cublasLtMatmulPreferenceOpaque_t {
  uint32_t alignment = 256;
};

static std::map<std::string, uint64_t> &calls() {
  static auto &calls = *new std::map<std::string, uint64_t>;
  return calls;
}
#define COUNT(name) ++calls()[#name]

static double load(int type, const void *base, int64_t index) {
  if (type == CUDA_R_32F)
    return static_cast<const float *>(base)[index];
  uint16_t bits = static_cast<const uint16_t *>(base)[index];
  if (type == CUDA_R_16F)
    return static_cast<double>(reinterpret_cast<const _Float16 &>(bits));
  uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

static void store(int type, void *base, int64_t index, double value) {
  if (type == CUDA_R_32F) {
    static_cast<float *>(base)[index] = static_cast<float>(value);
  } else if (type == CUDA_R_16F) {
    static_cast<_Float16 *>(base)[index] = static_cast<_Float16>(value);
  } else {
    auto narrow = static_cast<float>(value);
    uint32_t bits;
    std::memcpy(&bits, &narrow, sizeof bits);
    bits += 0x7fff + (bits >> 16 & 1);
    static_cast<uint16_t *>(base)[index] = static_cast<uint16_t>(bits >> 16);
  }
}

static bool matches(const cublasLtMatrixLayoutOpaque_t &layout, int64_t rows,
                    int64_t columns) {
  return layout.rows == rows && layout.columns == columns &&
         layout.ld >= layout.rows;
}

extern "C" {
uint64_t corey_fake_blaslt_calls(const char *function) {
  return calls()[function];
}
cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
  COUNT(cublasLtCreate);
  static cublasLtContext context;
  *handle = &context;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *product,
                                        cublasComputeType_t computeType,
                                        cudaDataType_t scaleType) {
  if (computeType != CUBLAS_COMPUTE_32F || scaleType != CUDA_R_32F)
    return CUBLAS_STATUS_NOT_SUPPORTED;
  *product = new cublasLtMatmulDescOpaque_t;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t product) {
  delete product;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t
cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t product,
                               cublasLtMatmulDescAttributes_t which,
                               const void *value, size_t bytes) {
  int number = 0;
  if (bytes == sizeof number)
    std::memcpy(&number, value, bytes);
  switch (which) {
  case CUBLASLT_MATMUL_DESC_TRANSA:
    product->transA = number;
    break;
  case CUBLASLT_MATMUL_DESC_TRANSB:
    product->transB = number;
    break;
  case CUBLASLT_MATMUL_DESC_EPILOGUE:
    product->epilogue = number;
    break;
  case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
    product->biasType = number;
    break;
  case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
    std::memcpy(&product->bias, value, bytes);
    break;
  }
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout,
                                          cudaDataType_t type, uint64_t rows,
                                          uint64_t columns, int64_t ld) {
  *layout = new cublasLtMatrixLayoutOpaque_t{
      type, int64_t(rows), int64_t(columns), ld, 1, 0};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete layout;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t
cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                 cublasLtMatrixLayoutAttribute_t which,
                                 const void *value, size_t bytes) {
  if (which == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT)
    std::memcpy(&layout->batch, value, bytes);
  else
    std::memcpy(&layout->batchStride, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t
cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference) {
  *preference = new cublasLtMatmulPreferenceOpaque_t;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t
cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete preference;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t
cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t,
                                     cublasLtMatmulPreferenceAttributes_t,
                                     const void *, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}

/// Whether the descriptions fit one another, as the library would demand.
static bool supported(const cublasLtMatmulDescOpaque_t &p,
                      const cublasLtMatrixLayoutOpaque_t &a,
                      const cublasLtMatrixLayoutOpaque_t &b,
                      const cublasLtMatrixLayoutOpaque_t &c,
                      const cublasLtMatrixLayoutOpaque_t &d) {
  int64_t m = d.rows, n = d.columns, k = p.transA ? a.rows : a.columns;
  return a.type == b.type && c.type == d.type &&
         (p.transA ? matches(a, k, m) : matches(a, m, k)) &&
         (p.transB ? matches(b, n, k) : matches(b, k, n)) && matches(c, m, n) &&
         matches(d, m, n) && a.batch == d.batch && b.batch == d.batch &&
         c.batch == d.batch && (p.epilogue == 1 || p.biasType == d.type);
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t, cublasLtMatmulDesc_t product, cublasLtMatrixLayout_t a,
    cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
    cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t, int,
    cublasLtMatmulHeuristicResult_t results[], int *found) {
  COUNT(cublasLtMatmulAlgoGetHeuristic);
  *found = 0;
  if (!supported(*product, *a, *b, *c, *d))
    return CUBLAS_STATUS_NOT_SUPPORTED;
  *found = 1;
  results[0] = {};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t product,
                              const void *alpha, const void *a,
                              cublasLtMatrixLayout_t aLayout, const void *b,
                              cublasLtMatrixLayout_t bLayout, const void *beta,
                              const void *c, cublasLtMatrixLayout_t cLayout,
                              void *d, cublasLtMatrixLayout_t dLayout,
                              const cublasLtMatmulAlgo_t *, void *workspace,
                              size_t, corey::cuda::driver::CUstream) {
  COUNT(cublasLtMatmul);
  if (!supported(*product, *aLayout, *bLayout, *cLayout, *dLayout) ||
      !workspace)
    return CUBLAS_STATUS_INVALID_VALUE;
  float scale = *static_cast<const float *>(alpha);
  float keep = *static_cast<const float *>(beta);
  int64_t k = product->transA ? aLayout->rows : aLayout->columns;
  for (int batch = 0; batch < dLayout->batch; ++batch)
    for (int64_t j = 0; j < dLayout->columns; ++j)
      for (int64_t i = 0; i < dLayout->rows; ++i) {
        double sum = 0;
        for (int64_t l = 0; l < k; ++l) {
          int64_t x =
              product->transA ? l + i * aLayout->ld : i + l * aLayout->ld;
          int64_t y =
              product->transB ? j + l * bLayout->ld : l + j * bLayout->ld;
          sum += load(aLayout->type, a, x + batch * aLayout->batchStride) *
                 load(bLayout->type, b, y + batch * bLayout->batchStride);
        }
        sum *= scale;
        if (keep != 0)
          sum +=
              keep * load(cLayout->type, c,
                          i + j * cLayout->ld + batch * cLayout->batchStride);
        if (product->epilogue == CUBLASLT_EPILOGUE_BIAS)
          sum += load(product->biasType, product->bias, i);
        store(dLayout->type, d,
              i + j * dLayout->ld + batch * dLayout->batchStride, sum);
      }
  return CUBLAS_STATUS_SUCCESS;
}
} // extern "C"
