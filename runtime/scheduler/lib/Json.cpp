//===- Json.cpp - Checked JSON and the files it lies in -------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "Json.h"

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sys/file.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>

namespace corey::scheduler::json {

/// What the Values of a Document point to.
struct State {
  std::string name;
  nlohmann::json root;
  Status failure;
};

//===----------------------------------------------------------------------===//
// Text
//===----------------------------------------------------------------------===//

/// Where the first thing lies that is not UTF-8; the length if there is none.
static size_t findNonUTF8(std::string_view text) {
  auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  size_t i = 0;
  while (i < text.size()) {
    unsigned char first = byte(i);
    if (first < 0x80) {
      ++i;
      continue;
    }
    size_t length = first < 0xc2   ? 0
                    : first < 0xe0 ? 2
                    : first < 0xf0 ? 3
                    : first < 0xf5 ? 4
                                   : 0;
    if (!length || length > text.size() - i)
      return i;
    for (size_t k = 1; k < length; ++k)
      if ((byte(i + k) & 0xc0) != 0x80)
        return i;
    // Too long a form, surrogates, and what lies above U+10FFFF.
    unsigned char second = byte(i + 1);
    if ((first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f) ||
        (first == 0xf0 && second < 0x90) || (first == 0xf4 && second > 0x8f))
      return i;
    i += length;
  }
  return i;
}

bool isUTF8(std::string_view text) { return findNonUTF8(text) == text.size(); }

static void appendByte(std::string &text, unsigned char byte) {
  constexpr char digits[] = "0123456789abcdef";
  text += digits[byte >> 4];
  text += digits[byte & 15];
}

std::string quoted(std::string_view value) {
  std::string text = "\"";
  for (char c : value) {
    unsigned char byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      text += '\\';
      text += c;
    } else if (c == '\n') {
      text += "\\n";
    } else if (c == '\t') {
      text += "\\t";
    } else if (byte < 0x20 || byte == 0x7f) {
      text += "\\u00";
      appendByte(text, byte);
    } else {
      text += c;
    }
  }
  return text += '"';
}

std::string shortest(double value) {
  // JSON's -0 is an integer, and integers have no negative zero.
  if (value == 0 && std::signbit(value))
    return "-0.0";
  char buffer[32];
  return std::string(buffer,
                     std::to_chars(buffer, buffer + sizeof(buffer), value).ptr);
}

/// The beginning of a long text, cut between characters.
static std::string_view shortened(std::string_view text, size_t most) {
  if (text.size() <= most)
    return text;
  while (most && (static_cast<unsigned char>(text[most]) & 0xc0) == 0x80)
    --most;
  return text.substr(0, most);
}

static std::string describe(const nlohmann::json *node) {
  if (!node)
    return "nothing";
  switch (node->type()) {
  case nlohmann::json::value_t::object:
    return "an object";
  case nlohmann::json::value_t::array:
    return "an array";
  case nlohmann::json::value_t::string: {
    std::string_view text = *node->get_ptr<const std::string *>();
    std::string_view begin = shortened(text, 60);
    return quoted(begin) + (begin.size() < text.size() ? "..." : "");
  }
  case nlohmann::json::value_t::number_float: {
    std::string text =
        shortest(*node->get_ptr<const nlohmann::json::number_float_t *>());
    // So that nobody is told that 2 is no integer.
    return text.find_first_of(".e") == std::string::npos ? text + ".0" : text;
  }
  default:
    return node->dump();
  }
}

//===----------------------------------------------------------------------===//
// Parsing
//===----------------------------------------------------------------------===//

namespace {
/// Passes characters on and tells how far it got, which events do not.
class CountingIterator {
public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char *;
  using reference = const char &;

  CountingIterator(const char *at, const char **last) : at(at), last(last) {}
  reference operator*() const { return *at; }
  CountingIterator &operator++() {
    *last = ++at;
    return *this;
  }
  CountingIterator operator++(int) {
    CountingIterator old = *this;
    ++*this;
    return old;
  }
  bool operator==(const CountingIterator &other) const {
    return at == other.at;
  }
  bool operator!=(const CountingIterator &other) const {
    return at != other.at;
  }

private:
  const char *at;
  const char **last;
};

/// Builds the value and refuses what the library lets pass.
class Handler {
public:
  using json = nlohmann::json;

