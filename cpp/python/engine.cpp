#include "../engine/engine.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "../cache/prefix_tree.h"
#include "../engine/batch.h"
#include "arrays.h"
#include "bindings.h"
#include "computation.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace metal_prefill::python {
namespace {

// A request of a session.
class OwnedRequest final : public Computation {
 public:
  static OwnedRequest none(nb::handle_t<Session> session, TokenArray tokens, bool reuse) {
    return {session, std::move(tokens), reuse};
  }

  static OwnedRequest greedy(nb::handle_t<Session> session, TokenArray tokens, int rows, bool drafts,
                             bool continues, bool reuse) {
    OwnedRequest owned(session, std::move(tokens), reuse);
    owned.request_.output = GreedyOutput{owned.make_choices(rows, drafts), continues};
    return owned;
  }

  static OwnedRequest sampled(nb::handle_t<Session> session, TokenArray tokens, nb::handle_t<Sampler> sampler,
                              int rows, bool reuse) {
    OwnedRequest owned(session, std::move(tokens), reuse);
    owned.sampler_ = nb::borrow(sampler);
    owned.request_.output =
        SampledOutput{owned.make_choices(rows, true), &nb::cast<Sampler&>(owned.sampler_), {}};
    return owned;
  }

  static OwnedRequest logits(nb::handle_t<Session> session, TokenArray tokens, bool reuse) {
    OwnedRequest owned(session, std::move(tokens), reuse);
    owned.request_.output = LogitsOutput{owned.make_floats(std::size_t(owned.config().vocab_size))};
    return owned;
  }

  static OwnedRequest log_probs(nb::handle_t<Session> session, TokenArray tokens, int rows, bool reuse) {
    OwnedRequest owned(session, std::move(tokens), reuse);
    const std::span<const TokenId> all = owned.request_.tokens;
    if (all.size() < 2) throw std::invalid_argument("scoring needs at least two tokens");
    owned.request_.session->engine().check_token(all.back(), all.size() - 1);
    owned.request_.tokens = all.first(all.size() - 1);
    const std::span<const TokenId> targets = all.last(owned.check_rows(rows));
    owned.request_.output = LogProbsOutput{targets, owned.make_floats(targets.size())};
    return owned;
  }

  static OwnedRequest hidden(nb::handle_t<Session> session, TokenArray tokens, int rows, bool normed,
                             bool reuse) {
    OwnedRequest owned(session, std::move(tokens), reuse);
    const int dim = owned.config().dim;
    float* states = owned.make_floats(owned.check_rows(rows) * std::size_t(dim));
    owned.request_.output = HiddenOutput{states, rows, dim, normed};
    return owned;
  }

  std::size_t n_tokens() const override { return request_.tokens.size(); }

  // The ids, an array, None, or the exception that ended the request.
  nb::object take_result() override {
    if (request_.error) return exception_of(request_.error);
    return std::visit(
        Overloaded{[](const NoOutput&) -> nb::object { return nb::none(); },
                   [](const OneOf<GreedyOutput, SampledOutput> auto& output) -> nb::object {
                     nb::list ids;
                     for (const TokenId token : output.choices.chosen) ids.append(token);
                     return ids;
                   },
                   [&](const OneOf<LogitsOutput, LogProbsOutput, HiddenOutput, PooledOutput> auto&) {
                     return nb::cast(floats_->release());
                   }},
        request_.output);
  }

 protected:
  void add_requests(std::vector<Request*>& requests) override { requests.push_back(&request_); }

 private:
  OwnedRequest(nb::handle session, TokenArray tokens, bool reuse)
      : session_(nb::borrow(session)), tokens_(std::move(tokens)) {
    request_.session = &nb::cast<Session&>(session_);
    request_.tokens = view(tokens_);
    request_.prefix = prefix_of(reuse);
  }

  const Config& config() const { return request_.session->engine().config(); }

  std::size_t check_rows(int rows) const {
    if (rows < 1 || std::size_t(rows) > n_tokens())
      throw std::invalid_argument("an output of " + std::to_string(rows) + " rows is wanted of " +
                                  std::to_string(n_tokens()) + " tokens");
    return std::size_t(rows);
  }

