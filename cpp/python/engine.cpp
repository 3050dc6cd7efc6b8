#include "../engine/engine.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "../engine/batch.h"
#include "arrays.h"
#include "bindings.h"
#include "computation.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace metal_prefill::python {
namespace {

using Owner = std::variant<Session*, Scratch*>;

// A request of a session, or of a Scratch for a text without one.
class OwnedRequest final : public Computation {
 public:
  static OwnedRequest none(Owner owner, TokenArray tokens, bool reuse) {
    return {owner, std::move(tokens), reuse};
  }

  static OwnedRequest greedy(Owner owner, TokenArray tokens, int rows, bool drafts, bool continues,
                             Claim claim, bool reuse, std::vector<int> marks) {
    OwnedRequest owned(owner, std::move(tokens), reuse);
    owned.request_.marks = std::move(marks);
    owned.request_.output = GreedyOutput{owned.make_choices(rows, drafts), continues};
    owned.request_.claim = claim;
    return owned;
  }

  static OwnedRequest sampled(Owner owner, TokenArray tokens, nb::handle_t<Sampler> sampler, int rows,
                              Claim claim, bool reuse, std::vector<int> marks) {
    OwnedRequest owned(owner, std::move(tokens), reuse);
    owned.request_.marks = std::move(marks);
    owned.sampler_ = nb::borrow(sampler);
    owned.request_.output =
        SampledOutput{owned.make_choices(rows, true), &nb::cast<Sampler&>(owned.sampler_), {}};
    owned.request_.claim = claim;
    return owned;
  }

  static OwnedRequest logits(Owner owner, TokenArray tokens, bool reuse) {
    OwnedRequest owned(owner, std::move(tokens), reuse);
    owned.request_.output = LogitsOutput{owned.make_floats(std::size_t(owned.config().vocab_size))};
    return owned;
  }

  static OwnedRequest log_probs(Owner owner, TokenArray tokens, int rows, bool reuse) {
    OwnedRequest owned(owner, std::move(tokens), reuse);
    const std::span<const TokenId> all = owned.request_.tokens;
    if (all.size() < 2) throw std::invalid_argument("scoring needs at least two tokens");
    owned.engine().check_token(all.back(), all.size() - 1);
    owned.request_.tokens = all.first(all.size() - 1);
    const std::span<const TokenId> targets = all.last(owned.check_rows(rows));
    owned.request_.output = LogProbsOutput{targets, owned.make_floats(targets.size())};
    return owned;
  }

  static OwnedRequest hidden(Owner owner, TokenArray tokens, int rows, bool normed, bool reuse) {
    OwnedRequest owned(owner, std::move(tokens), reuse);
    const int dim = owned.config().dim;
    float* states = owned.make_floats(owned.check_rows(rows) * std::size_t(dim));
    owned.request_.output = HiddenOutput{states, rows, dim, normed};
    return owned;
  }

  // Computes the request alone, and throws its error.
  nb::any run(nb::object progress, const std::string& call) {
    std::vector<Request*> all;
    begin(all);
    ProgressGuard guard(std::move(progress));
    without_gil([&] { run_batch(engine(), all, call.c_str(), guard.function()); });
    guard.raise_pending();
    if (request_.error) std::rethrow_exception(request_.error);
    return nb::borrow<nb::any>(take_result());
  }

  // Returns the ids, an array, None, or the exception that ended the request.
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
  std::span<Request> requests() override { return {&request_, 1}; }

 private:
  OwnedRequest(Owner owner, TokenArray tokens, bool reuse)
      : owner_(std::visit([](auto* object) { return nb::find(*object); }, owner)),
        tokens_(std::move(tokens)) {
    if (Session** session = std::get_if<Session*>(&owner))
      request_.session = *session;
    else
      request_.scratch = std::get<Scratch*>(owner);
    request_.tokens = view(tokens_);
    const bool reuses = reuse || (request_.scratch && config().causal);
    request_.prefix = reuses ? Prefix::kReuse : Prefix::kAppend;
  }

  Engine& engine() const { return request_.scratch ? *request_.scratch->engine : request_.session->engine(); }
  const Config& config() const { return engine().config(); }

