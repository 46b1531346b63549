//===- GPULowering.h - Shared pieces of the GPU lowerings -------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_LIB_CONVERSION_SSMTOGPU_GPULOWERING_H
#define COREY_LIB_CONVERSION_SSMTOGPU_GPULOWERING_H

#include "../Common/OpBuffers.h"
#include "KernelBuilder.h"
#include "corey/Conversion/SSMToGPU/SSMToGPU.h"

namespace corey {

/// What the kernels are emitted for.
struct GPUTarget {
  int64_t multiprocessors = 132;
  ChipFeatures chip;
};

/// The memrefs that states are read from and written to; null where there are
/// none. With `slots` they are those of a pool, one memref if there are both.
struct StateBuffers {
  mlir::Value initial, last, slots;
  bool isInPlace() const { return initial && initial == last; }
};

/// Lowers one op on tensors to kernels and to host code that launches them.
class GPULowering : public OpBuffers {
public:
  GPULowering(mlir::PatternRewriter &rewriter, mlir::Operation *op,
              GPUTarget target);

  mlir::PatternRewriter &host;
  mlir::Location loc;
  GPUTarget target;
  /// Where the kernels go.
  mlir::gpu::GPUModuleOp kernels;

  //===--- Index arithmetic of the host
  //-------------------------------------===//
  mlir::Value index(int64_t value);
  mlir::Value add(mlir::Value lhs, mlir::Value rhs);
  mlir::Value mul(mlir::Value lhs, mlir::Value rhs);
  mlir::Value mul(mlir::Value lhs, int64_t rhs);
  /// lhs / rhs rounded up; neither is negative, rhs is not 0.
  mlir::Value ceilDiv(mlir::Value lhs, mlir::Value rhs);
  mlir::Value min(mlir::Value lhs, mlir::Value rhs);
  mlir::Value max(mlir::Value lhs, mlir::Value rhs);
  mlir::Value dim(mlir::Value memref, int64_t dim);
  mlir::Value cmp(mlir::arith::CmpIPredicate predicate, mlir::Value lhs,
                  mlir::Value rhs);
  void ifThen(mlir::Value condition, llvm::function_ref<void()> then,
              llvm::function_ref<void()> otherwise = nullptr);
  /// Rows of `memref`: the product of its axes but the last `inner`.
  mlir::Value rowCount(mlir::Value memref, int64_t inner = 1);
  /// Device memory of the call for `sizes` elements.
  mlir::Value workspace(llvm::ArrayRef<mlir::Value> sizes, mlir::Type element);

  /// Address, i64, of the call's record of errors that kernels find.
  mlir::Value errorRecord();

  /// The states of an op: `initial` and `slots` are operands, null where it has
  /// none, result 1 is `last`. A pool is copied to where it is to be left,
  /// unless it is there already.
  StateBuffers stateBuffers(mlir::Value initial, mlir::Value slots);

  /// A grid of `x` blocks for each of `rows`, of which there may be more than
  /// an axis takes: block (x, y, z) works on row y + z * gridDim.y.
  Grid gridOf(mlir::Value x, mlir::Value rows);

  /// The memref of a tensor in memory; the same for the same tensor.
  mlir::Value buffer(mlir::Value tensor);
  /// Makes the memrefs of all that kernels of the op read, to be called before
  /// branches that use them.
  void makeBuffers();

