// Arithmetic on the element types that are exchanged: half and bfloat16 are computed with in float.

#ifndef POSEIDON_COMMUNICATOR_ARITHMETIC_H_
#define POSEIDON_COMMUNICATOR_ARITHMETIC_H_

#include <cstdint>
#include <cstring>

// GPUs compute the same: kernels/cuda/copies.cu.cc.
#ifdef __CUDACC__
#define POSEIDON_HOST_DEVICE __host__ __device__
#else
#define POSEIDON_HOST_DEVICE
#endif

namespace poseidon {

template <typename To, typename From>
[[gnu::always_inline]] POSEIDON_HOST_DEVICE inline To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// bfloat16 is the upper half of a float. Rounding is to nearest, ties to even.
struct Bfloat16 {
  uint16_t bits;

  static POSEIDON_HOST_DEVICE float ToFloat(Bfloat16 value) {
    return BitCast<float>(static_cast<uint32_t>(value.bits) << 16);
  }

  static POSEIDON_HOST_DEVICE Bfloat16 FromFloat(float value) {
    const uint32_t wide = BitCast<uint32_t>(value);
    const uint32_t rounded = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
    const uint32_t quiet_nan = (wide >> 16) | 0x40;
    return {static_cast<uint16_t>(value != value ? quiet_nan : rounded)};
  }
};

// IEEE binary16: 1 sign, 5 exponent and 10 fraction bits. Rounding is to nearest, ties to even.
struct Float16 {
  uint16_t bits;

  static POSEIDON_HOST_DEVICE float ToFloat(Float16 value) {
    const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fff) << 13;
    const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
    const uint32_t normal = magnitude + (112u << 23);  // moves the exponent's bias from 15 to 127
    // Without subnormal floats on the way: TensorFlow's threads take those for zero.
    const uint32_t subnormal = BitCast<uint32_t>(BitCast<float>(magnitude + (113u << 23)) - 0x1p-14f);
    const uint32_t finite = magnitude < (1u << 23) ? subnormal : normal;
    const bool is_finite = magnitude < (0x7c00u << 13);
    return BitCast<float>((is_finite ? finite : magnitude | 0x7f800000u) | sign);
  }

  static POSEIDON_HOST_DEVICE Float16 FromFloat(float value) {
    const uint32_t wide = BitCast<uint32_t>(value);
    const uint32_t sign = (wide >> 16) & 0x8000;
    const uint32_t magnitude = wide & 0x7fffffff;
    // Below 2^-14 the result is subnormal: adding 0.5 lets the float adder do the rounding.
    const uint32_t subnormal = BitCast<uint32_t>(BitCast<float>(magnitude) + 0.5f) - BitCast<uint32_t>(0.5f);
    const uint32_t normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    uint32_t half = magnitude < (113u << 23) ? subnormal : normal;
    if (magnitude >= (143u << 23)) half = 0x7c00;  // 2^16 and above: infinity
    if (magnitude > 0x7f800000u) half = 0x7e00;    // not a number
    return {static_cast<uint16_t>(half | sign)};
  }
};

// How elements of type T are computed with.
template <typename T>
struct Arithmetic {
  using Accumulator = T;
  static POSEIDON_HOST_DEVICE Accumulator Load(T value) { return value; }
  static POSEIDON_HOST_DEVICE T Store(Accumulator value) { return value; }
};

template <>
struct Arithmetic<Float16> {
  using Accumulator = float;
  static POSEIDON_HOST_DEVICE Accumulator Load(Float16 value) { return Float16::ToFloat(value); }
  static POSEIDON_HOST_DEVICE Float16 Store(Accumulator value) { return Float16::FromFloat(value); }
};

template <>
struct Arithmetic<Bfloat16> {
  using Accumulator = float;
  static POSEIDON_HOST_DEVICE Accumulator Load(Bfloat16 value) { return Bfloat16::ToFloat(value); }
  static POSEIDON_HOST_DEVICE Bfloat16 Store(Accumulator value) { return Bfloat16::FromFloat(value); }
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_ARITHMETIC_H_
