// Tensors made of the rows that all ranks have given.

#ifndef POSEIDON_GATHERED_ROWS_H_
#define POSEIDON_GATHERED_ROWS_H_

#include <cstdint>
#include <vector>

#include "factors.h"

namespace poseidon {

// One part of all ranks' factors, in rank order.
using GatheredPart = std::vector<GatheredFactors::Rows>;

inline int64_t NumRows(const GatheredPart& part, size_t row_bytes) {
  size_t bytes = 0;
  for (const GatheredFactors::Rows& rows : part) bytes += rows.bytes;
  return row_bytes > 0 ? bytes / row_bytes : 0;
}

// Concatenates the rows of all ranks.
inline void CopyRows(const GatheredPart& part, void* out) {
  char* to = static_cast<char*>(out);
  for (const GatheredFactors::Rows& rows : part) {
    rows.CopyTo(to);
    to += rows.bytes;
  }
}

}  // namespace poseidon

#endif  // POSEIDON_GATHERED_ROWS_H_
