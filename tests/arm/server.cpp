// Executes calls of the CPU engine's kernels, and of the engine itself, from standard input, for tests that
// run it on an emulated processor. tests/support/kernels/arm_machine.py is the client.
//
// A message is a list of values, each a tag and its contents: n (number: double), s (string), a (array: size
// of an element, two dimensions, bytes). Sizes and counts have 32 bits. A request begins with the name of the
// function. An answer begins with s and a message if the call failed, else with the number of values that the
// function returned. These follow, then every array that the function wrote: the index of the argument, and
// the contents.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/kernels/kernels.h"
#include "engine/batch.h"
#include "kernel_calls.h"
#include "model/tensors.h"

namespace metal_prefill {
namespace {

void read_bytes(void* p, std::size_t n) {
  if (std::fread(p, 1, n, stdin) != n) std::exit(0);  // the client has ended
}

template <typename T>
T read_value() {
  T value;
  read_bytes(&value, sizeof value);
  return value;
}

template <typename T>
void write_value(T value) {
  std::fwrite(&value, 1, sizeof value, stdout);
}

struct Value {
  char tag = 'n';
  double number = 0;
  std::string bytes;  // of a string or an array
  std::uint32_t element = 1;
  std::size_t shape[2] = {0, 1};

  Value() = default;
  Value(double n) : number(n) {}
  Value(std::string s) : tag('s'), bytes(std::move(s)) {}
};
using Values = std::vector<Value>;

Value read() {
  Value v;
  v.tag = read_value<char>();
  if (v.tag == 'n') v.number = read_value<double>();
  if (v.tag == 's') v.bytes.resize(read_value<std::uint32_t>());
  if (v.tag == 'a') {
    v.element = read_value<std::uint32_t>();
    for (std::size_t& n : v.shape) n = read_value<std::uint32_t>();
    v.bytes.resize(v.shape[0] * v.shape[1] * v.element);
  }
  read_bytes(v.bytes.data(), v.bytes.size());
  return v;
}

void write(const Value& v) {
  write_value(v.tag);
  if (v.tag == 'n') write_value(v.number);
  if (v.tag == 's') write_value(std::uint32_t(v.bytes.size()));
  if (v.tag == 'a') {
    write_value(v.element);
    for (const std::size_t n : v.shape) write_value(std::uint32_t(n));
  }
  std::fwrite(v.bytes.data(), 1, v.bytes.size(), stdout);
}

void expect(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

// A value as the parameter of a C++ function.
template <typename T>
struct Parameter {
  static constexpr bool kWritten = false;
  static T of(Value& v) {
    if constexpr (std::is_same_v<T, std::string>) {
      expect(v.tag == 's', "expected a string");
      return v.bytes;
    } else {
      expect(v.tag == 'n', "expected a number");
      if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>)
        expect(v.number == std::trunc(v.number) && std::in_range<T>(std::int64_t(v.number)),
               "expected an integer in the range of its type");
      return T(v.number);
    }
  }
};
template <typename T, int kDimensions>
struct Parameter<cpu::calls::Array<T, kDimensions>> {
  static constexpr bool kWritten = !std::is_const_v<T>;
  static cpu::calls::Array<T, kDimensions> of(Value& v) {
    expect(v.tag == 'a' && v.element == sizeof(T), "expected an array of another type");
    return {reinterpret_cast<T*>(v.bytes.data()), v.shape[0], v.shape[1]};
  }
};

Values to_values(const std::vector<std::string>& names) {
  Values values;
  for (const std::string& name : names) values.push_back(Value(name));
  return values;
}
Values to_values(double number) {
  return {Value(number)};
}

using Call = std::function<Values(Values&)>;

template <typename Result, typename... Parameters, std::size_t... i>
Call on_values(Result (*function)(Parameters...), std::index_sequence<i...>) {
  return [function](Values& in) {
    expect(in.size() == sizeof...(Parameters), "another number of arguments");
    Values out;
    if constexpr (std::is_void_v<Result>) {
      function(Parameter<std::decay_t<Parameters>>::of(in[i])...);
    } else {
      out = to_values(function(Parameter<std::decay_t<Parameters>>::of(in[i])...));
    }
    out.insert(out.begin(), Value(double(out.size())));
    const auto add_written = [&](std::size_t argument, bool written) {
      if (written) out.insert(out.end(), {Value(double(argument)), in[argument]});
    };
    (add_written(i, Parameter<std::decay_t<Parameters>>::kWritten), ...);
    return out;
  };
}

template <typename Result, typename... Parameters>
Call on_values(Result (*function)(Parameters...)) {
  return on_values(function, std::index_sequence_for<Parameters...>());
}

// One model at a time, and one session of it.
std::unique_ptr<Session> session;

Mapping map_file(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY);
  struct stat status{};
  expect(file >= 0 && fstat(file, &status) == 0, "cannot open the file");
  const std::size_t bytes = std::size_t(status.st_size);
  void* p = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file, 0);
  close(file);
  expect(p != MAP_FAILED, "cannot map the file");
  return {static_cast<const std::byte*>(p), bytes, {p, [bytes](void* q) { munmap(q, bytes); }}};
}

