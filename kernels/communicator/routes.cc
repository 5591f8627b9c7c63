// Works out for one rank where its parts go, and whose parts it adds up or passes on.
//
// Tests: tests/native/routes_test.cc.

#include "routes.h"

#include <map>
#include <utility>

namespace poseidon {
namespace {

// Numbers nodes in the order of their first ranks.
std::vector<int> InOrder(const std::vector<int>& nodes) {
  std::map<int, int> numbers;
  std::vector<int> result;
  for (int node : nodes) {
    result.push_back(numbers.emplace(node, static_cast<int>(numbers.size())).first->second);
  }
  return result;
}

}  // namespace

Routes::Routes(int rank, std::vector<int> nodes, int dedicated_servers)
    : rank_(rank), workers_(static_cast<int>(nodes.size()) - dedicated_servers), nodes_(InOrder(nodes)) {
  const int size = static_cast<int>(nodes_.size());
  for (int peer = 0; peer < size; ++peer) {
    if (nodes_[peer] == static_cast<int>(members_.size())) members_.emplace_back();
    std::vector<int>& members = members_[nodes_[peer]];
    index_.push_back(peer < workers_ ? static_cast<int>(members.size()) : peer - workers_);
    if (peer < workers_) members.push_back(peer);
  }
  const int node = nodes_[rank];
  for (int server = 0; server < size; ++server) {
    const int gateway = Gateway(node, server);
    up_.push_back(rank == server ? -1 : rank == gateway ? server : gateway);
    std::vector<int>& sources = sources_.emplace_back();
    if (rank != gateway) {
      sources.push_back(rank);
      continue;
    }
    for (int other = 0; other < static_cast<int>(members_.size()); ++other) {
      if (other == node) {
        sources.insert(sources.end(), members_[node].begin(), members_[node].end());
      } else if (rank == server && !members_[other].empty()) {
        sources.push_back(Gateway(other, server));
      }
    }
  }
  for (int step = 1; step < workers_ && !only_serves(); ++step) {
    const int peer = (rank + step) % workers_;
    if (IsLocal(peer) || peer == Gateway(nodes_[peer], rank)) receivers_.push_back(peer);
  }
}

int Routes::SourceOf(int root, int server) const {
  if (IsLocal(root)) return root == rank_ || Gateway(nodes_[rank_], server) == rank_ ? root : -1;
  return server == rank_ ? Gateway(nodes_[root], server) : -1;
}

int Routes::GiverOf(int origin) const {
  const int gateway = Gateway(nodes_[rank_], origin);  // of the own node, `origin` itself
  return gateway == rank_ ? origin : gateway;
}

std::vector<int> Routes::PassesOnTo(int origin) const {
  std::vector<int> others;
  if (IsLocal(origin) || !IsDirect(origin)) return others;
  for (int peer : members_[nodes_[rank_]]) {
    if (peer != rank_) others.push_back(peer);
  }
  return others;
}

int Routes::Gateway(int node, int peer) const {
  if (nodes_[peer] == node || members_[node].empty()) return peer;
  return members_[node][index_[peer] % members_[node].size()];
}

}  // namespace poseidon
