//===- ProgramCacheTest.cpp - Compiled programs on disk -------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// A program from the cache is the one that was compiled, to the bit; nothing
// but what belongs there is taken from it, and there is no need for one.
//
//===----------------------------------------------------------------------===//

#include "ProgramCache.h"
#include "StatusTest.h"
#include "corey/Device/DiskCache.h"
#include "corey/Executable.h"
#include "gtest/gtest.h"
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>
#include <thread>
#include <unistd.h>

using namespace corey;
namespace fs = std::filesystem;

namespace {
/// With a weight that is prepared, a site with a policy of its own, one that
/// observes, sizes that must agree, and a state.
constexpr const char *kSource = R"(
module attributes {ssm.weight_prefix = "model."} {
  ssm.weight @A_log : tensor<8x4xf32>
  func.func @main(%u: tensor<?x?x8xf32>, %dt: tensor<?x?x8xf32>, %B: tensor<?x?x1x4xf32>,
                  %h: tensor<?x8x4xf32>) -> (tensor<?x?x8xf32>, tensor<?x8x4xf32>) {
    %log = ssm.get_weight @A_log : tensor<8x4xf32>
    %exp = ssm.exp %log : tensor<8x4xf32>
    %A = ssm.neg %exp : tensor<8x4xf32>
    %x, %g = ssm.selective_scan %u, %dt, %A, %B, %B initial_state(%h : tensor<?x8x4xf32>)
        {delta_softplus, chunk = #ssm.chunk<runtime = @layers.0.scan>}
        : tensor<?x?x8xf32>, tensor<?x?x8xf32>, tensor<8x4xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32>
          -> tensor<?x?x8xf32>, tensor<?x8x4xf32>
    %y, %i = ssm.selective_scan %x, %dt, %A, %B, %B initial_state(%g : tensor<?x8x4xf32>)
        {chunk = #ssm.chunk<runtime = @layers.1.scan>}
        : tensor<?x?x8xf32>, tensor<?x?x8xf32>, tensor<8x4xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32>
          -> tensor<?x?x8xf32>, tensor<?x8x4xf32>
    return %y, %i : tensor<?x?x8xf32>, tensor<?x8x4xf32>
  }
}
)";

Tensor numbers(std::vector<int64_t> shape) {
  Tensor tensor = take(Tensor::empty(DType::F32, std::move(shape)));
  for (int64_t i = 0; i < tensor.numElements(); ++i)
    tensor.dataAs<float>()[i] = static_cast<float>(i * 37 % 101 - 50) / 64;
  return tensor;
}

class ProgramCacheTest : public testing::Test {
protected:
  void SetUp() override {
    std::string name =
        (fs::temp_directory_path() / "corey-programs-XXXXXX").string();
    ASSERT_TRUE(mkdtemp(name.data()));
    folder = name;
    setenv("COREY_CACHE_DIR", name.c_str(), 1);
  }
  void TearDown() override { fs::remove_all(folder); }

