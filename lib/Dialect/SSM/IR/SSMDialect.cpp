//===- SSMDialect.cpp - The ssm dialect -----------------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Dialect/SSM/IR/SSMDialect.h"
#include "corey/Dialect/SSM/IR/SSMAttrs.h"
#include "corey/Dialect/SSM/IR/SSMOps.h"
#include "mlir/IR/DialectImplementation.h"
#include "mlir/Transforms/InliningUtils.h"
#include "llvm/ADT/TypeSwitch.h"

using namespace mlir;
using namespace corey::ssm;

#include "corey/Dialect/SSM/IR/SSMDialect.cpp.inc"
#include "corey/Dialect/SSM/IR/SSMEnums.cpp.inc"
#define GET_ATTRDEF_CLASSES
#include "corey/Dialect/SSM/IR/SSMAttrs.cpp.inc"
#include "corey/Dialect/SSM/IR/SSMInterfaces.cpp.inc"

//===----------------------------------------------------------------------===//
// Bytecode version
//===----------------------------------------------------------------------===//

namespace {
struct SSMBytecodeInterface : public BytecodeDialectInterface {
  explicit SSMBytecodeInterface(Dialect *dialect)
      : BytecodeDialectInterface(dialect) {}

  void writeVersion(DialectBytecodeWriter &writer) const override {
    SSMDialectVersion version = SSMDialectVersion::getCurrent();
    writer.writeVarInt(version.majorVersion);
    writer.writeVarInt(version.minorVersion);
  }

  std::unique_ptr<DialectVersion>
  readVersion(DialectBytecodeReader &reader) const override {
    uint64_t majorVersion, minorVersion;
    if (failed(reader.readVarInt(majorVersion)) ||
        failed(reader.readVarInt(minorVersion)))
      return nullptr;
    SSMDialectVersion current = SSMDialectVersion::getCurrent();
    if (majorVersion != current.majorVersion ||
        minorVersion > current.minorVersion) {
      reader.emitError() << "expected ssm dialect version "
                         << current.majorVersion << "." << current.minorVersion
                         << " or an older minor version, got " << majorVersion
                         << "." << minorVersion;
      return nullptr;
    }
    return std::make_unique<SSMDialectVersion>(majorVersion, minorVersion);
  }
};

/// Every op may be inlined anywhere: none looks at what is around it.
struct SSMInlinerInterface : public DialectInlinerInterface {
  explicit SSMInlinerInterface(Dialect *dialect)
      : DialectInlinerInterface(dialect) {}

  bool isLegalToInline(Operation *, Region *, bool,
                       IRMapping &) const override {
    return true;
  }
  bool isLegalToInline(Region *, Region *, bool, IRMapping &) const override {
    return true;
  }
};
} // namespace

void SSMDialect::initialize() {
  addOperations<
#define GET_OP_LIST
#include "corey/Dialect/SSM/IR/SSMOps.cpp.inc"
      >();
  addAttributes<
#define GET_ATTRDEF_LIST
#include "corey/Dialect/SSM/IR/SSMAttrs.cpp.inc"
      >();
  addInterfaces<SSMBytecodeInterface, SSMInlinerInterface>();
}

//===----------------------------------------------------------------------===//
// ChunkAttr
//===----------------------------------------------------------------------===//

Attribute ChunkAttr::parse(AsmParser &parser, Type) {
  SMLoc loc = parser.getCurrentLocation();
  StringRef keyword;
  int64_t size = 0;
  FlatSymbolRefAttr site;
  if (parser.parseLess() || parser.parseKeyword(&keyword) ||
      parser.parseEqual())
    return {};
  if (keyword == "static") {
    if (parser.parseInteger(size))
      return {};
  } else if (keyword == "runtime") {
    if (parser.parseAttribute(site))
      return {};
  } else {
    parser.emitError(loc) << "expected 'static' or 'runtime', got '" << keyword
                          << "'";
    return {};
  }
  if (parser.parseGreater())
    return {};
  return parser.getChecked<ChunkAttr>(loc, parser.getContext(), size, site);
}

void ChunkAttr::print(AsmPrinter &printer) const {
  if (isStatic())
    printer << "<static = " << getSize() << ">";
  else
    printer << "<runtime = " << getSite() << ">";
}

LogicalResult ChunkAttr::verify(function_ref<InFlightDiagnostic()> emitError,
                                int64_t size, FlatSymbolRefAttr site) {
  if (!site && size < 1)
    return emitError() << "expected a chunk of at least 1 token, got " << size;
  return success();
}

//===----------------------------------------------------------------------===//
// StatsAttr
//===----------------------------------------------------------------------===//

LogicalResult StatsAttr::verify(function_ref<InFlightDiagnostic()> emitError,
                                APFloat entropy, int64_t bins, APFloat min,
                                APFloat max, APFloat mean, APFloat variance,
                                APFloat kurtosis) {
  if (bins < 2 || bins > 65536)
    return emitError() << "expected 2 to 65536 bins, got " << bins;
  if (!(entropy.convertToDouble() >= 0))
    return emitError() << "expected a non-negative entropy, got "
                       << entropy.convertToDouble();
  if (!(min.convertToDouble() <= max.convertToDouble()))
    return emitError() << "expected min <= max, got " << min.convertToDouble()
                       << " and " << max.convertToDouble();
  if (!(variance.convertToDouble() >= 0))
    return emitError() << "expected a non-negative variance, got "
                       << variance.convertToDouble();
  return success();
}
