# Sets `out` to whether Apple's Metal compiler makes a library of a kernel with these options.
#
#   find_metal_compiler(found -std=metal3.0)
#
# That xcrun finds the compiler does not mean that it compiles: Xcode 26 has a driver for it without the Metal toolchain,
# which is a download of its own.
function(find_metal_compiler out)
  set(probe "${CMAKE_CURRENT_BINARY_DIR}/metal_probe")
  file(WRITE "${probe}.metal" "kernel void probe(device float* x [[buffer(0)]]) { x[0] = 1.0f; }\n")
  file(REMOVE "${probe}.air" "${probe}.metallib")
  execute_process(COMMAND xcrun -sdk macosx metal ${ARGN} -c "${probe}.metal" -o "${probe}.air"
                  RESULT_VARIABLE failed OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(failed EQUAL 0)
    execute_process(COMMAND xcrun -sdk macosx metallib "${probe}.air" -o "${probe}.metallib"
                    RESULT_VARIABLE failed OUTPUT_VARIABLE output ERROR_VARIABLE output)
  endif()
  if(failed EQUAL 0 AND EXISTS "${probe}.metallib")
    set(${out} ON PARENT_SCOPE)
  else()
    string(STRIP "${output}" output)
    message(STATUS "xcrun metal: ${failed} ${output}")
    set(${out} OFF PARENT_SCOPE)
  endif()
endfunction()