  /// In a context of its own, as another process would.
  static std::shared_ptr<Executable> compile(CompileOptions options = {},
                                             const char *source = kSource) {
    ContextOptions how;
    how.threads = 1;
    auto executable =
        take(take(Context::create(how))->compile(source, options, "program"));
    EXPECT_EQ(executable->compileTimes().empty(), false);
    return executable;
  }
  static std::vector<std::vector<float>> run(Executable &executable) {
    EXPECT_TRUE(executable.bindWeight("A_log", numbers({8, 4})).isOk());
    std::vector<std::vector<float>> values;
    for (int64_t length : {1, 7, 40}) {
      std::vector<Tensor> outputs;
      Status status =
          executable.run("main",
                         {numbers({2, length, 8}), numbers({2, length, 8}),
                          numbers({2, length, 1, 4}), numbers({2, 8, 4})},
                         outputs);
      EXPECT_TRUE(status.isOk()) << status.toString();
      for (const Tensor &output : outputs)
        values.emplace_back(output.dataAs<float>(),
                            output.dataAs<float>() + output.numElements());
    }
    return values;
  }
  std::vector<fs::path> entries() const {
    std::vector<fs::path> list;
    if (fs::exists(folder / "programs"))
      for (auto &entry : fs::directory_iterator(folder / "programs"))
        list.push_back(entry.path());
    return list;
  }
  static std::string read(const fs::path &path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  static void write(const fs::path &path, const std::string &bytes) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
  }
  fs::path folder;
};

std::string functionsOf(const Executable &executable) {
  std::string text;
  auto add = [&](const ArgumentInfo &info) {
    text += info.name + " " + dtypeName(info.dtype);
    for (int64_t size : info.shape)
      text += " " + std::to_string(size);
    text += " " + std::to_string(info.updatedInput) + "\n";
  };
  for (const FunctionInfo &function : executable.functions()) {
    text += function.name + "\n";
    std::for_each(function.inputs.begin(), function.inputs.end(), add);
    std::for_each(function.outputs.begin(), function.outputs.end(), add);
  }
  const std::vector<ArgumentInfo> &weights = executable.weights();
  std::for_each(weights.begin(), weights.end(), add);
  return text;
}

TEST_F(ProgramCacheTest, IsWhatWasCompiled) {
  auto made = compile();
  EXPECT_EQ(made->cache().outcome, CacheInfo::Stored);
  EXPECT_EQ(made->cache().problem, "");
  ASSERT_EQ(entries(), std::vector<fs::path>{made->cache().path});
  auto loaded = compile();
  EXPECT_EQ(loaded->cache().outcome, CacheInfo::Loaded);
  EXPECT_EQ(loaded->cache().path, made->cache().path);
  EXPECT_NE(
      loaded->explain().find("cache: loaded from " + made->cache().path + "\n"),
      std::string::npos);
  for (const PhaseTime &time : loaded->compileTimes())
    EXPECT_TRUE(time.phase == "cache" || time.phase == "link") << time.phase;

  EXPECT_EQ(functionsOf(*loaded), functionsOf(*made));
  EXPECT_EQ(loaded->traffic().kernels, made->traffic().kernels);
  EXPECT_EQ(loaded->traffic().bytesRead, made->traffic().bytesRead);
  EXPECT_EQ(loaded->traffic().predictedMs, made->traffic().predictedMs);
  EXPECT_EQ(run(*loaded), run(*made));
  std::vector<ChunkInfo> a = made->chunks(), b = loaded->chunks();
  ASSERT_EQ(a.size(), 2u);
  ASSERT_EQ(b.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(a[i].site, b[i].site);
    EXPECT_EQ(a[i].chunk, b[i].chunk);
    EXPECT_EQ(a[i].variant, b[i].variant);
    EXPECT_EQ(a[i].reason, b[i].reason);
  }
  // Its checks are there as well.
  std::vector<Tensor> inputs{numbers({2, 3, 8}), numbers({2, 3, 8}),
                             numbers({2, 4, 1, 4}), numbers({2, 8, 4})},
      outputs;
  Status expected = made->run("main", inputs, outputs);
  ASSERT_FALSE(expected);
  Status got = loaded->run("main", inputs, outputs);
  EXPECT_EQ(got.toString(), expected.toString());
  // And weights that are not bound.
  auto unbound = compile();
  EXPECT_EQ(unbound->cache().outcome, CacheInfo::Loaded);
  inputs[2] = numbers({2, 3, 1, 4});
  EXPECT_FALSE(unbound->run("main", inputs, outputs));
}

TEST_F(ProgramCacheTest, ObservesForPolicies) {
  CompileOptions options;
  options.policy = "guarded:inner=[entropy]";
  auto made = compile(options), loaded = compile(options);
  ASSERT_EQ(loaded->cache().outcome, CacheInfo::Loaded);
  EXPECT_EQ(run(*loaded), run(*made));
  std::vector<ObservationInfo> a = made->observations(),
                               b = loaded->observations();
  ASSERT_FALSE(a.empty());
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].site, b[i].site);
    EXPECT_EQ(a[i].count, b[i].count);
    EXPECT_EQ(a[i].mean, b[i].mean);
  }
  EXPECT_EQ(loaded->chunks()[0].policy, made->chunks()[0].policy);
}

