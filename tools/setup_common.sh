# What the setup scripts share; to be sourced.

# The clang that shaders and Arm kernels are built with.
find_clang() {
  for name in clang++-19 clang++-20 clang++-18; do
    if command -v "$name" >/dev/null; then command -v "$name"; return 0; fi
  done
  return 1
}

# Whether this script may install packages. Where only root may, says what is missing for what, and how to get it.
can_install() {
  command -v apt-get >/dev/null || return 1
  [ "$(id -u)" -eq 0 ] && return
  echo "$1: sudo apt-get install $2" >&2
  return 1
}
