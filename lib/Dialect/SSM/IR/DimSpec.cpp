//===- DimSpec.cpp - Shape rules written as one line ----------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Dialect/SSM/IR/DimSpec.h"
#include "corey/Dialect/SSM/IR/SSMOps.h"
#include "mlir/Dialect/Arith/Utils/Utils.h"
#include "mlir/IR/TypeUtilities.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/ADT/StringMap.h"

using namespace mlir;
using namespace corey::ssm;

//===----------------------------------------------------------------------===//
// Parsing and printing
//===----------------------------------------------------------------------===//

static DimExpr parseDim(StringRef text) {
  DimExpr dim;
  if (text == "...") {
    dim.isEllipsis = true;
    return dim;
  }
  if (text.consume_front("[")) {
    dim.isOptional = true;
    text.consume_back("]");
  }
  if (!text.getAsInteger(10, dim.offset))
    return dim;
  size_t sign = text.find_first_of("+-");
  dim.symbol = text.take_front(sign);
  if (sign != StringRef::npos) {
    text.drop_front(sign + 1).getAsInteger(10, dim.offset);
    if (text[sign] == '-')
      dim.offset = -dim.offset;
  }
  return dim;
}

DimLine::DimLine(StringRef text) {
  bool inResults = false;
  SmallVector<StringRef, 16> words;
  text.split(words, ' ', -1, /*KeepEmpty=*/false);
  for (StringRef word : words) {
    if (word == "->") {
      inResults = true;
      continue;
    }
    DimEntry entry;
    StringRef rest;
    std::tie(entry.name, rest) = word.split(':');
    std::tie(rest, entry.elementRule) = rest.split(':');
    SmallVector<StringRef, 4> dims;
    rest.split(dims, ',', -1, /*KeepEmpty=*/false);
    for (StringRef dim : dims)
      entry.dims.push_back(parseDim(dim));
    if (inResults)
      results.push_back(std::move(entry));
    else
      operands.push_back(std::move(entry));
  }
}

std::string DimExpr::str() const {
  if (isEllipsis)
    return "...";
  std::string text = symbol.str();
  if (symbol.empty())
    text = std::to_string(offset);
  else if (offset)
    text += (offset > 0 ? "+" : "") + std::to_string(offset);
  return isOptional ? "(" + text + ")" : text;
}

std::string DimEntry::str() const {
  std::string text = "[";
  llvm::raw_string_ostream os(text);
  llvm::interleaveComma(dims, os, [&](const DimExpr &dim) { os << dim.str(); });
  return text + "]";
}

//===----------------------------------------------------------------------===//
// Unification of a line with types
//===----------------------------------------------------------------------===//

namespace {
/// What is known of a symbol: a size, and where it was read.
struct Binding {
  int64_t size = ShapedType::kDynamic;
  StringRef owner;
};

/// Matches shapes against entries and collects the sizes of symbols.
class Unifier {
public:
  using EmitError = llvm::function_ref<InFlightDiagnostic()>;
  explicit Unifier(EmitError emitError) : emitError(emitError) {}

