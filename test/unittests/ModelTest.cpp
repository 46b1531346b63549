//===- ModelTest.cpp - Language models: states, generation ----------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// Trained checkpoints generate what transformers does, however a prompt is cut,
// batched or kept as states; where sequences end; how tokens are drawn; and
// likelihoods against logits of every token.
//
//   COREY_TEST_DEVICE  the device, "cpu" unless set
//   COREY_TEST_INPUTS  test/Inputs, that of the source tree unless set
//
//===----------------------------------------------------------------------===//

#include "corey/Model.h"
#include "../reference/Reference.h"
#include "StatusTest.h"
#include "gtest/gtest.h"
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <map>
#include <numeric>
#include <sys/stat.h>
#include <unistd.h>

using namespace corey;

namespace {
using Tokens = std::vector<int32_t>;
using Row = std::vector<float>;

std::string input(const std::string &path) {
  const char *folder = std::getenv("COREY_TEST_INPUTS");
  return std::string(folder ? folder : COREY_TEST_INPUTS_DIRECTORY) + "/" +
         path;
}

std::string temporaryPath(const std::string &name) {
  return testing::TempDir() + "corey-model-" + std::to_string(getpid()) + "-" +
         name;
}

const std::shared_ptr<Context> &context() {
  // Never destroyed: a driver may be gone before what is static.
  static auto &made = *new std::shared_ptr<Context>([] {
    const char *device = std::getenv("COREY_TEST_DEVICE");
    ContextOptions options;
    options.device = device ? device : "cpu";
    options.threads = 2;
    return take(Context::create(options));
  }());
  return made;
}
bool onGPU() { return context()->getDevice().kind == Device::CUDA; }

std::shared_ptr<Model> load(const std::string &folder,
                            ModelOptions options = {}) {
  // A device would take the checkpoint's bf16.
  if (!options.computeType)
    options.computeType = DType::F32;
  return take(Model::load(context(), folder, options));
}

/// In f32: compiled once.
Model &tiny(const std::string &name) {
  static auto &models = *new std::map<std::string, std::shared_ptr<Model>>();
  std::shared_ptr<Model> &model = models[name];
  if (!model)
    model = load(input("checkpoints/" + name));
  return *model;
}

std::vector<Row> rowsOf(const Tensor &logits) {
  Tensor host = take(logits.to(Device::cpu()));
  std::vector<Row> rows;
  for (int64_t i = 0; i < host.dim(0); ++i) {
    const float *begin = host.dataAs<float>() + i * host.dim(1);
    rows.emplace_back(begin, begin + host.dim(1));
  }
  return rows;
}

double relativeError(const Row &got, const Row &want) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    double value = want[i], difference = got[i] - value;
    error += difference * difference;
    norm += value * value;
  }
  return std::sqrt(error / norm);
}

/// -ln of the probability of a token.
double nats(const Row &logits, int32_t token) {
  double largest = *std::max_element(logits.begin(), logits.end()), sum = 0;
  for (float value : logits)
    sum += std::exp(static_cast<double>(value) - largest);
  return std::log(sum) + largest -
         static_cast<double>(logits[static_cast<size_t>(token)]);
}

Tokens part(const Tokens &tokens, size_t from, size_t to) {
  return {tokens.begin() + static_cast<std::ptrdiff_t>(from),
          tokens.begin() + static_cast<std::ptrdiff_t>(to)};
}
Tokens lastOf(const Tokens &tokens, size_t count) {
  return part(tokens, tokens.size() - count, tokens.size());
}

GenerateOptions greedy(int64_t maxTokens) {
  GenerateOptions options;
  options.maxTokens = maxTokens;
  options.stopTokens.emplace();
  return options;
}

const char *const texts[] = {"prose_512",  "code_512",      "logs_512",
                             "tables_512", "templated_512", "prose_997"};

class Models : public testing::TestWithParam<const char *> {
protected:
  static Model &model() { return tiny(GetParam()); }
  static Model &otherModel() {
    return tiny(std::string(GetParam()) == "mamba1-tiny" ? "mamba2-tiny"
                                                         : "mamba1-tiny");
  }
  static std::string folder() {
    return input(std::string("checkpoints/") + GetParam());
  }

  static Tokens golden(const std::string &key) {
    static std::map<std::string, std::unique_ptr<SafeTensors>> files;
    std::unique_ptr<SafeTensors> &file = files[GetParam()];
    if (!file)
      file = std::make_unique<SafeTensors>(take(SafeTensors::open(
          input(std::string("golden/models/") + GetParam() + ".safetensors"))));
    Tensor tensor = take(file->get(key));
    return {tensor.dataAs<int32_t>(),
            tensor.dataAs<int32_t>() + tensor.numElements()};
  }
  static Tokens text(const std::string &key) {
    return golden(key + ".input_ids");
  }
  /// The first tokens that follow a text.
  static Tokens following(const std::string &key, size_t count) {
    return part(golden(key + ".greedy64"), 0, count);
  }

  static TokenSequences generate(const TokenSequences &prompts,
                                 const GenerateOptions &options,
                                 StateCache *states = nullptr) {
    return take(model().generate(prompts, options, states)).tokens;
  }
  /// Most likely tokens after one prompt.
  static Tokens continued(const Tokens &prompt, int64_t count,
                          StateCache *states = nullptr) {
    return generate({prompt}, greedy(count), states)[0];
  }
  static double bound() { return onGPU() ? 2e-5 : 2e-6; }
};

