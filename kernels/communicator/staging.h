// Moves what is exchanged between a GPU's memory and the network, which reads and writes the host's: in pieces, each of
// which goes on as soon as it has landed, while the next is copied.
//
//   the GPU's stream  ...gradient | ready                            | waits for `complete`, the optimizer...
//   copies down                     piece 0 | piece 1 | ...
//   the network                               piece 0 | piece 1 | ...  | results, by piece
//   copies up                                                            piece 0 | piece 1 | ... complete
//
// Nothing waits for the GPU: the progress thread looks, in Poll, how far it is.
//
// The memory for pieces that leave is limited. A piece that waits for its memory gets it in the end, because those who
// have some wait for copies, or for ranks to receive: they receive into memory without this limit. (How much that is
// follows from what senders may have in flight, see sender.h.) Only the parts of sums that this rank adds up could wait
// for other ranks to send. They are fetched when all others have come, or before, into memory of their own, if that has
// room.

#ifndef POSEIDON_COMMUNICATOR_STAGING_H_
#define POSEIDON_COMMUNICATOR_STAGING_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "block_memory.h"
#include "device.h"
#include "event_log.h"
#include "staging_statistics.h"

namespace poseidon {

// A tensor that is exchanged from and to a GPU's memory.
struct OnDevice {
  OnDevice(Device* device, Device::Stream stream, Device::Event ready)
      : device(device), stream(stream), ready(std::move(ready)) {}

  Device* const device;
  const Device::Stream stream;  // the framework's
  const Device::Event ready;    // in `stream`: the input may be read and the output overwritten
  Device::Event complete;       // the output is there; set before the exchange is done
};

class Staging {
 public:
  // `bytes` limits the memory for pieces that leave, each of which has at most `piece_bytes`: to two of these at least,
  // 0 for a default. Copies are noted in `events`.
  Staging(Device* device, size_t piece_bytes, size_t bytes, std::shared_ptr<StagingStatistics> statistics,
          EventLog* events);

  Device* device() const { return device_; }

  // Calls `then` with true when the tensor is ready: now, or from Poll; with false after a failure.
  using Ready = std::function<void(bool is_ready)>;
  void WhenReady(std::shared_ptr<const OnDevice> tensor, Ready then);

  using Taken = std::function<void(PinnedMemory memory)>;  // null after a failure

  // What is to be copied from the GPU; the smallest `priority` goes first.
  struct Source {
    const std::string& site;  // lives until it is copied
    int priority;
    const void* from;
    size_t bytes;
  };

  // Copies it to the byte `offset` of `size` bytes of memory, and calls `then` with that from Poll.
  void Fetch(const Source& source, size_t size, size_t offset, Taken then);

  // The same into memory that was taken before.
  void FetchInto(PinnedMemory memory, const Source& source, size_t offset, Taken then);

  // Memory for what may wait for other ranks to send; null if that has no room.
  PinnedMemory TryTakeToWait(size_t bytes) { return waiting_.TryTake(bytes); }

  // Memory to receive into, or of a size that only the caller knows. Null if there is no more.
  PinnedMemory TakeUnlimited(size_t bytes);

  // Copies the first `bytes` bytes of memory to the GPU, for a site, and calls `then`, if there is one, from Poll.
  void CopyUp(const std::string& site, PinnedMemory memory, void* to, size_t bytes, Taken then);

  // The place in the GPU's work where all that was copied up so far is there.
  Device::Event Copied() { return device_->Record(device_->up()); }

  // Goes on with what has become ready or has been copied; returns whether anything has.
  bool Poll();

  std::string failure() const { return device_->failure(); }

  // Whether anything waits for the GPU; no more after a failure.
  bool is_waiting() const { return !has_failed_ && (!ready_.empty() || !wanted_.empty() || is_copying()); }

  // Whether copies may be under way.
  bool is_copying() const { return !down_.under_way.empty() || !up_.under_way.empty(); }

  // Tells those that wait of a failure. Copies that have begun go on, so this object must stay as long as the GPU
  // works.
  void Fail();

 private:
  struct Unready {
    std::shared_ptr<const OnDevice> tensor;
    Ready then;
  };
  struct Wanted {
    Source source;
    PinnedMemory memory;  // null: `size` bytes are to be taken
    size_t size, offset;
    Taken then;
  };
  struct Copying {
    Device::Event event;
    PinnedMemory memory;
    Taken then;        // null: nobody waits
    std::string site;  // empty unless it is recorded, as is its begin
    Clock::time_point begin;
    size_t bytes;
  };
  // Copies of one stream, in its order.
  struct Copies {
    const char* row;  // of the timeline
    std::deque<Copying> under_way;
    Clock::time_point last_end;
  };
  // More would make an urgent piece wait for those that have started; with fewer, the link would idle between two.
  static constexpr size_t kMostDown = 2;

  void Want(Wanted wanted);
  void Begin(Copies* copies, Device::Stream stream, const std::string& site, PinnedMemory memory, size_t bytes,
             Taken then);
  bool TakeCopied(Copies* copies);
  bool StartCopies();
  bool TakeReady();

  Device* const device_;
  const std::shared_ptr<StagingStatistics> statistics_;
  EventLog* const events_;
  BlockMemory leaving_, waiting_, unlimited_;
  // In the order in which they came, which is about that of each stream.
  std::map<Device::Stream, std::deque<Unready>> ready_;
  std::map<std::pair<int, uint64_t>, Wanted> wanted_;  // by priority, and when it came
  uint64_t next_ = 0;
  Copies down_{"down", {}, {}}, up_{"up", {}, {}};
  bool has_failed_ = false;
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_STAGING_H_
