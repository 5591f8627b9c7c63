// Links between the GPUs of a node: its ranks' parts of a sum are added up, the sum is passed on, and ranks get each
// other's factors, without the host.
//
//   giver                                    taker
//   part -> its window | GpuContribution ->  | window -> the taker's memory | Taken ->
//                                            | sum of all parts, in the order of ranks -> output -> its window |
//                                            GpuResult
//   rows -> its window | GpuFactors ->       | window -> the taker's memory | Taken ->
//
// Every rank exports a part of its GPU's memory, its *window*, which the others of its node open. What is sent lies
// there until all who shall have it have copied it. A taker copies at once, into memory without a limit or into its
// output, and factors even if they have been refused meanwhile. So everything that waits for room in a window gets it
// in the end: those copies wait for nothing but the GPU. Parts, results and factors have the bits that they have
// through the host (but those of a NaN), and both ways can be mixed. Until a peer has said that it has opened the
// window, or where it cannot, what it gets goes through the host.
//
// Payloads that fit into a packet go through the host: a message that says where they lie would be no shorter.

#ifndef POSEIDON_COMMUNICATOR_GPU_LINKS_H_
#define POSEIDON_COMMUNICATOR_GPU_LINKS_H_

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "block_memory.h"
#include "device.h"
#include "event_log.h"
#include "frame.h"
#include "routes.h"
#include "sender.h"
#include "staging_statistics.h"

namespace poseidon {

class GpuLinks {
 public:
  // A payload that is sent has at most `piece_bytes` bytes. `bytes` limits the size of the window, to that of one at
  // least; 0 for a default, which it never exceeds.
  GpuLinks(int rank, int size, const Routes* routes, Sender* sender, size_t piece_bytes, size_t bytes,
           std::shared_ptr<StagingStatistics> statistics, EventLog* events);
  ~GpuLinks();

  // Begins with this rank's GPU: exports its window, and opens those of others. Does nothing the second time.
  void Use(Device* device);

  // Takes a frame of kind kWindow, kWindowOpen or kTaken; returns what is wrong with it.
  std::string OnFrame(int peer, const FrameHeader& header, const char* payload);

  // Whether what this rank sends to a peer, or gets from it, may go by a window.
  bool MaySend(int peer, size_t bytes) const { return bytes > kInlineBytes && is_open_[peer]; }
  bool MayGet(int peer) const { return opened_[peer] != nullptr; }

  using Then = std::function<void()>;  // called from Poll; not after a failure

  // What is done for whom; the smallest `priority` goes first.
  struct Errand {
    std::string site;
    int priority;
  };

  // Sends `header.length` bytes of the GPU's memory to peers, and calls `then` when they have been copied from there.
  // Those of one priority leave in order.
  void Send(const Errand& errand, const std::vector<int>& peers, const FrameHeader& header, const void* from,
            Then then);

  // Copies what `header` announces to the GPU's memory. Returns what is wrong with its place.
  std::string Take(const Errand& errand, int peer, const FrameHeader& header, void* to, Then then);

  // Copies from the GPU's memory to the host's.
  void Fetch(const Errand& errand, const void* from, size_t bytes, void* to, Then then);

  // See Device.
  void Sum(const Errand& errand, DataType dtype, std::vector<Summand> inputs, size_t bytes, void* output, Then then);

  // Memory of the GPU; null if there is no more.
  GpuMemory TakeMemory(size_t bytes);

  // The largest window.
  static size_t MostBytes(size_t piece_bytes) { return kDefaultPieces * RoundedUp(piece_bytes); }

  // Goes on with what is done; returns whether anything is.
  bool Poll();

  bool is_copying() const { return !under_way_.empty(); }
  bool is_waiting() const { return waits_for_gpu() || (!has_failed_ && !leaving_.empty()); }
  // Whether anything lies in the window that others have not copied.
  bool is_holding() const { return !has_failed_ && !lying_.empty(); }
  bool waits_for_gpu() const { return !has_failed_ && (is_copying() || !wanted_.empty()); }

  // Ends what waits. What has begun goes on, so this object must stay as long as the GPU works.
  void Fail();

  // Closes the others' windows, unless copies may still read them.
  void CloseWindows();

 private:
  using Place = std::pair<int, uint64_t>;  // priority, and when it came

  struct Work {
    std::string site;
    size_t bytes;
    std::function<void()> begin;  // puts it into the stream
    Then then;
  };
  struct Leaving {
    Errand errand;
    std::vector<int> peers;
    FrameHeader header;
    const void* from;
    Then then;
  };
  struct UnderWay {
    Device::Event event;
    Work work;
    Clock::time_point start;  // if it is recorded
  };
  struct Lying {  // in the window
    GpuMemory memory;
    std::vector<int> peers;  // that have not taken it
  };
  // More would make an urgent one wait for those that have started; with fewer, the stream would run dry.
  static constexpr size_t kMostUnderWay = 4;
  static constexpr size_t kUnit = 64;  // of places in a window
  static constexpr size_t kDefaultPieces = 16;
  static constexpr std::chrono::seconds kNextTry{1};  // after memory of the GPU was refused

  static size_t RoundedUp(size_t bytes) { return (bytes + kUnit - 1) / kUnit * kUnit; }

  void Open(int peer);
  void Begin();
  bool BeginLeaving();
  void Put(Work work);

  const int rank_;
  const Routes* const routes_;
  Sender* const sender_;
  const size_t piece_bytes_, window_bytes_;
  const std::shared_ptr<StagingStatistics> statistics_;
  EventLog* const events_;

  Device* device_ = nullptr;
  char* window_ = nullptr;
  std::unique_ptr<BlockMemory> room_, memory_;  // of the window, and besides

  struct Handle {
    std::string text;
    size_t bytes = 0;  // 0: not known
  };
  std::vector<Handle> handles_;       // of peers' windows
  std::vector<const char*> opened_;   // by peer: where its window is; null if it is not open here
  std::vector<char> is_open_;         // by peer: has opened this rank's window
  std::map<uint32_t, Lying> lying_;   // by place
  std::map<Place, Work> wanted_;      // what waits for nothing but its turn
  std::map<Place, Leaving> leaving_;  // what waits for room in the window
  std::deque<UnderWay> under_way_;    // in the order of the stream
  uint64_t next_ = 0;
  Clock::time_point last_end_, next_try_;
  bool has_failed_ = false;
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_GPU_LINKS_H_
