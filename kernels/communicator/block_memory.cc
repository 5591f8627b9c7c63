// First fit in blocks that are never given back before the job ends.
//
// Tests: tests/native/staging_test.cc.

#include "block_memory.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace poseidon {

class BlockMemory::Blocks {
 public:
  Blocks(Allocate allocate, Free free, size_t block_bytes, size_t limit, Counter counter)
      : allocate_(std::move(allocate)),
        free_(std::move(free)),
        block_bytes_(block_bytes),
        limit_(limit),
        counter_(std::move(counter)) {}

  ~Blocks() {
    for (const Block& block : blocks_) free_(block.data);
    *counter_ -= bytes_;
  }

  // Returns (memory, its block), null if there is no room.
  std::pair<char*, size_t> TryTake(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < blocks_.size(); ++i) {
      if (char* memory = Cut(&blocks_[i], bytes)) return {memory, i};
    }
    const size_t wanted = std::max(bytes, block_bytes_);
    if (limit_ > 0 && bytes_ + wanted > limit_) return {nullptr, 0};
    auto* const data = static_cast<char*>(allocate_(wanted));
    if (!data) return {nullptr, 0};
    blocks_.push_back({data, {{0, wanted}}});
    bytes_ += wanted;
    *counter_ += wanted;
    return {Cut(&blocks_.back(), bytes), blocks_.size() - 1};
  }

  bool is_empty() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return blocks_.empty();
  }

  void Give(size_t block, const char* memory, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::map<size_t, size_t>& free = blocks_[block].free;
    auto added = free.emplace(memory - blocks_[block].data, bytes).first;
    if (auto next = std::next(added); next != free.end() && added->first + added->second == next->first) {
      added->second += next->second;
      free.erase(next);
    }
    if (added == free.begin()) return;
    if (auto before = std::prev(added); before->first + before->second == added->first) {
      before->second += added->second;
      free.erase(added);
    }
  }

 private:
  struct Block {
    char* data;
    std::map<size_t, size_t> free;  // bytes, by offset; no two are neighbours
  };

  static char* Cut(Block* block, size_t bytes) {
    for (auto found = block->free.begin(); found != block->free.end(); ++found) {
      const auto [offset, free] = *found;
      if (free < bytes) continue;
      block->free.erase(found);
      if (free > bytes) block->free.emplace(offset + bytes, free - bytes);
      return block->data + offset;
    }
    return nullptr;
  }

  const Allocate allocate_;
  const Free free_;
  const size_t block_bytes_, limit_;
  const Counter counter_;
  mutable std::mutex mutex_;  // guards what follows
  std::vector<Block> blocks_;
  size_t bytes_ = 0;
};

BlockMemory::BlockMemory(Allocate allocate, Free free, size_t block_bytes, size_t limit, Counter bytes)
    : blocks_(std::make_shared<Blocks>(std::move(allocate), std::move(free), block_bytes, limit, std::move(bytes))) {}

BlockMemory BlockMemory::Pinned(Device* device, size_t block_bytes, size_t limit, Counter bytes) {
  return {[device](size_t size) { return device->AllocateHost(size); },
          [device](void* data) { device->FreeHost(data); }, block_bytes, limit, std::move(bytes)};
}

BlockMemory BlockMemory::OfGpu(Device* device, size_t block_bytes, size_t limit, Counter bytes) {
  return {[device](size_t size) { return device->Allocate(size); }, [device](void* data) { device->Free(data); },
          block_bytes, limit, std::move(bytes)};
}

bool BlockMemory::is_empty() const { return blocks_->is_empty(); }

PinnedMemory BlockMemory::TryTake(size_t bytes) {
  constexpr size_t kLine = 64;
  bytes = (std::max<size_t>(bytes, 1) + kLine - 1) / kLine * kLine;
  const auto [memory, block] = blocks_->TryTake(bytes);
  if (!memory) return nullptr;
  return PinnedMemory(memory,
                      [blocks = blocks_, block = block, bytes](const char* data) { blocks->Give(block, data, bytes); });
}

}  // namespace poseidon
