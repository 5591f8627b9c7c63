// Compares what two ranks say of one exchange.
//
// Tests: tests/native/protocol_test.cc, tests/communicator/test_communicator.py.

#include "exchange.h"

#include "text.h"

namespace poseidon {
namespace {

std::string Describe(int rank, Traffic traffic, DataType dtype, uint64_t count, const ShardLayout& layout) {
  const char* verb = traffic == Traffic::kBroadcast ? " broadcasts "
                     : traffic == Traffic::kScatter ? " scatters the sum of "
                     : traffic == Traffic::kShards  ? " gathers the shards of "
                                                    : " sums ";
  const std::string what = Text("rank ", rank, verb, count, " elements of ", Name(dtype));
  if (traffic != Traffic::kScatter && traffic != Traffic::kShards) return what;
  const std::string owner = layout.owner < 0 ? "all servers" : Text("rank ", layout.owner);
  return Text(what, ", owned by ", owner, " in layout ", layout.first);
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
  const bool has_layout = !theirs.is_of_shards() || theirs.detail == mine.shards.first;
  if (theirs.traffic == mine.traffic() && theirs.root == mine.only_rank() && dtype == mine.dtype &&
      theirs.count == count && has_layout) {
    return "";
  }
  return Text("Ranks disagree about '", mine.site,
              "': ", Describe(peer, theirs.traffic, dtype, theirs.count, {theirs.detail, theirs.root}), ", ",
              Describe(rank, mine.traffic(), mine.dtype, count, mine.shards), ". Build the same model on all ranks.");
}

}  // namespace poseidon
