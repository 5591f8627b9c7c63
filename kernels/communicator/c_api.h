// The communicator's C interface: what Python reaches through ctypes.
//
// Texts are UTF-8. A function that can fail takes `error`, a buffer of kPoseidonTextBytes, and writes a sentence for
// the user to it.

#ifndef POSEIDON_COMMUNICATOR_C_API_H_
#define POSEIDON_COMMUNICATOR_C_API_H_

#include <cstddef>
#include <cstdint>

#include "communicator.h"

namespace poseidon {

// The communicator that this process's ops use: null before Python has started one.
Communicator* ProcessCommunicator();

// The communicator of one rank that poseidon_set_process_ranks has named; null if there is no such rank.
Communicator* ProcessRank(int64_t rank);

}  // namespace poseidon

// The library hides all other symbols, so that it cannot clash with another one in the process.
#pragma GCC visibility push(default)
extern "C" {

constexpr size_t kPoseidonTextBytes = 32768;

struct PoseidonOptions {
  int64_t kv_pair_bytes;
  double timeout_s;
  double startup_timeout_s;
  double heartbeat_timeout_s;
  const int32_t* servers;  // may be null when there are none
  int32_t num_servers;     // 0: all ranks
  int32_t ranks_per_node;  // see poseidon::Options
  int64_t staging_bytes;   // 0: a default
  int32_t dedicated_servers;
};

// Joins the job over MPI; `transport_library` is the path of the MPI transport. Null on failure.
poseidon::Communicator* poseidon_join_mpi(const char* transport_library, const PoseidonOptions* options, char* error);

// Joins a job whose ranks are connected already: `sockets` holds a connected stream socket for each of `size` ranks,
// which the communicator owns from now on; the entry of `rank` itself is ignored.
poseidon::Communicator* poseidon_join_sockets(int32_t rank, int32_t size, const int32_t* sockets,
                                              const PoseidonOptions* options, char* error);

// Makes a job of `size` ranks in this process, with options for each rank, and writes its
// communicators to `ranks`. `nodes` has a number for each rank, the same for ranks that share a node; null if nodes
// are unknown.
bool poseidon_join_loopback(int32_t size, const int32_t* nodes, const PoseidonOptions* options,
                            poseidon::Communicator** ranks, char* error);

// Lets this process's ops use `communicator`, or none when it is null.
void poseidon_set_process_communicator(poseidon::Communicator* communicator);

// Lets this process's ops whose nodes name their rank (see CommunicatorOf) use the communicators of `size` ranks,
// in rank order; none when it is 0.
void poseidon_set_process_ranks(int32_t size, poseidon::Communicator* const* ranks);

int32_t poseidon_rank(const poseidon::Communicator* communicator);
int32_t poseidon_size(const poseidon::Communicator* communicator);  // workers; other ranks are dedicated servers

// Writes a number for each worker, the same for those that combine.
void poseidon_nodes(const poseidon::Communicator* communicator, int32_t* nodes);

// Writes a number for each worker, the same for those of one host; returns false if that is unknown.
bool poseidon_hosts(const poseidon::Communicator* communicator, int32_t* hosts);

// Starts an exchange, see poseidon::Exchange; input_dtype may be dtype. Returns a handle for poseidon_wait.
void* poseidon_submit(poseidon::Communicator* communicator, const char* site, int32_t input_dtype, int32_t dtype,
                      int64_t count, const void* input, void* output, bool contributes, int32_t root, bool is_gradient);

// Starts an exchange of factors, see poseidon::Factors: matrices of `rows[i]` rows of `row_bytes[i]`
// bytes, which travel without their zeros if that is shorter and `element_bytes[i]` is not 0. Returns a handle for
// poseidon_wait.
void* poseidon_submit_factors(poseidon::Communicator* communicator, const char* site, const char* form,
                              int32_t num_parts, const void* const* data, const int64_t* rows, const int64_t* row_bytes,
                              const int64_t* element_bytes);

// Sends `bytes` bytes to `peer`, another rank, and waits for its answer, see poseidon::Pings. Returns a handle for
// poseidon_wait; then poseidon_ping_seconds says how long it took.
void* poseidon_submit_ping(poseidon::Communicator* communicator, int32_t peer, int64_t bytes);
double poseidon_ping_seconds(void* handle);

// Asks `peer`, another rank, whose answer of `bytes` bytes comes to `answer`, see poseidon::Questions. Returns a handle
// for poseidon_wait.
void* poseidon_ask(poseidon::Communicator* communicator, int32_t peer, const char* text, void* answer, int64_t bytes);

// Waits at most `seconds` for what another rank asks. Returns 1 and writes who asks, the number of the question, and
// its text, to a buffer of kPoseidonTextBytes; 0 if nothing is asked, -1 if nothing will be any more.
int32_t poseidon_next_question(poseidon::Communicator* communicator, double seconds, int32_t* peer, int64_t* number,
                               char* text);

// Answers it with bytes, which are copied; or with the reason why there are none.
void poseidon_reply(poseidon::Communicator* communicator, int32_t peer, int64_t number, const void* bytes,
                    int64_t num_bytes, bool is_refusal);

// Which elements of a tensor make up the shards of ranks, see Communicator::Shards, or DivideMatrix if `divided` is not
// negative: the same of each of `lines` of elements, all of the same length. Writes the rank of each run of the
// elements of a line, and where it ends, for at most `capacity`; returns how many there are. `owner` is that of
// ShardLayout.
int64_t poseidon_shards(const poseidon::Communicator* communicator, const char* layout, int32_t owner, int32_t divided,
                        int64_t columns, int64_t elements, int64_t capacity, int64_t* lines, int32_t* ranks,
                        int64_t* ends);

// Waits at most `seconds` and returns 1 when the exchange is complete, -1 when it failed, 0 when
// it still runs.
int32_t poseidon_wait(void* handle, double seconds, char* error);

// For a complete exchange of factors: whether all ranks have exchanged theirs, and then the bytes of one part, which
// the second call writes in rank order.
bool poseidon_has_factors(void* handle);
int64_t poseidon_factor_bytes(void* handle, int32_t part);
void poseidon_copy_factor(void* handle, int32_t part, void* out);

// Leaves out the zeros of a matrix, see zeros.h, to measure how long that takes. Returns what is left, null if that is
// not shorter. The second function writes the matrix again.
void* poseidon_leave_out_zeros(const void* matrix, int64_t bytes, int64_t element_bytes);
void poseidon_put_back_zeros(const void* without_zeros, int64_t element_bytes, void* matrix);
int64_t poseidon_bytes_without_zeros(const void* without_zeros);
void poseidon_release_without_zeros(void* without_zeros);

// Releases a handle; its exchange continues if it is not complete.
void poseidon_release(void* handle);

void poseidon_abort(poseidon::Communicator* communicator, const char* reason, double seconds);
bool poseidon_serve(poseidon::Communicator* communicator, double seconds);  // see Communicator::Serve
bool poseidon_goodbye(poseidon::Communicator* communicator, char* error);
bool poseidon_failure(const poseidon::Communicator* communicator, char* error);

// Writes the JSON of Communicator::StatisticsJson when it fits into `capacity` bytes, and returns
// the bytes that it needs, the final zero included.
size_t poseidon_statistics(const poseidon::Communicator* communicator, bool has_sites, char* text, size_t capacity);

// Sets how ranks share rows, see RowShares::Set; there is a share for each rank.
void poseidon_set_row_shares(poseidon::Communicator* communicator, const int64_t* shares);

// See EventLog::Record and EventLog::Json; the second returns its bytes as poseidon_statistics does.
void poseidon_record_events(poseidon::Communicator* communicator, int64_t capacity);
size_t poseidon_events(poseidon::Communicator* communicator, char* text, size_t capacity);

void poseidon_leave(poseidon::Communicator* communicator);

}  // extern "C"
#pragma GCC visibility pop

#endif  // POSEIDON_COMMUNICATOR_C_API_H_