TEST_F(ProgramCacheTest, KnowsOptionsAndPrograms) {
  EXPECT_EQ(compile()->cache().outcome, CacheInfo::Stored);
  CompileOptions none;
  none.fusion = "none";
  EXPECT_EQ(compile(none)->cache().outcome, CacheInfo::Stored);
  CompileOptions o0;
  o0.optLevel = 0;
  EXPECT_EQ(compile(o0)->cache().outcome, CacheInfo::Stored);
  std::string changed = kSource;
  changed.replace(changed.find("ssm.neg"), 7, "ssm.exp");
  EXPECT_EQ(compile({}, changed.c_str())->cache().outcome, CacheInfo::Stored);
  EXPECT_EQ(entries().size(), 4u);
  // What is not in the code is not in the key.
  CompileOptions bins;
  bins.observation.bins = 99;
  EXPECT_EQ(compile(bins)->cache().outcome, CacheInfo::Loaded);
  // Errors are no programs.
  auto context = take(Context::create({}));
  EXPECT_FALSE(context->compile("func.func @main("));
  EXPECT_FALSE(context->compile("func.func @main("));
  EXPECT_EQ(entries().size(), 4u);
}

TEST_F(ProgramCacheTest, DamagedEntriesAreMadeAnew) {
  auto made = compile();
  auto expected = run(*made);
  fs::path path = made->cache().path;
  const std::string whole = read(path);
  ASSERT_GT(whole.size(), 1000u);
  CompileOptions other;
  other.optLevel = 1;
  const std::string foreign = read(compile(other)->cache().path);

  std::vector<std::pair<std::string, std::string>> cases = {
      {"empty", ""},
      {"header only", whole.substr(0, 112)},
      {"half a header", whole.substr(0, 50)},
      {"truncated", whole.substr(0, whole.size() - 1)},
      {"longer", whole + "x"},
      {"of another program", foreign},
      {"text", std::string(5000, 'a')},
      {"zeros", std::string(whole.size(), '\0')}};
  // The magic, the key, the length, the digest, and places of the payload.
  for (size_t at : {size_t(0), size_t(20), size_t(72), size_t(79), size_t(90),
                    size_t(112), whole.size() / 2, whole.size() - 1}) {
    std::string bytes = whole;
    bytes[at] ^= 1;
    cases.push_back({"a bit at " + std::to_string(at), bytes});
  }
  for (const auto &[name, bytes] : cases) {
    SCOPED_TRACE(name);
    write(path, bytes);
    auto again = compile();
    EXPECT_EQ(again->cache().outcome, CacheInfo::Stored);
    EXPECT_NE(again->cache().problem.find(path.string() + ": expected a whole "
                                                          "entry of the cache, "
                                                          "got "),
              std::string::npos)
        << again->cache().problem;
    EXPECT_NE(again->explain().find("cache: " + again->cache().problem),
              std::string::npos);
    EXPECT_EQ(run(*again), expected);
    EXPECT_EQ(compile()->cache().outcome, CacheInfo::Loaded);
  }
  // A folder where the entry would be.
  fs::remove(path);
  fs::create_directories(path / "x");
  auto again = compile();
  EXPECT_EQ(again->cache().outcome, CacheInfo::Missing);
  EXPECT_NE(again->cache().problem, "");
  EXPECT_EQ(run(*again), expected);
}

