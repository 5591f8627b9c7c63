// Sorts slices by index.
//
// Tests: tests/communicator/test_ops.py, tests/communicator/test_staging.py.

#include "slices.h"

#include <algorithm>
#include <numeric>

namespace poseidon {

SlicesByIndex::SlicesByIndex(const std::vector<int64_t>& all_indices) : slices(all_indices.size()) {
  std::iota(slices.begin(), slices.end(), 0);
  std::stable_sort(slices.begin(), slices.end(), [&](int64_t a, int64_t b) { return all_indices[a] < all_indices[b]; });
  for (size_t i = 0; i < slices.size(); ++i) {
    const int64_t index = all_indices[slices[i]];
    if (!indices.empty() && indices.back() == index) continue;
    indices.push_back(index);
    begins.push_back(i);
  }
  begins.push_back(slices.size());
}

std::vector<int64_t> SlicesByIndex::BeginsOfRows(int64_t num_rows) const {
  std::vector<int64_t> result(num_rows + 1, begins.back());
  int64_t row = 0;
  for (size_t i = 0; i < indices.size(); ++i) {
    for (; row <= indices[i]; ++row) result[row] = begins[i];
  }
  return result;
}

}  // namespace poseidon
