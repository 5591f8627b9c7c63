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
#include <vector>

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

// When each rank's part of a sum came, or of the factors that are exchanged together.
class PartTimes {
 public:
  void Arrived(int rank, Clock::time_point time) {
    if (rank >= static_cast<int>(times_.size())) times_.resize(rank + 1);
    times_[rank] = time;
  }

 private:
  friend class Statistics;
  std::vector<Clock::time_point> times_;  // by rank; of others, the time of no clock
};

class Statistics {
 public:
  // The counters of a site; the reference stays valid.
  SiteStatistics& Of(const std::string& site);

  // A step's exchanges are submitted as backpropagation goes on. What comes after the last
  // submission until the last completion is not hidden behind it: the step waits. A site that is
  // submitted again begins the next step; so does what Python submits between steps (not `is_of_step`), which counts
  // as a step of its own. The progress thread calls these.
  void Submitted(uint64_t site, Clock::time_point time, bool is_of_step = true);
  void Completed(Clock::time_point time) { last_completion_ = time; }

  // An exchange of a site is complete, as the event says.
  void Exchanged(const std::string& site, const Event& event);

  // All parts are there: the one that came last is what this rank has waited for, since the one before it. Those that
  // came after the median are late.
  void Waited(const PartTimes& parts);

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
  // "short_factor_bytes"}}, "late_seconds": by rank}; without `has_sites` there are no sites.
  std::string Json(bool has_sites = true) const;

 private:
  void EndStep();

  std::unordered_set<uint64_t> step_;  // what the current step has submitted
  bool is_of_step_ = true;             // what was submitted last
  std::vector<double> latest_;         // by rank, how late its latest part of the current step was, seconds
  Clock::time_point last_submission_, last_completion_;
  std::atomic<uint64_t> waiting_nanoseconds_{0};  // of the steps that are over

  mutable std::mutex mutex_;  // guards what follows, not the counters of sites
  double input_seconds_ = 0;
  Clock::time_point comparison_begin_, comparison_end_;  // of the last one
  std::map<int, double> waited_for_;                     // by rank, seconds
  std::vector<double> late_;                             // by rank, the sum of `latest_` of the steps that are over
  std::map<std::string, SiteStatistics> sites_;
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_STATISTICS_H_
