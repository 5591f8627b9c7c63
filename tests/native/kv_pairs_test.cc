// How tensors are cut: checked against a table, which also checks the simulation, and by properties.

#include "kv_pairs.h"

#include <cmath>
#include <cstdint>
#include <fstream>
#include <map>
#include <numeric>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "check.h"
#include "options.h"
#include "text.h"

using poseidon::Hash;
using poseidon::KvPair;
using poseidon::KvPairs;
using poseidon::Options;
using poseidon::WithServers;

namespace {

std::vector<int> Servers(int count) {
  std::vector<int> servers(count);
  std::iota(servers.begin(), servers.end(), 0);
  return servers;
}

std::string Case(uint64_t site, size_t bytes, size_t kv_pair_bytes, int servers) {
  std::ostringstream text;
  text << "site " << site << ", " << bytes << " bytes, pairs of " << kv_pair_bytes << ", " << servers << " servers";
  return text.str();
}

}  // namespace

TEST(TensorsAreCutAsTheTableSays) {
  std::ifstream table("tests/native/kv_pairs.csv");
  std::string line;
  EXPECT(static_cast<bool>(std::getline(table, line)), "tests/native/kv_pairs.csv, seen from the project's folder");
  int rows = 0;
  for (; std::getline(table, line); ++rows) {
    std::istringstream fields(line);
    uint64_t site;
    size_t bytes, kv_pair_bytes, pairs, first_bytes, last_bytes;
    int servers, first_server;
    char comma;
    fields >> site >> comma >> bytes >> comma >> kv_pair_bytes >> comma >> servers >> comma >> pairs >> comma >>
        first_bytes >> comma >> last_bytes >> comma >> first_server;
    EXPECT(static_cast<bool>(fields), line);
    const std::vector<int> all = Servers(servers);
    const KvPairs cut(site, bytes, kv_pair_bytes, all);
    EXPECT_EQ(cut.size(), pairs, line);
    if (pairs == 0) continue;
    EXPECT_EQ(cut[0].bytes, first_bytes, line);
    EXPECT_EQ(cut[pairs - 1].bytes, last_bytes, line);
    EXPECT_EQ(cut[0].server, first_server, line);
  }
  EXPECT(rows >= 20, "the table has lost rows");
}

TEST(EveryByteBelongsToOneKvPairAndServersGetEquallyMany) {
  for (uint64_t site : {uint64_t{0}, uint64_t{7}, UINT64_MAX - 1, UINT64_MAX}) {
    for (size_t kv_pair_bytes : {4096, 4100, 4159, 8191, 65536, 1 << 20}) {
      for (int servers : {1, 2, 3, 5, 8, 64}) {
        for (size_t bytes : {1, 4, 63, 64, 65, 4095, 4096, 4097, 32768, 32769, 65537, 999999, 1000000, 3000000}) {
          const std::string where = Case(site, bytes, kv_pair_bytes, servers);
          const std::vector<int> all = Servers(servers);
          const KvPairs cut(site, bytes, kv_pair_bytes, all);
          size_t end = 0;
          std::map<int, int> of_server;
          for (size_t i = 0; i < cut.size(); ++i) {
            const KvPair pair = cut[i];
            EXPECT_EQ(pair.offset, end, where);
            EXPECT(pair.bytes > 0 && pair.bytes <= kv_pair_bytes, where);
            EXPECT_EQ(pair.offset % 64, size_t{0}, where);
            EXPECT(cut[0].bytes < pair.bytes + 128, where);  // equal, up to the 64 bytes that stay together
            EXPECT_EQ(cut.IndexOf(pair.offset), i, where);
            end += pair.bytes;
            ++of_server[pair.server];
          }
          EXPECT_EQ(end, bytes, where);
          if (cut.size() > 1 && cut.size() < all.size()) {
            EXPECT_EQ(of_server.size(), cut.size(), where);  // each has a different server
          } else if (cut.size() > 1) {
            for (int server : all) EXPECT_EQ(of_server[server] * servers, static_cast<int>(cut.size()), where);
          }
        }
      }
    }
  }
}

