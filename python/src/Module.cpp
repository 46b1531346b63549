//===- Module.cpp - Contexts and executables ------------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "Interop.h"
#include <deque>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>

namespace corey::python {

/// Runs a function of a program on tensors of any library. What is returned is
/// of the library of the first input, or of `out`.
static nb::object run(const std::shared_ptr<Executable> &self, nb::args inputs,
                      const std::string &function, nb::object out,
                      nb::object stream) {
  const FunctionInfo *info = self->findFunction(function);
  if (!info) {
    std::string names;
    for (const FunctionInfo &f : self->functions())
      names += (names.empty() ? "" : ", ") + f.name;
    throw nb::value_error(
        ("function: expected one of " + names + ", got " + function).c_str());
  }
  if (inputs.size() != info->inputs.size()) {
    std::string names;
    for (const ArgumentInfo &a : info->inputs)
      names += (names.empty() ? "" : ", ") + a.name;
    throw nb::type_error(("expected " + std::to_string(info->inputs.size()) +
                          " inputs (" + names + "), got " +
                          std::to_string(inputs.size()))
                             .c_str());
  }
  std::deque<Borrowed> borrowed;
  std::vector<Tensor> given, results;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const char *name = info->inputs[i].name.c_str();
    if (torchUse(inputs[i]) == TorchUse::Gradient)
      throw nb::type_error(
          (std::string(name) +
           ": expected a tensor without a gradient, got one that requires it; "
           "call under torch.no_grad(), or pass tensor.detach()")
              .c_str());
    borrowed.emplace_back(inputs[i], name);
    given.push_back(borrowed.back().tensor(name));
  }
  Library library = Library::Corey;
  nb::handle like;
  if (!borrowed.empty()) {
    library = borrowed[0].library;
    like = inputs[0];
  }
  Device device = given.empty() ? Device::cpu() : given[0].device();
  void *queue =
      stream.is_none() ? currentStream(library, device) : streamFrom(stream);

  // A tensor for a single result, a tuple or list for several.
  std::vector<nb::object> made;
  bool makesOutputs = out.is_none();
  if (!makesOutputs) {
    nb::object list = out;
    if (!nb::isinstance<nb::tuple>(out) && !nb::isinstance<nb::list>(out))
      list = nb::make_tuple(out);
    for (nb::handle one : nb::iter(list))
      made.push_back(nb::borrow(one));
    if (made.size() != info->outputs.size())
      throw nb::type_error(("out: expected " +
                            std::to_string(info->outputs.size()) +
                            " tensors, got " + std::to_string(made.size()))
                               .c_str());
  } else if (library == Library::NumPy || library == Library::Torch ||
             library == Library::CuPy) {
    std::vector<std::vector<int64_t>> shapes =
        take(self->outputShapes(function, given));
    for (size_t i = 0; i < shapes.size(); ++i)
      made.push_back(
          makeTensor(library, info->outputs[i].dtype, shapes[i], {}, device));
  }
  for (size_t i = 0; i < made.size(); ++i) {
    const char *name = info->outputs[i].name.c_str();
    borrowed.emplace_back(made[i], name, /*writable=*/true);
    results.push_back(borrowed.back().tensor(name));
  }
  Status status;
  {
    nb::gil_scoped_release unlocked;
    status = self->run(function, given, results, queue);
  }
  check(status);
  if (made.empty())
    for (const Tensor &tensor : results)
      made.push_back(share(tensor, library, like));
  if (made.size() == 1)
    return made[0];
  nb::list list;
  for (nb::object &one : made)
    list.append(one);
  return nb::tuple(list);
}

static nb::object describe(const std::vector<ArgumentInfo> &arguments) {
  nb::list list;
  for (const ArgumentInfo &a : arguments)
    list.append(nb::make_tuple(a.name, dtypeName(a.dtype), toTuple(a.shape)));
  return nb::tuple(list);
}

