# Puts the shaders into a target, for the emulator: with all variants, and each in its language.
include("${CMAKE_CURRENT_LIST_DIR}/shader_variants.cmake")

# A part of them is compiled much faster, which is enough to look at single tests.
set(METAL_PREFILL_SHADER_VARIANTS "" CACHE STRING "Variants of kernels that the emulator gets; empty: all")

# Sets `out` to flat copies of shaders: with local includes in place, as newLibraryWithSource takes them.
function(flatten_shaders out)
  set(embed "${PROJECT_SOURCE_DIR}/cmake/embed_shaders.py")
  set(folder "${CMAKE_BINARY_DIR}/flat_shaders")
  file(GLOB headers CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/shaders/*.h")
  list(TRANSFORM ARGN REPLACE ".*/" "${folder}/" OUTPUT_VARIABLE flat)
  add_custom_command(
    OUTPUT ${flat}
    COMMAND "${Python_EXECUTABLE}" "${embed}" --root "${PROJECT_SOURCE_DIR}" --include "${PROJECT_SOURCE_DIR}/shaders"
            --flat "${folder}" ${ARGN}
    DEPENDS "${embed}" ${ARGN} ${headers}
    COMMENT "Flattening shaders"
    VERBATIM)
  set(${out} "${flat}" PARENT_SCOPE)
endfunction()

function(add_emulated_shaders target)
  list_shader_variants(variants)
  list(TRANSFORM variants PREPEND WANTS_)
  set(options GUARD ONLY_WANTED SELECTORS ${variants})
  if(METAL_PREFILL_SHADER_VARIANTS)
    list(TRANSFORM METAL_PREFILL_SHADER_VARIANTS REPLACE "(.+)" "WANTS_\\1=1" OUTPUT_VARIABLE wanted)
    list(APPEND options DEFINES ONLY_WANTED=1 ${wanted})
  endif()
  file(GLOB shaders CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/shaders/*.metal")
  list(REMOVE_ITEM shaders ${tensor_shaders})
  flatten_shaders(flat ${shaders})
  metal_emulator_add_shaders(${target} SHADERS ${flat} ${options})
  flatten_shaders(flat ${tensor_shaders})
  metal_emulator_add_shaders(${target} SHADERS ${flat} ${options}
    METAL_VERSION ${tensor_language_major}${tensor_language_minor}0)
endfunction()
