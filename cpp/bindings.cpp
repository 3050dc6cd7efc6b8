// The Python module. The only file that knows nanobind's view of the engines: it converts and checks arrays,
// releases the GIL around compute and turns C++ exceptions into the classes of metal_prefill.errors.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>

#include "batch.h"
#include "cpu/python.h"
#include "engine.h"
#include "file_mapping.h"
#include "gil.h"
#include "inspection.h"
#include "metal/python.h"
#include "philox.h"
#include "rounding.h"
#include "sampling.h"
#include "suffix_automaton.h"
#include "tensors.h"

#ifdef METAL_PREFILL_EMULATOR
#include "../emulator/python.h"
#endif

namespace nb = nanobind;
using namespace nb::literals;

namespace metal_prefill {
namespace {

using TokenArray = nb::ndarray<const TokenId, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatArray = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ByteArray = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Prefix prefix_of(bool reuse) {
  return reuse ? Prefix::kReuse : Prefix::kAppend;
}

std::span<const TokenId> view(const TokenArray& tokens) {
  return {tokens.data(), tokens.shape(0)};
}

std::span<const float> view(const FloatArray& values) {
  return {values.data(), values.shape(0)};
}

// An array that NumPy owns. Made and handed over with the GIL held; filled without it.
template <typename T>
class Result {
 public:
  using Array = nb::ndarray<nb::numpy, T, nb::ndim<1>>;
  explicit Result(std::size_t n) : data_(new T[n]), n_(n) {}  // without zeros
  T* data() { return data_.get(); }
  Array release() {
    T* p = data_.release();
    nb::capsule owner(p, [](void* q) noexcept { delete[] static_cast<T*>(q); });
    return Array(p, {n_}, owner);
  }

 private:
  std::unique_ptr<T[]> data_;
  std::size_t n_;
};
using FloatResult = Result<float>;

// Between chunks: runs signal handlers (so that Ctrl-C works) and the caller's callback. An exception in
// either stops the prompt; it is raised once the session has settled.
class ProgressGuard {
 public:
  explicit ProgressGuard(nb::object callback) : callback_(std::move(callback)) {}

  Progress function() {
    return [this](int done, int total) {
      return with_gil([&] {
        if (PyErr_CheckSignals() != 0) {
          error_ = std::make_unique<nb::python_error>();
          return false;
        }
        if (callback_.is_none()) return true;
        try {
          callback_(done, total);
          return true;
        } catch (nb::python_error& error) {
          error_ = std::make_unique<nb::python_error>(std::move(error));
          return false;
        }
      });
    };
  }

  void raise_pending() {
    if (error_) throw nb::python_error(std::move(*error_));
  }

 private:
  nb::object callback_;
  std::unique_ptr<nb::python_error> error_;
};

// Lets a call that waits for its turn on a session be interrupted.
void check_signals() {
  with_gil([] {
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  });
}

// Keeps a Python object alive from C++; may be released on any thread.
std::shared_ptr<void> keep_alive(nb::object object) {
  return std::shared_ptr<void>(object.release().ptr(), [](void* p) {
    if (!Py_IsInitialized()) return;  // the interpreter has ended, and its objects with it
    with_gil([p] { Py_DECREF(static_cast<PyObject*>(p)); });
  });
}

// Collects views of the weights, checks them, and makes an engine of the model.
class ModelBuilder {
 public:
  ModelBuilder(const Config& config, ByteArray mapping, nb::object owner) {
    model_.config = config;
    if (config.n_layers < 0 || config.n_layers > 100000)
      throw std::invalid_argument(std::to_string(config.n_layers) + " layers are more than 100000");
    model_.layers.resize(std::size_t(config.n_layers));
    model_.mapping = {reinterpret_cast<const std::byte*>(mapping.data()), mapping.shape(0),
                      keep_alive(std::move(owner))};
  }

  void add(const std::string& role, int layer, const std::string& name, std::uint32_t type, int rows,
           int cols, std::size_t offset, std::size_t bytes) {
    Tensor* slot = find_tensor(model_, role, layer);
    if (!slot) throw std::invalid_argument("no slot for tensor '" + name + "' (" + role + ")");
    if (offset > model_.mapping.bytes || bytes > model_.mapping.bytes - offset)
      throw std::invalid_argument("tensor '" + name + "' does not lie within the file");
    *slot = {name, TensorType(type), rows, cols, model_.mapping.data + offset, bytes};
  }

