//===- Lookup.cpp - GPU kernels of the ends of a language model -----------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "GPULowering.h"
#include <limits>
#include <numeric>

using namespace mlir;
using namespace corey;
using namespace corey::ssm;

namespace {
//===----------------------------------------------------------------------===//
// embedding
//===----------------------------------------------------------------------===//

/// One thread per run of elements that are copied at once. The thread with the
/// first of a row reports an id that has none.
struct EmbeddingLowering : public GPULoweringPattern<EmbeddingOp> {
  using GPULoweringPattern::GPULoweringPattern;

  static constexpr int64_t kThreads = 128;

  LogicalResult matchAndRewrite(EmbeddingOp op,
                                PatternRewriter &rewriter) const override {
    GPULowering e(rewriter, op, target);
    Value idBuffer = e.buffer(op.getIds()), out = e.allocate(0);
    auto type = cast<ShapedType>(op.getTable().getType());
    int64_t size = type.getDimSize(1);
    int64_t width =
        std::gcd(e.outputAlignment(out), rowAlignment(op.getTable()));
    int64_t perRow = size / width;
    Value rows = e.rowCount(idBuffer, /*inner=*/0);
    Value error = e.errorRecord();

    KernelBuilder k(e.host, e.loc, e.kernels, "embedding", {kThreads, 0});
    Value tableBuffer = e.buffer(op.getTable());
    DeviceTensor ids(e, k, idBuffer), table(e, k, tableBuffer);
    DeviceTensor y(e, k, out);
    Val record = k.pointer(error);
    Val numRows = type.isDynamicDim(0) ? k.i64Argument(e.dim(tableBuffer, 0))
                                       : k.i64(type.getDimSize(0));
    Val index =
        k.toI64(k.blockIdx('x')) * double(kThreads) + k.toI64(k.threadIdx());
    Val row = index / double(perRow);
    k.ifThen(row < k.i64Argument(rows), [&] {
      Val piece = index % perRow;
      Vals at = rowIndices(e, k, idBuffer, row, /*inner=*/0);
      ArrayRef<Val> leading = ArrayRef(at).drop_back(at.empty() ? 0 : 1);
      Val last = at.empty() ? k.i64(0) : at.back();
      Val id = k.toI64(k.load(ids.at(leading, last), ids.element, true));
      Val isBad = (id < 0) | (id >= numRows);
      k.ifThen(isBad & (piece == 0), [&] {
        recordError(k, record, {DeviceError::Index, id, numRows});
      });
      auto copy = [&] {
        Val from = k.max(k.min(id, numRows - 1), k.i64(0));
        Val d = piece * double(width);
        Val copied = k.load(table.at({from}, d),
                            k.packedType(table.element, width), true);
        k.store(copied, y.at(at, d));
      };
      // An empty table has no row to clamp to.
      if (type.isDynamicDim(0))
        k.ifThen(numRows > 0, copy);
      else
        copy();
    });
    k.launch({e.ceilDiv(e.mul(rows, perRow), e.index(kThreads)), {}, {}});
    e.replaceWith(out);
    return success();
  }
};

//===----------------------------------------------------------------------===//
// argmax
//===----------------------------------------------------------------------===//

/// One block per row. Elements are compared as integers of the same order.
struct ArgmaxLowering : public GPULoweringPattern<ArgmaxOp> {
  using GPULoweringPattern::GPULoweringPattern;

  LogicalResult matchAndRewrite(ArgmaxOp op,
                                PatternRewriter &rewriter) const override {
    GPULowering e(rewriter, op, target);
    Value xBuffer = e.buffer(op.getX()), out = e.allocate(0);
    int64_t size = cast<ShapedType>(op.getX().getType()).getShape().back();
    int64_t width = rowAlignment(op.getX()), chunks = size / width;
    int64_t threads = 32;
    while (threads < 1024 && chunks > 2 * threads)
      threads *= 2;
    Value rows = e.rowCount(xBuffer);

    KernelBuilder k(e.host, e.loc, e.kernels, "argmax", {threads, 0});
    DeviceTensor x(e, k, xBuffer), ids(e, k, out);
    Val row = rowOfBlock(k);
    // The same for all threads of a block.
    k.ifThen(row < k.i32Argument(rows), [&] {
      Vals leading = rowIndices(e, k, xBuffer, row);
      Val start = x.at(leading, k.i32(0));
      // Below every element, and behind all of them.
      constexpr double none = std::numeric_limits<int32_t>::min();
      constexpr double behind = std::numeric_limits<int32_t>::max();
      Vals best = k.forLoop(
          k.threadIdx(), k.i32(chunks), threads, {k.i32(none), k.i32(behind)},
          [&](Val chunk, ArrayRef<Val> in) -> Vals {
            Val offset = k.toI64(chunk) * double(width * x.bytes());
            Vals values = k.unpack(k.load(k.offset(start, offset),
                                          k.packedType(x.element, width), true),
                                   x.element, width);
            Val key = in[0], at = in[1];
            for (int64_t i = 0; i < width; ++i) {
              // A thread goes upwards: the first of equals stays.
              Val other = orderOf(k, values[i]);
              Val isLarger = other > key;
              key = k.select(isLarger, other, key);
              at = k.select(isLarger, chunk * double(width) + double(i), at);
            }
            return {key, at};
          });
      best = k.reduceBlock(best, [&](ArrayRef<Val> a, ArrayRef<Val> c) -> Vals {
        Val takes = (c[0] > a[0]) | ((c[0] == a[0]) & (c[1] < a[1]));
        return {k.select(takes, c[0], a[0]), k.select(takes, c[1], a[1])};
      });
      k.ifThen(k.threadIdx() == 0, [&] {
        Val id = ids.element.isInteger(64) ? k.toI64(best[1]) : best[1];
        k.store(id, ids.at(ArrayRef(leading).drop_back(leading.empty() ? 0 : 1),
                           leading.empty() ? k.i32(0) : leading.back()));
      });
    });
    k.launch(e.gridOf(e.index(1), rows));
    e.replaceWith(out);
    return success();
  }
};
} // namespace

void corey::populateGPULookupLowerings(RewritePatternSet &patterns,
                                       GPUTarget target) {
  patterns.add<EmbeddingLowering, ArgmaxLowering>(patterns.getContext(),
                                                  target);
}
