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
    func.func @main(%u: tensor<?x?x64xf32>, %delta: tensor<?x?x64xf32>, %A: tensor<64x16xf32>,
                    %B: tensor<?x?x1x16xf32>, %C: tensor<?x?x1x16xf32>) -> tensor<?x?x64xf32> {
      %y = ssm.selective_scan %u, %delta, %A, %B, %C {chunk = #ssm.chunk<runtime = @scan>}
          : tensor<?x?x64xf32>, tensor<?x?x64xf32>, tensor<64x16xf32>,
            tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x64xf32>
      return %y : tensor<?x?x64xf32>
    }
    ```

    becomes

    ```mlir
    func.func @main(%u: tensor<?x?x64xf32>, %delta: tensor<?x?x64xf32>, %A: tensor<64x16xf32>,
                    %B: tensor<?x?x1x16xf32>, %C: tensor<?x?x1x16xf32>) -> tensor<?x?x64xf32> {
      %c0 = arith.constant 0 : index
      %batch = tensor.dim %u, %c0 : tensor<?x?x64xf32>
      %c1 = arith.constant 1 : index
      %length = tensor.dim %u, %c1 : tensor<?x?x64xf32>
      %chunk = ssm.bind_chunk @scan(%batch, %length)
      %y = ssm.selective_scan %u, %delta, %A, %B, %C chunk_size(%chunk)
          : tensor<?x?x64xf32>, tensor<?x?x64xf32>, tensor<64x16xf32>,
            tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x64xf32>
      return %y : tensor<?x?x64xf32>
    }
    ```

    and

    ```mlir
    func.func @main(%x: tensor<1x512x8x64xf32>, %dt: tensor<1x512x8xf32>, %A: tensor<8xf32>,
                    %B: tensor<1x512x1x64xf32>, %C: tensor<1x512x1x64xf32>) -> tensor<1x512x8x64xf32> {
      %y = ssm.ssd %x dt(%dt : tensor<1x512x8xf32>) A(%A : tensor<8xf32>) B(%B) C(%C)
          : tensor<1x512x8x64xf32>, tensor<1x512x1x64xf32>, tensor<1x512x1x64xf32>
          -> tensor<1x512x8x64xf32>
      return %y : tensor<1x512x8x64xf32>
    }
    ```

    becomes, with `policy=entropy observe=true`,

    ```mlir
    func.func @main(%x: tensor<1x512x8x64xf32>, %dt: tensor<1x512x8xf32>, %A: tensor<8xf32>,
                    %B: tensor<1x512x1x64xf32>, %C: tensor<1x512x1x64xf32>) -> tensor<1x512x8x64xf32> {
      %batch = arith.constant 1 : index
      %length = arith.constant 512 : index
      %chunk = ssm.bind_chunk @scan0(%batch, %length) {policy = "entropy"}
      %seen = ssm.observe @scan0 %x : tensor<1x512x8x64xf32>
      %y = ssm.ssd %seen dt(%dt : tensor<1x512x8xf32>) A(%A : tensor<8xf32>) B(%B) C(%C)
          chunk_size(%chunk)
          : tensor<1x512x8x64xf32>, tensor<1x512x1x64xf32>, tensor<1x512x1x64xf32>
          -> tensor<1x512x8x64xf32>
      return %y : tensor<1x512x8x64xf32>
    }
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
    FusionPlan.h): a region has at most one op that is not pointwise, but for a
    `ssm.hadamard` of what an `ssm.rms_norm` makes, whose blocks divide the groups that
    are normalised, of 32768 elements at most; and what lies between the ops of a
    region is used nowhere else. Pointwise ops are moved next to their
    first use beforehand, and what is added to a projection becomes its residual.

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
    passed if it was accepted, missed with a reason if not. The least predicted time
    is sought among all regions there can be: of those, the accepted ones are remarks,
    and pairs of a norm and a transform that stay apart.

    ```mlir
    func.func @main(%u: tensor<?x?x64xf32>, %delta: tensor<?x?x64xf32>, %A: tensor<64x16xf32>,
                    %B: tensor<?x?x1x16xf32>, %C: tensor<?x?x1x16xf32>, %gate: tensor<?x?x64xf32>)
        -> tensor<?x?x64xf32> {
      %dt = ssm.softplus %delta : tensor<?x?x64xf32>
      %y = ssm.selective_scan %u, %dt, %A, %B, %C
          : tensor<?x?x64xf32>, tensor<?x?x64xf32>, tensor<64x16xf32>,
            tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x64xf32>
      %z = ssm.mul %y, %gate : tensor<?x?x64xf32>, tensor<?x?x64xf32>
      return %z : tensor<?x?x64xf32>
    }
    ```

    becomes

    ```mlir
    func.func @main(%u: tensor<?x?x64xf32>, %delta: tensor<?x?x64xf32>, %A: tensor<64x16xf32>,
                    %B: tensor<?x?x1x16xf32>, %C: tensor<?x?x1x16xf32>, %gate: tensor<?x?x64xf32>)
        -> tensor<?x?x64xf32> {
      %0 = ssm.fused ins(%delta, %u, %A, %B, %C, %gate
            : tensor<?x?x64xf32>, tensor<?x?x64xf32>, tensor<64x16xf32>,
              tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32>, tensor<?x?x64xf32>)
          score(<entropy = 0.5, intensity = 0.6076, memory = 0.2686, score = 0.7439, threshold = 0.52>)
          -> tensor<?x?x64xf32> {
      ^bb0(%d: tensor<?x?x64xf32>, %x: tensor<?x?x64xf32>, %a: tensor<64x16xf32>,
           %b: tensor<?x?x1x16xf32>, %c: tensor<?x?x1x16xf32>, %g: tensor<?x?x64xf32>):
        %dt = ssm.softplus %d : tensor<?x?x64xf32>
        %y = ssm.selective_scan %x, %dt, %a, %b, %c
            : tensor<?x?x64xf32>, tensor<?x?x64xf32>, tensor<64x16xf32>,
              tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x64xf32>
        %z = ssm.mul %y, %g : tensor<?x?x64xf32>, tensor<?x?x64xf32>
        ssm.yield %z : tensor<?x?x64xf32>
      }
      return %0 : tensor<?x?x64xf32>
    }
    ```

    The least predicted time finds a kernel where the published score finds none; what
    is added to the projection is its residual with either:

    ```mlir
    func.func @main(%x: tensor<?x64xf32>, %w: tensor<64x64xf32>, %scale: tensor<64xf32>)
        -> tensor<?x64xf32> {
      %0 = ssm.silu %x : tensor<?x64xf32>
      %1 = ssm.mul %0, %scale : tensor<?x64xf32>, tensor<64xf32>
      %2 = ssm.projection %1, %w : tensor<?x64xf32>, tensor<64x64xf32> -> tensor<?x64xf32>
      %3 = ssm.add %2, %x : tensor<?x64xf32>, tensor<?x64xf32>
      return %3 : tensor<?x64xf32>
    }
    ```

    becomes, with `strategy=dp score=physical`,

    ```mlir
    func.func @main(%x: tensor<?x64xf32>, %w: tensor<64x64xf32>, %scale: tensor<64xf32>)
        -> tensor<?x64xf32> {
      %0 = ssm.fused ins(%x, %scale : tensor<?x64xf32>, tensor<64xf32>)
          score(<entropy = 0.5, intensity = 0.02706, memory = 0.0, score = 0.26, threshold = 0.0>)
          -> tensor<?x64xf32> {
      ^bb0(%in: tensor<?x64xf32>, %by: tensor<64xf32>):
        %2 = ssm.silu %in : tensor<?x64xf32>
        %3 = ssm.mul %2, %by : tensor<?x64xf32>, tensor<64xf32>
        ssm.yield %3 : tensor<?x64xf32>
      }
      %1 = ssm.projection %0, %w residual(%x : tensor<?x64xf32>)
          : tensor<?x64xf32>, tensor<64x64xf32> -> tensor<?x64xf32>
      return %1 : tensor<?x64xf32>
    }
    ```

    A norm can end with a Hadamard transform, so that what is normalised is in memory
    in rotated form only:

    ```mlir
    func.func @main(%x: tensor<?x96xf32>, %w: tensor<96xf32>, %gate: tensor<?x96xf32>)
        -> tensor<?x96xf32> {
      %0 = ssm.rms_norm %x, %w : tensor<?x96xf32>, tensor<96xf32> -> tensor<?x96xf32>
      %1 = ssm.mul %0, %gate : tensor<?x96xf32>, tensor<?x96xf32>
      %2 = ssm.hadamard %1 {block = 32 : i64} : tensor<?x96xf32> -> tensor<?x96xf32>
      return %2 : tensor<?x96xf32>
    }
    ```

    becomes, with `strategy=dp score=physical`,

    ```mlir
    func.func @main(%x: tensor<?x96xf32>, %w: tensor<96xf32>, %gate: tensor<?x96xf32>)
        -> tensor<?x96xf32> {
      %0 = ssm.fused ins(%x, %w, %gate : tensor<?x96xf32>, tensor<96xf32>, tensor<?x96xf32>)
          score(<entropy = 0.5, intensity = 0.9219, memory = 0.0, score = 0.5799, threshold = 0.0>)
          -> tensor<?x96xf32> {
      ^bb0(%in: tensor<?x96xf32>, %weight: tensor<96xf32>, %by: tensor<?x96xf32>):
        %1 = ssm.rms_norm %in, %weight : tensor<?x96xf32>, tensor<96xf32> -> tensor<?x96xf32>
        %2 = ssm.mul %1, %by : tensor<?x96xf32>, tensor<?x96xf32>
        %3 = ssm.hadamard %2 {block = 32 : i64} : tensor<?x96xf32> -> tensor<?x96xf32>
        ssm.yield %3 : tensor<?x96xf32>
      }
      return %0 : tensor<?x96xf32>
    }
    ```

    A block that holds scored regions already is left alone.

    Regions that are there already stay as they are, but for an `ssm.observe`, which
    no kernel can have inside: what it observes is made before, by a kernel of its
    own if it was no argument of the region.

    ```mlir
    func.func @main(%x: tensor<?x64xf32>, %scale: tensor<64xf32>) -> tensor<?x64xf32> {
      %y = ssm.fused ins(%x, %scale : tensor<?x64xf32>, tensor<64xf32>) -> tensor<?x64xf32> {
      ^bb0(%in: tensor<?x64xf32>, %by: tensor<64xf32>):
        %0 = ssm.mul %in, %by : tensor<?x64xf32>, tensor<64xf32>
        %seen = ssm.observe @site %0 : tensor<?x64xf32>
        %1 = ssm.silu %seen : tensor<?x64xf32>
        %2 = ssm.add %1, %in : tensor<?x64xf32>, tensor<?x64xf32>
        ssm.yield %2 : tensor<?x64xf32>
      }
      return %y : tensor<?x64xf32>
    }
    ```

    becomes

    ```mlir
    func.func @main(%x: tensor<?x64xf32>, %scale: tensor<64xf32>) -> tensor<?x64xf32> {
      %0 = ssm.mul %x, %scale : tensor<?x64xf32>, tensor<64xf32>
      %seen = ssm.observe @site %0 : tensor<?x64xf32>
      %y = ssm.fused ins(%x, %scale, %seen : tensor<?x64xf32>, tensor<64xf32>, tensor<?x64xf32>)
          -> tensor<?x64xf32> {
      ^bb0(%in: tensor<?x64xf32>, %by: tensor<64xf32>, %product: tensor<?x64xf32>):
        %1 = ssm.silu %product : tensor<?x64xf32>
        %2 = ssm.add %1, %in : tensor<?x64xf32>, tensor<?x64xf32>
        ssm.yield %2 : tensor<?x64xf32>
      }
      return %y : tensor<?x64xf32>
    }
    ```

    Remarks say which values that brings into memory, and of which regions no kernel
    can be made.
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
      %y = ssm.mul %x, %w : tensor<?x64xf32>, tensor<64xf32>
      return %y : tensor<?x64xf32>
    }
    ```

    becomes

    ```mlir
    ssm.weight @w : tensor<64xf32>
    func.func @main(%x: tensor<?x64xf32>, %w: tensor<64xf32> {ssm.weight = "w"}) -> tensor<?x64xf32> {
      %y = ssm.mul %x, %w : tensor<?x64xf32>, tensor<64xf32>
      return %y : tensor<?x64xf32>
    }
    ```
  }];
  let statistics = [
    Statistic<"numArguments", "num-arguments", "Number of weight arguments added">
  ];
}

def SSMAnyStrides : Pass<"ssm-any-strides", "::mlir::ModuleOp"> {
  let summary = "Mark the arguments that are read with whatever strides they have";
  let description = [{
    Tensors of a function have an innermost stride of 1, as kernels load several
    elements at once: others are copied before every call. `dt` and `decay` of
    `ssm.ssd` are loaded one element at a time. An argument of a public function
    that is nothing but such an operand, of whatever scans and inside `ssm.fused` or
    not, is marked `ssm.any_strides`: it becomes a memref whose innermost stride is
    dynamic too, and callers pass it as it lies.

    Whoever writes a program may mark further arguments, and results, which then need
    not be contiguous either. On a GPU `ssm.selective_scan` reads u, delta, z, B and C
    and writes y, and `ssm.causal_conv` reads x and writes y where such tensors lie:
    channel-first ones, say, whose tokens are neighbours in memory. Everything else
    works on copies. The pass leaves those alone: loading several channels at once is
    faster where they are neighbours.

    ```mlir
    func.func @main(%x: tensor<?x?x8x64xf32>, %decay: tensor<?x?x8xf32>, %B: tensor<?x?x1x128xf32>)
        -> tensor<?x?x8x64xf32> {
      %y = ssm.ssd %x decay(%decay : tensor<?x?x8xf32>) B(%B) C(%B)
          : tensor<?x?x8x64xf32>, tensor<?x?x1x128xf32>, tensor<?x?x1x128xf32>
          -> tensor<?x?x8x64xf32>
      return %y : tensor<?x?x8x64xf32>
    }
    ```

    becomes

    ```mlir
    func.func @main(%x: tensor<?x?x8x64xf32>, %decay: tensor<?x?x8xf32> {ssm.any_strides},
                    %B: tensor<?x?x1x128xf32>) -> tensor<?x?x8x64xf32> {
      %y = ssm.ssd %x decay(%decay : tensor<?x?x8xf32>) B(%B) C(%B)
          : tensor<?x?x8x64xf32>, tensor<?x?x1x128xf32>, tensor<?x?x1x128xf32>
          -> tensor<?x?x8x64xf32>
      return %y : tensor<?x?x8x64xf32>
    }
    ```
  }];
  let statistics = [
    Statistic<"numMarked", "num-marked", "Number of arguments it has marked">
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

    ```mlir
    func.func @main(%x: tensor<?x64xf32>, %y: tensor<?x64xf32>) -> tensor<?x64xf32> {
      %z = ssm.add %x, %y : tensor<?x64xf32>, tensor<?x64xf32>
      return %z : tensor<?x64xf32>
    }
    ```

    becomes

    ```mlir
    func.func @main.shapes(%in: memref<?xindex>, %out: memref<?xindex>)
        attributes {ssm.constraints = [[1, 0, 0, 0, ""]]} {
      %c64 = arith.constant 64 : index
      %x = arith.constant 0 : index
      %c0 = arith.constant 0 : index
      %rows = memref.load %in[%c0] : memref<?xindex>
      %c2 = arith.constant 2 : index
      %left = memref.load %in[%c2] : memref<?xindex>
      %c0_1 = arith.constant 0 : index
      %right = memref.load %in[%c0_1] : memref<?xindex>
      %c0_2 = arith.constant 0 : index
      memref.store %rows, %out[%c0_2] : memref<?xindex>
      %c1 = arith.constant 1 : index
      memref.store %c64, %out[%c1] : memref<?xindex>
      %c2_3 = arith.constant 2 : index
      memref.store %left, %out[%c2_3] : memref<?xindex>
      %c3 = arith.constant 3 : index
      memref.store %right, %out[%c3] : memref<?xindex>
      return
    }
    func.func @main(%x: tensor<?x64xf32>, %y: tensor<?x64xf32>) -> tensor<?x64xf32> {
      %z = ssm.add %x, %y : tensor<?x64xf32>, tensor<?x64xf32>
      return %z : tensor<?x64xf32>
    }
    ```

    The run time sizes outputs and refuses inconsistent arguments with it before
    anything runs.
  }];
  let statistics = [
    Statistic<"numConstraints", "num-constraints", "Number of run-time shape constraints">
  ];
  let dependentDialects = ["::mlir::arith::ArithDialect", "::mlir::func::FuncDialect",
                           "::mlir::memref::MemRefDialect", "::mlir::tensor::TensorDialect"];
}

def SSMObserveValues : Pass<"ssm-observe-values", "::mlir::func::FuncOp"> {
  let summary = "Observe every floating-point tensor of a function";
  let description = [{
    Puts an `ssm.observe` behind every floating-point tensor value, arguments
    included, at a site of its own; a value that is observed already keeps its
    site. The sites are `<function>.arg#<i>` for arguments and
    `<function>.<op>#<k>` for the k-th op of a name, `:<i>` following for result
    i > 0. Constants and what is inside an `ssm.fused` are passed over.

    ```mlir
    func.func @main(%x: tensor<?x64xf32>) -> tensor<?x64xf32> {
      %y = ssm.silu %x : tensor<?x64xf32>
      return %y : tensor<?x64xf32>
    }
    ```

    becomes

    ```mlir
    func.func @main(%x: tensor<?x64xf32>) -> tensor<?x64xf32> {
      %0 = ssm.observe @"main.arg#0" %x : tensor<?x64xf32>
      %y = ssm.silu %0 : tensor<?x64xf32>
      %1 = ssm.observe @"main.silu#0" %y : tensor<?x64xf32>
      return %1 : tensor<?x64xf32>
    }
    ```

    `corey-run --profile` runs it on the captured program and writes what was
    measured; `ssm-annotate-stats`, run on the same program, finds the values by
    the same names.
  }];
  let statistics = [
    Statistic<"numObserved", "num-observed", "Number of values it has observed">
  ];
}

