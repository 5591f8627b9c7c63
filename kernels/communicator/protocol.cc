// Hands what is submitted and what arrives to those who exchange it, and finds out that other ranks fail, leave, or
// are late.
//
// Tests: tests/native/protocol_test.cc, tests/native/heartbeats_test.cc, tests/native/fuzz_test.cc.

#include "protocol.h"

#include <algorithm>
#include <cstdint>
#include <new>
#include <utility>

#include "text.h"

namespace poseidon {
namespace {

// The largest piece in which tensors are copied: a KV pair of a shard of doubles, which are cut as floats are. One of
// floats, with a part of half as many bytes, is smaller.
size_t PieceBytes(const Options& options) { return 2 * static_cast<size_t>(options.kv_pair_bytes) + 256; }

}  // namespace

Protocol::Protocol(std::unique_ptr<Transport> transport, Options options, const std::vector<int>& nodes,
                   Statistics* statistics, std::function<void(const std::string& reason)> on_failure,
                   std::function<void(Question)> on_question)
    : transport_(std::move(transport)),
      rank_(transport_->rank()),
      size_(transport_->size()),
      options_(WithServers(std::move(options), nodes)),
      routes_(rank_, nodes, options_.dedicated_servers),
      layout_(LayoutDigest(options_, nodes)),
      statistics_(statistics),
      on_failure_(std::move(on_failure)),
      has_left_(size_),
      checks_(rank_, options_, &routes_),
      heartbeats_(rank_, size_, options_.heartbeat_timeout_s, Clock::now()),
      sender_(transport_.get(), layout_, static_cast<size_t>(options_.kv_pair_bytes), statistics_),
      links_(rank_, size_, &routes_, &sender_, static_cast<size_t>(options_.kv_pair_bytes),
             static_cast<size_t>(options_.staging_bytes), statistics_->staging, &statistics_->events),
      pings_(transport_.get(), &sender_),
      questions_(transport_.get(), &sender_, std::move(on_question)),
      gathering_(
          transport_.get(), static_cast<size_t>(options_.kv_pair_bytes), &routes_, &sender_, &links_, statistics_,
          [this](size_t bytes) { return TakeMemory(bytes); },
          [this](const std::string& reason) { Fail(reason, /*tell_peers=*/true); }),
      dense_(
          transport_.get(), options_, &routes_, &sender_, &links_, &gathering_, statistics_, &has_left_,
          [this](size_t bytes) { return TakeMemory(bytes); },
          [this](const std::string& reason) { Fail(reason, /*tell_peers=*/true); }) {
  transport_->TellHeard([this](int peer) { heartbeats_.Heard(peer, Clock::now()); });
}

// ---- what is submitted ----------------------------------------------------------------------

void Protocol::Start(Exchange exchange, Done done, Clock::time_point submitted) {
  if (has_failed()) return done(failure_);
  if (!exchange.on_device) return StartReady(std::move(exchange), std::move(done), submitted, nullptr);
  const std::shared_ptr<const OnDevice> tensor = exchange.on_device;
  Staging* const staging = StagingOf(tensor->device);
  if (!staging) return done(failure_);
  // It begins when the gradient is there, not when TensorFlow has told the GPU to compute it.
  staging->WhenReady(tensor, [this, exchange = std::move(exchange), done = std::move(done), staging](bool is_ready) {
    if (!is_ready || has_failed()) return done(failure_);
    StartReady(exchange, done, Clock::now(), staging);
  });
}

// Memory that the network can write, and this rank's GPU; null if there is no more.
std::shared_ptr<char[]> Protocol::TakeMemory(size_t bytes) {
  return staging_ ? staging_->TakeUnlimited(bytes) : std::shared_ptr<char[]>(new (std::nothrow) char[bytes]);
}

// The staging of this rank's GPU; null, after a failure, of another one.
Staging* Protocol::StagingOf(Device* device) {
  if (!staging_) {
    staging_ = std::make_unique<Staging>(device, PieceBytes(options_), static_cast<size_t>(options_.staging_bytes),
                                         statistics_->staging, &statistics_->events);
    links_.Use(device);
  }
  if (staging_->device() == device) return staging_.get();
  FailIf(
      Text("Rank ", rank_, " exchanges tensors of two GPUs, expected those of one: start one process for each GPU."));
  return nullptr;
}

void Protocol::StartReady(Exchange exchange, Done done, Clock::time_point submitted, Staging* staging) {
  if (!exchange.ranges.empty()) return StartRanges(exchange, std::move(done), submitted, staging);
  const uint64_t site = Hash(exchange.site);
  StartNamed(site, std::move(exchange), std::move(done), submitted, staging);
}

// Each rank gets a range of a sum: all ranges travel beside each other, each as a sum that is the shard of one rank.
void Protocol::StartRanges(const Exchange& whole, Done done, Clock::time_point submitted, Staging* staging) {
  const int size = static_cast<int>(whole.ranges.size());
  std::vector<int64_t> begins;
  std::string layout;  // ranks must agree on all ranges
  int64_t end = 0;
  for (int64_t count : whole.ranges) {
    begins.push_back(end);
    end += count;
    layout += Text(count, ' ');
  }
  auto complete = [this, left = std::make_shared<int>(size), failure = std::make_shared<std::string>(),
                   done = std::move(done), submitted, site = whole.site, row = whole.row, bytes = whole.bytes(),
                   is_blocking = whole.is_blocking](const std::string& error) {
    if (!error.empty()) *failure = error;
    if (--*left > 0) return;
    if (failure->empty()) statistics_->Exchanged(site, {row, submitted, Clock::now(), bytes, is_blocking});
    done(*failure);
  };
  for (int step = 1; step <= size; ++step) {  // not all ranks send to the same one at a time
    const int owner = (rank_ + step) % size;
    Exchange range = whole;
    range.ranges.clear();
    range.is_range = true;
    range.count = whole.ranges[owner];
    range.input = static_cast<const char*>(whole.input) + begins[owner] * ElementBytes(whole.sent_dtype());
    if (owner != rank_) range.output = nullptr;
    range.shards = {static_cast<uint32_t>(Hash(layout)), owner};
    StartNamed(Hash(Text(whole.site, " of rank ", owner)), std::move(range), complete, submitted, staging);
  }
}

void Protocol::StartNamed(uint64_t site, Exchange exchange, Done done, Clock::time_point submitted, Staging* staging) {
  if (has_failed()) return done(failure_);
  sender_.SetPriority(site, exchange.priority);
  dense_.Start(std::move(exchange), std::move(done), site, submitted, staging);
  FailIfLeftBehind();
}

void Protocol::StartFactors(Factors factors, FactorsDone done, Clock::time_point submitted) {
  if (has_failed()) return done(failure_, {});
  if (!factors.on_device) return StartReadyFactors(std::move(factors), std::move(done), submitted, nullptr);
  const std::shared_ptr<const OnDevice> tensors = factors.on_device;
  Staging* const staging = StagingOf(tensors->device);
  if (!staging) return done(failure_, {});
  staging->WhenReady(tensors, [this, factors = std::move(factors), done = std::move(done), staging](bool is_ready) {
    if (!is_ready || has_failed()) return done(failure_, {});
    StartReadyFactors(factors, done, Clock::now(), staging);
  });
}

void Protocol::StartReadyFactors(Factors factors, FactorsDone done, Clock::time_point submitted, Staging* staging) {
  const uint64_t hash = Hash(factors.site), form = Hash(factors.form);
  SiteStatistics& statistics = statistics_->Of(factors.site);
  // If it has to travel dense, that is the same step; so is the second half.
  statistics_->Submitted(~hash ^ factors.since.has_value(), submitted, factors.is_of_step);
  sender_.SetPriority(hash, factors.priority);
  dense_.NameSite(hash, factors.site);
  size_t bytes = 0;
  for (const FactorPart& part : factors.parts) bytes += part.bytes;
  auto completed = [this, done = std::move(done), site = factors.site, row = factors.row,
                    begin = factors.since.value_or(submitted), bytes, is_blocking = factors.is_blocking,
                    is_first_half = factors.is_first_half](const std::string& error, GatheredFactors gathered) {
    const auto now = Clock::now();
    statistics_->Completed(now);
    // Those that were refused travel dense, and that is the exchange.
    if (gathered.is_complete && !is_first_half) statistics_->events.Add(site, {row, begin, now, bytes, is_blocking});
    done(error, std::move(gathered));
  };
  FailIf(gathering_.Start(std::move(factors), completed, hash, form, statistics, submitted, staging));
  FailIfLeftBehind();
}

void Protocol::StartPing(int peer, size_t bytes, PingDone done) {
  if (has_failed()) return done(failure_, 0);
  pings_.Start(peer, bytes, std::move(done));
  FailIfLeftBehind();
}

void Protocol::Ask(int peer, const std::string& text, void* answer, size_t bytes, Done done) {
  if (has_failed()) return done(failure_);
  questions_.Ask(peer, text, answer, bytes, std::move(done));
}

void Protocol::Reply(int peer, uint64_t number, std::string answer, bool is_refusal) {
  if (!has_failed()) questions_.Reply(peer, number, std::move(answer), is_refusal);
}

// ---- what arrives ---------------------------------------------------------------------------

bool Protocol::Poll() {
  const bool has_copied = staging_ && (staging_->Poll() | links_.Poll());
  if (staging_ && !staging_->failure().empty()) {
    FailIf(Text("The GPU of rank ", rank_, " failed: ", staging_->failure(), "."));
  }
  const bool has_arrived = transport_->Poll([this](int peer, const char* data, size_t bytes) {
    const std::string wrong = Packets::Unpack(
        data, bytes, [this, peer](const FrameHeader& header, const char* payload) { OnFrame(peer, header, payload); });
    if (!wrong.empty()) FailIf(Malformed(peer, wrong));
  });
  return has_arrived || has_copied;
}

void Protocol::OnFrame(int peer, const FrameHeader& header, const char* payload) {
  if (header.kind == FrameKind::kAbort && !header.is_bulk()) {
    return Fail(std::string(payload, header.length), /*tell_peers=*/false);
  }
  if (has_failed()) return;  // the step is lost
  if (header.kind == FrameKind::kGoodbye) {
    has_left_[peer] = 1;
    return FailIfLeftBehind();
  }
  if (header.layout != layout_) {
    return FailIf(Text("Rank ", peer, " and rank ", rank_,
                       " cut tensors differently: give PoseidonStrategy the same servers, dedicated_servers, "
                       "kv_pair_bytes and ranks_per_node, and install the same tf_poseidon, on all ranks."));
  }
  if (header.kind == FrameKind::kAlive) return;
  const std::string wrong = checks_.Wrong(peer, header);
  if (!wrong.empty()) return FailIf(Malformed(peer, wrong));
  switch (header.kind) {
    case FrameKind::kFactors:
    case FrameKind::kColumns:
    case FrameKind::kGpuFactors:
      return FailIf(gathering_.OnFactors(peer, header, payload));
    case FrameKind::kRefusal:
      return gathering_.OnRefusal(peer, header);
    case FrameKind::kPing:
      return pings_.OnPing(peer, header);
    case FrameKind::kPong:
      return FailIf(pings_.OnPong(peer, header));
    case FrameKind::kQuestion:
      return questions_.OnQuestion(peer, header, payload);
    case FrameKind::kAnswer:
      return FailIf(questions_.OnAnswer(peer, header, payload));
    case FrameKind::kWindow:
    case FrameKind::kWindowOpen:
    case FrameKind::kTaken: {
      if (has_left_[rank_]) return;  // it answers no more, and exchanges nothing
      const std::string wrong = links_.OnFrame(peer, header, payload);
      return FailIf(wrong.empty() ? "" : Malformed(peer, wrong));
    }
    default:
      dense_.OnFrame(peer, header, payload);
      return FailIfLeftBehind();
  }
}

// ---- the end --------------------------------------------------------------------------------

void Protocol::SayGoodbye() {
  wants_goodbye_ = true;
  Flush();
}

void Protocol::Flush() {
  // What this rank has begun to give goes first: nothing follows a goodbye, and others' word that they have copied what
  // lies in its window finds it here.
  const bool is_giving = is_waiting_for_device() || links_.is_holding();
  if (wants_goodbye_ && !gathering_.is_passing_on() && !is_giving) SendGoodbye();
  sender_.Flush();
}

void Protocol::SendGoodbye() {
  wants_goodbye_ = false;
  if (has_failed()) return;
  has_left_[rank_] = 1;
  FailIfLeftBehind();
  if (has_failed()) return;
  FrameHeader header = {};
  header.kind = FrameKind::kGoodbye;
  sender_.ToOthers(header);
}

std::vector<int> Protocol::MissingGoodbyes() const {
  std::vector<int> missing;
  for (int rank = 0; rank < size_; ++rank) {
    if (!has_left_[rank]) missing.push_back(rank);
  }
  return missing;
}

bool Protocol::HaveWorkersLeft() const {
  return std::all_of(has_left_.begin(), has_left_.begin() + routes_.workers(), [](char left) { return left; });
}

void Protocol::Close() {
  links_.CloseWindows();
  transport_->Close(/*agreed=*/MissingGoodbyes().empty() && !has_failed());
}

// ---- failures -------------------------------------------------------------------------------

void Protocol::Fail(const std::string& reason, bool tell_peers) {
  if (has_failed()) return;
  failure_ = reason;
  on_failure_(reason);
  sender_.Clear();
  if (tell_peers) {
    FrameHeader header = {};
    header.kind = FrameKind::kAbort;
    header.length = std::min(reason.size(), kMaxReasonBytes);
    sender_.ToOthers(header, reason.data());
  }
  dense_.Fail(reason);
  gathering_.Fail(reason);
  if (staging_) staging_->Fail();
  links_.Fail();
  pings_.Fail(reason);
  questions_.Fail(reason);
}

void Protocol::FailIf(const std::string& disagreement) {
  if (!disagreement.empty()) Fail(disagreement, /*tell_peers=*/true);
}

void Protocol::FailIfLeftBehind() {
  if (std::none_of(has_left_.begin(), has_left_.end(), [](char left) { return left; })) return;
  FailIf(dense_.FindLeftBehind());
  if (auto found = gathering_.FindLeftBehind(has_left_)) {
    FailIf(LeftBehind(found->missing, rank_, "'" + found->site + "'"));
  }
  if (auto peer = pings_.FindLeftBehind(has_left_)) FailIf(LeftBehind(*peer, rank_, "a ping"));
}

void Protocol::CheckDeadlines() {
  const auto now = Clock::now();
  CheckHeartbeats(now);
  if (has_failed()) return;
  if (auto overdue = dense_.FindOverdue(now)) {
    return FailOverdue(Text("exchange '", overdue->site, "' (", overdue->scheme, ")"), overdue->ranks);
  }
  if (auto overdue = gathering_.FindOverdue(now, options_.timeout_s)) {
    return FailOverdue(Text("exchange '", overdue->site, "' (gather)"), overdue->ranks);
  }
  if (auto peer = pings_.FindOverdue(now, options_.timeout_s)) FailOverdue("answer a ping", {*peer});
  if (auto overdue = questions_.FindOverdue(now, options_.timeout_s)) {
    FailOverdue(Text("answer '", overdue->first, "'"), {overdue->second});
  }
}

void Protocol::CheckHeartbeats(Clock::time_point now) {
  if (has_failed()) return;
  FrameHeader header = {};
  header.kind = FrameKind::kAlive;
  header.layout = layout_;  // a rank that takes another one for a dedicated server may exchange nothing with it
  const char* begin = reinterpret_cast<const char*>(&header);
  // Nothing follows a goodbye: a rank that has all of them closes its transport, and MPI ends a job that sends to one.
  if (!has_left_[rank_]) {
    // Straight to the transport: these belong to no step, and statistics count those of steps.
    for (int peer : heartbeats_.Due(now)) transport_->SendPacket(peer, {begin, begin + sizeof(header)});
  }
  std::vector<int> silent;
  for (int peer : heartbeats_.Silent(now)) {
    if (!has_left_[peer]) silent.push_back(peer);
  }
  if (silent.empty()) return;
  FailIf(Text("Rank ", rank_, " has heard nothing of ", RankList(silent), " for ", options_.heartbeat_timeout_s,
              " s: the host is down, frozen or cannot be reached, or the process was stopped. Look at the host of ",
              RankList(silent),
              "; if processes are stopped on purpose, as in a debugger, give PoseidonStrategy a larger "
              "heartbeat_timeout_s."));
}

void Protocol::FailOverdue(const std::string& what, const std::vector<int>& ranks) {
  if (ranks.empty()) {
    return FailIf(Text("Rank ", rank_, " waited ", options_.timeout_s, " s for its GPU to copy what belongs to ", what,
                       ". Look whether the GPU still works (nvidia-smi, dmesg)."));
  }
  FailIf(Text("Rank ", rank_, " waited ", options_.timeout_s, " s for ", RankList(ranks), " to ", what,
              ". Look at the output of ", RankList(ranks),
              "; if it is only slow, give PoseidonStrategy a larger timeout_s."));
}

}  // namespace poseidon
