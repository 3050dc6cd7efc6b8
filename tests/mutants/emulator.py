"""Errors in the emulator's checks."""

from __future__ import annotations

from mutants.mutant import Mutant

_HAZARDS, _ENDS = "emulator/tests/test_hazards.py", "emulator/tests/test_buffer_ends.py"
_REFUSED = "emulator/tests/test_metal_objects.py", "-k", "a_refused_commit"

MUTANTS = (
    Mutant(
        "emulator/cpu/banks.cpp",
        "for (const std::uintptr_t word : words) in_bank[word % kBanks]++;",
        "for (const std::uintptr_t word : words) in_bank[word / kBanks % kBanks]++;",
        "neighbouring words are in the same bank of threadgroup memory",
        ("emulator/tests/test_metal_objects.py", "-k", "banks"),
    ),
    Mutant(
        "emulator/cpu/banks.cpp",
        "words.erase(std::unique(words.begin(), words.end()), words.end());",
        "",
        "lanes that read the same word wait for each other",
        ("emulator/tests/test_metal_objects.py", "-k", "banks"),
    ),
    Mutant(
        "emulator/metal/validation.cpp",
        "if (argument.writable) check_overlap(pipeline, dispatch, argument, bindings);",
        "",
        "a kernel may write a buffer that it reads by another binding",
        ("emulator/tests/test_metal_validation.py", "-k", "bound_twice"),
    ),
    Mutant(
        "emulator/cpu/executor.cpp",
        "auto* view = static_cast<std::byte*>(own.allocation->view(before));",
        "std::byte* view = nullptr;",
        "accesses through bindings that overlap belong to the one that begins last",
        (_HAZARDS, "-k", "bindings_that_overlap"),
    ),
    Mutant(
        "emulator/metal/encoded.cpp",
        "for (const bool writes : {false, true}) {",
        "for (const bool writes : {false}) {",
        "two bindings may write the same bytes",
        (_HAZARDS, "-k", "two_bindings_write"),
    ),
    Mutant(
        "emulator/metal/buffer.mm",
        "if (_state->info.storage_mode == metal_emulator::StorageMode::kPrivate)",
        "if (false)",
        "the host may read the contents of a Private buffer",
        ("emulator/tests/test_metal_validation.py", "-k", "contents"),
    ),
    Mutant(
        "emulator/metal/encoded.cpp",
        "if (bytes <= most) return {};",
        "return {};",
        "command buffers may use more memory than available",
        ("emulator/tests/test_profiles.py", "-k", "working_set"),
    ),
    Mutant(
        "emulator/metal/hazards.cpp",
        "!(a.write || b.write)",
        "!(a.write && b.write)",
        "a read after a write needs no barrier",
        (_HAZARDS,),
    ),
    Mutant(
        "emulator/metal/hazards.cpp",
        "if (known_ == Known::kBound) return a.range.begin == b.range.begin;",
        "if (known_ == Known::kBound) return true;",
        "ranges of a buffer bound at different offsets are treated as one",
        (_HAZARDS,),
    ),
    Mutant(
        "emulator/metal/untracked.cpp",
        "found != fences.end() && found->second.queue == use->queue_",
        "found != fences.end()",
        "a fence of another queue orders command buffers",
        (f"{_HAZARDS}::test_a_fence_orders_nothing_on_another_queue",),
    ),
    Mutant(
        "emulator/metal/validation.cpp",
        "if (total > kMaxThreadgroupBytes) {",
        "if (false) {",
        "threadgroup memory has no limit",
        ("emulator/tests/test_metal_validation.py::test_threadgroup_memory",),
    ),
    Mutant(
        "emulator/cpu/access.cpp",
        "if (address + bytes <= binding.end) found = &binding;",
        "if (address < binding.end) found = &binding;",
        "a read that starts in a buffer may end outside",
        (f"{_ENDS}::test_checked_mode_finds_any_read_past_the_end",),
    ),
    Mutant(
        "emulator/cpu/threadgroup.cpp",
        "if (std::string apart = describe_apart(); !apart.empty()) fail(std::move(apart));",
        "",
        "a product of a threadgroup requires only one of its simdgroups",
        ("emulator/tests/test_tensors.py", "-k", "mistake"),
    ),
    Mutant(
        "emulator/metal/command_buffer.mm",
        "if (const auto refusal = State::get().next_commit_refusal()) throw",
        "if (const auto refusal = State::get().next_commit_refusal(); false) throw",
        "a requested failure of a commit does not happen",
        _REFUSED,
    ),
    Mutant(
        "emulator/metal/state.cpp",
        "if (commit_refusal_countdown_ == 0 || --commit_refusal_countdown_ > 0) return std::nullopt;",
        "if (std::exchange(commit_refusal_countdown_, 0) == 0) return std::nullopt;",
        "the first commit fails instead of the requested one",
        _REFUSED,
    ),
    Mutant(
        "emulator/metal/encoded.cpp",
        "if (binding.writable && !binding.buffer->allocation->intact()) {",
        "if (false) {",
        "a write past the end of a buffer is not reported",
        (_ENDS,),
    ),
    Mutant(
        "emulator/metal/encoded.cpp",
        "if (steps <= limit) return {};",
        "return {};",
        "the watchdog aborts only single dispatches",
        ("tests/metal_engine/test_pass_work.py", "-k", "long_pass"),
    ),
    Mutant(
        "emulator/metal/encoded.cpp",
        "if (own > limit)",
        "if (false)",
        "the watchdog does not name the dispatch that takes too long",
        ("emulator/tests/test_profiles.py", "-k", "watchdog"),
    ),
    Mutant(
        "emulator/metal/state.cpp",
        "std::memset(bytes + right, 0, length - right);",
        "std::memcpy(bytes, memory, length);",
        "no-copy buffers are never stale",
        ("emulator/tests/test_profiles.py", "-k", "stale"),
    ),
    Mutant(
        "emulator/metal/device.mm",
        'require_family(6, "newResidencySetWithDescriptor");',
        "",
        "every GPU has residency sets",
        ("emulator/tests/test_profiles.py", "-k", "older_families"),
    ),
    Mutant(
        "emulator/metal/device.mm",
        "if (!metal_emulator::limits().binary_archives)",
        "if (false)",
        "archives open on every device",
        ("emulator/tests/test_profiles.py", "-k", "opening_an_archive"),
    ),
    Mutant(
        "emulator/msl/scanner/lint.py",
        'errors.append(tokens[index].error("Metal has no static variables in functions"))',
        "pass",
        "static variables in functions are accepted",
        ("emulator/tests/test_static_checks.py",),
    ),
    Mutant(
        "emulator/msl/scanner/ast_check.py",
        "self._error(place, f\"pointer or reference '{name}' has no address space\")",
        "pass",
        "pointers without an address space are accepted",
        ("emulator/tests/test_static_checks.py",),
    ),
)
