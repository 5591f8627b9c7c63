// Exchanges that give every rank what all ranks have: the factors of a gradient, or the rows of PoseidonAllGather,
// which travel as factors of a single part. Of a part that is divided, each rank gets only its own columns.
//
// H. Zhang et al., USENIX ATC 2017, section 3.2: the gradient of a dense layer is U^T V, so workers
// may send each other U [K, M] and V [K, N] instead of the M x N matrix. Here the factors of all
// ranks are kept in rank order, and K may differ from rank to rank. Ranks of one node get the factors of
// another node's from one of them, see routes.h. Those of each other they get from GPU to GPU where they can, in pieces
// of whole rows, see gpu_links.h; everything else goes through the host, and so do rows that are longer than a piece.
//
// Half factors: of the wider factor, each rank gives each server the server's columns, straight from rank to rank. The
// server makes those columns of the gradient, and a second exchange of the same site gives them to all ranks. It
// follows only where the first was complete, which it was on all ranks or on none. They count as one.
//
// Ranks can have different graphs: one may not have been rewritten, or use the factors in another way. All ranks
// follow one rule, so that they exchange a site alike in every step. A site is *tried* as factors or not, which all
// ranks know; at first it is.
//   * While it is tried, a rank that has factors sends them, with their form. A rank that has none
//     says so with a refusal, to all. If one refuses or forms differ, the exchange is complete on
//     no rank, and all send the dense gradient in the same step.
//   * Each part of a dense gradient carries the form of the factors that its rank has instead. The server compares
//     forms, so the sum tells all ranks whether to try factors in the next step.
// Only a step in which factors are tried and refused costs extra messages.

#ifndef POSEIDON_COMMUNICATOR_GATHER_EXCHANGES_H_
#define POSEIDON_COMMUNICATOR_GATHER_EXCHANGES_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "block_memory.h"
#include "exchange.h"
#include "gpu_links.h"
#include "routes.h"
#include "sender.h"
#include "staging.h"
#include "transport.h"
#include "zeros.h"

namespace poseidon {

// A row-major matrix of this rank. It may have no rows. It travels without its zeros if that was made of it: the
// `dtype` of its frame is `element_bytes` then, and 0 for a matrix as it is. Each rank decides that for itself.
struct FactorPart {
  const void* data;
  size_t bytes;
  size_t row_bytes;  // the same on all ranks; of a divided part, what all ranks expect this one to have
  size_t element_bytes = 0;
  WithoutZeros without_zeros = {};
  PinnedMemory fetched = {};  // `data` in the host's memory, if that is on a GPU and somebody gets it from there
  bool is_on_host = false;    // though other parts are on a GPU

  // Of a divided part, what each rank gets, by rank; what precedes is then what this rank keeps.
  struct Columns {
    const void* data;
    size_t bytes;
    size_t row_bytes;  // of that rank's columns
  };
  std::vector<Columns> columns = {};

  const void* sent_data() const {
    return without_zeros ? without_zeros.data.get() : fetched ? fetched.get() : static_cast<const char*>(data);
  }
  size_t sent_bytes() const { return without_zeros ? without_zeros.bytes : bytes; }
};

// What a rank gives: U, V and whatever else belongs to one site; or its rows.
struct Factors {
  std::string site;
  std::vector<FactorPart> parts;
  std::string form;  // how the rank will use them
  Group group;
  const char* row = "calls";  // same as in Exchange
  bool is_blocking = false;
  bool is_of_step = true;
  bool is_first_half = false;              // a second one completes it, and is counted and shown for both
  std::optional<Clock::time_point> since;  // of a second half: when the first was submitted
  int priority = 0;                        // same as in Exchange
  std::shared_ptr<OnDevice> on_device;     // the same; nothing comes back to it
};

// What it gets.
struct GatheredFactors {
  struct Rows {
    std::shared_ptr<const char[]> owner;  // null: these are the caller's own
    const char* data = nullptr;
    size_t bytes = 0;          // of the rows
    size_t element_bytes = 0;  // if `data` has no zeros
    bool is_on_gpu = false;    // as this rank's own are

    void CopyTo(char* to) const;  // from the host's memory
  };
  // False when not all ranks have factors of the same form: then the site must travel dense.
  bool is_complete = false;
  int refused_by = -1;                   // a rank that has none, or of another form; -1 if factors were not tried
  std::vector<std::vector<Rows>> parts;  // by part; in the order of ranks, of each of which there may be several
};

// Called on the progress thread, like Done.
using FactorsDone = std::function<void(const std::string& error, GatheredFactors gathered)>;

// What a rank says of its factors when it sends the dense gradient: a digest of their form, 0 if it
// has none.
using DenseForm = uint32_t;

class GatherExchanges {
 public:
  // Returns memory for what is received; null if there is no more.
  using Allocate = std::function<std::shared_ptr<char[]>(size_t bytes)>;

  // What is copied from a GPU is cut into pieces of up to `piece_bytes`, the most that `links` take. `fail` ends the
  // job for a reason, and calls Fail before it returns.
  GatherExchanges(Transport* transport, size_t piece_bytes, const Routes* routes, Sender* sender, GpuLinks* links,
                  Statistics* statistics, Allocate allocate, std::function<void(const std::string& reason)> fail)
      : transport_(transport),
        piece_bytes_(piece_bytes),
        routes_(routes),
        sender_(sender),
        links_(links),
        statistics_(statistics),
        allocate_(std::move(allocate)),
        fail_(std::move(fail)) {}

