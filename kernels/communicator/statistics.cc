// Counts what one rank has exchanged, and writes the counters as JSON.
//
// Tests: tests/communicator/test_factors.py, tests/communicator/test_communicator.py.

#include "statistics.h"

#include <algorithm>
#include <sstream>

#include "exchange.h"
#include "json.h"

namespace poseidon {

SiteStatistics& Statistics::Of(const std::string& site) {
  std::lock_guard<std::mutex> lock(mutex_);
  return sites_[site];
}

void Statistics::Submitted(uint64_t site, Clock::time_point time) {
  if (!step_.insert(site).second) {
    if (last_completion_ > last_submission_) {
      waiting_nanoseconds_ +=
          std::chrono::duration_cast<std::chrono::nanoseconds>(last_completion_ - last_submission_).count();
    }
    step_ = {site};
  }
  last_submission_ = time;
}

void Statistics::Waited(const LastPart& last) {
  if (last.before_ == Clock::time_point()) return;  // nobody else takes part
  std::lock_guard<std::mutex> lock(mutex_);
  waited_for_[last.rank_] += Seconds(last.time_ - last.before_);
}

void Statistics::WaitedForBatch(Clock::time_point begin, Clock::time_point end) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (comparison_begin_ < end && comparison_end_ > begin) end = std::max(begin, comparison_begin_);
    input_seconds_ += Seconds(end - begin);
  }
  events.Add("", {"data", begin, end, 0, true});
}

void Statistics::Compared(Clock::time_point begin, Clock::time_point end) {
  std::lock_guard<std::mutex> lock(mutex_);
  comparison_begin_ = begin;
  comparison_end_ = end;
}

std::string Statistics::Json() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::ostringstream out;
  out.precision(12);  // who reads them twice wants the difference
  out << "{\"header_bytes\": " << header_bytes << ", \"packets\": " << packets
      << ", \"waiting_seconds\": " << 1e-9 * waiting_nanoseconds_ << ", \"waited_for\": [";
  const char* separator = "";
  for (const auto& [rank, seconds] : waited_for_) {
    out << separator << "[" << rank << ", " << seconds << "]";
    separator = ", ";
  }
  out << "], \"input_seconds\": " << input_seconds_ << ", \"staging\": {\"pinned_bytes\": " << staging->pinned_bytes
      << ", \"gpu_bytes\": " << staging->gpu_bytes << ", \"down_bytes\": " << staging->down_bytes
      << ", \"up_bytes\": " << staging->up_bytes << ", \"across_bytes\": " << staging->across_bytes
      << "}, \"sites\": {";
  separator = "";
  for (const auto& [name, site] : sites_) {
    out << separator << Quoted(name) << ": {\"count\": " << site.count << ", \"sent_bytes\": " << site.sent_bytes
        << ", \"received_bytes\": " << site.received_bytes << ", \"network_bytes\": " << site.network_bytes
        << ", \"seconds\": " << 1e-9 * site.nanoseconds << ", \"factor_bytes\": " << site.factor_bytes
        << ", \"short_factor_bytes\": " << site.short_factor_bytes << "}";
    separator = ", ";
  }
  out << "}}";
  return out.str();
}

}  // namespace poseidon
