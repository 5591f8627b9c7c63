#include "server.h"

#include <cstring>
#include <utility>

namespace poseidon {

std::string Server::AddOwn(const std::shared_ptr<ActiveExchange>& active, size_t pair) {
  const Key key{active->site, active->step, active->pairs[pair].offset};
  KvPairState& state = StateOf(key);
  const Exchange& exchange = active->exchange;
  for (int peer = 0; peer < transport_->size(); ++peer) {
    if (state.contributions[peer].state == State::kMissing) continue;
    std::string disagreement =
        Disagreement(peer, state.contributions[peer].header, transport_->rank(), exchange);
    if (!disagreement.empty()) return disagreement;
  }
  state.own = active;
  Contribution& own = state.contributions[transport_->rank()];
  own.state = State::kReady;
  const bool adds = exchange.root < 0 ? exchange.contributes : exchange.root == transport_->rank();
  own.data = adds ? active->input(pair) : nullptr;
  FinishIfComplete(key);
  return "";
}

std::string Server::Add(int peer, const FrameHeader& header, const char* payload) {
  const Key key{header.site, header.step, header.offset};
  KvPairState& state = StateOf(key);
  if (state.own) {
    std::string disagreement =
        Disagreement(peer, header, transport_->rank(), state.own->exchange);
    if (!disagreement.empty()) return disagreement;
  }
  Contribution& contribution = state.contributions[peer];
  contribution.header = header;
  if (header.length > 0) {
    contribution.buffer = pool_.Take(header.length);
    contribution.data = contribution.buffer.data.get();
  }
  if (header.is_bulk) {
    contribution.state = State::kArriving;
    transport_->ReceiveBulk(peer, header.tag, contribution.buffer.data.get(), header.length,
                            [this, key, peer] {
                              StateOf(key).contributions[peer].state = State::kReady;
                              FinishIfComplete(key);
                            });
    return "";
  }
  if (header.length > 0) std::memcpy(contribution.buffer.data.get(), payload, header.length);
  contribution.state = State::kReady;
  FinishIfComplete(key);
  return "";
}

Server::KvPairState& Server::StateOf(const Key& key) {
  KvPairState& state = pairs_[key];
  state.contributions.resize(transport_->size());
  return state;
}

std::vector<int> Server::Missing(const KvPairState& state) const {
  std::vector<int> missing;
  const int root = state.own ? state.own->exchange.root : -1;
  for (int rank = 0; rank < transport_->size(); ++rank) {
    const bool is_needed = root < 0 || rank == root;
    if (is_needed && state.contributions[rank].state != State::kReady) missing.push_back(rank);
  }
  return missing;
}

void Server::FinishIfComplete(const Key& key) {
  auto found = pairs_.find(key);
  if (!found->second.own || !Missing(found->second).empty()) return;
  KvPairState state = std::move(found->second);
  pairs_.erase(found);
  std::vector<const void*> contributions;
  uint32_t common_form = state.own->form;
  for (int rank = 0; rank < transport_->size(); ++rank) {
    const Contribution& contribution = state.contributions[rank];
    if (rank != transport_->rank() && contribution.header.detail != common_form) common_form = 0;
    if (!contribution.data) continue;
    contributions.push_back(contribution.data);
    if (rank != transport_->rank()) {
      state.own->statistics.received_bytes += contribution.header.length;
    }
  }
  on_complete_(state.own, state.own->pairs.IndexOf(std::get<2>(key)), contributions,
               common_form);
  for (Contribution& contribution : state.contributions) {
    pool_.Give(std::move(contribution.buffer));
  }
}

std::vector<int> Server::Missing(const ActiveExchange& active) const {
  for (size_t i = 0; i < active.pairs.size(); ++i) {
    auto found = pairs_.find({active.site, active.step, active.pairs[i].offset});
    if (found == pairs_.end()) continue;
    std::vector<int> missing = Missing(found->second);
    if (!missing.empty()) return missing;
  }
  return {};
}

std::optional<Server::LeftBehind> Server::FindLeftBehind(const std::vector<char>& has_left) const {
  for (const auto& [key, state] : pairs_) {
    for (int missing : Missing(state)) {
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
