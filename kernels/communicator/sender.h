// Sends frames: stamps them, keeps small payloads in the packet, and starts bulk transfers, a
// limited number of bytes at a time.

#ifndef POSEIDON_COMMUNICATOR_SENDER_H_
#define POSEIDON_COMMUNICATOR_SENDER_H_

#include <algorithm>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "packets.h"
#include "statistics.h"
#include "transport.h"

namespace poseidon {

class Sender {
 public:
  Sender(Transport* transport, uint64_t plan, Statistics* statistics)
      : transport_(transport),
        plan_(plan),
        statistics_(statistics),
        packets_(transport, statistics),
        next_tag_(transport->size()),
        in_flight_(transport->size()),
        waiting_(transport->size()) {}

  // Sends the `header.length` bytes at `data`. Returns whether they travel as a bulk transfer:
  // then `data` must stay unchanged until `left` is called.
  bool Send(int peer, FrameHeader header, const void* data, Transport::Completion left) {
    header.plan = plan_;
    header.is_bulk = header.length > kInlineBytes;
    if (header.is_bulk) {
      waiting_[peer].push_back({header, data, std::move(left)});
    } else {
      Append(peer, header, data);
    }
    return header.is_bulk;
  }

  // Sends a frame whose payload, if any, fits into a packet to all other ranks.
  void ToOthers(FrameHeader header, const void* payload = nullptr) {
    header.plan = plan_;
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
    for (std::deque<Bulk>& waiting : waiting_) waiting.clear();
  }
  bool IsEmpty() const {
    return packets_.IsEmpty() && std::all_of(waiting_.begin(), waiting_.end(),
                                             [](const std::deque<Bulk>& waiting) { return waiting.empty(); });
  }

 private:
  // The bulk transfers in flight to one peer: it must hold them in memory if it has not started the exchange yet.
  static constexpr size_t kCreditBytes = size_t{8} << 20;

  struct Bulk {
    FrameHeader header;
    const void* data;
    Transport::Completion left;
  };

  void Append(int peer, const FrameHeader& header, const void* data) {
    packets_.Append(peer, header, data);
    statistics_->header_bytes += sizeof(header);
  }

  // Starts what waits for `peer`, while it has credit. Headers leave first: over TCP, MPI keeps only some unexpected
  // messages (libfabric's FI_TCP_MAX_SAVED, 64) and then stops reading the connection, so the headers that make the
  // peer post its receives must not come after them.
  void SendWaiting(int peer) {
    std::deque<Bulk> bulks;
    while (!waiting_[peer].empty() && in_flight_[peer] < kCreditBytes) {
      Bulk& bulk = bulks.emplace_back(std::move(waiting_[peer].front()));
      waiting_[peer].pop_front();
      bulk.header.tag = next_tag_[peer]++;
      Append(peer, bulk.header, bulk.data);
      in_flight_[peer] += bulk.header.length;
    }
    if (!bulks.empty()) packets_.FlushOne(peer);
    for (Bulk& bulk : bulks) {
      transport_->SendBulk(peer, bulk.header.tag, bulk.data, bulk.header.length,
                           [this, peer, bytes = bulk.header.length, left = std::move(bulk.left)] {
                             in_flight_[peer] -= bytes;
                             left();
                           });
    }
  }

  Transport* const transport_;
  const uint64_t plan_;  // digest of everything that decides how bytes are cut and routed
  Statistics* const statistics_;
  Packets packets_;
  std::vector<uint32_t> next_tag_;         // by peer
  std::vector<size_t> in_flight_;          // bytes of bulk transfers, by peer
  std::vector<std::deque<Bulk>> waiting_;  // for credit, by peer
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_SENDER_H_
