"""Errors in the Python package: files, text, figures, commands."""

from __future__ import annotations

from mutants.mutant import Mutant

_P = "python/metal_prefill"

FILES = (
    Mutant(
        f"{_P}/gguf_file.py",
        "data_offset = (cursor.pos + alignment - 1) & ~(alignment - 1)",
        "data_offset = cursor.pos",
        "the data of tensors begins right after the header",
        ("tests/test_gguf_file.py",),
    ),
    Mutant(
        f"{_P}/gguf_file.py",
        "if before is not None and tensor.offset < before.offset + before.nbytes:",
        "if before is not None and tensor.offset < before.offset:",
        "tensors may overlap",
        ("tests/test_gguf_file.py",),
    ),
    Mutant(
        f"{_P}/_gguf_metadata.py",
        "if worst > 1:",
        "if worst > 255:",
        "a bool in an array may have any value",
        ("tests/test_gguf_file.py",),
    ),
    Mutant(
        f"{_P}/_pack_cache.py",
        'if _sampled(data) != header["samples"]:',
        "if False:",
        "packed weights are taken without a look at them",
        ("tests/test_pack_cache.py",),
    ),
    Mutant(
        f"{_P}/_pack_cache.py",
        'if status.st_mtime_ns != header["modified"] * _SECOND:',
        "if False:",
        "packed weights are taken that something wrote to",
        ("tests/test_pack_cache.py",),
    ),
    Mutant(
        f"{_P}/_state.py",
        "value = xxhash.xxh64_intdigest(name.encode(), value)",
        "pass",
        "tensors of a state may change their names",
        ("tests/test_state.py", "-k", "cpu"),
    ),
    Mutant(
        f"{_P}/_state.py",
        "if size != status.st_size:",
        "if size > status.st_size:",
        "a state may have bytes after its end",
        ("tests/test_state.py", "-k", "cpu"),
    ),
    Mutant(
        f"{_P}/_state.py",
        'if metadata.get("model") != owner.fingerprint:',
        "if False:",
        "a state of another model is read",
        ("tests/test_state.py", "-k", "cpu"),
    ),
    Mutant(
        f"{_P}/_replacing.py",
        "os.chmod(temporary, mode)",
        "os.chmod(temporary, 0o600)",
        "a file that is replaced loses its permissions",
        ("tests/test_replacing.py",),
    ),
    Mutant(
        f"{_P}/_replacing.py",
        "_remove_abandoned(target.parent)",
        "pass",
        "what killed writers left stays for ever",
        ("tests/test_replacing.py",),
    ),
    Mutant(
        f"{_P}/_arguments.py",
        "if not kinds.isdisjoint((bool, np.bool_)):",
        "if False:",
        "booleans among token ids are taken for 0 and 1",
        ("tests/test_arguments.py",),
    ),
    Mutant(
        f"{_P}/architecture.py",
        'embedding_scale=math.sqrt(dim) if traits.scale_embedding else scales["embedding_scale"],',
        "embedding_scale=1.0,",
        "embeddings of gemma are not scaled",
        ("tests/test_architecture.py", "tests/test_engine.py", "-k", "gemma3 and not metal"),
    ),
    Mutant(
        f"{_P}/_pooled_head.py",
        'pooled = np.tanh(self._affine("cls", pooled))',
        'pooled = self._affine("cls", pooled)',
        "the classification head lacks its activation",
        ("tests/test_reranking.py", "-k", "two_layers"),
    ),
    Mutant(
        f"{_P}/_hub_answers.py",
        '_NAMING_HEADERS = ("ETag", "X-Linked-ETag", "X-Repo-Commit")',
        '_NAMING_HEADERS = ("ETag", "X-Repo-Commit")',
        "a header of a hub may lead out of the cache",
        ("tests/test_hub.py",),
    ),
)

