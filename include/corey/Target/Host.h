//===- Host.h - LLVM IR, objects and libraries for the host -----*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_TARGET_HOST_H
#define COREY_TARGET_HOST_H

#include "corey/Target/Device.h"
#include "mlir/IR/BuiltinOps.h"
#include "mlir/IR/BuiltinTypes.h"
#include "llvm/Support/Error.h"
#include <memory>
#include <string>
#include <vector>

namespace llvm {
class LLVMContext;
class MemoryBuffer;
class Module;
class TargetMachine;
} // namespace llvm

namespace corey {

/// The symbol of the function that runs `@name` with an array of pointers to
/// memref descriptors, one per argument.
std::string getInvokeSymbol(llvm::StringRef name);

/// A target machine for `cpu` with `features`; both empty mean the host's own.
llvm::Expected<std::unique_ptr<llvm::TargetMachine>>
createHostTargetMachine(llvm::StringRef cpu = "",
                        llvm::StringRef features = "");

/// Translates a module in the LLVM dialect and adds an invoke function per
/// public function. Weight declarations are dropped.
llvm::Expected<std::unique_ptr<llvm::Module>>
translateToLLVMIR(mlir::ModuleOp module, llvm::LLVMContext &context,
                  llvm::TargetMachine &machine);

/// Optimizes: level 2 runs the few passes that lowered ssm programs need, 0, 1
/// and 3 run LLVM's O0, O1 and O3.
void optimize(llvm::Module &module, llvm::TargetMachine &machine,
              unsigned level);

/// Optimizes and compiles a module to relocatable objects that together define
/// what it defines, on up to `threads` threads. Leaves the module unusable.
llvm::Expected<std::vector<std::unique_ptr<llvm::MemoryBuffer>>>
compileObjects(llvm::Module &module, llvm::TargetMachine &machine,
               unsigned level, unsigned threads);

/// Writes a relocatable object to `path`.
llvm::Error emitObject(llvm::Module &module, llvm::TargetMachine &machine,
                       llvm::StringRef path);

/// Links an object and COREY's run-time archive into a shared library, with the
/// system's C compiler as the linker driver.
llvm::Error linkSharedLibrary(llvm::StringRef object,
                              llvm::StringRef runtimeArchive,
                              llvm::StringRef path);

/// A function of an exported program.
struct ExportedFunction {
  struct Argument {
    std::string name;
    mlir::RankedTensorType type;
    bool isOutput;
    /// The innermost stride need not be 1.
    bool anyStrides;
  };
  std::string name;
  /// In the order of the C function.
  std::vector<Argument> arguments;
};

/// The functions of `module`, a module after the `Bound` phase (tensor types,
/// weights as arguments).
std::vector<ExportedFunction> listFunctions(mlir::ModuleOp module);

/// Their C header: for programs with kernels, functions take a stream as their
/// last argument and return what went wrong.
std::string emitCHeader(llvm::ArrayRef<ExportedFunction> functions,
                        llvm::StringRef guard, bool onDevice = false);

/// Makes a module that translateToLLVMIR() returned a program on CUDA devices:
/// it holds the kernels of `image`, and its functions run through
/// corey_rt_run().
void embedKernels(llvm::Module &module, const DeviceImage &image,
                  llvm::ArrayRef<ExportedFunction> functions);

} // namespace corey

#endif // COREY_TARGET_HOST_H
