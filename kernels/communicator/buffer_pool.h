// Blocks of memory that are kept for the next step: fresh ones cost a page fault per 4 KiB.

#ifndef POSEIDON_COMMUNICATOR_BUFFER_POOL_H_
#define POSEIDON_COMMUNICATOR_BUFFER_POOL_H_

#include <cstddef>
#include <map>
#include <memory>
#include <new>
#include <utility>

namespace poseidon {

class BufferPool {
 public:
  struct Free {
    void operator()(char* data) const { ::operator delete[](data, kAlignment); }
  };
  struct Buffer {
    std::unique_ptr<char[], Free> data;
    size_t capacity = 0;
  };

  // Returns a block of at least `bytes` bytes, aligned to cache lines.
  Buffer Take(size_t bytes) {
    auto found = free_.lower_bound(bytes);
    if (found != free_.end() && found->first <= 2 * bytes) {
      Buffer buffer = std::move(found->second);
      free_.erase(found);
      return buffer;
    }
    return {std::unique_ptr<char[], Free>(new (kAlignment) char[bytes]), bytes};
  }

  void Give(Buffer buffer) {
    if (buffer.capacity > 0) free_.emplace(buffer.capacity, std::move(buffer));
  }

 private:
  static constexpr std::align_val_t kAlignment{64};

  std::multimap<size_t, Buffer> free_;  // by capacity
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_BUFFER_POOL_H_
