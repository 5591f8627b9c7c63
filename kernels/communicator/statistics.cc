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

SiteStatistics& Statistics::Of(const std::string& site) {
  std::lock_guard<std::mutex> lock(mutex_);
  return sites_[site];
}

void Statistics::Submitted(uint64_t site, Clock::time_point time) {
  if (!step_.insert(site).second) {
    if (last_completion_ > last_submission_) {
      waiting_nanoseconds_ += std::chrono::duration_cast<std::chrono::nanoseconds>(
                                  last_completion_ - last_submission_).count();
    }
    step_ = {site};
  }
  last_submission_ = time;
}

std::string Statistics::Json() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::ostringstream out;
  out << "{\"header_bytes\": " << header_bytes
      << ", \"waiting_seconds\": " << 1e-9 * waiting_nanoseconds_ << ", \"sites\": {";
  const char* separator = "";
  for (const auto& [name, site] : sites_) {
    out << separator << Quoted(name) << ": {\"count\": " << site.count
        << ", \"sent_bytes\": " << site.sent_bytes
        << ", \"received_bytes\": " << site.received_bytes << ", \"seconds\": " << 1e-9 * site.nanoseconds
        << "}";
    separator = ", ";
  }
  out << "}}";
  return out.str();
}

}  // namespace poseidon