  // Gives this rank's factors to all others; `site` and `form` are digests, `staging` is null unless they are on a GPU.
  // Returns how another rank's disagree with them, or an empty text, as OnFactors does.
  std::string Start(Factors factors, FactorsDone done, uint64_t site, uint64_t form, SiteStatistics& statistics,
                    Clock::time_point submitted, Staging* staging);

  // Takes one part of a rank's factors from `peer`, or some rows of it; may come before this rank's own.
  std::string OnFactors(int peer, const FrameHeader& header, const char* payload);
  void OnRefusal(int peer, const FrameHeader& header);

  // This rank sends the dense gradient of the site: after it has found its factors incomplete, or
  // because it has none; the others may be told so. Returns what it says of them.
  DenseForm StartDense(uint64_t site);

  // The dense gradient was summed; `common` is the form that all ranks have, 0 if forms differ.
  void FinishDense(uint64_t site, DenseForm common);

  // The exchange that has waited longer than `seconds`, and the ranks that it waits for; none if it waits for the GPU.
  struct Overdue {
    std::string site;
    std::vector<int> ranks;
  };
  std::optional<Overdue> FindOverdue(Clock::time_point now, double seconds) const;

  // A rank that has left without giving its factors, to an exchange of this rank's.
  struct LeftBehind {
    int missing;
    std::string site;
  };
  std::optional<LeftBehind> FindLeftBehind(const std::vector<char>& has_left) const;

  // Ends all exchanges with an error.
  void Fail(const std::string& reason);

  bool is_waiting() const { return num_active_ > 0 && !has_failed_; }

  // Whether this rank still receives factors that another rank may be waiting for, or still passes them on.
  bool is_passing_on() const { return num_passing_on_ > 0 && !has_failed_; }

 private:
  using Key = std::pair<uint64_t, uint64_t>;  // site and step

  // A part of another rank's factors.
  struct Arrival {
    FrameHeader header = {};                  // the first one
    std::vector<GatheredFactors::Rows> rows;  // one for each header
    size_t sent_bytes = 0;
    size_t pending = 0;         // of the rows, those that are not here yet
    bool is_announced = false;  // up to the last rows

    bool is_ready() const { return is_announced && pending == 0; }
    bool IsContinuedBy(const FrameHeader& next) const {
      return header.is_in_window() && next.is_in_window() && !is_announced && next.count == header.count &&
             next.offset == header.offset;
    }
  };
  // This rank's part in one exchange.
  struct Own {
    Factors factors;
    FactorsDone done;
    uint64_t form;
    SiteStatistics* statistics;
    Clock::time_point start;
    Staging* staging;
    size_t pending = 0;  // bulk sends of these, and copies of these and of other ranks'
  };
  struct State {
    std::shared_ptr<Own> own;                                               // null until this rank starts
    std::map<std::pair<int, uint32_t>, std::shared_ptr<Arrival>> arrivals;  // by rank and part
    int refused_by = -1;
    PartTimes times;
  };
  struct Site {
    std::string name;
    int priority = 0;
    uint64_t step = 0;  // how often it was synchronised, as factors or dense
    bool is_tried = true;
    DenseForm form = 0;  // of this rank's factors in this step, when they could not be exchanged
  };

  void SendPart(const Key& key, const std::shared_ptr<Own>& own, size_t part);
  FrameHeader HeaderOf(const Key& key, const Own& own, size_t part) const;
  void Send(const Key& key, const std::shared_ptr<Own>& own, size_t part, const std::vector<int>& peers);
  void SendColumns(const Key& key, const std::shared_ptr<Own>& own, size_t part);
  void SendOne(const Key& key, const std::shared_ptr<Own>& own, int peer, const FrameHeader& header, const void* data);
  std::vector<int> PassesOnTo(const FrameHeader& header) const;
  void FetchAndSend(const Key& key, const std::shared_ptr<Own>& own, size_t part, const std::vector<int>& peers);
  void SendByLink(const Key& key, const std::shared_ptr<Own>& own, size_t part, const std::vector<int>& peers);
  void HasLeft(const Key& key, const std::shared_ptr<Own>& own);
  bool HasGiven(const State& state, int rank) const;
  bool MoveToHost(const Key& key, const State& state);
  static bool IsOnGpu(const Own& own, size_t part) { return own.staging && !own.factors.parts[part].is_on_host; }
  PinnedMemory TakeMemory(size_t bytes, const std::string& site);
  GpuLinks::Errand ErrandOf(uint64_t site);
  void PassOn(const std::shared_ptr<Arrival>& arrival);
  bool IsOver(const Key& key);
  std::string CheckArrivals(const State& state) const;
  int OtherForm(const State& state) const;
  std::vector<int> Missing(const State& state) const;
  void FinishIfOver(const Key& key);

  Transport* const transport_;
  const size_t piece_bytes_;
  const Routes* const routes_;
  Sender* const sender_;
  GpuLinks* const links_;
  Statistics* const statistics_;
  const Allocate allocate_;
  const std::function<void(const std::string&)> fail_;
  std::map<Key, State> states_;
  std::unordered_map<uint64_t, Site> sites_;
  size_t num_active_ = 0, num_passing_on_ = 0;
  bool has_failed_ = false;
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_GATHER_EXCHANGES_H_
