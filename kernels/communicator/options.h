// What a job decides once, alike on all ranks: how tensors are cut, who owns the KV pairs, and which ranks combine.

#ifndef POSEIDON_COMMUNICATOR_OPTIONS_H_
#define POSEIDON_COMMUNICATOR_OPTIONS_H_

#include <cstdint>
#include <vector>

#include "transport.h"

namespace poseidon {

struct Options {
  int64_t kv_pair_bytes = int64_t{2} << 20;  // the largest KV pair
  std::vector<int> servers;                  // ranks that own KV pairs; empty: all ranks
  std::vector<int> shard_servers;            // those of them that own shards: workers, who update these
  int dedicated_servers = 0;                 // that many ranks, the last ones, only serve: they are no workers
  // At most how many ranks of one node combine. 0: all that share a node, as far as the transport knows.
  int ranks_per_node = 0;
  // The memory of the host for pieces of a GPU's tensors that leave; 0 for a default.
  int64_t staging_bytes = 0;
  double timeout_s = 600;  // longest wait for another rank's part of an exchange
  // Longest silence of another rank. After a link was down for 5 s, TCP may wait for another 5 s until it sends again:
  // it doubles its pauses. That must not end a job.
  double heartbeat_timeout_s = 12;
};

// `options` with its servers, all ranks where it names none, in the order in which they take KV pairs. Each has the
// same number of places; where there are dedicated servers, these have more, so that the busiest link is least busy.
// If no worker serves, all of them own shards.
Options WithServers(Options options, const std::vector<int>& nodes);

// A number for each rank, the same for ranks that combine: those of one node, or as many of them as the options say.
// If the transport knows no nodes, all ranks share one, but combine only if the options say so. A dedicated server is a
// node of its own, for it contributes nothing.
std::vector<int> NodesOf(const Options& options, const Transport& transport);

// A digest of everything that decides how bytes are cut and routed.
uint64_t LayoutDigest(const Options& options, const std::vector<int>& nodes);

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_OPTIONS_H_
