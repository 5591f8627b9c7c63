// Fills in what a job's options leave open, and digests what must be alike on all ranks.
//
// Tests: tests/communicator/test_communicator.py.

#include "options.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <sstream>
#include <utility>

#include "kv_pairs.h"
#include "text.h"

namespace poseidon {

Options WithServers(Options options, const std::vector<int>& nodes) {
  const int size = static_cast<int>(nodes.size());
  if (options.servers.empty()) {
    options.servers.resize(size);
    std::iota(options.servers.begin(), options.servers.end(), 0);
  }
  const int num_dedicated = options.dedicated_servers, workers = size - num_dedicated;
  options.shard_servers = options.servers;
  if (num_dedicated == 0) return options;
  std::vector<int> serving;  // workers
  std::set<int> serving_nodes;
  for (int server : options.servers) {
    if (server >= workers) continue;
    serving.push_back(server);
    serving_nodes.insert(nodes[server]);
  }
  options.shard_servers = serving;
  if (serving.empty()) {
    options.shard_servers.resize(workers);
    std::iota(options.shard_servers.begin(), options.shard_servers.end(), 0);
  }
  const Places places =
      PlacesOf(static_cast<int>(std::set<int>(nodes.begin(), nodes.begin() + workers).size()),
               static_cast<int>(serving_nodes.size()), static_cast<int>(serving.size()), num_dedicated);
  const int64_t of_dedicated = places.dedicated * num_dedicated;
  const int64_t all = of_dedicated + places.worker * static_cast<int64_t>(serving.size());
  options.servers.clear();
  int64_t next = 0;                                // place of a dedicated server
  for (int64_t place = 0; place < all; ++place) {  // evenly mixed
    if ((place + 1) * of_dedicated / all > next) {
      options.servers.push_back(workers + static_cast<int>(next++ % num_dedicated));
    } else {
      options.servers.push_back(serving[(place - next) % serving.size()]);
    }
  }
  return options;
}

std::vector<int> NodesOf(const Options& options, const Transport& transport) {
  std::vector<int> nodes = transport.nodes();
  int ranks_per_node = options.ranks_per_node;
  if (nodes.empty()) {
    nodes.resize(transport.size());
    ranks_per_node = std::max(ranks_per_node, 1);
  }
  const auto first_dedicated = nodes.end() - options.dedicated_servers;
  if (ranks_per_node > 0) {
    std::map<int, int> found;  // ranks by node
    std::map<std::pair<int, int>, int> parts;
    for (int& node : nodes) {
      const int part = found[node]++ / ranks_per_node;
      node = parts.emplace(std::make_pair(node, part), static_cast<int>(parts.size())).first->second;
    }
  }
  std::iota(first_dedicated, nodes.end(), *std::max_element(nodes.begin(), nodes.end()) + 1);
  return nodes;
}

uint64_t LayoutDigest(const Options& options, const std::vector<int>& nodes) {
  std::ostringstream text;
  text << "poseidon frames 8;" << options.kv_pair_bytes << ";nodes";
  for (int node : nodes) text << ';' << node;
  text << ";servers";
  for (int server : options.servers) text << ';' << server;
  text << ";dedicated;" << options.dedicated_servers;
  return Hash(text.str());
}

}  // namespace poseidon
