// The transport over MPI point-to-point messages: a library of its own, so that the op library
// links no MPI and a job without MPI loads none.
//
// Every call is non-blocking except MPI_Init_thread, MPI_Finalize and, when all ranks have met, those
// that find out which share a node, and how fast links are. Packets are received into a ring of buffers posted in
// advance; bulk data goes from and into the caller's memory, in pieces.
//
// To each rank, a few pieces are under way at a time. MPI lets all messages that it is given share a connection: what
// is sent first would arrive late, together with all that follows it. Between two pieces, a more urgent transfer
// overtakes.
//
// MPI promises 15 bits of a tag, so every 32768th transfer to a rank has the same one. Of messages with equal tags
// between two ranks, MPI gives the first that is sent to the first that is asked for. Transfers of equal tags are sent
// in their order, with all pieces of one after the other; so it is right if they are asked for in that order as well
// (see TagOrder).
//
// Tests: tests/native/mpi_transport_test.cc.

#include "mpi_transport.h"

#define OMPI_SKIP_MPICXX 1  // the C interface alone, which all have
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstring>
#include <deque>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "frame.h"
#include "tag_order.h"

#ifdef POSEIDON_OWN_MPI
// tf_poseidon/job/engines/mpi.py looks for this in the file: then it does not load the MPI of the mpich wheel.
extern "C" __attribute__((used, visibility("default"))) const char poseidon_own_mpi[] =
    "poseidon has an MPI of its own";
#endif

