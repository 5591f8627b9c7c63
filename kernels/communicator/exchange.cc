// Compares what two ranks say of one exchange.

#include "exchange.h"

#include <sstream>

namespace poseidon {
namespace {

std::string Describe(int rank, DataType dtype, uint64_t count, int root) {
  std::ostringstream text;
  text << "rank " << rank << (root < 0 ? " sums " : " broadcasts ") << count << " elements of "
       << Name(dtype);
  return text.str();
}

}  // namespace

std::string Malformed(int peer, const std::string& what) {
  return "Rank " + std::to_string(peer) + " has sent what no rank of this job sends: " + what +
         ". Install the same tf_poseidon on all ranks; if it is the same, memory or the network has changed bytes.";
}

std::string Twice(int peer, const FrameHeader& header, const std::string& what) {
  const bool is_factors = header.kind == FrameKind::kFactors;
  std::ostringstream text;
  text << what << (is_factors ? " part " : " the KV pair at byte ") << (is_factors ? header.detail : header.offset)
       << " twice in step " << header.step << ", expected once";
  return Malformed(peer, text.str());
}

std::string Disagreement(int peer, const FrameHeader& theirs, int rank, const Exchange& mine) {
  const auto dtype = static_cast<DataType>(theirs.dtype);
  const auto count = static_cast<uint64_t>(mine.count);
  if (theirs.scheme == mine.scheme() && theirs.root == mine.root && dtype == mine.dtype &&
      theirs.count == count) {
    return "";
  }
  return "Ranks disagree about '" + mine.site + "': " +
         Describe(peer, dtype, theirs.count, theirs.root) + ", " +
         Describe(rank, mine.dtype, count, mine.root) + ". Build the same model on all ranks.";
}

}  // namespace poseidon
