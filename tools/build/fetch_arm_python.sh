#!/usr/bin/env bash
# Unpacks Debian's Python for 64-bit Arm in a folder, in which qemu-aarch64 runs it and tests/packaging/test_wheels.py installs
# the wheel for Arm. Needs apt-get and Debian's keys. Does not change this system's packages.
#
#   tools/build/fetch_arm_python.sh FOLDER    FOLDER/usr/bin/python3.13 afterwards
set -euo pipefail
. "$(dirname "$0")/setup_common.sh"
root=$(realpath -m "$1")
python=python3.13
if [ -e "$root/usr/bin/$python" ]; then exit 0; fi
if ! have_debian_sources; then
  echo "no apt-get, or no $DEBIAN_KEYS (package debian-archive-keyring): the wheel for Arm is not run" >&2
  exit 0
fi

apt=$(mktemp -d)
trap 'rm -rf "$apt"' EXIT
mkdir -p "$root/usr/lib"
use_debian_sources "$apt" arm64
# NumPy needs the C++ library.
apt-get -qq -y --download-only install "$python" libstdc++6 >/dev/null
for package in "$apt"/archives/*.deb; do dpkg-deb -x "$package" "$root"; done
ln -sfn usr/lib "$root/lib"  # Debian's packages rely on this link of an installed system