void bindExecutable(nb::module_ &module) {
  nb::class_<Context>(module, "Context", "A device and the compiler for it.")
      .def_static(
          "create",
          [](const std::string &device, int threads) {
            ContextOptions options;
            options.device = device;
            options.threads = threads;
            nb::gil_scoped_release unlocked;
            auto context = Context::create(options);
            nb::gil_scoped_acquire locked;
            return take(std::move(context));
          },
          nb::arg("device"), nb::arg("threads") = 0)
      .def_prop_ro("device",
                   [](const Context &self) { return self.getDevice().name(); })
      .def_prop_rw(
          "threads", &Context::getThreads,
          [](Context &self, int threads) { check(self.setThreads(threads)); })
      .def(
          "compile",
          [](Context &self, nb::bytes source, const std::string &name,
             const std::string &policy, const std::string &fusion,
             int vectorBits, int optLevel, bool hoistWeights) {
            CompileOptions options;
            options.policy = policy;
            options.fusion = fusion;
            options.vectorBits = vectorBits;
            options.optLevel = optLevel;
            options.hoistWeights = hoistWeights;
            std::string_view text(source.c_str(), source.size());
            nb::gil_scoped_release unlocked;
            auto program = self.compile(text, options, name);
            nb::gil_scoped_acquire locked;
            return take(std::move(program));
          },
          nb::arg("source"), nb::arg("name") = "<source>",
          nb::arg("policy") = "measured", nb::arg("fusion") = "dp",
          nb::arg("vector_bits") = 0, nb::arg("opt_level") = 2,
          nb::arg("hoist_weights") = true)
      .def(
          "emit",
          [](Context &self, nb::bytes source, const std::string &phase,
             const std::string &name, const std::string &policy,
             const std::string &fusion) {
            CompileOptions options;
            options.policy = policy;
            options.fusion = fusion;
            std::string_view text(source.c_str(), source.size());
            nb::gil_scoped_release unlocked;
            auto result = self.emit(text, phase, options, name);
            nb::gil_scoped_acquire locked;
            return take(std::move(result));
          },
          nb::arg("source"), nb::arg("phase"), nb::arg("name") = "<source>",
          nb::arg("policy") = "measured", nb::arg("fusion") = "dp");

  nb::class_<Executable>(module, "Executable")
      .def("functions",
           [](const Executable &self) {
             nb::dict result;
             for (const FunctionInfo &f : self.functions())
               result[f.name.c_str()] =
                   nb::make_tuple(describe(f.inputs), describe(f.outputs));
             return result;
           })
      .def("weights",
           [](const Executable &self) { return describe(self.weights()); })
      .def("run", &run, nb::arg("inputs"), nb::arg("function") = "main",
           nb::arg("out") = nb::none(), nb::arg("stream") = nb::none())
      .def(
          "bind_weights_file",
          [](Executable &self, const std::string &path,
             std::optional<std::string> prefix) {
            Status status;
            {
              nb::gil_scoped_release unlocked;
              auto file = SafeTensors::open(path);
              status =
                  file ? self.bindWeights(*file, prefix ? &*prefix : nullptr)
                       : file.status();
            }
            check(status);
          },
          nb::arg("path"), nb::arg("prefix") = nb::none())
      .def(
          "bind_weight",
          [](Executable &self, const std::string &symbol, nb::object tensor) {
            check(self.bindWeight(symbol, keep(tensor, symbol.c_str())));
          },
          nb::arg("symbol"), nb::arg("tensor"))
      .def("bound_weight",
           [](const Executable &self, const std::string &symbol) {
             return take(self.boundWeight(symbol));
           })
      .def(
          "set_chunk",
          [](Executable &self, const std::string &site, int64_t chunk) {
            check(self.setChunk(site, chunk));
          },
          nb::arg("site"), nb::arg("chunk"))
      .def(
          "set_variant",
          [](Executable &self, const std::string &site,
             const std::string &variant) {
            check(self.setVariant(site, variant));
          },
          nb::arg("site"), nb::arg("variant"))
      .def(
          "set_policy",
          [](Executable &self, const std::string &site,
             const std::string &policy) {
            check(self.setPolicy(site, policy));
          },
          nb::arg("site"), nb::arg("policy"))
      .def("chunks",
           [](const Executable &self) {
             nb::list result;
             for (const ChunkInfo &c : self.chunks()) {
               nb::dict row;
               row["site"] = c.site;
               row["requested"] = c.requested;
               row["batch"] = c.batch;
               row["length"] = c.length;
               row["chunk"] = c.chunk;
               row["variant"] = c.variant;
               row["predicted_ms"] = c.predictedMs;
               row["used_data"] = c.usedData;
               row["policy"] = c.policy;
               row["reason"] = c.reason;
               result.append(row);
             }
             return result;
           })
      .def("observations",
           [](const Executable &self) {
             nb::list result;
             for (const ObservationInfo &o : self.observations()) {
               nb::dict row;
               row["site"] = o.site;
               row["calls"] = o.calls;
               row["count"] = o.count;
               row["non_finite"] = o.nonFinite;
               row["min"] = o.min;
               row["max"] = o.max;
               row["mean"] = o.mean;
               row["variance"] = o.variance;
               row["validity"] = o.validity;
               row["entropy"] = o.entropy;
               row["average_entropy"] = o.averageEntropy;
               row["bins"] = o.bins;
               row["kurtosis"] = o.kurtosis;
               row["outlier_fraction"] = o.outlierFraction;
               row["peak_to_rms"] = o.peakToRms;
               row["milliseconds"] = o.milliseconds;
               result.append(row);
             }
             return result;
           })
      .def("explain", &Executable::explain)
      .def("compile_times",
           [](const Executable &self) {
             nb::dict result;
             for (const PhaseTime &time : self.compileTimes())
               result[time.phase.c_str()] = time.milliseconds;
             return result;
           })
      .def("traffic",
           [](const Executable &self) {
             const TrafficInfo &t = self.traffic();
             nb::dict result;
             result["kernels"] = t.kernels;
             result["bytes_read"] = t.bytesRead;
             result["bytes_written"] = t.bytesWritten;
             result["bytes_kept"] = t.bytesKept;
             result["predicted_ms"] = t.predictedMs;
             return result;
           })
      .def("memory_use", &Executable::memoryUse);
}

NB_MODULE(_core, module) {
  module.doc() = "libcorey for Python: what the package is made of.";
  module.attr("__version__") = getVersion();
  bindTensor(module);
  bindExecutable(module);
  bindLauncher(module);
  bindModel(module);
  bindScheduler(module);
  // Executables and their contexts may live until the interpreter ends, in
  // caches of modules that are not cleared.
  nb::set_leak_warnings(false);
}

} // namespace corey::python
