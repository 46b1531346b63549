// ssm-hoist-weights: modules with something else of the name it needs.

// RUN: corey-opt %s --split-input-file --ssm-hoist-weights --verify-diagnostics

// expected-error @below {{'func.func' op expected @ssm.prepare to be a function with a body of one block}}
func.func private @ssm.prepare()

// -----

// expected-error @below {{'ssm.weight' op expected @ssm.prepare to be a function with a body of one block}}
ssm.weight @ssm.prepare : tensor<8xf32>

// -----

ssm.weight @w : tensor<8xf32>
// expected-error @below {{'func.func' op expected 'ssm.prepares' of result 0 to name a weight}}
func.func @ssm.prepare() -> tensor<8xf32> {
  %0 = ssm.get_weight @w : tensor<8xf32>
  return %0 : tensor<8xf32>
}

// -----

// expected-error @below {{'ssm.weight' op expected no key for a prepared weight, got "w"}}
ssm.weight @p "w" {ssm.prepared} : tensor<8xf32>
