//===- Program.h - What compilation makes of a module -----------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_JIT_PROGRAM_H
#define COREY_JIT_PROGRAM_H

#include "corey/Executable.h"
#include "corey/Scheduler/Problem.h"
#include "corey/Target/Device.h"
#include <memory>
#include <string>
#include <vector>

namespace corey {

/// Two sizes that must agree, for messages.
struct Constraint {
  int64_t lhsArg = 0, lhsDim = 0, rhsArg = 0, rhsDim = 0;
  std::string symbol;
};

struct Function {
  FunctionInfo info;
  /// For each input: whether it is read with whatever strides it has.
  std::vector<bool> anyStrides, outputAnyStrides;
  /// Index into the program's weights for each argument behind the inputs.
  std::vector<size_t> weights;
  std::vector<Constraint> constraints;
  size_t numDims = 0, numResultDims = 0;
  /// Once the program is linked.
  void (*invoke)(void **) = nullptr;
  void (*shapes)(void **) = nullptr;
};

struct Weight {
  ArgumentInfo info;
  std::string key;
  /// Computed by the program from the others.
  bool prepared = false;
  Tensor tensor;
  bool bound = false;
};

/// A scan whose chunk is bound at run time.
struct ChunkSite {
  std::string name;
  scheduler::Problem problem;
  std::vector<scheduler::Variant> variants;
  /// The policy that the program names; empty for that of the options.
  std::string policy;
};

/// A program without its code.
struct ProgramInfo {
  std::string prefix;
  std::vector<Function> functions;
  std::vector<Weight> weights;
  /// Computes the prepared weights; null where there are none.
  std::unique_ptr<Function> prepare;
  /// Index into the weights for each of its results.
  std::vector<size_t> preparedWeights;
  std::vector<ChunkSite> chunkSites;
  std::vector<std::string> observationSites;
  TrafficInfo traffic;
};

/// Its code: relocatable objects of the host, and kernels of the device.
struct ProgramCode {
  std::vector<std::string> objects;
  DeviceImage image;
};

} // namespace corey

#endif // COREY_JIT_PROGRAM_H
