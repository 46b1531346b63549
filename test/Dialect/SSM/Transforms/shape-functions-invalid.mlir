// What ssm-shape-functions refuses.

// RUN: corey-opt %s --ssm-shape-functions --split-input-file --verify-diagnostics

// expected-error @below {{'func.func' op expected a body of one block}}
func.func @blocks(%x: tensor<?xf32>) -> tensor<?xf32> {
  cf.br ^bb1
^bb1:
  return %x : tensor<?xf32>
}

// -----

// expected-error @below {{'func.func' op expected result 1 to be a ranked tensor, got 'index'}}
func.func @scalar(%x: tensor<?xf32>, %n: index) -> (tensor<?xf32>, index) {
  return %x, %n : tensor<?xf32>, index
}

// -----

// expected-error @below {{'func.func' op expected result 0 to be a ranked tensor, got 'tensor<*xf32>'}}
func.func @unranked(%x: tensor<*xf32>) -> tensor<*xf32> {
  return %x : tensor<*xf32>
}

// -----

func.func private @opaque(tensor<?xf32>) -> tensor<?xf32>
func.func @call(%x: tensor<?xf32>) -> tensor<?xf32> {
  // expected-error @below {{'func.call' op expected calls that can be inlined, got one of @opaque}}
  %y = func.call @opaque(%x) : (tensor<?xf32>) -> tensor<?xf32>
  return %y : tensor<?xf32>
}

// -----

// A size out of the contents of an argument.
// expected-error @below {{'func.func' op expected result shapes to follow from argument shapes, got a shape that depends on 'tensor.extract'}}
func.func @data(%x: tensor<index>) -> tensor<?xf32> {
  %n = tensor.extract %x[] : tensor<index>
  %e = tensor.empty(%n) : tensor<?xf32>
  return %e : tensor<?xf32>
}

// -----

// expected-error @below {{'func.func' op expected result shapes to follow from argument shapes, got a shape that depends on 'ssm.bind_chunk'}}
func.func @chunk(%x: tensor<?x?xf32>) -> tensor<?xf32> {
  %c0 = arith.constant 0 : index
  %n = tensor.dim %x, %c0 : tensor<?x?xf32>
  %k = ssm.bind_chunk @scan(%n, %n)
  %e = tensor.empty(%k) : tensor<?xf32>
  return %e : tensor<?xf32>
}

// -----

// expected-error @below {{'func.func' op expected result shapes to follow from argument shapes, got a shape that depends on the value of argument 1}}
func.func @argument(%x: tensor<?xf32>, %n: index) -> tensor<?xf32> {
  %e = tensor.empty(%n) : tensor<?xf32>
  return %e : tensor<?xf32>
}

// -----

// expected-error @below {{'func.func' op expected result shapes to follow from argument shapes, got a shape that depends on the value of argument 0}}
func.func @arithmetic(%n: index) -> tensor<?xf32> {
  %m = arith.addi %n, %n : index
  %e = tensor.empty(%m) : tensor<?xf32>
  return %e : tensor<?xf32>
}

// -----

// expected-error @below {{'func.func' op expected result shapes to follow from argument shapes, got a shape that depends on the value of argument 1}}
func.func @dimension(%x: tensor<?xf32>, %n: index) -> tensor<?xf32> {
  %m = tensor.dim %x, %n : tensor<?xf32>
  %e = tensor.empty(%m) : tensor<?xf32>
  return %e : tensor<?xf32>
}

// -----

func.func private @taken.shapes()
// expected-error @below {{'func.func' op expected the name of its shape function to be free, got another symbol @taken.shapes}}
func.func @taken(%x: tensor<?xf32>) -> tensor<?xf32> {
  return %x : tensor<?xf32>
}

// -----

// Names that the lowering needs.
// expected-error @below {{'func.func' op expected a name that does not start with 'corey_rt_', got 'corey_rt_malloc'}}
func.func @corey_rt_malloc(%x: tensor<?xf32>) -> tensor<?xf32> {
  return %x : tensor<?xf32>
}

// -----

// expected-error @below {{'func.func' op expected a name other than that of an allocation function, got 'free'}}
func.func @free(%x: tensor<?xf32>) -> tensor<?xf32> {
  return %x : tensor<?xf32>
}

// -----

// Sizes that are made inside control flow.
func.func @inside(%x: tensor<?x8xf32>, %n: tensor<4xi32>) -> tensor<4xi32> {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %c4 = arith.constant 4 : index
  scf.for %i = %c0 to %c4 step %c1 {
    %k = tensor.extract_slice %x[0, 0] [%i, 8] [1, 1] : tensor<?x8xf32> to tensor<?x8xf32>
    // expected-error @below {{'ssm.add' op expected operands of static shape inside control flow, got sizes that only a run would tell}}
    %s = ssm.add %k, %x : tensor<?x8xf32>, tensor<?x8xf32>
    %o = ssm.observe @o %s : tensor<?x8xf32>
  }
  return %n : tensor<4xi32>
}
