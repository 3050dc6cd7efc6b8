"""Errors in the engines, and in what they share."""

from __future__ import annotations

from mutants.mutant import Mutant

_ENGINE, _BATCH, _SAMPLING = "tests/test_engine.py", "tests/test_batch.py", "tests/test_native_sampling.py"
_MODELS = f"{_ENGINE}::test_logits_match_the_reference_on_every_kind_of_model"
_ROWS = "tests/test_row_outputs.py"

SHARED = (
    Mutant(
        "cpp/batch.cpp",
        "if (session.tokens_.size() > item.before) session.tokens_.resize(item.before);",
        "",
        "a call that fails in its second chunk keeps the first",
        ("tests/metal_engine/test_metal_engine.py", "-k", "second_chunk"),
    ),
    Mutant(
        "cpp/batch.cpp",
        "return item.without_output() + 1 + right - request.result.done;",
        "return item.without_output() + 2 + right - request.result.done;",
        "the first wrong guess stays in the session",
        (f"{_ROWS}::test_drafts_count_up_to_the_first_that_is_wrong", "-k", "cpu"),
    ),
    Mutant(
        "cpp/batch.cpp",
        "item.session().cache_->share(*leader.session().cache_, int(item.shared));",
        "",
        "a prompt that begins like another takes its tokens but not its pages",
        (f"{_BATCH}::test_prompts_of_one_batch_compute_their_common_beginning_once",),
    ),
    Mutant(
        "cpp/batch.cpp",
        "std::min(a.size(), b.size() - 1)",
        "std::min(a.size(), b.size())",
        "a prompt that others begin with computes no token of its own",
        (_BATCH, "-k", "cpu and (once or random or forward_prompts)", "--timeout=60"),
    ),
    Mutant(
        "cpp/engine.cpp",
        "tokens = tokens.first(tokens.size() - 1);",
        "tokens = tokens.first(tokens.size());",
        "a prompt that is known whole is not computed at all",
        ("tests/test_session.py", "-k", "reuse and cpu"),
    ),
    Mutant(
        "cpp/engine.cpp",
        "copy->cache_->share(*cache_, int(tokens_.size()));",
        "copy->cache_->share(*cache_, int(tokens_.size()) - 1);",
        "a fork lacks the last page where it holds one position",
        (f"{_BATCH}::test_a_fork_and_its_origin_go_their_own_ways_from_any_position", "-k", "cpu"),
    ),
    Mutant(
        "cpp/pages.cpp",
        "if (pool_.is_shared(pages_[i])) replaced.push_back(i);",
        "",
        "a session writes to pages that others hold",
        (f"{_BATCH}::test_a_fork_and_its_origin_go_their_own_ways_from_any_position", "-k", "cpu"),
    ),
    Mutant(
        "cpp/prefix_tree.cpp",
        "while (positions > 0 && wanted[std::size_t(positions) - 1] == kNone) --positions;",
        "",
        "padding of a page counts as tokens that agree",
        (_BATCH, "-k", "cpu and (living or finished or once or bounded or positions_only)"),
    ),
    Mutant(
        "cpp/rope.cpp",
        "frequency * (1.0 - ramp) + frequency / double(factor) * ramp",
        "frequency * ramp + frequency / double(factor) * (1.0 - ramp)",
        "YaRN interpolates fast dimensions in place of slow ones",
        (_MODELS, "-k", "yarn and cpu"),
    ),
    Mutant(
        "cpp/sampling.cpp",
        "if (before + half >= target) {",
        "if (before + half > target + 1) {",
        "top-p and typical sampling keep too many tokens",
        (f"{_SAMPLING}::test_choices_are_those_of_the_reference",),
    ),
    Mutant(
        "cpp/sampling.cpp",
        "score = score > 0 ? score / o.repeat_penalty : score * o.repeat_penalty;",
        "score = score / o.repeat_penalty;",
        "the repeat penalty favours tokens with a negative logit",
        (_SAMPLING, "-k", "repeat_penalty"),
    ),
    Mutant(
        "cpp/sampling.cpp",
        "philox({std::uint32_t(at_), answer_, 0, 0}, key)",
        "philox({std::uint32_t(at_), 0, 0, 0}, key)",
        "all answers to a prompt are the same",
        (f"{_SAMPLING}::test_each_seed_position_and_answer_has_a_number_of_its_own",),
    ),
    Mutant(
        "cpp/softmax.cpp",
        "p = p * r + 1.0 / 24;",
        "p = p * r + 1.0 / 25;",
        "the exponential of sampling is wrong in the fourth digit",
        (_SAMPLING,),
    ),
    Mutant(
        "cpp/suffix_automaton.cpp",
        "while (match_ != 0 && at(at(match_).link).length >= matched_) match_ = at(match_).link;",
        "",
        "a match stays with a state whose strings are all longer",
        ("tests/test_speculation.py", "-k", "lookup"),
    ),
    Mutant(
        "cpp/turn.cpp",
        "lost_ = lost_ || (owner != std::thread::id() && owner != std::this_thread::get_id());",
        "",
        "a forked process waits for a thread that it does not have",
        ("tests/test_fork.py::test_a_session_in_use_by_another_thread_is_lost_in_the_child",),
    ),
)

