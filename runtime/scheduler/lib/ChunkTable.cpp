//===- ChunkTable.cpp - Measured chunks -----------------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Scheduler/ChunkTable.h"

#include "Json.h"
#include "ProblemJson.h"
#include "Shipped.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <optional>
#include <tuple>

using namespace corey;
using namespace corey::scheduler;

namespace {
constexpr char kSchema[] = "corey-chunk-table";
constexpr int64_t kVersion = 1;
} // namespace

//===----------------------------------------------------------------------===//
// Order
//===----------------------------------------------------------------------===//

template <class T> static int compareValues(T left, T right) {
  return left < right ? -1 : left > right ? 1 : 0;
}

/// Orders entries by device and shape: what must be the same for an entry to
/// speak for a problem.
static int compareShape(const TableEntry &entry, std::string_view device,
                        int64_t units, const Problem &right) {
  const Problem &left = entry.problem;
  if (int order = std::string_view(entry.device).compare(device))
    return order;
  if (int order = compareValues(entry.units, units))
    return order;
  if (int order = compareValues(left.op, right.op))
    return order;
  if (int order = compareValues(left.type, right.type))
    return order;
  if (int order = compareValues(left.channels, right.channels))
    return order;
  if (int order = compareValues(left.headDim, right.headDim))
    return order;
  if (int order = compareValues(left.states, right.states))
    return order;
  return compareValues(left.groups, right.groups);
}

/// Orders entries by device, shape, batch and length; equal are those of the
/// same key.
static int compare(const TableEntry &left, const TableEntry &right) {
  if (int order = compareShape(left, right.device, right.units, right.problem))
    return order;
  if (int order = compareValues(left.problem.batch, right.problem.batch))
    return order;
  return compareValues(left.problem.length, right.problem.length);
}

static bool before(const TableEntry &left, const TableEntry &right) {
  return compare(left, right) < 0;
}

static bool candidateBefore(const MeasuredCandidate &left,
                            const MeasuredCandidate &right) {
  return std::tie(left.variant, left.chunk) <
         std::tie(right.variant, right.chunk);
}

/// The indices of `list` in the order of `before`, equal ones as they were.
template <class T>
static std::vector<size_t> sortedOrder(const std::vector<T> &list,
                                       bool (*before)(const T &, const T &)) {
  std::vector<size_t> order(list.size());
  std::iota(order.begin(), order.end(), size_t(0));
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    if (before(list[a], list[b]))
      return true;
    return a < b && !before(list[b], list[a]);
  });
  return order;
}

//===----------------------------------------------------------------------===//
// Entries
//===----------------------------------------------------------------------===//

bool TableEntry::sameKey(const TableEntry &other) const {
  return compare(*this, other) == 0;
}

const MeasuredCandidate &TableEntry::best() const {
  static const MeasuredCandidate none;
  if (candidates.empty())
    return none;
  // Of equally fast ones the simpler: unsplit, else the one with fewer chunks.
  auto faster = [](const MeasuredCandidate &a, const MeasuredCandidate &b) {
    if (a.medianMs != b.medianMs)
      return a.medianMs < b.medianMs;
    if (a.chunk != b.chunk)
      return a.chunk == 0 || (b.chunk != 0 && a.chunk > b.chunk);
    return a.variant < b.variant;
  };
  const MeasuredCandidate &fastest =
      *std::min_element(candidates.begin(), candidates.end(), faster);
  for (const MeasuredCandidate &candidate : candidates)
    if (candidate.chunk == 0 && candidate.variant == fastest.variant &&
        candidate.lowMs <= fastest.highMs && fastest.lowMs <= candidate.highMs)
      return candidate;
  return fastest;
}

namespace {
/// What is wrong with an entry: where, what was expected and what came.
struct Violation {
  std::string path, expected, got;
};
} // namespace