  LogicalResult add(const DimEntry &entry, StringRef kind, ShapedType type) {
    bool ellipsis = entry.hasEllipsis();
    int64_t fixed = entry.dims.size() - ellipsis;
    int64_t optional = llvm::count_if(
        entry.dims, [](const DimExpr &d) { return d.isOptional; });
    int64_t rank = type.getRank();
    if (ellipsis ? rank < fixed : (rank > fixed || rank < fixed - optional)) {
      if (!emitError)
        return failure();
      return emitError() << "expected " << kind << " '" << entry.name
                         << "' to have shape " << entry.str() << ", got "
                         << type;
    }
    int64_t leading = ellipsis ? rank - fixed : 0;
    if (ellipsis) {
      ArrayRef<int64_t> shape = type.getShape().take_front(leading);
      if (!prefix) {
        prefix.emplace(shape);
        prefixOwner = entry.name;
        prefixSizeOwners.assign(shape.size(), entry.name);
      } else if (prefix->size() != shape.size()) {
        if (!emitError)
          return failure();
        return emitError() << "expected " << kind << " '" << entry.name
                           << "' to have rank " << prefix->size() + fixed
                           << " like '" << prefixOwner << "', got " << type;
      }
      for (auto [i, size] : llvm::enumerate(shape)) {
        if (ShapedType::isDynamic((*prefix)[i]))
          prefixSizeOwners[i] = entry.name;
        if (failed(merge((*prefix)[i], size, prefixSizeOwners[i], "", entry,
                         kind, i)))
          return failure();
      }
    }
    for (int64_t i = 0; i + leading < rank; ++i) {
      const DimExpr &dim = entry.dims[i + ellipsis];
      int64_t size = type.getDimSize(i + leading);
      if (ShapedType::isDynamic(size)) {
        if (dim.mayBeDynamic() || dim.isConstant())
          continue;
        if (!emitError)
          return failure();
        return emitError() << "expected dimension " << i + leading << " ("
                           << dim.str() << ") of " << kind << " '" << entry.name
                           << "' to be static, got " << type;
      }
      if (dim.isConstant()) {
        int64_t expected = dim.offset;
        if (failed(merge(expected, size, "", "", entry, kind, i + leading)))
          return failure();
        continue;
      }
      Binding &binding = bindings[dim.symbol];
      if (!dim.mayBeDynamic() && size - dim.offset < 1) {
        if (!emitError)
          return failure();
        return emitError() << "expected dimension " << i + leading << " ("
                           << dim.str() << ") of " << kind << " '" << entry.name
                           << "' to be at least " << 1 + dim.offset << ", got "
                           << size;
      }
      if (ShapedType::isDynamic(binding.size)) {
        binding.size = size - dim.offset;
        binding.owner = entry.name;
        continue;
      }
      int64_t expected = binding.size + dim.offset;
      // The parentheses of an optional dimension say nothing of its size.
      DimExpr present = dim;
      present.isOptional = false;
      if (failed(merge(expected, size, binding.owner, present.str(), entry,
                       kind, i + leading)))
        return failure();
    }
    return success();
  }

  int64_t sizeOf(const DimExpr &dim) const {
    if (dim.isConstant())
      return dim.offset;
    auto it = bindings.find(dim.symbol);
    if (it == bindings.end() || ShapedType::isDynamic(it->second.size))
      return ShapedType::kDynamic;
    return it->second.size + dim.offset;
  }

  SmallVector<int64_t> shapeOf(const DimEntry &entry) const {
    SmallVector<int64_t> shape;
    if (entry.hasEllipsis() && prefix)
      shape = *prefix;
    for (const DimExpr &dim : entry.dims)
      if (!dim.isEllipsis)
        shape.push_back(sizeOf(dim));
    return shape;
  }

private:
  LogicalResult merge(int64_t &known, int64_t size, StringRef owner,
                      StringRef symbol, const DimEntry &entry, StringRef kind,
                      int64_t dim) {
    if (ShapedType::isDynamic(size))
      return success();
    if (ShapedType::isDynamic(known) || known == size) {
      known = size;
      return success();
    }
    if (!emitError)
      return failure();
    InFlightDiagnostic diag = emitError();
    diag << "expected dimension " << dim << " of " << kind << " '" << entry.name
         << "' to be ";
    if (!symbol.empty())
      diag << symbol << " = ";
    diag << known;
    if (!owner.empty())
      diag << " (from '" << owner << "')";
    return diag << ", got " << size;
  }

  EmitError emitError;
  llvm::StringMap<Binding> bindings;
  std::optional<SmallVector<int64_t>> prefix;
  // Where the rank of the prefix was read, and where each of its sizes was.
  StringRef prefixOwner;
  SmallVector<StringRef> prefixSizeOwners;
};
} // namespace

