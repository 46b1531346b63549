//===- Host.cpp - LLVM IR, objects and libraries for the host -------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Target/Host.h"
#include "corey/Dialect/SSM/IR/SSMOps.h"
#include "corey/Dialect/SSM/Transforms/Passes.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Target/LLVMIR/Export.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/Bitcode/BitcodeReader.h"
#include "llvm/Bitcode/BitcodeWriter.h"
#include "llvm/IR/IRBuilder.h"
#include "llvm/IR/LegacyPassManager.h"
#include "llvm/IR/Module.h"
#include "llvm/MC/TargetRegistry.h"
#include "llvm/Passes/PassBuilder.h"
#include "llvm/Support/FileSystem.h"
#include "llvm/Support/FileUtilities.h"
#include "llvm/Support/Path.h"
#include "llvm/Support/Program.h"
#include "llvm/Support/SmallVectorMemoryBuffer.h"
#include "llvm/Support/TargetSelect.h"
#include "llvm/Target/TargetMachine.h"
#include "llvm/Target/TargetOptions.h"
#include "llvm/TargetParser/Host.h"
#include "llvm/Transforms/IPO/AlwaysInliner.h"
#include "llvm/Transforms/IPO/DeadArgumentElimination.h"
#include "llvm/Transforms/InstCombine/InstCombine.h"
#include "llvm/Transforms/Scalar/DCE.h"
#include "llvm/Transforms/Scalar/EarlyCSE.h"
#include "llvm/Transforms/Scalar/LICM.h"
#include "llvm/Transforms/Scalar/LoopPassManager.h"
#include "llvm/Transforms/Scalar/LoopRotation.h"
#include "llvm/Transforms/Scalar/SROA.h"
#include "llvm/Transforms/Scalar/SimplifyCFG.h"
#include "llvm/Transforms/Utils/Cloning.h"
#include "llvm/Transforms/Vectorize/LoopVectorize.h"
#include <set>
#include <thread>

using namespace corey;

static llvm::Error makeError(const llvm::Twine &message) {
  return llvm::createStringError(llvm::inconvertibleErrorCode(), message);
}

/// `name` as a C identifier.
static std::string identifier(llvm::StringRef name) {
  std::string text = name.str();
  for (char &c : text)
    if (!llvm::isAlnum(c))
      c = '_';
  return text;
}

/// `name` as the name of a parameter: words of C and C++ get an underscore.
static std::string parameterName(llvm::StringRef name) {
  static const std::set<llvm::StringRef> words = {
      "auto",     "bool",      "break",    "case",     "catch",    "char",
      "class",    "const",     "continue", "default",  "delete",   "do",
      "double",   "else",      "enum",     "extern",   "false",    "float",
      "for",      "friend",    "goto",     "if",       "inline",   "int",
      "long",     "namespace", "new",      "operator", "private",  "protected",
      "public",   "register",  "restrict", "return",   "short",    "signed",
      "sizeof",   "static",    "struct",   "switch",   "template", "this",
      "throw",    "true",      "try",      "typedef",  "typename", "union",
      "unsigned", "using",     "virtual",  "void",     "volatile", "while"};
  std::string text = identifier(name);
  return words.count(text) || llvm::isDigit(text[0]) ? "_" + text : text;
}

std::string corey::getInvokeSymbol(llvm::StringRef name) {
  return ("corey.invoke." + name).str();
}

llvm::Expected<std::unique_ptr<llvm::TargetMachine>>
corey::createHostTargetMachine(llvm::StringRef cpu, llvm::StringRef features) {
  static bool initialized = [] {
    llvm::InitializeNativeTarget();
    llvm::InitializeNativeTargetAsmPrinter();
    return true;
  }();
  (void)initialized;
  llvm::Triple triple(llvm::sys::getDefaultTargetTriple());
  std::string message;
  const llvm::Target *target =
      llvm::TargetRegistry::lookupTarget(triple, message);
  if (!target)
    return makeError(message);
  std::string hostFeatures;
  if (cpu.empty()) {
    cpu = llvm::sys::getHostCPUName();
    std::vector<std::string> list;
    for (auto &feature : llvm::sys::getHostCPUFeatures())
      list.push_back((feature.second ? "+" : "-") + feature.first().str());
    hostFeatures = llvm::join(list, ",");
    features = hostFeatures;
  }
  llvm::TargetOptions options;
  options.AllowFPOpFusion = llvm::FPOpFusion::Standard;
  return std::unique_ptr<llvm::TargetMachine>(target->createTargetMachine(
      triple, cpu, features, options, llvm::Reloc::PIC_, std::nullopt,
      llvm::CodeGenOptLevel::Default));
}

