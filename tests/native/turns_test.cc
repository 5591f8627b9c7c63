// The turns of the ranks of one job, whose accelerators each have a table of their own.

#include "turns.h"

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "check.h"
#include "communicator.h"
#include "loopback_transport.h"
#include "text.h"

using namespace poseidon;

namespace {

// What has happened, in order; another thread waits for it.
class Notes {
 public:
  Done Note(const std::string& what) {
    return [this, what](const std::string& error) { Add(error.empty() ? what : what + ": " + error); };
  }
  void Add(const std::string& what) {
    std::lock_guard<std::mutex> lock(mutex_);
    notes_.push_back(what);
    changed_.notify_all();
  }
  std::vector<std::string> WaitFor(size_t count) {
    std::unique_lock<std::mutex> lock(mutex_);
    EXPECT(changed_.wait_for(lock, std::chrono::seconds(30), [&] { return notes_.size() >= count; }), "turns hang");
    return notes_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> notes_;
};

struct RankWithTurns {
  std::string path;
  std::unique_ptr<Communicator> communicator;
  std::shared_ptr<Turns> turns;
  Notes notes;

  ~RankWithTurns() {
    turns.reset();
    unlink(path.c_str());
  }
};

std::vector<std::unique_ptr<RankWithTurns>> Join(int size) {
  std::vector<std::unique_ptr<RankWithTurns>> ranks;
  for (auto& transport : MakeLoopbackTransports(size, {})) {
    auto rank = std::make_unique<RankWithTurns>();
    const int number = static_cast<int>(ranks.size());
    rank->path = Text("/dev/shm/tf_poseidon-test-turns-", getpid(), "-", number);
    auto shared = std::make_shared<std::unique_ptr<Transport>>(std::move(transport));
    rank->communicator = std::make_unique<Communicator>([shared] { return std::move(*shared); }, Options(),
                                                        /*startup_timeout_s=*/30);
    auto table =
        std::make_unique<TurnTable>(rank->path, "name", Text("of rank ", number), TurnTaker{1, number, 1, "test"});
    rank->turns = std::make_shared<Turns>(
        rank->communicator.get(), std::move(table), /*coordinator=*/size - 1,
        /*deadline_s=*/10, [&notes = rank->notes](const std::string& text) { notes.Add("warning: " + text); });
    ranks.push_back(std::move(rank));
  }
  return ranks;
}

}  // namespace

TEST(ATurnBeginsWhenAllRanksAreReadyAndForAllOpsThatWait) {
  auto ranks = Join(3);
  for (int step = 0; step < 20; ++step) {
    for (auto& rank : ranks) {
      rank->turns->Begin(step, 0, rank->notes.Note(Text("first of ", step)));
      rank->turns->Begin(step, 0, rank->notes.Note(Text("second of ", step)));
    }
    for (auto& rank : ranks) {
      const auto notes = rank->notes.WaitFor(2 * (step + 1));
      EXPECT_EQ(notes[2 * step], Text("first of ", step), "");
      EXPECT_EQ(notes[2 * step + 1], Text("second of ", step), "");
      if (step % 2) rank->turns->End(step, 0);  // otherwise the next step does
    }
  }
  for (auto& rank : ranks) {
    rank->turns->EndAll();
    EXPECT_HOLDS(rank->turns->Json(), "{\"count\": 20,");
  }
}

TEST(NoTurnBeginsBeforeTheLastRankIsReady) {
  auto ranks = Join(2);
  ranks[0]->turns->Begin(0, 0, ranks[0]->notes.Note("begun"));
  usleep(50000);
  ranks[1]->notes.Add("ready");
  ranks[1]->turns->Begin(0, 0, [&](const std::string&) { ranks[1]->notes.Add("begun"); });
  EXPECT_EQ(ranks[1]->notes.WaitFor(2)[1], "begun", "");
  EXPECT_EQ(ranks[0]->notes.WaitFor(1).size(), size_t{1}, "only once");
}

TEST(ATurnOnAGpuEndsWhenItsWorkIsDone) {
  auto ranks = Join(1);
  RankWithTurns& rank = *ranks[0];
  std::atomic<bool> is_done{false};
  rank.turns->Begin(0, 0, rank.notes.Note("begun"));
  rank.notes.WaitFor(1);
  rank.turns->End(0, 0, [&] { return is_done.load(); });
  usleep(20000);
  const std::string before = rank.turns->Json();
  EXPECT_HOLDS(before, "\"holding_seconds\": 0}");
  is_done = true;
  for (int i = 0; i < 1000 && rank.turns->Json() == before; ++i) usleep(1000);
  EXPECT(rank.turns->Json() != before, "it has ended");
}

TEST(TurnsOfAFailedJobEndWithItsReason) {
  auto ranks = Join(2);
  ranks[0]->turns->Begin(0, 0, ranks[0]->notes.Note("turn"));  // for which rank 1 is never ready
  ranks[1]->communicator->Abort("it is over", 10);
  EXPECT_EQ(ranks[0]->notes.WaitFor(1)[0], "turn: it is over", "");
}
