// What happened when on one rank, kept while somebody records it.

#ifndef POSEIDON_COMMUNICATOR_EVENT_LOG_H_
#define POSEIDON_COMMUNICATOR_EVENT_LOG_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace poseidon {

using Clock = std::chrono::steady_clock;

// Something of one site that took from `begin` to `end`.
struct Event {
  // A literal: of what a step exchanges once "ps", "sfb", "hfb", "sparse", "gather", "broadcast", "scatter", "shards"
  // or "return"; of other exchanges "calls"; "rebuild"; a copy of a piece from a GPU "down", or "up" to it, or what
  // happens between GPUs, "across"; "data" of a step that waits for its batch, which has no site; "turn" of one that
  // waits for its accelerator.
  const char* row;
  Clock::time_point begin, end;
  size_t bytes;      // of an exchange: this rank's tensor or factors; of a copy
  bool is_blocking;  // whether the step did nothing else meanwhile
};

// Any thread may call these. While nothing is recorded, Add costs one load.
class EventLog {
 public:
  // Forgets what was recorded, and records at most `capacity` events that begin from now on; 0 stops,
  // and keeps what is there.
  void Record(size_t capacity);

  bool is_recording() const { return is_recording_.load(std::memory_order_relaxed); }

  void Add(const std::string& site, const Event& event) {
    if (is_recording()) Keep(site, event);
  }

  // {"begin": nanoseconds, "dropped": events that came when the log was full,
  //  "events": [[row, site, begin, end, bytes, is_blocking], …]}
  std::string Json() const;

 private:
  void Keep(const std::string& site, const Event& event);

  std::atomic<bool> is_recording_{false};
  mutable std::mutex mutex_;  // guards what follows
  size_t capacity_ = 0;
  uint64_t dropped_ = 0;
  Clock::time_point begin_;
  std::set<std::string> sites_;  // each name once, however many steps there are
  struct Kept {
    const std::string* site;
    Event event;
  };
  std::vector<Kept> events_;
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_EVENT_LOG_H_
