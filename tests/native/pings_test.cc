// Pings: they are answered beside whatever else is exchanged, and end when the job or the other rank does.

#include "pings.h"

#include <string>
#include <vector>

#include "check.h"
#include "job.h"

using namespace poseidon;

namespace {

// Rank 0's ping to rank 1 of 3, and the reason with which it ends.
struct Pinging {
  explicit Pinging(Options options = {}) {
    auto owned = std::make_unique<ScriptedTransport>(0, 3);
    transport = owned.get();
    rank = std::make_unique<Rank>(std::move(owned), options);
    rank->protocol->StartPing(1, 0, [this](const std::string& error, double) {
      reason = error;
      ++ends;
    });
    rank->protocol->Flush();
  }

  void Take(FrameHeader header, int peer = 1) {
    header.layout = transport->sent.back().header.layout;  // of its own ping
    transport->Arrive(peer, Packet(header));
    rank->protocol->Poll();
  }

  ScriptedTransport* transport;
  std::unique_ptr<Rank> rank;
  std::string reason = "none";
  int ends = 0;
};

}  // namespace

TEST(EveryRankAnswersPingsBesideAnExchange) {
  for (const std::vector<int>& nodes : {std::vector<int>{0, 1}, {0, 0, 1, 1}}) {
    const int size = static_cast<int>(nodes.size());
    Job job(size, nodes, {}, size);
    std::vector<std::vector<float>> values(size, std::vector<float>(100001, 1));
    int done = 0, expected = 0;
    for (int rank = 0; rank < size; ++rank) {
      job.protocol(rank).Start(
          SumInPlace("x", &values[rank]), [&](const std::string& error) { done += error.empty(); }, Clock::now());
      ++expected;
      for (int peer = 0; peer < size; ++peer) {
        if (peer == rank) continue;
        for (size_t bytes : {size_t{0}, size_t{1}, kInlineBytes, kInlineBytes + 1, size_t{3} << 20}) {
          job.protocol(rank).StartPing(peer, bytes, [&](const std::string& error, double seconds) {
            EXPECT_EQ(error, "", "a ping");
            EXPECT(seconds >= 0, "a time before the ping");
            ++done;
          });
          ++expected;
        }
      }
    }
    job.Run([&] { return done == expected; }, "pings");
    for (int rank = 0; rank < size; ++rank) {
      EXPECT(values[rank] == std::vector<float>(100001, static_cast<float>(size)), "the sum");
      EXPECT(!job.protocol(rank).is_waiting(), "nothing is waited for");
    }
  }
}

TEST(APingIsAnsweredWhenAllOfItIsThere) {
  ScriptedTransport* transport = new ScriptedTransport(0, 2);
  Rank rank(std::unique_ptr<Transport>(transport), {});
  rank.protocol->StartPing(1, 0, [](const std::string&, double) {});
  rank.protocol->Flush();
  FrameHeader header = {};
  header.kind = FrameKind::kPing;
  header.step = 7;
  header.length = kInlineBytes + 1;
  header.layout = transport->sent.back().header.layout;
  transport->Arrive(1, Packet(header));
  rank.protocol->Poll();
  rank.protocol->Flush();
  EXPECT_EQ(transport->sent.size(), size_t{1}, "its own ping alone");
  EXPECT_EQ(transport->receives.size(), size_t{1}, "the bytes of the other");
  transport->Finish(ScriptedTransport::Bulk(transport->receives[0]));
  rank.protocol->Poll();
  rank.protocol->Flush();
  EXPECT_EQ(transport->sent.size(), size_t{2}, "the answer");
  EXPECT(transport->sent[1].header.kind == FrameKind::kPong && transport->sent[1].header.step == 7, "the answer");
}

TEST(WrongPingsAndAnswersEndTheJob) {
  FrameHeader pong = {}, ping = {};
  pong.kind = FrameKind::kPong;
  ping.kind = FrameKind::kPing;
  struct Case {
    FrameHeader header;
    const char* says;
    int peer = 1;
  };
  std::vector<Case> cases(4, {pong, ""});
  cases[0].header.step = 1, cases[0].says = "an answer to ping 1, expected one that it was sent";
  cases[1].header.length = 3, cases[1].says = "an answer of 3 bytes to a ping, expected none";
  cases[2].header = ping, cases[2].header.length = kMaxPingBytes + 1, cases[2].says = "a ping of 67108865 bytes";
  cases[3].peer = 2, cases[3].says = "an answer to ping 0, expected one that it was sent";
  for (const Case& each : cases) {
    Pinging pinging;
    FrameHeader header = each.header;
    header.layout = pinging.transport->sent.back().header.layout;
    const std::string payload(header.is_bulk() ? 0 : header.length, 'x');
    pinging.transport->Arrive(each.peer, Packet(header, payload));
    pinging.rank->protocol->Poll();
    EXPECT_HOLDS(pinging.rank->failure, each.says);
    EXPECT_EQ(pinging.reason, pinging.rank->failure, "why the ping has ended");
    EXPECT(pinging.transport->receives.empty(), "nothing is received");
  }
  Pinging pinging;
  pinging.Take(pong);
  EXPECT_EQ(pinging.reason, "", "answered");
  pinging.Take(pong);
  EXPECT_HOLDS(pinging.rank->failure, "an answer to ping 0");
  EXPECT_EQ(pinging.ends, 1, "a ping ends once");
}

TEST(ARankThatDoesNotAnswerIsNamed) {
  Options options;
  options.timeout_s = 0;
  Pinging late(options);
  late.rank->protocol->CheckDeadlines();
  EXPECT_HOLDS(late.reason, "Rank 0 waited 0 s for rank 1 to answer a ping. Look at the output of rank 1");

  Pinging left;
  FrameHeader goodbye = {};
  goodbye.kind = FrameKind::kGoodbye;
  left.Take(goodbye);
  EXPECT_HOLDS(left.reason, "a ping");
  EXPECT_EQ(left.ends, 1, "it has ended");
  left.rank->protocol->StartPing(1, 0, [&](const std::string& error, double) { EXPECT_EQ(error, left.reason, ""); });
}
