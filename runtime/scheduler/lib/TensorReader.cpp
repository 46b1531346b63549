//===- TensorReader.cpp - Strided tensors, block by block -----------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "TensorReader.h"
#include <cstdlib>
#include <limits>
#include <utility>

using namespace corey;
using namespace corey::scheduler;

TensorView TensorView::contiguous(const void *data, ElementType type,
                                  std::initializer_list<int64_t> shape) {
  TensorView view;
  view.data = data;
  view.type = type;
  for (int64_t size : shape)
    if (view.rank < kMaxRank)
      view.shape[view.rank++] = size;
  int64_t stride = 1;
  for (int i = view.rank; i-- > 0; stride *= view.shape[i])
    view.strides[i] = stride;
  return view;
}

int64_t TensorView::numElements() const {
  int64_t count = 1;
  for (int i = 0; i < rank; ++i)
    count *= shape[i];
  return count;
}

Status scheduler::checkTensorView(const char *name, const TensorView &tensor) {
  // Calls of known shapes allocate nothing: texts are for errors only.
  auto error = [&](const std::string &rest) {
    return Status::invalidArgument(std::string(name) + ": expected " + rest);
  };
  if (tensor.rank < 0 || tensor.rank > TensorView::kMaxRank)
    return error("a rank from 0 to " + std::to_string(TensorView::kMaxRank) +
                 ", got " + std::to_string(tensor.rank));
  int64_t count = 1;
  bool empty = false;
  for (int i = 0; i < tensor.rank; ++i) {
    if (tensor.shape[i] < 0)
      return error("sizes of at least 0, got " +
                   std::to_string(tensor.shape[i]) + " for axis " +
                   std::to_string(i));
    empty |= tensor.shape[i] == 0;
  }
  for (int i = 0; i < tensor.rank && !empty; ++i)
    if (__builtin_mul_overflow(count, tensor.shape[i], &count))
      return error("fewer than 2^63 elements, got more");
  if (!tensor.data && !empty)
    return error("data, got a null pointer");
  return Status::ok();
}

static float widen16(uint16_t bits, ElementType type) {
  float value;
  (type == ElementType::F16 ? kPortableKernels.widenF16
                            : kPortableKernels.widenBF16)(&bits, &value, 1);
  return value;
}

double scheduler::loadElement(const void *data, ElementType type,
                              int64_t offset) {
  switch (type) {
  case ElementType::F64:
    return static_cast<const double *>(data)[offset];
  case ElementType::F32:
    return static_cast<const float *>(data)[offset];
  case ElementType::F16:
  case ElementType::BF16:
    return widen16(static_cast<const uint16_t *>(data)[offset], type);
  }
  return 0;
}

TensorView scheduler::mergeAxes(const TensorView &tensor) {
  TensorView merged = tensor;
  int axes = 0;
  for (int i = 0; i < tensor.rank; ++i) {
    if (tensor.shape[i] == 1)
      continue;
    merged.shape[axes] = tensor.shape[i];
    merged.strides[axes] = tensor.strides[i];
    ++axes;
  }
  int64_t *shape = merged.shape, *strides = merged.strides;
  // The axis with the smallest stride last: the order of elements is free, that
  // of memory is fast. A stable sort of at most eight.
  for (int i = 1; i < axes; ++i)
    for (int j = i;
         j > 0 && std::llabs(strides[j - 1]) < std::llabs(strides[j]); --j) {
      std::swap(strides[j - 1], strides[j]);
      std::swap(shape[j - 1], shape[j]);
    }
  // Axes that lie one in the other are one.
  merged.rank = 0;
  for (int i = 0; i < axes; ++i) {
    int &kept = merged.rank;
    if (kept && strides[kept - 1] == shape[i] * strides[i]) {
      shape[kept - 1] *= shape[i];
      strides[kept - 1] = strides[i];
      continue;
    }
    shape[kept] = shape[i];
    strides[kept] = strides[i];
    ++kept;
  }
  return merged;
}

TensorReader::TensorReader(const TensorView &tensor,
                           const EstimatorKernels &kernels)
    : kernels(kernels), view(mergeAxes(tensor)), total(tensor.numElements()) {}

void TensorReader::read(float *to, int64_t offset, int64_t step,
                        int64_t count) const {
  switch (view.type) {
  case ElementType::F32: {
    const float *from = static_cast<const float *>(view.data) + offset;
    if (step == 1) {
      std::memcpy(to, from, count * sizeof(float));
      return;
    }
    for (int64_t i = 0; i < count; ++i)
      to[i] = from[i * step];
    return;
  }
  case ElementType::F16:
  case ElementType::BF16: {
    const uint16_t *from = static_cast<const uint16_t *>(view.data) + offset;
    auto widen =
        view.type == ElementType::F16 ? kernels.widenF16 : kernels.widenBF16;
    if (step == 1)
      return widen(from, to, count);
    uint16_t gathered[64];
    for (int64_t done = 0; done < count; done += 64) {
      int64_t part = std::min<int64_t>(64, count - done);
      for (int64_t i = 0; i < part; ++i)
        gathered[i] = from[(done + i) * step];
      widen(gathered, to + done, part);
    }
    return;
  }
  case ElementType::F64:
    for (int64_t i = 0; i < count; ++i)
      to[i] = static_cast<float>(
          static_cast<const double *>(view.data)[offset + i * step]);
    return;
  }
}

void TensorReader::read(uint16_t *to, int64_t offset, int64_t step,
                        int64_t count) const {
  const uint16_t *from = static_cast<const uint16_t *>(view.data) + offset;
  for (int64_t i = 0; i < count; ++i)
    to[i] = from[i * step];
}

void TensorReader::read(double *to, int64_t offset, int64_t step,
                        int64_t count) const {
  for (int64_t i = 0; i < count; ++i)
    to[i] = loadElement(view.data, view.type, offset + i * step);
}