static std::optional<Violation> checkName(std::string path,
                                          const std::string &name) {
  if (name.empty())
    return Violation{std::move(path), "a string that is not empty", "\"\""};
  if (!json::isUTF8(name))
    return Violation{std::move(path), "UTF-8", "other bytes"};
  return std::nullopt;
}

static std::optional<Violation> checkSize(std::string path, int64_t size,
                                          int64_t least = 1) {
  if (size >= least)
    return std::nullopt;
  return Violation{std::move(path),
                   "an integer of at least " + std::to_string(least),
                   std::to_string(size)};
}

static std::optional<Violation>
checkRange(const std::string &path, int64_t measured, const SizeRange &range) {
  if (auto wrong = checkSize(path + ".measured", measured))
    return wrong;
  if (auto wrong = checkSize(path + ".low", range.low))
    return wrong;
  std::string size = "the measured " + std::to_string(measured);
  if (range.low > measured)
    return Violation{path + ".low", "at most " + size,
                     std::to_string(range.low)};
  if (range.high < measured)
    return Violation{path + ".high", "at least " + size,
                     std::to_string(range.high)};
  return std::nullopt;
}

static std::optional<Violation> checkTime(std::string path, double time) {
  if (std::isfinite(time) && time > 0)
    return std::nullopt;
  return Violation{std::move(path), "a finite number above 0",
                   json::shortest(time)};
}

static std::optional<Violation>
checkCandidate(const std::string &path, const MeasuredCandidate &candidate) {
  if (auto wrong = checkSize(path + ".chunk", candidate.chunk, 0))
    return wrong;
  if (auto wrong = checkName(path + ".variant", candidate.variant))
    return wrong;
  if (auto wrong = checkTime(path + ".median_ms", candidate.medianMs))
    return wrong;
  if (auto wrong = checkTime(path + ".low_ms", candidate.lowMs))
    return wrong;
  if (auto wrong = checkTime(path + ".high_ms", candidate.highMs))
    return wrong;
  std::string median = "the median " + json::shortest(candidate.medianMs);
  if (candidate.lowMs > candidate.medianMs)
    return Violation{path + ".low_ms", "at most " + median,
                     json::shortest(candidate.lowMs)};
  if (candidate.highMs < candidate.medianMs)
    return Violation{path + ".high_ms", "at least " + median,
                     json::shortest(candidate.highMs)};
  return checkSize(path + ".runs", candidate.runs);
}

/// What a file could not hold; paths are those of a file.
static std::optional<Violation> check(const TableEntry &entry) {
  const Problem &problem = entry.problem;
  if (auto wrong = checkName("device", entry.device))
    return wrong;
  const std::pair<const char *, int64_t> sizes[] = {
      {"units", entry.units},
      {"channels", problem.channels},
      {"head_dim", problem.headDim},
      {"states", problem.states},
      {"groups", problem.groups}};
  for (auto &[name, size] : sizes)
    if (auto wrong = checkSize(name, size))
      return wrong;
  if (auto wrong = checkRange("batch", problem.batch, entry.batch))
    return wrong;
  if (auto wrong = checkRange("length", problem.length, entry.length))
    return wrong;
  if (entry.candidates.empty())
    return Violation{"candidates", "at least one", "none"};
  for (size_t i = 0; i < entry.candidates.size(); ++i)
    if (auto wrong = checkCandidate("candidates[" + std::to_string(i) + "]",
                                    entry.candidates[i]))
      return wrong;

  // Twice the same is found in the sorted order and told in the given one.
  std::vector<size_t> order = sortedOrder(entry.candidates, candidateBefore);
  for (size_t i = 1; i < order.size(); ++i) {
    const MeasuredCandidate &first = entry.candidates[order[i - 1]];
    if (!candidateBefore(first, entry.candidates[order[i]]))
      return Violation{"candidates[" + std::to_string(order[i]) + "]",
                       "another chunk or variant than that of candidates[" +
                           std::to_string(order[i - 1]) + "]",
                       "chunk " + std::to_string(first.chunk) + " of " +
                           json::quoted(first.variant) + " again"};
  }
  return std::nullopt;
}