//===----------------------------------------------------------------------===//
// Greedy generation
//===----------------------------------------------------------------------===//

TEST_P(Models, Info) {
  const ModelInfo &info = model().info();
  bool first = std::string(GetParam()) == "mamba1-tiny";
  EXPECT_EQ(info.type, first ? "mamba" : "mamba2");
  EXPECT_EQ(info.numLayers, 8);
  EXPECT_EQ(info.hiddenSize, 256);
  EXPECT_EQ(info.vocabSize, 256);
  EXPECT_EQ(info.computeType, DType::F32);
  EXPECT_EQ(info.eosTokens, Tokens{0});
  // Matrices are bf16, the rest f32.
  EXPECT_GT(info.parameters, 3500000);
  EXPECT_GT(info.weightBytes, 2 * info.parameters);
  EXPECT_LT(info.weightBytes, 2.1 * static_cast<double>(info.parameters));
  EXPECT_EQ(&model().context(), context().get());
  EXPECT_TRUE(model().executable().findFunction("decode"));
}

TEST_P(Models, GreedyTokens) {
  for (const char *key : texts) {
    Tokens prompt = text(key);
    Generation result = take(model().generate({prompt}, greedy(64)));
    EXPECT_EQ(result.tokens,
              TokenSequences{golden(std::string(key) + ".greedy64")})
        << key;
    EXPECT_EQ(result.promptTokens, static_cast<int64_t>(prompt.size()));
    EXPECT_EQ(result.newTokens, 64);
    EXPECT_GT(result.prefillMs, 0);
    EXPECT_GT(result.decodeMs, 0);
  }
}

/// How much is read at a time never matters.
TEST_P(Models, Segments) {
  Tokens prompt = lastOf(text("prose_997"), 150),
         other = lastOf(text("code_512"), 41);
  Tokens want = continued(prompt, 16), wantOther = continued(other, 16);
  std::vector<Row> rows = rowsOf(take(model().logits(prompt, 20)));
  std::vector<double> judged = take(model().negativeLogLikelihoods(other));
  for (int64_t segment : {1, 7, 100}) {
    SCOPED_TRACE(segment);
    ModelOptions options;
    options.segment = segment;
    std::shared_ptr<Model> cut = load(folder(), options);
    std::vector<std::pair<int64_t, int64_t>> progress;
    GenerateOptions how = greedy(16);
    how.onProgress = [&](int64_t done, int64_t total) {
      progress.push_back({done, total});
    };
    EXPECT_EQ(take(cut->generate({prompt}, how)).tokens[0], want);
    ASSERT_EQ(static_cast<int64_t>(progress.size()),
              (150 + segment - 1) / segment);
    for (size_t i = 0; i < progress.size(); ++i)
      EXPECT_EQ(progress[i],
                std::pair(std::min<int64_t>(150, static_cast<int64_t>(i + 1) *
                                                     segment),
                          int64_t(150)));
    std::vector<Row> cutRows = rowsOf(take(cut->logits(prompt, 20)));
    ASSERT_EQ(cutRows.size(), 20u);
    for (size_t i = 0; i < 20; ++i)
      EXPECT_LE(relativeError(cutRows[i], rows[i]), bound()) << i;
    std::vector<double> cutJudged = take(cut->negativeLogLikelihoods(other));
    ASSERT_EQ(cutJudged.size(), judged.size());
    for (size_t i = 0; i < judged.size(); ++i)
      EXPECT_NEAR(cutJudged[i], judged[i], 1e-4) << i;
    // Of several sequences each gets its share; equal ones are not packed.
    EXPECT_EQ(take(cut->generate({prompt, prompt}, greedy(16))).tokens,
              (TokenSequences{want, want}));
    if (segment == 7)
      EXPECT_EQ(take(cut->generate({prompt, other, {32}}, greedy(16))).tokens,
                (TokenSequences{want, wantOther, continued({32}, 16)}));
  }
}

TEST_P(Models, BatchesOfOneLength) {
  TokenSequences prompts, want;
  for (size_t i = 0; i < 5; ++i) {
    prompts.push_back(text(texts[i]));
    want.push_back(following(texts[i], 24));
  }
  EXPECT_EQ(generate(prompts, greedy(24)), want);
  // Buffers are kept from call to call; another number of sequences needs
  // others.
  prompts.resize(2);
  want.resize(2);
  EXPECT_EQ(generate(prompts, greedy(24)), want);
  EXPECT_EQ(generate(prompts, greedy(24)), want);
}

