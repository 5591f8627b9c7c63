// Texts as JSON has them.

#ifndef POSEIDON_COMMUNICATOR_JSON_H_
#define POSEIDON_COMMUNICATOR_JSON_H_

#include <iomanip>
#include <sstream>
#include <string>

namespace poseidon {

inline std::string Quoted(const std::string& text) {
  std::ostringstream out;
  out << '"';
  for (unsigned char c : text) {
    if (c == '"' || c == '\\') {
      out << '\\' << c;
    } else if (c < 0x20) {
      out << "\\u" << std::hex << std::setw(4) << std::setfill('0') << int{c} << std::dec;
    } else {
      out << c;
    }
  }
  out << '"';
  return out.str();
}

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_JSON_H_
