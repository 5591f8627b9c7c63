// Leaves out zeros and puts them back, 64 elements, a word of the bitmap, at a time. Compiled for AVX-512
// as well, which packs and unpacks the elements of a vector in one instruction, and chosen at run time.
//
// Tests: tests/native/zeros_test.cc.

#include "zeros.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
#include <immintrin.h>
#define POSEIDON_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi2,popcnt,bmi2")))
#endif

namespace poseidon {
namespace {

constexpr size_t kWord = 64;     // elements of a word of the bitmap
constexpr size_t kSamples = 32;  // words that are looked at first
constexpr double kError = 0.02;  // of a share that is estimated by them: two standard deviations

size_t Words(size_t elements) { return elements / kWord + (elements % kWord != 0); }
size_t HeadBytes(size_t elements) { return sizeof(uint64_t) * (1 + Words(elements)); }

// The element types, as unsigned integers: bits are compared, not numbers.
template <typename T>
struct Portable {
  static uint64_t NotZero(const T* from, size_t n) {
    uint64_t word = 0;
    for (size_t i = 0; i < n; ++i) word |= static_cast<uint64_t>(from[i] != 0) << i;
    return word;
  }

  // Writes the elements of `word` to `to`, where there is room for `n`; returns the end of what counts.
  static T* Pack(const T* from, uint64_t word, size_t n, T* to) {
    for (size_t i = 0; i < n; ++i) {
      *to = from[i];
      to += word >> i & 1;
    }
    return to;
  }

  // The opposite, which reads nothing behind the last element.
  static const T* Unpack(const T* from, uint64_t word, size_t n, T* to) {
    std::memset(to, 0, n * sizeof(T));
    for (; word != 0; word &= word - 1) to[__builtin_ctzll(word)] = *from++;
    return from;
  }
};

#ifdef POSEIDON_AVX512
template <typename T>
struct Avx512;

// GCC's own headers use an uninitialised vector where the result does not depend on it.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

template <>
struct Avx512<uint32_t> {
  static constexpr size_t kLanes = 16;
  POSEIDON_AVX512 static uint64_t NotZero(const uint32_t* from) {
    const __m512i v = _mm512_loadu_si512(from);
    return _mm512_test_epi32_mask(v, v);
  }
  POSEIDON_AVX512 static void Pack(const uint32_t* from, uint64_t mask, uint32_t* to) {
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(mask, _mm512_loadu_si512(from)));
  }
  POSEIDON_AVX512 static void Unpack(const uint32_t* from, uint64_t mask, uint32_t* to) {
    _mm512_storeu_si512(to, _mm512_maskz_expandloadu_epi32(mask, from));
  }
};

template <>
struct Avx512<uint64_t> {
  static constexpr size_t kLanes = 8;
  POSEIDON_AVX512 static uint64_t NotZero(const uint64_t* from) {
    const __m512i v = _mm512_loadu_si512(from);
    return _mm512_test_epi64_mask(v, v);
  }
  POSEIDON_AVX512 static void Pack(const uint64_t* from, uint64_t mask, uint64_t* to) {
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi64(mask, _mm512_loadu_si512(from)));
  }
  POSEIDON_AVX512 static void Unpack(const uint64_t* from, uint64_t mask, uint64_t* to) {
    _mm512_storeu_si512(to, _mm512_maskz_expandloadu_epi64(mask, from));
  }
};

template <>
struct Avx512<uint16_t> {
  static constexpr size_t kLanes = 32;
  POSEIDON_AVX512 static uint64_t NotZero(const uint16_t* from) {
    const __m512i v = _mm512_loadu_si512(from);
    return _mm512_test_epi16_mask(v, v);
  }
  POSEIDON_AVX512 static void Pack(const uint16_t* from, uint64_t mask, uint16_t* to) {
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi16(mask, _mm512_loadu_si512(from)));
  }
  POSEIDON_AVX512 static void Unpack(const uint16_t* from, uint64_t mask, uint16_t* to) {
    _mm512_storeu_si512(to, _mm512_maskz_expandloadu_epi16(mask, from));
  }
};

