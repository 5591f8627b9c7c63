// Ranks that are connected by sockets: for engines that have no messages between two ranks.

#ifndef POSEIDON_COMMUNICATOR_SOCKET_TRANSPORT_H_
#define POSEIDON_COMMUNICATOR_SOCKET_TRANSPORT_H_

#include <memory>
#include <vector>

#include "transport.h"

namespace poseidon {

// Returns the transport of a rank. `sockets` holds a connected stream socket for each rank, in order;
// that of the rank itself does not count. The transport owns them from here on.
std::unique_ptr<Transport> MakeSocketTransport(int rank, const std::vector<int>& sockets);

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_SOCKET_TRANSPORT_H_
