// Counters of what one rank has exchanged.

#ifndef POSEIDON_COMMUNICATOR_STATISTICS_H_
#define POSEIDON_COMMUNICATOR_STATISTICS_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>

#include "event_log.h"
#include "staging_statistics.h"

namespace poseidon {

// Counters of one site. The progress thread adds, any thread may read.
struct SiteStatistics {
  std::atomic<uint64_t> count{0};                                // exchanges
  std::atomic<uint64_t> sent_bytes{0}, received_bytes{0};        // payload
  std::atomic<uint64_t> network_bytes{0};                        // of what was sent, to ranks of other nodes
  std::atomic<uint64_t> nanoseconds{0};                          // from Submit to done, summed over all exchanges
  std::atomic<uint64_t> factor_bytes{0}, short_factor_bytes{0};  // of all ranks' factors, with zeros and as they travel
};

// Which rank's part of a sum, or of the factors that are exchanged together, came last.
class LastPart {
 public:
  void Arrived(int rank, Clock::time_point time) {
    if (rank != rank_) before_ = time_;
    rank_ = rank;
    time_ = time;
  }

 private:
  friend class Statistics;
  int rank_ = -1;
  Clock::time_point time_, before_;  // of that part, and of the last one of another rank
};

class Statistics {
 public:
  // The counters of a site; the reference stays valid.
  SiteStatistics& Of(const std::string& site);

  // A step's exchanges are submitted as backpropagation goes on. What comes after the last
  // submission until the last completion is not hidden behind it: the step waits. A site that is
  // submitted again begins the next step. The progress thread calls these.
  void Submitted(uint64_t site, Clock::time_point time);
  void Completed(Clock::time_point time) { last_completion_ = time; }

  // All parts are there: the one that came last is what this rank has waited for, since the one before it.
  void Waited(const LastPart& last);

  // A step has waited for its batch. A batch that was compared with that of rank 0 meanwhile was there before: then the
  // wait was for rank 0. Any thread may call these.
  void WaitedForBatch(Clock::time_point begin, Clock::time_point end);
  void Compared(Clock::time_point begin, Clock::time_point end);

  std::atomic<uint64_t> header_bytes{0}, packets{0};  // sent by this rank
  const std::shared_ptr<StagingStatistics> staging = std::make_shared<StagingStatistics>();
  EventLog events;

  // {"header_bytes", "packets", "waiting_seconds", "waited_for": [[rank, seconds], ...], "input_seconds",
  // "staging": {"pinned_bytes", "gpu_bytes", "down_bytes", "up_bytes", "across_bytes"},
  // "sites": {name: {"count", "sent_bytes", "received_bytes", "network_bytes", "seconds", "factor_bytes",
  // "short_factor_bytes"}}}
  std::string Json() const;

 private:
  std::unordered_set<uint64_t> step_;  // what the current step has submitted
  Clock::time_point last_submission_, last_completion_;
  std::atomic<uint64_t> waiting_nanoseconds_{0};  // of the steps that are over

  mutable std::mutex mutex_;  // guards what follows, not the counters of sites
  double input_seconds_ = 0;
  Clock::time_point comparison_begin_, comparison_end_;  // of the last one
  std::map<int, double> waited_for_;                     // by rank, seconds
  std::map<std::string, SiteStatistics> sites_;
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_STATISTICS_H_
