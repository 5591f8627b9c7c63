// Pieces of host memory that a GPU copies from and to: cut from blocks, since allocating such memory takes as long as
// many copies.

#ifndef POSEIDON_COMMUNICATOR_PINNED_MEMORY_H_
#define POSEIDON_COMMUNICATOR_PINNED_MEMORY_H_

#include <cstddef>
#include <memory>

#include "device.h"
#include "staging_statistics.h"

namespace poseidon {

// Given back with its last owner, on any thread.
using PinnedPiece = std::shared_ptr<char[]>;

class PinnedMemory {
 public:
  // Blocks have `block_bytes` bytes, or those of a larger piece. `limit`, which a block does not exceed, limits the
  // bytes of all; 0 for no limit. They are counted in `statistics`.
  PinnedMemory(Device* device, size_t block_bytes, size_t limit, std::shared_ptr<StagingStatistics> statistics);

  // Returns a piece, aligned to cache lines; null if the limit leaves no room for it now, or there is no more memory. A
  // piece that a block can hold finds room when no other is in use.
  PinnedPiece TryTake(size_t bytes);

  // Whether there is no block, since none could be allocated, or none was wanted.
  bool is_empty() const;

 private:
  class Blocks;
  const std::shared_ptr<Blocks> blocks_;  // shared with the pieces
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_PINNED_MEMORY_H_
