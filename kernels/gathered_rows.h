// Tensors made of the rows that all ranks have given.

#ifndef POSEIDON_GATHERED_ROWS_H_
#define POSEIDON_GATHERED_ROWS_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "device.h"
#include "gather_exchanges.h"

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

// The same to a GPU's memory, in its `stream`; `owner` holds the rows until that has copied them.
inline void CopyRowsToGpu(const GatheredPart& part, Device* device, Device::Stream stream, std::shared_ptr<void> owner,
                          void* out) {
  char* to = static_cast<char*>(out);
  for (const GatheredFactors::Rows& rows : part) {
    if (rows.bytes == 0) continue;
    if (rows.element_bytes > 0) {  // of a rank that has left out its zeros
      std::shared_ptr<char[]> whole(new char[rows.bytes]);
      rows.CopyTo(whole.get());
      device->Copy(stream, to, whole.get(), rows.bytes);
      device->KeepUntilDone(stream, std::move(whole));
    } else {
      device->Copy(stream, to, rows.data, rows.bytes);
    }
    to += rows.bytes;
  }
  device->KeepUntilDone(stream, std::move(owner));
}

}  // namespace poseidon

#endif  // POSEIDON_GATHERED_ROWS_H_
