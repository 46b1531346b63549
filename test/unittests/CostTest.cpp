//===- CostTest.cpp - Costs that fusion reads off ops ---------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//
//
// FusableOpInterface: arithmetic by unit and traffic of every kind of op, with
// the numbers worked out by hand.
//
//===----------------------------------------------------------------------===//

#include "corey/Dialect/SSM/IR/SSMOps.h"
#include "corey/InitAll.h"
#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/IR/MLIRContext.h"
#include "mlir/Parser/Parser.h"
#include "gtest/gtest.h"

using namespace corey::ssm;

namespace {
class CostTest : public ::testing::Test {
protected:
  CostTest() {
    mlir::DialectRegistry registry;
    corey::registerAllDialects(registry);
    context.appendDialectRegistry(registry);
  }

  /// Parses a function and returns its first op with a cost.
  FusableOpInterface parse(const std::string &text) {
    module = mlir::parseSourceString<mlir::ModuleOp>(text, &context);
    EXPECT_TRUE(module);
    FusableOpInterface found;
    module->walk<mlir::WalkOrder::PreOrder>([&](FusableOpInterface op) {
      if (!found)
        found = op;
    });
    EXPECT_TRUE(found);
    return found;
  }

  mlir::MLIRContext context;
  mlir::OwningOpRef<mlir::ModuleOp> module;
};
} // namespace

TEST_F(CostTest, Elementwise) {
  // 2 x 3 x 8 elements with the dynamic sizes taken as 2 and 2.
  auto op =
      parse("func.func @f(%x: tensor<?x3x8xbf16>) -> tensor<?x3x8xbf16> {\n"
            "  %y = ssm.silu %x : tensor<?x3x8xbf16>\n  return %y : "
            "tensor<?x3x8xbf16>\n}");
  OpCost cost = op.getCost(2);
  EXPECT_TRUE(op.isPointwise());
  EXPECT_EQ(cost.fma, 48);
  EXPECT_EQ(cost.transcendental, 96);
  EXPECT_EQ(cost.matrix, 0);
  EXPECT_EQ(cost.bytesRead, 96);
  EXPECT_EQ(cost.bytesWritten, 96);
}

TEST_F(CostTest, CastMovesBytesOnly) {
  OpCost cost = parse("func.func @f(%x: tensor<4x4xf16>) -> tensor<4x4xf32> {\n"
                      "  %y = ssm.cast %x : tensor<4x4xf16> to "
                      "tensor<4x4xf32>\n  return %y : tensor<4x4xf32>\n}")
                    .getCost(1);
  EXPECT_EQ(cost.fma, 0);
  EXPECT_EQ(cost.transcendental, 0);
  EXPECT_EQ(cost.bytesRead, 32);
  EXPECT_EQ(cost.bytesWritten, 64);
}

TEST_F(CostTest, Projection) {
  // 2 x 5 rows of 16 inputs and 6 outputs, with a bias.
  auto op = parse("func.func @f(%x: tensor<2x5x16xf32>, %w: tensor<6x16xf16>, "
                  "%b: tensor<6xf32>) -> tensor<2x5x6xf32> {\n"
                  "  %y = ssm.projection %x, %w bias(%b : tensor<6xf32>) : "
                  "tensor<2x5x16xf32>, tensor<6x16xf16> -> tensor<2x5x6xf32>\n"
                  "  return %y : tensor<2x5x6xf32>\n}");
  OpCost cost = op.getCost(1);
  EXPECT_FALSE(op.isPointwise());
  EXPECT_EQ(cost.matrix, 2 * 5 * 16 * 6);
  EXPECT_EQ(cost.fma, 2 * 5 * 6);
  EXPECT_EQ(cost.bytesRead, 4 * 160 + 2 * 96 + 4 * 6);
  EXPECT_EQ(cost.bytesWritten, 4 * 60);
}

