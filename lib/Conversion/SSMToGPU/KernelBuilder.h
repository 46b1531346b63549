//===- KernelBuilder.h - Building GPU kernels -------------------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_LIB_CONVERSION_SSMTOGPU_KERNELBUILDER_H
#define COREY_LIB_CONVERSION_SSMTOGPU_KERNELBUILDER_H

#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/LLVMIR/NVVMDialect.h"
#include "mlir/IR/Builders.h"
#include <array>

namespace corey {
/// What turns e^x into 2^x, which the hardware has.
inline constexpr double kLog2E = 1.44269504088896340736;

class KernelBuilder;

/// A value of a kernel with arithmetic on it: i1, i32, i64, f32, f64, a vector
/// or a pointer. Operators build one op each, folded where they can; both sides
/// have the same type, plain numbers take that of the other side. Integers are
/// signed but for `>>`, floating-point sums and products may be contracted.
class Val {
public:
  Val() = default;
  Val(mlir::Value value, KernelBuilder *k) : value(value), k(k) {}

  explicit operator bool() const { return static_cast<bool>(value); }
  operator mlir::Value() const { return value; }
  mlir::Type type() const { return value.getType(); }
  bool isFloat() const { return llvm::isa<mlir::FloatType>(type()); }
  /// The value if it is an integer constant.
  std::optional<int64_t> constant() const;

  mlir::Value value;
  KernelBuilder *k = nullptr;
};

#define COREY_VAL_BINARY(op)                                                   \
  Val operator op(Val a, Val b);                                               \
  Val operator op(Val a, double b);                                            \
  Val operator op(double a, Val b);
COREY_VAL_BINARY(+)
COREY_VAL_BINARY(-)
COREY_VAL_BINARY(*)
COREY_VAL_BINARY(/)
COREY_VAL_BINARY(<)
COREY_VAL_BINARY(<=)
COREY_VAL_BINARY(>)
COREY_VAL_BINARY(>=)
COREY_VAL_BINARY(==)
COREY_VAL_BINARY(!=)
#undef COREY_VAL_BINARY
Val operator%(Val a, int64_t b);
Val operator&(Val a, int64_t b);
Val operator&(Val a, Val b);
Val operator|(Val a, Val b);
Val operator^(Val a, Val b);
Val operator^(Val a, int64_t b);
Val operator<<(Val a, int64_t b);
Val operator>>(Val a, int64_t b);
Val operator-(Val a);
/// Products and sums that round one by one, as those of the host do.
Val exactMul(Val a, Val b);
Val exactAdd(Val a, Val b);
Val exactSub(Val a, Val b);

using Vals = llvm::SmallVector<Val>;

/// The threads of a block and what it may use of a multiprocessor.
struct LaunchBounds {
  int64_t threads = 128;
  /// Blocks that must fit on a multiprocessor at a time, which bounds the
  /// registers of a thread; 0 leaves it to the back end.
  int64_t minBlocks = 0;
};

/// Blocks of a launch, as values of the host.
struct Grid {
  mlir::Value x, y, z;
};

/// Builds one kernel, and its launch where the host's builder stands. Arguments
/// are added as the body asks for them, each a value of the host.
///
/// Pointers of arguments are to global memory (address space 1), those of
/// shared() to shared memory (3). Offsets into global memory are 64-bit
/// wherever a tensor can have more than 2^31 bytes behind them.
class KernelBuilder {
public:
  KernelBuilder(mlir::OpBuilder &host, mlir::Location loc,
                mlir::gpu::GPUModuleOp module, llvm::StringRef name,
                LaunchBounds bounds);
  /// Builds where `body` stands, within a kernel that is there already; it has
  /// no arguments to add and no launch.
  KernelBuilder(mlir::OpBuilder &body, mlir::Location loc)
      : host(body), b(body), loc(loc), bounds() {}
  KernelBuilder(const KernelBuilder &) = delete;
  KernelBuilder &operator=(const KernelBuilder &) = delete;

  mlir::OpBuilder &host;
  /// The builder of the kernel's body.
  mlir::OpBuilder b;
  mlir::Location loc;
  const LaunchBounds bounds;

  //===--- Arguments
  //-------------------------------------------------------===//

  /// A pointer to global memory whose address the host has as i64. A host value
  /// is passed once, however often it is asked for, and so is the address of
  /// `memory`, where that is given.
  Val pointer(mlir::Value address, mlir::Value memory = {});
  /// An index or i64 of the host, as i64 or, where it is known to fit, i32.
  Val i64Argument(mlir::Value value);
  Val i32Argument(mlir::Value value);

