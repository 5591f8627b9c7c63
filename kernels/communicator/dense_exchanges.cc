// What one rank does with the tensors that it submits, and with the parts and results that arrive for them.
//
// Tests: tests/native/protocol_test.cc, tests/communicator/test_communicator.py.

#include "dense_exchanges.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>
#include <set>
#include <utility>

#include "sum.h"
#include "text.h"

namespace poseidon {
namespace {

// The memory for a part and for the sum, which overwrites it unless it is of a narrower type.
size_t BytesToAddUp(const ActiveExchange& active, size_t pair) {
  const size_t part = active.input_bytes(pair), sum = active.pairs[pair].bytes;
  return part < sum ? part + sum : sum;
}

// What an exchange is called in messages.
const char* SchemeOf(Traffic traffic) {
  switch (traffic) {
    case Traffic::kBroadcast:
      return "broadcast";
    case Traffic::kScatter:
      return "scatter";
    case Traffic::kShards:
      return "shards";
    default:
      return "ps";
  }
}

}  // namespace

DenseExchanges::DenseExchanges(Transport* transport, const Options& options, const Routes* routes, Sender* sender,
                               GpuLinks* links, GatherExchanges* gathering, Statistics* statistics,
                               const std::vector<char>* has_left, Allocate allocate,
                               std::function<void(const std::string& reason)> fail)
    : transport_(transport),
      rank_(transport->rank()),
      size_(transport->size()),
      options_(options),
      routes_(routes),
      sender_(sender),
      links_(links),
      gathering_(gathering),
      statistics_(statistics),
      has_left_(has_left),
      allocate_(std::move(allocate)),
      fail_(std::move(fail)),
      server_(
          transport, routes, statistics,
          [this](const Active& active, size_t pair, const auto& contributions, uint32_t common_form) {
            AddUp(active, pair, contributions, common_form);
          },
          [this](const Active& active, size_t pair) { Need(active, pair); },
          [this](int peer, const FrameHeader& header, Server::Taken* taken, std::function<void()> then) {
            return TakePart(peer, header, taken, std::move(then));
          }) {}

DenseExchanges::Active DenseExchanges::Find(uint64_t site, uint64_t step) const {
  auto found = active_.find({site, step});
  return found != active_.end() ? found->second : nullptr;
}

bool DenseExchanges::IsActive(uint64_t site) const {
  auto found = active_.lower_bound({site, 0});
  return found != active_.end() && found->first.first == site;
}

void DenseExchanges::FailIf(const std::string& disagreement) {
  if (!disagreement.empty()) fail_(disagreement);
}

// ---- the way up -----------------------------------------------------------------------------

void DenseExchanges::Start(Exchange exchange, Done done, uint64_t hash, Clock::time_point submitted, Staging* staging) {
  if (!exchange.is_clocked && IsActive(hash)) {
    return done("'" + exchange.site + "' is already being exchanged: one site cannot be in flight twice.");
  }
  Site& site = sites_[hash];
  site.name = exchange.site;
  site.priority = exchange.priority;
  KvPairs pairs = exchange.Cut(hash, static_cast<size_t>(options_.kv_pair_bytes),
                               exchange.ways == Ways::kBoth ? options_.servers : options_.shard_servers);
  SiteStatistics& statistics = statistics_->Of(exchange.site);
  if (exchange.is_counted) statistics_->Submitted(hash, submitted, exchange.is_of_step);
  auto active = std::make_shared<ActiveExchange>(std::move(exchange), std::move(done), hash, site.steps++,
                                                 std::move(pairs), statistics, submitted, staging);
  active_[{hash, active->step}] = active;
  FailIf(server_.DisagreementWith(*active));
  if (active->exchange.is_gradient) active->form = gathering_->StartDense(hash);
  const size_t first = FirstPair(active->pairs);
  for (size_t i = 0; i < active->pairs.size() && !has_failed_; ++i) {
    StartPair(active, (first + i) % active->pairs.size());
  }
  auto early = early_.extract({hash, active->step});
  if (!early.empty()) {
    for (const auto& result : early.mapped()) TakeEarlyResult(active, result);
  }
  Complete(active);
}

void DenseExchanges::TakePartToServe(int peer, const FrameHeader& header, const char* payload) {
  FailIf(server_.Add(peer, header, payload));
  if (has_failed_) return;
  if (IsActive(header.site)) {  // a worker that has the results is a step ahead of those that do not have them yet
    to_serve_.emplace(SiteStep{header.site, header.step}, header);
  } else {
    Serve(header);
  }
}

// Starts the exchange to which a part belongs. This rank knows the site's hash only.
void DenseExchanges::Serve(const FrameHeader& header) {
  Exchange exchange;
  exchange.site = Text("an exchange that rank ", rank_, " serves");
  exchange.dtype = static_cast<DataType>(header.dtype);
  exchange.count = static_cast<int64_t>(header.count);
  exchange.contributes = false;
  exchange.is_of_step = false;
  exchange.root = header.root;
  const auto result = std::make_shared<BufferPool::Buffer>(results_.Take(exchange.bytes()));
  exchange.output = result->data.get();
  sites_[header.site].steps = header.step;
  Start(
      std::move(exchange), [this, result](const std::string&) { results_.Give(std::move(*result)); }, header.site,
      Clock::now(), nullptr);
}

// Each rank begins with the server after itself, so that not all send to the same one at a time.
size_t DenseExchanges::FirstPair(const KvPairs& pairs) const {
  const size_t distinct = std::min(pairs.size(), options_.servers.size());
  for (int step = 1; step <= size_; ++step) {
    for (size_t i = 0; i < distinct; ++i) {
      if (pairs[i].server == (rank_ + step) % size_) return i;
    }
  }
  return 0;
}

void DenseExchanges::StartPair(const Active& active, size_t pair) {
  if (active->exchange.ways == Ways::kDown) return GiveShard(active, pair);
  const int server = active->pairs[pair].server;
  const int root = active->exchange.root;
  if (routes_->only_serves() && server != rank_) return AddResult(active, pair);  // it is no concern of this rank
  const bool adds_up = routes_->Collects(server) && (root < 0 || routes_->SourceOf(root, server) >= 0);
  if (adds_up) {
    server_.AddOwn(active, pair);
    if (has_failed_ || !active->staging || !active->adds(rank_) || active->staged[pair].is_wanted) return;
    if (active->staged[pair].is_adding_up || WillAddUpOnGpu(active, pair)) return;
    // What waits for other ranks may be fetched meanwhile.
    if (PinnedMemory memory = active->staging->TryTakeToWait(BytesToAddUp(*active, pair))) {
      FetchOwn(active, pair, std::move(memory));
    }
  } else if (active->staging && active->adds(rank_)) {
    const int up = routes_->Up(server);
    if (IsLinked(active, up, active->input_bytes(pair))) {
      SendByLink(active, pair, FrameKind::kGpuContribution, {up}, active->given_input(pair),
                 active->exchange.sent_dtype(), active->form);
    } else {
      FetchAndSend(active, pair);
    }
  } else if (root < 0) {
    Send(active, pair, FrameKind::kContribution, routes_->Up(server),
         active->exchange.contributes ? active->input(pair) : nullptr, active->exchange.sent_dtype(), active->form);
    if (active->exchange.ways == Ways::kUp) AddResult(active, pair);
  } else if (root == rank_) {
    Send(active, pair, FrameKind::kContribution, routes_->Up(server), active->input(pair), active->exchange.dtype, 0);
    if (!active->is_in_place()) {
      std::memcpy(active->output(pair), active->input(pair), active->pairs[pair].bytes);
    }
    AddResult(active, pair);
  }
}

// Takes this rank's part of what it adds up from a GPU: to given memory, or null to take some, where the sum will
// be, too. A part in a narrower type than the sum lies behind it.
void DenseExchanges::FetchOwn(const Active& active, size_t pair, PinnedMemory memory) {
  if (std::exchange(active->staged[pair].is_wanted, true)) return;
  const size_t size = BytesToAddUp(*active, pair), offset = size - active->input_bytes(pair);
  auto then = [this, active, pair, offset](PinnedMemory memory) {
    if (!memory) return;
    active->staged[pair] = {std::move(memory), offset, /*is_wanted=*/true};
    server_.GiveOwn(active, pair);
  };
  const Staging::Source source{active->exchange.site, active->exchange.priority, active->given_input(pair),
                               active->adds(rank_) ? active->input_bytes(pair) : 0};
  if (memory) {
    active->staging->FetchInto(std::move(memory), source, offset, then);
  } else {
    active->staging->Fetch(source, size, offset, then);
  }
}

void DenseExchanges::FetchAndSend(const Active& active, size_t pair) {
  const size_t bytes = active->input_bytes(pair);
  active->staging->Fetch({active->exchange.site, active->exchange.priority, active->given_input(pair), bytes}, bytes, 0,
                         [this, active, pair](PinnedMemory memory) {
                           if (!memory) return;
                           active->staged[pair] = {std::move(memory)};
                           Send(active, pair, FrameKind::kContribution, routes_->Up(active->pairs[pair].server),
                                active->input(pair), active->exchange.sent_dtype(), active->form);
                           if (active->exchange.root >= 0) Deliver(active, pair, nullptr);
                           active->staged[pair] = {};
                           if (active->exchange.root >= 0 || active->exchange.ways == Ways::kUp) {
                             AddResult(active, pair);
                           }
                         });
}

// ---- the way up between GPUs

bool DenseExchanges::IsLinked(const Active& active, int peer, size_t bytes) const {
  return active->staging && active->exchange.traffic() == Traffic::kSum && links_->MaySend(peer, bytes);
}

// Whether parts of all other ranks of the node will come by their windows, so that this rank's own need not come to the
// host. They come there all the same if they must.
bool DenseExchanges::WillAddUpOnGpu(const Active& active, size_t pair) const {
  if (active->exchange.traffic() != Traffic::kSum || active->pairs[pair].bytes <= kInlineBytes) return false;
  bool has_others = false;
  for (int rank : routes_->Sources(active->pairs[pair].server)) {
    if (rank == rank_ || !routes_->IsLocal(rank)) continue;
    if (!links_->MayGet(rank)) return false;
    has_others = true;
  }
  return has_others;
}

std::string DenseExchanges::TakePart(int peer, const FrameHeader& header, Server::Taken* taken,
                                     std::function<void()> then) {
  taken->memory = links_->MayGet(peer) ? links_->TakeMemory(header.length) : nullptr;
  taken->is_on_gpu = taken->memory != nullptr;
  if (!taken->memory) taken->memory = allocate_(header.length);
  if (!taken->memory) {
    fail_(Text("Rank ", rank_, " has no memory to receive ", header.length,
               " bytes: give it more, or PoseidonStrategy a smaller kv_pair_bytes."));
    return "";
  }
  const Site& site = sites_[header.site];  // of the step before, if this rank has not come to this one
  return links_->Take({site.name, site.priority}, peer, header, taken->memory.get(), std::move(then));
}

// All parts are there but this rank's own; or those of this node, of which some are on the GPU.
void DenseExchanges::Need(const Active& active, size_t pair) {
  if (active->staging && active->staged[pair].is_added_up) return AddedUpOnGpu(active, pair);
  if (active->staging && active->staged[pair].is_adding_up) return;
  const std::vector<Server::LocalPart> parts = server_.LocalParts(*active, pair);
  const auto is_on_gpu = [](const Server::LocalPart& part) { return part.is_on_gpu; };
  if (!parts.empty() && std::all_of(parts.begin(), parts.end(), is_on_gpu) && parts.size() < Device::kMostSummands &&
      active->staging && !active->staged[pair].is_wanted) {
    return AddUpOnGpu(active, pair, parts);
  }
  for (const Server::LocalPart& part : parts) {
    if (!part.is_on_gpu) continue;
    server_.MoveToHost(*active, pair, part.rank);
    const size_t bytes =
        active->pairs[pair].bytes / ElementBytes(active->exchange.dtype) * ElementBytes(part.summand.dtype);
    PinnedMemory memory = allocate_(bytes);
    if (!memory) {
      return fail_(Text("Rank ", rank_, " has no memory for ", bytes, " bytes of '", active->exchange.site,
                        "': give it more, or PoseidonStrategy a smaller kv_pair_bytes."));
    }
    links_->Fetch(ErrandOf(active), part.summand.data, bytes, memory.get(),
                  [this, active, pair, rank = part.rank, memory] { server_.GiveMoved(*active, pair, rank, memory); });
  }
  if (!active->staging) return;
  if (!server_.IsWaiting(*active, pair)) {
    FetchOwn(active, pair, nullptr);
  } else if (!active->staged[pair].is_wanted) {
    if (PinnedMemory memory = active->staging->TryTakeToWait(BytesToAddUp(*active, pair))) {
      FetchOwn(active, pair, std::move(memory));
    }
  }
}

// Adds up the parts of this node, in the order of its ranks, where the caller wants the result.
void DenseExchanges::AddUpOnGpu(const Active& active, size_t pair, const std::vector<Server::LocalPart>& parts) {
  active->staged[pair].is_adding_up = true;
  std::vector<Summand> inputs;
  bool has_own = !active->adds(rank_);
  for (const Server::LocalPart& part : parts) {
    if (!has_own && part.rank > rank_) {
      inputs.push_back({active->given_input(pair), active->exchange.sent_dtype()});
      has_own = true;
    }
    inputs.push_back(part.summand);
  }
  if (!has_own) inputs.push_back({active->given_input(pair), active->exchange.sent_dtype()});
  links_->Sum(ErrandOf(active), active->exchange.dtype, std::move(inputs), active->pairs[pair].bytes,
              active->given_output(pair), [this, active, pair] {
                active->staged[pair].is_added_up = true;
                AddedUpOnGpu(active, pair);
              });
}

// The sum of this node is there: it is the result, or goes on by the host. What waits for other nodes takes only memory
// for what may wait: see staging.h.
void DenseExchanges::AddedUpOnGpu(const Active& active, size_t pair) {
  StagedPair& staged = active->staged[pair];
  if (server_.IsOfThisNode(*active, pair) && routes_->Up(active->pairs[pair].server) < 0) {
    active->common_form = server_.Finish(*active, pair);
    active->is_added_up[pair] = 1;
    PassDownFromGpu(active, pair, active->common_form);
    return AddResult(active, pair);
  }
  if (staged.is_wanted) return;
  const size_t bytes = active->pairs[pair].bytes;
  const Staging::Source source{active->exchange.site, active->exchange.priority, active->given_output(pair), bytes};
  auto then = [this, active, pair](PinnedMemory memory) {
    if (!memory) return;
    active->staged[pair] = {std::move(memory), 0, /*is_wanted=*/true};
    server_.GiveSumOfNode(*active, pair, active->output(pair));
  };
  if (!server_.IsWaiting(*active, pair)) {
    staged.is_wanted = true;
    active->staging->Fetch(source, bytes, 0, then);
  } else if (PinnedMemory memory = active->staging->TryTakeToWait(bytes)) {
    staged.is_wanted = true;
    active->staging->FetchInto(std::move(memory), source, 0, then);
  }
}

void DenseExchanges::SendByLink(const Active& active, size_t pair, FrameKind kind, const std::vector<int>& peers,
                                const void* from, DataType sent_dtype, uint32_t form) {
  for (int peer : peers) {
    if ((*has_left_)[peer]) return fail_(LeftBehind(peer, rank_, "'" + active->exchange.site + "'"));
  }
  const FrameHeader header = HeaderOf(active, pair, kind, /*has_data=*/true, sent_dtype, form);
  active->statistics.sent_bytes += header.length * peers.size();
  ++active->pending;
  links_->Send(ErrandOf(active), peers, header, from, [this, active] { Complete(active); });
}

// ---- sums on the host

// All parts that this rank adds up are there.
void DenseExchanges::AddUp(const Active& active, size_t pair, const Server::Contributions& contributions,
                           uint32_t common_form) {
  active->is_added_up[pair] = 1;
  if (!MakeRoomForSum(active, pair)) return;
  SumOfSums(active->exchange.dtype, contributions, active->pairs[pair].bytes, active->output(pair));
  const int up = routes_->Up(active->pairs[pair].server);
  if (up >= 0) {
    Send(active, pair, FrameKind::kContribution, up, contributions.empty() ? nullptr : active->output(pair),
         active->exchange.dtype, common_form);
    if (active->exchange.root < 0) {
      if (!active->staged.empty()) active->staged[pair] = {};
      if (active->exchange.ways == Ways::kUp) AddResult(active, pair);  // otherwise the result is to come
      return;
    }
  }
  TakeResult(active, pair, common_form);
}

// Takes memory for the sum of a node, where its result goes to another rank alone; returns whether there is any.
bool DenseExchanges::MakeRoomForSum(const Active& active, size_t pair) {
  const bool has_room = active->exchange.ways != Ways::kUp || active->staging;
  if (has_room || routes_->Up(active->pairs[pair].server) < 0) return true;
  const size_t bytes = active->pairs[pair].bytes;
  active->staged[pair].memory = allocate_(bytes);
  if (active->staged[pair].memory) return true;
  fail_(Text("Rank ", rank_, " has no memory to add up ", bytes, " bytes of '", active->exchange.site,
             "': give it more, or PoseidonStrategy a smaller kv_pair_bytes."));
  return false;
}

FrameHeader DenseExchanges::HeaderOf(const Active& active, size_t pair, FrameKind kind, bool has_data,
                                     DataType sent_dtype, uint32_t form) const {
  FrameHeader header = {};
  header.kind = kind;
  header.dtype = static_cast<uint8_t>(active->exchange.dtype);
  header.traffic = active->exchange.traffic();
  header.sent_dtype = static_cast<uint8_t>(sent_dtype);
  header.root = active->exchange.only_rank();
  header.site = active->site;
  header.step = active->step;
  header.count = static_cast<uint64_t>(active->exchange.count);
  header.offset = active->pairs[pair].offset;
  const size_t elements = active->pairs[pair].bytes / ElementBytes(active->exchange.dtype);
  header.length = has_data ? elements * ElementBytes(sent_dtype) : 0;
  header.detail = form;
  return header;
}

// Sends `data` of a type, null for a rank that does not contribute, as one KV pair.
void DenseExchanges::Send(const Active& active, size_t pair, FrameKind kind, int peer, const void* data,
                          DataType sent_dtype, uint32_t form) {
  if ((*has_left_)[peer]) return fail_(LeftBehind(peer, rank_, "'" + active->exchange.site + "'"));
  const FrameHeader header = HeaderOf(active, pair, kind, data != nullptr, sent_dtype, form);
  active->statistics.sent_bytes += header.length;
  if (!routes_->IsLocal(peer)) active->statistics.network_bytes += header.length;
  PinnedMemory memory = active->staged.empty() ? nullptr : active->staged[pair].memory;  // until it has left
  const bool is_bulk = sender_->Send(peer, header, data, [this, active, pair, memory] {
    active->is_sending[pair] = 0;
    auto deferred = active->deferred.extract(pair);
    if (!deferred.empty()) deferred.mapped()();
    Complete(active);
  });
  if (!is_bulk) return;
  ++active->pending;
  const bool reads_output =
      !active->staging && (active->is_in_place() || routes_->Collects(active->pairs[pair].server));
  if (kind == FrameKind::kContribution && reads_output) active->is_sending[pair] = 1;
}

// ---- the way down ---------------------------------------------------------------------------

// Gives all ranks a KV pair of this rank's shard; those of other ranks are to come.
void DenseExchanges::GiveShard(const Active& active, size_t pair) {
  const KvPair cut = active->pairs[pair];
  if (cut.server != rank_) return;
  if (!active->staging) {
    std::memcpy(active->given_output(pair), active->given_input(pair), cut.bytes);
    return TakeResult(active, pair, active->form);
  }
  active->staging->Fetch({active->exchange.site, active->exchange.priority, active->given_input(pair), cut.bytes},
                         cut.bytes, 0, [this, active, pair](PinnedMemory memory) {
                           if (!memory) return;
                           active->staged[pair] = {std::move(memory)};
                           TakeResult(active, pair, active->form);
                         });
}

void DenseExchanges::OnFrame(int peer, const FrameHeader& header, const char* payload) {
  const bool is_result = header.is_result(), is_sum = header.traffic == Traffic::kSum;
  const Active active = Find(header.site, header.step);
  if (!active) {
    if (is_result && is_sum) {
      return FailIf(Malformed(
          peer, Text("the result of a sum in step ", header.step, ", expected when this rank has given its part")));
    }
    if (auto site = sites_.find(header.site); site != sites_.end() && header.step < site->second.steps) {
      return FailIf(Text("Rank ", peer, " exchanges '", site->second.name, "' for the ", header.step + 1,
                         ". time, which is over on rank ", rank_,
                         ": all ranks must exchange the same under each name. Build the same model on all ranks."));
    }
    if (routes_->only_serves()) return TakePartToServe(peer, header, payload);
    return is_result ? OnEarlyResult(peer, header, payload) : FailIf(server_.Add(peer, header, payload));
  }
  FailIf(Disagreement(peer, header, rank_, active->exchange));
  if (has_failed_) return;
  if (is_result) return OnResult(active, peer, header, payload);
  if (active->is_added_up[active->pairs.IndexOf(header.offset)]) {
    return FailIf(Malformed(
        peer, Text("a part of the KV pair at byte ", header.offset, ", expected before all have been added up")));
  }
  FailIf(server_.Add(peer, header, payload));
}

void DenseExchanges::OnResult(const Active& active, int peer, const FrameHeader& header, const char* payload) {
  const size_t pair = active->pairs.IndexOf(header.offset);
  if (std::exchange(active->has_header[pair], 1)) return FailIf(Twice(peer, header, "the result of"));
  active->statistics.received_bytes += header.length;
  if (header.is_in_window()) return TakeLinkedResult(active, peer, header, pair);
  if (!header.is_bulk()) {
    if (!PrepareOutput(active, pair)) return;
    std::memcpy(active->output(pair), payload, header.length);
    TakeResult(active, pair, header.detail);
  } else if (active->is_sending[pair]) {
    active->deferred[pair] = [this, active, pair, header] { ReceiveResult(active, pair, header); };
  } else {
    ReceiveResult(active, pair, header);
  }
}

// Copies a result from the window of the rank that has added up, to where the caller wants it.
void DenseExchanges::TakeLinkedResult(const Active& active, int peer, const FrameHeader& header, size_t pair) {
  std::string wrong;
  if (active->staging) {
    wrong = links_->Take(ErrandOf(active), peer, header, active->given_output(pair),
                         [this, active, pair, form = header.detail] {
                           active->common_form = form;
                           PassDownFromGpu(active, pair, form);
                           AddResult(active, pair);
                         });
  } else if (PinnedMemory memory = allocate_(header.length)) {
    auto deliver = [this, active, pair, memory, header] {
      std::memcpy(active->given_output(pair), memory.get(), header.length);
      TakeResult(active, pair, header.detail);
    };
    wrong = links_->Take(ErrandOf(active), peer, header, memory.get(), [active, pair, deliver] {
      if (!active->is_sending[pair]) return deliver();
      active->deferred[pair] = deliver;  // the network still reads what the result would overwrite
    });
  } else {
    fail_(
        Text("Rank ", rank_, " has no memory to receive ", header.length, " bytes of '", active->exchange.site, "'."));
  }
  FailIf(wrong.empty() ? "" : Malformed(peer, wrong));
}

void DenseExchanges::OnEarlyResult(int peer, const FrameHeader& header, const char* payload) {
  auto early = std::make_shared<EarlyResult>();
  early->peer = peer;
  early->header = header;
  early_[{header.site, header.step}].push_back(early);
  if (!header.is_bulk()) {
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

void DenseExchanges::TakeEarlyResult(const Active& active, const std::shared_ptr<EarlyResult>& early) {
  FailIf(Disagreement(early->peer, early->header, rank_, active->exchange));
  if (has_failed_) return;
  const size_t pair = active->pairs.IndexOf(early->header.offset);
  if (std::exchange(active->has_header[pair], 1)) return FailIf(Twice(early->peer, early->header, "the result of"));
  auto take = [this, active, pair, early = early.get()] {
    if (!PrepareOutput(active, pair)) return;
    std::memcpy(active->output(pair), early->payload.data(), early->payload.size());
    active->statistics.received_bytes += early->header.length;
    TakeResult(active, pair, early->header.detail);
  };
  if (early->is_ready) return take();
  early->when_ready = take;  // kept alive by the transfer
}

// Takes the memory to receive the result of a KV pair that goes to a GPU; returns whether there is any.
bool DenseExchanges::PrepareOutput(const Active& active, size_t pair) {
  if (!active->staging) return true;
  const size_t bytes = active->pairs[pair].bytes;
  active->staged[pair] = {active->staging->TakeUnlimited(bytes)};
  if (active->staged[pair].memory) return true;
  fail_(Text("Rank ", rank_, " has no memory to receive ", bytes, " bytes of '", active->exchange.site,
             "': give it more, or PoseidonStrategy a smaller kv_pair_bytes."));
  return false;
}

void DenseExchanges::ReceiveResult(const Active& active, size_t pair, const FrameHeader& header) {
  if (!PrepareOutput(active, pair)) return;
  transport_->ReceiveBulk(routes_->Up(active->pairs[pair].server), header.tag, active->output(pair), header.length,
                          [this, active, pair, form = header.detail] { TakeResult(active, pair, form); });
}

// The result is in the host's memory, or where the caller wants it if that is there.
void DenseExchanges::TakeResult(const Active& active, size_t pair, uint32_t form) {
  active->common_form = form;
  PassDown(active, pair, form);
  AddResult(active, pair);
}

// Copies a result to the GPU, where the caller wants it there, and calls `then`, if there is one.
void DenseExchanges::Deliver(const Active& active, size_t pair, std::function<void()> then) {
  if (!active->staging) return;
  if (active->exchange.root != rank_ || !active->is_in_place()) {
    Staging::Taken copied;
    if (then)
      copied = [then = std::move(then)](const PinnedMemory& memory) {
        if (memory) then();
      };
    active->staging->CopyUp(active->exchange.site, active->staged[pair].memory, active->given_output(pair),
                            active->pairs[pair].bytes, std::move(copied));
  }
  active->staged[pair] = {};
}

// Sends a result that is in the host's memory to those whose parts have come to this rank, and to its own GPU.
void DenseExchanges::PassDown(const Active& active, size_t pair, uint32_t form) {
  const auto [linked, others] = LinkedAndOthers(active, pair);
  for (int peer : others) {
    Send(active, pair, FrameKind::kResult, peer, active->output(pair), active->exchange.dtype, form);
  }
  if (linked.empty()) return Deliver(active, pair, nullptr);
  ++active->pending;
  Deliver(active, pair, [this, active, pair, form, linked = linked] {
    SendByLink(active, pair, FrameKind::kGpuResult, linked, active->given_output(pair), active->exchange.dtype, form);
    Complete(active);
  });
}

// The same where it is on the GPU alone.
void DenseExchanges::PassDownFromGpu(const Active& active, size_t pair, uint32_t form) {
  const auto [linked, others] = LinkedAndOthers(active, pair);
  if (!linked.empty()) {
    SendByLink(active, pair, FrameKind::kGpuResult, linked, active->given_output(pair), active->exchange.dtype, form);
  }
  if (others.empty()) return;
  const size_t bytes = active->pairs[pair].bytes;
  ++active->pending;
  active->staging->Fetch({active->exchange.site, active->exchange.priority, active->given_output(pair), bytes}, bytes,
                         0, [this, active, pair, form, others = others](PinnedMemory memory) {
                           if (!memory) return;
                           active->staged[pair] = {std::move(memory)};
                           for (int peer : others) {
                             Send(active, pair, FrameKind::kResult, peer, active->output(pair), active->exchange.dtype,
                                  form);
                           }
                           active->staged[pair] = {};
                           Complete(active);
                         });
}

// The ranks whose parts have come to this one, beginning with the next one: those that take the result from its window,
// and those that do not.
std::pair<std::vector<int>, std::vector<int>> DenseExchanges::LinkedAndOthers(const Active& active, size_t pair) const {
  std::vector<int> linked, others;
  if (active->exchange.ways == Ways::kUp) return {};
  const int server = active->pairs[pair].server, root = active->exchange.root;
  const int from = root < 0 ? -1 : routes_->SourceOf(root, server);  // it has what it has sent
  const std::vector<int>& sources = routes_->Sources(server);
  const size_t own =
      routes_->only_serves() ? rank_ : std::find(sources.begin(), sources.end(), rank_) - sources.begin();
  for (size_t step = 0; step < sources.size(); ++step) {
    const int peer = sources[(own + step) % sources.size()];
    if (peer == rank_ || peer == from) continue;
    (IsLinked(active, peer, active->pairs[pair].bytes) ? linked : others).push_back(peer);
  }
  return {linked, others};
}

void DenseExchanges::AddResult(const Active& active, size_t pair) {
  active->has_result[pair] = 1;
  Complete(active);
}

// One of the things that `active` waits for has happened.
void DenseExchanges::Complete(const Active& active) {
  if (--active->pending > 0 || has_failed_) return;
  active_.erase({active->site, active->step});
  if (active->staging) active->exchange.on_device->complete = active->staging->Copied();
  if (active->exchange.is_gradient && active->pairs.size() > 0) {
    gathering_->FinishDense(active->site, active->common_form);
  }
  const auto now = Clock::now();
  const Exchange& exchange = active->exchange;
  if (exchange.is_counted) statistics_->Completed(now);
  if (!exchange.is_range && exchange.is_counted) {
    statistics_->Exchanged(exchange.site, {exchange.row, active->start, now, exchange.bytes(), exchange.is_blocking});
  }
  active->done("");
  const auto next = to_serve_.lower_bound({active->site, 0});
  if (next != to_serve_.end() && next->first.first == active->site) Serve(to_serve_.extract(next).mapped());
}

// ---- failures -------------------------------------------------------------------------------

void DenseExchanges::Fail(const std::string& reason) {
  has_failed_ = true;
  // They stay in `lost_`: the network may still write to their memory, and call back for them.
  for (auto& [key, active] : active_) lost_.push_back(std::move(active));
  active_.clear();
  for (auto& active : lost_) active->done(reason);
}

std::string DenseExchanges::FindLeftBehind() {
  for (const auto& [key, active] : active_) {
    if (active->exchange.ways != Ways::kDown) continue;
    for (size_t i = 0; i < active->pairs.size(); ++i) {
      const int up = routes_->Up(active->pairs[i].server);
      if (up < 0 || active->has_header[i] || !(*has_left_)[up]) continue;
      return LeftBehind(up, rank_, "'" + active->exchange.site + "'");
    }
  }
  const auto found = server_.FindLeftBehind(*has_left_);
  if (!found) return "";
  const std::string& name = sites_[found->site].name;
  return LeftBehind(found->missing, found->waiting,
                    name.empty() ? Text("an exchange that rank ", rank_, " has not reached") : "'" + name + "'");
}

std::optional<DenseExchanges::Overdue> DenseExchanges::FindOverdue(Clock::time_point now) const {
  for (const auto& [key, active] : active_) {
    const double waited = Seconds(now - active->start);
    if (waited < options_.timeout_s) continue;
    const Awaited awaited = AwaitedBy(*active);
    if (waited < (1 + kPatience * awaited.others) * options_.timeout_s) continue;
    return Overdue{active->exchange.site, SchemeOf(active->exchange.traffic()), awaited.ranks};
  }
  return std::nullopt;
}

DenseExchanges::Awaited DenseExchanges::AwaitedBy(const ActiveExchange& active) const {
  const std::vector<int> sums = server_.Missing(active);
  std::vector<int> parts;
  std::copy_if(sums.begin(), sums.end(), std::back_inserter(parts), [this](int peer) {
    return routes_->IsLocal(peer) || !routes_->IsShared(peer);  // gives what it has, and no sum
  });
  if (!parts.empty()) return {parts, 0};
  if (!sums.empty()) return {sums, 1};
  std::set<int> servers, gateways;
  for (size_t i = 0; i < active.pairs.size(); ++i) {
    const int server = active.pairs[i].server;
    if (active.has_result[i] || server == rank_) continue;
    const int up = routes_->Up(server);
    (up == server ? servers : gateways).insert(up);
  }
  const bool waits_for_gpu = active.staging && (active.staging->is_waiting() || links_->waits_for_gpu());
  if (servers.empty() && gateways.empty() && waits_for_gpu) return {{}, 0};
  if (servers.empty() && gateways.empty()) {  // all that may not have taken this rank's own
    for (int rank = 0; rank < size_; ++rank) gateways.insert(rank);
    gateways.erase(rank_);
  }
  const std::set<int>& ranks = servers.empty() ? gateways : servers;
  return {{ranks.begin(), ranks.end()}, servers.empty() ? 3 : 2};
}

}  // namespace poseidon
