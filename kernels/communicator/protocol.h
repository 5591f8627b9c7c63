// The protocol of one rank, without threads: starts exchanges, answers frames, notices failures.

#ifndef POSEIDON_COMMUNICATOR_PROTOCOL_H_
#define POSEIDON_COMMUNICATOR_PROTOCOL_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "exchange.h"
#include "factors.h"
#include "routes.h"
#include "sender.h"
#include "server.h"
#include "statistics.h"
#include "transport.h"

namespace poseidon {

struct Options {
  int64_t kv_pair_bytes = int64_t{2} << 20;  // the largest KV pair
  std::vector<int> servers;                  // ranks that own KV pairs; empty: all ranks
  // At most how many ranks combine, of those that share a node as the transport knows. 0: all of them.
  int ranks_per_node = 0;
  double timeout_s = 600;                    // longest wait for another rank
};

// A number for each rank, the same for those that combine: ranks of one node, or as many of them as the
// options say. Where the transport knows no nodes, all ranks share one, but combine only if they are told to.
std::vector<int> NodesOf(const Options& options, const Transport& transport);

// "rank 1" or "ranks 1, 2".
std::string RankList(const std::vector<int>& ranks);

// One thread makes all calls. Nothing blocks, and nothing is sent before Flush or Poll.
class Protocol {
 public:
  // `nodes` are those of NodesOf. `on_failure` is told the reason of the first failure, before any exchange is.
  Protocol(std::unique_ptr<Transport> transport, Options options, const std::vector<int>& nodes,
           Statistics* statistics, std::function<void(const std::string& reason)> on_failure);

  // Starts an exchange that was submitted at `submitted`.
  void Start(Exchange exchange, Done done, Clock::time_point submitted);
  void StartFactors(Factors factors, FactorsDone done, Clock::time_point submitted);

  // Handles what has arrived; returns whether anything had.
  bool Poll();

  // Sends the frames that are ready, those for one peer together.
  void Flush();

  // Fails when an exchange has waited too long.
  void CheckDeadlines();

  // Tells the other ranks that this one has reached its end, once it has nothing of others' to pass on.
  void SayGoodbye();

  // Ends every exchange, and this rank's part in the job, with an error. With `tell_peers` the
  // other ranks end too.
  void Fail(const std::string& reason, bool tell_peers);

  // Leaves the job; waits for the others only if all have said goodbye.
  void Close();

  bool has_failed() const { return !failure_.empty(); }
  bool is_waiting() const { return !active_.empty() || broadcasting_.is_waiting(); }
  std::vector<int> MissingGoodbyes() const;  // ranks that have not said goodbye
  bool is_flushed() const {
    return sender_.IsEmpty() && transport_->Flushed() && !broadcasting_.is_passing_on();
  }

 private:
  // A result of an exchange that this rank has not started. It is received at once, or it would keep
  // the sender from sending what this rank waits for first.
  struct EarlyResult {
    int peer;
    FrameHeader header;
    std::vector<char> payload;
    bool is_ready = false;
    std::function<void()> when_ready;
  };

  // The worker's side.
  size_t FirstPair(const KvPairs& pairs) const;
  void StartPair(const std::shared_ptr<ActiveExchange>& active, size_t pair);
  void OnResult(int peer, const FrameHeader& header, const char* payload);
  void OnEarlyResult(int peer, const FrameHeader& header, const char* payload);
  void TakeEarlyResult(const std::shared_ptr<ActiveExchange>& active,
                       const std::shared_ptr<EarlyResult>& early);
  void ReceiveResult(const std::shared_ptr<ActiveExchange>& active, size_t pair,
                     const FrameHeader& header);
  void TakeResult(const std::shared_ptr<ActiveExchange>& active, size_t pair, uint32_t form);
  void AddResult(const std::shared_ptr<ActiveExchange>& active, size_t pair);
  void Complete(const std::shared_ptr<ActiveExchange>& active);

  // The server's side.
  void AddUp(const std::shared_ptr<ActiveExchange>& active, size_t pair,
             const Server::Contributions& contributions, uint32_t common_form);
  void PassDown(const std::shared_ptr<ActiveExchange>& active, size_t pair, uint32_t form);

  // Both sides.
  void Send(const std::shared_ptr<ActiveExchange>& active, size_t pair, FrameKind kind, int peer,
            const void* data, uint32_t form);
  void OnFrame(int peer, const FrameHeader& header, const char* payload);

  // Say what is wrong with a frame that no rank of this job would send; empty if its numbers can be relied on.
  std::string Wrong(int peer, const FrameHeader& header) const;
  std::string WrongKvPair(int peer, const FrameHeader& header) const;
  std::string WrongFactors(int peer, const FrameHeader& header) const;

  void SendGoodbye();

  // Failures.
  void FailIf(const std::string& disagreement);
  void FailIfLeftBehind();
  void FailLeftBehind(int missing, int waiting, const std::string& site);
  void FailOverdue(const std::string& site, const std::string& scheme,
                   const std::vector<int>& ranks);

  // Ranks that this one waits for, and how many ranks, one after the other, they may be waiting for:
  //   0  for parts of what this rank adds up
  //   1  for sums of nodes, which wait for parts
  //   2  for a server's results, which wait for sums
  //   3  for results that come by a gateway
  struct Awaited {
    std::vector<int> ranks;
    int others;
  };
  Awaited AwaitedBy(const ActiveExchange& active) const;

  struct Site {
    std::string name;
    uint64_t steps = 0;  // how often it was submitted
  };

  const std::unique_ptr<Transport> transport_;
  const int rank_, size_;
  const Options options_;  // with all servers filled in
  const Routes routes_;
  const uint64_t plan_;    // digest of everything that decides how bytes are cut and routed
  Statistics* const statistics_;
  const std::function<void(const std::string&)> on_failure_;

  std::unordered_map<uint64_t, Site> sites_;  // by hash
  std::unordered_map<uint64_t, std::shared_ptr<ActiveExchange>> active_;  // by hash of the site
  std::vector<std::shared_ptr<ActiveExchange>> lost_;  // those that a failure has ended
  // A broadcast can be over for its root and server before this rank has asked for it.
  std::map<std::pair<uint64_t, uint64_t>, std::vector<std::shared_ptr<EarlyResult>>>
      early_;  // by site and step
  Sender sender_;
  Server server_;
  FactorBroadcasting broadcasting_;
  bool wants_goodbye_ = false;
  std::vector<char> has_left_;      // by rank: has said goodbye
  std::string failure_;
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_PROTOCOL_H_
