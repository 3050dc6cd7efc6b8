#!/usr/bin/env bash
# Installs system packages for the tests with apt-get, and reports each in one line: clang for the Metal emulator; cross
# libraries and qemu-user for the kernels of 64-bit Arm; with the argument "browser", only Chromium; with "compilers", the
# oldest supported compilers. Without the permission to install packages, prints the command. Nothing else in this project
# installs system packages. A failed installation is not an error here: builds report what they skip without a package, or
# fail if METAL_PREFILL_REQUIRE_EMULATOR is set.
set -euo pipefail

. "$(dirname "$0")/setup_common.sh"

say() { echo "setup: $*" >&2; }

if [ "$(uname -s)" = Darwin ]; then
  say "nothing to install on macOS"
  exit 0
fi

packages=()
case "${1:-}" in
  browser)
    purpose="the tests of the page"
    find_browser >/dev/null || packages+=(chromium)
    ;;
  compilers)
    purpose="the check of the oldest compilers"
    for compiler in $(oldest_compilers); do
      command -v "$compiler" >/dev/null || packages+=("${compiler/clang++/clang}")
    done
    ;;
  *)
    purpose="the emulator's tests and those of the Arm kernels"
    find_clang >/dev/null || packages+=(clang-19 lld-19 libclang-rt-19-dev)
    find_symbolizer >/dev/null || packages+=(llvm-19)
    if tests_emulate_arm; then
      have_qemu || packages+=(qemu-user)
      have_arm_libraries || packages+=(libstdc++-dev-arm64-cross)
    fi
    ;;
esac

if [ ${#packages[@]} -eq 0 ]; then
  say "nothing to install: found all for $purpose"
  exit 0
fi
if ! command -v apt-get >/dev/null; then
  say "no apt-get here; for $purpose, install what Debian calls ${packages[*]}"
  exit 0
fi
[ "$(id -u)" -ne 0 ] || apt-get update -qq >/dev/null || true  # what it could not fetch, the next command names
# Releases of Debian and Ubuntu have different versions; the oldest works with every clang.
cross=$(apt-cache search --names-only '^libstdc\+\+-[0-9]+-dev-arm64-cross$' | cut -d' ' -f1 | sort -V | head -1)
packages=("${packages[@]/#libstdc++-dev-arm64-cross/${cross:-libstdc++-12-dev-arm64-cross}}")
if [ "$(id -u)" -ne 0 ]; then
  say "missing for $purpose: sudo apt-get install ${packages[*]}"
  exit 0
fi
say "installing with apt-get, for $purpose: ${packages[*]}"
DEBIAN_FRONTEND=noninteractive DEBCONF_NOWARNINGS=yes apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null ||
  say "apt-get failed; what needs these packages is skipped"