TEST_P(Models, BatchesOfDifferentLengths) {
  Tokens tokens = text("tables_512");
  TokenSequences prompts, want;
  std::vector<Row> alone;
  for (size_t length : {3, 200, 1, 77}) {
    prompts.push_back(lastOf(tokens, length));
    want.push_back(continued(prompts.back(), 12));
    alone.push_back(rowsOf(take(model().logits(prompts.back(), 1))).front());
  }
  EXPECT_EQ(generate(prompts, greedy(12)), want);

  // Slots in no order, then one more token of some of them.
  StateCache states = take(model().makeStates(7));
  std::vector<int64_t> slots{5, 0, 6, 2};
  std::vector<Row> together =
      rowsOf(take(model().prefill(prompts, states, slots)));
  ASSERT_EQ(together.size(), 4u);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_LE(relativeError(together[i], alone[i]), bound()) << i;
    EXPECT_EQ(states.tokens(slots[i]), static_cast<int64_t>(prompts[i].size()));
  }
  for (int64_t slot : {1, 3, 4})
    EXPECT_EQ(states.tokens(slot), 0);
  std::vector<Row> next =
      rowsOf(take(model().decode({40, 41}, states, {2, 5})));
  ASSERT_EQ(next.size(), 2u);
  for (auto [i, at, token] : {std::tuple(0, 3, 40), {1, 0, 41}}) {
    Tokens longer = prompts[static_cast<size_t>(at)];
    longer.push_back(token);
    EXPECT_LE(relativeError(next[static_cast<size_t>(i)],
                            rowsOf(take(model().logits(longer, 1)))[0]),
              bound());
  }
  EXPECT_EQ(states.tokens(2), 78);
  EXPECT_EQ(states.tokens(5), 4);
  EXPECT_EQ(states.tokens(0), 200);
}

//===----------------------------------------------------------------------===//
// States
//===----------------------------------------------------------------------===//

TEST_P(Models, PromptsAreReadOnce) {
  Tokens whole = text("logs_512"), want = following("logs_512", 10);
  Tokens prefix = part(whole, 0, 400), rest = part(whole, 400, 512);
  StateCache states = take(model().makeStates(3));
  EXPECT_EQ(states.size(), 3);
  EXPECT_GT(states.bytesPerSequence(), 0);
  EXPECT_EQ(states.bytesPerSequence(),
            take(model().makeStates(1)).bytesPerSequence());
  take(model().prefill({prefix}, states, {1}));
  EXPECT_EQ(states.tokens(0), 0);
  EXPECT_EQ(states.tokens(1), 400);

  // One prefix, several ways to go on, at once.
  StateCache several = take(states.select({1, 1, 0, 1}));
  ASSERT_EQ(several.size(), 4);
  EXPECT_EQ(several.tokens(2), 0);
  TokenSequences ways{rest, {10, 10}, prefix, rest};
  TokenSequences got = generate(ways, greedy(10), &several);
  EXPECT_EQ(got[0], want);
  EXPECT_EQ(got[3], want);
  Tokens another = prefix;
  another.insert(another.end(), {10, 10});
  EXPECT_EQ(got[1], continued(another, 10));
  EXPECT_EQ(got[2], continued(prefix, 10));
  // Those it was taken from are what they were.
  EXPECT_EQ(states.tokens(1), 400);

  StateCache clone = take(states.clone());
  ASSERT_OK(clone.assign(0, clone, 1));
  EXPECT_EQ(clone.tokens(0), 400);
  EXPECT_EQ(states.tokens(0), 0);
  EXPECT_EQ(continued(rest, 10, &clone), want);
  ASSERT_OK(clone.assign(0, states, 1));
  ASSERT_OK(clone.assign(0, clone, 0));
  EXPECT_EQ(continued(rest, 10, &clone), want);

  std::string path = temporaryPath("states.safetensors");
  ASSERT_OK(states.save(path));
  StateCache loaded = take(model().loadStates(path));
  ASSERT_EQ(loaded.size(), 3);
  EXPECT_EQ(loaded.tokens(0), 0);
  EXPECT_EQ(loaded.tokens(1), 400);
  StateCache picked = take(loaded.select({1}));
  EXPECT_EQ(continued(rest, 10, &picked), want);
  std::remove(path.c_str());

  // Copies share; an empty slot is like a new one, and the others stay.
  StateCache copy = states;
  ASSERT_OK(copy.assign(0, states, 1));
  EXPECT_EQ(states.tokens(0), 400);
  ASSERT_OK(copy.clear(0));
  EXPECT_EQ(states.tokens(0), 0);
  EXPECT_EQ(continued(whole, 10, &states), want);
  EXPECT_EQ(states.tokens(1), 400);
  picked = take(states.select({1}));
  EXPECT_EQ(continued(rest, 10, &picked), want);
  ASSERT_OK(copy.clear());
  for (int64_t slot = 0; slot < 3; ++slot)
    EXPECT_EQ(states.tokens(slot), 0);
  EXPECT_EQ(generate({whole, whole}, greedy(10), &states),
            (TokenSequences{want, want}));
}

