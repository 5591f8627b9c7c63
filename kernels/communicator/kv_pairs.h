// How a tensor is cut into KV pairs (the key: name, step and offset; the value: its bytes) and which server owns each:
// a pure function of its size, so that all ranks cut alike without asking each other.

#ifndef POSEIDON_COMMUNICATOR_KV_PAIRS_H_
#define POSEIDON_COMMUNICATOR_KV_PAIRS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace poseidon {

// The smallest kv_pair_bytes: it leaves enough blocks of 64 bytes for all servers.
inline constexpr int64_t kLeastKvPairBytes = 4096;

// How many of the places in which servers take KV pairs, one after the other, belong to each of them.
struct Places {
  int64_t dedicated;  // to each dedicated server
  int64_t worker;     // to each worker that serves
};

// The places by which the busiest link is least busy, up to a few per cent: `nodes` have workers, `serving_nodes` of
// them have the `serving` workers that serve, and there are `dedicated` servers, one or more.
Places PlacesOf(int nodes, int serving_nodes, int serving, int dedicated);

struct KvPair {
  int server;     // rank that owns it
  size_t offset;  // first byte in the tensor
  size_t bytes;
};

// How a tensor is divided into shards: a *shard* is the elements that one rank owns, its KV pairs one after the other.
// Every element counts as four bytes, whatever its type, so all tensors of one variable are divided alike.
struct ShardLayout {
  uint32_t first = 0;  // a hash, which chooses the server of the first KV pair, if there is no owner
  int owner = -1;      // the rank that owns all elements; -1: all servers
};

// The KV pairs of one tensor, in order of offset. Their sizes differ by less than 128 bytes; the first is
// the largest.
class KvPairs {
 public:
  // A KV pair has at most `kv_pair_bytes`, which must be kLeastKvPairBytes or more. If there are more KV pairs than
  // servers, all servers get the same number; if fewer, each goes to another server. `site` (a hash) chooses the server
  // of the first one, so that many small tensors spread evenly too. `servers` are those of WithServers: a rank that is
  // there twice counts as two. They must outlive the KV pairs.
  KvPairs(uint64_t site, size_t bytes, size_t kv_pair_bytes, const std::vector<int>& servers);

  // Those of which shards consist, of `count` elements of `element_bytes`. They have at most as many elements as floats
  // have room in `kv_pair_bytes`.
  KvPairs(const ShardLayout& layout, size_t count, size_t element_bytes, size_t kv_pair_bytes,
          const std::vector<int>& servers);

  size_t size() const { return size_; }
  KvPair operator[](size_t index) const;

  // The index of the KV pair that holds the byte at `offset`.
  size_t IndexOf(size_t offset) const;

  // By KV pair: where it begins in the shard of its server, in bytes.
  std::vector<size_t> PlacesInShards() const;

 private:
  KvPairs(uint64_t site, size_t bytes, size_t kv_pair_bytes, const std::vector<int>& servers, int owner);

  // Pairs consist of whole blocks, the tensor's last one perhaps cut off; `longer_` pairs have one block more.
  size_t Offset(size_t index) const;

  size_t bytes_;
  size_t block_bytes_;
  size_t size_;        // pairs
  size_t blocks_ = 0;  // of a pair
  size_t longer_ = 0;
  size_t first_server_;  // index in servers_
  const std::vector<int>* servers_;
  int owner_;  // of all, -1: see servers_
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_KV_PAIRS_H_
