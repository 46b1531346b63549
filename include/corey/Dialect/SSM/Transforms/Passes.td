//===- Passes.td - Transformations of the ssm dialect ------*- tablegen -*-===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#ifndef COREY_DIALECT_SSM_TRANSFORMS_PASSES_TD
#define COREY_DIALECT_SSM_TRANSFORMS_PASSES_TD

include "mlir/Pass/PassBase.td"

def SSMBindChunks : Pass<"ssm-bind-chunks", "::mlir::ModuleOp"> {
  let summary = "Make the chunk of every scan a value bound at run time";
  let description = [{
    Replaces `#ssm.chunk<runtime = @site>` by the result of an `ssm.bind_chunk`
    on that site, and gives every scan that names neither a site nor a constant
    a site of its own (`scan0`, `scan1`, ... in program order). Constants stay.
    Afterwards a chunk is an SSA value, and nothing downstream knows who chose it.

    A policy may decide on statistics of the scan's input: an `ssm.observe` on the
    site's name feeds them to it. With `observe` one is put before every scan that
    is bound, unless there is one already.

    ```mlir
    %y = ssm.selective_scan %u, %delta, %A, %B, %C {chunk = #ssm.chunk<runtime = @scan>} : ...
    ```

    becomes

    ```mlir
    %0 = tensor.dim %u, %c0 : tensor<?x?x64xf32>
    %1 = tensor.dim %u, %c1 : tensor<?x?x64xf32>
    %2 = ssm.bind_chunk @scan(%0, %1)
    %y = ssm.selective_scan %u, %delta, %A, %B, %C chunk_size(%2) : ...
    ```
  }];
  let options = [
    Option<"policy", "policy", "std::string", /*default=*/"\"\"",
      "Policy recorded at every site it binds; empty (default) leaves the choice to the run time.">,
    Option<"observe", "observe", "bool", /*default=*/"false",
      "Observe the input of every scan it binds, for policies that decide on statistics.">
  ];
  let statistics = [
    Statistic<"numBoundSites", "num-bound-sites", "Number of scans bound to a run-time site">,
    Statistic<"numStaticChunks", "num-static-chunks", "Number of scans with a constant chunk">,
    Statistic<"numObserved", "num-observed", "Number of scans whose input it has observed">
  ];
  let dependentDialects = ["::mlir::tensor::TensorDialect", "::mlir::arith::ArithDialect"];
}

