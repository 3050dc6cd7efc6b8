# Toolchain for building the extension for Linux with the compiler of the PyPI package ziglang, which links an old glibc and
# a C++ library of its own. tools/build/build_wheels.py writes the commands and names the processor.
set(tools "$ENV{CROSS_LINUX_TOOLS}")
if(NOT "$ENV{CROSS_LINUX_PROCESSOR}" STREQUAL "")
  set(CMAKE_SYSTEM_NAME Linux)
  set(CMAKE_SYSTEM_PROCESSOR "$ENV{CROSS_LINUX_PROCESSOR}")
  set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
endif()
foreach(language C CXX)
  set(CMAKE_${language}_COMPILER "${tools}/c++")
endforeach()
set(CMAKE_AR "${tools}/ar" CACHE FILEPATH "")
set(CMAKE_RANLIB "${tools}/ranlib" CACHE FILEPATH "")
