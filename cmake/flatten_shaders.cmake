# Sets `out` to flat copies of shaders: with local includes in place, as newLibraryWithSource takes them.
#
#   flatten_shaders(flat shaders/a.metal shaders/b.metal)
function(flatten_shaders out)
  set(embed "${PROJECT_SOURCE_DIR}/cmake/embed_shaders.py")
  set(all "")
  foreach(shader IN LISTS ARGN)
    get_filename_component(name "${shader}" NAME)
    set(flat "${CMAKE_BINARY_DIR}/flat_shaders/${name}")
    add_custom_command(
      OUTPUT "${flat}"
      COMMAND "${Python_EXECUTABLE}" "${embed}" --root "${PROJECT_SOURCE_DIR}" --include "${PROJECT_SOURCE_DIR}/shaders"
              --flat "${flat}" --depfile "${flat}.d" "${shader}"
      DEPENDS "${shader}" "${embed}"
      DEPFILE "${flat}.d"
      VERBATIM)
    list(APPEND all "${flat}")
  endforeach()
  set(${out} "${all}" PARENT_SCOPE)
endfunction()
