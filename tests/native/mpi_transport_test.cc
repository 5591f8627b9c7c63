// The MPI transport on 2 ranks, cutting bulk transfers into pieces of 1,000 bytes. All ranks run the same tests.

#include "mpi_transport.h"

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "check.h"

using poseidon::Transport;

namespace {

constexpr size_t kPieceBytes = 1000;
constexpr uint32_t kWireTags = 1 << 15;  // after this many transfers, MPI's tags repeat

Transport& Mpi() {
  static Transport* transport = poseidon::MakeMpiTransport(kPieceBytes, /*shares_memory=*/false).release();
  return *transport;
}

int Other() { return 1 - Mpi().rank(); }

int packets = 0;        // that arrived
uint32_t next_tag = 0;  // for both directions: tests send as many transfers as they receive, or skip tags

template <typename Condition>
void PollUntil(Condition condition, const std::string& where) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!condition()) {
    EXPECT(std::chrono::steady_clock::now() < deadline, where + ": waited 20 s");
    Mpi().Poll([](int, const char*, size_t) { ++packets; });
  }
}

// A barrier: returns when the other rank has called it too.
void Meet() {
  static int met = 0;
  Mpi().SendPacket(Other(), {'x'});
  ++met;
  PollUntil([] { return packets >= met && Mpi().Flushed(); }, "meeting");
}

std::vector<char> Pattern(int rank, uint32_t tag, size_t bytes) {
  std::vector<char> data(bytes);
  for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<char>(31 * i + i / kPieceBytes + 7 * tag + tag / 999 + rank);
  return data;
}

}  // namespace

TEST(ATransferIsDoneWhenAllItsPiecesAre) {
  EXPECT_EQ(Mpi().size(), 2, "run this under mpiexec -n 2");
  for (bool asks_first : {true, false}) {
    for (size_t bytes : {0, 1, 999, 1000, 1001, 2000, 12345, 3000001}) {
      const std::string where = std::to_string(bytes) + " bytes";
      const uint32_t tag = next_tag++;
      const std::vector<char> mine = Pattern(Mpi().rank(), tag, bytes), theirs = Pattern(Other(), tag, bytes);
      std::vector<char> got(bytes + 1, 'x');
      int sent = 0, received = 0;
      auto receive = [&] {
        Mpi().ReceiveBulk(Other(), tag, got.data(), bytes, [&] {
          ++received;
          EXPECT(std::equal(theirs.begin(), theirs.end(), got.begin()), where);
        });
      };
      if (asks_first) receive();
      Meet();
      Mpi().SendBulk(Other(), tag, mine.data(), bytes, 0, [&] { ++sent; });
      if (!asks_first) receive();
      PollUntil([&] { return sent > 0 && received > 0; }, where);
      EXPECT_EQ(got[bytes], 'x', where);
      EXPECT_EQ(sent, 1, where);
      EXPECT_EQ(received, 1, where);
      Meet();
    }
  }
}

TEST(EachPieceIsHeard) {
  const size_t bytes = 5 * kPieceBytes;
  const std::vector<char> mine(bytes);
  std::vector<char> got(bytes);
  int done = 0, heard = 0;
  Meet();
  Mpi().TellHeard([&](int peer) { heard += peer == Other(); });
  Mpi().SendBulk(Other(), next_tag, mine.data(), bytes, 0, [&] { ++done; });
  Mpi().ReceiveBulk(Other(), next_tag, got.data(), bytes, [&] { ++done; });
  ++next_tag;
  PollUntil([&] { return done == 2; }, "5 pieces");
  EXPECT_EQ(heard, 5, "");
  Mpi().TellHeard({});
  Meet();
}

TEST(PiecesOfSeveralTransfersAreNotMixedUp) {
  const size_t count = 20, bytes = 7654;
  std::vector<std::vector<char>> mine, got(count, std::vector<char>(bytes));
  size_t sent = 0, received = 0;
  for (size_t i = 0; i < count; ++i) mine.push_back(Pattern(Mpi().rank(), next_tag + i, bytes));
  for (size_t i = 0; i < count; ++i) Mpi().SendBulk(Other(), next_tag + i, mine[i].data(), bytes, 0, [&] { ++sent; });
  for (size_t i = count; i-- > 0;) {
    Mpi().ReceiveBulk(Other(), next_tag + i, got[i].data(), bytes, [&] { ++received; });
  }
  PollUntil([&] { return sent == count && received == count; }, "20 transfers");
  for (size_t i = 0; i < count; ++i) EXPECT(got[i] == Pattern(Other(), next_tag + i, bytes), std::to_string(i));
  next_tag += count;
  Meet();
}