TEXT = (
    Mutant(
        f"{_P}/tokenizer.py",
        "pattern = self._patterns[parse_special]",
        "pattern = self._patterns[True]",
        "text from outside may spell control tokens",
        ("tests/test_tokenizer.py",),
    ),
    Mutant(
        f"{_P}/tokenizer.py",
        "if self._space_prefix:",
        "if self._space_prefix and not ids:",
        "a space is put before the first stretch of text only, not after control tokens",
        ("tests/test_tokenizer.py",),
    ),
    Mutant(
        f"{_P}/tokenizer.py",
        "named = {i for i in (self.eos_id, self.eot_id, self.eom_id) if i is not None}",
        "named = {i for i in (self.eos_id, self.eot_id) if i is not None}",
        "one of the named ends does not stop a text",
        ("tests/test_tokenizer.py",),
    ),
    Mutant(
        f"{_P}/chat_template.py",
        '{key: value if key == "role" else self._mark(value, marker) for key, value in message.items()}',
        "{key: value for key, value in message.items()}",
        "messages may spell control tokens",
        ("tests/test_chat_template.py",),
    ),
    Mutant(
        f"{_P}/_template_budget.py",
        "if self.left < 0:",
        "if False:",
        "a template may work for ever",
        ("tests/test_template_limits.py", "-k", "ended and loops", "--timeout=30"),
    ),
    Mutant(
        f"{_P}/_template_budget.py",
        "self.max_value = MAX_VALUE\n",
        "self.max_value = 10 * MAX_VALUE\n",
        "a template may make larger values than is said",
        ("tests/test_template_limits.py", "-k", "largest"),
    ),
    Mutant(
        f"{_P}/sampling.py",
        "scores[ids] = np.where(scores[ids] > 0, scores[ids] / penalty, scores[ids] * penalty)",
        "scores[ids] = scores[ids] / penalty",
        "the reference favours tokens with a negative logit",
        ("tests/test_sampling.py", "tests/test_native_sampling.py"),
    ),
    Mutant(
        f"{_P}/sampling.py",
        "ids[values == border][: k - len(above)]",
        "ids[values == border]",
        "top-k keeps more than k tokens where logits are equal",
        ("tests/test_sampling.py", "tests/test_native_sampling.py"),
    ),
    Mutant(
        f"{_P}/_scoring.py",
        "starts = [min(max(n - 1, 0), len(prompts[i]) - 2) for n, i in zip(shared, group, strict=True)]",
        "starts = [min(n, len(prompts[i]) - 2) for n, i in zip(shared, group, strict=True)]",
        "the first token after a shared beginning gets the score of another text",
        ("tests/test_scoring.py",),
    ),
    Mutant(
        f"{_P}/_evaluation.py",
        "return context[-most:], continuation",
        "return context[:most], continuation",
        "a context that is too long loses its end",
        ("tests/test_evaluation.py", "-k", "too_long"),
    ),
    Mutant(
        f"{_P}/scheduler.py",
        "stream._core.rewind(len(stream._ids) - 1)",
        "stream._core.rewind(len(stream._ids) - 2)",
        "a further answer computes two tokens of the prompt again",
        ("tests/test_scheduler.py",),
    ),
    Mutant(
        f"{_P}/scheduler.py",
        "self._waiting.appendleft(stream)",
        "pass",
        "a stream without memory is forgotten",
        ("tests/test_scheduler.py", "-k", "memory", "--timeout=60"),
    ),
)

FIGURES = (
    Mutant(
        f"{_P}/_bench/rows.py",
        "median_ts=spread(of_ts).median,",
        "median_ts=spread(of_ts).high,",
        "a row gives the fastest sample as the median",
        ("tests/bench/test_streams.py",),
    ),
    Mutant(
        f"{_P}/_bench/rows.py",
        "avg_ns=sum(of_ns) / len(of_ns),",
        "avg_ns=spread(of_ns).median,",
        "a row gives the median as the mean",
        ("tests/bench/test_streams.py",),
    ),
    Mutant(
        f"{_P}/_bench/summary.py",
        "a / b for a, b in zip(ours, peer, strict=False)",
        "a / b for a, b in zip(sorted(ours), sorted(peer), strict=False)",
        "ratios are of samples that were not next to each other",
        ("tests/bench/test_summary.py",),
    ),
    Mutant(
        f"{_P}/_bench/samples.py",
        "self.stolen_ns > STOLEN_ALLOWED * self.ns",
        "self.stolen_ns > self.ns",
        "samples count though the hypervisor took the processor away",
        ("tests/bench/test_samples.py",),
    ),
    Mutant(
        f"{_P}/_bench/samples.py",
        "kept = [samples[i] for i in sorted(clean + filled)]",
        "kept = [samples[i] for i in clean + filled]",
        "samples are no longer in the order in which they were taken",
        ("tests/bench/test_samples.py",),
    ),
    Mutant(
        f"{_P}/_cost_model/work.py",
        'matrices = 2 if "swiglu" in d.kernel else 1',
        "matrices = 1",
        "the cost model counts gate and up as one matrix",
        ("tests/test_cost_model.py", "tests/metal_engine/test_trace.py", "-k", "not shows"),
    ),
    Mutant(
        f"{_P}/_cost_model/__init__.py",
        "dram_bytes = work.dram_bytes + (0 if fits else work.cached_bytes)",
        "dram_bytes = work.dram_bytes + work.cached_bytes",
        "the cost model reads activations from memory though they fit the cache",
        ("tests/test_cost_model.py",),
    ),
    Mutant(
        f"{_P}/_cost_model/__init__.py",
        "return self.tokens / self.seconds",
        "return len(self.dispatches) / self.seconds",
        "predicted speeds are of dispatches",
        ("tests/test_cost_model.py",),
    ),
)

COMMANDS = (
    Mutant(
        f"{_P}/_commands/perplexity.py",
        "[len(window) // 2 :]",
        "[len(window) // 2 - 1 :]",
        "perplexity counts a token of the first half",
        ("tests/test_cli.py", "-k", "perplexity"),
    ),
    Mutant(
        f"{_P}/_commands/result_lines.py",
        "prompts = itertools.chain([prompt], prompts)",
        "pass",
        "a prompt whose line was cut gets no result",
        ("tests/test_run_many.py",),
    ),
    Mutant(
        f"{_P}/_commands/result_lines.py",
        "right = isinstance(option, OPTIONS[name]) and not isinstance(option, bool)",
        "right = isinstance(option, OPTIONS[name])",
        "an option of a line may be true or false in place of a number",
        ("tests/test_run_many.py",),
    ),
    Mutant(
        f"{_P}/_commands/common.py",
        "kv_dtype=arguments.kv_dtype,",
        "",
        "the option --kv-dtype does nothing",
        ("tests/test_cli.py", "-k", "options_of_the_engine"),
    ),
    Mutant(
        f"{_P}/cli.py",
        "report(KeyboardInterrupt() if interrupted and isinstance(error, ImportError) else error)",
        "report(error)",
        "Ctrl-C while NumPy is imported speaks of a bad installation",
        ("tests/test_arguments.py", "-k", "interruption"),
    ),
)