def SSMAnnotateStats : Pass<"ssm-annotate-stats", "::mlir::ModuleOp"> {
  let summary = "Attach measured statistics to values";
  let description = [{
    Reads a profile, as `corey-run --profile` writes it, and attaches to every
    value that has an entry its `#ssm.stats`. A site is the name of an `ssm.observe` of the value, or the name that
    `ssm-observe-values` would give it; the module must be the one the profile was
    measured on (for `corey-run`, the captured one: inlined, canonicalized). Other
    members of an entry are ignored. Of a program that ran several times the range,
    mean and variance are over all calls, entropy and kurtosis those of the last. An
    entry without an entropy (`null`: nothing
    finite was seen) says nothing about a value.

    The statistics of an op's result are its attribute `ssm.stats`: of an op with
    one result the `#ssm.stats` itself, else an array with an entry per result,
    `unit` where nothing is known. Those of a function argument are an attribute
    of the argument.

    ```mlir
    func.func @main(%x: tensor<?x64xf32>) -> tensor<?x64xf32> {
      %y = ssm.silu %x : tensor<?x64xf32>
      return %y : tensor<?x64xf32>
    }
    ```

    becomes, with `profile=profile.json` that holds

    ```json
    {"schema": "corey-profile", "version": 1, "values": [
      {"site": "main.arg#0", "entropy": 4.5, "bins": 256, "min": -4.0, "max": 4.5,
       "mean": 0.25, "variance": 1.0, "kurtosis": 3.0},
      {"site": "main.silu#0", "entropy": 3.5, "bins": 256, "min": -0.25, "max": 4.5,
       "mean": 0.5, "variance": 0.75, "kurtosis": 6.5} ]}
    ```

    ```mlir
    func.func @main(%x: tensor<?x64xf32> {ssm.stats = #ssm.stats<entropy = 4.5, bins = 256,
                        min = -4.0, max = 4.5, mean = 0.25, variance = 1.0, kurtosis = 3.0>})
        -> tensor<?x64xf32> {
      %y = ssm.silu %x {ssm.stats = #ssm.stats<entropy = 3.5, bins = 256,
                        min = -0.25, max = 4.5, mean = 0.5, variance = 0.75, kurtosis = 6.5>}
          : tensor<?x64xf32>
      return %y : tensor<?x64xf32>
    }
    ```

    An entry whose site is no value of the module is a warning.
  }];
  let options = [
    Option<"profile", "profile", "std::string", /*default=*/"\"\"",
      "The profile, a JSON file.">
  ];
  let statistics = [
    Statistic<"numAnnotated", "num-annotated", "Number of values that got statistics">,
    Statistic<"numUnmatched", "num-unmatched", "Number of profile entries without a value">
  ];
}