  Handler(std::string_view text, std::string_view name, json &root)
      : read(text.data()), text(text), name(name), root(root) {}

  bool null() { return put(nullptr); }
  bool boolean(bool value) { return put(value); }
  bool number_integer(json::number_integer_t value) { return put(value); }
  bool number_unsigned(json::number_unsigned_t value) { return put(value); }
  bool number_float(json::number_float_t value, const std::string &) {
    return put(value);
  }
  bool string(std::string &value) { return put(std::move(value)); }
  bool binary(json::binary_t &) { return false; }
  bool start_object(size_t) { return open(json::value_t::object); }
  bool start_array(size_t) { return open(json::value_t::array); }
  bool end_object() { return close(); }
  bool end_array() { return close(); }

  bool key(std::string &value) {
    auto &fields = *containers.back()->get_ptr<json::object_t *>();
    auto [field, isNew] = fields.emplace(std::move(value), nullptr);
    slot = &field->second;
    if (isNew)
      return true;
    size_t end = read - text.data();
    size_t begin = beginOfString(end);
    return fail(begin, "every field of an object once",
                std::string(shortened(text.substr(begin, end - begin), 60)) +
                    " again");
  }

  bool parse_error(size_t position, const std::string &,
                   const nlohmann::detail::exception &error);

  bool fail(size_t offset, std::string_view expected, std::string_view got) {
    std::string_view before = text.substr(0, offset);
    size_t line = 1 + std::count(before.begin(), before.end(), '\n');
    size_t newLine = before.rfind('\n');
    size_t column =
        newLine == before.npos ? offset + 1 : before.size() - newLine;
    std::string message(name);
    message += ':' + std::to_string(line) + ':' + std::to_string(column) +
               ": expected ";
    message += expected;
    message += ", got ";
    message += got;
    failure = Status::invalidArgument(std::move(message));
    return false;
  }

  const char *read;
  Status failure;

private:
  /// Stores a value in the field whose key came, in the array that is open, or
  /// as the root.
  template <class T> json *store(T &&value) {
    if (slot) {
      json *at = slot;
      slot = nullptr;
      *at = json(std::forward<T>(value));
      return at;
    }
    if (containers.empty()) {
      root = json(std::forward<T>(value));
      return &root;
    }
    auto &elements = *containers.back()->get_ptr<json::array_t *>();
    elements.emplace_back(std::forward<T>(value));
    return &elements.back();
  }
  template <class T> bool put(T &&value) {
    store(std::forward<T>(value));
    return true;
  }
  bool open(json::value_t kind) {
    if (containers.size() == kMaxDepth)
      return fail(read - text.data() - 1,
                  "at most " + std::to_string(kMaxDepth) +
                      " levels of brackets",
                  "more");
    containers.push_back(store(kind));
    return true;
  }
  bool close() {
    containers.pop_back();
    return true;
  }

  /// Of the string whose closing quote lies before `end`.
  size_t beginOfString(size_t end) const {
    for (size_t i = end - 1; i-- > 0;) {
      if (text[i] != '"')
        continue;
      size_t backslashes = 0;
      while (backslashes < i && text[i - 1 - backslashes] == '\\')
        ++backslashes;
      if (backslashes % 2 == 0)
        return i;
    }
    return 0;
  }

  std::string_view text, name;
  json &root;
  std::vector<json *> containers;
  json *slot = nullptr;
};
} // namespace

static bool isWord(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') ||
         (c >= 'A' && c <= 'Z') || c == '+' || c == '-' || c == '.' || c == '_';
}

static bool startsWith(std::string_view text, std::string_view start) {
  return text.substr(0, start.size()) == start;
}

static bool endsWith(std::string_view text, std::string_view end) {
  return text.size() >= end.size() &&
         text.substr(text.size() - end.size()) == end;
}

