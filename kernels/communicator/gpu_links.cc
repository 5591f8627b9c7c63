// Keeps the windows, and what waits for its turn in the stream between GPUs.
//
// Tests: tests/native/gpu_links_test.cc.

#include "gpu_links.h"

#include <algorithm>

#include "text.h"

namespace poseidon {
namespace {

BlockMemory::Counter OfGpu(const std::shared_ptr<StagingStatistics>& statistics) {
  return {statistics, &statistics->gpu_bytes};
}

}  // namespace

GpuLinks::GpuLinks(int rank, int size, const Routes* routes, Sender* sender, size_t piece_bytes, size_t bytes,
                   std::shared_ptr<StagingStatistics> statistics, EventLog* events)
    : rank_(rank),
      routes_(routes),
      sender_(sender),
      piece_bytes_(piece_bytes),
      window_bytes_(std::clamp(bytes ? RoundedUp(bytes) : MostBytes(piece_bytes), RoundedUp(piece_bytes),
                               MostBytes(piece_bytes))),
      statistics_(std::move(statistics)),
      events_(events),
      handles_(size),
      opened_(size),
      is_open_(size) {}

GpuLinks::~GpuLinks() { CloseWindows(); }

// ---- windows --------------------------------------------------------------------------------

void GpuLinks::Use(Device* device) {
  if (device_) return;
  device_ = device;
  memory_ = std::make_unique<BlockMemory>(BlockMemory::OfGpu(device, piece_bytes_, /*limit=*/0, OfGpu(statistics_)));
  std::vector<int> peers;
  for (int peer = 0; peer < static_cast<int>(opened_.size()); ++peer) {
    if (peer != rank_ && routes_->IsLocal(peer)) peers.push_back(peer);
  }
  if (peers.empty()) return;
  for (int peer : peers) Open(peer);
  auto room =
      std::make_unique<BlockMemory>(BlockMemory::OfGpu(device, window_bytes_, window_bytes_, OfGpu(statistics_)));
  const GpuMemory whole = room->TryTake(window_bytes_);
  const std::string handle = whole ? device_->Export(whole.get()) : "";
  if (handle.empty()) return;
  room_ = std::move(room);
  window_ = whole.get();
  FrameHeader header = {};
  header.kind = FrameKind::kWindow;
  header.count = window_bytes_;
  header.length = handle.size();
  for (int peer : peers) sender_->Send(peer, header, handle.data(), nullptr);
}

void GpuLinks::Open(int peer) {
  if (!device_ || handles_[peer].bytes == 0 || opened_[peer]) return;
  opened_[peer] = static_cast<const char*>(device_->Open(handles_[peer].text));
  if (!opened_[peer]) return;
  FrameHeader header = {};
  header.kind = FrameKind::kWindowOpen;
  sender_->Send(peer, header, nullptr, nullptr);
}

std::string GpuLinks::OnFrame(int peer, const FrameHeader& header, const char* payload) {
  if (!routes_->IsLocal(peer)) return "a frame about a window, expected those of ranks that combine with this one";
  if (header.kind == FrameKind::kWindow) {
    if (handles_[peer].bytes > 0) return "a second window";
    handles_[peer] = {std::string(payload, header.length), header.count};
    Open(peer);
    return "";
  }
  if (!window_) return "a frame about this rank's window, which it has not shown";
  if (header.kind == FrameKind::kWindowOpen) {
    is_open_[peer] = 1;
    return "";
  }
  const auto lying = lying_.find(header.tag);
  const auto taker = lying == lying_.end() ? std::vector<int>::iterator()
                                           : std::find(lying->second.peers.begin(), lying->second.peers.end(), peer);
  if (lying == lying_.end() || taker == lying->second.peers.end()) {
    return Text("word that it has taken what lies at ", header.tag, " of the window, expected where it has not");
  }
  lying->second.peers.erase(taker);
  if (lying->second.peers.empty()) {
    lying_.erase(lying);
    Begin();
  }
  return "";
}

void GpuLinks::CloseWindows() {
  if (is_copying()) return;
  for (const char*& window : opened_) {
    if (window) device_->Close(const_cast<char*>(std::exchange(window, nullptr)));
  }
}

// ---- work -----------------------------------------------------------------------------------

void GpuLinks::Send(const Errand& errand, const std::vector<int>& peers, const FrameHeader& header, const void* from,
                    Then then) {
  if (has_failed_) return;
  leaving_.emplace(Place{errand.priority, next_++}, Leaving{errand, peers, header, from, std::move(then)});
  Begin();
}

std::string GpuLinks::Take(const Errand& errand, int peer, const FrameHeader& header, void* to, Then then) {
  const size_t offset = size_t{header.tag} * kUnit;
  if (!opened_[peer] || offset + header.length > handles_[peer].bytes) {
    return Text(header.length, " bytes at ", offset,
                " of its window, expected a place in one that this rank has opened");
  }
  statistics_->across_bytes += header.length;
  auto begin = [this, to, from = opened_[peer] + offset, bytes = header.length] {
    device_->Copy(device_->across(), to, from, bytes);
  };
  auto taken = [this, peer, tag = header.tag, then = std::move(then)] {
    FrameHeader answer = {};
    answer.kind = FrameKind::kTaken;
    answer.tag = tag;
    sender_->Send(peer, answer, nullptr, nullptr);
    then();
  };
  wanted_.emplace(Place{errand.priority, next_++}, Work{errand.site, header.length, begin, taken});
  Begin();
  return "";
}

void GpuLinks::Fetch(const Errand& errand, const void* from, size_t bytes, void* to, Then then) {
  statistics_->down_bytes += bytes;
  auto begin = [this, to, from, bytes] { device_->Copy(device_->across(), to, from, bytes); };
  wanted_.emplace(Place{errand.priority, next_++}, Work{errand.site, bytes, begin, std::move(then)});
  Begin();
}

void GpuLinks::Sum(const Errand& errand, DataType dtype, std::vector<Summand> inputs, size_t bytes, void* output,
                   Then then) {
  auto begin = [this, dtype, inputs = std::move(inputs), bytes, output] {
    device_->Sum(device_->across(), dtype, inputs, bytes, output);
  };
  wanted_.emplace(Place{errand.priority, next_++}, Work{errand.site, bytes, begin, std::move(then)});
  Begin();
}

// Begins what may be under way. What waits for room holds up nothing else.
void GpuLinks::Begin() {
  while (!has_failed_ && under_way_.size() < kMostUnderWay) {
    const bool leaves_first =
        wanted_.empty() || (!leaving_.empty() && leaving_.begin()->first < wanted_.begin()->first);
    if (leaves_first && BeginLeaving()) continue;
    if (wanted_.empty()) return;
    Put(std::move(wanted_.extract(wanted_.begin()).mapped()));
  }
}

GpuMemory GpuLinks::TakeMemory(size_t bytes) {
  const auto now = Clock::now();
  if (now < next_try_) return nullptr;  // being refused takes long
  GpuMemory memory = memory_->TryTake(bytes);
  if (!memory) next_try_ = now + kNextTry;
  return memory;
}

// The first that leaves gets the room: what comes after it could take it away for ever.
bool GpuLinks::BeginLeaving() {
  if (leaving_.empty()) return false;
  const GpuMemory memory = room_->TryTake(leaving_.begin()->second.header.length);
  if (!memory) return false;
  Leaving leaving = std::move(leaving_.extract(leaving_.begin()).mapped());
  leaving.header.tag = static_cast<uint32_t>((memory.get() - window_) / kUnit);
  lying_[leaving.header.tag] = {memory, leaving.peers};
  auto begin = [this, to = memory.get(), from = leaving.from, bytes = leaving.header.length] {
    device_->Copy(device_->across(), to, from, bytes);
  };
  auto copied = [this, peers = leaving.peers, header = leaving.header, then = std::move(leaving.then)] {
    for (int peer : peers) sender_->Send(peer, header, nullptr, nullptr);
    then();
  };
  Put({leaving.errand.site, leaving.header.length, begin, copied});
  return true;
}

void GpuLinks::Put(Work work) {
  work.begin();
  const bool is_recorded = events_->is_recording();
  under_way_.push_back(
      {device_->Record(device_->across()), std::move(work), is_recorded ? Clock::now() : Clock::time_point()});
}

bool GpuLinks::Poll() {
  bool has_done = false;
  while (!under_way_.empty() && device_->IsDone(under_way_.front().event)) {
    UnderWay done = std::move(under_way_.front());
    under_way_.pop_front();
    has_done = true;
    if (done.start != Clock::time_point()) {
      const Clock::time_point begin = std::max(done.start, last_end_);  // after the one before it
      last_end_ = Clock::now();
      events_->Add(done.work.site, {"across", begin, last_end_, done.work.bytes, /*is_blocking=*/false});
    }
    if (!has_failed_) done.work.then();
  }
  Begin();
  return has_done;
}

void GpuLinks::Fail() {
  has_failed_ = true;
  wanted_.clear();
  leaving_.clear();
}

}  // namespace poseidon
