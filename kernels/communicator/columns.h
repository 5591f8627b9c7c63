// Which columns of a matrix each rank gets, where none gets all: a range for each server, of almost equal lengths. All
// ranks compute the same.

#ifndef POSEIDON_COMMUNICATOR_COLUMNS_H_
#define POSEIDON_COMMUNICATOR_COLUMNS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace poseidon {

struct ColumnRange {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
};

// Ranges begin at multiples of this: with floats, where a line of a processor's cache does.
inline constexpr int64_t kColumnsTogether = 16;

// The ranges of `size` ranks, by rank; those of ranks that are no servers are empty, and of some servers if there are
// fewer blocks of columns than servers.
inline std::vector<ColumnRange> DivideColumns(int64_t columns, int size, const std::vector<int>& servers) {
  std::vector<ColumnRange> ranges(size);
  const int64_t blocks = (columns + kColumnsTogether - 1) / kColumnsTogether;
  const auto count = static_cast<int64_t>(servers.size());
  for (int64_t i = 0; i < count; ++i) {
    ranges[servers[i]] = {std::min(columns, blocks * i / count * kColumnsTogether),
                          std::min(columns, blocks * (i + 1) / count * kColumnsTogether)};
  }
  return ranges;
}

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_COLUMNS_H_
