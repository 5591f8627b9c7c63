// Gives all ranks the factors of all: sends this rank's, collects and passes on those of others, and falls back to
// the dense gradient when not all ranks have factors of the same form.
//
// Tests: tests/native/factors_test.cc, tests/communicator/test_factors.py.

#include "factors.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>
#include <sstream>
#include <utility>

#include "text.h"

namespace poseidon {

void GatheredFactors::Rows::CopyTo(char* to) const {
  if (element_bytes > 0) {
    PutBackZeros(data, element_bytes, to);
  } else if (bytes > 0) {
    std::memcpy(to, data, bytes);
  }
}

std::string FactorBroadcasting::Start(Factors factors, FactorsDone done, uint64_t site, uint64_t form,
                                      SiteStatistics& statistics, Clock::time_point submitted) {
  Site& state_of_site = sites_[site];
  state_of_site.form = static_cast<DenseForm>(form ^ (form >> 32)) | 1;
  if (!state_of_site.is_tried) {
    done("", {});
    return "";
  }
  const Key key{site, state_of_site.step};
  State& state = states_[key];
  if (state.own) {
    done("'" + factors.site + "' is already being exchanged: one site cannot be in flight twice.", {});
    return "";
  }
  auto own = std::make_shared<Own>();
  own->factors = std::move(factors);
  own->done = std::move(done);
  own->form = form;
  own->statistics = &statistics;
  own->start = submitted;
  state.own = own;
  state.last.Arrived(transport_->rank(), Clock::now());
  ++num_active_;
  std::string disagreement = CheckArrivals(state);
  if (!disagreement.empty()) return disagreement;
  if (state.refused_by < 0) {
    for (int peer : routes_->Receivers()) SendTo(peer, key, own);
  }
  FinishIfOver(key);
  return "";
}

void FactorBroadcasting::SendTo(int peer, const Key& key, const std::shared_ptr<Own>& own) {
  for (size_t part = 0; part < own->factors.parts.size(); ++part) {
    const FactorPart& factor = own->factors.parts[part];
    FrameHeader header = {};
    header.kind = FrameKind::kFactors;
    header.scheme = Scheme::kFactorBroadcasting;
    header.root = transport_->rank();
    header.site = key.first;
    header.step = key.second;
    header.count = own->form;
    header.offset = factor.row_bytes;
    header.length = factor.sent_bytes();
    header.dtype = factor.without_zeros ? static_cast<uint8_t>(factor.element_bytes) : 0;
    header.detail = static_cast<uint32_t>(part);
    own->statistics->sent_bytes += header.length;
    if (!routes_->IsLocal(peer)) own->statistics->network_bytes += header.length;
    ++own->sending;
    const bool is_bulk = sender_->Send(peer, header, factor.sent_data(), [this, key, own] {
      --own->sending;
      FinishIfOver(key);
    });
    if (!is_bulk) --own->sending;
  }
}

std::string FactorBroadcasting::OnFactors(int peer, const FrameHeader& header, const char* payload) {
  const Key key{header.site, header.step};
  auto arrival = std::make_shared<Arrival>();
  arrival->header = header;
  arrival->data = allocate_(header.length);
  if (!arrival->data) {
    std::ostringstream text;
    text << "Rank " << header.root << " gives factors of " << header.length << " bytes, for which rank "
         << transport_->rank() << " has no memory: train with smaller batches, or with policy='ps'.";
    return text.str();
  }
  if (!IsOver(key)) {
    State& state = states_[key];
    if (!state.arrivals.emplace(std::make_pair(header.root, header.detail), arrival).second) {
      return Twice(peer, header, "factors,");
    }
    std::string disagreement = CheckArrivals(state);
    if (!disagreement.empty()) return disagreement;
  }
  ++num_passing_on_;
  auto take = [this, peer, key, arrival] {
    const FrameHeader& header = arrival->header;
    arrival->bytes = header.length;
    if (header.dtype != 0) {
      const auto bytes = MatrixBytes(arrival->data.get(), header.length, header.dtype);
      if (!bytes || *bytes % header.offset != 0) {
        return fail_(Malformed(peer, Text("factors of rank ", header.root, " in ", header.length,
                                          " bytes that hold no rows of ", header.offset, " without their zeros")));
      }
      arrival->bytes = *bytes;
    }
    arrival->is_ready = true;
    if (auto found = states_.find(key); found != states_.end()) {
      found->second.last.Arrived(arrival->header.root, Clock::now());
    }
    PassOn(arrival);
    --num_passing_on_;
    FinishIfOver(key);
  };
  if (header.is_bulk()) {  // received even if unused: the sender waits until it has left
    transport_->ReceiveBulk(peer, header.tag, arrival->data.get(), header.length, take);
    return "";
  }
  if (header.length > 0) std::memcpy(arrival->data.get(), payload, header.length);
  take();
  return "";
}

// Factors that are unused here are passed on too: they tell the others to send the dense gradient as well.
void FactorBroadcasting::PassOn(const std::shared_ptr<Arrival>& arrival) {
  if (has_failed_) return;
  for (int peer : routes_->PassesOnTo(arrival->header.root)) {
    const bool is_bulk =
        sender_->Send(peer, arrival->header, arrival->data.get(), [this, arrival] { --num_passing_on_; });
    if (is_bulk) ++num_passing_on_;
  }
}

std::string FactorBroadcasting::CheckArrivals(const State& state) const {
  if (!state.own) return "";
  const Factors& mine = state.own->factors;
  for (const auto& [from, arrival] : state.arrivals) {
    const FrameHeader& theirs = arrival->header;
    if (theirs.count != state.own->form) continue;  // no part of a sum, see OtherForm
    const bool is_known = theirs.detail < mine.parts.size();
    const size_t row_bytes = is_known ? mine.parts[theirs.detail].row_bytes : 0;
    if (is_known && theirs.offset == row_bytes) continue;
    std::ostringstream text;
    text << "Ranks disagree about the factors of '" << mine.site << "': rank " << from.first << " sends rows of "
         << theirs.offset << " bytes as part " << theirs.detail << ", rank " << transport_->rank() << " of "
         << row_bytes << ". Build the same model on all ranks.";
    return text.str();
  }
  return "";
}

// Returns a rank whose form is not this rank's, or -1. If forms differ, every rank finds one.
int FactorBroadcasting::OtherForm(const State& state) const {
  for (const auto& [from, arrival] : state.arrivals) {
    if (arrival->header.count != state.own->form) return from.first;
  }
  return -1;
}

DenseForm FactorBroadcasting::StartDense(uint64_t site) {
  Site& state = sites_[site];
  if (state.is_tried && state.form == 0) {  // the others wait for factors
    FrameHeader header = {};
    header.kind = FrameKind::kRefusal;
    header.scheme = Scheme::kFactorBroadcasting;
    header.site = site;
    header.step = state.step;
    sender_->ToOthers(header);
  }
  states_.erase({site, state.step});  // what has arrived is unused
  ++state.step;
  return std::exchange(state.form, 0);
}

void FactorBroadcasting::FinishDense(uint64_t site, DenseForm common) { sites_[site].is_tried = common != 0; }

void FactorBroadcasting::OnRefusal(int peer, const FrameHeader& header) {
  const Key key{header.site, header.step};
  if (IsOver(key)) return;
  states_[key].refused_by = peer;
  FinishIfOver(key);
}

// Whether this rank has synchronised the site in that step already.
bool FactorBroadcasting::IsOver(const Key& key) { return key.second < sites_[key.first].step; }

std::vector<int> FactorBroadcasting::Missing(const State& state) const {
  std::vector<int> missing;
  for (int peer = 0; peer < transport_->size(); ++peer) {
    if (peer == transport_->rank()) continue;
    for (size_t part = 0; part < state.own->factors.parts.size(); ++part) {
      auto found = state.arrivals.find({peer, part});
      if (found == state.arrivals.end() || !found->second->is_ready) {
        missing.push_back(peer);
        break;
      }
      if (found->second->header.count != state.own->form) break;  // its other parts are unused
    }
  }
  return missing;
}

void FactorBroadcasting::FinishIfOver(const Key& key) {
  auto found = states_.find(key);
  if (found == states_.end() || has_failed_) return;
  const std::shared_ptr<Own> own = found->second.own;
  if (!own || own->sending > 0) return;
  int refused_by = found->second.refused_by;
  if (refused_by < 0) {
    if (!Missing(found->second).empty()) return;
    refused_by = OtherForm(found->second);
  }
  const State state = std::move(found->second);
  states_.erase(found);
  --num_active_;

  GatheredFactors gathered;
  gathered.is_complete = refused_by < 0;
  gathered.refused_by = refused_by;
  for (size_t part = 0; gathered.is_complete && part < own->factors.parts.size(); ++part) {
    std::vector<GatheredFactors::Rows>& rows = gathered.parts.emplace_back();
    for (int rank = 0; rank < transport_->size(); ++rank) {
      if (rank == transport_->rank()) {
        const FactorPart& mine = own->factors.parts[part];
        const bool is_on_gpu = own->factors.on_device && !mine.is_on_host;
        rows.push_back({nullptr, static_cast<const char*>(mine.data), mine.bytes, 0, is_on_gpu});
        own->statistics->short_factor_bytes += mine.sent_bytes();
      } else {
        const std::shared_ptr<Arrival>& arrival = state.arrivals.at({rank, part});
        rows.push_back({arrival->data, arrival->data.get(), arrival->bytes, arrival->header.dtype});
        own->statistics->short_factor_bytes += arrival->header.length;
        own->statistics->received_bytes += arrival->header.length;
        own->statistics->sent_bytes += arrival->header.length * routes_->PassesOnTo(rank).size();
      }
      own->statistics->factor_bytes += rows.back().bytes;
    }
  }
  if (gathered.is_complete) {
    statistics_->Waited(state.last);
    Site& site = sites_[key.first];
    ++site.step;
    site.form = 0;
    own->statistics->count += 1;
    own->statistics->nanoseconds +=
        std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - own->start).count();
  }
  own->done("", std::move(gathered));
}

