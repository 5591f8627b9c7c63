// Ranks that are connected by sockets: one stream for each pair of ranks, and in it messages, each a
// header and its payload. A bulk payload is read straight into its final place if that is known when
// its header arrives, as it usually is: what announces it travels before it.
//
// Tests: tests/native/socket_transport_test.cc, tests/native/transports_test.cc.

#include "socket_transport.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <sstream>
#include <string>
#include <utility>

#include "frame.h"

namespace poseidon {
namespace {

struct MessageHeader {
  enum Kind : uint32_t { kPacket, kBulk, kClose } kind;
  uint32_t tag;  // kBulk
  uint64_t bytes;
};

static_assert(sizeof(MessageHeader) == 16, "MessageHeader is sent as it lies in memory");

// What is read from one peer before it is the turn of the next.
constexpr size_t kMostAtOnce = size_t{1} << 20;

using Completion = Transport::Completion;

struct Outgoing {
  MessageHeader header;
  std::vector<char> packet;  // kPacket
  const char* data;          // of the payload, wherever it lies
  Completion done;           // kBulk
};

struct Place {
  void* data;
  size_t bytes;
  Completion done;
};

// The stream from and to one other rank.
class Stream {
 public:
  Stream(int peer, int socket) : peer_(peer), socket_(socket) {}

  void Send(Outgoing message) {
    outgoing_.push_back(std::move(message));
    if (outgoing_.size() == 1) Write();
  }

  void Receive(uint32_t tag, Place place) {
    auto early = early_.extract(tag);
    if (early.empty()) {
      places_[tag] = std::move(place);
      return;
    }
    CheckSize(place, early.mapped().size());
    std::memcpy(place.data, early.mapped().data(), place.bytes);
    received_.push_back(std::move(place.done));
  }

  // Writes and reads what is possible at once, and returns whether anything was.
  bool Poll(const Transport::PacketHandler& on_packet, const Transport::PeerHandler& on_heard) {
    bool active = Write();
    if (Read(on_packet)) {
      on_heard(peer_);
      active = true;
    }
    // After reading and writing: a completion may start more of both.
    for (auto* finished : {&sent_, &received_}) {
      active = active || !finished->empty();
      for (Completion& done : std::exchange(*finished, {})) done();
    }
    return active;
  }

  bool Flushed() const { return outgoing_.empty(); }

  void Close(bool agreed) {
    if (agreed) {
      // Waits for room: a peer that reads late and finds no such message at the end takes us for lost. A peer that has
      // left does not need it.
      const MessageHeader header = {MessageHeader::kClose, 0, 0};
      fcntl(socket_, F_SETFL, fcntl(socket_, F_GETFL) & ~O_NONBLOCK);
      [[maybe_unused]] auto sent = send(socket_, &header, sizeof(header), MSG_NOSIGNAL);
    }
    close(socket_);
  }

 private:
  bool Write() {
    bool active = false;
    while (!outgoing_.empty()) {
      Outgoing& message = outgoing_.front();
      iovec parts[2];
      int count = 0;
      const size_t total = sizeof(MessageHeader) + message.header.bytes;
      if (written_ < sizeof(MessageHeader)) {
        parts[count++] = {reinterpret_cast<char*>(&message.header) + written_, sizeof(MessageHeader) - written_};
      }
      const size_t begin = std::max(written_, sizeof(MessageHeader)) - sizeof(MessageHeader);
      if (begin < message.header.bytes) {
        parts[count++] = {const_cast<char*>(message.data) + begin, message.header.bytes - begin};
      }
      msghdr to_send = {};
      to_send.msg_iov = parts;
      to_send.msg_iovlen = count;
      const ssize_t sent = sendmsg(socket_, &to_send, MSG_NOSIGNAL);
      if (sent < 0) {
        if (WouldBlock()) break;
        if (errno != EPIPE && errno != ECONNRESET) Throw(std::strerror(errno));
        // The peer is gone. Its last message may still wait to be read.
        outgoing_.clear();
        written_ = 0;
        break;
      }
      active = true;
      written_ += sent;
      if (written_ < total) continue;
      if (message.done) sent_.push_back(std::move(message.done));
      outgoing_.pop_front();
      written_ = 0;
    }
    return active;
  }

  bool Read(const Transport::PacketHandler& on_packet) {
    size_t budget = kMostAtOnce;
    bool active = false;
    while (!has_closed_ && budget > 0) {
      const bool is_header = read_ < sizeof(MessageHeader);
      char* to = is_header ? reinterpret_cast<char*>(&incoming_) + read_ : payload_ + (read_ - sizeof(MessageHeader));
      const size_t wanted = (is_header ? sizeof(MessageHeader) : sizeof(MessageHeader) + incoming_.bytes) - read_;
      if (wanted > 0) {
        const ssize_t got = recv(socket_, to, wanted, 0);
        if (got == 0) Throw("it has closed the connection");
        if (got < 0 && WouldBlock()) break;
        if (got < 0) Throw(std::strerror(errno));
        active = true;
        read_ += got;
        budget -= std::min<size_t>(budget, got);
        if (static_cast<size_t>(got) < wanted) continue;
      }
      if (is_header) {
        Begin();
      } else {
        End(on_packet);
      }
    }
    return active;
  }

