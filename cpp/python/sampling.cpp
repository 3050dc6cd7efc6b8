#include "../sampling/sampling.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../base/rounding.h"
#include "../sampling/lookup.h"
#include "arrays.h"
#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace metal_prefill::python {

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

  // Serializes calls, as the GIL does: neither class has its own lock.
  const nb::lock_self locked;
  nb::class_<Sampler>(m, "Sampler", "Chooses the tokens of one text.")
      .def(
          "__init__",
          [](Sampler* self, const SamplingOptions& options, std::uint64_t seed, std::uint32_t answer,
             TokenArray tokens) { new (self) Sampler(options, seed, answer, view(tokens)); },
          "options"_a, "seed"_a, "answer"_a, "tokens"_a)
      .def("forbid", &Sampler::forbid, "tokens"_a, "position"_a, locked)
      .def(
          "allow",
          [](Sampler& self, const std::vector<nb::bytes>& masks) {
            std::vector<Sampler::Mask> words;
            for (const nb::bytes& bits : masks) {
              words.emplace_back(ceil_div(bits.size(), sizeof(std::uint32_t)));
              std::memcpy(words.back().data(), bits.c_str(), bits.size());
            }
            self.allow(std::move(words));
          },
          "masks"_a, locked,
          "Takes whether each token may be chosen next, after one token more, and so on; the last counts "
          "from "
          "there on: bit id % 32 of word id // 32.")
      .def("follow", &Sampler::follow, "tokens"_a, locked)
      .def("report", &Sampler::report, "best"_a, locked)
      .def(
          "choose",
          [](Sampler& self, FloatArray logits, const std::vector<TokenId>& ahead) {
            return self.choose(view(logits), ahead);
          },
          "logits"_a, "ahead"_a = std::vector<TokenId>(), locked)
      .def("accept", &Sampler::accept, "token"_a, locked)
      .def_prop_ro("position", &Sampler::position, locked)
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
          locked,
          "Of each choice of the last call: its log probability, and ids and log probabilities of the most "
          "probable tokens.");
  nb::class_<Lookup>(m, "Lookup", "Drafts of what follows a text, found in the text itself.")
      .def(nb::init<>())
      .def(
          "append", [](Lookup& self, TokenArray tokens, bool forced) { self.append(view(tokens), forced); },
          "tokens"_a, "forced"_a = false, locked)
      .def_prop_ro("matched", &Lookup::matched, locked, "How many of the last tokens occurred before.")
      .def_prop_ro("since_change", &Lookup::since_change, locked,
                   "Number of equal tokens since the last change; None if no place is kept.")
      .def("after_match", &Lookup::after_match, "count"_a, locked, "The tokens that followed the match.")
      .def("after_change", &Lookup::after_change, "count"_a, locked,
           "The tokens that followed the place kept.");
}

}  // namespace metal_prefill::python
