//===- Splits.h - Cutting sequences into segments ---------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_SCHEDULER_LIB_SPLITS_H
#define COREY_SCHEDULER_LIB_SPLITS_H

#include "corey/Scheduler/Problem.h"
#include <algorithm>
#include <numeric>

namespace corey::scheduler {

/// The ways to cut sequences of an SSD into segments that a kernel works on at
/// a time, by their number: a segment is made of whole tiles, as a part of one
/// costs as much, so that chunks of other sizes, powers of two among them,
/// mostly leave the last segment short and the others longer than they need be.
struct Splits {
  Splits(const Problem &problem, const Variant &variant, int64_t units)
      : length(problem.length) {
    int64_t granularity = std::max<int64_t>(variant.granularity, 1),
            tile = std::max<int64_t>(variant.tile, 1);
    // Quick where they are equal, as mostly.
    unit = granularity % tile == 0
               ? granularity
               : granularity / std::gcd(granularity, tile) * tile;
    tiles = std::max<int64_t>(divide(length, unit), 1);
    blocks = std::max<int64_t>(unsplitItems(problem, variant), 1);
    slots =
        std::max<int64_t>(units, 1) * std::max<int64_t>(variant.resident, 1);
  }

  static int64_t divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

  /// The least chunk that makes at most so many segments of a sequence.
  int64_t chunkOf(int64_t segments) const {
    return divide(tiles, segments) * unit;
  }

  /// Calls `f` with every chunk, from long ones to short, of 2, 3, 4, 6, 8, 12
  /// and so on segments, up to `most`, and of those that just fill one wave of
  /// work items and two.
  template <typename F> void forEachChunk(int64_t most, F f) const {
    int64_t last = tiles, full = slots / blocks, fuller = 2 * slots / blocks;
    auto visit = [&](int64_t segments) {
      int64_t each = divide(tiles, segments);
      // One of fewer segments has been there already.
      if (segments < 2 || segments > most || each == last ||
          each * unit >= length)
        return;
      last = each;
      f(each * unit);
    };
    int64_t before = 1;
    for (int64_t segments = 2;; before = segments, segments = after(segments)) {
      for (int64_t fill : {full, fuller})
        if (fill > before && fill < segments)
          visit(fill);
      visit(segments);
      if (last <= 1 || segments >= most)
        break;
    }
  }

  int64_t length, unit, tiles;
  /// Work items of unsplit sequences, and how many the device has at a time.
  int64_t blocks, slots;

private:
  static int64_t after(int64_t segments) {
    bool isPower = (segments & (segments - 1)) == 0;
    return isPower ? segments + segments / 2 : segments / 3 * 4;
  }
};

} // namespace corey::scheduler

#endif // COREY_SCHEDULER_LIB_SPLITS_H
