// What one rank does with what is submitted to it and with what arrives, and how it finds out that others fail,
// leave, or are late.

#include "protocol.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <numeric>
#include <set>
#include <sstream>

namespace poseidon {
namespace {

template <typename... Parts>
std::string Text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// FNV-1a, 64 bits.
uint64_t Hash(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (unsigned char c : text) hash = (hash ^ c) * 0x100000001b3;
  return hash;
}

Options WithServers(Options options, int size) {
  if (options.servers.empty()) {
    options.servers.resize(size);
    std::iota(options.servers.begin(), options.servers.end(), 0);
  }
  return options;
}

uint64_t PlanDigest(const Options& options, const std::vector<int>& nodes) {
  std::ostringstream text;
  text << "poseidon frames 3;" << options.kv_pair_bytes << ";nodes";
  for (int node : nodes) text << ';' << node;
  text << ";servers";
  for (int server : options.servers) text << ';' << server;
  return Hash(text.str());
}

}  // namespace

std::vector<int> NodesOf(const Options& options, const Transport& transport) {
  std::vector<int> nodes = transport.nodes();
  int ranks_per_node = options.ranks_per_node;
  if (nodes.empty()) {
    nodes.resize(transport.size());
    ranks_per_node = std::max(ranks_per_node, 1);
  }
  if (ranks_per_node == 0) return nodes;
  std::map<int, int> found;  // ranks by node
  std::map<std::pair<int, int>, int> parts;
  for (int& node : nodes) {
    const int part = found[node]++ / ranks_per_node;
    node = parts.emplace(std::make_pair(node, part), static_cast<int>(parts.size())).first->second;
  }
  return nodes;
}

std::string RankList(const std::vector<int>& ranks) {
  std::ostringstream out;
  out << (ranks.size() == 1 ? "rank " : "ranks ");
  for (size_t i = 0; i < ranks.size(); ++i) out << (i ? ", " : "") << ranks[i];
  return out.str();
}

Protocol::Protocol(std::unique_ptr<Transport> transport, Options options,
                   const std::vector<int>& nodes, Statistics* statistics,
                   std::function<void(const std::string& reason)> on_failure)
    : transport_(std::move(transport)),
      rank_(transport_->rank()),
      size_(transport_->size()),
      options_(WithServers(std::move(options), size_)),
      routes_(rank_, nodes),
      plan_(PlanDigest(options_, nodes)),
      statistics_(statistics),
      on_failure_(std::move(on_failure)),
      sender_(transport_.get(), plan_, statistics_),
      server_(transport_.get(), &routes_,
              [this](const auto& active, size_t pair, const auto& contributions,
                     uint32_t common_form) { AddUp(active, pair, contributions, common_form); }),
      broadcasting_(transport_.get(), &routes_, &sender_),
      has_left_(size_) {}

// ---- the worker's side ----------------------------------------------------------------------

void Protocol::Start(Exchange exchange, Done done, Clock::time_point submitted) {
  if (has_failed()) return done(failure_);
  const uint64_t hash = Hash(exchange.site);
  if (active_.count(hash)) {
    return done("'" + exchange.site +
                "' is already being exchanged: one site cannot be in flight twice.");
  }
  Site& site = sites_[hash];
  site.name = exchange.site;
  KvPairs pairs(hash, exchange.bytes(), static_cast<size_t>(options_.kv_pair_bytes),
                options_.servers);
  SiteStatistics& statistics = statistics_->Of(exchange.site);
  statistics_->Submitted(hash, submitted);
  auto active = std::make_shared<ActiveExchange>(std::move(exchange), std::move(done), hash,
                                                 site.steps++, std::move(pairs), statistics,
                                                 submitted);
  active_[hash] = active;
  if (active->exchange.is_gradient) active->form = broadcasting_.StartDense(hash);
  const size_t first = FirstPair(active->pairs);
  for (size_t i = 0; i < active->pairs.size() && !has_failed(); ++i) {
    StartPair(active, (first + i) % active->pairs.size());
  }
  auto early = early_.extract({hash, active->step});
  if (!early.empty()) {
    for (const auto& result : early.mapped()) TakeEarlyResult(active, result);
  }
  Complete(active);
}

void Protocol::StartFactors(Factors factors, FactorsDone done, Clock::time_point submitted) {
  if (has_failed()) return done(failure_, {});
  const uint64_t hash = Hash(factors.site), form = Hash(factors.form);
  SiteStatistics& statistics = statistics_->Of(factors.site);
  statistics_->Submitted(~hash, submitted);  // if it has to travel dense, that is the same step
  sites_[hash].name = factors.site;
  size_t bytes = 0;
  for (const FactorPart& part : factors.parts) bytes += part.bytes;
  auto completed = [this, done = std::move(done), site = factors.site, row = factors.row, submitted, bytes,
                    is_blocking = factors.is_blocking](const std::string& error,
                                                       GatheredFactors gathered) {
    const auto now = Clock::now();
    statistics_->Completed(now);
    // Those that were refused travel dense, and that is the exchange.
    if (gathered.is_complete) statistics_->events.Add(site, {row, submitted, now, bytes, is_blocking});
    done(error, std::move(gathered));
  };
  FailIf(broadcasting_.Start(std::move(factors), completed, hash, form, statistics,
                             submitted));
  FailIfLeftBehind();
}

// Each rank begins with the server after itself, so that not all send to the same one at a time.
size_t Protocol::FirstPair(const KvPairs& pairs) const {
  const size_t distinct = std::min(pairs.size(), options_.servers.size());
  for (int step = 1; step <= size_; ++step) {
    for (size_t i = 0; i < distinct; ++i) {
      if (pairs[i].server == (rank_ + step) % size_) return i;
    }
  }
  return 0;
}

void Protocol::StartPair(const std::shared_ptr<ActiveExchange>& active, size_t pair) {
  const int server = active->pairs[pair].server;
  const int root = active->exchange.root;
  const bool adds_up = routes_.Collects(server) && (root < 0 || routes_.SourceOf(root, server) >= 0);
  if (adds_up) {
    FailIf(server_.AddOwn(active, pair));
    FailIfLeftBehind();
  } else if (root < 0) {
    Send(active, pair, FrameKind::kContribution, routes_.Up(server),
         active->exchange.contributes ? active->input(pair) : nullptr, active->form);
  } else if (root == rank_) {
    Send(active, pair, FrameKind::kContribution, routes_.Up(server), active->input(pair), 0);
    if (!active->is_in_place()) {
      std::memcpy(active->output(pair), active->input(pair), active->pairs[pair].bytes);
    }
    AddResult(active, pair);
  }
}

void Protocol::OnResult(int peer, const FrameHeader& header, const char* payload) {
  auto found = active_.find(header.site);
  if (found == active_.end() || found->second->step != header.step) {
    return OnEarlyResult(peer, header, payload);
  }
  const std::shared_ptr<ActiveExchange> active = found->second;
  FailIf(Disagreement(peer, header, rank_, active->exchange));
  if (has_failed()) return;
  const size_t pair = active->pairs.IndexOf(header.offset);
  if (std::exchange(active->has_header[pair], 1)) return FailIf(Twice(peer, header, "the result of"));
  active->statistics.received_bytes += header.length;
  if (!header.is_bulk) {
    std::memcpy(active->output(pair), payload, header.length);
    TakeResult(active, pair, header.detail);
  } else if (active->is_sending[pair]) {
    active->deferred[pair] = header;  // the network still reads what the result would overwrite
  } else {
    ReceiveResult(active, pair, header);
  }
}

void Protocol::OnEarlyResult(int peer, const FrameHeader& header, const char* payload) {
  auto early = std::make_shared<EarlyResult>();
  early->peer = peer;
  early->header = header;
  early_[{header.site, header.step}].push_back(early);
  if (!header.is_bulk) {
    early->payload.assign(payload, payload + header.length);
    early->is_ready = true;
    return;
  }
  early->payload.resize(header.length);
  transport_->ReceiveBulk(peer, header.tag, early->payload.data(), header.length, [early] {
    early->is_ready = true;
    if (early->when_ready) early->when_ready();
  });
}

void Protocol::TakeEarlyResult(const std::shared_ptr<ActiveExchange>& active,
                               const std::shared_ptr<EarlyResult>& early) {
  FailIf(Disagreement(early->peer, early->header, rank_, active->exchange));
  if (has_failed()) return;
  const size_t pair = active->pairs.IndexOf(early->header.offset);
  if (std::exchange(active->has_header[pair], 1)) return FailIf(Twice(early->peer, early->header, "the result of"));
  auto take = [this, active, pair, early = early.get()] {
    std::memcpy(active->output(pair), early->payload.data(), early->payload.size());
    active->statistics.received_bytes += early->header.length;
    TakeResult(active, pair, early->header.detail);
  };
  if (early->is_ready) return take();
  early->when_ready = take;  // kept alive by the transfer
}

void Protocol::ReceiveResult(const std::shared_ptr<ActiveExchange>& active, size_t pair,
                             const FrameHeader& header) {
  transport_->ReceiveBulk(
      routes_.Up(active->pairs[pair].server), header.tag, active->output(pair), header.length,
      [this, active, pair, form = header.detail] { TakeResult(active, pair, form); });
}

// The result has come from above.
void Protocol::TakeResult(const std::shared_ptr<ActiveExchange>& active, size_t pair,
                          uint32_t form) {
  active->common_form = form;
  PassDown(active, pair, form);
  AddResult(active, pair);
}

void Protocol::AddResult(const std::shared_ptr<ActiveExchange>& active, size_t pair) {
  active->has_result[pair] = 1;
  Complete(active);
}

// One of the things that `active` waits for has happened.
void Protocol::Complete(const std::shared_ptr<ActiveExchange>& active) {
  if (--active->pending > 0 || has_failed()) return;
  active_.erase(active->site);
  if (active->exchange.is_gradient && active->pairs.size() > 0) {
    broadcasting_.FinishDense(active->site, active->common_form);
  }
  active->statistics.count += 1;
  const auto now = Clock::now();
  statistics_->Completed(now);
  active->statistics.nanoseconds +=
      std::chrono::duration_cast<std::chrono::nanoseconds>(now - active->start).count();
  const Exchange& exchange = active->exchange;
  statistics_->events.Add(exchange.site, {exchange.row, active->start, now, exchange.bytes(),
                                          exchange.is_blocking});
  active->done("");
}

// ---- the server's side ----------------------------------------------------------------------

// All parts that this rank adds up are there.
void Protocol::AddUp(const std::shared_ptr<ActiveExchange>& active, size_t pair,
                     const Server::Contributions& contributions, uint32_t common_form) {
  active->is_added_up[pair] = 1;
  SumOfSums(active->exchange.dtype, contributions, active->pairs[pair].bytes,
            active->output(pair));
  const int up = routes_.Up(active->pairs[pair].server);
  if (up >= 0) {
    Send(active, pair, FrameKind::kContribution, up,
         contributions.empty() ? nullptr : active->output(pair), common_form);
    if (active->exchange.root < 0) return;  // the result is to come
  }
  active->common_form = common_form;
  PassDown(active, pair, common_form);
  AddResult(active, pair);
}

// Sends the result to those whose parts have come to this rank.
void Protocol::PassDown(const std::shared_ptr<ActiveExchange>& active, size_t pair,
                        uint32_t form) {
  const int server = active->pairs[pair].server, root = active->exchange.root;
  const int from = root < 0 ? -1 : routes_.SourceOf(root, server);  // it has what it has sent
  const std::vector<int>& sources = routes_.Sources(server);
  const size_t own = std::find(sources.begin(), sources.end(), rank_) - sources.begin();
  for (size_t step = 1; step < sources.size(); ++step) {
    const int peer = sources[(own + step) % sources.size()];
    if (peer != from) Send(active, pair, FrameKind::kResult, peer, active->output(pair), form);
  }
}

// ---- both sides -----------------------------------------------------------------------------

// Sends `data`, null for a rank that does not contribute, as one KV pair.
void Protocol::Send(const std::shared_ptr<ActiveExchange>& active, size_t pair, FrameKind kind,
                    int peer, const void* data, uint32_t form) {
  if (has_left_[peer]) return FailLeftBehind(peer, rank_, active->exchange.site);
  FrameHeader header = {};
  header.kind = kind;
  header.dtype = static_cast<uint8_t>(active->exchange.dtype);
  header.scheme = active->exchange.scheme();
  header.root = active->exchange.root;
  header.site = active->site;
  header.step = active->step;
  header.count = static_cast<uint64_t>(active->exchange.count);
  header.offset = active->pairs[pair].offset;
  header.length = data ? active->pairs[pair].bytes : 0;
  header.detail = form;
  active->statistics.sent_bytes += header.length;
  if (!routes_.IsLocal(peer)) active->statistics.network_bytes += header.length;
  const bool is_bulk = sender_.Send(peer, header, data, [this, active, pair] {
    active->is_sending[pair] = 0;
    auto deferred = active->deferred.extract(pair);
    if (!deferred.empty()) ReceiveResult(active, pair, deferred.mapped());
    Complete(active);
  });
  if (!is_bulk) return;
  ++active->pending;
  const bool reads_output = active->is_in_place() || routes_.Collects(active->pairs[pair].server);
  if (kind == FrameKind::kContribution && reads_output) active->is_sending[pair] = 1;
}

bool Protocol::Poll() {
  return transport_->Poll([this](int peer, const char* data, size_t bytes) {
    const std::string wrong = Packets::Unpack(
        data, bytes, [this, peer](const FrameHeader& header, const char* payload) {
          OnFrame(peer, header, payload);
        });
    if (!wrong.empty()) Fail(Malformed(peer, wrong), /*tell_peers=*/true);
  });
}

void Protocol::OnFrame(int peer, const FrameHeader& header, const char* payload) {
  if (header.kind == FrameKind::kAbort && !header.is_bulk) {
    return Fail(std::string(payload, header.length), /*tell_peers=*/false);
  }
  if (has_failed()) return;  // the step is lost
  if (header.kind == FrameKind::kGoodbye) {
    has_left_[peer] = 1;
    return FailIfLeftBehind();
  }
  if (header.plan != plan_) {
    std::ostringstream text;
    text << "Rank " << peer << " and rank " << rank_
         << " cut tensors differently: give PoseidonStrategy the same servers, kv_pair_bytes and "
            "ranks_per_node, and install the same tf_poseidon, on all ranks.";
    return Fail(text.str(), /*tell_peers=*/true);
  }
  const std::string wrong = Wrong(peer, header);
  if (!wrong.empty()) return Fail(Malformed(peer, wrong), /*tell_peers=*/true);
  const bool is_kv_pair = header.kind == FrameKind::kContribution || header.kind == FrameKind::kResult;
  if (auto site = sites_.find(header.site); is_kv_pair && site != sites_.end() && header.step < site->second.steps) {
    auto found = active_.find(header.site);
    if (found == active_.end() || found->second->step != header.step) {
      return Fail(Text("Rank ", peer, " exchanges '", site->second.name, "' for the ", header.step + 1,
                       ". time, which is over on rank ", rank_,
                       ": all ranks must exchange the same under each name. Build the same model on all ranks."),
                  /*tell_peers=*/true);
    }
  }
  switch (header.kind) {
    case FrameKind::kResult:
      return OnResult(peer, header, payload);
    case FrameKind::kFactors:
      return FailIf(broadcasting_.OnFactors(peer, header, payload));
    case FrameKind::kRefusal:
      return broadcasting_.OnRefusal(peer, header);
    default:  // a contribution
      FailIf(server_.Add(peer, header, payload));
      return FailIfLeftBehind();
  }
}

std::string Protocol::Wrong(int peer, const FrameHeader& header) const {
  if (header.is_bulk != (header.length > kInlineBytes)) {
    return Text("a payload of ", header.length, " bytes that travels ", header.is_bulk ? "by itself" : "in a packet",
                ", expected up to ", kInlineBytes, " in packets and more by themselves");
  }
  switch (header.kind) {
    case FrameKind::kContribution:
    case FrameKind::kResult:
      return WrongKvPair(peer, header);
    case FrameKind::kFactors:
      return WrongFactors(peer, header);
    case FrameKind::kRefusal:
      return header.length == 0 ? "" : Text("a refusal of ", header.length, " bytes, expected none");
    default:
      return Text("a frame of kind ", static_cast<int>(header.kind), ", expected 0 to 3");
  }
}

std::string Protocol::WrongKvPair(int peer, const FrameHeader& header) const {
  const bool is_sum = header.scheme == Scheme::kParameterServer, is_result = header.kind == FrameKind::kResult;
  const auto dtype = static_cast<DataType>(header.dtype);
  if (dtype > DataType::kBytes || (is_sum && dtype == DataType::kBytes)) {
    return Text("element type ", int{header.dtype}, ", expected 0 to ", static_cast<int>(DataType::kBytes) - is_sum);
  }
  const bool is_root = is_sum ? header.root == -1 : header.root >= 0 && header.root < size_;
  if (!is_root || (!is_sum && header.scheme != Scheme::kBroadcast)) {
    return Text("a KV pair of scheme ", static_cast<int>(header.scheme), " and root ", header.root,
                ", expected a sum of root -1 or a broadcast of root 0 to ", size_ - 1);
  }
  if (header.count > SIZE_MAX / ElementBytes(dtype)) {
    return Text(header.count, " elements of ", Name(dtype), ", expected as many as have an address");
  }
  const size_t bytes = header.count * ElementBytes(dtype);
  const KvPairs pairs(header.site, bytes, static_cast<size_t>(options_.kv_pair_bytes), options_.servers);
  const size_t index = header.offset < bytes ? pairs.IndexOf(header.offset) : 0;
  if (header.offset >= bytes || pairs[index].offset != header.offset) {
    return Text("a KV pair at byte ", header.offset, " of ", bytes, ", expected where one begins");
  }
  const KvPair pair = pairs[index];
  const bool may_be_empty = is_sum && !is_result;
  if (header.length != pair.bytes && !(may_be_empty && header.length == 0)) {
    return Text("a KV pair of ", header.length, " bytes, expected ", pair.bytes, may_be_empty ? " or none" : "");
  }
  bool is_way = peer == routes_.Up(pair.server) && header.root != rank_;
  if (!is_result && is_sum) {
    const std::vector<int>& sources = routes_.Sources(pair.server);
    is_way = std::count(sources.begin(), sources.end(), peer) > 0;
  } else if (!is_result) {
    is_way = peer == routes_.SourceOf(header.root, pair.server);
  }
  if (!is_way) {
    return Text(is_result ? "a result" : "a part", " of a KV pair of server ", pair.server,
                ", expected from those alone that the nodes of the ranks let send it");
  }
  auto found = active_.find(header.site);
  const bool is_active = found != active_.end() && found->second->step == header.step;
  if (is_result && is_sum && !is_active) {
    return Text("the result of a sum in step ", header.step, ", expected when this rank has given its part");
  }
  if (!is_result && is_active && index < found->second->pairs.size() && found->second->is_added_up[index]) {
    return Text("a part of the KV pair at byte ", header.offset, ", expected before all have been added up");
  }
  return "";
}

std::string Protocol::WrongFactors(int peer, const FrameHeader& header) const {
  if (header.root < 0 || header.root >= size_ || header.root == rank_ || peer != routes_.GiverOf(header.root)) {
    return Text("factors of rank ", header.root, ", expected those of another one of ", size_,
                " ranks from whom the nodes of the ranks let send them");
  }
  if (header.offset == 0 ? header.length > 0 : header.length % header.offset != 0) {
    return Text("factors of ", header.length, " bytes in rows of ", header.offset, ", expected whole rows");
  }
  return "";
}

void Protocol::SayGoodbye() {
  wants_goodbye_ = true;
  Flush();
}

void Protocol::Flush() {
  if (wants_goodbye_ && !broadcasting_.is_passing_on()) SendGoodbye();
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

void Protocol::Close() { transport_->Close(/*agreed=*/MissingGoodbyes().empty() && !has_failed()); }

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
  // They stay in `lost_`: the network may still write to their memory, and call back for them.
  for (auto& [site, active] : active_) lost_.push_back(std::move(active));
  active_.clear();
  for (auto& active : lost_) active->done(reason);
  broadcasting_.Fail(reason);
}

void Protocol::FailIf(const std::string& disagreement) {
  if (!disagreement.empty()) Fail(disagreement, /*tell_peers=*/true);
}

void Protocol::FailIfLeftBehind() {
  if (std::none_of(has_left_.begin(), has_left_.end(), [](char left) { return left; })) return;
  if (auto found = server_.FindLeftBehind(has_left_)) {
    return FailLeftBehind(found->missing, found->waiting, sites_[found->site].name);
  }
  if (auto found = broadcasting_.FindLeftBehind(has_left_)) {
    FailLeftBehind(found->missing, rank_, found->site);
  }
}

void Protocol::FailLeftBehind(int missing, int waiting, const std::string& site) {
  std::ostringstream text;
  text << "Rank " << missing << " has ended its program, but rank " << waiting
       << " still waits for its part of "
       << (site.empty() ? "an exchange that rank " + std::to_string(rank_) + " has not reached"
                        : "'" + site + "'")
       << ": all ranks must make the same number of steps.";
  Fail(text.str(), /*tell_peers=*/true);
}

void Protocol::CheckDeadlines() {
  const auto now = Clock::now();
  for (const auto& [site, active] : active_) {
    const double waited = Seconds(now - active->start);
    if (waited < options_.timeout_s) continue;
    const Awaited awaited = AwaitedBy(*active);
    if (waited < (1 + kPatience * awaited.others) * options_.timeout_s) continue;
    const char* scheme = active->exchange.root < 0 ? "ps" : "broadcast";
    return FailOverdue(active->exchange.site, scheme, awaited.ranks);
  }
  if (auto overdue = broadcasting_.FindOverdue(now, options_.timeout_s)) {
    FailOverdue(overdue->site, "sfb", overdue->ranks);
  }
}

void Protocol::FailOverdue(const std::string& site, const std::string& scheme,
                           const std::vector<int>& ranks) {
  std::ostringstream text;
  text << "Rank " << rank_ << " waited " << options_.timeout_s << " s for " << RankList(ranks)
       << " to exchange '" << site << "' (" << scheme << "). Look at the output of "
       << RankList(ranks) << "; if it is only slow, give PoseidonStrategy a larger timeout_s.";
  Fail(text.str(), /*tell_peers=*/true);
}

Protocol::Awaited Protocol::AwaitedBy(const ActiveExchange& active) const {
  const std::vector<int> sums = server_.Missing(active);
  std::vector<int> parts;
  std::copy_if(sums.begin(), sums.end(), std::back_inserter(parts), [this](int peer) {
    return routes_.IsLocal(peer) || !routes_.IsShared(peer);  // gives what it has, and no sum
  });
  if (!parts.empty()) return {parts, 0};
  if (!sums.empty()) return {sums, 1};
  std::set<int> servers, gateways;
  for (size_t i = 0; i < active.pairs.size(); ++i) {
    const int server = active.pairs[i].server;
    if (active.has_result[i] || server == rank_) continue;
    const int up = routes_.Up(server);
    (up == server ? servers : gateways).insert(up);
  }
  if (servers.empty() && gateways.empty()) {  // all that may not have taken this rank's own
    for (int rank = 0; rank < size_; ++rank) gateways.insert(rank);
    gateways.erase(rank_);
  }
  const std::set<int>& ranks = servers.empty() ? gateways : servers;
  return {{ranks.begin(), ranks.end()}, servers.empty() ? 3 : 2};
}

}  // namespace poseidon
