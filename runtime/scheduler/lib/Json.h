//===- Json.h - Checked JSON and the files it lies in -----------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// A layer over nlohmann::json that never throws and checks everything: a file
// is parsed into a Document, whose Values, Objects and Arrays are read by name
// with the kinds and ranges that are expected. The first failure is remembered
// by the Document and later reads return harmless values, so that a reader is a
// list of fields with one check at its end:
//
//   Expected<json::Document> document = json::Document::parse(text, "t.json");
//   if (!document)
//     return document.takeStatus();
//   json::Object root = document->root().object();
//   json::checkHeader(root, "corey-chunk-table", 1);
//   json::Array entries = root.array("entries");
//   for (size_t i = 0; i < entries.size() && document->isOk(); ++i) {
//     json::Object entry = entries[i].object();
//     int64_t units = entry.integer("units", 1);
//     entry.finish();
//   }
//   root.finish();
//   if (!document->isOk())
//     return document->status();
//
// Messages read "t.json: entries[3].units: expected an integer of at least 1,
// got "abc"".
//
//===----------------------------------------------------------------------===//

#ifndef COREY_SCHEDULER_LIB_JSON_H
#define COREY_SCHEDULER_LIB_JSON_H

#include "corey/Status.h"
#include <cstdint>
#include <limits>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace corey::scheduler::json {

//===----------------------------------------------------------------------===//
// Reading
//===----------------------------------------------------------------------===//

class Array;
class Object;
struct State;

constexpr int64_t kLeastInteger = std::numeric_limits<int64_t>::min();
constexpr int64_t kMostInteger = std::numeric_limits<int64_t>::max();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Containers inside one another that a file may have.
constexpr int kMaxDepth = 32;
/// Bytes that a file may have.
constexpr size_t kMaxBytes = size_t(256) << 20;

/// A value of a Document, or the lack of one: what reads it says which kind is
/// expected. Valid as long as its Document.
class Value {
public:
  bool exists() const { return node; }
  bool isNull() const;
  bool isBoolean() const;
  bool isNumber() const;
  bool isString() const;
  bool isObject() const;
  bool isArray() const;

  // Whatever fails these returns the value nearest to 0 that is allowed.

  /// An integer, written as one, within [least, most].
  int64_t integer(int64_t least = kLeastInteger,
                  int64_t most = kMostInteger) const;
  /// A number within [least, most]. All numbers of a Document are finite.
  double number(double least = -kInfinity, double most = kInfinity) const;
  /// A number above zero, else 1.
  double positive() const;
  bool boolean() const;
  /// A string, which may be empty.
  std::string string() const;
  /// A string of at least one character.
  std::string name() const;
  Object object() const;
  Array array() const;

  /// Records "<document>: <path>: expected <expected>, got <got>"; `got` is the
  /// value itself if left out. For checks that go beyond kind and range.
  void fail(std::string_view expected) const;
  void fail(std::string_view expected, std::string_view got) const;
  /// The same for something inside the value, for example ".low".
  void failAt(std::string_view inside, std::string_view expected,
              std::string_view got) const;

  /// Where it is, for example "entries[3].length"; empty for the root.
  const std::string &path() const { return where; }

private:
  friend class Array;
  friend class Document;
  friend class Object;
  friend void checkHeader(Object &root, std::string_view schema,
                          int64_t version);
  Value(State *state, const nlohmann::json *node, std::string where)
      : state(state), node(node), where(std::move(where)) {}
  State *state;
  const nlohmann::json *node;
  std::string where;
};

/// The elements of an array; none if there was no array where one was expected.
class Array {
public:
  size_t size() const;
  Value operator[](size_t index) const;
  const Value &value() const { return self; }

private:
  friend class Value;
  explicit Array(Value self) : self(std::move(self)) {}
  Value self;
};

/// The fields of an object; none if there was no object where one was expected.
/// It remembers the fields that were asked for.
class Object {
public:
  bool has(std::string_view field) const;
  /// The field, or a Value that does not exist: an error only once it is read.
  Value operator[](std::string_view field);
  /// The names of all fields, sorted, for objects that are maps.
  std::vector<std::string> names() const;

  // Fields that must be there.
  int64_t integer(std::string_view field, int64_t least = kLeastInteger,
                  int64_t most = kMostInteger);
  double number(std::string_view field, double least = -kInfinity,
                double most = kInfinity);
  double positive(std::string_view field);
  bool boolean(std::string_view field);
  std::string string(std::string_view field);
  std::string name(std::string_view field);
  Object object(std::string_view field);
  Array array(std::string_view field);

