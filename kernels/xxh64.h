// XXH64, a fast hash. Y. Collet, xxHash fast digest algorithm, version 0.1.1, section "XXH64":
// https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
//
// TensorFlow's Hash64 takes twice as long, and its FarmHash is not among the headers that it installs.
//
// Tests: tests/communicator/test_row_ops.py.

#ifndef POSEIDON_XXH64_H_
#define POSEIDON_XXH64_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace poseidon {
namespace xxh64 {

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87, kPrime2 = 0xC2B2AE3D27D4EB4F, kPrime3 = 0x165667B19E3779F9,
                   kPrime4 = 0x85EBCA77C2B2AE63, kPrime5 = 0x27D4EB2F165667C5;

inline uint64_t RotateLeft(uint64_t value, int bits) { return value << bits | value >> (64 - bits); }

// Reads a word as this machine stores it, which is little-endian wherever TensorFlow runs.
template <typename Word>
uint64_t Read(const char* data) {
  Word word;
  std::memcpy(&word, data, sizeof(word));
  return word;
}

inline uint64_t Round(uint64_t lane, uint64_t word) { return RotateLeft(lane + word * kPrime2, 31) * kPrime1; }

}  // namespace xxh64

inline uint64_t Xxh64(const char* data, size_t size, uint64_t seed = 0) {
  using namespace xxh64;  // NOLINT(build/namespaces)
  const char* const end = data + size;
  uint64_t hash = seed + kPrime5;
  if (size >= 32) {
    uint64_t lanes[] = {seed + kPrime1 + kPrime2, seed + kPrime2, seed, seed - kPrime1};
    for (; end - data >= 32; data += 32) {
      for (int i = 0; i < 4; ++i) lanes[i] = Round(lanes[i], Read<uint64_t>(data + 8 * i));
    }
    hash = RotateLeft(lanes[0], 1) + RotateLeft(lanes[1], 7) + RotateLeft(lanes[2], 12) + RotateLeft(lanes[3], 18);
    for (uint64_t lane : lanes) hash = (hash ^ Round(0, lane)) * kPrime1 + kPrime4;
  }
  hash += size;
  for (; end - data >= 8; data += 8) {
    hash = RotateLeft(hash ^ Round(0, Read<uint64_t>(data)), 27) * kPrime1 + kPrime4;
  }
  for (; end - data >= 4; data += 4) {
    hash = RotateLeft(hash ^ Read<uint32_t>(data) * kPrime1, 23) * kPrime2 + kPrime3;
  }
  for (; data < end; ++data) hash = RotateLeft(hash ^ Read<uint8_t>(data) * kPrime5, 11) * kPrime1;
  hash = (hash ^ hash >> 33) * kPrime2;
  hash = (hash ^ hash >> 29) * kPrime3;
  return hash ^ hash >> 32;
}

}  // namespace poseidon

#endif  // POSEIDON_XXH64_H_
