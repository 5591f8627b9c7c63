// Which columns or rows of a matrix each rank gets, where none gets all: a range for each server, of almost equal
// lengths. All ranks compute the same.

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

// The parts of a row-major matrix whose columns or rows are divided: of each of `lines` of elements that follow each
// other, all of the same length, a rank has a range.
struct MatrixParts {
  int64_t lines;
  std::vector<ColumnRange> ranges;  // by rank, of the elements of a line
};

// Those of a matrix of `rows` and `columns` whose dimension `divided` is divided as DivideColumns does; rows, dimension
// 0, lie together as one line.
inline MatrixParts DivideMatrix(int64_t rows, int64_t columns, int divided, int size, const std::vector<int>& servers) {
  if (divided == 1) return {rows, DivideColumns(columns, size, servers)};
  MatrixParts parts = {1, DivideColumns(rows, size, servers)};
  for (ColumnRange& range : parts.ranges) range = {range.begin * columns, range.end * columns};
  return parts;
}

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_COLUMNS_H_
