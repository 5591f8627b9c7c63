// The progress thread: takes what other threads submit, drives the protocol, and sleeps when there
// is nothing to do.
//
// Tests: tests/native/communicator_test.cc, tests/communicator/test_communicator.py.

#include "communicator.h"

#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "frame.h"
#include "statistics.h"
#include "text.h"

namespace poseidon {
namespace {

using std::chrono::microseconds;

constexpr microseconds kSpin{30};  // so long looks follow each other without a pause, where answers may be near
constexpr microseconds kShortestPause{20};
constexpr microseconds kLongestPauseCopying{50};  // nothing tells that a copy is done
constexpr microseconds kLongestPauseWaiting{500};
constexpr microseconds kLongestPauseIdle{20000};

constexpr std::chrono::milliseconds kDeadlineInterval{50};

// If a member of a group is late, the others leave without it: groups are for speed alone.
constexpr std::chrono::milliseconds kLongestHold{5};

// After a failure the network may still write to our buffers: they live as long as the process.
void KeepForEver(std::unique_ptr<Protocol> protocol) {
  static std::mutex mutex;
  static auto& kept = *new std::vector<std::unique_ptr<Protocol>>;
  std::lock_guard<std::mutex> lock(mutex);
  kept.push_back(std::move(protocol));
}

// The time between two looks at the network. A look costs processor time that the model may need, a late look delays
// the step. So pauses follow the flow: doubled when nothing came, halved when something did. In a steady flow there are
// then as many looks that find nothing as arrivals, as long as these are further apart than the shortest pause, and no
// further than the longest. A submission starts over, for its answer may be as near as the network's latency.
class Pauses {
 public:
  // The pause after a look.
  Clock::duration After(bool has_submission, bool has_arrival, bool is_waiting, Clock::duration longest) {
    const auto now = Clock::now();
    if (has_submission || has_arrival) {
      last_activity_ = now;
      pause_ = has_submission || pause_ <= 2 * kShortestPause ? Clock::duration::zero() : pause_ / 2;
    } else if (!is_waiting || pause_ > Clock::duration::zero() || now - last_activity_ >= kSpin) {
      pause_ = std::clamp<Clock::duration>(2 * pause_, kShortestPause, longest);
    }
    return pause_;
  }

 private:
  Clock::time_point last_activity_ = Clock::now();
  Clock::duration pause_ = Clock::duration::zero();
};

}  // namespace

class Communicator::Impl {
 public:
  explicit Impl(Options options) : options_(std::move(options)) {}

  void CheckOptions() const {
    if (options_.kv_pair_bytes >= kLeastKvPairBytes) return;
    throw std::runtime_error("kv_pair_bytes=" + std::to_string(options_.kv_pair_bytes) + ", expected " +
                             std::to_string(kLeastKvPairBytes) + " or more; the default is 2 MiB.");
  }

