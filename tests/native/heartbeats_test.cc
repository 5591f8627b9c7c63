// Who notices that a rank is silent, and when.

#include "heartbeats.h"

#include <chrono>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "job.h"

using namespace poseidon;
using std::chrono::milliseconds;

namespace {

// Ranks that look ten times a second; those in `lost` stop to tell that they are alive after a second.
struct Watched {
  Watched(int size, std::set<int> lost) : size(size), lost(std::move(lost)) {
    for (int rank = 0; rank < size; ++rank) ranks.emplace_back(rank, size, 10, start);
  }

  // Returns the ranks that anybody has found silent until `seconds` have passed.
  std::set<int> Run(int seconds) {
    std::set<int> found;
    for (; now < start + std::chrono::seconds(seconds); now += milliseconds(100)) {
      for (int rank = 0; rank < size; ++rank) {
        if (lost.count(rank) && now > start + milliseconds(1000)) continue;
        for (int peer : ranks[rank].Due(now)) ranks[peer].Heard(rank, now), ++beats;
        for (int peer : ranks[rank].Silent(now)) found.insert(peer);
      }
    }
    return found;
  }

  const Clock::time_point start{};
  Clock::time_point now = start;
  const int size;
  const std::set<int> lost;
  std::vector<Heartbeats> ranks;
  int beats = 0;
};

}  // namespace

TEST(SomebodyNoticesWhateverRanksAreLost) {
  for (int size = 1; size <= 6; ++size) {
    for (int bits = 0; bits < (1 << size) - 1; ++bits) {
      std::set<int> lost;
      for (int rank = 0; rank < size; ++rank) {
        if (bits >> rank & 1) lost.insert(rank);
      }
      Watched watched(size, lost);
      EXPECT(watched.Run(9).empty(), "before the limit");
      const std::set<int> found = watched.Run(14);
      EXPECT_EQ(found.empty(), lost.empty(), std::to_string(size) + " ranks, lost " + std::to_string(bits));
      for (int rank : found) EXPECT(lost.count(rank), "a rank that is alive");
    }
  }
}

TEST(ALargeJobSendsFewHeartbeats) {
  Watched watched(256, {});
  EXPECT(watched.Run(20).empty(), "");
  EXPECT_EQ(watched.beats, 256 * 8 * 19, "to 8 ranks, every second");
}

TEST(ARankThatWasFrozenItselfDoesNotTakeOthersForLost) {
  Watched watched(2, {});
  EXPECT(watched.Run(5).empty(), "");
  watched.now += std::chrono::seconds(60);
  EXPECT(watched.Run(80).empty(), "");
}

namespace {

// The heartbeat of a rank of the same job.
FrameHeader Alive(const Options& options, const Transport& transport) {
  const std::vector<int> nodes = NodesOf(options, transport);
  FrameHeader header = {};
  header.kind = FrameKind::kAlive;
  header.layout = LayoutDigest(WithServers(options, nodes), nodes);
  return header;
}

}  // namespace

TEST(ARankWithOtherServersIsKnownByItsHeartbeat) {
  Options options, other;
  other.dedicated_servers = 1;
  auto owned = std::make_unique<ScriptedTransport>(0, 3);
  ScriptedTransport* transport = owned.get();
  Rank rank(std::move(owned), options);
  transport->Arrive(2, Packet(Alive(options, *transport)));
  rank.protocol->Poll();
  EXPECT_EQ(rank.failure, "", "the same servers");
  transport->Arrive(2, Packet(Alive(other, *transport)));
  rank.protocol->Poll();
  EXPECT_HOLDS(rank.failure, "Rank 2 and rank 0 cut tensors differently: give PoseidonStrategy the same servers");
}

TEST(ASilentRankEndsTheJob) {
  Options options;
  options.heartbeat_timeout_s = 0.2;
  auto owned = std::make_unique<ScriptedTransport>(0, 3);
  ScriptedTransport* transport = owned.get();
  Rank rank(std::move(owned), options);
  std::set<int> told;
  const auto begin = Clock::now();
  for (int turn = 0; turn < 500 && rank.failure.empty(); ++turn) {
    std::this_thread::sleep_for(milliseconds(10));
    rank.protocol->CheckDeadlines();
    // Rank 1 computes, and is alive. So is rank 2 at first, whose heartbeats wait behind a long transfer.
    transport->Arrive(1, Packet(Alive(options, *transport)));
    if (Seconds(Clock::now() - begin) < 0.5) {
      EXPECT_EQ(rank.failure, "", "bytes of rank 2 arrive");
      transport->ArrivePart(2);
    }
    rank.protocol->Poll();
  }
  EXPECT_HOLDS(rank.failure, "Rank 0 has heard nothing of rank 2 for 0.2 s: the host is down, frozen or cannot be");
  for (const Frame& frame : transport->sent) {
    if (frame.header.kind == FrameKind::kAlive) told.insert(frame.peer);
  }
  EXPECT(told == std::set<int>({1, 2}), "it has told the others that it is alive");
  rank.protocol->Flush();
  EXPECT(transport->sent.back().header.kind == FrameKind::kAbort, "and then that the job has ended");
}

TEST(NothingFollowsAGoodbye) {
  Options options;
  options.heartbeat_timeout_s = 0.2;
  auto owned = std::make_unique<ScriptedTransport>(0, 3);
  ScriptedTransport* transport = owned.get();
  Rank rank(std::move(owned), options);
  FrameHeader goodbye = {};
  goodbye.kind = FrameKind::kGoodbye;
  const FrameHeader alive = Alive(options, *transport);
  transport->Arrive(1, Packet(goodbye));
  rank.protocol->Poll();
  rank.protocol->SayGoodbye();
  // Rank 2 trains on; rank 1, which has left, is not silent.
  for (int turn = 0; turn < 50; ++turn) {
    std::this_thread::sleep_for(milliseconds(10));
    transport->Arrive(2, Packet(alive));
    rank.protocol->Poll();
    rank.protocol->CheckDeadlines();
    rank.protocol->Flush();
  }
  EXPECT_EQ(rank.failure, "", "");
  EXPECT_EQ(transport->sent.size(), size_t{2}, "the goodbyes");
  // It still watches over rank 2.
  for (int turn = 0; turn < 50; ++turn) {
    std::this_thread::sleep_for(milliseconds(10));
    rank.protocol->CheckDeadlines();
  }
  EXPECT_HOLDS(rank.failure, "Rank 0 has heard nothing of rank 2 for 0.2 s");
}
