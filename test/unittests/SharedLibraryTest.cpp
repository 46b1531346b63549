//===- SharedLibraryTest.cpp - The C++ API through libcorey.so ------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// What an application links that has nothing but libcorey.so: the other tests
// link the archives, in which nothing is hidden.
//
//===----------------------------------------------------------------------===//

#include "corey/Model.h"
#include <algorithm>
#include <cstdio>

using namespace corey;

static int fail(const Status &status) {
  std::fprintf(stderr, "%s\n", status.toString().c_str());
  return 1;
}

int main() {
  Expected<std::shared_ptr<Context>> context = Context::create({"cpu", 1});
  if (!context)
    return fail(context.status());
  Expected<std::shared_ptr<Model>> model =
      Model::load(*context, COREY_TEST_INPUTS "/checkpoints/mamba1-tiny");
  if (!model)
    return fail(model.status());
  GenerateOptions options;
  options.maxTokens = 3;
  if (Status status = options.sampling.check(); !status)
    return fail(status);
  Expected<Generation> whole = (*model)->generate({{84, 104, 101}}, options);
  if (!whole)
    return fail(whole.status());

  // The same by hand, behind states that were copied.
  Expected<StateCache> states = (*model)->makeStates(1);
  if (!states)
    return fail(states.status());
  Expected<Tensor> logits = (*model)->prefill({{84, 104, 101}}, *states);
  if (!logits)
    return fail(logits.status());
  Expected<StateCache> copy = states->select({0});
  if (!copy)
    return fail(copy.status());
  for (int32_t want : whole->tokens[0]) {
    const float *row = logits->dataAs<float>();
    auto got =
        static_cast<int32_t>(std::max_element(row, row + logits->dim(1)) - row);
    if (got != want) {
      std::fprintf(stderr, "expected token %d, got %d\n", want, got);
      return 1;
    }
    logits = (*model)->decode({got}, *copy);
    if (!logits)
      return fail(logits.status());
  }
  return whole->newTokens == 3 && copy->tokens(0) == 6 ? 0 : 1;
}
