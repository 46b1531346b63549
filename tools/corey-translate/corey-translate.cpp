//===- corey-translate.cpp - Exports programs -----------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Checkpoint.h"
#include "corey/ToolUtils.h"
#include "corey/Tools.h"
#include "llvm/Support/CommandLine.h"
#include "llvm/Support/FileSystem.h"
#include "llvm/Support/MemoryBuffer.h"
#include "llvm/Support/Path.h"
#include "llvm/Support/raw_ostream.h"

using namespace corey;
namespace cl = llvm::cl;

static constexpr const char *kTool = "corey-translate";

/// The run-time archive beside the executable: ../lib/libcorey_runtime.a.
static std::string findRuntimeArchive(const char *argv0) {
  static int anchor;
  llvm::SmallString<256> path(llvm::sys::fs::getMainExecutable(argv0, &anchor));
  llvm::sys::path::remove_filename(path);
  llvm::sys::path::append(path, "..", "lib", "libcorey_runtime.a");
  return llvm::sys::fs::exists(path) ? path.str().str() : "";
}

namespace {
/// How the program of a model is made.
struct ModelOptions {
  std::string weights, compute, state;
  std::vector<std::string> functions;
};
} // namespace

/// The module of the checkpoint in a folder, or of a published model's shapes.
static Expected<std::string> importModel(const std::string &model,
                                         const ModelOptions &given) {
  import::ImportOptions options;
  if (!given.functions.empty()) {
    options.prefill = options.prefillPacked = options.decode = false;
    options.sample = false;
    for (const std::string &name : given.functions) {
      bool *wanted = name == "prefill"          ? &options.prefill
                     : name == "prefill_packed" ? &options.prefillPacked
                     : name == "decode"         ? &options.decode
                     : name == "sample"         ? &options.sample
                                                : nullptr;
      if (!wanted)
        return Status::invalidArgument("--functions: expected prefill, "
                                       "prefill_packed, decode or sample, "
                                       "got '" +
                                       name + "'");
      *wanted = true;
    }
  }
  DType weights = DType::F32;
  for (auto [option, name, dtype] :
       {std::tuple("--weight-type", &given.weights, &weights),
        {"--compute-type", &given.compute, &options.computeType},
        {"--state-type", &given.state, &options.stateType}}) {
    if (name->empty())
      continue;
    Expected<DType> parsed = parseFloatType(option, *name);
    if (!parsed)
      return parsed.takeStatus();
    *dtype = *parsed;
  }
  import::ModelConfig config;
  import::TensorIndex tensors;
  if (llvm::sys::fs::is_directory(model)) {
    if (!given.weights.empty())
      return Status::invalidArgument(
          "--weight-type: expected the name of a published model, got a "
          "folder, whose tensors have types");
    Expected<Checkpoint> checkpoint = Checkpoint::open(model);
    if (!checkpoint)
      return checkpoint.takeStatus();
    config = checkpoint->config();
    tensors = checkpoint->tensors();
  } else {
    Expected<import::ModelConfig> preset = import::presetConfig(model);
    if (!preset)
      return preset.takeStatus();
    config = *preset;
    tensors = import::makeTensorIndex(config, weights);
  }
  mlir::MLIRContext context(mlir::MLIRContext::Threading::DISABLED);
  auto module = import::buildModel(config, tensors, &context, options);
  if (!module)
    return module.takeStatus();
  std::string text;
  llvm::raw_string_ostream(text) << **module;
  return text;
}

static bool isModel(const std::string &name) {
  return llvm::sys::fs::is_directory(name) ||
         llvm::is_contained(import::presetNames(), name);
}

