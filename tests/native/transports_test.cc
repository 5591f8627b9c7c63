// What every transport must do: over the loopback, and over sockets with buffers so small that most reads and writes
// are partial.

#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "frame.h"
#include "loopback_transport.h"
#include "socket_transport.h"

using namespace poseidon;

namespace {

using Transports = std::vector<std::unique_ptr<Transport>>;

Transports SocketTransports(int size) {
  std::vector<std::vector<int>> sockets(size, std::vector<int>(size, -1));
  for (int high = 0; high < size; ++high) {
    for (int low = 0; low < high; ++low) {
      int pair[2];
      EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0, "socketpair");
      const int bytes = 1;  // the kernel raises it to its minimum
      for (int socket : pair) {
        setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
        setsockopt(socket, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof(bytes));
      }
      sockets[low][high] = pair[0];
      sockets[high][low] = pair[1];
    }
  }
  Transports transports;
  for (int rank = 0; rank < size; ++rank) transports.push_back(MakeSocketTransport(rank, sockets[rank]));
  return transports;
}

// Calls test(transports, kind) for each kind of transport, and then leaves the job.
void ForEachKind(int size, const std::function<void(Transports&, const std::string&)>& test) {
  for (bool is_socket : {false, true}) {
    Transports transports = is_socket ? SocketTransports(size) : MakeLoopbackTransports(size, {});
    test(transports, is_socket ? "sockets" : "loopback");
    for (auto& transport : transports) transport->Close(/*agreed=*/true);
  }
}

struct Packet {
  int peer;
  std::string data;
};

// Polls all ranks until `condition` holds; appends packets to `packets`, by rank.
template <typename Condition>
void PollUntil(Transports& transports, std::vector<std::vector<Packet>>* packets, Condition condition,
               const std::string& where) {
  packets->resize(transports.size());
  for (int turn = 0; !condition(); ++turn) {
    EXPECT(turn < 1000000, where + ": nothing arrives");
    for (size_t rank = 0; rank < transports.size(); ++rank) {
      transports[rank]->Poll([&](int peer, const char* data, size_t bytes) {
        (*packets)[rank].push_back({peer, std::string(data, bytes)});
      });
    }
  }
}

std::string Pattern(size_t seed, size_t bytes) {
  std::string data(bytes, '\0');
  for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<char>(i * 13 + i / 251 + seed * 7);
  return data;
}

std::vector<char> ToVector(const std::string& text) { return {text.begin(), text.end()}; }

}  // namespace

TEST(PacketsArriveWholeAndInOrder) {
  ForEachKind(3, [](Transports& transports, const std::string& kind) {
    const std::vector<size_t> sizes = {1, 64, 5000, kMaxPacketBytes, 3, 100000, 2};
    std::vector<std::vector<Packet>> packets;
    for (size_t i = 0; i < sizes.size(); ++i) {
      for (int rank = 0; rank < 3; ++rank) {
        for (int peer = 0; peer < 3; ++peer) {
          if (peer != rank) transports[rank]->SendPacket(peer, ToVector(Pattern(10 * rank + i, sizes[i])));
        }
      }
    }
    PollUntil(
        transports, &packets,
        [&] {
          return std::all_of(packets.begin(), packets.end(),
                             [&](const auto& p) { return p.size() == 2 * sizes.size(); });
        },
        kind);
    for (int rank = 0; rank < 3; ++rank) {
      std::vector<size_t> next(3);
      for (const Packet& packet : packets[rank]) {
        const size_t i = next[packet.peer]++;
        EXPECT(packet.data == Pattern(10 * packet.peer + i, sizes[i]), kind);
      }
      EXPECT(transports[rank]->Flushed(), kind);
    }
  });
}

TEST(BulkTransfersArriveWheneverTheyAreAskedFor) {
  ForEachKind(2, [](Transports& transports, const std::string& kind) {
    std::vector<std::vector<Packet>> packets;
    const std::vector<size_t> sizes = {0, 1, 40000, 3000001, 65536};
    // Received before they are sent, after they have arrived, and in reverse order.
    uint32_t tag = 0;
    for (const std::string when : {"before", "after", "backwards"}) {
      const std::string where = kind + ", " + when;
      std::vector<std::string> sent, got;
      size_t left = 0, arrived = 0;
      for (size_t i = 0; i < sizes.size(); ++i) {
        sent.push_back(Pattern(i + tag, sizes[i]));
        got.emplace_back(sizes[i] + 1, 'x');
      }
      auto receive = [&](size_t i) {
        transports[1]->ReceiveBulk(0, tag + i, got[i].data(), sizes[i], [&, i] {
          EXPECT(got[i] == sent[i] + "x", where);
          ++arrived;
        });
      };
      if (when == "before") {
        for (size_t i = 0; i < sizes.size(); ++i) receive(i);
      }
      for (size_t i = 0; i < sizes.size(); ++i) {
        transports[0]->SendBulk(1, tag + i, sent[i].data(), sizes[i], 0, [&] { ++left; });
        transports[0]->SendPacket(1, {'p'});
      }
      const size_t before = packets.empty() ? 0 : packets[1].size();
      if (when == "after") {
        PollUntil(transports, &packets, [&] { return packets[1].size() == before + sizes.size(); }, where);
        EXPECT_EQ(arrived, size_t{0}, where);
        for (size_t i = 0; i < sizes.size(); ++i) receive(i);
      } else if (when == "backwards") {
        // Some have arrived partly.
        for (int turn = 0; turn < 20; ++turn) {
          for (auto& transport : transports) {
            transport->Poll([&](int, const char*, size_t) { packets[1].push_back({}); });
          }
        }
        for (size_t i = sizes.size(); i-- > 0;) receive(i);
      }
      PollUntil(
          transports, &packets,
          [&] { return left == sizes.size() && arrived == sizes.size() && packets[1].size() == before + sizes.size(); },
          where);
      tag += sizes.size();
    }
  });
}