  /// Has the kernel start only after its predecessors have ended. Where several
  /// blocks share a multiprocessor for as long as the kernel runs, they must be
  /// spread evenly, and are where all multiprocessors are free.
  void startInOrder();
  /// Places by itself what every kernel has at its start: from where its memory
  /// may be what predecessors have written, and from where its successor's
  /// blocks may come up. All threads must come to both, or end.
  void waitForPredecessors();
  void launchDependents();

  /// Ends the kernel and launches it. A kernel that is equal to one of the
  /// module takes its place. `clusterX`: blocks of a cluster, along x.
  void launch(Grid grid, int64_t clusterX = 1);

  //===--- Constants, types
  //------------------------------------------------===//

  Val i32(int64_t value);
  Val i64(int64_t value);
  Val f32(double value);
  Val f64(double value);
  Val boolean(bool value);
  /// A constant of the type of `like`.
  Val constantLike(Val like, double value);
  mlir::Type i1Type() { return b.getI1Type(); }
  mlir::Type i16Type() { return b.getI16Type(); }
  mlir::Type i32Type() { return b.getI32Type(); }
  mlir::Type i64Type() { return b.getI64Type(); }
  mlir::Type f32Type() { return b.getF32Type(); }
  mlir::Type f64Type() { return b.getF64Type(); }
  Val wrap(mlir::Value value) { return Val(value, this); }

  //===--- Threads
  //---------------------------------------------------------===//

  Val threadIdx();
  Val blockIdx(char axis);
  Val gridDim(char axis);
  /// Lane within the warp, and the warp's number in its block, uniform across
  /// its lanes.
  Val lane();
  Val warp();

  //===--- Integers and selection
  //------------------------------------------===//

  Val toI64(Val value);
  Val toI32(Val value);
  Val toF64(Val value);
  Val min(Val a, Val b);
  Val max(Val a, Val b);
  Val select(Val condition, Val a, Val b);

  //===--- f32
  //-------------------------------------------------------------===//

  Val fma(Val a, Val b, Val c);
  /// 2^x and log2(x) with ex2.approx and lg2.approx, flushing denormals: a
  /// relative error of about 2^-22.
  Val ex2(Val x);
  Val lg2(Val x);
  /// 1/x and 1/sqrt(x), approximate, within 2 ulp.
  Val rcp(Val x);
  Val rsqrt(Val x);
  /// e^x, within 2 ulp of f32 where the result is normal.
  Val exp(Val x);
  /// log(1 + e^x) with one ex2 and a polynomial of degree 8.
  Val softplus(Val x);
  /// x / (1 + e^-x) with one ex2 and one rcp.
  Val silu(Val x);
  Val abs(Val x);

  //===--- Elements
  //--------------------------------------------------------===//

  /// The type in which `count` elements of `element` are loaded at once: those
  /// of 8 and 16 bits stay packed, in integers of at most 32 bits. Widths are
  /// 2, 4, 8 or 16 bytes, or that of one element.
  mlir::Type packedType(mlir::Type element, int64_t count);
  /// Packs elements that were loaded one at a time, as they are.
  Val join(llvm::ArrayRef<Val> elements, mlir::Type element);
  /// The opposite: elements of a packed value as they are.
  Vals split(Val packed, mlir::Type element, int64_t count);
  /// The elements of a packed value, as f32.
  Vals unpack(Val packed, mlir::Type element, int64_t count);
  /// Rounds f32 to `element`, to nearest even, and packs them. In i8 what is
  /// out of range becomes the nearest of its numbers and NaN becomes 0; in
  /// f8E4M3FN both become NaN.
  Val pack(llvm::ArrayRef<Val> values, mlir::Type element);
  Val extract(Val vector, int64_t index);
  Val vector(llvm::ArrayRef<Val> elements);
  Val bitcast(Val value, mlir::Type type);

  //===--- Memory
  //----------------------------------------------------------===//