/// Loads and stores bf16 as integers. A value of a bf16 vector type that lives
/// across blocks, as that of a hoisted load does, is otherwise widened to f32
/// and rounded again by a function that programs are not linked with.
static void moveBF16AsIntegers(llvm::Function &function) {
  auto integerType = [](llvm::Type *type) -> llvm::Type * {
    if (!type->getScalarType()->isBFloatTy())
      return nullptr;
    llvm::Type *i16 = llvm::Type::getInt16Ty(type->getContext());
    auto *vector = llvm::dyn_cast<llvm::VectorType>(type);
    return vector ? llvm::VectorType::get(i16, vector->getElementCount()) : i16;
  };
  for (llvm::BasicBlock &block : function)
    for (llvm::Instruction &instruction : llvm::make_early_inc_range(block)) {
      llvm::IRBuilder<> builder(&instruction);
      if (auto *load = llvm::dyn_cast<llvm::LoadInst>(&instruction)) {
        llvm::Type *type = integerType(load->getType());
        if (!type)
          continue;
        auto *bits = builder.CreateAlignedLoad(type, load->getPointerOperand(),
                                               load->getAlign());
        load->replaceAllUsesWith(builder.CreateBitCast(bits, load->getType()));
        load->eraseFromParent();
      } else if (auto *store = llvm::dyn_cast<llvm::StoreInst>(&instruction)) {
        if (llvm::Type *type = integerType(store->getValueOperand()->getType()))
          store->setOperand(
              0, builder.CreateBitCast(store->getValueOperand(), type));
      }
    }
}

llvm::Expected<std::unique_ptr<llvm::Module>>
corey::translateToLLVMIR(mlir::ModuleOp module, llvm::LLVMContext &context,
                         llvm::TargetMachine &machine) {
  for (auto weight : llvm::make_early_inc_range(module.getOps<ssm::WeightOp>()))
    weight.erase();
  // LLVM has no use for them, and a warning about each would come with all of
  // the function, in text.
  for (mlir::FunctionOpInterface function :
       module.getOps<mlir::LLVM::LLVMFuncOp>())
    for (unsigned i = 0; i < function.getNumArguments(); ++i) {
      llvm::SmallVector<mlir::NamedAttribute> kept;
      for (mlir::NamedAttribute attribute : function.getArgAttrs(i))
        if (!attribute.getName().strref().starts_with("ssm."))
          kept.push_back(attribute);
      function.setArgAttrs(i, kept);
    }
  std::unique_ptr<llvm::Module> result =
      mlir::translateModuleToLLVMIR(module, context);
  if (!result)
    return makeError("translation to LLVM IR failed");
  result->setDataLayout(machine.createDataLayout());
  result->setTargetTriple(machine.getTargetTriple());

  llvm::IRBuilder<> builder(context);
  llvm::Type *pointer = builder.getPtrTy();
  constexpr llvm::StringLiteral prefix = "_mlir_ciface_";
  std::vector<llvm::Function *> functions;
  for (llvm::Function &function : *result) {
    // Vectors as wide as the code asks for, also where the CPU's default
    // tuning prefers narrower ones.
    if (!function.isDeclaration()) {
      moveBF16AsIntegers(function);
      function.addFnAttr("prefer-vector-width", "512");
      function.addFnAttr("min-legal-vector-width", "512");
    }
    if (!function.isDeclaration() && function.getName().starts_with(prefix))
      functions.push_back(&function);
  }
  // Only the functions with descriptors are visible: a program may well call
  // its function @main, which must not meet that of the process.
  for (llvm::Function &function : *result)
    if (!function.isDeclaration())
      function.setLinkage(llvm::GlobalValue::InternalLinkage);
  for (llvm::Function *function : functions) {
    llvm::StringRef name = function->getName().drop_front(prefix.size());
    function->setLinkage(llvm::GlobalValue::ExternalLinkage);
    auto *invoke = llvm::Function::Create(
        llvm::FunctionType::get(builder.getVoidTy(), {pointer}, false),
        llvm::Function::ExternalLinkage, getInvokeSymbol(name), *result);
    builder.SetInsertPoint(llvm::BasicBlock::Create(context, "entry", invoke));
    std::vector<llvm::Value *> arguments;
    for (unsigned i = 0; i < function->arg_size(); ++i)
      arguments.push_back(builder.CreateLoad(
          pointer, builder.CreateConstGEP1_64(pointer, invoke->getArg(0), i)));
    builder.CreateCall(function, arguments);
    builder.CreateRetVoid();
    function->setName("corey_" + identifier(name));
  }
  return result;
}

