// The table of an accelerator, among processes: forked ones, since the kernel's locks are theirs.

#include "turn_table.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "text.h"

using namespace poseidon;
using std::chrono::microseconds;

namespace {

constexpr uint64_t kAccelerators = 7;

// A path that no other test has.
std::string NewPath() {
  static int number = 0;
  const std::string path = Text("/dev/shm/tf_poseidon-test-", getpid(), "-", number++);
  unlink(path.c_str());
  return path;
}

struct Path {
  ~Path() { unlink(text.c_str()); }
  const std::string text = NewPath();
};

std::unique_ptr<TurnTable> Enter(const Path& path, uint64_t job, uint64_t accelerators = kAccelerators) {
  const TurnTaker taker = {job, static_cast<int32_t>(job), accelerators, Text("job ", job)};
  return std::make_unique<TurnTable>(path.text, "name", "accelerator", taker);
}

// Memory that forked processes share, all zeros.
template <typename T>
T* Shared() {
  void* const memory = mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  EXPECT(memory != MAP_FAILED, "shared memory");
  return new (memory) T();
}

pid_t Fork(const std::function<void()>& run) {
  const pid_t child = fork();
  if (child != 0) return child;
  try {
    run();
  } catch (...) {
    _exit(1);
  }
  _exit(0);
}

void ExpectEnds(const std::vector<pid_t>& children) {
  for (pid_t child : children) {
    int status = -1;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0, "a process");
  }
}

void WaitFor(const std::function<bool()>& is_so) {
  for (int i = 0; i < 100000 && !is_so(); ++i) usleep(100);
  EXPECT(is_so(), "waited for 10 s");
}

}  // namespace

TEST(TurnsOfJobsExcludeEachOtherInTheOrderOfTheirNumbers) {
  struct State {
    std::atomic<int> inside{0}, wrong{0}, turns{0}, ready{0};
    std::atomic<uint64_t> last{0};
  };
  constexpr int kJobs = 3, kTurns = 300;
  const Path path;
  auto* const state = Shared<State>();
  std::vector<pid_t> children;
  for (uint64_t job = 1; job <= kJobs; ++job) {
    children.push_back(Fork([&, job] {
      const auto table = Enter(path, job);
      ++state->ready;
      WaitFor([&] { return state->ready == kJobs; });
      for (int turn = 0; turn < kTurns; ++turn) {
        const TurnGrant grant = table->Take(10);
        for (uint32_t seen = table->changes(); table->FindHolder(grant); seen = table->changes()) {
          table->Wait(seen, microseconds(20000));
        }
        if (++state->inside != 1 || state->last.exchange(grant.number) >= grant.number) ++state->wrong;
        ++state->turns;
        --state->inside;
        table->Pass(grant.number);
      }
    }));
  }
  ExpectEnds(children);
  EXPECT_EQ(state->wrong, 0, "two turns at a time, or in another order");
  EXPECT_EQ(state->turns, kJobs * kTurns, "turns");
  EXPECT_EQ(state->last, uint64_t{kJobs * kTurns}, "every number is taken once");
}

TEST(WhoHoldsTheAcceleratorIsWaitedForWhileItLives) {
  const Path path;
  auto* const number = Shared<std::atomic<uint64_t>>();
  const pid_t child = Fork([&] {
    const auto table = Enter(path, 2);
    const TurnGrant grant = table->Take(10);
    table->Show(TurnState::kHolding, grant.number);
    *number = grant.number;
    for (;;) pause();
  });
  WaitFor([&] { return *number > 0; });
  const auto table = Enter(path, 1);
  const TurnGrant grant = table->Take(10);
  EXPECT(grant.number > *number, "the later number");
  const auto holder = table->FindHolder(grant);
  EXPECT(holder, "it lives");
  EXPECT_EQ(holder->pid, child, "its process");
  EXPECT_EQ(holder->program, "job 2", "its program");
  const std::string described = TurnTable::Describe(path.text);
  EXPECT_HOLDS(described, Text("\"job\": 2, \"pid\": ", child,
                               ", \"rank\": 2, \"program\": \"job 2\", \"state\": "
                               "\"holding\", \"number\": 1"));
  EXPECT_HOLDS(described, "{\"name\": \"name\", \"accelerator\": \"accelerator\", \"takers\": [");
  EXPECT_HOLDS(described, "{\"job\": 1, ");
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT(!table->FindHolder(grant), "it has died");
  EXPECT(TurnTable::Describe(path.text).find("\"job\": 2") == std::string::npos, "it is gone");
}

