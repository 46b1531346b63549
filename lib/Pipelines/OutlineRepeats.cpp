//===- OutlineRepeats.cpp - One function for ops that repeat --------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Pipelines/Pipelines.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/IR/IRMapping.h"
#include "mlir/IR/Matchers.h"
#include "mlir/IR/OperationSupport.h"
#include "mlir/IR/SymbolTable.h"
#include "llvm/ADT/Hashing.h"
#include "llvm/ADT/SmallPtrSet.h"
#include <limits>
#include <vector>

namespace corey {
#define GEN_PASS_DEF_OUTLINEREPEATS
#include "corey/Pipelines/Passes.h.inc"
} // namespace corey

using namespace mlir;

/// Of what ops must have in common, without the values they use.
static llvm::hash_code hashOf(Operation *op) {
  llvm::hash_code hash = 0;
  op->walk<WalkOrder::PreOrder>([&](Operation *inner) {
    hash =
        llvm::hash_combine(hash, inner->getName(), inner->getAttrDictionary(),
                           llvm::hash_combine_range(inner->result_type_begin(),
                                                    inner->result_type_end()),
                           llvm::hash_combine_range(inner->operand_type_begin(),
                                                    inner->operand_type_end()));
  });
  return hash;
}

/// What goes along with the ops of `own` that use it, as a key to compare
/// copies by; null for other values, which are passed. Constants do, but for
/// addresses of symbols, in which layers differ; and memory of the stack that
/// nobody else uses.
static Attribute keyOfLocal(Value value,
                            const llvm::SmallPtrSetImpl<Operation *> &own) {
  Attribute attribute;
  if (matchPattern(value, m_Constant(&attribute)))
    return isa<SymbolRefAttr>(attribute) ? Attribute() : attribute;
  auto memory = value.getDefiningOp<memref::AllocaOp>();
  if (!memory || memory->getNumOperands())
    return {};
  bool isLocal = llvm::all_of(memory->getUsers(), [&](Operation *user) {
    return own.contains(memory->getBlock()->findAncestorOpInBlock(*user));
  });
  return isLocal ? TypeAttr::get(memory.getType()) : Attribute();
}

namespace {
/// Where equal ops begin, how many make a copy, and how many ops behind the
/// first copy are equal to those a copy before.
struct Repeat {
  size_t begin = 0, length = 0, equal = 0;
  size_t copies() const { return length ? equal / length + 1 : 0; }
};

/// One of the copies of a repeat.
struct Copy {
  explicit Copy(ArrayRef<Operation *> ops)
      : ops(ops), own(ops.begin(), ops.end()) {}
  ArrayRef<Operation *> ops;
  llvm::SmallPtrSet<Operation *, 32> own;
  /// What it uses from outside, use by use, but for what goes along.
  SmallVector<Value> external;
  DenseSet<Value> local;
};

struct OutlineRepeats : public corey::impl::OutlineRepeatsBase<OutlineRepeats> {
  using Base::Base;

  void runOnOperation() override {
    SymbolTable symbols(getOperation());
    SmallVector<func::FuncOp> functions(getOperation().getOps<func::FuncOp>());
    for (func::FuncOp function : functions)
      if (!function.isExternal())
        outline(function, symbols);
  }

private:
  static bool isConstant(Operation *op) {
    return op->hasTrait<OpTrait::ConstantLike>();
  }

  /// The repeat that leaves the fewest ops.
  static Repeat findRepeat(ArrayRef<llvm::hash_code> hashes) {
    Repeat best;
    size_t saved = 0;
    for (size_t length = 1; 2 * length <= hashes.size(); ++length) {
      size_t equal = 0;
      for (size_t i = 0; i + length <= hashes.size(); ++i) {
        if (i + length < hashes.size() && hashes[i] == hashes[i + length]) {
          ++equal;
          continue;
        }
        // The run of equal ops before i, and one copy behind it.
        size_t copies = equal / length + 1;
        // A multiple of a period saves less than the period.
        if (copies > 1 && (copies - 1) * length > saved) {
          saved = (copies - 1) * length;
          best = {i - equal, length, equal};
        }
        equal = 0;
      }
    }
    return best;
  }

