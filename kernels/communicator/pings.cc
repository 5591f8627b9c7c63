// Sends pings and answers them.
//
// Tests: tests/native/pings_test.cc.

#include "pings.h"

#include <memory>
#include <utility>

#include "exchange.h"
#include "text.h"

namespace poseidon {

void Pings::Start(int peer, size_t bytes, PingDone done) {
  const auto data = std::make_shared<std::vector<char>>(bytes);
  FrameHeader header = {};
  header.kind = FrameKind::kPing;
  header.step = next_++;
  header.length = bytes;
  waiting_.emplace(header.step, Ping{peer, Clock::now(), std::move(done)});
  sender_->Send(peer, header, data->data(), [data] {});
}

void Pings::OnPing(int peer, const FrameHeader& header) {
  if (!header.is_bulk()) return Answer(peer, header.step);
  const auto buffer = std::make_shared<BufferPool::Buffer>(buffers_.Take(header.length));
  transport_->ReceiveBulk(peer, header.tag, buffer->data.get(), header.length,
                          [this, peer, number = header.step, buffer] {
                            Answer(peer, number);
                            buffers_.Give(std::move(*buffer));
                          });
}

void Pings::Answer(int peer, uint64_t number) {
  FrameHeader header = {};
  header.kind = FrameKind::kPong;
  header.step = number;
  sender_->Send(peer, header, nullptr, [] {});
}

std::string Pings::OnPong(int peer, const FrameHeader& header) {
  const auto found = waiting_.find(header.step);
  if (found == waiting_.end() || found->second.peer != peer) {
    return Malformed(peer, Text("an answer to ping ", header.step, ", expected one that it was sent"));
  }
  const Ping ping = std::move(waiting_.extract(found).mapped());
  ping.done("", Seconds(Clock::now() - ping.start));
  return "";
}

std::optional<int> Pings::FindOverdue(Clock::time_point now, double seconds) const {
  for (const auto& [number, ping] : waiting_) {
    if (Seconds(now - ping.start) > seconds) return ping.peer;
  }
  return std::nullopt;
}

std::optional<int> Pings::FindLeftBehind(const std::vector<char>& has_left) const {
  for (const auto& [number, ping] : waiting_) {
    if (has_left[ping.peer]) return ping.peer;
  }
  return std::nullopt;
}

void Pings::Fail(const std::string& reason) {
  for (auto& [number, ping] : std::exchange(waiting_, {})) ping.done(reason, 0);
}

}  // namespace poseidon
