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
