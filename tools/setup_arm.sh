#!/usr/bin/env bash
# Builds tests/arm, the CPU engine for 64-bit Arm, which tests run on an emulated processor; installs what that takes
# from Debian's packages where that is possible: clang, its linker, the cross libraries and qemu-user. Without them those
# tests are skipped, or fail where METAL_PREFILL_REQUIRE_EMULATOR is set. Nothing is to be done on an Arm machine: there
# the other tests run the same kernels.
set -euo pipefail
cd "$(dirname "$0")/.."

. tools/setup_common.sh

have_all() {
  find_clang >/dev/null && command -v qemu-aarch64 >/dev/null &&
    compgen -G "/usr/lib/gcc-cross/aarch64-linux-gnu/*/libstdc++.a" >/dev/null
}

install_all() {
  can_install "Tests of the Arm kernels need" "clang-19 lld-19 qemu-user libstdc++-12-dev-arm64-cross" || return 1
  echo "Installing Debian's cross libraries for arm64 and qemu-user for tests of the Arm kernels" >&2
  {
    apt-get update -qq
    library=$(apt-cache search --names-only '^libstdc\+\+-[0-9]+-dev-arm64-cross$' | cut -d' ' -f1 | sort -V | head -1)
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends clang-19 lld-19 qemu-user "$library"
  } >/dev/null
}

case "$(uname -m)" in arm64 | aarch64) exit 0 ;; esac
if ! have_all && ! { install_all && have_all; }; then
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
