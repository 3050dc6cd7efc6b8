// The fields of every argument struct. args.h defines the structs from them. On the host,
// cpp/metal/plan/args_layout.h builds tables of names, types and offsets to read recorded arguments. Both
// define the macros first.
// clang-format off

// Up to four matrices of the same type and number of columns, read as if their rows were stacked: Q, K and V,
// or gate and up.
ARGS_STRUCT(StackedWeights)
  ARGS_ARRAY(u64_t, offset, STACKED_MATRICES)  // from the binding to each matrix
  ARGS_ARRAY(u32_t, rows, STACKED_MATRICES)    // 0 for an absent matrix
  ARGS_FIELD(u32_t, row_bytes)
  ARGS_FIELD(u32_t, unused)     // pads the struct to a multiple of 8 bytes
ARGS_END(StackedWeights, 56)

// x[t] (+)= scale * table[ids[t * id_stride]]
ARGS_STRUCT(EmbedArgs)
  ARGS_FIELD(u32_t, dim)
  ARGS_FIELD(u32_t, row_bytes)  // of the table
  ARGS_FIELD(u32_t, tokens)
  ARGS_FIELD(u32_t, vocab_size)
  ARGS_FIELD(u32_t, id_stride)  // 1; 2 for ids in Candidates; 4 for positions in PassRows
  ARGS_FIELD(u32_t, accumulate)
  ARGS_FIELD(float, scale)
ARGS_END(EmbedArgs, 28)

// y[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight, or x[t]
ARGS_STRUCT(RmsnormArgs)
  ARGS_FIELD(u32_t, dim)
  ARGS_FIELD(u32_t, stride)      // between tokens, of both x and y
  ARGS_FIELD(u32_t, has_weight)  // false: no norm
  ARGS_FIELD(float, eps)
ARGS_END(RmsnormArgs, 16)

// y[t] = (y[t] + x[t] / sqrt(mean(x[t]^2) + eps) * weight) * scale. Then, in rmsnorm_add_norm,
// normed[t] = y[t] / sqrt(mean(y[t]^2) + next_eps) * next_weight, or y[t].
ARGS_STRUCT(RmsnormAddArgs)
  ARGS_FIELD(u32_t, dim)
  ARGS_FIELD(u32_t, has_scale)  // false: the factor is 1
  ARGS_FIELD(u32_t, has_next)   // false: no second norm
  ARGS_FIELD(float, eps)
  ARGS_FIELD(float, next_eps)
ARGS_END(RmsnormAddArgs, 20)

// y[t] = (x[t] - mean(x[t])) / sqrt(variance(x[t]) + eps) * weight + bias
ARGS_STRUCT(LayernormArgs)
  ARGS_FIELD(u32_t, dim)
  ARGS_FIELD(u32_t, width)   // columns of mean and variance; later ones are zero
  ARGS_FIELD(u32_t, stride)  // between tokens, of both x and y
  ARGS_FIELD(u32_t, has_bias)
  ARGS_FIELD(u32_t, has_addend)       // if bound, x[t] + addend replaces x[t]
  ARGS_FIELD(u32_t, has_second_bias)  // layernorm_twice
  ARGS_FIELD(float, eps)
ARGS_END(LayernormArgs, 28)

// x[t] += bias
ARGS_STRUCT(AddBiasArgs)
  ARGS_FIELD(u32_t, dim)
ARGS_END(AddBiasArgs, 4)

// y[t][row] (+)= w[row] . x[t]
ARGS_STRUCT(MatvecArgs)
  ARGS_FIELD(StackedWeights, weights)
  ARGS_FIELD(u32_t, in_dim)
  ARGS_FIELD(u32_t, out_dim)        // rows of all stacked matrices; for SwiGLU, of one of the two
  ARGS_FIELD(u32_t, lanes_per_row)  // 8, 16 or 32 lanes share a row
  ARGS_FIELD(u32_t, tokens)
  ARGS_FIELD(u32_t, out_stride)     // between tokens of y
  ARGS_FIELD(u32_t, accumulate)     // matvec: add to y instead of storing
  ARGS_FIELD(u32_t, activation)     // SwiGLU only
  ARGS_FIELD(float, eps)            // with RMSNorm only
  ARGS_FIELD(u32_t, norm_threads)   // with RMSNorm only: threads per threadgroup of rmsnorm_f32
  ARGS_FIELD(u32_t, unused)         // pads the struct to a multiple of 8 bytes
