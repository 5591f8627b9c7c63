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

// The memory of each kind, a multiple of what the largest piece takes. Half of the limit is for what may wait.
size_t HalfOf(size_t bytes, size_t piece_bytes) { return std::max(bytes / 2 / piece_bytes, size_t{1}) * piece_bytes; }

}  // namespace

Staging::Staging(Device* device, size_t piece_bytes, size_t bytes, std::shared_ptr<StagingStatistics> statistics)
    : device_(device),
      statistics_(std::move(statistics)),
      leaving_(device, piece_bytes, HalfOf(bytes ? bytes : kDefaultPieces * piece_bytes, piece_bytes), statistics_),
      waiting_(device, piece_bytes, HalfOf(bytes ? bytes : kDefaultPieces * piece_bytes, piece_bytes), statistics_),
      unlimited_(device, piece_bytes, /*limit=*/0, statistics_) {}

void Staging::WhenReady(std::shared_ptr<const OnDevice> tensor, Ready then) {
  std::deque<Unready>& unready = ready_[tensor->stream];
  if (unready.empty() && device_->IsDone(tensor->ready)) {
    ready_.erase(tensor->stream);
    return then(true);
  }
  unready.push_back({std::move(tensor), std::move(then)});
}

void Staging::Fetch(int priority, size_t size, size_t offset, const void* from, size_t bytes, Taken then) {
  Want(priority, {nullptr, size, offset, from, bytes, std::move(then)});
}

void Staging::FetchInto(PinnedPiece piece, int priority, size_t offset, const void* from, size_t bytes, Taken then) {
  Want(priority, {std::move(piece), 0, offset, from, bytes, std::move(then)});
}

PinnedPiece Staging::TakeUnlimited(size_t bytes) {
  PinnedPiece piece = unlimited_.TryTake(bytes);
  return piece ? piece : PinnedPiece(new (std::nothrow) char[bytes]);  // slower, but right
}

void Staging::Want(int priority, Wanted wanted) {
  if (has_failed_) return wanted.then(nullptr);
  wanted_.emplace(std::make_pair(priority, next_++), std::move(wanted));
  StartCopies();
}

void Staging::CopyUp(PinnedPiece piece, void* to, size_t bytes) {
  device_->Copy(device_->up(), to, piece.get(), bytes);
  statistics_->up_bytes += bytes;
  up_.push_back({device_->Record(device_->up()), std::move(piece), nullptr});
}

bool Staging::Poll() {
  device_->Release();
  const bool has_copied = TakeCopied();
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

bool Staging::TakeCopied() {
  bool has_copied = false;
  for (; !up_.empty() && device_->IsDone(up_.front().event); up_.pop_front()) has_copied = true;
  while (!down_.empty() && device_->IsDone(down_.front().event)) {
    Copying copied = std::move(down_.front());
    down_.pop_front();
    has_copied = true;
    if (copied.then) copied.then(std::move(copied.piece));
  }
  return has_copied;
}

// Starts copies as far as they may be under way. What waits for memory holds up what is less urgent, or large pieces
// would never get theirs.
bool Staging::StartCopies() {
  bool has_started = false;
  while (down_.size() < kMostDown && !wanted_.empty()) {
    Wanted& first = wanted_.begin()->second;
    if (!first.piece) first.piece = leaving_.TryTake(first.size);
    if (!first.piece && leaving_.is_empty())
      first.piece = TakeUnlimited(first.size);  // there is no memory of that kind
    if (!first.piece) break;
    Wanted wanted = std::move(wanted_.extract(wanted_.begin()).mapped());
    if (wanted.bytes > 0) {
      device_->Copy(device_->down(), wanted.piece.get() + wanted.offset, wanted.from, wanted.bytes);
    }
    statistics_->down_bytes += wanted.bytes;
    down_.push_back({device_->Record(device_->down()), std::move(wanted.piece), std::move(wanted.then)});
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
  for (Copying& copying : down_) {
    if (Taken then = std::exchange(copying.then, nullptr)) then(nullptr);
  }
}

}  // namespace poseidon
