// Metal's compute API for Python tests, one method per call, through the same Objective-C that programs use.
#include "metal_objects.h"

#ifdef METAL_EMULATOR
#include "python.h"
#endif

NB_MODULE(_metal_testing, m) {
  m.doc() = "Metal's compute API for tests.";
  // NOLINTNEXTLINE(bugprone-throw-keyword-missing, bugprone-unused-raii)
  nanobind::exception<metal_testing::MetalError>(m, "MetalError", PyExc_RuntimeError);
  metal_testing::bind_device(m);
  metal_testing::bind_commands(m);
#ifdef METAL_EMULATOR
  nanobind::module_ emulator = m.def_submodule("emulator", "Introspection of this module's Metal emulator.");
  metal_emulator::bind_emulator(emulator);
#endif
}
