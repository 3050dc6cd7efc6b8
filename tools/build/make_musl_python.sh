#!/usr/bin/env bash
# Builds Debian's source of Python against musl in a folder, in which tests/packaging/test_wheels.py installs the wheel for
# musl. Needs apt-get, Debian's keys and musl-gcc (apt-get install musl-tools). Does not change this system's packages. Takes
# a minute on an idle machine.
#
#   tools/build/make_musl_python.sh FOLDER    FOLDER/bin/python3.13 and FOLDER/loader afterwards
set -euo pipefail
. "$(dirname "$0")/setup_common.sh"
root=$(realpath -m "$1")
if [ -e "$root/loader" ]; then exit 0; fi
if ! have_debian_sources || ! command -v musl-gcc >/dev/null; then
  echo "no apt-get, no musl-gcc (package musl-tools), or no $DEBIAN_KEYS: the wheel for musl is not run" >&2
  exit 0
fi

apt=$(mktemp -d)
trap 'rm -rf "$apt"' EXIT
mkdir -p "$root/include"
use_debian_sources "$apt" amd64
cd "$apt"
apt-get -qq source --download-only python3.13
apt-get -qq download musl  # that of an older release does not load NumPy, whose relocations need musl 1.2.4
dpkg-deb -x musl_*.deb musl
tar -xf python3.13_*.orig.tar.xz
# Debian's gcc would report its own C library, and musl-gcc does not search the kernel's headers.
printf '#!/bin/sh\n[ "$1" = --print-multiarch ] && echo x86_64-linux-musl || exec musl-gcc "$@"\n' >cc
chmod +x cc
for name in linux asm-generic x86_64-linux-gnu/asm; do ln -sfn "/usr/include/$name" "$root/include/${name##*/}"; done
cd Python-3.13.*
printf '*disabled*\n_bz2 _ctypes _curses _curses_panel _dbm _gdbm _lzma _sqlite3 _ssl _tkinter _uuid nis readline zlib\n' \
  >Modules/Setup.local
build() {
  # pkg-config would find this system's libraries.
  CC=$apt/cc CFLAGS=-O1 CPPFLAGS=-I$root/include PKG_CONFIG=false ./configure --quiet --prefix="$root" --without-ensurepip --disable-test-modules &&
    make -s -j"${CMAKE_BUILD_PARALLEL_LEVEL:-1}" && make -s install
}
build >"$apt/log" 2>&1 || { tail -20 "$apt/log" >&2; exit 1; }
cp "$apt"/musl/usr/lib/x86_64-linux-musl/libc.so "$root/loader"
