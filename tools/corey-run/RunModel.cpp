//===- RunModel.cpp - Runs language models
//---------------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "RunModel.h"
#include "corey/ToolUtils.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/Support/FileSystem.h"
#include "llvm/Support/Format.h"
#include "llvm/Support/JSON.h"
#include "llvm/Support/MemoryBuffer.h"
#include "llvm/Support/Path.h"
#include "llvm/Support/raw_ostream.h"
#include <chrono>
#include <cmath>
#include <numeric>
#include <set>

using namespace corey;

static constexpr const char *kTool = "corey-run";
/// Of a model whose tokens are bytes.
static constexpr int64_t kByteVocabulary = 256;
/// Prompts of as many tokens show how far they are.
static constexpr int64_t kLongPrompt = 16384;

static double millisecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(
             std::chrono::steady_clock::now() - start)
      .count();
}

static std::vector<int32_t> tokensOfBytes(llvm::StringRef text) {
  std::vector<int32_t> tokens;
  for (unsigned char byte : text.bytes())
    tokens.push_back(byte);
  return tokens;
}

/// The tokens of a text, or the numbers of tokens in it, and the options for
/// the one and the other.
static Expected<std::vector<int32_t>> tokensOf(const Model &model,
                                               llvm::StringRef text, bool isIds,
                                               const char *textOption,
                                               const char *idsOption) {
  if (!isIds) {
    if (model.info().vocabSize != kByteVocabulary)
      return Status::unsupported(
          std::string(textOption) +
          ": expected a model of bytes, 256 tokens, got one of " +
          std::to_string(model.info().vocabSize) +
          "; give numbers of tokens with " + idsOption);
    return tokensOfBytes(text);
  }
  std::vector<int32_t> tokens;
  llvm::SmallVector<llvm::StringRef> parts;
  llvm::SplitString(text, parts, ", \n\t");
  for (llvm::StringRef part : parts) {
    int32_t token;
    if (part.getAsInteger(10, token))
      return Status::invalidArgument(std::string(idsOption) +
                                     ": expected numbers of tokens, got '" +
                                     part.str() + "'");
    tokens.push_back(token);
  }
  return tokens;
}

static void showProgress(const char *what, int64_t done, int64_t total) {
  llvm::errs() << llvm::format("\r%s %lld of %lld tokens", what,
                               static_cast<long long>(done),
                               static_cast<long long>(total))
               << (done >= total ? "\n" : "");
}

//===----------------------------------------------------------------------===//
// Generation
//===----------------------------------------------------------------------===//

static llvm::json::Array describeChunks(const Executable &executable) {
  llvm::json::Array chunks;
  for (const ChunkInfo &each : executable.chunks()) {
    llvm::json::Object object{
        {"site", each.site},       {"chunk", each.chunk},
        {"batch", each.batch},     {"length", each.length},
        {"variant", each.variant}, {"policy", each.policy},
        {"reason", each.reason},
    };
    if (!std::isnan(each.predictedMs))
      object["predicted_ms"] = each.predictedMs;
    chunks.push_back(std::move(object));
  }
  return chunks;
}

