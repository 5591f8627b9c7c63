// Ranks that MPI has started.

#ifndef POSEIDON_COMMUNICATOR_MPI_TRANSPORT_H_
#define POSEIDON_COMMUNICATOR_MPI_TRANSPORT_H_

#include <cstddef>
#include <memory>

#include "transport.h"

namespace poseidon {

// A bulk transfer travels in pieces, of which two are under way at a time: with less than 256 KiB a connection over TCP
// runs dry between them, and what is urgent waits for what is under way to all ranks.
inline constexpr size_t kMpiPieceBytes = size_t{128} << 10;

// The largest piece of very large transfers. Less than the int with which MPI counts bytes: whoever waits for a large
// transfer hears of its sender with each piece, and at 0.1 Gbit/s this one takes 1.3 s.
inline constexpr size_t kMostMpiPieceBytes = size_t{16} << 20;

// Starts MPI on the calling thread unless it runs already, and returns this rank's transport. Bulk transfers travel as
// messages of `piece_bytes`, or larger ones where they would be too many; it must be the same on all ranks. Throws
// TransportError.
std::unique_ptr<Transport> MakeMpiTransport(size_t piece_bytes);

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_MPI_TRANSPORT_H_
