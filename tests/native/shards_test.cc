// Shards: the elements that ranks own, and exchanges that take one way only.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "job.h"
#include "kv_pairs.h"
#include "text.h"

using namespace poseidon;

namespace {

constexpr size_t kKvPairBytes = 64 << 10;

Options SmallOptions(std::vector<int> servers = {}) {
  Options options;
  options.kv_pair_bytes = kKvPairBytes;
  options.servers = std::move(servers);
  return options;
}

// What sums to other bits in another order.
std::vector<float> Rough(int rank, size_t count) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) {
    values[i] = (static_cast<float>(i % 13) + 1) * std::pow(1e3F, static_cast<float>(rank % 3)) / 3;
  }
  return values;
}

// The elements of a tensor that are a rank's shard.
template <typename T>
std::vector<T> ShardOf(const std::vector<T>& tensor, const ShardLayout& layout, const std::vector<int>& servers,
                       int rank) {
  const KvPairs pairs(layout, tensor.size(), sizeof(T), kKvPairBytes, servers);
  std::vector<T> shard;
  for (size_t i = 0; i < pairs.size(); ++i) {
    if (pairs[i].server != rank) continue;
    const auto begin = tensor.begin() + static_cast<std::ptrdiff_t>(pairs[i].offset / sizeof(T));
    shard.insert(shard.end(), begin, begin + static_cast<std::ptrdiff_t>(pairs[i].bytes / sizeof(T)));
  }
  return shard;
}

Exchange Of(const std::string& site, Ways ways, const ShardLayout& layout, size_t count, const void* input,
            void* output) {
  Exchange exchange;
  exchange.site = site;
  exchange.count = static_cast<int64_t>(count);
  exchange.input = input;
  exchange.output = output;
  exchange.ways = ways;
  exchange.shards = layout;
  return exchange;
}

std::vector<int> AllRanks(int size) {
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

const std::vector<std::vector<int>> kNodes = {{0}, {0, 1, 2}, {0, 0}, {0, 0, 1}, {0, 1, 0, 1}, {0, 0, 0, 1, 1, 2}};

}  // namespace

TEST(EveryElementBelongsToOneShardWhateverItsType) {
  for (const std::vector<int>& servers : {std::vector<int>{0}, {0, 1, 2}, {3, 1}}) {
    for (int owner : {-1, 0, 2}) {
      for (size_t count : {0, 1, 16, 1000, 16384, 16385, 100001}) {
        const ShardLayout layout{7, owner};
        const KvPairs floats(layout, count, 4, kKvPairBytes, servers);
        for (size_t element_bytes : {1, 2, 4, 8}) {
          const std::string where = Text(count, " elements of ", element_bytes, " bytes, owner ", owner);
          const KvPairs pairs(layout, count, element_bytes, kKvPairBytes, servers);
          const std::vector<size_t> places = pairs.PlacesInShards();
          EXPECT_EQ(pairs.size(), floats.size(), where);
          EXPECT_EQ(places.size(), pairs.size(), where);
          size_t end = 0;
          std::vector<size_t> ends(4);
          for (size_t i = 0; i < pairs.size(); ++i) {
            const KvPair pair = pairs[i];
            EXPECT_EQ(pair.offset, end, where);
            EXPECT_EQ(pair.offset * 4, floats[i].offset * element_bytes, where);
            EXPECT_EQ(pair.server, floats[i].server, where);
            EXPECT(owner < 0 || pair.server == owner, where);
            EXPECT_EQ(pairs.IndexOf(pair.offset), i, where);
            EXPECT_EQ(places[i], ends[pair.server], where);
            ends[pair.server] += pair.bytes;
            end += pair.bytes;
          }
          EXPECT_EQ(end, count * element_bytes, where);
        }
      }
    }
  }
}