static Status generate(Model &model, const ModelRun &run,
                       llvm::json::Object &stats) {
  TokenSequences prompts;
  for (int64_t i = 0; i < run.batch; ++i)
    for (const std::string &text : run.prompts) {
      Expected<std::vector<int32_t>> tokens =
          tokensOf(model, text, run.promptsAreIds, "--prompt", "--ids");
      if (!tokens)
        return tokens.takeStatus();
      prompts.push_back(std::move(*tokens));
    }
  StateCache states;
  bool keeps = !run.loadStates.empty() || !run.saveStates.empty();
  if (!run.loadStates.empty()) {
    Expected<StateCache> loaded = model.loadStates(run.loadStates);
    if (!loaded)
      return loaded.takeStatus();
    states = std::move(*loaded);
  } else if (keeps) {
    Expected<StateCache> made =
        model.makeStates(static_cast<int64_t>(prompts.size()));
    if (!made)
      return made.takeStatus();
    states = std::move(*made);
  }
  GenerateOptions options = run.generate;
  bool isText = model.info().vocabSize == kByteVocabulary && !run.promptsAreIds;
  bool streams = prompts.size() == 1;
  options.onToken = [&, first = true](int64_t, int32_t token) mutable {
    // What sites chose for the prompt, before steps of one token choose again.
    if (first)
      stats["sites"] = describeChunks(model.executable());
    // As soon as they are known; several sequences would mix.
    if (streams) {
      if (isText)
        llvm::outs() << static_cast<char>(token);
      else
        llvm::outs() << (first ? "" : " ") << token;
      llvm::outs().flush();
    }
    first = false;
    return true;
  };
  int64_t total = 0;
  for (const std::vector<int32_t> &prompt : prompts)
    total += static_cast<int64_t>(prompt.size());
  if (total >= kLongPrompt)
    options.onProgress = [](int64_t done, int64_t all) {
      showProgress("prefilled", done, all);
    };
  Expected<Generation> result =
      model.generate(prompts, options, keeps ? &states : nullptr);
  if (!result)
    return result.takeStatus();
  if (streams) {
    llvm::outs() << "\n";
  } else {
    for (size_t i = 0; i < result->tokens.size(); ++i) {
      llvm::outs() << "[" << i << "] ";
      for (size_t j = 0; j < result->tokens[i].size(); ++j)
        if (isText)
          llvm::outs() << static_cast<char>(result->tokens[i][j]);
        else
          llvm::outs() << (j ? " " : "") << result->tokens[i][j];
      llvm::outs() << "\n";
    }
  }
  if (!run.saveStates.empty())
    if (Status status = states.save(run.saveStates); !status)
      return status;
  // On a terminal times come below the text.
  llvm::outs().flush();
  // There is no first token where none is wanted.
  int64_t afterFirst = std::max<int64_t>(
      result->newTokens - static_cast<int64_t>(result->tokens.size()), 0);
  auto perSecond = [](int64_t tokens, double ms) {
    return ms > 0 ? static_cast<double>(tokens) * 1e3 / ms : 0;
  };
  llvm::errs() << llvm::format(
      "prefill: %lld tokens in %.1f ms (%.0f tokens/s); decode: %lld tokens in "
      "%.1f ms (%.0f tokens/s)\n",
      static_cast<long long>(result->promptTokens), result->prefillMs,
      perSecond(result->promptTokens, result->prefillMs),
      static_cast<long long>(afterFirst), result->decodeMs,
      perSecond(afterFirst, result->decodeMs));
  stats["prompt_tokens"] = result->promptTokens;
  stats["new_tokens"] = result->newTokens;
  stats["sequences"] = static_cast<int64_t>(prompts.size());
  stats["prefill_ms"] = result->prefillMs;
  stats["decode_ms"] = result->decodeMs;
  stats["prefill_tokens_per_s"] =
      perSecond(result->promptTokens, result->prefillMs);
  stats["decode_tokens_per_s"] = perSecond(afterFirst, result->decodeMs);
  return Status::ok();
}

//===----------------------------------------------------------------------===//
// Likelihoods
//===----------------------------------------------------------------------===//

