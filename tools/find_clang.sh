# The clang that shaders and Arm kernels are built with; to be sourced.
find_clang() {
  for name in clang++-19 clang++-20 clang++-18; do
    if command -v "$name" >/dev/null; then command -v "$name"; return 0; fi
  done
  return 1
}
