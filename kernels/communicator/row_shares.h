// Which rows of a global batch are a rank's, given how the ranks share batches.

#ifndef POSEIDON_COMMUNICATOR_ROW_SHARES_H_
#define POSEIDON_COMMUNICATOR_ROW_SHARES_H_

#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace poseidon {

// Some successive rows of a global batch.
struct RowRange {
  int64_t first = 0;
  int64_t count = 0;
};

// The shares of a job's ranks. They are the same on all ranks whenever a step runs.
class RowShares {
 public:
  // Sets the shares, positive numbers by rank; by default all are equal.
  void Set(std::vector<int64_t> shares) {
    std::lock_guard<std::mutex> lock(mutex_);
    shares_ = std::move(shares);
  }

  // Returns the rows of a rank among `ranks`, of a batch of `total` rows.
  RowRange Of(int64_t total, int rank, int ranks) const {
    const std::vector<int64_t> counts = Counts(total, ranks);
    RowRange range;
    for (int i = 0; i < rank; ++i) range.first += counts[i];
    range.count = counts[rank];
    return range;
  }

 private:
  // As counts in tf_poseidon/data/parts.py, which says why.
  std::vector<int64_t> Counts(int64_t total, int ranks) const {
    std::vector<int64_t> shares(ranks, 1);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!shares_.empty()) shares = shares_;
    }
    __extension__ using Wide = __int128;
    Wide all = 0;
    for (int64_t share : shares) all += share;
    std::vector<int64_t> counts;
    int64_t left = total;
    for (int64_t share : shares) {
      counts.push_back(static_cast<int64_t>(Wide(total) * share / all));
      left -= counts.back();
    }
    for (; left > 0; --left) {  // fewer than there are ranks
      int most = 0;
      for (int i = 1; i < ranks; ++i) {
        if (Wide(shares[i]) * (counts[most] + 1) > Wide(shares[most]) * (counts[i] + 1)) most = i;
      }
      ++counts[most];
    }
    return counts;
  }

  mutable std::mutex mutex_;
  std::vector<int64_t> shares_;  // empty if all are equal
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_ROW_SHARES_H_
