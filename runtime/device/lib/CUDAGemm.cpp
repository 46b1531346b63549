//===- CUDAGemm.cpp - Matrix products through cuBLASLt --------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// cuBLASLt is column-major: a row-major matrix [r, c] with row stride s is to
// it a [c, r] matrix with leading dimension s. So with x, w, y row-major,
//
//   y [rows, outputs]  is  Y [outputs, rows], ld yRowStride
//   x [rows, inputs]   is  X [inputs, rows],  ld xRowStride
//   w [outputs, inputs] is W [inputs, outputs], ld wRowStride
//
// and y = x w^T is Y = W^T X: m = outputs, n = rows, k = inputs, the first
// operand transposed. A bias of the epilogue has one element per row of Y,
// which is one per output, and the residual is C with beta = 1.
//
//===----------------------------------------------------------------------===//

#include "CUDABlasLt.h"
#include "CUDADriver.h"
#include "corey/Device/CUDA.h"
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>

using namespace corey;
using namespace corey::cuda;
using namespace corey::cuda::driver;

static CUcontext contextOf(const Device &device) {
  return static_cast<CUcontext>(device.context());
}

/// The library of the process, or null.
static const BlasLt *loadBlasLt() {
  static const BlasLt *library = []() -> const BlasLt * {
    const char *chosen = std::getenv("COREY_CUBLASLT");
    void *handle = nullptr;
    if (chosen && *chosen) {
      if (std::strcmp(chosen, "off") == 0)
        return nullptr;
      handle = dlopen(chosen, RTLD_NOW | RTLD_LOCAL);
    } else {
      for (const char *name :
           {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"})
        if ((handle = dlopen(name, RTLD_NOW | RTLD_LOCAL)))
          break;
    }
    if (!handle)
      return nullptr;
    auto *made = new BlasLt;
    bool complete = true;
#define COREY_CUBLASLT_LOAD(name, parameters)                                  \
  made->name =                                                                 \
      reinterpret_cast<cublasStatus_t(*) parameters>(dlsym(handle, #name));    \
  complete &= made->name != nullptr;
    COREY_CUBLASLT_FUNCTIONS(COREY_CUBLASLT_LOAD)
#undef COREY_CUBLASLT_LOAD
    if (complete)
      return made;
    delete made;
    return nullptr;
  }();
  return library;
}

namespace {
/// All that cuBLASLt's choice depends on.
struct GemmKey {
  int64_t batch, rows, outputs, inputs;
  int64_t xBatchStride, xRowStride, wRowStride, yBatchStride, yRowStride;
  int64_t residualBatchStride, residualRowStride;
  int64_t inputType, outputType, biasType;
  /// Of the addresses, in bytes; 0 for what is absent.
  int64_t xAlignment, wAlignment, yAlignment, residualAlignment, biasAlignment;

  friend bool operator==(const GemmKey &a, const GemmKey &b) {
    return std::memcmp(&a, &b, sizeof a) == 0;
  }
};

struct GemmKeyHash {
  size_t operator()(const GemmKey &key) const {
    static_assert(std::has_unique_object_representations_v<GemmKey>);
    uint64_t words[sizeof key / 8], hash = 0x9e3779b97f4a7c15;
    std::memcpy(words, &key, sizeof key);
    for (uint64_t word : words) {
      hash = (hash ^ word) * 0xff51afd7ed558ccd;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

/// What was chosen for a key.
struct GemmPlan {
  GemmPlan(const BlasLt &lt) : lt(lt) {}
  GemmPlan(const GemmPlan &) = delete;
  GemmPlan &operator=(const GemmPlan &) = delete;
  ~GemmPlan() {
    for (cublasLtMatrixLayout_t layout : {w, x, c, y})
      if (layout)
        lt.cublasLtMatrixLayoutDestroy(layout);
    if (product)
      lt.cublasLtMatmulDescDestroy(product);
  }
  const BlasLt &lt;
  cublasLtMatmulDesc_t product = nullptr;
  cublasLtMatrixLayout_t w = nullptr, x = nullptr, c = nullptr, y = nullptr;
  cublasLtMatmulAlgo_t algorithm = {};
  /// Whether the library has anything for the key.
  bool usable = false;
  /// Guards the address of the bias in `product`.
  std::mutex mutex;
};
} // namespace

/// The library's handle for a device, and what was chosen so far.
struct Device::GemmLibrary {
  const BlasLt *lt = nullptr;
  cublasLtHandle_t handle = nullptr;
  std::mutex mutex;
  std::unordered_map<GemmKey, std::unique_ptr<GemmPlan>, GemmKeyHash> plans;
};

static cudaDataType_t toDataType(ElementType type) {
  return type == ElementType::F32   ? CUDA_R_32F
         : type == ElementType::F16 ? CUDA_R_16F
                                    : CUDA_R_16BF;
}
static int64_t sizeOf(ElementType type) {
  return type == ElementType::F32 ? 4 : 2;
}

/// The largest power of two up to 256 that divides an address and the distance
/// of the batch's blocks in bytes.
static int64_t alignmentOf(const void *pointer, int64_t batchBytes) {
  auto bits = reinterpret_cast<uintptr_t>(pointer) |
              static_cast<uintptr_t>(batchBytes) | 256;
  return static_cast<int64_t>(bits & (~bits + 1));
}

/// Fills `plan` for `key`; it stays unusable if the library has nothing.
static void makePlan(const BlasLt &lt, cublasLtHandle_t handle,
                     const GemmKey &key, GemmPlan &plan) {
  bool good = true;
  auto ok = [&](cublasStatus_t status) {
    good &= status == CUBLAS_STATUS_SUCCESS;
  };
  ok(lt.cublasLtMatmulDescCreate(&plan.product, CUBLAS_COMPUTE_32F,
                                 CUDA_R_32F));
  if (!good)
    return;
  auto setProduct = [&](cublasLtMatmulDescAttributes_t which, int32_t value) {
    ok(lt.cublasLtMatmulDescSetAttribute(plan.product, which, &value,
                                         sizeof value));
  };
  setProduct(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
  setProduct(CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
  if (key.biasAlignment) {
    setProduct(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    setProduct(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE,
               static_cast<int32_t>(key.biasType));
    // The choice looks at the alignment of the address only.
    auto *some = reinterpret_cast<const void *>(key.biasAlignment);
    ok(lt.cublasLtMatmulDescSetAttribute(
        plan.product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &some, sizeof some));
  }
  auto layout = [&](cublasLtMatrixLayout_t &made, int64_t type, int64_t rows,
                    int64_t columns, int64_t ld, int64_t batchStride) {
    // One column has no next one, so that its distance means nothing.
    if (columns == 1)
      ld = rows;
    ok(lt.cublasLtMatrixLayoutCreate(&made, static_cast<cudaDataType_t>(type),
                                     rows, columns, ld));
    if (!good || key.batch == 1)
      return;
    auto count = static_cast<int32_t>(key.batch);
    ok(lt.cublasLtMatrixLayoutSetAttribute(
        made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count));
    ok(lt.cublasLtMatrixLayoutSetAttribute(
        made, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &batchStride,
        sizeof batchStride));
  };
  layout(plan.w, key.inputType, key.inputs, key.outputs, key.wRowStride, 0);
  layout(plan.x, key.inputType, key.inputs, key.rows, key.xRowStride,
         key.xBatchStride);
  layout(plan.y, key.outputType, key.outputs, key.rows, key.yRowStride,
         key.yBatchStride);
  bool residual = key.residualAlignment != 0;
  layout(plan.c, key.outputType, key.outputs, key.rows,
         residual ? key.residualRowStride : key.yRowStride,
         residual ? key.residualBatchStride : key.yBatchStride);
  cublasLtMatmulPreference_t preference = nullptr;
  ok(lt.cublasLtMatmulPreferenceCreate(&preference));
  if (!good)
    return;
  auto prefer = [&](cublasLtMatmulPreferenceAttributes_t which, auto value) {
    ok(lt.cublasLtMatmulPreferenceSetAttribute(preference, which, &value,
                                               sizeof value));
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
         uint64_t(Gemm::kWorkspaceBytes));
  auto alignment = [](int64_t bytes) { return static_cast<uint32_t>(bytes); };
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(key.wAlignment));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(key.xAlignment));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
         alignment(residual ? key.residualAlignment : key.yAlignment));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(key.yAlignment));
  cublasLtMatmulHeuristicResult_t best = {};
  int found = 0;
  if (good &&
      lt.cublasLtMatmulAlgoGetHeuristic(handle, plan.product, plan.w, plan.x,
                                        plan.c, plan.y, preference, 1, &best,
                                        &found) == CUBLAS_STATUS_SUCCESS &&
      found > 0 && best.state == CUBLAS_STATUS_SUCCESS &&
      best.workspaceSize <= Gemm::kWorkspaceBytes) {
    plan.algorithm = best.algo;
    plan.usable = true;
  }
  lt.cublasLtMatmulPreferenceDestroy(preference);
}

Gemm::~Gemm() {
  if (workspace)
    device->deallocate(workspace);
}

Expected<bool> Gemm::run(const GemmProblem &given, void *stream) {
  GemmProblem p = given;
  if (p.batch <= 0 || p.rows <= 0 || p.outputs <= 0)
    return true;
  if (p.inputs <= 0 || p.inputType == ElementType::F64 ||
      p.biasType == ElementType::F64 ||
      (p.outputType != p.inputType && p.outputType != ElementType::F32))
    return false;
  // Blocks that follow one another are one product; so are single rows.
  if (p.batch > 1 && p.rows == 1) {
    p.rows = p.batch;
    p.batch = 1;
    p.xRowStride = p.xBatchStride;
    p.yRowStride = p.yBatchStride;
    p.residualRowStride = p.residualBatchStride;
  } else if (p.batch == 1 ||
             (p.xBatchStride == p.rows * p.xRowStride &&
              p.yBatchStride == p.rows * p.yRowStride &&
              (!p.residual ||
               p.residualBatchStride == p.rows * p.residualRowStride))) {
    p.rows *= p.batch;
    p.batch = 1;
  }
  if (p.batch == 1)
    p.xBatchStride = p.yBatchStride = p.residualBatchStride = 0;
  if (!p.residual)
    p.residualBatchStride = p.residualRowStride = 0;
  // Rows must not overlap, and the library counts in 32 bits.
  constexpr int64_t kMax = 0x7fffffff;
  auto fits = [&](int64_t rows, int64_t columns, int64_t rowStride) {
    return rows <= kMax && columns <= kMax &&
           (rows == 1 || rowStride >= columns);
  };
  if (!fits(p.rows, p.inputs, p.xRowStride) ||
      !fits(p.outputs, p.inputs, p.wRowStride) ||
      !fits(p.rows, p.outputs, p.yRowStride) || p.batch > kMax ||
      (p.residual && !fits(p.rows, p.outputs, p.residualRowStride)))
    return false;
  GemmKey key = {};
  key.batch = p.batch;
  key.rows = p.rows;
  key.outputs = p.outputs;
  key.inputs = p.inputs;
  key.xBatchStride = p.xBatchStride;
  key.xRowStride = p.rows == 1 ? 0 : p.xRowStride;
  key.wRowStride = p.outputs == 1 ? 0 : p.wRowStride;
  key.yBatchStride = p.yBatchStride;
  key.yRowStride = p.rows == 1 ? 0 : p.yRowStride;
  key.residualBatchStride = p.residualBatchStride;
  key.residualRowStride = p.rows == 1 ? 0 : p.residualRowStride;
  key.inputType = toDataType(p.inputType);
  key.outputType = toDataType(p.outputType);
  key.biasType = p.bias ? toDataType(p.biasType) : 0;
  int64_t in = sizeOf(p.inputType), out = sizeOf(p.outputType);
  key.xAlignment = alignmentOf(p.x, p.xBatchStride * in);
  key.wAlignment = alignmentOf(p.w, 0);
  key.yAlignment = alignmentOf(p.y, p.yBatchStride * out);
  if (p.residual)
    key.residualAlignment =
        alignmentOf(p.residual, p.residualBatchStride * out);
  key.biasAlignment = p.bias ? alignmentOf(p.bias, 0) : 0;
  if (key.xAlignment < in || key.wAlignment < in || key.yAlignment < out ||
      (p.residual && key.residualAlignment < out) ||
      (p.bias && key.biasAlignment < sizeOf(p.biasType)))
    return false;

  const Driver &api = device->driver();
  ContextScope scope(api, contextOf(*device));
  if (Status status = scope.status(); !status)
    return status;
  Device::GemmLibrary *library;
  {
    std::lock_guard<std::mutex> lock(device->mutex);
    if (!device->gemm) {
      device->gemm = std::make_shared<Device::GemmLibrary>();
      RelaxedCapture relaxed(api);
      if (const BlasLt *lt = loadBlasLt())
        if (lt->cublasLtCreate(&device->gemm->handle) == CUBLAS_STATUS_SUCCESS)
          device->gemm->lt = lt;
    }
    library = device->gemm.get();
  }
  if (!library->lt)
    return false;
  const BlasLt &lt = *library->lt;
  GemmPlan *plan;
  {
    std::lock_guard<std::mutex> lock(library->mutex);
    std::unique_ptr<GemmPlan> &slot = library->plans[key];
    if (!slot) {
      RelaxedCapture relaxed(api);
      slot = std::make_unique<GemmPlan>(lt);
      makePlan(lt, library->handle, key, *slot);
    }
    plan = slot.get();
  }
  if (!plan->usable)
    return false;
  if (!workspace) {
    Expected<void *> made = device->allocate(kWorkspaceBytes);
    if (!made)
      return made.takeStatus();
    workspace = *made;
  }
  const float alpha = 1, beta = p.residual ? 1 : 0;
  // Without a bias a plan does not change.
  std::unique_lock<std::mutex> lock(plan->mutex, std::defer_lock);
  if (p.bias) {
    lock.lock();
    lt.cublasLtMatmulDescSetAttribute(plan->product,
                                      CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                      &p.bias, sizeof p.bias);
  }
  cublasStatus_t result = lt.cublasLtMatmul(
      library->handle, plan->product, &alpha, p.w, plan->w, p.x, plan->x, &beta,
      p.residual ? p.residual : p.y, plan->c, p.y, plan->y, &plan->algorithm,
      workspace, kWorkspaceBytes, static_cast<CUstream>(stream));
  if (result == CUBLAS_STATUS_SUCCESS)
    return true;
  return Status::deviceError("cublasLtMatmul: expected success, got status " +
                             std::to_string(result));
}
