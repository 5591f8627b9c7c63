// Ranks as threads of one process: packets go through mailboxes, bulk data is copied by the
// receiver straight from the sender's memory.
//
// Tests: tests/native/transports_test.cc.

#include "loopback_transport.h"

#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <utility>

namespace poseidon {
namespace {

struct Letter {
  enum Kind { kPacket, kBulkOffer, kBulkTaken } kind;
  int peer;
  std::vector<char> packet;    // kPacket
  uint32_t tag = 0;            // kBulkOffer, kBulkTaken
  const void* data = nullptr;  // kBulkOffer
  size_t bytes = 0;            // kBulkOffer
};

struct Mailbox {
  std::mutex mutex;
  std::deque<Letter> letters;

  void Put(Letter letter) {
    std::lock_guard<std::mutex> lock(mutex);
    letters.push_back(std::move(letter));
  }
};

using World = std::vector<Mailbox>;

class LoopbackTransport : public Transport {
 public:
  LoopbackTransport(std::shared_ptr<World> world, int rank, std::vector<int> nodes)
      : world_(std::move(world)), rank_(rank), nodes_(std::move(nodes)) {}

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(world_->size()); }
  std::vector<int> nodes() const override { return nodes_; }

  void SendPacket(int peer, std::vector<char> packet) override {
    (*world_)[peer].Put({Letter::kPacket, rank_, std::move(packet)});
  }

  void SendBulk(int peer, uint32_t tag, const void* data, size_t bytes, int, Completion done) override {
    sends_[{peer, tag}] = std::move(done);
    (*world_)[peer].Put({Letter::kBulkOffer, rank_, {}, tag, data, bytes});
  }

  void ReceiveBulk(int peer, uint32_t tag, void* data, size_t bytes, Completion done) override {
    receives_[{peer, tag}] = {data, bytes, std::move(done)};
  }

  bool Poll(const PacketHandler& on_packet) override {
    std::deque<Letter> letters;
    {
      Mailbox& mailbox = (*world_)[rank_];
      std::lock_guard<std::mutex> lock(mailbox.mutex);
      letters.swap(mailbox.letters);
    }
    bool active = !letters.empty();
    for (Letter& letter : letters) {
      Heard(letter.peer);
      switch (letter.kind) {
        case Letter::kPacket:
          on_packet(letter.peer, letter.packet.data(), letter.packet.size());
          break;
        case Letter::kBulkOffer:
          offers_.push_back(std::move(letter));
          break;
        case Letter::kBulkTaken: {
          auto node = sends_.extract({letter.peer, letter.tag});
          node.mapped()();
          break;
        }
      }
    }
    for (auto offer = offers_.begin(); offer != offers_.end();) {
      auto receive = receives_.extract({offer->peer, offer->tag});
      if (receive.empty()) {
        ++offer;
        continue;
      }
      if (receive.mapped().bytes != offer->bytes) {
        throw TransportError("loopback: a bulk transfer has another size than its receiver");
      }
      std::memcpy(receive.mapped().data, offer->data, offer->bytes);
      (*world_)[offer->peer].Put({Letter::kBulkTaken, rank_, {}, offer->tag});
      offer = offers_.erase(offer);
      receive.mapped().done();
      active = true;
    }
    return active;
  }

  bool Flushed() const override { return true; }
  void Close(bool) override {}

 private:
  struct Receive {
    void* data;
    size_t bytes;
    Completion done;
  };

  std::shared_ptr<World> world_;
  const int rank_;
  const std::vector<int> nodes_;
  std::list<Letter> offers_;  // announced to us, not yet asked for
  std::map<std::pair<int, uint32_t>, Completion> sends_;
  std::map<std::pair<int, uint32_t>, Receive> receives_;
};

}  // namespace

std::vector<std::unique_ptr<Transport>> MakeLoopbackTransports(int size, const std::vector<int>& nodes) {
  auto world = std::make_shared<World>(size);
  std::vector<std::unique_ptr<Transport>> transports;
  for (int rank = 0; rank < size; ++rank) {
    transports.push_back(std::make_unique<LoopbackTransport>(world, rank, nodes));
  }
  return transports;
}

}  // namespace poseidon
