// The communicator as C functions: turns pointers and numbers into C++ values, exceptions into texts, and callbacks
// into handles that a caller waits for.
//
// Tests: tests/communicator/test_communicator.py.

#include "c_api.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "columns.h"
#include "loopback_transport.h"
#include "socket_transport.h"
#include "text.h"
#include "turns.h"

namespace poseidon {
namespace {

std::atomic<Communicator*> process_communicator{nullptr};

std::mutex process_ranks_mutex;
auto& process_ranks = *new std::vector<Communicator*>;  // kernels may run until the process ends

void WriteText(const std::string& text, char* out) {
  std::strncpy(out, text.c_str(), kPoseidonTextBytes - 1);
  out[kPoseidonTextBytes - 1] = '\0';
}

// Writes a text when it fits, and returns the bytes that it needs, the final zero included.
size_t WriteWhole(const std::string& text, char* out, size_t capacity) {
  if (text.size() < capacity) std::memcpy(out, text.c_str(), text.size() + 1);
  return text.size() + 1;
}

Options ToOptions(const PoseidonOptions& options) {
  Options result;
  result.kv_pair_bytes = options.kv_pair_bytes;
  result.timeout_s = options.timeout_s;
  result.heartbeat_timeout_s = options.heartbeat_timeout_s;
  for (int i = 0; i < options.num_servers; ++i) result.servers.push_back(options.servers[i]);
  result.ranks_per_node = options.ranks_per_node;
  result.staging_bytes = options.staging_bytes;
  result.dedicated_servers = options.dedicated_servers;
  return result;
}

// Loads the MPI transport and opens it on the calling thread.
std::unique_ptr<Transport> OpenMpi(const std::string& library) {
  // RTLD_LOCAL: a second MPI in this process (Horovod's) must not find our symbols, nor we its.
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) throw std::runtime_error(std::string("The MPI transport cannot be loaded: ") + dlerror());
  auto open = reinterpret_cast<Transport* (*)(char*, size_t)>(dlsym(handle, "poseidon_open_mpi_transport"));
  if (!open) throw std::runtime_error(library + " is not tf_poseidon's MPI transport.");
  char error[1024] = "";
  std::unique_ptr<Transport> transport(open(error, sizeof(error)));
  if (!transport) throw std::runtime_error(std::string("MPI cannot be started: ") + error);
  return transport;
}

// One exchange that a caller waits for.
struct Waiter {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_done = false;
  std::string error;
  GatheredFactors gathered;
  double seconds = 0;  // of a ping

  void Finish(const std::string& reason, GatheredFactors factors, double took = 0) {
    std::lock_guard<std::mutex> lock(mutex);
    is_done = true;
    error = reason;
    gathered = std::move(factors);
    seconds = took;
    changed.notify_all();
  }
};

// Shared: a caller that gives up waiting leaves its half to the progress thread.
using Handle = std::shared_ptr<Waiter>;

Waiter& Of(void* handle) { return **static_cast<Handle*>(handle); }

}  // namespace

Communicator* ProcessCommunicator() { return process_communicator.load(); }

Communicator* ProcessRank(int64_t rank) {
  std::lock_guard<std::mutex> lock(process_ranks_mutex);
  return rank >= 0 && rank < static_cast<int64_t>(process_ranks.size()) ? process_ranks[rank] : nullptr;
}

}  // namespace poseidon

using poseidon::Communicator;
using poseidon::Waiter;

Communicator* poseidon_join_mpi(const char* transport_library, const PoseidonOptions* options, char* error) {
  try {
    return new Communicator([library = std::string(transport_library)] { return poseidon::OpenMpi(library); },
                            poseidon::ToOptions(*options), options->startup_timeout_s);
  } catch (const std::exception& e) {
    poseidon::WriteText(e.what(), error);
    return nullptr;
  }
}

Communicator* poseidon_join_sockets(int32_t rank, int32_t size, const int32_t* sockets, const PoseidonOptions* options,
                                    char* error) {
  try {
    return new Communicator(
        [rank, sockets = std::vector<int>(sockets, sockets + size)] {
          return poseidon::MakeSocketTransport(rank, sockets);
        },
        poseidon::ToOptions(*options), options->startup_timeout_s);
  } catch (const std::exception& e) {
    poseidon::WriteText(e.what(), error);
    return nullptr;
  }
}

bool poseidon_join_loopback(int32_t size, const int32_t* nodes, const PoseidonOptions* options, Communicator** ranks,
                            char* error) {
  try {
    auto transports =
        poseidon::MakeLoopbackTransports(size, nodes ? std::vector<int>(nodes, nodes + size) : std::vector<int>());
    for (int rank = 0; rank < size; ++rank) {
      auto transport = std::make_shared<std::unique_ptr<poseidon::Transport>>(std::move(transports[rank]));
      ranks[rank] = new Communicator([transport] { return std::move(*transport); }, poseidon::ToOptions(options[rank]),
                                     options[rank].startup_timeout_s);
    }
    return true;
  } catch (const std::exception& e) {
    poseidon::WriteText(e.what(), error);
    return false;
  }
}

