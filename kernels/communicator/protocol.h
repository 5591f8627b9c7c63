// The protocol of one rank, without threads: starts exchanges, answers frames, notices failures.

#ifndef POSEIDON_COMMUNICATOR_PROTOCOL_H_
#define POSEIDON_COMMUNICATOR_PROTOCOL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dense_exchanges.h"
#include "exchange.h"
#include "frame_checks.h"
#include "gather_exchanges.h"
#include "gpu_links.h"
#include "heartbeats.h"
#include "options.h"
#include "pings.h"
#include "questions.h"
#include "routes.h"
#include "sender.h"
#include "staging.h"
#include "statistics.h"
#include "transport.h"

namespace poseidon {

// One thread makes all calls. Nothing blocks, and nothing is sent before Flush or Poll.
class Protocol {
 public:
  // `nodes` are those of NodesOf. `on_failure` is told the reason of the first failure, before any exchange is;
  // `on_question` what other ranks ask, see Questions.
  Protocol(std::unique_ptr<Transport> transport, Options options, const std::vector<int>& nodes, Statistics* statistics,
           std::function<void(const std::string& reason)> on_failure, std::function<void(Question)> on_question);

  // Starts an exchange that was submitted at `submitted`.
  void Start(Exchange exchange, Done done, Clock::time_point submitted);
  void StartFactors(Factors factors, FactorsDone done, Clock::time_point submitted);
  void StartPing(int peer, size_t bytes, PingDone done);
  void Ask(int peer, const std::string& text, void* answer, size_t bytes, Done done);
  void Reply(int peer, uint64_t number, std::string answer, bool is_refusal);

  // Handles what has arrived or has been copied; returns whether anything had.
  bool Poll();

  // Sends the frames that are ready, those for one peer together.
  void Flush();

  // Fails when an exchange has waited too long, or a rank was silent for too long; tells others that this one is alive.
  // To be called several times a second.
  void CheckDeadlines();

  // Tells the other ranks that this one has reached its end, once it has passed on all that it has to.
  void SayGoodbye();

  // Ends every exchange, and this rank's part in the job, with an error. With `tell_peers` the
  // other ranks end too.
  void Fail(const std::string& reason, bool tell_peers);

  // Leaves the job; waits for the others only if all have said goodbye.
  void Close();

  bool has_failed() const { return !failure_.empty(); }
  // A dedicated server always waits: it has nothing else to do, and others wait for its answers.
  bool is_waiting() const {
    return routes_.only_serves() || dense_.is_waiting() || gathering_.is_waiting() || pings_.is_waiting() ||
           questions_.is_waiting() || is_waiting_for_device();
  }
  // Whether GPUs, this rank's or those of others, may be copying from and to its memory, which must then stay.
  bool is_being_copied() const {
    return staging_ && (staging_->is_copying() || links_.is_copying() || links_.is_holding());
  }
  bool is_waiting_for_device() const { return staging_ && (staging_->is_waiting() || links_.is_waiting()); }
  std::vector<int> MissingGoodbyes() const;  // ranks that have not said goodbye
  bool HaveWorkersLeft() const;              // whether all workers have said goodbye
  bool is_flushed() const {
    return sender_.IsEmpty() && transport_->Flushed() && !gathering_.is_passing_on() && !is_waiting_for_device();
  }

 private:
  void StartReady(Exchange exchange, Done done, Clock::time_point submitted, Staging* staging);
  void StartRanges(const Exchange& whole, Done done, Clock::time_point submitted, Staging* staging);
  // `site` is the hash of the name that ranks share.
  void StartNamed(uint64_t site, Exchange exchange, Done done, Clock::time_point submitted, Staging* staging);
  void StartReadyFactors(Factors factors, FactorsDone done, Clock::time_point submitted, Staging* staging);
  Staging* StagingOf(Device* device);
  std::shared_ptr<char[]> TakeMemory(size_t bytes);
  void OnFrame(int peer, const FrameHeader& header, const char* payload);
  void SendGoodbye();
  void FailIf(const std::string& disagreement);
  void FailIfLeftBehind();
  void CheckHeartbeats(Clock::time_point now);
  void FailOverdue(const std::string& what, const std::vector<int>& ranks);

  const std::unique_ptr<Transport> transport_;
  const int rank_, size_;
  const Options options_;  // those of WithServers
  const Routes routes_;
  const uint64_t layout_;
  Statistics* const statistics_;
  const std::function<void(const std::string&)> on_failure_;
  std::vector<char> has_left_;  // by rank: has said goodbye
  bool wants_goodbye_ = false;
  std::string failure_;

  const FrameChecks checks_;
  Heartbeats heartbeats_;
  std::unique_ptr<Staging> staging_;  // null before the first tensor on a GPU
  Sender sender_;
  GpuLinks links_;  // nothing before the first tensor on a GPU
  Pings pings_;
  Questions questions_;
  GatherExchanges gathering_;
  DenseExchanges dense_;
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_PROTOCOL_H_