TEST_F(ProgramCacheTest, WorksWithoutAFolderToWriteTo) {
  // Also for a user whom no permissions bind.
  write(folder / "programs", "");
  auto made = compile();
  EXPECT_EQ(made->cache().outcome, CacheInfo::Missing);
  EXPECT_NE(made->cache().problem.find("expected to write an entry"),
            std::string::npos)
      << made->cache().problem;
  auto expected = run(*made);

  setenv("COREY_CACHE_DIR", "off", 1);
  auto off = compile();
  EXPECT_EQ(off->cache().outcome, CacheInfo::Off);
  EXPECT_EQ(off->cache().path, "");
  EXPECT_EQ(off->cache().problem, "");
  EXPECT_NE(off->explain().find("cache: off\n"), std::string::npos);
  EXPECT_EQ(run(*off), expected);

  // Entries of a folder that only others write to are taken.
  setenv("COREY_CACHE_DIR", folder.c_str(), 1);
  fs::remove(folder / "programs");
  compile();
  fs::permissions(folder / "programs",
                  fs::perms::owner_read | fs::perms::owner_exec);
  auto loaded = compile();
  EXPECT_EQ(loaded->cache().outcome, CacheInfo::Loaded);
  EXPECT_EQ(loaded->cache().problem, "");
  CompileOptions other;
  other.optLevel = 1;
  if (geteuid() != 0) {
    auto missing = compile(other);
    EXPECT_EQ(missing->cache().outcome, CacheInfo::Missing);
    EXPECT_NE(missing->cache().problem, "");
  }
  fs::permissions(folder / "programs", fs::perms::owner_all);
}

TEST_F(ProgramCacheTest, ThreadsAtATime) {
  auto expected = run(*compile());
  fs::remove_all(folder / "programs");
  std::vector<std::thread> threads;
  std::vector<std::vector<std::vector<float>>> results(4);
  for (size_t i = 0; i < results.size(); ++i)
    threads.emplace_back([&, i] { results[i] = run(*compile()); });
  for (std::thread &thread : threads)
    thread.join();
  for (const auto &result : results)
    EXPECT_EQ(result, expected);
  EXPECT_EQ(entries().size(), 1u);
  EXPECT_EQ(compile()->cache().outcome, CacheInfo::Loaded);
}

TEST_F(ProgramCacheTest, OldestGoFirst) {
  device::DiskCache cache("few", "entry", /*maxBytes=*/3500);
  auto keyOf = [](char c) { return std::string(64, c); };
  auto age = [&](char c, int hours) {
    fs::last_write_time(cache.path(keyOf(c)), fs::file_time_type::clock::now() -
                                                  std::chrono::hours(hours));
  };
  const std::string payload(1000, 'p');
  for (char c : {'a', 'b', 'c'})
    ASSERT_OK(cache.write(keyOf(c), payload));
  age('a', 3);
  age('b', 2);
  age('c', 1);
  // Reading is using.
  EXPECT_EQ(take(cache.read(keyOf('a'))), payload);
  ASSERT_OK(cache.write(keyOf('d'), payload));
  EXPECT_FALSE(cache.read(keyOf('b')));
  for (char c : {'a', 'c', 'd'})
    EXPECT_TRUE(cache.read(keyOf(c))) << c;
  // One that is larger than the cache is kept until the next.
  ASSERT_OK(cache.write(keyOf('e'), std::string(5000, 'q')));
  EXPECT_TRUE(cache.read(keyOf('e')));
  EXPECT_FALSE(cache.read(keyOf('d')));
  age('e', 1);
  ASSERT_OK(cache.write(keyOf('f'), payload));
  EXPECT_FALSE(cache.read(keyOf('e')));
  EXPECT_TRUE(cache.read(keyOf('f')));
}