TEST_P(Models, StatesAfterGenerating) {
  Tokens first = text("prose_512"), second = text("code_512");
  TokenSequences want{following("prose_512", 40), following("code_512", 40)};
  // The most likely token, as the device finds it and as sampling does.
  for (int64_t topK : {0, 1}) {
    SCOPED_TRACE(topK);
    auto upTo = [&](int64_t count) {
      GenerateOptions options = greedy(count);
      if (topK)
        options.sampling = {1, topK, 1, 3};
      return options;
    };
    StateCache states = take(model().makeStates(2));
    TokenSequences got = generate({first, second}, upTo(11), &states);
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(got[i], part(want[i], 0, 11));
      EXPECT_EQ(states.tokens(static_cast<int64_t>(i)), 512 + 10);
    }
    // The second ends after three more, the first goes on.
    GenerateOptions options = upTo(9);
    options.onToken = [count = 0](int64_t sequence, int32_t) mutable {
      return sequence == 0 || ++count < 3;
    };
    got = generate({{got[0].back()}, {got[1].back()}}, options, &states);
    EXPECT_EQ(got[0], part(want[0], 11, 20));
    EXPECT_EQ(got[1], part(want[1], 11, 14));
    EXPECT_EQ(states.tokens(0), 512 + 19);
    EXPECT_EQ(states.tokens(1), 512 + 13);
    // Both end early.
    options.onToken = [](int64_t, int32_t) { return false; };
    got = generate({{got[0].back()}, {got[1].back()}}, options, &states);
    EXPECT_EQ(got, (TokenSequences{{want[0][20]}, {want[1][14]}}));
    EXPECT_EQ(states.tokens(0), 512 + 20);
    options.onToken = [count = 0](int64_t, int32_t) mutable {
      return ++count <= 4;
    };
    got = generate({{got[0].back()}, {got[1].back()}}, options, &states);
    EXPECT_EQ(got,
              (TokenSequences{part(want[0], 21, 24), part(want[1], 15, 18)}));
    EXPECT_EQ(states.tokens(0), 512 + 23);
    EXPECT_EQ(states.tokens(1), 512 + 17);
    got = generate({{got[0].back()}, {got[1].back()}}, upTo(10), &states);
    EXPECT_EQ(got,
              (TokenSequences{part(want[0], 24, 34), part(want[1], 18, 28)}));
    // Nothing new: the prompts are in the states.
    got = generate({{got[0].back()}, {got[1].back()}}, upTo(0), &states);
    EXPECT_EQ(got, (TokenSequences{{}, {}}));
    EXPECT_EQ(states.tokens(0), 512 + 34);
    EXPECT_EQ(states.tokens(1), 512 + 28);
  }
}

/// Types of states are part of what a model is.
TEST_P(Models, TypesOfStates) {
  ModelOptions options;
  options.stateType = DType::BF16;
  std::shared_ptr<Model> half = load(folder(), options);
  StateCache states = take(half->makeStates(2));
  EXPECT_LT(states.bytesPerSequence(),
            take(model().makeStates(1)).bytesPerSequence());
  EXPECT_FAILS(model().prefill({{1}}, states), InvalidArgument,
               "expected states of this model, got those of another");
  StateCache ours = take(model().makeStates(2));
  EXPECT_STATUS(ours.assign(0, states, 0), InvalidArgument,
                "expected states of the same model, got others");
  // Of a short text little is lost.
  Tokens prompt = part(text("prose_512"), 0, 64);
  Row want = rowsOf(take(model().logits(prompt, 1)))[0],
      got = rowsOf(take(half->prefill({prompt}, states, {1})))[0];
  EXPECT_LE(relativeError(got, want), 5e-2);
  std::string path = temporaryPath("half.safetensors");
  ASSERT_OK(states.save(path));
  EXPECT_EQ(take(half->loadStates(path)).tokens(1), 64);
  Expected<StateCache> refused = model().loadStates(path);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.status().code(), StatusCode::InvalidArgument);
  EXPECT_EQ(refused.status().message().rfind(
                path + ": expected states of this model, tensor<2x", 0),
            0u)
      << refused.status().message();
  std::remove(path.c_str());
}

//===----------------------------------------------------------------------===//
// Ends
//===----------------------------------------------------------------------===//

TEST_P(Models, Ends) {
  Tokens prompt = text("prose_512"), want = following("prose_512", 64),
         other = text("code_512"), wantOther = following("code_512", 64);
  EXPECT_EQ(continued(prompt, 0), Tokens());
  EXPECT_EQ(continued(prompt, 1), part(want, 0, 1));
  EXPECT_EQ(take(model().generate({prompt, other}, greedy(0))).newTokens, 0);

  // A stop token is the last one; sequences end alone.
  auto endOf = [](const Tokens &tokens, const Tokens &stops, size_t most) {
    size_t count = 0;
    while (count < most)
      if (std::count(stops.begin(), stops.end(), tokens[count++]))
        break;
    return part(tokens, 0, count);
  };
  for (Tokens stops : {Tokens{want[0]}, Tokens{want[5]}, Tokens{wantOther[9]},
                       Tokens{wantOther[2], want[12]}}) {
    GenerateOptions options = greedy(30);
    options.stopTokens = stops;
    TokenSequences expected{endOf(want, stops, 30),
                            endOf(wantOther, stops, 30)};
    Generation result = take(model().generate({prompt, other}, options));
    EXPECT_EQ(result.tokens, expected);
    EXPECT_EQ(result.newTokens,
              static_cast<int64_t>(expected[0].size() + expected[1].size()));
    EXPECT_EQ(generate({other, prompt}, options),
              (TokenSequences{expected[1], expected[0]}));
    options.sampling = {1, 1, 1, 0};
    EXPECT_EQ(generate({prompt, other}, options), expected);
  }

  // Each is told of in order, and may end its sequence.
  for (double temperature : {0., 1.}) {
    std::vector<std::pair<int64_t, int32_t>> told, expected;
    GenerateOptions options = greedy(6);
    options.sampling = {temperature, 1, 1, 0};
    options.onToken = [&](int64_t sequence, int32_t token) {
      told.push_back({sequence, token});
      return !(sequence == 0 && told.size() >= 5);
    };
    TokenSequences got = generate({prompt, other, prompt}, options);
    EXPECT_EQ(got, (TokenSequences{part(want, 0, 3), part(wantOther, 0, 6),
                                   part(want, 0, 6)}));
    for (size_t step = 0; step < 6; ++step)
      for (int64_t sequence = 0; sequence < 3; ++sequence)
        if (sequence || step < 3)
          expected.push_back(
              {sequence, (sequence == 1 ? wantOther : want)[step]});
    EXPECT_EQ(told, expected);
  }
}

