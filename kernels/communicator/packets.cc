// Puts frames that leave together into packets, and takes packets that have arrived apart again.
//
// Tests: tests/native/packets_test.cc.

#include "packets.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace poseidon {
void Packets::Append(int peer, const FrameHeader& header, const void* payload) {
  std::vector<char>& packet = open_[peer];
  if (packet.size() + sizeof(header) + header.bytes_that_follow() > kMaxPacketBytes) FlushOne(peer);
  const char* begin = reinterpret_cast<const char*>(&header);
  packet.insert(packet.end(), begin, begin + sizeof(header));
  const char* data = static_cast<const char*>(payload);
  if (header.bytes_that_follow() > 0) packet.insert(packet.end(), data, data + header.bytes_that_follow());
}

void Packets::Flush() {
  for (size_t peer = 0; peer < open_.size(); ++peer) FlushOne(static_cast<int>(peer));
}

void Packets::FlushOne(int peer) {
  if (open_[peer].empty()) return;
  statistics_->packets += 1;
  transport_->SendPacket(peer, std::exchange(open_[peer], {}));
}

void Packets::Clear() {
  for (std::vector<char>& packet : open_) packet.clear();
}

bool Packets::IsEmpty() const {
  return std::all_of(open_.begin(), open_.end(), [](const std::vector<char>& packet) { return packet.empty(); });
}

std::string Packets::Unpack(const char* data, size_t bytes,
                            const std::function<void(const FrameHeader&, const char*)>& on_frame) {
  for (size_t position = 0; position < bytes;) {
    FrameHeader header;
    const size_t left = bytes - position;
    if (left < sizeof(header)) {
      return "a packet ends after " + std::to_string(left) + " bytes of a header, expected " +
             std::to_string(sizeof(header));
    }
    std::memcpy(&header, data + position, sizeof(header));
    const size_t payload = header.bytes_that_follow(), left_for_it = left - sizeof(header);
    if (left_for_it < payload) {
      return "a packet ends after " + std::to_string(left_for_it) + " bytes of a payload, expected " +
             std::to_string(payload);
    }
    on_frame(header, data + position + sizeof(header));
    position += sizeof(header) + payload;
  }
  return "";
}

}  // namespace poseidon
