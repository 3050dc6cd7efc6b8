#include <nanobind/stl/function.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/set.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../engine/engine.h"
#include "../engine/inspection.h"
#include "arrays.h"
#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace metal_prefill::python {
namespace {

// Returns token ids, how many of them are cached, and the parts of each layer: K and V, or its float32 state.
nb::tuple export_state(Session& session) {
  std::vector<Result<std::uint8_t>> parts;
  const auto [tokens, cached] = without_gil([&] {
    return session.export_state([&](int, Session::Part, std::size_t bytes) {
      return reinterpret_cast<std::byte*>(parts.emplace_back(bytes).data());
    });
  });
  Result<TokenId> ids(tokens.size());
  std::copy(tokens.begin(), tokens.end(), ids.data());
  nb::list arrays;
  for (auto& part : parts) arrays.append(part.release());
  return nb::make_tuple(ids.release(), cached, arrays);
}

void import_state(Session& session, const TokenArray& tokens, std::size_t cached,
                  const std::vector<ByteArray>& parts) {
  const Config& config = session.engine().config();
  std::size_t expected = 0, next = 0;
  for (int layer = 0; layer < config.n_layers; ++layer)
    expected += (config.caches(layer) ? 2 : 0) + (config.state_values(layer) > 0);
  if (parts.size() != expected)
    throw std::invalid_argument("a state of " + std::to_string(config.n_layers) + " layers has " +
                                std::to_string(expected) + " arrays, got " + std::to_string(parts.size()));
  without_gil([&] {
    session.import_state(view(tokens), cached, [&](int layer, Session::Part part, std::size_t bytes) {
      static constexpr const char* kParts[] = {"keys of layer ", "values of layer ", "states of layer "};
      const ByteArray& array = parts[next++];
      if (array.shape(0) != bytes)
        throw std::invalid_argument(kParts[int(part)] + std::to_string(layer) + " have " +
                                    std::to_string(array.shape(0)) + " bytes, expected " +
                                    std::to_string(bytes));
      return reinterpret_cast<const std::byte*>(array.data());
    });
  });
}

}  // namespace

void bind_sessions(nb::module_& m) {
  nb::class_<SessionInspector>(m, "SessionInspector", "Access to the passes of a session.")
      .def("plan", &SessionInspector::plan, "tokens"_a, nb::call_guard<GilRelease>())
      .def(
          "trace",
          [](SessionInspector& self, TokenArray tokens, nb::object progress, std::set<std::size_t> contents) {
            ProgressGuard guard(std::move(progress));
            Trace trace = {.dispatches = {}, .kept = std::move(contents)};
            const TokenId token = without_gil([&] {
              try {
                return self.trace(view(tokens), trace, guard.function()).token;
              } catch (const NumericalError&) {
                if (trace.kept.empty()) throw;
                return TokenId(-1);
              }
            });
            guard.raise_pending();
            return std::pair(token, std::move(trace.dispatches));
          },
          "tokens"_a, "progress"_a = nb::none(), "contents"_a = std::set<std::size_t>(),
          "Run a prompt, each dispatch alone; return the greedy next token and the dispatches. `contents` "
          "are the numbers of those whose buffers are kept. With any, which show the cause, results that are "
          "NaN are not an error, and the token is -1.")
      .def("pipelines", &SessionInspector::pipelines)
      .def_prop_ro("shaders_were_compiled", &SessionInspector::shaders_were_compiled,
                   "When the package was built; else when the model was opened.")
      .def_prop_ro("no_matmul_tensor", &SessionInspector::no_matmul_tensor,
                   "Why a GPU with matrix units does without them; empty: it uses them, or has none.");

  nb::class_<Session>(m, "Session", "KV cache, position and token ids.")
      .def("check_claim", &Session::check_claim, "claim"_a)
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
           nb::sig("def export_state(self) -> tuple[numpy.ndarray, int, list[numpy.ndarray]]"))
      .def("import_state", &import_state, "tokens"_a, "cached"_a, "parts"_a)
      .def("memory_bytes", &Session::memory_bytes)
      .def("inspector", &SessionInspector::of, nb::keep_alive<0, 1>(),
           "An inspector of the session's passes; None if the engine makes no dispatches.")
      .def("stats", &Session::stats, nb::call_guard<GilRelease>());
}

}  // namespace metal_prefill::python