  /// Where of a repeat copies are best cut: where they leave the fewest values
  /// to the next, which is where a layer ends. For that the repeat gives up
  /// what is before, and behind the last copy.
  static Repeat cut(const Repeat &repeat, ArrayRef<Operation *> ops) {
    DenseMap<Operation *, size_t> numbers;
    for (auto [i, op] : llvm::enumerate(ops))
      numbers[op] = i;
    // Values of two copies are counted where they are live: behind the op that
    // makes them, up to the last one that uses them.
    size_t end = repeat.begin + 2 * repeat.length;
    SmallVector<int64_t> change(2 * repeat.length + 1, 0);
    for (size_t i = repeat.begin; i < end; ++i)
      for (Value value : ops[i]->getResults()) {
        size_t last = i;
        for (Operation *user : value.getUsers())
          if (Operation *top =
                  ops[i]->getBlock()->findAncestorOpInBlock(*user)) {
            auto it = numbers.find(top);
            last = std::max(last, it == numbers.end() ? end : it->second);
          }
        ++change[i - repeat.begin];
        --change[std::min(last, end) - repeat.begin];
      }
    size_t best = 0;
    int64_t live = 0, fewest = std::numeric_limits<int64_t>::max();
    for (size_t i = 0; i + 1 < 2 * repeat.length; ++i) {
      // Between this op and the next.
      live += change[i];
      if (i + 1 >= repeat.length && live < fewest) {
        fewest = live;
        best = i + 1 - repeat.length;
      }
    }
    if (best > repeat.equal)
      return repeat;
    Repeat moved{repeat.begin + best, repeat.length, repeat.equal - best};
    return moved.copies() < 2 ? repeat : moved;
  }

  /// Walks two copies side by side. Returns whether they have the same form,
  /// and collects what they use from outside in the order of the uses.
  static bool compare(Copy &first, Copy &other) {
    first.external.clear();
    other.external.clear();
    DenseMap<Value, Value> known;
    DenseSet<Value> ownOfOther;
    auto mapAll = [&](ValueRange a, ValueRange b) {
      for (auto [x, y] : llvm::zip_equal(a, b)) {
        known[x] = y;
        ownOfOther.insert(y);
      }
    };
    // Of values from outside: the same constant, or one that is passed.
    auto isSame = [&](Value a, Value b) {
      if (Value mapped = known.lookup(a))
        return mapped == b;
      if (ownOfOther.contains(b))
        return false;
      Attribute x = keyOfLocal(a, first.own), y = keyOfLocal(b, other.own);
      if (x || y) {
        first.local.insert(a);
        return x == y && a.getType() == b.getType();
      }
      first.external.push_back(a);
      other.external.push_back(b);
      return a.getType() == b.getType();
    };
    std::function<bool(Operation *, Operation *)> isSameOp = [&](Operation *a,
                                                                 Operation *b) {
      if (a->getName() != b->getName() ||
          a->getAttrDictionary() != b->getAttrDictionary() ||
          a->getNumOperands() != b->getNumOperands() ||
          a->getResultTypes() != b->getResultTypes() ||
          a->getNumRegions() != b->getNumRegions() || a->getNumSuccessors() ||
          b->getNumSuccessors())
        return false;
      for (auto [x, y] : llvm::zip_equal(a->getOperands(), b->getOperands()))
        if (!isSame(x, y))
          return false;
      mapAll(a->getResults(), b->getResults());
      for (auto [x, y] : llvm::zip_equal(a->getRegions(), b->getRegions())) {
        if (!llvm::hasNItemsOrLess(x, 1) || !llvm::hasNItemsOrLess(y, 1) ||
            x.empty() != y.empty())
          return false;
        if (x.empty())
          continue;
        Block &s = x.front(), &t = y.front();
        if (s.getArgumentTypes() != t.getArgumentTypes() ||
            s.getOperations().size() != t.getOperations().size())
          return false;
        mapAll(s.getArguments(), t.getArguments());
        for (auto [p, q] : llvm::zip_equal(s, t))
          if (!isSameOp(&p, &q))
            return false;
      }
      return true;
    };
    for (auto [a, b] : llvm::zip_equal(first.ops, other.ops))
      if (!isSameOp(a, b))
        return false;
    return true;
  }

  void outline(func::FuncOp function, SymbolTable &symbols) {
    SmallVector<Operation *> ops;
    SmallVector<llvm::hash_code> hashes;
    for (Operation &op : function.getBody().front().without_terminator())
      if (!isConstant(&op)) {
        ops.push_back(&op);
        hashes.push_back(hashOf(&op));
      }
    Repeat repeat = findRepeat(hashes);
    if (repeat.copies() < 2)
      return;
    repeat = cut(repeat, ops);
    std::vector<Copy> copies;
    int64_t size = 0;
    for (size_t i = 0; i < repeat.copies(); ++i)
      copies.push_back(Copy(ArrayRef(ops).slice(
          repeat.begin + i * repeat.length, repeat.length)));
    for (Operation *op : copies[0].ops)
      op->walk([&](Operation *) { ++size; });
    if (size < minOps)
      return;
    // The first may differ from those behind it, which share what it computed:
    // the longest run of copies that are equal to their first.
    std::vector<Copy> taken;
    for (size_t i = 0; i < copies.size();) {
      std::vector<Copy> run{copies[i]};
      size_t j = i + 1;
      for (; j < copies.size(); ++j) {
        Copy other = copies[j], first = copies[i];
        if (!compare(first, other))
          break;
        run.front() = first;
        run.push_back(other);
      }
      if (run.size() > taken.size())
        taken = std::move(run);
      i = j;
    }
    if (taken.size() < 2)
      return;
    replace(taken, symbols);
  }

