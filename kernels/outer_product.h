// The arithmetic of sufficient factors on the CPU: U^T V, and the sum of the rows of V.
//
// Every element is computed by one thread, in the order of the rows. So its bits do not depend on
// the number of threads, and with rows in rank order all ranks rebuild the same gradient.

#ifndef POSEIDON_OUTER_PRODUCT_H_
#define POSEIDON_OUTER_PRODUCT_H_

#include <cstdint>

#include "sum.h"

namespace poseidon {

// Row-major U [k, m] and V [k, n] give out [m, n].
struct OuterProduct {
  DataType dtype;      // of U and V: a floating-point type
  DataType out_dtype;  // the same, or float for half and bfloat16
  const void* u;
  const void* v;
  int64_t k, m, n;
  void* out;
};

// Computes the rows and columns of `out` in these ranges. Half and bfloat16 are multiplied and
// added in float, and rounded once.
void Compute(const OuterProduct& product, int64_t row_begin, int64_t row_end, int64_t column_begin, int64_t column_end);

// Columns from one range to the next should be a multiple of this.
inline constexpr int64_t kColumnGranularity = 64;

// Writes the sum over the k rows of V [k, n] to out [n].
void SumRows(DataType dtype, DataType out_dtype, const void* v, int64_t k, int64_t n, void* out);

// Whether products and sums are rounded together on this processor. Where they are not, bits differ.
bool HasFusedMultiplyAdd();

}  // namespace poseidon

#endif  // POSEIDON_OUTER_PRODUCT_H_
