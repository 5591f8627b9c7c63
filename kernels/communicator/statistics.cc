// Counts what one rank has exchanged, and writes the counters as JSON.
//
// Tests: tests/communicator/test_factors.py, tests/communicator/test_communicator.py.

#include "statistics.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "exchange.h"
#include "json.h"

namespace poseidon {

SiteStatistics& Statistics::Of(const std::string& site) {
  std::lock_guard<std::mutex> lock(mutex_);
  return sites_[site];
}

void Statistics::Submitted(uint64_t site, Clock::time_point time, bool is_of_step) {
  if (!step_.insert(site).second || !is_of_step || !is_of_step_) {
    EndStep();
    step_ = {site};
  }
  is_of_step_ = is_of_step;
  last_submission_ = time;
}

void Statistics::Exchanged(const std::string& site, const Event& event) {
  SiteStatistics& counters = Of(site);
  counters.count += 1;
  counters.nanoseconds += std::chrono::duration_cast<std::chrono::nanoseconds>(event.end - event.begin).count();
  events.Add(site, event);
}

void Statistics::EndStep() {
  if (last_completion_ > last_submission_) {
    waiting_nanoseconds_ +=
        std::chrono::duration_cast<std::chrono::nanoseconds>(last_completion_ - last_submission_).count();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  late_.resize(std::max(late_.size(), latest_.size()));
  for (size_t rank = 0; rank < latest_.size(); ++rank) late_[rank] += latest_[rank];
  latest_.clear();
}

void Statistics::Waited(const PartTimes& parts) {
  std::vector<std::pair<Clock::time_point, int>> order;
  for (size_t rank = 0; rank < parts.times_.size(); ++rank) {
    if (parts.times_[rank] != Clock::time_point()) order.emplace_back(parts.times_[rank], rank);
  }
  if (order.size() < 2) return;  // nobody else takes part
  std::sort(order.begin(), order.end());
  latest_.resize(std::max(latest_.size(), parts.times_.size()));
  const auto median = order.begin() + (order.size() - 1) / 2;
  for (auto part = median + 1; part != order.end(); ++part) {
    latest_[part->second] = std::max(latest_[part->second], Seconds(part->first - median->first));
  }
  const auto [time, last] = order.back();
  std::lock_guard<std::mutex> lock(mutex_);
  waited_for_[last] += Seconds(time - order[order.size() - 2].first);
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

std::string Statistics::Json(bool has_sites) const {
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
    if (!has_sites) break;
    out << separator << Quoted(name) << ": {\"count\": " << site.count << ", \"sent_bytes\": " << site.sent_bytes
        << ", \"received_bytes\": " << site.received_bytes << ", \"network_bytes\": " << site.network_bytes
        << ", \"seconds\": " << 1e-9 * site.nanoseconds << ", \"factor_bytes\": " << site.factor_bytes
        << ", \"short_factor_bytes\": " << site.short_factor_bytes << "}";
    separator = ", ";
  }
  out << "}, \"late_seconds\": [";
  separator = "";
  for (double seconds : late_) {
    out << separator << seconds;
    separator = ", ";
  }
  out << "]}";
  return out.str();
}

}  // namespace poseidon
