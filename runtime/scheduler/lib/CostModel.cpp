//===- CostModel.cpp - Time of a scan by chunk ----------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Scheduler/CostModel.h"
#include "Json.h"
#include "ProblemJson.h"
#include "Shipped.h"
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <tuple>

using namespace corey;
using namespace corey::scheduler;

namespace {
constexpr char kSchema[] = "corey-cost-model";
constexpr int64_t kVersion = 1;
} // namespace

const char *scheduler::modelTermName(ModelTerm term) {
  switch (term) {
  case ModelTerm::Launch:
    return "launch";
  case ModelTerm::Token:
    return "token";
  case ModelTerm::Channel:
    return "channel";
  case ModelTerm::Piece:
    return "piece";
  case ModelTerm::Visit:
    return "visit";
  case ModelTerm::Pair:
    return "pair";
  case ModelTerm::PairChannel:
    return "pair_channel";
  case ModelTerm::Relaunch:
    return "relaunch";
  case ModelTerm::Second:
    return "second";
  case ModelTerm::Carry:
    return "carry";
  case ModelTerm::Chain:
    return "chain";
  case ModelTerm::Share:
    return "share";
  case ModelTerm::Crowd:
    return "crowd";
  case ModelTerm::SecondShare:
    return "second_share";
  case ModelTerm::SecondCrowd:
    return "second_crowd";
  case ModelTerm::Wave:
    return "wave";
  case ModelTerm::SecondVisit:
    return "second_visit";
  case ModelTerm::Gather:
    return "gather";
  }
  return "unknown";
}

//===----------------------------------------------------------------------===//
// Prediction
//===----------------------------------------------------------------------===//

/// floor(a / b) of positive numbers below 2^52; several times faster than the
/// processor's division of integers.
static double quotient(double a, double b) {
  return static_cast<double>(static_cast<int64_t>(a / b));
}

static double ceilDivide(double a, double b) {
  double q = quotient(a, b);
  return q * b < a ? q + 1 : q;
}

namespace {
/// The sizes that do not depend on the chunk.
struct ItemSizes {
  ItemSizes(const Problem &problem, const Variant &variant)
      : length(static_cast<double>(std::max<int64_t>(problem.length, 0))),
        lanes(static_cast<double>(variant.itemChannels)),
        inner(lanes * static_cast<double>(problem.headDim)),
        work(inner * static_cast<double>(problem.states)),
        items(static_cast<double>(problem.batch) * itemsOf(problem, lanes)),
        tile(static_cast<double>(variant.tile)) {}

  /// A chunk as a number of tokens; 0 and what covers the sequence are its
  /// length.
  double tokens(int64_t chunk) const {
    auto c = static_cast<double>(chunk);
    return c > 0 && c < length ? c : length;
  }

  double length, lanes, inner, work, items, tile;

private:
  /// Of a sequence, as unsplitItems().
  static double itemsOf(const Problem &problem, double lanes) {
    auto channels = static_cast<double>(problem.channels);
    if (problem.op != OpKind::SSD || problem.groups <= 1 ||
        problem.channels % problem.groups)
      return ceilDivide(channels, lanes);
    auto groups = static_cast<double>(problem.groups);
    return groups * ceilDivide(channels / groups, lanes);
  }
};

/// How items follow each other on the units of a device.
struct Waves {
  Waves(double items, const Variant &variant, int64_t units) {
    auto resident = static_cast<double>(variant.resident);
    double whole = static_cast<double>(units) * resident;
    count = std::max(1.0, ceilDivide(items, whole));
    if (variant.resident == 1)
      return;
    double last = ceilDivide(std::max(items - (count - 1) * whole, 1.0),
                             static_cast<double>(units));
    shares = (count - 1) * resident + last;
    crowds =
        (count - 1) * std::max(resident - 2, 0.0) + std::max(last - 2, 0.0);
  }
  double count, shares = 0, crowds = 0;
};

/// What a walk over `span` tokens is cut into: tiles, which end at every chunk
/// of `c` tokens; and the sum of their squares.
struct Pieces {
  Pieces(double span, double c, double tile) {
    if (!(c > 0))
      return;
    if (c >= span) {
      add(span, 1, tile);
      return;
    }
    double whole = quotient(span, c), rest = span - whole * c;
    add(c, whole, tile);
    if (rest > 0)
      add(rest, 1, tile);
  }
  void add(double tokens, double times, double tile) {
    // Divisions are what a decision spends its time on.
    if (tokens <= tile) {
      count += times;
      squares += times * tokens * tokens;
      return;
    }
    double whole = quotient(tokens, tile), rest = tokens - whole * tile;
    count += times * (whole + (rest > 0 ? 1 : 0));
    squares += times * (whole * tile * tile + rest * rest);
  }
  double count = 0, squares = 0;
};
} // namespace