static void sortCandidates(TableEntry &entry) {
  std::sort(entry.candidates.begin(), entry.candidates.end(), candidateBefore);
}

//===----------------------------------------------------------------------===//
// Reading and writing
//===----------------------------------------------------------------------===//

static void readRange(json::Object range, int64_t &measured, SizeRange &sizes) {
  measured = range.integer("measured");
  sizes.low = range.integer("low");
  sizes.high = range.integer("high");
  range.finish();
}

/// Reads kinds only; check() looks at the values.
static TableEntry readEntry(json::Object object) {
  TableEntry entry;
  Problem &problem = entry.problem;
  entry.device = object.string("device");
  entry.units = object.integer("units");
  readKernelKind(object, problem.op, problem.type);
  problem.channels = object.integer("channels");
  problem.headDim = object.integer("head_dim");
  problem.states = object.integer("states");
  problem.groups = object.integer("groups");
  readRange(object.object("batch"), problem.batch, entry.batch);
  readRange(object.object("length"), problem.length, entry.length);
  json::Array candidates = object.array("candidates");
  entry.candidates.reserve(candidates.size());
  for (size_t i = 0; i < candidates.size(); ++i) {
    json::Object fields = candidates[i].object();
    MeasuredCandidate candidate;
    candidate.chunk = fields.integer("chunk");
    candidate.variant = fields.string("variant");
    candidate.medianMs = fields.number("median_ms");
    candidate.lowMs = fields.number("low_ms");
    candidate.highMs = fields.number("high_ms");
    candidate.runs = fields.integer("runs");
    fields.finish();
    entry.candidates.push_back(std::move(candidate));
  }
  object.finish();
  return entry;
}

Expected<ChunkTable> ChunkTable::parse(std::string_view text,
                                       std::string_view name) {
  Expected<json::Document> document = json::Document::parse(text, name);
  if (!document)
    return document.takeStatus();
  json::Object root = document->root().object();
  json::checkHeader(root, kSchema, kVersion);
  json::Array array = root.array("entries");
  root.finish();
  ChunkTable table;
  for (size_t i = 0; i < array.size() && document->isOk(); ++i) {
    json::Value value = array[i];
    table.list.push_back(readEntry(value.object()));
    if (auto wrong = check(table.list.back()))
      value.failAt("." + wrong->path, wrong->expected, wrong->got);
  }
  if (!document->isOk())
    return document->status();

  std::vector<TableEntry> &list = table.list;
  std::vector<size_t> order = sortedOrder(list, before);
  std::vector<TableEntry> sorted;
  sorted.reserve(list.size());
  for (size_t i = 0; i < order.size(); ++i) {
    if (i && !before(sorted.back(), list[order[i]])) {
      array[order[i]].fail("another problem or device than that of entries[" +
                               std::to_string(order[i - 1]) + "]",
                           "the same");
      return document->status();
    }
    sortCandidates(list[order[i]]);
    sorted.push_back(std::move(list[order[i]]));
  }
  list = std::move(sorted);
  table.index();
  return table;
}

Expected<ChunkTable> ChunkTable::load(const std::string &path) {
  Expected<std::string> text = json::readFile(path);
  if (!text)
    return text.takeStatus();
  return parse(*text, path);
}

static void writeRange(json::Writer &writer, const char *name, int64_t measured,
                       const SizeRange &range) {
  writer.key(name).beginObject(json::Writer::Line);
  writer.key("measured").integer(measured);
  writer.key("low").integer(range.low);
  writer.key("high").integer(range.high);
  writer.endObject();
}

