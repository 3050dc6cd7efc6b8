#include "../base/errors.h"

#include <new>
#include <stdexcept>

#include "../base/fork_handler.h"
#include "../engine/session_lock.h"
#include "bindings.h"

namespace nb = nanobind;

namespace metal_prefill::python {

// Raises a class of metal_prefill.errors.
void raise_as(const char* name, const char* message) {
  nb::object type = nb::module_::import_("metal_prefill.errors").attr(name);
  PyErr_SetString(type.ptr(), message);
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const ContextOverflowError& e) {
    raise_as("ContextOverflowError", e.what());
  } catch (const ForkError& e) {
    raise_as("ForkError", e.what());
  } catch (const SessionBusyError& e) {
    raise_as("SessionBusyError", e.what());
  } catch (const DeviceError& e) {
    raise_as("DeviceError", e.what());
  } catch (const NumericalError& e) {
    raise_as("NumericalError", e.what());
  } catch (const UnsupportedModelError& e) {
    raise_as("UnsupportedModelError", e.what());
  } catch (const KvMemoryError& e) {
    raise_as("KVMemoryError", e.what());
  }
}

nb::object exception_of(const std::exception_ptr& error) {
  try {
    try {
      translate(error, nullptr);
      if (!PyErr_Occurred()) std::rethrow_exception(error);
    } catch (const std::invalid_argument& e) {
      PyErr_SetString(PyExc_ValueError, e.what());
    } catch (const std::bad_alloc& e) {
      PyErr_SetString(PyExc_MemoryError, e.what());
    } catch (const std::exception& e) {
      PyErr_SetString(PyExc_RuntimeError, e.what());
    }
    throw nb::python_error();
  } catch (nb::python_error& e) {
    return nb::borrow(e.value());
  }
}

}  // namespace metal_prefill::python
