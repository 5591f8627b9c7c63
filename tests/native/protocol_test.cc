// The protocol of ranks without threads: exchanges in any order of events, invalid frames, and ranks that fail, leave
// or are late.

#include "protocol.h"

#include <cstdint>
#include <functional>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "check.h"
#include "job.h"
#include "text.h"

using namespace poseidon;

namespace {

Exchange Sum(const std::string& site, std::vector<float>* value, std::vector<float>* result) {
  Exchange exchange;
  exchange.site = site;
  exchange.count = static_cast<int64_t>(value->size());
  exchange.input = value->data();
  exchange.output = result->data();
  return exchange;
}

Exchange Broadcast(const std::string& site, int root, std::vector<float>* value, std::vector<float>* result) {
  Exchange exchange = Sum(site, value, result);
  exchange.root = root;
  return exchange;
}

float Value(int rank, size_t i) { return static_cast<float>((i % 11) + 3 * rank); }

std::vector<float> Values(int rank, size_t count) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = Value(rank, i);
  return values;
}

// Rank 0 of a job; the test plays the other ranks.
struct Alone {
  explicit Alone(Options options = SmallOptions(), int size = 2) {
    auto owned = std::make_unique<ScriptedTransport>(0, size);
    transport = owned.get();
    rank = std::make_unique<Rank>(std::move(owned), options);
  }

  static Options SmallOptions() {
    Options options;
    options.kv_pair_bytes = 64 << 10;
    return options;
  }

  void Take(int peer, std::vector<char> packet) {
    transport->Arrive(peer, std::move(packet));
    rank->protocol->Poll();
    rank->protocol->Flush();
  }

  // The frames of `kind` that rank 0 has sent.
  std::vector<Frame> Sent(FrameKind kind) const {
    std::vector<Frame> frames;
    for (const Frame& frame : transport->sent) {
      if (frame.header.kind == kind) frames.push_back(frame);
    }
    return frames;
  }

  ScriptedTransport* transport;
  std::unique_ptr<Rank> rank;
};

}  // namespace

TEST(AllRanksGetTheSumWhateverTheOrderOfEvents) {
  const std::vector<std::vector<int>> arrangements = {{}, {0, 1}, {0, 0, 1}, {0, 1, 0, 1}, {0, 0, 0, 1, 1, 2}};
  for (const std::vector<int>& nodes : arrangements) {
    const int size = nodes.empty() ? 3 : static_cast<int>(nodes.size());
    for (const std::vector<int>& servers : {std::vector<int>{}, {0}, {size - 1, 0}}) {
      for (unsigned seed = 0; seed < 4; ++seed) {
        Options options = Alone::SmallOptions();
        options.servers = servers;
        Job job(size, nodes, options, seed);
        std::ostringstream where;
        where << size << " ranks, " << nodes.size() << " known nodes, " << servers.size() << " servers, seed " << seed;
        const std::vector<size_t> counts = {0, 1, 1000, 8192, 8193, 40001};
        int done = 0, expected = 0;
        // Two steps each, the second in place.
        for (int step = 0; step < 2; ++step) {
          std::vector<std::vector<float>> values, results;
          for (int rank = 0; rank < size; ++rank) {
            for (size_t count : counts) {
              values.push_back(Values(rank + step, count));
              results.emplace_back(count, -1);
            }
          }
          std::vector<std::pair<int, size_t>> starts;
          for (int rank = 0; rank < size; ++rank) {
            for (size_t i = 0; i < counts.size(); ++i) starts.emplace_back(rank, i);
          }
          std::shuffle(starts.begin(), starts.end(), job.random());
          for (const auto& [rank, i] : starts) {
            const size_t at = rank * counts.size() + i;
            Exchange exchange = Sum("x" + std::to_string(i), &values[at], step ? &values[at] : &results[at]);
            exchange.contributes = rank != 1 || i != 3;
            job.protocol(rank).Start(
                exchange,
                [&](const std::string& error) {
                  EXPECT_EQ(error, "", where.str());
                  ++done;
                },
                Clock::now());
            ++expected;
            // Some of its events happen before the next exchange starts.
            for (int turn = 0; turn < static_cast<int>(seed); ++turn) {
              Protocol& protocol = job.protocol(job.random()() % size);
              protocol.Flush();
              protocol.Poll();
            }
          }
          job.Run([&] { return done == expected; }, where.str());
          for (int rank = 0; rank < size; ++rank) {
            for (size_t i = 0; i < counts.size(); ++i) {
              const std::vector<float>& got = (step ? values : results)[rank * counts.size() + i];
              std::vector<float> sum(counts[i]);
              for (int r = 0; r < size; ++r) {
                for (size_t k = 0; k < sum.size() && (r != 1 || i != 3); ++k) sum[k] += Value(r + step, k);
              }
              EXPECT(got == sum, where.str());
            }
          }
        }
        // All say goodbye, and no rank fails.
        for (int rank = 0; rank < size; ++rank) job.protocol(rank).SayGoodbye();
        job.Run(
            [&] {
              for (int rank = 0; rank < size; ++rank) {
                if (!job.protocol(rank).MissingGoodbyes().empty()) return false;
              }
              return true;
            },
            where.str());
        for (int rank = 0; rank < size; ++rank) EXPECT_EQ(job.rank(rank).failure, "", where.str());
      }
    }
  }
}