ModelVector scheduler::modelTerms(const Problem &problem,
                                  const Variant &variant, int64_t units,
                                  int64_t chunk) {
  ItemSizes sizes(problem, variant);
  double c = sizes.tokens(chunk);
  double segments =
      variant.segmented && c > 0 ? ceilDivide(sizes.length, c) : 1;
  Waves w(sizes.items * segments, variant, units);
  double waves = w.count;
  double span = variant.segmented ? c : sizes.length;
  Pieces pieces(span, c, sizes.tile);
  bool split = segments > 1;
  ModelVector terms = {};
  auto set = [&](ModelTerm term, double value) {
    terms[static_cast<int>(term)] = value;
  };
  set(ModelTerm::Launch, 1);
  set(ModelTerm::Token, waves * span * sizes.work);
  set(ModelTerm::Channel, waves * span * sizes.inner);
  set(ModelTerm::Piece, waves * pieces.count * sizes.work);
  set(ModelTerm::Visit, waves * pieces.count);
  set(ModelTerm::Pair, waves * pieces.squares * sizes.lanes);
  set(ModelTerm::PairChannel, waves * pieces.squares * sizes.inner);
  set(ModelTerm::Relaunch, split ? 1 : 0);
  set(ModelTerm::Second, split ? waves * span * sizes.work : 0);
  set(ModelTerm::Carry,
      split ? segments * static_cast<double>(problem.batch * problem.channels *
                                             problem.headDim * problem.states)
            : 0);
  set(ModelTerm::Chain, split ? segments : 0);
  double shares = w.shares * span * sizes.work,
         crowds = w.crowds * span * sizes.work;
  set(ModelTerm::Share, shares);
  set(ModelTerm::Crowd, crowds);
  set(ModelTerm::SecondShare, split ? shares : 0);
  set(ModelTerm::SecondCrowd, split ? crowds : 0);
  set(ModelTerm::Wave, waves);
  set(ModelTerm::SecondVisit, split ? waves * pieces.count : 0);
  set(ModelTerm::Gather, split ? waves * segments : 0);
  return terms;
}

static double dot(const ModelVector &a, const ModelVector &b) {
  double sum = 0;
  for (int i = 0; i < kModelTerms; ++i)
    sum += a[i] * b[i];
  return sum;
}

// Only some of the terms depend on the chunk, and a decision asks for many.
CostModel::Curve::Curve(const ModelEntry &entry, const Problem &problem,
                        const Variant &variant, int64_t units)
    : problem(problem), variant(variant), units(units) {
  auto constant = [&](ModelTerm term) {
    return entry.constants[static_cast<int>(term)];
  };
  ItemSizes sizes(problem, variant);
  perPiece =
      constant(ModelTerm::Piece) * sizes.work + constant(ModelTerm::Visit);
  perSquare = constant(ModelTerm::Pair) * sizes.lanes +
              constant(ModelTerm::PairChannel) * sizes.inner;
  perToken = constant(ModelTerm::Token) * sizes.work +
             constant(ModelTerm::Channel) * sizes.inner;
  perShare = constant(ModelTerm::Share) * sizes.work;
  perCrowd = constant(ModelTerm::Crowd) * sizes.work;
  base = constant(ModelTerm::Launch);
  perWave = constant(ModelTerm::Wave);
  items = sizes.items;
  if (variant.segmented) {
    split = constant(ModelTerm::Relaunch);
    perSegment = constant(ModelTerm::Carry) *
                     static_cast<double>(problem.batch * problem.channels *
                                         problem.headDim * problem.states) +
                 constant(ModelTerm::Chain);
    perGather = constant(ModelTerm::Gather);
    perSecond = constant(ModelTerm::Second) * sizes.work;
    perSecondPiece = constant(ModelTerm::SecondVisit);
    perSecondShare = constant(ModelTerm::SecondShare) * sizes.work;
    perSecondCrowd = constant(ModelTerm::SecondCrowd) * sizes.work;
    return;
  }
  Waves w(items, variant, units);
  base += w.count * perWave +
          sizes.length *
              (w.count * perToken + w.shares * perShare + w.crowds * perCrowd);
  perPiece *= w.count;
  perSquare *= w.count;
}

