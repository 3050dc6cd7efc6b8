// Metal's compute API for Python tests, one method per call, through the same Objective-C that programs use.
#include "metal_objects.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#ifdef METAL_EMULATOR
#include "python.h"
#endif

namespace {

// Literals of each kind, empty, short and long, from an array that is enumerated in several steps.
std::vector<std::string> literals(int copies) {
  NSMutableArray<NSString*>* texts = [NSMutableArray array];
  for (int i = 0; i < copies; i++)
    for (NSString* text in @[ @"", @"1", @"a longer literal" ]) [texts addObject:text];
  std::vector<std::string> found;
  for (NSString* text in texts) found.emplace_back(text.UTF8String);
  return found;
}

}  // namespace

NB_MODULE(_metal_testing, m) {
  m.doc() = "Metal's compute API for tests.";
  // NOLINTNEXTLINE(bugprone-throw-keyword-missing, bugprone-unused-raii)
  nanobind::exception<metal_testing::MetalError>(m, "MetalError", PyExc_RuntimeError);
  m.def("literals", &literals, nanobind::arg("copies"), metal_testing::kPool);
  metal_testing::bind_device(m);
  metal_testing::bind_commands(m);
#ifdef METAL_EMULATOR
  nanobind::module_ emulator = m.def_submodule("emulator", "Introspection of this module's Metal emulator.");
  metal_emulator::bind_emulator(emulator);
#endif
}
