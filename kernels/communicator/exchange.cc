// Compares what two ranks say of one exchange.
//
// Tests: tests/native/protocol_test.cc, tests/communicator/test_communicator.py.

#include "exchange.h"

#include "text.h"

namespace poseidon {
namespace {

std::string Describe(int rank, DataType dtype, uint64_t count, int root) {
  return Text("rank ", rank, root < 0 ? " sums " : " broadcasts ", count, " elements of ", Name(dtype));
}

}  // namespace

std::string Malformed(int peer, const std::string& what) {
  return Text(
      "Rank ", peer, " has sent what no rank of this job sends: ", what,
      ". Install the same tf_poseidon on all ranks; if it is the same, memory or the network has changed bytes.");
}

std::string Twice(int peer, const FrameHeader& header, const std::string& what) {
  const bool is_factors = header.kind == FrameKind::kFactors;
  return Malformed(
      peer, Text(what, is_factors ? " part " : " the KV pair at byte ", is_factors ? header.detail : header.offset,
                 " twice in step ", header.step, ", expected once"));
}

std::string LeftBehind(int missing, int waiting, const std::string& what) {
  return Text("Rank ", missing, " has ended its program, but rank ", waiting, " still waits for its part of ", what,
              ": all ranks must make the same number of steps.");
}

std::string Disagreement(int peer, const FrameHeader& theirs, int rank, const Exchange& mine) {
  const auto dtype = static_cast<DataType>(theirs.dtype);
  const auto count = static_cast<uint64_t>(mine.count);
  if (theirs.traffic == mine.traffic() && theirs.root == mine.root && dtype == mine.dtype && theirs.count == count) {
    return "";
  }
  return "Ranks disagree about '" + mine.site + "': " + Describe(peer, dtype, theirs.count, theirs.root) + ", " +
         Describe(rank, mine.dtype, count, mine.root) + ". Build the same model on all ranks.";
}

}  // namespace poseidon
