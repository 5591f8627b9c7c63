// The turns of this process on its accelerator, where several jobs share it.
//
// A turn lasts from the first op of a step to the last gradient's hand-over. First all ranks say that they are ready
// for it; then the one that has the job's first accelerator takes a number, and tells the others; each then begins it
// when the table of its own accelerator says so. What ranks tell each other are exchanges like all others.

#ifndef POSEIDON_COMMUNICATOR_TURNS_H_
#define POSEIDON_COMMUNICATOR_TURNS_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "communicator.h"
#include "turn_table.h"

namespace poseidon {

class Turns : public std::enable_shared_from_this<Turns> {
 public:
  // `coordinator` is the rank that takes numbers. Another job is waited for at most `deadline_s` seconds in a turn;
  // then `warn` is told whose turn it is.
  Turns(Communicator* communicator, std::unique_ptr<TurnTable> table, int coordinator, double deadline_s,
        std::function<void(const std::string&)> warn);
  ~Turns();

  Turns(const Turns&) = delete;
  Turns& operator=(const Turns&) = delete;

  // Begins and ends no more turns; before the communicator is left.
  void Stop();

  // Calls `done` when this process has turn `turn` of a step, with why the job has failed if it has. Several ops may
  // ask for the same turn. All turns of former steps are over.
  void Begin(int64_t step, int64_t turn, Done done);

  // Ends it, when `is_done` says so: what was put into a GPU's stream before.
  void End(int64_t step, int64_t turn, std::function<bool()> is_done = nullptr);

  // Ends all turns, after an error.
  void EndAll();

  // {"count": turns, "agreeing_seconds": of waiting for ranks of the same job, "waiting_seconds": for other jobs,
  // "holding_seconds"}.
  std::string Json() const;

 private:
  struct Turn {
    int64_t step, turn;
    Clock::time_point asked, granted, begun, blocked;
    std::vector<Done> waiting;  // for its beginning
    TurnGrant grant = {};       // number 0 before the coordinator has taken one
    uint64_t blocker = 0;       // the job for which it waits since `blocked`
    bool has_begun = false, wants_end = false;
    std::function<bool()> is_done;  // whether it can end, if it wants to; null: it can
  };

  void Ask(const std::shared_ptr<Turn>& turn);
  void Tell(const std::shared_ptr<Turn>& turn, const TurnGrant& grant);
  void Fail(const std::string& error);
  void EndAllBut(int64_t step);
  void Serve();
  bool TakeNumbers();
  bool EndDone();
  bool BeginNext(bool* is_blocked);
  void Finish(std::list<std::shared_ptr<Turn>>::iterator turn);

  Communicator* const communicator_;
  const std::unique_ptr<TurnTable> table_;
  const int coordinator_;
  const double deadline_s_;
  const std::function<void(const std::string&)> warn_;

  mutable std::mutex mutex_;                 // guards what follows
  std::list<std::shared_ptr<Turn>> turns_;   // that are not over, in the order in which they were asked for
  std::deque<std::shared_ptr<Turn>> ready_;  // for which this rank has to take a number
  uint64_t last_ = 0;                        // the largest number of a turn that is over
  uint64_t count_ = 0;
  double agreeing_s_ = 0, waiting_s_ = 0, holding_s_ = 0;
  bool has_failed_ = false, stop_ = false;

  std::thread thread_;
};

// The turns of this process; null where no job shares its accelerator.
std::shared_ptr<Turns> ProcessTurns();
void SetProcessTurns(std::shared_ptr<Turns> turns);

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_TURNS_H_
