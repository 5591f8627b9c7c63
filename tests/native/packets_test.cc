// Frames in packets: at the limits of sizes, in order, and in truncated packets.

#include "packets.h"

#include <string>
#include <vector>

#include "check.h"
#include "job.h"

using namespace poseidon;

namespace {

FrameHeader Header(uint64_t number, size_t length) {
  FrameHeader header = {};
  header.offset = number;
  header.length = length;
  return header;
}

std::string Payload(uint64_t number, size_t length) {
  std::string payload(length, '\0');
  for (size_t i = 0; i < length; ++i) payload[i] = static_cast<char>(7 * i + number);
  return payload;
}

}  // namespace

TEST(FramesArriveAsTheyWereInPacketsNoLongerThanAllowed) {
  for (size_t length : {size_t{0}, size_t{1}, size_t{64}, size_t{1000}, kInlineBytes - 1, kInlineBytes}) {
    const std::string where = std::to_string(length) + " bytes";
    ScriptedTransport transport(0, 3);
    Statistics statistics;
    Packets packets(&transport, &statistics);
    const size_t count = 6 * kMaxPacketBytes / (length + sizeof(FrameHeader)) / 2;
    for (size_t i = 0; i < count; ++i) {
      const std::string payload = Payload(i, length);
      packets.Append(i % 2 ? 1 : 2, Header(i, length), payload.data());
    }
    EXPECT(!packets.IsEmpty(), where);
    packets.Flush();
    EXPECT(packets.IsEmpty(), where);
    EXPECT_EQ(transport.sent.size(), count, where);
    EXPECT_EQ(statistics.packets.load(), transport.packets.size(), where);
    std::vector<uint64_t> next = {0, 1, 0};  // by peer
    for (const Frame& frame : transport.sent) {
      EXPECT_EQ(frame.header.offset, next[frame.peer], where);
      EXPECT(frame.payload == Payload(frame.header.offset, length), where);
      next[frame.peer] += 2;
    }
    // As many frames as fit share a packet: only the last of each peer may be shorter.
    size_t shorter = 0;
    for (const auto& [peer, bytes] : transport.packets) {
      shorter += bytes + length + sizeof(FrameHeader) <= kMaxPacketBytes;
    }
    EXPECT(shorter <= 2, where);
  }
}

TEST(APacketMayBeExactlyAsLongAsAllowed) {
  ScriptedTransport transport(0, 2);
  Statistics statistics;
  Packets packets(&transport, &statistics);
  const size_t frames = 8, length = kMaxPacketBytes / frames - sizeof(FrameHeader);
  const std::string payload = Payload(0, length);
  for (size_t i = 0; i < frames; ++i) packets.Append(1, Header(i, length), payload.data());
  EXPECT_EQ(transport.packets.size(), size_t{0}, "all fit");
  packets.Append(1, Header(frames, 0), nullptr);
  EXPECT_EQ(transport.packets.size(), size_t{1}, "one more does not");
  EXPECT_EQ(transport.packets[0].second, kMaxPacketBytes, "");

  packets.Flush();
  transport.packets.clear();
  const std::string longer = payload + "x";
  for (size_t i = 0; i < frames; ++i) packets.Append(1, Header(i, length + (i == 0)), longer.data());
  EXPECT_EQ(transport.packets.size(), size_t{1}, "one byte more does not fit");
}

TEST(BulkPayloadsStayOutsideAndWhatIsClearedIsNotSent) {
  ScriptedTransport transport(0, 2);
  Statistics statistics;
  Packets packets(&transport, &statistics);
  packets.Append(1, Header(1, size_t{1} << 33), nullptr);
  packets.FlushOne(1);
  EXPECT_EQ(transport.packets[0].second, sizeof(FrameHeader), "");
  EXPECT_EQ(transport.sent[0].header.length, uint64_t{1} << 33, "");
  packets.Append(1, Header(2, 0), nullptr);
  packets.Clear();
  packets.Flush();
  EXPECT_EQ(transport.packets.size(), size_t{1}, "");
}

TEST(PacketsThatEndWithinAFrameAreRefused) {
  const std::string payload = Payload(5, 100);
  std::vector<char> whole = Packet(Header(1, 0));
  for (const FrameHeader& header : {Header(2, 100), Header(3, uint64_t{1} << 40)}) {
    const std::vector<char> frame = Packet(header, header.is_bulk() ? "" : payload);
    whole.insert(whole.end(), frame.begin(), frame.end());
  }
  const std::vector<size_t> ends = {0, 64, 228, 292};  // of frames
  EXPECT_EQ(whole.size(), ends.back(), "");
  for (size_t bytes = 0; bytes <= whole.size(); ++bytes) {
    const std::vector<char> cut(whole.begin(), whole.begin() + bytes);  // the memory ends there, too
    size_t frames = 0, complete = 0;
    while (ends[complete] < bytes) ++complete;
    const bool is_whole = ends[complete] == bytes;
    const std::string wrong =
        Packets::Unpack(cut.data(), cut.size(), [&](const FrameHeader&, const char*) { ++frames; });
    EXPECT_EQ(wrong.empty(), is_whole, std::to_string(bytes) + " bytes");
    EXPECT_EQ(frames, complete - !is_whole, std::to_string(bytes) + " bytes");
  }
  const std::vector<char> lie = Packet(Header(1, kInlineBytes));
  EXPECT_HOLDS(Packets::Unpack(lie.data(), lie.size(), [](const FrameHeader&, const char*) {}),
               "ends after 0 bytes of a payload, expected 32768");
}