ARGS_END(MatvecArgs, 96)

ARGS_STRUCT(MatmulArgs)
  ARGS_FIELD(StackedWeights, weights)
  ARGS_FIELD(u32_t, in_dim)
  ARGS_FIELD(u32_t, out_dim)     // rows of all stacked matrices; for SwiGLU, of one of the two
  ARGS_FIELD(u32_t, tokens)
  ARGS_FIELD(u32_t, out_stride)
  ARGS_FIELD(u32_t, accumulate)
  ARGS_FIELD(u32_t, activation)  // SwiGLU only
ARGS_END(MatmulArgs, 80)

// A row of a pass: a token of one of its sequences.
ARGS_STRUCT(PassRow)
  ARGS_FIELD(u32_t, position)    // of the token in its sequence
  ARGS_FIELD(u32_t, pages)       // index of the first page of its sequence in the block tables of the pass
  ARGS_FIELD(u32_t, splits)      // attention_decode: threadgroups that share the keys
  ARGS_FIELD(u32_t, split_keys)  // attention_decode: keys of each
ARGS_END(PassRow, 16)

// The work of a simdgroup of attention_prefill: a tile of the stacked query heads of a run of rows, which are
// consecutive both in the pass and in their sequence.
ARGS_STRUCT(AttentionTile)
  ARGS_FIELD(u32_t, row)       // first row of the run
  ARGS_FIELD(u32_t, tokens)    // rows of the run
  ARGS_FIELD(u32_t, position)  // of its first row
  ARGS_FIELD(u32_t, pages)     // as in PassRow
  ARGS_FIELD(u32_t, first)     // stacked row of the run at which the tile begins
  ARGS_FIELD(u32_t, end)       // end of the positions that rows see, if they see later ones
ARGS_END(AttentionTile, 24)

// Rotates q in place and appends K and V to the cache. A row of qkv begins with [n_heads * query_step |
// n_kv_heads * key_dim | n_kv_heads * value_dim], or has queries only.
ARGS_STRUCT(RopeArgs)
  ARGS_FIELD(u32_t, n_heads)
  ARGS_FIELD(u32_t, n_kv_heads)
  ARGS_FIELD(u32_t, key_dim)
  ARGS_FIELD(u32_t, value_dim)
  ARGS_FIELD(u32_t, rope_dim)      // 0: no rotation
  ARGS_FIELD(u32_t, style)         // ROPE_INTERLEAVED or ROPE_NEOX
  ARGS_FIELD(u32_t, page_stride)   // between pages of the cache
  ARGS_FIELD(u32_t, has_bias)      // biases of q, k and v are bound
  ARGS_FIELD(u32_t, has_q_norm)    // RMSNorm of each head is applied here
  ARGS_FIELD(u32_t, has_k_norm)
  ARGS_FIELD(u32_t, has_v_norm)    // RMSNorm without weights
  ARGS_FIELD(u32_t, norm_after)    // the norms of q and k come after the rotation
  ARGS_FIELD(float, eps)
  ARGS_FIELD(u32_t, skip_queries)  // only K and V are needed
  ARGS_FIELD(u32_t, skip_keys)     // K and V of these rows are already in the cache
  ARGS_FIELD(u32_t, query_step)    // between heads of q
  ARGS_FIELD(u32_t, row_stride)    // between tokens of qkv
ARGS_END(RopeArgs, 68)

