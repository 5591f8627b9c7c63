// Sufficient factor broadcasting: every rank gets the factors of all ranks.
//
// H. Zhang et al., USENIX ATC 2017, section 3.2: the gradient of a dense layer is U^T V, so workers
// may send each other U [K, M] and V [K, N] instead of the M x N matrix. Here the factors of all
// ranks are kept in rank order, and K may differ from rank to rank.
//
// A rank can only take part if its graph was rewritten. One whose graph was not sends the dense
// gradient, and first refuses the factors of that site, once and for good: all ranks then find
// their exchange incomplete and send the dense gradient too. So whatever each rank's graph looks
// like, all ranks exchange a site in the same way in the same step. The same goes for ranks that would
// make different things of the factors: all see that their forms differ.

#ifndef POSEIDON_COMMUNICATOR_FACTORS_H_
#define POSEIDON_COMMUNICATOR_FACTORS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "exchange.h"
#include "sender.h"
#include "transport.h"

namespace poseidon {

// A matrix of this rank's, whose rows follow each other in memory. It may have no rows.
struct FactorPart {
  const void* data;
  size_t bytes;
  size_t row_bytes;  // the same on all ranks
};

// What a rank gives: U, V and whatever else belongs to one site.
struct Factors {
  std::string site;
  std::vector<FactorPart> parts;
  std::string form;  // what the rank will make of them
};

// What it gets.
struct GatheredFactors {
  struct Rows {
    std::shared_ptr<const char[]> owner;  // null: these are the caller's own
    const char* data = nullptr;
    size_t bytes = 0;
  };
  // False when a rank has refused, or has another form: then the site has to travel dense.
  bool is_complete = false;
  int refused_by = -1;  // the rank that has refused, or whose form is not this rank's
  std::vector<std::vector<Rows>> parts;  // by part, then by rank
};

// Called on the progress thread, like Done.
using FactorsDone = std::function<void(const std::string& error, GatheredFactors gathered)>;

class FactorBroadcasting {
 public:
  FactorBroadcasting(Transport* transport, Sender* sender) : transport_(transport), sender_(sender) {}

  // Sends this rank's factors to all others; `site` and `form` are digests. Returns how another rank's disagree with them, or an
  // empty text, as OnFactors does.
  std::string Start(Factors factors, FactorsDone done, uint64_t site, uint64_t form,
                    SiteStatistics& statistics, Clock::time_point submitted);

  // Takes one part of `peer`'s factors; may come before this rank's own.
  std::string OnFactors(int peer, const FrameHeader& header, const char* payload);

  // From now on this rank synchronises the site dense.
  void Refuse(uint64_t site);
  void OnRefusal(int peer, const FrameHeader& header);

  // The exchange that has waited longer than `seconds`, and the ranks that it waits for.
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

 private:
  using Key = std::pair<uint64_t, uint64_t>;  // site and step

  struct Arrival {
    FrameHeader header = {};
    std::shared_ptr<char[]> data;
    bool is_ready = false;
  };
  // This rank's part in one exchange.
  struct Own {
    Factors factors;
    FactorsDone done;
    uint64_t form;
    SiteStatistics* statistics;
    Clock::time_point start;
    size_t sending = 0;  // bulk sends that still read the caller's memory
  };
  struct State {
    std::shared_ptr<Own> own;  // null until this rank starts
    std::map<std::pair<int, uint64_t>, std::shared_ptr<Arrival>> arrivals;  // by peer and part
  };
  struct Refusal {
    uint64_t step;
    int rank;
  };

  void SendTo(int peer, const Key& key, const std::shared_ptr<Own>& own);
  const Refusal* RefusalOf(const Key& key) const;
  std::string CheckArrivals(const State& state) const;
  int OtherForm(const State& state) const;
  std::vector<int> Missing(const State& state) const;
  void FinishIfOver(const Key& key);

  Transport* const transport_;
  Sender* const sender_;
  std::map<Key, State> states_;
  std::unordered_map<uint64_t, uint64_t> steps_;    // by site: how often this rank has started it
  std::unordered_map<uint64_t, Refusal> refusals_;  // by site
  size_t num_active_ = 0;
  bool has_failed_ = false;
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_FACTORS_H_
