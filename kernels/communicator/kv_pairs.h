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

struct KvPair {
  int server;     // rank that owns it
  size_t offset;  // first byte in the tensor
  size_t bytes;
};

// The KV pairs of one tensor, in order of offset. Their sizes differ by less than 128 bytes; the first is
// the largest.
class KvPairs {
 public:
  // A KV pair has at most `kv_pair_bytes`, which must be kLeastKvPairBytes or more. If there are more KV pairs than
  // servers, all servers get the same number; if fewer, each goes to another server. `site` (a hash) chooses the server
  // of the first one, so that many small tensors spread evenly too. `servers` must outlive the KV pairs.
  KvPairs(uint64_t site, size_t bytes, size_t kv_pair_bytes, const std::vector<int>& servers);

  size_t size() const { return size_; }
  KvPair operator[](size_t index) const;

  // The index of the KV pair that holds the byte at `offset`.
  size_t IndexOf(size_t offset) const;

 private:
  // Pairs consist of whole blocks, the tensor's last one perhaps cut off; `longer_` pairs have one block more.
  size_t Offset(size_t index) const;

  size_t bytes_;
  size_t size_;        // pairs
  size_t blocks_ = 0;  // of a pair
  size_t longer_ = 0;
  size_t first_server_;  // index in servers_
  const std::vector<int>* servers_;
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_KV_PAIRS_H_