double CostModel::Curve::predictSegmented(int64_t chunk) const {
  auto length = static_cast<double>(std::max<int64_t>(problem.length, 0));
  double c =
      chunk > 0 && chunk < problem.length ? static_cast<double>(chunk) : length;
  double segments = c > 0 ? ceilDivide(length, c) : 1;
  Waves w(items * segments, variant, units);
  Pieces pieces(c, c, static_cast<double>(variant.tile));
  double ms = base +
              w.count * (perWave + c * perToken + pieces.count * perPiece +
                         pieces.squares * perSquare) +
              c * (w.shares * perShare + w.crowds * perCrowd);
  if (segments > 1)
    ms += split + segments * perSegment +
          w.count * (c * perSecond + pieces.count * perSecondPiece +
                     segments * perGather) +
          c * (w.shares * perSecondShare + w.crowds * perSecondCrowd);
  return ms;
}

double CostModel::Curve::predict(int64_t chunk) const {
  if (variant.segmented)
    return predictSegmented(chunk);
  auto length = static_cast<double>(std::max<int64_t>(problem.length, 0));
  double c =
      chunk > 0 && chunk < problem.length ? static_cast<double>(chunk) : length;
  Pieces pieces(length, c, static_cast<double>(variant.tile));
  return base + perPiece * pieces.count + perSquare * pieces.squares;
}

const ModelEntry *CostModel::find(const Device &device, OpKind op,
                                  ElementType type,
                                  std::string_view variant) const {
  // The common case costs a comparison of two strings.
  for (const ModelEntry &entry : list)
    if (entry.op == op && entry.type == type && entry.device == device.name &&
        entry.variant == variant)
      return &entry;
  std::string_view kind(device.name);
  kind = kind.substr(0, kind.find('-'));
  const ModelEntry *similar = nullptr;
  for (const ModelEntry &entry : list) {
    if (entry.op != op || entry.variant != variant)
      continue;
    std::string_view name(entry.device);
    // The same device with another dtype is closer than another device.
    if (name == device.name)
      return &entry;
    if (name.substr(0, name.find('-')) == kind &&
        (!similar || (entry.type == type && similar->type != type)))
      similar = &entry;
  }
  return similar;
}

//===----------------------------------------------------------------------===//
// Fitting
//===----------------------------------------------------------------------===//

