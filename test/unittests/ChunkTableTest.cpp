//===- ChunkTableTest.cpp - Tests of tables of measured chunks ------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "StatusTest.h"
#include "corey/Scheduler/ChunkTable.h"

#include "../../runtime/scheduler/lib/Json.h"

#include "gtest/gtest.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dirent.h>
#include <fstream>
#include <limits>
#include <sstream>
#include <sys/stat.h>
#include <sys/wait.h>
#include <thread>
#include <tuple>
#include <unistd.h>

using namespace corey;
using namespace corey::scheduler;

namespace {
constexpr double Inf = std::numeric_limits<double>::infinity();

//===----------------------------------------------------------------------===//
// Helpers
//===----------------------------------------------------------------------===//

/// A folder of its own for every test.
class Folder {
public:
  Folder() {
    std::string name = ::testing::TempDir() + "corey-XXXXXX";
    EXPECT_TRUE(mkdtemp(name.data()));
    path = name;
  }
  ~Folder() { remove(path); }

  std::string operator/(const std::string &name) const {
    return path + "/" + name;
  }
  static std::vector<std::string> list(const std::string &folder) {
    std::vector<std::string> names;
    if (DIR *stream = opendir(folder.c_str())) {
      while (dirent *file = readdir(stream))
        if (file->d_name != std::string(".") &&
            file->d_name != std::string(".."))
          names.push_back(file->d_name);
      closedir(stream);
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  std::string path;

private:
  static void remove(const std::string &path) {
    for (const std::string &name : list(path))
      remove(path + "/" + name);
    std::remove(path.c_str());
  }
};

void write(const std::string &path, std::string_view text) {
  std::ofstream(path, std::ios::binary) << text;
}

std::string read(const std::string &path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

/// Sets an environment variable, or unsets it, for the time of a test.
class Environment {
public:
  Environment(const char *name, const char *value) : name(name) {
    if (const char *old = std::getenv(name)) {
      before = old;
      wasSet = true;
    }
    if (value)
      setenv(name, value, 1);
    else
      unsetenv(name);
  }
  ~Environment() {
    if (wasSet)
      setenv(name, before.c_str(), 1);
    else
      unsetenv(name);
  }

private:
  const char *name;
  std::string before;
  bool wasSet = false;
};

TableEntry makeEntry(int64_t length = 512, int64_t batch = 1) {
  TableEntry entry;
  entry.device = "cpu-znver1";
  entry.units = 2;
  entry.problem.batch = batch;
  entry.problem.length = length;
  entry.problem.channels = 256;
  entry.problem.states = 16;
  entry.batch = {batch, batch};
  entry.length = {(length * 5 + 6) / 7, length * 7 / 5};
  entry.candidates = {{0, "default", 2.5, 2.4, 2.6, 20},
                      {64, "default", 1.25, 1.2, 1.3, 20}};
  return entry;
}

ChunkTable makeTable(const std::vector<TableEntry> &entries) {
  ChunkTable table;
  for (const TableEntry &entry : entries) {
    Status status = table.add(entry);
    EXPECT_TRUE(status.isOk()) << status.toString();
  }
  return table;
}

Device makeDevice() {
  Device device;
  device.name = "cpu-znver1";
  device.units = 2;
  return device;
}

/// The example of the header.
constexpr char Valid[] = R"({
  "schema": "corey-chunk-table",
  "version": 1,
  "entries": [
    {
      "device": "cpu-znver1",
      "units": 2,
      "op": "selective_scan",
      "dtype": "f32",
      "channels": 256,
      "head_dim": 1,
      "states": 16,
      "groups": 1,
      "batch": {"measured": 1, "low": 1, "high": 1},
      "length": {"measured": 512, "low": 363, "high": 724},
      "candidates": [
        {"chunk": 0, "variant": "default", "median_ms": 2.5, "low_ms": 2.4, "high_ms": 2.6, "runs": 20},
        {"chunk": 64, "variant": "default", "median_ms": 1.25, "low_ms": 1.2, "high_ms": 1.3, "runs": 20}
      ]
    }
  ]
}
)";

/// Valid with the first `from` turned into `to`.
std::string edited(const std::string &from, const std::string &to,
                   std::string text = Valid) {
  size_t at = text.find(from);
  if (at == text.npos) {
    ADD_FAILURE() << "no '" << from << "' in the text";
    return text;
  }
  return text.replace(at, from.size(), to);
}

/// Checks that the text is refused with the message, after the table's name.
void expectRefused(const std::string &text, const std::string &message) {
  Expected<ChunkTable> table = ChunkTable::parse(text, "t.json");
  ASSERT_FALSE(table) << text;
  EXPECT_EQ(table.status().code(), StatusCode::InvalidArgument);
  EXPECT_EQ(table.status().message(), "t.json:" + message) << text;
}

//===----------------------------------------------------------------------===//
// Round trips
//===----------------------------------------------------------------------===//

TEST(ChunkTable, ReadsTheExample) {
  ChunkTable table = take(ChunkTable::parse(Valid));
  ASSERT_EQ(table.entries().size(), 1u);
  const TableEntry &entry = table.entries()[0];
  EXPECT_EQ(entry.device, "cpu-znver1");
  EXPECT_EQ(entry.units, 2);
  EXPECT_EQ(entry.problem.op, OpKind::SelectiveScan);
  EXPECT_EQ(entry.problem.type, ElementType::F32);
  EXPECT_EQ(entry.problem.batch, 1);
  EXPECT_EQ(entry.problem.length, 512);
  EXPECT_EQ(entry.problem.channels, 256);
  EXPECT_EQ(entry.problem.headDim, 1);
  EXPECT_EQ(entry.problem.states, 16);
  EXPECT_EQ(entry.problem.groups, 1);
  EXPECT_EQ(entry.batch.low, 1);
  EXPECT_EQ(entry.batch.high, 1);
  EXPECT_EQ(entry.length.low, 363);
  EXPECT_EQ(entry.length.high, 724);
  ASSERT_EQ(entry.candidates.size(), 2u);
  EXPECT_EQ(entry.candidates[1].chunk, 64);
  EXPECT_EQ(entry.candidates[1].variant, "default");
  EXPECT_EQ(entry.candidates[1].medianMs, 1.25);
  EXPECT_EQ(entry.candidates[1].lowMs, 1.2);
  EXPECT_EQ(entry.candidates[1].highMs, 1.3);
  EXPECT_EQ(entry.candidates[1].runs, 20);
  EXPECT_EQ(table.toJSON(), Valid);
}

TEST(ChunkTable, WritesAnEmptyTable) {
  std::string text = ChunkTable().toJSON();
  EXPECT_EQ(text, "{\n  \"schema\": \"corey-chunk-table\",\n"
                  "  \"version\": 1,\n  \"entries\": []\n}\n");
  EXPECT_TRUE(take(ChunkTable::parse(text)).entries().empty());
}

TEST(ChunkTable, KeepsEveryDoubleAndInteger) {
  TableEntry entry = makeEntry();
  entry.device = "a \"b\" \\ \n\t\x01\x7f \xc3\xa9\xf0\x9f\x98\x80/";
  entry.candidates.clear();
  uint64_t bits = 1;
  for (int64_t i = 0; i < 500; ++i) {
    // Any bits at all, among them tiny and huge numbers.
    double times[3];
    for (double &time : times)
      do {
        bits = bits * 6364136223846793005u + 1442695040888963407u;
        uint64_t pattern = (bits ^ (bits >> 31)) & ~(uint64_t(1) << 63);
        std::memcpy(&time, &pattern, sizeof(time));
      } while (!std::isfinite(time) || time == 0);
    std::sort(times, times + 3);
    entry.candidates.push_back({i, "v", times[1], times[0], times[2], i + 1});
  }
  double least = std::numeric_limits<double>::denorm_min();
  double most = std::numeric_limits<double>::max();
  entry.candidates.push_back({std::numeric_limits<int64_t>::max(), "v",
                              9007199254740993.0, least, most,
                              std::numeric_limits<int64_t>::max()});
  entry.candidates.push_back({500, "v", 1e22, 18446744073709551616.0, 1e23, 1});
  ChunkTable table = makeTable({entry});
  ChunkTable again = take(ChunkTable::parse(table.toJSON()));
  EXPECT_EQ(again.toJSON(), table.toJSON());
  ASSERT_EQ(again.entries().size(), 1u);
  EXPECT_EQ(again.entries()[0].device, entry.device);
  ASSERT_EQ(again.entries()[0].candidates.size(), entry.candidates.size());
  for (size_t i = 0; i < entry.candidates.size(); ++i) {
    const MeasuredCandidate &a = table.entries()[0].candidates[i];
    const MeasuredCandidate &b = again.entries()[0].candidates[i];
    EXPECT_EQ(a.chunk, b.chunk);
    EXPECT_EQ(a.medianMs, b.medianMs);
    EXPECT_EQ(a.lowMs, b.lowMs);
    EXPECT_EQ(a.highMs, b.highMs);
    EXPECT_EQ(a.runs, b.runs);
  }
}

TEST(ChunkTable, TextDoesNotDependOnTheOrderOfAdding) {
  std::vector<TableEntry> entries;
  for (int64_t length : {512, 64, 4096})
    for (int64_t batch : {8, 1})
      entries.push_back(makeEntry(length, batch));
  entries.push_back(makeEntry());
  entries.back().device = "h200";
  entries.push_back(makeEntry());
  entries.back().problem.op = OpKind::SSD;
  entries.push_back(makeEntry());
  entries.back().problem.type = ElementType::BF16;
  std::string text = makeTable(entries).toJSON();
  std::reverse(entries.begin(), entries.end());
  for (TableEntry &entry : entries)
    std::reverse(entry.candidates.begin(), entry.candidates.end());
  EXPECT_EQ(makeTable(entries).toJSON(), text);
  EXPECT_EQ(take(ChunkTable::parse(text)).toJSON(), text);
}

TEST(ChunkTable, ReadsUnsortedFiles) {
  // The order of fields and of entries, and white space, mean nothing.
  std::string text = take(ChunkTable::parse(Valid)).toJSON();
  std::string entry = text.substr(text.find("    {"));
  entry = entry.substr(0, entry.rfind("\n  ]"));
  std::string second = edited("\"measured\": 512, \"low\": 363",
                              "\"low\": 1,\r\n\t\"measured\": 64", entry);
  text = edited(entry, entry + "," + second, text);
  ChunkTable table = take(ChunkTable::parse(text));
  ASSERT_EQ(table.entries().size(), 2u);
  EXPECT_EQ(table.entries()[0].problem.length, 64);
  EXPECT_EQ(table.entries()[1].problem.length, 512);
  // A byte order mark is what some editors add.
  take(ChunkTable::parse("\xef\xbb\xbf" + text));
}

//===----------------------------------------------------------------------===//
// Damage
//===----------------------------------------------------------------------===//

TEST(ChunkTable, RefusesEveryTruncation) {
  std::string_view text = Valid;
  // All but the newline at the end are needed.
  for (size_t size = 0; size + 1 < text.size(); ++size) {
    // Of its own size, so that reading over the end shows.
    std::vector<char> part(text.begin(), text.begin() + size);
    Expected<ChunkTable> table =
        ChunkTable::parse(std::string_view(part.data(), size), "t.json");
    ASSERT_FALSE(table) << size;
    EXPECT_EQ(table.status().code(), StatusCode::InvalidArgument);
    std::string message = table.status().message();
    EXPECT_EQ(message.substr(0, 7), "t.json:");
    EXPECT_NE(message.find(": expected "), message.npos) << message;
    EXPECT_NE(message.find(", got the end of the text"), message.npos)
        << message;
  }
}

TEST(ChunkTable, SurvivesEveryByte) {
  // Whatever is at one place: an error or a table that writes itself.
  for (size_t at = 0; at + 1 < sizeof(Valid); ++at)
    for (char byte : std::string_view("\0\"\\{},9-e\x80\xff", 11)) {
      std::string text = Valid;
      text[at] = byte;
      if (Expected<ChunkTable> table = ChunkTable::parse(text))
        EXPECT_EQ(take(ChunkTable::parse(table->toJSON())).toJSON(),
                  table->toJSON());
    }
}

TEST(ChunkTable, RefusesWhatIsNotJSON) {
  auto check = [](const std::string &text, const std::string &message) {
    expectRefused(text, message);
  };
  check("", "1:1: expected a value, got the end of the text");
  check(" \n ", "2:2: expected a value, got the end of the text");
  check("{", "1:2: expected the name of a field in quotes, got the end of the "
             "text");
  check("[1", "1:3: expected ',' or ']', got the end of the text");
  check("{\"a\"", "1:5: expected ':', got the end of the text");
  check("{\"a\" 1}", "1:6: expected ':', got '1'");
  check("{\"a\": 1", "1:8: expected ',' or '}', got the end of the text");
  check("{\"a\": 1]", "1:8: expected ',' or '}', got ']'");
  check("{\"a\": 1 \"b\"}", "1:9: expected ',' or '}', got \"b\"");
  check("{a: 1}", "1:2: expected the name of a field in quotes, got 'a'");
  check("{\"a\": 1,}", "1:9: expected the name of a field in quotes, got '}'");
  check("[1,]", "1:4: expected a value, got ']'");
  check("[1}", "1:3: expected ',' or ']', got '}'");
  check("[1 // one\n]", "1:4: expected ',' or ']', got '/'");
  check("{}{}", "1:3: expected the end of the text, got '{'");
  check("{}\n\n  x", "3:3: expected the end of the text, got 'x'");
  check("{} \"a\\\"b\"", "1:4: expected the end of the text, got \"a\\\"b\"");
  check("[tru]", "1:2: expected a value, got 'tru'");
  check("[truely]", "1:2: expected ',' or ']', got 'truely'");
  check("[tru", "1:5: expected a value, got the end of the text");
  check("[\"\n\", f\"a\"]", "1:3: expected control characters to be written as "
                            "\\u and four digits, got byte 0x0a");
  check("[\"a\",\nf\"a\"]", "2:1: expected a value, got 'f'");
  check("[#]", "1:2: expected a value, got '#'");
  check("[\xc3\xa9]", "1:2: expected a value, got byte 0xc3");
  check("[\x01]", "1:2: expected a value, got byte 0x01");
  check("['a']", "1:2: expected a value, got '''");
}

TEST(ChunkTable, RefusesNumbersThatAreNone) {
  auto check = [](const std::string &text, const std::string &message) {
    expectRefused(text, message);
  };
  check("[NaN]", "1:2: expected a value, got 'NaN'");
  check("[nan]", "1:2: expected a value, got 'nan'");
  check("[Infinity]", "1:2: expected a value, got 'Infinity'");
  check("[-Infinity]", "1:3: expected a digit, got 'I'");
  check("[1.]", "1:4: expected a digit, got ']'");
  check("[1e]", "1:4: expected a digit, got ']'");
  check("[01]", "1:2: expected ',' or ']', got '01'");
  check("[+1]", "1:2: expected a value, got '+1'");
  check("[.5]", "1:2: expected a value, got '.5'");
  check("[0x10]", "1:2: expected ',' or ']', got '0x10'");
  check("[1e999]",
        "1:2: expected a number that a double can hold, got '1e999'");
  check("[-1e999]",
        "1:2: expected a number that a double can hold, got '-1e999'");
  check("[1" + std::string(400, '0') + "]",
        "1:2: expected a number that a double can hold, got '1" +
            std::string(59, '0') + "...'");
}

TEST(ChunkTable, RefusesStringsThatAreNone) {
  auto check = [](const std::string &text, const std::string &message) {
    expectRefused(text, message);
  };
  check("[\"a", "1:4: expected a closing quote, got the end of the text");
  check("[\"a\nb\"]", "1:4: expected control characters to be written as \\u "
                      "and four digits, got byte 0x0a");
  check("[\"\\x\"]",
        "1:4: expected one of \"\\/bfnrtu after a backslash, got 'x'");
  check("[\"\\u12g4\"]",
        "1:7: expected four hexadecimal digits after \\u, got 'g'");
  check("[\"\\ud800\"]",
        "1:9: expected the second half of a surrogate, got '\"'");
  check("[\"\\udc00\"]",
        "1:8: expected the first half of a surrogate before it, got '0'");
  check("[\"\xff\"]", "1:3: expected UTF-8, got byte 0xff");
  check("[\"\xc3(\"]", "1:3: expected UTF-8, got byte 0xc3");
  check("[\"\xc0\x80\"]", "1:3: expected UTF-8, got byte 0xc0");
  check("[\"\xed\xa0\x80\"]", "1:3: expected UTF-8, got byte 0xed");
  check("[\"\xe0\x80\x80\"]", "1:3: expected UTF-8, got byte 0xe0");
  check("[\"\xf4\x90\x80\x80\"]", "1:3: expected UTF-8, got byte 0xf4");
  check("[\"\xf5\x80\x80\x80\"]", "1:3: expected UTF-8, got byte 0xf5");
  check("\n\xe2\x82", "2:1: expected UTF-8, got byte 0xe2");
  check(std::string("{}\0{}", 5), "1:3: expected UTF-8, got byte 0x00");
  check(std::string("[\"\0\"]", 5), "1:3: expected UTF-8, got byte 0x00");
  check("\xef\xbb", "1:1: expected UTF-8, got byte 0xef");
}

TEST(ChunkTable, RefusesFieldsThatComeTwice) {
  expectRefused("{\"a\": 1, \"b\": 2, \"a\": 3}",
                "1:18: expected every field of an object once, got \"a\" "
                "again");
  expectRefused("{\"a\\\"\": {\"a\": 1},\n \"\\u0061\\\"\": 2}",
                "2:2: expected every field of an object once, got "
                "\"\\u0061\\\"\" again");
  expectRefused(edited("\"low\": 363", "\"high\": 363"),
                "15:48: expected every field of an object once, got \"high\" "
                "again");
  // Of different objects they may.
  expectRefused("{\"b\": {\"a\": 1}, \"a\": {\"a\": 1}}",
                " expected schema \"corey-chunk-table\", got nothing");
}

TEST(ChunkTable, RefusesDeepNesting) {
  auto nested = [](int depth) {
    return std::string(depth, '[') + std::string(depth, ']');
  };
  expectRefused(nested(32), " expected an object, got an array");
  expectRefused(nested(33),
                "1:33: expected at most 32 levels of brackets, got more");
  expectRefused(std::string(1000000, '['),
                "1:33: expected at most 32 levels of brackets, got more");
  std::string objects;
  for (int i = 0; i < 100; ++i)
    objects += "{\"a\":";
  expectRefused(objects,
                "1:161: expected at most 32 levels of brackets, got more");
}

TEST(ChunkTable, RefusesOtherFiles) {
  expectRefused("[]", " expected an object, got an array");
  expectRefused("1", " expected an object, got 1");
  expectRefused("null", " expected an object, got null");
  expectRefused("{}", " expected schema \"corey-chunk-table\", got nothing");
  expectRefused("{\"schema\": 1}",
                " expected schema \"corey-chunk-table\", got 1");
  expectRefused(edited("corey-chunk-table", "x"),
                " expected schema \"corey-chunk-table\", got \"x\"");
  expectRefused(edited("\"version\": 1", "\"version\": 2"),
                " expected version 1, got 2: written by a newer release");
  expectRefused("{\"schema\": \"corey-chunk-table\", \"version\": 2, "
                "\"entries\": 5, \"more\": []}",
                " expected version 1, got 2: written by a newer release");
  expectRefused(edited("\"version\": 1", "\"version\": 0"),
                " expected version 1, got 0");
  expectRefused(edited("\"version\": 1", "\"version\": 1.0"),
                " expected version 1, got 1.0");
  expectRefused(edited("\"version\": 1", "\"version\": \"1\""),
                " expected version 1, got \"1\"");
  expectRefused(edited("\"version\": 1,", ""),
                " expected version 1, got nothing");
}

TEST(ChunkTable, RefusesWrongKinds) {
  auto check = [](const std::string &from, const std::string &to,
                  const std::string &message) {
    expectRefused(edited(from, to), " " + message);
  };
  std::string entry = "entries[0].";
  std::string candidate = "entries[0].candidates[0].";
  check("\"device\": \"cpu-znver1\"", "\"device\": 5",
        entry + "device: expected a string, got 5");
  check("\"cpu-znver1\"", "{\"a\": 1}",
        entry + "device: expected a string, got an object");
  check("\"units\": 2", "\"units\": 2.5",
        entry + "units: expected an integer, got 2.5");
  check("\"units\": 2", "\"units\": 2.0",
        entry + "units: expected an integer, got 2.0");
  check("\"units\": 2", "\"units\": true",
        entry + "units: expected an integer, got true");
  check("\"units\": 2", "\"units\": null",
        entry + "units: expected an integer, got null");
  check("\"units\": 2", "\"units\": 9223372036854775808",
        entry + "units: expected an integer, got 9223372036854775808");
  check("\"units\": 2", "\"units\": -9223372036854775809",
        entry + "units: expected an integer, got -9223372036854775808.0");
  check("\"selective_scan\"", "\"scan\"",
        entry + "op: expected \"selective_scan\" or \"ssd\", got \"scan\"");
  check("\"selective_scan\"", "0", entry + "op: expected a string, got 0");
  check("\"f32\"", "\"f8\"",
        entry + "dtype: expected \"f64\", \"f32\", \"f16\" or \"bf16\", got "
                "\"f8\"");
  check("\"low\": 363", "\"low\": \"abc\"",
        entry + "length.low: expected an integer, got \"abc\"");
  check("\"low\": 363", "\"low\": \"" + std::string(59, 'a') + "\xc3\xa9z\"",
        entry + "length.low: expected an integer, got \"" +
            std::string(59, 'a') + "\"...");
  check("{\"measured\": 1, \"low\": 1, \"high\": 1}", "1",
        entry + "batch: expected an object, got 1");
  check("2.5,", "\"2.5\",",
        candidate + "median_ms: expected a number, got \"2.5\"");
  check("\"candidates\": [", "\"candidates\": [5, ",
        "entries[0].candidates[0]: expected an object, got 5");
  expectRefused("{\"schema\": \"corey-chunk-table\", \"version\": 1, "
                "\"entries\": {}}",
                " entries: expected an array, got an object");
  expectRefused("{\"schema\": \"corey-chunk-table\", \"version\": 1, "
                "\"entries\": [[]]}",
                " entries[0]: expected an object, got an array");
}

TEST(ChunkTable, RefusesMissingAndUnknownFields) {
  for (const char *field : {"device", "units", "op", "dtype", "channels",
                            "head_dim", "states", "groups"}) {
    std::string name = std::string("\"") + field + "\":";
    // Under another name it is missing; beside the right one it is unknown.
    Expected<ChunkTable> table =
        ChunkTable::parse(edited(name, "\"other\":"), "t.json");
    ASSERT_FALSE(table);
    std::string message = table.status().message();
    EXPECT_EQ(message.find(std::string("t.json: entries[0].") + field +
                           ": expected "),
              0u)
        << message;
    EXPECT_NE(message.find(", got nothing"), message.npos) << message;
  }
  expectRefused(edited("\"low\": 363, ", ""),
                " entries[0].length.low: expected an integer, got nothing");
  expectRefused(edited("\"runs\": 20},", "\"run\": 20},"),
                " entries[0].candidates[0].runs: expected an integer, got "
                "nothing");
  expectRefused(edited("\"low\": 363,", "\"low\": 363, \"l\\nw\": 1,"),
                " entries[0].length: expected no fields but measured, low, "
                "high, got \"l\\nw\"");
  expectRefused(edited("\"units\": 2,", "\"units\": 2, \"note\": \"\","),
                " entries[0]: expected no fields but device, units, op, dtype, "
                "channels, head_dim, states, groups, batch, length, "
                "candidates, got \"note\"");
  expectRefused(edited("\"version\": 1,", "\"version\": 1, \"a\": 1,"),
                " expected no fields but schema, version, entries, got \"a\"");
  expectRefused("{\"schema\": \"corey-chunk-table\", \"version\": 1}",
                " entries: expected an array, got nothing");
}

TEST(ChunkTable, RefusesValuesOutOfRange) {
  auto check = [](const std::string &from, const std::string &to,
                  const std::string &message) {
    expectRefused(edited(from, to), " entries[0]." + message);
  };
  check("\"cpu-znver1\"", "\"\"",
        "device: expected a string that is not empty, got \"\"");
  check("\"units\": 2", "\"units\": 0",
        "units: expected an integer of at least 1, got 0");
  check("\"channels\": 256", "\"channels\": -1",
        "channels: expected an integer of at least 1, got -1");
  check("\"head_dim\": 1", "\"head_dim\": 0",
        "head_dim: expected an integer of at least 1, got 0");
  check("\"states\": 16", "\"states\": 0",
        "states: expected an integer of at least 1, got 0");
  check("\"groups\": 1", "\"groups\": 0",
        "groups: expected an integer of at least 1, got 0");
  check("\"measured\": 512", "\"measured\": 0",
        "length.measured: expected an integer of at least 1, got 0");
  check("\"low\": 363", "\"low\": -3",
        "length.low: expected an integer of at least 1, got -3");
  check("\"low\": 363", "\"low\": 513",
        "length.low: expected at most the measured 512, got 513");
  check("\"high\": 724", "\"high\": 511",
        "length.high: expected at least the measured 512, got 511");
  check("\"high\": 1}", "\"high\": 0}",
        "batch.high: expected at least the measured 1, got 0");
  check("\"chunk\": 0", "\"chunk\": -1",
        "candidates[0].chunk: expected an integer of at least 0, got -1");
  check("\"default\"", "\"\"",
        "candidates[0].variant: expected a string that is not empty, got "
        "\"\"");
  check("\"median_ms\": 2.5", "\"median_ms\": 0",
        "candidates[0].median_ms: expected a finite number above 0, got 0");
  check("\"median_ms\": 2.5", "\"median_ms\": 1e-999",
        "candidates[0].median_ms: expected a finite number above 0, got 0");
  check("\"median_ms\": 2.5", "\"median_ms\": -2",
        "candidates[0].median_ms: expected a finite number above 0, got -2");
  check("\"low_ms\": 2.4", "\"low_ms\": 0",
        "candidates[0].low_ms: expected a finite number above 0, got 0");
  check("\"low_ms\": 2.4", "\"low_ms\": 2.51",
        "candidates[0].low_ms: expected at most the median 2.5, got 2.51");
  check("\"high_ms\": 2.6", "\"high_ms\": 2.4",
        "candidates[0].high_ms: expected at least the median 2.5, got 2.4");
  check("\"runs\": 20", "\"runs\": 0",
        "candidates[0].runs: expected an integer of at least 1, got 0");
}

TEST(ChunkTable, RefusesWhatIsGivenTwice) {
  expectRefused(edited("\"chunk\": 64", "\"chunk\": 0"),
                " entries[0].candidates[1]: expected another chunk or variant "
                "than that of candidates[0], got chunk 0 of \"default\" again");
  std::string text = Valid;
  std::string entry = text.substr(text.find("    {"));
  entry = entry.substr(0, entry.rfind("\n  ]"));
  std::string other = edited("\"units\": 2", "\"units\": 4", entry);
  expectRefused(edited(entry,
                       other + "," + entry + "," +
                           edited("\"low\": 363", "\"low\": 400", entry),
                       text),
                " entries[2]: expected another problem or device than that of "
                "entries[1], got the same");
  expectRefused(
      edited(entry,
             edited("\"candidates\": [", "\"candidates\": [], \"x\": [", entry),
             text),
      " entries[0]: expected no fields but device, units, op, dtype, channels, "
      "head_dim, states, groups, batch, length, candidates, got \"x\"");
}

TEST(ChunkTable, RefusesEntriesThatAFileCouldNotHold) {
  auto refused = [](const TableEntry &entry) {
    ChunkTable table;
    Status status = table.add(entry);
    EXPECT_EQ(status.code(), StatusCode::InvalidArgument);
    EXPECT_TRUE(table.entries().empty());
    return status.message();
  };
  TableEntry entry = makeEntry();
  entry.device = "\xff";
  EXPECT_EQ(refused(entry), "device: expected UTF-8, got other bytes");
  entry = makeEntry();
  entry.problem.states = -1;
  EXPECT_EQ(refused(entry),
            "states: expected an integer of at least 1, got -1");
  entry = makeEntry();
  entry.candidates.clear();
  EXPECT_EQ(refused(entry), "candidates: expected at least one, got none");
  entry = makeEntry();
  entry.candidates[1].medianMs = NAN;
  EXPECT_EQ(refused(entry), "candidates[1].median_ms: expected a finite number "
                            "above 0, got nan");
  entry = makeEntry();
  entry.candidates[1].highMs = Inf;
  EXPECT_EQ(refused(entry), "candidates[1].high_ms: expected a finite number "
                            "above 0, got inf");
  entry = makeEntry();
  entry.candidates[0] = entry.candidates[1];
  EXPECT_EQ(refused(entry),
            "candidates[1]: expected another chunk or variant than that of "
            "candidates[0], got chunk 64 of \"default\" again");
  entry = makeEntry();
  entry.length = {1, 511};
  EXPECT_EQ(refused(entry),
            "length.high: expected at least the measured 512, got 511");
}

//===----------------------------------------------------------------------===//
// The best candidate
//===----------------------------------------------------------------------===//

TEST(ChunkTable, BestIsTheFastest) {
  TableEntry entry = makeEntry();
  EXPECT_EQ(entry.best().chunk, 64);
  entry.candidates.push_back({128, "tiles", 1.0, 0.9, 1.1, 9});
  EXPECT_EQ(entry.best().chunk, 128);
  EXPECT_EQ(entry.best().variant, "tiles");
}

TEST(ChunkTable, BestIsUnsplitIfTheIntervalsOverlap) {
  TableEntry entry = makeEntry();
  entry.candidates[0] = {0, "default", 1.4, 1.3, 1.5, 20};
  EXPECT_EQ(entry.best().chunk, 0);
  entry.candidates[0].lowMs = std::nextafter(1.3, 2);
  EXPECT_EQ(entry.best().chunk, 64);
  // That of another variant does not count.
  entry.candidates[0] = {0, "tiles", 1.26, 1.2, 1.3, 20};
  EXPECT_EQ(entry.best().chunk, 64);
}

TEST(ChunkTable, BestOfEqualOnesIsTheSimplest) {
  TableEntry entry = makeEntry();
  std::vector<MeasuredCandidate> candidates = {{64, "b", 1, 1, 1, 5},
                                               {128, "b", 1, 1, 1, 5},
                                               {128, "a", 1, 1, 1, 5},
                                               {32, "a", 1, 1, 1, 5}};
  auto less = [](const MeasuredCandidate &a, const MeasuredCandidate &b) {
    return std::tie(a.chunk, a.variant) < std::tie(b.chunk, b.variant);
  };
  std::sort(candidates.begin(), candidates.end(), less);
  do {
    entry.candidates = candidates;
    EXPECT_EQ(entry.best().chunk, 128);
    EXPECT_EQ(entry.best().variant, "a");
  } while (std::next_permutation(candidates.begin(), candidates.end(), less));
  entry.candidates.push_back({0, "z", 1, 1, 1, 5});
  EXPECT_EQ(entry.best().variant, "z");
}

//===----------------------------------------------------------------------===//
// Adding, merging, finding
//===----------------------------------------------------------------------===//

TEST(ChunkTable, KeysAreProblemAndDevice) {
  TableEntry entry = makeEntry(), other = makeEntry();
  other.candidates.clear();
  other.length = {1, 10000};
  EXPECT_TRUE(entry.sameKey(other));
  auto differs = [&](auto change) {
    TableEntry changed = makeEntry();
    change(changed);
    EXPECT_FALSE(entry.sameKey(changed));
    EXPECT_FALSE(changed.sameKey(entry));
  };
  differs([](TableEntry &e) { e.device = "h200"; });
  differs([](TableEntry &e) { e.units = 3; });
  differs([](TableEntry &e) { e.problem.op = OpKind::SSD; });
  differs([](TableEntry &e) { e.problem.type = ElementType::F16; });
  differs([](TableEntry &e) { e.problem.batch = 2; });
  differs([](TableEntry &e) { e.problem.length = 511; });
  differs([](TableEntry &e) { e.problem.channels = 1; });
  differs([](TableEntry &e) { e.problem.headDim = 2; });
  differs([](TableEntry &e) { e.problem.states = 1; });
  differs([](TableEntry &e) { e.problem.groups = 2; });
}

TEST(ChunkTable, AddReplacesAndMergeWins) {
  ChunkTable mine = makeTable({makeEntry(64), makeEntry(512)});
  TableEntry changed = makeEntry(512);
  changed.candidates = {{32, "new", 9, 8, 10, 3}};
  ChunkTable other = makeTable({changed, makeEntry(128), makeEntry(4096)});
  mine.merge(other);
  ASSERT_EQ(mine.entries().size(), 4u);
  int64_t lengths[] = {64, 128, 512, 4096};
  for (size_t i = 0; i < 4; ++i)
    EXPECT_EQ(mine.entries()[i].problem.length, lengths[i]);
  EXPECT_EQ(mine.entries()[2].candidates[0].variant, "new");
  EXPECT_EQ(other.entries().size(), 3u);

  ASSERT_OK(mine.add(makeEntry(512)));
  ASSERT_EQ(mine.entries().size(), 4u);
  EXPECT_EQ(mine.entries()[2].candidates[0].variant, "default");

  std::string text = mine.toJSON();
  mine.merge(ChunkTable());
  EXPECT_EQ(mine.toJSON(), text);
  mine.merge(mine);
  EXPECT_EQ(mine.toJSON(), text);
  mine.merge(ChunkTable(mine));
  EXPECT_EQ(mine.toJSON(), text);
  ChunkTable empty;
  empty.merge(mine);
  EXPECT_EQ(empty.toJSON(), text);
}

TEST(ChunkTable, FindsByTheWholeKey) {
  ChunkTable table = makeTable({makeEntry()});
  Device device = makeDevice();
  Problem problem = makeEntry().problem;
  ASSERT_TRUE(table.find(device, problem));
  EXPECT_EQ(table.find(device, problem), &table.entries()[0]);
  auto misses = [&](auto change) {
    Device otherDevice = device;
    Problem otherProblem = problem;
    change(otherDevice, otherProblem);
    EXPECT_FALSE(table.find(otherDevice, otherProblem));
  };
  misses([](Device &d, Problem &) { d.name = "cpu-znver2"; });
  misses([](Device &d, Problem &) { d.name = "a"; });
  misses([](Device &d, Problem &) { d.units = 1; });
  misses([](Device &d, Problem &) { d.units = 3; });
  misses([](Device &, Problem &p) { p.op = OpKind::SSD; });
  misses([](Device &, Problem &p) { p.type = ElementType::BF16; });
  misses([](Device &, Problem &p) { p.channels = -1; });
  misses([](Device &, Problem &p) { p.headDim = 64; });
  misses([](Device &, Problem &p) { p.states = 8; });
  misses([](Device &, Problem &p) { p.groups = 2; });
  misses([](Device &, Problem &p) { p.batch = 2; });
  misses([](Device &, Problem &p) { p.batch = -1; });
  misses([](Device &, Problem &p) { p.length = 365; });
  misses([](Device &, Problem &p) { p.length = 717; });
  for (int64_t length : {366, 716}) {
    problem.length = length;
    EXPECT_TRUE(table.find(device, problem)) << length;
  }
  EXPECT_FALSE(ChunkTable().find(device, problem));
}

TEST(ChunkTable, FindsTheNearest) {
  std::vector<TableEntry> entries;
  for (int64_t batch : {2, 8})
    for (int64_t length : {100, 400, 1600}) {
      entries.push_back(makeEntry(length, batch));
      entries.back().batch = {1, 100};
      entries.back().length = {1, 100000};
    }
  // Others around them, and one that is near but too narrow.
  entries.push_back(makeEntry(410, 2));
  entries.back().length = {410, 410};
  entries.push_back(makeEntry(400, 2));
  entries.back().device = "a";
  entries.push_back(makeEntry(400, 2));
  entries.back().units = 1;
  ChunkTable table = makeTable(entries);
  auto find = [&](int64_t batch, int64_t length) {
    Problem problem = makeEntry(length, batch).problem;
    const TableEntry *entry = table.find(makeDevice(), problem);
    EXPECT_TRUE(entry);
    return entry ? std::make_pair(entry->problem.batch, entry->problem.length)
                 : std::make_pair(int64_t(0), int64_t(0));
  };
  using Pair = std::pair<int64_t, int64_t>;
  EXPECT_EQ(find(2, 400), Pair(2, 400));
  EXPECT_EQ(find(2, 410), Pair(2, 410));
  EXPECT_EQ(find(2, 411), Pair(2, 400));
  EXPECT_EQ(find(1, 1), Pair(2, 100));
  EXPECT_EQ(find(100, 100000), Pair(8, 1600));
  // 150 is nearer to 100 in difference and in ratio; 250 only in difference.
  EXPECT_EQ(find(2, 150), Pair(2, 100));
  EXPECT_EQ(find(2, 249), Pair(2, 400));
  // Halfway between: the smaller.
  EXPECT_EQ(find(2, 200), Pair(2, 100));
  EXPECT_EQ(find(4, 400), Pair(2, 400));
  EXPECT_EQ(find(5, 400), Pair(8, 400));
}

TEST(ChunkTable, FindIsFast) {
  std::vector<TableEntry> entries;
  for (int64_t units = 1; units <= 8; ++units)
    for (int64_t channels = 1; channels <= 16; ++channels)
      for (int64_t length = 64; length <= 65536; length *= 2) {
        entries.push_back(makeEntry(length));
        entries.back().units = units;
        entries.back().problem.channels = channels;
      }
  ChunkTable table = makeTable(entries);
  Device device = makeDevice();
  Problem problem = makeEntry().problem;
  double best = Inf;
  for (int round = 0; round < 20; ++round) {
    auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < 1000; ++i) {
      problem.channels = 1 + i % 16;
      ASSERT_TRUE(table.find(device, problem));
    }
    std::chrono::duration<double, std::nano> spent =
        std::chrono::steady_clock::now() - begin;
    best = std::min(best, spent.count() / 1000);
  }
  RecordProperty("nanoseconds", std::to_string(best));
  std::printf("find: %.1f ns\n", best);
  // Far above what it takes, for builds with sanitizers.
  EXPECT_LT(best, 20000);
}

//===----------------------------------------------------------------------===//
// Files
//===----------------------------------------------------------------------===//

TEST(ChunkTable, LoadTellsWhatIsWrongWithAFile) {
  Folder folder;
  std::string path = folder / "t.json";
  EXPECT_FAILS(ChunkTable::load(path), NotFound,
               path + ": expected to open the file, got No such file or "
                      "directory");
  EXPECT_FAILS(ChunkTable::load(folder.path), IOError,
               folder.path + ": expected a file, got a directory");
  write(path, edited("\"units\": 2", "\"units\": 0"));
  EXPECT_FAILS(ChunkTable::load(path), InvalidArgument,
               path + ": entries[0].units: expected an integer of at least 1, "
                      "got 0");
  write(path, "");
  EXPECT_FAILS(ChunkTable::load(path), InvalidArgument,
               path + ":1:1: expected a value, got the end of the text");
  write(path, Valid);
  EXPECT_EQ(take(ChunkTable::load(path)).toJSON(), Valid);
  std::string inside = path + "/t.json";
  EXPECT_FAILS(ChunkTable::load(inside), IOError,
               inside + ": expected to open the file, got Not a directory");
  // A file of 256 MiB and one byte, most of which is not there.
  ASSERT_EQ(truncate(path.c_str(), (off_t(256) << 20) + 1), 0);
  EXPECT_FAILS(ChunkTable::load(path), IOError,
               path + ": expected a file of at most 268435456 bytes, got more");
}

TEST(ChunkTable, MergesIntoNewAndOldFiles) {
  Folder folder;
  std::string path = folder / "a/b/t.json";
  ASSERT_OK(makeTable({makeEntry(64)}).mergeInto(path));
  ASSERT_EQ(chmod(path.c_str(), 0640), 0);
  TableEntry changed = makeEntry(64);
  changed.candidates = {{32, "new", 9, 8, 10, 3}};
  ChunkTable second = makeTable({makeEntry(512), changed});
  ASSERT_OK(second.mergeInto(path));
  ChunkTable both = take(ChunkTable::load(path));
  EXPECT_EQ(both.toJSON(), second.toJSON());
  EXPECT_EQ(read(path), second.toJSON());
  EXPECT_EQ(Folder::list(folder / "a/b"),
            std::vector<std::string>({"t.json", "t.json.lock"}));
  struct stat info;
  ASSERT_EQ(stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0640u);
}

TEST(ChunkTable, MergesIntoWhatALinkPointsTo) {
  Folder folder;
  ASSERT_OK(ChunkTable().mergeInto(folder / "real.json"));
  ASSERT_EQ(symlink("real.json", (folder / "link.json").c_str()), 0);
  ChunkTable table = makeTable({makeEntry()});
  ASSERT_OK(table.mergeInto(folder / "link.json"));
  EXPECT_EQ(read(folder / "real.json"), table.toJSON());
  struct stat info;
  ASSERT_EQ(lstat((folder / "link.json").c_str(), &info), 0);
  EXPECT_TRUE(S_ISLNK(info.st_mode));
}

TEST(ChunkTable, LeavesDamagedFilesAlone) {
  Folder folder;
  std::string path = folder / "t.json";
  ChunkTable table = makeTable({makeEntry()});
  for (const std::string &text : {std::string(), std::string(Valid, 100),
                                  edited("\"version\": 1", "\"version\": 2")}) {
    write(path, text);
    Status status = table.mergeInto(path);
    EXPECT_EQ(status.code(), StatusCode::InvalidArgument);
    EXPECT_EQ(status.message().find(path + ":"), 0u) << status.message();
    EXPECT_EQ(read(path), text);
  }
  EXPECT_EQ(Folder::list(folder.path),
            std::vector<std::string>({"t.json", "t.json.lock"}));
}

TEST(ChunkTable, FailsToMergeWhereItCannotWrite) {
  Folder folder;
  ChunkTable table = makeTable({makeEntry()});
  write(folder / "file", "");
  EXPECT_STATUS(table.mergeInto(folder / "file/t.json"), IOError,
                folder / "file/t.json.lock" +
                    std::string(": expected to open the lock, got Not a "
                                "directory"));
  EXPECT_STATUS(table.mergeInto(folder / "file/a/t.json"), IOError,
                folder / "file/a" +
                    std::string(": expected to make the directory, got Not a "
                                "directory"));
  ASSERT_EQ(mkdir((folder / "t.json").c_str(), 0777), 0);
  EXPECT_STATUS(table.mergeInto(folder / "t.json"), IOError,
                folder / "t.json" +
                    std::string(": expected a file, got a directory"));
  // A link into nowhere cannot be followed, and nothing is left behind.
  ASSERT_EQ(symlink("none/t.json", (folder / "link").c_str()), 0);
  EXPECT_EQ(table.mergeInto(folder / "link").code(), StatusCode::IOError);
  EXPECT_EQ(Folder::list(folder.path),
            std::vector<std::string>(
                {"file", "link", "link.lock", "t.json", "t.json.lock"}));
}

TEST(ChunkTable, ConcurrentMergesLoseNothing) {
  constexpr int threads = 8, processes = 4, merges = 25;
  Folder folder;
  std::string path = folder / "t.json";
  // Entry `index` of worker `worker`, told apart by channels and length.
  auto merge = [&](int worker) {
    for (int i = 0; i < merges; ++i) {
      TableEntry entry = makeEntry(100 + i);
      entry.problem.channels = worker + 1;
      ChunkTable table;
      if (!table.add(entry) || !table.mergeInto(path))
        return false;
    }
    return true;
  };
  // The processes first: a process with threads is not forked.
  std::vector<pid_t> children;
  for (int i = 0; i < processes; ++i) {
    pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0)
      _exit(merge(threads + i) ? 0 : 1);
    children.push_back(child);
  }
  std::vector<std::thread> workers;
  std::atomic<int> failures{0};
  std::atomic<bool> done{false};
  for (int i = 0; i < threads; ++i)
    workers.emplace_back([&, i] { failures += !merge(i); });
  // Readers never see half a file.
  std::thread reader([&] {
    while (!done) {
      Expected<ChunkTable> table = ChunkTable::load(path);
      if (!table && table.status().code() != StatusCode::NotFound) {
        ADD_FAILURE() << table.status().toString();
        break;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  });
  for (std::thread &worker : workers)
    worker.join();
  for (pid_t child : children) {
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  done = true;
  reader.join();
  EXPECT_EQ(failures, 0);
  ChunkTable table = take(ChunkTable::load(path));
  EXPECT_EQ(table.entries().size(),
            static_cast<size_t>((threads + processes) * merges));
  EXPECT_EQ(Folder::list(folder.path),
            std::vector<std::string>({"t.json", "t.json.lock"}));
}

//===----------------------------------------------------------------------===//
// The layer below
//===----------------------------------------------------------------------===//

TEST(Json, ReadsEveryKind) {
  json::Document document = take(json::Document::parse(
      R"({"a": -5, "b": 2.5, "c": true, "d": "", "e": {"z": 1, "y": 2},
          "f": [1, [2]], "g": null, "h": 9223372036854775807,
          "i": 18446744073709551615, "j": -0.0})",
      "t.json"));
  json::Object root = document.root().object();
  EXPECT_EQ(root.integer("a", -5, -5), -5);
  EXPECT_EQ(root.number("a"), -5);
  EXPECT_EQ(root.number("b", 2.5, 2.5), 2.5);
  EXPECT_EQ(root.positive("b"), 2.5);
  EXPECT_TRUE(root.boolean("c"));
  EXPECT_EQ(root.string("d"), "");
  EXPECT_EQ(root.object("e").names(), std::vector<std::string>({"y", "z"}));
  json::Array array = root.array("f");
  ASSERT_EQ(array.size(), 2u);
  EXPECT_EQ(array[0].integer(), 1);
  EXPECT_EQ(array[1].array()[0].path(), "f[1][0]");
  EXPECT_TRUE(root["g"].isNull());
  EXPECT_EQ(root.integer("h"), std::numeric_limits<int64_t>::max());
  EXPECT_EQ(root.number("i"), 18446744073709551616.0);
  EXPECT_TRUE(std::signbit(root.number("j")));
  EXPECT_TRUE(root.has("a"));
  EXPECT_FALSE(root.has("x"));
  EXPECT_FALSE(root["x"].exists());
  EXPECT_EQ(root.integerOr("x", 7), 7);
  EXPECT_EQ(root.integerOr("a", 7), -5);
  EXPECT_EQ(root.numberOr("x", 0.5), 0.5);
  EXPECT_EQ(root.numberOr("b", 0.5), 2.5);
  EXPECT_TRUE(root.booleanOr("x", true));
  EXPECT_TRUE(root.booleanOr("c", false));
  EXPECT_EQ(root.stringOr("x", "y"), "y");
  EXPECT_EQ(root.stringOr("d", "y"), "");
  root.finish();
  EXPECT_TRUE(document.isOk()) << document.status().toString();
}

TEST(Json, TellsTheFirstFailure) {
  auto message = [](auto read) {
    json::Document document = take(json::Document::parse(
        R"({"a": 5, "b": 2.5, "c": "x", "d": "", "e": {"z": [3]}})", "t.json"));
    json::Object root = document.root().object();
    read(root);
    // What fails later is not told.
    root.integer("none");
    root.finish();
    EXPECT_EQ(document.status().code(), StatusCode::InvalidArgument);
    return document.status().message();
  };
  using Root = json::Object;
  EXPECT_EQ(message([](Root &r) { EXPECT_EQ(r.integer("a", 6), 6); }),
            "t.json: a: expected an integer of at least 6, got 5");
  EXPECT_EQ(message([](Root &r) { EXPECT_EQ(r.integer("a", -1, 4), 0); }),
            "t.json: a: expected an integer from -1 to 4, got 5");
  EXPECT_EQ(message([](Root &r) { r.integer("a", json::kLeastInteger, 4); }),
            "t.json: a: expected an integer of at most 4, got 5");
  EXPECT_EQ(message([](Root &r) { EXPECT_EQ(r.number("b", 3), 3); }),
            "t.json: b: expected a number of at least 3, got 2.5");
  EXPECT_EQ(message([](Root &r) { EXPECT_EQ(r.number("b", 0, 1), 0); }),
            "t.json: b: expected a number from 0 to 1, got 2.5");
  EXPECT_EQ(message([](Root &r) { r.number("b", -json::kInfinity, 1); }),
            "t.json: b: expected a number of at most 1, got 2.5");
  EXPECT_EQ(message([](Root &r) { EXPECT_EQ(r.positive("c"), 1); }),
            "t.json: c: expected a number above 0, got \"x\"");
  EXPECT_EQ(message([](Root &r) { EXPECT_FALSE(r.boolean("a")); }),
            "t.json: a: expected true or false, got 5");
  EXPECT_EQ(message([](Root &r) { r.name("d"); }),
            "t.json: d: expected a string that is not empty, got \"\"");
  EXPECT_EQ(message([](Root &r) { EXPECT_EQ(r.array("e").size(), 0u); }),
            "t.json: e: expected an array, got an object");
  EXPECT_EQ(message([](Root &r) { r.object("a").integer("b"); }),
            "t.json: a: expected an object, got 5");
  EXPECT_EQ(message([](Root &r) { r.object("e").array("z")[0].string(); }),
            "t.json: e.z[0]: expected a string, got 3");
  EXPECT_EQ(message([](Root &r) { r["e"].failAt(".z[0]", "2", "1"); }),
            "t.json: e.z[0]: expected 2, got 1");
  EXPECT_EQ(message([](Root &r) { r.value().failAt(".e.z", "2", "1"); }),
            "t.json: e.z: expected 2, got 1");
  EXPECT_EQ(message([](Root &r) { r["c"].fail("\"y\""); }),
            "t.json: c: expected \"y\", got \"x\"");
  EXPECT_EQ(message([](Root &r) { r.finish(); }),
            "t.json: expected no fields but none, got \"a\"");
  EXPECT_EQ(message([](Root &r) { r.integerOr("c", 1); }),
            "t.json: c: expected an integer, got \"x\"");
}

TEST(Json, WritesInOrder) {
  json::Writer writer;
  writer.beginObject().key("z\"").beginArray();
  writer.integer(-1).number(0.1).number(-0.0).number(1e300).boolean(true);
  writer.beginObject(json::Writer::Line);
  writer.key("a").beginArray().string("\x01").string("\xc3\xa9").endArray();
  writer.key("b").beginObject().endObject().endObject();
  writer.beginObject().endObject().endArray().endObject();
  EXPECT_EQ(writer.take(), R"({
  "z\"": [
    -1,
    0.1,
    -0.0,
    1e+300,
    true,
    {"a": ["\u0001", ")"
                           "\xc3\xa9"
                           R"("], "b": {}},
    {}
  ]
}
)" + std::string());
}