def SSMFuse : Pass<"ssm-fuse", "::mlir::func::FuncOp"> {
  let summary = "Group neighbouring ops into regions that become one kernel";
  let description = [{
    Goes over the ops of every block in order and groups neighbours into
    `ssm.fused`. What no emitter could make one kernel of is never considered (see
    FusionPlan.h): a region has at most one op that is not pointwise, and what lies
    between its ops is used nowhere else. Pointwise ops are moved next to their
    first use beforehand.

    `score=paper` is the published score, normalised over the chain,

        S(R) = alpha H + beta AI - gamma M (+ depth bonus),   accepted above tau

    with H the mean entropy of the ops (from `ssm.stats`; ops without are left
    out, and without any H is 0.5), AI their arithmetic intensity and M their
    traffic. `score=physical` is the share of the time of separate kernels that one
    kernel saves on `machine`, accepted above 0.

    Strategies: `none`; `static`, groups of three; `arithmetic`, `entropy`: one
    greedy pass, without and with H; `dp`, the best of all partitions: the largest
    sum of scores (`paper`), or the least predicted time (`physical`).

    Every candidate is a remark of category `ssm-fuse` with the terms of its score:
    passed if it was accepted, missed with a reason if not.

    ```mlir
    %0 = ssm.softplus %dt : tensor<?x?x64xf32>
    %y = ssm.selective_scan %u, %0, %A, %B, %C : ...
    %1 = ssm.mul %y, %g : tensor<?x?x64xf32>, tensor<?x?x64xf32>
    ```

    becomes

    ```mlir
    %1 = ssm.fused ins(%dt, %u, %A, %B, %C, %g : ...) score(#ssm.score<...>) -> tensor<?x?x64xf32> {
    ^bb0(...):
      %0 = ssm.softplus ...
      %y = ssm.selective_scan ...
      %1 = ssm.mul ...
      ssm.yield %1 : tensor<?x?x64xf32>
    }
    ```

    A block that holds scored regions already is left alone.
  }];
  let options = [
    Option<"strategy", "strategy", "std::string", /*default=*/"\"entropy\"",
      "none, static, arithmetic, entropy (default) or dp.">,
    Option<"score", "score", "std::string", /*default=*/"\"paper\"",
      "paper (default) or physical.">,
    Option<"machine", "machine", "std::string", /*default=*/"\"cpu\"",
      "Rates of the physical score, and limits: cpu (default) or h200.">,
    Option<"alpha", "alpha", "double", /*default=*/"0.45", "Weight of the entropy.">,
    Option<"beta", "beta", "double", /*default=*/"0.35", "Weight of the arithmetic intensity.">,
    Option<"gamma", "gamma", "double", /*default=*/"0.20", "Weight of the memory traffic.">,
    Option<"tau", "tau", "double", /*default=*/"0.52", "Score above which a region is accepted.">,
    Option<"depthBonus", "depth-bonus", "bool", /*default=*/"true",
      "Add min(0.18 (n - 1), 0.36) to the score of n ops, as the published program does.">,
    Option<"maxRegisters", "max-registers", "double", /*default=*/"0",
      "Registers that the ops of a region may need together; 0 takes the machine's.">,
    Option<"maxShared", "max-shared", "double", /*default=*/"0",
      "Bytes of shared memory that the ops of a region may need together; 0 takes the machine's.">,
    Option<"dynamicSize", "dynamic-size", "int64_t", /*default=*/"1024",
      "What a dynamic size counts as.">
  ];
  let statistics = [
    Statistic<"numRegions", "num-regions", "Number of regions formed">,
    Statistic<"numFusedOps", "num-fused-ops", "Number of ops in them">,
    Statistic<"numRejected", "num-rejected", "Number of candidates rejected">
  ];
  let dependentDialects = ["::mlir::arith::ArithDialect", "::mlir::tensor::TensorDialect"];
}

def SSMWeightsToArguments : Pass<"ssm-weights-to-arguments", "::mlir::ModuleOp"> {
  let summary = "Pass weights to the functions that use them";
  let description = [{
    Gives every public function one trailing argument per weight it uses, marked
    `ssm.weight = "symbol"`, and replaces `ssm.get_weight` by it. The
    `ssm.weight` declarations stay for the run time to bind.

    ```mlir
    ssm.weight @w : tensor<64xf32>
    func.func @main(%x: tensor<?x64xf32>) -> tensor<?x64xf32> {
      %w = ssm.get_weight @w : tensor<64xf32>
      ...
    ```

    becomes

    ```mlir
    ssm.weight @w : tensor<64xf32>
    func.func @main(%x: tensor<?x64xf32>, %w: tensor<64xf32> {ssm.weight = "w"}) -> tensor<?x64xf32> {
      ...
    ```
  }];
  let statistics = [
    Statistic<"numArguments", "num-arguments", "Number of weight arguments added">
  ];
}

def SSMShapeFunctions : Pass<"ssm-shape-functions", "::mlir::ModuleOp"> {
  let summary = "Add a function that computes result shapes and checks arguments";
  let description = [{
    For every public function `@f` on tensors adds `@f.shapes(%in, %out)`: `%in`
    holds the dimensions of the arguments one after another, `%out` receives
    those of the results, followed by one pair of sizes per constraint that the
    types leave open. Both numbers of a pair must be equal for `@f` to run; what
    they stand for is listed in the attribute `ssm.constraints`, as
    `[argument, dimension, argument, dimension, "message"]` with -1 where a side
    is not simply a dimension of an argument. A message of `>=` marks a bound:
    the first size must be at least what a slice needs, and the second is the
    larger of the two. Calls must have been inlined.

    The run time sizes outputs and refuses inconsistent arguments with it before
    anything runs.
  }];
  let statistics = [
    Statistic<"numConstraints", "num-constraints", "Number of run-time shape constraints">
  ];
  let dependentDialects = ["::mlir::arith::ArithDialect", "::mlir::func::FuncDialect",
                           "::mlir::memref::MemRefDialect", "::mlir::tensor::TensorDialect"];
}

#endif // COREY_DIALECT_SSM_TRANSFORMS_PASSES_TD
