// What ssm-weights-to-arguments refuses.

// RUN: corey-opt %s --ssm-weights-to-arguments --split-input-file --verify-diagnostics

ssm.weight @w : tensor<8xf32>
func.func private @helper() -> tensor<8xf32> {
  // expected-error @below {{'ssm.get_weight' op expected weights to be used in public functions only, got private function @helper}}
  %w = ssm.get_weight @w : tensor<8xf32>
  return %w : tensor<8xf32>
}

// -----

// The caller would have to pass the weight.
ssm.weight @w : tensor<8xf32>
func.func @callee() -> tensor<8xf32> {
  %w = ssm.get_weight @w : tensor<8xf32>
  return %w : tensor<8xf32>
}
func.func @caller() -> tensor<8xf32> {
  // expected-error @below {{'func.call' op expected functions that use weights to be called from outside only, got a call of @callee}}
  %w = func.call @callee() : () -> tensor<8xf32>
  return %w : tensor<8xf32>
}
