//===- DimSpec.h - Shape rules written as one line --------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_DIALECT_SSM_IR_DIMSPEC_H
#define COREY_DIALECT_SSM_IR_DIMSPEC_H

#include "llvm/ADT/SmallVector.h"
#include "llvm/ADT/StringRef.h"

namespace corey::ssm {

/// One dimension of a dimension line: `L`, `W-1`, `1`, `...` or `[P]`.
struct DimExpr {
  /// The symbol; empty for a constant and for `...`.
  llvm::StringRef symbol;
  /// Added to the symbol, or the constant itself.
  int64_t offset = 0;
  bool isEllipsis = false;
  /// `[P]`: the dimension may be missing together with all that follow.
  bool isOptional = false;

  bool isConstant() const { return symbol.empty() && !isEllipsis; }
  /// Whether the symbol may be dynamic: batch, length and counts of sequences,
  /// states and rows of a table.
  bool mayBeDynamic() const {
    return isEllipsis || symbol == "B" || symbol == "L" || symbol == "S" ||
           symbol == "R" || symbol == "T";
  }
  std::string str() const;
};

/// A named operand or result and its dimensions.
struct DimEntry {
  llvm::StringRef name;
  llvm::SmallVector<DimExpr, 4> dims;
  /// Of results only: alternatives for the element type, each the name of an
  /// operand (used if present) or a type; with `~` the type is only a default.
  llvm::StringRef elementRule;

  bool hasEllipsis() const { return !dims.empty() && dims[0].isEllipsis; }
  /// `_`: stands for an operand that is not a tensor.
  bool isPlaceholder() const { return name == "_"; }
  std::string str() const;
};

/// A parsed dimension line; see DimSpecOpInterface for the grammar.
struct DimLine {
  explicit DimLine(llvm::StringRef text);

  llvm::SmallVector<DimEntry, 12> operands;
  llvm::SmallVector<DimEntry, 2> results;
};

} // namespace corey::ssm

#endif // COREY_DIALECT_SSM_IR_DIMSPEC_H
