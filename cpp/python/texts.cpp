// Whole texts, each of which is computed from an empty context and then forgotten.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "computation.h"
#include "vector_length.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace metal_prefill::python {
namespace {

// The output for a kind of pooling, which writes to `result`.
Output output_of(const std::string& pooling, float* result, int rows, int dim) {
  if (pooling == "none") return HiddenOutput{result, rows, dim, true};
  if (pooling == "last") return HiddenOutput{result, 1, dim, true};
  if (pooling == "mean") return PooledOutput{PooledOutput::Kind::kMean, result, rows, dim};
  if (pooling == "cls") return PooledOutput{PooledOutput::Kind::kFirst, result, rows, dim};
  throw std::invalid_argument("pooling of a text is none, mean, cls or last, not '" + pooling + "'");
}

// A request per text. Texts are many and short: creating requests and results one by one in Python would take
// longer than the computation.
class Texts final : public Computation {
 public:
  Texts(std::shared_ptr<Engine> engine, TokenArray tokens, const TokenArray& lengths,
        const std::string& pooling, const std::optional<TokenArray>& segments,
        const std::optional<TokenArray>& expansions, bool seen)
      : scratch_{std::move(engine)},
        tokens_(std::move(tokens)),
        values_(std::size_t(scratch_.engine->config().dim) *
                (pooling == "none" ? tokens_.shape(0) : lengths.shape(0))) {
    const int dim = scratch_.engine->config().dim;
    for (const auto& [numbers, name] :
         {std::pair(&segments, "segments"), std::pair(&expansions, "expansions")})
      if (*numbers && (*numbers)->shape(0) != lengths.shape(0))
        throw std::invalid_argument("there are " + std::to_string((*numbers)->shape(0)) + " " + name +
                                    " for " + std::to_string(lengths.shape(0)) + " texts");
    std::span<const TokenId> left = view(tokens_);
    float* result = values_.data();
    for (const TokenId length : view(lengths)) {
      const std::size_t text = requests_.size();
      if (length < 1 || std::size_t(length) > left.size())
        throw std::invalid_argument("text " + std::to_string(text) + " has " + std::to_string(length) +
                                    " tokens, of " + std::to_string(left.size()) + " that are left");
      Request& request = requests_.emplace_back();
      request.scratch = &scratch_;
      request.tokens = left.first(std::size_t(length));
      request.output = output_of(pooling, result, int(length), dim);
      request.segment = segments ? view(*segments)[text] : length;
      request.expansion = {expansions ? view(*expansions)[text] : 0, seen};
      left = left.subspan(request.tokens.size());
      result += dim * (pooling == "none" ? length : 1);
    }
    if (!left.empty())
      throw std::invalid_argument("the texts have " + std::to_string(tokens_.shape(0) - left.size()) +
                                  " tokens, but " + std::to_string(tokens_.shape(0)) + " were given");
  }

  // Returns the values, and the exceptions by index of their text.
  nb::object take_result() override {
    nb::dict errors;
    for (std::size_t i = 0; i < requests_.size(); ++i)
      if (requests_[i].error) errors[nb::int_(i)] = exception_of(requests_[i].error);
    return nb::make_tuple(values_.release(), errors);
  }

 protected:
  std::span<Request> requests() override { return requests_; }

 private:
  const Scratch scratch_;
  TokenArray tokens_;
  std::vector<Request> requests_;
  FloatResult values_;
};

}  // namespace

void bind_texts(nb::module_& m) {
  nb::class_<Texts, Computation>(
      m, "Texts",
      "Texts, each in a session of its own, whose tokens follow each other in `tokens`; for one call of "
      "Engine.forward_batch.")
      .def(
          nb::init<std::shared_ptr<Engine>, TokenArray, const TokenArray&, const std::string&,
                   const std::optional<TokenArray>&, const std::optional<TokenArray>&, bool>(),
          "engine"_a, "tokens"_a, "lengths"_a, "pooling"_a, "segments"_a = nb::none(),
          "expansions"_a = nb::none(), "seen"_a = false,
          "The result is a pair: the vectors of pooling mean, cls or last, [texts * dim], or the states of "
          "all tokens, [tokens * dim]; and the exceptions that ended texts, by their numbers. `segments` "
          "are the numbers of first tokens with type 0, by default all. `expansions` are the numbers of last "
          "tokens that expand a query; unless `seen`, no token sees them.");
  m.def(
      "common_prefix",
      [](const TokenArray& a, const TokenArray& b) { return common_prefix(view(a), view(b)); }, "a"_a, "b"_a,
      "Length of the longest common prefix of two lists of token ids.");
  m.def(
      "normalize",
      [](nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu> vectors) {
        for (std::size_t i = 0; i < vectors.shape(0); ++i)
          normalize({vectors.data() + i * vectors.shape(1), vectors.shape(1)});
      },
      "vectors"_a, "Divide vectors by their lengths, in place; those of length 0 stay.");
}

}  // namespace metal_prefill::python