// softmax(scale * q . k) v over the keys at and before each token's position. K and V of a page are
// [PAGE_POSITIONS][kv_head][dim].
ARGS_STRUCT(AttentionArgs)
  ARGS_FIELD(u32_t, n_heads)
  ARGS_FIELD(u32_t, n_kv_heads)
  ARGS_FIELD(u32_t, key_dim)
  ARGS_FIELD(u32_t, value_dim)
  ARGS_FIELD(u32_t, q_stride)     // between tokens of q
  ARGS_FIELD(u32_t, page_stride)  // between pages of the cache
  ARGS_FIELD(u32_t, window)       // positions that a token sees, including its own; 0: all
  ARGS_FIELD(u32_t, both_ways)  // tokens see later ones: half the window before, half after
  ARGS_FIELD(u32_t, splits)       // attention_decode: maximum splits of a row; 1: no combining pass
  ARGS_FIELD(u32_t, tiles)        // attention_prefill: number of tiles
  ARGS_FIELD(float, scale)        // of q . k
  ARGS_FIELD(u32_t, alibi_heads)  // attention_prefill: largest power of two up to n_heads; 0: no ALiBi
  ARGS_FIELD(float, max_alibi_bias)
  ARGS_FIELD(u32_t, position_bias)  // attention_prefill: a bias of relative positions is bound
  ARGS_FIELD(u32_t, added_keys)   // attention_prefill: keys per row of the bound score addends; 0: none
  ARGS_FIELD(u32_t, query_step)   // between heads of q
  ARGS_FIELD(float, score_cap)    // soft limit of scores; 0: none
  ARGS_FIELD(u32_t, has_sinks)    // attention_prefill: sinks of the heads are bound
ARGS_END(AttentionArgs, 72)

// Contribution of relative positions to scores: scale * (q . key_rows[row] + k . query_rows[row]).
ARGS_STRUCT(RelativeScoresArgs)
  ARGS_FIELD(u32_t, n_heads)
  ARGS_FIELD(u32_t, key_dim)
  ARGS_FIELD(u32_t, q_stride)     // between tokens of q
  ARGS_FIELD(u32_t, page_stride)  // between pages of the cache
  ARGS_FIELD(u32_t, tile_rows)    // rows per AttentionTile
  ARGS_FIELD(u32_t, context)      // distances have rows from -context on
  ARGS_FIELD(u32_t, keys)         // keys per row of the result
  ARGS_FIELD(float, scale)
ARGS_END(RelativeScoresArgs, 32)

// Combines rope_append and attention_decode for sequences with a single token each.
ARGS_STRUCT(RopeAttentionArgs)
  ARGS_FIELD(RopeArgs, rope)
  ARGS_FIELD(AttentionArgs, attention)
ARGS_END(RopeAttentionArgs, 140)

// y[t][head] *= sigmoid(gate[t][head]). In a row of q, the gate of a head is after its query.
ARGS_STRUCT(GateHeadsArgs)
  ARGS_FIELD(u32_t, n_heads)
  ARGS_FIELD(u32_t, value_dim)
  ARGS_FIELD(u32_t, q_stride)    // between tokens of q
  ARGS_FIELD(u32_t, query_step)  // between heads of q; the second half is the gate
  ARGS_FIELD(u32_t, tokens)
ARGS_END(GateHeadsArgs, 20)

// A row of a pass, for recurrent layers. The rows of a chunk are consecutive except at one place. After the
// entries of all rows, a table repeats the first entry of each chunk.
ARGS_STRUCT(StateRow)
  ARGS_FIELD(u32_t, token)   // index in the chunk
  ARGS_FIELD(u32_t, first)   // row of the chunk's first token
  ARGS_FIELD(u32_t, split)   // token whose row is `rest`; rows of later tokens follow it
  ARGS_FIELD(u32_t, rest)
  ARGS_FIELD(u32_t, before)  // slot with the state before the chunk, or STATE_NONE if it is zero
  ARGS_FIELD(u32_t, after)   // slot for the state after the token, or STATE_NONE if it is not stored
  ARGS_FIELD(u32_t, tokens)  // of the chunk
ARGS_END(StateRow, 28)

ARGS_STRUCT(CausalConvArgs)
  ARGS_FIELD(u32_t, channels)
  ARGS_FIELD(u32_t, taps)         // tokens that the convolution covers
  ARGS_FIELD(u32_t, in_stride)    // between tokens of the input
  ARGS_FIELD(u32_t, slot_stride)  // between slots of the states
  ARGS_FIELD(u32_t, tokens)
  ARGS_FIELD(u32_t, first_out)    // first row with a result
  ARGS_FIELD(u32_t, gated)        // the input is [b | c | x]; otherwise the result is activated
  ARGS_FIELD(u32_t, biased)
ARGS_END(CausalConvArgs, 32)

