// Exchanges tensors between the ranks of a job: the parameter server of Poseidon.
//
// H. Zhang et al., "Poseidon: An Efficient Communication Architecture for Distributed Deep
// Learning on GPU Clusters", USENIX ATC 2017, section 4: every tensor is cut into KV pairs that are
// spread evenly over the servers; a server counts the contributions to a KV pair and sends the
// sum to all workers when the last one is in. Here the servers are ranks themselves, and the sum
// is taken in rank order, so that all ranks and all runs get the same bits.

#ifndef POSEIDON_COMMUNICATOR_COMMUNICATOR_H_
#define POSEIDON_COMMUNICATOR_COMMUNICATOR_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "sum.h"
#include "transport.h"

namespace poseidon {

struct Options {
  int64_t kv_pair_bytes = int64_t{2} << 20;  // the largest KV pair
  std::vector<int> servers;                  // ranks that own KV pairs; empty: all ranks
  double timeout_s = 600;                    // longest wait for another rank
};

// One tensor to be exchanged. Every rank submits the same site with the same form.
struct Exchange {
  std::string site;       // variable path and occurrence: the same on all ranks
  DataType dtype = DataType::kFloat32;
  int64_t count = 0;      // elements
  const void* input = nullptr;
  void* output = nullptr;   // may equal `input`
  bool contributes = true;  // false: this rank adds nothing to the sum
  int root = -1;            // -1: sum over ranks; otherwise every rank receives root's input
};

// One rank's end of the job. All methods may be called from any thread.
class Communicator {
 public:
  using TransportFactory = std::function<std::unique_ptr<Transport>()>;
  // Called on the progress thread with an empty text on success, else with the reason. Must not
  // block.
  using Done = std::function<void(const std::string& error)>;

  // Starts the progress thread, which opens the transport and is the only one to call it. Throws
  // std::runtime_error with a sentence for the user when the transport cannot be opened or is not
  // open after `startup_timeout_s` seconds.
  Communicator(TransportFactory open, Options options, double startup_timeout_s);
  ~Communicator();  // leaves without asking the other ranks, unless Goodbye has succeeded

  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const;
  int size() const;

  // Starts one exchange and returns at once. Input and output must stay valid until `done`; after
  // an error they must stay valid for ever, since the network may still use them.
  void Submit(Exchange exchange, Done done);

  // Ends every exchange of all ranks with an error that holds `reason`, and returns when the
  // other ranks have been told or `seconds` have passed.
  void Abort(const std::string& reason, double seconds);

  // Says that this rank has reached its end and waits for all others to say so. Returns an empty
  // text when all have, else why they have not. Nothing may be submitted afterwards.
  std::string Goodbye();

  // Why the job was ended, by this rank or another; empty while all is well.
  std::string failure() const;

  // Counters as a JSON object: payload and header bytes sent and received by this rank, in total
  // and for every site, with the seconds from Submit to done.
  std::string StatisticsJson() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_COMMUNICATOR_H_