/// Tells in our words what the library found: `position` counts the characters
/// it had read, the end of the text among them.
bool Handler::parse_error(size_t position, const std::string &,
                          const nlohmann::detail::exception &error) {
  std::string_view what = error.what();

  // What it expected.
  constexpr std::pair<const char *, const char *> tokens[] = {
      {"; expected end of input", "the end of the text"},
      {"; expected '[', '{', or a literal", "a value"},
      {"; expected string literal", "the name of a field in quotes"},
      {"; expected ':'", "':'"},
      {"; expected ']'", "',' or ']'"},
      {"; expected '}'", "',' or '}'"}};
  constexpr std::pair<const char *, const char *> characters[] = {
      {"invalid number", "a digit"},
      {"invalid string: missing closing quote", "a closing quote"},
      {"invalid string: control character",
       "control characters to be written as \\u and four digits"},
      {"invalid string: '\\u' must be", "four hexadecimal digits after \\u"},
      {"invalid string: surrogate U+D800", "the second half of a surrogate"},
      {"invalid string: surrogate", "the first half of a surrogate before it"},
      {"invalid string: forbidden character",
       "one of \"\\/bfnrtu after a backslash"},
      {"invalid BOM", "a byte order mark of UTF-8"}};
  std::string_view expected;
  bool oneCharacter = false;
  size_t dash = what.find(" - ");
  if (dash != what.npos)
    for (auto &[found, words] : characters)
      if (startsWith(what.substr(dash + 3), found)) {
        expected = words;
        oneCharacter = true;
        break;
      }
  if (expected.empty())
    for (auto &[found, words] : tokens)
      if (endsWith(what, found))
        expected = words;
  if (expected.empty())
    expected = error.id == 406 ? "a number that a double can hold" : "a value";

  // What there was: one character, a string, or a word.
  if (position == 0 || position > text.size())
    return fail(text.size(), expected, "the end of the text");
  size_t begin = position - 1, end = position;
  if (!oneCharacter) {
    // Of a literal that broke off the library tells the character after it.
    bool isBroken = what.find(" - invalid literal") != what.npos;
    if (text[begin] == '"' && !isBroken) {
      begin = beginOfString(end);
    } else {
      size_t word = begin;
      while (word > 0 && isWord(text[word - 1]))
        --word;
      if (isWord(text[begin])) {
        begin = word;
        while (end < text.size() && isWord(text[end]))
          ++end;
      } else if (isBroken && word < begin && std::strchr("tfn", text[word])) {
        end = begin;
        begin = word;
      }
    }
  }
  std::string_view token = text.substr(begin, end - begin);
  unsigned char byte = static_cast<unsigned char>(token[0]);
  if (token.size() == 1 && (byte < 0x20 || byte >= 0x7f)) {
    std::string got = "byte 0x";
    appendByte(got, byte);
    return fail(begin, expected, got);
  }
  std::string got = token[0] == '"' && token.size() > 1 ? "" : "'";
  std::string quote = got;
  std::string_view part = shortened(token, 60);
  got += part;
  if (part.size() < token.size())
    got += "...";
  return fail(begin, expected, got + quote);
}

Document::Document() : state(std::make_unique<State>()) {}
Document::Document(Document &&) = default;
Document &Document::operator=(Document &&) = default;
Document::~Document() = default;

Expected<Document> Document::parse(std::string_view text,
                                   std::string_view name) {
  Document document;
  document.state->name = std::string(name);
  Handler handler(text, name, document.state->root);
  auto fail = [&](size_t offset, std::string_view expected,
                  std::string_view got) {
    handler.fail(offset, expected, got);
    return handler.failure;
  };
  if (text.size() > kMaxBytes)
    return fail(0, "at most " + std::to_string(kMaxBytes) + " bytes",
                std::to_string(text.size()));
  // The library takes a NUL for the end of the text and tells of bad UTF-8 only
  // after it.
  size_t nul = text.find('\0');
  if (nul != text.npos)
    return fail(nul, "UTF-8", "byte 0x00");
  size_t wrong = findNonUTF8(text);
  if (wrong != text.size()) {
    std::string got = "byte 0x";
    appendByte(got, static_cast<unsigned char>(text[wrong]));
    return fail(wrong, "UTF-8", got);
  }
  const char *end = text.data() + text.size();
  bool parsed =
      nlohmann::json::sax_parse(CountingIterator(text.data(), &handler.read),
                                CountingIterator(end, &handler.read), &handler);
  if (!parsed) {
    if (handler.failure.isOk())
      return Status::internal(document.state->name +
                              ": expected a reason, got none");
    return handler.failure;
  }
  return document;
}