namespace poseidon {
namespace {

// Receive buffers posted in advance. A sender that finds all of them full waits inside MPI's own
// flow control, so the number bounds memory, not correctness.
constexpr int kRingSize = 8;

// How many pieces a transfer should have, and has at most, as far as their sizes allow; how many are under way to a
// rank.
constexpr size_t kWantedPieces = 16, kMostPieces = 64, kPiecesAtOnce = 2;

// What nodes send each other to find out how fast their links are.
constexpr int kMeasuredBytes = 512 << 10, kMeasuredRounds = 4;

void Check(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw TransportError(std::string(call) + " failed: " + std::string(text, length));
}

// Tags that every MPI accepts: the standard only promises 0 to 32767.
constexpr uint32_t kTags = 1 << 15;

size_t CeilDiv(size_t a, size_t b) { return a / b + (a % b != 0); }

int WireTag(uint32_t tag) { return static_cast<int>(tag % kTags); }

class MpiTransport : public Transport {
 public:
  MpiTransport(size_t piece_bytes, bool shares_memory) : piece_bytes_(piece_bytes), shares_memory_(shares_memory) {
    if (piece_bytes_ < 1 || piece_bytes_ > INT_MAX) {
      throw TransportError("The MPI transport got pieces of " + std::to_string(piece_bytes_) +
                           " bytes, expected 1 to " + std::to_string(INT_MAX) +
                           ", which MPI can count; use kMpiPieceBytes.");
    }
    int is_initialized = 0, provided = 0;
    Check(MPI_Initialized(&is_initialized), "MPI_Initialized");
    if (is_initialized) {  // by another library, such as mpi4py, which calls it from its threads
      Check(MPI_Query_thread(&provided), "MPI_Query_thread");
      if (provided < MPI_THREAD_MULTIPLE) {
        throw TransportError(
            "MPI was started by another library without MPI_THREAD_MULTIPLE; let that library ask "
            "for it, or create the PoseidonStrategy first");
      }
    } else {
      owns_mpi_ = true;
      Check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided), "MPI_Init_thread");
    }
    // Two communicators of our own: nothing that the user sends can match our receives.
    packets_ = Duplicate(MPI_COMM_WORLD);
    bulk_ = Duplicate(MPI_COMM_WORLD);
    for (MPI_Comm comm : {packets_, bulk_}) {
      Check(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    }
    Check(MPI_Comm_rank(packets_, &rank_), "MPI_Comm_rank");
    Check(MPI_Comm_size(packets_, &size_), "MPI_Comm_size");
    FindNodes();
    MeasurePieces();
    ForgetSharedMemory();
    orders_.assign(size_, TagOrder<Receive>(kTags));
    outboxes_.resize(size_);
    for (int slot = 0; slot < kRingSize; ++slot) {
      ring_[slot].resize(kMaxPacketBytes);
      Post(slot);
    }
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::vector<int> nodes() const override { return nodes_; }

  void SendPacket(int peer, std::vector<char> packet) override {
    outgoing_.push_back({std::move(packet), MPI_REQUEST_NULL});
    auto& entry = outgoing_.back();
    Check(MPI_Isend(entry.packet.data(), static_cast<int>(entry.packet.size()), MPI_BYTE, peer, 0, packets_,
                    &entry.request),
          "MPI_Isend");
  }

  void SendBulk(int peer, uint32_t tag, const void* data, size_t bytes, int priority, Completion done) override {
    Outbox& outbox = outboxes_[peer];
    const uint64_t number = outbox.count++;
    auto transfer = Pieces(peer, /*is_sent=*/true, bytes, std::move(done));
    outbox.waiting.emplace(Outbox::Place{priority, number},
                           Send{static_cast<const char*>(data), tag, std::move(transfer)});
    outbox.priorities.emplace(number, priority);
    SendPieces(peer);
  }

  bool overtakes() const override { return true; }

  void ReceiveBulk(int peer, uint32_t tag, void* data, size_t bytes, Completion done) override {
    orders_[peer].Add(tag, {data, bytes, std::move(done)}, [&](uint32_t tag, Receive receive) {
      const auto transfer = Pieces(peer, /*is_sent=*/false, receive.bytes, std::move(receive.done));
      while (transfer->begun < transfer->pieces) {
        const size_t begin = transfer->begun * transfer->piece_bytes, length = Begin(transfer);
        Check(MPI_Irecv(static_cast<char*>(receive.data) + begin, static_cast<int>(length), MPI_BYTE, peer,
                        WireTag(tag), bulk_, &requests_.back()),
              "MPI_Irecv");
      }
    });
  }

  bool Poll(const PacketHandler& on_packet) override {
    bool active = false;
    // Only the oldest posted buffer is tested: MPI fills them in order, and packets must be
    // handled in order.
    for (;;) {
      int arrived = 0;
      MPI_Status status;
      Check(MPI_Test(&ring_requests_[head_], &arrived, &status), "MPI_Test");
      if (!arrived) break;
      Heard(status.MPI_SOURCE);
      int bytes = 0;
      Check(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
      on_packet(status.MPI_SOURCE, ring_[head_].data(), static_cast<size_t>(bytes));
      Post(head_);
      head_ = (head_ + 1) % kRingSize;
      active = true;
    }
    if (!requests_.empty()) active = TestBulk() || active;
    while (!outgoing_.empty()) {
      int sent = 0;
      Check(MPI_Test(&outgoing_.front().request, &sent, MPI_STATUS_IGNORE), "MPI_Test");
      if (!sent) break;
      outgoing_.pop_front();
    }
    return active;
  }

  bool Flushed() const override { return outgoing_.empty(); }

  void Close(bool agreed) override {
    if (!agreed) return;  // MPI_Finalize would wait for ranks that never come.
    for (MPI_Request& request : ring_requests_) {
      MPI_Cancel(&request);
      MPI_Wait(&request, MPI_STATUS_IGNORE);
    }
    MPI_Comm_free(&bulk_);
    MPI_Comm_free(&packets_);
    if (owns_mpi_) Check(MPI_Finalize(), "MPI_Finalize");
  }

 private:
  struct Outgoing {
    std::vector<char> packet;
    MPI_Request request;
  };
  struct Receive {
    void* data;
    size_t bytes;
    Completion done;
  };
  // A bulk transfer, some of whose pieces are under way.
  struct Transfer {
    int peer;
    bool is_sent;  // otherwise received
    size_t bytes, piece_bytes, pieces;
    size_t begun = 0, done_pieces = 0;
    Completion done;
  };
  struct Send {
    const char* data;
    uint32_t tag;
    std::shared_ptr<Transfer> transfer;
  };
  // What is sent to one rank: pieces that are under way, and transfers with others.
  struct Outbox {
    using Place = std::pair<int, uint64_t>;  // priority, and the number of the transfer

    // The transfer whose next piece leaves: the most urgent one, unless an older one has its tag on the wire.
    std::map<Place, Send>::iterator Next() {
      const auto [oldest, priority] = *priorities.begin();
      const auto first = waiting.begin();
      return first->first.second - oldest < kTags ? first : waiting.find({priority, oldest});
    }

    size_t bytes_under_way = 0, pieces_under_way = 0;
    uint64_t count = 0;  // of transfers
    std::map<Place, Send> waiting;
    std::map<uint64_t, int> priorities;  // of those that wait, by number
  };
  // What a request is about.
  struct Piece {
    size_t bytes;
    std::shared_ptr<Transfer> transfer;
  };

  // As MPI_Comm_dup, which would burn a core until the last rank has come.
  static MPI_Comm Duplicate(MPI_Comm comm) {
    MPI_Comm copy;
    MPI_Request request;
    Check(MPI_Comm_idup(comm, &copy, &request), "MPI_Comm_idup");
    for (int is_done = 0; !is_done;) {
      std::this_thread::sleep_for(std::chrono::microseconds(500));
      Check(MPI_Test(&request, &is_done, MPI_STATUS_IGNORE), "MPI_Test");
    }
    return copy;
  }

  // A node is what can share memory; its number is that of its first rank. These calls block, but all
  // ranks are here.
  void FindNodes() {
    MPI_Comm node;
    Check(MPI_Comm_split_type(packets_, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &node), "MPI_Comm_split_type");
    int first = rank_;
    Check(MPI_Bcast(&first, 1, MPI_INT, 0, node), "MPI_Bcast");
    Check(MPI_Comm_free(&node), "MPI_Comm_free");
    nodes_.resize(size_);
    Check(MPI_Allgather(&first, 1, MPI_INT, nodes_.data(), 1, MPI_INT, packets_), "MPI_Allgather");
  }

  // Lets pieces be larger where links are fast. These calls block, but all ranks are here.
  //
  // All nodes send to the next one at the same time, and the slowest counts, so that all ranks cut alike.
  void MeasurePieces() {
    const std::set<int> firsts(nodes_.begin(), nodes_.end());
    if (firsts.size() == 1) return;
    double seconds = 0;
    if (nodes_[rank_] == rank_) {
      const auto own = firsts.find(rank_);
      const int next = std::next(own) == firsts.end() ? *firsts.begin() : *std::next(own);
      const int before = own == firsts.begin() ? *firsts.rbegin() : *std::prev(own);
      std::vector<char> sent(kMeasuredBytes), received(kMeasuredBytes);
      for (int round = 0; round < kMeasuredRounds; ++round) {
        const double begin = MPI_Wtime();
        Check(MPI_Sendrecv(sent.data(), kMeasuredBytes, MPI_BYTE, next, 0, received.data(), kMeasuredBytes, MPI_BYTE,
                           before, 0, bulk_, MPI_STATUS_IGNORE),
              "MPI_Sendrecv");
        const double took = MPI_Wtime() - begin;
        seconds = round == 0 ? took : std::min(seconds, took);  // the first makes the connections
      }
    }
    Check(MPI_Allreduce(MPI_IN_PLACE, &seconds, 1, MPI_DOUBLE, MPI_MAX, bulk_), "MPI_Allreduce");
    const double bytes = std::min(kMeasuredBytes * kPieceSeconds / seconds, double{kMostMpiPieceBytes});
    piece_bytes_ = std::max(piece_bytes_, static_cast<size_t>(bytes));
  }

  // Removes the names of the memory that MPICH shares between the ranks of a node, which all of them have mapped by
  // now: a job that does not end well would leave it for ever, and /dev/shm is small in containers.
  static void ForgetSharedMemory() {
    const std::string prefix = "/dev/shm/mpich_shm_";
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
      const size_t begin = line.find(prefix);
      if (begin != std::string::npos) unlink(line.substr(begin).c_str());  // another rank may have been faster
    }
  }

  void Post(int slot) {
    Check(MPI_Irecv(ring_[slot].data(), static_cast<int>(kMaxPacketBytes), MPI_BYTE, MPI_ANY_SOURCE, 0, packets_,
                    &ring_requests_[slot]),
          "MPI_Irecv");
  }

  // Returns a transfer, cut into pieces; none of bytes is one too.
  std::shared_ptr<Transfer> Pieces(int peer, bool is_sent, size_t bytes, Completion done) const {
    const size_t piece_bytes = PieceBytes(peer, bytes), pieces = std::max<size_t>(1, CeilDiv(bytes, piece_bytes));
    return std::make_shared<Transfer>(Transfer{peer, is_sent, bytes, piece_bytes, pieces, 0, 0, std::move(done)});
  }

  // The size of the pieces of a transfer, the same on both ranks. Memory that ranks share has no queue to wait in.
  size_t PieceBytes(int peer, size_t bytes) const {
    if (nodes_[peer] == nodes_[rank_] && shares_memory_) return kMostMpiPieceBytes;
    const size_t wanted = std::clamp(CeilDiv(bytes, kWantedPieces), piece_bytes_, 4 * piece_bytes_);
    return std::min(std::max(wanted, CeilDiv(bytes, kMostPieces)), kMostMpiPieceBytes);
  }

  // Begins the next piece of a transfer, whose request is then the last one, and returns its bytes.
  size_t Begin(const std::shared_ptr<Transfer>& transfer) {
    const size_t begin = transfer->begun++ * transfer->piece_bytes;
    const size_t length = std::min(transfer->piece_bytes, transfer->bytes - begin);
    requests_.push_back(MPI_REQUEST_NULL);
    pieces_.push_back({length, transfer});
    return length;
  }

  // Sends pieces to a rank as long as few bytes are under way to it: enough that the connection does not run dry.
  void SendPieces(int peer) {
    Outbox& outbox = outboxes_[peer];
    while (!outbox.waiting.empty()) {
      const auto next = outbox.Next();
      const Send& send = next->second;
      const Transfer& transfer = *send.transfer;
      if (outbox.pieces_under_way >= kPiecesAtOnce && outbox.bytes_under_way >= kPiecesAtOnce * transfer.piece_bytes) {
        return;
      }
      const size_t begin = transfer.begun * transfer.piece_bytes, length = Begin(send.transfer);
      outbox.bytes_under_way += length;
      ++outbox.pieces_under_way;
      Check(MPI_Isend(send.data + begin, static_cast<int>(length), MPI_BYTE, peer, WireTag(send.tag), bulk_,
                      &requests_.back()),
            "MPI_Isend");
      if (transfer.begun < transfer.pieces) continue;
      outbox.priorities.erase(next->first.second);
      outbox.waiting.erase(next);
    }
  }

  bool TestBulk() {
    int count = 0;
    finished_.resize(requests_.size());
    Check(MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &count, finished_.data(),
                       MPI_STATUSES_IGNORE),
          "MPI_Testsome");
    if (count == MPI_UNDEFINED || count == 0) return false;
    // Take the finished ones out before calling back: a completion may start new transfers.
    std::vector<Completion> done;
    std::set<int> sent_to;
    std::sort(finished_.begin(), finished_.begin() + count);
    for (int i = 0; i < count; ++i) {
      const Piece& piece = pieces_[finished_[i]];
      Transfer& transfer = *piece.transfer;
      if (transfer.is_sent) {
        outboxes_[transfer.peer].bytes_under_way -= piece.bytes;
        --outboxes_[transfer.peer].pieces_under_way;
        sent_to.insert(transfer.peer);
      } else {
        Heard(transfer.peer);
      }
      if (++transfer.done_pieces == transfer.pieces) done.push_back(std::move(transfer.done));
    }
    size_t kept = 0;
    for (size_t i = 0, next = 0; i < requests_.size(); ++i) {
      if (next < static_cast<size_t>(count) && static_cast<size_t>(finished_[next]) == i) {
        ++next;
        continue;
      }
      if (kept < i) {
        requests_[kept] = requests_[i];
        pieces_[kept] = std::move(pieces_[i]);
      }
      ++kept;
    }
    requests_.resize(kept);
    pieces_.resize(kept);
    for (Completion& completion : done) completion();
    for (int peer : sent_to) SendPieces(peer);  // after what these have sent, which may be more urgent
    return true;
  }

