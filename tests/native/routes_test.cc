// Routes between ranks, for many arrangements of ranks on nodes: every rank computes its own, and they must match.

#include "routes.h"

#include <map>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "check.h"

using poseidon::Routes;

namespace {

// The node number of each rank.
using Nodes = std::vector<int>;

const std::vector<Nodes>& Arrangements() {
  static const std::vector<Nodes> all = {{0},
                                         {0, 0},
                                         {0, 1},
                                         {0, 1, 2},
                                         {0, 0, 0},
                                         {0, 0, 1},
                                         {0, 1, 1},
                                         {0, 1, 0},
                                         {0, 0, 1, 1},
                                         {0, 1, 0, 1},
                                         {5, 5, 2, 5, 2},
                                         {0, 1, 1, 1, 1},
                                         {0, 0, 0, 0, 1},
                                         {0, 0, 0, 1, 1, 2},
                                         {3, 1, 2, 1, 3, 3, 1},
                                         {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2},
                                         {0, 1, 2, 3, 0, 1, 2, 3, 0}};
  return all;
}

std::string Text(const Nodes& nodes) {
  std::ostringstream text;
  text << "nodes";
  for (int node : nodes) text << ' ' << node;
  return text.str();
}

// The routes of every rank.
std::vector<Routes> RoutesOf(const Nodes& nodes) {
  std::vector<Routes> routes;
  for (size_t rank = 0; rank < nodes.size(); ++rank) routes.emplace_back(static_cast<int>(rank), nodes);
  return routes;
}

// The ranks whose parts are in what `rank` sends, or finally has, of a KV pair of `server`.
std::multiset<int> Contained(const std::vector<Routes>& routes, int rank, int server) {
  std::multiset<int> ranks;
  for (int source : routes[rank].Sources(server)) {
    if (source == rank) {
      ranks.insert(rank);
    } else {
      ranks.merge(Contained(routes, source, server));
    }
  }
  return ranks;
}

std::multiset<int> Everybody(const Nodes& nodes) {
  std::multiset<int> ranks;
  for (size_t rank = 0; rank < nodes.size(); ++rank) ranks.insert(static_cast<int>(rank));
  return ranks;
}

}  // namespace

TEST(EveryRanksPartReachesTheServerOnceAndCrossesNodesOnce) {
  for (const Nodes& nodes : Arrangements()) {
    const std::vector<Routes> routes = RoutesOf(nodes);
    const int size = static_cast<int>(nodes.size());
    for (int server = 0; server < size; ++server) {
      EXPECT(Contained(routes, server, server) == Everybody(nodes), Text(nodes));
      std::map<int, int> crossings;  // by node
      for (int rank = 0; rank < size; ++rank) {
        const int up = routes[rank].Up(server);
        EXPECT_EQ(up < 0, rank == server, Text(nodes));
        EXPECT(routes[rank].Collects(server) == (up < 0 || routes[rank].Sources(server).size() > 1), Text(nodes));
        if (up < 0) continue;
        // The receiver of a part expects it from exactly this rank, and no other rank does.
        for (int other = 0; other < size; ++other) {
          int expected = 0;
          for (int source : routes[other].Sources(server)) expected += source == rank;
          EXPECT_EQ(expected, (other == rank) + (other == up), Text(nodes));
        }
        crossings[nodes[rank]] += nodes[up] != nodes[rank];
      }
      for (const auto& [node, times] : crossings) EXPECT_EQ(times, node == nodes[server] ? 0 : 1, Text(nodes));
    }
  }
}

TEST(SumsOfANodeAreTakenInRankOrderAndNodesInTheOrderOfTheirFirstRanks) {
  const Nodes nodes = {5, 5, 2, 5, 2};
  const std::vector<Routes> routes = RoutesOf(nodes);
  for (int server : {0, 1, 3}) {
    const std::vector<int>& sources = routes[server].Sources(server);
    EXPECT((std::vector<int>(sources.begin(), sources.begin() + 3) == std::vector<int>{0, 1, 3}), Text(nodes));
    EXPECT_EQ(sources.size(), size_t{4}, Text(nodes));
    EXPECT((std::set<int>{2, 4}.count(sources[3]) == 1), Text(nodes));
  }
  const std::vector<int>& sources = routes[4].Sources(4);
  EXPECT((std::set<int>{0, 1, 3}.count(sources[0]) == 1), Text(nodes));
  EXPECT((std::vector<int>(sources.begin() + 1, sources.end()) == std::vector<int>{2, 4}), Text(nodes));
}

