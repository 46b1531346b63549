// RUN: corey-opt %s --convert-ssm-to-gpu --verify-diagnostics

func.func @too_large(%x: tensor<?x65536xf32>) -> tensor<?x65536xf32> {
  // expected-error @+1 {{expected 'block' to be at most 32768 on a GPU, got 65536}}
  %y = ssm.hadamard %x {block = 65536 : i64} : tensor<?x65536xf32> -> tensor<?x65536xf32>
  return %y : tensor<?x65536xf32>
}
