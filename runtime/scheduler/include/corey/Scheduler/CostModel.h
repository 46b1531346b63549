//===- CostModel.h - Time of a scan by chunk --------------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_SCHEDULER_COSTMODEL_H
#define COREY_SCHEDULER_COSTMODEL_H

#include "corey/Scheduler/ChunkTable.h"
#include "corey/Scheduler/Problem.h"
#include <array>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace corey::scheduler {

/// The terms of the model. With
///
///   c      the chunk, at most L; L where unsplit
///   S      segments: ceil(L / c) if the variant is segmented, else 1
///   items  S times those of unsplit sequences, unsplitItems()
///   waves  ceil(items / (units * resident))
///   shares items of a unit at a time, summed over waves: `resident` in all but
///          the last, where those that are left are spread evenly, rounded up
///   crowds what of each wave's is beyond two, summed
///   span   tokens an item walks: c if segmented, else L
///   pieces what it cuts them into: tiles, which end at every chunk
///   inner  itemChannels * headDim
///   work   inner * states
///
/// the predicted time is the sum over terms of a constant, in milliseconds,
/// times
enum class ModelTerm {
  /// 1
  Launch,
  /// waves span work
  Token,
  /// waves span inner
  Channel,
  /// waves pieces work
  Piece,
  /// waves pieces
  Visit,
  /// waves (sum over pieces of size^2) itemChannels
  Pair,
  /// waves (sum over pieces of size^2) inner
  PairChannel,
  /// 1 if S > 1: further launches
  Relaunch,
  /// waves span work if S > 1: the pass that finds what segments carry
  Second,
  /// S B channels headDim states if S > 1: handing the carries on
  Carry,
  /// S if S > 1: the chain of carries
  Chain,
  /// shares span work, 0 if resident is 1, where it is Token: items that run
  /// together take from each other
  Share,
  /// crowds span work: the more, the more of them there are
  Crowd,
  /// As Share and Crowd, if S > 1
  SecondShare,
  SecondCrowd,
  /// waves: what an item does before its first token and after its last
  Wave,
  /// waves pieces if S > 1: as Second, of a pass in whole tiles
  SecondVisit,
  /// waves S if S > 1: items that take together themselves what earlier
  /// segments carry
  Gather
};
constexpr int kModelTerms = 18;
using ModelVector = std::array<double, kModelTerms>;
/// "launch", "token", ...: the keys of the constants in files.
const char *modelTermName(ModelTerm term);

/// What the model multiplies with its constants for `chunk` (0: unsplit).
ModelVector modelTerms(const Problem &problem, const Variant &variant,
                       int64_t units, int64_t chunk);

/// How well a model predicts what it did not see: every problem is left out of
/// the fit once (a model of a single problem is judged by that one).
struct ModelError {
  /// |predicted / measured - 1|.
  double median = 0, worst = 0;
  /// How much longer the chunk that is predicted to be best takes than the best
  /// measured one, as a share.
  double meanLoss = 0, worstLoss = 0;
  int64_t problems = 0, measurements = 0;
};

struct ModelEntry {
  std::string device;
  OpKind op = OpKind::SelectiveScan;
  ElementType type = ElementType::F32;
  std::string variant = "default";
  ModelVector constants = {};
  ModelError error;
};

/// Predicts the time of a scan. As a JSON file, where constants of
/// `second_visit` and `gather`, which came later, may be left out:
///
///   {"schema": "corey-cost-model", "version": 1, "models": [
///     {"device": "cpu-znver1", "op": "ssd", "dtype": "f32",
///      "variant": "default",
///      "constants_ms": {"launch": 0.01, ...},
///      "error": {"median": 0.02, "worst": 0.09, "mean_loss": 0.002,
///        "worst_loss": 0.01, "problems": 12, "measurements": 110}}]}
class CostModel {
public:
  static Expected<CostModel> parse(std::string_view text,
                                   std::string_view name = "<model>");
  static Expected<CostModel> load(const std::string &path);
  /// The models that come with the library.
  static const CostModel &shipped();

  /// How a variant of an op cuts the work of a problem.
  using VariantOf = std::function<Expected<Variant>(const TableEntry &entry,
                                                    std::string_view name)>;
  /// Fits a model per device, op, dtype and variant to the measurements of
  /// `table` of more than one token: least squares of relative errors,
  /// constants not negative. Errors: InvalidArgument for an empty table; those
  /// of `variantOf`.
  static Expected<CostModel> fit(const ChunkTable &table,
                                 const VariantOf &variantOf);

  /// The constants for a variant on `device`; if the device has none, those of
  /// the first device of the same kind (the name up to '-'): curves of one kind
  /// have similar shapes. Null if there is none either.
  const ModelEntry *find(const Device &device, OpKind op, ElementType type,
                         std::string_view variant) const;

  /// The times of one problem by chunk.
  class Curve {
  public:
    Curve(const ModelEntry &entry, const Problem &problem,
          const Variant &variant, int64_t units);
    /// Milliseconds for `chunk`, 0 or the length and more: unsplit.
    double predict(int64_t chunk) const;

  private:
    double predictSegmented(int64_t chunk) const;

    const Problem &problem;
    const Variant &variant;
    int64_t units;
    /// Where one item walks all chunks: the time without pieces, that of a
    /// piece, and that of a pair of its tokens. Where segments are items: the
    /// time that comes once, and in a wave that of a piece, of a pair, of the
    /// wave, of a token, of a share and of a crowd.
    double base = 0, perPiece = 0, perSquare = 0, perWave = 0, perToken = 0,
           perShare = 0, perCrowd = 0;
    /// Of what comes for several segments: the time without them, of a segment
    /// and of one of a wave, of a token, a piece, a share and a crowd.
    double split = 0, perSegment = 0, perGather = 0, perSecond = 0,
           perSecondPiece = 0, perSecondShare = 0, perSecondCrowd = 0;
    /// Items of unsplit sequences.
    double items = 0;
  };

  /// Entries of `other` replace those of the same key.
  void merge(const CostModel &other);
  const std::vector<ModelEntry> &models() const { return list; }
  std::string toJSON() const;

private:
  std::vector<ModelEntry> list;
};

} // namespace corey::scheduler

#endif // COREY_SCHEDULER_COSTMODEL_H
