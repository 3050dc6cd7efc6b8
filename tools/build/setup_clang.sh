#!/usr/bin/env bash
# Finds the clang that compiles shaders for the Metal emulator and prints the build options for pip. Without clang the
# package still builds, but the emulator's tests are skipped, or fail if METAL_PREFILL_REQUIRE_EMULATOR is set.
set -euo pipefail

. "$(dirname "$0")/setup_common.sh"

if [ "$(uname -s)" = Darwin ]; then
  echo "-C build-dir=build/metal -C cmake.define.METAL_PREFILL_TESTING=ON"
elif clang=$(find_clang); then
  echo "-C build-dir=build/emulator -C cmake.define.METAL_PREFILL_EMULATOR=ON" \
       "-C cmake.define.METAL_EMULATOR_CLANG=$clang"
elif [ -n "${METAL_PREFILL_REQUIRE_EMULATOR:-}" ]; then
  echo "error: METAL_PREFILL_REQUIRE_EMULATOR is set and there is no clang to build the emulator with" >&2
  exit 1
else
  echo "No clang 19 found: building without the Metal emulator; its tests will be skipped." >&2
  echo "-C build-dir=build/testing -C cmake.define.METAL_PREFILL_TESTING=ON"
fi
