#!/usr/bin/env bash
# Unpacks Debian's Python for 64-bit Arm in a folder, in which qemu-aarch64 runs it: tests/packaging/test_wheels.py installs the wheel
# for Arm there. Needs apt-get and Debian's keys, and leaves the packages of this system as they are.
#
#   tools/build/fetch_arm_python.sh FOLDER    FOLDER/usr/bin/python3.13 afterwards
set -euo pipefail
root=$(realpath -m "$1")
python=python3.13 release=trixie keys=/usr/share/keyrings/debian-archive-keyring.gpg
if [ -e "$root/usr/bin/$python" ]; then exit 0; fi
if ! command -v apt-get >/dev/null || [ ! -e "$keys" ]; then
  echo "no apt-get, or no $keys (package debian-archive-keyring): the wheel for Arm is not run" >&2
  exit 0
fi

apt=$(mktemp -d)
trap 'rm -rf "$apt"' EXIT
mkdir -p "$apt"/{lists,archives}/partial "$root/usr/lib"
touch "$apt/status"
echo "deb [signed-by=$keys] http://deb.debian.org/debian $release main" >"$apt/sources.list"
cat >"$apt/apt.conf" <<END
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
APT::Install-Recommends "false";
APT::Sandbox::User "root";
Dir::Etc::SourceList "$apt/sources.list";
Dir::Etc::SourceParts "/dev/null";
Dir::State::Lists "$apt/lists";
Dir::State::status "$apt/status";
Dir::Cache::Archives "$apt/archives";
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
END
export APT_CONFIG=$apt/apt.conf
apt-get -qq update
# NumPy needs the C++ library.
apt-get -qq -y --download-only install "$python" libstdc++6 >/dev/null
for package in "$apt"/archives/*.deb; do dpkg-deb -x "$package" "$root"; done
ln -sfn usr/lib "$root/lib"  # Debian's packages rely on this link of an installed system
