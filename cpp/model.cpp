#include "model.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numbers>
#include <stdexcept>

namespace metal_prefill {

namespace {

std::string shape_text(int rows, int cols) {
  return rows == 1 ? "[" + std::to_string(cols) + "]"
                   : "[" + std::to_string(rows) + ", " + std::to_string(cols) + "]";
}

class Checker {
 public:
  explicit Checker(const Model& model) : model_(model) {}

  void matrix(const Tensor& t, const char* role, int rows, int cols) const {
    if (!t) throw std::invalid_argument(std::string("tensor for ") + role + " is missing");
    if (t.rows != rows || t.cols != cols)
      throw std::invalid_argument("tensor '" + t.name + "' has shape " + shape_text(t.rows, t.cols) +
                                  ", expected " + shape_text(rows, cols));
    const std::size_t expected = row_bytes(t.type, std::size_t(cols)) * std::size_t(rows);
    const std::byte* end = model_.mapping.data + model_.mapping.bytes;
    if (t.bytes != expected || t.data < model_.mapping.data || t.data > end ||
        std::size_t(end - t.data) < t.bytes)
      throw std::invalid_argument("tensor '" + t.name + "' of " + std::to_string(expected) +
                                  " bytes does not lie within the file");
  }

  void vector(const Tensor& t, const char* role, int n, bool required) const {
    if (!t && !required) return;
    matrix(t, role, 1, n);
    if (t.type != TensorType::kF32)
      throw std::invalid_argument("tensor '" + t.name + "' is " + std::string(type_info(t.type).name) +
                                  ", expected F32");
  }

 private:
  const Model& model_;
};

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(std::string("invalid configuration: ") + what);
}

// Per-layer lists are either empty or complete.
template <typename T>
bool per_layer(const std::vector<T>& values, int n_layers) {
  return values.empty() || values.size() == std::size_t(n_layers);
}

// Dimension of a rotated pair that turns `rotations` times within the original context (YaRN,
// arXiv:2309.00071, section 3.2).
float yarn_dimension(const Config& c, float base, float rotations) {
  return float(c.rope_dim) *
         std::log(float(c.rope_original_context) / (rotations * 2.0f * std::numbers::pi_v<float>)) /
         (2.0f * std::log(base));
}

}  // namespace

Tensor* find_slot(Model& model, const std::string& role, int layer) {
  if (layer < 0) {
    if (role == "token_embedding") return &model.token_embedding;
    if (role == "output_norm") return &model.output_norm;
    if (role == "output") return &model.output;
    if (role == "rope_freqs") return &model.rope_freqs;
    return nullptr;
  }
  if (std::size_t(layer) >= model.layers.size()) return nullptr;
  LayerWeights& w = model.layers[std::size_t(layer)];
  static const std::map<std::string, Tensor LayerWeights::*> kSlots = {
      {"attn_norm", &LayerWeights::attn_norm},
      {"wq", &LayerWeights::wq},
      {"wk", &LayerWeights::wk},
      {"wv", &LayerWeights::wv},
      {"bq", &LayerWeights::bq},
      {"bk", &LayerWeights::bk},
      {"bv", &LayerWeights::bv},
      {"q_norm", &LayerWeights::q_norm},
      {"k_norm", &LayerWeights::k_norm},
      {"wo", &LayerWeights::wo},
      {"post_attn_norm", &LayerWeights::post_attn_norm},
      {"ffn_norm", &LayerWeights::ffn_norm},
      {"w_gate", &LayerWeights::w_gate},
      {"w_up", &LayerWeights::w_up},
      {"w_down", &LayerWeights::w_down},
      {"post_ffn_norm", &LayerWeights::post_ffn_norm},
  };
  const auto slot = kSlots.find(role);
  return slot == kSlots.end() ? nullptr : &(w.*slot->second);
}