static void writeEntry(json::Writer &writer, const TableEntry &entry) {
  const Problem &problem = entry.problem;
  writer.beginObject();
  writer.key("device").string(entry.device);
  writer.key("units").integer(entry.units);
  writer.key("op").string(opKindName(problem.op));
  writer.key("dtype").string(elementTypeName(problem.type));
  writer.key("channels").integer(problem.channels);
  writer.key("head_dim").integer(problem.headDim);
  writer.key("states").integer(problem.states);
  writer.key("groups").integer(problem.groups);
  writeRange(writer, "batch", problem.batch, entry.batch);
  writeRange(writer, "length", problem.length, entry.length);
  writer.key("candidates").beginArray();
  for (const MeasuredCandidate &candidate : entry.candidates) {
    writer.beginObject(json::Writer::Line);
    writer.key("chunk").integer(candidate.chunk);
    writer.key("variant").string(candidate.variant);
    writer.key("median_ms").number(candidate.medianMs);
    writer.key("low_ms").number(candidate.lowMs);
    writer.key("high_ms").number(candidate.highMs);
    writer.key("runs").integer(candidate.runs);
    writer.endObject();
  }
  writer.endArray();
  writer.endObject();
}

std::string ChunkTable::toJSON() const {
  json::Writer writer;
  writer.beginObject();
  writer.key("schema").string(kSchema);
  writer.key("version").integer(kVersion);
  writer.key("entries").beginArray();
  for (const TableEntry &entry : list)
    writeEntry(writer, entry);
  writer.endArray();
  writer.endObject();
  return writer.take();
}

Status ChunkTable::mergeInto(const std::string &path) const {
  Expected<json::FileLock> lock = json::FileLock::acquire(path);
  if (!lock)
    return lock.takeStatus();
  Expected<ChunkTable> table = load(path);
  if (!table && table.status().code() == StatusCode::NotFound)
    table = ChunkTable();
  if (!table)
    return table.takeStatus();
  table->merge(*this);
  return json::writeFileAtomically(path, table->toJSON());
}

//===----------------------------------------------------------------------===//
// Tables
//===----------------------------------------------------------------------===//

Status ChunkTable::add(TableEntry entry) {
  if (auto wrong = check(entry))
    return Status::invalidArgument(wrong->path + ": expected " +
                                   wrong->expected + ", got " + wrong->got);
  sortCandidates(entry);
  auto at = std::lower_bound(list.begin(), list.end(), entry, before);
  if (at != list.end() && at->sameKey(entry))
    *at = std::move(entry);
  else
    list.insert(at, std::move(entry));
  index();
  return Status::ok();
}

void ChunkTable::merge(const ChunkTable &other) {
  if (&other == this)
    return;
  std::vector<TableEntry> merged;
  merged.reserve(list.size() + other.list.size());
  auto mine = list.begin();
  for (const TableEntry &entry : other.list) {
    int order = 1;
    while (mine != list.end() && (order = compare(*mine, entry)) < 0)
      merged.push_back(std::move(*mine++));
    if (mine != list.end() && order == 0)
      ++mine;
    merged.push_back(entry);
  }
  std::move(mine, list.end(), std::back_inserter(merged));
  list = std::move(merged);
  index();
}

/// A hash of what compareShape() compares.
static uint64_t hashShape(std::string_view device, int64_t units,
                          const Problem &problem) {
  uint64_t hash = 0;
  auto mix = [&](uint64_t value) {
    hash = (hash ^ value) * 0x9e3779b97f4a7c15;
    hash ^= hash >> 32;
  };
  for (; device.size() > 8; device.remove_prefix(8)) {
    uint64_t word;
    std::memcpy(&word, device.data(), 8);
    mix(word);
  }
  uint64_t word = 0;
  for (char c : device)
    word = word << 8 | static_cast<unsigned char>(c);
  mix(word);
  mix(static_cast<uint64_t>(units));
  mix(static_cast<uint64_t>(problem.op) << 8 |
      static_cast<uint64_t>(problem.type));
  mix(static_cast<uint64_t>(problem.channels));
  mix(static_cast<uint64_t>(problem.headDim));
  mix(static_cast<uint64_t>(problem.states));
  mix(static_cast<uint64_t>(problem.groups));
  return hash;
}

