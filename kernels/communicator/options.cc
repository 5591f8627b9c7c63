// Fills in what a job's options leave open, and digests what must be alike on all ranks.
//
// Tests: tests/communicator/test_communicator.py.

#include "options.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <sstream>
#include <utility>

#include "text.h"

namespace poseidon {

Options WithServers(Options options, int size) {
  if (options.servers.empty()) {
    options.servers.resize(size);
    std::iota(options.servers.begin(), options.servers.end(), 0);
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
  if (ranks_per_node == 0) return nodes;
  std::map<int, int> found;  // ranks by node
  std::map<std::pair<int, int>, int> parts;
  for (int& node : nodes) {
    const int part = found[node]++ / ranks_per_node;
    node = parts.emplace(std::make_pair(node, part), static_cast<int>(parts.size())).first->second;
  }
  return nodes;
}

uint64_t LayoutDigest(const Options& options, const std::vector<int>& nodes) {
  std::ostringstream text;
  text << "poseidon frames 8;" << options.kv_pair_bytes << ";nodes";
  for (int node : nodes) text << ';' << node;
  text << ";servers";
  for (int server : options.servers) text << ';' << server;
  return Hash(text.str());
}

}  // namespace poseidon
