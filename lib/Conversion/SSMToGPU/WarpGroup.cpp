//===- WarpGroup.cpp - Tensor cores of warps and their groups -------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "WarpGroup.h"
#include "llvm/Support/raw_ostream.h"

using namespace mlir;
using namespace corey;

/// Inline PTX that reads or writes memory that the compiler knows of.
static void ptxOnMemory(KernelBuilder &k, StringRef text, StringRef constraints,
                        ArrayRef<Val> arguments) {
  k.ptx(
      text,
      (constraints + (constraints.empty() ? "~{memory}" : ",~{memory}")).str(),
      Type(), arguments, /*hasSideEffects=*/true);
}

/// The results of inline PTX that has several of one type.
static Vals ptxWithResults(KernelBuilder &k, StringRef text,
                           StringRef constraints, int64_t count, Type type,
                           ArrayRef<Val> arguments) {
  auto all = LLVM::LLVMStructType::getLiteral(k.b.getContext(),
                                              SmallVector<Type>(count, type));
  Val made = k.ptx(text, (constraints + ",~{memory}").str(), all, arguments,
                   /*hasSideEffects=*/true);
  Vals results;
  for (int64_t i = 0; i < count; ++i)
    results.push_back(
        k.wrap(LLVM::ExtractValueOp::create(k.b, k.loc, made.value, i)));
  return results;
}

Val corey::sharedAddress(KernelBuilder &k, Val pointer) {
  return k.wrap(
      LLVM::PtrToIntOp::create(k.b, k.loc, k.i32Type(), pointer.value));
}

//===----------------------------------------------------------------------===//
// Tiles
//===----------------------------------------------------------------------===//

Val corey::tilePiece(KernelBuilder &k, Val tile, Val row, Val piece) {
  return tile + row * double(Tile::kRowBytes) + ((piece ^ (row & 7)) << 4);
}

void corey::copyAsync16(KernelBuilder &k, Val to, int64_t toOffset, Val from,
                        Val count) {
  std::string text = "cp.async.cg.shared.global [$0+" +
                     std::to_string(toOffset) + "], [$1], 16" +
                     (count ? ", $2;" : ";");
  if (count)
    ptxOnMemory(k, text, "r,l,r", {to, from, count});
  else
    ptxOnMemory(k, text, "r,l", {to, from});
}

void corey::commitCopies(KernelBuilder &k) {
  ptxOnMemory(k, "cp.async.commit_group;", "", {});
}

void corey::waitCopies(KernelBuilder &k, int64_t pending) {
  ptxOnMemory(k, "cp.async.wait_group " + std::to_string(pending) + ";", "",
              {});
}

Vals corey::loadMatrices(KernelBuilder &k, Val address, bool isTransposed,
                         int64_t offset) {
  std::string text = "ldmatrix.sync.aligned.m8n8.x4.";
  text += isTransposed ? "trans.shared.b16 " : "shared.b16 ";
  text += "{$0,$1,$2,$3}, [$4";
  if (offset)
    text += "+" + std::to_string(offset);
  return ptxWithResults(k, text + "];", "=r,=r,=r,=r,r", 4, k.i32Type(),
                        {address});
}

void corey::storeMatrices(KernelBuilder &k, Val address, ArrayRef<Val> words,
                          bool isTransposed) {
  StringRef text = isTransposed
                       ? "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 "
                         "[$0], {$1,$2,$3,$4};"
                       : "stmatrix.sync.aligned.m8n8.x4.shared.b16 "
                         "[$0], {$1,$2,$3,$4};";
  ptxOnMemory(k, text, "r,r,r,r,r",
              {address, words[0], words[1], words[2], words[3]});
}

Val corey::multiplyPairs(KernelBuilder &k, Val a, Val b, Type element,
                         bool isFused) {
  // Less 0: a product of -0 stays what it is.
  if (isFused && element.isBF16())
    return k.ptx("fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", k.i32Type(),
                 {a, b, k.i32(0x80008000)});
  return k.ptx(element.isBF16() ? "mul.rn.bf16x2 $0, $1, $2;"
                                : "mul.rn.f16x2 $0, $1, $2;",
               "=r,r,r", k.i32Type(), {a, b});
}

//===----------------------------------------------------------------------===//
// Products of a warp
//===----------------------------------------------------------------------===//