  /// `pointer` plus a number of bytes (i32, i64 or constant).
  Val offset(Val pointer, Val bytes);
  Val offset(Val pointer, int64_t bytes);
  /// Loads a value of `type` aligned to its size; through the read-only path
  /// where the pointer's argument is never written.
  Val load(Val pointer, mlir::Type type, bool isReadOnly = false);
  /// A load of global memory that stays where it is, as before a wait for
  /// predecessors or behind it: others move to what needs them. Up to 16 bytes.
  Val loadInPlace(Val pointer, mlir::Type type);
  void store(Val value, Val pointer);
  /// Adds an i32 or i64 to what is at `pointer`, at once for all threads of the
  /// device.
  void atomicAdd(Val value, Val pointer);
  /// A store that is not to displace what other kernels will read.
  void storeStreaming(Val value, Val pointer);
  /// Asks for the line at `pointer` in L2.
  void prefetchL2(Val pointer);
  /// `bytes` of shared memory of the block. What all calls ask for is laid out
  /// one after another.
  Val shared(int64_t bytes, int64_t alignment = 16);

  //===--- Warps and blocks
  //------------------------------------------------===//

  Val shuffleXor(Val value, int64_t mask);
  Val shuffleUp(Val value, int64_t delta);
  Val shuffleIndex(Val value, Val lane);
  /// Sum over the lanes of each group of `width` lanes, in all of them.
  Val warpSum(Val value, int64_t width = 32);
  /// What an associative and commutative `combine` makes of the `values` (of 32
  /// or 64 bits) of all threads of the block, in all of them. All must come,
  /// once: the call has shared memory of its own, and a barrier; in a loop
  /// another barrier must follow before it comes again. The number of warps is
  /// a power of two.
  Vals
  reduceBlock(Vals values,
              llvm::function_ref<Vals(llvm::ArrayRef<Val>, llvm::ArrayRef<Val>)>
                  combine);
  /// `items`, a power of two of them, are summed over groups of `lanes` lanes.
  /// The lane whose number within its group is q ends up with the sums of the
  /// items from (q mod items) * count, count = max(1, items / lanes), which
  /// are returned. Halves what it sends in every step.
  Vals reduceScatter(Vals items, int64_t lanes, Val q);
  void syncWarp();
  void syncBlock();
  /// A barrier of all threads of a cluster. A block may load what another one,
  /// by its number along x, has at an address of its own shared memory, between
  /// two of them.
  void syncCluster();
  Val loadOfBlock(Val pointer, Val block, mlir::Type type);
  /// A barrier of its own number for the first `threads` threads that come.
  void syncNamed(int64_t barrier, int64_t threads);

  //===--- Control flow
  //----------------------------------------------------===//

  void forLoop(Val lower, Val upper, int64_t step,
               llvm::function_ref<void(Val iv)> body);
  Vals forLoop(Val lower, Val upper, int64_t step, llvm::ArrayRef<Val> inits,
               llvm::function_ref<Vals(Val iv, llvm::ArrayRef<Val>)> body);
  void ifThen(Val condition, llvm::function_ref<void()> then);
  void ifElse(Val condition, llvm::function_ref<void()> then,
              llvm::function_ref<void()> otherwise);
  /// The same for sides that have values, of the same types.
  Vals ifValues(Val condition, llvm::function_ref<Vals()> then,
                llvm::function_ref<Vals()> otherwise);

  /// What `load` loads if `condition` holds, else anything. The branch also
  /// keeps the loads where they are: without it the assembler, which knows no
  /// latency of theirs, moves them down to what needs them.
  Vals loadIf(Val condition, llvm::function_ref<Vals()> load);

  Val intrinsic(llvm::StringRef name, mlir::Type type,
                llvm::ArrayRef<Val> arguments);
  /// Inline PTX without memory effects unless said otherwise.
  Val ptx(llvm::StringRef text, llvm::StringRef constraints, mlir::Type type,
          llvm::ArrayRef<Val> arguments, bool hasSideEffects = false);

private:
  Val argument(mlir::Value value, mlir::Type type);
  Val shuffle(Val value, mlir::NVVM::ShflKind kind, Val operand, int64_t clamp);

  mlir::gpu::GPUModuleOp module;
  std::string name;
  mlir::gpu::GPUFuncOp function;
  llvm::SmallVector<mlir::Value> operands;
  llvm::DenseMap<mlir::Value, Val> arguments;
  /// Bytes of shared memory so far, and the place holder for its address.
  int64_t sharedBytes = 0, sharedAlignment = 16;
  mlir::Operation *sharedBase = nullptr;
  Val laneId, warpId;
};

} // namespace corey

#endif // COREY_LIB_CONVERSION_SSMTOGPU_KERNELBUILDER_H
