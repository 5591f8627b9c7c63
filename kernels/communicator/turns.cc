// Asks for turns, and begins and ends them. A thread of its own waits for other processes: the progress thread never
// waits, and ops give back theirs.
//
// Tests: tests/native/turns_test.cc, tests/training/test_crossover.py, tests/unit/test_turns_model.py.

#include "turns.h"

#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <limits>
#include <utility>

#include "text.h"

namespace poseidon {
namespace {

using std::chrono::microseconds;

constexpr char kReady[] = "turns/ready", kGrant[] = "turns/grant";

constexpr microseconds kPauseForDevice{100};    // nothing tells that a GPU is done
constexpr microseconds kPauseForOthers{20000};  // nothing tells that a process has died
constexpr microseconds kPauseIdle{500000};

// An exchange of `memory` that belongs to no step, as its statistics and timelines see it. One that a failed step has
// begun may still be in flight.
Exchange OfTurns(const char* site, void* memory) {
  Exchange exchange;
  exchange.site = site;
  exchange.input = exchange.output = memory;
  exchange.is_clocked = true;
  exchange.is_counted = false;
  return exchange;
}

std::mutex process_turns_mutex;
std::shared_ptr<Turns>& OfProcess() {
  static auto* turns = new std::shared_ptr<Turns>;
  return *turns;
}

// After a failure the network may still use memory, which then lives as long as the process.
void KeepForEver(std::shared_ptr<void> memory) {
  static std::mutex mutex;
  static auto& kept = *new std::vector<std::shared_ptr<void>>;
  std::lock_guard<std::mutex> lock(mutex);
  kept.push_back(std::move(memory));
}

}  // namespace

std::shared_ptr<Turns> ProcessTurns() {
  std::lock_guard<std::mutex> lock(process_turns_mutex);
  return OfProcess();
}

void SetProcessTurns(std::shared_ptr<Turns> turns) {
  {
    std::lock_guard<std::mutex> lock(process_turns_mutex);
    OfProcess().swap(turns);
  }
  if (turns) turns->Stop();  // whoever still has these
}

Turns::Turns(Communicator* communicator, std::unique_ptr<TurnTable> table, int coordinator, double deadline_s,
             std::function<void(const std::string&)> warn)
    : communicator_(communicator),
      table_(std::move(table)),
      coordinator_(coordinator),
      deadline_s_(deadline_s),
      warn_(std::move(warn)),
      thread_([this] { Serve(); }) {}

Turns::~Turns() { Stop(); }

void Turns::Stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  table_->Wake();
  if (thread_.joinable()) thread_.join();
}

void Turns::Begin(int64_t step, int64_t turn, Done done) {
  std::shared_ptr<Turn> asked;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    EndAllBut(step);
    const auto found = std::find_if(turns_.begin(), turns_.end(),
                                    [&](const auto& each) { return each->step == step && each->turn == turn; });
    if (found == turns_.end()) {
      asked = std::make_shared<Turn>();
      asked->step = step;
      asked->turn = turn;
      asked->asked = Clock::now();
      asked->waiting.push_back(std::move(done));
      turns_.push_back(asked);
    } else if (!(*found)->has_begun) {
      (*found)->waiting.push_back(std::move(done));
    }
  }
  if (asked) return Ask(asked);
  if (done) done("");
}

void Turns::End(int64_t step, int64_t turn, std::function<bool()> is_done) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto each = turns_.begin(); each != turns_.end(); ++each) {
    if ((*each)->step != step || (*each)->turn != turn) continue;
    (*each)->wants_end = true;
    (*each)->is_done = std::move(is_done);
    if ((*each)->has_begun && !(*each)->is_done) return Finish(each);
    break;
  }
  table_->Wake();
}

void Turns::EndAll() {
  std::lock_guard<std::mutex> lock(mutex_);
  EndAllBut(-1);
}

// With mutex_. Those that have no number yet end when they get one: it may not be left out.
void Turns::EndAllBut(int64_t step) {
  for (auto each = turns_.begin(); each != turns_.end();) {
    const auto turn = each++;
    if ((*turn)->step == step || (*turn)->wants_end) continue;
    (*turn)->wants_end = true;
    if ((*turn)->has_begun) Finish(turn);
  }
}

std::string Turns::Json() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return Text("{\"count\": ", count_, ", \"agreeing_seconds\": ", agreeing_s_, ", \"waiting_seconds\": ", waiting_s_,
              ", \"holding_seconds\": ", holding_s_, "}");
}

// ---- between ranks ------------------------------------------------------------------------------

void Turns::Ask(const std::shared_ptr<Turn>& turn) {
  auto ready = std::make_shared<int32_t>(1);
  Exchange exchange = OfTurns(kReady, ready.get());
  exchange.dtype = DataType::kInt32;
  exchange.count = 1;
  communicator_->Submit(exchange, [weak = weak_from_this(), ready, turn](const std::string& error) {
    if (!error.empty()) KeepForEver(ready);
    const std::shared_ptr<Turns> turns = weak.lock();
    if (!turns) return;
    if (!error.empty()) return turns->Fail(error);
    if (turns->communicator_->rank() != turns->coordinator_) return turns->Tell(turn, {});
    {
      std::lock_guard<std::mutex> lock(turns->mutex_);
      turns->ready_.push_back(turn);
    }
    turns->table_->Wake();
  });
}