TEST(Json, WritesFilesInOneStep) {
  Folder folder;
  std::string path = folder / "a/b.json";
  ASSERT_OK(json::writeFileAtomically(path, "one"));
  ASSERT_OK(json::writeFileAtomically(path, ""));
  EXPECT_EQ(take(json::readFile(path)), "");
  std::string large(3000000, 'x');
  ASSERT_OK(json::writeFileAtomically(path, large));
  EXPECT_EQ(take(json::readFile(path)), large);
  // A folder in its place is not replaced, and nothing is left behind.
  EXPECT_STATUS(json::writeFileAtomically(folder / "a", "one"), IOError,
                folder / "a" + ": expected to write the file, got Is a "
                               "directory");
  EXPECT_EQ(Folder::list(folder.path), std::vector<std::string>({"a"}));
  EXPECT_EQ(Folder::list(folder / "a"), std::vector<std::string>({"b.json"}));
}

//===----------------------------------------------------------------------===//
// The cache
//===----------------------------------------------------------------------===//

TEST(ChunkTable, CachePathFollowsTheEnvironment) {
  {
    Environment a("COREY_CACHE_DIR", "/a/b"), b("XDG_CACHE_HOME", "/x");
    EXPECT_EQ(cacheDirectory(), "/a/b");
    EXPECT_EQ(cachePath(), "/a/b/chunk-table.json");
  }
  Environment a("COREY_CACHE_DIR", nullptr);
  {
    Environment b("XDG_CACHE_HOME", "/x"), c("HOME", "/h");
    EXPECT_EQ(cachePath(), "/x/corey/chunk-table.json");
    for (const char *off : {"", "off"}) {
      Environment d("COREY_CACHE_DIR", off);
      EXPECT_EQ(cachePath(), "");
    }
  }
  for (const char *none : {static_cast<const char *>(nullptr), ""}) {
    Environment b("XDG_CACHE_HOME", none), c("HOME", "/h");
    EXPECT_EQ(cacheDirectory(), "/h/.cache/corey");
    EXPECT_EQ(cachePath(), "/h/.cache/corey/chunk-table.json");
    Environment d("HOME", none);
    EXPECT_EQ(cacheDirectory(), "");
    EXPECT_EQ(cachePath(), "");
  }
}