TEST(AWayUpAndAWayDownHaveTheBitsOfASum) {
  const std::vector<size_t> counts = {0, 1, 1000, 16385, 100001};
  for (const std::vector<int>& nodes : kNodes) {
    const int size = static_cast<int>(nodes.size());
    for (const std::vector<int>& servers : {AllRanks(size), {size - 1, 0}}) {
      for (int owner : {-1, size - 1}) {
        for (unsigned seed = 0; seed < 3; ++seed) {
          const ShardLayout layout{seed, owner};
          const std::string where = Text(size, " ranks, ", servers.size(), " servers, owner ", owner, ", seed ", seed);
          Job job(size, nodes, SmallOptions(servers), seed);
          for (int step = 0; step < 2; ++step) {
            // By rank and size of the tensor.
            std::vector<std::vector<float>> values, sums, shards, wholes;
            std::vector<std::pair<int, size_t>> starts;
            for (int rank = 0; rank < size; ++rank) {
              for (size_t i = 0; i < counts.size(); ++i) {
                values.push_back(Rough(rank + step, counts[i]));
                sums.emplace_back(counts[i], -1);
                shards.push_back(ShardOf(sums.back(), layout, servers, rank));
                wholes.emplace_back(counts[i], -1);
                starts.emplace_back(rank, i);
              }
            }
            std::shuffle(starts.begin(), starts.end(), job.random());
            size_t done = 0;
            for (const auto& [rank, i] : starts) {
              const size_t at = rank * counts.size() + i;
              Protocol& protocol = job.protocol(rank);
              Exchange sum = Of(Text("sum ", i), Ways::kBoth, {}, counts[i], values[at].data(), sums[at].data());
              Exchange up = Of(Text("up ", i), Ways::kUp, layout, counts[i], values[at].data(), shards[at].data());
              Exchange down =
                  Of(Text("down ", i), Ways::kDown, layout, counts[i], shards[at].data(), wholes[at].data());
              sum.contributes = up.contributes = rank != 1;
              auto finish = [&done, where](const std::string& error) {
                EXPECT_EQ(error, "", where);
                ++done;
              };
              protocol.Start(sum, finish, Clock::now());
              protocol.Start(
                  up,
                  [&protocol, down, finish, where](const std::string& error) {
                    EXPECT_EQ(error, "", where);
                    protocol.Start(down, finish, Clock::now());
                  },
                  Clock::now());
              for (unsigned turn = 0; turn < 3 * seed; ++turn) {  // some events before the next exchange starts
                Protocol& any = job.protocol(static_cast<int>(job.random()() % size));
                any.Flush();
                any.Poll();
              }
            }
            job.Run([&] { return done == 2 * starts.size(); }, where);
            for (const auto& [rank, i] : starts) {
              const size_t at = rank * counts.size() + i;
              EXPECT(shards[at] == ShardOf(sums[at], layout, servers, rank), where);
              EXPECT(wholes[at] == sums[at], where);
              EXPECT(sums[at] == sums[i], where);
            }
          }
        }
      }
    }
  }
}

TEST(RangesOfASumHaveItsBitsWhateverTheOrderOfEvents) {
  for (const std::vector<int>& nodes : kNodes) {
    const int size = static_cast<int>(nodes.size());
    for (int dedicated = 0; dedicated < std::min(size, 2); ++dedicated) {
      for (unsigned seed = 0; seed < 4; ++seed) {
        const std::string where = Text(size, " ranks, ", dedicated, " dedicated, seed ", seed);
        const int workers = size - dedicated;
        Options options = SmallOptions();
        options.dedicated_servers = dedicated;
        Job job(size, nodes, options, seed);
        std::vector<int64_t> ranges, begins;
        int64_t count = 0;
        for (int rank = 0; rank < workers; ++rank) {  // nothing, little, and several KV pairs
          ranges.push_back(std::vector<int64_t>{17, 0, 40001}[(rank + seed) % 3]);
          begins.push_back(count);
          count += ranges.back();
        }
        std::vector<std::vector<float>> values, sums, owns;
        for (int rank = 0; rank < workers; ++rank) {
          values.push_back(Rough(rank, count));
          sums.emplace_back(count, -1);
          owns.emplace_back(ranges[rank], -1);
        }
        std::vector<int> done(workers);
        std::function<void(int)> start = [&](int rank) {
          Exchange up = Of("up", Ways::kUp, {}, count, values[rank].data(), owns[rank].data());
          up.ranges = ranges;
          job.protocol(rank).Start(
              up,
              [&, rank](const std::string& error) {
                EXPECT_EQ(error, "", where);
                if (++done[rank] < 3) start(rank);
              },
              Clock::now());
        };
        int summed = 0;
        for (int rank = 0; rank < workers; ++rank) {
          start(rank);
          job.protocol(rank).Start(
              Of("sum", Ways::kBoth, {}, count, values[rank].data(), sums[rank].data()),
              [&](const std::string& error) { summed += error.empty(); }, Clock::now());
        }
        job.Run(
            [&] {
              return summed == workers && std::all_of(done.begin(), done.end(), [](int steps) { return steps == 3; });
            },
            where);
        for (int rank = 0; rank < workers; ++rank) {
          EXPECT(std::equal(owns[rank].begin(), owns[rank].end(), sums[rank].begin() + begins[rank]), where);
          EXPECT_EQ(job.rank(rank).statistics.Of("up").count.load(), 3u, where);
        }
      }
    }
  }
}