TEST(ProgramKey, DependsOnAll) {
  CompileOptions options;
  std::set<std::string> keys;
  auto add = [&](const char *compiler, const char *host, const char *device,
                 const char *source) {
    keys.insert(programKey(compiler, host, device, options, source));
  };
  add("1", "host", "cpu", "source");
  add("1", "host", "cpu", "source");
  EXPECT_EQ(keys.size(), 1u);
  add("2", "host", "cpu", "source");
  add("1", "other", "cpu", "source");
  add("1", "host", "cuda sm_90a 132", "source");
  add("1", "host", "cuda sm_90a 114", "source");
  add("1", "host", "cpu", "sources");
  // Fields do not run into one another.
  add("1h", "ost", "cpu", "source");
  EXPECT_EQ(keys.size(), 7u);
  const std::function<void(CompileOptions &)> changes[] = {
      [](CompileOptions &o) { o.policy = "unsplit"; },
      [](CompileOptions &o) { o.fusion = "none"; },
      [](CompileOptions &o) { o.vectorBits = 256; },
      [](CompileOptions &o) { o.optLevel = 1; },
      [](CompileOptions &o) { o.hoistWeights = false; },
      [](CompileOptions &o) { o.observeValues = true; }};
  for (const auto &change : changes) {
    options = CompileOptions();
    change(options);
    add("1", "host", "cpu", "source");
  }
  EXPECT_EQ(keys.size(), 13u);
  for (const std::string &key : keys)
    EXPECT_EQ(key.size(), 64u);
  EXPECT_NE(compilerIdentity().find("build "), std::string::npos);
}

TEST(ProgramBytes, EveryCutIsSeen) {
  ProgramInfo info;
  info.prefix = "p.";
  info.functions.resize(2);
  info.functions[0].info.inputs.push_back({"x", DType::BF16, {-1, 3}, 1});
  info.functions[1].anyStrides = {true, false};
  info.functions[1].constraints.push_back({1, 2, 3, 4, "L"});
  info.weights.resize(1);
  info.weights[0].key = "w";
  info.prepare = std::make_unique<Function>();
  info.prepare->numDims = 5;
  info.preparedWeights = {7};
  info.chunkSites.resize(1);
  info.chunkSites[0].variants.resize(2);
  info.chunkSites[0].variants[1].segmented = true;
  info.observationSites = {"a", ""};
  info.traffic.predictedMs = 0.125;
  ProgramCode code;
  code.objects = {std::string("a\0b", 3)};
  code.image.kernels = {{"k", "ptx"}};
  code.image.chip = "sm_80";
  std::string bytes = writeProgram(info, code);

  ProgramInfo read;
  ProgramCode readCode;
  ASSERT_TRUE(readProgram(bytes, read, readCode));
  EXPECT_EQ(read.functions[0].info.inputs[0].shape,
            (std::vector<int64_t>{-1, 3}));
  EXPECT_EQ(read.functions[0].info.inputs[0].dtype, DType::BF16);
  EXPECT_EQ(read.functions[1].anyStrides, (std::vector<bool>{true, false}));
  EXPECT_EQ(read.prepare->numDims, 5u);
  EXPECT_EQ(read.traffic.predictedMs, 0.125);
  EXPECT_EQ(readCode.objects, code.objects);
  EXPECT_EQ(writeProgram(read, readCode), bytes);
  for (size_t size = 0; size < bytes.size(); ++size) {
    ProgramInfo part;
    ProgramCode partCode;
    EXPECT_FALSE(readProgram(bytes.substr(0, size), part, partCode)) << size;
  }
  ProgramInfo more;
  ProgramCode moreCode;
  EXPECT_FALSE(readProgram(bytes + "x", more, moreCode));
  // Lengths of any size.
  for (size_t at = 0; at + 8 <= bytes.size(); ++at) {
    std::string wrong = bytes;
    std::memset(wrong.data() + at, 0xff, 8);
    ProgramInfo part;
    ProgramCode partCode;
    (void)readProgram(wrong, part, partCode);
  }
}
} // namespace