// Combines rope_append and causal_conv for the same rows.
ARGS_STRUCT(RopeConvArgs)
  ARGS_FIELD(RopeArgs, rope)
  ARGS_FIELD(CausalConvArgs, conv)
  ARGS_FIELD(u32_t, qkv_column)   // first column of q in a row
  ARGS_FIELD(u32_t, conv_column)
  ARGS_FIELD(u32_t, head_groups)  // threadgroups per row that process heads
ARGS_END(RopeConvArgs, 112)

// The scan of a state-space layer. A row of the input is [heads][dim] of x, [groups][rows] of b, and the same
// of c.
ARGS_STRUCT(ScanArgs)
  ARGS_FIELD(u32_t, heads)
  ARGS_FIELD(u32_t, heads_per_group)  // heads that share b and c
  ARGS_FIELD(u32_t, dim)              // of a head
  ARGS_FIELD(u32_t, rows)             // of its state
  ARGS_FIELD(u32_t, row_stride)       // between tokens of the projection
  ARGS_FIELD(u32_t, dt_column)        // column of dt in the projection
  ARGS_FIELD(u32_t, slot_stride)      // between slots of the states
  ARGS_FIELD(u32_t, tokens)
  ARGS_FIELD(u32_t, first_out)        // first row with a result
  ARGS_FIELD(u32_t, gated)            // the result is gated by the first columns of the projection
ARGS_END(ScanArgs, 40)

ARGS_STRUCT(ScanNormArgs)
  ARGS_FIELD(u32_t, inner)       // values of a row
  ARGS_FIELD(u32_t, groups)
  ARGS_FIELD(u32_t, row_stride)  // between tokens of the gates
  ARGS_FIELD(u32_t, first_out)   // first row with a result
  ARGS_FIELD(float, eps)
ARGS_END(ScanNormArgs, 20)

// The gated delta rule of each head, token by token: S = decay S; S += k (beta (v - k S)); out = q S / sqrt
// (key_dim). q and k have length 1. A row of the input is [groups][key_dim] of q, the same of k, and
// [heads][value_dim] of v.
ARGS_STRUCT(GatedDeltaArgs)
  ARGS_FIELD(u32_t, heads)
  ARGS_FIELD(u32_t, groups)       // head h uses q and k of group h % groups
  ARGS_FIELD(u32_t, key_dim)
  ARGS_FIELD(u32_t, value_dim)
  ARGS_FIELD(u32_t, in_stride)    // between tokens of q, k and v
  ARGS_FIELD(u32_t, rate_stride)  // between tokens of alpha and beta
  ARGS_FIELD(u32_t, slot_stride)  // between slots of the states
  ARGS_FIELD(u32_t, tokens)
ARGS_END(GatedDeltaArgs, 32)

// y[t][head] = x[t][head] / sqrt(mean(x[t][head]^2) + eps) * weight * silu(gate[t][head])
ARGS_STRUCT(GatedNormArgs)
  ARGS_FIELD(u32_t, heads)
  ARGS_FIELD(u32_t, dim)          // of a head
  ARGS_FIELD(u32_t, gate_stride)  // between tokens of the gate
  ARGS_FIELD(float, eps)
ARGS_END(GatedNormArgs, 16)

// out[t][i] = activation(gate[t][i]) * up[t][i]. A row of the input, like the bias added to it, is [gate |
// up]. Without a gate: activation(up[t][i]).
ARGS_STRUCT(SwigluArgs)
  ARGS_FIELD(u32_t, ffn_dim)
  ARGS_FIELD(u32_t, tokens)
  ARGS_FIELD(u32_t, activation)
  ARGS_FIELD(u32_t, gated)
  ARGS_FIELD(u32_t, has_bias)
ARGS_END(SwigluArgs, 20)

// x[t][layer] = (x[t][layer] / sqrt(mean(x[t][layer]^2) + eps) * weight + added[t][layer]) / sqrt(2)
ARGS_STRUCT(LayerInputsArgs)
  ARGS_FIELD(u32_t, dim)     // per layer
  ARGS_FIELD(u32_t, layers)
  ARGS_FIELD(float, filled)  // fraction of `dim` that is not padding
  ARGS_FIELD(float, eps)
ARGS_END(LayerInputsArgs, 16)

