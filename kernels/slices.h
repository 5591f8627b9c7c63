// Slices: some rows of a matrix, each with its index, in which an index may occur often.
//
// This is the gradient of an embedding. Rows with the same index are added in their order, so bits
// do not depend on the number of threads.

#ifndef POSEIDON_SLICES_H_
#define POSEIDON_SLICES_H_

#include <cstdint>
#include <vector>

namespace poseidon {

// Which slices have which index. Together, `slices` and one of the others are the lists of SumRows.
struct SlicesByIndex {
  explicit SlicesByIndex(const std::vector<int64_t>& all_indices);

  // Where the slices of each row of a matrix with `num_rows` rows begin, and the end: those without any are empty.
  std::vector<int64_t> BeginsOfRows(int64_t num_rows) const;

  std::vector<int64_t> slices;   // by index and then as given
  std::vector<int64_t> indices;  // the different ones, in ascending order
  std::vector<int64_t> begins;   // where those of each index begin in `slices`, and the end
};

}  // namespace poseidon

#endif  // POSEIDON_SLICES_H_
