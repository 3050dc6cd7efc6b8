# Toolchain for building the extension with the compiler of the PyPI package ziglang: for Linux with an old C library, and for
# macOS with headers of the emulator in place of Apple's and stubs for what is linked. tools/build/zig.py sets the folder of
# its commands, and the system and its processor unless they are those of this machine.
set(tools "$ENV{CROSS_TOOLS}")
if(NOT "$ENV{CROSS_SYSTEM}" STREQUAL "")
  set(CMAKE_SYSTEM_NAME "$ENV{CROSS_SYSTEM}")
  set(CMAKE_SYSTEM_PROCESSOR "$ENV{CROSS_PROCESSOR}")
  set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
endif()
foreach(language C CXX OBJCXX)
  set(CMAKE_${language}_COMPILER "${tools}/c++")
endforeach()
set(CMAKE_AR "${tools}/ar" CACHE FILEPATH "")
set(CMAKE_RANLIB "${tools}/ranlib" CACHE FILEPATH "")

if(CMAKE_SYSTEM_NAME STREQUAL "Darwin")
  set(CMAKE_OSX_SYSROOT "")
  set(CMAKE_OSX_DEPLOYMENT_TARGET "")  # part of the target that the compiler is given
  set(CMAKE_INSTALL_NAME_TOOL "${tools}/unused" CACHE FILEPATH "")
  set(stubs "${CMAKE_CURRENT_LIST_DIR}/../tools/build/macos_stubs")
  set(CMAKE_OBJCXX_FLAGS_INIT "-I${CMAKE_CURRENT_LIST_DIR}/../emulator/include")
  set(CMAKE_MODULE_LINKER_FLAGS_INIT "-F${stubs}/Frameworks -L${stubs}/lib -lobjc")
endif()
