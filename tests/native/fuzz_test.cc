// Packets that no rank sends: those of an honest rank, changed at random, before and after the exchanges have begun.
//
// The sanitizers look for what they break. Without them, a rank that has failed must receive nothing more, and one that
// has not must not receive more than its exchanges hold.

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "gather_exchanges.h"
#include "job.h"
#include "protocol.h"

using namespace poseidon;

namespace {

constexpr int kPrograms = 3000, kEvents = 14;
constexpr size_t kCounts[] = {1, 700, 50000};  // floats of sums: in the packet, in the packet, in KV pairs of their own
constexpr size_t kFactorRows = 96, kFactorColumns = 200;

// One of two ranks, and what it exchanges: sums, either way of one, a broadcast, factors, and a ping.
class Exchanging {
 public:
  explicit Exchanging(int rank) : rank_(rank), factors_(kFactorRows * kFactorColumns, 1), broadcast_(3, 2) {
    Options options;
    options.kv_pair_bytes = 64 << 10;
    auto owned = std::make_unique<ScriptedTransport>(rank, 2);
    transport = owned.get();
    this->rank = std::make_unique<Rank>(std::move(owned), options);
    for (size_t count : kCounts) {
      values_.emplace_back(count, 1.0f);
      results_.emplace_back(count);
    }
  }

  // The number of exchanges that `Start` can start.
  static constexpr int kExchanges = static_cast<int>(std::size(kCounts)) + 5;

  void Start(int which) {
    Protocol& protocol = *rank->protocol;
    if (which < static_cast<int>(std::size(kCounts))) {
      protocol.Start(Of("sum " + std::to_string(which), &values_[which], &results_[which]), Ignored(), Clock::now());
    } else if (which == static_cast<int>(std::size(kCounts))) {
      Exchange exchange = Of("broadcast", &broadcast_, &broadcast_);
      exchange.root = 1;
      protocol.Start(exchange, Ignored(), Clock::now());
    } else if (which == static_cast<int>(std::size(kCounts)) + 1) {
      protocol.StartPing(1 - rank_, 100000, [](const std::string&, double) {});
    } else if (which > static_cast<int>(std::size(kCounts)) + 2) {
      const bool is_up = which == static_cast<int>(std::size(kCounts)) + 3;
      Exchange exchange = Of(is_up ? "up" : "down", is_up ? &whole_ : &shard_, is_up ? &shard_of_sum_ : &gathered_);
      exchange.count = static_cast<int64_t>(whole_.size());
      exchange.ways = is_up ? Ways::kUp : Ways::kDown;
      protocol.Start(exchange, Ignored(), Clock::now());
    } else {
      Factors factors;
      factors.site = "factors";
      factors.parts.push_back({factors_.data(), factors_.size() * sizeof(float), kFactorColumns * sizeof(float)});
      protocol.StartFactors(factors, [](const std::string&, GatheredFactors) {}, Clock::now());
    }
    protocol.Flush();
  }

  // Lets all transfers leave, each of which may start another one.
  void SendAll() {
    for (size_t i = 0; i < transport->sends.size(); ++i) {
      transport->Finish(ScriptedTransport::Bulk(transport->sends[i]));
      rank->protocol->Poll();
      rank->protocol->Flush();
    }
  }

  // What all exchanges together may receive: contributions and results of sums, the broadcast, and factors and pings of
  // the other rank, of which it says how large they are.
  size_t LargestReceived() const {
    size_t floats = broadcast_.size() + 2 * whole_.size();
    for (size_t count : kCounts) floats += 2 * count;
    return floats * sizeof(float) + kMostFactorBytes + kEvents * kMaxPingBytes;
  }
  static constexpr size_t kMostFactorBytes = size_t{1} << 31;

  ScriptedTransport* transport;
  std::unique_ptr<Rank> rank;

 private:
  static Done Ignored() {
    return [](const std::string&) {};
  }
  static Exchange Of(const std::string& site, std::vector<float>* value, std::vector<float>* result) {
    Exchange exchange;
    exchange.site = site;
    exchange.count = static_cast<int64_t>(value->size());
    exchange.input = value->data();
    exchange.output = result->data();
    return exchange;
  }