// Tells all ranks the grant of the coordinator; of the others' own grant nothing is told.
void Turns::Tell(const std::shared_ptr<Turn>& turn, const TurnGrant& grant) {
  auto told = std::make_shared<TurnGrant>(grant);
  Exchange exchange = OfTurns(kGrant, told.get());
  exchange.dtype = DataType::kBytes;
  exchange.count = sizeof(*told);
  exchange.root = coordinator_;
  communicator_->Submit(exchange, [weak = weak_from_this(), told, turn](const std::string& error) {
    if (!error.empty()) KeepForEver(told);
    const std::shared_ptr<Turns> turns = weak.lock();
    if (!turns) return;
    if (!error.empty()) return turns->Fail(error);
    {
      std::lock_guard<std::mutex> lock(turns->mutex_);
      turn->grant = *told;
      turn->granted = Clock::now();
      turns->agreeing_s_ += Seconds(turn->granted - turn->asked);
      const bool has_one =
          std::any_of(turns->turns_.begin(), turns->turns_.end(), [](const auto& each) { return each->has_begun; });
      if (!has_one) turns->table_->Show(TurnState::kWaiting, told->number);
    }
    turns->table_->Wake();
  });
}

// The job has failed: whoever waits learns it, and other jobs need not wait.
void Turns::Fail(const std::string& error) {
  std::vector<Done> waiting;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& turn : turns_) {
      std::move(turn->waiting.begin(), turn->waiting.end(), std::back_inserter(waiting));
    }
    turns_.clear();
    ready_.clear();
    has_failed_ = true;
    table_->Show(TurnState::kIdle, last_);
    table_->Pass(std::numeric_limits<uint64_t>::max());  // also a number of which this rank has not been told
  }
  for (const Done& done : waiting) done(error);
}

// ---- between jobs -------------------------------------------------------------------------------

void Turns::Serve() {
  prctl(PR_SET_TIMERSLACK, 1000 /* ns */, 0, 0, 0);
  for (;;) {
    const uint32_t seen = table_->changes();
    bool is_blocked = false, waits_for_device = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (stop_) return;
    }
    if (TakeNumbers() | EndDone() | BeginNext(&is_blocked)) continue;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      waits_for_device = std::any_of(turns_.begin(), turns_.end(),
                                     [](const auto& turn) { return turn->has_begun && turn->wants_end; });
    }
    table_->Wait(seen, waits_for_device ? kPauseForDevice : is_blocked ? kPauseForOthers : kPauseIdle);
  }
}

// Takes the numbers of turns for which all ranks are ready; returns whether there were any.
bool Turns::TakeNumbers() {
  std::deque<std::shared_ptr<Turn>> ready;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!has_failed_) ready.swap(ready_);
  }
  for (const auto& turn : ready) Tell(turn, table_->Take(deadline_s_));
  return !ready.empty();
}

bool Turns::EndDone() {
  std::lock_guard<std::mutex> lock(mutex_);
  bool has_ended = false;
  for (auto each = turns_.begin(); each != turns_.end();) {
    const auto turn = each++;
    if (!(*turn)->has_begun || !(*turn)->wants_end || ((*turn)->is_done && !(*turn)->is_done())) continue;
    Finish(turn);
    has_ended = true;
  }
  return has_ended;
}

// Begins the first turn that has a number and has not begun, if no other job is before it.
bool Turns::BeginNext(bool* is_blocked) {
  std::vector<Done> waiting;
  std::string warning;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto next = std::find_if(turns_.begin(), turns_.end(), [](const auto& turn) { return !turn->has_begun; });
    if (next == turns_.end() || (*next)->grant.number == 0) return false;
    Turn& turn = **next;
    const auto now = Clock::now();
    if (const auto holder = turn.wants_end ? std::nullopt : table_->FindHolder(turn.grant)) {
      if (turn.blocker != holder->job) {
        turn.blocker = holder->job;
        turn.blocked = now;
      }
      *is_blocked = true;
      if (Seconds(now - turn.blocked) < deadline_s_) return false;
      table_->Distrust(holder->job, turn.grant);
      turn.blocked = now;
      warning = Text("Process ", holder->pid, " (", holder->program, ", rank ", holder->rank,
                     " of another job) has not given back its turn on the accelerator for ", deadline_s_,
                     " s, so this job goes on without waiting for it; if it hangs, end it.");
    } else {
      turn.has_begun = true;
      turn.begun = now;
      waiting.swap(turn.waiting);
      ++count_;
      waiting_s_ += Seconds(now - turn.granted);
      table_->Show(TurnState::kHolding, turn.grant.number);
      communicator_->events().Add("turn", {"turn", turn.granted, now, 0, true});
      if (turn.wants_end && !turn.is_done) Finish(next);
    }
  }
  if (!warning.empty()) warn_(warning);
  for (const Done& done : waiting) done("");
  return true;
}

// With mutex_. Passes all numbers before that of the first turn that is not over.
void Turns::Finish(std::list<std::shared_ptr<Turn>>::iterator turn) {
  last_ = std::max(last_, (*turn)->grant.number);
  holding_s_ += Seconds(Clock::now() - (*turn)->begun);
  turns_.erase(turn);
  const auto first =
      std::find_if(turns_.begin(), turns_.end(), [](const auto& each) { return each->grant.number > 0; });
  if (first == turns_.end()) {
    table_->Show(TurnState::kIdle, last_);
    if (!has_failed_) table_->Pass(last_);
    return;
  }
  table_->Show((*first)->has_begun ? TurnState::kHolding : TurnState::kWaiting, (*first)->grant.number);
  table_->Pass((*first)->grant.number - 1);
}

}  // namespace poseidon
