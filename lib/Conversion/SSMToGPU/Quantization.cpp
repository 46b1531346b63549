//===- Quantization.cpp - GPU kernels of quantization ---------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// A scale per row is found and used by the block that has the row. Where more
// than a block shares a scale there are three kernels: the largest magnitudes
// of parts, the scales from them, the quotients.
//
//===----------------------------------------------------------------------===//

#include "GPULowering.h"
#include <numeric>

using namespace mlir;
using namespace corey;
using namespace corey::ssm;

/// Threads of a block of the kernels whose blocks have no shape of their own.
static constexpr int64_t kThreads = 256;

namespace {
/// A tensor as runs of `width` elements of the last axis, one after another.
struct Runs {
  Runs(GPULowering &e, Value memref, int64_t width)
      : e(e), memref(memref), width(width) {
    Value size =
        e.dim(memref, cast<MemRefType>(memref.getType()).getRank() - 1);
    // The width is 1 where the size is not known.
    perRow = width == 1 ? size : e.ceilDiv(size, e.index(width));
    total = e.mul(e.rowCount(memref), perRow);
  }

  struct Position {
    Vals leading;
    Val last;
  };
  Position at(KernelBuilder &k, Val index) const {
    Val runs = k.i64Argument(perRow);
    auto constant = runs.constant();
    Val row = constant ? index / double(*constant) : index / runs;
    return {rowIndices(e, k, memref, row),
            (index - row * runs) * double(width)};
  }

  /// Launches `k` with a thread for every run.
  void launch(KernelBuilder &k) const {
    k.launch({e.ceilDiv(total, e.index(kThreads)), {}, {}});
  }
  Val threadIndex(KernelBuilder &k) const {
    return k.toI64(k.blockIdx('x')) * double(kThreads) + k.toI64(k.threadIdx());
  }

  GPULowering &e;
  Value memref;
  int64_t width;
  Value perRow, total;
};
} // namespace

/// The scales of the elements at `leading` and from `last`: one, or `width`
/// where every element has its own, of which `aligned` are loaded at once.
static Vals loadScales(KernelBuilder &k, const DeviceTensor &scale,
                       Granularity granularity, ArrayRef<Val> leading, Val last,
                       int64_t width, int64_t aligned) {
  switch (granularity) {
  case Granularity::Tensor:
    return {scale.loadScalar({}, k.i32(0))};
  case Granularity::Token:
    if (leading.empty())
      return {scale.loadScalar({}, k.i32(0))};
    return {scale.loadScalar(leading.drop_back(), leading.back())};
  case Granularity::Channel: {
    Vals factors;
    aligned = std::gcd(aligned, width);
    for (int64_t i = 0; i < width; i += aligned)
      llvm::append_range(
          factors, k.unpack(k.load(k.offset(scale.at({}, last), 4 * i),
                                   k.packedType(k.f32Type(), aligned), true),
                            k.f32Type(), aligned));
    return factors;
  }
  }
  llvm_unreachable("granularity has three values");
}

/// The larger of `best` and the magnitudes of `values`; NaN is left out.
static Val largerOf(KernelBuilder &k, Val best, ArrayRef<Val> values) {
  for (Val v : values)
    best = k.max(best, k.abs(v));
  return best;
}

namespace {
class QuantizeKernels {
public:
  QuantizeKernels(GPULowering &e, QuantizeOp op)
      : e(e), op(op), granularity(op.getGranularity()),
        limit(
            cast<ShapedType>(op.getQ().getType()).getElementType().isInteger(8)
                ? 127.0
                : 448.0) {}

  void emit() {
    x = e.buffer(op.getX());
    q = e.allocate(0);
    scale = e.allocate(1);
    width = std::gcd(rowAlignment(op.getX()), e.outputAlignment(q));
    switch (granularity) {
    case Granularity::Token:
      emitRows();
      break;
    case Granularity::Tensor:
      emitScale(emitMaxima());
      emitQuotients();
      break;
    case Granularity::Channel:
      emitColumnScales(emitColumnMaxima());
      emitQuotients();
      break;
    }
    e.replaceWith({q, scale});
  }

private:
  Val scaleOf(KernelBuilder &k, Val best) const {
    return k.select(best == 0.0, k.f32(1), best / k.f32(limit));
  }