TEST(RanksMayStartStepsOfASumBeforeTheLastOnesAreOverIfItIsClocked) {
  constexpr int kSteps = 4;
  const std::vector<size_t> counts = {1, 8193, 40001};
  for (const std::vector<int>& nodes : {std::vector<int>{}, {0, 0, 1}, {0, 1, 0, 1}}) {
    const int size = nodes.empty() ? 3 : static_cast<int>(nodes.size());
    for (unsigned seed = 0; seed < 6; ++seed) {
      Job job(size, nodes, Alone::SmallOptions(), seed);
      const std::string where = Text(size, " ranks, seed ", seed);
      std::vector<std::vector<float>> values, results;  // by rank, step and count
      std::vector<int> order;
      for (int rank = 0; rank < size; ++rank) {
        for (int step = 0; step < kSteps; ++step) {
          order.push_back(rank);
          for (size_t count : counts) {
            values.push_back(Values(rank + step, count));
            results.emplace_back(count, -1);
          }
        }
      }
      std::shuffle(order.begin(), order.end(), job.random());
      std::vector<int> started(size);
      int done = 0;
      for (int rank : order) {
        const int step = started[rank]++;
        for (size_t i = 0; i < counts.size(); ++i) {
          const size_t at = (rank * kSteps + step) * counts.size() + i;
          Exchange exchange = Sum("x" + std::to_string(i), &values[at], &results[at]);
          exchange.is_clocked = true;
          job.protocol(rank).Start(
              exchange,
              [&](const std::string& error) {
                EXPECT_EQ(error, "", where);
                ++done;
              },
              Clock::now());
        }
        for (unsigned turn = 0; turn < 5 * seed; ++turn) {
          Protocol& protocol = job.protocol(job.random()() % size);
          protocol.Flush();
          protocol.Poll();
        }
      }
      job.Run([&] { return done == static_cast<int>(results.size()); }, where);
      for (size_t at = 0; at < results.size(); ++at) {
        const int step = static_cast<int>(at / counts.size()) % kSteps;
        std::vector<float> sum(results[at].size());
        for (int r = 0; r < size; ++r) {
          for (size_t k = 0; k < sum.size(); ++k) sum[k] += Value(r + step, k);
        }
        EXPECT(results[at] == sum, where);
      }
    }
  }
  Alone alone;
  std::vector<float> value(3), result(3);
  std::string error;
  for (int step = 0; step < 2; ++step) {
    alone.rank->protocol->Start(
        Sum("x", &value, &result), [&](const std::string& text) { error += text; }, Clock::now());
  }
  EXPECT_EQ(error, "'x' is already being exchanged: one site cannot be in flight twice.", "not clocked");
}

