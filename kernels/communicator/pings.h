// Measures the way from this rank to another one: how long it takes to send it some bytes and to hear that it has them.
// They travel as bytes of tensors do, with the same threads, packets and bulk transfers.

#ifndef POSEIDON_COMMUNICATOR_PINGS_H_
#define POSEIDON_COMMUNICATOR_PINGS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "buffer_pool.h"
#include "frame.h"
#include "sender.h"
#include "statistics.h"
#include "transport.h"

namespace poseidon {

// Called on the progress thread: with an empty text and the time from the first byte's leaving to the answer, or with
// the reason why there is none. Must not block.
using PingDone = std::function<void(const std::string& error, double seconds)>;

class Pings {
 public:
  Pings(Transport* transport, Sender* sender) : transport_(transport), sender_(sender) {}

  // Sends `bytes` bytes, at most kMaxPingBytes, to `peer`, another rank.
  void Start(int peer, size_t bytes, PingDone done);

  // Answers a ping, once all of it is there.
  void OnPing(int peer, const FrameHeader& header);

  // Takes an answer; says what is wrong with it, empty if nothing is.
  std::string OnPong(int peer, const FrameHeader& header);

  // A rank that has not answered for `seconds`, or has said goodbye instead, by `has_left`.
  std::optional<int> FindOverdue(Clock::time_point now, double seconds) const;
  std::optional<int> FindLeftBehind(const std::vector<char>& has_left) const;

  // Ends all pings with an error.
  void Fail(const std::string& reason);

  bool is_waiting() const { return !waiting_.empty(); }

 private:
  struct Ping {
    int peer;
    Clock::time_point start;
    PingDone done;
  };

  void Answer(int peer, uint64_t number);

  Transport* const transport_;
  Sender* const sender_;
  std::map<uint64_t, Ping> waiting_;  // by number
  uint64_t next_ = 0;
  BufferPool buffers_;  // a fresh one would be measured, too
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_PINGS_H_