void poseidon_set_process_communicator(Communicator* communicator) { poseidon::process_communicator = communicator; }

void poseidon_set_process_ranks(int32_t size, Communicator* const* ranks) {
  std::lock_guard<std::mutex> lock(poseidon::process_ranks_mutex);
  poseidon::process_ranks.assign(ranks, ranks + size);
}

int32_t poseidon_rank(const Communicator* communicator) { return communicator->rank(); }
int32_t poseidon_size(const Communicator* communicator) { return communicator->size(); }
void poseidon_nodes(const Communicator* communicator, int32_t* nodes) {
  for (int node : communicator->nodes()) *nodes++ = node;
}
bool poseidon_hosts(const Communicator* communicator, int32_t* hosts) {
  for (int host : communicator->hosts()) *hosts++ = host;
  return !communicator->hosts().empty();
}

void* poseidon_submit(Communicator* communicator, const char* site, int32_t input_dtype, int32_t dtype, int64_t count,
                      const void* input, void* output, bool contributes, int32_t root, bool is_gradient) {
  auto* handle = new poseidon::Handle(std::make_shared<Waiter>());
  poseidon::Exchange exchange;
  exchange.site = site;
  exchange.dtype = static_cast<poseidon::DataType>(dtype);
  if (input_dtype != dtype) exchange.input_dtype = static_cast<poseidon::DataType>(input_dtype);
  exchange.count = count;
  exchange.input = input;
  exchange.output = output;
  exchange.contributes = contributes;
  exchange.root = root;
  exchange.is_gradient = is_gradient;
  if (is_gradient) exchange.row = "ps";
  exchange.is_of_step = false;
  communicator->Submit(std::move(exchange),
                       [waiter = *handle](const std::string& error) { waiter->Finish(error, {}); });
  return handle;
}

void* poseidon_submit_factors(Communicator* communicator, const char* site, const char* form, int32_t num_parts,
                              const void* const* data, const int64_t* rows, const int64_t* row_bytes,
                              const int64_t* element_bytes) {
  auto* handle = new poseidon::Handle(std::make_shared<Waiter>());
  poseidon::Factors factors;
  factors.site = site;
  factors.form = form;
  factors.is_of_step = false;
  for (int i = 0; i < num_parts; ++i) {
    const size_t bytes = rows[i] * row_bytes[i], element = element_bytes[i];
    factors.parts.push_back({data[i], bytes, static_cast<size_t>(row_bytes[i]), element,
                             poseidon::LeaveOutZeros(data[i], bytes, element, 0)});
  }
  communicator->SubmitFactors(std::move(factors),
                              [waiter = *handle](const std::string& error, poseidon::GatheredFactors gathered) {
                                waiter->Finish(error, std::move(gathered));
                              });
  return handle;
}

void* poseidon_submit_ping(Communicator* communicator, int32_t peer, int64_t bytes) {
  auto* handle = new poseidon::Handle(std::make_shared<Waiter>());
  communicator->SubmitPing(
      peer, static_cast<size_t>(bytes),
      [waiter = *handle](const std::string& error, double seconds) { waiter->Finish(error, {}, seconds); });
  return handle;
}

double poseidon_ping_seconds(void* handle) { return poseidon::Of(handle).seconds; }

void* poseidon_ask(Communicator* communicator, int32_t peer, const char* text, void* answer, int64_t bytes) {
  auto* handle = new poseidon::Handle(std::make_shared<Waiter>());
  communicator->Ask(peer, text, answer, static_cast<size_t>(bytes),
                    [waiter = *handle](const std::string& error) { waiter->Finish(error, {}); });
  return handle;
}

int32_t poseidon_next_question(Communicator* communicator, double seconds, int32_t* peer, int64_t* number, char* text) {
  bool is_over = false;
  const auto question = communicator->NextQuestion(seconds, &is_over);
  if (!question) return is_over ? -1 : 0;
  *peer = question->peer;
  *number = static_cast<int64_t>(question->number);
  poseidon::WriteText(question->text, text);
  return 1;
}

void poseidon_reply(Communicator* communicator, int32_t peer, int64_t number, const void* bytes, int64_t num_bytes,
                    bool is_refusal) {
  const auto* begin = static_cast<const char*>(bytes);
  communicator->Reply(peer, static_cast<uint64_t>(number), std::string(begin, begin + num_bytes), is_refusal);
}

