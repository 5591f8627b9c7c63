// The wire format: what every message between two ranks starts with.
//
// A *packet* is a run of frames that were ready together. A frame is a header and, for small
// payloads, the payload itself; a larger payload follows on its own as a *bulk* transfer whose tag
// stands in the header. Which frames share a packet is the sender's choice: each frame says
// whose bytes it carries, so ranks never have to agree on the grouping.

#ifndef POSEIDON_COMMUNICATOR_FRAME_H_
#define POSEIDON_COMMUNICATOR_FRAME_H_

#include <cstddef>
#include <cstdint>

namespace poseidon {

enum class FrameKind : uint8_t {
  kContribution,  // a worker's part of a sum, or a node's, to the server of that KV pair
  kResult,        // the finished KV pair, from its server to a worker, perhaps by its gateway
  kFactors,       // one part of a worker's factors, to every other worker, perhaps by its gateway
  kColumns,       // columns of one part of the sender's factors, for the receiver alone
  kRefusal,       // the sender has no factors of this site in `step`
  kAbort,         // the sender failed; the payload is the reason
  kGoodbye,       // the sender has reached the end of its program
  kAlive,         // the sender is alive; see heartbeats.h
  kPing,          // bytes of no meaning, to be answered; see pings.h
  kPong,          // the sender has all of the ping `step`
  kQuestion,      // a text that the program is to answer; see questions.h
  kAnswer,        // the answer to the question `step`
  // Between ranks of a node whose GPUs reach each other's memory, see gpu_links.h.
  kGpuContribution,  // as kContribution, with the payload in the sender's window
  kGpuResult,        // as kResult, likewise
  kGpuFactors,       // rows of one part of the sender's factors, likewise; those of one part come in order
  kWindow,           // the handle of the sender's window, which has `count` bytes
  kWindowOpen,       // the sender has opened that of the receiver
  kTaken,            // the sender has copied what was at `tag` of the receiver's window
};

enum class Traffic : uint8_t {
  kSum,        // servers sum what all ranks contribute; one without payload adds nothing
  kBroadcast,  // servers pass on what `root` contributes
  kGather,     // every rank gets the factors of all, or their rows
  kScatter,    // as kSum, but nothing comes down: every rank gets its shard of the sum
  kShards,     // nothing goes up: servers give all ranks their shards
};

// Payloads up to this size travel inside the packet; one copy is cheaper than one more message.
inline constexpr size_t kInlineBytes = size_t{32} << 10;

struct FrameHeader {
  FrameKind kind;
  uint8_t dtype;       // DataType of the whole tensor: of a sum, of the result; of factors, see FactorPart
  Traffic traffic;     // how the tensor is exchanged
  uint8_t sent_dtype;  // DataType of this payload: a part of a sum may be narrower than the sum, see Exchange; of
                       // kGpuFactors, 1 if more rows of this part follow, else 0
  int32_t root;        // the only contributing rank of a broadcast, -1 for a sum; whose factors these are; of shards,
                       // the rank that owns all elements, -1 for all servers
  uint64_t site;       // hash of the site's name
  uint64_t step;       // how often this site was exchanged before (of a KV pair: dense; of factors: in either way), no
                       // step of the training; of a ping, a question and their answers, a number
  uint64_t layout;     // digest of everything that decides how bytes are cut and routed
  uint64_t count;      // elements of the whole tensor; of factors, the digest of their form
  uint64_t offset;     // first byte of this KV pair in the tensor; of factors, the bytes of one row
  uint64_t length;     // bytes of payload
  uint32_t tag;        // bulk tag, unique among the sender's transfers in flight to this peer; place in a window
  uint32_t detail;  // of an answer: 1 if it is the reason why there is none; of factors: which part; of a gradient: see
                    // DenseForm in gather_exchanges.h; of shards: see ShardLayout

  // Whether the payload is the bulk transfer `tag`, or in a window; otherwise it follows this header.
  bool is_bulk() const { return length > kInlineBytes && !is_in_window(); }
  bool is_in_window() const { return kind >= FrameKind::kGpuContribution && kind <= FrameKind::kGpuFactors; }
  // Whether the tensor is cut into shards.
  bool is_of_shards() const { return traffic == Traffic::kScatter || traffic == Traffic::kShards; }
  bool is_result() const { return kind == FrameKind::kResult || kind == FrameKind::kGpuResult; }
  size_t bytes_that_follow() const { return is_bulk() || is_in_window() ? 0 : length; }
};

static_assert(sizeof(FrameHeader) == 64 && offsetof(FrameHeader, root) == 4 && offsetof(FrameHeader, site) == 8 &&
                  offsetof(FrameHeader, tag) == 56,
              "FrameHeader is sent as it lies in memory, where nothing may lie between its fields");

// A packet is closed when it holds more than this. Transports receive packets of at most
// kMaxPacketBytes.
inline constexpr size_t kMaxPacketBytes = size_t{160} << 10;

// The longest reason that an abort frame carries.
inline constexpr size_t kMaxReasonBytes = size_t{16} << 10;

// The largest payload of a ping.
inline constexpr size_t kMaxPingBytes = size_t{64} << 20;

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_FRAME_H_