def SSMInsertHadamard : Pass<"ssm-insert-hadamard", "::mlir::func::FuncOp"> {
  let summary = "Rotate the inputs of projections that have outliers";
  let description = [{
    Rewrites `y = x W^T` to `y = (H x) (W H)^T`, H being the symmetric and
    orthonormal block-diagonal Walsh-Hadamard matrix of `ssm.hadamard`: the
    result is the same up to rounding, but what flows into the product has its
    outliers spread over whole blocks. The weight is rotated in f32 and stays f32
    unless `keep-weight-type` rounds it back to its own type. The weight side
    depends on weights alone: `ssm-hoist-weights` moves it out of the function.

    ```mlir
    func.func @main(%x: tensor<?x?x768xf32> {ssm.stats = #ssm.stats<entropy = 2.0, bins = 256,
                        min = -30.0, max = 40.0, mean = 0.0, variance = 1.0, kurtosis = 90.0>},
                    %w: tensor<64x768xf32>) -> tensor<?x?x64xf32> {
      %y = ssm.projection %x, %w : tensor<?x?x768xf32>, tensor<64x768xf32> -> tensor<?x?x64xf32>
      return %y : tensor<?x?x64xf32>
    }
    ```

    becomes

    ```mlir
    func.func @main(%x: tensor<?x?x768xf32> {ssm.stats = #ssm.stats<entropy = 2.0, bins = 256,
                        min = -30.0, max = 40.0, mean = 0.0, variance = 1.0, kurtosis = 90.0>},
                    %w: tensor<64x768xf32>) -> tensor<?x?x64xf32> {
      %0 = ssm.hadamard %x {block = 256 : i64} : tensor<?x?x768xf32> -> tensor<?x?x768xf32>
      %1 = ssm.hadamard %w {block = 256 : i64} : tensor<64x768xf32> -> tensor<64x768xf32>
      %y = ssm.projection %0, %1 : tensor<?x?x768xf32>, tensor<64x768xf32> -> tensor<?x?x64xf32>
      return %y : tensor<?x?x64xf32>
    }
    ```

    Insertion is by demand. A projection marked `ssm.rotate` asks for it and gets
    it in every mode; `mode=all` rotates every projection that can be;
    `mode=stats` (default) rotates where the statistics of `x`
    (`ssm-annotate-stats`) promise something: where

      * its peak-to-rms ratio is at least `min-peak-to-rms`, or its kurtosis at
        least `min-kurtosis` (a normal distribution has 4 to 5 for the number of
        values of an activation, and 3), and
      * the estimated gain of entropy is at least `min-entropy-gain` nats.

    The statistics behind a rotation are not known, they are estimated: sums of
    many coordinates are nearly normal, with the variance `v` of the value, but
    the mean `m` gathers in one coordinate of each block, as `sqrt(block) m`. A
    histogram of `bins` bins over the range of that,
    `r = 9 sqrt(v) + sqrt(block) |m|`, has the entropy
    `min(ln bins, ln(2 pi e) / 2 + ln(sqrt(v) bins / r))`. So an input with a large
    mean is left alone.

    A projection is refused, for every mode, if its weight is quantized, if the
    axis has no power of two above 1 as a factor (or `block` does not divide
    it), or if its input is rotated already. Every decision is a remark of the
    category `ssm-insert-hadamard`.
  }];
  let options = [
    Option<"mode", "mode", "::corey::ssm::HadamardMode",
      /*default=*/"::corey::ssm::HadamardMode::Stats",
      "Which projections to rotate besides those that ask.",
      [{::llvm::cl::values(
        clEnumValN(::corey::ssm::HadamardMode::None, "none", "No others."),
        clEnumValN(::corey::ssm::HadamardMode::All, "all", "Every one that can be."),
        clEnumValN(::corey::ssm::HadamardMode::Stats, "stats",
                   "Those whose input's statistics promise a gain (default)."))}]>,
    Option<"block", "block", "int64_t", /*default=*/"0",
      "Size of a block; 0 (default) takes the largest power of two that divides "
      "the axis, up to max-block.">,
    Option<"maxBlock", "max-block", "int64_t", /*default=*/"1024",
      "Largest block that is chosen.">,
    Option<"minPeakToRms", "min-peak-to-rms", "double", /*default=*/"8.0",
      "Peak-to-rms ratio from which an input has outliers.">,
    Option<"minKurtosis", "min-kurtosis", "double", /*default=*/"6.0",
      "Kurtosis from which an input has outliers.">,
    Option<"minEntropyGain", "min-entropy-gain", "double", /*default=*/"0.0",
      "Estimated gain of entropy, in nats, from which a rotation pays.">,
    Option<"keepWeightType", "keep-weight-type", "bool", /*default=*/"false",
      "Round rotated weights to the type of the weight; half the memory of a "
      "16-bit weight, at the cost of that rounding.">
  ];
  let statistics = [
    Statistic<"numPairsInserted", "num-pairs-inserted", "Number of projections rotated">,
    Statistic<"numPairsRejected", "num-pairs-rejected", "Number of projections looked at and left alone">
  ];
}

