// A factor of which each rank gets other columns: any division, refusals, what follows it, and invalid frames.

#include "columns.h"

#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "job.h"

using namespace poseidon;

namespace {

constexpr int64_t kNarrow = 3;

// A rank's factors: bytes that say whose they are, and in the wide one, where. That one lies rank by rank.
struct HalfFactors {
  HalfFactors(int rank, int64_t rows, int64_t columns, const std::vector<ColumnRange>& ranges)
      : rank(rank), rows(rows), ranges(ranges), narrow(rows * kNarrow, static_cast<char>('a' + rank)) {
    for (const ColumnRange& range : ranges) {
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t column = range.begin; column < range.end; ++column) wide += At(rank, row, column);
      }
    }
    EXPECT_EQ(static_cast<int64_t>(wide.size()), rows * columns, "every column is somebody's");
  }

  static char At(int rank, int64_t row, int64_t column) { return static_cast<char>(rank + 7 * row + 31 * column); }

  Factors First(const std::string& form = "half") const {
    Factors factors;
    factors.site = "w";
    factors.form = form;
    factors.is_first_half = true;
    factors.parts = {{narrow.data(), narrow.size(), kNarrow}, {nullptr, 0, 0}};
    FactorPart& part = factors.parts[1];
    const char* data = wide.data();
    for (const ColumnRange& range : ranges) {
      const auto row_bytes = static_cast<size_t>(range.size());
      part.columns.push_back({data, rows * row_bytes, row_bytes});
      data += rows * row_bytes;
    }
    part.data = part.columns[rank].data;
    part.bytes = part.columns[rank].bytes;
    part.row_bytes = part.columns[rank].row_bytes;
    return factors;
  }

  int rank;
  int64_t rows;
  std::vector<ColumnRange> ranges;
  std::string narrow, wide;
};

std::string Joined(const std::vector<GatheredFactors::Rows>& rows) {
  std::string text;
  for (const GatheredFactors::Rows& r : rows) text.append(r.data, r.bytes);
  return text;
}

Factors Second(const std::string& part) {
  Factors factors;
  factors.site = "w";
  factors.form = "joined";
  factors.since = Clock::now();
  factors.parts.push_back({part.data(), part.size(), 1});
  return factors;
}

struct Case {
  int size;
  std::vector<int> nodes, servers;
  int64_t columns;
};

const Case kCases[] = {
    {2, {}, {}, 40},
    {3, {}, {}, 100003},
    {3, {}, {2, 0}, 50},
    {5, {}, {}, 20},
    {4, {0, 0, 1, 1}, {}, 77},
    {6, {0, 0, 0, 1, 1, 2}, {}, 60000},
    {4, {0, 1, 0, 1}, {1}, 90000},
};

}  // namespace

TEST(ColumnsAreDividedEvenlyInWholeBlocks) {
  for (int64_t columns : {0, 1, 16, 17, 1000, 30522}) {
    for (const std::vector<int>& servers : {std::vector<int>{0}, {0, 1, 2, 3, 4}, {4, 1}}) {
      const std::vector<ColumnRange> ranges = DivideColumns(columns, 5, servers);
      int64_t begin = 0, least = INT64_MAX, most = 0;
      for (int server : servers) {
        const ColumnRange& range = ranges[server];
        EXPECT_EQ(range.begin, begin, "one after the other");
        EXPECT(range.size() == 0 || begin % kColumnsTogether == 0, "whole blocks");
        begin = range.end;
        least = std::min(least, range.size());
        most = std::max(most, range.size());
      }
      EXPECT_EQ(begin, columns, "all of them");
      EXPECT(most - least < 2 * kColumnsTogether, "evenly");
      int64_t all = 0;
      for (const ColumnRange& range : ranges) all += range.size();
      EXPECT_EQ(all, columns, "nothing is of a rank that is no server");
    }
  }
}

TEST(EachRankGetsItsColumnsOfAllRanksAndThenAllGetAll) {
  for (const Case& each : kCases) {
    for (unsigned seed = 0; seed < 4; ++seed) {
      Options options;
      options.servers = each.servers;
      Job job(each.size, each.nodes, options, seed);
      const auto ranges =
          DivideColumns(each.columns, each.size, WithServers(options, std::vector<int>(each.size)).servers);
      for (int step = 0; step < 3; ++step) {
        std::vector<HalfFactors> factors;
        std::string narrow, whole;
        std::vector<std::string> parts(each.size);
        for (int rank = 0; rank < each.size; ++rank) {
          factors.emplace_back(rank, step == 0 ? 0 : (rank + seed) % 3, each.columns, ranges);
          narrow += factors.back().narrow;
        }
        int done = 0;
        std::vector<char> has_first(each.size);
        auto second_done = [&](const std::string& error, GatheredFactors gathered) {
          EXPECT_EQ(error, "", "");
          EXPECT(gathered.is_complete && Joined(gathered.parts.at(0)) == whole, "in the order of ranks");
          ++done;
        };
        for (int rank = 0; rank < each.size; ++rank) {  // what a rank gives then: its number and the columns
          parts[rank] = std::string(1 + ranges[rank].size(), static_cast<char>('A' + rank));
          whole += parts[rank];
        }
        for (int rank = 0; rank < each.size; ++rank) {
          job.protocol(rank).StartFactors(
              factors[rank].First(),
              [&, rank](const std::string& error, GatheredFactors gathered) {
                EXPECT_EQ(error, "", "");
                EXPECT(gathered.is_complete && Joined(gathered.parts.at(0)) == narrow, "all of the narrow factor");
                std::string wide;
                for (const HalfFactors& f : factors) {
                  for (int64_t row = 0; row < f.rows; ++row) {
                    for (int64_t c = ranges[rank].begin; c < ranges[rank].end; ++c) {
                      wide += HalfFactors::At(f.rank, row, c);
                    }
                  }
                }
                EXPECT(Joined(gathered.parts.at(1)) == wide, "its own columns of the wide one");
                has_first[rank] = true;
              },
              Clock::now());
        }
        job.Run(
            [&] {
              for (int rank = 0; rank < each.size; ++rank) {
                if (!std::exchange(has_first[rank], false)) continue;
                job.protocol(rank).StartFactors(Second(parts[rank]), second_done, Clock::now());
              }
              return done == each.size;
            },
            "half factors");
      }
    }
  }
}

