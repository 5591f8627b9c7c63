// Ranks that MPI has started.

#ifndef POSEIDON_COMMUNICATOR_MPI_TRANSPORT_H_
#define POSEIDON_COMMUNICATOR_MPI_TRANSPORT_H_

#include <cstddef>
#include <memory>

#include "transport.h"

namespace poseidon {

// A bulk transfer to another node travels in pieces, of which two are under way at a time: enough that a connection
// over TCP does not run dry, and little since what is urgent waits for it. Since each piece takes some 10 us of a
// processor, it should take the network much longer: pieces have this size, or what links take kPieceSeconds for, which
// is more from 2.6 Gbit/s on. Of large transfers they may be four times as large.
inline constexpr size_t kMpiPieceBytes = size_t{64} << 10;
inline constexpr double kPieceSeconds = 200e-6;

// The largest piece of very large transfers. Less than the int with which MPI counts bytes: whoever waits for a large
// transfer hears of its sender with each piece, and at 0.1 Gbit/s this one takes 1.3 s.
inline constexpr size_t kMostMpiPieceBytes = size_t{16} << 20;

// Starts MPI on the calling thread unless it runs already, and returns this rank's transport. `piece_bytes`, the
// least size of pieces, must be the same on all ranks. `shares_memory` is false where ranks of one node should exchange
// pieces as others do. Throws TransportError.
std::unique_ptr<Transport> MakeMpiTransport(size_t piece_bytes, bool shares_memory);

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_MPI_TRANSPORT_H_