  Choices make_choices(int rows, bool drafts) {
    chosen_.assign(check_rows(rows), -1);
    return {.chosen = chosen_, .drafts = request_.tokens.last(drafts ? chosen_.size() - 1 : 0)};
  }

  float* make_floats(std::size_t n) {
    floats_ = std::make_unique<FloatResult>(n);
    return floats_->data();
  }

  nb::object session_, sampler_;
  TokenArray tokens_;
  std::vector<TokenId> chosen_;
  std::unique_ptr<FloatResult> floats_;
  Request request_;
};

nb::typed<nb::list, nb::any> forward_batch(Engine& engine, const std::vector<Computation*>& computations,
                                           nb::object progress) {
  std::vector<Request*> requests;
  for (Computation* computation : computations) computation->begin(requests);
  ProgressGuard guard(std::move(progress));
  without_gil([&] { run_batch(engine, requests, "forward_batch", guard.function()); });
  guard.raise_pending();
  nb::list results;
  for (Computation* computation : computations) results.append(computation->take_result());
  return results;
}

}  // namespace

void bind_engines(nb::module_& m) {
  nb::class_<Computation>(m, "Computation", "Part of a call of Engine.forward_batch.")
      .def_prop_ro("n_tokens", &Computation::n_tokens, "Number of tokens that are computed.");
  nb::class_<OwnedRequest, Computation>(
      m, "Request",
      "Tokens of a session, and the output that is computed of the last ones; for one "
      "call of Engine.forward_batch.")
      .def_static("none", &OwnedRequest::none, "session"_a, "tokens"_a, "reuse"_a = false,
                  "No output; the result is None.")
      .def_static("greedy", &OwnedRequest::greedy, "session"_a, "tokens"_a, "rows"_a = 1, "drafts"_a = false,
                  "continues"_a = false, "reuse"_a = false,
                  "List of the most probable ids after the last tokens. With `drafts`, the tokens after the "
                  "first of those rows are drafts; with `continues`, the id is appended in the next call.")
      .def_static("sampled", &OwnedRequest::sampled, "session"_a, "tokens"_a, "sampler"_a, "rows"_a = 1,
                  "reuse"_a = false,
                  "List of the ids that the sampler chooses; the tokens after the first row are drafts.")
      .def_static("logits", &OwnedRequest::logits, "session"_a, "tokens"_a, "reuse"_a = false,
                  "Logits after the last token, [vocab_size].")
      .def_static("log_probs", &OwnedRequest::log_probs, "session"_a, "tokens"_a, "rows"_a, "reuse"_a = false,
                  "Log probabilities of the last tokens, [rows]. The last token itself is not appended.")
      .def_static("hidden", &OwnedRequest::hidden, "session"_a, "tokens"_a, "rows"_a = 1, "normed"_a = true,
                  "reuse"_a = false,
                  "Hidden states of the last tokens, [rows * dim], after the output norm or before it.");

  nb::class_<Engine>(m, "Engine", "Weights, pipelines and pools; shared by sessions.")
      .def("session", &Engine::session, "max_context"_a = 0, "prefix_namespace"_a = std::string(),
           nb::call_guard<GilRelease>())
      .def("forward_batch", &forward_batch, "requests"_a, "progress"_a = nb::none(),
           "Return the result of each request, or the exception that ended it, and those of texts.")
      .def("check_fits", &Engine::check_fits, "positions"_a,
           "Raise KVMemoryError where a sequence of so many tokens would not fit in kv_memory alone.")
      .def(
          "cached_tokens",
          [](Engine& engine, const std::string& prefix_namespace, TokenArray tokens) {
            return without_gil([&] {
              PrefixTree* prefixes = engine.prefixes();
              return prefixes ? prefixes->known(prefix_namespace, view(tokens)).usable : 0;
            });
          },
          "prefix_namespace"_a, "tokens"_a,
          "Return how many of these tokens a prompt would find in the prefix cache; not counted as a use.")
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
      .def("finish", &Engine::finish, nb::call_guard<GilRelease>(),
           "Wait for work that continues after calls, such as writing compiled shaders to disk.")
      .def("stats", &Engine::stats);
}

}  // namespace metal_prefill::python