  /// The tensors in memory that `tensor` is computed from, each once: itself,
  /// if no op of the kernel's region computes it. What the kernel's own loops
  /// make counts as known.
  llvm::SmallVector<mlir::Value> leavesOf(mlir::Value tensor) const;
  /// What `tensor` is computed from may be read one element at a time; to be
  /// said before there are memrefs of it.
  void readByElement(mlir::Value tensor);
  /// Allocates the memref of result `index` for an OutputStream: with any
  /// strides where callers may give one that has them.
  mlir::Value allocateOutput(unsigned index);
  /// Whether, as i1 of the host, runs of `rows` indices on `axis`, not the
  /// last, from multiples of that on, are neighbours in memory and aligned.
  mlir::Value haveRowsTogether(mlir::Value memref, int64_t axis, int64_t rows);
  /// Elements that a stream of `tensor` may load at once, at multiples of as
  /// many: a power of two.
  int64_t streamAlignment(mlir::Value tensor) const;
  /// Elements of the first result, `memref`, that may be written at once.
  int64_t outputAlignment(mlir::Value memref) const;

private:
  llvm::DenseMap<mlir::Value, mlir::Value> buffers;
};

/// Something wrong with what an operand holds, as `corey_rt_device_error` of
/// the run-time library has it; values are i64, null where a kind has none.
struct DeviceError {
  enum Kind { Index = 1, SequenceStart = 2, StateSlot = 3 };
  Kind kind;
  Val value, limit, position = Val(), previous = Val();
};

/// Writes `error` to `record`, a pointer to errorRecord(), unless there is an
/// earlier one. If several threads of a kernel do, theirs differ in `value`
/// only.
void recordError(KernelBuilder &k, Val record, const DeviceError &error);

/// The row that a block of a grid made by gridOf() works on, as i32.
Val rowOfBlock(KernelBuilder &k);

/// An i32 that compares as a f32 `value` does: the two zeros are equal, NaN
/// lies above infinity.
Val orderOf(KernelBuilder &k, Val value);

/// The indices on axes of `sizes`, of the host, at position `number`, i32 or
/// i64, in the order of rows.
Vals indicesOf(KernelBuilder &k, Val number, llvm::ArrayRef<mlir::Value> sizes);
/// The same on the axes of `memref` but the last `inner`.
Vals rowIndices(GPULowering &lowering, KernelBuilder &k, mlir::Value memref,
                Val row, int64_t inner = 1);

/// Elements that may be loaded at once from the start of any row of `tensor`,
/// by which the run-time library aligns arguments: a power of two such that
/// they are at most 16 bytes.
int64_t rowAlignment(mlir::Value tensor);

/// A tensor in device memory as a kernel addresses it. What may have any
/// strides (see `ssm-any-strides`) is loaded one element at a time.
class DeviceTensor {
public:
  DeviceTensor() = default;
  /// Adds the arguments for `memref`; null stays null.
  /// Not `isReadOnly`, the kernel writes to the memref as well.
  DeviceTensor(GPULowering &lowering, KernelBuilder &k, mlir::Value memref,
               bool isReadOnly = true);

  explicit operator bool() const { return static_cast<bool>(base); }
  /// Whether neighbours on the last axis are neighbours in memory.
  bool isDense() const { return dense; }
  /// Pointer to the element at `leading` on the axes before the last and `last`
  /// on that: i32 or i64.
  Val at(llvm::ArrayRef<Val> leading, Val last) const;
  /// The element there, as f32, through the read-only path if that may be.
  Val loadScalar(llvm::ArrayRef<Val> leading, Val last) const;
  /// `count` elements from a pointer on, packed, loaded together or, if they
  /// are not dense, one by one.
  Val packed(Val pointer, int64_t count, bool readOnly, bool inPlace) const;
  /// `count` elements from there on, in the same way.
  /// They are loaded `alignment` at once, a power of two that the position is a
  /// multiple of.
  Vals elements(llvm::ArrayRef<Val> leading, Val last, int64_t count,
                int64_t alignment = 1) const;
  /// The same, by loads that stay where they are: of a kernel that waits for
  /// its predecessors in its midst, the assembler moves others to before that.
  Vals elementsInPlace(llvm::ArrayRef<Val> leading, Val last, int64_t count,
                       int64_t alignment = 1) const;
  /// Whether `count` elements along the axis before the last, from a pointer
  /// on, are neighbours and aligned.
  Val areTogether(Val pointer, int64_t count) const;
  /// Bytes from one index to the next on `axis`, i64.
  Val stride(int64_t axis) const;
  int64_t rank() const { return strides.size(); }
  int64_t bytes() const { return element.getIntOrFloatBitWidth() / 8; }

  mlir::Type element;
  bool isReadOnly = true;

private:
  Vals elements(llvm::ArrayRef<Val> leading, Val last, int64_t count,
                int64_t alignment, bool inPlace) const;

  KernelBuilder *k = nullptr;
  Val base;
  bool dense = true;
  /// In bytes.
  Vals strides;
};

/// Positions in the tensors that a stream reads.
struct Cursor {
  Vals pointers;
};

/// A tensor that a kernel reads element by element, each once: it lies in
/// memory, or pointwise ops compute it from others that do.
class InputStream {
public:
  InputStream() = default;
  InputStream(GPULowering &lowering, KernelBuilder &k, mlir::Value tensor);
  /// What the lowering's own op, a pointwise one, computes.
  static InputStream ofResult(GPULowering &lowering, KernelBuilder &k);