/// A copy of a checkpoint whose texts end with other tokens.
TEST(ModelFolder, EndsAsTheCheckpointSays) {
  std::string from = input("checkpoints/mamba2-tiny");
  std::string to = temporaryPath("folder");
  ASSERT_EQ(mkdir(to.c_str(), 0700), 0);
  for (const char *name : {"/config.json", "/model.safetensors"}) {
    char *full = realpath((from + name).c_str(), nullptr);
    ASSERT_TRUE(full);
    ASSERT_EQ(symlink(full, (to + name).c_str()), 0);
    std::free(full);
  }
  Tokens prompt{'T', 'h', 'e', ' '};
  Tokens want =
      take(tiny("mamba2-tiny").generate({prompt}, greedy(12))).tokens[0];
  std::FILE *file = std::fopen((to + "/generation_config.json").c_str(), "w");
  ASSERT_TRUE(file);
  std::fprintf(file, "{\"eos_token_id\": [%d, 255]}", want[4]);
  std::fclose(file);
  std::shared_ptr<Model> model = load(to);
  EXPECT_EQ(model->info().eosTokens, (Tokens{want[4], 255}));
  size_t count =
      1 + static_cast<size_t>(std::find(want.begin(), want.end(), want[4]) -
                              want.begin());
  GenerateOptions options;
  options.maxTokens = 12;
  EXPECT_EQ(take(model->generate({prompt}, options)).tokens[0],
            part(want, 0, count));
  EXPECT_EQ(take(model->generate({prompt}, greedy(12))).tokens[0], want);
  for (const char *name :
       {"/config.json", "/model.safetensors", "/generation_config.json"})
    std::remove((to + name).c_str());
  rmdir(to.c_str());
}

//===----------------------------------------------------------------------===//
// Sampling
//===----------------------------------------------------------------------===//

TEST_P(Models, Sampling) {
  Tokens prompt = text("prose_512"), want = following("prose_512", 20);
  Tokens other = text("code_512"), shorter = lastOf(other, 9);
  auto sampled = [](const SamplingOptions &sampling) {
    GenerateOptions options = greedy(20);
    options.sampling = sampling;
    return options;
  };
  for (SamplingOptions sampling :
       {SamplingOptions{0, 5, 0.5, 7}, {1, 1, 1, 7}, {2, 0, 1e-6, 7}})
    EXPECT_EQ(generate({prompt}, sampled(sampling))[0], want);

  GenerateOptions options = sampled({1, 0, 1, 7});
  Tokens first = generate({prompt}, options)[0];
  EXPECT_NE(first, want);
  EXPECT_EQ(generate({prompt}, options)[0], first);
  EXPECT_NE(generate({prompt}, sampled({1, 0, 1, 8}))[0], first);
  // Nobody else matters, nor how long others are or when they end; two of the
  // same text are two draws.
  TokenSequences pair = generate({prompt, other}, options);
  EXPECT_EQ(pair[0], first);
  TokenSequences more = generate({prompt, other, shorter, prompt}, options);
  EXPECT_EQ(more[0], first);
  EXPECT_EQ(more[1], pair[1]);
  EXPECT_NE(more[3], first);
  options.onToken = [](int64_t sequence, int32_t) { return sequence == 1; };
  TokenSequences ended = generate({shorter, other, shorter}, options);
  EXPECT_EQ(ended[1], pair[1]);
  EXPECT_EQ(ended[0].size(), 1u);
}

/// What is generated is drawn from the logits of the same steps, with the seed,
/// the sequence and the number of the token.
TEST_P(Models, DrawnTokens) {
  TokenSequences prompts{text("prose_512"), lastOf(text("code_512"), 9), {65}};
  GenerateOptions options = greedy(24);
  int64_t others = 0, all = 0;
  for (SamplingOptions sampling : {SamplingOptions{1, 0, 1, 7},
                                   {0.75, 0, 0.875, ~0ull},
                                   {1.5, 12, 1, 1ull << 40},
                                   {4, 200, 0.9375, 0}}) {
    options.sampling = sampling;
    TokenSequences got = generate(prompts, options);
    StateCache states = take(model().makeStates(3));
    Tensor logits = take(model().prefill(prompts, states));
    for (size_t step = 0; step < 24; ++step) {
      std::vector<Row> rows = rowsOf(logits);
      Tokens tokens;
      for (size_t i = 0; i < 3; ++i) {
        reference::Array row({1, 256}), random({1, 3});
        row.data.assign(rows[i].begin(), rows[i].end());
        auto scalar = [](double value) {
          reference::Array array(std::vector<int64_t>{1});
          array.data[0] = value;
          return array;
        };
        // Exact as numbers of f64: the seed as a signed number.
        random.data = {static_cast<double>(static_cast<int64_t>(sampling.seed)),
                       static_cast<double>(i), static_cast<double>(step)};
        reference::Draws want =
            reference::sample(row, scalar(sampling.temperature),
                              scalar(static_cast<double>(sampling.topK)),
                              scalar(sampling.topP), random);
        int32_t token = got[i][step];
        EXPECT_GE(token, want.lowest.data[0]) << i << " " << step;
        EXPECT_LE(token, want.highest.data[0]) << i << " " << step;
        ++all;
        others += token != want.ids.data[0];
        tokens.push_back(token);
      }
      logits = take(model().decode(tokens, states));
    }
  }
  EXPECT_LE(others * 50, all);
}

