// How a loop is divided among TensorFlow's threads, for all releases of TensorFlow.

#ifndef POSEIDON_SHARDING_H_
#define POSEIDON_SHARDING_H_

#include <cstdint>
#include <optional>

#include "tensorflow/core/lib/core/threadpool.h"

namespace poseidon {

using tensorflow::thread::ThreadPool;

// From TensorFlow 2.20 on there are functions for these parameters, and the constructor is deprecated: the first of two
// is taken where it compiles.
template <typename Params>
auto InBlocks(int64_t block_size, int) -> decltype(Params::Fixed(block_size)) {
  return Params::Fixed(block_size);
}
template <typename Params>
Params InBlocks(int64_t block_size, long) {
  return Params(ThreadPool::SchedulingStrategy::kFixedBlockSize, std::nullopt, block_size);
}
template <typename Params>
auto ByCost(int64_t cost, int) -> decltype(Params::Adaptive(cost)) {
  return Params::Adaptive(cost);
}
template <typename Params>
Params ByCost(int64_t cost, long) {
  return Params(ThreadPool::SchedulingStrategy::kAdaptive, cost, std::nullopt);
}

// Calls run(begin, end) for parts of 0 to `count`: each of `block_size`, or as large as pays at this cost of a unit.
template <typename Run>
void ForBlocks(ThreadPool* threads, int64_t count, int64_t block_size, const Run& run) {
  threads->ParallelFor(count, InBlocks<ThreadPool::SchedulingParams>(block_size, 0), run);
}
template <typename Run>
void ForParts(ThreadPool* threads, int64_t count, int64_t cost, const Run& run) {
  threads->ParallelFor(count, ByCost<ThreadPool::SchedulingParams>(cost, 0), run);
}

}  // namespace poseidon

#endif  // POSEIDON_SHARDING_H_