  std::size_t check_rows(int rows) const {
    if (rows < 1 || std::size_t(rows) > request_.tokens.size())
      throw std::invalid_argument("an output of " + std::to_string(rows) + " rows is wanted of " +
                                  std::to_string(request_.tokens.size()) + " tokens");
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

  nb::object owner_, sampler_;
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

// Computations, their maximum rows in a pass, and the maximum of one while others wait.
using PassShare = std::tuple<std::vector<Computation*>, int, int>;

void forward_pass(Engine& engine, const std::vector<PassShare>& shares) {
  struct Begun {
    std::vector<Computation*> computations;
    ~Begun() {
      for (Computation* computation : computations) computation->pause();
    }
  } begun;
  std::vector<Share> parts;
  for (const auto& [computations, rows, turn] : shares) {
    Share& share = parts.emplace_back(Share{{}, rows, turn});
    for (Computation* computation : computations) {
      computation->begin(share.requests);
      begun.computations.push_back(computation);
    }
  }
  without_gil([&] { run_pass(engine, parts, "forward_pass"); });
}

}  // namespace

void bind_engines(nb::module_& m) {
  nb::class_<Scratch>(m, "Scratch",
                      "Owner of requests without a session. Each gets one that ends with it; prefixes are "
                      "shared among the requests of one Scratch, and with no others.")
      .def(nb::init<std::shared_ptr<Engine>>(), "engine"_a);
  nb::class_<Computation>(m, "Computation", "Part of a call of Engine.forward_batch or forward_pass.")
      .def_prop_ro("finished", &Computation::finished)
      .def_prop_ro("left", &Computation::left, "Tokens that are not computed.")
      .def_prop_ro("computed", &Computation::computed,
                   "Rows of passes that it had, including those of tokens that were computed again.")
      .def(
          "take_result", [](Computation& self) { return nb::borrow<nb::any>(self.take_result()); },
          "Return the result, once it is finished, or the exception that ended it.");
  nb::class_<OwnedRequest, Computation>(
      m, "Request",
      "Tokens of a session, and the output that is computed of the last ones. Without a session, a "
      "`Scratch` is their owner.")
      .def("run", &OwnedRequest::run, "progress"_a = nb::none(), "call"_a = "forward_batch",
           "Compute it alone, and return its result or raise its error. `call` names the call in messages.")
      .def_static("none", &OwnedRequest::none, "owner"_a, "tokens"_a, "reuse"_a = false,
                  "No output; the result is None.")
      .def_static("greedy", &OwnedRequest::greedy, "owner"_a, "tokens"_a, "rows"_a = 1, "drafts"_a = false,
                  "continues"_a = false, "claim"_a = 0, "reuse"_a = false, "marks"_a = std::vector<int>(),
                  "List of the most probable ids after the last tokens. With `drafts`, the tokens after the "
                  "first of those rows are drafts; with `continues`, the id is appended in the next call. "
                  "States of recurrent layers are kept after the numbers of tokens in `marks`.")
      .def_static("sampled", &OwnedRequest::sampled, "owner"_a, "tokens"_a, "sampler"_a, "rows"_a = 1,
                  "claim"_a = 0, "reuse"_a = false, "marks"_a = std::vector<int>(),
                  "List of the ids that the sampler chooses; the tokens after the first row are drafts.")
      .def_static("logits", &OwnedRequest::logits, "owner"_a, "tokens"_a, "reuse"_a = false,
                  "Logits after the last token, [vocab_size].")
      .def_static("log_probs", &OwnedRequest::log_probs, "owner"_a, "tokens"_a, "rows"_a, "reuse"_a = false,
                  "Log probabilities of the last tokens, [rows]. The last token itself is not appended.")
      .def_static("hidden", &OwnedRequest::hidden, "owner"_a, "tokens"_a, "rows"_a = 1, "normed"_a = true,
                  "reuse"_a = false,
                  "Hidden states of the last tokens, [rows * dim], after the output norm or before it.");

  nb::class_<Engine>(m, "Engine", "Weights, pipelines and pools; shared by sessions.")
      .def("session", &Engine::session, "max_context"_a = 0, "prefix_namespace"_a = std::string(),
           nb::call_guard<GilRelease>())
      .def("forward_batch", &forward_batch, "requests"_a, "progress"_a = nb::none(),
           "Return the result of each request, or the exception that ended it, and those of texts.")
      .def(
          "forward_pass", &forward_pass, "shares"_a,
          "Compute one pass, and further ones of the last share alone until its requests are finished. A "
          "share has requests, the most rows that they get together, and the most that one gets while others "
          "of the share want some. Another request that is not finished continues in the next call. Those "
          "that wait for a prefix that another request computes get no rows.")
      .def(
          "check_fits", [](Engine& engine, int positions) { engine.memory().pages().check_fits(positions); },
          "positions"_a,
          "Raise KVMemoryError if a sequence of so many tokens would not fit in kv_memory alone.")
      .def(
          "cached_tokens",
          [](Engine& engine, const std::string& prefix_namespace, TokenArray tokens) {
            return without_gil(
                [&] { return engine.memory().prefixes().known(prefix_namespace, view(tokens)).usable; });
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
          "The weights as the engine packed them itself, not a copy; none if it did not.")
      .def("finish", &Engine::finish, nb::call_guard<GilRelease>(),
           "Wait for work that continues after calls, such as writing compiled shaders to disk.")
      .def("stats", &Engine::stats, nb::call_guard<GilRelease>());
}

}  // namespace metal_prefill::python