/// What code that comes out of MLIR's canonicalizer still needs. Vectors and
/// register blocks are explicit in it, so a fraction of LLVM's O2 gives the
/// same loops in half the time; the loop vectoriser remains for elementwise
/// ops.
static llvm::FunctionPassManager buildLeanPipeline() {
  llvm::FunctionPassManager passes;
  passes.addPass(llvm::SROAPass(llvm::SROAOptions::ModifyCFG));
  passes.addPass(llvm::EarlyCSEPass(/*UseMemorySSA=*/true));
  passes.addPass(llvm::SimplifyCFGPass());
  passes.addPass(llvm::InstCombinePass());
  llvm::LoopPassManager loops;
  loops.addPass(llvm::LoopRotatePass());
  loops.addPass(llvm::LICMPass(llvm::LICMOptions()));
  passes.addPass(llvm::createFunctionToLoopPassAdaptor(std::move(loops),
                                                       /*UseMemorySSA=*/true));
  passes.addPass(llvm::LoopVectorizePass());
  passes.addPass(llvm::EarlyCSEPass());
  passes.addPass(llvm::SimplifyCFGPass());
  passes.addPass(llvm::InstCombinePass());
  passes.addPass(llvm::createFunctionToLoopPassAdaptor(
      llvm::LICMPass(llvm::LICMOptions()), /*UseMemorySSA=*/true));
  return passes;
}

static void runPasses(
    llvm::Module &module, llvm::TargetMachine &machine,
    const llvm::PipelineTuningOptions &tuning,
    llvm::function_ref<llvm::ModulePassManager(llvm::PassBuilder &)> build) {
  llvm::LoopAnalysisManager loops;
  llvm::FunctionAnalysisManager functions;
  llvm::CGSCCAnalysisManager callGraph;
  llvm::ModuleAnalysisManager modules;
  llvm::PassBuilder builder(&machine, tuning);
  builder.registerModuleAnalyses(modules);
  builder.registerCGSCCAnalyses(callGraph);
  builder.registerFunctionAnalyses(functions);
  builder.registerLoopAnalyses(loops);
  builder.crossRegisterProxies(loops, functions, callGraph, modules);
  build(builder).run(module, modules);
}

void corey::optimize(llvm::Module &module, llvm::TargetMachine &machine,
                     unsigned level) {
  llvm::PipelineTuningOptions tuning;
  tuning.LoopVectorization = level > 1;
  tuning.SLPVectorization = false;
  runPasses(module, machine, tuning, [&](llvm::PassBuilder &builder) {
    llvm::ModulePassManager passes;
    switch (level) {
    case 0:
      return builder.buildO0DefaultPipeline(llvm::OptimizationLevel::O0);
    case 1:
      return builder.buildPerModuleDefaultPipeline(llvm::OptimizationLevel::O1);
    case 2:
      passes.addPass(
          llvm::createModuleToFunctionPassAdaptor(buildLeanPipeline()));
      return passes;
    default:
      return builder.buildPerModuleDefaultPipeline(llvm::OptimizationLevel::O3);
    }
  });
}

//===----------------------------------------------------------------------===//
// Objects
//===----------------------------------------------------------------------===//

static llvm::Error emitObjectTo(llvm::Module &module,
                                llvm::TargetMachine &machine,
                                llvm::raw_pwrite_stream &os) {
  llvm::legacy::PassManager passes;
  if (machine.addPassesToEmitFile(passes, os, nullptr,
                                  llvm::CodeGenFileType::ObjectFile,
                                  /*DisableVerify=*/true))
    return makeError("the target cannot emit objects");
  passes.run(module);
  return llvm::Error::success();
}

