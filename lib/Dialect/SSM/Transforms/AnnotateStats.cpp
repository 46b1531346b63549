//===- AnnotateStats.cpp - Statistics of a profile as attributes ----------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Dialect/SSM/IR/SSMOps.h"
#include "corey/Dialect/SSM/Transforms/Passes.h"
#include "corey/Dialect/SSM/Transforms/Profile.h"
#include "llvm/ADT/MapVector.h"
#include "llvm/Support/JSON.h"
#include "llvm/Support/MemoryBuffer.h"
#include <cmath>

namespace corey::ssm {
#define GEN_PASS_DEF_SSMANNOTATESTATS
#include "corey/Dialect/SSM/Transforms/Passes.h.inc"
} // namespace corey::ssm

using namespace mlir;
using namespace corey::ssm;

namespace {
constexpr StringLiteral kSchema = "corey-profile";
constexpr int64_t kVersion = 1;

struct Entry {
  /// Null if the entry has no entropy.
  StatsAttr stats;
  bool matched = false;
};

struct SSMAnnotateStats
    : public corey::ssm::impl::SSMAnnotateStatsBase<SSMAnnotateStats> {
  using Base::Base;

  void runOnOperation() override {
    ModuleOp module = getOperation();
    llvm::MapVector<StringRef, Entry> entries;
    // Owns the names.
    std::optional<llvm::json::Value> document;
    if (failed(read(document, entries)))
      return signalPassFailure();
    for (auto function : module.getOps<func::FuncOp>())
      forEachProfiledValue(function, [&](Value value, StringRef site) {
        auto it = entries.find(site);
        if (it == entries.end())
          return;
        it->second.matched = true;
        if (!it->second.stats)
          return;
        setStats(value, it->second.stats);
        ++numAnnotated;
      });
    for (auto &[site, entry] : entries)
      if (!entry.matched) {
        ++numUnmatched;
        module.emitWarning()
            << profile << ": expected sites of the module, got '" << site
            << "'";
      }
  }

  LogicalResult read(std::optional<llvm::json::Value> &document,
                     llvm::MapVector<StringRef, Entry> &entries) {
    auto error = [&] { return getOperation().emitError() << profile << ": "; };
    if (profile.empty())
      return getOperation().emitError(
          "ssm-annotate-stats: expected option 'profile', got none");
    auto buffer = llvm::MemoryBuffer::getFile(profile, /*IsText=*/true);
    if (!buffer)
      return error() << "expected a profile, got "
                     << buffer.getError().message();
    auto parsed = llvm::json::parse((*buffer)->getBuffer());
    if (!parsed)
      return error() << "expected JSON, got "
                     << llvm::toString(parsed.takeError());
    document = std::move(*parsed);
    const llvm::json::Object *root = document->getAsObject();
    if (!root)
      return error() << "expected an object";
    if (root->getString("schema") != kSchema)
      return error() << "expected schema '" << kSchema << "', got '"
                     << root->getString("schema").value_or("") << "'";
    if (root->getInteger("version") != kVersion)
      return error() << "expected version " << kVersion << ", got "
                     << root->getInteger("version").value_or(0);
    const llvm::json::Array *values = root->getArray("values");
    if (!values)
      return error() << "expected an array 'values'";
    for (auto [i, value] : llvm::enumerate(*values)) {
      const llvm::json::Object *object = value.getAsObject();
      std::optional<StringRef> site =
          object ? object->getString("site") : std::nullopt;
      if (!site)
        return error() << "expected value " << i << " to be an object with a "
                       << "'site'";
      if (entries.contains(*site))
        return error() << "expected every site once, got '" << *site
                       << "' again";
      Entry &entry = entries[*site];
      const llvm::json::Value *entropy = object->get("entropy");
      if (entropy && entropy->kind() == llvm::json::Value::Null)
        continue;
      SmallVector<APFloat, 6> numbers;
      for (StringRef name :
           {"entropy", "min", "max", "mean", "variance", "kurtosis"}) {
        std::optional<double> number = object->getNumber(name);
        if (!number || !std::isfinite(*number))
          return error() << "expected a number '" << name << "' at site '"
                         << *site << "'";
        numbers.push_back(APFloat(*number));
      }
      std::optional<int64_t> bins = object->getInteger("bins");
      if (!bins)
        return error() << "expected an integer 'bins' at site '" << *site
                       << "'";
      entry.stats = StatsAttr::getChecked(
          [&] { return error() << "site '" << *site << "': "; }, &getContext(),
          numbers[0], *bins, numbers[1], numbers[2], numbers[3], numbers[4],
          numbers[5]);
      if (!entry.stats)
        return failure();
    }
    return success();
  }
};
} // namespace
