//===- JsonFuzzer.cpp - Fuzzing the readers of JSON files -----------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// Feeds bytes to every reader of files. What a reader accepts it must write as
// text that reads back as the same; what it refuses it must refuse with an
// error of one line. Run with -dict=json.dict and corpus/.
//
//===----------------------------------------------------------------------===//

#include "corey/Scheduler/ChunkTable.h"
#include "corey/Scheduler/CostModel.h"
#include "corey/Scheduler/Policy.h"

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

using namespace corey;
using namespace corey::scheduler;

namespace {
/// What a reader makes of a text: the text it would write, or an error.
using Reader = Expected<std::string> (*)(std::string_view text);

struct Format {
  const char *name;
  Reader reader;
};

Expected<std::string> readChunkTable(std::string_view text) {
  Expected<ChunkTable> table = ChunkTable::parse(text, "fuzz.json");
  if (!table)
    return table.takeStatus();
  // What was read can be used.
  for (const TableEntry &entry : table->entries()) {
    (void)entry.best();
    Device device;
    device.name = entry.device;
    device.units = entry.units;
    const TableEntry *found = table->find(device, entry.problem);
    if (!found || !found->sameKey(entry)) {
      std::fprintf(stderr, "expected to find an entry by its own problem\n");
      std::abort();
    }
  }
  return table->toJSON();
}

Expected<std::string> readCostModel(std::string_view text) {
  Expected<CostModel> model = CostModel::parse(text, "fuzz.json");
  if (!model)
    return model.takeStatus();
  return model->toJSON();
}

/// Rules are only read; what they decide must not depend on the reading.
Expected<std::string> readRules(std::string_view text) {
  Expected<std::shared_ptr<const Policy>> policy =
      parseRules(text, "fuzz.json");
  if (!policy)
    return policy.takeStatus();
  Device device;
  Variant variant;
  Query query;
  query.device = &device;
  query.variants = &variant;
  query.numVariants = 1;
  for (int64_t length : {0, 1, 50, 51, 100000}) {
    query.problem.length = length;
    if ((*policy)->decide(query).chunk < 1)
      std::abort();
  }
  return std::string(text);
}

/// Every reader of files is here.
constexpr Format formats[] = {{"chunk table", readChunkTable},
                              {"cost model", readCostModel},
                              {"chunk rules", readRules}};

[[noreturn]] void fail(const Format &format, const char *what,
                       const std::string &text) {
  std::fprintf(stderr, "%s: expected %s, got:\n%s\n", format.name, what,
               text.c_str());
  std::abort();
}

void check(const Format &format, std::string_view text) {
  Expected<std::string> written = format.reader(text);
  if (!written) {
    const Status &status = written.status();
    const std::string &message = status.message();
    if (status.code() != StatusCode::InvalidArgument ||
        message.compare(0, 10, "fuzz.json:") != 0 ||
        message.find("expected ") == message.npos ||
        message.find('\n') != message.npos)
      fail(format, "an error of one line that tells where", status.toString());
    return;
  }
  Expected<std::string> again = format.reader(*written);
  if (!again)
    fail(format, "what was written to be read",
         again.status().toString() + "\n" + *written);
  if (*again != *written)
    fail(format, "what was read to be written as it was",
         *again + "\nand not\n" + *written);
}
} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  std::string_view text(reinterpret_cast<const char *>(data), size);
  for (const Format &format : formats)
    check(format, text);
  return 0;
}
