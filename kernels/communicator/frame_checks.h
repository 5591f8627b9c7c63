// What can be wrong with a frame by itself: numbers that no rank of this job would send.

#ifndef POSEIDON_COMMUNICATOR_FRAME_CHECKS_H_
#define POSEIDON_COMMUNICATOR_FRAME_CHECKS_H_

#include <cstddef>
#include <string>
#include <vector>

#include "frame.h"
#include "routes.h"

namespace poseidon {

class FrameChecks {
 public:
  FrameChecks(int rank, int size, size_t kv_pair_bytes, const std::vector<int>& servers, const Routes* routes)
      : rank_(rank), size_(size), kv_pair_bytes_(kv_pair_bytes), servers_(servers), routes_(routes) {}

  // Says what is wrong with a frame of `peer`; empty if its numbers can be relied on.
  std::string Wrong(int peer, const FrameHeader& header) const;

 private:
  std::string WrongKvPair(int peer, const FrameHeader& header) const;
  std::string WrongFactors(int peer, const FrameHeader& header) const;

  const int rank_, size_;
  const size_t kv_pair_bytes_;
  const std::vector<int> servers_;
  const Routes* const routes_;
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_FRAME_CHECKS_H_
