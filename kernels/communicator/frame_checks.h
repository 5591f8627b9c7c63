// What can be wrong with a frame by itself: numbers that no rank of this job would send.

#ifndef POSEIDON_COMMUNICATOR_FRAME_CHECKS_H_
#define POSEIDON_COMMUNICATOR_FRAME_CHECKS_H_

#include <cstddef>
#include <string>
#include <vector>

#include "frame.h"
#include "options.h"
#include "routes.h"

namespace poseidon {

class FrameChecks {
 public:
  FrameChecks(int rank, const Options& options, const Routes* routes)
      : rank_(rank),
        size_(routes->workers()),
        kv_pair_bytes_(static_cast<size_t>(options.kv_pair_bytes)),
        servers_(options.servers),
        shard_servers_(options.shard_servers),
        routes_(routes) {}

  // Says what is wrong with a frame of `peer`; empty if its numbers can be relied on.
  std::string Wrong(int peer, const FrameHeader& header) const;

 private:
  std::string WrongKvPair(int peer, const FrameHeader& header) const;
  std::string WrongFactors(int peer, const FrameHeader& header) const;

  const int rank_, size_;  // of workers
  const size_t kv_pair_bytes_;
  const std::vector<int> servers_, shard_servers_;
  const Routes* const routes_;
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_FRAME_CHECKS_H_
