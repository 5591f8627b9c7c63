// Small texts: messages made of their parts, and hashes of names.

#ifndef POSEIDON_COMMUNICATOR_TEXT_H_
#define POSEIDON_COMMUNICATOR_TEXT_H_

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

namespace poseidon {

// All parts, one after the other, as a stream prints them.
template <typename... Parts>
std::string Text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// "rank 1" or "ranks 1, 2".
std::string RankList(const std::vector<int>& ranks);

// FNV-1a, 64 bits.
uint64_t Hash(const std::string& text);

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_TEXT_H_
