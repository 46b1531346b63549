# Configuration of the lit test suite.

import os
import shutil

import lit.formats

from lit.llvm import llvm_config

config.name = "COREY"
config.test_format = lit.formats.ShTest(True)

# .test files start with commands that are not MLIR.
config.suffixes = [".mlir", ".test"]
config.excludes = ["Inputs", "unittests", "lib"]

config.test_source_root = os.path.dirname(__file__)
config.test_exec_root = os.path.join(config.corey_obj_root, "test")

config.substitutions.append(
    ("%test_inputs", os.path.join(config.test_source_root, "Inputs"))
)
config.substitutions.append(
    ("%examples", os.path.join(config.corey_src_root, "docs", "examples"))
)
config.substitutions.append(("%corey_src", config.corey_src_root))
# Stand-ins for the CUDA driver and cuBLASLt, for COREY_CUDA_DRIVER and
# COREY_CUBLASLT.
for name in ["cuda", "cublaslt"]:
    config.substitutions.append(
        (
            "%fake_" + name,
            os.path.join(config.corey_obj_root, "lib", f"libcorey_fake_{name}.so"),
        )
    )
config.substitutions.append(("%mlir_include", config.mlir_include_dir))
config.substitutions.append(("%python", config.python_executable))

config.substitutions.append(("%fake_cuda", config.fake_cuda))

# NVIDIA's assembler, for tests of machine code.
ptxas = shutil.which(os.environ.get("PTXAS") or "ptxas")
if ptxas:
    config.available_features.add("ptxas")
    config.substitutions.append(("%ptxas", ptxas))

# Release builds of LLVM count nothing unless told to, and pass statistics with it.
config_header = os.path.join(config.mlir_include_dir, "llvm", "Config", "llvm-config.h")
if os.path.exists(config_header):
    with open(config_header) as header:
        if "#define LLVM_FORCE_ENABLE_STATS 1" in header.read():
            config.available_features.add("llvm-statistics")

llvm_config.with_system_environment(["HOME", "INCLUDE", "LIB", "TMP", "TEMP"])

# What tests compile, they compile: tests of the cache name a folder for it.
llvm_config.with_environment("COREY_CACHE_DIR", "off", append_path=False)

# Variables of FileCheck end at the next CHECK-LABEL.
llvm_config.with_environment("FILECHECK_OPTS", "-enable-var-scope", append_path=False)

# COREY's tools come first, then FileCheck, not and split-file.
llvm_config.with_environment("PATH", config.llvm_tools_dir, append_path=True)
llvm_config.with_environment("PATH", config.corey_tools_dir, append_path=True)

tools = [
    "corey-opt",
    "corey-reduce",
    "FileCheck",
    "count",
    "llvm-tblgen",
    "not",
    "split-file",
]
llvm_config.add_tool_substitutions(
    tools, [config.corey_tools_dir, config.llvm_tools_dir]
)