/// Cuts a module into `count` modules of about the same size, as bitcode: a
/// thread compiles each in a context of its own.
static std::vector<llvm::SmallString<0>> splitModule(llvm::Module &module,
                                                     unsigned count) {
  std::vector<std::pair<unsigned, llvm::Function *>> functions;
  for (llvm::Function &function : module)
    if (!function.isDeclaration())
      functions.push_back({function.getInstructionCount(), &function});
  // By size, then by name, so that the parts are the same every time.
  llvm::sort(functions, [](const auto &a, const auto &b) {
    return a.first != b.first ? a.first > b.first
                              : a.second->getName() < b.second->getName();
  });
  std::vector<unsigned> load(count, 0);
  llvm::DenseMap<const llvm::GlobalValue *, unsigned> part;
  for (auto [size, function] : functions) {
    unsigned bin = std::min_element(load.begin(), load.end()) - load.begin();
    load[bin] += size;
    part[function] = bin;
  }
  // Parts see each other's functions and the constants of the first.
  for (llvm::GlobalValue &value : module.global_values())
    if (value.hasLocalLinkage()) {
      value.setLinkage(llvm::GlobalValue::ExternalLinkage);
      value.setVisibility(llvm::GlobalValue::HiddenVisibility);
      if (!value.hasName())
        value.setName("corey.local");
    }
  std::vector<llvm::SmallString<0>> parts(count);
  for (unsigned bin = 0; bin < count; ++bin) {
    llvm::ValueToValueMapTy map;
    std::unique_ptr<llvm::Module> clone =
        llvm::CloneModule(module, map, [&](const llvm::GlobalValue *value) {
          auto it = part.find(value);
          return (it == part.end() ? 0 : it->second) == bin;
        });
    llvm::raw_svector_ostream os(parts[bin]);
    llvm::WriteBitcodeToFile(*clone, os);
  }
  return parts;
}

/// Of the host's part of a program for a device: functions that have one caller
/// become part of it, down from the entries, and arguments and results that
/// nobody looks at, as most of what describes a memref, go. What is left is a
/// fraction, and next to all of it is for LLVM's fast selection of
/// instructions.
static void simplifyCalls(llvm::Module &module, llvm::TargetMachine &machine) {
  const std::string entries = getInvokeSymbol("");
  for (llvm::Function &function : module) {
    if (function.isDeclaration() || function.getName().starts_with(entries))
      continue;
    function.setLinkage(llvm::GlobalValue::InternalLinkage);
    auto *call = function.hasOneUse()
                     ? llvm::dyn_cast<llvm::CallInst>(*function.user_begin())
                     : nullptr;
    if (call && call->getCalledOperand() == &function &&
        call->getFunction() != &function)
      function.addFnAttr(llvm::Attribute::AlwaysInline);
  }
  llvm::FunctionPassManager folding;
  folding.addPass(llvm::EarlyCSEPass());
  folding.addPass(llvm::DCEPass());
  llvm::ModulePassManager passes;
  passes.addPass(llvm::AlwaysInlinerPass(/*InsertLifetime=*/false));
  passes.addPass(llvm::createModuleToFunctionPassAdaptor(std::move(folding)));
  passes.addPass(llvm::DeadArgumentEliminationPass());
  runPasses(module, machine, llvm::PipelineTuningOptions(),
            [&](llvm::PassBuilder &) { return std::move(passes); });
}

llvm::Expected<std::vector<std::unique_ptr<llvm::MemoryBuffer>>>
corey::compileObjects(llvm::Module &module, llvm::TargetMachine &machine,
                      unsigned level, unsigned threads) {
  // Below this many instructions a second thread costs more than it saves.
  constexpr unsigned kWorthSplitting = 1000;
  std::vector<std::unique_ptr<llvm::MemoryBuffer>> objects;
  auto toBuffer = [](llvm::SmallString<0> &&data) {
    return std::make_unique<llvm::SmallVectorMemoryBuffer>(
        std::move(data), "corey",
        /*RequiresNullTerminator=*/false);
  };
  if (machine.getOptLevel() == llvm::CodeGenOptLevel::None && level == 2)
    simplifyCalls(module, machine);
  // LLVM's O3 inlines: it must see the whole.
  if (threads < 2 || level > 2 ||
      module.getInstructionCount() < kWorthSplitting) {
    optimize(module, machine, level);
    llvm::SmallString<0> data;
    llvm::raw_svector_ostream os(data);
    if (llvm::Error error = emitObjectTo(module, machine, os))
      return std::move(error);
    objects.push_back(toBuffer(std::move(data)));
    return std::move(objects);
  }
  std::vector<llvm::SmallString<0>> parts = splitModule(module, threads);
  std::vector<llvm::SmallString<0>> results(threads);
  std::vector<std::string> errors(threads);
  auto compile = [&](unsigned i) {
    llvm::LLVMContext context;
    auto fail = [&](llvm::Error error) {
      errors[i] = llvm::toString(std::move(error));
    };
    auto part = llvm::parseBitcodeFile(llvm::MemoryBufferRef(parts[i], "part"),
                                       context);
    if (!part)
      return fail(part.takeError());
    auto own = createHostTargetMachine();
    if (!own)
      return fail(own.takeError());
    (*own)->setOptLevel(machine.getOptLevel());
    optimize(**part, **own, level);
    llvm::raw_svector_ostream os(results[i]);
    if (llvm::Error error = emitObjectTo(**part, **own, os))
      fail(std::move(error));
  };
  std::vector<std::thread> pool;
  for (unsigned i = 1; i < threads; ++i)
    pool.emplace_back(compile, i);
  compile(0);
  for (std::thread &thread : pool)
    thread.join();
  for (unsigned i = 0; i < threads; ++i) {
    if (!errors[i].empty())
      return makeError(errors[i]);
    objects.push_back(toBuffer(std::move(results[i])));
  }
  return std::move(objects);
}

