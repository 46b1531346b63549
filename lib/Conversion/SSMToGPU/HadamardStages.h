//===- HadamardStages.h - Hadamard transforms of a block --------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// A transform of n = 2^m elements is m stages of butterflies, one for each bit
// of an element's number, in any order. A stage takes place within a thread
// where the bit tells its registers apart, by a shuffle where it tells lanes
// apart. Threads load and store pieces of consecutive elements; in that layout
// the bits of an element's number are, from low to high,
//
//   within a piece | number of the thread | number of the piece
//
// A shuffle moves as many bytes as a load from shared memory. Up to four bits
// of the thread's number are done by shuffles. Of more, as many as registers
// can tell apart are done in a second layout, in which each thread has the
// elements that differ in these bits; the way there and back is through shared
// memory. Only bits beyond those are shuffled.
//
//===----------------------------------------------------------------------===//

#ifndef COREY_LIB_CONVERSION_SSMTOGPU_HADAMARDSTAGES_H
#define COREY_LIB_CONVERSION_SSMTOGPU_HADAMARDSTAGES_H

#include "KernelBuilder.h"
#include "llvm/Support/MathExtras.h"

namespace corey {

/// How threads share a transform. All numbers are powers of two, by logarithm.
struct HadamardTiling {
  /// Elements of a thread at most.
  static constexpr int64_t kMaxHeld = 6;
  /// Bits of a thread's number that shuffles do where registers are few.
  static constexpr int64_t kMaxShuffled = 4;

  HadamardTiling(int64_t block, int64_t count)
      : bits(llvm::Log2_64(block)), count(llvm::Log2_64(count)) {
    // A piece can hold several transforms. Else eight threads share one, more
    // if their pieces are too narrow to fill a cache line, or are too many.
    int64_t shared = this->count >= 2 ? 3 : 5;
    held = std::min(std::max(this->count, bits - shared), kMaxHeld);
    threads = std::max<int64_t>(bits - held, 0);
    exchanged = threads > kMaxShuffled && held == kMaxHeld
                    ? std::min(threads, held)
                    : 0;
    shuffled = threads - exchanged;
    // The second layout: its registers tell the lowest bits apart as far as
    // there are more of them than bits to be done.
    llvm::SmallVector<int64_t> rest;
    for (int64_t bit = 0; bit < bits; ++bit)
      if (bit < firstExchanged() || bit >= firstExchanged() + exchanged)
        rest.push_back(bit);
    int64_t spare = held - exchanged;
    if (!exchanged)
      return;
    registerBits.assign(rest.begin(), rest.begin() + spare);
    for (int64_t i = 0; i < exchanged; ++i)
      registerBits.push_back(firstExchanged() + i);
    threadBits.assign(rest.begin() + spare, rest.end());
  }

  int64_t pieces() const { return int64_t(1) << (held - count); }
  /// Elements that the threads of a transform hold together: those of the
  /// transform, or of the several that a piece has.
  int64_t span() const { return int64_t(1) << (held + threads); }
  int64_t firstExchanged() const { return count + shuffled; }
  /// The lowest bit of the number of a piece.
  int64_t firstOfPiece() const { return bits - (held - count); }
  /// Words between what two pieces of a thread hold, beyond the elements: lanes
  /// that differ in the number of a piece in the second layout, after those
  /// that differ in the lowest bits, fall into other banks.
  int64_t padding() const {
    return firstExchanged() < 5 ? int64_t(1) << firstExchanged() : 0;
  }
  int64_t sharedWords() const {
    return exchanged ? (int64_t(1) << bits) + pieces() * padding() : 0;
  }
  /// Of the elements of an 8-element piece, the two halves are swapped in every
  /// other group of four pieces: eight lanes that write halves at once cover
  /// all banks.
  bool swapsHalves() const { return count == 3; }

  /// Bits of an element's number, elements of a piece and of a thread, threads
  /// of a transform.
  int64_t bits, count, held, threads;
  /// Bits of a thread's number: the lowest, and those above.
  int64_t shuffled, exchanged;
  /// What registers and threads tell apart in the second layout.
  llvm::SmallVector<int64_t> registerBits, threadBits;
};

/// Transforms what threads hold of spans, one each, in the layout of pieces:
/// `thread` is the number of a thread among those of its span, `span` the
/// number of its span among the `spans` of the block. All threads of the block
/// must come; the threads of a span must be neighbours, from a multiple of
/// their number on.
void emitHadamardStages(KernelBuilder &k, const HadamardTiling &tiling,
                        Val thread, Val span, int64_t spans,
                        llvm::MutableArrayRef<Val> values);

} // namespace corey

#endif // COREY_LIB_CONVERSION_SSMTOGPU_HADAMARDSTAGES_H
