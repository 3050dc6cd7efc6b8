# Functions for the setup scripts, which source this file.

# Prints the path of the first of some commands that is installed; fails if none is.
first_of() { command -v "$@" | head -n 1 | grep .; }

# The clang for shaders and Arm kernels.
find_clang() { first_of $(<"$(dirname "${BASH_SOURCE[0]}")/../../emulator/clang_names.txt"); }

# The oldest compilers that build the package, as CMakeLists.txt names them: g++-<version> clang++-<version>.
oldest_compilers() {
  sed -n 's/.*install GCC \([0-9]*\) or clang \([0-9]*\),.*/g++-\1 clang++-\2/p' "$(dirname "${BASH_SOURCE[0]}")/../../CMakeLists.txt"
}

# The browser for tests of the server's page.
find_browser() { first_of chromium chromium-browser google-chrome google-chrome-stable; }

# Resolves functions and lines in the reports of sanitizers.
find_symbolizer() { first_of llvm-symbolizer-19 llvm-symbolizer; }

# Whether tests run the kernels of 64-bit Arm on an emulated processor: on an Arm machine the other tests run them.
tests_emulate_arm() { case "$(uname -m)" in arm64 | aarch64) return 1 ;; esac; }

have_qemu() { command -v qemu-aarch64 >/dev/null; }

have_arm_libraries() { compgen -G "/usr/lib/gcc-cross/aarch64-linux-gnu/*/libstdc++.a" >/dev/null; }

# Packages of Debian's stable release, on any system.
DEBIAN_KEYS=/usr/share/keyrings/debian-archive-keyring.gpg
have_debian_sources() { command -v apt-get >/dev/null && [ -e "$DEBIAN_KEYS" ]; }

# Makes apt-get use them, with lists and archives in a folder, without changing this system's packages:
# use_debian_sources <folder> <architecture>
use_debian_sources() {
  local kind
  mkdir -p "$1"/{lists,archives}/partial
  touch "$1/status"
  for kind in deb deb-src; do
    echo "$kind [signed-by=$DEBIAN_KEYS] http://deb.debian.org/debian trixie main"
  done >"$1/sources.list"
  cat >"$1/apt.conf" <<END
APT::Architecture "$2";
APT::Architectures { "$2"; };
APT::Install-Recommends "false";
APT::Sandbox::User "root";
Dir::Etc::SourceList "$1/sources.list";
Dir::Etc::SourceParts "/dev/null";
Dir::State::Lists "$1/lists";
Dir::State::status "$1/status";
Dir::Cache::Archives "$1/archives";
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
END
  export APT_CONFIG=$1/apt.conf
  apt-get -qq update
}
