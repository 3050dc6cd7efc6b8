#!/usr/bin/env bash
# Installs what the tests need of the system, with apt-get, and says so in one line: clang for the Metal emulator; cross
# libraries and qemu-user for the kernels of 64-bit Arm; with the argument "browser", Chromium alone. Who may not install packages is told the command. Nothing else in
# this project installs system packages. A package that cannot be installed is no error here: the builds say what they skip
# without it, or fail where METAL_PREFILL_REQUIRE_EMULATOR is set.
set -euo pipefail

. "$(dirname "$0")/setup_common.sh"

say() { echo "setup: $*" >&2; }

if [ "$(uname -s)" = Darwin ]; then
  say "nothing to install on macOS"
  exit 0
fi

if [ "${1:-}" = browser ]; then
  if find_browser >/dev/null; then
    say "nothing to install: $(find_browser) found"
  elif command -v apt-get >/dev/null && [ "$(id -u)" -eq 0 ]; then
    say "installing with apt-get, for the tests of the page: chromium"
    apt-get update -qq >/dev/null || true
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null ||
      say "apt-get failed; the tests of the page are skipped"
  else
    say "no Chromium here; the tests of the page are skipped (sudo apt-get install chromium)"
  fi
  exit 0
fi

packages=()
find_clang >/dev/null || packages+=(clang-19 lld-19 libclang-rt-19-dev)
find_symbolizer >/dev/null || packages+=(llvm-19)
if tests_emulate_arm; then
  have_qemu || packages+=(qemu-user)
  have_arm_libraries || packages+=(libstdc++-dev-arm64-cross)
fi
if [ ${#packages[@]} -eq 0 ]; then
  say "nothing to install: clang, llvm-symbolizer$(tests_emulate_arm && echo ", qemu-aarch64 and its libraries" || true) found"
  exit 0
fi
if ! command -v apt-get >/dev/null; then
  say "no apt-get here; install what Debian calls ${packages[*]} for the emulator's tests and those of the Arm kernels"
  exit 0
fi

# Each release of Debian and Ubuntu has a version of its own; the oldest fits every clang.
name_arm_libraries() {
  local found
  found=$(apt-cache search --names-only '^libstdc\+\+-[0-9]+-dev-arm64-cross$' | cut -d' ' -f1 | sort -V | head -1)
  packages=("${packages[@]/#libstdc++-dev-arm64-cross/${found:-libstdc++-12-dev-arm64-cross}}")
}

if [ "$(id -u)" -ne 0 ]; then
  name_arm_libraries
  say "missing for the emulator's tests or those of the Arm kernels: sudo apt-get install ${packages[*]}"
  exit 0
fi
apt-get update -qq >/dev/null || true  # what it could not fetch, the next command names
name_arm_libraries
say "installing with apt-get, for the emulator and the tests of the Arm kernels: ${packages[*]}"
DEBIAN_FRONTEND=noninteractive DEBCONF_NOWARNINGS=yes apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null ||
  say "apt-get failed; what needs these packages is skipped"
