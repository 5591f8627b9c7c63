// Memory that is slow to allocate, cut from blocks: pinned memory of the host, and a GPU's.

#ifndef POSEIDON_COMMUNICATOR_BLOCK_MEMORY_H_
#define POSEIDON_COMMUNICATOR_BLOCK_MEMORY_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "device.h"

namespace poseidon {

// Given back with its last owner, on any thread.
using PinnedMemory = std::shared_ptr<char[]>;
using GpuMemory = std::shared_ptr<char[]>;  // which the host must not read

class BlockMemory {
 public:
  using Allocate = std::function<void*(size_t bytes)>;  // null if there is no more memory
  using Free = std::function<void(void*)>;
  using Counter = std::shared_ptr<std::atomic<uint64_t>>;

  // Blocks have `block_bytes` bytes, or as many as are taken at once. `limit`, which a block does not exceed, limits
  // the bytes of all; 0 for no limit. They are counted in `bytes`.
  BlockMemory(Allocate allocate, Free free, size_t block_bytes, size_t limit, Counter bytes);

  // Pinned memory of the host, and memory of the GPU.
  static BlockMemory Pinned(Device* device, size_t block_bytes, size_t limit, Counter bytes);
  static BlockMemory OfGpu(Device* device, size_t block_bytes, size_t limit, Counter bytes);

  // Returns memory, aligned to cache lines; null if the limit leaves no room for it now, or there is no more. What a
  // block can hold finds room when nothing else is in use.
  PinnedMemory TryTake(size_t bytes);

  // Whether there is no block, since none could be allocated, or none was wanted.
  bool is_empty() const;

 private:
  class Blocks;
  const std::shared_ptr<Blocks> blocks_;  // shared with those who have memory
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_BLOCK_MEMORY_H_