int64_t poseidon_shards(const Communicator* communicator, const char* layout, int32_t owner, int32_t divided,
                        int64_t columns, int64_t elements, int64_t capacity, int64_t* lines, int32_t* ranks,
                        int64_t* ends) {
  int64_t size = 0;
  auto add = [&](int rank, int64_t end) {
    if (size < capacity) {
      ranks[size] = rank;
      ends[size] = end;
    }
    ++size;
  };
  if (divided >= 0) {
    const poseidon::MatrixParts parts =
        poseidon::DivideMatrix(elements / columns, columns, divided, communicator->size(), communicator->servers());
    *lines = parts.lines;
    for (int server : communicator->servers()) {  // in the order of their ranges
      if (parts.ranges[server].size() > 0) add(server, parts.ranges[server].end);
    }
    return size;
  }
  constexpr size_t kElementBytes = 4;  // of any type, shards have as many elements
  const poseidon::ShardLayout of_variable = {static_cast<uint32_t>(poseidon::Hash(layout)), owner};
  const poseidon::KvPairs pairs = communicator->Shards(of_variable, static_cast<size_t>(elements), kElementBytes);
  *lines = 1;
  for (size_t i = 0; i < pairs.size(); ++i) {
    add(pairs[i].server, static_cast<int64_t>((pairs[i].offset + pairs[i].bytes) / kElementBytes));
  }
  return size;
}

int32_t poseidon_wait(void* handle, double seconds, char* error) {
  Waiter& waiter = poseidon::Of(handle);
  std::unique_lock<std::mutex> lock(waiter.mutex);
  if (!waiter.changed.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return waiter.is_done; })) {
    return 0;
  }
  poseidon::WriteText(waiter.error, error);
  return waiter.error.empty() ? 1 : -1;
}

bool poseidon_has_factors(void* handle) { return poseidon::Of(handle).gathered.is_complete; }

int64_t poseidon_factor_bytes(void* handle, int32_t part) {
  int64_t bytes = 0;
  for (const auto& rows : poseidon::Of(handle).gathered.parts[part]) bytes += rows.bytes;
  return bytes;
}

void poseidon_copy_factor(void* handle, int32_t part, void* out) {
  char* to = static_cast<char*>(out);
  for (const auto& rows : poseidon::Of(handle).gathered.parts[part]) {
    rows.CopyTo(to);
    to += rows.bytes;
  }
}

void* poseidon_leave_out_zeros(const void* matrix, int64_t bytes, int64_t element_bytes) {
  auto left = poseidon::LeaveOutZeros(matrix, static_cast<size_t>(bytes), static_cast<size_t>(element_bytes), 0);
  return left ? new poseidon::WithoutZeros(std::move(left)) : nullptr;
}

void poseidon_put_back_zeros(const void* without_zeros, int64_t element_bytes, void* matrix) {
  const auto& left = *static_cast<const poseidon::WithoutZeros*>(without_zeros);
  poseidon::PutBackZeros(left.data.get(), static_cast<size_t>(element_bytes), matrix);
}

int64_t poseidon_bytes_without_zeros(const void* without_zeros) {
  return static_cast<int64_t>(static_cast<const poseidon::WithoutZeros*>(without_zeros)->bytes);
}
void poseidon_release_without_zeros(void* without_zeros) { delete static_cast<poseidon::WithoutZeros*>(without_zeros); }

void poseidon_release(void* handle) { delete static_cast<poseidon::Handle*>(handle); }

void poseidon_abort(Communicator* communicator, const char* reason, double seconds) {
  communicator->Abort(reason, seconds);
}

bool poseidon_serve(Communicator* communicator, double seconds) { return communicator->Serve(seconds); }
bool poseidon_goodbye(Communicator* communicator, char* error) {
  const std::string reason = communicator->Goodbye();
  poseidon::WriteText(reason, error);
  return reason.empty();
}

bool poseidon_failure(const Communicator* communicator, char* error) {
  const std::string reason = communicator->failure();
  poseidon::WriteText(reason, error);
  return !reason.empty();
}

size_t poseidon_statistics(const Communicator* communicator, bool has_sites, char* text, size_t capacity) {
  return poseidon::WriteWhole(communicator->StatisticsJson(has_sites), text, capacity);
}

void poseidon_set_row_shares(Communicator* communicator, const int64_t* shares) {
  communicator->row_shares().Set(std::vector<int64_t>(shares, shares + communicator->size()));
}

void poseidon_record_events(Communicator* communicator, int64_t capacity) {
  communicator->events().Record(static_cast<size_t>(capacity));
}

size_t poseidon_events(Communicator* communicator, char* text, size_t capacity) {
  return poseidon::WriteWhole(communicator->events().Json(), text, capacity);
}

void poseidon_leave(Communicator* communicator) {
  if (poseidon::process_communicator == communicator) poseidon::SetProcessTurns(nullptr);  // which are between ranks
  if (poseidon::process_communicator == communicator) poseidon::process_communicator = nullptr;
  {
    std::lock_guard<std::mutex> lock(poseidon::process_ranks_mutex);
    for (Communicator*& rank : poseidon::process_ranks) {
      if (rank == communicator) rank = nullptr;
    }
  }
  delete communicator;
}