TEST(ARankWithOtherFactorsOrNoneMakesAllFallBackBeforeAnythingIsJoined) {
  const std::vector<ColumnRange> ranges = DivideColumns(90000, 3, {0, 1, 2});
  for (bool is_refused : {true, false}) {
    Job job(3, {}, Options());
    for (int step = 0; step < 2; ++step) {
      std::vector<HalfFactors> factors;
      for (int rank = 0; rank < 3; ++rank) factors.emplace_back(rank, 2, 90000, ranges);
      std::vector<float> value(20000, 1.0f);
      std::vector<std::vector<float>> sums(3, std::vector<float>(20000));
      int dense = 0;
      std::vector<char> falls_back(3);
      auto start_dense = [&](int rank) {
        Exchange exchange;
        exchange.site = "w";
        exchange.count = 20000;
        exchange.input = value.data();
        exchange.output = sums[rank].data();
        exchange.is_gradient = true;
        job.protocol(rank).Start(exchange, [&](const std::string& error) { dense += error.empty(); }, Clock::now());
      };
      for (int rank = 0; rank < 3; ++rank) {
        if (is_refused && rank == 1) {
          start_dense(rank);
          continue;
        }
        Factors given = factors[rank].First();
        if (rank == 1) {  // the wide factor whole, which the form shows
          given.form = "whole";
          given.parts[1] = {factors[rank].wide.data(), factors[rank].wide.size(), 90000};
        }
        job.protocol(rank).StartFactors(
            std::move(given),
            [&, rank](const std::string& error, GatheredFactors gathered) {
              EXPECT_EQ(error, "", "a refusal is no failure");
              EXPECT(!gathered.is_complete, "on any rank");
              falls_back[rank] = true;
            },
            Clock::now());
      }
      job.Run(
          [&] {
            for (int rank = 0; rank < 3; ++rank) {
              if (std::exchange(falls_back[rank], false)) start_dense(rank);
            }
            return dense == 3;
          },
          "falling back");
      for (const std::vector<float>& sum : sums) EXPECT_EQ(sum[19999], 3.0f, "");
    }
  }
}

TEST(OtherColumnsEndTheJobByName) {
  Job job(2, {}, Options());
  int ends = 0;
  std::vector<HalfFactors> factors;
  for (int rank : {0, 1}) {
    const int64_t columns = rank ? 40 : 140;
    factors.emplace_back(rank, 2, columns, DivideColumns(columns, 2, {0, 1}));
  }
  for (int rank : {0, 1}) {
    job.protocol(rank).StartFactors(
        factors[rank].First(), [&](const std::string&, GatheredFactors) { ++ends; }, Clock::now());
  }
  job.Run([&] { return ends == 2; }, "other columns");
  EXPECT_HOLDS(job.rank(0).failure + job.rank(1).failure, "Ranks disagree about the rows of 'w'");
}

TEST(ColumnsComeFromTheirRankAlone) {
  auto owned = std::make_unique<ScriptedTransport>(0, 3);
  ScriptedTransport* transport = owned.get();
  Rank rank(std::move(owned), Options());
  const HalfFactors factors(0, 2, 60, DivideColumns(60, 3, {0, 1, 2}));
  std::string failure;
  rank.protocol->StartFactors(
      factors.First(), [&](const std::string& error, GatheredFactors) { failure = error; }, Clock::now());
  rank.protocol->Flush();
  FrameHeader header = {};
  for (const Frame& frame : transport->sent) {
    if (frame.header.kind == FrameKind::kColumns) header = frame.header;
  }
  EXPECT(header.kind == FrameKind::kColumns, "some were sent");
  header.root = 2;
  header.offset = 16;
  header.length = 32;
  transport->Arrive(1, Packet(header, std::string(32, 'x')));
  rank.protocol->Poll();
  EXPECT_HOLDS(rank.failure, "factors of rank 2, expected those of another one of 3 ranks");
  EXPECT(!failure.empty(), "and the exchange ends");
}
