// Who tells whom, how often, and who has been silent for too long.
//
// Tests: tests/native/heartbeats_test.cc.

#include "heartbeats.h"

#include <chrono>
#include <cstdint>

#include "exchange.h"

namespace poseidon {
namespace {

constexpr double kBeatsPerLimit = 10;                  // a late one or two are no reason to end a job
constexpr std::chrono::milliseconds kAttention{1000};  // a longer pause between two looks was a freeze

}  // namespace

Heartbeats::Heartbeats(int rank, int size, double limit_s, Clock::time_point now)
    : limit_s_(limit_s), heard_(size, now), last_beat_(now), last_look_(now) {
  for (int64_t distance = 1; distance < size; distance *= 2) {
    told_.push_back(static_cast<int>((rank + distance) % size));
    watched_.push_back(static_cast<int>((rank + size - distance) % size));
  }
}

std::vector<int> Heartbeats::Due(Clock::time_point now) {
  if (Seconds(now - last_beat_) < limit_s_ / kBeatsPerLimit) return {};
  last_beat_ = now;
  return told_;
}

std::vector<int> Heartbeats::Silent(Clock::time_point now) {
  const auto pause = now - last_look_;
  last_look_ = now;
  std::vector<int> silent;
  for (int rank : watched_) {
    if (pause > kAttention) heard_[rank] += pause;
    if (Seconds(now - heard_[rank]) > limit_s_) silent.push_back(rank);
  }
  return silent;
}

}  // namespace poseidon