  const int rank_;
  std::vector<std::vector<float>> values_, results_;
  std::vector<float> factors_, broadcast_;
  std::vector<float> whole_ = std::vector<float>(50000, 1), shard_ = whole_, shard_of_sum_ = whole_, gathered_ = whole_;
};

// The frames that rank 1 sends to rank 0.
std::vector<Frame> HonestFrames() {
  Exchanging other(1), mine(0);
  for (int which = 0; which < Exchanging::kExchanges; ++which) {
    other.Start(which);
    mine.Start(which);
  }
  other.SendAll();
  mine.SendAll();
  std::vector<Frame> frames = other.transport->sent;
  for (Frame frame : mine.transport->sent) {  // and the results of what rank 0 contributes
    if (frame.header.kind != FrameKind::kContribution || frame.header.traffic == Traffic::kScatter) continue;
    frame.header.kind = FrameKind::kResult;
    frames.push_back(frame);
  }
  return frames;
}

// Changes one thing about a frame.
void Change(Frame* frame, std::mt19937* random) {
  static const uint64_t kInteresting[] = {0,
                                          1,
                                          63,
                                          64,
                                          kInlineBytes,
                                          kInlineBytes + 1,
                                          kMaxPacketBytes,
                                          uint64_t{1} << 31,
                                          uint64_t{1} << 32,
                                          uint64_t{1} << 62,
                                          uint64_t{1} << 63,
                                          std::numeric_limits<uint64_t>::max()};
  FrameHeader* header = &frame->header;
  const uint64_t number = kInteresting[(*random)() % std::size(kInteresting)];
  switch ((*random)() % 10) {
    case 0:
      header->kind = static_cast<FrameKind>((*random)() % 17);
      break;
    case 1:
      header->traffic = static_cast<Traffic>((*random)() % 6);
      break;
    case 2:
      header->count = number;
      break;
    case 3:
      header->offset = number;
      break;
    case 4:
      header->length = number;
      break;
    case 5:
      header->root = static_cast<int32_t>((*random)() % 5) - 2;
      break;
    case 6:
      header->sent_dtype = (*random)() % 8;
      break;
    case 7:
      header->step = (*random)() % 3;
      break;
    case 8:
      frame->payload.resize((*random)() % 200, 'x');
      break;
    default:
      reinterpret_cast<unsigned char*>(header)[(*random)() % sizeof(FrameHeader)] ^= 1u << ((*random)() % 8);
  }
}

}  // namespace

TEST(HostilePacketsEndTheJobOrAreTaken) {
  const std::vector<Frame> honest = HonestFrames();
  EXPECT(honest.size() >= 8, "frames of every kind");
  int failed = 0, received = 0;
  for (unsigned seed = 0; seed < kPrograms; ++seed) {
    std::mt19937 random(seed);
    const std::string where = "seed " + std::to_string(seed);
    Exchanging mine(0);
    ScriptedTransport& transport = *mine.transport;
    std::vector<int> to_start(Exchanging::kExchanges);
    for (int i = 0; i < Exchanging::kExchanges; ++i) to_start[i] = i;
    std::shuffle(to_start.begin(), to_start.end(), random);
    std::vector<Frame> frames = honest;
    std::shuffle(frames.begin(), frames.end(), random);
    size_t finished = 0, finished_sends = 0, received_at_failure = 0, bytes = 0;
    uint32_t tag = 0;
    for (int event = 0; event < kEvents; ++event) {
      const bool had_failed = mine.rank->protocol->has_failed();
      switch (random() % 4) {
        case 0:
          if (!to_start.empty() && !had_failed) {
            mine.Start(to_start.back());
            to_start.pop_back();
          }
          break;
        case 1:  // a transfer ends, after its bytes were written
          if (finished < transport.receives.size()) {
            const ScriptedTransport::Bulk bulk = transport.receives[finished++];
            std::memset(bulk.to, static_cast<int>(random() % 256), bulk.bytes);
            transport.Finish(bulk);
          }
          if (finished_sends < transport.sends.size()) transport.Finish(transport.sends[finished_sends++]);
          break;
        default: {
          std::vector<char> packet;
          for (unsigned count = 1 + random() % 2; count > 0; --count) {
            Frame frame = random() % 16 == 0 || frames.empty() ? honest[random() % honest.size()] : frames.back();
            if (!frames.empty()) frames.pop_back();
            if (frame.header.is_bulk()) frame.header.tag = tag++;
            if (random() % 4 == 0) Change(&frame, &random);
            const std::vector<char> more = Packet(frame.header, frame.payload);
            packet.insert(packet.end(), more.begin(), more.end());
          }
          if (random() % 32 == 0) packet.resize(packet.size() - std::min<size_t>(packet.size() - 1, random() % 70));
          transport.Arrive(1, std::move(packet));
        }
      }
      mine.rank->protocol->Poll();
      mine.rank->protocol->Flush();
      if (had_failed) {
        EXPECT_EQ(transport.receives.size(), received_at_failure, where);
      }
      received_at_failure = transport.receives.size();
    }
    for (const ScriptedTransport::Bulk& bulk : transport.receives) bytes += bulk.bytes;
    EXPECT(bytes <= mine.LargestReceived(), where);
    EXPECT_EQ(mine.rank->protocol->has_failed(), !mine.rank->failure.empty(), where);
    failed += mine.rank->protocol->has_failed();
    received += static_cast<int>(transport.receives.size());
  }
  // Most end the job, but not all: those would not get far.
  EXPECT(failed > kPrograms / 4 && failed < kPrograms, std::to_string(failed) + " of " + std::to_string(kPrograms));
  EXPECT(received > kPrograms / 10, std::to_string(received) + " transfers");
}
