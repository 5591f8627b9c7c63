// The turns of the ranks of one job, whose accelerators each have a table of their own.

#include "turns.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
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
  bool is_last = true;

  ~RankWithTurns() {
    turns.reset();
    if (is_last) unlink(path.c_str());
  }
};

std::string PathOf(int rank, pid_t pid = getpid()) { return Text("/dev/shm/tf_poseidon-test-turns-", pid, "-", rank); }

// `pid` is that of the test.
std::vector<std::unique_ptr<RankWithTurns>> Join(int size, uint64_t job = 1, pid_t pid = getpid()) {
  std::vector<std::unique_ptr<RankWithTurns>> ranks;
  for (auto& transport : MakeLoopbackTransports(size, {})) {
    auto rank = std::make_unique<RankWithTurns>();
    const int number = static_cast<int>(ranks.size());
    rank->path = PathOf(number, pid);
    auto shared = std::make_shared<std::unique_ptr<Transport>>(std::move(transport));
    rank->communicator = std::make_unique<Communicator>([shared] { return std::move(*shared); }, Options(),
                                                        /*startup_timeout_s=*/30);
    auto table =
        std::make_unique<TurnTable>(rank->path, "name", Text("of rank ", number), TurnTaker{job, number, 1, "test"});
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
  ranks[0]->notes.Add("the other one is ready");
  ranks[1]->turns->Begin(0, 0, ranks[1]->notes.Note("begun"));
  ranks[1]->notes.WaitFor(1);
  EXPECT_EQ(ranks[0]->notes.WaitFor(2)[0], "the other one is ready", "");
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

#ifndef __SANITIZE_THREAD__  // which does not work in processes that were forked and start threads

namespace {

constexpr int kHosts = 3, kSteps = 6, kMostJobs = 3;

// By host: the job that has its accelerator, 0 for none.
struct Accelerators {
  std::atomic<uint64_t> job[kHosts];
  std::atomic<bool> is_dead[kMostJobs + 1];
};

void Exchange1(Communicator* communicator, const char* site) {
  Notes notes;
  float value = 1;
  Exchange exchange;
  exchange.site = site;
  exchange.count = 1;
  exchange.input = exchange.output = &value;
  communicator->Submit(exchange, notes.Note(""));
  EXPECT_EQ(notes.WaitFor(1)[0], "", "an exchange");
}

// Trains on one rank: some exchanges are within turns, others between them.
void Train(RankWithTurns* rank, int host, uint64_t job, uint32_t seed, Accelerators* accelerators) {
  std::minstd_rand random(seed);
  for (int step = 0; step < kSteps; ++step) {
    usleep(random() % 300);
    rank->turns->Begin(step, 0, rank->notes.Note(""));
    EXPECT_EQ(rank->notes.WaitFor(step + 1)[step], "", "a turn");
    const uint64_t other = accelerators->job[host].exchange(job);
    EXPECT(other == 0 || accelerators->is_dead[other % 10],
           Text("job ", other, " has the accelerator that job ", job, " got"));
    Exchange1(rank->communicator.get(), "moments");
    usleep(random() % 300);
    EXPECT_EQ(accelerators->job[host].exchange(0), job, "the accelerator is that of one job");
    rank->turns->End(step, 0);
    Exchange1(rank->communicator.get(), "gradient");
  }
}

void RunJob(uint64_t job, pid_t test, uint32_t seed, Accelerators* accelerators) {
  usleep(seed % 20000);
  auto ranks = Join(kHosts, job, test);
  std::vector<std::thread> threads;
  std::atomic<int> failed{0};
  for (int host = 0; host < kHosts; ++host) {
    ranks[host]->is_last = false;
    threads.emplace_back([&, host] {
      try {
        Train(ranks[host].get(), host, job, seed + host, accelerators);
      } catch (const std::exception& error) {
        fprintf(stderr, "job %d, host %d: %s\n", static_cast<int>(job), host, error.what());
        ++failed;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failed, 0, "ranks");
}

}  // namespace

TEST(JobsThatBeginAndDieAtAnyTimeNeverWaitForEachOther) {
  void* const memory = mmap(nullptr, sizeof(Accelerators), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto* const accelerators = new (memory) Accelerators();
  const pid_t test = getpid();
  std::minstd_rand random(1);
  for (int start = 0; start < 200; ++start) {
    const int jobs = 2 + start % 2;
    for (auto& job : accelerators->job) job = 0;
    for (auto& is_dead : accelerators->is_dead) is_dead = false;
    std::vector<pid_t> processes;
    for (int job = 1; job <= jobs; ++job) {
      const uint32_t seed = random();
      processes.push_back(fork());
      if (processes.back() != 0) continue;
      try {
        RunJob(10 * (start + 1) + job, test, seed, accelerators);  // never the same again
      } catch (const std::exception& error) {
        fprintf(stderr, "job %d: %s\n", job, error.what());
        _exit(1);
      }
      _exit(0);
    }
    const int dies = start % 4 == 0 ? static_cast<int>(random() % jobs) : -1;
    if (dies >= 0) {
      usleep(random() % 30000);
      accelerators->is_dead[dies + 1] = true;  // before it does, so that nobody finds its accelerator too early
      kill(processes[dies], SIGKILL);
    }
    for (int job = 0; job < jobs; ++job) {
      int status = -1;
      waitpid(processes[job], &status, 0);
      EXPECT(status == 0 || job == dies, Text("job ", job + 1, " of start ", start));
    }
  }
  for (int host = 0; host < kHosts; ++host) unlink(PathOf(host).c_str());
}

#endif  // __SANITIZE_THREAD__