#pragma GCC diagnostic pop

bool HasAvx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi2");
}

template <typename T>
POSEIDON_AVX512 size_t CountAvx512(const T* from, size_t elements, uint64_t* bitmap) {
  using V = Avx512<T>;
  size_t count = 0, i = 0;
  for (; i + kWord <= elements; i += kWord) {
    uint64_t word = 0;
    for (size_t lane = 0; lane < kWord; lane += V::kLanes) word |= V::NotZero(from + i + lane) << lane;
    bitmap[i / kWord] = word;
    count += __builtin_popcountll(word);
  }
  if (i < elements) {
    bitmap[i / kWord] = Portable<T>::NotZero(from + i, elements - i);
    count += __builtin_popcountll(bitmap[i / kWord]);
  }
  return count;
}

// Whole vectors are stored, so `to` has room for kWord elements behind the last one.
template <typename T>
POSEIDON_AVX512 void PackAvx512(const T* from, size_t elements, const uint64_t* bitmap, T* to) {
  using V = Avx512<T>;
  constexpr uint64_t kMask = (uint64_t{1} << V::kLanes) - 1;
  size_t i = 0;
  for (; i + kWord <= elements; i += kWord) {
    const uint64_t word = bitmap[i / kWord];
    for (size_t lane = 0; lane < kWord; lane += V::kLanes) {
      const uint64_t mask = word >> lane & kMask;
      V::Pack(from + i + lane, mask, to);
      to += __builtin_popcountll(mask);
    }
  }
  if (i < elements) Portable<T>::Pack(from + i, bitmap[i / kWord], elements - i, to);
}

template <typename T>
POSEIDON_AVX512 void UnpackAvx512(const T* from, size_t elements, const uint64_t* bitmap, T* to) {
  using V = Avx512<T>;
  constexpr uint64_t kMask = (uint64_t{1} << V::kLanes) - 1;
  size_t i = 0;
  for (; i + kWord <= elements; i += kWord) {
    const uint64_t word = bitmap[i / kWord];
    for (size_t lane = 0; lane < kWord; lane += V::kLanes) {
      const uint64_t mask = word >> lane & kMask;
      V::Unpack(from, mask, to + i + lane);
      from += __builtin_popcountll(mask);
    }
  }
  if (i < elements) Portable<T>::Unpack(from, bitmap[i / kWord], elements - i, to + i);
}
#endif

template <typename T>
size_t Count(const T* from, size_t elements, uint64_t* bitmap) {
#ifdef POSEIDON_AVX512
  if (HasAvx512()) return CountAvx512(from, elements, bitmap);
#endif
  size_t count = 0;
  for (size_t i = 0; i < elements; i += kWord) {
    bitmap[i / kWord] = Portable<T>::NotZero(from + i, std::min(kWord, elements - i));
    count += __builtin_popcountll(bitmap[i / kWord]);
  }
  return count;
}

template <typename T>
void Pack(const T* from, size_t elements, const uint64_t* bitmap, T* to) {
#ifdef POSEIDON_AVX512
  if (HasAvx512()) return PackAvx512(from, elements, bitmap, to);
#endif
  for (size_t i = 0; i < elements; i += kWord) {
    to = Portable<T>::Pack(from + i, bitmap[i / kWord], std::min(kWord, elements - i), to);
  }
}

template <typename T>
void Unpack(const T* from, size_t elements, const uint64_t* bitmap, T* to) {
#ifdef POSEIDON_AVX512
  if (HasAvx512()) return UnpackAvx512(from, elements, bitmap, to);
#endif
  for (size_t i = 0; i < elements; i += kWord) {
    from = Portable<T>::Unpack(from, bitmap[i / kWord], std::min(kWord, elements - i), to + i);
  }
}