Value Document::root() const {
  return Value(state.get(), &state->root, std::string());
}

const Status &Document::status() const { return state->failure; }

//===----------------------------------------------------------------------===//
// Values
//===----------------------------------------------------------------------===//

bool Value::isNull() const { return node && node->is_null(); }
bool Value::isBoolean() const { return node && node->is_boolean(); }
bool Value::isNumber() const { return node && node->is_number(); }
bool Value::isString() const { return node && node->is_string(); }
bool Value::isObject() const { return node && node->is_object(); }
bool Value::isArray() const { return node && node->is_array(); }

void Value::failAt(std::string_view inside, std::string_view expected,
                   std::string_view got) const {
  // Later ones often follow from the first.
  if (!state->failure.isOk())
    return;
  std::string path = where;
  path += inside;
  if (!path.empty() && path[0] == '.')
    path.erase(0, 1);
  std::string message = state->name + ": ";
  if (!path.empty())
    message += path + ": ";
  message += "expected ";
  message += expected;
  message += ", got ";
  message += got;
  state->failure = Status::invalidArgument(std::move(message));
}

void Value::fail(std::string_view expected, std::string_view got) const {
  failAt("", expected, got);
}

void Value::fail(std::string_view expected) const {
  // Describing costs something, and after a failure nothing comes of it.
  if (state->failure.isOk())
    failAt("", expected, describe(node));
}

template <class T>
static std::string describeRange(const char *kind, T least, bool hasLeast,
                                 T most, bool hasMost,
                                 std::string (*print)(T)) {
  std::string text = kind;
  if (hasLeast && hasMost)
    text += " from " + print(least) + " to " + print(most);
  else if (hasLeast)
    text += " of at least " + print(least);
  else if (hasMost)
    text += " of at most " + print(most);
  return text;
}

/// The integer at `node`, which may be null.
static bool readInteger(const nlohmann::json *node, int64_t &value) {
  using json = nlohmann::json;
  if (!node)
    return false;
  // The order matters: a pointer to a signed integer is had of both kinds.
  if (auto *number = node->get_ptr<const json::number_unsigned_t *>()) {
    value = static_cast<int64_t>(*number);
    return *number <= static_cast<uint64_t>(kMostInteger);
  }
  auto *number = node->get_ptr<const json::number_integer_t *>();
  if (number)
    value = *number;
  return number;
}

int64_t Value::integer(int64_t least, int64_t most) const {
  int64_t value;
  if (readInteger(node, value) && least <= value && value <= most)
    return value;
  fail(describeRange<int64_t>(
      "an integer", least, least != kLeastInteger, most, most != kMostInteger,
      [](int64_t number) { return std::to_string(number); }));
  return std::clamp<int64_t>(0, least, std::max(least, most));
}

/// The number at `node`, which may be null.
static bool readNumber(const nlohmann::json *node, double &value) {
  using json = nlohmann::json;
  if (!node)
    return false;
  if (auto *number = node->get_ptr<const json::number_float_t *>())
    value = *number;
  else if (auto *number = node->get_ptr<const json::number_unsigned_t *>())
    value = static_cast<double>(*number);
  else if (auto *number = node->get_ptr<const json::number_integer_t *>())
    value = static_cast<double>(*number);
  else
    return false;
  return std::isfinite(value);
}

double Value::number(double least, double most) const {
  double value;
  if (readNumber(node, value) && least <= value && value <= most)
    return value;
  fail(describeRange<double>("a number", least, std::isfinite(least), most,
                             std::isfinite(most), shortest));
  return std::clamp<double>(0, least, std::max(least, most));
}

double Value::positive() const {
  double value;
  if (readNumber(node, value) && value > 0)
    return value;
  fail("a number above 0");
  return 1;
}

bool Value::boolean() const {
  if (isBoolean())
    return *node->get_ptr<const bool *>();
  fail("true or false");
  return false;
}

std::string Value::string() const {
  if (isString())
    return *node->get_ptr<const std::string *>();
  fail("a string");
  return std::string();
}

