//===- KernelBuilder.cpp - Building GPU kernels ---------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "KernelBuilder.h"
#include "corey/Conversion/SSMToGPU/SSMToGPU.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/IR/Matchers.h"
#include "mlir/IR/OperationSupport.h"

using namespace mlir;
using namespace corey;

static constexpr unsigned kGlobal = 1, kShared = 3;
/// Shared memory that a kernel has without asking for more at launch.
static constexpr int64_t kStaticSharedBytes = 48 << 10;
/// The name of a kernel until it is launched.
static constexpr StringLiteral kUnfinished = "corey_unfinished";
/// Stands for the address of shared memory until its size is known.
static constexpr StringLiteral kSharedPlaceholder = "corey_shared_memory";

//===----------------------------------------------------------------------===//
// Val
//===----------------------------------------------------------------------===//

std::optional<int64_t> Val::constant() const {
  APInt number;
  if (value && matchPattern(value, m_ConstantInt(&number)))
    return number.getSExtValue();
  return std::nullopt;
}

static arith::FastMathFlagsAttr contract(OpBuilder &b) {
  return arith::FastMathFlagsAttr::get(b.getContext(),
                                       arith::FastMathFlags::contract);
}

template <typename IntOp, typename FloatOp> static Val binary(Val a, Val b) {
  KernelBuilder &k = *a.k;
  if (isa<FloatType>(getElementTypeOrSelf(a.type())))
    return k.wrap(
        k.b.createOrFold<FloatOp>(k.loc, a.value, b.value, contract(k.b)));
  return k.wrap(k.b.createOrFold<IntOp>(k.loc, a.value, b.value));
}
static Val compare(Val a, Val b, arith::CmpIPredicate integer,
                   arith::CmpFPredicate real) {
  KernelBuilder &k = *a.k;
  if (a.isFloat())
    return k.wrap(
        k.b.createOrFold<arith::CmpFOp>(k.loc, real, a.value, b.value));
  return k.wrap(
      k.b.createOrFold<arith::CmpIOp>(k.loc, integer, a.value, b.value));
}

namespace corey {
Val operator+(Val a, Val b) {
  return binary<arith::AddIOp, arith::AddFOp>(a, b);
}
Val operator-(Val a, Val b) {
  return binary<arith::SubIOp, arith::SubFOp>(a, b);
}
Val operator*(Val a, Val b) {
  return binary<arith::MulIOp, arith::MulFOp>(a, b);
}
Val operator/(Val a, Val b) {
  return binary<arith::DivSIOp, arith::DivFOp>(a, b);
}
#define COREY_COMPARE(op, i, f)                                                \
  Val operator op(Val a, Val b) {                                              \
    return compare(a, b, arith::CmpIPredicate::i, arith::CmpFPredicate::f);    \
  }
COREY_COMPARE(<, slt, OLT)
COREY_COMPARE(<=, sle, OLE)
COREY_COMPARE(>, sgt, OGT)
COREY_COMPARE(>=, sge, OGE)
COREY_COMPARE(==, eq, OEQ)
COREY_COMPARE(!=, ne, UNE)
#undef COREY_COMPARE
#define COREY_WITH_CONSTANT(op)                                                \
  Val operator op(Val a, double b) { return a op a.k->constantLike(a, b); }    \
  Val operator op(double a, Val b) { return b.k->constantLike(b, a) op b; }
COREY_WITH_CONSTANT(+)
COREY_WITH_CONSTANT(-)
COREY_WITH_CONSTANT(*)
COREY_WITH_CONSTANT(<)
COREY_WITH_CONSTANT(<=)
COREY_WITH_CONSTANT(>)
COREY_WITH_CONSTANT(>=)
COREY_WITH_CONSTANT(==)
COREY_WITH_CONSTANT(!=)
#undef COREY_WITH_CONSTANT
/// Offsets and sizes are not negative: powers of two divide by shifting.
Val operator/(Val a, double b) {
  if (!a.isFloat() && llvm::isPowerOf2_64(static_cast<int64_t>(b)))
    return a >> llvm::Log2_64(static_cast<int64_t>(b));
  return a / a.k->constantLike(a, b);
}
Val operator/(double a, Val b) { return b.k->constantLike(b, a) / b; }
Val operator%(Val a, int64_t b) {
  if (llvm::isPowerOf2_64(b))
    return a & (b - 1);
  return a.k->wrap(a.k->b.createOrFold<arith::RemSIOp>(
      a.k->loc, a.value, a.k->constantLike(a, b).value));
}
Val operator&(Val a, Val b) {
  return a.k->wrap(
      a.k->b.createOrFold<arith::AndIOp>(a.k->loc, a.value, b.value));
}
Val operator|(Val a, Val b) {
  return a.k->wrap(
      a.k->b.createOrFold<arith::OrIOp>(a.k->loc, a.value, b.value));
}
Val operator^(Val a, Val b) {
  return a.k->wrap(
      a.k->b.createOrFold<arith::XOrIOp>(a.k->loc, a.value, b.value));
}
Val operator&(Val a, int64_t b) { return a & a.k->constantLike(a, b); }
Val operator^(Val a, int64_t b) { return a ^ a.k->constantLike(a, b); }
Val operator<<(Val a, int64_t b) {
  return a.k->wrap(a.k->b.createOrFold<arith::ShLIOp>(
      a.k->loc, a.value, a.k->constantLike(a, b).value));
}
Val operator>>(Val a, int64_t b) {
  return a.k->wrap(a.k->b.createOrFold<arith::ShRUIOp>(
      a.k->loc, a.value, a.k->constantLike(a, b).value));
}
Val operator-(Val a) {
  if (a.isFloat())
    return a.k->wrap(a.k->b.createOrFold<arith::NegFOp>(a.k->loc, a.value));
  return 0.0 - a;
}
Val exactMul(Val a, Val b) {
  return a.k->wrap(arith::MulFOp::create(a.k->b, a.k->loc, a.value, b.value));
}
Val exactAdd(Val a, Val b) {
  return a.k->wrap(arith::AddFOp::create(a.k->b, a.k->loc, a.value, b.value));
}
Val exactSub(Val a, Val b) {
  return a.k->wrap(arith::SubFOp::create(a.k->b, a.k->loc, a.value, b.value));
}
} // namespace corey