// Estimates the share of the bytes that leaving out the zeros of a large matrix saves, from some words.
template <typename T>
double EstimatedSaving(const T* from, size_t words) {
  size_t count = 0, word = 0;
  for (size_t sample = 0; sample < kSamples; ++sample) {
    count += __builtin_popcountll(Portable<T>::NotZero(from + word * kWord, kWord));
    // By an odd number, so that words of a matrix with rows of a round length are not all in the same columns.
    word = (word + (words / kSamples | 1)) % words;
  }
  return 1 - static_cast<double>(count) / (kSamples * kWord) - 1 / (8.0 * sizeof(T));
}

template <typename T>
WithoutZeros LeaveOut(const T* from, size_t elements, double least_saving) {
  const size_t words = elements / kWord, bytes = elements * sizeof(T), head = HeadBytes(elements);
  if (words >= 8 * kSamples && EstimatedSaving(from, words) < least_saving - kError) return {};
  std::unique_ptr<uint64_t[]> bitmap(new (std::nothrow) uint64_t[Words(elements)]);
  if (!bitmap) return {};
  const size_t length = head + Count(from, elements, bitmap.get()) * sizeof(T);
  if (length >= bytes || static_cast<double>(length) > (1 - least_saving) * static_cast<double>(bytes)) return {};
  std::shared_ptr<char[]> data(new (std::nothrow) char[length + kWord * sizeof(T)]);
  if (!data) return {};
  const uint64_t number = elements;
  std::memcpy(data.get(), &number, sizeof(number));
  std::memcpy(data.get() + sizeof(number), bitmap.get(), head - sizeof(number));
  Pack(from, elements, bitmap.get(), reinterpret_cast<T*>(data.get() + head));
  return {std::move(data), length};
}

}  // namespace

WithoutZeros LeaveOutZeros(const void* matrix, size_t bytes, size_t element_bytes, double least_saving) {
  switch (element_bytes) {
    case 2:
      return LeaveOut(static_cast<const uint16_t*>(matrix), bytes / 2, least_saving);
    case 4:
      return LeaveOut(static_cast<const uint32_t*>(matrix), bytes / 4, least_saving);
    case 8:
      return LeaveOut(static_cast<const uint64_t*>(matrix), bytes / 8, least_saving);
    default:
      return {};
  }
}

std::optional<size_t> MatrixBytes(const void* data, size_t bytes, size_t element_bytes) {
  uint64_t elements;
  if (bytes < sizeof(elements)) return std::nullopt;
  std::memcpy(&elements, data, sizeof(elements));
  // There is a bit for each element, so there are not more of them than bits.
  if (elements > 8 * bytes || HeadBytes(elements) > bytes) return std::nullopt;
  const auto* bitmap = static_cast<const uint64_t*>(data) + 1;
  size_t count = 0;
  for (size_t word = 0; word < Words(elements); ++word) count += __builtin_popcountll(bitmap[word]);
  const size_t rest = elements % kWord;
  if (rest != 0 && bitmap[elements / kWord] >> rest != 0) return std::nullopt;
  if (HeadBytes(elements) + count * element_bytes != bytes) return std::nullopt;
  return elements * element_bytes;
}

void PutBackZeros(const void* data, size_t element_bytes, void* matrix) {
  const size_t elements = *static_cast<const uint64_t*>(data);
  const auto* bitmap = static_cast<const uint64_t*>(data) + 1;
  const void* from = bitmap + Words(elements);
  switch (element_bytes) {
    case 2:
      return Unpack(static_cast<const uint16_t*>(from), elements, bitmap, static_cast<uint16_t*>(matrix));
    case 4:
      return Unpack(static_cast<const uint32_t*>(from), elements, bitmap, static_cast<uint32_t*>(matrix));
    default:
      return Unpack(static_cast<const uint64_t*>(from), elements, bitmap, static_cast<uint64_t*>(matrix));
  }
}

}  // namespace poseidon
