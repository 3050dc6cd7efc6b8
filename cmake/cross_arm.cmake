# Toolchain for building Linux programs for 64-bit Arm on another machine: clang and Debian's cross libraries
# (libstdc++-*-dev-arm64-cross). tools/build/setup_arm.sh uses it.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER "$ENV{CROSS_ARM_CXX}")
set(CMAKE_CXX_COMPILER_TARGET aarch64-linux-gnu)
set(CMAKE_EXE_LINKER_FLAGS_INIT "-fuse-ld=lld")
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