//===----------------------------------------------------------------------===//
// Kernels and arguments
//===----------------------------------------------------------------------===//

KernelBuilder::KernelBuilder(OpBuilder &host, Location loc,
                             gpu::GPUModuleOp module, StringRef name,
                             LaunchBounds bounds)
    : host(host), b(host.getContext()), loc(loc), bounds(bounds),
      module(module), name(name) {
  b.setInsertionPointToEnd(module.getBody());
  function =
      gpu::GPUFuncOp::create(b, loc, kUnfinished, b.getFunctionType({}, {}));
  function->setAttr(gpu::GPUDialect::getKernelFuncAttrName(), b.getUnitAttr());
  function.setKnownBlockSize(
      ArrayRef<int32_t>{static_cast<int32_t>(bounds.threads), 1, 1});
  if (bounds.minBlocks)
    function->setAttr(NVVM::NVVMDialect::getMinctasmAttrName(),
                      b.getI32IntegerAttr(bounds.minBlocks));
  b.setInsertionPointToStart(&function.getBody().front());
}

Val KernelBuilder::argument(Value value, Type type) {
  Val &known = arguments[value];
  if (known && known.type() == type)
    return known;
  unsigned index = function.getNumArguments();
  // No kernel writes what it reads through another argument. Known to the back
  // end, loads need not wait for stores, and go through the read-only path.
  DictionaryAttr attributes;
  if (isa<LLVM::LLVMPointerType>(type))
    attributes = b.getDictionaryAttr(b.getNamedAttr(
        LLVM::LLVMDialect::getNoAliasAttrName(), b.getUnitAttr()));
  (void)function.insertArgument(index, type, attributes, loc);
  operands.push_back(value);
  return known = wrap(function.getArgument(index));
}

Val KernelBuilder::pointer(Value address, Value memory) {
  auto type = LLVM::LLVMPointerType::get(b.getContext(), kGlobal);
  Value key = memory ? memory : address;
  if (Val known = arguments.lookup(key))
    return known;
  // The host has an integer: the launch passes its bits.
  Value passed = LLVM::IntToPtrOp::create(host, loc, type, address);
  Val made = argument(passed, type);
  return arguments[key] = made;
}

Val KernelBuilder::i64Argument(Value value) {
  // By what was asked for: casts are made anew.
  Val known = arguments.lookup(value);
  if (known && known.type() == i64Type())
    return known;
  Value passed = value;
  if (value.getType().isIndex())
    passed = host.createOrFold<arith::IndexCastOp>(loc, i64Type(), value);
  APInt number;
  if (matchPattern(passed, m_ConstantInt(&number)))
    return i64(number.getSExtValue());
  Val made = argument(passed, i64Type());
  return arguments[value] = made;
}

Val KernelBuilder::i32Argument(Value value) {
  APInt number;
  if (matchPattern(value, m_ConstantInt(&number)))
    return i32(number.getSExtValue());
  Val known = arguments.lookup(value);
  if (known && known.type() == i32Type())
    return known;
  Value passed = value;
  if (value.getType().isIndex())
    passed = host.createOrFold<arith::IndexCastOp>(loc, i32Type(), value);
  else if (!value.getType().isInteger(32))
    passed = host.createOrFold<arith::TruncIOp>(loc, i32Type(), value);
  Val made = argument(passed, i32Type());
  return arguments[value] = made;
}

/// Whether two kernels are the same but for their names.
static bool isSameKernel(gpu::GPUFuncOp a, gpu::GPUFuncOp b) {
  auto attributesOf = [](gpu::GPUFuncOp f) {
    NamedAttrList list(f->getDiscardableAttrDictionary());
    list.erase(SymbolTable::getSymbolAttrName());
    return list.getDictionary(f.getContext());
  };
  return a.getFunctionType() == b.getFunctionType() &&
         a.getKnownBlockSizeAttr() == b.getKnownBlockSizeAttr() &&
         a.getAllArgAttrs() == b.getAllArgAttrs() &&
         attributesOf(a) == attributesOf(b) &&
         OperationEquivalence::isRegionEquivalentTo(
             &a.getBody(), &b.getBody(), OperationEquivalence::IgnoreLocations);
}

void KernelBuilder::startInOrder() {
  function->setAttr(kInOrderAttr, b.getUnitAttr());
}

void KernelBuilder::waitForPredecessors() {
  NVVM::GriddepcontrolOp::create(b, loc, NVVM::GridDepActionKind::wait);
}
void KernelBuilder::launchDependents() {
  NVVM::GriddepcontrolOp::create(b, loc,
                                 NVVM::GridDepActionKind::launch_dependents);
}