namespace {
/// A measurement: what the model sees of it, and what came.
struct Row {
  ModelVector terms;
  double ms;
  /// Which problem it is of, and its chunk.
  size_t problem;
};

/// Minimizes sum (terms . x / ms - 1)^2 over x >= 0, leaving out one problem.
/// Coordinate descent on the normal equations: there are few unknowns.
ModelVector leastSquares(const std::vector<Row> &rows, size_t leftOut) {
  double gram[kModelTerms][kModelTerms] = {}, right[kModelTerms] = {};
  ModelVector norm = {}, x = {};
  for (const Row &row : rows)
    if (row.problem != leftOut)
      for (int i = 0; i < kModelTerms; ++i)
        norm[i] += row.terms[i] / row.ms * (row.terms[i] / row.ms);
  for (double &n : norm)
    n = std::sqrt(n);
  for (const Row &row : rows) {
    if (row.problem == leftOut)
      continue;
    ModelVector scaled;
    for (int i = 0; i < kModelTerms; ++i)
      scaled[i] = norm[i] > 0 ? row.terms[i] / row.ms / norm[i] : 0;
    for (int i = 0; i < kModelTerms; ++i) {
      right[i] += scaled[i];
      for (int j = 0; j < kModelTerms; ++j)
        gram[i][j] += scaled[i] * scaled[j];
    }
  }
  for (int sweep = 0; sweep < 20000; ++sweep) {
    double moved = 0;
    for (int i = 0; i < kModelTerms; ++i) {
      if (gram[i][i] <= 0)
        continue;
      double gradient = right[i];
      for (int j = 0; j < kModelTerms; ++j)
        gradient -= gram[i][j] * x[j];
      double next = std::max(0.0, x[i] + gradient / gram[i][i]);
      moved = std::max(moved, std::fabs(next - x[i]));
      x[i] = next;
    }
    if (moved < 1e-12)
      break;
  }
  for (int i = 0; i < kModelTerms; ++i)
    x[i] = norm[i] > 0 ? x[i] / norm[i] : 0;
  return x;
}

auto keyOf(const ModelEntry &entry) {
  return std::tie(entry.device, entry.op, entry.type, entry.variant);
}

/// Adds `entry`, in place of one of the same key.
void put(std::vector<ModelEntry> &list, ModelEntry entry) {
  size_t at = 0;
  while (at < list.size() && keyOf(list[at]) < keyOf(entry))
    ++at;
  if (at < list.size() && keyOf(list[at]) == keyOf(entry))
    list[at] = std::move(entry);
  else
    list.insert(list.begin() + static_cast<ptrdiff_t>(at), std::move(entry));
}
} // namespace

Expected<CostModel> CostModel::fit(const ChunkTable &table,
                                   const VariantOf &variantOf) {
  if (table.entries().empty())
    return Status::invalidArgument(
        "expected measurements to fit a model to, got an empty table");
  struct Group {
    ModelEntry model;
    std::vector<Row> rows;
    size_t problems = 0;
  };
  std::vector<Group> groups;
  for (const TableEntry &entry : table.entries()) {
    // A single token is no scan: chunks and variants do not matter.
    if (entry.problem.length == 1)
      continue;
    // The groups this entry has opened a problem in.
    std::vector<size_t> opened;
    for (const MeasuredCandidate &candidate : entry.candidates) {
      Expected<Variant> variant = variantOf(entry, candidate.variant);
      if (!variant)
        return variant.takeStatus();
      size_t g = 0;
      while (g < groups.size() &&
             !(groups[g].model.device == entry.device &&
               groups[g].model.op == entry.problem.op &&
               groups[g].model.type == entry.problem.type &&
               groups[g].model.variant == candidate.variant))
        ++g;
      if (g == groups.size()) {
        groups.emplace_back();
        groups[g].model.device = entry.device;
        groups[g].model.op = entry.problem.op;
        groups[g].model.type = entry.problem.type;
        groups[g].model.variant = candidate.variant;
      }
      Group &group = groups[g];
      if (std::find(opened.begin(), opened.end(), g) == opened.end()) {
        opened.push_back(g);
        ++group.problems;
      }
      group.rows.push_back(
          {modelTerms(entry.problem, *variant, entry.units, candidate.chunk),
           candidate.medianMs, group.problems - 1});
    }
  }

  CostModel result;
  for (Group &group : groups) {
    constexpr size_t kNone = SIZE_MAX;
    group.model.constants = leastSquares(group.rows, kNone);
    std::vector<double> errors;
    double losses = 0;
    ModelError &error = group.model.error;
    for (size_t p = 0; p < group.problems; ++p) {
      ModelVector constants = group.problems > 1 ? leastSquares(group.rows, p)
                                                 : group.model.constants;
      double best = INFINITY, predictedBest = INFINITY, chosen = INFINITY;
      for (const Row &row : group.rows) {
        if (row.problem != p)
          continue;
        double predicted = dot(constants, row.terms);
        errors.push_back(std::fabs(predicted / row.ms - 1));
        best = std::min(best, row.ms);
        if (predicted < predictedBest) {
          predictedBest = predicted;
          chosen = row.ms;
        }
      }
      double loss = chosen / best - 1;
      losses += loss;
      error.worstLoss = std::max(error.worstLoss, loss);
    }
    std::sort(errors.begin(), errors.end());
    error.median = errors[errors.size() / 2];
    error.worst = errors.back();
    error.meanLoss = losses / static_cast<double>(group.problems);
    error.problems = static_cast<int64_t>(group.problems);
    error.measurements = static_cast<int64_t>(group.rows.size());
    put(result.list, std::move(group.model));
  }
  return result;
}

