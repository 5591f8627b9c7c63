// The server's side of an exchange: collects and counts the contributions to the KV pairs that
// this rank owns, or adds up for its node.

#ifndef POSEIDON_COMMUNICATOR_SERVER_H_
#define POSEIDON_COMMUNICATOR_SERVER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "buffer_pool.h"
#include "exchange.h"
#include "routes.h"
#include "statistics.h"
#include "transport.h"

namespace poseidon {

class Server {
 public:
  // What was contributed, by node and then by rank; other nodes contribute their sums.
  using Contributions = std::vector<std::vector<Summand>>;

  // Called when the last contribution to KV pair `pair` is in, with those of the ranks that
  // contribute, which are valid during the call only; and with the form of factors that all these
  // ranks have, 0 if not the same.
  using Complete = std::function<void(const std::shared_ptr<ActiveExchange>& active, size_t pair,
                                      const Contributions& contributions, uint32_t common_form)>;

  // Called when all parts but this rank's own are in, which is on a GPU and has not been given; and when all parts of
  // this rank's node are in and some are on its GPU.
  using Needs = std::function<void(const std::shared_ptr<ActiveExchange>& active, size_t pair)>;

  // Where a part is that was taken from another rank's window.
  struct Taken {
    std::shared_ptr<char[]> memory;
    bool is_on_gpu = false;
  };
  // Takes it, and calls `then` when it is there. Returns what is wrong with its place.
  using Takes =
      std::function<std::string(int peer, const FrameHeader& header, Taken* taken, std::function<void()> then)>;

  Server(Transport* transport, const Routes* routes, Statistics* statistics, Complete on_complete, Needs on_need,
         Takes take)
      : transport_(transport),
        routes_(routes),
        statistics_(statistics),
        on_complete_(std::move(on_complete)),
        on_need_(std::move(on_need)),
        take_(std::move(take)) {}

  // Returns how a part of another rank that is already there disagrees with what this rank exchanges, or an empty text.
  std::string DisagreementWith(const ActiveExchange& active) const;

  // Adds this rank's own part of a KV pair; if that is on a GPU, GiveOwn must follow.
  void AddOwn(const std::shared_ptr<ActiveExchange>& active, size_t pair);
  void GiveOwn(const std::shared_ptr<ActiveExchange>& active, size_t pair);

  // Parts that other ranks of this node contribute, in their order.
  struct LocalPart {
    int rank;
    Summand summand;
    bool is_on_gpu;
  };
  std::vector<LocalPart> LocalParts(const ActiveExchange& active, size_t pair) const;

  // Replaces a part on the GPU: MoveToHost says that it is on its way to the host, where it then is.
  void MoveToHost(const ActiveExchange& active, size_t pair, int rank);
  void GiveMoved(const ActiveExchange& active, size_t pair, int rank, std::shared_ptr<char[]> memory);

  // Replaces the parts of this node, this rank's own too, by their sum; null if none has contributed.
  void GiveSumOfNode(const ActiveExchange& active, size_t pair, const void* sum);

  // Whether all that this rank adds up comes from its node; then Finish ends a KV pair whose sum is on the GPU, and
  // returns the form of factors that all these ranks have.
  bool IsOfThisNode(const ActiveExchange& active, size_t pair) const;
  bool IsWaiting(const ActiveExchange& active, size_t pair) const;  // for a part of another rank
  uint32_t Finish(const ActiveExchange& active, size_t pair);

  // Adds the part that `peer` announces; a bulk payload is received first. May come before this rank's own part; if
  // that is there, the header has been compared with it. Returns what is wrong with the part, or an empty text.
  std::string Add(int peer, const FrameHeader& header, const char* payload);

  // Ranks that keep a KV pair of this exchange waiting; empty if none does.
  std::vector<int> Missing(const ActiveExchange& active) const;

  // A rank that has left without giving its part, and one that waits for it.
  struct LeftBehind {
    int missing;
    int waiting;
    uint64_t site;
  };
  std::optional<LeftBehind> FindLeftBehind(const std::vector<char>& has_left) const;

 private:
  using Key = std::tuple<uint64_t, uint64_t, uint64_t>;  // site, step, offset

  enum class State : char {
    kMissing,
    kArriving,
    kCopying,  // this rank's GPU copies it
    kReady
  };
  struct Contribution {
    State state = State::kMissing;
    const void* data = nullptr;  // null: the rank adds nothing
    DataType dtype = DataType::kFloat32;
    BufferPool::Buffer buffer;
    Taken taken;  // instead, if it was in a window
    FrameHeader header = {};
  };
  struct KvPairState {
    std::shared_ptr<ActiveExchange> own;      // null until this rank submits the site
    std::vector<Contribution> contributions;  // by rank
    PartTimes times;
  };

  static Key KeyOf(const ActiveExchange& active, size_t pair) {
    return {active.site, active.step, active.pairs[pair].offset};
  }
  KvPairState& StateOf(const Key& key);
  uint32_t CommonForm(const KvPairState& state, int server) const;
  void TakeOff(KvPairState* state, const ActiveExchange& active);
  std::vector<int> Missing(const KvPairState& state, uint64_t offset) const;
  void Ready(const Key& key, int rank);
  void FinishIfComplete(const Key& key);

  Transport* const transport_;
  const Routes* const routes_;
  Statistics* const statistics_;
  const Complete on_complete_;
  const Needs on_need_;
  const Takes take_;
  std::map<Key, KvPairState> pairs_;
  BufferPool pool_;
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_SERVER_H_
