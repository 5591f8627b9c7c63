// The progress thread: cuts tensors into KV pairs, serves the KV pairs that this rank owns, and
// puts results together.
//
// Everything in Impl below the line "progress thread only" belongs to that thread; other threads
// hand it work through `inbox_`.

#include "communicator.h"

#include <sys/prctl.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "frame.h"
#include "kv_pairs.h"
#include "statistics.h"

namespace poseidon {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

// Pauses between two looks at the network. They grow with the time since anything happened, so
// that a short wait costs little latency and a long one little processor time.
constexpr microseconds kSpin{30};
constexpr microseconds kShortestPause{20};
constexpr microseconds kLongestPauseWaiting{200};
constexpr microseconds kLongestPauseIdle{2000};

// A worker allows its servers this much more time than they allow the other ranks: the server
// knows who is missing, so its message should come first.
constexpr double kWorkerPatience = 1.05;

double Seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

// FNV-1a, 64 bits.
uint64_t Hash(const void* data, size_t bytes, uint64_t hash = 0xcbf29ce484222325) {
  for (size_t i = 0; i < bytes; ++i) {
    hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001b3;
  }
  return hash;
}

uint64_t Hash(const std::string& text) { return Hash(text.data(), text.size()); }

std::string RankList(const std::vector<int>& ranks) {
  std::ostringstream out;
  out << (ranks.size() == 1 ? "rank " : "ranks ");
  for (size_t i = 0; i < ranks.size(); ++i) out << (i ? ", " : "") << ranks[i];
  return out.str();
}

// Blocks of memory for contributions, kept for the next step.
class BufferPool {
 public:
  struct Free {
    void operator()(char* data) const { ::operator delete[](data, std::align_val_t{64}); }
  };
  struct Buffer {
    std::unique_ptr<char[], Free> data;
    size_t capacity = 0;
  };

  Buffer Take(size_t bytes) {
    auto found = free_.lower_bound(bytes);
    if (found != free_.end() && found->first <= 2 * bytes) {
      Buffer buffer = std::move(found->second);
      free_.erase(found);
      return buffer;
    }
    return {std::unique_ptr<char[], Free>(new (std::align_val_t{64}) char[bytes]), bytes};
  }

  void Give(Buffer buffer) {
    if (buffer.capacity > 0) free_.emplace(buffer.capacity, std::move(buffer));
  }

 private:
  std::multimap<size_t, Buffer> free_;
};

// An exchange that this rank has submitted and that is not complete.
struct Active {
  Active(Exchange exchange, Communicator::Done done, uint64_t site, uint64_t step, KvPairs pairs,
         SiteStatistics& statistics, Clock::time_point start)
      : exchange(std::move(exchange)),
        done(std::move(done)),
        site(site),
        step(step),
        pairs(std::move(pairs)),
        statistics(statistics),
        start(start),
        pending(this->pairs.size() + 1),
        has_result(this->pairs.size()),
        in_sending(this->pairs.size()) {}

  Exchange exchange;
  Communicator::Done done;
  uint64_t site;
  uint64_t step;
  KvPairs pairs;
  SiteStatistics& statistics;
  Clock::time_point start;
  // What must still happen: results to come, bulk sends from input or output to leave, and Start
  // to return.
  size_t pending;
  std::vector<char> has_result;  // by KV pair
  std::vector<char> in_sending;  // by KV pair: its part of `input` is still being sent
  std::map<size_t, std::pair<int, FrameHeader>> deferred;  // results that wait for `in_sending`

  char* output(const KvPair& pair) const {
    return static_cast<char*>(exchange.output) + pair.offset;
  }
  const char* input(const KvPair& pair) const {
    return static_cast<const char*>(exchange.input) + pair.offset;
  }
};

// A KV pair that this rank owns, from its first contribution until all ranks have the result.
struct Aggregation {
  enum State : char { kMissing, kArriving, kReady };
  struct Contribution {
    State state = kMissing;
    const void* data = nullptr;  // null: the rank adds nothing
    BufferPool::Buffer buffer;
    FrameHeader header;
  };

