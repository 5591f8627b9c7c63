// Sums tensors in rank order: one pass over memory, block by block, compiled for AVX2 as well
// and chosen at run time.

#include "sum.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#define POSEIDON_MULTIVERSION __attribute__((target_clones("default", "arch=haswell")))
#else
#define POSEIDON_MULTIVERSION
#endif

namespace poseidon {
namespace {

// Elements added up before the block is written: small enough for the first-level cache.
constexpr size_t kBlock = 2048;

template <typename To, typename From>
[[gnu::always_inline]] inline To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// bfloat16 is the upper half of a float. Rounding is to nearest, ties to even.
struct Bfloat16 {
  uint16_t bits;

  static float ToFloat(Bfloat16 value) {
    return BitCast<float>(static_cast<uint32_t>(value.bits) << 16);
  }

  static Bfloat16 FromFloat(float value) {
    const uint32_t wide = BitCast<uint32_t>(value);
    const uint32_t rounded = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
    const uint32_t quiet_nan = (wide >> 16) | 0x40;
    return {static_cast<uint16_t>(value != value ? quiet_nan : rounded)};
  }
};

// IEEE binary16: 1 sign, 5 exponent and 10 fraction bits. Rounding is to nearest, ties to even.
struct Float16 {
  uint16_t bits;

  static float ToFloat(Float16 value) {
    const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fff) << 13;
    const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
    // Multiplying by 2^112 moves the exponent's bias from 15 to 127, subnormal numbers included.
    const uint32_t scaled = BitCast<uint32_t>(BitCast<float>(magnitude) * 0x1p112f);
    const bool is_finite = magnitude < (0x7c00u << 13);
    return BitCast<float>((is_finite ? scaled : magnitude | 0x7f800000u) | sign);
  }

  static Float16 FromFloat(float value) {
    const uint32_t wide = BitCast<uint32_t>(value);
    const uint32_t sign = (wide >> 16) & 0x8000;
    const uint32_t magnitude = wide & 0x7fffffff;
    // Below 2^-14 the result is subnormal: adding 0.5 lets the float adder do the rounding.
    const uint32_t subnormal =
        BitCast<uint32_t>(BitCast<float>(magnitude) + 0.5f) - BitCast<uint32_t>(0.5f);
    const uint32_t normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    uint32_t half = magnitude < (113u << 23) ? subnormal : normal;
    if (magnitude >= (143u << 23)) half = 0x7c00;       // 2^16 and above: infinity
    if (magnitude > 0x7f800000u) half = 0x7e00;         // not a number
    return {static_cast<uint16_t>(half | sign)};
  }
};

template <typename T>
struct Arithmetic {
  using Accumulator = T;
  static Accumulator Load(T value) { return value; }
  static T Store(Accumulator value) { return value; }
};

template <>
struct Arithmetic<Float16> {
  using Accumulator = float;
  static Accumulator Load(Float16 value) { return Float16::ToFloat(value); }
  static Float16 Store(Accumulator value) { return Float16::FromFloat(value); }
};

template <>
struct Arithmetic<Bfloat16> {
  using Accumulator = float;
  static Accumulator Load(Bfloat16 value) { return Bfloat16::ToFloat(value); }
  static Bfloat16 Store(Accumulator value) { return Bfloat16::FromFloat(value); }
};

template <typename T>
[[gnu::always_inline]] inline void SumBlocks(const void* const* inputs, size_t num_inputs,
                                             size_t count, void* output) {
  using A = Arithmetic<T>;
  typename A::Accumulator sum[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t n = std::min(kBlock, count - begin);
    const T* first = static_cast<const T*>(inputs[0]) + begin;
    for (size_t i = 0; i < n; ++i) sum[i] = A::Load(first[i]);
    for (size_t k = 1; k < num_inputs; ++k) {
      const T* next = static_cast<const T*>(inputs[k]) + begin;
      for (size_t i = 0; i < n; ++i) sum[i] += A::Load(next[i]);
    }
    T* out = static_cast<T*>(output) + begin;
    for (size_t i = 0; i < n; ++i) out[i] = A::Store(sum[i]);
  }
}

// Signed overflow is undefined; counters that wrap must still agree on all ranks, hence unsigned.
#define POSEIDON_SUM(name, type)                                                           \
  POSEIDON_MULTIVERSION void name(const void* const* inputs, size_t num_inputs,            \
                                  size_t count, void* output) {                            \
    SumBlocks<type>(inputs, num_inputs, count, output);                                    \
  }
POSEIDON_SUM(SumFloat32, float)
POSEIDON_SUM(SumFloat64, double)
POSEIDON_SUM(SumFloat16, Float16)
POSEIDON_SUM(SumBfloat16, Bfloat16)
POSEIDON_SUM(SumInt32, uint32_t)
POSEIDON_SUM(SumInt64, uint64_t)
#undef POSEIDON_SUM

struct TypeInfo {
  const char* name;
  size_t bytes;
  void (*sum)(const void* const*, size_t, size_t, void*);
};

const TypeInfo& Info(DataType dtype) {
  static constexpr TypeInfo kInfo[] = {
      {"float32", 4, SumFloat32},   {"float64", 8, SumFloat64}, {"float16", 2, SumFloat16},
      {"bfloat16", 2, SumBfloat16}, {"int32", 4, SumInt32},     {"int64", 8, SumInt64},
      {"bytes", 1, nullptr},
  };
  return kInfo[static_cast<int>(dtype)];
}

}  // namespace

size_t ElementBytes(DataType dtype) { return Info(dtype).bytes; }

const char* Name(DataType dtype) { return Info(dtype).name; }

void SumInOrder(DataType dtype, const std::vector<const void*>& inputs, size_t bytes,
                void* output) {
  if (inputs.empty()) {
    std::memset(output, 0, bytes);
  } else if (inputs.size() == 1) {
    if (inputs[0] != output) std::memcpy(output, inputs[0], bytes);
  } else {
    Info(dtype).sum(inputs.data(), inputs.size(), bytes / ElementBytes(dtype), output);
  }
}

}  // namespace poseidon
