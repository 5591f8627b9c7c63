// Ranks that MPI has started.

#ifndef POSEIDON_COMMUNICATOR_MPI_TRANSPORT_H_
#define POSEIDON_COMMUNICATOR_MPI_TRANSPORT_H_

#include <cstddef>
#include <memory>

#include "transport.h"

namespace poseidon {

// MPI counts the bytes of a message with an int.
inline constexpr size_t kMpiPieceBytes = size_t{1} << 30;

// Starts MPI on the calling thread unless it runs already, and returns this rank's transport. Bulk transfers travel as
// messages of at most `piece_bytes`, which must be the same on all ranks. Throws TransportError.
std::unique_ptr<Transport> MakeMpiTransport(size_t piece_bytes);

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_MPI_TRANSPORT_H_