TEST(DedicatedServersGetTheShareThatPlansAssume) {
  // Workers, dedicated servers, and the share of these; see tf_poseidon/planning/cluster.py.
  const std::vector<std::tuple<int, int, double>> cases = {{2, 1, 7.0 / 15}, {3, 1, 7.0 / 19},  {4, 1, 7.0 / 23},
                                                           {4, 2, 7.0 / 15}, {4, 3, 21.0 / 37}, {4, 4, 1},
                                                           {5, 7, 1},        {8, 7, 1},         {32, 5, 35.0 / 163}};
  for (const auto& [workers, dedicated, share] : cases) {
    std::vector<int> nodes(workers + dedicated);
    std::iota(nodes.begin(), nodes.end(), 0);
    Options options;
    options.dedicated_servers = dedicated;
    const std::vector<int> servers = WithServers(options, nodes).servers;
    std::map<int, size_t> large, small;  // bytes by server
    const KvPairs cut(7, size_t{100} << 20, size_t{2} << 20, servers);
    for (size_t i = 0; i < cut.size(); ++i) large[cut[i].server] += cut[i].bytes;
    constexpr uint64_t kSites = 20000;
    for (uint64_t site = 0; site < kSites; ++site) {
      const uint64_t hash = Hash("site " + std::to_string(site));
      small[KvPairs(hash, 4096, size_t{2} << 20, servers)[0].server] += 4096;
    }
    for (const auto& [of_server, all, slack] :
         {std::make_tuple(large, size_t{100} << 20, 0.03), std::make_tuple(small, 4096 * kSites, 0.15)}) {
      std::ostringstream where;
      where << workers << " workers, " << dedicated << " dedicated servers, " << all << " bytes";
      size_t of_workers = 0;
      for (const auto& [server, bytes] : of_server) {
        const bool is_worker = server < workers;
        const double expected = is_worker ? (1 - share) / workers : share / dedicated;
        EXPECT(std::abs(bytes / (expected * all) - 1) < slack + 0.03, where.str());
        if (is_worker) of_workers += bytes;
      }
      EXPECT(std::abs(1 - share - 1.0 * of_workers / all) < 0.02, where.str());
    }
  }
}

TEST(DedicatedServersOwnNothingWhereWorkersShareANodeUnlessNoWorkerServes) {
  Options options;
  options.dedicated_servers = 2;
  EXPECT((WithServers(options, {0, 0, 0, 1, 2}).servers == std::vector<int>{0, 1, 2}), "");
  options.servers = {3, 4};
  EXPECT((WithServers(options, {0, 0, 0, 1, 2}).servers == std::vector<int>{3, 4}), "");
  options.servers = {2, 3, 4};  // one node of two serves: two dedicated servers are as many as nodes
  EXPECT((WithServers(options, {0, 0, 1, 2, 3}).servers == std::vector<int>{3, 4}), "");
}

TEST(ATensorOfNoBytesHasNoKvPairs) {
  const std::vector<int> servers = {0, 1};
  EXPECT_EQ(KvPairs(3, 0, 4096, servers).size(), size_t{0}, "");
}

TEST(TensorsOf4GiBAndMoreAreCutWithoutTouchingThem) {
  const std::vector<int> servers = {0, 1, 2};
  const size_t bytes = (size_t{1} << 40) + 4;
  const KvPairs cut(1, bytes, size_t{2} << 20, servers);
  const KvPair last = cut[cut.size() - 1];
  EXPECT_EQ(cut.size(), size_t{524289}, "");  // the smallest multiple of 3 that suffices
  EXPECT_EQ(last.offset + last.bytes, bytes, "");
  EXPECT_EQ(cut.IndexOf(last.offset), cut.size() - 1, "");
}