TEST(NarrowPartsBecomeAShardOfFloats) {
  for (const std::vector<int>& nodes : kNodes) {
    const int size = static_cast<int>(nodes.size());
    constexpr size_t kCount = 40001;
    Job job(size, nodes, SmallOptions());
    const std::vector<uint16_t> ones(kCount, 0x3f80);  // of bfloat16
    std::vector<std::vector<float>> shards;
    int done = 0;
    for (int rank = 0; rank < size; ++rank) {
      shards.push_back(ShardOf(std::vector<float>(kCount), {}, AllRanks(size), rank));
      Exchange up = Of("up", Ways::kUp, {}, kCount, ones.data(), shards[rank].data());
      up.input_dtype = DataType::kBfloat16;
      job.protocol(rank).Start(up, [&](const std::string& error) { done += error.empty(); }, Clock::now());
    }
    job.Run([&] { return done == size; }, "narrow parts");
    for (const std::vector<float>& shard : shards) {
      EXPECT(std::all_of(shard.begin(), shard.end(), [&](float x) { return x == static_cast<float>(size); }), "");
    }
  }
}

TEST(NothingIsSentThatAWayDoesNotNeed) {
  constexpr size_t kCount = 48 << 10;
  Job job(3, {}, SmallOptions());
  std::vector<float> value(kCount, 1);
  std::vector<std::vector<float>> shards(3, std::vector<float>(kCount));
  for (const Ways ways : {Ways::kUp, Ways::kDown}) {
    const std::string site = ways == Ways::kUp ? "up" : "down";
    int done = 0;
    std::vector<std::vector<float>> wholes(3, std::vector<float>(kCount));
    for (int rank = 0; rank < 3; ++rank) {
      const bool is_up = ways == Ways::kUp;
      Exchange exchange = Of(site, ways, {}, kCount, is_up ? value.data() : shards[rank].data(),
                             is_up ? shards[rank].data() : wholes[rank].data());
      job.protocol(rank).Start(exchange, [&](const std::string& error) { done += error.empty(); }, Clock::now());
    }
    job.Run([&] { return done == 3; }, site);
    for (int rank = 0; rank < 3; ++rank) {
      const SiteStatistics& counted = job.rank(rank).statistics.Of(site);
      EXPECT_EQ(counted.sent_bytes.load(), 2 * kCount * sizeof(float) / 3, site);
      EXPECT_EQ(counted.received_bytes.load(), 2 * kCount * sizeof(float) / 3, site);
    }
  }
}

// ---- failures

namespace {

// What two ranks submit under one name, and what is said about it.
struct Differing {
  const char* says;
  std::function<void(Exchange*)> change;  // of rank 1
};

}  // namespace

TEST(RanksThatDisagreeAreToldInWhat) {
  constexpr size_t kCount = 40000;
  const std::vector<Differing> differing = {
      {"gathers the shards of 40000 elements of float32, owned by all servers in layout 5",
       [](Exchange* e) { e->ways = e->ways == Ways::kUp ? Ways::kDown : Ways::kUp; }},
      {"sums 40000 elements of float32", [](Exchange* e) { e->ways = Ways::kBoth; }},
      {"broadcasts 40000 elements of float32",
       [](Exchange* e) {
         e->ways = Ways::kBoth;
         e->root = 1;
       }},
      {"owned by rank 1 in layout 5", [](Exchange* e) { e->shards.owner = 1; }},
      {"owned by all servers in layout 6", [](Exchange* e) { e->shards.first = 6; }},
      {"elements of int32", [](Exchange* e) { e->dtype = DataType::kInt32; }},
      {"39999 elements", [](Exchange* e) { --e->count; }}};
  for (const Ways ways : {Ways::kDown, Ways::kUp}) {
    for (const Differing& each : differing) {
      for (int first : {0, 1}) {
        Job job(2, {}, SmallOptions());
        std::vector<std::vector<float>> inputs(2, std::vector<float>(kCount)), outputs = inputs;
        Exchange submitted[2];
        for (int rank = 0; rank < 2; ++rank) {
          submitted[rank] = Of("x", ways, {5, -1}, kCount, inputs[rank].data(), outputs[rank].data());
        }
        each.change(&submitted[1]);
        for (int turn = 0; turn < 2; ++turn) {
          const int rank = turn ? 1 - first : first;
          job.protocol(rank).Start(submitted[rank], [](const std::string&) {}, Clock::now());
          for (int event = 0; event < 10; ++event) {
            job.protocol(event % 2).Flush();
            job.protocol(event % 2).Poll();
          }
        }
        job.Run([&] { return !job.rank(0).failure.empty() && !job.rank(1).failure.empty(); }, each.says);
        EXPECT_HOLDS(job.rank(0).failure, "Ranks disagree about 'x': ");
        EXPECT_HOLDS(job.rank(0).failure, each.says);
      }
    }
  }
}

