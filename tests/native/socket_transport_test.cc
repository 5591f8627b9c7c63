// The transport over sockets, with the test at the other end: peers that close mid-stream, and invalid streams.

#include "socket_transport.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "frame.h"

using namespace poseidon;

namespace {

// A message of a stream, see socket_transport.cc.
struct MessageHeader {
  uint32_t kind, tag;
  uint64_t bytes;
};

constexpr uint32_t kPacket = 0, kBulk = 1, kClose = 2;

std::string Message(uint32_t kind, uint32_t tag, uint64_t bytes, const std::string& payload = "") {
  const MessageHeader header = {kind, tag, bytes};
  std::string text(sizeof(header), '\0');
  std::memcpy(text.data(), &header, sizeof(header));
  return text + payload;
}

// Rank 0 of 2, and the other end of its socket.
struct Alone {
  explicit Alone(int buffer_bytes = 0) {
    int pair[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0, "socketpair");
    if (buffer_bytes > 0) setsockopt(pair[0], SOL_SOCKET, SO_SNDBUF, &buffer_bytes, sizeof(buffer_bytes));
    transport = MakeSocketTransport(0, {-1, pair[0]});
    other = pair[1];
  }
  ~Alone() {
    if (transport) transport->Close(/*agreed=*/false);
    if (other >= 0) close(other);
  }

  void Write(const std::string& bytes) {
    EXPECT_EQ(write(other, bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()), "write");
  }
  void CloseOther() {
    close(other);
    other = -1;
  }
  // Polls several times; returns why the transport failed, or "".
  std::string Poll() {
    try {
      for (int turn = 0; turn < 5; ++turn) {
        transport->Poll([&](int, const char* data, size_t bytes) { packets.emplace_back(data, bytes); });
      }
    } catch (const TransportError& error) {
      return error.what();
    }
    return "";
  }

  std::unique_ptr<Transport> transport;
  int other;
  std::vector<std::string> packets;
};

constexpr char kLost[] = "The connection to rank 1 is lost: ";

}  // namespace

TEST(APeerThatClosesIsNoticedWhereverItsStreamEnds) {
  const std::string stream = Message(kPacket, 0, 5, "hello") + Message(kBulk, 0, 9, "bulk data");
  for (size_t bytes = 0; bytes <= stream.size(); ++bytes) {
    Alone alone;
    std::string got(9, 'x');
    bool is_done = false;
    alone.transport->ReceiveBulk(1, 0, got.data(), 9, [&] { is_done = true; });
    alone.Write(stream.substr(0, bytes));
    EXPECT_EQ(alone.Poll(), "", std::to_string(bytes));
    EXPECT_EQ(alone.packets.size(), size_t{bytes >= 21}, std::to_string(bytes));
    EXPECT_EQ(is_done, bytes == stream.size(), std::to_string(bytes));
    alone.CloseOther();
    EXPECT_EQ(alone.Poll(), kLost + std::string("it has closed the connection."), std::to_string(bytes));
  }
}

TEST(BytesThatArriveOneByOneMakeMessages) {
  Alone alone;
  const std::string stream = Message(kPacket, 0, 5, "hello") + Message(kBulk, 7, 4, "bulk") + Message(kPacket, 0, 0);
  for (char byte : stream) {
    alone.Write(std::string(1, byte));
    EXPECT_EQ(alone.Poll(), "", "");
  }
  EXPECT_EQ(alone.packets.size(), size_t{2}, "");
  EXPECT_EQ(alone.packets[0], "hello", "");
  std::string got(4, 'x');
  bool is_done = false;
  alone.transport->ReceiveBulk(1, 7, got.data(), 4, [&] { is_done = true; });
  EXPECT_EQ(alone.Poll(), "", "");
  EXPECT(is_done && got == "bulk", got);
}

TEST(APeerThatClosesBeforeWhatItIsSentLeavesItsLastWord) {
  Alone alone;
  alone.Write(Message(kPacket, 0, 6, "reason"));
  alone.CloseOther();
  const std::string data(1 << 20, 'x');
  alone.transport->SendBulk(1, 0, data.data(), data.size(), 0, [] {});  // the peer does not read it
  EXPECT_HOLDS(alone.Poll(), "it has closed the connection");
  EXPECT_EQ(alone.packets.size(), size_t{1}, "its reason was read first");
}

TEST(StreamsThatLieAreRefused) {
  struct {
    std::string stream, reason;
  } const cases[] = {
      {Message(3, 0, 0), "it sends what no rank of this job sends"},
      {Message(UINT32_MAX, 0, 0), "it sends what no rank of this job sends"},
      {Message(kPacket, 0, kMaxPacketBytes + 1), "it sends what no rank of this job sends"},
      {Message(kPacket, 0, UINT64_MAX), "it sends what no rank of this job sends"},
      {Message(kBulk, 5, UINT64_MAX), "it sends a bulk transfer of 18446744073709551615 bytes, which no memory holds"},
      {Message(kBulk, 0, 10), "a bulk transfer has another size than its receiver"},
      {Message(kBulk, 0, uint64_t{1} << 40), "a bulk transfer has another size than its receiver"},
  };
  for (const auto& [stream, reason] : cases) {
    Alone alone;
    std::string got(9, 'x');
    alone.transport->ReceiveBulk(1, 0, got.data(), 9, [] {});
    alone.Write(stream);
    EXPECT_EQ(alone.Poll(), kLost + reason + ".", "");
  }
}

TEST(ARankThatLeavesAsAgreedSaysSoThoughItsPeerReadsLate) {
  Alone alone(/*buffer_bytes=*/1);
  // Fill the connection: data that has left the transport need not have been read by the peer.
  size_t filled = 0;
  while (alone.transport->Flushed()) {
    alone.transport->SendPacket(1, std::vector<char>(100, 'x'));
    ++filled;
  }
  std::atomic<bool> has_closed{false};
  std::string stream;
  std::thread leaving([&] {
    while (!alone.transport->Flushed()) alone.Poll();
    alone.transport->Close(/*agreed=*/true);
    has_closed = true;
  });
  auto read_some = [&](size_t most) {
    std::string bytes(most, '\0');
    const ssize_t got = read(alone.other, bytes.data(), most);
    EXPECT(got >= 0, "read");
    stream += bytes.substr(0, got);
    return got;
  };
  // Make just enough room for the last packet.
  read_some(116);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  while (read_some(4096) > 0) {
  }
  leaving.join();
  alone.transport.reset();
  EXPECT_EQ(stream.size(), filled * 116 + 16, "all packets, and that it has left");
  EXPECT(stream.substr(filled * 116) == Message(kClose, 0, 0), "");
}

TEST(APeerThatHasLeftAsAgreedIsNotLost) {
  Alone alone;
  alone.Write(Message(kPacket, 0, 3, "bye") + Message(kClose, 0, 0));
  alone.CloseOther();
  EXPECT_EQ(alone.Poll(), "", "");
  EXPECT_EQ(alone.packets.size(), size_t{1}, "");
}