// A line for each field that is a number: its name and value.
Config read_config(const std::string& text) {
  Config config;
  std::istringstream in(text);
  std::string name;
  double value = 0;
  const auto set = [&value](auto& field) {
    using Field = std::remove_reference_t<decltype(field)>;
    if constexpr (std::is_arithmetic_v<Field>) field = Field(value);
  };
  while (in >> name >> value) {
#define CONFIG(type, field, ...) \
  if (name == #field) set(config.field);
#include "model/config.inc"
  }
  return config;
}

// Tensors: a line for each with role, layer, name, type, rows, columns, offset and bytes.
void open_model(const std::string& path, const std::string& config, const std::string& tensors, int threads,
                int chunk_tokens, const std::string& compute) {
  Model model = without_tensors(read_config(config));
  model.mapping = map_file(path);
  std::istringstream in(tensors);
  std::string role;
  int layer = 0;
  while (in >> role >> layer) {
    Tensor tensor;
    std::uint32_t type = 0;
    std::size_t offset = 0;
    in >> tensor.name >> type >> tensor.rows >> tensor.cols >> offset >> tensor.bytes;
    tensor.type = TensorType(type);
    tensor.data = model.mapping.data + offset;
    tensor_at(model, role, layer) = tensor;
  }
  validate(model);
  session.reset();
  static const std::map<std::string, Compute> kModes = {
      {"int8", Compute::kInt8}, {"w8a8", Compute::kW8A8}, {"f32", Compute::kF32}};
  session = make_cpu_engine(std::move(model), {.threads = threads,
                                               .compute = kModes.at(compute),
                                               .kv_type = compute == "f32" ? KvType::kF32 : KvType::kF16,
                                               .chunk_tokens = chunk_tokens})
                ->session();
}

void forward_prompt(const cpu::calls::Array<const TokenId, 1>& tokens, cpu::calls::OutVector logits) {
  expect(logits.shape(0) == std::size_t(session->engine().config().vocab_size), "logits have another size");
  run_alone(*session, {.tokens = {tokens.data(), tokens.shape(0)}, .output = LogitsOutput{logits.data()}},
            "forward_prompt", {});
}

std::vector<std::string> device_name() {
  return {session->engine().device_name()};
}

// clang-format off
const std::map<std::string, Call> kCalls = {
#define METAL_PREFILL_CALL(name) {#name, on_values(cpu::calls::name)},
    METAL_PREFILL_KERNEL_CALLS(METAL_PREFILL_CALL)
#undef METAL_PREFILL_CALL
    {"kernel_sets", on_values(cpu::kernel_sets)},
    {"open_model", on_values(open_model)},
    {"device_name", on_values(device_name)},
    {"forward_prompt", on_values(forward_prompt)},
};
// clang-format on

void answer() {
  const auto n = read_value<std::uint32_t>();
  Values in;
  for (std::uint32_t i = 0; i < n; ++i) in.push_back(read());
  Values out;
  try {
    const auto call = kCalls.find(in.at(0).bytes);
    expect(call != kCalls.end(), "no such function");
    in.erase(in.begin());
    out = call->second(in);
  } catch (const std::exception& error) {
    out = {Value(std::string(error.what()))};
  }
  write_value(std::uint32_t(out.size()));
  for (const Value& value : out) write(value);
  std::fflush(stdout);
}

}  // namespace
}  // namespace metal_prefill

int main() {
  for (;;) metal_prefill::answer();
}