TEST(ForkedProcessesAndOthersThatReadTheTableChangeNothing) {
  const Path path;
  auto holder = Enter(path, 2);
  holder->Show(TurnState::kHolding, holder->Take(10).number);
  const pid_t child = Fork([] {
    for (;;) pause();
  });
  const auto table = Enter(path, 1);
  const TurnGrant grant = table->Take(10);
  TurnTable::Describe(path.text);  // which closes the file that it has opened
  EXPECT(table->FindHolder(grant), "it has its lock");
  holder.reset();
  EXPECT(!table->FindHolder(grant), "nobody has it any more");
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

TEST(WhoIsNotTrustedIsWaitedForAgainAfterItsTurn) {
  struct State {
    std::atomic<uint64_t> number{0};
    std::atomic<int> wanted{0}, done{0};
  };
  const Path path;
  auto* const state = Shared<State>();
  const pid_t child = Fork([&] {
    const auto table = Enter(path, 2);
    uint64_t number = state->number = table->Take(10).number;
    WaitFor([&] { return state->wanted == 1; });
    table->Pass(number);
    number = state->number = table->Take(10).number;
    state->done = 1;
    WaitFor([&] { return state->wanted == 2; });
    table->Pass(number);
  });
  WaitFor([&] { return state->number > 0; });
  const auto table = Enter(path, 1);
  const TurnGrant first = table->Take(10);
  EXPECT(table->FindHolder(first), "it has a turn");
  table->Distrust(2, first);
  EXPECT(!table->FindHolder(first), "it is not waited for");
  EXPECT(!table->FindHolder(table->Take(10)), "nor by a later turn");
  state->wanted = 1;
  WaitFor([&] { return state->done == 1; });
  EXPECT(table->FindHolder(table->Take(10)), "it has given back its turn, and has another one");
  state->wanted = 2;
  ExpectEnds({child});
}

TEST(OfSeveralTheFirstIsWaitedFor) {
  const Path path;
  // Its place in the table does not matter.
  const auto second = Enter(path, 2), first = Enter(path, 3), third = Enter(path, 1);
  const uint64_t of_first = first->Take(10).number, of_second = second->Take(10).number;
  const TurnGrant grant = third->Take(10);
  EXPECT_EQ(third->FindHolder(grant)->job, uint64_t{3}, "for which the second waits, too");
  first->Pass(of_first);
  EXPECT_EQ(third->FindHolder(grant)->job, uint64_t{2}, "");
  second->Pass(of_second);
  EXPECT(!third->FindHolder(grant), "all have passed");
}

TEST(WhoEntersWhileAnotherLeavesIsWaitedFor) {
  const Path path;
  Enter(path, 1);
  // As a process that has left its slot, the first one, but not closed the file.
  constexpr off_t kFirstSlotLock = 16;
  const int file = open(path.text.c_str(), O_RDWR);
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = kFirstSlotLock;
  lock.l_len = 1;
  EXPECT_EQ(fcntl(file, F_OFD_SETLK, &lock), 0, "the lock of a slot");
  const auto first = Enter(path, 2);
  first->Take(10);
  close(file);
  const auto second = Enter(path, 3);
  EXPECT(second->FindHolder(second->Take(10)), "it has a lock of its own");
}

TEST(ATableWhoseMakerHasDiedIsMadeAgain) {
  const Path path;
  Enter(path, 1);
  FILE* const file = fopen(path.text.c_str(), "r+");
  const uint64_t nothing = 0;
  fwrite(&nothing, sizeof(nothing), 1, file);  // the last that is written of a new table
  fclose(file);
  const auto table = Enter(path, 1);
  EXPECT_HOLDS(TurnTable::Describe(path.text), "{\"name\": \"name\", ");
}

TEST(TablesRefuseWhoDoesNotFit) {
  struct Row {
    const char* what;
    std::function<void(const Path&)> prepare;
    uint64_t accelerators;
    const char* words;
  };
  const Row rows[] = {
      {"other accelerators", [](const Path&) {}, kAccelerators + 1,
       "(job 2) takes turns by this name with a job on other"},
      {"no table",
       [](const Path& path) {
         FILE* const file = fopen(path.text.c_str(), "w");
         fputs("text", file);
         fclose(file);
       },
       kAccelerators, "is no table of this version of tf_poseidon"},
  };
  for (const Row& row : rows) {
    const Path path;
    row.prepare(path);
    auto* const ready = Shared<std::atomic<int>>();
    const pid_t child = Fork([&] {
      if (row.accelerators == kAccelerators) pause();
      const auto table = Enter(path, 2);
      *ready = 1;
      for (;;) pause();
    });
    if (row.accelerators != kAccelerators) WaitFor([&] { return *ready == 1; });
    std::string error;
    try {
      Enter(path, 1, row.accelerators);
    } catch (const std::runtime_error& e) {
      error = e.what();
    }
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    EXPECT_HOLDS(error, row.words);
  }
}

TEST(ATableHasPlacesForAsManyJobsAsAGrantNames) {
  const Path path;
  auto* const ready = Shared<std::atomic<int>>();
  std::vector<pid_t> children;
  for (int job = 1; job <= TurnGrant::kMostOthers + 1; ++job) {
    children.push_back(Fork([&, job] {
      const auto table = Enter(path, job);
      table->Take(10);
      ++*ready;
      for (;;) pause();
    }));
    WaitFor([&] { return *ready == job; });
  }
  std::string error;
  try {
    Enter(path, 100);
  } catch (const std::runtime_error& e) {
    error = e.what();
  }
  EXPECT_HOLDS(error, "has 15 other jobs on accelerator, expected fewer");
  kill(children.back(), SIGKILL);
  waitpid(children.back(), nullptr, 0);
  children.pop_back();
  const auto table = Enter(path, 100);  // the place of one that has died
  const TurnGrant grant = table->Take(10);
  for (const auto& given : grant.others) {
    EXPECT(given.number > 0 && given.number < grant.number && given.job <= TurnGrant::kMostOthers, "all others");
  }
  for (pid_t child : children) {
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
  }
}