// Pieces of parts are even and odd ones: what is permuted of the even one's
// number is added by bits, above those that the odd one and the row change.
Val corey::tilePart(KernelBuilder &k, Val tile, bool isSecondBelow) {
  Val lane = k.lane();
  Val first = (lane >> 3) & 1, second = lane >> 4;
  Val row = ((isSecondBelow ? first : second) << 3) + (lane & 7);
  return tilePiece(k, tile, row, isSecondBelow ? second : first);
}

Vals corey::loadPart(KernelBuilder &k, Val part, int64_t column, int64_t offset,
                     int64_t tileRows, bool isTransposed) {
  int64_t piece = column % Tile::kColumns / 8;
  return loadMatrices(k, piece ? part ^ (piece << 4) : part, isTransposed,
                      column / Tile::kColumns * Tile::bytes(tileRows) + offset);
}

void corey::addProduct(KernelBuilder &k, ArrayRef<Val> a, ArrayRef<Val> b,
                       MutableArrayRef<Val> sums, Type element) {
  // The operation wants pairs of f16, but words of bf16.
  Type word = element.isBF16() ? k.i32Type() : VectorType::get({2}, element);
  NVVM::MMATypes type =
      element.isBF16() ? NVVM::MMATypes::bf16 : NVVM::MMATypes::f16;
  auto valuesOf = [&](ArrayRef<Val> words) {
    SmallVector<Value> values;
    for (Val value : words)
      values.push_back(k.bitcast(value, word).value);
    return values;
  };
  auto result = LLVM::LLVMStructType::getLiteral(
      k.b.getContext(), SmallVector<Type>(4, k.f32Type()));
  for (int64_t half = 0; half < 2; ++half) {
    SmallVector<Value> before;
    for (Val value : sums.slice(4 * half, 4))
      before.push_back(value.value);
    Value made = NVVM::MmaOp::create(
        k.b, k.loc, result, valuesOf(a), valuesOf(b.slice(2 * half, 2)), before,
        ArrayRef<int64_t>{16, 8, 16}, std::nullopt, std::nullopt,
        std::array<NVVM::MMATypes, 2>{type, type},
        std::array<NVVM::MMALayout, 2>{NVVM::MMALayout::row,
                                       NVVM::MMALayout::col});
    for (int64_t i = 0; i < 4; ++i)
      sums[4 * half + i] =
          k.wrap(LLVM::ExtractValueOp::create(k.b, k.loc, made, i));
  }
}

//===----------------------------------------------------------------------===//
// Barriers
//===----------------------------------------------------------------------===//

void corey::initBarrier(KernelBuilder &k, Val barrier, int64_t count) {
  ptxOnMemory(k, "mbarrier.init.shared::cta.b64 [$0], $1;", "r,r",
              {barrier, k.i32(count)});
}

void corey::fenceBarriers(KernelBuilder &k) {
  ptxOnMemory(k, "fence.mbarrier_init.release.cluster;", "", {});
}

void corey::arrive(KernelBuilder &k, Val barrier) {
  ptxOnMemory(k, "mbarrier.arrive.shared::cta.b64 _, [$0];", "r", {barrier});
}

void corey::arriveWithCopies(KernelBuilder &k, Val barrier) {
  ptxOnMemory(k, "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", "r",
              {barrier});
}

void corey::waitBarrier(KernelBuilder &k, Val barrier, Val parity) {
  ptxOnMemory(k,
              "{\n.reg .pred done;\nagain:\n"
              "mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;\n"
              "@!done bra again;\n}",
              "r,r", {barrier, parity});
}

void corey::fenceForProducts(KernelBuilder &k) {
  ptxOnMemory(k, "fence.proxy.async.shared::cta;", "", {});
}

// No argument of a kernel aliases another: only what names the data keeps its
// loads and stores on their side.
void corey::waitForFlag(KernelBuilder &k, Val flag, Val data) {
  ptxOnMemory(k,
              "{\n.reg .pred done;\n.reg .b32 seen;\nagain:\n"
              "ld.acquire.gpu.global.b32 seen, [$0];\n"
              "setp.ne.u32 done, seen, 0;\n@!done bra again;\n// $1\n}",
              "l,l", {flag, data});
}

void corey::raiseFlag(KernelBuilder &k, Val flag, Val data,
                      llvm::function_ref<void()> sync, Val isFirst) {
  ptxOnMemory(k, "fence.acq_rel.gpu; // $0", "l", {data});
  sync();
  k.ifThen(isFirst, [&] {
    ptxOnMemory(k, "st.release.gpu.global.b32 [$0], $1;", "l,r",
                {flag, k.i32(1)});
  });
}