TEST_F(CostTest, SelectiveScanCountsAnExponentialPerState) {
  auto text = [](const char *attributes) {
    return std::string(
               "func.func @f(%u: tensor<1x?x8xf32>, %a: tensor<8x4xf32>, %b: "
               "tensor<1x?x1x4xf32>) -> tensor<1x?x8xf32> {\n"
               "  %y = ssm.selective_scan %u, %u, %a, %b, %b ") +
           attributes +
           " : tensor<1x?x8xf32>, tensor<1x?x8xf32>, tensor<8x4xf32>, "
           "tensor<1x?x1x4xf32>, tensor<1x?x1x4xf32> -> tensor<1x?x8xf32>\n"
           "  return %y : tensor<1x?x8xf32>\n}";
  };
  // 10 tokens of 8 channels of 4 states.
  EXPECT_EQ(parse(text("")).getCost(10).transcendental, 320);
  EXPECT_EQ(parse(text("{delta_softplus}")).getCost(10).transcendental,
            320 + 160);
}

TEST_F(CostTest, SSDIsMatrixWork) {
  // 128 tokens, 2 heads of 16 channels, 32 states, tiles of 64.
  OpCost cost =
      parse(
          "func.func @f(%x: tensor<1x?x2x16xf32>, %dt: tensor<1x?x2xf32>, %a: "
          "tensor<2xf32>, %b: tensor<1x?x1x32xf32>) -> tensor<1x?x2x16xf32> {\n"
          "  %y = ssm.ssd %x dt(%dt : tensor<1x?x2xf32>) A(%a : tensor<2xf32>) "
          "B(%b) C(%b) {tile = 64 : i64}\n"
          "      : tensor<1x?x2x16xf32>, tensor<1x?x1x32xf32>, "
          "tensor<1x?x1x32xf32> -> tensor<1x?x2x16xf32>\n"
          "  return %y : tensor<1x?x2x16xf32>\n}")
          .getCost(128);
  EXPECT_EQ(cost.matrix, 128 * 32 * (2 * 32 + 32));
  EXPECT_EQ(cost.transcendental, 128 * 2 * 32);
}

TEST_F(CostTest, HadamardGrowsWithTheLogarithm) {
  OpCost cost =
      parse("func.func @f(%x: tensor<3x64xf32>) -> tensor<3x64xf32> {\n"
            "  %y = ssm.hadamard %x {block = 16 : i64} : tensor<3x64xf32> -> "
            "tensor<3x64xf32>\n"
            "  return %y : tensor<3x64xf32>\n}")
          .getCost(1);
  EXPECT_EQ(cost.fma, 3 * 64 * (4 + 1));
}

TEST_F(CostTest, FusedSumsArithmeticAndKeepsIntermediatesOnChip) {
  auto op = parse("func.func @f(%x: tensor<4x8xf32>, %v: tensor<8xf32>) -> "
                  "tensor<4x8xf32> {\n"
                  "  %y = ssm.fused ins(%x, %v : tensor<4x8xf32>, "
                  "tensor<8xf32>) -> tensor<4x8xf32> {\n"
                  "  ^bb0(%a: tensor<4x8xf32>, %b: tensor<8xf32>):\n"
                  "    %0 = ssm.mul %a, %b : tensor<4x8xf32>, tensor<8xf32>\n"
                  "    %1 = ssm.exp %0 : tensor<4x8xf32>\n    ssm.yield %1 : "
                  "tensor<4x8xf32>\n  }\n"
                  "  return %y : tensor<4x8xf32>\n}");
  OpCost cost = op.getCost(1);
  EXPECT_EQ(cost.fma, 64);
  EXPECT_EQ(cost.transcendental, 32);
  EXPECT_EQ(cost.bytesRead, 4 * (32 + 8));
  EXPECT_EQ(cost.bytesWritten, 4 * 32);
}

TEST_F(CostTest, ScalarsAndVectorsShareAnEmission) {
  auto op = parse("func.func @f(%x: tensor<4xf32>) -> tensor<4xf32> {\n"
                  "  %y = ssm.scale %x by 3.0 : tensor<4xf32>\n  return %y : "
                  "tensor<4xf32>\n}");
  mlir::OpBuilder builder(op);
  mlir::Location loc = op.getLoc();
  for (mlir::Type type :
       {mlir::Type(builder.getF32Type()),
        mlir::Type(mlir::VectorType::get({8}, builder.getF32Type()))}) {
    mlir::Value in = mlir::arith::ConstantOp::create(builder, loc,
                                                     builder.getZeroAttr(type));
    mlir::Value out = op.emitScalar(builder, loc, in);
    EXPECT_EQ(out.getType(), type);
    EXPECT_TRUE(out.getDefiningOp<mlir::arith::MulFOp>());
  }
}