  Vals loadRun(KernelBuilder &k, const DeviceTensor &tensor,
               Val pointer) const {
    return k.unpack(k.load(pointer, k.packedType(tensor.element, width), true),
                    tensor.element, width);
  }

  /// Writes the quotients of `values` by `factors`, one or as many.
  void storeRun(KernelBuilder &k, const DeviceTensor &out, Val pointer,
                ArrayRef<Val> values, ArrayRef<Val> factors) const {
    Vals results;
    for (auto [i, v] : llvm::enumerate(values)) {
      Val r = v / factors[factors.size() == 1 ? 0 : i];
      // Comparisons, which NaN passes.
      r = k.select(r < -limit, k.f32(-limit), r);
      r = k.select(r > limit, k.f32(limit), r);
      results.push_back(r);
    }
    k.store(k.pack(results, out.element), pointer);
  }

  void emitRows();
  Value emitMaxima();
  void emitScale(Value maxima);
  Value emitColumnMaxima();
  void emitColumnScales(Value maxima);
  void emitQuotients();

  GPULowering &e;
  QuantizeOp op;
  Granularity granularity;
  double limit;
  Value x, q, scale;
  /// Elements that are loaded and written at once.
  int64_t width = 1;
};
} // namespace

/// One block per row, which it reads twice.
void QuantizeKernels::emitRows() {
  Runs runs(e, x, width);
  int64_t size = cast<ShapedType>(op.getX().getType()).getShape().back();
  int64_t threads = kThreads;
  if (!ShapedType::isDynamic(size)) {
    threads = 32;
    while (threads < 512 && size / width > 2 * threads)
      threads *= 2;
  }
  KernelBuilder k(e.host, e.loc, e.kernels, "quantize_rows", {threads, 0});
  DeviceTensor in(e, k, x), out(e, k, q), scales(e, k, scale);
  Value rows = e.rowCount(x);
  Val row = rowOfBlock(k);
  // The same for all threads of a block.
  k.ifThen(row < k.i32Argument(rows), [&] {
    Vals leading = rowIndices(e, k, x, row);
    Val from = in.at(leading, k.i32(0)), to = out.at(leading, k.i32(0));
    Val count = k.i32Argument(runs.perRow);
    auto offsetOf = [&](Val run, const DeviceTensor &tensor) {
      return k.toI64(run) * double(width * tensor.bytes());
    };
    Vals best = k.forLoop(
        k.threadIdx(), count, threads, {k.f32(0)},
        [&](Val run, ArrayRef<Val> largest) -> Vals {
          return {largerOf(k, largest[0],
                           loadRun(k, in, k.offset(from, offsetOf(run, in))))};
        });
    best = k.reduceBlock(best, [&](ArrayRef<Val> a, ArrayRef<Val> b) -> Vals {
      return {k.max(a[0], b[0])};
    });
    Val factor = scaleOf(k, best[0]);
    k.ifThen(k.threadIdx() == 0, [&] {
      k.store(factor,
              scales.at(ArrayRef(leading).drop_back(leading.empty() ? 0 : 1),
                        leading.empty() ? k.i32(0) : leading.back()));
    });
    k.forLoop(k.threadIdx(), count, threads, [&](Val run) {
      storeRun(k, out, k.offset(to, offsetOf(run, out)),
               loadRun(k, in, k.offset(from, offsetOf(run, in))), factor);
    });
  });
  k.launch(e.gridOf(e.index(1), rows));
}