void corey::setRegisters(KernelBuilder &k, int64_t count, bool isMore) {
  NVVM::SetMaxRegisterOp::create(k.b, k.loc, count,
                                 isMore ? NVVM::SetMaxRegisterAction::increase
                                        : NVVM::SetMaxRegisterAction::decrease);
}

//===----------------------------------------------------------------------===//
// Products of a warp group
//===----------------------------------------------------------------------===//

Val corey::tileDescriptor(KernelBuilder &k, Val address, bool isTransposed) {
  // In units of 16 bytes: the address, from one tile to that of the next 64
  // rows of the operand (where they are columns of the tile), from eight rows
  // of the tile to the next; 1 << 62 is the permutation of 128-byte rows.
  constexpr int64_t kTileRows = 64;
  int64_t leading = isTransposed ? Tile::bytes(kTileRows) >> 4 : 1;
  Val low = ((address & 0x3FFFF) >> 4) | k.i32(leading << 16);
  Val wide = k.wrap(arith::ExtUIOp::create(k.b, k.loc, k.i64Type(), low.value));
  return wide | k.i64((Tile::bytes(8) >> 4) << 32 | int64_t(1) << 62);
}

Vals corey::startProducts(KernelBuilder &k, int64_t columns,
                          ArrayRef<ProductStep> steps, ArrayRef<Val> sums,
                          Type element) {
  int64_t count = columns / 2;
  std::string text, constraints;
  llvm::raw_string_ostream out(text);
  Vals arguments;
  // Not before all inputs are read.
  for (int64_t i = 0; i < count; ++i)
    constraints += i ? ",=&f" : "=&f";
  for (auto [i, sum] : llvm::enumerate(sums)) {
    constraints += "," + std::to_string(i);
    arguments.push_back(sum);
  }
  llvm::DenseMap<Value, size_t> numbers;
  auto operand = [&](Val value, StringRef constraint) {
    auto [it, isNew] =
        numbers.try_emplace(value.value, count + arguments.size());
    if (isNew) {
      arguments.push_back(value);
      constraints += ("," + constraint).str();
    }
    return it->second;
  };
  out << "{\n.reg .b64 a, b;\n.reg .pred adds, starts;\n"
         "setp.eq.u32 adds, 0, 0;\nsetp.ne.u32 starts, 0, 0;\n"
         "wgmma.fence.sync.aligned;\n";
  std::string list;
  for (int64_t i = 0; i < count; ++i)
    list += (i ? ",$" : "$") + std::to_string(i);
  std::string type = element.isBF16() ? "bf16" : "f16";
  auto address = [&](const TileOperand &tile, StringRef name) {
    out << "add.s64 " << name << ", $" << operand(tile.descriptor, "l") << ", "
        << (tile.offset >> 4) << ";\n";
  };
  for (auto [i, step] : llvm::enumerate(steps)) {
    std::string a = "a";
    if (step.a.empty()) {
      address(step.aTile, "a");
    } else {
      a = "{";
      for (auto [j, word] : llvm::enumerate(step.a))
        a += (j ? ",$" : "$") + std::to_string(operand(word, "r"));
      a += "}";
    }
    address(step.b, "b");
    out << "wgmma.mma_async.sync.aligned.m64n" << columns << "k16.f32." << type
        << "." << type << " {" << list << "}, " << a << ", b, "
        << (i == 0 && sums.empty() ? "starts" : "adds") << ", 1, 1, ";
    if (step.a.empty())
      out << int(step.aTile.isTransposed) << ", ";
    out << int(step.b.isTransposed) << ";\n";
  }
  out << "wgmma.commit_group.sync.aligned;\n}";
  return ptxWithResults(k, text, constraints, count, k.f32Type(), arguments);
}

Vals corey::waitProducts(KernelBuilder &k, int64_t pending,
                         ArrayRef<Val> sums) {
  std::string text =
      "wgmma.wait_group.sync.aligned " + std::to_string(pending) + ";";
  // The accumulators go through, so that nothing reads them earlier.
  std::string constraints;
  for (size_t i = 0; i < sums.size(); ++i)
    constraints += i ? ",=f" : "=f";
  for (size_t i = 0; i < sums.size(); ++i)
    constraints += "," + std::to_string(i);
  return ptxWithResults(k, text, constraints, sums.size(), k.f32Type(), sums);
}