void validate(const Model& model) {
  const Config& c = model.config;
  require(c.n_layers > 0 && c.dim > 0 && c.ffn_dim > 0 && c.vocab_size > 0 && c.context_length > 0,
          "layers, dimensions, vocabulary and context length must be positive");
  require(c.n_heads > 0 && c.n_kv_heads > 0 && c.n_heads % c.n_kv_heads == 0,
          "the number of heads must be a multiple of the number of key-value heads");
  require(c.key_dim > 0 && c.value_dim > 0, "head dimensions must be positive");
  require(c.rope_dim >= 0 && c.rope_dim <= c.key_dim && c.rope_dim % 2 == 0,
          "the rotated dimensions must be an even part of the head");
  require(c.rope_base > 0 && c.rope_factor > 0 && c.norm_eps >= 0,
          "rope and norm parameters must be positive");
  require(c.rope_scaling != RopeScaling::kYarn || c.rope_original_context > 0,
          "YaRN scaling needs the original context length");
  require(per_layer(c.layer_uses_rope, c.n_layers) && per_layer(c.layer_window, c.n_layers) &&
              per_layer(c.layer_rope_base, c.n_layers) && per_layer(c.layer_rope_factor, c.n_layers),
          "per-layer lists must name every layer");
  require(model.layers.size() == std::size_t(c.n_layers), "weights of every layer are needed");

  const Checker check(model);
  check.matrix(model.token_embedding, "the token embedding", c.vocab_size, c.dim);
  check.vector(model.output_norm, "the output norm", c.dim, true);
  check.matrix(model.output, "the output projection", c.vocab_size, c.dim);
  check.vector(model.rope_freqs, "the rope frequency factors", c.rope_dim / 2, false);
  const int q = c.n_heads * c.key_dim, k = c.n_kv_heads * c.key_dim, v = c.n_kv_heads * c.value_dim;
  for (const LayerWeights& w : model.layers) {
    check.vector(w.attn_norm, "the attention norm", c.dim, true);
    check.matrix(w.wq, "the query projection", q, c.dim);
    check.matrix(w.wk, "the key projection", k, c.dim);
    check.matrix(w.wv, "the value projection", v, c.dim);
    check.vector(w.bq, "the query bias", q, false);
    check.vector(w.bk, "the key bias", k, false);
    check.vector(w.bv, "the value bias", v, false);
    check.vector(w.q_norm, "the query norm", c.key_dim, false);
    check.vector(w.k_norm, "the key norm", c.key_dim, false);
    check.matrix(w.wo, "the attention output projection", c.dim, c.n_heads * c.value_dim);
    check.vector(w.post_attn_norm, "the norm after attention", c.dim, false);
    check.vector(w.ffn_norm, "the feed-forward norm", c.dim, true);
    check.matrix(w.w_gate, "the gate projection", c.ffn_dim, c.dim);
    check.matrix(w.w_up, "the up projection", c.ffn_dim, c.dim);
    check.matrix(w.w_down, "the down projection", c.dim, c.ffn_dim);
    check.vector(w.post_ffn_norm, "the norm after the feed-forward", c.dim, false);
  }
}

std::vector<float> rope_frequencies(const Model& model, int layer, float* magnitude) {
  const Config& c = model.config;
  const float base = c.layer_rope_base.empty() ? c.rope_base : c.layer_rope_base[std::size_t(layer)];
  const float factor = c.layer_rope_factor.empty() ? c.rope_factor : c.layer_rope_factor[std::size_t(layer)];
  const bool yarn = c.rope_scaling == RopeScaling::kYarn && factor != 1.0f;
  float low = 0, high = 0;
  if (yarn) {
    low = std::max(0.0f, std::floor(yarn_dimension(c, base, c.rope_beta_fast)));
    high = std::min(float(c.rope_dim - 1), std::ceil(yarn_dimension(c, base, c.rope_beta_slow)));
  }
  const auto* freq_factors = reinterpret_cast<const float*>(model.rope_freqs.data);

  std::vector<float> theta(std::size_t(c.rope_dim / 2));
  for (std::size_t i = 0; i < theta.size(); ++i) {
    double frequency = std::pow(double(base), -2.0 * double(i) / double(c.rope_dim));
    if (freq_factors) frequency /= double(freq_factors[i]);
    if (yarn) {
      // Fast dimensions keep their frequency, slow ones are interpolated, those between are blended.
      const double ramp = std::clamp((double(i) - low) / std::max(0.001, double(high) - low), 0.0, 1.0);
      frequency = frequency * (1.0 - ramp) + frequency / double(factor) * ramp;
    } else if (c.rope_scaling == RopeScaling::kLinear) {
      frequency /= double(factor);
    }
    theta[i] = float(frequency);
  }
  *magnitude = yarn ? c.rope_attn_factor * (1.0f + 0.1f * std::log(factor)) : c.rope_attn_factor;
  return theta;
}

}  // namespace metal_prefill
