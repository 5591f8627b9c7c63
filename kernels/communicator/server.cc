// Keeps what ranks contribute to a KV pair until the last part is in, then hands all to whoever adds them up.
//
// Tests: tests/native/protocol_test.cc.

#include "server.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

namespace poseidon {

std::string Server::DisagreementWith(const ActiveExchange& active) const {
  for (auto found = pairs_.lower_bound({active.site, active.step, 0}); found != pairs_.end(); ++found) {
    const auto& [site, step, offset] = found->first;
    if (site != active.site || step != active.step) break;
    for (int peer = 0; peer < transport_->size(); ++peer) {
      const Contribution& contribution = found->second.contributions[peer];
      if (contribution.state == State::kMissing) continue;
      std::string disagreement = Disagreement(peer, contribution.header, transport_->rank(), active.exchange);
      if (!disagreement.empty()) return disagreement;
    }
  }
  return "";
}

void Server::AddOwn(const std::shared_ptr<ActiveExchange>& active, size_t pair) {
  const Key key = KeyOf(*active, pair);
  KvPairState& state = StateOf(key);
  state.own = active;
  if (!active->staging) {
    GiveOwn(active, pair);
  } else {
    state.contributions[transport_->rank()].state = State::kArriving;
    state.times.Arrived(transport_->rank(), Clock::now());  // others need not wait for it
    FinishIfComplete(key);
  }
}

void Server::GiveOwn(const std::shared_ptr<ActiveExchange>& active, size_t pair) {
  const Key key = KeyOf(*active, pair);
  const int rank = transport_->rank();
  Contribution& own = StateOf(key).contributions[rank];
  own.data = active->adds(rank) ? active->input(pair) : nullptr;
  own.dtype = active->exchange.sent_dtype();
  Ready(key, rank);
}

std::vector<Server::LocalPart> Server::LocalParts(const ActiveExchange& active, size_t pair) const {
  const KvPairState& state = pairs_.at(KeyOf(active, pair));
  std::vector<LocalPart> parts;
  for (int rank : routes_->Sources(active.pairs[pair].server)) {
    const Contribution& part = state.contributions[rank];
    if (rank == transport_->rank() || !routes_->IsLocal(rank) || !part.data) continue;
    parts.push_back({rank, {part.data, part.dtype}, part.taken.is_on_gpu});
  }
  return parts;
}

void Server::MoveToHost(const ActiveExchange& active, size_t pair, int rank) {
  Contribution& part = StateOf(KeyOf(active, pair)).contributions[rank];
  part.taken.is_on_gpu = false;
  part.state = State::kCopying;
}

void Server::GiveMoved(const ActiveExchange& active, size_t pair, int rank, std::shared_ptr<char[]> memory) {
  const Key key = KeyOf(active, pair);
  Contribution& part = StateOf(key).contributions[rank];
  part.taken.memory = std::move(memory);
  part.data = part.taken.memory.get();
  Ready(key, rank);
}

void Server::GiveSumOfNode(const ActiveExchange& active, size_t pair, const void* sum) {
  const Key key = KeyOf(active, pair);
  KvPairState& state = StateOf(key);
  TakeOff(&state, active);
  Contribution& own = state.contributions[transport_->rank()];
  own.data = sum;
  own.dtype = active.exchange.dtype;
  Ready(key, transport_->rank());
}

bool Server::IsOfThisNode(const ActiveExchange& active, size_t pair) const {
  const std::vector<int>& sources = routes_->Sources(active.pairs[pair].server);
  return std::all_of(sources.begin(), sources.end(), [this](int rank) { return routes_->IsLocal(rank); });
}

bool Server::IsWaiting(const ActiveExchange& active, size_t pair) const {
  return !Missing(pairs_.at(KeyOf(active, pair)), active.pairs[pair].offset).empty();
}

uint32_t Server::Finish(const ActiveExchange& active, size_t pair) {
  const auto found = pairs_.find(KeyOf(active, pair));
  KvPairState state = std::move(found->second);
  pairs_.erase(found);
  statistics_->Waited(state.times);
  TakeOff(&state, active);
  return CommonForm(state, active.pairs[pair].server);
}

// Counts and releases the parts of other ranks of this node.
void Server::TakeOff(KvPairState* state, const ActiveExchange& active) {
  for (int rank = 0; rank < transport_->size(); ++rank) {
    Contribution& part = state->contributions[rank];
    if (rank == transport_->rank() || !routes_->IsLocal(rank)) continue;
    if (part.data) active.statistics.received_bytes += part.header.length;
    part.data = nullptr;
    part.taken = {};
  }
}

// The form of factors that all ranks have of whom parts have come, 0 if not the same.
uint32_t Server::CommonForm(const KvPairState& state, int server) const {
  const auto form_of = [&](int rank) {
    return rank == transport_->rank() ? state.own->form : state.contributions[rank].header.detail;
  };
  const std::vector<int>& sources = routes_->Sources(server);
  const uint32_t form = form_of(sources.front());
  return std::all_of(sources.begin(), sources.end(), [&](int rank) { return form_of(rank) == form; }) ? form : 0;
}

std::string Server::Add(int peer, const FrameHeader& header, const char* payload) {
  const Key key{header.site, header.step, header.offset};
  KvPairState& state = StateOf(key);
  Contribution& contribution = state.contributions[peer];
  if (contribution.state != State::kMissing) return Twice(peer, header, "its part of");
  contribution.header = header;
  contribution.dtype = static_cast<DataType>(header.sent_dtype);
  if (header.is_in_window()) {
    contribution.state = State::kCopying;
    state.times.Arrived(peer, Clock::now());  // what comes now is this rank's own time
    std::string wrong = take_(peer, header, &contribution.taken, [this, key, peer] { Ready(key, peer); });
    contribution.data = contribution.taken.memory.get();
    return wrong.empty() ? "" : Malformed(peer, wrong);
  }
  if (header.length > 0) {
    contribution.buffer = pool_.Take(header.length);
    contribution.data = contribution.buffer.data.get();
  }
  if (header.is_bulk()) {
    contribution.state = State::kArriving;
    transport_->ReceiveBulk(peer, header.tag, contribution.buffer.data.get(), header.length,
                            [this, key, peer] { Ready(key, peer); });
    return "";
  }
  if (header.length > 0) std::memcpy(contribution.buffer.data.get(), payload, header.length);
  Ready(key, peer);
  return "";
}

// The part of a rank is there.
void Server::Ready(const Key& key, int rank) {
  KvPairState& state = StateOf(key);
  const bool is_from_gpu =
      state.contributions[rank].state == State::kCopying || (rank == transport_->rank() && state.own->staging);
  state.contributions[rank].state = State::kReady;
  if (!is_from_gpu) state.times.Arrived(rank, Clock::now());
  FinishIfComplete(key);
}

Server::KvPairState& Server::StateOf(const Key& key) {
  KvPairState& state = pairs_[key];
  state.contributions.resize(transport_->size());
  return state;
}

// Ranks that have not given their part of the KV pair at `offset`; this rank alone before it has started the exchange,
// and not while its part comes from a GPU.
std::vector<int> Server::Missing(const KvPairState& state, uint64_t offset) const {
  if (!state.own) return {transport_->rank()};
  const int server = state.own->pairs[state.own->pairs.IndexOf(offset)].server;
  const int root = state.own->exchange.root;
  std::vector<int> needed = routes_->Sources(server), missing;
  if (root >= 0) needed = {routes_->SourceOf(root, server)};
  std::copy_if(needed.begin(), needed.end(), std::back_inserter(missing), [&](int rank) {
    return state.contributions[rank].state != State::kReady && rank != transport_->rank();
  });
  return missing;
}

void Server::FinishIfComplete(const Key& key) {
  auto found = pairs_.find(key);
  const std::shared_ptr<ActiveExchange>& own = found->second.own;
  const std::vector<int> missing = Missing(found->second, std::get<2>(key));
  const std::vector<Contribution>& parts = found->second.contributions;
  const bool is_on_gpu = std::any_of(parts.begin(), parts.end(), [](const auto& part) { return part.taken.is_on_gpu; });
  const bool has_node =
      std::none_of(missing.begin(), missing.end(), [this](int rank) { return routes_->IsLocal(rank); });
  if (!(is_on_gpu ? has_node : missing.empty())) return;
  if (is_on_gpu || parts[transport_->rank()].state != State::kReady) {
    return on_need_(own, own->pairs.IndexOf(std::get<2>(key)));
  }
  KvPairState state = std::move(found->second);
  pairs_.erase(found);
  statistics_->Waited(state.times);
  const size_t pair = state.own->pairs.IndexOf(std::get<2>(key));
  Contributions contributions;
  bool is_of_this_node = false;  // the last group
  const int server = state.own->pairs[pair].server;
  for (int rank : routes_->Sources(server)) {
    const Contribution& contribution = state.contributions[rank];
    if (!contribution.data) continue;
    if (!is_of_this_node || !routes_->IsLocal(rank)) contributions.emplace_back();
    contributions.back().push_back({contribution.data, contribution.dtype});
    is_of_this_node = routes_->IsLocal(rank);
    if (rank != transport_->rank()) state.own->statistics.received_bytes += contribution.header.length;
  }
  on_complete_(state.own, pair, contributions, CommonForm(state, server));
  for (Contribution& contribution : state.contributions) {
    pool_.Give(std::move(contribution.buffer));
  }
}

std::vector<int> Server::Missing(const ActiveExchange& active) const {
  for (size_t i = 0; i < active.pairs.size(); ++i) {
    auto found = pairs_.find({active.site, active.step, active.pairs[i].offset});
    if (found == pairs_.end()) continue;
    std::vector<int> missing = Missing(found->second, active.pairs[i].offset);
    missing.erase(std::remove_if(missing.begin(), missing.end(),
                                 [&](int rank) { return found->second.contributions[rank].state == State::kCopying; }),
                  missing.end());
    if (!missing.empty()) return missing;
  }
  return {};
}

std::optional<Server::LeftBehind> Server::FindLeftBehind(const std::vector<char>& has_left) const {
  for (const auto& [key, state] : pairs_) {
    for (int missing : Missing(state, std::get<2>(key))) {
      // Packets keep their order: a part that was not announced before the goodbye never will be.
      if (!has_left[missing] || state.contributions[missing].state != State::kMissing) continue;
      for (int waiting = 0; waiting < transport_->size(); ++waiting) {
        if (state.contributions[waiting].state != State::kMissing) {
          return LeftBehind{missing, waiting, std::get<0>(key)};
        }
      }
    }
  }
  return std::nullopt;
}

}  // namespace poseidon
