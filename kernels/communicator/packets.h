// Packs frames into packets, one open packet for each peer.

#ifndef POSEIDON_COMMUNICATOR_PACKETS_H_
#define POSEIDON_COMMUNICATOR_PACKETS_H_

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "frame.h"
#include "statistics.h"
#include "transport.h"

namespace poseidon {

class Packets {
 public:
  explicit Packets(Transport* transport, Statistics* statistics)
      : transport_(transport), statistics_(statistics), open_(transport->size()) {}

  // Adds a frame to the packet for `peer`; the payload goes along unless it is bulk. A full packet
  // is sent first.
  void Append(int peer, const FrameHeader& header, const void* payload);

  // Sends the packet for one peer, or for all, if it holds anything.
  void FlushOne(int peer);
  void Flush();

  // Drops what has not been sent.
  void Clear();

  bool IsEmpty() const;

  // Calls `on_frame(header, payload)` for each frame of a packet that has arrived. Returns what is wrong with the
  // packet if it ends within a frame, which is not given to `on_frame`, or an empty text.
  static std::string Unpack(const char* data, size_t bytes,
                            const std::function<void(const FrameHeader&, const char*)>& on_frame);

 private:
  Transport* const transport_;
  Statistics* const statistics_;
  std::vector<std::vector<char>> open_;  // by peer
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_PACKETS_H_