  explicit operator bool() const { return static_cast<bool>(tensor); }
  /// The position at `leading` and `last`; tensors of lower rank stand on the
  /// trailing axes.
  Cursor at(llvm::ArrayRef<Val> leading, Val last) const;
  /// `cursor` moved by `count` along the axis before the last, or another one
  /// counted from the end.
  Cursor moved(const Cursor &cursor, Val count, int64_t fromEnd = 2) const;
  /// Loads `count` elements: what values() takes, one for each tensor. Not
  /// `isReadOnly`, loads stay before the barriers that follow them, where the
  /// assembler moves others to their first use.
  Vals load(const Cursor &cursor, int64_t count, bool isReadOnly = true) const;
  /// The same, by loads that stay where they are.
  Vals loadInPlace(const Cursor &cursor, int64_t count) const;
  /// Loads an element each of `count` rows from `first` on, a power of two and
  /// at most 16 bytes: what as many load() return, one after another. Rows from
  /// `limit` on are the last before it. They are loaded together where they are
  /// neighbours in memory and aligned, which `areTogether` knows of all that
  /// are not dense (see haveRowsTogether()), none of them beyond the limit.
  Vals loadRows(const Cursor &cursor, Val first, Val limit, int64_t count,
                bool areTogether) const;
  /// Loads `count` elements of each of `rows` rows, neighbours in memory where
  /// the elements are not (see haveRowsTogether()): what as many load() return.
  Vals loadTile(const Cursor &cursor, int64_t rows, int64_t count) const;
  size_t numLoaded() const { return leaves.size(); }
  /// The elements, in f32, from what was loaded and, of a stream that depends
  /// on what the kernel's loops have made, from elements of that.
  Vals values(llvm::ArrayRef<Val> loaded, int64_t count, mlir::Value made = {},
              llvm::ArrayRef<Val> elements = {}) const;
  /// For each tensor with dense rows: the pointer to a position and the bytes
  /// from one row to the next.
  llvm::SmallVector<std::pair<Val, Val>> rowsAt(llvm::ArrayRef<Val> leading,
                                                Val last) const;

private:
  Val evaluate(mlir::Value value,
               llvm::DenseMap<mlir::Value, mlir::Value> &known) const;

  struct Leaf {
    mlir::Value tensor;
    DeviceTensor memory;
  };
  GPULowering *lowering = nullptr;
  KernelBuilder *k = nullptr;
  mlir::Value tensor;
  llvm::SmallVector<Leaf> leaves;
};

/// The first result of a kernel, which it writes element by element, each once,
/// after the pointwise ops of the epilogue.
class OutputStream {
public:
  OutputStream() = default;
  OutputStream(GPULowering &lowering, KernelBuilder &k, mlir::Value memref);

  Cursor at(llvm::ArrayRef<Val> leading, Val last) const;
  Cursor moved(const Cursor &cursor, Val count, int64_t fromEnd = 2) const;
  /// Writes f32 values, consecutive on the last axis.
  void store(const Cursor &cursor, llvm::ArrayRef<Val> values) const;
  /// Writes one to each row from `first` on, together where they are neighbours
  /// in memory and aligned, which `areTogether` knows.
  void storeRows(const Cursor &cursor, Val first, llvm::ArrayRef<Val> values,
                 bool areTogether) const;
  /// Writes values of each of some rows, neighbours in memory where the values
  /// are not (see haveRowsTogether()).
  void storeTile(const Cursor &cursor, llvm::ArrayRef<Vals> rows) const;

private:
  /// What the epilogue makes of `values` at a position, and the pointer to it.
  std::pair<Vals, Val> finish(const Cursor &cursor,
                              llvm::ArrayRef<Val> values) const;

  GPULowering *lowering = nullptr;
  KernelBuilder *k = nullptr;
  DeviceTensor memory;
  /// What the epilogue reads.
  InputStream operands;
};

/// The sequences a kernel runs over: rows of a batch, or packed along L.
class DeviceSequences {
public:
  /// `input` is [B, L, ...]; `starts` may be null. Emits a check that they
  /// ascend from 0 and stay within L: no kernel relies on it.
  DeviceSequences(GPULowering &lowering, mlir::Value input, mlir::Value starts);
  /// Their number, of the host.
  mlir::Value count;
  /// Tokens of the longest that there can be, of the host.
  mlir::Value length;
  struct Range {
    /// i32: where the sequence lies.
    Val batch, begin, length;
  };
  Range range(KernelBuilder &k, Val sequence) const;

private:
  void emitCheck();

  GPULowering &lowering;
  mlir::Value starts;
};

/// Where the states of sequences lie: each sequence has a row of its own, or
/// names a slot of a pool.
class DeviceSlots {
public:
  DeviceSlots(GPULowering &lowering, KernelBuilder &k,
              const StateBuffers &states);

  struct Place {
    /// i32: the row of the tensors of states.
    Val row;
    /// Whether the sequence has it; null if it does in any case. If not, it
    /// starts from zero and its last state goes nowhere.
    Val there;