  // Finds a place for the payload whose header has arrived.
  void Begin() {
    switch (incoming_.kind) {
      case MessageHeader::kClose:
        has_closed_ = true;
        return;
      case MessageHeader::kPacket:
        if (incoming_.bytes > kMaxPacketBytes) Throw("it sends what no rank of this job sends");
        break;
      case MessageHeader::kBulk:
        if (auto place = places_.find(incoming_.tag); place != places_.end()) {
          CheckSize(place->second, incoming_.bytes);
          payload_ = static_cast<char*>(place->second.data);
          return;
        }
        break;
      default:
        Throw("it sends what no rank of this job sends");
    }
    try {
      buffer_.resize(incoming_.bytes);
    } catch (const std::exception&) {  // too long for a vector, or for the memory
      Throw("it sends a bulk transfer of " + std::to_string(incoming_.bytes) + " bytes, which no memory holds");
    }
    payload_ = buffer_.data();
  }

  void End(const Transport::PacketHandler& on_packet) {
    read_ = 0;
    if (incoming_.kind == MessageHeader::kPacket) {
      return on_packet(peer_, buffer_.data(), incoming_.bytes);
    }
    auto place = places_.find(incoming_.tag);
    if (place == places_.end()) {
      early_[incoming_.tag] = std::exchange(buffer_, {});
      return;
    }
    // It may have been given while its payload was on its way into our own buffer.
    if (payload_ != place->second.data) {
      CheckSize(place->second, incoming_.bytes);
      std::memcpy(place->second.data, buffer_.data(), incoming_.bytes);
    }
    received_.push_back(std::move(place->second.done));
    places_.erase(place);
  }

  static bool WouldBlock() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

  void CheckSize(const Place& place, size_t bytes) const {
    if (place.bytes != bytes) Throw("a bulk transfer has another size than its receiver");
  }

  [[noreturn]] void Throw(const std::string& reason) const {
    std::ostringstream text;
    text << "The connection to rank " << peer_ << " is lost: " << reason << '.';
    throw TransportError(text.str());
  }

  const int peer_;
  const int socket_;
  std::deque<Outgoing> outgoing_;
  size_t written_ = 0;  // bytes of the first outgoing message
  MessageHeader incoming_ = {};
  size_t read_ = 0;           // bytes of the incoming message
  char* payload_ = nullptr;   // where its payload goes
  std::vector<char> buffer_;  // for payloads that have no other place
  bool has_closed_ = false;   // the peer has left, as agreed
  std::map<uint32_t, Place> places_;
  std::map<uint32_t, std::vector<char>> early_;  // bulk payloads that were not asked for yet
  std::vector<Completion> sent_, received_;      // to be called back
};

class SocketTransport : public Transport {
 public:
  SocketTransport(int rank, const std::vector<int>& sockets) : rank_(rank), size_(static_cast<int>(sockets.size())) {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) {
        fcntl(sockets[peer], F_SETFL, fcntl(sockets[peer], F_GETFL) | O_NONBLOCK);
      }
      streams_.emplace_back(peer, sockets[peer]);
    }
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void SendPacket(int peer, std::vector<char> packet) override {
    Outgoing message = {{MessageHeader::kPacket, 0, packet.size()}, std::move(packet), nullptr, {}};
    message.data = message.packet.data();  // which moving a vector does not change
    streams_[peer].Send(std::move(message));
  }

  void SendBulk(int peer, uint32_t tag, const void* data, size_t bytes, int, Completion done) override {
    streams_[peer].Send({{MessageHeader::kBulk, tag, bytes}, {}, static_cast<const char*>(data), std::move(done)});
  }

  void ReceiveBulk(int peer, uint32_t tag, void* data, size_t bytes, Completion done) override {
    streams_[peer].Receive(tag, {data, bytes, std::move(done)});
  }

  bool Poll(const PacketHandler& on_packet) override {
    bool active = false;
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) active = streams_[peer].Poll(on_packet, [this](int peer) { Heard(peer); }) || active;
    }
    return active;
  }

  bool Flushed() const override {
    return std::all_of(streams_.begin(), streams_.end(), [](const Stream& stream) { return stream.Flushed(); });
  }

  void Close(bool agreed) override {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) streams_[peer].Close(agreed);
    }
  }

 private:
  const int rank_, size_;
  std::vector<Stream> streams_;
};

}  // namespace

std::unique_ptr<Transport> MakeSocketTransport(int rank, const std::vector<int>& sockets) {
  return std::make_unique<SocketTransport>(rank, sockets);
}

}  // namespace poseidon