TEST(RanksThatAreLateOrHaveLeftAreNamed) {
  constexpr size_t kCount = 40000;
  for (const std::vector<int>& nodes : {std::vector<int>{0, 1, 2}, {0, 0, 1}}) {
    for (const Ways ways : {Ways::kUp, Ways::kDown}) {
      for (bool has_left : {false, true}) {
        Options options = SmallOptions();
        options.timeout_s = 0.01;
        Job job(3, nodes, options);
        std::vector<std::vector<float>> inputs(3, std::vector<float>(kCount)), outputs = inputs;
        for (int rank : {0, 1}) {
          const Exchange exchange = Of("x", ways, {}, kCount, inputs[rank].data(), outputs[rank].data());
          job.protocol(rank).Start(exchange, [](const std::string&) {}, Clock::now());
        }
        if (has_left) job.protocol(2).SayGoodbye();
        for (int event = 0; event < 100; ++event) {
          job.protocol(event % 3).Flush();
          job.protocol(event % 3).Poll();
        }
        if (!has_left) {
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
          job.protocol(0).CheckDeadlines();
        }
        EXPECT_HOLDS(job.rank(0).failure, has_left ? "Rank 2 has ended its program" : "for rank 2 to exchange 'x' (");
        if (!has_left) EXPECT_HOLDS(job.rank(0).failure, ways == Ways::kUp ? "(scatter)" : "(shards)");
      }
    }
  }
}

TEST(ShardsThatComeAWayThatTheyDoNotTakeAreRefused) {
  constexpr size_t kCount = 40000;
  struct Lie {
    const char* says;
    std::function<void(FrameHeader*)> change;
  };
  const std::vector<Lie> lies = {{"a result of traffic 3", [](FrameHeader* h) { h->kind = FrameKind::kResult; }},
                                 {"a part of traffic 4", [](FrameHeader* h) { h->traffic = Traffic::kShards; }},
                                 {"a KV pair of traffic 3 and root 2", [](FrameHeader* h) { h->root = 2; }},
                                 {"a KV pair of traffic 3 and root -2", [](FrameHeader* h) { h->root = -2; }},
                                 {"of server 1, expected from those alone", [](FrameHeader* h) { h->detail ^= 1; }},
                                 {"in a window", [](FrameHeader* h) { h->kind = FrameKind::kGpuContribution; }},
                                 {"element type 6", [](FrameHeader* h) { h->dtype = 6; }},
                                 {"as many as have an address", [](FrameHeader* h) { h->count = uint64_t{1} << 62; }}};
  for (const Lie& lie : lies) {
    auto transport = std::make_unique<ScriptedTransport>(0, 2);
    ScriptedTransport* const network = transport.get();
    Rank rank(std::move(transport), SmallOptions());
    std::vector<float> input(kCount), output(kCount);
    rank.protocol->Start(
        Of("x", Ways::kUp, {0, -1}, kCount, input.data(), output.data()), [](const std::string&) {}, Clock::now());
    rank.protocol->Flush();
    FrameHeader header = network->sent.at(0).header;  // of the pair of rank 1, who has the first one of another layout
    header.detail = 0;
    const std::vector<int> servers = {0, 1};
    const KvPairs pairs({0, -1}, kCount, sizeof(float), kKvPairBytes, servers);
    header.offset = pairs[0].offset;
    header.length = pairs[0].bytes;
    lie.change(&header);
    network->Arrive(1, Packet(header));
    rank.protocol->Poll();
    EXPECT_HOLDS(rank.failure, "Rank 1 has sent what no rank of this job sends: ");
    EXPECT_HOLDS(rank.failure, lie.says);
  }
}