TEST(WorkersGetSumsAndBroadcastsOfDedicatedServersWhateverTheOrderOfEvents) {
  const std::vector<std::vector<int>> arrangements = {{0, 1, 2}, {0, 1, 2, 3, 4}, {0, 0, 1, 1, 2}};
  for (const std::vector<int>& nodes : arrangements) {
    const int size = static_cast<int>(nodes.size());
    for (int dedicated = 1; dedicated < size - 1; ++dedicated) {
      for (unsigned seed = 0; seed < 8; ++seed) {
        Options options = Alone::SmallOptions();
        options.kv_pair_bytes = 8 << 10;
        options.dedicated_servers = dedicated;
        Job job(size, nodes, options, seed);
        std::ostringstream where;
        where << size << " ranks, " << dedicated << " dedicated, seed " << seed;
        const int workers = size - dedicated;
        std::vector<std::vector<float>> values, sums, copies;
        for (int rank = 0; rank < workers; ++rank) {
          values.push_back(Values(rank, 50000));
          sums.emplace_back(values[rank].size());
          copies.emplace_back(values[rank].size());
        }
        // Each worker goes on as soon as it can: a root is steps ahead of those that it gives to.
        constexpr int kSteps = 6;
        std::vector<int> steps(workers), broadcasts(workers);
        std::function<void(int)> sum = [&](int rank) {
          job.protocol(rank).Start(
              Sum("s", &values[rank], &sums[rank]),
              [&, rank](const std::string& error) {
                EXPECT_EQ(error, "", where.str());
                if (++steps[rank] < kSteps) sum(rank);
              },
              Clock::now());
        };
        std::function<void(int)> broadcast = [&](int rank) {
          job.protocol(rank).Start(
              Broadcast("b", 0, &values[rank], &copies[rank]),
              [&, rank](const std::string& error) {
                EXPECT_EQ(error, "", where.str());
                if (++broadcasts[rank] < kSteps) broadcast(rank);
              },
              Clock::now());
        };
        for (int rank = 0; rank < workers; ++rank) {
          sum(rank);
          broadcast(rank);
        }
        auto are_all = [&](const std::vector<int>& done) {
          return std::all_of(done.begin(), done.end(), [](int count) { return count == kSteps; });
        };
        job.Run([&] { return are_all(steps) && are_all(broadcasts); }, where.str());
        for (int rank = 0; rank < workers; ++rank) {
          std::vector<float> sum(values[0].size());
          for (int r = 0; r < workers; ++r) {
            for (size_t k = 0; k < sum.size(); ++k) sum[k] += Value(r, k);
          }
          EXPECT(sums[rank] == sum && copies[rank] == values[0], where.str());
          EXPECT(!job.protocol(workers).HaveWorkersLeft(), where.str());
          job.protocol(rank).SayGoodbye();
        }
        job.Run([&] { return job.protocol(workers).HaveWorkersLeft(); }, where.str());
        for (int rank = 0; rank < size; ++rank) EXPECT_EQ(job.rank(rank).failure, "", where.str());
      }
    }
  }
}

TEST(ADedicatedServerTakesNoFactorsAndNoResults) {
  for (FrameKind kind : {FrameKind::kFactors, FrameKind::kResult}) {
    Options options = Alone::SmallOptions();
    options.dedicated_servers = 1;
    auto owned = std::make_unique<ScriptedTransport>(2, 3);
    ScriptedTransport* const transport = owned.get();
    Rank rank(std::move(owned), options);
    const std::vector<int> nodes = NodesOf(options, *transport);
    const bool is_factors = kind == FrameKind::kFactors;
    FrameHeader header = {};
    header.kind = kind;
    header.layout = LayoutDigest(WithServers(options, nodes), nodes);
    header.traffic = is_factors ? Traffic::kGather : Traffic::kSum;
    header.root = is_factors ? 0 : -1;
    header.count = 1;
    header.length = 4;
    header.offset = is_factors ? 4 : 0;
    transport->Arrive(0, Packet(header, std::string(header.length, 'x')));
    rank.protocol->Poll();
    EXPECT(rank.failure.find("Rank 0 has sent what no rank of this job sends") == 0, rank.failure);
  }
}

TEST(AllRanksGetWhatTheRootBroadcastsThoughTheyAskLate) {
  for (const std::vector<int>& nodes : {std::vector<int>{0, 1, 2}, {0, 0, 1, 1}, {0, 0, 0}}) {
    const int size = static_cast<int>(nodes.size());
    for (int root = 0; root < size; ++root) {
      for (size_t count : {1, 9000, 100001}) {
        Job job(size, nodes, Alone::SmallOptions(), root);
        std::vector<std::vector<float>> values, results(size, std::vector<float>(count, -1));
        for (int rank = 0; rank < size; ++rank) values.push_back(Values(rank, count));
        int done = 0;
        for (int step = 0; step < size; ++step) {
          const int rank = (root + step) % size;
          job.protocol(rank).Start(
              Broadcast("b", root, &values[rank], &results[rank]),
              [&](const std::string& error) { done += error.empty(); }, Clock::now());
          // The other ranks make progress before the next one joins.
          for (int turn = 0; turn < 50; ++turn) {
            job.protocol(turn % size).Flush();
            job.protocol(turn % size).Poll();
          }
        }
        job.Run([&] { return done == size; }, "a broadcast");
        for (int rank = 0; rank < size; ++rank) EXPECT(results[rank] == Values(root, count), std::to_string(root));
      }
    }
  }
}

