//===- RegionCost.cpp - Work and traffic of ops and regions ---------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Analysis/RegionCost.h"
#include "corey/Dialect/SSM/IR/SSMOps.h"
#include "mlir/Interfaces/FunctionInterfaces.h"
#include "llvm/ADT/SetVector.h"
#include "llvm/ADT/TypeSwitch.h"

using namespace mlir;
using namespace corey;
using namespace corey::ssm;

const MachineRates *corey::findMachine(StringRef name) {
  // The CPU's are what corey-bench reaches with two threads; the GPU's are
  // measured copy and matrix rates, and its clock times its lanes.
  static const MachineRates machines[] = {
      {"cpu", 1.8e10, 3.1e10, 1.6e9, 4.0e10, 5e-6, INFINITY, 32 * 1024},
      {"h200", 4.3e12, 1.67e13, 4.18e12, 3.95e14, 2e-6, 255, 227 * 1024}};
  for (const MachineRates &machine : machines)
    if (machine.name == name)
      return &machine;
  return nullptr;
}

double RegionCost::seconds(const MachineRates &machine) const {
  double arithmetic = fma / machine.fma +
                      transcendental / machine.transcendental +
                      matrix / machine.matrix;
  return machine.launch + std::max(arithmetic, bytes() / machine.bytes);
}

static double bytesOf(Value value, int64_t dynamicDim) {
  auto type = dyn_cast<ShapedType>(value.getType());
  if (!type || !type.hasRank() || !type.getElementType().isIntOrFloat())
    return 0;
  double count = 1;
  for (int64_t size : type.getShape())
    count *=
        static_cast<double>(ShapedType::isDynamic(size) ? dynamicDim : size);
  return count * ((type.getElementTypeBitWidth() + 7) / 8);
}

void corey::estimateFootprint(Operation *op, double &registers,
                              double &shared) {
  auto lastDim = [](Value value) {
    return static_cast<double>(
        cast<ShapedType>(value.getType()).getShape().back());
  };
  registers = 2.0 * (op->getNumOperands() + 1);
  shared = 0;
  llvm::TypeSwitch<Operation *>(op)
      .Case([&](SelectiveScanOp scan) {
        // State and rate of half the states, as pairs of lanes share them, and
        // a ring of 64 tokens of u, delta, z, B and C for 16 channels.
        double states = lastDim(scan.getA());
        registers = 24 + 2 * std::min(states, 64.0) / 2 * 2;
        shared = 4 * 64 * (3 * 16 + 2 * states);
      })
      .Case([&](SSDOp ssd) {
        // A tile of 64 tokens of x, B and C, and the state in registers.
        double states = lastDim(ssd.getB()), channels = lastDim(ssd.getX());
        registers = std::min(240.0, 40 + states * channels / 128);
        shared = 2 * 2 * 64 * (channels + 2 * states);
      })
      .Case([&](CausalConvOp conv) {
        registers = 8 + 2 * lastDim(conv.getWeight());
      })
      .Case([&](RMSNormOp norm) {
        registers = 24;
        shared = 4 * 32;
      })
      .Case([&](HadamardOp hadamard) {
        auto block = static_cast<double>(hadamard.getBlock());
        registers = 8 + std::min(block, 1024.0) / 32;
        shared = block > 1024 ? 4 * block : 0;
      })
      .Case([&](ProjectionOp) {
        registers = 168;
        shared = 96 * 1024;
      });
}

RegionCost corey::regionCost(ArrayRef<Operation *> ops, int64_t dynamicDim) {
  RegionCost cost;
  llvm::SmallPtrSet<Operation *, 8> inside(ops.begin(), ops.end());
  llvm::SmallPtrSet<Value, 16> read;
  for (Operation *op : ops) {
    // Sizes, and what is bound to them, move nothing.
    auto fusable = dyn_cast<FusableOpInterface>(op);
    if (!fusable)
      continue;
    OpCost own = fusable.getCost(dynamicDim);
    cost.fma += static_cast<double>(own.fma);
    cost.transcendental += static_cast<double>(own.transcendental);
    cost.matrix += static_cast<double>(own.matrix);
    double registers = 0, shared = 0;
    estimateFootprint(op, registers, shared);
    cost.registers += registers;
    cost.shared += shared;
    for (Value operand : op->getOperands()) {
      Operation *producer = operand.getDefiningOp();
      if (producer && inside.contains(producer))
        cost.bytesKept += bytesOf(operand, dynamicDim);
      else if (read.insert(operand).second)
        cost.bytesRead += bytesOf(operand, dynamicDim);
    }
    for (Value result : op->getResults()) {
      bool leaves = false, used = false;
      for (Operation *user : result.getUsers()) {
        leaves |= !inside.contains(user);
        used = true;
      }
      if (leaves || !used)
        cost.bytesWritten += bytesOf(result, dynamicDim);
      else
        cost.bytesKept += bytesOf(result, dynamicDim);
    }
  }
  return cost;
}

/// Entropy that is recorded of a value; NaN if none is.
static double entropyOf(Value value) {
  Attribute attr;
  if (auto result = dyn_cast<OpResult>(value)) {
    attr = result.getOwner()->getDiscardableAttr("ssm.stats");
    if (auto list = dyn_cast_or_null<ArrayAttr>(attr))
      attr = result.getResultNumber() < list.size()
                 ? list[result.getResultNumber()]
                 : Attribute();
  } else if (auto argument = dyn_cast<BlockArgument>(value)) {
    auto function = dyn_cast_or_null<FunctionOpInterface>(
        argument.getOwner()->getParentOp());
    if (function && argument.getOwner()->isEntryBlock())
      attr = function.getArgAttr(argument.getArgNumber(), "ssm.stats");
  }
  if (auto stats = dyn_cast_or_null<StatsAttr>(attr))
    return stats.getEntropy().convertToDouble();
  return NAN;
}

FusionFeatures corey::fusionFeatures(Operation *op, int64_t dynamicDim,
                                     const MachineRates &machine) {
  RegionCost cost = regionCost(op, dynamicDim);
  FusionFeatures features;
  features.intensity = cost.intensity();
  features.memory = cost.bytes() * 1e-6;
  features.registers = cost.registers;
  features.shared = cost.shared;
  // Threads of a multiprocessor that the registers leave room for, of 2048.
  features.occupancy =
      std::isfinite(machine.registers)
          ? std::min(1.0, 65536 / std::max(cost.registers, 16.0) / 2048)
          : 1;
  if (op->getNumResults())
    features.entropy = entropyOf(op->getResult(0));
  if (std::isnan(features.entropy) && op->getNumOperands())
    features.entropy = entropyOf(op->getOperand(0));
  return features;
}
