// What the communicator needs from whatever moves bytes between ranks.

#ifndef POSEIDON_COMMUNICATOR_TRANSPORT_H_
#define POSEIDON_COMMUNICATOR_TRANSPORT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace poseidon {

// Thrown by a transport when the network fails; the communicator turns it into an error of every
// exchange that is waiting.
class TransportError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Moves packets and bulk data between the ranks of one job.
//
// One thread opens the transport, makes every call and closes it. No call blocks.
class Transport {
 public:
  using PacketHandler = std::function<void(int peer, const char* data, size_t bytes)>;
  using Completion = std::function<void()>;
  using PeerHandler = std::function<void(int peer)>;

  virtual ~Transport() = default;

  // From now on, Poll calls `on_heard` with each rank of which bytes have arrived: a packet, or a part of a bulk
  // transfer.
  void TellHeard(PeerHandler on_heard) { on_heard_ = std::move(on_heard); }

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // A number for each rank, the same for ranks that share a node; empty if nodes are unknown.
  virtual std::vector<int> nodes() const { return {}; }

  // Sends `packet` (at most kMaxPacketBytes). Packets from one rank to another arrive in order.
  virtual void SendPacket(int peer, std::vector<char> packet) = 0;

  // Sends `bytes` bytes to `peer`, to the ReceiveBulk of the same tag. The tags of what is sent to one peer
  // count from 0, and from 0 again after 2^32. `data` must stay unchanged until `done` is called, from Poll.
  // What has a smaller `priority` overtakes what was sent before, if the transport can.
  virtual void SendBulk(int peer, uint32_t tag, const void* data, size_t bytes, int priority, Completion done) = 0;

  // Whether bulk transfers overtake others by their priority.
  virtual bool overtakes() const { return false; }

  // Receives the bulk transfer `tag` of `peer` into `data`; `done` is called from Poll. Transfers may be
  // asked for in any order, before or after they are sent, but all of them must be asked for in the end.
  virtual void ReceiveBulk(int peer, uint32_t tag, void* data, size_t bytes, Completion done) = 0;

  // Delivers what has arrived or completed, and returns whether anything had.
  virtual bool Poll(const PacketHandler& on_packet) = 0;

  // Whether every packet has left.
  virtual bool Flushed() const = 0;

  // Leaves the job. `agreed` says that all ranks are leaving: only then may this wait for them.
  virtual void Close(bool agreed) = 0;

 protected:
  void Heard(int peer) const {
    if (on_heard_) on_heard_(peer);
  }

 private:
  PeerHandler on_heard_;
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_TRANSPORT_H_
