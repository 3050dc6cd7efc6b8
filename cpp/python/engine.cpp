#include "../engine.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "../batch.h"
#include "arrays.h"
#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace metal_prefill::python {
namespace {

// For each session what its output is: an id, an array, None, or the exception that ended it. `rows`: of how
// many of its last tokens the output is wanted; by default of the last one, and log probabilities of all.
// With it ids come as lists. `drafts`: the tokens after the first of those rows are guesses. `more`: the ids
// that are chosen greedily will be appended next, all in one call.
nb::typed<nb::list, nb::any> forward_batch(Engine& engine, const std::vector<Session*>& sessions,
                                           const std::vector<TokenArray>& tokens,
                                           const std::vector<Output>& outputs, bool reuse,
                                           nb::object progress, const std::vector<Sampler*>& samplers,
                                           const std::vector<int>& rows, bool drafts, bool more) {
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
    request.more = more;
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

}  // namespace

void bind_engines(nb::module_& m) {
  nb::enum_<Output>(m, "Output", "What a call computes of the tokens that it is given.")
      .value("NONE", Output::kNone)
      .value("GREEDY", Output::kGreedy)
      .value("LOGITS", Output::kLogits)
      .value("SAMPLED", Output::kSampled)
      .value("LOG_PROBS", Output::kLogProbs)
      .value("HIDDEN", Output::kHidden)
      .value("RESIDUAL", Output::kResidual);

  nb::class_<Engine>(m, "Engine", "Weights, pipelines and pools; shared by sessions.")
      .def("session", &Engine::session, "max_context"_a = 0, nb::call_guard<GilRelease>())
      .def("forward_batch", &forward_batch, "sessions"_a, "tokens"_a, "outputs"_a, "reuse"_a = false,
           "progress"_a = nb::none(), "samplers"_a = std::vector<Sampler*>(), "rows"_a = std::vector<int>(),
           "drafts"_a = false, "more"_a = false)
      .def("check_fits", &Engine::check_fits, "positions"_a,
           "Raise KVMemoryError where a sequence of so many tokens would not fit in kv_memory alone.")
      .def_prop_ro("pass_rows", &Engine::pass_rows, "Most tokens that go through the layers together.")
      .def_prop_ro("exact_rows", &Engine::exact_rows,
                   "Most tokens of a sequence in a pass that get the bits that they get one by one.")
      .def_prop_ro("runs_ahead", &Engine::runs_ahead,
                   "Whether it begins with the token after a greedy one before the caller has seen that.")
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

}  // namespace metal_prefill::python
