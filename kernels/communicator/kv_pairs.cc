// Cuts tensors into KV pairs and spreads these over the servers. evaluation/simulation/transfers.py cuts alike:
// tests/native/kv_pairs.csv holds both to that.
//
// Tests: tests/native/kv_pairs_test.cc.

#include "kv_pairs.h"

#include <algorithm>

namespace poseidon {
namespace {

// Cutting finer than this costs more in messages than it gains in balance.
constexpr size_t kMinKvPairBytes = size_t{16} << 10;

// Bytes that are never divided, so that every KV pair is aligned for all element types and for cache lines.
constexpr size_t kBlock = 64;

size_t CeilDiv(size_t a, size_t b) { return a / b + (a % b != 0); }

}  // namespace

KvPairs::KvPairs(uint64_t site, size_t bytes, size_t kv_pair_bytes, const std::vector<int>& servers)
    : bytes_(bytes), first_server_(site % servers.size()), servers_(&servers) {
  const size_t num_servers = servers.size(), blocks = CeilDiv(bytes, kBlock);
  size_ = CeilDiv(blocks, kv_pair_bytes / kBlock);
  size_ = std::max(size_, std::min(num_servers, CeilDiv(bytes, kMinKvPairBytes)));
  if (size_ > num_servers) size_ = CeilDiv(size_, num_servers) * num_servers;
  if (size_ == 0) return;
  blocks_ = blocks / size_;
  longer_ = blocks % size_;
}

KvPair KvPairs::operator[](size_t index) const {
  const size_t offset = Offset(index), end = std::min(Offset(index + 1), bytes_);
  return {(*servers_)[(first_server_ + index) % servers_->size()], offset, end - offset};
}

size_t KvPairs::IndexOf(size_t offset) const {
  const size_t block = offset / kBlock, of_longer = longer_ * (blocks_ + 1);
  return block < of_longer ? block / (blocks_ + 1) : longer_ + (block - of_longer) / blocks_;
}

size_t KvPairs::Offset(size_t index) const { return (index * blocks_ + std::min(index, longer_)) * kBlock; }

}  // namespace poseidon