/// The element type a result should have, and whether that is binding.
static std::pair<Type, bool> resolveElementType(MLIRContext *context,
                                                StringRef rule,
                                                const DimLine &line,
                                                ArrayRef<Value> operands) {
  bool binding = !rule.consume_front("~");
  SmallVector<StringRef, 2> alternatives;
  rule.split(alternatives, '|');
  for (StringRef alternative : alternatives) {
    if (alternative == "f32")
      return {Float32Type::get(context), binding};
    if (alternative == "i32")
      return {IntegerType::get(context, 32), binding};
    for (auto [entry, value] : llvm::zip_equal(line.operands, operands))
      if (entry.name == alternative && value)
        return {getElementTypeOrSelf(value), binding};
  }
  return {Type(), false};
}

//===----------------------------------------------------------------------===//
// Verification, inference, reification
//===----------------------------------------------------------------------===//

LogicalResult corey::ssm::detail::verifyDimSpec(DimSpecOpInterface op) {
  DimLine line(op.getDimSpec());
  SmallVector<Value> operands = op.getSpecOperands();
  auto emitError = [&]() { return op->emitOpError(); };
  Unifier unifier(emitError);
  for (auto [entry, value] : llvm::zip_equal(line.operands, operands))
    if (value && failed(unifier.add(entry, "operand",
                                    cast<ShapedType>(value.getType()))))
      return failure();
  for (auto [entry, value] :
       llvm::zip_equal(line.results, op.getSpecResults())) {
    if (!value)
      continue;
    if (failed(unifier.add(entry, "result", cast<ShapedType>(value.getType()))))
      return failure();
    auto [type, binding] =
        resolveElementType(op->getContext(), entry.elementRule, line, operands);
    if (binding && type != getElementTypeOrSelf(value))
      return op->emitOpError()
             << "expected result '" << entry.name << "' to have element type "
             << type << ", got " << getElementTypeOrSelf(value);
  }
  return success();
}

LogicalResult corey::ssm::detail::inferFromDimSpec(
    MLIRContext *context, std::optional<Location> location, StringRef spec,
    ArrayRef<Value> operands, SmallVectorImpl<Type> &types) {
  DimLine line(spec);
  auto emitAt = [&]() { return emitError(*location); };
  Unifier unifier(location ? Unifier::EmitError(emitAt) : Unifier::EmitError());
  for (auto [entry, value] : llvm::zip_equal(line.operands, operands))
    if (value && failed(unifier.add(entry, "operand",
                                    cast<ShapedType>(value.getType()))))
      return failure();
  for (const DimEntry &entry : line.results) {
    Type element =
        resolveElementType(context, entry.elementRule, line, operands).first;
    // A result whose element type hangs on an absent operand is absent too.
    if (!element)
      continue;
    types.push_back(RankedTensorType::get(unifier.shapeOf(entry), element));
  }
  return success();
}

/// Finds the operand dimension that carries `dim`; returns false if none does.
static bool findDim(const DimLine &line, ArrayRef<Value> operands,
                    const DimExpr &dim, Value &value, int64_t &index,
                    int64_t &offset) {
  for (auto [entry, operand] : llvm::zip_equal(line.operands, operands)) {
    if (!operand)
      continue;
    int64_t rank = cast<ShapedType>(operand.getType()).getRank();
    int64_t leading =
        entry.hasEllipsis() ? rank - (int64_t(entry.dims.size()) - 1) : 0;
    for (int64_t i = entry.hasEllipsis(); i < int64_t(entry.dims.size()); ++i) {
      if (entry.dims[i].symbol != dim.symbol)
        continue;
      value = operand;
      index = leading + i - entry.hasEllipsis();
      if (index >= rank)
        continue;
      offset = dim.offset - entry.dims[i].offset;
      return true;
    }
  }
  return false;
}

