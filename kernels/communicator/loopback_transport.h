// Ranks as threads of one process: the transport of the communicator's tests.

#ifndef POSEIDON_COMMUNICATOR_LOOPBACK_TRANSPORT_H_
#define POSEIDON_COMMUNICATOR_LOOPBACK_TRANSPORT_H_

#include <memory>
#include <vector>

#include "transport.h"

namespace poseidon {

// Returns the transports of a job of `size` ranks in this process, in rank order. `nodes` is what their nodes()
// returns.
std::vector<std::unique_ptr<Transport>> MakeLoopbackTransports(int size, const std::vector<int>& nodes);

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_LOOPBACK_TRANSPORT_H_
