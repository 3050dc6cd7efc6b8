// Selection of the instantiations of kernel templates that are compiled. If the shaders are compiled when a
// model is opened, each instantiation takes time, and the model needs few of them: the host then defines
// ONLY_WANTED, and WANTS_<variant> as 1 for each variant that it needs. Otherwise all are compiled.
//
// IF_WANTED(variant)(text) expands to the text, or to nothing. A variant is a tensor type as in
// EACH_TENSOR_TYPE, or an attention kernel with the type of the cache and the size of a head: see variant_of
// in cpp/metal/plan/kernel_key.cpp.
#pragma once

#define WANTED_KEEP(...) __VA_ARGS__
#ifdef ONLY_WANTED
#define WANTED_DROP(...)
// A macro defined as 1 expands to two arguments, of which the second is selected; otherwise the default is.
#define WANTED_IS_1 ~, WANTED_KEEP
#define WANTED_SECOND(first, second, ...) second
#define WANTED_OF(...) WANTED_SECOND(__VA_ARGS__)
#define WANTED_CHOICE(value) WANTED_OF(WANTED_IS_##value, WANTED_DROP, ~)
#define WANTED_VALUE(value) WANTED_CHOICE(value)
#define IF_WANTED(variant) WANTED_VALUE(WANTS_##variant)
#else
#define IF_WANTED(variant) WANTED_KEEP
#endif

// Instantiates a kernel template; the host loads the instance by `name`.
#define INSTANCE(name, ...) template [[host_name(name)]] kernel decltype(__VA_ARGS__) __VA_ARGS__;
// Instantiates a kernel template for float and for half.
#define INSTANTIATE_FOR_FLOATS(name)  \
  INSTANCE(#name "_f32", name<float>) \
  INSTANCE(#name "_f16", name<half>)