CPU = (
    Mutant(
        "cpp/model.h",
        "return norm_eps / (residual_scale * residual_scale);",
        "return norm_eps;",
        "the division of granite's residual stream changes its norms",
        ("tests/test_engine.py", "tests/test_hidden_states.py", "-k", "granite and not metal"),
    ),
    Mutant(
        "cpp/cpu/forward_pass.cpp",
        "work_.logits + used++ % kHeadRows * std::size_t(config_.vocab_size)",
        "work_.logits + used++ % 1 * std::size_t(config_.vocab_size)",
        "rows that are scored together share the memory of their logits",
        (f"{_ENGINE}::test_scores_match_the_reference", "-k", "cpu"),
    ),
    Mutant(
        "cpp/cpu/forward_pass.cpp",
        "run_layer(c, layer, layer + 1 < config_.n_layers ? all_ : wanted_);",
        "run_layer(c, layer, all_);\n  keep_rows(c, work_.x, config_.dim, wanted_.rows);",
        "the last layer computes all tokens where the output of one is wanted",
        ("tests/test_work_counts.py",),
    ),
    Mutant(
        "cpp/cpu/kv_pages.cpp",
        "key_block(round_up(positions, kKeyBlock))",
        "key_block(positions)",
        "a copied page lacks the keys of its last block",
        (f"{_BATCH}::test_a_fork_and_its_origin_go_their_own_ways_from_any_position", "-k", "cpu"),
    ),
    Mutant(
        "cpp/cpu/linear.cpp",
        "values[i] == best.value && index + i < best.index",
        "values[i] == best.value && index + i > best.index",
        "of equal logits the last one wins",
        ("tests/test_session.py::test_the_lowest_id_wins_a_tie", "-k", "cpu"),
    ),
    Mutant(
        "cpp/cpu/linear.cpp",
        "for (int r = 0; r < n_rows; ++r) out[r] = tile[t][r] + bias[r];",
        "for (int r = 0; r < n_rows; ++r) out[r] = tile[t][r];",
        "biases of q, k and v are left out",
        (_MODELS, "-k", "biases and cpu"),
    ),
    Mutant(
        "cpp/cpu/ops.cpp",
        "pairs += 1 + std::min(own, reach)",
        "pairs += std::min(own, reach)",
        "multiply-adds of attention are counted without the token itself",
        ("tests/test_work_counts.py",),
    ),
    Mutant(
        "cpp/cpu/ops.cpp",
        "to[d] += from[d];",
        "to[d] = from[d];",
        "the norm of a block overwrites the residual stream",
        (_MODELS, "-k", "gemma3 and cpu"),
    ),
    Mutant(
        "cpp/cpu/packing.cpp",
        "if constexpr (HasMin<Format>) out.min[r] = Format::min_bits(from);",
        "",
        "packed blocks have no minimum",
        (
            "tests/test_cpu_kernels.py::test_quantized_product_is_the_exact_one",
            "-k",
            "avx2 and (Q4_1 or Q5_1)",
        ),
    ),
    Mutant(
        "cpp/cpu/kv_pages.cpp",
        "if (used >= block) return;",
        "if (used < block) return;",
        "dimensions that fill keys up are not cleared",
        (
            "tests/test_cpu_kernels.py::test_dimensions_that_fill_keys_up_change_nothing",
            "-k",
            "avx512bf16 or amx",
        ),
    ),
    Mutant(
        "cpp/cpu/threads.cpp",
        "if (done == items ||",
        "if (done > 0 ||",
        "a phase is over when the first thread has done its share",
        (
            "tests/test_cpu_kernels.py::test_team_computes_each_item_once_and_phases_in_order",
            "--timeout=60",
            "--timeout-method=thread",
        ),
    ),
)