  std::shared_ptr<Active> local;  // null until this rank submits the site
  std::vector<Contribution> contributions;  // by rank
};

struct EarlyResult {
  int peer;
  FrameHeader header;
  std::vector<char> payload;
};

}  // namespace

class Communicator::Impl {
 public:
  Impl(TransportFactory open, Options options, double startup_timeout_s)
      : options_(std::move(options)), startup_(std::make_shared<Startup>()) {
    // The thread shares ownership of `startup_` alone: when opening never returns (a rank that
    // never comes), this object can be given up while the thread still waits in there.
    thread_ = std::thread([this, open = std::move(open), startup = startup_] {
      std::unique_ptr<Transport> transport;
      std::string error;
      try {
        transport = open();
      } catch (const std::exception& e) {
        error = e.what();
      }
      {
        std::lock_guard<std::mutex> lock(startup->mutex);
        startup->opened = true;
        startup->error = error;
        startup->changed.notify_all();
        if (startup->abandoned || !transport) return;
      }
      Run(std::move(transport));
    });
    std::unique_lock<std::mutex> lock(startup_->mutex);
    const bool opened =
        startup_->changed.wait_for(lock, std::chrono::duration<double>(startup_timeout_s),
                                   [&] { return startup_->opened; });
    if (!opened) {
      startup_->abandoned = true;
      thread_.detach();
      std::ostringstream text;
      text << "The ranks of this job did not meet within " << startup_timeout_s
           << " s: start all of them, and let each create its PoseidonStrategy.";
      throw std::runtime_error(text.str());
    }
    if (!startup_->error.empty()) {
      lock.unlock();
      thread_.join();
      throw std::runtime_error(startup_->error);
    }
    lock.unlock();
    std::unique_lock<std::mutex> ready(mutex_);
    state_changed_.wait(ready, [&] { return is_ready_; });
  }