def SSMFoldHadamard : Pass<"ssm-fold-hadamard", "::mlir::ModuleOp"> {
  let summary = "Move rotations over linear ops until they cancel";
  let description = [{
    * Two transforms of one block in a row are nothing.
    * A transform of a projection's result becomes one of its weight's rows, of
      its bias, and of its residual: `H (W x + b + r) = (H W) x + H b + H r`. With
      a residual this is done only where the residual is a transform itself, so
      that the two cancel. A projection with other uses, or a quantized or
      computed weight, stays. The rows are rotated in f32, and the weight stays
      f32.
    * Sums, differences, negations and multiples of transforms of one block
      become the transform of one: `H a + H b = H (a + b)`.

    Only linear ops are crossed; an activation, a norm, a convolution, a gate or a
    scan ends a rotation.

    ```mlir
    ssm.weight @w : tensor<128x64xf32>
    func.func @main(%x: tensor<?x64xf32>) -> tensor<?x128xf32> {
      %w = ssm.get_weight @w : tensor<128x64xf32>
      %0 = ssm.projection %x, %w : tensor<?x64xf32>, tensor<128x64xf32> -> tensor<?x128xf32>
      %1 = ssm.hadamard %0 {block = 128 : i64} : tensor<?x128xf32> -> tensor<?x128xf32>
      return %1 : tensor<?x128xf32>
    }
    ```

    becomes

    ```mlir
    ssm.weight @w : tensor<128x64xf32>
    func.func @main(%x: tensor<?x64xf32>) -> tensor<?x128xf32> {
      %w = ssm.get_weight @w : tensor<128x64xf32>
      %e = tensor.empty() : tensor<64x128xf32>
      %t = linalg.transpose ins(%w : tensor<128x64xf32>) outs(%e : tensor<64x128xf32>) permutation = [1, 0]
      %h = ssm.hadamard %t {block = 128 : i64} : tensor<64x128xf32> -> tensor<64x128xf32>
      %f = tensor.empty() : tensor<128x64xf32>
      %r = linalg.transpose ins(%h : tensor<64x128xf32>) outs(%f : tensor<128x64xf32>) permutation = [1, 0]
      %0 = ssm.projection %x, %r : tensor<?x64xf32>, tensor<128x64xf32> -> tensor<?x128xf32>
      return %0 : tensor<?x128xf32>
    }
    ```

    and two rotations meet over a sum:

    ```mlir
    func.func @main(%x: tensor<?x128xf32>, %y: tensor<?x128xf32>) -> tensor<?x128xf32> {
      %0 = ssm.hadamard %x {block = 128 : i64} : tensor<?x128xf32> -> tensor<?x128xf32>
      %1 = ssm.hadamard %y {block = 128 : i64} : tensor<?x128xf32> -> tensor<?x128xf32>
      %2 = ssm.sub %0, %1 : tensor<?x128xf32>, tensor<?x128xf32>
      %3 = ssm.hadamard %2 {block = 128 : i64} : tensor<?x128xf32> -> tensor<?x128xf32>
      return %3 : tensor<?x128xf32>
    }
    ```

    becomes

    ```mlir
    func.func @main(%x: tensor<?x128xf32>, %y: tensor<?x128xf32>) -> tensor<?x128xf32> {
      %0 = ssm.sub %x, %y : tensor<?x128xf32>, tensor<?x128xf32>
      return %0 : tensor<?x128xf32>
    }
    ```

    What it adds on the weight side is left to `ssm-hoist-weights`; if the module
    has been through that pass, it is hoisted at once.
  }];
  let statistics = [
    Statistic<"numCancelled", "num-cancelled", "Number of pairs that cancelled">,
    Statistic<"numFolded", "num-folded", "Number of transforms moved into weights">,
    Statistic<"numMerged", "num-merged", "Number of linear ops that transforms were moved over">
  ];
  let dependentDialects = ["::mlir::linalg::LinalgDialect", "::mlir::tensor::TensorDialect",
                           "::mlir::func::FuncDialect"];
}