METAL = (
    Mutant(
        "cpp/metal/forward_pass.mm",
        "project(pass.e, w, x, {pass.a.block, config_.dim}, rows, Write::kStore);",
        "project(pass.e, w, x, {pass.a.block, config_.dim}, rows, Write::kAccumulate);",
        "a block with a norm after it adds to what the last one left",
        (_MODELS, "-k", "gemma3 and metal"),
    ),
    Mutant(
        "cpp/metal/device.mm",
        "tuning.matmul_tensor = failure.empty();",
        "",
        "matrix units are used whatever the trial found",
        ("tests/metal_engine/test_newest_macs.py", "-k", "without_what_fails"),
    ),
    Mutant(
        "cpp/metal/kv_pages.mm",
        "                   size:layout_.bytes];",
        "                   size:layout_.bytes / 2];",
        "a copied page lacks its second half",
        (f"{_BATCH}::test_a_fork_and_its_origin_go_their_own_ways_from_any_position", "-k", "metal"),
    ),
    Mutant(
        "cpp/metal/metal_encoder.mm",
        "encode_step(encoder_, step, step.after_barrier && !first, kernels_);",
        "encode_step(encoder_, step, false, kernels_);",
        "no dispatch waits for the one that it reads from",
        ("tests/metal_engine/test_metal_engine.py", "-k", "dispatches_does_not_grow"),
    ),
    Mutant(
        "cpp/metal/metal_encoder.mm",
        "if (!committed_.empty() || gpu_ == Gpu::kBusy) [encoder_ waitForFence:device_.fence()];",
        "",
        "command buffers may run at the same time",
        (
            "tests/metal_engine/test_first_contact.py",
            "tests/metal_engine/test_running_ahead.py",
            "-k",
            "watchdog or single_tokens",
        ),
    ),
    Mutant(
        "cpp/metal/metal_encoder.mm",
        "device_.commit(commands_);\n  committed_.push_back(std::exchange(commands_, nil));",
        "committed_.push_back(commands_);\n  device_.commit(std::exchange(commands_, nil));",
        "a command buffer whose commit threw is waited for",
        ("tests/metal_engine/test_running_ahead.py", "-k", "commit_that_throws"),
    ),
    Mutant(
        "cpp/metal/engine.mm",
        "choices || pages.is_in_use() ? Gpu::kBusy : Gpu::kIdle",
        "choices ? Gpu::kBusy : Gpu::kIdle",
        "a pass does not wait for those that other sessions have on the way",
        ("tests/metal_engine/test_running_ahead.py", "-k", "two_sessions"),
    ),
    Mutant(
        "cpp/metal/pipeline_archive.mm",
        "if (fs::path(path).stem() != wanted) continue;",
        "",
        "damaged pipelines are taken",
        ("tests/metal_engine/test_first_open.py", "-k", "only_its_checksum"),
    ),
    Mutant(
        "cpp/metal/pipeline_archive.mm",
        "fs::last_write_time(path, fs::file_time_type::clock::now(), error);",
        "",
        "the use of pipelines is not noted",
        ("tests/metal_engine/test_first_open.py", "-k", "used_for_longest"),
    ),
    Mutant(
        "cpp/metal/ops.mm",
        "const std::size_t heads = 2 * args.n_kv_heads + (args.skip_queries ? 0 : args.n_heads);",
        "const std::size_t heads = 2 * args.n_kv_heads + args.n_heads;",
        "heads beyond the last are stored where queries are skipped",
        ("tests/metal_engine/test_trace.py", "-k", "counted"),
    ),
    Mutant(
        "cpp/metal/padding.cpp",
        "weights[i] *= std::sqrt(float(cols.size) / float(cols.wide));",
        "weights[i] *= 1.0f;",
        "norms of padded rows count the padding",
        (_MODELS, "-k", "dimensions and metal"),
    ),
    Mutant(
        "cpp/metal/pass_rows.cpp",
        "u32_t(ceil_div(std::size_t(keys), std::size_t(splits)))",
        "u32_t(std::size_t(keys) / std::size_t(splits))",
        "the last keys belong to no part of attention",
        (f"{_ENGINE}::test_no_key_is_lost_where_the_keys_of_a_token_are_divided", "-k", "metal"),
    ),
    Mutant(
        "cpp/metal/rope_tables.mm",
        "by_layer->push_back(grown[rope]);",
        "by_layer->push_back(grown[0]);",
        "layers with their own rotary base take that of the first",
        (_MODELS, "-k", "gemma3 and metal"),
    ),
)
