// Keeps events while somebody records them, and writes them as JSON.
//
// Tests: tests/training/test_timeline.py.

#include "event_log.h"

#include <sstream>

#include "json.h"

namespace poseidon {
namespace {

int64_t Nanoseconds(Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

}  // namespace

void EventLog::Record(size_t capacity) {
  std::lock_guard<std::mutex> lock(mutex_);
  is_recording_ = capacity > 0;
  if (capacity == 0) return;
  capacity_ = capacity;
  dropped_ = 0;
  begin_ = Clock::now();
  events_.clear();
  sites_.clear();
}

void EventLog::Keep(const std::string& site, const Event& event) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!is_recording() || event.begin < begin_) return;
  if (events_.size() == capacity_) {
    ++dropped_;
  } else {
    events_.push_back({&*sites_.insert(site).first, event});
  }
}

std::string EventLog::Json() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::ostringstream out;
  out << "{\"begin\": " << Nanoseconds(begin_) << ", \"dropped\": " << dropped_ << ", \"events\": [";
  const char* separator = "";
  for (const auto& [site, event] : events_) {
    out << separator << "[\"" << event.row << "\", " << Quoted(*site) << ", " << Nanoseconds(event.begin) << ", "
        << Nanoseconds(event.end) << ", " << event.bytes << ", " << (event.is_blocking ? "true" : "false") << "]";
    separator = ", ";
  }
  out << "]}";
  return out.str();
}

}  // namespace poseidon