//===----------------------------------------------------------------------===//
// Likelihoods
//===----------------------------------------------------------------------===//

TEST_P(Models, Likelihoods) {
  Tokens tokens = text("templated_512");
  size_t size = tokens.size();
  std::vector<Row> rows =
      rowsOf(take(model().logits(tokens, static_cast<int64_t>(size))));
  std::vector<std::pair<int64_t, int64_t>> progress;
  std::vector<double> got = take(model().negativeLogLikelihoods(
      tokens, 0, 0,
      [&](int64_t done, int64_t total) { progress.push_back({done, total}); }));
  ASSERT_EQ(got.size(), size - 1);
  for (size_t i = 0; i + 1 < size; ++i)
    EXPECT_NEAR(got[i], nats(rows[i], tokens[i + 1]), 1e-5) << i;
  ASSERT_FALSE(progress.empty());
  EXPECT_EQ(progress.back(), std::pair(int64_t(512), int64_t(512)));
  // A window that holds the text is none.
  for (int64_t window : {512, 513, 100000})
    EXPECT_EQ(take(model().negativeLogLikelihoods(tokens, window, 1)), got);
  EXPECT_EQ(take(model().negativeLogLikelihoods(part(tokens, 0, 2))).size(),
            1u);
}

TEST_P(Models, Windows) {
  Tokens tokens = part(text("code_512"), 100, 145);
  auto size = static_cast<int64_t>(tokens.size());
  for (auto [window, stride] : {std::pair<int64_t, int64_t>{16, 8},
                                {16, 15},
                                {16, 1},
                                {9, 4},
                                {2, 1},
                                {44, 1},
                                {44, 43}}) {
    SCOPED_TRACE(std::to_string(window) + " " + std::to_string(stride));
    std::vector<double> got =
        take(model().negativeLogLikelihoods(tokens, window, stride));
    ASSERT_EQ(got.size(), tokens.size() - 1);
    for (int64_t t = 1; t < size; ++t) {
      // The first window that has the token judges it.
      int64_t begin = 0;
      while (begin + window <= t)
        begin += stride;
      Tokens before =
          part(tokens, static_cast<size_t>(begin), static_cast<size_t>(t));
      EXPECT_LT(static_cast<int64_t>(before.size()), window);
      Row row = rowsOf(take(model().logits(before, 1)))[0];
      EXPECT_NEAR(got[static_cast<size_t>(t - 1)],
                  nats(row, tokens[static_cast<size_t>(t)]), 1e-4)
          << t;
    }
  }
}

//===----------------------------------------------------------------------===//
// Errors
//===----------------------------------------------------------------------===//

TEST_P(Models, BadPrompts) {
  Model &m = model();
  StateCache states = take(m.makeStates(2));
  GenerateOptions options = greedy(4);
  for (StateCache *given : {static_cast<StateCache *>(nullptr), &states}) {
    EXPECT_FAILS(m.generate({}, options, given), InvalidArgument,
                 "expected at least 1 sequence, got none");
    EXPECT_FAILS(m.generate({{1}, {}}, options, given), InvalidArgument,
                 "expected at least 1 token of each sequence, got none of one");
    EXPECT_FAILS(m.generate({{1, 256}}, options, given), InvalidArgument,
                 "expected tokens from 0 to 255, got 256");
    EXPECT_FAILS(m.generate({{-1}}, options, given), InvalidArgument,
                 "expected tokens from 0 to 255, got -1");
  }
  EXPECT_FAILS(m.generate({{1}, {1}, {1}}, options, &states), InvalidArgument,
               "expected states of at least 3 sequences, got 2");
  EXPECT_FAILS(m.prefill({}, states), InvalidArgument,
               "expected at least 1 sequence, got none");
  EXPECT_FAILS(m.prefill({{1}, {}}, states), InvalidArgument,
               "expected at least 1 token of each sequence, got none of one");
  EXPECT_FAILS(m.prefill({{1}, {1, 300}}, states), InvalidArgument,
               "expected tokens from 0 to 255, got 300");
  EXPECT_FAILS(m.decode({}, states), InvalidArgument,
               "expected at least 1 sequence, got none");
  EXPECT_FAILS(m.decode({256}, states), InvalidArgument,
               "expected tokens from 0 to 255, got 256");
  EXPECT_FAILS(m.logits({1, 2}, 0), InvalidArgument,
               "expected a count from 1 to 2 tokens, got 0");
  EXPECT_FAILS(m.logits({1, 2}, 3), InvalidArgument,
               "expected a count from 1 to 2 tokens, got 3");
  EXPECT_FAILS(m.logits({256}, 1), InvalidArgument,
               "expected tokens from 0 to 255, got 256");
  EXPECT_FAILS(m.logits({}, 1), InvalidArgument,
               "expected a count from 1 to 0 tokens, got 1");
  // None of it left a trace.
  for (int64_t slot : {0, 1})
    EXPECT_EQ(states.tokens(slot), 0);
  EXPECT_EQ(generate({text("code_512")}, options, &states)[0],
            following("code_512", 4));
}