def SSMHoistWeights : Pass<"ssm-hoist-weights", "::mlir::ModuleOp"> {
  let summary = "Compute what depends on weights alone once, before anything runs";
  let description = [{
    Moves every computation of public functions whose operands are weights and
    constants alone into a function `@ssm.prepare`. Each value that is left to
    use becomes a weight of its own: a declaration marked `ssm.prepared`, and the
    result of `@ssm.prepare` marked `ssm.prepares` with its symbol. The run time
    calls `@ssm.prepare` once the weights of the file are bound, and again when
    one is bound anew; calls in between do no work on weights.

    ```mlir
    ssm.weight @A_log : tensor<64x16xf32>
    func.func @main(%u: tensor<?x?x64xf32>, %delta: tensor<?x?x64xf32>, %B: tensor<?x?x1x16xf32>,
                    %C: tensor<?x?x1x16xf32>) -> tensor<?x?x64xf32> {
      %0 = ssm.get_weight @A_log : tensor<64x16xf32>
      %1 = ssm.exp %0 : tensor<64x16xf32>
      %A = ssm.neg %1 : tensor<64x16xf32>
      %y = ssm.selective_scan %u, %delta, %A, %B, %C
          : tensor<?x?x64xf32>, tensor<?x?x64xf32>, tensor<64x16xf32>,
            tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x64xf32>
      return %y : tensor<?x?x64xf32>
    }
    ```

    becomes

    ```mlir
    ssm.weight @A_log : tensor<64x16xf32>
    ssm.weight @prepared0 {ssm.prepared} : tensor<64x16xf32>
    func.func @ssm.prepare() -> (tensor<64x16xf32> {ssm.prepares = "prepared0"}) {
      %0 = ssm.get_weight @A_log : tensor<64x16xf32>
      %1 = ssm.exp %0 : tensor<64x16xf32>
      %2 = ssm.neg %1 : tensor<64x16xf32>
      return %2 : tensor<64x16xf32>
    }
    func.func @main(%u: tensor<?x?x64xf32>, %delta: tensor<?x?x64xf32>, %B: tensor<?x?x1x16xf32>,
                    %C: tensor<?x?x1x16xf32>) -> tensor<?x?x64xf32> {
      %A = ssm.get_weight @prepared0 : tensor<64x16xf32>
      %y = ssm.selective_scan %u, %delta, %A, %B, %C
          : tensor<?x?x64xf32>, tensor<?x?x64xf32>, tensor<64x16xf32>,
            tensor<?x?x1x16xf32>, tensor<?x?x1x16xf32> -> tensor<?x?x64xf32>
      return %y : tensor<?x?x64xf32>
    }
    ```

    Functions share what they have in common. Slices, reshapes and plain
    constants cost nothing where they are and stay there; what they look at is
    prepared. Running the pass again extends `@ssm.prepare`, and drops from it
    what nothing uses any more.
  }];
  let statistics = [
    Statistic<"numHoisted", "num-hoisted", "Number of ops moved out of functions">,
    Statistic<"numPrepared", "num-prepared", "Number of prepared weights made">
  ];
  let dependentDialects = ["::mlir::func::FuncDialect"];
}

#endif // COREY_DIALECT_SSM_TRANSFORMS_PASSES_TD
