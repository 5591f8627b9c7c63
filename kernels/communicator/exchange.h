// One tensor that the ranks exchange, as it is submitted and while it is under way.

#ifndef POSEIDON_COMMUNICATOR_EXCHANGE_H_
#define POSEIDON_COMMUNICATOR_EXCHANGE_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "block_memory.h"
#include "frame.h"
#include "kv_pairs.h"
#include "staging.h"
#include "statistics.h"
#include "sum.h"

namespace poseidon {

// A rank that waits for a rank that itself waits for others allows this share of the time limit more for each of
// those: the rank in the middle knows who is missing, so its message should come first.
inline constexpr double kPatience = 0.1;

inline double Seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

// Exchanges whose messages leave together if they are submitted soon after each other. Each rank chooses its own.
struct Group {
  std::string name;  // empty: none
  int size = 1;
};

// Which ways an exchange takes: servers get what ranks contribute on the way up, and ranks the result on the way down.
// With one of them alone, what servers keep or give are their shards.
enum class Ways : char {
  kBoth,
  kUp,    // the output is this rank's shard of the sum, or its range
  kDown,  // the input is this rank's shard of the output
};

// One exchange. Every rank submits the same site with the same dtype, count, root, ways, shards and ranges.
//
// A rank's part of a sum of floats may be half or bfloat16, as it was before somebody cast it to float: it travels in
// two bytes, and the sum has the bits of the sum of floats. Ranks may differ in this.
struct Exchange {
  std::string site;                     // its name; of a gradient, its site
  DataType dtype = DataType::kFloat32;  // of `output`
  std::optional<DataType> input_dtype;  // if it is not `dtype`
  int64_t count = 0;                    // elements of the whole tensor
  const void* input = nullptr;
  void* output = nullptr;     // may equal `input`
  bool contributes = true;    // false: this rank adds nothing to the sum
  bool is_clocked = false;    // a rank may start the next step of the site before the last ones are over
  bool is_gradient = false;   // of a site that could travel as factors, see gather_exchanges.h
  const char* row = "calls";  // of the timeline, see Event
  bool is_blocking = false;   // whether the step does nothing else meanwhile
  bool is_of_step = true;     // false: Python exchanges it, between steps
  bool is_counted = true;     // whether statistics of steps, and timelines, have it
  int priority = 0;           // exchanges with smaller numbers overtake it
  int root = -1;              // -1: sum over ranks; otherwise every rank receives root's input
  Ways ways = Ways::kBoth;    // of a sum
  ShardLayout shards;         // unless `ways` is kBoth
  // Of a way up: the elements of which each rank gets the sum, by rank, one after the other; empty if it gets its
  // shard.
  std::vector<int64_t> ranges;
  bool is_range = false;  // one of `ranges`, which travels by itself, see Protocol::StartRanges
  Group group;
  std::shared_ptr<OnDevice> on_device;  // null: input and output are in the host's memory

  Traffic traffic() const {
    if (ways != Ways::kBoth) return ways == Ways::kUp ? Traffic::kScatter : Traffic::kShards;
    return root < 0 ? Traffic::kSum : Traffic::kBroadcast;
  }
  // The one rank that gives all, or owns all; -1 if there is none.
  int only_rank() const { return ways == Ways::kBoth ? root : shards.owner; }
  KvPairs Cut(uint64_t hash, size_t kv_pair_bytes, const std::vector<int>& servers) const {
    if (ways == Ways::kBoth) return {hash, bytes(), kv_pair_bytes, servers};
    return {shards, static_cast<size_t>(count), ElementBytes(dtype), kv_pair_bytes, servers};
  }
  size_t bytes() const { return static_cast<size_t>(count) * ElementBytes(dtype); }
  DataType sent_dtype() const { return input_dtype.value_or(dtype); }
};

// Called on the progress thread with an empty text on success, else with the reason. Must not
// block.
using Done = std::function<void(const std::string& error)>;

// A KV pair of a tensor that is on a GPU, in the host's memory: the part of this rank, or the result.
struct StagedPair {
  PinnedMemory memory;
  size_t input = 0;           // offset of this rank's part; the result is at the beginning
  bool is_wanted = false;     // this rank's part, or the sum of its node, has been fetched, or is being fetched
  bool is_adding_up = false;  // the GPU adds up the parts of this node
  bool is_added_up = false;   // it has: where the caller wants the result
};

// An exchange that this rank has submitted and that is not complete.
struct ActiveExchange {
  // `staging` is null unless the tensors are on a GPU.
  ActiveExchange(Exchange exchange, Done done, uint64_t site, uint64_t step, KvPairs pairs, SiteStatistics& statistics,
                 Clock::time_point start, Staging* staging)
      : exchange(std::move(exchange)),
        done(std::move(done)),
        site(site),
        step(step),
        pairs(std::move(pairs)),
        places(this->exchange.ways == Ways::kBoth ? std::vector<size_t>() : this->pairs.PlacesInShards()),
        statistics(statistics),
        start(start),
        staging(staging),
        form(this->exchange.shards.first),
        pending(this->pairs.size() + 1),
        is_added_up(this->pairs.size()),
        has_header(this->pairs.size()),
        has_result(this->pairs.size()),
        is_sending(this->pairs.size()),
        staged(staging || this->exchange.ways == Ways::kUp ? this->pairs.size() : 0) {}