// ---- invalid frames

namespace {

// A false claim of a frame, in a sum of 50,000 floats in KV pairs of 64 KiB, and the text of the refusal.
struct Lie {
  const char* says;
  std::function<void(FrameHeader*)> change;
};

const std::vector<Lie>& Lies() {
  static const std::vector<Lie> lies = {
      {"a frame of kind 19", [](FrameHeader* h) { h->kind = static_cast<FrameKind>(19); }},
      {"a frame of kind 5", [](FrameHeader* h) { h->kind = FrameKind::kAbort; }},
      {"element type 7, expected 0 to 5", [](FrameHeader* h) { h->dtype = 7; }},
      {"element type 255", [](FrameHeader* h) { h->dtype = 255; }},
      {"element type 6, expected 0 to 5", [](FrameHeader* h) { h->dtype = 6; }},
      {"traffic 9", [](FrameHeader* h) { h->traffic = static_cast<Traffic>(9); }},
      {"root 0, expected a sum of root -1", [](FrameHeader* h) { h->root = 0; }},
      {"root 2, expected a sum of root -1 or a broadcast of root 0 to 1",
       [](FrameHeader* h) {
         h->traffic = Traffic::kBroadcast;
         h->root = 2;
       }},
      {"root -7",
       [](FrameHeader* h) {
         h->traffic = Traffic::kBroadcast;
         h->root = -7;
       }},
      {"9223372036854775808 elements", [](FrameHeader* h) { h->count = uint64_t{1} << 63; }},
      {"a KV pair at byte 1 of", [](FrameHeader* h) { h->offset += 1; }},
      {"a KV pair at byte 18446744073709551615 of 200000", [](FrameHeader* h) { h->offset = UINT64_MAX; }},
      {"a KV pair at byte 0 of 0", [](FrameHeader* h) { h->count = 0; }},
      {"a part of element type 255, expected 0 or,", [](FrameHeader* h) { h->sent_dtype = 255; }},
      {"a part of element type 1, expected 0 or, of a sum of floats, a half or bfloat16",
       [](FrameHeader* h) { h->sent_dtype = static_cast<uint8_t>(DataType::kFloat64); }},
      {"a part of element type 2, expected 3 or,",
       [](FrameHeader* h) {
         h->dtype = static_cast<uint8_t>(DataType::kBfloat16);
         h->sent_dtype = static_cast<uint8_t>(DataType::kFloat16);
       }},
      {"a result of element type 3, expected 0",
       [](FrameHeader* h) {
         h->kind = FrameKind::kResult;
         h->sent_dtype = static_cast<uint8_t>(DataType::kBfloat16);
       }},
      {"a part of element type 3, expected 0",
       [](FrameHeader* h) {
         h->traffic = Traffic::kBroadcast;
         h->root = 1;
         h->sent_dtype = static_cast<uint8_t>(DataType::kBfloat16);
       }},
      {"a KV pair of 50048 bytes, expected 25024 or none",
       [](FrameHeader* h) { h->sent_dtype = static_cast<uint8_t>(DataType::kFloat16); }},
      {"a KV pair of 64 bytes, expected 50048 or none", [](FrameHeader* h) { h->length = 64; }},
      {"a KV pair of 50112 bytes, expected 50048", [](FrameHeader* h) { h->length += 64; }},
      {"a KV pair of 4611686018427387904 bytes", [](FrameHeader* h) { h->length = uint64_t{1} << 62; }},
      {"factors of rank 9",
       [](FrameHeader* h) {
         h->kind = FrameKind::kFactors;
         h->root = 9;
       }},
      {"factors of rank -1", [](FrameHeader* h) { h->kind = FrameKind::kFactors; }},
      {"factors of rank 0",
       [](FrameHeader* h) {
         h->kind = FrameKind::kFactors;
         h->root = 0;
       }},
      {"factors of 50048 bytes in rows of 3",
       [](FrameHeader* h) {
         h->kind = FrameKind::kFactors;
         h->root = 1;
         h->offset = 3;
       }},
      {"factors of 50048 bytes in rows of 0",
       [](FrameHeader* h) {
         h->kind = FrameKind::kFactors;
         h->root = 1;
         h->offset = 0;
       }},
      {"a refusal of 50048 bytes", [](FrameHeader* h) { h->kind = FrameKind::kRefusal; }},
  };
  return lies;
}

// The site of a sum whose first KV pair belongs to rank 0.
constexpr char kSite[] = "y";

// Rank 1's frame with its part of that KV pair.
FrameHeader Honest(std::vector<float>* value) {
  Alone other;
  std::vector<float> result(value->size());
  other.rank->protocol->Start(Sum(kSite, value, &result), [](const std::string&) {}, Clock::now());
  other.rank->protocol->Flush();
  FrameHeader header = other.Sent(FrameKind::kContribution).at(0).header;
  const std::vector<int> servers = {0, 1};
  const KvPair first = KvPairs(header.site, value->size() * sizeof(float), 64 << 10, servers)[0];
  EXPECT_EQ(first.server, 0, kSite);
  header.offset = first.offset;
  header.length = first.bytes;
  return header;
}

}  // namespace