  // What packed_weights() of an engine of the same model gave.
  void use_packed(ByteArray packed, nb::object owner) {
    model_.packed = {reinterpret_cast<const std::byte*>(packed.data()), packed.shape(0),
                     keep_alive(std::move(owner))};
  }

  std::shared_ptr<Engine> build(const std::string& device, const EngineOptions& options) {
    if (device != "cpu" && device != "metal")
      throw std::invalid_argument("device '" + device + "' is not cpu or metal");
    validate(model_);
    const GilRelease release;
    return device == "cpu" ? make_cpu_engine(model_, options) : make_metal_engine(model_, options);
  }

 private:
  Model model_;
};

// A row of the table of tensors, with its shape in a model of some configuration.
struct TensorSpec {
  const TensorRow* row;
  std::string name;  // with {layer} where every layer has one
  nb::tuple shape;
  bool per_layer;
};

std::vector<TensorSpec> tensor_specs(const Config& config) {
  std::vector<TensorSpec> specs;
  const auto add = [&](const TensorRow& row, const char* prefix, bool per_layer) {
    const int rows = groups_of(row.rows, config).length(), cols = groups_of(row.cols, config).length();
    specs.push_back({&row, prefix + std::string(row.name),
                     row.kind == TensorKind::kMatrix ? nb::make_tuple(rows, cols) : nb::make_tuple(cols),
                     per_layer});
  };
  for (const ModelTensor& tensor : kModelTensors) add(tensor.row, "", false);
  for (const LayerTensor& tensor : kLayerTensors) add(tensor.row, "blk.{layer}.", true);
  return specs;
}

// The class of metal_prefill.errors that stands for a C++ exception.
void raise_as(const char* name, const char* message) {
  nb::object type = nb::module_::import_("metal_prefill.errors").attr(name);
  PyErr_SetString(type.ptr(), message);
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const ContextOverflowError& e) {
    raise_as("ContextOverflowError", e.what());
  } catch (const ForkError& e) {
    raise_as("ForkError", e.what());
  } catch (const SessionBusyError& e) {
    raise_as("SessionBusyError", e.what());
  } catch (const DeviceError& e) {
    raise_as("DeviceError", e.what());
  } catch (const NumericalError& e) {
    raise_as("NumericalError", e.what());
  } catch (const UnsupportedModelError& e) {
    raise_as("UnsupportedModelError", e.what());
  } catch (const KvMemoryError& e) {
    raise_as("KVMemoryError", e.what());
  }
}

void bind_config(nb::module_& m) {
  nb::enum_<RopeStyle>(m, "RopeStyle")
      .value("INTERLEAVED", RopeStyle::kInterleaved)
      .value("NEOX", RopeStyle::kNeox);
  nb::enum_<RopeScaling>(m, "RopeScaling")
      .value("NONE", RopeScaling::kNone)
      .value("LINEAR", RopeScaling::kLinear)
      .value("YARN", RopeScaling::kYarn);
  nb::enum_<Activation>(m, "Activation").value("SILU", Activation::kSilu).value("GELU", Activation::kGelu);
  nb::enum_<QkNormPlace>(m, "QkNormPlace")
      .value("HEADS", QkNormPlace::kHeads)
      .value("ROTATED_HEADS", QkNormPlace::kRotatedHeads)
      .value("ROWS", QkNormPlace::kRows);
  nb::enum_<Compute>(m, "Compute").value("INT8", Compute::kInt8).value("F32", Compute::kF32);
  nb::enum_<KvType>(m, "KvType").value("F16", KvType::kF16).value("F32", KvType::kF32);

  nb::class_<Config>(m, "Config", "Hyperparameters as the engines read them.")
      .def(nb::init<>())
      .def_rw("architecture", &Config::architecture)
      .def_rw("n_layers", &Config::n_layers)
      .def_rw("dim", &Config::dim)
      .def_rw("n_heads", &Config::n_heads)
      .def_rw("n_kv_heads", &Config::n_kv_heads)
      .def_rw("key_dim", &Config::key_dim)
      .def_rw("value_dim", &Config::value_dim)
      .def_rw("ffn_dim", &Config::ffn_dim)
      .def_rw("vocab_size", &Config::vocab_size)
      .def_rw("context_length", &Config::context_length)
      .def_rw("norm_eps", &Config::norm_eps)
      .def_rw("rope_dim", &Config::rope_dim)
      .def_rw("rope_base", &Config::rope_base)
      .def_rw("rope_style", &Config::rope_style)
      .def_rw("rope_scaling", &Config::rope_scaling)
      .def_rw("rope_factor", &Config::rope_factor)
      .def_rw("rope_original_context", &Config::rope_original_context)
      .def_rw("rope_attn_factor", &Config::rope_attn_factor)
      .def_rw("rope_beta_fast", &Config::rope_beta_fast)
      .def_rw("rope_beta_slow", &Config::rope_beta_slow)
      .def_rw("activation", &Config::activation)
      .def_rw("embedding_scale", &Config::embedding_scale)
      .def_rw("residual_scale", &Config::residual_scale)
      .def_rw("logit_scale", &Config::logit_scale)
      .def_rw("qk_norm_place", &Config::qk_norm_place)
      .def_rw("causal", &Config::causal)
      .def_rw("attention_scale", &Config::attention_scale)
      .def_rw("layer_uses_rope", &Config::layer_uses_rope)
      .def_rw("layer_window", &Config::layer_window)
      .def_rw("layer_rope_base", &Config::layer_rope_base)
      .def_rw("layer_rope_factor", &Config::layer_rope_factor);

  nb::class_<TensorSpec>(m, "TensorSpec", "A tensor that a model may have.")
      .def_prop_ro(
          "kind",
          [](const TensorSpec& self) {
            return self.row->kind == TensorKind::kMatrix ? "matrix"
                   : self.row->kind == TensorKind::kNorm ? "norm"
                                                         : "vector";
          },
          "matrix, norm or vector.")
      .def_prop_ro("role", [](const TensorSpec& self) { return std::string(self.row->role); })
      .def_prop_ro(
          "presence", [](const TensorSpec& self) { return std::string(self.row->presence); },
          "required, optional, tied, or the trait of an architecture that says which.")
      .def_ro("name", &TensorSpec::name, "In the file, with {layer} where every layer has one.")
      .def_prop_ro(
          "shape", [](const TensorSpec& self) { return self.shape; },
          nb::sig("def shape(self) -> tuple[int, ...]"))
      .def_ro("per_layer", &TensorSpec::per_layer);
  m.def(
      "tensor_types",
      [] {
        std::vector<std::string> names;
        for (const TypeInfo& info : tensor_types()) names.emplace_back(info.name);
        return names;
      },
      "The tensor types that a matrix can have.");
  m.def("tensors", &tensor_specs, "config"_a, "The rows of the table of tensors.");

  nb::class_<EngineOptions>(m, "EngineOptions", "Options of an engine.")
      .def(nb::init<>())
      .def_rw("threads", &EngineOptions::threads)
      .def_rw("compute", &EngineOptions::compute)
      .def_rw("kv_type", &EngineOptions::kv_type)
      .def_rw("chunk_tokens", &EngineOptions::chunk_tokens)
      .def_rw("fused_norm", &EngineOptions::fused_norm)
      .def_rw("fused_silu", &EngineOptions::fused_silu)
      .def_rw("kv_memory", &EngineOptions::kv_memory)
      .def_rw("prefix_memory", &EngineOptions::prefix_memory)
      .def_rw("buffer_work", &EngineOptions::buffer_work)
      .def_rw("pipeline_folder", &EngineOptions::pipeline_folder)
      .def_rw("poison_cache", &EngineOptions::poison_cache);
}

// The Python exception that stands for a C++ one.
nb::object exception_of(const std::exception_ptr& error) {
  try {
    try {
      translate(error, nullptr);
      if (!PyErr_Occurred()) std::rethrow_exception(error);
    } catch (const std::invalid_argument& e) {
      PyErr_SetString(PyExc_ValueError, e.what());
    } catch (const std::bad_alloc& e) {
      PyErr_SetString(PyExc_MemoryError, e.what());
    } catch (const std::exception& e) {
      PyErr_SetString(PyExc_RuntimeError, e.what());
    }
    throw nb::python_error();
  } catch (nb::python_error& e) {
    return nb::borrow(e.value());
  }
}

// For each session what its output is: an id, an array, None, or the exception that ended it. `rows`: of how
// many of its last tokens the output is wanted; by default of the last one, and log probabilities of all.
// With it ids come as lists. `drafts`: the tokens after the first of those rows are guesses.
nb::typed<nb::list, nb::any> forward_batch(Engine& engine, const std::vector<Session*>& sessions,
                                           const std::vector<TokenArray>& tokens,
                                           const std::vector<Output>& outputs, bool reuse,
                                           nb::object progress, const std::vector<Sampler*>& samplers,
                                           const std::vector<int>& rows, bool drafts) {
  if (sessions.size() != tokens.size() || sessions.size() != outputs.size() ||
      (!rows.empty() && rows.size() != sessions.size()))
    throw std::invalid_argument("a batch needs tokens and an output for each session");
  const std::size_t n = sessions.size(), vocab_size = std::size_t(engine.config().vocab_size);
  std::vector<Request> requests(n);
  std::vector<std::unique_ptr<FloatResult>> arrays(n);
  const std::size_t dim = std::size_t(engine.config().dim);
  if (std::count(outputs.begin(), outputs.end(), Output::kSampled) != std::ptrdiff_t(samplers.size()))
    throw std::invalid_argument("a batch needs a sampler for each sampled output");
  auto sampler = samplers.begin();
  for (std::size_t i = 0; i < n; ++i) {
    Request& request = requests[i];
    request.session = sessions[i];
    request.tokens = view(tokens[i]);
    request.prefix = prefix_of(reuse);
    request.output = outputs[i];
    if (!rows.empty()) request.output_rows = rows[i];
    request.are_drafts = drafts;
    if (outputs[i] == Output::kLogits) {
      arrays[i] = std::make_unique<FloatResult>(vocab_size);
      request.logits = arrays[i]->data();
    } else if (outputs[i] == Output::kSampled) {
      request.sampler = *sampler++;
    } else if (outputs[i] == Output::kLogProbs) {
      if (request.tokens.size() < 2) throw std::invalid_argument("scoring needs at least two tokens");
      engine.check_token(request.tokens.back(), request.tokens.size() - 1);
      request.tokens = request.tokens.first(request.tokens.size() - 1);
      const std::size_t n_tokens = request.tokens.size();
      if (rows.empty()) request.output_rows = int(n_tokens);
      const std::size_t scored = std::size_t(std::clamp(request.output_rows, 0, int(n_tokens)));
      request.targets = view(tokens[i]).last(scored);
      arrays[i] = std::make_unique<FloatResult>(scored);
      request.log_probs = arrays[i]->data();
    } else if (is_hidden(outputs[i])) {
      const int most = int(request.tokens.size());  // a call for more fails
      arrays[i] = std::make_unique<FloatResult>(std::size_t(std::clamp(request.output_rows, 0, most)) * dim);
      request.hidden = arrays[i]->data();
    }
  }
  ProgressGuard guard(std::move(progress));
  without_gil([&] { run_batch(engine, requests, "forward_batch", guard.function()); });
  guard.raise_pending();
  nb::list results;
  for (std::size_t i = 0; i < n; ++i) {
    if (requests[i].error)
      results.append(exception_of(requests[i].error));
    else if (arrays[i])
      results.append(arrays[i]->release());
    else if (requests[i].chosen.empty())
      results.append(nb::none());
    else if (rows.empty())
      results.append(requests[i].result.token);
    else
      results.append(nb::cast(requests[i].chosen));
  }
  return results;
}

void bind_sampling(nb::module_& m) {
  nb::class_<SamplingOptions>(m, "SamplingOptions", "How tokens are chosen, checked by sampling.Options.")
      .def(nb::init<>())
      .def_rw("temperature", &SamplingOptions::temperature)
      .def_rw("top_k", &SamplingOptions::top_k)
      .def_rw("typical_p", &SamplingOptions::typical_p)
      .def_rw("top_p", &SamplingOptions::top_p)
      .def_rw("min_p", &SamplingOptions::min_p)
      .def_rw("repeat_penalty", &SamplingOptions::repeat_penalty)
      .def_rw("frequency_penalty", &SamplingOptions::frequency_penalty)
      .def_rw("presence_penalty", &SamplingOptions::presence_penalty)
      .def_rw("window", &SamplingOptions::window)
      .def_rw("logit_bias", &SamplingOptions::logit_bias);

  nb::class_<Sampler>(m, "Sampler", "Chooses the tokens of one text.")
      .def(
          "__init__",
          [](Sampler* self, const SamplingOptions& options, std::uint64_t seed, std::uint32_t answer,
             TokenArray tokens) { new (self) Sampler(options, seed, answer, view(tokens)); },
          "options"_a, "seed"_a, "answer"_a, "tokens"_a)
      .def("forbid", &Sampler::forbid, "tokens"_a, "position"_a)
      .def(
          "allow",
          [](Sampler& self, ByteArray allowed) {
            std::vector<std::uint32_t> words(ceil_div(allowed.shape(0), 32));
            for (std::size_t i = 0; i < allowed.shape(0); ++i)
              words[i / 32] |= std::uint32_t(allowed.data()[i] != 0) << i % 32;
            self.allow({std::move(words)});
          },
          "allowed"_a, "Takes whether each token may be chosen; nothing allows all.")
      .def(
          "allow_bits",
          [](Sampler& self, const std::vector<nb::bytes>& masks) {
            std::vector<Sampler::Mask> words;
            for (const nb::bytes& bits : masks) {
              words.emplace_back(ceil_div(bits.size(), sizeof(std::uint32_t)));
              std::memcpy(words.back().data(), bits.c_str(), bits.size());
            }
            self.allow(std::move(words));
          },
          "masks"_a,
          "Takes whether each token may be chosen next, after one token more, and so on; the last counts "
          "from "
          "there on: bit id % 32 of word id // 32.")
      .def("follow", &Sampler::follow, "tokens"_a)
      .def("report", &Sampler::report, "best"_a)
      .def(
          "choose", [](Sampler& self, FloatArray logits) { return self.choose(view(logits)); }, "logits"_a)
      .def("accept", &Sampler::accept, "token"_a)
      .def_prop_ro("position", &Sampler::position)
      .def_prop_ro(
          "reports",
          [](const Sampler& self) {
            std::vector<std::pair<double, std::vector<std::pair<TokenId, double>>>> reports;
            for (const Sampler::Report& report : self.reports()) {
              auto& best = reports.emplace_back(report.log_prob, 0).second;
              for (const Sampler::Scored& s : report.best) best.emplace_back(s.token, s.log_prob);
            }
            return reports;
          },
          "Of each choice of the last call: its log probability, and ids and log probabilities of the most "
          "probable tokens.");
  nb::class_<SuffixAutomaton>(m, "SuffixAutomaton", "Guesses at what follows a text, found in the text.")
      .def(nb::init<>())
      .def(
          "append", [](SuffixAutomaton& self, TokenArray tokens) { self.append(view(tokens)); }, "tokens"_a)
      .def_prop_ro("matched", &SuffixAutomaton::matched, "How many of the last tokens occurred before.")
      .def("following", &SuffixAutomaton::following, "count"_a, "The tokens that followed them there.");
  m.def(
      "philox", [](PhiloxCounter counter, PhiloxKey key) { return philox(counter, key); }, "counter"_a,
      "key"_a, "Four random words of a counter and a key.");
}

void bind_engine(nb::module_& m) {
  nb::enum_<Output>(m, "Output", "What a call computes of the tokens that it is given.")
      .value("NONE", Output::kNone)
      .value("GREEDY", Output::kGreedy)
      .value("LOGITS", Output::kLogits)
      .value("SAMPLED", Output::kSampled)
      .value("LOG_PROBS", Output::kLogProbs)
      .value("HIDDEN", Output::kHidden)
      .value("RESIDUAL", Output::kResidual);

  nb::class_<ModelBuilder>(m, "ModelBuilder", "Collects weight views and builds an engine.")
      .def(nb::init<const Config&, ByteArray, nb::object>(), "config"_a, "mapping"_a, "owner"_a)
      .def("add", &ModelBuilder::add, "role"_a, "layer"_a, "name"_a, "type"_a, "rows"_a, "cols"_a, "offset"_a,
           "bytes"_a)
      .def("use_packed", &ModelBuilder::use_packed, "packed"_a, "owner"_a)
      .def("build", &ModelBuilder::build, "device"_a, "options"_a);

  nb::class_<Engine>(m, "Engine", "Weights, pipelines and pools; shared by sessions.")
      .def("session", &Engine::session, "max_context"_a = 0, nb::call_guard<GilRelease>())
      .def("forward_batch", &forward_batch, "sessions"_a, "tokens"_a, "outputs"_a, "reuse"_a = false,
           "progress"_a = nb::none(), "samplers"_a = std::vector<Sampler*>(), "rows"_a = std::vector<int>(),
           "drafts"_a = false)
      .def_prop_ro("pass_rows", &Engine::pass_rows, "Most tokens that go through the layers together.")
      .def_prop_ro("exact_rows", &Engine::exact_rows,
                   "Most tokens of a sequence in a pass that get the bits that they get one by one.")
      .def_prop_ro("device_name", &Engine::device_name)
      .def_prop_ro("backend", &Engine::backend)
      .def(
          "packed_weights",
          [](const Engine& engine) -> nb::ndarray<nb::numpy, const std::uint8_t, nb::ndim<1>> {
            const std::span<const std::byte> packed = engine.packed_weights();
            return {reinterpret_cast<const std::uint8_t*>(packed.data()), {packed.size()}, nb::find(engine)};
          },
          "The weights as the engine packed them itself, not a copy; none where it did not.")
      .def("stats", &Engine::stats);
}

// Token ids, and the rows of K and V of each layer: K of layer 0, V of layer 0, K of layer 1, ...
nb::tuple export_state(Session& session) {
  std::vector<Result<std::uint8_t>> rows;
  const std::vector<TokenId> tokens = without_gil([&] {
    return session.export_state([&](int, bool, std::size_t bytes) {
      return reinterpret_cast<std::byte*>(rows.emplace_back(bytes).data());
    });
  });
  Result<TokenId> ids(tokens.size());
  std::copy(tokens.begin(), tokens.end(), ids.data());
  nb::list arrays;
  for (auto& r : rows) arrays.append(r.release());
  return nb::make_tuple(ids.release(), arrays);
}

void import_state(Session& session, const TokenArray& tokens, const std::vector<ByteArray>& rows) {
  const std::size_t layers = std::size_t(session.engine().config().n_layers);
  if (rows.size() != 2 * layers)
    throw std::invalid_argument("a state of " + std::to_string(layers) + " layers has " +
                                std::to_string(2 * layers) + " arrays, got " + std::to_string(rows.size()));
  without_gil([&] {
    session.import_state(view(tokens), [&](int layer, bool values, std::size_t bytes) {
      const ByteArray& array = rows[2 * std::size_t(layer) + values];
      if (array.shape(0) != bytes)
        throw std::invalid_argument(std::string(values ? "values" : "keys") + " of layer " +
                                    std::to_string(layer) + " have " + std::to_string(array.shape(0)) +
                                    " bytes, expected " + std::to_string(bytes));
      return reinterpret_cast<const std::byte*>(array.data());
    });
  });
}

void bind_inspector(nb::module_& m) {
  nb::class_<SessionInspector>(m, "SessionInspector", "Looks into the passes of a session.")
      .def("plan", &SessionInspector::plan, "tokens"_a, nb::call_guard<GilRelease>())
      .def(
          "trace",
          [](SessionInspector& self, TokenArray tokens, nb::object progress, bool contents) {
            ProgressGuard guard(std::move(progress));
            Trace trace = {.dispatches = {}, .keeps_contents = contents};
            const PromptResult result =
                without_gil([&] { return self.trace(view(tokens), trace, guard.function()); });
            guard.raise_pending();
            return std::pair(result.token, std::move(trace.dispatches));
          },
          "tokens"_a, "progress"_a = nb::none(), "contents"_a = false)
      .def("pipelines", &SessionInspector::pipelines)
      .def_prop_ro("shaders_were_compiled", &SessionInspector::shaders_were_compiled,
                   "When the package was built; else when the model was opened.")
      .def("intermediate", &SessionInspector::intermediate, "name"_a, nb::call_guard<GilRelease>(),
           "Return a buffer of the last call by its name in the forward pass; with METAL_PREFILL_DEBUG=1 "
           "only.");
}

void bind_session(nb::module_& m) {
  nb::class_<Session>(m, "Session", "KV cache, position and token ids.")
      .def(
          "forward_prompt",
          [](Session& self, TokenArray tokens, bool reuse, nb::object progress, Claim claim, bool more) {
            ProgressGuard guard(std::move(progress));
            const PromptResult result = without_gil([&] {
              return self.forward_prompt(view(tokens), prefix_of(reuse), guard.function(), claim, more);
            });
            guard.raise_pending();
            return result.token;
          },
          "tokens"_a, "reuse"_a = false, "progress"_a = nb::none(), "claim"_a = 0, "more"_a = false)
      .def(
          "forward_prompt_logits",
          [](Session& self, TokenArray tokens, bool reuse, nb::object progress, Claim claim) {
            FloatResult logits(std::size_t(self.engine().config().vocab_size));
            ProgressGuard guard(std::move(progress));
            without_gil([&] {
              return self.forward_prompt_logits(view(tokens), logits.data(), prefix_of(reuse),
                                                guard.function(), claim);
            });
            guard.raise_pending();
            return logits.release();
          },
          "tokens"_a, "reuse"_a = false, "progress"_a = nb::none(), "claim"_a = 0)
      .def(
          "forward_prompt_sampled",
          [](Session& self, TokenArray tokens, Sampler& sampler, bool reuse, nb::object progress,
             Claim claim) {
            ProgressGuard guard(std::move(progress));
            const PromptResult result = without_gil([&] {
              return self.forward_prompt_sampled(view(tokens), sampler, prefix_of(reuse), guard.function(),
                                                 claim);
            });
            guard.raise_pending();
            return result.token;
          },
          "tokens"_a, "sampler"_a, "reuse"_a = false, "progress"_a = nb::none(), "claim"_a = 0)
      .def(
          "score",
          [](Session& self, TokenArray tokens, nb::object progress) {
            FloatResult log_probs(tokens.shape(0) > 0 ? tokens.shape(0) - 1 : 0);
            ProgressGuard guard(std::move(progress));
            without_gil([&] { return self.score(view(tokens), log_probs.data(), guard.function()); });
            guard.raise_pending();
            return log_probs.release();
          },
          "tokens"_a, "progress"_a = nb::none())
      .def(
          "forward_drafts",
          [](Session& self, TokenArray tokens, int drafts, Sampler* sampler, Claim claim, bool more) {
            return without_gil(
                [&] { return self.forward_drafts(view(tokens), drafts, sampler, claim, more); });
          },
          "tokens"_a, "drafts"_a, "sampler"_a.none() = nb::none(), "claim"_a = 0, "more"_a = false)
      .def("check_claim", &Session::check_claim, "claim"_a)
      .def("forward_token_greedy", &Session::forward_token_greedy, "token"_a, nb::call_guard<GilRelease>())
      .def(
          "forward_token",
          [](Session& self, TokenId token) {
            FloatResult logits(std::size_t(self.engine().config().vocab_size));
            without_gil([&] { self.forward_token(token, logits.data()); });
            return logits.release();
          },
          "token"_a)
      .def_prop_ro("position", &Session::position)
      .def(
          "reuse",
          [](Session& self, TokenArray tokens) {
            return without_gil([&] { return self.reuse(view(tokens)); });
          },
          "tokens"_a)
      .def_prop_ro("max_context", &Session::max_context)
      .def("tokens", &Session::tokens)
      .def("rewind", &Session::rewind, "position"_a, "claim"_a = 0, nb::call_guard<GilRelease>())
      .def("fork", &Session::fork, nb::call_guard<GilRelease>())
      .def("export_state", &export_state,
           nb::sig("def export_state(self) -> tuple[numpy.ndarray, list[numpy.ndarray]]"))
      .def("import_state", &import_state, "tokens"_a, "rows"_a)
      .def("memory_bytes", &Session::memory_bytes)
      .def("inspector", &SessionInspector::of, nb::keep_alive<0, 1>(),
           "What looks into the session's passes; None where the engine makes no dispatches.")
      .def("stats", &Session::stats);
}

}  // namespace
}  // namespace metal_prefill