LogicalResult
corey::ssm::detail::reifyFromDimSpec(DimSpecOpInterface op, OpBuilder &builder,
                                     ReifiedRankedShapedTypeDims &shapes) {
  DimLine line(op.getDimSpec());
  SmallVector<Value> operands = op.getSpecOperands();
  Location loc = op->getLoc();
  for (auto [entry, result] :
       llvm::zip_equal(line.results, op.getSpecResults())) {
    if (!result)
      continue;
    auto type = cast<RankedTensorType>(result.getType());
    SmallVector<OpFoldResult> shape;
    int64_t leading = entry.hasEllipsis()
                          ? type.getRank() - (int64_t(entry.dims.size()) - 1)
                          : 0;
    for (int64_t i = 0; i < type.getRank(); ++i) {
      if (!type.isDynamicDim(i)) {
        shape.push_back(builder.getIndexAttr(type.getDimSize(i)));
        continue;
      }
      if (i < leading) {
        // Operands with `...` agree on it; the first one is as good as any.
        for (auto [operandEntry, operand] :
             llvm::zip_equal(line.operands, operands))
          if (operand && operandEntry.hasEllipsis()) {
            shape.push_back(tensor::getMixedSize(builder, loc, operand, i));
            break;
          }
        continue;
      }
      const DimExpr &dim = entry.dims[i - leading + entry.hasEllipsis()];
      if (dim.isConstant()) {
        shape.push_back(builder.getIndexAttr(dim.offset));
        continue;
      }
      Value value;
      int64_t index, offset;
      if (!findDim(line, operands, dim, value, index, offset))
        return failure();
      OpFoldResult size = tensor::getMixedSize(builder, loc, value, index);
      if (offset) {
        Value base = getValueOrCreateConstantIndexOp(builder, loc, size);
        Value delta = arith::ConstantIndexOp::create(builder, loc, offset);
        size = arith::AddIOp::create(builder, loc, base, delta).getResult();
      }
      shape.push_back(size);
    }
    shapes.push_back(std::move(shape));
  }
  return success();
}

int64_t corey::ssm::detail::getSymbolSize(DimSpecOpInterface op,
                                          StringRef symbol) {
  DimLine line(op.getDimSpec());
  Unifier unifier(nullptr);
  for (auto [entry, value] :
       llvm::zip_equal(line.operands, op.getSpecOperands()))
    if (value)
      (void)unifier.add(entry, "operand", cast<ShapedType>(value.getType()));
  DimExpr dim;
  dim.symbol = symbol;
  return unifier.sizeOf(dim);
}

//===----------------------------------------------------------------------===//
// Constraints left to run time
//===----------------------------------------------------------------------===//