TEST(UrgentTransfersOvertakeOthersBetweenPieces) {
  const size_t count = 4, bytes = 50 * kPieceBytes;
  const std::vector<int> priorities = {3, 2, 1, 2}, expected = {2, 1, 3, 0};
  std::vector<std::vector<char>> mine, got(count, std::vector<char>(bytes));
  std::vector<int> arrived;
  size_t sent = 0;
  for (size_t i = 0; i < count; ++i) mine.push_back(Pattern(Mpi().rank(), next_tag + i, bytes));
  for (int i : expected) {  // what has arrived at the same time is handled in this order
    Mpi().ReceiveBulk(Other(), next_tag + i, got[i].data(), bytes, [&, i] { arrived.push_back(i); });
  }
  Meet();
  for (size_t i = 0; i < count; ++i) {
    Mpi().SendBulk(Other(), next_tag + i, mine[i].data(), bytes, priorities[i], [&] { ++sent; });
  }
  PollUntil([&] { return sent == count && arrived.size() == count; }, "4 transfers");
  EXPECT(arrived == expected, "the most urgent arrives first, and of equals the one that was sent first");
  for (size_t i = 0; i < count; ++i) EXPECT(got[i] == Pattern(Other(), next_tag + i, bytes), std::to_string(i));
  next_tag += count;
  Meet();
}

TEST(ATransferIsNotOvertakenByOneOfItsWireTag) {
  const uint32_t count = kWireTags + 3;  // the last three have the tags of the first three
  const size_t long_bytes = 3 * kPieceBytes, short_bytes = 4;
  const bool sends = Mpi().rank() == 0;
  std::vector<std::vector<char>> data;
  size_t done = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const size_t bytes = i < 3 ? long_bytes : short_bytes;
    data.push_back(sends ? Pattern(0, next_tag + i, bytes) : std::vector<char>(bytes));
  }
  if (sends) {  // two pieces of the first one are under way when the others come
    for (uint32_t i = 0; i < count; ++i) {
      Mpi().SendBulk(1, next_tag + i, data[i].data(), data[i].size(), i < 3 ? 9 : 1, [&] { ++done; });
    }
  } else {
    size_t of_long = 0, window = 512;  // MPI takes long to look at many
    for (uint32_t i = 0; i < count; ++i) {
      size_t& counter = i < 3 ? of_long : done;
      Mpi().ReceiveBulk(0, next_tag + i, data[i].data(), data[i].size(), [&counter] { ++counter; });
      if (i % window == 0) PollUntil([&] { return done + window + 3 > i; }, "those before");
    }
    PollUntil([&] { return of_long == 3; }, "the least urgent ones");
    done += of_long;
  }
  PollUntil([&] { return done == count; }, "all of them");
  for (uint32_t i = 0; i < count; ++i) {
    EXPECT(data[i] == Pattern(0, next_tag + i, data[i].size()), std::to_string(i));
  }
  next_tag += count;
  Meet();
}

TEST(ATransferOfTheSameWireTagWaitsUntilTheEarlierOneIsAskedFor) {
  const size_t long_bytes = 1500, short_bytes = 4;  // the others leave beside two pieces
  const uint32_t first = next_tag, last = first + kWireTags;
  const bool sends = Mpi().rank() == 0;
  const std::vector<char> of_first = Pattern(0, first, long_bytes), of_last = Pattern(0, last, long_bytes);
  std::vector<char> got_first(long_bytes), got_last(long_bytes);
  size_t done = 0;
  auto count = [&] { ++done; };
  if (sends) Mpi().SendBulk(1, first, of_first.data(), long_bytes, 0, count);
  // All transfers in between, a window at a time. The first one is not received yet.
  const uint32_t window = 512;
  for (uint32_t begin = first + 1; begin < last; begin += window) {
    const uint32_t size = std::min(window, last - begin);
    std::vector<std::vector<char>> data;
    size_t moved = 0;
    for (uint32_t i = 0; i < size; ++i) {
      data.push_back(sends ? Pattern(0, begin + i, short_bytes) : std::vector<char>(short_bytes));
    }
    for (uint32_t i = 0; i < size; ++i) {
      if (sends) {
        Mpi().SendBulk(1, begin + i, data[i].data(), short_bytes, 0, [&] { ++moved; });
      } else {
        Mpi().ReceiveBulk(0, begin + i, data[i].data(), short_bytes, [&] { ++moved; });
      }
    }
    PollUntil([&] { return moved == size; }, "a window");
    for (uint32_t i = 0; i < size; ++i) EXPECT(data[i] == Pattern(0, begin + i, short_bytes), std::to_string(i));
    Meet();
  }
  if (sends) {
    Mpi().SendBulk(1, last, of_last.data(), long_bytes, 0, count);
    Meet();
  } else {
    Mpi().ReceiveBulk(0, last, got_last.data(), long_bytes, count);
    Meet();
    Mpi().ReceiveBulk(0, first, got_first.data(), long_bytes, count);
  }
  PollUntil([&] { return done == 2; }, "the first and the last transfer");
  if (!sends) {
    EXPECT(got_first == of_first, "the first one's data");
    EXPECT(got_last == of_last, "the last one's data");
  }
  Meet();
}

TEST(RanksLeaveTogether) { Mpi().Close(/*agreed=*/true); }
