//===- Model.cpp - Language models ----------------------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Model.h"
#include "Interop.h"
#include <condition_variable>
#include <deque>
#include <mutex>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <thread>

namespace corey::python {

/// A model takes one caller at a time; this makes others wait their turn, with
/// the GIL released.
struct SharedModel {
  std::shared_ptr<Model> model;
  std::mutex busy;
};
using ModelPtr = std::shared_ptr<SharedModel>;

template <class Function>
static auto locked(const ModelPtr &self, const Function &function) {
  nb::gil_scoped_release unlocked;
  std::lock_guard<std::mutex> turn(self->busy);
  return function(*self->model);
}

/// Tokens of a generation that runs on a thread of its own. Ends it when it is
/// no longer wanted.
class TokenStream {
public:
  TokenStream(ModelPtr model, TokenSequences prompts, GenerateOptions options,
              std::optional<StateCache> states)
      : state(std::make_shared<State>()) {
    options.onToken = [state = state](int64_t sequence, int32_t token) {
      std::lock_guard<std::mutex> lock(state->mutex);
      if (state->cancelled)
        return false;
      state->tokens.emplace_back(sequence, token);
      state->changed.notify_one();
      return true;
    };
    thread = std::thread(
        [state = state, model = std::move(model), prompts = std::move(prompts),
         options = std::move(options), states = std::move(states)]() mutable {
          Status status;
          {
            std::lock_guard<std::mutex> turn(model->busy);
            auto result = model->model->generate(prompts, options,
                                                 states ? &*states : nullptr);
            status = result.status();
          }
          std::lock_guard<std::mutex> lock(state->mutex);
          state->status = std::move(status);
          state->done = true;
          state->changed.notify_one();
        });
  }
  ~TokenStream() { close(); }

  std::pair<int64_t, int32_t> next() {
    std::optional<std::pair<int64_t, int32_t>> token;
    Status status;
    {
      nb::gil_scoped_release unlocked;
      std::unique_lock<std::mutex> lock(state->mutex);
      state->changed.wait(
          lock, [&] { return state->done || !state->tokens.empty(); });
      if (!state->tokens.empty()) {
        token = state->tokens.front();
        state->tokens.pop_front();
      } else {
        status = state->status;
        state->status = Status::ok();
      }
    }
    if (token)
      return *token;
    check(status);
    throw nb::stop_iteration();
  }

  void close() {
    if (!thread.joinable())
      return;
    nb::gil_scoped_release unlocked;
    {
      std::lock_guard<std::mutex> lock(state->mutex);
      state->cancelled = true;
    }
    thread.join();
  }

private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::pair<int64_t, int32_t>> tokens;
    bool done = false, cancelled = false;
    Status status;
  };
  std::shared_ptr<State> state;
  std::thread thread;
};

static GenerateOptions
makeOptions(int64_t maxTokens, double temperature, int64_t topK, double topP,
            uint64_t seed, std::optional<std::vector<int32_t>> stopTokens) {
  GenerateOptions options;
  options.maxTokens = maxTokens;
  options.sampling.temperature = temperature;
  options.sampling.topK = topK;
  options.sampling.topP = topP;
  options.sampling.seed = seed;
  options.stopTokens = std::move(stopTokens);
  return options;
}

