#!/usr/bin/env bash
# Builds extension, emulator and shaders with sanitizers and runs tests under them:
#
#   tools/check/sanitize.sh address [pytest arguments]    AddressSanitizer, LeakSanitizer, UndefinedBehaviorSanitizer
#   tools/check/sanitize.sh thread [pytest arguments]     ThreadSanitizer
#
# Without arguments, runs the tests of all kernels, both engines and the emulator. Each file runs in a separate Python:
# leaks, which are detected when a process ends, are thus attributed to a file. Output is written to
# build/sanitize-*/tests, and printed if there are findings. The first finding ends its file; the other files still
# run.
#
# Python itself is not instrumented: it preloads the sanitizer's runtime, and imports the package from a separate folder, so
# that the installed one is unchanged.
set -euo pipefail
cd "$(dirname "$0")/../.."

. tools/build/setup_common.sh

case "${1-}" in
  address) sanitizers=address,undefined runtime=asan ;;
  thread) sanitizers=thread runtime=tsan ;;
  *) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
name=$1
shift
# The longest come first, so that no core is idle at the end. Other tests are of Python, or of code that is not instrumented.
mapfile -t files < <(printf '%s\n' tests/metal/test_metal_engine.py \
  tests/engine/test_{session,engine}.py tests/cpu/kernels/test_*.py tests/storage/saved_sessions/test_*.py \
  tests/engine/test_{batch,q8_cache,concurrency,experts,aliasing,allocation_faults}.py tests/generation/test_speculation.py \
  tests/generation/scheduler/test_*.py tests/engine/test_{encoders,outputs,prefix_tree}.py tests/tasks/test_embedding.py \
  tests/engine/recurrent/test_*.py tests/tasks/encoders/test_*.py tests/metal/test_*.py \
  emulator/tests/test_{language,algorithms,buffer_ends,hazards,metal_objects,metal_validation,sanitizers}.py |
  awk '!seen[$0]++')
python=$PWD/.venv/bin/python
build=$PWD/build/sanitize-$name

options=$(METAL_PREFILL_REQUIRE_EMULATOR=1 tools/build/setup_clang.sh)
clang=${options##*METAL_EMULATOR_CLANG=}
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

symbolizer=$(find_symbolizer) ||
  { echo "error: there is no llvm-symbolizer (Debian: apt-get install llvm-19)" >&2; exit 1; }
common="external_symbolizer_path=$symbolizer"
export PYTHONPATH=$build/package
# LeakSanitizer follows pointers through malloc's memory only, so Python's objects must be in it, too.
export PYTHONMALLOC=malloc
export ASAN_OPTIONS=$common:detect_leaks=1:allocator_may_return_null=1:detect_stack_use_after_return=0:handle_segv=1
export LSAN_OPTIONS=suppressions=$PWD/tools/check/sanitize/leaks.txt:print_suppressions=0
export UBSAN_OPTIONS=$common:halt_on_error=1:print_stacktrace=1
export TSAN_OPTIONS=$common:halt_on_error=1:second_deadlock_stack=1:history_size=4:die_after_fork=0
TSAN_OPTIONS+=:suppressions=$PWD/tools/check/sanitize/races.txt
# ThreadSanitizer does not see how the threads of NumPy's matrix products synchronize, and would report races.
export OPENBLAS_NUM_THREADS=1
export METAL_PREFILL_REQUIRE_EMULATOR=1 METAL_EMULATOR_REQUIRED=1
# Interceptors of C++ exceptions require that libstdc++ is loaded first.
test=(env LD_PRELOAD="$preload $("$clang" -print-file-name=libstdc++.so.6)"
      "$python" -m pytest --timeout=900 -p no:cacheprovider -p no:faulthandler --capture=sys)
[ $# -eq 0 ] || exec "${test[@]}" "$@"

outputs=$build/tests
rm -rf "$outputs" && mkdir "$outputs"

test_file() {
  local output=$outputs/${1//\//.}.txt
  local status=0
  "${test[@]}" "$1" >"$output" 2>&1 || status=$?
  if ((status == 0 || status == 5)); then  # 5: the file skips itself under sanitizers
    echo "$1: $(tail -n 1 "$output" | tr -d =)"
  else
    cat "$output"
    echo "$1: failed"
    return 1
  fi
}

# Engines and emulator use several cores themselves: on two cores, two concurrent files take as long as successive ones.
jobs=$((($(nproc) + 1) / 2)) running=0 failed=0
for file in "${files[@]}"; do
  if ((running == jobs)); then wait -n || failed=1; else running=$((running + 1)); fi
  test_file "$file" &
done
while ((running-- > 0)); do wait -n || failed=1; done
echo "$sanitizers: $(cat "$outputs"/*.txt | grep -o "^=.* [0-9]* passed" | grep -o "[0-9]* passed" |
  awk '{ passed += $1 } END { print passed + 0 }') tests passed in $SECONDS s"
exit $failed