/// The largest magnitude of what each block has, a block of consecutive runs.
Value QuantizeKernels::emitMaxima() {
  Runs runs(e, x, width);
  // Some loads for each thread, blocks for each multiprocessor.
  Value blocks = e.max(e.min(e.ceilDiv(runs.total, e.index(4 * kThreads)),
                             e.index(8 * e.target.multiprocessors)),
                       e.index(1));
  Value perBlock = e.ceilDiv(runs.total, blocks);
  Value maxima = e.workspace({blocks}, e.host.getF32Type());
  KernelBuilder k(e.host, e.loc, e.kernels, "quantize_maxima", {kThreads, 0});
  DeviceTensor in(e, k, x), out(e, k, maxima);
  Val count = k.i64Argument(perBlock);
  Val first = k.toI64(k.blockIdx('x')) * count;
  Val end = k.min(first + count, k.i64Argument(runs.total));
  Vals best = k.forLoop(
      first + k.toI64(k.threadIdx()), end, kThreads, {k.f32(0)},
      [&](Val index, ArrayRef<Val> largest) -> Vals {
        auto [leading, last] = runs.at(k, index);
        return {largerOf(k, largest[0], loadRun(k, in, in.at(leading, last)))};
      });
  best = k.reduceBlock(best, [&](ArrayRef<Val> a, ArrayRef<Val> b) -> Vals {
    return {k.max(a[0], b[0])};
  });
  k.ifThen(k.threadIdx() == 0,
           [&] { k.store(best[0], out.at({}, k.blockIdx('x'))); });
  k.launch({blocks, {}, {}});
  return maxima;
}

/// One block makes the scale of all maxima.
void QuantizeKernels::emitScale(Value maxima) {
  KernelBuilder k(e.host, e.loc, e.kernels, "quantize_scale", {kThreads, 0});
  DeviceTensor in(e, k, maxima), out(e, k, scale);
  Vals best =
      k.forLoop(k.threadIdx(), k.i32Argument(e.dim(maxima, 0)), kThreads,
                {k.f32(0)}, [&](Val i, ArrayRef<Val> largest) -> Vals {
                  return {k.max(largest[0], in.loadScalar({}, i))};
                });
  best = k.reduceBlock(best, [&](ArrayRef<Val> a, ArrayRef<Val> b) -> Vals {
    return {k.max(a[0], b[0])};
  });
  k.ifThen(k.threadIdx() == 0,
           [&] { k.store(scaleOf(k, best[0]), out.at({}, k.i32(0))); });
  k.launch({});
}

/// The largest magnitudes of columns, [parts, D]: a block has a part of the
/// rows, 32 runs of columns across its lanes and a row for each warp at a time.
Value QuantizeKernels::emitColumnMaxima() {
  constexpr int64_t warps = kThreads / 32;
  Runs runs(e, x, width);
  Value rows = e.rowCount(x);
  Value parts = e.max(e.min(e.ceilDiv(rows, e.index(8 * warps)), e.index(128)),
                      e.index(1));
  Value perPart = e.ceilDiv(rows, parts);
  Value size = e.dim(x, cast<MemRefType>(x.getType()).getRank() - 1);
  Value maxima = e.workspace({parts, size}, e.host.getF32Type());
  KernelBuilder k(e.host, e.loc, e.kernels, "quantize_column_maxima",
                  {kThreads, 0});
  DeviceTensor in(e, k, x), out(e, k, maxima);
  Val part = k.blockIdx('y');
  Val first = part * k.i32Argument(perPart);
  Val end = k.min(first + k.i32Argument(perPart), k.i32Argument(rows));
  Val count = k.i32Argument(runs.perRow);
  Val firstRun = k.blockIdx('x') * 32.0;
  // Runs beyond the last are the last again, and not written.
  Val run = k.min(firstRun + k.lane(), count - 1.0);
  Val last = k.toI64(run) * double(width);
  Vals best = k.forLoop(first + k.warp(), end, warps, Vals(width, k.f32(0)),
                        [&](Val row, ArrayRef<Val> largest) -> Vals {
                          Vals values = loadRun(
                              k, in, in.at(rowIndices(e, k, x, row), last));
                          Vals larger;
                          for (auto [v, old] : llvm::zip_equal(values, largest))
                            larger.push_back(largerOf(k, old, v));
                          return larger;
                        });
  int64_t columns = 32 * width;
  Val memory = k.shared(4 * warps * columns);
  Val mine = k.offset(
      memory, (k.warp() * double(columns) + k.lane() * double(width)) * 4.0);
  for (auto [i, v] : llvm::enumerate(best))
    k.store(v, k.offset(mine, 4 * static_cast<int64_t>(i)));
  k.syncBlock();
  // No more columns than threads.
  Val column = k.threadIdx();
  Val place = k.toI64(firstRun) * double(width) + k.toI64(column);
  k.ifThen((column < double(columns)) & (place < k.i64Argument(size)), [&] {
    Val from = k.offset(memory, column * 4.0);
    Val largest = k.load(from, k.f32Type());
    for (int64_t i = 1; i < warps; ++i)
      largest =
          k.max(largest, k.load(k.offset(from, 4 * i * columns), k.f32Type()));
    k.store(largest, out.at({part}, place));
  });
  k.launch({e.ceilDiv(runs.perRow, e.index(32)), parts, {}});
  return maxima;
}

