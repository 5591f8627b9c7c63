// Factors of all ranks: any number of rows, any arrangement of nodes, different forms, refusals, and invalid frames.

#include "gather_exchanges.h"

#include <cstdint>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "job.h"

using namespace poseidon;

namespace {

// A rank's matrices: one with rows of 12 bytes, and one with rows too long for a packet.
struct Matrices {
  Matrices(int rank, size_t rows)
      : narrow(12 * rows, static_cast<char>('a' + rank)), wide(40000 * rows, static_cast<char>('A' + rank)) {}
  Factors Of(const std::string& site, const std::string& form = "") const {
    Factors factors;
    factors.site = site;
    factors.form = form;
    factors.parts = {{narrow.data(), narrow.size(), 12}, {wide.data(), wide.size(), 40000}};
    return factors;
  }

  std::string narrow, wide;
};

std::string Joined(const std::vector<GatheredFactors::Rows>& rows) {
  std::string text;
  for (const GatheredFactors::Rows& r : rows) {
    text.resize(text.size() + r.bytes);
    r.CopyTo(text.data() + text.size() - r.bytes);
  }
  return text;
}

// How the exchange of each rank ended.
struct Ends {
  FactorsDone Of(int rank) {
    return [this, rank](const std::string& error, GatheredFactors gathered) {
      errors[rank] = error;
      all[rank] = std::move(gathered);
    };
  }
  bool AreAll(int size) const { return static_cast<int>(all.size()) == size; }

  std::map<int, std::string> errors;
  std::map<int, GatheredFactors> all;
};

// Rank 0 of 2; the test makes the frames of the other rank.
struct Alone {
  Alone() {
    auto owned = std::make_unique<ScriptedTransport>(0, 2);
    transport = owned.get();
    rank = std::make_unique<Rank>(std::move(owned), Options());
  }
  void Start(const Factors& factors) {
    rank->protocol->StartFactors(factors, ends.Of(0), Clock::now());
    rank->protocol->Flush();
  }
  std::vector<Frame> Sent(FrameKind kind) const {
    std::vector<Frame> frames;
    for (const Frame& frame : transport->sent) {
      if (frame.header.kind == kind) frames.push_back(frame);
    }
    return frames;
  }
  void Take(const FrameHeader& header, const std::string& payload = "") {
    transport->Arrive(1, Packet(header, payload));
    rank->protocol->Poll();
    rank->protocol->Flush();
  }

  ScriptedTransport* transport;
  std::unique_ptr<Rank> rank;
  Ends ends;
};

Factors OnePart(const void* data, size_t bytes, size_t row_bytes) {
  Factors factors;
  factors.site = "w";
  factors.parts.push_back({data, bytes, row_bytes});
  return factors;
}

// The frame with part 0 that rank 1 would send in answer to rank 0.
FrameHeader Answer(const Factors& factors) {
  Alone other;
  other.Start(factors);
  FrameHeader header = other.transport->sent.at(0).header;
  header.root = 1;
  return header;
}

}  // namespace

TEST(AllRanksGetTheRowsOfAllInRankOrder) {
  const std::vector<std::vector<int>> arrangements = {{}, {0, 1}, {0, 0, 1}, {0, 1, 0, 1}, {0, 0, 0, 1, 1, 2}};
  for (const std::vector<int>& nodes : arrangements) {
    const int size = nodes.empty() ? 3 : static_cast<int>(nodes.size());
    for (unsigned seed = 0; seed < 6; ++seed) {
      std::ostringstream where;
      where << size << " ranks, " << nodes.size() << " known nodes, seed " << seed;
      Job job(size, nodes, Options(), seed);
      for (int step = 0; step < 3; ++step) {
        std::vector<Matrices> matrices;
        std::string narrow, wide;
        for (int rank = 0; rank < size; ++rank) {
          matrices.emplace_back(rank, step == 0 ? 0 : (rank + seed) % 3);
          narrow += matrices.back().narrow;
          wide += matrices.back().wide;
        }
        Ends ends;
        for (int rank = 0; rank < size; ++rank) {
          job.protocol(rank).StartFactors(matrices[rank].Of("w"), ends.Of(rank), Clock::now());
          for (unsigned turn = 0; turn < 3 * seed; ++turn) {
            Protocol& protocol = job.protocol(job.random()() % size);
            protocol.Flush();
            protocol.Poll();
          }
        }
        job.Run([&] { return ends.AreAll(size); }, where.str());
        for (int rank = 0; rank < size; ++rank) {
          EXPECT_EQ(ends.errors[rank], "", where.str());
          EXPECT(ends.all[rank].is_complete, where.str());
          EXPECT(Joined(ends.all[rank].parts.at(0)) == narrow, where.str());
          EXPECT(Joined(ends.all[rank].parts.at(1)) == wide, where.str());
        }
      }
    }
  }
}