void KernelBuilder::launch(Grid grid, int64_t clusterX) {
  b.setInsertionPointToEnd(&function.getBody().back());
  gpu::ReturnOp::create(b, loc);
  int64_t dynamicBytes = 0;
  if (sharedBase) {
    // One symbol a size: kernels that need as much share it.
    bool isStatic = sharedBytes <= kStaticSharedBytes;
    int64_t size = isStatic ? sharedBytes : 0;
    dynamicBytes = isStatic ? 0 : sharedBytes;
    std::string name = isStatic ? "shared_" + std::to_string(size) : "shared";
    if (sharedAlignment > 16)
      name += "_aligned_" + std::to_string(sharedAlignment);
    if (!module.lookupSymbol(name)) {
      OpBuilder::InsertionGuard guard(b);
      b.setInsertionPointToStart(module.getBody());
      LLVM::GlobalOp::create(
          b, loc, LLVM::LLVMArrayType::get(b.getI8Type(), size),
          /*isConstant=*/false,
          isStatic ? LLVM::Linkage::Internal : LLVM::Linkage::External, name,
          Attribute(), sharedAlignment, kShared);
    }
    b.setInsertionPoint(sharedBase);
    Value base = LLVM::AddressOfOp::create(
        b, loc, LLVM::LLVMPointerType::get(b.getContext(), kShared), name);
    sharedBase->getResult(0).replaceAllUsesWith(base);
    sharedBase->erase();
    sharedBase = nullptr;
  }
  // Layers of a model have the same kernels.
  gpu::GPUFuncOp kernel = function;
  for (int64_t i = 0;; ++i) {
    std::string candidate = i ? name + "_" + std::to_string(i) : name;
    auto other = module.lookupSymbol<gpu::GPUFuncOp>(candidate);
    if (!other) {
      function.setName(candidate);
      break;
    }
    if (isSameKernel(other, function)) {
      function.erase();
      kernel = other;
      break;
    }
  }
  auto index = [&](int64_t value) -> Value {
    return arith::ConstantIndexOp::create(host, loc, value);
  };
  gpu::KernelDim3 blocks{grid.x ? grid.x : index(1), grid.y ? grid.y : index(1),
                         grid.z ? grid.z : index(1)};
  gpu::KernelDim3 threads{index(bounds.threads), index(1), index(1)};
  Value dynamic;
  if (dynamicBytes)
    dynamic = arith::ConstantOp::create(host, loc,
                                        host.getI32IntegerAttr(dynamicBytes));
  std::optional<gpu::KernelDim3> cluster;
  if (clusterX > 1)
    cluster = gpu::KernelDim3{index(clusterX), index(1), index(1)};
  gpu::LaunchFuncOp::create(host, loc, kernel, blocks, threads, dynamic,
                            operands, Type(), ValueRange(), cluster);
}

//===----------------------------------------------------------------------===//
// Constants, threads, integers
//===----------------------------------------------------------------------===//

Val KernelBuilder::i32(int64_t value) {
  return wrap(arith::ConstantOp::create(b, loc, b.getI32IntegerAttr(value)));
}
Val KernelBuilder::i64(int64_t value) {
  return wrap(arith::ConstantOp::create(b, loc, b.getI64IntegerAttr(value)));
}
Val KernelBuilder::f32(double value) {
  return wrap(arith::ConstantOp::create(b, loc, b.getF32FloatAttr(value)));
}
Val KernelBuilder::f64(double value) {
  return wrap(arith::ConstantOp::create(b, loc, b.getF64FloatAttr(value)));
}
Val KernelBuilder::boolean(bool value) {
  return wrap(arith::ConstantOp::create(b, loc, b.getBoolAttr(value)));
}
Val KernelBuilder::constantLike(Val like, double value) {
  if (like.isFloat())
    return wrap(
        arith::ConstantOp::create(b, loc, b.getFloatAttr(like.type(), value)));
  return wrap(arith::ConstantOp::create(
      b, loc, b.getIntegerAttr(like.type(), static_cast<int64_t>(value))));
}

Val KernelBuilder::threadIdx() {
  return wrap(NVVM::ThreadIdXOp::create(b, loc, i32Type()));
}
Val KernelBuilder::blockIdx(char axis) {
  if (axis == 'x')
    return wrap(NVVM::BlockIdXOp::create(b, loc, i32Type()));
  if (axis == 'y')
    return wrap(NVVM::BlockIdYOp::create(b, loc, i32Type()));
  return wrap(NVVM::BlockIdZOp::create(b, loc, i32Type()));
}
Val KernelBuilder::gridDim(char axis) {
  if (axis == 'x')
    return wrap(NVVM::GridDimXOp::create(b, loc, i32Type()));
  if (axis == 'y')
    return wrap(NVVM::GridDimYOp::create(b, loc, i32Type()));
  return wrap(NVVM::GridDimZOp::create(b, loc, i32Type()));
}
Val KernelBuilder::lane() {
  if (!laneId) {
    OpBuilder::InsertionGuard guard(b);
    b.setInsertionPointToStart(&function.getBody().front());
    laneId = threadIdx() & 31;
  }
  return laneId;
}
Val KernelBuilder::warp() {
  if (!warpId) {
    OpBuilder::InsertionGuard guard(b);
    b.setInsertionPointToStart(&function.getBody().front());
    // Read from lane 0, so that the back end knows it to be uniform.
    warpId = shuffleIndex(threadIdx() >> 5, i32(0));
  }
  return warpId;
}

