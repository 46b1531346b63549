//===- Site.cpp - A place where a chunk is chosen -------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Scheduler/Site.h"
#include <algorithm>

using namespace corey;
using namespace corey::scheduler;

int64_t scheduler::layerOf(std::string_view name) {
  size_t at = name.find("layer");
  if (at == std::string_view::npos)
    return -1;
  at += 5;
  if (at < name.size() && name[at] == 's')
    ++at;
  if (at < name.size() && (name[at] == '.' || name[at] == '_'))
    ++at;
  int64_t number = -1;
  for (; at < name.size() && name[at] >= '0' && name[at] <= '9'; ++at) {
    if (number > 100000000)
      return -1;
    number = std::max<int64_t>(number, 0) * 10 + (name[at] - '0');
  }
  return number;
}

Site::Site(SiteInfo info, std::shared_ptr<const Policy> policy)
    : description(std::move(info)), current(std::move(policy)) {}

Decision Site::decide(int64_t batch, int64_t length, int64_t units) {
  Query query;
  query.problem = description.problem;
  query.problem.batch = batch;
  query.problem.length = length;
  query.variants = description.variants.data();
  query.numVariants = static_cast<int>(description.variants.size());
  query.device = &description.device;
  query.layer = description.layer;
  query.units = units > 0 ? units : description.device.units;
  std::lock_guard<std::mutex> lock(mutex);
  query.call = decisions;
  if (publications) {
    query.statistics = &statistics;
    if (!average.empty())
      query.averageEntropy = average.value();
    query.statisticsMs = statisticsMs;
  }
  Decision decision;
  if (requested > 0) {
    decision.chunk = requested;
    decision.reason = Reason::Requested;
  } else {
    decision = current->decide(query);
  }
  if (requestedVariant >= 0)
    decision.variant = requestedVariant;
  // A caller may ask for what the kernel cannot have, or for a kernel that the
  // policy did not think of.
  if (decision.variant < query.numVariants) {
    const Variant &variant = query.variants[decision.variant];
    int64_t granularity = std::max<int64_t>(variant.granularity, 1);
    if (variant.segmented && decision.chunk < length &&
        decision.chunk % granularity)
      decision.chunk += granularity - decision.chunk % granularity;
  }
  // Beyond the end of the sequence all chunks are one.
  auto effective = [](const Decision &d, int64_t length) {
    return std::min(d.chunk, std::max<int64_t>(length, 1));
  };
  if (decisions && (decision.variant != last.variant ||
                    effective(decision, length) != effective(last, lastLength)))
    ++switches;
  ++decisions;
  last = decision;
  lastBatch = batch;
  lastLength = length;
  return decision;
}

void Site::publish(const Statistics &s, double milliseconds) {
  std::lock_guard<std::mutex> lock(mutex);
  statistics = s;
  statisticsMs = milliseconds;
  ++publications;
  // An average never gets rid of a number that is none.
  if (s.usable() && std::isfinite(s.entropy.value()))
    average.update(s.entropy.value());
}

void Site::setPolicy(std::shared_ptr<const Policy> policy) {
  std::lock_guard<std::mutex> lock(mutex);
  current.swap(policy);
}

std::shared_ptr<const Policy> Site::policy() const {
  std::lock_guard<std::mutex> lock(mutex);
  return current;
}

void Site::setChunk(int64_t chunk) {
  std::lock_guard<std::mutex> lock(mutex);
  requested = chunk;
}

void Site::setVariant(int variant) {
  std::lock_guard<std::mutex> lock(mutex);
  requestedVariant = variant;
}

Site::Report Site::report() const {
  std::lock_guard<std::mutex> lock(mutex);
  Report report;
  report.requested = requested;
  report.batch = lastBatch;
  report.length = lastLength;
  report.decision = last;
  report.decisions = decisions;
  report.publications = publications;
  report.switches = switches;
  report.statistics = statistics;
  if (!average.empty())
    report.averageEntropy = average.value();
  report.statisticsMs = statisticsMs;
  report.policy = current->spec();
  return report;
}
