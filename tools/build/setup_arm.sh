#!/usr/bin/env bash
# Builds tests/arm, the CPU engine for 64-bit Arm, which tests run on an emulated processor. Without clang, the cross
# libraries or qemu-user those tests are skipped, or fail if METAL_PREFILL_REQUIRE_EMULATOR is set. Does nothing on an
# Arm machine, on which the other tests run the same kernels.
set -euo pipefail
cd "$(dirname "$0")/../.."

. tools/build/setup_common.sh

tests_emulate_arm || exit 0
if ! { find_clang && have_qemu && have_arm_libraries; } >/dev/null; then
  if [ -n "${METAL_PREFILL_REQUIRE_EMULATOR:-}" ]; then
    echo "error: METAL_PREFILL_REQUIRE_EMULATOR is set and the Arm kernels cannot be built or run" >&2
    exit 1
  fi
  echo "No cross libraries for arm64 or no qemu-aarch64: tests of the Arm kernels will be skipped." >&2
  exit 0
fi
PATH="$PWD/.venv/bin:$PATH"
export CROSS_ARM_CXX
CROSS_ARM_CXX=$(find_clang)
cmake -S tests/arm -B build/arm -G Ninja --log-level=WARNING -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_TOOLCHAIN_FILE="$PWD/cmake/cross_arm.cmake"
cmake --build build/arm