Val KernelBuilder::toI64(Val value) {
  if (value.type().isInteger(64))
    return value;
  return wrap(b.createOrFold<arith::ExtSIOp>(loc, i64Type(), value.value));
}
Val KernelBuilder::toI32(Val value) {
  if (value.type().isInteger(32))
    return value;
  return wrap(b.createOrFold<arith::TruncIOp>(loc, i32Type(), value.value));
}
Val KernelBuilder::toF64(Val value) {
  if (value.type().isF64())
    return value;
  return wrap(b.createOrFold<arith::ExtFOp>(loc, f64Type(), value.value));
}
/// An intrinsic for f32 and f64, by its name without the type.
static std::string nameFor(StringRef name, Val value) {
  return (name + (value.type().isF64() ? ".f64" : ".f32")).str();
}
Val KernelBuilder::min(Val a, Val c) {
  if (a.isFloat())
    return intrinsic(nameFor("llvm.minnum", a), a.type(), {a, c});
  return wrap(b.createOrFold<arith::MinSIOp>(loc, a.value, c.value));
}
Val KernelBuilder::max(Val a, Val c) {
  if (a.isFloat())
    return intrinsic(nameFor("llvm.maxnum", a), a.type(), {a, c});
  return wrap(b.createOrFold<arith::MaxSIOp>(loc, a.value, c.value));
}
Val KernelBuilder::select(Val condition, Val a, Val c) {
  return wrap(
      b.createOrFold<arith::SelectOp>(loc, condition.value, a.value, c.value));
}

//===----------------------------------------------------------------------===//
// f32
//===----------------------------------------------------------------------===//

Val KernelBuilder::intrinsic(StringRef name, Type type, ArrayRef<Val> args) {
  SmallVector<Value> values;
  for (Val v : args)
    values.push_back(v.value);
  return wrap(
      LLVM::CallIntrinsicOp::create(b, loc, type, b.getStringAttr(name), values)
          ->getResult(0));
}

Val KernelBuilder::ptx(StringRef text, StringRef constraints, Type type,
                       ArrayRef<Val> args, bool hasSideEffects) {
  SmallVector<Value> values;
  for (Val v : args)
    values.push_back(v.value);
  auto made = LLVM::InlineAsmOp::create(
      b, loc, type ? TypeRange(type) : TypeRange(), values, text, constraints,
      hasSideEffects, /*is_align_stack=*/false,
      LLVM::tailcallkind::TailCallKind::None,
      /*asm_dialect=*/LLVM::AsmDialectAttr(), /*operand_attrs=*/ArrayAttr());
  return type ? wrap(made->getResult(0)) : Val();
}

Val KernelBuilder::fma(Val a, Val x, Val c) {
  return wrap(LLVM::FMAOp::create(b, loc, a.value, x.value, c.value));
}
Val KernelBuilder::ex2(Val x) {
  return intrinsic("llvm.nvvm.ex2.approx.ftz.f32", f32Type(), {x});
}
Val KernelBuilder::lg2(Val x) {
  return intrinsic("llvm.nvvm.lg2.approx.ftz.f", f32Type(), {x});
}
Val KernelBuilder::rcp(Val x) {
  return intrinsic("llvm.nvvm.rcp.approx.ftz.f", f32Type(), {x});
}
Val KernelBuilder::rsqrt(Val x) {
  return intrinsic("llvm.nvvm.rsqrt.approx.ftz.f", f32Type(), {x});
}
Val KernelBuilder::abs(Val x) {
  return intrinsic(nameFor("llvm.fabs", x), x.type(), {x});
}

Val KernelBuilder::exp(Val x) {
  // The product with log2(e) in two parts: the rounding error of the first,
  // which counts as many times as x is large, corrects the result.
  Val high = x * kLog2E;
  Val low = fma(x, f32(kLog2E), -high);
  low = fma(x, f32(1.925963033500e-08), low);
  Val power = ex2(high);
  // Beyond, the power is infinity or zero, which times the rest may be NaN.
  Val corrected = fma(power * low, f32(0.693147180559945), power);
  return select(abs(high) < 128.0, corrected, power);
}

Val KernelBuilder::softplus(Val x) {
  // max(x, 0) + log1p(e^-|x|). The polynomial is log1p(e)/e on [0, 1] with a
  // relative error below 3.1e-8, and below 1.3e-7 as rounded.
  Val e = ex2(abs(x) * -kLog2E);
  static constexpr double coefficients[] = {
      0.005232694633941493, -0.029505243345777962, 0.07822596523396078,
      -0.13663247546088866, 0.19106007966020896,   -0.24842982662398574,
      0.33319096893509714,  -0.4999949314773048,   0.9999999698813269};
  Val p = f32(coefficients[0]);
  for (double c : llvm::drop_begin(coefficients))
    p = fma(p, e, f32(c));
  return fma(p, e, max(x, f32(0)));
}

Val KernelBuilder::silu(Val x) { return x * rcp(ex2(x * -kLog2E) + 1.0); }

//===----------------------------------------------------------------------===//
// Elements
//===----------------------------------------------------------------------===//