TEST(BothDirectionsFlowAtTheSameTime) {
  ForEachKind(2, [](Transports& transports, const std::string& kind) {
    const size_t bytes = 2000000;
    const std::string data[] = {Pattern(1, bytes), Pattern(2, bytes)};
    std::string got[] = {std::string(bytes, 0), std::string(bytes, 0)};
    int done = 0;
    for (int rank : {0, 1}) {
      transports[rank]->SendBulk(1 - rank, 0, data[rank].data(), bytes, 0, [&] { ++done; });
      transports[rank]->ReceiveBulk(1 - rank, 0, got[rank].data(), bytes, [&] { ++done; });
    }
    std::vector<std::vector<Packet>> packets;
    PollUntil(transports, &packets, [&] { return done == 4; }, kind);
    for (int rank : {0, 1}) EXPECT(got[rank] == data[1 - rank], kind);
  });
}

TEST(ACompletionMayStartTheNextTransfer) {
  ForEachKind(2, [](Transports& transports, const std::string& kind) {
    const std::string data = Pattern(3, 50000);
    std::vector<std::string> got(20, std::string(50000, 0));
    int left = 0, arrived = 0;
    std::function<void()> send, receive;
    send = [&] {
      if (left < 20)
        transports[0]->SendBulk(1, left, data.data(), data.size(), 0, [&] {
          ++left;
          send();
        });
    };
    receive = [&] {
      if (arrived < 20) {
        transports[1]->ReceiveBulk(0, arrived, got[arrived].data(), data.size(), [&] {
          ++arrived;
          receive();
        });
      }
    };
    send();
    receive();
    std::vector<std::vector<Packet>> packets;
    PollUntil(transports, &packets, [&] { return left == 20 && arrived == 20; }, kind);
    for (const std::string& each : got) EXPECT(each == data, kind);
  });
}

TEST(ATransferOfAnotherSizeThanItsReceiverIsRefused) {
  ForEachKind(2, [](Transports& transports, const std::string& kind) {
    for (bool asks_first : {true, false}) {
      Transports pair = kind == "loopback" ? MakeLoopbackTransports(2, {}) : SocketTransports(2);
      const std::string data = Pattern(0, 100);
      std::string got(200, 0), reason;
      std::vector<std::vector<Packet>> packets;
      auto receive = [&] { pair[1]->ReceiveBulk(0, 0, got.data(), 200, [] { check::Fail("", 0, "received", ""); }); };
      try {
        if (asks_first) receive();
        pair[0]->SendBulk(1, 0, data.data(), 100, 0, [] {});
        pair[0]->SendPacket(1, {'p'});
        PollUntil(pair, &packets, [&] { return !packets[1].empty(); }, kind);
        receive();
        PollUntil(pair, &packets, [] { return false; }, kind);
      } catch (const TransportError& error) {
        reason = error.what();
      }
      EXPECT_HOLDS(reason, "a bulk transfer has another size than its receiver");
      for (auto& transport : pair) transport->Close(/*agreed=*/false);
    }
    (void)transports;
  });
}

TEST(WhatArrivesIsHeardWithoutPackets) {
  ForEachKind(3, [](Transports& transports, const std::string& kind) {
    std::map<int, int> heard;
    transports[1]->TellHeard([&](int peer) { ++heard[peer]; });
    std::vector<std::vector<Packet>> packets;
    const std::string sent = Pattern(1, 5000000);
    std::string got(sent.size(), 'x');
    int done = 0, heard_before = 0;
    transports[0]->SendBulk(1, 0, sent.data(), sent.size(), 0, [&] { ++done; });
    transports[1]->ReceiveBulk(0, 0, got.data(), got.size(), [&] {
      ++done;
      heard_before = heard[0];
    });
    PollUntil(transports, &packets, [&] { return done == 2; }, kind);
    EXPECT(heard_before >= (kind == "sockets" ? 3 : 1), kind + ": " + std::to_string(heard_before));
    transports[2]->SendPacket(1, {'p'});
    PollUntil(transports, &packets, [&] { return packets[1].size() == 1; }, kind);
    EXPECT(heard[2] > 0, kind);
    transports[1]->TellHeard({});
  });
}
