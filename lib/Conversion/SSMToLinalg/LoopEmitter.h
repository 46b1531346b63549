//===- LoopEmitter.h - Loops over vectors of channels -----------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_LIB_CONVERSION_SSMTOLINALG_LOOPEMITTER_H
#define COREY_LIB_CONVERSION_SSMTOLINALG_LOOPEMITTER_H

#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/IR/Builders.h"
#include "llvm/ADT/DenseMap.h"
#include <functional>

namespace corey {

/// What the loops are emitted for.
struct VectorTarget {
  /// f32 elements of a vector register: 16 with AVX-512, else 8.
  int64_t lanes = 8;
  /// Vector registers: 32 with AVX-512, else 16.
  int64_t registers = 16;
  bool hasAVX512() const { return lanes == 16; }
};

/// Builds scf, arith, vector and memref ops with little ceremony. Arithmetic is
/// f32 throughout; loads widen and stores round. A vector of `lanes` elements
/// is a `vector<lanes x f32>` for every lane count, 1 included.
class LoopEmitter {
public:
  using Value = mlir::Value;
  using Body = llvm::function_ref<void(Value iv)>;
  using Values = llvm::SmallVector<Value>;

  LoopEmitter(mlir::OpBuilder &builder, mlir::Location loc, VectorTarget target)
      : b(builder), loc(loc), target(target) {}

  mlir::OpBuilder &b;
  mlir::Location loc;
  VectorTarget target;

  //===--- Index arithmetic
  //-------------------------------------------------===//
  Value index(int64_t value);
  Value add(Value lhs, Value rhs);
  Value add(Value lhs, int64_t rhs);
  Value sub(Value lhs, Value rhs);
  Value mul(Value lhs, Value rhs);
  Value mul(Value lhs, int64_t rhs);
  Value div(Value lhs, int64_t rhs);
  Value rem(Value lhs, int64_t rhs);
  Value min(Value lhs, Value rhs);
  Value max(Value lhs, Value rhs);
  Value dim(Value memref, int64_t dim);

  //===--- f32 arithmetic, on scalars and vectors
  //---------------------------===//
  mlir::VectorType vectorType(int64_t lanes);
  /// A constant of the type of `like`.
  Value constantLike(Value like, double value);
  Value constant(double value, int64_t lanes);
  Value scalar(double value);
  Value addf(Value lhs, Value rhs);
  Value subf(Value lhs, Value rhs);
  Value mulf(Value lhs, Value rhs);
  Value divf(Value lhs, Value rhs);
  Value maxf(Value lhs, Value rhs);
  Value fma(Value a, Value b, Value c);
  Value negf(Value value);
  Value splat(Value scalar, int64_t lanes);
  /// Sum of the lanes of a vector, by halves.
  Value sumLanes(Value vector);

  //===--- Elementary functions (see VectorMath.cpp)
  //------------------------===//
  /// 2^x, within 2 ulp where the result is normal; smaller results may be
  /// 2^-126. NaN stays NaN in effect: callers multiply by the argument.
  /// With `nonPositive`, x must not be positive.
  Value exp2(Value x, bool nonPositive = false);
  /// e^x; rounds, overflows and underflows as it should.
  Value exp(Value x);
  /// e^x for x <= 0, at least 2^-126; NaN gives anything.
  Value expNonPositive(Value x);
  /// x, with every NaN replaced by the one of arithmetic: exp2() adds to the
  /// bits of its result, and needs the low bits of a NaN to be zero.
  Value canonicalNaN(Value x);
  /// log(1 + exp(x)).
  Value softplus(Value x);
  /// x / (1 + exp(-x)).
  Value silu(Value x);

  //===--- Memory
  //-----------------------------------------------------------===//
  /// Has loads from `memref` compute a value instead: `compute` gets the
  /// indices and the lanes, 0 for a scalar, and returns f32. The memref only
  /// lends its sizes.
  using Compute = std::function<Value(mlir::ValueRange indices, int64_t lanes)>;
  void computeOnLoad(Value memref, Compute compute);
  /// Has stores to `memref` write what `compute` makes of the value.
  using Transform = std::function<Value(Value value, mlir::ValueRange indices,
                                        int64_t lanes)>;
  void transformOnStore(Value memref, Transform transform);

  /// Loads `lanes` consecutive elements of the last axis, as f32.
  Value load(Value memref, mlir::ValueRange indices, int64_t lanes);
  /// Loads one element, as f32.
  Value loadScalar(Value memref, mlir::ValueRange indices);
  void store(Value vector, Value memref, mlir::ValueRange indices);
  void storeScalar(Value scalar, Value memref, mlir::ValueRange indices);
  /// Brings the line of an element into the cache.
  void prefetch(Value memref, mlir::ValueRange indices, bool write);
  /// f32 scratch of the block being built, 64-byte aligned: on the stack, or
  /// allocated where it is large.
  Value scratch(llvm::ArrayRef<int64_t> shape);

  //===--- Control flow
  //-----------------------------------------------------===//
  void forLoop(Value lower, Value upper, Value step, Body body);
  void forLoop(int64_t lower, int64_t upper, int64_t step, Body body);
  Values forLoop(Value lower, Value upper, Value step, mlir::ValueRange inits,
                 llvm::function_ref<Values(Value iv, mlir::ValueRange)> body);
  /// Independent iterations from 0 to `uppers`; run by the thread pool.
  void parallel(mlir::ValueRange uppers,
                llvm::function_ref<void(mlir::ValueRange ivs)> body);
  void ifThen(Value condition, llvm::function_ref<void()> then,
              llvm::function_ref<void()> otherwise = nullptr);
  Value cmp(mlir::arith::CmpIPredicate predicate, Value lhs, Value rhs);

  /// Calls `body` once per run of lanes of a static extent: full vectors of
  /// `lanes` in a loop, then what remains as one narrower vector.
  void forLanes(int64_t extent, int64_t lanes,
                llvm::function_ref<void(Value offset, int64_t lanes)> body);

private:
  Value convert(Value value, mlir::Type elementType);

  llvm::DenseMap<Value, Compute> computed;
  llvm::DenseMap<Value, Transform> transformed;
};

} // namespace corey

#endif // COREY_LIB_CONVERSION_SSMTOLINALG_LOOPEMITTER_H