void bindModel(nb::module_ &module) {
  nb::class_<StateCache>(module, "StateCache",
                         "What a model knows of a number of texts, each in a "
                         "slot.")
      .def("__len__", &StateCache::size)
      .def(
          "tokens",
          [](const StateCache &self, int64_t slot) {
            if (slot < 0 || slot >= self.size())
              throw nb::index_error(("slot: expected one below " +
                                     std::to_string(self.size()) + ", got " +
                                     std::to_string(slot))
                                        .c_str());
            return self.tokens(slot);
          },
          nb::arg("slot"), "Tokens that the text in a slot has had.")
      .def_prop_ro("bytes_per_sequence", &StateCache::bytesPerSequence)
      .def("clone", [](const StateCache &self) { return take(self.clone()); })
      .def(
          "select",
          [](const StateCache &self, const std::vector<int64_t> &slots) {
            return take(self.select(slots));
          },
          nb::arg("slots"), "New states whose slot i is a copy of slots[i].")
      .def(
          "assign",
          [](StateCache &self, int64_t to, const StateCache &source,
             int64_t from) { check(self.assign(to, source, from)); },
          nb::arg("to"), nb::arg("source"), nb::arg("slot"))
      .def(
          "clear",
          [](StateCache &self, std::optional<int64_t> slot) {
            check(slot ? self.clear(*slot) : self.clear());
          },
          nb::arg("slot") = nb::none())
      .def(
          "save",
          [](const StateCache &self, const std::string &path) {
            check(self.save(path));
          },
          nb::arg("path"))
      .def("__repr__", [](const StateCache &self) {
        return "corey.StateCache(" + std::to_string(self.size()) +
               " sequences of " + std::to_string(self.bytesPerSequence()) +
               " bytes)";
      });

  nb::class_<TokenStream>(module, "TokenStream")
      .def("__iter__", [](nb::handle self) { return nb::borrow(self); })
      .def("__next__", &TokenStream::next)
      .def("close", &TokenStream::close, "Ends the generation.");

  nb::class_<SharedModel>(module, "Model")
      .def_static(
          "load",
          [](std::shared_ptr<Context> context, const std::string &folder,
             std::optional<std::string> dtype, const std::string &stateType,
             int64_t segment, const std::string &policy,
             const std::string &fusion) {
            ModelOptions options;
            if (dtype)
              options.computeType = take(dtypeFromName(*dtype));
            options.stateType = take(dtypeFromName(stateType));
            options.segment = segment;
            options.compile.policy = policy;
            options.compile.fusion = fusion;
            nb::gil_scoped_release unlocked;
            auto model = Model::load(std::move(context), folder, options);
            nb::gil_scoped_acquire locked;
            auto result = std::make_shared<SharedModel>();
            result->model = take(std::move(model));
            return result;
          },
          nb::arg("context"), nb::arg("folder"), nb::arg("dtype"),
          nb::arg("state_dtype"), nb::arg("segment"), nb::arg("policy"),
          nb::arg("fusion"))
      .def("info",
           [](const SharedModel &self) {
             const ModelInfo &info = self.model->info();
             nb::dict result;
             result["type"] = info.type;
             result["num_layers"] = info.numLayers;
             result["hidden_size"] = info.hiddenSize;
             result["vocab_size"] = info.vocabSize;
             result["parameters"] = info.parameters;
             result["weight_bytes"] = info.weightBytes;
             result["dtype"] = dtypeName(info.computeType);
             result["eos_tokens"] = info.eosTokens;
             return result;
           })
      .def("executable",
           [](const SharedModel &self) {
             return self.model->executable().shared_from_this();
           })
      .def(
          "make_states",
          [](const ModelPtr &self, int64_t sequences) {
            return take(locked(
                self, [&](Model &m) { return m.makeStates(sequences); }));
          },
          nb::arg("sequences"))
      .def(
          "load_states",
          [](const ModelPtr &self, const std::string &path) {
            return take(
                locked(self, [&](Model &m) { return m.loadStates(path); }));
          },
          nb::arg("path"))
      .def(
          "prefill",
          [](const ModelPtr &self, const TokenSequences &tokens,
             StateCache &states, const std::vector<int64_t> &slots) {
            return take(locked(self, [&](Model &m) {
              return m.prefill(tokens, states, slots);
            }));
          },
          nb::arg("tokens"), nb::arg("states"),
          nb::arg("slots") = std::vector<int64_t>())
      .def(
          "decode",
          [](const ModelPtr &self, const std::vector<int32_t> &tokens,
             StateCache &states, const std::vector<int64_t> &slots) {
            return take(locked(self, [&](Model &m) {
              return m.decode(tokens, states, slots);
            }));
          },
          nb::arg("tokens"), nb::arg("states"),
          nb::arg("slots") = std::vector<int64_t>())
      .def(
          "logits",
          [](const ModelPtr &self, const std::vector<int32_t> &tokens,
             int64_t count) {
            return take(locked(
                self, [&](Model &m) { return m.logits(tokens, count); }));
          },
          nb::arg("tokens"), nb::arg("count"))
      .def(
          "negative_log_likelihoods",
          [](const ModelPtr &self, const std::vector<int32_t> &tokens,
             int64_t window, int64_t stride) {
            return take(locked(self, [&](Model &m) {
              return m.negativeLogLikelihoods(tokens, window, stride);
            }));
          },
          nb::arg("tokens"), nb::arg("window"), nb::arg("stride"))
      .def(
          "generate",
          [](const ModelPtr &self, const TokenSequences &prompts,
             int64_t maxTokens, double temperature, int64_t topK, double topP,
             uint64_t seed, std::optional<std::vector<int32_t>> stopTokens,
             StateCache *states) {
            GenerateOptions options =
                makeOptions(maxTokens, temperature, topK, topP, seed,
                            std::move(stopTokens));
            return take(locked(self,
                               [&](Model &m) {
                                 return m.generate(prompts, options, states);
                               }))
                .tokens;
          },
          nb::arg("prompts"), nb::arg("max_tokens"), nb::arg("temperature"),
          nb::arg("top_k"), nb::arg("top_p"), nb::arg("seed"),
          nb::arg("stop_tokens").none(), nb::arg("states").none())
      .def(
          "stream",
          [](const ModelPtr &self, const TokenSequences &prompts,
             int64_t maxTokens, double temperature, int64_t topK, double topP,
             uint64_t seed, std::optional<std::vector<int32_t>> stopTokens,
             std::optional<StateCache> states) {
            return new TokenStream(self, prompts,
                                   makeOptions(maxTokens, temperature, topK,
                                               topP, seed,
                                               std::move(stopTokens)),
                                   std::move(states));
          },
          nb::arg("prompts"), nb::arg("max_tokens"), nb::arg("temperature"),
          nb::arg("top_k"), nb::arg("top_p"), nb::arg("seed"),
          nb::arg("stop_tokens").none(), nb::arg("states").none());
}

} // namespace corey::python
