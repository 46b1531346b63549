//===- Problem.h - What a chunk is chosen for -------------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_SCHEDULER_PROBLEM_H
#define COREY_SCHEDULER_PROBLEM_H

#include "corey/Scheduler/Statistics.h"
#include "corey/Status.h"
#include <string>
#include <string_view>
#include <vector>

namespace corey::scheduler {

enum class OpKind { SelectiveScan, SSD };
/// "selective_scan" or "ssd".
const char *opKindName(OpKind op);
Expected<OpKind> parseOpKind(std::string_view text);
Expected<ElementType> parseElementType(std::string_view text);

/// The sizes of a scan. Sizes that are not known are -1.
struct Problem {
  OpKind op = OpKind::SelectiveScan;
  /// Type of the activations.
  ElementType type = ElementType::F32;
  /// Sequences, and tokens of each.
  int64_t batch = 1, length = 0;
  /// Channels D (selective scan) or heads H (SSD).
  int64_t channels = -1;
  /// Channels of a head, P; 1 for a selective scan.
  int64_t headDim = 1;
  /// States N, and groups of B and C.
  int64_t states = -1, groups = 1;
};

/// A kernel that can run a scan.
struct Variant {
  std::string name = "default";
  /// Channels (or heads) of one work item.
  int64_t itemChannels = 1;
  /// Tokens it works on together; 1 if one by one.
  int64_t tile = 1;
  /// Work items that a unit of the device runs at a time.
  int64_t resident = 1;
  /// A chunk must be a multiple of this.
  int64_t granularity = 1;
  /// Whether the chunks of a sequence are work items of their own (their carry
  /// is combined afterwards), or one item walks them in order.
  bool segmented = false;
  /// Whether it stands for a choice among the others by a rule of the op: what
  /// policies that know nothing of variants take, and what is neither measured
  /// nor predicted where there are others.
  bool byRule = false;
};

/// Work items of a problem whose sequences are not split: channels, or heads
/// of one group, at a time.
int64_t unsplitItems(const Problem &problem, const Variant &variant);

/// A device as the scheduler sees it.
struct Device {
  /// Key of tables and models, for example "cpu-znver1" or "h200".
  std::string name = "cpu";
  /// Threads of a CPU, multiprocessors of a GPU: work items that run at a time.
  int64_t units = 1;
};

} // namespace corey::scheduler

#endif // COREY_SCHEDULER_PROBLEM_H