llvm::Error corey::emitObject(llvm::Module &module,
                              llvm::TargetMachine &machine,
                              llvm::StringRef path) {
  std::error_code code;
  llvm::raw_fd_ostream os(path, code);
  if (code)
    return makeError(path + ": " + code.message());
  if (llvm::Error error = emitObjectTo(module, machine, os))
    return error;
  os.flush();
  if (os.has_error())
    return makeError(path + ": " + os.error().message());
  return llvm::Error::success();
}

llvm::Error corey::linkSharedLibrary(llvm::StringRef object,
                                     llvm::StringRef runtimeArchive,
                                     llvm::StringRef path) {
  llvm::ErrorOr<std::string> driver = std::error_code();
  for (llvm::StringRef name : {"cc", "clang-22", "clang", "gcc"}) {
    driver = llvm::sys::findProgramByName(name);
    if (driver)
      break;
  }
  if (!driver)
    return makeError("expected a C compiler on PATH to link a shared library, "
                     "got none of cc, clang-22, clang, gcc");
  std::vector<llvm::StringRef> arguments = {*driver, "-shared", "-o", path,
                                            object};
  if (!runtimeArchive.empty())
    arguments.push_back(runtimeArchive);
  // Loops run on LLVM's OpenMP library, which the program finds where this
  // build found it or on its library path.
  std::string rpath =
      "-Wl,-rpath," + llvm::sys::path::parent_path(COREY_LIBOMP).str();
  for (llvm::StringRef flag :
       {"-Wl,--gc-sections", "-Wl,--exclude-libs,ALL", "-Wl,--as-needed"})
    arguments.push_back(flag);
  arguments.push_back(COREY_LIBOMP);
  arguments.push_back(rpath);
  arguments.push_back("-lstdc++");
  arguments.push_back("-lm");
  std::string message;
  llvm::SmallString<128> log;
  if (llvm::sys::fs::createTemporaryFile("corey-link", "log", log))
    return makeError(
        "expected a temporary file for the linker's messages, got none");
  llvm::FileRemover removeLog(log);
  std::optional<llvm::StringRef> redirects[] = {std::nullopt, log.str(),
                                                log.str()};
  int code = llvm::sys::ExecuteAndWait(*driver, arguments, std::nullopt,
                                       redirects, 0, 0, &message);
  if (code && message.empty())
    if (auto buffer = llvm::MemoryBuffer::getFile(log))
      message = (*buffer)->getBuffer().split('\n').first.str();
  if (code)
    return makeError("linking " + path + " failed" +
                     (message.empty() ? "" : ": " + message));
  return llvm::Error::success();
}

//===----------------------------------------------------------------------===//
// C header
//===----------------------------------------------------------------------===//

static llvm::StringRef cType(mlir::Type type) {
  if (type.isF32())
    return "float";
  if (type.isF16() || type.isBF16())
    return "uint16_t";
  if (type.isInteger(64))
    return "int64_t";
  if (type.isInteger(32))
    return "int32_t";
  if (type.isInteger(8))
    return "int8_t";
  return "uint8_t";
}