std::string Value::name() const {
  if (isString() && !node->get_ptr<const std::string *>()->empty())
    return string();
  fail("a string that is not empty");
  return std::string();
}

Object Value::object() const {
  if (isObject())
    return Object(*this);
  fail("an object");
  return Object(Value(state, nullptr, where));
}

Array Value::array() const {
  if (isArray())
    return Array(*this);
  fail("an array");
  return Array(Value(state, nullptr, where));
}

//===----------------------------------------------------------------------===//
// Containers
//===----------------------------------------------------------------------===//

size_t Array::size() const { return self.node ? self.node->size() : 0; }

Value Array::operator[](size_t index) const {
  assert(index < size() && "expected an index within the array");
  return Value(self.state, &(*self.node)[index],
               self.where + '[' + std::to_string(index) + ']');
}

static const nlohmann::json *findField(const nlohmann::json *node,
                                       std::string_view field) {
  if (!node)
    return nullptr;
  auto at = node->find(field);
  return at == node->end() ? nullptr : &*at;
}

bool Object::has(std::string_view field) const {
  return findField(self.node, field);
}

Value Object::operator[](std::string_view field) {
  asked.emplace_back(field);
  std::string path = self.where;
  if (!path.empty())
    path += '.';
  path += field;
  return Value(self.state, findField(self.node, field), std::move(path));
}

std::vector<std::string> Object::names() const {
  std::vector<std::string> result;
  if (self.node)
    for (auto &field : *self.node->get_ptr<const nlohmann::json::object_t *>())
      result.push_back(field.first);
  return result;
}

int64_t Object::integer(std::string_view field, int64_t least, int64_t most) {
  return (*this)[field].integer(least, most);
}
double Object::number(std::string_view field, double least, double most) {
  return (*this)[field].number(least, most);
}
double Object::positive(std::string_view field) {
  return (*this)[field].positive();
}
bool Object::boolean(std::string_view field) {
  return (*this)[field].boolean();
}
std::string Object::string(std::string_view field) {
  return (*this)[field].string();
}
std::string Object::name(std::string_view field) {
  return (*this)[field].name();
}
Object Object::object(std::string_view field) {
  return (*this)[field].object();
}
Array Object::array(std::string_view field) { return (*this)[field].array(); }

int64_t Object::integerOr(std::string_view field, int64_t fallback,
                          int64_t least, int64_t most) {
  Value value = (*this)[field];
  return value.exists() ? value.integer(least, most) : fallback;
}
double Object::numberOr(std::string_view field, double fallback, double least,
                        double most) {
  Value value = (*this)[field];
  return value.exists() ? value.number(least, most) : fallback;
}
bool Object::booleanOr(std::string_view field, bool fallback) {
  Value value = (*this)[field];
  return value.exists() ? value.boolean() : fallback;
}
std::string Object::stringOr(std::string_view field,
                             std::string_view fallback) {
  Value value = (*this)[field];
  return value.exists() ? value.string() : std::string(fallback);
}

void Object::finish() {
  if (!self.node || !self.state->failure.isOk())
    return;
  for (auto &field : *self.node->get_ptr<const nlohmann::json::object_t *>()) {
    if (std::find(asked.begin(), asked.end(), field.first) != asked.end())
      continue;
    std::string known;
    for (const std::string &name : asked)
      known += (known.empty() ? "" : ", ") + name;
    nlohmann::json unknown(field.first);
    self.fail("no fields but " + (known.empty() ? "none" : known),
              describe(&unknown));
    return;
  }
}

void checkHeader(Object &root, std::string_view schema, int64_t version) {
  Value found = root["schema"];
  if (!found.isString() ||
      *found.node->get_ptr<const std::string *>() != schema) {
    if (root.self.node)
      root.self.fail("schema " + quoted(schema), describe(found.node));
    return;
  }
  found = root["version"];
  int64_t number;
  bool isInteger = readInteger(found.node, number);
  if (isInteger && number == version)
    return;
  std::string got = describe(found.node);
  if (isInteger && number > version)
    got += ": written by a newer release";
  root.self.fail("version " + std::to_string(version), got);
}

//===----------------------------------------------------------------------===//
// Writing
//===----------------------------------------------------------------------===//

