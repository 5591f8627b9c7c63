// Arithmetic on slices: some rows of a matrix, each with its index, in which an index may occur often.
//
// This is the gradient of an embedding. Rows with the same index are added in their order, so bits
// do not depend on the number of threads.

#ifndef POSEIDON_SLICES_H_
#define POSEIDON_SLICES_H_

#include <cstdint>
#include <vector>

#include "sum.h"

namespace poseidon {

// Which rows have which index.
class RowsByIndex {
 public:
  explicit RowsByIndex(const std::vector<int64_t>& indices);

  // The number of different indices, and the i-th of them in ascending order.
  int64_t size() const { return static_cast<int64_t>(begins_.size()) - 1; }
  int64_t index(int64_t i) const { return indices_[i]; }

  // Writes the sum of the rows with the i-th index to `out`; half and bfloat16 are added in float
  // and rounded once. `values` has a row of `columns` floating-point elements for each index.
  void Sum(DataType dtype, const void* values, int64_t columns, int64_t i, void* out) const;

 private:
  std::vector<int64_t> order_;    // rows, by index and then as given
  std::vector<int64_t> begins_;   // where each index begins in order_, and the end
  std::vector<int64_t> indices_;  // the different ones
};

}  // namespace poseidon

#endif  // POSEIDON_SLICES_H_