TEST(FramesThatLieAreRefusedBeforeAndAfterTheExchangeHasBegun) {
  for (const Lie& lie : Lies()) {
    for (bool has_begun : {false, true}) {
      std::vector<float> value = Values(0, 50000), result(50000);
      Alone alone;
      FrameHeader header = Honest(&value);
      std::string reason;
      if (has_begun) {
        alone.rank->protocol->Start(
            Sum(kSite, &value, &result), [&](const std::string& error) { reason = error; }, Clock::now());
      }
      lie.change(&header);
      alone.Take(1, Packet(header, std::string(header.is_bulk() ? 0 : header.length, 'x')));
      const std::string where = std::string(lie.says) + (has_begun ? ", begun" : "");
      EXPECT(!alone.rank->failure.empty(), where);
      EXPECT_HOLDS(alone.rank->failure, "Rank 1 has sent what no rank of this job sends: ");
      EXPECT_HOLDS(alone.rank->failure, lie.says);
      EXPECT_HOLDS(alone.rank->failure, "Install the same tf_poseidon on all ranks");
      EXPECT_EQ(alone.Sent(FrameKind::kAbort).size(), size_t{1}, where);  // the others are told
      EXPECT_EQ(alone.transport->receives.size(), size_t{0}, where);      // nothing is received of it
      if (has_begun) EXPECT_EQ(reason, alone.rank->failure, where);
    }
  }
}

TEST(AnHonestFrameIsTaken) {
  std::vector<float> value = Values(0, 50000);
  Alone alone;
  alone.Take(1, Packet(Honest(&value)));
  EXPECT_EQ(alone.rank->failure, "", "");
  EXPECT_EQ(alone.transport->receives.size(), size_t{1}, "");
}

TEST(FramesOfAnotherLayoutAndBrokenPacketsEndTheJob) {
  std::vector<float> value = Values(0, 50000);
  FrameHeader header = Honest(&value);
  Alone broken;
  std::vector<char> packet = Packet(header);
  packet.pop_back();
  broken.Take(1, packet);
  EXPECT_HOLDS(broken.rank->failure, "a packet ends after 63 bytes of a header, expected 64");
  EXPECT_EQ(broken.Sent(FrameKind::kAbort).size(), size_t{1}, "");

  Alone other_layout;
  header.layout ^= 1;
  other_layout.Take(1, Packet(header));
  EXPECT_HOLDS(other_layout.rank->failure, "Rank 1 and rank 0 cut tensors differently");
}

TEST(WhatIsSentTwiceIsRefused) {
  std::vector<float> value = Values(0, 50000), result(50000);
  const FrameHeader header = Honest(&value);
  Alone alone;
  alone.Take(1, Packet(header));
  FrameHeader again = header;
  again.tag = header.tag + 1;
  alone.Take(1, Packet(again));
  EXPECT_HOLDS(alone.rank->failure, "its part of the KV pair at byte 0 twice in step 0");

  Alone late;  // all parts have been added up
  late.rank->protocol->Start(Sum(kSite, &value, &result), [](const std::string&) {}, Clock::now());
  late.Take(1, Packet(header));
  late.transport->Finish(late.transport->receives.at(0));
  late.rank->protocol->Poll();
  EXPECT_EQ(late.rank->failure, "", "");
  late.Take(1, Packet(again));
  EXPECT_HOLDS(late.rank->failure, "expected before all have been added up");
}