// out[t][i] = activation(gate[t][i]) * input[t][i]
ARGS_STRUCT(GateInputArgs)
  ARGS_FIELD(u32_t, dim)
  ARGS_FIELD(u32_t, input_stride)  // between tokens of the input
  ARGS_FIELD(u32_t, tokens)
  ARGS_FIELD(u32_t, activation)
ARGS_END(GateInputArgs, 16)

// One of the experts of a row.
ARGS_STRUCT(Route)
  ARGS_FIELD(u32_t, expert)
  ARGS_FIELD(u32_t, place)   // of its result
  ARGS_FIELD(float, factor)  // of its result
ARGS_END(Route, 12)

// Consecutive places of one expert.
ARGS_STRUCT(ExpertTile)
  ARGS_FIELD(u32_t, expert)
  ARGS_FIELD(u32_t, first)
  ARGS_FIELD(u32_t, count)   // 0 if there are fewer tiles
ARGS_END(ExpertTile, 12)

// The `used` experts with the best scores for rmsnorm(x[t]), or for x[t]. Scores are the softmax or the
// sigmoids of products.
ARGS_STRUCT(ChooseExpertsArgs)
  ARGS_FIELD(u32_t, dim)
  ARGS_FIELD(u32_t, row_bytes)     // of the router
  ARGS_FIELD(u32_t, experts)
  ARGS_FIELD(u32_t, used)
  ARGS_FIELD(u32_t, sigmoid)
  ARGS_FIELD(u32_t, has_bias)      // bias is added to scores, only to choose experts
  ARGS_FIELD(u32_t, has_offset)    // offset is added to products
  ARGS_FIELD(u32_t, normalize)     // divides the factors by their sum
  ARGS_FIELD(u32_t, has_norm)
  ARGS_FIELD(float, scale)         // multiplies the factors
  ARGS_FIELD(float, eps)
  ARGS_FIELD(u32_t, norm_threads)  // threads per threadgroup of rmsnorm_f32
ARGS_END(ChooseExpertsArgs, 48)

// Sorts routes by expert.
ARGS_STRUCT(SortRoutesArgs)
  ARGS_FIELD(u32_t, experts)
  ARGS_FIELD(u32_t, used)
  ARGS_FIELD(u32_t, routes)
  ARGS_FIELD(u32_t, tiles)   // maximum number
ARGS_END(SortRoutesArgs, 16)

// y[place][row] = w[expert][row] . x + bias[expert][row] of each route.
ARGS_STRUCT(ExpertsArgs)
  ARGS_FIELD(StackedWeights, weights)  // rows of all experts: of gate and up for SwiGLU, or of up alone
  ARGS_FIELD(u32_t, in_dim)
  ARGS_FIELD(u32_t, out_dim)           // rows of an expert; for SwiGLU, of one of the two matrices
  ARGS_FIELD(u32_t, used)              // matvec, SwiGLU: routes per row of x
  ARGS_FIELD(u32_t, lanes_per_row)     // matvec: as in MatvecArgs
  ARGS_FIELD(u32_t, activation)        // SwiGLU only
  ARGS_FIELD(u32_t, has_bias)
ARGS_END(ExpertsArgs, 80)

// x[t] += the sum of factor * y[place] over the routes of t, in order
ARGS_STRUCT(AddExpertsArgs)
  ARGS_FIELD(u32_t, dim)
  ARGS_FIELD(u32_t, used)
ARGS_END(AddExpertsArgs, 8)

// x = cap * tanh(x / cap)
ARGS_STRUCT(SoftCapArgs)
  ARGS_FIELD(u32_t, n)
  ARGS_FIELD(float, cap)
ARGS_END(SoftCapArgs, 8)

ARGS_STRUCT(ArgmaxArgs)
  ARGS_FIELD(u32_t, n)  // of a row: values of the first stage, candidates of the second
ARGS_END(ArgmaxArgs, 4)

// Intermediate and final result of the argmax kernels.
ARGS_STRUCT(Candidate)
  ARGS_FIELD(float, value)
  ARGS_FIELD(u32_t, index)  // ARGMAX_NONE: every value was NaN
ARGS_END(Candidate, 8)

// log_probs[t] = logits[t][target[t]] - log(sum(exp(logits[t])))
ARGS_STRUCT(LogProbArgs)
  ARGS_FIELD(u32_t, vocab_size)
ARGS_END(LogProbArgs, 4)