std::vector<ExportedFunction> corey::listFunctions(mlir::ModuleOp module) {
  std::vector<ExportedFunction> list;
  for (auto function : module.getOps<mlir::func::FuncOp>()) {
    if (function.isPrivate() ||
        function.getSymName().ends_with(ssm::kShapesSuffix))
      continue;
    ExportedFunction exported;
    exported.name = function.getSymName().str();
    auto add = [&](mlir::Type type, std::string name, bool isOutput,
                   bool anyStrides) {
      exported.arguments.push_back({std::move(name),
                                    mlir::cast<mlir::RankedTensorType>(type),
                                    isOutput, anyStrides});
    };
    for (unsigned i = 0; i < function.getNumArguments(); ++i) {
      std::string name = "arg" + std::to_string(i);
      for (llvm::StringRef key : {ssm::kNameAttr, ssm::kWeightArgAttr})
        if (auto attr = function.getArgAttrOfType<mlir::StringAttr>(i, key))
          name = attr.str();
      add(function.getArgumentTypes()[i], name, false,
          static_cast<bool>(function.getArgAttr(i, ssm::kAnyStridesAttr)));
    }
    for (unsigned i = 0; i < function.getNumResults(); ++i) {
      std::string name = "result" + std::to_string(i);
      if (auto attr =
              function.getResultAttrOfType<mlir::StringAttr>(i, ssm::kNameAttr))
        name = attr.str();
      add(function.getResultTypes()[i], name, true,
          static_cast<bool>(function.getResultAttr(i, ssm::kAnyStridesAttr)));
    }
    list.push_back(std::move(exported));
  }
  return list;
}

std::string corey::emitCHeader(llvm::ArrayRef<ExportedFunction> functions,
                               llvm::StringRef guard, bool onDevice) {
  std::string text;
  llvm::raw_string_ostream os(text);
  std::string macro = llvm::StringRef(identifier(guard)).upper() + "_H";
  os << "/* Functions of an ssm module, compiled by COREY.\n"
        " *\n"
        " * Every argument points to a descriptor: the data, the shape and "
        "the\n"
        " * strides in elements (the innermost stride must be 1 where not any "
        "are\n"
        " * taken). Outputs come last, with the shapes the module implies, and "
        "must\n"
        " * be contiguous where not any strides are taken. ";
  if (onDevice)
    os << "\n *\n"
          " * Data is in the memory of one CUDA device, at multiples of 16 "
          "bytes, or\n"
          " * of an element where any strides are taken.\n"
          " * `stream` is a CUstream (a cudaStream_t) whose work a call comes "
          "after\n"
          " * and is not waited for, 1 for the legacy default stream, or null "
          "to run\n"
          " * on a stream of the program's own and wait. Functions return "
          "null, "
          "or what\n"
          " * went wrong, until the thread's next call; what kernels find "
          "wrong "
          "with\n"
          " * data on a stream that was given is the error of a later call. ";
  os << "*/\n"
     << "#ifndef " << macro << "\n#define " << macro
     << "\n\n#include <stdint.h>\n\n"
     << "#ifdef __cplusplus\nextern \"C\" {\n#endif\n";
  std::set<std::pair<int64_t, std::string>> declared;
  auto descriptor = [&](mlir::RankedTensorType type) {
    std::string element = cType(type.getElementType()).str();
    return "corey_" + element + "_" + std::to_string(type.getRank()) + "d";
  };
  std::string prototypes;
  llvm::raw_string_ostream protos(prototypes);
  for (const ExportedFunction &function : functions) {
    protos << "\n/*";
    std::vector<std::string> parameters;
    for (const auto &[name, tensor, isOutput, anyStrides] :
         function.arguments) {
      std::string element = cType(tensor.getElementType()).str();
      if (declared.insert({tensor.getRank(), element}).second) {
        os << "\ntypedef struct {\n  " << element
           << " *allocated, *data;\n  int64_t offset;\n";
        if (tensor.getRank())
          os << "  int64_t sizes[" << tensor.getRank() << "], strides["
             << tensor.getRank() << "];\n";
        os << "} " << descriptor(tensor) << ";\n";
      }
      std::string parameter = parameterName(name);
      if (onDevice && parameter == "stream")
        parameter = "_stream";
      protos << " " << parameter << ": " << tensor
             << (anyStrides ? ", any strides" : "") << "\n *";
      parameters.push_back((isOutput ? "" : "const ") + descriptor(tensor) +
                           " *" + parameter);
    }
    if (onDevice)
      parameters.push_back("void *stream");
    protos << "/\n"
           << (onDevice ? "const char *" : "void ") << "corey_"
           << identifier(function.name) << "("
           << llvm::join(parameters, ",\n    ") << ");\n";
  }
  os << prototypes << "\n#ifdef __cplusplus\n}\n#endif\n\n#endif /* " << macro
     << " */\n";
  return text;
}

