// Keeps what ranks contribute to a KV pair until the last part is in, then hands all to whoever adds them up.
//
// Tests: tests/native/protocol_test.cc.

#include "server.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

namespace poseidon {

std::string Server::AddOwn(const std::shared_ptr<ActiveExchange>& active, size_t pair) {
  const Key key{active->site, active->step, active->pairs[pair].offset};
  KvPairState& state = StateOf(key);
  const Exchange& exchange = active->exchange;
  for (int peer = 0; peer < transport_->size(); ++peer) {
    if (state.contributions[peer].state == State::kMissing) continue;
    std::string disagreement = Disagreement(peer, state.contributions[peer].header, transport_->rank(), exchange);
    if (!disagreement.empty()) return disagreement;
  }
  state.own = active;
  if (!active->staging) {
    GiveOwn(active, pair);
  } else {
    state.contributions[transport_->rank()].state = State::kArriving;
    state.last.Arrived(transport_->rank(), Clock::now());  // others need not wait for it
    FinishIfComplete(key);
  }
  return "";
}

void Server::GiveOwn(const std::shared_ptr<ActiveExchange>& active, size_t pair) {
  const Key key{active->site, active->step, active->pairs[pair].offset};
  const int rank = transport_->rank();
  StateOf(key).contributions[rank].data = active->adds(rank) ? active->input(pair) : nullptr;
  Ready(key, rank);
}

std::string Server::Add(int peer, const FrameHeader& header, const char* payload) {
  const Key key{header.site, header.step, header.offset};
  KvPairState& state = StateOf(key);
  Contribution& contribution = state.contributions[peer];
  if (contribution.state != State::kMissing) return Twice(peer, header, "its part of");
  contribution.header = header;
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
  state.contributions[rank].state = State::kReady;
  if (rank != transport_->rank() || !state.own->staging) state.last.Arrived(rank, Clock::now());
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
  if (!Missing(found->second, std::get<2>(key)).empty()) return;
  const std::shared_ptr<ActiveExchange>& own = found->second.own;
  if (found->second.contributions[transport_->rank()].state != State::kReady) {
    return on_need_(own, own->pairs.IndexOf(std::get<2>(key)));
  }
  KvPairState state = std::move(found->second);
  pairs_.erase(found);
  statistics_->Waited(state.last);
  const size_t pair = state.own->pairs.IndexOf(std::get<2>(key));
  Contributions contributions;
  bool is_of_this_node = false;  // the last group
  uint32_t common_form = state.own->form;
  for (int rank : routes_->Sources(state.own->pairs[pair].server)) {
    const Contribution& contribution = state.contributions[rank];
    if (rank != transport_->rank() && contribution.header.detail != common_form) common_form = 0;
    if (!contribution.data) continue;
    if (!is_of_this_node || !routes_->IsLocal(rank)) contributions.emplace_back();
    const bool is_own = rank == transport_->rank();
    contributions.back().push_back({contribution.data, is_own ? state.own->exchange.sent_dtype()
                                                              : static_cast<DataType>(contribution.header.sent_dtype)});
    is_of_this_node = routes_->IsLocal(rank);
    if (!is_own) {
      state.own->statistics.received_bytes += contribution.header.length;
    }
  }
  on_complete_(state.own, pair, contributions, common_form);
  for (Contribution& contribution : state.contributions) {
    pool_.Give(std::move(contribution.buffer));
  }
}

std::vector<int> Server::Missing(const ActiveExchange& active) const {
  for (size_t i = 0; i < active.pairs.size(); ++i) {
    auto found = pairs_.find({active.site, active.step, active.pairs[i].offset});
    if (found == pairs_.end()) continue;
    std::vector<int> missing = Missing(found->second, active.pairs[i].offset);
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