static bool is16Bit(Type type) { return type.isF16() || type.isBF16(); }
static bool is8Bit(Type type) {
  return type.isInteger(8) || isa<Float8E4M3FNType>(type);
}

Type KernelBuilder::packedType(Type element, int64_t count) {
  if (!is16Bit(element) && !is8Bit(element))
    return count == 1 ? element : VectorType::get({count}, element);
  int64_t bits = count * element.getIntOrFloatBitWidth();
  if (bits <= 32)
    return b.getIntegerType(bits);
  return VectorType::get({bits / 32}, i32Type());
}

Val KernelBuilder::extract(Val vector, int64_t index) {
  return wrap(
      LLVM::ExtractElementOp::create(b, loc, vector.value, i32(index).value));
}

Val KernelBuilder::vector(ArrayRef<Val> elements) {
  if (elements.size() == 1)
    return elements[0];
  auto type = VectorType::get({static_cast<int64_t>(elements.size())},
                              elements[0].type());
  Value made = LLVM::PoisonOp::create(b, loc, type);
  for (auto [i, element] : llvm::enumerate(elements))
    made = LLVM::InsertElementOp::create(b, loc, made, element.value,
                                         i32(i).value);
  return wrap(made);
}

Val KernelBuilder::bitcast(Val value, Type type) {
  if (value.type() == type)
    return value;
  return wrap(LLVM::BitcastOp::create(b, loc, type, value.value));
}

/// The bytes of `word` from the lowest, as f32.
static Val unpackByte(KernelBuilder &k, Val word, Type element, int64_t byte) {
  if (element.isInteger(8)) {
    // Put into the mantissa of 2^23, biased so that it is not negative: cheaper
    // than a conversion from integers.
    Val biased = k.intrinsic(
        "llvm.nvvm.prmt", k.i32Type(),
        {word ^ int64_t(0x80808080u), k.i32(0x4B000000), k.i32(0x7540 + byte)});
    return k.bitcast(biased, k.f32Type()) - (0x1p23 + 128);
  }
  // f8E4M3FN: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinities,
  // all ones is NaN. Under f32's exponent the 7 low bits are the value times
  // 2^-120, denormals included.
  Val top = byte == 3 ? word : word << (24 - 8 * byte);
  Val magnitude = (top >> 4) & 0x07F00000;
  Val small = magnitude | (top & int64_t(0x80000000u));
  Val value = k.bitcast(small, k.f32Type()) * 0x1p120;
  return k.select(magnitude == double(0x07F00000),
                  k.bitcast(k.i32(0x7FC00000), k.f32Type()), value);
}

/// f32 to an 8-bit code in the low byte; what lies above it is not specified.
static Val packByte(KernelBuilder &k, Val value, Type element) {
  // NaN becomes 0.
  if (element.isInteger(8)) {
    Val rounded = k.intrinsic("llvm.nvvm.f2i.rn", k.i32Type(), {value});
    return k.max(k.min(rounded, k.i32(127)), k.i32(-128));
  }
  Val bits = k.bitcast(value, k.i32Type());
  Val sign = (bits >> 24) & 0x80;
  Val magnitude = bits & 0x7FFFFFFF;
  Val absolute = k.bitcast(magnitude, k.f32Type());
  // Normal results: the 20 dropped bits are rounded to even, the exponent's
  // bias of 127 becomes 7.
  Val odd = (magnitude >> 20) & 1;
  Val normal = ((magnitude + odd + double(0x7FFFF)) >> 20) - double(120 << 3);
  // Denormal results, below 2^-6: adding 2^14 leaves multiples of 2^-9 in the
  // low bits, rounded to even by the addition itself.
  Val denormal = k.bitcast(absolute + 0x1p14, k.i32Type()) - double(0x46800000);
  Val result = k.select(absolute < 0x1p-6, denormal, normal);
  // 464 is halfway between 448 and the value whose code is NaN; ties to even go
  // to 448. NaN compares false.
  return k.select(absolute <= 464.0, result, k.i32(0x7F)) | sign;
}

Vals KernelBuilder::unpack(Val packed, Type element, int64_t count) {
  Vals values;
  if (is8Bit(element)) {
    for (int64_t i = 0; i < count; ++i) {
      Val word = packed;
      if (count < 4 && i == 0)
        packed = word =
            wrap(arith::ExtUIOp::create(b, loc, i32Type(), packed.value));
      else if (count > 4)
        word = extract(packed, i / 4);
      values.push_back(unpackByte(*this, word, element, i % 4));
    }
    return values;
  }
  if (count == 1) {
    if (element.isF32())
      return {packed};
    if (element.isBF16()) {
      Val wide = wrap(arith::ExtUIOp::create(b, loc, i32Type(), packed.value));
      return {bitcast(wide << 16, f32Type())};
    }
    return {wrap(LLVM::FPExtOp::create(b, loc, f32Type(),
                                       bitcast(packed, element).value))};
  }
  if (element.isF32()) {
    for (int64_t i = 0; i < count; ++i)
      values.push_back(extract(packed, i));
    return values;
  }
  for (int64_t i = 0; i < count / 2; ++i) {
    Val word = count == 2 ? packed : extract(packed, i);
    if (element.isBF16()) {
      // The upper half of an f32, each of the two.
      values.push_back(bitcast(word << 16, f32Type()));
      values.push_back(bitcast(word & int64_t(0xffff0000u), f32Type()));
    } else {
      Val pair = bitcast(word, VectorType::get({2}, element));
      for (int64_t j = 0; j < 2; ++j)
        values.push_back(wrap(
            LLVM::FPExtOp::create(b, loc, f32Type(), extract(pair, j).value)));
    }
  }
  return values;
}