void Writer::newLine() {
  text += '\n';
  text.append(2 * levels.size(), ' ');
}

/// What stands between the last value and the next.
void Writer::separate() {
  if (afterKey) {
    afterKey = false;
    return;
  }
  if (levels.empty())
    return;
  Level &level = levels.back();
  if (!level.empty)
    text += ',';
  if (level.layout == Block)
    newLine();
  else if (!level.empty)
    text += ' ';
  level.empty = false;
}

Writer &Writer::begin(char bracket, Layout layout) {
  separate();
  text += bracket;
  // Inside a line everything is on it.
  if (!levels.empty() && levels.back().layout == Line)
    layout = Line;
  levels.push_back({layout});
  return *this;
}

Writer &Writer::end(char bracket) {
  assert(!levels.empty() && !afterKey && "expected a container to end");
  Level level = levels.back();
  levels.pop_back();
  if (level.layout == Block && !level.empty)
    newLine();
  text += bracket;
  return *this;
}

Writer &Writer::key(std::string_view name) {
  separate();
  text += quoted(name);
  text += ": ";
  afterKey = true;
  return *this;
}

Writer &Writer::integer(int64_t value) {
  separate();
  text += std::to_string(value);
  return *this;
}

Writer &Writer::number(double value) {
  assert(std::isfinite(value) && "JSON has no other numbers");
  separate();
  text += std::isfinite(value) ? shortest(value) : "null";
  return *this;
}

Writer &Writer::boolean(bool value) {
  separate();
  text += value ? "true" : "false";
  return *this;
}

Writer &Writer::string(std::string_view value) {
  assert(isUTF8(value) && "JSON has no other strings");
  separate();
  text += quoted(value);
  return *this;
}

std::string Writer::take() {
  assert(levels.empty() && "expected every container to have ended");
  text += '\n';
  return std::move(text);
}

//===----------------------------------------------------------------------===//
// Files
//===----------------------------------------------------------------------===//

static Status systemError(const std::string &path, const char *action,
                          int error) {
  std::string message = path + ": expected to " + action + ", got " +
                        std::generic_category().message(error);
  return error == ENOENT ? Status::notFound(message) : Status::ioError(message);
}

namespace {
/// Closes a file.
struct Descriptor {
  int number;
  explicit Descriptor(int number) : number(number) {}
  Descriptor(const Descriptor &) = delete;
  ~Descriptor() {
    if (number >= 0)
      close(number);
  }
};
} // namespace

static int openFile(const std::string &path, int flags) {
  int result;
  do
    result = open(path.c_str(), flags | O_CLOEXEC, 0666);
  while (result < 0 && errno == EINTR);
  return result;
}

Expected<std::string> readFile(const std::string &path) {
  Descriptor file(openFile(path, O_RDONLY));
  if (file.number < 0)
    return systemError(path, "open the file", errno);
  struct stat info;
  if (fstat(file.number, &info))
    return systemError(path, "read the file", errno);
  if (S_ISDIR(info.st_mode))
    return Status::ioError(path + ": expected a file, got a directory");
  auto tooLarge = [&] {
    return Status::ioError(path + ": expected a file of at most " +
                           std::to_string(kMaxBytes) + " bytes, got more");
  };
  // The size is that of regular files only, and they may be growing.
  std::string text;
  size_t chunk = 1 << 16;
  if (info.st_size > 0) {
    if (static_cast<uint64_t>(info.st_size) > kMaxBytes)
      return tooLarge();
    chunk = static_cast<size_t>(info.st_size) + 1;
  }
  while (true) {
    size_t used = text.size();
    text.resize(used + chunk);
    ssize_t count = read(file.number, &text[used], chunk);
    int error = errno;
    text.resize(used + (count > 0 ? static_cast<size_t>(count) : 0));
    if (count < 0) {
      if (error == EINTR)
        continue;
      return Status::ioError(
          systemError(path, "read the file", error).message());
    }
    if (count == 0)
      return text;
    if (text.size() > kMaxBytes)
      return tooLarge();
    chunk = std::max<size_t>(1 << 16, text.size());
  }
}

