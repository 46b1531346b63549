//===- ChunkTable.h - Measured chunks ---------------------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_SCHEDULER_CHUNKTABLE_H
#define COREY_SCHEDULER_CHUNKTABLE_H

#include "corey/Scheduler/Problem.h"
#include <string>
#include <string_view>
#include <vector>

namespace corey::scheduler {

/// An inclusive range of sizes.
struct SizeRange {
  int64_t low = 1, high = 1;
  bool contains(int64_t size) const { return low <= size && size <= high; }
};

/// What a tuner found for one chunk of one variant. Times are milliseconds; the
/// interval is that of the median.
struct MeasuredCandidate {
  /// 0 is unsplit.
  int64_t chunk = 0;
  std::string variant = "default";
  double medianMs = 0, lowMs = 0, highMs = 0;
  int64_t runs = 0;
};

/// Measurements of one problem on one device, and the sizes they stand for.
struct TableEntry {
  std::string device;
  int64_t units = 1;
  /// The measured problem.
  Problem problem;
  /// The batches and lengths the entry speaks for; they contain the problem's.
  SizeRange batch, length;
  /// At least one; no two of the same chunk and variant.
  std::vector<MeasuredCandidate> candidates;

  /// The fastest candidate, or the unsplit one of the same variant if their
  /// intervals overlap.
  const MeasuredCandidate &best() const;
  /// Whether both are measurements of the same problem on the same device.
  bool sameKey(const TableEntry &other) const;
};

/// Measured chunks, as a JSON file:
///
///   {"schema": "corey-chunk-table", "version": 1, "entries": [
///     {"device": "cpu-znver1", "units": 2, "op": "selective_scan",
///      "dtype": "f32", "channels": 256, "head_dim": 1, "states": 16,
///      "groups": 1, "batch": {"measured": 1, "low": 1, "high": 1},
///      "length": {"measured": 512, "low": 363, "high": 724},
///      "candidates": [{"chunk": 0, "variant": "default", "median_ms": 2.5,
///        "low_ms": 2.4, "high_ms": 2.6, "runs": 20}]}]}
///
/// Files are checked in full: anything missing, unknown, of the wrong kind, out
/// of range or given twice is an error that names the file, the entry, the
/// field, what was expected and what came. Files of a newer version are
/// refused.
class ChunkTable {
public:
  /// The table of JSON text; `name` stands for it in messages.
  static Expected<ChunkTable> parse(std::string_view text,
                                    std::string_view name = "<table>");
  /// Errors: NotFound if there is no such file, IOError if it cannot be read,
  /// else those of parse().
  static Expected<ChunkTable> load(const std::string &path);
  /// The entries that come with the library.
  static const ChunkTable &shipped();
  /// Shipped entries with those of the user's cache (cachePath()) over them. A
  /// missing cache is an empty one; a damaged one is an error.
  static Expected<ChunkTable> shippedAndCached();

  /// Adds an entry; one of the same key is replaced. Errors: InvalidArgument
  /// for an entry that a file could not hold.
  Status add(TableEntry entry);
  /// Adds every entry of `other`, which wins.
  void merge(const ChunkTable &other);

  /// The entry that speaks for `problem` on `device`: same name and units, op,
  /// dtype, channels, head size, states and groups, with ranges that contain
  /// the batch and the length; of several the one measured nearest (in ratio).
  /// Null if there is none. `units`, if not 0, stands for the device's.
  const TableEntry *find(const Device &device, const Problem &problem,
                         int64_t units = 0) const;

  const std::vector<TableEntry> &entries() const { return list; }
  std::string toJSON() const;

  /// Merges this table into the file at `path`, creating it and its folders,
  /// under a lock so that concurrent processes lose nothing, and replaces the
  /// file in one step so that readers never see half of it. Errors: IOError;
  /// InvalidArgument if the file that is there is damaged (it is left alone).
  Status mergeInto(const std::string &path) const;

private:
  /// Sorted by device, op and shape, batch and length.
  std::vector<TableEntry> list;

  /// The part of the list that is of one device, op and shape, for find().
  struct Group {
    /// Of these three.
    uint64_t hash;
    size_t begin, end;
  };
  /// Sorted by hash.
  std::vector<Group> groups;
  /// Makes the groups of a list that has changed.
  void index();
};

/// $COREY_CACHE_DIR, else $XDG_CACHE_HOME/corey, else $HOME/.cache/corey;
/// empty, for no folder, if none of them is set or the first is empty or "off".
std::string cacheDirectory();
/// The user's table, "chunk-table.json" in cacheDirectory(); empty if there is
/// no such folder.
std::string cachePath();

} // namespace corey::scheduler

#endif // COREY_SCHEDULER_CHUNKTABLE_H