Val KernelBuilder::pack(ArrayRef<Val> values, Type element) {
  if (element.isF32())
    return vector(values);
  if (is8Bit(element)) {
    Vals words;
    for (size_t i = 0; i < values.size(); i += 4) {
      size_t end = std::min(i + 4, values.size());
      Val word;
      for (size_t j = i; j < end; ++j) {
        Val code = packByte(*this, values[j], element);
        if (j + 1 < i + 4)
          code = code & 0xFF;
        if (j > i)
          code = code << (8 * (j - i));
        word = word ? word | code : code;
      }
      words.push_back(word);
    }
    if (values.size() < 4)
      return wrap(arith::TruncIOp::create(
          b, loc, packedType(element, values.size()), words[0].value));
    return vector(words);
  }
  if (values.size() == 1)
    return bitcast(
        wrap(LLVM::FPTruncOp::create(b, loc, element, values[0].value)),
        i16Type());
  Vals words;
  StringRef convert =
      element.isBF16() ? "llvm.nvvm.ff2bf16x2.rn" : "llvm.nvvm.ff2f16x2.rn";
  // The first operand becomes the upper half.
  for (size_t i = 0; i < values.size(); i += 2)
    words.push_back(bitcast(intrinsic(convert, VectorType::get({2}, element),
                                      {values[i + 1], values[i]}),
                            i32Type()));
  return vector(words);
}

Val KernelBuilder::join(ArrayRef<Val> elements, Type element) {
  auto count = static_cast<int64_t>(elements.size());
  int64_t bits = element.getIntOrFloatBitWidth(), perWord = 32 / bits;
  if (count == 1 || perWord < 2)
    return vector(elements);
  Vals words;
  for (int64_t i = 0; i < count; ++i) {
    Val word =
        wrap(arith::ExtUIOp::create(b, loc, i32Type(), elements[i].value));
    if (i % perWord == 0)
      words.push_back(word);
    else
      words.back() = words.back() | (word << (i % perWord * bits));
  }
  if (count < perWord)
    return wrap(arith::TruncIOp::create(b, loc, packedType(element, count),
                                        words[0].value));
  return vector(words);
}

Vals KernelBuilder::split(Val packed, Type element, int64_t count) {
  int64_t bits = element.getIntOrFloatBitWidth(), perWord = 32 / bits;
  if (count == 1)
    return {packed};
  Vals elements;
  for (int64_t i = 0; i < count; ++i) {
    if (perWord < 2) {
      elements.push_back(extract(packed, i));
      continue;
    }
    Val word = count > perWord ? extract(packed, i / perWord) : packed;
    int64_t shift = i % perWord * bits;
    elements.push_back(wrap(arith::TruncIOp::create(
        b, loc, packedType(element, 1), (shift ? word >> shift : word).value)));
  }
  return elements;
}

//===----------------------------------------------------------------------===//
// Memory
//===----------------------------------------------------------------------===//

Val KernelBuilder::offset(Val pointer, Val bytes) {
  if (auto number = bytes.constant())
    return offset(pointer, *number);
  return wrap(LLVM::GEPOp::create(b, loc, pointer.type(), b.getI8Type(),
                                  pointer.value,
                                  ArrayRef<LLVM::GEPArg>{bytes.value}));
}

Val KernelBuilder::offset(Val pointer, int64_t bytes) {
  if (bytes == 0)
    return pointer;
  return wrap(
      LLVM::GEPOp::create(b, loc, pointer.type(), b.getI8Type(), pointer.value,
                          ArrayRef<LLVM::GEPArg>{static_cast<int32_t>(bytes)}));
}

static int64_t byteSize(Type type) {
  if (auto vector = dyn_cast<VectorType>(type))
    return vector.getNumElements() * byteSize(vector.getElementType());
  if (isa<LLVM::LLVMPointerType>(type))
    return 8;
  return std::max<int64_t>(type.getIntOrFloatBitWidth() / 8, 1);
}

Val KernelBuilder::load(Val pointer, Type type, bool isReadOnly) {
  return wrap(LLVM::LoadOp::create(b, loc, type, pointer.value, byteSize(type),
                                   /*isVolatile=*/false,
                                   /*isNonTemporal=*/false, isReadOnly));
}

Val KernelBuilder::loadInPlace(Val pointer, Type type) {
  int64_t bytes = byteSize(type), words = bytes / 4;
  if (bytes < 4) {
    Val bits =
        ptx(bytes == 1 ? "ld.global.b8 $0, [$1];" : "ld.global.b16 $0, [$1];",
            "=h,l", i16Type(), {pointer}, /*hasSideEffects=*/true);
    if (bytes == 1)
      return wrap(arith::TruncIOp::create(b, loc, type, bits.value));
    return bitcast(bits, type);
  }
  if (words == 1)
    return bitcast(ptx("ld.global.b32 $0, [$1];", "=r,l", i32Type(), {pointer},
                       /*hasSideEffects=*/true),
                   type);
  auto all = LLVM::LLVMStructType::getLiteral(
      b.getContext(), SmallVector<Type>(words, i32Type()));
  Val made = ptx(words == 2 ? "ld.global.v2.b32 {$0,$1}, [$2];"
                            : "ld.global.v4.b32 {$0,$1,$2,$3}, [$4];",
                 words == 2 ? "=r,=r,l" : "=r,=r,=r,=r,l", all, {pointer},
                 /*hasSideEffects=*/true);
  Vals elements;
  for (int64_t i = 0; i < words; ++i)
    elements.push_back(
        wrap(LLVM::ExtractValueOp::create(b, loc, made.value, i)));
  return bitcast(vector(elements), type);
}

