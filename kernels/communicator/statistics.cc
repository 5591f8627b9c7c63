#include "statistics.h"

#include <iomanip>
#include <sstream>

namespace poseidon {
namespace {

std::string Quoted(const std::string& text) {
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

}  // namespace

void Statistics::CountSent(const std::string& site, uint64_t payload_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  sites_[site].sent_bytes += payload_bytes;
}

void Statistics::CountReceived(const std::string& site, uint64_t payload_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  sites_[site].received_bytes += payload_bytes;
}

void Statistics::CountDone(const std::string& site, double seconds) {
  std::lock_guard<std::mutex> lock(mutex_);
  sites_[site].count += 1;
  sites_[site].seconds += seconds;
}

void Statistics::CountHeader(uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  header_bytes_ += bytes;
}

std::string Statistics::Json() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::ostringstream out;
  out << "{\"header_bytes\": " << header_bytes_ << ", \"sites\": {";
  const char* separator = "";
  for (const auto& [name, site] : sites_) {
    out << separator << Quoted(name) << ": {\"count\": " << site.count
        << ", \"sent_bytes\": " << site.sent_bytes
        << ", \"received_bytes\": " << site.received_bytes << ", \"seconds\": " << site.seconds
        << "}";
    separator = ", ";
  }
  out << "}}";
  return out.str();
}

}  // namespace poseidon
