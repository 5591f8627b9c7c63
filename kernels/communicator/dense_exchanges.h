// Exchanges of whole tensors: cut into KV pairs, each of which goes up to its server, perhaps by gateways, is
// added up or passed on, and comes down again. What a rank does as a worker is here; as a server, in server.h.

#ifndef POSEIDON_COMMUNICATOR_DENSE_EXCHANGES_H_
#define POSEIDON_COMMUNICATOR_DENSE_EXCHANGES_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "buffer_pool.h"
#include "exchange.h"
#include "gather_exchanges.h"
#include "gpu_links.h"
#include "options.h"
#include "routes.h"
#include "sender.h"
#include "server.h"
#include "statistics.h"
#include "transport.h"

namespace poseidon {

class DenseExchanges {
 public:
  // Takes memory that the network can write, and GPUs; null if there is no more.
  using Allocate = std::function<std::shared_ptr<char[]>(size_t bytes)>;

  // `has_left` says by rank who has said goodbye. `fail` ends the job for a reason, and calls Fail before it returns.
  DenseExchanges(Transport* transport, const Options& options, const Routes* routes, Sender* sender, GpuLinks* links,
                 GatherExchanges* gathering, Statistics* statistics, const std::vector<char>* has_left,
                 Allocate allocate, std::function<void(const std::string& reason)> fail);

  // Starts an exchange that was submitted at `submitted`; `site` is the hash of its name. `staging` moves tensors that
  // are on a GPU, and ready there; else it is null.
  void Start(Exchange exchange, Done done, uint64_t site, Clock::time_point submitted, Staging* staging);

  // Takes a part of a sum or a result, whose numbers FrameChecks has found right.
  void OnFrame(int peer, const FrameHeader& header, const char* payload);

  // The exchange that has waited longer than it may, and the ranks that it waits for.
  struct Overdue {
    std::string site;
    std::string scheme;
    std::vector<int> ranks;
  };
  std::optional<Overdue> FindOverdue(Clock::time_point now) const;

  // Says which rank has left without giving a part that another one waits for; empty if none has.
  std::string FindLeftBehind();

  // Tells the name of a site, for messages: this rank may give its factors only, where others wait for its part.
  void NameSite(uint64_t site, const std::string& name) { sites_[site].name = name; }

  // Ends all exchanges with an error.
  void Fail(const std::string& reason);

  bool is_waiting() const { return !active_.empty(); }

 private:
  using Active = std::shared_ptr<ActiveExchange>;
  using SiteStep = std::pair<uint64_t, uint64_t>;

  // A result of an exchange that this rank has not started. It is received at once, or it would keep
  // the sender from sending what this rank waits for first.
  struct EarlyResult {
    int peer;
    FrameHeader header;
    std::vector<char> payload;
    bool is_ready = false;
    std::function<void()> when_ready;
  };

  // On a dedicated server nobody submits an exchange: the first part that arrives starts it.
  void TakePartToServe(int peer, const FrameHeader& header, const char* payload);
  void Serve(const FrameHeader& header);

  // The way up.
  size_t FirstPair(const KvPairs& pairs) const;
  void StartPair(const Active& active, size_t pair);
  bool MakeRoomForSum(const Active& active, size_t pair);
  void FetchOwn(const Active& active, size_t pair, PinnedMemory memory);
  void FetchAndSend(const Active& active, size_t pair);
  void AddUp(const Active& active, size_t pair, const Server::Contributions& contributions, uint32_t common_form);

  // The same where parts come by the windows of GPUs.
  GpuLinks::Errand ErrandOf(const Active& active) const { return {active->exchange.site, active->exchange.priority}; }
  bool IsLinked(const Active& active, int peer, size_t bytes) const;
  bool WillAddUpOnGpu(const Active& active, size_t pair) const;
  std::string TakePart(int peer, const FrameHeader& header, Server::Taken* taken, std::function<void()> then);
  void Need(const Active& active, size_t pair);
  void AddUpOnGpu(const Active& active, size_t pair, const std::vector<Server::LocalPart>& parts);
  void AddedUpOnGpu(const Active& active, size_t pair);
  void SendByLink(const Active& active, size_t pair, FrameKind kind, const std::vector<int>& peers, const void* from,
                  DataType sent_dtype, uint32_t form);

  // The way down.
  void GiveShard(const Active& active, size_t pair);
  void OnResult(const Active& active, int peer, const FrameHeader& header, const char* payload);
  bool PrepareOutput(const Active& active, size_t pair);
  void TakeLinkedResult(const Active& active, int peer, const FrameHeader& header, size_t pair);
  void OnEarlyResult(int peer, const FrameHeader& header, const char* payload);
  void TakeEarlyResult(const Active& active, const std::shared_ptr<EarlyResult>& early);
  void ReceiveResult(const Active& active, size_t pair, const FrameHeader& header);
  void TakeResult(const Active& active, size_t pair, uint32_t form);
  void PassDown(const Active& active, size_t pair, uint32_t form);
  void PassDownFromGpu(const Active& active, size_t pair, uint32_t form);
  std::pair<std::vector<int>, std::vector<int>> LinkedAndOthers(const Active& active, size_t pair) const;
  void Deliver(const Active& active, size_t pair, std::function<void()> then);
  void AddResult(const Active& active, size_t pair);
  void Complete(const Active& active);

  FrameHeader HeaderOf(const Active& active, size_t pair, FrameKind kind, bool has_data, DataType sent_dtype,
                       uint32_t form) const;
  void Send(const Active& active, size_t pair, FrameKind kind, int peer, const void* data, DataType sent_dtype,
            uint32_t form);
  void FailIf(const std::string& disagreement);

  bool IsActive(uint64_t site) const;
  // This rank's exchange of the site in this step, null if it has not started or is over.
  Active Find(uint64_t site, uint64_t step) const;

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

  Transport* const transport_;
  const int rank_, size_;
  const Options options_;
  const Routes* const routes_;
  Sender* const sender_;
  GpuLinks* const links_;
  GatherExchanges* const gathering_;
  Statistics* const statistics_;
  const std::vector<char>* const has_left_;
  const Allocate allocate_;
  const std::function<void(const std::string&)> fail_;

  struct Site {
    std::string name;
    uint64_t steps = 0;  // how often it was submitted
    int priority = 0;    // of the last time
  };
  std::unordered_map<uint64_t, Site> sites_;  // by hash
  std::map<SiteStep, Active> active_;         // of most sites, one step at a time
  std::vector<Active> lost_;                  // those that a failure has ended
  // A broadcast can be over for its root and server before this rank has asked for it.
  std::map<SiteStep, std::vector<std::shared_ptr<EarlyResult>>> early_;
  std::map<SiteStep, FrameHeader> to_serve_;  // of a dedicated server: a part of each exchange that it is to serve next
  BufferPool results_;                        // the memory of those that it serves
  Server server_;
  bool has_failed_ = false;
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_DENSE_EXCHANGES_H_
