// Counters of what one rank has exchanged.

#ifndef POSEIDON_COMMUNICATOR_STATISTICS_H_
#define POSEIDON_COMMUNICATOR_STATISTICS_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace poseidon {

// Counters of one site. The progress thread adds, any thread may read.
struct SiteStatistics {
  std::atomic<uint64_t> count{0};
  std::atomic<uint64_t> sent_bytes{0}, received_bytes{0};  // payload
  std::atomic<uint64_t> nanoseconds{0};  // from Submit to done, summed over all exchanges
};

class Statistics {
 public:
  // The counters of a site; the reference stays valid.
  SiteStatistics& Of(const std::string& site);

  std::atomic<uint64_t> header_bytes{0};  // sent by this rank

  // {"header_bytes", "sites": {name: {"count", "sent_bytes", "received_bytes", "seconds"}}}
  std::string Json() const;

 private:
  mutable std::mutex mutex_;  // guards the map, not the counters in it
  std::map<std::string, SiteStatistics> sites_;
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_STATISTICS_H_
