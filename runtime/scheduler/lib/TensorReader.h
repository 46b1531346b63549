//===- TensorReader.h - Strided tensors, block by block ---------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_SCHEDULER_LIB_TENSORREADER_H
#define COREY_SCHEDULER_LIB_TENSORREADER_H

#include "EstimatorKernels.h"
#include "corey/Scheduler/Statistics.h"
#include "corey/Status.h"
#include <algorithm>
#include <cstring>

namespace corey::scheduler {

/// Errors: InvalidArgument for what is no tensor.
Status checkTensorView(const char *name, const TensorView &tensor);

/// Element `offset` of memory of type `type`, exactly.
double loadElement(const void *data, ElementType type, int64_t offset);

/// The same elements with as few axes as they need, none of size 1, those with
/// the largest strides first.
TensorView mergeAxes(const TensorView &tensor);

/// Reads the elements of a tensor, in an order of its own that depends on shape
/// and strides only, as blocks of f32 or f64.
class TensorReader {
public:
  TensorReader(const TensorView &tensor, const EstimatorKernels &kernels);

  int64_t size() const { return total; }

  /// Calls use(const T *x, int64_t count) with the elements [begin, end) of the
  /// order, at most kBlock at a time. T is float (for f32, f16 and bf16),
  /// double (for any type) or uint16_t (the bits of f16 and bf16).
  template <typename T, typename Use>
  void forEach(int64_t begin, int64_t end, Use use) const {
    alignas(64) T buffer[kBlock];
    int64_t filled = 0;
    int axes = view.rank;
    const int64_t *shape = view.shape, *strides = view.strides;
    int64_t run = axes ? shape[axes - 1] : 1;
    while (begin < end) {
      // Where the element lies: few divisions, one set per run.
      int64_t rest = begin, offset = 0, inner = 0;
      for (int i = axes; i-- > 0;) {
        int64_t index = rest % shape[i];
        rest /= shape[i];
        offset += index * strides[i];
        if (i == axes - 1)
          inner = index;
      }
      int64_t count = std::min(run - inner, end - begin);
      int64_t step = axes ? strides[axes - 1] : 1;
      // What needs no conversion is used where it lies.
      bool inPlace =
          sizeof(T) == 4 ? view.type == ElementType::F32 : sizeof(T) == 2;
      if (inPlace && step == 1 && filled == 0 && count >= 64) {
        count = std::min(count, kBlock);
        use(static_cast<const T *>(view.data) + offset, count);
        begin += count;
        continue;
      }
      count = std::min(count, kBlock - filled);
      read(buffer + filled, offset, step, count);
      filled += count;
      begin += count;
      if (filled == kBlock || begin == end) {
        use(static_cast<const T *>(buffer), filled);
        filled = 0;
      }
    }
    if (filled)
      use(static_cast<const T *>(buffer), filled);
  }

private:
  void read(uint16_t *to, int64_t offset, int64_t step, int64_t count) const;
  void read(float *to, int64_t offset, int64_t step, int64_t count) const;
  void read(double *to, int64_t offset, int64_t step, int64_t count) const;

  const EstimatorKernels &kernels;
  TensorView view;
  int64_t total;
};

} // namespace corey::scheduler

#endif // COREY_SCHEDULER_LIB_TENSORREADER_H