TEST(ResultsAreTakenOnceAndOfOthersKvPairsAlone) {
  std::vector<float> value = Values(0, 50000), result(50000);
  Alone alone;
  alone.rank->protocol->Start(Sum(kSite, &value, &result), [](const std::string&) {}, Clock::now());
  alone.rank->protocol->Flush();
  FrameHeader header = alone.Sent(FrameKind::kContribution).at(0).header;  // to rank 1, which owns it
  header.kind = FrameKind::kResult;
  alone.Take(1, Packet(header));
  EXPECT_EQ(alone.transport->receives.size(), size_t{1}, "");
  EXPECT_EQ(alone.rank->failure, "", "");
  alone.Take(1, Packet(header));
  EXPECT_HOLDS(alone.rank->failure, "the result of the KV pair");
  EXPECT_HOLDS(alone.rank->failure, "twice");

  Alone other;
  other.rank->protocol->Start(Sum(kSite, &value, &result), [](const std::string&) {}, Clock::now());
  FrameHeader own = Honest(&value);  // of a KV pair of rank 0
  own.kind = FrameKind::kResult;
  other.Take(1, Packet(own));
  EXPECT_HOLDS(other.rank->failure, "a result of a KV pair of server 0");

  Alone early;  // a sum to which rank 0 has not contributed
  early.Take(1, Packet(header));
  EXPECT_HOLDS(early.rank->failure, "the result of a sum in step 0");
}

TEST(WhatIsOverOnThisRankIsRefusedByName) {
  std::vector<float> value = {1}, result = {0};
  Options options = Alone::SmallOptions();
  options.servers = {1};
  Alone alone(options);
  int done = 0;
  alone.rank->protocol->Start(Broadcast("x", 0, &value, &result), [&](const std::string&) { ++done; }, Clock::now());
  EXPECT_EQ(done, 1, "");  // a root does not wait
  alone.rank->protocol->Flush();
  FrameHeader header = alone.Sent(FrameKind::kContribution).at(0).header;
  header.kind = FrameKind::kResult;
  header.root = 1;
  alone.Take(1, Packet(header, std::string(4, 'x')));
  EXPECT_HOLDS(alone.rank->failure, "Rank 1 exchanges 'x' for the 1. time, which is over on rank 0");
}

// ---- the order of transfers

TEST(AResultIsAskedForWhenTheInputThatItOverwritesHasLeft) {
  std::vector<float> x = Values(0, 16000), y = Values(0, 16000), result(16000);
  Options options = Alone::SmallOptions();
  options.kv_pair_bytes = 256 << 10;  // a quarter for each, so that both are under way
  options.servers = {1};
  Alone alone(options);
  int done = 0;
  auto count = [&](const std::string& error) { done += error.empty(); };
  alone.rank->protocol->Start(Sum("x", &x, &x), count, Clock::now());
  alone.rank->protocol->Start(Sum("y", &y, &result), count, Clock::now());
  alone.rank->protocol->Flush();
  std::vector<Frame> sent = alone.Sent(FrameKind::kContribution);
  EXPECT_EQ(sent.size(), alone.transport->sends.size(), "");
  // Results in the order of their tags: those of x wait, since its parts have not left; those of y do not.
  std::stable_sort(sent.begin(), sent.end(), [&](const Frame& a, const Frame& b) {
    return (a.header.site == sent[0].header.site) > (b.header.site == sent[0].header.site);
  });
  uint32_t tag = 0;
  for (Frame& frame : sent) {
    frame.header.kind = FrameKind::kResult;
    frame.header.tag = tag++;
    alone.Take(1, Packet(frame.header));
  }
  const uint32_t of_x = tag / 2;
  EXPECT_EQ(alone.transport->receives.size(), size_t{tag - of_x}, "those of y");
  // So transfers are not always received in the order of their tags, and the MPI transport must not rely on it.
  EXPECT_EQ(alone.transport->receives.at(0).tag, of_x, "");
  for (const auto& send : std::vector<ScriptedTransport::Bulk>(alone.transport->sends)) alone.transport->Finish(send);
  alone.rank->protocol->Poll();
  EXPECT_EQ(alone.transport->receives.size(), size_t{tag}, "all");
  for (const auto& receive : std::vector<ScriptedTransport::Bulk>(alone.transport->receives)) {
    alone.transport->Finish(receive);
  }
  alone.rank->protocol->Poll();
  EXPECT_EQ(done, 2, "");
}

