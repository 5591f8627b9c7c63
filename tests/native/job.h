// Ranks of a job without threads: tests decide the order of events.

#ifndef POSEIDON_TESTS_NATIVE_JOB_H_
#define POSEIDON_TESTS_NATIVE_JOB_H_

#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "loopback_transport.h"
#include "packets.h"
#include "protocol.h"
#include "statistics.h"

namespace poseidon {

inline Exchange SumInPlace(const std::string& site, std::vector<float>* value) {
  Exchange exchange;
  exchange.site = site;
  exchange.count = static_cast<int64_t>(value->size());
  exchange.input = exchange.output = value->data();
  return exchange;
}

// A frame and its payload, if that travels in the packet.
struct Frame {
  int peer;
  FrameHeader header;
  std::string payload;
};

inline std::vector<char> Packet(const FrameHeader& header, const std::string& payload = "") {
  std::vector<char> packet(sizeof(header) + payload.size());
  std::memcpy(packet.data(), &header, sizeof(header));
  if (!payload.empty()) std::memcpy(packet.data() + sizeof(header), payload.data(), payload.size());
  return packet;
}

// A transport with the test at its other ends: it records what is sent, and completes transfers when the test says so.
class ScriptedTransport : public Transport {
 public:
  struct Bulk {
    int peer;
    uint32_t tag;
    const void* from;  // of what is sent
    void* to;          // of what is received
    size_t bytes;
    int priority;  // of what is sent
    Completion done;
  };

  ScriptedTransport(int rank, int size) : rank_(rank), size_(size) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void SendPacket(int peer, std::vector<char> packet) override {
    EXPECT(packet.size() <= kMaxPacketBytes, "a packet that no rank takes");
    packets.emplace_back(peer, packet.size());
    const std::string wrong =
        Packets::Unpack(packet.data(), packet.size(), [&](const FrameHeader& header, const char* payload) {
          sent.push_back({peer, header, std::string(payload, header.is_bulk() ? 0 : header.length)});
        });
    EXPECT_EQ(wrong, "", "a packet that was sent");
  }
  void SendBulk(int peer, uint32_t tag, const void* data, size_t bytes, int priority, Completion done) override {
    sends.push_back({peer, tag, data, nullptr, bytes, priority, std::move(done)});
  }
  void ReceiveBulk(int peer, uint32_t tag, void* data, size_t bytes, Completion done) override {
    receives.push_back({peer, tag, nullptr, data, bytes, 0, std::move(done)});
  }
  bool Poll(const PacketHandler& on_packet) override {
    for (int peer : std::exchange(heard_, {})) Heard(peer);
    for (auto& [peer, packet] : std::exchange(arriving_, {})) {
      Heard(peer);
      on_packet(peer, packet.data(), packet.size());
    }
    for (const Completion& done : std::exchange(finished_, {})) done();
    return false;
  }
  bool Flushed() const override { return true; }
  bool overtakes() const override { return can_overtake; }
  void Close(bool) override {}

  // The next Poll delivers a packet, or a part of a transfer, or completes one.
  void Arrive(int peer, std::vector<char> packet) { arriving_.emplace_back(peer, std::move(packet)); }
  void ArrivePart(int peer) { heard_.push_back(peer); }
  void Finish(const Bulk& bulk) { finished_.push_back(bulk.done); }

  std::vector<std::pair<int, size_t>> packets;  // sent: peer and bytes
  std::vector<Frame> sent;
  std::vector<Bulk> sends, receives;
  bool can_overtake = false;

 private:
  const int rank_, size_;
  std::deque<std::pair<int, std::vector<char>>> arriving_;
  std::vector<int> heard_;
  std::vector<Completion> finished_;
};

// One rank: its protocol, and the reason of its failure.
struct Rank {
  Rank(std::unique_ptr<Transport> transport, const Options& options) {
    const std::vector<int> nodes = NodesOf(options, *transport);
    protocol = std::make_unique<Protocol>(
        std::move(transport), options, nodes, &statistics, [this](const std::string& reason) { failure = reason; },
        [this](Question question) { questions.push_back(std::move(question)); });
  }

  Statistics statistics;
  std::string failure;
  std::vector<Question> questions;
  std::unique_ptr<Protocol> protocol;
};

// All ranks of a job in this process. The seed determines the order of their turns.
class Job {
 public:
  Job(int size, const std::vector<int>& nodes, const Options& options, unsigned seed = 0) : random_(seed) {
    for (auto& transport : MakeLoopbackTransports(size, nodes)) {
      ranks_.push_back(std::make_unique<Rank>(std::move(transport), options));
    }
  }

  int size() const { return static_cast<int>(ranks_.size()); }
  Rank& rank(int i) { return *ranks_[i]; }
  Protocol& protocol(int i) { return *ranks_[i]->protocol; }
  std::mt19937& random() { return random_; }

  // Gives ranks turns until `condition` holds.
  template <typename Condition>
  void Run(Condition condition, const std::string& where) {
    for (int turn = 0; !condition(); ++turn) {
      EXPECT(turn < 200000, where + ": the ranks wait for each other");
      Protocol& protocol = *ranks_[random_() % ranks_.size()]->protocol;
      protocol.Poll();
      protocol.Flush();
    }
  }

 private:
  std::mt19937 random_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace poseidon

#endif  // POSEIDON_TESTS_NATIVE_JOB_H_