void KernelBuilder::store(Val value, Val pointer) {
  LLVM::StoreOp::create(b, loc, value.value, pointer.value,
                        byteSize(value.type()));
}

void KernelBuilder::storeStreaming(Val value, Val pointer) {
  LLVM::StoreOp::create(b, loc, value.value, pointer.value,
                        byteSize(value.type()), /*isVolatile=*/false,
                        /*isNonTemporal=*/true);
}

void KernelBuilder::atomicAdd(Val value, Val pointer) {
  LLVM::AtomicRMWOp::create(b, loc, LLVM::AtomicBinOp::add, pointer.value,
                            value.value, LLVM::AtomicOrdering::monotonic,
                            "device");
}

void KernelBuilder::prefetchL2(Val pointer) {
  ptx("prefetch.global.L2 [$0];", "l", Type(), {pointer},
      /*hasSideEffects=*/true);
}

Val KernelBuilder::shared(int64_t bytes, int64_t alignment) {
  if (!sharedBase) {
    OpBuilder::InsertionGuard guard(b);
    b.setInsertionPointToStart(&function.getBody().front());
    OperationState state(loc, UnrealizedConversionCastOp::getOperationName());
    state.addTypes(LLVM::LLVMPointerType::get(b.getContext(), kShared));
    state.addAttribute(kSharedPlaceholder, b.getUnitAttr());
    sharedBase = b.create(state);
  }
  sharedAlignment = std::max(sharedAlignment, alignment);
  int64_t start = llvm::alignTo(sharedBytes, alignment);
  sharedBytes = start + bytes;
  return offset(wrap(sharedBase->getResult(0)), start);
}

//===----------------------------------------------------------------------===//
// Warps and blocks
//===----------------------------------------------------------------------===//

Val KernelBuilder::shuffle(Val value, NVVM::ShflKind kind, Val operand,
                           int64_t clamp) {
  if (byteSize(value.type()) == 8) {
    Val pair = bitcast(value, VectorType::get({2}, i32Type()));
    Vals moved;
    for (int64_t i = 0; i < 2; ++i)
      moved.push_back(shuffle(extract(pair, i), kind, operand, clamp));
    return bitcast(vector(moved), value.type());
  }
  return wrap(NVVM::ShflOp::create(b, loc, value.type(), i32(-1).value,
                                   value.value, operand.value, i32(clamp).value,
                                   kind, UnitAttr()));
}
Val KernelBuilder::shuffleXor(Val value, int64_t mask) {
  return shuffle(value, NVVM::ShflKind::bfly, i32(mask), 31);
}
Val KernelBuilder::shuffleUp(Val value, int64_t delta) {
  return shuffle(value, NVVM::ShflKind::up, i32(delta), 0);
}
Val KernelBuilder::shuffleIndex(Val value, Val lane) {
  return shuffle(value, NVVM::ShflKind::idx, lane, 31);
}

Val KernelBuilder::warpSum(Val value, int64_t width) {
  for (int64_t mask = width / 2; mask >= 1; mask /= 2)
    value = value + shuffleXor(value, mask);
  return value;
}

Vals KernelBuilder::reduceBlock(
    Vals values,
    llvm::function_ref<Vals(ArrayRef<Val>, ArrayRef<Val>)> combine) {
  auto reduceLanes = [&](int64_t lanes) {
    for (int64_t mask = lanes / 2; mask >= 1; mask /= 2) {
      Vals other;
      for (Val v : values)
        other.push_back(shuffleXor(v, mask));
      values = combine(values, other);
    }
  };
  reduceLanes(32);
  int64_t warps = bounds.threads / 32;
  if (warps == 1)
    return values;
  // Slots of one size: those of 64 bits if there are such values.
  int64_t slotBytes = 4;
  for (Val v : values)
    slotBytes = std::max(slotBytes, byteSize(v.type()));
  int64_t row = slotBytes * warps;
  Val memory = shared(row * values.size());
  Val own = warp() * double(slotBytes), lanes = lane();
  ifThen(lanes == 0, [&] {
    for (auto [i, v] : llvm::enumerate(values))
      store(v, offset(offset(memory, own), i * row));
  });
  syncBlock();
  // Every warp reduces what all have left, in groups of as many lanes.
  Val slot = offset(memory, (lanes % warps) * double(slotBytes));
  for (auto [i, v] : llvm::enumerate(values))
    v = load(offset(slot, i * row), v.type());
  reduceLanes(warps);
  return values;
}

