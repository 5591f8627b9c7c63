// Who has an accelerator of this host, in memory that all processes share which take turns on it.
//
// The processes of a job have a *turn* on all its accelerators at a time, by one number. The numbers come from one
// table, that of the job's first accelerator, so they have the same order on all hosts; on each accelerator, a turn
// begins when those of other jobs with smaller numbers have been passed there. docs/synchrony.md has the argument why
// no two jobs can wait for each other.
//
// A process that dies loses its lock in the table, by the kernel's doing, and is not waited for. Processes that it has
// forked have no part in it.

#ifndef POSEIDON_COMMUNICATOR_TURN_TABLE_H_
#define POSEIDON_COMMUNICATOR_TURN_TABLE_H_

#include <sys/types.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace poseidon {

// The number of a turn, and which numbers the other jobs were given before: what a rank must know to take its turn. It
// is sent as it lies in memory.
struct TurnGrant {
  static constexpr int kMostOthers = 15;

  struct Given {
    uint64_t job;  // 0: no more
    uint64_t number;
  };

  uint64_t number;
  std::array<Given, kMostOthers> others;
};

// What a process says of itself in the table.
struct TurnTaker {
  uint64_t job;           // its number, not 0; the same on all ranks
  int32_t rank;           // in the job
  uint64_t accelerators;  // a hash of the names of all accelerators of the job
  std::string program;    // for messages
};

enum class TurnState : uint32_t { kIdle, kWaiting, kHolding };

class TurnTable {
 public:
  // Another process that this one waits for.
  struct Holder {
    uint64_t job;
    int64_t pid;
    int32_t rank;
    std::string program;
  };

  // Enters this process into the table of an accelerator, a file, which it makes if there is none. Throws
  // std::runtime_error with a sentence for the user if that cannot be, or if another job there has other accelerators.
  TurnTable(const std::string& path, const std::string& name, const std::string& accelerator, const TurnTaker& taker);
  ~TurnTable();  // leaves it

  TurnTable(const TurnTable&) = delete;
  TurnTable& operator=(const TurnTable&) = delete;

  // Takes the next number for this process's job. Another process is not waited for more than `seconds`: one that was
  // stopped in here may then not know of this turn.
  TurnGrant Take(double seconds);

  // The process of another job that has to pass its turn before this one's begins, of several that with the smallest
  // number, for which all others wait; none if it may begin.
  std::optional<Holder> FindHolder(const TurnGrant& grant);

  // From now on, does not wait for a job until it has passed the turn in which it is.
  void Distrust(uint64_t job, const TurnGrant& grant);

  // Says what this process does, for others to read.
  void Show(TurnState state, uint64_t number);

  // Says that this process has ended all turns up to a number.
  void Pass(uint64_t number);

  // Changes of the table are counted, those of this process by `Wake`: `Wait` returns when there was one since `seen`,
  // or some time has passed.
  uint32_t changes() const;
  void Wake();
  void Wait(uint32_t seen, std::chrono::microseconds longest);

  // What the table at `path` says of the processes that are alive, as JSON: {"name", "accelerator", "takers": [{"job",
  // "pid", "rank", "program", "state": "idle", "waiting" or "holding", "number", "seconds": for how long}]}. Empty if
  // it is no such table, or one of another version.
  static std::string Describe(const std::string& path);

 private:
  struct Slot;
  struct Shared;

  void Enter(const std::string& path, const std::string& name, const std::string& accelerator, const TurnTaker& taker);
  bool IsAlive(int slot) const;

  const uint64_t job_;
  const pid_t pid_;
  int file_ = -1;
  Shared* shared_ = nullptr;
  int own_ = -1;                             // slot
  std::map<uint64_t, uint64_t> distrusted_;  // by job: the number that it has to pass before it is waited for again
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_TURN_TABLE_H_
