// Cuts tensors into KV pairs and spreads these over the servers.

#include "kv_pairs.h"

#include <algorithm>

namespace poseidon {
namespace {

// Cutting finer than this costs more in messages than it gains in balance.
constexpr size_t kMinKvPairBytes = size_t{32} << 10;

// Keeps every KV pair aligned for all element types and for cache lines.
constexpr size_t kAlignment = 64;

size_t CeilDiv(size_t a, size_t b) { return (a + b - 1) / b; }

}  // namespace

KvPairs::KvPairs(uint64_t site, size_t bytes, size_t kv_pair_bytes,
                 const std::vector<int>& servers) {
  const size_t num_servers = servers.size();
  size_t parts = CeilDiv(bytes, kv_pair_bytes);
  parts = std::max(parts, std::min(num_servers, CeilDiv(bytes, kMinKvPairBytes)));
  if (parts > num_servers) parts = CeilDiv(parts, num_servers) * num_servers;
  stride_ = CeilDiv(CeilDiv(bytes, std::max<size_t>(parts, 1)), kAlignment) * kAlignment;
  for (size_t offset = 0; offset < bytes; offset += stride_) {
    const int server = servers[(site + pairs_.size()) % num_servers];
    pairs_.push_back({server, offset, std::min(stride_, bytes - offset)});
  }
}

}  // namespace poseidon
