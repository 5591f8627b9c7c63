// Leaves out the zeros of a matrix: factors behind a ReLU, a pooling or a dropout are mostly zeros.
//
// An encoded matrix is a bitmap, which has a bit for each element, and the elements that are not zero. Only elements
// whose bits are all zero are left out: a negative zero and NaN stay what they are. The code is
//
//   uint64_t elements; uint64_t bitmap[ceil(elements / 64)]; the elements that are left
//
// with the first element in the lowest bit, and its length in bytes is that of these parts.

#ifndef POSEIDON_COMMUNICATOR_ZEROS_H_
#define POSEIDON_COMMUNICATOR_ZEROS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

namespace poseidon {

struct Code {
  std::shared_ptr<const char[]> data;
  size_t bytes = 0;

  explicit operator bool() const { return data != nullptr; }
};

// Encodes a matrix of `bytes` bytes whose elements have `element_bytes`, 2, 4 or 8. Returns nothing if that would not
// make it shorter, which it often knows without reading all of it, or if there is no memory for it.
Code LeaveOutZeros(const void* matrix, size_t bytes, size_t element_bytes);

// Returns the bytes of the matrix that a code of `bytes` bytes stands for; nothing if it is not a code.
std::optional<size_t> DecodedBytes(const void* code, size_t bytes, size_t element_bytes);

// Writes the matrix of a code for which DecodedBytes has found a length, which `matrix` has room for.
void PutBackZeros(const void* code, size_t element_bytes, void* matrix);

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_ZEROS_H_
