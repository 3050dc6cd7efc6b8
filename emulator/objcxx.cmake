# Enables Objective-C++ with clang, also if another compiler builds the rest: GCC supports neither ARC nor blocks. Include
# it from the top CMakeLists.txt: a language that a subdirectory enables is unknown to its siblings.
file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/clang_names.txt" METAL_EMULATOR_CLANG_NAMES)
if(NOT CMAKE_OBJCXX_COMPILER AND NOT DEFINED ENV{OBJCXX})
  if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    set(CMAKE_OBJCXX_COMPILER "${CMAKE_CXX_COMPILER}")
  else()
    find_program(CMAKE_OBJCXX_COMPILER NAMES ${METAL_EMULATOR_CLANG_NAMES} clang++
      DOC "clang++ for the Metal emulator")
    if(NOT CMAKE_OBJCXX_COMPILER)
      message(FATAL_ERROR "The Metal emulator needs clang++ (Debian, Ubuntu: apt install clang-19). "
        "Install it, name it with -DCMAKE_OBJCXX_COMPILER=..., or build without the emulator.")
    endif()
  endif()
endif()
set(CMAKE_OBJCXX_STANDARD ${CMAKE_CXX_STANDARD})
set(CMAKE_OBJCXX_STANDARD_REQUIRED ON)
set(CMAKE_OBJCXX_EXTENSIONS OFF)
set(CMAKE_OBJCXX_VISIBILITY_PRESET hidden)
enable_language(OBJCXX)
if(NOT CMAKE_OBJCXX_COMPILER_ID MATCHES "Clang")
  message(FATAL_ERROR "${CMAKE_OBJCXX_COMPILER} is not clang, which the Metal emulator needs for Objective-C++ with ARC.")
endif()