std::optional<FactorBroadcasting::Overdue> FactorBroadcasting::FindOverdue(Clock::time_point now,
                                                                           double seconds) const {
  for (const auto& [key, state] : states_) {
    if (!state.own || Seconds(now - state.own->start) < seconds) continue;
    std::vector<int> missing = Missing(state), direct;
    std::copy_if(missing.begin(), missing.end(), std::back_inserter(direct),
                 [this](int rank) { return routes_->IsDirect(rank); });
    if (!direct.empty()) return Overdue{state.own->factors.site, std::move(direct)};
    if (Seconds(now - state.own->start) < (1 + kPatience) * seconds) continue;
    if (missing.empty()) {  // all have sent theirs; one of them does not receive ours
      for (int rank = 0; rank < transport_->size(); ++rank) {
        if (rank != transport_->rank()) missing.push_back(rank);
      }
    }
    return Overdue{state.own->factors.site, std::move(missing)};
  }
  return std::nullopt;
}

std::optional<FactorBroadcasting::LeftBehind> FactorBroadcasting::FindLeftBehind(
    const std::vector<char>& has_left) const {
  for (const auto& [key, state] : states_) {
    if (!state.own || state.refused_by >= 0) continue;
    for (int peer = 0; peer < transport_->size(); ++peer) {
      // Packets keep their order: factors that were not announced before the goodbye never will be. If others pass on
      // a rank's factors, they notice it.
      if (has_left[peer] && peer != transport_->rank() && routes_->IsDirect(peer) && !state.arrivals.count({peer, 0})) {
        return LeftBehind{peer, state.own->factors.site};
      }
    }
  }
  return std::nullopt;
}

void FactorBroadcasting::Fail(const std::string& reason) {
  has_failed_ = true;  // the states stay: the network may still write to their memory
  for (auto& [key, state] : states_) {
    if (state.own) state.own->done(reason, {});
  }
}

}  // namespace poseidon
