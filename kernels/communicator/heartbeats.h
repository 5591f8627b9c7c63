// Notices ranks that are gone without a word: their host is down, frozen, or cut off. Each rank tells a few others,
// again and again, that it is alive, whatever it computes meanwhile.

#ifndef POSEIDON_COMMUNICATOR_HEARTBEATS_H_
#define POSEIDON_COMMUNICATOR_HEARTBEATS_H_

#include <vector>

#include "statistics.h"

namespace poseidon {

// One rank's part. Rank r tells the ranks r + 1, r + 2, r + 4, ... (modulo the number of ranks): few messages in a
// large job, and of any set of lost ranks that is not the whole job, a rank that is left hears that one of them is
// silent.
class Heartbeats {
 public:
  // `limit_s` is the longest silence of a rank in seconds.
  Heartbeats(int rank, int size, double limit_s, Clock::time_point now);

  // Notes that something of `peer` has arrived.
  void Heard(int peer, Clock::time_point now) { heard_[peer] = now; }

  // The ranks to tell now that this one is alive.
  std::vector<int> Due(Clock::time_point now);

  // The ranks that have been silent for longer than the limit. To be called more often than once a second: time in
  // which this rank did not look, because its own host was frozen, does not count.
  std::vector<int> Silent(Clock::time_point now);

 private:
  const double limit_s_;
  std::vector<int> told_, watched_;
  std::vector<Clock::time_point> heard_;  // by rank
  Clock::time_point last_beat_, last_look_;
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_HEARTBEATS_H_