  // Fields that may be left out.
  int64_t integerOr(std::string_view field, int64_t fallback,
                    int64_t least = kLeastInteger, int64_t most = kMostInteger);
  double numberOr(std::string_view field, double fallback,
                  double least = -kInfinity, double most = kInfinity);
  bool booleanOr(std::string_view field, bool fallback);
  std::string stringOr(std::string_view field, std::string_view fallback);

  /// Records a failure if there is a field that was never asked for.
  void finish();

  const Value &value() const { return self; }

private:
  friend class Value;
  friend void checkHeader(Object &root, std::string_view schema,
                          int64_t version);
  explicit Object(Value self) : self(std::move(self)) {}
  Value self;
  std::vector<std::string> asked;
};

/// A parsed text, and the first failure of reading it.
class Document {
public:
  /// Errors: InvalidArgument "<name>:<line>:<column>: expected ..., got ..."
  /// for text that is not one JSON value in UTF-8, has an object with the same
  /// field twice, nests deeper than kMaxDepth, has a number that a double
  /// cannot hold, or is longer than kMaxBytes. Columns are bytes from 1.
  static Expected<Document> parse(std::string_view text, std::string_view name);
  Document(Document &&);
  Document &operator=(Document &&);
  ~Document();

  Value root() const;
  bool isOk() const { return status().isOk(); }
  /// The first failure of reading it (InvalidArgument).
  const Status &status() const;

private:
  Document();
  std::unique_ptr<State> state;
};

/// Reads the fields "schema" and "version" and records a failure if they are
/// not these. Read them first: of a file of a newer release nothing else is
/// known.
void checkHeader(Object &root, std::string_view schema, int64_t version);

//===----------------------------------------------------------------------===//
// Writing
//===----------------------------------------------------------------------===//

/// Writes JSON in the order of the calls, indented by two, with the containers
/// that are begun as `Line` on one line. Doubles are the shortest that read
/// back as the same.
class Writer {
public:
  enum Layout { Block, Line };

  Writer &beginObject(Layout layout = Block) { return begin('{', layout); }
  Writer &endObject() { return end('}'); }
  Writer &beginArray(Layout layout = Block) { return begin('[', layout); }
  Writer &endArray() { return end(']'); }
  /// The name of the field whose value comes next.
  Writer &key(std::string_view name);
  Writer &integer(int64_t value);
  /// `value` must be finite.
  Writer &number(double value);
  Writer &boolean(bool value);
  /// `value` must be UTF-8.
  Writer &string(std::string_view value);

  /// The text, with a newline at its end, once every container has ended.
  std::string take();

private:
  Writer &begin(char bracket, Layout layout);
  Writer &end(char bracket);
  void separate();
  void newLine();

  struct Level {
    Layout layout;
    bool empty = true;
  };
  std::string text;
  std::vector<Level> levels;
  bool afterKey = false;
};

/// `value` as a JSON string, quotes included.
std::string quoted(std::string_view value);
/// `value` as Writer writes it; "nan", "inf" and "-inf" for messages.
std::string shortest(double value);
bool isUTF8(std::string_view text);

//===----------------------------------------------------------------------===//
// Files
//===----------------------------------------------------------------------===//

/// Errors: NotFound if there is no such file; IOError if it cannot be read, is
/// a directory or has more than kMaxBytes.
Expected<std::string> readFile(const std::string &path);

/// Writes a file in one step: who opens it sees the old text or the new one,
/// also after a crash. Makes its folders; leaves nothing behind if it fails.
/// Errors: IOError.
Status writeFileAtomically(const std::string &path, std::string_view text);

/// Keeps others, in this process and elsewhere, from holding a lock on the same
/// path. The lock is that of the file `path`.lock, which stays.
class FileLock {
public:
  /// Waits for the lock; makes the file and its folders. Errors: IOError.
  static Expected<FileLock> acquire(const std::string &path);
  FileLock(FileLock &&other) : descriptor(other.descriptor) {
    other.descriptor = -1;
  }
  FileLock &operator=(FileLock &&) = delete;
  ~FileLock();

private:
  explicit FileLock(int descriptor) : descriptor(descriptor) {}
  int descriptor;
};

} // namespace corey::scheduler::json

#endif // COREY_SCHEDULER_LIB_JSON_H