    Val writes(KernelBuilder &k) const {
      return there ? there : k.boolean(true);
    }
  };
  Place of(KernelBuilder &k, Val sequence) const;
  /// What `load` makes of the states at `place`; zeros if it is not there.
  static Vals ifThere(KernelBuilder &k, const Place &place,
                      llvm::function_ref<Vals()> load);
  /// Has the kernel report a slot that the pool does not have.
  void check(KernelBuilder &k, const Place &place) const;

private:
  DeviceTensor slots;
  Val limit, record;
};

/// The chunk of a scan as an index of at least 1: its operand, its constant, or
/// the whole length. Fails, with an error, on an unbound site.
mlir::FailureOr<mlir::Value> getDeviceChunk(GPULowering &lowering,
                                            ssm::ScanOpInterface op,
                                            mlir::Value length);

/// One token of every sequence of a scan that is not packed, into the memrefs
/// `y` and `states.last`.
void emitSelectiveScanStep(GPULowering &lowering, ssm::SelectiveScanOp op,
                           const DeviceSequences &sequences, mlir::Value y,
                           const StateBuffers &states);
void emitSSDStep(GPULowering &lowering, ssm::SSDOp op,
                 const DeviceSequences &sequences, mlir::Value y,
                 const StateBuffers &states);

/// What a token of a head does to its states: they are multiplied by 2 to the
/// `exponent`, its inputs by `step`.
struct SSDDecay {
  Val step, exponent;
};
/// From a token's dt or logarithm of the decay, `raw`; `rate` is A log2(e) of
/// the head, `shift` its bias, null where there are none.
SSDDecay ssdDecay(KernelBuilder &k, ssm::SSDOp op, Val raw, Val rate,
                  Val shift);

/// Whether a scan that isForTensorCores() has a kernel there on the chip.
bool fitsTensorCores(const GPUTarget &target, ssm::SSDOp op);
/// Such a scan, with its chunk, null for unsplit, into the memref `y` and the
/// buffers of its states.
void emitSSDOnTensorCores(GPULowering &lowering, ssm::SSDOp op,
                          const DeviceSequences &sequences, mlir::Value chunk,
                          mlir::Value y, const StateBuffers &states);

/// The norm, with what its plan has around it, into a buffer that is returned;
/// and that of its further result, null if there is none.
std::pair<mlir::Value, mlir::Value> emitRMSNorm(GPULowering &lowering,
                                                ssm::RMSNormOp op);
/// The last of the pointwise ops of the lowering's plan, or the only one, into
/// a buffer that is returned.
mlir::Value emitPointwise(GPULowering &lowering);

/// Whether a projection of few rows has a kernel on tensor cores.
bool isForGemv(ssm::ProjectionOp op);
/// That for up to `rowsAtOnce` (at most 16) of the `rows` of the call, from the
/// memref `x`, or, where that is null, from what the plan has before the op,
/// into the memref `y`.
void emitGemv(GPULowering &lowering, ssm::ProjectionOp op, mlir::Value x,
              mlir::Value y, mlir::Value rows, int64_t rowsAtOnce);

template <typename OpTy>
struct GPULoweringPattern : public mlir::OpRewritePattern<OpTy> {
  GPULoweringPattern(mlir::MLIRContext *context, GPUTarget target)
      : mlir::OpRewritePattern<OpTy>(context), target(target) {}
  GPUTarget target;
};

void populateGPUScanLowerings(mlir::RewritePatternSet &patterns,
                              GPUTarget target);
void populateGPULookupLowerings(mlir::RewritePatternSet &patterns,
                                GPUTarget target);
void populateGPUSampleLowerings(mlir::RewritePatternSet &patterns,
                                GPUTarget target);
void populateGPUProjectionLowerings(mlir::RewritePatternSet &patterns,
                                    GPUTarget target);
void populateGPUQuantizationLowerings(mlir::RewritePatternSet &patterns,
                                      GPUTarget target);
void populateGPUConvLowerings(mlir::RewritePatternSet &patterns,
                              GPUTarget target);
void populateGPUHadamardLowerings(mlir::RewritePatternSet &patterns,
                                  GPUTarget target);
void populateGPUNormLowerings(mlir::RewritePatternSet &patterns,
                              GPUTarget target);
void populateGPUObserveLowerings(mlir::RewritePatternSet &patterns,
                                 GPUTarget target);
void populateGPUPointwiseLowerings(mlir::RewritePatternSet &patterns,
                                   GPUTarget target);
void populateGPUSSDLowerings(mlir::RewritePatternSet &patterns,
                             GPUTarget target);

} // namespace corey

#endif // COREY_LIB_CONVERSION_SSMTOGPU_GPULOWERING_H