static Status evaluate(Model &model, const ModelRun &run,
                       llvm::json::Object &stats) {
  const char *option = run.evalFilesAreIds ? "--eval-ids" : "--eval";
  llvm::json::Array files;
  double allNats = 0;
  int64_t allTokens = 0;
  for (const std::string &path : run.evalFiles) {
    auto buffer = llvm::MemoryBuffer::getFile(path);
    if (!buffer)
      return Status::ioError(std::string(option) + ": " + path + ": " +
                             buffer.getError().message());
    llvm::StringRef text = (*buffer)->getBuffer();
    Expected<std::vector<int32_t>> tokens =
        tokensOf(model, text, run.evalFilesAreIds, "--eval", "--eval-ids");
    if (!tokens)
      return tokens.takeStatus();
    auto start = std::chrono::steady_clock::now();
    bool isLong = static_cast<int64_t>(tokens->size()) >= kLongPrompt;
    Expected<std::vector<double>> nats = model.negativeLogLikelihoods(
        *tokens, run.window, run.stride,
        isLong ? [](int64_t done,
                    int64_t all) { showProgress("judged", done, all); }
               : std::function<void(int64_t, int64_t)>());
    if (!nats)
      return Status(nats.status().code(), std::string(option) + ": " + path +
                                              ": " + nats.status().message());
    double ms = millisecondsSince(start);
    double sum = std::accumulate(nats->begin(), nats->end(), 0.0);
    auto count = static_cast<int64_t>(nats->size());
    double mean = sum / static_cast<double>(count);
    llvm::outs() << path
                 << llvm::format(": %lld tokens, %.5f nats a token, perplexity "
                                 "%.4f",
                                 static_cast<long long>(count), mean,
                                 std::exp(mean));
    llvm::json::Object file{{"file", path},
                            {"tokens", count},
                            {"nats_per_token", mean},
                            {"perplexity", std::exp(mean)},
                            {"ms", ms}};
    if (!run.evalFilesAreIds) {
      llvm::outs() << llvm::format(", %.5f bits a byte", mean / std::log(2.0));
      file["bits_per_byte"] = mean / std::log(2.0);
    }
    llvm::outs() << llvm::format(" (%.0f tokens/s)\n",
                                 static_cast<double>(count) * 1e3 / ms);
    files.push_back(std::move(file));
    allNats += sum;
    allTokens += count;
  }
  if (run.evalFiles.size() > 1)
    llvm::outs() << llvm::format(
        "all: %lld tokens, perplexity %.4f\n",
        static_cast<long long>(allTokens),
        std::exp(allNats / static_cast<double>(allTokens)));
  stats["eval"] = std::move(files);
  stats["window"] = run.window;
  stats["stride"] = run.stride;
  return Status::ok();
}

//===----------------------------------------------------------------------===//
// Reference results
//===----------------------------------------------------------------------===//

namespace {
/// Compares a model with results of another implementation: for each text KEY,
/// `KEY.input_ids`, `KEY.logits_last`, `KEY.logits_tail64`,
/// `KEY.logits_tail64_f64`, `KEY.greedy64` and `KEY.greedy64_margin`; and
/// `nll4096.NAME.per_token` of the first bytes of text/NAME.txt, beside the
/// folder of the file.
class GoldenModel {
public:
  GoldenModel(Model &model, const SafeTensors &file)
      : model(model), file(file),
        isF32(model.info().computeType == DType::F32) {}

  Status run() {
    std::set<std::string> keys;
    for (const std::string &name : file.names())
      if (llvm::StringRef key(name); key.consume_back(".input_ids"))
        keys.insert(key.str());
    for (const std::string &key : keys)
      if (Status status = checkText(key); !status)
        return status;
    for (const std::string &name : file.names()) {
      llvm::StringRef key(name);
      if (key.consume_front("nll4096.") && key.consume_back(".per_token"))
        if (Status status = checkLikelihood(key.str(), name); !status)
          return status;
    }
    if (passed + failed == 0)
      return Status::invalidArgument(
          file.path() + ": expected tensors such as 'KEY.input_ids' or "
                        "'nll4096.NAME.per_token', got none");
    if (skipped)
      llvm::outs() << skipped << " skipped\n";
    llvm::outs() << passed << " passed, " << failed << " failed\n";
    return Status::ok();
  }
  bool isGood() const { return failed == 0; }

private:
  void report(const std::string &what, bool good, const std::string &how) {
    llvm::outs() << (good ? "PASS " : "FAIL ") << what << ": " << how << "\n";
    ++(good ? passed : failed);
  }