TEST_P(Models, BadOptions) {
  Model &m = model();
  GenerateOptions options = greedy(-1);
  EXPECT_FAILS(m.generate({{1}}, options), InvalidArgument,
               "max_tokens: expected at least 0, got -1");
  auto refused = [&](const SamplingOptions &sampling) {
    GenerateOptions how = greedy(1);
    how.sampling = sampling;
    Expected<Generation> result = m.generate({{1}}, how);
    EXPECT_FALSE(result);
    return result ? "" : result.status().toString();
  };
  const double nan = std::numeric_limits<double>::quiet_NaN(),
               inf = std::numeric_limits<double>::infinity();
  EXPECT_EQ(refused({-0.5, 0, 1, 0}),
            "invalid argument: temperature: expected a number of at least 0, "
            "got -0.500000");
  EXPECT_EQ(refused({inf, 0, 1, 0}), "invalid argument: temperature: expected "
                                     "a number of at least 0, got inf");
  EXPECT_EQ(refused({nan, 0, 1, 0}), "invalid argument: temperature: expected "
                                     "a number of at least 0, got nan");
  EXPECT_EQ(refused({1, -1, 1, 0}),
            "invalid argument: top_k: expected at least 1, or 0 for all "
            "tokens, got -1");
  for (double topP : {0., -1., 1.5, nan, inf})
    EXPECT_EQ(refused({1, 0, topP, 0}),
              "invalid argument: top_p: expected a number above 0 and up to 1, "
              "got " +
                  std::to_string(topP));

  EXPECT_FAILS(m.negativeLogLikelihoods({1}), InvalidArgument,
               "expected at least 2 tokens, got 1");
  EXPECT_FAILS(m.negativeLogLikelihoods({}), InvalidArgument,
               "expected at least 2 tokens, got 0");
  EXPECT_FAILS(m.negativeLogLikelihoods({1, 256}), InvalidArgument,
               "expected tokens from 0 to 255, got 256");
  for (auto [window, stride] : {std::pair<int64_t, int64_t>{1, 1},
                                {-1, 1},
                                {8, 0},
                                {8, 8},
                                {8, -1},
                                {1000, 1000}})
    EXPECT_FAILS(
        m.negativeLogLikelihoods({1, 2, 3}, window, stride), InvalidArgument,
        "expected a window of at least 2 tokens and a stride from 1 to the "
        "window less 1, got a window of " +
            std::to_string(window) + " and a stride of " +
            std::to_string(stride));
}

TEST_P(Models, BadStates) {
  Model &m = model();
  EXPECT_FAILS(m.makeStates(0), InvalidArgument,
               "expected at least 1 sequence, got 0");
  EXPECT_FAILS(m.makeStates(-3), InvalidArgument,
               "expected at least 1 sequence, got -3");
  StateCache states = take(m.makeStates(3));
  EXPECT_FAILS(m.prefill({{1}}, states, {3}), InvalidArgument,
               "expected a slot from 0 to 2, got 3");
  EXPECT_FAILS(m.decode({1}, states, {-1}), InvalidArgument,
               "expected a slot from 0 to 2, got -1");
  EXPECT_FAILS(m.prefill({{1}, {1}}, states, {2, 2}), InvalidArgument,
               "expected a slot of its own for each sequence, got 2 twice");
  EXPECT_FAILS(m.decode({1, 1}, states, {0, 1, 2}), InvalidArgument,
               "expected a slot for each of 2 sequences, got 3");
  EXPECT_FAILS(m.decode({1, 1, 1, 1}, states), InvalidArgument,
               "expected states of at least 4 sequences, got 3");
  EXPECT_FAILS(states.select({0, 3}), InvalidArgument,
               "expected a slot from 0 to 2, got 3");
  EXPECT_FAILS(states.select({}), InvalidArgument,
               "expected at least 1 slot, got none");
  EXPECT_STATUS(states.clear(-1), InvalidArgument,
                "expected a slot from 0 to 2, got -1");
  EXPECT_STATUS(states.assign(3, states, 0), InvalidArgument,
                "expected a slot from 0 to 2, got 3");
  EXPECT_STATUS(states.assign(0, states, 4), InvalidArgument,
                "expected a slot from 0 to 2, got 4");

  // Those of another model.
  StateCache others = take(otherModel().makeStates(3));
  EXPECT_STATUS(states.assign(0, others, 0), InvalidArgument,
                "expected states of the same model, got others");
  EXPECT_FAILS(m.prefill({{1}}, others), InvalidArgument,
               "expected states of this model, got those of another");
  EXPECT_FAILS(m.decode({1}, others), InvalidArgument,
               "expected states of this model, got those of another");
  EXPECT_FAILS(m.generate({{1}}, greedy(1), &others), InvalidArgument,
               "expected states of this model, got those of another");

  // None at all.
  const std::string none = "expected states that Model::makeStates() or "
                           "loadStates() made, got an empty handle";
  StateCache empty;
  EXPECT_EQ(empty.size(), 0);
  EXPECT_EQ(empty.bytesPerSequence(), 0);
  EXPECT_FAILS(m.prefill({{1}}, empty), InvalidArgument, none);
  EXPECT_FAILS(m.decode({1}, empty), InvalidArgument, none);
  EXPECT_FAILS(m.generate({{1}}, greedy(1), &empty), InvalidArgument, none);
  EXPECT_FAILS(empty.clone(), InvalidArgument, none);
  EXPECT_FAILS(empty.select({0}), InvalidArgument, none);
  EXPECT_STATUS(empty.assign(0, states, 0), InvalidArgument, none);
  EXPECT_STATUS(states.assign(0, empty, 0), InvalidArgument, none);
  EXPECT_STATUS(empty.clear(), InvalidArgument, none);
  EXPECT_STATUS(empty.clear(0), InvalidArgument, none);
  EXPECT_STATUS(empty.save(temporaryPath("none")), InvalidArgument, none);
}

