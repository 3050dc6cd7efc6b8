# Puts the shaders into a target, for the emulator: with all variants, and each in its language.
include("${CMAKE_CURRENT_LIST_DIR}/flatten_shaders.cmake")
include("${CMAKE_CURRENT_LIST_DIR}/shader_variants.cmake")

# A part of them is compiled much faster, which is enough to look at single tests.
set(METAL_PREFILL_SHADER_VARIANTS "" CACHE STRING "Variants of kernels that the emulator gets; empty: all")

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
