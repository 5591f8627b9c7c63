// Queues of what is to be copied, and the look at what has been.
//
// Tests: tests/native/staging_test.cc.

#include "staging.h"

#include <algorithm>
#include <iterator>
#include <new>
#include <utility>
#include <vector>

namespace poseidon {
namespace {

constexpr size_t kDefaultPieces = 16;  // of which half may wait

// The memory of each kind, a multiple of what the largest piece takes. Half of the limit, 0 for a default, is for what
// may wait.
size_t HalfOf(size_t bytes, size_t piece_bytes) {
  return (bytes ? std::max(bytes / 2 / piece_bytes, size_t{1}) : kDefaultPieces / 2) * piece_bytes;
}

BlockMemory::Counter Pinned(const std::shared_ptr<StagingStatistics>& statistics) {
  return {statistics, &statistics->pinned_bytes};
}

}  // namespace

Staging::Staging(Device* device, size_t piece_bytes, size_t bytes, std::shared_ptr<StagingStatistics> statistics,
                 EventLog* events)
    : device_(device),
      statistics_(std::move(statistics)),
      events_(events),
      leaving_(BlockMemory::Pinned(device, piece_bytes, HalfOf(bytes, piece_bytes), Pinned(statistics_))),
      waiting_(BlockMemory::Pinned(device, piece_bytes, HalfOf(bytes, piece_bytes), Pinned(statistics_))),
      unlimited_(BlockMemory::Pinned(device, piece_bytes, /*limit=*/0, Pinned(statistics_))) {}

void Staging::WhenReady(std::shared_ptr<const OnDevice> tensor, Ready then) {
  std::deque<Unready>& unready = ready_[tensor->stream];
  if (unready.empty() && device_->IsDone(tensor->ready)) {
    ready_.erase(tensor->stream);
    return then(true);
  }
  unready.push_back({std::move(tensor), std::move(then)});
}

void Staging::Fetch(const Source& source, size_t size, size_t offset, Taken then) {
  Want({source, nullptr, size, offset, std::move(then)});
}

void Staging::FetchInto(PinnedMemory memory, const Source& source, size_t offset, Taken then) {
  Want({source, std::move(memory), 0, offset, std::move(then)});
}

PinnedMemory Staging::TakeUnlimited(size_t bytes) {
  PinnedMemory memory = unlimited_.TryTake(bytes);
  return memory ? memory : PinnedMemory(new (std::nothrow) char[bytes]);  // slower, but right
}

void Staging::Want(Wanted wanted) {
  if (has_failed_) return wanted.then(nullptr);
  wanted_.emplace(std::make_pair(wanted.source.priority, next_++), std::move(wanted));
  StartCopies();
}

void Staging::CopyUp(const std::string& site, PinnedMemory memory, void* to, size_t bytes, Taken then) {
  device_->Copy(device_->up(), to, memory.get(), bytes);
  statistics_->up_bytes += bytes;
  Begin(&up_, device_->up(), site, std::move(memory), bytes, std::move(then));
}

// Notes a copy that was put into its stream.
void Staging::Begin(Copies* copies, Device::Stream stream, const std::string& site, PinnedMemory memory, size_t bytes,
                    Taken then) {
  const bool is_recorded = events_->is_recording();
  copies->under_way.push_back({device_->Record(stream), std::move(memory), std::move(then),
                               is_recorded ? site : std::string(), is_recorded ? Clock::now() : Clock::time_point(),
                               bytes});
}

bool Staging::Poll() {
  device_->Release();
  const bool has_copied = TakeCopied(&up_) | TakeCopied(&down_);
  const bool is_ready = TakeReady();
  return StartCopies() || has_copied || is_ready;
}

bool Staging::TakeReady() {
  std::vector<Ready> due;
  for (auto stream = ready_.begin(); stream != ready_.end();) {
    std::deque<Unready>& unready = stream->second;
    for (; !unready.empty() && device_->IsDone(unready.front().tensor->ready); unready.pop_front()) {
      due.push_back(std::move(unready.front().then));
    }
    stream = unready.empty() ? ready_.erase(stream) : std::next(stream);
  }
  for (const Ready& then : due) then(true);
  return !due.empty();
}

bool Staging::TakeCopied(Copies* copies) {
  bool has_copied = false;
  while (!copies->under_way.empty() && device_->IsDone(copies->under_way.front().event)) {
    Copying copied = std::move(copies->under_way.front());
    copies->under_way.pop_front();
    has_copied = true;
    if (!copied.site.empty()) {
      const Clock::time_point begin = std::max(copied.begin, copies->last_end);  // after the one before it
      copies->last_end = Clock::now();
      events_->Add(copied.site, {copies->row, begin, copies->last_end, copied.bytes, /*is_blocking=*/false});
    }
    if (copied.then) copied.then(std::move(copied.memory));
  }
  return has_copied;
}

// Starts copies as far as they may be under way. What waits for memory holds up what is less urgent, or large pieces
// would never get theirs.
bool Staging::StartCopies() {
  bool has_started = false;
  while (down_.under_way.size() < kMostDown && !wanted_.empty()) {
    Wanted& first = wanted_.begin()->second;
    if (!first.memory) first.memory = leaving_.TryTake(first.size);
    if (!first.memory && leaving_.is_empty())
      first.memory = TakeUnlimited(first.size);  // there is no memory of that kind
    if (!first.memory) break;
    Wanted wanted = std::move(wanted_.extract(wanted_.begin()).mapped());
    const Source& source = wanted.source;
    if (source.bytes > 0) {
      device_->Copy(device_->down(), wanted.memory.get() + wanted.offset, source.from, source.bytes);
    }
    statistics_->down_bytes += source.bytes;
    Begin(&down_, device_->down(), source.site, std::move(wanted.memory), source.bytes, std::move(wanted.then));
    has_started = true;
  }
  return has_started;
}

void Staging::Fail() {
  has_failed_ = true;
  for (auto& [stream, unready] : std::exchange(ready_, {})) {
    for (Unready& each : unready) each.then(false);
  }
  for (auto& [place, wanted] : std::exchange(wanted_, {})) wanted.then(nullptr);
  for (Copies* copies : {&down_, &up_}) {
    for (Copying& copying : copies->under_way) {
      if (Taken then = std::exchange(copying.then, nullptr)) then(nullptr);
    }
  }
}

}  // namespace poseidon
