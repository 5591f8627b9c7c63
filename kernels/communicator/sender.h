// Sends frames: stamps them, keeps small payloads in the packet, and starts bulk transfers, the most urgent first and a
// limited number of bytes at a time. Those that have started overtake each other in the transport, if it can.

#ifndef POSEIDON_COMMUNICATOR_SENDER_H_
#define POSEIDON_COMMUNICATOR_SENDER_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "packets.h"
#include "statistics.h"
#include "transport.h"

namespace poseidon {

class Sender {
 public:
  // `kv_pair_bytes` limits the bytes of bulk transfers in flight to one peer, see `MayStart`.
  Sender(Transport* transport, uint64_t layout, size_t kv_pair_bytes, Statistics* statistics)
      : transport_(transport),
        layout_(layout),
        kv_pair_bytes_(kv_pair_bytes),
        statistics_(statistics),
        packets_(transport, statistics),
        next_tag_(transport->size()),
        in_flight_(transport->size()),
        waiting_(transport->size()) {}

  // From now on, bulk transfers of `site`, a hash, go before those with a larger number. It is 0 until it is set, and
  // changes nothing that has been sent.
  void SetPriority(uint64_t site, int priority) { priorities_[site] = priority; }

  // Sends the `header.length` bytes at `data`. Returns whether they travel as a bulk transfer:
  // then `data` must stay unchanged until `left` is called.
  bool Send(int peer, FrameHeader header, const void* data, Transport::Completion left) {
    header.layout = layout_;
    if (header.is_bulk()) {
      const auto found = priorities_.find(header.site);
      const int priority = found == priorities_.end() ? 0 : found->second;
      waiting_[peer].emplace(Place{priority, next_++}, Bulk{header, data, priority, std::move(left)});
    } else {
      Append(peer, header, data);
    }
    return header.is_bulk();
  }

  // Sends a frame whose payload, if any, fits into a packet to all other ranks.
  void ToOthers(FrameHeader header, const void* payload = nullptr) {
    header.layout = layout_;
    for (int peer = 0; peer < transport_->size(); ++peer) {
      if (peer == transport_->rank()) continue;
      packets_.Append(peer, header, payload);
      statistics_->header_bytes += sizeof(header);
    }
  }

  // Frames that are ready together travel together: nothing leaves before Flush.
  void Flush() {
    for (int peer = 0; peer < transport_->size(); ++peer) SendWaiting(peer);
    packets_.Flush();
  }
  void Clear() {
    packets_.Clear();
    for (Waiting& waiting : waiting_) waiting.clear();
  }
  bool IsEmpty() const {
    return packets_.IsEmpty() &&
           std::all_of(waiting_.begin(), waiting_.end(), [](const Waiting& waiting) { return waiting.empty(); });
  }

 private:
  struct Bulk {
    FrameHeader header;
    const void* data;
    int priority;
    Transport::Completion left;
  };
  // With less in flight a connection over TCP runs dry: the receiver's word that it is ready for the next transfer
  // comes behind what fills the buffers of its own connection.
  static constexpr size_t kLeastInFlight = size_t{256} << 10;
  static constexpr size_t kMostCredits = 4;

  using Place = std::pair<int, uint64_t>;  // priority, and when it came
  using Waiting = std::map<Place, Bulk>;

  // Whether the most urgent transfer that waits for `peer` may start; it may exceed the limit. The peer must hold in
  // memory what is in flight if it has not started the exchange yet.
  //
  // Where transfers overtake each other, less urgent ones hold up nothing, unless there are very many. Where they do
  // not, an urgent one waits for all that is in flight, so those that have priorities keep the link busy with little.
  bool MayStart(int peer) const {
    if (waiting_[peer].empty()) return false;
    const int priority = waiting_[peer].begin()->first.first;
    size_t before = 0, all = 0;
    for (const auto& [other, bytes] : in_flight_[peer]) {
      all += bytes;
      if (other <= priority) before += bytes;
    }
    const size_t credit = std::max(2 * kv_pair_bytes_, kLeastInFlight);
    if (transport_->overtakes()) return before < credit && all < kMostCredits * credit;
    return all < (priority == 0 ? credit : std::max(kv_pair_bytes_ / 2, kLeastInFlight));
  }

  void Append(int peer, const FrameHeader& header, const void* data) {
    packets_.Append(peer, header, data);
    statistics_->header_bytes += sizeof(header);
  }

  // Starts what waits for `peer`, while it has credit. Headers leave first: over TCP, MPI keeps only some unexpected
  // messages (libfabric's FI_TCP_MAX_SAVED, 64) and then stops reading the connection, so the headers that make the
  // peer post its receives must not come after them.
  void SendWaiting(int peer) {
    std::vector<Bulk> bulks;
    while (MayStart(peer)) {
      Bulk& bulk = bulks.emplace_back(std::move(waiting_[peer].extract(waiting_[peer].begin()).mapped()));
      bulk.header.tag = next_tag_[peer]++;
      Append(peer, bulk.header, bulk.data);
      in_flight_[peer][bulk.priority] += bulk.header.length;
    }
    if (!bulks.empty()) packets_.FlushOne(peer);
    for (Bulk& bulk : bulks) {
      auto has_left = [this, peer, priority = bulk.priority, bytes = bulk.header.length, left = std::move(bulk.left)] {
        auto found = in_flight_[peer].find(priority);
        if ((found->second -= bytes) == 0) in_flight_[peer].erase(found);
        left();
      };
      transport_->SendBulk(peer, bulk.header.tag, bulk.data, bulk.header.length, bulk.priority, std::move(has_left));
    }
  }

  Transport* const transport_;
  const uint64_t layout_;  // digest of everything that decides how bytes are cut and routed
  const size_t kv_pair_bytes_;
  Statistics* const statistics_;
  Packets packets_;
  std::vector<uint32_t> next_tag_;                // by peer
  std::vector<std::map<int, size_t>> in_flight_;  // bytes of bulk transfers by priority, by peer
  std::vector<Waiting> waiting_;                  // for credit, by peer
  uint64_t next_ = 0;                             // how many bulk transfers there were
  std::unordered_map<uint64_t, int> priorities_;  // by site
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_SENDER_H_
