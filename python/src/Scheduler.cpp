//===- Scheduler.cpp - The chunk scheduler by itself ----------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/scheduler.h"
#include "Interop.h"
#include <mutex>
#include <nanobind/stl/optional.h>
#include <vector>

namespace corey::python {

static void checkScheduler(corey_sched_status status) {
  if (status == COREY_SCHED_OK)
    return;
  StatusCode code = status == COREY_SCHED_INVALID_ARGUMENT
                        ? StatusCode::InvalidArgument
                    : status == COREY_SCHED_NOT_FOUND ? StatusCode::NotFound
                    : status == COREY_SCHED_IO_ERROR  ? StatusCode::IOError
                                                      : StatusCode::Internal;
  raise(Status(code, corey_sched_last_error()));
}

template <class Enum>
static Enum parse(const std::string &text, const char *argument,
                  std::initializer_list<const char *> names) {
  int number = 0;
  std::string all;
  for (const char *name : names) {
    if (text == name)
      return static_cast<Enum>(number);
    all += (number++ ? ", " : "") + std::string(name);
  }
  throw nb::value_error(
      (std::string(argument) + ": expected one of " + all + ", got " + text)
          .c_str());
}

static const std::initializer_list<const char *> kRanges = {
    "minmax", "padded", "fixed", "quantile"};
static const std::initializer_list<const char *> kSamplings = {
    "full", "strided", "token"};
static const std::initializer_list<const char *> kTypes = {"f64", "f32", "f16",
                                                           "bf16"};

static nb::dict toDict(const corey_sched_statistics &s) {
  const char *validity[] = {"ok", "constant", "empty", "not finite"};
  nb::dict result;
  result["validity"] = validity[s.validity];
  result["count"] = s.count;
  result["nan"] = s.nan;
  result["positive_infinity"] = s.positive_infinity;
  result["negative_infinity"] = s.negative_infinity;
  result["min"] = s.min;
  result["max"] = s.max;
  result["mean"] = s.mean;
  result["variance"] = s.variance;
  result["kurtosis"] = s.kurtosis;
  result["mean_absolute"] = s.mean_absolute;
  result["rms"] = s.rms;
  result["outlier_fraction"] = s.outlier_fraction;
  result["peak_to_rms"] = s.peak_to_rms;
  result["entropy"] = s.entropy_nats;
  result["bins"] = s.bins;
  result["low"] = s.low;
  result["high"] = s.high;
  result["below"] = s.below;
  result["above"] = s.above;
  result["tokens"] = s.tokens;
  result["tokens_dropped"] = s.tokens_dropped;
  return result;
}

class Estimator {
public:
  Estimator(const corey_sched_estimator_options &options) {
    checkScheduler(corey_sched_estimator_create(&options, &handle));
  }
  Estimator(const Estimator &) = delete;
  ~Estimator() { corey_sched_estimator_destroy(handle); }

