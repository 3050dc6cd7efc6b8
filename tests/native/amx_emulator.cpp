// Runs the tile instructions of AMX on processors that lack them, so that tests execute that set's kernels on
// every machine with AVX512-BF16.
//
// A processor without AMX raises SIGILL at each of these instructions. The handler decodes the instruction,
// executes it as specified in Intel's manual (Software Developer's Manual, volume 2, "TDPBF16PS" and others),
// and continues after it. It does so only if METAL_PREFILL_EMULATE_AMX is set when the engine first requests
// the features of the processor: the linker replaces that function by the one here (`--wrap`), so the
// engine's sources need no hooks.
#include <immintrin.h>
#include <signal.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "base/processor.h"

namespace {

constexpr int kTiles = 8, kMaxRows = 16, kRowBytes = 64;
constexpr unsigned kFlushDenormals = 0x8040;       // FTZ and DAZ, which the matrix unit always has
constexpr unsigned kRoundToNearestQuiet = 0x1f80;  // the default: all exceptions masked

// Tiles of the thread. Without a palette, only ldtilecfg and tilerelease are allowed.
struct Tiles {
  std::uint8_t palette;
  std::uint8_t rows[kTiles];
  std::uint16_t row_bytes[kTiles];
  alignas(64) std::uint8_t data[kTiles][kMaxRows][kRowBytes];
};
thread_local Tiles tiles;

struct sigaction previous;

// An instruction: VEX, opcode, ModRM, and SIB and displacement if present.
struct Instruction {
  int opcode = 0, prefix = 0;     // prefix: 0 none, 1 66, 2 F3, 3 F2
  int reg = 0, rm = 0, vvvv = 0;  // tile registers, if there is no memory operand
  bool memory = false;
  std::uint64_t address = 0, stride = 0;
  std::size_t length = 0;
};

std::uint64_t register_value(const greg_t* registers, int number) {
  constexpr int kOrder[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                            REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return std::uint64_t(registers[kOrder[number]]);
}

template <typename T>
std::uint64_t displacement(const std::uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return std::uint64_t(std::int64_t(value));
}

// Returns false unless the bytes are a VEX instruction of the map with the tile instructions.
bool decode(const greg_t* registers, Instruction& out) {
  const auto* code = reinterpret_cast<const std::uint8_t*>(registers[REG_RIP]);
  constexpr int kMap0F38 = 2;
  if (code[0] != 0xc4 || (code[1] & 0x1f) != kMap0F38 || (code[2] & 0x84) != 0) return false;
  const int high_index = (code[1] & 0x40) ? 0 : 8, high_base = (code[1] & 0x20) ? 0 : 8;
  out.prefix = code[2] & 3;
  out.vvvv = ~(code[2] >> 3) & 15;
  out.opcode = code[3];
  const int mod = code[4] >> 6, rm = code[4] & 7;
  out.reg = code[4] >> 3 & 7;
  out.rm = rm;
  out.memory = mod != 3;
  const std::uint8_t* next = code + 5;
  if (out.memory) {
    bool has_base = true, relative = false;
    int base = rm | high_base;
    if (rm == 4) {  // SIB
      const int scale = *next >> 6, index = (*next >> 3 & 7) | high_index;
      base = (*next & 7) | high_base;
      has_base = !(mod == 0 && (*next & 7) == 5);
      if (index != 4) out.stride = register_value(registers, index) << scale;
      ++next;
    } else if (mod == 0 && rm == 5) {
      has_base = false;
      relative = true;
    }
    if (has_base) out.address = register_value(registers, base);
    if (mod == 1) {
      out.address += displacement<std::int8_t>(next);
      next += 1;
    } else if (mod == 2 || !has_base) {
      out.address += displacement<std::int32_t>(next);
      next += 4;
    }
    if (relative) out.address += std::uint64_t(next - code) + std::uint64_t(registers[REG_RIP]);
  }
  out.length = std::size_t(next - code);
  return true;
}

bool load_config(const std::uint8_t* from) {
  Tiles loaded = {};
  loaded.palette = from[0];
  if (loaded.palette > 1) return false;
  for (int i = 0; i < kTiles; ++i) {
    std::memcpy(&loaded.row_bytes[i], from + 16 + 2 * i, sizeof loaded.row_bytes[i]);
    loaded.rows[i] = from[48 + i];
    if (loaded.rows[i] > kMaxRows || loaded.row_bytes[i] > kRowBytes) return false;
  }
  tiles = loaded;
  return true;
}

bool is_configured(int tile) {
  return tile < kTiles && tiles.palette == 1 && tiles.rows[tile] > 0 && tiles.row_bytes[tile] > 0;
}

// Whether C += A * B suits the sizes of the tiles.
bool match(int c, int a, int b) {
  return is_configured(c) && is_configured(a) && is_configured(b) && c != a && c != b && a != b &&
         tiles.rows[c] == tiles.rows[a] && tiles.row_bytes[c] == tiles.row_bytes[b] &&
         tiles.row_bytes[a] == 4 * tiles.rows[b];
}

void load(int tile, const Instruction& from) {
  std::memset(tiles.data[tile], 0, sizeof tiles.data[tile]);
  for (int row = 0; row < tiles.rows[tile]; ++row)
    std::memcpy(tiles.data[tile][row],
                reinterpret_cast<const void*>(from.address + std::uint64_t(row) * from.stride),
                tiles.row_bytes[tile]);
}

void store(int tile, const Instruction& to) {
  for (int row = 0; row < tiles.rows[tile]; ++row)
    std::memcpy(reinterpret_cast<void*>(to.address + std::uint64_t(row) * to.stride), tiles.data[tile][row],
                tiles.row_bytes[tile]);
}

// Products of the first and of the second elements of pairs have separate sums, which are added to C at the
// end.
__attribute__((target("avx512f"))) void multiply_pairs(int c, int a, int b) {
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(kRoundToNearestQuiet | kFlushDenormals);
  const __m512i high_half = _mm512_set1_epi32(int(0xffff0000));
  for (int row = 0; row < tiles.rows[c]; ++row) {
    __m512 first = _mm512_setzero_ps(), second = first;
    for (int pair = 0; pair < tiles.rows[b]; ++pair) {
      std::uint32_t x;
      std::memcpy(&x, tiles.data[a][row] + 4 * pair, sizeof x);
      const __m512i weights = _mm512_load_si512(tiles.data[b][pair]);
      const auto value = [](std::uint32_t bits) __attribute__((target("avx512f"))) {
        return _mm512_castsi512_ps(_mm512_set1_epi32(int(bits)));
      };
      first = _mm512_fmadd_ps(value(x << 16), _mm512_castsi512_ps(_mm512_slli_epi32(weights, 16)), first);
      second = _mm512_fmadd_ps(value(x & 0xffff0000),
                               _mm512_castsi512_ps(_mm512_and_si512(weights, high_half)), second);
    }
    auto* sums = reinterpret_cast<float*>(tiles.data[c][row]);
    const __mmask16 lanes = __mmask16((1u << tiles.row_bytes[c] / 4) - 1);
    _mm512_mask_store_ps(sums, lanes, _mm512_add_ps(_mm512_load_ps(sums), _mm512_add_ps(first, second)));
  }
  _mm_setcsr(mode);
}

template <typename Weight>
void multiply_bytes(int c, int a, int b) {
  for (int row = 0; row < tiles.rows[c]; ++row) {
    auto* sums = reinterpret_cast<std::int32_t*>(tiles.data[c][row]);
    for (int quad = 0; quad < tiles.rows[b]; ++quad) {
      const auto* x = reinterpret_cast<const std::int8_t*>(tiles.data[a][row]) + 4 * quad;
      const auto* weights = reinterpret_cast<const Weight*>(tiles.data[b][quad]);
      for (int n = 0; n < tiles.row_bytes[c] / 4; ++n)
        for (int i = 0; i < 4; ++i) sums[n] += std::int32_t(x[i]) * weights[4 * n + i];
    }
  }
}

// Returns false for other instructions, and if a processor with AMX would raise an exception.
bool execute(const Instruction& x) {
  switch (x.opcode << 2 | x.prefix) {
    case 0x49 << 2 | 0:
      if (x.memory) return load_config(reinterpret_cast<const std::uint8_t*>(x.address));
      tiles = {};  // tilerelease
      return true;
    case 0x49 << 2 | 3:  // tilezero
      if (x.memory || !is_configured(x.reg)) return false;
      std::memset(tiles.data[x.reg], 0, sizeof tiles.data[x.reg]);
      return true;
    case 0x4b << 2 | 3:  // tileloadd
      if (!x.memory || !is_configured(x.reg)) return false;
      load(x.reg, x);
      return true;
    case 0x4b << 2 | 2:  // tilestored
      if (!x.memory || !is_configured(x.reg)) return false;
      store(x.reg, x);
      return true;
    case 0x5c << 2 | 2:  // tdpbf16ps
      if (x.memory || !match(x.reg, x.rm, x.vvvv)) return false;
      multiply_pairs(x.reg, x.rm, x.vvvv);
      return true;
    case 0x5e << 2 | 3:  // tdpbssd
      if (x.memory || !match(x.reg, x.rm, x.vvvv)) return false;
      multiply_bytes<std::int8_t>(x.reg, x.rm, x.vvvv);
      return true;
    case 0x5e << 2 | 2:  // tdpbsud
      if (x.memory || !match(x.reg, x.rm, x.vvvv)) return false;
      multiply_bytes<std::uint8_t>(x.reg, x.rm, x.vvvv);
      return true;
    default:
      return false;
  }
}

void on_illegal_instruction(int, siginfo_t*, void* context) {
  greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  Instruction instruction;
  if (decode(registers, instruction) && execute(instruction))
    registers[REG_RIP] += greg_t(instruction.length);
  else
    sigaction(SIGILL, &previous, nullptr);  // the instruction runs again, for the previous handler
}

void install() {
  struct sigaction action = {};
  action.sa_sigaction = on_illegal_instruction;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGILL, &action, &previous);
}

}  // namespace

using metal_prefill::ProcessorFeatures;

// metal_prefill::processor_features().
extern "C" ProcessorFeatures __real__ZN13metal_prefill18processor_featuresEv();
extern "C" [[gnu::used]] ProcessorFeatures __wrap__ZN13metal_prefill18processor_featuresEv() {
  ProcessorFeatures features = __real__ZN13metal_prefill18processor_featuresEv();
  const char* wanted = std::getenv("METAL_PREFILL_EMULATE_AMX");
  if (wanted && *wanted && features.avx512bf16 && !features.amx) {
    install();
    features.amx = true;
  }
  return features;
}
