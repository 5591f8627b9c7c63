// Sorts slices by index, and adds up the rows of one index.
//
// Tests: tests/communicator/test_ops.py, tests/graphs/test_passes.py, tests/training/test_training.py.

#include "slices.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "arithmetic.h"

namespace poseidon {
namespace {

template <typename T>
void SumRowsOf(const T* values, int64_t columns, const int64_t* rows, int64_t num_rows, T* out) {
  using Accumulator = typename Arithmetic<T>::Accumulator;
  if (num_rows == 1) {
    std::memcpy(out, values + rows[0] * columns, columns * sizeof(T));
    return;
  }
  std::vector<Accumulator> total(columns, Accumulator(0));
  for (int64_t i = 0; i < num_rows; ++i) {
    const T* row = values + rows[i] * columns;
    for (int64_t j = 0; j < columns; ++j) total[j] += Arithmetic<T>::Load(row[j]);
  }
  for (int64_t j = 0; j < columns; ++j) out[j] = Arithmetic<T>::Store(total[j]);
}

}  // namespace

RowsByIndex::RowsByIndex(const std::vector<int64_t>& indices) : order_(indices.size()) {
  std::iota(order_.begin(), order_.end(), 0);
  std::stable_sort(order_.begin(), order_.end(), [&](int64_t a, int64_t b) { return indices[a] < indices[b]; });
  for (size_t i = 0; i < order_.size(); ++i) {
    const int64_t index = indices[order_[i]];
    if (!indices_.empty() && indices_.back() == index) continue;
    indices_.push_back(index);
    begins_.push_back(i);
  }
  begins_.push_back(order_.size());
}

void RowsByIndex::Sum(DataType dtype, const void* values, int64_t columns, int64_t i, void* out) const {
  const int64_t* rows = order_.data() + begins_[i];
  const int64_t num_rows = begins_[i + 1] - begins_[i];
  auto sum = [&](auto type) {
    using T = decltype(type);
    SumRowsOf(static_cast<const T*>(values), columns, rows, num_rows, static_cast<T*>(out));
  };
  switch (dtype) {
    case DataType::kFloat32:
      return sum(float());
    case DataType::kFloat64:
      return sum(double());
    case DataType::kFloat16:
      return sum(Float16());
    case DataType::kBfloat16:
      return sum(Bfloat16());
    default:
      return;  // the ops take floating-point types only
  }
}

}  // namespace poseidon
