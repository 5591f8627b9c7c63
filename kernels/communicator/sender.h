// Sends frames: stamps them, keeps small payloads in the packet and starts bulk transfers.

#ifndef POSEIDON_COMMUNICATOR_SENDER_H_
#define POSEIDON_COMMUNICATOR_SENDER_H_

#include <cstdint>
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
        packets_(transport),
        next_tag_(transport->size()) {}

  // Sends the `header.length` bytes at `data`. Returns whether they travel as a bulk transfer:
  // then `data` must stay unchanged until `left` is called.
  bool Send(int peer, FrameHeader header, const void* data, Transport::Completion left) {
    header.plan = plan_;
    header.is_bulk = header.length > kInlineBytes;
    header.tag = header.is_bulk ? next_tag_[peer]++ : 0;
    packets_.Append(peer, header, data);
    statistics_->header_bytes += sizeof(header);
    if (header.is_bulk) {
      transport_->SendBulk(peer, header.tag, data, header.length, std::move(left));
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
  void Flush() { packets_.Flush(); }
  void Clear() { packets_.Clear(); }
  bool IsEmpty() const { return packets_.IsEmpty(); }

 private:
  Transport* const transport_;
  const uint64_t plan_;  // digest of everything that decides how bytes are cut and routed
  Statistics* const statistics_;
  Packets packets_;
  std::vector<uint32_t> next_tag_;  // by peer
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_SENDER_H_