  // Where this rank's part of a KV pair and its result are, in the memory that the network reads and writes.
  const char* input(size_t pair) const {
    return staging ? staged[pair].memory.get() + staged[pair].input : given_input(pair);
  }
  char* output(size_t pair) const {
    char* const memory = staged.empty() ? nullptr : staged[pair].memory.get();
    return memory ? memory : given_output(pair);
  }

  // The same where the caller has them.
  const char* given_input(size_t pair) const {
    const size_t byte = exchange.ways == Ways::kDown ? places[pair] : pairs[pair].offset;
    const size_t element = byte / ElementBytes(exchange.dtype);
    return static_cast<const char*>(exchange.input) + element * ElementBytes(exchange.sent_dtype());
  }
  char* given_output(size_t pair) const {
    const size_t byte = exchange.ways == Ways::kUp ? places[pair] : pairs[pair].offset;
    return static_cast<char*>(exchange.output) + byte;
  }
  size_t input_bytes(size_t pair) const {
    return pairs[pair].bytes / ElementBytes(exchange.dtype) * ElementBytes(exchange.sent_dtype());
  }
  bool is_in_place() const { return exchange.input == exchange.output; }
  // Whether this rank's part goes into what its server adds up.
  bool adds(int rank) const { return exchange.root < 0 ? exchange.contributes : exchange.root == rank; }

  const Exchange exchange;
  Done done;
  const uint64_t site;  // hash of its name
  const uint64_t step;  // how often this rank has submitted the site before
  const KvPairs pairs;
  const std::vector<size_t> places;  // by KV pair: see PlacesInShards; empty if the ways are both
  SiteStatistics& statistics;
  const Clock::time_point start;
  Staging* const staging;

  uint32_t form;             // of this rank's factors, which it sends dense, see gather_exchanges.h; or of the shards
  uint32_t common_form = 0;  // the form of all ranks' factors, 0 if forms differ

  // What must still happen: results to come, bulk sends from input or output to leave, what goes to other GPUs to be
  // copied from there, and the start itself to end.
  size_t pending;
  std::vector<char> is_added_up;  // by KV pair: all parts that this rank adds up were there
  std::vector<char> has_header;   // by KV pair: a result was announced
  std::vector<char> has_result;   // by KV pair
  // By KV pair: the network still reads what the result overwrites, an input in place or a node's sum.
  std::vector<char> is_sending;
  std::map<size_t, std::function<void()>> deferred;  // by KV pair: takes the result when `is_sending` has passed
  // By KV pair; empty without `staging`, but for sums of nodes of which this rank does not get the result.
  std::vector<StagedPair> staged;
};

// Says that `peer` has sent `what` more than once, of the KV pair or part of factors in `header`.
std::string Twice(int peer, const FrameHeader& header, const std::string& what);

// Says that a rank has sent `what`, which no rank of this job would send.
std::string Malformed(int peer, const std::string& what);

// Says that rank `missing` has ended its program, while `waiting` needs its part of `what`.
std::string LeftBehind(int missing, int waiting, const std::string& what);

// Says how a frame of `peer` and this rank's exchange of the same site differ; empty if not.
std::string Disagreement(int peer, const FrameHeader& theirs, int rank, const Exchange& mine);

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_EXCHANGE_H_