TEST(IfOneRankRefusesOrHasAnotherFormAllFallBackInThatStep) {
  for (bool is_refused : {true, false}) {
    for (const std::vector<int>& nodes : {std::vector<int>{}, {0, 0, 1, 1}}) {
      for (unsigned seed = 0; seed < 8; ++seed) {
        const int size = 4, odd_one = static_cast<int>(seed) % size;
        Job job(size, nodes, Options(), seed);
        std::vector<float> value(20000, 1);
        std::vector<std::vector<float>> sums(size, std::vector<float>(20000));
        std::vector<Matrices> matrices;
        for (int rank = 0; rank < size; ++rank) matrices.emplace_back(rank, 2);
        int dense = 0, complete = 0;
        auto start_dense = [&](int rank) {
          Exchange exchange;
          exchange.site = "w";
          exchange.count = 20000;
          exchange.input = value.data();
          exchange.output = sums[rank].data();
          exchange.is_gradient = true;
          job.protocol(rank).Start(exchange, [&](const std::string& error) { dense += error.empty(); }, Clock::now());
        };
        std::vector<bool> falls_back(size);
        for (int rank = 0; rank < size; ++rank) {
          if (is_refused && rank == odd_one) {
            start_dense(rank);
            continue;
          }
          Factors factors = matrices[rank].Of("w", rank == odd_one ? "other" : "");
          if (rank == odd_one) std::swap(factors.parts[0], factors.parts[1]);  // which its form shows
          job.protocol(rank).StartFactors(
              std::move(factors),
              [&, rank](const std::string& error, GatheredFactors gathered) {
                EXPECT_EQ(error, "", "a refusal is no failure");
                complete += gathered.is_complete;
                falls_back[rank] = true;
              },
              Clock::now());
        }
        job.Run(
            [&] {
              for (int rank = 0; rank < size; ++rank) {
                if (!falls_back[rank]) continue;
                falls_back[rank] = false;
                start_dense(rank);
              }
              return dense == size;
            },
            "falling back");
        EXPECT_EQ(complete, 0, "");
        for (const std::vector<float>& sum : sums) EXPECT_EQ(sum[19999], 4.0f, "");
      }
    }
  }
}

TEST(RowsMayHave4GiBAndMore) {
  const size_t row_bytes = (size_t{1} << 32) + 4;
  Job job(2, {}, Options());
  Ends ends;
  for (int rank : {0, 1}) job.protocol(rank).StartFactors(OnePart(nullptr, 0, row_bytes), ends.Of(rank), Clock::now());
  job.Run([&] { return ends.AreAll(2); }, "no rows of 4 GiB");
  for (int rank : {0, 1}) EXPECT(ends.all[rank].is_complete && ends.errors[rank].empty(), job.rank(rank).failure);

  Job unequal(2, {}, Options());
  Ends refused;
  for (int rank : {0, 1}) {
    unequal.protocol(rank).StartFactors(OnePart(nullptr, 0, rank ? row_bytes : 4), refused.Of(rank), Clock::now());
  }
  unequal.Run([&] { return refused.AreAll(2); }, "rows whose bytes differ by 4 GiB");
  EXPECT_HOLDS(unequal.rank(0).failure + unequal.rank(1).failure, "Ranks disagree about the rows of 'w'");
  EXPECT_HOLDS(unequal.rank(0).failure + unequal.rank(1).failure, "4294967300");
}

TEST(PartsThatDoNotFitAreRefused) {
  const std::string rows(24, 'x');
  FrameHeader header = Answer(OnePart(rows.data(), 24, 12));
  Alone honest;
  honest.Start(OnePart(rows.data(), 24, 12));
  honest.Take(header, rows);
  EXPECT(honest.ends.all[0].is_complete, honest.rank->failure);

  for (bool has_begun : {true, false}) {
    Alone rows_of_8;
    header.offset = 8;
    if (has_begun) rows_of_8.Start(OnePart(rows.data(), 24, 12));
    rows_of_8.Take(header, rows);
    if (!has_begun) rows_of_8.Start(OnePart(rows.data(), 24, 12));
    EXPECT_HOLDS(rows_of_8.rank->failure, "rank 1 sends rows of 8 bytes as part 0, rank 0 of 12.");

    Alone part_7;
    header.offset = 12;
    header.detail = 7;
    if (has_begun) part_7.Start(OnePart(rows.data(), 24, 12));
    part_7.Take(header, rows);
    if (!has_begun) part_7.Start(OnePart(rows.data(), 24, 12));
    EXPECT_HOLDS(part_7.rank->failure, "rank 1 sends rows of 12 bytes as part 7, rank 0 of 0.");
    header.detail = 0;
  }
}

