// Counters of what one rank has exchanged.

#ifndef POSEIDON_COMMUNICATOR_STATISTICS_H_
#define POSEIDON_COMMUNICATOR_STATISTICS_H_

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace poseidon {

class Statistics {
 public:
  void CountSent(const std::string& site, uint64_t payload_bytes);
  void CountReceived(const std::string& site, uint64_t payload_bytes);
  void CountDone(const std::string& site, double seconds);
  void CountHeader(uint64_t bytes);

  // {"sites": {name: {"count", "sent_bytes", "received_bytes", "seconds"}}, "header_bytes"}.
  // Bytes of payload only; headers are those sent by this rank.
  std::string Json() const;

 private:
  struct Site {
    uint64_t count = 0, sent_bytes = 0, received_bytes = 0;
    double seconds = 0;  // from Submit to done, summed over all exchanges
  };

  mutable std::mutex mutex_;
  std::map<std::string, Site> sites_;
  uint64_t header_bytes_ = 0;
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_STATISTICS_H_
