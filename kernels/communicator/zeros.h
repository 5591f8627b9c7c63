// Leaves out the zeros of a matrix: factors behind a ReLU, a pooling or a dropout are mostly zeros.
//
// What is left is a bitmap, which has a bit for each element, and the elements that are not zero. Only elements whose
// bits are all zero are left out: a negative zero and NaN stay what they are. Its bytes are
//
//   uint64_t elements; uint64_t bitmap[ceil(elements / 64)]; the elements that are left
//
// with the first element in the lowest bit.

#ifndef POSEIDON_COMMUNICATOR_ZEROS_H_
#define POSEIDON_COMMUNICATOR_ZEROS_H_

#include <cstddef>
#include <memory>
#include <optional>

namespace poseidon {

struct WithoutZeros {
  std::shared_ptr<const char[]> data;  // null: there is none
  size_t bytes = 0;

  explicit operator bool() const { return data != nullptr; }
};

// Leaves out the zeros of a matrix of `bytes` bytes whose elements have `element_bytes`. Returns nothing if that saves
// less than a share of the bytes, which it often knows without reading them all; if there is no memory for it; or if
// elements do not have 2, 4 or 8 bytes.
WithoutZeros LeaveOutZeros(const void* matrix, size_t bytes, size_t element_bytes, double least_saving);

// Returns the bytes of the matrix whose elements that are not zero are in `data`; nothing if it does not hold any.
std::optional<size_t> MatrixBytes(const void* data, size_t bytes, size_t element_bytes);

// Writes the matrix for which MatrixBytes has found a length; there is room for it.
void PutBackZeros(const void* data, size_t element_bytes, void* matrix);

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_ZEROS_H_
