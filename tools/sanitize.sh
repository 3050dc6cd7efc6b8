#!/usr/bin/env bash
# Builds extension, emulator and shaders with sanitizers and runs tests under them:
#
#   tools/sanitize.sh address [pytest arguments]    AddressSanitizer, LeakSanitizer, UndefinedBehaviorSanitizer
#   tools/sanitize.sh thread [pytest arguments]     ThreadSanitizer
#
# Without arguments, the tests of kernels, engines and the emulator; under ThreadSanitizer, which is slow, those of
# sessions (on both engines, several threads among them), of the engine's kernels for one order of threads, and of the
# emulator's own algorithms.
#
# Python itself is not instrumented: it preloads the sanitizer's runtime, and the package is used from a folder of its
# own, so that the installed one stays as it is. The first finding ends the run with its report.
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1-}" in
  address)
    sanitizers=address,undefined runtime=asan
    tests=(tests/metal tests/test_engine.py tests/test_session.py tests/test_cpu_kernels.py
           tests/emulator/test_{algorithms,buffer_ends,hazards,language,metal_objects,metal_validation,objective_c}.py)
    ;;
  thread)
    sanitizers=thread runtime=tsan
    tests=(tests/test_session.py tests/emulator/test_{algorithms,hazards,metal_objects}.py
           tests/metal/test_{attention,logits,token_steps}.py -k "not shuffled")
    ;;
  *) sed -n 2,12p "$0" >&2; exit 2 ;;
esac
name=$1
shift
[ $# -gt 0 ] || set -- "${tests[@]}"
python=$PWD/.venv/bin/python
build=$PWD/build/sanitize-$name

options=$(METAL_PREFILL_REQUIRE_EMULATOR=1 tools/setup_clang.sh)
clang=${options##*CMAKE_OBJCXX_COMPILER=}
preload=$("$clang" -print-file-name="libclang_rt.$runtime-$(uname -m).so")
if [ ! -e "$preload" ]; then
  echo "error: $clang has no $runtime runtime (Debian: apt-get install libclang-rt-19-dev)" >&2
  exit 1
fi

"$python" -m pip --quiet --disable-pip-version-check install --no-build-isolation --no-deps --upgrade \
  --target "$build/package" . -C build-dir="$build" -C cmake.build-type=RelWithDebInfo \
  -C cmake.define.CMAKE_CXX_COMPILER="$clang" -C cmake.define.CMAKE_OBJCXX_COMPILER="$clang" \
  -C cmake.define.CMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g" -C cmake.define.CMAKE_OBJCXX_FLAGS_RELWITHDEBINFO="-O1 -g" \
  -C cmake.define.METAL_PREFILL_EMULATOR=ON -C cmake.define.METAL_PREFILL_SANITIZE="$sanitizers"

symbolizer=$(command -v llvm-symbolizer-19 || command -v llvm-symbolizer) ||
  { echo "error: there is no llvm-symbolizer (Debian: apt-get install llvm-19)" >&2; exit 1; }
common="external_symbolizer_path=$symbolizer"
export PYTHONPATH=$build/package
# Leaks are found by following pointers through memory of malloc: Python's objects must be there too.
export PYTHONMALLOC=malloc
export ASAN_OPTIONS=$common:detect_leaks=1:detect_stack_use_after_return=0:handle_segv=1
export LSAN_OPTIONS=suppressions=$PWD/tools/sanitize/leaks.txt:print_suppressions=0
export UBSAN_OPTIONS=$common:halt_on_error=1:print_stacktrace=1
export TSAN_OPTIONS=$common:halt_on_error=1:second_deadlock_stack=1:history_size=4:die_after_fork=0
# Interceptors of C++ exceptions look for libstdc++ when they are set up.
exec env LD_PRELOAD="$preload $("$clang" -print-file-name=libstdc++.so.6)" METAL_PREFILL_REQUIRE_EMULATOR=1 \
  "$python" -m pytest -p no:cacheprovider -p no:faulthandler --capture=sys "$@"
