//===- ChunkRule.h - Entropy to chunk ---------------------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_SCHEDULER_CHUNKRULE_H
#define COREY_SCHEDULER_CHUNKRULE_H

#include "corey/Scheduler/Statistics.h"
#include "corey/Status.h"
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace corey::scheduler {

/// A map from the entropy of an activation to a chunk in tokens. Every map that
/// was published under the name of entropy-guided chunk selection is here under
/// a name of its own, because tables of one and the same paper use seven of
/// them.
class ChunkRule {
public:
  enum class Kind {
    /// r = min(H / H_ref, 1), raw = c_min + r (c_max - c_min), the nearest
    /// power
    /// of two to raw in the log domain (half to even), clamped to
    /// [c_min, c_max].
    PowerOfTwo,
    /// 32 round((64 + 448 clamp(H_bits / 8, 0, 1)) / 32). In bits.
    Tile32,
    /// The nearest of 32, 64, 128, 256, 512 to Tile32's; ties go down.
    Coarse,
    /// c = clamp(32 + trunc(480 h), 32, 512), 32 floor((c + 15) / 32), with h
    /// the
    /// entropy normalised by ln K.
    Profile
  };

  /// One of the named rules:
  ///   legacy      32 to 512, H_ref 8.0 (log2 256 used as nats)
  ///   calibrated  32 to 512, H_ref ln K
  ///   routed      128 to 512, H_ref ln K
  ///   confirm     128 to 1024, H_ref ln K
  ///   unified     128 to 2048, H_ref ln K
  ///   tile32, coarse, profile
  /// Errors: NotFound with the names there are.
  static Expected<ChunkRule> named(std::string_view name);
  static const std::vector<std::string> &names();
  /// A power-of-two rule. `reference` is H_ref in nats; 0 stands for ln K.
  /// Errors: InvalidArgument unless 1 <= minimum <= maximum <= 2^40 and the
  /// reference is finite and not negative.
  static Expected<ChunkRule> powerOfTwo(int64_t minimum, int64_t maximum,
                                        double reference = 0);

  /// The chunk for entropy `entropy` of a histogram of `bins` bins; nothing if
  /// it is not finite.
  std::optional<int64_t> chunk(Nats entropy, int64_t bins) const;

  Kind kind() const { return ruleKind; }
  int64_t minimum() const { return lowest; }
  int64_t maximum() const { return highest; }
  /// H_ref in nats; 0 stands for ln K.
  double reference() const { return hRef; }
  const std::string &name() const { return ruleName; }

private:
  static const std::vector<ChunkRule> &all();
  ChunkRule(Kind kind, std::string name, int64_t minimum, int64_t maximum,
            double reference)
      : ruleKind(kind), ruleName(std::move(name)), lowest(minimum),
        highest(maximum), hRef(reference) {}
  Kind ruleKind;
  std::string ruleName;
  int64_t lowest, highest;
  double hRef;
};

/// The tile of ChunkRule::Kind::Tile32.
int64_t tile32(Bits entropy);
/// The same with the normalised entropy, in [0, 1], as the ratio.
int64_t tile32FromNormalized(double normalized);

} // namespace corey::scheduler

#endif // COREY_SCHEDULER_CHUNKRULE_H
