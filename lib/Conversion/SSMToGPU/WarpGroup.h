//===- WarpGroup.h - Tensor cores of warp groups ----------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// What kernels on tensor cores need beyond KernelBuilder: tiles in shared
// memory, matrix products of a warp (mma.sync) and, for sm_90a alone, those of
// a warp group (wgmma: four warps whose first has a number divisible by four)
// with the barriers by which groups of different roles hand tiles on. The PTX
// manual is the source of layouts and limits.
//
//===----------------------------------------------------------------------===//

#ifndef COREY_LIB_CONVERSION_SSMTOGPU_WARPGROUP_H
#define COREY_LIB_CONVERSION_SSMTOGPU_WARPGROUP_H

#include "KernelBuilder.h"

namespace corey {

/// The address of `pointer`, to shared memory, as the i32 that the functions
/// below take.
Val sharedAddress(KernelBuilder &k, Val pointer);

//===--- Tiles
//-----------------------------------------------------------------===//

/// A tile has rows of 128 bytes, 64 elements of 16 bits, whose eight pieces of
/// 16 bytes are permuted by the number of the row: neither a row nor a column
/// of pieces meets in the same banks. It starts at a multiple of 1024 bytes.
struct Tile {
  static constexpr int64_t kRowBytes = 128, kPieces = 8, kAlignment = 1024;
  static constexpr int64_t kColumns = 64;
  /// Bytes of `rows` rows.
  static constexpr int64_t bytes(int64_t rows) { return rows * kRowBytes; }
};

/// The address of a piece of the tile at `tile`.
Val tilePiece(KernelBuilder &k, Val tile, Val row, Val piece);

/// Copies 16 bytes from global to shared memory while the thread goes on, or
/// writes zeros where `count`, an i32 of 16 or 0, is 0. `toOffset` is added to
/// the address `to`.
void copyAsync16(KernelBuilder &k, Val to, int64_t toOffset, Val from,
                 Val count = Val());
/// Ends a group of the thread's copies.
void commitCopies(KernelBuilder &k);
/// Waits until at most `pending` of its groups are under way.
void waitCopies(KernelBuilder &k, int64_t pending);

/// Four 8 x 8 matrices of 16-bit elements between shared memory and registers:
/// lane i has the address of row i % 8 of matrix i / 8, and gets elements
/// (i / 4, 2 (i % 4)) and the next one of each; `isTransposed` of the transpose
/// in place of that. `offset` is added to the address. Stores need sm_90.
Vals loadMatrices(KernelBuilder &k, Val address, bool isTransposed,
                  int64_t offset = 0);
void storeMatrices(KernelBuilder &k, Val address, llvm::ArrayRef<Val> words,
                   bool isTransposed);

/// Products of the two halves of words; before sm_90 `isFused`, as those of
/// bf16 are part of sums only.
Val multiplyPairs(KernelBuilder &k, Val a, Val b, mlir::Type element,
                  bool isFused = false);

//===--- Products of a warp
//--------------------------------------------------------------===//

/// How a lane reads parts of 16 x 16 of the tile at an address: four matrices
/// of 8 x 8, of which the second is to the right of the first or below it.
/// The lane's address in parts at the tile's left edge.
Val tilePart(KernelBuilder &k, Val tile, bool isSecondBelow);
/// The part `column` elements, a multiple of 16, from the edge, and `offset`
/// bytes, of whole rows by 8, below. The next 64 columns are a tile of
/// `tileRows` rows further on.
Vals loadPart(KernelBuilder &k, Val part, int64_t column, int64_t offset,
              int64_t tileRows, bool isTransposed);

/// Adds a product of 16 x 16 times 16 x 16 to accumulators of f32. Operands and
/// accumulators are in registers as those of startProducts(), whose `columns`
/// would be 16; of `b` the rows are the operand's columns.
void addProduct(KernelBuilder &k, llvm::ArrayRef<Val> a, llvm::ArrayRef<Val> b,
                llvm::MutableArrayRef<Val> sums, mlir::Type element);

//===--- Barriers
//--------------------------------------------------------------===//

constexpr int64_t kBarrierBytes = 8;

/// A barrier at an address: a phase ends when `count` threads have arrived.
void initBarrier(KernelBuilder &k, Val barrier, int64_t count);
/// Makes initialised barriers known to the block; a barrier of its threads must
/// follow.
void fenceBarriers(KernelBuilder &k);
void arrive(KernelBuilder &k, Val barrier);
/// The thread arrives when what it has asked copyAsync16() for is there.
void arriveWithCopies(KernelBuilder &k, Val barrier);
/// Waits for the end of the phase of this parity: phases count from 0.
void waitBarrier(KernelBuilder &k, Val barrier, Val parity);
/// What threads have written to shared memory, or have waited for, is seen by
/// matrix products that are started after.
void fenceForProducts(KernelBuilder &k);

/// Waits until another block has raised the flag, an i32 in global memory: what
/// it wrote to `data` before is there then.
void waitForFlag(KernelBuilder &k, Val flag, Val data);
/// Raises it when all threads that come to `sync` have; `isFirst` is one of
/// them.
void raiseFlag(KernelBuilder &k, Val flag, Val data,
               llvm::function_ref<void()> sync, Val isFirst);

/// The thread's group of warps gives registers back, or waits for more.
void setRegisters(KernelBuilder &k, int64_t count, bool isMore);

//===--- Products of a warp group
//--------------------------------------------------------------===//

/// An operand in shared memory, made of tiles of 64 rows.
struct TileOperand {
  /// i64: what the hardware takes.
  Val descriptor;
  /// Bytes to add to its address, a multiple of 16.
  int64_t offset = 0;
  /// The tile's rows are the axis that is summed over.
  bool isTransposed = false;
};
/// `address` is that of the first tile; those of the next 64 columns follow.
/// Rows of a tile that is not transposed are an operand's rows; where it is,
/// they are summed over, and the next tile has the operand's next rows.
Val tileDescriptor(KernelBuilder &k, Val address, bool isTransposed);

/// One step of 16 of a product's sum: 64 x 16 times 16 x columns.
struct ProductStep {
  /// Four registers as KernelBuilder::pack makes them from accumulators, or
  /// none and `aTile`.
  Vals a;
  TileOperand aTile, b;
};

/// Starts sums of products on the tensor cores: columns / 2 accumulators of
/// f32, which are added to, or start at zero where `sums` is empty. The 4 i + j
/// th has row lane / 4 + 8 (j / 2) of the warp's 16 rows and column 8 i + 2
/// (lane % 4) + j % 2. Neither they nor what is read may be touched before
/// waitProducts(). `columns` is a multiple of 8, up to 256. The call ends a
/// group of products.
Vals startProducts(KernelBuilder &k, int64_t columns,
                   llvm::ArrayRef<ProductStep> steps, llvm::ArrayRef<Val> sums,
                   mlir::Type element);
/// Waits until at most `pending` groups of products are under way; returns the
/// accumulators that have got there.
Vals waitProducts(KernelBuilder &k, int64_t pending, llvm::ArrayRef<Val> sums);

} // namespace corey

#endif // COREY_LIB_CONVERSION_SSMTOGPU_WARPGROUP_H
