# Toolchain for building the extension for macOS on another system: clang of the PyPI package ziglang, headers of the
# emulator in place of Apple's, and stubs for what is linked. tools/build/cross_macos.py uses it.
set(CMAKE_SYSTEM_NAME Darwin)
set(CMAKE_SYSTEM_PROCESSOR arm64)
set(CMAKE_OSX_SYSROOT "")
set(CMAKE_OSX_DEPLOYMENT_TARGET "")  # part of the target that the compiler is given

set(tools "$ENV{CROSS_MACOS_TOOLS}")
foreach(language C CXX OBJCXX)
  set(CMAKE_${language}_COMPILER "${tools}/c++")
endforeach()
set(CMAKE_AR "${tools}/ar" CACHE FILEPATH "")
set(CMAKE_RANLIB "${tools}/ranlib" CACHE FILEPATH "")
set(CMAKE_INSTALL_NAME_TOOL "${tools}/unused" CACHE FILEPATH "")
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)

set(stubs "${CMAKE_CURRENT_LIST_DIR}/../tools/build/macos_stubs")
set(CMAKE_OBJCXX_FLAGS_INIT "-I${CMAKE_CURRENT_LIST_DIR}/../emulator/include")
set(CMAKE_MODULE_LINKER_FLAGS_INIT "-F${stubs}/Frameworks -L${stubs}/lib -lobjc")