  void replace(MutableArrayRef<Copy> copies, SymbolTable &symbols) {
    // Uses that get the same value in every copy get one argument.
    SmallVector<size_t> arguments;
    SmallVector<size_t> argumentOfUse;
    llvm::DenseMap<Value, SmallVector<size_t>> byValue;
    const Copy &first = copies.front();
    for (size_t use = 0; use < first.external.size(); ++use) {
      SmallVector<size_t> &known = byValue[first.external[use]];
      auto it = llvm::find_if(known, [&](size_t argument) {
        return llvm::all_of(copies, [&](const Copy &copy) {
          return copy.external[arguments[argument]] == copy.external[use];
        });
      });
      if (it != known.end()) {
        argumentOfUse.push_back(*it);
        continue;
      }
      known.push_back(arguments.size());
      argumentOfUse.push_back(arguments.size());
      arguments.push_back(use);
    }
    // Results that any of the copies has users of, outside itself.
    SmallVector<std::pair<size_t, unsigned>> results;
    for (size_t i = 0; i < first.ops.size(); ++i)
      for (unsigned r = 0; r < first.ops[i]->getNumResults(); ++r)
        if (llvm::any_of(copies, [&](const Copy &copy) {
              Block *block = copy.ops[i]->getBlock();
              return llvm::any_of(copy.ops[i]->getResult(r).getUsers(),
                                  [&](Operation *user) {
                                    return !copy.own.contains(
                                        block->findAncestorOpInBlock(*user));
                                  });
            }))
          results.push_back({i, r});
    // Memory of the stack ends with the function.
    if (llvm::any_of(results, [&](std::pair<size_t, unsigned> result) {
          return isa<memref::AllocaOp>(first.ops[result.first]);
        }))
      return;

    MLIRContext *context = &getContext();
    OpBuilder builder(context);
    Location loc = first.ops.front()->getLoc();
    SmallVector<Type> inputTypes, resultTypes;
    for (size_t use : arguments)
      inputTypes.push_back(first.external[use].getType());
    for (auto [i, r] : results)
      resultTypes.push_back(first.ops[i]->getResult(r).getType());
    auto function = func::FuncOp::create(
        loc, "layer", FunctionType::get(context, inputTypes, resultTypes));
    function.setPrivate();
    symbols.insert(function);
    Block *body = function.addEntryBlock();
    builder.setInsertionPointToStart(body);

    // Values from outside are replaced use by use: one value may be two
    // arguments.
    size_t use = 0;
    llvm::DenseMap<Operation *, Value> clonesOfLocal;
    IRMapping mapping;
    SmallVector<Operation *> clones;
    for (Operation *op : first.ops)
      clones.push_back(builder.clone(*op, mapping));
    builder.setInsertionPointToStart(body);
    for (Operation *clone : clones)
      clone->walk<WalkOrder::PreOrder>([&](Operation *inner) {
        for (OpOperand &operand : inner->getOpOperands()) {
          Value value = operand.get();
          if (function->isAncestor(value.getParentRegion()->getParentOp()))
            continue;
          if (!first.local.contains(value)) {
            operand.set(
                body->getArgument(static_cast<unsigned>(argumentOfUse[use++])));
            continue;
          }
          Operation *maker = value.getDefiningOp();
          Value &made = clonesOfLocal[maker];
          if (!made)
            made = builder.clone(*maker)->getResult(0);
          operand.set(made);
        }
      });
    builder.setInsertionPointToEnd(body);
    SmallVector<Value> returned;
    for (auto [i, r] : results)
      returned.push_back(clones[i]->getResult(r));
    func::ReturnOp::create(builder, loc, returned);
    ++numFunctions;

    // From the last, whose results no other copy replaces, to the first.
    SmallVector<func::CallOp> calls;
    for (const Copy &copy : copies) {
      SmallVector<Value> operands;
      for (size_t argument : arguments)
        operands.push_back(copy.external[argument]);
      OpBuilder at(copy.ops.back()->getContext());
      at.setInsertionPointAfter(copy.ops.back());
      calls.push_back(func::CallOp::create(at, copy.ops.front()->getLoc(),
                                           function, operands));
      ++numCopies;
    }
    for (auto [copy, call] : llvm::zip_equal(copies, calls))
      for (auto [n, result] : llvm::enumerate(results))
        copy.ops[result.first]
            ->getResult(result.second)
            .replaceAllUsesWith(call.getResult(static_cast<unsigned>(n)));
    for (const Copy &copy : copies)
      for (Operation *op : llvm::reverse(copy.ops))
        op->erase();
  }
};
} // namespace