void CostModel::merge(const CostModel &other) {
  for (const ModelEntry &entry : other.list)
    put(list, entry);
}

//===----------------------------------------------------------------------===//
// Files
//===----------------------------------------------------------------------===//

Expected<CostModel> CostModel::parse(std::string_view text,
                                     std::string_view name) {
  Expected<json::Document> document = json::Document::parse(text, name);
  if (!document)
    return document.takeStatus();
  json::Object root = document->root().object();
  json::checkHeader(root, kSchema, kVersion);
  json::Array models = root.array("models");
  CostModel result;
  for (size_t i = 0; i < models.size() && document->isOk(); ++i) {
    json::Object object = models[i].object();
    ModelEntry entry;
    entry.device = object.name("device");
    readKernelKind(object, entry.op, entry.type);
    entry.variant = object.name("variant");
    json::Object constants = object.object("constants_ms");
    for (int i = 0; i < kModelTerms; ++i) {
      auto term = static_cast<ModelTerm>(i);
      const char *name = modelTermName(term);
      bool isLate = term == ModelTerm::SecondVisit || term == ModelTerm::Gather;
      entry.constants[i] =
          isLate ? constants.numberOr(name, 0, 0) : constants.number(name, 0);
    }
    constants.finish();
    json::Object error = object.object("error");
    entry.error.median = error.number("median", 0);
    entry.error.worst = error.number("worst", 0);
    entry.error.meanLoss = error.number("mean_loss", 0);
    entry.error.worstLoss = error.number("worst_loss", 0);
    entry.error.problems = error.integer("problems", 1);
    entry.error.measurements = error.integer("measurements", 1);
    error.finish();
    object.finish();
    for (const ModelEntry &other : result.list)
      if (keyOf(other) == keyOf(entry))
        models[i].fail("one model per device, op, dtype and variant",
                       "a second one");
    if (document->isOk())
      put(result.list, std::move(entry));
  }
  root.finish();
  if (!document->isOk())
    return document->status();
  return result;
}

Expected<CostModel> CostModel::load(const std::string &path) {
  Expected<std::string> text = json::readFile(path);
  if (!text)
    return text.takeStatus();
  return parse(*text, path);
}

const CostModel &CostModel::shipped() {
  static const CostModel model = [] {
    CostModel result;
    for (std::string_view name : shippedFiles()) {
      if (name.substr(0, 10) != "cost-model")
        continue;
      Expected<CostModel> part = parse(shippedFile(name), name);
      if (!part) {
        std::fprintf(stderr, "corey: defect in shipped data: %s\n",
                     part.status().message().c_str());
        std::abort();
      }
      result.merge(*part);
    }
    return result;
  }();
  return model;
}

std::string CostModel::toJSON() const {
  json::Writer writer;
  writer.beginObject();
  writer.key("schema").string(kSchema);
  writer.key("version").integer(kVersion);
  writer.key("models").beginArray();
  for (const ModelEntry &entry : list) {
    writer.beginObject();
    writer.key("device").string(entry.device);
    writer.key("op").string(opKindName(entry.op));
    writer.key("dtype").string(elementTypeName(entry.type));
    writer.key("variant").string(entry.variant);
    writer.key("constants_ms").beginObject();
    for (int term = 0; term < kModelTerms; ++term)
      writer.key(modelTermName(static_cast<ModelTerm>(term)))
          .number(entry.constants[term]);
    writer.endObject();
    writer.key("error").beginObject(json::Writer::Line);
    writer.key("median").number(entry.error.median);
    writer.key("worst").number(entry.error.worst);
    writer.key("mean_loss").number(entry.error.meanLoss);
    writer.key("worst_loss").number(entry.error.worstLoss);
    writer.key("problems").integer(entry.error.problems);
    writer.key("measurements").integer(entry.error.measurements);
    writer.endObject();
    writer.endObject();
  }
  writer.endArray();
  writer.endObject();
  return writer.take();
}