TEST(TransfersToOneRankAreTaggedInTheOrderInWhichTheyAreSent) {
  std::vector<float> value(6 << 20), result(6 << 20);  // 24 MiB: more than may be in flight
  Options options = Alone::SmallOptions();
  options.kv_pair_bytes = 1 << 20;
  options.servers = {1};
  Alone alone(options);
  alone.rank->protocol->Start(Sum("x", &value, &result), [](const std::string&) {}, Clock::now());
  for (size_t next = 0; next < 24;) {
    alone.rank->protocol->Flush();
    EXPECT(alone.transport->sends.size() > next, "nothing more leaves");
    EXPECT(alone.transport->sends.size() - next <= 2, "more than two KV pairs at a time");
    while (next < alone.transport->sends.size()) {
      EXPECT_EQ(alone.transport->sends[next].tag, static_cast<uint32_t>(next), "");
      EXPECT_EQ(alone.Sent(FrameKind::kContribution).at(next).header.tag, static_cast<uint32_t>(next), "");
      alone.transport->Finish(alone.transport->sends[next++]);
    }
    alone.rank->protocol->Poll();
  }
}

// Submits exchanges of several priorities, and expects their transfers to start in an order.
void StartsInOrder(bool can_overtake, const std::vector<std::string>& expected) {
  Options options = Alone::SmallOptions();
  options.servers = {1};
  options.kv_pair_bytes = 512 << 10;  // two are as much as may be in flight beside more urgent ones
  Alone alone(options);
  alone.transport->can_overtake = can_overtake;
  const std::vector<std::tuple<std::string, int, size_t>> submitted = {
      // name, priority, KV pairs; in the order in which they are submitted
      {"last", 3, 6},
      {"middle", 2, 2},
      {"first", 1, 2},
      {"metric", 0, 1},
      {"as first", 1, 1}};
  std::vector<std::vector<float>> values;
  for (const auto& [name, priority, pairs] : submitted)
    values.push_back(Values(0, pairs * (512 << 10) / sizeof(float)));
  for (size_t i = 0; i < submitted.size(); ++i) {
    const auto& [name, priority, pairs] = submitted[i];
    Exchange exchange = Sum(name, &values[i], &values[i]);
    exchange.priority = priority;
    alone.rank->protocol->Start(exchange, [](const std::string&) {}, Clock::now());
    alone.rank->protocol->Flush();
  }
  size_t finished = 0;
  while (finished < alone.transport->sends.size()) {
    alone.transport->Finish(alone.transport->sends[finished++]);
    alone.rank->protocol->Poll();
    alone.rank->protocol->Flush();
  }
  std::vector<std::string> names;
  for (const Frame& frame : alone.Sent(FrameKind::kContribution)) {
    for (const auto& [name, priority, pairs] : submitted) {
      if (frame.header.site == Hash(name)) names.push_back(name);
    }
  }
  EXPECT_EQ(names.size(), expected.size(), "all have left");
  EXPECT(names == expected, "the most urgent starts next, and otherwise the one that came first");
  const std::map<std::string, int> priorities = {
      {"last", 3}, {"middle", 2}, {"first", 1}, {"metric", 0}, {"as first", 1}};
  for (size_t i = 0; i < names.size(); ++i) {
    EXPECT_EQ(alone.transport->sends[i].priority, priorities.at(names[i]), "the transport knows what is urgent");
  }
}

TEST(UrgentExchangesStartBesideOthersWhereTransfersOvertake) {
  StartsInOrder(true, {"last", "last", "middle", "middle", "first", "first", "metric", "as first", "last", "last",
                       "last", "last"});
}

TEST(OtherwiseTheyOvertakeBetweenKvPairs) {
  // A KV pair was under way before anything else was there.
  StartsInOrder(false, {"last", "metric", "first", "first", "as first", "middle", "middle", "last", "last", "last",
                        "last", "last"});
}

// ---- ranks that fail, leave or are late

namespace {

Factors FactorsOf(const std::vector<float>& value) {
  Factors factors;
  factors.site = "x";
  factors.parts.push_back({value.data(), value.size() * 4, 4});
  return factors;
}

// Lets rank 1 of a job be late, while the others have waited `seconds` of 100; returns the failure of each rank.
std::set<std::string> FailuresOfWaiting(double seconds, const std::vector<int>& nodes, int server, bool is_factors) {
  const int size = static_cast<int>(nodes.size());
  Options options = Alone::SmallOptions();
  options.timeout_s = 100;
  options.servers = {server};
  Job job(size, nodes, options, server);
  std::vector<float> value = Values(0, 100000), result(100000);
  const auto begin = Clock::now() - std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
  for (int rank = 0; rank < size; ++rank) {
    if (rank == 1) continue;
    if (is_factors) {
      job.protocol(rank).StartFactors(FactorsOf(value), [](const std::string&, GatheredFactors) {}, begin);
    } else {
      job.protocol(rank).Start(Sum("x", &value, &result), [](const std::string&) {}, begin);
    }
  }
  for (bool has_deadlines : {false, true}) {  // all that is sent arrives before
    int turns = 0;
    job.Run(
        [&] {
          for (int rank = 0; rank < size && has_deadlines; ++rank) job.protocol(rank).CheckDeadlines();
          return ++turns > 2000;
        },
        "waiting");
  }
  std::set<std::string> failures;
  for (int rank = 0; rank < size; ++rank) failures.insert(job.rank(rank).failure);
  return failures;
}

}  // namespace