void ChunkTable::index() {
  groups.clear();
  for (size_t i = 0; i < list.size(); ++i) {
    const TableEntry &entry = list[i];
    if (i && compareShape(list[i - 1], entry.device, entry.units,
                          entry.problem) == 0)
      ++groups.back().end;
    else
      groups.push_back(
          {hashShape(entry.device, entry.units, entry.problem), i, i + 1});
  }
  std::sort(groups.begin(), groups.end(), [](const Group &a, const Group &b) {
    return std::tie(a.hash, a.begin) < std::tie(b.hash, b.begin);
  });
}

const TableEntry *ChunkTable::find(const Device &device, const Problem &problem,
                                   int64_t units) const {
  if (units <= 0)
    units = device.units;
  uint64_t hash = hashShape(device.name, units, problem);
  auto group = std::partition_point(
      groups.begin(), groups.end(),
      [&](const Group &candidate) { return candidate.hash < hash; });
  // Others may have the same hash.
  while (group != groups.end() && group->hash == hash &&
         compareShape(list[group->begin], device.name, units, problem))
    ++group;
  if (group == groups.end() || group->hash != hash)
    return nullptr;

  auto ratio = [](int64_t a, int64_t b) {
    double x = static_cast<double>(a), y = static_cast<double>(b);
    return x < y ? y / x : x / y;
  };
  const TableEntry *nearest = nullptr;
  double leastDistance = 0;
  for (size_t i = group->begin; i < group->end; ++i) {
    const TableEntry &entry = list[i];
    if (!entry.batch.contains(problem.batch) ||
        !entry.length.contains(problem.length))
      continue;
    // Of equally near ones the smaller batch, then the smaller length.
    double distance = ratio(problem.batch, entry.problem.batch) *
                      ratio(problem.length, entry.problem.length);
    if (!nearest || distance < leastDistance) {
      nearest = &entry;
      leastDistance = distance;
    }
  }
  return nearest;
}

//===----------------------------------------------------------------------===//
// Shipped and cached
//===----------------------------------------------------------------------===//

const ChunkTable &ChunkTable::shipped() {
  // Never destroyed: others may ask while the process ends.
  static const ChunkTable &table = *[] {
    auto *result = new ChunkTable();
    for (std::string_view name : shippedFiles()) {
      if (name.substr(0, 11) != "chunk-table")
        continue;
      Expected<ChunkTable> part = parse(shippedFile(name), name);
      if (!part) {
        std::fprintf(stderr, "corey: shipped data: %s\n",
                     part.status().toString().c_str());
        std::abort();
      }
      result->merge(*part);
    }
    return result;
  }();
  return table;
}

Expected<ChunkTable> ChunkTable::shippedAndCached() {
  ChunkTable table = shipped();
  std::string path = cachePath();
  if (path.empty())
    return table;
  Expected<ChunkTable> cached = load(path);
  if (cached)
    table.merge(*cached);
  else if (cached.status().code() != StatusCode::NotFound)
    return cached.takeStatus();
  return table;
}

/// The value of an environment variable; an empty one counts as not set.
static std::string environment(const char *name) {
  const char *value = std::getenv(name);
  return value ? value : "";
}

std::string corey::scheduler::cacheDirectory() {
  if (const char *folder = std::getenv("COREY_CACHE_DIR"))
    return std::strcmp(folder, "off") == 0 ? "" : folder;
  std::string folder = environment("XDG_CACHE_HOME");
  if (!folder.empty())
    return folder + "/corey";
  folder = environment("HOME");
  return folder.empty() ? folder : folder + "/.cache/corey";
}

std::string corey::scheduler::cachePath() {
  std::string folder = cacheDirectory();
  return folder.empty() ? folder : folder + "/chunk-table.json";
}