TEST(FactorsTravelWithoutTheirZeros) {
  const std::vector<std::vector<int>> arrangements = {{0, 1, 2}, {0, 0, 1}, {0, 1, 0, 1}};
  for (const std::vector<int>& nodes : arrangements) {
    const int size = static_cast<int>(nodes.size());
    for (size_t elements : {300, 60000}) {  // in a packet, and by themselves
      Job job(size, nodes, Options());
      Ends ends;
      std::vector<std::vector<uint32_t>> matrices;
      std::string joined;
      size_t shortest = SIZE_MAX;
      for (int rank = 0; rank < size; ++rank) {
        std::vector<uint32_t>& matrix = matrices.emplace_back(elements * (rank + 1));
        for (size_t i = rank; i < matrix.size(); i += 5) matrix[i] = static_cast<uint32_t>(i + 1);
        joined.append(reinterpret_cast<const char*>(matrix.data()), 4 * matrix.size());
        Factors factors = OnePart(matrix.data(), 4 * matrix.size(), 120);
        factors.parts[0].element_bytes = 4;
        if (rank != 1) factors.parts[0].without_zeros = LeaveOutZeros(matrix.data(), 4 * matrix.size(), 4, 0);
        shortest = std::min(shortest, factors.parts[0].sent_bytes());
        job.protocol(rank).StartFactors(std::move(factors), ends.Of(rank), Clock::now());
      }
      EXPECT(shortest < elements, "they are shorter");
      job.Run([&] { return ends.AreAll(size); }, "factors without zeros");
      for (int rank = 0; rank < size; ++rank) {
        EXPECT_EQ(ends.errors[rank], "", "");
        EXPECT(ends.all[rank].is_complete && Joined(ends.all[rank].parts.at(0)) == joined, "the same bits");
      }
    }
  }
}

TEST(FactorsThatAreWrongWithoutTheirZerosAreRefused) {
  const std::vector<uint32_t> matrix(300);
  Factors factors = OnePart(matrix.data(), 1200, 120);
  factors.parts[0].element_bytes = 4;
  factors.parts[0].without_zeros = LeaveOutZeros(matrix.data(), 1200, 4, 0);
  const FrameHeader header = Answer(factors);
  const std::string code(factors.parts[0].without_zeros.data.get(), header.length);
  EXPECT_EQ(header.length, size_t{8 + 5 * 8}, "no element is left");
  Alone honest;
  honest.Start(factors);
  honest.Take(header, code);
  EXPECT(honest.ends.all[0].is_complete, honest.rank->failure);
  struct Lie {
    const char* says;
    uint8_t element_bytes;
    size_t byte;  // of what is left
    char value;
    size_t row_bytes = 120;
  };
  for (const Lie& lie : {Lie{"hold no rows of 120", 4, 8, 1}, Lie{"hold no rows of 120", 4, 0, 45},
                         Lie{"hold no rows of 120", 4, 7, 127}, Lie{"with elements of 3", 3, 0, 44},
                         Lie{"hold no rows of 64", 4, 0, 44, 64}, Lie{"in rows of 0 bytes", 4, 0, 44, 0},
                         Lie{"in rows of 6 bytes, with elements of 4", 4, 0, 44, 6}}) {
    Alone alone;
    FrameHeader false_header = header;
    false_header.dtype = lie.element_bytes;
    false_header.offset = lie.row_bytes;
    std::string false_code = code;
    if (lie.row_bytes == 120) false_code[lie.byte] = lie.value;
    alone.Take(false_header, false_code);
    EXPECT_HOLDS(alone.rank->failure, lie.says);
    EXPECT_EQ(alone.Sent(FrameKind::kAbort).size(), size_t{1}, lie.says);
  }
}

TEST(PartsThatComeTwiceAreRefused) {
  const std::string rows(24, 'x');
  const FrameHeader header = Answer(OnePart(rows.data(), 24, 12));
  Alone alone;
  alone.Take(header, rows);
  EXPECT_EQ(alone.rank->failure, "", "");
  alone.Take(header, rows);
  EXPECT_HOLDS(alone.rank->failure, "factors, part 0 twice in step 0");
}

TEST(FactorsThatNoMemoryHoldsEndTheJobByName) {
  FrameHeader header = Answer(OnePart(nullptr, 0, 12));
  header.length = 12 * (uint64_t{1} << 58);
  Alone alone;
  alone.Take(header);
  EXPECT_HOLDS(alone.rank->failure,
               "Rank 1 gives factors of 3458764513820540928 bytes, for which rank 0 has no memory");
}

TEST(ARefusalThatComesFirstEndsTheTryAtOnce) {
  const std::string rows(24, 'x');
  FrameHeader header = Answer(OnePart(rows.data(), 24, 12));
  header.kind = FrameKind::kRefusal;
  header.length = 0;
  Alone alone;
  alone.Take(header);
  alone.Start(OnePart(rows.data(), 24, 12));
  EXPECT_EQ(alone.ends.all.size(), size_t{1}, "");
  EXPECT(!alone.ends.all[0].is_complete, "");
  EXPECT_EQ(alone.ends.all[0].refused_by, 1, "");
  EXPECT_EQ(alone.transport->sent.size(), size_t{0}, "nothing is sent for nobody");
}
