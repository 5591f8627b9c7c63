// Counters of what a rank copies between its GPU and the host, and between GPUs.

#ifndef POSEIDON_COMMUNICATOR_STAGING_STATISTICS_H_
#define POSEIDON_COMMUNICATOR_STAGING_STATISTICS_H_

#include <atomic>
#include <cstdint>

namespace poseidon {

// Any thread may read them.
struct StagingStatistics {
  std::atomic<uint64_t> pinned_bytes{0}, gpu_bytes{0};  // memory of the host and of the GPU that is allocated
  std::atomic<uint64_t> down_bytes{0}, up_bytes{0};     // copied so far, without factors in the framework's stream
  std::atomic<uint64_t> across_bytes{0};                // copied so far from other ranks' GPUs
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_STAGING_STATISTICS_H_
