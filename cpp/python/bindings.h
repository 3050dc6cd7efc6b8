// Python bindings of the engines: one source per subject. module.cpp combines them into one module.
#pragma once

#include <nanobind/nanobind.h>

#include <exception>

namespace metal_prefill::python {

// Hyperparameters, the table of tensors, and the builder that collects a model's weights.
void bind_model(nanobind::module_& m);
// Samplers, and drafts by lookup.
void bind_sampling(nanobind::module_& m);
// Engines and their batches.
void bind_engines(nanobind::module_& m);
// Whole texts as a part of a batch.
void bind_texts(nanobind::module_& m);
// Sessions, and inspection of their passes.
void bind_sessions(nanobind::module_& m);
// Recorded passes of the Metal engine, in every build: dispatches, and how to read them.
void bind_recordings(nanobind::module_& m);
// The processor's kernel sets.
void bind_machine(nanobind::module_& m);

// Raises the class of metal_prefill.errors for a C++ exception, if there is one.
void translate(const std::exception_ptr& pointer, void*);
// The Python exception for a C++ one.
nanobind::object exception_of(const std::exception_ptr& error);

}  // namespace metal_prefill::python