  corey_sched_statistics estimate(nb::handle object) {
    Borrowed borrowed(object, "x");
    Tensor one = borrowed.tensor("x");
    corey_sched_tensor tensor = {};
    switch (one.dtype()) {
    case DType::F64:
      tensor.type = COREY_SCHED_F64;
      break;
    case DType::F32:
      tensor.type = COREY_SCHED_F32;
      break;
    case DType::F16:
      tensor.type = COREY_SCHED_F16;
      break;
    case DType::BF16:
      tensor.type = COREY_SCHED_BF16;
      break;
    default:
      throw nb::type_error((std::string("x: expected f64, f32, f16 or bf16, "
                                        "got ") +
                            dtypeName(one.dtype()))
                               .c_str());
    }
    if (one.device().kind != Device::CPU)
      throw nb::value_error(("x: expected a tensor on the host, got one on " +
                             one.device().name())
                                .c_str());
    tensor.data = one.data();
    tensor.rank = one.rank();
    tensor.shape = one.shape().data();
    tensor.strides = one.strides().data();
    corey_sched_statistics statistics;
    corey_sched_status status;
    {
      nb::gil_scoped_release unlocked;
      std::lock_guard<std::mutex> turn(busy);
      status = corey_sched_estimate(handle, &tensor, &statistics);
    }
    checkScheduler(status);
    return statistics;
  }

private:
  corey_sched_estimator *handle = nullptr;
  std::mutex busy;
};

/// A site: a policy for one scan.
class Site {
public:
  Site(const corey_sched_site_info &info, const char *policy) {
    checkScheduler(corey_sched_site_create(&info, policy, &handle));
  }
  Site(const Site &) = delete;
  ~Site() { corey_sched_site_destroy(handle); }
  corey_sched_site *handle = nullptr;
};

static corey_sched_estimator_options
makeOptions(int32_t bins, const std::string &range, double low, double high,
            double quantile, double decay, const std::string &sampling,
            int64_t stride, int32_t timeAxis, int32_t threads) {
  corey_sched_estimator_options options;
  corey_sched_estimator_defaults(&options);
  options.bins = bins;
  options.range = parse<corey_sched_range>(range, "range", kRanges);
  options.low = low;
  options.high = high;
  options.quantile = quantile;
  options.decay = decay;
  options.sampling =
      parse<corey_sched_sampling>(sampling, "sampling", kSamplings);
  options.stride = stride;
  options.time_axis = timeAxis;
  options.threads = threads;
  return options;
}

void bindScheduler(nb::module_ &module) {
  nb::class_<Estimator>(module, "Estimator",
                        "Statistics of tensors, entropy of their histogram "
                        "among them.")
      .def(
          "__init__",
          [](Estimator *self, int32_t bins, const std::string &range,
             double low, double high, double quantile, double decay,
             const std::string &sampling, int64_t stride, int32_t timeAxis,
             int32_t threads) {
            new (self)
                Estimator(makeOptions(bins, range, low, high, quantile, decay,
                                      sampling, stride, timeAxis, threads));
          },
          nb::arg("bins") = 256, nb::arg("range") = "minmax",
          nb::arg("low") = 0.0, nb::arg("high") = 1.0,
          nb::arg("quantile") = 0.001, nb::arg("decay") = 0.85,
          nb::arg("sampling") = "full", nb::arg("stride") = 1,
          nb::arg("time_axis") = -1, nb::arg("threads") = 1)
      .def(
          "estimate",
          [](Estimator &self, nb::handle x) {
            return toDict(self.estimate(x));
          },
          nb::arg("x"),
          "Statistics of a tensor on the host, by name; the entropy in nats.");

  nb::class_<Site>(module, "Site")
      .def(
          "__init__",
          [](Site *self, const std::string &policy, const std::string &op,
             const std::string &dtype, int64_t channels, int64_t headDim,
             int64_t states, int64_t groups, const std::string &device,
             int64_t units, const std::string &name) {
            corey_sched_site_info info = {};
            info.name = name.c_str();
            info.op =
                parse<corey_sched_op>(op, "op", {"selective_scan", "ssd"});
            info.type = parse<corey_sched_type>(dtype, "dtype", kTypes);
            info.channels = channels;
            info.head_dim = headDim;
            info.states = states;
            info.groups = groups;
            info.device = device.c_str();
            info.units = units;
            new (self) Site(info, policy.c_str());
          },
          nb::arg("policy"), nb::arg("op"), nb::arg("dtype"),
          nb::arg("channels"), nb::arg("head_dim"), nb::arg("states"),
          nb::arg("groups"), nb::arg("device"), nb::arg("units"),
          nb::arg("name"))
      .def(
          "decide",
          [](Site &self, int64_t batch, int64_t length) {
            corey_sched_decision d;
            checkScheduler(corey_sched_decide(self.handle, batch, length, &d));
            return nb::make_tuple(d.chunk, d.predicted_ms, d.used_data != 0);
          },
          nb::arg("batch"), nb::arg("length"))
      .def(
          "observe",
          [](Site &self, Estimator &estimator, nb::handle x,
             double milliseconds) {
            corey_sched_statistics s = estimator.estimate(x);
            checkScheduler(corey_sched_publish(self.handle, &s, milliseconds));
            return toDict(s);
          },
          nb::arg("estimator"), nb::arg("x"), nb::arg("milliseconds") = 0.0)
      .def(
          "set_chunk",
          [](Site &self, int64_t chunk) {
            checkScheduler(corey_sched_set_chunk(self.handle, chunk));
          },
          nb::arg("chunk"))
      .def("explain",
           [](const Site &self) {
             std::string text(corey_sched_explain(self.handle, nullptr, 0), 0);
             corey_sched_explain(self.handle, text.data(), text.size() + 1);
             return text;
           })
      .def("wanted", [](const Site &self) -> nb::object {
        int32_t wanted = 0;
        corey_sched_estimator_options o;
        checkScheduler(corey_sched_wanted(self.handle, &wanted, &o));
        if (!wanted)
          return nb::none();
        nb::dict result;
        result["bins"] = o.bins;
        result["range"] = kRanges.begin()[o.range];
        result["low"] = o.low;
        result["high"] = o.high;
        result["quantile"] = o.quantile;
        result["decay"] = o.decay;
        result["sampling"] = kSamplings.begin()[o.sampling];
        result["stride"] = o.stride;
        result["time_axis"] = o.time_axis;
        return result;
      });
  module.def(
      "chunk_of_rule",
      [](const std::string &rule, double entropy, int64_t bins) {
        int64_t chunk = 0;
        checkScheduler(corey_sched_rule(rule.c_str(), entropy, bins, &chunk));
        return chunk;
      },
      nb::arg("rule"), nb::arg("entropy"), nb::arg("bins") = 256,
      "The chunk of a named rule for an entropy in nats.");
}

} // namespace corey::python
