// Exchanges tensors between the ranks of a job: the parameter server of Poseidon.
//
// H. Zhang et al., "Poseidon: An Efficient Communication Architecture for Distributed Deep
// Learning on GPU Clusters", USENIX ATC 2017, section 4: every tensor is cut into KV pairs that are
// spread evenly over the servers; a server counts the contributions to a KV pair and sends the
// sum to all workers when the last one is in. Here the servers are ranks themselves, and the sum
// is taken in order, of the ranks of a node and then of the nodes, so that all ranks and all runs get the
// same bits.
//
// Files, in the order in which data passes through them: communicator (the thread), protocol (hands over what is
// submitted and what arrives), dense_exchanges (the worker's side), kv_pairs (cutting), routes (from node to node),
// server (collecting), sum, gather_exchanges (sufficient factor broadcasting), sender, packets, frame and
// frame_checks (what is sent), transport (what sends it). Beside them: heartbeats, pings (measuring links), and
// questions that programs answer.

#ifndef POSEIDON_COMMUNICATOR_COMMUNICATOR_H_
#define POSEIDON_COMMUNICATOR_COMMUNICATOR_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "event_log.h"
#include "exchange.h"
#include "gather_exchanges.h"
#include "kv_pairs.h"
#include "pings.h"
#include "protocol.h"
#include "questions.h"
#include "row_shares.h"
#include "transport.h"

namespace poseidon {

// One rank's end of the job. All methods may be called from any thread.
class Communicator {
 public:
  using TransportFactory = std::function<std::unique_ptr<Transport>()>;

  // Starts the progress thread, which opens the transport and is the only one to call it. Throws
  // std::runtime_error with a sentence for the user when the transport cannot be opened, or is not
  // open after `startup_timeout_s` seconds.
  Communicator(TransportFactory open, Options options, double startup_timeout_s);
  ~Communicator();  // leaves without waiting for the other ranks

  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const;
  int size() const;                         // the number of workers: dedicated servers have the ranks from there on
  const std::vector<int>& nodes() const;    // by worker, the same for those that combine, all or some of a node
  const std::vector<int>& hosts() const;    // by worker, the same for those that share memory; empty if unknown
  const std::vector<int>& servers() const;  // the workers that own shards, and columns of factors
  bool is_on_one_node() const;

  // The KV pairs of a tensor of `count` elements, of which those of this rank are its shard.
  KvPairs Shards(const ShardLayout& layout, size_t count, size_t element_bytes) const;

  // Starts one exchange and returns at once. Input and output must stay valid until `done`; after
  // an error they must stay valid for ever, since the network may still use them.
  void Submit(Exchange exchange, Done done);
  void SubmitFactors(Factors factors, FactorsDone done);

  // Measures the way to `peer`, another rank, with `bytes` bytes, at most kMaxPingBytes.
  void SubmitPing(int peer, size_t bytes, PingDone done);

  // See Questions::Ask. `done` is called on the progress thread.
  void Ask(int peer, const std::string& text, void* answer, size_t bytes, Done done);

  // What another rank asks; none, if nothing is asked for `seconds`, or nothing will be any more: then `is_over`.
  std::optional<Question> NextQuestion(double seconds, bool* is_over);
  void Reply(int peer, uint64_t number, std::string answer, bool is_refusal);

  // Ends every exchange of all ranks with an error that holds `reason`, and returns when the
  // other ranks have been told or `seconds` have passed.
  void Abort(const std::string& reason, double seconds);

  // On a dedicated server: returns whether it has nothing more to serve, since all workers have reached their end or
  // the job has failed; waits at most `seconds` for that.
  bool Serve(double seconds);

  // Says that this rank has reached its end and waits for all others to say so. Returns an empty
  // text when all have, else why they have not. Nothing may be submitted afterwards.
  std::string Goodbye();

  // Why the job was ended, by this rank or another; empty while all is well.
  std::string failure() const;

  // What this rank has exchanged, see Statistics::Json.
  std::string StatisticsJson(bool has_sites = true) const;

  // See Statistics::WaitedForBatch.
  void WaitedForBatch(Clock::time_point begin, Clock::time_point end);
  void Compared(Clock::time_point begin, Clock::time_point end);

  // What this rank does when, while it is recorded.
  EventLog& events();

  // How ranks share the rows of global batches.
  RowShares& row_shares();

 private:
  class Impl;
  // Shared with the progress thread: one that is stuck in opening the transport outlives us.
  std::shared_ptr<Impl> impl_;
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_COMMUNICATOR_H_