/// One thread per column makes the scale of its parts.
void QuantizeKernels::emitColumnScales(Value maxima) {
  KernelBuilder k(e.host, e.loc, e.kernels, "quantize_column_scales",
                  {kThreads, 0});
  DeviceTensor in(e, k, maxima), out(e, k, scale);
  Value size = e.dim(maxima, 1);
  Val column = k.blockIdx('x') * double(kThreads) + k.threadIdx();
  k.ifThen(column < k.i32Argument(size), [&] {
    Vals best =
        k.forLoop(k.i32(0), k.i32Argument(e.dim(maxima, 0)), 1, {k.f32(0)},
                  [&](Val part, ArrayRef<Val> largest) -> Vals {
                    return {k.max(largest[0], in.loadScalar({part}, column))};
                  });
    k.store(scaleOf(k, best[0]), out.at({}, column));
  });
  k.launch({e.ceilDiv(size, e.index(kThreads)), {}, {}});
}

/// One thread per run.
void QuantizeKernels::emitQuotients() {
  Runs runs(e, x, width);
  KernelBuilder k(e.host, e.loc, e.kernels, "quantize", {kThreads, 0});
  DeviceTensor in(e, k, x), out(e, k, q), scales(e, k, scale);
  Val index = runs.threadIndex(k);
  k.ifThen(index < k.i64Argument(runs.total), [&] {
    auto [leading, last] = runs.at(k, index);
    storeRun(k, out, out.at(leading, last),
             loadRun(k, in, in.at(leading, last)),
             loadScales(k, scales, granularity, leading, last, width,
                        /*aligned=*/4));
  });
  runs.launch(k);
}

namespace {
struct QuantizeLowering : public GPULoweringPattern<QuantizeOp> {
  using GPULoweringPattern::GPULoweringPattern;
  LogicalResult matchAndRewrite(QuantizeOp op,
                                PatternRewriter &rewriter) const override {
    GPULowering e(rewriter, op, target);
    QuantizeKernels(e, op).emit();
    return success();
  }
};

struct DequantizeLowering : public GPULoweringPattern<DequantizeOp> {
  using GPULoweringPattern::GPULoweringPattern;
  LogicalResult matchAndRewrite(DequantizeOp op,
                                PatternRewriter &rewriter) const override {
    GPULowering e(rewriter, op, target);
    Value q = e.buffer(op.getQ()), scale = e.buffer(op.getScale());
    Value x = e.allocate(0);
    int64_t width = std::gcd(rowAlignment(op.getQ()), e.outputAlignment(x));
    Runs runs(e, q, width);
    KernelBuilder k(e.host, e.loc, e.kernels, "dequantize", {kThreads, 0});
    DeviceTensor in(e, k, q), out(e, k, x), scales(e, k, scale);
    Val index = runs.threadIndex(k);
    k.ifThen(index < k.i64Argument(runs.total), [&] {
      auto [leading, last] = runs.at(k, index);
      Vals values = k.unpack(
          k.load(in.at(leading, last), k.packedType(in.element, width), true),
          in.element, width);
      Vals factors = loadScales(k, scales, op.getGranularity(), leading, last,
                                width, rowAlignment(op.getScale()));
      for (auto [i, v] : llvm::enumerate(values))
        v = v * factors[factors.size() == 1 ? 0 : i];
      k.store(k.pack(values, out.element), out.at(leading, last));
    });
    runs.launch(k);
    e.replaceWith(x);
    return success();
  }
};
} // namespace

void corey::populateGPUQuantizationLowerings(RewritePatternSet &patterns,
                                             GPUTarget target) {
  patterns.add<QuantizeLowering, DequantizeLowering>(patterns.getContext(),
                                                     target);
}