TEST(WhatARootBroadcastsReachesTheServer) {
  for (const Nodes& nodes : Arrangements()) {
    const std::vector<Routes> routes = RoutesOf(nodes);
    const int size = static_cast<int>(nodes.size());
    for (int server = 0; server < size; ++server) {
      for (int root = 0; root < size; ++root) {
        int at = root;
        for (int hops = 0; at != server; ++hops) {
          EXPECT(hops < 2, Text(nodes));
          const int up = routes[at].Up(server);
          EXPECT_EQ(routes[up].SourceOf(root, server), at, Text(nodes));
          at = up;
        }
        // Ranks that sum nothing from others expect no part from the root.
        for (int rank = 0; rank < size; ++rank) {
          if (rank == root || routes[rank].Collects(server)) continue;
          EXPECT_EQ(routes[rank].SourceOf(root, server), -1, Text(nodes));
        }
      }
    }
  }
}

TEST(EveryRankGetsTheFactorsOfEachOtherOnceAndTheyReachEachNodeOnce) {
  for (const Nodes& nodes : Arrangements()) {
    const std::vector<Routes> routes = RoutesOf(nodes);
    const int size = static_cast<int>(nodes.size());
    for (int origin = 0; origin < size; ++origin) {
      std::multiset<int> reached = {origin};
      std::map<int, int> crossings;  // by node
      auto give = [&](int from, int to) {
        reached.insert(to);
        crossings[nodes[to]] += nodes[to] != nodes[from];
        return to;
      };
      for (int receiver : routes[origin].Receivers()) {
        give(origin, receiver);
        EXPECT(routes[receiver].IsDirect(origin), Text(nodes));
        for (int next : routes[receiver].PassesOnTo(origin)) {
          give(receiver, next);
          EXPECT(!routes[next].IsDirect(origin), Text(nodes));
          EXPECT(routes[next].PassesOnTo(origin).empty(), Text(nodes));
        }
      }
      EXPECT(reached == Everybody(nodes), Text(nodes));
      for (const auto& [node, times] : crossings) EXPECT_EQ(times, node == nodes[origin] ? 0 : 1, Text(nodes));
    }
  }
}

TEST(DedicatedServersGetEveryWorkersPartOnceAndPassOnNothing) {
  for (const Nodes& nodes : Arrangements()) {
    Nodes all = nodes;
    for (int node : {90, 91}) all.push_back(node);
    const int size = static_cast<int>(all.size()), workers = size - 2;
    std::vector<Routes> routes;
    for (int rank = 0; rank < size; ++rank) routes.emplace_back(rank, all, /*dedicated_servers=*/2);
    const std::vector<Routes> without = RoutesOf(nodes);
    for (int server = 0; server < size; ++server) {
      EXPECT_EQ(routes[server].only_serves(), server >= workers, Text(all));
      EXPECT(Contained(routes, server, server) == Everybody(nodes), Text(all));
      for (int root = 0; root < workers && server >= workers; ++root) {
        const int up = routes[root].Up(server);
        EXPECT_EQ(routes[server].SourceOf(root, server), up == server ? root : up, Text(all));
      }
    }
    for (int rank = 0; rank < workers; ++rank) {  // among themselves workers do as without servers
      EXPECT(routes[rank].Receivers() == without[rank].Receivers(), Text(all));
      for (int server = 0; server < workers; ++server) {
        EXPECT_EQ(routes[rank].Up(server), without[rank].Up(server), Text(all));
        EXPECT(routes[rank].Sources(server) == without[rank].Sources(server), Text(all));
      }
    }
    for (int server = workers; server < size; ++server) EXPECT(routes[server].Receivers().empty(), Text(all));
  }
}

TEST(WorkIsSpreadOverTheRanksOfANode) {
  const Nodes nodes = {0, 0, 1, 1};
  const std::vector<Routes> routes = RoutesOf(nodes);
  std::map<int, int> gateways;
  for (int server = 0; server < 4; ++server) {
    for (int rank = 0; rank < 4; ++rank) gateways[rank] += rank != server && routes[rank].Collects(server);
  }
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(gateways[rank], 1, Text(nodes));
}