TEST(ASiteCannotBeInFlightTwice) {
  std::vector<float> value = {1}, result = {0};
  Alone alone;
  std::string error;
  alone.rank->protocol->Start(Sum("x", &value, &result), [](const std::string&) {}, Clock::now());
  alone.rank->protocol->Start(Sum("x", &value, &result), [&](const std::string& e) { error = e; }, Clock::now());
  EXPECT_HOLDS(error, "'x' is already being exchanged");
  Factors factors;
  factors.site = "f";
  factors.parts.push_back({value.data(), 4, 4});
  std::vector<std::string> errors;
  for (int i = 0; i < 2; ++i) {
    alone.rank->protocol->StartFactors(
        factors, [&](const std::string& e, GatheredFactors) { errors.push_back(e); }, Clock::now());
  }
  EXPECT_EQ(errors.size(), size_t{1}, "the first one goes on");
  EXPECT_HOLDS(errors.at(0), "'f' is already being exchanged");
}

TEST(AFailureEndsTheExchangesOfAllRanks) {
  Job job(3, {}, Alone::SmallOptions());
  std::vector<float> value = Values(0, 100000), result(100000);
  std::vector<std::string> errors;
  for (int rank : {0, 1}) {
    job.protocol(rank).Start(
        Sum("x", &value, &result), [&](const std::string& e) { errors.push_back(e); }, Clock::now());
  }
  job.protocol(1).StartFactors(
      FactorsOf(value), [&](const std::string& e, GatheredFactors) { errors.push_back(e); }, Clock::now());
  job.protocol(2).Fail("the disk is full", /*tell_peers=*/true);
  job.Run([&] { return errors.size() == 3; }, "a failure");
  for (const std::string& error : errors) EXPECT_EQ(error, "the disk is full", "");
  job.protocol(1).Start(Sum("y", &value, &result), [&](const std::string& e) { errors.push_back(e); }, Clock::now());
  EXPECT_EQ(errors.at(3), "the disk is full", "what comes later fails too");
}

TEST(ARankThatLeavesOthersWaitingIsNamed) {
  for (const std::vector<int>& nodes : {std::vector<int>{}, {0, 0, 1}, {0, 1, 1}}) {
    for (bool is_factors : {false, true}) {
      Job job(3, nodes, Alone::SmallOptions());
      std::vector<float> value = Values(0, 100000), result(100000);
      int failed = 0;
      for (int rank : {0, 1}) {
        if (is_factors) {
          job.protocol(rank).StartFactors(
              FactorsOf(value), [&](const std::string& e, GatheredFactors) { failed += !e.empty(); }, Clock::now());
        } else {
          job.protocol(rank).Start(
              Sum("x", &value, &result), [&](const std::string& e) { failed += !e.empty(); }, Clock::now());
        }
      }
      job.protocol(2).SayGoodbye();
      job.Run([&] { return failed == 2; }, "a rank that leaves");
      EXPECT_HOLDS(job.rank(0).failure, "Rank 2 has ended its program, but rank ");
      EXPECT_HOLDS(job.rank(0).failure, "all ranks must make the same number of steps");
    }
  }
}

TEST(ARankThatIsLateIsNamed) {
  for (const std::vector<int>& nodes : {std::vector<int>{0, 1, 2}, {0, 0, 1, 1, 2, 2}, {0, 0, 0, 1, 1, 1}}) {
    const int size = static_cast<int>(nodes.size());
    for (int server = 0; server <= size; ++server) {
      const bool is_factors = server == size;
      // Who waits for what rank 1 itself has to give notices first, and the others have more patience.
      std::set<std::string> failures;
      for (double seconds : {100, 110, 120, 130}) {
        failures = FailuresOfWaiting(seconds, nodes, server % size, is_factors);
        if (failures.count("") == 0) break;
      }
      for (const std::string& failure : failures) {
        EXPECT_HOLDS(failure, "waited 100 s for rank 1 to exchange 'x' (");
        EXPECT_HOLDS(failure, is_factors ? "(gather)" : "(ps)");
      }
    }
  }
}