  size_t piece_bytes_;
  const bool shares_memory_;
  bool owns_mpi_ = false;  // whether we started MPI, and so finalize it
  MPI_Comm packets_, bulk_;
  int rank_ = 0, size_ = 1;
  std::vector<int> nodes_;
  std::vector<char> ring_[kRingSize];
  MPI_Request ring_requests_[kRingSize];
  int head_ = 0;
  std::deque<Outgoing> outgoing_;
  std::vector<TagOrder<Receive>> orders_;  // by peer
  std::vector<Outbox> outboxes_;           // by peer
  std::vector<MPI_Request> requests_;      // of pieces
  std::vector<Piece> pieces_;              // of each request
  std::vector<int> finished_;
};

}  // namespace

std::unique_ptr<Transport> MakeMpiTransport(size_t piece_bytes, bool shares_memory) {
  return std::make_unique<MpiTransport>(piece_bytes, shares_memory);
}

}  // namespace poseidon

// Starts MPI on the calling thread and returns its transport; on failure returns null and writes
// the reason.
extern "C" __attribute__((visibility("default"))) poseidon::Transport* poseidon_open_mpi_transport(char* error,
                                                                                                   size_t error_bytes) {
  try {
    return poseidon::MakeMpiTransport(poseidon::kMpiPieceBytes, /*shares_memory=*/true).release();
  } catch (const std::exception& e) {
    std::strncpy(error, e.what(), error_bytes - 1);
    error[error_bytes - 1] = '\0';
    return nullptr;
  }
}
