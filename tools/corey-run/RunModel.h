//===- RunModel.h - Runs language models ------------------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_TOOLS_COREY_RUN_RUNMODEL_H
#define COREY_TOOLS_COREY_RUN_RUNMODEL_H

#include "corey/Model.h"
#include <memory>
#include <string>
#include <vector>

namespace corey {

/// What corey-run does with the folder of a checkpoint.
struct ModelRun {
  std::string folder;
  ModelOptions model;
  /// Chunks of sites, in tokens.
  std::vector<std::pair<std::string, int64_t>> chunks;
  /// Text, whose bytes are the tokens of a model of 256 tokens; or numbers of
  /// tokens, separated by commas or spaces.
  std::vector<std::string> prompts;
  bool promptsAreIds = false;
  /// Every prompt so often.
  int64_t batch = 1;
  GenerateOptions generate;
  /// Files whose likelihood is wanted, and how, as
  /// Model::negativeLogLikelihoods() takes it.
  std::vector<std::string> evalFiles;
  bool evalFilesAreIds = false;
  int64_t window = 0, stride = 0;
  /// A file of reference results.
  std::string golden;
  /// Files of states: to begin with, and to leave.
  std::string loadStates, saveStates;
  /// A file for times and what the scheduler chose; "-" is the output.
  std::string stats;
  bool explain = false;
};

/// Returns the exit code.
int runModel(std::shared_ptr<Context> context, const ModelRun &run);

} // namespace corey

#endif // COREY_TOOLS_COREY_RUN_RUNMODEL_H
