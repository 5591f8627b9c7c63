// Hierarchical aggregation: which way messages take between ranks of several nodes. Ranks of one node combine first,
// so that every gradient crosses the network once for a node, not once for a rank.
//
// H. Zhang et al., USENIX ATC 2017, collect the gradients of a node's GPUs on one of them, which alone uses the
// network. Here each server of KV pairs, and each rank's factors, have another *gateway* on a node, so that the work
// is spread. Jobs of a single node, or of one rank per node, need none.

#ifndef POSEIDON_COMMUNICATOR_ROUTES_H_
#define POSEIDON_COMMUNICATOR_ROUTES_H_

#include <vector>

namespace poseidon {

// The routes from and to one rank. All ranks compute theirs from the same nodes.
class Routes {
 public:
  // `nodes` has a number for each rank, the same for those that share a node. The last `dedicated_servers` ranks have
  // nodes of their own.
  Routes(int rank, std::vector<int> nodes, int dedicated_servers = 0);

  // The number of ranks that contribute, the first ones.
  int workers() const { return workers_; }

  // Whether this rank is a dedicated server: then it owns KV pairs, and takes no other part in exchanges.
  bool only_serves() const { return rank_ >= workers_; }

  bool IsLocal(int peer) const { return nodes_[peer] == nodes_[rank_]; }

  // Whether `peer` shares its node with others.
  bool IsShared(int peer) const { return members_[nodes_[peer]].size() > 1; }

  // ---- KV pairs: what ranks contribute goes up to the server, from others' nodes by the gateways that
  // add it up, and the results come down the same way.

  // The rank that gets this rank's part of a KV pair of `server`, and returns the result; -1 if that is this rank.
  int Up(int server) const { return up_[server]; }

  // The ranks whose parts this one adds up, in order: by node, and by rank within a node. It is one of them, unless it
  // only serves.
  const std::vector<int>& Sources(int server) const { return sources_[server]; }

  // Whether this rank adds up parts of others.
  bool Collects(int server) const { return server == rank_ || Sources(server).size() > 1; }

  // The one of Sources by which the part of `root` comes; -1 if it goes another way.
  int SourceOf(int root, int server) const;

  // ---- factors: they go to the ranks of the own node, and to one of each other node, which passes them on.

  // The ranks to which this one sends its own factors, beginning with the next one.
  const std::vector<int>& Receivers() const { return receivers_; }

  // The rank from which this one gets the factors of `origin`, another rank.
  int GiverOf(int origin) const;

  // Whether `origin` sends its factors to this rank itself.
  bool IsDirect(int origin) const { return GiverOf(origin) == origin; }

  // The ranks to which this one passes on the factors of `origin`.
  std::vector<int> PassesOnTo(int origin) const;

 private:
  // The rank of a node that exchanges with `peer` for all of it.
  int Gateway(int node, int peer) const;

  const int rank_, workers_;
  const std::vector<int> nodes_;           // by rank
  std::vector<std::vector<int>> members_;  // by node: its workers
  std::vector<int> index_;                 // by rank: its index on its node, or among dedicated servers
  std::vector<int> up_;                    // by server
  std::vector<std::vector<int>> sources_;  // by server
  std::vector<int> receivers_;
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_ROUTES_H_
