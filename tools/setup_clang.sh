#!/usr/bin/env bash
# Finds the clang that the Metal emulator is built with, installing Debian's where that is possible, and prints the
# build options for pip. Without clang the package builds all the same; the emulator's tests are then skipped, or fail
# where METAL_PREFILL_REQUIRE_EMULATOR is set.
set -euo pipefail

. "$(dirname "$0")/setup_common.sh"

# Names functions and lines in the reports of sanitizers.
find_symbolizer() { command -v llvm-symbolizer-19 || command -v llvm-symbolizer; }

install_clang() {
  can_install "The Metal emulator needs clang" "clang-19 lld-19 llvm-19 libclang-rt-19-dev" || return 1
  echo "Installing clang 19 for the Metal emulator (Debian packages clang-19, lld-19, llvm-19, libclang-rt-19-dev)" >&2
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
      clang-19 lld-19 llvm-19 libclang-rt-19-dev; } >/dev/null
}

if [ "$(uname -s)" = Darwin ]; then
  echo "-C build-dir=build/metal -C cmake.define.METAL_PREFILL_TESTING=ON"
elif { find_clang && { find_symbolizer || install_clang || true; }; } >/dev/null || install_clang; then
  echo "-C build-dir=build/emulator -C cmake.define.METAL_PREFILL_EMULATOR=ON" \
       "-C cmake.define.CMAKE_OBJCXX_COMPILER=$(find_clang)"
elif [ -n "${METAL_PREFILL_REQUIRE_EMULATOR:-}" ]; then
  echo "error: METAL_PREFILL_REQUIRE_EMULATOR is set and there is no clang to build the emulator with" >&2
  exit 1
else
  echo "No clang 19 found: building without the Metal emulator; its tests will be skipped." >&2
  echo "-C build-dir=build/plain"
fi