NB_MODULE(_core, m) {
  using namespace metal_prefill;
  m.doc() = "Native engines of metal_prefill.";
  nb::register_exception_translator(translate);
  Turn::while_waiting = check_signals;
  nb::module_::import_("atexit").attr("register")(nb::cpp_function([] {
    interpreter_exits();
    // Objects that other threads hold at exit are not leaks.
    if (nb::cast<int>(nb::module_::import_("threading").attr("active_count")()) > 1)
      nb::set_leak_warnings(false);
  }));
  bind_config(m);
  bind_sampling(m);
  bind_engine(m);
  metal::bind_recordings(m);
  bind_inspector(m);
  bind_session(m);
  nb::module_ machine =
      m.def_submodule("cpu", "What the processor can do: kernel sets, and limits to be timed.");
  cpu::bind_machine(machine);
  constexpr const char* kDispatchCounter =
      "Return a counter of the bytes that dispatches read and write; None where they cannot be counted.";
  m.attr("compiler") = __VERSION__;
  m.def("metal_device", &metal_device, nb::call_guard<nb::gil_scoped_release>(),
        "Facts about the GPU; only `problem` where device 'metal' cannot be used.");
  m.def(
      "metal_available", [] { return !metal_device().contains("problem"); },
      nb::call_guard<nb::gil_scoped_release>(),
      "Whether device 'metal' can be used: a Mac's GPU, or the emulator.");
  m.def(
      "map_file",
      [](int descriptor, std::size_t bytes) -> nb::ndarray<nb::numpy, const std::uint8_t, nb::ndim<1>> {
        FileMapping* mapping = nullptr;
        try {
          mapping = new FileMapping(descriptor, bytes);
        } catch (const std::system_error& error) {
          errno = error.code().value();
          PyErr_SetFromErrno(PyExc_OSError);
          throw nb::python_error();
        }
        const nb::capsule owner(mapping, [](void* p) noexcept { delete static_cast<FileMapping*>(p); });
        return {reinterpret_cast<const std::uint8_t*>(mapping->data()), {bytes}, owner};
      },
      "descriptor"_a, "bytes"_a, "Map the first bytes of a file, read-only.");
#ifdef METAL_PREFILL_EMULATOR
  m.attr("has_emulator") = true;
  nb::module_ emulator = m.def_submodule("emulator", "Introspection of the Metal emulator.");
  metal_emulator::bind_emulator(emulator);
  m.def("dispatch_counter", &metal_emulator::make_dispatch_counter, kDispatchCounter);
#else
  m.attr("has_emulator") = false;
  m.def("dispatch_counter", [] { return nb::object(nb::none()); }, kDispatchCounter);
#endif
  m.def(
      "dequantize",
      [](std::uint32_t type, ByteArray rows, std::size_t values) {
        if (rows.shape(0) != row_bytes(TensorType(type), values))
          throw std::invalid_argument("a row of " + std::to_string(values) + " values needs " +
                                      std::to_string(row_bytes(TensorType(type), values)) + " bytes, got " +
                                      std::to_string(rows.shape(0)));
        FloatResult out(values);
        dequantize_row(TensorType(type), rows.data(), out.data(), values);
        return out.release();
      },
      "type"_a, "rows"_a, "values"_a, "Converts blocks of a GGUF tensor type to float32.");
}