  // Runs on the progress thread.
  void Main(const TransportFactory& open) {
    std::unique_ptr<Transport> transport;
    std::string error;
    try {
      transport = open();
      if (transport->size() <= options_.dedicated_servers) {
        throw std::runtime_error(Text("dedicated_servers=", options_.dedicated_servers, " of ", transport->size(),
                                      " ranks, expected fewer: at least one has to train."));
      }
    } catch (const std::exception& e) {
      error = e.what();
      transport.reset();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    startup_error_ = error;
    has_opened_ = true;
    std::vector<int> nodes;
    if (transport) {
      rank_ = transport->rank();
      size_ = transport->size() - options_.dedicated_servers;
      hosts_ = transport->nodes();
      if (!hosts_.empty()) hosts_.resize(size_);
      nodes = NodesOf(options_, *transport);
      nodes_.assign(nodes.begin(), nodes.begin() + size_);
      shard_servers_ = WithServers(options_, nodes).shard_servers;
    }
    changed_.notify_all();
    if (!transport || stop_) return;
    lock.unlock();

    auto protocol = std::make_unique<Protocol>(
        std::move(transport), options_, nodes, &statistics_,
        [this](const std::string& reason) { Set([&] { failure_ = reason; }); },
        [this](Question question) { Set([&] { questions_.push_back(std::move(question)); }); });
    Run(protocol.get());
    if (protocol->has_failed() || protocol->is_being_copied()) KeepForEver(std::move(protocol));
    protocol.reset();  // before anybody learns that this rank has left: the process may end then
    End();
  }

  // Waits until the transport is open; throws when it is not.
  void WaitUntilOpen(double seconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return has_opened_; })) {
      stop_ = true;
      std::ostringstream text;
      text << "The ranks of this job did not meet within " << seconds
           << " s: start all of them, and let each create its PoseidonStrategy.";
      throw std::runtime_error(text.str());
    }
    if (!startup_error_.empty()) throw std::runtime_error(startup_error_);
  }

  // There is something for the progress thread to start, or it has stopped taking submissions.
  struct Submission {
    std::string site;
    Group group;
    std::function<void(Protocol* protocol)> start;
    Done refuse;
    bool is_reply = false;  // which others wait for that have not said goodbye, whether or not this rank has
  };

  void Submit(Submission submission) {
    if (getpid() != pid_) {  // without a lock, which may have been held when the process was forked
      return submission.refuse(
          "'" + submission.site +
          "' was submitted in a process that a rank has forked, which is no rank itself: exchange in "
          "the rank, or start another program there.");
    }
    std::string refusal;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      refusal = failure_;
      if (refusal.empty() && wants_goodbye_ && !submission.is_reply) {
        refusal = "'" + submission.site + "' was submitted after this rank had said goodbye.";
      }
      if (refusal.empty() && !PutInbox(std::move(submission))) return;
    }
    if (!refusal.empty()) return submission.refuse(refusal);
    has_work_.notify_one();
  }

  void Abort(const std::string& reason, double seconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    wants_abort_ = reason.substr(0, kMaxReasonBytes);
    if (aborted_for_.empty()) aborted_for_ = wants_abort_;
    has_work_.notify_one();
    changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return has_told_failure_ || has_ended_; });
  }

  std::string Goodbye() {
    std::unique_lock<std::mutex> lock(mutex_);
    wants_goodbye_ = true;
    has_work_.notify_one();
    const bool is_over = changed_.wait_for(lock, std::chrono::duration<double>(options_.timeout_s),
                                           [&] { return has_ended_ || !failure_.empty(); });
    if (!failure_.empty()) return failure_;
    if (is_over) return "";
    return Text("Waited ", options_.timeout_s, " s for ", RankList(missing_goodbyes_),
                " to reach the end of the program.");
  }

  bool Serve(double seconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, std::chrono::duration<double>(seconds),
                             [&] { return have_workers_left_ || has_ended_ || !failure_.empty(); });
  }

  std::optional<Question> NextQuestion(double seconds, bool* is_over) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, std::chrono::duration<double>(seconds),
                      [&] { return !questions_.empty() || has_ended_ || !failure_.empty(); });
    *is_over = has_ended_ || !failure_.empty();
    if (*is_over || questions_.empty()) return std::nullopt;
    Question question = std::move(questions_.front());
    questions_.pop_front();
    return question;
  }

  void Stop() {
    Set([&] { stop_ = true; });
    has_work_.notify_one();
  }

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::vector<int>& nodes() const { return nodes_; }
  const std::vector<int>& hosts() const { return hosts_; }
  KvPairs Shards(const ShardLayout& layout, size_t count, size_t element_bytes) const {
    return {layout, count, element_bytes, static_cast<size_t>(options_.kv_pair_bytes), shard_servers_};
  }
  const std::vector<int>& servers() const { return shard_servers_; }
  std::string StatisticsJson(bool has_sites) const { return statistics_.Json(has_sites); }
  void WaitedForBatch(Clock::time_point begin, Clock::time_point end) { statistics_.WaitedForBatch(begin, end); }
  void Compared(Clock::time_point begin, Clock::time_point end) { statistics_.Compared(begin, end); }
  EventLog& events() { return statistics_.events; }
  RowShares& row_shares() { return row_shares_; }
  std::string failure() const {
    std::lock_guard<std::mutex> lock(mutex_);
    // What an op has aborted for is known to those to whom its error comes before the progress thread has taken it.
    return failure_.empty() ? aborted_for_ : failure_;
  }

 private:
  // Submissions that wait for the others of their group.
  struct Held {
    std::vector<Submission> submissions;
    Clock::time_point since;
  };

  // Puts a submission where the progress thread finds it, with the others of its group once these are
  // complete. Returns whether there is anything to find. With mutex_.
  bool PutInbox(Submission submission) {
    const Group group = submission.group;
    if (group.size == 1) {
      inbox_.push_back(std::move(submission));
      return true;
    }
    Held& held = held_[group.name];
    if (held.submissions.empty()) held.since = Clock::now();
    held.submissions.push_back(std::move(submission));
    if (static_cast<int>(held.submissions.size()) < group.size) return false;
    Release(held_.find(group.name));
    return true;
  }

  std::map<std::string, Held>::iterator Release(std::map<std::string, Held>::iterator held) {
    for (Submission& submission : held->second.submissions) {
      inbox_.push_back(std::move(submission));
    }
    return held_.erase(held);
  }

  // Releases the groups that have waited long enough, or all. With mutex_.
  void ReleaseHeld(bool all) {
    for (auto held = held_.begin(); held != held_.end();) {
      const bool is_due = all || Clock::now() - held->second.since > kLongestHold;
      held = is_due ? Release(held) : std::next(held);
    }
  }

  template <typename Change>
  void Set(Change change) {
    std::lock_guard<std::mutex> lock(mutex_);
    change();
    changed_.notify_all();
  }

  void Run(Protocol* protocol) {
    prctl(PR_SET_TIMERSLACK, 1000 /* ns */, 0, 0, 0);  // the kernel's default is 50 us
    try {
      Pauses pauses;
      auto last_check = Clock::now();
      while (!IsOver(*protocol)) {
        const bool has_submission = TakeInbox(protocol);
        const bool has_arrival = protocol->Poll();
        protocol->Flush();
        const auto now = Clock::now();
        if (now - last_check > kDeadlineInterval) {
          last_check = now;
          protocol->CheckDeadlines();
        }
        const bool is_waiting = protocol->is_waiting();
        Pause(pauses.After(has_submission, has_arrival, is_waiting,
                           protocol->is_waiting_for_device() ? kLongestPauseCopying
                           : is_waiting                      ? kLongestPauseWaiting
                                                             : kLongestPauseIdle));
      }
      protocol->Close();
    } catch (const std::exception& e) {
      protocol->Fail(std::string("The network failed: ") + e.what(), /*tell_peers=*/false);
    }
  }

  // Refuses submissions that came too late.
  void End() {
    std::deque<Submission> left;
    Set([&] {
      has_ended_ = wants_goodbye_ = true;
      ReleaseHeld(/*all=*/true);
      left.swap(inbox_);
    });
    for (Submission& submission : left) {
      submission.refuse("'" + submission.site + "' was submitted while the job ended.");
    }
  }

  bool IsOver(const Protocol& protocol) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (protocol.has_failed() && protocol.is_flushed() && !has_told_failure_) {
      has_told_failure_ = true;
      changed_.notify_all();
    }
    if (!have_workers_left_ && protocol.HaveWorkersLeft()) {
      have_workers_left_ = true;
      changed_.notify_all();
    }
    if (!wants_goodbye_) return stop_;
    missing_goodbyes_ = protocol.MissingGoodbyes();
    return stop_ || (missing_goodbyes_.empty() && protocol.is_flushed());
  }

  // Starts what was submitted; returns whether there was anything.
  bool TakeInbox(Protocol* protocol) {
    // Tensors that become ready together shall travel together: frames stay in their packet until
    // the executor has nothing more to submit right now.
    bool is_active = false;
    for (;;) {
      std::deque<Submission> taken;
      std::string abort;
      bool goodbye = false;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!held_.empty()) ReleaseHeld(/*all=*/false);
        taken.swap(inbox_);
        abort.swap(wants_abort_);
        goodbye = wants_goodbye_ && !std::exchange(is_goodbye_taken_, wants_goodbye_);
      }
      for (Submission& submission : taken) submission.start(protocol);
      if (!abort.empty()) protocol->Fail(abort, /*tell_peers=*/true);
      if (goodbye) protocol->SayGoodbye();
      if (taken.empty()) return is_active;
      is_active = true;
      std::this_thread::yield();
    }
  }

  void Pause(Clock::duration pause) {
    if (pause == Clock::duration::zero()) return std::this_thread::yield();
    std::unique_lock<std::mutex> lock(mutex_);
    has_work_.wait_for(lock, pause, [&] {
      return stop_ || !inbox_.empty() || !wants_abort_.empty() || (wants_goodbye_ && !is_goodbye_taken_);
    });
  }

  const Options options_;
  const pid_t pid_ = getpid();
  RowShares row_shares_;
  Statistics statistics_;
  int rank_ = 0, size_ = 1;  // these are constant once the transport is open
  std::vector<int> nodes_, hosts_, shard_servers_;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable has_work_;
  std::condition_variable changed_;
  // From other threads to the progress thread.
  std::deque<Submission> inbox_;
  std::map<std::string, Held> held_;       // by name of the group
  std::string wants_abort_, aborted_for_;  // until the progress thread takes it; for good
  bool wants_goodbye_ = false, is_goodbye_taken_ = false, stop_ = false;
  // From the progress thread to others.
  bool has_opened_ = false, has_told_failure_ = false, have_workers_left_ = false, has_ended_ = false;
  std::string startup_error_;
  std::string failure_;
  std::vector<int> missing_goodbyes_;
  std::deque<Question> questions_;
};

