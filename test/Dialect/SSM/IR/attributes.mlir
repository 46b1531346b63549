// The attributes of the dialect, in text and in bytecode. Doubles come back bit
// by bit: with 6 digits where these suffice, else with 17, else in hexadecimal.

// RUN: corey-opt %s --verify-roundtrip | FileCheck %s
// RUN: corey-opt %s | corey-opt | FileCheck %s
// RUN: corey-opt %s --emit-bytecode | corey-opt | FileCheck %s

// Bounds: the largest and the smallest double, subnormal numbers, signed zero.
// CHECK: test.extremes = #ssm.stats<entropy = 0.000000e+00, bins = 2,
// CHECK-SAME: min = -1.7976931348623157E+308, max = 1.7976931348623157E+308,
// CHECK-SAME: mean = 4.940660e-324, variance = 2.2250738585072014E-308,
// CHECK-SAME: kurtosis = -0.000000e+00>
module attributes { test.extremes = #ssm.stats<entropy = 0.0, bins = 2,
    min = -1.7976931348623157e308, max = 1.7976931348623157e308,
    mean = 4.9406564584124654e-324, variance = 2.2250738585072014e-308, kurtosis = -0.0> } {}

// Neighbours: doubles that differ in the last bit are told apart.
// CHECK: test.neighbours = #ssm.stats<entropy = 2.2718281828459044, bins = 65536,
// CHECK-SAME: min = 0.99999999999999988, max = 1.0000000000000002, mean = 1.000000e+00,
// CHECK-SAME: variance = 0.30000000000000004, kurtosis = 3.3333333333333335>
module attributes { test.neighbours = #ssm.stats<entropy = 2.2718281828459044, bins = 65536,
    min = 0.99999999999999988, max = 1.0000000000000002, mean = 1.0,
    variance = 0.30000000000000004, kurtosis = 3.3333333333333335> } {}

// A minimum may equal the maximum; infinities and NaN are written as bits.
// CHECK: test.special = #ssm.stats<entropy = 0.000000e+00, bins = 256,
// CHECK-SAME: min = 0xFFF0000000000000, max = 0xFFF0000000000000, mean = 0x7FF0000000000000,
// CHECK-SAME: variance = 0x7FF0000000000000, kurtosis = 0x7FF8000000000000>
module attributes { test.special = #ssm.stats<entropy = 0.0, bins = 256,
    min = 0xFFF0000000000000, max = 0xFFF0000000000000, mean = 0x7FF0000000000000,
    variance = 0x7FF0000000000000, kurtosis = 0x7FF8000000000000> } {}

// Parameters are named, hence free in order; they print in the declared one.
// CHECK: test.score = #ssm.score<entropy = 6.100000e-01, intensity = 4.000000e-01,
// CHECK-SAME: memory = 2.000000e-01, score = -1.500000e+00, threshold = 9.9999999999999991E+22>
module attributes { test.score = #ssm.score<threshold = 1.0e23, score = -1.5,
    entropy = 0.61, memory = 0.2, intensity = 0.4> } {}

// CHECK: test.chunks = [#ssm.chunk<static = 1>, #ssm.chunk<static = 9223372036854775807>,
// CHECK-SAME: #ssm.chunk<runtime = @scan>, #ssm.chunk<runtime = @"layer 0">]
module attributes { test.chunks = [#ssm.chunk<static = 1>,
    #ssm.chunk<static = 9223372036854775807>, #ssm.chunk<runtime = @scan>,
    #ssm.chunk<runtime = @"layer 0">] } {}

// CHECK: test.granularities = [#ssm<granularity tensor>, #ssm<granularity token>,
// CHECK-SAME: #ssm<granularity channel>]
module attributes { test.granularities = [#ssm<granularity tensor>, #ssm<granularity token>,
    #ssm<granularity channel>] } {}