//===----------------------------------------------------------------------===//
// Kernels
//===----------------------------------------------------------------------===//

void corey::embedKernels(llvm::Module &module, const DeviceImage &image,
                         llvm::ArrayRef<ExportedFunction> functions) {
  llvm::LLVMContext &context = module.getContext();
  llvm::IRBuilder<> builder(context);
  llvm::PointerType *pointer = builder.getPtrTy();
  auto global = [&](llvm::Constant *value, bool isConstant = true) {
    auto *made = new llvm::GlobalVariable(module, value->getType(), isConstant,
                                          llvm::GlobalValue::PrivateLinkage,
                                          value, "corey.data");
    return made;
  };
  auto text = [&](llvm::StringRef data) -> llvm::Constant * {
    return global(llvm::ConstantDataArray::getString(context, data));
  };
  auto number = [&](int64_t value) { return builder.getInt64(value); };
  auto record = [&](std::initializer_list<llvm::Constant *> fields) {
    return llvm::ConstantStruct::getAnon(
        llvm::ArrayRef<llvm::Constant *>(fields.begin(), fields.size()));
  };
  auto array =
      [&](llvm::ArrayRef<llvm::Constant *> records) -> llvm::Constant * {
    if (records.empty())
      return llvm::ConstantPointerNull::get(pointer);
    return global(llvm::ConstantArray::get(
        llvm::ArrayType::get(records.front()->getType(), records.size()),
        records));
  };
  // These are the structures of RuntimeABI.h.
  std::vector<llvm::Constant *> kernels;
  for (const DeviceImage::Kernel &kernel : image.kernels)
    kernels.push_back(
        record({text(kernel.name), text(kernel.code),
                number(static_cast<int64_t>(kernel.code.size()))}));
  llvm::Constant *program = global(
      record({llvm::ConstantPointerNull::get(pointer), text(image.chip),
              number(static_cast<int64_t>(kernels.size())), array(kernels)}),
      /*isConstant=*/false);

  // What the caller sees are the functions made here.
  std::vector<llvm::Function *> defined;
  for (llvm::Function &function : module)
    if (!function.isDeclaration())
      defined.push_back(&function);
  for (llvm::Function *function : defined)
    function->setLinkage(llvm::GlobalValue::InternalLinkage);
  llvm::FunctionCallee run = module.getOrInsertFunction(
      "corey_rt_run",
      llvm::FunctionType::get(pointer, {pointer, pointer, pointer}, false));
  for (const ExportedFunction &function : functions) {
    std::vector<llvm::Constant *> arguments;
    for (const auto &[name, type, isOutput, anyStrides] : function.arguments)
      arguments.push_back(record({text(name), number(type.getRank()),
                                  number(type.getElementTypeBitWidth() / 8),
                                  number(isOutput), number(anyStrides)}));
    llvm::Constant *info = global(record(
        {program, text(function.name),
         module.getFunction(getInvokeSymbol(function.name)),
         number(static_cast<int64_t>(arguments.size())), array(arguments)}));
    std::string symbol = "corey_" + identifier(function.name);
    module.getFunction(symbol)->setName("corey.host." + function.name);
    std::vector<llvm::Type *> parameters(arguments.size() + 1, pointer);
    auto *made = llvm::Function::Create(
        llvm::FunctionType::get(pointer, parameters, false),
        llvm::Function::ExternalLinkage, symbol, module);
    builder.SetInsertPoint(llvm::BasicBlock::Create(context, "entry", made));
    llvm::Value *list = builder.CreateAlloca(
        pointer,
        number(static_cast<int64_t>(std::max<size_t>(arguments.size(), 1))));
    for (unsigned i = 0; i < arguments.size(); ++i)
      builder.CreateStore(made->getArg(i),
                          builder.CreateConstGEP1_64(pointer, list, i));
    builder.CreateRet(builder.CreateCall(
        run,
        {info, list, made->getArg(static_cast<unsigned>(arguments.size()))}));
  }
}