int corey::coreyTranslateMain(int argc, char **argv) {
  cl::OptionCategory category("corey-translate options");
  cl::opt<std::string> file(cl::Positional,
                            cl::desc("<program.mlir, model's folder or name>"),
                            cl::Required, cl::cat(category));
  cl::opt<std::string> to(
      "to",
      cl::desc("Output: llvmir (optimized LLVM IR), mlir (LLVM dialect; of a "
               "model its ssm module), o (object), so (shared library), ptx or "
               "cubin (kernels of a GPU, "
               "as text or machine code)"),
      cl::init("llvmir"), cl::cat(category));
  cl::opt<std::string> output(
      "o",
      cl::desc(
          "Output file; - (default) is standard output for llvmir, mlir, ptx"),
      cl::init("-"), cl::cat(category));
  cl::opt<std::string> runtime(
      "runtime",
      cl::desc("Archive with COREY's run-time functions, linked into a shared "
               "library"),
      cl::cat(category));
  cl::opt<std::string> chip(
      "chip",
      cl::desc("Chip of a GPU, such as sm_90a: code for it and its host; empty "
               "(default) is the CPU, but for ptx and cubin sm_90a"),
      cl::cat(category));
  cl::opt<std::string> kernels(
      "kernels",
      cl::desc("What an object or library for a chip holds of its kernels: ptx "
               "(default), which the driver compiles, or cubin"),
      cl::init("ptx"), cl::cat(category));
  cl::opt<std::string> ptxas(
      "ptxas",
      cl::desc(
          "NVIDIA's assembler, for machine code; default is the one that "
          "$PTXAS names, or of $PATH, $CUDA_HOME/bin, /usr/local/cuda/bin"),
      cl::value_desc("program"), cl::cat(category));
  cl::opt<int> vectorBits(
      "vector-bits",
      cl::desc(
          "Width of a vector register: 256, 512; 0 (default) takes the host's"),
      cl::init(0), cl::cat(category));
  cl::opt<int> optLevel("O", cl::desc("Optimization level, 0 to 3"), cl::Prefix,
                        cl::init(2), cl::cat(category));
  ModelOptions modelOptions;
  cl::opt<std::string, true> weightType(
      "weight-type",
      cl::desc("Type of a named model's weights: f32 (default), f16, bf16"),
      cl::location(modelOptions.weights), cl::cat(category));
  cl::opt<std::string, true> computeType(
      "compute-type",
      cl::desc("Type of a model's activations: f32 (default), f16, bf16"),
      cl::location(modelOptions.compute), cl::cat(category));
  cl::opt<std::string, true> stateType(
      "state-type",
      cl::desc("Type of a model's states: f32 (default), f16, bf16"),
      cl::location(modelOptions.state), cl::cat(category));
  cl::list<std::string, std::vector<std::string>> functions(
      "functions",
      cl::desc("A model's functions: prefill, prefill_packed, decode, sample; "
               "all if "
               "none is given"),
      cl::CommaSeparated, cl::location(modelOptions.functions),
      cl::value_desc("name,..."), cl::cat(category));
  cl::HideUnrelatedOptions(category);
  cl::ParseCommandLineOptions(argc, argv,
                              "COREY: export a state-space model program\n");

  std::string source;
  if (isModel(file)) {
    Expected<std::string> module = importModel(file, modelOptions);
    if (!module)
      return reportError(kTool, module.status());
    source = std::move(*module);
  } else {
    auto buffer = llvm::MemoryBuffer::getFile(file);
    if (!buffer)
      return reportError(
          kTool, Status::ioError(file + ": " + buffer.getError().message()));
    source = (*buffer)->getBuffer().str();
  }
  Expected<std::shared_ptr<Context>> context = Context::create();
  if (!context)
    return reportError(kTool, context.status());
  CompileOptions options;
  options.vectorBits = vectorBits;
  options.optLevel = optLevel;
  bool onlyKernels = to == "ptx" || to == "cubin";
  options.chip = onlyKernels && chip.empty() ? "sm_90a" : chip.getValue();

  if (to == "llvmir" || to == "mlir" || to == "ptx") {
    Expected<std::string> text =
        to == "mlir" && isModel(file)
            ? Expected<std::string>(std::move(source))
            : (*context)->emit(source,
                               to == "mlir"  ? "llvm"
                               : to == "ptx" ? "ptx"
                                             : "llvmir-opt",
                               options, file.getValue());
    if (!text)
      return reportError(kTool, text.status());
    std::error_code code;
    llvm::raw_fd_ostream os(output, code);
    if (code)
      return reportError(kTool,
                         Status::ioError(output + ": " + code.message()));
    os << *text;
    return 0;
  }
  if (to != "o" && to != "so" && to != "cubin")
    return reportError(
        kTool, Status::invalidArgument("--to: expected llvmir, mlir, o, so, "
                                       "ptx or cubin, got '" +
                                       to + "'"));
  if (kernels != "ptx" && kernels != "cubin")
    return reportError(
        kTool, Status::invalidArgument(
                   "--kernels: expected ptx or cubin, got '" + kernels + "'"));
  if (output == "-")
    return reportError(kTool,
                       Status::invalidArgument(
                           "expected -o <file> for --to=" + to + ", got none"));
  ExportOptions what;
  what.format = to;
  what.kernels = kernels;
  what.ptxas = ptxas;
  what.runtimeArchive =
      runtime.empty() ? findRuntimeArchive(argv[0]) : runtime.getValue();
  if (to == "so" && what.runtimeArchive.empty())
    return reportError(
        kTool,
        Status::notFound("expected --runtime=<libcorey_runtime.a> for --to=so, "
                         "got none and found none beside the tool"));
  if (Status status = (*context)->exportProgram(source, output, what, options,
                                                file.getValue());
      !status)
    return reportError(kTool, status);
  return 0;
}