TEST(ChunkTable, CacheLiesOverWhatIsShipped) {
  std::string shipped = ChunkTable::shipped().toJSON();
  EXPECT_EQ(take(ChunkTable::parse(shipped)).toJSON(), shipped);
  EXPECT_EQ(&ChunkTable::shipped(), &ChunkTable::shipped());
  {
    Environment a("COREY_CACHE_DIR", nullptr), b("XDG_CACHE_HOME", nullptr),
        c("HOME", nullptr);
    EXPECT_EQ(take(ChunkTable::shippedAndCached()).toJSON(), shipped);
  }
  Folder folder;
  Environment a("COREY_CACHE_DIR", (folder / "cache").c_str());
  EXPECT_EQ(take(ChunkTable::shippedAndCached()).toJSON(), shipped);

  TableEntry entry = makeEntry(12345);
  entry.device = "a device of this test";
  ASSERT_OK(makeTable({entry}).mergeInto(cachePath()));
  ChunkTable both = take(ChunkTable::shippedAndCached());
  EXPECT_EQ(both.entries().size(), ChunkTable::shipped().entries().size() + 1);
  Device device = makeDevice();
  device.name = entry.device;
  EXPECT_TRUE(both.find(device, entry.problem));

  write(cachePath(), "{");
  EXPECT_FAILS(ChunkTable::shippedAndCached(), InvalidArgument,
               cachePath() + ":1:2: expected the name of a field in quotes, "
                             "got the end of the text");
}
} // namespace