Vals KernelBuilder::reduceScatter(Vals items, int64_t lanes, Val q) {
  int64_t count = items.size();
  for (int64_t mask = std::min(lanes, count) / 2; mask >= 1; mask /= 2) {
    Val upper = (q & mask) != 0;
    int64_t half = items.size() / 2;
    Vals kept;
    for (int64_t i = 0; i < half; ++i) {
      Val sent = select(upper, items[i], items[i + half]);
      Val mine = select(upper, items[i + half], items[i]);
      kept.push_back(mine + shuffleXor(sent, mask));
    }
    items = kept;
  }
  // Lanes beyond the items have nobody to keep what they would: plain sums of
  // the one that is left.
  for (int64_t mask = count; mask < lanes; mask *= 2)
    items[0] = items[0] + shuffleXor(items[0], mask);
  return items;
}

void KernelBuilder::syncWarp() {
  NVVM::SyncWarpOp::create(b, loc, i32(-1).value);
}
void KernelBuilder::syncBlock() { NVVM::BarrierOp::create(b, loc); }
void KernelBuilder::syncCluster() {
  NVVM::ClusterArriveOp::create(b, loc, UnitAttr());
  NVVM::ClusterWaitOp::create(b, loc, UnitAttr());
}
Val KernelBuilder::loadOfBlock(Val pointer, Val block, Type type) {
  auto place = LLVM::LLVMPointerType::get(
      b.getContext(),
      static_cast<unsigned>(NVVM::NVVMMemorySpace::SharedCluster));
  Val there =
      wrap(NVVM::MapaOp::create(b, loc, place, pointer.value, block.value));
  return load(there, type);
}
void KernelBuilder::syncNamed(int64_t barrier, int64_t threads) {
  NVVM::BarrierOp::create(b, loc, Type(), i32(barrier).value,
                          i32(threads).value, NVVM::BarrierReductionAttr(),
                          Value());
}

//===----------------------------------------------------------------------===//
// Control flow
//===----------------------------------------------------------------------===//

void KernelBuilder::forLoop(Val lower, Val upper, int64_t step,
                            llvm::function_ref<void(Val iv)> body) {
  forLoop(lower, upper, step, {}, [&](Val iv, ArrayRef<Val>) -> Vals {
    body(iv);
    return {};
  });
}

static SmallVector<Value> valuesOf(ArrayRef<Val> vals) {
  SmallVector<Value> values;
  for (Val v : vals)
    values.push_back(v.value);
  return values;
}

Vals KernelBuilder::forLoop(
    Val lower, Val upper, int64_t step, ArrayRef<Val> inits,
    llvm::function_ref<Vals(Val iv, ArrayRef<Val>)> body) {
  auto loop =
      scf::ForOp::create(b, loc, lower.value, upper.value,
                         constantLike(lower, step).value, valuesOf(inits));
  OpBuilder::InsertionGuard guard(b);
  // Without values to carry the loop has its terminator already.
  if (inits.empty())
    b.setInsertionPoint(loop.getBody()->getTerminator());
  else
    b.setInsertionPointToStart(loop.getBody());
  Vals carried;
  for (BlockArgument arg : loop.getRegionIterArgs())
    carried.push_back(wrap(arg));
  Vals next = body(wrap(loop.getInductionVar()), carried);
  if (!inits.empty())
    scf::YieldOp::create(b, loc, valuesOf(next));
  Vals results;
  for (Value result : loop.getResults())
    results.push_back(wrap(result));
  return results;
}

void KernelBuilder::ifThen(Val condition, llvm::function_ref<void()> then) {
  auto branch = scf::IfOp::create(b, loc, condition.value, false);
  OpBuilder::InsertionGuard guard(b);
  b.setInsertionPoint(branch.thenBlock()->getTerminator());
  then();
}

void KernelBuilder::ifElse(Val condition, llvm::function_ref<void()> then,
                           llvm::function_ref<void()> otherwise) {
  auto branch = scf::IfOp::create(b, loc, condition.value, true);
  OpBuilder::InsertionGuard guard(b);
  b.setInsertionPoint(branch.thenBlock()->getTerminator());
  then();
  b.setInsertionPoint(branch.elseBlock()->getTerminator());
  otherwise();
}

Vals KernelBuilder::ifValues(Val condition, llvm::function_ref<Vals()> then,
                             llvm::function_ref<Vals()> otherwise) {
  // The types are known once one side is built.
  OpBuilder::InsertionGuard guard(b);
  Region thenRegion, elseRegion;
  auto build = [&](Region &region, llvm::function_ref<Vals()> side) {
    b.createBlock(&region);
    SmallVector<Value> values = valuesOf(side());
    scf::YieldOp::create(b, loc, values);
    SmallVector<Type> types;
    for (Value v : values)
      types.push_back(v.getType());
    return types;
  };
  OpBuilder::InsertPoint point = b.saveInsertionPoint();
  SmallVector<Type> types = build(thenRegion, then);
  build(elseRegion, otherwise);
  b.restoreInsertionPoint(point);
  auto branch = scf::IfOp::create(b, loc, types, condition.value, true);
  branch.getThenRegion().takeBody(thenRegion);
  branch.getElseRegion().takeBody(elseRegion);
  Vals results;
  for (Value result : branch.getResults())
    results.push_back(wrap(result));
  return results;
}

Vals KernelBuilder::loadIf(Val condition, llvm::function_ref<Vals()> load) {
  SmallVector<Type> types;
  return ifValues(
      condition,
      [&] {
        Vals loaded = load();
        for (Val v : loaded)
          types.push_back(v.type());
        return loaded;
      },
      [&] {
        Vals nothing;
        for (Type type : types)
          nothing.push_back(wrap(LLVM::PoisonOp::create(b, loc, type)));
        return nothing;
      });
}