  ~Impl() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    inbox_filled_.notify_one();
    if (thread_.joinable()) thread_.join();
  }

  int rank() const { return rank_; }
  int size() const { return size_; }

  void Submit(Exchange exchange, Done done) {
    std::string failure;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      failure = failure_;
      if (failure.empty() && goodbye_said_) {
        failure = "'" + exchange.site + "' was submitted after this rank had said goodbye.";
      }
      if (failure.empty()) {
        inbox_.push_back({std::move(exchange), std::move(done), Clock::now()});
      }
    }
    if (failure.empty()) {
      inbox_filled_.notify_one();
    } else {
      done(failure);
    }
  }

  void Abort(const std::string& reason, double seconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    abort_requested_ = reason.substr(0, kMaxReasonBytes);
    inbox_filled_.notify_one();
    state_changed_.wait_for(lock, std::chrono::duration<double>(seconds),
                            [&] { return abort_sent_ || thread_ended_; });
  }

  std::string Goodbye() {
    std::unique_lock<std::mutex> lock(mutex_);
    goodbye_said_ = true;
    inbox_filled_.notify_one();
    const bool ended =
        state_changed_.wait_for(lock, std::chrono::duration<double>(options_.timeout_s),
                                [&] { return thread_ended_ || !failure_.empty(); });
    if (!failure_.empty()) return failure_;
    if (ended) return "";
    std::ostringstream text;
    text << "Waited " << options_.timeout_s << " s for the other ranks to end their programs.";
    return text.str();
  }

  std::string failure() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return failure_;
  }

  std::string StatisticsJson() const { return statistics_.Json(); }

 private:
  struct Startup {
    std::mutex mutex;
    std::condition_variable changed;
    bool opened = false, abandoned = false;
    std::string error;
  };
  struct Submission {
    Exchange exchange;
    Done done;
    Clock::time_point start;
  };
  using PairKey = std::tuple<uint64_t, uint64_t, uint64_t>;  // site, step, offset
  using StepKey = std::pair<uint64_t, uint64_t>;             // site, step

  // ---- progress thread only, from here on -----------------------------------------------------

  void Run(std::unique_ptr<Transport> transport) {
    prctl(PR_SET_TIMERSLACK, 1000 /* ns */, 0, 0, 0);
    transport_ = std::move(transport);
    rank_ = transport_->rank();
    size_ = transport_->size();
    if (options_.servers.empty()) {
      for (int rank = 0; rank < size_; ++rank) options_.servers.push_back(rank);
    }
    plan_ = PlanDigest();
    packets_.resize(size_);
    next_tag_.resize(size_);
    has_left_.resize(size_);
    Set([&] { is_ready_ = true; });

    last_activity_ = Clock::now();
    while (!Ended()) {
      bool active = false;
      try {
        active = TakeInbox();
        active = transport_->Poll([this](int peer, const char* data, size_t bytes) {
          OnPacket(peer, data, bytes);
        }) || active;
        FlushPackets();
        CheckDeadlines();
      } catch (const TransportError& e) {
        Fail(std::string("The network failed: ") + e.what(), /*tell_peers=*/false);
        Set([&] { abort_sent_ = true; stop_ = true; });
      }
      Pause(active);
    }
    const bool agreed = all_have_left_;
    try {
      transport_->Close(agreed);
    } catch (const TransportError& e) {
      Fail(std::string("The network failed while leaving: ") + e.what(), false);
    }
    Set([&] { thread_ended_ = true; });
  }

  // Everything that decides how bytes are cut and routed: ranks that differ must not exchange.
  uint64_t PlanDigest() const {
    std::ostringstream text;
    text << "poseidon frames 1;" << size_ << ';' << options_.kv_pair_bytes;
    for (int server : options_.servers) text << ';' << server;
    return Hash(text.str());
  }

  template <typename Change>
  void Set(Change change) {
    std::lock_guard<std::mutex> lock(mutex_);
    change();
    state_changed_.notify_all();
  }

  bool Ended() {
    std::lock_guard<std::mutex> lock(mutex_);
    return stop_ || (all_have_left_ && transport_->Flushed());
  }

  void Pause(bool active) {
    const auto now = Clock::now();
    if (active) last_activity_ = now;
    const auto quiet = now - last_activity_;
    const bool waiting = !active_.empty();
    if (quiet < kSpin) {
      if (waiting) std::this_thread::yield();
      if (waiting || active) return;
    }
    const auto longest = waiting ? kLongestPauseWaiting : kLongestPauseIdle;
    const auto pause = std::clamp<Clock::duration>(quiet / 4, kShortestPause, longest);
    std::unique_lock<std::mutex> lock(mutex_);
    const bool has_work = !inbox_.empty() || stop_ || (!abort_requested_.empty() && !abort_sent_) ||
                          (goodbye_said_ && !goodbye_sent_ && failure_.empty());
    if (has_work) return;
    inbox_filled_.wait_for(lock, pause);
  }

  bool TakeInbox() {
    // Tensors that become ready together shall travel together: what is started here stays in its
    // packet until the executor has nothing more to submit right now.
    bool active = false;
    while (TakeSubmissions()) {
      active = true;
      std::this_thread::yield();
    }
    std::string abort;
    bool say_goodbye = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!abort_sent_) abort = abort_requested_;
      say_goodbye = goodbye_said_ && !goodbye_sent_ && failure_.empty();
      if (say_goodbye) goodbye_sent_ = true;
    }
    if (!abort.empty()) {
      Fail(abort, /*tell_peers=*/true);
    }
    if (say_goodbye) {
      FrameHeader header = {};
      header.kind = FrameKind::kGoodbye;
      for (int peer = 0; peer < size_; ++peer) {
        if (peer != rank_) Append(peer, header, nullptr);
      }
      has_left_[rank_] = 1;
      CheckAllLeft();
    }
    // An abort is out when nothing is left to send; the last flush was in the loop before.
    if (!failure().empty() && !abort_sent_ && transport_->Flushed() && PacketsEmpty()) {
      Set([&] { abort_sent_ = true; });
    }
    return active || say_goodbye;
  }

  bool TakeSubmissions() {
    std::deque<Submission> taken;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      taken.swap(inbox_);
    }
    for (Submission& submission : taken) Start(std::move(submission));
    return !taken.empty();
  }

  // ---- the worker's side ----------------------------------------------------------------------

  void Start(Submission submission) {
    const std::string failure = this->failure();
    if (!failure.empty()) return submission.done(failure);
    Exchange& exchange = submission.exchange;
    const uint64_t site = Hash(exchange.site);
    if (active_.count(site)) {
      return submission.done("'" + exchange.site +
                             "' is already being exchanged: one site cannot be in flight twice.");
    }
    const size_t bytes = static_cast<size_t>(exchange.count) * ElementBytes(exchange.dtype);
    KvPairs pairs(site, bytes, static_cast<size_t>(options_.kv_pair_bytes), options_.servers);
    SiteStatistics& statistics = statistics_.Of(exchange.site);
    auto active =
        std::make_shared<Active>(std::move(exchange), std::move(submission.done), site,
                                 steps_[site]++, std::move(pairs), statistics, submission.start);
    active_[site] = active;
    // Each rank begins with the server after itself, so that not all send to the same one.
    const size_t begin = FirstPairAfterSelf(active->pairs);
    for (size_t i = 0; i < active->pairs.size(); ++i) {
      StartPair(active, (begin + i) % active->pairs.size());
    }
    auto early = early_results_.extract(StepKey{site, active->step});
    if (!early.empty()) {
      for (EarlyResult& result : early.mapped()) {
        OnResult(result.peer, result.header, result.payload.data());
      }
    }
    Complete(active);
  }

  size_t FirstPairAfterSelf(const KvPairs& pairs) const {
    for (int step = 1; step <= size_; ++step) {
      for (size_t i = 0; i < std::min(pairs.size(), options_.servers.size()); ++i) {
        if (pairs[i].server == (rank_ + step) % size_) return i;
      }
    }
    return 0;
  }

  void StartPair(const std::shared_ptr<Active>& active, size_t index) {
    const KvPair& pair = active->pairs[index];
    const int root = active->exchange.root;
    if (pair.server == rank_) {
      Aggregation& aggregation = AggregationOf({active->site, active->step, pair.offset});
      aggregation.local = active;
      for (int rank = 0; rank < size_; ++rank) {
        const auto& contribution = aggregation.contributions[rank];
        if (contribution.state != Aggregation::kMissing &&
            !CheckForm(rank, contribution.header, *active)) {
          return;
        }
      }
      auto& own = aggregation.contributions[rank_];
      own.state = Aggregation::kReady;
      const bool adds = root < 0 ? active->exchange.contributes : root == rank_;
      own.data = adds ? active->input(pair) : nullptr;
      FinishPairIfComplete({active->site, active->step, pair.offset});
      return;
    }
    if (root >= 0 && root != rank_) return;  // only the root sends, we wait for the result
    SendPair(active, index, FrameKind::kContribution, pair.server,
             root < 0 && !active->exchange.contributes ? nullptr : active->input(pair));
    if (root == rank_) {
      if (active->output(pair) != active->input(pair)) {
        std::memcpy(active->output(pair), active->input(pair), pair.bytes);
      }
      Result(active, index);
    }
  }

  // Sends `data` (null: nothing, this rank does not contribute) as KV pair `index` of `active`.
  void SendPair(const std::shared_ptr<Active>& active, size_t index, FrameKind kind, int peer,
                const void* data) {
    const KvPair& pair = active->pairs[index];
    FrameHeader header = {};
    header.kind = kind;
    header.dtype = static_cast<uint8_t>(active->exchange.dtype);
    header.contributes = data != nullptr;
    header.root = active->exchange.root;
    header.site = active->site;
    header.step = active->step;
    header.plan = plan_;
    header.count = static_cast<uint64_t>(active->exchange.count);
    header.offset = pair.offset;
    header.length = data ? pair.bytes : 0;
    header.is_bulk = header.length > kInlineBytes;
    header.tag = header.is_bulk ? next_tag_[peer]++ : 0;
    if (!Append(peer, header, data)) return;
    active->statistics.sent_bytes += header.length;
    if (!header.is_bulk) return;
    ++active->pending;
    if (kind == FrameKind::kContribution) active->in_sending[index] = 1;
    transport_->SendBulk(peer, header.tag, data, header.length, [this, active, index, kind] {
      if (kind == FrameKind::kContribution) {
        active->in_sending[index] = 0;
        auto deferred = active->deferred.extract(index);
        if (!deferred.empty()) {
          ReceiveResult(active, index, deferred.mapped().first, deferred.mapped().second);
        }
      }
      Complete(active);
    });
  }

  void OnResult(int peer, const FrameHeader& header, const char* payload) {
    auto found = active_.find(header.site);
    if (found == active_.end() || found->second->step != header.step) {
      // A broadcast can be over for its root and server before this rank has asked for it.
      const size_t bytes = header.is_bulk ? 0 : header.length;
      early_results_[{header.site, header.step}].push_back(
          {peer, header, std::vector<char>(payload, payload + bytes)});
      return;
    }
    const std::shared_ptr<Active> active = found->second;
    if (!CheckForm(peer, header, *active)) return;
    const size_t index = active->pairs.IndexOf(header.offset);
    active->statistics.received_bytes += header.length;
    if (!header.is_bulk) {
      std::memcpy(active->output(active->pairs[index]), payload, header.length);
      Result(active, index);
    } else if (active->in_sending[index] && active->exchange.input == active->exchange.output) {
      active->deferred[index] = {peer, header};  // the network still reads what we would overwrite
    } else {
      ReceiveResult(active, index, peer, header);
    }
  }

  void ReceiveResult(const std::shared_ptr<Active>& active, size_t index, int peer,
                     const FrameHeader& header) {
    transport_->ReceiveBulk(peer, header.tag, active->output(active->pairs[index]), header.length,
                            [this, active, index] { Result(active, index); });
  }

  void Result(const std::shared_ptr<Active>& active, size_t index) {
    active->has_result[index] = 1;
    Complete(active);
  }

  // One of the things that `active` waits for has happened.
  void Complete(const std::shared_ptr<Active>& active) {
    if (--active->pending > 0 || active_.erase(active->site) == 0) return;
    active->statistics.count += 1;
    active->statistics.nanoseconds += std::chrono::nanoseconds(Clock::now() - active->start).count();
    active->done("");
  }

  // ---- the server's side ----------------------------------------------------------------------

  Aggregation& AggregationOf(const PairKey& key) {
    Aggregation& aggregation = aggregations_[key];
    aggregation.contributions.resize(size_);
    return aggregation;
  }

  void OnContribution(int peer, const FrameHeader& header, const char* payload) {
    const PairKey key{header.site, header.step, header.offset};
    Aggregation& aggregation = AggregationOf(key);
    if (aggregation.local && !CheckForm(peer, header, *aggregation.local)) return;
    auto& contribution = aggregation.contributions[peer];
    contribution.header = header;
    if (header.length > 0) {
      contribution.buffer = pool_.Take(header.length);
      contribution.data = contribution.buffer.data.get();
    }
    if (header.is_bulk) {
      contribution.state = Aggregation::kArriving;
      transport_->ReceiveBulk(peer, header.tag, contribution.buffer.data.get(), header.length,
                              [this, key, peer] {
                                aggregations_[key].contributions[peer].state = Aggregation::kReady;
                                FinishPairIfComplete(key);
                              });
      return;
    }
    if (header.length > 0) std::memcpy(contribution.buffer.data.get(), payload, header.length);
    contribution.state = Aggregation::kReady;
    FinishPairIfComplete(key);
  }

  // Ranks whose part of `aggregation` is not in yet.
  std::vector<int> Missing(const Aggregation& aggregation) const {
    std::vector<int> missing;
    const int root = aggregation.local ? aggregation.local->exchange.root : -1;
    for (int rank = 0; rank < size_; ++rank) {
      const bool needed = root < 0 || rank == root;
      if (needed && aggregation.contributions[rank].state != Aggregation::kReady) {
        missing.push_back(rank);
      }
    }
    return missing;
  }

  void FinishPairIfComplete(const PairKey& key) {
    auto found = aggregations_.find(key);
    if (!found->second.local) return;
    if (FailIfRankHasLeft(found->second) || !Missing(found->second).empty()) return;
    Aggregation aggregation = std::move(found->second);
    aggregations_.erase(found);

    const std::shared_ptr<Active> active = aggregation.local;
    const size_t index = active->pairs.IndexOf(std::get<2>(key));
    const KvPair& pair = active->pairs[index];
    std::vector<const void*> inputs;
    for (int rank = 0; rank < size_; ++rank) {
      auto& contribution = aggregation.contributions[rank];
      if (!contribution.data) continue;
      inputs.push_back(contribution.data);
      if (rank != rank_) active->statistics.received_bytes += pair.bytes;
    }
    SumInOrder(active->exchange.dtype, inputs, pair.bytes, active->output(pair));
    for (auto& contribution : aggregation.contributions) {
      pool_.Give(std::move(contribution.buffer));
    }
    for (int step = 1; step < size_; ++step) {
      const int peer = (rank_ + step) % size_;
      if (peer == active->exchange.root) continue;
      SendPair(active, index, FrameKind::kResult, peer, active->output(pair));
    }
    Result(active, index);
  }

  // ---- packets --------------------------------------------------------------------------------

  // Puts a frame into the packet to `peer`; the payload goes along unless it is bulk.
  bool Append(int peer, const FrameHeader& header, const void* payload) {
    const bool is_exchange =
        header.kind == FrameKind::kContribution || header.kind == FrameKind::kResult;
    if (is_exchange && has_left_[peer]) {
      FailHasLeft(peer, "");
      return false;
    }
    const size_t payload_bytes = header.is_bulk ? 0 : header.length;
    std::vector<char>& packet = packets_[peer];
    if (packet.size() + sizeof(header) + payload_bytes > kMaxPacketBytes) FlushPacket(peer);
    const char* begin = reinterpret_cast<const char*>(&header);
    packet.insert(packet.end(), begin, begin + sizeof(header));
    const char* data = static_cast<const char*>(payload);
    if (payload_bytes > 0) packet.insert(packet.end(), data, data + payload_bytes);
    statistics_.header_bytes += sizeof(header);
    return true;
  }

  void FlushPacket(int peer) {
    if (packets_[peer].empty()) return;
    transport_->SendPacket(peer, std::exchange(packets_[peer], {}));
  }

  void FlushPackets() {
    for (int peer = 0; peer < size_; ++peer) FlushPacket(peer);
  }

  bool PacketsEmpty() const {
    return std::all_of(packets_.begin(), packets_.end(),
                       [](const std::vector<char>& packet) { return packet.empty(); });
  }

  void OnPacket(int peer, const char* data, size_t bytes) {
    for (size_t position = 0; position < bytes;) {
      FrameHeader header;
      std::memcpy(&header, data + position, sizeof(header));
      position += sizeof(header);
      OnFrame(peer, header, data + position);
      if (!header.is_bulk) position += header.length;
    }
  }

  void OnFrame(int peer, const FrameHeader& header, const char* payload) {
    if (header.kind == FrameKind::kAbort) {
      Fail(std::string(payload, header.length), /*tell_peers=*/false);
      return;
    }
    if (!failure().empty()) return;  // the step is lost; only aborts matter now
    if (header.kind == FrameKind::kGoodbye) {
      has_left_[peer] = 1;
      for (const auto& [key, aggregation] : aggregations_) {
        if (aggregation.local && FailIfRankHasLeft(aggregation)) return;
      }
      CheckAllLeft();
      return;
    }
    if (header.plan != plan_) {
      std::ostringstream text;
      text << "Rank " << peer << " and rank " << rank_
           << " cut tensors differently: give PoseidonStrategy the same servers and kv_pair_bytes,"
              " and install the same tf_poseidon, on all ranks.";
      return Fail(text.str(), /*tell_peers=*/true);
    }
    if (header.kind == FrameKind::kContribution) {
      OnContribution(peer, header, payload);
    } else {
      OnResult(peer, header, payload);
    }
  }

  void CheckAllLeft() {
    const bool all = std::all_of(has_left_.begin(), has_left_.end(), [](char l) { return l; });
    if (all) Set([&] { all_have_left_ = true; });
  }

  // ---- failures -------------------------------------------------------------------------------

  // Whether `header` of `peer` describes the tensor that this rank exchanges under that site.
  bool CheckForm(int peer, const FrameHeader& header, const Active& active) {
    const Exchange& mine = active.exchange;
    const auto dtype = static_cast<DataType>(header.dtype);
    if (dtype == mine.dtype && header.count == static_cast<uint64_t>(mine.count) &&
        header.root == mine.root) {
      return true;
    }
    const auto describe = [](DataType dtype, uint64_t count, int root) {
      std::ostringstream text;
      text << (root < 0 ? "sums " : "broadcasts ") << count << " elements of " << Name(dtype);
      return text.str();
    };
    std::ostringstream text;
    text << "Ranks disagree about '" << mine.site << "': rank " << peer << " "
         << describe(dtype, header.count, header.root) << ", rank " << rank_ << " "
         << describe(mine.dtype, mine.count, mine.root)
         << ". Build the same model on all ranks.";
    Fail(text.str(), /*tell_peers=*/true);
    return false;
  }

  // Fails when a rank has said goodbye without having sent its part of `aggregation`.
  bool FailIfRankHasLeft(const Aggregation& aggregation) {
    for (int rank : Missing(aggregation)) {
      // Packets keep their order, so a part that has not been announced will never be.
      if (has_left_[rank] && aggregation.contributions[rank].state == Aggregation::kMissing) {
        FailHasLeft(rank, aggregation.local->exchange.site);
        return true;
      }
    }
    return false;
  }

  void FailHasLeft(int peer, const std::string& site) {
    std::ostringstream text;
    text << "Rank " << peer << " has ended its program, but rank " << rank_ << " still ";
    if (site.empty()) {
      text << "has to exchange tensors with it";
    } else {
      text << "waits for its part of '" << site << "'";
    }
    text << ": all ranks must make the same number of steps.";
    Fail(text.str(), /*tell_peers=*/true);
  }

  void Fail(const std::string& reason, bool tell_peers) {
    if (!failure().empty()) return;
    Set([&] {
      failure_ = reason;
      if (!tell_peers) abort_sent_ = true;
    });
    for (auto& packet : packets_) packet.clear();
    if (tell_peers) {
      FrameHeader header = {};
      header.kind = FrameKind::kAbort;
      header.length = std::min(reason.size(), kMaxReasonBytes);
      for (int peer = 0; peer < size_; ++peer) {
        if (peer != rank_) Append(peer, header, reason.data());
      }
    }
    // The memory of these exchanges is never touched again by their owners, see Submit; they stay
    // in `lost_` because the network may still write to it.
    for (auto& [site, active] : active_) lost_.push_back(active);
    active_.clear();
    for (auto& active : lost_) {
      if (active->done) std::exchange(active->done, nullptr)(reason);
    }
  }

  void CheckDeadlines() {
    const auto now = Clock::now();
    if (now - last_deadline_check_ < std::chrono::milliseconds(50)) return;
    last_deadline_check_ = now;
    for (const auto& [site, active] : active_) {
      const double waited = Seconds(now - active->start);
      if (waited < options_.timeout_s) continue;
      std::vector<int> ranks = MissingContributions(*active);
      if (ranks.empty() && waited < options_.timeout_s * kWorkerPatience) continue;
      if (ranks.empty()) ranks = MissingResults(*active);
      std::ostringstream text;
      text << "Rank " << rank_ << " waited " << options_.timeout_s << " s for " << RankList(ranks)
           << " to exchange '" << active->exchange.site << "' ("
           << (active->exchange.root < 0 ? "ps" : "broadcast")
           << "). Look at the output of " << RankList(ranks)
           << "; if it is only slow, give PoseidonStrategy a larger timeout_s.";
      return Fail(text.str(), /*tell_peers=*/true);
    }
  }

  // Ranks that keep a KV pair of this server waiting.
  std::vector<int> MissingContributions(const Active& active) const {
    for (size_t i = 0; i < active.pairs.size(); ++i) {
      auto found = aggregations_.find({active.site, active.step, active.pairs[i].offset});
      if (found == aggregations_.end()) continue;
      std::vector<int> missing = Missing(found->second);
      if (!missing.empty()) return missing;
    }
    return {};
  }

  // Servers whose results this worker waits for; without any, those that do not take ours.
  std::vector<int> MissingResults(const Active& active) const {
    std::vector<int> servers;
    for (size_t i = 0; i < active.pairs.size(); ++i) {
      const int server = active.pairs[i].server;
      if (active.has_result[i] && !active.in_sending[i]) continue;
      if (std::find(servers.begin(), servers.end(), server) == servers.end()) {
        servers.push_back(server);
      }
    }
    for (int rank = 0; servers.empty() && rank < size_; ++rank) {
      if (rank != rank_) servers.push_back(rank);
    }
    return servers;
  }

  std::unique_ptr<Transport> transport_;
  uint64_t plan_ = 0;
  std::unordered_map<uint64_t, uint64_t> steps_;  // by site: how often it was submitted
  std::unordered_map<uint64_t, std::shared_ptr<Active>> active_;
  std::vector<std::shared_ptr<Active>> lost_;
  std::map<PairKey, Aggregation> aggregations_;
  std::map<StepKey, std::vector<EarlyResult>> early_results_;
  BufferPool pool_;
  std::vector<std::vector<char>> packets_;  // by peer: frames not handed to the transport yet
  std::vector<uint32_t> next_tag_;          // by peer
  std::vector<char> has_left_;              // by rank: has said goodbye
  Clock::time_point last_activity_, last_deadline_check_;

  // ---- shared with other threads --------------------------------------------------------------

  Options options_;  // `servers` is filled in before is_ready_, constant afterwards
  int rank_ = 0, size_ = 1;  // likewise
  Statistics statistics_;
  std::shared_ptr<Startup> startup_;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable inbox_filled_;
  std::condition_variable state_changed_;
  std::deque<Submission> inbox_;
  std::string failure_;
  std::string abort_requested_;
  bool is_ready_ = false, stop_ = false, abort_sent_ = false;
  bool goodbye_said_ = false, goodbye_sent_ = false, all_have_left_ = false;
  bool thread_ended_ = false;

  std::thread thread_;
};

Communicator::Communicator(TransportFactory open, Options options, double startup_timeout_s)
    : impl_(std::make_unique<Impl>(std::move(open), std::move(options), startup_timeout_s)) {}
Communicator::~Communicator() = default;
int Communicator::rank() const { return impl_->rank(); }
int Communicator::size() const { return impl_->size(); }
void Communicator::Submit(Exchange exchange, Done done) {
  impl_->Submit(std::move(exchange), std::move(done));
}
void Communicator::Abort(const std::string& reason, double seconds) {
  impl_->Abort(reason, seconds);
}
std::string Communicator::Goodbye() { return impl_->Goodbye(); }
std::string Communicator::failure() const { return impl_->failure(); }
std::string Communicator::StatisticsJson() const { return impl_->StatisticsJson(); }

}  // namespace poseidon
