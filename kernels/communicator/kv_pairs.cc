// Cuts tensors into KV pairs and spreads these over the servers. evaluation/simulation/transfers.py cuts alike:
// tests/native/kv_pairs.csv holds both to that.
//
// Tests: tests/native/kv_pairs_test.cc.

#include "kv_pairs.h"

#include <algorithm>
#include <cstdlib>
#include <map>

namespace poseidon {
namespace {

// Cutting finer than this costs more in messages than it gains in balance.
constexpr size_t kMinKvPairBytes = size_t{16} << 10;

// Bytes that are never divided, so that every KV pair is aligned for all element types and for cache lines.
constexpr size_t kBlock = 64;

// Bytes of an element of any type, where shards are cut.
constexpr size_t kCountedBytes = 4;

size_t CeilDiv(size_t a, size_t b) { return a / b + (a % b != 0); }

// More places of a worker would cut tensors finer, without much better balance.
constexpr int64_t kMostPlaces = 4;

}  // namespace

// Of n nodes m serve, and k dedicated servers own the share x of all bytes. A serving node sends x + (1 - x)(m + n - 2)
// / m of them, a dedicated server x n / k. Both are equal where a dedicated server owns (m + n - 2) / (n - k) times as
// much as a serving node. But connections share a link evenly, and one between nodes that serve carries parts and
// results, so with more than twice as much those of dedicated servers are still busy when others have nothing left.
// And their results can only follow the parts, which an eighth less makes up for. Dedicated servers own all where the
// busiest link is less busy then, or no worker serves, and nothing where one node alone has workers that serve.
Places PlacesOf(int nodes, int serving_nodes, int serving, int dedicated) {
  if (serving > 0 && nodes == 1) return {0, 1};
  if (serving == 0 || dedicated >= nodes) return {1, 0};
  const int64_t others = serving_nodes + nodes - 2;
  // A dedicated server owns `own` / `of` times as much as a serving node.
  const int64_t own = 7 * std::min(int64_t{2} * (nodes - dedicated), others), of = int64_t{8} * (nodes - dedicated);
  if (nodes * (of * serving_nodes + own * dedicated) <= dedicated * (own * dedicated + of * others)) return {1, 0};
  const int64_t more = own * serving, less = of * serving_nodes;
  Places places = {};
  do {
    ++places.worker;
    places.dedicated = (2 * more * places.worker + less) / (2 * less);
  } while (places.worker < kMostPlaces &&
           std::abs(places.dedicated * less - more * places.worker) * 32 > more * places.worker);
  return places;
}

KvPairs::KvPairs(uint64_t site, size_t bytes, size_t kv_pair_bytes, const std::vector<int>& servers)
    : KvPairs(site, bytes, kv_pair_bytes, servers, /*owner=*/-1) {}

KvPairs::KvPairs(const ShardLayout& layout, size_t count, size_t element_bytes, size_t kv_pair_bytes,
                 const std::vector<int>& servers)
    : KvPairs(layout.first, count * kCountedBytes, kv_pair_bytes, servers, layout.owner) {
  bytes_ = count * element_bytes;
  block_bytes_ = kBlock / kCountedBytes * element_bytes;
}

KvPairs::KvPairs(uint64_t site, size_t bytes, size_t kv_pair_bytes, const std::vector<int>& servers, int owner)
    : bytes_(bytes), block_bytes_(kBlock), first_server_(site % servers.size()), servers_(&servers), owner_(owner) {
  const size_t num_servers = owner < 0 ? servers.size() : 1, blocks = CeilDiv(bytes, kBlock);
  size_ = CeilDiv(blocks, kv_pair_bytes / kBlock);
  size_ = std::max(size_, std::min(num_servers, CeilDiv(bytes, kMinKvPairBytes)));
  if (size_ > num_servers) size_ = CeilDiv(size_, num_servers) * num_servers;
  if (size_ == 0) return;
  blocks_ = blocks / size_;
  longer_ = blocks % size_;
}

KvPair KvPairs::operator[](size_t index) const {
  const size_t offset = Offset(index), end = std::min(Offset(index + 1), bytes_);
  const int server = owner_ < 0 ? (*servers_)[(first_server_ + index) % servers_->size()] : owner_;
  return {server, offset, end - offset};
}

size_t KvPairs::IndexOf(size_t offset) const {
  const size_t block = offset / block_bytes_, of_longer = longer_ * (blocks_ + 1);
  return block < of_longer ? block / (blocks_ + 1) : longer_ + (block - of_longer) / blocks_;
}

std::vector<size_t> KvPairs::PlacesInShards() const {
  std::vector<size_t> places;
  std::map<int, size_t> ends;  // by server
  for (size_t i = 0; i < size_; ++i) {
    const KvPair pair = (*this)[i];
    size_t& end = ends[pair.server];
    places.push_back(end);
    end += pair.bytes;
  }
  return places;
}

size_t KvPairs::Offset(size_t index) const { return (index * blocks_ + std::min(index, longer_)) * block_bytes_; }

}  // namespace poseidon