  Status checkLogits(const std::string &name, const Tensor &got,
                     double &largest) {
    Expected<Tensor> want = file.get(name);
    if (!want)
      return want.takeStatus();
    Expected<Difference> difference = compare(got, *want);
    if (!difference)
      return Status::invalidArgument(name + ": " +
                                     difference.status().message());
    double bound = isF32 ? 1e-4 : 2e-2;
    std::string text;
    llvm::raw_string_ostream(text)
        << llvm::format("relative l2 error %.3g, max absolute error %.3g",
                        difference->relativeL2, difference->maxAbsolute);
    report(name, difference->relativeL2 <= bound, text);
    largest = std::max(largest, difference->maxAbsolute);
    return Status::ok();
  }

  Status checkText(const std::string &key) {
    Expected<Tensor> ids = file.get(key + ".input_ids");
    if (!ids)
      return ids.takeStatus();
    if (ids->dtype() != DType::I32 || ids->rank() != 1)
      return Status::invalidArgument(key +
                                     ".input_ids: expected i32 of one "
                                     "axis, got " +
                                     ids->describe());
    std::vector<int32_t> tokens(ids->dataAs<int32_t>(),
                                ids->dataAs<int32_t>() + ids->numElements());
    double largest = 0;
    for (auto [name, count] :
         {std::pair<const char *, int64_t>{".logits_last", 1},
          {".logits_tail64", 64},
          {".logits_tail64_f64", 64}}) {
      if (!file.contains(key + name))
        continue;
      Expected<Tensor> logits = model.logits(tokens, count);
      if (!logits)
        return logits.takeStatus();
      Expected<Tensor> host = logits->device().kind == Device::CPU
                                  ? *logits
                                  : logits->to(Device::cpu());
      if (!host)
        return host.takeStatus();
      if (Status status = checkLogits(key + name, *host, largest); !status)
        return status;
    }
    if (!file.contains(key + ".greedy64"))
      return Status::ok();
    Expected<Tensor> want = file.get(key + ".greedy64"),
                     margin = file.get(key + ".greedy64_margin");
    if (!want || !margin)
      return want ? margin.takeStatus() : want.takeStatus();
    GenerateOptions options;
    options.maxTokens = want->numElements();
    options.stopTokens.emplace();
    Expected<Generation> result = model.generate({tokens}, options);
    if (!result)
      return result.takeStatus();
    int64_t equal = 0;
    while (equal < want->numElements() &&
           result->tokens[0][static_cast<size_t>(equal)] ==
               want->dataAs<int32_t>()[equal])
      ++equal;
    // Two logits that are closer than what they are wrong by can change places.
    bool good =
        equal == want->numElements() ||
        static_cast<double>(margin->dataAs<float>()[equal]) < 2 * largest;
    std::string text;
    llvm::raw_string_ostream os(text);
    os << equal << " of " << want->numElements() << " tokens equal";
    if (equal < want->numElements())
      os << llvm::format("; the next had a margin of %.3g, where logits differ "
                         "by up to %.3g",
                         static_cast<double>(margin->dataAs<float>()[equal]),
                         largest);
    report(key + ".greedy64", good, text);
    return Status::ok();
  }

  Status checkLikelihood(const std::string &name, const std::string &key) {
    Expected<Tensor> want = file.get(key);
    if (!want)
      return want.takeStatus();
    llvm::SmallString<128> path(llvm::sys::path::parent_path(file.path()));
    llvm::sys::path::append(path, "..", "text", name + ".txt");
    auto buffer = llvm::MemoryBuffer::getFile(path);
    size_t size = static_cast<size_t>(want->numElements()) + 1;
    if (!buffer || (*buffer)->getBufferSize() < size) {
      llvm::outs() << "SKIP nll4096." << name << ": expected the text at "
                   << path << ", got none\n";
      ++skipped;
      return Status::ok();
    }
    Expected<std::vector<double>> got = model.negativeLogLikelihoods(
        tokensOfBytes((*buffer)->getBuffer().take_front(size)));
    if (!got)
      return got.takeStatus();
    double wantMean = 0, gotMean = 0, worst = 0;
    for (size_t i = 0; i < got->size(); ++i) {
      double expected = static_cast<double>(want->dataAs<float>()[i]);
      wantMean += expected / static_cast<double>(got->size());
      gotMean += (*got)[i] / static_cast<double>(got->size());
      worst = std::max(worst, std::abs(expected - (*got)[i]));
    }
    double ratio = std::exp(gotMean - wantMean) - 1;
    std::string text;
    llvm::raw_string_ostream(text) << llvm::format(
        "perplexity %.4f, expected %.4f (%+.3g %%); a token differs by up to "
        "%.3g nats",
        std::exp(gotMean), std::exp(wantMean), ratio * 100, worst);
    report("nll4096." + name, std::abs(ratio) <= (isF32 ? 1e-3 : 5e-3), text);
    return Status::ok();
  }

