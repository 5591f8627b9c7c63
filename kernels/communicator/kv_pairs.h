// How a tensor is cut into KV pairs and which server owns each: a pure function of its size, so
// that all ranks cut alike without asking each other.

#ifndef POSEIDON_COMMUNICATOR_KV_PAIRS_H_
#define POSEIDON_COMMUNICATOR_KV_PAIRS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace poseidon {

struct KvPair {
  int server;     // rank that owns it
  size_t offset;  // first byte in the tensor
  size_t bytes;
};

// The KV pairs of one tensor, in order of offset. All have the same size except the last.
class KvPairs {
 public:
  // A KV pair has at most `kv_pair_bytes`. A tensor of several KV pairs gives every server the
  // same number of them; `site` (a hash) decides where the first one goes, so that many small
  // tensors spread evenly as well.
  KvPairs(uint64_t site, size_t bytes, size_t kv_pair_bytes, const std::vector<int>& servers);

  size_t size() const { return pairs_.size(); }
  const KvPair& operator[](size_t index) const { return pairs_[index]; }
  size_t IndexOf(size_t offset) const { return offset / stride_; }

 private:
  size_t stride_;
  std::vector<KvPair> pairs_;
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_KV_PAIRS_H_