Communicator::Communicator(TransportFactory open, Options options, double startup_timeout_s)
    : impl_(std::make_shared<Impl>(std::move(options))) {
  impl_->CheckOptions();
  // Detached: nobody can join a thread that is stuck in opening the transport.
  std::thread([impl = impl_, open = std::move(open)] { impl->Main(open); }).detach();
  impl_->WaitUntilOpen(startup_timeout_s);
}

Communicator::~Communicator() { impl_->Stop(); }
int Communicator::rank() const { return impl_->rank(); }
int Communicator::size() const { return impl_->size(); }
const std::vector<int>& Communicator::nodes() const { return impl_->nodes(); }
const std::vector<int>& Communicator::hosts() const { return impl_->hosts(); }
const std::vector<int>& Communicator::servers() const { return impl_->servers(); }
bool Communicator::is_on_one_node() const { return std::equal(nodes().begin() + 1, nodes().end(), nodes().begin()); }
KvPairs Communicator::Shards(const ShardLayout& layout, size_t count, size_t element_bytes) const {
  return impl_->Shards(layout, count, element_bytes);
}
void Communicator::Submit(Exchange exchange, Done done) {
  const std::string site = exchange.site;
  const Group group = exchange.group;
  const auto submitted = Clock::now();
  auto start = [exchange = std::move(exchange), done, submitted](Protocol* protocol) {
    protocol->Start(exchange, done, submitted);
  };
  impl_->Submit({site, group, std::move(start), std::move(done)});
}
void Communicator::SubmitFactors(Factors factors, FactorsDone done) {
  const std::string site = factors.site;
  const Group group = factors.group;
  const auto submitted = Clock::now();
  auto start = [factors = std::move(factors), done, submitted](Protocol* protocol) {
    protocol->StartFactors(factors, done, submitted);
  };
  impl_->Submit(
      {site, group, std::move(start), [done = std::move(done)](const std::string& error) { done(error, {}); }});
}
void Communicator::SubmitPing(int peer, size_t bytes, PingDone done) {
  const Group alone;
  auto start = [peer, bytes, done](Protocol* protocol) { protocol->StartPing(peer, bytes, done); };
  auto refuse = [done = std::move(done)](const std::string& error) { done(error, 0); };
  impl_->Submit({"a ping", alone, std::move(start), std::move(refuse)});
}
void Communicator::Ask(int peer, const std::string& text, void* answer, size_t bytes, Done done) {
  const Group alone;
  auto start = [=](Protocol* protocol) { protocol->Ask(peer, text, answer, bytes, done); };
  impl_->Submit({text, alone, std::move(start), done});
}
std::optional<Question> Communicator::NextQuestion(double seconds, bool* is_over) {
  return impl_->NextQuestion(seconds, is_over);
}
void Communicator::Reply(int peer, uint64_t number, std::string answer, bool is_refusal) {
  const Group alone;
  auto start = [peer, number, answer = std::move(answer), is_refusal](Protocol* protocol) {
    protocol->Reply(peer, number, answer, is_refusal);
  };
  impl_->Submit({"an answer", alone, std::move(start), [](const std::string&) {}, /*is_reply=*/true});
}
void Communicator::Abort(const std::string& reason, double seconds) { impl_->Abort(reason, seconds); }
bool Communicator::Serve(double seconds) { return impl_->Serve(seconds); }
std::string Communicator::Goodbye() { return impl_->Goodbye(); }
std::string Communicator::failure() const { return impl_->failure(); }
std::string Communicator::StatisticsJson(bool has_sites) const { return impl_->StatisticsJson(has_sites); }
void Communicator::WaitedForBatch(Clock::time_point begin, Clock::time_point end) { impl_->WaitedForBatch(begin, end); }
void Communicator::Compared(Clock::time_point begin, Clock::time_point end) { impl_->Compared(begin, end); }
EventLog& Communicator::events() { return impl_->events(); }
RowShares& Communicator::row_shares() { return impl_->row_shares(); }

}  // namespace poseidon