  Model &model;
  const SafeTensors &file;
  bool isF32;
  int64_t passed = 0, failed = 0, skipped = 0;
};
} // namespace

//===----------------------------------------------------------------------===//
// corey-run <folder>
//===----------------------------------------------------------------------===//

int corey::runModel(std::shared_ptr<Context> context, const ModelRun &run) {
  auto start = std::chrono::steady_clock::now();
  Expected<std::shared_ptr<Model>> loaded =
      Model::load(context, run.folder, run.model);
  if (!loaded)
    return reportError(kTool, loaded.status());
  Model &model = **loaded;
  double loadMs = millisecondsSince(start);
  for (auto [site, chunk] : run.chunks)
    if (Status status = model.executable().setChunk(site, chunk); !status)
      return reportError(kTool, status);
  const ModelInfo &info = model.info();
  llvm::json::Object stats{
      {"model_type", info.type},
      {"layers", info.numLayers},
      {"parameters", info.parameters},
      {"weight_bytes", info.weightBytes},
      {"compute_type", dtypeName(info.computeType)},
      {"target", model.context().getDevice().name()},
      {"load_ms", loadMs},
  };
  double compileMs = 0;
  llvm::json::Object phases;
  for (const PhaseTime &phase : model.executable().compileTimes()) {
    phases[phase.phase] = phase.milliseconds;
    compileMs += phase.milliseconds;
  }
  stats["compile_ms"] = compileMs;
  stats["compile_phases_ms"] = std::move(phases);
  bool isCached = model.executable().cache().outcome == CacheInfo::Loaded;
  stats["compile_cached"] = isCached;
  llvm::errs() << llvm::format(
      "%s: %s, %lld layers, %.2f M parameters, loaded in %.0f ms (%s in "
      "%.0f ms)\n",
      run.folder.c_str(), info.type.c_str(),
      static_cast<long long>(info.numLayers),
      static_cast<double>(info.parameters) / 1e6, loadMs,
      isCached ? "program from the cache" : "compiled", compileMs);

  bool good = true;
  if (!run.golden.empty()) {
    Expected<SafeTensors> file = SafeTensors::open(run.golden);
    if (!file)
      return reportError(kTool, file.status());
    GoldenModel golden(model, *file);
    if (Status status = golden.run(); !status)
      return reportError(kTool, status);
    good = golden.isGood();
  }
  if (!run.evalFiles.empty())
    if (Status status = evaluate(model, run, stats); !status)
      return reportError(kTool, status);
  if (!run.prompts.empty())
    if (Status status = generate(model, run, stats); !status)
      return reportError(kTool, status);
  // Unless there was a prompt, whose sites are there.
  if (!stats.get("sites"))
    stats["sites"] = describeChunks(model.executable());
  if (run.explain)
    llvm::outs() << model.executable().explain();
  if (!run.stats.empty()) {
    std::string text;
    llvm::raw_string_ostream(text)
        << llvm::formatv("{0:2}\n", llvm::json::Value(std::move(stats)));
    if (run.stats == "-") {
      llvm::outs() << text;
    } else {
      std::error_code error;
      llvm::raw_fd_ostream os(run.stats, error);
      if (!error) {
        os << text;
        os.close();
        error = os.error();
        os.clear_error();
      }
      if (error)
        return reportError(kTool, Status::ioError("--stats: " + run.stats +
                                                  ": " + error.message()));
    }
  }
  return good ? 0 : 1;
}