void corey::ssm::collectDimConstraints(
    Operation *op, SmallVectorImpl<DimConstraint> &constraints) {
  auto bothStatic = [](Value a, int64_t i, Value b, int64_t j) {
    return !cast<ShapedType>(a.getType()).isDynamicDim(i) && b &&
           !cast<ShapedType>(b.getType()).isDynamicDim(j);
  };
  // `result` has a static size where that of `operand`, minus `offset`, is
  // open.
  auto pinDim = [&](Value result, int64_t i, Value operand, int64_t j,
                    int64_t offset, StringRef symbol) {
    if (!cast<ShapedType>(result.getType()).isDynamicDim(i) &&
        cast<ShapedType>(operand.getType()).isDynamicDim(j))
      constraints.push_back({result, i, operand, j, offset, symbol.str()});
  };
  if (auto shaped = dyn_cast<DimSpecOpInterface>(op)) {
    DimLine line(shaped.getDimSpec());
    struct Source {
      Value value;
      int64_t dim, offset;
    };
    llvm::StringMap<Source> first;
    Value prefixValue;
    for (auto [entry, value] :
         llvm::zip_equal(line.operands, shaped.getSpecOperands())) {
      if (!value)
        continue;
      auto type = cast<ShapedType>(value.getType());
      int64_t leading = entry.hasEllipsis()
                            ? type.getRank() - (int64_t(entry.dims.size()) - 1)
                            : 0;
      if (entry.hasEllipsis()) {
        if (!prefixValue)
          prefixValue = value;
        else
          for (int64_t i = 0; i < leading; ++i)
            if (!bothStatic(value, i, prefixValue, i))
              constraints.push_back({value, i, prefixValue, i, 0, ""});
      }
      for (int64_t i = leading; i < type.getRank(); ++i) {
        const DimExpr &dim = entry.dims[i - leading + entry.hasEllipsis()];
        if (dim.isConstant()) {
          if (type.isDynamicDim(i))
            constraints.push_back({value, i, Value(), 0, dim.offset, ""});
          continue;
        }
        auto [it, inserted] =
            first.try_emplace(dim.symbol, Source{value, i, dim.offset});
        if (!inserted &&
            !bothStatic(value, i, it->second.value, it->second.dim))
          constraints.push_back({value, i, it->second.value, it->second.dim,
                                 dim.offset - it->second.offset,
                                 dim.symbol.str()});
      }
    }
    // A result of a size that the operands leave open makes it a demand on
    // them.
    for (auto [entry, value] :
         llvm::zip_equal(line.results, shaped.getSpecResults())) {
      if (!value)
        continue;
      auto type = cast<ShapedType>(value.getType());
      int64_t leading = entry.hasEllipsis()
                            ? type.getRank() - (int64_t(entry.dims.size()) - 1)
                            : 0;
      for (int64_t i = 0; i < type.getRank(); ++i) {
        if (i < leading) {
          if (prefixValue)
            pinDim(value, i, prefixValue, i, 0, "");
          continue;
        }
        const DimExpr &dim = entry.dims[i - leading + entry.hasEllipsis()];
        auto it = first.find(dim.symbol);
        if (!dim.isConstant() && it != first.end())
          pinDim(value, i, it->second.value, it->second.dim,
                 dim.offset - it->second.offset, dim.symbol);
      }
    }
    return;
  }
  if (isa<CastOp, QuantizeOp, DequantizeOp>(op)) {
    Value from = op->getOperand(0), to = op->getResult(0);
    for (int64_t i = 0; i < cast<ShapedType>(to.getType()).getRank(); ++i)
      pinDim(to, i, from, i, 0, "");
  }
  if (auto quantize = dyn_cast<QuantizeOp>(op)) {
    Value x = quantize.getX(), scale = quantize.getScale();
    int64_t shift = quantize.getGranularity() == Granularity::Channel
                        ? cast<ShapedType>(x.getType()).getRank() - 1
                        : 0;
    for (int64_t i = 0; i < cast<ShapedType>(scale.getType()).getRank(); ++i)
      pinDim(scale, i, x, i + shift, 0, "");
  }
  // Trailing broadcast of binary elementwise ops.
  if (isa<AddOp, SubOp, MulOp>(op)) {
    Value lhs = op->getOperand(0), rhs = op->getOperand(1);
    int64_t shift = cast<ShapedType>(lhs.getType()).getRank() -
                    cast<ShapedType>(rhs.getType()).getRank();
    for (int64_t i = 0; i < cast<ShapedType>(rhs.getType()).getRank(); ++i)
      if (!bothStatic(rhs, i, lhs, i + shift))
        constraints.push_back({rhs, i, lhs, i + shift, 0, ""});
  }
  if (auto dequantize = dyn_cast<DequantizeOp>(op)) {
    Value q = dequantize.getQ(), scale = dequantize.getScale();
    int64_t shift = dequantize.getGranularity() == Granularity::Channel
                        ? cast<ShapedType>(q.getType()).getRank() - 1
                        : 0;
    for (int64_t i = 0; i < cast<ShapedType>(scale.getType()).getRank(); ++i)
      if (!bothStatic(scale, i, q, i + shift))
        constraints.push_back({scale, i, q, i + shift, 0, ""});
  }
}