static std::string parentFolder(const std::string &path) {
  size_t slash = path.rfind('/');
  if (slash == path.npos)
    return ".";
  return slash ? path.substr(0, slash) : "/";
}

/// Makes the folders that `path` lies in.
static Status makeFolders(const std::string &path) {
  for (size_t slash = path.find('/', 1); slash != path.npos;
       slash = path.find('/', slash + 1)) {
    std::string folder = path.substr(0, slash);
    if (mkdir(folder.c_str(), 0777) == 0 || errno == EEXIST)
      continue;
    // A folder that is there may refuse to have anything made in its parent.
    int error = errno;
    struct stat info;
    if (stat(folder.c_str(), &info) == 0 && S_ISDIR(info.st_mode))
      continue;
    return Status::ioError(
        systemError(folder, "make the directory", error).message());
  }
  return Status::ok();
}

/// Writes everything to an open file and makes sure that it is on the disk.
static bool writeAll(int descriptor, std::string_view text) {
  while (!text.empty()) {
    ssize_t count = write(descriptor, text.data(), text.size());
    if (count < 0 && errno == EINTR)
      continue;
    if (count < 0)
      return false;
    text.remove_prefix(static_cast<size_t>(count));
  }
  return fsync(descriptor) == 0;
}

Status writeFileAtomically(const std::string &path, std::string_view text) {
  auto fail = [&](const char *action, int error) {
    return Status::ioError(systemError(path, action, error).message());
  };
  if (Status status = makeFolders(path); !status)
    return status;
  // What a link points to is replaced, not the link.
  std::string target = path;
  struct stat info;
  bool exists = lstat(path.c_str(), &info) == 0;
  if (exists && S_ISLNK(info.st_mode)) {
    std::unique_ptr<char, void (*)(void *)> real(
        realpath(path.c_str(), nullptr), std::free);
    if (!real)
      return fail("follow the link", errno);
    target = real.get();
    exists = stat(target.c_str(), &info) == 0;
  }

  // Unique among the threads by the counter, among processes by their number,
  // and among machines by trying.
  static std::atomic<unsigned> counter{0};
  std::string temporary;
  int descriptor = -1;
  for (int attempt = 0; descriptor < 0 && attempt < 1000; ++attempt) {
    temporary = target + ".tmp." + std::to_string(getpid()) + "." +
                std::to_string(counter.fetch_add(1));
    descriptor = openFile(temporary, O_WRONLY | O_CREAT | O_EXCL);
    if (descriptor < 0 && errno != EEXIST)
      break;
  }
  if (descriptor < 0)
    return fail("make a temporary file next to it", errno);
  // Who could read the file can go on reading it.
  bool written = writeAll(descriptor, text) &&
                 (!exists || fchmod(descriptor, info.st_mode & 07777) == 0);
  int error = errno;
  if (close(descriptor) && written) {
    written = false;
    error = errno;
  }
  if (!written || std::rename(temporary.c_str(), target.c_str())) {
    if (written)
      error = errno;
    unlink(temporary.c_str());
    return fail("write the file", error);
  }
  // The new name outlives a crash once the folder is on the disk. Not every
  // file system can do that, and the file is right either way.
  Descriptor folder(openFile(parentFolder(target), O_RDONLY | O_DIRECTORY));
  if (folder.number >= 0)
    (void)fsync(folder.number);
  return Status::ok();
}

Expected<FileLock> FileLock::acquire(const std::string &path) {
  if (Status status = makeFolders(path); !status)
    return status;
  std::string name = path + ".lock";
  int descriptor = openFile(name, O_RDWR | O_CREAT);
  if (descriptor < 0)
    return Status::ioError(systemError(name, "open the lock", errno).message());
  int result;
  do
    result = flock(descriptor, LOCK_EX);
  while (result && errno == EINTR);
  if (result) {
    int error = errno;
    close(descriptor);
    return Status::ioError(systemError(name, "lock the file", error).message());
  }
  return FileLock(descriptor);
}

FileLock::~FileLock() {
  if (descriptor < 0)
    return;
  // A process forked meanwhile has the file open too; closing it here alone
  // would leave it locked.
  flock(descriptor, LOCK_UN);
  close(descriptor);
}

} // namespace corey::scheduler::json