TEST_P(Models, BadFilesOfStates) {
  Model &m = model();
  std::string path = temporaryPath("bad.safetensors");
  Expected<StateCache> loaded = m.loadStates(path);
  ASSERT_FALSE(loaded);
  EXPECT_EQ(loaded.status().message(),
            path + ": cannot open; expected a readable "
                   "file, got No such file or directory");
  const std::string other =
      ": expected states that StateCache::save() wrote, with an i64 tensor "
      "'tokens' of one axis, got a file without it";
  std::string golden =
      input(std::string("golden/models/") + GetParam() + ".safetensors");
  EXPECT_FAILS(m.loadStates(golden), InvalidArgument, golden + other);
  for (Tensor tokens : {take(Tensor::empty(DType::I32, {2})),
                        take(Tensor::empty(DType::I64, {1, 2})),
                        take(Tensor::empty(DType::I64, {0}))}) {
    ASSERT_OK(writeSafeTensors(path, {{"tokens", tokens}}));
    EXPECT_FAILS(m.loadStates(path), InvalidArgument, path + other);
  }
  Tensor negative = take(Tensor::empty(DType::I64, {2}, true));
  negative.dataAs<int64_t>()[1] = -3;
  ASSERT_OK(writeSafeTensors(path, {{"tokens", negative}}));
  EXPECT_FAILS(m.loadStates(path), InvalidArgument,
               path + ": tokens: expected counts of at least 0, got -3");
  ASSERT_OK(writeSafeTensors(
      path, {{"tokens", take(Tensor::empty(DType::I64, {2}, true))}}));
  loaded = m.loadStates(path);
  ASSERT_FALSE(loaded);
  EXPECT_EQ(loaded.status().code(), StatusCode::NotFound);
  EXPECT_EQ(loaded.status().message().rfind(
                path + ": expected states of this model, got none for '", 0),
            0u);
  // What another model saved.
  ASSERT_OK(take(otherModel().makeStates(1)).save(path));
  loaded = m.loadStates(path);
  ASSERT_FALSE(loaded);
  EXPECT_EQ(loaded.status().message().rfind(
                path + ": expected states of this model", 0),
            0u)
      << loaded.status().message();
  std::remove(path.c_str());
  std::string nowhere = temporaryPath("nowhere") + "/states.safetensors";
  Status status = take(m.makeStates(1)).save(nowhere);
  EXPECT_EQ(status.code(), StatusCode::NotFound);
  EXPECT_EQ(status.message().rfind(nowhere, 0), 0u) << status.message();
}

TEST(ModelFolder, Refusals) {
  ModelOptions options;
  options.segment = 0;
  EXPECT_FAILS(
      Model::load(context(), input("checkpoints/mamba1-tiny"), options),
      InvalidArgument, "segment: expected at least 1 token, got 0");
  options = {};
  options.stateType = DType::F64;
  EXPECT_FAILS(
      Model::load(context(), input("checkpoints/mamba1-tiny"), options),
      InvalidArgument,
      "state type: expected f32, f16 or bf16, got another type");
  std::string nowhere = temporaryPath("nowhere");
  Expected<std::shared_ptr<Model>> loaded = Model::load(context(), nowhere);
  ASSERT_FALSE(loaded);
  EXPECT_EQ(loaded.status().message(),
            "expected a folder, got '" + nowhere + "'");
  EXPECT_FAILS(
      Model::random(context(), "mamba-7b", DType::F32), NotFound,
      "expected a model of mamba-130m, mamba-370m, mamba-790m, mamba-1.4b, "
      "mamba-2.8b, mamba2-130m, mamba2-370m, mamba2-780m, mamba2-1.3b, "
      "mamba2-2.7b, got 'mamba-7b'");
  for (DType type : {DType::F64, DType::I8})
    EXPECT_FAILS(Model::random(context(), "mamba-130m", type), InvalidArgument,
                 std::string("expected weights of f32, f16 or bf16, got ") +
                     dtypeName(type));
}

INSTANTIATE_TEST_SUITE_P(Tiny, Models,
                         testing::Values("mamba1-tiny", "mamba2-tiny"));
} // namespace
