//===- Device.h - Machine code of a program's kernels -----------*- C++ -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_TARGET_DEVICE_H
#define COREY_TARGET_DEVICE_H

#include "mlir/IR/BuiltinOps.h"
#include "llvm/Support/Error.h"
#include <string>
#include <vector>

namespace corey {

/// The kernels of a program, by the numbers the host launches them by, each a
/// module of its own: only those that are launched need to become machine code.
struct DeviceImage {
  struct Kernel {
    std::string name;
    /// PTX, or what assemble() made of it.
    std::string code;
  };
  std::vector<Kernel> kernels;
  std::string chip;
};

/// The chip of `text`, such as "sm_90a", or an error: kernels need sm_80 or
/// later.
llvm::Expected<std::string> parseChip(llvm::StringRef text);

/// Compiles the kernels of a module after the LLVM phase to PTX, on up to
/// `threads` threads, and removes them from it, so that the rest is a module
/// for the host.
llvm::Expected<DeviceImage> takeDeviceImage(mlir::ModuleOp module,
                                            unsigned optLevel = 2,
                                            unsigned threads = 1);

/// The same kernels as one module, for people and other tools.
llvm::Expected<std::string> takePTX(mlir::ModuleOp module,
                                    unsigned optLevel = 2);

/// Compiles PTX to a cubin with NVIDIA's ptxas: `assembler`, or if that is
/// empty the one that $PTXAS names, of $PATH, of $CUDA_HOME/bin, or of
/// /usr/local/cuda/bin.
llvm::Expected<std::string> assemble(llvm::StringRef ptx, llvm::StringRef chip,
                                     llvm::StringRef assembler = "");

} // namespace corey

#endif // COREY_TARGET_DEVICE_H
